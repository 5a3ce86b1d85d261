"""A drafter over a part of the target's vocabulary: what it learns, drafts, and counts as a hit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.dflash.anchors import batch_generator, sample_anchors
from paceline.dflash.blocks import BlockTargets
from paceline.kernels.linear_cross_entropy import Head
from paceline.kernels.linear_mixed_loss import Mix
from paceline.models.draft import DFlashDrafter, LossTerms
from paceline.records import FeatureBatch
from tests import tiny

TOKEN_IDS = torch.tensor([0, 3, 4, 50, 51, 257, tiny.VOCAB - 1])


def short_drafter(token_ids: Tensor = TOKEN_IDS) -> DFlashDrafter:
    drafter = tiny.drafter(tiny.draft_shape(draft_vocab_size=len(token_ids)))
    drafter.set_draft_vocab(token_ids)
    return drafter


def full_head(seed: int = 3) -> Head:
    return Head(torch.randn(tiny.VOCAB, 32, generator=torch.Generator().manual_seed(seed)))


def hidden_rows(blocks: int = 40) -> Tensor:
    return torch.randn(blocks, 3, 32, generator=torch.Generator().manual_seed(4))


def test_offsets_are_those_of_the_field() -> None:
    """Draft token i is the target's token i + d2t[i]; the offsets are a part of the weights."""
    drafter = short_drafter()
    assert drafter.d2t is not None
    assert (drafter.d2t + torch.arange(7)).tolist() == TOKEN_IDS.tolist()
    assert "d2t" in drafter.state_dict() and drafter.state_dict()["d2t"].dtype == torch.int64
    again = DFlashDrafter(drafter.shape)
    again.load_state_dict(drafter.state_dict())
    ids = again.draft_token_ids()
    assert ids is not None and ids.tolist() == TOKEN_IDS.tolist()
    assert drafter.to(torch.bfloat16).state_dict()["d2t"].dtype == torch.int64
    assert "d2t" not in tiny.drafter().state_dict() and tiny.drafter().draft_token_ids() is None


def test_the_full_vocabulary_is_the_head_itself() -> None:
    """Without a draft vocabulary nothing is copied and every label counts."""
    head, drafter = full_head(), tiny.drafter()
    assert drafter.own_head(head) is head
    assert drafter.can_draft(torch.arange(tiny.VOCAB)).all()


def test_labels_that_cannot_be_drafted_weigh_nothing() -> None:
    """The weights are those of the full vocabulary, zero exactly where the label has no row."""
    tokens = tiny.row((60, 40))
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, 24, batch_generator(0, 0))
    labels, full = tiny.drafter().labels_and_weights(tokens, anchors, 3.0)
    every_second = torch.arange(0, tiny.VOCAB, 2)
    short_labels, short = short_drafter(every_second).labels_and_weights(tokens, anchors, 3.0)
    assert torch.equal(labels, short_labels)
    assert torch.equal(short, torch.where(labels % 2 == 0, full, 0.0))
    assert 0 < (short > 0).sum() < (full > 0).sum()


def test_the_loss_is_that_of_the_full_head_with_the_others_ruled_out() -> None:
    """Short cross-entropy, gradient and hits equal the full ones with the other logits at minus infinity."""
    drafter, head = short_drafter(), full_head()
    generator = torch.Generator().manual_seed(5)
    labels = TOKEN_IDS[torch.randint(0, 7, (40, 3), generator=generator)]
    weights = torch.rand(40, 3, generator=generator) * (torch.rand(40, 3, generator=generator) < 0.7)
    hidden = hidden_rows().requires_grad_()
    tokens = tiny.row((4,))
    features = FeatureBatch(tokens, torch.zeros(4, 64), None)
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, 4, batch_generator(0, 0))
    own_labels = torch.searchsorted(TOKEN_IDS, labels)
    targets = BlockTargets.of(own_labels, weights)
    loss, weight, hits, _ = drafter.loss(hidden, drafter.own_head(head), targets, anchors.positions, features)
    torch.testing.assert_close(weight, weights.sum())
    (gradient,) = torch.autograd.grad(loss, hidden)

    masked = torch.full((tiny.VOCAB,), float("-inf")).index_fill(0, TOKEN_IDS, 0.0)
    again = hidden_rows().requires_grad_()
    logits = again @ head.weight.T + masked
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(40, 3)
    expected = (nll * weights).sum()
    (wanted,) = torch.autograd.grad(expected, again)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(hits, (logits.argmax(-1) == labels) & (weights > 0))


