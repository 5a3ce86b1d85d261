"""Floating-point operations of a micro-batch, part by part, forward and backward, as training does them.

A multiplication and an addition are two. Counted is useful work: of attention the pairs that see each other, of a
mixture the experts of a token. What the first draft layer shares between mask slots and the last one leaves out is not
done, and so not counted: some 3 % less than the method's own count.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.outline import Outline


@dataclass(frozen=True)
class Work:
    """Operations of a part of a micro-batch."""

    forward: float
    backward: float = 0.0

    @property
    def total(self) -> float:
        """Both directions."""
        return self.forward + self.backward


TARGET_PARTS = ("target trunk", "target experts", "target attention", "target gated delta")
DRAFT_PARTS = ("context", "blocks", "attention", "head", "target distribution", "convolutions", "selector", "markov")
BLOCK_PARTS = tuple(part for part in DRAFT_PARTS if part != "context")
"""Parts whose work is an anchor block's."""


def target_work(plan: Outline) -> dict[str, Work]:
    """A target's forward pass over a row, up to the last layer that is needed; nothing where features are read."""
    if plan.is_cached:
        return {}
    target, slots = plan.target, plan.slots
    layers = range(plan.num_layers)
    trunk = sum(target.attention_parameters(i) + target.mlp_parameters(i)[0] for i in layers)
    experts = sum(target.mlp_parameters(i)[1] for i in layers)
    attention = delta = 0.0
    for i in layers:
        if target.layer_types[i] == "linear_attention" and target.delta is not None:
            state = target.delta.value_heads * target.delta.key_dim * target.delta.value_dim
            delta += 7 * state * slots  # as the recurrence that it is: decayed, read, corrected, read again
            continue
        window = target.sliding_window if target.layer_types[i] == "sliding_attention" else None
        attention += 4 * target.num_attention_heads * target.head_dim * plan.documents.mean_keys(window) * slots
    found = {
        "target trunk": Work(2.0 * trunk * slots),
        "target experts": Work(2.0 * experts * slots),
        "target attention": Work(attention),
        "target gated delta": Work(delta),
    }
    return {name: work for name, work in found.items() if work.total}


def draft_work(plan: Outline) -> dict[str, Work]:
    """A drafter's micro-batch; `draft.recompute` runs the layers' forward pass once more, in the backward pass."""
    draft, anchors, slots = plan.draft, plan.num_anchors, plan.slots
    d, block = draft.hidden_size, draft.block_size
    queries, keys = draft.num_attention_heads * draft.head_dim, draft.num_key_value_heads * draft.head_dim
    rows, rank = anchors * block, draft.options.get("selector_rank", draft.options.get("markov_rank", 0))
    again = 1 if plan.config.draft.recompute else 0

    taps = draft.options.get("conv_kernel_size", 0)
    convolved = draft.kind == "dflash2"
    first = anchors * min(block, taps + 1) if convolved else anchors + 1  # rows that differ in a block's input
    last = rows if convolved else anchors * draft.predicted  # rows that the last layer completes
    linear = attention = convolutions = 0.0
    for i in range(draft.num_hidden_layers):
        into = first if i == 0 else rows
        out = last if i == draft.num_hidden_layers - 1 else rows
        linear += 2.0 * d * (queries + 2 * keys) * into + 2.0 * d * (queries + 3 * draft.intermediate_size) * out
        window = draft.sliding_window if draft.layer_types[i] == "sliding_attention" else None
        attention += 4.0 * queries * (plan.documents.mean_keys(window) + block) * rows
        if convolved:
            width = 2 * taps * (d // draft.options["conv_group_size"])
            convolutions += 2.0 * d * width * (into + rows)

    fused = 2.0 * len(draft.target_layer_ids) * d * d * slots  # its input takes no gradient
    context = 4.0 * draft.num_hidden_layers * d * keys * slots
    head = 2.0 * d * (draft.draft_vocab_size or draft.vocab_size) * plan.predictions  # frozen: its input's gradient
    found = {
        "context": Work(fused + context, fused + 2 * context),
        "blocks": Work(linear, (2 + again) * linear),
        "attention": Work(attention, (2 + again) * attention),
        "head": Work(head, head),
    }
    if plan.last_hidden:
        found["target distribution"] = Work(head)
    if convolved:
        found["convolutions"] = Work(convolutions, (2 + again) * convolutions)
        scores = 2.0 * rank * (d + draft.options["selector_top_k"]) * plan.predictions
        found["selector"] = Work(scores, 2 * scores)
    if draft.kind == "dspark":
        every = anchors * draft.predicted
        gate = {"gated": (d + rank) * rank, "rnn": (2 * rank + d) * 3 * rank}
        markov = 2.0 * rank * draft.vocab_size * plan.predictions
        markov += 2.0 * gate.get(draft.options["markov_head_type"], 0) * every
        if draft.options["enable_confidence_head"]:
            markov += 2.0 * (d + (rank if draft.options["confidence_head_with_markov"] else 0)) * every
        found["markov"] = Work(markov, 2 * markov)
    return found


def record(plan: Outline) -> dict[str, dict[str, dict[str, float]]]:
    """For JSON: every part's work a document token, and those of the blocks an anchor block."""
    works = target_work(plan) | draft_work(plan)

    def over(parts: dict[str, Work], count: float) -> dict[str, dict[str, float]]:
        return {
            name: {"forward": work.forward / count, "backward": work.backward / count} for name, work in parts.items()
        }

    blocks = {name: work for name, work in works.items() if name in BLOCK_PARTS}
    return {"per_token": over(works, plan.tokens), "per_anchor_block": over(blocks, plan.num_anchors)}
