"""Losses of a frozen output head that look at the target's whole distribution, chunk by chunk, as cross-entropy is.

    ce * nll(label) + kl * KL(target || drafter) + l1 * sum over tokens |drafter - target|

The target's distribution is made again from its last hidden state, for the rows of a chunk alone. A bias of low rank
may be added to the drafter's logits, whose factors learn as well. Gradients are made in the forward pass. What is done
to a chunk is plain tensor code; on CUDA it is the kernel of `linear_mixed_loss_triton`, and with D-PACE the plain code,
compiled.
Shape letters: T rows, V vocabulary, D hidden, E rank of the bias, S positions of the target, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.kernels.compiled import run_compiled
from paceline.kernels.linear_cross_entropy import (
    Candidates,
    DPace,
    Head,
    RowLosses,
    backward_of_rows,
    best_of_rows,
    chunk_rows,
    empty_candidates,
    host_chunk_rows,
    stored_gradient,
    transformed,
)


@dataclass(frozen=True)
class Mix:
    """Factors of the terms; all are of a row's distribution at temperature 1. `l1` is not halved: L1 is twice the total
    variation."""

    ce: float = 1.0
    kl: float = 0.0
    l1: float = 0.0

    @property
    def needs_target(self) -> bool:
        """Whether a term compares with the target's distribution."""
        return self.kl != 0.0 or self.l1 != 0.0


class Bias(NamedTuple):
    """A bias of low rank on the drafter's logits, ``rows @ table.T``; both differentiable.

    Attributes:
        rows: ``[T, E]``.
        table: ``[V, E]``, in the same type.
    """

    rows: Tensor
    table: Tensor


class MixedLosses(NamedTuple):
    """Attributes:
    rows: As of cross-entropy.
    overlap: float32 ``[T]``, 1 - L1 / 2: the chance that a token drawn by the drafter is accepted. No gradient;
        anything in rows that do not count.
    """

    rows: RowLosses
    overlap: Tensor


def linear_mixed_loss(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    weights: Tensor,
    rows: Tensor | None,
    num_rows: int,
    target_hidden: Tensor,
    target_rows: Tensor,
    mix: Mix,
    *,
    bias: Bias | None = None,
    dpace: DPace | None = None,
    num_candidates: int = 0,
) -> MixedLosses:
    """Sum of ``weights`` times the mixed loss over the rows that count.

    Args:
        hidden, head, labels, weights, rows, num_rows, dpace, num_candidates: As of `weighted_linear_cross_entropy`;
            D-PACE's weights follow the cross-entropy.
        target_hidden: ``[S, D]``, the target's last hidden states, after its final norm; no gradient.
        target_rows: int64 ``[T]``, where in them the target's word on a row stands.
        bias: Added to the drafter's logits behind scale and cap.
    """
    loss, weight, hits, overlap, logits, ids = _LinearMixedLoss.apply(
        hidden, head, labels, weights, rows, num_rows, target_hidden, target_rows, mix,
        *(bias or (None, None)), dpace, num_candidates,
    )  # fmt: skip
    found = Candidates(logits, ids) if num_candidates else None
    return MixedLosses(RowLosses(loss, weight, hits, found), overlap)


