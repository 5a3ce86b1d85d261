"""The demo's page tells what the record says, whole or in parts, and claims nothing else."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from paceline.report.demo import demo_page
from paceline.report.page import MISSING
from tests.unit.report.reader import HOSTILE, VISIBLE, check

RECORD: dict[str, Any] = {
    "target": "Toy-1B",
    "block_size": 6,
    "prompts": 40,
    "max_new_tokens": 96,
    "acceptance_length": 2.31,
    "acceptance_rule": "tokens committed / target forwards",
    "acceptance_per_position": [0.51, 0.69, 0.71],
    "generated_tokens": 2055,
    "ended_by_stop": 37,
    "baseline_tok_per_s": 17.2,
    "speculative_tok_per_s": 29.8,
    "speedup": 1.73,
    "baseline_decode_tok_per_s": 20.0,
    "speculative_decode_tok_per_s": 41.0,
    "ngram_tok_per_s": 23.8,
    "ngram_acceptance_length": 1.52,
    "not_ended": 3,
    "loops": 1,
    "limits": {"draftable_frac": 0.97, "acceptance_length": 5.9},
    "draft_frac": 0.11,
    "verify_frac": 0.78,
    "lossless": True,
    "mismatches": 0,
    "ties": 0,
    "versions": {"paceline": "0.1.0", "torch": "2.13.0"},
    "unseen": {
        "prompts": 16,
        "acceptance_length": 1.41,
        "baseline_tok_per_s": 17.0,
        "speculative_tok_per_s": 18.9,
        "ngram_tok_per_s": 20.4,
        "ngram_acceptance_length": 1.36,
        "speedup": 1.11,
        "speedup_over_ngram": 0.93,
        "lossless": True,
        "not_ended": 2,
        "loops": 1,
        "limits": {"draftable_frac": 0.77, "acceptance_length": 3.42},
        "acceptance_per_position": [0.36, 0.6],
    },
    "calibration": {
        "cores": 2,
        "threads": 2,
        "layout": "split",
        "threads_tried": [{"threads": 1, "ms": 58.2}, {"threads": 2, "ms": 33.1}],
        "dtype": "float32",
        "dtypes_tried": {"float32": 870.0, "bfloat16": 1204.5},
        "kernel": "packed float32",
        "verify_ms": {str(n): 33.0 + n for n in range(1, 17)},
        "draft_ms": 4.2,
        "trained_block_size": 8,
        "block_size": 6,
        "expected_speedup_by_block": {"2": 1.42, "6": 1.81, "8": 1.77},
        "target_tok_per_s": 412.3,
        "step_s": 0.87,
        "notes": ["bfloat16 is emulated here"],
    },
    "train_tokens": 311_400,
    "train_steps": 320,
    "train_conversations": 480,
    "epochs": 5,
    "seconds": {"fetch": 6.8, "calibrate": 21.4, "train": 388.0, "evaluate": 190.3, "export": 0.2, "total": 606.7},
    "peak_memory_gib": 3.52,
    "layout": "split",
    "threads": 2,
    "machine": {"cpu": "EPYC", "cores": 2, "memory_gib": 7.8, "os": "Linux"},
    "minutes": 10,
}

METRICS: list[dict[str, Any]] = [
    {
        "step": step,
        "loss": 14 / step,
        "acceptance_length_est": 1 + step / 200,
        "tokens": 1000,
        "tok_per_s": 1000.0,
        "queue": 1,
        "put_wait_s": 0.25,
        "get_wait_s": 0.5,
        **({"validation_acceptance_length": 2.0} if step % 50 == 0 else {}),
    }
    for step in range(1, 321)
]

SAMPLES: list[dict[str, Any]] = [
    {
        "set": name,
        "prompt": f"prompt {name}",
        "tokens": [
            {"text": "{", "origin": "prefill"},
            {"text": "\n ", "origin": "drafted"},
            {"text": ' "name', "origin": "drafted"},
            {"text": "}", "origin": "target"},
        ],
        "plain_s": 0.4,
        "ngram_s": 0.32,
        "speculative_s": 0.2,
        "num_target_forwards": 2,
        "num_tokens": 4,
        "is_loop": is_loop,
    }
    for name, is_loop in (("held-out", False), ("unseen", True))
]


def shown(record: dict[str, Any], metrics: Any = METRICS, samples: Any = SAMPLES) -> str:
    """Text of the page, after the checks that hold for every page."""
    return check(demo_page(record, metrics, samples)).text()


def test_the_page_tells_the_story() -> None:
    """Headline, both tables, samples, curves, times, calibration, caveats and next steps are there, in this order."""
    page = demo_page(RECORD, METRICS, SAMPLES)
    text = check(page).text()
    story = [
        "Toy-1B, drafted: 1.73× the speed",
        "40 of 40",
        "6.5 min",
        "23.8",  # n-gram drafting, held out
        "20.4",  # and unseen
        "2. Unseen prompt",
        "repeats itself",
        "Acceptance by position",
        "Where the time went",
        "milliseconds",
        "1.81× chosen",
        "How to read this",
        "torch 2.13.0",
        "paceline demo --target DIR --prompts FILE",
        "paceline export runs/drafter --format zlab --out drafter",
    ]
    places = [text.find(words) for words in story]
    assert -1 not in places and places == sorted(places)
    assert page.count('role="img"') == 6  # loss, acceptance, cost; three bars of time
    assert f"{MISSING}×" not in text and "slower than n-gram drafting" in text


def test_both_sides_show_the_same_tokens_in_their_colours() -> None:
    """The drafted side colours accepted drafts only, the plain side none; both mark the first token."""
    page = demo_page(RECORD, [], SAMPLES[:1])
    assert page.count('<span class="tile drafted">') == 2 + 1  # and the legend's
    assert page.count('<span class="tile first">') == 2 + 1
    assert page.count('<span class="tile">') == 3 + 1 + 1
    assert "2 forwards, 2.00 tokens each · 2.00× the speed (n-gram 1.25×)" in page


def test_where_training_time_went() -> None:
    """The drafter's steps are split into learning and waiting, and what lies between steps is the rest."""
    text = shown(RECORD, samples=[])
    assert "learning2 min 40 s41%" in text  # 320 steps of 1 s, half of each waiting
    assert "waiting for features (get)2 min 40 s41%" in text
    assert "loading, measuring, saving1 min 8 s18%" in text
    assert "target threads waited 1 min 20 s" in text
    assert "making features, in turn" in shown({**RECORD, "layout": "colocated"})


