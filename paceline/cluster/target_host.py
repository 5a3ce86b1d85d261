"""What runs in a target's own process: the same frozen target as in one process, behind a few calls.

Results are returned rather than put into Ray's store by this process: so the driver owns them, and they outlive it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import paceline
from paceline.cluster.arrays import Arrays, Encoded, Packed, num_bytes, pack, unpack, unpack_tokens
from paceline.cluster.pages import Watched
from paceline.config import RunConfig, parse_config
from paceline.errors import PacelineError
from paceline.pipeline.lanes import Idle
from paceline.profiling import stages
from paceline.train.feature_cache import decode, encode
from paceline.train.target import check_taps, load_target

LOOK_TOKENS = 1024
"""Tokens over which the error of fp8 is measured, once a process: in float32 a whole batch may not fit."""


@dataclass(frozen=True)
class Loaded:
    """What a target's process says once it has its target.

    Attributes:
        problem: Why it has none, and that it is no use to try again; None: it has.
        version: Of the package there.
        head: Fingerprint of embedding and head.
        packed: Whether rows run packed.
    """

    pid: int
    host: str
    version: str
    problem: str | None = None
    device: str = ""
    fingerprint: str = ""
    head: str = ""
    packed: bool = False
    packing_note: str = ""
    quantization_note: str | None = None


@dataclass(frozen=True)
class Made:
    """What there is to say of a batch's features, beside them.

    Attributes:
        context_feature, last_hidden: Type and shape of each, as the target made them.
        num_bytes: Of both on their way.
        busy_s, idle_s: Seconds for making them, and without work before that.
        error: What rounding to fp8 did to the context feature, the norm of the difference by its own; None where
            nobody looked.
    """

    context_feature: tuple[str, tuple[int, ...]]
    last_hidden: tuple[str, tuple[int, ...]] | None
    num_bytes: int
    busy_s: float
    idle_s: float
    error: float | None = None

    @classmethod
    def of(cls, arrays: Arrays, busy_s: float, idle_s: float, error: float | None = None) -> Made:
        """What is said of these."""
        context, last = arrays
        of_last = None if last is None else (last.dtype, last.shape)
        return cls((context.dtype, context.shape), of_last, num_bytes(arrays), busy_s, idle_s, error)


class TargetHost(Watched):
    """A target in a process of its own; one in several parts is called by several threads at a time.

    Args:
        tree: The resolved configuration, plain.
        role: ``target-i``.
    """

    def __init__(self, tree: dict[str, Any], role: str) -> None:
        self._config: RunConfig = parse_config(tree)
        self._role = role
        self._folder = Path(self._config.run.dir)  # the driver's; used where this host has it as well
        self._here = threading.local()
        self._idle = Idle()
        self._has_looked = False
        if self._folder.is_dir():
            write_log_to(self._folder / "logs" / f"{role}.log")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")

    def load(self) -> Loaded:
        """Load the target; problems that another try would have again are told, not raised."""
        here: dict[str, Any] = {"pid": os.getpid(), "host": platform.node(), "version": paceline.__version__}
        on_gpu = self._config.run.device.startswith("cuda")
        if on_gpu and self._config.topology.gpus_per_target:  # Ray shows a process the GPUs that are its own
            run = self._config.run.model_copy(update={"device": "cuda:0"})
            self._config = self._config.model_copy(update={"run": run})
        try:
            self._target = load_target(self._config)
            check_taps(self._target)
        except PacelineError as error:
            return Loaded(**here, problem=f"{type(error).__name__}: {error}")
        self.open_page(self._folder, self._role, on_gpu)
        return Loaded(
            **here,
            device=str(self._target.device),
            fingerprint=self._target.fingerprint(),
            head=self._target.head_fingerprint(),
            packed=self._target.packed,
            packing_note=self._target.packing_note,
            quantization_note=self._target.quantization_note,
        )

    def features(self, fields: dict[str, Any]) -> tuple[Made, Arrays]:
        """Features of a row from `pack_tokens`; the first part is small, and may be had without the second."""
        with stages.named_thread(self._role), stages.as_role(self._role), self._call() as idle_s:
            started = time.perf_counter()
            tokens = unpack_tokens(fields)
            stages.next_batch(tokens.number)
            batch = self._target.features(tokens)
            num_taps, error = len(self._target.layer_ids), None
            if self._config.pipeline.transport == "fp8" and not self._has_looked:
                self._has_looked, error = True, _rounding_error(batch.context_feature, num_taps)
            feature = self._packed("context", batch.context_feature, num_taps)
            last = None if batch.last_hidden is None else self._packed("last", batch.last_hidden, 1)
            arrays = Arrays(feature, last)
            return Made.of(arrays, time.perf_counter() - started, idle_s, error), arrays

    def document(self, input_ids: Packed) -> Packed:
        """Context features of a document alone."""
        with stages.as_role(self._role), self._call():
            return pack(self._target.document_features(unpack(input_ids).clone()).cpu())

    @contextlib.contextmanager
    def _call(self) -> Iterator[float]:
        """Around a call: the seconds before it in which there was none."""
        here = vars(self._here)
        if "is_waiting" not in here:  # a new thread would take the machine's number of compute threads
            torch.set_num_threads(int(self._config.topology.threads))
        elif here["is_waiting"]:
            stages.PUT_WAIT.__exit__(None, None, None)
        here["is_waiting"] = self._config.topology.gpus_per_target <= 1  # of several threads none waits for the others
        try:
            with self._idle.call() as idle_s:
                yield idle_s
        finally:
            if here["is_waiting"]:
                stages.PUT_WAIT.__enter__()  # until the next call

    def _packed(self, name: str, feature: Tensor, num_states: int) -> Packed | Encoded:
        """Features ``[S, W]`` as they travel."""
        if self._config.pipeline.transport == "target":
            with stages.PREV_CPU_COPY_SYNC:
                return self._on_host(name, feature)
        with stages.PACK_HIDDEN:
            values, scales = encode(feature, num_states, "fp8")
        assert scales is not None, "fp8 has scales"
        with stages.PREV_CPU_COPY_SYNC:
            parts = self._on_host(name, values), self._on_host(f"scales of {name}", scales)
        return Encoded(*parts, str(feature.dtype).removeprefix("torch."))

    def _on_host(self, name: str, tensor: Tensor) -> Packed:
        """Bytes in memory that this thread's next call uses again: Ray has copied them by then."""
        if tensor.device.type != "cuda":
            return pack(tensor)
        staging = vars(self._here)
        place: Tensor | None = staging.get(name)
        if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
            place = staging[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        place.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        return pack(place)


def _rounding_error(feature: Tensor, num_states: int) -> float | None:
    """What fp8 does to features ``[S, W]``: the norm of the difference by their own, over the first `LOOK_TOKENS`; None
    if that is no number."""
    whole = feature[:LOOK_TOKENS]
    rounded = decode(*encode(whole, num_states, "fp8"), num_states, torch.float32, num_states)
    error = float((rounded - whole.float()).norm() / whole.float().norm())
    return error if math.isfinite(error) else None


def write_log_to(path: Path) -> None:
    """Send what this process and its libraries print to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)
