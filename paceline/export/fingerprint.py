"""What a drafter computes on a few fixed inputs, written beside its weights when it is exported.

Names and shapes cannot tell a tap off by one, another mask token, another theta or a flipped causal flag: an engine
takes all of them and accepts less. `fingerprint.json` holds three things, each the least that closes a gap:

    settings    the trained run's own, not those that the export wrote: a wrong key is named
    drafter     states behind every layer from synthetic features and block inputs, by the training path, in float32
                from the weights as exported. No target is in them, so that they are exact whatever its precision, and a
                wrong weight, rotation or mask shows at the first layer that has it. What a kind has behind the layers
                (a selector, a bias, a confidence head) is there by its weights
    target      the taps on a few tokens, the mask token's embedding and the logits: the target and the meaning of the
                layer numbers. Taps are compared with the neighbouring layers' as well: the right one has to be the
                nearest, whatever bfloat16 adds

Each stage keeps a sample of its values, some kilobytes in all; what is wrong moves nearly all of them. Two things are
not in it: a sliding window longer than the sample (the settings have it), and whether labels were shifted in training,
as such a drafter does what it was trained to (`paceline check --prompts` measures that).
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline import __version__
from paceline.errors import ModelError
from paceline.export.folder import CONFIG_FILE, FINGERPRINT_FILE, causality
from paceline.files import write_atomically
from paceline.models.draft import DFlashDrafter, DraftShape
from paceline.models.states import FINAL, Blocks, States, anchors_at, decode_states, row_of, training_states
from paceline.models.target import Target

VERSION = 1

SETTINGS = (
    "kind",
    "options",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "layer_types",
    "is_causal",
    "sliding_window",
    "rope",
    "rms_norm_eps",
    "hidden_size",
    "vocab_size",
    "draft_vocab_size",
)
"""Fields of `DraftShape` that change what a drafter computes."""

DOCUMENTS = (17, 9)
"""Lengths of the fixed row's documents."""
ANCHORS = (1, 6, 12, 17, 22)
"""Where its blocks start; one has no context at all."""
NUM_SAMPLES = 96
"""Values kept of a stage."""

DRAFTER_TOLERANCE = 1e-3
"""Training and decode path differ by 1e-6 in float32; the smallest tampering tried moves a stage by 9e-3."""
TAP_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""By the target's type: packed and single documents of one bfloat16 target were up to 0.043 apart."""

Values = dict[str, list[float]]
"""Samples by stage, in the order in which they are computed."""


@dataclass(frozen=True)
class Fingerprint:
    """What `fingerprint.json` says.

    Attributes:
        settings: Those of `SETTINGS`, as plain values.
        drafter: Samples of the states from synthetic inputs, and of weights that no state passes through.
        target: Samples of what the target gives; None where the export did not know it.
        target_dtype: Type that the target computed in.
    """

    settings: dict[str, Any]
    drafter: Values
    target: Values | None = None
    target_dtype: str | None = None


@dataclass(frozen=True)
class Mismatch:
    """Where a folder does something else than was recorded.

    Attributes:
        stage: ``settings.KEY``, ``layer i``, ``norm``, name of a weight, ``tap i``, ``embedding`` or ``logits``.
        seen, wanted: As text.
        difference: Of the samples, relative; None for settings.
        tolerance: Of the difference.
    """

    stage: str
    seen: str
    wanted: str
    difference: float | None = None
    tolerance: float | None = None


