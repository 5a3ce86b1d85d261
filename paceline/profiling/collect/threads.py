"""Level 1: what the threads of some processes did over a window, read from /proc by a thread of our own.

Nothing here stops a thread or needs a right beyond seeing it; only the name of the system call that a thread sleeps in
needs the right to trace it. Our own CPU time is held to `BUDGET` of a core: threads that run are read at every pass,
those that have slept since they were last read only now and then, as nothing about them can have changed in between.
"""

from __future__ import annotations

import bisect
import os
import platform
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from paceline.profiling import evidence
from paceline.profiling.collect.process import Identity, Stat, end_of, read_stat, read_text
from paceline.profiling.evidence import LEVEL_NAMES, Disturbance, Figure, Level
from paceline.profiling.statistics import mean_interval

BUDGET = 0.02
"""Share of a core for our own passes; the first and the last are on top of it."""
SHORTEST_PAUSE_S = 0.05
SUB_WINDOWS = 12
"""That intervals are made from."""
SLOW_READINGS = 6
"""Of a thread that sleeps, over the window."""
SLEEPING = ("S", "D")
MOST_READINGS = 4096
"""Of one thread that are kept; a longer look drops every other one."""

SHORTEST_S = 1e-3
"""Between two readings that a share is made from."""

_NS = 1e9


def _ticks_per_s() -> int:
    try:
        return int(os.sysconf("SC_CLK_TCK")) or 100
    except (OSError, ValueError):
        return 100


_TICKS_PER_S = _ticks_per_s()

_X86_64 = {
    0: "read", 1: "write", 7: "poll", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev", 23: "select",
    16: "ioctl", 24: "sched_yield", 9: "mmap", 11: "munmap", 28: "madvise", 34: "pause", 35: "nanosleep", 42: "connect",
    43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock",
    74: "fsync", 75: "fdatasync", 128: "rt_sigtimedwait", 130: "rt_sigsuspend", 202: "futex", 208: "io_getevents",
    219: "restart_syscall", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6",
    271: "ppoll", 275: "splice", 277: "sync_file_range", 281: "epoll_pwait", 288: "accept4", 295: "preadv",
    299: "recvmmsg", 333: "io_pgetevents", 426: "io_uring_enter", 441: "epoll_pwait2", 449: "futex_waitv",
    455: "futex_wait",
}  # fmt: skip
_AARCH64 = {
    4: "io_getevents", 22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat", 63: "read", 64: "write",
    65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 69: "preadv", 72: "pselect6", 73: "ppoll", 76: "splice",
    82: "fsync", 83: "fdatasync", 84: "sync_file_range", 95: "waitid", 98: "futex", 101: "nanosleep",
    115: "clock_nanosleep", 124: "sched_yield", 128: "restart_syscall", 133: "rt_sigsuspend", 137: "rt_sigtimedwait",
    202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 215: "munmap",
    222: "mmap", 233: "madvise", 242: "accept4", 243: "recvmmsg", 260: "wait4", 292: "io_pgetevents",
    426: "io_uring_enter", 441: "epoll_pwait2", 449: "futex_waitv", 455: "futex_wait",
}  # fmt: skip
SYSCALLS = {"x86_64": _X86_64, "aarch64": _AARCH64}

_WAIT_CHANNELS = (
    ("futex", "futex"), ("hrtimer_nanosleep", "clock_nanosleep"), ("do_nanosleep", "clock_nanosleep"),
    ("ep_poll", "epoll_wait"), ("do_epoll_wait", "epoll_wait"), ("do_sys_poll", "poll"), ("poll_schedule", "poll"),
    ("do_poll", "poll"), ("do_select", "select"), ("core_sys_select", "select"), ("pipe_read", "read"),
    ("anon_pipe_read", "read"), ("pipe_write", "write"), ("anon_pipe_write", "write"), ("do_wait", "wait4"),
    ("inet_csk_accept", "accept"), ("unix_accept", "accept"), ("unix_stream_read", "recvfrom"),
    ("unix_stream_data", "recvfrom"), ("sk_wait_data", "recvfrom"), ("wait_woken", "recvfrom"),
    ("io_cqring_wait", "io_uring_enter"), ("do_sigtimedwait", "rt_sigtimedwait"),
)  # fmt: skip
"""Kernel functions that a thread sleeps in, by how their names begin, and the call that leads there."""


