"""The command `paceline`: its verbs, and how errors end it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback

import typer
from rich.logging import RichHandler

from paceline import __version__
from paceline.cli import (
    cache,
    check,
    data,
    demo,
    doctor,
    evaluate,
    inspect,
    merge,
    plan,
    profile,
    regenerate,
    report,
    steer,
    train,
    watch,
)
from paceline.cli.progress import stderr_console
from paceline.errors import PacelineError, PipelineError, printable

app = typer.Typer(
    name="paceline",
    help="Train DFlash drafters: small block-diffusion models that make a language model decode faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (
    demo.demo,
    doctor.doctor,
    data.prepare,
    regenerate.regenerate,
    inspect.inspect,
    plan.plan,
    cache.cache,
    train.train,
    train.resume,
    watch.status,
    watch.top,
    report.report,
    steer.stop,
    steer.checkpoint,
    evaluate.eval,
    evaluate.export,
    check.check,
    merge.merge,
):
    app.command()(verb)
app.command("set")(steer.set_)
app.add_typer(profile.app, name="profile")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
    ),
) -> None:
    del version


def main() -> None:
    """The process's one command."""
    try:
        run()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: one more Ctrl-C would end in a traceback


def run() -> None:
    """Run the command; a user's error is a message and exit code 1, never a traceback."""
    # Threads of a parallel region wait for each other spinning. With a core taken by another process that costs
    # two thirds of the speed; a short spin loses nothing in large products (docs/experiments.md, 2026-11-29). The demo
    # decodes, where a region starts every 50 us and a short spin sleeps in between; it measures whether threads pay.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000" if sys.argv[1:2] == ["demo"] else "1000")
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=stderr_console(highlight=True), show_time=False, show_path=False)],
    )
    logging.getLogger("paceline").setLevel(logging.INFO)
    try:
        app()
    except PipelineError as error:  # a role failed: its own traceback is what helps
        traceback.print_exception(error.__cause__ or error)
        _fail(error)
    except (PacelineError, OSError) as error:  # a full disk or a path that cannot be written is a user's as well
        _fail(error)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)


def _fail(error: Exception) -> None:
    print(f"paceline: {printable(str(error))}", file=sys.stderr)
    sys.exit(1)
