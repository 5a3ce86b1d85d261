"""How many drafted tokens the target would accept, from arg-max hits against the target's own text.

Definition used everywhere: **acceptance length** = tokens committed / target forwards, the prefill's token excluded.
A forward commits the leading hits and the target's own next token; what lies past a stop token or the length limit is
not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

NEIGHBOURS = 3
"""Anchors before and behind one that tell, with it, how fast a decode loop moves there. Of fewer the mean says little,
more are too far away: at 3 the estimate over held-out answers was within 5 % of decoding for two drafters, with 1 to 8
anchors for 24 tokens."""


def leading_hits(hits: Tensor) -> Tensor:
    """Hits before the first miss in each block.

    Args:
        hits: bool ``[A, J]``; a slot that does not count is a miss.
    Returns: int64 ``[A]``.
    """
    return torch.cumprod(hits.to(torch.int64), dim=1).sum(dim=1)


def estimated_rounds(committed: Tensor, documents: Tensor) -> Tensor:
    """Target forwards of a decode loop for one token at each of the anchors that training drew, double scalar.

    The acceptance length is the number of anchors over it. Their mean number of tokens is no estimate: anchors fall on
    all positions alike, a loop stops seldom where it moves fast, and text is fast and slow by stretches (5.4 by this
    mean was 3.7 decoded). Where a round commits m tokens on average a token takes 1 / m of a round, so
    each anchor counts as the inverse of the mean of its neighbourhood.

    Args:
        committed: ``[A]``; tokens that a round from this anchor would commit, 0 in an empty slot; in order of position.
        documents: int ``[A]``; any number of the document.
    """
    tokens = F.pad(committed.double(), (NEIGHBOURS, NEIGHBOURS)).unfold(0, 2 * NEIGHBOURS + 1, 1)  # [A, 7]
    others = F.pad(documents, (NEIGHBOURS, NEIGHBOURS), value=-1).unfold(0, 2 * NEIGHBOURS + 1, 1)
    counts = (others == documents[:, None]) & (tokens > 0)
    mean = (tokens * counts).sum(1) / counts.sum(1).clamp(min=1)
    return torch.where(committed > 0, 1 / mean.clamp(min=1), 0.0).sum()


@dataclass
class Acceptance:
    """Counts over target forwards; lengths and rates are derived at the end.

    Attributes:
        rounds: Target forwards that verified a block.
        committed: Tokens they committed.
        reached: ``[J]``; forwards in which slot j was looked at, as all slots before it were accepted.
        accepted: ``[J]``; forwards in which it was accepted as well.
        verified: Drafted tokens that they were given; others had been left out.
    """

    num_predicted: int
    rounds: int = 0
    committed: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    verified: int = 0

    def __post_init__(self) -> None:
        self.reached = self.reached or [0] * self.num_predicted
        self.accepted = self.accepted or [0] * self.num_predicted

    def add_round(self, num_accepted: int, num_committed: int, num_verified: int | None = None) -> None:
        """Count one verification: leading drafts accepted, tokens committed by it, and drafts given to the target.

        A round that a stop token or the limit cut short says nothing about the slot after its last accepted one, nor
        does one about a slot that was not verified. `num_verified` None: all J.
        """
        num_verified = self.num_predicted if num_verified is None else num_verified
        self.rounds += 1
        self.committed += num_committed
        self.verified += num_verified
        num_reached = num_accepted + (num_accepted < min(num_committed, num_verified))
        for j in range(self.num_predicted):
            self.accepted[j] += j < num_accepted
            self.reached[j] += j < num_reached

    def __iadd__(self, other: Acceptance) -> Acceptance:
        self.rounds += other.rounds
        self.committed += other.committed
        self.reached = [a + b for a, b in zip(self.reached, other.reached, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]
        self.verified += other.verified
        return self

    @property
    def length(self) -> float:
        """Tokens per target forward, the bonus token included; 0 without a forward."""
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def verified_per_round(self) -> float:
        """Drafted tokens that a target forward verified; 0 without a forward."""
        return self.verified / self.rounds if self.rounds else 0.0

    @property
    def verified_frac(self) -> float:
        """Share of the drafted tokens that were verified."""
        drafted = self.rounds * self.num_predicted
        return self.verified / drafted if drafted else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified tokens that were accepted."""
        return sum(self.accepted) / self.verified if self.verified else 0.0

    @property
    def per_position(self) -> list[float]:
        """Share of forwards that accepted slot j among those that had accepted all slots before it."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]


def walk(leading: Sequence[int], num_predicted: int) -> Acceptance:
    """Decode one answer on paper: what a real decode loop would accept, given the answer itself.

    For an answer that the target gives greedily this is exact, as every anchor that the loop visits has the context it
    would have there. Only a loop does not know where the answer stops, and verifies drafts past its end.

    Args:
        leading: For the answer's tokens 0..n-2, in order: leading hits of the block anchored there, already cut to
            the tokens that are left.
        num_predicted: J.
    """
    total, position, last = Acceptance(num_predicted), 0, len(leading)
    while position < last:
        num_accepted = leading[position]
        num_committed = min(num_accepted + 1, last - position)
        total.add_round(num_accepted, num_committed, min(num_predicted, last - position))
        position += num_committed
    return total
