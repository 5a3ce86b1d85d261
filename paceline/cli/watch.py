"""`paceline status` and `paceline top`: where a run stands, once or as it goes on.

Both read files and pages, so they work on a process that hangs or is stopped. Whether checkpoints can be written, the
process alone knows while its disk is full; it is asked, and need not answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live

from paceline.cli import run_state
from paceline.cli.observe import CONTROL_SOCKET, PROFILE_FOLDER, thread_record
from paceline.cli.observe import live as live_threads
from paceline.cli.run_state import LivePage, RunArgument
from paceline.cli.top_frame import Frame, StageRow, ThreadRows, lines_of
from paceline.config import RunConfig
from paceline.control.run_folder import RunFolder
from paceline.control.signals import Interrupts
from paceline.control.socket import ControlError, ask
from paceline.errors import CheckpointError, printable
from paceline.profiling.intervals import Interval, ThreadInterval, stages_of
from paceline.profiling.page import CONTROL, Control, PageError, Snapshot, ThreadSnapshot, read_page, write_word
from paceline.profiling.stages import GET_WAIT, PUT_WAIT, WAITS
from paceline.report.page import duration

VERDICT_EVERY_S = 2.0
RATE_S = 15.0
"""Seconds of training that tokens a second are counted over."""

FIRST_S = 0.5
"""Seconds after which the first shares are shown."""

ENDING_S = 15.0
"""Seconds that a process may take from taking its page away to writing how it ended."""

ASK_OTHERS_S = 4.0
"""Seconds in which it may say what those on other hosts do; it waits for them for two."""

ASK_S = 1.0
"""Seconds in which a process may say how its checkpoints fare."""

LOUD = ("saving", "stalled")
"""Names of lines that nobody should miss."""

STATES = {
    "T": "stopped by a signal: `kill -CONT {pid}` lets it go on",
    "t": "stopped by a debugger",
}


def status(
    run_dir: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON on stdout.")] = False,
) -> None:
    """Say where a run stands, live or over: progress, speed, queue, verdict, checkpoint, stages."""
    state = state_of(run_state.open_run(run_dir))
    if as_json:
        typer.echo(json.dumps(state, indent=1))
        return
    typer.echo(printable(state["run"]))
    for name, text in _described(state):
        line = f"  {name:<11} {text}".rstrip()
        typer.echo(typer.style(line, fg="red", bold=True) if name in LOUD else line)


def top(
    run_dir: RunArgument,
    every: Annotated[float, typer.Option(metavar="S", min=0.1, max=3600.0, help="Seconds between looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and exit; so does a stdout that is no terminal.")
    ] = False,
) -> None:
    """Watch every thread of a live run: stages, queue, waits, verdict. q or Ctrl-C ends it."""
    run = run_state.open_run(run_dir)
    watcher = Watcher(run, run_state.need_live_pages(run), _config_of(run))
    console = Console(highlight=False)
    is_screen = sys.stdout.isatty() and not console.is_dumb_terminal and not once
    try:
        with Interrupts(), _hangup_as_interrupt():
            if is_screen:
                _watch(watcher, console, every)
            else:
                _print_once(watcher, console, every)
    except KeyboardInterrupt:
        pass
    finally:
        watcher.close()
    if watcher.has_ended:
        typer.echo(_ending(run, watcher.pid))


def state_of(run: RunFolder) -> dict[str, Any]:
    """What is known of a run, for JSON; what is not known is None."""
    config, record, report = _config_of(run), run_state.run_record(run), run_state.report_record(run)
    lines, outcome, host = run_state.recent_metrics(run), run_state.last_outcome(run), run_state.other_host(run)
    note = None
    try:
        pages = run_state.live_pages(run)
    except PageError as error:
        pages, note = [], str(error)
    holder = run_state.holder(run)
    page = pages[-1].snapshot if pages else None
    pid = page.pid if page else holder
    gauges = page.gauges if page else {}
    recent = lines[-run_state.RECENT_STEPS :]
    waits = run_state.waits_of(recent, config.topology.targets) if config else None
    verdict = run_state.verdict_of(lines, config) if config else None
    is_stopped = page is not None and run_state.process_state(page.pid) in STATES
    if page is None and pid is not None:
        phase = "loading or ending"
    elif page is not None:
        phase = "stopped" if is_stopped else "running"
    elif outcome is None:
        phase = "not started"
    elif outcome.is_ending:
        phase = "ended"
    else:
        phase = "unknown" if host is not None else "died"
    return {
        "run": str(run.path),
        "state": phase,
        "note": note,
        "pid": pid,
        "host": record.get("host"),
        "is_other_host": host is not None,
        "started": record.get("started"),
        "ending": None if pid is not None or outcome is None else {**vars(outcome), "text": outcome.text()},
        "step": gauges.get("step") or (lines[-1]["step"] if lines else report.get("step", 0)),
        "total_steps": gauges.get("total_steps") or report.get("total_steps") or _planned_steps(run),
        "left_s": _left_s(page),
        "tok_per_s": run_state.speed_of(recent),
        "recent_steps": len(recent),
        "queue": {"waiting": gauges["queue"], "depth": gauges["queue_depth"]} if page else None,
        "in_turn": config.topology.layout == "colocated" if config else None,
        "put_wait_frac": waits[0] if waits else None,
        "get_wait_frac": waits[1] if waits else None,
        "verdict": None if verdict is None else {**verdict.record(), "line": verdict.line()},
        "ledger": run_state.ledger_of(gauges) if page else report.get("ledger"),
        "bad_batches": run_state.num_bad_batches(run),
        "checkpoint": run_state.last_checkpoint(run),
        "saving": saving_of(run, ASK_S if page is not None and not is_stopped else 0.0),
        "stalled": run_state.stall_of(run) if pid is not None else None,
        "evaluation": run_state.last_evaluation(run),
        "best_acceptance_length": None if page else report.get("best_acceptance_length"),
        "profiling": {"on": page.control.is_on, "interval_s": page.control.interval_s} if page else None,
        "threads": [thread_record(thread, each.snapshot) for each in pages for thread in live_threads(each.snapshot)],
        "elsewhere": elsewhere_of(run, config, pages) if page is not None and not is_stopped else [],
    }


def elsewhere_of(run: RunFolder, config: RunConfig | None, pages: Sequence[LivePage]) -> list[dict[str, Any]]:
    """Processes of a run on Ray that have no page here, as those on other hosts: ``role``, ``host``, ``pid``,
    ``device``, whether it ``answers``, and its ``threads``. The driver is asked; empty where it does not answer."""
    if config is None or config.topology.executor != "ray":
        return []
    here = {each.snapshot.pid for each in pages}
    with contextlib.suppress(ControlError):
        answer = ask(run.path / PROFILE_FOLDER / CONTROL_SOCKET, "elsewhere", timeout_s=ASK_OTHERS_S)
        found = answer.get("processes")
        if isinstance(found, list):
            return [each for each in found if each["host"] != platform.node() or each["pid"] not in here]
    return []


def saving_of(run: RunFolder, timeout_s: float) -> dict[str, Any]:
    """How checkpoints fare: why the newest is not on the disk (None: nothing is amiss), and whether one is being
    written, as far as is known.

    Args:
        timeout_s: In which the process may answer, 0: it is not asked; what it does not say, events say.
    """
    if timeout_s > 0:
        with contextlib.suppress(ControlError):
            answer = ask(run.path / PROFILE_FOLDER / CONTROL_SOCKET, "status", timeout_s=timeout_s)
            if isinstance(answer.get("saving"), dict):
                return {"problem": None, "saved_step": None, "writing": None} | answer["saving"]
    return {"problem": run_state.save_problem(run), "saved_step": None, "writing": None}


def _checkpoint_text(checkpoint: dict[str, Any] | None) -> str:
    if checkpoint is None:
        return "none is complete"
    return f"step {checkpoint['step']:,}, {duration(max(0.0, time.time() - checkpoint['time']))} ago"


def _problem_text(problem: object, checkpoint: dict[str, Any] | None) -> str:
    """What is said loudly of a checkpoint that cannot be written."""
    rest = f"the last complete one: {_checkpoint_text(checkpoint)}" if checkpoint else "no checkpoint is complete"
    return run_state.one_line(f"FAILS: {problem}; {rest}")


def _stall_text(stall: dict[str, Any]) -> str:
    return run_state.one_line(f"said {duration(max(0.0, time.time() - stall['time']))} ago: {stall['reason']}")


def _described(state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    now, pid = time.time(), state["pid"]
    where = f"process {pid}" + (f" on {printable(str(state['host']))}" if state["host"] else "")
    since = f", for {duration(now - state['started'])}" if state["started"] and pid else ""
    if state["state"] in ("running", "stopped"):
        stopped = "; " + STATES["T"].format(pid=pid) if state["state"] == "stopped" else ""
        yield state["state"], where + since + stopped
    elif pid is not None:
        yield "running", f"process {pid}, without a profile page: it is loading its models, or about to end"
    elif state["state"] == "unknown":
        yield "running?", f"its process was started on {printable(str(state['host']))}: look there"
    elif state["ending"]:
        yield state["state"], run_state.one_line(f"the last process {state['ending']['text']}")
    else:
        yield "not started", ""
    if state["note"]:
        yield "note", run_state.one_line(state["note"])
    if state["stalled"]:
        yield "stalled", _stall_text(state["stalled"])
    if state["saving"]["problem"]:
        yield "saving", _problem_text(state["saving"]["problem"], state["checkpoint"])
    if state["total_steps"]:
        left = f", about {duration(state['left_s'])} left" if state["left_s"] is not None else ""
        share = 100 * state["step"] / state["total_steps"]
        yield "step", f"{state['step']:,} of {state['total_steps']:,} ({share:.1f} %){left}"
    elif state["step"]:
        yield "step", f"{state['step']:,}"
    if state["tok_per_s"] is not None:
        yield "speed", f"{state['tok_per_s']:,.0f} tokens/s over the last {state['recent_steps']} steps"
    put, get = state["put_wait_frac"], state["get_wait_frac"]
    waiting = state["queue"]
    if state["in_turn"] and get is not None:
        yield "in turn", f"{100 * get:.1f} % of the time it is the target's turn"
    elif get is not None:
        queue = f"{waiting['waiting']} of {waiting['depth']} batches; " if waiting else ""
        yield "queue", f"{queue}waits: put {100 * put:.1f} %, get {100 * get:.1f} % of the time"
    if state["verdict"]:
        yield "verdict", run_state.one_line(state["verdict"]["line"])
    if state["ledger"]:
        yield "batches", run_state.ledger_text(state["ledger"])
    if state["bad_batches"]:
        yield "bad batches", f"{state['bad_batches']:,} left out; bad_batches.jsonl lists them"
    if state["checkpoint"]:
        yield "checkpoint", _checkpoint_text(state["checkpoint"])
    if state["evaluation"]:
        yield "evaluated", "step {step:,} accepts {acceptance_length:.2f} when decoding".format(**state["evaluation"])
    if state["best_acceptance_length"] is not None:
        yield "best", f"acceptance length {state['best_acceptance_length']:.2f} on held-out rows"
    if state["profiling"]:
        yield "profiling", _profiling_text(state["profiling"]["on"], state["profiling"]["interval_s"])
    for number, thread in enumerate(state["threads"]):
        at = "between stages" if thread["stage"] is None else f"in {thread['stage']} for {duration(thread['for_s'])}"
        yield "" if number else "threads", f"{run_state.one_line(thread['role'])}  {run_state.one_line(at)}"
    for number, process in enumerate(state["elsewhere"]):
        yield "" if number else "elsewhere", run_state.one_line(_elsewhere_text(process))


def _elsewhere_text(process: dict[str, Any]) -> str:
    doing = [
        f"{each['role']} "
        + ("between stages" if each["stage"] is None else f"in {each['stage']} for {duration(each['for_s'])}")
        for each in process["threads"]
    ]
    what = "; ".join(doing) if doing else "no threads" if process["answers"] else f"{process['role']} does not answer"
    return f"{what}; process {process['pid']} on {process['host']}, {process['device']}"


def _profiling_text(is_on: bool, interval_s: float) -> str:
    if not is_on:
        return "off"
    return f"on, a table every {interval_s:g} s" if interval_s else "on, counted without tables"


class Watcher:
    """Looks at a run's pages, one look after another; counts stages meanwhile, and leaves that as it was.

    Args:
        pages: Of the processes to watch; those that are started later are not.
        config: None where it cannot be read; there is no verdict then.
    Attributes:
        has_ended: Whether none of the processes is left.
        pid: The process that holds the queue.
    """

    def __init__(self, run: RunFolder, pages: Sequence[LivePage], config: RunConfig | None) -> None:
        self._run, self._config = run, config
        self._pages = [_WatchedPage(page) for page in pages]
        self._elsewhere = _Elsewhere(lambda: elsewhere_of(run, config, pages))
        self._rate = _Rate()
        self._verdict, self._checkpoint, self._alarms = "", "", list[str]()
        self._looked_at = 0.0
        self.has_ended = False
        self.pid = pages[-1].snapshot.pid

    def look(self) -> Frame | None:
        """What is there now, and since the look before; None when the processes have ended."""
        looks = [look for page in self._pages if (look := page.look()) is not None]
        if not looks:
            self.has_ended = True
            return None
        main = looks[-1]
        now, gauges = main.now, main.now.gauges
        self._rate.add(now.taken_ns, gauges["tokens"])
        letter = run_state.process_state(now.pid)
        state = STATES.get(letter, "").format(pid=now.pid)
        still_s = min(look.still_s for look in looks)
        threads = [_rows(thread, look) for look in looks for thread in live_threads(look.now)]
        if self._config is not None and self._config.topology.executor == "ray" and not state:
            threads += self._elsewhere.rows()
        interval = main.interval
        self._look_at_files(asks=not state)
        ledger = run_state.ledger_of(gauges)
        return Frame(
            run=str(self._run.path),
            process=f"process {', '.join(str(look.now.pid) for look in looks)} on {platform.node()}",
            state=state,
            running_s=(now.taken_ns - gauges["started_ns"]) / 1e9 if gauges["started_ns"] else 0.0,
            still_s=still_s,
            step=gauges["step"],
            total_steps=gauges["total_steps"],
            left_s=None if state else _left_s(now),
            tok_per_s=self._tok_per_s(now, bool(state)),
            queue=gauges["queue"],
            queue_depth=gauges["queue_depth"],
            put_wait_frac=_waits(looks, PUT_WAIT.name, "target"),
            get_wait_frac=_waits(looks, GET_WAIT.name, "drafter"),
            in_turn=gauges["queue_depth"] == 0,
            seconds=interval.seconds if interval else 0.0,
            verdict=self._verdict,
            ledger="" if ledger is None else run_state.ledger_text(ledger),
            checkpoint=self._checkpoint,
            alarms=self._alarms,
            counting=self._counting(now.control),
            threads=threads,
        )

    def close(self) -> None:
        """Leave counting as it was found, unless somebody changed it since."""
        self._elsewhere.close()
        for page in self._pages:
            page.close()

    def _tok_per_s(self, now: Snapshot, is_stopped: bool) -> float | None:
        rate = self._rate.per_s(now.taken_ns)
        if rate is None and not is_stopped:  # too short a look
            return run_state.speed_of(run_state.recent_metrics(self._run)[-run_state.RECENT_STEPS :])
        return rate

    def _look_at_files(self, asks: bool) -> None:
        """What changes slowly is not looked at for every frame."""
        if time.monotonic() < self._looked_at + VERDICT_EVERY_S and self._looked_at:
            return
        self._looked_at = time.monotonic()
        if self._config is not None:
            verdict = run_state.verdict_of(run_state.recent_metrics(self._run), self._config)
            self._verdict = "" if verdict is None else verdict.line()
        checkpoint, stall = run_state.last_checkpoint(self._run), run_state.stall_of(self._run)
        self._checkpoint = _checkpoint_text(checkpoint) if checkpoint else ""
        problem = saving_of(self._run, ASK_S / 4 if asks else 0.0)["problem"]
        self._alarms = [f"stalled: {_stall_text(stall)}"] if stall else []
        self._alarms += [f"saving {_problem_text(problem, checkpoint)}"] if problem else []

    def _counting(self, control: Control) -> str:
        if not control.is_on:
            return "not counting"
        return f"a table every {control.interval_s:g} s" if control.interval_s else "counting for this view"


class _Elsewhere:
    """What threads on other hosts do; asked for in a thread of its own, as an answer may take seconds."""

    def __init__(self, ask: Callable[[], list[dict[str, Any]]]) -> None:
        self._ask = ask
        self._pool = ThreadPoolExecutor(1)
        self._asked: Future[list[dict[str, Any]]] | None = None
        self._found: list[dict[str, Any]] = []

    def rows(self) -> list[ThreadRows]:
        """As of the last answer; asks anew."""
        if self._asked is not None and self._asked.done():
            self._found, self._asked = self._asked.result(), None
        if self._asked is None:
            self._asked = self._pool.submit(self._ask)
        return [
            ThreadRows(
                role=printable(f"{each['role']} on {process['host']}"),
                thread=printable(each["thread"]),
                stage=each["stage"],
                for_s=each["for_s"] or 0.0,
                is_waiting=each["stage"] in WAITS,
            )
            for process in self._found
            for each in process["threads"]
        ]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class _WatchedPage:
    """A page, what was seen of it last, and what was done to it."""

    def __init__(self, page: LivePage) -> None:
        self._path = page.path
        self._last: Snapshot | None = None
        self._interval: Interval | None = None
        self._counting = _Counting(page.path)
        self._since = _Since()
        self._seen: dict[tuple[str, str], set[str]] = {}

    def look(self) -> _Look | None:
        """None when the process has ended."""
        try:
            now = read_page(self._path)
            if now.is_running and self._counting.switch_on(now.control):
                now = read_page(self._path)
        except PageError:
            return None
        if not now.is_running:
            return None
        before, self._last = self._last, now
        if before is not None and before.control == now.control and now.control.is_on:
            self._interval = Interval.between(before, now)
        self._since.see(now)
        for thread in self._interval.threads if self._interval else []:
            shown = self._seen.setdefault((thread.role, thread.thread), set())
            shown |= {name for name, stats in thread.stages.items() if stats.count or stats.recompute_count}
        return _Look(now, self._interval, self._since, self._seen)

    def close(self) -> None:
        self._counting.restore()


class _Look:
    """A page as it is now.

    Attributes:
        interval: Since the look before; None at the first.
    """

    def __init__(
        self, now: Snapshot, interval: Interval | None, since: _Since, seen: dict[tuple[str, str], set[str]]
    ) -> None:
        self.now, self.interval, self._since, self._seen = now, interval, since, seen

    @property
    def still_s(self) -> float:
        return self._since.still_s(self.now.taken_ns)

    def for_s(self, thread: ThreadSnapshot) -> float:
        return (self.now.taken_ns - self._since.of(thread)) / 1e9

    def part(self, thread: ThreadSnapshot) -> ThreadInterval | None:
        wanted = thread.role, thread.thread, thread.tid
        found = self.interval.threads if self.interval else []
        return next((each for each in found if (each.role, each.thread, each.tid) == wanted), None)

    def shown(self, thread: ThreadSnapshot) -> set[str]:
        """Stages that have been seen to run: their rows stay, so that the picture does not jump."""
        return self._seen.get((thread.role, thread.thread), set())


class _Counting:
    """Has stages counted, without tables, where nobody does; and takes it back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ours: Control | None = None

    def switch_on(self, control: Control) -> bool:
        """Whether that was needed; another viewer that has left may have switched off."""
        if control.is_on:
            return False
        ours = control.changed(True, 0.0)
        self._ours = ours  # before it is done: an interrupt in between must not leave it on
        try:
            write_word(self._path, CONTROL, ours.word)
        except PageError:
            self._ours = None
            return False
        return True

    def restore(self) -> None:
        if self._ours is not None:
            with contextlib.suppress(PageError):
                now = read_page(self._path).control
                if now == self._ours:
                    write_word(self._path, CONTROL, now.changed(False, 0.0).word)
            self._ours = None


