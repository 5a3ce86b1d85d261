"""The page of `paceline eval`: what a drafter is worth on some prompts, with its spread, and whether it is lossless."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.report.charts import bar_chart, stacked_bar
from paceline.report.page import (
    MISSING,
    Html,
    Record,
    bullets,
    code,
    columns,
    duration,
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
    times,
)

ABOUT_NGRAM = """\
N-gram drafting copies what followed when the last tokens stood in the text before. It needs no training: a drafter has
to beat it."""

GREEDY = """\
Answers are the target's likeliest tokens. A drafted answer has to be the plain one, token for token."""

DRAWN = """\
Tokens are drawn from the target's whole distribution at this temperature. Drafts are the drafter's likeliest tokens,
accepted with the probability that the target gives them. Plain and drafted decoding share the noise that draws each
position, so that a drafted answer has to be the plain one here as well, token for token."""

DRAWN_DRAFTS = """\
Tokens are drawn from the target's whole distribution at this temperature. The drafter draws its drafts too; the target
accepts each with the probability that keeps its own distribution. A drafted answer is another draw than the plain one,
so that the two cannot be compared token by token."""

LEFT_OUT = """\
Drafted tokens of which the drafter is not sure enough are left out before the target sees them; that changes speed and
lengths, and not what is said."""

ABOUT_DIFFERENCES = """\
Where two answers first differ, the target is asked how far its two best tokens are apart: within rounding the
difference is a tie, as verifying several tokens and decoding one add up in another order; else it is a fault."""


SERVED = """\
Measured at a vLLM server from outside, by its own counters, one request at a time; every prompt was read anew. What it
drafts with is what it was started with."""

SERVED_GREEDY = """\
Answers are the target's likeliest tokens. A drafted answer has to be that of the server without drafts, token for
token."""

SERVED_DRAWN = """\
Tokens are drawn from the target's whole distribution at this temperature. Two servers draw differently, so that their
answers cannot be compared."""

NARROW = """
@media (max-width: 40rem) {
  .scroll table { font-size: .8rem; line-height: 1.35; }
  .scroll thead th { font-size: .7rem; overflow-wrap: normal; }
  .scroll th + th, .scroll td { padding-left: .4rem; }
}
"""
"""Tables of six columns within the width of a phone."""


def evaluation_page(record: Record) -> str:
    """The page as one HTML file; what was not measured is left out, or shown as missing.

    Args:
        record: What ``paceline eval --json`` writes.
    """
    speedup = record.get("speedup")
    speed = f": {'slower, ' if is_number(speedup) and speedup < 1 else ''}{times(speedup)} the speed"
    return page(
        f"{_num(record, 'acceptance_length', 2)} tokens a forward" + (speed if is_number(speedup) else ""),
        f"{_text(record, 'draft')} drafting for {_text(record, 'target')}, on {_num(record, 'prompts')} prompts.",
        _headline(record),
        _warning(record),
        section("How far drafts are accepted", *_acceptance(record)),
        section("How fast", *_speed(record)),
        section("By length of context", _contexts(record)),
        section("By block size", *_sweep(record)),
        section("By concurrency", *_concurrency(record)),
        section("Where answers differ", *_differences(record)),
        section("How to read this", columns(_reading(record), _settings(record))),
        style=NARROW,
    )


def _text(record: Record, name: str, default: str = MISSING) -> str:
    value = record.get(name)
    return value if isinstance(value, str) and value else default


def _num(record: Record, name: str, digits: int = 0) -> str:
    return number(record.get(name), digits)


def _ratio(part: object, whole: object) -> float | None:
    return part / whole if is_number(part) and is_number(whole) and whole > 0 else None


def _interval(record: Record) -> str:
    ends = items_of(record, "acceptance_length_interval")
    return f"{number(ends[0], 2)} to {number(ends[1], 2)}" if len(ends) == 2 else ""


def _said(value: object, yes: str, no: str) -> str:
    return yes if value is True else no if value is False else MISSING


# What came out


