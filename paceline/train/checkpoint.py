"""Checkpoints: complete or invisible, safetensors and JSON only.

A checkpoint is a folder ``checkpoints/step-00001234`` with the drafter's weights under their published names, AdamW's
moments, what else is needed to go on bit for bit, and a manifest with sizes and SHA-256 that is written last. It is
written beside its place, synced, renamed, and only then pointed to by ``latest`` (and ``best``).

A run is locked, so one thread of one process changes the folder: the writer of `saver.Saver`, or whoever calls `save`;
but for the link `best`, which `evaluations` moves where it decides. Anybody may read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import CheckpointError
from paceline.files import is_running, remove, sha256, swap, sync
from paceline.models.draft import DFlashDrafter, DraftShape
from paceline.models.kinds import drafter_class
from paceline.train.optim import MasterAdamW
from paceline.train.tensor_file import Written, read_tensors, write_pieces, write_tensors

log = logging.getLogger(__name__)

FORMAT = 1
WEIGHTS, OPTIMIZER, STATE, SHAPE, MANIFEST = (
    "model.safetensors", "optimizer.safetensors", "state.json", "draft.json", "manifest.json",
)  # fmt: skip

ABANDONED_S = 24 * 3600.0
"""Seconds after which a folder that nobody has added to is a dead process's, although its number is in use again."""

_STEP = re.compile(r"step-([0-9]+)")
_LEFTOVER = re.compile(r"\.(step-[0-9]+)\.(?:(replaced|removed)|partial-([0-9]{1,9}))")

_WHAT_TO_DO = {
    errno.ENOSPC: "make room on this file system, or lower checkpoint.keep_last",
    errno.EDQUOT: "remove other files of yours, or have the quota raised",
    errno.EROFS: "mount the file system writable again; the kernel's log (dmesg) may say why it no longer is",
    errno.EIO: "the disk or the storage behind it has a fault; the kernel's log (dmesg) may say which",
    errno.EFBIG: "raise the largest file size of this process (ulimit -f)",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.EISDIR: "something that is no link stands in its way; move it elsewhere",
}


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
        owes_measurement: Whether the measurement on the held-out rows that is due at this step was cut short.
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
    owes_measurement: bool = False


@dataclass(frozen=True)
class Content:
    """All that a checkpoint holds; its tensors may lie on any device.

    Attributes:
        weights: The drafter's, float32, under their published names.
        moments: AdamW's, under the names of `MasterAdamW.state`.
    """

    state: TrainState
    shape: DraftShape
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


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
    content = Content(state, drafter.shape, drafter.state_dict() | optimizer.masters, optimizer.state(state.step))
    try:
        place = write(folder, content)
        point(folder, "latest", place)
    except OSError as error:
        raise CheckpointError(why_not_written(place_of(folder, state.step), error)) from error
    retain(folder, place, keep_last, keep_every)
    return place


def write(folder: Path, content: Content, moved: Callable[[int], None] = lambda _: None) -> Path:
    """Write a checkpoint to its place, which is synced then; nothing points to it yet.

    Whatever has the name, be it a complete checkpoint, stays until the new one is on the disk.

    Args:
        moved: Told the bytes of each piece once it is written.
    Raises: OSError; what was there before is there then.
    """
    place = place_of(folder, content.state.step)
    partial = folder / f".{place.name}.partial-{os.getpid()}"
    if not folder.is_dir():
        folder.mkdir()  # without parents: where the run folder has gone, nothing may pretend to be it
        sync(folder.parent)
    _clean_up(folder)
    partial.mkdir()
    try:
        files = {
            WEIGHTS: write_tensors(partial / WEIGHTS, content.weights, moved),
            OPTIMIZER: write_tensors(partial / OPTIMIZER, content.moments, moved),
            STATE: _write_json(partial / STATE, {"format": FORMAT, **asdict(content.state)}),
            SHAPE: _write_json(partial / SHAPE, asdict(content.shape)),
        }
        named = {name: asdict(file) for name, file in files.items()}
        _write_json(partial / MANIFEST, {"format": FORMAT, "files": named})
        sync(partial)
        swap(partial, place)  # between its renames `newest` finds the older one too
    finally:
        remove(partial)
    return place


def why_not_written(place: Path, error: Exception) -> str:
    """What a failed save is told with: the path, what the system says, and what to do."""
    number = error.errno if isinstance(error, OSError) else None
    said = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.filename2:
        said += f" ({error.filename2})"
    what_to_do = _WHAT_TO_DO.get(number or 0, f"see whether {place.parent} can be written to")
    return f"checkpoint {place} could not be written: {said}; {what_to_do}; earlier checkpoints are untouched"


