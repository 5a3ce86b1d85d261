"""The exported folder: contract X01, rotary schemas X02, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from paceline.errors import ModelError
from paceline.export.folder import FINGERPRINT_FILE
from paceline.export.zlab import OF_TARGET, export_zlab, is_zlab, load_zlab
from paceline.kernels.attention import BlockLayout
from paceline.models.draft import DFlashDrafter, DraftShape
from paceline.models.loading import read_shape
from tests import tiny

ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
SHAPE = DraftShape(  # case X01
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=272,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    rope=ROPE,
    block_size=4,
    mask_token_id=267,
    target_layer_ids=(0, 3),
    num_target_layers=6,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=64,
)
LAYER_TENSORS = {
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 5000000.0, "factor": 4.0, "original_max_position_embeddings": 4096}
X02_TARGETS = {
    "new": {"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0}},
    "old": {"max_position_embeddings": 4096, "rope_theta": 5000000.0, "rope_scaling": None},
    "yarn": {"max_position_embeddings": 16384, "rope_parameters": YARN},
}


def drafter_of(shape: DraftShape = SHAPE) -> DFlashDrafter:
    torch.manual_seed(0)
    return DFlashDrafter(shape).requires_grad_(False)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = config_of(folder)
    change(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    return export_zlab(drafter_of(), tmp_path / "out")


def test_the_config_is_complete(exported: Path) -> None:
    """The file has every key of the published layout, written out and not left to a loader's default (case X01)."""
    assert config_of(exported) == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 272,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 512,
        "num_target_layers": 6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 64,
        "is_causal": False,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 267, "target_layer_ids": [0, 3], "block_size": 4},
        "rope_parameters": ROPE,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
    }


def test_the_tensors_are_the_published_ones(exported: Path) -> None:
    """Eleven tensors a layer and three more, in the config's type, with nothing of the target (case X01)."""
    tensors = safetensors.torch.load_file(exported / "model.safetensors")
    wanted = {f"layers.{i}.{name}.weight" for i in range(2) for name in LAYER_TENSORS}
    assert set(tensors) == wanted | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    assert shapes["fc.weight"] == [32, 64]
    assert shapes["layers.0.self_attn.q_proj.weight"] == [32, 32]
    assert shapes["layers.0.self_attn.k_proj.weight"] == [16, 32]
    assert shapes["layers.0.self_attn.q_norm.weight"] == [8]


def test_five_layers_have_58_tensors(tmp_path: Path) -> None:
    """A drafter of the published depth has the published number of tensors."""
    shape = replace(SHAPE, num_hidden_layers=5, layer_types=("full_attention",) * 5, sliding_window=None)
    folder = export_zlab(drafter_of(shape), tmp_path / "out")
    assert len(safetensors.torch.load_file(folder / "model.safetensors")) == 58
    assert config_of(folder)["use_sliding_window"] is False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_reloaded_drafter_computes_the_same(dtype: torch.dtype, tmp_path: Path) -> None:
    """Hidden states after a reload equal those of the trained drafter after the same cast, bit for bit (case X01)."""
    trained = drafter_of()
    loaded = load_zlab(export_zlab(trained, tmp_path / "out", dtype)).float()
    cast = drafter_of().to(dtype).float()
    generator = torch.Generator().manual_seed(1)
    noise, feature = torch.randn(1, 4, 32, generator=generator), torch.randn(9, 64, generator=generator)
    outputs = [
        drafter(
            noise,
            torch.arange(9, 13)[None],
            drafter.context_kv(feature, torch.arange(9)),
            BlockLayout.of_decode(9, 4),
        )
        for drafter in (loaded, cast)
    ]
    assert loaded.shape == trained.shape
    assert torch.equal(*outputs)


