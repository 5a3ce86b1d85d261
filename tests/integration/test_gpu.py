"""The same promises on a CUDA device; skipped where there is none."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.integration.test_training import assert_same_bits, same_training
from tests.toy import Toy, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = ("run.device=cuda", "run.deterministic=true", "run.max_steps=8")


@pytest.fixture(scope="module")
def straight(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    run_dir = tmp_path_factory.mktemp("gpu") / "run"
    return run_dir, train(toy.config(run_dir, *GPU))[1]


def test_training_on_a_gpu_learns_in_bfloat16(straight: tuple[Path, list[dict]]) -> None:
    """Master weights are float32, the compute type is bfloat16, and the loss falls."""
    lines = straight[1]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert "dtype: bfloat16" in (straight[0] / "config.yaml").read_text()


@pytest.mark.parametrize("overrides", [("topology.targets=2",), ("topology.layout=split", "pipeline.queue_depth=2")])
def test_target_threads_do_not_change_the_bits(
    toy: Toy, straight: tuple[Path, list[dict]], tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """With `run.deterministic` the number of target threads on the device leaves losses and weights the same."""
    _, lines = train(toy.config(tmp_path / "run", *GPU, *overrides))
    assert same_training(lines) == same_training(straight[1])
    assert_same_bits(straight[0], tmp_path / "run")


def test_a_resumed_gpu_run_is_the_straight_run(toy: Toy, straight: tuple[Path, list[dict]], tmp_path: Path) -> None:
    """Stopped after step 3 and gone on with, weights and moments are those of the straight run."""
    config = toy.config(tmp_path / "run", *GPU)
    train(config, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 3 else None)
    train(config)
    assert_same_bits(straight[0], tmp_path / "run")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_packed_features_equal_each_document_alone(family: str, tmp_path: Path) -> None:
    """On the device documents run packed after the probe, and equal themselves alone within 1e-5 of their norm."""
    folder = tmp_path / family
    packed = tiny.target(family, folder, device="cuda")
    alone = tiny.target(family, folder, device="cuda", packing="per_document")
    assert packed.packed and not alone.packed
    tokens = tiny.row([5, 17, 3, 30], 64)
    one, other = packed.features(tokens).context_feature, alone.features(tokens).context_feature
    assert float((one[:55] - other[:55]).norm() / other[:55].norm()) < 1e-5


def test_a_hybrid_target_keeps_documents_apart(tmp_path: Path) -> None:
    """With fla-core's kernels, by running mixers document by document, or one by one: each has the features it has
    alone, and the note says how."""
    folder = tmp_path / "hybrid"
    packed = tiny.target("qwen3_5", folder, device="cuda")
    alone = tiny.target("qwen3_5", folder, device="cuda", packing="per_document")
    tokens = tiny.row([5, 17, 3, 30], 64)
    one, other = packed.features(tokens).context_feature, alone.features(tokens).context_feature
    assert float((one[:55] - other[:55]).norm() / other[:55].norm()) < 1e-4
    assert "gated-delta layers" in packed.packing_note


def test_the_device_computes_what_the_cpu_does(tmp_path: Path) -> None:
    """Features of a document are those of the CPU within float32 rounding."""
    folder = tmp_path / "llama"
    ids = torch.arange(1, 40)
    torch.backends.cuda.matmul.allow_tf32 = False
    here, there = (tiny.target("llama", folder, device=d).document_features(ids).cpu() for d in ("cpu", "cuda"))
    assert float((here - there).norm() / here.norm()) < 1e-5
