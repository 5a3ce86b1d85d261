"""TensorBoard and Weights & Biases: the numbers of each line of ``metrics.jsonl``, by step.

What was asked for must be there when a run starts. Later nothing here may hold up or end the run: each tracker has a
thread of its own, lines that it cannot keep up with are dropped, and one that fails is silent after one warning.

A resumed run goes on in the same place, each step once. What the process before it had not handed over when it died is
made up from ``metrics.jsonl``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from paceline.config import Tracking
from paceline.control.run_folder import RunFolder
from paceline.errors import ConfigError
from paceline.files import without_credentials
from paceline.profiling import stages
from paceline.train.metrics import lines_until

log = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Lines that may wait for a tracker before some are dropped."""

FINISH_S = 10.0
"""Seconds that the end of a run waits for its trackers."""

TENSORBOARD_FOLDER = "tensorboard"
"""In the run folder, and the same after a resume."""

MADE_UP = 1000
"""Last lines that a resumed run logs to TensorBoard again: what it holds back, which is 10 s, is lost when killed."""

WANDB_FILE = "wandb.json"
"""In the run folder: project and id of the Weights & Biases run, so that a resumed run goes on with it."""


ADDED_STEP = "measured_step"
"""Weights & Biases: the step of what was found later."""


class Tracker(Protocol):
    """One place to log to."""

    @property
    def next_step(self) -> int:
        """The first step that it takes."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log the numbers of a step."""

    def add(self, step: int, values: dict[str, float]) -> None:
        """Log what was found of a step when later ones have been logged."""

    def finish(self, failed: bool) -> None:
        """The run is over."""


