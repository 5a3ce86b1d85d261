"""The data set on disk: token rows in a memory-mapped Arrow file, and what they were made with.

    DIR/rows.arrow       input_ids, loss_mask, source, conversation; record batches of bounded size
    DIR/prepare.json     `DatasetInfo` under "dataset", the report of the command beside it
    DIR/rejected.jsonl   one line a rejected row
    DIR/tokenizer/       copy of the tokenizer, so that `paceline inspect` needs nothing else

`prepare` writes it through `DatasetWriter`; training and `inspect` read it through `Dataset`.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from paceline.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
ROWS_FILE = "rows.arrow"
INFO_FILE = "prepare.json"
REJECTED_FILE = "rejected.jsonl"
TOKENIZER_DIR = "tokenizer"

SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.large_list(pa.int32()), nullable=False),
        # One byte a token: Arrow packs booleans into bits, which cannot be read without a copy.
        pa.field("loss_mask", pa.large_list(pa.uint8()), nullable=False),
        pa.field("source", pa.large_string(), nullable=False),
        pa.field("conversation", pa.uint64(), nullable=False),
    ]
)

TOKENS_PER_RECORD_BATCH = 4 << 20
"""Tokens after which the writer flushes: 20 MiB held, and few batches to map on opening."""

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
    """`enable_thinking` as the template was given it; None: not given."""
    max_length: int
    """Length limit of rows in tokens."""
    on_long: str
    """What became of longer rows: `cut` or `drop`."""
    fingerprint: str
    """SHA-256 over ids, masks and conversations of all rows, in order; paths leave no trace in it."""


class Dataset:
    """Rows of a folder written by `paceline prepare`, read through a memory map; any number of threads may read."""

    def __init__(self, table: pa.Table, info: DatasetInfo) -> None:
        self.info = info
        batches = table.to_batches()
        self._ids = [batch.column("input_ids").values.to_numpy() for batch in batches]
        self._masks = [batch.column("loss_mask").values.to_numpy() for batch in batches]
        self._offsets = [batch.column("input_ids").offsets.to_numpy() for batch in batches]
        self._sources = [batch.column("source") for batch in batches]
        self._conversations = [batch.column("conversation").to_numpy() for batch in batches]
        self._first_rows = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self.lengths: np.ndarray = np.concatenate([np.diff(offsets) for offsets in self._offsets])
        """Tokens of each row, int64 ``[rows]``."""

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
        if table.schema != SCHEMA or table.num_rows != info.num_rows:
            raise DataError(
                f"data set {folder} is damaged: {ROWS_FILE} holds {table.num_rows} rows, {INFO_FILE} says "
                f"{info.num_rows}; run `paceline prepare` again"
            )
        if not table.num_rows:
            raise DataError(f"data set {folder} is empty; run `paceline prepare` again")
        return cls(table, info)

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
        return self._sources[batch][at].as_py()

    def split(self, validation: float) -> tuple[np.ndarray, np.ndarray]:
        """Share the rows out to training and validation, whole conversations at a time.

        The conversations with the lowest hashes are held out, so the choice depends on nothing but content and share.

        Args:
            validation: Share of the conversations, 0 <= share < 1; above 0, at least one and never all are held out,
                where there are two or more.
        Returns: int64 row numbers: training rows ascending; validation rows ordered by hash.
        """
        conversations = np.concatenate(self._conversations)
        distinct = np.unique(conversations)
        held_out = 0
        if validation > 0 and len(distinct) > 1:
            held_out = min(max(round(validation * len(distinct)), 1), len(distinct) - 1)
        if held_out == 0:
            return np.arange(len(self)), np.empty(0, dtype=np.int64)
        is_validation = conversations <= distinct[held_out - 1]
        rows = np.flatnonzero(is_validation)
        return np.flatnonzero(~is_validation), rows[np.argsort(conversations[rows], kind="stable")]

    def contains_token(self, token_id: int) -> bool:
        """Whether a token id occurs in any row; reads all of them."""
        return any(
            bool((ids[start : start + SCAN_TOKENS] == token_id).any())
            for ids in self._ids
            for start in range(0, len(ids), SCAN_TOKENS)
        )

    def largest_token(self) -> int:
        """Largest token id of any row; reads all of them."""
        return max(int(ids.max()) for ids in self._ids if len(ids))

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
    """Appends rows to a new rows file; holds one record batch at a time."""

    def __init__(self, folder: Path) -> None:
        """Create the rows file. Raises: OSError, as do the other methods, for example when the disk is full."""
        self._sink = pa.OSFile(str(folder / ROWS_FILE), "wb")
        self._writer = pa.ipc.new_file(self._sink, SCHEMA)
        self._sha = hashlib.sha256()
        self._conversations = array("Q")
        self.num_rows = 0
        self.num_tokens = 0
        self.num_supervised = 0
        self.longest = 0
        self._clear()

    def add(self, input_ids: np.ndarray, loss_mask: np.ndarray, source: str, conversation: int) -> None:
        """Append one row: int32 ``[n]``, bool ``[n]``, ``FILE:LINE``, 64-bit hash."""
        ids, mask = np.ascontiguousarray(input_ids, np.int32), np.ascontiguousarray(loss_mask, np.uint8)
        self._ids.append(ids)
        self._masks.append(mask)
        self._sources.append(source)
        self._hashes.append(conversation)
        self._held_tokens += len(ids)
        self._sha.update(len(ids).to_bytes(8, "little") + conversation.to_bytes(8, "little"))
        self._sha.update(ids.data)
        self._sha.update(mask.data)
        self._conversations.append(conversation)
        self.num_rows += 1
        self.num_tokens += len(ids)
        self.num_supervised += int(mask.sum())
        self.longest = max(self.longest, len(ids))
        if self._held_tokens >= TOKENS_PER_RECORD_BATCH or len(self._ids) >= ROWS_PER_RECORD_BATCH:
            self._flush()

    @property
    def num_conversations(self) -> int:
        """Distinct conversations added."""
        return len(np.unique(np.frombuffer(self._conversations, dtype=np.uint64)))

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the rows added."""
        return self._sha.hexdigest()

    def close(self) -> None:
        """Write what is held and the file's footer."""
        self._flush()
        self._writer.close()
        self._sink.close()

    def abort(self) -> None:
        """Let go of the file, whatever state it is in."""
        self._sink.close()

    def _clear(self) -> None:
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._sources: list[str] = []
        self._hashes: list[int] = []
        self._held_tokens = 0

    def _flush(self) -> None:
        if not self._ids:
            return
        offsets = pa.array(np.cumsum([0, *map(len, self._ids)], dtype=np.int64))
        columns = [
            pa.LargeListArray.from_arrays(offsets, pa.array(np.concatenate(self._ids)), type=SCHEMA.types[0]),
            pa.LargeListArray.from_arrays(offsets, pa.array(np.concatenate(self._masks)), type=SCHEMA.types[1]),
            pa.array(self._sources, pa.large_string()),
            pa.array(np.array(self._hashes, dtype=np.uint64)),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self._clear()


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
