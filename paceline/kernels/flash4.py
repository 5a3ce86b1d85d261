"""FlashAttention-4 (PyPI `flash-attn-4`) for the drafter's blocks and the target's packed documents: an optional extra.

Both functions are operators that `torch.compile` leaves alone, so what stands around them is still fused. Written for
and read in 4.0.0b36, whose entry points are private: another version may need another call. On an H200 a step takes 3 %
less time than with FlexAttention (an 8 B target, both models). Its backward on Hopper adds into dq, dk and dv in no
fixed order, and has no deterministic mode for block-sparse masks (seen in its source): runs that promise equal bits
take FlexAttention.

The package compiles a kernel when it first needs it: about 6 s forward, 8 s backward; `load` keeps them on disk.

Shape letters: A anchor slots, K block size, T = A * K block rows, S context tokens, N query heads, M key/value heads,
H head size.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from paceline.kernels.attention import Visibility
from paceline.kernels.flex import BlockMasks

VERSION = "4.0.0b36"
"""Of the package that this file is written for."""

TILE = 128
"""Rows and keys of a tile of the block tables. The package's tiles divide it for every head size up to 128."""

Tables = tuple[Tensor, Tensor, Tensor, Tensor]
"""Partial tiles' numbers ``[1, 1, R]`` and indices ``[1, 1, R, C]``, full tiles' numbers and indices; all int32."""


def why_not_flash4(head_dim: int, device: torch.device, dtype: torch.dtype, blocks: bool) -> str | None:
    """Why FlashAttention-4 cannot be used here, in one line; None if it can. Imports nothing heavy.

    Args:
        head_dim: H.
        blocks: For the drafter's blocks, which ask more than the target's documents: Hopper and small heads.
    """
    if device.type != "cuda":
        return f"FlashAttention-4 has no kernels for {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention-4 takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    major, minor = torch.cuda.get_device_capability(device)
    # Blackwell's forward takes two tiles of 128 rows at once: tables of 128 do not fit it.
    if major not in ((9,) if blocks else (9, 10, 11)):
        return f"FlashAttention-4 has no kernel for this on compute capability {major}.{minor}"
    largest = TILE if blocks or major > 9 else 256
    if head_dim % 8 or not 8 <= head_dim <= largest:
        return f"FlashAttention-4 takes heads of 8 to {largest} in steps of 8, not {head_dim}"
    for module in ("cutlass", "quack", "tvm_ffi", "flash_attn.cute"):
        try:
            found = importlib.util.find_spec(module) is not None
        except ImportError:  # of the parent: another `flash_attn`, or none
            found = False
        if not found:
            return f"{module} is missing: pip install 'flash-attn-4[cu13]=={VERSION}'"
    return None


def load(cache: Path | None = None) -> str:
    """Import the package, some 4 s, and return its version.

    Call it before the first `torch.compile`: an import between two calls of a compiled layer can compile it again.

    Args:
        cache: Folder, writable to nobody else, where compiled kernels are kept for the next process; None: they are
            not kept. Only a process's first call reads it.
    """
    if cache is not None:
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache))
    _library()
    return importlib.metadata.version("flash-attn-4")


