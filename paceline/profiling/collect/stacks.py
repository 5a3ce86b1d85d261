"""Levels 3 and 4: what threads are at. Python frames without stopping anything; native frames within a budget of stops.

A native stack is only to be read while all threads stand still, and the first one costs the reading of all symbols
meanwhile: up to 0.9 s where torch is on the stack. So level 4 measures what one stop takes, says what it will cost, and
does not begin where that is too much.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.profiling.collect.tools import (
    GRACE_S,
    OUT,
    STOPPED,
    StopMeter,
    Stops,
    ToolRun,
    complaint,
    is_gone,
    left_stopped,
    make_frame,
    os_thread_ids,
    parse_folded,
    run_tool,
    stopped_note,
    thread_ids,
)
from paceline.profiling.evidence import LEVEL_NAMES, AttachError, Disturbance, Frame, Level, LevelId, Stack

DUMP_S = 20.0
"""After which a single dump is given up."""
FIRST_STOP_S, FIRST_STOP_TORCH_S = 0.12, 0.8
"""Stop for the reading of symbols: PERF_FINDINGS.md section 6, the upper ends of what was measured."""
STOP_PER_GB = 0.3
"""Seconds more of it for each gigabyte of libraries, where none of them is torch's: estimated."""
MIN_STOP_S = 0.001
"""Below which a single stop is not to be measured: the meter looks once a millisecond."""
UNWINDING, UNWINDING_TORCH = 1.5, 7.0
"""A native stack takes so many times the stop of a Python one: its many frames are unwound one by one. Measured on an
H200 (2026-11-30): 16 to 23 ms for stacks through libtorch_cuda where a plain dump took 3.2 ms."""
MAX_RATE = 20
MOMENTS = 60
"""Moments that are worth a longer window: a share of a half is then known to 13 %."""
LEAST_MOMENTS = 20
"""Below, a window is not worth its stops: a share of a half is known to 21 % then."""
MAX_ERRORS = 0.05
"""Share of moments without a stack above which the rest may be lopsided."""

COSTS = {"3": "what Python threads are at", "4": "what threads are at inside of native code"}

_SAID = re.compile(r"Samples: (\d+) Errors: (\d+)")
Moment = Callable[[int, int], tuple[str, str]]
_Key = tuple[int, tuple[Frame, ...], str, str, bool | None, bool]


@dataclass(frozen=True)
class StackLook:
    """What a level gave.

    Attributes:
        stacks: Identical ones are counted.
        names: Of threads, as the tool said; a thread without one is left out.
    """

    level: Level
    stacks: list[Stack] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)


class Stacks:
    """Counts stacks, the same ones together."""

    def __init__(self, level: LevelId, pid: int) -> None:
        self._level: LevelId = level
        self._pid = pid
        self._counts: Counter[_Key] = Counter()

    def add(
        self,
        tid: int,
        frames: tuple[Frame, ...],
        *,
        count: int = 1,
        state: str = "",
        syscall: str = "",
        has_gil: bool | None = None,
        waits_for_gil: bool = False,
    ) -> None:
        self._counts[(tid, frames, state, syscall, has_gil, waits_for_gil)] += count

    def all(self) -> list[Stack]:
        """The most frequent first."""
        return [
            Stack(
                level=self._level,
                pid=self._pid,
                tid=tid,
                frames=frames,
                count=count,
                state=state,
                syscall=syscall,
                has_gil=has_gil,
                waits_for_gil=waits,
            )
            for (tid, frames, state, syscall, has_gil, waits), count in self._counts.most_common()
        ]

    def total(self) -> int:
        return self._counts.total()


def no_level(id: LevelId, reason: str, fix: str = "", costs: str = "", **others: Any) -> StackLook:
    """A level that saw nothing, and why."""
    costs = costs or COSTS[id]
    return StackLook(Level(id=id, name=LEVEL_NAMES[id], ok=False, reason=reason, fix=fix, costs=costs, **others))


# Level 3.


