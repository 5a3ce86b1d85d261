"""Seeded trials: a run is struck at random instants, resumed until it is finished, and compared with the undisturbed.

A trial ends in one of `OUTCOMES`; the last four are bugs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.harness import Child, Ended, Wait, World, bits_of, newest_step, pause, train
from tests.chaos.points import Operation, hook

SAME_BITS, REFUSED = "same bits", "clean refusal"
OTHER_BITS, HANG, TRACEBACK, OTHER_END = "different bits", "hang", "traceback", "other ending"
OUTCOMES = (SAME_BITS, REFUSED, OTHER_BITS, HANG, TRACEBACK, OTHER_END)
GOOD = (SAME_BITS, REFUSED)

MORE_FAULTS = 0.25
"""Probability that the next start is struck as well."""

WHILE_STARTING = 0.25
"""Probability that a strike may come before the training has begun."""

MAX_STARTS = 6
HOG_S = 2.0


@dataclass
class Strike:
    """One start of a run, and what it is struck with.

    Attributes:
        stop_s: Seconds from a request to stop to the end; None if there was none.
        is_late: The run had ended before.
    """

    world: World
    run: Path
    chance: random.Random
    overrides: tuple[str, ...]
    stop_s: float | None = None
    is_late: bool = False
    child: Child | None = None
    _num_events: int = 0

    def start(self, prepare: Callable[[], None] = lambda: None) -> Child:
        """Start the run in a fork, after `prepare` there."""
        file = self.world.run_file(self.run, *self.overrides)

        def work() -> object:
            prepare()
            return train(file)

        self._num_events = self._count_events()
        self.child = Child(work)
        return self.child

    def random_instant(self) -> Wait[None]:
        """Some time within a run: mostly while it trains, also before."""
        if self.chance.random() < WHILE_STARTING:
            yield from pause(self.chance.uniform(0.0, self.world.seconds))
            return
        share = 1.0 - (newest_step(self.run / "checkpoints") or 0) / self.world.steps
        assert self.child is not None
        while self.child.poll() is None and self._count_events() == self._num_events:
            yield
        yield from pause(self.chance.uniform(0.0, 1.1 * share * self.world.train_seconds))

    def _count_events(self) -> int:
        events = self.run / "events.jsonl"
        return events.read_bytes().count(b"\n") if events.is_file() else 0


Fault = Callable[[Strike], Wait[Ended]]


def undisturbed(strike: Strike) -> Wait[Ended]:
    """Nothing happens."""
    return (yield from strike.start().ended())


def kill(strike: Strike) -> Wait[Ended]:
    """SIGKILL."""
    child = strike.start()
    yield from strike.random_instant()
    strike.is_late = child.poll() is not None
    child.send(signal.SIGKILL)
    return (yield from child.ended())


def kill_in_save(strike: Strike) -> Wait[Ended]:
    """SIGKILL while a checkpoint is being written; fsync is slow, as on a busy disk."""

    def prepare() -> None:
        def slowly(operation: Operation) -> None:
            time.sleep(0.01 if operation.name == "fsync" else 0.0)

        hook(strike.run / "checkpoints", slowly)

    child = strike.start(prepare)
    yield from strike.random_instant()
    while child.poll() is None and not list((strike.run / "checkpoints").glob(".step-*")):
        yield
    yield from pause(strike.chance.uniform(0.0, 0.06))
    strike.is_late = child.poll() is not None
    child.send(signal.SIGKILL)
    return (yield from child.ended())


def terminate(strike: Strike) -> Wait[Ended]:
    """SIGTERM."""
    return (yield from _stopped(strike, signal.SIGTERM))


def interrupt(strike: Strike) -> Wait[Ended]:
    """SIGINT."""
    return (yield from _stopped(strike, signal.SIGINT))


def interrupt_twice(strike: Strike) -> Wait[Ended]:
    """SIGINT, and once more before the run has ended."""
    return (yield from _stopped(strike, signal.SIGINT, again_after_s=strike.chance.uniform(0.0, 0.2)))


def _stopped(strike: Strike, number: signal.Signals, again_after_s: float | None = None) -> Wait[Ended]:
    child = strike.start()
    yield from strike.random_instant()
    while child.poll() is None and not takes_requests(child.pid):  # it has been a command for some milliseconds
        yield
    strike.is_late = child.poll() is not None
    sent = time.monotonic()
    child.send(number)
    if again_after_s is not None:
        yield from pause(again_after_s)
        sent = time.monotonic()
        child.send(number)
    ended = yield from child.ended()
    strike.stop_s = None if strike.is_late else time.monotonic() - sent
    return ended


def takes_requests(pid: int) -> bool:
    """Whether the process has a handler for SIGTERM, which Python has none for by itself."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def freeze(strike: Strike) -> Wait[Ended]:
    """SIGSTOP, and SIGCONT some time later."""
    child = strike.start()
    yield from strike.random_instant()
    strike.is_late = child.poll() is not None
    child.send(signal.SIGSTOP)
    yield from pause(strike.chance.uniform(0.05, 0.6))
    child.send(signal.SIGCONT)
    return (yield from child.ended())


