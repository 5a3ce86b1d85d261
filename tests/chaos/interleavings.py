"""All interleavings of the threads at the channel: the real pipeline under a scheduler that decides who goes on.

Condition and thread of `paceline.pipeline` are replaced by ones that hand over to the scheduler where a thread could
lose its turn: before it takes the channel's lock, and while it waits or joins. What lies between is done with the lock
held, or touches nothing that the channel's other users see (the coordinator's counts, making a batch), so nobody could
tell another order of it. From every state every choice is followed once: two ways into the same state (of the channel,
the coordinator and all threads' frames) go on as one.

In every state one of `FAULTS` may come, once an execution. Wanted of every execution: it ends, the batches come in
order and once, a failure arrives, and every number issued is accounted for in every state. A loop among the states is
threads that wake each other for nothing, for ever.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.errors import PipelineError
from paceline.pipeline import channel, coordinator, local
from paceline.records import FeatureBatch, TokenBatch

FAILS, ENDS, FAILS_ONCE = "a target fails", "a target thread ends", "a target fails once"
LEAVES, STOPS = "the consumer leaves", "a stop is asked for"
FAULTS = (FAILS, ENDS, FAILS_ONCE, LEAVES, STOPS)

Choice = int | str
"""A thread that goes on, or a fault that comes."""

MAX_STATES = 400_000
HANDOVER_S = 30.0
"""A thread that keeps its turn for so long waits for something that is not the scheduler's."""


@dataclass(frozen=True)
class Setting:
    """A pipeline to be looked at. `max_batches` bytes-wise: so many batches fit by their bytes."""

    targets: int
    batches: int
    queue_depth: int
    min_ready: int = 1
    max_batches: int = 100
    faults: tuple[str, ...] = FAULTS


@dataclass
class Found:
    """What was found: the number of states and executions, and each problem with the choices that lead to it."""

    states: int = 0
    executions: int = 0
    problems: dict[str, list[Choice]] = field(default_factory=dict)


class Stopped(BaseException):
    """Unwinds a thread whose execution is over."""


# ------------------------------------------------------------------------------------------ what threads are made of
class Task:
    """A thread under the scheduler."""

    def __init__(self, world: Schedule, number: int, body: Callable[[], None]) -> None:
        self.world, self.number, self.body = world, number, body
        self.baton = threading.Lock()
        self.baton.acquire()
        self.can_go: Callable[[], bool] = lambda: True
        self.where = "start"
        self.is_done = False
        self.timed_out = False
        self.thread: threading.Thread | None = None

    def pause(self, where: str, can_go: Callable[[], bool] = lambda: True) -> None:
        """Hand over, until the scheduler lets this thread go on."""
        if self.world.is_over:
            raise Stopped
        self.where, self.can_go = where, can_go
        self.world.baton.release()
        self.baton.acquire()
        if self.world.is_over:
            raise Stopped


class Schedule:
    """One execution: who is there, and whose turn it is."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.baton = threading.Lock()
        self.baton.acquire()
        self.is_over = False
        self.faults: set[str] = set()
        self.now = 0.0

    def add(self, body: Callable[[], None]) -> Task:
        task = Task(self, len(self.tasks), body)
        self.tasks.append(task)
        _POOL.run(task)
        return task

    def pause(self, where: str, can_go: Callable[[], bool] = lambda: True) -> None:
        assert self.current is not None
        self.current.pause(where, can_go)

    def step(self, task: Task) -> None:
        """Let a thread go on until it hands over or ends."""
        self.current = task
        task.baton.release()
        if not self.baton.acquire(timeout=HANDOVER_S):
            raise AssertionError(f"thread {task.number} waits past the scheduler, after {task.where}")
        self.current = None

    def end(self) -> None:
        """Unwind all threads."""
        self.is_over = True
        for task in self.tasks:
            while not task.is_done:
                self.step(task)


class _Pool:
    """Threads that are used again: an execution is shorter than a thread's start."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []

    def run(self, task: Task) -> None:
        worker = self._idle.pop() if self._idle else _Worker(self._idle)
        worker.take(task)


