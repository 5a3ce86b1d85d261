"""The page: what others read of it, from outside and at any moment, and what becomes of it when its process is gone."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.profiling import page as layout
from paceline.profiling import stages
from paceline.profiling.page import (
    CONTROL,
    SHARED_MEMORY,
    Control,
    Page,
    PageError,
    close_page,
    open_page,
    pages_in,
    read_page,
    write_word,
)
from tests.unit.profiling.conftest import Clock

ROOT = Path(__file__).parents[3]
PATIENCE_S = 30.0

# A process with a page, switched on, whose thread `worker` hammers nested stages until a line comes in; then it prints
# how many runs it made. `walk`: each run takes some milliseconds, so that readers find it there: of one that hammers
# they take the moments between runs, as others are torn. `sit`: it sits in a stage, in a call that holds no bytecode.
CHILD = """if True:
    import sys, threading, time
    from pathlib import Path
    from paceline.profiling import page as layout, stages
    page = stages.open_run(Path(sys.argv[1]))
    page.words[layout.CONTROL] = layout.Control(1, sys.argv[2] != "sit").word
    runs, is_over = 0, threading.Event()
    def work():
        global runs
        with stages.as_role("target-0"):
            while not is_over.is_set():
                with stages.MODEL_FORWARD:
                    with stages.PACK_HIDDEN:
                        if sys.argv[2] == "walk":
                            time.sleep(0.003)
                runs += 1
                if runs % 100 == 0:
                    time.sleep(0.0005)  # now and then a copy comes out whole
    def sit():
        with stages.as_role("target-0"), stages.PUT_WAIT:
            is_over.wait()
    thread = threading.Thread(target=sit if sys.argv[2] == "sit" else work, name="worker", daemon=True)
    thread.start()
    print("ready", flush=True)
    sys.stdin.readline()
    is_over.set()
    thread.join()
    print(runs, flush=True)
    sys.stdin.readline()
"""


def wait_until(condition: Callable[[], Any]) -> Any:
    """What the condition gives once it is true-like."""
    deadline = time.perf_counter() + PATIENCE_S
    while not (found := condition()):
        assert time.perf_counter() < deadline, "it never came"
        time.sleep(0.005)
    return found


class Child:
    """Another process with a page in `folder`."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), kind], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == b"ready\n"
        (self.path,) = (path for path in pages_in(folder) if f"-{self.process.pid}-" in path.name)

    def finish(self) -> int:
        """Have it stop; the runs that it made. It stays until `end`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child(folder: Path) -> Iterator[Callable[[str], Child]]:
    started: list[Child] = []

    def start(kind: str) -> Child:
        started.append(Child(folder, kind))
        return started[-1]

    yield start
    for each in started:
        each.end()
        each.path.resolve().unlink(missing_ok=True)


def thread_of(path: Path, name: str = "worker") -> layout.ThreadSnapshot:
    (found,) = (thread for thread in read_page(path).threads if thread.thread == name)
    return found


def test_a_page_is_private_and_linked_to_from_the_run(page: Page, folder: Path) -> None:
    """The file lies in memory, for this user alone, and the run folder holds a link to it."""
    (link,) = pages_in(folder)
    assert link.is_symlink() and link.resolve() == page.path and page.path.parent == SHARED_MEMORY
    assert page.path.stat().st_mode & 0o777 == 0o600
    found = read_page(link)
    assert found.pid == os.getpid() and found.is_running and not found.control.is_on
    assert found.stage_names[stages.FORWARD.number] == "forward"


def test_reading_from_outside_and_inside_is_the_same(page: Page, folder: Path) -> None:
    """The file says what the process's own snapshot says: threads, counts, gauges."""
    page.words[CONTROL] = Control(1, True).word
    with stages.as_role("drafter-0"):
        stages.next_batch(7)
        with stages.FORWARD, stages.LAYERS:
            pass
        stages.set_gauge("tokens", 123)
        with stages.BACKWARD:
            own, other = page.snapshot(), read_page(pages_in(folder)[0])
    assert other.gauges == own.gauges and other.gauges["tokens"] == 123
    ours, theirs = own.threads[-1], other.threads[-1]
    assert (theirs.role, theirs.thread, theirs.batch, theirs.num_batches) == ("drafter-0", "MainThread", 7, 1)
    assert theirs.stages == ours.stages and theirs.stages["layers"].count == 1
    assert theirs.inner == ours.inner == theirs.outer and theirs.inner.stage == "backward"


