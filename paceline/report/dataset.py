"""The page of a data set: what it was made from, how long its rows are and how much of them trains, and rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from paceline.report.charts import histogram
from paceline.report.page import (
    Html,
    Record,
    columns,
    facts,
    figures,
    is_number,
    items_of,
    join,
    number,
    page,
    part_of,
    percent,
    section,
    table,
    tag,
)

PAGE_BYTES = 4 << 20
"""What the rows of a page may take together, shared out evenly: a browser still opens it at once."""

OPEN_TOKENS = 400
"""Tokens of a row that stand open; the rest is a click away."""

NUM_INPUTS = 20
"""Inputs that are named; a data set may have thousands."""

STRIP_CELLS = 240
"""Stretches of a row that its strip tells apart: finer than that is finer than a phone's screen."""

LEAD = """\
What the target reads, token by token, and which of it the drafter learns to say: that text is supervised, all else is
context."""

ABOUT_ROWS = """\
A tile is a token, with its id on hover; tokens that make a character only together share one. The strip above a row is
all of it, blue where it is supervised. Line breaks, tabs, runs of spaces, control and invisible characters are made
visible."""


class Token(NamedTuple):
    """A token of a row, or several that decode to text only together.

    Attributes:
        text: What it decodes to. For a page, with line breaks and what else is not seen as symbols.
        supervised: Whether the loss counts it.
        control: Whether it is an added token of the tokenizer, such as an end of turn.
    """

    text: str
    ids: tuple[int, ...]
    supervised: bool
    control: bool


class Gap(NamedTuple):
    """Tokens of a row that are not shown."""

    num_tokens: int


@dataclass(frozen=True)
class Row:
    """A row, or what of it there is room for.

    Attributes:
        row: Its number.
        source: ``FILE:LINE``.
        supervised_runs: Start and end of each supervised stretch, in tokens.
        parts: Tokens and gaps in order, all tokens of the row accounted for; read until the page has no more room.
    """

    row: int
    source: str
    num_tokens: int
    num_supervised: int
    supervised_runs: Sequence[tuple[int, int]]
    parts: Iterable[Token | Gap]


@dataclass(frozen=True)
class Distribution:
    """A histogram over rows: ``counts[i]`` of them in ``[edges[i], edges[i + 1])``, the last edge included.

    Attributes:
        quartiles: Value that a quarter, half and three quarters of the rows do not exceed.
    """

    edges: Sequence[float]
    counts: Sequence[int]
    quartiles: tuple[float, float, float]


def dataset_page(
    name: str, record: Record, lengths: Distribution, shares: Distribution, rows: Sequence[Row], chosen: str
) -> str:
    """The page as one HTML file.

    Args:
        name: Of the data set.
        record: ``prepare.json``; parts that are missing or of another type are left out, or shown as missing.
        lengths: Tokens of a row.
        shares: Supervised share of a row, 0 to 1.
        rows: Those to show, in order.
        chosen: How they were chosen, a sentence.
    """
    info = part_of(record, "dataset")
    room = PAGE_BYTES // max(len(rows), 1)
    return page(
        f"Data set {name}",
        LEAD,
        _headline(info),
        section("How long, and how much of it trains", *_distributions(info, lengths, shares)),
        section("What it was made from", *_origin(record)),
        section("Rows", tag("p", f"{chosen} {ABOUT_ROWS}"), _key(), *(_row(row, room) for row in rows)),
    )


def _counts(record: Record, name: str) -> dict[str, float]:
    return {str(kind): count for kind, count in part_of(record, name).items() if is_number(count)}


def _ratio(part: object, whole: object) -> float | None:
    return part / whole if is_number(part) and is_number(whole) and whole > 0 else None


# The data set as a whole


def _headline(info: Record) -> Html:
    rows, supervised = info.get("num_rows"), info.get("num_supervised")
    share = _ratio(supervised, info.get("num_tokens"))
    return figures(
        (number(rows), "rows", f"the longest has {number(info.get('longest'))} tokens"),
        (number(info.get("num_conversations")), "conversations", "duplicates counted once"),
        (number(info.get("num_tokens")), "tokens", f"{number(_ratio(info.get('num_tokens'), rows))} a row on average"),
        (percent(share), "supervised", f"{number(supervised)} tokens"),
    )


