"""Every auto becomes a number, and what contradicts itself is refused with the key, the value and a way out."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.cli.train import resolve_config
from paceline.config import Loss, Optim, changed_keys, parse_config
from paceline.data.dataset import INFO_FILE, Dataset, DatasetWriter, Rows
from paceline.data.prepare import PrepareSettings, prepare
from paceline.errors import ConfigError, DataError
from paceline.kernels.linear_cross_entropy import Head
from paceline.models.kinds import drafter_class
from paceline.models.loading import load_tokenizer, read_shape
from paceline.plan import memory
from paceline.plan.memory import GIB, memory_plan
from paceline.plan.resolve import ResolvedRun, choose_mask_token, resolve, resolve_device
from paceline.records import FeatureBatch
from paceline.train.step import TrainStep
from tests import tiny
from tests.toy import ASSETS, Toy


def resolve_toy(toy: Toy, *overrides: str) -> ResolvedRun:
    return resolve_config(toy.config(Path("run"), *overrides))[0]


def test_nothing_stays_auto(toy: Toy) -> None:
    """The resolved tree holds no auto but what every start measures anew, reads back equal, and agrees with the file
    that it came from."""
    wanted = toy.config(Path("run"), "pipeline.tokens_per_batch=auto", "optim.tokens_per_step=auto")
    config = resolve_config(wanted)[0].config
    assert [key for key, value in _leaves(config.model_dump(mode="json")) if value == "auto"] == [
        "kernels.attention",
        "kernels.cuda_graphs",
    ]
    assert parse_config(config.model_dump(mode="json")) == config
    assert changed_keys(config, wanted) == []
    again = resolve_config(config)[0].config
    assert again == config


def _leaves(tree: dict) -> list[tuple[str, object]]:
    return [(f"{s}.{k}", v) for s, section in tree.items() for k, v in section.items()]


def test_a_row_of_64k_tokens_sets_the_size_of_a_batch(toy: Toy, tmp_path: Path) -> None:
    """tokens_per_batch=auto is the longest row, rounded up to tiles of 128, and everything fits into such batches."""
    lengths, generator = [40, 65_600, 700, *range(300, 500)], np.random.default_rng(0)
    writer = DatasetWriter(tmp_path)
    for line, n in enumerate(lengths):
        row = (generator.integers(0, 200, n), generator.random(n) < 0.7, line + 1, line)
        writer.add(Rows.join([row]), "traces.jsonl")
    writer.close()
    counts = {name: getattr(writer, name) for name in ("num_rows", "num_tokens", "longest", "files")}
    info = Dataset.open(toy.data).info.model_copy(update=counts)
    (tmp_path / INFO_FILE).write_text(json.dumps({"dataset": info.model_dump()}), encoding="utf-8")
    shape = dataclasses.replace(read_shape(str(toy.target)), max_position_embeddings=131_072)
    overrides = ("pipeline.tokens_per_batch=auto", "data.max_length=65600", "data.validation=0", "data.epochs=1")
    resolved = resolve(
        toy.config(Path("run"), *overrides, "optim.tokens_per_step=auto"),
        shape,
        Dataset.open(tmp_path),
        load_tokenizer(str(toy.target)),
    )
    size = 513 * 128
    assert resolved.config.pipeline.tokens_per_batch == resolved.config.optim.tokens_per_step == size
    assert resolved.num_anchors == int(size * 0.1667)
    batches = [resolved.batches.batch(n) for n in range(len(resolved.batches))]
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(lengths)))
    assert len(batches) == 1 + -(-(sum(lengths) - 65_600) // size)


def test_a_step_is_defined_by_its_tokens(toy: Toy) -> None:
    """G = tokens_per_step / tokens_per_batch, whatever the number of targets; the last step takes what remains."""
    for targets in (1, 3):
        resolved = resolve_toy(toy, "optim.tokens_per_step=384", f"topology.targets={targets}")
        assert resolved.batches_per_step == 3
        assert resolved.total_steps == -(-len(resolved.batches) // 3)
        assert resolved.end_batch == len(resolved.batches)
    assert resolve_toy(toy, "run.max_steps=2").end_batch == 4


@pytest.mark.parametrize(("tokens", "near"), [(300, "256 or 384"), (100, "128"), (129, "128 or 256")])
def test_a_step_that_does_not_fit_is_refused_with_the_nearest(toy: Toy, tokens: int, near: str) -> None:
    """tokens_per_step has to be a multiple of tokens_per_batch; the message gives the values that are."""
    with pytest.raises(ConfigError, match=rf"optim\.tokens_per_step={tokens} .* nearest that fit are {near}$"):
        resolve_toy(toy, f"optim.tokens_per_step={tokens}")


def test_short_runs_take_small_steps(toy: Toy) -> None:
    """auto takes one batch a step where the recipe's size would leave fewer than 500 steps."""
    assert resolve_toy(toy, "optim.tokens_per_step=auto").batches_per_step == 1
    long = resolve_toy(toy, "optim.tokens_per_step=auto", "data.epochs=200", "pipeline.tokens_per_batch=64")
    assert long.batches_per_step == len(long.batches) // 500 > 1


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["pipeline.tokens_per_batch=16"], ConfigError, r"tokens_per_batch=16 is shorter than the longest row, \d+"),
        (["draft.block_size=120"], ConfigError, r"draft\.block_size=120 is larger than every row of .* has \d+ tokens"),
        (["topology.layout=colocated", "topology.targets=2"], ConfigError, r"topology\.targets=2 with .*colocated"),
        (["topology.gpus_per_target=5"], ConfigError, r"gpus_per_target=5: 3 layers of llama run"),
        (
            ["topology.gpus_per_target=2", "topology.targets=2"],
            ConfigError,
            r"gpus_per_target=2 with .*targets=2 .* 3 rows",
        ),
        (
            ["topology.gpus_per_target=2", "topology.executor=ray", "topology.drafters=2", "topology.layout=colocated"],
            ConfigError,
            r"gpus_per_target=2 with executor=ray and topology\.layout=colocated",
        ),
        (
            ["pipeline.transport=fp8"],
            ConfigError,
            r"transport=fp8 with topology\.executor=local: .* --allow-change pipeline\.transport",
        ),
        (
            ["pipeline.transport=fp8", "topology.executor=ray", "topology.drafters=2", "topology.layout=colocated"],
            ConfigError,
            r"transport=fp8 with topology\.layout=colocated: no features travel",
        ),
        (["draft.kind=dflash3"], ConfigError, r"draft\.kind='dflash3' is no drafter kind; there is dflash"),
        (["draft.options={rank: 3}"], ConfigError, r"draft\.options=\{'rank': 3\}"),
        (["data.max_length=20"], DataError, r"has a row of \d+ tokens, above data\.max_length=20"),
        (["draft.head_dim=7"], ConfigError, r"draft\.head_dim=7 even"),
        (["draft.num_attention_heads=3"], ConfigError, r"num_attention_heads=3 has to be a multiple of .*heads=2"),
        (["target.layer_ids=[0,5]"], ConfigError, r"target\.layer_ids=\[0, 5\]: the target has 5 layers"),
        (["run.device=cuda:99"], ConfigError, r"run\.device='cuda:99': torch .* sees \d+ GPUs here"),
        (["run.device=tpu"], ConfigError, r"run\.device='tpu'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_contradictions_are_refused(toy: Toy, overrides: list[str], error: type[Exception], message: str) -> None:
    """Each message names the key and value seen, and what was wanted."""
    with pytest.raises(error, match=message):
        resolve_toy(toy, *overrides)


def test_data_of_another_tokenizer_is_refused(toy: Toy, tmp_path: Path) -> None:
    """A data set prepared with other tokens than the target's is refused with both fingerprints."""
    other = tmp_path / "target"
    shutil.copytree(toy.target, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"][-1]["content"] = "<|other|>"
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    prepare([toy.conversations], tmp_path / "data", PrepareSettings(tokenizer=str(other), max_length=128))
    with pytest.raises(DataError, match=r"prepared with another tokenizer .*tokenizer_fingerprint"):
        resolve_toy(toy, f"data.path={tmp_path / 'data'}")


def test_data_of_another_template_is_refused_unless_asked_for(toy: Toy, tmp_path: Path) -> None:
    """Data that the target would be asked for in another way is refused; a target without a template takes any."""
    other = ASSETS / "templates" / "chatml_generation.jinja"
    settings = PrepareSettings(tokenizer=str(toy.target), template=other, max_length=128)
    prepare([toy.conversations], tmp_path / "data", settings)
    data = f"data.path={tmp_path / 'data'}"
    with pytest.raises(DataError, match=r"another chat template .*template_hash .* set data\.template=prepared"):
        resolve_toy(toy, data)
    assert resolve_toy(toy, data, "data.template=prepared").config.data.template == "prepared"
    bare = tmp_path / "target"
    shutil.copytree(toy.target, bare)
    (bare / "chat_template.jinja").unlink()
    assert resolve_toy(dataclasses.replace(toy, target=bare), data).config.data.template == "target"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (258, "258 is the padding token; token 267 is unused"),
        (257, "257 is an end-of-turn token"),
        (272, r"272 is not in 0\.\.271: the target's vocabulary has 272 rows"),
        (-1, r"-1 is not in 0\.\.271"),
        (110, "110 occurs in the training data"),
    ],
)
def test_unsafe_mask_tokens_are_refused(toy: Toy, wanted: int, message: str) -> None:
    """Case T06: padding, end of turn, out of the vocabulary or a token of the data is no mask token."""
    shape = dataclasses.replace(read_shape(str(toy.target)), pad_token_id=258)
    with pytest.raises(ConfigError, match=message):
        choose_mask_token(wanted, shape, load_tokenizer(str(toy.target)), Dataset.open(toy.data))


