"""Charts of the reports: inline drawings and bars, without scripts, that fit any width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.report.page import Html, duration, is_number, number, percent, tag

NUM_COLOURS = 7
"""Colours of a chart; an eighth line or part has the first one's again."""
MAX_POINTS = 800
"""Points of a line that are drawn: more are finer than a screen."""
MAX_MARKED = 32
"""A line of at most so many points gets a marker, with its figures on hover, on each of them."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: For the legend.
        points: x and y; those that are not finite numbers are left out and the line goes straight on.
        is_faint: A noisy line that stands behind the others.
    """

    name: str
    points: Sequence[tuple[object, object]]
    is_faint: bool = False


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    from_zero: bool = False,
    caption: object = "",
) -> Html:
    """Lines over a common axis, as wide as there is room.

    Shapes stretch with the window and letters do not: marks and texts stand at percentages, lines in a stretched inner
    drawing.

    Args:
        title: What is shown; the drawing's text for those who do not see it gives each line's ends as well.
        from_zero: Whether the y axis starts at 0.
    """
    drawn = [
        (index, one, points)
        for index, one in enumerate(series)
        if (points := [(x, y) for x, y in one.points if is_number(x) and is_number(y)])
    ]
    if not drawn:
        return _figure(title, caption, tag("p", "Nothing to draw."))
    xs, ys = ([point[i] for *_, points in drawn for point in points] for i in (0, 1))
    y_ticks = ticks(min([*ys, 0.0] if from_zero else ys), max(ys))
    left, right, low, high = min(xs), max(xs), y_ticks[0], y_ticks[-1]
    x_ticks = [x for x in ticks(left, right, 8, whole=all(x == int(x) for x in xs)) if left <= x <= right]

    def place(x: float, y: float) -> tuple[float, float]:
        """In percent from the left and from the top."""
        return 100 * (x - left) / (right - left) if right > left else 50.0, 100 * (high - y) / (high - low)

    axes, lines, marks, key, spoken = [], [], [], [], []
    names = tick_labels(y_ticks)
    for y, name in zip(y_ticks, names, strict=True):
        at = f"{place(left, y)[1]:.2f}%"
        axes += [tag("line", x1="0", x2="100%", y1=at, y2=at, class_="grid")]
        axes += [tag("text", name, x="-8", y=at, dy=".35em", text_anchor="end")]
    for x, name in zip(x_ticks, tick_labels(x_ticks), strict=True):
        axes.append(tag("text", name, x=f"{place(x, low)[0]:.2f}%", y="100%", dy="1.6em", text_anchor="middle"))
    axes.append(tag("text", y_label, x="0", y="0", dy="-.9em", class_="axis"))
    axes.append(tag("text", x_label, x="100%", y="100%", dy="3.1em", text_anchor="end", class_="axis"))
    for index, one, points in drawn:
        colour = f"c{index % NUM_COLOURS}" + " faint" * one.is_faint
        path = " ".join(f"{10 * x:.1f},{10 * y:.1f}" for x, y in (place(*point) for point in thin(points)))
        lines.append(tag("polyline", points=path, class_=colour, vector_effect="non-scaling-stroke"))
        for x, y in points if len(points) <= MAX_MARKED else []:
            at_x, at_y = place(x, y)
            hover = tag("title", f"{one.name}: {number(y, 3)} at {number(x, 2)}")
            marks.append(tag("circle", hover, cx=f"{at_x:.2f}%", cy=f"{at_y:.2f}%", r="3.5", class_=colour))
        key.append(tag("li", tag("i", class_=colour), one.name))
        spoken.append(
            f"{one.name}: {number(points[0][1], 2)} at {number(points[0][0], 2)}, "
            f"{number(points[-1][1], 2)} at {number(points[-1][0], 2)}"
        )
    stretched = tag(
        "svg", *lines, viewBox="0 0 1000 1000", preserveAspectRatio="none", width="100%", height="100%", class_="inner"
    )
    drawing = tag(
        "svg", tag("title", f"{title}. {'; '.join(spoken)}"), *axes, stretched, *marks, role="img", class_="drawing"
    )
    margin = f"padding-left:{max(map(len, names)) * 0.6 + 1:.1f}em"
    legend = tag("ul", *key, class_="key") if len(series) > 1 else Html()
    return _figure(title, caption, legend, tag("div", drawing, class_="plot", style=margin))