def syscall_name(text: str, machine: str | None = None) -> str:
    """Of a line of /proc/.../syscall; empty: it runs, or is in none. An unknown one is ``syscall_N``."""
    word = text.split(maxsplit=1)[0] if text.strip() else ""
    if not word.isdecimal():
        return ""
    return SYSCALLS.get(machine or platform.machine(), {}).get(int(word), f"syscall_{word}")


def channel_name(text: str) -> str:
    """Of /proc/.../wchan: the system call that it stands for, else the kernel's function; empty: none is shown."""
    text = text.strip()
    if not text or text == "0" or not re.fullmatch(r"[\w.]{1,64}", text):
        return ""
    return next((call for begin, call in _WAIT_CHANNELS if text.startswith(begin)), text)


def moment(pid: int, tid: int) -> tuple[str, str]:
    """State and system call of a thread right now; each empty where it cannot be read."""
    folder = f"/proc/{pid}/task/{tid}"
    stat = read_stat(folder)
    if stat is None:
        return "", ""
    return stat.state, _call_of(folder) if stat.state in SLEEPING else ""


def _call_of(folder: str) -> str:
    """Of a thread that sleeps: by its system call, else by where in the kernel it sleeps."""
    text = read_text(f"{folder}/syscall", 256)
    if text is not None:
        return syscall_name(text)
    return channel_name(read_text(f"{folder}/wchan", 256) or "")


def parse_schedstat(text: str) -> tuple[int, int, int] | None:
    """CPU time and run-queue wait in ns, and how often it was put on a CPU; None where the kernel does not count."""
    fields = text.split()
    if len(fields) < 3 or not all(word.isdecimal() for word in fields[:3]):
        return None
    cpu, wait, times = (int(word) for word in fields[:3])
    return (cpu, wait, times) if cpu or times else None


def parse_switches(text: str) -> tuple[int, int] | None:
    """Voluntary and involuntary context switches, of /proc/.../status."""
    found = dict(re.findall(r"^(voluntary|nonvoluntary)_ctxt_switches:\s*(\d+)", text, re.MULTILINE))
    if len(found) < 2:
        return None
    return int(found["voluntary"]), int(found["nonvoluntary"])


@dataclass(frozen=True)
class ThreadLook:
    """What the threads did.

    Attributes:
        threads: By process and number; those that ended as well.
        halves: CPU and run-queue shares, by process and thread, of the first and the second half; a thread that was not
            there, or read once only, is missing. The wait is 0 where the kernel does not count it.
        ends: How processes ended that did: ``exited``, ``zombie`` or ``recycled``.
        seconds: Length of the window.
    """

    threads: list[evidence.Thread]
    halves: tuple[dict[tuple[int, int], tuple[float, float]], dict[tuple[int, int], tuple[float, float]]]
    host: evidence.Host
    level: Level
    ends: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Reading:
    """Counters of a thread at a moment.

    Attributes:
        at: Seconds, monotonic.
        cpu: Seconds on a CPU.
        wait: Seconds ready without one; None where the kernel does not count.
        mark: Changes whenever the thread has run.
    """

    at: float
    cpu: float
    wait: float | None
    mark: tuple[int, int]


@dataclass
class Watched:
    """A thread under watch."""

    pid: int
    tid: int
    started: int
    is_new: bool
    comm: str = ""
    is_gone: bool = False
    readings: list[Reading] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    state: str = ""
    call: str = ""
    last_pass: int = -1
    next_at: float = 0.0
    switches: tuple[float, int, int] | None = None
    rates: tuple[float, float] | None = None

    @property
    def folder(self) -> str:
        return f"/proc/{self.pid}/task/{self.tid}"

    def has_run(self, reading: Reading) -> bool:
        """Whether it has run since it was last read."""
        return not self.readings or self.readings[-1].mark != reading.mark

    def add(self, reading: Reading, state: str, call: str, number: int) -> None:
        """Take a reading, of pass `number`; it stands for the passes that left the thread out."""
        passes = max(1, number - self.last_pass) if self.last_pass >= 0 else 1
        if passes > 1:  # it slept all the time, or until about now
            self._count(self.state, self.call, passes - 1)
        self._count(state, call, 1)
        self.state, self.call, self.last_pass = state, call, number
        self.readings.append(reading)
        if len(self.readings) > MOST_READINGS:
            del self.readings[1:-1:2]

    def _count(self, state: str, call: str, times: int) -> None:
        self.states[state] += times
        if call:
            self.calls[call] += times


