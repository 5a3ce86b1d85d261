"""The DSpark drafter: shifted labels, the bias by the token before, what the confidence head learns, and drafting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.dflash.anchors import Anchors, batch_generator, make_anchors, sample_anchors
from paceline.errors import ConfigError
from paceline.kernels.linear_cross_entropy import Head
from paceline.kernels.linear_mixed_loss import Mix
from paceline.models.draft import DFlashDrafter, LossTerms
from paceline.models.dspark import HEADS, DSparkDrafter
from paceline.records import FeatureBatch, TokenBatch
from tests import tiny
from tests.unit.models.test_draft import independent_drafter, random_features, run, table

HEAD = Head(table())


def drafter(options: dict[str, Any] | None = None, **changes: Any) -> DSparkDrafter:
    model = tiny.drafter(tiny.shape_of_kind("dspark", options, **changes))
    assert isinstance(model, DSparkDrafter)
    return model


def batch(seed: int = 0) -> tuple[TokenBatch, Anchors]:
    tokens = tiny.row([14, 18, 7], 44, seed=seed, supervised=0.8)
    return tokens, sample_anchors(tokens.loss_mask, tokens.document_ids, 9, batch_generator(0, seed))


def test_every_slot_predicts() -> None:
    """Hidden states are DFlash's, that of slot 0 included; a block of K slots drafts K tokens."""
    model = drafter()
    tokens = tiny.row([9, 13], 24, seed=3)
    anchors, feature = make_anchors(torch.tensor([0, 4, 10, 20])), random_features(tokens)
    with torch.no_grad():
        got = run(model, tokens, anchors, feature)
    assert model.num_predicted == 4 and got.shape == (4, 4, 32)
    for block, anchor in enumerate([0, 4, 10, 20]):
        wanted = torch.tensor(independent_drafter(model, tokens, anchor, feature))
        torch.testing.assert_close(got[block], wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("head", HEADS)
def test_tensor_names_and_shapes_are_those_of_released_checkpoints(head: str) -> None:
    """Beside DFlash's 58 of five layers: two tables, the confidence head, and the gate's or the recurrence's own."""
    five = {"num_hidden_layers": 5, "layer_types": ("full_attention",) * 5}
    state = DSparkDrafter(tiny.shape_of_kind("dspark", {"markov_head_type": head}, **five)).state_dict()
    wanted: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (tiny.VOCAB, 5),
        "markov_head.markov_w2.weight": (tiny.VOCAB, 5),
        "confidence_head.proj.weight": (1, 32 + 5),
        "confidence_head.proj.bias": (1,),
    }
    if head == "gated":
        wanted |= {"markov_head.gate_proj.weight": (5, 32 + 5), "markov_head.gate_proj.bias": (5,)}
    if head == "rnn":
        wanted |= {"markov_head.joint_proj.weight": (15, 10 + 32), "markov_head.joint_proj.bias": (15,)}
    plain = set(DFlashDrafter(tiny.draft_shape(**five)).state_dict())
    assert {name: tuple(state[name].shape) for name in set(state) - plain} == wanted
    assert len(state) == 58 + len(wanted)


def test_labels_predecessors_and_supervision() -> None:
    """Column j: label a + j + 1, token before a + j; what counts ends for good where a token is not supervised."""
    ids = torch.arange(100, 112)
    mask = torch.tensor([1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1], dtype=torch.bool)
    tokens = TokenBatch.pack(0, [(0, ids, mask)], 12)
    model, anchors = drafter(), make_anchors(torch.tensor([1, 5, 10]))
    targets = model.targets(tokens, anchors, 2.0)
    assert targets.labels[1].tolist() == [106, 107, 108, 109]
    assert targets.previous is not None and targets.previous.tolist()[:2] == [
        [101, 102, 103, 104],
        [105, 106, 107, 108],
    ]
    decay = torch.exp(-torch.arange(4) / 2.0)
    torch.testing.assert_close(targets.weights[1], decay)
    assert targets.weights[0].tolist() == pytest.approx([1.0, float(decay[1]), 0.0, 0.0])  # 104 is not; 105 is again
    assert targets.weights[2].tolist() == [1.0, 0.0, 0.0, 0.0]  # the row ends
    assert model.default_gamma(7) == 4.0 and model.default_gamma(15) == 7.0


