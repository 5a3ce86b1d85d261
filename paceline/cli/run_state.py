"""What a run folder and the pages of its processes say from outside: who runs, how far, and how it ended.

Everything here reads; nothing asks the process, so all of it works on one that hangs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import pwd
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.observe import PROFILE_FOLDER
from paceline.config import RunConfig
from paceline.control.run_folder import RunFolder
from paceline.errors import CheckpointError, printable
from paceline.files import is_running
from paceline.profiling.page import PageError, Snapshot, pages_in, read_page

if TYPE_CHECKING:
    from paceline.profiling.verdict import Verdict

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]

TAIL_BYTES = 256 * 1024
"""Read of a long file's end: some 700 steps of ``metrics.jsonl``."""

RECENT_STEPS = 20
"""Steps that speed and waits are averaged over."""


ENDINGS = {
    "finished": "finished",
    "failed": "failed",
    "max_hours": "was stopped by its time limit (run.max_hours)",
    "stop": "was stopped by `paceline stop`",
    "stop now": "was ended by `paceline stop --now`, without saving,",
}
"""How a run may have ended; besides there are signals."""

SAVE_FAILED = "checkpoint failed"
"""The event of a checkpoint that could not be written; one that could, `checkpoint`, ends the trouble."""


@dataclass(frozen=True)
class LivePage:
    """The page of a process that runs."""

    path: Path
    snapshot: Snapshot


@dataclass(frozen=True)
class Outcome:
    """What ``events.jsonl`` says last of beginnings and ends.

    Attributes:
        kind: ``finished``, ``failed``, a signal's name, ``max_hours``, ``stop`` or ``stop now``; without an ending
            ``started`` or ``resumed``.
        step, at_s: Then, in seconds since 1970; without an ending those of the last step that was written down.
        reason: Why it failed.
    """

    kind: str
    step: int
    at_s: float
    reason: str = ""

    @property
    def is_ending(self) -> bool:
        """Whether the process wrote how it ended."""
        return self.kind not in ("started", "resumed")

    def text(self) -> str:
        """How it ended, to follow a subject."""
        how = ENDINGS.get(self.kind, f"was stopped ({self.kind})") + " at"
        if not self.is_ending:
            how = "was killed, or died without a word, some time after"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.at_s))
        return f"{how} step {self.step}, {when}" + (f": {one_line(self.reason)}" if self.reason else "")


