"""The drafter: a few decoder layers that turn a block of masks into drafted tokens, given the target's features.

Tensor names and shapes are those of released DFlash checkpoints. Context tokens exist only as keys and values, made
from the fused feature; queries are the block's slots. A drafter class states what it needs from the target, its label
shift, its loss and how it drafts; the training step and the decode loop ask it and know no kind by name.
Shape letters: S context tokens, A blocks, K block size, J predicted tokens of a block, L taps, D hidden, N query heads,
M key/value heads, H head size.
Source: DFlash, arXiv:2602.06036, section 4 and A.3; z-lab's released model code.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, cast

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from paceline.config import default_gamma
from paceline.dflash.anchors import Anchors
from paceline.dflash.blocks import BlockTargets, block_labels, decay_weights, previous_tokens
from paceline.dflash.speculative import Chance
from paceline.errors import ConfigError, ModelError
from paceline.kernels.attention import Visibility, attend_per_document
from paceline.kernels.linear_cross_entropy import CHUNK_BYTES, DPace, Head, weighted_linear_cross_entropy
from paceline.kernels.linear_mixed_loss import Bias, Mix, MixedLosses, linear_mixed_loss
from paceline.kernels.rms_norm import rms_norm
from paceline.profiling import stages
from paceline.records import FeatureBatch, TokenBatch

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Any, Visibility], Tensor]
"""Attention of blocks: query, context key and value, block key and value, what the layout has for the layer, and what
the layer sees; `attend_per_document` is the one that says shapes."""
Call = Callable[..., Any]
"""Calls a part of the drafter with its arguments: as it is, or compiled."""
ContextKV = list[tuple[Tensor, Tensor]]
"""Rotated keys and values ``[S, M, H]`` of the context, one pair a layer."""
Angles = tuple[Tensor, Tensor]
"""Cosine and sine of rotary angles, ``[..., 1, H/2]`` each."""


def _recompute_stage() -> tuple[Any, Any]:
    """What stands around a layer in the forward pass, and where it is computed again."""
    return contextlib.nullcontext(), stages.RECOMPUTE


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a part of the drafter as it is."""
    return function(*args)


class BlockLoss(NamedTuple):
    """The loss of a micro-batch's blocks.

    Attributes:
        loss: float32 scalar, sum of weight * negative log-likelihood; differentiable.
        weight: float32 scalar, sum of the weights.
        hits: bool ``[A, J]``; slots whose best token is the label; False where a slot does not count.
        parts: float32 scalars, sums over slots of the slot's weight times what `DFlashDrafter.part_names` names.
    """

    loss: Tensor
    weight: Tensor
    hits: Tensor
    parts: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class LossTerms:
    """What the loss of a run is made of, beside the weights of the slots.

    Attributes:
        mix: Terms that every kind has.
        dpace: Weights that follow the drafter's own confidence, in place of the decay.
        selector, confidence: Factors of terms that only some kinds have.
    """

    mix: Mix = Mix()
    dpace: DPace | None = None
    selector: float = 1.0
    confidence: float = 1.0


PLAIN_TERMS = LossTerms()
"""Cross-entropy alone."""


class Proposal(NamedTuple):
    """What blocks draft.

    Attributes:
        ids: int64 ``[R, J]``, the target's ids.
        confidence: float32 ``[R, J]``, of kinds that have it: see `dflash.confidence`.
        probs: float32 ``[R, J, C]``, what each was drawn from, given those before it; None: the likeliest was taken.
        prob_ids: int64 ``[R, J, C]``, the target's ids of these; None: all of its tokens.
    """

    ids: Tensor
    confidence: Tensor | None = None
    probs: Tensor | None = None
    prob_ids: Tensor | None = None


def overlap_part(overlap: Tensor, targets: BlockTargets) -> tuple[Tensor, ...]:
    """The part ``overlap``: how much the distributions of drafter and target have in common; none if nobody asked."""
    weights = targets.weights.flatten()
    return (torch.where(weights > 0, weights * overlap, 0.0).sum(),) if len(overlap) else ()


