"""`paceline profile`: switch a live run's profile on and off, and take traces of it, from outside; look at any process.

`on`, `off` and `trace` write a word of the process's page: no signal, no restart, nothing that the process has to
answer. They take effect at each thread's next stage boundary, whatever its main thread is at.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import attach
from paceline.cli.observe import CONTROL_SOCKET, PROFILE_FOLDER
from paceline.cli.run_state import LivePage, holder, need_live_pages, open_run, process_state, quoted
from paceline.config import Profiling
from paceline.control.run_folder import RunFolder
from paceline.control.socket import ask
from paceline.errors import ConfigError, printable
from paceline.profiling.live import STAGES_FILE, trace_file
from paceline.profiling.page import CONTROL, TRACE_UNTIL, WORD, PageError, read_page, write_word

PATIENCE_S = 10.0
"""Seconds after a trace's end in which the process may write it down."""

TORCH_PATIENCE_S = 330.0
"""Seconds for torch's profiler to start, see its batches, and write; the process gives up after 300."""

POLL_S = 0.1
REFUSAL_S = 0.5
"""Seconds in which a process whose profiler has failed says so."""

SMALLEST_INTERVAL_S = 0.1

app = typer.Typer(
    help="Say what a running process is doing; switch a live run's profile on and off, and take traces of it.",
    no_args_is_help=True,
)
for verb in (attach.attach, attach.report, attach.diff):
    app.command()(verb)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
SocketOption = Annotated[
    bool, typer.Option("--socket", help="Ask the process over its control socket, in place of writing its page.")
]


@app.command()
def on(
    run_dir: RunArgument,
    interval: Annotated[
        float, typer.Option(metavar="N", help="Seconds between tables; 0: stages are counted, and no tables made.")
    ] = 10.0,
    socket: SocketOption = False,
) -> None:
    """Count the stages of a live run, and have it print and record a table every N seconds."""
    interval = _checked(interval)
    run = open_run(run_dir)
    for page in need_live_pages(run):
        before = page.snapshot.control
        _switch(run, page, True, interval, socket)
        if interval and _is_refused(page):
            raise PageError(f"the profiler of process {page.snapshot.pid} has failed; its output says why")
        already = "already " if before.is_on and before.interval_s == interval else ""
        table = f"a table every {interval:g} s, in its output and in {_shown(run, STAGES_FILE)}"
        typer.echo(
            f"profiling is {already}on in process {page.snapshot.pid}, {table if interval else 'without tables'}"
        )


@app.command()
def off(run_dir: RunArgument, socket: SocketOption = False) -> None:
    """Count the stages of a live run no longer."""
    run = open_run(run_dir)
    for page in need_live_pages(run):
        _switch(run, page, False, 0.0, socket)
        already = "" if page.snapshot.control.is_on else "already "
        typer.echo(f"profiling is {already}off in process {page.snapshot.pid}")


@app.command()
def trace(
    run_dir: RunArgument,
    seconds: Annotated[float, typer.Option(metavar="S", min=0.1, max=600.0, help="Length of the window.")] = 5.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it; by default in RUN/profile.")
    ] = None,
) -> None:
    """Record every run of every stage for some seconds, in all processes of all hosts, for ui.perfetto.dev."""
    if importlib.util.find_spec("perfetto") is None:  # said before the wait, not after it
        raise ConfigError("a Perfetto trace needs the package perfetto: pip install perfetto")
    run = open_run(run_dir)
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}")
    pages = _drivers(run, need_live_pages(run))
    begin = time.monotonic_ns()
    # a window of its own for each process, as its file is named by it
    windows = [(page, begin + int(1e9 * seconds) + i) for i, page in enumerate(pages)]
    with contextlib.ExitStack() as stack:
        for page, until in windows:
            stack.enter_context(_window(run, page, until))
        typer.echo(f"tracing {seconds:g} s of process {', '.join(str(page.snapshot.pid) for page in pages)}", err=True)
        for page, until in windows:
            processes = _collected(run, page, until, begin)
            _write(processes, _place(run, out, page, len(pages)), seconds)


@app.command("torch")
def torch_window(
    run_dir: RunArgument,
    batches: Annotated[int, typer.Option(metavar="N", min=1, help="Micro-batches of the drafter to record.")] = 3,
) -> None:
    """Record every operator and kernel of a few batches with torch's own profiler, which slows them down."""
    run = open_run(run_dir)
    pages = need_live_pages(run)
    typer.echo(f"torch's profiler records {batches} batches of process {pages[-1].snapshot.pid}", err=True)
    answer = ask(run.path / PROFILE_FOLDER / CONTROL_SOCKET, "torch", timeout_s=TORCH_PATIENCE_S, batches=batches)
    events = f"{answer['events']:,} events of {answer['batches']} batches, {answer['bytes'] / 1e6:.1f} MB"
    typer.echo(f"{events}: {printable(str(answer['file']))}")
    typer.echo("open it at ui.perfetto.dev")


