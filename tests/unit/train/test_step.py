"""One step: gradients of the pooled weighted loss, anchors keyed by the batch, nothing to learn made harmless."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import Optim
from paceline.dflash.anchors import batch_generator, sample_anchors
from paceline.dflash.blocks import block_labels, block_positions, decay_weights, make_noise_blocks
from paceline.kernels.attention import BlockLayout, attend_dense
from paceline.models.draft import DFlashDrafter
from paceline.models.target import Target
from paceline.records import FeatureBatch, StepSums, TokenBatch
from paceline.train.step import TrainStep
from tests import tiny

GAMMA = 2.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny.target("llama", tmp_path_factory.mktemp("step") / "target", layer_ids=(1, 3))


def make_step(target: Target, num_anchors: int = 12, dtype: torch.dtype = torch.float32, **more: Any) -> TrainStep:
    drafter = tiny.drafter(tiny.draft_shape())
    settings = {"num_anchors": num_anchors, "gamma": GAMMA, "seed": 5, "total_steps": 10, "dtype": dtype, **more}
    return TrainStep(drafter, target.embed, target.head.to(dtype), Optim(lr=1e-2, clip=1e9), **settings)


def gradients(drafter: DFlashDrafter) -> list[Tensor]:
    return [p.grad.clone() for p in drafter.parameters() if p.grad is not None]


def unsupervised(tokens: TokenBatch) -> TokenBatch:
    return dataclasses.replace(tokens, loss_mask=torch.zeros_like(tokens.loss_mask))


def plain_loss(step: TrainStep, features: FeatureBatch) -> tuple[Tensor, float]:
    """Weighted loss of a micro-batch by full logits and autograd, with the reference attention."""
    tokens, drafter = features.tokens, step.drafter
    generator = batch_generator(step.seed, tokens.number)
    anchors = sample_anchors(
        tokens.loss_mask, tokens.document_ids, step.num_anchors, generator, stratify=step.stratify_anchors
    )
    labels, valid = block_labels(tokens.input_ids, tokens.loss_mask, tokens.document_ids, anchors, 4)
    weights = valid * decay_weights(3, GAMMA)
    layout = BlockLayout.of_row(anchors, tokens.document_starts, 4, len(tokens.input_ids))
    noise = step.embed(make_noise_blocks(tokens.input_ids, anchors, 4, drafter.shape.mask_token_id))
    context_kv = drafter.context_kv(features.context_feature, tokens.position_ids)
    hidden = drafter(noise, block_positions(anchors, tokens.position_ids, 4), context_kv, layout, attend=attend_dense)
    nll = torch.nn.functional.cross_entropy(step.head.logits(hidden).flatten(0, 1), labels.flatten(), reduction="none")
    return (nll * weights.flatten()).sum(), float(weights.sum())


def test_an_update_uses_the_gradient_of_the_pooled_loss(target: Target) -> None:
    """Two micro-batches of unequal weight give the gradient of (sum of losses) / (sum of weights), clip apart."""
    rows = [tiny.row([9, 14], 32, seed=1, number=0), tiny.row([6], 32, seed=2, number=1, supervised=0.9)]
    features = [target.features(tokens) for tokens in rows]
    step, reference = make_step(target), make_step(target)
    sums = StepSums()
    for batch in features:
        sums += step.accumulate(batch)
    pooled = [plain_loss(reference, batch) for batch in features]
    loss, weight = sum(p[0] for p in pooled), sum(p[1] for p in pooled)
    (loss / weight).backward()
    assert sums.weight == pytest.approx(weight) and sums.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    seen: list[Tensor] = []
    step.optimizer.step = lambda: seen.extend(gradients(step.drafter))  # what the optimizer is handed
    _, grad_norm = step.update(0, sums.weight)
    wanted = gradients(reference.drafter)
    for one, other in zip(seen, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert float(grad_norm) == pytest.approx(float(torch.stack([g.norm() for g in wanted]).norm()), rel=1e-4)


def test_stratified_anchors_are_those_of_the_sampler(target: Target) -> None:
    """`stratify_anchors` reaches the sampler: the loss is that of its anchors, and another than without."""
    features = target.features(tiny.row([9, 14, 30], 64, seed=1))
    step = make_step(target, num_anchors=6, stratify_anchors=True)
    sums = step.accumulate(features)
    loss, weight = plain_loss(step, features)
    assert sums.weight == pytest.approx(weight) and sums.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert make_step(target, num_anchors=6).accumulate(features).loss != sums.loss


def test_a_batch_with_nothing_to_learn_changes_nothing(target: Target) -> None:
    """Case T04: without an eligible anchor there is no weight, no block and no gradient."""
    step = make_step(target)
    for tokens in (unsupervised(tiny.row([9, 14], 32)), tiny.row([1, 1, 1], 32, supervised=1.0)):
        sums = step.accumulate(target.features(tokens))
        assert (sums.weight, sums.loss, sums.blocks, sums.batches) == (0.0, 0.0, 0, 1)
    assert gradients(step.drafter) == []


def test_a_poor_document_leaves_the_rich_one_alone(target: Target) -> None:
    """Case T04: a document without supervised tokens beside a good one changes neither loss nor gradients."""
    rich = tiny.row([12], 32, seed=3)
    both = tiny.row([12, 12], 32, seed=3)
    both.loss_mask[12:] = False
    losses, grads = [], []
    for tokens in (rich, both):
        step = make_step(target)
        losses.append(step.accumulate(target.features(tokens)).loss)
        grads.append(gradients(step.drafter))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for one, other in zip(*grads, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_anchors_belong_to_the_batch_number(target: Target) -> None:
    """The same row under another number gets other anchors, and the same ones again under its own."""
    features = target.features(tiny.row([30], 32, seed=4))
    again = dataclasses.replace(features, tokens=dataclasses.replace(features.tokens, number=9))
    losses = [make_step(target, num_anchors=4).accumulate(batch).loss for batch in (features, again, features)]
    assert losses[0] == losses[2] != losses[1]


def test_bfloat16_trains_float32_weights(target: Target) -> None:
    """Compute in bfloat16 keeps float32 weights, gradients and moments, near the float32 loss."""
    features = target.features(tiny.row([20], 32, seed=6))
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        step = make_step(target, dtype=dtype)
        sums = step.accumulate(features)
        assert {p.grad.dtype for p in step.drafter.parameters()} == {torch.float32}
        step.update(0, sums.weight)
        assert {v.dtype for state in step.optimizer.state.values() for v in state.values()} == {torch.float32}
        losses[dtype] = sums.loss / sums.weight
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.05)


def test_the_estimate_counts_leading_hits(target: Target) -> None:
    """With a head that always says one token, a row of that token is wholly accepted, up to its end."""
    tokens = tiny.row([10], 12, supervised=1.0)
    tokens.input_ids[:10] = 7
    step = make_step(target, num_anchors=20)
    constant = torch.zeros_like(step.head.weight)
    step.drafter.norm.weight.data.fill_(1.0)
    step.head = dataclasses.replace(step.head, weight=constant)  # equal logits: the arg-max is token 0
    assert step.accumulate(target.features(tokens)).committed == 9
    tokens.input_ids[:10] = 0
    sums = step.accumulate(target.features(tokens))
    assert sums.blocks == 9  # anchors 0..8
    assert sums.committed == sum(min(4, 9 - a) for a in range(9))


def test_the_rate_and_the_clip_reach_the_optimizer(target: Target) -> None:
    """An update uses the schedule's rate for its step, and gradients of at most the clip's norm."""
    step = make_step(target)
    step.optim = Optim(lr=1e-2, clip=1e-3, warmup_ratio=0.5)
    sums = step.accumulate(target.features(tiny.row([20], 32, seed=7)))
    seen: list[Tensor] = []
    step.optimizer.step = lambda: seen.extend(gradients(step.drafter))
    lr, grad_norm = step.update(1, sums.weight)
    assert lr == pytest.approx(1e-2 * 2 / 5) and {g["lr"] for g in step.optimizer.param_groups} == {lr}
    assert grad_norm > 1e-3
    assert float(torch.stack([g.norm() for g in seen]).norm()) == pytest.approx(1e-3, rel=1e-3)
