"""Hybrid targets: documents of a packed row kept apart in gated-delta (linear-attention) layers.

Two things of such a layer would leak from one document into the next: its causal convolution reads the tokens before,
and its recurrent state is carried on. On a GPU there are two ways to prevent it:

- with `fla-core`, kernels that take the documents' edges: `enable`, then `forward_kwargs` for each row;
- without it, each mixer runs on one document after the other while the rest of the layer stays packed: `split_mixers`.

On the CPU documents run one by one through the whole target, and the library's torch code does the work.

`enable` replaces functions of Transformers' modelling file, as the library's own convolution takes no edges (it drops
them in silence), and as the library picks fla's kernels when it is imported, whatever the device: with fla and Triton
installed a forward on the CPU would die. The replacements look at the device of each call.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

CHUNK = 64
"""Tokens that fla's kernels, convolution included, take at a time."""

KERNEL_DEVICE = "cuda"
"""Type of the devices whose calls go to the kernels."""


@dataclass(frozen=True)
class FlaKernels:
    """What is used of fla.

    Attributes:
        conv: ``fla.modules.causal_conv1d.causal_conv1d``.
        rule: ``fla.ops.gated_delta_rule.chunk_gated_delta_rule``.
        takes_chunks: Whether both take ``chunk_indices`` of 64 tokens: then no kernel has to ask the device for them.
    """

    conv: Callable[..., Any]
    rule: Callable[..., Any]
    version: str
    takes_chunks: bool


_kernels: FlaKernels | None = None  # of the process, set by the first `enable` that finds them


def is_hybrid(trunk: nn.Module) -> bool:
    """Whether the trunk has gated-delta layers."""
    return bool(_mixers(trunk))


def enable(trunk: nn.Module) -> str:
    """Make the trunk's modelling file use fla's kernels on GPUs and the library's torch code on the CPU.

    Works for Qwen3-Next, Qwen3.5 (dense and mixture of experts) and what is built like them; call it for every hybrid
    trunk, on any device, before its first forward. It may be called again.

    Returns: one line that says what keeps documents apart; empty for a trunk without gated-delta layers.
    """
    global _kernels
    mixers = _mixers(trunk)
    if not mixers:
        return ""
    _kernels = _kernels or _find_kernels()
    on_gpu = next(trunk.parameters()).device.type == KERNEL_DEVICE
    if _kernels is None:
        return (missing_note() or "") if on_gpu else "gated-delta layers run in torch"
    modules = {type(mixer).__module__ for mixer in mixers}
    done = [_replace_functions(sys.modules[name]) for name in sorted(modules)]
    if not all(done):
        return f"fla-core {_kernels.version} is there, but {', '.join(sorted(modules))} is not built for it"
    if not on_gpu:
        return "gated-delta layers run in torch on the CPU"
    return f"gated-delta layers keep documents apart by the kernels of fla-core {_kernels.version}"


def takes_edges(trunk: nn.Module) -> bool:
    """Whether a packed row with `forward_kwargs` is kept apart in gated-delta layers: after `enable`, on a GPU."""
    mixers = _mixers(trunk)
    if not mixers or _kernels is None or next(trunk.parameters()).device.type != KERNEL_DEVICE:
        return False
    return all(_is_replaced(sys.modules[type(mixer).__module__]) for mixer in mixers)


def missing_note() -> str | None:
    """What is lost without fla-core, and how to get it; None if it is there."""
    if (_kernels or _find_kernels()) is not None:
        return None
    return (
        "gated-delta layers run one document after the other, in torch: `pip install fla-core` brings kernels that "
        "take packed documents and are many times faster"
    )


def row_edges(document_starts: Sequence[int], length: int) -> Tensor:
    """Edges of a packed row, int32 ``[n + 1]`` on the host; its padding, if any, counts as one more document.

    Args:
        document_starts: Of a `TokenBatch`: the last is where padding begins.
    """
    padding = [length] if document_starts[-1] < length else []
    return torch.tensor([*document_starts, *padding], dtype=torch.int32)


