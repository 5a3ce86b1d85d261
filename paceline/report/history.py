"""What the files of a run say, read on from where the last look ended, and kept in little room however long they are.

A page is drawn from at most `MAX_STRETCHES` stretches of steps, so that neither its size nor the time to draw it grows
with the run. Nothing here writes, and a line that is half there is left for the next look.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.report.page import Record, is_number, part_of

MAX_STRETCHES = 2048
"""Stretches of steps that are kept: when there are more, each two neighbours become one."""
MAX_EVENTS = 200
"""Newest events that are kept, checkpoints apart: those are counted."""
MAX_MEASURED = 4096
"""Measurements that are kept; of more every second one goes."""
MAX_STEP = 1 << 53
"""Beyond it whole numbers are none to a chart."""

_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 64
"""Of the last line that was read: where a line begins otherwise, the file was cut back and has grown again. What is
added to a line of ``metrics.jsonl`` comes after step, batch and loss."""


class Lines:
    """The JSON objects of a file of lines, each once.

    Args:
        path: It may be missing, cut back, or replaced between looks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._last_at, self._head, self._inode = 0, 0, b"", 0

    def is_same(self) -> bool:
        """Whether the file still begins with what was read; else all of it is to be read again, by `restart`."""
        if self._offset == 0:
            return True
        try:
            with open(self._path, "rb") as file:
                found = os.fstat(file.fileno())
                file.seek(self._last_at)
                is_whole = found.st_ino == self._inode and found.st_size >= self._offset
                return is_whole and file.read(_HEAD_BYTES).startswith(self._head)
        except OSError:
            return False

    def restart(self) -> None:
        """Read from the beginning next time."""
        self._offset, self._last_at, self._head, self._inode = 0, 0, b"", 0

    def read(self) -> Iterator[list[dict[str, Any]]]:
        """What came since, in lists of whole lines; nothing where there is no file."""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if self._offset and inode != self._inode:
                return  # replaced this very moment: `is_same` says so next time
            self._inode = inode
            file.seek(self._offset)
            while True:
                data = file.read(_CHUNK_BYTES)
                if b"\n" not in data:
                    data += file.readline()  # a line of megabytes, or one that is half there
                end = data.rfind(b"\n") + 1
                if end == 0:
                    return
                lines = data[: end - 1].split(b"\n")
                self._last_at = self._offset + end - 1 - len(lines[-1])
                self._head = lines[-1][:_HEAD_BYTES]
                self._offset += end
                file.seek(self._offset)
                yield _objects(lines)


def _objects(lines: list[bytes]) -> list[dict[str, Any]]:
    """Those of the lines that are JSON objects; all at once where all are, which takes half the time."""
    lines = [line for line in lines if line.strip()]
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        found = []
    if len(found) != len(lines):  # some line is damaged
        found = [_object(line) for line in lines]
    return [each for each in found if isinstance(each, dict)]


def _object(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


@dataclass
class Stretch:
    """Consecutive steps: sums, counts, and what single steps reached.

    Attributes:
        first, last: Steps.
        sums, counts: By name of a figure, over the steps that have it.
        lowest, highest: By name, of single steps.
    """

    first: int
    last: int
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    lowest: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, values: list[float]) -> None:
        """Take up a figure of some more steps."""
        if values:
            self._add(name, sum(values), len(values), min(values), max(values))

    def _add(self, name: str, total: float, count: int, low: float, high: float) -> None:
        if name in self.counts:
            self.sums[name] += total
            self.counts[name] += count
            self.lowest[name], self.highest[name] = min(self.lowest[name], low), max(self.highest[name], high)
        else:
            self.sums[name], self.counts[name] = float(total), count
            self.lowest[name], self.highest[name] = low, high

    def take_over(self, other: Stretch) -> Stretch:
        """This one, with the next one's steps."""
        self.last = other.last
        for name, total in other.sums.items():
            self._add(name, total, other.counts[name], other.lowest[name], other.highest[name])
        return self


def _numbers(lines: list[dict[str, Any]], name: str) -> list[float]:
    found: list[float] = [value for line in lines if type(value := line.get(name)) is float or type(value) is int]
    return found if abs(sum(found)) < 1e300 else [value for value in found if is_number(value)]  # not so for NaN


FIGURES = ("loss", "acceptance_length_est", "tokens", "seconds", "put_wait_s", "get_wait_s", "queue")
"""Of a line of ``metrics.jsonl``; what else is there is not drawn."""
MEASURED = ("validation_acceptance_length", "measured_acceptance_length")


