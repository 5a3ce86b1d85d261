"""Input files to conversations: bytes to lines, lines to JSON, JSON to messages as a chat template wants them.

Nothing here trusts its input: whatever is wrong with a line is a `Rejection` that says so, and the run goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from paceline.errors import DataError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles that a chat template may be shown; other names mean another dialect or a broken row."""

MAX_DETAIL = 300
"""Characters of a rejection's detail that are kept."""

MAX_LINE_BYTES = 8 << 20
"""Longest line that is parsed; a longer one, such as a whole JSON array, is rejected without being held in memory."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Rejection(Exception):
    """A row that cannot be used; the run goes on without it.

    Attributes:
        kind: Short constant text by which rejections are counted.
        detail: What was seen in this row, or empty.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        # The detail quotes untrusted data: it is kept short and free of what would steer a terminal.
        detail = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in detail[:MAX_DETAIL])[:MAX_DETAIL]
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail

    @property
    def reason(self) -> str:
        """Kind and detail in one line."""
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.detail)  # it crosses the worker processes


class Line(NamedTuple):
    """One physical line of an input file, without its line ending and byte order mark."""

    file: str
    number: int
    """Counted from 1, blank lines included."""
    raw: bytes


@dataclass(frozen=True)
class Conversation:
    """Messages and tools in the one form that is handed to chat templates.

    Attributes:
        messages: Each with ``role`` and a string ``content``; keys with null values are gone; arguments of tool calls
            are objects. Other keys are passed on as they came.
        tools: Tool descriptions, or None.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None

    @property
    def hash(self) -> int:
        """64-bit hash of the content; equal for exact duplicates, whatever else their lines hold.

        Raises: Rejection if a string is not valid Unicode (a lone surrogate).
        """
        try:
            encoded = json.dumps([self.messages, self.tools], ensure_ascii=False, sort_keys=True).encode("utf-8")
        except UnicodeEncodeError as error:
            raise Rejection("invalid Unicode", f"lone surrogate {ascii(error.object[error.start])}") from error
        except RecursionError as error:
            raise Rejection("invalid JSON", "nested too deep") from error
        return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def read_lines(path: Path) -> Iterator[Line]:
    """Lines of a JSON Lines file that are not blank: UTF-8 with or without byte order mark, ended by LF or CR LF.

    Raises: DataError if the file cannot be read or all its lines are blank.
    """
    found = False
    name = os.fsencode(path).decode("utf-8", errors="replace")
    try:
        with path.open("rb") as file:
            for number, physical in enumerate(_physical_lines(file), start=1):
                raw = physical.removeprefix(BYTE_ORDER_MARK) if number == 1 else physical
                raw = raw.removesuffix(b"\n").removesuffix(b"\r")
                if raw.strip():
                    found = True
                    yield Line(name, number, raw)
    except OSError as error:
        raise DataError(f"input {path} cannot be read: {error.strerror}") from error
    if not found:
        raise DataError(f"input {path} is empty: one JSON object a line was wanted")


def _physical_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines with their endings, split on LF only, as a binary file is; of one that is too long, enough to tell."""
    while physical := file.readline(MAX_LINE_BYTES + 1):
        rest = physical
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        yield physical


def check_input(path: Path) -> int:
    """Size of an input file in bytes. Raises: DataError if it is missing, a folder or unreadable."""
    if path.is_dir():
        raise DataError(f"input {path} is a folder: name its JSONL files, for example {path}/*.jsonl")
    try:
        with path.open("rb"):
            return path.stat().st_size
    except OSError as error:
        raise DataError(f"input {path} cannot be read: {error.strerror}") from error


def parse_line(raw: bytes) -> Conversation:
    """Conversation of one line. Raises: Rejection saying what is wrong with it."""
    return conversation_from(decode_record(raw))


def decode_record(raw: bytes) -> dict[str, Any]:
    """JSON object of one line. Raises: Rejection for a line too long, invalid UTF-8 or JSON, and other JSON values."""
    if len(raw) > MAX_LINE_BYTES:
        raise Rejection("line too long", f"more than {MAX_LINE_BYTES} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Rejection("invalid UTF-8", f"byte {error.start} is 0x{raw[error.start]:02x}") from error
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise Rejection("invalid JSON", f"{error.msg} (character {error.pos})") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of open brackets
        raise Rejection("invalid JSON", "a number or a nesting beyond what can be read") from error
    if not isinstance(record, dict):
        raise Rejection("not a JSON object", f"a JSON {_json_name(record)}")
    return record


def conversation_from(record: Mapping[str, Any]) -> Conversation:
    """Conversation of a record with ``messages`` and perhaps ``tools``. Raises: Rejection."""
    messages = record.get("messages")
    if not isinstance(messages, list):
        seen = "missing" if "messages" not in record else _json_name(messages)
        keys = ", ".join(sorted(map(str, record)))
        raise Rejection("no messages list", f"`messages` is {seen}; keys seen: {keys or 'none'}")
    if not messages:
        raise Rejection("empty conversation")
    cleaned = [_clean_message(number, message) for number, message in enumerate(messages, start=1)]
    if all(message["role"] != "assistant" for message in cleaned):
        raise Rejection("no assistant turn")
    return Conversation(cleaned, _clean_tools(record.get("tools")))


def _clean_message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Rejection("message is not an object", f"message {number} is a JSON {_json_name(message)}")
    # Columnar exports fill absent keys with null, which templates take for a present value.
    cleaned = {key: value for key, value in message.items() if value is not None}
    role = cleaned.get("role")
    if not isinstance(role, str):
        raise Rejection("message without role", f"message {number}; keys seen: {', '.join(sorted(cleaned)) or 'none'}")
    if role not in ROLES:
        raise Rejection("unknown role", f"message {number} has {role!r}; known: {', '.join(sorted(ROLES))}")
    if "tool_calls" in cleaned:
        cleaned["tool_calls"] = _clean_tool_calls(number, cleaned["tool_calls"])
    cleaned["content"] = _clean_content(number, cleaned)
    return cleaned


def _clean_content(number: int, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        if message.get("tool_calls"):
            return ""
        raise Rejection("missing content", f"message {number} ({message['role']})")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(number, part) for part in content)
    raise Rejection("content is not text", f"message {number} holds a JSON {_json_name(content)}")


def _part_text(number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        kind = part.get("type", "text")
        if kind != "text":
            raise Rejection("content is not text", f"message {number} has a part of type {str(kind)!r}")
        if isinstance(part.get("text"), str):
            return part["text"]
    raise Rejection("content is not text", f"message {number} has a part without text")


def _clean_tool_calls(number: int, calls: Any) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Rejection("bad tool calls", f"message {number}: `tool_calls` is not a list of objects")
    return [_clean_tool_call(number, call) for call in calls]


def _clean_tool_call(number: int, call: dict[str, Any]) -> dict[str, Any]:
    """The call with its arguments as an object: a string would be rendered quoted a second time."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _clean_tool_call(number, call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        return {**call, "arguments": json.loads(arguments) if arguments.strip() else {}}
    except (ValueError, RecursionError) as error:
        raise Rejection("bad tool calls", f"message {number}: the arguments are a string that is not JSON") from error


def _clean_tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise Rejection("bad tools", "`tools` is a string that is not JSON") from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Rejection("bad tools", f"`tools` is a JSON {_json_name(tools)}; a list was wanted")
    return tools


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {dict: "object", list: "array", str: "string", int: "number", float: "number"}
    return names[type(value)]
