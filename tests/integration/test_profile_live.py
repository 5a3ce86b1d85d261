"""Looking at a run, and switching its profile, from another process: nothing was asked for when it was started."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import main
from paceline.cli.observe import observing
from paceline.config import dump_config
from paceline.control.socket import ask
from paceline.errors import PacelineError
from paceline.profiling.page import Snapshot, pages_in, read_page, remove_dead_pages
from tests.toy import Toy

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0

SLOW_TRAINING = """
import sys, time
from paceline.models.target import Target
from paceline.profiling import stages
features = Target.features
def slow(self, tokens, cache=None):
    with stages.MODEL_FORWARD:
        time.sleep(0.02)
    return features(self, tokens, cache)
Target.features = slow
from paceline.cli.main import main
main()
"""

LONG_CALLS = """
import ctypes, sys, threading
from pathlib import Path
from paceline.profiling import stages
folder = Path(sys.argv[1]); folder.mkdir(); (folder / "run.lock").write_text("")
def work():
    with stages.as_role("target-0"):
        while True:
            with stages.PACK_HIDDEN:
                ctypes.CDLL(None).usleep(1000)
stages.open_run(folder / "profile")
threading.Thread(target=work, daemon=True).start()
with stages.as_role("drafter-0"), stages.BACKWARD:
    ctypes.CDLL(None).sleep(300)
"""


def until(condition: Callable[[], object], process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait for something to come true; patience decides nothing but a failure."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        assert process is None or process.poll() is None, "the process ended early"
        time.sleep(0.02)


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | changes


@dataclass
class Run:
    """A process and its run folder."""

    process: subprocess.Popen[bytes]
    path: Path

    @property
    def stages_file(self) -> Path:
        return self.path / "profile" / "stages.jsonl"

    def snapshot(self) -> Snapshot:
        """Of the page."""
        return read_page(pages_in(self.path / "profile")[-1])

    def has_page(self) -> bool:
        """Whether it has come so far."""
        return bool(pages_in(self.path / "profile"))

    def records(self) -> list[dict[str, Any]]:
        """Lines of ``stages.jsonl``."""
        text = self.stages_file.read_text() if self.stages_file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextlib.contextmanager
def started(program: str, *arguments: str, run_dir: Path) -> Iterator[Run]:
    """A program that runs meanwhile, from when it has a page on."""
    log = run_dir.with_suffix(".log")
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    run = Run(process, run_dir)
    try:
        until(run.has_page, process)
        yield run
    finally:
        process.kill()
        process.wait()
        remove_dead_pages(run_dir / "profile")


@pytest.fixture(scope="module")
def training(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A slow run of two targets that goes on for longer than all tests here; profiling is not mentioned."""
    folder = tmp_path_factory.mktemp("live")
    config = toy.config(
        folder / "run",
        "data.epochs=4000",
        "eval.validate_every=100000",
        "checkpoint.every_steps=100",
        "topology.targets=2",
    )
    (folder / "run.yaml").write_text(dump_config(config))
    with started(SLOW_TRAINING, "train", str(folder / "run.yaml"), run_dir=folder / "run") as run:
        until(lambda: run.snapshot().gauges["step"] >= 2, run.process)
        yield run


