"""A look at a running process as text for a terminal, and the words that its page uses as well.

    render_text(report) -> at most `MAX_LINES` lines: verdict, what was asked, threads, GIL, hypotheses, what is missing

A report is the record that ``paceline profile attach`` writes: its names come from a foreign process, so all of them
are cleaned before they reach a terminal.
"""

from __future__ import annotations

import math
import textwrap
import time
import unicodedata
from collections.abc import Iterable

from paceline.errors import printable
from paceline.report.page import MISSING, Record, is_number, items_of, part_of

MAX_LINES = 60
"""More would not stay on a screen."""

NUM_THREADS = 12
"""Threads that the terminal shows."""

IDLE = 0.005
"""A thread with less than this of its time on a CPU, ready for one, or with the GIL, did nothing."""

LABEL = 10
"""Width of the left column."""

CATEGORIES = {
    "allocator_churn": "allocator churn",
    "sync": "sync",
    "async_copy": "async copy",
    "launch": "launch",
    "launch_queue_full": "launch queue full",
    "collective": "collective",
    "compile": "compile",
    "gc": "garbage collection",
    "queue_wait": "queue wait",
    "lock": "lock",
    "gil_wait": "GIL wait",
    "sleep": "sleep",
    "io": "input and output",
    "compute": "compute",
    "dispatch": "dispatch",
    "autograd": "autograd",
    "python": "Python",
    "other": "other",
}
"""Names of categories for people."""

OUTCOMES = ("supported", "undecided", "refuted")


def render_text(report: Record, width: int = 100) -> str:
    """The report for a terminal.

    Args:
        report: `evidence.Report` as JSON.
        width: Columns of the terminal; at least 60 are used.
    """
    width = max(60, width)
    for num_threads in (NUM_THREADS, 8, 4):
        lines = _lines(report, width, num_threads)
        if len(lines) <= MAX_LINES:
            return "\n".join(lines)
    return "\n".join([*lines[: MAX_LINES - 1], "(more is in the report's page)"])


def _lines(report: Record, width: int, num_threads: int) -> list[str]:
    lines = textwrap.wrap(heading(report), width, max_lines=2, placeholder=" …")
    lines += ["", *_verdict(report, width), *_pipeline(report, width)]
    lines += ["", *_threads(report, width, num_threads), *_gil(report, width), *_critical(report, width)]
    lines += _stages(report, width)
    lines += ["", *_hypotheses(report, width), *_levels(report, width), *_notes(report, width)]
    return [line.rstrip() for line in lines]


# Words that the page shares


def clean(value: object) -> str:
    """A foreign text in one line; it cannot steer a terminal."""
    return printable(" ".join(str(value).split()))


INSIDE = {"create_block_mask", "create_block_mask_swa", "layers", "chunked_loss", "recompute"}
"""Stages whose time is in that of another."""

UNTOLD = 10.0
"""Above this a gain says little more than that one side hardly works: only its lower end is told."""


def figure_text(figure: object) -> str:
    """A figure with its interval: ``41 % [36-47]``, ``1.19x [1.15-1.23]``; without one where it was read."""
    if not isinstance(figure, dict) or not is_number(figure.get("value")):
        return MISSING
    unit, value = str(figure.get("unit", "frac")), float(figure["value"])
    ends = [float(end) for end in items_of(figure, "interval") if is_number(end)]
    scale, name = {"frac": (100.0, " %"), "per_s": (1.0, " a second"), "ratio": (1.0, "x"), "count": (1.0, "")}.get(
        unit, (1.0, f" {unit}")
    )
    if unit == "bytes":
        power = min(max(int(math.log(max(abs(value), 1.0), 1024)), 0), 4)
        scale, name = 1.0 / 1024**power, " " + ("B", "KiB", "MiB", "GiB", "TiB")[power]
    show = {"ratio": _two_digits, "per_s": short_rate}.get(unit, short)
    text = show(scale * value) + name
    if len(ends) != 2 or ends[0] == ends[1]:
        return text
    if unit == "ratio" and value > UNTOLD:
        return f"at least {short(ends[0])}x"
    return f"{text} [{show(scale * ends[0])}-{show(scale * ends[1])}]"


