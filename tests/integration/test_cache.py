"""Runs from a feature cache: the bits of runs with a target, a cache that survives its maker, and the command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from safetensors import safe_open

from paceline import api
from paceline.cli.cache import cache_features
from paceline.cli.train import resolve_config
from paceline.config import dump_config
from paceline.control.run_folder import RunFolder
from paceline.errors import CheckpointError, ConfigError, ModelError, PipelineError
from paceline.models.target import Target
from paceline.train import cache_writer, feature_cache, tensor_file
from paceline.train.checkpoint import load_state
from tests.integration.test_training import assert_same_bits, same_training, tensors
from tests.toy import Toy, train

SHARD = 40_000
STEPS = 12
MIXED = ("loss.kl=0.5", "loss.l1=0.5")

Here = Callable[..., CompletedProcess[str]]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != feature_cache.LOCK_FILE}


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def make(toy: Toy, out: Path, *overrides: str, dtype: str = "target") -> dict[str, Any]:
    record = cache_features(toy.config(Path("run"), *overrides), out, dtype, SHARD)
    assert record["finished"]
    return record


@pytest.fixture(scope="module")
def caches(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A cache of the taps, and one with the last hidden state."""
    folder = tmp_path_factory.mktemp("caches")
    made = {"taps": (), "full": MIXED}
    for name, overrides in made.items():
        make(toy, folder / name, *overrides)
    return {name: folder / name for name in made}


@pytest.fixture(scope="module")
def online(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run whose target makes the features."""
    run_dir = tmp_path_factory.mktemp("online") / "run"
    return run_dir, train(toy.config(run_dir, f"run.max_steps={STEPS}"))[1]


@pytest.fixture
def no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks a target for anything."""

    def refuse(*args: Any) -> None:
        raise AssertionError("the target was run")

    for name in ("features", "document_features"):
        monkeypatch.setattr(Target, name, refuse)


@pytest.mark.usefixtures("no_target")
@pytest.mark.parametrize(
    "overrides", [(), ("topology.targets=3", "pipeline.min_ready=3"), ("topology.layout=colocated",)], ids=" ".join
)
def test_a_run_from_a_cache_has_the_bits_of_a_run_with_a_target(
    toy: Toy, caches: dict[str, Path], online: tuple[Path, list[dict[str, Any]]], tmp_path: Path,
    overrides: tuple[str, ...],
) -> None:  # fmt: skip
    """Losses, acceptance on the held-out rows, weights and moments, however it is read; and no target runs."""
    run_dir = tmp_path / "run"
    config = toy.config(run_dir, f"run.max_steps={STEPS}", f"target.cache={caches['taps']}", *overrides)
    _, lines = train(config)
    assert same_training(lines) == same_training(online[1])
    assert any("validation_acceptance_length" in line for line in lines)
    assert_same_bits(online[0], run_dir)
    place = run_dir / "checkpoints" / "latest"
    assert load_state(place) == load_state(online[0] / "checkpoints" / "latest")
    assert "no target runs" in json.loads((run_dir / "run.json").read_text())["packing"]


@pytest.mark.parametrize("kind", [MIXED, ("draft.kind=dspark",)], ids=["dflash", "dspark"])
def test_a_loss_on_the_targets_distribution_has_the_same_bits(
    toy: Toy, caches: dict[str, Path], tmp_path: Path, kind: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last hidden state in the cache as well."""
    overrides = (f"run.max_steps={STEPS}", *kind)
    _, wanted = train(toy.config(tmp_path / "online", *overrides))
    monkeypatch.setattr(Target, "features", None)
    _, found = train(toy.config(tmp_path / "cached", *overrides, f"target.cache={caches['full']}"))
    assert same_training(found) == same_training(wanted)
    assert_same_bits(tmp_path / "online", tmp_path / "cached")


def test_a_run_goes_on_from_a_target_to_a_cache_and_back(
    toy: Toy, caches: dict[str, Path], online: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Stopped at three steps, with target, cache, cache and target in turn, it is the straight run."""
    run_dir = tmp_path / "run"
    cached = f"target.cache={caches['taps']}"
    for stop, extra in ((3, ()), (5, (cached,)), (9, (cached,)), (None, ("target.cache=null",))):
        config = toy.config(run_dir, f"run.max_steps={STEPS}", *extra)
        report, _ = train(config, lambda step, stop=stop: os.kill(os.getpid(), signal.SIGINT) if step == stop else None)
        assert report.step == (stop or STEPS)
        assert RunFolder(run_dir).read_config().target.cache == (str(caches["taps"]) if cached in extra else None)
    assert same_training(lines_of(run_dir)) == same_training(online[1])
    assert_same_bits(online[0], run_dir)


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.01), ("fp8", 0.05)])
def test_a_rounded_cache_trains_alike(
    toy: Toy, online: tuple[Path, list[dict[str, Any]]], tmp_path: Path, dtype: str, limit: float
) -> None:
    """Losses stay within a small part of those with all bits, though they are not the same; the run says so."""
    make(toy, tmp_path / "cache", dtype=dtype)
    _, lines = train(toy.config(tmp_path / "run", f"run.max_steps={STEPS}", f"target.cache={tmp_path / 'cache'}"))
    moved = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(lines, online[1], strict=True)]
    assert 0 < max(moved) < limit
    assert f"has them in {dtype}" in json.loads((tmp_path / "run" / "run.json").read_text())["packing"]


