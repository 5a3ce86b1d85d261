"""The page of `paceline eval` tells what the record says, whole or in parts, and claims nothing else."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from paceline.report.evaluation import evaluation_page
from paceline.report.page import MISSING
from tests.unit.report.reader import HOSTILE, VISIBLE, check

RECORD: dict[str, Any] = {
    "target": "Toy-1B",
    "draft": "runs/toy",
    "prompt_files": ["chats.jsonl", "code.jsonl"],
    "thinking": "off",
    "device": "cpu",
    "dtype": "float32",
    "kernel": "lean",
    "block_size": 6,
    "prompts": 40,
    "max_new_tokens": 96,
    "temperature": 0.0,
    "acceptance_length": 2.31,
    "acceptance_length_error": 0.06,
    "acceptance_length_interval": [2.19, 2.43],
    "interval_rule": "95 % over prompts",
    "acceptance_rule": "tokens committed / target forwards",
    "acceptance_per_position": [0.51, 0.69, 0.71],
    "accepted_counts": [50, 30, 15, 5],
    "by_context": [
        {
            "start": 0, "end": 128, "rounds": 70, "acceptance_length": 2.4, "tok_per_s": 41.0,
            "baseline_tok_per_s": 20.0, "speedup": 2.05,
        },
        {
            "start": 131072, "end": None, "rounds": 30, "acceptance_length": 1.9, "tok_per_s": 30.0,
            "baseline_tok_per_s": None, "speedup": None,
        },
    ],
    "rounds": 100,
    "generated_tokens": 2055,
    "ended_by_stop": 37,
    "loops": 1,
    "baseline_tok_per_s": 17.2,
    "speculative_tok_per_s": 29.8,
    "speedup": 1.73,
    "ngram_tok_per_s": 23.8,
    "ngram_acceptance_length": 1.52,
    "ngram_speedup": 1.38,
    "speedup_over_ngram": 1.25,
    "baseline_first_token_s": {"median": 0.3, "longest": 0.9},
    "first_token_s": {"median": 0.31, "longest": 0.92},
    "draft_frac": 0.11,
    "verify_frac": 0.78,
    "lossless": True,
    "mismatches": 0,
    "ties": 0,
    "first_mismatches": [],
    "versions": {"paceline": "0.1.0", "torch": "2.13.0"},
    "serve_block_size": 6,
    "sweep": [
        {
            "block_size": size, "num_predicted": size - 1, "acceptance_length": 2.0 + size / 20,
            "acceptance_length_interval": [2.0, 2.5], "speculative_tok_per_s": 20.0 + size, "speedup": 1.2 + size / 10,
            "lossless": True,
        }
        for size in (4, 6)
    ],
    "concurrency": [
        {
            "batch_size": size, "baseline_tok_per_s": 17.0 * size, "tok_per_s": 26.0 * size, "speedup": 1.53,
            "acceptance_length": 2.31, "mismatches": 0, "ties": size - 1,
        }
        for size in (1, 2)
    ],
}  # fmt: skip


def shown(**changes: Any) -> str:
    """Text of the page, after the checks that hold for every page."""
    return check(evaluation_page({**RECORD, **changes})).text()


def test_the_verdict_comes_first() -> None:
    """Length with its interval, speed and losslessness stand before charts, tables and definitions."""
    text = shown()
    story = [
        "2.31 tokens a forward: 1.73× the speed",
        "runs/toy drafting for Toy-1B, on 40 prompts",
        "95 %: 2.19 to 2.43",
        "29.8 against 17.2 tok/s",
        "every answer is the plain one, token for token",
        "1.25×",  # over n-gram drafts
        "Accepted by position",
        "Share of the 100 rounds",
        "1.38×",
        "First token after 0.31 s in the median and 0.92 s at most",
        "131,072 on",
        "blocks of 6, the fewest within 3 % of the fastest",
        "num_speculative_tokens=5",
        "--speculative-num-draft-tokens 6",
        "0 / 1",  # ties of two prompts at a time
        "Acceptance length = tokens committed / target forwards.",
        "chats.jsonl, code.jsonl",
        "torch 2.13.0",
    ]
    places = [text.find(words) for words in story]
    assert -1 not in places and places == sorted(places)
    assert "Where answers differ" not in text and "Not lossless" not in text


def test_shares_of_rounds_are_of_all_rounds() -> None:
    """The histogram's bars are shares, the first of rounds that accepted nothing."""
    text = shown()
    assert "050%" in text and "35%" in text


def test_faults_come_first_and_ties_are_no_faults() -> None:
    """A mismatch gives a warning and its row; a tie is told with its gap and called rounding."""
    fault = {"prompt": 7, "answer": "speculative", "position": 12, "top2_gap": 0.5, "tie": False}
    tie = {"prompt": 9, "answer": "ngram", "position": 3, "top2_gap": 2e-5, "tie": True}
    page = evaluation_page({**RECORD, "lossless": False, "mismatches": 1, "ties": 1, "first_mismatches": [fault, tie]})
    text = check(page).text()
    assert page.index("note warning") < page.index("<h2>")
    assert "differ by a fault: 1, at a tie: 1" in text and "not lossless" in text
    assert "7speculative125.0e-01fault" in text.replace("\n", "") and "9ngram32.0e-05tie" in text.replace("\n", "")
    text = shown(lossless=False, mismatches=0, ties=1, first_mismatches=[tie])
    assert "lossless but for rounding" in text and "Not lossless" not in text


def test_a_slower_drafter_is_called_slower() -> None:
    """Below plain speed, or below n-gram drafts, the page says slower."""
    text = shown(speedup=0.996, speedup_over_ngram=0.7)
    assert "2.31 tokens a forward: slower, 0.99× the speed" in text
    assert "the speed of plain decoding: slower" in text and "the speed of n-gram drafts: slower" in text
    assert "slower" not in shown()