def test_hits_and_drafts_speak_the_targets_ids() -> None:
    """The arg-max row is named by the target's id; a token that cannot be drafted is never a hit."""
    drafter, head = short_drafter(), full_head()
    hidden, own = hidden_rows(), drafter.own_head(head)
    best = TOKEN_IDS[(hidden @ head.weight[TOKEN_IDS].T).argmax(-1)]
    assert drafter.propose(hidden[:1], own, torch.tensor([9])).ids[0].tolist() == best[0].tolist()
    valid = torch.ones(40, 3, dtype=torch.bool)
    assert drafter.hits(hidden, own, best, valid, best[:, 0]).all()
    missing = torch.full_like(best, 100)
    assert not drafter.hits(hidden, own, missing, valid, best[:, 0]).any()
    assert drafter.can_draft(torch.tensor([0, 1, 2, 3, 50, 52, 257, 271])).tolist() == [
        True, False, False, True, True, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_rows_of_a_head_keep_its_scales(softcap: float | None) -> None:
    """A part of the head gives the same logits as the whole, soft cap and scale included."""
    head = Head(full_head().weight, softcap, 0.5)
    torch.testing.assert_close(head.rows(TOKEN_IDS).logits(hidden_rows()), head.logits(hidden_rows())[..., TOKEN_IDS])


def test_the_target_is_compared_over_the_tokens_that_can_be_drafted() -> None:
    """With `kl` and `l1` both distributions are over the draft vocabulary, the target's as it is once the others are
    ruled out."""
    drafter, head, mix = short_drafter(), full_head(), Mix(ce=0.3, kl=0.5, l1=0.2)
    generator = torch.Generator().manual_seed(6)
    tokens = tiny.row((60, 40))
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, 24, batch_generator(0, 0))
    last_hidden = torch.randn(len(tokens.input_ids), 32, generator=generator)
    features = FeatureBatch(tokens, torch.zeros(len(tokens.input_ids), 64), last_hidden)
    hidden = torch.randn(24, 3, 32, generator=generator).requires_grad_()
    labels = torch.randint(0, 7, (24, 3), generator=generator)
    weights = torch.rand(24, 3, generator=generator) * (torch.rand(24, 3, generator=generator) < 0.7)
    targets = BlockTargets.of(labels, weights)
    loss, weight, _, parts = drafter.loss(
        hidden, drafter.own_head(head), targets, anchors.positions, features, LossTerms(mix=mix)
    )
    (gradient,) = torch.autograd.grad(loss, hidden)

    own = hidden.detach().clone().requires_grad_()
    short = head.weight[TOKEN_IDS]
    log_p = (own @ short.T).log_softmax(-1)
    places = (anchors.positions[:, None] + torch.arange(3)).clamp(max=len(last_hidden) - 1)
    log_t = (last_hidden[places] @ short.T).log_softmax(-1)
    distance = (log_p.exp() - log_t.exp()).abs().sum(-1)
    rows = -mix.ce * log_p.gather(-1, labels[..., None])[..., 0] + mix.l1 * distance
    rows = rows + mix.kl * (log_t.exp() * (log_t - log_p)).sum(-1)
    expected = (weights * rows).sum()
    (expected_gradient,) = torch.autograd.grad(expected, own)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weight, weights.sum())
    torch.testing.assert_close(parts[0], (weights * (1 - distance / 2)).sum())
