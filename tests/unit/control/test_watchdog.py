"""The watchdog: what counts as standing still, what it says and when it ends a run."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from paceline.control import watchdog
from paceline.control.watchdog import EXIT_STALLED, Watchdog, watching


class Run:
    """A run whose clock and movement are the test's; collects what is told."""

    def __init__(self, folder: Path, stall_s: float = 30.0) -> None:
        self.stall_s, self.moved, self.now = stall_s, 0, 1000.0
        self.told: list[str] = []
        self.dog = Watchdog(
            lambda: self.stall_s,
            lambda: self.moved,
            lambda text: self.told.append(f"stalled: {text}"),
            folder,
            lambda text: self.told.append(f"end: {text}"),
            lambda text: self.told.append(f"moves: {text}"),
        )
        self.wait_s = self.dog.look(self.now)

    def stand_still(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end and self.wait_s is not None:
            self.now += self.wait_s
            self.wait_s = self.dog.look(self.now)

    def kinds(self) -> list[str]:
        return [text.partition(":")[0] for text in self.told]


def test_standing_still_is_told_once_and_ended_after_twice_as_long(tmp_path: Path) -> None:
    """The message says how long, and where the stacks are; they name every thread's frames."""
    run = Run(tmp_path / "profile")
    run.stand_still(29.0)
    assert run.told == []
    run.stand_still(29.5)
    (place,) = (tmp_path / "profile").glob("stall-*.txt")
    assert run.told == [f"stalled: nothing has moved for 30 s (run.stall_s=30); where each thread stands is in {place}"]
    assert "in write_stacks" in place.read_text()
    run.stand_still(100.0)
    assert run.kinds() == ["stalled", "end"] and "nothing has moved for 60 s" in run.told[1]
    assert run.wait_s is None and run.now == pytest.approx(1060.0)


def test_what_moves_again_is_told_and_starts_anew(tmp_path: Path) -> None:
    """However little it is, and just before the end; the next stall is told again."""
    run = Run(tmp_path)
    for _ in range(3):
        run.stand_still(58.0)
        run.moved += 1
        run.stand_still(2.0)
    assert run.kinds() == 3 * ["stalled", "moves"]
    assert "after 58 s" in run.told[1] or "after 59 s" in run.told[1]


def test_a_late_look_proves_nothing(tmp_path: Path) -> None:
    """A process that was stopped for an hour, or again and again, has stood still for a moment at a time."""
    run = Run(tmp_path)
    for _ in range(5):
        run.now += 3600
        run.dog.look(run.now)
        run.stand_still(1.0)
    assert run.told == []
    run.stand_still(30.0)
    assert run.kinds() == ["stalled"]


def test_it_is_switched_off_and_changed_while_it_runs(tmp_path: Path) -> None:
    """Zero watches nothing, from then on; time that went by meanwhile does not count."""
    run = Run(tmp_path, stall_s=0.0)
    run.stand_still(10_000.0)
    assert run.told == []
    run.stall_s = 30.0
    run.stand_still(20.0)
    assert run.told == []
    run.stand_still(25.0)
    run.stall_s = 0.0
    run.stand_still(1000.0)
    assert run.kinds() == ["stalled", "moves"] and "switched off" in run.told[1]


def test_what_cannot_be_seen_is_no_evidence(tmp_path: Path) -> None:
    """A look that fails says nothing of the run, and does not end the watch."""
    run = Run(tmp_path)
    run.stand_still(20.0)
    movement, run.dog._movement = run.dog._movement, lambda: 1 / 0
    run.stand_still(100.0)
    run.dog._movement = movement
    run.stand_still(20.0)
    assert run.told == []
    run.stand_still(20.0)
    assert run.kinds() == ["stalled"]


def test_a_full_disk_leaves_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without stacks it says why, and still ends the run."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = Run(tmp_path)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", refuse)
    run.stand_still(100.0)
    assert run.kinds() == ["stalled", "end"] and "No space left on device" in run.told[0]


def test_a_disk_that_hangs_does_not_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has to say may take for ever to be written; the run is ended all the same."""
    is_over = threading.Event()
    monkeypatch.setattr(watchdog, "PATIENCE_S", 0.05)
    monkeypatch.setattr(watchdog, "write_stacks", lambda folder: str(is_over.wait(60)))
    run = Run(tmp_path)
    run.stand_still(100.0)
    assert run.kinds() == ["stalled", "end"] and "could not be written in time" in run.told[0]
    is_over.set()


def test_who_is_told_may_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A broken listener is a warning; the watch goes on."""
    run = Run(tmp_path)
    run.dog._on_stall = lambda text: run.told.append(f"stalled: {1 / 0}")
    with caplog.at_level(logging.WARNING):
        run.stand_still(100.0)
    assert run.kinds() == ["end"] and "ZeroDivisionError" in caplog.text


def test_a_thread_that_is_stuck_is_seen(tmp_path: Path) -> None:
    """In real time: the stacks show where it waits, and a run that goes on in time is not ended."""
    let_go, has_told, is_moving = threading.Event(), threading.Event(), threading.Event()
    steps = [0]

    def stuck_in_a_wait() -> None:
        let_go.wait(60)
        while not is_moving.is_set():
            steps[0] += 1
            time.sleep(0.001)

    ended: list[str] = []
    thread = threading.Thread(target=stuck_in_a_wait)
    thread.start()
    with watching(
        lambda: 20.0 if has_told.is_set() else 0.1,
        lambda: steps[0],
        lambda text: has_told.set(),
        tmp_path,
        ended.append,
        lambda text: is_moving.set(),
    ):
        assert has_told.wait(60)
        let_go.set()
        assert is_moving.wait(60)
    thread.join()
    (place,) = tmp_path.glob("stall-*.txt")
    assert "in stuck_in_a_wait" in place.read_text()
    assert ended == [] and not any(each.name == "watchdog" for each in threading.enumerate())


def test_by_default_it_ends_the_process(tmp_path: Path) -> None:
    """The exit code tells a scheduler to try again."""
    pid = os.fork()
    if pid == 0:
        with watching(lambda: 0.05, lambda: 0, lambda text: None, tmp_path):
            time.sleep(60)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == EXIT_STALLED == 75


def test_without_a_thread_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the system gives no more threads there is one warning."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with watching(lambda: 1.0, lambda: 0, print, tmp_path), caplog.at_level(logging.WARNING):
        pass
    assert "nobody sees whether the run stands still" in caplog.text