class _Worker:
    def __init__(self, idle: list[_Worker]) -> None:
        self._idle = idle
        self._has_task = threading.Semaphore(0)
        self._task: Task | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def take(self, task: Task) -> None:
        self._task = task
        task.thread = self._thread
        self._has_task.release()

    def _work(self) -> None:
        while True:
            self._has_task.acquire()
            task = self._task
            assert task is not None
            task.baton.acquire()
            try:
                if not task.world.is_over:
                    task.body()
            except Stopped:
                pass
            except BaseException as error:
                task.world.faults.add(f"crash: {error!r}")
            task.is_done, task.where = True, "end"
            world, self._task = task.world, None
            self._idle.append(self)
            world.baton.release()


_POOL = _Pool()


class Lock:
    """A lock that needs no turn: what is done under it concerns nobody in the channel, and hands over nowhere."""

    def __init__(self, world: Schedule) -> None:
        self.world = world

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *exc: object) -> None:
        pass

    acquire = __enter__
    release = __exit__


class Condition:
    """A condition; a wait with a time limit runs out only once a stop is asked for, which is what those are for."""

    def __init__(self, world: Schedule) -> None:
        self.world = world
        self.owner: Task | None = None
        self.waiting: list[Task] = []

    def __enter__(self) -> bool:
        task = self.world.current
        assert task is not None and self.owner is not task
        task.pause("lock", lambda: self.owner is None)
        self.owner = task
        return True

    def __exit__(self, *exc: object) -> None:
        if not self.world.is_over:
            assert self.owner is self.world.current
            self.owner = None

    def wait(self, timeout: float | None = None) -> bool:
        task = self.world.current
        assert task is not None and self.owner is task, "waits without the lock"
        if timeout is not None and timeout <= 0:
            return False
        self.owner = None
        self.waiting.append(task)
        world = self.world

        def can_go() -> bool:
            runs_out = timeout is not None and STOPS in world.faults
            return self.owner is None and (task not in self.waiting or runs_out)

        task.pause("wait", can_go)
        self.owner = task
        if task in self.waiting:
            self.waiting.remove(task)
            world.now += timeout or 0.0
            return False
        return True

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        while not (result := predicate()):
            if not self.wait(timeout):
                return predicate()
        return result

    def notify(self, n: int = 1) -> None:
        assert self.owner is self.world.current, "notifies without the lock"
        del self.waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self.waiting))


class Thread:
    """A thread; `join` without an end in sight is a deadlock whatever its limit."""

    def __init__(self, world: Schedule, target: Callable[..., None], args: tuple[Any, ...] = (), **_: Any) -> None:
        self.world, self._body = world, lambda: target(*args)
        self.name = _.get("name", "")
        self.task: Task | None = None

    def start(self) -> None:
        self.task = self.world.add(self._body)

    def join(self, _timeout: float | None = None) -> None:
        task = self.task
        if task is not None:
            self.world.pause(f"join {task.number}", lambda: task.is_done)

    def is_alive(self) -> bool:
        return self.task is not None and not self.task.is_done


