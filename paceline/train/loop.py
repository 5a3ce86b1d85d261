"""The training loop: take a batch, step, record, measure, save; and going on exactly where a run stopped."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.control.run_folder import RunFolder
from paceline.dflash.acceptance import Acceptance
from paceline.errors import CheckpointError, PacelineError, PipelineError
from paceline.models.draft import DFlashDrafter
from paceline.pipeline.local import FeatureStream, MakeFeatures, open_stream
from paceline.plan.resolve import ResolvedRun
from paceline.profiling import stages, verdict
from paceline.profiling.verdict import Verdict, Window
from paceline.records import StepResult, StepSums
from paceline.train import checkpoint
from paceline.train.checkpoint import TrainState
from paceline.train.metrics import MetricsLog
from paceline.train.step import PendingResult, TrainStep

log = logging.getLogger(__name__)

JUDGE_EVERY_S = 5.0
"""Seconds between looks at what limits the pipeline."""

MAX_WINDOWS = 2048
"""Steps kept one by one for that; longer ago, neighbours are joined."""

Validate = Callable[[DFlashDrafter], Acceptance | None]
"""Acceptance on the held-out rows, teacher-forced; None if a stop was asked for meanwhile."""


class Progress(Protocol):
    """What watches a run; the command line draws it."""

    def step(self, line: dict[str, Any], total_steps: int) -> None:
        """A line of ``metrics.jsonl`` has been written."""

    def judged(self, verdict: Verdict) -> None:
        """What limits the pipeline, as far as is known by now."""


@dataclass(frozen=True)
class _Launched:
    """An update whose result has not been read.

    Attributes:
        before: Step, next batch and skipped batches that the run goes back to if the update was left out.
        step: Updates done with this one.
        number: Number of its last micro-batch.
        rows: Data set rows of its micro-batches.
        queue: Batches that were waiting.
    """

    result: PendingResult
    sums: StepSums
    before: tuple[int, int, int]
    step: int
    number: int
    rows: list[int]
    queue: int


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
        verdict: What limited the pipeline, as `paceline.profiling.verdict.Verdict` has it.
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
    verdict: dict[str, Any]


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
    checkpoint.load_training(place, trainer.drafter, trainer.optimizer, is_started=state.step > 0)
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
        between: Called between micro-batches, on the drafter's thread.
        track: Takes each line of ``metrics.jsonl``.
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
        between: Callable[[], None] = lambda: None,
        track: Callable[[dict[str, Any]], None] = lambda line: None,
    ) -> None:
        self.run_folder = run
        self.resolved = resolved
        self.config = resolved.config
        self.trainer = trainer
        self.make_features = make_features
        self.validate = validate
        self.progress = progress
        self.should_stop = should_stop
        self.between = between
        self.track = track
        self.step = state.step
        self.next_batch = state.next_batch
        self.skipped_batches = state.skipped_batches
        self.best = state.best_acceptance_length
        self.best_step = state.best_step
        self._start = state
        self._saved_step = state.step if state.step else -1
        self._weights_are_whole = True
        self._totals = StepSums()
        self._launched: deque[_Launched] = deque()
        self._settled_at = 0.0
        self._num_tokens = self._num_batches = 0
        self._stream: FeatureStream | None = None
        self._windows: list[Window] = []
        self._has_merged = False
        self._judged_at = 0.0

    def run(self) -> TrainReport:
        """Train to the end, or until a stop is asked for; the last step is always saved.

        A stop between the micro-batches of a step drops what the step has gathered: the next start makes it again.
        Raises: PipelineError when a role fails, after saving the last complete step.
        """
        started = time.perf_counter()
        metrics = MetricsLog(self.run_folder.metrics_file, self.step)
        pipeline, topology = self.config.pipeline, self.config.topology
        self._show_progress()
        stages.set_gauge("first_step", self.step)
        stages.set_gauge("started_ns", time.monotonic_ns())
        try:
            with (
                stages.as_role("drafter-0"),
                open_stream(
                    self.make_features,
                    self.next_batch,
                    self.resolved.end_batch,
                    layout=topology.layout,
                    targets=topology.targets,
                    threads=int(topology.threads),
                    queue_depth=int(pipeline.queue_depth),
                    max_bytes=int(pipeline.queue_gib * 2**30),
                    min_ready=pipeline.min_ready,
                    batches_per_step=self.resolved.batches_per_step,
                    should_stop=self.should_stop,
                ) as stream,
            ):
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
            verdict=self._judge().record(),
        )

    def _train_and_save(self, stream: FeatureStream, metrics: MetricsLog) -> str:
        """Save before the targets are joined: one of them may be in a long forward pass."""
        try:
            ending = self._consume(stream, metrics)
        except PipelineError:
            self._save_after_failure(metrics)
            raise
        if self._saved_step != self.step:
            self._save()
        return ending

    def _consume(self, stream: FeatureStream, metrics: MetricsLog) -> str:
        sums, rows = StepSums(), list[int]()
        left_over = StepSums()  # of batches that no step was made of: their time and waits are in the next line's
        self._settled_at, self._stream = time.perf_counter(), stream
        for features in stream:
            self.between()
            if (reason := self.should_stop()) is not None:
                self._settle(0, metrics)
                return reason
            number = features.tokens.number
            stages.next_batch(number)
            with self._failing_as_drafter(number):
                sums += self.trainer.accumulate(features)
            rows.extend(features.tokens.rows)
            if sums.batches < self.resolved.batches_per_step and number + 1 < self.resolved.end_batch:
                continue
            sums.put_wait_s, sums.get_wait_s, sums.ready_wait_s = stream.take_waits()
            self._totals += sums
            if sums.num_rows == 0:  # no step number is used up
                self.next_batch = number + 1
                self.skipped_batches += sums.batches
                left_over += replace(sums, tokens=0, blocks=0)
                log.warning("batches up to %d hold nothing to learn; no step is made of them", number)
            else:
                sums += left_over
                left_over = StepSums()
                self._finish_step(sums, number, rows, stream.num_ready(), metrics)
            sums, rows = StepSums(), []
            if self.step >= self.resolved.total_steps:
                break
        self._settle(0, metrics)
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

    def _finish_step(self, sums: StepSums, number: int, rows: list[int], queue: int, metrics: MetricsLog) -> None:
        """Launch the update; where nothing is due that needs it, its result is read when the next one is under way."""
        self._weights_are_whole = False
        with self._failing_as_drafter(number):
            result = self.trainer.update(self.step)
        before = self.step, self.next_batch, self.skipped_batches
        self.step += 1
        self.next_batch = number + 1
        self._weights_are_whole = True
        self._launched.append(_Launched(result, sums, before, self.step, number, rows, queue))
        self._settle(0 if self._is_due(self.step) else self.trainer.depth, metrics)

    def _is_last(self, step: int) -> bool:
        return step >= self.resolved.total_steps

    def _is_due(self, step: int) -> bool:
        """Whether the drafter is measured or saved after this step."""
        measures = self.validate is not None and step % self.config.eval.validate_every == 0
        return measures or self._is_last(step) or step % self.config.checkpoint.every_steps == 0

    def _settle(self, depth: int, metrics: MetricsLog) -> None:
        """Read the results of launched updates until `depth` are left; write them down, and measure and save."""
        while len(self._launched) > depth:
            launched = self._launched.popleft()
            with self._failing_as_drafter(launched.number):
                result = launched.result.read()
                self._check(launched, result)
                with stages.LOG:
                    line = self._line(launched, result)
                self._record(line, metrics)

    def _check(self, launched: _Launched, result: StepResult) -> None:
        """Raises: PipelineError, FloatingPointError; the run is back where the last good update left it then."""
        if math.isfinite(result.loss) and result.is_finite:
            return
        self.step, self.next_batch, self.skipped_batches = launched.before
        self._launched.clear()  # later updates were left out as well
        if math.isfinite(result.loss):
            raise FloatingPointError(f"the gradient norm is {result.grad_norm}; lower optim.lr in a new run.dir")
        self._weights_are_whole = False  # finite perhaps, but of no use
        raise PipelineError(
            f"drafter-0: the loss of batch {launched.number} is {result.loss}; data set rows {launched.rows}. "
            "Lower optim.lr in a new run.dir, or look at the rows with `paceline inspect`",
            role="drafter-0",
            batch=launched.number,
        )

    def _line(self, launched: _Launched, result: StepResult) -> dict[str, Any]:
        """A line of ``metrics.jsonl``; its times leave out what was measured and saved since the last."""
        sums, now = launched.sums, time.perf_counter()
        line = {
            "step": launched.step,
            "batch": launched.number,
            "loss": result.loss,
            "acceptance_length_est": result.committed / sums.blocks,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens": sums.tokens,
            "tok_per_s": sums.tokens / (now - self._settled_at),
            "queue": launched.queue,
            "put_wait_s": sums.put_wait_s,
            "get_wait_s": sums.get_wait_s,
            "ready_wait_s": sums.ready_wait_s,
            "batches": sums.batches,
            "seconds": now - self._settled_at,
        }
        self._windows += verdict.windows_of([line])
        self._num_tokens += sums.tokens
        self._num_batches += sums.batches
        self._show_progress()
        return line

    def _show_progress(self) -> None:
        """On the profile page, for whoever looks from outside."""
        stages.set_gauge("step", self.step)
        stages.set_gauge("total_steps", self.resolved.total_steps)
        stages.set_gauge("tokens", self._num_tokens)
        stages.set_gauge("batches", self._num_batches)

    def _record(self, line: dict[str, Any], metrics: MetricsLog) -> None:
        step, improved = line["step"], False
        try:
            if self.validate is not None and (self._is_last(step) or step % self.config.eval.validate_every == 0):
                improved = self._measure(self.validate, line)
        finally:
            with stages.LOG:
                metrics.write(line)  # also when measuring fails: the step has been made, and will be saved
                self.track(line)
        if improved or self._is_last(step) or step % self.config.checkpoint.every_steps == 0:
            place = self._save()
            if improved:
                checkpoint.point(self.run_folder.checkpoints, "best", place)
        if "validation_acceptance_length" in line or self._saved_step == step:
            self._totals += self._waits()  # in a pause the targets wait for nothing that says who is slower
        with stages.LOG:
            if time.perf_counter() - self._judged_at > JUDGE_EVERY_S:
                self.progress.judged(self._judge())
            self.progress.step(line, self.resolved.total_steps)
        self._settled_at = time.perf_counter()

    def _waits(self) -> StepSums:
        """What was waited since the last step's were taken."""
        assert self._stream is not None
        put_s, get_s, ready_s = self._stream.take_waits()
        return StepSums(put_wait_s=put_s, get_wait_s=get_s, ready_wait_s=ready_s)

    def _judge(self) -> Verdict:
        """What limits the pipeline, from the steps of this process so far."""
        self._judged_at = time.perf_counter()
        windows = self._windows if self._has_merged else verdict.drop_warm_up(self._windows)
        if len(windows) > MAX_WINDOWS:
            windows = self._windows = verdict.merge(windows, MAX_WINDOWS // 2)
            self._has_merged = True
        topology = self.config.topology
        return verdict.judge(
            windows,
            targets=topology.targets,
            queue_depth=int(self.config.pipeline.queue_depth),
            batches_per_step=self.resolved.batches_per_step,
            in_turn=topology.layout == "colocated",
        )

    def _measure(self, validate: Validate, line: dict[str, Any]) -> bool:
        """Add the acceptance length on the held-out rows to the step's line; whether it is the best so far."""
        with stages.VALIDATE:
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
        with stages.CHECKPOINT_SNAPSHOT:
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

    def _save_after_failure(self, metrics: MetricsLog) -> None:
        """The weights are those of the last complete step: worth keeping, unless that fails as well."""
        with contextlib.suppress(PacelineError):
            self._settle(0, metrics)
        if self._saved_step == self.step or self.step == 0 or not self._weights_are_whole:
            return
        try:
            self._save()
        except Exception as error:  # the failure that ends the run is the one to report
            log.error("%s", error)
