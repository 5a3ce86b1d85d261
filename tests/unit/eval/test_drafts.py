"""Drafters of every kind while decoding: verified in part, decoded in a batch, and with drafts that are drawn."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from paceline.dflash.confidence import cut_below
from paceline.errors import ModelError
from paceline.eval import batch as batch_module
from paceline.eval.batch import BatchDrafter, BatchTarget, RoundCost, decode_batch, measure_concurrency, measure_rounds
from paceline.eval.decode import (
    CachedTarget,
    ContextDrafter,
    decode,
    leading_hits,
    plain_decode,
    speculative_decode,
)
from paceline.eval.evaluate import IN_DISTRIBUTION, TOKEN_BY_TOKEN, compare, evaluate
from paceline.eval.sampling import JudgingTarget, SampledTarget, Sampling
from paceline.eval.static_draft import StaticDrafter
from paceline.kernels.linear_cross_entropy import Head
from paceline.models.draft import DFlashDrafter, Proposal
from tests import tiny
from tests.unit.eval import learnt

KINDS = ("dflash", "dflash2", "dspark")
LIMIT = 16
DRAWN = Sampling(0.6, 3, "sampled")

Trained = Callable[..., DFlashDrafter]


@pytest.fixture(scope="module")
def batch_target(target_folder: Callable[[str], str]) -> Callable[[str], BatchTarget]:
    """The tiny target of a family, for several rows."""
    return functools.cache(lambda family: BatchTarget.load(target_folder(family), learnt.LAYER_IDS))


@pytest.fixture(scope="module")
def target(cached_target: Callable[[str], CachedTarget]) -> CachedTarget:
    """The tiny llama."""
    return cached_target("llama")


def middle_threshold(target: CachedTarget, drafter: DFlashDrafter, prompts: Sequence[Sequence[int]]) -> float:
    """A confidence that some drafted tokens have and others have not."""
    seen = []
    for prompt in prompts:
        side = ContextDrafter(drafter, target, 60, drafter.shape.block_size)
        target.prefill(prompt)
        side.extend(prompt, target.features)
        side.propose(5)
        assert side.proposal.confidence is not None
        seen.append(side.proposal.confidence[0])
    return float(torch.cat(seen).median())


# ------------------------------------------------------------------ greedily


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_lossless(
    kind: str,
    family: str,
    cached_target: Callable[[str], CachedTarget],
    batch_target: Callable[[str], BatchTarget],
    trained_drafter: Trained,
    prompts: list[list[int]],
) -> None:
    """Alone and in a batch, greedily and drawn by the target, answers are the plain ones in fewer forwards."""
    alone, several, drafter = cached_target(family), batch_target(family), trained_drafter(family, kind=kind)
    accepted = 0
    for sampling in (None, Sampling(0.3, 5)):
        side = BatchDrafter(drafter, several, 5)
        run = decode_batch(several, side, prompts, LIMIT, (), 3, sampling)
        for number, prompt in enumerate(prompts):
            draws = sampling and sampling.of_prompt(number)
            plain = plain_decode(alone, prompt, LIMIT, (), draws)
            drafted = speculative_decode(alone, drafter, prompt, LIMIT, (), None, None, draws)
            assert drafted.tokens == run.answers[number].tokens == plain.tokens
            assert run.answers[number].acceptance == drafted.acceptance
            accepted += sum(drafted.num_accepted_tokens)
    assert accepted > 0


@pytest.mark.parametrize("threshold", ["middle", 1.0])
@pytest.mark.parametrize("sampling", [None, Sampling(0.3, 5)], ids=["greedy", "drawn"])
def test_a_threshold_changes_no_token(
    threshold: str | float,
    sampling: Sampling | None,
    target: CachedTarget,
    batch_target: Callable[[str], BatchTarget],
    trained_drafter: Trained,
    prompts: list[list[int]],
) -> None:
    """Cut to some tokens or to none, answers stay; a cut round is counted by what it verified."""
    drafter = trained_drafter("llama", kind="dspark")
    value = middle_threshold(target, drafter, prompts) if threshold == "middle" else 1.0
    side = BatchDrafter(drafter, batch_target("llama"), 5)
    run = decode_batch(batch_target("llama"), side, prompts, LIMIT, (), 3, sampling, value)
    verified = rounds = 0
    for number, prompt in enumerate(prompts):
        draws = sampling and sampling.of_prompt(number)
        cut = speculative_decode(target, drafter, prompt, LIMIT, (), None, None, draws, value)
        assert cut.tokens == plain_decode(target, prompt, LIMIT, (), draws).tokens == run.answers[number].tokens
        assert run.answers[number].acceptance == cut.acceptance
        verified, rounds = verified + cut.acceptance.verified, rounds + cut.acceptance.rounds
    assert verified == 0 if value == 1.0 else 0 < verified < 5 * rounds
    assert rounds == len(prompts) * (LIMIT - 1) or value < 1.0


def test_verified_tokens_are_the_leading_sure_ones(
    target: CachedTarget, trained_drafter: Trained, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reaches the target are the drafted tokens before the first below the threshold, in every round."""
    drafter = trained_drafter("llama", kind="dspark")
    threshold = middle_threshold(target, drafter, prompts)
    proposals: list[Proposal] = []
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *rest: proposals.append(propose(*rest)) or proposals[-1])
    verify, blocks = target.verify, list[list[int]]()
    monkeypatch.setattr(target, "verify", lambda tokens: blocks.append(list(tokens)) or verify(tokens))
    answer = speculative_decode(target, drafter, prompts[2], LIMIT, (), verify_threshold=threshold)
    left = LIMIT - 1
    for proposal, block, accepted in zip(proposals, blocks, answer.num_accepted_tokens, strict=True):
        assert proposal.confidence is not None
        length = int(cut_below(proposal.confidence, threshold)[0])
        assert block[1:] == proposal.ids[0, : min(length, left)].tolist()
        left -= accepted + 1
    assert {len(block) for block in blocks} >= {1, 2}