class TensorBoard:
    """Event files in the run folder.

    Args:
        next_step: What an earlier process logged of this step and later ones is hidden: it comes again.
    """

    def __init__(self, run: RunFolder, next_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.next_step = next_step
        self._writer: Any = SummaryWriter(str(run.path / TENSORBOARD_FOLDER), purge_step=next_step, flush_secs=10)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    add = log

    def finish(self, failed: bool) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run of the run folder's name.

    Their rows cannot be taken back. What a killed process logged beyond its last checkpoint stays, as the resumed run
    comes to the same numbers, and is not logged again.

    Args:
        settings: The resolved configuration, shown with the run, but for passwords of URLs.
        step: Steps that the run has made.
    """

    def __init__(self, run: RunFolder, project: str, settings: dict[str, Any], step: int) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=project,
            id=_wandb_id(run, project),
            name=run.path.resolve().name,
            dir=str(run.path),
            config=without_credentials(settings),
            resume="allow",
            settings=wandb.Settings(console="off"),  # the terminal is ours
        )
        # what is logged offline is with them later, so nobody knows what they have
        self.next_step: int = step + 1 if self._run.offline else self._run.starting_step
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._added: dict[str, float] = {}
        self._has_axis: set[str] = set()

    def log(self, step: int, values: dict[str, float]) -> None:
        added, self._added = self._added, {}
        self._run.log({**added, **values, "step": step}, step=step, commit=True)

    def add(self, step: int, values: dict[str, float]) -> None:
        """In the next row, over a step of their own: rows that are logged take no more."""
        for name in values.keys() - self._has_axis:
            self._run.define_metric(name, step_metric=ADDED_STEP)
        self._has_axis |= values.keys()
        self._added = {**values, ADDED_STEP: step}

    def finish(self, failed: bool) -> None:
        if self._added:  # no row comes any more
            self._run.summary.update(self._added)
        self._run.finish(exit_code=1 if failed else 0)


def check_packages(tracking: Tracking) -> None:
    """Import what the section asks for. Raises: ConfigError naming the extra of what is missing."""
    for is_wanted, module, needs, extra in (
        (tracking.tensorboard, "torch.utils.tensorboard", "SummaryWriter", "tensorboard"),
        (tracking.wandb is not None, "wandb", "init", "wandb"),
    ):
        if not is_wanted:
            continue
        try:
            # a folder that happens to be called wandb, as its own log folder is, can be imported as well
            getattr(importlib.import_module(module), needs)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"tracking.{extra} is set, but its package cannot be used ({error}): "
                f"pip install 'paceline[{extra}]', or leave the key out"
            ) from error


class Trackers:
    """What a run logs to. As a context it ends them all.

    Args:
        step: Steps that the run has made; the next line is of the one after.
        settings: The resolved configuration.
    Raises: ConfigError if one cannot be started.
    """

    def __init__(self, tracking: Tracking, run: RunFolder, step: int, settings: dict[str, Any]) -> None:
        check_packages(tracking)
        self._feeds: list[_Feed] = []
        done = lines_until(run.metrics_file, step) if tracking.tensorboard or tracking.wandb is not None else []
        if tracking.tensorboard:
            again = done[-MADE_UP:]
            next_step = again[0]["step"] if again else step + 1
            advice = "look at the run folder, or leave the key out"
            self._start("tensorboard", lambda: TensorBoard(run, next_step), done, advice)
        if (project := tracking.wandb) is not None:
            advice = "log in with `wandb login`, or set WANDB_MODE=offline"
            self._start("wandb", lambda: WandB(run, project, settings, step), done, advice)

    def log(self, line: dict[str, Any]) -> None:
        """Take a line of ``metrics.jsonl``; what is no number in it is left out."""
        for feed in self._feeds:
            feed.put(line)

    def add(self, step: int, found: dict[str, Any]) -> None:
        """Take what has been added to the line of an earlier step."""
        for feed in self._feeds:
            feed.put(found | {"step": step}, is_added=True)

    def close(self, failed: bool = False) -> None:
        """End them, within `FINISH_S`."""
        deadline = time.monotonic() + FINISH_S
        for feed in self._feeds:
            feed.end(failed)
        for feed in self._feeds:
            feed.join(deadline)
        self._feeds = []

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def _start(self, name: str, make: Callable[[], Tracker], done: Sequence[dict[str, Any]], advice: str) -> None:
        try:
            tracker = make()
        except Exception as error:  # whatever it is, it is about what the user asked for
            self.close(failed=True)
            reason = f"{type(error).__name__}: {error}".rstrip(".")
            raise ConfigError(f"tracking.{name} cannot start: {reason}; {advice}") from error
        self._feeds.append(_Feed(name, tracker, done))


class _Feed:
    """A tracker's thread, and the lines that wait for it: first those of `done` that the tracker lacks."""

    def __init__(self, name: str, tracker: Tracker, done: Sequence[dict[str, Any]]) -> None:
        self._name, self._tracker, self._next_step = name, tracker, tracker.next_step
        self._done = [line for line in done if line["step"] >= self._next_step]
        self._lines: queue.Queue[tuple[dict[str, Any], bool] | None] = queue.Queue(MAX_WAITING)
        self._has_dropped = self._failed = False
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, line: dict[str, Any], is_added: bool = False) -> None:
        try:
            self._lines.put_nowait((dict(line), is_added))
        except queue.Full:
            if not self._has_dropped:
                self._has_dropped = True
                log.warning("%s does not keep up: it misses steps from %s on", self._name, line["step"])

    def end(self, failed: bool) -> None:
        """Finish once the lines that wait are logged."""
        self._failed = failed
        self._is_ending.set()
        with contextlib.suppress(queue.Full):  # it looks by itself then
            self._lines.put_nowait(None)

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("%s did not end within %g s; the run does not wait for it", self._name, FINISH_S)

    def _work(self) -> None:
        with stages.named_thread(self._name):
            try:
                for made_up in self._done:
                    self._log(made_up)
                while (item := self._next()) is not None:
                    line, is_added = item
                    if is_added:
                        self._tracker.add(line["step"], numbers(line))
                    else:
                        self._log(line)
                self._tracker.finish(self._failed)
            except Exception as error:  # whatever it is, the run is worth more
                log.warning("%s logs no more: %s: %s", self._name, type(error).__name__, error)
                while self._next() is not None:  # so that nothing waits
                    pass

    def _log(self, line: dict[str, Any]) -> None:
        if line["step"] >= self._next_step:
            self._tracker.log(line["step"], numbers(line))

    def _next(self) -> tuple[dict[str, Any], bool] | None:
        """The next line; None at the end."""
        if self._is_ending.is_set() and self._lines.empty():
            return None
        return self._lines.get()


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """What of a line is a number, but for the step itself."""
    return {
        name: value
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _wandb_id(run: RunFolder, project: str) -> str:
    """The run's id in this project; drawn once, and then read from the run folder."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        saved = json.loads((run.path / WANDB_FILE).read_text(encoding="utf-8"))
        if saved["project"] == project:
            return str(saved["id"])
    drawn = secrets.token_hex(4)
    run.write_json(WANDB_FILE, {"project": project, "id": drawn})
    return drawn
