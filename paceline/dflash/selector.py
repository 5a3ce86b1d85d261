"""DFlash2's selector: a slot's best few tokens are scored once more, given the token before them, and walked in order.

    score_k(p, b) = logit_k[b] + < A[p] * Wh h_k , B[b] >      for the C candidates b of slot k, p the token before it

Shape letters: R blocks, J predicted tokens, C candidates of a slot, E rank of the codebooks.
Source: DFlash2, as released decoders and trainers have it (z-lab's `dflash` 0.1.0, vLLM 0.32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.dflash.speculative import Chance


def candidate_scores(logits: Tensor, predecessor: Tensor, context: Tensor, successors: Tensor) -> Tensor:
    """Scores of candidates given the token before them, float32 ``[..., C]``.

    Args:
        logits: ``[..., C]`` of the candidates.
        predecessor: ``[..., E]``, the codebook's row of the token before.
        context: ``[..., E]``, what the slot's hidden state is projected to.
        successors: ``[..., C, E]``, the other codebook's rows of the candidates.
    """
    edge = predecessor.float() * context.float()
    return logits.float() + (successors.float() @ edge[..., None])[..., 0]


def walk_candidates(
    logits: Tensor,
    ids: Tensor,
    context: Tensor,
    anchors: Tensor,
    predecessors: Tensor,
    successors: Tensor,
    chance: Chance | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Slot after slot the candidate with the best score after the one just taken, or one drawn by these scores.

    Args:
        logits: ``[R, J, C]``.
        ids: int64 ``[R, J, C]``, the candidates.
        context: ``[R, J, E]``.
        anchors: int64 ``[R]``, the tokens before the first slots.
        predecessors, successors: ``[V, E]``, the codebooks.
        chance: None: the best is taken.
    Returns: tokens int64 ``[R, J]``, and float32 ``[R, J, C]`` that they were drawn from; None if they were not.
    """
    taken, drawn_from, before = [], [], anchors
    for j in range(ids.shape[1]):
        scores = candidate_scores(logits[:, j], predecessors[before], context[:, j], successors[ids[:, j]])
        if chance is None:
            place = scores.argmax(-1)
        else:
            place, probs = chance.draw(scores, j)
            drawn_from.append(probs)
        before = ids[:, j].gather(1, place[:, None])[:, 0]
        taken.append(before)
    return torch.stack(taken, dim=1), torch.stack(drawn_from, dim=1) if drawn_from else None
