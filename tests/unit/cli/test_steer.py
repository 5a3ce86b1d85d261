"""`stop`, `checkpoint` and `set` on a run in a thread of this process, and on processes without a socket."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli import main, observe, run_state, steer
from paceline.cli.observe import observing
from paceline.config import RunConfig, load_config
from paceline.control import signals, watchdog
from paceline.control.run_folder import RunFolder
from paceline.control.signals import StopRequest
from paceline.control.socket import ControlError, ask
from paceline.control.steering import Steering
from paceline.profiling import page as layout
from paceline.profiling import stages


def command(*arguments: object) -> tuple[int, str]:
    """Exit code and what is printed, of the command in this process."""
    result = CliRunner().invoke(main.app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, str(result.exception)
    return result.exit_code, result.output


def config(path: Path, *overrides: str) -> RunConfig:
    return load_config(None, [f"run.dir={path}", "target.path=t", "data.path=d", *overrides])


class Trained:
    """What a run does, without a model: steps, saves when asked to, and ends when asked to."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.folder = RunFolder(path)
        self.config = config(path, *overrides)
        self.steering, self.request = Steering(self.config), StopRequest()
        self.problem: str | None = None
        self.shown: list[str] = []
        self.show: Callable[[str], None] = self.shown.append
        self.holds_on = threading.Event()  # no step is made
        self.is_up = threading.Event()

    @property
    def socket(self) -> Path:
        return self.folder.path / "profile" / "control.sock"

    def ledger(self) -> dict[str, int]:
        return {"issued": 9, "trained": 5, "in_flight": 3, "skipped": 1, "retried": 0}

    def saving(self) -> dict[str, Any]:
        return {"problem": self.problem, "saved_step": 3, "writing": False}

    def train(self) -> None:
        with self.folder.lock(), self.request:
            self.folder.write_config(self.config)
            self.folder.write_json("run.json", {"host": platform.node(), "pid": os.getpid()})
            self.folder.event("started", step=0)
            extra = {"steering": self.steering, "stop": self.request, "ledger": self.ledger, "saving": self.saving}
            with observing(self.folder, self.config, self.show, **extra) as between:  # type: ignore[arg-type]
                step = self._steps(between)
            self.folder.event(str(self.request.reason), step=step)

    def _steps(self, between: Callable[[], None]) -> int:
        step = 0
        with stages.as_role("drafter-0"):
            while not self.request or self.holds_on.is_set():
                with stages.FORWARD:
                    time.sleep(0.002)
                    while self.holds_on.is_set():
                        self.is_up.set()
                        time.sleep(0.002)
                between()
                step += 1
                stages.set_gauge("step", step)
                self.is_up.set()
                if self.steering.wants_save():
                    self.steering.begin_save(step)
                    place = self.folder.checkpoints / f"step-{step:08}"
                    if self.problem is None:
                        self.steering.saved(step, place)
                    else:
                        self.steering.save_failed(step, self.problem)
        return step


def start(trained: Trained) -> threading.Thread:
    thread = threading.Thread(target=trained.train)
    thread.start()
    assert trained.is_up.wait(60)
    return thread


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Trained]:
    trained = Trained(tmp_path / "run")
    thread = start(trained)
    yield trained
    trained.holds_on.clear()
    trained.request.request("test")
    thread.join(60)
    assert not thread.is_alive()


def last_event(run: Trained) -> dict[str, Any]:
    line: dict[str, Any] = json.loads((run.folder.path / "events.jsonl").read_text().splitlines()[-1])
    return line


# stop


def test_stop_waits_for_the_end_and_says_the_step(run: Trained) -> None:
    """The run ends as after a signal, under the reason `stop`."""
    code, shown = command("stop", run.folder.path)
    end = last_event(run)
    assert end["event"] == "stop" and end["step"] > 0
    assert code == 0 and f"process {os.getpid()} was asked to stop\n" in shown
    assert f"has ended: it was stopped by `paceline stop` at step {end['step']}, " in shown
    assert f"go on with: paceline resume {run.folder.path}\n" in shown
    code, shown = command("stop", run.folder.path)
    assert code == 1 and f"{run.folder.path} is not running: it was stopped by `paceline stop` at step" in shown


def test_stop_prints_json(run: Trained) -> None:
    """For scripts: whose process, and how it ended."""
    code, shown = command("stop", run.folder.path, "--json")
    answer = json.loads(shown)
    assert code == 0 and answer["pid"] == os.getpid() and answer["how"] == "asked to stop"
    assert answer["ending"]["kind"] == "stop" and answer["ending"]["step"] == last_event(run)["step"]
    assert answer["checkpoint"] is None


