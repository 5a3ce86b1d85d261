"""How long a micro-batch takes on a target and on a drafter: operations and bytes over what a card reaches.

    seconds = operations / matrix rate + scores * exponential's time + bytes / memory rate + launches * gap

Attention runs in tiles of 128 keys, so a row computes some keys more than it sees. What the card reaches is in
`plan.cards`; the constants here are the code's own, fitted on one run each on an H200 (`python -m benchmarks.plan` says
how far other runs are off).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.plan.cards import CARDS, LINK_SHARE, Card
from paceline.plan.flops import draft_work, target_work
from paceline.plan.memory import feature_dtype, kept_bytes
from paceline.plan.outline import Outline

TILE = 128
STEP, HYBRID, MOE = (f"benchmarks/results/{name}-h200.json" for name in ("step", "hybrid", "moe"))


@dataclass(frozen=True)
class Constant:
    """A fitted number.

    Attributes:
        source: Result file and run that it was fitted on.
    """

    value: float
    unit: str
    source: str


CONSTANTS = {
    "target_score_flex": Constant(9.464e-13, "s a score", f"{STEP} qwen3-8b"),
    "draft_score_flex": Constant(4.632e-12, "s a score, forward and backward", f"{STEP} qwen3-8b"),
    "target_score_flash4": Constant(3.616e-13, "s a score", f"{STEP} qwen3-8b-flash4"),
    "draft_score_flash4": Constant(2.878e-12, "s a score, forward and backward", f"{STEP} qwen3-8b-flash4"),
    "logit_bytes": Constant(5.382, "bytes a logit", f"{STEP} qwen3-8b"),
    "update_bytes": Constant(24.36, "bytes a parameter and update", f"{STEP} qwen3-8b"),
    "fp8_factor": Constant(1.757, "times the bfloat16 rate, quantising included", f"{STEP} qwen3-8b-fp8-flash4"),
    "expert_factor": Constant(0.5191, "of the matrix rate", f"{MOE} target"),
    "delta_rate": Constant(2.192e13, "operations a second", f"{HYBRID} target"),
    "gap": Constant(5.62e-07, "s a kernel in a CUDA graph", f"{STEP} smollm2-135m"),
    "launch": Constant(
        3.731e-05, "s a kernel, launched one by one", "benchmarks/results/step-small-h200.json launched"
    ),
}
"""What was fitted, by name; see `benchmarks.plan.fit`."""
KERNELS_PER_LAYER = {"target": 17, "drafter": 150}
"""Kernels that a layer launches, forward and backward, everything around it shared out."""
MIXED_LOGIT_BYTES = 20.0
"""Bytes a logit where losses compare with the target's distribution. A guess: not measured on a GPU."""
CONVOLUTION_WIDTHS = 24
"""Widths of the stream that `dflash2`'s four convolutions of a layer move, forward and backward. A guess likewise."""
CANDIDATE_LOGIT_BYTES = 2.0
"""Bytes a logit for finding `dflash2`'s candidates. A guess likewise."""
SUM_BYTES = 10
"""Bytes a parameter and micro-batch that adding gradients up over several takes. A guess likewise."""
STORE_GB_PER_S = 10.0
"""Copy into the object store of a host: 480 MiB in 50 ms (transport-cpu.json, ray, two loaded cores)."""
ENCODE_BYTES, DECODE_BYTES = 31.0, 19.0
"""Bytes a value of bfloat16 that encoding to fp8 and decoding move on a card: operations were counted, a guess."""
NETWORK_GB_PER_S = 10.0
"""From one host's store to another's, each way. A guess; two stores on two cores did 0.9 (transport-cpu.json)."""
COLLECTIVE_NETWORK_GB_PER_S = 50.0
"""Of a card to other hosts, for gradients: 400 Gbit/s a card. A guess."""


def value(name: str) -> float:
    """A fitted constant."""
    return CONSTANTS[name].value


