"""The speculators folder: keys and tensors, a part of the vocabulary, round trips, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from paceline.errors import ModelError
from paceline.eval.decode import CachedTarget, speculative_decode
from paceline.export.speculators import export_speculators, is_speculators, load_speculators, serving_commands
from paceline.export.zlab import export_zlab, is_zlab, load_zlab
from paceline.kernels.attention import BlockLayout
from paceline.models.draft import DFlashDrafter
from paceline.models.target import Target
from tests import tiny

KEPT = torch.tensor([0, 3, 4, 9, 100, 101, 257, 271])
NAME = "some-org/some-target"
LAYER_TENSORS = {
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
}  # fmt: skip
BODY = {f"layers.{i}.{name}.weight" for i in range(2) for name in LAYER_TENSORS}
BODY |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6}
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama") / "target"


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    """The start of the target: of its weights only embedding and head are used."""
    return tiny.target("llama", target_folder, layer_ids=(0,))


def drafter_of(kept: Tensor | None = KEPT, **changes: Any) -> DFlashDrafter:
    shape = tiny.draft_shape(draft_vocab_size=None if kept is None else len(kept), **changes)
    drafter = tiny.drafter(shape).requires_grad_(False)
    drafter.set_draft_vocab(kept)
    return drafter


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = config_of(folder)
    change(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = tensors_of(folder)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def drafts(drafter: DFlashDrafter, target: Target) -> list[list[int]]:
    """Blocks drafted after random contexts."""
    generator, head, found = torch.Generator().manual_seed(1), drafter.own_head(target.head), []
    for num_context in (3, 9, 14):
        noise_ids = torch.full((1, 4), drafter.shape.mask_token_id)
        noise_ids[0, 0] = 7
        feature = torch.randn(num_context, 64, generator=generator)
        hidden = drafter(
            target.embed(noise_ids),
            torch.arange(num_context, num_context + 4)[None],
            drafter.context_kv(feature, torch.arange(num_context)),
            BlockLayout.of_decode(num_context, 4),
        )
        found.append(drafter.propose(hidden, head, torch.tensor([7])).ids[0].tolist())
    return found


@pytest.fixture
def exported(target: Target, tmp_path: Path) -> Path:
    return export_speculators(drafter_of(), target, NAME, tmp_path / "out")


def test_the_config_is_complete(exported: Path) -> None:
    """The file has every key of the layout, layers counted one higher, and nothing that would hide it from vLLM."""
    assert config_of(exported) == {
        "architectures": ["DFlashDraftModel"],
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "speculators_version": "0.9.0",
        "speculators_model_type": "dflash",
        "sample_from_anchor": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": NAME, "architectures": ["LlamaForCausalLM"]},
        },
        "block_size": 4,
        "mask_token_id": 267,
        "draft_vocab_size": 8,
        "target_hidden_size": 32,
        "num_target_layers": 5,
        "aux_hidden_state_layer_ids": [2, 4],
        "sliding_window_non_causal": True,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 272,
            "rms_norm_eps": 1e-06,
            "max_position_embeddings": 512,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "full_attention"],
            "use_sliding_window": False,
            "sliding_window": None,
            "is_causal": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def test_a_reduced_vocabulary_brings_its_map_and_its_rows(exported: Path, target: Target) -> None:
    """`i + d2t[i]` are the ids in order, `t2d` marks the same ones, and the head's rows are the target's of these."""
    tensors = tensors_of(exported)
    assert set(tensors) == BODY | {"d2t", "t2d", "lm_head.weight"}
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["d2t"].tolist() == [0, 2, 2, 6, 96, 96, 251, 264]
    assert torch.equal(tensors["t2d"].nonzero().flatten(), KEPT)
    assert (tensors["t2d"].shape, int(tensors["t2d"].sum())) == ((272,), 8)
    assert torch.equal(tensors["lm_head.weight"], target.head.weight[KEPT].bfloat16())
    assert {tensors[name].dtype for name in BODY} == {torch.bfloat16}


@pytest.mark.parametrize("kept", [None, torch.arange(tiny.VOCAB)], ids=["full", "all of them"])
def test_a_full_vocabulary_brings_nothing_of_the_target(kept: Tensor | None, target: Target, tmp_path: Path) -> None:
    """Without left-out tokens there is no map and no copy; a map of every token is the same."""
    folder = export_speculators(drafter_of(kept), target, NAME, tmp_path / "out")
    assert set(tensors_of(folder)) == BODY
    assert config_of(folder)["draft_vocab_size"] == 272
    loaded = load_speculators(folder)
    assert loaded.shape.draft_vocab_size is None
    assert drafts(loaded.float(), target) == drafts(drafter_of(kept).bfloat16().float(), target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kept", [None, KEPT], ids=["full", "reduced"])
@pytest.mark.parametrize(
    "changes",
    [{}, SLIDING, SLIDING | {"is_causal": True}, MIXED],
    ids=["full attention", "sliding", "causal", "mixed"],
)
def test_the_reloaded_drafter_is_the_same(
    changes: dict[str, Any], kept: Tensor | None, dtype: torch.dtype, target: Target, tmp_path: Path
) -> None:
    """Shape, weights, tokens and drafts are those of the trained drafter after the same cast."""
    cast = drafter_of(kept, **changes).to(dtype)
    loaded = load_speculators(
        export_speculators(drafter_of(kept, **changes), target, NAME, tmp_path / "out", dtype)
    ).requires_grad_(False)
    assert loaded.shape == cast.shape
    assert cast.state_dict().keys() == loaded.state_dict().keys()
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in cast.state_dict().items())
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    ids = loaded.draft_token_ids()
    assert (ids is None) if kept is None else (ids is not None and ids.tolist() == kept.tolist())
    found = drafts(loaded.float(), target)
    assert found == drafts(cast.float(), target)
    assert kept is None or {token for block in found for token in block} <= set(kept.tolist())


def test_decoding_goes_the_same_way(
    target: Target, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode loop drafts the same blocks and takes the same rounds before the export and after it."""
    propose, drafted = DFlashDrafter.propose, []

    def recorded(*args: Any) -> Any:
        proposal = propose(*args)
        drafted.append(proposal.ids[0].tolist())
        return proposal

    monkeypatch.setattr(DFlashDrafter, "propose", recorded)
    trained = drafter_of(torch.arange(0, 272, 2))
    loaded = load_speculators(export_speculators(trained, target, NAME, tmp_path / "out", torch.float32))
    cached = CachedTarget.load(str(target_folder), trained.shape.target_layer_ids)
    before, after = (speculative_decode(cached, side, [5, 9, 17, 40], 24, stop_ids=()) for side in (trained, loaded))
    rounds = len(before.num_accepted_tokens)
    assert before.tokens == after.tokens
    assert before.num_accepted_tokens == after.num_accepted_tokens
    assert drafted[:rounds] == drafted[rounds:]
    assert all(token % 2 == 0 for block in drafted for token in block)


