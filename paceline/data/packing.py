"""Rows to batches of whole documents: batch n is a pure function of (data, seed, n).

Planning reads lengths alone and works on arrays: 4 s an epoch for ten million chat rows (benchmarks/packing.py).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from paceline.data.dataset import PLANS_DIR, Dataset
from paceline.data.plan_cache import PlanCache
from paceline.errors import DataError
from paceline.records import TokenBatch

WINDOW_ROWS = 1 << 16
"""Shuffled rows that are packed against each other at a time, unless they are too short to fill `WINDOW_BATCHES`."""

WINDOW_BATCHES = 256
"""Batches that a window holds at least, where there are as many: its last one is half full on average."""

MIN_CACHED_ROWS = 100_000
"""Rows above which plans are kept beside the data set; fewer are planned in less time than a file is worth."""

STREAM = 0x7061636B
"""Keeps the random numbers of packing apart from others that are keyed by (seed, number)."""


@dataclass(frozen=True)
class EpochPlan:
    """Which rows each batch of an epoch holds.

    Attributes:
        rows: int32 ``[documents]``: positions among the rows that were planned, batch after batch.
        starts: int ``[batches + 1]``: batch b holds ``rows[starts[b] : starts[b + 1]]``.
    """

    rows: np.ndarray
    starts: np.ndarray

    @property
    def num_batches(self) -> int:
        """Batches of the epoch."""
        return len(self.starts) - 1


class PackedBatches:
    """Batch n as a pure function of (data, seed, n).

    Every epoch shuffles the rows anew and packs them into as few batches as a bounded window allows; each row appears
    once an epoch. Plans are made when first needed, from the lengths alone; those of a large data set are kept in its
    folder. Any number of threads may ask.
    """

    def __init__(self, dataset: Dataset, rows: np.ndarray, *, tokens_per_batch: int, epochs: int, seed: int) -> None:
        """Plan nothing yet.

        Args:
            dataset: Where the rows are.
            rows: int ``[n]``: rows to use, for example one side of `Dataset.split`.
            tokens_per_batch: S.
            epochs: Passes over the rows, at least 1.
            seed: Keys the shuffles together with the epoch.
        Raises: DataError if there are no rows, or one is longer than S.
        """
        self._dataset = dataset
        self._rows = np.asarray(rows, dtype=np.int64)
        self._lengths = dataset.lengths[self._rows]
        self._tokens_per_batch = tokens_per_batch
        self._epochs = epochs
        self._seed = seed
        self._plans: list[EpochPlan] = []
        self._first_batches = [0]
        self._lock = threading.Lock()
        if not len(self._rows):
            raise DataError("there are no rows to pack: the data set holds too few conversations for data.validation")
        longest = int(self._lengths.argmax())
        if self._lengths[longest] > tokens_per_batch:
            row = int(self._rows[longest])
            raise DataError(
                f"row {row} ({dataset.source(row)}) has {self._lengths[longest]} tokens and does not fit into "
                f"pipeline.tokens_per_batch={tokens_per_batch}: raise that, or prepare with a lower --max-length"
            )
        self._cache: PlanCache | None = None
        if len(self._rows) > MIN_CACHED_ROWS:
            self._cache = PlanCache(dataset.folder / PLANS_DIR, self._lengths, tokens_per_batch, seed)

    def __len__(self) -> int:
        """Batches of all epochs; plans every epoch."""
        self._plan_until(epochs=self._epochs)
        return self._first_batches[-1]

    @property
    def fill(self) -> float:
        """Mean share of a batch that holds documents, 0 to 1, in the first epoch."""
        self._plan_until(epochs=1)
        return int(self._lengths.sum()) / (self._plans[0].num_batches * self._tokens_per_batch)

    def epoch_of(self, number: int) -> int:
        """Epoch of a batch, from 0. Raises: IndexError past the last batch."""
        if number >= 0:
            self._plan_until(batch=number)
        if not 0 <= number < self._first_batches[-1]:
            raise IndexError(f"batch {number} of {self._first_batches[-1]}")
        return int(np.searchsorted(self._first_batches, number, side="right")) - 1

    def batch(self, number: int) -> TokenBatch:
        """Batch `number`, counted from 0 over all epochs. Raises: IndexError past the last one."""
        epoch = self.epoch_of(number)
        plan = self._plans[epoch]
        at = number - self._first_batches[epoch]
        rows = self._rows[plan.rows[plan.starts[at] : plan.starts[at + 1]]].tolist()
        documents = [(row, *self._dataset.row(row)) for row in rows]
        return TokenBatch.pack(number, documents, self._tokens_per_batch)

    def _plan_until(self, epochs: int | None = None, batch: int | None = None) -> None:
        """Plan epochs in order until there are this many, or one holds this batch, or all are planned."""
        with self._lock:
            while len(self._plans) < self._epochs:
                if epochs is not None and len(self._plans) >= epochs:
                    return
                if batch is not None and batch < self._first_batches[-1]:
                    return
                plan = self._plan(len(self._plans))
                self._plans.append(plan)
                self._first_batches.append(self._first_batches[-1] + plan.num_batches)

    def _plan(self, epoch: int) -> EpochPlan:
        """The plan of an epoch, read where it is kept, else made and kept."""
        kept = self._cache.load(epoch) if self._cache is not None else None
        if kept is not None:
            return EpochPlan(*kept)
        plan = plan_epoch(self._lengths, self._tokens_per_batch, self._seed, epoch)
        if self._cache is not None:
            self._cache.store(epoch, plan.rows, plan.starts)
            kept = self._cache.load(epoch)  # mapped, so that plans of many epochs do not fill the memory
        return plan if kept is None else EpochPlan(*kept)


def plan_epoch(lengths: np.ndarray, capacity: int, seed: int, epoch: int) -> EpochPlan:
    """Pack documents into as few bins as a window allows, in random order.

    The rows are shuffled and taken a window at a time; each window is packed best-fit, longest document first. The
    order of bins within a window and of documents within a bin is random again, so only the company of a document
    depends on its length, not its place in the epoch.

    Args:
        lengths: int64 ``[rows]``, each 1 to `capacity`; fewer than 2^31 of them.
        capacity: S.
        seed: Run seed.
        epoch: From 0.
    Returns: a plan whose rows are positions in `lengths`.
    """
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch, STREAM))))
    order = generator.permutation(np.arange(len(lengths), dtype=np.int32))
    enough = int(lengths.sum()) // (WINDOW_BATCHES * capacity)
    windows = np.array_split(order, max(1, min(-(-len(order) // WINDOW_ROWS), enough)))
    sizes = []
    for window in windows:
        bin_of, num_bins = best_fit(lengths[window], capacity)
        place = generator.permutation(num_bins)[bin_of]
        anew = generator.permutation(len(window))  # the first shuffle has chosen among documents of one length
        window[:] = window[anew[np.argsort(place[anew], kind="stable")]]  # written to `order`
        sizes.append(np.bincount(place, minlength=num_bins))
    return EpochPlan(order, np.concatenate([[0], np.cumsum(np.concatenate(sizes))]))


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Best-fit decreasing: the longest document first, each into the bin where it leaves least room.

    Documents of one length are placed together, and bins with the same room are kept as ranges: after a document, the
    bin that it went to is the best fit for the next one of its length for as long as it has room. A window of chat
    lengths then takes a seventh of the steps of one document at a time.

    Args:
        lengths: int ``[documents]``, each 1 to `capacity`.
    Returns: the bin of each document, int64 ``[documents]``, and the number of bins.
    """
    by_length = np.argsort(-lengths, kind="stable")
    falling = lengths[by_length]
    edges = np.flatnonzero(np.diff(falling, prepend=0, append=0))  # where each length begins, and the end
    placed, num_bins = _place(falling[edges[:-1]].tolist(), np.diff(edges).tolist(), capacity)
    first_bins, per_bin, counts = np.array(placed, dtype=np.int64).T
    nth = np.arange(len(lengths)) - np.repeat(np.cumsum(counts) - counts, counts)
    bin_of = np.empty(len(lengths), dtype=np.int64)
    bin_of[by_length] = np.repeat(first_bins, counts) + nth // np.repeat(per_bin, counts)
    return bin_of, num_bins


