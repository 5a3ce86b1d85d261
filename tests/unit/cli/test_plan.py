"""`paceline plan` as a person and a script meet it: tables, JSON, page, mistakes; and what a run was measured to do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import plan as command
from paceline.cli import train
from paceline.cli.cache import cache_features
from paceline.cli.plan import measured_verdict, parse_tokens, stage_windows, what_if_record
from paceline.cli.progress import TrainProgress
from paceline.config import dump_config, load_config
from paceline.control.run_folder import RunFolder
from paceline.errors import ConfigError, PacelineError
from paceline.plan import cards
from paceline.plan.cards import CARDS, Card
from paceline.profiling.verdict import judge
from tests.toy import Toy

app = typer.Typer(pretty_exceptions_enable=False)
app.command("plan")(command.plan)
app.command("train")(train.train)
KEYS = {"splits", "best", "flops", "memory", "offline_cache_bytes", "assumptions"}


def plan(*arguments: object) -> dict[str, Any]:
    """The plan as JSON."""
    result = CliRunner().invoke(app, ["plan", *map(str, arguments), "--json", "-"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert isinstance(result.exception, PacelineError), result.output
    return str(result.exception)


def test_json_is_alone_on_stdout_and_has_the_keys() -> None:
    """Splits, the best of them, operations, memory, disk and assumptions with sources."""
    record = plan("--target", "qwen3-8b", "--gpus", "8xh200", "--tokens", "5e9")
    assert set(record) >= KEYS and len(record["splits"]) == 8
    assert record["best"] in record["splits"] and record["best"]["fits"]
    fitting = [split["tok_per_s"] for split in record["splits"] if split["fits"]]
    assert record["best"]["tok_per_s"] == max(fitting)
    assert record["best"]["gpu_hours"] == pytest.approx(8 * 5e9 / record["best"]["tok_per_s"] / 3600)
    assert record["offline_cache_bytes"] == pytest.approx(5e9 / 6 * 5 * 4096 * 2)
    assert {"fp8_factor", "card", "network_gb_per_s"} <= set(record["assumptions"])


def test_a_target_over_several_cards_is_told_in_the_table_and_on_the_page(tmp_path: Path) -> None:
    """How many it takes, and for each split how many it has; the best is a run file's overrides as ever."""
    page = tmp_path / "plan.html"
    arguments = ["plan", "--target", "qwen3-235b-a22b", "--gpus", "8xh200", "--html", str(page)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "160"})
    assert result.exit_code == 0 and "a target takes 4 GPUs or more" in result.output
    assert "1x6+2" in result.output and "topology.gpus_per_target=6" in result.output.replace("\n", " ")
    assert "1 of 6 GPUs + 2" in page.read_text(encoding="utf-8")


def test_files_are_written_beside_the_table(tmp_path: Path) -> None:
    """The terminal's tables name every role and part; page and JSON lie where they were asked for."""
    place, page = tmp_path / "plan.json", tmp_path / "plan.html"
    arguments = ["plan", "--target", "smollm2-135m", "--gpus", "2xl40s", "--json", str(place), "--html", str(page)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "160"})
    assert result.exit_code == 0
    for word in ("in turn", "1+1", "target trunk", "drafter", "GPU-hours", "an offline cache", "a calculation"):
        assert word in result.output
    assert set(json.loads(place.read_text())) >= KEYS
    assert page.read_text().startswith("<!doctype html>")


