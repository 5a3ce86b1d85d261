"""Static checks of a folder: what each finding is about, and for whom. End to end: tests/unit/cli/test_check.py."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from paceline.export.check import TargetFacts, check_folder, read_target_facts, token_uses
from paceline.export.speculators import export_speculators
from paceline.export.zlab import export_zlab
from paceline.models.target import Target
from tests import tiny
from tests.toy import ASSETS
from tests.unit.export.test_weights import sharded

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save(tiny.causal_lm("llama"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def facts(target: str) -> TargetFacts:
    """As of a target whose tokenizer uses tokens 0 to 266."""
    return dataclasses.replace(read_target_facts(target), token_uses=dict.fromkeys(range(267), "used"))


def folder_of(layout: str, target: str, place: Path, change: Change = lambda config: None, **fields: Any) -> Path:
    """An export of a drafter with these fields, its configuration changed afterwards."""
    drafter = tiny.drafter(tiny.draft_shape(**fields))
    if layout == "zlab":
        folder = export_zlab(drafter, place / "draft")
    else:
        folder = export_speculators(drafter, Target.load(target, layer_ids=(0,)), target, place / "draft")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    change(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def found(folder: Path, facts: TargetFacts, severity: str, engine: Any = None) -> set[str]:
    return {finding.key for finding in check_folder(folder, facts, engine) if finding.severity == severity}


SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6}
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize(
    "fields",
    [{}, SLIDING, SLIDING | {"is_causal": True}, MIXED, {"rope": YARN}],
    ids=["full", "sliding", "causal", "mixed", "yarn"],
)
def test_what_is_exported_has_no_error(
    layout: str, fields: dict[str, Any], target: str, facts: TargetFacts, tmp_path: Path
) -> None:
    """Every kind of drafter that can be exported passes, in both layouts, errors and missing keys alike."""
    folder = folder_of(layout, target, tmp_path, **fields)
    assert not found(folder, facts, "error")
    expected = {"fingerprint.json", "head_dim of the drafter", "head_dim of the target"}
    expected |= {"rope_theta"} if "rope" not in fields else set()
    expected |= {"layer_types"} if fields == MIXED else set()
    assert found(folder, facts, "warning") == expected


def put(section: str, key: str, value: object) -> Change:
    def change(config: dict[str, Any]) -> None:
        (config[section] if section else config)[key] = value

    return change


def drop(section: str, *keys: str) -> Change:
    def change(config: dict[str, Any]) -> None:
        for key in keys:
            del (config[section] if section else config)[key]

    return change


LAYER = "transformer_layer_config"
LINEAR = {"rope_type": "linear", "factor": 2}
DRAFTED = "proposal_methods[0].speculative_tokens"


@pytest.mark.parametrize(
    ("layout", "fields", "change", "severity", "key"),
    [
        ("zlab", {}, drop("", "block_size"), "warning", "block_size"),
        ("zlab", {}, drop("dflash_config", "block_size"), "warning", "dflash_config.block_size"),
        ("zlab", {}, put("", "block_size", True), "error", "block_size"),
        ("zlab", {}, put("dflash_config", "target_layer_ids", [1, 9]), "error", "dflash_config.target_layer_ids"),
        ("zlab", {}, put("dflash_config", "target_layer_ids", [-1, 2]), "error", "dflash_config.target_layer_ids"),
        ("zlab", {}, put("dflash_config", "target_layer_ids", [2, 2]), "error", "dflash_config.target_layer_ids"),
        ("zlab", {}, put("dflash_config", "target_layer_ids", None), "error", "dflash_config.target_layer_ids"),
        ("zlab", {}, put("dflash_config", "target_layer_ids", [1]), "error", "fc.weight"),
        ("zlab", {}, put("dflash_config", "mask_token_id", "<mask>"), "error", "dflash_config.mask_token_id"),
        ("zlab", {}, put("dflash_config", "mask_token_id", -1), "error", "dflash_config.mask_token_id"),
        ("zlab", {}, put("dflash_config", "shift_label", True), "error", "shift_label"),
        ("zlab", {}, put("", "architectures", ["Other"]), "error", "architectures"),
        ("zlab", {}, drop("", "is_causal"), "warning", "is_causal"),
        ("zlab", SLIDING, drop("", "is_causal"), "warning", "is_causal"),
        ("zlab", MIXED, drop("", "is_causal"), "warning", "is_causal"),
        ("zlab", {}, put("", "is_causal", "no"), "error", "is_causal"),
        ("zlab", {}, drop("", "layer_types"), "warning", "layer_types"),
        ("zlab", SLIDING, drop("", "layer_types"), "error", "layer_types"),
        ("zlab", {}, put("", "layer_types", ["full_attention"]), "error", "layer_types"),
        ("zlab", {}, put("", "layer_types", ["chunked_attention"] * 2), "error", "layer_types"),
        ("zlab", {}, put("", "use_sliding_window", True), "error", "use_sliding_window"),
        ("zlab", SLIDING, put("", "sliding_window", None), "error", "sliding_window"),
        ("zlab", SLIDING, put("", "use_sliding_window", False), "error", "use_sliding_window"),
        ("zlab", {"rope": YARN}, put("", "rope_scaling", None), "error", "rope_parameters.factor"),
        ("zlab", {}, drop("", "rope_parameters"), "warning", "rope_parameters"),
        ("zlab", {}, drop("", "rope_theta", "rope_scaling"), "warning", "rope_theta"),
        ("zlab", {}, drop("", "rope_theta", "rope_parameters"), "error", "rope_theta"),
        ("zlab", {}, put("rope_parameters", "mrope_section", [1, 1]), "error", "mrope_section"),
        ("zlab", {}, put("", "hidden_size", 64), "error", "hidden_size"),
        ("zlab", {}, put("", "hidden_size", "32"), "error", "hidden_size"),
        ("zlab", {}, put("", "vocab_size", 300), "error", "vocab_size"),
        ("zlab", {}, put("", "num_target_layers", None), "error", "num_target_layers"),
        ("zlab", {}, put("", "rms_norm_eps", None), "error", "rms_norm_eps"),
        ("zlab", {}, put("", "dtype", "float32"), "error", "fc.weight and 24 more"),
        ("zlab", {}, put("", "eagle_aux_hidden_state_layer_ids", [1, 3]), "error", "eagle_aux_hidden_state_layer_ids"),
        ("zlab", {}, put("dflash_config", "final_logit_softcapping", 30.0), "error", "final_logit_softcapping"),
        ("zlab", {}, put("dflash_config", "sample_from_anchor", True), "error", "dflash_config.sample_from_anchor"),
        ("zlab", {}, put("", "unheard_of", 1), "error", "unheard_of"),
        ("speculators", {}, put("", "aux_hidden_state_layer_ids", [0, 4]), "error", "aux_hidden_state_layer_ids"),
        ("speculators", {}, put("", "aux_hidden_state_layer_ids", [2, 5]), "error", "aux_hidden_state_layer_ids"),
        ("speculators", {}, put("", "mask_token_id", None), "error", "mask_token_id"),
        ("speculators", {}, put("", "block_size", None), "error", "block_size"),
        ("speculators", {}, put(LAYER, "is_causal", True), "error", f"{LAYER}.is_causal"),
        ("speculators", SLIDING, drop(LAYER, "is_causal"), "warning", f"{LAYER}.is_causal"),
        ("speculators", SLIDING, drop("", "sliding_window_non_causal"), "error", "sliding_window_non_causal"),
        ("speculators", MIXED, put("", "sliding_window_non_causal", False), "error", "sliding_window_non_causal"),
        ("speculators", {}, put("", "unheard_of", 1), "error", "unheard_of"),
        ("speculators", {}, put("", "sample_from_anchor", True), "error", "sample_from_anchor"),
        ("speculators", {}, put(LAYER, "rope_scaling", LINEAR), "error", "rope_parameters.factor"),
        ("speculators", {}, put("speculators_config", "proposal_methods", []), "error", DRAFTED),
    ],
)  # fmt: skip
def test_a_wrong_key_is_named(
    layout: str, fields: dict[str, Any], change: Change, severity: str, key: str, target: str, facts: TargetFacts,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A missing, contradictory or impossible value is found under its key, as an error where engines would part."""
    folder = folder_of(layout, target, tmp_path, change, **fields)
    if severity == "warning":
        assert key in found(folder, facts, "warning")
        assert not found(folder, facts, "error")
    else:
        assert key in found(folder, facts, "error")