def write_fingerprint(folder: Path | str, drafter: DFlashDrafter, target: Target | None = None) -> Path:
    """Record a trained drafter's behaviour in a folder that is there and has its `config.json`.

    Args:
        drafter: As trained; its weights are rounded here to the type that the folder says.
        target: Tapped at the drafter's own layers. None: the target's part is left out, and `check` says so.
    Returns: the file.
    Raises: ModelError if target and drafter have other layers, or the folder cannot be read.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        dtype = getattr(torch, json.loads(path.read_text(encoding="utf-8"))["dtype"])
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} names no dtype that weights can have: {error}") from error
    write_atomically(path.with_name(FINGERPRINT_FILE), fingerprint_text(drafter, target, dtype))
    return path.with_name(FINGERPRINT_FILE)


def fingerprint_text(drafter: DFlashDrafter, target: Target | None, dtype: torch.dtype) -> str:
    """What `fingerprint.json` holds, for an export that writes it with the weights; as for `make_fingerprint`."""
    record = {"version": VERSION, "paceline": __version__, **asdict(make_fingerprint(drafter, target, dtype))}
    return json.dumps(record) + "\n"


def read_fingerprint(folder: Path | str) -> Fingerprint | None:
    """What a folder recorded; None if it has no such file. Raises: ModelError."""
    path = Path(folder) / FINGERPRINT_FILE
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["version"] != VERSION:
            raise ModelError(f"{path} is of version {record['version']}; this program reads {VERSION}")
        fields = {field.name: record[field.name] for field in dataclasses.fields(Fingerprint)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return Fingerprint(**fields)


def make_fingerprint(drafter: DFlashDrafter, target: Target | None, dtype: torch.dtype) -> Fingerprint:
    """Behaviour of a drafter whose weights are rounded to `dtype`, by the training path."""
    drafter = _rounded(drafter, dtype)
    states = training_states(drafter, synthetic_blocks(drafter.shape))
    settings = settings_of(drafter.shape)
    samples = {name: _sample(state) for name, state in (states | _behind_layers(drafter)).items()}
    if target is None:
        return Fingerprint(settings, samples)
    if target.layer_ids != tuple(drafter.shape.target_layer_ids):
        raise ModelError(
            f"the target is tapped at {list(target.layer_ids)}, the drafter learnt from "
            f"{list(drafter.shape.target_layer_ids)}"
        )
    values = {f"tap {i}": _sample(tap) for i, tap in _taps(target).items()}
    values |= _shared(drafter, target, states)
    return Fingerprint(settings, samples, values, str(target.dtype).removeprefix("torch."))


def settings_of(shape: DraftShape) -> dict[str, Any]:
    """What of a shape is recorded and compared, in the one form that all layouts read back as."""
    plain = json.loads(json.dumps({key: getattr(shape, key) for key in SETTINGS}))
    rope = {key: value for key, value in plain["rope"].items() if value is not None and key != "type"}
    plain["rope"] = {"rope_type": "default", **rope}
    if plain["draft_vocab_size"] == plain["vocab_size"]:
        plain["draft_vocab_size"] = None
    plain["is_causal"] = causality(shape)
    if "sliding_attention" not in plain["layer_types"]:
        plain["sliding_window"] = None
    return plain


def compare_drafter(recorded: Fingerprint, drafter: DFlashDrafter) -> list[Mismatch]:
    """Settings, then the first stage of the decode path that differs, of a drafter as read from its folder."""
    seen, mismatches = settings_of(drafter.shape), []
    for key, wanted in recorded.settings.items():
        if seen.get(key) != wanted:
            mismatches.append(Mismatch(f"settings.{key}", json.dumps(seen.get(key)), json.dumps(wanted)))
    states = decode_states(_rounded(drafter, torch.float32), synthetic_blocks(drafter.shape)) | _behind_layers(drafter)
    for name, wanted in recorded.drafter.items():
        if (mismatch := _compared(name, states.get(name), wanted, DRAFTER_TOLERANCE)) is not None:
            return [*mismatches, mismatch]
    return mismatches


def layers_to_tap(shape: DraftShape) -> tuple[int, ...]:
    """The drafter's taps and their neighbours, with which a target is loaded for `compare_target`."""
    last = shape.num_target_layers - 2
    return tuple(sorted({i + step for i in shape.target_layer_ids for step in (-1, 0, 1) if 0 <= i + step <= last}))


def compare_target(recorded: Fingerprint, drafter: DFlashDrafter, target: Target) -> list[Mismatch]:
    """What the target gives at the folder's own taps against what was recorded.

    Args:
        target: Tapped at `layers_to_tap`.
    """
    assert recorded.target is not None
    drafter = _rounded(drafter, torch.float32)
    same = recorded.target_dtype == str(target.dtype).removeprefix("torch.")
    tolerance = TAP_TOLERANCE.get(recorded.target_dtype or "", 0.1) if same else max(TAP_TOLERANCE.values())
    taps, mismatches = _taps(target), []
    names = [name for name in recorded.target if name.startswith("tap ")]
    for place, name in enumerate(names):
        layer = dict(enumerate(drafter.shape.target_layer_ids)).get(place, -1)
        distances = {i: _difference(_sample(tap), recorded.target[name]) for i, tap in taps.items()}
        nearest = min(distances, key=lambda i: distances[i])
        seen = distances.get(layer, float("inf"))
        if nearest != layer or not seen <= tolerance:
            found = f"the output of layer {layer}, {seen:.1e} from it; nearest is layer {nearest}"
            mismatches.append(Mismatch(name, found, "the recorded features", seen, tolerance))
    states = training_states(drafter, synthetic_blocks(drafter.shape))
    own_states_differ = _compared(FINAL, states[FINAL], recorded.drafter[FINAL], DRAFTER_TOLERANCE) is not None
    for name, values in _shared(drafter, target, states).items():
        if name == "logits" and own_states_differ:  # then they follow, and say nothing of the target
            continue
        difference = _difference(values, recorded.target[name])
        if not difference <= tolerance:
            what = f"{name} of this target and mask token {drafter.shape.mask_token_id}"
            mismatches.append(Mismatch(name, what, "those recorded", difference, tolerance))
    return mismatches


