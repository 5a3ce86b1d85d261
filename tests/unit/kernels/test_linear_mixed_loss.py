"""Losses against the target's distribution: by autograd in float64, and what they are as formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.kernels import linear_cross_entropy
from paceline.kernels import linear_mixed_loss as module
from paceline.kernels.linear_cross_entropy import DPace, Head, weighted_linear_cross_entropy
from paceline.kernels.linear_mixed_loss import Bias, Mix, linear_mixed_loss
from tests import oracles
from tests.unit.kernels.test_linear_cross_entropy import VARIANTS, shuffled_blocks

MIXES = [Mix(1.0, 0.0, 0.0), Mix(0.0, 1.0, 0.0), Mix(0.0, 0.0, 1.0), Mix(0.1, 0.3, 0.9)]
ROWS, VOCAB, WIDTH, RANK, POSITIONS = 12, 13, 6, 3, 7


def case(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments of a loss, with some rows of weight 0 and a bias."""
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g).to(dtype)

    weights = torch.rand(ROWS, generator=g)
    weights[2] = weights[7] = 0.0
    return {
        "hidden": normal(ROWS, WIDTH),
        "head": normal(VOCAB, WIDTH),
        "labels": torch.randint(0, VOCAB, (ROWS,), generator=g),
        "weights": weights,
        "target_hidden": normal(POSITIONS, WIDTH),
        "target_rows": torch.randint(0, POSITIONS, (ROWS,), generator=g),
        "bias": Bias(normal(ROWS, RANK), normal(VOCAB, RANK)),
    }