def sample_python(
    pid: int,
    seconds: float,
    *,
    tool: str,
    moment: Moment,
    count: int = 20,
    seed: int | None = None,
    cancel: threading.Event | None = None,
) -> StackLook:
    """Python stacks of all threads at `count` random moments of the window, without a stop.

    The moments are those of a Poisson process, so that no loop of the target keeps step with them. A dump takes some
    10 to 90 ms after the moment that it was asked for, and `moment` is read just before and just after: a thread's
    state and call are kept where both readings agree, which is so for waits that last and rarely for short ones.

    Args:
        tool: Path of py-spy.
        moment: Kernel state and call of a thread now; ``("", "")`` where it is gone.
    """
    stacks = Stacks("3", pid)
    names: dict[int, str] = {}
    ids: dict[int, int] = {}
    seen, errors, cpu_s = 0, 0, 0.0
    trouble = ("", "")
    start = time.monotonic()
    for due in _moments(seconds, count, random.Random(seed)):
        if not _wait(max(0.0, start + due - time.monotonic()), cancel):
            break
        before = {tid: moment(pid, tid) for tid in thread_ids(pid)}
        try:
            run = run_tool([tool, "dump", "--nonblocking", "--json", "--pid", str(pid)], DUMP_S, cancel)
        except AttachError as error:
            return no_level("3", str(error))
        cpu_s += run.cpu_s
        threads = _threads_of(run)
        if threads is None:
            if run.ended == "cancelled":
                break
            trouble = complaint(run, pid)
            if is_gone(pid):
                break
            errors += 1
            if not seen and errors >= 3:
                break  # it will not get better: no rights, no Python
            continue
        seen += 1
        _add_dump(stacks, names, ids, pid, threads, before, moment)
    lasted = time.monotonic() - start
    level = _python_level(pid, seconds, lasted, seen, stacks.total(), errors, cpu_s, trouble, cancel)
    return StackLook(level, stacks.all(), names)


def _moments(seconds: float, count: int, source: random.Random) -> list[float]:
    """When, after the begin: the times of a Poisson process that came `count` times."""
    gaps = [source.expovariate(1.0) for _ in range(count + 1)]
    whole = math.fsum(gaps)
    return [seconds * math.fsum(gaps[: i + 1]) / whole for i in range(count)]


def _wait(seconds: float, cancel: threading.Event | None) -> bool:
    """False: cancelled meanwhile."""
    if cancel is None:
        time.sleep(seconds)
        return True
    return not cancel.wait(seconds)


def _threads_of(run: ToolRun) -> list[dict[str, Any]] | None:
    """Threads of ``py-spy dump --json``; None: it failed."""
    if run.returncode != 0 or run.ended:
        return None
    try:
        threads = json.loads(run.stdout)
    except ValueError:
        return None
    if not isinstance(threads, list):
        return None
    return [thread for thread in threads if isinstance(thread, dict)]


def _add_dump(
    stacks: Stacks,
    names: dict[int, str],
    ids: dict[int, int],
    pid: int,
    threads: list[dict[str, Any]],
    before: Mapping[int, tuple[str, str]],
    moment: Moment,
) -> None:
    """`ids` are the kernel's numbers by pthread address: py-spy has none before Python 3.11."""
    unknown = [int(thread["thread_id"]) for thread in threads if thread.get("os_thread_id") is None]
    ids.update(os_thread_ids(pid, [address for address in unknown if ids.get(address) not in before]))
    for thread in threads:
        address = int(thread.get("thread_id") or 0)
        tid = int(thread.get("os_thread_id") or ids.get(address, address))
        was, now = before.get(tid, ("", "")), moment(pid, tid)
        state = was[0] if was[0] == now[0] else ""
        syscall = was[1] if state and was[1] == now[1] else ""
        if thread.get("thread_name"):
            names[tid] = str(thread["thread_name"])
        has_gil = bool(thread.get("owns_gil"))
        stacks.add(tid, python_frames(thread), state=state, syscall=syscall, has_gil=has_gil)


def python_frames(thread: Mapping[str, Any]) -> tuple[Frame, ...]:
    """Of a thread of ``dump --json``, outermost first; names, files and lines, never values.

    py-spy's `is_shim_entry` says that a real frame was entered from C (``Queue.get`` on 3.12, ``<module>`` anywhere),
    so those stay. What the interpreter puts between is called ``<shim>``.
    """
    frames = []
    for frame in reversed(thread.get("frames") or []):
        name = str(frame.get("name") or "")
        if name == "<shim>":
            continue
        file = str(frame.get("short_filename") or frame.get("filename") or "")
        made = make_frame(name, file, int(frame.get("line") or 0))
        frames.append(made.model_copy(update={"is_native": bool(frame.get("module"))}))
    return tuple(frames)


def _python_level(
    pid: int,
    wanted_s: float,
    seconds: float,
    seen: int,
    samples: int,
    errors: int,
    cpu_s: float,
    trouble: tuple[str, str],
    cancel: threading.Event | None,
) -> Level:
    reason, fix = trouble if not seen else ("", "")
    if seen and is_gone(pid):
        reason = f"the process ended after {seconds:.1f} s"
    elif cancel is not None and cancel.is_set() and seconds < wanted_s:
        reason = f"cancelled after {seconds:.1f} s"
    elif seen and errors > MAX_ERRORS * (seen + errors):
        reason = f"{errors} of {seen + errors} dumps failed: {trouble[0]}"
    return Level(
        id="3",
        name=LEVEL_NAMES["3"],
        ok=seen > 0,
        reason=reason if seen or reason else "nothing was seen",
        fix=fix,
        costs="" if seen else COSTS["3"],
        seconds=seconds,
        samples=samples,
        errors=errors,
        disturbance=Disturbance(tool_cpu_s=cpu_s),
    )