def _distributions(info: Record, lengths: Distribution, shares: Distribution) -> list[Html]:
    low, median, high = map(number, lengths.quartiles)
    told = f"Median {median} tokens (dashed); half have {low} to {high}"
    if is_number(info.get("max_length")):
        told += f"; limit {number(info['max_length'])}"
    length_chart = histogram(
        "Length of rows",
        lengths.edges,
        lengths.counts,
        x_label="tokens, logarithmic",
        y_label="rows",
        median=lengths.quartiles[1],
        is_log=True,
        caption=told,
    )
    low, median, high = map(percent, shares.quartiles)
    share_chart = histogram(
        "Supervised share of rows",
        [100 * edge for edge in shares.edges],
        shares.counts,
        x_label="% of a row's tokens",
        y_label="rows",
        median=100 * shares.quartiles[1],
        caption=f"Median {median} (dashed); half have {low} to {high}",
    )
    return [columns(length_chart, share_chart)]


def _origin(record: Record) -> list[Html]:
    info, report = part_of(record, "dataset"), part_of(record, "report")
    versions = part_of(record, "versions")
    thinking, lost, fill = info.get("thinking"), report.get("num_supervised_lost"), report.get("fill")
    shown = {
        "Read": _records(report),
        "Tokenizer": info.get("tokenizer"),
        "Vocabulary": f"{number(info.get('vocab_size'))} tokens",
        "Chat template": _hash(info.get("template_hash")),
        "Thinking": {True: "on", False: "off"}[thinking] if isinstance(thinking, bool) else "as the template decides",
        "Length limit": join([number(info.get("max_length")), " tokens, longer rows: ", info.get("on_long")]),
        "Lost to it": f"{number(lost)} supervised tokens" if is_number(lost) else "",
        "Packing": f"batches of {number(report.get('fill_tokens'))} tokens are {percent(fill)} full"
        if is_number(fill)
        else "",
        "Fingerprint": _hash(info.get("fingerprint")),
        "Made by": ", ".join(f"{name} {version}" for name, version in versions.items() if isinstance(version, str)),
    }
    rejected = _reasons("Records rejected", _counts(report, "rejected"), report.get("num_lines"))
    dropped = _reasons("Turns left out of records that were kept", _counts(report, "dropped_turns"), None)
    return [
        _inputs(record),
        facts({name: value for name, value in shown.items() if value}),
        columns(rejected, dropped),
    ]


def _records(report: Record) -> str:
    """Records of the inputs, what they held, and what became of those that are not in the data set."""
    if not is_number(report.get("num_lines")):
        return ""
    kinds = ", ".join(f"{number(count)} {kind}" for kind, count in _counts(report, "kinds").items())
    told = f"{number(report['num_lines'])} records" + (f" ({kinds})" if kinds else "")
    fates = {"num_rejected": "rejected", "num_left_out": "left out by weights"}
    ends = [f"{number(report[key])} {fate}" for key, fate in fates.items() if is_number(report.get(key))]
    return "; ".join([told, ", ".join(ends)]) if ends else told


def _inputs(record: Record) -> Html:
    """What each input gave, or their names alone where that is not known."""
    inputs, all_tokens = items_of(part_of(record, "report"), "inputs"), part_of(record, "dataset").get("num_tokens")
    rows: list[list[object]] = []
    for one in inputs:
        one = one if isinstance(one, Mapping) else {}
        source = part_of(one, "source")
        name = join([tag("span", source.get("path"), class_="line"), tag("small", ", ".join(_details(one, source)))])
        tokens = one.get("num_tokens")
        shown = [number(one.get("num_rows")), number(tokens), percent(_ratio(tokens, all_tokens))]
        weight = one.get("weight")
        rows.append([tag("div", name, class_="path"), *shown, f"{weight:g}" if is_number(weight) else None])
        rows[-1].append(source.get("license"))
    if not rows:
        names = items_of(part_of(record, "settings"), "inputs") or items_of(part_of(record, "dataset"), "files")
        rows = [[tag("div", name, class_="path")] for name in names]
    more = len(rows) - NUM_INPUTS
    caption = f"The first {NUM_INPUTS} of {number(len(rows))} inputs" if more > 0 else ""
    head = ("input", "rows", "tokens", "share", "weight", "license") if inputs else ("input",)
    return table(head, rows[:NUM_INPUTS], caption) if rows else Html()


def _details(one: Record, source: Record) -> Iterator[str]:
    """What is known of where an input's records come from, beside its path."""
    for key, value in source.items():
        if key == "files" and is_number(value):
            yield f"{number(value)} file" + "s" * (value != 1)
        elif key not in ("path", "license") and value is not None:
            yield f"{key} {value}"
    for reason, count in _counts(one, "ignored").items():
        yield f"{number(count)} files not read: {reason}"


def _hash(value: object) -> Html:
    """Enough of a hash to compare by eye; all of it on hover."""
    return tag("span", f"{value[:16]}…", title=value, class_="mono") if isinstance(value, str) and value else Html()