def logits_of(x: Tensor, weight: Tensor, softcap: float | None, scale: float) -> Tensor:
    logits = x @ weight.T * scale
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def reference(
    args: dict[str, Any], softcap: float | None, scale: float, mix: Mix, dpace: DPace | None, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Loss, sum of weights, overlap, and gradients of hidden rows and bias, by autograd in float64."""
    x, rows, table = (each.double().requires_grad_() for each in (args["hidden"], *args["bias"]))
    weight = args["head"].double()
    logits = logits_of(x, weight, softcap, scale) + (rows @ table.T if has_bias else 0.0)
    target = logits_of(args["target_hidden"].double()[args["target_rows"]], weight, softcap, scale)
    p, t = logits.softmax(1), target.softmax(1)
    nll = F.cross_entropy(logits, args["labels"], reduction="none")
    distance = (p - t).abs().sum(1)
    weights = args["weights"].double()
    if dpace is not None:
        shape = (-1, dpace.block)
        found = oracles.dpace_weights(nll.view(shape).tolist(), (weights != 0).view(shape).tolist(), dpace.floor)
        weights = weights * torch.tensor(found, dtype=torch.float64).flatten()
    loss = (weights * (mix.ce * nll + mix.kl * (t * (t / p).log()).sum(1) + mix.l1 * distance)).sum()
    wanted = [x, rows, table] if has_bias else [x]
    grads = torch.autograd.grad(loss, wanted)
    counts = (args["weights"] != 0).double()
    return loss.detach(), weights.sum(), ((1 - distance / 2) * counts).detach(), list(grads)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize(("softcap", "scale"), VARIANTS)
def test_it_is_what_autograd_makes_of_the_formula(
    softcap: float | None, scale: float, mix: Mix, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value, overlap and all gradients, in chunks of a few rows."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 5 * 4 * VOCAB)
    args = case()
    x, rows, table = (each.clone().requires_grad_() for each in (args["hidden"], *args["bias"]))
    found, overlap = linear_mixed_loss(
        x, Head(args["head"], softcap, scale), args["labels"], args["weights"], None, ROWS,
        args["target_hidden"], args["target_rows"], mix, bias=Bias(rows, table) if has_bias else None,
    )  # fmt: skip
    (2.0 * found.loss).backward()
    loss, weight, wanted_overlap, grads = reference(args, softcap, scale, mix, None, has_bias)
    torch.testing.assert_close(found.loss.double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.weight.double(), weight, rtol=1e-6, atol=0)
    torch.testing.assert_close(overlap.double() * (args["weights"] != 0), wanted_overlap, rtol=1e-5, atol=1e-6)
    for tensor, grad in zip([x, rows, table], grads, strict=False):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad.double(), 2 * grad, rtol=1e-4, atol=1e-5)


def test_dpace_follows_the_cross_entropy() -> None:
    """Weights by confidence in whole blocks, in an order of their own; hits and candidates in the order of the rows."""
    args, dpace, order = case(1), DPace(3), shuffled_blocks(4, 3)
    head = Head(args["head"])
    x = args["hidden"].clone().requires_grad_()
    found, _ = linear_mixed_loss(
        x, head, args["labels"], args["weights"], order, ROWS, args["target_hidden"], args["target_rows"],
        Mix(0.4, 0.6, 0.0), dpace=dpace, num_candidates=3,
    )  # fmt: skip
    found.loss.backward()
    loss, weight, _, (grad,) = reference(args, None, 1.0, Mix(0.4, 0.6, 0.0), dpace, False)
    torch.testing.assert_close(found.loss.double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.weight.double(), weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), grad, rtol=1e-4, atol=1e-6)
    logits = head.logits(args["hidden"])
    counts = args["weights"] != 0
    assert found.hits[counts].tolist() == (logits.argmax(1) == args["labels"])[counts].tolist()
    assert found.candidates is not None
    assert found.candidates.ids[counts].tolist() == logits.topk(3).indices[counts].tolist()


def test_rows_that_do_not_count_leave_no_trace() -> None:
    """Rows past the last, and rows of weight 0 whatever they hold."""
    args = case(2)
    head, order = Head(args["head"]), torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    rest = args["target_hidden"], args["target_rows"], Mix(0.2, 0.3, 0.5)
    weights = args["weights"].clone()
    weights[order[8:]] = 0.0
    results = []
    for num_rows, poison in ((8, False), (ROWS, False), (8, True), (ROWS, True)):
        hidden = args["hidden"].clone()
        if poison:
            hidden[weights == 0] = float("nan")
        hidden.requires_grad_()
        found, overlap = linear_mixed_loss(hidden, head, args["labels"], weights, order, num_rows, *rest)
        found.loss.backward()
        results.append((found.loss.detach(), overlap[weights != 0], hidden.grad))
    for result in results[1:]:
        for one, other in zip(results[0], result, strict=True):
            torch.testing.assert_close(one, other)


def test_without_terms_of_the_target_it_is_cross_entropy() -> None:
    """The same number and gradient as of the function that does that alone."""
    args, grads, losses = case(3), [], []
    for mixed in (True, False):
        x = args["hidden"].clone().requires_grad_()
        common = x, Head(args["head"], 2.0), args["labels"], args["weights"], None, ROWS
        if mixed:
            found = linear_mixed_loss(*common, args["target_hidden"], args["target_rows"], Mix()).rows
        else:
            found = weighted_linear_cross_entropy(*common)
        found.loss.backward()
        grads.append(x.grad)
        losses.append(found.loss.detach())
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads)


def test_l1_is_twice_the_total_variation() -> None:
    """Of distributions that have nothing in common it is 2, and the overlap 0; of equal ones 0 and 1."""
    head = Head(torch.eye(3) * 50.0)
    states = torch.eye(3)
    found, overlap = linear_mixed_loss(
        states, head, torch.zeros(3, dtype=torch.int64), torch.ones(3), None, 3,
        states, torch.tensor([1, 1, 0]), Mix(0.0, 0.0, 1.0),
    )  # fmt: skip
    assert float(found.loss) == pytest.approx(4.0) and overlap.tolist() == pytest.approx([0.0, 1.0, 0.0])


def test_the_least_divergence_is_the_target() -> None:
    """KL of the target's own logits is 0 with no gradient; of others it is positive."""
    args = case(4)
    x = args["target_hidden"].clone().requires_grad_()
    own, other = torch.arange(POSITIONS), torch.arange(POSITIONS).roll(1)
    for rows, is_own in ((own, True), (other, False)):
        found, _ = linear_mixed_loss(
            x, Head(args["head"]), args["labels"][:POSITIONS], torch.ones(POSITIONS), None, POSITIONS,
            args["target_hidden"], rows, Mix(0.0, 1.0, 0.0),
        )  # fmt: skip
        (grad,) = torch.autograd.grad(found.loss, x)
        assert (found.loss.item() < 1e-5) == is_own and (float(grad.norm()) < 1e-4) == is_own


@pytest.mark.parametrize(("softcap", "scale"), VARIANTS)
def test_a_loss_on_candidates_reaches_the_hidden_rows(softcap: float | None, scale: float) -> None:
    """The gradient of what is made of the best logits, beside the loss's own, by autograd in float64."""
    args = case(5)
    head, g = Head(args["head"], softcap, scale), torch.Generator().manual_seed(0)
    factors = torch.randn(ROWS, 4, generator=g) * (args["weights"] != 0)[:, None]
    order = torch.randperm(ROWS, generator=g)
    wide = args["hidden"].double().requires_grad_()
    logits = logits_of(wide, args["head"].double(), softcap, scale)[order[:9]]
    labels, weights = args["labels"][order[:9]], args["weights"].double()[order[:9]]
    wanted = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    wanted = wanted + (logits.topk(4).values.square() * factors.double()[order[:9]]).sum()
    (grad,) = torch.autograd.grad(wanted, wide)
    for mix in (None, Mix()):
        x = args["hidden"].clone().requires_grad_()
        common = x, head, args["labels"], args["weights"], order, 9
        if mix is None:
            found = weighted_linear_cross_entropy(*common, num_candidates=4)
        else:
            states = args["target_hidden"], args["target_rows"]
            found = linear_mixed_loss(*common, *states, mix, num_candidates=4).rows
        assert found.candidates is not None
        loss = found.loss + (found.candidates.logits.square() * factors).sum()
        loss.backward()
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x.grad.double(), grad, rtol=1e-4, atol=1e-5)
        assert not found.candidates.logits[order[9:]].any()