def synthetic_blocks(shape: DraftShape) -> Blocks:
    """The fixed row, fed with random numbers whose generator NumPy keeps as it is for good."""
    draw = np.random.RandomState(0)
    size, num_slots = shape.hidden_size, shape.block_size - 1
    features = draw.standard_normal((sum(DOCUMENTS), len(shape.target_layer_ids) * size))
    mask = np.broadcast_to(draw.standard_normal((1, 1, size)), (len(ANCHORS), num_slots, size))
    noise = np.concatenate([draw.standard_normal((len(ANCHORS), 1, size)), mask], axis=1)
    return Blocks(
        row_of([torch.zeros(n, dtype=torch.int64) for n in DOCUMENTS]),
        anchors_at(list(ANCHORS)),
        torch.from_numpy(noise).float(),
        torch.from_numpy(features).float(),
    )


def _behind_layers(drafter: DFlashDrafter) -> dict[str, Tensor]:
    """Weights of what the kind has behind the layers, which no state passes through, by name."""
    return {name: p for name, p in drafter.named_parameters() if name.split(".")[0] in drafter.own_modules}


def _taps(target: Target) -> dict[int, Tensor]:
    """Outputs of the tapped layers on the fixed tokens, by layer."""
    ids = np.random.RandomState(1).randint(0, target.shape.vocab_size, size=sum(DOCUMENTS))
    taps = target.document_features(torch.from_numpy(ids).long()).split(target.shape.hidden_size, dim=-1)
    return dict(zip(target.layer_ids, taps, strict=True))


def _shared(drafter: DFlashDrafter, target: Target, states: States) -> Values:
    """The mask token's embedding, and logits of the drafter's part of the head."""
    device = target.head.weight.device
    with torch.no_grad():
        mask = target.embed(torch.tensor([drafter.shape.mask_token_id], device=device))
        head = drafter.own_head(target.head)
        logits = head.logits(states[FINAL][0].to(head.weight.device, head.weight.dtype))
    return {"embedding": _sample(mask), "logits": _sample(logits)}


def _rounded(drafter: DFlashDrafter, dtype: torch.dtype) -> DFlashDrafter:
    """A copy on the CPU in float32, its weights rounded to `dtype` first."""
    return copy.deepcopy(drafter).to("cpu", dtype).float().requires_grad_(False)


def _sample(values: Tensor) -> list[float]:
    """Values at even distances, to six digits. As many as there are, up to `NUM_SAMPLES`."""
    flat = values.detach().float().flatten().cpu()
    places = torch.linspace(0, len(flat) - 1, min(NUM_SAMPLES, len(flat)), dtype=torch.float64).round().long()
    return [float(f"{value:.6g}") for value in flat[places].tolist()]


def _difference(seen: Sequence[float], wanted: Sequence[float]) -> float:
    """The upper quartile of the distances over the median size: a few huge values, which models have, hide nothing."""
    if len(seen) != len(wanted):
        return float("inf")
    found, right = np.asarray(seen, dtype=np.float64), np.asarray(wanted, dtype=np.float64)
    difference = float(np.quantile(np.abs(found - right), 0.75) / max(float(np.median(np.abs(right))), 1e-12))
    return difference if np.isfinite(difference) else float("inf")


def _compared(stage: str, state: Tensor | None, wanted: list[float], tolerance: float) -> Mismatch | None:
    difference = float("inf") if state is None else _difference(_sample(state), wanted)
    if difference <= tolerance:
        return None
    return Mismatch(stage, "another state", "the recorded one", difference, tolerance)
