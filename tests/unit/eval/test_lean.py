"""The lean forward against the Transformers model that it stands in for, and when it does not."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from paceline.eval import decode as module
from paceline.eval import structure
from paceline.eval.decode import CachedTarget, plain_decode
from paceline.eval.lean import LEAN, LeanForward
from paceline.kernels import packed_linear
from paceline.models.loading import shape_of
from tests import tiny
from tests.unit.eval.learnt import LAYER_IDS

needs_onednn = pytest.mark.skipif(not packed_linear.can_pack(), reason="this build of PyTorch has no oneDNN product")

THETA = {"rope_theta": 10000.0}
PLAIN = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, a key for every query": ("llama", {"num_key_value_heads": 4}),
    "llama, wide heads": ("llama", {"head_dim": 16}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "linear rope": ("llama", {"rope_parameters": THETA | {"rope_type": "linear", "factor": 2.0}}),
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": THETA
            | {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn rope": (
        "qwen3",
        {"rope_parameters": THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
}
OTHERS = {
    "gemma2": ("gemma2", {}, "Gemma2ForCausalLM is none of LlamaForCausalLM"),
    "gemma3": ("gemma3", {}, "Gemma3ForCausalLM is none of"),
    "hybrid": ("qwen3_5", {}, "Qwen3_5ForCausalLM is none of"),
    "window": ("mistral", {"sliding_window": 6}, "sliding window"),
    "windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
        "sliding window",
    ),
    "dynamic rope": (
        "llama",
        {"rope_parameters": THETA | {"rope_type": "dynamic", "factor": 2.0}},
        "rotary type dynamic is none of default",
    ),
    "gelu": ("llama", {"hidden_act": "gelu"}, "its MLP has gelu instead of silu"),
}


def tapped(model: Any, layer_ids: tuple[int, ...] = LAYER_IDS) -> CachedTarget:
    return CachedTarget(model, shape_of(model.config, None), layer_ids)


def tokens(num: int, seed: int = 3) -> list[int]:
    return torch.randint(0, tiny.VOCAB - 8, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def whole(model: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Logits and features of one forward of the Transformers model."""
    output = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return output.logits[0], torch.cat([output.hidden_states[i + 1][0] for i in LAYER_IDS], dim=-1)


def close(seen: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(seen, wanted, atol=1e-4, rtol=1e-4)


@needs_onednn
@pytest.mark.parametrize("name", PLAIN)
def test_any_cut_into_calls_gives_the_models_logits(name: str) -> None:
    """A prompt, blocks and single tokens, whatever their lengths, say what one forward of the model says."""
    family, changes = PLAIN[name]
    model = tiny.causal_lm(family, **changes)
    target, ids = tapped(model), tokens(61)
    assert target.kernel == LEAN
    logits, features = whole(model, ids)
    for cuts in ([61], [1] * 20, [30, 1, 1, 6, 1, 2, 3, 4, 5, 8], [3, 2, 7, 16, 1]):
        target._forward.clear()
        start = 0
        for length in cuts:
            close(target._append(ids[start : start + length]), logits[start : start + length])
            close(target.features(), features[start : start + length])
            start += length
    assert target.prefill(ids[:30]) == int(logits[29].argmax())
    assert target.verify(ids[30:]) == logits[30:].argmax(-1).tolist()
    close(target.next_logits(ids[:17]), logits[16])


@needs_onednn
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_roll_back_of_any_length_leaves_no_trace(family: str) -> None:
    """However many of a block's tokens stay, the sequence goes on as if the others had never been there."""
    model = tiny.causal_lm(family)
    target, prompt, block, others = tapped(model), tokens(9), tokens(6, seed=4), tokens(7, seed=5)
    for num_kept in range(1, 7):
        for num_more in (1, 3, 7):
            target.prefill(prompt)
            target.verify(block)
            target.keep(num_kept)
            sequence = [*prompt, *block[:num_kept], *others[:num_more]]
            logits, features = whole(model, sequence)
            close(target.features(), features[9 : 9 + num_kept])
            close(target._append(others[:num_more]), logits[-num_more:])
            close(target.features(), features[-num_more:])


@needs_onednn
def test_what_stands_behind_the_sequence_is_never_read() -> None:
    """Neither taken-back tokens nor rows that only fill up a call reach a later one: they might be anything."""
    model = tiny.causal_lm("llama")
    target, ids = tapped(model), tokens(40)
    target.prefill(ids[:20])
    for start, length, kept in ((20, 6, 2), (22, 1, 1), (23, 5, 5), (28, 2, 1), (29, 11, 11)):
        forward = target._forward
        assert isinstance(forward, LeanForward)
        for room in (*forward._keys, *forward._values):
            room[:, :, start:] = float("nan")
        close(target._append(ids[start : start + length]), whole(model, ids)[0][start : start + length])
        target.keep(kept)


@needs_onednn
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_room_grows_with_the_sequence(family: str) -> None:
    """Past the reserved positions the room is doubled, in the prompt or while decoding, and nothing is lost."""
    model = tiny.causal_lm(family, max_position_embeddings=4096)
    target, ids = tapped(model), tokens(1100)
    logits, _ = whole(model, ids)
    target.prefill(ids[:509])
    assert target._forward._capacity == 512  # type: ignore[attr-defined]
    for start in range(509, 521, 3):
        close(target._append(ids[start : start + 3]), logits[start : start + 3])
    assert target._forward._capacity == 1024  # type: ignore[attr-defined]
    assert target.prefill(ids) == int(logits[-1].argmax())
    assert target.prefill(ids[:30]) == int(logits[29].argmax())


@needs_onednn
def test_it_works_in_every_gradient_mode() -> None:
    """Calls with and without inference mode may follow each other, in any order, also where the room grows."""
    target = tapped(tiny.causal_lm("llama", max_position_embeddings=4096))
    wanted = target.prefill(tokens(30))
    with torch.inference_mode():
        assert target.prefill(tokens(600)[:30]) is not None
        target.prefill(tokens(600))
    assert target.prefill(tokens(30)) == wanted
    target.verify([1, 2])
    assert not target.features().requires_grad


@pytest.mark.parametrize("name", OTHERS)
def test_other_structures_keep_their_own_forward(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """What the lean forward does not do is left to the model, with one line that says why."""
    family, changes, reason = OTHERS[name]
    model, reference = tiny.causal_lm(family, **changes), tiny.causal_lm(family, **changes)
    with caplog.at_level(logging.INFO, "paceline.eval.decode"):
        target = tapped(model)
    assert reason in target.kernel
    assert target.kernel.startswith("Transformers' own forward")
    assert [record.getMessage() for record in caplog.records] == [f"decoding with {target.kernel}"]
    ids = tokens(12)
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0]
    target.prefill(ids[:5])
    close(target._append(ids[5:]), logits[5:])


@needs_onednn
def test_layers_that_are_not_plain_are_left_to_the_model() -> None:
    """An adapter around a projection is seen in the structure."""
    model = tiny.causal_lm("llama")

    class Adapted(nn.Linear):
        pass

    model.model.layers[2].mlp.up_proj.__class__ = Adapted
    assert "with packed linears: layer 2: up_proj is a Adapted, no plain" in tapped(model).kernel


@needs_onednn
@pytest.mark.parametrize("size", [0.5, 1.002, float("nan")])
def test_a_model_that_behaves_otherwise_is_found_out(size: float) -> None:
    """Where only the numbers tell that a layer does something else, the probe does, and the model decodes itself."""
    model = tiny.causal_lm("llama")
    mlp = model.model.layers[2].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) * size
    target = tapped(model)
    assert "with packed linears: in a probe the lean one's" in target.kernel
    if size == 0.5:
        ids = tokens(12)
        assert target.prefill(ids) == int(whole(model, ids)[0][-1].argmax())


