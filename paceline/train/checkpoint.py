"""Checkpoints: complete or invisible, safetensors and JSON only.

A checkpoint is a folder ``checkpoints/step-00001234`` with the drafter's weights under their published names, AdamW's
moments, what else is needed to go on bit for bit, and a manifest with sizes and SHA-256 that is written last. It is
written beside its place, synced, renamed, and only then pointed to by ``latest`` (and ``best``).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.files import sha256, staged_folder, sync
from paceline.models.draft import DFlashDrafter, DraftShape, drafter_class
from paceline.train.optim import MasterAdamW

log = logging.getLogger(__name__)

FORMAT = 1
WEIGHTS, OPTIMIZER, STATE, SHAPE, MANIFEST = (
    "model.safetensors", "optimizer.safetensors", "state.json", "draft.json", "manifest.json",
)  # fmt: skip


@dataclass(frozen=True)
class TrainState:
    """Where a run stands; with the tensors it is all that going on needs.

    Attributes:
        step: Updates done.
        next_batch: Number of the first micro-batch that has not been used.
        skipped_batches: Micro-batches of steps in which nothing was to be learnt.
        total_steps: Steps that the schedule spans.
        num_anchors: Anchor slots of a micro-batch.
        best_acceptance_length, best_step: Best so far on the held-out rows; None before the first measurement.
        target_fingerprint, data_fingerprint: Of what the run is trained with.
    """

    step: int
    next_batch: int
    skipped_batches: int
    total_steps: int
    num_anchors: int
    best_acceptance_length: float | None
    best_step: int | None
    target_fingerprint: str
    data_fingerprint: str


def save(
    folder: Path,
    state: TrainState,
    drafter: DFlashDrafter,
    optimizer: MasterAdamW,
    *,
    keep_last: int,
    keep_every: int | None = None,
) -> Path:
    """Write a checkpoint, point `latest` to it, and remove old ones that nothing points to.

    Raises: CheckpointError if it cannot be written; earlier ones are untouched then.
    """
    place = place_of(folder, state.step)
    try:
        with staged_folder(place) as partial:
            safetensors.torch.save_file(_on_host(drafter.state_dict() | optimizer.masters), partial / WEIGHTS)
            safetensors.torch.save_file(_on_host(optimizer.state(state.step)), partial / OPTIMIZER)
            _write_json(partial / STATE, {"format": FORMAT, **asdict(state)})
            _write_json(partial / SHAPE, asdict(drafter.shape))
            files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in partial.iterdir()}
            _write_json(partial / MANIFEST, {"format": FORMAT, "files": files})
        point(folder, "latest", place)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {place} could not be written: {error}; earlier checkpoints are untouched"
        ) from error
    _retain(folder, keep_last, keep_every)
    return place


def place_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def point(folder: Path, name: str, place: Path) -> None:
    """Make ``folder/name`` a link to a checkpoint, in one step."""
    temporary = folder / f".{name}.link"
    temporary.unlink(missing_ok=True)
    os.symlink(place.name, temporary)
    os.replace(temporary, folder / name)
    sync(folder)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that verifies; damaged ones are passed over, each with a line that says why."""
    for place in sorted(_steps(folder), reverse=True):
        try:
            verify(place)
        except CheckpointError as error:
            log.warning("passing over a damaged checkpoint: %s", error)
        else:
            return place
    return None


def verify(place: Path) -> None:
    """Check every file of a checkpoint against its manifest. Raises: CheckpointError naming the file and the sizes."""
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{place} is not a complete checkpoint: no readable {MANIFEST}") from error
    for name, wanted in manifest.items():
        try:
            found, digest = (place / name).stat().st_size, sha256(place / name)
        except OSError as error:
            raise CheckpointError(f"{place / name} cannot be read: {error.strerror}") from error
        if found != wanted["bytes"]:
            raise CheckpointError(f"{place / name} is damaged: {wanted['bytes']} bytes declared, {found} found")
        if digest != wanted["sha256"]:
            raise CheckpointError(f"{place / name} is damaged: its SHA-256 is not the one in {MANIFEST}")


