"""The built-in generator: the same tokens as `generate`, in any company; refills; sampling; the thread around it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data.dialects import Rejection
from paceline.data.regenerate import AnswerSettings, number_of
from paceline.eval import generate
from paceline.eval.generate import BatchGenerator, Request, cache_budget
from paceline.eval.local import LocalTarget
from tests import tiny
from tests.unit.data.conftest import toy

STOP_IDS = frozenset({257, *range(8)})
LOCAL_STOP_IDS = frozenset({257, 227})
"""For prompts of the toy tokenizer: some answers end, others do not."""


def generated(
    model: Any, prompt: Sequence[int], max_new_tokens: int, stop_ids: Collection[int] = STOP_IDS
) -> list[int]:
    """What Transformers' own `generate` answers to a prompt alone."""
    ids = torch.tensor([list(prompt)], device=model.device)
    options = {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "eos_token_id": sorted(stop_ids),
        "pad_token_id": 0,
    }
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def requests(count: int = 24, seed: int = 1) -> list[Request]:
    """Prompts and limits of many lengths. With this seed no best logit is nearer than 5e-4 to the next: no processor's
    rounding changes a greedy answer."""
    draw = random.Random(seed)
    lengths = [draw.choice([1, 2, 3, 7, 12, 20, 33]) for _ in range(count)]
    prompts = [[draw.randrange(8, 256) for _ in range(length)] for length in lengths]
    return [Request(prompt, draw.choice([1, 2, 5, 9, 17, 30]), f"row {i}") for i, prompt in enumerate(prompts)]


def decode(generator: BatchGenerator, wanted: Sequence[Request]) -> tuple[list[Request], int]:
    """Requests in the order in which they finish, and the steps that it took."""
    for request in wanted:
        generator.submit(request)
    finished: list[Request] = []
    steps = 0
    while generator.is_busy:
        finished += generator.step()
        steps += 1
    return finished, steps


@pytest.mark.parametrize(
    ("family", "slots"),
    [("llama", (1, 5, 24)), ("qwen2", (5,)), ("gemma2", (5,)), ("gemma3", (5, 24)), ("qwen3_5", (1, 5))],
)
def test_answers_are_those_of_generate(family: str, slots: tuple[int, ...]) -> None:
    """Token for token, whatever the number of slots: full and sliding attention, soft caps, recurrent layers."""
    model = tiny.causal_lm(family)
    expected = [generated(model, r.prompt, r.max_new_tokens) for r in requests()]
    assert len({len(answer) for answer in expected}) > 4
    for max_slots in slots:
        generator = BatchGenerator(model, STOP_IDS, max_slots=max_slots)
        wanted = requests()
        finished, _ = decode(generator, wanted)
        assert [request.answer for request in wanted] == expected
        assert sorted(map(id, finished)) == sorted(map(id, wanted))
        assert generator.num_sampled == sum(map(len, expected))
    assert generator.can_refill


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_gpu_answers_like_generate(family: str) -> None:
    """The same on a GPU, greedy; sampled, the same in other batches."""
    model = tiny.causal_lm(family).to("cuda")
    expected = [generated(model, r.prompt, r.max_new_tokens) for r in requests()]
    decode(BatchGenerator(model, STOP_IDS, max_slots=5), wanted := requests())
    assert [request.answer for request in wanted] == expected
    for max_slots in (3, 24):
        decode(BatchGenerator(model, STOP_IDS, temperature=1.0, top_p=0.9, max_slots=max_slots), wanted := requests())
        answers = [request.answer for request in wanted]
        expected = answers if max_slots == 3 else expected
    assert answers == expected and cache_budget(model) > 0


def test_free_slots_are_refilled() -> None:
    """One long answer holds nobody up: the others finish beside it, in far fewer steps than batches would take."""
    model = tiny.causal_lm("llama")
    long, *short = [Request([9, i], 5, str(i)) for i in range(10, 40)]
    long.max_new_tokens = 90
    finished, steps = decode(BatchGenerator(model, (), max_slots=4), [long, *short])
    assert finished[-1] is long and [len(request.answer) for request in finished] == [5] * 29 + [90]
    assert steps <= 90 + 12  # each refill is a step in which the long one waits


