"""Which batch is made next and by whom: a state machine without threads of its own, driven by an executor."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Ledger:
    """Where the batches of a start are. At all times ``issued == delivered + in_flight``."""

    issued: int
    delivered: int
    in_flight: int


class Coordinator:
    """Issues batch numbers ``[first, end)`` in order; each is leased to one role until it is delivered.

    A batch is a pure function of its number, so a lease says all that is needed to make it.
    """

    def __init__(self, first: int, end: int) -> None:
        self._next = first
        self._end = end
        self._leases: dict[int, str] = {}
        self._issued = 0
        self._delivered = 0
        self._lock = threading.Lock()

    def lease(self, role: str) -> int | None:
        """The next batch number for this role, or None when all are issued."""
        with self._lock:
            if self._next >= self._end:
                return None
            number = self._next
            self._next += 1
            self._issued += 1
            self._leases[number] = role
            return number

    def delivered(self, number: int) -> None:
        """The drafter has taken this batch. Raises: ValueError if nobody holds a lease on it."""
        with self._lock:
            if self._leases.pop(number, None) is None:
                raise ValueError(f"batch {number} was delivered without a lease")
            self._delivered += 1

    def ledger(self) -> Ledger:
        """Counts at this moment."""
        with self._lock:
            return Ledger(issued=self._issued, delivered=self._delivered, in_flight=len(self._leases))
