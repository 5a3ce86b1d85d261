"""Which keys a block's slot may see: the one rule of training and decoding.

A slot sees the context strictly before its anchor, inside the anchor's document (and inside the window of a sliding
layer), and its own block. It never sees another block, and never a feature at or past its anchor: the target has not
produced it yet when the block is drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor


def context_visible(key_positions: Tensor, start: Tensor, anchor: Tensor, slot: Tensor, window: int | None) -> Tensor:
    """Whether slot `slot` of the block anchored at `anchor` sees the context feature at `key_positions`.

    All arguments are row positions and broadcast against each other.

    Args:
        start: First position of the anchor's document.
        window: Keys at a distance of `window` or more from the slot's own position are hidden; None: all are seen.
    """
    visible = (key_positions >= start) & (key_positions < anchor)
    if window is not None:
        visible = visible & (anchor + slot - key_positions < window)
    return visible


def block_visible(query_slot: Tensor, key_slot: Tensor, causal: bool, window: int | None) -> Tensor:
    """Whether a slot sees another slot of its own block: all of them, or those up to itself when `causal`.

    A window bounds both directions.
    """
    distance = query_slot - key_slot
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible = distance >= 0
    if window is not None:
        visible = visible & (distance.abs() < window)
    return visible


def dense_mask(
    anchors: Tensor, keep: Tensor, starts: Tensor, context_len: int, block_size: int, causal: bool, window: int | None
) -> Tensor:
    """The whole mask of a row: queries are the block slots, keys the context and then the block slots.

    Slots of an empty anchor see their own block and nothing else: a row without any key would make a softmax NaN.

    Args:
        anchors: int64 ``[A]`` row positions.
        keep: bool ``[A]``.
        starts: int64 ``[A]`` first position of each anchor's document.
    Returns: bool ``[A*K, S + A*K]``.
    """
    num_anchors, slots = len(anchors), torch.arange(block_size)
    context = context_visible(
        torch.arange(context_len),
        starts[:, None, None],
        torch.where(keep, anchors, starts)[:, None, None],
        slots[None, :, None],
        window,
    ).expand(-1, block_size, -1)  # [A, K, S]; without a window the slots of a block see the same context
    own = block_visible(slots[:, None], slots[None, :], causal, window)  # [K, K]
    blocks = torch.eye(num_anchors, dtype=torch.bool)[:, None, :, None] & own[None, :, None, :]  # [A, K, A, K]
    rows = num_anchors * block_size
    return torch.cat([context.reshape(rows, context_len), blocks.reshape(rows, rows)], dim=1)
