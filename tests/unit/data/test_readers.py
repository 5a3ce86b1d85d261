"""Bytes to lines, lines to conversations."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from paceline.data import readers
from paceline.data.readers import Rejection, check_input, conversation_from, parse_line, read_lines
from paceline.errors import DataError
from tests.unit.data.conftest import chat


def test_lines_are_physical_and_split_on_line_feeds_only(tmp_path: Path) -> None:
    """Blank lines count but are not given out; other separators, and a byte order mark further on, are content."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\n  \t\r\ntwo\x0b\x0c\xe2\x80\xa8\rstill two\n\xef\xbb\xbfthree")
    lines = [(line.number, line.raw) for line in read_lines(file)]
    assert lines == [(1, b"one"), (4, b"two\x0b\x0c\xe2\x80\xa8\rstill two"), (5, b"\xef\xbb\xbfthree")]


@pytest.mark.parametrize("excess", [0, 1, 2, 10, 11, 12, 35])
def test_a_line_beyond_the_limit_is_rejected_without_being_held(
    excess: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line over the limit gives its beginning, is rejected for its length, and the next line is read as usual."""
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 10)
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"x" * (10 + excess) + b"\nnext")
    first, second = read_lines(file)
    assert (first.raw, first.number) == (b"x" * min(10 + excess, 11), 1)
    assert (second.raw, second.number) == (b"next", 2)
    with pytest.raises(Rejection) as caught:
        parse_line(first.raw)
    assert caught.value.kind == ("line too long" if excess else "invalid JSON")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b" \r\n"])
def test_a_file_without_rows_is_an_error(content: bytes, tmp_path: Path) -> None:
    """A file that is empty or blank is named as such."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match="a.jsonl is empty"):
        list(read_lines(file))


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    """An input that cannot be read is an error before anything else happens."""
    with pytest.raises(DataError, match="none.jsonl cannot be read: No such file"):
        check_input(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="is a folder"):
        check_input(tmp_path)


def user_says(content: Any) -> dict[str, Any]:
    """A record whose user message has this content."""
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{\xff}", "invalid UTF-8: byte 1 is 0xff"),
        (b"{", "invalid JSON: Expecting property name enclosed in double quotes (character 1)"),
        (b'{"a": "\x01"}', "invalid JSON: Invalid control character at (character 7)"),
        (b'{"a": ' + b"1" * 5000 + b"}", "invalid JSON: a number or a nesting beyond what can be read"),
        (b"[" * 100_000, "invalid JSON: a number or a nesting beyond what can be read"),
        (b"null", "not a JSON object: a JSON null"),
        (b"true", "not a JSON object: a JSON boolean"),
        (b"{}", "no messages list: `messages` is missing; keys seen: none"),
        (b'{"messages": []}', "empty conversation"),
        (b'{"messages": ["hi"]}', "message is not an object: message 1 is a JSON string"),
        (b'{"messages": [{"from": "user"}]}', "message without role: message 1; keys seen: from"),
    ],
)
def test_broken_lines_are_rejected_with_what_was_seen(raw: bytes, reason: str) -> None:
    """Each way to break a line has its own reason."""
    with pytest.raises(Rejection) as caught:
        parse_line(raw)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (user_says(None), "missing content: message 1 (user)"),
        (user_says(4), "content is not text: message 1 holds a JSON number"),
        (user_says([{"type": "image", "url": "x"}]), "content is not text: message 1 has a part of type 'image'"),
        (user_says([{"type": "text"}]), "content is not text: message 1 has a part without text"),
        (
            {"messages": [{"role": "gpt", "content": "x"}]},
            "unknown role: message 1 has 'gpt'; known: assistant, developer, system, tool, user",
        ),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant turn"),
        ({**chat("a", "b"), "tools": "{"}, "bad tools: `tools` is a string that is not JSON"),
        ({**chat("a", "b"), "tools": {"a": 1}}, "bad tools: `tools` is a JSON object; a list was wanted"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "bad tool calls: message 1: the arguments are a string that is not JSON",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": {}}]},
            "bad tool calls: message 1: `tool_calls` is not a list of objects",
        ),
    ],
)  # fmt: skip
def test_unusable_conversations_are_rejected_with_what_was_seen(record: dict[str, Any], reason: str) -> None:
    """Each way in which a record is no text conversation has its own reason."""
    with pytest.raises(Rejection) as caught:
        conversation_from(record)
    assert caught.value.reason == reason


def test_text_parts_are_joined_and_null_keys_dropped() -> None:
    """Content in text parts equals the same content in one string, and a null key equals an absent one."""
    parts = user_says([{"type": "text", "text": "he"}, "llo"])
    parts["messages"][1]["tool_calls"] = None
    assert conversation_from(parts) == conversation_from(user_says("hello"))


def test_the_hash_depends_on_content_alone() -> None:
    """Rows that differ in other columns or in key order share a hash; other content has another."""
    one = parse_line(json.dumps({"id": 1, **chat("a", "b")}).encode())
    two = parse_line(b'{"messages": [{"content": "a", "role": "user"}, {"content": "b", "role": "assistant"}]}')
    three = parse_line(json.dumps(chat("a", "c")).encode())
    assert one.hash == two.hash != three.hash


def test_a_lone_surrogate_is_rejected() -> None:
    """A string that UTF-8 cannot hold rejects the row."""
    conversation = parse_line(b'{"messages": [{"role": "assistant", "content": "a\\ud800"}]}')
    with pytest.raises(Rejection, match="invalid Unicode"):
        _ = conversation.hash


def test_a_reason_is_short_printable_and_survives_a_process_border() -> None:
    """Details from untrusted data lose control characters and length, and pickle to an equal rejection."""
    rejection = Rejection("kind", "\x1b[31m" + "x" * 1000)
    assert rejection.reason == "kind: \\x1b[31m" + "x" * 292
    copy = pickle.loads(pickle.dumps(rejection))
    assert (copy.kind, copy.detail, copy.reason) == (rejection.kind, rejection.detail, rejection.reason)
