"""Chat templates: what a server would feed the target for each assistant turn, and what the target says to that.

A template is asked for renderings only; nothing in it is read but whether it knows marks of reasoning. Published
templates agree on little: some supply a block of reasoning in the generation prompt that they do not show before a
stored answer, some cut the reasoning out of stored answers, some move the system prompt or leave the end of a turn to
the next message. `Template.said` deals with these, or rejects the conversation.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase

from paceline.data.dialects import REASONING_KEYS, Rejection
from paceline.data.encoder import GUARDS
from paceline.errors import DataError

PROBE = "paceline"
"""Answer of the conversations by which a template is studied."""

PROBE_TOOLS = [
    {
        "type": "function",
        "function": {"name": "-", "description": "-", "parameters": {"type": "object", "properties": {}}},
    }
]
"""Tools of these conversations, where a template insists on some."""

EXCERPT = 40
"""Characters of a rendering that a rejection quotes."""

OPENING = re.compile(
    r"<(?:\w+:)?think(?:ing)?(?::\w+)?>|\[THINK\]|<\|START_THINKING\|>|<\|channel>thought|Here are my reasoning steps:"
)
CLOSING = re.compile(
    r"</(?:\w+:)?think(?:ing)?(?::\w+)?>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>|\[BEGIN FINAL RESPONSE\]"
)
"""Marks around the reasoning of published models."""

OPENED = re.compile(rf"(?:{OPENING.pattern})(\s*)$")
CLOSED = re.compile(rf"(?:{CLOSING.pattern})\s*$")
"""How a prompt ends that has begun the target's reasoning, and one that has skipped it."""

MAX_RENDERED = 1 << 26
"""Characters that the turns of a conversation may come to when each is rendered with all before it: 64 MiB take a few
seconds. A thousand turns of 60 characters are 60 million; 128 turns of a 64 k token text are 30 million."""

PROMPT_END = 64
"""Characters at the end of a prompt in which these marks are looked for."""

MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
NO_WORDS = re.compile(rf"(?:\s|{MARK.pattern})*")
"""A control token by its looks, and what may stand before the first word of an answer."""

BLOCK = re.compile(rf"(?:\s|{OPENING.pattern}|{CLOSING.pattern})*")
"""A block of reasoning without any."""

REFUSED = "template refuses the conversation"
CHANGED = "template changes the prompt"
DROPPED = "template drops the reasoning"
UNREASONED = "answer without reasoning"
REASONED = "answer with reasoning"
ADVICE = {
    CHANGED: "another --template FILE may show answers after its generation prompt",
    DROPPED: "give it in the content, between the target's own marks, or leave it out if the target does not reason",
    UNREASONED: "the target would reason first: give answers that do",
    REASONED: "the target would not reason: give answers that do not",
}
"""Kinds of rejections, and what to do about those that another thinking mode may not cure."""


@dataclass(frozen=True)
class Turn:
    """An assistant turn as text.

    Attributes:
        index: Of its message.
        prompt: What a server feeds the target.
        said: What the target says to that, and what a template puts after it.
    """

    index: int
    prompt: str
    said: str

    @property
    def answer(self) -> str:
        """Prompt and what is said."""
        return self.prompt + self.said


def template_options(thinking: bool | None) -> dict[str, bool]:
    """Variables that switch the reasoning of a template on or off; none for None.

    Most templates read ``enable_thinking`` (Qwen, GLM, Gemma), some ``thinking`` (DeepSeek, Granite).
    """
    return {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}


def is_reasoning_mark(token: str) -> bool:
    """Whether a token stands around reasoning: the target says it, special (Mistral, Gemma) or not (Qwen, DeepSeek)."""
    return bool(OPENING.match(token + "thought") or CLOSING.match(token))


