"""Packed products against PyTorch's own, and what is left unpacked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.kernels import packed_linear as packed
from paceline.kernels.linear_cross_entropy import Head
from paceline.kernels.packed_linear import (
    JoinedLinear,
    PackedHead,
    PackedLinear,
    pack_head,
    pack_layers,
    packed_product,
)

needs_onednn = pytest.mark.skipif(not packed.can_pack(), reason="this build of PyTorch has no oneDNN product")


@needs_onednn
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 17])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_layer_computes_the_same(rows: int, has_bias: bool) -> None:
    """Any number of rows, padded or not, gives the plain product; weight and state stay as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40, bias=has_bias)).requires_grad_(False)
    x, state = torch.randn(1, rows, 24), dict(model.state_dict())
    wanted = model(x)
    assert pack_layers(model, Head(torch.randn(50, 24)))
    assert type(model[0]) is PackedLinear
    torch.testing.assert_close(model(x), wanted)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


@needs_onednn
@pytest.mark.parametrize("biases", [(False, False), (True, True), (True, False)])
def test_joined_layers_stand_side_by_side(biases: tuple[bool, bool]) -> None:
    """Layers of one input give their outputs in order, each with its own bias or none, and are left as they are."""
    torch.manual_seed(0)
    layers = [nn.Linear(24, size, bias=bias) for size, bias in zip((40, 16), biases, strict=True)]
    x = torch.randn(5, 24)
    joined = JoinedLinear.of(*layers)
    assert (joined.bias is None) == (not any(biases))
    torch.testing.assert_close(joined(x), torch.cat([layer(x) for layer in layers], dim=1).detach())
    assert not any(isinstance(layer, PackedLinear) for layer in layers)


@needs_onednn
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (5.0, 0.3)])
def test_a_packed_head_has_the_same_logits(softcap: float | None, scale: float) -> None:
    """Scale and soft cap of the head are kept; in another type it is an ordinary head."""
    torch.manual_seed(0)
    head, hidden = Head(torch.randn(50, 24), softcap, scale), torch.randn(1, 5, 24)
    fast = pack_head(head)
    assert isinstance(fast, PackedHead)
    torch.testing.assert_close(fast.logits(hidden), head.logits(hidden))
    some = torch.tensor([3, 0, 49])
    assert isinstance(fast.rows(some), PackedHead)
    torch.testing.assert_close(fast.rows(some).logits(hidden), head.logits(hidden)[..., some])
    assert fast.to(torch.float32) is fast
    assert type(fast.to(torch.bfloat16)) is Head
    assert torch.equal(
        fast.to(torch.bfloat16).logits(hidden.bfloat16()), head.to(torch.bfloat16).logits(hidden.bfloat16())
    )


@needs_onednn
def test_a_tied_head_is_packed_once() -> None:
    """The head's layer in the model and the head for drafting share one copy."""
    model = nn.Linear(8, 50, bias=False).requires_grad_(False)
    head = pack_head(Head(model.weight))
    pack_layers(model, head)
    assert isinstance(head, PackedHead)
    assert model.packed is head.packed


def test_other_models_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other types than float32, large models, and builds without the operators decode with PyTorch's own product."""
    model, narrow, head = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16(), Head(torch.randn(50, 8))
    assert not pack_layers(narrow, head)
    assert type(narrow) is nn.Linear
    assert type(pack_head(head.to(torch.bfloat16))) is Head
    monkeypatch.setattr(packed, "MAX_PACKED_BYTES", 8)
    assert not pack_layers(model, head)
    assert type(model) is nn.Linear
    monkeypatch.undo()
    monkeypatch.setattr(packed, "_pack", lambda weight: torch.ops.mkldnn.no_such_operator(weight))
    packed.can_pack.cache_clear()
    assert not pack_layers(model, head)
    assert type(model) is nn.Linear
    assert pack_head(head) is head
    packed.can_pack.cache_clear()


@needs_onednn
def test_a_wrong_product_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build whose private operators mean something else is found out before it is trusted."""
    monkeypatch.setattr(packed, "packed_product", lambda x, weight, bias: packed_product(x, weight, None))
    packed.can_pack.cache_clear()
    assert not packed.can_pack()
    packed.can_pack.cache_clear()
