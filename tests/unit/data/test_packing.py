"""Rows to batches."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.data import packing
from paceline.data.packing import PackedBatches, plan_epoch
from paceline.errors import DataError
from paceline.records import TokenBatch
from tests.unit.data.conftest import MakeDataset


def content(batch: TokenBatch) -> tuple[object, ...]:
    """A batch as comparable values."""
    return (
        batch.number,
        batch.rows,
        batch.document_starts,
        batch.input_ids.tolist(),
        batch.loss_mask.tolist(),
        batch.document_ids.tolist(),
        batch.position_ids.tolist(),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    seed=st.integers(0, 2**32),
    window=st.sampled_from([1, 2, 8, 4096]),
)
def test_every_row_is_in_an_epoch_once_and_whole(
    make_dataset: MakeDataset, lengths: list[int], seed: int, window: int
) -> None:
    """Whatever the window, an epoch holds each row once, and its documents are the data set's rows."""
    dataset = make_dataset(lengths)
    rows = np.arange(len(lengths))[:: 1 + seed % 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW_ROWS", window)
        batches = PackedBatches(dataset, rows, tokens_per_batch=20, epochs=2, seed=seed)
        made = [batches.batch(n) for n in range(len(batches))]
        assert [batch.number for batch in made] == list(range(len(batches)))
        for epoch in (0, 1):
            seen = Counter(row for batch in made if batches.epoch_of(batch.number) == epoch for row in batch.rows)
            assert seen == Counter(rows.tolist())
    for batch in made:
        assert len(batch.input_ids) == 20
        for row, (start, end) in zip(batch.rows, batch.spans, strict=True):
            ids, mask = dataset.row(row)
            assert batch.input_ids[start:end].equal(ids) and batch.loss_mask[start:end].equal(mask)


def test_a_batch_is_a_pure_function_of_its_number(make_dataset: MakeDataset) -> None:
    """Fresh objects, any order of access and many threads give the same batches."""
    dataset = make_dataset(np.random.default_rng(1).integers(1, 60, 300).tolist())

    def fresh(seed: int = 5) -> PackedBatches:
        return PackedBatches(dataset, np.arange(300), tokens_per_batch=64, epochs=3, seed=seed)

    straight = fresh()
    reference = [content(straight.batch(n)) for n in range(len(straight))]
    shuffled, numbers = fresh(), np.random.default_rng(2).permutation(len(reference)).tolist()
    assert [content(shuffled.batch(n)) for n in numbers] == [reference[n] for n in numbers]
    assert content(fresh().batch(len(reference) - 1)) == reference[-1]
    shared = fresh()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: content(shared.batch(n)), range(len(reference)))) == reference
    assert content(fresh(seed=6).batch(0)) != reference[0]
    first_of_epoch = [next(n for n in range(len(reference)) if straight.epoch_of(n) == epoch) for epoch in (0, 1, 2)]
    assert len({straight.batch(n).rows for n in first_of_epoch}) == 3


def test_numbers_past_the_end_are_refused(make_dataset: MakeDataset) -> None:
    """Batch numbers start at 0 and end before the length."""
    batches = PackedBatches(make_dataset([4, 4]), np.arange(2), tokens_per_batch=8, epochs=2, seed=0)
    assert (len(batches), [batches.epoch_of(n) for n in (0, 1)]) == (2, [0, 1])
    for number in (-1, 2):
        with pytest.raises(IndexError):
            batches.batch(number)


def lognormal(count: int, median: float, sigma: float, longest: int) -> np.ndarray:
    """Lengths of `count` documents, log-normal, at most `longest` tokens."""
    lengths = np.exp(np.random.default_rng(0).normal(np.log(median), sigma, count))
    return np.clip(lengths, 10, longest).astype(np.int64)


@pytest.mark.parametrize(
    ("lengths", "capacity"),
    [
        (lognormal(5000, 400, 1.0, 3072), 3072),
        (lognormal(5000, 400, 1.0, 3072), 12288),
        (lognormal(3000, 650, 0.7, 3072), 3072),
        (lognormal(7000, 200, 0.4, 1000), 2048),
        (lognormal(20000, 400, 1.0, 3072), 12288),
    ],
)
def test_ordinary_mixes_fill_98_percent(lengths: np.ndarray, capacity: int) -> None:
    """Padding is at most 2 % of a batch on log-normal lengths, and no batch overflows."""
    plan = plan_epoch(lengths, capacity, seed=0, epoch=0)
    used = np.add.reduceat(lengths[plan.rows], plan.starts[:-1])
    assert used.max() <= capacity
    assert sorted(plan.rows) == list(range(len(lengths)))
    assert used.sum() / (plan.num_batches * capacity) >= 0.98


def test_lengths_that_never_fill_a_batch_do_not_pile_up() -> None:
    """Documents of two thirds of a batch stand alone, one a batch."""
    plan = plan_epoch(np.full(20_000, 67), 100, seed=0, epoch=0)
    assert plan.num_batches == 20_000


def test_the_place_in_an_epoch_does_not_depend_on_length() -> None:
    """Documents of every quarter of an epoch have the mean length of all, within four standard errors."""
    lengths = lognormal(40_000, 400, 1.0, 3072)
    plan = plan_epoch(lengths, 12288, seed=3, epoch=0)
    quarters = np.array_split(lengths[plan.rows], 4)
    error = lengths.std() / np.sqrt(len(quarters[0]))
    assert [abs(q.mean() - lengths.mean()) < 4 * error for q in quarters] == [True] * 4


def test_fill_is_the_share_of_documents_in_the_first_epoch(make_dataset: MakeDataset) -> None:
    """Two rows of 6 tokens in batches of 10 fill 60 %."""
    batches = PackedBatches(make_dataset([6, 6]), np.arange(2), tokens_per_batch=10, epochs=1, seed=0)
    assert batches.fill == pytest.approx(0.6)


def test_rows_that_cannot_be_packed_are_refused(make_dataset: MakeDataset) -> None:
    """A row longer than a batch is named with its source and the setting, and no rows at all is an error."""
    dataset = make_dataset([4, 9, 5])
    with pytest.raises(DataError, match=r"row 1 \(file\.jsonl:2\) has 9 tokens .* pipeline\.tokens_per_batch=8"):
        PackedBatches(dataset, np.arange(3), tokens_per_batch=8, epochs=1, seed=0)
    with pytest.raises(DataError, match="no rows to pack"):
        PackedBatches(dataset, np.array([], dtype=np.int64), tokens_per_batch=8, epochs=1, seed=0)