def place_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def point(folder: Path, name: str, place: Path) -> None:
    """Make ``folder/name`` a link to a checkpoint, in one step. Raises: OSError; it points where it did then."""
    temporary = folder / f".{name}.link"
    remove(temporary)
    try:
        if (folder / name).is_dir() and not (folder / name).is_symlink():  # a copy that has followed the link
            os.rename(folder / name, folder / f".{name}.copied")
            remove(folder / f".{name}.copied")
        os.symlink(place.name, temporary)
        os.replace(temporary, folder / name)
    except OSError:
        remove(temporary)
        raise
    sync(folder)


def retain(
    folder: Path,
    written: Path,
    keep_last: int,
    keep_every: int | None,
    pinned: Callable[[], Collection[str]] = frozenset,
) -> None:
    """Remove checkpoints older than the last few, except milestones and those that a link points to.

    What is damaged counts for nothing and goes once it is old; what cannot be removed is told.

    Args:
        written: The one just written, which stays in any case.
        pinned: Names of others that stay for now. A link may be made to one before it is let go of, from any thread.
    """
    try:
        in_use = pinned()  # before the links are looked at: one that is let go of meanwhile has its link by then
        steps = [(step, place) for step, place in _steps(folder) if not place.is_symlink()]
        kept = {written.name, *in_use, *_pointed(folder)}
        last = next((step for step, place in steps if place == written), math.inf)  # later ones are of a lost timeline
        complete = sorted(step for step, place in steps if step <= last and (place == written or _is_whole(place)))
        oldest = min(complete[-keep_last:], default=0)
        for step, place in steps:
            is_milestone = keep_every is not None and step % keep_every == 0 and step in complete
            if step < oldest and place.name not in kept and not is_milestone:
                _retire(place)
    except OSError as error:
        log.warning("old checkpoints of %s stay: %s", folder, error)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that verifies; damaged ones are passed over, each with a line that says why.

    Raises: CheckpointError if the folder cannot be looked into.
    """
    for _, place in _newest_first(folder):
        try:
            verify(place)
        except CheckpointError as error:
            log.warning("passing over a damaged checkpoint: %s", error)
        else:
            return place
    return None


def complete_steps(folder: Path) -> list[int]:
    """Steps whose checkpoint is there with all its files, in order; what is in them is not read. Raises: OSError."""
    return sorted(step for step, place in _steps(folder) if not place.is_symlink() and _is_whole(place))


def verify(place: Path) -> None:
    """Check every file of a checkpoint against its manifest. Raises: CheckpointError naming the file and the sizes."""
    for name, wanted in _manifest(place).items():
        _check_size(place / name, wanted.bytes)
        try:
            digest = sha256(place / name)
        except OSError as error:
            raise CheckpointError(f"{place / name} cannot be read: {error.strerror}") from error
        if digest != wanted.sha256:
            raise CheckpointError(f"{place / name} is damaged: its SHA-256 is not the one in {MANIFEST}")


def load_state(place: Path) -> TrainState:
    """Where the run stood. Raises: CheckpointError."""
    content = _read_json(place / STATE)
    if content.pop("format", None) != FORMAT:
        raise CheckpointError(f"{place / STATE} has another format than {FORMAT}: it was written by another version")
    try:
        state = TrainState(**content)
    except TypeError as error:
        raise CheckpointError(f"{place / STATE} was written by another version: {error}") from error
    for field in dataclasses.fields(TrainState):
        value, wanted = getattr(state, field.name), str(field.type).split(" | ")
        found = "None" if value is None else type(value).__name__
        if found not in wanted and (found, "float" in wanted) != ("int", True):
            raise CheckpointError(f"{place / STATE} is damaged: {field.name} is {value!r:.80}, {field.type} is wanted")
    return state


def saved_num_anchors(folder: Path) -> int | None:
    """Anchor slots that a run was trained with, of its newest readable checkpoint; None without any."""
    for _, place in _newest_first(folder):
        try:
            return load_state(place).num_anchors
        except CheckpointError:  # a damaged one: `newest` says so
            continue
    return None


def load_weights(place: Path, drafter: DFlashDrafter) -> None:
    """Copy the checkpoint's weights into a drafter of the same shape. Raises: CheckpointError."""
    try:
        drafter.load_state_dict(read_tensors(place / WEIGHTS), strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"{place / WEIGHTS} holds a drafter of another shape: {error}") from error