def _reasons(caption: str, counts: Mapping[str, float], whole: object) -> Html:
    if not counts:
        return Html()
    rows = [[kind, number(count), percent(_ratio(count, whole))] for kind, count in counts.items()]
    head = ("reason", "number", "share of records")
    return table(head, rows, caption) if is_number(whole) else table(head[:2], [row[:2] for row in rows], caption)


# Rows


def _key() -> Html:
    """What the tiles mean."""
    kinds = {
        "the loss counts it": (("super", True, False), ("vised", True, False)),
        "only read": (("con", False, False), ("text", False, False)),
        "one control token, such as an end of turn": (("control", False, True),),
    }
    items = (
        tag("li", _tokens(_tile(Token(text, (), supervised, control)) for text, supervised, control in tokens), meaning)
        for meaning, tokens in kinds.items()
    )
    return tag("ul", *items, class_="key")


def _row(row: Row, room: int) -> Html:
    opened, folded, num_folded, left_out = _fit(row, room)
    told = f"{number(row.num_tokens)} tokens, {number(row.num_supervised)} supervised"
    share = percent(_ratio(row.num_supervised, row.num_tokens))
    more = tag("details", tag("summary", f"{number(num_folded)} more tokens"), _tokens(folded)) if folded else Html()
    end = tag("p", tag("small", f"{number(left_out)} more tokens are not shown.")) if left_out else Html()
    return join(
        [
            tag("h3", f"Row {number(row.row)}"),
            tag("p", row.source, tag("small", f"{told} ({share})"), class_="source"),
            _strip(row),
            _tokens(opened),
            more,
            end,
        ]
    )


def _fit(row: Row, room: int) -> tuple[list[_Tile], list[_Tile], int, int]:
    """What stands open, what is folded and its tokens, and how many tokens at the end found no room."""
    opened: list[_Tile] = []
    folded: list[_Tile] = []
    num_shown = num_passed = num_opened = 0
    before = ""
    for part in row.parts:
        is_gap = isinstance(part, Gap)
        tile = _tile(part, before)
        room -= len(tile.markup.encode())
        if room < 0:
            break
        num_passed += part.num_tokens if isinstance(part, Gap) else len(part.ids)
        if num_shown < OPEN_TOKENS:
            opened.append(tile)
            num_opened = num_passed
        else:
            folded.append(tile)
        num_shown += not is_gap
        before = part.text if isinstance(part, Token) else ""
    return opened, folded, num_passed - num_opened, row.num_tokens - num_passed


class _Tile(NamedTuple):
    markup: Html
    supervised: bool


_SPACES = re.compile(r"(?: (?=[ \u21b5])|(?<=[ \n]) )+")
"""Spaces that a reader would not see, or not count: in runs, at the start of a line and at its end."""


def _tile(part: Token | Gap, before: str = "") -> _Tile:
    """A part as markup; `before` is the text of the part before it."""
    if isinstance(part, Gap):
        return _Tile(tag("em", f"{number(part.num_tokens)} tokens not shown"), False)
    title = " ".join(map(str, part.ids)) or None
    pieces = _mark_spaces(part.text, before[-1:])
    return _Tile(tag("i", *pieces, title=title, class_="control" if part.control else None), part.supervised)


def _mark_spaces(text: str, before: str) -> Iterator[object]:
    whole, place = before + text, len(before)
    for spaces in _SPACES.finditer(whole, place):
        yield whole[place : spaces.start()]
        yield tag("s", spaces[0])
        place = spaces.end()
    yield whole[place:]


def _tokens(tiles: Iterable[_Tile]) -> Html:
    """Text as tiles; supervised ones stand in an element of their own, which is shorter than a class on each."""
    groups = ((supervised, join(t.markup for t in run)) for supervised, run in groupby(tiles, lambda t: t.supervised))
    return tag("div", *(tag("b", group) if supervised else group for supervised, group in groups), class_="tokens pre")


def _strip(row: Row) -> Html:
    """All of a row in one line, its supervised stretches coloured."""
    cells = min(row.num_tokens, STRIP_CELLS)
    marks: list[list[int]] = []
    for start, end in row.supervised_runs:
        first, last = start * cells // row.num_tokens, -(-end * cells // row.num_tokens)
        if marks and first <= marks[-1][1]:
            marks[-1][1] = last
        else:
            marks.append([first, last])
    drawn = (tag("rect", x=first, y=0, width=last - first, height=1) for first, last in marks)
    stretches = f"{number(len(row.supervised_runs))} supervised stretch" + "es" * (len(row.supervised_runs) != 1)
    return tag(
        "svg",
        tag("title", f"{stretches} in {number(row.num_tokens)} tokens"),
        *drawn,
        viewBox=f"0 0 {max(cells, 1)} 1",
        preserveAspectRatio="none",
        role="img",
        class_="strip",
    )
