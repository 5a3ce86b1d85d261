"""What a person sees of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from paceline.config import RunConfig
    from paceline.plan.resolve import ResolvedRun
    from paceline.profiling.verdict import Verdict
    from paceline.train.evaluations import Measured

log = logging.getLogger(__name__)

PLAIN_INTERVAL_S = 10.0
"""Seconds between plain lines; the first, the last and every validated step are always shown."""

_GONE = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET, errno.ENOTCONN}


class LastingStream(io.TextIOBase):
    """stdout or stderr as they are at the time, whose failures end nothing: a run is worth more than what it says.

    Where nobody reads any more, or the terminal is gone, it is silent from then on; on a full disk as long as it is.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name
        self._is_gone = self._has_failed = False

    @property
    def is_full(self) -> bool:
        """Whether the last text did not get out, and a later one may."""
        return self._has_failed and not self._is_gone

    def write(self, text: str, /) -> int:
        if not self._is_gone and (file := self._file) is not None:
            try:
                file.write(text)
            except UnicodeEncodeError:
                self.write(text.encode(file.encoding, "backslashreplace").decode(file.encoding))
            except (OSError, ValueError) as error:  # the latter where it is closed
                self._failed(error)
        return len(text)

    def flush(self) -> None:
        if not self._is_gone and (file := self._file) is not None:
            try:
                file.flush()
                self._has_failed = False
            except (OSError, ValueError) as error:
                self._failed(error)

    def isatty(self) -> bool:
        file = self._file
        return file is not None and not file.closed and file.isatty()

    def fileno(self) -> int:
        if (file := self._file) is None:
            raise io.UnsupportedOperation(f"there is no {self._name}")
        return int(file.fileno())

    @property
    def encoding(self) -> str:  # type: ignore[override]  # no text is without one here
        return getattr(self._file, "encoding", None) or "utf-8"

    @property
    def _file(self) -> Any:
        file = getattr(sys, self._name)
        return getattr(file, "rich_proxied_file", file)  # while a bar is shown, rich stands in its place

    def _failed(self, error: OSError | ValueError) -> None:
        if not self._has_failed:
            atexit.register(self._settle)  # else Python ends with code 120, for what its buffers still hold
        self._has_failed = True
        if not isinstance(error, OSError) or error.errno in _GONE:
            self._is_gone = True
            self._to_nowhere()

    def _settle(self) -> None:
        try:
            if not self._is_gone and (file := self._file) is not None:
                file.flush()
        except (OSError, ValueError):
            self._to_nowhere()

    def _to_nowhere(self) -> None:
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._file.fileno())


def stderr_console(highlight: bool = False) -> Console:
    """What rich prints on, with failures that end nothing."""
    return Console(file=LastingStream("stderr"), highlight=highlight)  # type: ignore[arg-type]  # it has what rich uses


def say(text: str) -> None:
    """Print a line on stdout. That nobody reads it is no failure; on a full disk there is a warning."""
    stream = LastingStream("stdout")
    stream.write(text + "\n")
    stream.flush()
    if stream.is_full:
        log.warning("stdout takes no more; it lacks: %s", text)


class TrainProgress:
    """Draws the steps of a run.

    Args:
        quiet: Show no phases and steps, only what was asked for (stdout belongs to JSON).
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._console = stderr_console()
        self._live = not quiet and self._console.file.isatty()
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._last_plain = 0.0
        self._verdict = self._measured = ""

    def phase(self, text: str) -> None:
        """Say what is being done."""
        if not self._quiet:
            self.show(text)

    def show(self, text: str) -> None:
        """Print what was asked for, such as a profile's table, even when quiet; from any thread."""
        self._console.print(text, markup=False, soft_wrap=True)

    def start(self, config: RunConfig, resolved: ResolvedRun, step: int, notes: list[str]) -> None:
        """The run is about to train its first step."""
        draft = resolved.draft
        self.phase(
            f"{draft.num_hidden_layers} draft layer(s), blocks of {draft.block_size}, taps "
            f"{','.join(map(str, draft.target_layer_ids))}, mask token {draft.mask_token_id}; "
            f"{resolved.num_anchors} anchors in batches of {config.pipeline.tokens_per_batch} tokens; "
            f"{resolved.total_steps} steps on {config.run.device}" + (f", going on after step {step}" if step else "")
        )
        for note in notes:
            self.phase(note)
        if self._live:
            self._bar = Bar(
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=resolved.total_steps, completed=step)
            self._bar.start()

    def judged(self, verdict: Verdict) -> None:
        """What limits the pipeline; shown with the steps from now on."""
        self._verdict = f"  {verdict.brief()}"

    def measured(self, measured: Measured, is_best: bool) -> None:
        """What decoding with the checkpoint of an earlier step gave; the newest is shown with the steps from now on."""
        found = f"step {measured.step} accepts {measured.acceptance_length:.2f} when decoding"
        self._measured = f"  {found}"
        self.phase(found + (", the best so far" if is_best else ""))

    def step(self, line: dict[str, Any], total_steps: int) -> None:
        """Show a finished step."""
        is_last = line["step"] == total_steps
        validated = "validation_acceptance_length" in line
        if self._bar is not None:
            self._bar.update(
                self._task, completed=line["step"], description=_describe(line) + self._verdict + self._measured
            )
            if is_last:
                self._bar.stop()
        due = line["step"] == 1 or time.monotonic() - self._last_plain > PLAIN_INTERVAL_S
        if validated or is_last or (self._bar is None and due):
            self._last_plain = time.monotonic()
            self.phase(f"step {line['step']:>5}/{total_steps}  {_describe(line)}{self._verdict}")

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()


def _describe(line: dict[str, Any]) -> str:
    waits = f"waits put {line['put_wait_s']:.1f}s get {line['get_wait_s']:.1f}s"
    text = (
        f"loss {line['loss']:.3f}  accepts ~{line['acceptance_length_est']:.2f}  {line['tok_per_s']:,.0f} tok/s  "
        f"queue {line['queue']}  {waits}"
    )
    if "validation_acceptance_length" in line:
        text += f"  held-out acceptance length {line['validation_acceptance_length']:.2f}"
    return text
