"""Packed rows, feature sizes and step sums."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.records import PADDING_DOCUMENT, FeatureBatch, StepSums, TokenBatch


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(1, 99), st.booleans()), min_size=1, max_size=7), max_size=4),
       st.integers(0, 5))  # fmt: skip
def test_a_row_holds_its_documents_in_order(documents: list[list[tuple[int, bool]]], padding: int) -> None:
    """Every document is found whole at its span with its own id, row and positions from 0; the rest is padding."""
    parts = [
        (100 + i, torch.tensor([token for token, _ in d]), torch.tensor([seen for _, seen in d]))
        for i, d in enumerate(documents)
    ]
    total = sum(len(d) for d in documents)
    batch = TokenBatch.pack(7, parts, total + padding)
    ids, mask, docs, positions = [], [], [], []
    for i, document in enumerate(documents):
        for p, (token, seen) in enumerate(document):
            ids.append(token), mask.append(seen), docs.append(i), positions.append(p)
    assert batch.input_ids.tolist() == ids + [0] * padding
    assert batch.loss_mask.tolist() == mask + [False] * padding
    assert batch.document_ids.tolist() == docs + [PADDING_DOCUMENT] * padding
    assert batch.position_ids.tolist() == positions + [0] * padding
    assert (batch.number, batch.num_tokens) == (7, total)
    assert batch.rows == tuple(100 + i for i in range(len(documents)))
    assert [end - start for start, end in batch.spans] == [len(d) for d in documents]
    assert batch.document_starts[0] == 0 and batch.document_starts[-1] == total


def test_types_of_a_row() -> None:
    """Ids and positions are int64, document ids int32, the loss mask bool, whatever type it came in."""
    batch = TokenBatch.pack(0, [(0, torch.tensor([1, 2]), torch.tensor([0, 1]))], 3)
    types = (batch.input_ids.dtype, batch.loss_mask.dtype, batch.document_ids.dtype, batch.position_ids.dtype)
    assert types == (torch.int64, torch.bool, torch.int32, torch.int64)
    assert batch.loss_mask.tolist() == [False, True, False]


def test_documents_that_do_not_fit_are_refused() -> None:
    """Too many tokens are an error with both numbers; exactly as many fit."""
    document = (0, torch.ones(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="8 tokens.*row of 7"):
        TokenBatch.pack(0, [document, document], 7)
    assert TokenBatch.pack(0, [document, document], 8).num_tokens == 8


def test_bytes_of_a_batch() -> None:
    """Features and the row's own tensors count, and the last hidden state where there is one."""
    tokens = TokenBatch.pack(0, [], 10)
    feature = torch.zeros(10, 6, dtype=torch.bfloat16)
    assert FeatureBatch(tokens, feature).num_bytes == 10 * 6 * 2 + 10 * (8 + 1 + 4 + 8)
    assert FeatureBatch(tokens, feature, torch.zeros(10, 3)).num_bytes == 10 * 6 * 2 + 10 * (8 + 1 + 4 + 8) + 10 * 3 * 4


def test_step_sums_add_every_field() -> None:
    """Sums of micro-batches add field by field."""
    names = [f.name for f in dataclasses.fields(StepSums)]
    one = StepSums(**{name: i + 1 for i, name in enumerate(names)})
    one += StepSums(**{name: 10 * (i + 1) for i, name in enumerate(names)})
    assert dataclasses.asdict(one) == {name: 11 * (i + 1) for i, name in enumerate(names)}