# Level 4.


@dataclass(frozen=True)
class Plan:
    """How native stacks are taken.

    Attributes:
        rate: Moments a second.
        seconds: Length of the recording.
        predicted: Share of the window in which the target will stand still.
        rest: Seconds of the window after the recording, in which the target is left alone.
    """

    rate: int
    seconds: int
    predicted: float
    rest: int = 0


def plan_native(
    seconds: float, stop_s: float, first_s: float, budget: float, max_seconds: float, max_rate: int = MAX_RATE
) -> Plan | None:
    """The shortest window, from `seconds` on, that has `MOMENTS` moments within the budget; else the one with the most.

    Predicted is ``(first_s + rate * seconds * stop_s) / seconds``. Rates and windows are whole, as py-spy wants. Where
    one moment a second, the least that py-spy can, is too much for the longest window, a part of it is recorded and the
    target left alone for the rest. None: not even `LEAST_MOMENTS` fit.
    """
    best: Plan | None = None
    begin = max(1, math.ceil(seconds))
    for window in range(begin, max(begin, int(max_seconds)) + 1):
        # the small number lets what just fits by hand fit in floating point
        rate = min(max_rate, math.floor((budget * window - first_s) / (window * stop_s) + 1e-9))
        if rate < 1:
            continue
        plan = Plan(rate, window, (first_s + rate * window * stop_s) / window)
        if best is None or rate * window > best.rate * best.seconds:
            best = plan
        if rate * window >= MOMENTS or rate == max_rate:
            return plan
    if best is None:
        window = max(begin, int(max_seconds))
        moments = math.floor((budget * window - first_s) / stop_s + 1e-9)
        if moments >= LEAST_MOMENTS:
            best = Plan(1, moments, (first_s + moments * stop_s) / window, window - moments)
    return best


def first_stop(symbol_bytes: int, has_torch: bool) -> float:
    """Seconds that the reading of all symbols will stop the target for."""
    if has_torch:
        return FIRST_STOP_TORCH_S
    return min(FIRST_STOP_TORCH_S, FIRST_STOP_S + STOP_PER_GB * symbol_bytes / 1e9)


def sample_native(
    pid: int,
    seconds: float,
    *,
    tool: str,
    moment_state: Callable[[int, int], str],
    symbol_bytes: int,
    has_torch: bool,
    budget: float = 0.03,
    max_seconds: float = 30.0,
    cancel: threading.Event | None = None,
    names: Mapping[int, str] | None = None,
) -> StackLook:
    """Native and Python stacks of the threads that Python knows, with stops that stay within `budget`, or none at all.

    One plain dump is taken and its stop measured; from it follow the rate and the window. While stacks are taken the
    stops are measured again, and a level over its budget is kept out of the verdict.

    Args:
        tool: Path of py-spy.
        moment_state: Kernel state of a thread now; empty where it is gone.
        symbol_bytes: Size of the libraries in its memory, for what their symbols take.
        names: Of threads, where known, for names that hold what py-spy separates frames with.
    """
    if moment_state(pid, pid) in tuple(STOPPED):
        return no_level("4", "it stands stopped, by a signal or a debugger", f"kill -CONT {pid}, or end the debugger")
    try:
        with StopMeter(pid) as meter:
            dump = run_tool([tool, "dump", "--pid", str(pid)], DUMP_S, cancel)
        if dump.returncode != 0 or dump.ended:
            return _failed(pid, dump, meter.stops)
        stop_s = max(MIN_STOP_S, meter.stops.longest_s) * (UNWINDING_TORCH if has_torch else UNWINDING)
        first_s = first_stop(symbol_bytes, has_torch)
        plan = plan_native(seconds, stop_s, first_s, budget, max_seconds)
        if plan is None:
            return _over_budget(seconds, stop_s, first_s, budget, max_seconds, dump.cpu_s)
        return _record(pid, plan, dump, tool, budget, cancel, names)
    except AttachError as error:
        return no_level("4", str(error))


def _failed(pid: int, run: ToolRun, stops: Stops) -> StackLook:
    reason, fix = complaint(run, pid)
    stopped = [] if is_gone(pid) else left_stopped(pid)
    if stopped:
        reason, fix = stopped_note(pid, stopped)
    share, longest = stops.share, stops.longest_s
    cost = Disturbance(stop_frac=share, longest_stop_s=longest, tool_cpu_s=run.cpu_s)
    return no_level("4", reason, fix, disturbance=cost)


