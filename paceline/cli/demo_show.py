"""What a person sees of the demo on the terminal: what was calibrated, the result, and two decodings side by side."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from paceline.cli.calibration import Calibration
    from paceline.plan.budget import DemoPlan

SHOWN_COSTS = (1, 2, 4, 6, 8, 12, 16)
DRAFTED_STYLE = "bold green"
PANEL_WIDTH = 44
MAX_REPLAY_S = 8.0
"""A slower answer is replayed faster, and says so."""


def print_calibration(console: Console, calibration: Calibration, plan: DemoPlan) -> None:
    """The measurements and what follows from them."""
    tried = ", ".join(f"{n}: {ms:.0f} ms" for n, ms in calibration.threads_tried.items())
    console.print(f"{calibration.threads} of {calibration.cores} cores decode fastest ({tried})", markup=False)
    console.print(f"decoding with {calibration.kernel}", markup=False)
    costs = [(k, calibration.verify_ms[k] / calibration.verify_ms[1]) for k in SHOWN_COSTS]
    console.print(
        f"verifying a block against one token ({calibration.verify_ms[1]:.1f} ms): "
        + ", ".join(f"{k} tokens {ratio:.2f}x" for k, ratio in costs[1:]),
        markup=False,
    )
    steps = ", ".join(f"{name} {ms:.0f} ms" for name, ms in calibration.dtypes_tried.items())
    console.print(
        f"a training step: {steps}; the target makes features of {calibration.target_tok_per_s:.0f} tokens a second",
        markup=False,
    )
    console.print(
        f"so: {plan.conversations} conversations, {plan.epochs} times over, in blocks of "
        f"{calibration.trained_block_size} (about {plan.train_s:.0f} s), then {plan.heldout + plan.unseen} prompts "
        f"decoded three ways (about {plan.evaluate_s:.0f} s)",
        markup=False,
    )


def print_result(console: Console, record: dict[str, Any]) -> None:
    """The three rows on both sets of prompts, and whether the text was the same."""
    if record["unseen"] is None:
        _print_set(console, "prompts that were not trained on", record)
        return
    _print_set(console, "templates of training, new values", record)
    _print_set(console, "templates and names never seen", record["unseen"])


def _print_set(console: Console, title: str, result: dict[str, Any]) -> None:
    left_out = f"{result['not_ended']} answers did not end, {result['loops']} of them loops"
    if not result["prompts"]:
        console.print(f"{title}: no answer ended, so there is nothing to count; {left_out}", markup=False)
        return
    table = Table(title=f"{title}: {result['prompts']} prompts")
    for heading in ("", "tok/s", "tokens a forward", "against plain"):
        table.add_column(heading, justify="right" if heading else "left")
    baseline = result["baseline_tok_per_s"]
    rows = (
        ("plain greedy, KV cache", baseline, 1.0),
        ("n-gram drafts, no training", result["ngram_tok_per_s"], result["ngram_acceptance_length"]),
        ("trained drafter", result["speculative_tok_per_s"], result["acceptance_length"]),
    )
    for name, rate, length in rows:
        table.add_row(name, f"{rate:.1f}", f"{length:.2f}", f"{rate / baseline:.2f}x")
    console.print(table)
    same = "every output identical"
    if not result["lossless"]:
        same = f"outputs DIFFER: {result['mismatches']} by fault, {result['ties']} by rounding"
    limits = result["limits"]
    console.print(f"{same}; {left_out}", markup=False)
    after = result["speculative_decode_tok_per_s"] / result["baseline_decode_tok_per_s"]
    console.print(f"the time to read the prompt counts in every row; without it the drafter is {after:.2f}x plain")
    console.print(
        f"{limits['draftable_frac']:.0%} of the answers' tokens are among those that can be drafted: a drafter that is "
        f"always right about them reaches {limits['acceptance_length']:.2f} tokens a forward",
        style="dim",
        markup=False,
    )


def replay(console: Console, samples: list[dict[str, Any]]) -> None:
    """Answers as they came, plain beside drafted, at the measured pace; on a terminal only."""
    if not console.is_terminal:
        return
    for sample in samples:
        if sample["is_loop"]:
            continue
        length = max(sample["plain_times_s"][-1], sample["speculative_times_s"][-1])
        pace = max(1.0, length / MAX_REPLAY_S)
        speed = "" if pace == 1.0 else f", shown {pace:.1f} times faster"
        console.print(f"\n[bold]{sample['set']}[/bold]: the answers as they came{speed}")
        console.print(sample["prompt"], style="dim", markup=False)
        started = time.monotonic()
        with Live(console=console, refresh_per_second=20) as live:
            while True:
                now = pace * (time.monotonic() - started)
                live.update(_side_by_side(sample, now))
                if now > length:
                    break
                time.sleep(0.03)


def _side_by_side(sample: dict[str, Any], now: float) -> Columns:
    answer = "".join(token["text"] for token in sample["tokens"])
    height = 2 + sum(1 + len(line) // (PANEL_WIDTH - 4) for line in answer.split("\n"))
    panels = []
    for name, key in (("plain", "plain_times_s"), ("drafted", "speculative_times_s")):
        text, times = Text(), sample[key]
        for token, at in zip(sample["tokens"], times, strict=True):
            if at > now:
                break
            drafted = name == "drafted" and token["origin"] == "drafted"
            text.append(token["text"], style=DRAFTED_STYLE if drafted else "")
        panels.append(Panel(text, title=f"{name} {min(now, times[-1]):.1f} s", width=PANEL_WIDTH, height=height))
    return Columns(panels)