def test_the_first_row_past_the_tokenizer_masks(toy: Toy) -> None:
    """Case T06: auto takes 267 of the rows 267 to 271, and an explicit unused row is taken as it is."""
    arguments = (read_shape(str(toy.target)), load_tokenizer(str(toy.target)), Dataset.open(toy.data))
    assert choose_mask_token("auto", *arguments) == 267
    assert choose_mask_token(270, *arguments) == 270


def test_a_spare_special_token_masks_where_no_row_is_left(toy: Toy) -> None:
    """With a full embedding auto takes a special token that nothing else uses, or says that none is left."""
    shape = dataclasses.replace(read_shape(str(toy.target)), vocab_size=267)
    tokenizer, dataset = load_tokenizer(str(toy.target)), Dataset.open(toy.data)
    chosen = choose_mask_token("auto", shape, tokenizer, dataset)
    assert tokenizer.added_tokens_decoder[chosen].special and not dataset.contains_token(chosen)
    assert chosen not in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
    everything_used = SimpleNamespace(contains_token=lambda _token: True)
    with pytest.raises(ConfigError, match="all 267 rows of the target's embedding are in use"):
        choose_mask_token("auto", shape, tokenizer, everything_used)


def test_wide_heads_are_not_inherited(toy: Toy) -> None:
    """A target with heads of 256 gives a drafter with heads of 128, which every engine runs."""
    from paceline.plan.resolve import _head_geometry

    shape = dataclasses.replace(
        read_shape(str(toy.target)), hidden_size=5120, num_attention_heads=24, num_key_value_heads=4, head_dim=256
    )
    assert _head_geometry(toy.config(Path("run")), shape) == (40, 8, 128)


