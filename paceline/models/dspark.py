"""The DSpark drafter: every slot predicts, logits lean on the token before, and a head says how sure each draft is.

Slot k predicts the token at anchor + k + 1, so that a block of K slots drafts K tokens. Tensor names are those of
released checkpoints. Shape letters as in `models.draft`; R blocks, E rank of the bias, V vocabulary.
Source: DSpark, arXiv:2607.05147; deepseek-ai/DeepSpec.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.config import default_gamma
from paceline.dflash.anchors import Anchors
from paceline.dflash.blocks import BlockTargets
from paceline.dflash.markov import gated, recurrent
from paceline.dflash.speculative import Chance
from paceline.errors import ConfigError
from paceline.kernels.linear_cross_entropy import Head
from paceline.kernels.linear_mixed_loss import Bias, Mix
from paceline.models.draft import PLAIN_TERMS, BlockLoss, DFlashDrafter, DraftShape, LossTerms, Proposal, overlap_part
from paceline.models.options import filled_in
from paceline.records import FeatureBatch, TokenBatch

HEADS = ("vanilla", "gated", "rnn")
"""Values of `markov_head_type`."""


class MarkovHead(nn.Module):
    """The bias by the token before: two tables of rank E, and for some types a gate or a recurrence between them."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        rank, width = shape.options["markov_rank"], shape.hidden_size
        self.head_type: str = shape.options["markov_head_type"]
        self.markov_w1 = nn.Embedding(shape.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, shape.vocab_size, bias=False)
        if self.head_type == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if self.head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def start(self, embedded: Tensor) -> Tensor:
        """State before the first slot."""
        return torch.zeros_like(embedded)

    def step(self, state: Tensor, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """A slot's factor of the bias ``[R, E]`` and the next state, from ``[R, D]`` and the embedded token before."""
        if self.head_type == "rnn":
            return recurrent(state, hidden, embedded, self.joint_proj.weight, self.joint_proj.bias)
        if self.head_type == "gated":
            return gated(hidden, embedded, self.gate_proj.weight, self.gate_proj.bias), state
        return embedded, state

    def factors(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Factors ``[R, J, E]`` of whole blocks, from ``[R, J, D]`` and the embedded tokens before ``[R, J, E]``."""
        if self.head_type != "rnn":
            return self.step(embedded, hidden, embedded)[0]
        state, found = self.start(embedded[:, 0]), []
        for j in range(hidden.shape[1]):
            factor, state = self.step(state, hidden[:, j], embedded[:, j])
            found.append(factor)
        return torch.stack(found, dim=1)


class ConfidenceHead(nn.Module):
    """How sure a draft is: one number from a slot's hidden state and, optionally, the embedded token before."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.with_markov: bool = shape.options["confidence_head_with_markov"]
        width = shape.hidden_size + (shape.options["markov_rank"] if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Logits ``[...]``, float32, of ``[..., D]`` and ``[..., E]``."""
        weight, width = self.proj.weight, hidden.shape[-1]
        logits = F.linear(hidden, weight[:, :width], self.proj.bias)
        if self.with_markov:  # joined with the states they would be copied
            logits = logits + F.linear(embedded, weight[:, width:])
        return logits[..., 0].float()


class DSparkDrafter(DFlashDrafter):
    """DFlash with labels shifted by one, a Markov bias and a confidence head."""

    needs_last_hidden: ClassVar[bool] = True
    label_shift: ClassVar[int] = 1
    supports_draft_vocab: ClassVar[bool] = False
    default_mix: ClassVar[Mix] = Mix(ce=0.1, l1=0.9)
    own_modules: ClassVar[tuple[str, ...]] = ("markov_head", "confidence_head")
    OPTIONS: ClassVar[dict[str, Any]] = {
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        found = filled_in("dspark", options, cls.OPTIONS)
        if found["markov_head_type"] not in HEADS:
            raise ConfigError(
                f"draft.options.markov_head_type={found['markov_head_type']!r}: one of {', '.join(HEADS)} was wanted"
            )
        return found

    @classmethod
    def check_shape(cls, shape: DraftShape) -> None:
        if shape.options["markov_rank"] < 1:
            raise ConfigError(f"draft.options.markov_rank={shape.options['markov_rank']} must be at least 1")

    @classmethod
    def default_gamma(cls, block_size: int) -> float:
        return default_gamma(block_size + 1)  # by the tokens drafted, which are one more than of a DFlash block

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        self.markov_head = MarkovHead(shape)
        self.confidence_head = ConfidenceHead(shape) if shape.options["enable_confidence_head"] else None

    @property
    def has_confidence(self) -> bool:
        return self.confidence_head is not None

    def initialise(self, seed: int, embed: nn.Module, head: Head) -> None:
        super().initialise(seed, embed, head)
        generator = torch.Generator().manual_seed(seed)
        own = [self.markov_head] if self.confidence_head is None else [self.markov_head, self.confidence_head]
        with torch.no_grad():
            for module in own:
                for parameter in module.parameters():
                    if parameter.dim() > 1:
                        parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))
                    else:
                        parameter.zero_()

    def labels_and_weights(self, tokens: TokenBatch, anchors: Anchors, gamma: float) -> tuple[Tensor, Tensor]:
        """As of every kind; what a block has to predict ends where a token is not supervised."""
        labels, weights = super().labels_and_weights(tokens, anchors, gamma)
        return labels, weights * (weights > 0).to(torch.int64).cumprod(1)

    def loss(
        self,
        hidden: Tensor,
        head: Head,
        targets: BlockTargets,
        anchors: Tensor,
        features: FeatureBatch,
        terms: LossTerms = PLAIN_TERMS,
    ) -> BlockLoss:
        """As of every kind, with the bias by the data's token before, and what the confidence head has to learn.

        That is the overlap of the two distributions, the chance that a token drawn from one is accepted by the other.
        """
        assert targets.previous is not None
        embedded = self.markov_head.markov_w1(targets.previous)  # [A, J, E]
        factors = self.markov_head.factors(hidden, embedded)
        bias = Bias(
            factors.flatten(0, 1).to(head.weight.dtype), self.markov_head.markov_w2.weight.to(head.weight.dtype)
        )
        rows, overlap = self.row_losses(hidden, head, targets, anchors, features, terms, bias=bias)
        loss, parts = rows.loss, overlap_part(overlap, targets)
        if self.confidence_head is not None:
            logits = self.confidence_head(hidden, embedded).flatten()
            weights = targets.weights.flatten()
            wrong = F.binary_cross_entropy_with_logits(logits, overlap, reduction="none")
            confidence = torch.where(weights > 0, weights * wrong, 0.0).sum()
            loss, parts = loss + terms.confidence * confidence, (*parts, confidence)
        hits = rows.hits.view(targets.labels.shape) & (targets.weights > 0)
        return BlockLoss(loss, rows.weight, hits, parts)

    def part_names(self, terms: LossTerms) -> tuple[str, ...]:
        return ("overlap", "confidence_loss") if self.has_confidence else ("overlap",)

    def best_after(self, hidden: Tensor, head: Head, previous: Tensor) -> Tensor:
        embedded = self.markov_head.markov_w1(previous)
        factors = self.markov_head.factors(hidden, embedded)
        return (head.logits(hidden.to(head.weight.dtype)) + self.markov_head.markov_w2(factors).float()).argmax(-1)

    def propose(self, hidden: Tensor, head: Head, anchors: Tensor, chance: Chance | None = None) -> Proposal:
        """Slot after slot the token after the one just taken; and how sure the head is of each, before it is known."""
        ids, confidence, drawn_from, previous = list[Tensor](), list[Tensor](), list[Tensor](), anchors
        unbiased = head.logits(hidden.to(head.weight.dtype))  # [R, J, V]
        state: Tensor | None = None
        for j in range(hidden.shape[1]):
            embedded = self.markov_head.markov_w1(previous)
            state = self.markov_head.start(embedded) if state is None else state
            factor, state = self.markov_head.step(state, hidden[:, j], embedded)
            logits = unbiased[:, j] + self.markov_head.markov_w2(factor).float()
            if chance is None:
                previous = logits.argmax(-1)
            else:
                previous, probs = chance.draw(logits, j)
                drawn_from.append(probs)
            ids.append(previous)
            if self.confidence_head is not None:
                confidence.append(self.confidence_head(hidden[:, j], embedded).sigmoid())
        found = (torch.stack(each, dim=1) if each else None for each in (confidence, drawn_from))
        return Proposal(torch.stack(ids, dim=1), *found)