def test_export_of_an_import_is_the_same_folder(exported: Path, tmp_path: Path) -> None:
    """Exporting what was loaded gives the same bytes (case X01)."""
    again = export_zlab(load_zlab(exported), tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (exported / name).read_bytes()


def test_transformers_reads_the_config(exported: Path) -> None:
    """The folder's configuration is a valid Qwen3 configuration that keeps the drafter's own keys."""
    config = transformers.AutoConfig.from_pretrained(exported)
    assert isinstance(config, transformers.Qwen3Config)
    assert config.rope_parameters == ROPE
    assert (config.sliding_window, config.block_size, config.is_causal) == (64, 4, False)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.dflash_config["target_layer_ids"] == [0, 3]


@pytest.mark.parametrize("name", X02_TARGETS)
def test_rotary_settings_survive_in_both_schemas(name: str, tmp_path: Path) -> None:
    """Whichever schema the target has and a loader reads, the frequencies are the target's, in float32 (case X02)."""
    target = {**{k: v for k, v in vars(SHAPE).items() if isinstance(v, (int, float))}, "model_type": "qwen3"}
    target.update(X02_TARGETS[name])
    (tmp_path / "config.json").write_text(json.dumps(target), encoding="utf-8")
    read = read_shape(str(tmp_path))
    shape = replace(SHAPE, rope=read.rope, max_position_embeddings=read.max_position_embeddings)
    drafter = drafter_of(shape)
    wanted = drafter.rotary.inv_freq
    if name != "yarn":
        torch.testing.assert_close(wanted, torch.tensor([1.0, 0.0211474253, 0.0004472136, 9.4574e-06]))

    folder = export_zlab(drafter, tmp_path / "out")
    config = config_of(folder)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000000.0
    if name == "yarn":
        assert config["rope_parameters"] == YARN
        assert config["rope_scaling"] == {key: value for key, value in YARN.items() if key != "rope_theta"}
    for hidden_key in ("rope_parameters", "rope_scaling", None):
        loaded_config = {key: value for key, value in config.items() if key != hidden_key}
        if hidden_key == "rope_scaling":
            loaded_config.pop("rope_theta")
        (folder / "config.json").write_text(json.dumps(loaded_config), encoding="utf-8")
        loaded = load_zlab(folder)
        assert loaded.shape == shape
        assert loaded.fc.weight.dtype == torch.bfloat16
        assert loaded.rotary.inv_freq.dtype == torch.float32
        assert torch.equal(loaded.rotary.inv_freq, wanted)
        assert torch.equal(Qwen3RotaryEmbedding(transformers.AutoConfig.from_pretrained(folder)).inv_freq, wanted)


def test_a_folder_without_rope_theta_is_refused(exported: Path) -> None:
    """A base that is nowhere in the file is an error that names it, not a default (case X02)."""
    edit(exported, lambda config: [config.pop("rope_parameters"), config.pop("rope_theta")])
    with pytest.raises(ModelError, match="rope_theta"):
        load_zlab(exported)


@pytest.mark.parametrize("rope", [{**ROPE, "mrope_section": [3, 3, 2]}, {**ROPE, "partial_rotary_factor": 0.25}])
def test_rotary_settings_that_engines_would_misread_are_refused(rope: dict[str, Any], tmp_path: Path) -> None:
    """Multi-axis and partial rotations are never exported."""
    with pytest.raises(ModelError, match="rotary settings"):
        export_zlab(drafter_of(replace(SHAPE, rope=rope)), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_block_size_is_read_from_either_place(exported: Path) -> None:
    """Released folders have the block size at the top or in dflash_config; two different values are an error."""
    edit(exported, lambda config: config.pop("block_size"))
    assert load_zlab(exported).shape.block_size == 4
    edit(exported, lambda config: config.update(block_size=4) or config["dflash_config"].pop("block_size"))
    assert load_zlab(exported).shape.block_size == 4
    edit(exported, lambda config: config["dflash_config"].update(block_size=8))
    with pytest.raises(ModelError, match="4 at the top and 8 in dflash_config"):
        load_zlab(exported)


@pytest.mark.parametrize(
    ("layer_types", "is_causal"),
    [
        (["full_attention"] * 2, False),
        (["sliding_attention"] * 2, True),
        (["sliding_attention", "full_attention"], "sliding"),
    ],
)
def test_causality_that_is_not_written_follows_the_layers(
    layer_types: list[str], is_causal: bool | str, exported: Path
) -> None:
    """Without is_causal, full layers are bidirectional and sliding ones causal, as engines read older folders."""
    edit(exported, lambda config: config.pop("is_causal") or config.update(layer_types=layer_types))
    shape = load_zlab(exported).shape
    assert shape.is_causal == is_causal
    assert [shape.visibility(i).causal for i in (0, 1)] == [kind == "sliding_attention" for kind in layer_types]


def test_causality_that_differs_by_layer_is_not_written(tmp_path: Path) -> None:
    """Causal sliding layers beside bidirectional full ones have no key; where all layers agree it is a plain flag."""
    drafter = drafter_of(replace(SHAPE, is_causal="sliding"))
    folder = export_zlab(drafter, tmp_path / "out")
    assert not {"is_causal", "causal"} & {*config_of(folder), *config_of(folder)["dflash_config"]}
    assert load_zlab(folder).shape == drafter.shape
    sliding = replace(SHAPE, is_causal="sliding", layer_types=("sliding_attention",) * 2)
    assert config_of(export_zlab(drafter_of(sliding), tmp_path / "sliding"))["is_causal"] is True


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.update(architectures=["LiLiCorrDraftModel"]), "LiLiCorrDraftModel"),
        (lambda c: c.pop("dflash_config"), "no `dflash_config`"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "no mask_token_id"),
        (lambda c: c["dflash_config"].update(target_layer_ids=None), "no target_layer_ids"),
        (lambda c: c["dflash_config"].update(selector_rank=256), "selector_rank"),
        (lambda c: c.update(sliding_window=None), "no sliding_window"),
        (lambda c: c.update(attention_bias=True), "attention_bias=True"),
        (lambda c: c.pop("head_dim"), "no head_dim"),
    ],
)
def test_another_kind_of_drafter_is_refused(
    change: Callable[[dict[str, Any]], object], named: str, exported: Path
) -> None:
    """What this drafter is not, or what the file leaves open, is an error that names the key."""
    edit(exported, change)
    with pytest.raises(ModelError, match=named):
        load_zlab(exported)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("norm.weight"), r"missing \['norm.weight'\]"),
        (lambda t: t.update({"lm_head.weight": torch.ones(2)}), r"unexpected \['lm_head.weight'\]"),
        (lambda t: t.update({"fc.weight": torch.ones(32, 32)}), r"fc.weight \[32, 32\] for \[32, 64\]"),
    ],
)
def test_tensors_that_do_not_match_are_named(
    change: Callable[[dict[str, torch.Tensor]], object], named: str, exported: Path
) -> None:
    """Missing, unexpected and misshapen tensors are errors, never silently skipped."""
    tensors = safetensors.torch.load_file(exported / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, exported / "model.safetensors")
    with pytest.raises(ModelError, match=named):
        load_zlab(exported)


