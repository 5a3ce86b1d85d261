"""The fused loss of a frozen head against plain loops and against autograd in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from paceline.kernels import linear_cross_entropy
from paceline.kernels.linear_cross_entropy import Candidates, DPace, Head, best_of_rows, weighted_linear_cross_entropy
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


def shuffled_blocks(num_blocks: int, size: int, seed: int = 0) -> Tensor:
    """A permutation of rows that keeps the rows of each block together."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    return torch.arange(num_blocks * size).view(num_blocks, size)[order].flatten()


def reference(
    hidden: Tensor, head: Head, labels: Tensor, weights: Tensor, dpace: DPace | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, sum of weights, hits, and the gradient of the hidden rows, by autograd in float64."""
    x = hidden.double().requires_grad_()
    logits = x @ head.weight.double().T * head.scale
    if head.softcap is not None:
        logits = head.softcap * (logits / head.softcap).tanh()
    at_label = torch.arange(len(labels)), labels
    nll, weights = -logits.log_softmax(1)[at_label], weights.double()
    if dpace is not None:
        by_block = (-1, dpace.block)
        found = oracles.dpace_weights(nll.view(by_block).tolist(), (weights != 0).view(by_block).tolist(), dpace.floor)
        weights = weights * torch.tensor(found, dtype=torch.float64).flatten()
    loss = (nll * weights).sum()
    loss.backward()
    assert x.grad is not None
    return loss.detach(), weights.sum(), (logits[at_label] >= logits.amax(1)).detach(), x.grad


def assert_is_reference(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    weights: Tensor,
    rows: Tensor | None = None,
    num_rows: int | None = None,
    dpace: DPace | None = None,
    tolerance: float = 1e-5,
) -> None:
    """The fused loss of some rows is the reference's of those alone, and the others leave no trace.

    Args:
        tolerance: Relative error allowed to the sums, and, by norm, to the gradient.
    """
    x = hidden.clone().requires_grad_()
    loss, weight, hits, _ = weighted_linear_cross_entropy(x, head, labels, weights, rows, num_rows, dpace)
    (2.0 * loss).backward()
    taken = (torch.arange(len(labels), device=hidden.device) if rows is None else rows)[:num_rows]
    cpu_head = Head(head.weight.cpu(), head.softcap, head.scale)
    wanted = reference(hidden[taken].cpu(), cpu_head, labels[taken].cpu(), weights[taken].cpu(), dpace)
    gradient = torch.zeros(hidden.shape, dtype=torch.float64)
    gradient[taken.cpu()] = 2.0 * wanted[3]
    expected_hits = torch.zeros(len(labels), dtype=torch.bool)
    expected_hits[taken.cpu()] = wanted[2]
    assert loss.dtype == weight.dtype == torch.float32 and loss.shape == weight.shape == () and hits.dtype == torch.bool
    assert loss.requires_grad and not weight.requires_grad and not hits.requires_grad
    assert loss.item() == pytest.approx(wanted[0].item(), rel=tolerance)
    assert weight.item() == pytest.approx(wanted[1].item(), rel=tolerance)
    assert torch.equal(hits.cpu(), expected_hits)
    assert x.grad is not None and x.grad.dtype == hidden.dtype
    assert (x.grad.cpu().double() - gradient).norm() <= tolerance * gradient.norm()
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[taken.cpu()] = False
    assert not x.grad.cpu()[rest].any()


@pytest.mark.parametrize(("softcap", "scale"), VARIANTS)
@pytest.mark.parametrize("rows_per_chunk", [1, 4, 11, 1000])
def test_loss_gradient_and_hits(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, scale: float, rows_per_chunk: int
) -> None:
    """Loss and hits are those of plain loops and the gradient that of autograd, however many chunks there are."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", rows_per_chunk * 4 * 13 + 3)
    hidden, weight, labels, weights = case()
    head = Head(weight, softcap, scale)
    assert_is_reference(hidden, head, labels, weights)
    loss, weight_sum, hits, _ = weighted_linear_cross_entropy(hidden, head, labels, weights)
    total, wanted_hits = oracles.weighted_loss(
        hidden.double().tolist(), weight.double().tolist(), labels.tolist(), weights.tolist(), softcap, scale
    )
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert weight_sum.item() == pytest.approx(sum(weights.tolist()), rel=1e-6)
    assert hits.tolist() == wanted_hits and any(wanted_hits) and not all(wanted_hits)


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


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 1000])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 11])
@pytest.mark.parametrize("permuted", [False, True])
def test_only_the_first_rows_of_a_permutation_count(
    monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int, num_rows: int, permuted: bool
) -> None:
    """Rows past `num_rows` leave no trace, and hits and gradients stand where the hidden rows do."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", rows_per_chunk * 4 * 13 + 3)
    hidden, weight, labels, weights = case()
    rows = shuffled_blocks(11, 1) if permuted else None
    assert_is_reference(hidden, Head(weight), labels, weights, rows, num_rows)


def test_rows_that_do_not_count_may_hold_anything() -> None:
    """NaN in a row past `num_rows`, its weight or an impossible label changes nothing."""
    hidden, weight, labels, weights = case()
    rows, head = shuffled_blocks(11, 1), Head(weight)
    before = weighted_linear_cross_entropy(hidden, head, labels, weights, rows, 8)
    for i in rows[8:]:
        hidden[i], weights[i], labels[i] = torch.nan, torch.nan, -100
    after = weighted_linear_cross_entropy(hidden, head, labels, weights, rows, 8)
    assert all(torch.equal(one, other) for one, other in zip(before[:3], after[:3], strict=True))


def test_rows_of_weight_zero_have_no_gradient() -> None:
    """A row that weighs nothing adds nothing to loss or gradient, yet its hit is told."""
    hidden, weight, labels, weights = case()
    x = hidden.clone().requires_grad_()
    loss, _, hits, _ = weighted_linear_cross_entropy(x, Head(weight), labels, weights)
    loss.backward()
    rest = [i for i in range(len(labels)) if i != 2]
    without = weighted_linear_cross_entropy(hidden[rest], Head(weight), labels[rest], weights[rest])[0]
    assert loss.item() == pytest.approx(without.item(), rel=1e-6)
    assert x.grad is not None and not x.grad[2].any() and bool(hits[2])


def test_a_label_that_shares_the_best_logit_is_a_hit() -> None:
    """Of two tokens with the best logit either is a hit, and one below them is not."""
    weight = torch.tensor([[1.0], [2.0], [2.0], [0.0]])
    labels = torch.tensor([0, 1, 2, 3])
    hits = weighted_linear_cross_entropy(torch.ones(4, 1), Head(weight), labels, torch.ones(4))[2]
    assert hits.tolist() == [False, True, True, False]


def test_no_rows() -> None:
    """With nothing to score the loss is 0, differentiable, and there are no hits."""
    x = torch.zeros(0, 6, requires_grad=True)
    loss, weight, hits, _ = weighted_linear_cross_entropy(
        x, Head(torch.randn(13, 6)), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    )
    loss.backward()
    assert loss.item() == weight.item() == 0.0 and hits.shape == (0,)
    assert x.grad is not None and x.grad.shape == (0, 6)


def test_large_logits_do_not_overflow() -> None:
    """Logits of several hundred give the exact loss, not inf or NaN."""
    weight, labels = torch.eye(4) * 500, torch.tensor([1, 0])
    x = torch.eye(4)[:2].clone().requires_grad_()
    loss, _, hits, _ = weighted_linear_cross_entropy(x, Head(weight), labels, torch.ones(2))
    loss.backward()
    assert loss.item() == pytest.approx(1000.0) and hits.tolist() == [False, False]
    assert x.grad is not None and x.grad.isfinite().all()


def test_the_head_stays_frozen() -> None:
    """No gradient reaches the head's matrix, even if it asks for one."""
    hidden, weight, labels, weights = case()
    weight.requires_grad_()
    loss = weighted_linear_cross_entropy(hidden.requires_grad_(), Head(weight), labels, weights)[0]
    loss.backward()
    assert weight.grad is None