def test_rows_that_are_done_leave_the_batch() -> None:
    """Also when nothing waits: the last answer is decoded alone, in a cache as wide as itself."""
    generator = BatchGenerator(tiny.causal_lm("llama"), (), max_slots=16)
    for i in range(16):
        generator.submit(Request([9] * (40 if i else 3), 5 if i else 20, str(i)))
    while generator.is_busy:
        shape = (len(generator._rows), generator._mask.shape[1])
        generator.step()
    assert shape == (1, 3 + 18)


def test_a_cache_that_cannot_be_refilled_runs_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown kind of layer: whole batches one after the other, the same answers."""
    monkeypatch.setattr(generate, "JOINABLE", ())
    model = tiny.causal_lm("llama")
    generator = BatchGenerator(model, STOP_IDS, max_slots=7)
    wanted = requests()
    finished, _ = decode(generator, wanted)
    expected = [generated(model, r.prompt, r.max_new_tokens) for r in requests()]
    assert not generator.can_refill and [request.answer for request in wanted] == expected
    assert {id(request) for request in finished[:7]} == {id(request) for request in wanted[:7]}


def test_the_cache_stays_within_its_limit() -> None:
    """Rows times columns, each row counted at the longest it may become; a request above the limit runs alone."""
    generator = BatchGenerator(tiny.causal_lm("llama"), (), max_slots=50, max_tokens=60)
    wanted = [Request([9] * 10, 5, str(i)) for i in range(12)] + [Request([9] * 70, 5, "long")]
    for request in wanted:
        generator.submit(request)
    largest = 0
    while generator.is_busy:
        generator.step()
        if generator._cache is not None and len(generator._rows) > 1:
            largest = max(largest, len(generator._rows) * generator._mask.shape[1])
    assert 45 <= largest <= 60 and all(len(request.answer) == 5 for request in wanted)


def sample(wanted: list[Request], max_slots: int = 8, **options: Any) -> list[list[int]]:
    decode(BatchGenerator(tiny.causal_lm("llama"), STOP_IDS, max_slots=max_slots, **options), wanted)
    return [request.answer for request in wanted]


def test_sampled_answers_hang_on_seed_and_row_alone() -> None:
    """Not on the company: the same in other batches and another order; another seed gives others."""
    first = sample(requests(), temperature=1.0, seed=1)
    assert sample(requests(), max_slots=3, temperature=1.0, seed=1) == first
    backwards = requests()
    sample(backwards[::-1], temperature=1.0, seed=1)
    assert [request.answer for request in backwards] == first
    others = sample(requests(), temperature=1.0, seed=2)
    assert sum(a != b for a, b in zip(first, others, strict=True)) > 15


def sorted_nucleus(row: np.ndarray, top_p: float) -> np.ndarray:
    """The likeliest tokens, one more as long as those before it have less than the share."""
    order = np.argsort(-row, kind="stable")
    before = np.cumsum(row[order]) - row[order]
    inside = np.zeros(len(row), dtype=bool)
    inside[order[before < top_p]] = True
    return inside


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.8, 0.95, 0.999])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, 12.0])
def test_the_nucleus_is_that_of_sorted_probabilities(top_p: float, spread: float) -> None:
    """Found by the bits of the least probability in it; nearly flat rows and nearly certain ones."""
    random_ = np.random.default_rng(int(10 * spread))
    logits = torch.from_numpy(random_.standard_normal((8, 1000)) * spread).float()
    probabilities = logits.softmax(-1)
    found = generate.nucleus(probabilities, top_p).numpy()
    for row, inside in zip(probabilities.double().numpy(), found, strict=True):
        share = row[inside].sum()
        assert share > top_p - 1e-5 and share - row[inside].min() < top_p + 1e-5
        assert row[inside].min() > row[~inside].max(initial=0)
        if abs(share - top_p) > 1e-5 and abs(share - row[inside].min() - top_p) > 1e-5:  # no matter of rounding
            assert (inside == sorted_nucleus(row, top_p)).all()


def test_tokens_that_are_as_likely_are_in_the_nucleus_together() -> None:
    """And a certain token is there alone, whatever the share; all tokens where all are as likely."""
    rows = torch.tensor([[0.25, 0.5, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0], [0.25] * 4])
    assert generate.nucleus(rows, 0.6).tolist() == [[True, True, True, False], [False, False, True, False], [True] * 4]
    assert generate.nucleus(rows, 0.4).tolist() == [
        [False, True, False, False],
        [False, False, True, False],
        [True] * 4,
    ]


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_a_token_is_looked_up_in_the_cumulated_probabilities(top_p: float) -> None:
    """The first token of a row is the one whose share of [0, 1) holds the row's first random number."""
    model = tiny.causal_lm("llama")
    wanted = [Request([30 + i, 9], 1, str(i)) for i in range(40)]
    found = [answer[0] for answer in sample(wanted, temperature=0.8, top_p=top_p, seed=5)]
    with torch.inference_mode():
        logits = model(torch.tensor([list(request.prompt) for request in wanted])).logits[:, -1]
    for request, token, row in zip(wanted, found, (logits / 0.8).double().softmax(-1).numpy(), strict=True):
        kept = np.where(sorted_nucleus(row, top_p), row, 0)
        ends = np.cumsum(kept) / kept.sum()
        uniform = np.random.Generator(np.random.Philox(key=number_of(5, request.key))).random()
        assert token == np.argmax(ends > uniform)
    assert len(set(found)) > 10


