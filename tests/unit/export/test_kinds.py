"""Folders of DFlash2 and DSpark: keys and tensors that readers look for, round trips, checks, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from paceline.cli.check import run_checks
from paceline.cli.evaluate import export_drafter, load_any_drafter
from paceline.cli.initial import load_initial
from paceline.cli.train import resolve_config
from paceline.config import RunConfig
from paceline.errors import ModelError
from paceline.export.card import Provenance, model_card
from paceline.export.check import TargetFacts, check_folder, read_target_facts
from paceline.export.fingerprint import compare_drafter, make_fingerprint, settings_of
from paceline.export.speculators import export_speculators, load_speculators
from paceline.export.speculators import serving_commands as speculators_commands
from paceline.export.zlab import export_zlab, load_zlab, serving_commands
from paceline.kernels.attention import BlockLayout
from paceline.models.draft import DFlashDrafter, Proposal
from paceline.models.kinds import drafter_class
from paceline.models.target import Target
from tests import tiny
from tests.toy import Toy

NAME = "some-org/some-target"
DFLASH2, DSPARK = tiny.OPTIONS["dflash2"], tiny.OPTIONS["dspark"]
SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6}
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
LAYER = {
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
    "self_attn.v_proj.weight", "self_attn.o_proj.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
}  # fmt: skip
TRUNK = {"fc.weight", "hidden_norm.weight", "norm.weight"}
CONVOLUTIONS = {
    "attention_conv.base_kernel": [2, 2, 32],
    "attention_conv.kernel_projection.weight": [16, 32],  # side * 8 + tap * 4 + group
    "mlp_conv.base_kernel": [2, 2, 32],
    "mlp_conv.kernel_projection.weight": [16, 32],
}
OWN: dict[str, dict[str, list[int]]] = {
    "dflash2": {
        "candidate_selector.predecessor_codebook": [272, 5],  # bare: engines look for no `.weight`
        "candidate_selector.successor_codebook": [272, 5],
        "candidate_selector.hidden_projection.weight": [5, 32],
    },
    "dspark": {
        "markov_head.markov_w1.weight": [272, 5],
        "markov_head.markov_w2.weight": [272, 5],
        "confidence_head.proj.weight": [1, 37],
        "confidence_head.proj.bias": [1],
    },
}
HEADS = {
    "gated": {"markov_head.gate_proj.weight": [5, 37], "markov_head.gate_proj.bias": [5]},
    "rnn": {"markov_head.joint_proj.weight": [15, 42], "markov_head.joint_proj.bias": [15]},
}
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama") / "target"


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return tiny.target("llama", target_folder, layer_ids=(0,))


@pytest.fixture(scope="module")
def facts(target: Target, target_folder: Path) -> TargetFacts:
    """As of a target whose tokenizer uses tokens 0 to 266."""
    return dataclasses.replace(read_target_facts(str(target_folder)), token_uses=dict.fromkeys(range(267), "used"))


def drafter_of(kind: str, options: dict[str, Any] | None = None, **fields: Any) -> DFlashDrafter:
    return tiny.drafter(tiny.shape_of_kind(kind, options, **fields)).requires_grad_(False)


def blocks_of(drafter: DFlashDrafter, target: Target) -> Proposal:
    """Blocks drafted after random contexts."""
    shape, generator = drafter.shape, torch.Generator().manual_seed(1)
    lengths, anchors, hidden = (3, 9, 14), torch.randint(0, 260, (3,), generator=generator), []
    for length, anchor in zip(lengths, anchors, strict=True):
        noise_ids = torch.full((1, shape.block_size), shape.mask_token_id)
        noise_ids[0, 0] = anchor
        feature = torch.randn(length, len(shape.target_layer_ids) * shape.hidden_size, generator=generator)
        hidden.append(
            drafter(
                target.embed(noise_ids),
                torch.arange(length, length + shape.block_size)[None],
                drafter.context_kv(feature, torch.arange(length)),
                BlockLayout.of_decode(length, shape.block_size),
            )
        )
    return drafter.propose(torch.cat(hidden), drafter.own_head(target.head), anchors)


def written(
    drafter: DFlashDrafter, layout: str, target: Target, out: Path, dtype: torch.dtype = torch.bfloat16
) -> Path:
    if layout == "zlab":
        return export_zlab(drafter, out, dtype, target=target)
    return export_speculators(drafter, target, NAME, out, dtype)


def load(folder: Path) -> DFlashDrafter:
    return load_any_drafter(folder).requires_grad_(False)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def edit(folder: Path, change: Change) -> None:
    config = config_of(folder)
    change(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_the_zlab_config_has_every_key_where_engines_look(kind: str, target: Target, tmp_path: Path) -> None:
    """DFlash2: four options in `dflash_config`. DSpark: its options and the block's at the top level and in it, and the
    layout of labels at the top level alone, as vLLM refuses it in `dflash_config`."""
    block: dict[str, Any] = {"mask_token_id": 267, "target_layer_ids": [1, 3]}
    is_dspark = kind == "dspark"
    wanted = {
        "architectures": ["Qwen3DSparkModel" if is_dspark else "DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 272,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 512,
        "num_target_layers": 5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 2,
        "use_sliding_window": False,
        "sliding_window": None,
        "is_causal": False,
        "block_size": 4,
        **({"sample_from_anchor": True, **block, **DSPARK} if is_dspark else {}),
        "dflash_config": {**block, "block_size": 4, **(DSPARK if is_dspark else DFLASH2)},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }
    assert config_of(written(drafter_of(kind), "zlab", target, tmp_path / "out")) == wanted


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_the_speculators_config_has_the_options_flat(kind: str, target: Target, tmp_path: Path) -> None:
    """Kind, options, the layout of labels and the number of drafted tokens are where the package has them."""
    config = config_of(written(drafter_of(kind), "speculators", target, tmp_path / "out"))
    plain = config_of(export_speculators(tiny.drafter(), target, NAME, tmp_path / "plain"))
    is_dspark = kind == "dspark"
    own = {
        "architectures": ["DSparkDraftModel" if is_dspark else "DFlash2DraftModel"],
        "speculators_model_type": kind,
        "sample_from_anchor": is_dspark,
        **(DSPARK if is_dspark else DFLASH2),
    }
    plain["speculators_config"]["algorithm"] = kind
    plain["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 4 if is_dspark else 3
    assert config == plain | own


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize(("kind", "count"), [("dflash2", 81), ("dspark", 62)])
def test_five_layers_have_the_published_number_of_tensors(
    kind: str, count: int, layout: str, target: Target, tmp_path: Path
) -> None:
    """Names, shapes and number are those of released drafters; nothing of the target is among them."""
    drafter = drafter_of(kind, num_hidden_layers=5)
    tensors = tensors_of(written(drafter, layout, target, tmp_path / "out"))
    own = OWN[kind]
    if kind == "dflash2":
        own = own | {f"layers.{i}.{name}": shape for i in range(5) for name, shape in CONVOLUTIONS.items()}
    assert {name: list(tensors[name].shape) for name in own} == own
    assert tensors.keys() == TRUNK | {f"layers.{i}.{name}" for i in range(5) for name in LAYER} | own.keys()
    assert len(tensors) == count
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("head", HEADS)
def test_other_heads_have_a_place_in_zlab_folders_alone(head: str, target: Target, tmp_path: Path) -> None:
    """DeepSpec and SGLang build them from such a folder, and vLLM from none: it is told, and speculators is refused."""
    drafter = drafter_of("dspark", {"markov_head_type": head})
    folder = written(drafter, "zlab", target, tmp_path / "out", torch.float32)
    tensors = tensors_of(folder)
    assert {name: list(tensors[name].shape) for name in HEADS[head]} == HEADS[head]
    assert torch.equal(blocks_of(load(folder), target).ids, blocks_of(drafter, target).ids)
    commands = serving_commands(folder, drafter)
    assert commands[2] == f"vLLM: has no place for markov_head_type={head}, and refuses the folder"
    assert "--speculative-algorithm DSPARK" in commands[3]
    with pytest.raises(ModelError, match=f"markov_head_type={head} cannot be exported as speculators.*--format zlab"):
        export_speculators(drafter, target, NAME, tmp_path / "other")
    assert not (tmp_path / "other").exists()


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dflash2", {}, {}),
    ("dflash2", {"conv_kernel_size": 3, "conv_group_size": 4, "selector_top_k": 7}, {"block_size": 7}),
    ("dflash2", {}, SLIDING),
    ("dflash2", {}, SLIDING | {"is_causal": True}),
    ("dflash2", {}, MIXED),
    ("dspark", {}, {}),
    ("dspark", {"confidence_head_with_markov": False}, {"block_size": 7}),
    ("dspark", {"enable_confidence_head": False}, SLIDING),
    ("dspark", {}, SLIDING | {"is_causal": True}),
    ("dspark", {}, MIXED),
]


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize(("kind", "options", "fields"), CASES)
def test_a_folder_is_the_drafter(
    kind: str, options: dict[str, Any], fields: dict[str, Any], layout: str, target: Target, facts: TargetFacts,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Read back it is of the right class and shape, drafts the same blocks with the same confidence, is written again
    with the same bytes, and has no error to be found."""
    trained = drafter_of(kind, options, **fields)
    folder = written(trained, layout, target, tmp_path / "out", torch.float32)
    loaded = load(folder)
    assert type(loaded) is drafter_class(kind)
    assert loaded.shape == trained.shape
    found, wanted = blocks_of(loaded, target), blocks_of(trained, target)
    assert torch.equal(found.ids, wanted.ids)
    assert (found.confidence is None) == (wanted.confidence is None)
    if wanted.confidence is not None:  # the last bit may differ: tensors of a file lie elsewhere in memory
        torch.testing.assert_close(found.confidence, wanted.confidence)
    again = written(load(folder), layout, target, tmp_path / "again", torch.float32)
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    if layout == "zlab" or fields.get("is_causal") != "sliding":
        assert [finding for finding in check_folder(folder, facts) if finding.severity == "error"] == []