def _drivers(run: RunFolder, pages: list[LivePage]) -> list[LivePage]:
    """Those of processes that ask the others for their part: of a run on Ray the one that holds its lock."""
    pid = holder(run)
    return [page for page in pages if page.snapshot.pid == pid] or pages


def _is_refused(page: LivePage) -> bool:
    """Whether the process switches profiling off again at once, as it does when it cannot print or write tables."""
    deadline = time.monotonic() + REFUSAL_S
    while time.monotonic() < deadline:
        if not read_page(page.path).control.is_on:
            return True
        time.sleep(POLL_S)
    return False


def _checked(interval: float) -> float:
    try:
        value = Profiling(interval=interval).interval
    except ValueError:
        value = -1.0
    if value != 0 and value < SMALLEST_INTERVAL_S:
        raise ConfigError(f"--interval {interval:g}: seconds from {SMALLEST_INTERVAL_S:g} to 86400 were wanted, or 0")
    return value


def _switch(run: RunFolder, page: LivePage, is_on: bool, interval_s: float, socket: bool) -> None:
    if socket:
        arguments = {"interval": interval_s} if is_on else {}
        ask(run.path / PROFILE_FOLDER / CONTROL_SOCKET, "profile_on" if is_on else "profile_off", **arguments)
        return
    now = page.snapshot.control
    if (now.is_on, now.interval_s) != (is_on, interval_s):
        write_word(page.path, CONTROL, now.changed(is_on, interval_s).word)


@contextlib.contextmanager
def _window(run: RunFolder, page: LivePage, until: int) -> Iterator[None]:
    """Events are kept from entering on until then; on leaving nothing of it is left in the run.

    Raises: PageError if somebody else's window is open.
    """
    with open(page.path, "rb") as file:
        left_ns = int.from_bytes(os.pread(file.fileno(), WORD, TRACE_UNTIL * WORD), sys.byteorder) - time.monotonic_ns()
    if left_ns > 0:
        raise PageError(
            f"process {page.snapshot.pid} is being traced for another {left_ns / 1e9:.1f} s: try after that"
        )
    write_word(page.path, TRACE_UNTIL, until)
    try:
        yield
    except BaseException:
        with contextlib.suppress(PageError):
            write_word(page.path, TRACE_UNTIL, 0)  # should it come to life again, it writes nothing
        raise
    finally:
        trace_file(run.path / PROFILE_FOLDER, until).unlink(missing_ok=True)


def _collected(run: RunFolder, page: LivePage, until: int, begin: int) -> list[dict[str, Any]]:
    """The events that the process has written down, of itself and of others. Raises: PageError if it does not."""
    place, pid = trace_file(run.path / PROFILE_FOLDER, until), page.snapshot.pid
    deadline = until + int(1e9 * PATIENCE_S)
    while not place.exists():
        if not page.snapshot.is_running:
            raise PageError(f"process {pid} ended before the trace did")
        if time.monotonic_ns() > deadline:
            state = "is stopped" if process_state(pid) in ("T", "t") else "hangs, or is held up in a long call"
            raise PageError(
                f"process {pid} did not write the trace within {PATIENCE_S:g} s of its end: it {state}; "
                f"`paceline top {quoted(run.path)}` still reads where its threads are"
            )
        time.sleep(POLL_S)
    processes: list[dict[str, Any]] = json.loads(place.read_text(encoding="utf-8"))["processes"]
    for thread in (thread for process in processes for thread in process["threads"]):
        # those of a window that was given up are there as well, and others hear late of its end
        thread["events"] = [event for event in thread["events"] if event[2] > begin and event[1] < until]
    return processes


def _place(run: RunFolder, out: Path | None, page: LivePage, num_pages: int) -> Path:
    place = out or run.path / PROFILE_FOLDER / f"trace-{time.strftime('%Y%m%d-%H%M%S')}.pftrace"
    return place if num_pages == 1 else place.with_stem(f"{place.stem}-{page.snapshot.pid}")


def _write(processes: list[dict[str, Any]], place: Path, seconds: float) -> None:
    from paceline.profiling.trace import write_perfetto

    threads = [thread for process in processes for thread in process["threads"]]
    count = sum(len(thread["events"]) + len(thread["open"]) for thread in threads)
    write_perfetto(processes, place)
    several = f" of {len(processes)} processes" if len(processes) > 1 else ""
    typer.echo(f"{count:,} runs of stages{several} in {seconds:g} s: {printable(str(place))}")
    for each in processes[1:]:
        if each["clock_error_ns"]:
            typer.echo(
                f"{each['role']} on {printable(each['host'])}: its clock is {each['ahead_ns'] / 1e9:+.6f} s from this "
                f"one's, known to {each['clock_error_ns'] / 1e6:.2f} ms"
            )
    if missing := processes[0].get("missing"):
        typer.echo(f"not in it, as they did not answer: {', '.join(missing)}")
    typer.echo("open it at ui.perfetto.dev")


def _shown(run: RunFolder, name: str) -> str:
    return printable(str(run.path / PROFILE_FOLDER / name))
