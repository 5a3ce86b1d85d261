"""What a drafter is worth in a vLLM server that already serves it, measured from outside.

    evaluate_served     every prompt at the server, in turns with the same target served without drafts
    Evaluated           what came out; `as_dict` has the keys of `eval.evaluate`, where the thing was measured

The server's own counters say what was accepted. What they cannot say is not in the record; without a second server that
does not draft, nobody knows what drafting gains, or whether it changes answers.
"""

from __future__ import annotations

import asyncio
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline import __version__
from paceline.errors import ConfigError, ServerError
from paceline.eval.decode import Decoded
from paceline.eval.engine_server import Counters, Counts, Served, VllmClient
from paceline.eval.evaluate import ends_in_loop, first_difference
from paceline.eval.measures import INTERVAL_RULE, acceptance_estimate, first_token_s

SERVED_RULE = (
    "1 + accepted drafted tokens / verifications, pooled over all prompts, as the server counts: a verification that a "
    "stop token or the limit cuts counts in full"
)

COMMITTED_RULE = (
    "generated tokens less the first of each answer / verifications: what a stop token or the limit cuts off is not "
    "counted, as in `--engine builtin`"
)

TIE_GAP = 0.3
"""Gap of the two best logits below which two servers may choose differently by rounding: that of bfloat16 in
`evaluate.TIE_GAP`, as a server does not tell its precision."""

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class ServedDifference:
    """Where an answer leaves the one of the server without drafts.

    Attributes:
        prompt: Number of the prompt.
        position: Token of the answer.
        top2_gap: How far that server's best logit lies above its second best there; None if it does not tell.
    """

    prompt: int
    position: int
    top2_gap: float | None

    @property
    def is_tie(self) -> bool:
        """Whether the gap is within rounding; a gap that is not told excuses nothing."""
        return self.top2_gap is not None and self.top2_gap < TIE_GAP

    def as_dict(self) -> dict[str, Any]:
        """An entry of `first_mismatches`."""
        return {
            "prompt": self.prompt,
            "answer": "speculative",
            "position": self.position,
            "top2_gap": self.top2_gap,
            "tie": None if self.top2_gap is None else self.is_tie,
        }


@dataclass
class Pass:
    """Answers of one server, and what it counted meanwhile.

    Attributes:
        decoded: In the order of the requests.
        wall_s: From the first request to the last answer, where several ran at a time.
        counts: Of these answers' verifications, or of everybody's where the server tells no more.
        is_ours_alone: Whether `counts` are of these answers for certain.
        others: Tokens that the server made for other clients meanwhile.
    """

    decoded: list[Decoded] = field(default_factory=list)
    wall_s: float = 0.0
    counts: Counts | None = None
    is_ours_alone: bool = False
    others: int = 0

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(len(answer.tokens) for answer in self.decoded)

    @property
    def tok_per_s(self) -> float:
        """Tokens a second of answers that came one after the other."""
        return _ratio(self.num_tokens, sum(answer.seconds for answer in self.decoded))

    @property
    def decode_tok_per_s(self) -> float:
        """The same without the time to the first token, and without that token."""
        return _ratio(self.num_tokens - len(self.decoded), sum(answer.decode_s for answer in self.decoded))