class _Since:
    """Since when each thread is where it is: as the page says of stages, and as was seen of the time between two."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[Any, int]] = {}

    def see(self, now: Snapshot) -> None:
        places = {}
        for thread in now.threads:
            if thread.is_live:
                key, place = thread.block, thread.inner or (thread.num_batches, thread.top_ns)
                since = thread.inner.since_ns if thread.inner else now.taken_ns
                earlier = self._places.get(key)
                places[key] = earlier if earlier is not None and earlier[0] == place else (place, since)
        self._places = places

    def of(self, thread: ThreadSnapshot) -> int:
        return self._places[thread.block][1]

    def still_s(self, now_ns: int) -> float:
        """Seconds since the last change of any of them, as far as is known."""
        latest = max((since for _, since in self._places.values()), default=now_ns)
        return max(0.0, (now_ns - latest) / 1e9)


class _Rate:
    """Tokens a second over the last seconds, from when their count was seen to change."""

    def __init__(self) -> None:
        self._changes: deque[tuple[int, int]] = deque()
        self._first_is_whole = False

    def add(self, now_ns: int, tokens: int) -> None:
        if not self._changes or tokens != self._changes[-1][1]:
            self._changes.append((now_ns, tokens))
            if len(self._changes) > 2 and not self._first_is_whole:
                self._changes.popleft()  # the look at which watching began lay within a step
                self._first_is_whole = True
        while len(self._changes) > 4 and self._changes[1][0] < now_ns - RATE_S * 1e9:
            self._changes.popleft()

    def per_s(self, now_ns: int) -> float | None:
        """None until it is known; 0 when far more time has passed than a step takes."""
        if len(self._changes) < 2 or not self._first_is_whole:
            return None
        (begin, first), (end, last) = self._changes[0], self._changes[-1]
        usual_ns = (end - begin) / (len(self._changes) - 1)
        return 0.0 if now_ns - end > max(5e9, 3 * usual_ns) else 1e9 * (last - first) / (end - begin)


def _rows(thread: ThreadSnapshot, look: _Look) -> ThreadRows:
    part, stage = look.part(thread), thread.inner.stage if thread.inner else None
    opened = {running.stage for running in (thread.inner, thread.outer) if running}
    rows, other = [], None
    if part is not None:
        for name, stats in part.stages.items():
            if name in opened or name in look.shown(thread):
                rows.append(
                    StageRow(
                        name,
                        share=part.seconds_in(name) / part.wall_s,
                        avg_ms=stats.avg_ns / 1e6 if stats.count else None,
                        is_open=name in opened,
                        is_inside=part.is_inside(name),
                        is_wait=name in WAITS,
                    )
                )
        if rows and stages_of(thread.role):
            other = part.other_s / part.wall_s
    return ThreadRows(
        role=thread.role,
        thread=thread.thread,
        stage=stage,
        for_s=look.for_s(thread),
        batch=thread.batch if thread.num_batches else None,
        is_waiting=stage in WAITS,
        stages=rows,
        other_share=other,
    )


def _waits(looks: Sequence[_Look], stage: str, role: str) -> float | None:
    """Share of the last interval that threads of a role were in a wait, on average over those that know it."""
    shares = []
    for look in looks:
        for part in look.interval.threads if look.interval else []:
            if part.role.startswith(role) and (
                part.stages[stage].count or part.open_stage == stage or part.num_batches
            ):
                shares.append(part.seconds_in(stage) / part.wall_s)
    if not shares:
        return 0.0 if any(look.interval for look in looks) else None
    return sum(shares) / len(shares)


def _left_s(page: Snapshot | None) -> float | None:
    """Seconds to the last step at the pace so far; None where that is not known."""
    if page is None or not page.gauges["started_ns"]:
        return None
    gauges = page.gauges
    done, left = gauges["step"] - gauges["first_step"], gauges["total_steps"] - gauges["step"]
    return left * (page.taken_ns - gauges["started_ns"]) / 1e9 / done if done > 0 and left >= 0 else None


def _planned_steps(run: RunFolder) -> int | None:
    checkpoint = run_state.last_checkpoint(run)
    if checkpoint is None:
        return None
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        content = json.loads((Path(checkpoint["path"]) / "state.json").read_text(encoding="utf-8"))
        return int(content["total_steps"])
    return None


def _config_of(run: RunFolder) -> RunConfig | None:
    try:
        return run.read_config()
    except CheckpointError:  # not written yet, or by another version: the rest can be told
        return None


def _print_once(watcher: Watcher, console: Console, every: float) -> None:
    frame = watcher.look()
    if frame is not None:
        time.sleep(every)
        frame = watcher.look() or frame
        for line in lines_of(frame, console.width, ascii_only=console.options.ascii_only):
            console.print(line, crop=False)


def _watch(watcher: Watcher, console: Console, every: float) -> None:
    first = min(FIRST_S, every)
    with _Keys() as keys, Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
        while (frame := watcher.look()) is not None:
            lines = lines_of(frame, console.width, console.height, console.options.ascii_only)
            live.update(Group(*lines), refresh=True)
            if keys.quits_within(first):
                return
            first = every


class _Keys:
    """Single keys from a terminal, without waiting for the end of a line; none where stdin is something else."""

    def __init__(self) -> None:
        self._saved: list[Any] | None = None

    def __enter__(self) -> _Keys:
        with contextlib.suppress(termios.error, OSError, ValueError):
            if sys.stdin.isatty():
                self._saved = termios.tcgetattr(sys.stdin.fileno())
                tty.setcbreak(sys.stdin.fileno())
        return self

    def __exit__(self, *exc: object) -> None:
        if self._saved is not None:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._saved)

    def quits_within(self, seconds: float) -> bool:
        """Wait so long; whether q was pressed meanwhile, or the terminal went away."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._saved is None:
                time.sleep(left)
            elif select.select([sys.stdin], [], [], left)[0]:
                try:
                    keys = os.read(sys.stdin.fileno(), 64)
                except OSError:
                    keys = b""
                if not keys or b"q" in keys.lower():
                    return True
        return False


@contextlib.contextmanager
def _hangup_as_interrupt() -> Iterator[None]:
    """While entered, a terminal that closes ends the command like Ctrl-C, so that it can tidy up."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.getsignal(signal.SIGHUP)
    if previous is not signal.SIG_DFL:  # started with nohup, or within something that has its own idea
        yield
        return
    signal.signal(signal.SIGHUP, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous)


def _ending(run: RunFolder, pid: int) -> str:
    """How the watched process ended; it writes that after it has taken its page away."""
    deadline = time.monotonic() + ENDING_S
    while True:
        is_gone = run_state.process_state(pid) in ("", "Z", "X")
        outcome = run_state.last_outcome(run)
        if is_gone or (outcome is not None and outcome.is_ending) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if outcome is None or (not outcome.is_ending and not is_gone):
        return f"process {pid} trains no more"
    return f"process {pid} has ended: the run {outcome.text()}"