class ThreadWatch:
    """Watches the threads of some processes for a while, from a thread of our own.

    Threads and processes may come and go meanwhile. After `seconds` it ends by itself; `stop` may come before.
    """

    def __init__(self, identities: Sequence[Identity], seconds: float) -> None:
        self._identities = list({identity.pid: identity for identity in identities}.values())
        self._seconds = max(seconds, 0.0)
        self._live: dict[tuple[int, int], Watched] = {}
        self._gone: list[Watched] = []
        self._ends: dict[int, str] = {}
        self._passes = 0
        self._errors = 0
        self._cpu_s = 0.0
        self._begin = self._end = 0.0
        self._stop = threading.Event()
        self._worker: threading.Thread | None = None
        self._look: ThreadLook | None = None
        self._quotas: list[Quota] = []
        self._cpus = 0.0

    def start(self) -> None:
        """Take the first pass, and the others from a thread."""
        if self._worker is not None:
            return
        before = time.thread_time()
        self._begin = self._end = time.monotonic()
        self._take_pass(is_full=True)
        if self._identities:
            first = self._identities[0].pid
            self._quotas = [quota for folder in cgroup_folders(first) if (quota := read_quota(folder))]
            self._cpus = usable_cpus(first, self._quotas)
        self._cpu_s += time.thread_time() - before
        self._worker = threading.Thread(target=self._run, name="thread-watch", daemon=True)
        self._worker.start()

    def stop(self) -> ThreadLook:
        """End the watch, if it has not ended by itself, and say what was seen; the same again if asked again."""
        if self._look is None:
            self._stop.set()
            if self._worker is not None:
                self._worker.join()
            self._look = self._summary()
        return self._look

    def _run(self) -> None:
        before, base = time.thread_time(), self._cpu_s
        deadline = self._begin + self._seconds
        pause = SHORTEST_PAUSE_S
        while not self._has_ended():
            left = deadline - time.monotonic()
            # Random pauses do not keep step with what the threads do in a loop.
            if self._stop.wait(max(0.0, min(left, pause * random.uniform(0.5, 1.5)))) or left <= pause / 2:
                break
            spent = time.thread_time()
            self._take_pass()
            spent = time.thread_time() - spent
            pause = min(max(SHORTEST_PAUSE_S, spent / BUDGET), max(SHORTEST_PAUSE_S, self._seconds / 4))
            self._cpu_s = base + time.thread_time() - before
        self._take_pass(is_full=True)
        self._cpu_s = base + time.thread_time() - before

    def _has_ended(self) -> bool:
        return len(self._ends) == len(self._identities)

    def _take_pass(self, *, is_full: bool = False) -> None:
        """Read what is due, or all threads with their context switches."""
        for identity in self._identities:
            pid = identity.pid
            if pid in self._ends:
                continue
            if end := end_of(identity):
                self._ends[pid] = end
                self._lose(pid, set())
                continue
            try:
                tids = {int(name) for name in os.listdir(f"/proc/{pid}/task")}
            except FileNotFoundError:
                self._ends[pid] = end_of(identity) or "exited"
                self._lose(pid, set())
                continue
            except (OSError, ValueError):
                self._errors += 1
                continue
            self._lose(pid, tids)
            for tid in tids:
                self._visit(pid, tid, is_full)
        self._passes += 1
        self._end = time.monotonic()

    def _lose(self, pid: int, tids: set[int]) -> None:
        """Threads of a process that are none of `tids` have ended."""
        for key in [key for key in self._live if key[0] == pid and key[1] not in tids]:
            thread = self._live.pop(key)
            thread.is_gone = True
            self._gone.append(thread)

    def _visit(self, pid: int, tid: int, is_full: bool) -> None:
        """Read one thread if it is due."""
        thread = self._live.get((pid, tid))
        if thread is not None and not is_full and time.monotonic() < thread.next_at:
            return
        folder = f"/proc/{pid}/task/{tid}"
        counters = parse_schedstat(read_text(f"{folder}/schedstat", 256) or "")
        now = time.monotonic()
        if thread is not None and counters is not None and not is_full:
            reading = _reading(now, counters)
            if thread.state in SLEEPING and not thread.has_run(reading):  # then it is where it was
                thread.add(reading, thread.state, thread.call, self._passes)
                thread.next_at = self._next_time(now)
                return
        stat = read_stat(folder)
        if stat is None:
            self._errors += os.path.exists(f"{folder}/stat")
            return
        if thread is not None and thread.started != stat.started:  # the number of one that has ended, given again
            self._lose(pid, {other for process, other in self._live if process == pid} - {tid})
            thread = None
        is_first = thread is None
        if thread is None:
            thread = self._live[pid, tid] = Watched(pid, tid, stat.started, is_new=self._passes > 0)
        reading = _reading(now, counters) if counters else _reading_of(now, stat)
        sleeps, has_run = stat.state in SLEEPING, thread.has_run(reading)
        call = "" if not sleeps else thread.call if thread.call and not has_run else _call_of(folder)
        thread.comm = stat.name
        thread.add(reading, stat.state, call, self._passes)
        if is_first and not thread.is_new and not _is_busy(reading, stat):
            # Spread, so that no pass reads them all.
            thread.next_at = now + self._seconds / SUB_WINDOWS * random.random()
        else:
            thread.next_at = now if has_run or not sleeps else self._next_time(now)
        if is_full or is_first:
            self._read_switches(thread, now)

    def _next_time(self, now: float) -> float:
        """When a thread that sleeps is due again."""
        return now + self._seconds / SLOW_READINGS * random.uniform(0.7, 1.1)

    def _read_switches(self, thread: Watched, now: float) -> None:
        counts = parse_switches(read_text(f"{thread.folder}/status") or "")
        if counts is None:
            return
        if thread.switches is None:
            thread.switches = (now, *counts)
        elif now > thread.switches[0]:
            seconds = now - thread.switches[0]
            _, voluntary, involuntary = thread.switches
            thread.rates = (counts[0] - voluntary) / seconds, (counts[1] - involuntary) / seconds

    def _summary(self) -> ThreadLook:
        watched = sorted([*self._gone, *self._live.values()], key=lambda thread: (thread.pid, thread.tid))
        middle = (self._begin + self._end) / 2
        halves: tuple[dict[tuple[int, int], tuple[float, float]], dict[tuple[int, int], tuple[float, float]]] = ({}, {})
        for thread in watched:
            for half, shares in zip(halves, shares_of_halves(thread.readings, middle), strict=True):
                if shares is not None:
                    half[thread.pid, thread.tid] = shares
        seconds = self._end - self._begin
        return ThreadLook(
            threads=[_record(thread) for thread in watched],
            halves=halves,
            host=host_of(self._cpus, self._quotas),
            level=self._level(seconds, bool(watched)),
            ends=dict(self._ends),
            seconds=seconds,
        )

    def _level(self, seconds: float, has_threads: bool) -> Level:
        reason = fix = ""
        if self._worker is None:
            reason = "the watch was not started"
        elif not has_threads and self._ends:
            reason = "the process ended before its threads were read"
        elif not has_threads:
            reason, fix = "its threads in /proc cannot be read", "give this command as its user, or as root"
        return Level(
            id="1",
            name=LEVEL_NAMES["1"],
            ok=has_threads,
            reason=reason,
            fix=fix,
            seconds=seconds,
            samples=self._passes,
            errors=self._errors,
            disturbance=Disturbance(tool_cpu_s=self._cpu_s),
        )


