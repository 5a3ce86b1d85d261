"""A plan from sizes alone decides what a run would, and reads targets as Transformers builds them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks import shapes
from paceline.cli.train import resolve_config
from paceline.config import load_config
from paceline.errors import ConfigError, ModelError
from paceline.models.kinds import needs_last_hidden
from paceline.models.loading import default_layer_ids, quiet_transformers
from paceline.plan import resolve
from paceline.plan.memory import count_parameters, memory_plan
from paceline.plan.outline import (
    BUILT_IN,
    TOKENS_PER_STEP,
    Documents,
    DraftSizes,
    Outline,
    TargetSizes,
    default_taps,
    outline,
    read_target,
    target_sizes,
)
from paceline.plan.splits import memory_by_role, memory_parts, of_run
from tests import tiny
from tests.toy import Toy

EXACT_FAMILIES = ("llama", "qwen3", "gemma2", "qwen3_5")


def built(config: Any) -> Any:
    """A model without weights."""
    with quiet_transformers(), torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def matrices(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.dim() > 1)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_targets_are_those_of_the_benchmarks(name: str) -> None:
    """Sizes by name are read from the configuration that Transformers makes of the published file."""
    assert target_sizes(BUILT_IN[name]) == target_sizes(shapes.CONFIGS[name]().to_dict())


@pytest.mark.parametrize("config", [*EXACT_FAMILIES, "tiny-moe", "qwen3-30b-a3b", "qwen3.6-27b"])
def test_parameters_are_the_models(config: str) -> None:
    """Every layer's matrices are counted one by one as the model has them: plain, gated, gated-delta, and experts."""
    made = tiny.target_config(config) if config in EXACT_FAMILIES else shapes.CONFIGS[config]()
    made.num_hidden_layers = min(made.num_hidden_layers, 8)
    if getattr(made, "layer_types", None):
        made.layer_types = made.layer_types[:8]
    sizes = target_sizes(made.to_dict())
    layers = built(made).get_decoder().layers
    for i, layer in enumerate(layers):
        counted = sizes.trunk_parameters(i + 1) - sizes.trunk_parameters(i)
        assert counted == matrices(layer), f"layer {i}, {sizes.layer_types[i]}"


def test_the_hybrids_body_has_the_published_size() -> None:
    """Qwen3.6-27B has 24.353 thousand million parameters in its layers (TARGETS.md, 1)."""
    sizes = target_sizes(BUILT_IN["qwen3.6-27b"])
    assert sizes.trunk_parameters(64) == pytest.approx(24.353e9, rel=2e-4)
    assert sizes.layer_types.count("full_attention") == 16


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_drafters_parameters_are_those_that_are_counted(kind: str, head: str) -> None:
    """The closed form is `count_parameters`, for every kind and its options."""
    options = {"markov_head_type": head, "enable_confidence_head": head != "rnn"} if kind == "dspark" else {}
    shape = tiny.shape_of_kind(kind, options, num_hidden_layers=3, target_layer_ids=(0, 1, 3))
    sizes = DraftSizes(**{each.name: getattr(shape, each.name) for each in dataclasses.fields(DraftSizes)})
    assert sizes.parameters == count_parameters(shape)


def test_taps_are_those_of_a_run() -> None:
    """For every depth `default_taps` is `default_layer_ids`, and a target of one layer is refused."""
    for num_layers in range(2, 130):
        assert default_taps(num_layers) == default_layer_ids(num_layers)
    with pytest.raises(ConfigError, match="no layer below"):
        default_taps(1)
    assert TOKENS_PER_STEP == resolve.TOKENS_PER_STEP


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_the_drafter_is_the_one_that_a_run_would_make(name: str, kind: str, toy: Toy, monkeypatch: Any) -> None:
    """Heads, widths, taps and options come out as `plan.resolve` decides them."""
    monkeypatch.setattr(resolve, "choose_mask_token", lambda *_: 7)
    config = load_config(None, ["target.path=t", "data.path=d", f"draft.kind={kind}", "draft.num_layers=3"])
    shape = shapes.target_shape(shapes.CONFIGS[name]())
    wanted = resolve._resolve_draft(config, shape, None, None)  # type: ignore[arg-type]  # no data is looked at
    found = outline(config, target_sizes(BUILT_IN[name]), Documents((512,))).draft
    assert {each.name: getattr(wanted, each.name) for each in dataclasses.fields(DraftSizes)} == vars(found)


