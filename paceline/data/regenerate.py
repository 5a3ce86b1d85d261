"""Conversations with the target's own answers: what `paceline regenerate` does, whoever answers.

    record -> conversation -> its assistant turns, one after the other -> a line of answers.jsonl

Each turn is asked for on top of the answers before it. Many conversations are under way at a time; a line is written
when its conversation is done, in one piece, so that a killed process loses what was under way and nothing else.

    OUT/answers.jsonl      {"source", "finish", "left_out", "num_answers", "num_tokens", "messages", "tools", "rows"}
    OUT/rejected.jsonl     {"source", "file", "line", "reason", "text"}
    OUT/regenerate.json    settings, inputs with licence and revision, counts
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from paceline.data.dataset import REJECTED_FILE
from paceline.data.dialects import Conversation, Rejection, parse
from paceline.data.inputs import ANSWERS_FILE, REGENERATE_FILE, Source
from paceline.data.reading import Chunk, Record
from paceline.data.templates import REFUSED, template_options
from paceline.errors import ConfigError, DataError
from paceline.files import locked, write_atomically

FORMAT = 1
LOCK_FILE = "regenerate.lock"

TOO_LONG = "answer longer than max-new-tokens"
TOOL_RESULT = "stopped at tool results"
TOOL_CALL = "stopped at a tool call"

MAY_CHANGE = frozenset({"server", "device", "versions", "counts", "finished", "tokenizer"})
"""What regenerate.json holds and may be another when a run is gone on with: the rest decides what answers are."""


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
            key: Row and turn; random numbers hang on it.
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


@dataclass
class Counts:
    """What became of the rows; regenerate.json holds it.

    Attributes:
        num_kept: Rows of which answers are kept.
        num_answers: Kept answers.
        num_tokens: Tokens of these, as sampled.
        num_with_ids: Kept rows that hold the sampled token ids.
        num_cut: Kept rows that end in a cut answer.
        left_out: Later turns that kept rows are missing, by kind of reason.
        rejected: Rows of which nothing is kept, by kind of reason.
    """

    num_kept: int = 0
    num_answers: int = 0
    num_tokens: int = 0
    num_with_ids: int = 0
    num_cut: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)

    @property
    def num_done(self) -> int:
        """Rows that need not be done again."""
        return self.num_kept + self.rejected.total()

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `dataclasses.asdict` cannot copy a Counter."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a line of answers.jsonl or rejected.jsonl."""
        if "reason" in line:
            self.rejected[_kind(line["reason"])] += 1
            return
        self.num_kept += 1
        self.num_answers += line["num_answers"]
        self.num_tokens += line["num_tokens"]
        self.num_with_ids += "rows" in line
        self.num_cut += line["finish"] == "length"
        if "left_out" in line:
            self.left_out[_kind(line["left_out"])] += 1


def _kind(reason: str) -> str:
    return reason.partition(": ")[0]