def _reading(now: float, counters: tuple[int, int, int]) -> Reading:
    cpu, wait, times = counters
    return Reading(now, cpu / _NS, wait / _NS, (cpu, times))


def _reading_of(now: float, stat: Stat) -> Reading:
    """Where the kernel does not count waits, and CPU time by ticks."""
    return Reading(now, stat.ticks / _TICKS_PER_S, None, (stat.ticks, 0))


def _is_busy(reading: Reading, stat: Stat) -> bool:
    """Whether a thread that is seen for the first time runs, or has run for over 1 % of its life."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started / _TICKS_PER_S
    return stat.state == "R" or reading.cpu > 0.01 * max(age, 1.0)


def _record(thread: Watched) -> evidence.Thread:
    readings = thread.readings
    total = sum(thread.states.values())
    cpu = share_figure([(reading.at, reading.cpu) for reading in readings])
    waits = [(reading.at, reading.wait) for reading in readings if reading.wait is not None]
    return evidence.Thread(
        pid=thread.pid,
        tid=thread.tid,
        name=thread.comm,
        comm=thread.comm,
        is_main=thread.pid == thread.tid,
        cpu=cpu,
        runqueue=share_figure(waits) if len(waits) == len(readings) else None,
        states={state: count / total for state, count in thread.states.most_common()},
        voluntary=thread.rates[0] if thread.rates else None,
        involuntary=thread.rates[1] if thread.rates else None,
        syscall=thread.calls.most_common(1)[0][0] if thread.calls else "",
        is_new=thread.is_new,
        is_gone=thread.is_gone,
    )


def share_figure(readings: Sequence[tuple[float, float]]) -> Figure | None:
    """Share of wall time that a counter of seconds grew by, its interval by means of sub-windows; None without two."""
    points = _at_edges(readings, SUB_WINDOWS)
    if len(points) < 2:
        return None
    rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    mean, low, high = mean_interval(rates)
    value = _share((points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]))
    # Sub-windows differ a little in length: their mean is not quite the whole.
    low, high = min(value, _share(value + low - mean)), max(value, _share(value + high - mean))
    return Figure(value=value, interval=(low, high), level="1", samples=len(rates))


def _at_edges(readings: Sequence[tuple[float, float]], windows: int) -> list[tuple[float, float]]:
    """Those readings that are nearest to the edges of equal sub-windows, the first and the last among them."""
    if len(readings) < 2 or readings[-1][0] - readings[0][0] < SHORTEST_S:
        return []
    times = [at for at, _ in readings]
    begin, length = times[0], times[-1] - times[0]
    chosen = sorted({_nearest(times, begin + length * i / windows) for i in range(windows + 1)})
    points = [readings[0]]
    for i in chosen[1:]:
        if times[i] - points[-1][0] >= length / windows / 4:  # a short one would be mostly noise
            points.append(readings[i])
    if points[-1][0] < times[-1]:
        points[-1 if len(points) > 1 else 1 :] = [readings[-1]]
    return points


def _nearest(times: Sequence[float], at: float) -> int:
    i = bisect.bisect_left(times, at)
    if i == len(times):
        return i - 1
    return i - 1 if i > 0 and at - times[i - 1] < times[i] - at else i


def shares_of_halves(
    readings: Sequence[Reading], middle: float
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """CPU and run-queue shares before and after a moment; None where there is less than two readings."""
    if len(readings) < 2:
        return None, None
    split = _nearest([reading.at for reading in readings], middle)
    return _shares(readings[0], readings[split]), _shares(readings[split], readings[-1])


def _shares(first: Reading, last: Reading) -> tuple[float, float] | None:
    seconds = last.at - first.at
    if seconds < SHORTEST_S:
        return None
    wait = (last.wait or 0.0) - (first.wait or 0.0)
    return _share((last.cpu - first.cpu) / seconds), _share(wait / seconds)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


# The machine and what a process may use of it


@dataclass(frozen=True)
class Quota:
    """CPU limit of a cgroup.

    Attributes:
        cpus: CPU seconds a second.
        periods, throttled: So far, and in how many of them it was held back.
    """

    folder: Path
    cpus: float
    periods: int
    throttled: int


def read_quota(folder: Path) -> Quota | None:
    """Of a cgroup of either version; None: no limit."""
    text = read_text(f"{folder}/cpu.max", 256)
    if text is not None:
        words = text.split()
    else:
        words = [(read_text(f"{folder}/cpu.cfs_{name}_us", 256) or "").strip() for name in ("quota", "period")]
    if len(words) < 2 or not all(word.isdecimal() for word in words[:2]) or int(words[1]) == 0:
        return None  # "max", or -1
    counts = dict(re.findall(r"^(nr_\w+) (\d+)$", read_text(f"{folder}/cpu.stat") or "", re.MULTILINE))
    return Quota(
        folder=folder,
        cpus=int(words[0]) / int(words[1]),
        periods=int(counts.get("nr_periods", 0)),
        throttled=int(counts.get("nr_throttled", 0)),
    )


def throttled_figure(quotas: Sequence[Quota]) -> Figure | None:
    """Share of periods since `quotas` were read in which one of them held its cgroup back; None without any."""
    shares = []
    for before in quotas:
        after = read_quota(before.folder)
        if after is not None:
            periods = after.periods - before.periods
            shares.append((after.throttled - before.throttled) / periods if periods > 0 else 0.0)
    return Figure.read(_share(max(shares)), "1") if shares else None


def cgroup_folders(pid: int, proc: Path = Path("/proc")) -> list[Path]:
    """Folders of the cgroup that limits a process's CPU, and of those above it, as far as we see them."""
    groups = _cpu_groups(read_text(f"{proc}/{pid}/cgroup") or "")
    folders: list[Path] = []
    for kind, root, mount in _cgroup_mounts(read_text(f"{proc}/self/mountinfo", 1 << 20) or ""):
        if kind not in groups:
            continue
        path = groups[kind]
        inside = path[len(root) :] if root != "/" and (path == root or path.startswith(f"{root}/")) else path
        folder = Path(mount)
        folders.append(folder)
        for part in Path(inside.strip("/")).parts:
            folder = folder / part
            if part == ".." or not folder.is_dir():  # seen from another cgroup namespace
                break
            folders.append(folder)
    return folders


