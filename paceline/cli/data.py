"""`paceline prepare`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.control.signals import Interrupts
from paceline.errors import ConfigError, printable

if TYPE_CHECKING:
    from paceline.data.dataset import DatasetInfo
    from paceline.data.prepare import InputReport, Report

INPUT_HELP = (
    "A file (JSONL, JSON, Parquet, Arrow; JSON also .gz or .zst), a folder of them, or hf:ORG/NAME of a hub; then "
    ",weight=W ,license=NAME and for a hub ,split=S ,config=C ,revision=R as wanted."
)


def prepare(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help=INPUT_HELP)],
    tokenizer: Annotated[str, typer.Option(metavar="DIR|ID", help="The target's tokenizer.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Data set folder to make; an old data set is replaced.")],
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Chat template to use in place of the tokenizer's own.")
    ] = None,
    max_length: Annotated[int, typer.Option(metavar="N", help="Longest row in tokens.")] = 3072,
    on_long: Annotated[
        Literal["cut", "drop"], typer.Option(help="Longer rows: keep their first N tokens, or reject them.")
    ] = "cut",
    on_error: Annotated[
        Literal["skip", "fail"], typer.Option(help="Bad rows: list them and go on, or stop at the first.")
    ] = "skip",
    max_rejected: Annotated[
        str, typer.Option(metavar="SHARE", help="Fail when a larger share of the lines is rejected: 5% or 0.05.")
    ] = "5%",
    thinking: Annotated[
        Literal["on", "off"] | None,
        typer.Option(help="Switch the template's reasoning (`enable_thinking`, `thinking`); by default it decides."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Processes; by default one for small files, else up to all cores.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Turn conversations into a data set: exactly the tokens the target sees, and those it would say."""
    from dataclasses import asdict

    from paceline.data.inputs import parse_input
    from paceline.data.prepare import PrepareSettings
    from paceline.data.prepare import prepare as run_prepare

    settings = PrepareSettings(
        tokenizer=tokenizer,
        template=template,
        max_length=max_length,
        on_long=on_long,
        on_error=on_error,
        max_rejected=parse_share(max_rejected),
        thinking=None if thinking is None else thinking == "on",
        workers=workers,
    )
    parsed = [parse_input(text) for text in inputs]
    with Interrupts() as interrupts:
        try:
            with _progress_bar() as on_progress:
                info, report = run_prepare(parsed, out, settings, on_progress)
        except KeyboardInterrupt:
            number = interrupts.number or signal.SIGINT
            print(printable(f"{number.name}: nothing was published, {out} is as it was"), file=sys.stderr)
            sys.exit(128 + number)
    if as_json:
        print(json.dumps({"out": str(out), "dataset": info.model_dump(), "report": asdict(report)}))
    else:
        print(printable("\n".join(summary(out, info, report))))


def parse_share(text: str) -> float:
    """Share written as ``5%`` or ``0.05``. Raises: ConfigError if it is neither."""
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError as error:
        raise ConfigError(f"--max-rejected {text} is not a share: write 5% or 0.05") from error
    if share >= 1 and not text.endswith("%"):
        raise ConfigError(f"--max-rejected {text} may mean {text}% or {share:.0%}: write it in percent")
    return share


def summary(out: Path, info: DatasetInfo, report: Report) -> list[str]:
    """What a person wants to know after `prepare`, and the next command."""
    num_kept = report.num_lines - report.num_rejected - report.num_left_out
    supervised = f"{info.num_supervised:,} supervised ({info.num_supervised / info.num_tokens:.1%})"
    lines = [
        f"{info.num_rows:,} rows from {num_kept:,} of {report.num_lines:,} lines in {out}",
        f"{info.num_tokens:,} tokens, {supervised}, longest row {info.longest:,}",
    ]
    if report.fill is not None:
        lines.append(f"packed into batches of {report.fill_tokens:,} tokens, they fill {report.fill:.1%}")
    if len(report.kinds) > 1 or "conversations" not in report.kinds:
        lines.append("they hold " + ", ".join(f"{count:,} {kind}" for kind, count in report.kinds.items()))
    if len(report.inputs) > 1:
        lines += [
            f"  {part.num_tokens / info.num_tokens:6.1%} of the tokens: {_input_line(part)}" for part in report.inputs
        ]
    for part in report.inputs:
        lines += [f"  {count:,} files of {part.source['path']} not read: {why}" for why, count in part.ignored.items()]
        if part.source.get("regenerated", {}).get("finished") is False:
            lines.append(f"  {part.source['path']} is not finished: `paceline regenerate` goes on with it")
    if report.num_supervised_lost:
        share = report.num_supervised_lost / (report.num_supervised_lost + info.num_supervised)
        lines.append(
            f"{report.num_supervised_lost:,} supervised tokens ({share:.1%}) lost to "
            f"--max-length {info.max_length} --on-long {info.on_long}"
        )
    if report.num_rejected:
        lines.append(f"{report.num_rejected:,} lines rejected, listed in {out / 'rejected.jsonl'}:")
        lines += [f"  {count:,} x {kind}" for kind, count in report.rejected.items()]
    if report.dropped_turns:
        lines.append(f"{sum(report.dropped_turns.values()):,} turns of kept lines left out, listed there too:")
        lines += [f"  {count:,} x {kind}" for kind, count in report.dropped_turns.items()]
    return [*lines, f"next: paceline inspect {out}"]


def _input_line(part: InputReport) -> str:
    weight = f", {part.num_left_out:,} lines left out by weight {part.weight:g}" if part.num_left_out else ""
    return f"{part.source['path']} ({part.num_rows:,} rows{weight})"


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int | None], None] | None]:
    """A bar on standard error that takes bytes done and bytes in all; None where that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("preparing")
        yield lambda done, total: bar.update(task, completed=done, total=total)
