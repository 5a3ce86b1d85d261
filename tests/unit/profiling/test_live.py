"""The reporter: prints and records each interval while profiling is on, and can do no harm to the run."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.profiling import live, stages
from paceline.profiling import page as layout
from paceline.profiling.live import STAGES_FILE, Reporter, trace_file
from paceline.profiling.page import Control, Page
from paceline.profiling.stages import as_role
from tests.unit.profiling.conftest import Clock

PATIENCE_S = 30.0


class Watched(Reporter):
    """A reporter whose looks are taken by hand.

    Attributes:
        shown: What it printed.
    """

    def __init__(self, page: Page, folder: Path, interval_s: float = 0.0) -> None:
        self.shown: list[str] = []
        super().__init__(page, folder, self.shown.append, interval_s)
        self.look()

    def look(self) -> None:
        self._look_safely()

    @property
    def tables(self) -> list[str]:
        return [text for text in self.shown if text.startswith("profile of")]


def work(clock: Clock, seconds: float, runs: int = 1) -> None:
    """Runs of a stage of the drafter."""
    with as_role("drafter-0"):
        for _ in range(runs):
            with stages.FORWARD:
                clock.pass_s(seconds)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / STAGES_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_while_off_nothing_is_printed_or_written(clock: Clock, page: Page, folder: Path) -> None:
    """Nobody asked: no table, no file, no count, however long it lasts; the page still shows the stage at hand."""
    reporter = Watched(page, folder)
    for _ in range(5):
        work(clock, 100)
        reporter.look()
    with as_role("drafter-0"), stages.BACKWARD:
        (thread,) = page.snapshot().threads[1:]
        assert thread.inner is not None and thread.inner.stage == "backward"
        reporter.stop()
    assert reporter.shown == [] and not (folder / STAGES_FILE).exists()
    assert page.snapshot().total("forward").count == 0


def test_each_interval_has_its_table_and_its_lines(clock: Clock, page: Page, folder: Path) -> None:
    """From the start on, every N seconds: averages of that interval alone, and on exit the last, partial one."""
    reporter = Watched(page, folder, 10.0)
    (first,) = reporter.shown
    assert first.startswith("profiling is on, a table every 10 s; a stage costs ") and first.endswith(" us when off)")
    for seconds in (2.5, 5.0):
        work(clock, seconds, runs=round(10 / seconds))
        reporter.look()
    work(clock, 1.0, runs=3)
    reporter.look()
    assert len(reporter.tables) == 2
    reporter.stop()
    assert [text.splitlines()[0] for text in reporter.tables] == [f"profile of {s} s" for s in ("10.0", "10.0", "3.0")]
    lines = lines_of(folder)
    assert [line["interval_s"] for line in lines] == [10, 10, 3]
    runs = [(f["count"], f["avg_ms"], f["max_ms"]) for f in (line["stages"]["forward"] for line in lines)]
    assert runs == [(4, 2500, 2500), (2, 5000, 5000), (3, 1000, 1000)]
    assert lines[1]["t"] - lines[0]["t"] == pytest.approx(10, abs=0.002)


def test_runs_before_the_first_look_are_not_lost(page: Page, folder: Path) -> None:
    """Where profiling is on from the start, everything since then is in the tables, also in a run of milliseconds."""
    shown: list[str] = []
    reporter = Reporter(page, folder, shown.append, 1000.0)
    reporter.start()
    with as_role("drafter-0"), stages.FORWARD:
        pass
    reporter.stop()
    (line,) = lines_of(folder)
    assert line["stages"]["forward"]["count"] == 1 and len(shown) == 2
    assert not any(thread.name == "profiler" for thread in threading.enumerate())


def test_switching_a_run_live(clock: Clock, page: Page, folder: Path) -> None:
    """On, another interval, on without tables, off: each change ends the interval at hand, and is said once."""
    reporter = Watched(page, folder)
    work(clock, 50)
    reporter.switch(True, 10.0)
    reporter.look()
    assert len(reporter.shown) == 1
    work(clock, 4)
    reporter.switch(True, 3.0)
    reporter.look()
    assert [text.splitlines()[0] for text in reporter.shown[1:]] == ["profile of 4.0 s"]
    work(clock, 3)
    reporter.look()
    reporter.switch(True, 0.0)
    work(clock, 2)
    reporter.look()
    assert reporter.shown[-1] == "profiling is off"
    work(clock, 100)
    reporter.look()
    assert len(reporter.tables) == 3 and page.snapshot().total("forward").total_ns == 109 * 10**9
    reporter.switch(False, 0.0)
    reporter.look()
    work(clock, 7)
    reporter.stop()
    assert page.snapshot().total("forward").total_ns == 109 * 10**9
    assert sum(line["stages"]["forward"]["total_ms"] for line in lines_of(folder)) == 9000
    assert len(reporter.shown) == 5


def test_toggling_twice_is_where_it_began(page: Page, folder: Path) -> None:
    """What SIGUSR1 does: on with tables if off, off if on, and every word is another one."""
    reporter, words = Watched(page, folder), {page.words[layout.CONTROL]}
    for is_on in (True, False, True):
        reporter.toggle()
        words.add(page.words[layout.CONTROL])
        control = page.snapshot().control
        assert (control.is_on, control.interval_s) == (is_on, 10.0 * is_on)
    assert len(words) == 4


def test_a_file_that_cannot_be_written_ends_profiling_once(
    clock: Clock, page: Page, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full or read-only disk in the middle of a run switches profiling off with one warning, after the table; it may
    be switched on again when there is room."""
    (folder / STAGES_FILE).mkdir()
    reporter = Watched(page, folder, 10.0)
    for _ in range(3):
        work(clock, 10)
        reporter.look()
    reporter.stop()
    (record,) = caplog.records
    assert record.getMessage().startswith("profiling is off: ")
    assert "stages.jsonl cannot be written" in record.getMessage()
    assert len(reporter.tables) == 1 and not page.snapshot().control.is_on
    assert page.snapshot().total("forward").count == 1
    (folder / STAGES_FILE).rmdir()
    reporter.switch(True, 10.0)
    reporter.look()
    work(clock, 10)
    reporter.look()
    assert len(lines_of(folder)) == 1 and len(caplog.records) == 1


