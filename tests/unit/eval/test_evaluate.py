"""Prompts from files, the comparison of answers, and the result record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.dflash.acceptance import Acceptance
from paceline.errors import DataError
from paceline.eval import evaluate as module
from paceline.eval.decode import CachedTarget, Decoded
from paceline.eval.evaluate import (
    Difference,
    Evaluation,
    PromptResult,
    compare,
    encode_prompts,
    ends_in_loop,
    evaluate,
    evaluate_blocks,
    first_difference,
    packed_copy,
    read_prompts,
)
from paceline.kernels.packed_linear import can_pack
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
    off = "oneenable_thinking=Falsethinking=False"  # templates read the one or the other
    assert encode_prompts([[USER]], Template(), thinking=False) == [[ord(c) for c in off]]
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
    plain, other = (Decoded(tokens, Acceptance(0)) for tokens in ([5, 6, 7], [5, 8, 7]))
    result = compare(target, [1, 2], plain, other)
    assert result.differences == (Difference("speculative", 1, pytest.approx(gap), is_tie),)
    assert seen == [[1, 2, 5]]
    result = compare(target, [1, 2], plain, plain, other)
    assert [difference.answer for difference in result.differences] == ["ngram"]
    assert compare(target, [1, 2], plain, plain, plain).differences == ()


def test_next_logits_are_those_of_a_fresh_forward(
    cached_target: Callable[[str], CachedTarget], target_folder: Callable[[str], str]
) -> None:
    """The target's opinion at a difference does not depend on what was decoded before."""
    target = cached_target("llama")
    target.prefill([9, 9, 9])
    model = transformers.AutoModelForCausalLM.from_pretrained(target_folder("llama"))
    whole = model(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, -1].detach()
    torch.testing.assert_close(target.next_logits([3, 1, 4, 1, 5]), whole, atol=1e-4, rtol=1e-4)


def answer(num_tokens: int, seconds: float, rounds: list[tuple[int, int]] = (), **fields: Any) -> Decoded:  # type: ignore[assignment]
    acceptance = Acceptance(2)
    for num_accepted, num_committed in rounds:
        acceptance.add_round(num_accepted, num_committed)
    return Decoded(
        [7] * num_tokens, acceptance, prefill_s=seconds / 2, draft_s=seconds / 8, verify_s=seconds * 3 / 8, **fields
    )


def test_the_record_adds_first_and_divides_last() -> None:
    """Lengths are pooled over rounds and rates over seconds, so that long answers count by their length."""
    total = Evaluation(max_new_tokens=9, block_size=3, num_predicted=2)
    fault, tie = Difference("speculative", 3, 0.5, False), Difference("speculative", 0, 1e-6, True)
    total.results += [
        PromptResult(answer(4, 4.0, stopped=True), answer(4, 2.0, [(2, 3)], stopped=True)),
        PromptResult(answer(9, 8.0), answer(9, 2.0, [(0, 1)] * 8), differences=(fault,)),
        PromptResult(answer(1, 1.0), answer(1, 1.0), differences=(tie,)),
    ]
    record = total.as_dict()
    assert record["acceptance_length"] == pytest.approx(11 / 9)  # not (3 + 1) / 2
    assert record["acceptance_per_position"] == [1 / 9, 1.0]
    assert record["baseline_tok_per_s"] == pytest.approx(14 / 13)
    assert record["speculative_tok_per_s"] == pytest.approx(14 / 5)
    assert record["speedup"] == pytest.approx(13 / 5)
    assert record["speculative_decode_tok_per_s"] == pytest.approx(11 / 2.5)
    assert (record["draft_frac"], record["verify_frac"]) == (1 / 8, 3 / 8)
    assert (record["lossless"], record["mismatches"], record["ties"]) == (False, 1, 1)
    assert record["first_mismatches"][0] == {
        "prompt": 1, "answer": "speculative", "position": 3, "top2_gap": 0.5, "tie": False
    }  # fmt: skip
    assert (record["prompts"], record["generated_tokens"], record["ended_by_stop"]) == (3, 14, 1)
    assert {"paceline", "torch", "transformers", "python"} == set(record["versions"])
    assert not [key for key in record if "ngram" in key]
    assert record["acceptance_length_interval"] is None  # of two prompts with rounds nothing is known
    assert record["first_token_s"] == {"median": 1.0, "longest": 1.0}
    assert record["baseline_first_token_s"] == {"median": 2.0, "longest": 4.0}
    assert record["accepted_counts"] == [0, 0, 0] and record["by_context"] == []  # of no single round is anything kept