class Template:
    """What a chat template makes of conversations under one thinking mode.

    Attributes:
        prompt: Of a small conversation, with the generation prompt; empty if the template refuses that.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: bool | None, stops: re.Pattern[str]) -> None:
        self._tokenizer = tokenizer
        self._options = template_options(thinking)
        self._stops = stops
        source = json.dumps(tokenizer.chat_template)
        self._closings = {mark.group() for mark in CLOSING.finditer(source)}
        self._in_parts = False
        if PROBE not in self._probe(PROBE):  # perhaps it wants contents to be lists of parts
            self._in_parts = True
            self._in_parts = PROBE in self._probe(PROBE)
        self.prompt = self._probe(add_generation_prompt=True)
        self._plain_end = self._find_plain_end()
        reasoning: dict[str, Any] = template_options(True)
        self._may_reason = self.prompt == self._probe(add_generation_prompt=True, **reasoning)

    def _find_plain_end(self) -> str | None:
        """What ends an answer that follows the prompt at once, in history as in the last turn; None for other forms."""
        if not self._probe(PROBE).startswith(self.prompt + PROBE) or OPENED.search(self.prompt):
            return None
        shared = os.path.commonprefix([self.after_answer(None), self.after_answer("user")])
        end = self._stops.search(shared)
        return shared[: end.end()] if end else None

    def after_answer(self, role: str | None) -> str:
        """What follows an answer that is the last message, or one before a message of this role."""
        return self._probe(PROBE, role).partition(PROBE)[2]

    def turns(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[list[Turn], str]:
        """Assistant turns, and the rendering of all messages (empty if the last is an answer).

        Raises: Rejection, see `ChatTokenizer.rows`.
        """
        try:
            return self._turns(messages, tools)
        except Rejection as rejection:
            if rejection.kind != REFUSED or not any("tool_calls" in message for message in messages):
                raise
            refusal = rejection
        try:  # some templates, DeepSeek's for one, put the arguments of calls together with text
            return self._turns([_with_text_arguments(message) for message in messages], tools)
        except Rejection as rejection:
            raise refusal if rejection.kind == REFUSED else rejection from None

    def fits(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> bool:
        """Whether there is no rejection."""
        try:
            self.turns(messages, tools)
        except Rejection:
            return False
        return True

    def _turns(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[list[Turn], str]:
        at = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not at:
            raise Rejection("no assistant turn")
        rendered = sum(len(message["content"]) for message in messages) * len(at)
        if rendered > MAX_RENDERED:
            raise Rejection("too many turns", f"{len(at)} of {rendered // len(at)} characters in all; split it")
        shown = [self._as_shown(message) for message in messages]
        prompts = self._render([shown[:i] for i in at], tools, add_generation_prompt=True)
        whole = self._render([shown], tools)[0] if at[-1] + 1 < len(messages) else ""
        turns = []
        for number, (i, prompt, after) in enumerate(zip(at, prompts, [*prompts[1:], whole], strict=True), start=1):
            said = self._plainly_said(messages[i], prompt, after)
            if said is None:
                (answer,) = self._render([shown[: i + 1]], tools)
                said = self.said(number, messages[i], prompt, answer)
            turns.append(Turn(i, prompt, said))
        return turns, whole

    def _plainly_said(self, message: dict[str, Any], prompt: str, after: str) -> str | None:
        """What is said in a turn of words alone, if the next rendering shows just that: the answer's own is spared."""
        if self._plain_end is None or message.keys() != {"role", "content"} or CLOSING.search(message["content"]):
            return None
        said = message["content"] + self._plain_end
        return said if after.startswith(prompt) and after.startswith(said, len(prompt)) else None

    def said(self, number: int, message: dict[str, Any], prompt: str, answer: str) -> str:
        """What the target says to the prompt, and what the template puts after it.

        That is how the answer's rendering goes on after the prompt, but for two cases:

        - The content holds reasoning, and the template leaves that out, or puts marks around it that the prompt or the
          content has already. Then it is the content as it is, which is what the target said.
        - The rendering does not begin with the prompt. Then it is what follows the header that ends the prompt. Where
          the rendering lacks that, or lacks a block of reasoning, the answer's own words must come first.

        Raises: Rejection if none of these holds, or if the answer does not go with what the prompt has begun.
        """
        content, reasoning = message["content"], message.get("reasoning_content", "").strip()
        inner, rest = _split_reasoning(content, self._closings)
        opened, closed = OPENED.search(prompt[-PROMPT_END:]), CLOSED.search(prompt[-PROMPT_END:])
        apart = None if answer.startswith(prompt) else _after_header(prompt, answer)
        said = answer[len(prompt) :] if apart is None else apart.said
        spoken = self._stops.split(said, maxsplit=1)[0]
        _check_calls(number, message, spoken)

        if inner and not _shows(spoken, inner, opened is not None):
            if closed or not (opened or self._may_reason):
                raise Rejection(DROPPED, f"assistant turn {number}: {inner[:EXCERPT]!r} is not rendered")
            given = _as_given(content, rest, said, spoken)
            if given is None:
                raise changed(number, prompt, answer)
            if opened and (mark := OPENING.match(given)):  # the prompt has that already
                given = given[mark.end() :].removeprefix(opened[1])
            return given

        if reasoning and reasoning not in spoken:
            raise Rejection(DROPPED, f"assistant turn {number}: `reasoning_content` is not rendered")
        if opened and not CLOSING.search(spoken):
            raise Rejection(UNREASONED, f"assistant turn {number}: the prompt ends in {opened[0]!r}")
        contradicts = closed is not None and CLOSING.search(spoken) is not None
        if closed and contradicts and apart is None:
            raise Rejection(REASONED, f"assistant turn {number}: the prompt ends in {closed[0]!r}")
        words = inner or (reasoning if opened else rest)
        has_calls = "tool_calls" in message
        if apart and (contradicts or not apart.is_sound(spoken, words, bool(opened), bool(closed), has_calls)):
            raise changed(number, prompt, answer)
        return said

    def _as_shown(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message in the form, and with the names, that templates know."""
        if reasoning := message.get("reasoning_content"):
            message = {**dict.fromkeys(REASONING_KEYS, reasoning), **message}
        if self._in_parts:
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        return message

    def _probe(self, answer: str = "", role: str | None = None, **options: Any) -> str:
        """A question, with an answer and a message of some role after it if given; empty if that is refused."""
        spoken = [("user", "-"), ("assistant", answer), (role, "-")]
        messages = [self._as_shown({"role": role, "content": content}) for role, content in spoken if role and content]
        for tools in (None, PROBE_TOOLS):  # some are for conversations with tools only
            try:
                return self._render([messages], tools, **options)[0]
            except Rejection:
                continue
        return ""

    def _render(self, conversations: list[list[dict[str, Any]]], tools: list[Any] | None, **options: Any) -> list[str]:
        options = {**self._options, **options}
        try:
            rendered: Any = self._tokenizer.apply_chat_template(conversations, tools=tools, tokenize=False, **options)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"the chat template is broken in line {error.lineno}: {error}") from error
        except Exception as error:  # a template is a foreign program: it may fail in any way
            message = str(error).strip() or type(error).__name__
            raise Rejection(REFUSED, message.splitlines()[0]) from error
        return rendered


def _split_reasoning(content: str, closings: set[str]) -> tuple[str, str]:
    """Reasoning that a content holds, and its words after that; both without white space around them.

    Args:
        closings: Marks that end the target's reasoning; others are text.
    """
    *_, last = (None, *(mark for mark in CLOSING.finditer(content) if mark.group() in closings))
    if last is None:
        return "", content.strip()
    return OPENING.sub("", content[: last.start()], count=1).strip(), content[last.end() :].strip()


def _shows(said: str, reasoning: str, opened: bool) -> bool:
    """Whether a rendering shows this reasoning as the first, and its closing mark; the opening one only if needed."""
    at = said.find(reasoning)
    lead = said[: max(at, 0)]
    return at >= 0 and not CLOSING.search(lead) and not (opened and OPENING.search(lead)) and bool(CLOSING.search(said))


def _as_given(content: str, rest: str, said: str, spoken: str) -> str | None:
    """The content up to its words after the reasoning, then these as the rendering shows them; None if it does not.

    Args:
        rest: These words, see `_split_reasoning`.
    """
    *_, begin = (0, *(mark.end() for mark in CLOSING.finditer(spoken)))
    at = said.find(rest, begin)
    before = content[: content.rindex(rest)] if rest else content.rstrip()
    return before.lstrip() + said[at:] if at >= 0 else None


class _Apart(NamedTuple):
    """An answer's rendering that does not begin with its prompt.

    Attributes:
        said: What it has after the prompt's header.
        header: What the prompt has from the last control token on, if that is in what differs; empty otherwise.
        is_told: Whether the rendering has the same header, or lacks just a block of reasoning.
        moved: Words of the prompt before the header that it does not have there.
    """

    said: str
    header: str
    is_told: bool
    moved: str

    def is_sound(self, spoken: str, words: str, opened: bool, closed: bool, has_calls: bool) -> bool:
        """Whether what is said is the answer with these words.

        Args:
            spoken: `said` up to where generation stops.
            opened: Whether the prompt has begun the reasoning; the words are then those of the reasoning.
            closed: Whether it has skipped it.
            has_calls: Whether the answer calls tools; Mistral's templates leave out words beside calls.
        """
        at = spoken.find(words)
        if self.moved and self.moved in spoken[max(at, 0) + len(words) :]:  # Command R+ repeats its instructions there
            return False
        if self.is_told and not opened:
            return at >= 0 or has_calls
        is_first = bool(words) and at >= 0 and NO_WORDS.fullmatch(spoken, 0, at) is not None
        return is_first and (opened or closed or (bool(self.header) and self.header not in spoken))


def _after_header(prompt: str, answer: str) -> _Apart:
    """What an answer has after the header that ends the prompt, or where the two differ if it does not have that."""
    at = len(os.path.commonprefix([prompt, answer]))
    begun = re.search(r"[<\[][^<>\[\]\s]*$", prompt[max(at - PROMPT_END, 0) : at])
    at -= len(begun.group()) if begun else 0  # two control tokens that begin alike differ as a whole
    rest = answer[at:]
    *_, last = (None, *MARK.finditer(prompt, at))
    if last is None:
        return _Apart(rest, "", False, "")
    header, moved = prompt[last.start() :], MARK.sub("", prompt[at : last.start()]).strip()
    if OPENING.match(header) or CLOSING.match(header):  # may stand in the answer as well
        is_told = rest.startswith(header) or BLOCK.fullmatch(prompt, at) is not None
        return _Apart(rest.removeprefix(header), header.strip(), is_told, moved)
    # Of several headers (history that differs too, a message in parts) the right one follows the most of the prompt.
    ends = [found.end() for found in re.finditer(re.escape(header), rest)]
    end = max(ends, key=lambda end: len(os.path.commonprefix([prompt[::-1], answer[: at + end][::-1]])), default=0)
    return _Apart(rest[end:], header.strip(), bool(ends), moved)


def changed(number: int, prompt: str, answer: str) -> Rejection:
    """Rejection of an answer that cannot be told from its rendering."""
    at = len(os.path.commonprefix([prompt, answer]))
    wanted, seen = (re.sub(f"[{''.join(GUARDS)}]", "", text[at : at + EXCERPT]) for text in (prompt, answer))
    return Rejection(
        CHANGED,
        f"assistant turn {number}: at character {at} the generation prompt goes on with {wanted!r}, "
        f"the rendering with the answer with {seen!r}",
    )


def _check_calls(number: int, message: dict[str, Any], spoken: str) -> None:
    """Raises: Rejection if a template without room for tool calls has left them out of what is said."""
    for call in message.get("tool_calls", []):
        name = _function(call).get("name")
        if not isinstance(name, str) or name not in spoken:
            raise Rejection(
                "template drops tool calls", f"assistant turn {number}: the call of {name!r} is not rendered"
            )


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as the JSON text that clients of servers exchange."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = _function(call)
        if "arguments" in function and not isinstance(function["arguments"], str):
            text = json.dumps(function["arguments"], ensure_ascii=False, separators=(",", ":"))
            function = {**function, "arguments": text}
        calls.append(function if _function(call) is call else {**call, "function": function})
    return {**message, "tool_calls": calls}


def _function(call: dict[str, Any]) -> dict[str, Any]:
    """Where a call has name and arguments: under ``function``, or itself."""
    return call["function"] if isinstance(call.get("function"), dict) else call
