"""Records to rows: dialect, tokens and loss mask, length policy. What one worker process does with a chunk."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from paceline.data.chat import MIN_SUPERVISED, ChatTokenizer, TokenRow, longest_supervised_run
from paceline.data.dataset import Rows
from paceline.data.dialects import Conversation, Document, Rejection, TokenRows, parse
from paceline.data.reading import Chunk, Record

KINDS = {Conversation: "conversations", Document: "texts", TokenRows: "token rows"}
"""How the report counts what records held."""


@dataclass
class Outcome:
    """What became of the records of a chunk.

    Attributes:
        rows: What is kept, in order.
        num_records: Records in all.
        num_left_out: Records that the input's weight left out.
        kinds: Records that were kept, by what they held.
        rejected: Records of which nothing was kept, by kind of reason.
        dropped_turns: Turn rows left out of records that were kept, by kind of reason.
        listed: One JSON line for every rejection: file, line, reason, text.
        reasons: ``FILE:LINE: reason`` of the same.
        num_supervised_lost: Supervised tokens that the length policy cost.
    """

    rows: Rows
    num_records: int = 0
    num_left_out: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    dropped_turns: Counter[str] = field(default_factory=Counter)
    listed: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    num_supervised_lost: int = 0


class RowMaker:
    """Chunks to rows, under one tokenizer, template and length policy."""

    def __init__(self, chat: ChatTokenizer, max_length: int, on_long: Literal["cut", "drop"]) -> None:
        self._chat = chat
        self._max_length = max_length
        self._on_long = on_long

    def __call__(self, chunk: Chunk, weight: float = 1.0) -> Outcome:
        """Rows and rejections of a chunk; never raises for what its records hold.

        Args:
            weight: How often each conversation is used, see `Input`.
        """
        outcome = Outcome(Rows.join([]))
        read = list(self._read(chunk, weight, outcome))
        conversations = [content for _, content, _, _ in read if isinstance(content, Conversation)]
        tokenized = iter(self._chat.rows_many(conversations))
        kept: list[tuple[np.ndarray, np.ndarray, int, int]] = []
        for record, content, content_hash, copies in read:
            rejections: list[Rejection] = []
            rows: list[TokenRow] = []
            try:
                candidates = next(tokenized) if isinstance(content, Conversation) else self._other_rows(content)
                if isinstance(candidates, Rejection):
                    raise candidates
                for candidate in candidates:
                    try:
                        rows.append(self._fit(candidate, outcome, copies))
                    except Rejection as rejection:
                        rejections.append(_name_turn(rejection, candidate) if len(candidates) > 1 else rejection)
            except Rejection as rejection:
                rejections.append(rejection)
            kept += [(row.input_ids, row.loss_mask, record.number, content_hash) for row in rows] * copies
            outcome.kinds[KINDS[type(content)]] += bool(rows)
            _reject(outcome, record, rejections, whole=not rows)
        outcome.rows = Rows.join(kept)
        return outcome

    def _read(
        self, chunk: Chunk, weight: float, outcome: Outcome
    ) -> Iterator[tuple[Record, Conversation | Document | TokenRows, int, int]]:
        """Records that are used, with content, its hash and how often; rejects those that cannot be read."""
        for record in chunk.records():
            outcome.num_records += 1
            try:
                content = parse(record.decode())
                content_hash = content.hash
            except Rejection as rejection:
                _reject(outcome, record, [rejection], whole=True)
                continue
            if copies := copies_of(content_hash, weight):
                yield record, content, content_hash, copies
            else:
                outcome.num_left_out += 1

    def _other_rows(self, content: Document | TokenRows) -> list[TokenRow]:
        if isinstance(content, Document):
            return [self._chat.document(content.text)]
        rows = []
        for turn, (ids, mask) in enumerate(content.rows, start=1):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self._chat.vocab_size:
                seen = low if low < 0 else high
                raise Rejection(
                    "bad token row", f"id {seen} is outside the tokenizer's 0 to {self._chat.vocab_size - 1}"
                )
            mask = mask.copy()
            mask[0] = False  # nothing precedes it
            rows.append(TokenRow(ids.astype(np.int32), mask, turn))
        return rows

    def _fit(self, row: TokenRow, outcome: Outcome, copies: int) -> TokenRow:
        """The row under the length policy, with something to learn in it; counts what the policy cost."""
        _check_supervised(row.loss_mask)
        length = len(row.input_ids)
        if length <= self._max_length:
            return row
        if self._on_long == "drop":
            outcome.num_supervised_lost += copies * int(row.loss_mask.sum())
            raise Rejection("longer than max-length", f"{length} tokens, limit {self._max_length}")
        cut = TokenRow(row.input_ids[: self._max_length], row.loss_mask[: self._max_length], row.turn)
        try:
            _check_supervised(cut.loss_mask)
        except Rejection as rejection:
            outcome.num_supervised_lost += copies * int(row.loss_mask.sum())
            seen = f"cut from {length} to {self._max_length} tokens: {rejection.detail}"
            raise Rejection("nothing to learn within max-length", seen) from rejection
        outcome.num_supervised_lost += copies * int(row.loss_mask[self._max_length :].sum())
        return cut


def copies_of(content_hash: int, weight: float) -> int:
    """How often a conversation is used under a weight: its whole part, and once more for a share of all conversations.

    The share is chosen by a second hash: by the first one, `Dataset.split` chooses what is held out.
    """
    whole = int(weight)
    place = hashlib.blake2b(content_hash.to_bytes(8, "little"), digest_size=8).digest()
    return whole + (int.from_bytes(place, "little") < (weight - whole) * 2**64)


def _reject(outcome: Outcome, record: Record, rejections: list[Rejection], *, whole: bool) -> None:
    """List why a record, or turns of it, cannot be used."""
    for rejection in rejections:
        line: dict[str, Any] = {"file": record.file, "line": record.number}
        line |= {"reason": rejection.reason, "text": record.text}
        # Text that JSON can hold and UTF-8 cannot, a lone surrogate, is written as an escape.
        listed = json.dumps(line, ensure_ascii=False).encode("utf-8", errors="backslashreplace").decode()
        outcome.listed.append(listed)
        outcome.reasons.append(f"{record.file}:{record.number}: {rejection.reason}")
    if whole:
        outcome.rejected[rejections[0].kind] += 1
    else:
        outcome.dropped_turns.update(rejection.kind for rejection in rejections)


def _check_supervised(loss_mask: np.ndarray) -> None:
    """Raises: Rejection unless two supervised tokens follow each other somewhere."""
    if longest_supervised_run(loss_mask) >= MIN_SUPERVISED:
        return
    count = int(loss_mask.sum())
    if count < MIN_SUPERVISED:
        tokens = "token" if count == 1 else "tokens"
        raise Rejection(
            "too few supervised tokens", f"{count} supervised {tokens}, below the minimum of {MIN_SUPERVISED}"
        )
    raise Rejection("too few supervised tokens", f"none of {count} supervised tokens follows another")


def _name_turn(rejection: Rejection, row: TokenRow) -> Rejection:
    return Rejection(rejection.kind, f"row of assistant turn {row.turn}: {rejection.detail}")
