"""Running py-spy and pystack, reading what they write, and measuring what they stop."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.profiling.collect import tools
from paceline.profiling.collect.tools import OUT, StopMeter, ToolRun, complaint, left_stopped, parse_folded, run_tool
from paceline.profiling.evidence import AttachError, Frame

# Programs to look at, and where the tools are; the tests of the levels use these as well.


def tool(name: str) -> str:
    """Path of an installed tool, with the right to use it on a child; else the test is skipped, with the reason."""
    path = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        pytest.skip(f"{name} is not installed")
    refused = _refused(path)
    if refused:
        pytest.skip(f"{name} may not look at a process here: {refused}")
    return path


@functools.cache
def _refused(path: str) -> str:
    code = "import time; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            words = ["dump", "--pid"] if path.endswith("py-spy") else ["remote"]
            run = run_tool([path, *words, str(child.pid)], 30.0)
            return "" if run.returncode == 0 else complaint(run, child.pid)[0]
        finally:
            child.kill()


class Target:
    """A program that runs until it is ended; its first line says that it is ready."""

    def __init__(self, folder: Path, source: str) -> None:
        self.file = folder / "target.py"
        self.file.write_text("import os, queue, sys, threading, time\n" + source)
        self.process = subprocess.Popen([sys.executable, str(self.file)], stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        assert self.process.stdout is not None
        self.words = self.process.stdout.readline().split()

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill_after(self, seconds: float) -> None:
        threading.Timer(seconds, self.process.kill).start()


HOG = """
def hog():
    while True:
        end = time.perf_counter() + 0.02 * {duty}
        while time.perf_counter() < end:
            pass
        time.sleep(0.02 * (1 - {duty}))

def ready():
    print("ready", threading.get_native_id(), flush=True)
    hog()

threading.Thread(target=ready, name="hog; (a) b", daemon=True).start()
time.sleep(60)
"""
WAITERS = """
numbers = queue.Queue()
held = threading.Lock()
held.acquire()

def wait_for_lock():
    held.acquire()

threading.Thread(target=numbers.get, name="queue waiter", daemon=True).start()
threading.Thread(target=wait_for_lock, name="lock waiter", daemon=True).start()
time.sleep(0.3)
print("ready", flush=True)
time.sleep(60)
"""


def moment(pid: int, tid: int) -> tuple[str, str]:
    """State letter and call of a thread."""
    try:
        words = Path(f"/proc/{pid}/task/{tid}/syscall").read_text().split()
    except OSError:
        words = []
    number = words[0] if words else ""
    return tools.thread_stat(pid, tid)[0], {"202": "futex", "98": "futex"}.get(number, number)


def fake_tool(folder: Path, stdout: str = "", raw: str = "", stderr: str = "", code: int = 0) -> str:
    """A program that says what a recorded tool said, and writes `raw` to where ``-o`` says."""
    file = folder / "fake-tool"
    file.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "if '-o' in sys.argv:\n"
        f"    open(sys.argv[sys.argv.index('-o') + 1], 'w').write({raw!r})\n"
        f"sys.stdout.write({stdout!r})\nsys.stderr.write({stderr!r})\nsys.exit({code})\n"
    )
    file.chmod(0o755)
    return str(file)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()


# Running a program.


def test_a_run_gives_all_that_the_program_said() -> None:
    """Both outputs, the status and the time come back, however much it says."""
    run = run_tool(python("import sys; print('x' * 3_000_000); print('no', file=sys.stderr); sys.exit(3)"), 60.0)
    assert (run.returncode, run.ended, len(run.stdout), run.stderr) == (3, "", 3_000_001, "no\n")
    assert run.seconds > 0.0


def test_a_run_counts_its_processor_time() -> None:
    """A program that computed for 0.3 s of its own clock is counted for it, a sleeping one is not."""
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    assert 0.3 <= run_tool(python(busy), 60.0).cpu_s < 5.0
    assert run_tool(["sleep", "0.2"], 60.0).cpu_s < 0.2


def test_a_program_has_a_session_of_its_own() -> None:
    """A Ctrl-C at our terminal does not reach it."""
    run = run_tool(python("import os; print(os.getsid(0) == os.getpid())"), 60.0)
    assert run.stdout == "True\n"


def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """It gets SIGINT first, so that it can write what it has."""
    source = (
        "import time\ntry:\n    print('begun', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: print('wrote')"
    )
    run = run_tool(python(source), 1.0, grace_s=20.0)
    assert run.ended == "timed out"
    assert run.stdout in ("begun\nwrote\n", "")  # empty: a slow machine ended it before it began


def test_a_program_that_will_not_end_is_killed() -> None:
    """One that ignores SIGINT and SIGTERM gets SIGKILL."""
    source = "import signal, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)"
    run = run_tool(python(source), 2.0, grace_s=0.2)
    assert run.ended == "timed out"
    assert run.returncode == -signal.SIGKILL


def test_a_run_can_be_cancelled() -> None:
    """It ends soon after the event, long before its time."""
    cancel = threading.Event()
    threading.Timer(0.3, cancel.set).start()
    run = run_tool(["sleep", "60"], 60.0, cancel)
    assert run.ended == "cancelled"
    assert run.seconds < 30.0


class _Interrupting(threading.Event):
    """Has a Ctrl-C come where it is asked."""

    def is_set(self) -> bool:
        raise KeyboardInterrupt


def test_no_child_is_left_when_an_exception_passes_through(tmp_path: Path) -> None:
    """A Ctrl-C goes on its way, and the program is gone."""
    file = tmp_path / "pid"
    with pytest.raises(KeyboardInterrupt):
        run_tool(["sh", "-c", f"echo $$ > {file}; exec sleep 60"], 60.0, _Interrupting())
    if file.exists() and file.read_text().strip():  # it may have been ended before it began
        assert not Path(f"/proc/{file.read_text().strip()}").exists()


def test_a_program_dies_with_us(tmp_path: Path) -> None:
    """When we are killed outright, the kernel ends the program."""
    if not tools._death_guard():
        pytest.skip("setpriv of util-linux is not installed")
    file = tmp_path / "pid"
    source = (
        "from paceline.profiling.collect.tools import run_tool\n"
        f"run_tool(['sh', '-c', 'echo $$ > {file}; exec sleep 60'], 60.0)"
    )
    with subprocess.Popen(python(source), env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as parent:
        assert until(lambda: file.exists() and file.read_text().endswith("\n"), 60.0)
        parent.kill()
    pid = int(file.read_text())
    assert until(lambda: tools.is_gone(pid))


def test_a_program_that_is_not_there_is_an_error_in_words() -> None:
    """It names the program and no traceback is needed."""
    with pytest.raises(AttachError, match="cannot start /nowhere/py-spy"):
        run_tool(["/nowhere/py-spy"], 1.0)


# What went wrong.

NOT_RUNNING = """Error: Failed to get process executable name. Check that the process is running.