def starve(strike: Strike) -> Wait[Ended]:
    """One core that is shared with a busy process, or the lowest priority beside busy ones."""
    child = strike.start()
    yield from strike.random_instant()
    strike.is_late = child.poll() is not None
    cores = sorted(os.sched_getaffinity(0))
    shared = {strike.chance.choice(cores)} if strike.chance.random() < 0.5 else None
    hogs = [Child(lambda core=core: _spin(core)) for core in (shared or cores[:2])]
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{child.pid}/task"):
            if shared is not None:
                os.sched_setaffinity(int(thread), shared)
            else:
                os.setpriority(os.PRIO_PROCESS, int(thread), 19)
    ended = yield from child.ended()
    for hog in hogs:
        hog.send(signal.SIGKILL)
        yield from hog.ended()
    return ended


def _spin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    end = time.monotonic() + HOG_S
    while time.monotonic() < end:
        pass


def fill_disk(strike: Strike) -> Wait[Ended]:
    """No file can grow past a size (RLIMIT_FSIZE), for a while or for good."""
    child = strike.start()
    size = strike.chance.choice((0, 100, 3000, 40_000))
    free = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    def limit(limits: tuple[int, int]) -> None:
        if child.poll() is None:
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, limits)

    yield from strike.random_instant()
    strike.is_late = child.poll() is not None
    limit((size, free[1]))
    if strike.chance.random() < 0.6:
        yield from pause(strike.chance.uniform(0.05, 1.0))
        limit(free)
    return (yield from child.ended())


def no_space(strike: Strike) -> Wait[Ended]:
    """ENOSPC for whatever needs space in the run folder, for a while or for good."""
    return (yield from _without_space(strike, is_stopped=False))


def terminate_without_space(strike: Strike) -> Wait[Ended]:
    """SIGTERM where nothing can be saved, for a while or for good."""
    return (yield from _without_space(strike, is_stopped=True))


def _without_space(strike: Strike, is_stopped: bool) -> Wait[Ended]:
    switch = strike.run.with_name(f"{strike.run.name}.full")
    grows = ("write", "write file", "mkdir", "symlink", "ftruncate", "pwrite", "writev")

    def prepare() -> None:
        def decide(operation: Operation) -> int | None:
            needs_space = operation.name in grows or (
                operation.name == "open" and not os.path.lexists(strike.run / operation.path)
            )
            return errno.ENOSPC if needs_space and switch.exists() else None

        hook(strike.run, decide)

    child = strike.start(prepare)
    yield from strike.random_instant()
    strike.is_late = child.poll() is not None
    switch.touch()
    if is_stopped:
        while child.poll() is None and not takes_requests(child.pid):
            yield
        child.send(signal.SIGTERM)
    sent = time.monotonic()
    if strike.chance.random() < 0.6:
        yield from pause(strike.chance.uniform(0.05, 1.0))
        switch.unlink()
    ended = yield from child.ended()
    strike.stop_s = time.monotonic() - sent if is_stopped and not strike.is_late else None
    switch.unlink(missing_ok=True)
    return ended


