"""TensorBoard is read back from its files; Weights & Biases is a stand-in that remembers what it is told."""

from __future__ import annotations

import logging
import math
import os
import resource
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.config import Tracking
from paceline.control.run_folder import RunFolder
from paceline.errors import ConfigError
from paceline.train import trackers
from paceline.train.metrics import read_metrics
from paceline.train.trackers import Trackers, numbers
from tests.toy import Toy, train


class FakeRun:
    """A Weights & Biases run; `fails` or `hangs` are names of its methods.

    Like theirs it takes no row of a step that is not above the last, and on a resume says where it goes on.
    """

    def __init__(
        self, options: dict[str, Any], fails: str = "", hangs: str = "", starting_step: int = 0, offline: bool = False
    ) -> None:
        self.options, self.fails, self.hangs = options, fails, hangs
        self.starting_step, self.offline = starting_step, offline
        self.logged: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, str | None]] = []
        self.summary: dict[str, Any] = {}
        self.exit_codes: list[int] = []
        self.threads: set[str] = set()
        self.released = threading.Event()

    def _called(self, name: str) -> None:
        self.threads.add(threading.current_thread().name)
        if name == self.hangs:
            self.released.wait(30)
        if name == self.fails:
            raise ConnectionError("the server is gone")

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, Any], step: int, commit: bool) -> None:
        self._called("log")
        assert commit and step == values["step"]
        assert step >= self.starting_step and (not self.logged or step > self.logged[-1]["step"])
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self._called("finish")
        self.exit_codes.append(exit_code)


class FakeWandB(types.ModuleType):
    """The package."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[FakeRun] = []
        self.fails = self.hangs = ""
        self.init_error: Exception | None = None
        self.offline = False

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **options: Any) -> FakeRun:
        if self.init_error is not None:
            raise self.init_error
        rows = self.rows(options["id"])
        starting_step = rows[-1]["step"] + 1 if rows and not self.offline else 0
        self.runs.append(FakeRun(options, self.fails, self.hangs, starting_step, self.offline))
        return self.runs[-1]

    def rows(self, run_id: str) -> list[dict[str, Any]]:
        """What the server has."""
        return [row for run in self.runs if run.options["id"] == run_id for row in run.logged]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    module = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def run_folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "my-run")
    folder.path.mkdir(exist_ok=True)
    return folder


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: values by step, for each name."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_has_the_numbers_of_the_metrics_file(toy: Toy, tmp_path: Path) -> None:
    """After a run every number of every line is there, at its step, to single precision."""
    report, _ = train(toy.config(tmp_path / "run", "tracking.tensorboard=true"))
    assert report.ending == "finished"
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        for name, value in line.items():
            if name != "step":
                expected.setdefault(name, []).append((line["step"], float(np.float32(value))))
    found = scalars(tmp_path / "run")
    assert len(expected["loss"]) == report.total_steps and "validation_acceptance_length" in expected
    assert found == expected


class Killed(BaseException):
    pass


def killed_at_8(step: int) -> None:
    """The checkpoint is of step 5 then."""
    if step == 8:
        raise Killed


@pytest.mark.parametrize("share_kept", [1.0, 0.4])
def test_a_resumed_run_goes_on_in_the_same_files(toy: Toy, tmp_path: Path, share_kept: float) -> None:
    """A run that lost the steps after its last checkpoint shows each step once: those of the run that went on.

    What TensorBoard had not written when the process died is there as well.
    """
    config = toy.config(tmp_path / "run", "tracking.tensorboard=true")
    with pytest.raises(Killed):
        train(config, killed_at_8)
    assert [step for step, _ in scalars(tmp_path / "run")["loss"]] == list(range(1, 9))
    [file] = (tmp_path / "run" / "tensorboard").iterdir()
    os.truncate(file, int(share_kept * file.stat().st_size))
    assert share_kept == 1.0 or len(scalars(tmp_path / "run")["loss"]) < 5
    train(config)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    found = scalars(tmp_path / "run")
    for name in ("loss", "seconds"):  # the second is never the same twice
        assert found[name] == [(line["step"], float(np.float32(line[name]))) for line in lines]


@pytest.mark.parametrize(
    ("override", "module", "extra"),
    [
        ("tracking.tensorboard=true", "torch.utils.tensorboard", "tensorboard"),
        ("tracking.wandb=drafters", "wandb", "wandb"),
    ],
)
def test_a_missing_package_ends_the_start(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, module: str, extra: str
) -> None:
    """It was asked for, so the run does not begin: the error names the extra, before anything is loaded."""
    monkeypatch.setitem(sys.modules, module, None)
    config = toy.config(tmp_path / "run", override, "target.path=/there/is/none")
    with pytest.raises(ConfigError, match=rf"tracking.{extra} is set.*pip install 'paceline\[{extra}\]'"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_a_folder_called_wandb_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it once logged to, a folder of that name lies around, and Python would import it."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[wandb\]'"):
        trackers.check_packages(Tracking(wandb="drafters"))
    sys.modules.pop("wandb", None)


def test_wandb_is_told_each_step(wandb: FakeWandB, toy: Toy, tmp_path: Path) -> None:
    """A run logs the numbers of each line by our step, under the run folder's name, and ends well."""
    config = toy.config(tmp_path / "my-run", "tracking.wandb=drafters")
    train(config)
    [run] = wandb.runs
    assert run.logged == read_metrics(tmp_path / "my-run" / "metrics.jsonl")
    assert run.metrics == [("step", None), ("*", "step")]
    assert run.exit_codes == [0] and run.threads == {"wandb"}
    options = run.options
    assert (options["project"], options["name"], options["resume"]) == ("drafters", "my-run", "allow")
    assert options["dir"] == str(tmp_path / "my-run")
    assert options["config"]["optim"]["lr"] == config.optim.lr
    assert isinstance(options["config"]["target"]["layer_ids"], list)  # resolved, and no longer auto


