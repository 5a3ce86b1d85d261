"""The coordinator: every batch is issued once, in order, and accounted for."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    """Issued equals trained, in flight and skipped together; what is delivered stays in flight until it is trained."""
    coordinator = Coordinator(0, 5)
    for _ in range(4):
        coordinator.lease("a")
    for number in (0, 1, 2):
        coordinator.delivered(number)
    coordinator.trained([0])
    coordinator.skipped([2])
    coordinator.retried()
    assert coordinator.ledger() == Ledger(issued=4, trained=1, in_flight=2, skipped=1, retried=1)


@given(st.lists(st.sampled_from(["lease", "delivered", "trained", "skipped", "retried", "rewound"]), max_size=40))
def test_the_ledger_balances_at_all_times(actions: list[str]) -> None:
    """After whatever happens, rewinding included; and in the end every batch was trained or skipped once."""
    coordinator, trained, leased, gathered = Coordinator(0, 8), 0, list[int](), list[int]()
    for action in [*actions, *["lease", "delivered", "trained"] * 8]:
        if action == "lease" and (number := coordinator.lease("a")) is not None:
            leased.append(number)
        elif action == "delivered" and leased:
            gathered.append(leased.pop(0))
            coordinator.delivered(gathered[-1])
        elif action in ("trained", "skipped") and gathered:
            getattr(coordinator, action)([gathered.pop(0)])
            trained += 1
        elif action == "retried":
            coordinator.retried()
        elif action == "rewound":
            coordinator = coordinator.rewound(trained)
            leased, gathered = [], []
        ledger = coordinator.ledger()
        assert ledger.issued == ledger.trained + ledger.in_flight + ledger.skipped
        assert ledger.trained + ledger.skipped == trained
    assert ledger.issued == trained == 8


def test_a_batch_is_trained_once() -> None:
    """What was not delivered, or is settled already, is in no update."""
    coordinator = Coordinator(0, 5)
    coordinator.lease("a")
    with pytest.raises(KeyError):
        coordinator.trained([0])
    coordinator.delivered(0)
    coordinator.skipped([0])
    with pytest.raises(KeyError):
        coordinator.trained([0])


def test_a_batch_is_delivered_once() -> None:
    """Delivering an unknown or already delivered batch is an error."""
    coordinator = Coordinator(0, 5)
    coordinator.lease("a")
    coordinator.delivered(0)
    for number in (0, 4):
        with pytest.raises(ValueError, match=f"batch {number}"):
            coordinator.delivered(number)