def test_statistics_of_cut_rounds_by_hand() -> None:
    """A slot that was not verified was not reached; one that was and failed was."""

    class Scripted:
        num_predicted = 3
        rounds = iter([[6, 9], [], [4, 4, 4], [3]])

        def extend(self, tokens: Sequence[int], features: Callable[[], Tensor]) -> None:
            pass

        def propose(self, anchor: int) -> list[int]:
            return next(self.rounds)

    class Says:
        text = (5, 6, 9, 1, 7, 4, 8, 3, 2)

        def prefill(self, prompt_ids: Sequence[int]) -> int:
            self.length = 0
            return self.text[0]

        def verify(self, tokens: Sequence[int]) -> list[int]:
            return [*self.text, 0, 0][self.length + 1 : self.length + 1 + len(tokens)]

        def keep(self, num_tokens: int) -> None:
            self.length += num_tokens

        def features(self) -> Tensor:
            return torch.empty(0)

    answer = decode(Says(), Scripted(), [1], 20, {2})
    assert answer.tokens == list(Says.text)
    found = answer.acceptance  # 2 of 2, 0 of 0, 1 of 3, 1 of 1
    assert (found.rounds, found.committed, found.verified) == (4, 8, 6)
    assert found.reached == [3, 2, 0] and found.accepted == [3, 1, 0]
    assert (found.verified_per_round, found.verified_frac, found.acceptance_rate) == (1.5, 0.5, pytest.approx(4 / 6))