def test_the_chunk_s_code_can_be_compiled() -> None:
    """As one graph, without a break, for each set of arguments that there is."""
    compiled = torch.compile(module._rows_of_chunk, fullgraph=True, backend="aot_eager")
    g = torch.Generator().manual_seed(0)
    products, target, added = (torch.randn(6, 9, generator=g) for _ in range(3))
    labels, weights = torch.randint(0, 9, (6,), generator=g), torch.rand(6, generator=g)
    for bias, softcap, dpace in ((None, None, None), (added, 3.0, DPace(3))):
        args = products, target, bias, labels, weights, 1.0, softcap, Mix(0.2, 0.3, 0.5), dpace
        for one, other in zip(compiled(*args), module._rows_of_chunk(*args), strict=True):
            torch.testing.assert_close(one, other)


def chunk(
    num: int, vocab: int, softcap: float | None, scale: float, has_bias: bool, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Any, ...]:
    """The first arguments of `_rows_of_chunk`, with some hits, a row of weight 0, and sharp distributions."""
    g = torch.Generator().manual_seed(vocab)
    products, target, added = (2.0 * torch.randn(num, vocab, generator=g) for _ in range(3))
    products[-1] *= 10.0
    target[-2] *= 10.0
    target[0] = products[0]
    labels, weights = torch.randint(0, vocab, (num,), generator=g), torch.rand(num, generator=g)
    products[torch.arange(2), labels[:2]] = added[torch.arange(2), labels[:2]] = 12.0
    weights[1] = 0.0
    products, target, added = (each.to(device, dtype) for each in (products, target, added))
    return products, target, added if has_bias else None, labels.to(device), weights.to(device), scale, softcap


def assert_is_the_body(arguments: tuple[Any, ...], mix: Mix, rtol: float, atol: float) -> None:
    """The kernel gives what `_rows_of_chunk` does. Of a million tokens few are as likely for drafter and target but for
    rounding, which then says which way L1 pulls."""
    from paceline.kernels.linear_mixed_loss_triton import rows_of_chunk

    wanted = module._rows_of_chunk(*arguments, mix, None)
    products, target, added, *rest = arguments
    before = target.clone()
    found = rows_of_chunk(
        products.clone(), target, None if added is None else added.clone(), *rest, (mix.ce, mix.kl, mix.l1)
    )
    assert torch.equal(target, before)
    assert torch.equal(found[2], wanted[2]) and wanted[2].any() and not wanted[2].all()
    for i in (0, 1, 3):  # loss, weights, overlap
        torch.testing.assert_close(found[i], wanted[i], rtol=2e-5, atol=1e-5)
    assert (found[5] is None) == (added is None)
    for one, other in zip(found[4:], wanted[4:], strict=True):
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            one, other = one.float(), other.float()
            assert (one - other).norm() < rtol * other.norm()
            assert int((~torch.isclose(one, other, rtol, atol)).sum()) <= 3e-6 * one.numel()