@dataclass(frozen=True)
class Load:
    """All prompts with so many requests at a time.

    Attributes:
        batch_size: Requests at a time.
        drafted: By the server.
        plain: By the one without drafts; None where there is none.
        differences: Drafted answers that differ from that server's answers one at a time; None: not compared.
    """

    batch_size: int
    drafted: Pass
    plain: Pass | None
    differences: tuple[ServedDifference, ...] | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values; rates are tokens of all requests over wall seconds."""
        drafted, plain = self.drafted, self.plain
        rate = _ratio(drafted.num_tokens, drafted.wall_s)
        row = {
            "batch_size": self.batch_size,
            "requests": len(drafted.decoded),
            "tok_per_s": rate,
            "request_tok_per_s": _request_tok_per_s(drafted.decoded),
            "first_token_s": first_token_s(drafted.decoded),
            "acceptance_length": drafted.counts.acceptance.length if drafted.counts else None,
            "other_clients_tokens": drafted.others,
            "baseline_tok_per_s": None,
            "speedup": None,
            **_verdict(self.differences),
        }
        if plain is not None:
            baseline = _ratio(plain.num_tokens, plain.wall_s)
            row |= {
                "baseline_tok_per_s": baseline,
                "baseline_request_tok_per_s": _request_tok_per_s(plain.decoded),
                "baseline_first_token_s": first_token_s(plain.decoded),
                "speedup": _ratio(rate, baseline),
            }
        return row


@dataclass
class Evaluated:
    """All prompts, one at a time.

    Attributes:
        drafted: By the server.
        plain: By the one without drafts; None where there is none.
        differences: None: answers were not compared.
        num_predicted: Tokens drafted at most in a verification.
        loads: With several requests at a time.
    """

    max_new_tokens: int
    temperature: float
    seed: int
    num_predicted: int
    drafted: Pass
    plain: Pass | None
    differences: list[ServedDifference] | None
    loads: list[Load] = field(default_factory=list)

    @property
    def not_measured(self) -> dict[str, str]:
        """What is null in the record, and why."""
        missing = {}
        if self.plain is None:
            reason = "needs the same target served without drafts: --baseline-url"
            missing = {"speedup": reason, "lossless": reason}
        elif self.differences is None:
            missing = {"lossless": "drawn answers of two servers differ by chance: compared at temperature 0 only"}
        return missing

    @property
    def warnings(self) -> list[str]:
        """What a reader of the figures must know: others used a server meanwhile."""
        passes = [self.drafted, self.plain, *(one for load in self.loads for one in (load.drafted, load.plain))]
        others = sum(one.others for one in passes if one is not None)
        if not others:
            return []
        counted = "acceptance is of our requests alone"
        if not self.drafted.is_ours_alone:
            counted = "acceptance counts theirs as well (--per-request-spec-decode-metrics summary tells them apart)"
        return [f"other clients had {others} tokens made meanwhile: speeds are of a shared server, and {counted}"]

    def as_dict(self) -> dict[str, Any]:
        """The result record: keys of `Evaluation.as_dict`, of which those are left out that a server does not tell.

        `not_measured` says of each null why it is one. `acceptance_source` is ``requests`` where the server tells
        counts of each request, else ``counters``, which other clients move as well.
        """
        drafted, plain, counts = self.drafted, self.plain, self.drafted.counts or Counts()
        acceptance, estimate = counts.acceptance, acceptance_estimate(drafted.decoded)
        ended = sum(answer.stopped for answer in drafted.decoded)
        record = {
            "num_speculative_tokens": self.num_predicted,
            "prompts": len(drafted.decoded),
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            **({"seed": self.seed} if self.temperature else {}),
            "acceptance_length": acceptance.length,
            "acceptance_length_error": estimate.error if estimate else None,
            "acceptance_length_interval": [estimate.low, estimate.high] if estimate else None,
            "interval_rule": INTERVAL_RULE,
            "acceptance_rule": SERVED_RULE,
            "acceptance_source": "requests" if drafted.is_ours_alone else "counters",
            "acceptance_per_position": acceptance.per_position,
            "accepted_counts": counts.by_accepted,
            "rounds": counts.drafts,
            "num_draft_tokens": counts.draft_tokens,
            "num_accepted_tokens": counts.accepted,
            "committed_per_round": None,
            "committed_rule": COMMITTED_RULE,
            "generated_tokens": drafted.num_tokens,
            "other_clients_tokens": drafted.others,
            "ended_by_stop": ended,
            "loops": sum(not answer.stopped and ends_in_loop(answer.tokens) for answer in drafted.decoded),
            "speculative_tok_per_s": drafted.tok_per_s,
            "speculative_decode_tok_per_s": drafted.decode_tok_per_s,
            "request_tok_per_s": _request_tok_per_s(drafted.decoded),
            "first_token_s": first_token_s(drafted.decoded),
            "speedup": None,
            "lossless": None if self.differences is None else not self.differences,
            **_verdict(self.differences),
            "first_mismatches": [difference.as_dict() for difference in self.differences or []],
            "not_measured": self.not_measured,
            "warnings": self.warnings,
        }
        if drafted.is_ours_alone or not drafted.others:
            record["committed_per_round"] = _ratio(drafted.num_tokens - len(drafted.decoded), counts.drafts)
        if plain is not None:
            record |= {
                "baseline_tok_per_s": plain.tok_per_s,
                "baseline_decode_tok_per_s": plain.decode_tok_per_s,
                "baseline_request_tok_per_s": _request_tok_per_s(plain.decoded),
                "baseline_first_token_s": first_token_s(plain.decoded),
                "baseline_other_clients_tokens": plain.others,
                "speedup": _ratio(drafted.tok_per_s, plain.tok_per_s),
            }
        if self.loads:
            record["concurrency"] = [load.as_dict() for load in self.loads]
        return record | {"versions": {"paceline": __version__, "python": platform.python_version()}}


async def evaluate_served(
    server: VllmClient,
    baseline: VllmClient | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    sizes: Sequence[int] = (),
    on_prompt: Callable[[Decoded, Decoded | None, int], None] = lambda drafted, plain, number: None,
    on_size: Callable[[Load], None] = lambda load: None,
) -> Evaluated:
    """Have every prompt answered, one at a time, then so many at a time.

    The two servers take turns prompt by prompt, and so does which of them goes first. A first answer of each is not
    counted.

    Args:
        server, baseline: Connected; `baseline` serves the same target without drafts.
        prompts: Token ids of each.
        sizes: Requests at a time; where there are more than prompts, prompts come again.
        on_prompt: Called after each prompt, with both answers and its number.
    Raises: ConfigError if a server is the wrong one of the two, or a prompt is too long; ServerError.
    """
    if max_new_tokens < 2:
        raise ConfigError("--max-new-tokens 1: an answer of one token has no verification to measure")
    first = await server.counters()
    if first.counts is None:
        raise ConfigError(
            f"{server} drafts nothing: its /metrics has no counters of speculation; serve with --speculative-config, "
            "as `paceline export` prints it"
        )
    sides = {"drafted": server} if baseline is None else {"drafted": server, "plain": baseline}
    for side in sides.values():
        _check_lengths(side, prompts, max_new_tokens)
    if baseline is not None and (await baseline.counters()).counts is not None:
        raise ConfigError(f"--baseline-url {baseline} drafts as well: the same target without --speculative-config")
    await _warm_up(server, baseline, prompts[0], max_new_tokens, first)
    passes = {name: Pass() for name in sides}
    starts = {name: await side.counters() for name, side in sides.items()}
    totals = dict(starts)
    own: list[Counts | None] = []
    order = list(sides)
    for number, prompt in enumerate(prompts):
        for name in order:
            side = sides[name]
            answer = await side.answer(f"prompt {number + 1}", prompt, max_new_tokens, temperature, seed + number)
            now = await side.settled(totals[name], len(answer.decoded.tokens))
            if name == "drafted":
                own.append(answer.counts)
                _count(answer, totals[name], now)
            passes[name].decoded.append(answer.decoded)
            totals[name] = now
        order.reverse()
        plain = passes["plain"].decoded[-1] if baseline is not None else None
        on_prompt(passes["drafted"].decoded[-1], plain, number)
    for name, done in passes.items():
        _close(done, starts[name], totals[name], own if name == "drafted" else [])
    counts = passes["drafted"].counts
    if counts is None or not counts.drafts:
        raise ServerError(f"{server} counted no draft while it answered: {_why_none(passes['drafted'])}")
    differences = None
    if baseline is not None and not temperature:  # now, as asking for gaps moves the counters
        answers = zip(prompts, passes["plain"].decoded, passes["drafted"].decoded, strict=True)
        compared = [await _compare(baseline, number, *those) for number, those in enumerate(answers)]
        differences = [difference for of_prompt in compared for difference in of_prompt]
    found = Evaluated(
        max_new_tokens,
        temperature,
        seed,
        len(counts.per_position),
        passes["drafted"],
        passes.get("plain"),
        differences,
    )
    await _load_up(found, server, baseline, prompts, sizes, on_size)
    return found


def _check_lengths(server: VllmClient, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Rather than after the others have run. Raises: ConfigError."""
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]), default=None)
    if longest is None:
        raise ConfigError("there is no prompt to measure with")
    needed = len(prompts[longest]) + max_new_tokens
    if server.max_length is not None and needed > server.max_length:
        raise ConfigError(
            f"prompt {longest + 1} has {len(prompts[longest])} tokens, with {max_new_tokens} more {needed}, and "
            f"{server} has room for {server.max_length}: leave out long prompts, lower --max-new-tokens, or serve with "
            "a larger --max-model-len"
        )


