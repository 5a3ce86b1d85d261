"""Rows to batches."""

from __future__ import annotations

import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.data import packing
from paceline.data.dataset import Dataset
from paceline.data.packing import PackedBatches, best_fit, plan_epoch
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
    window=st.sampled_from([1, 2, 8, 1 << 16]),
)
def test_every_row_is_in_an_epoch_once_and_whole(
    make_dataset: MakeDataset, lengths: list[int], seed: int, window: int
) -> None:
    """Whatever the window, an epoch holds each row once, and its documents are the data set's rows."""
    dataset = make_dataset(lengths)
    rows = np.arange(len(lengths))[:: 1 + seed % 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW_ROWS", window)
        patch.setattr(packing, "WINDOW_BATCHES", 1)
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


def test_the_place_in_an_epoch_does_not_depend_on_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many epochs the longest quarter of the documents comes in the middle on average, as the shortest does."""
    monkeypatch.setattr(packing, "WINDOW_ROWS", 1500)
    monkeypatch.setattr(packing, "WINDOW_BATCHES", 8)
    lengths = lognormal(4000, 400, 1.0, 3072)
    quarters = np.array_split(np.argsort(lengths), 4)
    places = []
    for epoch in range(60):
        plan = plan_epoch(lengths, 12288, seed=3, epoch=epoch)
        place = np.empty(len(lengths))
        place[plan.rows] = np.repeat(np.arange(plan.num_batches), np.diff(plan.starts)) / (plan.num_batches - 1)
        places.append([place[quarter].mean() for quarter in quarters])
    error = np.std(places, axis=0) / np.sqrt(len(places))
    assert (np.abs(np.mean(places, axis=0) - 0.5) < 4 * error).all()
    assert error.max() < 0.01


def test_documents_of_a_batch_are_in_random_order() -> None:
    """The first document of a batch is as long as the last one, on average."""
    lengths = lognormal(20_000, 400, 1.0, 3072)
    plan = plan_epoch(lengths, 12288, seed=1, epoch=0)
    first, last = lengths[plan.rows[plan.starts[:-1]]], lengths[plan.rows[plan.starts[1:] - 1]]
    assert abs((first - last).mean()) < 4 * (first - last).std() / np.sqrt(len(first))


@settings(deadline=None, max_examples=300)
@given(
    capacity=st.integers(1, 40),
    shares=st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=80),
)
def test_best_fit_is_best_fit(capacity: int, shares: list[float]) -> None:
    """The bins are as full as those of plain best-fit decreasing, one document at a time."""
    lengths = np.array([max(1, round(share * capacity)) for share in shares])
    bin_of, num_bins = best_fit(lengths, capacity)
    assert sorted(set(bin_of.tolist())) == list(range(num_bins))
    used = np.bincount(bin_of, weights=lengths).astype(int)
    assert sorted(capacity - used) == plain_best_fit(lengths.tolist(), capacity)


def plain_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Room left in each bin, ascending."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, free in enumerate(room) if free >= length]
        if not fitting:
            fitting = [len(room)]
            room.append(capacity)
        room[min(fitting, key=lambda i: room[i])] -= length
    return sorted(room)


def test_a_plan_never_changes() -> None:
    """The plan of a key is pinned: a change of the algorithm has to count up `plan_cache.PLAN_VERSION`."""
    plan = plan_epoch(np.arange(1, 13), 20, seed=5, epoch=1)
    assert plan.rows.tolist() == [8, 10, 7, 11, 1, 3, 0, 4, 5, 2, 6, 9]
    assert plan.starts.tolist() == [0, 2, 4, 9, 12]


def test_rows_of_64k_tokens_are_packed(make_dataset: MakeDataset) -> None:
    """One row of 65,536 tokens among short ones fills a batch of its own; the others share batches of that size."""
    lengths = [40, 65_536, *lognormal(2000, 200, 0.8, 3072).tolist()]
    dataset = make_dataset(lengths)
    batches = PackedBatches(dataset, np.arange(len(lengths)), tokens_per_batch=65_536, epochs=1, seed=0)
    assert len(batches) == 1 + -(-(sum(lengths) - 65_536) // 65_536)
    long = next(batch for batch in map(batches.batch, range(len(batches))) if 1 in batch.rows)
    assert long.rows == (1,)
    assert long.input_ids.equal(dataset.row(1)[0]) and long.position_ids[-1] == 65_535


@pytest.fixture
def large(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """A data set whose plans are kept."""
    monkeypatch.setattr(packing, "MIN_CACHED_ROWS", 100)
    return make_dataset(lognormal(300, 20, 0.8, 100).tolist())


def contents(dataset: Dataset, **changes: int) -> list[tuple[object, ...]]:
    """All batches of a fresh `PackedBatches`."""
    settings = {"tokens_per_batch": 128, "epochs": 3, "seed": 5, **changes}
    batches = PackedBatches(dataset, np.arange(len(dataset)), **settings)
    return [content(batches.batch(n)) for n in range(len(batches))]


def test_batches_are_the_same_with_and_without_kept_plans(large: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are written once per epoch, read the next time without planning, and give the batches of a fresh plan."""
    assert large.folder is not None
    plans = large.folder / "plans"
    written = contents(large)
    assert len(list(plans.iterdir())) == 3
    with monkeypatch.context() as patch:
        patch.setattr(packing, "plan_epoch", None)
        assert contents(large) == written
        batches = PackedBatches(large, np.arange(len(large)), tokens_per_batch=128, epochs=2, seed=5)
        assert len(batches) > 0
    for changes in ({"seed": 6}, {"tokens_per_batch": 129}):
        contents(large, **changes)
    fewer = PackedBatches(large, np.arange(200), tokens_per_batch=128, epochs=1, seed=5)
    assert sorted(row for n in range(len(fewer)) for row in fewer.batch(n).rows) == list(range(200))
    assert len(list(plans.iterdir())) == 3 + 3 + 3 + 1
    monkeypatch.setattr(packing, "MIN_CACHED_ROWS", 300)
    shutil.rmtree(plans)
    assert contents(large) == written
    assert not plans.exists()


def test_a_damaged_plan_is_made_again(large: Dataset) -> None:
    """A file that was cut or changed is not believed; it is written again, and batches do not change."""
    assert large.folder is not None
    written = contents(large)
    for path in (large.folder / "plans").iterdir():
        whole = path.read_bytes()
        for damaged in (b"", whole[:100], whole[:-4], whole[:-9] + b"x" + whole[-8:], whole * 2):
            path.write_bytes(damaged)
            assert contents(large) == written
            assert path.read_bytes() == whole


def test_a_folder_that_takes_no_files_is_no_error(large: Dataset) -> None:
    """Without a place for plans every run plans anew."""
    assert large.folder is not None
    (large.folder / "plans").write_text("a file where the folder would be")
    written = contents(large)
    (large.folder / "plans").unlink()
    large.folder.chmod(0o500)
    try:
        assert contents(large) == written
    finally:
        large.folder.chmod(0o700)


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
