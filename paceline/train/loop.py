"""The training loop: take a batch, step, record, measure, save; and going on exactly where a run stopped."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from paceline.control.lines import LineLog
from paceline.control.run_folder import RunFolder
from paceline.control.steering import Steering
from paceline.dflash.acceptance import Acceptance
from paceline.errors import CheckpointError, DataError, PacelineError, PipelineError
from paceline.files import explain
from paceline.models.draft import DFlashDrafter
from paceline.pipeline.coordinator import Coordinator, Ledger
from paceline.pipeline.local import FeatureStream, MakeFeatures, Maker, open_stream
from paceline.plan.resolve import ResolvedRun
from paceline.profiling import stages, verdict
from paceline.profiling.verdict import Verdict, Window
from paceline.records import StepResult, StepSums
from paceline.train import checkpoint
from paceline.train.checkpoint import TrainState
from paceline.train.evaluations import Evaluations, Measured
from paceline.train.metrics import MetricsLog, amend, join
from paceline.train.saver import Saver
from paceline.train.step import PendingResult, TrainStep

log = logging.getLogger(__name__)

JUDGE_EVERY_S = 5.0
"""Seconds between looks at what limits the pipeline."""

BAD_BATCHES_FILE = "bad_batches.jsonl"
"""In the run folder: what was left out as not finite, with where it comes from."""

DIVERGED = 4
"""Batches in a row that are not finite: the weights are to blame then, and not worth a checkpoint."""

AWAIT_S = 0.5
"""Seconds between looks at evaluations that are waited for; a stop is obeyed within that."""

MAX_WINDOWS = 2048
"""Steps kept one by one for that; longer ago, neighbours are joined."""

OpenStream = Callable[..., contextlib.AbstractContextManager[FeatureStream]]
"""`pipeline.local.open_stream`, perhaps with something fixed."""

Validate = Callable[[DFlashDrafter], Acceptance | None]
"""Acceptance on the held-out rows, teacher-forced; None if a stop was asked for meanwhile."""


class Progress(Protocol):
    """What watches a run; the command line draws it."""

    def step(self, line: dict[str, Any], total_steps: int) -> None:
        """A line of ``metrics.jsonl`` has been written."""

    def judged(self, verdict: Verdict) -> None:
        """What limits the pipeline, as far as is known by now."""

    def measured(self, measured: Measured, is_best: bool) -> None:
        """The checkpoint of an earlier step has been evaluated."""

    def phase(self, text: str) -> None:
        """Something else than training is being done."""


@dataclass(frozen=True)
class _Launched:
    """An update whose result has not been read.

    Attributes:
        before: Step, next batch and skipped batches that the run goes back to if the update was left out.
        step: Updates done with this one.
        numbers: Its micro-batches.
        queue: Batches that were waiting.
        is_measured, is_saved, is_evaluated: What is to follow, apart from what the result gives cause for.
    """

    result: PendingResult
    sums: StepSums
    before: tuple[int, int, int]
    step: int
    numbers: list[int]
    queue: int
    is_measured: bool
    is_saved: bool
    is_evaluated: bool


class _NotFinite(Exception):
    """An update was left out, as its loss or gradient is not finite; the run stands where it was before.

    Attributes:
        numbers: The update's micro-batches.
    """

    def __init__(self, launched: _Launched, result: StepResult) -> None:
        super().__init__(f"the loss is {result.loss}, the gradient norm {result.grad_norm}")
        self.numbers = launched.numbers


@dataclass(frozen=True)
class TrainReport:
    """How a run ended; written to ``report.json``.

    Attributes:
        ending: ``finished``, the name of the signal that stopped it, ``stop``, or ``max_hours``.
        step, total_steps: Updates done and planned.
        tokens: Document tokens trained on by this process (earlier ones of a resumed run excluded).
        seconds: Wall time of this process's training.
        put_wait_s, get_wait_s: Seconds targets were blocked by a full queue (summed) and the drafter by an empty one.
        skipped_batches: Micro-batches left out in the whole run: nothing was to be learnt, or something not finite.
        best_acceptance_length: Best on the held-out rows; None without any.
        best_measured_acceptance_length, best_measured_step: Best that evaluations beside training found; None without.
        ledger: Micro-batches of this process, as `paceline.pipeline.coordinator.Ledger` has them.
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
    best_measured_acceptance_length: float | None
    best_measured_step: int | None
    ledger: dict[str, int]
    verdict: dict[str, Any]


