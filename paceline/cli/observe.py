"""What watches a training run from inside its process: the profile page, its reporter, and who may ask for more."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.config import Profiling, RunConfig
from paceline.control.socket import ControlError, Verb, serving
from paceline.profiling import inside, stages
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
    toggles: list[Callable[[], None]] = []
    with contextlib.ExitStack() as stack:
        if config.profiling.sigusr1:  # first of all: without a handler the signal ends the process
            stack.enter_context(_on_sigusr1(toggles))
        page = stages.open_run(folder, times_device=config.run.device.startswith("cuda"), default_role="drafter-0")
        if page is None:
            show("without a page for the profile there are no control socket, torch window and metrics either")
            stack.enter_context(stages.named_thread("drafter-0"))
            yield lambda: None
            return
        stack.callback(stages.close_run, page, folder)
        reporter, window = Reporter(page, folder, show, config.profiling.interval), TorchWindow(folder)
        stack.callback(reporter.stop)
        reporter.start()
        toggles.append(reporter.toggle)
        stack.callback(toggles.clear)
        stack.callback(window.close)
        stack.enter_context(serving(folder / CONTROL_SOCKET, _verbs(page, reporter, window)))
        stack.enter_context(serving_metrics(page.snapshot, config.profiling.metrics_port, show))
        stack.enter_context(stages.named_thread("drafter-0"))  # last: threads that are started inherit it
        yield window.poll


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

    def frames(request: dict[str, Any]) -> dict[str, Any]:
        seconds = request.get("seconds", 5.0)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise ControlError(f"seconds={seconds!r:.80}: a number was wanted")
        return inside.sample_frames(float(seconds))

    return {
        "status": status,
        "profile_on": profile_on,
        "profile_off": profile_off,
        "torch": torch,
        "allocator": lambda _request: inside.allocator_counters(),
        "collectives": lambda _request: inside.collectives(),
        "frames": frames,
    }


@contextlib.contextmanager
def _on_sigusr1(toggles: list[Callable[[], None]]) -> Iterator[None]:
    """While entered, SIGUSR1 calls what is in the list, in this process and not in its forks.

    Afterwards it is whose it was, or ignored: the default would end the process that still writes its report. Off the
    main thread Python allows no handlers, and it is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pid = os.getpid()

    def handle(_number: int, _frame: FrameType | None) -> None:
        for toggle in toggles if os.getpid() == pid else ():
            toggle()

    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN if previous in (None, signal.SIG_DFL) else previous)