def test_a_run_file_is_planned_as_it_stands(toy: Toy, tmp_path: Path) -> None:
    """Its target, drafter, batch and data count, overrides and options come on top."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text(dump_config(toy.config(tmp_path / "run")))
    record = plan("--config", run_file, "--gpus", "h200")
    info = json.loads((toy.data / "prepare.json").read_text())["dataset"]
    assert record["target"] == str(toy.target) and record["drafter"]["block_size"] == 4
    assert record["micro_batch"]["slots"] == 128 and record["tokens"] == 3 * info["num_tokens"]
    assert record["offline_cache_bytes"] == info["num_tokens"] * len(record["drafter"]["target_layer_ids"]) * 32 * 2
    assert "rows of the data" in record["assumptions"]["documents"]["value"]
    other = plan("draft.num_layers=1", "--config", run_file, "--gpus", "h200", "--kind", "dspark", "--block-size", 8)
    assert other["drafter"]["num_layers"] == 1 and other["drafter"]["kind"] == "dspark"
    assert other["drafter"]["block_size"] == 8


def test_prepare_json_alone_gives_means(toy: Toy, tmp_path: Path) -> None:
    """Where the rows are not beside it, every document has the mean length."""
    content = json.loads((toy.data / "prepare.json").read_text())
    content["report"]["fill"] = 0.97
    (tmp_path / "prepare.json").write_text(json.dumps(content))
    record = plan("--target", toy.target, "--gpus", "h200", "--data", tmp_path / "prepare.json")
    mean = content["dataset"]["num_tokens"] / content["dataset"]["num_rows"]
    assert record["micro_batch"]["mean_context"] == pytest.approx(round(mean) / 2)
    assert record["micro_batch"]["tokens"] == pytest.approx(12_288 * 0.97)
    assert "mean" in record["assumptions"]["documents"]["value"]


def test_a_calibrated_machine_takes_the_tables_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rates count; alone it is planned for, and with --gpus so many like it."""
    card = Card("toy card", 24.0, 10.0, 100.0, 10.0, 10.0, source="measured here")
    monkeypatch.setattr(cards, "calibrate", lambda: (2, card))
    alone = plan("--target", "smollm2-135m", "--calibrate")
    assert (alone["gpus"], alone["card"]) == (2, "toy card")
    assert alone["assumptions"]["card"]["source"] == "measured here"
    assert plan("--target", "smollm2-135m", "--calibrate", "--gpus", "4xh200")["gpus"] == 4
    slow, fast = alone["splits"][0], plan("--target", "smollm2-135m", "--gpus", "2xh200")["splits"][0]
    assert slow["tok_per_s"] < fast["tok_per_s"] / 10


def test_a_cpu_is_planned_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches, float32 features, attention per document."""
    card = Card("cpu", 16.0, 0.1, 10.0, 10.0, 10.0, has_fp8=False, is_cpu=True, source="measured here")
    monkeypatch.setattr(cards, "calibrate", lambda: (1, card))
    record = plan("--target", "smollm2-135m", "--calibrate", "data.max_length=1024")
    assert record["micro_batch"]["slots"] == 2048 and len(record["splits"]) == 1
    assert record["offline_cache_bytes"] == pytest.approx(1e9 / 6 * 5 * 576 * 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "qwen3-8b"], "--gpus 8xh200 was wanted"),
        (["--gpus", "8xh200"], "--target DIR was wanted, or one of qwen3-0.6b"),
        (["--target", "qwen3-8b", "--gpus", "8xtpu"], "cards are h200, h100"),
        (["--target", "qwen3-9b", "--gpus", "8xh200"], "target qwen3-9b: a model folder, a hub id or one of"),
        (["--target", "qwen3-8b", "--gpus", "8xh200", "--tokens", "many"], "--tokens many"),
        (["--target", "qwen3-8b", "--gpus", "8xh200", "--tokens", "-5"], "--tokens -5"),
        (["--target", "qwen3-8b", "--gpus", "8xh200", "--kind", "eagle"], "draft.kind='eagle' is no drafter kind"),
        (["--target", "qwen3-8b", "--gpus", "8xh200", "--block-size", "1"], "draft.block_size=1"),
        (["--target", "qwen3-8b", "--gpus", "8xh200", "draft.blocksize=8"], "unknown key draft.blocksize"),
        (["--target", "qwen3-8b", "--gpus", "8xa100-80g", "target.fp8=true"], "a100-80g has no fp8 products"),
        (["--target", "qwen3-8b", "--gpus", "8xh200", "--data", "{tmp}/none.json"], "--data {tmp}/none.json"),
        (["--target", "qwen3-8b", "--gpus", "8xh200", "--data", "{tmp}"], "prepare.json"),
        (["--target", "qwen3-8b", "--gpus", "8xh200", "--json", "{tmp}"], "--json {tmp} is a folder"),
        (["--target", "qwen3-8b", "--gpus", "8xh200", "--html", "{tmp}/no/x.html"], "there is no folder {tmp}/no"),
        (["--target", "{tmp}", "--gpus", "8xh200"], "has no config.json"),
        (["--what-if", "targets=6"], "go together"),
        (["--run", "{tmp}"], "go together"),
        (["--what-if", "targets=6", "--run", "{tmp}/none"], "is no folder"),
    ],
)
def test_mistakes_are_answered(arguments: list[str], said: str, tmp_path: Path) -> None:
    """Each with what was seen and what was wanted, and never with a traceback."""
    given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert said.replace("{tmp}", str(tmp_path)) in refused(*given)


@pytest.mark.parametrize(
    ("text", "number"), [("5e9", 5e9), ("400M", 4e8), ("1.5B", 1.5e9), ("1,000,000", 1e6), ("2k", 2000), ("7", 7)]
)
def test_tokens_are_written_as_people_do(text: str, number: float) -> None:
    """With a unit, commas, or an exponent."""
    assert parse_tokens(text) == number


# ------------------------------------------------------------------ from a cache


@pytest.fixture(scope="module")
def cache(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features of the toy data in fp8, of other layers than the default ones."""
    folder = tmp_path_factory.mktemp("cache") / "features"
    cache_features(toy.config(Path("run"), "target.layer_ids=[0,1]"), folder, "fp8")
    return folder


