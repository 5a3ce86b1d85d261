"""Decoding at a temperature: every token is drawn from the target's distribution, with drafts and without alike.

A drafter proposes its most likely tokens, at any temperature, as the public decoders have it: the proposal q is certain
of one token d. Speculative sampling (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318) then accepts d
with probability min(1, p(d) / q(d)) = p(d), and on rejection draws from the residual max(p - q, 0), which is p without
d, rescaled. Both at once: draw x from p; where x is d, d is accepted, and where it is not, x is a draw from that
residual. So the target draws at every position as if nothing had been drafted, and the loop compares.

The draw is the largest of logits + temperature x Gumbel noise, which has the softmax's distribution. The noise hangs on
seed, prompt and position alone: plain and drafted decoding see the same noise, and have to give the same tokens. What
holds at temperature 0, losslessness token by token and ties told by a gap of logits, holds here as well.

A drafter may draw as well (`Sampling.drafts`). The target then judges the drafts by what they were drawn from, see
`dflash.speculative`; answers have the same distribution, and are not the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeGuard

import torch
from torch import Tensor

from paceline.data.regenerate import number_of
from paceline.dflash.speculative import Chance, judge, spread
from paceline.eval.forwards import Tokens
from paceline.models.draft import Proposal


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: Above 0; the whole distribution is drawn from, without top-k or top-p.
        seed: With the position in the answer, what the draws hang on.
        drafts: Whether the drafter draws too; else it proposes its likeliest tokens.
    """

    temperature: float
    seed: int = 0
    drafts: Literal["greedy", "sampled"] = "greedy"

    def of_prompt(self, number: int) -> Sampling:
        """The draws of one prompt, independent of those of the others."""
        return replace(self, seed=number_of(self.seed, number))

    def scores_at(self, logits: Tensor, position: int) -> Tensor:
        """Scores ``[V]`` whose largest is the token drawn at a position of the answer, from logits ``[V]``."""
        return Draws(self).scores(logits[None], position)[0]

    def chance(self, position: int, num_predicted: int, device: torch.device) -> Chance:
        """What a block is drawn with whose anchor stands at a position: one row."""
        return Chance(self.temperature, self._uniforms("draft", position, num_predicted, device))

    def judged(self, logits: Tensor, proposal: Proposal, position: int, row: int = 0) -> list[int]:
        """Tokens of the answer from a position on: the drawn ones that the target accepts, and one of its own.

        Args:
            logits: ``[n + 1, V]``, the target's, after the anchor and the first n drafted tokens.
            proposal: Theirs, of which others may be left unverified.
            row: Block of the proposal.
        """
        n = len(logits) - 1
        assert proposal.probs is not None
        of_ids = None if proposal.prob_ids is None else proposal.prob_ids[row, :n]
        q = spread(proposal.probs[row, :n], of_ids, logits.shape[-1])
        p = torch.softmax(logits.double() / self.temperature, dim=-1)
        drafted, uniforms = proposal.ids[row, :n], self._uniforms("verify", position, n + 1, logits.device)
        num_accepted, added = judge(p[None], q[None], drafted[None], uniforms)
        *tokens, count, last = torch.cat([drafted, num_accepted, added]).tolist()
        return [*tokens[:count], last]

    def _uniforms(self, use: str, position: int, count: int, device: torch.device) -> Tensor:
        """float64 ``[1, count]``, that hang on seed, use and position alone."""
        generator = torch.Generator().manual_seed(number_of(self.seed, use, position))
        return torch.rand(1, count, dtype=torch.float64, generator=generator).to(device)


def draws_drafts(sampling: Sampling | None) -> TypeGuard[Sampling]:
    """Whether the drafter draws its tokens."""
    return sampling is not None and sampling.drafts == "sampled"


class Draws:
    """The noise of one answer: a row a position, made in order, whatever is asked for how often."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator: torch.Generator | None = None
        self._rows: list[Tensor] = []
        self._first = 0  # position of the first row kept

    def scores(self, logits: Tensor, position: int) -> Tensor:
        """Logits ``[n, V]`` of the positions from `position` on, with their noise; float32."""
        if self._generator is None:
            self._generator = torch.Generator(logits.device).manual_seed(self._sampling.seed)
        while self._first + len(self._rows) < position + len(logits):
            exponential = torch.empty(logits.shape[-1], device=logits.device).exponential_(generator=self._generator)
            self._rows.append(exponential.clamp_min_(torch.finfo(torch.float32).tiny).log_())
        start = position - self._first
        noise = torch.stack(self._rows[start : start + len(logits)])
        return logits.float() - self._sampling.temperature * noise  # minus its logarithm is Gumbel noise

    def forget(self, position: int) -> None:
        """Drop the rows of positions before `position`, which were committed."""
        del self._rows[: position - self._first]
        self._first = position


class LogitSide(Protocol):
    """What sampling asks of a target: `TargetSide` with logits in place of tokens."""

    def prefill_logits(self, prompt_ids: Sequence[int]) -> Tensor:
        """Start a sequence; logits ``[1, V]`` after it."""

    def verify_logits(self, tokens: Tokens) -> Tensor:
        """Append tokens; logits ``[n, V]`` after each of them."""

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the tokens just verified."""

    def features(self) -> Tensor:
        """Context features of the tokens that the last call appended and kept."""


class SampledTarget:
    """A target that draws its tokens; the decode loop cannot tell it from a greedy one."""

    def __init__(self, target: LogitSide, sampling: Sampling) -> None:
        self._target = target
        self._sampling = sampling
        self._draws = Draws(sampling)
        self._position = 0  # tokens of the answer that were committed

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Start a sequence; the token drawn to follow it."""
        self._draws, self._position = Draws(self._sampling), 1
        return int(self._draws.scores(self._target.prefill_logits(prompt_ids), 0)[0].argmax())

    def verify(self, tokens: Tokens) -> list[int]:
        """Append tokens; what is drawn after each of them."""
        return self._draws.scores(self._target.verify_logits(tokens), self._position).argmax(-1).tolist()

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the tokens just verified."""
        self._target.keep(num_tokens)
        self._position += num_tokens
        self._draws.forget(self._position)

    def features(self) -> Tensor:
        """Context features of the tokens that the last call appended and kept."""
        return self._target.features()


class DrawnDrafts(Protocol):
    """What judging asks of a drafter."""

    proposal: Proposal
    """Of the last block."""


class JudgingTarget(SampledTarget):
    """A target that judges drafts which were drawn; what it verifies are the leading ones of the drafter's last."""

    def __init__(self, target: LogitSide, sampling: Sampling, drafter: DrawnDrafts) -> None:
        super().__init__(target, sampling)
        self._drafter = drafter

    def verify(self, tokens: Tokens) -> list[int]:
        """Append tokens; those after the anchor that are accepted, and the target's own behind them."""
        logits = self._target.verify_logits(tokens)
        return self._sampling.judged(logits, self._drafter.proposal, self._position)
