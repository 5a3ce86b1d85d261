"""What one micro-batch asks of the drafter: drawn on the host, and sent to the device in one copy.

Everything random and everything of data-dependent size is settled here, so that the device gets arrays of fixed shapes
and is never asked anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from paceline.dflash.anchors import Anchors, batch_generator, sample_anchors
from paceline.dflash.blocks import BlockTargets, block_positions, make_noise_blocks, previous_tokens, tokens_left
from paceline.models.draft import DFlashDrafter
from paceline.records import TokenBatch


@dataclass(frozen=True)
class BlockInputs:
    """The blocks of a micro-batch, on the host or on the device.

    Attributes:
        anchors: int64 ``[A]`` row positions; in an empty slot 0, as its start is.
        starts: int64 ``[A]``; first position of each anchor's document.
        noise_ids: int64 ``[A, K]`` input tokens.
        positions: int64 ``[A, K]`` inside the document.
        context_positions: int64 ``[S]`` inside the document.
        labels, weights, order, previous: Of `BlockTargets`.
        left: int64 ``[A]``; tokens that could be committed, one more than the block predicts at most.
    """

    anchors: Tensor
    starts: Tensor
    noise_ids: Tensor
    positions: Tensor
    context_positions: Tensor
    labels: Tensor
    weights: Tensor
    order: Tensor
    previous: Tensor
    left: Tensor

    def targets(self, num_rows: int) -> BlockTargets:
        """What the loss wants of them."""
        return BlockTargets(self.labels, self.weights, self.order, num_rows, self.previous)


def draw_blocks(
    tokens: TokenBatch,
    drafter: DFlashDrafter,
    *,
    num_anchors: int,
    stratify: bool,
    gamma: float,
    dpace: bool,
    seed: int,
) -> tuple[Anchors, BlockInputs, int]:
    """Anchors of a micro-batch and all that follows from them, on the host.

    Returns: the anchors, the arrays, and the number of slots that reach the head.
    """
    shape = drafter.shape
    generator = batch_generator(seed, tokens.number)
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, num_anchors, generator, stratify=stratify)
    targets = drafter.targets(tokens, anchors, gamma, dpace)
    edges = torch.tensor(tokens.document_starts)
    document = torch.searchsorted(edges, anchors.positions, right=True) - 1
    inputs = BlockInputs(
        anchors=anchors.positions,
        starts=torch.where(anchors.keep, edges[document.clamp(min=0)], 0),
        noise_ids=make_noise_blocks(tokens.input_ids, anchors, shape.block_size, shape.mask_token_id),
        positions=block_positions(anchors, tokens.position_ids, shape.block_size),
        context_positions=tokens.position_ids,
        labels=targets.labels,
        weights=targets.weights,
        order=targets.order,
        previous=previous_tokens(tokens.input_ids, anchors, drafter.num_predicted),
        left=tokens_left(tokens.loss_mask, tokens.document_ids, anchors, drafter.num_predicted + 1),
    )
    return anchors, inputs, targets.num_rows


class Staging:
    """Arrays of fixed shapes in one buffer on a device; a batch's are written there by one copy, without waiting.

    Args:
        example: Arrays of the shapes and types to come.

    Attributes:
        inputs: The same arrays on the device, in place for good.
    """

    def __init__(self, example: BlockInputs, device: torch.device) -> None:
        self._places = []
        end = 0
        for field in fields(example):
            array: Tensor = getattr(example, field.name)
            begin = math.ceil(end / 16) * 16
            end = begin + array.numel() * array.element_size()
            self._places.append((field.name, begin, end, array.dtype, array.shape))
        self._num_bytes = end
        self._buffer = torch.zeros(end, dtype=torch.uint8, device=device)
        self.inputs = self._views(self._buffer)

    def write(self, inputs: BlockInputs) -> None:
        """Send a batch's arrays. The pinned memory comes from PyTorch's cache, which waits for copies by itself."""
        pinned = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=self._buffer.is_cuda)
        views = self._views(pinned)
        for name, *_ in self._places:
            getattr(views, name).copy_(getattr(inputs, name))
        self._buffer.copy_(pinned, non_blocking=True)

    def _views(self, buffer: Tensor) -> BlockInputs:
        return BlockInputs(
            **{name: buffer[begin:end].view(dtype).view(shape) for name, begin, end, dtype, shape in self._places}
        )