def thin(points: Points, limit: int = MAX_POINTS) -> Points:
    """At most `limit` (4 or more) of the points, in order: first, last, and the lowest and highest of each stretch."""
    if len(points) <= limit:
        return points
    inner = points[1:-1]
    size = math.ceil(len(inner) / ((limit - 2) // 2))
    kept = [points[0]]
    for start in range(0, len(inner), size):
        stretch = range(start, min(start + size, len(inner)))
        ends = {min(stretch, key=lambda i: inner[i][1]), max(stretch, key=lambda i: inner[i][1])}
        kept += [inner[i] for i in sorted(ends)]
    return [*kept, points[-1]]


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, from at or below `low` to at or above `high`.

    Args:
        count: Steps wanted; there may be fewer, or two more.
        whole: Whether the numbers between whole ones mean nothing.
    """
    largest = max(abs(low), abs(high))
    if high - low <= max(1e-9 * largest, 1e-100):
        margin = largest / 2 if largest > 1e-100 else 0.5
        low, high = low - margin, high + margin
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= count * (1 + 1e-9))
    step = max(step, 1.0) if whole else step
    return [i * step for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """The values with as many digits as their distance needs."""
    step = min((b - a for a, b in zip(values, values[1:], strict=False)), default=1.0)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if digits > 4 or max(map(abs, values), default=0) >= 1e6:
        return [f"{value:.4g}" for value in values]
    return [f"{value:,.{digits}f}" for value in values]


def histogram(
    title: str,
    edges: Sequence[float],
    counts: Sequence[int],
    *,
    x_label: str,
    y_label: str,
    median: float | None = None,
    is_log: bool = False,
    caption: object = "",
) -> Html:
    """Upright bars over a scale of values, as wide as there is room, the median a dashed line.

    Args:
        edges: Ends of the bins, rising: bin i reaches from ``edges[i]`` to ``edges[i + 1]``.
        counts: How many are in each bin.
        is_log: Whether the scale is logarithmic; its edges are above 0 then.
    """
    low, high, y_ticks = edges[0], edges[-1], ticks(0, max(*counts, 1), 4, whole=True)
    top, scale = y_ticks[-1], math.log if is_log else float

    def place(x: float) -> float:
        """In percent from the left."""
        return 100 * (scale(x) - scale(low)) / (scale(high) - scale(low))

    x_ticks = [x for x in (log_ticks(low, high) if is_log else ticks(low, high)) if low <= x <= high]
    axes, bars, names = [], [], tick_labels(y_ticks)
    for y, name in zip(y_ticks, names, strict=True):
        at = f"{100 * (1 - y / top):.2f}%"
        axes += [tag("line", x1="0", x2="100%", y1=at, y2=at, class_="grid")]
        axes += [tag("text", name, x="-8", y=at, dy=".35em", text_anchor="end")]
    for x, name in zip(x_ticks, tick_labels(x_ticks), strict=True):
        axes.append(tag("text", name, x=f"{place(x):.2f}%", y="100%", dy="1.6em", text_anchor="middle"))
    axes.append(tag("text", y_label, x="0", y="0", dy="-.9em", class_="axis"))
    axes.append(tag("text", x_label, x="100%", y="100%", dy="3.1em", text_anchor="end", class_="axis"))
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        if count:
            height = max(100 * count / top, 1.2)  # one of millions is seen as well
            hover = tag("title", f"{number(left)} to {number(right)}: {number(count)} {y_label}")
            place_x, width = place(left), place(right) - place(left)
            size = {"width": f"{width:.2f}%", "height": f"{height:.2f}%"}
            bars.append(tag("rect", hover, x=f"{place_x:.2f}%", y=f"{100 - height:.2f}%", **size))
    if median is not None:
        at = f"{min(max(place(median), 0), 100):.2f}%"
        bars.append(tag("line", x1=at, x2=at, y1="0", y2="100%", class_="median"))
    drawing = tag("svg", tag("title", f"{title}. {caption}"), *axes, *bars, role="img", class_="drawing")
    margin = f"padding-left:{max(map(len, names)) * 0.6 + 1:.1f}em"
    return _figure(title, caption, tag("div", drawing, class_="plot", style=margin))


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers for a logarithmic scale from `low` > 0 to `high`: few enough that their labels stand apart."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [x for power in powers for factor in factors if low <= (x := factor * 10.0**power) <= high]
        if len(found) <= most:
            break
    return found if len(found) > 2 else ticks(low, high, 4)


def bar_chart(
    title: str,
    bars: Mapping[str, object],
    show: Callable[[object], str] = number,
    *,
    marked: str | None = None,
    mark: str = "chosen",
    caption: object = "",
    whole: float | None = None,
) -> Html:
    """Bars from zero, each with its name and figure; a table to those who do not see it.

    Args:
        show: Writes a figure.
        whole: What a full bar is, 1 for shares; None: the largest figure.
        marked: Name of the bar that stands out, with `mark` beside its figure.
    """
    top = max((value for value in bars.values() if is_number(value)), default=0.0) if whole is None else whole
    rows = []
    for name, value in bars.items():
        width = 100 * max(value, 0) / top if is_number(value) and top > 0 else 0
        is_marked = name == marked
        rows.append(
            tag(
                "tr",
                tag("th", name, scope="row"),
                tag("td", tag("div", style=f"width:{width:.1f}%", class_="bar")),
                tag("td", show(value), f" {mark}" if is_marked else Html()),
                class_="marked" if is_marked else None,
            )
        )
    kind = "bars" if marked in bars else "bars alike"
    return _figure(title, caption, tag("table", tag("tbody", *rows), class_=kind))


def stacked_bar(
    title: str, parts: Mapping[str, object], show: Callable[[object], str] = duration, *, caption: object = ""
) -> Html:
    """Where a whole went: one bar of its parts, and each part's figure and share below in the same order.

    Args:
        parts: Name and size; those that are missing or below zero have no place in the bar.
    """
    sizes = {name: value for name, value in parts.items() if is_number(value) and value > 0}
    total = sum(sizes.values())
    bar, rows = [], []
    for index, (name, value) in enumerate(parts.items()):
        colour = f"c{index % NUM_COLOURS}"
        share = percent(sizes[name] / total) if name in sizes else percent(0 if is_number(value) else None)
        if name in sizes:
            bar.append(tag("i", class_=colour, style=f"flex-grow:{100 * sizes[name] / total:.3f}"))
        rows.append(
            tag("tr", tag("th", tag("i", class_=colour), name, scope="row"), tag("td", show(value)), tag("td", share))
        )
    spoken = f"{title}: " + ", ".join(f"{name} {show(value)}" for name, value in parts.items())
    drawing = tag("div", *bar, class_="stack", role="img", aria_label=spoken)
    return _figure(title, caption, drawing, tag("table", tag("tbody", *rows), class_="shares"))


def _figure(title: str, caption: object, *blocks: object) -> Html:
    remark = tag("small", caption) if caption else Html()
    return tag("figure", tag("figcaption", tag("b", title), remark), *blocks)