FAULTS: dict[str, Fault] = {
    "SIGKILL": kill,
    "SIGKILL in a save": kill_in_save,
    "SIGTERM": terminate,
    "SIGINT": interrupt,
    "SIGINT twice": interrupt_twice,
    "SIGSTOP, SIGCONT": freeze,
    "starvation": starve,
    "RLIMIT_FSIZE": fill_disk,
    "ENOSPC": no_space,
    "SIGTERM and ENOSPC": terminate_without_space,
}

ENDS: dict[str, tuple[int, ...]] = {
    "SIGKILL": (-signal.SIGKILL,),
    "SIGKILL in a save": (-signal.SIGKILL,),
    "SIGINT twice": (128 + signal.SIGINT,),
}
"""Exit codes besides 0 that are the fault's own."""

DISK_FAULTS = ("RLIMIT_FSIZE", "ENOSPC", "SIGTERM and ENOSPC")
"""A run may end by these, with the reason."""


@dataclass(frozen=True)
class Trial:
    """What came of one.

    Attributes:
        faults: What each start was struck with; the last start is undisturbed as a rule.
        ends: Exit codes.
        stop_s: Longest time from a request to stop to the end.
        num_late: Faults that came when the run had ended.
        detail: Of a bug, or of a refusal.
    """

    index: int
    outcome: str
    faults: list[str]
    ends: list[int | None]
    stop_s: float
    num_late: int
    seconds: float
    detail: str = ""


def trial(world: World, seed: int, index: int) -> Wait[Trial]:
    """Strike, resume and compare."""
    chance = random.Random(f"{seed}/{index}")
    started = time.monotonic()
    run = world.folder / f"trial-{index}"
    overrides = ("topology.layout=colocated", "topology.targets=1") if index % 5 == 4 else ()
    faults, ends, stops, num_late = list[str](), list[int | None](), [0.0], 0

    def done(outcome: str, detail: str = "") -> Trial:
        if outcome in GOOD:
            shutil.rmtree(run, ignore_errors=True)
        seconds = time.monotonic() - started
        return Trial(index, outcome, faults, ends, max(stops), num_late, seconds, detail)

    for start in range(MAX_STARTS):
        is_struck = start == 0 or (start < MAX_STARTS - 1 and chance.random() < MORE_FAULTS)
        name = list(FAULTS)[index % len(FAULTS)] if start == 0 else chance.choice(list(FAULTS))
        strike = Strike(world, run, chance, overrides)
        ended = yield from (FAULTS[name] if is_struck else undisturbed)(strike)
        faults.append(name if is_struck else "-")
        ends.append(ended.code)
        stops.append(strike.stop_s or 0.0)
        num_late += strike.is_late
        outcome = judge(ended, name if is_struck else "-", is_done(world, run))
        if outcome == REFUSED and is_struck:
            continue  # the fault has gone: the next start has to do
        if outcome is not None:
            return done(outcome, ended.output[-4000:])
        if ended.code == 0 and is_done(world, run):
            difference = world.bits.difference(bits_of(run))
            left = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
            if difference is None and left:
                difference = f"left over: {left}"
            return done(SAME_BITS) if difference is None else done(OTHER_BITS, difference + "\n" + ended.output[-4000:])
    return done(OTHER_END, f"not finished after {MAX_STARTS} starts")


def is_done(world: World, run: Path) -> bool:
    """Whether the last step is on the disk."""
    return newest_step(run / "checkpoints") == world.steps


def judge(ended: Ended, fault: str, is_finished: bool) -> str | None:
    """What a start has shown by itself; None: nothing but that the run goes on, or is finished."""
    if ended.code is None:
        return HANG
    if ended.has_traceback:
        return TRACEBACK
    if ended.code == 0 or ended.code in ENDS.get(fault, ()):
        return None
    if ended.code in (-signal.SIGTERM, 128 + signal.SIGINT) and is_finished:  # between the run's end and its process's
        return None
    if ended.code == 1 and "paceline: " in ended.output and (fault in DISK_FAULTS or fault == "-"):
        return REFUSED
    return OTHER_END