def test_features_of_a_narrow_drafter_are_kept_in_its_type(toy: Toy, tmp_path: Path) -> None:
    """A drafter that computes in bfloat16 is delivered bfloat16, which a cache keeps without loss."""
    overrides = (f"run.max_steps={STEPS}", "draft.dtype=bfloat16")
    assert make(toy, tmp_path / "cache", *overrides)["dtype"] == "bfloat16"
    _, wanted = train(toy.config(tmp_path / "online", *overrides))
    _, found = train(toy.config(tmp_path / "cached", *overrides, f"target.cache={tmp_path / 'cache'}"))
    assert same_training(found) == same_training(wanted)


def test_a_target_with_an_adapter_is_cached_with_it(toy: Toy, caches: dict[str, Path], tmp_path: Path) -> None:
    """The run's bits are those with the merged target; a cache without the adapter, or with it, serves no other run."""
    pytest.importorskip("peft")
    from tests.unit.models.test_adapter import adapter_of

    adapter = f"target.adapter={adapter_of(str(toy.target), tmp_path / 'adapter')[0]}"
    make(toy, tmp_path / "cache", adapter)
    own, few = f"target.cache={tmp_path / 'cache'}", "run.max_steps=2"
    _, wanted = train(toy.config(tmp_path / "online", few, adapter))
    _, found = train(toy.config(tmp_path / "cached", few, adapter, own))
    assert same_training(found) == same_training(wanted)
    for other in ((own,), (adapter, f"target.cache={caches['taps']}")):
        with pytest.raises(ConfigError, match="target.adapter: the cache was made with"):
            train(toy.config(tmp_path / "other", few, *other))


def test_damage_that_is_met_ends_the_run(toy: Toy, caches: dict[str, Path], tmp_path: Path) -> None:
    """A document whose checksum is wrong is not trained on: the run names file and row, after a checkpoint."""
    cache = Path(shutil.copytree(caches["taps"], tmp_path / "cache"))
    config = toy.config(tmp_path / "run", f"target.cache={cache}", "topology.layout=colocated")
    row = resolve_config(config)[0].batches.batch(7).rows[0]  # of the fourth step
    manifest = feature_cache.read_manifest(cache)
    (shard,) = (each for each in manifest.shards if 0 <= row - each.first_row < each.num_rows)
    with safe_open(cache / shard.name, "pt") as file:
        start = int(file.get_tensor("starts")[row - shard.first_row])
    layout = manifest.layout(shard.num_rows, shard.num_tokens)
    data = bytearray((cache / shard.name).read_bytes())
    data[layout.features + 4 * start * manifest.num_states * manifest.hidden_size + 9] ^= 64
    (cache / shard.name).write_bytes(data)
    with pytest.raises(PipelineError, match=rf"{shard.name} is damaged: the checksum of row {row} is not"):
        train(config)
    assert load_state(tmp_path / "run" / "checkpoints" / "latest").step == 3