def test_a_threshold_needs_a_confidence(
    target: CachedTarget,
    batch_target: Callable[[str], BatchTarget],
    trained_drafter: Trained,
    prompts: list[list[int]],
) -> None:
    """Kinds without a confidence head are refused by name, before anything is decoded."""
    drafter = trained_drafter("llama", kind="dflash2")
    with pytest.raises(ModelError, match="of kind dflash2, has none"):
        speculative_decode(target, drafter, prompts[0], 4, (), verify_threshold=0.5)
    with pytest.raises(ModelError, match="of kind dflash2, has none"):
        evaluate(target, drafter, prompts, max_new_tokens=4, stop_ids=(), verify_threshold=0.5)
    with pytest.raises(ModelError, match="of kind dflash2, has none"):
        measure_concurrency(
            batch_target("llama"), drafter, target, prompts, [],
            block_size=5, max_new_tokens=4, stop_ids=(), sizes=[1], verify="auto",
        )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_room_of_a_gpu_drafts_what_the_growing_context_drafts(
    kind: str, target: CachedTarget, trained_drafter: Trained
) -> None:
    """Both sides give the same tokens, cut at the same place, over a whole answer."""
    drafter = trained_drafter("llama", kind=kind)
    ids = torch.randint(0, 264, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        target.prefill(ids)
        features = target.features()
    room = StaticDrafter(drafter, target.embed, drafter.own_head(target.head), 5)
    lengths, sure = set(), [torch.zeros(1)]
    for turn in range(2 if kind == "dspark" else 1):
        value = float(torch.cat(sure).median()) if turn else 0.0
        grown = ContextDrafter(drafter, target, 80, 5, verify_threshold=value)
        room.begin(80, value)
        start = 0
        for length in (20, 1, 5, 3, 1, 2, 4, 6):
            for side in (grown, room):
                side.extend(ids[start : start + length], lambda: features[start : start + length])  # noqa: B023
            start += length
            drafted = grown.propose(ids[start])
            assert room.propose(ids[start]).tolist() == drafted
            lengths.add(len(drafted))
            if grown.proposal.confidence is not None:
                sure.append(grown.proposal.confidence[0])
    assert (len(lengths) > 1) == (kind == "dspark")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_on_a_device(kind: str, trained_drafter: Trained, prompts: list[list[int]], tmp_path: Path) -> None:
    """From graphs every kind drafts what the grown context drafts, cut or whole; drawn drafts hang on the seed."""
    folder = tiny.save(tiny.causal_lm("llama", max_position_embeddings=4096), tmp_path / "target")
    there = CachedTarget.load(folder, learnt.LAYER_IDS, device="cuda")
    drafter = copy.deepcopy(trained_drafter("llama", kind=kind)).cuda()
    for prompt in prompts * 2:  # the second time everything is replayed
        plain = plain_decode(there, prompt, 40, ())
        for threshold in (0.0, 0.6) if kind == "dspark" else (0.0,):
            drafted = speculative_decode(there, drafter, prompt, 40, (), verify_threshold=threshold)
            with torch.inference_mode():
                side = ContextDrafter(drafter, there, 60, 5, verify_threshold=threshold)
                grown = decode(there, side, prompt, 40, ())
            assert drafted.tokens == grown.tokens == plain.tokens
            assert drafted.acceptance == grown.acceptance
        drawn = [speculative_decode(there, drafter, prompt, 40, (), sampling=DRAWN).tokens for _ in range(2)]
        assert drawn[0] == drawn[1] and len(drawn[0]) == 40
    assert there.static_side(drafter, 5)._round.is_replaying


# ------------------------------------------------------------------ rows that share what is verified


def test_costs_are_interpolated_and_never_fall() -> None:
    """Between what was measured a straight line; at its ends the nearest; a lucky moment is passed over."""
    cost = RoundCost.of({4: 0.2, 1: 0.1, 8: 0.15, 12: 0.4})
    assert [1 / cost.rounds_per_s(n) for n in (1, 4, 6, 8, 10, 12)] == pytest.approx([0.1, 0.2, 0.2, 0.2, 0.3, 0.4])
    assert cost.rounds_per_s(0) == cost.rounds_per_s(1) and cost.rounds_per_s(99) == cost.rounds_per_s(12)
    assert [RoundCost.of({3: 0.5}).rounds_per_s(n) for n in (1, 3, 7)] == [2.0] * 3


def test_a_measurement_leaves_nothing_behind(
    batch_target: Callable[[str], BatchTarget],
    trained_drafter: Trained,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few widths of all rows and one of a single row are timed, and the next batch starts from nothing."""
    target = batch_target("llama")
    side = BatchDrafter(trained_drafter("llama", kind="dspark"), target, 5)
    before = decode_batch(target, side, prompts, 8, (), 3)
    sizes = set[int]()
    append = target.append
    monkeypatch.setattr(target, "append", lambda tokens: sizes.add(len(tokens) * len(tokens[0])) or append(tokens))
    cost = measure_rounds(target, side, prompts[:3])
    assert cost.num_tokens == tuple(sorted(sizes)) == (1, 3, 6, 12, 18)
    assert all(seconds > 0 for seconds in cost.seconds)
    assert measure_rounds(target, side, prompts[:1]).num_tokens == (1, 2, 4, 6)
    assert not target._lengths and not side._rows
    assert [a.tokens for a in decode_batch(target, side, prompts, 8, (), 3).answers] == [
        a.tokens for a in before.answers
    ]


@pytest.mark.parametrize("sampling", [None, Sampling(0.3, 5)], ids=["greedy", "drawn"])
def test_rows_that_share_are_lossless(
    sampling: Sampling | None,
    target: CachedTarget,
    batch_target: Callable[[str], BatchTarget],
    trained_drafter: Trained,
    prompts: list[list[int]],
) -> None:
    """With forwards that cost by their tokens rows verify unequal numbers, fewer than all, and answers stay."""
    several, drafter = batch_target("llama"), trained_drafter("llama", kind="dspark")
    shared = {}
    for name, seconds in {
        "cheap": {1: 1.0, 18: 1.0},
        "dear": {1: 1.0, 18: 9.0},
        "hopeless": {1: 1.0, 18: 99.0},
    }.items():
        side = BatchDrafter(drafter, several, 5)
        run = decode_batch(several, side, prompts, LIMIT, (), 3, sampling, 0.0, RoundCost.of(seconds))
        for number, prompt in enumerate(prompts):
            plain = plain_decode(target, prompt, LIMIT, (), sampling and sampling.of_prompt(number))
            assert run.answers[number].tokens == plain.tokens
        shared[name] = sum(answer.acceptance.verified for answer in run.answers) / sum(
            answer.acceptance.rounds for answer in run.answers
        )
    assert shared["cheap"] > shared["dear"] > shared["hopeless"] == 0
    whole = decode_batch(several, BatchDrafter(drafter, several, 5), prompts, LIMIT, (), 3, sampling)
    total = sum(answer.acceptance.verified for answer in whole.answers)
    assert shared["cheap"] == total / sum(answer.acceptance.rounds for answer in whole.answers)  # none past the limit


def test_rows_share_by_measured_costs(
    target: CachedTarget,
    batch_target: Callable[[str], BatchTarget],
    trained_drafter: Trained,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`verify="auto"` measures at every number of rows and hands the costs to the drafted runs."""
    several, drafter = batch_target("llama"), trained_drafter("llama", kind="dspark")
    costs = []

    def measured(_target: object, _side: object, rows: list[list[int]]) -> RoundCost:
        costs.append(len(rows))
        return RoundCost.of({len(rows): 1.0, 6 * len(rows): 3.0})

    monkeypatch.setattr(batch_module, "measure_rounds", measured)
    wanted = [plain_decode(target, prompt, 10, ()) for prompt in prompts]
    found = {}
    for verify in ("all", "auto"):
        found[verify] = measure_concurrency(
            several, drafter, target, prompts, wanted,
            block_size=5, max_new_tokens=10, stop_ids=(), sizes=[1, 3], verify=verify,  # type: ignore[arg-type]
        )  # fmt: skip
    assert costs == [1, 3]
    for all_of_them, some in zip(found["all"], found["auto"], strict=True):
        assert all_of_them.mismatches == all_of_them.ties == some.mismatches == some.ties == 0
        assert 0 < some.verified_per_round < all_of_them.verified_per_round <= 5
        assert some.as_dict()["acceptance_rate"] > 0


# ------------------------------------------------------------------ drafts that are drawn

VOCAB, NUM_TOKENS, NUM_SAMPLES = 6, 3, 1500
TABLE = 1.2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))