def command(*arguments: object, width: int = 120) -> tuple[int, str]:
    """Exit code and output of the command, in this process."""
    words = [str(argument) for argument in arguments]
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(main.app, words)
    if isinstance(result.exception, PacelineError):
        return 1, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_profiling_is_switched_on_and_off_from_a_second_process(training: Run) -> None:
    """Tables appear in the output and in the file with the stages of both sides, and cease; the run goes on."""
    assert not training.stages_file.exists()
    switched = subprocess.run(
        [sys.executable, "-m", "paceline", "profile", "on", str(training.path), "--interval", "0.3"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert switched.returncode == 0, switched.stderr
    assert f"profiling is on in process {training.process.pid}, a table every 0.3 s" in switched.stdout
    until(lambda: {r["role"] for r in training.records()} >= {"target-0", "target-1", "drafter-0"}, training.process)
    log = training.path.with_suffix(".log")
    until(lambda: "model_forward" in log.read_text(), training.process)

    assert command("profile", "off", training.path) == (0, f"profiling is off in process {training.process.pid}\n")
    until(lambda: "profiling is off" in log.read_text(), training.process)
    before, step = training.records(), training.snapshot().gauges["step"]
    until(lambda: training.snapshot().gauges["step"] > step + 5, training.process)
    assert training.records() == before
    counted = {record["role"]: record["stages"] for record in before}
    assert counted["target-0"]["model_forward"]["count"] > 0
    assert counted["drafter-0"]["backward"]["count"] > 0


def test_profiling_is_switched_over_the_socket(training: Run) -> None:
    """The process itself does the same when it is asked, and refuses what makes no sense."""
    place = training.path / "profile" / "control.sock"
    assert command("profile", "on", training.path, "--socket", "--interval", "500")[0] == 0
    answer = ask(place, "status")
    assert answer["pid"] == training.process.pid and answer["profiling"] is True and answer["interval_s"] == 500
    assert training.snapshot().control.interval_s == 500
    assert command("profile", "off", training.path, "--socket")[0] == 0
    assert not training.snapshot().control.is_on
    for interval in (-1, "soon", None, float("nan")):
        with pytest.raises(PacelineError, match="seconds from 0 to 86400 were wanted"):
            ask(place, "profile_on", interval=interval)
    for batches, message in (("3", "a whole number was wanted"), (0, "were asked for"), (10**6, "were asked for")):
        with pytest.raises(PacelineError, match=message):
            ask(place, "torch", batches=batches)
    with pytest.raises(PacelineError, match="there are: profile_on, profile_off, torch"):
        ask(place, "dance")
    assert not training.snapshot().control.is_on


def test_top_and_status_look_at_a_live_run(training: Run) -> None:
    """One frame with every role, its stages and the queue; afterwards counting is off as before."""
    until(lambda: len((training.path / "metrics.jsonl").read_text().splitlines()) > 20, training.process)
    code, shown = command("top", training.path, "--once", "--every", "0.5")
    assert code == 0
    for part in ("counting for this view", "queue ", "put wait", "get wait", "verdict ", "tokens/s", "target-0  ",
                 "target-1  ", "drafter-0  ", "model_forward", "backward", "other"):  # fmt: skip
        assert part in shown
    assert "stopped" not in shown
    assert not training.snapshot().control.is_on
    state = json.loads(command("status", training.path, "--json")[1])
    assert (state["state"], state["pid"], state["queue"]["depth"]) == ("running", training.process.pid, 4)
    assert state["step"] > 20 and state["tok_per_s"] > 0 and 0 <= state["get_wait_frac"] <= 1
    assert state["verdict"]["line"] and state["left_s"] > 0
    roles = {thread["role"] for thread in state["threads"]}
    assert roles - {"checkpoint"} == {"target-0", "target-1", "drafter-0"}  # a save may be under way
    shown = command("status", training.path)[1]
    assert f"running     process {training.process.pid} on " in shown and "verdict     " in shown


def test_a_trace_is_taken_of_a_live_run(training: Run, tmp_path: Path) -> None:
    """A file for Perfetto, with nothing left of what it was made from."""
    pytest.importorskip("perfetto")
    code, shown = command("profile", "trace", training.path, "--seconds", "0.5", "--out", tmp_path / "a.pftrace")
    assert code == 0 and "runs of stages in 0.5 s" in shown and "open it at ui.perfetto.dev" in shown
    assert (tmp_path / "a.pftrace").stat().st_size > 1000
    assert list((training.path / "profile").glob("trace-*")) == []
    assert not training.snapshot().control.is_on


def test_a_stopped_process_still_shows_where_it_is(training: Run) -> None:
    """SIGSTOP: top and status read its page, say that it is stopped, and leave it as it was."""
    training.process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: Path(f"/proc/{training.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        code, shown = command("top", training.path, "--once", "--every", "0.2")
        assert code == 0
        assert f"stopped by a signal: `kill -CONT {training.process.pid}` lets it go on" in shown
        assert "no stage has changed for " in shown
        where = {thread.role: thread.inner.stage for thread in training.snapshot().threads if thread.inner}
        for role, stage in where.items():
            assert f" {role}  in {stage} for " in shown
        assert where, "it was stopped between all stages"
        assert "stopped     process" in command("status", training.path)[1]
        with pytest.raises(PacelineError, match="did not answer"):
            ask(training.path / "profile" / "control.sock", "status", timeout_s=0.2)
    finally:
        training.process.send_signal(signal.SIGCONT)
    step = training.snapshot().gauges["step"]
    until(lambda: training.snapshot().gauges["step"] > step, training.process)
    assert not training.snapshot().control.is_on


class Terminal:
    """`paceline top` on a terminal of its own, from its first frame with shares on."""

    def __init__(self, run: Run) -> None:
        self.seen = b""
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            arguments = [sys.executable, "-m", "paceline", "top", str(run.path), "--every", "0.2"]
            os.execve(sys.executable, arguments, environment(TERM="xterm", COLUMNS="100", LINES="40"))
        while b"model_forward" not in self.seen:
            data = self.read()
            assert data, self.seen
            self.seen += data

    def read(self) -> bytes:
        """What comes next; nothing once nobody has the other end."""
        if not select.select([self.terminal], [], [], PATIENCE_S)[0]:
            return b""
        try:
            return os.read(self.terminal, 65_536)
        except OSError:
            return b""

    def wait(self) -> int:
        """Read to the end; the exit code."""
        while data := self.read():
            self.seen += data
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_top_on_a_terminal_ends_by_a_key(training: Run, key: bytes) -> None:
    """It counts while it is there; afterwards that is off, the terminal as before, and the exit code 0."""
    top = Terminal(training)
    control = training.snapshot().control
    assert control.is_on and control.interval_s == 0
    os.write(top.terminal, key)
    assert top.wait() == 0
    os.close(top.terminal)
    assert b"Traceback" not in top.seen and top.seen.endswith(b"\x1b[?1049l")
    assert not training.snapshot().control.is_on


def test_top_on_a_terminal_that_closes_tidies_up(training: Run) -> None:
    """A connection that breaks takes the counting with it."""
    top = Terminal(training)
    assert training.snapshot().control.is_on
    os.close(top.terminal)
    os.waitpid(top.pid, 0)
    assert not training.snapshot().control.is_on


def test_a_signal_that_was_not_asked_for_is_left_alone(training: Run) -> None:
    """The run neither catches nor ignores SIGUSR1, which schedulers use."""
    status = Path(f"/proc/{training.process.pid}/status").read_text()
    masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith(("SigCgt", "SigIgn")))
    asked, unasked = (1 << number - 1 for number in (signal.SIGTERM, signal.SIGUSR1))
    assert int(masks["SigCgt"], 16) & asked and not int(masks["SigCgt"], 16) & unasked
    assert not int(masks["SigIgn"], 16) & unasked


def test_top_says_how_the_watched_run_ended(training: Run) -> None:
    """The last test of this run: stopped while it is watched, it leaves nothing in memory, and nobody listens."""
    pages = [link.resolve() for link in pages_in(training.path / "profile")]
    top = Terminal(training)
    training.process.send_signal(signal.SIGTERM)
    assert top.wait() == 0
    os.close(top.terminal)
    said = f"process {training.process.pid} has ended: the run was stopped (SIGTERM) at step "
    assert said in top.seen.rpartition(b"\x1b[?1049l")[2].decode()
    assert training.process.wait(PATIENCE_S) == 0
    assert not any(page.exists() for page in pages)
    assert not (training.path / "profile" / "control.sock").exists()
    code, shown = command("top", training.path, "--once")
    assert code == 1 and "the last one was stopped (SIGTERM) at step " in shown
    code, shown = command("profile", "on", training.path)
    assert code == 1 and "`paceline resume" in shown
    assert "ended       the last process was stopped (SIGTERM) at step " in command("status", training.path)[1]


def test_switching_works_while_the_main_thread_sits_in_a_long_call(tmp_path: Path) -> None:
    """No signal, no answer of the main thread: other threads count at once, and top shows where the main thread is."""
    with started(LONG_CALLS, str(tmp_path / "run"), run_dir=tmp_path / "run") as run:

        def packed() -> int:
            return run.snapshot().total("pack_hidden").count

        until(lambda: len(run.snapshot().threads) >= 3, run.process)
        assert packed() == 0
        assert command("profile", "on", run.path, "--interval", "0")[0] == 0
        until(lambda: packed() >= 10, run.process)
        main_thread = next(thread for thread in run.snapshot().threads if thread.role == "drafter-0")
        assert main_thread.inner is not None and main_thread.inner.stage == "backward"
        code, shown = command("top", run.path, "--once", "--every", "0.2")
        assert code == 0 and " drafter-0  in backward for " in shown and "a table every" not in shown
        assert command("profile", "off", run.path)[0] == 0
        until(lambda: not run.snapshot().control.is_on, run.process)
        settled = [-1]

        def has_settled() -> bool:  # a run that was open as it was switched off may still be under way
            before, settled[0] = settled[0], packed()
            return before == settled[0]

        until(has_settled, run.process)


def test_sigusr1_toggles_where_it_was_asked_for(toy: Toy, tmp_path: Path) -> None:
    """On if off, and off if on, while the run lasts; before and after the signal is whose it was."""
    heard: list[int] = []
    mine = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        config = toy.config(tmp_path / "run", "profiling.sigusr1=true")
        with observing(tmp_path / "run", config, lambda text: None) as between:
            page = pages_in(tmp_path / "run" / "profile")[-1]
            between()
            for expected in (True, False, True):
                os.kill(os.getpid(), signal.SIGUSR1)
                until(lambda expected=expected: read_page(page).control.is_on == expected)  # type: ignore[misc]
            assert heard == []
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: heard)
        config = toy.config(tmp_path / "run", "profiling.sigusr1=false")
        with observing(tmp_path / "run", config, lambda text: None):
            page = pages_in(tmp_path / "run" / "profile")[-1]
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda: len(heard) == 2)
            assert not read_page(page).control.is_on
    finally:
        signal.signal(signal.SIGUSR1, mine)