@dataclass(frozen=True)
class _Library:
    """What this file takes from the package."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    tables: Callable[..., Any]
    lane: Callable[[Any], Any]
    softcap: Callable[[float], Callable[..., Any]]


@functools.cache
def _library() -> _Library:
    # The package passes absent auxiliary data as a constant, which is right, and warns about it at each compilation.
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    interface = importlib.import_module("flash_attn.cute.interface")
    utils = importlib.import_module("flash_attn.cute.utils")
    sparsity = importlib.import_module("flash_attn.cute.block_sparsity")
    boolean = importlib.import_module("cutlass").Boolean
    return _Library(
        forward=interface._flash_attn_fwd,
        backward=interface._flash_attn_bwd,
        tables=functools.partial(sparsity.BlockSparseTensorsTorch, block_size=(TILE, TILE)),
        lane=lambda value: utils.scalar_to_ssa(value, boolean),
        softcap=utils.create_softcap_scoremod,
    )


@dataclass(frozen=True)
class FlashMask:
    """What the block rows may see, as the kernels read it. The tensors are the caller's and may be rewritten in place.

    Keys are the T block rows and then the S context tokens. A row sees keys of its own block, which follow from its
    number, and ``low[row] <= key < high[row]`` of the context; an empty slot has ``low == high``.

    Attributes:
        low, high: int32 ``[T]``, in key numbers: context token j is key T + j. A sliding window is part of them.
        forward_tables: Key tiles of each row tile, ascending: the kernel minds the end of the keys in the last alone.
        backward_tables: Row tiles of each key tile.
    """

    low: Tensor
    high: Tensor
    forward_tables: Tables
    backward_tables: Tables

    @classmethod
    def of(cls, mask: BlockMask, low: Tensor, high: Tensor) -> FlashMask:
        """Refer to the tables of a FlexAttention mask over the same rows and keys, for all heads alike."""
        forward = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        backward = (mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices)
        assert mask.BLOCK_SIZE == (TILE, TILE), mask.BLOCK_SIZE
        for table in (*forward, *backward):
            assert table is not None and table.dtype == torch.int32 and table.shape[:2] == (1, 1)
        assert low.dtype == high.dtype == torch.int32 and low.ndim == high.ndim == 1
        return cls(low, high, forward, backward)  # type: ignore[arg-type]  # none of them is None, as just asserted


class FlashMasks(BlockMasks):
    """`BlockMasks` for `attend_flash4`."""

    def for_layer(self, visibility: Visibility) -> Any:
        """The `FlashMask` of a layer; the same tensors for every batch."""
        return FlashMask.of(super().for_layer(visibility), self.low[visibility.window], self.high)


def attend_flash4(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    mask: FlashMask,
    visibility: Visibility,
) -> Tensor:
    """Softmax attention of every block over its document's context and itself; bfloat16 or float16.

    Args:
        query: ``[A, K, N, H]``, rotated and normalised; ``A * K`` and `TILE` are multiples of K.
        context_key, context_value: ``[S, M, H]``; N is a multiple of M.
        block_key, block_value: ``[A, K, M, H]``.
        mask: Made for this visibility.
    Returns: ``[A, K, N, H]``; empty slots attend to their own block.
    """
    key = torch.cat([block_key.flatten(0, 1), context_key])
    value = torch.cat([block_value.flatten(0, 1), context_value])
    block_size, window = query.shape[1], visibility.window
    window = 0 if window is None or window >= block_size else window  # a wider one hides nothing of the own block
    out, _ = _blocks(
        query, key, value, mask.low, mask.high, list(mask.forward_tables), list(mask.backward_tables),
        visibility.causal, window,
    )  # fmt: skip
    return out


@functools.cache
def _visible(block_size: int, causal: bool, window: int) -> Callable[..., Any]:
    """The mask of one (row, key), in the package's form: it is asked inside partial tiles only.

    The package traces the function and keys its kernels by the source and the captured values, so it captures numbers
    alone. What depends on the row only, loads included, is computed once per row of a thread.
    """

    def visible(batch: Any, head: Any, query: Any, key: Any, lengths: Any, tensors: Any) -> Any:
        row, column = query[0], key[0]
        low, high = tensors[0][row], tensors[1][row]
        first = row - row % block_size
        own = (column >= first) & (column < first + block_size)
        if causal:
            own = own & (column <= row)
        if window:
            own = own & (column > row - window) & (column < row + window)
        return _library().lane(own | ((column >= low) & (column < high)))

    return visible


@torch.library.custom_op("paceline::flash4_blocks", mutates_args=())
def _blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    low: Tensor,
    high: Tensor,
    forward_tables: list[Tensor],
    backward_tables: list[Tensor],
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Output ``[A, K, N, H]`` and log-sum-exp float32 ``[1, N, T]``. `window` is that of the own block, 0 for none."""
    out, lse = _blocks_outputs(query)
    _library().forward(
        query.flatten(0, 1)[None],
        key[None],
        value[None],
        softmax_scale=query.shape[-1] ** -0.5,
        mask_mod=_visible(query.shape[1], causal, window),
        block_sparse_tensors=_library().tables(*forward_tables),
        aux_tensors=[low, high],
        out=out.flatten(0, 1)[None],
        lse=lse,
    )
    return out, lse


def _blocks_outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    a, k, n, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((1, n, a * k), dtype=torch.float32)


