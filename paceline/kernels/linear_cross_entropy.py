"""Weighted cross-entropy of a frozen output head, chunk by chunk, with the gradient made in the forward pass.

Full logits never exist: one chunk of rows is multiplied with the head, turned into losses, hits and the gradient of its
hidden rows, and forgotten. The head is frozen, so the hidden rows' gradient is the only one, and nothing is recomputed
in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
"""Bytes of one chunk's float32 logits: 340 rows at a vocabulary of 49,152; small enough for a laptop, large enough for
full matmul speed."""


@dataclass(frozen=True)
class Head:
    """The target's frozen output head.

    Attributes:
        weight: ``[V, D]``.
        softcap: Logits become ``softcap * tanh(logits / softcap)`` (Gemma 2); None: as they are.
        scale: Logits are multiplied by it before the soft cap.
    """

    weight: Tensor
    softcap: float | None = None
    scale: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[..., V]`` logits of ``[..., D]`` hidden rows."""
        logits = (hidden @ self.weight.T).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def rows(self, token_ids: Tensor) -> Head:
        """A head over some tokens only, int64 ``[R]``: its logit i is that of ``token_ids[i]``."""
        return Head(self.weight[token_ids.to(self.weight.device)], self.softcap, self.scale)

    def to(self, dtype: torch.dtype) -> Head:
        """The same head with its weight in another type."""
        return Head(self.weight.to(dtype), self.softcap, self.scale)


def weighted_linear_cross_entropy(hidden: Tensor, head: Head, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of ``weights * nll`` over rows, and whether the arg-max hits the label.

    Args:
        hidden: ``[R, D]`` in the head's dtype; differentiable.
        labels: int64 ``[R]``.
        weights: float32 ``[R]``.
    Returns: float32 scalar (the gradient flows to `hidden`) and bool ``[R]``.
    """
    loss, hits = _WeightedLinearCrossEntropy.apply(hidden, head, labels, weights)
    return loss, hits


class _WeightedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Head, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(hidden)
        hits = torch.empty_like(labels, dtype=torch.bool)
        loss = hidden.new_zeros((), dtype=torch.float32)
        rows = max(1, CHUNK_BYTES // (4 * head.weight.shape[0]))
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            logits = head.logits(hidden[chunk])
            label = labels[chunk, None]
            top, best = logits.max(dim=1, keepdim=True)
            hits[chunk] = (best == label)[:, 0]
            exp = (logits - top).exp_()
            total = exp.sum(dim=1, keepdim=True)
            at_label = logits.gather(1, label)
            loss += (weights[chunk] * (total.log() + top - at_label)[:, 0]).sum()
            # d loss / d logits = weight * (softmax - onehot), in place of the exponentials
            weight = weights[chunk, None]
            grad_logits = exp.mul_(weight / total)
            grad_logits.scatter_add_(1, label, -weight)
            if head.softcap is not None:
                grad_logits *= 1 - (logits / head.softcap) ** 2
            if head.scale != 1.0:
                grad_logits *= head.scale
            gradient[chunk] = grad_logits.to(head.weight.dtype) @ head.weight
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None