def test_a_cache_with_more_than_is_wanted_serves_a_run_of_its_own(
    toy: Toy, caches: dict[str, Path], online: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Its bits are those of the taps alone; as it names another part of the target, that does not go on with it."""
    more = (f"run.max_steps={STEPS}", f"target.cache={caches['full']}")
    _, lines = train(toy.config(tmp_path / "run", *more))
    assert same_training(lines) == same_training(online[1])
    with pytest.raises(CheckpointError, match="was trained with other contents of target.path"):
        train(toy.config(tmp_path / "run", f"run.max_steps={STEPS}"))


def test_the_cache_of_another_target_is_refused(toy: Toy, caches: dict[str, Path], tmp_path: Path) -> None:
    """Before the first step, and before there is a run folder's configuration."""
    from tests import tiny

    other = Path(shutil.copytree(toy.target, tmp_path / "other"))
    tiny.save(tiny.causal_lm("llama", seed=3), other)
    with pytest.raises(ModelError, match="was made with another target"):
        train(toy.config(tmp_path / "run", f"target.cache={caches['taps']}", f"target.path={other}"))
    assert not (tmp_path / "run" / "config.yaml").exists()


# ---------------------------------------------------------------------------------------------------- the cache's maker


def killed_at(change: int, work: Callable[[], object]) -> bool:
    """Do some work in a child that is killed before its n-th change of a file; whether it was.

    Writes of pieces, names that files take, and what is forced to the disk count as changes.
    """
    if (child := os.fork()) == 0:
        left = [change]

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        code = 1
        try:
            tensor_file._write_all = counted(tensor_file._write_all)
            os.replace, os.fsync = counted(os.replace), counted(os.fsync)
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def test_a_killed_maker_goes_on_to_the_same_bytes(toy: Toy, tmp_path: Path) -> None:
    """SIGKILL again and again, at any change of a file: complete shards stay, and in the end every byte is the same."""
    straight, out = tmp_path / "straight", tmp_path / "killed"
    make(toy, straight, dtype="fp8")
    made: list[int] = []
    kills = 0
    # each start gets some changes further: whole shards take 8 to 14
    for change in [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 16, 17, 18, 19, 20, 1000]:
        kills += killed_at(change, lambda: make(toy, out, dtype="fp8"))
        if (out / feature_cache.MANIFEST).exists():
            manifest = feature_cache.read_manifest(out)
            made.append(len(manifest.shards))
            assert feature_cache.find_damage(out) == []
    assert kills > 6 and made == sorted(made) and made[0] < made[-1]
    assert content(out) == content(straight)


def test_a_stop_ends_after_the_row_at_hand(toy: Toy, tmp_path: Path) -> None:
    """The first SIGINT stops, complete shards stay, and the same call goes on to the same files."""
    config, told = toy.config(Path("run")), list[int]()

    def tell(count: int) -> None:
        told.append(count)
        if len(told) == 6:
            os.kill(os.getpid(), signal.SIGINT)

    record = cache_features(config, tmp_path / "cache", "target", SHARD, on_tokens=tell)
    assert record == {"out": str(tmp_path / "cache"), "finished": False} and 6 <= len(told) <= 7
    assert 0 < len(feature_cache.read_manifest(tmp_path / "cache").shards) < 5
    make(toy, tmp_path / "cache")
    make(toy, tmp_path / "straight")
    assert content(tmp_path / "cache") == content(tmp_path / "straight")


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """The command in this process."""
    from paceline.cli.main import run as command_line

    def run_here(*arguments: object) -> CompletedProcess[str]:
        capfd.readouterr()
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ending:
            patch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
            patch.setenv("COLUMNS", "200")
            command_line()
        shown = capfd.readouterr()
        return CompletedProcess(sys.argv, int(ending.value.code or 0), shown.out, shown.err)

    return run_here


def test_the_command_says_what_it_takes_and_checks_what_is_there(toy: Toy, tmp_path: Path, here: Here) -> None:
    """Sizes before, errors of rounding after; nothing is made twice; damage is named, and made good."""
    file, out = tmp_path / "run.yaml", tmp_path / "cache"
    file.write_text(dump_config(toy.config(tmp_path / "run")))
    first = here("cache", file, "--out", out, "--dtype", "fp8", "--shard-mib", "1")
    assert first.returncode == 0, first.stderr
    size = (out / "shard-00000.safetensors").stat().st_size
    assert f"{size:,} bytes (" in first.stdout and "in fp8, 1 file; " in first.stdout
    assert "40 rows, " in first.stdout and " free in " in first.stdout
    assert "MiB in float32, " in first.stdout and "MiB in bfloat16" in first.stdout
    assert "fp8 changes the states by " in first.stdout and f"target.cache={out}" in first.stdout
    before = content(out)
    again = here("cache", file, f"target.cache={out}", "--dtype", "fp8", "--json")  # where the run will look for it
    record = json.loads(again.stdout)
    assert record["finished"] and record["num_rows"] == 40 and record["out"] == str(out)
    verified = here("cache", "--verify", out)
    assert verified.returncode == 0 and "1 file as written; all rows are there" in verified.stdout
    data = bytearray(before["shard-00000.safetensors"])
    data[size // 2] ^= 1
    (out / "shard-00000.safetensors").write_bytes(data)
    damaged = here("cache", "--verify", out)
    assert damaged.returncode == 1 and "1 of 1 file damaged" in damaged.stderr
    assert "shard-00000.safetensors is damaged: its SHA-256" in damaged.stderr
    told = json.loads(here("cache", "--verify", out, "--json").stdout)
    assert told["complete"] and len(told["problems"]) == 1
    (out / "shard-00000.safetensors").unlink()
    assert here("cache", file, "--out", out, "--dtype", "fp8").returncode == 0
    assert content(out) == before


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((), "which features? Name the run file"),
        (("RUN",), "where to? Name --out DIR, or target.cache in the run file"),
        (("RUN", "--verify", "OUT"), "--verify DIR makes nothing"),
        (("--verify", "OUT"), "is no feature cache"),
        (("RUN", "--out", "OUT", "target.server=http://127.0.0.1:1"), "made by a target that runs here"),
    ],
)
def test_what_the_command_cannot_do_is_a_message(
    toy: Toy, tmp_path: Path, here: Here, arguments: tuple[str, ...], what: str
) -> None:
    """One line that says what was wanted, no traceback, nothing made."""
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(toy.config(tmp_path / "run")))
    places = {"RUN": file, "OUT": tmp_path / "out"}
    ended = here("cache", *(places.get(each, each) for each in arguments))
    assert ended.returncode == 1 and what in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "out").exists()


