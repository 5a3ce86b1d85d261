"""The benchmark of large targets runs; its timings decide nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import hybrid, shapes
from paceline.models.loading import default_layer_ids


@pytest.mark.parametrize("arguments", [[], ["--moe"]])
def test_the_hybrid_benchmark_runs(arguments: list[str], tmp_path: Path) -> None:
    """At tiny shapes it compares packed documents with documents alone, and writes every figure."""
    out = tmp_path / "result.json"
    result = hybrid.main(
        [*arguments, "--tiny", "--device", "cpu", "--seconds", "0.1", "--warmup", "0", "--draft-layers", "1",
         "--block-size", "4", "--out", str(out)]
    )  # fmt: skip
    assert out.is_file() and result["command"].startswith("python -m benchmarks.hybrid")
    assert str(tmp_path) not in out.read_text()
    assert result["packed_against_alone"]["row"] <= 1e-4
    assert min(result["ms"].values()) > 0 and 0 < result["share_of_floor"]["matmul"] < 1


def test_useful_work_is_that_of_the_description() -> None:
    """Work and sizes of the published shapes are the method's own figures, in TFLOP for a row of 3,072 tokens."""
    for name, target, draft in (("qwen3-8b", 45.5, 71.5), ("qwen3.6-27b", 152.3, 123.4)):
        config = shapes.CONFIGS[name]()
        shape = shapes.target_shape(config)
        found = shapes.target_work(config, shape.num_layers, [3072])
        assert sum(found.values()) / 1e12 == pytest.approx(target, abs=0.1)
        own = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        drafter = shapes.draft_shape(shape, default_layer_ids(shape.num_layers), **own)
        assert sum(shapes.draft_work(drafter, [3072], 512).values()) / 1e12 == pytest.approx(draft, abs=0.1)
