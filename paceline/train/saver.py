"""Saving while training goes on: a copy in host memory, and one thread that writes it.

The copy is quick, and on a GPU not even waited for. What fails to be written stays in memory and is tried again, until
it is on the disk or a newer one takes its place; training does not stop for that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import CheckpointError
from paceline.models.draft import DFlashDrafter
from paceline.profiling import stages
from paceline.train import checkpoint
from paceline.train.checkpoint import Content, TrainState
from paceline.train.optim import BUFFERS, MasterAdamW

log = logging.getLogger(__name__)

RETRY_S, MAX_RETRY_S = 30.0, 600.0
"""Pause after a failed write, doubled after each until it is the longest."""

FLUSH_TRIES, FLUSH_RETRY_S = 3, 1.0
"""How often, and with which pauses, a failed write is tried again while somebody waits for it."""

CLOSE_S = 30.0
"""How long `Saver.close` waits for a write that is under way; a disk that hangs does not keep the process."""


class Snapshot:
    """Copies on the host of all tensors of a checkpoint, in memory that is taken once.

    In a group of drafters it is rank 0's, and taken by a collective.

    Args:
        is_pinned: Whether the memory is such that a GPU need not be waited for; on the CPU it never is.

    Raises: MemoryError, RuntimeError where that much memory cannot be had.
    """

    def __init__(self, drafter: DFlashDrafter, optimizer: MasterAdamW, *, is_pinned: bool = True) -> None:
        self._shape, self._optimizer = drafter.shape, optimizer
        self._others = {name: tensor for name, tensor in drafter.state_dict().items() if name not in optimizer.masters}
        device = optimizer.failed.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        places = {key: torch.empty(optimizer.num_elements, device="meta") for key in BUFFERS} | self._others
        is_pinned &= self._stream is not None
        if not is_pinned:  # pinned memory is real from the start, and refused where it is not there
            _ask_for(sum(tensor.numel() * tensor.element_size() for tensor in places.values()))
        self._copies = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned) for name, tensor in places.items()
        }

    def take(self) -> None:
        """Copy the tensors as they are once the current stream's work is done; the next update waits for it there."""
        if self._stream is None:
            self._copy()
            return
        current = torch.cuda.current_stream(self._stream.device)
        is_gathered = self._optimizer.group.size > 1  # the collectives keep their order on the stream of all others
        stream = current if is_gathered else self._stream
        stream.wait_stream(current)
        self._copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(stream):
            self._copy()
            self._copied.record()
        if not is_gathered:
            self._optimizer.update_after(self._copied)

    def content(self, state: TrainState) -> Content:
        """What to write, once the copies are there; from any thread. Raises: PipelineError if they will not be."""
        if self._copied is not None:
            self._copied.synchronize()
            self._optimizer.group.check()
            self._copied = None  # a group that ends later takes nothing back
        masters = self._optimizer.named(self._copies["master"])
        others = {name: self._copies[name] for name in self._others}
        return Content(state, self._shape, others | masters, self._optimizer.state(state.step, self._copies))

    def _copy(self) -> None:
        self._optimizer.copy_buffers(self._copies)
        for name, source in self._others.items():
            self._copies[name].copy_(source, non_blocking=True)


@dataclass
class _Handed:
    """A snapshot that is to be written.

    Attributes:
        content: Waits for the copies and gives what to write.
        before: Called before that.
        place: Where it is, once it has been written and only the links are missing.
        failures: Failed writes so far.
        due: When to try again, on the monotonic clock.
    """

    state: TrainState
    is_best: bool
    content: Callable[[], Content]
    before: Callable[[], object] = lambda: None
    place: Path | None = None
    failures: int = 0
    due: float = 0.0
    is_waiting: bool = False


