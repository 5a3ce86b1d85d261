"""The data set on disk: token rows in a memory-mapped Arrow file, and what they were made with.

    DIR/rows.arrow       input_ids, loss_mask, file, line, conversation; record batches of bounded size
    DIR/tokens.npy       how often each token id occurs, so that no start of a run reads all rows
    DIR/prepare.json     `DatasetInfo` under "dataset", the report of the command beside it
    DIR/rejected.jsonl   one line a rejected row
    DIR/tokenizer/       copy of the tokenizer, so that `paceline inspect` needs nothing else
    DIR/plans/           packing plans of large data sets, kept by `data.packing`; may be deleted at any time

`prepare` writes it through `DatasetWriter`, many rows at a time; training and `inspect` read it through `Dataset`.
Nothing here costs Python time per row: ten million rows open in a fraction of a second.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from paceline.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 2
ROWS_FILE = "rows.arrow"
INFO_FILE = "prepare.json"
REJECTED_FILE = "rejected.jsonl"
TOKENS_FILE = "tokens.npy"
TOKENIZER_DIR = "tokenizer"
PLANS_DIR = "plans"

SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.large_list(pa.int32()), nullable=False),
        # One byte a token: Arrow packs booleans into bits, which cannot be read without a copy.
        pa.field("loss_mask", pa.large_list(pa.uint8()), nullable=False),
        # Where a row comes from: a place in `DatasetInfo.files`, and a line counted from 1.
        pa.field("file", pa.int32(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("conversation", pa.uint64(), nullable=False),
    ]
)

TOKENS_PER_RECORD_BATCH = 4 << 20
"""Tokens after which the writer flushes: 20 MiB held, and few batches to map on opening. What one `DatasetWriter.add`
brings stays in one record batch, however much it is."""

ROWS_PER_RECORD_BATCH = 1 << 16
"""Rows after which the writer flushes."""

SCAN_TOKENS = 4 << 20
"""Tokens compared at once when the whole data set is searched."""


class DatasetInfo(BaseModel):
    """What a data set holds and what it was made with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    """Version of the layout; another one is refused."""
    num_rows: int
    num_conversations: int
    """Distinct conversations; exact duplicates count once."""
    num_tokens: int
    num_supervised: int
    """Tokens under the ones of the loss masks."""
    longest: int
    """Length of the longest row in tokens."""
    vocab_size: int
    """Token ids that the tokenizer knows: its length, added tokens included."""
    tokenizer: str
    """Name of the tokenizer as it was given."""
    tokenizer_fingerprint: str
    """`tokenizer_fingerprint` of it."""
    template_hash: str
    """SHA-256 of the chat template."""
    thinking: bool | None
    """The template's switch of reasoning as it was given (`template_options`); None: not given."""
    max_length: int
    """Length limit of rows in tokens."""
    on_long: str
    """What became of longer rows: `cut` or `drop`."""
    fingerprint: str
    """SHA-256 over ids, masks, lengths and conversations of all rows, in order; paths leave no trace in it."""
    files: list[str]
    """Inputs that rows come from, in order of their first row; the column `file` counts in it."""