def test_a_temperature_near_zero_is_greedy() -> None:
    """The limit of sampling."""
    assert sample(requests(), temperature=1e-4, top_p=0.99) == sample(requests())


def test_the_budget_is_memory_over_bytes_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values, 5 layers, 2 heads of 8 numbers, 4 bytes each: 640 bytes a token."""
    monkeypatch.setattr(generate.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}[name])
    assert cache_budget(tiny.causal_lm("llama")) == (4 << 30) // 8 // 640


@pytest.fixture
def local() -> Any:
    """A tiny target with the toy tokenizer, in whose thread everything is decoded."""
    target = LocalTarget(tiny.causal_lm("llama"), toy(), LOCAL_STOP_IDS, AnswerSettings(max_new_tokens=30), max_slots=4)
    yield target
    target.close()


def test_the_local_target_answers_with_its_ids(local: LocalTarget) -> None:
    """Prompts as the template renders them, answers as `generate` gives them; text without the stop token."""
    tokenizer, model = toy(), tiny.causal_lm("llama")
    texts = [f"question {i}" * (1 + i % 3) for i in range(12)]
    asked = [[{"role": "user", "content": text}] for text in texts]

    async def work() -> Any:
        answers = (local.answer(f"{i}", messages, None) for i, messages in enumerate(asked))
        return await asyncio.gather(*answers)

    kinds = set()
    for messages, answer in zip(asked, asyncio.run(work()), strict=True):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        expected = generated(model, prompt, 30, LOCAL_STOP_IDS)
        if max(expected) >= len(tokenizer):
            assert isinstance(answer, Rejection) and answer.kind == "a token that the tokenizer lacks"
            continue
        kinds.add(answer.finish)
        assert (answer.prompt_ids, answer.answer_ids, answer.num_tokens) == (prompt, expected, len(expected))
        ended = expected[-1] in LOCAL_STOP_IDS
        assert answer.finish == ("stop" if ended else "length")
        assert answer.message["content"] == tokenizer.decode(expected[:-1] if ended else expected)
    assert kinds == {"stop", "length"}


def test_the_context_of_the_target_is_not_outgrown(local: LocalTarget) -> None:
    """A prompt beyond it is rejected; an answer that reaches its end is cut there."""
    with pytest.raises(Rejection, match="prompt longer than the target's context: 531 tokens, 512 at most"):
        asyncio.run(local.answer("a", [{"role": "user", "content": "x" * 512}], None))
    answer = asyncio.run(local.answer("a", [{"role": "user", "content": "x" * 485}], None))
    assert answer.prompt_ids is not None and answer.num_tokens <= 512 - len(answer.prompt_ids) == 8


def test_a_failing_model_is_told_to_who_waits() -> None:
    """The thread ends, and the run with it, instead of waiting for ever."""
    model = tiny.causal_lm("llama")
    target = LocalTarget(model, toy(), {257}, AnswerSettings(max_new_tokens=5), max_slots=2)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    model.forward = fail
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(target.answer("a", [{"role": "user", "content": "x"}], None))
    target.close()