def open_run(path: Path) -> RunFolder:
    """Raises: CheckpointError if this is no run folder."""
    run = RunFolder(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; a run folder is wanted, the run.dir of a training")
    if not run.exists and not (path / "run.lock").exists():
        raise CheckpointError(f"{path} is no run folder: it has no config.yaml; give the run.dir of a training")
    return run


def live_pages(run: RunFolder) -> list[LivePage]:
    """Pages of the run's processes that run, the oldest first.

    Raises: PageError if there is one that cannot be read, and none that can.
    """
    found, refused = [], None
    for path in _links(run.path / PROFILE_FOLDER):
        try:
            snapshot = read_page(path)
        except PageError as error:
            if not _is_gone(path, error):
                refused = _explained(path, error)
            continue
        if snapshot.is_running:
            found.append(LivePage(path, snapshot))
    if refused is not None and not found:
        raise refused
    return found


def need_live_pages(run: RunFolder) -> list[LivePage]:
    """As `live_pages`; at least one. Raises: CheckpointError saying why there is none, and what to do; PageError."""
    if pages := live_pages(run):
        return pages
    path = printable(str(run.path))
    if (pid := holder(run)) is not None:
        raise CheckpointError(
            f"process {pid} holds {path} but has no profile page: it is loading its models, is about to end, or could "
            "not make one (its output says so); try again in a moment"
        )
    outcome, host = last_outcome(run), other_host(run)
    if host is not None and (outcome is None or not outcome.is_ending):
        raise CheckpointError(f"the process of {path} was started on {host}: give this command there")
    if outcome is None:
        raise CheckpointError(f"no process trains in {path}, and none has; `paceline train` starts one")
    ended = f"no process trains in {path}: the last one {outcome.text()}"
    if outcome.kind == "finished":
        raise CheckpointError(f"{ended}; `paceline status {quoted(run.path)}` says how it went")
    raise CheckpointError(f"{ended}; `paceline resume {quoted(run.path)}` goes on with it")


def other_host(run: RunFolder) -> str | None:
    """The host that the last process was started on, unless it is this one."""
    host = run_record(run).get("host")
    return printable(str(host)) if host and host != platform.node() else None


def holder(run: RunFolder) -> int | None:
    """The process that holds the run's lock, if it still runs (on this host)."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((run.path / "run.lock").read_text(encoding="ascii").strip())
        if pid > 0 and is_running(pid) and process_state(pid) not in ("", "Z", "X") and has_lock_file(pid, run):
            return pid
    return None


def has_lock_file(pid: int, run: RunFolder) -> bool:
    """Whether the process has the run's lock file open; assumed where that may not be looked at."""
    lock = run.path / "run.lock"
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if descriptor.samefile(lock):
                    return True
    except OSError:
        return True
    return False


def holds_lock(pid: int, run: RunFolder) -> bool:
    """Whether the process has locked the run, as far as can be seen: it is not enough to have the file open."""
    lock = run.path / "run.lock"
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if descriptor.samefile(lock):
                    details = Path(f"/proc/{pid}/fdinfo/{descriptor.name}").read_text(encoding="utf-8")
                    if "FLOCK" in details:
                        return True
    return False


def process_state(pid: int) -> str:
    """The kernel's letter for it (``T``: stopped by a signal, ``t``: by a debugger); empty when it is gone."""
    with contextlib.suppress(OSError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[0]  # the name before it may hold anything
    return ""


def run_record(run: RunFolder) -> dict[str, Any]:
    """``run.json``; empty where there is none."""
    return _read_json(run.path / "run.json")


def report_record(run: RunFolder) -> dict[str, Any]:
    """``report.json`` of the last process that came to an end; empty where there is none."""
    return _read_json(run.path / "report.json")


def last_outcome(run: RunFolder) -> Outcome | None:
    """None before anything has begun."""
    events = [line for line in _events(run) if _begins_or_ends(str(line.get("event")))]
    if not events:
        return None
    last = events[-1]
    kind, step, at_s = printable(str(last["event"])), _int(last.get("step")), float(last.get("time", 0.0))
    outcome = Outcome(kind, step, at_s, str(last.get("reason", "")))
    if outcome.is_ending:
        return outcome
    with contextlib.suppress(OSError):
        at_s = max(at_s, run.metrics_file.stat().st_mtime)
    return Outcome(kind, max([step, *(line.get("step", 0) for line in recent_metrics(run))]), at_s)


def stall_of(run: RunFolder) -> dict[str, Any] | None:
    """Since when nothing moves, and where threads stand, if that is what the watchdog said last; else None."""
    for line in reversed(_events(run)):
        kind = str(line.get("event"))
        if kind == "stalled":
            return {"time": float(line.get("time", 0.0)), "reason": str(line.get("reason", ""))}
        if kind == "moves again" or _begins_or_ends(kind):
            break
    return None


def save_problem(run: RunFolder) -> str | None:
    """Why the newest checkpoint is not on the disk, as far as events say."""
    for line in reversed(_events(run)):
        kind = str(line.get("event"))
        if kind == SAVE_FAILED:
            return str(line.get("reason", "the reason was not written down"))
        if kind == "checkpoint" or _begins_or_ends(kind):
            break
    return None


def ledger_of(gauges: Mapping[str, int]) -> dict[str, int] | None:
    """Micro-batches by what became of them; None before any, or where the page does not say."""
    if not gauges.get("issued"):
        return None
    issued, trained, skipped = (gauges.get(name, 0) for name in ("issued", "trained", "skipped"))
    in_flight = max(0, issued - trained - skipped)  # they are read one after another
    return {
        "issued": trained + in_flight + skipped,
        "trained": trained,
        "in_flight": in_flight,
        "skipped": skipped,
        "retried": gauges.get("retried", 0),
    }


def ledger_text(ledger: Mapping[str, int]) -> str:
    """A ledger in a line."""
    text = "{issued:,} issued = {trained:,} trained + {in_flight:,} in flight + {skipped:,} skipped".format(**ledger)
    return text + (f"; {ledger['retried']:,} retried" if ledger.get("retried") else "")


def num_bad_batches(run: RunFolder) -> int:
    """Micro-batches in ``bad_batches.jsonl``, left out by whichever process of the run."""
    found = set()
    with contextlib.suppress(OSError), open(run.path / "bad_batches.jsonl", "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                found.add(json.loads(line)["batch"])
    return len(found)


def not_running(run: RunFolder) -> CheckpointError:
    """What to say of a run without a process on this host."""
    path = printable(str(run.path))
    outcome, host = last_outcome(run), other_host(run)
    if host is not None and (outcome is None or not outcome.is_ending):
        return CheckpointError(f"the process of {path} was started on {host}: give this command there")
    if outcome is None:
        return CheckpointError(f"{path} is not running, and never was; `paceline train` starts it")
    goes_on = "" if outcome.kind == "finished" else f"; `paceline resume {quoted(run.path)}` goes on with it"
    subject = "" if outcome.kind in ("finished", "failed") else "it "
    return CheckpointError(f"{path} is not running: {subject}{outcome.text()}{goes_on}")


def last_checkpoint(run: RunFolder) -> dict[str, Any] | None:
    """Step, time and folder of the newest complete one."""
    place = run.checkpoints / "latest"
    try:
        target = place.resolve(strict=True)
        step = int(target.name.removeprefix("step-"))
        return {"step": step, "time": target.stat().st_mtime, "path": str(run.checkpoints / target.name)}
    except (OSError, ValueError, RuntimeError):
        return None


def last_evaluation(run: RunFolder) -> dict[str, Any] | None:
    """Step and acceptance length of the newest evaluation beside training; None without any."""
    for path in sorted((run.path / "evaluations").glob("step-*.json"), reverse=True):
        record = _read_json(path)
        step, length = record.get("step"), record.get("acceptance_length")
        if type(step) is int and type(length) is float:
            return {"step": step, "acceptance_length": length}
    return None


def recent_metrics(run: RunFolder) -> list[dict[str, Any]]:
    """The last lines of ``metrics.jsonl`` that the last process wrote."""
    first = int(run_record(run).get("resumed_from_step") or 0)
    return [line for line in tail_lines(run.metrics_file) if line.get("step", 0) > first]


def speed_of(lines: Sequence[dict[str, Any]]) -> float | None:
    """Tokens a second over these steps, validation and saves included; None without any."""
    seconds = sum(line.get("seconds", 0.0) for line in lines)
    return sum(line.get("tokens", 0) for line in lines) / seconds if seconds > 0 else None


def waits_of(lines: Sequence[dict[str, Any]], targets: int) -> tuple[float, float] | None:
    """Shares of time that the average target waited in put, and the drafter in get."""
    seconds = sum(line.get("seconds", 0.0) for line in lines)
    if seconds <= 0:
        return None
    put, get = (sum(line.get(key, 0.0) for line in lines) for key in ("put_wait_s", "get_wait_s"))
    return min(1.0, put / seconds / max(1, targets)), min(1.0, get / seconds)


def verdict_of(lines: Sequence[dict[str, Any]], config: RunConfig) -> Verdict | None:
    """What limits the run; None while there is nothing to judge."""
    from paceline.profiling.verdict import drop_warm_up, judge, windows_of

    windows = drop_warm_up(windows_of(lines))
    if not windows:
        return None
    depth, a_step, a_batch = config.pipeline.queue_depth, config.optim.tokens_per_step, config.pipeline.tokens_per_batch
    if isinstance(depth, str) or isinstance(a_step, str) or isinstance(a_batch, str):
        return None  # a run folder's configuration is resolved; this one was written by hand
    return judge(
        windows,
        targets=config.topology.targets,
        queue_depth=depth,
        batches_per_step=max(1, a_step // a_batch),
        in_turn=config.topology.layout == "colocated",
    )


def tail_lines(path: Path) -> list[dict[str, Any]]:
    """Whole JSON objects among the last `TAIL_BYTES` of a file of JSON lines; none where there is no file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError:
        return []
    lines = data.split(b"\n")
    if size > TAIL_BYTES:
        del lines[0]  # the part of it that was read
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(line)
            if isinstance(content, dict):
                found.append(content)
    return found


def one_line(text: str) -> str:
    """Text that neither steers a terminal nor leaves its line."""
    return " ".join(printable(text).split())


def quoted(path: Path) -> str:
    """A path as it is typed in a shell."""
    return printable(shlex.quote(str(path)))


def _events(run: RunFolder) -> list[dict[str, Any]]:
    return tail_lines(run.path / "events.jsonl")


def _begins_or_ends(kind: str) -> bool:
    return kind in ("started", "resumed", *ENDINGS) or kind.startswith("SIG")


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def _links(folder: Path) -> list[Path]:
    for _ in range(5):
        try:
            return pages_in(folder)
        except FileNotFoundError:  # one vanished between listing and looking: its process has ended
            continue
    return []


def _is_gone(path: Path, error: PageError) -> bool:
    """Whether a page that cannot be read is nobody's: its file is missing, or the process in its name."""
    cause, pid = error.__cause__, path.name.split("-")[3:4]
    if isinstance(cause, OSError) and cause.errno in (errno.ENOENT, errno.ESTALE):
        return True
    return bool(pid) and pid[0].isdecimal() and not is_running(int(pid[0]))


def _explained(path: Path, error: PageError) -> PageError:
    """The error with what to do about it."""
    cause = error.__cause__
    if isinstance(cause, PermissionError):
        owner = ""
        with contextlib.suppress(OSError, KeyError):
            owner = f" {pwd.getpwuid(path.stat().st_uid).pw_name}"
        return PageError(f"{path} belongs to another user{owner}: give this command as that user, or as root")
    return error if str(path) in str(error) else PageError(f"{path}: {error}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