class _LinearMixedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Head,
        labels: Tensor,
        weights: Tensor,
        rows: Tensor | None,
        num_rows: int,
        target_hidden: Tensor,
        target_rows: Tensor,
        mix: Mix,
        bias_rows: Tensor | None,
        bias_table: Tensor | None,
        dpace: DPace | None,
        num_candidates: int,
    ) -> tuple[Tensor, ...]:
        gradient = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        best = empty_candidates(hidden, num_candidates)
        hits = torch.zeros_like(labels, dtype=torch.bool)
        overlap = torch.zeros(len(hidden), device=hidden.device)
        loss, weight_sum = (torch.zeros((), device=hidden.device) for _ in range(2))
        grad_bias_rows = None if bias_rows is None else torch.zeros_like(bias_rows)
        grad_table = None if bias_table is None else torch.zeros_like(bias_table, dtype=torch.float32)
        per_chunk = chunk_rows(dpace) if hidden.is_cuda else host_chunk_rows(head, dpace)
        is_bare = head.scale == 1.0 and head.softcap is None  # then the bias is a part of the products
        for start in range(0, num_rows, per_chunk):
            chunk = slice(start, min(start + per_chunk, num_rows))
            index = chunk if rows is None else rows[chunk]
            weight, idle = weights[index], (weights[index] == 0)[:, None]  # NaN times 0 would be NaN
            products = hidden[index].masked_fill(idle, 0.0) @ head.weight.T
            target = target_hidden[target_rows[index]].masked_fill(idle, 0.0).to(head.weight.dtype) @ head.weight.T
            if num_candidates:
                top, best.ids[index] = best_of_rows(products, num_candidates)
                best.logits[index] = head.transformed(top.float())
            factors = None if bias_rows is None else bias_rows[index].masked_fill(idle, 0.0)
            added = None
            if factors is not None and bias_table is not None:
                if is_bare:
                    torch.addmm(products, factors, bias_table.T, out=products)
                else:
                    added = factors @ bias_table.T
            found = _worked_on(products, target, added, labels[index], weight, head.scale, head.softcap, mix, dpace)
            chunk_loss, weight, hits[index], overlap[index], grad_products, grad_added = found
            loss += chunk_loss
            weight_sum += weight
            gradient[index] = grad_products @ head.weight
            if factors is not None and bias_table is not None:
                assert grad_bias_rows is not None and grad_table is not None
                grad_added = grad_products if grad_added is None else grad_added
                grad_bias_rows[index] = grad_added @ bias_table
                grad_table += grad_added.T @ factors
            del products, target, added, found, grad_products, grad_added  # or the next would be made beside them
        ctx.head = head
        saved = [gradient, best.logits, best.ids]
        ctx.has_bias = bias_table is not None
        if grad_bias_rows is not None and grad_table is not None and bias_table is not None:
            saved += [grad_bias_rows, grad_table.to(bias_table.dtype)]
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(weight_sum, hits, overlap, best.ids)
        ctx.set_materialize_grads(False)
        return loss, weight_sum, hits, overlap, best.logits, best.ids

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient, logits, ids, *of_bias = ctx.saved_tensors
        grad = backward_of_rows(ctx.head, gradient, Candidates(logits, ids), grad_loss, others[3])
        grads_of_bias = [None if grad_loss is None else each * grad_loss.to(each.dtype) for each in of_bias]
        return (grad, *[None] * 8, *(grads_of_bias or (None, None)), None, None)


def _has_kernels(device: torch.device) -> bool:
    """Whether the rows are worked on by a Triton kernel, or by compiled code."""
    return device.type == "cuda"


Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]


def _worked_on(
    products: Tensor,
    target: Tensor,
    added: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    scale: float,
    softcap: float | None,
    mix: Mix,
    dpace: DPace | None,
) -> Rows:
    """What `_rows_of_chunk` says; `products` and `added` may be overwritten."""
    rest = labels, weights, scale, softcap
    if not _has_kernels(products.device):
        return _rows_of_chunk(products, target, added, *rest, mix, dpace)
    if dpace is not None:  # whose weights need the losses of a whole block first
        found: Rows = run_compiled(_rows_of_chunk, products, target, added, *rest, mix, dpace)
        return found
    from paceline.kernels.linear_mixed_loss_triton import rows_of_chunk  # Triton is there on CUDA hosts alone

    return rows_of_chunk(products, target, added, *rest, (mix.ce, mix.kl, mix.l1))


def _rows_of_chunk(
    products: Tensor,
    target: Tensor,
    added: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    scale: float,
    softcap: float | None,
    mix: Mix,
    dpace: DPace | None,
) -> Rows:
    """Losses of a chunk's rows and the gradients of its logits.

    Args:
        products, target: ``[n, V]``, bare products of the head with the drafter's and the target's hidden rows.
        added: ``[n, V]``, the bias, unless there is none or it is in the products.
    Returns: sum of the loss, sum of the weights, hits ``[n]``, overlap ``[n]``, and the gradients of `products` and of
        `added`, in their type.
    """
    own = transformed(products.float(), scale, softcap)
    log_p = (own if added is None else own + added.float()).log_softmax(1)
    log_t = transformed(target.float(), scale, softcap).log_softmax(1)
    p, t = log_p.exp(), log_t.exp()
    at_label = log_p.gather(1, labels[:, None])
    nll = -at_label[:, 0]
    if dpace is not None:
        weights = weights * dpace.weights(nll, weights != 0)
    difference = p - t
    distance = torch.linalg.vector_norm(difference, ord=1, dim=1)
    row_loss = mix.ce * nll + mix.l1 * distance
    gradient = (mix.ce + mix.kl) * p
    if mix.kl:
        row_loss = row_loss + mix.kl * (torch.linalg.vecdot(t, log_t) - torch.linalg.vecdot(t, log_p))
        gradient.sub_(t, alpha=mix.kl)
    if mix.l1:
        sign = difference.sign_()
        sign.sub_(torch.linalg.vecdot(sign, p)[:, None])
        gradient.addcmul_(p, sign, value=mix.l1)
    gradient.scatter_add_(1, labels[:, None], torch.full_like(at_label, -mix.ce))
    gradient.mul_(weights[:, None])
    return (
        (weights * row_loss).sum(),
        weights.sum(),
        (at_label >= log_p.amax(1, keepdim=True))[:, 0],
        1 - distance / 2,
        stored_gradient(gradient, own, scale, softcap).to(products.dtype),
        None if added is None else gradient.to(added.dtype),
    )