def short(value: object) -> str:
    """A number with two significant digits below 10, whole above."""
    if not is_number(value):
        return MISSING
    if abs(value) >= 9.95:
        return f"{value:,.0f}"
    if 0 < abs(value) < 0.01:
        return "<0.01" if value > 0 else ">-0.01"
    return f"{value:.2g}"


def _two_digits(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def share_text(value: object) -> str:
    """A share of time as ``41 %``; of a figure or a bare number."""
    value = value_of(value)
    return f"{short(100 * value)} %" if is_number(value) else MISSING


def value_of(figure: object) -> float | None:
    """The value of a figure, or of a bare number; None where there is none."""
    found = figure.get("value") if isinstance(figure, dict) else figure
    return float(found) if is_number(found) else None


def category_name(category: object) -> str:
    """A category for people."""
    return CATEGORIES.get(str(category)) or clean(category)


def heading(report: Record) -> str:
    """What was looked at, when and for how long."""
    pid = report.get("pid")
    command = clean(first(items_of(report, "processes"), "pid", pid).get("command", ""))
    text = f"process {pid}{f', {shortened(command, 60)}' if command else ''}: {short(report.get('seconds'))} s"
    if run := part_of(report, "run").get("name") or part_of(report, "run").get("folder"):
        text += f", run {clean(run)}"
    return f"{text}, {when(report)}"


def when(report: Record) -> str:
    """Begin of the look."""
    at = report.get("taken_at")
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
    except (TypeError, ValueError, OverflowError, OSError):
        return MISSING


def first(records: Iterable[Record], key: str, value: object) -> Record:
    """The first record with that value; empty if there is none."""
    return next((each for each in records if each.get(key) == value), {})


def title_of(report: Record, hypothesis: object) -> str:
    """The title of a hypothesis by its id."""
    return clean(first(items_of(report, "hypotheses"), "id", hypothesis).get("title") or hypothesis)


def verdict_title(report: Record) -> str:
    """The verdict in a few words."""
    conclusion = part_of(report, "conclusion")
    side, cause = clean(conclusion.get("side") or ""), conclusion.get("cause") or ""
    if cause:
        title = title_of(report, cause)
        text = f"{side}: {title[:1].lower() + title[1:] if title[1:2].islower() else title}" if side else title
    elif side in ("", "undecided"):
        text = "undecided"
    else:
        text = side if side == "balanced" else f"{side}, cause undecided"
    return text[:1].upper() + text[1:]


def next_text(record: Record) -> str:
    """The measurement that would decide, and what it takes."""
    text, seconds = clean(record.get("next") or ""), record.get("next_s")
    if not text or not is_number(seconds) or seconds <= 0:
        return text
    return f"{text} (about {short(seconds)} s)" if seconds < 600 else f"{text} (about {short(seconds / 60)} min)"


def ranked(report: Record) -> list[Record]:
    """Hypotheses: supported ones first, then undecided ones; of each, those that were asked and the highest scores."""

    def order(each: Record) -> tuple[int, bool, float]:
        outcome = str(each.get("outcome"))
        place = OUTCOMES.index(outcome) if outcome in OUTCOMES else len(OUTCOMES)
        return place, not each.get("asked"), -(value_of(each.get("score")) or 0.0)

    return sorted(items_of(report, "hypotheses"), key=order)


def strongest(hypothesis: Record, effect: str) -> Record | None:
    """The evidence of that effect with the most points; None if there is none."""
    found = [each for each in items_of(hypothesis, "evidence") if each.get("effect") == effect]
    return max(found, key=lambda each: abs(value_of(each.get("points")) or 0.0), default=None)


def evidence_text(evidence: Record) -> str:
    """What was seen, and what was wanted."""
    wanted, level = clean(evidence.get("wanted") or ""), part_of(evidence, "figure").get("level")
    remarks = [f"predicted {wanted}"] * bool(wanted) + [f"level {clean(level)}"] * (level is not None)
    return clean(evidence.get("says", "")) + (f" ({', '.join(remarks)})" if remarks else "")


def answer_text(hypothesis: Record) -> str:
    """How a hypothesis stands and by which evidence, in a sentence."""
    outcome = str(hypothesis.get("outcome"))
    effect = {"supported": "supports", "refuted": "refutes"}.get(outcome)
    if effect is not None:
        deciding = strongest(hypothesis, effect)
        return f"{outcome}: {evidence_text(deciding)}" if deciding else outcome
    missing = [clean(e.get("says", "")) for e in items_of(hypothesis, "evidence") if e.get("effect") == "missing"]
    parts = [f"missing: {missing[0]}"] if missing else []
    if upcoming := next_text(hypothesis):
        parts.append(f"measure next: {upcoming}")
    return "; ".join([outcome, *parts])


def is_idle(thread: Record, critical: Iterable[object]) -> bool:
    """Whether a thread did nothing that is worth a row."""
    shares = (value_of(thread.get(name)) or 0.0 for name in ("cpu", "runqueue", "gil"))
    return not thread.get("role") and thread.get("tid") not in critical and all(share < IDLE for share in shares)


def busiest_first(threads: Iterable[Record], critical: Iterable[object]) -> list[Record]:
    """Threads that the cause was looked for in, those of a role, and the others, the busiest of each first."""

    def order(thread: Record) -> tuple[bool, bool, str, float]:
        is_critical, role = thread.get("tid") in critical, str(thread.get("role") or "")
        return not is_critical, not role, _sortable(role), -(value_of(thread.get("cpu")) or 0.0)

    return sorted(threads, key=order)


def _sortable(role: str) -> str:
    """Targets before the drafter, as data flows."""
    return ("0" if role.startswith("target") else "1") + role.rjust(40) if role else ""


def thread_name(thread: Record) -> str:
    """Its role where that says more than its name."""
    name, role = clean(thread.get("name") or ""), clean(thread.get("role") or "")
    if role and role != name:
        return f"{role} ({name})" if name else role
    return name or clean(thread.get("comm") or "") or "thread"


def main_categories(thread: Record, most: int) -> list[tuple[str, float]]:
    """What a thread did most."""
    shares = ((name, value_of(figure) or 0.0) for name, figure in part_of(thread, "categories").items())
    return sorted((each for each in shares if each[1] >= IDLE), key=lambda each: -each[1])[:most]


def gils_of(report: Record) -> list[Record]:
    """The GIL of the process that was asked for, and those of its children, the most held first."""
    first = part_of(report, "gil")
    others = [gil for gil in items_of(report, "gils") if gil.get("pid") != first.get("pid")]
    return [*([first] if first else []), *sorted(others, key=lambda gil: -(value_of(gil.get("share")) or 0.0))]


def gil_text(gil: Record) -> str:
    """How much of the time the GIL was held, and what that is made of."""
    share = {"value": gil.get("share"), "interval": items_of(gil, "interval")}
    text = f"held {figure_text(share)} of the time"
    parts = [("at work", gil.get("cpu_share")), ("while its holder waited for a CPU", gil.get("runqueue_share"))]
    known = [f"{share_text(value)} {name}" for name, value in parts if is_number(value)]
    text += f": {', '.join(known)}" if known else ""
    failed = f", {gil['errors']} failed" if gil.get("errors") else ""
    return f"{text} ({gil.get('samples', 0)} samples{failed}, level {clean(gil.get('level', '2'))})"


def level_name(level: Record) -> str:
    """Number and name."""
    return f"{clean(level.get('id'))}, {clean(level.get('name'))}"


def disturbance_text(level: Record) -> str:
    """How long a level stopped the process; empty: not that it was seen."""
    of, parts = part_of(level, "disturbance"), []
    if not is_number(of.get("stop_frac")) or of["stop_frac"] <= 0:
        return ""
    parts.append(f"stopped it {share_text(of['stop_frac'])} of its window")
    if is_number(of.get("predicted_stop_frac")) and of["predicted_stop_frac"] > 0:
        parts.append(f"{share_text(of['predicted_stop_frac'])} predicted")
    if is_number(of.get("longest_stop_s")) and of["longest_stop_s"] > 0:
        parts.append(f"longest stop {short(1000 * of['longest_stop_s'])} ms")
    return ", ".join(parts)


def pipeline_parts(report: Record) -> dict[str, str]:
    """What is known of the queue and the sides of it, by name."""
    queue, pipeline = part_of(report, "queue"), part_of(report, "pipeline")
    if not queue:
        return {}
    can_make, can_take = pipeline.get("target_per_s"), pipeline.get("drafter_per_s")
    return {
        "targets": f"{queue.get('targets')} target{'s' if queue.get('targets') != 1 else ''}",
        "put_wait": figure_text(queue.get("put_wait")),
        "get_wait": figure_text(queue.get("get_wait")),
        "waiting": f"{short(queue.get('waiting'))} of {queue.get('depth')}",
        "rate": short_rate(queue.get("batches_per_s")),
        "can_make": short_rate(can_make) if is_number(can_make) else "",
        "can_take": short_rate(can_take) if is_number(can_take) else "",
    }


def short_rate(value: object) -> str:
    """How many a second, with three significant digits."""
    if not is_number(value):
        return MISSING
    return "0" if value == 0 else f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


# The terminal's parts


def gain_means(conclusion: Record) -> str:
    """What would have to happen for the verdict's gain."""
    sides = {
        "producer-bound": "if the slower side were infinitely fast",
        "consumer-bound": "if the slower side were infinitely fast",
        "variance": "if the queue were deep enough",
        "contradiction": "if the queue held nothing back",
    }
    return sides.get(str(conclusion.get("side")), "if the cause were removed")


def _verdict(report: Record, width: int) -> list[str]:
    conclusion = part_of(report, "conclusion")
    lines = _wrapped("VERDICT", conclusion.get("line") or verdict_title(report), width, most=5)
    if gain := conclusion.get("gain"):
        lines += _wrapped("", f"gain {gain_means(conclusion)}: {figure_text(gain)}", width)
    if conclusion.get("cause"):
        against = "; ".join(map(clean, items_of(conclusion, "against")))
        lines += _wrapped("", f"against it: {against or 'nothing that was seen'}", width, most=2)
    if upcoming := next_text(conclusion):
        lines += _wrapped("", f"measure next: {upcoming}", width, most=2)
    for hypothesis in ranked(report):
        if hypothesis.get("asked"):
            lines += _wrapped("ASKED", f"{title_of(report, hypothesis['id'])}: {answer_text(hypothesis)}", width, 2)
    return lines


def _pipeline(report: Record, width: int) -> list[str]:
    parts = pipeline_parts(report)
    if not parts:
        line = part_of(report, "pipeline").get("line")
        return _wrapped("PIPELINE", line, width, most=2) if line else []
    makes = f" (could make {parts['can_make']} a second)" if parts["can_make"] else ""
    takes = f" (could take {parts['can_take']} a second)" if parts["can_take"] else ""
    text = (
        f"{parts['targets']} waiting {parts['put_wait']}{makes} > queue {parts['waiting']} > "
        f"drafter waiting {parts['get_wait']}{takes}; {parts['rate']} batches a second"
    )
    return _wrapped("PIPELINE", text, width, most=3)


def _threads(report: Record, width: int, most: int) -> list[str]:
    critical, threads = items_of(report, "critical"), items_of(report, "threads")
    busy = busiest_first((each for each in threads if not is_idle(each, critical)), critical)
    has_several = len({thread.get("pid") for thread in busy}) > 1
    name_width = min(28, max(16, width - LABEL - 58))
    head = [_padded("name", name_width), "pid".rjust(8) if has_several else "", "tid".rjust(8)]
    head += [name.rjust(6) for name in ("CPU", "ready", "GIL")]
    rows = [" ".join([*filter(None, head), " mostly"])]
    for thread in busy[:most]:
        mark = " *" if thread.get("tid") in critical else ""
        cells = [_padded(shortened(thread_name(thread), name_width - len(mark)) + mark, name_width)]
        cells += [str(thread.get("pid")).rjust(8)] if has_several else []
        cells += [str(thread.get("tid")).rjust(8)]
        cells += [_share_cell(thread.get(name)).rjust(6) for name in ("cpu", "runqueue", "gil")]
        rows.append(" ".join([*cells, f" {_mostly(thread)}"]))
    hidden = [f"{len(busy) - most} less busy"] if len(busy) > most else []
    hidden += [f"{len(threads) - len(busy)} idle"] if len(threads) > len(busy) else []
    last = ["*: the cause was looked for in these"] if any(t.get("tid") in critical for t in busy[:most]) else []
    last += [f"and {' and '.join(hidden)} threads"] if hidden else []
    rows += ["; ".join(last)] if last else []
    return [_padded("THREADS" if i == 0 else "", LABEL) + shortened(row, width - LABEL) for i, row in enumerate(rows)]


def _share_cell(figure: object) -> str:
    value = value_of(figure)
    return MISSING if value is None else f"{100 * value:.0f} %"


def _mostly(thread: Record) -> str:
    """What a thread did most, or where it stood."""
    known = main_categories(thread, 2)
    if known:
        return ", ".join(f"{category_name(name)} {share_text(share)}" for name, share in known)
    if thread.get("syscall"):
        return f"in {clean(thread['syscall'])}"
    return ""


def _gil(report: Record, width: int) -> list[str]:
    lines: list[str] = []
    gils = gils_of(report)
    for gil in gils[:2]:
        of = f"process {gil.get('pid')}: " if len(gils) > 1 else ""
        lines += _wrapped("GIL", f"{of}{gil_text(gil)}", width, most=2)
        holders = [
            f"{clean(each.get('name'))} {figure_text({'value': each.get('share'), 'interval': each.get('interval')})}"
            for each in items_of(gil, "holders")[:3]
        ]
        if holders:
            where = next((clean(w) for each in items_of(gil, "holders") for w in items_of(each, "where")), "")
            text = f"by {', '.join(holders)}" + (f"; mostly in {where}" if where else "")
            lines += _wrapped("", text, width, most=2)
    return lines


def _critical(report: Record, width: int) -> list[str]:
    lines: list[str] = []
    critical = items_of(report, "critical")
    for thread in busiest_first(items_of(report, "threads"), critical):
        if thread.get("tid") not in critical or len(lines) >= 4:
            continue
        categories = part_of(thread, "categories")
        known = [f"{category_name(n)} {figure_text(categories[n])}" for n, _ in main_categories(thread, 5)]
        if known:
            label = "DOES" if not lines else ""
            lines += _wrapped(label, f"{thread_name(thread)}: {', '.join(known)}", width, most=2)
    return lines


def _stages(report: Record, width: int) -> list[str]:
    """The largest stages of each role, by share of its time; those inside others are left out."""
    lines: list[str] = []
    for record in items_of(report, "stages"):
        role, wall_s = clean(record.get("role") or ""), value_of(record.get("wall_s"))
        if not role.startswith(("target", "drafter")) or not wall_s:
            continue
        every = value_of(record.get("sampled_one_in")) or 1.0
        shares = {
            clean(name): (value_of(stage.get("total_ms")) or 0.0) * every / 1e3 / wall_s
            for name, stage in part_of(record, "stages").items()
            if isinstance(stage, dict) and name not in INSIDE
        }
        largest = sorted(((share, name) for name, share in shares.items() if share >= 0.01), reverse=True)[:5]
        if largest and len(lines) < 6:
            told = ", ".join(f"{name} {share_text(min(1.0, share))}" for share, name in largest)
            lines += _wrapped("STAGES" if not lines else "", f"{role}: {told}", width, most=1)
    return lines


def _hypotheses(report: Record, width: int) -> list[str]:
    lines: list[str] = []
    silent: list[str] = []
    known = ranked(report)
    id_width = min(24, max((len(clean(each.get("id"))) for each in known), default=0))
    for hypothesis in known:
        for_it, against = (strongest(hypothesis, effect) for effect in ("supports", "refutes"))
        name = clean(hypothesis.get("id"))
        if for_it is None and against is None and not hypothesis.get("asked"):
            silent.append(name)
            continue
        begin = f"{_padded(shortened(name, id_width), id_width)}  {clean(hypothesis.get('outcome')):<9}  "
        both = [("+", for_it), ("-", against)]
        shown = [f"{sign} {evidence_text(each)}" for sign, each in both if each is not None] or ["no evidence"]
        room = width - LABEL - len(begin)
        if sum(map(len, shown)) + 2 <= room:
            shown = ["  ".join(shown)]
        most = 2 if hypothesis.get("outcome") == "supported" else 1
        for text in shown:
            for line in textwrap.wrap(text, room, max_lines=most, placeholder=" …", subsequent_indent="  "):
                lines.append(_padded("" if lines else "CAUSES", LABEL) + begin + line)
                begin = " " * len(begin)
    if silent:
        text = f"undecided, nothing seen for or against: {', '.join(silent)}"
        lines += _wrapped("" if lines else "CAUSES", text, width, most=2)
    return lines


def _levels(report: Record, width: int) -> list[str]:
    lines: list[str] = []
    levels = items_of(report, "levels")
    for level in levels:
        if level.get("ok") and level.get("in_verdict", True):
            continue
        state = "not used in the verdict" if level.get("ok") else "missing"
        reason, fix = clean(level.get("reason") or ""), clean(level.get("fix") or "")
        text = f"level {level_name(level)}: {state}" + (f": {reason}" if reason else "")
        lines += _wrapped("WITHOUT" if not lines else "", text + (f"; what helps: {fix}" if fix else ""), width, most=3)
    told = [f"level {clean(e.get('id'))} {text}" for e in levels if (text := disturbance_text(e))]
    cpu_s = sum(value_of(part_of(each, "disturbance").get("tool_cpu_s")) or 0.0 for each in levels)
    told = told or ["no level stopped the process"]
    tools = [f"the tools took {short(cpu_s)} s of CPU"] if cpu_s > 0 else []
    return lines + _wrapped("DISTURBED", "; ".join([*told, *tools]), width, most=3)


def _notes(report: Record, width: int) -> list[str]:
    notes = items_of(report, "notes")
    shown = [line for note in notes[:2] for line in _wrapped("NOTE", note, width, most=2)]
    return shown + ([f"{'':{LABEL}}and {len(notes) - 2} more notes in the report"] if len(notes) > 2 else [])


# Columns


def _wrapped(label: str, text: object, width: int, most: int = 3) -> list[str]:
    """A text behind a label, in at most so many lines."""
    lines = textwrap.wrap(clean(text), width - LABEL, max_lines=most, placeholder=" …")
    return [_padded(label if i == 0 else "", LABEL) + line for i, line in enumerate(lines)]


def columns_of(text: str) -> int:
    """Columns that a text takes in a terminal."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in ("W", "F") else 1 for c in text
    )


def shortened(text: str, columns: int) -> str:
    """A text in at most so many columns, with a mark where it was cut."""
    if columns_of(text) <= columns:
        return text
    kept = text
    while kept and columns_of(kept) > columns - 1:
        kept = kept[: min(len(kept) - 1, columns - 1)]
    return f"{kept}…"


def _padded(text: str, columns: int) -> str:
    return text + " " * max(0, columns - columns_of(text))
