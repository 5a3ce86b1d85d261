"""What a process says of itself."""

from __future__ import annotations

import json
import threading
import time
import weakref

import pytest

from paceline.profiling import inside


def hog(done: threading.Event) -> None:
    while not done.is_set():
        sum(range(1000))


def test_frames_of_other_threads_are_sampled() -> None:
    """A thread that works is seen at it, by its number at the operating system; the sampler leaves itself out."""
    done = threading.Event()
    thread = threading.Thread(target=hog, args=(done,), name="hog", daemon=True)
    thread.start()
    try:
        found = inside.sample_frames(1.0, seed=0)
    finally:
        done.set()
        thread.join()
    mine = [each for each in found["stacks"] if each["tid"] == thread.native_id]
    assert sum(each["count"] for each in mine) >= 0.5 * found["samples"] > 0
    assert any("hog (test_inside.py:" in frame for each in mine for frame in each["frames"])
    assert found["names"][str(thread.native_id)] == "hog"
    assert not any("sample_frames" in frame for each in found["stacks"] for frame in each["frames"])


def test_a_held_lock_is_felt() -> None:
    """Of the probe's wakes nearly all are late beside a thread that never lets go by itself, and few without one."""
    done = threading.Event()
    idle = inside.sample_frames(1.0, seed=0)["probe"]
    thread = threading.Thread(target=hog, args=(done,), daemon=True)
    thread.start()
    try:
        held = inside.sample_frames(1.0, seed=0)["probe"]
    finally:
        done.set()
        thread.join()
    assert held["late"] / held["wakes"] > idle["late"] / idle["wakes"]
    assert held["late"] / held["wakes"] > 0.5


def test_the_answer_fits_through_the_socket() -> None:
    """The rarest stacks go first."""
    stacks = [{"tid": i, "frames": ["x" * 1000], "count": 2000 - i} for i in range(2000)]
    kept = inside._within_bounds(stacks)
    assert len(json.dumps(kept)) < 900_000
    assert kept[0]["count"] == 2000


def test_one_at_a_time() -> None:
    """A second request is refused while the first one samples: looking must not add up."""
    first = threading.Thread(target=inside.sample_frames, args=(1.0,))
    first.start()
    time.sleep(0.3)
    with pytest.raises(RuntimeError, match="already"):
        inside.sample_frames(0.1)
    first.join()


def test_no_frame_is_kept_alive() -> None:
    """What a function held is let go as it returns, though its thread is being sampled."""

    class Tensor:
        pass

    alive: list[bool] = []

    def work() -> None:
        for _ in range(40):
            tensor = Tensor()
            seen = weakref.ref(tensor)
            (lambda held: time.sleep(0.01))(tensor)
            del tensor
            alive.append(seen() is not None)

    sampler = threading.Thread(target=inside.sample_frames, args=(0.6,))
    sampler.start()
    work()
    sampler.join()
    assert sum(alive) <= 2  # one may be looked at in just that moment


def test_without_cuda_there_are_no_counters() -> None:
    """On the CPU the allocator and the flight recorder have nothing to say, and nothing is imported or started."""
    assert inside.allocator_counters()["devices"] == {}
    assert inside.collectives()["entries"] == []


def test_a_long_look_is_cut_short() -> None:
    """A request for no time at all gives an answer soon."""
    began = time.monotonic()
    inside.sample_frames(-5.0)
    assert time.monotonic() - began < 10