class ToyTarget:
    """A language of six tokens, each of which hangs on the one before it."""

    def prefill_logits(self, prompt_ids: Sequence[int]) -> Tensor:
        self._text = list(prompt_ids)
        return TABLE[self._text[-1:]]

    def verify_logits(self, tokens: Sequence[int]) -> Tensor:
        self._base = len(self._text)
        self._text += tokens
        return TABLE[list(tokens)]

    def keep(self, num_tokens: int) -> None:
        del self._text[self._base + num_tokens :]

    def features(self) -> Tensor:
        return torch.empty(0)


class ToyDrafter:
    """A drafter of some kind over the six tokens, with states of its own for every anchor."""

    num_predicted = 2
    proposal: Proposal

    def __init__(self, drafter: DFlashDrafter, sampling: Sampling, threshold: float) -> None:
        generator = torch.Generator().manual_seed(5)
        self._hidden = torch.randn(VOCAB, 2, 32, generator=generator)
        self._head = Head(0.3 * torch.randn(VOCAB, 32, generator=generator))
        self._drafter, self._sampling, self._threshold = drafter, sampling, threshold
        self._length = 0

    def extend(self, tokens: Sequence[int], features: Callable[[], Tensor]) -> None:
        self._length += len(tokens)

    def propose(self, anchor: int) -> list[int]:
        chance = self._sampling.chance(self._length, 2, torch.device("cpu"))
        anchors = torch.tensor([anchor])
        self.proposal = self._drafter.propose(self._hidden[anchors], self._head, anchors, chance)
        length = 2
        if self.proposal.confidence is not None:
            length = int(cut_below(self.proposal.confidence, self._threshold))
        return self.proposal.ids[0, :length].tolist()


