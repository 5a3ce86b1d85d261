"""Level 1: what threads did, from /proc, while they and their processes come and go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.profiling.collect import threads
from paceline.profiling.collect.process import Identity, identify
from paceline.profiling.collect.threads import Reading, ThreadLook, ThreadWatch, Watched
from paceline.profiling.evidence import Thread

PATIENCE_S = 30.0
NOBODY = 2**22 + 1

Start = Callable[..., "subprocess.Popen[bytes]"]

HELPERS = """
import os, queue, sys, threading, time
def named(name, work):
    def run():
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
            file.write(name)
        work()
    threading.Thread(target=run, daemon=True).start()
def spin():
    while True:
        sum(range(1000))
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python code that may use `HELPERS`, and waits until it says that it is ready."""
    children: list[subprocess.Popen[bytes]] = []

    def run(code: str, ending: str = "time.sleep(600)") -> subprocess.Popen[bytes]:
        code = f"{HELPERS}\n{code}\ntime.sleep(0.1)\nprint('ready', flush=True)\n{ending}"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        return child

    yield run
    for child in children:
        child.kill()
    for child in children:
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()


def look_at(*identities: Identity, seconds: float = 1.5) -> ThreadLook:
    watch = ThreadWatch(identities, seconds)
    watch.start()
    time.sleep(seconds)
    return watch.stop()


def named(look: ThreadLook, name: str) -> Thread:
    (found,) = [thread for thread in look.threads if thread.comm == name]
    return found


def test_what_threads_do(start: Start) -> None:
    """A spinning, a sleeping and a waiting thread are told apart by CPU time, state and system call."""
    child = start(
        "named('spinner', spin); named('sleeper', lambda: time.sleep(600)); named('getter', queue.Queue().get)"
    )
    look = look_at(identify(child.pid))
    spinner, sleeper, getter = (named(look, name) for name in ("spinner", "sleeper", "getter"))
    assert spinner.cpu and spinner.runqueue and sleeper.cpu
    assert spinner.cpu.value + spinner.runqueue.value > 0.5
    assert spinner.states.get("R", 0) > 0.5
    assert spinner.cpu.low <= spinner.cpu.value <= spinner.cpu.high
    assert spinner.involuntary is not None
    assert sleeper.cpu.value == 0 and sleeper.states == {"S": 1.0} and sleeper.voluntary == 0
    assert getter.states == {"S": 1.0}
    assert (sleeper.syscall, getter.syscall) in [("clock_nanosleep", "futex"), ("", "")]
    (main,) = [thread for thread in look.threads if thread.is_main]
    assert main.tid == main.pid == child.pid
    assert not any(thread.is_new or thread.is_gone for thread in look.threads)
    assert look.ends == {}
    for half in look.halves:
        cpu, wait = half[child.pid, spinner.tid]
        assert cpu + wait > 0.3
        assert half[child.pid, sleeper.tid] == (0.0, 0.0)


def test_the_level_and_the_host_are_said(start: Start) -> None:
    """The look says how long it was, what it cost, and what the machine is."""
    look = look_at(identify(start("").pid), seconds=0.5)
    assert look.level.ok and look.level.id == "1"
    assert look.level.seconds == pytest.approx(look.seconds)
    assert look.seconds >= 0.5
    assert look.level.samples >= 2
    assert 0 < look.level.disturbance.tool_cpu_s < 10
    assert look.level.disturbance.stop_frac is None
    assert look.host.cpu_model and look.host.cores == os.cpu_count() and look.host.kernel
    assert 0 < look.host.cpus <= look.host.cores


def test_a_starved_thread_waits_for_its_cpu(start: Start) -> None:
    """Two spinners on one CPU each wait about half of the time."""
    code = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    identities = [identify(start(code, ending="spin()").pid) for _ in range(2)]
    look = look_at(*identities, seconds=2.0)
    for thread in look.threads:
        if thread.is_main:
            assert thread.cpu and thread.runqueue
            assert thread.runqueue.value > 0.3
            assert thread.cpu.value + thread.runqueue.value > 0.8
    assert look.host.cpus <= 1


def test_many_sleeping_threads_cost_little(start: Start) -> None:
    """Hundreds of sleeping threads are all there with their state, at a small part of a core."""
    child = start("""
