"""The data set on disk."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from paceline.data import dataset as dataset_module
from paceline.data.dataset import INFO_FILE, ROWS_FILE, Dataset, DatasetWriter, tokenizer_fingerprint
from paceline.errors import DataError
from tests.unit.data.conftest import MakeDataset, toy


def written_row(generator: np.random.Generator, length: int) -> tuple[list[int], list[bool]]:
    """The next row that `make_dataset` writes."""
    return generator.integers(0, 256, length).tolist(), (generator.random(length) < 0.5).tolist()


def test_rows_come_back_as_they_were_written(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, masks, lengths and sources survive, over the borders of record batches too."""
    monkeypatch.setattr(dataset_module, "TOKENS_PER_RECORD_BATCH", 16)
    lengths = [3, 9, 5, 1, 30, 2, 8]
    dataset = make_dataset(lengths)
    assert dataset.lengths.tolist() == lengths and dataset.lengths.dtype == np.int64
    generator = np.random.default_rng(0)
    for i, length in enumerate(lengths):
        ids, mask = dataset.row(i)
        assert (ids.tolist(), mask.tolist()) == written_row(generator, length)
        assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)
        assert dataset.source(i) == f"file.jsonl:{i + 1}"
    with pytest.raises(IndexError):
        dataset.row(len(lengths))
    with pytest.raises(IndexError):
        dataset.source(-1)


def test_many_threads_read_the_same_rows(make_dataset: MakeDataset) -> None:
    """Concurrent reads give what one reader sees."""
    dataset = make_dataset(list(range(1, 60)))
    alone = [dataset.row(i)[0].tolist() for i in range(59)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: dataset.row(i % 59)[0].tolist(), range(590))) == alone * 10


def test_the_fingerprint_is_that_of_the_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources and record batches leave no trace in it; an id, a mask, a hash or the order of rows changes it."""
    rows = [(np.array([1, 2, 3]), np.array([0, 1, 1]), "a:1", 7), (np.array([4]), np.array([1]), "a:2", 8)]

    def fingerprint(*rows: tuple[np.ndarray, np.ndarray, str, int]) -> str:
        writer = DatasetWriter(tmp_path)
        for row in rows:
            writer.add(*row)
        writer.close()
        return writer.fingerprint

    reference = fingerprint(*rows)
    assert fingerprint((*rows[0][:2], "b:9", 7), rows[1]) == reference
    monkeypatch.setattr(dataset_module, "TOKENS_PER_RECORD_BATCH", 1)
    assert fingerprint(*rows) == reference
    others = [
        fingerprint(rows[1], rows[0]),
        fingerprint((np.array([1, 2, 4]), *rows[0][1:]), rows[1]),
        fingerprint((rows[0][0], np.array([1, 1, 1]), "a:1", 7), rows[1]),
        fingerprint((*rows[0][:3], 9), rows[1]),
    ]
    assert len({reference, *others}) == 5


def test_contains_token(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is found wherever it is, and only if it is."""
    monkeypatch.setattr(dataset_module, "SCAN_TOKENS", 7)
    monkeypatch.setattr(dataset_module, "TOKENS_PER_RECORD_BATCH", 16)
    dataset = make_dataset([10] * 5)
    present = {int(i) for row in range(5) for i in dataset.row(row)[0]}
    assert {i for i in range(-1, 300) if dataset.contains_token(i)} == present


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    conversations=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    share=st.floats(0, 1, exclude_max=True, allow_subnormal=False),
)
def test_a_split_keeps_conversations_whole(make_dataset: MakeDataset, conversations: list[int], share: float) -> None:
    """Both sides together are all rows, none shares a conversation, and the held-out share is the wanted one."""
    hashes = np.array(conversations, dtype=np.uint64) << np.uint64(60)  # the upper half of uint64 too
    dataset = make_dataset([2] * len(hashes), hashes.tolist())
    training, validation = dataset.split(share)
    assert sorted([*training, *validation]) == list(range(len(hashes)))
    assert training.tolist() == sorted(training.tolist())
    assert not set(hashes[training]) & set(hashes[validation])
    keys = [(int(hashes[row]), row) for row in validation]
    assert keys == sorted(keys)
    distinct = len(set(hashes.tolist()))
    held_out = len(set(hashes[validation].tolist()))
    if share == 0 or distinct == 1:
        assert held_out == 0
    else:
        assert held_out == min(max(round(share * distinct), 1), distinct - 1)


def test_folders_that_are_no_data_set_are_refused(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Missing, foreign, damaged, empty and of another format: each has a message that says so."""
    with pytest.raises(DataError, match="does not exist; make it with `paceline prepare"):
        Dataset.open(tmp_path / "none")
    (tmp_path / "foreign").mkdir()
    with pytest.raises(DataError, match=r"is no data set: it has no prepare\.json"):
        Dataset.open(tmp_path / "foreign")
    make_dataset([5, 6])
    folder = tmp_path / "dataset"
    info, rows = (folder / INFO_FILE).read_text(), (folder / ROWS_FILE).read_bytes()
    for damaged in ("{", "[]", "{}", '{"dataset": {"format": 1}}'):
        (folder / INFO_FILE).write_text(damaged)
        with pytest.raises(DataError, match=r"damaged: prepare\.json"):
            Dataset.open(folder)
    changed = json.loads(info)
    (folder / INFO_FILE).write_text(json.dumps({"dataset": {**changed["dataset"], "format": 99}}))
    with pytest.raises(DataError, match="has format 99; this version reads 1"):
        Dataset.open(folder)
    (folder / INFO_FILE).write_text(json.dumps({"dataset": {**changed["dataset"], "num_rows": 3}}))
    with pytest.raises(DataError, match="holds 2 rows, prepare.json says 3"):
        Dataset.open(folder)
    (folder / INFO_FILE).write_text(info)
    for length in (0, 100, len(rows) - 1):
        (folder / ROWS_FILE).write_bytes(rows[:length])
        with pytest.raises(DataError, match=r"damaged: rows\.arrow"):
            Dataset.open(folder)
    (folder / ROWS_FILE).unlink()
    with pytest.raises(DataError, match=r"damaged: rows\.arrow"):
        Dataset.open(folder)
    make_dataset([5])
    with pytest.raises(DataError, match="is empty"):
        make_dataset([])


def test_a_tokenizer_keeps_its_fingerprint_when_it_is_saved(tmp_path: Path) -> None:
    """Path, template, padding and truncation leave no trace in it; an added token does."""
    tokenizer = toy()
    reference = tokenizer_fingerprint(tokenizer)
    tokenizer.save_pretrained(str(tmp_path / "copy"))
    assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(str(tmp_path / "copy"))) == reference
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == reference == tokenizer_fingerprint(toy("chatml_tools"))
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_fingerprint(tokenizer) != reference
