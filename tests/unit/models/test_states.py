"""States of a drafter's blocks, by the training path and by the decode path, and taps against Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.models.states import Blocks, anchors_at, decode_states, row_of, tap_differences, training_states
from tests import tiny

SLIDING = ("sliding_attention",) * 2


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layer_types": SLIDING, "sliding_window": 6},
        {"layer_types": SLIDING, "sliding_window": 3},  # narrower than a block
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
    ],
)
def test_both_paths_give_the_same_states(fields: dict[str, Any], is_causal: bool) -> None:
    """Layer by layer, for full and sliding layers, causal in the block or not, with and without context."""
    drafter = tiny.drafter(tiny.draft_shape(is_causal=is_causal, **fields))
    generator = torch.Generator().manual_seed(0)
    anchors = [torch.randn(4, 1, 32, generator=generator), torch.randn(1, 1, 32, generator=generator).expand(4, 3, 32)]
    blocks = Blocks(
        row_of([torch.arange(17), torch.arange(9)]),
        anchors_at([1, 12, 17, 22]),
        torch.cat(anchors, dim=1),
        torch.randn(26, 64, generator=generator),
    )
    trained, decoded = training_states(drafter, blocks), decode_states(drafter, blocks)
    assert list(trained) == list(decoded) == ["layer 0", "layer 1", "norm"]
    for name, state in trained.items():
        torch.testing.assert_close(decoded[name], state, atol=1e-4, rtol=1e-4)
    assert all(not layer._forward_hooks for layer in drafter.layers)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_taps_are_transformers_own_states(family: str, tmp_path: Path) -> None:
    """Tap i is `hidden_states[i + 1]`; a target whose hooks sit one layer off is far from it (case P02)."""
    target = tiny.target(family, tmp_path / "target", layer_ids=(1, 3))
    assert tap_differences(target) == {1: 0.0, 3: 0.0}
    target.layer_ids = (0, 2)
    assert min(tap_differences(target).values()) > 0.05


def test_the_comparison_leaves_the_layers_as_they_were(tmp_path: Path) -> None:
    """Transformers' hooks that list hidden states go again: with them a layer could not be compiled."""
    target = tiny.target("llama", tmp_path / "target", layer_ids=(1, 3))
    before = [dict(module._forward_hooks) for module in target._trunk.modules()]
    first = tap_differences(target)
    assert [dict(module._forward_hooks) for module in target._trunk.modules()] == before
    assert tap_differences(target) == first