def test_a_mixture_that_is_causal_in_sliding_layers_alone_has_a_place_in_zlab(target: Target, tmp_path: Path) -> None:
    """As for DFlash: not written, which engines read so; the other layout has no word for it, and names the first."""
    for kind in ("dflash2", "dspark"):
        drafter = drafter_of(kind, **(MIXED | {"is_causal": "sliding"}))
        assert load(written(drafter, "zlab", target, tmp_path / kind)).shape == drafter.shape
        with pytest.raises(ModelError, match="--format zlab"):
            export_speculators(drafter, target, NAME, tmp_path / "other")


def put(key: str, value: object, section: str | None = None) -> Change:
    def change(config: dict[str, Any]) -> None:
        (config[section] if section else config)[key] = value

    return change


def drop(key: str, *sections: str | None) -> Change:
    def change(config: dict[str, Any]) -> None:
        for section in sections or (None,):
            del (config[section] if section else config)[key]

    return change


DFLASH_CONFIG = "dflash_config"
REFUSED: list[tuple[str, str, Change, str, str]] = [
    # layout, kind, change, what the reader says, key of the finding
    ("zlab", "dflash2", drop("conv_kernel_size", DFLASH_CONFIG), "no conv_kernel_size",
     "dflash_config.conv_kernel_size"),
    ("zlab", "dflash2", put("conv_group_size", 5, DFLASH_CONFIG), "conv_group_size=5 does not divide 32",
     "layers.0.mlp_conv.kernel_projection.weight"),
    ("zlab", "dflash2", put("conv_kernel_size", 5, DFLASH_CONFIG), "above block_size=4",
     "layers.0.mlp_conv.base_kernel"),
    ("zlab", "dflash2", put("selector_rank", "5", DFLASH_CONFIG), "selector_rank='5': a value of type int",
     "candidate_selector.predecessor_codebook"),
    ("zlab", "dflash2", put("selector_top_k", 300, DFLASH_CONFIG), "above the 272 tokens", "config.json"),
    ("zlab", "dflash2", put("selector_rank", 8, DFLASH_CONFIG), "other shapes",
     "candidate_selector.predecessor_codebook"),
    ("zlab", "dflash2", put("conv_kernel_size", 2), "['conv_kernel_size'], which mean another", "conv_kernel_size"),
    ("zlab", "dflash2", put("markov_rank", 5, DFLASH_CONFIG), "['markov_rank'], which mean another", "markov_rank"),
    ("zlab", "dflash2", put("sample_from_anchor", True), "sample_from_anchor=True is not supported",
     "sample_from_anchor"),
    ("zlab", "dflash2", put("architectures", ["DFlashDraftModel"]), "which mean another kind", "conv_kernel_size"),
    ("zlab", "dspark", drop("sample_from_anchor"),
     'has no sample_from_anchor: some engines.*Write "sample_from_anchor": true at the top level',
     "sample_from_anchor"),
    ("zlab", "dspark", put("sample_from_anchor", False), "sample_from_anchor=False is not supported; True",
     "sample_from_anchor"),
    ("zlab", "dspark", put("sample_from_anchor", False, DFLASH_CONFIG), "sample_from_anchor=False is not supported",
     "dflash_config.sample_from_anchor"),
    ("zlab", "dspark", drop("markov_rank", None, DFLASH_CONFIG), "no markov_rank", "markov_rank"),
    ("zlab", "dspark", put("markov_rank", 8), "markov_rank is 8 in one place and 5 in another", "markov_rank"),
    ("zlab", "dspark", put("markov_head_type", "linear", DFLASH_CONFIG), "'vanilla' in one place and 'linear'",
     "markov_head_type"),
    ("zlab", "dspark", lambda c: [each.update(markov_head_type="linear") for each in (c, c[DFLASH_CONFIG])],
     "one of vanilla, gated, rnn", "config.json"),
    ("zlab", "dspark", lambda c: [each.update(markov_rank=0) for each in (c, c[DFLASH_CONFIG])],
     "markov_rank=0 must be at least 1", "markov_head.markov_w1.weight"),
    ("zlab", "dspark", put("target_layer_ids", [1, 2]), "target_layer_ids=[1, 2] is not supported; [1, 3]",
     "target_layer_ids"),
    ("zlab", "dspark", put("mask_token_id", 266), "mask_token_id=266 is not supported", "mask_token_id"),
    ("zlab", "dspark", put("projector_type", "dspark", DFLASH_CONFIG), "['projector_type'], which mean another",
     "projector_type"),
    ("zlab", "dspark", put("final_logit_softcapping", 30.0, DFLASH_CONFIG), "['final_logit_softcapping']",
     "final_logit_softcapping"),
    ("zlab", "dspark", put("architectures", ["DSparkDraftModel"]), "['Qwen3DSparkModel'] was wanted", "architectures"),
    ("speculators", "dflash2", drop("selector_top_k"), "no selector_top_k", "selector_top_k"),
    ("speculators", "dflash2", put("sample_from_anchor", True), "sample_from_anchor=True", "sample_from_anchor"),
    ("speculators", "dflash2", put("draft_vocab_size", 100), "draft.kind=dflash2 drafts from the whole vocabulary",
     "d2t"),
    ("speculators", "dspark", drop("sample_from_anchor"), "has no sample_from_anchor", "sample_from_anchor"),
    ("speculators", "dspark", put("algorithm", "dflash", "speculators_config"), "algorithm='dflash'", "algorithm"),
    ("speculators", "dspark", put("speculators_model_type", "dflash"), "which mean another kind", "markov_rank"),
    ("speculators", "dspark", put("speculators_model_type", "eagle3"), "one of dflash, dflash2, dspark",
     "speculators_model_type"),
    ("speculators", "dspark",
     lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=5),
     "speculative_tokens=5 with block_size=4, which has the anchor in it and drafts 4",
     "proposal_methods[0].speculative_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "kind", "change", "named", "key"), REFUSED)
def test_what_is_missing_or_contradicts_is_refused_and_found(
    layout: str, kind: str, change: Change, named: str, key: str, target: Target, facts: TargetFacts, tmp_path: Path
) -> None:
    """The reader names key and value, and `check` finds it under its key, as an error."""
    folder = written(drafter_of(kind), layout, target, tmp_path / "out")
    edit(folder, change)
    with pytest.raises(ModelError) as error:
        load_any_drafter(folder)
    first, *rest = named.split(".*")
    assert first in str(error.value) and all(part in str(error.value) for part in rest)
    assert key in {finding.key for finding in check_folder(folder, facts) if finding.severity == "error"}


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_every_tensor_of_a_kind_is_wanted(
    kind: str, layout: str, target: Target, facts: TargetFacts, tmp_path: Path
) -> None:
    """One that is missing, left over or turned is named by the reader and by `check`."""
    folder = written(drafter_of(kind), layout, target, tmp_path / "out")
    whole = tensors_of(folder)
    own = dict(OWN[kind])
    if kind == "dflash2":
        own |= {f"layers.1.{name}": shape for name, shape in CONVOLUTIONS.items()}
    for name, shape in own.items():
        for changed in (None, torch.zeros([*shape, 1])):
            tensors = {key: value for key, value in whole.items() if key != name}
            if changed is not None:
                tensors[name] = changed.bfloat16()
            safetensors.torch.save_file(tensors, folder / "model.safetensors")
            with pytest.raises(ModelError, match=name):
                load_any_drafter(folder)
            assert name in {finding.key for finding in check_folder(folder, facts) if finding.severity == "error"}
    safetensors.torch.save_file(whole | {"candidate_selector.bias": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"unexpected \['candidate_selector.bias'\]"):
        load_any_drafter(folder)


def test_a_dspark_folder_is_read_from_either_place(target: Target, facts: TargetFacts, tmp_path: Path) -> None:
    """Options and layout that stand in one place alone are enough to read it; `check` names what engines would miss."""
    trained = drafter_of("dspark")
    folder = written(trained, "zlab", target, tmp_path / "out")
    edit(folder, lambda config: [config.pop(name) for name in (*DSPARK, "sample_from_anchor", "target_layer_ids")])
    edit(folder, put("sample_from_anchor", True, DFLASH_CONFIG))
    assert load_zlab(folder).shape == trained.shape
    found = {finding.key: finding for finding in check_folder(folder, facts)}
    errors = {key for key, finding in found.items() if finding.severity == "error"}
    assert errors == {*DSPARK, "sample_from_anchor", "dflash_config.sample_from_anchor"}
    assert "vLLM 0.32 does not start" in found["dflash_config.sample_from_anchor"].effect
    assert found["target_layer_ids"].severity == "warning"


def test_dspark_layers_that_slide_are_served_causal_unless_it_is_written(
    target: Target, facts: TargetFacts, tmp_path: Path
) -> None:
    """vLLM does not forward `sliding_window_non_causal` of DSpark: the layers' own key has to say it."""
    folder = written(drafter_of("dspark", **SLIDING), "speculators", target, tmp_path / "out")
    assert config_of(folder)["transformer_layer_config"]["is_causal"] is False
    edit(folder, drop("is_causal", "transformer_layer_config"))
    (error,) = (finding for finding in check_folder(folder, facts) if finding.severity == "error")
    assert error.key == "transformer_layer_config.is_causal"
    assert "serves sliding layers causal" in error.effect


@pytest.mark.parametrize("engine", [None, "vllm", "sglang", "zlab"])
def test_limits_of_engines_are_told(engine: Any, target: Target, facts: TargetFacts, tmp_path: Path) -> None:
    """Both kinds need vLLM's second runner; a head that it has no place for is an error where it is to serve, and
    z-lab's decoder has no class for DSpark."""
    for kind, options in (("dflash2", {}), ("dspark", {"markov_head_type": "rnn"})):
        folder = written(drafter_of(kind, options), "zlab", target, tmp_path / kind)
        found = {finding.key: finding.severity for finding in check_folder(folder, facts, engine)}
        no_class = "error" if kind == "dspark" else None
        kinds = {None: "warning", "vllm": "warning", "sglang": None, "zlab": no_class}
        assert found.get("architectures") == kinds[engine]
        head = {None: "warning", "vllm": "error"}.get(engine)
        assert found.get("markov_head_type") == (head if kind == "dspark" else None)


@pytest.mark.parametrize(
    ("kind", "method", "algorithm", "drafted"), [("dflash2", "dflash", "DFLASH", 3), ("dspark", "dspark", "DSPARK", 4)]
)
def test_commands_name_the_method_and_count_the_drafted_tokens(
    kind: str, method: str, algorithm: str, drafted: int, target: Target, tmp_path: Path
) -> None:
    """A DSpark block of K drafts K tokens, a DFlash2 block one less; SGLang counts one more."""
    drafter = drafter_of(kind)
    lines = serving_commands("DIR", drafter)
    wanted = {"method": method, "model": "DIR", "num_speculative_tokens": drafted}
    assert json.loads(lines[2].split("'")[1]) == wanted
    assert lines[2] == speculators_commands("DIR", drafter, "TARGET")[2]
    assert lines[3].endswith(
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path DIR "
        f"--speculative-num-draft-tokens {drafted + 1}"
    )


def test_the_card_tells_the_kind_and_its_options() -> None:
    """Title, tag, options and drafted tokens are the kind's; a threshold of verification is told with its measure."""
    evaluation = {"acceptance_length": 2.5, "mismatches": 0, "step": 4, "dtype": "float32", "verify_threshold": 0.4}
    for kind, title, number in (("dflash2", "DFlash2", 3), ("dspark", "DSpark", 4)):
        card = model_card(
            drafter_of(kind).shape, Provenance(target=NAME, evaluation=evaluation),
            layout="zlab", dtype="bfloat16", version="0.1.0", commands=[],
        )  # fmt: skip
        assert f"# {title} drafter for {NAME}" in card and f"- {kind}\n" in card
        assert f"that propose {number} tokens at a time" in card
        assert "the first with a confidence below 0.4" in card
        assert ("selector_top_k 6" if kind == "dflash2" else "markov_head_type vanilla") in card
    del evaluation["verify_threshold"]
    card = model_card(
        tiny.draft_shape(), Provenance(evaluation=evaluation), layout="zlab", dtype="bfloat16", version="0", commands=[]
    )
    assert "confidence" not in card and "| kind | dflash |" in card


@pytest.mark.parametrize(
    ("kind", "options"), [("dflash2", {}), ("dspark", {}), ("dspark", {"markov_head_type": "rnn"})]
)
def test_the_fingerprint_has_every_tensor_and_every_option(
    kind: str, options: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    """The decode path matches it; any tensor that is reversed and any other option does not."""
    drafter = drafter_of(kind, options)
    recorded = make_fingerprint(drafter, None, torch.bfloat16)
    loaded = load(written(drafter, "zlab", target, tmp_path / "out"))
    assert compare_drafter(recorded, loaded) == []
    for name, parameter in loaded.named_parameters():
        kept = parameter.clone()
        parameter.copy_(kept.flip(0) if len(kept) > 1 else -kept)
        (mismatch,) = compare_drafter(recorded, loaded)
        wanted = f"layer {name.split('.')[1]}" if name.startswith("layers.") else name
        assert mismatch.stage == {"fc.weight": "layer 0", "hidden_norm.weight": "layer 0", "norm.weight": "norm"}.get(
            name, wanted
        )
        parameter.copy_(kept)
    assert settings_of(drafter.shape)["options"] == drafter.shape.options
    loaded.shape.options["conv_kernel_size" if kind == "dflash2" else "markov_rank"] = 9
    assert [mismatch.stage for mismatch in compare_drafter(recorded, loaded)] == ["settings.options"]


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_the_file_of_code_is_of_dflash_alone(kind: str, tmp_path: Path) -> None:
    """Transformers could not draft with these kinds by it: asked for, it is refused before anything is written."""
    with pytest.raises(
        ModelError, match=f"--auto-map: the file of code computes draft.kind=dflash.*{kind}; leave it out"
    ):
        export_zlab(drafter_of(kind), tmp_path / "out", auto_map=True)
    assert not list(tmp_path.iterdir())


def test_factors_of_the_target_are_written_where_engines_apply_them(tmp_path: Path) -> None:
    """DFlash2's readers scale embedding and logits as they are told; of DSpark none does, so that it is refused."""
    gemma = tiny.target("gemma2", tmp_path / "target", layer_ids=(0,))
    folder = export_zlab(drafter_of("dflash2"), tmp_path / "out", target=gemma)
    nested = config_of(folder)[DFLASH_CONFIG]
    assert (nested["input_embedding_scale"], nested["final_logit_softcapping"]) == (
        pytest.approx(5.656854, rel=1e-2),
        30.0,
    )
    assert load_zlab(folder).shape == drafter_of("dflash2").shape
    with pytest.raises(ModelError, match="which engines do not apply for draft.kind=dspark"):
        export_zlab(drafter_of("dspark"), tmp_path / "other", target=gemma)
    facts = dataclasses.replace(read_target_facts(str(tmp_path / "target")), token_uses={})
    blind = export_zlab(drafter_of("dspark"), tmp_path / "blind")
    found = {finding.key for finding in check_folder(blind, facts) if finding.severity == "error"}
    assert "final_logit_softcapping" in found


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_the_command_writes_card_and_fingerprint(kind: str, layout: str, target_folder: Path, tmp_path: Path) -> None:
    """`export_drafter` gives a whole folder, which reads back and matches its fingerprint."""
    folder, lines = export_drafter(
        drafter_of(kind), tmp_path / "out", layout, "float32", str(target_folder), run_target=True
    )
    assert {file.name for file in folder.iterdir()} == {
        "config.json", "model.safetensors", "README.md", "fingerprint.json"
    }  # fmt: skip
    assert load_speculators(folder) if layout == "speculators" else load_zlab(folder)
    assert any("paceline check" in line for line in lines)


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_check_goes_through_every_stage(kind: str, layout: str, target_folder: Path, tmp_path: Path) -> None:
    """Fingerprint, taps, blocks by both paths and answers: nothing of a good export is wrong."""
    folder, _ = export_drafter(drafter_of(kind), tmp_path / "out", layout, "float32", str(target_folder))
    report = run_checks(folder, str(target_folder), prompts=[[5, 9, 17], [40, 7]], max_new_tokens=24)
    assert [finding for finding in report.findings if finding.severity == "error"] == []
    assert [row.name for row in report.parity if row.name.startswith(("layer", "norm"))] == [
        "layer 0",
        "layer 1",
        "norm",
    ]
    assert all(row.is_equal for row in report.parity)
    assert report.measured is not None and report.measured.num_blocks > 10


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_a_run_can_start_from_a_folder(kind: str, layout: str, toy: Toy, tmp_path: Path) -> None:
    """`draft.init` alone gives a run kind, options and shape; weights are the folder's."""
    options = {"selector_top_k": 9, "conv_group_size": 8} if kind == "dflash2" else {"markov_rank": 7}
    given = f"draft.options={json.dumps(options)}"
    resolved, _ = resolve_config(toy.config(tmp_path / "first", f"draft.kind={kind}", given))
    drafter = tiny.drafter(resolved.draft)
    folder, _ = export_drafter(drafter, tmp_path / "folder", layout, "float32", str(toy.target))
    tree = toy.config(tmp_path / "second").model_dump(exclude_unset=True)
    tree["draft"] = {"init": str(folder)}
    config = RunConfig.model_validate(tree)
    again, _ = resolve_config(config)
    assert again.draft == drafter.shape
    assert (again.config.draft.kind, again.config.draft.options) == (kind, drafter.shape.options)
    loaded = load_initial(config)
    assert loaded is not None
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in drafter.state_dict().items())
