"""Conversations with the target's own answers: what `paceline regenerate` does, whoever answers.

    record -> conversation -> its assistant turns, one after the other -> a line of answers.jsonl

Each turn is asked for on top of the answers before it. Many conversations are under way at a time; a line is written
when its conversation is done, in one piece, so that a killed process loses what was under way and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from paceline.data.answer_folder import AnswerFolder
from paceline.data.dialects import Conversation, Rejection, parse
from paceline.data.inputs import Source
from paceline.data.reading import Chunk, Record
from paceline.data.templates import REFUSED, template_options
from paceline.errors import ConfigError

TOO_LONG = "answer longer than max-new-tokens"
TOOL_RESULT = "stopped at tool results"
TOOL_CALL = "stopped at a tool call"


@dataclass(frozen=True)
class AnswerSettings:
    """How answers are sampled.

    Attributes:
        temperature: 0: always the most likely token.
        top_p: Share of the probability that is sampled from.
        max_new_tokens: Length limit of an answer.
        seed: With the row and the turn, decides the random numbers of an answer.
        thinking: Switches the template's reasoning, see `template_options`; None leaves it its default.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 2048
    seed: int = 0
    thinking: bool | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"--temperature {self.temperature:g} is below 0: 0 takes the most likely token")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p:g} is not above 0 and at most 1")
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens {self.max_new_tokens} is too few: at least 1")


@dataclass(frozen=True)
class Answer:
    """One assistant turn.

    Attributes:
        message: ``role`` and ``content``, with ``reasoning_content`` and ``tool_calls`` where there are any.
        finish: ``length`` if the limit cut it.
        num_tokens: Tokens sampled.
        prompt_ids: What the target was shown, or None if that is not known.
        answer_ids: What it sampled, its end token included, or None.
    """

    message: dict[str, Any]
    finish: Literal["stop", "length"]
    num_tokens: int
    prompt_ids: list[int] | None = None
    answer_ids: list[int] | None = None

    def check_ids(self, vocab_size: int) -> None:
        """Raises: Rejection for an id outside the tokenizer: some models have more logits than tokens."""
        ids = (self.prompt_ids or []) + (self.answer_ids or [])
        if wrong := next((i for i in ids if not 0 <= i < vocab_size), None):
            raise Rejection("a token that the tokenizer lacks", f"id {wrong}; it has 0 to {vocab_size - 1}")


