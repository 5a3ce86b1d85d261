"""Which process is looked at, what it is made of, and what we may do to it. All of it is read from /proc.

Nothing here stops, signals or writes to the process. It may end at any moment: then a question about it has an empty
answer; only `identify` raises.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import pwd
import re
import shutil
import stat as file_types
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.files import is_running
from paceline.profiling.collect.redact import one_line, redacted
from paceline.profiling.evidence import AttachError, Process

PAGE_BYTES = 4096
"""What one call reads of a file of /proc at most."""

KERNEL_THREAD = 0x00200000
"""PF_KTHREAD among the flags in /proc/<pid>/stat."""

CAP_SYS_PTRACE = 19
SECCOMP_FILTER = 2

_TOOL_FIXES = {"py-spy": "pip install py-spy", "pystack": "pip install pystack"}


class Stat(NamedTuple):
    """Of /proc/<pid>/stat, or that of a thread.

    Attributes:
        name: At most 15 bytes, with control characters made visible.
        ticks: CPU time, user and system.
        started: Clock ticks since boot.
    """

    name: str
    state: str
    parent: int
    flags: int
    ticks: int
    num_threads: int
    started: int


@dataclass(frozen=True)
class Identity:
    """A process, which stays told apart from a later one of the same number.

    Attributes:
        started: Start time in clock ticks since boot.
    """

    pid: int
    started: int


@dataclass(frozen=True)
class Rights:
    """What may be done to a process.

    Attributes:
        can_read: Its threads in /proc: level 1.
        can_read_memory: Its memory, without stopping it: levels 2 and 3.
        can_ptrace: To stop it for a moment: levels 4 and 4b.
        reason: Why not all of it; empty: nothing is wrong.
        fix: The one thing that would help.
    """

    can_read: bool
    can_read_memory: bool
    can_ptrace: bool
    reason: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Facts:
    """What decides on rights.

    Attributes:
        is_listed: /proc/<pid> can be read.
        opens_memory: The kernel let us open its memory for reading, which is the whole check but for seccomp.
        memory_call_allowed, ptrace_call_allowed: No seccomp filter forbids us the system calls.
        same_user: All of its user and group ids are our real ones.
        owner, we: Names of its user and of ours.
        has_capability: CAP_SYS_PTRACE is effective in our own user namespace.
        same_user_namespace: None: it cannot be seen.
        yama: kernel.yama.ptrace_scope; None: a kernel without Yama.
        tracer, tracer_name: The process that traces one of its threads; 0: none.
        seccomp: Our mode; 2: a filter.
        dumpable: None: cannot be told.
        in_inner_container: It is in a pid namespace below the one that we see.
        container: What we are in: ``kubernetes``, ``docker`` (any other) or empty.
    """

    pid: int
    is_listed: bool = True
    opens_memory: bool = True
    memory_call_allowed: bool = True
    ptrace_call_allowed: bool = True
    same_user: bool = True
    owner: str = ""
    we: str = ""
    is_root: bool = False
    has_capability: bool = False
    same_user_namespace: bool | None = True
    yama: int | None = None
    tracer: int = 0
    tracer_name: str = ""
    seccomp: int = 0
    dumpable: bool | None = True
    in_inner_container: bool = False
    container: str = ""


class NativeCode(NamedTuple):
    """What a reader of native stacks must read symbols of.

    Attributes:
        has_torch: libtorch_cpu or libtorch_cuda is loaded; reading their symbols takes 0.5 to 0.9 s.
        size_bytes: Of all files that hold machine code of the process.
    """

    has_torch: bool
    size_bytes: int


def identify(pid: int) -> Identity:
    """Raises: AttachError if there is no such process, or none that can be looked at."""
    is_number = 0 < pid < 1 << 31
    stat = read_stat(f"/proc/{pid}") if is_number else None
    if stat is None:
        if is_number and is_running(pid):
            raise AttachError(
                f"process {pid} exists, but /proc does not show it (it is mounted with hidepid): give this command as "
                "the user that it belongs to, or as root"
            )
        raise AttachError(f"there is no process {pid}; `ps -ef` lists those that there are")
    if pid == os.getpid():
        raise AttachError(f"process {pid} is this command itself; give the number of the process to look at")
    group = _number(_status(f"/proc/{pid}").get("Tgid"))
    if group is not None and group != pid:
        raise AttachError(f"{pid} is a thread of process {group}; give {group}")
    if stat.flags & KERNEL_THREAD:
        raise AttachError(f"{pid} ({stat.name}) is a thread of the kernel; a process of a user is wanted")
    if _is_zombie(stat):
        raise AttachError(
            f"process {pid} ({stat.name}) has ended and waits for its parent {stat.parent} to fetch its exit code: "
            "there is nothing left to look at"
        )
    return Identity(pid, stat.started)


def is_same(identity: Identity) -> bool:
    """Whether it still runs; a later process of the same number is another one."""
    return end_of(identity) == ""


def end_of(identity: Identity) -> str:
    """Empty while it runs; else ``exited``, ``zombie`` or ``recycled`` (its number belongs to another process now)."""
    stat = read_stat(f"/proc/{identity.pid}")
    if stat is None:
        return "exited"
    if stat.started != identity.started:
        return "recycled"
    return "zombie" if _is_zombie(stat) else ""


def process_tree(pid: int, at_most: int = 64) -> list[Process]:
    """The process and its descendants at this moment, parents before children; without ourselves and our own."""
    stats = {number: stat for number in _pids() if (stat := read_stat(f"/proc/{number}"))}
    children: dict[int, list[int]] = {}
    for number, stat in stats.items():
        children.setdefault(stat.parent, []).append(number)
    found: list[Process] = []
    waiting, seen = [pid], {pid, os.getpid()} - ({os.getpid()} if pid == os.getpid() else set())
    while waiting and len(found) < at_most:
        number = waiting.pop(0)
        stat = stats.get(number) or read_stat(f"/proc/{number}")
        if stat is None:
            continue
        found.append(_process(number, stat))
        # The list of a parent holds what was born after the scan.
        for child in sorted({*children.get(number, ()), *_children(number)} - seen):
            seen.add(child)
            waiting.append(child)
    return found


def _process(pid: int, stat: Stat) -> Process:
    is_zombie = _is_zombie(stat)
    argv = [] if is_zombie else _command_line(pid)
    return Process(
        pid=pid,
        parent=stat.parent,
        started=stat.started,
        command=redacted(argv) if any(argv) else f"[{stat.name}]",
        python=None if is_zombie else python_of(pid),
        end="zombie" if is_zombie else "",
    )


def parse_stat(text: str) -> Stat | None:
    """None for what is no such line; the name in it may hold spaces and parentheses."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    try:
        return Stat(
            name=one_line(head.partition("(")[2]),
            state=fields[0],
            parent=int(fields[1]),
            flags=int(fields[6]),
            ticks=int(fields[11]) + int(fields[12]),
            num_threads=int(fields[17]),
            started=int(fields[19]),
        )
    except (IndexError, ValueError):
        return None


