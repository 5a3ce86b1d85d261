"""The target's own answers, many at a time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.eval import answers
from paceline.eval.decode import CachedTarget, plain_decode
from tests import tiny

STOP_IDS = frozenset({257, 40, 90, 140})


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_batch_answers_like_each_prompt_alone(tmp_path: Path, family: str) -> None:
    """Left padding changes nothing: the answers are those of greedy decoding one by one, cut at the stop token."""
    model = tiny.causal_lm(family)
    prompts = [[5, 6, 7], [9] * 20, [100, 101], list(range(30, 75))]
    found = answers.greedy_answers(model, prompts, 30, STOP_IDS)
    target = CachedTarget.load(tiny.save(tiny.causal_lm(family), tmp_path / "t"), ())
    alone = [plain_decode(target, prompt, 30, STOP_IDS).tokens for prompt in prompts]
    assert found == alone
    assert any(answer[-1] in STOP_IDS for answer in alone) and len({len(answer) for answer in alone}) > 1


class Bytes:
    """A tokenizer whose template puts the roles' first letters and an end token around the bytes of the text."""

    chat_template = "yes"

    def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool = False) -> str:
        text = "".join(f"{m['role'][0]}{m['content']}|" for m in messages)
        return text + "a" if add_generation_prompt else text

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


END = ord("|")


def prompts(count: int) -> list[list[dict[str, Any]]]:
    return [[{"role": "user", "content": f"question {i}"}] for i in range(count)]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A target that answers by number; batches it was asked for."""
    sizes: list[int] = []

    def answer(model: Any, batch: list[list[int]], limit: int, stop_ids: frozenset[int]) -> list[list[int]]:
        sizes.append(len(batch))
        numbers = [int(bytes(prompt).decode().split()[1].rstrip("|a")) for prompt in batch]
        return [
            [*b"loop"] if n % 4 == 1 else [255, END] if n % 4 == 2 else [*f"it is {n}".encode(), END] for n in numbers
        ]

    monkeypatch.setattr(answers, "greedy_answers", answer)
    monkeypatch.setattr(answers, "BATCH_SIZE", 16)
    return sizes


def write(path: Path, count: int, **options: Any) -> Counter[str]:
    return answers.write_answers(
        None, Bytes(), prompts(count), path, max_new_tokens=9, stop_ids=frozenset({END}), **options
    )


def test_every_prompt_has_its_line_and_its_reason(tmp_path: Path, model: list[int]) -> None:
    """Answers that end and tokenise back are kept in order; the others are counted by reason."""
    path = tmp_path / "answers.jsonl"
    outcome = write(path, 40)
    assert outcome == {"kept": 20, "dropped: does not end": 10, "dropped: does not tokenise back": 10}
    assert len(path.read_text().splitlines()) == 40 and model == [16, 16, 8]
    kept = [json.loads(line)["messages"] for line in answers.read_answers(path)]
    assert [messages[-1]["content"] for messages in kept][:3] == ["it is 0", "it is 3", "it is 4"]
    assert kept[0][0] == {"role": "user", "content": "question 0"}


def test_an_interrupted_file_is_gone_on_with(tmp_path: Path, model: list[int]) -> None:
    """A stop between batches, and a line that a killed process left torn, cost nothing but that line."""
    straight, path = tmp_path / "straight.jsonl", tmp_path / "answers.jsonl"
    write(straight, 40)
    model.clear()
    assert write(path, 40, should_stop=lambda: len(model) == 1)["kept"] == 8
    assert len(path.read_text().splitlines()) == 16
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"messages": [{"role": "us')
    done: list[int] = []
    outcome = write(path, 40, on_batch=lambda number, so_far: done.append(number))
    assert path.read_text() == straight.read_text() and done == [32, 40] and outcome["kept"] == 20
    model.clear()
    assert write(path, 40) == outcome and model == []
