"""The demo's page: what the trained drafter is worth on this machine, how it came about, and how to read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.report.charts import Series, bar_chart, line_chart, stacked_bar
from paceline.report.page import (
    MISSING,
    Html,
    Record,
    badge,
    bullets,
    code,
    columns,
    duration,
    escape,
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
    quote,
    section,
    table,
    tag,
    times,
    token_key,
    token_text,
)

NUM_SHOWN_SAMPLES = 3
"""Prompts that stand open; the others are a click away."""

LEAD = """\
A drafter trained on this machine guesses the next tokens; the target checks a whole guess in one forward pass and keeps
what it would have said itself."""

ABOUT_NGRAM = """\
N-gram drafting guesses what followed when the last tokens stood in the text before. It needs no training: a drafter
that does not beat it is not worth its minutes."""

ABOUT_TILES = """\
Each grey tile costs one forward pass of the target. Decoded plainly, every token does; drafted, only those that were
not guessed."""

HELD_OUT = {True: "the templates of training with new values", False: "of training's source, not trained on"}
"""What held-out prompts are, with and without an unseen set beside them: a demo on one's own prompts has none."""

TILES = {"drafted": "drafted", "prefill": "first"}
"""How tokens of each origin are shown; those of the target's own forwards are plain."""

TILE_KEY = {
    "": "the target's own next token, one forward each",
    "drafted": "drafted and accepted, came along with that forward",
    "first": "first token, made while reading the prompt",
}

NEXT_STEPS = """\
# the same journey with your model and your prompts, on this machine
paceline demo --target DIR --prompts FILE

# or step by step: conversations -> tokens and loss mask
paceline prepare chats.jsonl --tokenizer MODEL --out data
# train; Ctrl-C stops it, the same command goes on
paceline train run.yaml
# acceptance length, losslessness and speed
paceline eval --target MODEL --draft runs/drafter --prompts prompts.jsonl
# the layout that engines load
paceline export runs/drafter --format zlab --out drafter"""

RUN_FILE = """\
# run.yaml: everything else has a default
target: {path: MODEL}
data: {path: data}"""


def demo_page(record: Record, metrics: Sequence[Record], samples: Sequence[Record]) -> str:
    """The page as one HTML file; parts that were not measured are left out, or shown as missing.

    Args:
        record: ``demo.json``: `Evaluation.as_dict()` and what the demo adds to it.
        metrics: Lines of ``metrics.jsonl``.
        samples: Answers token by token, each with `set`, `prompt`, `tokens` (`text` and `origin`: prefill, drafted or
            target), `plain_s`, `ngram_s`, `speculative_s`, `num_target_forwards` (of the drafted answer, prefill
            included), `num_tokens` and `is_loop`.
    """
    title, speedup = f"{_text(record, 'target', 'The target')}, drafted", record.get("speedup")
    if is_number(speedup):
        title += f": {'slower, ' if speedup < 1 else ''}{times(speedup)} the speed"
    return page(
        title,
        f"{LEAD} The text stays the same." if record.get("lossless") else LEAD,
        _headline(record),
        _warning(record),
        section("How fast", *_speed(record)),
        section("Side by side", *_side_by_side(samples, record.get("lossless") is not False)),
        section("What training did", *_training(record, metrics)),
        section("Where the time went", *_time(record, metrics)),
        section("What was calibrated", *_calibration(part_of(record, "calibration"))),
        section("How to read this", columns(_reading(record), _circumstances(record))),
        section("Your own model", code(NEXT_STEPS), code(RUN_FILE, is_shell=False)),
    )


def _text(record: Record, name: str, default: str = MISSING) -> str:
    value = record.get(name)
    return value if isinstance(value, str) and value else default


def _num(record: Record, name: str, digits: int = 0) -> str:
    return number(record.get(name), digits)


def _ratio(part: object, whole: object) -> float | None:
    return part / whole if is_number(part) and is_number(whole) and whole > 0 else None


def _total(values: Iterable[object]) -> float:
    return sum(value for value in values if is_number(value))


# What came out


def _headline(record: Record) -> Html:
    speedup, lossless, prompts = record.get("speedup"), record.get("lossless"), record.get("prompts")
    speed = "the speed of plain decoding" + (": slower" if is_number(speedup) and speedup < 1 else "")
    same, compared = MISSING, "outputs were not compared" if lossless is None else "outputs identical"
    different = _total([record.get("mismatches"), record.get("ties")])
    if is_number(prompts) and (lossless or different):
        same = f"{number(prompts - different)} of {number(prompts)}"
    if lossless is False:
        compared += ": not all"
    minutes = _ratio(part_of(record, "seconds").get("train"), 60)
    return figures(
        (
            times(speedup),
            speed,
            f"{_num(record, 'speculative_tok_per_s', 1)} against {_num(record, 'baseline_tok_per_s', 1)} tok/s",
        ),
        (_num(record, "acceptance_length", 2), "acceptance length", "tokens per forward pass of the target"),
        (same, compared, "token for token, to plain greedy decoding"),
        (
            f"{number(minutes, 1)} min",
            "of training",
            f"{_num(record, 'train_steps')} steps, {_num(record, 'train_tokens')} tokens",
        ),
    )