def test_stop_that_takes_too_long_says_where_it_is_and_what_to_do(run: Trained) -> None:
    """The request stands; a process that is stopped by a signal is named as such."""
    run.holds_on.set()
    run.is_up.clear()
    assert run.is_up.wait(60)
    code, shown = command("stop", run.folder.path, "--timeout", "0.1")
    assert code == 1 and f"process {os.getpid()} has not ended within 0.1 s: drafter-0 has been in forward for" in shown
    assert f"`paceline stop {run.folder.path} --now` ends it without saving" in shown
    assert run.request.reason == "stop"


def test_a_run_that_is_not_running_is_not_stopped(tmp_path: Path) -> None:
    """The message says how it ended, and whether it can go on; nor can it be asked for anything."""
    path = tmp_path / "run"
    folder = RunFolder(path)
    with folder.lock():
        folder.write_config(config(path))
    for events, message in [
        ([], "is not running, and never was; `paceline train` starts it"),
        ([("started", 0), ("finished", 40)], "is not running: finished at step 40, "),
        ([("resumed", 40), ("SIGHUP", 44)], "is not running: it was stopped (SIGHUP) at step 44, "),
        ([("resumed", 44), ("SIGUSR2", 45), ("set", 45)], "it was stopped (SIGUSR2) at step 45, "),
        ([("resumed", 45), ("stop now", 46)], "it was ended by `paceline stop --now`, without saving, at step 46, "),
        ([("resumed", 46), ("max_hours", 47)], "it was stopped by its time limit (run.max_hours) at step 47, "),
        ([("resumed", 47), ("failed", 48)], "is not running: failed at step 48, "),
        ([("resumed", 48), ("stalled", 48)], "it was killed, or died without a word, some time after step 48, "),
    ]:
        for kind, step in events:
            folder.event(kind, step=step)
        for arguments in (("stop",), ("stop", "--now"), ("checkpoint",), ("set",)):
            extra = ["run.stall_s=1"] if arguments == ("set",) else []
            code, shown = command(*arguments, path, *extra)
            assert code == 1 and message in shown
            assert ("paceline resume" in shown) == (events not in ([], [("started", 0), ("finished", 40)]))
    folder.write_json("run.json", {"host": "elsewhere"})
    assert "was started on elsewhere: give this command there" in command("stop", path)[1]


def wait_for_socket(path: Path, pid: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(ControlError):
            if ask(path, "status")["step"] > 0:
                return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child did not come up")


def forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 97
        with contextlib.suppress(BaseException):
            signals._say = lambda text: None
            work()
            code = 0
        os._exit(code)
    return pid


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_stop_now_ends_the_process_without_saving(tmp_path: Path) -> None:
    """It answers first; the events say that it was not saved."""
    trained = Trained(tmp_path / "run")
    pid = forked(trained.train)
    wait_for_socket(trained.socket, pid)
    code, shown = command("stop", tmp_path / "run", "--now")
    assert code_of(pid) == 143
    assert code == 0 and f"process {pid} was ended\n" in shown
    assert "has ended: it was ended by `paceline stop --now`, without saving, at step" in shown
    assert "there is no checkpoint" in shown and "paceline resume" in shown


def hold(path: Path, ends: bool) -> Callable[[], None]:
    """A process that holds the run and has no socket, and ends on SIGTERM or does not."""

    def work() -> None:
        folder = RunFolder(path)
        with folder.lock(), StopRequest() as stop:
            folder.event("started", step=0)
            (path / "is_up").touch()
            while not (stop and ends):
                time.sleep(0.005)
            folder.event(str(stop.reason), step=3)

    return work


@pytest.mark.parametrize("now", [False, True])
def test_a_process_without_a_socket_gets_a_signal(tmp_path: Path, now: bool) -> None:
    """SIGTERM asks for the same; `--now` kills one that would not hear."""
    pid = forked(hold(tmp_path, ends=not now))
    while not (tmp_path / "is_up").exists():
        time.sleep(0.005)
    code, shown = command("stop", tmp_path, *(["--now"] if now else []))
    assert code_of(pid) == (-signal.SIGKILL if now else 0)
    assert code == 0 and f"was sent {'SIGKILL' if now else 'SIGTERM'}: there is no " in shown
    assert ("was killed, or died without a word" if now else "was stopped (SIGTERM) at step 3") in shown


def test_a_process_that_does_not_hold_the_run_gets_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number in the lock file may be another process's by now; to have the file open is not to hold it."""
    (tmp_path / "run.lock").write_text(str(os.getpid()))
    sent: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda _descriptor, number: sent.append(number))
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number) if number else None)
    assert "is not running" in command("stop", tmp_path)[1]
    with open(tmp_path / "run.lock"):
        assert run_state.holder(RunFolder(tmp_path)) == os.getpid()
        for arguments in ((), ("--now",)):
            code, shown = command("stop", tmp_path, *arguments)
            assert code == 1 and "that it holds" in shown and f"`kill {os.getpid()}`" in shown
    assert sent == []
    with RunFolder(tmp_path).lock():
        steer._send(RunFolder(tmp_path), os.getpid(), signal.SIGTERM)
    assert sent == [signal.SIGTERM]