event = threading.Event()
for _ in range(300): threading.Thread(target=event.wait, daemon=True).start()
named('spinner', spin)""")
    look = look_at(identify(child.pid), seconds=3.0)
    assert len(look.threads) == 302
    waiting = [thread for thread in look.threads if thread.states == {"S": 1.0}]
    assert len(waiting) >= 300
    assert all(thread.cpu is not None for thread in waiting)
    spinner = named(look, "spinner")
    assert spinner.cpu and spinner.cpu.samples and spinner.cpu.samples >= 3
    assert look.level.disturbance.tool_cpu_s < 0.3 * look.seconds


def test_threads_come_and_go(start: Start) -> None:
    """A thread that begins during the look is new, one that ends is gone, and both are kept."""
    child = start(
        "stop = threading.Event(); named('goes', stop.wait)",
        ending="sys.stdin.readline(); stop.set(); named('comes', lambda: time.sleep(600)); time.sleep(600)",
    )
    watch = ThreadWatch([identify(child.pid)], 600)
    watch.start()
    time.sleep(0.3)
    assert child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.flush()
    time.sleep(1.0)
    look = watch.stop()
    goes, comes = named(look, "goes"), named(look, "comes")
    assert goes.is_gone and not goes.is_new
    assert comes.is_new and not comes.is_gone
    assert comes.states == {"S": 1.0}


@pytest.mark.parametrize("reaped", [True, False])
def test_a_process_that_ends_in_mid_look(start: Start, reaped: bool) -> None:
    """Its threads are kept as they were, and how it ended is said; the other process is watched on."""
    child, other = start("named('spinner', spin)"), start("")
    watch = ThreadWatch([identify(child.pid), identify(other.pid)], 1.5)
    watch.start()
    time.sleep(0.7)
    child.kill()
    if reaped:
        child.wait()
    time.sleep(0.8)
    look = watch.stop()
    assert look.ends == {child.pid: "exited" if reaped else "zombie"}
    spinner = named(look, "spinner")
    assert spinner.is_gone and spinner.cpu and spinner.cpu.value > 0.05
    assert look.level.ok
    (main,) = [thread for thread in look.threads if thread.pid == other.pid]
    assert not main.is_gone


def test_nothing_left_to_watch_ends_the_look(start: Start) -> None:
    """When all processes have ended the watch is over, long before its time."""
    child = start("")
    watch = ThreadWatch([identify(child.pid)], 600)
    watch.start()
    child.kill()
    child.wait()
    assert watch._worker is not None
    watch._worker.join(PATIENCE_S)
    assert not watch._worker.is_alive()
    look = watch.stop()
    assert look.ends == {child.pid: "exited"}
    assert watch.stop() is look


def test_a_recycled_number_is_not_watched(start: Start) -> None:
    """A process of another start time is another one: nothing of it is reported."""
    identity = identify(start("").pid)
    look = look_at(Identity(identity.pid, identity.started - 1), Identity(NOBODY, 1), seconds=0.1)
    assert look.ends == {identity.pid: "recycled", NOBODY: "exited"}
    assert look.threads == []
    assert not look.level.ok and look.level.reason


def test_a_watch_of_nothing() -> None:
    """No process, or none begun, is an empty look and no error."""
    assert look_at(seconds=0.0).threads == []
    look = ThreadWatch([], 1).stop()
    assert not look.level.ok and "not started" in look.level.reason


def test_without_schedstat_ticks_are_counted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel does not count waits, CPU time comes from ticks, and the wait is not known."""
    monkeypatch.setattr(threads, "parse_schedstat", lambda _: None)
    look = look_at(identify(start("named('spinner', spin)").pid))
    spinner = named(look, "spinner")
    assert spinner.cpu and spinner.cpu.value > 0.1
    assert spinner.runqueue is None
    assert all(shares[1] == 0 for shares in look.halves[0].values())