def test_readers_never_see_more_than_was_written(child: Callable[[str], Child]) -> None:
    """While a thread counts as fast as it can, every copy is of one moment: counts only grow, histograms hold as many
    runs as were counted, inner stages are in step with outer ones, and the last copy has exactly what was run."""
    writer, last, num_whole = child("hammer"), 0, 0
    wait_until(lambda: thread_of(writer.path).stages["model_forward"].count)
    deadline = time.perf_counter() + PATIENCE_S
    while num_whole < 60:
        assert time.perf_counter() < deadline
        thread = thread_of(writer.path)
        outer, inner = thread.stages["model_forward"], thread.stages["pack_hidden"]
        assert outer.count >= last
        if not thread.is_torn:
            num_whole += 1
            assert sum(outer.histogram) == outer.count and sum(inner.histogram) == inner.count
            assert outer.count <= inner.count <= outer.count + 1
            assert inner.total_ns >= outer.total_ns - outer.self_ns and thread.top_ns == outer.total_ns
        last = outer.count
    runs = writer.finish()
    thread = thread_of(writer.path)
    assert last <= runs == thread.stages["model_forward"].count == thread.stages["pack_hidden"].count
    assert not thread.is_torn and not thread.is_live


def test_two_readers_at_once_and_one_that_is_killed(child: Callable[[str], Child]) -> None:
    """Readers leave no trace: the writer counts on while several read, and after one was killed in the middle of it."""
    writer = child("hammer")
    code = (
        f"from paceline.profiling.page import *; print(flush=True)\nwhile True: read_page(Path({str(writer.path)!r}))"
    )
    reader = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert reader.stdout is not None and reader.stdout.readline()
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda: counts.append(thread_of(writer.path).stages["pack_hidden"].count))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    reader.kill()
    reader.communicate()
    assert len(counts) == 2
    wait_until(lambda: thread_of(writer.path).stages["pack_hidden"].count > max(counts))
    assert writer.finish() == thread_of(writer.path).stages["pack_hidden"].count


def test_a_process_that_is_stopped_or_killed_still_shows_where_it_is(
    child: Callable[[str], Child], folder: Path
) -> None:
    """Stopped by SIGSTOP, or in one long call, it shows each thread's stage; once killed its page says so and the next
    process to come removes it, from memory too."""
    stuck = child("sit")
    wait_until(lambda: thread_of(stuck.path).inner)
    os.kill(stuck.process.pid, signal.SIGSTOP)
    thread = thread_of(stuck.path)
    assert thread.inner is not None and thread.inner.stage == "put_wait" == thread.outer.stage
    assert thread.inner.since_ns < time.monotonic_ns() and thread.is_live and thread.role == "target-0"
    assert thread.stages["put_wait"].count == 0  # nobody asked for counts
    write_word(stuck.path, CONTROL, Control(3, True, 5.0).word)
    assert read_page(stuck.path).control == Control(3, True, 5.0) and read_page(stuck.path).is_running
    os.kill(stuck.process.pid, signal.SIGKILL)
    stuck.process.wait()
    target = stuck.path.resolve()
    assert not read_page(stuck.path).is_running and thread_of(stuck.path).inner == thread.inner
    page = open_page(folder, ("a",))
    try:
        assert not target.exists() and pages_in(folder) == [folder / page.path.name]
    finally:
        close_page(page, folder)
    assert pages_in(folder) == [] and not page.path.exists()


def test_a_switch_from_outside_needs_nothing_of_the_process(child: Callable[[str], Child]) -> None:
    """The control word that another process writes takes effect at the next stage, whatever the main thread is at."""
    writer = child("walk")
    write_word(writer.path, CONTROL, Control(2, False).word)
    changed = read_page(writer.path)
    assert 0 < changed.control_since_ns <= changed.taken_ns
    first = wait_until(lambda: thread_of(writer.path).inner)
    wait_until(lambda: (now := thread_of(writer.path).inner) and now.since_ns > first.since_ns)
    off = thread_of(writer.path).stages["pack_hidden"].count
    for _ in range(20):
        assert thread_of(writer.path).stages["pack_hidden"].count == off
    write_word(writer.path, CONTROL, Control(3, True).word)
    wait_until(lambda: thread_of(writer.path).stages["pack_hidden"].count > off)


def test_another_process_of_the_same_number_is_not_taken_for_it(folder: Path) -> None:
    """A page whose process has died counts as dead though its number was given to another; it is then removed."""
    page = open_page(folder, ("a",))
    assert read_page(page.path).is_running
    page.words[layout._STARTED] += 1
    assert not read_page(page.path).is_running
    other = open_page(folder, ("a",))
    assert pages_in(folder) == [folder / other.path.name] and not page.path.exists()
    other.words[layout._STARTED] -= 1
    other.words[layout._BOOT] += 1  # the same number and start, but before the machine was started again
    assert not read_page(other.path).is_running
    close_page(other, folder)


