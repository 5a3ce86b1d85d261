"""The fused loss of a frozen head against plain loops and against autograd in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.kernels import linear_cross_entropy
from paceline.kernels.linear_cross_entropy import Head, weighted_linear_cross_entropy
from tests import oracles

VARIANTS = [(None, 1.0), (2.0, 1.0), (None, 0.37), (1.5, 2.5)]
"""(softcap, scale)"""


def case(rows: int = 11, vocab: int = 13, width: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, head weight, labels, weights (some of them 0)."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(rows, width, generator=g), torch.randn(vocab, width, generator=g)
    labels, weights = torch.randint(0, vocab, (rows,), generator=g), torch.rand(rows, generator=g)
    weights[2] = 0.0
    labels[:3] = (hidden[:3] @ weight.T).argmax(1)  # some hits
    return hidden, weight, labels, weights


def reference(hidden: Tensor, head: Head, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the hidden rows by autograd in float64."""
    x = hidden.double().requires_grad_()
    logits = x @ head.weight.double().T * head.scale
    if head.softcap is not None:
        logits = head.softcap * (logits / head.softcap).tanh()
    loss = (-logits.log_softmax(1)[torch.arange(len(labels)), labels] * weights.double()).sum()
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


@pytest.mark.parametrize(("softcap", "scale"), VARIANTS)
@pytest.mark.parametrize("rows_per_chunk", [1, 4, 11, 1000])
def test_loss_gradient_and_hits(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, scale: float, rows_per_chunk: int
) -> None:
    """Loss and hits are those of plain loops and the gradient that of autograd, however many chunks there are."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", rows_per_chunk * 4 * 13 + 3)
    hidden, weight, labels, weights = case()
    head = Head(weight, softcap, scale)
    x = hidden.clone().requires_grad_()
    loss, hits = weighted_linear_cross_entropy(x, head, labels, weights)
    (3.0 * loss).backward()
    total, wanted_hits = oracles.weighted_loss(
        hidden.double().tolist(), weight.double().tolist(), labels.tolist(), weights.tolist(), softcap, scale
    )
    _, gradient = reference(hidden, head, labels, weights)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert hits.dtype == torch.bool and hits.tolist() == wanted_hits and any(wanted_hits) and not all(wanted_hits)
    torch.testing.assert_close(x.grad, 3.0 * gradient.float(), rtol=1e-4, atol=1e-5)
    assert not hits.requires_grad


def test_gradient_by_finite_differences() -> None:
    """The gradient is the slope of the loss along random directions."""
    hidden, weight, labels, weights = case()
    head = Head(weight, 2.0, 1.3)
    x = hidden.clone().requires_grad_()
    weighted_linear_cross_entropy(x, head, labels, weights)[0].backward()
    assert x.grad is not None
    for seed in range(3):
        direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed))
        step = 1e-2
        up = weighted_linear_cross_entropy(hidden + step * direction, head, labels, weights)[0]
        down = weighted_linear_cross_entropy(hidden - step * direction, head, labels, weights)[0]
        slope = (up - down) / (2 * step)
        assert slope.item() == pytest.approx((x.grad * direction).sum().item(), rel=2e-3, abs=2e-3)


def test_rows_of_weight_zero_have_no_gradient() -> None:
    """A row that weighs nothing adds nothing to loss or gradient, yet its hit is told."""
    hidden, weight, labels, weights = case()
    x = hidden.clone().requires_grad_()
    loss, hits = weighted_linear_cross_entropy(x, Head(weight), labels, weights)
    loss.backward()
    rest = [i for i in range(len(labels)) if i != 2]
    without = weighted_linear_cross_entropy(hidden[rest], Head(weight), labels[rest], weights[rest])[0]
    assert loss.item() == pytest.approx(without.item(), rel=1e-6)
    assert x.grad is not None and not x.grad[2].any() and bool(hits[2])


def test_no_rows() -> None:
    """With nothing to score the loss is 0, differentiable, and there are no hits."""
    x = torch.zeros(0, 6, requires_grad=True)
    loss, hits = weighted_linear_cross_entropy(
        x, Head(torch.randn(13, 6)), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    )
    loss.backward()
    assert loss.item() == 0.0 and hits.shape == (0,) and x.grad is not None and x.grad.shape == (0, 6)


def test_large_logits_do_not_overflow() -> None:
    """Logits of several hundred give the exact loss, not inf or NaN."""
    weight, labels = torch.eye(4) * 500, torch.tensor([1, 0])
    x = torch.eye(4)[:2].clone().requires_grad_()
    loss, hits = weighted_linear_cross_entropy(x, Head(weight), labels, torch.ones(2))
    loss.backward()
    assert loss.item() == pytest.approx(1000.0) and hits.tolist() == [False, False]
    assert x.grad is not None and x.grad.isfinite().all()


def test_the_head_stays_frozen() -> None:
    """No gradient reaches the head's matrix, even if it asks for one."""
    hidden, weight, labels, weights = case()
    weight.requires_grad_()
    loss, _ = weighted_linear_cross_entropy(hidden.requires_grad_(), Head(weight), labels, weights)
    loss.backward()
    assert weight.grad is None


@pytest.mark.parametrize(("softcap", "scale"), VARIANTS)
def test_bfloat16(softcap: float | None, scale: float) -> None:
    """bfloat16 rows and head give a float32 loss within 1 % and a gradient within 2 % of float64."""
    hidden, weight, labels, weights = case(rows=64, vocab=50, width=32)
    hidden, head = hidden.bfloat16(), Head((weight / 6).bfloat16(), softcap, scale)
    x = hidden.clone().requires_grad_()
    loss, _ = weighted_linear_cross_entropy(x, head, labels, weights)
    loss.backward()
    wanted, gradient = reference(hidden, head, labels, weights)
    assert loss.dtype == torch.float32 and x.grad is not None and x.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-2)
    assert (x.grad.double() - gradient).norm() / gradient.norm() < 2e-2


@pytest.mark.parametrize(("softcap", "scale"), VARIANTS)
def test_logits_of_the_head(softcap: float | None, scale: float) -> None:
    """Logits are scaled, then capped, in float32, for any leading shape; another type keeps cap and scale."""
    hidden, weight, _, _ = case()
    head = Head(weight, softcap, scale)
    wanted = hidden.double() @ weight.double().T * scale
    if softcap is not None:
        wanted = softcap * (wanted / softcap).tanh()
    got = head.logits(hidden.view(1, 11, 6))
    assert got.dtype == torch.float32 and got.shape == (1, 11, 13)
    torch.testing.assert_close(got[0], wanted.float(), rtol=1e-5, atol=1e-5)
    narrow = head.to(torch.bfloat16)
    assert (narrow.weight.dtype, narrow.softcap, narrow.scale) == (torch.bfloat16, softcap, scale)
    assert narrow.logits(hidden.bfloat16()).dtype == torch.float32
