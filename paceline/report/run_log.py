"""A run by its records: batches, checkpoints, events, and the circumstances it ran under."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.report.page import (
    MISSING,
    Html,
    Record,
    badge,
    duration,
    escape,
    facts,
    is_number,
    items_of,
    join,
    number,
    part_of,
    table,
    tag,
)
from paceline.report.run_view import (
    SHOWN_ROLES,
    RunView,
    clock,
    cut,
    evaluations_of,
    gib,
    not_shown,
    text_of,
    words,
)

SHOWN_EVENTS = 25
"""The newest; earlier ones are a click away."""
SHOWN_CHECKPOINTS, SHOWN_EVALUATIONS = 12, 12
TROUBLE = (
    "failed", "checkpoint failed", "stalled", "evaluation failed", "evaluation dropped", "restarted", "target was lost",
    "target is given up", "stop now",
)  # fmt: skip
"""Events that are marked: something went wrong, or was ended before it was saved."""


def batches(view: RunView) -> list[Html]:
    """What became of micro-batches."""
    ledger = part_of(view.state, "ledger") or part_of(view.report, "ledger")
    if not ledger:
        return []
    names = {
        "issued": "issued",
        "trained": "trained",
        "in_flight": "in flight",
        "skipped": "left out",
        "retried": "made again",
    }
    told = "Micro-batches of the last process: issued = trained + in flight + left out"
    return [table(("", *names.values()), [["batches", *(number(ledger.get(key)) for key in names)]], told)]


def saved(view: RunView) -> list[Html]:
    """Checkpoints on the disk, and evaluations of them."""
    rows = [
        [
            join([number(each.get("step")), badge("latest") if each.get("is_latest") else "",
                  badge("best") if each.get("is_best") else ""]),
            clock(each.get("time")),
            _size(each.get("bytes")),
        ]
        for each in list(view.checkpoints)[::-1][:SHOWN_CHECKPOINTS]
    ]  # fmt: skip
    saved = view.events.counts["checkpoint"]
    told = f"On the disk: {number(len(view.checkpoints))}" + (f"; written so far: {number(saved)}" if saved else "")
    blocks = [table(("step", "written", "size"), rows, told)] if rows else []
    if not rows and view.steps.stretches:
        lost = f"None of the {number(saved)} that were written is on the disk."
        blocks = [tag("p", lost if saved else "No checkpoint is complete yet.")]
    measured = [
        [number(each["step"]), number(each["acceptance_length"], 3), number(each.get("mismatches"))]
        for each in evaluations_of(view)[::-1][:SHOWN_EVALUATIONS]
    ]
    if measured:
        head = ("step", "acceptance length", "answers that differ")
        blocks.append(table(head, measured, "Evaluations beside training, by decoding prompts"))
    return blocks


def _size(num_bytes: object) -> str:
    if not is_number(num_bytes):
        return MISSING
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:,.2f} GiB"


def events_of(view: RunView) -> list[Html]:
    """What happened, the newest first, and what went wrong of it."""
    shown = [_event(each) for each in reversed(view.events.newest)]
    if not shown:
        return []
    troubles = sum(count for kind, count in view.events.counts.items() if _is_trouble(kind))
    told = f"Newest first. Marked, as something went wrong: {number(troubles)}." if troubles else "Newest first."
    if saved := view.events.counts["checkpoint"]:
        told += f" {number(saved)} checkpoints that were written are not listed."
    older = shown[SHOWN_EVENTS:]
    more = (
        tag("details", tag("summary", f"{len(older)} earlier"), tag("ul", *older, class_="events")) if older else Html()
    )
    left_out = view.events.num_left_out
    return [
        tag("p", told),
        tag("ul", *shown[:SHOWN_EVENTS], class_="events"),
        more,
        *not_shown(left_out, "events before these"),
    ]


def _is_trouble(kind: str) -> bool:
    return kind in TROUBLE or kind.startswith("SIG")


def _event(event: Record) -> Html:
    kind = str(event.get("event"))
    rest = [
        str(value) if name == "reason" else f"{name}={value}"
        for name, value in event.items()
        if name not in ("time", "event", "step") and value is not None
    ]
    step = f"step {number(event.get('step'))}" if "step" in event else ""
    said = tag("span", tag("b", cut(kind)), f": {cut('; '.join(rest))}" if rest else "")
    return tag(
        "li",
        tag("time", clock(event.get("time"))),
        tag("i", step),
        said,
        class_="trouble" if _is_trouble(kind) else None,
    )


def about(view: RunView) -> list[Html]:
    """Where the run is, what it trains, and on what."""
    record, config = view.record, view.config
    told = {name: value for name, value in _facts(view) if value}
    blocks = [facts(told)] if told else []
    roles = {name: part for name, part in part_of(record, "roles").items() if isinstance(part, Mapping)}
    if roles:
        rows = [
            [name, text_of(part, "host"), str(part.get("pid", MISSING)), text_of(part, "device")]
            for name, part in list(roles.items())[:SHOWN_ROLES]
        ]
        blocks += [tag("h3", "Roles"), words(("role", "host", "process", "device"), rows)]
        blocks += [*not_shown(len(roles) - SHOWN_ROLES, "roles")]
    if config:
        settings = [[name, _setting(value)] for name, value in _flat(config)]
        summary = tag("summary", f"All {number(len(settings))} settings")
        blocks.append(tag("details", summary, words(("setting", "value"), settings, "settings")))
    return blocks


def _facts(view: RunView) -> Iterable[tuple[str, str]]:
    record, state = view.record, view.state
    target, data, topology, pipeline, optim = (
        part_of(view.config, name) for name in ("target", "data", "topology", "pipeline", "optim")
    )
    draft, dataset = part_of(record, "draft"), part_of(part_of(record, "data"), "dataset")
    yield "Folder", text_of(state, "run", "")
    resumed = record.get("resumed_from_step")
    since = f", from step {number(resumed)} on" if is_number(resumed) and resumed > 0 else ""
    if is_number(record.get("started")):
        yield "Started", f"{clock(record['started'])}{since}, on {text_of(record, 'host')}"
    if target:
        yield "Target", f"{text_of(target, 'path')}, {text_of(target, 'dtype')}"
    if draft:
        layers, block = number(draft.get("num_hidden_layers")), number(draft.get("block_size"))
        taps = ", ".join(str(each) for each in items_of(draft, "target_layer_ids"))
        yield "Drafter", f"{text_of(draft, 'kind', 'dflash')}, {layers} layers, blocks of {block}, target layers {taps}"
    if dataset:
        size = f"{number(dataset.get('num_conversations'))} conversations, {number(dataset.get('num_tokens'))} tokens"
        yield "Data", f"{text_of(data, 'path')}: {size}, {number(data.get('epochs'))} epochs"
    if topology:
        roles = f"{number(topology.get('targets'))} targets, {number(topology.get('drafters'))} drafters"
        yield "Layout", f"{text_of(topology, 'layout')}, {roles}, {text_of(topology, 'executor')}"
    if optim:
        batch = f"micro-batches of {number(pipeline.get('tokens_per_batch'))}"
        yield "Step", f"{number(optim.get('tokens_per_step'))} tokens in {batch}; learning rate {optim.get('lr')}"
    yield from _memory(view)
    for name, key in (("Packing", "packing"), ("Attention", "attention"), ("Quantization", "quantization")):
        yield name, text_of(record, key, "")
    if view.report:
        trained = f"{number(view.report.get('tokens'))} tokens in {duration(view.report.get('seconds'))}"
        yield "Last process", f"{trained}, up to step {number(view.report.get('step'))}"
    versions = part_of(record, "versions")
    yield "Versions", ", ".join(f"{name} {text_of(versions, name)}" for name in versions)
    yield "Commit", text_of(record, "commit", "")[:12]


def _memory(view: RunView) -> Iterable[tuple[str, str]]:
    parts = {
        name: value for name, value in part_of(view.record, "memory_gib").items() if is_number(value) and value > 0
    }
    if parts:
        told = ", ".join(f"{name} {gib(value)}" for name, value in parts.items())
        yield "Planned memory", f"{gib(sum(parts.values()))}, a calculation: {told}"
    now, peak = view.process_gib.get("now"), view.process_gib.get("peak")
    if is_number(now):
        yield "Host memory", f"the process holds {gib(now)}, {gib(peak)} at the peak"


def _flat(tree: Record, above: str = "") -> Iterable[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _setting(value: object) -> Html:
    return escape("" if value is None else cut(value))
