"""Stages: what a thread is doing, by name, for how long. Anybody may import it.

    with stages.FORWARD:
        ...

Without a page open (`open_run`) this does nothing. With one, the thread's beacon always says which stage it is in; runs
are counted while the page's control word says so. A stage ends with its block, also by an exception. Nothing here may
stand inside a compiled region: the compiler would leave the whole function to Python.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from paceline.profiling import page as layout
from paceline.profiling.page import Page
from paceline.profiling.stats import NUM_BUCKETS

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

MAX_EVENTS = 100_000
"""Runs that a thread keeps of one trace window."""

DEVICE_EVERY = 8
"""One in so many batches has its stages timed on the device."""

_BITS = layout.SINCE_BITS
_CELLS, _CELL_WORDS, _HISTOGRAM = layout.CELLS, layout.CELL_WORDS, layout.HISTOGRAM
_COUNT, _TOTAL, _SELF, _MAX, _ERRORS = layout.COUNT, layout.TOTAL, layout.SELF, layout.MAX, layout.ERRORS
_LAST_BUCKET = NUM_BUCKETS - 1

_clock = time.monotonic_ns


class _Here(threading.local):
    """What a thread knows of itself."""

    recorder: Recorder | None = None
    role: str | None = None
    lost: Page | None = None  # the page that had no block left for it

    def __init__(self) -> None:
        self.recorders: dict[str, Recorder] = {}


_here = _Here()
_page: Page | None = None
_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
_left: deque[tuple[Page, str, str, int, deque[tuple[int, int, int, int, int]]]] = deque(maxlen=layout.MAX_BLOCKS)
_recorders_lock = threading.Lock()
_times_device = False
_default_role = "other"


class Recorder:
    """Writes the block of one thread in one role."""

    def __init__(self, page: Page, block: int, role: str, thread: str, tid: int) -> None:
        self.page, self.words, self.block = page, page.words, block
        self.role, self.thread, self.tid = role, thread, tid
        self.stack: list[list[Any]] = []  # [stage, since, control word, time in stages inside, device events]
        self.recomputing = 0
        self.is_counted = True
        self.clock: Any = None  # the device's, as this role sees it
        self.device: Any = None  # the same while a batch is timed
        self.batch = -1
        self.num_batches = page.words[block + layout.NUM_BATCHES]  # those of the thread that had the block before
        self.events: deque[tuple[int, int, int, int, int]] = deque(maxlen=MAX_EVENTS)  # stage, begin, end, depth, batch
        with _recorders_lock:
            _recorders.add(self)

    def __del__(self) -> None:
        try:  # the thread has ended; as the interpreter does there may be no module left to do it with
            if os.getpid() == self.page.pid:  # in a forked child it is the parent's thread, which goes on
                self.page.leave(self.block)
                if self.events:  # the trace window that they belong to may still be open
                    _left.append((self.page, self.role, self.thread, self.tid, self.events))
        except Exception:
            pass

    def enter(self, stage: int) -> None:
        words, stack, now = self.words, self.stack, _clock()
        control = words[layout.CONTROL]
        pair = self.device.begin() if self.device is not None and control & layout.IS_ON and _DEVICE[stage] else None
        stack.append([stage, now, control, 0, pair])
        beacon = stage + 1 << _BITS | now
        words[self.block + layout.BEACON] = beacon
        if len(stack) == 1:
            words[self.block + layout.OUTER] = beacon
        if stage == _RECOMPUTE:
            self.recomputing += 1

    def exit(self, stage: int, failed: bool) -> None:
        stack = self.stack
        if not stack or (stack[-1][0] != stage and not self._unwind(stage)):  # the page was opened inside of it
            return
        words, block = self.words, self.block
        _, since, control, inside, pair = stack.pop()
        if pair is not None:
            self.clock.end(pair, stage)
        now = _clock()
        elapsed = now - since
        if stack:
            outer = stack[-1]
            outer[3] += elapsed
            beacon = outer[0] + 1 << _BITS | outer[1]
        else:
            beacon = 0
        if stage == _RECOMPUTE:
            self.recomputing -= 1
        if control & layout.IS_ON and control == words[layout.CONTROL] and self.is_counted:
            self._count(stage, elapsed, elapsed - inside, beacon, failed)
        elif beacon:
            words[block + layout.BEACON] = beacon
        else:  # what is not counted is covered all the same
            sequence = words[block + layout.SEQUENCE] | 1
            words[block + layout.SEQUENCE] = sequence
            words[block + layout.BEACON] = words[block + layout.OUTER] = 0
            words[block + layout.TOP_TOTAL] += elapsed
            words[block + layout.SEQUENCE] = sequence + 1
        if now < words[layout.TRACE_UNTIL]:
            self.events.append((stage, since, now, len(stack), self.batch))

    def _unwind(self, stage: int) -> bool:
        """Drop stages that were entered and never left, as an interrupt may do; whether `stage` itself is open."""
        stack = self.stack
        if all(frame[0] != stage for frame in stack):
            return False
        while stack[-1][0] != stage:
            if stack.pop()[0] == _RECOMPUTE:
                self.recomputing -= 1
        return True

    def _count(self, stage: int, elapsed: int, self_ns: int, beacon: int, failed: bool) -> None:
        words, block = self.words, self.block
        cell = block + _CELLS + stage * _CELL_WORDS
        bits = elapsed.bit_length()  # `stats.bucket_of`, without a call
        bucket = (bits - 11) * 8 + (elapsed >> (bits - 4) & 7) if bits > 10 else 0
        # no call from here on: a thread that has to give up the interpreter does so in a call
        sequence = words[block + layout.SEQUENCE] | 1  # odd: a reader takes no copy now
        words[block + layout.SEQUENCE] = sequence
        words[block + layout.BEACON] = beacon
        if not beacon:
            words[block + layout.OUTER] = 0
            words[block + layout.TOP_TOTAL] += elapsed
            words[cell + layout.OUTERMOST] += 1
        if self.recomputing and stage != _RECOMPUTE:
            words[cell + layout.RECOMPUTE_COUNT] += 1
            words[cell + layout.RECOMPUTE_TOTAL] += elapsed
        else:
            words[cell] += 1
            words[cell + _TOTAL] += elapsed
            words[cell + _SELF] += self_ns
            interval = words[layout.INTERVAL]
            longest = cell + _MAX + ((interval & 1) << 1)
            if words[longest + 1] != interval:
                words[longest] = elapsed
                words[longest + 1] = interval
            elif elapsed > words[longest]:
                words[longest] = elapsed
            words[cell + _HISTOGRAM + (bucket if bucket < _LAST_BUCKET else _LAST_BUCKET)] += 1
            if failed:
                words[cell + _ERRORS] += 1
        words[block + layout.SEQUENCE] = sequence + 1

    def next_batch(self, number: int) -> None:
        words, block = self.words, self.block
        self.batch = words[block + layout.BATCH] = number
        self.num_batches += 1
        words[block + layout.NUM_BATCHES] = self.num_batches
        self.is_counted = is_sampled(self.num_batches, words[layout.SAMPLE_EVERY])
        if _times_device:
            self._next_batch_on_device()

    def _next_batch_on_device(self) -> None:
        if self.clock is None:
            from paceline.profiling.device import DeviceClock  # imports torch, which most who import this do not need

            self.clock = DeviceClock()
        self.clock.harvest(self._settle)
        is_timed = is_sampled(self.num_batches, DEVICE_EVERY) and bool(self.words[layout.CONTROL] & layout.IS_ON)
        self.device = self.clock if is_timed else None
        if is_timed:
            self.clock.next_batch()

    def _settle(self, stage: int, device_ns: int, lag_ns: int | None, is_drained: bool) -> None:
        words, block = self.words, self.block
        cell = block + _CELLS + stage * _CELL_WORDS
        sequence = words[block + layout.SEQUENCE] | 1
        words[block + layout.SEQUENCE] = sequence
        words[cell + layout.DEVICE_COUNT] += 1
        words[cell + layout.DEVICE_TOTAL] += device_ns
        if lag_ns is not None:
            words[cell + layout.LAG_COUNT] += 1
            words[cell + layout.LAG_TOTAL] += lag_ns
            words[cell + layout.DRAINED] += is_drained
        words[block + layout.SEQUENCE] = sequence + 1


def is_sampled(number: int, every: int) -> bool:
    """Whether this batch is among one in `every`: evenly spread, and in no step with micro-batches, of which every k-th
    makes an update (multiples of the golden ratio)."""
    return every <= 1 or (number * 2_654_435_769 & 0xFFFF_FFFF) * every < 1 << 32


class Stage:
    """A named stretch of a thread's time; one object serves all threads.

    Args:
        name: Part of the interface: the table, the files and `paceline top` show it.
        on_device: Whether it launches work on the device, whose time is then measured as well.
    """

    __slots__ = ("name", "number")

    def __init__(self, name: str, on_device: bool = False) -> None:
        if name in _NAMES:
            raise ValueError(f"there is a stage {name} already")
        self.name, self.number = name, len(_NAMES)
        _NAMES.append(name)
        _DEVICE.append(on_device)

    def __enter__(self) -> Stage:
        page = _page
        if page is not None:
            recorder = _here.recorder
            if recorder is None or recorder.page is not page:
                recorder = _join(page)
            if recorder is not None:
                recorder.enter(self.number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = _here.recorder
        if recorder is not None:
            recorder.exit(self.number, kind is not None and kind.__name__ not in _NO_FAILURE)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: every call is one run."""

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return timed


