"""Who waits for the GIL: against recorded text of pystack, and against threads that contend for it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.profiling.collect.tools import left_stopped
from paceline.profiling.collect.waiters import Waiter, look_with_pystack, parse_pystack
from paceline.profiling.evidence import Frame
from tests.unit.profiling.test_collect_tools import WAITERS, Target, fake_tool, tool

CONTENTION = """
def count():
    number = 0
    while True:
        number += 1

for i in range(3):
    threading.Thread(target=count, daemon=True).start()
print(flush=True)
time.sleep(60)
"""
TEXT = """\
Traceback for thread 30159 (drafter (0) [x]) [Waiting for the GIL] (most recent call last):
    (C) File "../sysdeps/unix/sysv/linux/x86_64/clone3.S", line 81, in __clone3 (/usr/lib/x86_64-linux-gnu/libc.so.6)
    (Python) File "/home/me/my run/hog.py", line 14, in second
        print('(C) File "secret", line 1, in x (y)')
    (C) File "Python/ceval.c", line 1205, in eval_frame_handle_pending (inlined) (/opt/lib/libpython3.11.so.1.0)
    (C) File "???", line 0, in at::add(at::Tensor const&) (/opt/libtorch_cpu.so)
    (C) File "./nptl/cond.c", line 643, in pthread_cond_timedwait@@GLIBC_2.3.2 (/usr/lib/libc.so.6)

Traceback for thread 30158 (python) [Has the GIL,Garbage collecting] (most recent call last):
    (Python) File "/home/me/hog.py", line 13, in <module>
        gc.collect()

Traceback for thread 30157 [] (most recent call last):
    (C) File "???", line 0, in poll (/usr/lib/libc.so.6)

The frame stack for thread 30156 is empty

Traceback for thread 30155 (python) [Dropping the GIL] (most recent call last):
* - Unable to merge native stack due to insufficient native information - *
    (Python) File "/home/me/hog.py", line 7, in f
        f()
      Locals:
        token: secret
"""
SEVERAL = """\
Traceback for thread 5 (python) (most recent call last):
  In interpreter 1 [Has the GIL]
    (Python) File "/a.py", line 1, in f
  In the main interpreter []
    (Python) File "/b.py", line 2, in g
"""


def test_threads_marks_and_frames_are_read() -> None:
    """Names with brackets, threads without a name, C++ names, marks in a row; no source lines and no values."""
    waits, has, plain, unmerged = parse_pystack(TEXT)
    assert (waits.tid, waits.name, waits.waits_for_gil, waits.has_gil) == (30159, "drafter (0) [x]", True, False)
    assert waits.frames == (
        Frame(name="__clone3", file="libc.so.6", is_native=True),
        Frame(name="second", file="hog.py", line=14),
        Frame(name="eval_frame_handle_pending", file="libpython3.11.so.1.0", is_native=True),
        Frame(name="at::add(at::Tensor const&)", file="libtorch_cpu.so", is_native=True),
        Frame(name="pthread_cond_timedwait", file="libc.so.6", is_native=True),
    )
    assert (has.has_gil, has.marks) == (True, ("Has the GIL", "Garbage collecting"))
    assert (plain.tid, plain.name, plain.marks) == (30157, "", ())
    assert (unmerged.marks, unmerged.is_merged, len(unmerged.frames)) == (("Dropping the GIL",), False, 1)
    assert "secret" not in repr(parse_pystack(TEXT))


def test_several_interpreters_say_their_marks_apart() -> None:
    """A thread has the GIL if it has that of any."""
    (thread,) = parse_pystack(SEVERAL)
    assert thread == Waiter(
        5, "python", ("Has the GIL",), (Frame(name="f", file="a.py", line=1), Frame(name="g", file="b.py", line=2))
    )


# The kernel has at most 15 bytes for a name.
COMMS = st.text(
    st.one_of(st.sampled_from(";()[] :,"), st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    min_size=1,
    max_size=15,
)


@given(tid=st.integers(1, 2**22), name=COMMS, mark=st.sampled_from(["", "Has the GIL", "Waiting for the GIL"]))
def test_a_name_may_hold_anything(tid: int, name: str, mark: str) -> None:
    """Brackets, spaces and line breaks in it are the name's."""
    header = f"Traceback for thread {tid} ({name}) [{mark}] (most recent call last):"
    text = f'{header}\n    (Python) File "/x.py", line 3, in f\n'
    (thread,) = parse_pystack(text + "\n" + text.replace(str(tid), "7", 1))[:1]
    assert (thread.tid, thread.name, thread.marks) == (tid, name, (mark,) if mark else ())
    assert thread.frames == (Frame(name="f", file="x.py", line=3),)


@given(st.text(max_size=300))
def test_no_text_is_too_odd(text: str) -> None:
    """What is no thread is passed over."""
    parse_pystack(text)
    parse_pystack(f"Traceback for thread 5 (x) [] (most recent call last):\n    (C) {text}")


