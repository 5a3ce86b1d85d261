"""Random packed rows and blocks for the property tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from paceline.dflash.anchors import Anchors, make_anchors
from paceline.records import TokenBatch
from tests import oracles


@st.composite
def rows(draw: st.DrawFn) -> TokenBatch:
    """Up to four documents of 1 to 14 tokens with holes in the loss mask, and up to 9 padding tokens."""
    lengths = draw(st.lists(st.integers(1, 14), min_size=0, max_size=4))
    padding = draw(st.integers(0 if lengths else 1, 9))
    density = draw(st.sampled_from([0, 2, 5, 8, 10]))
    documents = []
    for i, n in enumerate(lengths):
        mask = [value < density for value in draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))]
        ids = draw(st.lists(st.integers(1, 99), min_size=n, max_size=n))
        documents.append((i, torch.tensor(ids), torch.tensor(mask)))
    return TokenBatch.pack(0, documents, sum(lengths) + padding)


@dataclass(frozen=True)
class Blocks:
    """A row with anchors in it, as the implementation and as the oracles take them."""

    tokens: TokenBatch
    anchors: Anchors
    anchor_list: list[int | None]
    starts: torch.Tensor
    block_size: int
    causal: bool
    window: int | None


@st.composite
def blocks(draw: st.DrawFn) -> Blocks:
    """A row with 0 to 5 anchors in its documents, 0 to 3 empty slots, K from 2 to 9, windows, causal or not."""
    tokens = draw(rows())
    chosen = draw(st.sets(st.integers(0, tokens.num_tokens - 1), max_size=5)) if tokens.num_tokens else set()
    empty = draw(st.integers(0 if chosen else 1, 3))
    positions = sorted(chosen)
    docs = tokens.document_ids.tolist()
    return Blocks(
        tokens=tokens,
        anchors=make_anchors(torch.tensor(positions, dtype=torch.int64), len(positions) + empty),
        anchor_list=[*positions, *[None] * empty],
        starts=torch.tensor([oracles.document_start(p, docs) for p in positions] + [0] * empty),
        block_size=draw(st.integers(2, 9)),
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([None, None, 1, 2, 3, 5, 9, 30])),
    )
