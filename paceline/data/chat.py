"""Conversations to token rows: which tokens the target would be shown, and which it would say.

The loss mask is found from the outside, so that any published chat template works. For the assistant turn at message
t, the template is rendered twice:

    prompt = messages[:t] with the generation prompt      what a server feeds the target
    answer = messages[:t + 1] without it                  the same, followed by the turn

`answer` must continue `prompt`, and the row has the prompt's tokens, id for id, as a server would tokenize it; what
follows, through the end-of-turn token, is supervised. Turns share one row as long as each turn's tokens begin the
next rendering; where a template rewrites earlier turns (it removes their reasoning), the next turn starts a row of
its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from paceline.data.readers import Conversation, Rejection
from paceline.errors import DataError

MIN_SUPERVISED = 2
"""Supervised tokens that must follow each other somewhere in a row: an anchor and one token to predict."""

PROBE = "paceline"
"""Answer of the conversation by which a template's end-of-turn token is found."""

EXCERPT = 40
"""Characters of a rendering that a rejection quotes."""

GUARDS = tuple(chr(0xF0000 + i) for i in range(16))
"""Private-use characters; one that a row does not contain marks control tokens typed as text while it is rendered."""


@dataclass(frozen=True)
class TokenRow:
    """One training row.

    Attributes:
        input_ids: int32 ``[n]``.
        loss_mask: bool ``[n]``; True on what the target itself would generate.
        turn: Which assistant turn of the conversation is the row's last, from 1.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    turn: int


def load_tokenizer(name: str, template: Path | None = None) -> PreTrainedTokenizerBase:
    """Tokenizer of a folder or hub id, with the chat template of a file in place of its own if one is given.

    Raises: DataError if the tokenizer or the template cannot be read, or neither brings a chat template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"tokenizer {name} cannot be loaded: {first}") from error
    if template is not None:
        try:
            tokenizer.chat_template = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"template {template} cannot be read: {error}") from error
    if not tokenizer.chat_template:
        raise DataError(f"tokenizer {name} has no chat template: pass --template FILE")
    return tokenizer


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the chat template (of all of them, where a tokenizer brings several)."""
    return hashlib.sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode()).hexdigest()


class ChatTokenizer:
    """Turns conversations into rows with one tokenizer, template and thinking mode.

    Control tokens (the tokenizer's special ones) come from the template alone: typed inside a system, user or tool
    message they stay text; inside an assistant message they reject the row, as the target would have ended its turn
    there or said something else.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None) -> None:
        """Study the template once.

        Args:
            tokenizer: With a chat template.
            thinking: Passed to the template as ``enable_thinking``; None leaves the template its own default.
        """
        self._tokenizer = tokenizer
        self._options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        added = tokenizer.added_tokens_decoder
        self._added_ids = set(added)
        self._control_ids = np.array(
            sorted({i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)), dtype=np.int32
        )
        controls = {token.content for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        self._control_pattern = _alternatives(controls)
        self._cut_pattern = _alternatives({control for control in controls if self._is_cut("a 1 ", f"{control} b\n")})
        self._joins_cleanly = self._is_cut("a 1:\n", "b 2\n")
        self._end_of_turn = self._find_end_of_turn()

    def rows(self, conversation: Conversation) -> list[TokenRow]:
        """Training rows of a conversation: one, or more where the template rewrites earlier turns.

        Raises: Rejection if the template refuses the conversation, or renders an answer after another prompt than the
            one a server would use.
        """
        messages, tools, guard = self._shield(conversation)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        prompts = [self._render(messages[:t], tools, add_generation_prompt=True) for t in turns]
        answers = [self._render(messages[: t + 1], tools) for t in turns]
        for t, prompt, answer in zip(turns, prompts, answers, strict=True):
            _check_calls(t + 1, messages[t], answer[len(prompt) :])
        whole = answers[-1] if turns[-1] == len(messages) - 1 else self._render(messages, tools)
        ids = self._encode([*prompts, *answers, whole], guard)
        prompt_ids, answer_ids, whole_ids = ids[: len(turns)], ids[len(turns) : -1], ids[-1]

        rows: list[TokenRow] = []
        spans: list[tuple[int, int]] = []  # supervised, of the row that is being grown
        grown = answer_ids[0]
        for turn, (before, after) in enumerate(zip(prompt_ids, answer_ids, strict=True), start=1):
            if not _starts_with(after, before):
                after = self._continue(turn, prompts[turn - 1], before, answers[turn - 1], guard)
            span = self._supervised_span(before, after)
            if spans and not _starts_with(after, grown[: spans[-1][1]]):
                rows.append(_make_row(grown, spans, turn - 1))
                spans = []
            grown = after
            spans.append(span)
        if _starts_with(whole_ids, grown):
            grown = whole_ids  # messages after the last answer
        rows.append(_make_row(grown, spans, len(turns)))
        return rows

    def _continue(self, turn: int, prompt: str, prompt_ids: np.ndarray, answer: str, guard: str) -> np.ndarray:
        """Tokens of an answer whose first characters, tokenized in one go, would merge into the prompt's last token.

        The target is fed the prompt's tokens and goes on from there, so the two are tokenized apart.
        Raises: Rejection if the answer's rendering is no continuation of the prompt.
        """
        if answer.startswith(prompt) and self._joins_cleanly:
            return np.concatenate([prompt_ids, *self._encode([answer[len(prompt) :]], guard)])
        at = len(os.path.commonprefix([prompt, answer]))
        wanted, seen = (text[at : at + EXCERPT].replace(guard, "") for text in (prompt, answer))
        raise Rejection(
            "template changes the prompt",
            f"assistant turn {turn}: at character {at} the generation prompt goes on with {wanted!r}, "
            f"the rendering with the answer with {seen!r}",
        )

    def _supervised_span(self, prompt: np.ndarray, answer: np.ndarray) -> tuple[int, int]:
        """Start and end of what the target says in `answer`, which begins with `prompt`."""
        said = answer[len(prompt) :]
        ends = np.flatnonzero(said == self._end_of_turn) if self._end_of_turn is not None else said[:0]
        if not len(ends):  # another kind of turn, for example one that ends in a call token
            ends = np.flatnonzero(np.isin(said, self._control_ids))
        # A template without any end token is supervised to the end of its rendering.
        return len(prompt), len(prompt) + (int(ends[-1]) + 1 if len(ends) else len(said))

    def _find_end_of_turn(self) -> int | None:
        """Id of the first added token after the answer in a small conversation, or None."""
        try:
            text = self._render([{"role": "user", "content": "-"}, {"role": "assistant", "content": PROBE}], None)
        except Rejection:
            return None
        _, found, after = text.rpartition(PROBE)
        ids = self._tokenizer(after, add_special_tokens=False)["input_ids"] if found else []
        return next((i for i in ids if i in self._added_ids), None)

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any) -> str:
        try:  # as a batch of one: an empty conversation is no batch otherwise
            rendered = self._tokenizer.apply_chat_template(
                [messages], tools=tools, tokenize=False, **options, **self._options
            )
        except Exception as error:  # a template is a foreign program: it may fail in any way
            message = str(error).strip() or type(error).__name__
            raise Rejection("template refuses the conversation", message.splitlines()[0]) from error
        return rendered[0]  # type: ignore[index, return-value]  # text, as nothing was tokenized

    def _shield(self, conversation: Conversation) -> tuple[list[dict[str, Any]], list[Any] | None, str]:
        """Messages and tools with a guard character inside every control token typed as text, and that character.

        The guard is empty where nothing had to be marked.
        """
        pattern = self._control_pattern
        messages, tools = conversation.messages, conversation.tools
        if pattern is None:
            return messages, tools, ""
        for number, message in enumerate(messages, start=1):
            if message["role"] == "assistant" and (seen := _search(pattern, message)):
                raise Rejection("control token in an answer", f"message {number} contains {seen!r}")
        if not _search(pattern, [messages, tools]):
            return messages, tools, ""
        guard = next((g for g in GUARDS if not _search(re.compile(g), [messages, tools])), None)
        if guard is None:
            raise Rejection("control token in a message", "and every private-use character that could mark it as text")
        return _mark(pattern, guard, messages), _mark(pattern, guard, tools), guard

    def _encode(self, texts: Sequence[str], guard: str) -> list[np.ndarray]:
        """Token ids of each text, int32.

        Texts are cut before control tokens, where tokenization starts afresh, so that every distinct piece (the
        renderings of a conversation share most of theirs) is tokenized once.
        """
        cut = [self._pieces(text) for text in texts]
        distinct = list(dict.fromkeys(piece for pieces in cut for piece in pieces))
        plain = [piece for piece in distinct if not guard or guard not in piece]
        known = dict(zip(plain, self._tokenize(plain), strict=True)) if plain else {}
        known.update((piece, self._tokenize_guarded(piece, guard)) for piece in distinct if piece not in known)
        empty = np.empty(0, dtype=np.int32)
        return [np.concatenate([known[piece] for piece in pieces]) if pieces else empty for pieces in cut]

    def _pieces(self, text: str) -> list[str]:
        starts = [match.start() for match in self._cut_pattern.finditer(text)] if self._cut_pattern else []
        bounds = [0, *starts, len(text)]
        return [text[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True) if a < b]

    def _tokenize(self, pieces: list[str], **options: Any) -> list[np.ndarray]:
        # The template has written what begins a text: special tokens added here would double it.
        ids = self._tokenizer(pieces, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)[
            "input_ids"
        ]
        return [np.array(piece, dtype=np.int32) for piece in ids]

    def _tokenize_guarded(self, piece: str, guard: str) -> np.ndarray:
        """Token ids of a piece in which control tokens with a guard inside are text."""
        assert self._control_pattern is not None
        parts: list[np.ndarray] = []
        start = 0
        for match in self._control_pattern.finditer(piece):
            parts += self._tokenize([piece[start : match.start()].replace(guard, "")], split_special_tokens=True)
            parts += self._tokenize([match.group()])
            start = match.end()
        parts += self._tokenize([piece[start:].replace(guard, "")], split_special_tokens=True)
        return np.concatenate(parts)

    def _is_cut(self, before: str, after: str) -> bool:
        """Whether two texts give the same ids apart and together."""
        apart = np.concatenate(self._tokenize([before, after, after]))
        return np.array_equal(apart, self._tokenize([before + after + after])[0])


def longest_supervised_run(loss_mask: np.ndarray) -> int:
    """Most supervised tokens in a row of a loss mask, bool ``[n]``."""
    edges = np.flatnonzero(np.diff(loss_mask.astype(np.int8), prepend=0, append=0))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def _check_calls(number: int, message: dict[str, Any], said: str) -> None:
    """Raises: Rejection if a template without room for tool calls has left them out of what is said."""
    for call in message.get("tool_calls", []):
        name = call.get("function", call).get("name")
        if not isinstance(name, str) or name not in said:
            raise Rejection("template drops tool calls", f"message {number}: the call of {name!r} is not rendered")


def _make_row(ids: np.ndarray, spans: list[tuple[int, int]], turn: int) -> TokenRow:
    mask = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        mask[start:end] = True
    return TokenRow(ids, mask, turn)


def _starts_with(ids: np.ndarray, beginning: np.ndarray) -> bool:
    return np.array_equal(ids[: len(beginning)], beginning)


def _alternatives(words: set[str]) -> re.Pattern[str] | None:
    """Pattern of the words, longest first as tokenizers match them; None for none."""
    longest_first = sorted((word for word in words if len(word) > 1), key=lambda word: (-len(word), word))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


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
