"""Prompts from files, the comparison of answers, and the result record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.dflash.acceptance import Acceptance
from paceline.errors import DataError
from paceline.eval import evaluate as module
from paceline.eval.decode import CachedTarget, Decoded
from paceline.eval.evaluate import (
    Evaluation,
    PromptResult,
    compare,
    encode_prompts,
    evaluate,
    first_difference,
    read_prompts,
)
from paceline.models.draft import DFlashDrafter

USER = {"role": "user", "content": "one"}


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"messages": [USER, {"role": "assistant", "content": "two"}]}, [USER]),
        ({"messages": [USER]}, [USER]),
        (
            {"messages": [USER, {"role": "assistant", "content": "a"}, USER, {"role": "assistant", "content": "b"}]},
            [USER, {"role": "assistant", "content": "a"}, USER],
        ),
        ({"turns": ["one", "two"], "question_id": 81}, [USER]),
        ({"prompt": "one"}, [USER]),
        ({"question": "one", "answer": "1"}, [USER]),
    ],
)
def test_a_prompt_is_what_comes_before_the_last_answer(
    record: dict[str, Any], wanted: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Every dialect gives the turns that a server would be asked to answer."""
    assert read_prompts([write(tmp_path / "a.jsonl", record)]) == [wanted]


def test_the_limit_counts_over_all_files(tmp_path: Path) -> None:
    """Prompts come in the order of the files, and a limit takes the first ones."""
    files = [write(tmp_path / f"{i}.jsonl", {"prompt": f"{i}a"}, {"prompt": f"{i}b"}) for i in range(2)]
    assert [messages[0]["content"] for messages in read_prompts(files, limit=3)] == ["0a", "0b", "1a"]


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"text": "x"}, "a.jsonl:2: no prompt: .*keys seen: text"),
        ({"turns": []}, "a.jsonl:2: no prompt"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "a.jsonl:2: no turn to answer"),
        ([1], "a.jsonl:2: not a JSON object"),
    ],
)
def test_a_line_without_a_prompt_is_an_error(record: object, named: str, tmp_path: Path) -> None:
    """A bad line ends the evaluation with its file and number, as skipping it would change the result."""
    with pytest.raises(DataError, match=named):
        read_prompts([write(tmp_path / "a.jsonl", {"prompt": "x"}, record)])


class Template:
    """A tokenizer with one id a character."""

    chat_template: str | None = "any"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options.pop("tokenize") is False
        assert options.pop("add_generation_prompt") is True
        text = "".join(message["content"] for message in messages)
        return text + "".join(f"{key}={value}" for key, value in options.items())

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens  # the template has written what begins a text
        return {"input_ids": [ord(c) for c in text]}


def test_prompts_are_rendered_as_a_server_would() -> None:
    """The chat template adds the generation prompt, and the thinking mode reaches it only when given."""
    assert encode_prompts([[USER]], Template()) == [[ord(c) for c in "one"]]
    assert encode_prompts([[USER]], Template(), thinking=False) == [[ord(c) for c in "oneenable_thinking=False"]]
    plain = Template()
    plain.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        encode_prompts([[USER]], plain)


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([1], [], 0)],
)
def test_first_difference(one: list[int], other: list[int], wanted: int | None) -> None:
    """Answers of different length differ where the shorter one ends."""
    assert first_difference(one, other) == wanted


@pytest.mark.parametrize(("gap", "is_tie"), [(0.0, True), (0.9e-3, True), (1.1e-3, False)])
def test_a_difference_at_a_tie_is_numerics(
    gap: float, is_tie: bool, cached_target: Callable[[str], CachedTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first difference the target's two best logits tell rounding from a fault."""
    target = cached_target("llama")
    seen = []

    def next_logits(token_ids: list[int]) -> torch.Tensor:
        seen.append(token_ids)
        return torch.tensor([0.0, -2.0, gap, -1.0])

    monkeypatch.setattr(target, "next_logits", next_logits)
    answers = [Decoded(tokens, Acceptance(0)) for tokens in ([5, 6, 7], [5, 8, 7])]
    result = compare(target, [1, 2], *answers)
    assert (result.mismatch, result.is_tie, seen) == (1, is_tie, [[1, 2, 5]])
    assert result.gap == pytest.approx(gap)


def test_next_logits_are_those_of_a_fresh_forward(cached_target: Callable[[str], CachedTarget]) -> None:
    """The target's opinion at a difference does not depend on what was decoded before."""
    target = cached_target("llama")
    target.prefill([9, 9, 9])
    whole = target._model(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, -1]
    torch.testing.assert_close(target.next_logits([3, 1, 4, 1, 5]), whole)


def answer(num_tokens: int, seconds: float, rounds: list[tuple[int, int]] = (), **fields: Any) -> Decoded:  # type: ignore[assignment]
    acceptance = Acceptance(2)
    for num_accepted, num_committed in rounds:
        acceptance.add_round(num_accepted, num_committed)
    return Decoded(
        [7] * num_tokens, acceptance, prefill_s=seconds / 2, draft_s=seconds / 8, verify_s=seconds * 3 / 8, **fields
    )


def test_the_record_adds_first_and_divides_last() -> None:
    """Lengths are pooled over rounds and rates over seconds, so that long answers count by their length."""
    total = Evaluation(max_new_tokens=9, block_size=3, acceptance=Acceptance(2))
    total.add(PromptResult(answer(4, 4.0, stopped=True), answer(4, 2.0, [(2, 3)], stopped=True)))
    total.add(PromptResult(answer(9, 8.0), answer(9, 2.0, [(0, 1)] * 8), mismatch=3, gap=0.5))
    total.add(PromptResult(answer(1, 1.0), answer(1, 1.0), mismatch=0, gap=1e-6, is_tie=True))
    record = total.as_dict()
    assert record["acceptance_length"] == pytest.approx(11 / 9)  # not (3 + 1) / 2
    assert record["acceptance_per_position"] == [1 / 9, 1.0]
    assert record["baseline_tok_per_s"] == pytest.approx(14 / 13)
    assert record["speculative_tok_per_s"] == pytest.approx(14 / 5)
    assert record["speedup"] == pytest.approx(13 / 5)
    assert record["speculative_decode_tok_per_s"] == pytest.approx(11 / 2.5)
    assert (record["draft_frac"], record["verify_frac"]) == (1 / 8, 3 / 8)
    assert (record["lossless"], record["mismatches"], record["ties"]) == (False, 1, 1)
    assert record["first_mismatches"][0] == {"prompt": 1, "position": 3, "top2_gap": 0.5, "tie": False}
    assert (record["prompts"], record["generated_tokens"], record["ended_by_stop"]) == (3, 14, 1)
    assert {"paceline", "torch", "transformers", "python"} == set(record["versions"])


def test_evaluate_alternates_and_compares(
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways run on every prompt in alternating order; the real loop is lossless and its record can be written."""
    order = []
    for name in ("plain_decode", "speculative_decode"):
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, name=name, original=original: order.append(name[0]) or original(*args)
        )
    seen = []
    evaluation = evaluate(
        cached_target("llama"),
        trained_drafter(),
        prompts,
        max_new_tokens=20,
        stop_ids=(),
        block_size=4,
        on_prompt=lambda result, so_far: seen.append(len(so_far.results)),
    )
    assert "".join(order) == "ps" + "psspps" + "sp"  # the first pair warms up
    assert seen == [1, 2, 3, 4]
    assert evaluation.is_lossless
    assert evaluation.acceptance.committed == 4 * 19
    assert json.loads(json.dumps(evaluation.as_dict()))["block_size"] == 4
