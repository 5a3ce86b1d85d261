"""Charts as SVG files of their own: what a Markdown page can show. Colours and scales are those of the reports.

A file has its own paper under it, light or dark as the reader's system asks, so that it can be read on any page. No
script, no font, nothing that is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from paceline.report.charts import NUM_COLOURS, Series, thin, tick_labels, ticks
from paceline.report.page import Html, is_number, number, tag
from paceline.report.style import STYLE

WIDTH = 720
EDGE = 14
"""Empty pixels around a drawing."""
LETTER = 6.6
"""Width of a letter, in pixels, that texts get room for."""
ROW = 18
"""Height of a line of text, or of a bar with what is between bars."""

# The colours stand before the first rule of the reports' style sheet, as variables of the root, light and dark.
COLOURS = STYLE.partition("* {")[0]
RULES = """
text { fill: var(--ink); font: 12px -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif; }
.soft { fill: var(--soft); }
.paper { fill: var(--paper); }
.grid { stroke: var(--rule); }
.mark { stroke: var(--ink); stroke-dasharray: 5 4; }
polyline, .range { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
polyline.faint { opacity: .45; stroke-width: 1.1; }
circle { fill: var(--c); stroke: var(--paper); stroke-width: 1.5; }
rect.bar { fill: var(--c); }
"""
RULES += "".join(f".c{i} {{ --c: var(--c{i}); }}\n" for i in range(NUM_COLOURS))


def line_svg(title: str, series: Sequence[Series], *, x_label: str, y_label: str, from_zero: bool = False) -> str:
    """Lines over a common axis; points are marked where they are few. Every series has a point."""
    drawn = [(one, [(x, y) for x, y in one.points if is_number(x) and is_number(y)]) for one in series]
    xs, ys = ([point[i] for _, points in drawn for point in points] for i in (0, 1))
    y_ticks = ticks(min([*ys, 0.0] if from_zero else ys), max(ys))
    left_x, right_x, low, high = min(xs), max(xs), y_ticks[0], y_ticks[-1]
    x_ticks = [x for x in ticks(left_x, right_x, 8, whole=all(x == int(x) for x in xs)) if left_x <= x <= right_x]
    names = tick_labels(y_ticks)
    key, key_height = _key([one.name for one in series]) if len(series) > 1 else (Html(), 0)
    left, right = EDGE + 10 + LETTER * max(map(len, names)), WIDTH - EDGE - 12
    top = 2 * ROW + key_height + 36
    bottom = top + 230

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (right - left) * ((x - left_x) / (right_x - left_x) if right_x > left_x else 0.5),
            bottom - (bottom - top) * (y - low) / (high - low),
        )

    marks = [key, tag("text", y_label, x=EDGE, y=_px(top - 14), class_="soft")]
    for y, name in zip(y_ticks, names, strict=True):
        at = _px(place(left_x, y)[1])
        marks.append(tag("line", x1=_px(left), x2=_px(right), y1=at, y2=at, class_="grid"))
        marks.append(tag("text", name, x=_px(left - 7), y=at, dy=".35em", text_anchor="end", class_="soft"))
    for x, name in zip(x_ticks, tick_labels(x_ticks), strict=True):
        at = _px(place(x, low)[0])
        marks.append(tag("text", name, x=at, y=_px(bottom + ROW), text_anchor="middle", class_="soft"))
    marks.append(tag("text", x_label, x=_px(right), y=_px(bottom + 2 * ROW), text_anchor="end", class_="soft"))
    for i, (one, points) in enumerate(drawn):
        colour = f"c{i % NUM_COLOURS}" + " faint" * one.is_faint
        path = " ".join(",".join(map(_px, place(*point))) for point in thin(points, 300))
        marks.append(tag("polyline", points=path, class_=colour))
        for x, y in points if len(points) <= 32 else []:
            at_x, at_y = place(x, y)
            marks.append(tag("circle", cx=_px(at_x), cy=_px(at_y), r=3.5, class_=colour))
    return _file(title, bottom + 2 * ROW + EDGE, marks)


def bar_svg(
    title: str, groups: Mapping[str, Mapping[str, float]], *, x_label: str, digits: int = 2, mark: float | None = None
) -> str:
    """Bars from zero, grouped; each has its figure at its end.

    Args:
        groups: Group -> name of the bar -> figure; bars of one name have one colour.
        mark: Where a dashed line stands.
    """
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    key, key_height = _key(names) if len(names) > 1 else (Html(), 0)
    num_bars = sum(len(bars) for bars in groups.values())
    top = 2 * ROW + key_height + 6
    bottom = top + num_bars * ROW + 8 * len(groups)
    figures = [value for bars in groups.values() for value in bars.values()]
    marks, place = _across(groups, [0.0, *figures, *([mark] if mark else [])], top, bottom, x_label, margin=44)
    y = top + 4.0
    for group, bars in groups.items():
        marks.append(tag("text", group, x=EDGE, y=_px(y + len(bars) * ROW / 2), dy=".35em"))
        for name, value in bars.items():
            end = place(value)
            size = {"width": _px(end - place(0)), "height": ROW - 4}
            marks.append(tag("rect", x=_px(place(0)), y=_px(y + 2), class_=f"bar c{_colour(names, name)}", **size))
            marks.append(tag("text", number(value, digits), x=_px(end + 6), y=_px(y + ROW / 2), dy=".35em"))
            y += ROW
        y += 8
    if mark:
        at = _px(place(mark))
        marks.append(tag("line", x1=at, x2=at, y1=_px(top), y2=_px(bottom), class_="mark"))
    return _file(title, bottom + 2 * ROW + EDGE, [key, *marks])


def dot_svg(
    title: str, rows: Sequence[tuple[str, str, float, float, float]], *, x_label: str, mark: float | None = None
) -> str:
    """A dot and its range for each row.

    Args:
        rows: Label, name in the key, figure, lowest and highest.
        mark: Where a dashed line stands.
    """
    names = list(dict.fromkeys(name for _, name, *_ in rows))
    key, key_height = _key(names) if len(names) > 1 else (Html(), 0)
    labels = list(dict.fromkeys(label for label, *_ in rows))
    top = 2 * ROW + key_height + 6
    between = 10  # pixels between the dots of a row
    height = ROW + 4 + between * (len(names) - 1)
    bottom = top + height * len(labels)
    marks, place = _across(labels, [each for row in rows for each in row[2:]], top, bottom, x_label)
    for i, label in enumerate(labels):
        marks.append(tag("text", label, x=EDGE, y=_px(top + height * (i + 0.5)), dy=".35em"))
    if mark is not None:
        at = _px(place(mark))
        marks.append(tag("line", x1=at, x2=at, y1=_px(top), y2=_px(bottom), class_="mark"))
    for label, name, value, low, high in rows:
        which = _colour(names, name)
        y = _px(top + height * (labels.index(label) + 0.5) + between * (which - (len(names) - 1) / 2))
        marks.append(tag("line", x1=_px(place(low)), x2=_px(place(high)), y1=y, y2=y, class_=f"range c{which}"))
        marks.append(tag("circle", cx=_px(place(value)), cy=y, r=4, class_=f"c{which}"))
    return _file(title, bottom + 2 * ROW + EDGE, [key, *marks])


def _across(
    labels: Iterable[str], values: Sequence[float], top: float, bottom: float, x_label: str, margin: float = 12
) -> tuple[list[Html], Callable[[float], float]]:
    """The frame of a chart whose values go from left to right, and where a value stands."""
    x_ticks = ticks(min(values), max(values), 6)
    left, right = EDGE + 12 + LETTER * max(map(len, labels)), WIDTH - EDGE - margin

    def place(x: float) -> float:
        return left + (right - left) * (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])

    marks = []
    for x, name in zip(x_ticks, tick_labels(x_ticks), strict=True):
        at = _px(place(x))
        marks.append(tag("line", x1=at, x2=at, y1=_px(top), y2=_px(bottom), class_="grid"))
        marks.append(tag("text", name, x=at, y=_px(bottom + ROW), text_anchor="middle", class_="soft"))
    marks.append(tag("text", x_label, x=_px(right), y=_px(bottom + 2 * ROW), text_anchor="end", class_="soft"))
    return marks, place


def _colour(names: Sequence[str], name: str) -> int:
    return names.index(name) % NUM_COLOURS


def _key(names: Sequence[str]) -> tuple[Html, int]:
    """Colours and what they mean, below the title, and the height of that."""
    x, y, marks = float(EDGE), 2 * ROW + 6, []
    for i, name in enumerate(names):
        width = 22 + LETTER * len(name) + 18
        if x + width > WIDTH and x > EDGE:
            x, y = float(EDGE), y + ROW
        marks.append(tag("rect", x=_px(x), y=y - 4, width=16, height=8, class_=f"bar c{i % NUM_COLOURS}"))
        marks.append(tag("text", name, x=_px(x + 22), y=y, dy=".35em"))
        x += width
    return tag("g", *marks), y + 4 - 2 * ROW


def _file(title: str, height: float, marks: Sequence[Html]) -> str:
    return tag(
        "svg",
        tag("title", title),
        tag("style", Html(COLOURS + RULES)),
        tag("rect", width=WIDTH, height=_px(height), class_="paper"),
        tag("text", title, x=EDGE, y=EDGE + 12, font_weight="600", style="font-weight: 600; font-size: 14px"),
        *marks,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {_px(height)}",
        width=WIDTH,
        height=_px(height),
        role="img",
    ) + "\n"  # fmt: skip


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
