"""Blocks escape all they show, and make pages that parse."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from paceline.report import page as p
from paceline.report.style import STYLE
from tests.unit.report.reader import HOSTILE, VISIBLE, check


def test_hostile_text_is_shown_as_text_by_every_block() -> None:
    """No block lets foreign text become markup, change direction, or break the encoding."""
    blocks = [
        p.bullets(HOSTILE),
        p.badge(HOSTILE),
        p.note(HOSTILE),
        p.quote(HOSTILE),
        p.columns(HOSTILE),
        p.code(HOSTILE),
        p.token_text([(HOSTILE, HOSTILE)]),
        p.token_key({HOSTILE: HOSTILE}),
        p.figures((HOSTILE, HOSTILE, HOSTILE)),
        p.table([HOSTILE, HOSTILE], [[HOSTILE, HOSTILE]], HOSTILE),
        p.facts({HOSTILE: HOSTILE}),
        p.tag("p", HOSTILE, title=HOSTILE),
    ]
    for block in blocks:
        assert VISIBLE in check(p.page("title", "", p.section("heading", block))).text()
    reader = check(p.page(HOSTILE, HOSTILE, p.section(HOSTILE, *blocks)))
    assert reader.text().count(VISIBLE) == 23
    assert ("title", VISIBLE) in reader.attributes


def test_markup_is_plain_text_again_once_joined() -> None:
    """Only what the blocks return counts as markup: a string built from it is escaped."""
    assert p.escape("" + p.tag("b", "x")) == "&lt;b&gt;x&lt;/b&gt;"
    assert p.tag("i", p.tag("b", "x")) == "<i><b>x</b></i>"
    assert p.tag("i", title=p.tag("b", "x")) == '<i title="&lt;b&gt;x&lt;/b&gt;"></i>'


def test_white_space_and_joiners_are_kept() -> None:
    """Line breaks, tabs and the joiners of scripts and emoji stay as they are; other invisible characters show."""
    assert p.escape("a\n\tb\u200d\u200c\u00a0") == "a\n\tb\u200d\u200c\u00a0"
    assert p.escape("\r\x00\u202e\ud800\U000e0041\ue000") == "␍␀\\u202e\\ud800\\U000e0041\\ue000"


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "12", True, [], 10**400])
def test_what_is_no_finite_number_is_a_dash(value: object) -> None:
    """Missing values, infinities and things that are no numbers show as a dash."""
    shown = {p.number(value), p.number(value, 2), p.times(value), p.percent(value), p.duration(value)}
    assert shown == {p.MISSING}


def test_a_missing_value_is_a_dash_in_any_block() -> None:
    """None and NaN that reach a block unformatted are dashes as well."""
    table = p.table(["", "a", "b"], [["row", None, math.nan]])
    assert table.count(f"<td>{p.MISSING}</td>") == 2
    assert f"<dd>{p.MISSING}</dd>" in p.facts({"x": math.inf})


def test_numbers_are_written_for_people() -> None:
    """Thousands are separated, units chosen, and a ratio below 1 never reads 1.00."""
    assert [p.number(1234567), p.number(1234.56, 1), p.number(3, 2)] == ["1,234,567", "1,234.6", "3"]
    assert [p.times(1.734), p.times(0.9996), p.times(0.5)] == ["1.73×", "0.99×", "0.50×"]
    assert [p.percent(0.434), p.percent(0.001), p.percent(0)] == ["43%", "<1%", "0%"]
    seconds = [0.784, 12.34, 59.97, 388, 7500]
    assert [p.duration(s) for s in seconds] == ["0.78 s", "12.3 s", "1 min 0 s", "6 min 28 s", "2 h 5 min"]


def test_empty_blocks_leave_no_trace() -> None:
    """A section of empty blocks vanishes with its heading, and columns skip what is empty."""
    assert not p.section("heading", "", p.Html())
    assert p.columns("a", "", p.Html()).count("<div>") == 1


def test_tokens_keep_their_white_space_and_their_borders() -> None:
    """Every token is one tile with its text unchanged; a line break has a mark that is not text."""
    block = p.token_text([("{\n", ""), ("  \n\n", "drafted"), (" Name", "first"), ("", "")])
    assert block.count('<span class="tile') == 4
    assert re.sub(r"<[^>]*>", "", block) == "{\n  \n\n Name"
    assert block.count('class="line-end"') == 3


def test_shell_prompts_are_not_text() -> None:
    """A prompt is drawn by the style sheet, so that copied commands run."""
    block = p.code("# comment\nls -l\n\npwd")
    assert "$" not in block and block.count('class="command"') == 2 and block.count('class="comment"') == 1


def _colours(scheme: str) -> dict[str, str]:
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.S)
    return dict(re.findall(r"--(\w[\w-]*): (#\w{6})", blocks[("light", "dark").index(scheme)]))


def _contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_contrast(scheme: str) -> None:
    """Text reaches WCAG AA (4.5) on all it stands on, and shapes 3 on the page."""
    colours = _colours(scheme)
    grounds = [colours[name] for name in ("paper", "panel", "tile", "drafted", "warning")]
    for text, ground in itertools.product((colours["ink"], colours["soft"]), grounds):
        assert _contrast(text, ground) >= 4.5, (text, ground)
    assert _contrast(colours["ink"], colours["drafted-even"]) >= 4.5
    for name in (f"c{i}" for i in range(7)):
        assert _contrast(colours[name], colours["paper"]) >= 3, name
    assert _contrast(colours["warning-edge"], colours["paper"]) >= 3