def _over_budget(
    seconds: float, stop_s: float, first_s: float, budget: float, max_seconds: float, cpu_s: float
) -> StackLook:
    longest = max(1.0, math.floor(max(max_seconds, seconds)))
    moments = min(longest, LEAST_MOMENTS)
    least = (first_s + moments * stop_s) / longest
    fix = f"--pause-budget {math.ceil(1000 * least) / 1000:g}"
    fix += f" or --native-seconds {math.ceil((first_s + LEAST_MOMENTS * stop_s) / budget):d}"
    reason = (
        f"{moments:.0f} samples in {longest:.0f} s would stop it for {100 * least:.1f} % of the time "
        f"({first_s:.2f} s to read symbols and {1000 * stop_s:.1f} ms a sample), over the budget of {100 * budget:g} %"
    )
    return no_level("4", reason, fix, disturbance=Disturbance(predicted_stop_frac=least, tool_cpu_s=cpu_s))


def _record(
    pid: int,
    plan: Plan,
    dump: ToolRun,
    tool: str,
    budget: float,
    cancel: threading.Event | None,
    names: Mapping[int, str] | None,
) -> StackLook:
    executable = _executable(pid)
    argv = [tool, "record", "--native", "--idle", "-r", str(plan.rate), "-d", str(plan.seconds)]
    with StopMeter(pid) as meter:
        run = run_tool(
            [*argv, "-f", "raw", "-t", "-o", OUT, "-p", str(pid)],
            2.0 * plan.seconds + 20.0,
            cancel,
            grace_s=GRACE_S + 3.0 / plan.rate,  # py-spy looks for SIGINT once a sample
        )
        if plan.rest and not run.ended and not is_gone(pid):
            (cancel or threading.Event()).wait(plan.rest)
    said = _SAID.search(run.stdout)
    if said is None:
        return _failed(pid, run, meter.stops)
    folded, bad = parse_folded(run.file, names, executable)
    stacks = Stacks("4", pid)
    found = os_thread_ids(pid, {line.tid for line in folded if line.tid > 2**22})
    said_names: dict[int, str] = {}
    for line in folded:
        tid = found.get(line.tid, line.tid)
        stacks.add(tid, line.frames, count=line.count)
        if line.name:
            said_names[tid] = line.name
    level = _native_level(pid, plan, dump, run, meter.stops, budget, stacks.total(), int(said[2]), bad)
    return StackLook(level, stacks.all(), said_names)


def _executable(pid: int) -> str:
    """Base name of its interpreter's file."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return ""


def _native_level(
    pid: int, plan: Plan, dump: ToolRun, run: ToolRun, stops: Stops, budget: float, samples: int, errors: int, bad: int
) -> Level:
    reasons, fix, in_verdict = [], "", True
    moments = max(errors, plan.rate * plan.seconds - 1)
    if run.ended:
        reasons.append(f"{run.ended} after {run.seconds:.1f} s")
    elif is_gone(pid):
        reasons.append(f"the process ended after {run.seconds:.1f} s")
    if run.ended or is_gone(pid):
        moments = max(errors, min(moments, round(plan.rate * run.seconds)))
    if stops.share > budget:
        in_verdict = False
        reasons.append(
            f"it was stopped for {100 * stops.share:.1f} % of the time, over the budget of {100 * budget:g} %"
        )
        fix = f"--pause-budget {math.ceil(100 * stops.share) / 100:g}, or a longer --native-seconds"
    if errors > MAX_ERRORS * max(1, moments):
        reasons.append(f"{errors} of {moments} moments gave no stack, so the rest may be lopsided")
    if bad:
        reasons.append(f"{bad} lines of py-spy's were not understood")
    stopped = [] if is_gone(pid) else left_stopped(pid)
    if stopped:
        note, fix = stopped_note(pid, stopped)
        reasons.insert(0, note)
    if not samples and not reasons:
        reasons.append("no stack was seen")
    return Level(
        id="4",
        name=LEVEL_NAMES["4"],
        ok=samples > 0,
        reason="; ".join(reasons),
        fix=fix,
        costs="" if samples else COSTS["4"],
        in_verdict=in_verdict and samples > 0,
        seconds=run.seconds,
        samples=samples,
        errors=errors,
        disturbance=Disturbance(
            predicted_stop_frac=plan.predicted,
            stop_frac=stops.share,
            longest_stop_s=stops.longest_s,
            tool_cpu_s=dump.cpu_s + run.cpu_s,
        ),
    )
