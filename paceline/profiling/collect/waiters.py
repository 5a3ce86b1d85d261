"""Level 4b: who waits for the GIL, and threads that Python does not know, by pystack.

A look stops the target for 0.1 to 0.7 s while symbols are read (measured), so there are one to three. pystack says in
words who has the GIL and who waits for it; the latter it sees by a frame of ``take_gil``, so only in native stacks and
where the interpreter has its symbols. Without stopping the target it therefore says who has the GIL, and never who
waits.
"""

from __future__ import annotations

import random
import re
import threading
import time
from dataclasses import dataclass

from paceline.profiling.collect.stacks import DUMP_S, StackLook, Stacks, no_level
from paceline.profiling.collect.tools import (
    STOPPED,
    StopMeter,
    ToolRun,
    complaint,
    is_gone,
    left_stopped,
    make_frame,
    run_tool,
    stopped_note,
    thread_stat,
)
from paceline.profiling.evidence import LEVEL_NAMES, AttachError, Disturbance, Frame, Level

COSTS = "who waits for the GIL, and threads that Python does not know"
GAP_S = 0.5
"""Between two shots, on average, so that they are two moments and not one."""

_THREAD = re.compile(
    r"^Traceback for thread (?P<tid>\d+)(?: \((?P<name>[\s\S]{1,64}?)\))?(?: \[(?P<marks>[^\]\n]*)\])? "
    r"\(most recent call last\):$",
    re.MULTILINE,
)
_INTERPRETER = re.compile(r"^  (?:In the main interpreter|In interpreter \d+|Not currently .*) \[(?P<marks>[^\]]*)\]$")
_FRAME = re.compile(r'^    \((?P<kind>C|Python)\) File "(?P<file>.*)", line (?P<line>\d+), in (?P<rest>.*)$')
_NOT_MERGED = "* - Unable to merge native stack"


@dataclass(frozen=True)
class Waiter:
    """A thread in pystack's text.

    Attributes:
        name: The operating system's.
        marks: As pystack says them: ``Has the GIL``, ``Waiting for the GIL``, ``Dropping the GIL``, ``Garbage
            collecting``, ``Thread terminated``.
        is_merged: False: its native frames could not be put between the Python ones, and are not there.
    """

    tid: int
    name: str
    marks: tuple[str, ...]
    frames: tuple[Frame, ...]
    is_merged: bool = True

    @property
    def has_gil(self) -> bool:
        return "Has the GIL" in self.marks

    @property
    def waits_for_gil(self) -> bool:
        return "Waiting for the GIL" in self.marks


def parse_pystack(text: str) -> list[Waiter]:
    """The threads in the text of ``pystack remote``, their frames outermost first. Lines of source code are passed
    over."""
    threads: list[Waiter] = []
    headers = list(_THREAD.finditer(text))
    ends = [header.start() for header in headers[1:]] + [len(text)]
    for header, end in zip(headers, ends, strict=False):
        body = text[header.end() : end]
        marks, frames, is_merged = _marks(header["marks"]), [], True
        for line in body.splitlines():
            interpreter = _INTERPRETER.match(line)
            if interpreter:  # several interpreters: each says its own marks
                marks += _marks(interpreter["marks"])
            elif line.startswith(_NOT_MERGED):
                is_merged = False
            else:
                found = _FRAME.match(line)
                if found:
                    frames.append(_frame(found))
        threads.append(Waiter(int(header["tid"]), header["name"] or "", marks, tuple(frames), is_merged))
    return threads


def _marks(text: str | None) -> tuple[str, ...]:
    return tuple(mark.strip() for mark in (text or "").split(",") if mark.strip())


def _frame(found: re.Match[str]) -> Frame:
    """A native frame has its library for a file, as level 4 has it, and no line."""
    if found["kind"] == "Python":
        made = make_frame(found["rest"], found["file"], int(found["line"]))
        return made.model_copy(update={"is_native": False})
    name, _, library = found["rest"].removesuffix(")").rpartition(" (")
    name = re.sub(r"@@?[A-Z][\w.]*$", "", name.removesuffix(" (inlined)"))
    return make_frame(name, library, 0).model_copy(update={"is_native": True})


