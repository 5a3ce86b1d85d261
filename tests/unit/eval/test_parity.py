"""Training against decoding, and drafts against the target's own answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.eval.decode import CachedTarget
from paceline.eval.parity import check_blocks, check_taps, measure, tap_parity
from paceline.export.fingerprint import layers_to_tap
from paceline.models.draft import DFlashDrafter
from paceline.models.target import Target
from tests import tiny
from tests.unit.eval import learnt

SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6}


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_taps_are_those_of_the_whole_model(family: str, target_folder: Callable[[str], str]) -> None:
    """The cut target's features are the whole model's listed states, exactly."""
    rows = check_taps(target_folder(family), (1, 3))
    assert [(row.name, row.kind) for row in rows] == [("tap 1", "hidden_states[2]"), ("tap 3", "hidden_states[4]")]
    assert all(row.is_equal for row in rows)


def test_a_tap_one_off_is_not_equal(target_folder: Callable[[str], str]) -> None:
    """Features of other layers than named are outside the tolerance."""
    target = Target.load(target_folder("llama"), layer_ids=(1, 3))
    target.layer_ids = (0, 2)
    assert not any(row.is_equal for row in tap_parity(target))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("fields", [{}, SLIDING, SLIDING | {"layer_types": ("sliding_attention", "full_attention")}])
def test_a_training_block_is_decoded_alike(
    fields: dict[str, Any],
    is_causal: bool,
    target_folder: Callable[[str], str],
    cached_target: Callable[[str], CachedTarget],
) -> None:
    """Every layer of a block, for both kinds of layers and masks, with a target that has more taps than are used."""
    drafter = tiny.drafter(tiny.draft_shape(is_causal=is_causal, **fields))
    target = Target.load(target_folder("llama"), layer_ids=(0, 1, 2, 3))
    rows = check_blocks(drafter, cached_target("llama"), target)
    assert [row.name for row in rows] == ["layer 0", "layer 1", "norm"]
    assert all(row.is_equal for row in rows)
    assert ("causal" in rows[0].kind.split()) == is_causal
    assert rows[0].kind.startswith("sliding 6" if fields else "full")


def test_a_decoder_that_differs_is_told(
    target_folder: Callable[[str], str],
    cached_target: Callable[[str], CachedTarget],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Context keys rotated one position on, as a decoder might by mistake, put every layer outside the tolerance."""
    target = Target.load(target_folder("llama"), layer_ids=learnt.LAYER_IDS)
    original = DFlashDrafter.context_kv
    monkeypatch.setattr(DFlashDrafter, "context_kv", lambda self, feature, at: original(self, feature, at + 1))
    rows = check_blocks(tiny.drafter(), cached_target("llama"), target)
    assert not any(row.is_equal for row in rows)


def test_values_that_are_not_finite_are_not_equal(
    target_folder: Callable[[str], str], cached_target: Callable[[str], CachedTarget]
) -> None:
    """NaN on both sides is no agreement."""
    drafter = tiny.drafter()
    with torch.no_grad():
        drafter.fc.weight.fill_(float("nan"))
    target = Target.load(target_folder("llama"), layer_ids=learnt.LAYER_IDS)
    assert not any(row.is_equal for row in check_blocks(drafter, cached_target("llama"), target))


def test_the_folder_s_settings_do_best_unless_another_was_trained(
    target_folder: Callable[[str], str], cached_target: Callable[[str], CachedTarget], new_drafter: Callable[..., Any]
) -> None:
    """A well-trained drafter is best as it is; told to tap one layer lower, the right taps are found to be better."""
    folder = target_folder("llama")
    drafter = learnt.train(new_drafter("llama"), folder, num_steps=110)
    target = Target.load(folder, layer_ids=layers_to_tap(drafter.shape))
    result = measure(drafter, cached_target("llama"), target, learnt.prompts(), learnt.ANSWER)
    assert not any(setting.is_better for setting in result.settings)
    assert result.num_blocks > 100
    assert result.acceptance_length > 2
    lower = DFlashDrafter(dataclasses.replace(drafter.shape, target_layer_ids=(0, 2)))
    lower.load_state_dict(drafter.state_dict())
    result = measure(lower, cached_target("llama"), target, learnt.prompts(), learnt.ANSWER)
    assert [setting.name for setting in result.settings if setting.is_better] == ["taps +1: [1, 3]"]


def test_short_answers_measure_nothing(
    target_folder: Callable[[str], str], cached_target: Callable[[str], CachedTarget]
) -> None:
    """Answers without room for a block give no number, and no error."""
    target = Target.load(target_folder("llama"), layer_ids=learnt.LAYER_IDS)
    result = measure(tiny.drafter(), cached_target("llama"), target, [[1, 2]], 3)
    assert result.num_blocks == 0
    assert not any(setting.is_better for setting in result.settings)
