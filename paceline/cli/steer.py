"""`paceline stop`, `checkpoint` and `set`: ask a live run for something, by its control socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from paceline.cli import run_state
from paceline.cli.observe import CONTROL_SOCKET, PROFILE_FOLDER, SAVE_S
from paceline.cli.run_state import RunArgument, need_live_pages, open_run, process_state, quoted
from paceline.config import FREE_LIVE
from paceline.control.run_folder import RunFolder
from paceline.control.socket import ControlError, ask
from paceline.errors import CheckpointError, ConfigError, printable
from paceline.profiling.page import PageError

ANSWER_S = 5.0
"""Seconds for the process to hear that it shall stop; then a signal tells it."""
POLL_S = 0.05

JsonOption = Annotated[bool, typer.Option("--json", help="Print as JSON on stdout.")]


def stop(
    run_dir: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="End it at once; what came after the last save is lost.")] = False,
    timeout: Annotated[float, typer.Option(metavar="S", min=0.1, help="Seconds to wait for its end.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Stop a live run after its present step, with a checkpoint, and wait for that."""
    run = open_run(run_dir)
    pid = _pid_of(run)
    how = _ask_to_stop(run, pid, now)
    if not as_json:
        typer.echo(f"process {pid} was {how}", err=True)
    _wait_for_end(run, pid, now, timeout)
    outcome, saved = run_state.last_outcome(run), run_state.last_checkpoint(run)
    if as_json:
        ending = None if outcome is None else {**vars(outcome), "text": outcome.text()}
        typer.echo(json.dumps({"run": str(run.path), "pid": pid, "how": how, "ending": ending, "checkpoint": saved}))
        return
    ended = f"trained nothing in {run.path}" if outcome is None else outcome.text()
    typer.echo(printable(f"process {pid} has ended: it {ended}"))
    typer.echo(f"the last checkpoint is that of step {saved['step']:,}" if saved else "there is no checkpoint")
    if outcome is not None and outcome.kind != "finished":
        typer.echo(f"go on with: paceline resume {quoted(run.path)}")


def checkpoint(
    run_dir: RunArgument,
    timeout: Annotated[float, typer.Option(metavar="S", min=0.1, help="Seconds to wait for it.")] = SAVE_S,
    as_json: JsonOption = False,
) -> None:
    """Have a live run save after its present step, and wait until that is on the disk."""
    run = open_run(run_dir)
    _need_socket(run)
    answer = ask(_socket_of(run), "checkpoint", timeout_s=timeout + ANSWER_S, wait_s=timeout)
    if as_json:
        typer.echo(json.dumps({"run": str(run.path), **answer}))
        return
    typer.echo(printable(f"step {answer['step']:,} is saved: {answer['path']}"))


def set_(
    run_dir: RunArgument,
    settings: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="Such as checkpoint.every_steps=100")],
    as_json: JsonOption = False,
) -> None:
    """Change settings of a live run that have no influence on its result; `paceline resume` keeps them."""
    run = open_run(run_dir)
    wanted = [_setting(text) for text in settings]  # all of them can be read before the first is sent
    _need_socket(run)
    answers = []
    for key, value in wanted:
        answer = ask(_socket_of(run), "set", key=key, value=value)
        answers.append(answer)
        if not as_json:
            was = "already " if answer["old"] == answer["new"] else ""
            typer.echo(printable(f"{key} is {was}{_shown(answer['new'])}{_before(answer)}"))
        if answer.get("problem"):
            typer.echo(printable(f"warning: {answer['problem']}"), err=True)
    if as_json:
        typer.echo(json.dumps({"run": str(run.path), "set": answers}))


def _before(answer: dict[str, Any]) -> str:
    return "" if answer["old"] == answer["new"] else f", and was {_shown(answer['old'])}"


def _shown(value: Any) -> str:
    return json.dumps(value)


