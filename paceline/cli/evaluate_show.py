"""What `paceline eval` prints: a line a prompt, the tables at the end, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.eval.decode import Decoded
    from paceline.eval.evaluate import Evaluation, PromptResult


def print_prompt(console: Console, result: PromptResult, so_far: Evaluation, num_prompts: int) -> None:
    """How one prompt went."""
    same = "identical" if so_far.is_compared else "drawn anew"
    same = ", ".join(f"{miss.answer} differs at token {miss.position}" for miss in result.differences) or same
    copied = f"n-gram drafts {result.ngram.seconds:.2f} s  " if result.ngram else ""
    console.print(
        f"{len(so_far.results):>4}/{num_prompts}  {len(result.speculative.tokens):>4} tokens  "
        f"plain {result.plain.seconds:.2f} s  {copied}drafted {result.speculative.seconds:.2f} s  "
        f"acceptance length {result.speculative.acceptance.length:.2f}  {same}"
    )


def print_evaluation(console: Console, record: dict[str, Any]) -> None:
    """The result as tables, with the definition of what they say."""
    adapted = f" with {record['adapter']}" if record.get("adapter") else ""
    _print_table(console, f"{record['draft']} drafting for {record['target']}{adapted}", (), _main_rows(record))
    contexts = [_context_row(bucket) for bucket in record["by_context"]]
    if len(contexts) > 1:
        names = ("context", "prompts", "rounds", "acceptance length", "plain tok/s", "drafted tok/s", "speedup")
        _print_table(console, "By tokens of context, prefill left out", names, contexts)
    if "sweep" in record:
        head = ("block size", "drafted", "acceptance length", "tok/s", "speedup", "identical")
        _print_table(console, "By block size", head, [_sweep_row(row) for row in record["sweep"]])
        console.print(serving_line(record))
    if "concurrency" in record:
        head = ("prompts at a time", "plain tok/s", "drafted tok/s", "speedup", "acceptance length", "other answers")
        leaves_out = record["verify_threshold"] or record["verify"] == "auto"
        rows = [_concurrency_row(row, leaves_out) for row in record["concurrency"]]
        _print_table(console, "By concurrency", head, rows)
    console.print(f"acceptance length = {record['acceptance_rule']}", style="dim", markup=False)
    console.print(f"interval = {record['interval_rule']}", style="dim", markup=False)
    if record["draft_sampling"] == "sampled":
        console.print(record["lossless_rule"], style="dim", markup=False)
    elif record["temperature"]:
        console.print(
            "drawn from the target's whole distribution; drafts are the drafter's likeliest tokens. Plain and drafted "
            "decoding share the noise of every position, so that their tokens have to be the same",
            style="dim",
            markup=False,
        )
    for miss in record["first_mismatches"]:
        console.print(
            f"prompt {miss['prompt']}, {miss['answer']}: token {miss['position']} differs; the two best logits "
            f"are {miss['top2_gap']:.2e} apart: {'rounding' if miss['tie'] else 'a fault'}"
        )


def print_served_prompt(
    console: Console, drafted: Decoded, plain: Decoded | None, number: int, num_prompts: int, is_greedy: bool
) -> None:
    """How one prompt went at a server."""
    same = ""
    if plain is not None and is_greedy:
        same = "  identical" if plain.tokens == drafted.tokens else "  ANOTHER ANSWER"
    console.print(
        f"{number + 1:>4}/{num_prompts}  {len(drafted.tokens):>4} tokens  "
        + (f"plain {plain.seconds:.2f} s  " if plain is not None else "")
        + f"drafted {drafted.seconds:.2f} s, first token {drafted.prefill_s:.3f} s  "
        f"acceptance length {drafted.acceptance.length:.2f}{same}"
    )


def print_load(console: Console, row: dict[str, Any]) -> None:
    """How one number of requests at a time went."""
    plain = row["baseline_tok_per_s"]
    console.print(
        f"{row['batch_size']} at a time: "
        + (f"plain {plain:.1f} tok/s, " if plain is not None else "")
        + f"drafted {row['tok_per_s']:.1f} tok/s"
    )


def print_served(console: Console, record: dict[str, Any]) -> None:
    """What a server gave as tables, with the definition of what they say, and what was not measured."""
    _print_table(console, f"{record['draft']}, for {record['target']}", (), _served_rows(record))
    if "concurrency" in record:
        head = ("at a time", "plain tok/s", "drafted tok/s", "speedup", "first token", "acceptance", "other answers")
        _print_table(console, "By concurrency", head, [_load_row(row) for row in record["concurrency"]])
    console.print(f"acceptance length = {record['acceptance_rule']}", style="dim", markup=False)
    console.print(f"committed = {record['committed_rule']}", style="dim", markup=False)
    console.print(f"interval = {record['interval_rule']}", style="dim", markup=False)
    for name, reason in record["not_measured"].items():
        console.print(f"not measured: {name}; {reason}", markup=False)
    for warning in record["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    for miss in record["first_mismatches"]:
        gap, is_tie = miss["top2_gap"], miss["tie"]
        told = "the server does not tell how sure it is there: taken for a fault"
        if gap is not None:
            told = f"the two best logits are {gap:.2e} apart: {'rounding' if is_tie else 'a fault'}"
        console.print(f"prompt {miss['prompt']}: token {miss['position']} differs; {told}")


def _served_rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    counts, rounds, first, each = (
        record[key] for key in ("accepted_counts", "rounds", "first_token_s", "request_tok_per_s")
    )
    decoding = f"temperature {record['temperature']:g}, seed {record['seed']}" if record["temperature"] else "greedy"
    rows = {
        "prompts": f"{record['prompts']}, up to {record['max_new_tokens']} tokens each, {decoding}; "
        f"{record['ended_by_stop']} ended by a stop token, {record['loops']} by the limit in a loop",
        "acceptance length": f"{length_with_interval(record)} with {record['num_speculative_tokens']} tokens drafted",
        "committed": "not known, as others used the server"
        if record["committed_per_round"] is None
        else f"{record['committed_per_round']:.3f} tokens a verification",
        "acceptance by position": " ".join(f"{share:.2f}" for share in record["acceptance_per_position"]),
        "rounds by accepted drafts": "  ".join(f"{n}: {count / rounds:.0%}" for n, count in enumerate(counts)),
        "counted by": "each answer's own counts" if record["acceptance_source"] == "requests" else "/metrics",
    }
    if record["speedup"] is not None:
        rows["plain"] = f"{record['baseline_tok_per_s']:.1f} tok/s"
    rows |= {
        "speculative": f"{record['speculative_tok_per_s']:.1f} tok/s; a request {each['median']:.1f} in the median, "
        f"{each['slowest']:.1f} at least",
        "speedup": "not measured" if record["speedup"] is None else f"{record['speedup']:.2f}x",
        "first token": f"{first['median']:.3f} s in the median, {first['longest']:.3f} s at most",
    }
    if first_plain := record.get("baseline_first_token_s"):
        rows["first token"] += f" (plain: {first_plain['median']:.3f} and {first_plain['longest']:.3f} s)"
    rows["identical outputs"] = _served_verdict(record)
    return list(rows.items())


def _served_verdict(record: dict[str, Any]) -> str:
    if record["lossless"] is None:
        return "not measured"
    return "yes" if record["lossless"] else f"no: {record['mismatches']} mismatches, {record['ties']} numeric ties"


def _load_row(row: dict[str, Any]) -> tuple[str, ...]:
    plain, speedup, length = row["baseline_tok_per_s"], row["speedup"], row["acceptance_length"]
    others = f"{row['mismatches']} mismatches, {row['ties']} ties" if row["mismatches"] or row["ties"] else "none"
    return (
        str(row["batch_size"]),
        "" if plain is None else f"{plain:.1f}",
        f"{row['tok_per_s']:.1f}",
        "" if speedup is None else f"{speedup:.2f}x",
        f"{row['first_token_s']['median']:.3f} s",
        "" if length is None else f"{length:.3f}",
        "not compared" if row["mismatches"] is None else others,
    )


def serving_line(record: dict[str, Any]) -> str:
    """How many tokens an engine should draft, as each engine counts them."""
    num_drafted = next(
        row["num_predicted"] for row in record["sweep"] if row["block_size"] == record["serve_block_size"]
    )
    return (
        f"serve with blocks of {record['serve_block_size']}: num_speculative_tokens={num_drafted} for vLLM, "
        f"--speculative-num-draft-tokens {num_drafted + 1} for SGLang (the fewest within 3 % of the "
        "fastest, one prompt at a time, chosen on these prompts)"
    )


def length_with_interval(record: dict[str, Any]) -> str:
    """1.234 (95 %: 1.200 to 1.268)."""
    interval = record["acceptance_length_interval"]
    spread = f"95 %: {interval[0]:.3f} to {interval[1]:.3f}" if interval else "no interval from so few prompts"
    return f"{record['acceptance_length']:.3f} ({spread})"


def _main_rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    verdict = "yes" if record["lossless"] else f"no: {record['mismatches']} mismatches, {record['ties']} numeric ties"
    if record["lossless"] is None:
        verdict = "not compared: lossless in distribution"
    counts, rounds = record["accepted_counts"], record["rounds"] or 1
    decoding = f"temperature {record['temperature']:g}, seed {record['seed']}" if record["temperature"] else "greedy"
    rows = {
        "prompts": f"{record['prompts']}, up to {record['max_new_tokens']} tokens each, {decoding}; "
        f"{record['ended_by_stop']} ended by a stop token, {record['loops']} by the limit in a loop",
        "acceptance length": f"{length_with_interval(record)} with blocks of {record['block_size']}",
        "acceptance by position": " ".join(f"{share:.2f}" for share in record["acceptance_per_position"]),
        "rounds by accepted drafts": "  ".join(f"{n}: {count / rounds:.0%}" for n, count in enumerate(counts)),
        "plain": f"{record['baseline_tok_per_s']:.1f} tok/s",
    }
    if record["verify_threshold"]:
        rows["verified"] = (
            f"{record['verified_per_round']:.2f} drafted tokens a round, {record['verified_frac']:.0%} of all, of a "
            f"confidence of {record['verify_threshold']:g} at least; {record['acceptance_rate']:.0%} of them accepted"
        )
    if "ngram_speedup" in record:
        rows["n-gram drafts"] = (
            f"{record['ngram_tok_per_s']:.1f} tok/s, acceptance length {record['ngram_acceptance_length']:.3f}, "
            f"speedup {record['ngram_speedup']:.2f}x"
        )
    first, first_plain = record["first_token_s"], record["baseline_first_token_s"]
    rows |= {
        "speculative": f"{record['speculative_tok_per_s']:.1f} tok/s, {record['draft_frac']:.0%} of the time drafting, "
        f"{record['verify_frac']:.0%} verifying",
        "speedup": f"{record['speedup']:.2f}x"
        + (f", {record['speedup_over_ngram']:.2f}x over n-gram drafts" if "ngram_speedup" in record else ""),
        "first token": f"{first['median']:.3f} s in the median, {first['longest']:.3f} s at most "
        f"(plain: {first_plain['median']:.3f} and {first_plain['longest']:.3f} s)",
        "identical outputs": verdict,
    }
    return list(rows.items())


def _context_row(bucket: dict[str, Any]) -> tuple[str, ...]:
    span = f"{bucket['start']} on" if bucket["end"] is None else f"{bucket['start']} to {bucket['end'] - 1}"
    plain = [f"{bucket['baseline_tok_per_s']:.1f}", f"{bucket['speedup']:.2f}x"] if bucket["speedup"] else ["", ""]
    length, interval = f"{bucket['acceptance_length']:.3f}", bucket["acceptance_length_interval"]
    length += f" (95 %: {interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
    counts = str(bucket["prompts"]), str(bucket["rounds"])
    return span, *counts, length, plain[0], f"{bucket['tok_per_s']:.1f}", plain[1]


def _sweep_row(row: dict[str, Any]) -> tuple[str, ...]:
    rates = length_with_interval(row), f"{row['speculative_tok_per_s']:.1f}", f"{row['speedup']:.2f}x"
    same = {True: "yes", False: "no", None: "not compared"}[row["lossless"]]
    return str(row["block_size"]), str(row["num_predicted"]), *rates, same


def _concurrency_row(row: dict[str, Any], leaves_out: bool) -> tuple[str, ...]:
    others = f"{row['mismatches']} mismatches, {row['ties']} ties" if row["mismatches"] or row["ties"] else "none"
    rates = f"{row['baseline_tok_per_s']:.1f}", f"{row['tok_per_s']:.1f}", f"{row['speedup']:.2f}x"
    length = f"{row['acceptance_length']:.3f}"
    if leaves_out:
        length += f" ({row['acceptance_rate']:.0%} of {row['verified_per_round']:.2f} verified)"
    return str(row["batch_size"]), *rates, length, others


def _print_table(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), show_header=bool(head))
    for name in head:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
