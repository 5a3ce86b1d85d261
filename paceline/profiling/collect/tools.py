"""Running py-spy and pystack: none outlives us, none leaves the target stopped, and what they say in plain English.

Nothing here knows what a level asks for. Their output on the screen goes to memory; what py-spy writes to a file goes
to a temporary folder of the caller's.
"""

from __future__ import annotations

import functools
import os
import re
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.profiling.evidence import AttachError, Frame

GRACE_S = 2.0
"""That a tool has to write what it has after SIGINT."""
TERM_S = 1.0
"""That it has after SIGTERM, before SIGKILL."""
STOPPED = "Tt"
"""Kernel states of a thread that somebody stopped: by a signal, by a tracer."""

_POLL_S = 0.05
_TID_OFFSETS = (0x2D0, 0xD0)
"""Where glibc's ``struct pthread`` has the thread's number: x86-64, arm64."""
_SOURCES = re.compile(r"\.(c|cc|cpp|cxx|h|hpp|hh|inc|cu|cuh|rs|s|asm|pxd)$", re.IGNORECASE)
_INTERPRETER = re.compile(r"(lib)?python\d*(\.\d+)?[a-z]*")
_FOLDED_END = re.compile(r" (\d+)$")
_FOLDED_START = re.compile(r"thread \((0[xX][0-9A-Fa-f]+|\d+)\)(?:: )?")


@dataclass(frozen=True)
class ToolRun:
    """A finished run of a tool.

    Attributes:
        returncode: Below 0: ended by that signal.
        cpu_s: CPU time that it took, user and system.
        ended: Why we ended it: ``cancelled``, ``timed out``; empty: it ended by itself.
    """

    returncode: int
    stdout: str
    stderr: str
    cpu_s: float
    seconds: float
    ended: str = ""
    file: str = ""


OUT = "{out}"
"""In a tool's arguments: a file in memory that it writes, so that nothing is left on a disk whatever becomes of us."""


def run_tool(
    argv: Sequence[str], timeout_s: float, cancel: threading.Event | None = None, *, grace_s: float = GRACE_S
) -> ToolRun:
    """Run a program to its end, or end it: on `cancel`, after `timeout_s`, and on any exception that passes through.

    It has a session of its own, so a Ctrl-C at the terminal reaches us alone. It is then ended in order: SIGINT, on
    which ``py-spy record`` writes what it has; SIGTERM after `grace_s`; SIGKILL. It gets SIGINT from the kernel as well
    if the thread that called this dies; without util-linux's ``setpriv`` (the one of busybox cannot) it then goes on
    until its own time is over.

    Raises: AttachError if it cannot be started.
    """
    started = time.monotonic()
    with _memory_file() as out, _memory_file() as err, _memory_file() as file:
        child = None
        ended = ""
        try:
            place = f"/proc/self/fd/{file.fileno()}"
            argv = [place if each == OUT else each for each in argv]
            child = _Child(argv, out.fileno(), err.fileno(), file.fileno())
            ended = child.wait(timeout_s, cancel)
            if ended:
                child.end(grace_s)
        except BaseException:
            if child is not None:
                child.end(grace_s)
            raise
        finally:
            if child is not None:
                child.kill()
        seconds = time.monotonic() - started
        return ToolRun(child.returncode, _text(out), _text(err), child.cpu_s, seconds, ended, _text(file))