def _setting(text: str) -> tuple[str, Any]:
    """Key and value. Raises: ConfigError if it is none, or may not change in a live run."""
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"{text!r} is not of the form section.key=value, for example checkpoint.every_steps=100")
    key = key.strip()
    if key not in FREE_LIVE:
        raise ConfigError(f"{key} cannot change while a run goes on; what can: {', '.join(FREE_LIVE)}")
    try:
        parsed = yaml.safe_load(value) if value.strip() else None
        json.dumps(parsed)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r}: the value is not valid YAML") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{text!r}: a number, a text or null was wanted") from error
    return key, parsed


def _pid_of(run: RunFolder) -> int:
    """The process that trains here. Raises: CheckpointError if there is none on this host, saying how it ended."""
    if (pid := run_state.holder(run)) is not None:
        return pid
    with contextlib.suppress(PageError):
        if pages := run_state.live_pages(run):
            return pages[-1].snapshot.pid
    raise run_state.not_running(run)


def _need_socket(run: RunFolder) -> None:
    """Raises: CheckpointError, PageError saying why there is nobody to ask."""
    _pid_of(run)
    need_live_pages(run)


def _socket_of(run: RunFolder) -> Path:
    return run.path / PROFILE_FOLDER / CONTROL_SOCKET


def _ask_to_stop(run: RunFolder, pid: int, now: bool) -> str:
    """Ask by the socket, or where that is not answered by a signal; what was done, in words."""
    try:
        ask(_socket_of(run), "stop", timeout_s=ANSWER_S, now=now)
        return "ended" if now else "asked to stop"
    except ControlError as error:
        number = signal.SIGKILL if now else signal.SIGTERM
        try:
            _send(run, pid, number)
        except PermissionError:
            raise CheckpointError(
                f"process {pid} belongs to another user: give this command as that user, or as root"
            ) from error
        return f"sent {number.name}: {error}"


def _send(run: RunFolder, pid: int, number: signal.Signals) -> None:
    """Send a signal to the process if it holds the run's lock; to nobody that has been given its number since.

    Raises: CheckpointError, PermissionError.
    """
    with _fixed(pid) as descriptor:
        if not run_state.holds_lock(pid, run):
            if process_state(pid) in ("", "Z", "X"):
                return  # it has ended meanwhile
            raise CheckpointError(
                f"process {pid} does not answer, and that it holds {run.path / 'run.lock'} cannot be seen: look at it, "
                f"and end it by `kill {pid}`"
            )
        with contextlib.suppress(ProcessLookupError):
            if descriptor is None:
                os.kill(pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)


@contextlib.contextmanager
def _fixed(pid: int) -> Iterator[int | None]:
    """A descriptor that stays this process's; None where it has ended, or the kernel has none."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _wait_for_end(run: RunFolder, pid: int, now: bool, timeout_s: float) -> None:
    """Raises: CheckpointError saying what it is at if it does not come in time."""
    deadline = time.monotonic() + timeout_s
    while not _has_ended(run, pid):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"process {pid} has not ended within {timeout_s:g} s{_at(run, pid)}; " + _advice(run, pid, now)
            )
        time.sleep(POLL_S)


def _has_ended(run: RunFolder, pid: int) -> bool:
    """Whether the process is gone, or has let go of the run, which is then for others to go on with."""
    if process_state(pid) in ("", "Z", "X"):
        return True
    return (run.path / "run.lock").exists() and not run_state.has_lock_file(pid, run)


def _at(run: RunFolder, pid: int) -> str:
    """Where its drafter stands, to follow a statement."""
    with contextlib.suppress(PageError):
        for page in run_state.live_pages(run):
            for thread in page.snapshot.threads:
                if page.snapshot.pid == pid and thread.role.startswith("drafter") and thread.inner:
                    seconds = (page.snapshot.taken_ns - thread.inner.since_ns) / 1e9
                    return f": {thread.role} has been in {thread.inner.stage} for {seconds:.0f} s"
    return ""


def _advice(run: RunFolder, pid: int, now: bool) -> str:
    if process_state(pid) in ("T", "t"):
        return f"it is stopped by a signal or a debugger: `kill -CONT {pid}` lets it go on, to its end"
    if now:
        return f"the kernel does not let go of it: look at `cat /proc/{pid}/stack`, a device or a disk may hang"
    path = quoted(run.path)
    return f"`paceline status {path}` says how it goes on; `paceline stop {path} --now` ends it without saving"
