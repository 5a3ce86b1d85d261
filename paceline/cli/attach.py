"""`paceline profile attach`, `report` and `diff`: what a running process is doing, and what has moved since."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.observe import CONTROL_SOCKET, PROFILE_FOLDER
from paceline.cli.run_state import live_pages, need_live_pages, open_run, run_record, tail_lines
from paceline.config import RunConfig
from paceline.control.run_folder import RunFolder
from paceline.control.socket import ControlError, ask
from paceline.errors import CheckpointError, ConfigError, printable
from paceline.files import write_atomically
from paceline.profiling.evidence import AttachError
from paceline.profiling.page import PageError

if TYPE_CHECKING:
    from paceline.profiling.evidence import Report
    from paceline.profiling.look import OurRun, Wish
    from paceline.profiling.verdict import Window

RECENT_S = 120.0
"""Seconds of the run's last steps that a verdict may rest on where the look is too short for one."""

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; -: stdout.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write it as one web page.")]


def attach(
    what: Annotated[str, typer.Argument(metavar="PID|RUN", help="A process number, or a run folder.")],
    seconds: Annotated[float, typer.Option(metavar="S", min=1.0, max=600.0, help="How long to look.")] = 10.0,
    allow_pause: Annotated[
        bool, typer.Option("--allow-pause", help="Take native stacks too, which stop the process for moments.")
    ] = False,
    pause_budget: Annotated[
        float, typer.Option(metavar="FRAC", min=0.001, max=0.5, help="Share of time for which they may stop it.")
    ] = 0.03,
    native_seconds: Annotated[
        float, typer.Option(metavar="S", min=1.0, max=600.0, help="Longest time over which they are taken.")
    ] = 60.0,
    hypothesis: Annotated[
        list[str] | None,
        typer.Option("--hypothesis", metavar="TEXT|ID", help="Your own suspicion, such as gil; may be given again."),
    ] = None,
    thread: Annotated[str, typer.Option(metavar="NAME|TID", help="Judge this thread; else the one that matters.")] = "",
    as_json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Say what a running Python process is doing, and why it is no faster, without stopping or restarting it.

    Any process of yours will do. The verdict names the cause and what would refute it.
    """
    from paceline.profiling.causes import asked_ids
    from paceline.profiling.look import Wish

    wish = Wish(
        seconds=seconds,
        allow_pause=allow_pause,
        budget=pause_budget,
        native_seconds=native_seconds,
        asked=tuple(asked_ids(hypothesis or [])),
        thread=thread,
    )
    _check_places(as_json, html)
    _show(look_at(what, wish, lambda text: typer.echo(printable(text), err=True)), as_json, html)


def look_at(what: str, wish: Wish, say: Callable[[str], None] = lambda text: None) -> Report:
    """Look at a process, or at the one of a run of ours, and judge what was seen.

    Args:
        what: A process number or a run folder.
        say: Told what a person would want to know meanwhile.
    Raises: AttachError, CheckpointError, PageError.
    """
    from paceline.profiling.look import look

    pid, run = _meant(what)
    with _ending_in_order():
        return look(pid, wish, run=run, say=say)


def report(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A report that `attach --json` wrote.")],
    as_json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Show a saved report again, in the terminal or as a web page."""
    from paceline.profiling.diff import load_report

    _check_places(as_json, html)
    _show(load_report(file), as_json, html)


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A report that `attach --json` wrote.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another, of later.")],
    fail_on: Annotated[
        list[str] | None,
        typer.Option("--fail-on", metavar="EXPR", help="Exit 1 if so: 'drafter.forward.p50>+5%', 'verdict', 'any'."),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare although machines or lengths of batches differ.")
    ] = False,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the comparison as JSON; -: stdout.")
    ] = None,
) -> None:
    """Say what moved between two reports beyond noise, the verdict first.

    Exit code 0: compared; 1: something that --fail-on names has moved; 2: the two cannot be compared.
    """
    from paceline.profiling.diff import check, load_report
    from paceline.profiling.diff import diff as compared

    _check_places(as_json, None)
    found = compared(load_report(before), load_report(after))
    failed = check(found, fail_on or [])
    if as_json is not None:
        _put(as_json, json.dumps({**found.model_dump(mode="json"), "failed": failed}, indent=1))
    if as_json is None or str(as_json) != "-":
        typer.echo(printable(found.text(anyway=anyway)))
    for line in failed:
        typer.echo(printable(f"failed: {line}"), err=True)
    if code := found.exit_code(failed, anyway=anyway):
        raise typer.Exit(code)