def test_without_the_right_to_trace_the_wait_channel_is_read(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the system call may not be read, where the thread sleeps in the kernel stands for it."""

    def read_text(path: str, at_most: int = 1 << 16) -> str | None:
        if path.endswith("/syscall"):
            return None
        return "futex_wait_queue" if path.endswith("/wchan") else original(path, at_most)

    original = threads.read_text
    monkeypatch.setattr(threads, "read_text", read_text)
    child = start("named('getter', queue.Queue().get)")
    look = look_at(identify(child.pid), seconds=0.3)
    assert named(look, "getter").syscall == "futex"
    assert threads.moment(child.pid, child.pid) == ("S", "futex")


def test_a_moment_of_a_thread(start: Start) -> None:
    """State and system call of a thread now; empty for one that is gone."""
    child = start("")
    deadline = time.monotonic() + PATIENCE_S
    while (seen := threads.moment(child.pid, child.pid))[0] != "S":
        assert time.monotonic() < deadline
    assert seen[1] in ("clock_nanosleep", "hrtimer_nanosleep", "")
    assert threads.moment(NOBODY, NOBODY) == ("", "")
    assert threads.moment(child.pid, NOBODY) == ("", "")


def test_names_may_hold_anything(start: Start) -> None:
    """A thread named with spaces, parentheses and line ends is one thread with a printable name."""
    look = look_at(identify(start("named('a) R\\\\n(\\x1b b', lambda: time.sleep(600))").pid), seconds=0.2)
    (thread,) = [thread for thread in look.threads if not thread.is_main]
    assert thread.comm.startswith("a) R") and thread.comm.isprintable()
    assert thread.states == {"S": 1.0}


@pytest.mark.parametrize(
    ("text", "machine", "name"),
    [
        ("202 0x7f5b 0x189 0x0\n", "x86_64", "futex"),
        ("230 0x1", "x86_64", "clock_nanosleep"),
        ("98 0x1", "aarch64", "futex"),
        ("22 0x1", "aarch64", "epoll_pwait"),
        ("426 0x1", "aarch64", "io_uring_enter"),
        ("9999 0x1", "x86_64", "syscall_9999"),
        ("7 0x1", "riscv64", "syscall_7"),
        ("running\n", "x86_64", ""),
        ("-1 0x7ffd 0x7f\n", "x86_64", ""),
        ("", "x86_64", ""),
    ],
)
def test_system_calls_have_names(text: str, machine: str, name: str) -> None:
    """The number in the line is named by the machine's own table."""
    assert threads.syscall_name(text, machine) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("futex_wait_queue", "futex"),
        ("futex_do_wait", "futex"),
        ("hrtimer_nanosleep", "clock_nanosleep"),
        ("ep_poll", "epoll_wait"),
        ("anon_pipe_read", "read"),
        ("nv_alloc.cold", "nv_alloc.cold"),
        ("0", ""),
        ("", ""),
        ("a b\x1b", ""),
    ],
)
def test_wait_channels_have_names(text: str, name: str) -> None:
    """Where a thread sleeps in the kernel stands for a system call; 0 is hidden."""
    assert threads.channel_name(text) == name


@pytest.mark.parametrize(
    ("text", "counters"),
    [("12 34 5\n", (12, 34, 5)), ("0 0 0\n", None), ("", None), ("1 2", None), ("a b c", None), ("0 7 1", (0, 7, 1))],
)
def test_schedstat(text: str, counters: tuple[int, int, int] | None) -> None:
    """Three numbers; all zero means that the kernel does not count."""
    assert threads.parse_schedstat(text) == counters


def test_switches() -> None:
    """Both kinds of context switches, or nothing."""
    text = "Name:\tx\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n"
    assert threads.parse_switches(text) == (12, 3)
    assert threads.parse_switches("Name:\tvoluntary_ctxt_switches: 3") is None


def test_a_reading_stands_for_the_passes_without_one() -> None:
    """A thread that was left out while it slept has slept in all of those passes."""
    thread = Watched(1, 2, 3, is_new=False)
    thread.add(Reading(0.0, 0.0, 0.0, (0, 0)), "S", "futex", 0)
    thread.add(Reading(1.0, 0.0, 0.0, (0, 0)), "S", "futex", 10)
    thread.add(Reading(2.0, 0.5, 0.0, (5, 1)), "R", "", 12)
    assert thread.states == Counter(S=12, R=1)
    assert thread.calls == Counter(futex=12)


def test_readings_are_bounded() -> None:
    """A long look keeps a limited number of readings of a thread, the first and the last among them."""
    thread = Watched(1, 2, 3, is_new=False)
    for i in range(3 * threads.MOST_READINGS):
        thread.add(Reading(float(i), 0.5 * i, 0.0, (i, i)), "R", "", i)
    assert len(thread.readings) <= threads.MOST_READINGS
    assert thread.readings[0].at == 0 and thread.readings[-1].at == 3 * threads.MOST_READINGS - 1
    figure = threads.share_figure([(reading.at, reading.cpu) for reading in thread.readings])
    assert figure is not None and figure.value == pytest.approx(0.5)