def restore(
    run: RunFolder,
    trainer: TrainStep,
    fresh: TrainState,
    allowed: Collection[str] = (),
    *,
    validation_chooses: bool = True,
) -> TrainState:
    """Load the newest complete checkpoint of the run into the trainer, or start fresh if it has none.

    Args:
        allowed: Keys that were allowed to change (`--allow-change`): what follows from them may differ.
        validation_chooses: Whether `best` is the best on the held-out rows.
    Raises: CheckpointError if the run was trained with another target, other data or other batches, or if all
        checkpoints are damaged.
    """
    place = checkpoint.newest(run.checkpoints)
    if place is None:
        if any(run.checkpoints.glob("step-*")):
            raise CheckpointError(
                f"no checkpoint in {run.checkpoints} is complete; choose another run.dir to start afresh"
            )
        if run.has_saved():  # a disk that is not mounted, or a link that leads nowhere
            raise CheckpointError(
                f"{run.path} has saved checkpoints, and {run.checkpoints} holds none; bring them back, or choose "
                "another run.dir to start afresh"
            )
        return fresh
    state = checkpoint.load_state(place)
    for name, keys in (
        ("target_fingerprint", ("target.path", "target.adapter")),
        ("data_fingerprint", ("data.path",)),
    ):
        trained, now = getattr(state, name), getattr(fresh, name)
        if trained != now and not any(key in allowed for key in keys):
            raise CheckpointError(
                f"{place} was trained with other contents of {' or '.join(keys)}: {name} {trained[:12]}, now "
                f"{now[:12]}; --allow-change {keys[0]} goes on all the same"
            )
    for name in ("total_steps", "num_anchors"):
        trained, now = getattr(state, name), getattr(fresh, name)
        if trained != now and not allowed:
            raise CheckpointError(
                f"{place} was trained with {name}={trained}, now it would be {now}: the run went on elsewhere, or with "
                "another version"
            )
    checkpoint.load_training(place, trainer.drafter, trainer.optimizer, is_started=state.step > 0)
    if (
        validation_chooses and state.best_step is not None
    ):  # the process may have died between saving it and pointing to it
        best = checkpoint.place_of(run.checkpoints, state.best_step)
        if best.is_dir():
            try:
                checkpoint.point(run.checkpoints, "best", best)
            except OSError as error:
                log.warning("%s stays as it is: %s", run.checkpoints / "best", error)
    return replace(
        fresh,
        step=state.step,
        next_batch=state.next_batch,
        skipped_batches=state.skipped_batches,
        best_acceptance_length=state.best_acceptance_length,
        best_step=state.best_step,
        owes_measurement=state.owes_measurement,
    )


