"""Level 2: how much of the time somebody holds the interpreter's lock, who, and where. It stops nothing.

What py-spy 0.4.3 counts was read in its source and measured. ``-r RATE -d SECONDS`` tries ``RATE * SECONDS - 1``
moments: the last one is thrown away. They are exponential times apart, so the window is over when enough were tried and
not after `SECONDS`. ``Samples: N`` counts the moments with a holder, not all.
"""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.profiling.collect.tools import (
    OUT,
    Folded,
    ToolRun,
    complaint,
    os_thread_ids,
    parse_folded,
    run_tool,
)
from paceline.profiling.evidence import LEVEL_NAMES, AttachError, Disturbance, Gil, Holder, Level
from paceline.profiling.statistics import Z_95, wilson

COSTS = "the share of time in which the GIL is held, and by whom"
WHERE = 3
"""Innermost frames that are named for a holder."""
START_S = 0.05
"""That py-spy takes to begin, where it ended early and the moments that it tried are to be guessed."""

_SAID = re.compile(r"Samples: (\d+) Errors: (\d+)")
Hits = tuple[int, int]


@dataclass(frozen=True)
class GilLook:
    """What a look at the lock gave.

    Attributes:
        gil: None where nothing was seen at all; the parts of its share are left to level 1.
        halves: Moments with a holder, and moments, of each half of the window.
        shares: The same of each holder, over the whole window.
    """

    gil: Gil | None
    level: Level
    halves: tuple[Hits, Hits] = ((0, 0), (0, 0))
    shares: dict[int, Hits] = field(default_factory=dict)


@dataclass(frozen=True)
class _Half:
    run: ToolRun
    tried: int = 0
    errors: int = 0
    stacks: tuple[Folded, ...] = ()

    @property
    def samples(self) -> int:
        return self.tried - self.errors

    def hits(self, tid: int | None = None) -> int:
        return sum(stack.count for stack in self.stacks if tid is None or stack.tid == tid)