def test_draws_are_explained() -> None:
    """At a temperature the page says how tokens were drawn; greedy answers are called so."""
    text = shown(temperature=0.8, seed=4)
    assert "drawn at temperature 0.80, seed 4" in text and "share the noise" in text
    assert "greedy" in shown() and "share the noise" not in shown()


@pytest.mark.parametrize(
    ("missing", "gone"),
    [
        ({"sweep": []}, "By block size"),
        ({"concurrency": None}, "By concurrency"),
        ({"by_context": []}, "By length of context"),
        ({"accepted_counts": []}, "Accepted drafts in a round"),
        ({"acceptance_per_position": []}, "Accepted by position"),
        ({"draft_frac": None}, "Time of drafted decoding"),
        ({"ngram_tok_per_s": None, "speedup_over_ngram": None}, "n-gram"),
        ({"first_token_s": None}, "First token"),
        ({"acceptance_length_interval": None}, "95 %: 2.19"),
    ],
)
def test_what_was_not_measured_is_left_out(missing: dict[str, Any], gone: str) -> None:
    """A part without its figures leaves no heading behind."""
    assert gone in shown() and gone.lower() not in shown(**missing).lower()


def test_an_empty_record_is_a_page() -> None:
    """With nothing at all, the page stands, with dashes."""
    assert MISSING in check(evaluation_page({})).text()


def _poisoned(value: Any, poison: Any) -> Any:
    if isinstance(value, dict):
        return {key: _poisoned(item, poison) for key, item in value.items()}
    if isinstance(value, list):
        return [_poisoned(item, poison) for item in value]
    return copy.copy(poison)


@pytest.mark.parametrize("poison", [HOSTILE, math.nan, math.inf, None, -1, 0, 10**400, [], {}, True])
def test_no_value_breaks_the_page(poison: Any) -> None:
    """Whatever stands in the record, the page is whole, and foreign text is text."""
    text = check(evaluation_page(_poisoned(RECORD, poison))).text()
    assert VISIBLE in text or poison != HOSTILE


@pytest.mark.parametrize("key", RECORD)
def test_any_field_may_be_missing_or_of_another_type(key: str) -> None:
    """A record without a field, or with text or a list there, still makes a page."""
    without = {name: value for name, value in RECORD.items() if name != key}
    for record in (without, {**RECORD, key: HOSTILE}, {**RECORD, key: [HOSTILE]}, {**RECORD, key: {HOSTILE: HOSTILE}}):
        check(evaluation_page(record))


SERVED: dict[str, Any] = {
    "engine": "vllm",
    "url": "http://here:8000",
    "target": "Toy-1B",
    "draft": "the drafter at http://here:8000",
    "prompts": 40,
    "max_new_tokens": 96,
    "temperature": 0.0,
    "num_speculative_tokens": 3,
    "acceptance_length": 2.31,
    "acceptance_rule": "1 + accepted / verifications",
    "acceptance_source": "counters",
    "acceptance_per_position": [0.51, 0.69, 0.71],
    "accepted_counts": [50, 30, 15, 5],
    "rounds": 100,
    "speculative_tok_per_s": 29.8,
    "first_token_s": {"median": 0.31, "longest": 0.92},
    "speedup": None,
    "lossless": None,
    "mismatches": None,
    "not_measured": {"speedup": "needs --baseline-url"},
    "warnings": ["others were there"],
}


def test_a_server_measured_alone_claims_no_speedup() -> None:
    """What a server does not tell has no row; what was not compared is not called lossless, and the reason is there."""
    text = check(evaluation_page(SERVED)).text()
    assert "2.31 tokens a forward" in text and "the speed" not in text.split("How far")[0]
    assert "not compared with plain decoding" in text and "answers were not compared" in text
    assert "Not measured: speedup; needs --baseline-url." in text and "others were there" in text
    assert "http://here:8000" in text and "not given" in text and "/metrics" in text
    assert "decoded plainly" not in text and "took turns" not in text and "share the noise" not in text
    assert "Kernel" not in text and "Block size" not in text


def test_a_server_beside_one_without_drafts_is_compared() -> None:
    """With a second server speedup, both first tokens and the load are shown."""
    load = {"batch_size": 4, "tok_per_s": 50.0, "baseline_tok_per_s": 20.0, "speedup": 2.5, "mismatches": 0, "ties": 0}
    found = {"speedup": 1.7, "baseline_tok_per_s": 17.5, "lossless": True, "baseline_url": "http://there:1"}
    first = {"baseline_first_token_s": {"median": 0.3, "longest": 0.9}}
    text = check(evaluation_page(SERVED | found | first | {"concurrency": [load]})).text()
    assert "1.70×" in text and "29.8 against 17.5 tok/s" in text and "http://there:1" in text
    assert "decoded plainly 0.30 s and 0.90 s" in text and "Every answer was compared" in text
    alone = load | {"baseline_tok_per_s": None, "speedup": None, "mismatches": None, "ties": None}
    assert "Answers were not compared with" in check(evaluation_page(SERVED | {"concurrency": [alone]})).text()


@pytest.mark.parametrize("key", SERVED)
def test_any_field_of_a_server_may_be_missing_or_of_another_type(key: str) -> None:
    """No field has to be there, nor to be what it should be."""
    for record in ({k: v for k, v in SERVED.items() if k != key}, SERVED | {key: "x"}, SERVED | {key: [{}]}):
        check(evaluation_page(record))


def test_tables_keep_within_a_narrow_screen() -> None:
    """Tables of six columns have rules of their own for phones."""
    assert "@media (max-width: 40rem)" in evaluation_page(RECORD)
