"""Building blocks of HTML reports: each returns markup in which everything shown is escaped.

    page(title, lead, section(heading, block, ...), ...) -> one self-contained file

A page loads nothing and runs nothing: no scripts, fonts, images or network, held to that by its own content security
policy; one that is served may have one script, which the policy knows by its digest. What it shows is foreign text
(prompts, model output, names of machines), so `tag` escapes all that is not `Html` already, and `Html` is made by
`tag`, `escape` and `join` alone.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from paceline.report.style import STYLE

MISSING = "–"
"""Shown for what is missing or not a finite number."""

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"  # the last two do not follow default-src
)

_VOID = frozenset({"meta", "link"})
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_KEPT = frozenset("\n\t\u200c\u200d")  # the two joiners write Persian and family emoji


class Html(str):
    """Markup that is shown as it is. Joined with other text it is plain text again, and escaped."""


def escape(value: object) -> Html:
    """Any value as text that is safe between tags and inside quotes.

    Control and invisible characters, direction overrides and lone surrogates become symbols or escapes (``␀``,
    ``\\u202e``), so that the page reads as it is and can be written as UTF-8.
    """
    if isinstance(value, Html):
        return value
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return Html(MISSING)
    return Html(html.escape("".join(map(_visible, str(value)))))


def _visible(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN_CATEGORIES:
        return character
    return chr(0x2400 + ord(character)) if character < " " else ascii(character)[1:-1]


def join(blocks: Iterable[object], between: str = "") -> Html:
    """Blocks one after the other, escaped where they are not markup."""
    return Html(escape(between).join(map(escape, blocks)))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """One element.

    Args:
        name: Tag name, from our code.
        children: What it holds; escaped unless `Html`.
        attributes: Always escaped; None leaves one out. ``class_`` is class, ``text_anchor`` is text-anchor.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>" + ("" if name in _VOID else f"{join(children)}</{name}>"))


# Numbers


Record = Mapping[str, Any]
"""An object of a JSON file, of which nothing is known for certain."""


def part_of(record: Record, name: str) -> Record:
    """An object inside of a record; empty if there is none."""
    part = record.get(name)
    return part if isinstance(part, Mapping) else {}


def items_of(record: Record, name: str) -> list[Any]:
    """A list inside of a record; empty if there is none."""
    items = record.get(name)
    return items if isinstance(items, list) else []


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number; truth values are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def number(value: object, digits: int = 0) -> str:
    """1,234.5 with that many digits after the point; whole numbers have none."""
    if not is_number(value):
        return MISSING
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def times(value: object) -> str:
    """A ratio as 1.73×; one below 1 is rounded down where two digits would make it 1.00."""
    if not is_number(value):
        return MISSING
    return f"{min(value, 0.99) if value < 1 else value:.2f}×"


def percent(value: object) -> str:
    """A fraction as 43%; one that would round to nothing is <1%."""
    if not is_number(value):
        return MISSING
    return "<1%" if 0 < value < 0.005 else f"{value:.0%}"


def duration(seconds: object) -> str:
    """Seconds as 0.78 s, 12.3 s, 6 min 28 s or 2 h 5 min."""
    if not is_number(seconds):
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.{2 if seconds < 9.995 else 1}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


# Text


def page(title: str, lead: object, *sections: object, style: str = "", script: str = "") -> str:
    """The whole file.

    Args:
        title: The one first-level heading, and the window's title.
        lead: What the page says, in a sentence or two.
        sections: In reading order.
        style: Rules of this page alone, from our code.
        script: Of a page that is served, from our code; it may ask where the page came from, and nobody else.
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Html(STYLE + style)),
        tag("script", Html(script), type="module") if script else Html(),
    )
    header = tag("header", tag("h1", title), tag("p", lead, class_="lead") if lead else Html())
    return "<!doctype html>\n" + tag("html", head, tag("body", tag("main", header, *sections)), lang="en") + "\n"


def policy(script: str = "") -> str:
    """The content security policy of a page: `POLICY`, and with a script that one alone, by its digest."""
    if not script:
        return POLICY
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"{POLICY}; script-src 'sha256-{digest}'; connect-src 'self'"


def section(heading: str, *blocks: object) -> Html:
    """A part of the page under a second-level heading; nothing if all its blocks are empty."""
    return tag("section", tag("h2", heading), *blocks) if any(blocks) else Html()


def bullets(*items: object) -> Html:
    """A list; empty items are left out."""
    return tag("ul", *(tag("li", item) for item in items if item))


def badge(label: object) -> Html:
    """A small label behind a heading or a name."""
    return tag("span", label, class_="badge")


def note(*parts: object, is_warning: bool = False) -> Html:
    """A set-off remark; a warning is what a reader must not miss."""
    return tag("div", *parts, class_="note warning" if is_warning else "note", role="note")


def quote(value: object) -> Html:
    """Foreign text as it is, white space kept."""
    return tag("blockquote", value, dir="auto", class_="pre")


def columns(*blocks: object) -> Html:
    """Blocks beside each other, below each other where the window is narrow; empty ones are left out."""
    return tag("div", *(tag("div", block) for block in blocks if block), class_="columns")


def code(lines: str, is_shell: bool = True) -> Html:
    """Commands with a prompt that is not copied, or the lines of a file; lines that begin with ``#`` are comments."""
    shown = []
    for line in lines.split("\n"):
        kind = "comment" if line.startswith("#") else "command" if is_shell and line else None
        shown.append(tag("span", line, class_=kind))
    return tag("pre", tag("code", join(shown, "\n")), class_="code", tabindex="0")


def token_text(tokens: Iterable[tuple[str, str]]) -> Html:
    """Text in which every token is a tile of its own, white space kept.

    Args:
        tokens: Text and kind of each: ``drafted`` is coloured and underlined, ``first`` outlined, any other plain.
    """
    line_end = join([tag("i", class_="line-end"), "\n"])  # a tile that is only a line break would not be seen
    tiles = (tag("span", join(text.split("\n"), line_end), class_=_tile(kind)) for text, kind in tokens)
    return tag("div", *tiles, class_="pre", dir="auto")


def token_key(kinds: Mapping[str, str]) -> Html:
    """What the tiles of `token_text` mean: kind -> meaning."""
    return tag("ul", *(tag("li", tag("span", "token", class_=_tile(k)), v) for k, v in kinds.items()), class_="key")


def _tile(kind: str) -> str:
    return f"tile {kind}" if kind in ("drafted", "first") else "tile"


# Figures and tables


def figures(*items: tuple[object, str, object]) -> Html:
    """Headline figures: big value, label, and a note below."""
    shown = (
        tag("li", tag("b", value), tag("span", label), tag("small", remark) if remark else Html())
        for value, label, remark in items
    )
    return tag("ul", *shown, class_="figures")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: object = "") -> Html:
    """A table whose first column names the row and whose others hold figures; wide ones scroll inside."""
    body = (tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows)
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption) if caption else Html(),
            tag("thead", tag("tr", *(tag("th", name, scope="col") for name in head))),
            tag("tbody", *body),
        ),
        class_="scroll",
        tabindex="0",
    )


def facts(items: Mapping[str, object]) -> Html:
    """Names and values, one pair a line."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in items.items()), class_="facts")