def read_stat(folder: str) -> Stat | None:
    """Of a folder of a process or a thread; None when it is gone or may not be read."""
    text = read_text(f"{folder}/stat", PAGE_BYTES)
    return None if text is None else parse_stat(text)


def read_text(path: str, at_most: int = 1 << 16) -> str | None:
    """A small file of /proc; None when it is gone or may not be read. Up to a page it is read in one call."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        parts = [os.read(descriptor, at_most)]
        while parts[-1] and PAGE_BYTES < at_most > sum(map(len, parts)):
            parts.append(os.read(descriptor, at_most))
        return b"".join(parts).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _is_zombie(stat: Stat) -> bool:
    """A first thread that has ended alone is none: others of its process still run."""
    return stat.state in ("Z", "X") and stat.num_threads <= 1


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []


def _children(pid: int) -> set[int]:
    """By the kernel's own lists; empty where it keeps none."""
    found: set[int] = set()
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        text = read_text(f"/proc/{pid}/task/{thread}/children")
        if text is None:
            break
        found.update(int(word) for word in text.split() if word.isdecimal())
    return found


def _command_line(pid: int) -> list[str]:
    text = read_text(f"/proc/{pid}/cmdline")
    return text.rstrip("\0").split("\0") if text else []


def _status(folder: str) -> dict[str, str]:
    lines = (read_text(f"{folder}/status") or "").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


# What is loaded in it

_LIBRARIES = {name: (name,) for name in ("torch", "numpy", "triton", "ray")} | {
    "transformers": ("transformers", "tokenizers"),  # it has no machine code itself; its tokenizers have
}
_FILE_VERSIONS = {
    "cuda_driver": re.compile(r"/libcuda\.so\.(\d[\d.]+)$"),
    "cudart": re.compile(r"/libcudart\.so\.(\d[\d.]+)$"),
}
_VERSION = re.compile(r"[\w.+!]{1,64}")


class Mapped(NamedTuple):
    """A file in the memory of a process.

    Attributes:
        size_bytes: Of the mapped parts.
        is_code: A part of it may be executed.
    """

    size_bytes: int
    is_code: bool