class Steps:
    """``metrics.jsonl`` in stretches.

    Attributes:
        stretches: In order; each of `size` steps, the last perhaps of fewer.
        measured: By name, step and value of what was measured between steps.
        num_lines: Lines that were read.
    """

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)
        self._begin()

    def _begin(self) -> None:
        self.stretches: list[Stretch] = []
        self.measured: dict[str, list[tuple[int, float]]] = {name: [] for name in MEASURED}
        self.size, self.num_lines, self._filled = 1, 0, 0

    def read(self) -> None:
        """Take up what came since."""
        if not self._lines.is_same():
            self._lines.restart()
            self._begin()
        for lines in self._lines.read():
            waiting: list[dict[str, Any]] = []
            for line in lines:
                step = line.get("step")
                if type(step) is not int or not 0 <= step < MAX_STEP:
                    continue
                last = waiting[-1]["step"] if waiting else self.stretches[-1].last if self.stretches else step - 1
                if step <= last:
                    self._add(waiting)
                    self._go_back(step)
                    waiting = []
                waiting.append(line)
            self._add(waiting)

    def _add(self, lines: list[dict[str, Any]]) -> None:
        """Lines of rising steps, as many at once as one stretch has room for: a call a figure, none a line."""
        self.num_lines += len(lines)
        begin = 0
        while begin < len(lines):
            if not self.stretches or self._filled >= self.size:
                if len(self.stretches) >= MAX_STRETCHES:
                    self._halve()
                self.stretches.append(Stretch(lines[begin]["step"], lines[begin]["step"]))
                self._filled = 0
            part = lines[begin : begin + self.size - self._filled]
            begin, self._filled = begin + len(part), self._filled + len(part)
            here = self.stretches[-1]
            here.last = part[-1]["step"]
            for name in FIGURES:
                here.add(name, _numbers(part, name))
        for name, found in self.measured.items():
            found += [(line["step"], line[name]) for line in lines if is_number(line.get(name))]
            while len(found) > MAX_MEASURED:
                del found[1:-1:2]

    def _halve(self) -> None:
        old = self.stretches
        self.stretches = [a.take_over(b) for a, b in zip(old[::2], old[1::2], strict=False)]
        if len(old) % 2:
            self.stretches.append(old[-1])
        self.size *= 2

    def _go_back(self, step: int) -> None:
        """The run has gone back to an earlier step: what stands before it in the file was lost."""
        while self.stretches and self.stretches[-1].last >= step:
            self.stretches.pop()
        self._filled = self.size
        for found in self.measured.values():
            while found and found[-1][0] >= step:
                found.pop()


class Events:
    """``events.jsonl``: the newest events, and how often each kind came.

    Attributes:
        newest: Those that are no checkpoints, in order.
        counts: By kind.
    """

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)
        self._begin()

    def _begin(self) -> None:
        self.newest: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.counts: Counter[str] = Counter()

    @property
    def num_left_out(self) -> int:
        """Events before the newest."""
        return self.counts.total() - self.counts["checkpoint"] - len(self.newest)

    def read(self) -> None:
        """Take up what came since."""
        if not self._lines.is_same():
            self._lines.restart()
            self._begin()
        for lines in self._lines.read():
            for line in lines:
                kind = str(line.get("event"))
                self.counts[kind] += 1
                if kind != "checkpoint":
                    self.newest.append(line)


@dataclass
class RoleTime:
    """Where threads of a role were, in seconds.

    Attributes:
        wall_s: Of all its threads.
        stages: By name, the time in a stage and in none inside of it.
        other_s: In no stage.
    """

    wall_s: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    other_s: float = 0.0


class Stages:
    """``profile/stages.jsonl`` by role.

    Attributes:
        whole, last: Roles with their time over all tables, and in the newest one.
        seconds, last_s: Length of all tables, and of the newest.
        num_tables: Tables that were read.
    """

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)
        self._begin()

    def _begin(self) -> None:
        self.whole: dict[str, RoleTime] = {}
        self.last: dict[str, RoleTime] = {}
        self.seconds = self.last_s = 0.0
        self.num_tables, self._at = 0, None

    def read(self) -> None:
        """Take up what came since."""
        if not self._lines.is_same():
            self._lines.restart()
            self._begin()
        for lines in self._lines.read():
            for line in lines:
                self._add(line)

    def _add(self, line: dict[str, Any]) -> None:
        role, wall_s, length_s = line.get("role"), line.get("wall_s"), line.get("interval_s")
        if not isinstance(role, str) or not is_number(wall_s) or not is_number(length_s):
            return
        if line.get("t") != self._at:
            self._at, self.last, self.last_s = line.get("t"), {}, float(length_s)
            self.num_tables, self.seconds = self.num_tables + 1, self.seconds + length_s
        for roles in (self.whole, self.last):
            _take(roles.setdefault(role, RoleTime()), line, wall_s)


def _take(time: RoleTime, line: Record, wall_s: float) -> None:
    sampled = line.get("sampled_one_in", 1)
    times = sampled if is_number(sampled) else 1
    other = line.get("other_s")
    time.wall_s += wall_s
    time.other_s += other if is_number(other) else 0.0
    stages = part_of(line, "stages")
    for name in stages:
        own_ms = part_of(stages, name).get("self_ms")
        if is_number(own_ms) and own_ms > 0:
            time.stages[name] = time.stages.get(name, 0.0) + own_ms * times / 1e3
