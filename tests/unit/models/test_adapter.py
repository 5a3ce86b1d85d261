"""A merged adapter is what PEFT computes without merging; whatever does not fit is refused by name."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.errors import ConfigError, ModelError
from paceline.models.adapter import CONFIG_FILE, WEIGHTS_FILE
from paceline.models.loading import load_causal_lm, load_configs, load_text_model
from paceline.models.merged import write_merged
from paceline.models.target import Target
from tests import tiny
from tests.unit.models.test_dequantize import LAYOUTS, write
from tests.unit.models.test_target import wrapper

FAMILIES = ("llama", "qwen3", "gemma3", "qwen3_5")
IDS = torch.arange(3, 33)
LINEAR = ["q_proj", "v_proj", "o_proj", "down_proj", "in_proj_qkv", "out_proj"]
"""Names in attention, gated-delta layers and MLPs; a family has some of them."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny model folders by family; never changed."""
    root = tmp_path_factory.mktemp("bases")
    return {family: tiny.save(tiny.causal_lm(family), root / family) for family in FAMILIES}


def adapter_of(base: str, folder: Path, seed: int = 0, wrapped: Any = None, **settings: Any) -> tuple[str, Any]:
    """An adapter as PEFT writes it, with nothing at zero; its folder, and PEFT's own unmerged model."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": LINEAR, "task_type": "CAUSAL_LM"} | settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights
        model = peft.get_peft_model(wrapped or load_text_model(base), peft.LoraConfig(**settings)).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.requires_grad:
                    noise = torch.randn(weight.shape, generator=generator)
                    weight.add_(noise, alpha=0.1 if "lora_" in name else 0.3)
        model.save_pretrained(folder)
    return str(folder), model


@pytest.fixture(scope="module")
def of_llama(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of one module a layer; never changed."""
    return Path(adapter_of(folders["llama"], tmp_path_factory.mktemp("adapters") / "a", target_modules=["q_proj"])[0])


def edit(
    folder: str | Path, settings: dict[str, Any] | None = None, tensors: Callable[[dict[str, Tensor]], Any] = len
) -> str:
    """Change an adapter's files; its folder."""
    path, weights = Path(folder) / CONFIG_FILE, Path(folder) / WEIGHTS_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | (settings or {})))
    content = load_file(weights)
    tensors(content)
    save_file(content, weights)
    return str(folder)


def copy_tokenizer(base: str) -> None:
    for file in (Path(__file__).parents[2] / "assets" / "toy_tokenizer").iterdir():
        shutil.copy(file, base)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS[None], use_cache=False).logits[0]


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4


