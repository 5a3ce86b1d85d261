"""What may go wrong with a look: processes that end, rights that lack, disks that are full, and its own end.

Whatever happens, the process goes on as before, a user gets one line that says what is wrong, and the exit code is 0
exactly where the report was written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli import attach
from paceline.profiling import look as looking
from paceline.profiling.collect.tools import thread_ids, thread_stat
from paceline.profiling.diff import load_report
from paceline.profiling.evidence import Report
from paceline.profiling.look import Wish, look
from tests.integration.test_attach_truth import PATIENCE_S
from tests.integration.test_profile_live import command, environment, until
from tests.programs import running
from tests.unit.profiling.test_collect_tools import tool

SECRET = "SECRETSECRET"
TOKEN = "hf_ENVIRONMENTenvironment"

SEIZE = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
pid = int(sys.argv[1])
assert libc.ptrace(0x4206, ctypes.c_long(pid), None, None) == 0, ctypes.get_errno()
print("ready", flush=True)
time.sleep(60)
"""
"""A debugger that lets the process run: PTRACE_SEIZE of its first thread."""

AS_NOBODY = """
import os, sys
import paceline.cli.attach, paceline.profiling.look, paceline.report.attach, paceline.report.attach_text
import paceline.control.socket, paceline.profiling.collect.stages, paceline.profiling.diff
from paceline.cli.main import main
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[1]))
del sys.argv[1:3]
main()
"""
"""Everything is imported before, as nobody may not be let into the folders."""


@pytest.fixture(scope="module")
def hog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A program that goes on for longer than the tests of this file, with secrets in its command and environment."""
    with running(
        "gil_hog.py", "0.5", "--api-key", SECRET, f"--password={SECRET}", environment=environment(TOKEN=TOKEN)
    ) as process:
        yield process


def paceline(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """``paceline profile attach`` as a user has it, or another verb of it where the first argument is one."""
    words = [str(argument) for argument in arguments]
    verb = words.pop(0) if words[0] in ("report", "diff") else "attach"
    return subprocess.run(
        [sys.executable, "-m", "paceline", "profile", verb, *words],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def check_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Exit code 1, one line that says why, no traceback and nothing on stdout."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("looking at ", "native stacks of "))]
    assert done.returncode == 1, done
    assert len(lines) == 1 and lines[0].startswith("paceline: "), done.stderr
    for part in parts:
        assert part in lines[0], (part, lines[0])
    assert "Traceback" not in done.stderr


def states(pid: int) -> set[str]:
    """Kernel states of all threads."""
    return {thread_stat(pid, tid)[0] for tid in thread_ids(pid)}


def goes_on(pid: int) -> bool:
    """Whether no thread stands stopped, and it gets on with its work."""

    def ticks() -> int:
        return sum(thread_stat(pid, tid)[1] for tid in thread_ids(pid))

    before = ticks()
    until(lambda: ticks() > before + 5)
    return not states(pid) & {"T", "t"}


def children_of(pid: int) -> list[int]:
    """Processes whose parent that is."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(folder.name))
    return found


def tools_at(pid: int) -> list[str]:
    """Commands of py-spy and pystack that still look at a process."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if any("py-spy" in word or "pystack" in word for word in words[:4]) and str(pid) in words:
                    found.append(" ".join(words))
    return found


# What is no process.


def test_a_number_without_a_process_is_refused() -> None:
    """One that no process has, 0, and one beyond all numbers of processes."""
    last = int(Path("/proc/sys/kernel/pid_max").read_text())
    for number in (last + 1, 0, 10**30):
        code, said = command("profile", "attach", number)
        assert code == 1 and f"there is no process {number}" in said and "ps" in said
    check_refused(paceline(last + 1, "--seconds", 1), "there is no process")


def test_a_zombie_and_we_ourselves_are_refused() -> None:
    """Each with what it is, in one line."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        until(lambda: thread_stat(child.pid, child.pid)[0] == "Z")
        code, said = command("profile", "attach", child.pid)
        assert code == 1 and "has ended and waits for its parent" in said
    code, said = command("profile", "attach", os.getpid())
    assert code == 1 and "is this command itself" in said


def test_a_thread_of_a_process_is_refused_with_the_number_that_is_wanted(hog: subprocess.Popen[str]) -> None:
    """Numbers of threads look like those of processes."""
    tid = next(tid for tid in thread_ids(hog.pid) if tid != hog.pid)
    code, said = command("profile", "attach", tid)
    assert code == 1 and f"give {hog.pid}" in said


