"""Draws at a temperature: drafts change their number of target forwards, and neither tokens nor distribution."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from paceline.eval.decode import CachedTarget, TargetSide, decode, ngram_decode, plain_decode, speculative_decode
from paceline.eval.evaluate import compare, evaluate
from paceline.eval.sampling import Draws, SampledTarget, Sampling
from paceline.models.draft import DFlashDrafter
from tests.unit.eval import learnt

VOCAB, STOP, LIMIT, NUM_DRAFTED = 3, 2, 4, 3
TEMPERATURE = 0.8
NUM_SAMPLES = 3000

TABLE = 1.3 * torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
"""Logits of the toy target by the last two tokens."""


class ToyTarget:
    """A language of three tokens, each of which hangs on the two before it."""

    def prefill_logits(self, prompt_ids: Sequence[int]) -> Tensor:
        self._text = list(prompt_ids)
        return self._logits(len(self._text))[None]

    def verify_logits(self, tokens: Sequence[int]) -> Tensor:
        self._base = len(self._text)
        self._text += tokens
        return torch.stack([self._logits(self._base + i + 1) for i in range(len(tokens))])

    def keep(self, num_tokens: int) -> None:
        del self._text[self._base + num_tokens :]

    def features(self) -> Tensor:
        return torch.empty(0)

    def _logits(self, end: int) -> Tensor:
        return TABLE[self._text[end - 2], self._text[end - 1]]


PROMPT = [0, 1]


def next_probabilities(text: Sequence[int]) -> Tensor:
    return torch.softmax(TABLE[text[-2], text[-1]].double() / TEMPERATURE, -1)


def exact_distribution() -> dict[tuple[int, ...], float]:
    """Probability of every answer, by multiplying it out."""
    found: dict[tuple[int, ...], float] = {}
    for answer in itertools.product(range(VOCAB), repeat=LIMIT):
        end = answer.index(STOP) + 1 if STOP in answer else LIMIT
        text, probability = list(PROMPT), 1.0
        for token in answer[:end]:
            probability *= float(next_probabilities(text)[token])
            text.append(token)
        found[answer[:end]] = probability
    assert sum(found.values()) == pytest.approx(1.0)
    return found


class TextDrafter:
    """Drafts a block by following a rule over next-token probabilities."""

    num_predicted = NUM_DRAFTED

    def __init__(self, rule: Callable[[Tensor], int]) -> None:
        self._rule = rule
        self._text: list[int] = []

    def extend(self, tokens: Sequence[int], features: Callable[[], Tensor]) -> None:
        self._text += tokens

    def propose(self, anchor: int) -> list[int]:
        text = [*self._text, anchor]
        for _ in range(NUM_DRAFTED):
            text.append(self._rule(next_probabilities(text)))
        return text[-NUM_DRAFTED:]


DRAFTERS: dict[str, Callable[[Tensor], int]] = {
    "good": lambda p: int(p.argmax()),
    "terrible": lambda p: int(p.argmin()),
    "stubborn": lambda p: 1,
}


def chi_square(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """The statistic, and the value that it passes once in a thousand times (Wilson and Hilferty's approximation).

    Answers that are expected fewer than five times are taken together.
    """
    assert set(counts) <= set(exact)
    total = sum(counts.values())
    cells = [(counts[answer], total * p) for answer, p in exact.items() if total * p >= 5]
    rest = total - sum(seen for seen, _ in cells), total - sum(wanted for _, wanted in cells)
    cells += [rest] if rest[1] >= 1 else []
    freedom = len(cells) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + NormalDist().inv_cdf(0.999) * math.sqrt(2 / (9 * freedom))) ** 3
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells), limit


def sample(side: Callable[[int], TargetSide], rule: Callable[[Tensor], int]) -> Counter[tuple[int, ...]]:
    """Answers of many decodings with a drafter, counted."""
    answers = (decode(side(i), TextDrafter(rule), PROMPT, LIMIT, {STOP}).tokens for i in range(NUM_SAMPLES))
    return Counter(map(tuple, answers))


def drawn(number: int) -> SampledTarget:
    return SampledTarget(ToyTarget(), Sampling(TEMPERATURE, seed=7).of_prompt(number))


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafted_answers_have_the_targets_distribution(name: str) -> None:
    """Whatever is drafted, answers come as often as their exact probabilities say, by a chi-square test."""
    seen, limit = chi_square(sample(drawn, DRAFTERS[name]), exact_distribution())
    assert seen < limit


class ByTheBook:
    """Speculative sampling as written in the literature, for a proposal that is certain; `residual` as asked.

    A second way to the same distribution, and with a wrong residual or a wrong rule the fault that the test must see.
    """

    def __init__(self, fault: str) -> None:
        self._target, self._fault = ToyTarget(), fault

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        return self._draw(self._probabilities(self._target.prefill_logits(prompt_ids))[0])

    def verify(self, tokens: Sequence[int]) -> list[int]:
        rows = self._probabilities(self._target.verify_logits(tokens))
        following = []
        for p, drafted in zip(rows, [*tokens[1:], None], strict=True):
            if drafted is not None and self._accepts(p, drafted):
                following.append(drafted)
                continue
            residual = p.clone()
            if drafted is not None and self._fault != "no residual":
                residual[drafted] = 0
            following.append(self._draw(residual))
        return following

    def keep(self, num_tokens: int) -> None:
        self._target.keep(num_tokens)

    def features(self) -> Tensor:
        return torch.empty(0)

    def _accepts(self, p: Tensor, drafted: int) -> bool:
        if self._fault == "greedy acceptance":
            return drafted == int(p.argmax())
        return RANDOM() < float(p[drafted])

    @staticmethod
    def _probabilities(logits: Tensor) -> Tensor:
        return torch.softmax(logits.double() / TEMPERATURE, -1)

    @staticmethod
    def _draw(weights: Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=GENERATOR))


GENERATOR = torch.Generator()


def RANDOM() -> float:
    return float(torch.rand((), dtype=torch.double, generator=GENERATOR))


@pytest.mark.parametrize(("fault", "is_right"), [("none", True), ("no residual", False), ("greedy acceptance", False)])
def test_a_wrong_correction_is_seen(fault: str, is_right: bool) -> None:
    """The literature's rule passes the same test, and one that draws anew from p, or keeps likely drafts, does not."""
    GENERATOR.manual_seed(3)
    seen, limit = chi_square(sample(lambda number: ByTheBook(fault), DRAFTERS["good"]), exact_distribution())
    assert (seen < limit) == is_right
    assert is_right or seen > 5 * limit


def test_noise_that_is_used_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws that are not independent from position to position fail the test as well."""
    scores = Draws.scores
    monkeypatch.setattr(Draws, "scores", lambda draws, logits, position: scores(draws, logits, 0))
    monkeypatch.setattr(Draws, "forget", lambda draws, position: None)
    seen, limit = chi_square(sample(drawn, DRAFTERS["good"]), exact_distribution())
    assert seen > 5 * limit


def test_a_draft_is_kept_with_its_probability() -> None:
    """The first draft is accepted with p(d), and what stands in its place otherwise has the residual distribution."""
    places, expected = Counter[int](), [0.0] * VOCAB
    for number in range(NUM_SAMPLES):
        answer = decode(drawn(number), TextDrafter(DRAFTERS["good"]), PROMPT, LIMIT, {STOP})
        if answer.tokens[0] == STOP:
            continue
        p = next_probabilities([*PROMPT, answer.tokens[0]])
        draft = int(p.argmax())
        assert (answer.num_accepted_tokens[0] > 0) == (answer.tokens[1] == draft)
        places[(answer.tokens[1] - draft) % VOCAB] += 1
        expected = [seen + float(p[(draft + i) % VOCAB]) for i, seen in enumerate(expected)]
    for i, wanted in enumerate(expected):
        assert abs(places[i] - wanted) < 4 * math.sqrt(wanted)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9])
def test_edges_of_drawn_answers(seed: int, limit: int) -> None:
    """Stop tokens and the limit inside a block end a drawn answer where they end it without drafts (case E01)."""
    sampling = Sampling(TEMPERATURE, seed)
    plain = decode(SampledTarget(ToyTarget(), sampling), None, PROMPT, limit, {STOP})
    assert STOP not in plain.tokens[:-1] and len(plain.tokens) <= limit
    unended = decode(SampledTarget(ToyTarget(), sampling), None, PROMPT, limit + NUM_DRAFTED, ())
    for rule in DRAFTERS.values():
        drafted = decode(SampledTarget(ToyTarget(), sampling), TextDrafter(rule), PROMPT, limit, {STOP})
        assert (drafted.tokens, drafted.stopped) == (plain.tokens, plain.stopped)
        assert drafted.acceptance.committed == len(plain.tokens) - 1

    class Knowing(TextDrafter):
        """Drafts the answer itself, past its stop token and past the limit."""

        def propose(self, anchor: int) -> list[int]:
            start = len(self._text) - len(PROMPT) + 1
            return unended.tokens[start : start + NUM_DRAFTED]

    knowing = decode(SampledTarget(ToyTarget(), sampling), Knowing(DRAFTERS["good"]), PROMPT, limit, {STOP})
    assert knowing.tokens == plain.tokens
    full, rest = divmod(len(plain.tokens) - 1, NUM_DRAFTED + 1)
    assert knowing.num_accepted_tokens == [NUM_DRAFTED] * full + [rest] * (rest > 0)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_drafted_draws_are_the_plain_ones(
    family: str,
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    prompts: list[list[int]],
) -> None:
    """With the same seed all three ways draw the same tokens, in fewer forwards; stop tokens end them alike."""
    target, drafter, saved = cached_target(family), trained_drafter(family), 0
    for number, prompt in enumerate(prompts[1:3]):
        draws = Sampling(0.3, 5).of_prompt(number)
        plain = plain_decode(target, prompt, 24, (), draws)
        stop_ids = {plain.tokens[17]} if number else ()
        wanted = plain.tokens[: plain.tokens.index(plain.tokens[17]) + 1] if number else plain.tokens
        drafted = speculative_decode(target, drafter, prompt, 24, stop_ids, None, None, draws)
        copied = ngram_decode(target, 4, prompt, 24, stop_ids, draws)
        assert drafted.tokens == copied.tokens == wanted
        saved += sum(drafted.num_accepted_tokens)
    assert saved > 0


@pytest.mark.parametrize("sampling", [None, Sampling(0.5, 1)])
def test_tokens_that_are_the_mask_are_tokens(
    sampling: Sampling | None,
    cached_target: Callable[[str], CachedTarget],
    new_drafter: Callable[..., DFlashDrafter],
    target_folder: Callable[[str], str],
    prompts: list[list[int]],
) -> None:
    """A target that says the mask token gets it into its answer, greedily and drawn (case E01)."""
    target, prompt = cached_target("llama"), prompts[1]
    plain = plain_decode(target, prompt, 24, (), sampling)
    mask = plain.tokens[10]
    drafter = learnt.train(new_drafter(mask_token_id=mask), target_folder("llama"), num_steps=8)
    drafted = speculative_decode(target, drafter, prompt, 24, (), None, None, sampling)
    assert drafted.tokens == plain.tokens and mask in drafted.tokens


def test_little_heat_is_greedy(cached_target: Callable[[str], CachedTarget], prompts: list[list[int]]) -> None:
    """At a temperature near 0 the likeliest token is drawn; at a high one others are, and other seeds draw others."""
    target = cached_target("llama")
    greedy = plain_decode(target, prompts[2], 30, ())
    assert plain_decode(target, prompts[2], 30, (), Sampling(1e-6)).tokens == greedy.tokens
    hot = [plain_decode(target, prompts[2], 30, (), Sampling(1.5, seed)).tokens for seed in (0, 0, 1)]
    assert hot[0] == hot[1] != hot[2]
    assert hot[0] != greedy.tokens


def test_draws_of_prompts_differ() -> None:
    """Each prompt has draws of its own, that hang on the seed."""
    seeds = {Sampling(1.0, seed).of_prompt(number).seed for seed in (0, 1) for number in range(5)}
    assert len(seeds) == 10


def test_noise_hangs_on_the_position_alone() -> None:
    """A position's noise is the same in whatever pieces it is asked for, and what is forgotten moves none."""
    logits = torch.zeros(6, 5)
    whole = Draws(Sampling(1.0, 3)).scores(logits, 0)
    pieces = Draws(Sampling(1.0, 3))
    assert torch.equal(pieces.scores(logits[:4], 0), whole[:4])
    pieces.forget(2)
    assert torch.equal(pieces.scores(logits[:3], 2), whole[2:5])
    assert torch.equal(Sampling(1.0, 3).scores_at(logits[0], 4), whole[4])
    assert whole.unique().numel() == whole.numel()


def test_differences_of_draws_are_told_with_their_gap(
    cached_target: Callable[[str], CachedTarget], prompts: list[list[int]]
) -> None:
    """Where drawn answers differ the gap is that of the scores which chose the token."""
    target, sampling = cached_target("llama"), Sampling(0.7, 2)
    plain = plain_decode(target, prompts[0], 6, (), sampling)
    other = plain_decode(target, prompts[0], 6, (), sampling)
    other.tokens[3] += 1
    (difference,) = compare(target, prompts[0], plain, other, sampling=sampling).differences
    scores = sampling.scores_at(target.next_logits([*prompts[0], *plain.tokens[:3]]), 3)
    best = scores.topk(2)
    assert int(best.indices[0]) == plain.tokens[3]
    assert difference.top2_gap == pytest.approx(float(best.values[0] - best.values[1]))


def test_an_evaluation_at_a_temperature_is_lossless(
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    prompts: list[list[int]],
) -> None:
    """Drawn answers are compared token by token, and the record says how they were drawn."""
    target, drafter = cached_target("llama"), trained_drafter()
    evaluations = [
        evaluate(target, drafter, prompts, max_new_tokens=20, stop_ids=(), sampling=Sampling(0.3, seed))
        for seed in (0, 1)
    ]
    assert all(evaluation.is_lossless for evaluation in evaluations)
    assert [r.plain.tokens for r in evaluations[0].results] != [r.plain.tokens for r in evaluations[1].results]
    record = evaluations[1].as_dict()
    assert (record["temperature"], record["seed"]) == (0.3, 1)
    twice = evaluate(target, drafter, [prompts[0]] * 2, max_new_tokens=20, stop_ids=(), sampling=Sampling(0.9))
    assert twice.results[0].plain.tokens != twice.results[1].plain.tokens
    greedy = evaluate(target, drafter, prompts[:1], max_new_tokens=4, stop_ids=()).as_dict()
    assert greedy["temperature"] == 0.0 and "seed" not in greedy