def reference(
    model: DSparkDrafter, wide: Tensor, labels: Tensor, previous: Tensor, last: Tensor, where: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """nll, KL, L1, confidence logits and best tokens of blocks ``[A, J]``, from the formulas in float64."""
    w = {name: p.double() for name, p in model.named_parameters()}
    embedded = w["markov_head.markov_w1.weight"][previous]
    kind, rank = model.shape.options["markov_head_type"], 5
    factors, state = [], torch.zeros(len(wide), rank, dtype=torch.float64)
    for j in range(wide.shape[1]):
        h, e = wide[:, j], embedded[:, j]
        if kind == "vanilla":
            factor = e
        elif kind == "gated":
            gate = torch.cat([h, e], 1) @ w["markov_head.gate_proj.weight"].T + w["markov_head.gate_proj.bias"]
            factor = gate.sigmoid() * e
        else:
            joint = torch.cat([state, e, h], 1) @ w["markov_head.joint_proj.weight"].T
            joint = joint + w["markov_head.joint_proj.bias"]
            gate, candidate, out = joint[:, :rank].sigmoid(), joint[:, rank : 2 * rank].tanh(), joint[:, 2 * rank :]
            factor, state = out.tanh(), gate * state + (1 - gate) * candidate
        factors.append(factor)
    bias = torch.stack(factors, 1) @ w["markov_head.markov_w2.weight"].T
    logits = wide @ HEAD.weight.double().T + bias
    t = (last.double()[where] @ HEAD.weight.double().T).softmax(-1)
    p = logits.softmax(-1)
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    confidence = torch.cat([wide, embedded], -1) @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"]
    return nll, (t * (t / p).log()).sum(-1), (p - t).abs().sum(-1), confidence, logits.argmax(-1)


@pytest.mark.parametrize("head", HEADS)
def test_the_loss_is_that_of_its_parts(head: str) -> None:
    """By autograd in float64: cross-entropy, L1, KL, and the confidence head's, whose goal is a constant."""
    model, (tokens, anchors) = drafter({"markov_head_type": head}), batch(1)
    hidden = run(model, tokens, anchors, random_features(tokens)).detach()
    last = torch.randn(44, 32, generator=torch.Generator().manual_seed(1))
    targets = model.targets(tokens, anchors, 4.0)
    assert targets.previous is not None and not targets.weights.all() and model.needs_last_hidden
    mix, x = Mix(0.1, 0.2, 0.9), hidden.clone().requires_grad_()
    features = FeatureBatch(tokens, torch.zeros(44, 64), last)
    found = model.loss(x, HEAD, targets, anchors.positions, features, LossTerms(mix, confidence=0.6))
    model.zero_grad()
    found.loss.backward()
    heads = [model.markov_head, model.confidence_head]
    own = [p.grad for part in heads for p in part.parameters()]

    wide = hidden.double().requires_grad_()
    where = (anchors.positions[:, None] + torch.arange(4)).clamp(max=43)
    nll, kl, l1, confidence, best = reference(model, wide, targets.labels, targets.previous, last, where)
    overlap = (1 - l1 / 2).detach()
    base = 0.1 * nll + 0.2 * kl + 0.9 * l1
    wrong = F.binary_cross_entropy_with_logits(confidence, overlap, reduction="none")
    wanted = (targets.weights.double() * (base + 0.6 * wrong)).sum()
    parameters = [p for part in heads for p in part.parameters()]
    grads = torch.autograd.grad(wanted, [wide, *parameters])
    torch.testing.assert_close(found.loss.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), grads[0], rtol=1e-4, atol=1e-5)
    for seen, grad in zip(own, grads[1:], strict=True):
        torch.testing.assert_close(seen, grad.float(), rtol=1e-4, atol=1e-5)
    hits = (best == targets.labels) & (targets.weights > 0)
    assert found.hits.tolist() == hits.tolist()
    assert model.part_names(LossTerms(mix)) == ("overlap", "confidence_loss")
    sums = [(targets.weights * each).sum().item() for each in (overlap, wrong)]
    assert [part.item() for part in found.parts] == pytest.approx(sums, rel=1e-4)