def test_copied_drafts_have_their_own_rates_and_count_for_losslessness() -> None:
    """What n-grams bring stands beside the drafter's numbers, and a wrong n-gram answer is reported as one."""
    total = Evaluation(max_new_tokens=9, block_size=3, num_predicted=2, has_ngram=True)
    fault = Difference("ngram", 2, 0.5, False)
    total.results += [
        PromptResult(answer(4, 8.0), answer(4, 2.0, [(2, 3)]), answer(4, 3.0, [(1, 2), (0, 1)])),
        PromptResult(answer(2, 1.0), answer(2, 1.0, [(0, 1)]), answer(2, 1.0, [(0, 1)]), (fault,)),
    ]
    record = total.as_dict()
    assert record["ngram_tok_per_s"] == pytest.approx(6 / 4)
    assert record["ngram_acceptance_length"] == pytest.approx(4 / 3)
    assert record["ngram_speedup"] == pytest.approx(9 / 4)
    assert record["speedup_over_ngram"] == pytest.approx(4 / 3)
    assert record["speedup"] == pytest.approx(3.0)
    assert (record["lossless"], record["mismatches"]) == (False, 1)
    assert (record["first_mismatches"][0]["prompt"], record["first_mismatches"][0]["answer"]) == (1, "ngram")


@pytest.mark.parametrize("has_ngram", [False, True])
def test_ended_answers_can_be_looked_at_alone(has_ngram: bool) -> None:
    """Lengths, rates and differences of `ended` are those of the answers that a stop token ended."""
    total = Evaluation(max_new_tokens=12, block_size=3, num_predicted=2, has_ngram=has_ngram)
    loop = PromptResult(answer(12, 6.0), answer(12, 1.0, [(2, 3)] * 3), answer(12, 1.0, [(2, 3)] * 3))
    fault = Difference("speculative", 3, 0.5, False)
    ended = PromptResult(
        answer(3, 6.0, stopped=True), answer(3, 3.0, [(0, 1), (0, 1)], stopped=True), answer(3, 2.0, [(1, 2)])
    )
    cut = PromptResult(answer(12, 1.0), answer(12, 1.0, [(0, 1)]), answer(12, 1.0, [(0, 1)]), (fault,))
    cut.plain.tokens[-1] = 8
    total.results += [loop, ended, cut]
    assert (total.num_not_ended, total.num_loops) == (2, 1)
    part = total.ended()
    assert part.results == [ended] and len(total.results) == 3
    assert (part.num_not_ended, part.num_loops, part.is_lossless, total.is_lossless) == (0, 0, True, False)
    assert part.acceptance.length == 1.0 and part.ngram_acceptance.length == 2.0
    record = part.as_dict()
    assert record["prompts"] == record["ended_by_stop"] == 1
    assert record["speedup"] == pytest.approx(2.0)
    assert ("ngram_speedup" in record) == has_ngram
    nothing = Evaluation(9, 3, 2, has_ngram, [loop]).ended().as_dict()
    assert nothing["prompts"] == nothing["acceptance_length"] == nothing["speedup"] == 0


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([1, 2, 3, 4, 4, 4], True),
        ([4, 4, 4, 1], False),
        ([4, 4], False),
        ([9, 1, 2, 1, 2, 1, 2], True),
        ([9, 1, 2, 1, 2, 1], False),
        ([*range(24)] * 3, True),
        ([*range(25)] * 3, False),
        ([0, *range(24), *range(1, 24), *range(24)], False),
        ([], False),
    ],
)
def test_a_loop_repeats_its_end_three_times(tokens: list[int], wanted: bool) -> None:
    """A piece of up to 24 tokens that stands three times in a row at the end is a loop."""
    assert ends_in_loop(tokens) == wanted