def parse_maps(text: str) -> dict[str, Mapped]:
    """Files of /proc/<pid>/maps by path; a deleted one keeps its path."""
    found: dict[str, Mapped] = {}
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith("/"):
            continue
        path = fields[5].removesuffix(" (deleted)")
        begin, _, end = fields[0].partition("-")
        before = found.get(path, Mapped(0, False))
        try:
            size = int(end, 16) - int(begin, 16)
        except ValueError:
            continue
        found[path] = Mapped(before.size_bytes + size, before.is_code or "x" in fields[1])
    return found


def python_of(pid: int) -> str | None:
    """``3.11``, ``3.13t`` without a GIL, ``3`` where no more is seen; None: no Python process as far as we see."""
    program = _program(pid)
    name = os.path.basename(program)
    if match := re.fullmatch(r"python(3\.\d+t?)", name):
        return match[1]
    for path in mapped_files(pid):
        if match := re.search(r"/libpython(3\.\d+t?)[a-z]*\.so", path):
            return match[1]
        if match := re.search(r"\.cpython-3(\d+t?)-[^/]*\.so$", path):
            return f"3.{match[1]}"
    if re.fullmatch(r"python3?(-bin)?", name):
        return _python_of_folder(pid, program) or _python_of_file(pid, program) or "3"
    return None


def libraries_of(pid: int) -> dict[str, str]:
    """Versions of what is loaded, by the files in its memory: torch and its kin, the CUDA driver and run time."""
    versions: dict[str, str] = {}
    paths = mapped_files(pid)
    for library, marks in _LIBRARIES.items():
        pattern = re.compile(rf"^(.*?)/(?:{'|'.join(marks)})/")
        folders = {match[1]: None for path in paths if (match := pattern.match(path))}
        for folder in folders:
            if version := _version_of(pid, folder, library):
                versions[library] = version
                break
    for name, version_pattern in _FILE_VERSIONS.items():
        for path in paths:
            if match := version_pattern.search(path):
                versions[name] = match[1]
    return versions


def has_native_torch(pid: int) -> NativeCode:
    """How much a reader of native stacks has to read before its first stack, with the process stopped."""
    has_torch, size = False, 0
    for path, mapped in mapped_files(pid).items():
        if not mapped.is_code:
            continue
        has_torch = has_torch or os.path.basename(path).startswith(("libtorch_cpu.", "libtorch_cuda"))
        try:
            size += os.stat(f"/proc/{pid}/root{path}").st_size
        except (OSError, ValueError):
            size += mapped.size_bytes
    return NativeCode(has_torch, size)


def mapped_files(pid: int) -> dict[str, Mapped]:
    """Files in its memory by path; empty where that may not be read. The process is not stopped for it."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return parse_maps(file.read())
    except OSError:
        return {}


def _program(pid: int) -> str:
    """Its executable; by its command where the link may not be read."""
    try:
        return os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
    except OSError:
        first = next(iter(_command_line(pid)), "")
        return os.path.realpath(first) if os.path.isabs(first) and "\0" not in first else first


def _python_of_folder(pid: int, program: str) -> str | None:
    """By the standard library next to it, where there is one only."""
    try:
        names = os.listdir(f"/proc/{pid}/root{os.path.dirname(os.path.dirname(program))}/lib")
    except (OSError, ValueError):
        return None
    found = [match[1] for name in names if (match := re.fullmatch(r"python(3\.\d+t?)", name))]
    return found[0] if len(found) == 1 else None


def _python_of_file(pid: int, program: str) -> str | None:
    """By the path of the standard library in its data."""
    try:
        with (
            open(f"/proc/{pid}/exe", "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            match = re.search(rb"lib/python(3\.\d+t?)", data)
            return match[1].decode() if match else None
    except (OSError, ValueError):
        return None


def _version_of(pid: int, folder: str, library: str) -> str:
    """By ``version.py`` of a library, else by the name of its ``.dist-info``; empty: neither."""
    for root in (f"/proc/{pid}/root{folder}", folder):
        text = _text_of_file(f"{root}/{library}/version.py") or ""
        if match := re.search(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE):
            if _VERSION.fullmatch(match[1]):
                return match[1]
        try:
            names = os.listdir(root)
        except (OSError, ValueError):
            continue
        for name in sorted(names, reverse=True):
            match = re.fullmatch(rf"{library}-([^-]+)\.dist-info", name)
            if match and _VERSION.fullmatch(match[1]):
                return match[1]
    return ""


def _text_of_file(path: str) -> str | None:
    """The begin of a regular file: a pipe of that name, which another user may have made, would hold us up."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        if not file_types.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return os.read(descriptor, 1 << 16).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)


