"""Strikes at every change that a save makes: what is on the disk then is the old or the new checkpoint, whole.

A scene lets a save run once and writes its changes down; then it repeats it in a fork for each of them, which is struck
there. That a process dies after a change is the same as that it dies before the next one, as nobody else writes there;
so "after" is left for the last change. A power cut comes after the change, and takes what was not synced.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from paceline.config import Optim
from paceline.errors import CheckpointError
from paceline.train import checkpoint
from paceline.train.optim import MasterAdamW
from tests.chaos.harness import Child, Ended, Wait, World, alone, bits_of, newest_step, train
from tests.chaos.points import AFTER, BEFORE, DIED, POWER_CUT, TORN, WRITES, Operation, hook

OLD, NEW, NEXT = 4, 6, 8
"""Steps of a save by itself: 2 and `OLD` are there, `NEW` is saved, and then `NEXT`."""

RUN_OLD, RUN_NEW = 8, 10
"""Of a whole run: it measures after `RUN_NEW` as well, so `best` may move with that save."""

KEEP_LAST = 2
ERRORS = (errno.ENOSPC, errno.EIO)
RESUMES_EVERY = 20
"""In the short version one in so many strikes is followed by a whole run."""

Fate = str | int


@dataclass(frozen=True)
class Point:
    """One change of a save, and what happens there."""

    index: int
    operation: Operation
    fate: Fate
    number: int = 0

    def __str__(self) -> str:
        return f"{fate_name(self.fate)} at change {self.index} ({self.operation})"


def fate_name(fate: Fate) -> str:
    """A fate in words."""
    return errno.errorcode[fate] if isinstance(fate, int) else fate


class Scene(Protocol):
    """A save that can be repeated, and struck."""

    name: str

    def list_points(self) -> list[Operation]:
        """The changes that it makes, in order."""

    def struck(self, point: Point) -> Wait[str | None]:
        """Repeat it, struck at a point, and go on afterwards. What is wrong then; None: nothing."""


def scenes(world: World, is_short: bool) -> list[Scene]:
    """A save by itself, at a free place and over a damaged checkpoint, and one in the middle of a run."""
    alone = [SaveAlone(f"a save {name}", world, name, is_short) for name in ("at a free place", "over a damaged one")]
    return [alone[0]] if is_short else [*alone, SaveOfRun("a save of a run", world)]


def points_of(operations: list[Operation], is_short: bool) -> Iterator[Point]:
    """Every change with every fate; in the short version every change with a death, and other fates in turn."""
    number = itertools.count()
    for index, operation in enumerate(operations):
        fates: list[Fate] = [BEFORE, POWER_CUT, *ERRORS, *([TORN] if operation.name in WRITES else [])]
        if is_short:
            others = fates[1:]
            fates = (
                [BEFORE, others[index % len(others)]] if operation.name not in WRITES or index % 3 == 0 else [BEFORE]
            )
        for fate in fates:
            yield Point(index, operation, fate, next(number))
    yield Point(len(operations) - 1, operations[-1], AFTER, next(number))


@dataclass
class SaveAlone:
    """`checkpoint.save` beside two checkpoints.

    Attributes:
        place: What it finds at its place.
        with_sync: False: fsync does nothing, which a power cut has to bring to light.
    """

    name: str
    world: World
    place: str
    is_short: bool
    with_sync: bool = True

    def _folder(self, name: str) -> Path:
        folder = self.world.folder / f"{self.name.replace(' ', '-')}-{name}"
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir(parents=True)
        is_damaged = "damaged" in self.place
        for step in (2, OLD, NEW) if is_damaged else (2, OLD):
            shutil.copytree(self.world.checkpoint_of(step), checkpoint.place_of(checkpoints, step))
        checkpoint.point(checkpoints, "latest", checkpoint.place_of(checkpoints, OLD))
        if is_damaged:
            os.truncate(checkpoint.place_of(checkpoints, NEW) / checkpoint.WEIGHTS, 100)
        return folder

    def list_points(self) -> list[Operation]:
        folder = self._folder("list")
        checkpoints = folder / "checkpoints"
        return _recorded(checkpoints, lambda: save(self.world, checkpoints, NEW), checkpoint.place_of(checkpoints, NEW))

    def struck(self, point: Point) -> Wait[str | None]:
        folder = self._folder(str(point.number))
        checkpoints = folder / "checkpoints"
        ended = yield from Child(lambda: self._strike(checkpoints, point)).ended()
        problem = _unwanted_end(ended, point) or _problem_on_disk(checkpoints, (OLD, NEW, NEXT))
        if problem is None and not isinstance(point.fate, int):  # an error's process has saved once more itself
            ended = yield from Child(lambda: save(self.world, checkpoints, NEXT)).ended()
            problem = _problem_of_next(ended, checkpoints)
        if problem is None and (point.number % RESUMES_EVERY == 0 or not self.is_short):
            problem = yield from _resumed(self.world, folder, has_lines=False)
        return _cleaned(folder, self.name, point, problem)

    def _strike(self, checkpoints: Path, point: Point) -> None:
        index = itertools.count()
        is_on = True
        hook(checkpoints, lambda operation: point.fate if is_on and next(index) == point.index else None)
        if not self.with_sync:
            os.fsync = lambda descriptor: None
        is_saved = False
        with contextlib.suppress(CheckpointError):
            save(self.world, checkpoints, NEW)
            is_saved = True
        is_on = False
        if isinstance(point.fate, int):  # the run lives on, and saves again
            _raise(_problem_on_disk(checkpoints, (NEW,) if is_saved else (OLD, NEW)))
            save(self.world, checkpoints, NEXT)
            _raise(_problem_on_disk(checkpoints, (NEXT,)) or _leftovers(checkpoints))


@dataclass
class SaveOfRun:
    """The save of one step in the middle of a whole run; a power cut takes what is not synced of the whole folder."""

    name: str
    world: World

    def list_points(self) -> list[Operation]:
        folder = self.world.folder / "run-list"
        file = self.world.run_file(folder)
        operations = _recorded(folder, lambda: train(file), folder.with_suffix(".json"))
        is_part = _save_of(RUN_NEW)
        return [operation for operation in operations if is_part(operation)]

    def struck(self, point: Point) -> Wait[str | None]:
        folder = self.world.folder / f"run-{point.number}"
        checkpoints = folder / "checkpoints"
        file = self.world.run_file(folder)
        ended = yield from Child(lambda: self._strike(file, folder, point)).ended()
        problem = _unwanted_end(ended, point)
        if problem is None and not isinstance(point.fate, int):
            problem = _problem_on_disk(checkpoints, (RUN_OLD, RUN_NEW))
        if problem is None and isinstance(point.fate, int):
            problem = self.world.bits.difference(bits_of(folder)) or _leftovers(checkpoints)
        if problem is None:
            problem = yield from _resumed(self.world, folder, has_lines=True)
        return _cleaned(folder, self.name, point, problem)

    def _strike(self, file: Path, folder: Path, point: Point) -> object:
        index, is_part, lock = itertools.count(), _save_of(RUN_NEW), threading.Lock()

        def decide(operation: Operation) -> Fate | None:
            with lock:
                return point.fate if is_part(operation) and next(index) == point.index else None

        hook(folder, decide)
        return train(file)


def _save_of(step: int) -> Callable[[Operation], bool]:
    """Whether the next change belongs to the save of a step: from the first that names it to the first of the next."""
    saves = list[str]()

    def is_part(operation: Operation) -> bool:
        folder, name, *_ = *Path(operation.path).parts, "", ""
        if folder != "checkpoints":
            return False
        if operation.name == "mkdir" and name.startswith(".step-"):
            saves.append(name)
        return bool(saves) and saves[-1].startswith(f".step-{step:08d}")

    return is_part


def problems_without_sync(world: World) -> Wait[int]:
    """How many power cuts after a rename do harm where fsync does nothing: the strikes' own test."""
    scene = SaveAlone("a save without fsync", world, "at a free place", True, with_sync=False)
    moves = [each for each in enumerate(scene.list_points()) if each[1].name in ("rename", "replace")]
    num_problems = 0
    for number, (index, operation) in enumerate(moves, 1):
        num_problems += (yield from scene.struck(Point(index, operation, POWER_CUT, number))) is not None
    return num_problems