async def _warm_up(
    server: VllmClient, baseline: VllmClient | None, prompt: Sequence[int], max_new_tokens: int, first: Counters
) -> None:
    """First answers, which are not counted. Raises: ServerError if nothing was drafted in one."""
    limit = min(WARM_UP_TOKENS, max_new_tokens)
    if baseline is not None:
        await baseline.answer("prompt 1", prompt, limit)
    answer = await server.answer("prompt 1", prompt, limit)
    now = await server.settled(first, len(answer.decoded.tokens))
    if len(answer.decoded.tokens) > 1 and now.counts is not None and first.counts is not None:
        if not (now.counts - first.counts).drafts:
            raise ServerError(f"{server} counted no draft in a first answer of {len(answer.decoded.tokens)} tokens")


def _count(answer: Served, before: Counters, now: Counters) -> None:
    """Give a drafted answer its verifications: its own where the server tells them, else what was counted meanwhile."""
    counts = answer.counts
    if counts is None and now.counts is not None and before.counts is not None:
        counts = now.counts - before.counts
    answer.decoded.acceptance = (counts or Counts()).acceptance


def _close(done: Pass, start: Counters, end: Counters, own: Sequence[Counts | None]) -> None:
    """Sum up a pass: what was counted, and by whom."""
    done.others = end.generated - start.generated - done.num_tokens
    told = [counts for counts in own if counts is not None]
    if own and len(told) == len(own):
        done.counts, done.is_ours_alone = _sum(told), True
    elif own and end.counts is not None and start.counts is not None:
        done.counts = end.counts - start.counts
    if done.counts is not None and not done.others and not done.counts.is_sound:
        raise ServerError(f"the server's counts contradict each other: {done.counts}")