def test_what_is_neither_a_number_nor_a_run_is_refused(tmp_path: Path) -> None:
    """Words, a file, a folder without a run, nothing, and digits that are none."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for what in ("notanumber", tmp_path / "file", tmp_path / "folder", tmp_path / "missing", "\N{SUPERSCRIPT TWO}"):
        code, said = command("profile", "attach", what)
        assert code == 1 and "wanted" in said or "give the run.dir" in said, (what, said)
        assert "\n" not in said.strip()


def test_a_suspicion_or_a_thread_that_there_is_not_is_refused(hog: subprocess.Popen[str]) -> None:
    """With those that there are."""
    tool("py-spy")
    code, said = command("profile", "attach", hog.pid, "--hypothesis", "the weather")
    assert code == 1 and "gil" in said and "explicit-sync" in said
    code, said = command("profile", "attach", hog.pid, "--seconds", 1, "--thread", "nosuch")
    assert code == 1 and "there is no such thread" in said and "hog" in said


# Where the report goes.


def test_the_report_as_json_is_all_of_stdout(hog: subprocess.Popen[str], tmp_path: Path) -> None:
    """And it can be saved, shown again and made a page of later, the same one that the look itself makes."""
    done = paceline(hog.pid, "--seconds", 1, "--json", "-", "--html", tmp_path / "now.html")
    assert done.returncode == 0, done.stderr
    report = Report.model_validate(json.loads(done.stdout))
    assert report.pid == hog.pid and report.conclusion.line
    (tmp_path / "a.json").write_text(done.stdout)
    again = paceline("report", tmp_path / "a.json", "--html", tmp_path / "later.html")
    assert again.returncode == 0 and "VERDICT" in again.stdout
    assert (tmp_path / "later.html").read_text() == (tmp_path / "now.html").read_text()
    assert load_report(tmp_path / "a.json") == report


def test_no_secret_of_the_process_is_in_a_report(hog: subprocess.Popen[str], tmp_path: Path) -> None:
    """Neither of its command nor of its environment nor of ours, in any form of the report."""
    tool("py-spy")
    ours = "sk-ENVIRONMENTofours123"
    done = paceline(
        hog.pid, "--seconds", 1, "--allow-pause", "--pause-budget", 0.3, "--native-seconds", 2,
        "--json", tmp_path / "a.json", "--html", tmp_path / "a.html", WANDB_API_KEY=ours,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    texts = [done.stdout, done.stderr, *((tmp_path / name).read_text() for name in ("a.json", "a.html"))]
    assert all("--api-key" in text for text in (done.stdout, texts[2], texts[3]))
    for secret in (SECRET, TOKEN, ours):
        assert not any(secret in text for text in texts)


def test_a_place_that_cannot_be_written_is_said_in_one_line(hog: subprocess.Popen[str], tmp_path: Path) -> None:
    """A folder that is missing, before the look; what fails later, after it."""
    for option in ("--json", "--html"):
        code, said = command("profile", "attach", hog.pid, option, tmp_path / "missing" / "a")
        assert code == 1 and "there is no folder" in said
        code, said = command("profile", "attach", hog.pid, option, tmp_path)
        assert code == 1 and "is a folder" in said
    code, said = command("profile", "attach", hog.pid, "--seconds", 1, "--json", "/proc/a.json")
    assert code == 1 and "/proc/a.json cannot be written" in said


def check_refused_at_the_end(hog: subprocess.Popen[str], place: object, *parts: str) -> None:
    """The report is shown before it turns out that it cannot be written."""
    done = paceline(hog.pid, "--seconds", 1, "--json", place)
    assert "VERDICT" in done.stdout
    done.stdout = ""
    check_refused(done, *parts)


def test_a_full_disk_leaves_the_older_report_as_it_was(
    hog: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, one line, no half a report and nothing beside it."""
    place = tmp_path / "a.json"
    place.write_text("older")
    report = look(hog.pid, Wish(seconds=1.0))
    (tmp_path / "b.json").write_text(report.model_dump_json(by_alias=True))

    def full(self: object, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(attach, "write_atomically", full)
        code, said = command("profile", "report", tmp_path / "b.json", "--json", place)
    assert code == 1 and f"{place} cannot be written: No space left on device" in said
    assert place.read_text() == "older"
    check_refused_at_the_end(hog, "/dev/full", "/dev/full cannot be written", "No space left on device")


def test_a_disk_that_is_really_full_leaves_the_older_report_as_it_was(
    hog: subprocess.Popen[str], tmp_path: Path
) -> None:
    """On a file system of 16 kB, which has no room for a report."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None or os.geteuid() != 0:
        pytest.skip("no file system can be mounted here")
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=16k", "paceline-test", str(disk)]).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        (disk / "a.json").write_text("older")
        check_refused_at_the_end(hog, disk / "a.json", "cannot be written: No space left on device")
        assert os.listdir(disk) == ["a.json"] and (disk / "a.json").read_text() == "older"
    finally:
        subprocess.run([umount, str(disk)], check=True)


# What the process does meanwhile.


@pytest.mark.parametrize("pause", [False, True], ids=["first window", "native stacks"])
def test_a_process_that_ends_meanwhile_is_reported_until_then(pause: bool, tmp_path: Path) -> None:
    """The report is written, says so, and gives figures over the time that it was there."""
    tool("py-spy")
    told: list[str] = []
    with running("gil_hog.py", "0.8") as process:

        def say(text: str) -> None:
            told.append(text)
            if len(told) == (2 if pause else 1):
                threading.Timer(0.8, process.kill).start()

        report = look(process.pid, Wish(2.0, allow_pause=pause, budget=0.3, native_seconds=4.0), say=say)
    assert any("ended during the look" in note for note in report.notes)
    assert report.conclusion.line and report.pid == process.pid
    assert any(thread.cpu is not None and thread.cpu.value > 0.3 for thread in report.threads)
    assert report.versions["paceline"] and report.observations["process.cuda"].value == 0.0
    file = tmp_path / "a.json"
    file.write_text(report.model_dump_json(by_alias=True))
    assert command("profile", "report", file, "--html", tmp_path / "a.html")[0] == 0


def test_the_command_ends_well_where_the_process_ends_meanwhile(tmp_path: Path) -> None:
    """Exit code 0, as the report was written."""
    with running("gil_hog.py", "0.8") as process:
        tool_process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "profile", "attach", str(process.pid), "--seconds", "3",
             "--json", str(tmp_path / "a.json")],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert tool_process.stderr is not None
        assert tool_process.stderr.readline().startswith("looking at ")
        time.sleep(1.0)
        process.kill()
        shown, said = tool_process.communicate(timeout=PATIENCE_S)
    assert tool_process.returncode == 0 and "Traceback" not in said
    assert "ended during the look" in shown
    assert any("ended during the look" in note for note in load_report(tmp_path / "a.json").notes)


def test_a_stopped_process_is_reported_and_left_stopped() -> None:
    """SIGSTOP: nothing is blamed, what would let it go on is named, and it is not done; nor are native stacks taken."""
    tool("py-spy")
    with running("gil_hog.py", "0.8") as process:
        process.send_signal(signal.SIGSTOP)
        until(lambda: states(process.pid) == {"T"})
        report = look(process.pid, Wish(1.0, allow_pause=True))
        assert states(process.pid) == {"T"}
        assert report.conclusion.cause == "" and "stopped" in report.conclusion.line
        assert f"kill -CONT {process.pid}" in report.conclusion.next
        assert not [each.id for each in report.hypotheses if each.outcome == "supported"]
        level = report.level("4")
        assert level is not None and not level.ok and "stopped" in level.reason
        process.send_signal(signal.SIGCONT)
        assert goes_on(process.pid)


def test_a_process_under_another_tracer_is_read_and_not_stopped() -> None:
    """A debugger has it: who that is, what needs it to be stopped is left out, and the rest is there."""
    tool("py-spy")
    with running("gil_hog.py", "0.8") as process:
        tracer = subprocess.Popen(
            [sys.executable, "-c", SEIZE, str(process.pid)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert tracer.stdout is not None and tracer.stderr is not None
            if tracer.stdout.readline() != "ready\n":
                pytest.skip(f"no process may be traced here: {tracer.stderr.read().strip().splitlines()[-1:]}")
            report = look(process.pid, Wish(1.0, allow_pause=True))
            levels = {level.id: level for level in report.levels}
            for id in ("4", "4b"):
                assert not levels[id].ok and f"tracer (pid {tracer.pid}" in levels[id].reason
                assert "end the tracer" in levels[id].fix
            assert levels["1"].ok and levels["2"].ok and levels["3"].ok, levels
            assert tracer.poll() is None and goes_on(process.pid)
        finally:
            tracer.kill()
            tracer.communicate()
        assert goes_on(process.pid)


def test_three_hundred_threads_are_looked_at_in_time() -> None:
    """All are in the report, the one that works is found, and the look takes its time and no more."""
    tool("py-spy")
    with running("many_threads.py", "300") as process:
        until(lambda: len(thread_ids(process.pid)) == 301)
        before, began = os.times(), time.monotonic()
        report = look(process.pid, Wish(2.0))
        took, after = time.monotonic() - began, os.times()
    assert len([thread for thread in report.threads if thread.pid == process.pid]) == 301
    assert sum(thread.name.startswith("many-") for thread in report.threads) == 299
    (critical,) = (thread for thread in report.threads if thread.tid in report.critical)
    assert critical.name == "working"
    assert took < 30.0
    spent = sum(after[:4]) - sum(before[:4])
    assert spent < 3.0 * 2.0, "the tools took more than three cores"


# Our own end.


def start_looking(pid: int, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A look of a minute; temporary files go to a folder of their own."""
    (folder / "temporary").mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", "profile", "attach", str(pid), *arguments,
         "--json", str(folder / "a.json")],
        env=environment(TMPDIR=str(folder / "temporary")),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_tools(process: subprocess.Popen[str], pid: int, pause: bool) -> None:
    """Until a tool is at the process: of native stacks, one that stops it."""
    word = "--native" if pause else "--nonblocking"
    until(lambda: any(word in said for said in tools_at(pid)), None)
    assert process.poll() is None
    time.sleep(0.3)