def load_state(place: Path) -> TrainState:
    """Where the run stood. Raises: CheckpointError."""
    content = _read_json(place / STATE)
    if content.pop("format", None) != FORMAT:
        raise CheckpointError(f"{place / STATE} has another format than {FORMAT}: it was written by another version")
    try:
        return TrainState(**content)
    except TypeError as error:
        raise CheckpointError(f"{place / STATE} was written by another version: {error}") from error


def saved_num_anchors(folder: Path) -> int | None:
    """Anchor slots that a run was trained with, of its newest readable checkpoint; None without any."""
    for place in sorted(_steps(folder), reverse=True):
        try:
            return load_state(place).num_anchors
        except CheckpointError:  # a damaged one: `newest` says so
            continue
    return None


def load_weights(place: Path, drafter: DFlashDrafter) -> None:
    """Copy the checkpoint's weights into a drafter of the same shape. Raises: CheckpointError."""
    try:
        drafter.load_state_dict(_read_tensors(place / WEIGHTS), strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"{place / WEIGHTS} holds a drafter of another shape: {error}") from error


def load_training(place: Path, drafter: DFlashDrafter, optimizer: MasterAdamW, *, is_started: bool) -> None:
    """Restore weights, masters and, if an update has been made, AdamW's state. Raises: CheckpointError."""
    load_weights(place, drafter)
    try:
        optimizer.load(_read_tensors(place / WEIGHTS), _read_tensors(place / OPTIMIZER) if is_started else None)
    except KeyError as error:
        raise CheckpointError(
            f"{place / OPTIMIZER} was written by another version: it has no {error.args[0]}"
        ) from error


def load_drafter(path: Path | str) -> DFlashDrafter:
    """A trained drafter, in float32 on the CPU, from a checkpoint folder or a run folder (its best, else its newest).

    Raises: CheckpointError.
    """
    place = find(Path(path))
    verify(place)
    content = _read_json(place / SHAPE)
    try:
        shape = DraftShape(
            **content
            | {"target_layer_ids": tuple(content["target_layer_ids"]), "layer_types": tuple(content["layer_types"])}
        )
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{place / SHAPE} was written by another version: {error}") from error
    drafter = drafter_class(shape.kind)(shape)
    load_weights(place, drafter)
    return drafter


def find(path: Path) -> Path:
    """The checkpoint folder meant by a checkpoint, a run folder or its ``checkpoints``. Raises: CheckpointError."""
    if (path / MANIFEST).is_file():
        return path.resolve()
    for folder in (path / "checkpoints", path):
        if (folder / "best").exists():
            best = (folder / "best").resolve()
            try:
                verify(best)
            except CheckpointError as error:
                log.warning("passing over a damaged checkpoint: %s", error)
            else:
                return best
        if (place := newest(folder)) is not None:
            return place
    raise CheckpointError(f"{path} holds no complete checkpoint: a run folder or a step-* folder was wanted")


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        found = path.stat().st_size if path.exists() else 0
        raise CheckpointError(f"{path} cannot be loaded ({found} bytes found): {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _steps(folder: Path) -> Iterator[Path]:
    return (place for place in folder.glob("step-" + "[0-9]" * 8) if place.is_dir() and not place.is_symlink())


def _retain(folder: Path, keep_last: int, keep_every: int | None) -> None:
    """Remove old checkpoints, and what killed saves left: the run is locked, so nobody else writes here."""
    for partial in folder.glob(".step-*"):
        shutil.rmtree(partial, ignore_errors=True)
    pointed = {(folder / name).resolve() for name in ("latest", "best") if (folder / name).is_symlink()}
    for place in sorted(_steps(folder))[:-keep_last]:
        kept = keep_every is not None and int(place.name.removeprefix("step-")) % keep_every == 0
        if not kept and place.resolve() not in pointed:
            shutil.rmtree(place, ignore_errors=True)