_NO_FAILURE = {"_StopRecomputationError", "Empty", "Full", "GeneratorExit"}
"""Exceptions that end a stage as it should end: torch leaves a layer that it computes again once it has what it needs.
"""

_NAMES: list[str] = []
_DEVICE: list[bool] = []

# The target's, in the order of a batch.
READ_BATCH = Stage("read_batch")
H2D_SYNC = Stage("h2d_sync", on_device=True)
MODEL_FORWARD = Stage("model_forward", on_device=True)
PACK_HIDDEN = Stage("pack_hidden", on_device=True)
PREV_CPU_COPY_SYNC = Stage("prev_cpu_copy_sync")
LOSS_MASK_SUM_SYNC = Stage("loss_mask_sum_sync")
PUT_WAIT = Stage("put_wait")
# The drafter's.
GET_WAIT = Stage("get_wait")
DRAW_BLOCKS = Stage("draw_blocks")
FORWARD = Stage("forward", on_device=True)
CREATE_BLOCK_MASK = Stage("create_block_mask", on_device=True)
CREATE_BLOCK_MASK_SWA = Stage("create_block_mask_swa", on_device=True)
LAYERS = Stage("layers", on_device=True)
CHUNKED_LOSS = Stage("chunked_loss", on_device=True)
BACKWARD = Stage("backward", on_device=True)
RECOMPUTE = Stage("recompute", on_device=True)
GRAPH_REPLAY = Stage("graph_replay", on_device=True)
OPTIMIZER = Stage("optimizer", on_device=True)
GRAD_NORM_ITEM = Stage("grad_norm_item")
VALIDATE = Stage("validate")
CHECKPOINT_SNAPSHOT = Stage("checkpoint_snapshot")
LOG = Stage("log")
JOIN_TARGETS = Stage("join_targets")
# The writer's, beside both.
CHECKPOINT_WRITE = Stage("checkpoint_write")