@pytest.mark.parametrize(
    ("number", "pause"),
    [
        pytest.param(signal.SIGINT, False, id="SIGINT-first window"),
        pytest.param(signal.SIGINT, True, id="SIGINT-native stacks"),
        pytest.param(signal.SIGTERM, False, id="SIGTERM-first window"),
        pytest.param(signal.SIGTERM, True, id="SIGTERM-native stacks", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, False, id="SIGKILL-first window"),
        pytest.param(signal.SIGKILL, True, id="SIGKILL-native stacks"),
    ],
)
def test_a_look_that_is_ended_leaves_nothing_behind(
    number: signal.Signals, pause: bool, hog: subprocess.Popen[str], tmp_path: Path
) -> None:
    """By Ctrl-C, by SIGTERM or the hard way: the process goes on, no tool is left at it, and no report is half there.

    Ended in order it removes its temporary files too, and says that it was ended.
    """
    tool("py-spy")
    wish = ["--seconds", "1", "--allow-pause", "--pause-budget", "0.1", "--native-seconds", "60"]
    process = start_looking(hog.pid, tmp_path, *(wish if pause else ["--seconds", "60"]))
    try:
        wait_for_tools(process, hog.pid, pause)
        process.send_signal(number)
        shown, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    until(lambda: not tools_at(hog.pid))
    until(lambda: not states(hog.pid) & {"T", "t"})
    assert goes_on(hog.pid)
    assert not (tmp_path / "a.json").exists() and list(tmp_path.glob("*.tmp*")) == []
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 130, said
        assert "Traceback" not in said and "ended early; the process goes on as before" in said
        assert os.listdir(tmp_path / "temporary") == []
        assert children_of(process.pid) == []