@pytest.mark.parametrize(
    ("ngram", "order"), [(True, "pns" + "pns" + "nsp" + "spn" + "pns"), (False, "ps" + "ps" + "sp" + "ps" + "sp")]
)
def test_evaluate_takes_turns_and_compares(
    ngram: bool,
    order: str,
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every way runs on every prompt in rotating order; the real loop is lossless and its record can be written."""
    called = []
    for name in ("plain_decode", "ngram_decode", "speculative_decode"):
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, name=name, original=original: called.append(name[0]) or original(*args)
        )
    seen = []
    evaluation = evaluate(
        cached_target("llama"),
        trained_drafter(),
        prompts,
        max_new_tokens=20,
        stop_ids=(),
        block_size=4,
        ngram=ngram,
        on_prompt=lambda result, so_far: seen.append((result is so_far.results[-1], len(so_far.results))),
    )
    assert "".join(called) == order  # the first turn warms up
    assert seen == [(True, 1), (True, 2), (True, 3), (True, 4)]
    assert evaluation.is_lossless
    assert evaluation.acceptance.committed == 4 * 19
    record = json.loads(json.dumps(evaluation.as_dict()))
    assert record["block_size"] == 4
    if ngram:
        assert evaluation.ngram_acceptance.committed == 4 * 19
        assert max(num for r in evaluation.results for num in r.ngram.num_accepted_tokens) <= 3
        assert record["ngram_acceptance_length"] >= 1
    else:
        assert not [key for key in record if "ngram" in key]


def test_block_sizes_are_measured_in_turns(
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every size takes its turn on every prompt, beside one plain and one n-gram answer that all are compared with."""
    called: list[object] = []
    for name in ("plain_decode", "ngram_decode", "speculative_decode"):
        original = getattr(module, name)
        place = {"p": None, "n": 1, "s": 5}[name[0]]

        def watched(*args: Any, name: str = name, original: Any = original, place: int | None = place) -> Decoded:
            called.append(name[0] if place is None else (name[0], args[place]))
            return original(*args)

        monkeypatch.setattr(module, name, watched)
    shown: list[int] = []
    found = evaluate_blocks(
        cached_target("llama"), trained_drafter(), prompts, [5, 2, 5], max_new_tokens=20, stop_ids=(),
        on_prompt=lambda result, so_far: shown.append(so_far.block_size),
    )  # fmt: skip
    turn = ["p", ("n", 4), ("s", 2), ("s", 5)]
    assert called == [*turn, *turn, *turn[1:], *turn[:1], *turn[2:], *turn[:2], *turn[3:], *turn[:3]]
    assert shown == [5] * 4 and list(found) == [2, 5]
    assert all(evaluation.is_lossless for evaluation in found.values())
    for small, large in zip(found[2].results, found[5].results, strict=True):
        assert small.plain is large.plain and small.ngram is large.ngram
    assert 1 < found[2].acceptance.length < found[5].acceptance.length < 5
    record = json.loads(json.dumps(found[2].as_dict()))
    low, high = record["acceptance_length_interval"]
    assert low <= record["acceptance_length"] <= high and record["acceptance_length_error"] > 0
    assert sum(record["accepted_counts"]) == record["rounds"] and len(record["accepted_counts"]) == 2
    assert record["ngram_acceptance_length"] == found[5].ngram_acceptance.length
    (bucket,) = record["by_context"]  # all within 128 tokens
    assert (bucket["rounds"], bucket["acceptance_length"]) == (record["rounds"], record["acceptance_length"])
    assert bucket["tok_per_s"] == pytest.approx(record["speculative_decode_tok_per_s"], rel=0.2)


def test_a_drafter_is_packed_once(
    cached_target: Callable[[str], CachedTarget], trained_drafter: Callable[..., DFlashDrafter]
) -> None:
    """A packed copy is used as it is by later evaluations, and the drafter itself stays trainable."""
    target, drafter = cached_target("llama"), trained_drafter()
    drafter.requires_grad_(True)
    once = packed_copy(drafter, target)
    assert once is not drafter and not any(parameter.requires_grad for parameter in once.parameters())
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    drafter.requires_grad_(False)
    assert type(drafter.fc) is torch.nn.Linear
    if can_pack():
        assert packed_copy(once, target) is once
    both = [evaluate(target, d, [[1, 2]], max_new_tokens=9, stop_ids=()) for d in (drafter, once)]
    assert both[0].acceptance == both[1].acceptance
