"""Who holds the GIL: against recorded output, and against a thread whose share is known."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest

from paceline.profiling.collect.gil import _interval, look_at_gil
from paceline.profiling.statistics import wilson
from tests.unit.profiling.test_collect_tools import HOG, NOT_RUNNING, Target, fake_tool, tool

SAID = "py-spy> Wrote raw flamegraph data to 'gil.txt'. Samples: 60 Errors: {errors}\n"
RAW = """\
thread (11): hog;Thread.run (threading.py:982);hog (hog.py:8) 30
thread (11): hog;Thread.run (threading.py:982);hog (hog.py:9) 10
thread (12): other;Thread.run (threading.py:982);work (hog.py:30) 20
"""


# Recorded.


def test_a_share_is_of_the_moments_that_were_tried(tmp_path: Path, sleeper: int) -> None:
    """py-spy's samples are those with a holder; it tries a moment less than the rate says."""
    look = look_at_gil(sleeper, 2, tool=fake_tool(tmp_path, SAID.format(errors=0), RAW), rate=100)
    assert look.halves == ((60, 99), (60, 99))
    assert look.gil is not None
    assert look.gil.share == pytest.approx(120 / 198)
    assert look.gil.interval == pytest.approx(wilson(120, 198))
    assert look.shares == {11: (80, 198), 12: (40, 198)}
    assert [(h.tid, h.name, h.where) for h in look.gil.holders] == [
        (11, "hog", ("hog (hog.py:8)", "hog (hog.py:9)")),
        (12, "other", ("work (hog.py:30)",)),
    ]
    assert look.gil.holders[0].interval == pytest.approx(wilson(80, 198))
    assert (look.level.ok, look.level.samples, look.level.reason) == (True, 198, "")


def test_moments_that_were_lost_widen_the_interval(tmp_path: Path, sleeper: int) -> None:
    """They may all have had a holder, or none."""
    look = look_at_gil(sleeper, 2, tool=fake_tool(tmp_path, SAID.format(errors=9), RAW), rate=100)
    assert look.gil is not None
    assert (look.gil.samples, look.gil.errors) == (180, 18)
    assert look.gil.share == pytest.approx(120 / 180)
    assert look.gil.interval[0] <= wilson(120, 198)[0] + 0.01
    assert look.gil.interval[1] >= wilson(138, 198)[1] - 0.01


def test_a_process_without_a_holder_has_a_share_of_nothing(tmp_path: Path, sleeper: int) -> None:
    """It was seen, and nobody held the lock."""
    look = look_at_gil(sleeper, 2, tool=fake_tool(tmp_path, "Wrote. Samples: 0 Errors: 0"))
    assert look.gil is not None
    assert (look.gil.share, look.gil.holders, look.level.ok) == (0.0, (), True)
    assert look.gil.interval[1] < 0.05


def test_halves_that_differ_widen_the_interval() -> None:
    """As far as they differ, and not where chance explains it."""
    assert _interval((30, 100), (36, 100), 0) == pytest.approx(wilson(66, 200))
    assert _interval((10, 100), (90, 100), 0) == pytest.approx((0.1, 0.9))
    low, high = _interval((0, 50), (100, 100), 0)
    assert (low, high) == (pytest.approx(2 / 3 - 0.5), 1.0)
    assert _interval((0, 0), (0, 0), 0) == (0.0, 1.0)
    assert _interval((5, 10), (0, 0), 0) == pytest.approx(wilson(5, 10))


def test_a_refusal_is_said_in_words(tmp_path: Path, sleeper: int) -> None:
    """Without rights there is no figure, one reason, and one remedy."""
    look = look_at_gil(sleeper, 2, tool=fake_tool(tmp_path, stderr=NOT_RUNNING, code=1))
    assert look.gil is None
    assert (look.level.ok, look.level.id) == (False, "2")
    assert "not allowed" in look.level.reason
    assert "SYS_PTRACE" in look.level.fix
    assert look.level.costs


def test_a_tool_that_is_gone_is_said_in_words(sleeper: int) -> None:
    """No traceback."""
    look = look_at_gil(sleeper, 2, tool="/nowhere/py-spy")
    assert not look.level.ok
    assert look.level.reason


@pytest.fixture
def sleeper(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Number of a process that does nothing."""
    with Target(tmp_path, "print(flush=True); time.sleep(60)") as target:
        yield target.pid


# Live.


def times(pid: int, tid: int) -> tuple[float, float]:
    """Seconds that a thread was on a CPU, and that it waited for one."""
    try:
        on_cpu, waiting = Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[:2]
    except OSError:
        pytest.skip("no schedstat here to know the truth by")
    return int(on_cpu) / 1e9, int(waiting) / 1e9


@pytest.mark.parametrize("duty", [0.3, pytest.param(0.8, marks=pytest.mark.slow)])
def test_a_hog_is_seen_as_often_as_it_holds_the_lock(duty: float, tmp_path: Path) -> None:
    """Its share is its own time on a CPU and waiting for one, within the interval and 6 points; of its waits, those
    after a sleep are without the lock, so on a busy machine the truth is a range."""
    path = tool("py-spy")
    with Target(tmp_path, HOG.format(duty=duty)) as target:
        tid = int(target.words[1])
        before, start = times(target.pid, tid), time.monotonic()
        look = look_at_gil(target.pid, 5, tool=path, names={tid: "hog; (a) b"})
        seconds, after = time.monotonic() - start, times(target.pid, tid)
    on_cpu, waiting = ((now - was) / seconds for was, now in zip(before, after, strict=True))
    assert look.gil is not None, look.level.reason
    assert look.gil.interval[0] - 0.06 <= on_cpu + waiting
    assert on_cpu <= look.gil.interval[1] + 0.06
    assert look.gil.holders[0].tid == tid
    assert look.gil.holders[0].name == "hog; (a) b"
    assert look.gil.holders[0].where[0].startswith("hog (target.py:")
    assert look.level.disturbance.stop_frac is None


def test_a_process_that_ends_in_mid_look_gives_what_was_seen(tmp_path: Path) -> None:
    """The moments until then, and a word on it."""
    path = tool("py-spy")
    with Target(tmp_path, HOG.format(duty=0.9)) as target:
        target.kill_after(1.5)
        look = look_at_gil(target.pid, 20, tool=path)
    assert "ended" in look.level.reason
    if look.gil is not None:  # else it had not begun by then
        assert look.gil.share > 0.4
        assert look.gil.samples < 600


def test_a_look_that_is_cancelled_gives_what_was_seen(tmp_path: Path) -> None:
    """It ends long before its time."""
    path = tool("py-spy")
    cancel = threading.Event()
    with Target(tmp_path, HOG.format(duty=0.9)) as target:
        threading.Timer(1.5, cancel.set).start()
        look = look_at_gil(target.pid, 60, tool=path, cancel=cancel)
    assert "cancelled" in look.level.reason
    assert look.level.seconds < 25.0


def test_what_is_no_python_is_refused() -> None:
    """In words, with a remedy."""
    path = tool("py-spy")
    with subprocess.Popen(["sleep", "60"]) as child:
        look = look_at_gil(child.pid, 2, tool=path)
        child.kill()
    assert (look.gil, look.level.reason) == (None, "not a Python process")
    assert look.level.fix
