"""Level 0: what a process of ours says of itself on its shared page, stage by stage and wait by wait.

Nothing is asked of the process. Where stages were not being counted, counting is on for the length of the look: a word
in the page, which costs a run less than a thousandth, and which is put back afterwards.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.profiling.evidence import LEVEL_NAMES, Disturbance, Figure, Level, Queue
from paceline.profiling.intervals import Interval
from paceline.profiling.page import CONTROL, Control, PageError, Snapshot, read_page, write_word
from paceline.profiling.statistics import mean_interval
from paceline.profiling.verdict import Window

POLL_S = 0.2
"""Between two readings of the queue."""

SUB_WINDOWS = 12


@dataclass(frozen=True)
class StageLook:
    """What the pages said.

    Attributes:
        stages: Records of `Interval.records` over the window, of all processes.
        halves: The same for its first and its second half.
        names: Role and name of each thread, by process and thread; where one takes turns, its roles joined by ``+``.
        windows: Of the queue, for `verdict.judge`.
        first, last: Snapshots of the process that trains.
    """

    level: Level
    stages: list[dict[str, Any]] = field(default_factory=list)
    halves: tuple[list[dict[str, Any]], ...] = ()
    names: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    queue: Queue | None = None
    steps_per_s: Figure | None = None
    tokens_per_s: Figure | None = None
    first: Snapshot | None = None
    last: Snapshot | None = None


class StageWatch:
    """Watches pages for a window.

    Args:
        pages: Of processes that run; the last one's queue is taken.
    """

    def __init__(self, pages: Sequence[Path]) -> None:
        self._pages = list(pages)
        self._taken: dict[Path, list[Snapshot]] = {page: [] for page in self._pages}
        self._switched: dict[Path, Control] = {}
        self._problem = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="level-0", daemon=True)
        self._cpu_s = 0.0

    def start(self) -> None:
        """Begin; stages are counted from here on."""
        for page in self._pages:
            with contextlib.suppress(PageError):
                now = read_page(page).control
                if not now.is_on:
                    wanted = now.changed(True, 0.0)
                    write_word(page, CONTROL, wanted.word)
                    self._switched[page] = wanted
        self._thread.start()

    def stop(self) -> StageLook:
        """End, put back what was switched, and say what was seen."""
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()
        for page, wanted in self._switched.items():
            with contextlib.suppress(PageError):
                if read_page(page).control == wanted:  # nobody has switched it meanwhile
                    write_word(page, CONTROL, wanted.changed(False, 0.0).word)
        self._switched.clear()
        return self._look()

    def _run(self) -> None:
        began = time.thread_time()
        while True:
            is_last = self._done.is_set()
            for page in self._pages:
                try:
                    self._taken[page].append(read_page(page))
                except PageError as error:  # it has ended: its page is gone
                    self._problem = str(error)
            if is_last:
                break
            self._done.wait(POLL_S)
        self._cpu_s = time.thread_time() - began

    def _look(self) -> StageLook:
        taken = {page: snapshots for page, snapshots in self._taken.items() if len(snapshots) >= 2}
        if not taken:
            return StageLook(_level(False, self._problem or "the page was seen less than twice", self._cpu_s))
        main = list(taken.values())[-1]
        stages: list[dict[str, Any]] = []
        halves: tuple[list[dict[str, Any]], ...] = ([], [])
        names: dict[tuple[int, int], tuple[str, str]] = {}
        for snapshots in taken.values():
            middle = len(snapshots) // 2
            stages += _records(snapshots[0], snapshots[-1])
            halves[0].extend(_records(snapshots[0], snapshots[middle]))
            halves[1].extend(_records(snapshots[middle], snapshots[-1]))
            for thread in snapshots[-1].threads:
                if thread.is_live and thread.tid:
                    role, _ = names.get((snapshots[-1].pid, thread.tid), ("", ""))
                    names[snapshots[-1].pid, thread.tid] = ("+".join(filter(None, (role, thread.role))), thread.thread)
        if main[0].control.serial != main[-1].control.serial:
            self._problem = "counting was switched during the look: stages are of a part of it"
        rates = [_rate(main, name) for name in ("step", "tokens")]
        seconds = (main[-1].taken_ns - main[0].taken_ns) / 1e9
        return StageLook(
            level=_level(True, self._problem, self._cpu_s, seconds, len(main)),
            stages=stages,
            halves=halves,
            names=names,
            windows=windows_between(main),
            queue=_queue(main),
            steps_per_s=rates[0],
            tokens_per_s=rates[1],
            first=main[0],
            last=main[-1],
        )


def page_of(pid: int) -> Path | None:
    """The page that the process has open, if it is one of ours.

    The path is as the process sees it; in a container that may be another place, and its own number another one: then
    it is looked at as a stranger.
    """
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                path = line.rstrip("\n").split(" ", 5)[-1].strip()
                if path.endswith(".page") and "/paceline-" in path:
                    for place in (Path(path), Path(f"/proc/{pid}/root{path}")):
                        with contextlib.suppress(PageError):
                            if read_page(place).pid == pid:  # a fork has its parent's, a container other numbers
                                return place
    except OSError:
        return None
    return None


def folder_of(pid: int) -> Path | None:
    """The run folder whose lock the process holds."""
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = Path(os.readlink(descriptor))
                if target.name == "run.lock" and (target.parent / "config.yaml").exists():
                    return target.parent
    except OSError:
        return None
    return None


def windows_between(snapshots: Sequence[Snapshot]) -> list[Window]:
    """What the queue did from reading to reading."""
    found = []
    for before, after in zip(snapshots, snapshots[1:], strict=False):
        seconds = (after.taken_ns - before.taken_ns) / 1e9
        if seconds > 0.0:
            found.append(
                Window(
                    seconds=seconds,
                    batches=float(after.gauges["batches"] - before.gauges["batches"]),
                    get_wait_s=min(seconds, max(0.0, _get_wait_s(after) - _get_wait_s(before))),
                    put_wait_s=max(0.0, (after.gauges["put_wait_ns"] - before.gauges["put_wait_ns"]) / 1e9),
                    ready_wait_s=max(0.0, (after.gauges["ready_wait_ns"] - before.gauges["ready_wait_ns"]) / 1e9),
                    queue=float(after.gauges["queue"]),
                )
            )
    return found


def _get_wait_s(snapshot: Snapshot) -> float:
    """Time that the drafter has waited, a wait that goes on included."""
    since = snapshot.gauges["getting_since_ns"]
    return (snapshot.gauges["get_wait_ns"] + (max(0, snapshot.taken_ns - since) if since else 0)) / 1e9


def _records(first: Snapshot, last: Snapshot) -> list[dict[str, Any]]:
    records = Interval.between(first, last).records()
    return [{**record, "pid": last.pid} for record in records]


def _queue(snapshots: Sequence[Snapshot]) -> Queue | None:
    windows, last = windows_between(snapshots), snapshots[-1]
    seconds = sum(window.seconds for window in windows)
    depth, targets = last.gauges["queue_depth"], max(1, last.gauges["targets"])
    if not depth or seconds <= 0.0:
        return None
    begin = snapshots[0].taken_ns
    every = max(1, len(snapshots) // 200)
    return Queue(
        depth=depth,
        targets=targets,
        waiting=sum(window.queue * window.seconds for window in windows) / seconds,
        get_wait=_share([(window.get_wait_s, window.seconds) for window in windows]),
        put_wait=_share([(window.put_wait_s, window.seconds * targets) for window in windows]),
        batches_per_s=sum(window.batches for window in windows) / seconds,
        history=tuple((round((each.taken_ns - begin) / 1e9, 3), each.gauges["queue"]) for each in snapshots[::every]),
    )


def _share(parts: Sequence[tuple[float, float]]) -> Figure:
    """A share of time, with its interval from sub-windows: what follows closely resembles itself."""
    whole = sum(seconds for _, seconds in parts)
    value = min(1.0, sum(part for part, _ in parts) / whole)
    size = max(1, len(parts) // SUB_WINDOWS)
    groups = [parts[i : i + size] for i in range(0, len(parts), size)]
    means = [sum(part for part, _ in group) / sum(seconds for _, seconds in group) for group in groups]
    _, low, high = mean_interval(means)
    low, high = min(max(low, 0.0), value), max(min(high, 1.0), value)
    return Figure(value=value, interval=(low, high), level="0", samples=len(groups))


def _rate(snapshots: Sequence[Snapshot], gauge: str) -> Figure | None:
    """Of a gauge that only grows, a second: from its first change to its last, as it moves in jumps."""
    moves = [
        (snapshots[i].taken_ns / 1e9, snapshots[i].gauges[gauge])
        for i in range(1, len(snapshots))
        if snapshots[i].gauges[gauge] != snapshots[i - 1].gauges[gauge]
    ]
    if len(moves) < 3:
        return None
    value = (moves[-1][1] - moves[0][1]) / (moves[-1][0] - moves[0][0])
    size = max(1, (len(moves) - 1) // SUB_WINDOWS)
    ends = moves[::size]
    parts = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(ends, ends[1:], strict=False)]
    _, low, high = mean_interval(parts)
    return Figure(
        value=value, interval=(max(0.0, min(low, value)), max(high, value)), unit="per_s", level="0", samples=len(parts)
    )


def _level(ok: bool, reason: str, cpu_s: float, seconds: float = 0.0, samples: int = 0) -> Level:
    return Level(
        id="0",
        name=LEVEL_NAMES["0"],
        ok=ok,
        reason=reason,
        costs="" if ok else "no stages, no waits of the queue and no verdict on its sides",
        seconds=seconds,
        samples=samples,
        disturbance=Disturbance(tool_cpu_s=cpu_s),
    )
