"""Acceptance length on held-out rows without decoding: every block of an answer is drafted at once, teacher-forced.

Where the answers are what the target says greedily, the result is that of the decode loop exactly, many times cheaper:
each anchor that the loop would visit has the context here that it would have there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.data.dataset import Dataset
from paceline.dflash.acceptance import Acceptance, leading_hits, walk
from paceline.dflash.anchors import eligible_positions, make_anchors
from paceline.dflash.blocks import block_labels, block_positions, make_noise_blocks
from paceline.kernels.attention import BlockLayout
from paceline.kernels.linear_cross_entropy import Head
from paceline.models.draft import ContextKV, DFlashDrafter
from paceline.models.target import FeatureCache, Target

KEPT_BYTES = 1 << 30
"""Host memory for features of held-out rows; rows past it run through the target at every measurement."""


class Validation:
    """Held-out rows, measured again and again while a drafter trains.

    Args:
        target: The target, with its embedding and head.
        dataset: Where the rows are.
        rows: Row numbers.
        num_anchors: Blocks drafted at a time; it bounds the memory, as the training step's A does there.
        dtype: Type of the drafter's weights, as in training.
        document_features: Features of a document, where `target` does not make them.
        row_features: Features of a data set row's document, where they are on disk.
    """

    def __init__(
        self,
        target: Target,
        dataset: Dataset,
        rows: Sequence[int],
        *,
        num_anchors: int,
        dtype: torch.dtype = torch.float32,
        document_features: Callable[[Tensor], Tensor] | None = None,
        row_features: Callable[[int], Tensor] | None = None,
    ) -> None:
        self._target = target
        self._document_features = document_features or target.document_features
        self._row_features = row_features
        self._dataset = dataset
        self._rows = rows
        self._num_anchors = num_anchors
        self._dtype = dtype
        self._head = target.head.to(dtype)
        self._kept = FeatureCache(KEPT_BYTES)

    @torch.no_grad()
    def measure(self, drafter: DFlashDrafter, should_stop: Callable[[], object] = lambda: False) -> Acceptance | None:
        """Acceptance pooled over every answer of the rows, the first token of an answer given by the prefill.

        Args:
            should_stop: Asked before each row; true-like ends the measurement.
        Returns: None if it was ended.
        """
        total = Acceptance(drafter.num_predicted)
        head = drafter.own_head(self._head)
        for row in self._rows:
            if should_stop():
                return None
            input_ids, loss_mask = self._dataset.row(int(row))
            leading = self._leading(drafter, head, input_ids, loss_mask, self._features(int(row), input_ids))
            for answer in leading.split(_anchors_of_answers(loss_mask)):
                total += walk(answer.tolist(), drafter.num_predicted)
        return total

    def _features(self, row: int, input_ids: Tensor) -> Tensor:
        """Context features ``[n, L*D]`` of a row, on the target's device."""
        if self._row_features is not None:
            return self._row_features(row)
        features = self._kept.get(row)
        if features is None:
            features = self._document_features(input_ids)
            self._kept.put(row, features.cpu())
        return features.to(self._target.device)

    def _leading(
        self, drafter: DFlashDrafter, head: Head, input_ids: Tensor, loss_mask: Tensor, features: Tensor
    ) -> Tensor:
        """Leading hits of the block at every position that has an answer's token after it, int64 ``[positions]``."""
        device = features.device
        document = torch.zeros_like(input_ids)
        positions = eligible_positions(loss_mask, document).nonzero().flatten()
        if not len(positions):
            return positions
        counts = []
        context_kv = drafter.context_kv(features.to(self._dtype), torch.arange(len(input_ids), device=device))
        for chunk in positions.split(self._num_anchors):
            counts.append(self._leading_of_chunk(drafter, head, input_ids, loss_mask, context_kv, chunk))
        return torch.cat(counts)

    def _leading_of_chunk(
        self,
        drafter: DFlashDrafter,
        head: Head,
        input_ids: Tensor,
        loss_mask: Tensor,
        context_kv: ContextKV,
        positions: Tensor,
    ) -> Tensor:
        shape, length, device = drafter.shape, len(input_ids), self._target.device
        anchors = make_anchors(positions)
        noise_ids = make_noise_blocks(input_ids, anchors, shape.block_size, shape.mask_token_id)  # [A, K]
        slot_positions = block_positions(anchors, torch.arange(length), shape.block_size)  # [A, K]
        layout = BlockLayout.of_row(anchors, (0, length), shape.block_size, length)
        noise = self._target.embed(noise_ids.to(device)).to(self._dtype)  # [A, K, D]
        hidden = drafter(noise, slot_positions.to(device), context_kv, layout)  # [A, J, D]
        labels, valid = block_labels(
            input_ids, loss_mask, torch.zeros_like(input_ids), anchors, shape.block_size, drafter.label_shift
        )
        return leading_hits(drafter.hits(hidden, head, labels, valid, noise_ids[:, 0]))


def _anchors_of_answers(loss_mask: Tensor) -> list[int]:
    """For every answer (run of supervised tokens) the positions a block may start from: all but its last."""
    edges = torch.diff(loss_mask.int(), prepend=torch.zeros(1).int(), append=torch.zeros(1).int()).nonzero().flatten()
    return (edges[1::2] - edges[::2] - 1).tolist()