# What we may do to it


def rights(pid: int) -> Rights:
    """What the kernel lets us do to a process, and the one thing that would help."""
    return rights_from(facts_of(pid))


def rights_from(facts: Facts) -> Rights:
    """What follows from the facts."""
    if not facts.is_listed:
        reason = f"process {facts.pid} is gone, or /proc hides it (hidepid)"
        return Rights(False, False, False, reason, "give this command as the user that it belongs to, or as root")
    if facts.opens_memory:
        return _rights_with_memory(facts)
    reason, fix = _refusal(facts)
    return Rights(True, False, False, reason, fix)


def _rights_with_memory(facts: Facts) -> Rights:
    """When the kernel's own check lets us, a filter of system calls or another tracer may still be in the way."""
    if not facts.memory_call_allowed:
        reason = f"a seccomp filter of ours (mode {facts.seccomp}) forbids process_vm_readv"
        return Rights(True, False, False, reason, _capability_fix(facts))
    if facts.tracer:
        tracer = f"pid {facts.tracer} {facts.tracer_name}".rstrip()
        reason = f"under another tracer ({tracer}): it cannot be stopped by us, only read"
        return Rights(True, True, False, reason, f"end the tracer, {tracer}")
    if not facts.ptrace_call_allowed:
        reason = f"a seccomp filter of ours (mode {facts.seccomp}) forbids ptrace: it cannot be stopped, only read"
        return Rights(True, True, False, reason, _capability_fix(facts))
    return Rights(True, True, True)


def _refusal(facts: Facts) -> tuple[str, str]:
    """Why the kernel does not let us read its memory, and what would help."""
    as_root = "give this command as root (sudo)"
    if facts.has_capability and facts.same_user_namespace is False:
        return "it is in a user namespace in which our CAP_SYS_PTRACE does not count", _enter_fix(facts)
    if facts.yama == 3:
        return (
            "kernel.yama.ptrace_scope is 3: nobody may read or trace another process until the machine restarts",
            "restart the machine with kernel.yama.ptrace_scope below 3",
        )
    if not facts.has_capability:
        if facts.is_root and not facts.same_user:
            return f"it belongs to {facts.owner}, and we are root without CAP_SYS_PTRACE", _capability_fix(facts)
        if not facts.same_user:
            as_owner = as_root if facts.owner == "root" else f"give this command as {facts.owner} or as root (sudo)"
            return f"it belongs to {facts.owner}, and we are {facts.we} without CAP_SYS_PTRACE", as_owner
        if facts.yama in (1, 2):
            who = "a process's own debugger or parent" if facts.yama == 1 else "a process with CAP_SYS_PTRACE"
            reason = f"kernel.yama.ptrace_scope is {facts.yama}: only {who} may read or trace it"
            if facts.container:
                return reason, _capability_fix(facts)
            return reason, "sudo sysctl kernel.yama.ptrace_scope=0"
        if facts.in_inner_container:
            return "it is in another container (pid namespace), and we are without CAP_SYS_PTRACE", _enter_fix(facts)
        if facts.dumpable is False:
            reason = "it does not let itself be read (its program is set-uid, or it cleared PR_SET_DUMPABLE)"
            return reason, _capability_fix(facts) if facts.container else as_root
        if facts.container:
            return "the kernel refuses it, and we are without CAP_SYS_PTRACE", _capability_fix(facts)
        if not facts.is_root:
            return "the kernel refuses it, and we are without CAP_SYS_PTRACE", as_root
    reason = "the kernel refuses it: a security module (AppArmor, SELinux) or a sandbox (gVisor) is in the way"
    if facts.container == "kubernetes":
        return reason, "set securityContext.appArmorProfile.type: Unconfined in the pod"
    if facts.container:
        return reason, "start the container with `docker run --security-opt apparmor=unconfined`"
    return reason, "look into the kernel's log (dmesg) for what denied ptrace, and allow it"


def _capability_fix(facts: Facts) -> str:
    if facts.container == "kubernetes":
        if facts.in_inner_container or not (facts.same_user or facts.is_root):
            return _enter_fix(facts)
        return "set securityContext.capabilities.add: [SYS_PTRACE] for the container in the pod"
    if facts.container:
        return "start the container with `docker run --cap-add SYS_PTRACE`"
    return "give this command as root with CAP_SYS_PTRACE (sudo)"


def _enter_fix(facts: Facts) -> str:
    if facts.container == "kubernetes":
        return "look from a debug container: `kubectl debug POD -it --target=CONTAINER --profile=general --image=IMAGE`"
    return "give this command as root of the host, or inside its container (docker exec)"


