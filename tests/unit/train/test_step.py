"""One step: gradients of the pooled weighted loss, anchors keyed by the batch, nothing to learn made harmless."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import Kernels, Loss, Optim
from paceline.dflash.anchors import batch_generator, sample_anchors
from paceline.dflash.blocks import block_labels, block_positions, decay_weights, make_noise_blocks
from paceline.kernels import flex, linear_cross_entropy
from paceline.kernels.attention import BlockLayout, attend_dense
from paceline.models.draft import DFlashDrafter
from paceline.models.target import Target
from paceline.records import FeatureBatch, StepResult, StepSums, TokenBatch
from paceline.train import step as step_module
from paceline.train.step import TrainStep, with_noise
from tests import oracles, tiny

GAMMA = 2.0
LAUNCHED = Kernels(cuda_graphs="off")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny.target("llama", tmp_path_factory.mktemp("step") / "target", layer_ids=(1, 3))


def make_step(target: Target, num_anchors: int = 12, dtype: torch.dtype = torch.float32, **more: Any) -> TrainStep:
    drafter = tiny.drafter(tiny.draft_shape())
    settings = {"num_anchors": num_anchors, "loss": Loss(gamma=GAMMA), "seed": 5, "total_steps": 10, "dtype": dtype}
    return TrainStep(drafter, target.embed, target.head.to(dtype), Optim(lr=1e-2, clip=1e9), **settings | more)


def gradients(drafter: DFlashDrafter) -> list[Tensor]:
    return [p.grad.clone() for p in drafter.parameters() if p.grad is not None]


def result_of(step: TrainStep, *batches: FeatureBatch) -> tuple[StepSums, StepResult]:
    """What an update of these micro-batches says."""
    sums = StepSums()
    for features in batches:
        sums += step.accumulate(features)
    return sums, step.update(0).read()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_uses_the_gradient_of_the_pooled_loss(target: Target, dtype: torch.dtype) -> None:
    """Two micro-batches of unequal weight give the gradient of (sum of losses) / (sum of weights), clip apart."""
    rows = [tiny.row([9, 14], 32, seed=1, number=0), tiny.row([6], 32, seed=2, number=1, supervised=0.9)]
    features = [target.features(tokens) for tokens in rows]
    step, reference = make_step(target, dtype=dtype, batches_per_step=2), make_step(target)
    for batch in features:
        step.accumulate(batch)
    pooled = [plain_loss(reference, batch) for batch in features]
    loss, weight = sum(p[0] for p in pooled), sum(p[1] for p in pooled)
    (loss / weight).backward()
    wanted = gradients(reference.drafter)
    exact = dtype == torch.float32
    for one, other in zip(step.optimizer.gradients().values(), wanted, strict=True):
        if exact:
            torch.testing.assert_close(one / weight, other, rtol=1e-4, atol=1e-6)
        else:
            assert float((one / weight - other).norm() / other.norm()) < 0.1
    result = step.update(0).read()
    assert result.loss == pytest.approx(float(loss.detach()) / weight, rel=1e-5 if exact else 2e-2)
    norm = float(torch.stack([g.norm() for g in wanted]).norm())
    assert result.grad_norm == pytest.approx(norm, rel=1e-4 if exact else 0.1) and result.is_finite
    assert gradients(step.drafter) == [] and result.lr == pytest.approx(1e-2)


def test_stratified_anchors_are_those_of_the_sampler(target: Target) -> None:
    """`stratify_anchors` reaches the sampler: the loss is that of its anchors, and another than without."""
    features = target.features(tiny.row([9, 14, 30], 64, seed=1))
    step = make_step(target, num_anchors=6, stratify_anchors=True)
    loss, weight = plain_loss(step, features)
    _, result = result_of(step, features)
    assert result.loss == pytest.approx(float(loss.detach()) / weight, rel=1e-5)
    assert result_of(make_step(target, num_anchors=6), features)[1].loss != result.loss


def test_a_batch_with_nothing_to_learn_changes_nothing(target: Target) -> None:
    """Case T04: without an eligible anchor there is no weight, no block and no gradient."""
    step = make_step(target)
    for tokens in (unsupervised(tiny.row([9, 14], 32)), tiny.row([1, 1, 1], 32, supervised=1.0)):
        sums = step.accumulate(target.features(tokens))
        assert (sums.num_rows, sums.blocks, sums.batches) == (0, 0, 1)
    assert gradients(step.drafter) == []


def test_a_poor_document_leaves_the_rich_one_alone(target: Target) -> None:
    """Case T04: a document without supervised tokens beside a good one changes neither loss nor gradients."""
    rich = tiny.row([12], 32, seed=3)
    both = tiny.row([12, 12], 32, seed=3)
    both.loss_mask[12:] = False
    losses, grads = [], []
    for tokens in (rich, both):
        step = make_step(target)
        step.accumulate(target.features(tokens))
        grads.append(gradients(step.drafter))
        losses.append(step.update(0).read().loss)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for one, other in zip(*grads, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_anchors_belong_to_the_batch_number(target: Target) -> None:
    """The same row under another number gets other anchors, and the same ones again under its own."""
    features = target.features(tiny.row([30], 32, seed=4))
    again = dataclasses.replace(features, tokens=dataclasses.replace(features.tokens, number=9))
    losses = [result_of(make_step(target, num_anchors=4), batch)[1].loss for batch in (features, again, features)]
    assert losses[0] == losses[2] != losses[1]


def test_bfloat16_trains_float32_masters(target: Target) -> None:
    """The drafter computes in bfloat16, masters and moments are float32, and the loss is near the float32 one."""
    features = target.features(tiny.row([20], 32, seed=6))
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        step = make_step(target, dtype=dtype)
        assert {p.dtype for p in step.drafter.parameters()} == {dtype}
        losses[dtype] = result_of(step, features)[1].loss
        assert {value.dtype for value in (*step.optimizer.masters.values(), *step.optimizer.state(1).values())} == {
            torch.float32
        }
        assert all(value.any() for value in step.optimizer.exp_avg.values())
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.05)


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_recomputing_changes_nothing(target: Target, kind: str) -> None:
    """With layers computed again in the backward pass loss and gradients are the same bits."""
    features = target.features(tiny.row([9, 14, 30], 64, seed=1))
    found = []
    for recompute in (False, True):
        step = make_step(target, recompute=recompute, loss=Loss(kind=kind, gamma=GAMMA))
        step.accumulate(features)
        found.append(gradients(step.drafter))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_dpace_weighs_slots_by_confidence(target: Target) -> None:
    """The loss is the mean of the slots' losses under D-PACE's weights, which are no constants."""
    features = target.features(tiny.row([9, 14, 30], 64, seed=1, supervised=1.0))
    step = make_step(target, loss=Loss(kind="dpace", gamma=GAMMA))
    seen: list[Any] = []
    inner = step.drafter.loss
    step.drafter.loss = lambda *args: seen.append(args) or inner(*args)  # type: ignore[method-assign,func-returns-value]
    _, result = result_of(step, features)
    hidden, head, targets, _, _, terms = seen[0]
    logits = head.logits(hidden.detach())
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.labels.flatten(), reduction="none").view(
        -1, 3
    )
    weights = oracles.dpace_weights(nll.tolist(), (targets.weights > 0).tolist(), terms.dpace.floor)
    weights = torch.tensor(weights)
    assert result.loss == pytest.approx(float((weights * nll).sum() / weights.sum()), rel=1e-5)
    assert weights[:, 0].std() > 0


def test_the_estimate_counts_leading_hits(target: Target) -> None:
    """With a head that never says the row's token no draft is accepted; with one that does, all are, up to the end."""
    tokens = tiny.row([10], 12, supervised=1.0)
    tokens.input_ids[:10] = 7
    features = target.features(tokens)
    for never in (True, False):
        step = make_step(target, num_anchors=20)
        weight = torch.zeros_like(step.head.weight)  # equal logits: every token is among the best
        if never:
            weight[0, 0], weight[1, 0] = 1e3, -1e3  # one of the two is the best
        step.head = dataclasses.replace(step.head, weight=weight)
        sums, result = result_of(step, features)
        assert sums.blocks == 9  # anchors 0..8
        committed = [1] * 9 if never else [min(4, 9 - a) for a in range(9)]
        near = [committed[max(0, a - 3) : a + 4] for a in range(9)]
        assert result.rounds == pytest.approx(sum(len(each) / sum(each) for each in near))


