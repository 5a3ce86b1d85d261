"""The DFlash2 drafter: DFlash with convolutions along the block, and a selector that walks over each slot's best few.

Both start as if they were not there: a fresh drafter drafts what a fresh DFlash drafter does. Tensor names are those of
released checkpoints. Shape letters as in `models.draft`; W taps of the convolution, Q channel groups, C candidates,
E rank of the codebooks, V vocabulary.
Source: z-lab's `dflash` 0.1.0 and vLLM 0.32, which decode it; NeMo Automodel and SpecForge, which train it. Who made
DFlash2 has not published how it was trained.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.dflash.blocks import BlockTargets
from paceline.dflash.convolution import block_conv
from paceline.dflash.selector import candidate_scores, walk_candidates
from paceline.dflash.speculative import Chance
from paceline.errors import ConfigError
from paceline.kernels.attention import Visibility
from paceline.kernels.linear_cross_entropy import Candidates, Head, best_of_rows
from paceline.models.draft import (
    PLAIN_TERMS,
    Angles,
    Attend,
    BlockLoss,
    Call,
    DFlashDrafter,
    DraftLayer,
    DraftShape,
    LossTerms,
    Proposal,
    overlap_part,
    rotate,
)
from paceline.models.options import filled_in
from paceline.records import FeatureBatch

BEFORE, AFTER = 0, 1
"""Sides of a sublayer."""


class SublayerConv(nn.Module):
    """The convolutions before and after a sublayer; the weights of both come from the sublayer's input."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        taps, groups = shape.options["conv_kernel_size"], shape.hidden_size // shape.options["conv_group_size"]
        self.base_kernel = nn.Parameter(torch.empty(2, taps, shape.hidden_size))
        self.kernel_projection = nn.Linear(shape.hidden_size, 2 * taps * groups, bias=False)
        self.initialise()

    def initialise(self) -> None:
        """Let everything pass as it is."""
        with torch.no_grad():
            self.base_kernel.zero_()[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def weights(self, y: Tensor) -> Tensor:
        """What the sublayer's input ``[A, K, D]`` adds to the weights of both sides: ``[A, K, 2, W, Q]``."""
        return self.kernel_projection(y).unflatten(-1, (2, self.base_kernel.shape[1], -1))

    def forward(self, x: Tensor, delta: Tensor, side: int) -> Tensor:
        """Convolve ``[A, K, D]`` on one side of the sublayer."""
        return block_conv(x, self.base_kernel[side], delta[:, :, side])


class ConvolvedLayer(DraftLayer):
    """A layer whose attention and MLP are each between two convolutions; the residual stream is not convolved, and
    context keys and values are those of plain DFlash."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        self.attention_conv = SublayerConv(shape)
        self.mlp_conv = SublayerConv(shape)

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
        x, query, key, value, weights = run(self.project_convolved, x, delta, angles, distinct is not None)
        attended = run(attend, query, *context_kv, key, value, seen, visibility)
        return run(self.complete_convolved, x, attended, weights, first_slot)

    def project_convolved(
        self, x: Tensor, delta: Tensor | None, angles: Angles, is_input: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """As `project`; also what the attention's input adds to its convolutions, ``[A, K, 2, W, Q]``.

        Args:
            is_input: `x` is a block's input, whose slots from 1 on are all alike. Convolved, slots are then alike from
                W on, and the projections run over the first W + 1 alone.
        """
        x = x if delta is None else (x.float() + delta.float()).to(x.dtype)
        block_size = x.shape[1]
        num_distinct = min(block_size, self.attention_conv.base_kernel.shape[1] + 1) if is_input else block_size

        def spread(rows: Tensor) -> Tensor:
            rest = block_size - num_distinct
            return torch.cat([rows, rows[:, -1:].expand(-1, rest, *rows.shape[2:])], dim=1) if rest else rows

        y = self.input_layernorm(x[:, :num_distinct])
        weights = self.attention_conv.weights(y)
        z = self.attention_conv(y, weights, BEFORE)
        attention = self.self_attn
        query, key = rotate(spread(attention.query(z)), angles), rotate(spread(attention.key(z)), angles)
        return x, query, key, spread(attention.value(z)), spread(weights)

    def complete_convolved(
        self, x: Tensor, attended: Tensor, weights: Tensor, first_slot: int = 0
    ) -> tuple[Tensor, Tensor]:
        """As `complete`; slots before `first_slot` are made all the same, as those after them read them."""
        delta = self.attention_conv(self.self_attn.o_proj(attended.flatten(-2)), weights, AFTER)
        x = (x.float() + delta.float()).to(x.dtype)
        y = self.post_attention_layernorm(x)
        weights = self.mlp_conv.weights(y)
        delta = self.mlp_conv(self.mlp(self.mlp_conv(y, weights, BEFORE)), weights, AFTER)
        return x[:, first_slot:], delta[:, first_slot:]


class CandidateSelector(nn.Module):
    """Two codebooks over the vocabulary, bare parameters as released files have them, and a projection."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        rank = shape.options["selector_rank"]
        self.predecessor_codebook = nn.Parameter(torch.empty(shape.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(shape.vocab_size, rank))
        self.hidden_projection = nn.Linear(shape.hidden_size, rank, bias=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Scores start as the logits are: one codebook is zero, and learns first."""
        with torch.no_grad():
            for parameter in (self.predecessor_codebook, self.hidden_projection.weight):
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))
            self.successor_codebook.zero_()

    def scores(self, candidates: Candidates, hidden: Tensor, previous: Tensor) -> Tensor:
        """float32 ``[..., C]`` scores of candidates after tokens ``[...]``, from hidden rows ``[..., D]``."""
        before = F.embedding(previous, self.predecessor_codebook)
        after = F.embedding(candidates.ids, self.successor_codebook)
        return candidate_scores(candidates.logits, before, self.hidden_projection(hidden), after)


class DFlash2Drafter(DFlashDrafter):
    """DFlash with convolved sublayers and a candidate selector."""

    supports_draft_vocab: ClassVar[bool] = False
    layer_class: ClassVar[type[DraftLayer]] = ConvolvedLayer
    own_modules: ClassVar[tuple[str, ...]] = ("attention_conv", "mlp_conv", "candidate_selector")
    OPTIONS: ClassVar[dict[str, int]] = {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    }

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        return filled_in("dflash2", options, cls.OPTIONS)

    @classmethod
    def check_shape(cls, shape: DraftShape) -> None:
        options = shape.options
        wrong = [f"{name}={options[name]} must be at least 1" for name in cls.OPTIONS if options[name] < 1]
        if not wrong and shape.hidden_size % options["conv_group_size"]:
            wrong.append(f"conv_group_size={options['conv_group_size']} does not divide {shape.hidden_size}")
        if options["conv_kernel_size"] > shape.block_size:
            wrong.append(f"conv_kernel_size={options['conv_kernel_size']} is above block_size={shape.block_size}")
        if options["selector_top_k"] > shape.vocab_size:
            wrong.append(f"selector_top_k={options['selector_top_k']} is above the {shape.vocab_size} tokens")
        if wrong:
            raise ConfigError(f"draft.options: {'; '.join(wrong)}")

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        self.candidate_selector = CandidateSelector(shape)
        self._num_candidates: int = shape.options["selector_top_k"]

    def initialise(self, seed: int, embed: nn.Module, head: Head) -> None:
        super().initialise(seed, embed, head)
        for layer in self.layers:
            assert isinstance(layer, ConvolvedLayer)
            layer.attention_conv.initialise()
            layer.mlp_conv.initialise()
        self.candidate_selector.initialise(torch.Generator().manual_seed(seed))

    def loss(
        self,
        hidden: Tensor,
        head: Head,
        targets: BlockTargets,
        anchors: Tensor,
        features: FeatureBatch,
        terms: LossTerms = PLAIN_TERMS,
    ) -> BlockLoss:
        """As of every kind, and cross-entropy of the candidates' scores where the label is one of them.

        The token before is the data's. A slot whose label is no candidate has no such term: when decoding it could not
        be chosen either. The weights are those of the block, D-PACE's decay left out.
        """
        rows, overlap = self.row_losses(
            hidden, head, targets, anchors, features, terms, num_candidates=self._num_candidates
        )
        assert rows.candidates is not None and targets.previous is not None
        index = targets.order[: targets.num_rows]
        candidates = Candidates(*(each[index] for each in rows.candidates))
        scores = self.candidate_selector.scores(
            candidates, hidden.flatten(0, 1)[index], targets.previous.flatten()[index]
        )
        is_label = candidates.ids == targets.labels.flatten()[index, None]
        weights = targets.weights.flatten()[index] * is_label.any(1)
        nll = -(scores.log_softmax(1) * is_label).sum(1)
        selector = torch.where(weights > 0, weights * nll, 0.0).sum()
        parts = (*overlap_part(overlap, targets), selector, weights.sum())
        best = scores.max(1, keepdim=True).values
        hits = torch.zeros_like(rows.hits).index_copy(0, index, ((scores >= best) & is_label).any(1))
        hits = hits.view(targets.labels.shape) & (targets.weights > 0)
        return BlockLoss(rows.loss + terms.selector * selector, rows.weight, hits, parts)

    def part_names(self, terms: LossTerms) -> tuple[str, ...]:
        return (*super().part_names(terms), "selector_loss", "candidate_recall")

    def best_after(self, hidden: Tensor, head: Head, previous: Tensor) -> Tensor:
        candidates = self._candidates(hidden, head)
        scores = self.candidate_selector.scores(candidates, hidden, previous)
        return candidates.ids.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]

    def propose(self, hidden: Tensor, head: Head, anchors: Tensor, chance: Chance | None = None) -> Proposal:
        """Walk over the candidates from the anchor."""
        selector = self.candidate_selector
        logits, ids = self._candidates(hidden, head)
        books = selector.predecessor_codebook, selector.successor_codebook
        taken, probs = walk_candidates(logits, ids, selector.hidden_projection(hidden), anchors, *books, chance)
        return Proposal(taken, probs=probs, prob_ids=None if probs is None else ids)

    def _candidates(self, hidden: Tensor, head: Head) -> Candidates:
        return best_of_rows(head.logits(hidden.to(head.weight.dtype)), self._num_candidates)