def test_pages_of_two_processes_lie_side_by_side(child: Callable[[str], Child], page: Page, folder: Path) -> None:
    """Each process has a page of its own in the run folder; opening one leaves those of live processes alone."""
    other = child("sit")
    assert {read_page(path).pid for path in pages_in(folder)} == {os.getpid(), other.process.pid}


def test_pages_that_cannot_be_read_yet_are_left_to_their_process(folder: Path) -> None:
    """One that is being made, or of another version, stays while its process lives, and goes when that is gone."""
    page = open_page(folder, ("a",))
    page.words[layout._LAYOUT] = 99
    link = folder / page.path.name
    dead = folder / "paceline-0-1-1-5.page"  # process 1 was not started in clock tick 1
    dead.symlink_to(SHARED_MEMORY / "gone.page")
    other = open_page(folder, ("a",))
    assert link.exists() and not dead.is_symlink()
    with pytest.raises(PageError, match="has layout 99, this version reads 1: use the paceline that runs the training"):
        read_page(link)
    close_page(page, folder)
    close_page(other, folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is no profile page"),
        (b"x" * 100_000, "is no profile page"),
        (1000, "is no profile page"),
        (layout.WORD * (layout._BLOCKS + 5), "cut short"),
        (layout.WORD * (layout._BLOCKS + layout.BLOCK_WORDS + 5), "cut short"),
    ],
)
def test_files_that_are_no_pages_say_so(page: Page, tmp_path: Path, content: bytes | int | None, message: str) -> None:
    """Missing, empty, foreign and truncated files are named for what they are."""
    path = tmp_path / "other.page"
    with stages.FORWARD:
        pass
    if content is not None:
        path.write_bytes(page.path.read_bytes()[:content] if isinstance(content, int) else content)
    with pytest.raises(PageError, match=message):
        read_page(path)


def test_a_control_word_is_written_to_pages_only(tmp_path: Path) -> None:
    """Another file is refused and left as it is, and so is one that is not there."""
    path = tmp_path / "notes.txt"
    path.write_bytes(b"n" * 10_000)
    with pytest.raises(PageError, match="is no profile page"):
        write_word(path, CONTROL, 1)
    assert path.read_bytes() == b"n" * 10_000
    with pytest.raises(PageError, match="cannot be written: No such file"):
        write_word(tmp_path / "none", CONTROL, 1)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 29), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_control_word_reads_back(serial: int, is_on: bool, milliseconds: int) -> None:
    """Serial, switch and interval survive; only a fresh switch that is off is 0; a change is always another word."""
    control = Control(serial, is_on, milliseconds / 1000)
    assert Control.of(control.word) == control and 0 <= control.word < 1 << 63
    assert (control.word == 0) == (control == Control())
    assert control.changed(is_on, control.interval_s).word != control.word


def test_the_shortest_interval_is_not_none() -> None:
    """An interval below a millisecond is one, not 0, which would mean no tables; the longest is what fits."""
    assert Control.of(Control(0, True, 1e-9).word).interval_s == 0.001
    assert Control.of(Control(0, True, 1e9).word) == Control(0, True, (2**32 - 1) / 1000)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("target\n0\tä", "target?0?ä"),
        ("[red]bold[/red]", "[red]bold[/red]"),
        ("🐢" * 40, "🐢" * 16),
        ("x" + "🐢" * 40, "x" + "🐢" * 15),  # a byte short of the sixteenth
        ("\udcff\x1b[2J", "??[2J"),
        ("y" * 64, "y" * 64),
        ("", ""),
    ],
)
def test_odd_names_are_cut_to_whole_characters_of_one_line(page: Page, name: str, shown: str) -> None:
    """Whatever threads and roles are called, the page has printable text of at most 64 bytes, and finds it again."""
    block = page.join(name, name, 5)
    assert block is not None
    found = page.snapshot().threads[-1]
    assert (found.role, found.thread, found.tid) == (shown, shown, 5)
    page.leave(block)
    assert page.join(name, name, 6) == block