def test_damaged_weights_are_an_error(exported: Path) -> None:
    """A file that was cut short is an error that names it."""
    path = exported / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ModelError, match="model.safetensors cannot be read"):
        load_zlab(exported)


def test_only_an_export_is_replaced(exported: Path, tmp_path: Path) -> None:
    """An earlier export is replaced whole; any other folder with files, and a file, are left alone."""
    export_zlab(drafter_of(replace(SHAPE, block_size=3)), exported)
    assert load_zlab(exported).shape.block_size == 3
    (exported / "notes.txt").write_text("mine", encoding="utf-8")
    for place, named in ((exported, "other files"), (exported / "notes.txt", "is a file")):
        with pytest.raises(ModelError, match=named):
            export_zlab(drafter_of(), place)
    assert (exported / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no temporary folder stays


def test_a_failed_write_leaves_the_old_export(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full the error says so, and the earlier export is as it was."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    before = (exported / "model.safetensors").read_bytes()
    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(ModelError, match="No space left"):
        export_zlab(drafter_of(replace(SHAPE, block_size=3)), exported)
    assert (exported / "model.safetensors").read_bytes() == before
    assert [path.name for path in exported.parent.iterdir()] == ["out"]


def test_is_zlab_tells_an_export_from_a_target(exported: Path, tmp_path: Path) -> None:
    """Only a folder whose configuration has a dflash_config is taken for a drafter."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert is_zlab(exported)
    assert not is_zlab(tmp_path)
    assert not is_zlab(tmp_path / "missing")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.update(attention_sink_bias=True), "attention_sink_bias"),
        (lambda c: c.update(hidden_size="32"), "hidden_size='32'; a whole number"),
        (lambda c: c.update(num_hidden_layers=0), "num_hidden_layers=0"),
        (lambda c: c.update(rms_norm_eps=True), "rms_norm_eps=True"),
        (lambda c: c.update(layer_types=["full_attention"]), "1 entries for num_hidden_layers=2"),
        (lambda c: c.update(layer_types=["full_attention", "chunked_attention"]), "chunked_attention"),
        (lambda c: c.update(num_attention_heads=3), "num_attention_heads=3 has to be a multiple"),
        (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 3]), "eagle_aux_hidden_state_layer_ids=.0, 3."),
        (lambda c: c.update(draft_vocab_size=100), "draft_vocab_size=100"),
        (lambda c: c.update(is_neox_style=False), "is_neox_style=False"),
        (lambda c: c["dflash_config"].update(causal=True), "is_causal=False and dflash_config.causal=True"),
        (lambda c: c["dflash_config"].update(sample_from_anchor=True), "sample_from_anchor=True"),
        (lambda c: c["dflash_config"].update(use_swa=True), "use_swa=True"),
        (lambda c: c["dflash_config"].update(mask_token_id=272), "mask_token_id=272 is not in 0..271"),
        (lambda c: c["dflash_config"].update(mask_token_id=-1), "mask_token_id=-1 is not in"),
        (lambda c: c["dflash_config"].update(mask_token_id="<|mask|>"), "mask_token_id='<|mask|>'"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[2, 2]), r"target_layer_ids.*\[2, 2\]"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[-1, 2]), r"target_layer_ids.*\[-1, 2\]"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[0, 6]), r"target_layer_ids.*\[0, 6\]"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[3, 1]), "ascending order"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[0, 5]), "layer 5 is the last one"),
        (lambda c: c["dflash_config"].update(target_layer_ids=3), "target_layer_ids=3; a list"),
    ],
)
def test_contradictions_are_named(change: Callable[[dict[str, Any]], object], named: str, exported: Path) -> None:
    """Keys that say two things, or what cannot be, are errors that name key and value (cases P02 and T06)."""
    edit(exported, change)
    with pytest.raises(ModelError, match=re.escape(named) if "'" in named else named):
        load_zlab(exported)


@pytest.mark.parametrize(
    "changes", [{"target_layer_ids": (3, 0)}, {"target_layer_ids": (0, 5)}, {"mask_token_id": 272}, {"block_size": 1}]
)
def test_what_readers_refuse_is_never_written(changes: dict[str, Any], tmp_path: Path) -> None:
    """A drafter that no engine could use is refused before anything is on the disk."""
    with pytest.raises(ModelError, match=next(iter(changes))):
        export_zlab(drafter_of(replace(SHAPE, **changes)), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_keys_of_published_folders_are_known(exported: Path) -> None:
    """What Transformers writes beside the drafter's own keys is no other kind of drafter."""
    more = transformers.AutoConfig.from_pretrained(exported).to_dict() | {
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "max_window_layers": 2, "use_cache": True,
        "attention_dropout": 0.0, "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": True,
        "eagle_aux_hidden_state_layer_ids": [1, 4], "transformers_version": "4.57.1", "torch_dtype": "bfloat16",
    }  # fmt: skip
    edit(exported, lambda config: config.update(more))
    edit(exported, lambda config: config["dflash_config"].update(causal=False, sample_from_anchor=False))
    assert load_zlab(exported).shape == SHAPE


@pytest.mark.parametrize(
    ("family", "changes", "written"),
    [
        ("llama", {}, {}),
        ("gemma2", {}, {"input_embedding_scale": 5.656854, "final_logit_softcapping": 30.0}),
        ("gemma3", {}, {"input_embedding_scale": 5.656854}),
    ],
)
def test_factors_of_the_target_are_written(
    family: str, changes: dict[str, Any], written: dict[str, float], tmp_path: Path
) -> None:
    """Where the target scales its embedding or caps its logits, z-lab's decoder is told; other targets add no key."""
    target = tiny.target(family, tmp_path / "target", layer_ids=(0,))
    drafter = tiny.drafter()
    config = config_of(export_zlab(drafter, tmp_path / "out", torch.float32, target=target))
    found = {key: config["dflash_config"].pop(key) for key in OF_TARGET if key in config["dflash_config"]}
    assert found == pytest.approx(written)
    assert config == config_of(export_zlab(drafter, tmp_path / "plain", torch.float32))
    ids = torch.tensor([3, 267])
    scaled = torch.nn.functional.embedding(ids, target.embed.weight) * found.get("input_embedding_scale", 1.0)
    assert torch.equal(scaled, target.embed(ids))  # as z-lab's decoder embeds a block
    assert load_zlab(tmp_path / "out").shape == drafter.shape


def test_another_target_is_refused(tmp_path: Path) -> None:
    """A drafter is not written with the factors of a target that it was not trained for."""
    target = tiny.target("llama", tmp_path / "target", layer_ids=(0,))
    with pytest.raises(ModelError, match="num_target_layers 6 against 5"):
        export_zlab(drafter_of(), tmp_path / "out", target=target)


def test_texts_are_part_of_the_folder(exported: Path) -> None:
    """The card is written with the folder, and an earlier export that has one, and a fingerprint, is replaced."""
    export_zlab(drafter_of(), exported, texts={"README.md": "a card\n"})
    assert (exported / "README.md").read_text(encoding="utf-8") == "a card\n"
    (exported / FINGERPRINT_FILE).write_text("{}", encoding="utf-8")
    export_zlab(drafter_of(), exported)
    assert {file.name for file in exported.iterdir()} == {"config.json", "model.safetensors"}
