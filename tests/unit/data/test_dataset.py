"""The data set on disk."""

from __future__ import annotations

import dataclasses
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from paceline.data import dataset as dataset_module
from paceline.data.dataset import (
    INFO_FILE,
    ROWS_FILE,
    Dataset,
    DatasetWriter,
    Rows,
    tokenizer_fingerprint,
)
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


Row = tuple[np.ndarray, np.ndarray, int, int]


def random_rows(count: int, seed: int = 0) -> list[Row]:
    """Rows of 0 to 8 tokens with random ids, masks and hashes, as `Rows.join` takes them."""
    g = np.random.default_rng(seed)
    lengths = g.integers(0, 9, count)
    return [
        (g.integers(0, 99, n).astype(np.int32), g.random(n) < 0.5, i + 1, int(g.integers(2**64, dtype=np.uint64)))
        for i, n in enumerate(lengths)
    ]


def write(folder: Path, chunks: list[tuple[list[Row], str]]) -> DatasetWriter:
    """A writer that was given these chunks of rows and closed."""
    writer = DatasetWriter(folder)
    for rows, file in chunks:
        writer.add(Rows.join(rows), file)
    writer.close()
    return writer


def test_rows_of_many_files_know_where_they_come_from(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Chunks of several files, interleaved and empty ones among them, come back in order with file and line."""
    rows = random_rows(9)
    chunks = [(rows[:3], "a"), ([], "never"), (rows[3:5], "b"), (rows[5:6], "a"), (rows[6:], "c")]
    writer = write(tmp_path, chunks)
    assert (writer.files, writer.num_rows) == (["a", "b", "c"], 9)
    assert writer.num_tokens == sum(len(ids) for ids, *_ in rows)
    assert writer.num_supervised == sum(int(mask.sum()) for _, mask, *_ in rows)
    update = {"num_rows": 9, "num_tokens": writer.num_tokens, "files": writer.files}
    info = make_dataset([3]).info.model_copy(update=update)
    (tmp_path / INFO_FILE).write_text(json.dumps({"dataset": info.model_dump()}))
    dataset = Dataset.open(tmp_path)
    assert [dataset.source(i) for i in range(9)] == [f"{'aaabbaccc'[i]}:{i + 1}" for i in range(9)]
    for i, (ids, mask, _, _) in enumerate(rows):
        assert [part.tolist() for part in dataset.row(i)] == [ids.tolist(), mask.tolist()]
    (tmp_path / INFO_FILE).write_text(json.dumps({"dataset": {**info.model_dump(), "files": ["a", "b"]}}))
    with pytest.raises(DataError, match="names more inputs than the 2"):
        Dataset.open(tmp_path)


def test_rows_cross_processes(tmp_path: Path) -> None:
    """Rows survive pickling, at the size of their arrays; a mask of booleans is written as one of bytes."""
    rows = Rows.join([(np.arange(50_000), np.ones(50_000, dtype=bool), 1, 2**64 - 1)])
    text = pickle.dumps(rows)
    assert len(text) < 5 * 50_000 + 2_000
    copy = pickle.loads(text)
    as_bool = dataclasses.replace(copy, loss_mask=copy.loss_mask.astype(bool))
    prints = set()
    for variant in (rows, copy, as_bool):
        writer = DatasetWriter(tmp_path)
        writer.add(variant, "a")
        prints.add(writer.fingerprint)
        writer.close()
    assert len(prints) == 1
    none = Rows.join([])
    assert (len(none), none.input_ids.dtype, none.loss_mask.dtype) == (0, np.int32, np.uint8)
    assert (none.lines.dtype, none.conversations.dtype) == (np.int64, np.uint64)


def test_the_fingerprint_is_that_of_the_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, lines, chunks and record batches leave no trace in it; content or the order of rows changes it."""
    rows = random_rows(40)
    reference = write(tmp_path, [(rows, "a")]).fingerprint
    for step in (1, 3, 7):
        chunks = [([(*row[:2], 99, row[3]) for row in rows[i : i + step]], f"f{i}") for i in range(0, 40, step)]
        assert write(tmp_path, chunks).fingerprint == reference
    monkeypatch.setattr(dataset_module, "TOKENS_PER_RECORD_BATCH", 1)
    assert write(tmp_path, [(rows[:20], "a"), (rows[20:], "a")]).fingerprint == reference

    ids, mask, line, conversation = row = next(row for row in rows if len(row[0]) > 2)
    at = rows.index(row)
    others = [
        rows[::-1],
        [*rows[:at], (ids + 1, mask, line, conversation), *rows[at + 1 :]],
        [*rows[:at], (ids, ~mask, line, conversation), *rows[at + 1 :]],
        [*rows[:at], (ids, mask, line, conversation ^ 1), *rows[at + 1 :]],
        # the same tokens, masks and hashes, with the border between two rows elsewhere
        [*rows[:at], (ids[:1], mask[:1], line, conversation), (ids[1:], mask[1:], line, 0), *rows[at + 1 :]],
        [*rows[:at], (ids[:2], mask[:2], line, conversation), (ids[2:], mask[2:], line, 0), *rows[at + 1 :]],
    ]
    assert len({reference, *(write(tmp_path, [(other, "a")]).fingerprint for other in others)}) == 1 + len(others)


def test_supervised_lengths_are_the_sums_of_the_masks(tmp_path: Path, make_dataset: MakeDataset) -> None:
    """Also of empty rows, at the borders of record batches and at the end."""
    empty: Row = (np.array([]), np.array([]), 1, 1)
    rows = [empty, *random_rows(60), empty, empty]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_module, "TOKENS_PER_RECORD_BATCH", 16)
        num_tokens = write(tmp_path, [([row], "a") for row in rows]).num_tokens
    update = {"num_rows": len(rows), "num_tokens": num_tokens, "files": ["a"]}
    info = make_dataset([3]).info.model_copy(update=update)
    (tmp_path / INFO_FILE).write_text(json.dumps({"dataset": info.model_dump()}))
    counts = Dataset.open(tmp_path).supervised_lengths()
    assert counts.dtype == np.int64
    assert counts.tolist() == [int(mask.sum()) for _, mask, *_ in rows]