Caused by:
    0: Permission denied (os error 13)
    1: Permission denied (os error 13)
"""


@pytest.mark.parametrize(
    ("stderr", "reason", "fix"),
    [
        (NOT_RUNNING, "not allowed", "SYS_PTRACE"),
        ("Permission Denied: Try running again with elevated permissions by going 'sudo env'", "not allowed", "root"),
        ("Error: Failed to suspend process\n 1: EPERM: Operation not permitted", "not allowed", "SYS_PTRACE"),
        ("\N{SKULL} Engine error: Operation not permitted \N{SKULL}\n\nThe specified", "not allowed", "SYS_PTRACE"),
        ("Error: Failed to find python version from target process", "not a Python process", "launcher"),
        (
            "\N{SKULL} Engine error: Could not determine python version from /usr/bin/sleep \N{SKULL}",
            "not a Python",
            "",
        ),
        ("Error: Unsupported version of Python: 3.15.0", "Python 3.15.0 is not supported", "newer py-spy"),
        ("Error: Failed to find a python interpreter in the .data section", "not recognised", "update"),
        ("Error: Cannot detect GIL holding in version '3.13.0' on the current platform", "who has the GIL", "free"),
        ("Error: No space left on device (os error 28)", "no space left", "TMPDIR"),
        ("WARNING(process_remote): x\nError: Something new", "Something new", ""),
        ("", "said nothing", ""),
    ],
)
def test_complaints_are_put_in_words(stderr: str, reason: str, fix: str, sleeper: subprocess.Popen[bytes]) -> None:
    """What a tool says of a failure becomes one line and one remedy."""
    said = complaint(ToolRun(1, "", stderr, 0.0, 0.1), sleeper.pid)
    assert reason in said[0]
    assert fix in said[1]
    assert "\n" not in said[0] + said[1]


def test_a_process_that_ended_is_the_first_reason(sleeper: subprocess.Popen[bytes]) -> None:
    """Whatever the tool said of it."""
    sleeper.kill()
    sleeper.wait()
    assert complaint(ToolRun(1, "", NOT_RUNNING, 0.0, 0.1), sleeper.pid) == ("the process ended", "")


# What the kernel says.


def test_threads_that_stand_stopped_are_found(sleeper: subprocess.Popen[bytes]) -> None:
    """Until they go on."""
    assert left_stopped(sleeper.pid) == []
    sleeper.send_signal(signal.SIGSTOP)
    assert until(lambda: left_stopped(sleeper.pid, 0.0) == [sleeper.pid])
    sleeper.send_signal(signal.SIGCONT)
    assert left_stopped(sleeper.pid, 10.0) == []


def test_a_process_that_is_gone_has_no_threads() -> None:
    """And is no error."""
    child = subprocess.Popen(["true"])
    assert until(lambda: tools.is_gone(child.pid))  # a zombie by now
    child.wait()
    assert tools.is_gone(child.pid)
    assert tools.thread_ids(child.pid) == []
    assert tools.thread_stat(child.pid, child.pid) == ("", 0)
    assert left_stopped(child.pid) == []
    assert tools.tracer_of(child.pid) == 0
    assert tools.os_thread_ids(child.pid, [1]) == {}


def test_kernel_numbers_of_threads_are_found_by_address() -> None:
    """As for interpreters before 3.11, for which py-spy has only the addresses."""
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        wanted = {thread.ident: thread.native_id for thread in threads}
        found = tools.os_thread_ids(os.getpid(), [*wanted, 8, 2**70])  # type: ignore[list-item]
        if not found:
            pytest.skip("no glibc of a known layout, or its memory may not be read")
        assert found == wanted
    finally:
        end.set()
        for thread in threads:
            thread.join()


# The meter.


def test_the_meter_sums_stops() -> None:
    """Of a thread that stands still for a quarter of the time, in stretches of 50 ms."""
    start = time.perf_counter()

    def read(pid: int, tid: int) -> str:
        return "t" if (time.perf_counter() - start) % 0.2 > 0.15 else "S"

    start = time.perf_counter()
    with StopMeter(os.getpid(), read) as meter:
        time.sleep(1.6)
    assert 0.15 < meter.stops.share < 0.35
    assert meter.stops.total_s == pytest.approx(meter.stops.share * meter.stops.seconds)
    assert 0.03 < meter.stops.longest_s < 0.2


def test_the_meter_sees_nothing_of_a_process_that_runs(sleeper: subprocess.Popen[bytes]) -> None:
    """Nor of one that stood stopped before."""
    with StopMeter(sleeper.pid) as meter:
        time.sleep(0.2)
    assert meter.stops.total_s == 0.0
    sleeper.send_signal(signal.SIGSTOP)
    assert until(lambda: left_stopped(sleeper.pid, 0.0) == [sleeper.pid])
    with StopMeter(sleeper.pid) as meter:
        time.sleep(0.2)
    assert meter.stops.total_s == 0.0


def test_the_meter_agrees_with_a_stop_that_is_known(sleeper: subprocess.Popen[bytes]) -> None:
    """A stop that we make ourselves is measured as long as it was."""
    with StopMeter(sleeper.pid) as meter:
        time.sleep(0.2)
        sleeper.send_signal(signal.SIGSTOP)
        begin = time.perf_counter()
        time.sleep(0.5)
        sleeper.send_signal(signal.SIGCONT)
        stopped_s = time.perf_counter() - begin
        time.sleep(0.2)
    assert meter.stops.longest_s == pytest.approx(stopped_s, abs=0.25)
    assert meter.stops.total_s == pytest.approx(stopped_s, abs=0.25)


def test_the_meter_outlives_its_process(sleeper: subprocess.Popen[bytes]) -> None:
    """One that ends meanwhile is no error, and neither is one that was never there."""
    with StopMeter(sleeper.pid) as meter:
        time.sleep(0.1)
        sleeper.kill()
        sleeper.wait()
        time.sleep(0.1)
    assert meter.stops.total_s == 0.0
    with StopMeter(sleeper.pid):
        pass


# py-spy's raw output.

RAW = """\
thread (30158): second;0x7f93c95278ec (libc.so.6);thread_run (libpython3.11.so.1.0);Thread.run (threading.py:982);\
second (hog.py:14);pthread_cond_wait (libc.so.6);0x7f93c94a3f16 (libc.so.6) 2
thread (30155): hog; (a) b;Thread._bootstrap (threading.py:1002);hog (hog.py:8);clock_gettime (libc.so.6);\
0x7f93c9c26b46 ([vdso]) 7
thread (0x7FB3428F86C0): hog;_bootstrap (threading.py:973);run (threading.py:953) 48
thread (9);main (python3.11);at::native::add(at::Tensor const&, c10::Scalar) (libtorch_cpu.so) 1
thread (9): A;<module> (<string>:1);f (a (copy).py:3);g (x;y.py:4) 3
"""


def test_raw_output_is_read() -> None:
    """Thread numbers in both forms, native and Python frames, names with semicolons, files with brackets."""
    stacks, bad = parse_folded(RAW)
    assert bad == 0
    assert [(s.tid, s.name, s.count) for s in stacks] == [
        (30158, "second", 2),
        (30155, "hog; (a) b", 7),
        (0x7FB3428F86C0, "hog", 48),
        (9, "", 1),
        (9, "A", 3),
    ]
    assert stacks[0].frames == (
        Frame(name="0x?", file="libc.so.6", is_native=True),
        Frame(name="thread_run", file="libpython3.11.so.1.0", is_native=True),
        Frame(name="Thread.run", file="threading.py", line=982),
        Frame(name="second", file="hog.py", line=14),
        Frame(name="pthread_cond_wait", file="libc.so.6", is_native=True),
        Frame(name="0x?", file="libc.so.6", is_native=True),
    )
    assert stacks[1].frames[-1] == Frame(name="0x?", file="[vdso]", is_native=True)
    assert stacks[3].frames == (
        Frame(name="main", file="python3.11", is_native=True),
        Frame(name="at::native::add(at::Tensor const&, c10::Scalar)", file="libtorch_cpu.so", is_native=True),
    )
    assert stacks[4].frames == (
        Frame(name="<module>", file="<string>", line=1),
        Frame(name="f", file="a (copy).py", line=3),
        Frame(name="g", file="x;y.py", line=4),
    )


@pytest.mark.parametrize(
    ("text", "is_native"),
    [
        ("f (ceval.c:12)", True),
        ("f (kernel.cu:1)", True),
        ("f (lib.rs:1)", True),
        ("cuLaunchKernel (libcuda.so.1)", True),
        ("main (my-python)", True),
        ("bare", True),
        ("f (torchrun:8)", False),
        ("f (frozen.py)", False),
        ("f (<frozen importlib._bootstrap>:1)", False),
    ],
)
def test_native_frames_are_told_by_their_file(text: str, is_native: bool) -> None:
    """Libraries, sources of C and its like, and programs are native; all else with a line is Python."""
    assert tools.parse_frame(text).is_native is is_native
    assert tools.parse_frame("main (torchrun:8)", "torchrun").is_native


NAMES = st.text(
    st.one_of(st.sampled_from(";() :.0123456789"), st.characters(exclude_categories=["Cs"], exclude_characters="\n")),
    max_size=30,
)
FRAMES = st.lists(
    st.builds(
        Frame,
        name=st.from_regex(r"[A-Za-z_<][A-Za-z_0-9.:<>]{0,12}(\([a-z &]{0,4}\))?", fullmatch=True),
        file=st.from_regex(r"[a-z_]{1,8}( \([a-z]{1,4}\))?\.py", fullmatch=True),
        line=st.integers(1, 10**6),
    ).filter(lambda frame: frame.name != "<shim>"),
    min_size=1,
    max_size=5,
).map(tuple)


@given(tid=st.integers(1, 2**47), name=NAMES, frames=FRAMES, count=st.integers(1, 10**6))
def test_a_known_name_is_taken_off_whole(tid: int, name: str, frames: tuple[Frame, ...], count: int) -> None:
    """Whatever a thread's name holds, its frames come back where the name is known."""
    line = f"thread ({tid}): {name};{';'.join(map(str, frames))} {count}\n"
    stacks, bad = parse_folded(line, {tid: name})
    assert (stacks, bad) == ([tools.Folded(tid, name, frames, count)], 0)


