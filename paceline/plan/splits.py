"""Every way to share GPUs out between targets and drafters: what it gives, what it needs, and whether it fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError
from paceline.models.split import lanes, part_starts
from paceline.plan import flops
from paceline.plan.cards import GPUS_PER_HOST, Card
from paceline.plan.memory import GIB, USABLE, MemoryPlan, feature_bytes, memory_of, transport_bytes
from paceline.plan.outline import Documents, DraftSizes, Outline, TargetSizes, with_topology
from paceline.plan.speed import (
    DECODE_BYTES,
    ENCODE_BYTES,
    NETWORK_GB_PER_S,
    STORE_GB_PER_S,
    Times,
    assumptions,
    times,
    token_bytes,
    update_s,
)
from paceline.plan.what_if import Layout, split_rate

if TYPE_CHECKING:
    from paceline.plan.resolve import ResolvedRun


@dataclass(frozen=True)
class PlannedSplit:
    """Targets and drafters, and what they would do.

    Attributes:
        targets, drafters: Roles; colocated, one target for each drafter. From a cache there are no targets.
        gpus_per_target: GPUs that the layers of a target are split over.
        tok_per_s: Document tokens a second, updates included.
        memory_gib: Of the role that needs more.
        missing_gib: What that role lacks on its card; 0: it fits.
        limit: ``targets``, ``drafters``, ``network`` or ``in turn``.
        batches_per_step: Micro-batches of an optimizer step.
        idle_frac: Share of time for which drafters have no micro-batch left in a step, as it does not divide evenly.
        hours, gpu_hours: To the tokens that were asked for.
    """

    targets: int
    drafters: int
    layout: Layout
    tok_per_s: float
    memory_gib: float
    memory_by_role_gib: dict[str, float]
    missing_gib: float
    limit: str
    batches_per_step: int
    idle_frac: float
    hours: float
    gpu_hours: float
    gpus_per_target: int = 1

    @property
    def fits(self) -> bool:
        """Whether every role has room."""
        return self.missing_gib <= 0.0

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "fits": self.fits}


def plan_splits(
    plan: Outline, card: Card, count: int, tokens: float = 1e9, *, is_even: bool = False
) -> list[PlannedSplit]:
    """All splits of `count` cards: in turn, and N targets beside M drafters.

    A target takes as many cards as the run file says; else one, or where it needs more as many as it needs, or more.
    From a cache there is one: a drafter on each card.

    Args:
        tokens: To be trained on, all passes counted.
        is_even: Steps grow to a multiple of the drafters, so that none is idle at their end; else steps are the run's,
            and drafters without a micro-batch wait.
    """
    found = times(plan, card)
    least, said = gpus_of_target(plan, card), plan.config.topology.gpus_per_target > 1
    if plan.is_cached:
        if said:
            raise ConfigError(f"topology.gpus_per_target={least} with target.cache: no target runs; leave the key out")
        return [_planned(plan, card, count, _cached_layout(count), 0, count, 1, found, tokens, is_even)]
    if said and least >= count:
        raise ConfigError(f"topology.gpus_per_target={least}: of {count} GPUs none is left for a drafter")
    if least >= count:
        least = 1
    most = least if said or least == 1 else min(count - 1, GPUS_PER_HOST, plan.num_layers)
    colocated = _planned(plan, card, count, "colocated", 0, count, 1, found, tokens, is_even)
    splits = [
        _planned(plan, card, count, "split", n, count - n * each, each, found, tokens, is_even)
        for each in range(least, most + 1)
        for n in range(1, (count - 1) // each + 1)
    ]
    return [colocated, *splits]


def gpus_of_target(plan: Outline, card: Card) -> int:
    """Cards that a target takes: what the run file says where that is more than one, else the smallest number of a host
    that it fits on; 1 if there is none."""
    if (said := plan.config.topology.gpus_per_target) > 1 or plan.is_cached:
        return said
    for each in range(1, min(GPUS_PER_HOST, plan.num_layers) + 1):
        needed = role_memory(with_topology(plan, "split", 1, 1, each))
        if needed["target"] <= USABLE * card.memory_gib * GIB:
            return each
    return 1


def best_of(splits: list[PlannedSplit]) -> PlannedSplit | None:
    """The fastest that fits; None if none does."""
    return max((each for each in splits if each.fits), key=lambda each: each.tok_per_s, default=None)


def settings_of(plan: Outline, split: PlannedSplit, *, is_even: bool) -> list[str]:
    """What makes a run file's run this split, as dotted overrides."""
    found = [f"topology.layout={split.layout}"]
    is_split = split.layout == "split" and not plan.is_cached
    if split.drafters > 1 or is_split:
        found += ["topology.executor=ray", f"topology.drafters={split.drafters}"]
    elif plan.is_cached and plan.config.topology.executor == "ray":
        found += ["topology.executor=local", "topology.drafters=1"]
    if is_split:
        found.append(f"topology.targets={split.targets}")
    elif split.layout == "colocated" and plan.config.topology.targets > 1:
        found.append("topology.targets=1")
    if split.gpus_per_target > 1:
        found.append(f"topology.gpus_per_target={split.gpus_per_target}")
    if not is_split and plan.config.pipeline.transport != "target":  # nothing travels
        found.append("pipeline.transport=target")
    if is_even:
        found.append(f"optim.tokens_per_step={split.batches_per_step * plan.slots}")
    return found