def _headline(record: Record) -> Html:
    over_ngram, spread = record.get("speedup_over_ngram"), _interval(record)
    shown: list[tuple[object, str, object]] = [
        (
            _num(record, "acceptance_length", 2),
            "acceptance length",
            f"95 %: {spread}" if spread else "too few prompts for an interval",
        ),
        _speedup(record),
        _verdict(record),
    ]
    if is_number(over_ngram):
        slower = ": slower" if over_ngram < 1 else ""
        remark = f"{_num(record, 'ngram_tok_per_s', 1)} tok/s without any training"
        shown.append((times(over_ngram), f"the speed of n-gram drafts{slower}", remark))
    return figures(*shown)


def _speedup(record: Record) -> tuple[object, str, object]:
    speedup, rate = record.get("speedup"), _num(record, "speculative_tok_per_s", 1)
    if not is_number(speedup):
        return rate, "tokens a second", "not compared with plain decoding"
    slower = ": slower" if speedup < 1 else ""
    rates = f"{rate} against {_num(record, 'baseline_tok_per_s', 1)} tok/s"
    return times(speedup), f"the speed of plain decoding{slower}", rates


def _verdict(record: Record) -> tuple[object, str, object]:
    lossless = record.get("lossless")
    if lossless is True:
        return "yes", "lossless", "every answer is the plain one, token for token"
    if lossless is None and _draws_drafts(record):
        return "drawn", "lossless in distribution", "by its rule: drafts are drawn, so that answers cannot be compared"
    if lossless is None:
        return MISSING, "lossless", "answers were not compared"
    mismatches = record.get("mismatches")
    if is_number(mismatches) and not mismatches:
        return "ties", "lossless but for rounding", f"answers that differ at a numerical tie: {_num(record, 'ties')}"
    return (
        "no",
        "not lossless",
        f"answers that differ by a fault: {_num(record, 'mismatches')}, at a tie: {_num(record, 'ties')}",
    )


def _warning(record: Record) -> Html:
    told = [note(warning, is_warning=True) for warning in items_of(record, "warnings") if isinstance(warning, str)]
    return join([_fault(record), *told])


def _fault(record: Record) -> Html:
    mismatches = record.get("mismatches")
    if record.get("lossless") is not False or (is_number(mismatches) and not mismatches):
        return Html()
    told = (
        f" Answers that differ where the target was sure: {_num(record, 'mismatches')}. Something is wrong, see below."
    )
    return note(tag("strong", "Not lossless."), told, is_warning=True)


def _acceptance(record: Record) -> list[Html]:
    positions = {str(j): share for j, share in enumerate(items_of(record, "acceptance_per_position"), start=1)}
    counts = items_of(record, "accepted_counts")
    rounds = sum(count for count in counts if is_number(count))
    shares = {str(n): count / rounds if is_number(count) and rounds else None for n, count in enumerate(counts)}
    return [
        columns(
            bar_chart(
                "Accepted by position",
                positions,
                percent,
                whole=1.0,
                caption="Of the drafts whose forerunners were all accepted, the share that was accepted as well",
            )
            if positions
            else "",
            bar_chart(
                "Accepted drafts in a round",
                shares,
                percent,
                whole=1.0,
                caption=f"Share of the {number(rounds)} rounds; the target adds one token of its own to each",
            )
            if shares
            else "",
        )
    ] * bool(positions or shares) + _verified(record)


def _verified(record: Record) -> list[Html]:
    threshold = record.get("verify_threshold")
    if not is_number(threshold) or not threshold:
        return []
    said = (
        f"Verified were {_num(record, 'verified_per_round', 2)} drafted tokens a round, "
        f"{percent(record.get('verified_frac'))} of all: those before the first of which the drafter is sure to less "
        f"than {number(threshold, 2)}. Of the verified ones {percent(record.get('acceptance_rate'))} were accepted."
    )
    return [tag("p", said)]


# How fast


