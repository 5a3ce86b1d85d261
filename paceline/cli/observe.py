"""What watches a training run from inside its process, and who may ask it for something.

The profile page and its reporter, the watchdog, and the control socket.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.config import Profiling, RunConfig
from paceline.control import watchdog
from paceline.control.run_folder import RunFolder
from paceline.control.signals import StopRequest
from paceline.control.socket import ControlError, Verb, serving
from paceline.control.steering import Steering
from paceline.files import explain
from paceline.profiling import inside, stages
from paceline.profiling.live import Others, Reporter
from paceline.profiling.metrics_endpoint import serving_metrics
from paceline.profiling.page import Page, Snapshot, ThreadSnapshot
from paceline.profiling.torch_window import TorchWindow
from paceline.report.page import duration

PROFILE_FOLDER = "profile"
"""In the run folder: links to pages, ``stages.jsonl``, traces, the control socket."""

CONTROL_SOCKET = "control.sock"
"""In the profile folder."""


ANSWER_S = 0.3
"""Seconds for the answer to `stop --now` to get out."""
EXIT_NOW = 128 + signal.SIGTERM
SAVE_S = 300.0
"""Seconds that a save may take which somebody waits for, unless they say otherwise."""


@dataclass(frozen=True)
class Run:
    """What there is to know and to steer of a run; what is None cannot be.

    Attributes:
        folder, config: At the start.
        ledger: Where the batches are.
        saving: What becomes of checkpoints: ``problem``, ``saved_step``, ``writing``, and ``bytes`` so far.
    """

    folder: RunFolder
    config: RunConfig
    steering: Steering | None = None
    stop: StopRequest | None = None
    ledger: Callable[[], dict[str, int]] | None = None
    saving: Callable[[], dict[str, Any]] | None = None

    def known(self) -> dict[str, dict[str, Any] | None]:
        """What `ledger` and `saving` say; None where that is nothing."""
        found: dict[str, dict[str, Any] | None] = {"ledger": None, "saving": None}
        for name, ask in (("ledger", self.ledger), ("saving", self.saving)):
            if ask is not None:
                with contextlib.suppress(Exception):  # not there yet, perhaps
                    found[name] = ask()
        return found

    def stall_s(self) -> float:
        """Seconds without movement after which it is said."""
        now = self.config if self.steering is None else self.steering.config
        return now.run.stall_s


@contextlib.contextmanager
def observing(
    run_folder: RunFolder | Path,
    config: RunConfig,
    show: Callable[[str], None],
    *,
    steering: Steering | None = None,
    stop: StopRequest | None = None,
    ledger: Callable[[], dict[str, int]] | None = None,
    saving: Callable[[], dict[str, Any]] | None = None,
    others: Others | None = None,
) -> Iterator[Callable[[], None]]:
    """While entered, stages are counted as the page's control word says, and somebody sees to it that the run moves.

    Nothing in here can fail the run: what cannot be had is left out with one warning.

    Args:
        run_folder: The very object that the run writes its events by: lines of two could mix.
        show: Prints a text, from any thread.
        steering, stop: Asked by the control socket.
        ledger, saving: As `Run` has them; called from any thread, and must not wait.
        others: The run's processes elsewhere.
    Returns: what the drafter's thread calls between micro-batches.
    """
    owner = run_folder if isinstance(run_folder, RunFolder) else RunFolder(run_folder)
    run = Run(owner, config, steering, stop, ledger, saving)
    folder = owner.path / PROFILE_FOLDER
    toggles: list[Callable[[], None]] = []
    with contextlib.ExitStack() as stack:
        if config.profiling.sigusr1:  # first of all: without a handler the signal ends the process
            stack.enter_context(_on_sigusr1(toggles))
        page = stages.open_run(folder, times_device=config.run.device.startswith("cuda"), default_role="drafter-0")
        if page is None:
            show("without a page for the profile there are no control socket, torch window and metrics either")
            passed = _Passed()
            stack.enter_context(_guarding(run, None, passed, show))
            stack.enter_context(stages.named_thread("drafter-0"))
            yield passed.one_more
            return
        stack.callback(stages.close_run, page, folder)
        reporter = Reporter(page, folder, show, config.profiling.interval, others)
        window = TorchWindow(folder)
        stack.callback(reporter.stop)
        reporter.start()
        toggles.append(reporter.toggle)
        stack.callback(toggles.clear)
        stack.callback(window.close)
        verbs = _verbs(page, reporter, window) | _steering_verbs(run, page, reporter)
        verbs["elsewhere"] = lambda _request: {"processes": [] if others is None else _elsewhere(others)}
        stack.enter_context(serving(folder / CONTROL_SOCKET, verbs))
        stack.enter_context(serving_metrics(page.snapshot, config.profiling.metrics_port, show))
        stack.enter_context(_guarding(run, page, _Passed(), show))
        stack.enter_context(stages.named_thread("drafter-0"))  # last: threads that are started inherit it
        yield window.poll


def _verbs(page: Page, reporter: Reporter, window: TorchWindow) -> dict[str, Verb]:
    """What the control socket answers about the profile."""

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
        "profile_on": profile_on,
        "profile_off": profile_off,
        "torch": torch,
        "allocator": lambda _request: inside.allocator_counters(),
        "collectives": lambda _request: inside.collectives(),
        "frames": frames,
    }


def _steering_verbs(run: Run, page: Page, reporter: Reporter) -> dict[str, Verb]:
    """What the control socket answers about the run itself."""
    writing = threading.Lock()

    def status(_request: dict[str, Any]) -> dict[str, Any]:
        now = page.snapshot()
        return {
            "pid": now.pid,
            "profiling": now.control.is_on,
            "interval_s": now.control.interval_s,
            "stopping": None if run.stop is None else run.stop.reason,
            **now.gauges,
            **run.known(),
        }

    def stop(request: dict[str, Any]) -> dict[str, Any]:
        if run.stop is None:
            raise ControlError("this run cannot be stopped by its control socket: send it SIGTERM")
        if request.get("now") is True:
            end = threading.Timer(ANSWER_S, os._exit, [EXIT_NOW])
            end.daemon = True
            end.start()
            run.folder.event("stop now", step=_step(page))
        else:
            run.stop.request("stop")
        return {"pid": os.getpid(), "step": _step(page), "reason": run.stop.reason}

    def checkpoint(request: dict[str, Any]) -> dict[str, Any]:
        wait_s = request.get("wait_s", SAVE_S)
        if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 < wait_s <= threading.TIMEOUT_MAX:
            raise ControlError(f"wait_s={wait_s!r:.80}: seconds above 0 were wanted")
        if run.steering is None:
            raise ControlError("this run cannot be asked for a checkpoint")
        step, place = run.steering.ask_to_save(float(wait_s))
        return {"step": step, "path": str(place)}

    def set_(request: dict[str, Any]) -> dict[str, Any]:
        key, value = request.get("key"), request.get("value")
        if run.steering is None or not isinstance(key, str):
            raise ControlError(f"key={key!r:.80}: the name of a setting was wanted, of a run that can be steered")
        with writing:  # the file holds what was set last
            old, new = run.steering.set(key, value)
            if key == "profiling.interval":  # `paceline profile` may have changed it since
                old = _interval_of(page)
                reporter.switch(new > 0, new)
            problem = None
            try:
                run.folder.write_config(run.steering.config)
            except OSError as error:
                problem = (
                    f"{run.folder.config_file} cannot be written, so it holds until the run ends: {explain(error)}"
                )
            run.folder.event("set", step=_step(page), key=key, old=old, new=new)
        return {"key": key, "old": old, "new": new, "problem": problem}

    return {"status": status, "stop": stop, "checkpoint": checkpoint, "set": set_}


def _elsewhere(others: Others) -> list[dict[str, Any]]:
    """Where the run's other processes are, and what their threads do; of those that do not answer soon, where alone."""
    snapshots = others.snapshots(ends_interval=False)
    return [
        {
            "role": role,
            **place,
            "answers": role in snapshots,
            "threads": []
            if role not in snapshots
            else [thread_record(each, snapshots[role]) for each in live(snapshots[role])],
        }
        for role, place in sorted(others.places().items())
    ]


