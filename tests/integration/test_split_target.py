"""Runs whose target is in several parts: the bits of a run with one in one piece."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cluster.pages import GROUP
from paceline.cluster.ray_cluster import Needs, ray_cluster
from paceline.errors import ConfigError
from paceline.eval.decode import CachedTarget, plain_decode, speculative_decode
from paceline.eval.forwards import ModelForward
from paceline.models.loading import load_text_model
from paceline.models.target import Target
from tests import tiny
from tests.integration.test_ray import events, roles
from tests.integration.test_training import assert_same_bits, same_training
from tests.toy import Toy, train

PARTS = "topology.gpus_per_target=2"
LONGER = ("data.epochs=4", "eval.validate_every=12", "checkpoint.every_steps=8")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="module")
def straight(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    return run_dir, train(toy.config(run_dir, *LONGER))[1]


@pytest.mark.parametrize("layout", ["split", "colocated"])
def test_parts_in_this_process_change_no_bit(
    toy: Toy, straight: tuple[Path, list[dict[str, Any]]], tmp_path: Path, layout: str
) -> None:
    """Three rows are under way at a time beside the drafter, or one in turn with it; all bits are the same."""
    report, lines = train(toy.config(tmp_path / "run", *LONGER, PARTS, f"topology.layout={layout}"))
    assert same_training(lines) == same_training(straight[1])
    assert_same_bits(straight[0], tmp_path / "run")
    assert report.ledger["issued"] == report.ledger["trained"]


@pytest.mark.ray
@pytest.mark.slow
def test_parts_in_a_process_of_their_own_change_no_bit(
    toy: Toy, straight: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """The process is called by three threads at a time; where it is killed, another one goes on."""
    run_dir = tmp_path / "run"

    def kill(step: int) -> None:
        if step == 10:
            os.kill(roles(run_dir)["target-0"]["pid"], signal.SIGKILL)

    report, lines = train(toy.config(run_dir, *LONGER, PARTS, "topology.executor=ray"), kill)
    assert same_training(lines) == same_training(straight[1])
    assert_same_bits(straight[0], run_dir)
    assert "target was lost" in events(run_dir) and report.ledger["retried"] >= 1


@pytest.mark.ray
@pytest.mark.slow
def test_an_actor_takes_as_many_calls_as_its_target_has_lanes() -> None:
    """Ray's default group has `max_concurrency` threads, beside the one that answers those who watch."""

    class Meeting:
        def __init__(self) -> None:
            self.barrier = threading.Barrier(3)

        def meet(self) -> int:
            return self.barrier.wait(60)

    with ray_cluster(None, Needs(processes=1, cpus=1, gpus=0, store_bytes=0)) as ray:
        actor = ray.remote(concurrency_groups={GROUP: 1})(Meeting).options(max_concurrency=3).remote()
        assert sorted(ray.get([actor.meet.remote() for _ in range(3)])) == [0, 1, 2]


def test_too_few_gpus_are_refused_before_anything_is_loaded(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the devices that were wanted and how many there are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"gpus_per_target=3: .* cuda:0 to cuda:2, and 2 GPUs are to be seen here"):
        train(toy.config(tmp_path / "run", "run.device=cuda", "topology.gpus_per_target=3"))


# ------------------------------------------------------------------ on GPUs

several_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_parts_of_one_gpu_change_no_bit(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On streams of their own, and where no part is on another device."""
    device = torch.device("cuda", 0)
    whole = tiny.target(family, tmp_path / family, device=device, row_length=128)
    monkeypatch.setattr("paceline.models.target.part_devices", lambda first, count: (device,) * count)
    split = tiny.target(family, tmp_path / family, device=device, row_length=128, num_parts=3)
    assert split.route == whole.route
    for seed in range(8):
        row = tiny.row([50, 17, 3, 30], 128, seed=seed)
        assert torch.equal(split.features(row).context_feature, whole.features(row).context_feature)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@several_gpus
@pytest.mark.parametrize("packing", ["auto", "per_document"])
@pytest.mark.parametrize("family", [*tiny.FAMILIES])
def test_parts_of_two_gpus_change_no_bit(family: str, packing: str, tmp_path: Path) -> None:
    """Each in memory of its own: weights go straight there, features come together on the first one, in any thread."""
    kwargs: dict[str, Any] = {"packing": packing, "row_length": 128}
    whole = tiny.target(family, tmp_path / family, device="cuda:0", **kwargs)
    split: Target = tiny.target(family, tmp_path / family, device="cuda:0", num_parts=2, **kwargs)
    layers = split._trunk.layers
    devices = [next(layer.parameters()).device.index for layer in layers]
    assert set(devices) == {0, 1} and devices == sorted(devices)
    assert not any("_hf_hook" in vars(module) for module in split._trunk.modules())
    assert split.route == whole.route and split.fingerprint() == whole.fingerprint()
    rows = [tiny.row([50, 17, 3, 30], 128, seed=seed) for seed in range(24)]
    wanted = [whole.features(row).context_feature for row in rows]
    failed: list[int] = []

    def make(lane: int) -> None:
        for i in range(lane, len(rows), 3):
            found = split.features(rows[i]).context_feature
            assert found.device == torch.device("cuda", 0)
            if not torch.equal(found, wanted[i]):
                failed.append(i)

    threads = [threading.Thread(target=make, args=(lane,)) for lane in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.gpu
@pytest.mark.multi_gpu
@several_gpus
@pytest.mark.parametrize("family", [*tiny.FAMILIES])
def test_parts_of_two_gpus_decode_alike(family: str, tmp_path: Path) -> None:
    """Layers with their keys or states on two GPUs, features and logits on the first; drafts change no token."""
    folder = tiny.save(tiny.causal_lm(family), tmp_path / family)
    device = torch.device("cuda", 0)
    split = CachedTarget.load(folder, (1, 3), device=device, num_parts=2)
    whole = ModelForward(load_text_model(folder, device=device).requires_grad_(False), (1, 3))
    with torch.inference_mode():
        for tokens, kept in (([5, 6, 7, 8], 4), ([9, 10, 11], 2), ([12, 13], 1)):
            torch.testing.assert_close(split.verify_logits(tokens), whole.append(tokens), atol=1e-4, rtol=1e-4)
            split.keep(kept)
            whole.keep(kept)
            features = split.features()
            assert features.device == device and torch.cuda.current_device() == 0
            wanted = torch.cat([tap[:kept] for tap in whole.taps], dim=-1)
            torch.testing.assert_close(features, wanted, atol=1e-4, rtol=1e-4)
    drafter = tiny.drafter(tiny.draft_shape(num_target_layers=split.shape.num_layers)).to(device)
    plain = plain_decode(split, [1, 2, 3], 24, ())
    assert speculative_decode(split, drafter, [1, 2, 3], 24, ()).tokens == plain.tokens


@pytest.mark.gpu
@pytest.mark.multi_gpu
@several_gpus
def test_a_run_over_two_gpus_has_the_bits_of_one(toy: Toy, tmp_path: Path) -> None:
    """The drafter trains on the first one, beside the target's first part."""
    common = ("run.device=cuda:0", "run.deterministic=true", "run.max_steps=8")
    one, two = (
        train(toy.config(tmp_path / name, *common, *more))[1] for name, more in (("one", ()), ("two", (PARTS,)))
    )
    assert same_training(one) == same_training(two)
    assert_same_bits(tmp_path / "one", tmp_path / "two")
