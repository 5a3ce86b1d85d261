"""Drafts that are drawn, and how a target decides on them: speculative sampling.

A token d that was drawn from q is accepted with probability min(1, p(d) / q(d)); in place of the first that is not, one
is drawn from max(p - q, 0), rescaled; behind the last that is accepted, one from p. What comes out has the target's
distribution p, whatever q is, if q is what the token was drawn from: given the tokens before it, and not an average.
Shape letters: R blocks, J drafted tokens, n of them that are verified, C tokens that could be drawn, V vocabulary.
Source: Leviathan et al., arXiv:2211.17192, and Chen et al., arXiv:2302.01318.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Chance(NamedTuple):
    """What drafts are drawn with.

    Attributes:
        temperature: Above 0.
        uniforms: float64 ``[R, J]``, at least 0 and below 1: a draw for each token.
    """

    temperature: float
    uniforms: Tensor

    def draw(self, scores: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """A slot's draws from softmax(scores / temperature): indices int64 ``[R]``, and what they were drawn from.

        Args:
            scores: ``[R, C]``.
        Returns: also float32 ``[R, C]``.
        """
        probs = torch.softmax(scores.float() / self.temperature, dim=-1)
        return draw(probs, self.uniforms[:, slot]), probs


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Indices drawn in proportion to weights ``[..., C]``, one for each of uniforms ``[...]``; int64 ``[...]``.

    A weight of zero is never drawn. Sums are float64: over a large vocabulary float32 loses rare tokens.
    """
    sums = weights.double().cumsum(-1)
    places = (uniforms * sums[..., -1])[..., None]
    return torch.searchsorted(sums, places, right=True)[..., 0].clamp(max=weights.shape[-1] - 1)


def spread(probs: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Probabilities ``[..., C]`` of some tokens, with zeros for all others: ``[..., V]``; `ids` None: all tokens'."""
    return probs if ids is None else probs.new_zeros(*probs.shape[:-1], vocab_size).scatter(-1, ids, probs)


def judge(p: Tensor, q: Tensor, drafted: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Which drafted tokens a target accepts, and the token that it adds; the host does not wait for the device.

    Args:
        p: ``[R, n + 1, V]``, the target's distributions at the drafted tokens' places and at the one behind them.
        q: ``[R, n, V]``, what each token was drawn from.
        drafted: int64 ``[R, n]``.
        uniforms: float64 ``[R, n + 1]``, at least 0 and below 1.
    Returns: int64 ``[R]`` leading tokens that are accepted, and int64 ``[R]`` the token behind them.
    """
    p, q, places = p.double(), q.double(), drafted[..., None]
    chances = q.gather(-1, places)[..., 0] * uniforms[:, :-1]
    num_accepted = (chances < p[:, :-1].gather(-1, places)[..., 0]).to(torch.int64).cumprod(1).sum(1)
    at = num_accepted[:, None, None].expand(-1, 1, p.shape[-1])
    wanted, taken = (each.gather(1, at)[:, 0] for each in (p, torch.nn.functional.pad(q, (0, 0, 0, 1))))  # [R, V]
    residual = (wanted - taken).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, wanted)  # equal within rounding
    return num_accepted, draw(residual, uniforms[:, -1])