def _warning(record: Record) -> Html:
    found = []
    if record.get("lossless") is False:
        found.append(
            f" Of {_num(record, 'prompts')} held-out answers, {_num(record, 'mismatches')} differ by a mismatch, which "
            f"is a fault, and {_num(record, 'ties')} at a tie, where the target's two best tokens are equal within "
            "rounding."
        )
    if part_of(record, "unseen").get("lossless") is False:
        found.append(" Answers to unseen prompts differ.")
    headline = tag("strong", "Not lossless: not every drafted answer is the plain one.")
    return note(headline, *found, is_warning=True) if found else Html()


def _speed(record: Record) -> list[Html]:
    unseen = part_of(record, "unseen")
    said = [_compared("held-out", record)]
    tables = [_speed_table(f"Held-out prompts: {HELD_OUT[bool(unseen)]}", record)]
    if unseen:
        said.append(_compared("unseen", unseen))
        tables.append(_speed_table("Unseen prompts: templates and names that training never showed", unseen))
    return [*said, columns(*tables), note(ABOUT_NGRAM)]


def _compared(name: str, results: Record) -> Html:
    over_ngram = results.get("speedup_over_ngram")
    if not is_number(over_ngram):
        over_ngram = _ratio(results.get("speculative_tok_per_s"), results.get("ngram_tok_per_s"))
    ratios = {"plain decoding": results.get("speedup"), "n-gram drafting": over_ngram}
    said = " and ".join(f"{times(ratio)} the speed of {other}" for other, ratio in ratios.items() if is_number(ratio))
    slower = [other for other, ratio in ratios.items() if is_number(ratio) and ratio < 1]
    ending = f": slower than {' and '.join(slower)}." if slower else "."
    after = _ratio(results.get("speculative_decode_tok_per_s"), results.get("baseline_decode_tok_per_s"))
    apart = f" Reading the prompt left out of both, it is {times(after)} plain decoding." if is_number(after) else ""
    return tag("p", f"On {name} prompts the trained drafter decodes at {said}{ending}{apart}") if said else Html()


def _speed_table(caption: str, results: Record) -> Html:
    plain, ngram, ours = (results.get(f"{way}_tok_per_s") for way in ("baseline", "ngram", "speculative"))
    over_plain = _ratio(ngram, plain)
    counts = {"answers at the length limit": "not_ended", "repeating themselves": "loops"}
    told = [f"{name}: {number(results[key])}" for name, key in counts.items() if is_number(results.get(key))]
    rows: list[list[object]] = [
        ["plain greedy", number(plain, 1), "1.00", times(1.0)],
        ["n-gram, untrained", number(ngram, 1), _num(results, "ngram_acceptance_length", 2), times(over_plain)],
        ["trained drafter", number(ours, 1), _num(results, "acceptance_length", 2), times(results.get("speedup"))],
    ]
    rows[-1] = [tag("strong", cell) for cell in rows[-1]]
    caption = "; ".join([f"{caption}. Prompts: {_num(results, 'prompts')}", *told])
    return table(("", "tok/s", "acceptance length", "speed"), rows, caption)


def _side_by_side(samples: Sequence[Record], is_lossless: bool) -> list[Html]:
    if not samples:
        return []
    doubt = "" if is_lossless else " Both sides show the drafted answer: a plain one may differ, see above."
    shown = [_sample(place, sample) for place, sample in enumerate(samples, start=1)]
    rest = shown[NUM_SHOWN_SAMPLES:]
    more = tag("details", tag("summary", f"{len(rest)} more"), *rest) if rest else Html()
    return [tag("p", ABOUT_TILES + doubt), token_key(TILE_KEY), *shown[:NUM_SHOWN_SAMPLES], more]


