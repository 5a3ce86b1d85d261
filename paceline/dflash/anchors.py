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
    loss_mask: Tensor,
    document_ids: Tensor,
    num_anchors: int,
    generator: np.random.Generator,
    *,
    stratify: bool = False,
) -> Anchors:
    """Draw anchors, without replacement, over the eligible positions of a packed row, each with the same chance.

    Drawing over the row rather than per document gives every supervised token the same chance, so long answers do not
    starve short ones or the reverse.

    Args:
        loss_mask: bool ``[S]``, on the host.
        document_ids: int ``[S]``, on the host.
        num_anchors: A, slots returned whatever the row holds: a new shape would recompile GPU kernels.
        generator: From `batch_generator`.
        stratify: Draw one anchor from each of A equal strata of depth, the position within the document, in place of A
            from all; the chances stay the same, and every row then covers all depths.
    """
    eligible = eligible_positions(loss_mask, document_ids).nonzero().flatten().numpy()
    kept = min(num_anchors, len(eligible))
    if stratify and kept:
        depths = depths_in_documents(document_ids.numpy())[eligible]
        by_depth = eligible[np.argsort(depths, kind="stable")]
        chosen = np.sort(by_depth[one_of_each_stratum(len(eligible), kept, generator)])
    else:
        chosen = np.sort(generator.choice(eligible, size=kept, replace=False)) if kept else eligible[:0]
    return make_anchors(torch.from_numpy(chosen), num_anchors)


def depths_in_documents(document_ids: np.ndarray) -> np.ndarray:
    """Position of each token within its document, int64 ``[S]``, from int ``[S]``; padding counts as one more."""
    positions = np.arange(len(document_ids))
    starts = np.flatnonzero(np.diff(document_ids, prepend=document_ids[:1] - 1))
    return positions - starts[np.searchsorted(starts, positions, side="right") - 1]


def one_of_each_stratum(population: int, strata: int, generator: np.random.Generator) -> np.ndarray:
    """One of each of A strata of 0..N-1, at random, all different; every number has the same chance, A / N.

    Stratum i is the interval from i * N / A to (i + 1) * N / A of a line on which number n covers n to n + 1. A number
    on a border thus belongs to two strata by shares, and is taken as a part of either as often as its share there says,
    but never twice: a stratum whose border number is gone takes another one, and one that finds it left takes it
    oftener for that. In units of 1 / A all of this is exact in integers.

    Args:
        population: N.
        strata: A, 1 to N.
    Returns: int64 ``[A]``, ascending.
    """
    starts = np.arange(strata + 1) * population
    lower = starts // strata  # the number that stratum i begins in; the last one is past the end
    begun = -starts % strata  # the share of it that is in stratum i; 0: it begins with the stratum
    others = (starts[:-1] + begun[:-1] + generator.integers(population - begun[:-1])) // strata
    shared_before = np.where(begun[:-1] > 0, strata - begun[:-1], 0)
    takes_lower = generator.integers(population - shared_before) < begun[:-1]
    # What stratum i takes if the one before did not take the number between them: `lower` if `takes_lower`.
    ends_shared = others == lower[1:]
    is_taken, chosen_lower = False, np.zeros(strata, dtype=bool)
    for i, (lower_wanted, upper_wanted) in enumerate(zip(takes_lower.tolist(), ends_shared.tolist(), strict=True)):
        chosen_lower[i] = lower_wanted and not is_taken
        is_taken = upper_wanted and not chosen_lower[i]
    return np.where(chosen_lower, lower[:-1], others)


def make_anchors(positions: Tensor, num_anchors: int | None = None) -> Anchors:
    """Anchor slots with these ascending positions, padded with empty slots to `num_anchors`."""
    num_anchors = len(positions) if num_anchors is None else num_anchors
    slots = torch.zeros(num_anchors, dtype=torch.int64)
    slots[: len(positions)] = positions
    return Anchors(positions=slots, keep=torch.arange(num_anchors) < len(positions))