@dataclass(frozen=True)
class Rows:
    """Rows of one input file, end to end; plain arrays, so that they cross processes at the price of a copy.

    Attributes:
        input_ids: int32 ``[tokens]``: the token ids of all rows, one row after the other.
        loss_mask: uint8 (0 and 1) or bool ``[tokens]``: which tokens are supervised.
        lengths: int64 ``[rows]``: tokens of each row; they add up to ``tokens``.
        lines: int64 ``[rows]``: line of the file that each row comes from, counted from 1.
        conversations: uint64 ``[rows]``: content hash of each row's conversation.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    lines: np.ndarray
    conversations: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def join(cls, rows: Sequence[tuple[np.ndarray, np.ndarray, int, int]]) -> Rows:
        """Rows from single ones.

        Args:
            rows: Token ids int ``[n]``, loss mask bool or uint8 ``[n]``, line, conversation hash of each; may be empty.
        """
        ids, masks, lines, conversations = zip(*rows, strict=True) if rows else ((), (), (), ())
        return cls(
            input_ids=_end_to_end(ids, np.int32),
            loss_mask=_end_to_end(masks, np.uint8),
            lengths=np.array([len(row) for row in ids], dtype=np.int64),
            lines=np.array(lines, dtype=np.int64),
            conversations=np.array(conversations, dtype=np.uint64),
        )


def _end_to_end(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype, casting="unsafe")


class Dataset:
    """Rows of a folder written by `paceline prepare`, read through a memory map; any number of threads may read."""

    def __init__(self, table: pa.Table, info: DatasetInfo, token_counts: np.ndarray, folder: Path) -> None:
        """Take a table of `SCHEMA`, what describes it, and the folder it lies in."""
        self.info = info
        self.token_counts = token_counts
        """How often each token id occurs in all rows, int64 ``[largest id + 1]``."""
        self.folder = folder
        batches = table.to_batches()
        # not by `to_numpy`, which imports pandas where it is installed: 0.2 s
        self._ids = [np.from_dlpack(batch.column("input_ids").values) for batch in batches]
        self._masks = [np.from_dlpack(batch.column("loss_mask").values) for batch in batches]
        self._offsets: list[np.ndarray] = [np.from_dlpack(batch.column("input_ids").offsets) for batch in batches]
        self._files = [np.from_dlpack(batch.column("file")) for batch in batches]
        self._lines = [np.from_dlpack(batch.column("line")) for batch in batches]
        self._conversations = [np.from_dlpack(batch.column("conversation")) for batch in batches]
        self._first_rows = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self.lengths = np.empty(table.num_rows, dtype=np.int64)
        """Tokens of each row, int64 ``[rows]``."""
        for offsets, first in zip(self._offsets, self._first_rows, strict=False):
            np.subtract(offsets[1:], offsets[:-1], out=self.lengths[first : first + len(offsets) - 1])

    @classmethod
    def open(cls, path: Path | str) -> Dataset:
        """Map a data set folder.

        Raises: DataError if it is missing, no data set, of another format, damaged or empty.
        """
        folder = Path(path)
        info = read_info(folder)
        try:
            with pa.memory_map(str(folder / ROWS_FILE)) as source:
                table = pa.ipc.open_file(source).read_all()
            table.validate()
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(
                f"data set {folder} is damaged: {ROWS_FILE}: {error}; run `paceline prepare` again"
            ) from error
        try:
            token_counts = np.load(folder / TOKENS_FILE, allow_pickle=False)
        except Exception as error:  # a damaged header raises whatever the reader trips over
            raise DataError(
                f"data set {folder} is damaged: {TOKENS_FILE}: {error}; run `paceline prepare` again"
            ) from error
        if token_counts.dtype != np.int64 or token_counts.sum() != info.num_tokens:
            raise DataError(
                f"data set {folder} is damaged: {TOKENS_FILE} does not count the {info.num_tokens} tokens of "
                f"{INFO_FILE}; run `paceline prepare` again"
            )
        if table.schema != SCHEMA or table.num_rows != info.num_rows:
            raise DataError(
                f"data set {folder} is damaged: {ROWS_FILE} holds {table.num_rows} rows, {INFO_FILE} says "
                f"{info.num_rows}; run `paceline prepare` again"
            )
        if not table.num_rows:
            raise DataError(f"data set {folder} is empty; run `paceline prepare` again")
        if pc.max(table.column("file")).as_py() >= len(info.files):
            raise DataError(
                f"data set {folder} is damaged: {ROWS_FILE} names more inputs than the {len(info.files)} that "
                f"{INFO_FILE} lists; run `paceline prepare` again"
            )
        return cls(table, info, token_counts, folder)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the contents, computed when the data set was made."""
        return self.info.fingerprint

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids int64 ``[n]`` and loss mask bool ``[n]`` of a row. Raises: IndexError."""
        batch, at = self._locate(index)
        start, end = self._offsets[batch][at : at + 2]
        ids = self._ids[batch][start:end].astype(np.int64)
        mask = self._masks[batch][start:end].astype(bool)
        return torch.from_numpy(ids), torch.from_numpy(mask)

    def source(self, index: int) -> str:
        """``FILE:LINE`` of the input that a row comes from, the line counted from 1. Raises: IndexError."""
        batch, at = self._locate(index)
        return f"{self.info.files[self._files[batch][at]]}:{self._lines[batch][at]}"

    def supervised_lengths(self) -> np.ndarray:
        """Supervised tokens of each row, int64 ``[rows]``; reads all loss masks, one record batch at a time."""
        counts = np.zeros(len(self), dtype=np.int64)
        for mask, offsets, first in zip(self._masks, self._offsets, self._first_rows, strict=False):
            filled = np.flatnonzero(np.diff(offsets))  # `reduceat` would take an empty row for one of one token
            if len(filled):
                counts[first + filled] = np.add.reduceat(mask[: offsets[-1]], offsets[filled], dtype=np.int64)
        return counts

    def split(self, validation: float) -> tuple[np.ndarray, np.ndarray]:
        """Share the rows out to training and validation, whole conversations at a time.

        The conversations with the lowest hashes are held out, so the choice depends on nothing but content and share.

        Args:
            validation: Share of the conversations, 0 <= share < 1; above 0, at least one and never all are held out,
                where there are two or more.
        Returns: int64 row numbers: training rows ascending; validation rows ordered by hash.
        """
        conversations = np.concatenate(self._conversations)
        distinct = _distinct(conversations)
        held_out = 0
        if validation > 0 and len(distinct) > 1:
            held_out = min(max(round(validation * len(distinct)), 1), len(distinct) - 1)
        if held_out == 0:
            return np.arange(len(self)), np.empty(0, dtype=np.int64)
        is_validation = conversations <= distinct[held_out - 1]
        rows = np.flatnonzero(is_validation)
        return np.flatnonzero(~is_validation), rows[np.argsort(conversations[rows], kind="stable")]

    def contains_token(self, token_id: int) -> bool:
        """Whether a token id occurs in any row."""
        return 0 <= token_id < len(self.token_counts) and bool(self.token_counts[token_id])

    def largest_token(self) -> int:
        """Largest token id of any row."""
        return len(self.token_counts) - 1

    def count_tokens(self, rows: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """How often each token occurs in some rows, supervised and in all: two int64 ``[vocab_size]``; reads them."""
        supervised, every = np.zeros((2, vocab_size), dtype=np.int64)
        wanted = np.zeros(len(self), dtype=bool)
        wanted[rows] = True
        parts = zip(self._ids, self._masks, self._offsets, self._first_rows, strict=False)
        for ids, masks, offsets, first in parts:
            kept = np.repeat(wanted[first : first + len(offsets) - 1], np.diff(offsets))
            for start in range(0, len(ids), SCAN_TOKENS):
                part = slice(start, start + SCAN_TOKENS)
                here = ids[part][kept[part]]
                every += np.bincount(here, minlength=vocab_size)
                supervised += np.bincount(here[masks[part][kept[part]] == 1], minlength=vocab_size)
        return supervised, every

    def _locate(self, index: int) -> tuple[int, int]:
        """Record batch of a row and its place there."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a data set of {len(self)} rows")
        batch = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        return batch, index - int(self._first_rows[batch])