class _Child:
    """A started program, and what became of it."""

    def __init__(self, argv: Sequence[str], out: int, err: int, file: int) -> None:
        if shutil.which(argv[0]) is None:  # else it would be the guard that says so
            raise AttachError(f"cannot start {argv[0]}: there is no such program, or it may not be run. Reinstall it.")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RUST_")}
        environment |= {"RUST_BACKTRACE": "0", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8:replace"}
        try:
            process = subprocess.Popen(
                [*_death_guard(), *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                pass_fds=[file],
                start_new_session=True,
            )
        except OSError as error:
            raise AttachError(f"cannot start {argv[0]}: {error.strerror or error}. Reinstall it.") from error
        self.returncode = 0
        self.cpu_s = 0.0
        self._process = process
        self._pid = process.pid
        self._is_reaped = False
        self._pidfd = _pidfd(process.pid)

    def wait(self, timeout_s: float, cancel: threading.Event | None) -> str:
        """Until it ended by itself (empty), or why not to wait longer."""
        until = time.monotonic() + timeout_s
        while not self._reap():
            left = until - time.monotonic()
            if cancel is not None and cancel.is_set():
                return "cancelled"
            if left <= 0:
                return "timed out"
            self._sleep(min(left, _POLL_S))
        return ""

    def end(self, grace_s: float) -> None:
        for number, patience_s in ((signal.SIGINT, grace_s), (signal.SIGTERM, TERM_S)):
            if self._reap():
                return
            self._signal(number)
            self.wait(patience_s, None)
        self.kill()

    def kill(self) -> None:
        """At once; afterwards there is no child. A Ctrl-C meanwhile is passed on when that is done."""
        interrupt: KeyboardInterrupt | None = None
        while not self._is_reaped:
            try:
                if not self._reap():
                    self._signal(signal.SIGKILL)
                    self._reap(0)
            except KeyboardInterrupt as error:
                interrupt = error
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if interrupt is not None:
            raise interrupt

    def _reap(self, options: int = os.WNOHANG) -> bool:
        if self._is_reaped:
            return True
        try:
            pid, status, usage = os.wait4(self._pid, options)
        except ChildProcessError:  # SIGCHLD is ignored in this process: nothing is known of it
            pid, status, usage = self._pid, 0, None
        if pid == 0:
            return False
        self._is_reaped = True
        self.returncode = self._process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu_s = usage.ru_utime + usage.ru_stime if usage is not None else 0.0
        return True

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._pid, number)
        except ProcessLookupError:
            pass

    def _sleep(self, seconds: float) -> None:
        if self._pidfd is None:
            time.sleep(min(seconds, 0.005))
            return
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll(max(1, int(1000 * seconds)))


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _memory_file() -> BinaryIO:
    try:
        return open(os.memfd_create("paceline-tool"), "w+b")
    except OSError as error:
        raise AttachError(f"no memory for a tool's output: {error.strerror}. Free some and look again.") from error


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


@functools.lru_cache(maxsize=1)
def _death_guard() -> tuple[str, ...]:
    """Command in front of a tool's that has the kernel end it with us; none where there is no such thing."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return ()
    guard = (setpriv, "--pdeathsig", "INT", "--")
    try:
        tried = subprocess.run([*guard, setpriv, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ()
    return guard if tried.returncode == 0 else ()


def complaint(run: ToolRun, pid: int) -> tuple[str, str]:
    """Why a run gave nothing, in one line, and the one thing that would help."""
    said = run.stderr
    if run.ended == "cancelled":
        return "cancelled before anything was seen", ""
    if is_gone(pid):
        return "the process ended", ""
    if run.ended == "timed out":
        return f"it took longer than {run.seconds:.0f} s", "look again when the machine is less loaded"
    if "No space left on device" in said:
        return "no space left for its output", "set TMPDIR to a folder with space"
    if _says(said, "Permission denied", "Permission Denied", "Operation not permitted", "EPERM", "cannot be traced"):
        tracer = tracer_of(pid)
        if tracer:
            return f"process {tracer} traces it already", f"end process {tracer} (a debugger or strace) first"
        return (
            "reading the process is not allowed (no CAP_SYS_PTRACE, another user, or ptrace_scope)",
            "run as root or as its user; in a container start it with --cap-add SYS_PTRACE",
        )
    unsupported = re.search(r"Unsupported version of Python: (\S+)", said)
    if unsupported:
        return f"Python {unsupported[1]} is not supported by it", "install a newer py-spy"
    if _says(said, "Cannot detect GIL", "Unable to detect GIL"):
        return "it cannot tell who has the GIL in this interpreter", "free-threaded Python has none; else update py-spy"
    if _says(said, "Failed to find python version", "Could not determine python version"):
        return "not a Python process", "name the Python process itself, not its launcher"
    if _says(said, "Failed to find a python interpreter", "Failed to get interpreter", "_PyRuntime"):
        return "its interpreter was not recognised (free-threaded, very new, or not yet started)", "update py-spy"
    if _says(said, "Failed to copy", "Failed to get stack traces", "Failed to suspend"):
        return f"its memory could not be read: {_first_line(said)}", "look again"
    return _first_line(said) or f"it ended with status {run.returncode} and said nothing", ""


def _says(text: str, *parts: str) -> bool:
    return any(part in text for part in parts)


def _first_line(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    line = next((line for line in lines if line and not line.startswith("WARNING")), "")
    return line.removeprefix("Error: ").strip("\N{SKULL} ")[:160]


# What the kernel says of the target. A process that vanishes is no error here.


def thread_ids(pid: int) -> list[int]:
    """Threads of a process, in the kernel's order; empty when it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task") if name.isdigit()]
    except OSError:
        return []


def thread_stat(pid: int, tid: int) -> tuple[str, int]:
    """State letter and CPU time in clock ticks; ``""`` and 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/task/{tid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return "", 0


def is_gone(pid: int) -> bool:
    """Whether the process ended; a zombie did."""
    return thread_stat(pid, pid)[0] in ("", "Z", "X") and not any(
        thread_stat(pid, tid)[0] not in ("", "Z", "X") for tid in thread_ids(pid)
    )


def tracer_of(pid: int) -> int:
    """Process that traces it; 0: none, or not to be seen."""
    try:
        return int(re.search(r"^TracerPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1])  # type: ignore[index]
    except (OSError, TypeError, ValueError):
        return 0


def left_stopped(pid: int, patience_s: float = 1.0) -> list[int]:
    """Threads that stand stopped, and stay so while we look: after a tracer's end the kernel lets its threads go."""
    until = time.monotonic() + patience_s
    while True:
        stopped = [tid for tid in thread_ids(pid) if thread_stat(pid, tid)[0] in tuple(STOPPED)]
        if not stopped or time.monotonic() >= until:
            return stopped
        time.sleep(0.02)


def stopped_note(pid: int, stopped: Collection[int]) -> tuple[str, str]:
    """What to say of threads that were left stopped."""
    return f"{len(stopped)} threads of it were left stopped", f"kill -CONT {pid}"


def os_thread_ids(pid: int, pthread_ids: Iterable[int]) -> dict[int, int]:
    """Kernel's numbers of threads that a tool names by their pthread address, as py-spy does before Python 3.11.

    glibc keeps the number in the structure at that address. Only one that is a thread of the process counts; what is
    not found is left out.
    """
    threads = set(thread_ids(pid))
    found: dict[int, int] = {}
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError:
        return found
    try:
        for address in pthread_ids:
            for offset in _TID_OFFSETS:
                try:
                    tid = int.from_bytes(os.pread(memory, 4, address + offset), "little")
                except (OSError, OverflowError):
                    continue
                if tid in threads:
                    found[address] = tid
                    break
    finally:
        os.close(memory)
    return found


# What py-spy writes: a stack a line, outermost first, "thread (27725): name;frame (file:line);frame (library) 93".


@dataclass(frozen=True)
class Folded:
    """A line: a thread's stack, and how often it was seen.

    Attributes:
        tid: The kernel's number, or the pthread address (above 2**22) where py-spy knows no better.
    """

    tid: int
    name: str
    frames: tuple[Frame, ...]
    count: int


def parse_folded(text: str, names: Mapping[int, str] | None = None, executable: str = "") -> tuple[list[Folded], int]:
    """The stacks in py-spy's raw output, and how many lines were no stack.

    A thread's name may hold what separates frames. Where `names` has the thread it is exact; else a name ends before
    the first part that looks like a frame.
    """
    stacks: list[Folded] = []
    bad = 0
    for line in _whole_lines(text):
        stack = _folded(line, names or {}, executable)
        if stack is None:
            bad += 1
        else:
            stacks.append(stack)
    return stacks, bad


def _whole_lines(text: str) -> Iterator[str]:
    """Lines up to their count: a name with a line break makes two of one."""
    kept = ""
    for line in text.split("\n"):
        if kept and _FOLDED_START.match(line):
            yield kept
            kept = ""
        kept = f"{kept}\n{line}" if kept else line
        if _FOLDED_END.search(kept):
            yield kept
            kept = ""
    if kept.strip():
        yield kept


def _folded(line: str, names: Mapping[int, str], executable: str) -> Folded | None:
    end, start = _FOLDED_END.search(line), _FOLDED_START.match(line)
    if end is None or start is None or start.end() > end.start():
        return None
    tid, rest = int(start[1], 0), line[start.end() : end.start()]
    known = names.get(tid)
    if known is not None and (rest == known or rest.startswith(f"{known};")):
        name, parts = known, rest[len(known) + 1 :].split(";")
    else:
        name, parts = _name_and_parts(rest.split(";"))
    frames = tuple(parse_frame(part, executable) for part in _balanced(parts) if part and not part.startswith("<shim>"))
    return Folded(tid, name, frames, int(end[1]))


def _name_and_parts(parts: list[str]) -> tuple[str, list[str]]:
    if not parts[0]:  # a thread that Python has no name for
        return "", parts[1:]
    first = next((i for i in range(1, len(parts)) if _looks_like_frame(parts[i])), None)
    if first is None:
        return ";".join(parts), []
    return ";".join(parts[:first]), parts[first:]


def _looks_like_frame(part: str) -> bool:
    return not part.startswith(" ") and part.endswith(")") and " (" in part


def _balanced(parts: list[str]) -> list[str]:
    """Frames, with a file name that holds a semicolon put together again."""
    frames: list[str] = []
    i = 0
    while i < len(parts):
        text, last = parts[i], i
        while text.count("(") > text.count(")") and last + 1 < len(parts):
            last += 1
            text = f"{text};{parts[last]}"
        if text.count("(") > text.count(")"):
            text, last = parts[i], i
        frames.append(text)
        i = last + 1
    return frames


def parse_frame(text: str, executable: str = "") -> Frame:
    """``name (file:line)``, ``name (library)`` or a bare name."""
    name, place = _split_place(text)
    file, colon, line = place.rpartition(":")
    if not (colon and line.isdecimal()):
        file, line = place, "0"
    return make_frame(name, file, int(line), executable)


def _split_place(text: str) -> tuple[str, str]:
    """The name, and what stands in the last pair of brackets, which may hold others."""
    if not text.endswith(")"):
        return text, ""
    depth = 0
    for i in range(len(text) - 1, -1, -1):
        depth += (text[i] == ")") - (text[i] == "(")
        if depth == 0:
            if i > 0 and text[i - 1] == " ":
                return text[: i - 1], text[i + 1 : -1]
            break
    name, found, place = text.rpartition(" (")
    return (name, place[:-1]) if found else (text, "")


def make_frame(name: str, file: str, line: int, executable: str = "") -> Frame:
    """A frame with the base name of its file. The bare addresses of stripped libraries, which differ from run to run,
    are all ``0x?``."""
    base = re.sub(r"^\[vdso.*", "[vdso]", file.rstrip("/").rpartition("/")[2])
    if re.fullmatch(r"0x[0-9a-fA-F]+", name):
        name = "0x?"
    return Frame(name=name, file=base, line=line, is_native=_is_native(base, line, executable))


def _is_native(file: str, line: int, executable: str) -> bool:
    """Whether a frame of that file is no Python: a library, a C source, the interpreter, or nowhere."""
    if not file or ".so" in file or file.startswith("[") or file == executable:
        return True
    if file.endswith((".py", ".pyc")) or file.startswith("<"):
        return False
    return bool(_SOURCES.search(file)) or bool(_INTERPRETER.fullmatch(file)) or not line


# How long a tool stops the target.


@dataclass(frozen=True)
class Stops:
    """Of the watched thread that was stopped for longest.

    Attributes:
        share: Of `seconds`.
    """

    share: float
    total_s: float
    longest_s: float
    seconds: float


class StopMeter:
    """Watches whether threads stand stopped, about a thousand times a second and for at most 3 % of a core.

    It looks at the main thread and the busiest ones, up to three. Between two looks a thread counts as stopped in the
    middle of what both saw, so that the total is right on average where single stops are shorter than a look.
    Threads that stood stopped before are passed over.

    Args:
        read: State letter of a thread, for tests; reads ``/proc`` by default.
    """

    MOST = 3
    CORE_FRAC = 0.03
    PERIOD_S = 0.001

    def __init__(self, pid: int, read: Callable[[int, int], str] | None = None) -> None:
        self._pid = pid
        self._read = read
        self._begun, self._end = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.stops = Stops(0.0, 0.0, 0.0, 0.0)

    def __enter__(self) -> StopMeter:
        self._thread = threading.Thread(target=self._watch, name="stop-meter", daemon=True)
        self._thread.start()
        self._begun.wait(1.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        looked_at = [_Watched(_Reader(self._pid, tid, self._read)) for tid in busiest(self._pid, self.MOST)]
        watched = [one for one in looked_at if one.state not in tuple(STOPPED)]
        self._begun.set()
        start = time.perf_counter()
        period, rounds, cpu, since = self.PERIOD_S, 0, time.thread_time(), start
        try:
            while not self._end.wait(period) and watched:
                for one in watched:
                    one.look()
                rounds += 1
                if rounds % 64 == 0:
                    now, used = time.perf_counter(), time.thread_time()
                    load = (used - cpu) / max(now - since, 1e-9)
                    period = min(0.05, max(self.PERIOD_S, period * min(2.0, max(0.5, load / self.CORE_FRAC))))
                    cpu, since = used, now
        finally:
            seconds = time.perf_counter() - start
            for one in watched:
                one.look()
            for one in looked_at:
                one.close()
            worst = max(watched, key=lambda one: one.total_s, default=None)
            if worst is not None:
                longest = max(one.longest_s for one in watched)
                self.stops = Stops(min(1.0, worst.total_s / max(seconds, 1e-9)), worst.total_s, longest, seconds)


def busiest(pid: int, most: int) -> list[int]:
    """The main thread and those with the most CPU time, `most` in all."""
    others = [tid for tid in thread_ids(pid) if tid != pid]
    others.sort(key=lambda tid: thread_stat(pid, tid)[1], reverse=True)
    return [pid, *others[: most - 1]]


class _Reader:
    """State letter of a thread; empty when it is gone. Its file stays open, which halves the cost of a look."""

    def __init__(self, pid: int, tid: int, read: Callable[[int, int], str] | None) -> None:
        self._pid, self._tid, self._read = pid, tid, read
        self._file: int | None = None
        if read is None:
            try:
                self._file = os.open(f"/proc/{pid}/task/{tid}/stat", os.O_RDONLY)
            except OSError:
                pass

    def __call__(self) -> str:
        if self._read is not None:
            return self._read(self._pid, self._tid)
        if self._file is None:
            return ""
        try:
            after = os.pread(self._file, 256, 0).rpartition(b")")[2]
        except OSError:
            return ""
        return after[1:2].decode("ascii", "replace")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _Watched:
    """A thread's stops so far."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self.state = reader()
        self._at = time.perf_counter()
        self._run_s = 0.0
        self.total_s = 0.0
        self.longest_s = 0.0

    def look(self) -> None:
        state, now = self._reader(), time.perf_counter()
        was, is_stopped = self.state in tuple(STOPPED), state in tuple(STOPPED)
        passed = (now - self._at) * (was + is_stopped) / 2
        self.total_s += passed
        self._run_s = self._run_s + passed if was else passed
        self.longest_s = max(self.longest_s, self._run_s)
        self.state, self._at = state, now

    def close(self) -> None:
        self._reader.close()
