"""Charts draw what can be drawn, with round ticks and few points, and say the rest in words."""

from __future__ import annotations

import math
import random
import re

import pytest

from paceline.report.charts import (
    Series,
    bar_chart,
    histogram,
    line_chart,
    log_ticks,
    stacked_bar,
    thin,
    tick_labels,
    ticks,
)
from paceline.report.page import MISSING, number, page, section, times
from tests.unit.report.reader import HOSTILE, VISIBLE, Reader, check


def read(*blocks: str) -> Reader:
    """A page of these blocks, checked."""
    return check(page("title", "", section("heading", *blocks)))


def chart(*points: tuple[object, object]) -> str:
    """A chart of one line."""
    return line_chart("title", [Series("line", points)], x_label="x", y_label="y")


@pytest.mark.parametrize("num_points", [1, 2, 31, 5000])
def test_lines_of_any_length_are_drawn(num_points: int) -> None:
    """From one point to thousands, a chart has its line within the frame, and markers only where they are few."""
    drawn = chart(*((i, math.sin(i / 9)) for i in range(num_points)))
    read(drawn)
    points = re.search(r'points="([^"]*)"', drawn)
    assert points
    values = [float(value) for value in re.split("[ ,]", points[1])]
    assert 0 <= min(values) and max(values) <= 1000 and len(values) <= 1600
    assert drawn.count("<circle") == (num_points if num_points <= 32 else 0)


@pytest.mark.parametrize(
    "points",
    [
        [(0, math.nan), (1, 2.0), (2, None), (3, "4"), (4, math.inf), (math.nan, 5), (5, 3.0)],
        [(0, 1e299), (1, -1e299)],
        [(0, 0.0), (1, 0.0)],
        [(0, 1e-320), (1, 2e-320)],
        [(10**9, 1e9), (10**9 + 1, 1e9 + 1e-3)],
        [(7, 7)],
    ],
)
def test_odd_values_do_not_break_a_chart(points: list[tuple[object, object]]) -> None:
    """What is not finite is left out, and extremes, constants and single points are drawn."""
    drawn = chart(*points)
    read(drawn)
    assert not re.search(r"\b(nan|inf)\b", drawn)


def test_a_chart_without_points_says_so() -> None:
    """Nothing finite to draw gives a sentence in place of axes."""
    for drawn in (chart(), chart((1, None), (math.nan, 2))):
        assert "Nothing to draw" in read(drawn).text() and "<svg" not in drawn


def test_a_chart_is_an_image_with_words() -> None:
    """Each drawing has the image role and a title with every line's ends; several lines have a legend."""
    drawn = line_chart(
        HOSTILE, [Series(HOSTILE, [(1, 2.5), (9, 7.25)]), Series("b", [(1, 1)])], x_label=HOSTILE, y_label=HOSTILE
    )
    reader = read(drawn)
    assert ("role", "img") in reader.attributes
    spoken = next(text for tag, text in reader.shown if tag == "title" and text.startswith(VISIBLE))
    assert "2.50 at 1" in spoken and "7.25 at 9" in spoken
    assert drawn.count("<li>") == 2 and "<li>" not in chart((1, 1))


def test_thinning_keeps_ends_and_extremes() -> None:
    """Few enough points are left; first, last, lowest and highest are among them, in order."""
    rng = random.Random(0)
    points = [(float(x), rng.random()) for x in range(5000)]
    points[1234], points[4321] = (1234.0, -3.0), (4321.0, 9.0)
    thinned = thin(points, 200)
    assert len(thinned) <= 200
    assert {points[0], points[-1], points[1234], points[4321]} <= set(thinned)
    assert thinned == sorted(thinned) and set(thinned) <= set(points)
    assert thin(points[:200], 200) == points[:200]
    assert len(thin(points, 4)) <= 4


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 10, ["0", "2", "4", "6", "8", "10"]),
        (1.0, 3.3, ["1.0", "1.5", "2.0", "2.5", "3.0", "3.5"]),
        (0, 0.0031, ["0.000", "0.001", "0.002", "0.003", "0.004"]),
        (-3, 4, ["-4", "-2", "0", "2", "4"]),
        (0, 48_000, ["0", "10,000", "20,000", "30,000", "40,000", "50,000"]),
        (5, 5, ["2", "3", "4", "5", "6", "7", "8"]),
    ],
)
def test_ticks_are_round_and_cover_the_values(low: float, high: float, wanted: list[str]) -> None:
    """Ticks are 1, 2 or 5 times a power of ten apart and are written with the digits they need."""
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high
    assert tick_labels(found) == wanted


def test_ticks_between_whole_numbers_can_be_left_out() -> None:
    """An axis of counts has no half steps."""
    assert ticks(1, 2, 8, whole=True) == [1.0, 2.0]