@pytest.mark.parametrize(("kind", "threshold"), [("dflash2", 0.0), ("dspark", 0.5)])
@torch.inference_mode()
def test_the_loop_with_drawn_drafts_has_the_targets_distribution(kind: str, threshold: float) -> None:
    """Whole answers, over rounds and seeds, come as often as the target says: draws of drafts and decisions differ."""
    shape = tiny.shape_of_kind(kind, {"selector_top_k": 4} if kind == "dflash2" else None, vocab_size=VOCAB)
    drafter = tiny.drafter(shape)
    counts, verified = Counter[tuple[int, ...]](), Counter[int]()
    for number in range(NUM_SAMPLES):
        draws = DRAWN.of_prompt(number)
        side = ToyDrafter(drafter, draws, threshold)
        answer = decode(JudgingTarget(ToyTarget(), draws, side), side, [2], NUM_TOKENS, ())
        counts[tuple(answer.tokens)] += 1
        verified[answer.acceptance.verified] += 1
    p = torch.softmax(TABLE.double() / DRAWN.temperature, -1)
    misfit, cells = 0.0, 0
    rest = NUM_SAMPLES, float(NUM_SAMPLES)
    for text in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        wanted = NUM_SAMPLES * math.prod(float(p[a, b]) for a, b in itertools.pairwise((2, *text)))
        if wanted >= 5:
            misfit, cells = misfit + (counts[text] - wanted) ** 2 / wanted, cells + 1
            rest = rest[0] - counts[text], rest[1] - wanted
    misfit += (rest[0] - rest[1]) ** 2 / rest[1]
    limit = cells * (1 - 2 / (9 * cells) + NormalDist().inv_cdf(0.999) * math.sqrt(2 / (9 * cells))) ** 3
    assert misfit < limit
    assert len(verified) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_drafts_are_reproducible_alone_and_in_a_batch(
    kind: str,
    target: CachedTarget,
    batch_target: Callable[[str], BatchTarget],
    trained_drafter: Trained,
    prompts: list[list[int]],
) -> None:
    """One seed gives one answer, whatever else is decoded; another seed gives another."""
    drafter, several = trained_drafter("llama", kind=kind), batch_target("llama")
    threshold = middle_threshold(target, drafter, prompts) if kind == "dspark" else 0.0
    run = decode_batch(several, BatchDrafter(drafter, several, 5), prompts, LIMIT, (), 3, DRAWN, threshold)
    accepted = 0
    for number, prompt in enumerate(prompts):
        draws = DRAWN.of_prompt(number)
        twice = [speculative_decode(target, drafter, prompt, LIMIT, (), None, None, draws, threshold) for _ in range(2)]
        assert twice[0].tokens == twice[1].tokens == run.answers[number].tokens
        assert twice[0].acceptance == run.answers[number].acceptance
        assert len(twice[0].tokens) == LIMIT
        accepted += sum(twice[0].num_accepted_tokens)
    assert accepted > 0
    other = replace(DRAWN, seed=4).of_prompt(0)
    again = speculative_decode(target, drafter, prompts[0], LIMIT, (), None, None, other)
    assert again.tokens != run.answers[0].tokens


