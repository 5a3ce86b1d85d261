"""The transport benchmark moves what it says it moves; its timings decide nothing."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import transport


def test_every_path_without_ray_is_measured(tmp_path: Path) -> None:
    """The file has times, rates and copies of each path, the command, and why a path was left out."""
    out = tmp_path / "transport.json"
    paths = ["local", "process", "staging", "quantised"]
    result = transport.main(["--sizes", "1", "--repeats", "3", "--paths", *paths, "--out", str(out)])
    assert json.loads(out.read_text()) == result
    assert result["command"].startswith("python -m benchmarks.transport --sizes 1 --repeats 3")
    assert result["left_out"] == {"staging": "needs a GPU: --device cuda"}
    assert {path: found["1 MiB"].get("copies") for path, found in result["paths"].items()} == {
        "local": 0,
        "process": 1,
        "quantised": None,
    }
    warm = result["paths"]["process"]["1 MiB"]["warm"]["in flight 1"]
    assert warm["payloads"] == 3
    assert warm["gb_per_s"]["p10"] == pytest.approx(2**20 / warm["ms"]["p90"] / 1e6)
    fp8 = result["paths"]["quantised"]["1 MiB"]
    assert fp8["quantised_bytes"] == fp8["bytes"] // 2 + 4 * 25


def test_without_ray_its_paths_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Ray measures the rest and says what would be needed."""
    monkeypatch.setattr(transport, "find_spec", lambda name: None)
    result = transport.measure(["ray", "ray-two-nodes"], [1], torch.device("cpu"), 3)
    reason = "ray is not installed: pip install paceline[ray]"
    assert result == {"paths": {}, "left_out": {"ray": reason, "ray-two-nodes": reason}}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
def test_features_cross_two_raylets() -> None:
    """Every payload comes whole and in order, copied into a store and between stores, and out of it by reference."""
    found = transport.measure_ray(2**20, 3, num_nodes=2)
    assert found["copies"] == {"into the store": 1, "between stores": 1, "out of the store": 0}
    assert found["cold"]["in flight 1"]["payloads"] == 4
    assert [found["warm"][f"in flight {depth}"]["payloads"] for depth in (1, 2, 4)] == [3, 3, 3]


def test_a_wrong_payload_ends_the_benchmark() -> None:
    """A payload that is not the one asked for is refused: its timing would mean nothing."""
    payload = transport._payload(64, torch.device("cpu"))
    transport._stamp(payload, 252)
    transport._check(payload, 1)
    with pytest.raises(ValueError, match="payload 2 begins and ends with"):
        transport._check(payload, 2)


def test_fp8_features_keep_each_token_s_scale() -> None:
    """Tokens of very different sizes, and one of zeros, come back within fp8's rounding of 2^-4 of a number."""
    torch.manual_seed(0)
    sizes = torch.tensor([[1e-6], [1.0], [3e4], [0.0]])
    feature = (torch.randn(4, 128).clamp_(min=0.5, max=4.0) * sizes).bfloat16()
    values, scales = transport.quantise(feature)
    restored = torch.full_like(feature, float("nan"))
    transport.dequantise(values, scales, restored)
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (4, 1)
    torch.testing.assert_close(restored, feature, rtol=2**-4 + 2**-8, atol=0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_s_paths_are_measured() -> None:
    """On a GPU, payloads go through pinned memory and, by CUDA IPC, from another process, and come whole."""
    found = transport.measure(["process", "staging", "quantised"], [8], torch.device("cuda"), 3)
    assert found["left_out"] == {} and set(found["paths"]) == {"process", "staging", "quantised"}
    assert found["paths"]["staging"]["8 MiB"]["copies"] == 2
    assert found["paths"]["process"]["8 MiB"]["warm"]["in flight 1"]["payloads"] == 3
