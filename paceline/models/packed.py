"""Packed rows of documents through a Transformers trunk: attention that keeps them apart, and compiled layers.

The library's model files stay as they are: they call whatever attention function is registered under the name in their
configuration, with the masks that they are given. Ours takes FlexAttention's block masks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from paceline.kernels.compiled import RECOMPILE_LIMIT
from paceline.kernels.flash4 import DocumentStarts, attend_documents_flash4
from paceline.kernels.flex import DocumentMasks, document_starts, fused_flex_attention
from paceline.models.loading import first_line
from paceline.records import TokenBatch

log = logging.getLogger(__name__)

ATTENTION = "paceline_packed"
"""Name of `packed_attention` in a model's configuration."""


FEW_DOCUMENTS = 256
"""Documents of a row that FlashAttention-4's usual kernel takes; padding counts as one."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paceline_documents: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of Transformers: FlexAttention under a block mask, PyTorch's own under an additive one.

    Args:
        query: ``[1, N, S, H]``; key, value ``[1, M, S, H]``.
        attention_mask: Windows are in it.
        paceline_documents: Handle of the row's `DocumentStarts`: FlashAttention-4 takes the place of FlexAttention.
    Returns: ``[1, S, N, H]``.
    Raises: NotImplementedError for attention with sinks, which neither of the two computes.
    """
    if s_aux is not None:
        raise NotImplementedError("attention sinks")
    is_grouped = query.shape[1] != key.shape[1]
    if isinstance(attention_mask, BlockMask) and paceline_documents is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        window = attention_mask.window  # type: ignore[attr-defined]  # our masks have one
        return attend_documents_flash4(query, key, value, paceline_documents, scale, window, softcap), None
    if isinstance(attention_mask, BlockMask):
        score_mod = None if softcap is None else _softcap(softcap)
        out = fused_flex_attention(query, key, value, score_mod, attention_mask, scale=scaling, enable_gqa=is_grouped)
    elif softcap is None:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=is_grouped
        )
    else:
        groups = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3)
        scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        weights = (softcap * torch.tanh(scores / softcap) + attention_mask).float().softmax(-1).to(query.dtype)
        out = weights @ value.repeat_interleave(groups, 1)
    return out.transpose(1, 2), None


def _softcap(limit: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return score_mod


AttentionInterface.register(ATTENTION, packed_attention)


class PackedRow:
    """Arrays that a trunk reads for a packed row, in place on its device; one for each thread that runs rows.

    Args:
        length: S.
        windows: Of the layers, by the kind of layer in the configuration.
        starts: The target's, for FlashAttention-4; None: FlexAttention.

    Attributes:
        input_ids, position_ids: int64 ``[1, S]``.
        masks: What the trunk's forward takes for ``attention_mask``: a block mask for each kind of layer.
        variant: Of the launches that the row needs: 1 where it has more documents than `FEW_DOCUMENTS`.
        kwargs: What the trunk's forward takes besides.
    """

    def __init__(
        self, length: int, windows: dict[str, int | None], device: torch.device, starts: DocumentStarts | None
    ) -> None:
        self._buffer = torch.zeros(3, length, dtype=torch.int64, device=device)
        self.input_ids, self.position_ids = self._buffer[:1], self._buffer[1:2]
        self._documents = DocumentMasks(length, windows.values(), device)
        self.masks = {kind: self._documents.for_window(window) for kind, window in windows.items()}
        self.variant = 0
        self.kwargs: dict[str, Any] = {}
        self._edges: list[Tensor] = []
        self._starts = starts
        if starts is not None:  # the documents' edges, filled up with empty ones, so that shapes stay
            self._edges = [torch.zeros(n + 1, dtype=torch.int32, device=device) for n in (FEW_DOCUMENTS, length)]
            self.kwargs["paceline_documents"] = starts.handle

    def write(self, tokens: TokenBatch) -> None:
        """Send a row, without waiting for the device."""
        starts = document_starts(tokens.document_starts, len(tokens.input_ids))
        on_gpu = self._buffer.is_cuda
        rows = torch.empty(self._buffer.shape, dtype=torch.int64, pin_memory=on_gpu)
        for row, values in zip(rows, (tokens.input_ids, tokens.position_ids, starts), strict=True):
            row.copy_(values)
        self._buffer.copy_(rows, non_blocking=True)
        if self._edges:
            self.variant = int(len(tokens.document_starts) > FEW_DOCUMENTS)
            edges = self._edges[self.variant]
            padded = torch.full(edges.shape, len(tokens.input_ids), dtype=torch.int32, pin_memory=on_gpu)
            padded[: len(tokens.document_starts)] = torch.tensor(tokens.document_starts, dtype=torch.int32)
            edges.copy_(padded, non_blocking=True)

    def update_masks(self, variant: int) -> None:
        """Make the masks those of the row that was sent."""
        if self._starts is not None:
            self._starts.cu_seqlens = self._edges[variant]
        else:
            self._documents.update(self._buffer[2])


def layer_windows(config: Any) -> dict[str, int | None] | None:
    """Window of each kind of layer in a configuration; None where there is a kind that block masks cannot express."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if not types:
        return {"": window if window and getattr(config, "use_sliding_window", True) else None}
    known = {"full_attention": None, "sliding_attention": window}
    if not set(types) <= {*known, "linear_attention"}:
        return None
    return {kind: known[kind] for kind in known if kind in types}


class CompiledLayers:
    """Decoder layers that run compiled while a packed row passes, and as they are otherwise.

    Rows have one shape, so that a layer is compiled once for all of its kind; a document alone has any. A layer that
    cannot be compiled as a whole has its MLP compiled instead.

    Attributes:
        notes: What could not be compiled, a line each.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        # alike layers share their code: compiled for each kind of layer, on each device of a split target
        torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
        self._here = threading.local()
        self._wrapped: list[nn.Module] = []
        self.notes: list[str] = []
        for layer in layers:
            self._compile(layer, layer)

    def __enter__(self) -> None:
        self._here.is_compiled = True

    def __exit__(self, *_: object) -> None:
        self._here.is_compiled = False

    def undo(self) -> None:
        """Leave the layers as they were."""
        for module in self._wrapped:
            del module.forward  # of the instance: the class has its own
        self._wrapped.clear()

    def _compile(self, module: nn.Module, layer: nn.Module) -> None:
        here, plain = self._here, module.forward
        compiled = torch.compile(plain, fullgraph=True, dynamic=False)
        works: bool | None = None

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal works
            if not getattr(here, "is_compiled", False) or works is False:
                return plain(*args, **kwargs)
            if works:
                return compiled(*args, **kwargs)
            try:
                result = compiled(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # the compiler raises whatever it meets; what is really wrong comes again below
                works = False
                self._give_up(module, layer, error)
                return plain(*args, **kwargs)
            works = True
            return result

        if "forward" not in vars(module):  # mixers that are split have one already, which stays
            self._wrapped.append(module)
        module.forward = forward

    def _give_up(self, module: nn.Module, layer: nn.Module, error: Exception) -> None:
        mlp = getattr(layer, "mlp", None)
        smaller = module is layer and isinstance(mlp, nn.Module)
        note = f"{type(module).__name__} is not compiled{', its MLP alone is' if smaller else ''}: {first_line(error)}"
        if note not in self.notes:
            self.notes.append(note)
            log.warning(note)
        if smaller:
            self._compile(mlp, layer)  # type: ignore[arg-type]  # it is a module
