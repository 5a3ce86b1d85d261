"""Level 0: a run's own page, read from outside, and put back as it was."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from paceline.profiling import page as layout
from paceline.profiling import stages
from paceline.profiling.collect.stages import StageWatch, folder_of, page_of, windows_between
from paceline.profiling.page import Control, Page, read_page


def look(page: Page, seconds: float = 0.5):  # type: ignore[no-untyped-def]
    """Some work in a target's thread while the page is watched."""
    watch = StageWatch([page.path])
    watch.start()
    end = time.monotonic() + seconds
    with stages.as_role("target-0"):
        number = 0
        while time.monotonic() < end:
            number += 1
            stages.next_batch(number)
            with stages.MODEL_FORWARD:
                time.sleep(0.01)
            for gauge in ("step", "batches"):
                page.set_gauge(gauge, number)
            page.set_gauge("tokens", 100 * number)
        return watch.stop()


def test_stages_are_counted_for_the_length_of_the_look(page: Page) -> None:
    """Counting goes on for it and off again; the thread is told by role, the stage by name."""
    assert not read_page(page.path).control.is_on
    found = look(page)
    assert found.level.ok
    assert not read_page(page.path).control.is_on
    (record,) = [each for each in found.stages if each["role"] == "target-0"]
    assert record["stages"]["model_forward"]["count"] >= 5
    assert ("target-0", "MainThread") in found.names.values()
    assert found.steps_per_s is not None and found.steps_per_s.value > 5
    assert found.tokens_per_s is not None
    assert found.tokens_per_s.value == pytest.approx(100 * found.steps_per_s.value, rel=0.01)
    assert len(found.halves) == 2 and found.halves[0]


def test_counting_that_was_on_stays_on(page: Page) -> None:
    """The word of somebody else's table is left as it is."""
    wanted = Control(1, True, 7.0)
    page.words[layout.CONTROL] = wanted.word
    look(page, 0.3)
    assert read_page(page.path).control == wanted


def test_a_switch_in_mid_look_is_not_undone(page: Page) -> None:
    """Who switched on meanwhile wants it on."""
    watch = StageWatch([page.path])
    watch.start()
    wanted = read_page(page.path).control.changed(True, 5.0)
    page.words[layout.CONTROL] = wanted.word
    watch.stop()
    assert read_page(page.path).control == wanted


def test_waits_are_read_while_they_last(page: Page) -> None:
    """A drafter that has been waiting since before the first reading waits all of the window."""
    for name, value in (("queue_depth", 4), ("targets", 2), ("batches", 10)):
        page.set_gauge(name, value)
    page.set_gauge("getting_since_ns", time.monotonic_ns() - 10**9)
    first = read_page(page.path)
    time.sleep(0.2)
    page.set_gauge("put_wait_ns", 10**8)
    page.set_gauge("batches", 13)
    last = read_page(page.path)
    (window,) = windows_between([first, last])
    assert window.get_wait_s == pytest.approx(window.seconds, rel=0.05)
    assert window.put_wait_s == pytest.approx(0.1)
    assert window.batches == 3


def test_the_queue_has_shares_with_intervals(page: Page) -> None:
    """Both waits are shares of time, and its history goes from moment to moment."""
    page.set_gauge("queue_depth", 4)
    page.set_gauge("targets", 1)
    page.set_gauge("queue", 3)
    found = look(page, 0.7)
    assert found.queue is not None
    assert (found.queue.depth, found.queue.targets) == (4, 1)
    assert found.queue.waiting == pytest.approx(3.0)
    assert found.queue.get_wait.value == 0.0 and found.queue.get_wait.low == 0.0
    assert found.queue.history[0][1] == 3 and found.queue.batches_per_s > 5


def test_a_page_that_vanishes_is_no_error(page: Page, folder: Path) -> None:
    """The process has ended in mid-look: the level says so."""
    watch = StageWatch([folder / "paceline-gone.page"])
    watch.start()
    found = watch.stop()
    assert not found.level.ok and "cannot be read" in found.level.reason
    assert found.stages == [] and found.queue is None


def test_a_process_is_found_to_be_ours_by_its_page_and_lock(page: Page, tmp_path: Path) -> None:
    """By what it has in memory and open, without its help."""
    assert page_of(os.getpid()) == page.path
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{}", encoding="utf-8")
    assert folder_of(os.getpid()) is None
    with open(run / "run.lock", "w", encoding="utf-8"):
        assert folder_of(os.getpid()) == run
    assert page_of(2**22 + 1) is None and folder_of(2**22 + 1) is None
