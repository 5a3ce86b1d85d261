"""Records to conversations: the ways in which public files write down one and the same exchange.

A record is read by the first of these keys that it holds with a value other than null:

    rows, input_ids                    token rows, made elsewhere (`TokenRows`)
    messages, conversations, ...       a list of turns: role and content, or from and value
    prompt, instruction, question      one question, its answer under another key
    text                               a text without turns (`Document`)

Whatever the dialect, messages come out in the one form that chat templates are written for. Nothing is guessed: a
record that two readings would fit, or of which a part would be lost, is a `Rejection` that says so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_DETAIL = 300
"""Characters of a rejection's detail that are kept."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles that a chat template may be shown; other names mean another dialect or a broken row."""

ROLE_NAMES = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""Names of roles in public files, and the role that each of them means."""

CALL_ROLE = "function_call"
"""A turn of this name is a call of the assistant, written as JSON in its value."""

LIST_KEYS = ("messages", "conversations", "conversation")
SYSTEM_KEYS = ("system", "system_prompt")
ANSWER_KEYS = {
    "prompt": ("response", "completion"),
    "instruction": ("output", "response"),
    "question": ("answer", "response"),
}
"""Keys of a single question, and where its answer stands."""

IGNORED_LABEL = -100
"""Label of a token without loss, by the convention of PyTorch's cross-entropy."""

MEDIA_KEY = re.compile(r"(image|audio|video)s?(_.*)?")
"""Keys under which records, messages and parts hold what is no text."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
TEXT_PARTS = ("text", "input_text", "output_text")


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


@dataclass(frozen=True)
class Conversation:
    """Messages and tools in the one form that is handed to chat templates.

    Attributes:
        messages: Each with ``role`` and a string ``content``; keys with null values are gone; arguments of tool calls
            are objects; reasoning stands under ``reasoning_content``. Other keys are passed on as they came.
        tools: Tool descriptions, or None.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None

    @property
    def hash(self) -> int:
        """64-bit hash of the content; equal for exact duplicates, whatever else their lines hold.

        Raises: Rejection if a string is not valid Unicode (a lone surrogate).
        """
        return _hash([self.messages, self.tools])


@dataclass(frozen=True)
class Document:
    """A text without turns, all of it the target's."""

    text: str

    @property
    def hash(self) -> int:
        """64-bit hash of the text. Raises: Rejection if it is not valid Unicode."""
        return _hash(self.text)


@dataclass(frozen=True)
class TokenRows:
    """Rows that came as token ids; several where a template rewrote earlier turns.

    Attributes:
        rows: ``(input_ids, loss_mask)``: int64 ``[n]``, not checked against any vocabulary; bool ``[n]``.
    """

    rows: list[tuple[np.ndarray, np.ndarray]]

    @property
    def hash(self) -> int:
        """64-bit hash of ids and masks."""
        sha = hashlib.blake2b(digest_size=8)
        for ids, mask in self.rows:
            sha.update(len(ids).to_bytes(8, "little") + ids.tobytes() + mask.tobytes())
        return int.from_bytes(sha.digest(), "little")


def parse(record: Mapping[str, Any]) -> Conversation | Document | TokenRows:
    """What a record holds. Raises: Rejection saying what is wrong with it."""
    if _has(record, "rows") or _has(record, "input_ids"):
        return _token_rows(record)
    if media := _media_key(record):
        raise Rejection("content is not text", f"the row has `{media}`")
    lists = [key for key in LIST_KEYS if _has(record, key)]
    if len(lists) > 1 and any(record[key] != record[lists[0]] for key in lists[1:]):
        raise Rejection("two conversations", f"`{lists[0]}` and `{lists[1]}` differ")
    if lists:
        messages = _message_list(record[lists[0]], lists[0])
        if not messages:
            raise Rejection("empty conversation")
    elif questions := [key for key in ANSWER_KEYS if _has(record, key)]:
        question = questions[0]
        if len(questions) > 1:
            raise Rejection("two questions", f"`{questions[0]}` and `{questions[1]}`")
        messages = _question_and_answer(record, question)
    elif _has(record, "text"):
        return _document(record["text"])
    else:
        keys = ", ".join(sorted(map(str, record)))
        null = ", ".join(f"`{key}` is null" for key in LIST_KEYS if key in record)
        raise Rejection("no conversation", f"{null + '; ' if null else ''}keys seen: {keys or 'none'}")
    messages = [_clean_message(number, message) for number, message in enumerate(messages, start=1)]
    if record.get("functions") and not record.get("tools"):  # how tools were described before calls had types
        record = {**record, "tools": _clean_functions(record["functions"])}
    return Conversation(_with_system(record, messages), _clean_tools(record.get("tools")))