@torch.library.custom_op("paceline::flash4_blocks_backward", mutates_args=())
def _blocks_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    low: Tensor,
    high: Tensor,
    tables: list[Tensor],
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. Takes ``T N H + 2 (T + S) M H`` float32 for sums: 0.9 GiB at the work unit."""
    grads = _blocks_gradients(query, key, value)
    _library().backward(
        query.flatten(0, 1)[None],
        key[None],
        value[None],
        out.flatten(0, 1)[None],
        grad.contiguous().flatten(0, 1)[None],  # an expanded gradient would compile kernels of its own
        lse,
        softmax_scale=query.shape[-1] ** -0.5,
        mask_mod=_visible(query.shape[1], causal, window),
        block_sparse_tensors=_library().tables(*tables),
        aux_tensors=[low, high],
        dq=grads[0].flatten(0, 1)[None],
        dk=grads[1][None],
        dv=grads[2][None],
    )
    return grads


def _blocks_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@_blocks.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _blocks_outputs(query)


@_blocks_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _blocks_gradients(query, key, value)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, low, high, _, backward_tables, ctx.causal, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, low, high, *backward_tables)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    query, key, value, out, lse, low, high, *tables = ctx.saved_tensors
    grads = _blocks_backward(grad, query, key, value, out, lse, low, high, tables, ctx.causal, ctx.window)
    return (*grads, None, None, [None] * len(tables), [None] * len(tables), None, None)


_blocks.register_autograd(_differentiate, setup_context=_keep_for_backward)


class DocumentStarts:
    """Where the documents of the row under way stand, read whenever a kernel runs.

    A compiled layer knows only `handle`, so a new number of documents compiles nothing. The kernels for up to 256 and
    for more documents differ.

    Attributes:
        cu_seqlens: Each thread's own, int32 ``[D + 1]`` on the device, from 0 to S: document d is
            ``[cu_seqlens[d], cu_seqlens[d + 1])``.
            Empty documents may follow, so that a captured graph can have a fixed number.
        handle: Of this object, for as long as it lives.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self.handle = next(_handles)
        _rows[self.handle] = self

    @property
    def cu_seqlens(self) -> Tensor | None:
        return getattr(self._here, "cu_seqlens", None)

    @cu_seqlens.setter
    def cu_seqlens(self, edges: Tensor) -> None:
        self._here.cu_seqlens = self._here.__dict__[str(edges.device)] = edges

    def on(self, device: torch.device) -> Tensor | None:
        """Those last set there, of a target on several devices."""
        return self._here.__dict__.get(str(device))  # type: ignore[no-any-return]


_handles = itertools.count()
_rows: weakref.WeakValueDictionary[int, DocumentStarts] = weakref.WeakValueDictionary()


def attend_documents_flash4(
    query: Tensor, key: Tensor, value: Tensor, handle: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Causal attention of each packed document to itself; forward only; bfloat16 or float16.

    Args:
        query: ``[1, N, S, H]``, any strides with the last dimension together.
        key, value: ``[1, M, S, H]``; N is a multiple of M.
        handle: Of the `DocumentStarts` that says where the documents stand.
        scale: Of the scores, before `softcap`.
        window: Keys at this distance or more are hidden; None: no window.
        softcap: Scores s become ``softcap * tanh(s / softcap)``; None: they stay.
    Returns: ``[1, S, N, H]``.
    """
    return _documents(query, key, value, handle, scale, window or 0, softcap or 0.0)


@torch.library.custom_op("paceline::flash4_documents", mutates_args=())
def _documents(
    query: Tensor, key: Tensor, value: Tensor, handle: int, scale: float, window: int, softcap: float
) -> Tensor:
    starts = _rows[handle].on(query.device)
    assert starts is not None
    out = _documents_output(query, value)
    # No largest length: Hopper's kernel does not use it, and it would be part of the key of compiled kernels.
    _library().forward(
        *(x[0].transpose(0, 1) for x in (query, key, value)),
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        softmax_scale=scale,
        causal=True,
        window_size_left=window - 1 if window else None,
        score_mod=_softcap(softcap) if softcap else None,
        out=out[0],
    )
    return out


def _documents_output(query: Tensor, value: Tensor) -> Tensor:
    _, n, s, _ = query.shape
    return query.new_empty((1, s, n, value.shape[-1]))


@_documents.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    return _documents_output(query, value)


@functools.cache
def _softcap(softcap: float) -> Callable[..., Any]:
    return _library().softcap(softcap)  # kept: the package would make and hash a new one every call
