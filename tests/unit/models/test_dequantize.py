"""Quantised checkpoints: packed here with plain loops, loaded, and equal to what they stand for, to the bit."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import ModelError
from paceline.models import dequantize, loading
from paceline.models.loading import load_text_model, quantization_note, quiet_transformers
from paceline.models.target import Target
from tests import tiny

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

Packed = tuple[dict[str, Tensor], np.ndarray]
"""Tensors of a layer by their last names, and the float32 weight ``[out, in]`` that they stand for."""
Packer = Callable[[np.random.Generator, int, int], Packed]


def words_of(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> Tensor:
    """Unsigned numbers ``[rows, columns]`` packed along the columns; place i of a word holds column ``order[i]``."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    words = np.zeros((numbers.shape[0], -(-numbers.shape[1] // per_word)), dtype=np.uint32)
    for row in range(numbers.shape[0]):
        for word in range(words.shape[1]):
            for place, column in enumerate(order):
                if word * per_word + column < numbers.shape[1]:
                    number = np.uint32(numbers[row, word * per_word + column])
                    words[row, word] |= np.uint32(number << np.uint32(place * bits))
    return torch.from_numpy(words.view(np.int32))


def fp8(numbers: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """The nearest FP8 numbers, as they are stored and as they are."""
    stored = torch.from_numpy(numbers.astype(np.float32)).to(torch.float8_e4m3fn)
    return stored, stored.float().numpy()


def pack_awq(generator: np.random.Generator, num_out: int, num_in: int) -> Packed:
    """AWQ, groups of 8."""
    numbers = generator.integers(0, 16, (num_in, num_out))
    zeros = generator.integers(0, 16, (num_in // 8, num_out))
    scales = generator.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    weight = np.zeros((num_out, num_in), dtype=np.float32)
    for i in range(num_in):
        for o in range(num_out):
            weight[o, i] = np.float32(numbers[i, o] - zeros[i // 8, o]) * np.float32(scales[i // 8, o])
    qweight, qzeros = words_of(numbers, 4, AWQ_ORDER), words_of(zeros, 4, AWQ_ORDER)
    return {"qweight": qweight, "qzeros": qzeros, "scales": torch.from_numpy(scales)}, weight


def pack_gptq(bits: int, version: int, shuffled: bool) -> Packer:
    """GPTQ, two groups; version 1 stores zeros less one; `shuffled`: groups by `desc_act`."""

    def pack(generator: np.random.Generator, num_out: int, num_in: int) -> Packed:
        numbers = generator.integers(0, 1 << bits, (num_in, num_out))
        zeros = generator.integers(1, 1 << bits, (2, num_out))
        scales = generator.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
        groups = np.arange(num_in) // (num_in // 2)
        if shuffled:
            generator.shuffle(groups)
        weight = np.zeros((num_out, num_in), dtype=np.float32)
        for i in range(num_in):
            for o in range(num_out):
                weight[o, i] = np.float32(numbers[i, o] - zeros[groups[i], o]) * np.float32(scales[groups[i], o])
        tensors = {
            "qweight": words_of(numbers.T, bits).T.contiguous(),
            "qzeros": words_of(zeros - (version == 1), bits),
            "scales": torch.from_numpy(scales),
        }
        if shuffled:
            tensors["g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return tensors, weight

    return pack


def pack_fp4(names: tuple[str, ...], is_divided: bool, run: int = 16) -> Packer:
    """E2M1 numbers under E4M3 scales and a number for the whole matrix, or under powers of two (`run` of 32)."""

    def pack(generator: np.random.Generator, num_out: int, num_in: int) -> Packed:
        codes = generator.integers(0, 16, (num_out, num_in))
        whole = np.float32(generator.uniform(100, 3000) if is_divided else generator.uniform(1e-4, 1e-2))
        if run == 16:
            stored, scales = fp8(generator.uniform(0.1, 400, (num_out, num_in // run)))
        else:
            exponents = generator.integers(110, 130, (num_out, num_in // run)).astype(np.uint8)
            stored, scales = torch.from_numpy(exponents), np.exp2(exponents.astype(np.float32) - 127)
        weight = np.zeros((num_out, num_in), dtype=np.float32)
        packed = np.zeros((num_out, num_in // 2), dtype=np.uint8)
        for o in range(num_out):
            for i in range(num_in):
                scale = scales[o, i // run]
                if len(names) == 3:
                    scale = scale / whole if is_divided else scale * whole
                weight[o, i] = np.float32(E2M1[codes[o, i]]) * scale
                packed[o, i // 2] |= codes[o, i] << (4 * (i % 2))
        tensors = dict(zip(names, (torch.from_numpy(packed), stored, torch.tensor([whole])), strict=False))
        return tensors | {"input_scale": torch.ones(1)}, weight

    return pack


def pack_fp8(name: str, rows: int, columns: int) -> Packer:
    """FP8 under scales of blocks; 0 rows: one scale; 0 columns: a scale for each output."""

    def pack(generator: np.random.Generator, num_out: int, num_in: int) -> Packed:
        stored, numbers = fp8(generator.normal(0, 60, (num_out, num_in)))
        height, width = rows or num_out, columns or num_in
        shape = (-(-num_out // height), -(-num_in // width)) if rows else ()
        scales = generator.uniform(1e-3, 1e-2, shape).astype(np.float32)
        weight = np.zeros((num_out, num_in), dtype=np.float32)
        for o in range(num_out):
            for i in range(num_in):
                weight[o, i] = numbers[o, i] * (scales[o // height, i // width] if rows else scales)
        return {"weight": stored, name: torch.from_numpy(np.asarray(scales))}, weight

    return pack


def pack_int8(generator: np.random.Generator, num_out: int, num_in: int) -> Packed:
    """Integers of 8 bits with a scale for each output, in bfloat16."""
    numbers = generator.integers(-128, 128, (num_out, num_in)).astype(np.int8)
    scale = torch.from_numpy(generator.uniform(1e-3, 1e-2, (num_out, 1))).bfloat16()
    return {"weight": torch.from_numpy(numbers), "weight_scale": scale}, numbers.astype(
        np.float32
    ) * scale.float().numpy()


def pack_integers(bits: int, symmetric: bool, shuffled: bool = False) -> Packer:
    """compressed-tensors' integers in words, two groups."""

    def pack(generator: np.random.Generator, num_out: int, num_in: int) -> Packed:
        middle = 1 << (bits - 1)
        numbers = generator.integers(-middle, middle, (num_out, num_in))
        zeros = np.zeros((num_out, 2), dtype=np.int64)
        if not symmetric:
            zeros = generator.integers(-middle, middle, (num_out, 2))
        scale = torch.from_numpy(generator.uniform(1e-3, 1e-2, (num_out, 2))).bfloat16()
        groups = np.arange(num_in) // (num_in // 2)
        if shuffled:
            generator.shuffle(groups)
        weight = np.zeros((num_out, num_in), dtype=np.float32)
        for o in range(num_out):
            for i in range(num_in):
                weight[o, i] = np.float32(numbers[o, i] - zeros[o, groups[i]]) * float(scale[o, groups[i]])
        tensors = {
            "weight_packed": words_of(numbers + middle, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([num_out, num_in]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words_of((zeros + middle).T, bits).T.contiguous()
        if shuffled:
            tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return tensors, weight

    return pack


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors."""
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": {"weights": weights}}}


MODELOPT = ("weight", "weight_scale", "weight_scale_2")
COMPRESSED = ("weight_packed", "weight_scale", "weight_global_scale")

LAYOUTS: dict[str, tuple[dict[str, Any], Packer, str]] = {
    "fp8, blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        pack_fp8("weight_scale_inv", 16, 16),
        "FP8 (blocks of 16 x 16)",
    ),
    "fp8, ragged blocks": (
        {"quant_method": "fp8", "weight_block_size": [24, 20]},
        pack_fp8("weight_scale_inv", 24, 20),
        "FP8 (blocks",
    ),
    "fp8, one scale": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        pack_fp8("weight_scale_inv", 0, 0),
        "FP8",
    ),
    "fp8 of model optimizer": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        pack_fp8("weight_scale", 0, 0),
        "Model Optimizer FP8",
    ),
    "fp8 of compressed-tensors": (
        compressed("float-quantized"),
        pack_fp8("weight_scale", 1, 0),
        "compressed-tensors float-quantized",
    ),
    "fp8 blocks of compressed-tensors": (
        compressed("float-quantized", block_structure=[24, 20]),
        pack_fp8("weight_scale", 24, 20),
        "compressed-tensors float-quantized",
    ),
    "int8": (compressed("int-quantized"), pack_int8, "compressed-tensors int-quantized"),
    "integers, 4 bits": (
        compressed("pack-quantized"),
        pack_integers(4, symmetric=True),
        "compressed-tensors pack-quantized",
    ),
    "integers, 4 bits, with zeros": (
        compressed("pack-quantized"),
        pack_integers(4, symmetric=False, shuffled=True),
        "compressed-tensors pack-quantized",
    ),
    "integers, 8 bits": (
        compressed("pack-quantized"),
        pack_integers(8, symmetric=False),
        "compressed-tensors pack-quantized",
    ),
    "nvfp4 of model optimizer": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        pack_fp4(MODELOPT, is_divided=False),
        "Model Optimizer NVFP4",
    ),
    "nvfp4 of compressed-tensors": (
        compressed("nvfp4-pack-quantized"),
        pack_fp4(COMPRESSED, is_divided=True),
        "compressed-tensors nvfp4-pack-quantized",
    ),
    "mxfp4 of compressed-tensors": (
        compressed("mxfp4-pack-quantized"),
        pack_fp4(COMPRESSED[:2], False, run=32),
        "compressed-tensors mxfp4-pack-quantized",
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"},
        pack_awq,
        "AWQ, 4 bits",
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, pack_gptq(4, 1, shuffled=True), "GPTQ, 4 bits"),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        pack_gptq(4, 2, shuffled=False),
        "GPTQ, 4 bits",
    ),
    "gptq, 8 bits": ({"quant_method": "gptq", "bits": 8}, pack_gptq(8, 1, shuffled=False), "GPTQ, 8 bits"),
    "gptq, 2 bits": ({"quant_method": "gptq", "bits": 2}, pack_gptq(2, 1, shuffled=True), "GPTQ, 2 bits"),
}
"""By name: settings, packer, and how the note begins."""


def is_quantizable(name: str, tensor: Tensor) -> bool:
    """Linear layers inside the decoder."""
    return name.endswith("proj.weight") and tensor.dim() == 2


def write(folder: str | Path, to: Path, settings: dict[str, Any] | None, pack: Packer) -> tuple[str, dict[str, Tensor]]:
    """A quantised copy of a model folder, and the float32 weights that it stands for by name."""
    shutil.copytree(folder, to)
    generator = np.random.default_rng(0)
    weights, wanted = load_file(to / "model.safetensors"), {}
    for name, tensor in list(weights.items()):
        wanted[name] = tensor.float()
        if is_quantizable(name, tensor):
            packed, plain = pack(generator, *tensor.shape)
            wanted[name] = torch.from_numpy(plain)
            del weights[name]
            weights |= {f"{name.removesuffix('weight')}{part}": each for part, each in packed.items()}
    weights["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)  # of a cache: nothing to the weights
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    if settings is not None:
        config = json.loads((to / "config.json").read_text())
        (to / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return str(to), wanted


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model folder; never changed."""
    return tiny.save(tiny.causal_lm("llama", num_hidden_layers=3), tmp_path_factory.mktemp("plain") / "llama")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantised_checkpoint_is_what_it_stands_for(
    layout: str, plain: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every weight equals number times scale to the bit, and one line says what was found and done."""
    caplog.set_level(logging.INFO, logger="paceline")
    settings, pack, label = LAYOUTS[layout]
    folder, wanted = write(plain, tmp_path / "quantised", settings, pack)
    model = load_text_model(folder)
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    note = quantization_note(model) or ""
    assert note.startswith(label) and "21 tensors dequantised to float32" in note
    assert caplog.text.count(note) == 1


def test_weights_are_rounded_once(plain: str, tmp_path: Path) -> None:
    """In bfloat16 a weight is its float32 self, rounded."""
    settings, pack, _ = LAYOUTS["nvfp4 of model optimizer"]
    folder, wanted = write(plain, tmp_path / "quantised", settings, pack)
    model = load_text_model(folder, torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name].bfloat16()), name
    assert "dequantised to bfloat16" in (quantization_note(model) or "")


def test_a_quantised_target_has_the_taps_of_its_weights(plain: str, tmp_path: Path) -> None:
    """Cut after its last tap it equals a target of the dequantised weights, whose note is None."""
    settings, pack, _ = LAYOUTS["gptq"]
    folder, wanted = write(plain, tmp_path / "quantised", settings, pack)
    shutil.copytree(plain, tmp_path / "dequantised")
    save_file(wanted, tmp_path / "dequantised" / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(20)
    one, other = (Target.load(str(path), layer_ids=(0, 1)) for path in (folder, tmp_path / "dequantised"))
    assert torch.equal(one.document_features(ids), other.document_features(ids))
    assert one.fingerprint() == other.fingerprint()
    assert quantization_note(load_text_model(str(tmp_path / "dequantised"))) is None


def test_model_optimizers_own_file_is_enough(plain: str, tmp_path: Path) -> None:
    """A folder whose config.json says nothing, beside `hf_quant_config.json`."""
    _, pack, _ = LAYOUTS["nvfp4 of model optimizer"]
    folder, wanted = write(plain, tmp_path / "quantised", None, pack)
    exported = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (Path(folder) / "hf_quant_config.json").write_text(json.dumps(exported))
    model = load_text_model(folder)
    assert torch.equal(
        model.state_dict()["model.layers.1.mlp.up_proj.weight"], wanted["model.layers.1.mlp.up_proj.weight"]
    )
    assert (quantization_note(model) or "").startswith("Model Optimizer NVFP4")


def test_experts_are_dequantised_one_by_one(tmp_path: Path) -> None:
    """A checkpoint keeps every expert apart; Transformers joins what comes out."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    with quiet_transformers():
        model = tiny.randomise(transformers.AutoModelForCausalLM.from_config(config))
    plain = tiny.save(model, tmp_path / "plain")
    settings, pack, _ = LAYOUTS["nvfp4 of compressed-tensors"]
    folder, wanted = write(plain, tmp_path / "quantised", settings, pack)
    found = load_text_model(folder).state_dict()
    experts = "model.layers.1.mlp.experts"
    for i in range(4):
        gate, up = (wanted[f"{experts}.{i}.{name}_proj.weight"] for name in ("gate", "up"))
        assert torch.equal(found[f"{experts}.gate_up_proj"][i], torch.cat([gate, up]))
        assert torch.equal(found[f"{experts}.down_proj"][i], wanted[f"{experts}.{i}.down_proj.weight"])


def test_the_text_part_of_a_quantised_wrapper(tmp_path: Path) -> None:
    """The settings stand in the wrapper's configuration, and vision weights are left alone."""
    text = tiny.target_config("qwen3_5").to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
              "patch_size": 4, "num_position_embeddings": 16}  # fmt: skip
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config=vision, image_token_id=265, video_token_id=266, vision_start_token_id=259,
        vision_end_token_id=260,
    )  # fmt: skip
    with quiet_transformers():
        model = tiny.randomise(transformers.Qwen3_5ForConditionalGeneration(config))
    plain = tiny.save(model, tmp_path / "plain")
    settings, pack, _ = LAYOUTS["fp8, blocks"]
    folder, wanted = write(plain, tmp_path / "quantised", settings, pack)
    found = load_text_model(folder).state_dict()
    name = "layers.3.self_attn.q_proj.weight"
    assert torch.equal(found[f"model.{name}"], wanted[f"model.language_model.{name}"])
    assert not any("visual" in name for name in found)


# ------------------------------------------------------------------ what cannot be read


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        (compressed("marlin-24") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ({"quant_method": "hqq", "quant_config": {}}, "hqq"),
    ],
)
def test_what_cannot_be_loaded_names_a_way_out(
    settings: dict[str, Any], message: str, plain: str, tmp_path: Path
) -> None:
    """A variant that is not read here, and a method whose package is missing, are refused with what would do."""
    folder, _ = write(plain, tmp_path / "quantised", settings, pack_gptq(4, 1, shuffled=False))
    with pytest.raises(ModelError, match=f"(?s){message}.*bfloat16"):
        load_text_model(folder)


@pytest.mark.parametrize(
    ("layout", "part", "message"),
    [
        ("gptq", "scales", "q_proj.qweight has no scales"),
        ("awq", "qzeros", "q_proj.qweight has no qzeros"),
        ("fp8, blocks", "weight_scale_inv", "q_proj.weight .* has no scales"),
        ("nvfp4 of compressed-tensors", "weight_scale", "q_proj.weight_packed has no weight_scale"),
        ("integers, 4 bits", "weight_shape", "q_proj.weight_packed has no weight_shape"),
    ],
)
def test_a_missing_part_is_named(layout: str, part: str, message: str, plain: str, tmp_path: Path) -> None:
    """A quantised layer without what dequantises it is no plain layer."""
    settings, pack, _ = LAYOUTS[layout]
    folder, _ = write(plain, tmp_path / "quantised", settings, pack)
    weights = load_file(Path(folder) / "model.safetensors")
    del weights[f"model.layers.0.self_attn.q_proj.{part}"]
    save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_text_model(folder)


def test_settings_and_tensors_have_to_agree(plain: str, tmp_path: Path) -> None:
    """GPTQ's tensors under AWQ's name, integers under FP4's, and plain weights under any, are errors."""
    awq, gptq = LAYOUTS["awq"][0], LAYOUTS["gptq"][0]
    folder, _ = write(plain, tmp_path / "one", awq, pack_gptq(4, 1, shuffled=False))
    with pytest.raises(ModelError, match="not AWQ's GEMM layout"):
        load_text_model(folder)
    folder, _ = write(plain, tmp_path / "two", gptq, pack_awq)
    with pytest.raises(ModelError, match="not GPTQ's layout"):
        load_text_model(folder)

    def pack_int4(generator: np.random.Generator, num_out: int, num_in: int) -> Packed:
        tensors, plain = pack_fp4(MODELOPT, is_divided=False)(generator, num_out, num_in)
        return tensors | {"weight_scale": tensors["weight_scale"].bfloat16()}, plain

    folder, _ = write(plain, tmp_path / "three", LAYOUTS["nvfp4 of model optimizer"][0], pack_int4)
    with pytest.raises(ModelError, match="has no scales"):
        load_text_model(folder)
    shutil.copytree(plain, tmp_path / "four")
    config = json.loads((tmp_path / "four" / "config.json").read_text())
    (tmp_path / "four" / "config.json").write_text(json.dumps(config | {"quantization_config": gptq}))
    with pytest.raises(ModelError, match="none of its tensors is"):
        load_text_model(str(tmp_path / "four"))


def test_pickles_are_not_read(plain: str, tmp_path: Path) -> None:
    """Weights have to be in safetensors files."""
    settings, pack, _ = LAYOUTS["gptq"]
    folder, _ = write(plain, tmp_path / "quantised", settings, pack)
    (Path(folder) / "model.safetensors").rename(Path(folder) / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors files only"):
        load_text_model(folder)


def test_a_sharded_checkpoint_is_read_whole(plain: str, tmp_path: Path) -> None:
    """A layer's tensors may lie in several files."""
    settings, pack, _ = LAYOUTS["awq"]
    folder, wanted = write(plain, tmp_path / "quantised", settings, pack)
    path = Path(folder)
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    halves = {f"model-{i}.safetensors": dict(list(weights.items())[i::2]) for i in range(2)}
    for file, half in halves.items():
        save_file(half, path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, half in halves.items() for name in half}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = load_text_model(folder).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    (path / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match="model-1.safetensors"):
        load_text_model(folder)


# ------------------------------------------------------------------ kernels for FP8


def test_fp8_that_does_not_run_is_dequantised(plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its kernels should be there but fail, the weights are dequantised and the note gives the reason."""
    settings, pack, _ = LAYOUTS["fp8, blocks"]
    folder, wanted = write(plain, tmp_path / "quantised", settings, pack)
    monkeypatch.setattr(loading, "_why_not_fp8", lambda device: None)

    def fails(*args: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(loading, "_load_as_it_is", fails)
    model = load_text_model(folder)
    assert torch.equal(
        model.state_dict()["model.layers.0.mlp.up_proj.weight"], wanted["model.layers.0.mlp.up_proj.weight"]
    )
    assert (quantization_note(model) or "").endswith("(FP8 cannot run here: no kernel image is available)")


def test_why_fp8_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names the device, or the packages to install, or the GPU's age."""
    assert loading._why_not_fp8(torch.device("cpu")) == "no GPU"
    found: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in found or None)
    assert "pip install kernels accelerate" in (loading._why_not_fp8(torch.device("cuda")) or "")
    found += ["kernels", "accelerate"]
    for capability, reason in (((8, 6), "the GPU is older than Ada and Hopper"), ((9, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        assert loading._why_not_fp8(torch.device("cuda")) == reason


def test_the_first_fp8_layer_is_tried() -> None:
    """A layer with FP8 weights is run once; what it raises is raised."""

    class Fp8(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8, 4).to(torch.float8_e4m3fn), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(f"{tuple(x.shape)}")

    model = tiny.causal_lm("llama", num_hidden_layers=1)
    loading._try_fp8(model)
    model.model.layers[0].mlp.up_proj = Fp8()
    with pytest.raises(RuntimeError, match=r"\(16, 4\)"):
        loading._try_fp8(model)


def test_scales_as_exponents_and_of_several_matrices() -> None:
    """Powers of two may be stored as exponents, and experts that are kept together have scales of their own."""
    numbers = torch.tensor([[1.0, -2.0], [3.0, 4.0]]).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[127, 128], [126, 130]], dtype=torch.uint8)
    assert dequantize.scaled(numbers, exponents).tolist() == [[1.0, -4.0], [1.5, 32.0]]
    both = torch.stack([numbers, numbers])
    per_matrix = torch.tensor([2.0, 10.0]).view(2, 1, 1)
    assert dequantize.scaled(both, per_matrix).tolist() == [[[2.0, -4.0], [6.0, 8.0]], [[10.0, -20.0], [30.0, 40.0]]]
    packed = torch.tensor([[[0x21]], [[0xF3]]], dtype=torch.uint8)  # 0.5, 1 and 1.5, -6
    scale = torch.ones(2, 1, 1).to(torch.float8_e4m3fn)
    assert dequantize.fp4(packed, scale, torch.tensor([2.0, 4.0])).tolist() == [[[1.0, 2.0]], [[6.0, -24.0]]]