class Answerer(Protocol):
    """Whoever answers: a server or a model on this machine."""

    async def answer(self, key: str, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> Answer:
        """The next turn of a conversation.

        Args:
            key: File name, row and turn; random numbers hang on it.
        Raises: Rejection if this conversation cannot be answered; any other exception ends the run.
        """


@dataclass
class Regenerated:
    """A conversation with new answers.

    Attributes:
        messages: All that is kept.
        rows: Its token rows, more than one where the template rewrites earlier turns; None if ids are not known.
        finish: How the last answer ended.
        left_out: Why later turns of the input are missing, or None.
        num_answers: Answers kept.
        num_tokens: Tokens of these.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, list[int]]] | None = field(default_factory=list)
    finish: str = "stop"
    left_out: str | None = None
    num_answers: int = 0
    num_tokens: int = 0

    def add(self, before: Sequence[dict[str, Any]], answer: Answer) -> None:
        """Append the messages before an answer, and the answer."""
        self.messages += [*before, answer.message]
        self.finish = answer.finish
        self.num_answers += 1
        self.num_tokens += answer.num_tokens
        if answer.prompt_ids is None or answer.answer_ids is None:
            self.rows = None
        if self.rows is None:
            return
        assert answer.prompt_ids is not None and answer.answer_ids is not None
        mask = [0] * len(answer.prompt_ids)
        if self.rows and answer.prompt_ids[: len(self.rows[-1]["input_ids"])] == self.rows[-1]["input_ids"]:
            last = self.rows.pop()  # the row grows
            mask[: len(last["loss_mask"])] = last["loss_mask"]
        self.rows.append(
            {
                "input_ids": answer.prompt_ids + answer.answer_ids,
                "loss_mask": mask + [1] * len(answer.answer_ids),
            }
        )


async def regenerate_conversation(
    conversation: Conversation,
    ask: Callable[[int, list[dict[str, Any]]], Awaitable[Answer]],
    on_cut: Literal["drop", "keep"],
) -> Regenerated:
    """Replace the assistant turns of a conversation in order, each on top of the new ones before it.

    A result of a tool in the input answers another call than the new one, so the conversation ends before it. An
    answer that fails or is cut ends it as well: what stands before is kept.

    Args:
        ask: The answer to messages; the number is the turn's, from 1.
        on_cut: Whether an answer that the length limit cut is kept.
    Raises: Rejection if not even the first answer is there.
    """
    turns, ending = _prompts_of(conversation.messages)
    done = Regenerated()
    for turn, before in enumerate(turns, start=1):
        try:
            answer = await ask(turn, [*done.messages, *before])
            if answer.finish == "length" and on_cut == "drop":
                raise Rejection(TOO_LONG, f"assistant turn {turn}: {answer.num_tokens} tokens")
        except Rejection as rejection:
            if turn == 1:
                raise
            done.left_out = rejection.reason
            return done
        done.add(before, answer)
        if answer.finish == "length":
            done.left_out = f"{TOO_LONG}: turns after a cut one" if turn < len(turns) else ending
            return done
        if answer.message.get("tool_calls"):  # nobody is there to answer it
            done.left_out = TOOL_CALL if turn < len(turns) else ending
            return done
    done.left_out = ending
    return done


def _prompts_of(messages: Sequence[dict[str, Any]]) -> tuple[list[list[dict[str, Any]]], str | None]:
    """The messages before each answer, and why the conversation ends early, or None.

    Answers that follow each other count as one. Raises: Rejection if there is nothing to answer.
    """
    prompts: list[list[dict[str, Any]]] = []
    before: list[dict[str, Any]] = []
    ending = None
    for message in messages:
        if message["role"] == "tool":
            ending = TOOL_RESULT
            break
        if message["role"] != "assistant":
            before.append(message)
        elif before:
            prompts.append(before)
            before = []
        elif not prompts:
            raise Rejection("begins with an answer", "there is no message that the target could answer")
    if before:
        prompts.append(before)
    if not prompts or all(message["role"] != "user" for message in prompts[0]):
        raise Rejection("no user message", "there is none before the first answer")
    return prompts, ending


class RecordStream:
    """The records of all inputs, a chunk at a time, without those that an earlier run has done.

    A file that two inputs name, a folder and a path into it for example, is read once.

    Attributes:
        num_read: Records so far, those done earlier included.
    """

    def __init__(self, sources: Sequence[Source], done: set[str], limit: int | None = None) -> None:
        self.num_read = 0
        self._done = done
        self._limit = limit
        self._chunks = _chunks_once(sources)
        self._total_bytes = [source.num_bytes for source in sources]
        self._read_bytes = 0
        self._held: deque[tuple[str, Record]] = deque()
        self._last = ("", 0, 0)
        self._ended = False
        self._lock = asyncio.Lock()

    async def next(self) -> tuple[str, Record] | None:
        """A record and the name of its place, or None after the last one."""
        async with self._lock:
            while not self._held and not self._ended:
                await asyncio.to_thread(self._read)  # a hub may take its time
            return self._held.popleft() if self._held else None

    @property
    def estimated_total(self) -> int | None:
        """Records of all inputs: counted once they are read, before that estimated from bytes; None if unknown."""
        if self._ended:
            return self.num_read
        if None in self._total_bytes or not self._read_bytes:
            return self._limit
        total = self.num_read * max(sum(filter(None, self._total_bytes)) / self._read_bytes, 1)
        return round(total if self._limit is None else min(total, self._limit))

    def _read(self) -> None:
        chunk = next(self._chunks, None)
        if chunk is None:
            self._ended = True
            return
        self._read_bytes += chunk.num_bytes
        for record in chunk.records():
            if self._limit is not None and self.num_read >= self._limit:
                self._ended = True
                return
            self.num_read += 1
            if (name := self._name(record)) not in self._done:
                self._held.append((name, record))

    def _name(self, record: Record) -> str:
        """``FILE:LINE``; the elements of a JSON array may share a line, the second is ``FILE:LINE#2`` then."""
        file, number, part = self._last
        part = part + 1 if (file, number) == (record.file, record.number) else 1
        self._last = (record.file, record.number, part)
        return f"{record.file}:{record.number}" + (f"#{part}" if part > 1 else "")


def _chunks_once(sources: Sequence[Source]) -> Iterator[Chunk]:
    """Chunks of all sources; those of a file that came before, by this or another path, are left out."""
    first: dict[str, tuple[int, str]] = {}
    for number, source in enumerate(sources):
        for chunk in source.chunks():
            place = (number, chunk.file)
            if first.setdefault(os.path.realpath(chunk.file), place) == place:
                yield chunk


async def regenerate(
    stream: RecordStream,
    answerer: Answerer,
    folder: AnswerFolder,
    *,
    on_cut: Literal["drop", "keep"],
    concurrency: int,
    typed_control: Callable[[Any], str | None],
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> None:
    """Answer every record of a stream; cancel it to stop, what is under way is dropped then.

    Args:
        concurrency: Conversations under way at a time.
        typed_control: The first control token in the strings of a JSON value, as `Encoder.typed_control` finds it.
        on_answer: Called with every answer, kept or not.
    """

    async def answer_one(name: str, record: Record) -> None:
        async def ask(turn: int, messages: list[dict[str, Any]]) -> Answer:
            # without the folder: the same file elsewhere gets the same random numbers
            answer = await answerer.answer(f"{os.path.basename(name)} turn {turn}", messages, conversation.tools)
            on_answer(answer)
            return answer

        try:
            conversation = _conversation_of(record)
            _check_controls(conversation, typed_control)
            answered = await regenerate_conversation(conversation, ask, on_cut)
        except Rejection as rejection:
            folder.reject(name, record, rejection)
        else:
            folder.keep(name, answered, conversation.tools)

    async def work() -> None:
        while (item := await stream.next()) is not None:
            await answer_one(*item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except BaseExceptionGroup as errors:  # the first one cancelled the others
        raise errors.exceptions[0] from None


def _conversation_of(record: Record) -> Conversation:
    """What a record asks. Raises: Rejection if it is no conversation."""
    content = record.decode()
    if content.get("messages") is not None:  # an answers.jsonl to be answered anew
        content = {key: value for key, value in content.items() if key != "rows"}
    conversation = parse(content)
    if not isinstance(conversation, Conversation):
        raise Rejection("no conversation", "a text or token rows: there is nothing to answer")
    _ = conversation.hash  # raises for strings that are no Unicode, which cannot be sent
    return conversation


def _check_controls(conversation: Conversation, typed_control: Callable[[Any], str | None]) -> None:
    """Raises: Rejection for a control token typed in what is sent.

    Whoever renders prompts takes it for its own: the target would answer turns that nobody had, and `prepare`, which
    keeps such tokens as text, could not tell from the ids.
    """
    asked = [message for message in conversation.messages if message["role"] != "assistant"]
    if seen := typed_control([asked, conversation.tools]):
        raise Rejection("control token in a message", f"{seen!r}, which a server would read as its own")


def prompt_ids(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, thinking: bool | None
) -> list[int]:
    """What a server feeds the target before an answer. Raises: Rejection if the template refuses the messages."""
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **template_options(thinking),
        )
    except Exception as error:  # a template is a foreign program: it may fail in any way
        message = str(error).strip() or type(error).__name__
        raise Rejection(REFUSED, message.splitlines()[0]) from error
    return list(encoded["input_ids"])


def number_of(*parts: object) -> int:
    """64 bits that hang on all parts, for random numbers."""
    text = "\0".join(map(str, parts)).encode("utf-8", errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