@contextlib.contextmanager
def replaced(world: Schedule) -> Iterator[None]:
    """While entered, the pipeline's modules use the scheduler's threads and clock."""

    def ident() -> int:
        return -1 if world.current is None else world.current.number

    threads = types.SimpleNamespace(
        Condition=lambda: Condition(world),
        Lock=lambda: Lock(world),
        Thread=lambda *args, **kwargs: Thread(world, *args, **kwargs),
        get_ident=ident,
        current_thread=threading.current_thread,
    )
    clock = types.SimpleNamespace(
        perf_counter=lambda: world.now,
        monotonic=lambda: world.now,
        monotonic_ns=lambda: int(1e9 * world.now),
        time=lambda: world.now,
        sleep=lambda seconds: None,
    )
    quiet = types.SimpleNamespace(
        set_num_threads=lambda count: None, Tensor=torch.Tensor, OutOfMemoryError=torch.OutOfMemoryError
    )
    log = logging.Logger("silent", logging.CRITICAL)
    silent = contextlib.nullcontext()
    stages = types.SimpleNamespace(
        **{name: silent for name in dir(local.stages) if name.isupper() and not name.startswith("_")},
        set_gauge=lambda name, value: None,
        next_batch=lambda number: None,
        named_thread=lambda name: silent,
        as_role=lambda role: silent,
    )
    changes = [
        (module, name, value)
        for module in (channel, coordinator, local)
        for name, value in (("threading", threads), ("time", clock), ("stages", stages), ("torch", quiet), ("log", log))
        if hasattr(module, name)
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


# -------------------------------------------------------------------------------------------------- what is looked at
class Execution:
    """A pipeline with its consumer, under a fresh schedule."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.world = Schedule()
        self.got: list[int] = []
        self.failure: BaseException | None = None
        self.has_failed = False
        self.coordinator: Any = None
        self.stream: Any = None
        self.world.add(self._consume)

    def _consume(self) -> None:
        setting, faults = self.setting, self.world.faults
        self.coordinator = coordinator.Coordinator(0, setting.batches)
        try:
            with local.open_stream(
                self._make,
                self.coordinator,
                layout="split",
                targets=setting.targets,
                threads=1,
                queue_depth=setting.queue_depth,
                max_bytes=setting.max_batches * _batch(0).num_bytes,
                min_ready=setting.min_ready,
                should_stop=lambda: STOPS in faults,
                max_retries=1,
            ) as self.stream:
                for batch in self.stream:
                    number = batch.tokens.number
                    self.got.append(number)
                    (self.coordinator.skipped if number == 1 else self.coordinator.trained)([number])
                    if LEAVES in faults or STOPS in faults:
                        break
        except PipelineError as error:
            self.failure = error

    def _make(self, number: int) -> FeatureBatch:
        faults = self.world.faults
        if FAILS in faults or (FAILS_ONCE in faults and not self.has_failed):
            self.has_failed = True
            raise RuntimeError("planted")
        if ENDS in faults:
            raise SystemExit("planted")
        return _batch(number)

    def choices(self) -> list[Choice]:
        """What may happen next."""
        going = [task.number for task in self.world.tasks if not task.is_done and task.can_go()]
        if all(task.is_done for task in self.world.tasks):
            return []
        return [*going, *(() if self.world.faults else self.setting.faults)]

    def take(self, choice: Choice) -> None:
        """Let it happen."""
        if isinstance(choice, str):
            self.world.faults.add(choice)
        else:
            self.world.step(self.world.tasks[choice])

    def state(self) -> object:
        """All that what follows depends on."""
        tasks = tuple((task.where, task.is_done, _frames(task)) for task in self.world.tasks)
        parts = [None if part is None else _print(vars(part), 0) for part in (self.stream, self.coordinator)]
        return tasks, *parts, tuple(sorted(self.world.faults)), len(self.got), self.has_failed, self.failure is not None

    def problem(self) -> str | None:
        """What is wrong in this state."""
        world = self.world
        if crash := next((fault for fault in world.faults if fault.startswith("crash")), None):
            return crash
        if self.got != list(range(len(self.got))):
            return f"delivered {self.got}"
        if self.coordinator is not None:
            ledger = self.coordinator.ledger()
            if ledger.issued != ledger.trained + ledger.in_flight + ledger.skipped:
                return f"the ledger does not add up: {ledger}"
        if all(task.is_done for task in world.tasks):
            return self._problem_at_end()
        if not any(isinstance(choice, int) for choice in self.choices()):
            return "deadlock: " + ", ".join(f"{task.number} at {task.where}" for task in world.tasks)
        return None

    def _problem_at_end(self) -> str | None:
        is_whole = len(self.got) == self.setting.batches
        if self.failure is not None:
            failed = bool({FAILS, ENDS} & self.world.faults) and not is_whole
            return None if failed and "planted" in str(self.failure) else f"failed by itself: {self.failure!r}"
        if not is_whole and not {LEAVES, STOPS} & self.world.faults:
            return f"ended well after {len(self.got)} of {self.setting.batches} batches"
        return None


def _batch(number: int) -> FeatureBatch:
    return _BATCHES.setdefault(
        number,
        FeatureBatch(
            TokenBatch.pack(number, [(0, torch.arange(4), torch.ones(4, dtype=torch.bool))], 4), torch.zeros(4, 1)
        ),
    )


_BATCHES: dict[int, FeatureBatch] = {}
_FILES = {module.__file__ for module in (channel, coordinator, local)} | {__file__}


def _frames(task: Task) -> tuple[Any, ...]:
    """Where a thread stands, and with which local values: of the pipeline's frames and the consumer's."""
    if task.is_done or task.where == "start":
        return ()
    assert task.thread is not None and task.thread.ident is not None
    frame, prints = sys._current_frames()[task.thread.ident], []
    while frame is not None:
        code = frame.f_code
        if code.co_filename in _FILES and code.co_name not in ("pause", "_work"):
            values = {name: value for name, value in frame.f_locals.items() if name != "self"}
            prints.append((code.co_qualname, frame.f_lasti, _print(values, 2)))
        frame = frame.f_back
    return tuple(prints)


def _print(value: Any, depth: int) -> Any:
    """Something hashable that is equal where the values are; clock readings are left out."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return "float"
    if isinstance(value, FeatureBatch):
        return ("batch", value.tokens.number)
    if isinstance(value, Condition):
        return ("condition", tuple(sorted(task.number for task in value.waiting)), value.owner and value.owner.number)
    if isinstance(value, dict):
        items = [(key, _print(item, depth + 1)) for key, item in value.items()]
        return tuple(items if all(type(key) is str for key in value) else sorted(items, key=lambda item: item[0]))
    if isinstance(value, list | tuple | collections.deque):
        return tuple(_print(item, depth + 1) for item in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(str, value)))
    if depth < 2 and type(value).__module__.startswith("paceline.pipeline"):
        return (type(value).__name__, _print(vars(value), depth + 1))
    return type(value).__name__


