"""Teacher-forced acceptance against the decode loop, which it must equal on greedy answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.dflash.acceptance import Acceptance
from paceline.eval.decode import CachedTarget, plain_decode, speculative_decode
from paceline.eval.validation import Validation
from paceline.kernels import linear_cross_entropy
from paceline.models.draft import DFlashDrafter
from paceline.models.target import Target
from tests.unit.eval.learnt import LAYER_IDS


class Rows:
    """The part of a data set that validation reads."""

    def __init__(self, rows: list[tuple[Tensor, Tensor]]) -> None:
        self._rows = rows

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        return self._rows[index]


def greedy_rows(target: CachedTarget, prompts: list[list[int]], limit: int, stop_ids: set[int]) -> Rows:
    rows = []
    for prompt in prompts:
        ids = torch.tensor([*prompt, *plain_decode(target, prompt, limit, stop_ids).tokens])
        rows.append((ids, torch.arange(len(ids)) >= len(prompt)))
    return Rows(rows)


@pytest.mark.parametrize(
    ("family", "fields", "num_anchors"),
    [
        ("llama", {}, 7),
        ("qwen3", {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}, 1000),
        ("gemma2", {"is_causal": True}, 16),
    ],
)
def test_it_equals_the_decode_loop(
    family: str,
    fields: dict[str, object],
    num_anchors: int,
    target_folder: Callable[[str], str],
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    prompts: list[list[int]],
) -> None:
    """On answers that the target gives greedily, rounds, tokens and every position's counts are the loop's own.

    Some answers end with a stop token, some at the limit; blocks are drafted a few or all at a time.
    """
    decoder, drafter = cached_target(family), trained_drafter(family, **fields)
    stop_ids = {plain_decode(decoder, prompts[0], 40, ()).tokens[17]}
    looped = Acceptance(drafter.num_predicted)
    for prompt in prompts:
        looped += speculative_decode(decoder, drafter, prompt, 40, stop_ids).acceptance
    target = Target.load(target_folder(family), layer_ids=LAYER_IDS)
    rows = greedy_rows(decoder, prompts, 40, stop_ids)
    validation = Validation(target, rows, range(len(prompts)), num_anchors=num_anchors)  # type: ignore[arg-type]
    measured = validation.measure(drafter)
    assert looped.verified - 2 * len(prompts) * looped.num_predicted < measured.verified <= looped.verified
    assert measured == replace(looped, verified=measured.verified)
    assert validation.measure(drafter) == measured  # from kept features
    assert 1.2 < looped.length < 5


def test_answers_of_one_row_are_counted_apart(
    target_folder: Callable[[str], str],
    cached_target: Callable[[str], CachedTarget],
    new_drafter: Callable[..., DFlashDrafter],
) -> None:
    """Each answer's first token is given, and no block counts tokens past its own answer."""
    drafter, target = new_drafter(), Target.load(target_folder("llama"), layer_ids=LAYER_IDS)
    ids = torch.arange(20) % 7
    mask = torch.zeros(20, dtype=torch.bool)
    mask[4:9] = mask[12:13] = mask[15:20] = True  # answers of 5, 1 and 5 tokens
    validation = Validation(target, Rows([(ids, mask)]), [0], num_anchors=4)  # type: ignore[arg-type]
    assert validation.measure(drafter).committed == 4 + 0 + 4


def test_logits_are_made_in_chunks(
    target_folder: Callable[[str], str],
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head sees a bounded number of rows at a time, with the same result."""
    drafter, target = trained_drafter(), Target.load(target_folder("llama"), layer_ids=LAYER_IDS)
    rows = greedy_rows(cached_target("llama"), prompts, 40, set())
    whole = Validation(target, rows, range(4), num_anchors=100).measure(drafter)  # type: ignore[arg-type]
    seen = []
    original = linear_cross_entropy.Head.logits
    monkeypatch.setattr(
        linear_cross_entropy.Head,
        "logits",
        lambda self, hidden: seen.append(hidden.shape[:-1].numel()) or original(self, hidden),
    )
    monkeypatch.setattr("paceline.models.draft.CHUNK_BYTES", (2 * drafter.num_predicted + 1) * 4 * 272)
    assert Validation(target, rows, range(4), num_anchors=100).measure(drafter) == whole  # type: ignore[arg-type]
    assert max(seen) == 2 * drafter.num_predicted
