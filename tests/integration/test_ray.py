"""Runs whose targets are processes of a real Ray cluster: the promises of one process, and what happens to them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.train import goes_on
from paceline.control.socket import ask
from paceline.errors import ConfigError, PipelineError
from tests.integration.test_training import assert_same_bits, same_training
from tests.toy import Toy, train

pytestmark = pytest.mark.ray

LONGER = ("data.epochs=12", "eval.validate_every=30", "checkpoint.every_steps=20")
STORE = 256 << 20


def events(run_dir: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run_dir / "events.jsonl").read_text().splitlines()]


def roles(run_dir: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((run_dir / "run.json").read_text())["roles"]
    return found


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def straight(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The same run in one process."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    return run_dir, train(toy.config(run_dir, *LONGER))[1]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A host with one processor, whose cluster others may join."""
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False},
    )
    yield made
    made.shutdown()


def test_a_killed_target_changes_nothing(toy: Toy, straight: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """On a cluster of the run's own two processes make the features; one is killed, and every bit is the same."""
    run_dir = tmp_path / "run"

    elsewhere: list[dict[str, Any]] = []

    def kill(step: int) -> None:
        if step == 5:
            elsewhere.extend(ask(run_dir / "profile" / "control.sock", "elsewhere")["processes"])
        if step == 10:
            os.kill(roles(run_dir)["target-1"]["pid"], signal.SIGKILL)

    config = toy.config(run_dir, *LONGER, "topology.executor=ray", "topology.targets=2")
    report, lines = train(config, kill)
    assert same_training(lines) == same_training(straight[1])
    assert_same_bits(straight[0], run_dir)
    assert report.ledger["issued"] == report.ledger["trained"] and report.ledger["retried"] >= 1
    assert "target was lost" in events(run_dir)
    places = roles(run_dir)
    assert [(each["role"], each["answers"]) for each in elsewhere] == [("target-0", True), ("target-1", True)]
    assert all(each["pid"] == places[each["role"]]["pid"] and len(each["threads"]) == 1 for each in elsewhere)
    assert len({place["pid"] for place in places.values()}) == 3 and places["drafter-0"]["pid"] == os.getpid()
    assert (run_dir / "logs" / "target-0.log").exists()


@pytest.mark.slow
def test_a_host_that_is_lost_changes_nothing(
    toy: Toy, straight: tuple[Path, list[dict[str, Any]]], tmp_path: Path, cluster: Any
) -> None:
    """Two hosts with a target each: the second one goes, and a stopped run goes on in one process."""
    run_dir = tmp_path / "run"
    second = cluster.add_node(num_cpus=1, object_store_memory=STORE)
    cluster.wait_for_nodes()

    def lose(step: int) -> None:
        if step == 10:
            cluster.remove_node(second, allow_graceful=False)
        if step == 40:
            os.kill(os.getpid(), signal.SIGTERM)  # which Ray would take for itself

    remote = ("topology.executor=ray", f"topology.address={cluster.address}", "topology.targets=2")
    report, _ = train(toy.config(run_dir, *LONGER, *remote), lose)
    assert report.ending == "SIGTERM" and "target was lost" in events(run_dir)
    train(toy.config(run_dir, *LONGER))
    assert_same_bits(straight[0], run_dir)


FP8 = ("topology.executor=ray", "topology.layout=split", "pipeline.transport=fp8")


def assert_rounded(seen: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """The same batches, with losses near those of features that were not rounded, but not the same."""
    assert [line["batch"] for line in seen] == [line["batch"] for line in wanted]
    assert all(one["loss"] == pytest.approx(other["loss"], rel=0.02) for one, other in zip(seen, wanted, strict=True))
    assert sum(one["loss"] != other["loss"] for one, other in zip(seen, wanted, strict=True)) > len(seen) / 2


@pytest.mark.slow
def test_features_may_travel_in_fp8(toy: Toy, straight: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """Losses are near the others, and a byte comes for every value of two taps, with four for each scale."""
    report, lines = train(toy.config(tmp_path / "run", *LONGER, *FP8, "topology.targets=2"))
    assert_rounded(lines, straight[1])
    told = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    came = next(line for line in told if line["event"] == "transport")
    assert came["gib"] * 2**30 == report.ledger["issued"] * 128 * 2 * (32 + 4)
    assert 0.005 < came["relative_error"] < 0.05


@pytest.mark.slow
def test_a_run_in_fp8_goes_on_in_fp8(toy: Toy, tmp_path: Path) -> None:
    """A stop changes no bit, whatever the number of targets, and nothing goes on unrounded unasked."""
    calm, stopped = tmp_path / "calm", tmp_path / "stopped"
    train(toy.config(calm, *LONGER, *FP8, "topology.targets=2"))
    halves = lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 9 else None  # noqa: E731
    train(toy.config(stopped, *LONGER, *FP8), halves)
    with pytest.raises(ConfigError, match=r"pipeline\.transport: the run was started with 'fp8', now 'target'"):
        goes_on(toy.config(stopped, *LONGER))
    assert goes_on(toy.config(stopped, *LONGER), ["pipeline.transport"]).pipeline.transport == "target"
    train(toy.config(stopped, *LONGER, *FP8))
    assert_same_bits(calm, stopped)


@pytest.mark.slow
def test_a_trace_has_all_processes_by_one_clock(
    toy: Toy, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts, of which one has its clock an hour ahead: its work lies within the calls that the driver made."""
    pytest.importorskip("perfetto")
    from paceline.cluster.target_host import TargetHost
    from paceline.profiling import page, stages
    from tests.unit.profiling.test_trace import read

    class Ahead(TargetHost):
        def __init__(self, tree: dict[str, Any], role: str) -> None:
            if role == "target-1":
                real = time.monotonic_ns
                time.monotonic_ns = stages._clock = lambda: real() + 3600 * 10**9
                page.boot_number = lambda: 1
            super().__init__(tree, role)

    monkeypatch.setattr("paceline.cluster.targets.TargetHost", Ahead)
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    cluster.wait_for_nodes()
    run_dir, out = tmp_path / "run", tmp_path / "x.pftrace"
    command = [sys.executable, "-m", "paceline", "profile", "trace", str(run_dir), "--seconds", "1", "--out", str(out)]
    tracing: list[subprocess.Popen[str]] = []

    def trace(step: int) -> None:
        if step == 5:
            tracing.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        if step > 5 and tracing[0].poll() is not None:
            os.kill(os.getpid(), signal.SIGINT)

    remote = ("topology.executor=ray", f"topology.address={cluster.address}", "topology.targets=2")
    train(toy.config(run_dir, *remote, "data.epochs=20000", "eval.validate_every=100000"), trace)
    said = tracing[0].communicate()[0]
    assert tracing[0].returncode == 0, said
    (line,) = re.findall(r"target-1 on .*: its clock is \+3600\.\d+ s from this one's, known to ([\d.]+) ms", said)
    assert "runs of stages of 3 processes in 1 s" in said and "target-0 on" not in said
    found, slack = read(out), 1e6 * (float(line) + 0.01)
    names = sorted(name.split(" on ")[0] for name in found.processes.values())
    assert names == ["drafter-0", "target-0", "target-1"]
    asked: dict[int | None, int] = {}
    answered: dict[int | None, int] = {}
    for each in found.slices:
        if each.track.startswith("lane"):
            asked |= {each.batch: each.end} if each.name == "read_batch" else {}
            answered |= {each.batch: each.end} if each.name == "remote_wait" else {}
    for role, late in (("target-0", 0.0), ("target-1", slack)):
        made = [each for each in found.of(role) if each.name == "model_forward"]
        made = [each for each in made if each.batch in asked and each.batch in answered]
        assert len(made) > 3
        for each in made:
            assert asked[each.batch] - late <= each.begin <= each.end <= answered[each.batch] + late
    assert {source.track for source, _ in found.arrows()} == {"target-0", "target-1"}


GROUP = ("optim.tokens_per_step=512", "topology.executor=ray", "topology.drafters=2")


@pytest.fixture(scope="module")
def alone(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The lines of one drafter whose steps have as many micro-batches as those of two."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    return train(toy.config(run_dir, GROUP[0]))[1]


def assert_close(seen: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """The same steps, up to the order in which float32 sums are added up."""
    assert len(seen) == len(wanted)
    for one, other in zip(seen, wanted, strict=True):
        assert one["batch"] == other["batch"] and one["tokens"] == other["tokens"]
        for key in ("loss", "grad_norm", "acceptance_length_est"):
            assert one[key] == pytest.approx(other[key], rel=1e-4)


def test_two_drafters_train_as_one(toy: Toy, alone: list[dict[str, Any]], tmp_path: Path) -> None:
    """In processes with a target each: the losses are one drafter's, and it goes on with what they saved."""
    run_dir = tmp_path / "run"
    halves = lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 5 else None  # noqa: E731
    _, first = train(toy.config(run_dir, *GROUP, "topology.layout=colocated"), halves)
    report, second = train(toy.config(run_dir, GROUP[0]))
    assert 5 <= len(first) < len(alone)
    assert_close([*first, *second], alone)
    assert report.best_acceptance_length is not None


@pytest.mark.slow
def test_two_drafters_beside_their_target_train_as_one(toy: Toy, alone: list[dict[str, Any]], tmp_path: Path) -> None:
    """Features go from the target to either of them."""
    report, lines = train(toy.config(tmp_path / "run", *GROUP, "topology.layout=split"))
    assert_close(lines, alone)
    assert report.ledger["trained"] == report.ledger["issued"]


@pytest.mark.slow
def test_two_drafters_get_the_same_rounded_features(toy: Toy, tmp_path: Path) -> None:
    """Each decodes its own: the losses are those of one drafter that gets them rounded."""
    lines = train(toy.config(tmp_path / "two", *GROUP, *FP8[1:]))[1]
    assert_close(lines, train(toy.config(tmp_path / "one", GROUP[0], *FP8))[1])


@pytest.mark.slow
def test_drafters_that_share_gradient_sums_train_as_one(toy: Toy, alone: list[dict[str, Any]], tmp_path: Path) -> None:
    """They exchange gradients after every micro-batch, also where one of them has none."""
    settings = (*GROUP, "topology.layout=colocated", "topology.shard_gradients=true")
    assert_close(train(toy.config(tmp_path / "two", *settings))[1], alone)
    odd = ("optim.tokens_per_step=384", "data.epochs=1")  # of 14 micro-batches the last step has two
    three = (*odd, "topology.executor=ray", "topology.drafters=3", *settings[-2:])
    wanted = train(toy.config(tmp_path / "one", *odd))[1]
    assert_close(train(toy.config(tmp_path / "three", *three))[1], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["split", "colocated"])
def test_a_drafter_that_dies_takes_the_run_back_to_its_last_checkpoint(toy: Toy, tmp_path: Path, layout: str) -> None:
    """The group is started again by itself; the end is that of a run in which nothing happened, bit for bit."""
    settings = (*GROUP, "data.epochs=8", f"topology.layout={layout}", "checkpoint.every_steps=4")
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    train(toy.config(calm, *settings))

    def kill(step: int) -> None:
        if step == 11 and "restarted" not in events(struck):
            os.kill(roles(struck)["drafter-1"]["pid"], signal.SIGKILL)

    train(toy.config(struck, *settings), kill)
    assert_same_bits(calm, struck)
    assert events(struck).count("restarted") == 1 and "failed" in events(struck)


@pytest.mark.slow
def test_a_drafter_that_dies_while_a_checkpoint_is_gathered_is_started_again(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collectives of a save are the group's as well."""
    from paceline.train.saver import Saver

    settings = (*GROUP, "topology.layout=colocated", "checkpoint.every_steps=4")
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    train(toy.config(calm, *settings))
    save, times = Saver.save, [0]

    def struck_save(self: Saver, *args: Any, **options: Any) -> None:
        times[0] += 1
        if times[0] == 2:
            os.kill(roles(struck)["drafter-1"]["pid"], signal.SIGKILL)
            time.sleep(0.5)
        save(self, *args, **options)

    monkeypatch.setattr(Saver, "save", struck_save)
    train(toy.config(struck, *settings))
    assert_same_bits(calm, struck)
    assert events(struck).count("restarted") == 1


@pytest.mark.slow
def test_a_target_that_dies_over_validation_costs_nothing(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is asked for again, and the measurement is the same."""
    from paceline.cluster.targets import RemoteTargets

    calm, struck = tmp_path / "calm", tmp_path / "struck"
    calm_lines = train(toy.config(calm))[1]
    ask, times = RemoteTargets.document_features, [0]

    def struck_ask(self: RemoteTargets, *args: Any) -> Any:
        times[0] += 1
        if times[0] == 2:
            os.kill(roles(struck)["target-0"]["pid"], signal.SIGKILL)
        return ask(self, *args)

    monkeypatch.setattr(RemoteTargets, "document_features", struck_ask)
    lines = train(toy.config(struck, "topology.executor=ray", "topology.targets=2"))[1]
    assert same_training(lines) == same_training(calm_lines)
    assert times[0] > 2 and "target was lost" in events(struck)


@pytest.mark.slow
def test_without_targets_the_run_ends_resumable(
    toy: Toy, straight: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """The last target dies and may not be started again: the error says so, and the run goes on elsewhere."""
    run_dir = tmp_path / "run"

    def kill(step: int) -> None:
        if step == 10:
            os.kill(roles(run_dir)["target-0"]["pid"], signal.SIGKILL)

    config = toy.config(run_dir, *LONGER, "topology.executor=ray", "run.max_restarts=0")
    with pytest.raises(PipelineError, match=r"no target is left: target-0: .*run\.max_restarts=0"):
        train(config, kill)
    train(toy.config(run_dir, *LONGER))
    assert_same_bits(straight[0], run_dir)


@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_refused(toy: Toy, tmp_path: Path, cluster: Any) -> None:
    """What was asked for and what is there."""
    remote = ("topology.executor=ray", f"topology.address={cluster.address}", "topology.targets=3")
    with pytest.raises(ConfigError, match=r"3 processes of 1 CPU were asked .* room is for 1"):
        train(toy.config(tmp_path / "run", *remote))
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        train(toy.config(tmp_path / "other", "topology.executor=ray", "topology.address=127.0.0.1:1"))