def read_info(folder: Path) -> DatasetInfo:
    """The "dataset" section of a folder's prepare.json.

    Raises: DataError if the folder is missing or no data set, or the file is damaged or of another format.
    """
    if folder.is_file():
        raise DataError(f"{folder} is a file, and a data set is a folder; make one with `paceline prepare {folder}`")
    if not folder.is_dir():
        raise DataError(f"data set {folder} does not exist; make it with `paceline prepare INPUT --out {folder}`")
    try:
        text = (folder / INFO_FILE).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"{folder} is no data set: it has no {INFO_FILE}; make one with `paceline prepare`") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data set {folder}: {INFO_FILE} cannot be read: {error}") from error
    try:
        section = json.loads(text)["dataset"]
        found = section["format"]
        if found == FORMAT:
            return DatasetInfo.model_validate(section)
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise DataError(f"data set {folder} is damaged: {INFO_FILE} does not describe one") from error
    raise DataError(f"data set {folder} has format {found}; this version reads {FORMAT}: run `paceline prepare` again")


class DatasetWriter:
    """Appends rows to a new rows file; holds one record batch at a time, and eight bytes for each row written."""

    def __init__(self, folder: Path) -> None:
        """Create the rows file. Raises: OSError, as do the other methods, for example when the disk is full."""
        self._folder = folder
        self._sink = pa.OSFile(str(folder / ROWS_FILE), "wb")
        self._writer = pa.ipc.new_file(self._sink, SCHEMA)
        # One hash a column: what lies between two calls of `add` would otherwise show.
        self._hashes = {name: hashlib.sha256() for name in ("input_ids", "loss_mask", "lengths", "conversations")}
        self._files: dict[str, int] = {}
        self._conversations: list[np.ndarray] = []
        self._held: list[tuple[int, Rows]] = []
        self._held_rows = self._held_tokens = 0
        self._token_counts = np.zeros(0, dtype=np.int64)
        self.num_rows = 0
        self.num_tokens = 0
        self.num_supervised = 0
        self.longest = 0

    def add(self, rows: Rows, file: str) -> None:
        """Append rows of an input file; none at all are allowed, and leave no trace."""
        if not len(rows):
            return
        rows = Rows(
            input_ids=np.ascontiguousarray(rows.input_ids, np.int32),
            loss_mask=np.ascontiguousarray(rows.loss_mask, bool).view(np.uint8),
            lengths=np.ascontiguousarray(rows.lengths, np.int64),
            lines=np.ascontiguousarray(rows.lines, np.int64),
            conversations=np.ascontiguousarray(rows.conversations, np.uint64),
        )
        assert len(rows.input_ids) == len(rows.loss_mask) == rows.lengths.sum(), "the lengths are not those of the rows"
        assert len(rows) == len(rows.lines) == len(rows.conversations), "columns of different length"
        for name, running in self._hashes.items():
            running.update(getattr(rows, name).data)
        self._held.append((self._files.setdefault(file, len(self._files)), rows))
        self._conversations.append(rows.conversations)
        self.num_rows += len(rows)
        self.num_tokens += len(rows.input_ids)
        self.num_supervised += int(np.count_nonzero(rows.loss_mask))
        self.longest = max(self.longest, int(rows.lengths.max()))
        counts = np.bincount(rows.input_ids, minlength=len(self._token_counts))
        counts[: len(self._token_counts)] += self._token_counts
        self._token_counts = counts
        self._held_rows += len(rows)
        self._held_tokens += len(rows.input_ids)
        if self._held_tokens >= TOKENS_PER_RECORD_BATCH or self._held_rows >= ROWS_PER_RECORD_BATCH:
            self._flush()

    @property
    def files(self) -> list[str]:
        """Distinct files that rows were added from, in order of their first row."""
        return list(self._files)

    @property
    def num_conversations(self) -> int:
        """Distinct conversations added."""
        return len(_distinct(np.concatenate([np.empty(0, np.uint64), *self._conversations])))

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the rows added; how they were shared out to calls of `add`, and their files, do not matter."""
        return hashlib.sha256(b"".join(running.digest() for running in self._hashes.values())).hexdigest()

    def describe(self, **made_with: Any) -> DatasetInfo:
        """What was written, and what it was made with: the other fields of `DatasetInfo`."""
        return DatasetInfo(
            format=FORMAT,
            num_rows=self.num_rows,
            num_conversations=self.num_conversations,
            num_tokens=self.num_tokens,
            num_supervised=self.num_supervised,
            longest=self.longest,
            fingerprint=self.fingerprint,
            files=self.files,
            **made_with,
        )

    def close(self) -> None:
        """Write what is held, the file's footer and the counts of tokens."""
        self._flush()
        self._writer.close()
        self._sink.close()
        counts = io.BytesIO()  # written at once: NumPy has no error number for a disk that is full
        np.save(counts, self._token_counts)
        (self._folder / TOKENS_FILE).write_bytes(counts.getbuffer())

    def abort(self) -> None:
        """Let go of the file, whatever state it is in."""
        self._sink.close()

    def _flush(self) -> None:
        if not self._held:
            return
        held = [rows for _, rows in self._held]
        files = np.array([file for file, _ in self._held], dtype=np.int32).repeat([len(rows) for rows in held])
        offsets = pa.array(np.cumsum(np.concatenate([[0], *(rows.lengths for rows in held)])))
        ids, mask = (pa.array(np.concatenate([getattr(r, name) for r in held])) for name in ("input_ids", "loss_mask"))
        columns = [
            pa.LargeListArray.from_arrays(offsets, ids, type=SCHEMA.types[0]),
            pa.LargeListArray.from_arrays(offsets, mask, type=SCHEMA.types[1]),
            pa.array(files),
            pa.array(np.concatenate([rows.lines for rows in held])),
            pa.array(np.concatenate([rows.conversations for rows in held])),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self._held = []
        self._held_rows = self._held_tokens = 0


def _distinct(values: np.ndarray) -> np.ndarray:
    """Different values, ascending; `np.unique` (NumPy 2.4) takes eight times as long at ten million hashes."""
    values = np.sort(values)
    is_first = np.ones(len(values), dtype=bool)
    is_first[1:] = values[1:] != values[:-1]
    return values[is_first]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what turns text into token ids.

    It covers vocabulary, merges, added tokens, normalisation and splitting; it leaves out paths, the chat template,
    decoding, padding and truncation.
    """
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        content = {key: backend.get(key) for key in ("model", "added_tokens", "normalizer", "pre_tokenizer")}
    else:
        added = {i: [token.content, token.special] for i, token in tokenizer.added_tokens_decoder.items()}
        content = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab(), "added_tokens": added}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
