"""Answers in slots at fixed addresses: the tokens of `BatchGenerator`, in any company, whatever room there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.eval import static_batch
from paceline.eval.generate import BatchGenerator, Request
from paceline.eval.local import generator_for, static_generator
from paceline.eval.static_batch import TURNS, StaticBatchGenerator
from paceline.kernels.linear_cross_entropy import Head
from tests import tiny
from tests.unit.eval.test_generate import STOP_IDS, decode, requests


def static(model: Any, **options: Any) -> StaticBatchGenerator:
    """The generator of a model, as `generator_for` makes it on a GPU."""
    return StaticBatchGenerator(model, Head(model.get_output_embeddings().weight.detach()), STOP_IDS, **options)


SAMPLINGS = [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}]


@pytest.mark.parametrize("options", SAMPLINGS, ids=["greedy", "sampled", "top-p"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_answers_are_those_of_the_other_generator(family: str, options: dict[str, Any]) -> None:
    """Token for token, with biases and norms of heads, with a slot for one, for some and for all."""
    model = tiny.causal_lm(family)
    decode(BatchGenerator(model, STOP_IDS, max_slots=5, **options), expected := requests())
    for max_slots in (1, 5, 24):
        generator = static(model, max_slots=max_slots, **options)
        assert generator.difference(model) is None
        finished, _ = decode(generator, wanted := requests())
        assert [request.answer for request in wanted] == [request.answer for request in expected]
        assert sorted(map(id, finished)) == sorted(map(id, wanted))
        assert generator.num_sampled == sum(len(request.answer) for request in wanted)


def test_free_slots_are_refilled() -> None:
    """One long answer holds nobody up."""
    long, *short = [Request([9, i], 5, str(i)) for i in range(10, 40)]
    long.max_new_tokens = 90
    model = tiny.causal_lm("llama")
    generator = StaticBatchGenerator(model, Head(model.lm_head.weight), (), max_slots=4)
    finished, steps = decode(generator, [long, *short])
    assert finished[-1] is long and [len(request.answer) for request in finished] == [5] * 29 + [90]
    assert steps <= 12 + -(-90 // TURNS) + 1


def test_free_slots_start_over() -> None:
    """What they read is short while others go on, and their room holds what they write."""
    long, *short = [Request([9, i] * 10, 5, str(i)) for i in range(10, 14)]
    long.max_new_tokens = 60
    generator = StaticBatchGenerator(tiny.causal_lm("llama"), Head(tiny.causal_lm("llama").lm_head.weight), ())
    for request in (long, *short):
        generator.submit(request)
    generator.step()  # the prompts
    generator.step()
    assert generator._positions[:4].tolist() == [20 + TURNS] * 4
    generator.step()
    assert generator._positions[0] == 20 + 2 * TURNS and not generator._positions[1:].any()


def test_a_longer_request_gets_room_and_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those under way end first; the answers stay what they are, before and after."""
    monkeypatch.setattr(static_batch, "bucket_of", lambda size: 64 * -(-size // 64))
    model = tiny.causal_lm("llama")
    wanted = [Request([9, 10 + i], 20, str(i)) for i in range(6)]
    wanted.insert(4, Request([9] * 70, 60, "long"))
    generator = static(model, max_slots=2)
    for request in wanted:
        generator.submit(request)
    rooms = []
    while generator.is_busy:
        generator.step()
        rooms.append(generator._capacity)
    assert list(dict.fromkeys(rooms)) == [64, 192]
    decode(BatchGenerator(model, STOP_IDS), again := [Request(r.prompt, r.max_new_tokens) for r in wanted])
    assert [request.answer for request in wanted] == [request.answer for request in again]


def test_the_room_stays_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots times positions; a request above the limit runs alone, the others do not pay for it."""
    monkeypatch.setattr(static_batch, "bucket_of", lambda size: 16 * -(-size // 16))
    generator = static(tiny.causal_lm("llama"), max_slots=50, max_tokens=100)
    wanted = [Request([9] * 10, 5, str(i)) for i in range(12)] + [Request([9] * 120, 5, "long")]
    for request in wanted:
        generator.submit(request)
    seen = set()
    while generator.is_busy:
        generator.step()
        seen.add((len(generator._slots), generator._capacity))
    assert seen == {(3, 32), (1, 144)}
    assert all(1 <= len(request.answer) <= 5 for request in wanted)


def test_prompts_are_run_in_forwards_of_a_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding counts; a prompt above the limit runs alone."""
    monkeypatch.setattr(static_batch, "PREFILL_TOKENS", {"cpu": 30})
    model = tiny.causal_lm("llama")
    generator = static(model, max_slots=24)
    sizes: list[tuple[int, int]] = []
    run = generator._run_prompts
    monkeypatch.setattr(
        generator, "_run_prompts", lambda ids, *rest: (sizes.append((ids.shape[0], ids.shape[1])), run(ids, *rest))[1]
    )
    decode(generator, requests())
    assert all(rows * columns <= 30 or rows == 1 for rows, columns in sizes) and max(rows for rows, _ in sizes) > 1


@pytest.mark.parametrize("part", ["input_layernorm.weight", "self_attn.k_proj.weight", "mlp.down_proj.weight"])
def test_a_probe_finds_a_difference(part: str) -> None:
    """Weights that changed after they were joined, in the last layer alone."""
    model, other = tiny.causal_lm("llama"), tiny.causal_lm("llama")
    generator = static(other, max_slots=2)
    assert generator.difference(model) is None
    with torch.no_grad():
        model.get_decoder().layers[-1].get_parameter(part).mul_(1.5)
    assert "in a probe the logits after" in str(generator.difference(model))


def test_what_does_not_fit_or_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, for the log: another family, numbers that differ, kernels that do not compile."""
    assert isinstance(static_generator(tiny.causal_lm("qwen3"), STOP_IDS), StaticBatchGenerator)
    assert "Gemma3" in str(static_generator(tiny.causal_lm("gemma3"), STOP_IDS))
    monkeypatch.setattr(static_batch, "TOLERANCE", {torch.float32: 0.0})
    assert "in a probe the logits after a prompt differed" in str(static_generator(tiny.causal_lm("llama"), STOP_IDS))

    def fail(*args: Any) -> None:
        raise RuntimeError("no code\nfor this card")

    monkeypatch.setattr(static_batch, "attend_slots", fail)
    reason = static_generator(tiny.causal_lm("llama"), STOP_IDS)
    assert reason == "its kernels do not run here, RuntimeError: no code for this card"


def test_on_a_cpu_transformers_decodes() -> None:
    """With packed weights that is faster there."""
    assert type(generator_for(tiny.causal_lm("llama"), STOP_IDS)) is BatchGenerator


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", SAMPLINGS, ids=["greedy", "sampled", "top-p"])
def test_a_gpu_replays_the_same_answers(options: dict[str, Any]) -> None:
    """Compiled and recorded, in float32, beside the other generator on the same device."""
    model = tiny.causal_lm("llama").to("cuda")
    decode(BatchGenerator(model, STOP_IDS, max_slots=5, **options), expected := requests())
    generator = generator_for(model, STOP_IDS, max_slots=5, **options)
    assert isinstance(generator, StaticBatchGenerator)
    decode(generator, wanted := requests())
    assert [request.answer for request in wanted] == [request.answer for request in expected]
    assert generator._runner.is_replaying