@dataclass(frozen=True)
class Times:
    """Seconds of a micro-batch by role and part.

    Attributes:
        target, drafter: Parts of a micro-batch.
        update_s: An optimizer update of one drafter alone.
    """

    target: dict[str, float]
    drafter: dict[str, float]
    update_s: float

    @property
    def target_s(self) -> float:
        """t."""
        return sum(self.target.values())

    @property
    def drafter_s(self) -> float:
        """d, without the update."""
        return sum(self.drafter.values())


def times(plan: Outline, card: Card) -> Times:
    """What a micro-batch takes on one card that does nothing else.

    Features from a cache are copied to the card on the drafter's stream, so that it has to wait for them; what the disk
    takes is not in it.
    """
    target, drafter = {} if plan.is_cached else _target_times(plan, card), _draft_times(plan, card)
    if plan.is_cached:
        drafter["features to the card"] = plan.slots * token_bytes(plan) / (1e9 * card.host_gb_per_s)
    return Times(target, drafter, update_s(plan, card, 1))


def token_bytes(plan: Outline) -> int:
    """Features of a token in an offline cache: in the run's, or in one that would be made."""
    if plan.token_bytes is not None:
        return plan.token_bytes
    states = len(plan.draft.target_layer_ids) + plan.last_hidden
    return kept_bytes(1, states, plan.draft.hidden_size, feature_dtype(plan.config, plan.last_hidden))


def _target_times(plan: Outline, card: Card) -> dict[str, float]:
    target, slots, config = plan.target, plan.slots, plan.config
    works = {name: work.total for name, work in target_work(plan).items()}
    rate = card.matmul_per_s
    found = {"matrices": works["target trunk"] / (rate * (value("fp8_factor") if config.target.fp8 else 1.0))}
    if "target experts" in works:
        found["experts"] = works["target experts"] / (rate * value("expert_factor"))
    if "target gated delta" in works:
        found["gated delta"] = works["target gated delta"] * card.softmax_factor / value("delta_rate")
    scores = 0.0
    for kind in target.layer_types[: plan.num_layers]:
        if kind != "linear_attention":
            window = target.sliding_window if kind == "sliding_attention" else None
            scores += target.num_attention_heads * (plan.documents.mean_keys(window) + TILE) * slots
    found["attention"] = scores * (
        4 * target.head_dim / rate + value(f"target_score_{_kernel(config)}") * card.softmax_factor
    )
    queries, keys = target.num_attention_heads * target.head_dim, target.num_key_value_heads * target.head_dim
    inner = target.intermediate_size
    if target.experts is not None:
        inner = target.experts.used * target.experts.width + target.experts.shared_width
    size = 4 if config.target.dtype == "float32" else 2
    moved = size * plan.num_layers * slots * (8 * target.hidden_size + 2 * (queries + keys) + 3 * inner)
    found["between"] = moved / card.bytes_per_s
    return _launched(found, plan, card, KERNELS_PER_LAYER["target"] * plan.num_layers)


def _draft_times(plan: Outline, card: Card) -> dict[str, float]:
    draft, config = plan.draft, plan.config
    works = {name: work.total for name, work in draft_work(plan).items()}
    rate, rows = card.matmul_per_s, plan.num_anchors * draft.block_size
    again = 4 / 3 if config.draft.recompute else 1.0
    size = 4 if config.draft.dtype == "float32" else 2
    found = {name: work / rate for name, work in works.items() if name != "attention"}
    scores = 0.0
    for kind in draft.layer_types:
        window = draft.sliding_window if kind == "sliding_attention" else None
        scores += draft.num_attention_heads * (plan.documents.mean_keys(window) + 2 * TILE) * rows
    found["attention"] = (
        again * scores * (12 * draft.head_dim / rate + value(f"draft_score_{_kernel(config)}") * card.softmax_factor)
    )
    queries, keys = draft.num_attention_heads * draft.head_dim, draft.num_key_value_heads * draft.head_dim
    width = 20 * draft.hidden_size + 6 * (queries + keys) + 9 * draft.intermediate_size
    if draft.kind == "dflash2":
        width += CONVOLUTION_WIDTHS * draft.hidden_size
    moved = size * again * draft.num_hidden_layers * rows * width
    per_logit = MIXED_LOGIT_BYTES if plan.last_hidden else value("logit_bytes")
    per_logit += CANDIDATE_LOGIT_BYTES if draft.kind == "dflash2" else 0
    moved += per_logit * plan.predictions * (draft.draft_vocab_size or draft.vocab_size)
    if plan.batches_per_step > 1:
        moved += SUM_BYTES * draft.parameters
    found["between"] = moved / card.bytes_per_s
    return _launched(found, plan, card, KERNELS_PER_LAYER["drafter"] * draft.num_hidden_layers)


