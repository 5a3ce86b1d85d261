"""A run's sizes from a target's configuration and the run file alone: no data, no weights, and no slow imports.

`plan.resolve` decides the same for a run that starts, with the data at hand; the rules that both need are short, and
tests hold them to each other. `paceline plan` answers in a second or two because neither Transformers nor a model is
imported for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import RunConfig
from paceline.errors import ConfigError, ModelError

TOKENS_PER_BATCH, TOKENS_PER_BATCH_CPU, TOKENS_PER_STEP = 12_288, 2_048, 98_304
"""What `auto` is where the data does not say otherwise."""
NUM_TAPS = 5
PLAIN_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families whose ``config.json`` says all that is needed; others go by way of Transformers, which knows defaults."""


@dataclass(frozen=True)
class Experts:
    """A mixture's MLP: `used` of `count` experts and a shared one."""

    count: int
    used: int
    width: int
    shared_width: int = 0


@dataclass(frozen=True)
class GatedDelta:
    """Sizes of gated-delta layers."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int

    @property
    def channels(self) -> int:
        """What the convolution runs over: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class TargetSizes:
    """What a target's work and memory follow from. The first names are those of `models.loading.TargetShape`.

    Attributes:
        layer_types: ``full_attention``, ``sliding_attention`` or ``linear_attention``, one a layer.
        has_gate: Attention has a gate as wide as its queries.
        dense_layers: Layers with a plain MLP though there are experts.
        note: What is counted as something else than it is; empty: nothing.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    has_gate: bool = False
    delta: GatedDelta | None = None
    experts: Experts | None = None
    dense_layers: tuple[int, ...] = ()
    note: str = ""

    def attention_parameters(self, layer: int) -> int:
        """Matrices that mix tokens in a layer: attention's, or a gated-delta layer's with its convolution."""
        if self.layer_types[layer] == "linear_attention" and self.delta is not None:
            delta = self.delta
            values = delta.value_heads * delta.value_dim
            wide = delta.channels + 2 * values + 2 * delta.value_heads  # q, k, v; gate and output; two of a head
            return self.hidden_size * wide + delta.channels * delta.conv
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return self.hidden_size * ((3 if self.has_gate else 2) * queries + 2 * keys)

    def mlp_parameters(self, layer: int) -> tuple[int, int, int]:
        """Matrices of a layer's MLP: those that every token uses, those of the experts of a token, all experts."""
        if self.experts is None or layer in self.dense_layers:
            return 3 * self.hidden_size * self.intermediate_size, 0, 0
        experts = self.experts
        one = 3 * self.hidden_size * experts.width
        shared = self.hidden_size * (experts.count + 3 * experts.shared_width + (1 if experts.shared_width else 0))
        return shared, experts.used * one, experts.count * one

    def trunk_parameters(self, num_layers: int) -> int:
        """Parameters of the first layers, all experts counted, vectors left out."""
        return sum(
            self.attention_parameters(i) + self.mlp_parameters(i)[0] + self.mlp_parameters(i)[2]
            for i in range(num_layers)
        )