def test_a_share_of_sub_windows() -> None:
    """A steady counter has its share and no width; one that stops halfway has half of it, and a wide interval."""
    steady = threads.share_figure([(i / 10, 0.025 * i) for i in range(101)])
    assert steady is not None and steady.samples == 12
    assert (steady.value, *steady.interval) == pytest.approx((0.25, 0.25, 0.25))
    halting = threads.share_figure([(i / 10, min(i, 50) / 10) for i in range(101)])
    assert halting is not None and halting.value == pytest.approx(0.5)
    assert 0 <= halting.low < 0.25 and 0.75 < halting.high <= 1
    assert threads.share_figure([]) is None
    assert threads.share_figure([(1.0, 2.0)]) is None
    assert threads.share_figure([(1.0, 2.0), (1.0, 2.0)]) is None


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1e6)), max_size=40))
def test_a_share_is_a_share(readings: list[tuple[float, float]]) -> None:
    """Whatever the counters say, a share and its interval are within 0 and 1, and in order."""
    figure = threads.share_figure(sorted(readings))
    if figure is not None:
        assert 0 <= figure.low <= figure.value <= figure.high <= 1


def test_shares_of_halves() -> None:
    """Each half has its own shares; a thread that was there in one half only has none for the other."""
    readings = [Reading(i, min(i, 5), max(0, i - 5), (i, i)) for i in range(11)]
    assert threads.shares_of_halves(readings, 5.0) == ((1.0, 0.0), (0.0, 1.0))
    assert threads.shares_of_halves(readings[:5], 5.0) == ((1.0, 0.0), None)
    assert threads.shares_of_halves(readings[:1], 5.0) == (None, None)
    assert threads.shares_of_halves([Reading(0, 0, None, (0, 0)), Reading(2, 1, None, (1, 0))], 2.0) == (
        (0.5, 0.0),
        None,
    )


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_quota_of_both_versions(tmp_path: Path) -> None:
    """The limit of a cgroup in CPUs, of version 2 and of version 1; no limit is none."""
    stat = "usage_usec 5\nnr_periods 40\nnr_throttled 10\n"
    v2 = threads.read_quota(group(tmp_path / "a", cpu__max="150000 100000\n", cpu__stat=stat))
    assert v2 and (v2.cpus, v2.periods, v2.throttled) == (1.5, 40, 10)
    v1 = threads.read_quota(group(tmp_path / "b", cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n"))
    assert v1 and (v1.cpus, v1.periods) == (0.5, 0)
    assert threads.read_quota(group(tmp_path / "c", cpu__max="max 100000\n")) is None
    assert threads.read_quota(group(tmp_path / "d", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")) is None
    assert threads.read_quota(group(tmp_path / "e")) is None
    group(tmp_path / "a", cpu__stat="nr_periods 60\nnr_throttled 15\n")
    figure = threads.throttled_figure([v2, v1])
    assert figure and figure.value == 0.25 and figure.interval == (0.25, 0.25)
    assert threads.throttled_figure([]) is None


@pytest.mark.parametrize(
    ("line", "mount", "inside"),
    [
        ("0::/pod/box", "30 23 0:26 / {root} rw,nosuid shared:9 - cgroup2 cgroup2 rw", ["", "pod", "pod/box"]),
        ("0::/pod/box", "30 23 0:26 /pod {root} rw - cgroup2 cgroup2 rw", ["", "box"]),
        ("0::/", "30 23 0:26 / {root} rw - cgroup2 cgroup2 rw", [""]),
        ("0::/../other", "30 23 0:26 / {root} rw - cgroup2 cgroup2 rw", [""]),
        ("4:cpu,cpuacct:/docker/x", "30 23 0:26 /docker/x {root} ro - cgroup cgroup rw,cpu,cpuacct", [""]),
        ("4:cpuset:/pod", "30 23 0:26 / {root} ro - cgroup cgroup rw,cpuset", []),
        ("", "", []),
    ],
)
def test_folders_of_a_cgroup(tmp_path: Path, line: str, mount: str, inside: list[str]) -> None:
    """Limits are looked for in the process's cgroup and all above it, wherever the tree is mounted."""
    root = tmp_path / "cgroup"
    (root / "pod" / "box").mkdir(parents=True)
    (root / "box").mkdir()
    group(tmp_path / "proc" / "7", cgroup=f"9:memory:/\n{line}\n")
    group(tmp_path / "proc" / "self", mountinfo=f"22 1 8:1 / / rw - ext4 x rw\n{mount.format(root=root)}\n")
    assert threads.cgroup_folders(7, tmp_path / "proc") == [root / part for part in inside]


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("processor\t: 0\nmodel name\t: AMD  EPYC 9654\nmodel name\t: x\n", "AMD EPYC 9654"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n", "Neoverse V2"),
        ("CPU part\t: 0x123\n", "aarch64 part 0x123"),
        ("", "aarch64"),
    ],
)
def test_cpu_models(text: str, model: str) -> None:
    """The model's name, or on ARM what its number means."""
    assert threads.cpu_model(text, "aarch64") == model
