"""Drawn drafts of every kind leave the target's distribution as it is, and a wrong proposal does not."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from paceline.dflash.confidence import cut_below
from paceline.dflash.speculative import Chance, draw, judge, spread
from paceline.kernels.linear_cross_entropy import Head
from paceline.models.draft import Proposal
from tests import tiny

VOCAB, NUM_DRAFTED, WIDTH, ANCHOR = 6, 2, 32, 1
NUM_SAMPLES = 60_000


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


TARGET = 1.2 * normal(VOCAB, VOCAB, seed=4)
"""Logits of the toy target by the last token."""
HIDDEN = normal(NUM_DRAFTED, WIDTH, seed=5)
HEAD = Head(0.3 * normal(VOCAB, WIDTH, seed=6))
SURE = torch.rand(VOCAB, generator=torch.Generator().manual_seed(7))
"""What a confidence head might say, by the token before."""

KINDS = {
    "dflash": tiny.shape_of_kind("dflash", vocab_size=VOCAB),
    "dflash2": tiny.shape_of_kind("dflash2", {"selector_top_k": 4}, vocab_size=VOCAB),
    "dspark": tiny.shape_of_kind("dspark", vocab_size=VOCAB),
    "dspark gated": tiny.shape_of_kind("dspark", {"markov_head_type": "gated"}, vocab_size=VOCAB),
    "dspark rnn": tiny.shape_of_kind("dspark", {"markov_head_type": "rnn"}, vocab_size=VOCAB),
}


@torch.inference_mode()
def propose(kind: str, temperature: float | None, generator: torch.Generator) -> Proposal:
    """Many blocks of one anchor, each with draws of its own; greedily without a temperature."""
    chance = None
    if temperature is not None:
        uniforms = torch.rand(NUM_SAMPLES, NUM_DRAFTED, dtype=torch.float64, generator=generator)
        chance = Chance(temperature, uniforms)
    hidden = HIDDEN.expand(NUM_SAMPLES, -1, -1)
    return tiny.drafter(KINDS[kind]).propose(hidden, HEAD, torch.full((NUM_SAMPLES,), ANCHOR), chance)


def answers(
    proposal: Proposal, q: Tensor, lengths: Tensor, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The three tokens behind the anchor, ``[S, 3]``, of one verification each; and how many drafts were accepted.

    Those that the verification has not brought are drawn from the target.

    Args:
        lengths: Drafted tokens that are verified, ``[S]``.
    """
    p_after = torch.softmax(TARGET.double() / temperature, dim=-1)
    tokens, accepted = torch.zeros(NUM_SAMPLES, NUM_DRAFTED + 1, dtype=torch.int64), torch.zeros_like(lengths)
    before = torch.cat([torch.full((NUM_SAMPLES, 1), ANCHOR), proposal.ids], dim=1)
    for n in range(NUM_DRAFTED + 1):
        rows = (lengths == n).nonzero().flatten()
        uniforms = torch.rand(len(rows), n + 1, dtype=torch.float64, generator=generator)
        drafted = proposal.ids[rows, :n]
        count, added = judge(p_after[before[rows, : n + 1]], q[rows, :n], drafted, uniforms)
        tokens[rows, :n], accepted[rows] = drafted, count
        tokens[rows, count] = added
    for j in range(1, NUM_DRAFTED + 1):
        uniforms = torch.rand(NUM_SAMPLES, dtype=torch.float64, generator=generator)
        own = draw(p_after[tokens[:, j - 1]], uniforms)
        tokens[:, j] = torch.where(accepted < j, own, tokens[:, j])
    return tokens, accepted


def misfit(tokens: Tensor, temperature: float) -> float:
    """Chi-square of the answers against their exact probabilities, over what is passed once in a thousand times.

    Answers that are expected fewer than five times are taken together (Wilson and Hilferty's approximation).
    """
    p = torch.softmax(TARGET.double() / temperature, dim=-1)
    exact = (p[ANCHOR][:, None, None] * p[:, :, None] * p[None]).flatten() * len(tokens)
    place = (tokens * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
    seen = torch.bincount(place, minlength=VOCAB**3).double()
    rare = exact < 5
    exact, seen = (torch.cat([each[~rare], each[rare].sum()[None]]) for each in (exact, seen))
    freedom = len(exact) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + NormalDist().inv_cdf(0.999) * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((seen - exact).square() / exact).sum()) / limit


def sure(proposal: Proposal) -> Tensor:
    """A confidence of each drafted token by the one before it: the head's where there is one."""
    if proposal.confidence is not None:
        return proposal.confidence
    return SURE[torch.cat([torch.full((NUM_SAMPLES, 1), ANCHOR), proposal.ids[:, :-1]], dim=1)]


def cut(proposal: Proposal, is_cut: bool) -> Tensor:
    """How many tokens are verified: all; or none in every fourth block, and in others those of enough confidence."""
    if not is_cut:
        return torch.full((NUM_SAMPLES,), NUM_DRAFTED)
    values = sure(proposal).clone()
    threshold = float(values[:, 1].unique().median())
    values[:, 0] = threshold  # all blocks have one anchor, and would all be cut or none
    values[::4, 0] = 0.0
    lengths = cut_below(values, threshold)
    assert lengths.unique().numel() > 1
    return lengths