def test_the_rate_and_the_clip_reach_the_optimizer(target: Target) -> None:
    """An update uses the schedule's rate for its step, and gradients of at most the clip's norm."""
    step = make_step(target)
    step.optimizer.optim = step.optim = Optim(lr=1e-2, clip=1e-3, warmup_ratio=0.5)
    step.accumulate(target.features(tiny.row([20], 32, seed=7)))
    result = step.update(1).read()
    assert result.lr == pytest.approx(1e-2 * 2 / 5) and result.grad_norm > 1e-3
    moments = torch.cat([value.flatten() for value in step.optimizer.exp_avg.values()])
    assert float(moments.norm()) == pytest.approx(1e-3 * (1 - step.optim.betas[0]), rel=1e-3)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, enable_gqa: bool) -> Tensor:
    """What FlexAttention computes, by its mask alone: it has no gradients on the CPU."""
    row, column = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    visible = block_mask.mask_mod(None, None, row, column)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=enable_gqa)


@pytest.mark.parametrize("loss", [Loss(gamma=GAMMA), Loss(kind="dpace", gamma=GAMMA)], ids=["decay", "dpace"])
def test_the_path_of_a_gpu_gives_the_same_step(target: Target, loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged arrays, masks rewritten in place, kept features and rounded-up rows: three ragged rows with holes, padding
    and empty slots give the loss, the estimate and the gradients of the CPU's own path."""
    rows = [
        tiny.row([40, 3, 60], 128, seed=1, number=0, supervised=0.8),
        tiny.row([128], 128, seed=2, number=1, supervised=0.95),
        tiny.row([9, 20, 30], 128, seed=3, number=2, supervised=0.4),
    ]
    batches = [target.features(tokens) for tokens in rows]
    shape = tiny.draft_shape(
        num_hidden_layers=3,
        layer_types=("full_attention", "sliding_attention", "full_attention"),
        sliding_window=11,
    )

    def make() -> TrainStep:
        settings: dict[str, Any] = {"num_anchors": 64, "loss": loss, "seed": 5, "total_steps": 10, "kernels": LAUNCHED}
        return TrainStep(
            tiny.drafter(shape), target.embed, target.head, Optim(lr=1e-2), dtype=torch.float32, **settings
        )

    reference = make()
    monkeypatch.setattr(step_module, "_choose_attention", lambda *args: ("flex", "as on a GPU"))
    monkeypatch.setattr(flex, "fused_flex_attention", dense_attention)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", 48)
    monkeypatch.setattr(step_module, "run_compiled", step_module.call)
    fast = make()
    for batch in batches:
        assert fast.accumulate(batch) == reference.accumulate(batch)
    found, wanted = fast.optimizer.gradients(), reference.optimizer.gradients()
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
    one, other = fast.update(0).read(), reference.update(0).read()
    assert one.rounds == other.rounds and one.loss == pytest.approx(other.loss, rel=1e-5)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


def test_noise_is_keyed_by_the_batch_and_as_large_as_it_is_said(target: Target) -> None:
    """A share of each tap's own size at each token; the same for a batch and seed, another for another."""
    features = target.features(tiny.row([200, 180], number=3))
    noisy = with_noise(features, 0.25, 7, 2)
    taps, added = (
        each.unflatten(-1, (2, -1))
        for each in (features.context_feature, noisy.context_feature - features.context_feature)
    )
    share = added.square().mean(-1).sqrt() / taps.square().mean(-1).sqrt()
    assert float(share.mean()) == pytest.approx(0.25, rel=0.02) and float(share.std()) < 0.06
    assert noisy.tokens is features.tokens
    again = with_noise(features, 0.25, 7, 2).context_feature
    assert torch.equal(again, noisy.context_feature)
    other = target.features(tiny.row([200, 180], number=4))
    assert torch.equal(other.context_feature, features.context_feature)
    for size, seed, batch in ((0.25, 8, features), (0.25, 7, other), (0.1, 7, features)):
        assert not torch.equal(with_noise(batch, size, seed, 2).context_feature, noisy.context_feature)
