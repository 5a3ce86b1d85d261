"""The process that is looked at: told apart from others, described without its secrets, and what we may do to it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.profiling.collect import process
from paceline.profiling.collect.process import Facts, Identity, Mapped, Stat, identify, is_same, rights_from
from paceline.profiling.evidence import AttachError

PATIENCE_S = 30.0
LINE = "7 ({name}) S 3 7 7 0 -1 {flags} 3 0 0 0 11 31 0 0 20 0 {threads} 0 536 3543744512 3525 0 0 0\n"

Start = Callable[..., "subprocess.Popen[bytes]"]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python code whose first line of output says that it is ready, or any program."""
    children: list[subprocess.Popen[bytes]] = []

    def run(code: str = "", program: list[str] | None = None) -> subprocess.Popen[bytes]:
        code = f"import os, subprocess, sys, time\n{code}\nprint('ready', flush=True)\ntime.sleep(600)"
        child = subprocess.Popen(program or [sys.executable, "-c", code], stdout=subprocess.PIPE)
        children.append(child)
        if program is None:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        return child

    yield run
    for child in children:  # all of them before any is waited for: one may trace another
        child.kill()
    for child in children:
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


@pytest.mark.parametrize("name", ["python", "a b", "a) R 9 (b", "()", "(", "x) ", "tab\t"])
def test_a_name_may_hold_anything(name: str) -> None:
    """Spaces and parentheses in a name do not move the fields after it."""
    stat = process.parse_stat(LINE.format(name=name, flags=4194368, threads=5))
    assert stat == Stat(process.one_line(name), "S", 3, 4194368, 42, 5, 536)


@pytest.mark.parametrize("text", ["", "7", "7 (a", "7 (a) S", "7 (a) S x y z", "7 (a) S 3 7 7 0 -1 4194368 3 0 0 0 11"])
def test_half_a_line_is_no_stat(text: str) -> None:
    """A line that is cut short gives nothing instead of an error."""
    assert process.parse_stat(text) is None


def test_a_process_is_identified(start: Start) -> None:
    """The identity of a process holds as long as it runs."""
    child = start()
    identity = identify(child.pid)
    assert identity.pid == child.pid and identity.started > 0
    assert is_same(identity)


def test_a_recycled_number_is_another_process(start: Start) -> None:
    """A process of the same number that began at another time is not the same."""
    identity = identify(start().pid)
    other = Identity(identity.pid, identity.started - 1)
    assert not is_same(other)
    assert process.end_of(other) == "recycled"


def test_a_zombie_is_refused(start: Start) -> None:
    """A process that has ended but was not waited for is none to look at, and not the same any more."""
    child = start(program=["sleep", "600"])
    identity = identify(child.pid)
    child.kill()
    wait_until(lambda: process.end_of(identity) == "zombie")
    assert not is_same(identity)
    with pytest.raises(AttachError, match="has ended"):
        identify(child.pid)
    child.wait()
    assert process.end_of(identity) == "exited"


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**40])
def test_no_such_process(pid: int) -> None:
    """A number without a process is refused with what to do."""
    with pytest.raises(AttachError, match="no process"):
        identify(pid)


def test_we_do_not_look_at_ourselves() -> None:
    """The command's own process is refused."""
    with pytest.raises(AttachError, match="itself"):
        identify(os.getpid())


def test_a_thread_is_no_process(start: Start) -> None:
    """The number of a thread is answered with that of its process."""
    child = start("import threading; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()")
    tid = max(int(name) for name in os.listdir(f"/proc/{child.pid}/task"))
    with pytest.raises(AttachError, match=f"give {child.pid}"):
        identify(tid)