def live(page: Snapshot) -> list[ThreadSnapshot]:
    """A page's threads that live: targets, drafters, the rest, as a batch passes them."""

    def place(thread: ThreadSnapshot) -> tuple[int, int, str, str]:
        kind = 0 if thread.role.startswith("target") else 1 if thread.role.startswith("drafter") else 2
        number = thread.role.rpartition("-")[2]
        return kind, int(number) if number.isdecimal() else 0, thread.role, thread.thread

    return sorted((thread for thread in page.threads if thread.is_live), key=place)


def thread_record(thread: ThreadSnapshot, page: Snapshot) -> dict[str, Any]:
    """What a thread is doing, for JSON; ``stage`` is None between two."""
    return {
        "role": thread.role,
        "thread": thread.thread,
        "tid": thread.tid,
        "stage": thread.inner.stage if thread.inner else None,
        "for_s": (page.taken_ns - thread.inner.since_ns) / 1e9 if thread.inner else None,
    }


def _interval_of(page: Page) -> float:
    """Seconds between tables that are being made; 0: none are."""
    now = page.snapshot().control
    return now.interval_s if now.is_on else 0.0


def _step(page: Page) -> int:
    return page.snapshot().gauges["step"]


class _Passed:
    """Micro-batches begun; what moves in a run without a page."""

    def __init__(self) -> None:
        self.count = 0

    def one_more(self) -> None:
        self.count += 1


