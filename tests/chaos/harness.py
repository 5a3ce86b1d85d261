"""Runs of the real trainer in forked processes that may be killed, stopped, starved or left without a disk.

The process that forks has imported everything and started no thread, so that a child is as good as a fresh interpreter.
What waits is written as generators, which `together` takes turns with: nothing here needs a thread either.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import importlib
import json
import logging
import os
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline.cli.main import main
from paceline.config import dump_config
from paceline.train import checkpoint
from paceline.train.metrics import read_metrics
from tests.toy import Toy, build_toy

T = TypeVar("T")
Wait = Generator[None, None, T]
"""Takes turns with others until it returns."""

LIMIT_S = 90.0
"""A process that takes longer hangs: an undisturbed one takes about one second."""

STACKS = signal.SIGUSR2
_FAMILIES = ("paceline", "pandas", "transformers", "dateutil", "numpy", "_strptime", "safetensors", "torch.utils")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: Exit code; negative: the signal that ended it; None: it hung, and was killed.
        output: What it wrote to stdout and stderr.
    """

    code: int | None
    output: str

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output


class Child:
    """A forked process that does `work` and exits with what it returns."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.started = time.monotonic()
        self._code: int | None = None
        self._output = b""
        self._pipe, theirs = os.pipe()  # not a file: what is said has to be read when no file can be written
        os.set_blocking(self._pipe, False)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_child(work, theirs)
        os.close(theirs)

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            self._read()
            if pid:
                os.close(self._pipe)
        return self._code

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def ended(self, limit_s: float = LIMIT_S) -> Wait[Ended]:
        """Wait for its end; past the limit its stacks are written to its output, and it is killed."""
        hangs = False
        while self.poll() is None:
            if not hangs and time.monotonic() - self.started > limit_s:
                hangs = True
                self.send(signal.SIGCONT)
                self.send(STACKS)
                yield from pause(0.5)
                self.send(signal.SIGKILL)
            yield
        return Ended(None if hangs else self._code, self._output.decode(errors="replace"))

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._pipe, 1 << 16):
                self._output += part


def _be_child(work: Callable[[], object], output: int) -> None:
    code: object = 99
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        faulthandler.register(STACKS, file=2, all_threads=True)
        code = work()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is over
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does: waits for what is no daemon
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def together(jobs: Iterable[Wait[T]], at_a_time: int) -> list[T]:
    """Results of all, in the order of their ends; so many take turns."""
    waiting, active, results = iter(jobs), [], []
    while True:
        while len(active) < at_a_time and (job := next(waiting, None)) is not None:
            active.append(job)
        if not active:
            return results
        for job in list(active):
            try:
                next(job)
            except StopIteration as end:
                results.append(end.value)
                active.remove(job)
        time.sleep(0.001)


def alone(job: Wait[T]) -> T:
    """The result of one."""
    return together([job], 1)[0]


def pause(seconds: float) -> Wait[None]:
    """Let others take turns for a while."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield


@dataclass(frozen=True)
class Bits:
    """What two runs are compared by.

    Attributes:
        tensors: SHA-256 of every tensor of the newest checkpoint: weights, masters, moments.
        lines: What a metrics line says that does not depend on the clock, in order.
    """

    tensors: dict[str, str]
    lines: list[dict[str, Any]]

    def difference(self, other: Bits) -> str | None:
        """The first that differs; None if all is the same."""
        if self.tensors.keys() != other.tensors.keys():
            return "the checkpoints hold other tensors"
        for name, digest in self.tensors.items():
            if other.tensors[name] != digest:
                return f"tensor {name}"
        for mine, its in zip(self.lines, other.lines, strict=False):
            if mine != its:
                return f"metrics line of step {mine['step']}: {mine} and {its}"
        return (
            None if len(self.lines) == len(other.lines) else f"{len(self.lines)} and {len(other.lines)} metrics lines"
        )


@dataclass
class World:
    """Folders, the undisturbed run, and how further runs are started.

    Attributes:
        folder: For everything.
        settings: Overrides that all runs share.
        steps: Steps of a whole run.
        seconds, train_seconds: Wall time of an undisturbed run, and of its training.
        bits: Of the undisturbed run.
    """

    folder: Path
    toy: Toy
    settings: tuple[str, ...]
    steps: int = 0
    seconds: float = 0.0
    train_seconds: float = 0.0
    bits: Bits = field(default_factory=lambda: Bits({}, []))

    @property
    def straight(self) -> Path:
        """The undisturbed run, with all its checkpoints."""
        return self.folder / "straight"

    def checkpoint_of(self, step: int) -> Path:
        """The undisturbed run's checkpoint of a step."""
        return checkpoint.place_of(self.straight / "checkpoints", step)

    def run_file(self, run: Path, *overrides: str) -> Path:
        """Write the run file of a run."""
        file = run.with_name(f"{run.name}.yaml")
        file.write_text(dump_config(self.toy.config(run, *self.settings, *overrides)), encoding="utf-8")
        return file


