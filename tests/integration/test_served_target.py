"""Runs whose target a server runs: the same training, and what becomes of it when the server fails."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.train import allowed_keys, merge_with_saved, run_training
from paceline.config import RunConfig
from paceline.errors import CheckpointError, PipelineError
from paceline.train import served
from tests import tiny
from tests.fake_hidden_states import Act, FakeHiddenStates, running, states_of
from tests.toy import Toy, Watch, train


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(scope="module")
def model() -> Any:
    """The toy target, as an engine has it."""
    return tiny.causal_lm("llama")


def engine(files: Path, model: Any, layers: tuple[int, ...] = (2, 3)) -> FakeHiddenStates:
    return FakeHiddenStates(files, states_of(model, layers))


def config_of(toy: Toy, server: FakeHiddenStates, run_dir: Path, *overrides: str) -> RunConfig:
    where = (f"target.server={server.url}", f"target.server_files={server.folder}")
    return toy.config(run_dir, "run.max_steps=3", "eval.validate_every=3", *where, *overrides)


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


class Interrupt:
    """SIGINT to this process, once, when the caller waits for something; a second one would end it."""

    def __init__(self) -> None:
        self._is_sent = False

    def soon(self) -> None:
        if not self._is_sent:
            self._is_sent = True
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("overrides", [(), ("loss.kl=0.5", "loss.l1=0.5")], ids=["ce", "last hidden state"])
@pytest.mark.parametrize("targets", [1, 3])
def test_a_run_from_a_server_is_the_local_run(
    toy: Toy, files: Path, model: Any, tmp_path: Path, overrides: tuple[str, ...], targets: int
) -> None:
    """Losses and held-out acceptance are those of the target in this process; the run says where features came from."""
    local = toy.config(tmp_path / "local", "run.max_steps=3", "eval.validate_every=3", *overrides)
    _, wanted = train(local)
    with running(engine(files, model, (2, 3, 5) if overrides else (2, 3))) as server:
        run_dir = tmp_path / "run"
        report, lines = train(config_of(toy, server, run_dir, f"topology.targets={targets}", *overrides))
    assert report.ending == "finished" and len(lines) == 3
    assert lines[-1]["validation_acceptance_length"] == wanted[-1]["validation_acceptance_length"]
    for name in ("loss", "grad_norm"):
        found, local_values = ([line[name] for line in each] for each in (lines, wanted))
        assert found == (pytest.approx(local_values, rel=1e-6) if overrides else local_values), name
    record = json.loads((run_dir / "run.json").read_text())
    assert record["server"]["model"] == "toy" and max(record["server"]["errors"].values()) < 1e-5
    assert record["packing"].startswith("features come from toy at http://127.0.0.1:")
    counts = json.loads((run_dir / "report.json").read_text())["served"]
    assert counts["left_out"] == [] and counts["documents"] >= 6
    assert list(files.iterdir()) == []


def test_a_damaged_document_is_told_and_the_run_goes_on(toy: Toy, files: Path, model: Any, tmp_path: Path) -> None:
    """Event and report have both lengths and where the document comes from."""
    with running(engine(files, model)) as server:
        short = {"ids": None}

        def act(ids: list[int], times: int) -> Act:
            if short["ids"] is None and len(server.requests) > 4:  # the first one of the training
                short["ids"] = ids
            return Act(keep=6) if ids == short["ids"] else Act()

        server.act = act
        report, lines = train(config_of(toy, server, tmp_path / "run", "data.epochs=1", "data.validation=0.0"))
    assert report.ending == "finished" and len(lines) == 3 and short["ids"] is not None
    (told,) = [event for event in events(tmp_path / "run") if event["event"] == "document left out"]
    told = {name: value for name, value in told.items() if name not in ("time", "event")}
    assert (told["reason"], told["wanted"], told["delivered"]) == ("short", len(short["ids"]), 6)
    assert told["source"].startswith(str(toy.conversations)) or "chats.jsonl:" in told["source"]
    assert json.loads((tmp_path / "run" / "report.json").read_text())["served"]["left_out"] == [told]


def test_a_run_outlives_its_servers_restart(
    toy: Toy, files: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies during a step and another one takes its place: the run waits, and its losses are the same."""
    monkeypatch.setattr(served, "BACK_OFF_S", 0.2)
    with running(engine(files, model)) as server:
        _, wanted = train(config_of(toy, server, tmp_path / "wanted"))
    first, second = engine(files, model), engine(files, model)
    back, over = threading.Event(), threading.Event()

    def serve() -> None:
        with running(first):
            back.set()
            while len(first.requests) < 9:
                time.sleep(0.005)
        time.sleep(0.3)
        with running(second, int(first.url.rpartition(":")[2])):
            over.wait(60)

    first.act = lambda ids, times: Act(delay_s=0.02)
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    back.wait(10)
    try:
        report, lines = train(config_of(toy, first, tmp_path / "run", "pipeline.max_retries=9"))
    finally:
        over.set()
        thread.join()
    assert report.ending == "finished" and report.ledger["retried"] >= 1 and second.requests
    assert [line["loss"] for line in lines] == [line["loss"] for line in wanted]