def test_contains_token(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is found wherever it is, and only if it is."""
    monkeypatch.setattr(dataset_module, "TOKENS_PER_RECORD_BATCH", 16)
    dataset = make_dataset([10] * 5)
    tokens = [int(i) for row in range(5) for i in dataset.row(row)[0]]
    assert {i for i in range(-1, 300) if dataset.contains_token(i)} == set(tokens)
    assert dataset.largest_token() == max(tokens)
    assert dataset.token_counts.tolist() == np.bincount(tokens).tolist()


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00v\x00{'descr': (", b"junk"])
def test_damaged_counts_of_tokens_are_an_error(content: bytes, make_dataset: MakeDataset) -> None:
    """A file that is cut short, overwritten or of another data set is not believed."""
    folder = make_dataset([10] * 5).folder
    (folder / "tokens.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"is damaged: tokens.npy.*prepare` again"):
        Dataset.open(folder)
    np.save(folder / "tokens.npy", np.array([1, 2]))
    with pytest.raises(DataError, match="does not count the 50 tokens"):
        Dataset.open(folder)


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
    for damaged in ("{", "[]", "{}", '{"dataset": {"format": 2}}'):
        (folder / INFO_FILE).write_text(damaged)
        with pytest.raises(DataError, match=r"damaged: prepare\.json"):
            Dataset.open(folder)
    changed = json.loads(info)
    (folder / INFO_FILE).write_text(json.dumps({"dataset": {**changed["dataset"], "format": 99}}))
    with pytest.raises(DataError, match="has format 99; this version reads 2"):
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