def test_a_part_of_the_vocabulary_is_drawn_by_the_targets_ids(
    target: CachedTarget, new_drafter: Trained, prompts: list[list[int]]
) -> None:
    """Drafted tokens and what they were drawn from are named as the target names them."""
    drafter = new_drafter(draft_vocab_size=90)
    drafter.set_draft_vocab(torch.arange(0, 270, 3))
    side = ContextDrafter(drafter.requires_grad_(False), target, 60, 5, sampling=DRAWN)
    target.prefill(prompts[1])
    side.extend(prompts[1], target.features)
    drafted = side.propose(7)
    assert side.proposal.probs is not None and side.proposal.prob_ids is not None
    assert side.proposal.prob_ids[0, 0].tolist() == list(range(0, 270, 3)) and all(d % 3 == 0 for d in drafted)
    answer = speculative_decode(target, drafter, prompts[1], LIMIT, (), None, None, DRAWN)
    assert len(answer.tokens) == LIMIT


def test_stops_and_limits_inside_drawn_blocks(
    target: CachedTarget, trained_drafter: Trained, prompts: list[list[int]]
) -> None:
    """A stop token ends an answer where it stands, and no limit is passed; the tokens before are the same."""
    drafter = trained_drafter("llama", kind="dflash2")
    whole = speculative_decode(target, drafter, prompts[1], LIMIT, (), None, None, DRAWN).tokens
    for limit in (1, 2, 3, 7):
        short = speculative_decode(target, drafter, prompts[1], limit, (), None, None, DRAWN)
        assert len(short.tokens) == limit and short.acceptance.committed == limit - 1
    stop = whole[9]
    ended = speculative_decode(target, drafter, prompts[1], LIMIT, {stop}, None, None, DRAWN)
    assert ended.tokens == whole[: whole.index(stop) + 1] and ended.stopped


def test_drawn_answers_are_not_compared_and_the_record_says_so(
    target: CachedTarget,
    batch_target: Callable[[str], BatchTarget],
    trained_drafter: Trained,
    prompts: list[list[int]],
) -> None:
    """Other draws are no mismatches; n-gram drafts, which the target's noise decides on, are compared as ever."""
    drafter = trained_drafter("llama", kind="dspark")
    found = evaluate(target, drafter, prompts, max_new_tokens=12, stop_ids=(), sampling=DRAWN, verify_threshold=0.1)
    assert any(result.plain.tokens != result.speculative.tokens for result in found.results)
    record = found.as_dict()
    assert (record["lossless"], record["mismatches"], record["draft_sampling"]) == (None, 0, "sampled")
    assert record["lossless_rule"] == IN_DISTRIBUTION and record["verify_threshold"] == 0.1
    assert 0 < record["verified_frac"] <= 1 and 0 < record["acceptance_rate"] <= 1
    assert record["verified_per_round"] == pytest.approx(5 * record["verified_frac"])
    (row,) = measure_concurrency(
        batch_target("llama"), drafter, target, prompts, [result.plain for result in found.results],
        block_size=5, max_new_tokens=12, stop_ids=(), sizes=[3], sampling=DRAWN, verify_threshold=0.1,
    )  # fmt: skip
    assert row.mismatches == row.ties == 0
    plain, copied = (replace(found.results[0].plain) for _ in range(2))
    copied.tokens = [token + 1 for token in plain.tokens]
    (difference,) = compare(target, prompts[0], plain, copied, copied, DRAWN.of_prompt(0)).differences
    assert difference.answer == "ngram"
    greedy = evaluate(target, drafter, prompts[:1], max_new_tokens=4, stop_ids=()).as_dict()
    assert (greedy["lossless"], greedy["lossless_rule"], greedy["draft_sampling"]) == (True, TOKEN_BY_TOKEN, "greedy")
    assert greedy["verified_per_round"] <= 5


def test_a_token_of_the_target_stands_behind_what_it_accepts() -> None:
    """What the target says may end with its own first token, which may by chance be the drafted one."""
    assert leading_hits([4, 5, 6], [4, 5, 6, 7]) == 3
    assert leading_hits([4, 5, 6], [4, 9]) == 1
    assert leading_hits([4, 5, 6], [4, 5]) == 1
    assert leading_hits([], [4]) == 0


def test_the_first_token_is_that_of_plain_decoding(target: CachedTarget, prompts: list[list[int]]) -> None:
    """The prompt's token is drawn with the same noise in every way of decoding."""
    judging = JudgingTarget(target, DRAWN, object())  # type: ignore[arg-type]
    assert judging.prefill(prompts[0]) == SampledTarget(target, DRAWN).prefill(prompts[0])
