"""What a run needs in memory, part by part, before any of it is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.config import RunConfig, Topology
from paceline.kernels.attention import MAX_KEPT_SCORES
from paceline.kernels.flex import why_not_flex
from paceline.kernels.linear_cross_entropy import chunk_rows

if TYPE_CHECKING:  # the models are slow to import, and a plan from sizes alone needs none
    from paceline.models.draft import DraftShape
    from paceline.models.loading import TargetShape
    from paceline.plan.outline import DraftSizes, TargetSizes
    from paceline.plan.resolve import ResolvedRun

GIB = 2**30

USABLE = 0.97
"""Of a card's memory: the rest goes to allocator slack and libraries. A guess; runs reserved up to 1.05 times what
they held at most, and planned memory is above what they held."""

COMPARED_LOGIT_BYTES = 16
"""Bytes a logit of a chunk whose distribution is compared with the target's: its product, two gradients and two float32
log-probabilities, beside the drafter's own product. A calculation; nothing was measured."""

KEPT_SIZES = {"float32": 4, "bfloat16": 2, "fp8": 1}
"""Bytes of a value, by the type that features are kept in."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part; the parts that scale with the batch are computed from shapes, allocator slack left out.

    Attributes:
        target_bytes: Trunk up to the last tap, of a target that runs elsewhere or was cached its first layer; see
            `estimate_trunk_parameters` for what it counts.
        shared_bytes: Embedding and output head, and the drafter's part of the head, where it is short or of another
            type.
        drafter_bytes: float32 weights and two moments, gradients, and what computes in another type.
        queue_bytes: Features that may wait, and those that the targets are making.
        activation_bytes: What the drafter's backward pass keeps of one micro-batch; where blocks attend per document,
            as if every document were as long as the longest.
        cache_bytes: Host memory for kept features.
    """

    target_bytes: int
    shared_bytes: int
    drafter_bytes: int
    queue_bytes: int
    activation_bytes: int
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        """All parts."""
        return sum(self.__dict__.values())


def memory_plan(resolved: ResolvedRun, shape: TargetShape, trunk_parameters: int | None = None) -> MemoryPlan:
    """Memory plan of a resolved run on one device.

    Args:
        trunk_parameters: Of the target's layers that are loaded, where they are known; None: estimated.
    """
    from paceline.models.kinds import needs_last_hidden

    return memory_of(
        resolved.config,
        resolved.draft,
        shape,
        parameters=count_parameters(resolved.draft),
        last_hidden=needs_last_hidden(resolved.config),
        num_anchors=resolved.num_anchors,
        batches_per_step=resolved.batches_per_step,
        longest_row=resolved.longest_row,
        trunk_parameters=trunk_parameters,
    )


def memory_of(
    config: RunConfig,
    draft: DraftShape | DraftSizes,
    shape: TargetShape | TargetSizes,
    *,
    parameters: int,
    last_hidden: bool,
    num_anchors: int,
    batches_per_step: int,
    longest_row: int,
    trunk_parameters: int | None = None,
) -> MemoryPlan:
    """`memory_plan` from sizes alone: no data, no weights.

    Args:
        config: With device, types, `pipeline.tokens_per_batch` and `pipeline.queue_depth` resolved.
        parameters: Of the drafter.
        last_hidden: The target delivers its last hidden state too, and runs all its layers.
    """
    target_size, draft_size = _sizes(config)
    tables = 1 if shape.tie_word_embeddings else 2
    rows = shape.vocab_size * shape.hidden_size
    head_rows = (draft.draft_vocab_size or shape.vocab_size) * shape.hidden_size
    own_head = head_rows * draft_size if draft_size != target_size or head_rows != rows else 0
    one_batch = feature_bytes(config, draft, last_hidden)
    num_layers = shape.num_layers if last_hidden else draft.target_layer_ids[-1] + 1
    runs_here = config.target.cache is None and config.target.server is None
    if not runs_here:  # with embedding and head comes one layer
        num_layers = 1
    trunk = estimate_trunk_parameters(shape, num_layers) if trunk_parameters is None else trunk_parameters
    held = int(config.pipeline.queue_depth) + config.topology.targets if config.topology.layout == "split" else 1
    return MemoryPlan(
        target_bytes=trunk * (1 if config.target.fp8 and runs_here else target_size),
        shared_bytes=rows * tables * target_size + own_head,
        drafter_bytes=parameters * _bytes_per_parameter(draft_size, batches_per_step, config.topology),
        queue_bytes=min(held * one_batch, int(config.pipeline.queue_gib * GIB) + one_batch * config.topology.targets),
        activation_bytes=_activation_bytes(config, draft, num_anchors, longest_row, draft_size, last_hidden),
        cache_bytes=int(config.pipeline.feature_cache_gib * GIB) if runs_here else 0,
    )


def batch_bytes(resolved: ResolvedRun) -> int:
    """Features of a micro-batch on their way between processes."""
    from paceline.models.kinds import needs_last_hidden

    return transport_bytes(resolved.config, resolved.draft, needs_last_hidden(resolved.config))


def transport_bytes(config: RunConfig, draft: DraftShape | DraftSizes, last_hidden: bool) -> int:
    """Features of a micro-batch on their way, from sizes alone: as `pipeline.transport` says."""
    dtype = "fp8" if config.pipeline.transport == "fp8" else feature_dtype(config, last_hidden)
    states = len(draft.target_layer_ids) + last_hidden
    return kept_bytes(int(config.pipeline.tokens_per_batch), states, draft.hidden_size, dtype)