def _guarding(
    run: Run, page: Page | None, passed: _Passed, show: Callable[[str], None]
) -> contextlib.AbstractContextManager[None]:
    """The watchdog over this run; it tells ``events.jsonl`` and the person who watches."""

    def tell(kind: str, text: str) -> None:
        lines = [text, *_places(page)]
        step = {} if page is None else {"step": _step(page)}
        watchdog.patiently(lambda: run.folder.event(kind, **step, reason="; ".join(lines)))
        watchdog.patiently(lambda: show("\n  ".join(lines)))  # who reads it may be what hangs

    def end(text: str) -> None:
        tell("failed", text)
        watchdog.end_process(text)

    return watchdog.watching(
        run.stall_s,
        lambda: _movement(run, page, passed),
        on_stall=lambda text: tell("stalled", text),
        dump=run.folder.path / PROFILE_FOLDER,
        end=end,
        on_move=lambda text: tell("moves again", text),
    )


COUNTS = ("step", "tokens", "batches", "queue", "issued", "trained", "skipped", "retried")
"""Gauges that move with the run; those of waits move while it hangs as well."""


def _movement(run: Run, page: Page | None, passed: _Passed) -> object:
    """Another one whenever a thread enters or leaves a stage or begins a batch, or a count changes."""
    if page is None:
        return passed.count, run.known()
    now = page.snapshot()
    threads = [(each.block, each.tid, each.inner, each.outer, each.num_batches, each.top_ns) for each in now.threads]
    return [now.gauges.get(name) for name in COUNTS], threads, run.known()


def _places(page: Page | None) -> list[str]:
    """Where each thread stands."""
    if page is None:
        return []
    now, lines = page.snapshot(), []
    for thread in now.threads:
        if thread.is_live:
            at = "is between stages"
            if thread.inner:
                at = f"has been in {thread.inner.stage} for {duration((now.taken_ns - thread.inner.since_ns) / 1e9)}"
            lines.append(f"{thread.role} ({thread.thread}) {at}")
    return lines


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
