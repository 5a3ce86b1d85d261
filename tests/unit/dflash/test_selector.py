"""The selector's walk against a walk over a table of edges, and against what it scores when given the same tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.dflash.selector import candidate_scores, walk_candidates
from paceline.dflash.speculative import Chance, draw
from paceline.kernels.linear_cross_entropy import Head
from paceline.models.dflash2 import DFlash2Drafter
from tests import tiny

BLOCKS, SLOTS, CANDIDATES, RANK, VOCAB = 40, 5, 4, 3, 11


def walk_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    logits, ids = normal(BLOCKS, SLOTS, VOCAB).topk(CANDIDATES)
    anchors = torch.randint(0, VOCAB, (BLOCKS,), generator=generator)
    return logits, ids, normal(BLOCKS, SLOTS, RANK), anchors, normal(VOCAB, RANK), normal(VOCAB, RANK)


def edge_table(inputs: tuple[Tensor, ...], block: int) -> list[list[list[float]]]:
    """Score of every candidate after every candidate of the slot before, one by one; slot 0 is after the anchor."""
    logits, ids, context, anchors, before_book, after_book = (each.double() for each in inputs)
    table = []
    for j in range(SLOTS):
        before = [anchors[block]] * CANDIDATES if j == 0 else list(ids[block, j - 1])
        rows = []
        for p in before:
            row = []
            for c in range(CANDIDATES):
                after = after_book[int(ids[block, j, c])]
                pair = sum(float(before_book[int(p), e] * context[block, j, e] * after[e]) for e in range(RANK))
                row.append(float(logits[block, j, c]) + pair)
            rows.append(row)
        table.append(rows)
    return table


@pytest.mark.parametrize("temperature", [None, 0.6, 1.3])
def test_a_walk_is_a_walk_over_the_table_of_edges(temperature: float | None) -> None:
    """Step by step, greedily and drawn, tokens and what they were drawn from are the table's, from the anchor on."""
    inputs = walk_inputs(0)
    chance = None
    if temperature is not None:
        uniforms = torch.rand(BLOCKS, SLOTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        chance = Chance(temperature, uniforms)
    taken, probs = walk_candidates(*inputs, chance)
    ids, unary = inputs[1], inputs[0]
    for block in range(BLOCKS):
        place = 0
        for j, rows in enumerate(edge_table(inputs, block)):
            scores = torch.tensor(rows[place])
            if chance is None:
                place = int(scores.argmax())
            else:
                assert probs is not None
                wanted = torch.softmax(scores / chance.temperature, 0)
                torch.testing.assert_close(probs[block, j], wanted.float(), atol=1e-5, rtol=1e-4)
                place = int(draw(probs[block, j], chance.uniforms[block, j]))
            assert int(taken[block, j]) == int(ids[block, j, place])
    assert (probs is None) == (temperature is None)
    assert not torch.equal(taken, ids.gather(-1, unary.argmax(-1, keepdim=True))[..., 0])  # the pairs do count


def test_the_first_slot_follows_the_anchor() -> None:
    """Another anchor gives another first score, and its codebook row and no other decides."""
    logits, ids, context, anchors, before_book, after_book = walk_inputs(2)
    scores = candidate_scores(logits[:, 0], before_book[anchors], context[:, 0], after_book[ids[:, 0]])
    wanted = ids[:, 0].gather(1, scores.argmax(-1, keepdim=True))[:, 0]
    assert torch.equal(walk_candidates(logits, ids, context, anchors, before_book, after_book)[0][:, 0], wanted)
    others = torch.ones(VOCAB, dtype=torch.bool)
    others[anchors[0]] = False
    changed = before_book.clone()
    changed[others] = 0.0
    first = slice(0, 1)
    again, _ = walk_candidates(
        logits[first, :1], ids[first, :1], context[first, :1], anchors[first], changed, after_book
    )
    assert int(again) == int(wanted[0])


@pytest.mark.parametrize("temperature", [None, 0.8])
@torch.inference_mode()
def test_a_walk_is_what_teacher_forcing_says_of_its_own_tokens(temperature: float | None) -> None:
    """Given the walk's own tokens as those before, the scores of whole blocks choose, or weigh, the same tokens."""
    shape = tiny.shape_of_kind("dflash2", block_size=SLOTS + 1)
    drafter = tiny.drafter(shape)
    assert isinstance(drafter, DFlash2Drafter)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(BLOCKS, SLOTS, 32, generator=generator)
    head = Head(0.2 * torch.randn(tiny.VOCAB, 32, generator=generator))
    anchors = torch.randint(0, tiny.VOCAB, (BLOCKS,), generator=generator)
    uniforms = torch.rand(BLOCKS, SLOTS, dtype=torch.float64, generator=generator)
    proposal = drafter.propose(hidden, head, anchors, None if temperature is None else Chance(temperature, uniforms))
    previous = torch.cat([anchors[:, None], proposal.ids[:, :-1]], dim=1)
    if temperature is None:
        assert torch.equal(drafter.best_after(hidden, head, previous), proposal.ids)
        return
    assert proposal.probs is not None and proposal.prob_ids is not None
    likeliest = proposal.prob_ids.gather(-1, proposal.probs.argmax(-1, keepdim=True))[..., 0]
    assert torch.equal(drafter.best_after(hidden, head, previous), likeliest)
    assert (proposal.prob_ids == proposal.ids[..., None]).any(-1).all()
    assert not torch.equal(likeliest, proposal.ids)
