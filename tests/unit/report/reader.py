"""A reader of pages that fails on what a browser would silently repair, and hostile text for them."""

from __future__ import annotations

from html.parser import HTMLParser

HOSTILE = "</script></title></style><img src=x onerror=\"alert('1')\">\u202e\u2066\x00\x1b\x7f\ud800\ufffe&lt;!--"
VISIBLE = "</script></title></style><img src=x onerror=\"alert('1')\">\\u202e\\u2066␀␛\\x7f\\ud800\\ufffe&lt;!--"
"""What the page shows of it."""
VOID = {"meta", "link"}


class Reader(HTMLParser):
    """Parses a page strictly.

    Attributes:
        tags: Names of all elements, in order.
        attributes: Name and value of every attribute.
        shown: Text by the element that holds it.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.shown: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in <{tag}>"
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.shown.append((self._open[-1] if self._open else "", data))

    def text(self) -> str:
        """All that is shown, without the style sheet."""
        return "".join(data for tag, data in self.shown if tag != "style")


def check(page: str) -> Reader:
    """Read a page and check what holds for all of them: self-contained, no scripts, writable, nothing hidden."""
    reader = Reader(page)
    page.encode("utf-8")
    assert not [c for c in page if c not in "\n\t" and (ord(c) < 32 or c in "\x7f\u202e\u2066\ufffe")]
    assert not {"script", "img", "iframe", "object", "embed", "base", "form", "a"} & set(reader.tags)
    for name, value in reader.attributes:
        assert not name.startswith("on") and name not in ("src", "action", "srcset")
        assert name != "href" or value == "data:,"
        assert name != "style" or "url" not in value
    style = next(data for tag, data in reader.shown if tag == "style")
    assert "url(" not in style and "@import" not in style
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
            "form-action 'none'") in reader.attributes  # fmt: skip
    levels = [int(tag[1]) for tag in reader.tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False))
    assert "nan" not in reader.text().lower().split() and "None" not in reader.text()
    return reader