class TrainLoop:
    """Drives one drafter through its batches.

    Args:
        run: Locked run folder.
        state: Where to start; from `restore`.
        make_features: Features of batch n; called by the target roles.
        saver: Of the run's checkpoints.
        steering: What is asked of the run while it goes on.
        validate: None without held-out rows.
        should_stop: Asked after every micro-batch; the name of the reason ends the run gracefully.
        source_of: Where a data set row comes from, ``FILE:LINE``.
        saves_first: Save before the first step, as something has changed that checkpoints tell of.
        open_features: `open_stream`, or one that knows of targets elsewhere.
        track: Takes each line of ``metrics.jsonl``.
        track_added: Takes the step of a line, and what is added to it later.
        evaluations: Beside training; they choose `best` then.
    """

    def __init__(
        self,
        run: RunFolder,
        resolved: ResolvedRun,
        trainer: TrainStep,
        state: TrainState,
        make_features: MakeFeatures,
        *,
        saver: Saver,
        steering: Steering,
        validate: Validate | None,
        progress: Progress,
        should_stop: Callable[[], str | None],
        source_of: Callable[[int], str] = str,
        saves_first: bool = False,
        open_features: OpenStream = open_stream,
        track: Callable[[dict[str, Any]], None] = lambda line: None,
        track_added: Callable[[int, dict[str, Any]], None] = lambda step, added: None,
        evaluations: Evaluations | None = None,
    ) -> None:
        self.run_folder = run
        self.resolved = resolved
        self.config = resolved.config
        self.trainer = trainer
        self.make_features = make_features
        self.validate = validate
        self.progress = progress
        self.saver = saver
        self.steering = steering
        self.should_stop = should_stop
        self.source_of = source_of
        self._saves_first = saves_first
        self._open_features = open_features
        self.track, self.track_added = track, track_added
        self.evaluations = evaluations
        self._to_join: dict[int, dict[str, Any]] = {}
        self.step = state.step
        self.next_batch = state.next_batch
        self.skipped_batches = state.skipped_batches
        self.best = state.best_acceptance_length
        self.best_step = state.best_step
        self._start = state
        self._saved_step = state.step if state.step else -1
        self._weights_are_whole = True
        self._bad: set[int] = set()
        self._bad_in_a_row = 0
        self._tried_again = -1
        self._owes_measurement = False
        self._coordinator = Coordinator(state.next_batch, resolved.end_batch)
        self._between: Callable[[], None] = lambda: None
        self._totals = StepSums()
        self._launched: deque[_Launched] = deque()
        self._settled_at = 0.0
        self._num_tokens = self._num_batches = 0
        self._stream: FeatureStream | None = None
        self._windows: list[Window] = []
        self._has_merged = False
        self._judged_at = 0.0

    def ledger(self) -> Ledger:
        """Where the micro-batches of this process are."""
        return self._coordinator.ledger()

    def run(self, between: Callable[[], None] = lambda: None) -> TrainReport:
        """Train to the end, or until a stop is asked for; the last step is always saved.

        A stop between the micro-batches of a step drops what the step has gathered: the next start makes it again.

        Args:
            between: Called between micro-batches, on the drafter's thread.
        Raises: PipelineError when a role fails, after saving the last complete step; DataError if there was nothing
            to learn; CheckpointError if the last step cannot be saved.
        """
        started = time.perf_counter()
        self._between = between
        improved = self._make_up_measurement() if self._start.owes_measurement else False
        metrics = MetricsLog(self.run_folder.metrics_file, self.step)
        self._take_up_evaluations()
        self._show_progress()
        stages.set_gauge("first_step", self.step)
        stages.set_gauge("started_ns", time.monotonic_ns())
        try:
            with stages.as_role("drafter-0"):
                if self._start.owes_measurement or self._saves_first:
                    self._save(metrics, is_best=improved)
                ending = None
                while ending is None:
                    ending = self._run_stream(metrics)
                seconds = time.perf_counter() - started
                if ending == "finished" and self.step > 0:
                    self._await_evaluations(metrics)
                self._take_measured(metrics)
        finally:
            metrics.close()
            self._join(self._to_join)
        if ending == "finished" and self.step == 0:
            raise DataError(f"nothing was to be learnt from any of {self.skipped_batches} batches: no step was made")
        best = self.evaluations.best if self.evaluations else None
        return TrainReport(
            ending=ending,
            step=self.step,
            total_steps=self.resolved.total_steps,
            tokens=self._totals.tokens,
            seconds=seconds,
            put_wait_s=self._totals.put_wait_s,
            get_wait_s=self._totals.get_wait_s,
            skipped_batches=self.skipped_batches,
            best_acceptance_length=self.best,
            best_measured_acceptance_length=best.acceptance_length if best else None,
            best_measured_step=best.step if best else None,
            ledger=asdict(self.ledger()),
            verdict=self._judge().record(),
        )

    def _make_up_measurement(self) -> bool:
        """Measure what a stop has cut short, and add it to the present step's line; whether it is the best so far."""
        if self.validate is None:
            return False
        found: dict[str, Any] = {}
        with stages.as_role("drafter-0"), self._failing_as_drafter(self.next_batch - 1):
            improved = self._measure(self.validate, found)
        if line := amend(self.run_folder.metrics_file, self.step, found):
            self.track(line)
        return improved

    def _take_up_evaluations(self) -> None:
        """Lines that lack what was measured get it, while nothing else writes the file."""
        if self.evaluations is None:
            return
        is_over = self.step >= self.resolved.total_steps or self.next_batch >= self.resolved.end_batch
        found = self.evaluations.begin(self.step, is_over)
        self._join({step: measured.line() for step, measured in found.items()}, self.evaluations.waiting())

    def _join(self, found: dict[int, dict[str, Any]], awaited: Collection[int] = ()) -> None:
        try:
            if found or awaited:
                join(self.run_folder.metrics_file, found, awaited)
        except OSError as error:  # they are in files of their own as well
            log.warning("%s lacks what was measured: %s", self.run_folder.metrics_file, explain(error))

    def _take_measured(self, metrics: MetricsLog) -> None:
        """Add what evaluations have found to the lines of their steps."""
        if self.evaluations is None:
            return
        for measured in self.evaluations.take():
            line = measured.line()
            with stages.LOG:
                if not metrics.add(measured.step, line):
                    self._to_join[measured.step] = line
                self.track_added(measured.step, line)
                self.progress.measured(measured, is_best=self.evaluations.best == measured)

    def _await_evaluations(self, metrics: MetricsLog) -> None:
        """All is trained and saved: what is left is to evaluate it, until a stop is asked for."""
        if self.evaluations is None:
            return
        self.evaluations.ask(self.step)
        if steps := self.evaluations.waiting():
            self.progress.phase(f"evaluating step {', '.join(map(str, steps))}; a stop leaves it to `paceline resume`")
        while self.evaluations.is_busy:
            if self.should_stop() is not None:
                log.warning("step %d is not evaluated: `paceline resume` makes it up", self.evaluations.waiting()[-1])
                return
            self._between()
            with stages.VALIDATE:  # that it is entered again and again tells the watchdog that the run moves
                self.evaluations.wait(AWAIT_S)
            self._take_measured(metrics)

    def _run_stream(self, metrics: MetricsLog) -> str | None:
        """Train on batches in order; None where some have to be made again, as one of them is not finite."""
        pipeline, topology = self.config.pipeline, self.config.topology
        try:
            with self._open_features(
                self.make_features,
                self._coordinator,
                layout=topology.layout,
                targets=topology.targets,
                threads=int(topology.threads),
                queue_depth=int(pipeline.queue_depth),
                max_bytes=int(pipeline.queue_gib * 2**30),
                min_ready=pipeline.min_ready,
                batches_per_step=self.resolved.batches_per_step,
                should_stop=self.should_stop,
                max_retries=pipeline.max_retries,
            ) as stream:
                return self._train_and_save(stream, metrics)
        except _NotFinite as error:
            seen = error
        with self._saving_after_failure(metrics):
            self._find_bad(seen)
        self._coordinator = self._coordinator.rewound(self.next_batch)
        return None

    def _train_and_save(self, stream: FeatureStream, metrics: MetricsLog) -> str:
        """Save before the targets are joined: one of them may be in a long forward pass."""
        with self._saving_after_failure(metrics):
            ending = self._consume(stream, metrics)
        if self._saved_step != self.step:
            self._save(metrics)
        self.saver.flush()
        return ending

    def _consume(self, stream: FeatureStream, metrics: MetricsLog) -> str:
        sums, numbers = StepSums(), list[int]()
        left_over = StepSums()  # of batches that no step was made of: their time and waits are in the next line's
        self._settled_at, self._stream = time.perf_counter(), stream
        for features in stream:
            self._between()
            self._take_measured(metrics)
            if (reason := self.should_stop()) is not None:
                self._settle(0, metrics)
                return reason
            number = features.tokens.number
            stages.next_batch(number)
            if number in self._bad:
                sums += StepSums(batches=1)
            else:
                with self._failing_as_drafter(number):
                    sums += self.trainer.accumulate(features)
            numbers.append(number)
            if sums.batches < self.resolved.batches_per_step and number + 1 < self.resolved.end_batch:
                continue
            with self._failing_as_drafter(number):
                sums += self.trainer.gather()
            sums.put_wait_s, sums.get_wait_s, sums.ready_wait_s = stream.take_waits()
            if sums.num_rows == 0:  # no step number is used up
                self._settle(0, metrics)  # else they could be taken back with the update before
                self.next_batch = number + 1
                self.skipped_batches += sums.batches
                self._coordinator.skipped(numbers)
                left_over += replace(sums, tokens=0, blocks=0)
                if not self._bad.intersection(numbers):
                    log.warning("batches up to %d hold nothing to learn; no step is made of them", number)
            else:
                sums += left_over
                left_over = StepSums()
                self._finish_step(sums, numbers, stream.num_ready(), metrics)
            sums, numbers = StepSums(), []
            if self.step >= self.resolved.total_steps:
                break
        self._settle(0, metrics)
        is_over = self.step >= self.resolved.total_steps or self.next_batch >= self.resolved.end_batch
        return "finished" if is_over else self.should_stop() or "finished"

    def _find_bad(self, seen: _NotFinite) -> None:
        """Try the micro-batches of an update that was left out one by one; those that are not finite are left out.

        Which they are is a pure function of batch and weights, so a resumed run finds the same.
        Raises: PipelineError if none is to blame alone, or if there have been too many.
        """
        found: dict[int, tuple[str, tuple[int, ...]]] = {}
        maker = Maker(self.make_features, self._coordinator, self.config.pipeline.max_retries)
        self.trainer.drop()
        for number in seen.numbers:
            if number in self._bad:
                continue
            with stages.GET_WAIT, stages.as_role("target-0"):
                features = maker.make("target-0", number)
            stages.next_batch(number)
            with self._failing_as_drafter(number):
                what = self.trainer.not_finite(features)
            if what is not None:
                found[number] = (what, features.tokens.rows)
        if not found:
            self._try_again(seen)
            return
        self._note_bad(found)
        self._bad |= found.keys()
        self._bad_in_a_row += sum(what != "features" for what, _ in found.values())
        if len(self._bad) > self.config.run.max_bad_batches:
            self._give_up(found)

    def _try_again(self, seen: _NotFinite) -> None:
        """Nothing is wrong with any batch alone: perhaps it was chance. Raises: PipelineError the second time."""
        if self._tried_again == self.step:
            last = seen.numbers[-1]
            raise PipelineError(
                f"drafter-0: {seen} at step {self.step + 1}, batches up to {last}, twice, though each batch alone is "
                "finite. `paceline resume` tries it again; if it comes back, lower optim.lr in a new run.dir",
                role="drafter-0",
                batch=last,
            )
        self._tried_again = self.step
        log.warning("step %d is made again: %s, and each of its batches alone is finite", self.step + 1, seen)

    def _note_bad(self, found: dict[int, tuple[str, tuple[int, ...]]]) -> None:
        bad_log = LineLog(self.run_folder.path / BAD_BATCHES_FILE)
        for number, (what, rows) in found.items():
            sources = [self.source_of(row) for row in rows]
            line = {"time": time.time(), "step": self.step + 1, "batch": number, "what": what, "rows": rows}
            bad_log.write(line | {"sources": sources})
            log.warning(
                "batch %d is left out: its %s is not finite; it is made of %s",
                number, what, ", ".join(sources[:3]) + (" ..." if len(sources) > 3 else ""),
            )  # fmt: skip
        bad_log.close()

    def _give_up(self, found: dict[int, tuple[str, tuple[int, ...]]]) -> None:
        """Raises: PipelineError saying what is at fault; weights that have diverged are then not saved."""
        self._weights_are_whole = self._bad_in_a_row < DIVERGED
        number, (what, rows) = next(iter(found.items()))
        whose = f"look at {BAD_BATCHES_FILE} and at the rows (`paceline inspect`), or lower optim.lr"
        if what == "features":
            whose = f"the target makes them, not the drafter: look at its weights, or the rows in {BAD_BATCHES_FILE}"
        elif not self._weights_are_whole:
            whose = "the weights have diverged: lower optim.lr in a new run.dir"
        raise PipelineError(
            f"drafter-0: the {what} of batch {number} is not finite; data set rows {list(rows)}. "
            f"{len(self._bad)} such batches are more than run.max_bad_batches={self.config.run.max_bad_batches}: "
            + whose,
            role="drafter-0",
            batch=number,
        )

    @contextlib.contextmanager
    def _failing_as_drafter(self, number: int) -> Iterator[None]:
        """Whatever fails in here ends the run under the role's name and batch."""
        try:
            yield
        except (PacelineError, _NotFinite):
            raise
        except Exception as error:
            raise PipelineError(
                f"drafter-0 failed on batch {number}: {type(error).__name__}: {error}", role="drafter-0", batch=number
            ) from error

    def _finish_step(self, sums: StepSums, numbers: list[int], queue: int, metrics: MetricsLog) -> None:
        """Launch the update; where nothing is due that needs it, its result is read when the next one is under way."""
        self._weights_are_whole = False
        with self._failing_as_drafter(numbers[-1]):
            result = self.trainer.update(self.step)
        before = self.step, self.next_batch, self.skipped_batches
        self.step += 1
        self._owes_measurement = False
        self.next_batch = numbers[-1] + 1
        self.skipped_batches += sum(number in self._bad for number in numbers)
        self._weights_are_whole = True
        is_last = self.step >= self.resolved.total_steps or self.next_batch >= self.resolved.end_batch
        every = self.steering.config.checkpoint.every_steps
        is_evaluated = self.evaluations is not None and self.evaluations.is_due(self.step, is_last)
        launched = _Launched(
            result, sums, before, self.step, numbers, queue,
            is_measured=self.validate is not None and (is_last or self.step % self.config.eval.validate_every == 0),
            is_saved=is_last or is_evaluated or self.step % every == 0 or self.steering.wants_save(),
            is_evaluated=is_evaluated,
        )  # fmt: skip
        self._launched.append(launched)
        self._settle(0 if launched.is_measured or launched.is_saved else self.trainer.depth, metrics)

    def _settle(self, depth: int, metrics: MetricsLog) -> None:
        """Read the results of launched updates until `depth` are left; write them down, and measure and save."""
        while len(self._launched) > depth:
            launched = self._launched.popleft()
            with self._failing_as_drafter(launched.numbers[-1]):
                result = launched.result.read()
                self._check(launched, result)
                self._totals += launched.sums
                self._coordinator.trained(number for number in launched.numbers if number not in self._bad)
                self._coordinator.skipped(number for number in launched.numbers if number in self._bad)
                with stages.LOG:
                    line = self._line(launched, result)
                self._record(launched, line, metrics)

    def _check(self, launched: _Launched, result: StepResult) -> None:
        """Raises: _NotFinite; the run is back where the last good update left it then."""
        if math.isfinite(result.loss) and result.is_finite:
            self._bad_in_a_row = 0
            return
        self.step, self.next_batch, self.skipped_batches = launched.before
        self._launched.clear()  # later updates were left out as well
        raise _NotFinite(launched, result)

    def _line(self, launched: _Launched, result: StepResult) -> dict[str, Any]:
        """A line of ``metrics.jsonl``; its times leave out what was measured and saved since the last."""
        sums, now = launched.sums, time.perf_counter()
        line = {
            "step": launched.step,
            "batch": launched.numbers[-1],
            "loss": result.loss,
            "acceptance_length_est": sums.blocks / result.rounds,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            **result.parts,
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

    def _record(self, launched: _Launched, line: dict[str, Any], metrics: MetricsLog) -> None:
        improved = False
        try:
            if launched.is_measured and self.validate is not None:
                improved = self._measure(self.validate, line)
        finally:
            with stages.LOG:
                metrics.write(
                    line, has_room=launched.is_evaluated
                )  # also when measuring fails: the step has been made, and will be saved
                self.track(line)
        if launched.is_evaluated and self.evaluations is not None:
            self.evaluations.expect(line["step"])
        if improved or launched.is_saved:
            self._save(metrics, is_best=improved)
        if "validation_acceptance_length" in line or self._saved_step == line["step"]:
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
        """Add the acceptance length on the held-out rows to the step's line; whether `best` is to point there."""
        with stages.VALIDATE:
            acceptance = validate(self.trainer.drafter)
        self._owes_measurement = acceptance is None
        if acceptance is None:
            return False
        line["validation_acceptance_length"] = acceptance.length
        improved = self.best is None or acceptance.length > self.best
        if improved:
            self.best, self.best_step = acceptance.length, self.step
        return improved and self.evaluations is None

    def _save(self, metrics: MetricsLog, *, is_best: bool = False) -> None:
        """Hand the present state to the saver; the lines of its steps reach the disk before it does."""
        state = replace(
            self._start,
            step=self.step,
            next_batch=self.next_batch,
            skipped_batches=self.skipped_batches,
            best_acceptance_length=self.best,
            best_step=self.best_step,
            owes_measurement=self._owes_measurement,
        )
        self.steering.begin_save(self.step)
        self.saver.save(state, is_best=is_best, before=metrics.sync)
        self._saved_step = self.step

    @contextlib.contextmanager
    def _saving_after_failure(self, metrics: MetricsLog) -> Iterator[None]:
        """Where a role fails the weights are those of the last complete step: worth keeping, unless that fails too."""
        try:
            yield
        except _NotFinite:
            raise
        except Exception:
            with contextlib.suppress(PacelineError, _NotFinite):
                self._settle(0, metrics)
            try:
                if self._saved_step != self.step and self.step > 0 and self._weights_are_whole:
                    self._save(metrics)
                self.saver.flush()
            except Exception as error:  # the failure that ends the run is the one to report
                log.error("%s", error)
            raise
