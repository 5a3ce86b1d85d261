"""Weighted cross-entropy of a frozen output head, chunk by chunk, with the gradient made in the forward pass.

Full logits never exist: one chunk of rows is multiplied with the head, turned into losses, hits and the gradient of its
hidden rows, and forgotten. The head is frozen, so the hidden rows' gradient is the only one, and nothing is recomputed
in the backward pass. Rows that do not count need not reach the head: a permutation puts those that do first. On CUDA
the rows are worked on by the kernels of `linear_cross_entropy_triton`; what stands here is the same in plain tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_BYTES = 64 << 20
"""Bytes of one chunk's float32 logits: 340 rows at a vocabulary of 49,152; small enough for a laptop, large enough for
full matmul speed."""

CHUNK_ROWS = 2048
"""Rows of one chunk on CUDA: 0.6 GiB of bfloat16 logits at a vocabulary of 151,936. In a prototype
on an H200 1,024 rows were 1 % slower, and more than 2,048 no faster."""


def transformed(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Bare float32 products as the target has them: scaled, then capped."""
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits


def stored_gradient(gradient: Tensor, logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Gradient of bare products from that of the logits that `transformed` made of them."""
    if softcap is not None:
        gradient = gradient * (1 - (logits / softcap) ** 2)
    if scale != 1.0:
        gradient = gradient * scale
    return gradient


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
        return self.transformed((hidden @ self.weight.T).float())

    def transformed(self, logits: Tensor) -> Tensor:
        """Bare float32 products as logits. Their order stays."""
        return transformed(logits, self.scale, self.softcap)

    def stored_gradient(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Gradient of the bare products ``hidden @ weight.T`` from that of these logits."""
        return stored_gradient(gradient, logits, self.scale, self.softcap)

    def rows(self, token_ids: Tensor) -> Head:
        """A head over some tokens only, int64 ``[R]``: its logit i is that of ``token_ids[i]``."""
        return Head(self.weight[token_ids.to(self.weight.device)], self.softcap, self.scale)

    def to(self, dtype: torch.dtype) -> Head:
        """The same head with its weight in another type."""
        return Head(self.weight.to(dtype), self.softcap, self.scale)


@dataclass(frozen=True)
class DPace:
    """Loss weights that follow the drafter's confidence, in place of a fixed decay.

    With q_k = exp(-nll_k) and s_k = (1 - floor) q_k + floor, slot j weighs the sum over m >= j of prod_{i <= m} s_i:
    how many tokens at slot j and after it are expected to be accepted. No gradient flows through the weights.
    A slot that does not count is passed over: it has weight 0, adds nothing to the sums of the slots before it, and
    its factor is 1, so that it does not end the block either.
    Source: D-PACE, arXiv:2605.18810; slots that do not count as in speculators 0.9.0, `dpace_loss_decay` in
    `speculators/losses/utils.py`, which divides the loss by the number of slots that count, not by these weights.

    Attributes:
        block: J, rows of one block.
        floor: Least factor of a slot, 0 to 1; 0.5 is speculators' default too.
    """

    block: int
    floor: float = 0.5

    def weights(self, nll: Tensor, counts: Tensor) -> Tensor:
        """float32 ``[R]`` weights of whole blocks, from their losses ``[R]`` and which rows count, bool ``[R]``."""
        confidence = torch.exp(-nll).view(-1, self.block)
        counts = counts.view(-1, self.block)
        smooth = ((1.0 - self.floor) * confidence + self.floor).where(counts, 1.0)
        reached = smooth.cumprod(1) * counts  # prod_{i <= m} s_i, 0 where slot m does not count
        return (reached.flip(1).cumsum(1).flip(1) * counts).flatten()


class Candidates(NamedTuple):
    """The best few tokens of each row.

    Attributes:
        logits: float32 ``[T, C]``, descending, differentiable; 0 in rows that did not reach the head, and anything in
            rows that do not count.
        ids: int64 ``[T, C]``.
    """

    logits: Tensor
    ids: Tensor


class RowLosses(NamedTuple):
    """What a loss over rows gives.

    Attributes:
        loss: float32 scalar, sum of weight times loss; the gradient flows to the hidden rows.
        weight: float32 scalar, the sum of the weights that were used.
        hits: bool ``[T]``. A label that shares the best logit with other tokens is a hit; bfloat16 logits tie now and
            then, so that the hits flatter a little. False in rows that did not reach the head.
        candidates: If any were asked for.
    """

    loss: Tensor
    weight: Tensor
    hits: Tensor
    candidates: Candidates | None = None


def chunk_rows(dpace: DPace | None) -> int:
    """Rows of one chunk on CUDA: whole blocks where the loss weighs those. One row more than a multiple of it costs a
    whole chunk."""
    return CHUNK_ROWS if dpace is None else max(1, CHUNK_ROWS // dpace.block) * dpace.block


def host_chunk_rows(head: Head, dpace: DPace | None) -> int:
    """The same on the CPU, by the bytes of a chunk's float32 logits."""
    rows = max(1, CHUNK_BYTES // (4 * head.weight.shape[0]))
    return rows if dpace is None else max(1, rows // dpace.block) * dpace.block


def weighted_linear_cross_entropy(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    weights: Tensor,
    rows: Tensor | None = None,
    num_rows: int | None = None,
    dpace: DPace | None = None,
    num_candidates: int = 0,
) -> RowLosses:
    """Sum of ``weights * nll`` over the rows that count, the sum of the weights, and whether the best logit hits.

    Nothing asks the device, and shapes follow from T and `num_rows` alone, so that a CUDA graph can hold the call. The
    memory it takes beside the gradient is one chunk's.

    Args:
        hidden: ``[T, D]`` in the head's dtype, on its device like all that follows; differentiable.
        labels: int64 ``[T]``.
        weights: float32 ``[T]``. With `dpace`: 1 where a row counts and 0 where not, multiplied with its weights.
        rows: int64 ``[T]``, a permutation that puts the rows first that shall reach the head; None: as they stand.
        num_rows: How many of them do; None: all. Those past it have no loss, no hit and no gradient, whatever
            their label and weight.
        dpace: Weights by confidence. Rows then come in whole blocks: T and `num_rows` are multiples of J, and in `rows`
            each block's rows stay together and in order.
        num_candidates: C, best tokens of each row to give as well.
    Returns: the sums, D-PACE's weights in that of the weights; hits and candidates in the order of `hidden`.
    """
    num_rows = len(hidden) if num_rows is None else num_rows
    assert hidden.dtype == head.weight.dtype and num_rows <= len(hidden) == len(labels) == len(weights)
    assert rows is None or len(rows) == len(hidden)
    assert dpace is None or (len(hidden) % dpace.block == 0 and num_rows % dpace.block == 0)
    loss, weight, hits, logits, ids = _WeightedLinearCrossEntropy.apply(
        hidden, head, labels, weights, rows, num_rows, dpace, num_candidates
    )
    return RowLosses(loss, weight, hits, Candidates(logits, ids) if num_candidates else None)


def _has_kernels(device: torch.device) -> bool:
    """Whether the rows are worked on by Triton kernels."""
    return device.type == "cuda"


class _WeightedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Head,
        labels: Tensor,
        weights: Tensor,
        rows: Tensor | None,
        num_rows: int,
        dpace: DPace | None,
        num_candidates: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        best = empty_candidates(hidden, num_candidates)
        if _has_kernels(hidden.device):
            from paceline.kernels.linear_cross_entropy_triton import forward  # Triton is there on CUDA hosts alone

            loss, weight, hits, gradient = forward(hidden, head, labels, weights, rows, num_rows, dpace, best)
        else:
            loss, weight, hits, gradient = _forward(hidden, head, labels, weights, rows, num_rows, dpace, best)
        ctx.head = head
        ctx.save_for_backward(gradient, best.logits, best.ids)
        ctx.mark_non_differentiable(weight, hits, best.ids)
        ctx.set_materialize_grads(False)
        return loss, weight, hits, best.logits, best.ids

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient, logits, ids = ctx.saved_tensors
        grad = backward_of_rows(ctx.head, gradient, Candidates(logits, ids), grad_loss, others[2])
        return grad, None, None, None, None, None, None, None


GROUP = 128
"""Neighbouring tokens of which `best_of_rows` looks at the best one first. It divides the vocabularies of today."""

MOST_BY_KERNEL = 64
"""Candidates of a row that the kernel finds: it holds the tokens among which it chooses in registers."""


def best_of_rows(logits: Tensor, num: int) -> Candidates:
    """The `num` largest of each row ``[..., V]``, descending: values of the logits' type, and ids.

    A selection among all tokens passes over them many times on a GPU. The best of every group takes one pass, and the
    largest are in the groups with the largest best ones. Of tokens that are as good as each other any may be taken.
    On CUDA this is the kernel of `best_of_rows_triton`, through which no gradient flows.
    """
    vocab_size = logits.shape[-1]
    if vocab_size <= num * GROUP:
        return Candidates(*logits.topk(num, dim=-1))
    if _has_kernels(logits.device) and num <= MOST_BY_KERNEL:
        from paceline.kernels.best_of_rows_triton import best_of_rows  # Triton is there on CUDA hosts alone

        return Candidates(*best_of_rows(logits, num))
    if vocab_size % GROUP:
        return Candidates(*logits.topk(num, dim=-1))
    groups = logits.unflatten(-1, (-1, GROUP))  # [..., V / GROUP, GROUP]
    chosen = groups.amax(-1).topk(num, dim=-1).indices  # [..., C]
    members = groups.gather(-2, chosen[..., None].expand(*chosen.shape, GROUP)).flatten(-2)
    values, places = members.topk(num, dim=-1)
    return Candidates(values, chosen.gather(-1, places // GROUP) * GROUP + places % GROUP)


def empty_candidates(hidden: Tensor, num: int) -> Candidates:
    """Room for the candidates of all rows."""
    ids = torch.zeros(len(hidden), num, dtype=torch.int64, device=hidden.device)
    return Candidates(torch.zeros(len(hidden), num, dtype=torch.float32, device=hidden.device), ids)


def backward_of_rows(
    head: Head, gradient: Tensor, best: Candidates, grad_loss: Tensor | None, grad_logits: Tensor | None
) -> Tensor | None:
    """Gradient of hidden rows: that made with the loss, times the loss's own, and what comes by the candidates.

    Of a candidate's logit it is the head's row, so that few rows of the head are read for it and no logits made again.
    """
    # The factor is rounded to the hidden rows' type; summed losses are differentiated with 1, which is exact.
    total = None if grad_loss is None else gradient * grad_loss.to(gradient.dtype)
    if grad_logits is None or not best.ids.shape[1]:
        return total
    stored = head.stored_gradient(grad_logits, best.logits).to(head.weight.dtype)
    through = F.embedding_bag(best.ids, head.weight, per_sample_weights=stored, mode="sum")
    return through if total is None else total + through


def _forward(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    weights: Tensor,
    rows: Tensor | None,
    num_rows: int,
    dpace: DPace | None,
    best: Candidates,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, sum of weights, hits, and the gradient of the hidden rows; fills in the candidates."""
    gradient = torch.zeros_like(hidden)
    hits = torch.zeros_like(labels, dtype=torch.bool)
    loss = hidden.new_zeros((), dtype=torch.float32)
    weight_sum = torch.zeros_like(loss)
    per_chunk = host_chunk_rows(head, dpace)
    for start in range(0, num_rows, per_chunk):
        chunk = slice(start, min(start + per_chunk, num_rows))
        index = chunk if rows is None else rows[chunk]
        logits = head.logits(hidden[index])
        if num_candidates := best.ids.shape[1]:
            best.logits[index], best.ids[index] = best_of_rows(logits, num_candidates)
        label, weight = labels[index, None], weights[index]
        top = logits.amax(dim=1, keepdim=True)
        exp = (logits - top).exp_()
        total = exp.sum(dim=1, keepdim=True)
        at_label = logits.gather(1, label)
        hits[index] = (at_label >= top)[:, 0]
        nll = (total.log() + top - at_label)[:, 0]
        if dpace is not None:
            weight = weight * dpace.weights(nll, weight != 0)
        loss += (weight * nll).sum()
        weight_sum += weight.sum()
        # d loss / d logits = weight * (softmax - onehot), in place of the exponentials
        weight = weight[:, None]
        grad_logits = exp.mul_(weight / total)
        grad_logits.scatter_add_(1, label, -weight)
        gradient[index] = head.stored_gradient(grad_logits, logits).to(head.weight.dtype) @ head.weight
    return loss, weight_sum, hits, gradient
