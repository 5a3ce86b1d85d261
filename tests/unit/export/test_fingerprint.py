"""A fingerprint: the same drafter matches it by the decode path, another one does not, whatever its settings say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import files
from paceline.cli.evaluate import export_drafter
from paceline.errors import ModelError
from paceline.export.fingerprint import (
    Fingerprint,
    compare_drafter,
    compare_target,
    layers_to_tap,
    make_fingerprint,
    read_fingerprint,
    settings_of,
    write_fingerprint,
)
from paceline.export.zlab import export_zlab, load_zlab
from paceline.models.draft import DFlashDrafter
from paceline.models.target import Target
from tests import tiny

SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6}
MIXED_CAUSAL = SLIDING | {"layer_types": ("full_attention", "sliding_attention"), "is_causal": "sliding"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save(tiny.causal_lm("qwen3"), tmp_path_factory.mktemp("target"))


def variant(drafter: DFlashDrafter, **fields: Any) -> DFlashDrafter:
    """The same weights under other settings."""
    other = DFlashDrafter(dataclasses.replace(drafter.shape, **fields))
    other.load_state_dict(drafter.state_dict())
    return other


def stages(recorded: Fingerprint, drafter: DFlashDrafter, folder: str) -> set[str]:
    """What differs, settings left out: behaviour has to tell by itself."""
    bare = dataclasses.replace(recorded, settings={})
    target = Target.load(folder, layer_ids=layers_to_tap(drafter.shape))
    return {m.stage for m in [*compare_drafter(bare, drafter), *compare_target(bare, drafter, target)]}


@pytest.mark.parametrize("fields", [{}, {"is_causal": True}, SLIDING, SLIDING | {"is_causal": True}, MIXED_CAUSAL])
def test_the_decode_path_matches_what_training_recorded(fields: dict[str, Any], folder: str, tmp_path: Path) -> None:
    """Written from the trained weights, read from an export in bfloat16: nothing differs, and it is small."""
    drafter = tiny.drafter(tiny.draft_shape(**fields))
    place = export_zlab(drafter, tmp_path / "draft")
    written = write_fingerprint(place, drafter, Target.load(folder, layer_ids=(1, 3)))
    recorded = read_fingerprint(place)
    assert recorded is not None
    assert not compare_drafter(recorded, load_zlab(place))
    assert not stages(recorded, load_zlab(place), folder)
    assert written.stat().st_size < 10_000


@pytest.mark.parametrize(
    ("fields", "stage"),
    [
        ({"target_layer_ids": (0, 2)}, "tap 3"),
        ({"target_layer_ids": (2, 3)}, "tap 1"),
        ({"mask_token_id": 266}, "embedding"),
        ({"rope": {"rope_type": "default", "rope_theta": 1e6}}, "layer 0"),
        ({"is_causal": True}, "layer 0"),
        (
            {"is_causal": "sliding", "layer_types": ("full_attention", "sliding_attention"), "sliding_window": 64},
            "layer 1",
        ),
        ({"block_size": 5}, "layer 0"),
        (SLIDING, "layer 0"),
    ],
)
def test_another_behaviour_is_told_without_the_settings(fields: dict[str, Any], stage: str, folder: str) -> None:
    """A wrong setting shows in what is computed, at the first stage that it touches."""
    drafter = tiny.drafter()
    recorded = make_fingerprint(drafter, Target.load(folder, layer_ids=(1, 3)), torch.float32)
    assert stage in stages(recorded, variant(drafter, **fields), folder)


def test_every_tensor_shows() -> None:
    """Whichever tensor is reversed, a stage of its layer or an earlier one differs."""
    drafter = tiny.drafter()
    recorded = make_fingerprint(drafter, None, torch.float32)
    for name in drafter.state_dict():
        other = variant(drafter)
        with torch.no_grad():
            other.get_parameter(name).copy_(drafter.get_parameter(name).flip(0))
        (mismatch,) = compare_drafter(recorded, other)
        layer = (
            f"layer {name.split('.')[1]}"
            if name.startswith("layers.")
            else "norm"
            if name == "norm.weight"
            else "layer 0"
        )
        assert mismatch.stage == layer, name  # fmt: skip


def test_weights_that_are_not_finite_match_nothing() -> None:
    """A NaN is a difference, not a comparison that fails to hold."""
    drafter = tiny.drafter()
    recorded = make_fingerprint(drafter, None, torch.float32)
    other = variant(drafter)
    with torch.no_grad():
        other.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    assert [m.stage for m in compare_drafter(recorded, other)] == ["layer 0"]


def test_settings_are_named() -> None:
    """A setting that moves no sample is found by its name: the norm's epsilon, a window longer than the row."""
    drafter = tiny.drafter(tiny.draft_shape(**(SLIDING | {"sliding_window": 64})))
    recorded = make_fingerprint(drafter, None, torch.float32)
    for key, value in {"rms_norm_eps": 1e-5, "sliding_window": 65}.items():
        (mismatch,) = compare_drafter(recorded, variant(drafter, **{key: value}))
        assert mismatch.stage == f"settings.{key}"
        assert mismatch.seen == json.dumps(value)


