"""What a person sees of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from paceline.config import RunConfig
    from paceline.plan.resolve import ResolvedRun
    from paceline.profiling.verdict import Verdict

PLAIN_INTERVAL_S = 10.0
"""Seconds between plain lines; the first, the last and every validated step are always shown."""


class TrainProgress:
    """Draws the steps of a run.

    Args:
        quiet: Show no phases and steps, only what was asked for (stdout belongs to JSON).
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._is_broken = False
        self._console = _Console(stderr=True, highlight=False)
        self._live = not quiet and sys.stderr.isatty()
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._last_plain = 0.0
        self._verdict = ""

    def phase(self, text: str) -> None:
        """Say what is being done."""
        if not self._quiet:
            self.show(text)

    def show(self, text: str) -> None:
        """Print what was asked for, such as a profile's table, even when quiet; from any thread."""
        if self._is_broken:
            return
        try:
            self._console.print(text, markup=False, soft_wrap=True)
        except (OSError, SystemExit):  # nobody reads any more (rich exits then); the run matters more
            self._is_broken = True

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

    def step(self, line: dict[str, Any], total_steps: int) -> None:
        """Show a finished step."""
        is_last = line["step"] == total_steps
        validated = "validation_acceptance_length" in line
        if self._bar is not None:
            self._bar.update(self._task, completed=line["step"], description=_describe(line) + self._verdict)
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


class _Console(Console):
    """Of stderr: rich's own also closes stdout when a pipe breaks, and the report with it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise SystemExit(1)


def _describe(line: dict[str, Any]) -> str:
    waits = f"waits put {line['put_wait_s']:.1f}s get {line['get_wait_s']:.1f}s"
    text = (
        f"loss {line['loss']:.3f}  accepts ~{line['acceptance_length_est']:.2f}  {line['tok_per_s']:,.0f} tok/s  "
        f"queue {line['queue']}  {waits}"
    )
    if "validation_acceptance_length" in line:
        text += f"  held-out acceptance length {line['validation_acceptance_length']:.2f}"
    return text
