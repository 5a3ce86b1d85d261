"""A group of drafters: what its collectives give, and that no rank waits for ever for one that is gone."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.errors import PipelineError
from paceline.train.group import Group, listen
from tests import ranks

SIZES = [1, 2, 3]


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_the_same_bits_everywhere(size: int) -> None:
    """Every rank has the sum of all values, rounded alike; its own are left alone."""
    values = torch.rand(size, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted, before = values.sum(0), values.clone()
    for found in ranks.run(size, lambda group: group.sum(values[group.rank])):
        torch.testing.assert_close(found, wanted)
        assert torch.equal(found, wanted)
    assert torch.equal(values, before)


@pytest.mark.parametrize("size", SIZES)
def test_parts_of_sums_and_wholes_of_parts(size: int) -> None:
    """Each rank gets its part of the sum; parts of any type become the whole, on all ranks or on the first alone."""

    def work(group: Group) -> tuple[Tensor, Tensor, Tensor | None]:
        part = group.reduce_scatter_(torch.arange(4.0 * size) * (group.rank + 1)).clone()
        whole = torch.zeros(4 * size, dtype=torch.bfloat16)
        group.part_of(whole).fill_(group.rank + 0.5)
        group.all_gather_(whole)
        gathered = torch.zeros(4 * size) if group.rank == 0 else None
        group.gather(part, gathered)
        return part, whole, gathered

    results = ranks.run(size, work)
    summed = torch.arange(4.0 * size) * sum(range(1, size + 1))
    for rank, (part, whole, _) in enumerate(results):
        assert torch.equal(part, summed[4 * rank :][:4])
        assert torch.equal(whole, (torch.arange(4 * size) // 4 + 0.5).bfloat16())
    assert results[0][2] is not None and torch.equal(results[0][2], summed)


def test_a_group_of_one_hands_back_what_it_is_given() -> None:
    """Nothing is copied, opened or waited for."""
    group, values = Group.open(0, 1, ("nowhere.invalid", 1), ranks.CPU, 1.0), torch.ones(3)
    assert group.sum(values) is values and group.reduce_scatter_(values) is values
    group.all_gather_(values)
    group.barrier(ranks.CPU)
    group.abort("nothing")
    group.close()
    group.check()


def test_a_barrier_is_passed_together() -> None:
    """No rank is through before the last has come."""
    came: list[int] = []

    def work(group: Group) -> int:
        time.sleep(0.1 * group.rank)
        came.append(group.rank)
        group.barrier(ranks.CPU)
        return len(came)

    assert ranks.run(3, work) == [3, 3, 3]


def test_ranks_that_do_not_come_are_missed() -> None:
    """A group that is not complete in time is an error that says so, at the first rank and at another."""
    store = listen("127.0.0.1", 0.5)
    for rank, meeting in ((0, store), (1, ("127.0.0.1", store.port))):
        with pytest.raises(PipelineError, match=f"drafter-{rank} could not meet the other drafters") as caught:
            Group.open(rank, 3, meeting, ranks.CPU, 0.5)
        assert caught.value.role == f"drafter-{rank}"


def test_nobody_at_the_meeting_point() -> None:
    """A port at which nobody listens is an error once the time is over."""
    with pytest.raises(PipelineError, match="drafter-1 could not meet"):
        Group.open(1, 2, ("127.0.0.1", 9), ranks.CPU, 0.5)


def waits_for(rank: int, collective: Callable[[Group], object]) -> Callable[[Group], float]:
    """All ranks add up once; then `rank` goes away and the others enter the collective. Seconds until it failed."""
    is_over = threading.Event()

    def work(group: Group) -> float:
        group.sum(torch.ones(1))
        if group.rank == rank:
            is_over.wait(10.0)
            return 0.0
        started = time.monotonic()
        try:
            with pytest.raises(PipelineError, match=f"drafter-{group.rank} waited for the other drafters in vain"):
                collective(group)
            seconds = time.monotonic() - started
            with pytest.raises(PipelineError, match="in vain"):  # and at once from now on
                group.check()
            return seconds
        finally:
            is_over.set()

    return work


COLLECTIVES = {
    "sum": lambda group: group.sum(torch.ones(1)),
    "reduce_scatter": lambda group: group.reduce_scatter_(torch.ones(4)),
    "all_gather": lambda group: group.all_gather_(torch.ones(4)),
    "gather": lambda group: group.gather(torch.ones(4), torch.ones(8)),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rank_that_hangs_is_waited_for_no_longer_than_said(name: str) -> None:
    """A collective that one rank does not enter ends in an error when the time is over."""
    seconds = max(ranks.run(2, waits_for(1, COLLECTIVES[name]), timeout_s=0.6))
    assert 0.3 < seconds < 5.0


def test_who_knows_better_breaks_it_off() -> None:
    """`abort` from another thread ends what a rank waits for, with the reason given, long before the timeout."""
    is_over = threading.Event()

    def work(group: Group) -> float:
        group.sum(torch.ones(1))
        if group.rank == 1:
            is_over.wait(30.0)
            return 0.0
        timer = threading.Timer(0.3, group.abort, ("lost drafter-1: its actor died",))
        timer.start()
        started = time.monotonic()
        try:
            with pytest.raises(PipelineError, match="drafter-0 lost drafter-1: its actor died"):
                group.sum(torch.ones(1))
            return time.monotonic() - started
        finally:
            is_over.set()

    assert ranks.run(2, work, timeout_s=30.0)[0] < 5.0


OTHER = """
import sys, torch
from paceline.train.group import Group
group = Group.open(1, 2, ("127.0.0.1", int(sys.argv[1])), torch.device("cpu"), 60.0)
group.sum(torch.ones(1))
print("here", flush=True)
sys.stdin.read()
"""


def test_a_rank_that_is_killed_is_noticed_at_once() -> None:
    """With SIGKILL a process leaves no word; the other ranks' collectives fail all the same, and a new group opens."""
    store = listen("127.0.0.1", 60.0)
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(store.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        group = Group.open(0, 2, store, ranks.CPU, 60.0)
        assert float(group.sum(torch.ones(1))) == 2.0
        assert other.stdout is not None and other.stdout.readline() == "here\n"
        threading.Timer(0.2, other.kill).start()
        started = time.monotonic()
        with pytest.raises(PipelineError, match="drafter-0 waited for the other drafters in vain"):
            group.sum(torch.ones(1))
        assert 0.1 < time.monotonic() - started < 10.0
        group.close()
    finally:
        other.kill()
        other.wait()
    assert [float(total) for total in ranks.run(2, lambda group: group.sum(torch.ones(1)))] == [2.0, 2.0]


def test_the_meeting_place_is_heard_at_its_address_alone() -> None:
    """A store of another address of this host is refused a connection."""
    store = listen("127.0.0.1", 5.0)
    with socket.create_connection(("127.0.0.1", store.port), timeout=2):
        pass
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", store.port), timeout=2):
        pass
