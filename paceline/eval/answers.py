"""The target's own greedy answers to prompts, many at a time: what a drafter for it is trained on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.eval.evaluate import encode_prompts
from paceline.eval.generate import BatchGenerator, Request

BATCH_SIZE = 32
"""Prompts decoded together on a CPU: several times the tokens a second of one, in some hundred MiB."""


def greedy_answers(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Collection[int]
) -> list[list[int]]:
    """Greedy answers to some prompts, each cut behind its stop token or after `max_new_tokens`.

    Args:
        model: A Transformers causal LM.
        prompts: Token ids of each.
    """
    generator = BatchGenerator(model, stop_ids, max_slots=len(prompts))
    requests = [Request(prompt, max_new_tokens) for prompt in prompts]
    for request in requests:
        generator.submit(request)
    while generator.is_busy:
        generator.step()
    return [request.answer for request in requests]


def round_trips(tokenizer: Any, messages: Sequence[Mapping[str, Any]], answer: str, expected: Sequence[int]) -> bool:
    """Whether the conversation with this answer's text tokenises to `expected`: prompt, answer, stop token."""
    conversation = [*messages, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"][: len(expected)] == list(expected)


def write_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[Mapping[str, Any]]],
    path: Path,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    should_stop: Callable[[], bool] = lambda: False,
    on_batch: Callable[[int, Counter[str]], None] = lambda done, outcome: None,
) -> Counter[str]:
    """Answer prompts in order and append each to a file, one line a prompt; a file that exists is gone on with.

    A line holds ``messages`` with the answer, or ``dropped`` with the reason: an answer that does not end is no example
    of what is served, and text that does not tokenise back would train on tokens that the target never said.

    Args:
        prompts: Messages of each.
        should_stop: Asked before every batch.
        on_batch: Called after it with prompts done and outcomes so far.
    Returns: how many prompts came to what.
    """
    lines = _whole_lines(path)
    outcome = Counter("dropped: " + line["dropped"] if "dropped" in line else "kept" for line in lines)
    encoded = encode_prompts(prompts, tokenizer)
    with open(path, "a", encoding="utf-8") as file:
        for start in range(len(lines), len(prompts), BATCH_SIZE):
            if should_stop():
                break
            batch = slice(start, start + BATCH_SIZE)
            answers = greedy_answers(model, encoded[batch], max_new_tokens, stop_ids)
            for messages, prompt, answer in zip(prompts[batch], encoded[batch], answers, strict=True):
                line = _line(tokenizer, messages, prompt, answer, stop_ids)
                outcome["dropped: " + line["dropped"] if "dropped" in line else "kept"] += 1
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            on_batch(start + len(answers), outcome)
    return outcome


def read_answers(path: Path) -> list[str]:
    """The conversations of such a file that were kept, as lines of JSONL."""
    kept = [{"messages": line["messages"]} for line in _whole_lines(path) if "dropped" not in line]
    return [json.dumps(line, ensure_ascii=False) + "\n" for line in kept]


def _line(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    prompt: Sequence[int],
    answer: Sequence[int],
    stop_ids: Collection[int],
) -> dict[str, Any]:
    if answer[-1] not in stop_ids:
        return {"dropped": "does not end"}
    text = tokenizer.decode(answer[:-1])
    if not round_trips(tokenizer, messages, text, [*prompt, *answer]):
        return {"dropped": "does not tokenise back"}
    return {"messages": [*messages, {"role": "assistant", "content": text}]}


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of the file; a last one that a killed process left torn is cut off."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) != len(content):
        path.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]