@needs_onednn
def test_a_difference_after_a_roll_back_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe takes tokens back, so a lean forward that cannot would not be used."""
    monkeypatch.setattr(LeanForward, "keep", lambda self, num_tokens: None)
    assert "after a roll-back" in tapped(tiny.causal_lm("llama")).kernel


def test_without_packed_products_all_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another type, a large model, or a build without the operators decodes with the model."""
    model = tiny.causal_lm("llama").bfloat16()
    target = tapped(model)
    assert target.kernel == "Transformers' own forward: the lean one wants float32 on a CPU, this is bfloat16 on cpu"
    assert len(plain_decode(target, tokens(5), 9, ()).tokens) == 9
    monkeypatch.setattr(packed_linear, "can_pack", lambda: False)
    target = tapped(tiny.causal_lm("llama"))
    assert target.kernel == (
        "Transformers' own forward: this build of PyTorch has no product with weights packed for oneDNN"
    )
    wanted = plain_decode(target, tokens(5), 30, ()).tokens
    monkeypatch.undo()
    if packed_linear.can_pack():
        assert plain_decode(tapped(tiny.causal_lm("llama")), tokens(5), 30, ()).tokens == wanted
        monkeypatch.setattr(packed_linear, "MAX_PACKED_BYTES", 100)
        assert (
            tapped(tiny.causal_lm("llama")).kernel == "Transformers' own forward: the model is too large to be packed"
        )


@needs_onednn
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_models_projections_are_freed(is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the loaded model's matrices only embedding and head outlive `load`."""
    folder = tiny.save(tiny.causal_lm("llama", tie_word_embeddings=is_tied), tmp_path)
    loaded: list[Any] = []
    storages: list[torch.UntypedStorage] = []  # kept, so that no address is given out again
    original = module.load_causal_lm

    def load(*args: Any, **options: Any) -> Any:
        model = original(*args, **options)
        loaded.append(weakref.ref(model))
        layers = model.get_decoder().layers
        storages.extend(layer.untyped_storage() for layer in layers.parameters() if layer.dim() > 1)
        return model

    monkeypatch.setattr(module, "load_causal_lm", load)
    target = CachedTarget.load(folder, LAYER_IDS)
    gc.collect()
    assert loaded[0]() is None
    addresses = {storage.data_ptr() for storage in storages}
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    strided = [tensor for tensor in tensors if tensor.layout == torch.strided]  # packed ones have no address
    assert not [tensor for tensor in strided if tensor.untyped_storage().data_ptr() in addresses]
    assert any(tensor is target.head.weight for tensor in strided)
    assert (target.head.weight.data_ptr() == target.embed.weight.data_ptr()) == is_tied
    assert target.device.type == "cpu" and target.dtype == torch.float32


@needs_onednn
def test_a_model_that_the_caller_keeps_is_left_as_it_was(target_folder: Callable[[str], str]) -> None:
    """Standing in for a model changes neither its layers nor its hooks."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target_folder("llama"))
    assert tapped(model).kernel == LEAN
    assert all(type(part) is not packed_linear.PackedLinear for part in model.modules())
    assert not any(part._forward_hooks for part in model.modules())


def test_the_probe_is_short_enough_for_tiny_models() -> None:
    """Its length is far below the positions of any target."""
    assert structure.PROBE_PROMPT + structure.PROBE_BLOCK + packed_linear.MIN_ROWS < 64