def test_a_kernel_thread_is_refused(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    """A thread of the kernel is told by its flags."""
    pid = start(program=["sleep", "600"]).pid
    monkeypatch.setattr(process, "read_stat", lambda _: Stat("kworker/0:1", "I", 2, 0x04208060, 0, 1, 5))
    with pytest.raises(AttachError, match="kernel"):
        identify(pid)


def test_a_hidden_process_is_named_so(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    """One that exists but that /proc hides is not said to be missing."""
    pid = start(program=["sleep", "600"]).pid
    monkeypatch.setattr(process, "read_stat", lambda _: None)
    with pytest.raises(AttachError, match="hidepid"):
        identify(pid)


def test_the_tree_has_all_descendants(start: Start) -> None:
    """Children and their children follow the process; one that has ended is marked."""
    child = start("""
kept = subprocess.Popen([sys.executable, '-c', "import subprocess; subprocess.Popen(['sleep', '45']).wait()"])
also = subprocess.Popen(['true'])""")
    wait_until(lambda: len(process.process_tree(child.pid)) == 4)
    wait_until(lambda: any(p.end == "zombie" for p in process.process_tree(child.pid)))
    tree = process.process_tree(child.pid)
    assert tree[0].pid == child.pid and tree[0].parent == os.getpid()
    by_number = {p.pid: p for p in tree}
    (sleeper,) = [p for p in tree if p.command == "sleep 45"]
    assert by_number[sleeper.parent].parent == child.pid
    assert sleeper.python is None
    assert tree[0].python == "{}.{}".format(*sys.version_info)
    assert "-c ..." in tree[0].command and "import" not in tree[0].command
    (zombie,) = [p for p in tree if p.end == "zombie"]
    assert zombie.command == "[true]"
    try:
        assert [p.pid for p in process.process_tree(child.pid, at_most=1)] == [child.pid]
    finally:
        for p in tree[1:]:
            if not p.end:
                os.kill(p.pid, 9)


def test_the_tree_leaves_us_out(start: Start) -> None:
    """The command may be a descendant of what it looks at; it and its helpers are not part of it."""
    helper = start(program=["sleep", "600"])
    numbers = [p.pid for p in process.process_tree(os.getppid())]
    assert os.getpid() not in numbers and helper.pid not in numbers
    assert os.getppid() in numbers


def test_the_tree_of_nobody_is_empty() -> None:
    """A process that has ended has no tree."""
    assert process.process_tree(2**22 + 1) == []


MAPS = """\
55d0-55d3 r--p 00000000 08:01 11 /usr/bin/my prog
55d3-55d5 r-xp 00003000 08:01 11 /usr/bin/my prog
7f00-7f10 r-xp 00000000 08:01 12 /usr/lib/libpython3.12.so.1.0 (deleted)
7f10-7f20 rw-p 00000000 00:00 0
7f20-7f30 rw-p 00000000 00:00 0 [heap]
zz-yy r-xp 0 0 0 /usr/lib/bad
7f30
"""


def test_maps_are_read() -> None:
    """Files of a process with their mapped size, and whether they hold code; other lines are passed over."""
    assert process.parse_maps(MAPS) == {
        "/usr/bin/my prog": Mapped(5, True),
        "/usr/lib/libpython3.12.so.1.0": Mapped(16, True),
    }


def map_files(monkeypatch: pytest.MonkeyPatch, *paths: str, program: str = "/usr/bin/x") -> None:
    monkeypatch.setattr(process, "mapped_files", lambda _: {path: Mapped(10, True) for path in paths})
    monkeypatch.setattr(process, "_program", lambda _: program)


@pytest.mark.parametrize(
    ("program", "paths", "version"),
    [
        ("/usr/bin/python3.12", [], "3.12"),
        ("/usr/bin/python3.13t", [], "3.13t"),
        ("/opt/blender", ["/usr/lib/libpython3.11.so.1.0"], "3.11"),
        ("/opt/python", ["/x/_json.cpython-310-x86_64-linux-gnu.so"], "3.10"),
        ("/opt/python", ["/x/_json.cpython-313t-aarch64-linux-gnu.so"], "3.13t"),
        ("/usr/bin/sleep", ["/usr/lib/libc.so.6"], None),
        ("", [], None),
    ],
)
def test_python_is_told_by_its_files(
    monkeypatch: pytest.MonkeyPatch, program: str, paths: list[str], version: str | None
) -> None:
    """The version is in the name of the program, of its library or of its modules."""
    map_files(monkeypatch, *paths, program=program)
    assert process.python_of(os.getpid()) == version


def test_a_static_python_is_told_by_its_folder_or_its_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that is only called python is told by the library next to it, else by the path in its data."""
    (tmp_path / "lib" / "python3.9").mkdir(parents=True)
    map_files(monkeypatch, program=str(tmp_path / "bin" / "python3"))
    assert process.python_of(os.getpid()) == "3.9"
    map_files(monkeypatch, program=str(tmp_path / "nowhere" / "bin" / "python"))
    monkeypatch.setattr(process, "_python_of_folder", lambda *_: None)
    assert process.python_of(os.getpid()) in ("3", "{}.{}".format(*sys.version_info))


def test_python_of_live_processes(start: Start) -> None:
    """A Python of a virtual environment has its version, another program and a missing one have none."""
    assert process.python_of(start().pid) == "{}.{}".format(*sys.version_info)
    assert process.python_of(start(program=["sleep", "600"]).pid) is None
    assert process.python_of(2**22 + 1) is None


def test_versions_of_what_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Versions come from the files next to what is mapped; a library that is installed only is not named."""
    site = tmp_path / "lib" / "site-packages"
    for name in ("numpy-2.1.0.dist-info", "transformers-5.17.1.dist-info", "ray-2.50.0.dist-info", "torch"):
        (site / name).mkdir(parents=True)
    (site / "torch" / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.11.0+cu130'\ncuda = '13'\n"
    )
    map_files(
        monkeypatch,
        f"{site}/torch/lib/libtorch_cpu.so",
        f"{site}/numpy/_core/x.so",
        f"{site}/tokenizers/tokenizers.abi3.so",
        "/opt/triton/lib/x.so",
        "/usr/lib/libcuda.so.580.65.06",
        f"{site}/nvidia/libcudart.so.13.0.48",
    )
    assert process.libraries_of(os.getpid()) == {
        "torch": "2.11.0+cu130",
        "numpy": "2.1.0",
        "transformers": "5.17.1",
        "cuda_driver": "580.65.06",
        "cudart": "13.0.48",
    }
    assert process.has_native_torch(os.getpid()).has_torch


def test_a_version_file_may_be_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pipe, or a version that is none, is passed over at once."""
    (tmp_path / "torch").mkdir()
    os.mkfifo(tmp_path / "torch" / "version.py")
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "version.py").write_text("__version__ = 'a secret of\x1b many words'\n")
    map_files(monkeypatch, f"{tmp_path}/torch/x.so", f"{tmp_path}/numpy/x.so")
    assert process.libraries_of(os.getpid()) == {}


def test_a_plain_program_has_no_libraries(start: Start) -> None:
    """Nothing found is an empty answer, for a process that is gone as well."""
    pid = start(program=["sleep", "600"]).pid
    wait_until(lambda: process.has_native_torch(pid).size_bytes > 0 and "sleep" in process._program(pid))
    assert process.libraries_of(pid) == {}
    code = process.has_native_torch(pid)
    assert not code.has_torch and code.size_bytes > 0
    assert process.libraries_of(2**22 + 1) == {}
    assert process.has_native_torch(2**22 + 1) == (False, 0)


REFUSED = Facts(1, opens_memory=False, owner="anna", we="ben")


@pytest.mark.parametrize(
    ("facts", "can", "reason", "fix"),
    [
        (Facts(1), (True, True, True), "", ""),
        (Facts(1, same_user=False, yama=3), (True, True, True), "", ""),
        (Facts(1, is_listed=False), (False, False, False), "hidepid", "root"),
        (Facts(1, tracer=9, tracer_name="gdb"), (True, True, False), "another tracer (pid 9 gdb)", "end the tracer"),
        (
            Facts(1, ptrace_call_allowed=False, container="docker"),
            (True, True, False),
            "seccomp",
            "--cap-add SYS_PTRACE",
        ),
        (Facts(1, memory_call_allowed=False, seccomp=2), (True, False, False), "mode 2", "CAP_SYS_PTRACE"),
        (dict(same_user=False), (True, False, False), "belongs to anna, and we are ben", "as anna or as root"),
        (
            dict(same_user=False, is_root=True, container="docker"),
            (True, False, False),
            "root without",
            "docker run --cap-add",
        ),
        (dict(same_user=False, owner="root"), (True, False, False), "belongs to root", "command as root (sudo)"),
        (dict(same_user=False, is_root=True), (True, False, False), "root without", "CAP_SYS_PTRACE"),
        (
            dict(same_user=False, is_root=True, container="kubernetes"),
            (True, False, False),
            "root without",
            "securityContext.capabilities.add: [SYS_PTRACE]",
        ),
        (
            dict(is_root=True, in_inner_container=True, container="kubernetes"),
            (True, False, False),
            "another container",
            "kubectl debug POD -it --target",
        ),
        (dict(yama=1), (True, False, False), "ptrace_scope is 1", "sysctl kernel.yama.ptrace_scope=0"),
        (dict(yama=2), (True, False, False), "ptrace_scope is 2", "sysctl kernel.yama.ptrace_scope=0"),
        (
            dict(yama=1, container="docker"),
            (True, False, False),
            "ptrace_scope is 1",
            "docker run --cap-add SYS_PTRACE",
        ),
        (dict(yama=3, has_capability=True, is_root=True), (True, False, False), "ptrace_scope is 3", "restart"),
        (dict(yama=0, dumpable=False), (True, False, False), "PR_SET_DUMPABLE", "root"),
        (dict(in_inner_container=True), (True, False, False), "pid namespace", "docker exec"),
        (dict(has_capability=True, same_user_namespace=False), (True, False, False), "user namespace", "host"),
        (dict(), (True, False, False), "without CAP_SYS_PTRACE", "root"),
        (dict(container="docker"), (True, False, False), "without CAP_SYS_PTRACE", "--cap-add SYS_PTRACE"),
        (dict(has_capability=True, is_root=True), (True, False, False), "AppArmor", "dmesg"),
        (dict(has_capability=True, container="docker"), (True, False, False), "AppArmor", "apparmor=unconfined"),
        (dict(has_capability=True, container="kubernetes"), (True, False, False), "AppArmor", "appArmorProfile"),
    ],
)
def test_rights_follow_from_facts(
    facts: Facts | dict[str, object], can: tuple[bool, bool, bool], reason: str, fix: str
) -> None:
    """Each way of being refused has its reason and its one fix, in a line."""
    rights = rights_from(facts if isinstance(facts, Facts) else dataclasses.replace(REFUSED, **facts))  # type: ignore[arg-type]
    assert (rights.can_read, rights.can_read_memory, rights.can_ptrace) == can
    assert reason in rights.reason and fix in rights.fix
    assert bool(rights.reason) == bool(rights.fix) == (can != (True, True, True))
    assert "\n" not in rights.reason + rights.fix


@pytest.mark.parametrize(
    ("effective", "has"),
    [("000001ffffffffff", True), ("0000000000080000", True), ("0000000000000000", False), ("x", False)],
)
def test_capability_is_bit_19(effective: str, has: bool) -> None:
    """CAP_SYS_PTRACE is found in the set as /proc writes it."""
    assert process.has_capability(effective) == has


def test_rights_to_a_child(start: Start) -> None:
    """Asking for rights leaves the process as it was: untraced, and running on."""
    pid = start().pid
    before = process.read_stat(f"/proc/{pid}")
    rights = process.rights(pid)
    assert rights.can_read
    assert rights.can_ptrace == (rights.reason == "")
    assert process._status(f"/proc/{pid}")["TracerPid"] == "0"
    after = process.read_stat(f"/proc/{pid}")
    assert before and after and after.started == before.started and after.state in "RS"


def test_a_process_that_clears_its_dumpable_flag_is_seen(start: Start) -> None:
    """A process of an ordinary user that does not let itself be read is told by the owner of its files in /proc."""
    if os.getuid() != 0:
        pytest.skip("only root can start a process as another user")
    drop = (
        "import ctypes; os.setgroups([]); os.setgid(65534); os.setuid(65534); ctypes.CDLL(None).prctl(4, {}, 0, 0, 0)"
    )
    assert process.facts_of(start(drop.format(1)).pid).dumpable is True
    facts = process.facts_of(start(drop.format(0)).pid)
    assert facts.dumpable is False and not facts.same_user


def test_rights_to_nobody() -> None:
    """A process that is gone gives no rights, and no error."""
    assert not process.rights(2**22 + 1).can_read


def test_another_tracer_is_seen(start: Start) -> None:
    """Under another tracer a process can still be read, but not be stopped by us."""
    pid = start().pid
    if not process.rights(pid).can_ptrace:
        pytest.skip(f"no process can be traced here: {process.rights(pid).reason}")
    seize = 0x4206
    tracer = start(f"""
import ctypes
assert ctypes.CDLL(None).ptrace(ctypes.c_long({seize}), ctypes.c_long({pid}), None, None) == 0""")
    rights = process.rights(pid)
    assert (rights.can_read, rights.can_read_memory, rights.can_ptrace) == (True, True, False)
    assert f"pid {tracer.pid} python" in rights.reason


def script(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_the_tool_next_to_our_python_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tool of our own environment is taken before one of the search path."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    ours.mkdir(), other.mkdir()
    monkeypatch.setattr(sys, "executable", str(ours / "python"))
    monkeypatch.setenv("PATH", f"{other}:/usr/bin:/bin")
    assert process.tool("py-spy") == (None, "pip install py-spy")
    later = script(other, "py-spy", "echo py-spy 0.4.2")
    assert process.tool("py-spy") == (str(later), "0.4.2")
    first = script(ours, "py-spy", "echo py-spy, version 0.4.3")
    assert process.tool("py-spy") == (str(first), "0.4.3")
    script(ours, "py-spy", "exit 3")
    path, fix = process.tool("py-spy")
    assert path is None and "pip install py-spy" in fix