def load_training(place: Path, drafter: DFlashDrafter, optimizer: MasterAdamW, *, is_started: bool) -> None:
    """Restore weights, masters and, if an update has been made, AdamW's state. Raises: CheckpointError."""
    load_weights(place, drafter)
    try:
        optimizer.load(read_tensors(place / WEIGHTS), read_tensors(place / OPTIMIZER) if is_started else None)
    except KeyError as error:
        raise CheckpointError(
            f"{place / OPTIMIZER} was written by another version: it has no {error.args[0]}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{place} is of a drafter of another shape: {error}") from error


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
    if os.path.isfile(path / MANIFEST):
        return Path(os.path.realpath(path))
    for folder in (path / "checkpoints", path):
        if os.path.exists(folder / "best"):
            best = Path(os.path.realpath(folder / "best"))
            try:
                verify(best)
            except CheckpointError as error:
                log.warning("passing over a damaged checkpoint: %s", error)
            else:
                return best
        if (place := newest(folder)) is not None:
            return place
    raise CheckpointError(f"{path} holds no complete checkpoint: a run folder or a step-* folder was wanted")


def _newest_first(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints by number, whole or not, also what a swap that was cut short has left aside.

    Raises: CheckpointError if the folder is there and cannot be looked into.
    """
    try:
        found = list(_steps(folder))
        for path in _entries(folder):
            match = _LEFTOVER.fullmatch(path.name)
            if match and match[2] == "replaced" and not os.path.lexists(folder / match[1]):
                found.append((int(match[1].removeprefix("step-")), path))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be looked into: {error.strerror}") from error
    return sorted(found, reverse=True)


def _steps(folder: Path) -> Iterator[tuple[int, Path]]:
    """Whatever is named like a checkpoint, with its number. Raises: OSError."""
    for path in _entries(folder):
        if match := _STEP.fullmatch(path.name):
            yield int(match[1]), path


def _entries(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _manifest(place: Path) -> dict[str, Written]:
    """The files that a checkpoint should have. Raises: CheckpointError."""
    try:
        content = _read_json(place / MANIFEST)
    except CheckpointError as error:
        raise CheckpointError(f"{place} is not a complete checkpoint: no readable {MANIFEST}") from error
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{place / MANIFEST} has another format than {FORMAT}: it was written by another version")
    files = content.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{place / MANIFEST} is damaged: it names no files")
    for name, entry in files.items():
        if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
            raise CheckpointError(f"{place / MANIFEST} names {name!r:.80}, which is no file of the checkpoint")
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or type(entry.get("sha256")) is not str:
            raise CheckpointError(f"{place / MANIFEST} is damaged: bytes and sha256 of {name!r:.80} are wanted")
    for name in (WEIGHTS, OPTIMIZER, STATE, SHAPE):
        if name not in files:
            raise CheckpointError(f"{place / MANIFEST} is damaged: it does not name {name}")
    return {name: Written(entry["bytes"], entry["sha256"]) for name, entry in files.items()}


def _check_size(path: Path, wanted: int) -> None:
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is damaged: it is no file")
    if found.st_size != wanted:
        raise CheckpointError(f"{path} is damaged: {wanted} bytes declared, {found.st_size} found")


def _is_whole(place: Path) -> bool:
    """Whether all files are there in their sizes; what is in them is not read."""
    try:
        for name, wanted in _manifest(place).items():
            _check_size(place / name, wanted.bytes)
    except CheckpointError:
        return False
    return True


def _pointed(folder: Path) -> set[str]:
    """Names that a link in the folder points to: `latest`, `best`, and those that somebody made."""
    return {Path(os.readlink(path)).name for path in _entries(folder) if path.is_symlink()}


def _retire(place: Path) -> None:
    """Remove a checkpoint: whoever looks sees all of it or nothing."""
    hidden = place.with_name(f".{place.name}.removed")
    remove(hidden)
    try:
        os.rename(place, hidden)
    except OSError:  # a full disk may have no room for another name
        hidden = place
    remove(hidden)
    if os.path.lexists(hidden):
        log.warning("an old checkpoint cannot be removed: %s", hidden)


def _clean_up(folder: Path) -> None:
    """Undo what killed saves left: a swap cut short, and folders of processes that are gone."""
    for path in _entries(folder):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None:
            continue
        if match[2] == "replaced" and not os.path.lexists(folder / match[1]):
            os.rename(path, folder / match[1])
        elif match[2] or _is_abandoned(path, int(match[3])):
            remove(path)


def _is_abandoned(partial: Path, pid: int) -> bool:
    if pid == os.getpid() or not is_running(pid):
        return True
    with contextlib.suppress(OSError):
        return time.time() - partial.lstat().st_mtime > ABANDONED_S
    return False


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise CheckpointError(f"{path} is damaged: it is no file")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds no object")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> Written:
    return write_pieces(path, [(json.dumps(content, indent=1) + "\n").encode()], lambda _: None)