def forward_kwargs(cu_seqlens: Tensor, device: torch.device | str | None = None) -> dict[str, Tensor]:
    """What the trunk's forward needs so that gated-delta layers keep the documents of one packed row apart.

    Make them anew for every row: fla remembers what it derived from a tensor by that tensor's identity.

    Args:
        cu_seqlens: int ``[n + 1]``, ascending from 0 to S, from `row_edges`. On the host: from a device tensor the
            number of chunks has to be asked, once a forward.
        device: The trunk's; None: that of `cu_seqlens`.
    Returns: ``cu_seq_lens_q`` int32 ``[n + 1]`` and, where the kernels take it, ``chunk_indices`` int32 ``[chunks, 2]``
        (document, chunk of the document); their sizes are marked dynamic for torch.compile.
    """
    device = cu_seqlens.device if device is None else torch.device(device)
    kwargs = {"cu_seq_lens_q": cu_seqlens.to(torch.int32)}
    if _kernels is not None and _kernels.takes_chunks and cu_seqlens.device.type == "cpu":
        kwargs["chunk_indices"] = _chunk_indices(cu_seqlens)
    for name, tensor in kwargs.items():
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()  # else the copy would wait for the device
        kwargs[name] = tensor.to(device, non_blocking=True, copy=True)
        torch._dynamo.maybe_mark_dynamic(kwargs[name], 0)
    return kwargs


class MixerSplit:
    """The documents' edges, for mixers that run on one document after the other; each thread has its own."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def edges(self) -> tuple[int, ...] | None:
        """Edges of the row that this thread is running; None outside `documents`."""
        return getattr(self._local, "edges", None)

    @contextlib.contextmanager
    def documents(self, edges: Sequence[int]) -> Iterator[None]:
        """Forwards inside are of one packed row with these edges: 0, ..., S, padding counted as a document."""
        self._local.edges = tuple(edges)
        try:
            yield
        finally:
            self._local.edges = None


def split_mixers(trunk: nn.Module) -> MixerSplit:
    """Let every gated-delta mixer of the trunk run per document, inside `MixerSplit.documents`, in place.

    Any family whose mixers are ``layer.linear_attn(hidden_states, ...)`` with states ``[1, S, D]``. The result differs
    from documents alone by rounding only, as matrix products of other shapes are summed in another order.
    """
    split = MixerSplit()
    for mixer in _mixers(trunk):
        mixer.forward = _split_forward(mixer.forward, split)
    return split


def _split_forward(forward: Callable[..., Any], split: MixerSplit) -> Callable[..., Any]:
    @torch.compiler.disable  # documents differ in length: each would be another compilation
    def per_document(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if split.edges is None:
            return forward(hidden_states, *args, **kwargs)
        assert split.edges[-1] == hidden_states.shape[1], f"edges {split.edges} of {hidden_states.shape[1]} tokens"
        assert kwargs.get("attention_mask") is None, "a mask of the whole row fits no document"
        return torch.cat([forward(hidden_states[:, a:b], *args, **kwargs) for a, b in pairwise(split.edges)], dim=1)

    return per_document


def _mixers(trunk: nn.Module) -> list[Any]:
    layers = getattr(trunk, "layers", ())
    return [layer.linear_attn for layer in layers if isinstance(getattr(layer, "linear_attn", None), nn.Module)]


def _find_kernels() -> FlaKernels | None:
    try:
        conv = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
        rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        version = str(importlib.import_module("fla").__version__)
    except ImportError:
        return None
    except Exception as error:  # it asks the machine what it is, and Triton may be of another mind
        log.warning("fla-core is installed but cannot be imported: %s: %s", type(error).__name__, error)
        return None
    # Before 0.6 the convolution chose its own chunks, and would take others for its own without a word.
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    return FlaKernels(conv, rule, version, takes_chunks=numbers >= [0, 6])


def _chunk_indices(cu_seqlens: Tensor) -> Tensor:
    """Document and chunk of the document of every chunk: int32 ``[chunks, 2]``, on the host."""
    counts = (cu_seqlens.diff() + CHUNK - 1) // CHUNK
    document = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = counts.cumsum(0) - counts
    return torch.stack([document, torch.arange(len(document)) - first[document]], 1).to(torch.int32)


# ------------------------------------------------------------------ what the modelling files call instead

_CONV, _RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
_ONE_TOKEN = ("causal_conv1d_update", "torch_recurrent_gated_delta_rule")


def _is_replaced(module: Any) -> bool:
    return getattr(getattr(module, _CONV, None), "keeps_documents_apart", False)


def _replace_functions(module: Any) -> bool:
    """Whether the modelling file has the functions, which are replaced once."""
    if _is_replaced(module):
        return True
    if not (hasattr(module, _CONV) and hasattr(module, _RULE)):
        return False
    for name in _ONE_TOKEN:
        if hasattr(module, name):
            setattr(module, name, _by_device(getattr(module, name)))
    setattr(module, _RULE, _rule_by_device(getattr(module, _RULE)))
    setattr(module, _CONV, _conv_by_device(getattr(module, _CONV)))
    return True


def _conv_by_device(function: Callable[..., Any]) -> Callable[..., Any]:
    in_torch = _torch_function(function)

    def causal_conv1d_fn(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
    ) -> Tensor:
        edges = kwargs.get("cu_seq_lens_q")
        if hidden_states.device.type != KERNEL_DEVICE:
            assert edges is None, "the convolution in torch knows no edges of documents"
            return in_torch(hidden_states, weight, bias, activation=activation)
        x = hidden_states.transpose(1, 2)  # [B, S, C]
        return packed_conv(x, weight, bias, activation, edges, kwargs.get("chunk_indices")).transpose(1, 2)

    causal_conv1d_fn.keeps_documents_apart = True  # type: ignore[attr-defined]
    return causal_conv1d_fn


def _rule_by_device(function: Callable[..., Any]) -> Callable[..., Any]:
    in_torch = _torch_function(function)

    def chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        state = {"initial_state": initial_state, "output_final_state": output_final_state}
        if query.device.type != KERNEL_DEVICE:
            assert cu_seqlens is None, "the gated delta rule in torch knows no edges of documents"
            return in_torch(query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **state)
        if initial_state is not None or output_final_state:  # decoding on a cache
            return function(query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **state)
        return packed_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel, cu_seqlens, chunk_indices), None

    return chunk_gated_delta_rule


def _by_device(function: Callable[..., Any]) -> Callable[..., Any]:
    in_torch = _torch_function(function)

    def by_device(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.device.type == KERNEL_DEVICE:
            return function(first, *args, **kwargs)
        kwargs.pop("cu_seqlens", None)
        return in_torch(first, *args, **kwargs)

    return by_device


def _torch_function(function: Any) -> Callable[..., Any]:
    """The library's own code inside what its decorators made of it."""
    if isinstance(function, nn.Module):  # what a function becomes where the `kernels` package is installed
        function = inspect.getclosurevars(type(function).forward).nonlocals.get("func", function)
    return inspect.unwrap(function)