def test_limits_of_an_engine_are_told_to_its_users(target: str, facts: TargetFacts, tmp_path: Path) -> None:
    """Head sizes and mixtures matter for vLLM, and are not told to users of SGLang; which cannot read speculators."""
    folder = folder_of("zlab", target, tmp_path, **MIXED)
    limits = {"head_dim of the drafter", "head_dim of the target", "layer_types"}
    assert limits <= found(folder, facts, "warning", "vllm")
    assert not limits & found(folder, facts, "warning", "sglang")
    other = folder_of("speculators", target, tmp_path / "other")
    for engine, is_refused in (("zlab", True), ("sglang", True), ("vllm", False), ("speculators", False)):
        assert ("layout" in found(other, facts, "error", engine)) == is_refused


def test_copies_of_the_target_s_matrices_are_told(target: str, facts: TargetFacts, tmp_path: Path) -> None:
    """An embedding beside the drafter is a warning, one of another shape an error."""
    folder = folder_of("speculators", target, tmp_path)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.zeros(272, 32, dtype=torch.bfloat16)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    assert "embed_tokens.weight" in found(folder, facts, "warning")
    tensors["embed_tokens.weight"] = torch.zeros(272, 16, dtype=torch.bfloat16)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    assert "embed_tokens.weight" in found(folder, facts, "error")


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_layers_of_unlike_causality_are_told(layout: str, target: str, facts: TargetFacts, tmp_path: Path) -> None:
    """Causal sliding layers beside bidirectional full ones: the z-lab layout's default, an error in speculators."""
    if layout == "zlab":
        folder = folder_of("zlab", target, tmp_path, **MIXED, is_causal="sliding")
        assert not found(folder, facts, "error")
        assert {"is_causal", "layer_types"} <= found(folder, facts, "warning")
        return

    def change(config: dict[str, Any]) -> None:
        config["sliding_window_non_causal"] = False
        del config[LAYER]["is_causal"]

    folder = folder_of("speculators", target, tmp_path, change, **MIXED)
    assert found(folder, facts, "error") == {"sliding_window_non_causal"}