def save(world: World, folder: Path, step: int) -> None:
    """Save what the undisturbed run had at a step, as the trainer does."""
    torch.set_num_threads(1)
    source = world.checkpoint_of(step)
    drafter = checkpoint.load_drafter(source)
    optimizer = MasterAdamW(drafter, Optim(), torch.float32, sums_gradients=False)
    checkpoint.load_training(source, drafter, optimizer, is_started=True)
    checkpoint.save(folder, checkpoint.load_state(source), drafter, optimizer, keep_last=KEEP_LAST)


def _recorded(folder: Path, work: Callable[[], object], written: Path) -> list[Operation]:
    """The changes below a folder that `work` makes in a fork; all files of the folder `written` are among them."""
    record = folder.with_suffix(".json")

    def recording() -> object:
        operations: list[Operation] = []
        hook(folder, operations.append)
        code = work()
        record.write_text(json.dumps([asdict(operation) for operation in operations]), encoding="utf-8")
        return code

    ended = alone(Child(recording).ended())
    assert ended.code == 0, ended.output
    operations = [Operation(**entry) for entry in json.loads(record.read_text(encoding="utf-8"))]
    files = {file.name for file in written.iterdir()} if written.is_dir() else set()
    unseen = files - {Path(operation.path).name for operation in operations}
    assert not unseen, f"files are written past the hooks: {unseen}"
    return operations