@given(tid=st.integers(1, 2**47), name=NAMES, frames=FRAMES, count=st.integers(1, 10**6))
def test_an_unknown_name_does_not_cost_the_leaf(tid: int, name: str, frames: tuple[Frame, ...], count: int) -> None:
    """Where a name is not known it may take or leave a frame at the outer end; thread, count and leaf stay."""
    line = f"thread ({tid}): n{name};{';'.join(map(str, frames))} {count}\n"
    stacks, bad = parse_folded(line)
    assert bad == 0
    assert (stacks[0].tid, stacks[0].count) == (tid, count)
    if name.count("(") <= name.count(")"):
        assert stacks[0].frames[-1] == frames[-1]


def test_a_line_break_in_a_name_is_part_of_it() -> None:
    """The line goes on up to its count."""
    stacks, bad = parse_folded("thread (5): a\nb;f (x.py:1) 3\nthread (6): c;g (y.py:2) 4\n")
    assert bad == 0
    assert [(s.tid, s.name, s.count) for s in stacks] == [(5, "a\nb", 3), (6, "c", 4)]


@given(st.text(max_size=200))
def test_no_text_is_too_odd(text: str) -> None:
    """What is no stack is counted and raises nothing."""
    parse_folded(text)
    parse_folded(f"thread (1): {text} 5")
    tools.parse_frame(text)


def test_what_a_tool_writes_stays_in_memory() -> None:
    """Its output file is none on a disk: a full one does not matter, and nothing is left behind."""
    run = run_tool(["sh", "-c", 'echo said; echo written > "$1"', "sh", OUT], 10.0)
    assert (run.stdout, run.file, run.returncode) == ("said\n", "written\n", 0)