class Layout(Protocol):
    """Where the blocks stand, and what attention has to know of it in each layer."""

    def for_layer(self, visibility: Visibility) -> Any:
        """What the attention function is given for a layer that sees this."""


@dataclass(frozen=True)
class DraftShape:
    """Everything that fixes a drafter's weights and their meaning; what a checkpoint and an export write down.

    Attributes:
        target_layer_ids: Tapped target layers, 0-based.
        num_target_layers: Layers of the whole target.
        rope: Rotary settings, theta included; the target's.
        layer_types: ``full_attention`` or ``sliding_attention``, one a layer.
        is_causal: Attention inside a block, of every layer; ``sliding``: of sliding layers, and full ones are
            bidirectional.
        draft_vocab_size: Tokens that can be drafted; None: all of the target's.
        kind, options: Drafter class, and what only this class has.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    is_causal: bool | Literal["sliding"] = False
    sliding_window: int | None = None
    draft_vocab_size: int | None = None
    kind: str = "dflash"
    options: dict[str, Any] = field(default_factory=dict)

    def visibility(self, layer: int) -> Visibility:
        """What the slots of a layer see."""
        sliding = self.layer_types[layer] == "sliding_attention"
        causal = sliding if self.is_causal == "sliding" else self.is_causal
        return Visibility(causal=causal, window=self.sliding_window if sliding else None)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # plain operations, which the compiler fuses with what stands around them
            wide = x.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            return (wide * scale * self.weight.float()).to(x.dtype)
        return rms_norm(x, self.weight, self.eps)


class Rotary:
    """Rotary positions over the whole head, NeoX half-split. Frequencies stay float32 whatever the drafter's type."""

    def __init__(self, shape: DraftShape) -> None:
        config = transformers.Qwen3Config(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_position_embeddings,
            rope_parameters=dict(shape.rope),
        )
        embedding = Qwen3RotaryEmbedding(config)
        self.inv_freq = embedding.inv_freq.float()
        self.scale = float(embedding.attention_scaling)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Cosine and sine of positions ``[...]``, ``[..., 1, H/2]``; computed in float32, given in `dtype`."""
        if self.inv_freq.device != positions.device:  # moved once, with the first positions
            self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions[..., None, None].float() * self.inv_freq  # [..., 1, H/2]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate ``[..., heads, H]`` by the angles of its positions."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DraftAttention(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        width, head_dim = shape.hidden_size, shape.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, shape.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * head_dim, width, bias=False)
        self.q_norm = RMSNorm(head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, shape.rms_norm_eps)

    def query(self, x: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., N, H]``, not yet rotated."""
        return self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))

    def key(self, x: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., M, H]``, not yet rotated; context and block share the weights."""
        return self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))

    def value(self, x: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., M, H]``."""
        return self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class DraftMLP(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = DraftAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = DraftMLP(shape)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        angles: Angles,
        context_kv: tuple[Tensor, Tensor],
        attend: Attend,
        seen: Any,
        visibility: Visibility,
        run: Call,
        distinct: Tensor | None,
        first_slot: int,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream behind the attention, and what the MLP adds to it; arguments as those of the parts.

        Args:
            seen: What the layout has for this layer.
            run: Calls each part.
        """
        x, query, key, value = run(self.project, x, delta, angles, distinct)
        attended = run(attend, query, *context_kv, key, value, seen, visibility)
        return run(self.complete, x, attended, first_slot)

    def project(
        self, x: Tensor, delta: Tensor | None, angles: Angles, distinct: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What stands before the attention: the residual stream, and the blocks' query, key and value, rotated.

        Args:
            x: ``[A, K, D]`` residual stream.
            delta: ``[A, K, D]``, what the layer before adds to it; None: nothing. The norm adds them in float32.
            distinct: ``[A + 1, D]``: the rows that `x` is made of, if it is a block's input: one row an anchor for
                slot 0, and the mask's for all others. Projections then run over these alone.
        Returns: ``[A, K, D]``, ``[A, K, N, H]`` and twice ``[A, K, M, H]``.
        """
        x = _add(x, delta)
        block_size = x.shape[1]

        def spread(rows: Tensor) -> Tensor:
            return rows if distinct is None else _spread(rows, block_size)

        y = self.input_layernorm(x if distinct is None else distinct)
        attention = self.self_attn
        query, key = rotate(spread(attention.query(y)), angles), rotate(spread(attention.key(y)), angles)
        return x, query, key, spread(attention.value(y))

    def complete(self, x: Tensor, attended: Tensor, first_slot: int = 0) -> tuple[Tensor, Tensor]:
        """What follows the attention: the residual stream behind it, and what the MLP adds to that.

        Args:
            attended: ``[A, K, N, H]``.
            first_slot: Slots before it are left out: nothing after the last attention needs them.
        """
        x = _add(x[:, first_slot:], self.self_attn.o_proj(attended[:, first_slot:].flatten(-2)))
        return x, self.mlp(self.post_attention_layernorm(x))


def _spread(rows: Tensor, block_size: int) -> Tensor:
    """Rows ``[A + 1, ...]`` of anchors and of the mask as blocks ``[A, K, ...]``."""
    anchors, mask = rows[:-1, None], rows[-1:, None]
    return torch.cat([anchors, mask.expand(len(anchors), block_size - 1, *rows.shape[1:])], dim=1)


def _add(x: Tensor, delta: Tensor | None) -> Tensor:
    """``x + delta``, rounded once. Compiled through float32, else the sum joins the product that makes `delta`, which
    then has to copy x first."""
    if delta is None:
        return x
    return (x.float() + delta.float()).to(x.dtype) if torch.compiler.is_compiling() else x + delta


class DFlashDrafter(nn.Module):
    """The DFlash drafter: slot k of a block predicts the token at anchor + k; slot 0 is the anchor.

    What a kind needs and how it learns, drafts and is measured are its class attributes and methods, so that the step,
    the records, validation and the decode loop need not know it. Another kind is a subclass that overrides some.
    """

    needs_last_hidden: ClassVar[bool] = False
    """Whether the target has to deliver its last hidden state beside the taps."""
    label_shift: ClassVar[int] = 0
    """0: slot k predicts anchor + k; 1: anchor + k + 1."""
    supports_draft_vocab: ClassVar[bool] = True
    """Whether it can draft from a part of the target's vocabulary."""
    default_mix: ClassVar[Mix] = Mix()
    """Terms of the loss where the configuration leaves them to the kind."""
    layer_class: ClassVar[type[DraftLayer]] = DraftLayer
    own_modules: ClassVar[tuple[str, ...]] = ()
    """Names of the modules that this kind adds; it starts their weights itself, so that the others start as they do
    without."""

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """`draft.options` with defaults filled in. Raises: ConfigError naming what this kind does not know."""
        if options:
            raise ConfigError(f"draft.options={options}: draft.kind=dflash has no options of its own")
        return {}

    @classmethod
    def check_shape(cls, shape: DraftShape) -> None:
        """Raises: ConfigError if options and sizes do not go together."""

    @classmethod
    def default_gamma(cls, block_size: int) -> float:
        """Decay length of the loss weights for `loss.gamma: auto`."""
        return default_gamma(block_size)

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(self.layer_class(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = Rotary(shape)
        self.d2t: Tensor | None
        """int64 ``[Vd]``; draft token i is the target's token ``i + d2t[i]``, ascending. None: all tokens."""
        self.register_buffer("d2t", None)
        if shape.draft_vocab_size is not None:
            self.d2t = torch.zeros(shape.draft_vocab_size, dtype=torch.int64)
        self._token_ids: Tensor | None = None

    def set_draft_vocab(self, token_ids: Tensor | None) -> None:
        """Fix the tokens that can be drafted: int64 ``[Vd]`` ascending, on the host, or None for all."""
        if token_ids is not None:
            assert self.d2t is not None and len(token_ids) == self.shape.draft_vocab_size
            self.d2t.copy_(token_ids - torch.arange(len(token_ids)))
            self._token_ids = token_ids

    def draft_token_ids(self) -> Tensor | None:
        """The target's ids of the tokens that can be drafted, int64 ``[Vd]`` on the host, ascending; None: all."""
        if self._token_ids is None and self.d2t is not None:  # loaded from a file
            self._token_ids = self.d2t.cpu() + torch.arange(len(self.d2t))
        return self._token_ids

    def own_head(self, head: Head) -> Head:
        """The rows of the target's head that the drafter uses; the head itself if that is all of them."""
        token_ids = self.draft_token_ids()
        return head if token_ids is None else head.rows(token_ids)

    def can_draft(self, labels: Tensor) -> Tensor:
        """Which of these tokens are among those that can be drafted; bool, on the host like `labels`."""
        token_ids = self.draft_token_ids()
        if token_ids is None:
            return torch.ones_like(labels, dtype=torch.bool)
        return token_ids[self._to_draft(labels)] == labels

    def _to_draft(self, labels: Tensor) -> Tensor:
        """Draft tokens of the target's, int64 on the host; of one that cannot be drafted, some other."""
        token_ids = self.draft_token_ids()
        if token_ids is None:
            return labels
        return torch.searchsorted(token_ids, labels).clamp(max=len(token_ids) - 1)

    def _to_target(self, drafted: Tensor) -> Tensor:
        """The target's ids of draft tokens, on the same device."""
        return drafted if self.d2t is None else drafted + self.d2t.to(drafted.device)[drafted]

    def part_names(self, terms: LossTerms) -> tuple[str, ...]:
        """What `loss` tells of beside the loss, as means over slots by their weights: for ``metrics.jsonl``."""
        return ("overlap",) if terms.mix.needs_target else ()

    @property
    def has_confidence(self) -> bool:
        """Whether its proposals say how sure it is."""
        return False

    @property
    def num_predicted(self) -> int:
        """J: tokens drafted by a block."""
        return self.shape.block_size - 1 + self.label_shift

    def initialise(self, seed: int, embed: nn.Module, head: Head) -> None:
        """Random weights, N(0, 0.02) matrices drawn on the host, so that every device starts alike, and unit norms.

        The final norm starts lower. At first a slot's hidden state is its input embedding, normed, and rows of a tied
        embedding are long and alike: with a unit norm the best logit of a mask slot stands 80 above the mean
        (SmolLM2-135M). It starts where that is ln V, so that no token outweighs all others together.

        Args:
            head: From `own_head`.
        Raises: ModelError if the mask token's embedding is zero.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not set(name.split(".")).isdisjoint(self.own_modules):
                    continue
                if parameter.dim() > 1:
                    parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))
                else:
                    parameter.fill_(1.0)
            mask = torch.tensor([self.shape.mask_token_id], device=self.norm.weight.device)
            if not embed(mask).any():
                raise ModelError(
                    f"the embedding of mask token {self.shape.mask_token_id} is all zeros, so that no slot of a block "
                    "could tell its place: name another draft.mask_token_id"
                )
            logits = head.logits(self.norm(embed(mask)).to(head.weight.dtype))
            lead = float(logits.max() - logits.mean())
            self.norm.weight.fill_(min(1.0, math.log(logits.shape[-1]) / lead))

    def context_kv(self, context_feature: Tensor, positions: Tensor) -> ContextKV:
        """Keys and values of context tokens for every layer: fused once, without the layers' input norm.

        Args:
            context_feature: ``[S, L*D]``.
            positions: int64 ``[S]`` inside the document.
        """
        return self.context_kv_at(context_feature, self.rotary.angles(positions, context_feature.dtype))

    def context_kv_at(self, context_feature: Tensor, angles: Angles) -> ContextKV:
        """`context_kv` with the angles of the positions at hand."""
        fused = self.hidden_norm(self.fc(context_feature))
        attentions = [cast(DraftLayer, layer).self_attn for layer in self.layers]
        return [(rotate(attention.key(fused), angles), attention.value(fused)) for attention in attentions]

    def forward(
        self,
        noise: Tensor,
        positions: Tensor,
        context_kv: ContextKV,
        layout: Layout,
        attend: Attend = attend_per_document,
        run: Call = call,
        recompute: bool = False,
    ) -> Tensor:
        """Hidden states of the slots that predict, after the final norm.

        Args:
            noise: ``[A, K, D]`` embedded block inputs: slots 1..K-1 of all blocks hold the same row, the mask's.
            positions: int64 ``[A, K]`` inside the document.
            run: Calls each part of a layer.
            recompute: Compute layers again in the backward pass in place of keeping what it needs.
        Returns: ``[A, J, D]``; column j predicts the (j + 1)-th token after the anchor.
        """
        x, delta = noise, None
        angles = self.rotary.angles(positions, noise.dtype)
        distinct: Tensor | None = torch.cat([noise[:, 0], noise[0, 1:2]])  # [A + 1, D]
        for i, (layer, kv) in enumerate(zip(self.layers, context_kv, strict=True)):
            visibility = self.shape.visibility(i)
            first_slot = 1 - self.label_shift if i == len(self.layers) - 1 else 0
            rest = angles, kv, attend, layout.for_layer(visibility), visibility, run, distinct, first_slot
            if recompute:
                x, delta = checkpoint(
                    layer, x, delta, *rest, use_reentrant=False, preserve_rng_state=False, context_fn=_recompute_stage
                )
            else:
                x, delta = layer(x, delta, *rest)
            distinct = None
        return run(self.finish, x, delta)

    def finish(self, x: Tensor, delta: Tensor) -> Tensor:
        """The final norm of the last layer's output."""
        return self.norm(_add(x, delta))

    def labels_and_weights(self, tokens: TokenBatch, anchors: Anchors, gamma: float) -> tuple[Tensor, Tensor]:
        """What each slot has to predict, and how much it counts; on the host.

        A token that cannot be drafted weighs nothing: there is no row of the head that could learn it.
        Returns: labels int64 ``[A, J]``, the target's ids, and weights float32 ``[A, J]``, 0 where a slot does not
            count.
        """
        labels, valid = block_labels(
            tokens.input_ids, tokens.loss_mask, tokens.document_ids, anchors, self.shape.block_size, self.label_shift
        )
        valid &= self.can_draft(labels)
        return labels, valid * decay_weights(self.num_predicted, gamma)

    def targets(self, tokens: TokenBatch, anchors: Anchors, gamma: float, dpace: bool = False) -> BlockTargets:
        """What a micro-batch has to learn, on the host.

        Args:
            dpace: The loss weighs slots itself, a block at a time: the weights only say which slots count.
        """
        labels, weights = self.labels_and_weights(tokens, anchors, gamma)
        if dpace:
            weights = (weights > 0).float()
        previous = previous_tokens(tokens.input_ids, anchors, self.num_predicted)
        return BlockTargets.of(self._to_draft(labels), weights, whole_blocks=dpace, previous=previous)

    def loss(
        self,
        hidden: Tensor,
        head: Head,
        targets: BlockTargets,
        anchors: Tensor,
        features: FeatureBatch,
        terms: LossTerms = PLAIN_TERMS,
    ) -> BlockLoss:
        """Weighted losses over slots that count: cross-entropy against the data's tokens, and what `terms` adds.

        Args:
            hidden: ``[A, J, D]`` from `forward`.
            head: From `own_head`.
            targets: From `targets`, on the device of `hidden`.
            anchors: int64 ``[A]`` row positions on the device.
            features: Of the row; with the last hidden states where a term compares with the target's distribution,
                which over a part of the vocabulary is the target's among those tokens.
        Returns: sum of weight * loss and sum of weights (float32 scalars), and hits bool ``[A, J]``; False where a slot
            does not count.
        """
        rows, overlap = self.row_losses(hidden, head, targets, anchors, features, terms)
        hits = rows.hits.view(targets.labels.shape) & (targets.weights > 0)
        return BlockLoss(rows.loss, rows.weight, hits, overlap_part(overlap, targets))

    def row_losses(
        self,
        hidden: Tensor,
        head: Head,
        targets: BlockTargets,
        anchors: Tensor,
        features: FeatureBatch,
        terms: LossTerms,
        *,
        bias: Bias | None = None,
        num_candidates: int = 0,
    ) -> MixedLosses:
        """The terms that every kind has, by slot, ``[A*J]``; the overlap is empty unless the target is asked."""
        flat = hidden.flatten(0, 1).to(head.weight.dtype)
        rest = head, targets.labels.flatten(), targets.weights.flatten(), targets.order, targets.num_rows
        if bias is None and not terms.mix.needs_target:
            found = weighted_linear_cross_entropy(flat, *rest, terms.dpace, num_candidates)
            if terms.mix.ce != 1.0:
                found = found._replace(loss=found.loss * terms.mix.ce)
            return MixedLosses(found, flat.new_empty(0))
        assert features.last_hidden is not None
        # column j predicts the token after the j-th one behind the anchor: there the target's state says which it is
        rows = anchors[:, None] + torch.arange(self.num_predicted, device=anchors.device)
        rows = rows.clamp(max=len(features.last_hidden) - 1).flatten()
        return linear_mixed_loss(
            flat, *rest, features.last_hidden, rows, terms.mix,
            bias=bias, dpace=terms.dpace, num_candidates=num_candidates,
        )  # fmt: skip

    def hits(self, hidden: Tensor, head: Head, labels: Tensor, valid: Tensor, anchor_ids: Tensor) -> Tensor:
        """Which drafted tokens would be the labels, given that those before them were; bool ``[A, J]`` on the host.

        Args:
            hidden: ``[A, J, D]`` from `forward`.
            head: From `own_head`.
            labels: int64 ``[A, J]`` on the host, the target's ids.
            valid: bool ``[A, J]`` on the host; slots that do not count are no hits.
            anchor_ids: int64 ``[A]`` on the host; tokens in slot 0.
        """
        previous = torch.cat([anchor_ids[:, None], labels[:, :-1]], dim=1)
        blocks = valid.any(1).nonzero().flatten()
        per_chunk = max(1, CHUNK_BYTES // (4 * head.weight.shape[0] * labels.shape[1]))
        hits = torch.zeros_like(valid)
        for chunk in blocks.split(per_chunk):
            best = self.best_after(hidden[chunk.to(hidden.device)], head, previous[chunk].to(hidden.device))
            hits[chunk] = (best.cpu() == labels[chunk]) & valid[chunk]
        return hits

    def best_after(self, hidden: Tensor, head: Head, previous: Tensor) -> Tensor:
        """Tokens that blocks would draft if those before each were given ones; the target's ids, int64 ``[R, J]``.

        Args:
            hidden: ``[R, J, D]``.
            head: From `own_head`.
            previous: int64 ``[R, J]``, the token right before each; unused here, as every slot is drafted
                independently of the others.
        """
        del previous
        return self._to_target(head.logits(hidden.to(head.weight.dtype)).argmax(-1))

    def propose(self, hidden: Tensor, head: Head, anchors: Tensor, chance: Chance | None = None) -> Proposal:
        """Drafted tokens of blocks; the host does not wait for the device.

        Args:
            hidden: ``[R, J, D]`` from `forward`.
            head: From `own_head`.
            anchors: int64 ``[R]``, the tokens in slot 0; unused here.
            chance: None: the likeliest are taken, greedily.
        """
        del anchors
        logits = head.logits(hidden.to(head.weight.dtype))
        if chance is None:
            return Proposal(self._to_target(logits.argmax(-1)))
        drawn, probs = zip(*(chance.draw(logits[:, j], j) for j in range(logits.shape[1])), strict=True)
        ids, all_probs = torch.stack(drawn, dim=1), torch.stack(probs, dim=1)
        if self.d2t is None:
            return Proposal(ids, probs=all_probs)
        own = self._to_target(torch.arange(all_probs.shape[-1], device=ids.device))
        return Proposal(self._to_target(ids), probs=all_probs, prob_ids=own.expand_as(all_probs))