def test_wall_clock_jumps_change_no_moment(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set back or forth shifts nothing: moments follow the monotonic clock from when the page began."""
    before = page.snapshot()
    for jump in (-(10**18), 10**18):
        monkeypatch.setattr(time, "time_ns", lambda jump=jump: before.epoch_ns + jump)
        after = page.snapshot()
        assert after.epoch_ns - before.epoch_ns == pytest.approx(after.taken_ns - before.taken_ns, abs=1e6)


@pytest.mark.parametrize("failure", ["posix_fallocate", "symlink"])
def test_without_room_there_is_no_page_and_nothing_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """A full or read-only disk is an error of opening, and leaves neither file nor link behind."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, failure, refuse)
    with pytest.raises(OSError, match="No space left"):
        open_page(folder, ("a",))
    assert list(folder.iterdir()) == [] and list(SHARED_MEMORY.glob(f"paceline-*-{os.getpid()}-*")) == []


def test_a_small_memory_file_system_sends_the_page_to_the_run_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where /dev/shm is full or not there the page lies in the run folder itself, and works alike."""
    original = os.posix_fallocate

    def full(descriptor: int, offset: int, length: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(SHARED_MEMORY)):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    page = open_page(folder, ("a",))
    assert page.path.parent == folder and read_page(pages_in(folder)[0]).is_running
    monkeypatch.setattr(layout, "SHARED_MEMORY", folder / "none")
    monkeypatch.setattr(os, "posix_fallocate", original)
    other = open_page(folder, ("a",))
    assert sorted(pages_in(folder)) == sorted([page.path, other.path])
    close_page(page, folder)
    close_page(other, folder)
    assert list(folder.iterdir()) == []


def test_more_threads_than_blocks_are_counted_as_lost(folder: Path) -> None:
    """With all blocks taken by live threads the next one gets none, and the page says how many went without."""
    page = open_page(folder, ("a",))
    blocks = [page.join("target-0", f"t{i}", i) for i in range(layout.MAX_BLOCKS + 3)]
    assert len({block for block in blocks if block}) == layout.MAX_BLOCKS - 1 and blocks[-4:] == [None] * 4
    assert page.snapshot().num_lost == 4 and len(page.snapshot().threads) == layout.MAX_BLOCKS
    close_page(page, folder)


def test_blocks_of_ended_threads_are_emptied_when_they_run_out(folder: Path, clock: Clock) -> None:
    """The block that was left first goes to a thread of other names, its counts go to the ended threads, and nothing is
    lost or counted twice."""
    page = open_page(folder, ("a", "b"))
    for i in range(1, layout.MAX_BLOCKS):
        block = page.join("target-0", f"t{i}", i)
        assert block is not None
        cell = block + layout.CELLS + layout.CELL_WORDS
        page.words[cell + layout.COUNT], page.words[cell + layout.TOTAL] = i, 1000 * i
        page.words[cell + layout.HISTOGRAM + 3] = page.words[cell + layout._MAX_2] = i
        page.words[block + layout.TOP_TOTAL] = 1000 * i
        clock.pass_s(1)
        page.leave(block)
    before = page.snapshot()
    taken = page.join("target-0", "new", 99)
    after = page.snapshot()
    ended, new = after.threads[0], after.threads[1]
    assert (ended.thread, ended.is_live, ended.stages["b"].count, ended.top_ns) == ("ended threads", False, 1, 1000)
    assert set(ended.longest["b"].values()) == {0}  # of which interval would it be?
    assert (new.thread, new.tid, new.generation, new.stages["b"].count, new.top_ns) == ("new", 99, 1, 0, 0)
    assert after.total("b") == before.total("b") and after.total("b").count == 71 * 72 // 2
    assert taken is not None and page.join("target-0", "t2", 2) is not None  # its old block, as it has these names
    assert page.snapshot().threads[2].stages["b"].count == 2 and page.snapshot().num_lost == 0
    close_page(page, folder)


def test_a_page_has_room_for_so_many_stages(tmp_path: Path) -> None:
    """Too many stages are our own mistake, said before anything is made."""
    with pytest.raises(ValueError, match="41 stages; a page has room for 40"):
        Page(tmp_path / "p", tuple(f"s{i}" for i in range(41)))
    assert not (tmp_path / "p").exists()


def test_pages_of_killed_processes_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new page removes those in memory whose processes are gone, of any run, and leaves all others."""
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(layout, "SHARED_MEMORY", memory)
    here = layout._name_here()
    started = layout._identity(os.getpid())[1]
    dead = memory / f"{here}-{os.getpid()}-{started + 1}-7.page"  # the number came again
    others = [
        memory / f"{here}-{os.getpid()}-{started}-7.page",
        memory / f"paceline-{os.getuid()}-1-{os.getpid()}-{started + 1}-7.page",  # another namespace
        memory / f"paceline-{os.getuid() + 1}-{here.rpartition('-')[2]}-1-1-7.page",  # another user
    ]
    for path in (dead, *others):
        path.touch()
    page = layout.open_page(tmp_path / "run" / "profile", ("a",))
    assert not dead.exists() and all(path.exists() for path in (*others, page.path))
    layout.close_page(page, tmp_path / "run" / "profile")
