"""What the demo prints."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from paceline.cli import demo_show


def result(**changes: Any) -> dict[str, Any]:
    return {
        "prompts": 40,
        "baseline_tok_per_s": 20.0,
        "ngram_tok_per_s": 30.0,
        "ngram_acceptance_length": 1.5,
        "speculative_tok_per_s": 42.0,
        "acceptance_length": 2.7,
        "baseline_decode_tok_per_s": 22.0,
        "speculative_decode_tok_per_s": 51.0,
        "lossless": True,
        "mismatches": 0,
        "ties": 0,
        "not_ended": 2,
        "loops": 1,
        "limits": {"draftable_frac": 0.77, "acceptance_length": 3.4},
        **changes,
    }


def printed(is_terminal: bool = False, width: int = 100) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=is_terminal, width=width, highlight=False), text


def test_three_rows_on_both_sets() -> None:
    """Plain, n-gram and trained, each with its speed against plain, on held-out and unseen prompts."""
    console, text = printed()
    unseen = result(prompts=24, speculative_tok_per_s=28.0, acceptance_length=1.6)
    demo_show.print_result(console, {**result(), "unseen": unseen})
    lines = text.getvalue()
    assert lines.count("plain greedy") == lines.count("n-gram drafts") == lines.count("trained drafter") == 2
    assert "2.10x" in lines and "1.50x" in lines and "1.40x" in lines and "24 prompts" in lines
    assert "without it the drafter is 2.32x plain" in " ".join(lines.split())
    assert "every output identical; 2 answers did not end, 1 of them loops" in " ".join(lines.split())


def test_own_prompts_have_one_set() -> None:
    """Without an unseen set its table is left out, and the other is not called one of templates."""
    console, text = printed()
    demo_show.print_result(console, {**result(), "unseen": None})
    assert text.getvalue().count("trained drafter") == 1 and "templates" not in text.getvalue()


def test_a_difference_is_not_hidden() -> None:
    """Outputs that differ are said to, with how many are rounding; no prompt that ended is no division by zero."""
    console, text = printed()
    demo_show.print_result(console, {**result(lossless=False, mismatches=1, ties=2), "unseen": None})
    assert "outputs DIFFER: 1 by fault, 2 by rounding" in " ".join(text.getvalue().split())
    nothing = result(prompts=0, baseline_tok_per_s=0.0, ngram_tok_per_s=0.0, speculative_tok_per_s=0.0)
    demo_show.print_result(console, {**nothing, "unseen": None})
    assert "no answer ended" in text.getvalue()


def sample(**changes: Any) -> dict[str, Any]:
    return {
        "set": "held-out, typical",
        "prompt": "say [bold]it[/bold]",
        "tokens": [
            {"text": "one", "origin": "prefill"},
            {"text": " two", "origin": "drafted"},
            {"text": " three", "origin": "target"},
        ],
        "plain_times_s": [0.01, 0.02, 0.03],
        "speculative_times_s": [0.01, 0.015, 0.015],
        "is_loop": False,
        **changes,
    }


def test_answers_are_replayed_on_a_terminal() -> None:
    """Both panels end with the whole answer, the prompt is shown as it is, and loops are left out."""
    console, text = printed(is_terminal=True)
    demo_show.replay(console, [sample(), sample(is_loop=True, prompt="round and round")])
    shown = text.getvalue()
    assert "plain" in shown and "drafted" in shown and "say [bold]it[/bold]" in shown
    assert "three" in shown and "round and round" not in shown


def test_nothing_is_replayed_into_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log gets no animation, and does not wait for one."""
    console, text = printed()
    monkeypatch.setattr(demo_show.time, "sleep", None)
    demo_show.replay(console, [sample()])
    assert text.getvalue() == ""


def test_a_long_answer_is_shown_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits a minute for a replay; it says how much faster it runs."""
    monkeypatch.setattr(demo_show, "MAX_REPLAY_S", 0.1)
    console, text = printed(is_terminal=True)
    demo_show.replay(console, [sample(plain_times_s=[0.1, 0.2, 0.4])])
    assert "shown 4.0 times faster" in text.getvalue()