def test_a_failure_while_being_switched_is_said_once(
    clock: Clock, page: Page, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last table of an interval that is cut short by a change may be the one that finds no room."""
    reporter = Watched(page, folder, 10.0)
    (folder / STAGES_FILE).mkdir()
    work(clock, 5)
    reporter.switch(True, 20.0)
    for _ in range(3):
        reporter.look()
        work(clock, 30)
    reporter.stop()
    assert len(caplog.records) == 1 and not page.snapshot().control.is_on


def test_whatever_fails_in_it_the_run_goes_on(
    clock: Clock, page: Page, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of its own, in its thread or on exit, ends profiling with one warning and reaches nobody."""
    reporter = Watched(page, folder, 10.0)

    def fail(_text: str) -> None:
        raise RuntimeError("the terminal is gone")

    reporter._show = fail
    work(clock, 10)
    for _ in range(3):
        reporter.look()
    reporter.stop()
    assert [record.getMessage() for record in caplog.records] == ["profiling stops: RuntimeError: the terminal is gone"]
    assert not page.snapshot().control.is_on
    again = Reporter(page, folder, fail, 10.0)
    again.start()
    again.stop()
    assert len(caplog.records) == 2


def test_without_a_thread_the_last_table_is_made(
    clock: Clock, page: Page, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that may start no more threads trains on, and says where its time went at the end."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    reporter = Watched(page, folder, 10.0)
    reporter.start()
    work(clock, 5)
    reporter.stop()
    assert "can't start new thread" in caplog.text and len(reporter.tables) == len(lines_of(folder)) == 1


def test_a_wall_clock_that_jumps_moves_no_interval(
    clock: Clock, page: Page, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set back a year or forth, the intervals stay those of the monotonic clock, and so do the times in the file."""
    reporter, now = Watched(page, folder, 10.0), time.time_ns()
    for jump in (-(10**16), 10**16):
        monkeypatch.setattr(time, "time_ns", lambda jump=jump: now + jump)
        monkeypatch.setattr(time, "time", lambda jump=jump: (now + jump) / 1e9)
        work(clock, 9)
        reporter.look()
        work(clock, 1)
        reporter.look()
    lines = lines_of(folder)
    assert [line["interval_s"] for line in lines] == [10, 10] and lines[1]["t"] - lines[0]["t"] == pytest.approx(10)


def test_costly_counting_leaves_batches_out_and_says_so(clock: Clock, page: Page, folder: Path) -> None:
    """Where counting takes more than 1 % of a thread's time, one batch in k is counted from then on, and the times are
    scaled up; that is decided once."""
    page.words[layout.COST_ON] = 12 * 10**6  # 12 ms a run, as it were
    reporter = Watched(page, folder, 10.0)

    def batches() -> None:
        with as_role("drafter-0"):
            for number in range(20):
                stages.next_batch(number)
                with stages.FORWARD:
                    clock.pass_s(0.4)
                clock.pass_s(0.1)

    batches()
    reporter.look()
    assert page.words[layout.SAMPLE_EVERY] == 3  # of 20 runs in 10 s
    (said,) = [text for text in reporter.shown if "one in" in text]
    assert said == "counting every batch costs drafter-0 2.4 % of its time: one in 3 is counted from here on"
    page.words[layout.COST_ON] = 15 * 10**6  # a little more changes nothing
    for _ in range(3):
        batches()
        reporter.look()
    assert page.words[layout.SAMPLE_EVERY] == 3 and len([text for text in reporter.shown if "one in" in text]) == 1
    lines = lines_of(folder)
    sampled = [sum(stages.is_sampled(n, 3) for n in range(first, first + 20)) for first in (21, 41, 61)]
    assert [line["stages"]["forward"]["count"] for line in lines] == [20, *sampled] and set(sampled) <= {6, 7}
    assert [line.get("sampled_one_in") for line in lines] == [None, 3, 3, 3]
    assert [line["other_s"] for line in lines] == pytest.approx([2.0, 2.0, 2.0, 2.0])  # what is not counted is covered
    assert "one batch in 3 counted" in reporter.tables[-1]
    assert [line.split()[-2] for line in reporter.tables[1].splitlines() if line.split()[0] == "forward"] == ["84.0"]


def test_cheap_counting_counts_every_batch(clock: Clock, page: Page, folder: Path) -> None:
    """Below 1 % nothing is left out."""
    page.words[layout.COST_ON] = 1000
    reporter = Watched(page, folder, 10.0)
    with as_role("drafter-0"):
        for number in range(20):
            stages.next_batch(number)
            work(clock, 0.5)
    reporter.look()
    assert page.words[layout.SAMPLE_EVERY] == 1 and len(reporter.shown) == 2


def test_a_forked_child_that_ends_prints_nothing(page: Page, folder: Path) -> None:
    """A child that unwinds through the run's end neither makes a table nor touches the parent's page."""
    reporter = Watched(page, folder, 10.0)
    with as_role("drafter-0"), stages.FORWARD:
        pass
    child = os.fork()
    if child == 0:
        before = bytes(page.words)
        reporter.stop()
        os._exit(len(reporter.shown) != 1 or bytes(page.words) != before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not (folder / STAGES_FILE).exists()
    reporter.stop()
    assert len(lines_of(folder)) == 1


def test_a_window_of_events_is_written_when_it_is_over(clock: Clock, page: Page, folder: Path) -> None:
    """All stages that ended in the window, by thread, counted or not, with those that are open; none is kept after."""
    reporter = Watched(page, folder)
    work(clock, 1)
    until = clock.now + 10 * 10**9
    page.words[layout.TRACE_UNTIL] = until
    with as_role("drafter-0"):
        stages.next_batch(7)
        with stages.BACKWARD:
            clock.pass_s(1)
            with stages.RECOMPUTE:
                clock.pass_s(2)
        reporter.look()
        assert not trace_file(folder, until).exists()
        with stages.OPTIMIZER:
            began = clock.now
            clock.pass_s(20)
            reporter.look()
    (found,) = json.loads(trace_file(folder, until).read_text())["processes"]
    (thread,) = found["threads"]
    runs = [(found["stages"][number], end - begin, *rest) for number, begin, end, *rest in thread["events"]]
    assert runs == [("recompute", 2 * 10**9, 1, 7), ("backward", 3 * 10**9, 0, 7)]
    assert thread["open"] == [[stages.OPTIMIZER.number, began, until, 0, 7]]
    assert (thread["role"], thread["tid"], found["until_ns"]) == ("drafter-0", threading.get_native_id(), until)
    work(clock, 1)
    assert all(not recorder.events for recorder in stages.recorders() if recorder.page is page)
    trace_file(folder, until).unlink()
    reporter.look()
    assert not trace_file(folder, until).exists()  # once


def test_other_processes_have_their_part_of_a_window(clock: Clock, page: Page, folder: Path) -> None:
    """They are told once how long it lasts, and asked when it is over; those that say nothing are named."""

    class Others:
        told: list[int] = []

        def trace(self, left_ns: int) -> None:
            self.told.append(left_ns)

        def events(self) -> list[dict[str, Any]]:
            return [{"role": "target-1", "host": "far", "threads": []}]

        def places(self) -> dict[str, dict[str, Any]]:
            return {"target-0": {}, "target-1": {}}

    others = Others()
    reporter = Watched(page, folder)
    reporter._others = others  # type: ignore[assignment]  # the part of it that a window needs
    until = clock.now + 10 * 10**9
    page.words[layout.TRACE_UNTIL] = until
    clock.pass_s(1)
    reporter.look()
    reporter.look()
    assert others.told == [9 * 10**9]
    clock.pass_s(10)
    reporter.look()
    own, other = json.loads(trace_file(folder, until).read_text())["processes"]
    assert own["pid"] == os.getpid() and own["role"] == "drafter-0" and own["missing"] == ["target-0"]
    assert other == {"role": "target-1", "host": "far", "threads": []}
    late = clock.now + 10**9
    page.words[layout.TRACE_UNTIL] = late
    clock.pass_s(2)
    reporter.look()  # over before it was seen: nobody else has kept anything
    (own,) = json.loads(trace_file(folder, late).read_text())["processes"]
    assert own["missing"] == ["target-0", "target-1"] and len(others.told) == 1


def test_events_are_bounded(clock: Clock, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a window and however short the stages, a thread keeps the last so many."""
    monkeypatch.setattr(stages, "MAX_EVENTS", 50)
    page.words[layout.TRACE_UNTIL] = clock.now + 10**18
    work(clock, 0.001, runs=200)
    (thread,) = stages.collect_events(page, clock.now)["threads"]
    assert len(thread["events"]) == 50 and thread["events"][-1][2] == clock.now
    work(clock, 0.001, runs=200)
    assert len(stages.collect_events(page, clock.now)["threads"][0]["events"]) == 50


def test_a_trace_that_cannot_be_written_is_a_warning(
    clock: Clock, page: Page, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the run and its profile go on."""
    reporter = Watched(page, folder, 10.0)
    page.words[layout.TRACE_UNTIL] = clock.now + 1

    def refuse(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(live.os, "replace", refuse)
    work(clock, 10)
    reporter.look()
    assert "the trace cannot be written" in caplog.text and "No space left" in caplog.text
    work(clock, 10)
    reporter.look()
    assert len(reporter.tables) == 2 and len(caplog.records) == 1
    assert page.snapshot().control == Control(1, True, 10.0)