# Of the driver's threads that wait for targets in other processes.
REMOTE_WAIT = Stage("remote_wait")
FETCH = Stage("fetch")

_RECOMPUTE = RECOMPUTE.number
TARGET_STAGES = tuple(_NAMES[: PUT_WAIT.number + 1])
DRAFTER_STAGES = tuple(_NAMES[GET_WAIT.number : CHECKPOINT_WRITE.number])
WRITER_STAGES = (CHECKPOINT_WRITE.name,)
LANE_STAGES = (REMOTE_WAIT.name, FETCH.name)
WAITS = (
    PUT_WAIT.name,
    GET_WAIT.name,
    GRAD_NORM_ITEM.name,
    PREV_CPU_COPY_SYNC.name,
    LOSS_MASK_SUM_SYNC.name,
    REMOTE_WAIT.name,
)
"""Stages in which a thread waits for others or for the device."""


class as_role:
    """While entered, the thread's stages count for this role."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._previous: str | None = None

    def __enter__(self) -> as_role:
        self._previous, _here.role = _here.role, self._role
        _here.recorder = _here.recorders.get(self._role)
        return self

    def __exit__(self, *exc: object) -> None:
        _here.role = self._previous
        _here.recorder = _here.recorders.get(_here.role or _default_role)


def next_batch(number: int) -> None:
    """The thread begins work on this batch, in its role."""
    page = _page
    if page is not None and (recorder := _join(page)) is not None:
        recorder.next_batch(number)


def synchronised(event: Any) -> None:
    """The thread has just waited for this timed event: device and host stand at the same moment."""
    recorder = _here.recorder
    if _times_device and recorder is not None and recorder.clock is not None:
        recorder.clock.synchronised(event)


def times_device() -> bool:
    """Whether events should be timed ones."""
    return _times_device and is_on()


def is_on() -> bool:
    """Whether runs are counted."""
    page = _page
    return page is not None and bool(page.words[layout.CONTROL] & layout.IS_ON)


def set_gauge(name: str, value: int) -> None:
    """Show a number on the page, counted or not."""
    page = _page
    if page is not None:
        page.set_gauge(name, value)


class TimedQueue:
    """A `queue.Queue` whose waits are stages: only time blocked counts, a call that need not wait costs no clock.

    For queues of one's own; the pipeline's channel, whose rules for waiting are its own, enters the stages itself.
    """

    def __init__(self, inner: queue.Queue[Any], put_wait: Stage = PUT_WAIT, get_wait: Stage = GET_WAIT) -> None:
        self._inner, self._put_wait, self._get_wait = inner, put_wait, get_wait

    def put(self, item: Any, timeout: float | None = None) -> None:
        """Raises: queue.Full after `timeout` seconds."""
        try:
            self._inner.put_nowait(item)
        except queue.Full:
            with self._put_wait:
                self._inner.put(item, timeout=timeout)

    def get(self, timeout: float | None = None) -> Any:
        """Raises: queue.Empty after `timeout` seconds."""
        try:
            return self._inner.get_nowait()
        except queue.Empty:
            with self._get_wait:
                return self._inner.get(timeout=timeout)


def open_run(folder: Path, *, times_device: bool = False, default_role: str = "other") -> Page | None:
    """Make this process's page below a run's profile folder; None, with one warning, where that cannot be done.

    Args:
        times_device: Time stages on the current CUDA device too.
        default_role: Of threads that name none, such as autograd's.
    """
    global _page, _times_device, _default_role
    try:
        page = layout.open_page(folder, tuple(_NAMES))
    except OSError as error:
        log.warning("profiling is off: its page cannot be made below %s: %s", folder, error.strerror or error)
        return None
    page.words[layout.COST_OFF], page.words[layout.COST_ON] = measure_cost(page)
    _times_device, _default_role = times_device, default_role
    _page = page
    return page


def close_run(page: Page | None, folder: Path) -> None:
    """The run is over: stages do nothing again. Threads that are still at it keep the page's memory."""
    global _page, _times_device
    if page is not None:
        if _page is page:
            _page, _times_device = None, False
        _left.clear()
        layout.close_page(page, folder)


