"""The data set's page tells what the data set is and shows its rows, whatever stands in the record and in the rows."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest

from paceline.report.dataset import OPEN_TOKENS, Distribution, Gap, Row, Token, dataset_page
from paceline.report.page import MISSING
from tests.unit.report.reader import HOSTILE, VISIBLE, check

RECORD: dict[str, Any] = {
    "dataset": {
        "format": 2,
        "num_rows": 1200,
        "num_conversations": 1100,
        "num_tokens": 240_000,
        "num_supervised": 84_000,
        "longest": 3072,
        "vocab_size": 49152,
        "tokenizer": "org/Toy-1B",
        "template_hash": "abcdef0123456789" * 4,
        "thinking": None,
        "max_length": 3072,
        "on_long": "cut",
        "fingerprint": "f" * 64,
        "files": ["a.jsonl"],
    },
    "report": {
        "num_lines": 1300,
        "num_rejected": 60,
        "num_left_out": 40,
        "rejected": {"invalid JSON": 50, "no assistant turn": 10},
        "dropped_turns": {"empty answer": 3},
        "kinds": {"conversations": 1290, "texts": 10},
        "num_supervised_lost": 898,
        "fill": 0.974,
        "fill_tokens": 8192,
        "inputs": [
            {
                "source": {"path": "a.jsonl", "license": "mit", "files": 1},
                "weight": 0.5,
                "num_rows": 900,
                "num_tokens": 180_000,
                "ignored": {"no data by its name": 2},
            },
            {"source": {"path": "hf:org/set", "split": "train", "license": None}, "weight": 1.0, "num_rows": 300},
        ],
    },
    "settings": {"inputs": ["a.jsonl", "hf:org/set"]},
    "versions": {"paceline": "0.1.0"},
}

LENGTHS = Distribution([10, 20, 40], [700, 500], (12, 18.4, 30))
SHARES = Distribution([0, 0.5, 1], [1100, 100], (0.2, 0.31, 0.4))
TOKENS = [Token("ask", (5,), False, False), Token("a", (6,), True, False), Token("<end>", (7,), True, True)]


def row(parts: list[Token | Gap] | None = None, num_tokens: int = 3, runs: Any = ((1, 3),), source: str = "f:1") -> Row:
    """A row for the page."""
    return Row(7, source, num_tokens, 2, runs, TOKENS if parts is None else parts)


def make(record: Any = RECORD, rows: Any = (), lengths: Distribution = LENGTHS, name: str = "set") -> str:
    """The page, after the checks that hold for every page."""
    page = dataset_page(name, record, lengths, SHARES, rows or [row()], "One of them.")
    check(page)
    return page


def shown(record: Any = RECORD, rows: Any = ()) -> str:
    """Text of the page."""
    return check(make(record, rows)).text()


def test_the_page_tells_what_the_data_set_is() -> None:
    """Headline, histograms with medians, inputs, tokenizer, limits, rejections and rows are there, in this order."""
    text = shown()
    story = [
        "Data set set",
        "1,200rows",
        "1,100conversations",
        "240,000tokens",
        "35%supervised",
        "Median 18 tokens (dashed); half have 12 to 30; limit 3,072",
        "Median 31% (dashed); half have 20% to 40%",
        "a.jsonl1 file, 2 files not read: no data by its name900180,00075%0.5mit",
        "hf:org/setsplit train300",
        "1,300 records (1,290 conversations, 10 texts); 60 rejected, 40 left out by weights",
        "org/Toy-1B",
        "abcdef0123456789…",
        "as the template decides",
        "3,072 tokens, longer rows: cut",
        "898 supervised tokens",
        "batches of 8,192 tokens are 97% full",
        "paceline 0.1.0",
        "invalid JSON504%",
        "empty answer3",
        "One of them.",
        "Row 7",
        "f:1",
        "3 tokens, 2 supervised (67%)",
    ]
    places = [text.find(words) for words in story]
    assert -1 not in places, story[places.index(-1)]
    assert places == sorted(places)


def test_tokens_are_tiles_in_the_colour_of_their_kind() -> None:
    """Each token is an element with its id, supervised ones inside another, control tokens marked."""
    page = make(rows=[row([*TOKENS, Token("é", (8, 9), False, False)], 5)])
    assert (
        '<i title="5">ask</i><b><i title="6">a</i><i title="7" class="control">&lt;end&gt;</i></b>'
        '<i title="8 9">é</i></div>'
    ) in page


def test_spaces_that_are_not_seen_are_marked() -> None:
    """Runs of spaces, those before a line break and at the start of a line are marked; others and the text stay."""
    texts = [" a  b \u21b5\n c", "\u21b5\n", " ", " d", " e"]
    page = make(rows=[row([Token(text, (1,), False, False) for text in texts], 1, ())])
    tiles = [" a<s>  </s>b<s> </s>\u21b5\n<s> </s>c", "\u21b5\n", "<s> </s>", "<s> </s>d", " e"]
    assert "".join(f'<i title="1">{tile}</i>' for tile in tiles) in page


def test_long_rows_are_folded() -> None:
    """What is beyond the first tokens is a click away, with its number and that of the tokens that are left out."""
    tokens: list[Token | Gap] = [Token("x", (i,), False, False) for i in range(OPEN_TOKENS)]
    assert "<details>" not in make(rows=[row(tokens, OPEN_TOKENS, ())])
    page = make(rows=[row([*tokens, Gap(1000), *TOKENS], OPEN_TOKENS + 1050, ())])
    assert "<summary>1,003 more tokens</summary>" in page and "<em>1,000 tokens not shown</em>" in page
    assert page.index("<details>") < page.index("<em>") and "47 more tokens are not shown." in page


@pytest.mark.parametrize(
    "text",
    ["x", "'" * 50, "\U0001f600" * 20, "\u202e" * 100, "  " * 50, "\u21b5\n " * 30],
    ids=["short", "escaped", "wide", "hidden", "spaces", "lines"],
)
@pytest.mark.parametrize("num_rows", [1, 40])
def test_the_page_is_bounded(monkeypatch: pytest.MonkeyPatch, text: str, num_rows: int) -> None:
    """However long rows are and whatever their text costs in markup, each takes its share of the room at most."""
    room = 1 << 19
    monkeypatch.setattr("paceline.report.dataset.PAGE_BYTES", room)
    tokens = [Token(text, (i,), i % 3 == 0, False) for i in range(64_000)]
    page = make(rows=[row(list(tokens), len(tokens)) for _ in range(num_rows)])
    assert len(page.encode()) < 1.3 * room + 50_000
    assert page.count("more tokens are not shown.") == num_rows


def test_the_strip_shows_where_a_row_trains() -> None:
    """Supervised stretches have their place and at least a visible width; those that touch become one."""
    page = make(rows=[row(num_tokens=100, runs=[(0, 50), (99, 100)])])
    assert '<rect x="0" y="0" width="50" height="1"></rect><rect x="99" y="0" width="1" height="1"></rect>' in page
    assert 'viewBox="0 0 100 1"' in page and "2 supervised stretches in 100 tokens" in page
    runs = [(i, i + 1) for i in range(0, 64_000, 2)]
    page = make(rows=[row(num_tokens=64_000, runs=runs)])
    assert '<rect x="0" y="0" width="240" height="1"></rect></svg>' in page
    assert make(rows=[row([], 0, ())])


def test_an_input_without_a_report_is_named() -> None:
    """Without figures for each input their names stand alone, those of the data set itself if need be."""
    report = {key: value for key, value in RECORD["report"].items() if key != "inputs"}
    assert "hf:org/set" in shown({**RECORD, "report": report})
    assert "a.jsonl" in shown({"dataset": RECORD["dataset"]})
    many = {"dataset": {**RECORD["dataset"], "files": [f"file{i}.jsonl" for i in range(1000)]}}
    text = shown(many)
    assert "file19.jsonl" in text and "file20.jsonl" not in text and "The first 20 of 1,000 inputs" in text


def test_an_empty_record_is_a_page() -> None:
    """With nothing known the page stands, with dashes, and parts without figures leave no trace."""
    text = shown({})
    assert MISSING in text and "rejected" not in text and "Packing" not in text and "Row 7" in text


def _poisoned(value: Any, poison: Any) -> Any:
    if isinstance(value, dict):
        return {key: _poisoned(item, poison) for key, item in value.items()}
    if isinstance(value, list):
        return [_poisoned(item, poison) for item in value]
    return copy.copy(poison)


@pytest.mark.parametrize("poison", [HOSTILE, math.nan, math.inf, None, -1, 0, 10**400, [], {}, True])
def test_no_value_breaks_the_page(poison: Any) -> None:
    """Whatever stands in the record, the page is whole, and foreign text is text."""
    assert VISIBLE in shown(_poisoned(RECORD, poison)) or poison != HOSTILE


@pytest.mark.parametrize("part", RECORD)
def test_any_part_may_be_missing_or_of_another_type(part: str) -> None:
    """A record without a part, or a part without a field, or with something else there, still makes a page."""
    others: list[Any] = [HOSTILE, [HOSTILE], {HOSTILE: HOSTILE}, {HOSTILE: 1}, None]
    for other in others:
        shown({**RECORD, part: other})
        for key in RECORD[part]:
            shown({**RECORD, part: {**RECORD[part], key: other}})
    shown({name: value for name, value in RECORD.items() if name != part})


def test_foreign_text_is_text() -> None:
    """Names, sources, reasons, inputs and tokens cannot become markup."""
    record = copy.deepcopy(RECORD)
    record["report"]["rejected"] = {HOSTILE: 1}
    record["report"]["inputs"][0]["source"] = {"path": HOSTILE, HOSTILE: HOSTILE}
    page = make(record, [row([Token(HOSTILE, (1,), True, True)], source=HOSTILE)], name=HOSTILE)
    text = check(page).text()
    assert text.count(VISIBLE) == 8  # title and heading, reason, path, key and value, source, token
    assert not re.search(r"<img|onerror=\"alert", page)