def test_a_plan_from_a_cache_is_of_what_is_in_it(toy: Toy, cache: Path, tmp_path: Path) -> None:
    """Its layers and its type count; the table and the page say what is read, and nothing of a target."""
    run_file, page = tmp_path / "run.yaml", tmp_path / "plan.html"
    run_file.write_text(dump_config(toy.config(tmp_path / "run", f"target.cache={cache}")))
    record = plan("--config", run_file, "--gpus", "h200")
    assert record["drafter"]["target_layer_ids"] == [0, 1]
    assert record["reading"]["bytes_per_token"] == 2 * (32 + 4)
    on_disk = sum(file.stat().st_size for file in cache.glob("*.safetensors"))
    assert record["offline_cache_bytes"] == pytest.approx(on_disk, rel=0.1) and record["offline_cache_bytes"] < on_disk
    assert "features in fp8" in record["assumptions"]["cache"]["value"] and "split" not in record["assumptions"]
    arguments = ["plan", "--config", str(run_file), "--gpus", "16xh200", "--html", str(page)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    told = " ".join(result.output.split())
    assert f"no target runs: features are read from {cache}, 72 bytes a token." in told
    assert "on each host" in told and "16 drafters" in told and "comes on top" in told and "target trunk" not in told
    shown = page.read_text(encoding="utf-8")
    assert "16 drafters" in shown and "read from the cache" in shown and "The target's time" not in shown


def test_a_cache_that_is_yet_to_be_made_is_planned_as_the_target_would_deliver(tmp_path: Path) -> None:
    """And one that is no cache is refused."""
    there = tmp_path / "there"
    record = plan("--target", "qwen3-8b", "--gpus", "h200", f"target.cache={there}")
    assert record["reading"]["bytes_per_token"] == 5 * 4096 * 2 and record["reading"]["is_ahead"]
    assert "not there yet" in record["assumptions"]["cache"]["value"]
    there.mkdir()
    assert "is no feature cache" in refused("--target", "qwen3-8b", "--gpus", "h200", f"target.cache={there}")


def test_a_dry_run_from_a_cache_has_one_role(toy: Toy, cache: Path, tmp_path: Path) -> None:
    """The drafter, with the queue and one layer of the target; the plan names the cache."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text(dump_config(toy.config(tmp_path / "run", f"target.cache={cache}")))
    result = CliRunner().invoke(app, ["train", str(run_file), "--dry-run", "--json"], catch_exceptions=False)
    record = json.loads(result.stdout)
    assert record["plan"]["cache"] == str(cache) and record["plan"]["layout"] == "split"
    assert set(record["roles"]) == {"drafter"}
    assert sum(record["roles"]["drafter"].values()) == pytest.approx(record["memory"]["total_gib"], abs=0.005)


def test_other_splits_of_a_run_from_a_cache_are_drafters_or_reading_threads(tmp_path: Path) -> None:
    """Nothing travels by way of a store; targets beside several drafters there are not."""
    lines = [line(10.0 * i, "drafter-0", 20, get_wait=4.0) for i in range(14)]
    run = profile(tmp_path, lines, "topology.layout=colocated", "target.cache=features")
    (run / "run.json").write_text(json.dumps({"draft": {"target_layer_ids": [1, 2], "hidden_size": 1 << 30}}))
    record = what_if_record(run, ["targets=1", "drafters=3"])
    ahead, three = record["what_if"]
    assert ahead["gain"] == pytest.approx(1 / 0.6) and three["gain"] == pytest.approx(3.0)
    assert not record["transport_s"]
    arguments = ["plan", "--run", str(run), "--what-if", "targets=1", "--what-if", "drafters=3"]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).output
    assert "1 reading threads + 1 drafters: " in shown and "no target runs" in shown and "3 in turn: " in shown
    with pytest.raises(ConfigError, match="there are no targets to share GPUs with"):
        what_if_record(run, ["targets=2,drafters=2"])


# ------------------------------------------------------------------ what if


def line(t: float, role: str, batches: int, wall_s: float = 10.0, **stages: float) -> dict[str, Any]:
    """A line of ``stages.jsonl``; stages in seconds."""
    return {
        "t": t,
        "interval_s": 10.0,
        "role": role,
        "thread": role,
        "batches": batches,
        "wall_s": wall_s,
        "stages": {name: {"total_ms": 1e3 * seconds} for name, seconds in stages.items()},
    }


def profile(tmp_path: Path, lines: list[dict[str, Any]], *overrides: str) -> Path:
    """A run folder with such a profile."""
    run = tmp_path / "run"
    (run / "profile").mkdir(parents=True)
    sizes = ["pipeline.tokens_per_batch=128", "optim.tokens_per_step=512", "pipeline.queue_depth=3"]
    config = load_config(None, ["target.path=t", "data.path=d", f"run.dir={run}", *sizes, *overrides])
    (run / "config.yaml").write_text(dump_config(config))
    (run / "profile" / "stages.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return run


def slow_targets(count: int = 14) -> list[dict[str, Any]]:
    """Two targets that take 0.5 s a batch, beside a drafter that could take one in 0.1 s."""
    lines = []
    for i in range(count):
        lines += [
            line(10.0 * i, "target-0", 20, put_wait=0.0),
            line(10.0 * i, "target-1", 20, put_wait=0.0),
            line(10.0 * i, "drafter-0", 40, get_wait=6.0),
        ]
    return lines


def test_more_targets_give_what_the_verdict_promises(tmp_path: Path) -> None:
    """With targets without end the gain is the verdict's own, to the last digit; up to there it is N / t."""
    run = profile(tmp_path, slow_targets(), "topology.targets=2", "topology.layout=split")
    record = what_if_record(run, ["targets=3", "targets=100000", "targets=6,drafters=2"])
    verdict = measured_verdict(run, RunFolder(run).read_config())
    assert verdict.kind == "producer-bound" and verdict.gain is not None
    three, many, six = record["what_if"]
    assert record["measured"]["target_s"] == pytest.approx(0.5) and record["measured"]["drafter_s"] == pytest.approx(
        0.1
    )
    assert record["measured"]["closed_form_batches_per_s"] == pytest.approx(record["measured"]["batches_per_s"])
    assert three["gain"] == pytest.approx(1.5) and three["limit"] == "targets"
    assert many["gain"] == pytest.approx(verdict.gain.value) and many["limit"] == "drafters"
    assert six["batches_per_s"] == pytest.approx(12.0) and six["limit"] == "targets"


def test_more_drafters_give_what_the_verdict_promises(tmp_path: Path) -> None:
    """Consumer-bound, one target: the same with the sides swapped."""
    lines = []
    for i in range(14):
        lines += [line(10.0 * i, "target-0", 40, put_wait=4.0), line(10.0 * i, "drafter-0", 40, get_wait=0.0)]
    run = profile(tmp_path, lines, "topology.layout=split")
    verdict = measured_verdict(run, RunFolder(run).read_config())
    assert verdict.kind == "consumer-bound" and verdict.gain is not None
    (many,) = what_if_record(run, ["drafters=100000"])["what_if"]
    assert many["gain"] == pytest.approx(verdict.gain.value) and many["limit"] == "targets"


def test_a_run_in_turn_promises_what_its_verdict_does(tmp_path: Path) -> None:
    """One target beside one drafter, with no transport: the larger share alone."""
    lines = [line(10.0 * i, "drafter-0", 20, get_wait=4.0) for i in range(14)]
    run = profile(tmp_path, lines, "topology.layout=colocated")
    verdict = measured_verdict(run, RunFolder(run).read_config())
    split, twice = what_if_record(run, ["targets=1,drafters=1", "drafters=2"])["what_if"]
    assert verdict.kind == "in turn" and verdict.gain is not None
    assert split["gain"] == pytest.approx(verdict.gain.value) == pytest.approx(1 / 0.6)
    assert twice["gain"] == pytest.approx(2.0) and twice["layout"] == "colocated"


def test_windows_are_per_interval_and_leave_pauses_out() -> None:
    """Waits of targets add up, those of drafters are averaged, validation is no time of theirs, and what was sampled is
    scaled."""
    lines = [
        line(1.0, "target-0", 5, put_wait=2.0),
        line(1.0, "target-1", 5, put_wait=3.0),
        line(1.0, "drafter-0", 6, get_wait=1.0, validate=4.0),
        line(1.0, "drafter-1", 4, get_wait=3.0, checkpoint_snapshot=2.0),
        line(2.0, "writer", 0, checkpoint_write=5.0),
        line(3.0, "drafter-0", 8, get_wait=0.5) | {"sampled_one_in": 4},
    ]
    first, second = stage_windows(lines)
    assert (first.seconds, first.batches, first.get_wait_s, first.put_wait_s) == (7.0, 10, 2.0, 5.0)
    assert second.get_wait_s == pytest.approx(2.0)
    assert judge([first] * 12, targets=2, queue_depth=4).target_per_s > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "paceline profile on"), ("{broken", "damaged"), ("[]\n", "damaged"), ("{}\n", "damaged"), ("", "no batch")],
)
def test_a_run_without_a_profile_is_told_how_to_get_one(tmp_path: Path, text: str | None, said: str) -> None:
    """Where there are no stages, they are damaged, or nothing was trained."""
    run = profile(tmp_path, [])
    place = run / "profile" / "stages.jsonl"
    place.unlink() if text is None else place.write_text(text)
    with pytest.raises(ConfigError, match=said):
        what_if_record(run, ["targets=2"])