class Saver:
    """Writes checkpoints of one run, in a thread of its own; `save` and `flush` are the drafter's thread's.

    Args:
        folder: The run's ``checkpoints``, which nobody else changes.
        keep: `checkpoint.keep_last` and `checkpoint.keep_every` as they are now.
        on_saved: Told step and folder of each checkpoint that is on the disk, in the writing thread.
        on_failed: Told step and reason of each failed write, in the writing thread.
        pinned: Names of checkpoints that are not to be removed now, as `checkpoint.retain` has it.
        gather: In a group of drafters: called before a snapshot is taken; has every other rank call
            `optimizer.copy_buffers(None)`, and does not wait for them.

    Attributes:
        saved_step: Step of the last checkpoint that this saver has written.
        problem: Why the newest snapshot is not on the disk, and what is done about it; None while all is well.
        num_bytes: Bytes written so far; grows while a file is written.
    """

    def __init__(
        self,
        folder: Path,
        drafter: DFlashDrafter,
        optimizer: MasterAdamW,
        *,
        keep: Callable[[], tuple[int, int | None]],
        on_saved: Callable[[int, Path], None],
        on_failed: Callable[[int, str], None],
        pinned: Callable[[], Collection[str]] = frozenset,
        gather: Callable[[], object] = lambda: None,
    ) -> None:
        self._pinned = pinned
        self._gather = gather
        self._folder, self._drafter, self._optimizer = folder, drafter, optimizer
        self._keep, self._on_saved, self._on_failed = keep, on_saved, on_failed
        self.saved_step: int | None = None
        self.problem: str | None = None
        self._reason: str | None = None
        self.num_bytes = 0
        self._changed = threading.Condition()
        self._handed: _Handed | None = None  # until it is on the disk, or a newer one takes its place
        self._is_closing = self._is_in_foreground = False
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a snapshot is being written, or about to be; not while it waits to be tried again."""
        handed = self._handed
        return handed is not None and not handed.is_waiting

    def save(self, state: TrainState, *, is_best: bool = False, before: Callable[[], object] = lambda: None) -> None:
        """Have the present weights and moments written as the checkpoint of `state.step`.

        `before` is called first, in the writing thread: what is to be on the disk when the checkpoint is.

        Waits while the one before is being written. One that could not be written until now is given up for this one.
        """
        with stages.CHECKPOINT_SNAPSHOT:
            with self._changed:
                self._changed.wait_for(lambda: not self.is_writing)
                given_up, self._handed = self._handed, None
            if given_up is not None and given_up.state.step != state.step:
                log.warning("the checkpoint of step %d is given up for that of %d", given_up.state.step, state.step)
            if self._is_closing:
                raise CheckpointError(f"the checkpoint of step {state.step} comes after the end of the run")
            if self._is_in_foreground or not self._get_ready():
                self._write_in_foreground(state, is_best, before)
                return
            assert self._snapshot is not None
            if self._optimizer.group.size > 1:
                self._gather()
            self._snapshot.take()
            with self._changed:
                snapshot = self._snapshot
                self._handed = _Handed(state, is_best, lambda: snapshot.content(state), before)
                self._changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when everything handed over is on the disk; a write that fails is tried a few times more.

        Raises: CheckpointError if it cannot be written, or is not within `timeout_s`; it may still come then.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            for attempt in range(1 + FLUSH_TRIES):
                if attempt > 1:
                    self._wait(lambda: self._handed is None, _earlier(deadline, time.monotonic() + FLUSH_RETRY_S))
                if attempt and self._handed is not None:
                    self._handed.is_waiting, self._handed.due = False, 0.0
                    self._changed.notify_all()
                if not self._wait(lambda: not self.is_writing, deadline):
                    assert self._handed is not None
                    place = checkpoint.place_of(self._folder, self._handed.state.step)
                    raise CheckpointError(
                        f"checkpoint {place} is not on the disk after {timeout_s:g} s; see whether the disk is slow or "
                        "hangs; earlier checkpoints are untouched"
                    )
                if self._handed is None:
                    break
            if self._reason is not None:
                raise CheckpointError(self._reason)

    def close(self) -> None:
        """End the thread, after a write that is under way; nothing is tried again. `flush` comes before."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _wait(self, is_so: Callable[[], bool], deadline: float | None) -> bool:
        return self._changed.wait_for(is_so, None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _get_ready(self) -> bool:
        """Whether there is memory for snapshots and a thread to write them, at the latest now."""
        try:
            if self._snapshot is None:
                self._snapshot = Snapshot(self._drafter, self._optimizer)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
                thread.start()
                self._thread = thread
        except (MemoryError, RuntimeError) as error:
            log.warning("training waits for each checkpoint: it cannot be written beside it: %s", error)
            self._is_in_foreground, self._snapshot = True, None
        return not self._is_in_foreground

    def _write_in_foreground(self, state: TrainState, is_best: bool, before: Callable[[], object]) -> None:
        """The tensors themselves are written: a failure cannot be made good once they have changed."""
        drafter, optimizer = self._drafter, self._optimizer
        if optimizer.group.size > 1:
            self._gather_in_foreground(state, is_best, before)
            return
        weights, moments = drafter.state_dict() | optimizer.masters, optimizer.state(state.step)
        self._try(_Handed(state, is_best, lambda: Content(state, drafter.shape, weights, moments), before))

    def _gather_in_foreground(self, state: TrainState, is_best: bool, before: Callable[[], object]) -> None:
        """No rank holds it all: there has to be memory for it, now if not at the start."""
        self._gather()
        snapshot, refusal = None, MemoryError()
        try:
            snapshot = Snapshot(self._drafter, self._optimizer, is_pinned=False)
        except MemoryError as error:
            refusal = error
        if snapshot is None:
            self._optimizer.copy_buffers(None)  # the other ranks are let through
        else:
            snapshot.take()

        def content() -> Content:
            if snapshot is None:
                raise refusal
            return snapshot.content(state)

        self._try(_Handed(state, is_best, content, before))

    def _run(self) -> None:
        with stages.named_thread("checkpoint"), stages.as_role("checkpoint"):
            while (handed := self._next()) is not None:
                is_written = self._try(handed)
                with self._changed:
                    if is_written:
                        self._handed = None
                    else:
                        handed.is_waiting = True
                    self._changed.notify_all()

    def _next(self) -> _Handed | None:
        """The snapshot to be written next; None when the saver is closed."""
        with self._changed:
            while True:
                handed, now = self._handed, time.monotonic()
                if handed is not None and (not handed.is_waiting or (handed.due <= now and not self._is_closing)):
                    handed.is_waiting = False
                    return handed
                if self._is_closing:
                    return None
                self._changed.wait(None if handed is None else handed.due - now)

    def _try(self, handed: _Handed) -> bool:
        step = handed.state.step
        try:
            with stages.CHECKPOINT_WRITE:
                if handed.place is None:
                    handed.before()
                    handed.place = checkpoint.write(self._folder, handed.content(), self._moved)
                for name in ("latest", "best") if handed.is_best else ("latest",):
                    checkpoint.point(self._folder, name, handed.place)
        except Exception as error:  # whatever it is, the run goes on without this checkpoint
            self._fail(handed, error)
            return False
        self.saved_step, self.problem, self._reason = step, None, None
        if handed.failures:
            log.warning("the checkpoint of step %d is on the disk now", step)
        with stages.CHECKPOINT_WRITE:
            _safely(self._retain, handed.place)
        _safely(self._on_saved, step, handed.place)
        return True

    def _retain(self, written: Path) -> None:
        keep_last, keep_every = self._keep()
        checkpoint.retain(self._folder, written, keep_last, keep_every, self._pinned)

    def _fail(self, handed: _Handed, error: Exception) -> None:
        step = handed.state.step
        pause_s = min(RETRY_S * 2**handed.failures, MAX_RETRY_S)
        handed.failures += 1
        handed.due = time.monotonic() + pause_s
        reason = checkpoint.why_not_written(checkpoint.place_of(self._folder, step), error)
        again = "with the next checkpoint" if self._is_in_foreground else f"in {pause_s:g} s, or with the next one"
        self.problem, self._reason = f"{reason}; tried again {again}", reason
        log.error("%s", self.problem)
        _safely(self._on_failed, step, reason)

    def _moved(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


def _safely(do: Callable[..., None], *what: object) -> None:
    """The checkpoint is written or not: what fails besides must not end the writing thread."""
    try:
        do(*what)
    except Exception:
        log.exception("after writing a checkpoint something else failed")


def _earlier(deadline: float | None, other: float) -> float:
    return other if deadline is None else min(deadline, other)


def _ask_for(num_bytes: int) -> None:
    """Raises: MemoryError where the system says that there is not so much: it gives more than it has, and kills."""
    available = _available_bytes()
    if available is not None and num_bytes > available:
        raise MemoryError(f"a copy takes {num_bytes / 2**30:.2f} GiB, {available / 2**30:.2f} GiB are free")


def _available_bytes() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None
