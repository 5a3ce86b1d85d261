"""Tensors and rows as bytes and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.cluster.arrays import (
    Arrays,
    AwayBatch,
    Encoded,
    num_bytes,
    pack,
    pack_tokens,
    unpack,
    unpack_features,
    unpack_tokens,
)
from paceline.records import FeatureBatch, TokenBatch
from paceline.train.feature_cache import decode, encode

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (0, 4)])
def test_a_tensor_comes_back_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Type, shape and every bit."""
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    packed = pack(tensor)
    assert packed.data.dtype == np.uint8 and packed.data.nbytes == tensor.numel() * tensor.element_size()
    assert torch.equal(unpack(packed), tensor) and unpack(packed).dtype == dtype


def test_nothing_is_copied_where_the_tensor_is_in_one_piece() -> None:
    """Packing and unpacking share the memory, also of read-only bytes, as Ray has them."""
    tensor = torch.arange(6.0).view(2, 3)
    packed = pack(tensor)
    again = unpack(packed)
    assert again.data_ptr() == tensor.data_ptr()
    packed.data.flags.writeable = False
    assert torch.equal(unpack(packed), tensor)
    assert torch.equal(unpack(pack(tensor.T)), tensor.T)


def test_a_row_comes_back_as_it_was() -> None:
    """All fields, in memory of its own."""
    tokens = _row()
    again = unpack_tokens(pack_tokens(tokens))
    for name, value in vars(tokens).items():
        found = getattr(again, name)
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
    assert again.input_ids.data_ptr() != tokens.input_ids.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_in_fp8_come_back_as_a_cache_has_them(dtype: torch.dtype) -> None:
    """In their own type, each value within a sixteenth of itself or of the smallest step; the rest is as it was."""
    feature = (torch.randn(10, 6, generator=torch.Generator().manual_seed(0)) * 40).to(dtype)
    values, scales = encode(feature, 2, "fp8")
    assert scales is not None
    part = Encoded(pack(values), pack(scales), str(dtype).removeprefix("torch."))
    found = unpack_features(part, CPU)
    assert part.shape == (10, 6) and found.dtype == dtype and not torch.equal(found, feature)
    assert torch.equal(found, decode(values, scales, 2, dtype, 2))
    least = scales.repeat_interleave(3, dim=1) * 2**-10 + feature.float().abs() / 128  # and bfloat16's own rounding
    assert bool(((found - feature).float().abs() <= feature.float().abs() / 16 + least).all())
    assert torch.equal(unpack_features(pack(feature), CPU), feature)


def test_a_feature_that_is_not_finite_stays_so_in_fp8() -> None:
    """So that its batch is left out as without."""
    for wrong in (float("inf"), float("nan")):
        feature = torch.ones(3, 4)
        feature[1, 2] = wrong
        values, scales = encode(feature, 1, "fp8")
        found = decode(values, scales, 1, torch.float32, 1)
        assert found.isfinite().tolist()[0] == [True] * 4 and not bool(found[1].isfinite().all())


def test_bytes_of_features_are_those_that_travel() -> None:
    """With and without the last hidden state; in fp8 a byte a value, and four for each scale."""
    feature, last = torch.zeros(10, 6, dtype=torch.bfloat16), torch.zeros(10, 3)
    assert num_bytes(Arrays(pack(feature), None)) == 120
    assert num_bytes(Arrays(pack(feature), pack(last))) == 240
    parts = [Encoded(*(pack(each) for each in encode(x, n, "fp8")), "bfloat16") for x, n in ((feature, 2), (last, 1))]
    assert num_bytes(Arrays(parts[0], None)) == 60 + 80
    assert num_bytes(Arrays(parts[0], parts[1])) == 60 + 80 + 30 + 40


def test_a_batch_that_is_elsewhere_holds_what_is_in_the_store() -> None:
    """Beside the row, which is here."""
    tokens = _row()
    shapes = torch.empty(10, 6, device="meta")
    row = FeatureBatch(tokens, torch.empty(10, 0)).num_bytes
    assert AwayBatch(tokens, shapes, held_bytes=140).num_bytes == row + 140
    assert AwayBatch(tokens, shapes).num_bytes == row


def _row() -> TokenBatch:
    documents = [(i, torch.arange(n), torch.ones(n, dtype=torch.int64)) for i, n in enumerate((5, 3))]
    return TokenBatch.pack(4, documents, 10)
