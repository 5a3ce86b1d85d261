"""Packed rows by FlexAttention, forward on the CPU, and layers that cannot be compiled."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from benchmarks import shapes
from paceline.config import Kernels
from paceline.kernels.flash4 import DocumentStarts
from paceline.models.packed import CompiledLayers, layer_windows, packed_attention
from paceline.models.target import Target
from tests import tiny

FLEX = Kernels(attention="flex")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_flex_features_are_those_of_documents_alone(family: str, tmp_path: Path) -> None:
    """Documents of any length, also of one token and beside padding, have the features that they have alone."""
    packed = tiny.target(family, tmp_path / family, packing="packed", kernels=FLEX)
    alone = tiny.target(family, tmp_path / family, packing="per_document")
    assert packed.route == "flex" and "FlexAttention" in packed.packing_note
    for lengths, seed in (((5, 17, 1, 60), 1), ((120,), 2), ((64, 64), 3)):
        tokens = tiny.row(lengths, 128, seed=seed)
        found, wanted = packed.features(tokens).context_feature, alone.features(tokens).context_feature
        assert float((found - wanted).norm() / wanted.norm()) < 2e-5
        assert not found[tokens.num_tokens :].any()
    ids = tokens.input_ids[:64]
    torch.testing.assert_close(packed.document_features(ids), alone.document_features(ids), rtol=1e-4, atol=1e-5)


def test_another_shape_of_row_gets_masks_of_its_own(tmp_path: Path) -> None:
    """Rows of two lengths in turn disturb neither each other nor themselves."""
    target = tiny.target("llama", tmp_path / "llama", packing="packed", kernels=FLEX)
    short, long = tiny.row([30, 20], 64, seed=1), tiny.row([100, 20], 192, seed=2)
    first = [target.features(tokens).context_feature for tokens in (short, long)]
    again = [target.features(tokens).context_feature for tokens in (short, long)]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_hybrid_layers_are_not_run_by_flex_alone(tmp_path: Path) -> None:
    """Block masks do not stop what gated-delta layers carry on: the probe sees it, on whatever route."""
    target = tiny.target("qwen3_5", tmp_path / "hybrid", packing="packed", kernels=FLEX)
    assert target.route == "one_by_one" and "with the tokens of another document" in target.packing_note


def test_a_leak_that_is_small_beside_rounding_is_found(tmp_path: Path) -> None:
    """Where the residual stream is large the leak of gated-delta layers is far below bfloat16's rounding: not what a
    document's taps are, but that they move with another one's tokens gives it away."""
    model = tiny.causal_lm("qwen3_5")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(300.0)
    tiny.save(model, tmp_path / "hybrid")
    target = tiny.target("qwen3_5", tmp_path / "hybrid", packing="packed", dtype=torch.bfloat16)
    assert target.route == "one_by_one"
    found = re.search(r"alone by (\S+) \(limit 1e-01\) and moves by (\S+) with", target.packing_note)
    assert found and float(found[1]) < 0.05 and 0 < float(found[2])


def test_experts_may_round_otherwise(tmp_path: Path) -> None:
    """A mixture of experts is packed: documents move by rounding at most."""
    model = tiny.randomise(transformers.Qwen3MoeForCausalLM(shapes.tiny_moe()))
    target = Target.load(tiny.save(model, tmp_path / "moe"), packing="packed", layer_ids=(0, 2))
    assert target.route == "masked", target.packing_note


def test_windows_of_kinds_of_layers() -> None:
    """Windows follow from the configuration; kinds of layers that masks cannot express are refused."""
    assert layer_windows(tiny.target_config("llama")) == {"": None}
    assert layer_windows(tiny.target_config("gemma3")) == {"full_attention": None, "sliding_attention": 4}
    assert layer_windows(tiny.target_config("mistral", sliding_window=9)) == {"": 9}
    unknown = transformers.LlamaConfig()
    unknown.layer_types = ["chunked_attention"]
    assert layer_windows(unknown) is None


def test_attention_with_sinks_is_refused() -> None:
    """What neither kernel computes is not computed wrongly."""
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="sinks"):
        packed_attention(nn.Module(), x, x, x, torch.zeros(1, 1, 4, 4), s_aux=torch.zeros(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) + 1


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that the compiler refuses has its MLP compiled, with one line that says so; outside rows nothing is."""
    compiled: list[str] = []

    def compile_(function: Any, **_: Any) -> Any:
        def run(*args: Any) -> Any:
            if isinstance(function.__self__, Layer):
                raise RuntimeError("graph break\nmore")
            compiled.append(type(function.__self__).__name__)
            return function(*args)

        return run

    monkeypatch.setattr(torch, "compile", compile_)
    layers, x = nn.ModuleList([Layer(), Layer()]), torch.ones(1, 2)
    wanted = [layer(x) for layer in layers]
    rows = CompiledLayers(layers)
    assert torch.equal(layers[0](x), wanted[0]) and not compiled
    for _ in range(2):
        with rows:
            assert all(torch.equal(layer(x), want) for layer, want in zip(layers, wanted, strict=True))
    assert compiled == ["Linear"] * 4
    assert rows.notes == ["Layer is not compiled, its MLP alone is: graph break"]


def test_frequencies_that_follow_the_longest_document_are_not_packed(tmp_path: Path) -> None:
    """Dynamic rotary frequencies would be those of a row's longest document for all: such targets run one by one."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    tiny.save(tiny.causal_lm("llama", rope_parameters=rope, max_position_embeddings=32), tmp_path / "llama")
    target = tiny.target("llama", tmp_path / "llama", packing="packed", kernels=FLEX)
    assert target.route == "one_by_one" and "dynamic frequencies" in target.packing_note


def test_every_thread_has_documents_of_its_own() -> None:
    """What one thread says of its row, another does not read; the handle, which layers are compiled for, is one."""
    starts = DocumentStarts()
    starts.cu_seqlens = torch.tensor([0, 3])
    seen: list[object] = []

    def other() -> None:
        seen.append(starts.cu_seqlens)
        starts.cu_seqlens = torch.tensor([0, 9])

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [None] and starts.cu_seqlens.tolist() == [0, 3]


def test_compiled_layers_can_be_left_as_they_were() -> None:
    """After `undo` the layers have no trace of it, so that another route can compile them anew."""
    layers = nn.ModuleList([Layer()])
    rows = CompiledLayers(layers)
    assert "forward" in vars(layers[0])
    rows.undo()
    assert "forward" not in vars(layers[0])
