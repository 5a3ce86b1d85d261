"""Attention of draft blocks to their document's context and to themselves.

Two backends compute the same function: `attend_per_document`, the CPU's, which touches only the keys that a document's
blocks may see, and `attend_dense`, one call over the whole row with the mask of `dflash.mask`, the reference. Shape
letters: A anchor slots, K block size, S context tokens, N query heads, M key/value heads, H head size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.dflash.anchors import Anchors, make_anchors
from paceline.dflash.mask import block_visible, context_visible, dense_mask

MAX_GROUP_SCORES = 1 << 26
"""Scores of one head that are computed at a time: 256 MiB in float32. A document of 3,072 tokens with 512 blocks of 16
has 25 million, one of 64 k tokens with its 10,923 blocks 11 thousand million."""

MAX_KEPT_SCORES = 1 << 31
"""Scores of all heads that a layer keeps for the gradients, some 12 GiB; longer rows compute theirs again."""

MAX_KEPT_MASKS = 1 << 30
"""Bytes of masks that a layout keeps for the other layers that see alike."""


@dataclass(frozen=True)
class Visibility:
    """What a layer's slots may see beyond the method's own rule.

    Attributes:
        causal: Slots see their block only up to themselves.
        window: Keys at this distance or more are hidden; None: no window.
    """

    causal: bool = False
    window: int | None = None


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of a row stand; made on the host, so that no kernel has to ask the device.

    Attributes:
        anchors: The row's anchor slots.
        starts: int64 ``[A]``; first position of each anchor's document.
        block_size: K.
        context_len: S.
        groups: Blocks of one document each, all of them unless they have more than `MAX_GROUP_SCORES`: (first context
            token, end of the context that the last block sees, first slot, end of the slots).
        masks: What the slots of each group see, bool ``[n, K, C + K]``, by visibility and device: layers share them.
    """

    anchors: Anchors
    starts: Tensor
    block_size: int
    context_len: int
    groups: tuple[tuple[int, int, int, int], ...]
    masks: dict[tuple[Visibility, torch.device], list[Tensor]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def num_scores(self) -> int:
        """Scores of one head in all groups."""
        return sum(
            (last - first) * self.block_size * (end - start + self.block_size)
            for start, end, first, last in self.groups
        )

    def for_layer(self, visibility: Visibility) -> BlockLayout:
        """What `attend_per_document` is given for a layer: the same for all."""
        del visibility
        return self

    def group_mask(self, number: int, visibility: Visibility, device: torch.device) -> Tensor:
        """Mask of a group, kept after the first call unless those of a long row would take too much."""
        if self.num_scores > MAX_KEPT_MASKS:
            return self._mask(self.groups[number], visibility).to(device)
        if (visibility, device) not in self.masks:
            self.masks[visibility, device] = [self._mask(group, visibility).to(device) for group in self.groups]
        return self.masks[visibility, device][number]

    def _mask(self, group: tuple[int, int, int, int], visibility: Visibility) -> Tensor:
        context_start, context_end, first, last = group
        slots = torch.arange(self.block_size)
        own = block_visible(slots[:, None], slots[None, :], visibility.causal, visibility.window)  # [K, K]
        context = context_visible(
            torch.arange(context_start, context_end),
            torch.tensor(context_start),
            self.anchors.positions[first:last, None, None],
            slots[None, :, None],
            visibility.window,
        ).expand(-1, self.block_size, -1)  # [n, K, C]
        return torch.cat([context, own.expand(last - first, -1, -1)], dim=2)

    @classmethod
    def of_row(
        cls, anchors: Anchors, document_starts: tuple[int, ...], block_size: int, context_len: int
    ) -> BlockLayout:
        """Layout of a packed row. Documents are ``[document_starts[d], document_starts[d + 1])``."""
        kept = anchors.positions[: anchors.num_kept].contiguous()
        edges = torch.tensor(document_starts)
        slot_edges = torch.searchsorted(kept, edges).tolist()
        document = torch.searchsorted(edges, kept, right=True) - 1
        starts = torch.zeros_like(anchors.positions)
        starts[: len(kept)] = edges[document]
        groups: list[tuple[int, int, int, int]] = []
        for start, first, last in zip(document_starts[:-1], slot_edges[:-1], slot_edges[1:], strict=True):
            if last > first:
                row_scores = block_size * (int(kept[last - 1]) - start + block_size)
                size = max(1, MAX_GROUP_SCORES // row_scores)
                edges_of_groups = [*range(first, last, size), last]
                for a, b in itertools.pairwise(edges_of_groups):
                    groups.append((start, int(kept[b - 1]), a, b))
        return cls(anchors, starts, block_size, context_len, tuple(groups))

    @classmethod
    def of_decode(cls, context_len: int, block_size: int) -> BlockLayout:
        """Layout of the one block that is drafted after `context_len` tokens."""
        anchors = make_anchors(torch.tensor([context_len]))
        return cls(anchors, torch.zeros(1, dtype=torch.int64), block_size, context_len, ((0, context_len, 0, 1),))


def attend_per_document(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    layout: BlockLayout,
    visibility: Visibility,
) -> Tensor:
    """Softmax attention of every block over its document's context and itself.

    Args:
        query: ``[A, K, N, H]``, rotated and normalised.
        context_key, context_value: ``[S, M, H]``; N is a multiple of M.
        block_key, block_value: ``[A, K, M, H]``.
    Returns: ``[A, K, N, H]``; zeros in empty slots.
    """
    keeps = layout.num_scores * query.shape[2] <= MAX_KEPT_SCORES or not torch.is_grad_enabled()

    def attend(number: int) -> Tensor:
        context_start, context_end, first, last = layout.groups[number]
        return _attend_group(
            query[first:last],
            context_key[context_start:context_end],
            context_value[context_start:context_end],
            block_key[first:last],
            block_value[first:last],
            layout.group_mask(number, visibility, query.device),
        )

    outputs = [
        attend(number) if keeps else checkpoint(attend, number, use_reentrant=False, preserve_rng_state=False)
        for number in range(len(layout.groups))
    ]
    used = layout.groups[-1][3] if layout.groups else 0
    if used < len(query) or not outputs:
        outputs.append(torch.zeros_like(query[used:]))
    return torch.cat(outputs)


def _attend_group(
    query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor, visible: Tensor
) -> Tensor:
    """Blocks of one document. The context is one large matmul for all of them; `visible` is bool ``[n, K, C + K]``."""
    n, k, num_heads, head_dim = query.shape
    if n == 1 and torch.is_inference_mode_enabled():  # decoding: one fused call takes a third of the time
        key, value = torch.cat([context_key, block_key[0]]), torch.cat([context_value, block_value[0]])
        query, key, value = (x.transpose(0, 1)[None] for x in (query[0], key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None], enable_gqa=True)
        return out.transpose(1, 2)
    num_kv, context_len = context_key.shape[1], context_key.shape[0]
    per_kv = num_heads // num_kv
    grouped = query.view(n, k, num_kv, per_kv, head_dim).permute(2, 0, 3, 1, 4)  # [M, n, N/M, K, H]
    rows = grouped.reshape(num_kv, n * per_kv * k, head_dim) * head_dim**-0.5
    to_context = rows @ context_key.permute(1, 2, 0)  # [M, n * N/M * K, C]
    to_block = rows.view(num_kv, n, per_kv * k, head_dim) @ block_key.permute(2, 0, 3, 1)  # [M, n, N/M * K, K]
    scores = torch.cat([to_context.view(num_kv, n, per_kv, k, context_len), to_block.view(num_kv, n, per_kv, k, k)], -1)
    weights = scores.float().masked_fill(~visible[:, None], float("-inf")).softmax(-1).to(context_value.dtype)
    on_context, on_block = weights.split([context_len, k], dim=-1)
    on_context = on_context.reshape(num_kv, n * per_kv * k, context_len)  # no -1: an anchor may have no context at all
    from_context = on_context @ context_value.transpose(0, 1)  # [M, n * N/M * K, H]
    from_block = on_block.reshape(num_kv, n, per_kv * k, k) @ block_value.permute(2, 0, 1, 3)  # [M, n, N/M * K, H]
    joined = from_context.view(num_kv, n, per_kv, k, head_dim) + from_block.view(num_kv, n, per_kv, k, head_dim)
    return joined.permute(1, 3, 0, 2, 4).reshape(n, k, num_heads, head_dim)


def attend_dense(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    layout: BlockLayout,
    visibility: Visibility,
) -> Tensor:
    """The same function by one masked call over the whole row: the reference; memory grows with ``A*K * (S + A*K)``."""
    mask = dense_mask(
        layout.anchors.positions, layout.anchors.keep, layout.starts, layout.context_len, layout.block_size,
        visibility.causal, visibility.window,
    )  # fmt: skip
    key = torch.cat([context_key, block_key.flatten(0, 1)]).transpose(0, 1)
    value = torch.cat([context_value, block_value.flatten(0, 1)]).transpose(0, 1)
    out = F.scaled_dot_product_attention(
        query.flatten(0, 1).transpose(0, 1)[None], key[None], value[None],
        attn_mask=mask.to(query.device), enable_gqa=True,
    )  # fmt: skip
    return out[0].transpose(0, 1).view_as(query)