def parts(tmp_path: Path, get_wait_s: float, put_wait_s: float, *overrides: str) -> Path:
    """A run whose targets have two GPUs each: 44 steps of 4 micro-batches in a second, 20 of them before it resumed."""
    run = profile(tmp_path, [], "topology.gpus_per_target=2", *overrides)
    (run / "run.json").write_text(json.dumps({"resumed_from_step": 20}))
    waits = {"get_wait_s": get_wait_s, "put_wait_s": put_wait_s, "ready_wait_s": 0.0}
    lines = [{"step": i + 1, "seconds": 1.0 if i >= 20 else 9.0, "batches": 4, "queue": 0, **waits} for i in range(44)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return run


def test_targets_over_several_gpus_are_judged_by_the_run_itself(tmp_path: Path) -> None:
    """No profile is needed; where the drafter waits for them, their time is known, and more of them are told."""
    run = parts(tmp_path, 0.5, 0.0, "topology.layout=split")
    record = what_if_record(run, ["targets=2", "targets=3", "drafters=2"])
    assert record["verdict"]["kind"] == "producer-bound" and record["measured"]["gpus_per_target"] == 2
    assert record["measured"]["target_s"] == pytest.approx(0.25, rel=0.01)
    two, three, drafters = record["what_if"]
    assert two["batches_per_s"] == pytest.approx(8.0) and three["gain"] == pytest.approx(2.0)
    assert three["limit"] == "drafters" and drafters["gain"] == pytest.approx(1.0)
    assert all(each["at_most_batches_per_s"] is None for each in record["what_if"])


def test_what_parts_with_too_few_rows_could_do_is_told_as_a_bound(tmp_path: Path) -> None:
    """Beside a slow drafter: more drafters give at least what the targets did, and at most what the drafters take; more
    targets give nothing, for sure."""
    run = parts(tmp_path, 0.0, 0.2, "topology.layout=split")
    arguments = ["plan", "--run", str(run), "--what-if", "targets=2", "--what-if", "drafters=2"]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).output
    record = what_if_record(run, ["targets=2", "drafters=2"])
    targets, drafters = record["what_if"]
    assert record["verdict"]["kind"] == "consumer-bound"
    assert targets["gain"] == pytest.approx(1.0) and targets["at_most_batches_per_s"] is None
    assert drafters["batches_per_s"] == pytest.approx(5.0) and drafters["at_most_batches_per_s"] == pytest.approx(8.0)
    assert "a target of 2 GPUs needs 0.2 s" in shown
    assert "1 targets + 2 drafters: at least 5 micro-batches a second, 1.25x; at most 8, as the drafters allow" in shown
    assert "known from runs whose drafter waits" in shown