def test_a_resumed_run_is_the_same_run_at_wandb(wandb: FakeWandB, tmp_path: Path) -> None:
    """Its id is kept in the run folder; another project, and a damaged file, get a new one."""
    folder = run_folder(tmp_path)
    for project in ("drafters", "drafters", "others"):
        with Trackers(Tracking(wandb=project), folder, 0, {}):
            pass
    (folder.path / "wandb.json").write_text("[]")
    with Trackers(Tracking(wandb="others"), folder, 0, {}):
        pass
    ids = [run.options["id"] for run in wandb.runs]
    assert ids[0] == ids[1] and len(set(ids)) == 3 and all(ids)


@pytest.mark.parametrize("num_lost", [0, 5])
def test_wandb_has_each_step_once_after_a_kill(wandb: FakeWandB, toy: Toy, tmp_path: Path, num_lost: int) -> None:
    """The resumed run logs what the server lacks, be that before or after its checkpoint, and nothing again."""
    config = toy.config(tmp_path / "run", "tracking.wandb=drafters")
    with pytest.raises(Killed):
        train(config, killed_at_8)
    del wandb.runs[0].logged[8 - num_lost :]  # they never reached it
    train(config)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    rows = wandb.rows(wandb.runs[0].options["id"])
    assert [row["loss"] for row in rows] == [line["loss"] for line in lines]
    assert [row["step"] for row in rows] == list(range(1, len(lines) + 1)) and len(lines) > 8


def test_offline_only_new_steps_are_logged(wandb: FakeWandB, tmp_path: Path) -> None:
    """Nobody knows then what the server will have, so nothing is made up."""
    wandb.offline, folder = True, run_folder(tmp_path)
    folder.metrics_file.write_text('{"step": 1}\n{"step": 2}\n')
    with Trackers(Tracking(wandb="drafters"), folder, 2, {}) as tracked:
        tracked.log({"step": 3})
    assert [row["step"] for row in wandb.runs[0].logged] == [3]


def test_passwords_do_not_leave_for_wandb(wandb: FakeWandB, tmp_path: Path) -> None:
    """A URL with user and password among the settings is shown without them."""
    settings = {"target": {"path": "https://user:s3cret@host/model"}}
    with Trackers(Tracking(wandb="drafters"), run_folder(tmp_path), 0, settings):
        pass
    assert wandb.runs[0].options["config"] == {"target": {"path": "https://***@host/model"}}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own
def test_a_full_disk_ends_tensorboard_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its own thread fails; that is one warning, and who logs and closes notices nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING):
        try:
            with Trackers(Tracking(tensorboard=True), run_folder(tmp_path), 0, {}) as tracked:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
                for step in range(1, 2001):
                    tracked.log({"step": step, "loss": 1.0})
                    time.sleep(0.0002)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    [text] = [record.getMessage() for record in caplog.records]
    assert "tensorboard logs no more: " in text and "File too large" in text


def test_a_failed_run_is_shown_as_failed(wandb: FakeWandB, tmp_path: Path) -> None:
    """An exception passes through, and Weights & Biases gets exit code 1."""
    with pytest.raises(KeyError), Trackers(Tracking(wandb="drafters"), run_folder(tmp_path), 0, {}):
        raise KeyError
    assert wandb.runs[0].exit_codes == [1]


