"""What a block holds: its input tokens, its positions, its labels and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.dflash.anchors import Anchors


@dataclass(frozen=True)
class BlockTargets:
    """What the slots of a row's blocks have to predict, and which of them reach the output head.

    Attributes:
        labels: int64 ``[A, J]``, numbered as the head's rows; anything where a slot does not count.
        weights: float32 ``[A, J]``, 0 where a slot does not count.
        order: int64 ``[A*J]``; all slots, those that count first.
        num_rows: Slots that reach the head, the first of `order`; known to the host, so that the device need not be
            asked.
        previous: int64 ``[A, J]``, the target's ids of the tokens right before those to predict, for kinds that draft
            one token after another; anything where a slot does not count. None: not known.
    """

    labels: Tensor
    weights: Tensor
    order: Tensor
    num_rows: int
    previous: Tensor | None = None

    @classmethod
    def of(
        cls, labels: Tensor, weights: Tensor, whole_blocks: bool = False, previous: Tensor | None = None
    ) -> BlockTargets:
        """Order the slots of these labels and weights.

        Args:
            whole_blocks: A block with a slot that counts reaches the head as a whole.
        """
        counts = weights > 0
        if whole_blocks:
            counts = counts.any(1, keepdim=True).expand_as(counts)
        counts = counts.flatten()
        order = torch.cat([counts.nonzero().flatten(), (~counts).nonzero().flatten()])
        return cls(labels, weights, order, int(counts.sum()), previous)


def make_noise_blocks(input_ids: Tensor, anchors: Anchors, block_size: int, mask_token_id: int) -> Tensor:
    """Block inputs: slot 0 is the anchor's token, slots 1..K-1 are the mask token; an empty slot is all mask.

    Args:
        input_ids: int64 ``[S]``.
    Returns: int64 ``[A, K]``.
    """
    noise_ids = input_ids.new_full((len(anchors.positions), block_size), mask_token_id)
    noise_ids[:, 0] = torch.where(anchors.keep, input_ids[anchors.positions], mask_token_id)
    return noise_ids


def block_positions(anchors: Anchors, position_ids: Tensor, block_size: int) -> Tensor:
    """Positions of the block's slots inside the anchor's document: a, a + 1, ..., a + K - 1, also past its end.

    Args:
        position_ids: int64 ``[S]``, restarting in every document.
    Returns: int64 ``[A, K]``; an empty slot counts from the row's first position.
    """
    return position_ids[anchors.positions][:, None] + torch.arange(block_size)


def block_labels(
    input_ids: Tensor,
    loss_mask: Tensor,
    document_ids: Tensor,
    anchors: Anchors,
    block_size: int,
    label_shift: int = 0,
) -> tuple[Tensor, Tensor]:
    """Tokens that the block has to predict, and which of them count.

    With `label_shift` 0 slot k predicts the token at ``anchor + k`` and slot 0, the anchor itself, predicts nothing:
    columns are slots 1..K-1. With 1 slot k predicts ``anchor + k + 1``: columns are slots 0..K-1. Column j is
    therefore always the (j + 1)-th token after the anchor.

    Args:
        input_ids: int64 ``[S]``.
        loss_mask: bool ``[S]``.
        document_ids: int ``[S]``.
    Returns: labels int64 ``[A, J]`` (0 where not valid) and valid bool ``[A, J]``: inside the row and the anchor's
        document, supervised, and of a kept anchor.
    """
    offsets = torch.arange(1, block_size + label_shift)
    positions = anchors.positions[:, None] + offsets
    inside = positions < len(input_ids)
    positions = positions.clamp(max=len(input_ids) - 1)
    same_document = document_ids[positions] == document_ids[anchors.positions][:, None]
    valid = inside & same_document & loss_mask[positions] & anchors.keep[:, None]
    return torch.where(valid, input_ids[positions], 0), valid


def previous_tokens(input_ids: Tensor, anchors: Anchors, num_predicted: int) -> Tensor:
    """The token right before each that a block predicts: column j has the j-th token after the anchor.

    Args:
        input_ids: int64 ``[S]``.
    Returns: int64 ``[A, J]``; past the row's end its last token.
    """
    positions = anchors.positions[:, None] + torch.arange(num_predicted)
    return input_ids[positions.clamp(max=len(input_ids) - 1)]


def tokens_left(loss_mask: Tensor, document_ids: Tensor, anchors: Anchors, at_most: int) -> Tensor:
    """Supervised tokens that follow each anchor in its document without a gap, counted up to `at_most`.

    Args:
        loss_mask: bool ``[S]``.
        document_ids: int ``[S]``.
    Returns: int64 ``[A]``; 0 in empty slots.
    """
    _, valid = block_labels(torch.zeros_like(document_ids), loss_mask, document_ids, anchors, at_most + 1)
    return torch.cumprod(valid.to(torch.int64), dim=1).sum(dim=1)


def decay_weights(num_predicted: int, gamma: float) -> Tensor:
    """Loss weight of each predicted token: an early miss also wastes the tokens after it.

    w_j = exp(-j / gamma) for the (j + 1)-th token after the anchor, so the first weighs 1.
    Source: DFlash, arXiv:2602.06036, the position-dependent loss weight.

    Args:
        num_predicted: J, predicted tokens of a block; at least 1.
        gamma: Decay length in positions, > 0.
    Returns: float32 ``[J]``.
    Raises: ValueError if gamma <= 0 or num_predicted < 1.
    """
    if gamma <= 0 or num_predicted < 1:
        raise ValueError(f"decay_weights needs gamma > 0 and a predicted token, got {gamma=}, {num_predicted=}")
    return torch.exp(-torch.arange(num_predicted, dtype=torch.float32) / gamma)