def look_with_pystack(
    pid: int,
    *,
    tool: str,
    shots: int = 2,
    budget: float = 1.5,
    cancel: threading.Event | None = None,
    marks_only: bool = False,
    seed: int | None = None,
) -> StackLook:
    """Stacks of all threads, with who has the GIL and who waits for it, at a few random moments.

    Args:
        tool: Path of pystack.
        budget: Seconds of stop over all shots. The next one is left out where the longest so far would not fit.
        marks_only: Stop nothing: Python frames, and who has the GIL.
    """
    if not marks_only and thread_stat(pid, pid)[0] in tuple(STOPPED):
        note = "it stands stopped, by a signal or a debugger"
        return no_level("4b", note, f"kill -CONT {pid}, or end the debugger", COSTS)
    taker = _Taker(pid, tool, marks_only, cancel)
    source = random.Random(seed)
    for shot in range(shots):
        if shot and not _pause(source.expovariate(1.0 / GAP_S), cancel):
            break
        if not marks_only and shot and taker.stopped_s + taker.longest_s > budget:
            taker.note(f"{shot} of {shots} shots, as another would stop it for more than {budget:g} s in all")
            break
        try:
            if not taker.take():
                break
        except AttachError as error:
            return no_level("4b", str(error), costs=COSTS)
    return taker.look(budget)


def _pause(seconds: float, cancel: threading.Event | None) -> bool:
    """False: cancelled meanwhile."""
    if cancel is None:
        time.sleep(min(seconds, 3 * GAP_S))
        return True
    return not cancel.wait(min(seconds, 3 * GAP_S))


class _Taker:
    """Takes shots and adds them up."""

    def __init__(self, pid: int, tool: str, marks_only: bool, cancel: threading.Event | None) -> None:
        self._pid, self._tool, self._marks_only, self._cancel = pid, tool, marks_only, cancel
        self._stacks = Stacks("4b", pid)
        self._names: dict[int, str] = {}
        self._reasons: list[str] = []
        self._fix = ""
        self._errors = 0
        self._cpu_s = 0.0
        self._start = time.monotonic()
        self.stopped_s = 0.0
        self.longest_s = 0.0

    def note(self, reason: str) -> None:
        self._reasons.append(reason)

    def take(self) -> bool:
        """One shot; False: no use in another."""
        if self._marks_only:
            run = run_tool([self._tool, "remote", "--no-color", "--no-block", str(self._pid)], DUMP_S, self._cancel)
        else:
            with StopMeter(self._pid) as meter:
                argv = [self._tool, "remote", "--no-color", "--native-all", str(self._pid)]
                run = run_tool(argv, DUMP_S, self._cancel)
            self.stopped_s += meter.stops.total_s
            self.longest_s = max(self.longest_s, meter.stops.longest_s)
        self._cpu_s += run.cpu_s
        if run.returncode != 0 or run.ended:
            self._failed(run)
            return False
        for thread in parse_pystack(run.stdout):
            self._add(thread)
        return True

    def _failed(self, run: ToolRun) -> None:
        reason, self._fix = complaint(run, self._pid)
        if run.ended == "cancelled" and self._stacks.total():
            reason = "cancelled"
        self._reasons.append(reason)
        stopped = [] if self._marks_only or is_gone(self._pid) else left_stopped(self._pid)
        if stopped:
            note, self._fix = stopped_note(self._pid, stopped)
            self._reasons.insert(0, note)
        if not is_gone(self._pid) and not run.ended:
            self._errors += 1

    def _add(self, thread: Waiter) -> None:
        if not thread.frames and not thread.marks:
            return
        if not thread.is_merged:
            self._errors += 1
        if thread.name:
            self._names[thread.tid] = thread.name
        self._stacks.add(thread.tid, thread.frames, has_gil=thread.has_gil, waits_for_gil=thread.waits_for_gil)

    def look(self, budget: float) -> StackLook:
        seconds, samples = time.monotonic() - self._start, self._stacks.total()
        is_over = self.stopped_s > budget
        if is_over:
            self.note(f"it was stopped for {self.stopped_s:.2f} s in all, over the budget of {budget:g} s")
        if self._errors > 0.05 * max(1, samples) and samples:
            self.note(f"{self._errors} stacks could not be read in full")
        if not samples and not self._reasons:
            self.note(
                "cancelled before anything was seen" if self._cancel and self._cancel.is_set() else "no thread seen"
            )
        cost = Disturbance(tool_cpu_s=self._cpu_s)
        if not self._marks_only:
            cost = Disturbance(
                stop_frac=min(1.0, self.stopped_s / max(seconds, 1e-9)),
                longest_stop_s=self.longest_s,
                tool_cpu_s=self._cpu_s,
            )
        level = Level(
            id="4b",
            name=LEVEL_NAMES["4b"],
            ok=samples > 0,
            reason="; ".join(self._reasons),
            fix=self._fix,
            costs="" if samples else COSTS,
            in_verdict=samples > 0 and not is_over,
            seconds=seconds,
            samples=samples,
            errors=self._errors,
            disturbance=cost,
        )
        return StackLook(level, self._stacks.all(), self._names)