def _cpu_groups(text: str) -> dict[str, str]:
    """Path by version, ``v1`` or ``v2``, of /proc/<pid>/cgroup."""
    found = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found["v2"] = path
        elif "cpu" in controllers.split(","):
            found["v1"] = path
    return found


def _cgroup_mounts(text: str) -> list[tuple[str, str, str]]:
    """Version, root and mount point of each cgroup tree that may limit CPU time, of /proc/self/mountinfo."""
    found = []
    for line in text.splitlines():
        head, _, tail = line.partition(" - ")
        fields, kinds = head.split(), tail.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        if kinds[0] == "cgroup2":
            found.append(("v2", fields[3], fields[4]))
        elif kinds[0] == "cgroup" and "cpu" in kinds[2].split(","):
            found.append(("v1", fields[3], fields[4]))
    return found


def usable_cpus(pid: int, quotas: Sequence[Quota]) -> float:
    """By the affinity of its first thread and by its cgroup's limits."""
    try:
        affinity = float(len(os.sched_getaffinity(pid)))
    except OSError:
        affinity = float(os.cpu_count() or 1)
    return min([affinity, *(quota.cpus for quota in quotas)])


def host_of(cpus: float, quotas: Sequence[Quota]) -> evidence.Host:
    """The machine now; `quotas` as they were at the begin of the look."""
    load = (read_text("/proc/loadavg", 256) or "").split()
    return evidence.Host(
        cpu_model=cpu_model(_text_of("/proc/cpuinfo"), platform.machine()),
        cores=os.cpu_count() or 0,
        cpus=cpus,
        load=float(load[0]) if load and re.fullmatch(r"\d+(\.\d+)?", load[0]) else 0.0,
        throttled=throttled_figure(quotas),
        kernel=platform.release(),
    )


_ARM_PARTS = {
    "0xd0c": "Neoverse N1", "0xd40": "Neoverse V1", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2",
    "0xd83": "Neoverse V3", "0xd8e": "Neoverse N3",
}  # fmt: skip


def cpu_model(cpuinfo: str, machine: str) -> str:
    """Of /proc/cpuinfo, which on ARM has numbers only."""
    if match := re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
        return " ".join(match[1].split())
    if match := re.search(r"^CPU part\s*:\s*(\w+)$", cpuinfo, re.MULTILINE):
        return _ARM_PARTS.get(match[1].lower(), f"{machine} part {match[1]}")
    return machine


def _text_of(path: str) -> str:
    return read_text(path, 1 << 14) or ""
