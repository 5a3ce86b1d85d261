"""Python and native stacks: against recorded output, and against threads that wait for something known."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.profiling.collect import stacks
from paceline.profiling.collect.stacks import (
    StackLook,
    _moments,
    first_stop,
    plan_native,
    python_frames,
    sample_native,
    sample_python,
)
from paceline.profiling.collect.tools import left_stopped, thread_stat
from paceline.profiling.evidence import Frame, Stack
from tests.unit.profiling.test_collect_tools import (
    HOG,
    NOT_RUNNING,
    WAITERS,
    Target,
    fake_tool,
    moment,
    tool,
    until,
)


def state(pid: int, tid: int) -> str:
    return thread_stat(pid, tid)[0]


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[int]:
    """Number of a process that does nothing."""
    with Target(tmp_path, "print(flush=True); time.sleep(60)") as target:
        yield target.pid


def native(pid: int, seconds: float, path: str, **others: Any) -> StackLook:
    settings: dict[str, Any] = {"symbol_bytes": 10**7, "has_torch": False, "budget": 0.9}
    return sample_native(pid, seconds, tool=path, moment_state=state, **{**settings, **others})


def at(look: StackLook, name: str) -> list[Stack]:
    """Stacks of the thread of that name."""
    return [stack for stack in look.stacks if look.names.get(stack.tid) == name]


# Level 3, recorded.


def a_frame(name: str, file: str, line: int, **others: Any) -> dict[str, Any]:
    return {
        "name": name,
        "filename": f"/usr/lib/{file}",
        "module": None,
        "short_filename": file,
        "line": line,
        "locals": [{"name": "token", "repr": "secret"}],
        "is_entry": False,
        "is_shim_entry": False,
        **others,
    }


def a_thread(tid: int, **others: Any) -> dict[str, Any]:
    frames = [a_frame("Condition.wait", "threading.py", 355), a_frame("Queue.get", "queue.py", 171, is_shim_entry=True)]
    return {
        "pid": 5,
        "thread_id": 140,
        "thread_name": "queue waiter",
        "os_thread_id": tid,
        "active": False,
        "owns_gil": False,
        "frames": [*frames, a_frame("Thread.run", "threading.py", 1010)],
        **others,
    }


def test_frames_are_outermost_first_and_without_values() -> None:
    """Frames that were entered from C are real and stay; the interpreter's own in between go."""
    thread = a_thread(1)
    thread["frames"].insert(1, a_frame("<shim>", "", 0, is_shim_entry=True))
    assert python_frames(thread) == (
        Frame(name="Thread.run", file="threading.py", line=1010),
        Frame(name="Queue.get", file="queue.py", line=171),
        Frame(name="Condition.wait", file="threading.py", line=355),
    )
    assert python_frames({"frames": None}) == ()


def test_dumps_are_counted_and_joined_with_the_state(tmp_path: Path, sleeper: int) -> None:
    """Identical stacks are one; a state that changed around a dump is not known."""
    dump = json.dumps([a_thread(sleeper), a_thread(77, thread_name=None, owns_gil=True)])
    flips = iter(range(100))

    def moment(pid: int, tid: int) -> tuple[str, str]:
        return ("S", "futex") if tid == sleeper else ("RS"[next(flips) % 2], "")

    look = sample_python(sleeper, 0.5, tool=fake_tool(tmp_path, dump), moment=moment, count=3, seed=1)
    known, unknown = look.stacks
    assert (known.count, known.tid, known.state, known.syscall, known.has_gil) == (3, sleeper, "S", "futex", False)
    assert (unknown.count, unknown.tid, unknown.state, unknown.has_gil) == (3, 77, "", True)
    assert look.names == {sleeper: "queue waiter"}
    assert (look.level.ok, look.level.samples, look.level.errors, look.level.reason) == (True, 6, 0, "")
    assert "secret" not in look.stacks[0].model_dump_json()


