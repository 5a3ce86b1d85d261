"""`paceline report`: one page of a run, live or over, as a file or served and kept up to date.

All of it is read from the run's files and from the page in memory of a process that trains, as `paceline status` does:
its counting stays as it is, and with `--serve` nothing is written at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import run_state, watch
from paceline.cli.observe import PROFILE_FOLDER
from paceline.cli.run_state import RunArgument
from paceline.control.run_folder import RunFolder
from paceline.errors import CheckpointError, ConfigError, PacelineError, printable
from paceline.files import explain, write_atomically

if TYPE_CHECKING:
    from paceline.report.page import Html
    from paceline.report.run import RunView

PAGE_NAME = "report.html"


def report(
    run_dir: RunArgument,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page on this machine's loopback, kept up to date, until Ctrl-C.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page there; else RUN/report.html.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=65535, help="With --serve: a port; else a free one.")
    ] = None,
) -> None:
    """Show a run, live or over, on one page: speed, loss, acceptance, waits, stages, verdict, ledger, events."""
    run = run_state.open_run(run_dir)
    if serve and html is not None:
        raise ConfigError("--html writes a file, and --serve writes none: give one of them")
    if port is not None and not serve:
        raise ConfigError(f"--port {port} is for --serve")
    if serve:
        _serve(run, port)
    else:
        place = run.path / PAGE_NAME if html is None else html
        write_report(run, place)
        typer.echo(printable(str(place)))


def write_report(run: RunFolder, place: Path) -> None:
    """Write the page of a run as it is now. Raises: ConfigError if it cannot be written."""
    from paceline.report.run import run_page, run_parts

    if place.is_dir():
        raise ConfigError(f"--html {place} is a folder; a file is wanted")
    view = Reading(run).view()
    try:
        write_atomically(place, run_page(name_of(run), run_parts(view)))
    except OSError as error:
        raise ConfigError(f"{place} cannot be written: {explain(error)}; give another with --html") from error


def _serve(run: RunFolder, port: int | None) -> None:
    from paceline.report.live import SCRIPT, Board, listen, serve
    from paceline.report.run import live_page

    reading = Reading(run)
    board = Board(reading.look, lambda parts, version: live_page(name_of(run), parts, version, SCRIPT))
    try:
        server = listen(board, port or 0)
    except OSError as error:
        raise ConfigError(f"--port {port}: {explain(error)}; without --port a free one is taken") from error
    typer.echo(f"{server.url}  (Ctrl-C ends it; from elsewhere: ssh -L {server.server_port}:{server.url[7:-1]} HOST)")
    try:
        serve(server)
    except KeyboardInterrupt:
        typer.echo("", err=True)


def name_of(run: RunFolder) -> str:
    """The run folder's name, of the folder itself where it was given as ``.``."""
    return run.path.absolute().name if run.path.name else run.path.resolve().name


class Reading:
    """A run's files, read on from look to look."""

    def __init__(self, run: RunFolder) -> None:
        from paceline.report.history import Events, Stages, Steps

        self._run = run
        self._steps, self._events = Steps(run.metrics_file), Events(run.path / "events.jsonl")
        self._stages = Stages(run.path / PROFILE_FOLDER / "stages.jsonl")
        self._evaluations: dict[Path, tuple[object, dict[str, Any] | None]] = {}
        self._seen: object = None

    def look(self) -> dict[str, Html] | None:
        """The page's parts; None where no file has changed since and no process runs."""
        from paceline.report.run import run_parts

        if not self._run.path.is_dir():
            raise CheckpointError(f"{self._run.path} is gone")
        is_live = self._is_live()
        seen = (is_live, self._stamps())
        if seen == self._seen and not is_live:
            return None
        parts = run_parts(self.view())
        self._seen = seen
        return parts

    def view(self) -> RunView:
        """What is known now."""
        from paceline.report.run import RunView

        run = self._run
        self._steps.read()
        self._events.read()
        self._stages.read()
        state = _state_of(run)
        try:
            config = run.read_config().model_dump(mode="json")
        except CheckpointError:  # not written yet, or by another version: the rest can be told
            config = {}
        return RunView(
            state=state,
            steps=self._steps,
            events=self._events,
            stages=self._stages,
            record=run_state.run_record(run),
            report=run_state.report_record(run),
            config=config,
            checkpoints=checkpoints_of(run),
            evaluations=self._read_evaluations(),
            process_gib={} if state.get("is_other_host") else memory_of_process(state.get("pid")),
        )

    def _read_evaluations(self) -> list[dict[str, Any]]:
        """What each evaluation beside training found, in order; a file is read once."""
        known, self._evaluations = self._evaluations, {}
        for path in _files(self._run.path / "evaluations", "step-*.json"):
            stamp, earlier = _stamp(path), known.get(path)
            if earlier is None or earlier[0] != stamp:
                earlier = stamp, _evaluation(path)
            self._evaluations[path] = earlier
        found = [record for _, record in self._evaluations.values() if record is not None]
        return sorted(found, key=lambda record: record["step"])

    def _is_live(self) -> bool:
        try:
            return bool(run_state.live_pages(self._run)) or run_state.holder(self._run) is not None
        except PacelineError:
            return True

    def _stamps(self) -> list[object]:
        """What changes when a file of the run does."""
        path = self._run.path
        names = (
            "", "config.yaml", "run.json", "report.json", "metrics.jsonl", "events.jsonl", "bad_batches.jsonl",
            "checkpoints", "checkpoints/latest", "checkpoints/best", "evaluations", "profile", "profile/stages.jsonl",
        )  # fmt: skip
        return [_stamp(path / name) for name in names]


def _state_of(run: RunFolder) -> dict[str, Any]:
    """What `paceline status` says; of files that a disk has damaged, that they are."""
    try:
        return watch.state_of(run)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return {"run": str(run.path), "note": f"a file of the run is damaged: {type(error).__name__}: {error}"}


def _stamp(path: Path) -> object:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def checkpoints_of(run: RunFolder) -> list[dict[str, Any]]:
    """Every complete checkpoint, in order: step, time, size, and whether `latest` or `best` points to it."""
    links = {}
    for name in ("latest", "best"):
        try:
            links[name] = os.readlink(run.checkpoints / name).rstrip("/").rpartition("/")[2]
        except OSError:
            continue
    found = []
    for path in _files(run.checkpoints, "step-*"):
        number = path.name.removeprefix("step-")
        if not number.isascii() or not number.isdecimal():
            continue
        try:
            at_s, sizes = path.stat().st_mtime, [each.stat().st_size for each in path.iterdir()]
        except OSError:  # it has been removed meanwhile
            continue
        is_linked = {f"is_{name}": target == path.name for name, target in links.items()}
        found.append({"step": int(number), "time": at_s, "bytes": sum(sizes), **is_linked})
    return sorted(found, key=lambda each: each["step"])


def _files(folder: Path, pattern: str) -> Iterable[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _evaluation(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    return {name: record.get(name) for name in ("step", "acceptance_length", "mismatches")}


def memory_of_process(pid: int | None) -> dict[str, float]:
    """Resident host memory of a process on this host in GiB, `now` and at the `peak`; empty where it is not known."""
    if pid is None:
        return {}
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) / 2**20 for line in lines if line.startswith("Vm")}
        return {"now": sizes["VmRSS"], "peak": sizes["VmHWM"]}
    except (OSError, ValueError, IndexError, KeyError):
        return {}