# ------------------------------------------------------------------------------------------------------- what is merged


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_taps_are_what_peft_computes_unmerged(
    folders: dict[str, str], tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the whole model and of the cut one, for which keys past the cut are leftovers; far from the base's."""
    caplog.set_level(logging.INFO, logger="paceline")
    adapter, unmerged = adapter_of(folders[family], tmp_path / "adapter")
    found, wanted = logits(load_text_model(folders[family], adapter=adapter)), logits(unmerged)
    assert_near(found, wanted)
    assert (logits(load_text_model(folders[family])) - wanted).abs().max() > 0.1 * wanted.abs().max()
    assert "not loaded" not in caplog.text
    target = Target.load(folders[family], layer_ids=(0, 2), adapter=adapter)
    with torch.no_grad():
        states = unmerged(input_ids=IDS[None], output_hidden_states=True, use_cache=False).hidden_states
    assert_near(target.document_features(IDS), torch.cat([states[1][0], states[3][0]], dim=-1))
    assert "of its tensors are for parts that are not loaded" in caplog.text


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"use_rslora": True}),
        ("llama", {"use_dora": True}),
        ("gemma3", {"use_dora": True, "target_modules": [*LINEAR, "embed_tokens"]}),
        ("llama", {"rank_pattern": {r"layers\.1\..*q_proj": 7, "down_proj": 2}, "alpha_pattern": {"o_proj": 24}}),
        ("llama", {"target_modules": r".*\.layers\.[13]\.mlp\.(up|gate)_proj"}),
        ("llama", {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
        ("llama", {"target_modules": ["lm_head", "embed_tokens"]}),
        ("qwen3", {"modules_to_save": ["lm_head"]}),
        ("qwen3", {"modules_to_save": ["embed_tokens"]}),
        ("qwen3", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
        ("qwen3", {"target_modules": ["q_proj", "lm_head"]}),
        ("qwen3", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("gemma3", {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
    ],
    ids=str,
)
def test_each_kind_of_lora_is_what_peft_computes_unmerged(
    folders: dict[str, str], tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    """Scales, magnitudes, patterns and whole modules have their effect, and tied weights are parted as PEFT does."""
    adapter, unmerged = adapter_of(folders[family], tmp_path / "adapter", **settings)
    merged = load_text_model(folders[family], adapter=adapter)
    assert_near(logits(merged), logits(unmerged))
    names = {"lm_head", "embed_tokens"}.intersection(
        settings.get("modules_to_save", settings.get("target_modules")) or ()
    )
    was_tied = bool(load_text_model(folders[family]).config.tie_word_embeddings)
    keeps = was_tied and (not names or settings.get("ensure_weight_tying", False))
    assert (merged.get_input_embeddings().weight is merged.get_output_embeddings().weight) == keeps
    assert merged.config.tie_word_embeddings == keeps


def test_biases_are_merged(tmp_path: Path) -> None:
    """`lora_bias` adds to a layer's own bias."""
    base = tiny.save(tiny.causal_lm("qwen2"), tmp_path / "base")
    adapter, unmerged = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"], lora_bias=True)
    assert_near(logits(load_text_model(base, adapter=adapter)), logits(unmerged))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_an_adapter_of_a_multimodal_wrapper_finds_the_text_part(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Trained on all linear layers of the wrapper: the text part is PEFT's, and what is for images is left out."""
    caplog.set_level(logging.INFO, logger="paceline")
    model, _ = wrapper(family)
    base = tiny.save(model, tmp_path / "base")
    settings = {"target_modules": "all-linear", "rank_pattern": {r"language_model.*v_proj": 7}}
    adapter, unmerged = adapter_of(base, tmp_path / "adapter", wrapped=model, **settings)
    assert any("vis" in key for key in load_file(Path(adapter) / WEIGHTS_FILE))
    trunk = unmerged.base_model.model.model.language_model
    with torch.no_grad():
        wanted = trunk(input_ids=IDS[None], use_cache=False).last_hidden_state[0]
        merged = load_text_model(base, adapter=adapter)
        found = merged.model(input_ids=IDS[None], use_cache=False).last_hidden_state[0]
    assert_near(found, wanted)
    assert "are for parts that are not loaded" in caplog.text
    copy_tokenizer(base)
    assert write_merged(base, adapter, tmp_path / "merged", torch.float32) == (torch.float32, True)
    assert torch.equal(logits(load_text_model(str(tmp_path / "merged"))), logits(merged))


def test_older_names_of_a_wrapper_are_read(folders: dict[str, str], tmp_path: Path) -> None:
    """Transformers 4 had the text model elsewhere; patterns go by the names of their time."""
    adapter, unmerged = adapter_of(folders["gemma3"], tmp_path / "adapter", rank_pattern={r"1\..*q_proj": 7})

    def rename(tensors: dict[str, Tensor]) -> None:
        for key in list(tensors):
            tensors[key.replace("base_model.model.", "base_model.model.language_model.")] = tensors.pop(key)

    edit(adapter, {"rank_pattern": {r"language_model.model.layers.1.self_attn.q_proj": 7}}, rename)
    assert_near(logits(load_text_model(folders["gemma3"], adapter=adapter)), logits(unmerged))


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=str)
def test_weights_in_bfloat16_are_rounded_once(
    folders: dict[str, str], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """A merged bfloat16 weight is the float32 sum of base and change, rounded; PEFT's own merge gives the same bits."""
    adapter, _ = adapter_of(folders["llama"], tmp_path / "adapter", **settings)
    base = load_text_model(folders["llama"], torch.bfloat16)
    merged = dict(load_text_model(folders["llama"], torch.bfloat16, adapter=adapter).named_parameters())
    peft_merged = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
    assert [name for name, weight in peft_merged.named_parameters() if not torch.equal(weight, merged[name])] == []
    if not settings:
        factors = load_file(Path(adapter) / WEIGHTS_FILE)
        place = "base_model.model.model.layers.2.mlp.down_proj.lora_"
        change = factors[f"{place}B.weight"] @ factors[f"{place}A.weight"] * (6 / 4)
        plain = load_text_model(folders["llama"], torch.bfloat16).model.layers[2].mlp.down_proj.weight
        assert torch.equal(merged["model.layers.2.mlp.down_proj.weight"], (plain.float() + change).bfloat16())


def test_merging_draws_no_random_numbers(folders: dict[str, str], of_llama: Path) -> None:
    """PEFT would start its factors at random."""
    before = torch.get_rng_state()
    load_text_model(folders["llama"], adapter=str(of_llama))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_quantised_base_is_dequantised_and_then_merged(folders: dict[str, str], tmp_path: Path) -> None:
    """The change is added to the weights that the numbers stand for, to the bit."""
    settings, pack, _ = LAYOUTS["gptq"]
    folder, wanted = write(folders["llama"], tmp_path / "quantised", settings, pack)
    plain = str(shutil.copytree(folders["llama"], tmp_path / "dequantised"))
    save_file(wanted, tmp_path / "dequantised" / "model.safetensors", metadata={"format": "pt"})
    adapter, _ = adapter_of(plain, tmp_path / "adapter")
    found, merged = (dict(load_text_model(each, adapter=adapter).named_parameters()) for each in (folder, plain))
    assert [name for name, weight in merged.items() if not torch.equal(found[name], weight)] == []
    base = dict(load_text_model(folder).named_parameters())
    assert sum(not torch.equal(found[name], weight) for name, weight in base.items()) == 20


def test_a_merged_target_multiplies_in_fp8(folders: dict[str, str], of_llama: Path) -> None:
    """`fp8` comes after the merge, and leaves the fingerprint of what was merged."""
    plain = Target.load(folders["llama"], layer_ids=(1, 3), adapter=str(of_llama))
    fp8 = Target.load(folders["llama"], layer_ids=(1, 3), adapter=str(of_llama), fp8=True)
    assert fp8.fingerprint() == plain.fingerprint() and "multiply in fp8" in (fp8.quantization_note or "")
    found, wanted = fp8.document_features(IDS), plain.document_features(IDS)
    assert 0.005 < float((found - wanted).norm() / wanted.norm()) < 0.4  # random weights


def test_an_adapter_past_the_cut_changes_nothing_that_is_kept(folders: dict[str, str], tmp_path: Path) -> None:
    """It is no error: embedding and head are loaded with a single layer, and the adapter has its place elsewhere."""
    adapter, _ = adapter_of(folders["llama"], tmp_path / "adapter", layers_to_transform=[3, 4])
    base, merged = (Target.load(folders["llama"], layer_ids=(0,), adapter=each) for each in (None, adapter))
    assert merged.fingerprint() == base.fingerprint()


def test_another_base_name_is_only_told(
    folders: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same model may lie elsewhere; the log names both."""
    caplog.set_level(logging.INFO, logger="paceline")
    adapter, unmerged = adapter_of(folders["llama"], tmp_path / "adapter")
    edit(adapter, {"base_model_name_or_path": "someone/model"})
    assert_near(logits(load_text_model(folders["llama"], adapter=adapter)), logits(unmerged))
    assert f"was trained on someone/model, and is merged into {folders['llama']}" in caplog.text


# ------------------------------------------------------------------------------------------------------ what is refused


def test_folders_that_are_no_adapters_are_refused(folders: dict[str, str], of_llama: Path, tmp_path: Path) -> None:
    """Nothing there, no settings, no weights, and weights as a pickle."""
    (tmp_path / "empty").mkdir()
    shutil.copytree(of_llama, tmp_path / "pickled")
    (tmp_path / "pickled" / WEIGHTS_FILE).rename(tmp_path / "pickled" / "adapter_model.bin")
    shutil.copytree(of_llama, tmp_path / "without")
    (tmp_path / "without" / WEIGHTS_FILE).unlink()
    shutil.copytree(of_llama, tmp_path / "torn")
    (tmp_path / "torn" / WEIGHTS_FILE).write_bytes(b"torn")
    for name, reason in {
        "nothing": "is no folder here",
        "empty": "has no adapter_config.json",
        "pickled": "a pickle, which runs code when it is read",
        "without": "there are no weights",
        "torn": "cannot be read",
    }.items():
        with pytest.raises(ModelError, match=reason):
            load_text_model(folders["llama"], adapter=str(tmp_path / name))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "of type PROMPT_TUNING: only LORA"),
        ({"peft_type": "IA3"}, "of type IA3"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters.*fused experts"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices.*rows of the embedding"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens.*acts only behind certain tokens"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights='pissa_niter_16'"),
        ({"r": None}, "no number for r"),
        ({"r": 8}, r"lora_A.weight is \[4, 32\]; \[8, 32\] follows"),
        ({"use_dora": True}, "there is no lora_magnitude_vector.weight"),
        ({"rank_pattern": {"(": 3}}, r"rank_pattern in adapter_config.json: '\(' is no pattern"),
        ({"r": 0}, "cannot be merged: `r` should be a positive integer"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_merged_are_refused(
    folders: dict[str, str], of_llama: Path, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    """The message has the setting and what is wrong with it."""
    adapter = shutil.copytree(of_llama, tmp_path / "adapter")
    with pytest.raises(ModelError, match=reason):
        load_text_model(folders["llama"], adapter=edit(adapter, settings))


KEY = "base_model.model.model.layers.4.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors[KEY].fill_(float("nan")), "1 tensors are not finite, such as .*layers.4.self_attn"),
        (lambda tensors: tensors.pop(KEY), "there is no lora_B.weight"),
        (lambda tensors: tensors.update({KEY: torch.ones(16, 4)}), r"lora_B.weight is \[16, 4\]; \[32, 4\] follows"),
        (
            lambda tensors: tensors.update({KEY.replace("4", "5"): torch.ones(32, 4)}),
            "1 of its keys have no place in .*s.5.s",
        ),
        (lambda tensors: tensors.update({KEY.replace("q_p", "b_p"): torch.ones(32, 4)}), "no place in .*b_proj"),
        (lambda tensors: tensors.update({KEY.replace("lora_B", "lora_X"): torch.ones(32, 4)}), "no place in .*lora_X"),
        (
            lambda tensors: tensors.update({KEY.replace(".weight", ".bias"): torch.ones(32)}),
            "has no use for .*lora_B.bias",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(280, 32)}),
            r"\[280, 32\], .*lm_head.weight \[272",
        ),
        (lambda tensors: tensors.clear(), "holds no weight of a text model"),
        (
            lambda tensors: (tensors.clear(), tensors.update({"model.visual.proj.lora_A.weight": torch.ones(4, 4)})),
            "holds no weight of a text model",
        ),
    ],
    ids=["nan", "missing", "shape", "layer", "module", "part", "bias", "resized", "empty", "images"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    folders: dict[str, str], of_llama: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], reason: str
) -> None:
    """Nothing of an adapter is left out in silence."""
    adapter = shutil.copytree(of_llama, tmp_path / "adapter")
    with pytest.raises(ModelError, match=reason):
        load_text_model(folders["llama"], adapter=edit(adapter, tensors=change))


def test_an_adapter_of_a_deeper_model_is_refused_by_a_cut_one(folders: dict[str, str], tmp_path: Path) -> None:
    """Layers past the cut are left out only if the model has them."""
    base = tiny.save(tiny.causal_lm("llama", num_hidden_layers=7), tmp_path / "deep")
    adapter, _ = adapter_of(base, tmp_path / "adapter")
    with pytest.raises(ModelError, match="have no place in .*layers.5"):
        Target.load(folders["llama"], layer_ids=(0, 1), adapter=adapter)


def test_weights_that_stay_quantised_are_not_merged_into(
    folders: dict[str, str], of_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight bits would swallow the change: the message says what to do."""
    config, _ = load_configs(folders["llama"], None, False)
    model = load_causal_lm(folders["llama"], config, torch.float32, "cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.to(torch.float8_e4m3fn), requires_grad=False)
    loading: dict[str, list[str]] = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    monkeypatch.setattr("paceline.models.loading._load", lambda *args: ((model, loading), "fp8"))
    with pytest.raises(ModelError, match=r"proj.weight is float8_e4m3fn.*`paceline merge`"):
        load_text_model(folders["llama"], adapter=str(of_llama))


def test_a_missing_package_is_named(folders: dict[str, str], of_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those who name an adapter need PEFT."""
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r'pip install "paceline\[adapter\]"'):
        load_text_model(folders["llama"], adapter=str(of_llama))
    load_text_model(folders["llama"])


# ---------------------------------------------------------------------------------- fingerprints, and the merged folder


def test_the_fingerprint_tells_adapters_apart(folders: dict[str, str], tmp_path: Path) -> None:
    """Base, two adapters, and one that differs in the last row of one factor alone: four fingerprints."""
    one, _ = adapter_of(folders["qwen3"], tmp_path / "one")
    other, _ = adapter_of(folders["qwen3"], tmp_path / "other", seed=1)
    shutil.copytree(one, tmp_path / "row")

    def last_row(tensors: dict[str, Tensor]) -> None:
        tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"][-1] += 0.01

    row = edit(str(tmp_path / "row"), tensors=last_row)
    targets = [Target.load(folders["qwen3"], layer_ids=(1, 3), adapter=each) for each in (None, one, other, row, one)]
    found = [each.fingerprint() for each in targets]
    assert len(set(found)) == 4 and found[1] == found[4]


def test_the_heads_fingerprint_tells_a_changed_head(folders: dict[str, str], tmp_path: Path) -> None:
    """Processes compare embedding and head before they train together."""
    adapter, _ = adapter_of(folders["qwen3"], tmp_path / "adapter", modules_to_save=["lm_head"])

    def as_it_was(tensors: dict[str, Tensor]) -> None:
        tensors["base_model.model.lm_head.weight"] = load_text_model(folders["qwen3"]).lm_head.weight.detach().clone()
        tensors["base_model.model.lm_head.weight"][0, 0] += 1.0

    base, merged, row = (
        Target.load(folders["qwen3"], layer_ids=(0,), adapter=each).head_fingerprint()
        for each in (None, adapter, edit(shutil.copytree(adapter, tmp_path / "row"), tensors=as_it_was))
    )
    assert len({base, merged, row}) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_merged_folder_is_the_merged_target(folders: dict[str, str], tmp_path: Path, family: str) -> None:
    """Taps, logits and fingerprint of what is written are those of `target.adapter`, bit for bit; tied or parted."""
    base = str(shutil.copytree(folders[family], tmp_path / "base"))
    copy_tokenizer(base)
    (Path(base) / "generation_config.json").write_text('{"eos_token_id": [7, 9], "temperature": 0.5}')
    for name, settings in {"plain": {}, "parted": {"modules_to_save": ["lm_head"]}}.items():
        adapter, _ = adapter_of(base, tmp_path / name, **settings)
        for dtype in (torch.float32, torch.bfloat16) if name == "plain" else (torch.bfloat16,):
            out = tmp_path / f"{name}-{dtype}"
            assert write_merged(base, adapter, out, dtype) == (dtype, False)
            options: dict[str, Any] = {"layer_ids": (0, 2), "dtype": dtype}
            merged, written = Target.load(base, adapter=adapter, **options), Target.load(str(out), **options)
            assert torch.equal(merged.document_features(IDS), written.document_features(IDS))
            assert merged.fingerprint() == written.fingerprint() and written.shape.eos_token_ids == (7, 9)
        found, wanted = (
            load_text_model(str(out), torch.bfloat16),
            load_text_model(base, torch.bfloat16, adapter=adapter),
        )
        assert torch.equal(logits(found), logits(wanted))


def test_a_merged_folder_overwrites_nothing(folders: dict[str, str], tmp_path: Path) -> None:
    """What is at the place stays; an adapter that cannot be merged leaves nothing behind."""
    base = str(shutil.copytree(folders["llama"], tmp_path / "base"))
    copy_tokenizer(base)
    adapter, _ = adapter_of(base, tmp_path / "adapter")
    with pytest.raises(ConfigError, match="exists: a merged model is written to a new folder"):
        write_merged(base, adapter, tmp_path / "base")
    edit(adapter, {"r": 5})
    with pytest.raises(ModelError, match="follows from the target's weight and the rank"):
        write_merged(base, adapter, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