def _has(record: Mapping[str, Any], key: str) -> bool:
    return record.get(key) is not None


def _media_key(value: Mapping[str, Any]) -> str | None:
    """The first key with an image, a sound or a film; columns of a table may be there without a value."""
    for key, item in value.items():
        filled = any(x is not None for x in item.values()) if isinstance(item, dict) else bool(item)
        if filled and isinstance(key, str) and MEDIA_KEY.fullmatch(key):
            return key
    return None


def _message_list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise Rejection("no list of messages", f"`{key}` is a JSON {json_name(value)}")
    return value


def _question_and_answer(record: Mapping[str, Any], question: str) -> list[Any]:
    """Messages of a record with one question; without an answer where it has none."""
    asked = record[question]
    if question == "instruction" and record.get("input"):
        if not isinstance(asked, str) or not isinstance(record["input"], str):
            raise Rejection("content is not text", "`instruction` or `input` is no string")
        asked = f"{asked}\n\n{record['input']}"
    answers = [key for key in ANSWER_KEYS[question] if _has(record, key)]
    if len(answers) > 1:
        raise Rejection("two answers", f"`{answers[0]}` and `{answers[1]}`")
    return [
        *_as_messages(asked, "user", question),
        *(m for key in answers for m in _as_messages(record[key], "assistant", key)),
    ]


def _as_messages(value: Any, role: str, key: str) -> list[Any]:
    """A string as one message; a list, as some files have it, as the messages that it is."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _message_list(value, key)


def _with_system(record: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages after the system prompt that stands beside them in the record, if one does."""
    key = _only_key(record, SYSTEM_KEYS, "two system prompts")
    if key is None:
        return messages
    text = record[key]
    if not isinstance(text, str):
        raise Rejection("content is not text", f"`{key}` is a JSON {json_name(text)}")
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    if messages[0]["content"] != text:
        raise Rejection("two system prompts", f"`{key}` and message 1 differ")
    return messages


def _only_key(record: Mapping[str, Any], keys: Sequence[str], kind: str, where: str = "") -> str | None:
    """The first of some keys for one and the same thing that has a value; None if none has.

    Raises: Rejection if two of them have different values: one would be lost.
    """
    found = [key for key in keys if record.get(key)]
    for other in found[1:]:
        if record[other] != record[found[0]]:
            raise Rejection(kind, f"{where}`{found[0]}` and `{other}` differ")
    return found[0] if found else None


def _document(text: Any) -> Document:
    if not isinstance(text, str):
        raise Rejection("content is not text", f"`text` is a JSON {json_name(text)}")
    if not text.strip():
        raise Rejection("empty text")
    return Document(text)


def _token_rows(record: Mapping[str, Any]) -> TokenRows:
    rows = record["rows"] if _has(record, "rows") else [record]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise Rejection("bad token row", "`rows` is no list of objects with `input_ids` and `loss_mask`")
    return TokenRows([_token_row(row) for row in rows])


