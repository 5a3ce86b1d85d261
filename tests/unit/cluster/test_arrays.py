"""Tensors and rows as bytes and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.cluster.arrays import num_bytes, pack, pack_tokens, unpack, unpack_tokens
from paceline.records import FeatureBatch, TokenBatch


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


def test_bytes_of_features_are_those_of_its_tensors() -> None:
    """With and without the last hidden state."""
    tokens = _row()
    feature = torch.zeros(10, 6, dtype=torch.bfloat16)
    assert num_bytes(FeatureBatch(tokens, feature)) == 120
    assert num_bytes(FeatureBatch(tokens, feature, torch.zeros(10, 3))) == 240


def _row() -> TokenBatch:
    documents = [(i, torch.arange(n), torch.ones(n, dtype=torch.int64)) for i, n in enumerate((5, 3))]
    return TokenBatch.pack(4, documents, 10)