def _launched(found: dict[str, float], plan: Outline, card: Card, kernels: int) -> dict[str, float]:
    """With what launches take: gaps in a CUDA graph, which small models run in, or the host's own time."""
    if card.is_cpu:
        return found
    gaps = kernels * value("gap")
    if plan.config.kernels.cuda_graphs == "off":
        gaps = max(gaps, kernels * value("launch") - sum(found.values()))
    return found | {"launches": gaps}


def _kernel(config: Any) -> str:
    return "flash4" if config.kernels.attention == "flash4" else "flex"


def update_s(plan: Outline, card: Card, drafters: int, hosts: int = 1) -> float:
    """An optimizer update of one of so many drafters: its part of the moments, and the exchange with the others."""
    parameters = plan.draft.parameters
    seconds = value("update_bytes") * parameters / drafters / card.bytes_per_s
    if drafters > 1:
        link = card.link_gb_per_s * LINK_SHARE if hosts == 1 else COLLECTIVE_NETWORK_GB_PER_S * LINK_SHARE
        seconds += (4 + 2) * parameters * (drafters - 1) / drafters / (1e9 * link)  # float32 sums out, copies back
    return seconds


def assumptions(card: Card) -> dict[str, dict[str, Any]]:
    """What a prediction rests on, each with its source."""
    found: dict[str, dict[str, Any]] = {
        "card": {
            "value": card.name,
            "tflop_per_s": card.tflop_per_s,
            "matmul_share": card.matmul_share,
            "memory_gb_per_s": card.memory_gb_per_s,
            "memory_share": card.memory_share,
            "link_gb_per_s": card.link_gb_per_s,
            "host_gb_per_s": card.host_gb_per_s,
            "memory_gib": card.memory_gib,
            "softmax_factor": card.softmax_factor,
            "source": card.source,
        }
    }
    for name, constant in CONSTANTS.items():
        scaled = "" if card.name == CARDS["h200"].name else "; carried over from the H200, a guess"
        found[name] = {"value": constant.value, "unit": constant.unit, "source": constant.source + scaled}
    guesses = {
        "mixed_logit_bytes": (MIXED_LOGIT_BYTES, "bytes a logit, against the target's distribution", "a guess"),
        "convolution_widths": (CONVOLUTION_WIDTHS, "widths a row and layer, dflash2", "a guess"),
        "candidate_logit_bytes": (CANDIDATE_LOGIT_BYTES, "bytes a logit, dflash2", "a guess"),
        "sum_bytes": (SUM_BYTES, "bytes a parameter and micro-batch", "a guess"),
        "store_gb_per_s": (STORE_GB_PER_S, "GB/s", "benchmarks/results/transport-cpu.json ray, 480 MiB"),
        "encode_bytes": (ENCODE_BYTES, "bytes a value, pipeline.transport=fp8", "a guess"),
        "decode_bytes": (DECODE_BYTES, "bytes a value, pipeline.transport=fp8", "a guess"),
        "network_gb_per_s": (NETWORK_GB_PER_S, "GB/s between hosts' stores", "a guess"),
        "collective_network_gb_per_s": (COLLECTIVE_NETWORK_GB_PER_S, "GB/s a card between hosts", "a guess"),
        "link_share": (LINK_SHARE, "of a link's data sheet", "a guess"),
    }
    for name, (number, unit, source) in guesses.items():
        found[name] = {"value": number, "unit": unit, "source": source}
    return found