@pytest.mark.parametrize(("layout", "asked"), [("split", "layout=colocated"), ("colocated", "targets=2")])
def test_parts_in_turn_and_side_by_side_say_nothing_of_each_other(tmp_path: Path, layout: str, asked: str) -> None:
    """In turn one row is on its way at a time."""
    run = parts(tmp_path, 0.5, 0.0, f"topology.layout={layout}")
    with pytest.raises(ConfigError, match="in turn one part of a target works at a time"):
        what_if_record(run, [asked])


def test_a_split_target_whose_run_has_no_steps_is_not_guessed(tmp_path: Path) -> None:
    """Its last start has none, though an earlier one had."""
    run = parts(tmp_path, 0.5, 0.0, "topology.layout=split")
    (run / "run.json").write_text(json.dumps({"resumed_from_step": 44}))
    with pytest.raises(ConfigError, match=r"metrics.jsonl has no step behind the first ones of the last start"):
        what_if_record(run, ["targets=2"])


def test_a_real_run_of_a_split_target_is_asked(toy: Toy, tmp_path: Path) -> None:
    """As it wrote its steps: nothing but the run folder is needed."""
    config = toy.config(tmp_path / "run", "topology.gpus_per_target=2", "run.max_steps=16")
    train.run_training(config, TrainProgress(quiet=True))
    record = what_if_record(tmp_path / "run", ["targets=4", "drafters=2"])
    assert record["measured"]["gpus_per_target"] == 2 and record["measured"]["target_s"] > 0
    assert all(each["gain"] > 0.99 for each in record["what_if"])


