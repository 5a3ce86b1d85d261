"""Evaluation beside training: a process of its own decodes prompts with each due checkpoint, one at a time.

    is_due, expect      which checkpoints are to be evaluated; from the drafter's thread
    saved               one is on the disk; from the thread that writes them
    take                what was measured since, for the line of its step; from the drafter's thread

Training waits for none of this. What was measured lies in ``evaluations/step-*.json``, and everything else follows from
there: the lines of ``metrics.jsonl``, and which checkpoint `best` points to.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.control.run_folder import RunFolder
from paceline.errors import printable
from paceline.files import explain, remove
from paceline.profiling import stages
from paceline.train import checkpoint

log = logging.getLogger(__name__)

FOLDER = "evaluations"
"""In the run folder: what was measured, and what each process said."""

MAX_WAITING = 2
"""Checkpoints that may wait; for one more the oldest is let go of, without a measurement."""

SILENT_S = 1800.0
"""Seconds without a word after which a process is ended: it says something after each prompt."""

LOOK_S = 0.5
"""Seconds between looks at the process."""

CLOSE_S = 10.0
"""How long `Evaluations.close` waits for the thread."""

TAIL_LINES = 5

Command = Callable[[Path, Path], Sequence[str]]
"""What to run for a checkpoint, and the file in which it leaves the record of `paceline eval`."""


@dataclass(frozen=True)
class Measured:
    """What one evaluation found.

    Attributes:
        acceptance_length: Tokens committed per target forward, pooled over the prompts.
        mismatches: Answers that differ from plain decoding beyond rounding; 0 unless something is wrong.
        settings: What the number depends on besides the checkpoint; only equal ones are compared.
    """

    step: int
    acceptance_length: float
    mismatches: int
    settings: Mapping[str, Any]

    def line(self) -> dict[str, Any]:
        """What the step's line of ``metrics.jsonl`` gets."""
        return {"measured_acceptance_length": self.acceptance_length, "measured_mismatches": self.mismatches}


class _Failed(Exception):
    """An evaluation that came to nothing, with the reason."""


