"""What limits a drafter: entropies, hits by entropy, and the oracle's arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.reference.limits import Looked, acceptance, by_entropy, first_misses, look, oracle, summary, target_view
from benchmarks.reference.measure import thinned
from paceline.eval.decode import CachedTarget, plain_decode
from paceline.eval.validation import Validation
from paceline.kernels.linear_cross_entropy import Head
from paceline.models.target import Target
from tests import tiny
from tests.unit.eval import learnt


class Rows(list[tuple[Tensor, Tensor]]):
    """The part of a data set that validation reads."""

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        return self[index]


# One answer of six tokens, so five blocks, of two drafted tokens each. Decoding visits block 0 (one right), block 2
# (none) and block 3 (both): five tokens in three rounds.
ENTROPY = torch.tensor([9.0, 0.05, 0.3, 0.05, 3.0, 0.7])
BY_HAND = Looked(
    entropy=ENTROPY,
    chosen=torch.tensor([0.5, 1.0, 1.0, 1.0, 0.25, 0.75]),
    is_best=torch.tensor([True, True, True, True, False, True]),
    can_draft=torch.tensor([True, True, True, True, True, False]),
    hits=torch.tensor([[1, 0], [0, 1], [0, 0], [1, 1], [0, 0]]).bool(),
    valid=torch.tensor([[1, 1], [1, 1], [1, 1], [1, 1], [1, 0]]).bool(),
    slot_entropy=torch.tensor([[0.05, 0.3], [0.3, 0.05], [0.05, 3.0], [3.0, 0.7], [0.7, 0.0]]),
    anchors=[5],
)


def test_entropy_and_probability_are_those_of_the_distribution() -> None:
    """Of 1/2, 1/4, 1/8, 1/8 the entropy is 7/4 ln 2, of four equal ones ln 4; ties count as likeliest."""
    head = Head(torch.eye(4))
    hidden = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]]).log()[[0, 0, 1]]
    entropy, chosen, is_best = target_view(head, hidden, torch.tensor([0, 2, 3]))
    assert entropy.tolist() == pytest.approx([1.75 * math.log(2), 1.75 * math.log(2), math.log(4)], rel=1e-5)
    assert chosen.tolist() == pytest.approx([0.5, 0.125, 0.25])
    assert is_best.tolist() == [True, False, True]


def test_rounds_and_their_first_misses_are_those_of_decoding() -> None:
    """Blocks that decoding skips are not looked at; the last round ends with the answer and misses nothing."""
    assert acceptance(BY_HAND.hits, [5]).length == pytest.approx(5 / 3)
    assert first_misses(BY_HAND.hits, BY_HAND.valid, [5]).tolist() == [[0, 1], [2, 0]]
    assert first_misses(BY_HAND.valid, BY_HAND.valid, [5]).tolist() == []
    # as two answers of three tokens (two blocks) and of four: the second begins at block 2
    assert first_misses(BY_HAND.hits, BY_HAND.valid, [2, 3]).tolist() == [[0, 1], [2, 0]]
    assert acceptance(BY_HAND.hits, [2, 3]).rounds == 3


def test_hits_are_counted_in_bins_of_entropy() -> None:
    """A slot is in the bin of the token that it predicts, and counts only if there is one."""
    sure, nearly, likely, torn, lost = by_entropy(BY_HAND)
    assert (sure["from_nats"], sure["to_nats"], lost["to_nats"]) == (0.0, 0.1, None)
    assert (sure["slots"], sure["accuracy"]) == ([2, 1], [0.5, 1.0])
    assert (nearly["slots"], nearly["accuracy"]) == ([1, 1], [0.0, 0.0])
    assert (likely["slots"], likely["accuracy"]) == ([1, 1], [0.0, 1.0])
    assert (torn["slots"], torn["accuracy"], torn["tokens_frac"]) == ([0, 0], [None, None], 0.0)
    assert (lost["slots"], lost["accuracy"]) == ([1, 1], [1.0, 0.0])
    assert [each["tokens_frac"] for each in (sure, nearly, lost)] == pytest.approx([1 / 3, 1 / 6, 1 / 3], abs=1e-4)
    assert [each["first_misses"] for each in (sure, nearly, likely, torn, lost)] == [1, 1, 0, 0, 0]
    assert sure["first_misses_frac"] == 0.5


def test_the_oracle_repairs_misses_on_one_side_of_a_threshold() -> None:
    """Below 0.1 nats block 2 gains a token and no round is saved; all others repaired, block 0 reaches block 3."""
    found = {each["threshold_nats"]: each for each in oracle(BY_HAND)}
    below, others = "acceptance_length_misses_below_repaired", "acceptance_length_other_misses_repaired"
    assert found[0.1] == {"threshold_nats": 0.1, "tokens_below_frac": 0.3333, below: 1.6667, others: 2.5}
    assert (found[0.5][below], found[0.5][others]) == (2.5, 1.6667)
    whole = summary(BY_HAND)
    assert (whole["acceptance_length"], whole["acceptance_length_all_hit"]) == (1.6667, 2.5)
    assert (whole["target_likeliest_frac"], whole["can_draft_frac"]) == (0.8333, 0.8333)
    assert whole["target_entropy_nats"] == {
        "mean": round(13.1 / 6, 4), "above_frac": {"0.1": 0.6667, "0.5": 0.5, "1.0": 0.3333, "2.0": 0.3333}
    }  # fmt: skip
    twice = summary(Looked.join([BY_HAND, BY_HAND]))
    assert (twice["tokens"], twice["rounds"], twice["acceptance_length"]) == (12, 6, 1.6667)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_row_is_seen_as_training_measures_it(kind: str, tmp_path: Path) -> None:
    """Hits give the acceptance that validation has, over answers with a gap as well; entropies are Transformers'."""
    folder = tiny.save(model := tiny.causal_lm("llama"), tmp_path)
    drafter = learnt.train(learnt.new_drafter(folder, kind), folder, num_steps=25).requires_grad_(False)
    target = Target.load(folder, layer_ids=learnt.LAYER_IDS, packing="per_document", needs_last_hidden=True)
    decoder, rows = CachedTarget.load(folder, learnt.LAYER_IDS), Rows()
    for prompt in learnt.prompts():
        ids = torch.tensor([*prompt, *plain_decode(decoder, prompt, 30, ()).tokens])
        mask = torch.arange(len(ids)) >= len(prompt)
        mask[len(prompt) + 11 : len(prompt) + 13] = False  # two answers
        rows.append((ids, mask))
    looked = [part for i, row in enumerate(rows) if (part := look(target, drafter, i, *row)) is not None]
    joined = Looked.join(looked)
    validation = Validation(target, rows, range(len(rows)), num_anchors=16)  # type: ignore[arg-type]
    measured = validation.measure(drafter)
    assert acceptance(joined.hits, joined.anchors) == measured
    assert measured.length > 1.2
    assert len(joined.anchors) == 2 * len(rows) and sum(joined.anchors) == len(joined.hits)
    assert bool(joined.is_best.all())  # greedy answers
    ids, mask = rows[2]
    logits = model(ids[None]).logits[0].float().log_softmax(-1)
    positions = mask.nonzero().flatten()
    entropy = -(logits.exp() * logits).sum(-1)[positions - 1]
    torch.testing.assert_close(looked[2].entropy, entropy, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(looked[2].chosen, logits[positions - 1, ids[positions]].exp(), rtol=1e-4, atol=1e-4)
    # slot 0 of block i of the first answer predicts its token i + 1
    torch.testing.assert_close(looked[2].slot_entropy[:10, 0], looked[2].entropy[1:11])
    assert look(target, drafter, 0, ids, torch.zeros_like(mask)) is None


def test_misses_without_a_slot_are_no_share_of_anything() -> None:
    """A drafter that is always right has no first miss, and its shares say so."""
    right = replace(BY_HAND, hits=BY_HAND.valid)
    assert [each["first_misses_frac"] for each in by_entropy(right)] == [None] * 5


def test_a_curve_is_thinned_to_what_was_measured_first() -> None:
    """Every measured point stays while there is room, the others spread evenly, and the order is that of the steps."""
    points = [{"step": i} | ({"validation_acceptance_length": 1.0} if i % 100 == 0 else {}) for i in range(1, 1001)]
    kept = thinned(points, 60)
    assert len(kept) == 60 and [each["step"] for each in kept] == sorted(each["step"] for each in kept)
    assert [each["step"] for each in kept if "validation_acceptance_length" in each] == list(range(100, 1001, 100))
    assert kept[-2]["step"] == 999 and thinned(points[:50], 60) == points[:50]
    assert max(b["step"] - a["step"] for a, b in zip(kept, kept[1:], strict=False)) <= 20
