"""Which batch is made next and by whom: a state machine without threads of its own, driven by an executor."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.profiling import stages


@dataclass(frozen=True)
class Ledger:
    """Where the micro-batches of a start are. At all times ``issued == trained + in_flight + skipped``.

    Attributes:
        issued: Handed to the targets.
        trained: In an update of the drafter whose result is known.
        in_flight: Being made, waiting, or gathered for an update.
        skipped: Left out: nothing was to be learnt from them, or something was not finite.
        retried: Times that one was made again, after a failure of its target or of the update.
    """

    issued: int = 0
    trained: int = 0
    in_flight: int = 0
    skipped: int = 0
    retried: int = 0


class Coordinator:
    """Issues batch numbers ``[first, end)`` in order; each is leased to one role until it is delivered.

    A batch is a pure function of its number, so a lease says all that is needed to make it.

    Attributes:
        first, end: As given.
    """

    def __init__(self, first: int, end: int, before: Ledger | None = None) -> None:
        before = before or Ledger()
        self.first, self.end = first, end
        self._next = first
        self._leases: dict[int, str] = {}
        self._gathered: set[int] = set()
        self._issued, self._trained = before.issued - before.in_flight, before.trained
        self._skipped, self._retried = before.skipped, before.retried
        self._lock = threading.Lock()
        self._show()

    def rewound(self, number: int) -> Coordinator:
        """Another one that issues from `number` on, with this one's counts; what is in flight here is issued again.

        The roles of this one are to be ended.
        """
        ledger = self.ledger()
        again = max(0, self._next - number)
        before = Ledger(ledger.issued, ledger.trained, ledger.in_flight, ledger.skipped, ledger.retried + again)
        return Coordinator(number, self.end, before)

    def lease(self, role: str) -> int | None:
        """The next batch number for this role, or None when all are issued."""
        with self._lock:
            if self._next >= self.end:
                return None
            number = self._next
            self._next += 1
            self._issued += 1
            self._leases[number] = role
            self._show()
            return number

    def retried(self) -> None:
        """A role makes a batch that it holds again."""
        with self._lock:
            self._retried += 1
            self._show()

    def delivered(self, number: int) -> None:
        """The drafter has taken this batch. Raises: ValueError if nobody holds a lease on it."""
        with self._lock:
            if self._leases.pop(number, None) is None:
                raise ValueError(f"batch {number} was delivered without a lease")
            self._gathered.add(number)

    def trained(self, numbers: Iterable[int]) -> None:
        """These batches are in an update. Raises: KeyError if one was not delivered."""
        with self._lock:
            for number in numbers:
                self._gathered.remove(number)
                self._trained += 1
            self._show()

    def skipped(self, numbers: Iterable[int]) -> None:
        """These batches are left out. Raises: KeyError if one was not delivered."""
        with self._lock:
            for number in numbers:
                self._gathered.remove(number)
                self._skipped += 1
            self._show()

    def ledger(self) -> Ledger:
        """Counts at this moment."""
        with self._lock:
            return Ledger(
                issued=self._issued,
                trained=self._trained,
                in_flight=len(self._leases) + len(self._gathered),
                skipped=self._skipped,
                retried=self._retried,
            )

    def _show(self) -> None:
        """On the profile page, for whoever looks from outside."""
        stages.set_gauge("issued", self._issued)
        stages.set_gauge("trained", self._trained)
        stages.set_gauge("skipped", self._skipped)
        stages.set_gauge("retried", self._retried)