def test_a_look_can_be_ended_by_whoever_asked_for_it(hog: subprocess.Popen[str]) -> None:
    """Through its `cancel`: a report over the time until then, and levels that say so."""
    tool("py-spy")
    cancel = threading.Event()
    threading.Timer(1.5, cancel.set).start()
    began = time.monotonic()
    report = look(hog.pid, Wish(60.0), cancel=cancel)
    assert time.monotonic() - began < 30.0
    level = report.level("3")
    assert level is not None and "cancelled" in level.reason
    assert goes_on(hog.pid) and tools_at(hog.pid) == []


# What is missing.


def test_without_py_spy_the_threads_are_still_told(
    hog: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levels 2 to 4 are missing with what to install, and the report is written."""
    monkeypatch.setattr(looking, "tool", lambda name: (None, f"pip install {name}"))
    code, shown = command(
        "profile", "attach", hog.pid, "--seconds", 1, "--allow-pause", "--json", tmp_path / "a.json", width=200
    )
    assert code == 0 and "pip install py-spy" in shown
    report = load_report(tmp_path / "a.json")
    levels = {level.id: level for level in report.levels}
    for id in ("2", "3", "4", "4b"):
        assert (levels[id].ok, levels[id].reason, levels[id].fix) == (
            False, "py-spy is not installed", "pip install py-spy",
        )  # fmt: skip
    assert levels["1"].ok and report.gil is None
    assert report.conclusion.cause in ("", "cpu-starvation")  # which level 1 sees, on a busy machine
    assert report.conclusion.cause or report.conclusion.next
    assert "py-spy" not in report.versions


def test_another_user_sees_the_threads_and_why_not_more(hog: subprocess.Popen[str]) -> None:
    """Without rights there is level 1 alone, with the reason; what could not be seen refutes nothing."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        pytest.skip("there is no user nobody here")
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(nobody.pw_uid), str(nobody.pw_gid), "profile", "attach", str(hog.pid),
         "--seconds", "1", "--allow-pause", "--json", "-"],
        env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = Report.model_validate(json.loads(done.stdout))
    levels = {level.id: level for level in report.levels}
    for id in ("2", "3", "4", "4b"):
        assert not levels[id].ok and "we are nobody" in levels[id].reason and "root" in levels[id].fix
    assert levels["1"].ok
    assert any(thread.cpu is not None and thread.cpu.value > 0.2 for thread in report.threads)
    assert report.conclusion.cause in ("", "cpu-starvation")  # which level 1 sees, on a busy machine
    assert "process.cuda" not in report.observations
    gpu = [each for each in report.hypotheses if each.id in ("gpu-bound", "explicit-sync", "allocator-churn")]
    assert [each.outcome for each in gpu] == ["undecided"] * 3
