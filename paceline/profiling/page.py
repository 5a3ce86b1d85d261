"""The page: a file in memory, one a process, in which its threads count and from which anybody may read.

Every block has one writer, its thread; readers copy and subtract, and never write but to the control word. So nothing
here takes a lock, waits for a reader, or needs the process to answer: a process that hangs, or is stopped, still shows
which stage each of its threads is in, and since when.

The file lies in ``/dev/shm`` and the run folder holds a link to it. A mapped file on a disk would let the kernel's
write-back stop the writer for as long as the disk takes.

Layout, in words of 8 bytes (int64, the machine's order): a header, the stages' names, and a block for each thread with
a cell for each stage.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import sys
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import PacelineError
from paceline.profiling.stats import NUM_BUCKETS, ProfileStats, merged

MAGIC = int.from_bytes(b"PACEPAGE", "little")
LAYOUT = 1
"""Raised whenever a word changes its place or meaning."""

WORD = 8
MAX_STAGES = 40
MAX_BLOCKS = 72
NAME_BYTES, STAGE_BYTES = 64, 48

# Header.
(
    _MAGIC, _LAYOUT, _PID, _STARTED, _BOOT, _MONOTONIC, _EPOCH_NS, CONTROL, INTERVAL, TRACE_UNTIL, SAMPLE_EVERY,
    _NUM_BLOCKS, _NUM_STAGES, _NUM_LOST, COST_OFF, COST_ON,
) = range(16)  # fmt: skip
GAUGES = 16
GAUGE_NAMES = (
    "step", "total_steps", "tokens", "batches", "started_ns", "queue", "queue_depth", "put_wait_ns", "get_wait_ns",
    "getting_since_ns", "putting", "targets", "first_step", "ready_wait_ns", "issued", "trained", "skipped", "retried",
)  # fmt: skip
"""Kept whether stages are counted or not: updates done and planned, tokens and micro-batches of this process, when
training began, batches that wait and may wait, time blocked in put (summed) and get, since when the drafter waits (0:
it does not), targets that wait in put, how many targets there are, the updates that were done when training began,
the part of the get time in which the batches of a whole step stood in the queue, and the ledger of micro-batches.
"""

CHANGED = 63
"""When the control word was changed, monotonic nanoseconds: a stage that was open then is not counted."""
_GAUGE = {name: GAUGES + number for number, name in enumerate(GAUGE_NAMES)}
_STAGES = 64
_BLOCKS = _STAGES + MAX_STAGES * STAGE_BYTES // WORD

# A block: its header, then the cells.
(
    STATE, TID, JOINED, LEFT, SEQUENCE, BEACON, OUTER, TOP_TOTAL, BATCH, NUM_BATCHES, _GENERATION,
) = range(11)  # fmt: skip
_NAME, _ROLE, CELLS = 12, 20, 32

# A cell.
(
    COUNT, TOTAL, SELF, MAX, _MAX_INTERVAL, _MAX_2, _MAX_INTERVAL_2, ERRORS, RECOMPUTE_COUNT, RECOMPUTE_TOTAL,
    DEVICE_COUNT, DEVICE_TOTAL, LAG_COUNT, LAG_TOTAL, DRAINED, OUTERMOST,
) = range(16)  # fmt: skip
HISTOGRAM = 16
CELL_WORDS = HISTOGRAM + NUM_BUCKETS
BLOCK_WORDS = CELLS + MAX_STAGES * CELL_WORDS
NUM_BYTES = WORD * (_BLOCKS + MAX_BLOCKS * BLOCK_WORDS)

FREE, LIVE, ENDED = range(3)
SINCE_BITS = 57
"""A beacon is one word, so that it is never torn: stage number + 1 above, monotonic nanoseconds below; 0: no stage."""

_RETRIES = 8
_PAUSE_S = 1e-4
"""Between two tries: a thread of this process that was stopped in the middle of writing gets to go on."""
SHARED_MEMORY = Path("/dev/shm")


class PageError(PacelineError):
    """A page that is not there, is none, or is of another version."""


class Page:
    """A process's own page.

    Args:
        place: The file; it must not exist.
        stages: Names of the stages, by number.
    Raises: OSError where there is no room for it.

    Attributes:
        words: All of it, int64.
        pid: The process that it is of; a forked child has it as well, and leaves it alone.
    """

    def __init__(self, place: Path, stages: tuple[str, ...]) -> None:
        if len(stages) > MAX_STAGES:
            raise ValueError(f"{len(stages)} stages; a page has room for {MAX_STAGES}")
        self.path, self.pid = place, os.getpid()
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):  # without it a full disk is a fatal signal at some later write
                os.posix_fallocate(descriptor, 0, NUM_BYTES)
            else:
                os.ftruncate(descriptor, NUM_BYTES)
            self._map = mmap.mmap(descriptor, NUM_BYTES)
        except BaseException:
            place.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        # never released: a thread that outlives the run may still write
        self.words = memoryview(self._map).cast("q")
        self._lock = threading.Lock()
        words = self.words
        words[_LAYOUT], words[_PID], words[_STARTED], words[_BOOT] = LAYOUT, *_identity(os.getpid())
        words[_MONOTONIC], words[_EPOCH_NS] = time.monotonic_ns(), time.time_ns()
        words[INTERVAL], words[SAMPLE_EVERY], words[_NUM_BLOCKS] = 1, 1, 1  # block 0 is for threads that have ended
        self._write_text(_BLOCKS + _NAME, "ended threads")
        words[_BLOCKS + STATE] = ENDED
        for number, name in enumerate(stages):
            self._write_text(_STAGES + number * STAGE_BYTES // WORD, name, STAGE_BYTES)
        words[_NUM_STAGES] = len(stages)
        words[_MAGIC] = MAGIC  # last: a reader that sees it sees all of the header

    def join(self, role: str, thread: str, tid: int) -> int | None:
        """A block for a thread in a role: the one that a thread of the same names has left, or another.

        Returns: the word at which it begins; None if all blocks are taken.
        """
        words = self.words
        with self._lock:
            blocks = [self._block(i) for i in range(1, words[_NUM_BLOCKS])]
            ended = [block for block in blocks if words[block + STATE] == ENDED]
            same = [b for b in ended if (self._text(b + _ROLE), self._text(b + _NAME)) == (_cut(role), _cut(thread))]
            if same:
                block = same[0]
            elif words[_NUM_BLOCKS] < MAX_BLOCKS:
                block = self._block(words[_NUM_BLOCKS])
                words[_NUM_BLOCKS] += 1
                self._write_text(block + _ROLE, role)
                self._write_text(block + _NAME, thread)
            elif ended:
                block = min(ended, key=lambda b: words[b + LEFT])
                self._retire(block)
                self._write_text(block + _ROLE, role)
                self._write_text(block + _NAME, thread)
            else:
                words[_NUM_LOST] += 1
                return None
            words[block + BEACON] = words[block + OUTER] = 0
            words[block + TID], words[block + JOINED], words[block + LEFT] = tid, time.monotonic_ns(), 0
            words[block + STATE] = LIVE
            return block

    def leave(self, block: int) -> None:
        """The block's thread has ended, or its role."""
        words = self.words
        words[block + BEACON] = words[block + OUTER] = 0
        words[block + SEQUENCE] += words[block + SEQUENCE] & 1  # it may have been killed while it wrote
        words[block + LEFT] = time.monotonic_ns()
        words[block + STATE] = ENDED

    def clear(self, block: int) -> None:
        """Give a block back, with all that it holds."""
        with self._lock:
            for word in range(BLOCK_WORDS):
                self.words[block + word] = 0
            if block == self._block(self.words[_NUM_BLOCKS] - 1):
                self.words[_NUM_BLOCKS] -= 1

    def set_control(self, control: Control) -> None:
        """Change the control word, as others may by `write_word`."""
        self.words[CHANGED] = time.monotonic_ns()
        self.words[CONTROL] = control.word

    def set_gauge(self, name: str, value: int) -> None:
        """Write a gauge; each has one writer at a time."""
        self.words[_GAUGE[name]] = value

    def snapshot(self) -> Snapshot:
        """What stands in it now."""
        return _read(lambda offset, length: self._map[offset : offset + length])

    def unlink(self) -> None:
        """Remove the file; the memory goes with the last who holds it."""
        with contextlib.suppress(OSError):
            if self.pid == os.getpid():
                self.path.unlink(missing_ok=True)

    def _block(self, number: int) -> int:
        return _BLOCKS + number * BLOCK_WORDS

    def _retire(self, block: int) -> None:
        """Add a block's counts to those of ended threads, and clear it."""
        words, kept = self.words, self._block(0)
        words[kept + SEQUENCE] |= 1
        words[block + SEQUENCE] |= 1
        words[kept + TOP_TOTAL] += words[block + TOP_TOTAL]
        for cell in range(CELLS, BLOCK_WORDS, CELL_WORDS):
            for word in range(CELL_WORDS):
                if not MAX <= word <= _MAX_INTERVAL_2:
                    words[kept + cell + word] += words[block + cell + word]
        for word in range(BLOCK_WORDS):
            if word not in (STATE, SEQUENCE, _GENERATION):
                words[block + word] = 0
        words[block + _GENERATION] += 1
        words[block + SEQUENCE] += 1
        words[kept + SEQUENCE] += 1

    def _write_text(self, word: int, text: str, size: int = NAME_BYTES) -> None:
        data = _cut(text, size).encode().ljust(size, b"\0")
        for i in range(size // WORD):
            self.words[word + i] = int.from_bytes(data[i * WORD : (i + 1) * WORD], "little", signed=True)

    def _text(self, word: int) -> str:
        return _text_of(self.words[word : word + NAME_BYTES // WORD].tobytes())


@dataclass(frozen=True)
class Running:
    """A stage that a thread is in.

    Attributes:
        since_ns: Monotonic clock of the process's machine.
    """

    stage: str
    since_ns: int


@dataclass(frozen=True)
class ThreadSnapshot:
    """A thread in a role, as far as it has come.

    Attributes:
        joined_ns, left_ns: When it began, and when it ended (0: it has not); monotonic.
        inner, outer: The stage that it is in, and the outermost one around it; None between stages.
        top_ns: Time in stages that were in no other, counted or not.
        batch: Number of the batch at hand.
        num_batches: How many it has begun.
        stages: By name, all that the process knows.
        longest: Longest run of each stage in the interval at hand and in the one before, by the interval's number.
        is_torn: Whether the thread wrote all the while; sums may then be one run apart.
        block: Number of its block; a thread of the same names takes over the block, and its counts, of one that ended.
        generation: Times that the block was emptied for other names, and its counts went to block 0.
        at_ns: Monotonic clock when this was read.
    """

    role: str
    thread: str
    tid: int
    is_live: bool
    joined_ns: int
    left_ns: int
    inner: Running | None
    outer: Running | None
    top_ns: int
    batch: int
    num_batches: int
    stages: dict[str, ProfileStats]
    longest: dict[str, dict[int, int]]
    is_torn: bool
    block: int = -1
    generation: int = 0
    at_ns: int = 0


@dataclass(frozen=True)
class Snapshot:
    """A page at one moment.

    Attributes:
        taken_ns: Monotonic clock when it was read.
        control: `Control`, and since when it is that.
        interval: Number of the interval at hand.
        sample_every: One in so many batches is counted.
        num_lost: Threads that found no block.
        cost_off_ns, cost_on_ns: What a stage costs by the process's own measurement, off and on; 0: not measured.
    """

    pid: int
    started: int
    boot: int
    taken_ns: int
    epoch_ns: int
    control: Control
    interval: int
    sample_every: int
    num_lost: int
    cost_off_ns: int
    cost_on_ns: int
    gauges: dict[str, int]
    stage_names: tuple[str, ...]
    threads: list[ThreadSnapshot] = field(default_factory=list)
    control_since_ns: int = 0

    @property
    def is_running(self) -> bool:
        """Whether the process that made the page still runs; one that was given its number since does not count."""
        return _identity(self.pid) == (self.pid, self.started, self.boot)

    def total(self, stage: str) -> ProfileStats:
        """A stage over all threads."""
        return merged(thread.stages[stage] for thread in self.threads)


@dataclass(frozen=True)
class Control:
    """The control word: whether stages are counted, and how often that is printed.

    Attributes:
        serial: Raised by every change, so that a stage that was open meanwhile is dropped.
        interval_s: Seconds between tables; 0: none are made.
    """

    serial: int = 0
    is_on: bool = False
    interval_s: float = 0.0

    @property
    def word(self) -> int:
        """As it stands in the page; 0 exactly when off at the beginning."""
        milliseconds = max(round(self.interval_s * 1000), self.interval_s > 0)
        return self.serial << 33 | self.is_on << 32 | min(milliseconds, 2**32 - 1)

    @classmethod
    def of(cls, word: int) -> Control:
        """Read a word."""
        return cls(word >> 33, bool(word >> 32 & 1), (word & 2**32 - 1) / 1000)

    def changed(self, is_on: bool, interval_s: float) -> Control:
        """The next one."""
        return Control(self.serial + 1, is_on, interval_s)


IS_ON = 1 << 32
"""Bit of the control word."""


def read_page(path: Path) -> Snapshot:
    """Read another process's page. It is not mapped, so that nothing the process does can hurt the reader.

    Raises: PageError if there is none, or it was written by another version.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            return _read(lambda offset, length: os.pread(file.fileno(), length, offset))
    except OSError as error:
        raise PageError(f"{path} cannot be read: {error.strerror}") from error


def write_word(path: Path, word: int, value: int) -> None:
    """Set a word of the header of another process's page: `CONTROL` or `TRACE_UNTIL`. Raises: PageError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _checked(os.pread(descriptor, _BLOCKS * WORD, 0))
            if word == CONTROL:
                _put(descriptor, CHANGED, time.monotonic_ns())
            _put(descriptor, word, value)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PageError(f"{path} cannot be written: {error.strerror}") from error


def folder_for_pages(fallback: Path) -> Path:
    """Where a page can lie in memory; `fallback` where there is no such place."""
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return SHARED_MEMORY
    return fallback


def open_page(folder: Path, stages: tuple[str, ...]) -> Page:
    """Make this process's page, linked to from `folder` (which is made); pages of dead processes are removed.

    Raises: OSError where it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_dead_pages(folder)
    pid, started, _ = _identity(os.getpid())
    place = folder_for_pages(folder)
    remove_leftovers(place)
    name = f"{_name_here()}-{pid}-{started}-{time.monotonic_ns()}.page"
    try:
        page = Page(place / name, stages)
    except OSError:
        if place == folder:
            raise
        place = folder  # /dev/shm of a container may be small
        page = Page(place / name, stages)
    if place != folder:
        try:
            os.symlink(page.path, folder / name)
        except OSError:
            page.unlink()
            raise
    return page


def close_page(page: Page, folder: Path) -> None:
    """Remove a page and its link; the parent's are left to it."""
    page.unlink()
    with contextlib.suppress(OSError):
        if page.pid == os.getpid():
            (folder / page.path.name).unlink(missing_ok=True)


def pages_in(folder: Path) -> list[Path]:
    """Pages that a run folder links to; the newest last."""
    ages = {}
    for path in folder.glob("paceline-*.page"):
        with contextlib.suppress(OSError):  # its process has removed it meanwhile
            ages[path] = path.lstat().st_mtime_ns
    return sorted(ages, key=lambda path: (ages[path], path.name))


def remove_dead_pages(folder: Path) -> None:
    """Remove pages that processes left behind when they were killed."""
    for path in pages_in(folder):
        try:
            if read_page(path).is_running:
                continue
            target = path.resolve()
        except (PacelineError, OSError):
            if _is_named_after_a_live_process(path):  # one that is being made, or another version's
                continue
            target = path
        for each in (target, path):
            with contextlib.suppress(OSError):
                if stat.S_ISREG(each.lstat().st_mode) or each.is_symlink():
                    each.unlink(missing_ok=True)


def remove_leftovers(place: Path) -> None:
    """Remove pages in `place` whose processes are gone and whose run folders perhaps are too.

    Only those of this user that were made in this namespace of process numbers: in another one, a number says nothing.
    """
    for path in place.glob(f"{_name_here()}-*.page"):
        if not path.is_symlink() and not _is_named_after_a_live_process(path):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _name_here() -> str:
    """How names of pages begin that this user makes where process numbers mean the same as here."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"paceline-{os.getuid()}-{namespace}"


def _is_named_after_a_live_process(path: Path) -> bool:
    with contextlib.suppress(ValueError, IndexError):
        pid, started = (int(part) for part in path.stem.split("-")[-3:-1])
        return started > 0 and _identity(pid)[1] == started
    return False


def _identity(pid: int) -> tuple[int, int, int]:
    """Number, start time in clock ticks (0: unknown or gone) and boot of a process: together they never come again."""
    started = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()  # the name before it may hold anything
        started = 0 if fields[0] in "ZX" else int(fields[19])  # a zombie runs no more
    return pid, started, boot_number()


def boot_number() -> int:
    """Of the running kernel: processes that have the same one have one monotonic clock. 0: unknown."""
    with contextlib.suppress(OSError, ValueError):
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return int(text.strip()[:15].replace("-", ""), 16)
    return 0


def _cut(text: str, size: int = NAME_BYTES) -> str:
    """Text that fits into `size` bytes and a line."""
    plain = "".join(c if c.isprintable() else "?" for c in text)
    return plain.encode(errors="replace")[:size].decode(errors="ignore")


def _text_of(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode(errors="replace")


_Get = Callable[[int, int], bytes]
"""Bytes of a page, from an offset on."""


def _checked(header: bytes) -> array[int]:
    """The header's words. Raises: PageError."""
    words = _words(header)
    if len(words) < _BLOCKS or words[_MAGIC] != MAGIC:
        raise PageError("this file is no profile page, or one that is being made")
    if words[_LAYOUT] != LAYOUT:
        raise PageError(
            f"the page has layout {words[_LAYOUT]}, this version reads {LAYOUT}: use the paceline that runs the "
            "training"
        )
    return words


def _put(descriptor: int, word: int, value: int) -> None:
    os.pwrite(descriptor, value.to_bytes(WORD, sys.byteorder, signed=True), word * WORD)


def _read(get: _Get) -> Snapshot:
    header = get(0, _BLOCKS * WORD)
    words = _checked(header)
    num_stages = min(words[_NUM_STAGES], MAX_STAGES)
    names = tuple(_text_of(header[_STAGES * WORD + i * STAGE_BYTES :][:STAGE_BYTES]) for i in range(num_stages))
    numbers = range(min(words[_NUM_BLOCKS], MAX_BLOCKS))
    threads = [thread for number in numbers if (thread := _read_block(get, number, names)) is not None]
    return Snapshot(
        pid=words[_PID],
        started=words[_STARTED],
        boot=words[_BOOT],
        taken_ns=time.monotonic_ns(),
        epoch_ns=words[_EPOCH_NS] + time.monotonic_ns() - words[_MONOTONIC],
        control=Control.of(words[CONTROL]),
        interval=words[INTERVAL],
        sample_every=words[SAMPLE_EVERY],
        num_lost=words[_NUM_LOST],
        cost_off_ns=words[COST_OFF],
        cost_on_ns=words[COST_ON],
        gauges={name: words[GAUGES + i] for i, name in enumerate(GAUGE_NAMES)},
        stage_names=names,
        threads=threads,
        control_since_ns=words[CHANGED],
    )


def _read_block(get: _Get, number: int, names: tuple[str, ...]) -> ThreadSnapshot | None:
    """A block as it was at one moment: read once more until nothing was written meanwhile."""
    block, is_torn = _BLOCKS + number * BLOCK_WORDS, True
    for attempt in range(_RETRIES):
        if attempt:
            time.sleep(_PAUSE_S)
        copy = _words(get(block * WORD, BLOCK_WORDS * WORD))
        after, at_ns = _words(get((block + SEQUENCE) * WORD, WORD)), time.monotonic_ns()
        if len(copy) < BLOCK_WORDS:
            raise PageError("the page is cut short: the rest of the file is missing")
        if after[0] == copy[SEQUENCE] and after[0] % 2 == 0:
            is_torn = False
            break
    if copy[STATE] == FREE:
        return None
    text = copy.tobytes()
    stages, longest = {}, {}
    for stage, name in enumerate(names):
        cell = copy[CELLS + stage * CELL_WORDS : CELLS + (stage + 1) * CELL_WORDS]
        longest[name] = {cell[_MAX_INTERVAL]: cell[MAX], cell[_MAX_INTERVAL_2]: cell[_MAX_2]}
        stages[name] = ProfileStats(
            count=cell[COUNT],
            total_ns=cell[TOTAL],
            self_ns=cell[SELF],
            max_ns=None,
            errors=cell[ERRORS],
            recompute_count=cell[RECOMPUTE_COUNT],
            recompute_ns=cell[RECOMPUTE_TOTAL],
            device_count=cell[DEVICE_COUNT],
            device_ns=cell[DEVICE_TOTAL],
            lag_count=cell[LAG_COUNT],
            lag_ns=cell[LAG_TOTAL],
            drained=cell[DRAINED],
            outermost=cell[OUTERMOST],
            histogram=cell[HISTOGRAM:],
        )
    return ThreadSnapshot(
        role=_text_of(text[_ROLE * WORD : _ROLE * WORD + NAME_BYTES]),
        thread=_text_of(text[_NAME * WORD : _NAME * WORD + NAME_BYTES]),
        tid=copy[TID],
        is_live=copy[STATE] == LIVE,
        joined_ns=copy[JOINED],
        left_ns=copy[LEFT],
        inner=_running(copy[BEACON], names),
        outer=_running(copy[OUTER], names) if copy[BEACON] else None,
        top_ns=copy[TOP_TOTAL],
        batch=copy[BATCH],
        num_batches=copy[NUM_BATCHES],
        stages=stages,
        longest=longest,
        is_torn=is_torn,
        block=number,
        generation=copy[_GENERATION],
        at_ns=at_ns,
    )


def _words(data: bytes) -> array[int]:
    words = array("q")
    words.frombytes(data[: len(data) // WORD * WORD])
    return words


def _running(beacon: int, names: tuple[str, ...]) -> Running | None:
    number = (beacon >> SINCE_BITS) - 1
    return Running(names[number], beacon & (1 << SINCE_BITS) - 1) if 0 <= number < len(names) else None