def test_a_slower_drafter_is_called_slower() -> None:
    """Below plain speed, title, headline and text say slower, and nothing says faster."""
    for speedup, written in ((0.77, "0.77×"), (0.9996, "0.99×")):
        text = shown({**RECORD, "speedup": speedup})
        assert f"Toy-1B, drafted: slower, {written} the speed" in text
        assert "the speed of plain decoding: slower" in text
        assert "slower than plain decoding" in text and "faster" not in text
    assert "slower," not in shown({**RECORD, "speedup": 1.0})


def test_outputs_that_differ_come_first() -> None:
    """A drafter that is not lossless gets a warning with the counts above everything else, and no claim of sameness."""
    record = {**RECORD, "lossless": False, "mismatches": 1, "ties": 2}
    page = demo_page(record, METRICS, SAMPLES)
    text = check(page).text()
    assert page.index("note warning") < page.index("<h2>")
    assert "Not lossless" in text and "1 differ by a mismatch" in text and "2 at a tie" in text
    assert "37 of 40" in text and "outputs identical: not all" in text
    assert "stays the same" not in text and "a plain one may differ" in text
    assert "stays the same" in shown(RECORD) and "Not lossless" not in shown(RECORD)


def test_speed_without_the_prompt_is_told_apart() -> None:
    """The headline counts reading the prompt; the ratio without it stands beside, where it was measured."""
    assert "Reading the prompt left out of both, it is 2.05× plain decoding" in shown(RECORD)
    assert "Reading the prompt" not in shown({**RECORD, "speculative_decode_tok_per_s": None})


