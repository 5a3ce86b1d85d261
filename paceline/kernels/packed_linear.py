"""Linear layers for CPU decoding, with weights laid out once for oneDNN.

A forward over a few tokens reads every weight, and on a CPU that is its cost. PyTorch's own product is far from the
memory's speed there: SmolLM2's head takes 13.5, 25.5 and 26.1 ms for 1, 5 and 6 rows, packed 7.3, 5.3 and 5.3 ms (one
thread of an EPYC Zen 4, other work beside). Plain and drafted decoding use the same layers, so the comparison is fair.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.kernels.linear_cross_entropy import Head

MAX_PACKED_BYTES = 4 << 30
"""Weights up to which a model is packed: packing makes a second copy of them."""

ROWS_HINT = 8
"""Rows that the layout is chosen for; one chosen for a single row is 1.6x slower at eight."""

MIN_ROWS = 4
"""Fewer rows are padded to this many: oneDNN multiplies four rows faster than one, two or three."""


class PackedLinear(nn.Linear):
    """An `nn.Linear` (float32, frozen) that multiplies by a packed copy of its weight."""

    packed: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return packed_product(x, self.packed, self.bias)


@dataclass(frozen=True)
class PackedHead(Head):
    """A head that multiplies by a packed copy of its weight."""

    packed: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[..., V]`` logits of float32 ``[..., D]`` hidden rows."""
        assert self.packed is not None
        logits = packed_product(hidden, self.packed, None) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def rows(self, token_ids: Tensor) -> Head:
        """A head over some tokens only, int64 ``[R]``, packed as well."""
        return pack_head(super().rows(token_ids))

    def to(self, dtype: torch.dtype) -> Head:
        """The same head; an ordinary one in another type than float32."""
        return self if dtype == torch.float32 else super().to(dtype)


def pack_head(head: Head) -> Head:
    """The head with a packed copy of its weight, or as it is where that is impossible."""
    if not _is_packable(head.weight) or not can_pack():
        return head
    return PackedHead(head.weight, head.softcap, head.scale, _pack(head.weight))


@dataclass(frozen=True)
class JoinedLinear:
    """Frozen float32 linear layers that read the same input, as one packed product; their outputs stand side by side.

    Attributes:
        packed: Of the weights one below the other, ``[V, D]``.
        bias: ``[V]``, with zeros for layers that have none; None if no layer has one.
    """

    packed: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *layers: nn.Linear) -> JoinedLinear:
        """Pack copies of the layers' weights; the layers stay as they are."""
        packed = _pack(torch.cat([layer.weight.detach() for layer in layers]))
        if all(layer.bias is None for layer in layers):
            return cls(packed, None)
        biases = [torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers]
        return cls(packed, torch.cat(biases))

    def __call__(self, x: Tensor) -> Tensor:
        """``[R, D]`` to ``[R, V]``; R is at least `MIN_ROWS`, or it is slow."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_layers(model: nn.Module, head: Head) -> bool:
    """Pack the linear layers of a frozen model in place, where that is possible and the model is not too large.

    Args:
        head: From `pack_head`; a layer with the same weight shares its copy.
    Returns: whether any layer was packed.
    """
    if is_too_large(model) or not can_pack():
        return False
    num_packed = 0
    for module in model.modules():
        if type(module) is nn.Linear and _is_packable(module.weight):
            is_head = isinstance(head, PackedHead) and module.weight.data_ptr() == head.weight.data_ptr()
            module.packed = head.packed if is_head else _pack(module.weight)  # type: ignore[attr-defined]  # is_head
            module.__class__ = PackedLinear  # the class alone changes: whoever asks for the weight still finds it
            num_packed += 1
    return num_packed > 0


def is_too_large(model: nn.Module) -> bool:
    """Whether the second copy of its weights that packing makes is better not made."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) > MAX_PACKED_BYTES


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` for ``[..., D]`` inputs and a packed weight ``[V, D]``: ``[..., V]``."""
    rows = x.reshape(-1, x.shape[-1])
    num_rows = rows.shape[0]
    if num_rows < MIN_ROWS:
        rows = F.pad(rows, (0, 0, 0, MIN_ROWS - num_rows))
    product = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return product[:num_rows].view(*x.shape[:-1], product.shape[-1])


@functools.cache
def can_pack() -> bool:
    """Whether this build of PyTorch has the product and computes it rightly; the operators are private ones."""
    x, weight, bias = torch.randn(3, 8), torch.randn(16, 8), torch.randn(16)
    try:
        return torch.allclose(packed_product(x, _pack(weight), bias), F.linear(x, weight, bias), atol=1e-4)
    except (AttributeError, RuntimeError):
        return False


def _is_packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