class AnswerFolder:
    """The output folder; made by `open_answers`.

    Attributes:
        path: Of it.
        counts: Of all runs in it.
        done: Names of the rows that need not be done again.
        num_resumed: Rows that an earlier run had done.
    """

    def __init__(self, path: Path, description: dict[str, Any]) -> None:
        self.path = path
        self.counts = Counts()
        self.done: set[str] = set()
        self._description = description
        for name in (ANSWERS_FILE, REJECTED_FILE):
            self._read(path / name)
        self.num_resumed = len(self.done)
        self._answers = _append_to(path / ANSWERS_FILE)
        self._rejected = _append_to(path / REJECTED_FILE)
        self.describe()

    def keep(self, name: str, conversation: Regenerated, tools: list[Any] | None) -> None:
        """Write a conversation down."""
        line: dict[str, Any] = {"source": name, "finish": conversation.finish}
        if conversation.left_out is not None:
            line["left_out"] = conversation.left_out
        line |= {"num_answers": conversation.num_answers, "num_tokens": conversation.num_tokens}
        line["messages"] = conversation.messages
        if tools:
            line["tools"] = tools
        if conversation.rows is not None:
            line["rows"] = conversation.rows
        self._write(self._answers, line)

    def reject(self, name: str, record: Record, rejection: Rejection) -> None:
        """Write down why a row has no answer."""
        line = {"source": name, "file": record.file, "line": record.number, "reason": rejection.reason}
        self._write(self._rejected, {**line, "text": record.text})

    def describe(self, **more: Any) -> None:
        """Write regenerate.json, with more than stood there so far."""
        self._description |= more
        content = self._description | {"counts": self.counts.as_dict()}
        write_atomically(self.path / REGENERATE_FILE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Force what was written to the disk."""
        for file in (self._answers, self._rejected):
            os.fsync(file)
            os.close(file)

    def _write(self, file: int, line: dict[str, Any]) -> None:
        # Text that JSON can hold and UTF-8 cannot, a lone surrogate, is written as an escape.
        data = (json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n").encode(
            "utf-8", errors="backslashreplace"
        )
        if (written := os.write(file, data)) != len(data):  # the disk is full: the next start cuts the torn line off
            raise OSError(f"{self.path} could not be written: {written} of {len(data)} bytes of a line")
        self.counts.add(line)
        self.done.add(line["source"])

    def _read(self, path: Path) -> None:
        """Count the lines of an earlier run; a last one that a killed process left torn is cut off."""
        if not path.exists():
            return
        with path.open("rb+") as file:
            end = 0
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    break
                end += len(raw)
                try:
                    line = json.loads(raw)
                    self.counts.add(line)
                    self.done.add(line["source"])
                except (ValueError, KeyError, TypeError) as error:
                    raise DataError(
                        f"{path} is damaged at line {number}: remove that line and start again, or choose another --out"
                    ) from error
            file.truncate(end)


def _append_to(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


@contextmanager
def open_answers(out: Path, description: dict[str, Any]) -> Iterator[AnswerFolder]:
    """The output folder, new or to be gone on with, locked against a second process.

    Args:
        description: For regenerate.json; once there are lines, all of it but `MAY_CHANGE` has to be as it was.
    Raises: DataError if the folder holds something else; ConfigError if settings differ or the folder is in use.
    """
    if out.exists() and not out.is_dir():
        raise DataError(f"output {out} exists and is no folder: choose another --out")
    found = {path.name for path in out.iterdir()} if out.exists() else set()
    if (foreign := {name for name in found if not name.startswith(".")} - {LOCK_FILE}) and REGENERATE_FILE not in found:
        raise DataError(f"output {out} holds {sorted(foreign)[0]} but no {REGENERATE_FILE}: choose another --out")

    def busy(holder: str) -> ConfigError:
        return ConfigError(f"{out} is being written by process {holder}: wait for it, or choose another --out")

    out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK_FILE, busy):
        description = {"format": FORMAT, **description, "finished": False}
        if any((out / name).exists() and (out / name).stat().st_size for name in (ANSWERS_FILE, REJECTED_FILE)):
            _check_unchanged(out, description)
        folder = AnswerFolder(out, description)
        try:
            yield folder
        finally:
            folder.close()


def _check_unchanged(out: Path, description: Mapping[str, Any]) -> None:
    """Raises: DataError if regenerate.json is damaged; ConfigError naming what differs from it."""
    path = out / REGENERATE_FILE
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        before = _flat({key: value for key, value in earlier.items() if key not in MAY_CHANGE})
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error}): choose another --out") from error
    kept = {key: value for key, value in description.items() if key not in MAY_CHANGE}
    now = _flat(json.loads(json.dumps(kept)))
    different = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if different:
        seen = "; ".join(f"{key} was {before.get(key)}, is now {now.get(key)}" for key in different[:3])
        of_inputs = any(key.startswith("inputs.") for key in different)
        what = "other inputs, or these have changed since" if of_inputs else "other settings"
        raise ConfigError(f"{out} was begun with {what} ({seen}): use those, or choose another --out")


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested objects as one, with dotted keys."""
    if not isinstance(value, (dict, list)) or not value:
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: x for part, item in items for key, x in _flat(item, f"{name}.{part}" if name else str(part)).items()}


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
            answer = await answerer.answer(f"{name} turn {turn}", messages, conversation.tools)
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