# As operators, so that a compiled layer has no graph break here: fla's functions switch the compiler off. Forward only,
# which is all that a frozen target needs.


@torch.library.custom_op(
    "paceline::packed_conv",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, str? activation, Tensor? edges, Tensor? chunks) -> Tensor",
)
def packed_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, edges: Tensor | None, chunks: Tensor | None
) -> Tensor:
    """Causal depthwise convolution of ``[B, S, C]`` (with edges, B is 1) by ``[C, taps]``, documents kept apart."""
    assert _kernels is not None
    more = {} if chunks is None else {"chunk_indices": chunks}
    out, _ = _kernels.conv(x, weight=weight, bias=bias, activation=activation, cu_seqlens=edges, **more)
    return out.contiguous()


@packed_conv.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, edges: Tensor | None, chunks: Tensor | None
) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op(
    "paceline::packed_gated_delta_rule",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, bool norm, Tensor? edges, Tensor? chunks)"
    " -> Tensor",
)
def packed_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    norm: bool,
    edges: Tensor | None,
    chunks: Tensor | None,
) -> Tensor:
    """The gated delta rule from an empty state, documents kept apart; values and result ``[B, S, heads, H]``."""
    assert _kernels is not None
    more = {} if chunks is None else {"chunk_indices": chunks}
    out, _ = _kernels.rule(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=norm, cu_seqlens=edges, **more)
    return out.contiguous()


@packed_rule.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    norm: bool,
    edges: Tensor | None,
    chunks: Tensor | None,
) -> Tensor:
    return value.new_empty(value.shape)