def test_shards_are_looked_into(target: str, facts: TargetFacts, tmp_path: Path) -> None:
    """Weights in shards are checked as those of one file; what the index does not hold is an error under its name."""
    folder = folder_of("zlab", target, tmp_path)
    whole = found(folder, facts, "warning")
    shards = sharded(folder)
    assert not found(folder, facts, "error")
    assert found(folder, facts, "warning") == whole
    (folder / shards[0]).unlink()
    assert {shards[0], "fc.weight"} <= found(folder, facts, "error")


def test_uses_of_tokens_come_from_the_tokenizer(target: str) -> None:
    """Bytes, the template's markers, thinking tags and end tokens are in use; later rows are not (case T06)."""
    assert read_target_facts(target).token_uses is None
    tokenizer = transformers.AutoTokenizer.from_pretrained(ASSETS / "toy_tokenizer")
    tokenizer.chat_template = "<|im_start|>{{ messages }}"
    uses = token_uses(read_target_facts(target).shape, tokenizer)
    assert set(range(258)) | {258, 259} <= set(uses)
    assert not {265, 267, 271} & set(uses)


def test_without_a_tokenizer_end_tokens_are_still_known(target: str, tmp_path: Path) -> None:
    """The mask token cannot be looked up, which is a warning; the target's end token is an error all the same."""
    facts = read_target_facts(target)
    key = "dflash_config.mask_token_id"
    assert key in found(folder_of("zlab", target, tmp_path / "a"), facts, "warning")
    folder = folder_of("zlab", target, tmp_path / "b", put("dflash_config", "mask_token_id", 257))
    assert key in found(folder, facts, "error")