def test_dumps_that_fail_are_errors(tmp_path: Path, sleeper: int) -> None:
    """With the reason in words; after three at the begin there is no use in more."""
    look = sample_python(
        sleeper, 0.2, tool=fake_tool(tmp_path, stderr=NOT_RUNNING, code=1), moment=moment, count=20, seed=1
    )
    assert (look.level.ok, look.level.errors, look.stacks) == (False, 3, [])
    assert "not allowed" in look.level.reason
    assert "SYS_PTRACE" in look.level.fix


@pytest.mark.parametrize("said", ["", "[", "{}", "null", "[1, null]"])
def test_a_dump_that_is_no_dump_raises_nothing(said: str, tmp_path: Path, sleeper: int) -> None:
    """It is an error of the level at most."""
    look = sample_python(sleeper, 0.1, tool=fake_tool(tmp_path, said), moment=moment, count=2, seed=1)
    assert look.stacks == []


@given(seconds=st.floats(0.1, 100.0), count=st.integers(1, 50), seed=st.integers(0, 999))
def test_moments_lie_in_the_window(seconds: float, count: int, seed: int) -> None:
    """As many as were asked for, in order."""
    times = _moments(seconds, count, Random(seed))
    assert len(times) == count
    assert times == sorted(times)
    assert 0.0 <= times[0] and times[-1] <= seconds


# Level 4, planned and recorded.