def test_a_process_that_hangs_in_a_signal_stop_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what lets it go on."""
    pid = forked(hold(tmp_path, ends=True))
    while not (tmp_path / "is_up").exists():
        time.sleep(0.005)
    os.kill(pid, signal.SIGSTOP)
    code, shown = command("stop", tmp_path, "--timeout", "0.2")
    os.kill(pid, signal.SIGCONT)
    assert code == 1 and f"`kill -CONT {pid}` lets it go on" in shown
    assert code_of(pid) == 0


# checkpoint


def test_checkpoint_waits_until_it_is_saved(run: Trained) -> None:
    """The step and the folder are said."""
    code, shown = command("checkpoint", run.folder.path)
    assert code == 0 and " is saved: " in shown and str(run.folder.checkpoints / "step-0") in shown
    answer = json.loads(command("checkpoint", run.folder.path, "--json")[1])
    assert answer["step"] > 0 and answer["path"].endswith(f"{answer['step']:08}")


def test_a_checkpoint_that_fails_says_why(run: Trained) -> None:
    """The run's own reason; it goes on."""
    run.problem = "step-7 cannot be written: No space left on device"
    code, shown = command("checkpoint", run.folder.path)
    assert code == 1 and shown == run.problem
    run.problem = None
    assert command("checkpoint", run.folder.path)[0] == 0


def test_a_checkpoint_that_takes_too_long_is_still_to_come(run: Trained) -> None:
    """Who waits no longer is told so."""
    run.holds_on.set()
    run.is_up.clear()
    assert run.is_up.wait(60)
    code, shown = command("checkpoint", run.folder.path, "--timeout", "0.1")
    assert code == 1 and "no checkpoint within 0.1 s; it is still to come" in shown


# set


def test_set_holds_from_now_on_and_for_the_next_start(run: Trained) -> None:
    """Old and new value are said and written to the events; config.yaml has the new one."""
    code, shown = command("set", run.folder.path, "checkpoint.every_steps=7", "checkpoint.keep_every=null")
    assert code == 0
    assert shown == "checkpoint.every_steps is 7, and was 500\ncheckpoint.keep_every is already null\n"
    assert run.steering.config.checkpoint.every_steps == 7
    assert run.folder.read_config().checkpoint.every_steps == 7
    events = [json.loads(line) for line in (run.folder.path / "events.jsonl").read_text().splitlines()]
    assert [(line["key"], line["old"], line["new"]) for line in events if line["event"] == "set"] == [
        ("checkpoint.every_steps", 500, 7),
        ("checkpoint.keep_every", None, None),
    ]
    answer = json.loads(command("set", run.folder.path, "run.stall_s=1e3", "--json")[1])
    assert [(each["key"], each["new"]) for each in answer["set"]] == [("run.stall_s", 1000.0)]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optim.lr=1", "optim.lr cannot change while a run goes on; what can: run.max_hours"),
        ("run.stall_s", "is not of the form section.key=value"),
        ("run.stall_s=[", "the value is not valid YAML"),
        ("run.stall_s=2026-01-01", "a number, a text or null was wanted"),
        ("run.stall_s=-1", "run.stall_s=-1"),
        ("checkpoint.every_steps=often", "checkpoint.every_steps='often'"),
        ("checkpoint.every_steps=", "checkpoint.every_steps=None"),
    ],
)
def test_what_cannot_be_set_is_refused(run: Trained, setting: str, message: str) -> None:
    """Nothing is changed, in memory or on the disk."""
    before = (run.folder.path / "config.yaml").read_text()
    code, shown = command("set", run.folder.path, setting)
    assert code == 1 and message in shown
    assert run.steering.config == run.config and (run.folder.path / "config.yaml").read_text() == before