def facts_of(pid: int) -> Facts:
    """Looks everything up; nothing of it acts on the process."""
    theirs, ours = _status(f"/proc/{pid}"), _status("/proc/self")
    if "Uid" not in theirs:
        return Facts(pid, is_listed=False, opens_memory=False)
    uids, gids = ([int(word) for word in theirs.get(key, "").split()[:3]] for key in ("Uid", "Gid"))
    tracer = _tracer(pid)
    return Facts(
        pid=pid,
        opens_memory=_opens(f"/proc/{pid}/mem"),
        memory_call_allowed=_memory_call_allowed(pid),
        ptrace_call_allowed=_ptrace_call_allowed(pid),
        same_user=set(uids) == {os.getuid()} and set(gids) == {os.getgid()},
        owner=_user_name(uids[1] if len(uids) > 1 else -1),
        we=_user_name(os.getuid()),
        is_root=os.geteuid() == 0,
        has_capability=has_capability(ours.get("CapEff", "0")),
        same_user_namespace=_same_namespace(pid, "user"),
        yama=_number((read_text("/proc/sys/kernel/yama/ptrace_scope") or "").strip()),
        tracer=tracer,
        tracer_name=one_line((read_text(f"/proc/{tracer}/comm") or "").strip()) if tracer else "",
        seccomp=_number(ours.get("Seccomp")) or 0,
        dumpable=_dumpable(pid, uids[1] if len(uids) > 1 else 0),
        in_inner_container=len(theirs.get("NSpid", "").split()) > len(ours.get("NSpid", "").split()),
        container=_container(),
    )


def has_capability(effective: str, bit: int = CAP_SYS_PTRACE) -> bool:
    """Whether a set of capabilities, as /proc writes it, holds one."""
    try:
        return bool(int(effective, 16) >> bit & 1)
    except ValueError:
        return False


def _opens(path: str) -> bool:
    """The kernel's own check, Yama and security modules included; opening memory does nothing to the process."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class _Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _memory_call_allowed(pid: int) -> bool:
    """Reads address 0, which is nowhere: EFAULT means that the call itself is allowed."""
    try:
        call = _libc().process_vm_readv
    except (AttributeError, OSError):
        return True
    buffer = ctypes.create_string_buffer(1)
    here, there = _Part(ctypes.addressof(buffer), 1), _Part(None, 1)
    long = ctypes.c_ulong
    ctypes.set_errno(0)
    failed = call(ctypes.c_int(pid), ctypes.byref(here), long(1), ctypes.byref(there), long(1), long(0)) < 0
    return not failed or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EACCES)


def _ptrace_call_allowed(pid: int) -> bool:
    """Peeks without being its tracer, which the kernel answers with ESRCH and a filter with something else."""
    try:
        call = _libc().ptrace
    except (AttributeError, OSError):
        return True
    peek_data = 2
    ctypes.set_errno(0)
    call(ctypes.c_long(peek_data), ctypes.c_long(pid), ctypes.c_void_p(None), ctypes.c_void_p(None))
    return ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EACCES)


def _tracer(pid: int) -> int:
    """Of any of its threads; 0: none that we can see."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    return next((n for t in threads if (n := _number(_status(f"/proc/{pid}/task/{t}").get("TracerPid")))), 0)


def _dumpable(pid: int, uid: int) -> bool | None:
    """The files in /proc of a process that may not be read belong to root, whoever runs it."""
    try:
        owner = os.stat(f"/proc/{pid}/status").st_uid
    except OSError:
        return None
    return None if uid == 0 else owner == uid


def _same_namespace(pid: int, kind: str) -> bool | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return None


def _user_name(uid: int) -> str:
    try:
        return one_line(pwd.getpwuid(uid).pw_name)
    except (KeyError, OverflowError):
        return f"user {uid}"


def _container(environment: Mapping[str, str] = os.environ) -> str:
    """What we are in, by our own environment and the marks that container engines leave."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    return "docker" if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() else ""


def tool(name: str) -> tuple[str | None, str]:
    """Path and version of a program, the one of our own environment first; None and what to do where there is none."""
    beside = shutil.which(name, path=str(Path(sys.executable).parent)) if sys.executable else None
    path = beside or shutil.which(name)
    fix = _TOOL_FIXES.get(name, f"pip install {name}")
    if path is None:
        return None, fix
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=20, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None, f"{path} does not start; install it anew: {fix}"
    match = re.search(r"\d+(?:\.\d+)+\w*", done.stdout or done.stderr)
    if done.returncode != 0 or match is None:
        return None, f"`{path} --version` failed; install it anew: {fix}"
    return path, match[0]
