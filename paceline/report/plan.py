"""The page of a plan: which split of the GPUs, how fast, what it needs in memory, and on what that rests."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.report.charts import Series, bar_chart, line_chart, stacked_bar
from paceline.report.page import (
    MISSING,
    Html,
    Record,
    code,
    columns,
    facts,
    figures,
    is_number,
    items_of,
    join,
    note,
    number,
    page,
    part_of,
    percent,
    section,
    table,
    tag,
)

BARS = 16
"""Splits that get a bar each; more are drawn as a line."""
ROWS = 24
"""Splits in the table, the fastest; more are in the JSON."""


def plan_page(record: Record) -> str:
    """The page as one HTML file.

    Args:
        record: As `paceline plan --json` writes it; parts that are missing are left out, or shown as missing.
    """
    splits = [each for each in items_of(record, "splits") if isinstance(each, Mapping)]
    name = f"{record.get('target', MISSING)} on {number(record.get('gpus'))} × {record.get('card', MISSING)}"
    return page(
        f"Plan: {name}",
        "What a run needs and how fast it would be, before it runs. A calculation: what it rests on is at the end.",
        _headline(record),
        section("Targets and drafters", _chart(splits), _splits(record, splits), _settings(record)),
        section("Memory", _memory(record)),
        section("Where the time and the work go", _times(record), _flops(record)),
        section("What it rests on", _assumptions(record)),
    )


def _headline(record: Record) -> Html:
    best = part_of(record, "best")
    cache = record.get("offline_cache_bytes")
    disk = (f"{number(cache / 1e12, 2)} TB" if is_number(cache) else number(cache), "an offline cache", "of features")
    reading = [] if (read := part_of(record, "reading")) == {} else [_reading(read)]
    if not best:
        return note("No split fits: every role needs more memory than its card has.", is_warning=True)
    return figures(
        (_name(best), "best split", f"at most {number(best.get('memory_gib'), 1)} GiB a card"),
        (number(best.get("tok_per_s")), "tokens a second", _limit(best)),
        (number(best.get("hours"), 1), "hours", f"to {number(record.get('tokens'))} tokens"),
        (number(best.get("gpu_hours"), 1), "GPU-hours", ""),
        disk,
        *reading,
    )


def _reading(read: Record) -> tuple[str, str, str]:
    ahead = "ahead of the drafter" if read.get("is_ahead") else "in turn with the drafters, whose time this adds to"
    return (f"{number(read.get('gb_per_s'), 2)} GB/s", "read from the cache", ahead)


def _name(split: Record) -> str:
    if split.get("targets") == 0:
        return f"{number(split.get('drafters'))} drafters"
    if split.get("layout") == "colocated":
        return "in turn"
    each = split.get("gpus_per_target")
    of = f" of {number(each)} GPUs" if is_number(each) and each > 1 else ""
    return f"{number(split.get('targets'))}{of} + {number(split.get('drafters'))}"


def _limit(split: Record) -> str:
    known = {"in turn": "target and drafter in turn", "targets": "the targets limit", "drafters": "the drafters limit"}
    return known.get(str(split.get("limit")), "the network limits")


def _chart(splits: list[Record]) -> Html:
    if len(splits) < 2:
        return Html()
    title = "Tokens a second by split"
    caption = "Targets + drafters; in turn, each card has both."
    if len(splits) <= BARS:
        best = max((each for each in splits if each.get("fits")), key=_speed, default=None)
        bars = {_name(each): each.get("tok_per_s") for each in splits}
        marked = None if best is None else _name(best)
        return bar_chart(title, bars, marked=marked, mark="best", caption=caption)
    sides = [each for each in splits if each.get("layout") == "split"]
    colocated = next((_speed(each) for each in splits if each.get("layout") == "colocated"), None)
    ends = [each.get("targets") for each in (sides[0], sides[-1])] if sides else []
    lines = [
        Series("split", [(each.get("targets"), each.get("tok_per_s")) for each in sides]),
        Series("in turn", [(end, colocated) for end in ends]),
    ]
    return line_chart(
        title, lines, x_label="cards that are targets", y_label="tokens a second", from_zero=True, caption=caption
    )


def _settings(record: Record) -> Html:
    settings = [str(each) for each in items_of(record, "run_file")]
    if not settings:
        return Html()
    return join([tag("p", "The best, as overrides of a run file:"), code("\n".join(settings), is_shell=False)])


def _speed(split: Record) -> float:
    speed = split.get("tok_per_s")
    return speed if is_number(speed) else 0.0


def _splits(record: Record, splits: list[Record]) -> Html:
    ranked = sorted(splits, key=_speed, reverse=True)
    top = _speed(part_of(record, "best"))
    rows = [
        (
            _name(each),
            number(each.get("tok_per_s")),
            percent(_speed(each) / top if top else None),
            number(each.get("hours"), 1),
            number(each.get("gpu_hours"), 1),
            number(each.get("memory_gib"), 1),
            percent(each.get("idle_frac")),
            _limit(each) if each.get("fits") else f"{number(each.get('missing_gib'), 1)} GiB too little",
        )
        for each in ranked[:ROWS]
    ]
    left = len(ranked) - len(rows)
    head = ("split", "tok/s", "of the best", "hours", "GPU-hours", "GiB a card", "drafters idle", "limit")
    return table(head, rows, f"{left} slower splits are left out" if left > 0 else "")


def _memory(record: Record) -> Html:
    kinds = ("weights", "optimizer", "activations", "channel", "total")
    rows = [
        (role, *(number(parts.get(f"{kind}_gib"), 1) for kind in kinds))
        for role, parts in part_of(record, "memory").items()
        if isinstance(parts, Mapping)
    ]
    head = ("role", "weights, gradients", "optimizer", "activations", "features", "all")
    return table(head, rows, "GiB; what waits between split roles is in the host's memory")


def _times(record: Record) -> Html:
    times = part_of(record, "times_ms")

    def bar(role: str) -> Html:
        parts = {str(name): value for name, value in part_of(times, role).items()}
        if role == "drafter" and parts:
            parts["update"] = times.get("update")
        total = sum(value for value in parts.values() if is_number(value))
        shown = f"{number(total, 1)} ms a micro-batch" + (", an update in each" if role == "drafter" else "")
        return stacked_bar(f"The {role}'s time", parts, lambda ms: f"{number(ms, 1)} ms", caption=shown)

    return columns(bar("target"), bar("drafter")) if part_of(times, "target") else bar("drafter")


def _flops(record: Record) -> Html:
    flops = part_of(record, "flops")
    blocks = part_of(flops, "per_anchor_block")
    rows = []
    for name, work in part_of(flops, "per_token").items():
        if isinstance(work, Mapping):
            block = part_of(blocks, name)
            both = sum(value for value in block.values() if is_number(value)) if block else None
            rows.append((name, _giga(work.get("forward")), _giga(work.get("backward")), _giga(both)))
    return table(("GFLOP", "a token, forward", "backward", "an anchor block"), rows)


def _giga(flop: object) -> str:
    return number(flop / 1e9, 2 if flop < 1e11 else 0) if is_number(flop) else ""


def _assumptions(record: Record) -> Html:
    shown = {}
    for name, found in part_of(record, "assumptions").items():
        if isinstance(found, Mapping):
            more = {key: each for key, each in found.items() if key not in ("value", "unit", "source")}
            told = [_plain(found.get("value")), found.get("unit"), *(f"{key} {_plain(x)}" for key, x in more.items())]
            source = tag("small", found.get("source"), class_="line")
            shown[str(name)] = join([", ".join(str(each) for each in told if each), source])
    return facts(shown)


def _plain(value: object) -> str:
    return f"{value:.4g}" if is_number(value) else str(value)