def _speed(record: Record) -> list[Html]:
    rows: list[list[object]] = []
    if is_number(record.get("baseline_tok_per_s")):
        rows.append(["plain", _num(record, "baseline_tok_per_s", 1), "1.00", times(1.0)])
    if is_number(record.get("ngram_tok_per_s")):
        length = _num(record, "ngram_acceptance_length", 2)
        rows.append(["n-gram drafts", _num(record, "ngram_tok_per_s", 1), length, times(record.get("ngram_speedup"))])
    own = ["drafter", _num(record, "speculative_tok_per_s", 1), _num(record, "acceptance_length", 2)]
    rows.append([tag("strong", cell) for cell in [*own, times(record.get("speedup"))]])
    caption = "Tokens a second over wall time, prompts included, one prompt at a time"
    caption += "; the ways took turns" if len(rows) > 1 else ""
    first, plain_first = part_of(record, "first_token_s"), part_of(record, "baseline_first_token_s")
    told = ""
    if first:
        median, longest = (duration(first.get(name)) for name in ("median", "longest"))
        told = f"First token after {median} in the median and {longest} at most"
        median, longest = (duration(plain_first.get(name)) for name in ("median", "longest"))
        told += f"; decoded plainly {median} and {longest}." if plain_first else "."
    draft, verify = record.get("draft_frac"), record.get("verify_frac")
    parts: dict[str, float] = {}
    if is_number(draft) and is_number(verify):
        seconds = _ratio(record.get("generated_tokens"), record.get("speculative_tok_per_s")) or 0.0
        shares = {"draft": draft, "verify": verify, "prompt": max(0.0, 1 - draft - verify)}
        parts = {name: share * seconds for name, share in shares.items()}
    return [
        columns(
            table(("", "tok/s", "acceptance length", "speed"), rows, caption),
            stacked_bar("Time of drafted decoding", parts) if parts else "",
        ),
        tag("p", told) if told else Html(),
        note(ABOUT_NGRAM) if is_number(record.get("ngram_tok_per_s")) else Html(),
    ]


def _contexts(record: Record) -> Html:
    rows = []
    for bucket in _records(record, "by_context"):
        end = bucket.get("end")
        span = f"{_num(bucket, 'start')} to {number(end - 1)}" if is_number(end) else f"{_num(bucket, 'start')} on"
        rates = _num(bucket, "baseline_tok_per_s", 1), _num(bucket, "tok_per_s", 1), times(bucket.get("speedup"))
        length = f"{_num(bucket, 'acceptance_length', 2)} ({_interval(bucket) or MISSING})"
        rows.append((span, _num(bucket, "rounds"), length, *rates))
    head = ("tokens of context", "rounds", "acceptance length (95 %)", "plain tok/s", "drafted tok/s", "speed")
    caption = "Prompt and answer before the round; reading the prompt is left out of these rates"
    return table(head, rows, caption) if rows else Html()


def _sweep(record: Record) -> list[Html]:
    rows, served = _records(record, "sweep"), record.get("serve_block_size")
    if not rows:
        return []
    shown: list[list[object]] = []
    for row in rows:
        cells: list[object] = [
            _num(row, "block_size"),
            _num(row, "num_predicted"),
            f"{_num(row, 'acceptance_length', 2)} ({_interval(row) or MISSING})",
            _num(row, "speculative_tok_per_s", 1),
            times(row.get("speedup")),
            _said(row.get("lossless"), "yes", "no"),
        ]
        shown.append([tag("strong", cell) for cell in cells] if row.get("block_size") == served else cells)
    drafted = next((row.get("num_predicted") for row in rows if row.get("block_size") == served), None)
    verified = number(drafted + 1 if is_number(drafted) else None)
    head = ("block size", "drafted", "acceptance length (95 %)", "tok/s", "speed", "identical")
    said = (
        f"To serve with: blocks of {number(served)}, the fewest within 3 % of the fastest. It was chosen on these "
        "prompts, one at a time: where many requests share the device, shorter blocks may be better."
    )
    commands = f"# vLLM\nnum_speculative_tokens={number(drafted)}\n# SGLang\n--speculative-num-draft-tokens {verified}"
    return [tag("p", said), table(head, shown, "Measured in turns, prompt by prompt"), code(commands, is_shell=False)]


def _concurrency(record: Record) -> list[Html]:
    rows = [
        (
            _num(row, "batch_size"),
            _num(row, "baseline_tok_per_s", 1),
            _num(row, "tok_per_s", 1),
            times(row.get("speedup")),
            _num(row, "acceptance_length", 2)
            + (f" ({_num(row, 'verified_per_round', 1)} verified)" if _leaves_unverified(record) else ""),
            f"{_num(row, 'mismatches')} / {_num(row, 'ties')}",
        )
        for row in _records(record, "concurrency")
    ]
    if not rows:
        return []
    head = ("prompts at a time", "plain tok/s", "drafted tok/s", "speed", "acceptance length", "mismatches / ties")
    caption = "Tokens a second of all prompts together, the last ones alone in their batch included"
    if all(row.get("mismatches") is None for row in _records(record, "concurrency")):
        said = "Answers were not compared with those decoded alone."
    elif _draws_drafts(record):
        said = "Every plain answer was compared with the one decoded alone; drafted ones are drawn anew."
    else:
        said = "Every answer was compared with the one decoded alone."
    return [tag("p", said), table(head, rows, caption)]