def test_a_key_that_cannot_be_set_keeps_the_others_from_being_set(run: Trained) -> None:
    """All keys are looked at before the first is changed."""
    assert command("set", run.folder.path, "run.stall_s=5", "optim.lr=1")[0] == 1
    assert run.steering.config == run.config


def test_set_and_profile_agree(run: Trained) -> None:
    """Whichever came last holds; the old value is what held, and not what a file says."""
    path = run.folder.path
    assert command("set", path, "profiling.interval=50")[1] == "profiling.interval is 50.0, and was 0.0\n"
    assert "already on" in command("profile", "on", path, "--interval", "50")[1]
    command("profile", "off", path)
    assert command("set", path, "profiling.interval=50")[1] == "profiling.interval is 50.0, and was 0.0\n"
    assert ask(run.socket, "status")["interval_s"] == 50.0
    command("profile", "on", path, "--interval", "20")
    command("set", path, "checkpoint.keep_last=5")
    assert ask(run.socket, "status")["interval_s"] == 20.0
    assert command("set", path, "profiling.interval=0")[1] == "profiling.interval is 0.0, and was 20.0\n"
    assert not ask(run.socket, "status")["profiling"]


def test_settings_from_many_at_once_are_all_kept(run: Trained) -> None:
    """The file on the disk is the configuration as it stands, whoever wrote last."""
    threads = [
        threading.Thread(target=ask, args=(run.socket, "set"), kwargs={"key": key, "value": value})
        for value in range(5, 8)
        for key in ("checkpoint.every_steps", "checkpoint.keep_last", "run.stall_s", "run.max_hours")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert run.folder.read_config() == run.steering.config != run.config
    assert yaml.safe_load((run.folder.path / "config.yaml").read_text())["run"]["stall_s"] >= 5


def test_a_setting_that_cannot_be_kept_holds_all_the_same(run: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is a warning that names the file."""

    def refuse(_folder: RunFolder, _config: RunConfig) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "write_config", refuse)
    code, shown = command("set", run.folder.path, "run.stall_s=5")
    assert code == 0 and "warning: " in shown and "it holds until the run ends: No space left" in shown
    assert run.steering.config.run.stall_s == 5


# What the socket answers


def test_the_socket_tells_ledger_and_saving(run: Trained) -> None:
    """As they are given to `observing`."""
    answer = ask(run.socket, "status")
    assert answer["ledger"] == run.ledger() and answer["saving"] == run.saving() and answer["stopping"] is None


@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        ("checkpoint", {"wait_s": "long"}, "wait_s='long': seconds above 0 were wanted"),
        ("checkpoint", {"wait_s": True}, "wait_s=True"),
        ("checkpoint", {"wait_s": 0}, "wait_s=0"),
        ("checkpoint", {"wait_s": 1e30}, r"wait_s=1e\+30"),
        ("set", {"value": 1}, "key=None"),
        ("set", {"key": ["run.stall_s"], "value": 1}, "key=\\['run.stall_s'\\]"),
        ("set", {"key": "target.path", "value": "/etc/passwd"}, "target.path cannot change while a run goes on"),
    ],
)
def test_requests_that_make_no_sense_are_refused(run: Trained, verb: str, arguments: Any, message: str) -> None:
    """The message says what was wanted."""
    with pytest.raises(ControlError, match=message):
        ask(run.socket, verb, **arguments)


def test_a_run_that_cannot_be_steered_says_so(tmp_path: Path) -> None:
    """Observed without what a stop or a save needs, by other code than `paceline train`."""
    place = tmp_path / "profile" / "control.sock"
    with observing(tmp_path, config(tmp_path), lambda text: None):
        requests: list[tuple[str, Any]] = [("stop", {}), ("checkpoint", {}), ("set", {"key": "run.stall_s"})]
        for verb, arguments in requests:
            with pytest.raises(ControlError, match="cannot be|steered"):
                ask(place, verb, **arguments)
        answer = ask(place, "status")
        assert answer["ledger"] is None and answer["saving"] is None


# The watchdog around a run


def test_a_run_that_stands_still_is_told_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Person and events hear which thread is where; when the stall lasts the run has failed, and its process ends."""
    ended: list[str] = []
    monkeypatch.setattr(watchdog, "end_process", ended.append)
    trained = Trained(tmp_path / "run", "run.stall_s=0.2")
    thread = start(trained)
    trained.holds_on.set()
    deadline = time.monotonic() + 60
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    trained.holds_on.clear()
    trained.request.request("test")
    thread.join(60)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (stalled,) = [line for line in events if line["event"] == "stalled"]
    (failed,) = [line for line in events if line["event"] == "failed"]
    (place,) = (tmp_path / "run" / "profile").glob("stall-*.txt")
    assert stalled["step"] == failed["step"] > 0
    assert "drafter-0 (Thread-" in stalled["reason"] and "has been in forward for" in stalled["reason"]
    assert str(place) in stalled["reason"] and "in _steps" in place.read_text()
    assert len(ended) == 1 and "the run ends itself" in failed["reason"]
    assert any("\n  drafter-0" in text for text in trained.shown)


def test_a_run_that_moves_again_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is told as well, and the run is left in peace."""
    monkeypatch.setattr(watchdog, "end_process", lambda text: None)
    trained = Trained(tmp_path / "run", "run.stall_s=0.2")
    has_told = threading.Event()

    def show(text: str) -> None:
        if "nothing has moved" in text:
            trained.steering.set("run.stall_s", 20)  # time enough, however slow this machine is
            has_told.set()

    trained.show = show
    thread = start(trained)
    trained.holds_on.set()
    assert has_told.wait(60)
    assert "has been in forward" in run_state.stall_of(trained.folder)["reason"]  # type: ignore[index]
    trained.holds_on.clear()
    deadline = time.monotonic() + 60
    while run_state.stall_of(trained.folder) is not None and time.monotonic() < deadline:
        time.sleep(0.005)
    trained.request.request("test")
    thread.join(60)
    kinds = [json.loads(line)["event"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert kinds == ["started", "stalled", "moves again", "test"]


def test_what_counts_as_movement(tmp_path: Path) -> None:
    """Another stage, another batch, another thread and another count; not time that goes by, nor a table."""
    page = stages.open_run(tmp_path / "profile")
    assert page is not None
    ledger = {"issued": 0}
    run = observe.Run(RunFolder(tmp_path), config(tmp_path), ledger=lambda: dict(ledger))
    seen: list[object] = []

    def has_moved() -> bool:
        seen.append(observe._movement(run, page, observe._Passed()))
        return len(seen) < 2 or seen[-1] != seen[-2]

    has_moved()
    with stages.as_role("drafter-0"):
        for change in (
            lambda: stages.next_batch(1),
            stages.FORWARD.__enter__,
            stages.LAYERS.__enter__,
            lambda: stages.LAYERS.__exit__(None, None, None),
            lambda: stages.FORWARD.__exit__(None, None, None),
            lambda: stages.next_batch(1),
            lambda: stages.set_gauge("queue", 1),
            lambda: ledger.update(issued=1),
        ):
            change()
            assert has_moved() and not has_moved()
        page.words[layout.INTERVAL] += 1
        page.set_control(layout.Control(1, True, 5.0))
        assert not has_moved()
    stages.close_run(page, tmp_path / "profile")


def test_a_run_without_a_page_is_watched_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its micro-batches are what moves."""
    ended = threading.Event()
    monkeypatch.setattr(stages, "open_run", lambda *args, **kwargs: None)
    monkeypatch.setattr(watchdog, "end_process", lambda text: ended.set())
    run, passed = observe.Run(RunFolder(tmp_path), config(tmp_path)), observe._Passed()
    before = observe._movement(run, None, passed)
    assert observe._movement(run, None, passed) == before
    passed.one_more()
    assert observe._movement(run, None, passed) != before
    with observing(tmp_path, config(tmp_path, "run.stall_s=0.1"), lambda text: None) as between:
        between()
        assert ended.wait(60)
    assert run_state.last_outcome(RunFolder(tmp_path)).kind == "failed"  # type: ignore[union-attr]


def test_bytes_of_a_checkpoint_are_movement(tmp_path: Path) -> None:
    """A slow disk is no fault; the live setting counts, and what cannot be asked is nothing."""
    steering, written = Steering(config(tmp_path)), [0]
    run = observe.Run(RunFolder(tmp_path), config(tmp_path), steering, saving=lambda: {"bytes": written[0]})
    before = observe._movement(run, None, observe._Passed())
    assert observe._movement(run, None, observe._Passed()) == before
    written[0] = 2**20
    assert observe._movement(run, None, observe._Passed()) != before
    assert run.stall_s() == 300
    steering.set("run.stall_s", 7)
    assert run.stall_s() == 7
    broken = observe.Run(RunFolder(tmp_path), config(tmp_path), saving=lambda: 1 / 0, ledger=lambda: {"issued": 1})  # type: ignore[arg-type, return-value]
    assert broken.stall_s() == 300 and broken.known() == {"ledger": {"issued": 1}, "saving": None}