def test_ticks_cover_any_range_with_few() -> None:
    """Over all magnitudes there are between two and eight ticks, rising, that cover the values."""
    rng = random.Random(0)
    for _ in range(500):
        low, high = sorted(rng.uniform(-1, 1) * 10 ** rng.uniform(-9, 9) for _ in range(2))
        found = ticks(low, high)
        slack = 1e-6 * (found[1] - found[0])
        assert 2 <= len(found) <= 8 and found == sorted(set(found))
        assert found[0] <= low + slack and found[-1] >= high - slack


def test_a_histogram_has_its_bins_to_scale() -> None:
    """Bars stand where their bins are on the scale, as high as their counts; few of many are seen, none is no bar."""

    def drawn(is_log: bool) -> list[tuple[float, ...]]:
        edges, counts = [1, 10, 100, 1000], [1000, 0, 1]
        block = histogram(HOSTILE, edges, counts, x_label=HOSTILE, y_label=HOSTILE, median=5, is_log=is_log)
        assert VISIBLE in read(block).text()
        assert block.count('class="median"') == 1
        bars = re.findall(r'<rect x="([\d.]+)%" y="([\d.]+)%" width="([\d.]+)%" height="([\d.]+)%"', block)
        return [tuple(map(float, bar)) for bar in bars]

    assert drawn(is_log=True) == [(0.0, 0.0, 33.33, 100.0), (66.67, 98.8, 33.33, 1.2)]
    assert drawn(is_log=False) == [(0.0, 0.0, 0.9, 100.0), (9.91, 98.8, 90.09, 1.2)]


@pytest.mark.parametrize(("edges", "counts"), [([7, 8], [3]), ([1, 2], [0]), ([1, 2, 10**7], [10**9, 1])])
def test_odd_histograms_are_drawn(edges: list[float], counts: list[int]) -> None:
    """One bin, no values and huge ones make a chart."""
    for is_log in (True, False):
        drawn = histogram("title", edges, counts, x_label="x", y_label="y", median=edges[0], is_log=is_log)
        read(drawn)
        assert not re.search(r"\b(nan|inf)\b", drawn)


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (1, 65_536, [1, 10, 100, 1000, 10_000]),
        (100, 3073, [100, 200, 500, 1000, 2000]),
        (10, 8193, [10, 30, 100, 300, 1000, 3000]),
        (60, 182, [50, 100, 150, 200]),
        (7, 8, [7.0, 7.5, 8.0]),
    ],
)
def test_ticks_of_a_logarithmic_scale_stand_apart(low: float, high: float, wanted: list[float]) -> None:
    """There are few of them, round ones, and those of a plain scale where it hardly grows."""
    found = log_ticks(low, high)
    assert [x for x in found if x in wanted] == pytest.approx(wanted) and len(found) <= 6


def test_bars_grow_from_zero() -> None:
    """The largest bar is full, missing and negative ones are empty, and the marked one says so in words."""
    drawn = bar_chart("title", {"a": 2, "b": 1, "c": None, "d": -4, "e": math.nan, HOSTILE: 0}, times, marked="b")
    reader = read(drawn)
    assert re.findall(r"width:([\d.]+)%", drawn) == ["100.0", "50.0", "0.0", "0.0", "0.0", "0.0"]
    assert "1.00× chosen" in reader.text() and reader.text().count(MISSING) == 2
    assert read(bar_chart("title", {}), bar_chart("title", {"a": 0}))


def test_a_share_is_drawn_as_one() -> None:
    """With the whole said, a small share is a short bar and not the longest there is."""
    assert "width:5" in bar_chart("title", {"a": 0.05, "b": 0.01}, whole=1.0)
    assert "width:100" in bar_chart("title", {"a": 0.05, "b": 0.01})


def test_a_stacked_bar_gives_figures_and_shares() -> None:
    """Parts share the bar by size; the missing have a row and no place in it; more parts than colours are fine."""
    parts = {"a": 30, "b": 10, "c": None, "d": math.inf, "e": -1, "f": 0, HOSTILE: 0.0, "h": 0.01}
    drawn = stacked_bar("title", parts, number)
    reader = read(drawn)
    grown = [float(part) for part in re.findall(r"flex-grow:([\d.]+)", drawn)]
    assert len(grown) == 3 and sum(grown) == pytest.approx(100, abs=0.01)
    assert "75%" in reader.text() and "<1%" in reader.text()
    spoken = next(value for name, value in reader.attributes if name == "aria-label")
    assert "a 30, b 10" in spoken and VISIBLE in spoken
    assert read(stacked_bar("title", {}), stacked_bar("title", {"a": 0}))
