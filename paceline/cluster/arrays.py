"""Batches as what Ray carries without a copy: numpy arrays of bytes, and what makes tensors of them again.

A torch tensor in Ray's object store is pickled, some thirty times slower than a numpy array, and numpy has no bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.records import FeatureBatch, TokenBatch


class Packed(NamedTuple):
    """A tensor as bytes.

    Attributes:
        data: uint8, one dimension.
        dtype: Name of the type, such as ``bfloat16``.
    """

    data: Any
    dtype: str
    shape: tuple[int, ...]


class Arrays(NamedTuple):
    """Features of a batch as they travel."""

    context_feature: Packed
    last_hidden: Packed | None


@dataclass(frozen=True)
class AwayBatch(FeatureBatch):
    """Features that are for another process: shapes alone here, ``meta`` tensors.

    Attributes:
        rank: The drafter whose micro-batch it is.
        reference: Ray's, to `Arrays`; None: that process makes them itself.
    """

    rank: int = 0
    reference: Any = None


def pack(tensor: Tensor) -> Packed:
    """A host tensor as bytes; they share its memory where it is in one piece."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return Packed(flat.numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def unpack(packed: Packed) -> Tensor:
    """The tensor again, over the same memory: read-only where that is Ray's."""
    dtype = getattr(torch, packed.dtype)
    if not len(packed.data):  # has no strides to go by
        return torch.empty(packed.shape, dtype=dtype)
    try:
        flat = torch.from_dlpack(packed.data)  # without `from_numpy`'s warning of arrays that are read-only
    except BufferError:  # older numpy gives none of those away
        flat = torch.from_numpy(packed.data)
    return flat.view(dtype).view(packed.shape)


def pack_tokens(tokens: TokenBatch) -> dict[str, Any]:
    """A row as plain values and arrays."""
    return {name: pack(value) if isinstance(value, Tensor) else value for name, value in vars(tokens).items()}


def unpack_tokens(fields: dict[str, Any]) -> TokenBatch:
    """The row again, in memory of its own."""
    own: dict[str, Any] = {n: unpack(v).clone() if isinstance(v, Packed) else v for n, v in fields.items()}
    return TokenBatch(**own)


def num_bytes(features: FeatureBatch) -> int:
    """Bytes that features are on their way."""
    parts = [features.context_feature] + ([] if features.last_hidden is None else [features.last_hidden])
    return sum(part.numel() * part.element_size() for part in parts)