def test_the_first_token_is_predicted_from_the_anchor() -> None:
    """Column 0 compares with the target's word right behind the anchor: with the target's own state there, and no bias,
    the divergence is nothing; with the state a place later it is not."""
    model, (tokens, anchors) = drafter(), batch(2)
    with torch.no_grad():
        model.markov_head.markov_w2.weight.zero_()
    last = torch.randn(44, 32, generator=torch.Generator().manual_seed(2))
    targets = model.targets(tokens, anchors, 4.0)
    losses = []
    for shift in (0, 1):
        where = (anchors.positions[:, None] + torch.arange(4) + shift).clamp(max=43)
        features = FeatureBatch(tokens, torch.zeros(44, 64), last)
        terms = LossTerms(Mix(0.0, 1.0, 0.0), confidence=0.0)
        losses.append(model.loss(last[where], HEAD, targets, anchors.positions, features, terms).loss.item())
    assert abs(losses[0]) < 1e-4 and losses[1] > 1.0


@pytest.mark.parametrize("head", HEADS)
def test_drafts_lean_on_the_token_just_drafted(head: str) -> None:
    """The walk's own tokens, given back as those before, lead to the same tokens; and confidence is of the token
    before, never of the drafted one."""
    model, (tokens, anchors) = drafter({"markov_head_type": head}), batch(3)
    first = tokens.input_ids[anchors.positions]
    with torch.no_grad():
        hidden = run(model, tokens, anchors, random_features(tokens))
        proposal = model.propose(hidden, HEAD, first)
        before = torch.cat([first[:, None], proposal.ids[:, :-1]], dim=1)
        assert torch.equal(model.best_after(hidden, HEAD, before), proposal.ids)
        assert not torch.equal(HEAD.logits(hidden).argmax(-1), proposal.ids)  # the bias had a say
        dummy = torch.zeros(44, 32)
        where = (anchors.positions[:, None] + torch.arange(4)).clamp(max=43)
        *_, confidence, _ = reference(model, hidden.double(), proposal.ids, before, dummy, where)
    assert proposal.confidence is not None and model.has_confidence
    torch.testing.assert_close(proposal.confidence, confidence.sigmoid().float())
    assert drafter({"enable_confidence_head": False}).propose(hidden, HEAD, first).confidence is None


def test_a_fresh_drafter_starts_as_the_backbone_does() -> None:
    """The weights that DFlash has too are the same; the bias is small, and confidence says even."""
    embed = nn.Embedding.from_pretrained(table())
    plain, model = DFlashDrafter(tiny.draft_shape()), DSparkDrafter(tiny.shape_of_kind("dspark", {"markov_rank": 256}))
    for each in (plain, model):
        each.initialise(5, embed, HEAD)
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in plain.named_parameters())
    bias = model.markov_head.markov_w1.weight @ model.markov_head.markov_w2.weight.T
    assert 0.004 < bias.std().item() < 0.009 and bias.abs().max().item() < 0.05
    assert model.confidence_head is not None and not model.confidence_head.proj.bias.any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"markov_head_type": "lstm"}, "one of vanilla, gated, rnn"),
        ({"markov_heads": "rnn"}, "did you mean markov_head_type"),
        ({"enable_confidence_head": 1}, "type bool"),
    ],
)
def test_options_that_it_does_not_have(options: dict[str, Any], words: str) -> None:
    """A wrong name, type or value is refused with the right ones."""
    with pytest.raises(ConfigError, match=words):
        DSparkDrafter.check_options(options)
