"""The DFlash2 drafter: its layers against loops, what it starts as, and how its selector learns and walks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.dflash.anchors import Anchors, batch_generator, make_anchors, sample_anchors
from paceline.errors import ConfigError
from paceline.kernels.attention import attend_dense
from paceline.kernels.linear_cross_entropy import Head
from paceline.kernels.linear_mixed_loss import Mix
from paceline.models.dflash2 import DFlash2Drafter
from paceline.models.draft import DFlashDrafter, LossTerms
from paceline.records import FeatureBatch, TokenBatch
from tests import tiny
from tests.unit.models.test_draft import independent_drafter, random_features, run, table

HEAD = Head(table())
SHAPES = {
    "plain": tiny.shape_of_kind("dflash2"),
    "three taps": tiny.shape_of_kind("dflash2", {"conv_kernel_size": 3}, block_size=7),
    "one tap, one group": tiny.shape_of_kind("dflash2", {"conv_kernel_size": 1, "conv_group_size": 32}),
    "sliding": tiny.shape_of_kind("dflash2", layer_types=("sliding_attention",) * 2, sliding_window=5),
    "as many taps as slots": tiny.shape_of_kind("dflash2", {"conv_kernel_size": 3}, block_size=3),
}


def drafter(**changes: Any) -> DFlash2Drafter:
    model = tiny.drafter(tiny.shape_of_kind("dflash2", **changes))
    assert isinstance(model, DFlash2Drafter)
    return model


def batch(seed: int = 0) -> tuple[TokenBatch, Anchors]:
    tokens = tiny.row([14, 18, 7], 44, seed=seed, supervised=0.8)
    return tokens, sample_anchors(tokens.loss_mask, tokens.document_ids, 9, batch_generator(0, seed))


@pytest.mark.parametrize("name", SHAPES)
def test_forward_equals_an_independent_drafter(name: str) -> None:
    """Hidden states are those of convolutions, attention and MLP in loops, for both attention backends."""
    model = tiny.drafter(SHAPES[name])
    tokens = tiny.row([9, 13], 24, seed=3)
    positions = [0, 4, 10, 20]
    anchors, feature = make_anchors(torch.tensor(positions), 5), random_features(tokens)
    with torch.no_grad():
        got, dense = run(model, tokens, anchors, feature), run(model, tokens, anchors, feature, attend_dense)
    for block, anchor in enumerate(positions):
        wanted = torch.tensor(independent_drafter(model, tokens, anchor, feature)[1:])
        torch.testing.assert_close(got[block], wanted, rtol=0, atol=5e-5)
        torch.testing.assert_close(dense[block], wanted, rtol=0, atol=5e-5)


def test_tensor_names_and_shapes_are_those_of_released_checkpoints() -> None:
    """Five layers have exactly 81 tensors: 23 beside those of plain DFlash."""
    five = {"num_hidden_layers": 5, "layer_types": ("full_attention",) * 5}
    plain = set(DFlashDrafter(tiny.draft_shape(**five)).state_dict())
    model = DFlash2Drafter(tiny.shape_of_kind("dflash2", {"conv_kernel_size": 3}, **five))
    wanted = {
        "candidate_selector.predecessor_codebook": (tiny.VOCAB, 5),
        "candidate_selector.successor_codebook": (tiny.VOCAB, 5),
        "candidate_selector.hidden_projection.weight": (5, 32),
    }
    for layer in range(5):
        for part in ("attention", "mlp"):
            wanted[f"layers.{layer}.{part}_conv.base_kernel"] = (2, 3, 32)
            wanted[f"layers.{layer}.{part}_conv.kernel_projection.weight"] = (2 * 3 * 4, 32)
    state = model.state_dict()
    assert {name: tuple(state[name].shape) for name in set(state) - plain} == wanted
    assert plain < set(state) and len(state) == 81


def test_a_fresh_drafter_is_plain_dflash() -> None:
    """Same weights for the parts that both have; the same hidden states and drafts; the same loss and gradients."""
    embed = nn.Embedding.from_pretrained(table())
    models = [DFlashDrafter(tiny.draft_shape()), DFlash2Drafter(tiny.shape_of_kind("dflash2"))]
    tokens, anchors = batch()
    feature, outs, losses = random_features(tokens), [], []
    for model in models:
        model.initialise(3, embed, HEAD)
        hidden = run(model, tokens, anchors, feature)
        targets = model.targets(tokens, anchors, 4.0)
        loss = model.loss(
            hidden, HEAD, targets, anchors.positions, FeatureBatch(tokens, feature), LossTerms(selector=0.0)
        )
        loss.loss.backward()
        ids = model.propose(hidden, HEAD, tokens.input_ids[anchors.positions]).ids
        outs.append((hidden.detach(), ids, loss.hits, loss.weight))
        losses.append(loss.loss.detach())
    for name, parameter in models[0].named_parameters():
        other = models[1].get_parameter(name)
        assert torch.equal(parameter, other)
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outs[0][0], outs[1][0])
    assert all(torch.equal(one, other) for one, other in zip(outs[0][1:], outs[1][1:], strict=True))
    torch.testing.assert_close(*losses)


def test_sides_taps_and_groups_of_the_projection() -> None:
    """One row of the projection is one (side, tap, group): it reaches those 8 channels alone, side after side."""
    conv = drafter().layers[0].attention_conv
    conv.initialise()
    y = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))
    for row, (side, tap, group) in {0: (0, 0, 0), 6: (0, 1, 2), 9: (1, 0, 1), 15: (1, 1, 3)}.items():
        with torch.no_grad():
            conv.kernel_projection.weight.zero_()[row, 5] = 1.0
        weights = conv.weights(y)
        torch.testing.assert_close(weights[0, :, side, tap, group], y[0, :, 5])
        assert int((weights != 0).sum()) == 4
        channels = slice(8 * group, 8 * group + 8)
        for s in (0, 1):
            change = conv(y, weights, s) - y
            assert bool(change.any()) == (s == side)
            if s == side:
                before = F.pad(y[:, :-1], (0, 0, 1, 0)) if tap else y
                torch.testing.assert_close(change[..., channels], y[..., 5:6] * before[..., channels])
                assert int((change != 0).any(1).sum()) == 8


def test_context_keys_are_not_convolved() -> None:
    """Keys and values of the context are those of a plain drafter with the same weights, and nothing past the anchor
    is read."""
    model, tokens, anchors = drafter(), *batch()
    plain = DFlashDrafter(tiny.draft_shape())
    plain.load_state_dict({name: t for name, t in model.state_dict().items() if name in plain.state_dict()})
    feature = random_features(tokens)
    pairs = zip(
        model.context_kv(feature, tokens.position_ids), plain.context_kv(feature, tokens.position_ids), strict=True
    )
    assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))
    first = int(anchors.positions[0])
    moved = feature.clone()
    moved[first:] += 1.0
    with torch.no_grad():
        assert torch.equal(run(model, tokens, anchors, feature)[0], run(model, tokens, anchors, moved)[0])


def scores_of(model: DFlash2Drafter, hidden: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
    """Scores of the whole vocabulary ``[n, V]``, float64, in one product; candidates are not singled out."""
    selector = model.candidate_selector
    before = selector.predecessor_codebook.double()[previous]
    context = hidden.double() @ selector.hidden_projection.weight.double().T
    return logits.double() + (before * context) @ selector.successor_codebook.double().T


@pytest.mark.parametrize("mix", [Mix(), Mix(0.5, 0.3, 0.2)], ids=str)
def test_the_loss_is_that_of_its_two_parts(mix: Mix) -> None:
    """By autograd in float64 from whole logits: a slot whose label is no candidate has no selector term."""
    model, tokens, anchors = drafter(), *batch(1)
    hidden = run(model, tokens, anchors, random_features(tokens)).detach()
    targets, last = model.targets(tokens, anchors, 4.0), torch.randn(44, 32, generator=torch.Generator().manual_seed(1))
    labels = targets.labels.clone()
    labels[:, 0] = HEAD.logits(hidden[:, 0]).topk(3).indices[:, 2]  # candidates, of which most random labels are none
    targets = type(targets)(labels, targets.weights, targets.order, targets.num_rows, targets.previous)
    x = hidden.clone().requires_grad_()
    features = FeatureBatch(tokens, torch.zeros(44, 64), last)
    found = model.loss(x, HEAD, targets, anchors.positions, features, LossTerms(mix, selector=0.7))
    model.zero_grad()
    found.loss.backward()
    own = {name: p.grad for name, p in model.candidate_selector.named_parameters()}

    wide = hidden.double().requires_grad_()
    logits = wide.flatten(0, 1) @ HEAD.weight.double().T
    flat, weights = targets.labels.flatten(), targets.weights.flatten().double()
    assert targets.previous is not None
    scores = scores_of(model, wide.flatten(0, 1), logits, targets.previous.flatten())
    chosen = logits.topk(6).indices
    is_label = chosen == flat[:, None]
    selected = -(scores.gather(1, chosen).log_softmax(1) * is_label).sum(1)
    where = (anchors.positions[:, None] + torch.arange(3)).clamp(max=43).flatten()
    t = (last.double()[where] @ HEAD.weight.double().T).softmax(1)
    p = logits.softmax(1)
    base = mix.ce * F.cross_entropy(logits, flat, reduction="none")
    base = base + mix.kl * (t * (t / p).log()).sum(1) + mix.l1 * (p - t).abs().sum(1)
    wanted = (weights * (base + 0.7 * selected)).sum()
    grads = torch.autograd.grad(wanted, [wide, *model.candidate_selector.parameters()])
    torch.testing.assert_close(found.loss.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.weight, targets.weights.sum())
    torch.testing.assert_close(x.grad.double(), grads[0], rtol=1e-4, atol=1e-5)
    for (name, _), grad in zip(model.candidate_selector.named_parameters(), grads[1:], strict=True):
        torch.testing.assert_close(own[name], grad.float(), rtol=1e-4, atol=1e-5)
    counted = is_label.any(1) & (weights > 0)
    assert 0 < int(counted.sum()) < int((weights > 0).sum())
    best = scores.gather(1, chosen).argmax(1, keepdim=True)
    hits = (chosen.gather(1, best)[:, 0] == flat) & (weights > 0)
    assert found.hits.flatten().tolist() == hits.tolist()
    names = model.part_names(LossTerms(mix))
    assert names == (("overlap",) if mix.needs_target else ()) + ("selector_loss", "candidate_recall")
    overlap = (weights * (1 - (p - t).abs().sum(1) / 2)).sum()
    sums = [overlap] * mix.needs_target + [(weights * selected).sum(), (weights * is_label.any(1)).sum()]
    assert [part.item() for part in found.parts] == pytest.approx([each.item() for each in sums], rel=1e-4, abs=1e-4)


def test_a_label_that_is_no_candidate_leaves_the_selector_alone() -> None:
    """No loss and no gradient from it, and no hit."""
    model, tokens, anchors = drafter(), *batch(2)
    hidden = run(model, tokens, anchors, random_features(tokens)).detach().requires_grad_()
    targets = model.targets(tokens, anchors, 4.0)
    worst = HEAD.logits(hidden.detach()).argmin(-1)
    targets = type(targets)(worst, targets.weights, targets.order, targets.num_rows, targets.previous)
    results = []
    for factor in (0.0, 1.0):
        model.zero_grad()
        found = model.loss(
            hidden, HEAD, targets, anchors.positions, FeatureBatch(tokens, hidden), LossTerms(selector=factor)
        )
        (grad,) = torch.autograd.grad(found.loss, hidden, retain_graph=True)
        found.loss.backward()
        results.append((found.loss.detach(), grad))
        assert not found.hits.any()
        assert not any(p.grad.any() for p in model.candidate_selector.parameters())
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_drafts_are_the_best_path_from_the_anchor() -> None:
    """The walk step by step over the whole vocabulary's scores; teacher-forced on its own tokens it says the same."""
    model, (tokens, anchors) = drafter(), batch(3)
    with torch.no_grad():
        hidden = run(model, tokens, anchors, random_features(tokens))
        first = tokens.input_ids[anchors.positions]
        ids = model.propose(hidden, HEAD, first).ids
        again = model.best_after(hidden, HEAD, torch.cat([first[:, None], ids[:, :-1]], dim=1))
        logits = HEAD.logits(hidden)
        for block, anchor in enumerate(first.tolist()):
            before = anchor
            for j in range(3):
                row = logits[block, j][None]
                candidates = row.topk(6).indices[0]
                scores = scores_of(model, hidden[block, j][None], row, torch.tensor([before]))[0, candidates]
                before = int(candidates[scores.argmax()])
                assert int(ids[block, j]) == before
    assert torch.equal(ids, again)
    unary = logits.argmax(-1)
    assert not torch.equal(ids, unary)  # the selector had a say


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"selector_topk": 4}, "did you mean selector_top_k"),
        ({"selector_rank": 4.0}, "type int"),
        ({"selector_rank": True}, "type int"),
    ],
)
def test_options_that_it_does_not_have(options: dict[str, Any], words: str) -> None:
    """A wrong name or type is refused with the right one."""
    with pytest.raises(ConfigError, match=words):
        DFlash2Drafter.check_options(options)
    assert list(DFlash2Drafter.check_options({"selector_rank": 8})) == list(DFlash2Drafter.OPTIONS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"conv_group_size": 5}, "conv_group_size=5 does not divide 32"),
        ({"conv_kernel_size": 5}, "conv_kernel_size=5 is above block_size=4"),
        ({"selector_top_k": 300}, "selector_top_k=300 is above the 272 tokens"),
        ({"selector_rank": 0}, "selector_rank=0 must be at least 1"),
    ],
)
def test_options_that_do_not_go_with_the_sizes(options: dict[str, Any], words: str) -> None:
    """Each with what it is and what it meets."""
    with pytest.raises(ConfigError, match=words):
        DFlash2Drafter.check_shape(tiny.shape_of_kind("dflash2", options))


def test_its_layers_can_be_compiled() -> None:
    """Both parts of a layer as one graph each, and with the same numbers."""
    layer = drafter().layers[0]
    model, x = drafter(), torch.randn(5, 4, 32, generator=torch.Generator().manual_seed(0))
    angles = model.rotary.angles(torch.arange(4)[None].expand(5, 4), torch.float32)
    project = torch.compile(type(layer).project_convolved, fullgraph=True, backend="aot_eager")
    complete = torch.compile(type(layer).complete_convolved, fullgraph=True, backend="aot_eager")
    x = torch.cat([x[:, :1], x[:1, 1:2].expand(5, 3, 32)], dim=1)
    wanted = layer.project_convolved(x, None, angles, False)
    for is_input in (True, False):
        for one, other in zip(project(layer, x, None, angles, is_input), wanted, strict=True):
            torch.testing.assert_close(one, other)
    rest = x, wanted[1], wanted[4], 1
    for one, other in zip(complete(layer, *rest), layer.complete_convolved(*rest), strict=True):
        torch.testing.assert_close(one, other)