def _sample(place: int, sample: Record) -> Html:
    plain_s, drafted_s, num_tokens = sample.get("plain_s"), sample.get("speculative_s"), sample.get("num_tokens")
    tokens = [
        (_text(token, "text", ""), TILES.get(_text(token, "origin"), ""))
        for token in items_of(sample, "tokens")
        if isinstance(token, Mapping)
    ]
    speed = f"{times(_ratio(plain_s, drafted_s))} the speed"
    if is_number(sample.get("ngram_s")):
        speed += f" (n-gram {times(_ratio(plain_s, sample['ngram_s']))})"
    forwards = _num(sample, "num_target_forwards")
    per_forward = number(_ratio(num_tokens, sample.get("num_target_forwards")), 2)
    plain = [(text, kind.replace("drafted", "")) for text, kind in tokens]
    heading, loop = f"{place}. {_text(sample, 'set', 'sample').capitalize()} prompt", Html()
    if sample.get("is_loop"):
        loop = tag("p", "A loop is easy to draft: its speed says little.")
    return join(
        [
            tag("h3", heading, badge("repeats itself") if loop else Html()),
            quote(_text(sample, "prompt")),
            loop,
            columns(
                _side("Plain", plain, duration(plain_s), f"{number(num_tokens)} tokens, one forward each"),
                _side("Drafted", tokens, duration(drafted_s), f"{forwards} forwards, {per_forward} tokens each", speed),
            ),
        ]
    )


def _side(name: str, tokens: Iterable[tuple[str, str]], *told: str) -> Html:
    return join([tag("p", tag("strong", name), tag("small", " · ".join(["", *told]))), token_text(tokens)])


# How it came about


def _training(record: Record, metrics: Sequence[Record]) -> list[Html]:
    if not metrics:
        return []

    def curve(name: str, key: str, is_faint: bool = False) -> Series:
        return Series(name, [(line.get("step"), line[key]) for line in metrics if key in line], is_faint)

    loss = curve("loss", "loss")
    estimate = curve("training batches, estimated", "acceptance_length_est", is_faint=True)
    held_out = curve("held-out conversations, measured", "validation_acceptance_length")
    lengths, told = [estimate, held_out], "Tokens per forward pass of the target"
    if not held_out.points:
        lengths, told = [estimate], f"{told}; nothing was measured on held-out conversations"
    told_loss = "How surprised the drafter is by the target's own tokens"
    positions = {str(j): share for j, share in enumerate(items_of(record, "acceptance_per_position"), start=1)}
    told_position = "Of the guesses that were right so far, the share that is right here as well"
    return [
        columns(
            line_chart("Loss", [loss], x_label="step", y_label="loss", caption=told_loss),
            line_chart("Acceptance length", lengths, x_label="step", y_label="tokens per forward", caption=told),
            bar_chart("Acceptance by position", positions, percent, whole=1.0, caption=told_position)
            if positions
            else "",
        )
    ]


def _time(record: Record, metrics: Sequence[Record]) -> list[Html]:
    seconds = part_of(record, "seconds")
    phases = {name: value for name, value in seconds.items() if name != "total"}
    decode_s = _ratio(record.get("generated_tokens"), record.get("speculative_tok_per_s"))
    draft, verify = record.get("draft_frac"), record.get("verify_frac")
    decoding = {}
    if decode_s and is_number(draft) and is_number(verify):
        shares = {"prefill": max(0.0, 1 - draft - verify), "draft": draft, "verify": verify}
        decoding = {name: share * decode_s for name, share in shares.items()}
    bars = [
        stacked_bar("The demo", phases, caption=f"{duration(seconds.get('total'))} in all") if phases else "",
        stacked_bar("Decoding with the drafter", decoding, caption="All held-out prompts") if decoding else "",
        _training_time(record, metrics) if metrics else "",
    ]
    return [columns(*bars)] if any(bars) else []


def _training_time(record: Record, metrics: Sequence[Record]) -> Html:
    """The drafter's time: steps as their rates tell, the waits in them, and what lies between steps."""
    steps = _total(_ratio(line.get("tokens"), line.get("tok_per_s")) for line in metrics)
    get_wait, put_wait = (_total(line.get(key) for line in metrics) for key in ("get_wait_s", "put_wait_s"))
    in_turn = record.get("layout") == "colocated"
    feature_name = "making features, in turn" if in_turn else "waiting for features (get)"
    parts = {"learning": max(0.0, steps - get_wait), feature_name: get_wait}
    all_in_all = part_of(record, "seconds").get("train")
    if is_number(all_in_all) and all_in_all > steps:
        parts["loading, measuring, saving"] = all_in_all - steps
    told = "" if in_turn else f"Meanwhile target threads waited {duration(put_wait)} for room in the queue (put)"
    return stacked_bar("Training, seen from the drafter", parts, caption=told)


