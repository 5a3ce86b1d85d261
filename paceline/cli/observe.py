"""What watches a training run from inside its process: the profile page, its reporter, and who may ask for more."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.config import Profiling, RunConfig
from paceline.control.socket import ControlError, Verb, serving
from paceline.profiling import stages
from paceline.profiling.live import Reporter
from paceline.profiling.metrics_endpoint import serving_metrics
from paceline.profiling.page import Page
from paceline.profiling.torch_window import TorchWindow

PROFILE_FOLDER = "profile"
"""In the run folder: links to pages, ``stages.jsonl``, traces, the control socket."""

CONTROL_SOCKET = "control.sock"
"""In the profile folder."""


@contextlib.contextmanager
def observing(run_dir: Path, config: RunConfig, show: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """While entered, stages are counted as the page's control word says.

    Nothing in here can fail the run: what cannot be had is left out with one warning.

    Args:
        show: Prints a text, from any thread.
    Returns: what the drafter's thread calls between micro-batches.
    """
    folder = run_dir / PROFILE_FOLDER
    page = stages.open_run(folder, times_device=config.run.device.startswith("cuda"), default_role="drafter-0")
    if page is None:
        yield lambda: None
        return
    reporter, window = Reporter(page, folder, show, config.profiling.interval), TorchWindow(folder)
    reporter.start()
    try:
        with contextlib.ExitStack() as stack:
            if config.profiling.sigusr1:
                stack.enter_context(_on_sigusr1(reporter.toggle))
            stack.callback(window.close)
            stack.enter_context(serving(folder / CONTROL_SOCKET, _verbs(page, reporter, window)))
            stack.enter_context(serving_metrics(page.snapshot, config.profiling.metrics_port, show))
            stack.enter_context(stages.named_thread("drafter-0"))
            yield window.poll
    finally:
        reporter.stop()
        stages.close_run(page, folder)


def _verbs(page: Page, reporter: Reporter, window: TorchWindow) -> dict[str, Verb]:
    """What the control socket answers."""

    def status(_request: dict[str, Any]) -> dict[str, Any]:
        now = page.snapshot()
        return {"pid": now.pid, "profiling": now.control.is_on, "interval_s": now.control.interval_s, **now.gauges}

    def profile_on(request: dict[str, Any]) -> dict[str, Any]:
        try:
            interval_s = Profiling(interval=request.get("interval", 10.0)).interval
        except ValueError:
            raise ControlError(
                f"interval={request.get('interval')!r:.80}: seconds from 0 to 86400 were wanted"
            ) from None
        reporter.switch(True, interval_s)
        return {"interval_s": interval_s}

    def profile_off(_request: dict[str, Any]) -> dict[str, Any]:
        reporter.switch(False, 0.0)
        return {}

    def torch(request: dict[str, Any]) -> dict[str, Any]:
        batches = request.get("batches", 3)
        if type(batches) is not int:
            raise ControlError(f"batches={batches!r:.80}: a whole number was wanted")
        try:
            return window.request(batches)
        except RuntimeError as error:
            raise ControlError(str(error)) from error

    return {"status": status, "profile_on": profile_on, "profile_off": profile_off, "torch": torch}


@contextlib.contextmanager
def _on_sigusr1(toggle: Callable[[], None]) -> Iterator[None]:
    """While entered, SIGUSR1 toggles; off the main thread Python allows no handlers, and it is left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGUSR1, lambda _number, _frame: toggle())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL if previous is None else previous)
