"""The coordinator: every batch is issued once, in order, and accounted for."""

from __future__ import annotations

import threading

import pytest

from paceline.pipeline.coordinator import Coordinator, Ledger


def test_batches_are_issued_once_in_order() -> None:
    """Leases run from the first to the last batch and then end."""
    coordinator = Coordinator(3, 6)
    assert [coordinator.lease("a"), coordinator.lease("b"), coordinator.lease("a")] == [3, 4, 5]
    assert coordinator.lease("a") is None


def test_concurrent_leases_do_not_overlap() -> None:
    """Many roles at once get every number exactly once."""
    coordinator, taken = Coordinator(0, 2000), []

    def work(role: str) -> None:
        while (number := coordinator.lease(role)) is not None:
            taken.append(number)

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(2000))


def test_the_ledger_balances() -> None:
    """Issued equals delivered plus in flight at any time."""
    coordinator = Coordinator(0, 5)
    for _ in range(3):
        coordinator.lease("a")
    coordinator.delivered(0)
    assert coordinator.ledger() == Ledger(issued=3, delivered=1, in_flight=2)


def test_a_batch_is_delivered_once() -> None:
    """Delivering an unknown or already delivered batch is an error."""
    coordinator = Coordinator(0, 5)
    coordinator.lease("a")
    coordinator.delivered(0)
    for number in (0, 4):
        with pytest.raises(ValueError, match=f"batch {number}"):
            coordinator.delivered(number)