class Evaluations:
    """Of one run, while it holds the run's lock; nothing in here fails or holds up the run.

    Args:
        every_steps: Between due steps; the last one is due as well.
        settings: Of an evaluation that begins now, as `Measured` has them. Raises: OSError.
        environment: Of the processes.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        every_steps: int,
        command: Command,
        settings: Callable[[], dict[str, Any]],
        environment: Mapping[str, str],
    ) -> None:
        self._run, self._every, self._folder = run, every_steps, run.path / FOLDER
        self._command, self._settings, self._environment = command, settings, dict(environment)
        self._changed = threading.Condition()
        self._waiting: deque[int] = deque()
        self._current: int | None = None
        self._expected: set[int] = set()
        self._tried: set[int] = set()
        self._news: list[Measured] = []
        self._best: Measured | None = None
        self._is_closing = self._has_dropped = False
        self._thread: threading.Thread | None = None

    @property
    def best(self) -> Measured | None:
        """The longest acceptance among those measured alike; the earlier of equals."""
        return self._best

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being evaluated, or waits for it."""
        with self._changed:
            return self._current is not None or bool(self._waiting)

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether the checkpoint of a step is to be evaluated."""
        return is_last or step % self._every == 0

    def begin(self, step: int, is_over: bool) -> dict[int, Measured]:
        """Take up what an earlier process left, before the run goes on; all that was measured, by step.

        Results of later steps go, as their training was lost. The newest due checkpoints without one are evaluated now.

        Args:
            step: Where the run stands.
            is_over: Whether that is its last step.
        """
        try:
            self._folder.mkdir(exist_ok=True)
            for left_over in self._folder.glob(".step-*"):  # of processes that died with theirs
                remove(left_over)
            found = {each.step: each for each in self._read_all(up_to=step)}
            settings = self._settings()
            alike = [found[number] for number in sorted(found) if found[number].settings == settings]
            for each in alike:
                self._consider(each)
            done = {each.step for each in alike}
            left = [
                number
                for number in checkpoint.complete_steps(self._run.checkpoints)
                if number <= step and number not in done and self.is_due(number, is_over and number == step)
            ]
        except OSError as error:
            log.warning("what was evaluated before in %s cannot be looked at: %s", self._folder, explain(error))
            return {}
        for number in left[-MAX_WAITING:]:
            self._queue(number)
        return found

    def waiting(self) -> list[int]:
        """Steps whose checkpoint waits or is being evaluated."""
        with self._changed:
            return [*([] if self._current is None else [self._current]), *self._waiting]

    def expect(self, step: int) -> None:
        """The checkpoint of this step is about to be saved, and is to be evaluated once it is."""
        with self._changed:
            self._expected.add(step)

    def ask(self, step: int) -> None:
        """Evaluate a checkpoint that is on the disk, unless that was tried."""
        with contextlib.suppress(OSError):
            if step not in self._tried and step in checkpoint.complete_steps(self._run.checkpoints):
                self._queue(step)

    def saved(self, step: int) -> None:
        """A checkpoint is complete on the disk; from any thread."""
        with self._changed:
            is_expected = step in self._expected
            self._expected.discard(step)
        if is_expected:
            self._queue(step)

    def pinned(self) -> set[str]:
        """Names of checkpoints that are still needed here."""
        return {checkpoint.place_of(self._run.checkpoints, step).name for step in self.waiting()}

    def take(self) -> list[Measured]:
        """What was measured since the last call."""
        if not self._news:  # nearly always; what comes this instant is seen next time
            return []
        with self._changed:
            news, self._news = self._news, []
            return news

    def wait(self, timeout_s: float) -> None:
        """Return when nothing is left to evaluate, or after that time."""
        with self._changed:
            self._changed.wait_for(lambda: self._current is None and not self._waiting, timeout_s)

    def close(self) -> None:
        """End a process that runs, at once; what waits is taken up by the next start."""
        with self._changed:
            self._is_closing = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _queue(self, step: int) -> None:
        dropped = None
        with self._changed:
            if self._is_closing or step == self._current or step in self._waiting:
                return
            self._tried.add(step)
            self._waiting.append(step)
            if len(self._waiting) > MAX_WAITING:
                dropped = self._waiting.popleft()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="evaluations", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # no thread is to be had
                    self._waiting.clear()
                    self._thread = None
                    log.warning("the checkpoint of step %d is not evaluated: %s", step, error)
                    return
            self._changed.notify_all()
        if dropped is not None:
            self._run.event("evaluation dropped", step=dropped)
            if not self._has_dropped:
                self._has_dropped = True
                log.warning(
                    "evaluations take longer than eval.every_steps=%d steps: step %d is left out; later ones may be",
                    self._every,
                    dropped,
                )

    def _work(self) -> None:
        with stages.named_thread("evaluations"):
            while (step := self._next()) is not None:
                try:
                    measured = self._evaluate(step)
                    if measured is not None:
                        self._tell(measured)
                except Exception as error:  # whatever it is, the run goes on, and the next one is tried
                    reason = explain(error) if isinstance(error, OSError) else str(error)
                    self._run.event("evaluation failed", step=step, reason=reason)
                    log.warning("the checkpoint of step %d was not evaluated: %s", step, reason)
                finally:
                    with self._changed:
                        self._current = None
                        self._changed.notify_all()

    def _next(self) -> int | None:
        """The next step to evaluate; None when all is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if self._is_closing:
                return None
            self._current = self._waiting.popleft()
            return self._current

    def _evaluate(self, step: int) -> Measured | None:
        """None if it was cut short. Raises: _Failed, OSError."""
        place = checkpoint.place_of(self._run.checkpoints, step)
        out, said = self._folder / f".{place.name}.json", self._folder / f"{place.name}.log"
        settings = self._settings()
        try:
            status = self._run_process(self._command(place, out), said)
            if self._is_closing:
                return None
            if status != 0:
                ended = (
                    f"was ended, as it said nothing for {SILENT_S:g} s" if status is None else f"ended with {status}"
                )
                raise _Failed(f"its process {ended}; {said} ends with: {_tail(said)}")
            try:
                record = json.loads(out.read_text(encoding="utf-8"))
                measured = _measured(record | {"step": step, "settings": settings})
            except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
                raise _Failed(f"its process left no result: {type(error).__name__}: {error}") from error
            self._run.write_json(f"{FOLDER}/{place.name}.json", record | {"step": step, "settings": settings})
        finally:
            remove(out)
        return measured

    def _tell(self, measured: Measured) -> None:
        """In this order: the link is there before the checkpoint is let go of, and before anybody hears of it."""
        self._consider(measured)
        self._run.event(
            "evaluated",
            step=measured.step,
            acceptance_length=measured.acceptance_length,
            mismatches=measured.mismatches,
        )
        if measured.mismatches:
            log.warning(
                "step %d: %d answers differ from plain decoding by more than rounding: see %s",
                measured.step,
                measured.mismatches,
                self._folder,
            )
        with self._changed:
            self._news.append(measured)

    def _consider(self, measured: Measured) -> None:
        """Point `best` to a checkpoint if it is there, and the best so far or the first that was measured like this."""
        best, place = self._best, checkpoint.place_of(self._run.checkpoints, measured.step)
        if not place.is_dir():
            return
        if best is not None and best.settings == measured.settings:
            if (measured.acceptance_length, -measured.step) <= (best.acceptance_length, -best.step):
                return
        self._best = measured
        try:
            checkpoint.point(place.parent, "best", place)
        except OSError as error:
            log.warning("%s stays as it is: %s", place.parent / "best", explain(error))

    def _run_process(self, command: Sequence[str], said: Path) -> int | None:
        """Its exit status; None if it was ended, as nothing came from it or all is to end. Raises: OSError."""
        with open(said, "wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # it ends when this process is gone
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment,
                # its own group, so that Ctrl-C is not its; not its own session, to which the kernel may grant as much
                # of the cores as to the run's (sched_autogroup)
                process_group=0,
            )
        num_bytes, heard_at = 0, time.monotonic()
        try:
            while not self._is_closing:
                if (status := process.poll()) is not None:
                    return status
                if (now := said.stat().st_size) != num_bytes:
                    num_bytes, heard_at = now, time.monotonic()
                if time.monotonic() - heard_at > SILENT_S:
                    return None
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closing, LOOK_S)
            return None
        finally:
            _end(process)

    def _read_all(self, up_to: int) -> list[Measured]:
        """Results of the steps that the run has made; later ones are removed. Raises: OSError."""
        found = []
        for path in sorted(self._folder.glob("step-*.json")):
            try:
                measured = _measured(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                log.warning("%s is no result of an evaluation: %s", path, error)
                continue
            if measured.step <= up_to:
                found.append(measured)
            else:
                remove(path)
        return found


def measured_of(run: RunFolder, step: int) -> dict[str, Any] | None:
    """The record of a step's evaluation; None where there is no whole one."""
    name = checkpoint.place_of(run.checkpoints, step).name
    try:
        record = json.loads((run.path / FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        return record if _measured(record).step == step else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _measured(record: Mapping[str, Any]) -> Measured:
    """Raises: TypeError, KeyError, ValueError where it is no result."""
    step, length, mismatches = record["step"], record["acceptance_length"], record["mismatches"]
    if type(step) is not int or not isinstance(length, int | float) or not math.isfinite(length) or length <= 0:
        raise ValueError(f"step={step!r:.40}, acceptance_length={length!r:.40}")
    return Measured(step, float(length), int(mismatches), dict(record["settings"]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole group of a process that runs still; while it is not waited for, its number is no one else's."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _tail(said: Path) -> str:
    """The last lines that a process said, in one."""
    with contextlib.suppress(OSError):
        lines = said.read_text(encoding="utf-8", errors="replace").split("\n")
        return printable(" / ".join([line.strip() for line in lines if line.strip()][-TAIL_LINES:])) or "(nothing)"
    return "(nothing)"