def test_a_server_that_stays_away_ends_the_run(
    toy: Toy, files: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `pipeline.max_retries` the last step is saved, the failure says who does not answer, and once the server is
    there again the run goes on to the same end."""
    monkeypatch.setattr(served, "BACK_OFF_S", 0.01)
    with running(engine(files, model)) as server:
        _, wanted = train(config_of(toy, server, tmp_path / "wanted"))
    gone = engine(files, model)
    run_dir = tmp_path / "run"
    with running(gone):

        def at_step(step: int) -> None:
            gone.act = lambda ids, times: Act(drop=True)

        config = config_of(toy, gone, run_dir, "pipeline.queue_depth=1", "checkpoint.every_steps=100")
        with pytest.raises(PipelineError, match=r"target-0 failed 3 times on batch \d+: ServerError: no answer from"):
            train(config, at_step)
    step = int((run_dir / "checkpoints" / "latest").resolve().name.removeprefix("step-"))
    assert 1 <= step < 3
    assert events(run_dir)[-1]["event"] == "failed" and "no answer from" in events(run_dir)[-1]["reason"]
    with running(engine(files, model)) as server:  # at another port: no other training
        report, lines = train(merge_with_saved(config, config_of(toy, server, run_dir, "pipeline.queue_depth=1")))
    assert report.ending == "finished"
    assert [line["loss"] for line in lines] == [line["loss"] for line in wanted[step:]]


def test_a_stop_during_a_request_is_obeyed(toy: Toy, files: Path, model: Any, tmp_path: Path) -> None:
    """A server that does not answer holds nobody up, during training and at the start."""
    with running(engine(files, model)) as server:
        during, at_start = Interrupt(), Interrupt()

        def at_step(step: int) -> None:
            server.act = lambda ids, times: Act(delay_s=120.0)
            during.soon()

        def never(ids: list[int], times: int) -> Act:
            at_start.soon()
            return Act(delay_s=120.0)

        started = time.monotonic()
        config = config_of(toy, server, tmp_path / "run", "pipeline.queue_depth=1", "run.max_steps=9")
        report, _ = train(config, at_step)
        assert report.ending == "SIGINT" and report.step >= 1
        server.act = never
        with pytest.raises(PipelineError, match="a stop was asked for at the start"):
            train(config_of(toy, server, tmp_path / "start"))
        assert time.monotonic() - started < 110


def test_online_and_served_are_two_targets(toy: Toy, files: Path, model: Any, tmp_path: Path) -> None:
    """A run does not pass from one to the other unless it is told to."""
    run_dir = tmp_path / "run"
    saved = toy.config(run_dir, "run.max_steps=3", "eval.validate_every=3")

    train(saved, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 1 else None)
    with running(engine(files, model)) as server:
        wanted = merge_with_saved(saved, config_of(toy, server, run_dir))
        with pytest.raises(CheckpointError, match=r"trained with other contents of target\.path"):
            train(wanted)
        allowed = allowed_keys(["target.path"])
        report = run_training(wanted, Watch(), allowed=allowed)
    assert report.ending == "finished" and report.step == 3