def _planned(
    plan: Outline,
    card: Card,
    count: int,
    layout: Layout,
    targets: int,
    drafters: int,
    gpus_per_target: int,
    found: Times,
    tokens: float,
    is_even: bool,
) -> PlannedSplit:
    threads = plan.config.topology.targets if plan.is_cached else 1  # that read
    plan = with_topology(plan, layout, max(threads, targets), drafters, gpus_per_target)
    a_step = plan.batches_per_step
    if is_even:
        a_step = math.ceil(a_step / drafters) * drafters
    turns = math.ceil(a_step / drafters)  # of the drafter that has most of a step's micro-batches
    hosts = math.ceil(count / GPUS_PER_HOST)
    exchange_s = update_s(plan, card, drafters, hosts)
    if layout == "colocated" or plan.is_cached:
        rate = a_step / (turns * (found.target_s + found.drafter_s) + exchange_s)
        limit = "drafters" if plan.is_cached else "in turn"
    else:
        out_s, in_s = transport(plan, card)
        drafter_s = (turns * (found.drafter_s + in_s) + exchange_s) / a_step * drafters
        target_s = found.target_s * _largest_share(plan) + out_s
        rate = split_rate(targets, drafters, target_s, drafter_s)
        limit = "targets" if targets / target_s < drafters / drafter_s else "drafters"
        if hosts > 1:  # features that a drafter of another host gets, by each host's way out
            features = transport_bytes(plan.config, plan.draft, plan.last_hidden)
            most = hosts * 1e9 * NETWORK_GB_PER_S / (features * (hosts - 1) / hosts)
            rate, limit = (most, "network") if most < rate else (rate, limit)
    tok_per_s = rate * plan.tokens
    memory = {role: needed / GIB for role, needed in role_memory(plan).items()}
    fullest = max(memory.values())
    hours = tokens / tok_per_s / 3600
    return PlannedSplit(
        targets=0 if plan.is_cached else targets or count,
        drafters=drafters,
        layout=layout,
        tok_per_s=tok_per_s,
        memory_gib=fullest,
        memory_by_role_gib=memory,
        missing_gib=max(0.0, fullest - USABLE * card.memory_gib),
        limit=limit,
        batches_per_step=a_step,
        idle_frac=1.0 - a_step / (turns * drafters),
        hours=hours,
        gpu_hours=hours * count,
        gpus_per_target=gpus_per_target,
    )


def _cached_layout(count: int) -> Layout:
    """Where features are read: ahead, beside a drafter alone; of several, each reads its own in turn."""
    return "split" if count == 1 else "colocated"


def transport(plan: Outline, card: Card) -> tuple[float, float]:
    """Seconds that a micro-batch's features take of a target and of a drafter: to the host and into its store, and from
    there; with fp8 also what encoding and decoding move on the card. Nothing of it is hidden behind other work, as far
    as the plan goes."""
    features = transport_bytes(plan.config, plan.draft, plan.last_hidden)
    over = features / (1e9 * card.host_gb_per_s)
    encode_s = decode_s = 0.0
    if plan.config.pipeline.transport == "fp8":
        values = plan.slots * (len(plan.draft.target_layer_ids) + plan.last_hidden) * plan.draft.hidden_size
        encode_s, decode_s = (values * size / card.bytes_per_s for size in (ENCODE_BYTES, DECODE_BYTES))
    return encode_s + over + features / (1e9 * STORE_GB_PER_S), over + decode_s


# ------------------------------------------------------------------ memory