def _calibration(calibration: Record) -> list[Html]:
    if not calibration:
        return []
    block = calibration.get("block_size")
    expected = {str(size): gain for size, gain in part_of(calibration, "expected_speedup_by_block").items()}
    costs = {int(n): cost for n, cost in part_of(calibration, "verify_ms").items() if str(n).isdecimal()}
    told, block_ms = f"{number(costs.get(1), 1)} ms for one token", costs.get(int(block)) if is_number(block) else None
    if is_number(block_ms):
        told += f", {number(block_ms, 1)} ms for the {number(block)} of a block"
    gain, best = expected.get(str(block)), max(filter(is_number, expected.values()), default=None)
    why = f", expected {times(gain)} ({'highest' if gain == best else f'highest: {times(best)}'})" if gain else ""
    chosen = {
        "Block size": f"{number(block)}{why}",
        "Trained for blocks of": _num(calibration, "trained_block_size"),
        "Compute": f"{_num(calibration, 'threads')} threads on {_num(calibration, 'cores')} cores, "
        f"{_text(calibration, 'layout')}",
        "Kernel": _text(calibration, "kernel"),
        "One draft": f"{_num(calibration, 'draft_ms', 1)} ms",
        "Features": f"{_num(calibration, 'target_tok_per_s')} tok/s",
        "One training step": duration(calibration.get("step_s")),
    }
    verify = [Series("verify", sorted(costs.items()))]
    return [
        tag("p", "Costs were measured on this machine, and what suits it best was chosen."),
        columns(
            line_chart(
                "Cost of one forward pass of the target",
                verify,
                x_label="tokens checked at once",
                y_label="milliseconds",
                from_zero=True,
                caption=told,
            ),
            bar_chart(
                "Expected speed by block size",
                expected,
                times,
                marked=str(block),
                caption="A block counts its first token, which is known already",
            ),
            _tried(calibration, "threads", "threads", "The same decoding; less is better"),
            _tried(calibration, "dtypes", "dtype", "A training step of the drafter; less is better"),
        ),
        facts(chosen),
        bullets(*(remark for remark in items_of(calibration, "notes") if isinstance(remark, str))),
    ]


def _tried(calibration: Record, plural: str, name: str, caption: str) -> Html:
    """Candidates and their costs, written as a list of records or as one mapping."""
    tried = calibration.get(f"{plural}_tried")
    if isinstance(tried, list):
        tried = {escape(one.get(name)): one.get("ms") for one in tried if isinstance(one, Mapping)}
    if not isinstance(tried, Mapping) or not tried:
        return Html()
    chosen = escape(calibration.get(name))
    return bar_chart(f"{plural.capitalize()} tried", tried, _milliseconds, marked=chosen, caption=caption)


def _milliseconds(value: object) -> str:
    return f"{number(value, 1)} ms"


# How far it carries


def _reading(record: Record) -> Html:
    has_unseen = bool(part_of(record, "unseen"))
    unseen = "Unseen prompts have templates and names that training never showed: how far the drafter carries."
    limits = [_limit(name, results) for name, results in (("held-out", record), ("unseen", part_of(record, "unseen")))]
    return bullets(
        f"Held-out prompts: {HELD_OUT[has_unseen]}. They show a narrow service, not generality.",
        unseen if has_unseen else "No prompts of another kind than training's were decoded in this run.",
        *filter(None, limits),
        f"Acceptance length = {_text(record, 'acceptance_rule', 'tokens committed / target forwards')}.",
        "Speed is generated tokens over wall seconds, prefill included, one prompt at a time.",
        f"{_num(record, 'ended_by_stop')} of {_num(record, 'prompts')} held-out answers ended by themselves, others at "
        f"{_num(record, 'max_new_tokens')} tokens. Answers that repeat themselves are easy to draft and flatter "
        "every way of drafting.",
        "Another processor has other costs: speeds are this machine's, acceptance lengths hardly depend on it.",
    )


def _limit(name: str, results: Record) -> str:
    """What bounds the drafter on a set: the tokens it can draft, and how often its first guess is right."""
    limits, positions = part_of(results, "limits"), items_of(results, "acceptance_per_position")
    if not is_number(limits.get("draftable_frac")):
        return ""
    first = f" The first guess of a block is right {percent(positions[0])} of the time." if positions else ""
    return (
        f"Of the {name} answers' tokens the drafter can draft {percent(limits['draftable_frac'])}, those of its "
        f"training texts: always right about them it would reach {number(limits.get('acceptance_length'), 2)} tokens "
        f"a forward.{first}"
    )


def _circumstances(record: Record) -> Html:
    machine, versions = part_of(record, "machine"), part_of(record, "versions")
    return facts(
        {
            "Target": _text(record, "target"),
            "Machine": f"{_text(machine, 'cpu')}, {_num(machine, 'cores')} cores, "
            f"{_num(machine, 'memory_gib', 1)} GiB, {_text(machine, 'os')}",
            "Used": f"{_num(record, 'threads')} threads, {_num(record, 'peak_memory_gib', 2)} GiB at the peak, "
            f"{_text(record, 'layout')}",
            "Trained on": f"{_num(record, 'train_conversations')} conversations, {_num(record, 'epochs')} epochs: "
            f"{_num(record, 'train_tokens')} tokens in {_num(record, 'train_steps')} steps",
            "Minutes asked for": _num(record, "minutes", 1),
            "Versions": ", ".join(f"{name} {_text(versions, name)}" for name in versions) or MISSING,
        }
    )