def measure_cost(page: Page, rounds: int = 300) -> tuple[int, int]:
    """Nanoseconds that a stage costs here, off and on (without device events), by trying; leaves no trace."""
    block = page.join("profiler", "self-test", 0)
    if block is None:
        return 0, 0
    costs = []
    recorder = Recorder(page, block, "profiler", "self-test", 0)
    for word in (0, layout.Control(1, True).word):
        page.words[layout.CONTROL] = word
        best = None
        for _ in range(5):
            started = time.perf_counter_ns()
            for _ in range(rounds):
                recorder.enter(0)
                recorder.exit(0, False)
            took = (time.perf_counter_ns() - started) // rounds
            best = took if best is None else min(best, took)
        costs.append(best or 0)
    page.words[layout.CONTROL] = 0
    del recorder
    page.clear(block)
    return costs[0], costs[1]


def take_left_events(page: Page) -> list[dict[str, Any]]:
    """What threads that have ended since recorded of a trace window, once."""
    taken = [_left.popleft() for _ in range(len(_left))]
    return [
        {"role": role, "thread": thread, "tid": tid, "events": [list(event) for event in events], "open": []}
        for of, role, thread, tid, events in taken
        if of is page
    ]


def recorders() -> list[Recorder]:
    """Those of all threads that live."""
    with _recorders_lock:
        return list(_recorders)