def memory_parts(plan: Outline) -> MemoryPlan:
    """`plan.memory`'s parts, with the layers that this target really has."""
    is_elsewhere = plan.is_cached or plan.config.target.server is not None
    return memory_of(
        plan.config,
        plan.draft,
        plan.target,
        parameters=plan.draft.parameters,
        last_hidden=plan.last_hidden,
        num_anchors=plan.num_anchors,
        batches_per_step=plan.batches_per_step,
        longest_row=plan.longest,
        trunk_parameters=plan.target.trunk_parameters(1 if is_elsewhere else plan.num_layers),
    )


def of_run(resolved: ResolvedRun, target: TargetSizes, *, last_hidden: bool) -> Outline:
    """A resolved run as the plan sees it."""
    draft = DraftSizes(**{each.name: getattr(resolved.draft, each.name) for each in fields(DraftSizes)})
    return Outline(
        config=resolved.config,
        target=target,
        draft=draft,
        documents=Documents(resolved.dataset.lengths),
        last_hidden=last_hidden,
        tokens=int(resolved.config.pipeline.tokens_per_batch) * resolved.batches.fill,
        num_anchors=resolved.num_anchors,
        batches_per_step=resolved.batches_per_step,
        longest=resolved.longest_row,
    )


def memory_by_role(plan: Outline) -> dict[str, dict[str, int]]:
    """Bytes on a device by role and kind: ``weights`` (with gradients), ``optimizer``, ``activations``, and features in
    ``channel`` slots; the slots of a split run wait in the host's memory, role ``host``.

    From a cache each drafter reads for itself, and what waits is on its card.
    """
    parts = memory_parts(plan)
    draft_size = 4 if plan.config.draft.dtype == "float32" else 2
    per_parameter = 8 if draft_size == 4 else 12  # moments; and masters where they are apart
    drafters = plan.config.topology.drafters
    optimizer = per_parameter * plan.draft.parameters // drafters
    drafter = {
        "weights": parts.drafter_bytes - optimizer + parts.shared_bytes,
        "optimizer": optimizer,
        "activations": parts.activation_bytes,
    }
    one = feature_bytes(plan.config, plan.draft, plan.last_hidden)
    encoded = 0  # beside what it is made from, and what it becomes
    if plan.config.pipeline.transport == "fp8":
        encoded = transport_bytes(plan.config, plan.draft, plan.last_hidden)
    if plan.config.topology.layout != "split" or plan.is_cached:
        weights = drafter["weights"] + parts.target_bytes
        role = "drafter" if plan.is_cached else "colocated"
        return {role: {**drafter, "weights": weights, "channel": parts.queue_bytes}}
    count, nothing = plan.config.topology.gpus_per_target, {"weights": 0, "optimizer": 0, "activations": 0}
    target = {
        "weights": max(target_weights(plan)),
        "optimizer": 0,
        "activations": _prefill_bytes(plan),
        "channel": (one + encoded) * (lanes(count) if count > 1 else 1),
    }
    if plan.config.target.server is not None:  # threads that ask
        target = {**nothing, "channel": 0}
    return {
        "target": target,
        "drafter": {**drafter, "channel": one + encoded},
        "host": {**nothing, "channel": parts.queue_bytes},
    }


def target_weights(plan: Outline) -> list[int]:
    """Bytes of weights on each GPU of a target, as `models.split` cuts it: embedding and head with the first part."""
    sizes, shared = _layer_bytes(plan), memory_parts(plan).shared_bytes
    edges = [*_starts(plan), len(sizes)]
    parts = [sum(sizes[start:end]) for start, end in pairwise(edges)]
    return [parts[0] + shared, *parts[1:]]


def _layer_bytes(plan: Outline) -> list[int]:
    size = 1 if plan.config.target.fp8 else 4 if plan.config.target.dtype == "float32" else 2
    counts = [plan.target.trunk_parameters(i) for i in range(plan.num_layers + 1)]
    return [size * (after - before) for before, after in pairwise(counts)]


def _starts(plan: Outline) -> tuple[int, ...]:
    """First layer of each part of a target."""
    count = max(1, plan.config.topology.gpus_per_target)
    return part_starts(_layer_bytes(plan), count, first=memory_parts(plan).shared_bytes)


def _largest_share(plan: Outline) -> float:
    """Of a target's time, that its slowest part takes: the parts work on different rows at a time."""
    sizes = _layer_bytes(plan)
    return max(sum(sizes[start:end]) for start, end in pairwise([*_starts(plan), len(sizes)])) / sum(sizes)