def test_the_layout_follows_the_device_and_the_roles(toy: Toy) -> None:
    """On the CPU auto is split with one thread a role; the queue holds 2 per drafter and 1 per target."""
    config = resolve_toy(toy, "topology.targets=2", "topology.threads=auto").config
    assert (config.topology.layout, config.topology.threads, config.pipeline.queue_depth) == ("split", 1, 4)
    together = resolve_toy(toy, "topology.layout=colocated", "topology.threads=auto", "run.deterministic=true").config
    assert together.topology.threads == 1


def test_beside_a_gpu_a_run_computes_on_one_core(toy: Toy) -> None:
    """Others belong to the runs of the host's other GPUs; a number that was given is kept."""
    from paceline.plan.resolve import _resolve_threads

    config = toy.config(Path("run"), "topology.threads=auto")
    assert _resolve_threads(config, "colocated", on_gpu=True) == 1
    assert _resolve_threads(config, "colocated", on_gpu=False) == torch.get_num_threads()
    assert _resolve_threads(toy.config(Path("run"), "topology.threads=3"), "colocated", on_gpu=True) == 3


def test_the_memory_plan_counts_what_is_there(toy: Toy) -> None:
    """Target and drafter bytes of the plan are those of the loaded models."""
    from paceline.models.draft import DFlashDrafter
    from paceline.models.target import Target

    resolved, shape = resolve_config(toy.config(Path("run"), "pipeline.feature_cache_gib=0.5"))
    plan = memory_plan(resolved, shape)
    drafter = DFlashDrafter(resolved.draft)
    assert plan.drafter_bytes == 16 * sum(p.numel() for p in drafter.parameters())
    target = Target.load(str(toy.target), layer_ids=resolved.draft.target_layer_ids)
    layers = sum(p.numel() for p in target._trunk.layers.parameters() if p.dim() > 1)
    assert plan.target_bytes == 4 * layers
    assert plan.cache_bytes == GIB // 2
    assert plan.total_bytes == sum(dataclasses.asdict(plan).values())