# ---------------------------------------------------------------------------------------------------------- the search
def explore(setting: Setting) -> Found:
    """Follow every choice of every reachable state."""
    found = Found()
    numbers: dict[object, int] = {}
    edges: dict[int, set[int]] = {}
    prefixes: list[list[Choice]] = [[]]
    while prefixes:
        prefix = prefixes.pop()
        found.executions += 1
        execution = Execution(setting)
        with replaced(execution.world):
            try:
                _follow(execution, prefix, prefixes, numbers, edges, found)
            finally:
                execution.world.end()
        assert len(numbers) < MAX_STATES, f"more than {MAX_STATES} states: is something counted in them?"
    found.states = len(numbers)
    if (loop := _loop(edges)) is not None:
        found.problems.setdefault(f"threads wake each other for ever, in {loop} states", [])
    return found


def _follow(
    execution: Execution,
    prefix: list[Choice],
    prefixes: list[list[Choice]],
    numbers: dict[object, int],
    edges: dict[int, set[int]],
    found: Found,
) -> None:
    """Repeat a prefix, and go on by the first choice each until a known state or the end is reached."""
    for choice in prefix[:-1]:
        execution.take(choice)
    path = list(prefix[:-1])
    before = numbers.get(execution.state()) if prefix else None
    choice = prefix[-1] if prefix else None
    while True:
        if choice is not None:
            execution.take(choice)
            path.append(choice)
        state = execution.state()
        is_known = state in numbers
        number = numbers.setdefault(state, len(numbers))
        if before is not None:
            edges.setdefault(before, set()).add(number)
        if is_known:
            return
        if (problem := execution.problem()) is not None:
            found.problems.setdefault(problem, list(path))
            return
        choices = execution.choices()
        if not choices:
            return
        prefixes.extend([*path, other] for other in choices[1:])
        before, choice = number, choices[0]


def _loop(edges: dict[int, set[int]]) -> int | None:
    """How many states are in or behind a loop; None without one."""
    incoming = collections.Counter(target for targets in edges.values() for target in targets)
    nodes = set(edges) | set(incoming)
    free = [node for node in nodes if not incoming[node]]
    num_left = len(nodes)
    while free:
        num_left -= 1
        for target in edges.get(free.pop(), ()):
            incoming[target] -= 1
            if not incoming[target]:
                free.append(target)
    return num_left or None