@dataclass(frozen=True)
class DraftSizes:
    """What a drafter's work and memory follow from; names as in `models.draft.DraftShape`."""

    kind: str
    options: dict[str, Any]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    draft_vocab_size: int | None = None

    @property
    def predicted(self) -> int:
        """J: tokens that a block drafts."""
        return self.block_size - (self.kind != "dspark")

    @property
    def parameters(self) -> int:
        """What `plan.memory.count_parameters` counts."""
        d, width = self.hidden_size, self.head_dim
        queries, keys = self.num_attention_heads * width, self.num_key_value_heads * width
        layer = 2 * d * queries + 2 * d * keys + 3 * d * self.intermediate_size + 2 * d + 2 * width
        own = 0
        if self.kind == "dflash2":
            taps, rank = self.options["conv_kernel_size"], self.options["selector_rank"]
            layer += 2 * (2 * taps * d + 2 * taps * (d // self.options["conv_group_size"]) * d)
            own = 2 * self.vocab_size * rank + rank * d
        if self.kind == "dspark":
            rank = self.options["markov_rank"]
            head = {"gated": (d + rank) * rank + rank, "rnn": (2 * rank + d) * 3 * rank + 3 * rank}
            own = 2 * self.vocab_size * rank + head.get(self.options["markov_head_type"], 0)
            if self.options["enable_confidence_head"]:
                own += d + 1 + (rank if self.options["confidence_head_with_markov"] else 0)
        return len(self.target_layer_ids) * d * d + 2 * d + self.num_hidden_layers * layer + own


@dataclass(frozen=True)
class Documents:
    """Lengths of the documents that rows are packed from, in tokens; one length stands for a mean."""

    lengths: Sequence[int] | np.ndarray[Any, Any]

    def mean_keys(self, window: int | None = None) -> float:
        """Keys that a token sees on average, and a block before its anchor: causal, inside its document."""
        lengths = np.asarray(self.lengths, dtype=np.float64)
        reach = lengths if window is None else np.minimum(lengths, window)
        return float((reach * lengths - reach * reach / 2).sum() / lengths.sum())


@dataclass(frozen=True)
class Outline:
    """A micro-batch of a run, and what makes and takes it.

    Attributes:
        config: Without the `auto` values that the plan needs.
        last_hidden: The target delivers its last hidden state too, and so runs all its layers.
        tokens: Document tokens of a row; the rest of its `slots` is padding.
        num_anchors: A.
        batches_per_step: Micro-batches of an optimizer step.
        longest: Tokens of the longest document.
        predicted_frac: Share of predicting slots that reach the output head.
        token_bytes: Features of a token in `target.cache`; None: as the target would deliver them.
    """

    config: RunConfig
    target: TargetSizes
    draft: DraftSizes
    documents: Documents
    last_hidden: bool
    tokens: float
    num_anchors: int
    batches_per_step: int
    longest: int
    predicted_frac: float = 1.0
    token_bytes: int | None = None

    @property
    def is_cached(self) -> bool:
        """Whether features are read, and no target runs."""
        return self.config.target.cache is not None

    @property
    def slots(self) -> int:
        """S."""
        return int(self.config.pipeline.tokens_per_batch)

    @property
    def num_layers(self) -> int:
        """Target layers that run."""
        return self.target.num_layers if self.last_hidden else self.draft.target_layer_ids[-1] + 1

    @property
    def predictions(self) -> float:
        """Rows that reach the output head."""
        return self.num_anchors * self.draft.predicted * self.predicted_frac


def outline(
    config: RunConfig,
    target: TargetSizes,
    documents: Documents,
    *,
    on_gpu: bool = True,
    fill: float = 1.0,
    predicted_frac: float = 1.0,
    longest: int | None = None,
    token_bytes: int | None = None,
) -> Outline:
    """Decide what a run would with this run file, target and data.

    Args:
        on_gpu: Of the planned device, whatever this machine has.
        fill: Share of a row's slots that documents fill.
        longest: Tokens of the longest document; None: of those given.
        token_bytes: As in `Outline`.
    Raises: ConfigError where sizes contradict each other.
    """
    draft = draft_sizes(config, target)
    longest = int(np.max(documents.lengths)) if longest is None else longest
    wanted = config.pipeline.tokens_per_batch
    least = TOKENS_PER_BATCH if on_gpu else TOKENS_PER_BATCH_CPU
    slots = max(least, math.ceil(longest / 128) * 128) if isinstance(wanted, str) else wanted
    if slots < longest:
        raise ConfigError(f"pipeline.tokens_per_batch={slots} is shorter than the longest document, {longest} tokens")
    num_anchors = max(1, int(slots * config.anchors.per_token))
    if on_gpu:
        tile = 128 // math.gcd(draft.block_size, 128)
        num_anchors = max(tile, num_anchors // tile * tile)
    whole = config.optim.tokens_per_step
    per_step = max(1, TOKENS_PER_STEP // slots) * slots if isinstance(whole, str) else whole
    if per_step < slots or per_step % slots:
        raise ConfigError(
            f"optim.tokens_per_step={per_step} is no multiple of pipeline.tokens_per_batch={slots}: use one"
        )
    dtype = "bfloat16" if on_gpu else "float32"
    queue = config.pipeline.queue_depth
    if isinstance(queue, str):
        queue = max(2 * config.topology.drafters + config.topology.targets, config.pipeline.min_ready)
    resolved = config.model_copy(
        update={
            "run": config.run.model_copy(update={"device": "cuda" if on_gpu else "cpu"}),
            "target": config.target.model_copy(
                update={"dtype": dtype if config.target.dtype == "auto" else config.target.dtype}
            ),
            "draft": config.draft.model_copy(
                update={"dtype": dtype if config.draft.dtype == "auto" else config.draft.dtype}
            ),
            "pipeline": config.pipeline.model_copy(update={"tokens_per_batch": slots, "queue_depth": queue}),
        }
    )
    factors = (config.loss.kl, config.loss.l1)
    compares = config.draft.kind == "dspark" or any(f != "auto" and f > 0 for f in factors)  # type: ignore[operator]
    return Outline(
        config=resolved,
        target=target,
        draft=draft,
        documents=documents,
        last_hidden=compares,
        tokens=slots * fill,
        num_anchors=num_anchors,
        batches_per_step=per_step // slots,
        longest=longest,
        predicted_frac=predicted_frac,
        token_bytes=token_bytes,
    )


def with_topology(
    plan: Outline, layout: str, targets: int, drafters: int, gpus_per_target: int | None = None
) -> Outline:
    """The same run on other roles; places in the queue follow unless the run file fixes them."""
    update: dict[str, Any] = {"layout": layout, "targets": targets, "drafters": drafters}
    if gpus_per_target is not None:
        update["gpus_per_target"] = gpus_per_target
    topology = plan.config.topology.model_copy(update=update)
    depth = max(2 * drafters + targets, plan.config.pipeline.min_ready)
    pipeline = plan.config.pipeline.model_copy(update={"queue_depth": depth})
    return replace(plan, config=plan.config.model_copy(update={"topology": topology, "pipeline": pipeline}))


def draft_sizes(config: RunConfig, target: TargetSizes) -> DraftSizes:
    """The drafter that the run file asks for. Raises: ConfigError."""
    draft = config.draft
    options = dict(draft.options)
    if draft.kind != "dflash" or options:
        from paceline.models.kinds import drafter_class  # slow to import, and a plain drafter has no options

        options = drafter_class(draft.kind).check_options(options)
    heads, kv_heads, head_dim = target.num_attention_heads, target.num_key_value_heads, target.head_dim
    if head_dim > 128:
        heads = max(1, target.hidden_size // 128)
        kv_heads, head_dim = math.gcd(heads, 8), 128
    heads = heads if draft.num_attention_heads == "auto" else draft.num_attention_heads
    kv_heads = kv_heads if draft.num_key_value_heads == "auto" else draft.num_key_value_heads
    head_dim = head_dim if draft.head_dim == "auto" else draft.head_dim
    if heads % kv_heads:
        raise ConfigError(f"draft.num_attention_heads={heads} has to be a multiple of num_key_value_heads={kv_heads}")
    types = draft.layer_types
    if isinstance(types, str):
        types = (f"{types}_attention",) * draft.num_layers  # type: ignore[assignment]  # full or sliding
    ids = default_taps(target.num_layers) if isinstance(config.target.layer_ids, str) else config.target.layer_ids
    if not ids or max(ids) >= target.num_layers:
        raise ConfigError(f"target.layer_ids={list(ids)}: the target has layers 0 to {target.num_layers - 1}")
    if draft.vocab == "observed":
        raise ConfigError("draft.vocab=observed depends on the data's rows: plan with a number, draft.vocab=N")
    sizes = DraftSizes(
        kind=draft.kind,
        options=options,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size if draft.intermediate_size == "auto" else draft.intermediate_size,
        num_hidden_layers=draft.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        block_size=draft.block_size,
        target_layer_ids=tuple(ids),
        layer_types=tuple(types),
        sliding_window=draft.sliding_window if "sliding_attention" in types else None,
        draft_vocab_size=None if draft.vocab == "full" else draft.vocab,
    )
    if sizes.kind == "dflash2" and sizes.hidden_size % sizes.options["conv_group_size"]:
        raise ConfigError(
            f"draft.options.conv_group_size={sizes.options['conv_group_size']} does not divide {sizes.hidden_size}"
        )
    return sizes


def default_taps(num_layers: int) -> tuple[int, ...]:
    """What `models.loading.default_layer_ids` gives. Raises: ConfigError for a target of one layer."""
    for taps in range(NUM_TAPS, 1, -1):
        ids = [round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps)]
        if ids == sorted(set(ids)) and ids[-1] <= num_layers - 2:
            return tuple(ids)
    if num_layers < 2:
        raise ConfigError(f"a target of {num_layers} layer has no layer below its last one to tap")
    return (min(num_layers // 2, num_layers - 2),)


# ------------------------------------------------------------------ targets


def _qwen3(**sizes: Any) -> dict[str, Any]:
    common = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
    return {"model_type": "qwen3", **common, **sizes}


BUILT_IN: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": _qwen3(hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32),
    "qwen3-30b-a3b": _qwen3(
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "qwen3-235b-a22b": _qwen3(
        model_type="qwen3_moe",
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
    ),
    "llama-3.3-70b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen3.6-27b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": False,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}
"""Published sizes by name."""


def read_target(name: str, revision: str | None = None, trust_remote_code: bool = False) -> TargetSizes:
    """Sizes of a built-in target, a folder, or a hub id. Raises: ModelError."""
    if name in BUILT_IN:
        return target_sizes(BUILT_IN[name])
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        try:
            tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"target {name}: its config.json cannot be read: {error}") from error
        needed = ("num_key_value_heads", "head_dim", "tie_word_embeddings")
        is_plain = isinstance(tree, dict) and tree.get("model_type") in PLAIN_FAMILIES
        if is_plain and all(key in tree for key in needed) and not tree.get("use_sliding_window"):
            return target_sizes(tree)
    from paceline.models.loading import load_configs  # slow to import; it knows every family's defaults

    place = str(folder) if folder.exists() else name
    return target_sizes(load_configs(place, revision, trust_remote_code)[0].to_dict())


def target_sizes(tree: Mapping[str, Any]) -> TargetSizes:
    """Sizes from a configuration of Transformers as a plain tree. Raises: ModelError naming what is missing."""

    def wanted(*names: str) -> int:
        found = _first(tree, *names)
        if found is None:
            raise ModelError(f"the target's configuration ({tree.get('model_type')}) has no {names[0]}")
        return found

    num_layers, heads, width = wanted("num_hidden_layers"), wanted("num_attention_heads"), wanted("hidden_size")
    kind = str(tree.get("model_type"))
    window = tree.get("sliding_window") if tree.get("use_sliding_window", True) else None
    types = tree.get("layer_types")
    if not types:
        every = tree.get("full_attention_interval")
        if every and "linear_num_value_heads" in tree:
            types = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)]
        else:
            types = ["sliding_attention" if window else "full_attention"] * num_layers
    delta = None
    if "linear_attention" in types:
        delta = GatedDelta(
            key_heads=wanted("linear_num_key_heads"),
            value_heads=wanted("linear_num_value_heads"),
            key_dim=wanted("linear_key_head_dim"),
            value_dim=wanted("linear_value_head_dim"),
            conv=wanted("linear_conv_kernel_dim"),
        )
    experts, dense = _experts(tree, num_layers)
    return TargetSizes(
        hidden_size=width,
        intermediate_size=wanted("intermediate_size", "moe_intermediate_size"),
        num_layers=num_layers,
        vocab_size=wanted("vocab_size"),
        num_attention_heads=heads,
        num_key_value_heads=_first(tree, "num_key_value_heads") or heads,
        head_dim=_first(tree, "head_dim") or width // heads,
        tie_word_embeddings=bool(tree.get("tie_word_embeddings", False)),
        layer_types=tuple(types[:num_layers]),
        sliding_window=window,
        has_gate=kind.startswith(("qwen3_5", "qwen3_next")),
        delta=delta,
        experts=experts,
        dense_layers=dense,
        note="its latent attention is counted as plain attention" if tree.get("kv_lora_rank") else "",
    )


def _first(tree: Mapping[str, Any], *names: str) -> int | None:
    """The first of these keys that holds a number."""
    return next((int(tree[name]) for name in names if tree.get(name) is not None), None)


def _experts(tree: Mapping[str, Any], num_layers: int) -> tuple[Experts | None, tuple[int, ...]]:
    """The mixture, and the layers that have none of it."""
    count = _first(tree, "num_experts", "num_local_experts", "n_routed_experts")
    used = _first(tree, "num_experts_per_tok")
    if not count or not used:
        return None, ()
    width = _first(tree, "moe_intermediate_size", "intermediate_size")
    assert width is not None
    shared = _first(tree, "shared_expert_intermediate_size") or width * (_first(tree, "n_shared_experts") or 0)
    step = _first(tree, "decoder_sparse_step") or 1
    dense = {i for i in range(num_layers) if (i + 1) % step} | set(tree.get("mlp_only_layers") or ())
    dense |= set(range(_first(tree, "first_k_dense_replace") or 0))
    return Experts(count, used, width, shared), tuple(sorted(dense))
