"""Ranks of a group of drafters as threads of the test, each with a gloo group of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from paceline.train.group import Group, listen

CPU = torch.device("cpu")
Result = TypeVar("Result")


def start(size: int, work: Callable[[Group], Result], timeout_s: float = 20.0) -> list[Future[Result]]:
    """What each rank makes of its group, which is closed afterwards, also where that fails."""
    store = listen("127.0.0.1", timeout_s)

    def rank_of(rank: int) -> Result:
        meeting = store if rank == 0 else ("127.0.0.1", store.port)
        group = Group.open(rank, size, meeting, CPU, timeout_s)
        try:
            return work(group)
        finally:
            group.close()

    pool = ThreadPoolExecutor(size)
    futures = [pool.submit(rank_of, rank) for rank in range(size)]
    pool.shutdown(wait=False)
    return futures


def run(size: int, work: Callable[[Group], Result], timeout_s: float = 20.0) -> list[Result]:
    """The results of all ranks; the first failure if one fails."""
    return [future.result() for future in start(size, work, timeout_s)]
