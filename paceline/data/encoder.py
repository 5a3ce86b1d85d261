"""Texts to token ids: what somebody typed stays text, and what texts share is tokenized once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from paceline.data.dialects import Conversation, Rejection

GUARDS = tuple(chr(0xF0000 + i) for i in range(16))
"""Private-use characters; one that a row does not contain marks control tokens typed as text while it is rendered."""


class Encoder:
    """Text to token ids, such that control tokens typed as text stay text.

    Attributes:
        added_ids: Ids of the tokens that are found in a text before all others, with their text.
        control_ids: Ids of the special ones.
        joins_cleanly: Whether texts tokenized apart give the ids of the whole, as long as no characters merge.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, is_sayable: Callable[[str], bool]) -> None:
        """Study the tokenizer once.

        Args:
            is_sayable: Whether an answer may hold this control token.
        """
        self._tokenizer = tokenizer
        self._backend = None
        added = tokenizer.added_tokens_decoder
        special = {token.content for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        self.added_ids = {i: token.content for i, token in added.items()}
        self.control_ids = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self._control_pattern = any_of(special)
        self._answer_pattern = any_of({control for control in special if not is_sayable(control)})
        self._cut_pattern = any_of({control for control in special if self._is_cut("a 1 ", f"{control} b\n")})
        self.joins_cleanly = self._is_cut("a 1:\n", "b 2\n")
        # Beside typed control tokens texts are tokenized apart; some tokenizers begin each with a space of their own.
        self._keeps_pieces = all(self._is_cut(control, "b 2\n") for control in special)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        sample = ["a 1 b\n", *special]
        if backend is not None and self._tokenize(sample) == [e.ids for e in _encode_fast(backend, sample)]:
            self._backend = backend

    def shield(self, conversation: Conversation) -> tuple[list[dict[str, Any]], list[Any] | None, str]:
        """Messages and tools with a guard character inside every control token typed as text, and that character.

        The guard is empty where nothing had to be marked.
        """
        pattern = self._control_pattern
        messages, tools = conversation.messages, conversation.tools
        is_answer = [message["role"] == "assistant" for message in messages] + [False]
        typed = [
            _search(self._answer_pattern if answer else pattern, value)
            for answer, value in zip(is_answer, [*messages, tools], strict=True)
        ]
        if not any(typed):
            return messages, tools, ""
        for number, (answer, seen) in enumerate(zip(is_answer, typed, strict=True), start=1):
            if answer and seen:
                raise Rejection("control token in an answer", f"message {number} contains {seen!r}")
        if not self._keeps_pieces:
            raise Rejection(
                "control token in a message",
                f"{next(filter(None, typed))!r}; this tokenizer has no way to take it for text without changing its "
                "surroundings",
            )
        guard = next((g for g in GUARDS if not _search(re.compile(g), [messages, tools])), None)
        if guard is None:
            raise Rejection("control token in a message", "and every private-use character that could mark it as text")
        marked = [
            message if answer else _mark(pattern, guard, message)
            for answer, message in zip(is_answer, messages, strict=False)
        ]
        return marked, _mark(pattern, guard, tools), guard

    def typed_control(self, value: Any) -> str | None:
        """The first control token in the strings of a JSON value."""
        return _search(self._control_pattern, value)

    def table(self, ids: Iterable[int]) -> np.ndarray:
        """bool ``[vocabulary]``; True at these ids."""
        table = np.zeros(max([len(self._tokenizer), *self.added_ids, *self.control_ids]) + 1, dtype=bool)
        table[[i for i in ids if i < len(table)]] = True
        return table

    def ids(self, text: str) -> list[int]:
        """Ids of a text without guards."""
        return self._tokenize([text])[0]

    def encode(self, groups: Sequence[tuple[list[str], str]]) -> list[list[np.ndarray]]:
        """Ids of the texts of each group, int32; with a group comes its guard.

        Texts are cut before control tokens, where tokenization starts afresh, so that every distinct piece is
        tokenized once: most texts of a group begin with the one before.
        """
        keys: list[list[list[Any]]] = []  # pieces, and pairs of a piece and the guard in it
        for texts, guard in groups:
            cut: list[list[Any]] = _cut(texts, self._cut_pattern)
            if guard:
                cut = [[(piece, guard) if guard in piece else piece for piece in pieces] for pieces in cut]
            keys.append(cut)
        distinct = dict.fromkeys(key for texts in keys for pieces in texts for key in pieces)
        plain = [key for key in distinct if isinstance(key, str)]
        ids = dict(zip(plain, self._tokenize(plain), strict=True))
        ids.update((key, self._tokenize_guarded(*key)) for key in distinct if key not in ids)
        arrays = {key: np.array(ids[key], dtype=np.int32) for key in distinct}
        return [[np.concatenate([arrays[key] for key in pieces]) for pieces in texts] for texts in keys]

    def _tokenize(self, texts: list[str], **options: Any) -> list[list[int]]:
        # The template has written what begins a text: special tokens added here would double it.
        if not texts:
            return []
        if self._backend is not None and not options:
            return [encoding.ids for encoding in _encode_fast(self._backend, texts)]
        encoded = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **options
        )
        return encoded["input_ids"]  # type: ignore[return-value]  # lists, as no tensors were asked for

    def _tokenize_guarded(self, piece: str, guard: str) -> list[int]:
        """Ids of a piece in which control tokens with a guard inside are text."""
        ids: list[int] = []
        start = 0
        for match in self._control_pattern.finditer(piece):
            ids += self._tokenize([piece[start : match.start()].replace(guard, "")], split_special_tokens=True)[0]
            ids += self._tokenize([match.group()])[0]
            start = match.end()
        return ids + self._tokenize([piece[start:].replace(guard, "")], split_special_tokens=True)[0]

    def _is_cut(self, before: str, after: str) -> bool:
        """Whether two texts give the same ids apart and together."""
        apart, together = self._tokenize([before, after, after]), self._tokenize([before + after + after])
        return [i for ids in apart for i in ids] == together[0]


