"""Batches whose rows go on at their own pace: every answer is the one that its prompt has alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.eval import batch as module
from paceline.eval.batch import BatchDrafter, BatchTarget, Concurrency, batch_sizes, decode_batch, measure_concurrency
from paceline.eval.decode import CachedTarget, plain_decode, speculative_decode
from paceline.eval.evaluate import packed_copy
from paceline.eval.sampling import Sampling
from paceline.models.draft import DFlashDrafter
from tests import tiny
from tests.unit.eval import learnt

LIMIT = 16


@pytest.fixture(scope="module")
def batch_target(target_folder: Callable[[str], str]) -> Callable[[str], BatchTarget]:
    """The tiny target of a family, for several rows."""
    return functools.cache(lambda family: BatchTarget.load(target_folder(family), learnt.LAYER_IDS))


@pytest.fixture
def many(prompts: list[list[int]]) -> list[list[int]]:
    """Six prompts of 1 to 30 tokens."""
    generator = torch.Generator().manual_seed(11)
    return [*prompts, *(torch.randint(0, 264, (n,), generator=generator).tolist() for n in (30, 2))]


@pytest.mark.parametrize("batch_size", [1, 3, 6])
@pytest.mark.parametrize("sampling", [None, Sampling(0.3, 2)], ids=["greedy", "drawn"])
def test_rows_of_a_batch_are_the_answers_alone(
    batch_size: int,
    sampling: Sampling | None,
    batch_target: Callable[[str], BatchTarget],
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    many: list[list[int]],
) -> None:
    """Tokens, accepted drafts of every round and ends are those of single decoding, with more prompts than rows."""
    alone, drafter = cached_target("llama"), trained_drafter()
    stop_ids = {plain_decode(alone, many[1], LIMIT, (), sampling and sampling.of_prompt(1)).tokens[9]}
    side = BatchDrafter(drafter, batch_target("llama"), 5)
    run = decode_batch(batch_target("llama"), side, many, LIMIT, stop_ids, batch_size, sampling)
    plain = decode_batch(batch_target("llama"), None, many, LIMIT, stop_ids, batch_size, sampling)
    for number, prompt in enumerate(many):
        draws = sampling and sampling.of_prompt(number)
        wanted = speculative_decode(alone, drafter, prompt, LIMIT, stop_ids, None, None, draws)
        for seen in (run.answers[number], plain.answers[number]):
            assert (seen.tokens, seen.stopped) == (wanted.tokens, wanted.stopped)
        assert run.answers[number].num_accepted_tokens == wanted.num_accepted_tokens
        assert run.answers[number].acceptance == wanted.acceptance
    assert len({len(answer.num_accepted_tokens) for answer in run.answers}) > 1  # they did progress unequally
    assert run.seconds > 0 and run.tok_per_s == sum(len(a.tokens) for a in run.answers) / run.seconds


def test_windows_are_seen_from_every_row(
    batch_target: Callable[[str], BatchTarget],
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    many: list[list[int]],
) -> None:
    """Layers with a sliding window shorter than the rows are decoded as alone."""
    alone, target, drafter = cached_target("gemma3"), batch_target("gemma3"), trained_drafter("gemma3")
    run = decode_batch(target, BatchDrafter(drafter, target, 5), many, LIMIT, (), 4)
    for number, prompt in enumerate(many):
        assert run.answers[number].tokens == plain_decode(alone, prompt, LIMIT, ()).tokens
    assert sum(sum(answer.num_accepted_tokens) for answer in run.answers) > 0


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_the_limit_inside_a_block(
    limit: int,
    batch_target: Callable[[str], BatchTarget],
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    many: list[list[int]],
) -> None:
    """A limit below a block's length cuts every row at it."""
    side = BatchDrafter(trained_drafter(), batch_target("llama"), 5)
    run = decode_batch(batch_target("llama"), side, many, limit, (), 4)
    for prompt, answer in zip(many, run.answers, strict=True):
        assert answer.tokens == plain_decode(cached_target("llama"), prompt, limit, ()).tokens


def test_the_last_position_can_be_used(
    batch_target: Callable[[str], BatchTarget],
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
) -> None:
    """A row that ends at the target's last position decodes as alone, beside one that is far from it."""
    alone, room = cached_target("llama"), 10
    long = [i % 264 for i in range(alone.shape.max_position_embeddings - room)]
    side = BatchDrafter(trained_drafter(), batch_target("llama"), 5)
    run = decode_batch(batch_target("llama"), side, [long, [1, 2]], room, (), 2)
    for prompt, answer in zip([long, [1, 2]], run.answers, strict=True):
        assert answer.tokens == plain_decode(alone, prompt, room, ()).tokens