@given(
    seconds=st.floats(1.0, 30.0),
    stop_s=st.floats(0.0005, 0.2),
    first_s=st.floats(0.0, 1.0),
    budget=st.floats(0.005, 0.5),
    most=st.floats(1.0, 60.0),
)
def test_a_plan_keeps_to_its_budget(seconds: float, stop_s: float, first_s: float, budget: float, most: float) -> None:
    """Within whole rates and windows; and there is one where the least number of samples would do."""
    plan = plan_native(seconds, stop_s, first_s, budget, most)
    longest = max(-(-seconds // 1), most // 1)
    if plan is None:
        assert (first_s + min(longest, stacks.LEAST_MOMENTS) * stop_s) / longest > budget - 1e-6
        return
    assert 1 <= plan.rate <= stacks.MAX_RATE
    window = plan.seconds + plan.rest
    assert seconds <= window <= longest
    assert plan.predicted == pytest.approx((first_s + plan.rate * plan.seconds * stop_s) / window)
    assert plan.predicted <= budget + 1e-6


def test_a_busy_minute_is_sampled_in_part() -> None:
    """Where one sample a second is over the budget, as beside a GPU, some are taken and then the process rests."""
    plan = plan_native(60, 0.032, 0.8, 0.03, 60)
    assert plan == stacks.Plan(1, 31, pytest.approx(0.0299, abs=1e-3), rest=29)  # type: ignore[arg-type]


def test_more_threads_make_for_fewer_samples() -> None:
    """The longer a stop, the lower the rate; in the end none."""
    rates = [plan_native(10, stop_s, 0.12, 0.03, 30) for stop_s in (0.001, 0.005, 0.02, 0.1)]
    found = [plan.rate * plan.seconds if plan else 0 for plan in rates]
    assert found == sorted(found, reverse=True) and found[0] > stacks.MOMENTS > found[-2] > found[-1] == 0


def test_symbols_of_torch_take_longest() -> None:
    """Of other libraries by their size, and never longer."""
    assert first_stop(0, True) == 0.8
    assert first_stop(0, False) == 0.12
    assert 0.12 < first_stop(10**9, False) < first_stop(10**12, False) == 0.8


SAID = "py-spy> Wrote raw flamegraph data. Samples: 40 Errors: {errors}\n"
RAW = """\
thread (11): drafter;Thread.run (threading.py:982);step (train.py:8);cudaLaunchKernel (libcudart.so.12);\
cuLaunchKernel (libcuda.so.1);0x7f01 (libcuda.so.1) 19
thread (11): drafter;Thread.run (threading.py:982);step (train.py:8);cudaLaunchKernel (libcudart.so.12);\
cuLaunchKernel (libcuda.so.1);0x7f02 (libcuda.so.1) 20
"""


def test_native_stacks_are_read(tmp_path: Path, sleeper: int) -> None:
    """Two addresses in a stripped library are the same frame."""
    look = native(sleeper, 2, fake_tool(tmp_path, SAID.format(errors=0), RAW))
    (stack,) = look.stacks
    assert (stack.tid, stack.count, stack.level, stack.has_gil) == (11, 39, "4", None)
    assert [(frame.name, frame.is_native) for frame in stack.frames] == [
        ("Thread.run", False),
        ("step", False),
        ("cudaLaunchKernel", True),
        ("cuLaunchKernel", True),
        ("0x?", True),
    ]
    assert look.names == {11: "drafter"}
    assert (look.level.ok, look.level.in_verdict, look.level.reason) == (True, True, "")
    cost = look.level.disturbance
    assert cost.stop_frac == 0.0
    assert cost.predicted_stop_frac is not None and 0.0 < cost.predicted_stop_frac <= 0.9


def test_many_lost_moments_are_said(tmp_path: Path, sleeper: int) -> None:
    """Above 5 %."""
    look = native(sleeper, 2, fake_tool(tmp_path, SAID.format(errors=5), RAW))
    assert "5 of 39 moments gave no stack" in look.level.reason


def test_what_does_not_fit_is_not_begun(tmp_path: Path, sleeper: int) -> None:
    """The level says what would: both of its remedies do."""
    path = fake_tool(tmp_path, SAID.format(errors=0), RAW)
    look = native(sleeper, 2, path, has_torch=True, budget=0.02, max_seconds=20)
    assert not look.level.ok
    assert "over the budget of 2 %" in look.level.reason
    budget, seconds = look.level.fix.split(" or ")
    assert native(sleeper, 1, path, has_torch=True, budget=float(budget.split()[1]), max_seconds=20).level.ok
    assert plan_native(float(seconds.split()[1]), stacks.MIN_STOP_S, 0.8, 0.02, 20) is not None


def test_a_level_over_its_budget_is_kept_out_of_the_verdict(
    tmp_path: Path, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stacks are there, and the reason."""

    class Meter(stacks.StopMeter):
        def __exit__(self, *_: object) -> None:
            super().__exit__()
            self.stops = stacks.Stops(0.5, 1.0, 0.01, 2.0)

    monkeypatch.setattr(stacks, "StopMeter", Meter)
    look = native(sleeper, 2, fake_tool(tmp_path, SAID.format(errors=0), RAW), budget=0.3)
    assert (look.level.ok, look.level.in_verdict) == (True, False)
    assert "stopped for 50.0 % of the time, over the budget of 30 %" in look.level.reason
    assert look.level.disturbance.longest_stop_s == 0.01


def test_a_stopped_process_is_left_alone(tmp_path: Path, sleeper: int) -> None:
    """A tracer that goes away might set it off again."""
    look = sample_native(
        sleeper, 2, tool=fake_tool(tmp_path), moment_state=lambda *_: "T", symbol_bytes=0, has_torch=False
    )
    assert not look.level.ok
    assert "stopped" in look.level.reason


# Live.


def test_waiters_are_seen_where_they_wait(tmp_path: Path) -> None:
    """A thread in `Queue.get`, and one at a lock, sleep in a futex."""
    path = tool("py-spy")
    with Target(tmp_path, WAITERS) as target:
        look = sample_python(target.pid, 2.0, tool=path, moment=moment, count=6, seed=3)
    assert look.level.ok, look.level.reason
    assert look.level.disturbance.stop_frac is None
    waits, locked = at(look, "queue waiter"), at(look, "lock waiter")
    assert {(stack.state, stack.syscall, stack.has_gil) for stack in waits + locked} == {("S", "futex", False)}
    assert [frame.name.rpartition(".")[2] for frame in waits[0].frames][-2:] == ["get", "wait"]
    assert waits[0].frames[-1].file == "threading.py"
    assert locked[0].frames[-1].name == "wait_for_lock"
    assert at(look, "MainThread")[0].frames[-1].name == "<module>"
    assert sum(stack.count for stack in waits) == 6 - look.level.errors


def test_a_native_sample_shows_the_call(tmp_path: Path) -> None:
    """A thread in `time.sleep` is in C below its Python frame, and what was stopped is measured."""
    path = tool("py-spy")
    with Target(tmp_path, WAITERS) as target:
        look = native(target.pid, 2, path)
        assert left_stopped(target.pid) == []
    assert look.level.ok, look.level.reason
    frames = at(look, "MainThread")[0].frames
    assert frames[-1].is_native
    assert any(frame.is_native and "sleep" in frame.name for frame in frames)
    assert any(frame.name == "<module>" and not frame.is_native for frame in frames)
    cost = look.level.disturbance
    assert cost.predicted_stop_frac is not None and cost.stop_frac is not None and cost.longest_stop_s is not None
    assert 0.0 <= cost.stop_frac <= 1.0


def test_nothing_is_left_stopped_after_a_cancelled_look(tmp_path: Path) -> None:
    """What was seen by then is there, and the target goes on."""
    path = tool("py-spy")
    cancel = threading.Event()
    with Target(tmp_path, HOG.format(duty=0.5)) as target:
        tid = int(target.words[1])
        threading.Timer(2.0, cancel.set).start()
        look = native(target.pid, 60, path, max_seconds=60, cancel=cancel)
        assert "cancelled" in look.level.reason
        assert left_stopped(target.pid) == []
        used = thread_stat(target.pid, tid)[1]
        assert until(lambda: thread_stat(target.pid, tid)[1] > used, 20.0)
    assert look.level.seconds < 30.0


def test_a_process_that_ends_in_mid_look_raises_nothing(tmp_path: Path) -> None:
    """Both levels give what was seen, and say so."""
    path = tool("py-spy")
    with Target(tmp_path, HOG.format(duty=0.5)) as target:
        target.kill_after(1.0)
        look = sample_python(target.pid, 10.0, tool=path, moment=moment, count=40, seed=1)
    assert "ended" in look.level.reason
    with Target(tmp_path, HOG.format(duty=0.5)) as target:
        target.kill_after(1.5)
        look = native(target.pid, 20, path)
    assert "ended" in look.level.reason


def test_a_process_that_is_gone_raises_nothing(tmp_path: Path) -> None:
    """Neither level sees anything, and both say why."""
    path = tool("py-spy")
    with Target(tmp_path, "print(flush=True)") as target:
        target.process.wait()
    for look in (sample_python(target.pid, 0.2, tool=path, moment=moment, count=2), native(target.pid, 2, path)):
        assert (look.level.ok, look.level.reason, look.stacks) == (False, "the process ended", [])


def test_a_cancelled_look_at_python_ends_at_once(tmp_path: Path) -> None:
    """With what was seen."""
    path = tool("py-spy")
    cancel = threading.Event()
    with Target(tmp_path, WAITERS) as target:
        threading.Timer(1.0, cancel.set).start()
        look = sample_python(target.pid, 60.0, tool=path, moment=moment, count=200, seed=1, cancel=cancel)
    assert "cancelled" in look.level.reason
    assert look.level.seconds < 25.0


def test_three_hundred_threads_keep_the_budget(tmp_path: Path) -> None:
    """A plan is found that keeps it, or the level says what would fit."""
    path = tool("py-spy")
    source = (
        "for i in range(300): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print(flush=True)\ntime.sleep(60)"
    )
    with Target(tmp_path, source) as target:
        look = native(target.pid, 2, path, budget=0.03, max_seconds=6)
    predicted = look.level.disturbance.predicted_stop_frac
    assert predicted is not None
    assert (predicted <= 0.03) == look.level.ok
    assert look.level.ok or "--pause-budget" in look.level.fix