def _resumed(world: World, folder: Path, *, has_lines: bool) -> Wait[str | None]:
    """Let the real trainer go on, and compare; without metrics of its start a run has those from its resumption on."""
    file = world.run_file(folder)
    ended = yield from Child(lambda: train(file)).ended()
    if ended.code != 0:
        return f"the resumed run ended with {ended.code}: {ended.output[-2000:]}"
    bits = bits_of(folder)
    if not has_lines:
        missing = len(world.bits.lines) - len(bits.lines)
        bits = replace(bits, lines=world.bits.lines[:missing] + bits.lines)
    return world.bits.difference(bits) or _leftovers(folder / "checkpoints")


def _cleaned(folder: Path, name: str, point: Point, problem: str | None) -> str | None:
    if problem is None:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return f"{name}: {point}: {problem}"


def _raise(problem: str | None) -> None:
    if problem is not None:
        raise AssertionError(problem)


def _unwanted_end(ended: Ended, point: Point) -> str | None:
    wanted = 0 if isinstance(point.fate, int) else DIED
    if ended.code != wanted:
        return f"the process ended with {ended.code}: {ended.output[-2000:]}"
    return "a traceback: " + ended.output[-2000:] if ended.has_traceback else None


def _problem_on_disk(checkpoints: Path, wanted: tuple[int, ...]) -> str | None:
    step = newest_step(checkpoints)
    if step not in wanted:
        names = sorted(path.name for path in checkpoints.glob("*"))
        return f"the newest complete checkpoint is {step} of {wanted}: {names}"
    latest = checkpoints / "latest"
    if not latest.is_symlink():
        return "latest is gone"
    try:
        checkpoint.verify(latest.resolve())
    except CheckpointError as error:
        return f"latest: {error}"
    return None


def _problem_of_next(ended: Ended, checkpoints: Path) -> str | None:
    if ended.code != 0:
        return f"the next save ended with {ended.code}: {ended.output[-2000:]}"
    return _problem_on_disk(checkpoints, (NEXT,)) or _leftovers(checkpoints)


def _leftovers(checkpoints: Path) -> str | None:
    names = sorted(path.name for path in checkpoints.iterdir())
    hidden = [name for name in names if name.startswith(".")]
    steps = [name for name in names if name.startswith("step-")]
    if hidden:
        return f"left over: {hidden}"
    if len(steps) > KEEP_LAST + 1:  # `best` keeps one
        return f"more checkpoints than are kept: {steps}"
    return None