def _place(lengths: list[int], counts: list[int], capacity: int) -> tuple[list[tuple[int, int, int]], int]:
    """Where documents of falling lengths go: (first bin, documents a bin, documents), and the number of bins."""
    placed: list[tuple[int, int, int]] = []
    num_bins = 0
    rooms: list[int] = []  # the different free tokens of open bins, ascending
    ranges: dict[int, list[tuple[int, int]]] = {}  # free tokens -> (first bin, bins)

    def reopen(room: int, first: int, bins: int) -> None:
        if room and bins:
            if room not in ranges:
                rooms.insert(bisect_left(rooms, room), room)
            ranges.setdefault(room, []).append((first, bins))

    for length, count in zip(lengths, counts, strict=True):
        while count:
            at = bisect_left(rooms, length)
            if at == len(rooms):
                needed = -(-count // (capacity // length))
                reopen(capacity, num_bins, needed)
                num_bins += needed
            room = rooms[at]
            first, bins = ranges[room].pop()
            if not ranges[room]:
                del ranges[room], rooms[at]
            fit = room // length
            filled = min(bins, count // fit)
            if filled:
                placed.append((first, fit, filled * fit))
                reopen(room - fit * length, first, filled)
                count -= filled * fit
            if count and filled < bins:  # what is left fills a part of one more bin
                placed.append((first + filled, count, count))
                reopen(room - count * length, first + filled, 1)
                filled, count = filled + 1, 0
            reopen(room, first + filled, bins - filled)
    return placed, num_bins