def feature_bytes(config: RunConfig, draft: DraftShape | DraftSizes, last_hidden: bool) -> int:
    """Features of a micro-batch as the target makes them, from sizes alone."""
    states = len(draft.target_layer_ids) + last_hidden
    size = KEPT_SIZES[feature_dtype(config, last_hidden)]
    return int(config.pipeline.tokens_per_batch) * states * draft.hidden_size * size


def feature_dtype(config: RunConfig, last_hidden: bool) -> str:
    """Type in which a target delivers features, of a resolved configuration; see `models.target.Target`."""
    return str(config.target.dtype if last_hidden else config.draft.dtype)


def kept_bytes(num_tokens: int, states: int, hidden_size: int, dtype: str) -> int:
    """Features of so many tokens in an offline cache, or on their way; in a cache headers and checksums add a few bytes
    a row.

    Args:
        states: Taps, and the last hidden state if it is kept.
        dtype: Of `KEPT_SIZES`; fp8 has a float32 scale a token and state.
    """
    scale = 4 if dtype == "fp8" else 0
    return num_tokens * states * (hidden_size * KEPT_SIZES[dtype] + scale)


def _sizes(config: RunConfig) -> tuple[int, int]:
    """Bytes of a value in the target's and in the drafter's compute type."""
    target_size, draft_size = (4 if name == "float32" else 2 for name in (config.target.dtype, config.draft.dtype))
    return target_size, draft_size


def count_parameters(draft: DraftShape) -> int:
    """Parameters of a drafter of this shape, embedding and head excluded (they are the target's)."""
    from paceline.models.kinds import drafter_class

    with torch.device("meta"):
        return sum(p.numel() for p in drafter_class(draft.kind)(draft).parameters())


def estimate_trunk_parameters(shape: TargetShape | TargetSizes, num_layers: int) -> int:
    """Parameters of `num_layers` plain decoder layers of this shape: attention and a gated MLP.

    Low for mixture-of-experts and hybrid layers, whose sizes the common configuration keys do not give.
    """
    attention = shape.hidden_size * shape.head_dim * (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads)
    return num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)


def _bytes_per_parameter(draft_size: int, batches_per_step: int, topology: Topology) -> int:
    """Master and two moments; and in another type the copy with its gradient, and the float32 sum of several.

    Of several drafters each has its part of masters, moments and the gradients of all, see `train.sharded`.
    """
    if topology.drafters > 1:
        own_sums = 0 if topology.shard_gradients else 4
        return 2 * draft_size + own_sums + -(-4 * 4 // topology.drafters)
    if draft_size == 4:
        return 4 * 4
    return 3 * 4 + 2 * draft_size + (4 if batches_per_step > 1 else 0)


def _activation_bytes(
    config: RunConfig, draft: DraftShape | DraftSizes, num_anchors: int, longest_row: int, size: int, last_hidden: bool
) -> int:
    rows = num_anchors * draft.block_size
    query_width, kv_width = draft.num_attention_heads * draft.head_dim, draft.num_key_value_heads * draft.head_dim
    context = int(config.pipeline.tokens_per_batch) * 2 * kv_width
    device = torch.device(config.run.device)
    why_not = why_not_flex(num_anchors, draft.block_size, draft.head_dim, device)
    if config.kernels.attention != "per_document" and why_not is None:
        # Found on an H200: 19.4 GiB at the work unit, beside 2.2 of the loss.
        width = 4 * draft.hidden_size + 3 * draft.intermediate_size + 2 * query_width + 2 * kv_width
        vocab = draft.draft_vocab_size or draft.vocab_size
        loss = (chunk_rows(None) * vocab + 3 * rows * draft.hidden_size) * size
        loss += chunk_rows(None) * vocab * COMPARED_LOGIT_BYTES if last_hidden else 0
        layers = 1 if config.draft.recompute else draft.num_hidden_layers
        own = _kind_bytes(draft, rows, size, layers, is_compiled=True)
        # layers that are computed again keep the two streams that they take, of which the first has one
        inputs = (2 * draft.num_hidden_layers - 1) * rows * draft.hidden_size if config.draft.recompute else 0
        return (layers * rows * width + inputs + draft.num_hidden_layers * context) * size + loss + own
    # The softmax keeps its float32 output, and the product with the values a copy in the compute type; where that is
    # too much the scores are made again, a group at a time.
    scores = rows * draft.num_attention_heads * (longest_row + draft.block_size)
    attention = min(scores, MAX_KEPT_SCORES) * (4 + size)
    width = 6 * draft.hidden_size + 4 * draft.intermediate_size + 4 * query_width + 4 * kv_width
    own = _kind_bytes(draft, rows, size, draft.num_hidden_layers, is_compiled=False)
    return draft.num_hidden_layers * ((rows * width + 2 * context) * size + attention) + own


def _kind_bytes(draft: DraftShape | DraftSizes, rows: int, size: int, num_layers: int, *, is_compiled: bool) -> int:
    """What a kind's own modules keep beside DFlash's."""
    width, options = draft.hidden_size, draft.options
    if draft.kind == "dflash2":
        # eager, each of four convolutions keeps a shifted input and full-width weights for every tap; compiled, its
        # input and the weights of its groups: a guess
        taps, groups = options["conv_kernel_size"], width // options["conv_group_size"]
        layer = 4 * (width + taps * groups) if is_compiled else 8 * taps * width
        candidates = options["selector_top_k"] * (options["selector_rank"] * size + 16)
        return rows * (num_layers * layer * size + candidates)
    if draft.kind == "dspark":
        rank = options["markov_rank"]
        return draft.vocab_size * rank * (4 + size) + rows * (width + 3 * rank) * size
    return 0
