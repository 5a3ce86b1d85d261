"""The training loop: take a batch, step, record, measure, save; and going on exactly where a run stopped."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.control.run_folder import RunFolder
from paceline.dflash.acceptance import Acceptance
from paceline.errors import CheckpointError, PacelineError, PipelineError
from paceline.models.draft import DFlashDrafter
from paceline.pipeline.local import FeatureStream, MakeFeatures, open_stream
from paceline.plan.resolve import ResolvedRun
from paceline.records import FeatureBatch, StepSums
from paceline.train import checkpoint
from paceline.train.checkpoint import TrainState
from paceline.train.metrics import MetricsLog
from paceline.train.step import TrainStep

log = logging.getLogger(__name__)

Validate = Callable[[DFlashDrafter], Acceptance | None]
"""Acceptance on the held-out rows, teacher-forced; None if a stop was asked for meanwhile."""


class Progress(Protocol):
    """What watches a run; the command line draws it."""

    def step(self, line: dict[str, Any], total_steps: int) -> None:
        """A line of ``metrics.jsonl`` has been written."""


@dataclass(frozen=True)
class TrainReport:
    """How a run ended; written to ``report.json``.

    Attributes:
        ending: ``finished``, the name of the signal that stopped it, or ``max_hours``.
        step, total_steps: Updates done and planned.
        tokens: Document tokens trained on by this process (earlier ones of a resumed run excluded).
        seconds: Wall time of this process's training.
        put_wait_s, get_wait_s: Seconds targets were blocked by a full queue (summed) and the drafter by an empty one.
        skipped_batches: Micro-batches of steps in which nothing was to be learnt.
        best_acceptance_length: Best on the held-out rows; None without any.
        issued, delivered: Micro-batches handed to the targets by this process, and taken by the drafter.
    """

    ending: str
    step: int
    total_steps: int
    tokens: int
    seconds: float
    put_wait_s: float
    get_wait_s: float
    skipped_batches: int
    best_acceptance_length: float | None
    issued: int
    delivered: int


def restore(run: RunFolder, trainer: TrainStep, fresh: TrainState) -> TrainState:
    """Load the newest complete checkpoint of the run into the trainer, or start fresh if it has none.

    Raises: CheckpointError if the run was trained with another target, other data or other batches, or if all
        checkpoints are damaged.
    """
    place = checkpoint.newest(run.checkpoints)
    if place is None:
        if any(run.checkpoints.glob("step-*")):
            raise CheckpointError(
                f"no checkpoint in {run.checkpoints} is complete; choose another run.dir to start afresh"
            )
        return fresh
    state = checkpoint.load_state(place)
    for name, key in (("target_fingerprint", "target.path"), ("data_fingerprint", "data.path")):
        trained, now = getattr(state, name), getattr(fresh, name)
        if trained != now:
            raise CheckpointError(
                f"{place} was trained with other contents of {key}: {name} {trained[:12]}, now {now[:12]}"
            )
    for name in ("total_steps", "num_anchors"):
        trained, now = getattr(state, name), getattr(fresh, name)
        if trained != now:
            raise CheckpointError(
                f"{place} was trained with {name}={trained}, now it would be {now}: the run went on elsewhere, or with "
                "another version"
            )
    checkpoint.load_weights(place, trainer.drafter)
    if state.step:
        checkpoint.load_optimizer(place, trainer.drafter, trainer.optimizer)
    if state.best_step is not None:  # the process may have died between saving it and pointing to it
        best = checkpoint.place_of(run.checkpoints, state.best_step)
        if best.is_dir():
            checkpoint.point(run.checkpoints, "best", best)
    return state


class TrainLoop:
    """Drives one drafter through its batches.

    Args:
        run: Locked run folder.
        state: Where to start; from `restore`.
        make_features: Features of batch n; called by the target roles.
        validate: None without held-out rows.
        should_stop: Asked after every micro-batch; the name of the reason ends the run gracefully.
    """

    def __init__(
        self,
        run: RunFolder,
        resolved: ResolvedRun,
        trainer: TrainStep,
        state: TrainState,
        make_features: MakeFeatures,
        *,
        validate: Validate | None,
        progress: Progress,
        should_stop: Callable[[], str | None],
    ) -> None:
        self.run_folder = run
        self.resolved = resolved
        self.config = resolved.config
        self.trainer = trainer
        self.make_features = make_features
        self.validate = validate
        self.progress = progress
        self.should_stop = should_stop
        self.step = state.step
        self.next_batch = state.next_batch
        self.skipped_batches = state.skipped_batches
        self.best = state.best_acceptance_length
        self.best_step = state.best_step
        self._start = state
        self._saved_step = state.step if state.step else -1
        self._weights_are_whole = True
        self._totals = StepSums()

    def run(self) -> TrainReport:
        """Train to the end, or until a stop is asked for; the last step is always saved.

        A stop between the micro-batches of a step drops what the step has gathered: the next start makes it again.
        Raises: PipelineError when a role fails, after saving the last complete step.
        """
        started = time.perf_counter()
        metrics = MetricsLog(self.run_folder.metrics_file, self.step)
        pipeline, topology = self.config.pipeline, self.config.topology
        try:
            with open_stream(
                self.make_features,
                self.next_batch,
                self.resolved.end_batch,
                layout=topology.layout,
                targets=topology.targets,
                threads=int(topology.threads),
                queue_depth=int(pipeline.queue_depth),
                max_bytes=int(pipeline.queue_gib * 2**30),
                min_ready=pipeline.min_ready,
                should_stop=self.should_stop,
            ) as stream:
                ending = self._train_and_save(stream, metrics)
                ledger = stream.ledger()
        finally:
            metrics.close()
        return TrainReport(
            ending=ending,
            step=self.step,
            total_steps=self.resolved.total_steps,
            tokens=self._totals.tokens,
            seconds=time.perf_counter() - started,
            put_wait_s=self._totals.put_wait_s,
            get_wait_s=self._totals.get_wait_s,
            skipped_batches=self.skipped_batches,
            best_acceptance_length=self.best,
            issued=ledger.issued,
            delivered=ledger.delivered,
        )

    def _train_and_save(self, stream: FeatureStream, metrics: MetricsLog) -> str:
        """Save before the targets are joined: one of them may be in a long forward pass."""
        try:
            ending = self._consume(stream, metrics)
        except PipelineError:
            self._save_after_failure()
            raise
        if self._saved_step != self.step:
            self._save()
        return ending

    def _consume(self, stream: FeatureStream, metrics: MetricsLog) -> str:
        sums, began = StepSums(), time.perf_counter()
        for features in stream:
            if (reason := self.should_stop()) is not None:
                return reason
            sums += self._accumulate(features)
            number = features.tokens.number
            if sums.batches < self.resolved.batches_per_step and number + 1 < self.resolved.end_batch:
                continue
            sums.put_wait_s, sums.get_wait_s = stream.take_waits()
            self._totals += sums
            if sums.weight == 0:  # no step number is used up
                self.next_batch = number + 1
                self.skipped_batches += sums.batches
                log.warning("batches up to %d hold nothing to learn; no step is made of them", number)
            else:
                with self._failing_as_drafter(number):
                    self._finish_step(sums, number, stream.num_ready(), began, metrics)
            sums, began = StepSums(), time.perf_counter()
            if self.step >= self.resolved.total_steps:
                break
        is_over = self.step >= self.resolved.total_steps or self.next_batch >= self.resolved.end_batch
        return "finished" if is_over else self.should_stop() or "finished"

    @contextlib.contextmanager
    def _failing_as_drafter(self, number: int) -> Iterator[None]:
        """Whatever fails in here ends the run under the role's name and batch."""
        try:
            yield
        except PacelineError:
            raise
        except Exception as error:
            raise PipelineError(
                f"drafter-0 failed on batch {number}: {type(error).__name__}: {error}", role="drafter-0", batch=number
            ) from error

    def _accumulate(self, features: FeatureBatch) -> StepSums:
        number = features.tokens.number
        with self._failing_as_drafter(number):
            sums = self.trainer.accumulate(features)
        if not math.isfinite(sums.loss):
            self._weights_are_whole = False  # finite perhaps, but of no use
            raise PipelineError(
                f"drafter-0: the loss of batch {number} is {sums.loss}; data set rows {list(features.tokens.rows)}. "
                "Lower optim.lr in a new run.dir, or look at the rows with `paceline inspect`",
                role="drafter-0",
                batch=number,
            )
        return sums

    def _finish_step(self, sums: StepSums, number: int, queue: int, began: float, metrics: MetricsLog) -> None:
        self._weights_are_whole = False
        try:
            lr, grad_norm = self.trainer.update(self.step, sums.weight)
        except FloatingPointError:
            self._weights_are_whole = True  # nothing was updated
            raise
        self.step += 1
        self.next_batch = number + 1
        self._weights_are_whole = True
        line = {
            "step": self.step,
            "batch": number,
            "loss": sums.loss / sums.weight,
            "acceptance_length_est": sums.committed / sums.blocks,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": sums.tokens,
            "tok_per_s": sums.tokens / (time.perf_counter() - began),
            "queue": queue,
            "put_wait_s": sums.put_wait_s,
            "get_wait_s": sums.get_wait_s,
        }
        is_last = self.step >= self.resolved.total_steps
        improved = False
        try:
            if self.validate is not None and (is_last or self.step % self.config.eval.validate_every == 0):
                improved = self._measure(self.validate, line)
        finally:
            metrics.write(line)  # also when measuring fails: the step has been made, and will be saved
        if improved or is_last or self.step % self.config.checkpoint.every_steps == 0:
            place = self._save()
            if improved:
                checkpoint.point(self.run_folder.checkpoints, "best", place)
        self.progress.step(line, self.resolved.total_steps)

    def _measure(self, validate: Validate, line: dict[str, Any]) -> bool:
        """Add the acceptance length on the held-out rows to the step's line; whether it is the best so far."""
        acceptance = validate(self.trainer.drafter)
        if acceptance is None:
            return False
        line["validation_acceptance_length"] = acceptance.length
        improved = self.best is None or acceptance.length > self.best
        if improved:
            self.best, self.best_step = acceptance.length, self.step
        return improved

    def _save(self) -> Path:
        state = TrainState(
            step=self.step,
            next_batch=self.next_batch,
            skipped_batches=self.skipped_batches,
            total_steps=self.resolved.total_steps,
            num_anchors=self._start.num_anchors,
            best_acceptance_length=self.best,
            best_step=self.best_step,
            target_fingerprint=self._start.target_fingerprint,
            data_fingerprint=self._start.data_fingerprint,
        )
        place = checkpoint.save(
            self.run_folder.checkpoints,
            state,
            self.trainer.drafter,
            self.trainer.optimizer,
            keep_last=self.config.checkpoint.keep_last,
            keep_every=self.config.checkpoint.keep_every,
        )
        self._saved_step = self.step
        self.run_folder.event("checkpoint", step=self.step)
        return place

    def _save_after_failure(self) -> None:
        """The weights are those of the last complete step: worth keeping, unless that fails as well."""
        if self._saved_step == self.step or self.step == 0 or not self._weights_are_whole:
            return
        try:
            self._save()
        except (PacelineError, OSError) as error:  # the failure that ends the run is the one to report
            log.error("%s", error)