def _cut(texts: Sequence[str], pattern: re.Pattern[str]) -> list[list[str]]:
    """Texts in pieces of which all but the first begin with a match.

    A text that begins with the one before is cut from the last piece of that on.
    """
    cut: list[list[str]] = []
    before, pieces = "", [""]
    for text in texts:
        if not text.startswith(before):
            before, pieces = "", [""]
        start = len(before) - len(pieces[-1])
        bounds = [start, *(match.start() for match in pattern.finditer(text, start)), len(text)]
        new = [text[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True) if a < b]
        before, pieces = text, [*pieces[:-1], *new] or [""]
        cut.append(pieces)
    return cut


def _encode_fast(backend: Any, texts: list[str]) -> list[Any]:
    """Encodings of a fast tokenizer, without what its Python side adds to each: a third of the time of short texts."""
    backend.encode_special_tokens = False  # these keep what the last call set
    backend.no_truncation()
    backend.no_padding()
    return backend.encode_batch_fast(texts, add_special_tokens=False)


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Pattern of the longest of some words that fits, as tokenizers match them; of nothing if there are no words.

    It branches character by character: thousands of alternatives (Gemma has 6,242 unused tokens) would all be tried at
    every ``<``, which takes 10 ms in a page of HTML.
    """
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word if len(word) > 1 else "":
            node = node.setdefault(character, {})
        node[""] = {}
    root.pop("", None)
    return re.compile(_branches(root) or r"(?!)")


def _branches(node: dict[str, Any]) -> str:
    branches = [re.escape(character) + _branches(after) for character, after in node.items() if character]
    if len(branches) == 1 and "" not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if '' in node else ''}" if branches else ""


def _search(pattern: re.Pattern[str], value: Any) -> str | None:
    """First match in the strings of a JSON value."""
    if isinstance(value, str):
        match = pattern.search(value)
        return match.group() if match else None
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        return next((seen for item in value if (seen := _search(pattern, item))), None)
    return None


def _mark(pattern: re.Pattern[str], guard: str, value: Any) -> Any:
    """The JSON value with a guard after the first character of every match in its strings."""
    if isinstance(value, str):
        return pattern.sub(lambda match: match.group()[0] + guard + match.group()[1:], value)
    if isinstance(value, dict):
        return {_mark(pattern, guard, key): _mark(pattern, guard, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(pattern, guard, item) for item in value]
    return value