def test_a_real_run_is_asked(toy: Toy, tmp_path: Path) -> None:
    """Stages of a run of two targets, as it wrote them, give times, a verdict and other splits in the terminal."""
    config = toy.config(tmp_path / "run", "topology.targets=2", "topology.layout=split", "run.max_steps=12")
    train.run_training(config, TrainProgress(quiet=True), interval_s=0.2)
    result = CliRunner().invoke(
        app, ["plan", "--what-if", "targets=4", "--what-if", "layout=colocated", "--run", str(tmp_path / "run")]
    )
    assert result.exit_code == 0, result.output
    assert "measured: 2 targets + 1 drafters" in result.output
    assert "4 targets + 1 drafters: " in result.output and "1 in turn: " in result.output


# ------------------------------------------------------------------ beside other commands


def test_a_dry_run_says_what_each_role_needs(toy: Toy, tmp_path: Path) -> None:
    """The same numbers as the memory plan's, by role."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text(dump_config(toy.config(tmp_path / "run", "topology.layout=colocated")))
    result = CliRunner().invoke(app, ["train", str(run_file), "--dry-run", "--json"], catch_exceptions=False)
    record = json.loads(result.stdout)
    assert result.exit_code == 0 and set(record) == {"config", "plan", "memory", "roles"}
    role = record["roles"]["colocated"]
    assert sum(role.values()) == pytest.approx(record["memory"]["total_gib"], abs=0.005)
    text = CliRunner().invoke(app, ["train", str(run_file), "--dry-run"], catch_exceptions=False).stdout
    assert "memory by role:\n  colocated: weights_gib " in text
    two = tmp_path / "two.yaml"
    two.write_text(dump_config(toy.config(tmp_path / "run", "topology.gpus_per_target=2")))
    split = json.loads(CliRunner().invoke(app, ["train", str(two), "--dry-run", "--json"]).stdout)
    whole = record["memory"]["target_gib"] + record["memory"]["shared_gib"]
    assert split["plan"]["gpus_per_target"] == 2 and split["plan"]["layout"] == "split"
    assert split["roles"]["target"]["weights_gib"] <= whole
    assert not (tmp_path / "run").exists()


def test_a_plan_imports_no_model() -> None:
    """Which is what makes it quick: Transformers alone takes longer than the whole plan."""
    program = (
        "import sys; from paceline.cli.plan import make_plan; make_plan('qwen3-8b', '192xh200', None, None, [], None);"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_a_plan_of_many_gpus_is_quick() -> None:
    """192 splits are counted in well under a second."""
    plan("--target", "qwen3-8b", "--gpus", "8xh200")
    started = time.perf_counter()
    record = plan("--target", "qwen3-8b", "--gpus", "192xh200")
    assert len(record["splits"]) == 192 and time.perf_counter() - started < 2.0
    assert set(CARDS) > {record["card"]}
