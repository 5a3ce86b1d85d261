"""Where training blocks start: anchors drawn from a packed row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Anchors:
    """A fixed number of anchor slots of one packed row.

    Attributes:
        positions: int64 ``[A]``; row positions, ascending over the kept slots, 0 in the others.
        keep: bool ``[A]``; which slots hold an anchor; the kept ones come first.
    """

    positions: Tensor
    keep: Tensor

    @property
    def num_kept(self) -> int:
        """Slots that hold an anchor."""
        return int(self.keep.sum())


def eligible_positions(loss_mask: Tensor, document_ids: Tensor) -> Tensor:
    """Positions that may be an anchor: supervised, and followed in their document by a supervised token.

    The second condition leaves something to predict; the block may otherwise run past the document's end, where its
    slots weigh nothing. Source: the convention of SpecForge and DeepSpec (A in the literature's comparison).

    Args:
        loss_mask: bool ``[S]``.
        document_ids: int ``[S]``; negative on padding.
    Returns: bool ``[S]``.
    """
    eligible = torch.zeros_like(loss_mask)
    same_document = (document_ids[:-1] == document_ids[1:]) & (document_ids[:-1] >= 0)
    eligible[:-1] = loss_mask[:-1] & loss_mask[1:] & same_document
    return eligible


def batch_generator(seed: int, batch: int) -> np.random.Generator:
    """Random numbers of one batch: the same on every worker, device and restart."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, batch))))


def sample_anchors(
    loss_mask: Tensor, document_ids: Tensor, num_anchors: int, generator: np.random.Generator
) -> Anchors:
    """Draw anchors uniformly, without replacement, over the eligible positions of a packed row.

    Drawing over the row rather than per document gives every supervised token the same chance, so long answers do not
    starve short ones or the reverse.

    Args:
        loss_mask: bool ``[S]``, on the host.
        document_ids: int ``[S]``, on the host.
        num_anchors: A, slots returned whatever the row holds: a new shape would recompile GPU kernels.
        generator: From `batch_generator`.
    """
    eligible = eligible_positions(loss_mask, document_ids).nonzero().flatten().numpy()
    kept = min(num_anchors, len(eligible))
    chosen = np.sort(generator.choice(eligible, size=kept, replace=False)) if kept else eligible[:0]
    return make_anchors(torch.from_numpy(chosen), num_anchors)


def make_anchors(positions: Tensor, num_anchors: int | None = None) -> Anchors:
    """Anchor slots with these ascending positions, padded with empty slots to `num_anchors`."""
    num_anchors = len(positions) if num_anchors is None else num_anchors
    slots = torch.zeros(num_anchors, dtype=torch.int64)
    slots[: len(positions)] = positions
    return Anchors(positions=slots, keep=torch.arange(num_anchors) < len(positions))
