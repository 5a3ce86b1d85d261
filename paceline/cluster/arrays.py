"""Batches as what Ray carries without a copy: numpy arrays of bytes, and what makes tensors of them again.

A torch tensor in Ray's object store is pickled, some thirty times slower than a numpy array, and numpy has no bfloat16.
With `pipeline.transport: fp8` features are encoded as an offline cache keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.profiling import stages
from paceline.records import FeatureBatch, TokenBatch
from paceline.train.feature_cache import decode


class Packed(NamedTuple):
    """A tensor as bytes.

    Attributes:
        data: uint8, one dimension.
        dtype: Name of the type, such as ``bfloat16``.
    """

    data: Any
    dtype: str
    shape: tuple[int, ...]


class Encoded(NamedTuple):
    """Features in fp8, see `train.feature_cache.encode`.

    Attributes:
        values: float8_e4m3fn ``[S, W]``.
        scales: float32 ``[S, states]``.
        dtype: Name of the type that they had.
    """

    values: Packed
    scales: Packed
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the features."""
        return self.values.shape


class Arrays(NamedTuple):
    """Features of a batch as they travel."""

    context_feature: Packed | Encoded
    last_hidden: Packed | Encoded | None


@dataclass(frozen=True)
class AwayBatch(FeatureBatch):
    """Features that are for another process: shapes alone here, ``meta`` tensors.

    Attributes:
        rank: The drafter whose micro-batch it is.
        reference: Ray's, to `Arrays`; None: that process makes them itself.
        held_bytes: What these take in Ray's store.
    """

    rank: int = 0
    reference: Any = None
    held_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the row here, and of the features where they wait."""
        return self.held_bytes + sum(each.nbytes for each in vars(self.tokens).values() if isinstance(each, Tensor))


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


def unpack_features(part: Packed | Encoded, device: torch.device) -> Tensor:
    """Features ``[S, W]`` in the type that the target made them in, on a device; a copy to a GPU is over by then."""
    if isinstance(part, Packed):
        return _moved([part], device)[0]
    values, scales = _moved([part.values, part.scales], device)
    num_states = scales.shape[1]
    with stages.PACK_HIDDEN:
        return decode(values, scales, num_states, getattr(torch, part.dtype), num_states)


def num_bytes(arrays: Arrays) -> int:
    """Bytes that features are on their way."""
    parts = [part for part in arrays if part is not None]
    packed = [each for part in parts for each in ([part] if isinstance(part, Packed) else [part.values, part.scales])]
    return sum(int(each.data.nbytes) for each in packed)


def _moved(parts: list[Packed], device: torch.device) -> list[Tensor]:
    if device.type != "cuda":
        return [unpack(part) for part in parts]
    with stages.H2D_SYNC:
        moved = [unpack(part).to(device) for part in parts]
        torch.cuda.current_stream(device).synchronize()
    return moved