def test_settings_have_one_form() -> None:
    """What layouts write differently and mean alike is equal: no rope type, a whole vocabulary, an unused window,
    a flag for sliding layers where there are none."""
    plain = settings_of(tiny.draft_shape())
    other = tiny.draft_shape(
        rope={"rope_theta": 10000.0, "factor": None},
        draft_vocab_size=tiny.VOCAB,
        sliding_window=9,
        is_causal="sliding",
    )
    assert settings_of(other) == plain


def test_taps_have_to_be_the_recorded_ones(folder: str, tmp_path: Path) -> None:
    """A target tapped elsewhere cannot be recorded; a folder without a type of weights neither."""
    with pytest.raises(ModelError, match=r"tapped at \[1, 2\]"):
        make_fingerprint(tiny.drafter(), Target.load(folder, layer_ids=(1, 2)), torch.float32)
    (tmp_path / "config.json").write_text('{"dtype": "nonsense"}', encoding="utf-8")
    with pytest.raises(ModelError, match="no dtype"):
        write_fingerprint(tmp_path, tiny.drafter())


def test_an_export_takes_its_place_with_its_fingerprint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process killed before the swap leaves the old export whole, and beside it a folder that lacks nothing."""
    first, second = tiny.drafter(), tiny.drafter(tiny.draft_shape(is_causal=True))
    place, _ = export_drafter(first, tmp_path / "out", "zlab", "bfloat16", None)
    before = {file.name: file.read_bytes() for file in place.iterdir()}

    def killed(partial: Path, target: Path) -> None:
        assert {file.name: file.read_bytes() for file in target.iterdir()} == before
        recorded = read_fingerprint(partial)
        assert recorded is not None and not compare_drafter(recorded, load_zlab(partial))
        assert {file.name for file in partial.iterdir()} == before.keys()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files, "swap", killed)
        with pytest.raises(KeyboardInterrupt):
            export_drafter(second, place, "zlab", "bfloat16", None)
    assert {file.name: file.read_bytes() for file in place.iterdir()} == before
    export_drafter(second, place, "zlab", "bfloat16", None)
    recorded = read_fingerprint(place)
    assert recorded is not None and recorded.settings["is_causal"] is True


def test_a_bfloat16_target_is_told_from_a_neighbouring_layer(folder: str) -> None:
    """Recorded from a float32 target and compared with one in bfloat16, the right layers still are the nearest."""
    drafter = tiny.drafter()
    recorded = make_fingerprint(drafter, Target.load(folder, layer_ids=(1, 3)), torch.float32)
    target = Target.load(folder, layer_ids=layers_to_tap(drafter.shape), dtype=torch.bfloat16)
    assert not compare_target(recorded, drafter, target)
    assert "tap 1" in {m.stage for m in compare_target(recorded, variant(drafter, target_layer_ids=(2, 3)), target)}