@pytest.mark.parametrize("kept", [None, KEPT], ids=["full", "reduced"])
def test_export_of_an_import_is_the_same_folder(kept: Tensor | None, target: Target, tmp_path: Path) -> None:
    """Exporting what was loaded gives the same bytes."""
    first = export_speculators(drafter_of(kept), target, NAME, tmp_path / "first")
    again = export_speculators(load_speculators(first), target, NAME, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (first / name).read_bytes()


def test_the_layers_are_a_qwen3_configuration(target: Target, tmp_path: Path) -> None:
    """Transformers makes of the nested part what the drafter is, frequencies included."""
    rope = {"rope_type": "yarn", "rope_theta": 5e6, "factor": 4.0, "original_max_position_embeddings": 128}
    trained = drafter_of(rope=rope, **SLIDING)
    folder = export_speculators(trained, target, NAME, tmp_path / "out")
    config = transformers.Qwen3Config(**config_of(folder)["transformer_layer_config"])
    assert config.rope_parameters == rope
    assert (config.sliding_window, config.layer_types) == (6, ["sliding_attention"] * 2)
    assert torch.equal(load_speculators(folder).rotary.inv_freq, trained.rotary.inv_freq)


@pytest.mark.parametrize(
    ("changes", "non_causal"),
    [({}, True), (SLIDING, True), (MIXED, True), (SLIDING | {"is_causal": True}, False)],
    ids=["full attention", "sliding", "mixed", "causal"],
)
def test_causality_is_written_for_both_readers(
    changes: dict[str, Any], non_causal: bool, target: Target, tmp_path: Path
) -> None:
    """The flag, to vLLM about all layers and to the package about sliding ones, and vLLM's own key say one thing."""
    config = config_of(export_speculators(drafter_of(**changes), target, NAME, tmp_path / "out"))
    assert config["sliding_window_non_causal"] is non_causal
    assert config["transformer_layer_config"]["is_causal"] is not non_causal


def test_a_folder_as_target_is_written_whole(target: Target, target_folder: Path, tmp_path: Path) -> None:
    """Readers look the target up from wherever they run; a hub id stays as it is."""
    name = f"{target_folder.parent}/../{target_folder.parent.name}/{target_folder.name}"
    folder = export_speculators(drafter_of(), target, name, tmp_path / "out")
    assert config_of(folder)["speculators_config"]["verifier"]["name_or_path"] == str(target_folder)
    line = serving_commands(folder, load_speculators(folder), NAME)[2]
    assert line.startswith(f"vLLM: vllm serve {NAME} --speculative-config '{{")
    assert json.loads(line.split("'")[1]) == {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kind": "other"}, "draft.kind='other' is no drafter kind"),
        ({"is_causal": True}, "draft.is_causal=true with full-attention layers"),
        (MIXED | {"is_causal": True}, "draft.is_causal=true with full-attention layers"),
        (MIXED | {"is_causal": "sliding"}, "causal sliding layers beside bidirectional full ones .*--format zlab"),
        ({"target_layer_ids": (1, 4)}, "layer 4 is the last one"),
        ({"target_layer_ids": (3, 1)}, "ascending order"),
        ({"rope": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}, "'mrope_section'"),
        ({"rope": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "'partial_rotary_factor"),
        ({"num_target_layers": 7}, "another target than some-org/some-target: num_target_layers 7 against 5"),
        ({"vocab_size": 300}, "vocab_size 300 against 272"),
    ],
)
def test_what_the_layout_cannot_say_is_refused(
    changes: dict[str, Any], named: str, target: Target, tmp_path: Path
) -> None:
    """What has no place, or would be read as something else, is an error before anything is written."""
    trained = drafter_of()
    trained.shape = replace(trained.shape, **changes)
    with pytest.raises(ModelError, match=named):
        export_speculators(trained, target, NAME, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gemma2", {}, r"a soft cap of its logits \(30.0\)"),
        ("gemma3", {}, "a factor of its embedding"),
        ("llama", {"logit_scale": 0.25}, r"a factor of its logits \(0.25\)"),
    ],
)
def test_targets_that_share_more_than_matrices_are_refused(
    family: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """A soft cap and factors have no place in the layout."""
    path = tiny.save(tiny.causal_lm(family, **changes), tmp_path / "target")
    with pytest.raises(ModelError, match=f"{named}, which the speculators layout has no place for"):
        export_speculators(drafter_of(), Target.load(path, layer_ids=(0,)), path, tmp_path / "out")
    assert [place.name for place in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_tied_and_hybrid_targets_are_fine(family: str, tmp_path: Path) -> None:
    """A tied head gives its rows like any other, and the kind of the target's layers does not matter."""
    loaded = tiny.target(family, tmp_path / "target", layer_ids=(0,))
    trained = drafter_of(num_target_layers=loaded.shape.num_layers)
    folder = export_speculators(trained, loaded, NAME, tmp_path / "out", torch.float32)
    assert torch.equal(tensors_of(folder)["lm_head.weight"], loaded.head.weight[KEPT])


def test_older_folders_carry_copies(exported: Path, target: Target) -> None:
    """An embedding, and a head over the whole vocabulary, are accepted and left to the target."""
    edit_tensors(exported, lambda t: t.update({"embed_tokens.weight": target.embed.weight.detach().clone()}))
    assert load_speculators(exported).state_dict().keys() == drafter_of().state_dict().keys()

    export_speculators(drafter_of(None), target, NAME, exported)
    edit_tensors(exported, lambda t: t.update({"lm_head.weight": target.head.weight.clone()}))
    assert load_speculators(exported).shape == drafter_of(None).shape


def test_the_targets_depth_is_looked_up(exported: Path, target_folder: Path) -> None:
    """A folder of another writer has no num_target_layers: its target's configuration has."""

    def of(name: str) -> Callable[[dict[str, Any]], object]:
        return lambda c: [c.pop("num_target_layers", 0), c["speculators_config"]["verifier"].update(name_or_path=name)]

    edit(exported, of(str(target_folder)))
    assert load_speculators(exported).shape == drafter_of().shape
    edit(exported, of(str(exported.parent)))
    with pytest.raises(ModelError, match=r"has no num_target_layers, and target .* has no config.json"):
        load_speculators(exported)


@pytest.mark.parametrize(
    ("layer", "causal"),
    [
        ({}, False),
        ({"layer_types": None}, False),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}, True),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}, "sliding"),
    ],
)
def test_causality_of_others_is_that_of_the_package(layer: dict[str, Any], causal: bool | str, exported: Path) -> None:
    """The flag is about sliding layers alone: full ones are bidirectional whatever it says."""
    edit(
        exported,
        lambda c: [c["transformer_layer_config"].pop("is_causal"), c["transformer_layer_config"].update(layer)],
    )
    edit(exported, lambda c: c.update(sliding_window_non_causal=False))
    assert load_speculators(exported).shape.is_causal == causal


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.pop("speculators_config"), "no `speculators_config`"),
        (lambda c: c.update(speculators_model_type="eagle3"), "speculators_model_type='eagle3'"),
        (lambda c: c["speculators_config"].update(algorithm="eagle3"), "algorithm='eagle3'"),
        (lambda c: c.update(markov_rank=256), r"\['markov_rank'\], which mean another kind"),
        (lambda c: c.update(sample_from_anchor=True), "sample_from_anchor=True"),
        (lambda c: c.update(target_hidden_size=64), "target_hidden_size=64"),
        (lambda c: c.update(mask_token_id=None), "no mask_token_id"),
        (lambda c: c.pop("draft_vocab_size"), "no draft_vocab_size"),
        (lambda c: c.update(draft_vocab_size=300), "draft_vocab_size=300 of a vocabulary of 272"),
        (lambda c: c.update(draft_vocab_size=9), r"d2t \[8\] for \[9\]"),
        (lambda c: c.update(block_size=3), "speculative_tokens=3 with block_size=3"),
        (lambda c: c.update(aux_hidden_state_layer_ids=[2, 5]), "count one higher: .* layer 4 is the last one"),
        (lambda c: c.update(aux_hidden_state_layer_ids=[0, 4]), r"\[-1, 3\]"),
        (lambda c: c.update(sliding_window_non_causal=None), "no sliding_window_non_causal"),
        (lambda c: c.update(sliding_window_non_causal=False), "is_causal=False is not supported; True"),
        (lambda c: c["transformer_layer_config"].pop("rope_parameters"), "no rope_theta"),
        (lambda c: c["transformer_layer_config"].pop("sliding_window"), "no sliding_window"),
        (lambda c: c["transformer_layer_config"].pop("layer_types"), "no layer_types"),
        (lambda c: c["transformer_layer_config"].update(model_type="laguna"), "model_type='laguna'"),
        (lambda c: c["transformer_layer_config"].update(is_neox_style=False), "is_neox_style=False"),
        (
            lambda c: [
                c["transformer_layer_config"].update(layer_types=["sliding_attention", "full_attention"]),
                c.update(sliding_window_non_causal=False),
            ],
            "causal sliding layers beside bidirectional full ones",
        ),
    ],
)
def test_another_kind_of_drafter_is_refused(
    change: Callable[[dict[str, Any]], object], named: str, target: Target, tmp_path: Path
) -> None:
    """What this drafter is not, what contradicts itself, and what readers take differently is an error by name."""
    folder = export_speculators(drafter_of(**SLIDING), target, NAME, tmp_path / "out")
    edit(folder, change)
    with pytest.raises(ModelError, match=named):
        load_speculators(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("norm.weight"), r"missing \['norm.weight'\]"),
        (lambda t: t.pop("lm_head.weight"), r"missing \['lm_head.weight'\]"),
        (lambda t: [t.pop("d2t"), t.pop("t2d")], r"missing \['d2t', 't2d'\]"),
        (lambda t: t.update({"verifier_norm.weight": torch.ones(32)}), r"unexpected \['verifier_norm.weight'\]"),
        (lambda t: t.update({"lm_head.weight": torch.ones(9, 32)}), r"lm_head.weight \[9, 32\] for \[8, 32\]"),
        (lambda t: t.update(t2d=t["t2d"].long()), "t2d torch.int64; .* torch.bool were wanted"),
        (lambda t: t["t2d"].index_fill_(0, torch.tensor([5]), True), "t2d marks 9 tokens, d2t has 8"),
        (lambda t: t.update(t2d=t["t2d"].roll(1)), "t2d marks other tokens than d2t leads to"),
        (lambda t: t.update(d2t=KEPT.clone()), r"i \+ d2t\[i\] are no ascending tokens of a vocabulary of 272"),
        (lambda t: t.update(d2t=t["d2t"].flip(0)), "no ascending tokens"),
        (lambda t: t["d2t"].index_fill_(0, torch.tensor([0]), -1), "no ascending tokens"),
    ],
)
def test_tensors_that_do_not_match_are_named(
    change: Callable[[dict[str, Tensor]], object], named: str, exported: Path
) -> None:
    """Missing and misshapen tensors, and maps that contradict each other, are errors that name them."""
    edit_tensors(exported, change)
    with pytest.raises(ModelError, match=named):
        load_speculators(exported)


