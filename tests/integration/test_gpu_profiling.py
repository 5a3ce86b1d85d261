"""Profiling on a CUDA device: device time beside wall time, who waits for whom, and no wait of its own."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import Kernels
from paceline.profiling import page as layout
from paceline.profiling import stages
from paceline.profiling.page import Control, Page
from tests.integration.test_gpu_step import LENGTH, make_step, rows, wide_target
from tests.toy import Toy, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """A page with everything on, every batch timed on the device."""
    monkeypatch.setattr(stages, "DEVICE_EVERY", 1)
    folder = tmp_path / "profile"
    page = stages.open_run(folder, times_device=True, default_role="drafter-0")
    assert page is not None
    page.words[layout.CONTROL] = Control(1, True, 0.0).word
    yield page
    stages.close_run(page, folder)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_profiling_waits_for_nothing(tmp_path: Path, page: Page, graphs: str) -> None:
    """With every batch timed, warm steps still ask the driver for no memory and never wait for the device."""
    kernels = Kernels(cuda_graphs=graphs)  # type: ignore[arg-type]  # one of its values
    folder = tmp_path / "target"
    target = wide_target(
        "llama", folder, device="cuda", dtype=torch.bfloat16, layer_ids=(0, 2), row_length=LENGTH, kernels=kernels
    )
    step, batches, results = make_step(target, "cuda", dtype=torch.bfloat16, kernels=kernels), rows(), list[Any]()

    def run(i: int) -> None:
        with stages.as_role("target-0"):
            stages.next_batch(i)
            features = target.features(batches[i % 3])
        stages.next_batch(i)
        step.accumulate(features)
        results.append(step.update(i))
        if len(results) > 1:
            results.pop(0)

    with stages.as_role("drafter-0"):
        for i in range(14):
            run(i)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["num_device_alloc"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            for i in range(14, 30):
                run(i)
            torch.cuda.set_sync_debug_mode("default")
        assert [str(w.message) for w in caught if "called a synchronizing" in str(w.message)] == []
        assert torch.cuda.memory_stats()["num_device_alloc"] == before
        torch.cuda.synchronize()
        stages.next_batch(30)
    found = page.snapshot()
    timed = "graph_replay" if graphs == "on" else "forward"
    assert found.total(timed).device_count > 0 and found.total(timed).device_ns > 0
    assert found.total("model_forward").device_count > 0


def test_device_times_are_in_the_tables(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on the device records time on it beside wall time, and how far the host was ahead."""
    monkeypatch.setattr(stages, "DEVICE_EVERY", 2)
    train(
        toy.config(
            tmp_path / "run", "run.device=cuda", "data.epochs=8", "profiling.interval=0.5", "kernels.cuda_graphs='off'"
        )
    )
    lines = [json.loads(line) for line in (tmp_path / "run/profile/stages.jsonl").read_text().splitlines()]
    found = [line["stages"]["forward"] for line in lines if line["stages"].get("forward", {}).get("device_count")]
    assert found and all(0 < stage["device_avg_ms"] < 1e3 for stage in found)
    assert any("drained_frac" in stage for stage in found)


def test_layers_computed_again_are_told_apart(toy: Toy, tmp_path: Path) -> None:
    """Recomputation runs in autograd's thread of the device, counts for the drafter, and not as a forward pass."""
    train(toy.config(tmp_path / "run", "run.device=cuda", "draft.recompute=true", "profiling.interval=60"))
    lines = [json.loads(line) for line in (tmp_path / "run/profile/stages.jsonl").read_text().splitlines()]
    again = [line for line in lines if line["stages"].get("recompute", {}).get("count")]
    assert again and {line["role"] for line in again} == {"drafter-0"}
    print("recompute ran in", {line["thread"] for line in again})


@pytest.mark.parametrize("is_launch_bound", [True, False])
def test_the_host_ahead_or_the_device_waiting(page: Page, is_launch_bound: bool) -> None:
    """Many small kernels leave the device waiting for the host; long ones let the host run ahead."""
    small, large = torch.ones(8, device="cuda"), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(200 if is_launch_bound else 12):
            _ = small + 1 if is_launch_bound else large @ large

    with stages.as_role("drafter-0"):
        work()
        for batch in range(6):
            torch.cuda.synchronize()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            event.synchronize()
            stages.synchronised(event)
            stages.next_batch(batch)
            for _ in range(5):
                with stages.FORWARD:
                    work()
        torch.cuda.synchronize()
        stages.next_batch(6)
    stats = page.snapshot().total("forward")
    assert stats.lag_count >= 20
    drained, lag_ms = stats.drained / stats.lag_count, stats.lag_ns / stats.lag_count / 1e6
    print(f"drained {drained:.2f}, lag {lag_ms:.3f} ms")
    if is_launch_bound:
        assert drained > 0.8 and lag_ms < 0.1
    else:
        assert drained < 0.2 and lag_ms > 1
