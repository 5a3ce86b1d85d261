"""Attention of slots over rooms of their own, against a loop over slots in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.kernels.static_attention import attend_slots

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest error as a share of the result's norm."""

CAPACITY = 200


def case(
    num_kv: int, shared: int, head_dim: int, dtype: torch.dtype, lengths: list[int], device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and lengths; the first three are slices of something larger."""
    generator = torch.Generator().manual_seed(seed)
    num_slots, num_heads = len(lengths), num_kv * shared
    room = torch.randn(2, num_slots, CAPACITY + 3, num_kv, head_dim, generator=generator).to(device, dtype)
    query = torch.randn(num_slots, num_heads + 2, head_dim, generator=generator).to(device, dtype)[:, 1:-1]
    return query, room[0, :, :CAPACITY], room[1, :, :CAPACITY], torch.tensor(lengths, device=device)


def reference(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """double ``[B, N, H]``, slot by slot."""
    shared = query.shape[1] // key.shape[2]
    rows = []
    for slot, length in enumerate(lengths.tolist()):
        keys, values = (x[slot, :length].double().repeat_interleave(shared, 1) for x in (key, value))
        weights = (torch.einsum("nh,cnh->nc", query[slot].double(), keys) * scale).softmax(-1)
        rows.append(torch.einsum("nc,cnh->nh", weights, values))
    return torch.stack(rows)


def assert_is_reference(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float = 0.2) -> None:
    """The result has the query's shape and type, and the loop's values."""
    found, wanted = attend_slots(query, key, value, lengths, scale), reference(query, key, value, lengths, scale)
    assert found.shape == query.shape and found.dtype == query.dtype
    error = (found.double() - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
    assert error.max() < TOLERANCE[query.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_kv", "shared", "head_dim"), [(1, 1, 8), (3, 3, 64), (2, 8, 80)])
def test_each_slot_sees_its_own_length(num_kv: int, shared: int, head_dim: int, dtype: torch.dtype) -> None:
    """From one position to all, and above that all; with and without heads that share keys."""
    lengths = [1, 2, 17, CAPACITY - 1, CAPACITY, CAPACITY + 9]
    assert_is_reference(*case(num_kv, shared, head_dim, dtype, lengths))


def test_what_is_not_seen_leaves_no_trace() -> None:
    """To the bit, as long as it is finite."""
    query, key, value, lengths = case(3, 3, 64, torch.float32, [1, 17, CAPACITY])
    before = attend_slots(query, key, value, lengths, 0.2)
    for slot, length in enumerate(lengths.tolist()):
        key[slot, length:], value[slot, length:] = 1e4, -1e4
    assert torch.equal(attend_slots(query, key, value, lengths, 0.2), before)
