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


def leading_hits(hits: Tensor) -> Tensor:
    """Hits before the first miss in each block.

    Args:
        hits: bool ``[A, J]``; a slot that does not count is a miss.
    Returns: int64 ``[A]``.
    """
    return torch.cumprod(hits.to(torch.int64), dim=1).sum(dim=1)


@dataclass
class Acceptance:
    """Counts over target forwards; lengths and rates are derived at the end.

    Attributes:
        rounds: Target forwards that verified a block.
        committed: Tokens they committed.
        reached: ``[J]``; forwards in which slot j was looked at, as all slots before it were accepted.
        accepted: ``[J]``; forwards in which it was accepted as well.
    """

    num_predicted: int
    rounds: int = 0
    committed: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reached = self.reached or [0] * self.num_predicted
        self.accepted = self.accepted or [0] * self.num_predicted

    def add_round(self, num_accepted: int, num_committed: int) -> None:
        """Count one verification: leading drafts accepted, and tokens committed by it.

        A round that a stop token or the limit cut short says nothing about the slot after its last accepted one.
        """
        self.rounds += 1
        self.committed += num_committed
        cut_short = num_committed <= num_accepted
        for j in range(self.num_predicted):
            if j < num_accepted:
                self.accepted[j] += 1
            if j < num_accepted or (j == num_accepted and not cut_short):
                self.reached[j] += 1

    def __iadd__(self, other: Acceptance) -> Acceptance:
        self.rounds += other.rounds
        self.committed += other.committed
        self.reached = [a + b for a, b in zip(self.reached, other.reached, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]
        return self

    @property
    def length(self) -> float:
        """Tokens per target forward, the bonus token included; 0 without a forward."""
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def per_position(self) -> list[float]:
        """Share of forwards that accepted slot j among those that had accepted all slots before it."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]


def walk(leading: Sequence[int], num_predicted: int) -> Acceptance:
    """Decode one answer on paper: what a real decode loop would accept, given the answer itself.

    For an answer that the target gives greedily this is exact, as every anchor that the loop visits has the context it
    would have there.

    Args:
        leading: For the answer's tokens 0..n-2, in order: leading hits of the block anchored there, already cut to
            the tokens that are left.
        num_predicted: J.
    """
    total, position, last = Acceptance(num_predicted), 0, len(leading)
    while position < last:
        num_accepted = leading[position]
        num_committed = min(num_accepted + 1, last - position)
        total.add_round(num_accepted, num_committed)
        position += num_committed
    return total