def collect_events(page: Page, until_ns: int) -> dict[str, Any]:
    """Every stage that ended in the trace window, by thread, and those that are open; monotonic nanoseconds.

    An event is ``[stage number, begin, end, depth, batch]``.
    """
    snapshot = page.snapshot()
    threads = take_left_events(page)
    for recorder in recorders():
        if recorder.page is page:
            events, recorder.events = recorder.events, type(recorder.events)(maxlen=recorder.events.maxlen)
            frames = enumerate(list(recorder.stack))
            still = [[frame[0], frame[1], until_ns, depth, recorder.batch] for depth, frame in frames]
            threads.append(
                {
                    "role": recorder.role,
                    "thread": recorder.thread,
                    "tid": recorder.tid,
                    "events": [list(event) for event in list(events)],  # one may still come in
                    "open": [frame for frame in still if frame[1] < until_ns],
                }
            )
    return {
        "pid": snapshot.pid,
        "until_ns": until_ns,
        "monotonic_ns": snapshot.taken_ns,
        "epoch_ns": snapshot.epoch_ns,
        "stages": list(snapshot.stage_names),
        "threads": threads,
    }


@contextlib.contextmanager
def named_thread(name: str) -> Iterator[None]:
    """While entered, the operating system shows the thread by this name (15 bytes of it); workers that it starts
    inherit it. Before Python 3.14 all threads are called python there."""
    tid = threading.get_native_id()
    previous = _comm(tid)
    _write_comm(tid, name)
    try:
        yield
    finally:
        if previous:
            _write_comm(tid, previous)


def _write_comm(tid: int, name: str) -> None:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{tid}/comm", "wb", buffering=0) as file:
        file.write(name.encode(errors="replace")[:15])


def _join(page: Page) -> Recorder | None:
    """The thread's recorder in its role; None where the page is full."""
    if _here.lost is page:
        return None
    role = _here.role or _default_role
    recorder = _here.recorders.get(role)
    if recorder is None or recorder.page is not page:
        thread, tid = threading.current_thread(), threading.get_native_id()
        # a thread that was not made in Python, such as autograd's, has its name from the system alone
        name = (_comm(tid) if isinstance(thread, threading._DummyThread) else "") or thread.name
        block = page.join(role, name, tid)
        if block is None:
            _here.lost = page
            return None
        # those of an earlier run's page would keep its memory
        _here.recorders = {role: other for role, other in _here.recorders.items() if other.page is page}
        recorder = _here.recorders[role] = Recorder(page, block, role, name, tid)
    _here.recorder = recorder
    return recorder


def _comm(tid: int) -> str:
    try:
        with open(f"/proc/self/task/{tid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _forget() -> None:
    """In a forked child: the page is the parent's."""
    global _page, _times_device, _here, _recorders, _recorders_lock
    _page, _times_device = None, False
    _recorders_lock = threading.Lock()  # another thread of the parent may have held it
    _here, _recorders = _Here(), weakref.WeakSet()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