def test_wandb_that_cannot_start_ends_the_start(wandb: FakeWandB, tmp_path: Path) -> None:
    """The error has its reason and the two ways out; TensorBoard, already open, is closed."""
    wandb.init_error = RuntimeError("No API key configured.")
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="No API key configured; log in.*WANDB_MODE=offline"):
        Trackers(Tracking(tensorboard=True, wandb="drafters"), run_folder(tmp_path), 0, {})
    assert {thread.name for thread in set(threading.enumerate()) - before} == set()


@pytest.mark.parametrize("method", ["log", "finish"])
def test_a_tracker_that_fails_is_silent(
    wandb: FakeWandB, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """One warning; who logs notices nothing, and the other tracker has everything."""
    wandb.fails = method
    with caplog.at_level(logging.WARNING):
        with Trackers(Tracking(tensorboard=True, wandb="drafters"), run_folder(tmp_path), 0, {}) as both:
            for step in range(1, 21):
                both.log({"step": step, "loss": 1.0})
                time.sleep(0.001)
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["wandb logs no more: ConnectionError: the server is gone"]
    assert len(scalars(tmp_path / "my-run")["loss"]) == 20


def test_a_tracker_that_hangs_holds_nobody_up(
    wandb: FakeWandB, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines beyond its queue are dropped with one warning, and the end of the run waits for so long and no longer."""
    monkeypatch.setattr(trackers, "FINISH_S", 0.2)
    monkeypatch.setattr(trackers, "MAX_WAITING", 10)
    wandb.hangs = "log"
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        with Trackers(Tracking(tensorboard=True, wandb="drafters"), run_folder(tmp_path), 0, {}) as both:
            for step in range(1, 51):
                both.log({"step": step, "loss": 1.0})
                time.sleep(0.002)
    assert time.monotonic() - started < 5.0
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "wandb does not keep up" in texts[0] and "wandb did not end within 0.2 s" in texts[1]
    assert len(scalars(tmp_path / "my-run")["loss"]) == 50
    wandb.runs[0].released.set()


def test_lines_that_wait_are_logged_at_the_end(wandb: FakeWandB, tmp_path: Path) -> None:
    """A tracker that is behind gets all of its lines before it is finished, also from a full queue."""
    wandb.hangs = "log"
    with Trackers(Tracking(wandb="drafters"), run_folder(tmp_path), 0, {}) as tracked:
        tracked.log({"step": 1})
        while not tracked._feeds[0]._lines.empty():  # until it hangs on the first
            time.sleep(0.001)
        for step in range(2, trackers.MAX_WAITING + 2):
            tracked.log({"step": step})
        assert tracked._feeds[0]._lines.full()
        threading.Timer(0.1, wandb.runs[0].released.set).start()
    assert [line["step"] for line in wandb.runs[0].logged] == list(range(1, trackers.MAX_WAITING + 2))
    assert wandb.runs[0].exit_codes == [0]


def test_what_is_no_number_is_left_out() -> None:
    """Texts, truth values and nested records of a line go nowhere; a loss that is no number stays one."""
    line = {"step": 3, "loss": math.inf, "batch": 7, "verdict": "balanced", "ok": True, "more": {"x": 1}, "none": None}
    assert numbers(line) == {"loss": math.inf, "batch": 7}


def test_nothing_asked_for_is_nothing_done(tmp_path: Path) -> None:
    """By default there is no thread, no file and no import."""
    before = threading.active_count()
    folder = run_folder(tmp_path)
    with Trackers(Tracking(), folder, 0, {}) as none:
        none.log({"step": 1, "loss": 1.0})
        assert threading.active_count() == before
    assert not list(folder.path.iterdir())


def test_what_is_found_later_has_its_step(wandb: FakeWandB, tmp_path: Path) -> None:
    """Also below the first step of a resumed run: TensorBoard shows it there; W&B over an axis of its own, in the next
    row or, after the last one, in the summary.
    """
    folder = run_folder(tmp_path)
    with Trackers(Tracking(tensorboard=True, wandb="drafters"), folder, 10, {}) as each:
        each.log({"step": 11, "loss": 1.0})
        each.add(4, {"measured_acceptance_length": 2.5})
        each.log({"step": 12, "loss": 0.5})
        each.log({"step": 13, "loss": 0.25})
        each.add(12, {"measured_acceptance_length": 2.75})
    assert scalars(folder.path) == {
        "loss": [(11, 1.0), (12, 0.5), (13, 0.25)],
        "measured_acceptance_length": [(4, 2.5), (12, 2.75)],
    }
    [run] = wandb.runs
    assert run.logged == [
        {"step": 11, "loss": 1.0},
        {"step": 12, "loss": 0.5, "measured_acceptance_length": 2.5, "measured_step": 4},
        {"step": 13, "loss": 0.25},
    ]
    assert run.metrics[2:] == [("measured_acceptance_length", "measured_step")]
    assert run.summary == {"measured_acceptance_length": 2.75, "measured_step": 12}