def look_at_gil(
    pid: int,
    seconds: float,
    *,
    tool: str,
    rate: int = 100,
    cancel: threading.Event | None = None,
    names: Mapping[int, str] | None = None,
) -> GilLook:
    """Sample who holds the lock, in two halves one after the other.

    The share is moments with a holder over moments that could be read. A moment is lost mostly where a holder's stack
    changes while it is read, so the interval reaches from none to all of the lost ones having had a holder.

    Moments are exponential times apart, hence nearly independent as long as holds are shorter than the 10 ms between
    them; those within one long hold are not, and the interval of Wilson is then too narrow. Where the two halves differ
    by more than chance explains, it is widened to what they differ by. That catches a load that changes, and long holds
    only in part.

    Args:
        seconds: Of the window; each half is whole seconds, at least one, as py-spy wants.
        tool: Path of py-spy.
        names: Of threads, where known, for names that hold what py-spy separates frames with.
    """
    first = max(1, int(seconds) // 2)
    halves: list[_Half] = []
    try:
        for length in (first, max(1, round(seconds) - first)):
            halves.append(_half(pid, length, tool, rate, cancel, names))
            if halves[-1].run.returncode != 0 or halves[-1].run.ended or _was_cut(halves[-1].run):
                break
    except AttachError as error:
        return GilLook(None, Level(id="2", name=LEVEL_NAMES["2"], ok=False, reason=str(error), costs=COSTS))
    return _look(pid, halves)


def _half(
    pid: int, length: int, tool: str, rate: int, cancel: threading.Event | None, names: Mapping[int, str] | None
) -> _Half:
    # --idle: before Python 3.11 it takes a holder inside of `wait` of threading.py for idle, and leaves it out
    argv = [tool, "record", "--gil", "--nonblocking", "--idle", "-r", str(rate), "-d", str(length)]
    run = run_tool([*argv, "-f", "raw", "-t", "-o", OUT, "-p", str(pid)], 2 * length + 15.0, cancel)
    said = _SAID.search(run.stdout)
    if said is None:
        return _Half(run)
    stacks, bad = parse_folded(run.file, names)
    errors = int(said[2])
    tried = rate * length - 1
    if run.ended or _was_cut(run):
        tried = min(tried, round(rate * max(0.0, run.seconds - START_S)))
    hits = sum(stack.count for stack in stacks)
    return _Half(run, max(tried, hits + errors), errors, _with_os_ids(pid, stacks))


def _with_os_ids(pid: int, stacks: list[Folded]) -> tuple[Folded, ...]:
    """The same with the kernel's thread numbers, where py-spy only had pthread addresses."""
    found = os_thread_ids(pid, {stack.tid for stack in stacks if stack.tid > 2**22})
    return tuple(Folded(found.get(s.tid, s.tid), s.name, s.frames, s.count) for s in stacks)


def _was_cut(run: ToolRun) -> bool:
    return "Stopped sampling" in run.stdout


def _look(pid: int, halves: list[_Half]) -> GilLook:
    cpu_s = sum(half.run.cpu_s for half in halves)
    seconds = sum(half.run.seconds for half in halves)
    samples, errors = sum(half.samples for half in halves), sum(half.errors for half in halves)
    last = halves[-1].run
    reason, fix = "", ""
    if last.returncode != 0 or last.ended:
        reason, fix = complaint(last, pid)
    elif _was_cut(last):
        reason = f"the process ended after {seconds:.1f} s"
    if samples <= 0:
        reason = reason or "nothing could be read"
    elif last.ended == "cancelled":
        reason = f"cancelled after {seconds:.1f} s"
    level = Level(
        id="2",
        name=LEVEL_NAMES["2"],
        ok=samples > 0,
        reason=reason,
        fix=fix,
        costs=COSTS if samples <= 0 else "",
        seconds=seconds,
        samples=max(0, samples),
        errors=errors,
        disturbance=Disturbance(tool_cpu_s=cpu_s),
    )
    if samples <= 0:
        return GilLook(None, level)
    pairs = [(half.hits(), half.samples) for half in halves] + [(0, 0)]
    hits = pairs[0][0] + pairs[1][0]
    tids = {stack.tid for half in halves for stack in half.stacks}
    gil = Gil(
        pid=pid,
        share=min(1.0, hits / samples),
        interval=_interval(pairs[0], pairs[1], errors),
        samples=samples,
        errors=errors,
        holders=tuple(sorted((_holder(tid, halves) for tid in tids), key=lambda one: -one.share)),
    )
    shares = {tid: (sum(half.hits(tid) for half in halves), samples) for tid in tids}
    return GilLook(gil, level, (pairs[0], pairs[1]), shares)


def _holder(tid: int, halves: list[_Half]) -> Holder:
    stacks = [stack for half in halves for stack in half.stacks if stack.tid == tid]
    where: Counter[str] = Counter()
    for stack in stacks:
        if stack.frames:
            where[str(stack.frames[-1])] += stack.count
    pairs = [(half.hits(tid), half.samples) for half in halves] + [(0, 0)]
    samples = pairs[0][1] + pairs[1][1]
    return Holder(
        tid=tid,
        name=stacks[0].name,
        share=min(1.0, (pairs[0][0] + pairs[1][0]) / samples),
        interval=_interval(pairs[0], pairs[1], 0),
        where=tuple(frame for frame, _ in where.most_common(WHERE)),
    )


def _interval(first: Hits, second: Hits, errors: int) -> tuple[float, float]:
    """Wilson's interval of both halves together, and where chance does not explain their difference at least half of
    that difference to each side: from one half's share to the other's."""
    hits, samples = first[0] + second[0], first[1] + second[1]
    if samples <= 0:
        return 0.0, 1.0
    tried = samples + errors
    share = min(1.0, hits / samples)
    low = min(share, wilson(hits, tried)[0])
    high = max(share, wilson(min(hits + errors, tried), tried)[1])
    if first[1] > 0 and second[1] > 0:
        variance = share * (1 - share) * (1 / first[1] + 1 / second[1])
        difference = abs(first[0] / first[1] - second[0] / second[1])
        if difference > Z_95 * math.sqrt(variance):
            low, high = min(low, share - difference / 2), max(high, share + difference / 2)
    return max(0.0, low), min(1.0, high)
