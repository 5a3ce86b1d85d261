"""Rows to batches of whole documents: batch n is a pure function of (data, seed, n)."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from paceline.data.dataset import Dataset
from paceline.errors import DataError
from paceline.records import TokenBatch

WINDOW_ROWS = 4096
"""Shuffled rows that are packed against each other at a time."""

FULL_ENOUGH = 0.995
"""Share at which a batch leaves the window; the documents of emptier ones meet the next rows."""

STREAM = 0x7061636B
"""Keeps the random numbers of packing apart from others that are keyed by (seed, number)."""


@dataclass(frozen=True)
class EpochPlan:
    """Which rows each batch of an epoch holds.

    Attributes:
        rows: int64 ``[documents]``: data set rows, batch after batch.
        starts: int64 ``[batches + 1]``: batch b holds ``rows[starts[b] : starts[b + 1]]``.
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
    once an epoch. Plans are made when first needed, from the lengths alone; any number of threads may ask.
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
        rows = plan.rows[plan.starts[at] : plan.starts[at + 1]].tolist()
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
                plan = plan_epoch(self._lengths, self._tokens_per_batch, self._seed, len(self._plans))
                self._plans.append(EpochPlan(self._rows[plan.rows], plan.starts))
                self._first_batches.append(self._first_batches[-1] + plan.num_batches)


def plan_epoch(lengths: np.ndarray, capacity: int, seed: int, epoch: int) -> EpochPlan:
    """Pack documents into as few bins as a window allows, in random order.

    The rows are shuffled and taken a window at a time; each window is packed best-fit, longest document first. Bins
    that are not full give their documents to the next window. The order of bins within a window and of documents
    within a bin is drawn again, so only the company of a document depends on its length, not its place in the epoch.

    Args:
        lengths: int64 ``[rows]``, each at most `capacity`.
        capacity: S.
        seed: Run seed.
        epoch: From 0.
    Returns: a plan whose rows are positions in `lengths`.
    """
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch, STREAM))))
    order = generator.permutation(len(lengths))
    bins: list[list[int]] = []
    carried: list[int] = []
    for start in range(0, len(order), WINDOW_ROWS):
        window = np.concatenate([np.array(carried, dtype=np.int64), order[start : start + WINDOW_ROWS]])
        packed, free = _best_fit(window, lengths[window], capacity)
        is_last = start + WINDOW_ROWS >= len(order)
        closed, carried = _close_full(packed, free, capacity, keep_all=is_last)
        generator.shuffle(closed)
        bins += closed
    sizes = np.array([len(documents) for documents in bins])
    rows = np.concatenate([np.array(documents, dtype=np.int64) for documents in bins])
    bin_of = np.repeat(np.arange(len(bins)), sizes)
    shuffled = np.lexsort((generator.random(len(rows)), bin_of))
    return EpochPlan(rows[shuffled], np.concatenate([[0], np.cumsum(sizes)]))


def _best_fit(window: np.ndarray, lengths: np.ndarray, capacity: int) -> tuple[list[list[int]], list[int]]:
    """Bins of row positions, and the free tokens of each: every document goes where it leaves least room."""
    bins: list[list[int]] = []
    free: list[int] = []
    open_bins: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    order = np.argsort(-lengths, kind="stable")
    for document, length in zip(window[order].tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(open_bins, (length, 0))
        if at == len(open_bins):
            number = len(bins)
            bins.append([])
            free.append(capacity)
        else:
            number = open_bins.pop(at)[1]
        bins[number].append(document)
        free[number] -= length
        if free[number]:
            insort(open_bins, (free[number], number))
    return bins, free


def _close_full(
    bins: list[list[int]], free: list[int], capacity: int, *, keep_all: bool
) -> tuple[list[list[int]], list[int]]:
    """Bins that leave the window, and the documents that stay in it.

    At most half a window stays, the emptiest bins first: lengths that never fill a bin must not pile up.
    """
    if keep_all:
        return bins, []
    closed: list[list[int]] = []
    carried: list[int] = []
    for number in sorted(range(len(bins)), key=lambda number: -free[number]):
        is_full = free[number] <= (1 - FULL_ENOUGH) * capacity
        if is_full or len(carried) + len(bins[number]) > WINDOW_ROWS // 2:
            closed.append(bins[number])
        else:
            carried += bins[number]
    return closed, carried