def _sum(counts: Sequence[Counts]) -> Counts:
    positions = zip(*(one.per_position for one in counts), strict=True)
    return Counts(
        sum(one.drafts for one in counts),
        sum(one.draft_tokens for one in counts),
        sum(one.accepted for one in counts),
        tuple(map(sum, positions)),
    )


def _why_none(done: Pass) -> str:
    if all(len(answer.tokens) < 2 for answer in done.decoded):
        return "answers of one token have no verification"
    return "was it started with --speculative-config?"


async def _compare(
    baseline: VllmClient, number: int, prompt: Sequence[int], plain: Decoded, drafted: Decoded
) -> list[ServedDifference]:
    """The first difference of two greedy answers, with the other server's gap there; empty if they are equal."""
    position = first_difference(plain.tokens, drafted.tokens)
    if position is None:
        return []
    gap = await baseline.top2_gap([*prompt, *plain.tokens[:position]])
    return [ServedDifference(number, position, gap)]


async def _load_up(
    found: Evaluated,
    server: VllmClient,
    baseline: VllmClient | None,
    prompts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    on_size: Callable[[Load], None],
) -> None:
    """All prompts with several requests at a time; the servers take turns at going first."""
    for turn, size in enumerate(sizes):
        passes = {}
        sides = [side for side in (server, baseline) if side is not None]
        for side in sides if turn % 2 == 0 else reversed(sides):
            passes[side] = await _at_once(side, prompts, size, found)
        differences: list[ServedDifference] | None = None
        if baseline is not None and found.plain is not None and found.differences is not None:
            differences = []
            for place, answer in enumerate(passes[server].decoded):
                number = place % len(prompts)
                alone = found.plain.decoded[number]
                differences += await _compare(baseline, number, prompts[number], alone, answer)
        plain = None if baseline is None else passes[baseline]
        load = Load(size, passes[server], plain, None if differences is None else tuple(differences))
        found.loads.append(load)
        on_size(load)


async def _at_once(server: VllmClient, prompts: Sequence[Sequence[int]], size: int, found: Evaluated) -> Pass:
    """One pass with `size` requests at a time; a request begins when another has ended."""
    num_requests = max(len(prompts), size)
    answers: dict[int, Served] = {}
    waiting: Iterator[int] = iter(range(num_requests))

    async def work() -> None:
        for place in waiting:
            number = place % len(prompts)
            answers[place] = await server.answer(
                f"prompt {number + 1}", prompts[number], found.max_new_tokens, found.temperature, found.seed + place
            )

    start, started = await server.counters(), time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(size):
                group.create_task(work())
    except* ServerError as errors:
        raise errors.exceptions[0] from None  # the others are of the same server
    done = Pass([answers[place].decoded for place in range(num_requests)], time.perf_counter() - started)
    end = await server.settled(start, done.num_tokens)
    _close(done, start, end, [answers[place].counts for place in range(num_requests)] if start.counts else [])
    return done


def _verdict(differences: Sequence[ServedDifference] | None) -> dict[str, int | None]:
    if differences is None:
        return {"mismatches": None, "ties": None}
    num_ties = sum(difference.is_tie for difference in differences)
    return {"mismatches": len(differences) - num_ties, "ties": num_ties}


def _request_tok_per_s(answers: Sequence[Decoded]) -> dict[str, float]:
    """Tokens a second of a request, its prompt included: median and slowest; zeros without an answer."""
    rates = [_ratio(len(answer.tokens), answer.seconds) for answer in answers] or [0.0]
    return {"median": statistics.median(rates), "slowest": min(rates)}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