def of_toy(toy: Toy, *overrides: str) -> tuple[Any, Any, Outline]:
    """A run's configuration resolved by `plan.resolve`, the target's shape, and the outline from sizes alone."""
    config = toy.config(Path("run"), "optim.tokens_per_step=auto", *overrides)
    resolved, shape = resolve_config(config)
    planned = outline(
        config,
        read_target(str(toy.target)),
        Documents(resolved.dataset.lengths),
        on_gpu=False,
        fill=resolved.batches.fill,
    )
    return resolved, shape, planned


@pytest.mark.parametrize(
    "overrides", [(), ("pipeline.tokens_per_batch=auto",), ("draft.kind=dspark",), ("topology.layout=split",)]
)
def test_an_outline_is_the_resolved_run(toy: Toy, overrides: tuple[str, ...]) -> None:
    """Micro-batch, anchors, last hidden state and memory of the plan are those of the run; a run's small data makes
    its steps smaller."""
    resolved, shape, planned = of_toy(toy, *overrides)
    run = of_run(resolved, read_target(str(toy.target)), last_hidden=needs_last_hidden(resolved.config))
    assert (planned.slots, planned.num_anchors, planned.last_hidden) == (run.slots, run.num_anchors, run.last_hidden)
    assert planned.draft == run.draft and planned.longest == run.longest
    assert planned.tokens == pytest.approx(run.tokens)
    exact = read_target(str(toy.target)).trunk_parameters(run.num_layers)
    assert vars(memory_parts(run)) == vars(memory_plan(resolved, shape, exact)) == vars(memory_plan(resolved, shape))


def test_the_parts_of_a_role_add_up_to_the_plan(toy: Toy) -> None:
    """In turn, a role's weights, optimizer, activations and slots are all that `memory_plan` counts on the device."""
    resolved, shape, _ = of_toy(toy, "topology.layout=colocated")
    run = of_run(resolved, read_target(str(toy.target)), last_hidden=False)
    plan = memory_plan(resolved, shape)
    assert sum(memory_by_role(run)["colocated"].values()) == plan.total_bytes - plan.cache_bytes


def test_mean_keys_are_those_of_a_loop() -> None:
    """A token sees half of its document on average, and never more than a window."""
    lengths = (3, 40, 100)
    for window in (None, 1, 16, 40, 99, 500):
        seen = sum(min(i + 0.5, window or math.inf) for n in lengths for i in range(n))
        wanted = seen / sum(lengths)
        assert Documents(lengths).mean_keys(window) == pytest.approx(wanted, abs=0.2)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["pipeline.tokens_per_batch=256"], "shorter than the longest document, 512 tokens"),
        (["optim.tokens_per_step=12289"], "no multiple of pipeline.tokens_per_batch=12288"),
        (["draft.vocab=observed"], "draft.vocab=N"),
        (["target.layer_ids=[1,99]"], "the target has layers 0 to 35"),
        (["draft.num_attention_heads=6", "draft.num_key_value_heads=4"], "has to be a multiple"),
        (["draft.kind=dflash9"], "is no drafter kind"),
        (["draft.kind=dflash2", "draft.options={conv_group_size: 3}"], "conv_group_size=3 does not divide 4096"),
    ],
)
def test_contradictions_are_refused(overrides: list[str], said: str) -> None:
    """What a run would refuse, a plan refuses too, naming the key."""
    config = load_config(None, ["target.path=t", "data.path=d", *overrides])
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        outline(config, target_sizes(BUILT_IN["qwen3-8b"]), Documents((512,)))


def test_a_folder_is_read_like_its_model(toy: Toy, tmp_path: Path) -> None:
    """A plain config.json is read without Transformers, and gives the same as by way of it."""
    tree = json.loads((toy.target / "config.json").read_text())
    assert read_target(str(toy.target)) == target_sizes(tree)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match="cannot be read"):
        read_target(str(tmp_path))
    with pytest.raises(ModelError, match="has no num_hidden_layers"):
        target_sizes({"model_type": "llama"})


def test_experts_and_dense_layers_are_told_apart() -> None:
    """Some families have plain layers among those of experts, and experts that every token uses."""
    tree = BUILT_IN["qwen3-30b-a3b"] | {"n_shared_experts": 2, "first_k_dense_replace": 1, "mlp_only_layers": [3]}
    sizes: TargetSizes = target_sizes(tree)
    assert sizes.dense_layers == (0, 3)
    assert sizes.experts is not None and sizes.experts.shared_width == 2 * 768
    assert sizes.mlp_parameters(0) == (3 * 2048 * 6144, 0, 0)
    assert sizes.mlp_parameters(1)[1:] == (8 * 3 * 2048 * 768, 128 * 3 * 2048 * 768)
