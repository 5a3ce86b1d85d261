"""Block masks made from intervals: the dense rule entry by entry and tile by tile; and what attends by them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from paceline.dflash.anchors import Anchors, make_anchors
from paceline.dflash.mask import dense_mask
from paceline.kernels.attention import BlockLayout, Visibility, attend_dense
from paceline.kernels.flex import (
    TILE,
    BlockMasks,
    DocumentMasks,
    attend_flex,
    document_starts,
    why_not_flex,
)

CPU = torch.device("cpu")
SEES = [Visibility(causal, window) for causal in (False, True) for window in (None, 1, 3, 40, 150)]


def random_row(seed: int, num_anchors: int, context_len: int) -> tuple[tuple[int, ...], Anchors, Tensor]:
    """Document edges (padding after the last), anchors with empty slots among them, and the start of each."""
    generator = np.random.default_rng(seed)
    inner = np.sort(generator.choice(np.arange(1, context_len - 20), generator.integers(0, 4), replace=False))
    edges = (0, *inner.tolist(), context_len - int(generator.integers(0, 15)))
    count = int(generator.integers(0, num_anchors + 1))
    positions = np.sort(generator.choice(edges[-1], min(count, edges[-1]), replace=False))
    anchors = make_anchors(torch.from_numpy(positions), num_anchors)
    layout = BlockLayout.of_row(anchors, edges, 4, context_len)
    return edges, anchors, layout.starts


def tiles(counts: Tensor, indices: Tensor) -> Tensor:
    """Tables as bool ``[rows, columns]``."""
    out = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        listed = indices[0, 0, row, :count].long()
        assert listed.tolist() == sorted(set(listed.tolist()))
        out[row, listed] = True
    return out


def tables_of(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Partial and full tiles."""
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    return tiles(mask.kv_num_blocks, mask.kv_indices), tiles(mask.full_kv_num_blocks, mask.full_kv_indices)


@pytest.mark.parametrize("context_len", [256, 512, 300])
@pytest.mark.parametrize("block_size", [4, 16, 10, 5])
def test_block_masks_are_the_dense_rule(block_size: int, context_len: int) -> None:
    """Every entry is the method's rule; tiles are whole exactly where all entries are seen, and absent only where none
    is; the tables for gradients are the transposed ones. Rewritten in place, the masks are those of the next batch."""
    num_anchors = 2 * TILE // math.gcd(block_size, TILE)
    rows = num_anchors * block_size
    masks = BlockMasks(num_anchors, block_size, context_len, SEES, CPU)
    row, key = torch.arange(rows)[:, None], torch.arange(rows + context_len)[None]
    for seed in range(3):
        _, anchors, starts = random_row(seed, num_anchors, context_len)
        masks.update(anchors.positions, starts)
        for see in SEES:
            wanted = dense_mask(
                anchors.positions, anchors.keep, starts, context_len, block_size, see.causal, see.window
            )
            wanted = torch.cat([wanted[:, context_len:], wanted[:, :context_len]], 1)
            mask = masks.for_layer(see)
            assert mask.shape == (1, 1, rows, rows + context_len)
            assert torch.equal(mask.mask_mod(None, None, row, key), wanted)
            padded = torch.zeros(rows, -(-wanted.shape[1] // TILE) * TILE, dtype=torch.bool)
            padded[:, : wanted.shape[1]] = wanted
            blocks = padded.view(rows // TILE, TILE, -1, TILE)
            some, every = blocks.any(3).any(1), blocks.all(3).all(1)
            if context_len % TILE:  # keys past the end count as seen
                padded[:, wanted.shape[1] :] = True
                every = padded.view(blocks.shape).all(3).all(1)
            partial, full = tables_of(mask)
            assert torch.equal(full, every) and not (partial & full).any()
            assert not (some & ~(partial | full)).any()
            if TILE % block_size == 0 and (see.window or block_size) >= block_size:
                assert torch.equal(partial | full, some)
            assert torch.equal(tiles(mask.q_num_blocks, mask.q_indices), partial.T)
            assert torch.equal(tiles(mask.full_q_num_blocks, mask.full_q_indices), full.T)


@pytest.mark.parametrize("see", [Visibility(), Visibility(True), Visibility(False, 40), Visibility(True, 3)], ids=str)
@pytest.mark.parametrize("context_len", [256, 300])
def test_attention_is_that_of_the_dense_mask(see: Visibility, context_len: int) -> None:
    """Forward, every slot's output is the reference's, empty slots included."""
    generator = torch.Generator().manual_seed(0)
    block_size, num_anchors = 16, 24
    _, anchors, starts = random_row(5, num_anchors, context_len)
    assert 0 < anchors.num_kept < num_anchors
    shapes = [(num_anchors, block_size, 4, 16), (context_len, 2, 16), (context_len, 2, 16)]
    shapes += [(num_anchors, block_size, 2, 16)] * 2
    query, context_key, context_value, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    masks = BlockMasks(num_anchors, block_size, context_len, [see], CPU)
    masks.update(anchors.positions, starts)
    with torch.no_grad():
        found = attend_flex(query, context_key, context_value, key, value, masks.for_layer(see), see)
    layout = BlockLayout(anchors, starts, block_size, context_len, ())
    wanted = attend_dense(query, context_key, context_value, key, value, layout, see)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [256, 300, 512])
def test_document_masks_are_the_dense_rule(length: int) -> None:
    """Tokens see their document up to themselves, within the window; padding sees the padding of its own tile."""
    masks = DocumentMasks(length, [None, 7, 130], CPU)
    token = torch.arange(length)
    for seed in range(4):
        edges, _, _ = random_row(seed, 8, length)
        masks.update(document_starts(edges, length))
        document = torch.searchsorted(torch.tensor(edges), token, right=True) - 1
        document = torch.where(token >= edges[-1], 1000 + token // TILE, document)
        for window in (None, 7, 130):
            wanted = (document[:, None] == document) & (token[:, None] >= token)
            if window is not None:
                wanted &= token[:, None] - token < window
            mask = masks.for_window(window)
            assert torch.equal(mask.mask_mod(None, None, token[:, None], token[None]), wanted)
            partial, full = tables_of(mask)
            reference = tables_of(create_block_mask(mask.mask_mod, 1, 1, length, length, device="cpu"))
            assert torch.equal(partial | full, reference[0] | reference[1])
            if length % TILE == 0:
                assert torch.equal(full, reference[1])
            assert mask.window == window


def test_document_starts() -> None:
    """Every token has its document's first position; padding that of its tile, but never before the padding."""
    starts = document_starts((0, 3, 5), 300)
    assert starts.tolist() == [0] * 3 + [3] * 2 + [5] * 123 + [128] * 128 + [256] * 44
    assert document_starts((0, 4), 4).tolist() == [0] * 4


@pytest.mark.parametrize(
    ("num_anchors", "block_size", "head_dim", "device", "reason"),
    [
        (8, 16, 16, "cuda", None),
        (7, 16, 16, "cuda", "7 anchors of 16 slots are no multiple of 128 rows"),
        (8, 16, 8, "cuda", "heads of 16 or more, not 8"),
        (8, 16, 16, "cpu", "no gradients on the CPU"),
    ],
)
def test_what_flex_cannot_train_is_said(
    num_anchors: int, block_size: int, head_dim: int, device: str, reason: str | None
) -> None:
    """The reason names what was seen and what was wanted."""
    found = why_not_flex(num_anchors, block_size, head_dim, torch.device(device))
    assert found is reason is None or reason in str(found)