@pytest.mark.parametrize("is_cut", [False, True], ids=["all", "cut"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_drafts_leave_the_distribution(kind: str, temperature: float, is_cut: bool) -> None:
    """Answers come as often as the target says, for the q of plain, selector and Markov drafts."""
    generator = torch.Generator().manual_seed(1)
    proposal = propose(kind, temperature, generator)
    assert proposal.probs is not None
    assert proposal.probs.shape[-1] == (4 if kind == "dflash2" else VOCAB)
    q = spread(proposal.probs, proposal.prob_ids, VOCAB)
    tokens, accepted = answers(proposal, q, cut(proposal, is_cut), temperature, generator)
    assert 0 < int(accepted.sum()) < NUM_DRAFTED * NUM_SAMPLES
    assert misfit(tokens, temperature) < 1


@pytest.mark.parametrize("is_cut", [False, True], ids=["all", "cut"])
@pytest.mark.parametrize("kind", KINDS)
def test_certain_drafts_leave_the_distribution(kind: str, is_cut: bool) -> None:
    """Greedy drafts are judged as drawn from a distribution that is certain of them."""
    generator = torch.Generator().manual_seed(2)
    proposal = propose(kind, None, generator)
    certain = spread(torch.ones(NUM_SAMPLES, NUM_DRAFTED, 1), proposal.ids[..., None], VOCAB)
    tokens, _ = answers(proposal, certain, cut(proposal, is_cut), 1.0, generator)
    assert misfit(tokens, 1.0) < 1


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_a_q_that_forgets_the_token_before_is_seen(kind: str) -> None:
    """Judged by the slots' own softmax, as if the drafts had not been conditioned, answers are bent."""
    generator = torch.Generator().manual_seed(3)
    proposal = propose(kind, 1.0, generator)
    assert proposal.probs is not None
    logits = HEAD.logits(HIDDEN).expand(NUM_SAMPLES, -1, -1)
    if proposal.prob_ids is not None:
        logits = logits.gather(-1, proposal.prob_ids)
    wrong = spread(torch.softmax(logits, dim=-1), proposal.prob_ids, VOCAB)
    tokens, _ = answers(proposal, wrong, torch.full((NUM_SAMPLES,), NUM_DRAFTED), 1.0, generator)
    assert misfit(tokens, 1.0) > 3


def test_a_confidence_that_sees_its_own_token_is_seen() -> None:
    """Where a drafted token decides whether it is verified, answers are bent: the test would tell."""
    generator = torch.Generator().manual_seed(4)
    proposal = propose("dflash", 1.0, generator)
    assert proposal.probs is not None
    lengths = cut_below(SURE[proposal.ids], float(SURE.median()))
    tokens, _ = answers(proposal, proposal.probs, lengths, 1.0, generator)
    assert misfit(tokens, 1.0) > 5


def test_draws_are_in_proportion_and_never_of_weight_zero() -> None:
    """The share of uniforms that gives an index is its weight's, at both ends of the range as well."""
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])
    uniforms = torch.arange(800, dtype=torch.float64) / 800
    counts = draw(weights.expand(800, -1), uniforms).bincount(minlength=6)
    assert counts.tolist() == [0, 300, 0, 100, 400, 0]
    assert int(draw(weights, torch.tensor(1 - 2**-53, dtype=torch.float64))) == 4


def test_rare_tokens_of_a_large_vocabulary_are_drawn() -> None:
    """Sums are wide enough for weights that float32 would lose beside the others."""
    weights = torch.full((200_000,), 1e-9)
    weights[0] = 1.0
    seen = draw(weights, torch.tensor(1 - 1e-4, dtype=torch.float64))
    assert int(seen) == pytest.approx(100_000, abs=1_000)


def test_equal_distributions_accept_everything() -> None:
    """Where q is p every draft stands, and the residual without mass falls back on p."""
    p = torch.softmax(normal(40, 3, VOCAB, seed=8).double(), -1)
    drafted = torch.zeros(40, 2, dtype=torch.int64)
    uniforms = torch.full((40, 3), 1 - 2**-53, dtype=torch.float64)
    assert judge(p, p[:, :2], drafted, uniforms)[0].tolist() == [2] * 40
    q = p[:, :2].clone()
    q[..., 0] *= 1 + 1e-12  # rejected by rounding alone: nothing is left of p - q
    count, added = judge(p, q, drafted, uniforms * 0 + 1 - 1e-14)
    assert count.tolist() == [0] * 40 and ((added >= 0) & (added < VOCAB)).all()


def test_nothing_drafted_is_a_draw_of_the_target() -> None:
    """A verification of the anchor alone draws from p."""
    p = torch.tensor([[[0.0, 1.0, 0.0]]])
    count, added = judge(p, p[:, :0], torch.zeros(1, 0, dtype=torch.int64), torch.rand(1, 1, dtype=torch.float64))
    assert (count.tolist(), added.tolist()) == ([0], [1])


def test_spread_puts_probabilities_in_their_places() -> None:
    """Tokens that could not be drawn have none; a whole vocabulary stays as it is."""
    probs = torch.tensor([[0.25, 0.75]])
    assert spread(probs, torch.tensor([[4, 1]]), 6).tolist() == [[0, 0.75, 0, 0, 0.25, 0]]
    assert spread(probs, None, 2) is probs