def _token_row(row: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    if not _has(row, "input_ids") or not (_has(row, "loss_mask") or _has(row, "labels")):
        raise Rejection(
            "bad token row", f"`input_ids` needs `loss_mask`; keys seen: {', '.join(sorted(map(str, row)))}"
        )
    ids = _integers(row["input_ids"], "input_ids")
    if _has(row, "attention_mask") and not _integers(row["attention_mask"], "attention_mask").all():
        raise Rejection("bad token row", "`attention_mask` says that it is padded: give rows without padding")
    if not len(ids):
        raise Rejection("empty conversation", "`input_ids` is empty")
    if _has(row, "loss_mask"):
        mask = _integers(row["loss_mask"], "loss_mask")
        if ((mask != 0) & (mask != 1)).any():
            raise Rejection("bad token row", "`loss_mask` holds other values than 0 and 1")
    else:
        labels = _integers(row["labels"], "labels")
        if len(labels) == len(ids) and ((labels != ids) & (labels != IGNORED_LABEL)).any():
            raise Rejection("bad token row", f"`labels` holds other values than the ids and {IGNORED_LABEL}")
        mask = labels != IGNORED_LABEL
    if len(mask) != len(ids):
        raise Rejection("bad token row", f"{len(ids)} ids and a mask of {len(mask)}")
    return ids, mask.astype(bool)


def _integers(values: Any, key: str) -> np.ndarray:
    """int64 ``[n]`` of a list of integers or booleans."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise Rejection("bad token row", f"`{key}` is no list of integers") from error
    if isinstance(values, Sequence) and not len(values):
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "bi":
        raise Rejection("bad token row", f"`{key}` is no list of integers")
    return array.astype(np.int64)


def _clean_message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Rejection("message is not an object", f"message {number} is a JSON {json_name(message)}")
    # Columnar exports fill absent keys with null, which templates take for a present value.
    cleaned = {key: value for key, value in message.items() if value is not None}
    here = f"message {number}: "
    for wanted, other in (("role", "from"), ("content", "value")):
        if wanted == "role" and {wanted, other} <= cleaned.keys():  # two words for one role are no contradiction
            cleaned[other] = cleaned[wanted] if _same_role(cleaned[wanted], cleaned[other]) else cleaned[other]
        _only_key(cleaned, (wanted, other), "two readings of a message", here)
        if other in cleaned:
            cleaned[wanted] = cleaned.get(wanted) or cleaned[other]
            del cleaned[other]
    name = cleaned.get("role")
    if not isinstance(name, str):
        raise Rejection("message without role", f"message {number}; keys seen: {', '.join(sorted(cleaned)) or 'none'}")
    if name not in ROLE_NAMES:
        raise Rejection("unknown role", f"message {number} has {name!r}; known: {', '.join(sorted(ROLE_NAMES))}")
    cleaned["role"] = ROLE_NAMES[name]
    if media := _media_key(cleaned):
        raise Rejection("content is not text", f"message {number} has `{media}`")
    calls = [cleaned.pop("tool_calls", None)]
    if name == CALL_ROLE:
        calls.append(_calls_from_text(number, cleaned.pop("content", None)))
    if "function_call" in cleaned:  # how a call was written before there were lists of them
        calls.append([{"function": cleaned.pop("function_call")}])
    calls = [call for call in calls if call is not None and call != []]
    if len(calls) > 1:
        raise Rejection("two readings of a message", f"{here}calls stand in two places")
    if calls:
        cleaned["tool_calls"] = _clean_tool_calls(number, calls[0])
    for key in REASONING_KEYS:
        if key in cleaned and not isinstance(cleaned[key], str):
            raise Rejection("content is not text", f"{here}`{key}` is a JSON {json_name(cleaned[key])}")
    if reasoning := _only_key(cleaned, REASONING_KEYS, "two readings of a message", here):
        cleaned["reasoning_content"] = cleaned[reasoning]
    cleaned["content"] = _clean_content(number, cleaned)
    return cleaned


def _same_role(name: Any, other: Any) -> bool:
    known = [ROLE_NAMES.get(x) if isinstance(x, str) else None for x in (name, other)]
    return known[0] is not None and known[0] == known[1]


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
    raise Rejection("content is not text", f"message {number} holds a JSON {json_name(content)}")


def _part_text(number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        kind = part.get("type") or _media_key(part) or "text"
        kind = (_media_key(part) or kind) if kind in TEXT_PARTS else kind
        if kind not in TEXT_PARTS:
            raise Rejection("content is not text", f"message {number} has a part of type {str(kind)!r}")
        if isinstance(part.get("text"), str):
            return part["text"]
    raise Rejection("content is not text", f"message {number} has a part without text")


def _calls_from_text(number: int, text: Any) -> list[Any]:
    try:
        calls = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise Rejection("bad tool calls", f"message {number}: a {CALL_ROLE} that is not JSON") from error
    return [{"function": call} for call in (calls if isinstance(calls, list) else [calls])]


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
        raise Rejection("bad tools", f"`tools` is a JSON {json_name(tools)}; a list was wanted")
    return tools


def _clean_functions(functions: Any) -> list[Any]:
    described = _clean_tools(functions) or []
    return [{"type": "function", "function": function} for function in described]


def _hash(content: Any) -> int:
    try:
        encoded = json.dumps(content, ensure_ascii=False, sort_keys=True, default=str).encode("utf-8")
    except UnicodeEncodeError as error:
        raise Rejection("invalid Unicode", f"lone surrogate {ascii(error.object[error.start])}") from error
    except (RecursionError, TypeError, ValueError) as error:
        raise Rejection("invalid JSON", "nested too deep, or keys that are no strings") from error
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def json_name(value: Any) -> str:
    """What JSON calls a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {dict: "object", list: "array", str: "string", int: "number", float: "number"}
    return names.get(type(value), type(value).__name__)
