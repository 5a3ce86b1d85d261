"""Attention by FlexAttention: block masks made from sorted intervals, without looking at single keys.

What a row of queries sees is an interval of the context (and, for a drafter, its own block). A tile of 128 x 128 scores
is skipped, computed whole, or masked, and which of them follows from the ends of the intervals: the grid of scores is
never evaluated, as `create_block_mask` would. The tables of a layout are buffers of fixed size, rewritten in place for
every batch, so that a compiled layer never meets a new mask and a CUDA graph may read them.
Shape letters: A anchor slots, K block size, S context tokens, T = A*K block rows, N query heads, M key/value heads,
H head size, Q and C tiles of queries and of keys.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from paceline.kernels.attention import Visibility
from paceline.profiling import stages

TILE = 128
"""Side of a tile of scores, in rows and in keys: what the kernels take by default."""

MIN_HEAD_DIM = 16
"""Narrowest head that the kernels take."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def num_tiles(length: int) -> int:
    """Tiles that cover this many rows."""
    return -(-length // TILE)


def tile_range(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First row of every tile, and the row after its last one, int32 ``[tiles]``."""
    first = torch.arange(num_tiles(length), device=device, dtype=torch.int32) * TILE
    return first, (first + TILE).clamp(max=length)


def interval_tiles(low: Tensor, high: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Which tiles of keys the rows of each tile of queries see in part, and which as a whole.

    Args:
        low, high: int32 ``[rows]``; row r sees keys ``low[r] <= k < high[r]``. Rows are a multiple of `TILE`.
    Returns: bool ``[Q, C]`` twice: some row sees some key; every row sees every key.
    """
    first, end = tile_range(num_keys, low.device)
    low, high = low.view(-1, TILE, 1), high.view(-1, TILE, 1)
    some = ((low < end) & (high > first) & (low < high)).any(1)
    every = ((low <= first) & (high >= end)).all(1)
    return some, every


class Tables:
    """The tables of one mask, in both directions, in the form that block-sparse kernels read: int32 buffers.

    Attributes:
        partial, full: For tiles to be masked and for whole ones: (number of key tiles of each query tile ``[1, 1, Q]``,
            their numbers first ``[1, 1, Q, C]``) and, for gradients, (number of query tiles of each key tile, their
            numbers).
    """

    def __init__(self, num_query_tiles: int, num_key_tiles: int, device: torch.device, with_backward: bool) -> None:
        def pair(rows: int, columns: int) -> list[Tensor]:
            shapes = (1, 1, rows), (1, 1, rows, columns)
            return [torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes]

        def both() -> list[Tensor]:
            backward = pair(num_key_tiles, num_query_tiles) if with_backward else []
            return [*pair(num_query_tiles, num_key_tiles), *backward]

        self.partial, self.full = both(), both()

    def write(self, some: Tensor, every: Tensor) -> None:
        """Fill the buffers from bool ``[Q, C]`` tables, in place."""
        for buffers, tiles in ((self.partial, some & ~every), (self.full, every)):
            for at, dense in zip(range(0, len(buffers), 2), (tiles, tiles.T), strict=False):
                buffers[at][0, 0] = dense.sum(1, dtype=torch.int32)
                order = dense.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
                buffers[at + 1][0, 0] = order.to(torch.int32)

    def block_mask(self, num_rows: int, num_keys: int, mask_mod: MaskMod, window: int | None) -> BlockMask:
        """The mask over these buffers, made once; other kernels find its window as an attribute."""
        with_backward = len(self.partial) == 4
        mask = BlockMask(
            seq_lengths=(num_rows, num_keys),
            kv_num_blocks=self.partial[0],
            kv_indices=self.partial[1],
            full_kv_num_blocks=self.full[0],
            full_kv_indices=self.full[1],
            q_num_blocks=self.partial[2] if with_backward else None,
            q_indices=self.partial[3] if with_backward else None,
            full_q_num_blocks=self.full[2] if with_backward else None,
            full_q_indices=self.full[3] if with_backward else None,
            BLOCK_SIZE=(TILE, TILE),
            mask_mod=mask_mod,
        )
        mask.window = window  # type: ignore[attr-defined]
        return mask


class BlockMasks:
    """Masks of a drafter's blocks for every visibility that its layers have. Rewritten by `update` for each batch.

    Keys are the T block rows and then the S context tokens, so that the blocks' own tiles lie on the diagonal whatever
    S is.

    Args:
        num_anchors: A; ``A * K`` has to be a multiple of `TILE`.
        visibilities: Of the drafter's layers.
    """

    def __init__(
        self,
        num_anchors: int,
        block_size: int,
        context_len: int,
        visibilities: Iterable[Visibility],
        device: torch.device,
    ) -> None:
        assert num_anchors * block_size % TILE == 0
        self.block_size, self.context_len = block_size, context_len
        self.num_rows = num_anchors * block_size
        self.num_keys = self.num_rows + context_len
        self.low: dict[int | None, Tensor] = {}
        self.high = torch.zeros(self.num_rows, dtype=torch.int32, device=device)
        self.tables: dict[int | None, Tables] = {}
        self._masks: dict[Visibility, BlockMask] = {}
        for visibility in dict.fromkeys(visibilities):
            if visibility.window not in self.tables:  # causality changes single keys, not tiles
                self.low[visibility.window] = torch.zeros_like(self.high)
                self.tables[visibility.window] = Tables(
                    num_tiles(self.num_rows), num_tiles(self.num_keys), device, with_backward=True
                )
            mask_mod = block_mask_mod(self.low[visibility.window], self.high, block_size, visibility)
            table = self.tables[visibility.window]
            self._masks[visibility] = table.block_mask(self.num_rows, self.num_keys, mask_mod, visibility.window)

    def for_layer(self, visibility: Visibility) -> Any:
        """The mask of a layer; the same object for every batch."""
        return self._masks[visibility]

    def update(self, anchors: Tensor, starts: Tensor) -> None:
        """Write the masks of a batch, without waiting for the device.

        Args:
            anchors: int64 ``[A]`` row positions, ascending, on the device; equal to its start in an empty slot.
            starts: int64 ``[A]``; first position of each anchor's document.
        """
        slots = torch.arange(self.block_size, device=anchors.device)
        rows = (len(anchors), self.block_size)
        self.high.copy_((self.num_rows + anchors)[:, None].expand(rows).flatten())
        own = self._own_tiles(anchors.device)
        for window, table in self.tables.items():
            low = starts[:, None].expand(rows)
            with contextlib.nullcontext() if window is None else stages.CREATE_BLOCK_MASK_SWA:
                if window is not None:
                    low = torch.maximum(low, anchors[:, None] + slots - window + 1)
                self.low[window].copy_(self.num_rows + low.flatten())
                some, every = interval_tiles(self.low[window], self.high, self.num_keys)
                table.write(some | own, every)

    def _own_tiles(self, device: torch.device) -> Tensor:
        """Tiles that hold a block's own keys, bool ``[Q, C]``: the diagonal, and where a block crosses an edge."""
        first, end = tile_range(self.num_rows, device)
        low = first // self.block_size * self.block_size
        high = (end - 1) // self.block_size * self.block_size + self.block_size
        key_first, key_end = tile_range(self.num_keys, device)
        return (low[:, None] < key_end) & (high[:, None] > key_first) & (key_first < self.num_rows)


def block_mask_mod(low: Tensor, high: Tensor, block_size: int, visibility: Visibility) -> MaskMod:
    """The rule for single scores: two integers a row, and the row's own block.

    With a gather per (row, key), of document ids, a prototype's backward pass took a third longer on an H200.
    """
    causal, window = visibility.causal, visibility.window

    def mask_mod(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        in_context = (key >= low[row]) & (key < high[row])
        in_block = row // block_size == key // block_size
        if causal:
            in_block = in_block & (key <= row)
        if window is not None and window < block_size:
            in_block = in_block & (key - row < window) & (row - key < window)
        return in_context | in_block

    return mask_mod


def fused_flex_attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`flex_attention` by its kernel on a GPU, also where the code around it is not compiled: else it would make all
    scores, masked ones included."""
    if query.device.type == "cuda" and not torch.compiler.is_compiling():
        return _compiled_flex_attention()(query, *args, **kwargs)
    return flex_attention(query, *args, **kwargs)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def attend_flex(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    mask: BlockMask,
    _visibility: Visibility,
) -> Tensor:
    """Softmax attention of every block over its document's context and itself; shapes as `attend_per_document`."""
    key = torch.cat([block_key.flatten(0, 1), context_key]).transpose(0, 1)[None]  # [1, M, T + S, H]
    value = torch.cat([block_value.flatten(0, 1), context_value]).transpose(0, 1)[None]
    rows = query.flatten(0, 1).transpose(0, 1)[None]  # [1, N, T, H]
    out = fused_flex_attention(rows, key, value, block_mask=mask, enable_gqa=rows.shape[1] != key.shape[1])
    return out[0].transpose(0, 1).unflatten(0, query.shape[:2])


def why_not_flex(num_anchors: int, block_size: int, head_dim: int, device: torch.device) -> str | None:
    """Why `attend_flex` cannot train blocks of these shapes, in one line; None if it can."""
    if device.type != "cuda":
        return "FlexAttention has no gradients on the CPU"
    if num_anchors * block_size % TILE:
        return f"{num_anchors} anchors of {block_size} slots are no multiple of {TILE} rows"
    if head_dim < MIN_HEAD_DIM:
        return f"FlexAttention wants heads of {MIN_HEAD_DIM} or more, not {head_dim}"
    return None


class DocumentMasks:
    """Causal masks that keep the documents of a packed row apart, one for each window. Rewritten for each batch.

    A padding token sees the padding of its own tile: never nothing, which would make its features NaN, and never much.

    Args:
        length: S.
        windows: Of the target's layers; None: full attention.
    """

    def __init__(self, length: int, windows: Iterable[int | None], device: torch.device) -> None:
        self.length = length
        self.start = torch.zeros(num_tiles(length) * TILE, dtype=torch.int32, device=device)
        self.tables: dict[int | None, Tables] = {}
        self._masks: dict[int | None, BlockMask] = {}
        for window in dict.fromkeys(windows):
            self.tables[window] = Tables(num_tiles(length), num_tiles(length), device, with_backward=False)
            mask_mod = document_mask_mod(self.start, window)
            self._masks[window] = self.tables[window].block_mask(length, length, mask_mod, window)

    def for_window(self, window: int | None) -> BlockMask:
        """The mask of layers with this window; the same object for every batch."""
        return self._masks[window]

    def update(self, starts: Tensor) -> None:
        """Write the masks of a batch, without waiting for the device.

        Args:
            starts: int ``[S]`` on the device; first position of each token's document, `padding_starts` on padding.
        """
        self.start[: self.length].copy_(starts)
        self.start[self.length :].fill_(self.length)
        row = torch.arange(len(self.start), dtype=torch.int32, device=starts.device)
        high = torch.where(row < self.length, row + 1, 0)
        for window, table in self.tables.items():
            low = self.start if window is None else torch.maximum(self.start, row - window + 1)
            some, every = interval_tiles(low, high, self.length)
            table.write(some, every)


def document_mask_mod(start: Tensor, window: int | None) -> MaskMod:
    """The rule for single scores of a packed row: causal, inside the document, and inside the window."""

    def mask_mod(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        visible = (key <= row) & (key >= start[row])
        return visible if window is None else visible & (row - key < window)

    return mask_mod


def document_starts(starts: tuple[int, ...], length: int) -> Tensor:
    """First position of each token's document, int32 ``[S]`` on the host; a padding token counts its tile's padding.

    Args:
        starts: ``n + 1`` offsets, as in `TokenBatch.document_starts`.
    """
    edges = torch.tensor(starts, dtype=torch.int32)
    counts = torch.diff(edges, append=torch.tensor([length], dtype=torch.int32))
    per_token = torch.repeat_interleave(edges, counts)
    padding = torch.arange(starts[-1], length, dtype=torch.int32)
    per_token[starts[-1] :] = torch.maximum(padding // TILE * TILE, per_token[starts[-1] :])
    return per_token