def _show(report: Report, as_json: Path | None, html: Path | None) -> None:
    from paceline.report.attach import render_html
    from paceline.report.attach_text import render_text

    record = report.model_dump(mode="json", by_alias=True)
    if as_json is None or str(as_json) != "-":
        typer.echo(render_text(record))
    if as_json is not None:
        _put(as_json, json.dumps(record, separators=(",", ":")))
    if html is not None:
        _put(html, render_html(record))
    for place in (as_json, html):
        if place is not None and str(place) != "-":
            typer.echo(f"written: {printable(str(place))}", err=True)


def _put(place: Path, text: str) -> None:
    """Raises: AttachError where it cannot be written; an older file there stays as it was."""
    if str(place) == "-":
        typer.echo(text)
        return
    try:
        if place.exists() and not place.is_file():  # a pipe or /dev/stdout takes no other file's place
            place.write_text(text, encoding="utf-8")
        else:
            write_atomically(place, text)
    except OSError as error:
        raise AttachError(f"{place} cannot be written: {error.strerror or error}") from error


def _check_places(*places: Path | None) -> None:
    """Say before the look that its result could not be written. Raises: ConfigError."""
    for place in places:
        if place is not None and str(place) != "-":
            if place.is_dir():
                raise ConfigError(f"{place} is a folder; a file is wanted")
            if not place.absolute().parent.is_dir():
                raise ConfigError(f"{place}: there is no folder {place.absolute().parent}")


def _meant(what: str) -> tuple[int, OurRun | None]:
    """The process, and the run if it is one of ours. Raises: AttachError, CheckpointError, PageError."""
    if what.isdecimal() and not Path(what).is_dir():
        from paceline.profiling.collect.stages import folder_of, page_of

        pid = int(what)
        page, folder = page_of(pid), folder_of(pid)
        return pid, _our_run(folder, [page]) if page is not None else None
    if not Path(what).exists():
        raise AttachError(f"{what} is no process number and no run folder; a number from `ps`, or a run.dir, is wanted")
    run = open_run(Path(what))
    pages = need_live_pages(run)
    return pages[-1].snapshot.pid, _our_run(run.path, [page.path for page in pages])


def _our_run(folder: Path | None, pages: Sequence[Path]) -> OurRun:
    from paceline.profiling.look import OurRun

    if folder is None:  # a page without a run folder that can be seen from here
        return OurRun(facts={}, pages=tuple(pages))
    run, config = RunFolder(folder), None
    with contextlib.suppress(CheckpointError):
        config = run.read_config()
    with contextlib.suppress(PageError):
        pages = [page.path for page in live_pages(run)] or pages
    return OurRun(
        facts=_facts(run, config),
        pages=tuple(pages),
        in_turn=config is not None and config.topology.layout == "colocated",
        batches_per_step=_batches_per_step(config),
        ask=_asking(run),
        recent=lambda: _recent(run),
    )


def _facts(run: RunFolder, config: RunConfig | None) -> dict[str, Any]:
    from paceline.files import sha256

    facts: dict[str, Any] = {"name": run.path.resolve().name}
    record = run_record(run)
    facts["roles"] = sorted(record.get("roles", {}))
    if config is not None:
        facts |= {
            "config_hash": sha256(run.config_file)[:16],
            "layout": config.topology.layout,
            "targets": config.topology.targets,
            "device": config.run.device,
            "tokens_per_batch": config.pipeline.tokens_per_batch,
            "tokens_per_step": config.optim.tokens_per_step,
            "max_length": config.data.max_length,
        }
    return facts


def _batches_per_step(config: RunConfig | None) -> int:
    if config is None:
        return 1
    step, batch = config.optim.tokens_per_step, config.pipeline.tokens_per_batch
    return max(1, step // batch) if isinstance(step, int) and isinstance(batch, int) else 1


def _asking(run: RunFolder) -> Any:
    def asked(verb: str, **arguments: Any) -> dict[str, Any]:
        timeout_s = 2.0 + float(arguments.get("seconds", 0.0))
        try:
            return ask(run.path / PROFILE_FOLDER / CONTROL_SOCKET, verb, timeout_s=timeout_s, **arguments)
        except ControlError as error:
            raise AttachError(str(error)) from error

    return asked


def _recent(run: RunFolder) -> list[Window]:
    from paceline.profiling.verdict import windows_of

    first = int(run_record(run).get("resumed_from_step") or 0)
    windows = windows_of([line for line in tail_lines(run.metrics_file) if line.get("step", 0) > first])
    kept: list[Window] = []
    for window in reversed(windows):
        if sum(each.seconds for each in kept) >= RECENT_S:
            break
        kept.append(window)
    return kept[::-1]


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """While entered, SIGTERM, and SIGHUP of a terminal that goes, end the look as Ctrl-C does: tools first.

    Nothing of the process is left stopped, and counting is put back.
    """

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals are not a thread's to hear
        yield
        return
    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        print("\nended early; the process goes on as before", file=sys.stderr)
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