def train(run_file: Path) -> object:
    """`paceline train RUN_FILE`, in this process; what it exits with."""
    sys.argv = ["paceline", "train", str(run_file)]
    try:
        main()
    except SystemExit as error:
        return error.code
    return 0


def build(folder: Path, device: str = "cpu", max_steps: int | None = None) -> World:
    """Make target and data, and train the undisturbed run; neither of it in this process.

    Afterwards this process has imported what a run imports.
    """
    torch.set_num_threads(1)
    logging.getLogger("paceline").setLevel(logging.ERROR)  # of this process: a run's own sets it anew
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    check_forkable()
    ended = alone(Child(lambda: build_toy(folder) and None).ended())
    assert ended.code == 0, ended.output
    settings = [
        f"run.device={device}",
        "data.epochs=2",
        "draft.num_layers=1",
        "topology.layout=split",
        "topology.targets=2",
        "checkpoint.every_steps=2",
        "checkpoint.keep_last=2",
        "eval.validate_every=5",
        *(["run.deterministic=true", "kernels.compile=false"] if device.startswith("cuda") else []),
        *([f"run.max_steps={max_steps}"] if max_steps else []),
    ]
    toy = Toy(folder / "target", folder / "data", folder / "chats.jsonl")
    world = World(folder, toy, tuple(settings))
    run_file = world.run_file(world.straight, "checkpoint.keep_last=1000")
    modules = folder / "modules.json"

    def scout() -> object:
        code = train(run_file)
        modules.write_text(json.dumps(list(sys.modules)), encoding="utf-8")
        return code

    ended = alone(Child(scout).ended())
    assert ended.code == 0, ended.output
    _import(json.loads(modules.read_text(encoding="utf-8")))
    check_forkable()
    gc.collect()
    gc.freeze()  # a child's first collection would copy all that the two share
    world.bits = bits_of(world.straight)
    world.steps = len(world.bits.lines)
    again = folder / "again"
    run_file, started = world.run_file(again), time.monotonic()
    ended = alone(Child(lambda: train(run_file)).ended())
    world.seconds = time.monotonic() - started
    world.train_seconds = json.loads((again / "report.json").read_text(encoding="utf-8"))["seconds"]
    assert ended.code == 0, ended.output
    difference = world.bits.difference(bits_of(again))
    assert difference is None, f"two undisturbed runs differ: {difference}"
    return world


def _import(names: list[str]) -> None:
    for name in names:
        if name not in sys.modules and name.split(".")[0] in _FAMILIES:
            with contextlib.suppress(ImportError):  # one that is only made by another module
                importlib.import_module(name)


def check_forkable() -> None:
    """Assert that this process has one thread and no device."""
    names = [Path(f"/proc/self/task/{tid}/comm").read_text().strip() for tid in os.listdir("/proc/self/task")]
    assert threading.active_count() == 1, f"the process that forks has threads: {names}"
    # a CUDA build brings libraries with threads of their own
    assert len(names) == 1 or torch.version.cuda, f"the process that forks has threads: {names}"
    assert not torch.cuda.is_initialized(), "the process that forks holds a device"


def newest_step(checkpoints: Path) -> int | None:
    """Step of the newest checkpoint that verifies."""
    place = checkpoint.newest(checkpoints)
    return None if place is None else int(place.name.removeprefix("step-"))


def bits_of(run: Path) -> Bits:
    """What a run has come to; read without torch. Raises: AssertionError if it has no complete checkpoint."""
    place = checkpoint.newest(run / "checkpoints")
    assert place is not None, f"{run} has no complete checkpoint"
    tensors = {}
    for file in sorted(place.glob("*.safetensors")):
        for name, digest in digests(file).items():
            tensors[f"{file.name}:{name}"] = digest
    keys = ("step", "batch", "loss", "lr", "grad_norm", "acceptance_length_est", "tokens", "batches")
    lines = [{key: line[key] for key in keys} for line in read_metrics(run / "metrics.jsonl")]
    return Bits(tensors, lines)


def digests(file: Path) -> dict[str, str]:
    """SHA-256 of every tensor of a safetensors file."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), memoryview(content)[8 + length :]
    return {
        name: hashlib.sha256(data[slice(*entry["data_offsets"])]).hexdigest()
        for name, entry in header.items()
        if name != "__metadata__"
    }