@pytest.fixture
def sleeper(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Number of a process that does nothing."""
    with Target(tmp_path, "print(flush=True); time.sleep(60)") as target:
        yield target.pid


def test_shots_are_added_up(tmp_path: Path, sleeper: int) -> None:
    """Two that saw the same count twice."""
    look = look_with_pystack(sleeper, tool=fake_tool(tmp_path, TEXT), shots=2, seed=1)
    assert [stack.count for stack in look.stacks] == [2, 2, 2, 2]
    assert {stack.tid: (stack.has_gil, stack.waits_for_gil) for stack in look.stacks}[30159] == (False, True)
    assert (look.level.id, look.level.ok, look.level.samples, look.level.errors) == ("4b", True, 8, 2)
    assert "2 stacks could not be read in full" in look.level.reason
    assert look.names[30159] == "drafter (0) [x]"
    assert look.level.disturbance.stop_frac == 0.0


def test_marks_alone_stop_nothing(tmp_path: Path, sleeper: int) -> None:
    """The level has no stop to tell of."""
    look = look_with_pystack(sleeper, tool=fake_tool(tmp_path, TEXT), shots=1, marks_only=True)
    assert look.level.ok
    assert look.level.disturbance.stop_frac is None


def test_a_refusal_is_said_in_words(tmp_path: Path, sleeper: int) -> None:
    """One reason and one remedy."""
    said = "\N{SKULL} Engine error: Operation not permitted \N{SKULL}\n"
    look = look_with_pystack(sleeper, tool=fake_tool(tmp_path, stderr=said, code=1))
    assert (look.level.ok, look.stacks) == (False, [])
    assert "not allowed" in look.level.reason
    assert look.level.fix and look.level.costs
    assert not look_with_pystack(sleeper, tool="/nowhere/pystack").level.ok


# Live.


def test_contenders_are_told_apart(tmp_path: Path) -> None:
    """Of three that compute one has the GIL, and others wait for it."""
    path = tool("pystack")
    with Target(tmp_path, CONTENTION) as target:
        look = look_with_pystack(target.pid, tool=path, shots=3, budget=20.0, seed=2)
        assert left_stopped(target.pid) == []
    assert look.level.ok, look.level.reason
    assert sum(stack.count for stack in look.stacks if stack.has_gil) <= 3
    if not any(frame.name == "take_gil" for stack in look.stacks for frame in stack.frames):
        pytest.skip("this interpreter has no symbols, so pystack cannot know who waits")
    waits = [stack for stack in look.stacks if stack.waits_for_gil]
    assert waits
    assert not any(stack.has_gil for stack in waits)
    assert any(frame.name == "count" for stack in waits for frame in stack.frames)
    assert look.level.disturbance.longest_stop_s is not None


def test_marks_are_right_without_a_stop(tmp_path: Path) -> None:
    """At most one thread has the GIL, one that computes, and nobody is said to wait."""
    path = tool("pystack")
    with Target(tmp_path, CONTENTION) as target:
        look = look_with_pystack(target.pid, tool=path, shots=3, marks_only=True, seed=2)
    holders = [stack for stack in look.stacks if stack.has_gil]
    assert sum(stack.count for stack in holders) <= 3
    assert all(stack.tid != target.pid for stack in holders)
    assert not any(stack.waits_for_gil for stack in look.stacks)


def test_shots_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    """The first is always taken."""
    path = tool("pystack")
    with Target(tmp_path, WAITERS) as target:
        look = look_with_pystack(target.pid, tool=path, shots=3, budget=0.0, seed=2)
    if look.level.disturbance.longest_stop_s == 0.0:
        pytest.skip("the stop was too short to be seen")
    assert "1 of 3 shots" in look.level.reason
    assert not look.level.in_verdict


def test_a_process_that_ends_in_mid_look_raises_nothing(tmp_path: Path) -> None:
    """What was seen until then is there."""
    path = tool("pystack")
    with Target(tmp_path, WAITERS) as target:
        target.kill_after(0.7)
        look = look_with_pystack(target.pid, tool=path, shots=30, budget=100.0, seed=2)
    assert "ended" in look.level.reason or "could not be read" in look.level.reason, look.level
    look = look_with_pystack(target.pid, tool=path)
    assert (look.level.ok, look.level.reason) == (False, "the process ended")


def test_nothing_is_left_stopped_after_a_cancelled_look(tmp_path: Path) -> None:
    """Wherever the event comes."""
    path = tool("pystack")
    with Target(tmp_path, WAITERS) as target:
        for delay in (0.05, 0.15, 0.3):
            cancel = threading.Event()
            threading.Timer(delay, cancel.set).start()
            look_with_pystack(target.pid, tool=path, shots=5, budget=100.0, cancel=cancel)
            assert left_stopped(target.pid) == []
        assert target.process.poll() is None