def test_scores_that_are_made_again_are_not_counted(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention never keeps more scores than its limit, however long a row is."""
    resolved, shape = resolve_config(toy.config(Path("run")))
    before = memory_plan(resolved, shape).activation_bytes
    monkeypatch.setattr(memory, "MAX_KEPT_SCORES", 100)
    rows = resolved.num_anchors * resolved.draft.block_size
    scores = rows * resolved.draft.num_attention_heads * (resolved.longest_row + resolved.draft.block_size)
    saved = resolved.draft.num_hidden_layers * (scores - 100) * 8  # float32: the softmax and its copy
    assert before - memory_plan(resolved, shape).activation_bytes == saved > 0


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_what_a_kind_keeps_beside_dflash_is_what_autograd_keeps(kind: str) -> None:
    """Of layers that are not compiled, within a tenth."""

    def kept(kind: str) -> tuple[int, int]:
        """Bytes that the backward pass of a micro-batch keeps, and what the plan adds for the kind."""
        options = {
            "dflash": {},
            "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 16},
            "dspark": tiny.OPTIONS["dspark"] | {"markov_rank": 32},
        }[kind]
        shape = tiny.draft_shape(kind=kind, options=options, hidden_size=128, vocab_size=600, block_size=8)
        drafter = drafter_class(kind)(shape)
        embed = torch.nn.Embedding(600, 128).requires_grad_(False)
        head = Head(torch.randn(600, 128, generator=torch.Generator().manual_seed(0)) / 12)
        drafter.initialise(0, embed, head)
        step = TrainStep(
            drafter, embed, head, Optim(), num_anchors=32, loss=Loss(gamma=4.0), mix=drafter.default_mix, seed=0,
            total_steps=10, dtype=torch.float32,
        )  # fmt: skip
        features = FeatureBatch(tiny.row([150, 90], supervised=0.9), torch.randn(240, 256), torch.randn(240, 128))
        given = [*drafter.parameters(), *embed.parameters(), head.weight, features.context_feature]
        others = {each.untyped_storage().data_ptr() for each in given}
        found: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in others:
                found[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other takes its place
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            step.accumulate(features)
        kept = sum(each.untyped_storage().nbytes() for each in found.values())
        return kept, memory._kind_bytes(shape, 32 * 8, 4, shape.num_hidden_layers, is_compiled=False)

    plain, nothing = kept("dflash")
    whole, planned = kept(kind)
    assert nothing == 0
    assert planned == pytest.approx(whole - plain, rel=0.1)


def test_the_plan_is_what_an_h200_was_seen_to_take(toy: Toy) -> None:
    """The work unit's plan is within 5 % of the 55.5 GiB that were measured, gradients being summed in float32."""
    from benchmarks import shapes

    target = shapes.target_shape(shapes.qwen3_8b())
    resolved, _ = resolve_config(toy.config(Path("run")))
    config = resolved.config.model_copy(
        update={
            "run": resolved.config.run.model_copy(update={"device": "cuda"}),
            "target": resolved.config.target.model_copy(update={"dtype": "bfloat16"}),
            "draft": resolved.config.draft.model_copy(update={"dtype": "bfloat16"}),
            "topology": resolved.config.topology.model_copy(update={"layout": "colocated"}),
            "pipeline": resolved.config.pipeline.model_copy(update={"tokens_per_batch": 12_288}),
        }
    )
    draft = shapes.draft_shape(target, (1, 9, 17, 25, 33))
    work_unit = dataclasses.replace(resolved, config=config, draft=draft, num_anchors=2048, batches_per_step=2)
    assert memory_plan(work_unit, target).total_bytes / GIB == pytest.approx(55.5, rel=0.05)
    alone = dataclasses.replace(work_unit, batches_per_step=1)
    assert memory_plan(work_unit, target).drafter_bytes - memory_plan(alone, target).drafter_bytes == 4 * 1_048_626_432


def test_devices() -> None:
    """auto is the CPU where there is no GPU."""
    if not torch.cuda.is_available():
        assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    ("overrides", "there_gib", "layout", "note"),
    [
        (
            ("topology.drafters=2",),
            80.0,
            "colocated",
            "every GPU has both in turn: target and drafter together need 0.0",
        ),
        (("topology.drafters=2",), 1e-4, "split", "targets run beside drafters: target and drafter together need"),
        ((), 80.0, "split", None),
        (("topology.drafters=2", "topology.targets=2"), 80.0, "split", None),
        (("topology.executor=local",), 1e-4, "colocated", None),
        (("topology.drafters=2", "topology.layout=split"), 80.0, "split", None),
    ],
)
def test_the_memory_plan_chooses_the_layout_on_ray(
    toy: Toy,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    there_gib: float,
    layout: str,
    note: str | None,
) -> None:
    """Of several drafters with one target each GPU has both where they fit; elsewhere memory decides nothing."""
    properties = SimpleNamespace(total_memory=int(there_gib * GIB))
    monkeypatch.setattr("paceline.plan.resolve.resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    resolved = resolve_toy(toy, "topology.executor=ray", *overrides)
    assert resolved.config.topology.layout == layout
    assert (resolved.layout_note or "").startswith(note or "") and (resolved.layout_note is None) == (note is None)