def test_what_bounds_the_drafter_is_told() -> None:
    """On either set: the share of tokens that can be drafted, how far that would reach, and the first guess."""
    text = shown(RECORD)
    assert "unseen answers' tokens the drafter can draft 77%" in text and "reach 3.42 tokens a forward" in text
    assert "The first guess of a block is right 36% of the time" in text and "can draft 97%" in text
    assert "can draft" not in shown({**RECORD, "limits": {}, "unseen": None})


def test_unseen_outputs_that_differ_are_told() -> None:
    """The warning covers the unseen set alone as well."""
    text = shown({**RECORD, "unseen": {**RECORD["unseen"], "lossless": False}})
    assert "Not lossless" in text and "Answers to unseen prompts differ" in text


@pytest.mark.parametrize(
    ("missing", "gone"),
    [
        ({"unseen": None}, "Unseen prompts"),
        ({"calibration": None}, "What was calibrated"),
        ({"acceptance_per_position": []}, "Acceptance by position"),
        ({"draft_frac": None}, "Decoding with the drafter"),
        ({"speedup": None}, "slower, "),
    ],
)
def test_what_was_not_measured_is_left_out(missing: dict[str, Any], gone: str) -> None:
    """A part without its figures leaves no heading behind."""
    assert gone not in shown({**RECORD, **missing})


def test_missing_measurements_are_admitted() -> None:
    """Without unseen prompts or held-out measurements the page says so."""
    assert "No prompts of another kind" in shown({**RECORD, "unseen": None})
    lines = [{k: v for k, v in line.items() if k != "validation_acceptance_length"} for line in METRICS]
    assert "nothing was measured on held-out conversations" in shown(RECORD, lines)


def test_an_empty_record_is_a_page() -> None:
    """With nothing at all, the page stands, with dashes."""
    text = shown({}, [], [])
    assert MISSING in text and "Side by side" not in text and "What training did" not in text


def _poisoned(value: Any, poison: Any) -> Any:
    """The value with every leaf replaced."""
    if isinstance(value, dict):
        return {key: _poisoned(item, poison) for key, item in value.items()}
    if isinstance(value, list):
        return [_poisoned(item, poison) for item in value]
    return copy.copy(poison)


@pytest.mark.parametrize("poison", [HOSTILE, math.nan, math.inf, None, -1, 0, 10**400, [], {}, True])
def test_no_value_breaks_the_page(poison: Any) -> None:
    """Whatever stands in the records, the page is whole, and foreign text is text."""
    text = shown(_poisoned(RECORD, poison), _poisoned(METRICS[:60], poison), _poisoned(SAMPLES, poison))
    assert VISIBLE in text or poison != HOSTILE


@pytest.mark.parametrize("key", RECORD)
def test_any_field_may_be_missing_or_of_another_type(key: str) -> None:
    """A record without a field, or with text or a list there, still makes a page."""
    without = {name: value for name, value in RECORD.items() if name != key}
    for record in (without, {**RECORD, key: HOSTILE}, {**RECORD, key: [HOSTILE]}):
        shown(record)


def test_names_from_the_record_are_escaped() -> None:
    """Keys that the page shows as names are foreign text as well."""
    record = {
        **RECORD,
        "seconds": {HOSTILE: 3.0},
        "versions": {HOSTILE: "1"},
        "calibration": {"verify_ms": {HOSTILE: 1}, "expected_speedup_by_block": {HOSTILE: 1.5}},
    }
    assert shown(record).count(VISIBLE) == 3