def role_memory(plan: Outline) -> dict[str, int]:
    """Bytes that each role needs on its card."""
    return {role: sum(parts.values()) for role, parts in memory_by_role(plan).items() if role != "host"}


def _prefill_bytes(plan: Outline) -> int:
    """What one layer of the target holds while it runs: the stream twice, and the MLP's or the attention's widest."""
    target = plan.target
    wide = 3 * target.intermediate_size
    if target.experts is not None:
        wide = 3 * (target.experts.used * target.experts.width + target.experts.shared_width)
    wide = max(wide, (2 * target.num_attention_heads + 2 * target.num_key_value_heads) * target.head_dim)
    size = 4 if plan.config.target.dtype == "float32" else 2
    return plan.slots * size * (4 * target.hidden_size + wide)


# ------------------------------------------------------------------ the whole plan


def plan_record(
    plan: Outline,
    card: Card,
    count: int,
    *,
    target: str,
    tokens: float,
    distinct_tokens: float,
    sources: dict[str, str],
    is_even: bool = False,
) -> dict[str, Any]:
    """Everything that `paceline plan` says, for JSON.

    Args:
        target: Its name.
        tokens: To be trained on, all passes counted.
        distinct_tokens: Of the data: what an offline cache would hold features of.
        sources: What was assumed for want of being told, by name.
    """
    splits = plan_splits(plan, card, count, tokens, is_even=is_even)
    best = best_of(splits)
    layout: Layout = _cached_layout(count) if plan.is_cached else "colocated"
    threads = plan.config.topology.targets if plan.is_cached else 1
    memory = memory_by_role(with_topology(plan, layout, threads, count, 1))
    if count > 1 and not plan.is_cached:  # beside it the split's: of the best, or of the fastest that there would be
        is_split = best is not None and best.layout == "split"
        shown = best if is_split and best is not None else max(splits[1:], key=lambda each: each.tok_per_s)
        memory |= memory_by_role(with_topology(plan, "split", shown.targets, shown.drafters, shown.gpus_per_target))
    found = times(plan, card)
    out_s, in_s = transport(plan, card)
    one = token_bytes(plan)
    read = None
    if plan.is_cached:
        gb_per_s = splits[0].tok_per_s * one / 1e9
        hosts = math.ceil(count / GPUS_PER_HOST)
        read = {
            "cache": plan.config.target.cache,
            "bytes_per_token": one,
            "gb_per_s": gb_per_s,
            "gb_per_s_per_host": gb_per_s / hosts,
            "is_ahead": splits[0].layout == "split",
        }
    return {
        "target": target,
        "gpus": count,
        "gpus_per_target": gpus_of_target(plan, card),
        "card": card.name,
        "tokens": tokens,
        "drafter": {
            "kind": plan.draft.kind,
            "num_layers": plan.draft.num_hidden_layers,
            "block_size": plan.draft.block_size,
            "parameters": plan.draft.parameters,
            "heads": [plan.draft.num_attention_heads, plan.draft.num_key_value_heads, plan.draft.head_dim],
            "target_layer_ids": list(plan.draft.target_layer_ids),
        },
        "micro_batch": {
            "slots": plan.slots,
            "tokens": plan.tokens,
            "anchors": plan.num_anchors,
            "mean_context": plan.documents.mean_keys(),
            "batches_per_step": plan.batches_per_step,
        },
        "splits": [each.record() for each in splits],
        "best": None if best is None else best.record(),
        "run_file": None if best is None else settings_of(plan, best, is_even=is_even),
        "flops": flops.record(plan),
        "times_ms": {
            "target": {name: 1e3 * s for name, s in found.target.items()},
            "drafter": {name: 1e3 * s for name, s in found.drafter.items()},
            "update": 1e3 * found.update_s,
            "transport": {} if plan.is_cached else {"target": 1e3 * out_s, "drafter": 1e3 * in_s},
        },
        "reading": read,
        "memory": {
            role: {f"{kind}_gib": value / GIB for kind, value in parts.items()}
            | {"total_gib": sum(parts.values()) / GIB}
            for role, parts in memory.items()
        },
        "offline_cache_bytes": round(distinct_tokens) * one,
        "assumptions": {
            **{name: {"value": source, "source": "of this plan"} for name, source in sources.items()},
            **assumptions(card),
        },
    }