@pytest.mark.parametrize("dpace", [None, DPace(4)])
@pytest.mark.parametrize(("softcap", "scale"), VARIANTS)
def test_bfloat16(softcap: float | None, scale: float, dpace: DPace | None) -> None:
    """bfloat16 rows and head give a float32 loss within 1 % and a gradient within 2 % of float64."""
    hidden, weight, labels, weights = case(rows=64, vocab=50, width=32)
    weights = weights if dpace is None else (weights > 0.2).float()
    hidden, head = hidden.bfloat16(), Head((weight / 6).bfloat16(), softcap, scale)
    x = hidden.clone().requires_grad_()
    loss = weighted_linear_cross_entropy(x, head, labels, weights, dpace=dpace)[0]
    loss.backward()
    wanted, _, _, gradient = reference(hidden, head, labels, weights, dpace)
    assert loss.dtype == torch.float32 and x.grad is not None and x.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-2)
    assert (x.grad.double() - gradient).norm() / gradient.norm() < 2e-2


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 10, 1000])
@pytest.mark.parametrize(("softcap", "scale"), VARIANTS)
@pytest.mark.parametrize(("num_rows", "permuted"), [(None, False), (None, True), (12, False), (12, True)])
def test_dpace(
    monkeypatch: pytest.MonkeyPatch,
    rows_per_chunk: int,
    softcap: float | None,
    scale: float,
    num_rows: int | None,
    permuted: bool,
) -> None:
    """Weights by confidence are those of plain loops and get no gradient, however blocks are shuffled and chunked."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", rows_per_chunk * 4 * 13 + 3)
    hidden, weight, labels, weights = case(rows=20)
    counts = (weights > 0.25).float()  # holes within blocks
    rows = shuffled_blocks(5, 4) if permuted else None
    assert 0 < counts.sum() < 20
    assert_is_reference(hidden, Head(weight, softcap, scale), labels, counts, rows, num_rows, DPace(4, 0.3))


def test_dpace_weights_by_hand() -> None:
    """Of slots that are surely right each weighs what is left of the block; one that does not count is passed over."""
    sure = torch.zeros(4)
    assert DPace(4).weights(sure, torch.tensor([True] * 4)).tolist() == [4.0, 3.0, 2.0, 1.0]
    assert DPace(4).weights(sure, torch.tensor([True, False, True, True])).tolist() == [3.0, 0.0, 2.0, 1.0]
    hopeless = torch.tensor([torch.inf, torch.nan, torch.inf, torch.inf])
    assert DPace(4).weights(hopeless, torch.tensor([True, False, True, False])).tolist() == [0.75, 0.0, 0.25, 0.0]


def test_dpace_weights_are_those_of_speculators() -> None:
    """They equal `dpace_loss_decay` of speculators 0.9.0 on a block with an anchor in slot 0 and an end."""
    nll, counts = torch.tensor([9.0, 0.1, 0.7, 2.0, 0.3, 0.2]), torch.tensor([False, True, True, True, True, False])
    found = DPace(6).weights(nll, counts)
    # dpace_loss_decay(None, loss_mask=counts, block_size=6, dpace_alpha=0.5, elementwise_loss=nll * counts)
    wanted = [0.0, 2.4218, 1.4694, 0.7567, 0.3521, 0.0]
    assert found.tolist() == pytest.approx(wanted, abs=1e-4)


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


def assert_are_the_best(logits: Tensor, found: Candidates, num: int) -> None:
    """Values are those of `topk`, bit for bit, each id has its value, and none comes twice; NaN is the largest."""
    values, ids = found
    assert values.dtype == logits.dtype and ids.dtype == torch.int64
    assert int(ids.min()) >= 0 and int(ids.max()) < logits.shape[-1]
    for one in (logits.topk(num, dim=-1).values, logits.gather(-1, ids)):
        torch.testing.assert_close(values, one, rtol=0.0, atol=0.0, equal_nan=True)
    assert all(len(set(row)) == num for row in ids.flatten(0, -2).tolist())


def hard_rows(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Iterator[Tensor]:
    """Logits of which all differ, many are alike, all are -inf but a few, or any are NaN of either sign or infinite."""
    generator = torch.Generator().manual_seed(0)
    some = torch.rand(shape, generator=generator)
    logits = torch.randn(shape, generator=generator).to(dtype)
    few = torch.where(some < 0.002, logits, -torch.inf)
    for each in (
        logits,
        torch.randint(-2, 2, shape, generator=generator).to(dtype),
        few,
        torch.where(some > 0.999, -torch.tensor(torch.nan, dtype=dtype), few),
        torch.where(some > 0.5, torch.tensor(torch.nan, dtype=dtype), logits),
        torch.where(some > 0.9999, torch.inf, logits),
    ):
        yield each.to(device)


@pytest.mark.parametrize("shape", [(7, 384), (3, 5, 1024), (4, 300), (6, 256)])
@pytest.mark.parametrize("num", [1, 2, 5])
def test_the_best_of_rows_are_those_of_topk(shape: tuple[int, ...], num: int) -> None:
    """Values in order and the tokens that have them, no token twice: in groups, with a rest that no group takes, and
    among logits of which many are alike."""
    for logits in hard_rows(shape, torch.float32):
        assert_are_the_best(logits, best_of_rows(logits, num), num)
