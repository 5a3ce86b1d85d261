"""Conversations to token rows: which tokens the target would be shown, and which it would say.

The loss mask is found from the outside, so that any published chat template works. For the assistant turn at message
t, the template is rendered twice:

    prompt = messages[:t] with the generation prompt      what a server feeds the target
    answer = messages[:t + 1] without it                  the same, followed by the turn

The row has the prompt's tokens, id for id, as a server would tokenize it; what follows in the answer, through the
end-of-turn token, is supervised. (`Template.said` finds what the target said where a template does not show it there.)
Turns share one row as long as each turn's tokens begin the next rendering; where a template rewrites earlier turns (it
removes their reasoning), the next turn starts a row of its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from paceline.data.dialects import Conversation, Rejection
from paceline.data.encoder import Encoder, any_of
from paceline.data.templates import ADVICE, Template, Turn, changed, is_reasoning_mark
from paceline.errors import DataError, ModelError
from paceline.gguf_file import GGUFFile, find_gguf, load_gguf_tokenizer

log = logging.getLogger(__name__)

MIN_SUPERVISED = 2
"""Supervised tokens that must follow each other somewhere in a row: an anchor and one token to predict."""


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
    """Tokenizer of a folder, GGUF file or hub id, with the chat template of a file in place of its own if one is given.

    Raises: DataError if the tokenizer or the template cannot be read, or neither brings a chat template.
    """
    try:  # False: unasked, the library would ask on standard input whether to run code that comes with a tokenizer
        gguf = find_gguf(name)
        tokenizer = load_gguf_tokenizer(gguf) if gguf else AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except ModelError as error:
        raise DataError(str(error)) from error
    except Exception as error:  # of a damaged file the library raises a bare one
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


def find_stop_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids at which generation stops: the tokenizer's own, and those of a ``generation_config.json`` beside it.

    Warns if a hub cannot say whether there is one: a template that leaves the end of a turn to the next message, as
    GLM's does, would lose these ends.
    """
    ids = {tokenizer.eos_token_id}
    name = tokenizer.name_or_path
    if name and (gguf := find_gguf(name)) is not None:
        ids.update(GGUFFile(gguf).stop_ids)
    elif name and (not Path(name).exists() or (Path(name) / "generation_config.json").is_file()):
        try:
            stops = GenerationConfig.from_pretrained(name).eos_token_id
            ids.update(stops if isinstance(stops, list) else [stops])
        except OSError as error:
            if "does not appear to have a file" not in str(error):
                log.warning(
                    "generation_config.json of %s could not be looked up (%s): ends of turns are taken from the "
                    "template alone",
                    name,
                    str(error).strip().partition("\n")[0],
                )
    return sorted(ids - {None})