def test_the_function_does_what_the_command_does(toy: Toy, tmp_path: Path) -> None:
    """From Python: the record of ``--json``; the run file's own target.cache says where to."""
    config = toy.config(tmp_path / "run", f"target.cache={tmp_path / 'cache'}", "run.max_steps=2")
    told: list[int] = []
    record = api.cache(config, dtype="bfloat16", on_tokens=told.append)
    assert record["finished"] and record["dtype"] == "bfloat16" and sum(told) == record["num_tokens"]
    assert api.train(config).step == 2
    with pytest.raises(ConfigError, match="dtype was bfloat16, is now float32"):
        api.cache(config)
    assert cache_writer.SHARD_BYTES == record["shard_bytes"]


@pytest.mark.ray
@pytest.mark.slow
def test_ranks_of_a_group_read_for_themselves(toy: Toy, caches: dict[str, Path], tmp_path: Path) -> None:
    """Two drafters on Ray from a cache are two drafters with a target each, bit for bit, and none runs a target."""
    group = (f"run.max_steps={STEPS // 2}", "optim.tokens_per_step=512", "topology.executor=ray", "topology.drafters=2")
    _, wanted = train(toy.config(tmp_path / "online", *group, "topology.layout=colocated"))
    _, found = train(toy.config(tmp_path / "cached", *group, f"target.cache={caches['taps']}"))
    assert same_training(found) == same_training(wanted)
    assert tensors(tmp_path / "online").keys() == tensors(tmp_path / "cached").keys()
    assert_same_bits(tmp_path / "online", tmp_path / "cached")