def _differences(record: Record) -> list[Html]:
    rows = [
        (
            _num(miss, "prompt"),
            _text(miss, "answer"),
            _num(miss, "position"),
            f"{miss['top2_gap']:.1e}" if is_number(miss.get("top2_gap")) else MISSING,
            _said(miss.get("tie"), "tie", tag("strong", "fault")),
        )
        for miss in _records(record, "first_mismatches")
    ]
    head = ("prompt", "answer", "token", "gap of the two best logits", "")
    return [tag("p", ABOUT_DIFFERENCES), table(head, rows)] if rows else []


# How to read it


def _reading(record: Record) -> Html:
    is_drawn = is_number(record.get("temperature")) and record["temperature"] > 0
    how = [DRAWN_DRAFTS if _draws_drafts(record) else DRAWN if is_drawn else GREEDY]
    if _leaves_unverified(record):
        how.append(LEFT_OUT)
    if _is_served(record):
        how = [SERVED, SERVED_DRAWN if is_drawn else SERVED_GREEDY]
    missing = part_of(record, "not_measured")
    return bullets(
        f"Acceptance length = {_text(record, 'acceptance_rule')}.",
        f"Interval = {_text(record, 'interval_rule')}. It tells how far other prompts of this kind may lie, not other "
        "kinds.",
        *how,
        *(f"Not measured: {name}; {_text(missing, name)}." for name in missing),
        f"{_num(record, 'ended_by_stop')} of {_num(record, 'prompts')} answers ended by themselves; "
        f"{_num(record, 'loops')} ran into the limit repeating themselves, which is easy to draft and flatters every "
        "way of drafting.",
        "Speeds are this machine's; acceptance lengths hardly depend on it.",
    )


def _settings(record: Record) -> Html:
    versions, temperature = part_of(record, "versions"), record.get("temperature")
    drawn = f"drawn at temperature {number(temperature, 2)}, seed {_num(record, 'seed')}"
    where: dict[str, object] = {
        "Block size": _num(record, "block_size"),
        "Device": f"{_text(record, 'device')}, {_text(record, 'dtype')}",
        "Kernel": _text(record, "kernel"),
    }
    if _is_served(record):
        each = "each answer's own counts" if record.get("acceptance_source") == "requests" else "/metrics"
        where = {
            "Server": _text(record, "url"),
            "Without drafts": _text(record, "baseline_url", "not given"),
            "Drafted": f"{_num(record, 'num_speculative_tokens')} tokens a verification at most",
            "Counted by": each,
        }
    return facts(
        {
            "Target": _text(record, "target")
            + (f", with the adapter {_text(record, 'adapter')}" if record.get("adapter") else ""),
            "Drafter": _text(record, "draft"),
            "Prompts": ", ".join(file for file in items_of(record, "prompt_files") if isinstance(file, str)) or MISSING,
            "Thinking": _text(record, "thinking"),
            "Answers": f"up to {_num(record, 'max_new_tokens')} tokens, "
            + (drawn if is_number(temperature) and temperature > 0 else "greedy"),
            "Tokens and rounds": f"{_num(record, 'generated_tokens')} tokens, {_num(record, 'rounds')} rounds",
            **where,
            "Versions": ", ".join(f"{name} {_text(versions, name)}" for name in versions) or MISSING,
        }
    )


def _draws_drafts(record: Record) -> bool:
    return record.get("draft_sampling") == "sampled"


def _leaves_unverified(record: Record) -> bool:
    threshold = record.get("verify_threshold")
    return (is_number(threshold) and threshold > 0) or record.get("verify") == "auto"


def _is_served(record: Record) -> bool:
    return record.get("engine") == "vllm"


def _records(record: Record, name: str) -> list[Mapping[str, Any]]:
    return [item for item in items_of(record, name) if isinstance(item, Mapping)]
