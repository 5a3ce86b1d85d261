"""`paceline cache`: a target's features on disk, for runs that do not run the target."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli.progress import say, stderr_console
from paceline.config import RunConfig, load_config
from paceline.control.signals import StopRequest
from paceline.errors import ConfigError, DataError, printable

if TYPE_CHECKING:
    from paceline.train.cache_writer import CacheWriter

FIRST_S, INTERVAL_S = 3.0, 10.0
"""Seconds until the first plain line, with the time that all will take, and between later ones."""


def cache(
    run_file: Annotated[Path | None, typer.Argument(help="Run file (YAML) of the runs to come.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides: draft.kind=dspark")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the cache (target.cache); one begun earlier is gone on with."),
    ] = None,
    dtype: Annotated[
        Literal["target", "bfloat16", "fp8"],
        typer.Option(help="Type to keep features in; target: as it delivers them, so that no bit is lost."),
    ] = "target",
    shard_mib: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Size at which the next file is begun, in MiB (1024).")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, on a terminal, whether to start.")] = False,
    verify: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Make nothing: compare the files of a cache with its checksums.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cache's manifest as JSON on stdout.")] = False,
) -> None:
    """Write the target's features of a data set to disk: runs with target.cache=DIR then need no target."""
    if verify is not None:
        if run_file is not None or out is not None:
            raise ConfigError("--verify DIR makes nothing: leave the run file and --out away")
        _verify(verify, as_json)
        return
    if run_file is None:
        raise ConfigError("which features? Name the run file of the runs to come, and --out DIR")
    config = load_config(run_file, overrides or [])

    def tell(writer: CacheWriter) -> None:
        if not as_json:
            for line in announcement(writer):
                say(line)
        if not yes and not writer.num_done and sys.stdin.isatty():
            typer.confirm("start?", default=True, abort=True, err=True)
        progress.start(writer)

    with _Progress(as_json) as progress:
        record = cache_features(
            config,
            out,
            dtype,
            None if shard_mib is None else shard_mib << 20,
            on_start=tell,
            on_tokens=progress.add,
        )
    if as_json:
        say(json.dumps(record))
    elif not record["finished"]:
        say("not complete: the same command goes on after the last complete shard")
    else:
        for line in _summary(record):
            say(line)


def cache_features(
    config: RunConfig,
    out: Path | None,
    dtype: str = "target",
    shard_bytes: int | None = None,
    *,
    on_start: Callable[[CacheWriter], object] = lambda writer: None,
    on_tokens: Callable[[int], object] = lambda count: None,
) -> dict[str, Any]:
    """Make a cache, or what it is missing; the record that ``--json`` prints.

    Args:
        out: None: `target.cache` of the run file.
        shard_bytes: None: as it was begun, else 1 GiB.
        on_start: Called before the target is loaded.
    Raises: PacelineError of any kind; complete shards are kept.
    """
    if out is None and config.target.cache is None:
        raise ConfigError("where to? Name --out DIR, or target.cache in the run file")
    if config.target.server is not None:
        raise ConfigError(f"target.server={config.target.server}: a cache is made by a target that runs here")
    place = Path(str(out or config.target.cache))
    config = config.model_copy(update={"target": config.target.model_copy(update={"cache": None})})
    with StopRequest(config.run.stop_signal, doing="ending after the row at hand") as stop:
        from paceline.cli.train import resolve_config
        from paceline.train.cache_writer import CacheWriter, open_folder

        resolved, _ = resolve_config(config)
        with open_folder(place) as earlier:
            writer = CacheWriter(resolved, place, earlier, dtype, shard_bytes)
            writer.check_space()
            on_start(writer)
            made = writer.run(lambda: stop.reason, on_tokens)
    return {"out": str(place), "finished": made is not None, **({} if made is None else made.model_dump(mode="json"))}


def announcement(writer: CacheWriter) -> list[str]:
    """What is about to be made, and what it takes."""
    from paceline.train.feature_cache import STORED

    last = ", the last hidden state" if writer.has_last_hidden else ""
    num_bytes = writer.total_bytes
    lines = [
        f"{writer.num_rows:,} rows, {writer.num_tokens:,} tokens; taps {','.join(map(str, writer.layer_ids))}{last}",
        f"{num_bytes:,} bytes ({_size(num_bytes)}) in {writer.dtype}, {_files(len(writer.shards))}; "
        f"{_size(shutil.disk_usage(writer.out).free)} free in {writer.out}",
    ]
    others = {name: writer.bytes_in(name) for name in STORED if name != writer.dtype}
    lines.append("it would be " + ", ".join(f"{_size(size)} in {name}" for name, size in others.items()))
    if writer.num_done:
        missing = _size(writer.missing_bytes) if writer.missing_bytes else "nothing"
        lines.append(f"there already: {_files(writer.num_done)}; missing: {missing}")
    return lines


def _summary(record: dict[str, Any]) -> list[str]:
    size = sum(shard["bytes"] for shard in record["shards"])
    lines = [f"{record['num_rows']:,} rows in {_files(len(record['shards']))}, {_size(size)}, in {record['out']}"]
    if record["relative_error"] is not None:
        errors = ", ".join(f"{error:.2%}" for error in record["relative_error"])
        lines.append(f"{record['dtype']} changes the states by {errors} of their norm")
    return [*lines, f"next: paceline train RUN_FILE target.cache={record['out']}"]


def _files(count: int) -> str:
    return f"{count:,} file" if count == 1 else f"{count:,} files"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def _verify(place: Path, as_json: bool) -> None:
    from paceline.train.feature_cache import find_damage, read_manifest

    manifest = read_manifest(place)
    problems = find_damage(place)
    if as_json:
        say(json.dumps({"path": str(place), "complete": manifest.is_complete, "problems": problems}))
    if problems:
        raise DataError(
            f"{len(problems)} of {_files(len(manifest.shards))} damaged; remove what is, and the `paceline cache` "
            "command that made it makes it again\n  " + "\n  ".join(problems)
        )
    if not as_json:
        rows = "all rows are there" if manifest.is_complete else "not all rows are there yet"
        say(printable(f"{place}: {_files(len(manifest.shards))} as written; {rows}"))


class _Progress(contextlib.AbstractContextManager["_Progress"]):
    """How far it is and how long it takes: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._console = stderr_console()
        self._bar: Any = None
        self._total = self._made = 0
        self._started = self._shown = 0.0

    def start(self, writer: CacheWriter) -> None:
        """All that is missing is about to be made."""
        self._total = writer.missing_tokens
        if self._quiet or not self._console.file.isatty():
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task("loading the target", total=self._total)
        self._bar.start()

    def add(self, count: int) -> None:
        """So many tokens more have been made."""
        now = time.monotonic()
        if not self._made:  # the target was being loaded until about now
            self._started, self._shown = now, now + FIRST_S - INTERVAL_S
            self._before = count
        self._made += count
        rate = (self._made - self._before) / (now - self._started) if now > self._started else 0.0
        text = f"{self._made:,} of {self._total:,} tokens, {rate:,.0f} tok/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._made, description=text)
        elif not self._quiet and rate and now - self._shown >= INTERVAL_S:
            self._shown = now
            self._console.print(f"{text}, about {_time((self._total - self._made) / rate)} left", markup=False)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
