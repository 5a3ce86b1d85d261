"""Flame graphs draw every call that can be seen, below its caller, and name what was done there."""

from __future__ import annotations

import colorsys
import re
import time
from typing import Any

import pytest

from paceline.profiling.evidence import CATEGORIES
from paceline.report.flame import MAX_CELLS, STYLE, WAITING, WIDTH, flame_graph, kinds
from paceline.report.page import page, section
from paceline.report.style import STYLE as PAGE_STYLE
from tests.unit.report.reader import HOSTILE, VISIBLE, Reader, check


def stack(*names: str, count: int = 1, category: str = "python", **more: Any) -> dict[str, Any]:
    """A stack of Python calls."""
    frames = [{"name": name, "file": "a.py", "line": 3, "is_native": False} for name in names]
    return {"level": "4", "pid": 1, "tid": 2, "frames": frames, "count": count, "category": category, **more}


def cells(drawing: str) -> dict[str, tuple[float, int, float]]:
    """Left end, top and width of each cell, by what it says on hover."""
    pattern = r'<title>([^<]*)</title><rect x="([\d.]+)" y="(\d+)" width="([\d.]+)"'
    return {title: (float(x), int(y), float(width)) for title, x, y, width in re.findall(pattern, drawing)}


def read(drawing: str) -> Reader:
    """A page of it, checked."""
    return check(page("title", "", section("heading", drawing), style=STYLE))


def test_widths_are_shares_of_samples() -> None:
    """A call is as wide as its share of the samples and lies within its caller, one row below."""
    drawing = flame_graph("t", [stack("main", "a", count=3), stack("main", "b", count=1, category="sync")])
    read(drawing)
    found = cells(drawing)
    assert found["main (a.py): 4 samples, 100 %, Python"] == (0, 0, WIDTH)
    assert found["a (a.py): 3 samples, 75 %, Python"] == (0, 19, 0.75 * WIDTH)
    assert found["b (a.py): 1 sample, 25 %, sync"] == (0.75 * WIDTH, 19, 0.25 * WIDTH)


def test_branches_end_in_their_category() -> None:
    """What was done is written in the last cell, so that colour is not needed; a wait is dashed."""
    drawing = flame_graph("t", [stack("main", count=3), stack("main", count=1, category="sync", rule="sync.stream")])
    assert ">Python</text>" in drawing and ">sync</text>" in drawing
    assert '<g class="k k-sync wait">' in drawing
    assert "25 %, sync, rule sync.stream" in read(drawing).text()


def test_a_call_of_many_categories_has_no_colour() -> None:
    """A caller below which no category has two thirds is drawn neutral."""
    drawing = flame_graph("t", [stack("m", "a"), stack("m", "b", category="launch")])
    assert '<g class="k k-mixed"><title>m (a.py): 2 samples, 100 %, of several categories' in drawing


def test_what_all_share_is_one_cell() -> None:
    """A long chain of calls that every sample has is joined above the last of them."""
    trunk = [f"f{i}" for i in range(20)]
    drawing = flame_graph("t", [stack(*trunk, "a"), stack(*trunk, "b")])
    found = cells(drawing)
    assert drawing.count("<rect") == 6
    assert found["f0 › … 17 calls … › f18: 2 samples, 100 %, Python"][1] == 0
    assert found["f19 (a.py): 2 samples, 100 %, Python"][1] == 19


def test_twenty_thousand_stacks_stay_small() -> None:
    """Narrow cells are left out, the widest ones stay with all their callers, and the time is bearable."""
    stacks = [
        stack(*(f"{'n' * 400}{(i >> shift) % 7}" for shift in range(12)), count=1 + i % 5, category=CATEGORIES[i % 18])
        for i in range(20_000)
    ]
    begin = time.monotonic()
    drawing = flame_graph("t", stacks)
    assert time.monotonic() - begin < 60
    assert len(drawing.encode()) < 400_000 and drawing.count("<rect") <= MAX_CELLS
    assert "cells too narrow to be seen are left out" in read(drawing).text()
    rows: dict[int, list[tuple[float, float]]] = {}
    for x, y, width in (
        (float(x), int(y), float(w))
        for x, y, w in re.findall(r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)"', drawing)
    ):
        rows.setdefault(y, []).append((x, x + width))
    for y, spans in rows.items():
        for left, right in spans:
            assert y == 0 or any(a - 0.2 <= left and right <= b + 0.2 for a, b in rows[y - 19])


def test_deep_recursion_is_cut_above_its_leaf() -> None:
    """A stack of thousands of calls is drawn with a gap in place of its middle, and without recursion of ours."""
    drawing = flame_graph("t", [stack(*(f"f{i}" for i in range(5000)), "leaf"), stack("f0", "g")])
    read(drawing)
    assert "more calls …" in drawing and "leaf (a.py)" in drawing
    assert drawing.count("<rect") < 100


@pytest.mark.parametrize("stacks", [[], [stack("a", count=0)], [{"level": "4"}], [stack(count=2, category="")]])
def test_odd_stacks_do_not_break_it(stacks: list[dict[str, Any]]) -> None:
    """No stacks, no samples, no frames, and no category are drawn or said."""
    read(flame_graph("t", stacks))


def test_hostile_names_are_shown_as_text() -> None:
    """Names of calls, files and rules never become markup."""
    hostile = stack(HOSTILE, HOSTILE, rule=HOSTILE, count=9)
    hostile["frames"][1]["file"] = HOSTILE
    drawing = flame_graph(HOSTILE, [hostile, stack("<script>alert(1)</script>", category=HOSTILE)])
    reader = read(drawing)
    assert VISIBLE in reader.text() and "<script>alert(1)" in reader.text()
    assert "<script" not in drawing and "<img" not in drawing


def test_every_category_has_a_colour() -> None:
    """The key shows all categories, those in which a thread waits hatched, each with a colour of its own."""
    key = kinds(CATEGORIES)
    for name in CATEGORIES:
        assert f"k-{name}" in key and re.search(rf"\.k-{name}[ ,]", STYLE)
    hues = re.findall(r"--h: (\d+);", STYLE)
    assert len(hues) == len(set(hues)) == len(CATEGORIES) - 1
    assert len(re.findall(r'class="[^"]* wait"', key)) == 7


@pytest.mark.parametrize("scheme", [0, 1])
def test_letters_can_be_read_on_every_colour(scheme: int) -> None:
    """Ink reaches WCAG AA (4.5) on the fill of each category, and on the lines of its hatch, in light and dark."""
    ink = re.findall(r"--ink: #(\w{6})", PAGE_STYLE)[scheme]
    saturation, lightness = re.findall(r"--fill-s: (\d+)%; --fill-l: (\d+)%; --hatch: rgb\((\d+)", STYLE)[scheme][:2]
    (over, part) = re.findall(r"--hatch: rgb\((\d+) \d+ \d+ / (\d+)%\)", STYLE)[scheme]
    ink_light = _luminance(*(int(ink[i : i + 2], 16) / 255 for i in (0, 2, 4)))
    for name, hue in re.findall(r"\.k-(\w+) \{ --h: (\d+); \}", STYLE):
        fill = colorsys.hls_to_rgb(int(hue) / 360, int(lightness) / 100, int(saturation) / 100)
        hatched = [each + (int(over) / 255 - each) * int(part) / 100 for each in fill]
        for shown in [fill, hatched] if name in WAITING else [fill]:
            darker, lighter = sorted((ink_light, _luminance(*shown)))
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, name


def _luminance(*channels: float) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