def test_rows_of_a_hybrid_target_are_the_answers_alone(
    batch_target: Callable[[str], BatchTarget],
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    many: list[list[int]],
) -> None:
    """Recurrent states hold no padding and go back row by row: tokens, accepted drafts and ends are those alone."""
    alone, target, drafter = cached_target("qwen3_5"), batch_target("qwen3_5"), trained_drafter("qwen3_5")
    stop_ids = {plain_decode(alone, many[1], LIMIT, ()).tokens[9]}
    run = decode_batch(target, BatchDrafter(drafter, target, 5), many, LIMIT, stop_ids, 4)
    plain = decode_batch(target, None, many, LIMIT, stop_ids, 4)
    for number, prompt in enumerate(many):
        wanted = speculative_decode(alone, drafter, prompt, LIMIT, stop_ids)
        assert run.answers[number].tokens == plain.answers[number].tokens == wanted.tokens
        assert run.answers[number].num_accepted_tokens == wanted.num_accepted_tokens
    accepted = [answer.num_accepted_tokens for answer in run.answers]
    assert len(set(map(tuple, accepted))) > 1 and 0 < sum(map(sum, accepted))


def test_a_recurrent_layer_without_a_known_mixer_is_refused(cached_target: Callable[[str], CachedTarget]) -> None:
    """A state whose mixer cannot be run again cannot go back, and such a target is an error that says so."""
    model = tiny.causal_lm("qwen3_5")
    layer = model.get_decoder().layers[0]
    layer.other_mixer = layer.linear_attn
    del layer.linear_attn
    with pytest.raises(ModelError, match="no `linear_attn` mixer"):
        BatchTarget(model, cached_target("qwen3_5").shape, ())


def test_a_block_that_was_not_trained_is_refused(
    batch_target: Callable[[str], BatchTarget], new_drafter: Callable[..., DFlashDrafter]
) -> None:
    """Blocks longer than trained, and drafters of other targets, are errors as they are alone."""
    with pytest.raises(ModelError, match="blocks of 5 slots"):
        BatchDrafter(new_drafter(), batch_target("llama"), 6)
    with pytest.raises(ModelError, match="another target"):
        BatchDrafter(new_drafter(hidden_size=16), batch_target("llama"), 5)


def test_concurrency_is_a_table(
    batch_target: Callable[[str], BatchTarget],
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    many: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every number of rows has its rates, the ways take turns, and an answer that differs is counted."""
    alone = cached_target("llama")
    wanted = [plain_decode(alone, prompt, 12, ()) for prompt in many[:4]]
    wanted[2].tokens[5] += 1
    order: list[tuple[bool, int]] = []

    def watched(target: BatchTarget, drafter: BatchDrafter | None, *rest: object) -> module.BatchRun:
        order.append((drafter is not None, rest[3]))  # type: ignore[arg-type]
        return decode_batch(target, drafter, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "decode_batch", watched)
    told: list[Concurrency] = []
    rows = measure_concurrency(
        batch_target("llama"), packed_copy(trained_drafter(), alone), alone, many[:4], wanted,
        block_size=4, max_new_tokens=12, stop_ids=(), sizes=[1, 2, 3],
        on_size=told.append,
    )  # fmt: skip
    assert order == [(False, 3), (True, 3), (False, 1), (True, 1), (True, 2), (False, 2), (False, 3), (True, 3)]
    assert [row.batch_size for row in rows] == [1, 2, 3] and told == rows
    assert all(row.mismatches + row.ties == 2 for row in rows)  # the altered answer, in both ways
    assert len({row.acceptance_length for row in rows}) == 1 and rows[0].acceptance_length > 1
    record = rows[1].as_dict()
    assert record["speedup"] == pytest.approx(record["tok_per_s"] / record["baseline_tok_per_s"])


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (64, [1, 2, 4, 8, 16, 32, 64])]
)
def test_batch_sizes(largest: int, sizes: list[int]) -> None:
    """Powers of two up to the largest, and it."""
    assert batch_sizes(largest) == sizes


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_features_of_a_row_are_those_of_a_fresh_forward(
    family: str, batch_target: Callable[[str], BatchTarget], cached_target: Callable[[str], CachedTarget]
) -> None:
    """After rows went back by unequal numbers of tokens, states and logits are as if the others had never been."""
    target, alone = batch_target(family), cached_target(family)
    with torch.inference_mode():
        _, features = target.admit([[1, 2, 3], [7, 8, 9, 10, 11]])
        target.append([[4, 5, 6], [12, 13, 14]])
        kept = target.keep([1, 3])
        logits = target.append([[20], [21]])
        last = target.keep([1, 1])
        target.drop([0, 1])
        for row, tokens in enumerate([[1, 2, 3, 4, 20], [7, 8, 9, 10, 11, 12, 13, 14, 21]]):
            alone.prefill(tokens)
            seen = torch.cat([features[row], kept[row], last[row]])
            torch.testing.assert_close(seen, alone.features(), atol=1e-4, rtol=1e-4)
            wanted: Tensor = alone.next_logits(tokens)
            torch.testing.assert_close(logits[row, -1], wanted, atol=1e-4, rtol=1e-4)