def test_a_full_vocabulary_has_no_map(exported: Path) -> None:
    """A map beside the size of the whole vocabulary is a contradiction."""
    edit(exported, lambda c: c.update(draft_vocab_size=272))
    with pytest.raises(ModelError, match=r"unexpected \['d2t', 't2d'\], other shapes \['lm_head.weight"):
        load_speculators(exported)


def test_weights_that_are_not_finite_are_never_exported(target: Target, tmp_path: Path) -> None:
    """What is written is compared with what was meant, and a NaN is not equal to itself."""
    trained = drafter_of()
    trained.norm.weight[3] = float("nan")
    with pytest.raises(ModelError, match=r"\['norm.weight'\]; is a weight not finite"):
        export_speculators(trained, target, NAME, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_layouts_replace_and_know_each_other(exported: Path, target: Target) -> None:
    """A folder is of one layout, an export of either takes an earlier one's place, and other files are left alone."""
    assert (is_speculators(exported), is_zlab(exported)) == (True, False)
    with pytest.raises(ModelError, match="a drafter in the z-lab layout was wanted"):
        load_zlab(exported)
    export_zlab(drafter_of(None), exported)
    assert (is_speculators(exported), is_zlab(exported)) == (False, True)
    export_speculators(drafter_of(), target, NAME, exported)
    assert load_speculators(exported).shape == drafter_of().shape
    (exported / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ModelError, match="other files"):
        export_speculators(drafter_of(), target, NAME, exported)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.update(mask_token_id=272), "mask_token_id=272 is not in 0..271"),
        (lambda c: c.update(mask_token_id="<|mask|>"), "mask_token_id='<|mask|>'"),
        (lambda c: c.update(block_size=1, speculators_config={"algorithm": "dflash"}), "block_size=1; 2 or more"),
        (lambda c: c.update(draft_vocab_size="8"), "draft_vocab_size='8'"),
        (lambda c: c.update(aux_hidden_state_layer_ids=[0, 2]), "aux_hidden_state_layer_ids, which count one higher"),
        (lambda c: c.update(aux_hidden_state_layer_ids=["2"]), "a list of layers"),
        (lambda c: c["transformer_layer_config"].update(layer_types=["full_attention"] * 3), "3 entries"),
        (lambda c: c["transformer_layer_config"].update(layer_types=["full_attention", "odd"]), "odd"),
        (lambda c: c["transformer_layer_config"].update(num_key_value_heads=3), "multiple of num_key_value_heads=3"),
        (lambda c: c["transformer_layer_config"].update(hidden_size=None), "no hidden_size"),
    ],
)
def test_contradictions_are_named(change: Callable[[dict[str, Any]], object], named: str, exported: Path) -> None:
    """What cannot be, or is of another type, is an error that names key and value (cases P02 and T06)."""
    edit(exported, change)
    with pytest.raises(ModelError) as error:
        load_speculators(exported)
    assert named in str(error.value)


def test_texts_are_part_of_the_folder(target: Target, tmp_path: Path) -> None:
    """The card is written with the folder and goes when it is replaced."""
    folder = export_speculators(drafter_of(), target, NAME, tmp_path / "out", texts={"README.md": "a card\n"})
    assert (folder / "README.md").read_text(encoding="utf-8") == "a card\n"
    export_speculators(drafter_of(), target, NAME, folder)
    assert not (folder / "README.md").exists()