class ChatTokenizer:
    """Turns conversations into rows with one tokenizer, template and thinking mode.

    Control tokens (the tokenizer's special ones) come from the template alone: typed inside a system, user or tool
    message they stay text; inside an assistant message they reject the row, as the target would have ended its turn
    there or said something else.

    Attributes:
        vocab_size: Number of token ids.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        thinking: bool | None = None,
        stop_ids: Collection[int] | None = None,
    ) -> None:
        """Study tokenizer and template once.

        Args:
            tokenizer: With a chat template.
            thinking: Passed to the template, see `template_options`; None leaves the template its own default.
            stop_ids: Ids at which generation stops; None: `find_stop_ids`.
        """
        self.vocab_size = len(tokenizer)
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer, is_reasoning_mark)
        self._stop_ids = set(find_stop_ids(tokenizer) if stop_ids is None else stop_ids)
        self._stops = any_of(self._encoder.added_ids[i] for i in self._stop_ids & self._encoder.added_ids.keys())
        self._template = Template(tokenizer, thinking, self._stops)
        # What is rejected may fit under another mode; the rejection then says so.
        modes = {word: mode for word, mode in (("on", True), ("off", False)) if mode is not thinking}
        others = {word: Template(tokenizer, mode, self._stops) for word, mode in modes.items()}
        self._other_modes = {word: other for word, other in others.items() if other.prompt != self._template.prompt}
        self._study_ends()

    def _study_ends(self) -> None:
        """Find what ends a turn from what follows the answer in small conversations."""
        last, user, tool = (self._encoder.ids(self._template.after_answer(role)) for role in (None, "user", "tool"))
        added = self._encoder.added_ids
        # What follows an answer in history too is its own. What follows a last answer alone may close the
        # conversation, as in Phi's template; where nothing is shared it ends the turn, as in gpt-oss's.
        shared = [i for k, i in enumerate(last) if last[: k + 1] == user[: k + 1]]
        ends = [i for i in shared if i in added] or [i for i in last if i in added]
        self._known_end = not ends or bool(self._stop_ids.intersection(ends))
        # Control tokens that end a turn in which nothing known does, for example one of a call.
        closing_ids = self._encoder.control_ids.union(ends[:1]) - self._stop_ids
        self._late_ends: dict[str, str] = {}
        if user and not ends:  # the first token of the next message ends the turn, as in GLM's template
            closing_ids = set()
            for role, ids in (("user", user), ("tool", tool)):
                first = next((i for i in ids if i in added), None)
                if first in self._stop_ids:
                    self._late_ends[role] = added[first]
        self._is_stop, self._is_closing = self._encoder.table(self._stop_ids), self._encoder.table(closing_ids)

    def rows(self, conversation: Conversation) -> list[TokenRow]:
        """Training rows of a conversation: one, or more where the template rewrites earlier turns.

        Raises: Rejection if there is no assistant turn, if the template refuses the conversation, or if it does not
            show what the target said to the prompt that a server would use.
        """
        (rows,) = self.rows_many([conversation])
        if isinstance(rows, Rejection):
            raise rows
        return rows

    def rows_many(self, conversations: Sequence[Conversation]) -> list[list[TokenRow] | Rejection]:
        """`rows` of many conversations, which is quicker: for each its rows, or the rejection in their place."""
        drafts = [self._draft(conversation) for conversation in conversations]
        encoded = iter(self._encoder.encode([(d.texts, d.guard) for d in drafts if isinstance(d, _Draft)]))
        return [self._rows(draft, next(encoded)) if isinstance(draft, _Draft) else draft for draft in drafts]

    def document(self, text: str) -> TokenRow:
        """Row of a text without turns: all of it is supervised, but for the special tokens that frame it.

        Raises: Rejection if control tokens are in the text, as nobody can tell who said what then.
        """
        begin = self._tokenizer.bos_token
        has_begin = bool(begin) and text.startswith(begin)
        body = text[len(begin) :] if has_begin else text
        if seen := self._encoder.typed_control(body):
            raise Rejection(
                "control token in a text",
                f"{seen!r}: give `messages`, or `input_ids` with `loss_mask`, to tell what the target said",
            )
        encoded = self._tokenizer(body, return_special_tokens_mask=True, verbose=False)
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        framing = np.array(encoded["special_tokens_mask"], dtype=bool)
        size = int(np.flatnonzero(~framing).max(initial=-1)) + 1  # without an added end: nothing says that it ends here
        ids, framing = ids[:size], framing[:size]
        if has_begin and not framing[:1].any():  # written, and not added
            ids, framing = np.insert(ids, 0, self._tokenizer.bos_token_id), np.insert(framing, 0, True)
        mask = ~framing
        mask[:1] = False  # nothing precedes it
        return TokenRow(ids, mask, turn=1)

    def _draft(self, conversation: Conversation) -> _Draft | Rejection:
        """A conversation's rows as text."""
        try:
            messages, tools, guard = self._encoder.shield(conversation)
            turns, whole = self._turns(messages, tools)
        except Rejection as rejection:
            return rejection
        if self._late_ends:
            turns = [self._end_late(turn, messages) for turn in turns]
        return _Draft(turns, whole or turns[-1].answer, guard)

    def _turns(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[list[Turn], str]:
        """`Template.turns`; a rejection says what to do about it."""
        try:
            return self._template.turns(messages, tools)
        except Rejection as rejection:
            if rejection.kind not in ADVICE:
                raise
            fitting = [word for word, mode in self._other_modes.items() if mode.fits(messages, tools)]
            advice = f"it fits with --thinking {fitting[0]}" if fitting else ADVICE[rejection.kind]
            raise Rejection(rejection.kind, f"{rejection.detail}; {advice}") from None

    def _end_late(self, turn: Turn, messages: list[dict[str, Any]]) -> Turn:
        """The turn with the end that the template leaves to the next message."""
        if self._stops.search(turn.said):
            return turn
        if turn.index + 1 < len(messages):
            role = messages[turn.index + 1]["role"]
        else:
            role = "tool" if messages[turn.index].get("tool_calls") else "user"
        return Turn(turn.index, turn.prompt, turn.said + self._late_ends.get(role, ""))

    def _rows(self, draft: _Draft, ids: list[np.ndarray]) -> list[TokenRow] | Rejection:
        """Rows of a conversation from the ids of its `_Draft.texts`."""
        rows: list[TokenRow] = []
        spans: list[tuple[int, int]] = []  # supervised, of the row that is being grown
        grown = whole = ids[-1]
        for number, (turn, before, after) in enumerate(zip(draft.turns, ids[:-1:2], ids[1::2], strict=True), start=1):
            if not _starts_with(after, before):
                # The answer's first characters merge into the prompt's last token. The target is fed the prompt's
                # tokens and goes on from there, so the two are tokenized apart.
                if not self._encoder.joins_cleanly:
                    return changed(number, turn.prompt, turn.answer)
                after = np.concatenate([before, self._encoder.ids(turn.said)], dtype=np.int32)
            span = self._supervised_span(before, after)
            if spans and not _starts_with(after, grown[: spans[-1][1]]):
                rows.append(_make_row(grown, spans, number - 1))
                spans = []
            grown = after
            spans.append(span)
        if _starts_with(whole, grown):
            grown = whole  # messages after the last answer
        rows.append(_make_row(grown, spans, len(draft.turns)))
        return rows

    def _supervised_span(self, prompt: np.ndarray, answer: np.ndarray) -> tuple[int, int]:
        """Start and end of what the target says in `answer`, which begins with `prompt`."""
        said = answer[len(prompt) :]
        ends = np.flatnonzero(self._is_stop[said])[:1] if self._known_end else said[:0]
        if not len(ends):
            ends = np.flatnonzero(self._is_closing[said])[-1:]
        # Generation stops at the first known end; a turn without any end is supervised to where its rendering ends.
        return len(prompt), len(prompt) + (int(ends[0]) + 1 if len(ends) else len(said))


@dataclass(frozen=True)
class _Draft:
    """A conversation as text: its turns, the rendering of all its messages, and the guard in both."""

    turns: list[Turn]
    whole: str
    guard: str

    @property
    def texts(self) -> list[str]:
        """Prompt and answer of every turn, then the whole; most begin with the one before."""
        return [*(text for turn in self.turns for text in (turn.prompt, turn.answer)), self.whole]


def longest_supervised_run(loss_mask: np.ndarray) -> int:
    """Most supervised tokens in a row of a loss mask, bool ``[n]``."""
    edges = np.flatnonzero(np.diff(loss_mask.astype(np.int8), prepend=0, append=0))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def _make_row(ids: np.ndarray, spans: list[tuple[int, int]], turn: int) -> TokenRow:
    mask = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        mask[start:end] = True
    return TokenRow(ids, mask, turn)


def _starts_with(ids: np.ndarray, beginning: np.ndarray) -> bool:
    return np.array_equal(ids[: len(beginning)], beginning)
