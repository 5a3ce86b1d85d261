"""How many drafted tokens to have verified, from what a drafter believes of each.

Confidence c_j is the estimate that the target accepts the (j + 1)-th drafted token if it has accepted all before it. It
must not depend on that token itself, nor on later ones: then leaving tokens unverified changes no output.
Source: DSpark, arXiv:2607.05147, section 4 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def cut_below(confidence: Tensor, threshold: float) -> Tensor:
    """Tokens before the first whose confidence is below a threshold, int64 ``[R]`` of ``[R, J]``; all at 0."""
    return (confidence >= threshold).to(torch.int64).cumprod(1).sum(1)


def share_lengths(confidence: Sequence[Sequence[float]], steps_per_s: Callable[[int], float]) -> list[int]:
    """Drafted tokens to verify for each of several requests, so that the most tokens a second are expected.

    Tokens are admitted one at a time in the order of their survival, the product of confidences up to them, until one
    does not raise (tokens expected) x (forwards a second). It stops there, though a later one might: an admission that
    looked at what comes after it would let drafted tokens decide whether they are verified, and bend the output.

    Args:
        confidence: Of each request, 0 to 1.
        steps_per_s: Target forwards a second by tokens in the forward, anchors included.
    Returns: tokens of each request, leading ones.
    """
    survivals = []
    for request, row in enumerate(confidence):
        survival = 1.0
        for value in row:
            survival *= value
            survivals.append((survival, request))
    lengths = [0] * len(confidence)
    expected, num_tokens = float(len(confidence)), len(confidence)
    rate = expected * steps_per_s(num_tokens)
    # stable: of a request with equal survivals the earlier token comes first
    for survival, request in sorted(survivals, key=lambda each: -each[0]):
        with_it = (expected + survival) * steps_per_s(num_tokens + 1)
        if with_it <= rate:
            break
        expected, num_tokens, rate = expected + survival, num_tokens + 1, with_it
        lengths[request] += 1
    return lengths
