"""A drafter at a server: acceptance by counters, turns with a server without drafts, what is left out, and the load."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest

from paceline.errors import ConfigError, ServerError
from paceline.eval.engine_server import VllmClient
from paceline.eval.served import TIE_GAP, Evaluated, evaluate_served
from tests.fake_vllm import STOP, FakeVllm, plain_answer, running_vllm
from tests.unit.eval.test_engine_server import Tokenizer

PROMPTS = [[1, 2, 3], [4], [5, 6], [9, 9]]


def evaluated(
    fake: FakeVllm, plain: FakeVllm | None = None, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any
) -> Evaluated:
    """Evaluate running fakes."""

    async def run() -> Evaluated:
        async with AsyncExitStack() as stack:
            servers = [VllmClient(one.url) for one in (fake, plain) if one is not None]
            for server in servers:
                await stack.enter_async_context(server.connected("toy", None, Tokenizer()))
            baseline = servers[1] if plain is not None else None
            return await evaluate_served(servers[0], baseline, prompts, **{"max_new_tokens": 12, **options})

    with ExitStack() as stack:
        for one in (fake, plain):
            if one is not None:
                stack.enter_context(running_vllm(one))
        return asyncio.run(run())


@pytest.mark.parametrize("tells_requests", [False, True])
def test_acceptance_is_what_the_server_counts(tells_requests: bool) -> None:
    """Both by `/metrics` and by counts of each request, which agree; nothing is said of what was not measured.

    An answer of 12 tokens takes verifications of 3 + 1 + 5 tokens, and one of 3 that the limit cuts to 2.
    """
    record = evaluated(FakeVllm(tells_requests=tells_requests)).as_dict()
    assert record["acceptance_source"] == ("requests" if tells_requests else "counters")
    assert (record["rounds"], record["num_accepted_tokens"], record["num_draft_tokens"]) == (16, 32, 64)
    assert record["acceptance_length"] == 1 + 32 / 16 and record["acceptance_length_interval"] == [3.0, 3.0]
    assert record["committed_per_round"] == 4 * 11 / 16
    assert record["accepted_counts"] == [4, 0, 8, 0, 4] and record["acceptance_per_position"] == [0.75, 1, 1 / 3, 1]
    assert (record["generated_tokens"], record["prompts"], record["ended_by_stop"]) == (48, 4, 0)
    assert record["speculative_tok_per_s"] > 0 and 0 < record["first_token_s"]["median"]
    assert (record["speedup"], record["lossless"], record["mismatches"]) == (None, None, None)
    assert set(record["not_measured"]) == {"speedup", "lossless"} and not record["warnings"]
    assert not {"baseline_tok_per_s", "draft_frac", "by_context", "concurrency", "block_size"} & set(record)


def test_a_server_without_drafts_gives_speedup_and_losslessness() -> None:
    """The two take turns, and so does who goes first; equal answers are lossless."""
    order: list[str] = []
    ways = {name: lambda prompt, name=name: order.append(name) or plain_answer(prompt) for name in ("drafted", "plain")}
    fake, plain = FakeVllm(answer=ways["drafted"]), FakeVllm(answer=ways["plain"], accepted=None)
    record = evaluated(fake, plain).as_dict()
    assert order[2:] == ["drafted", "plain", "plain", "drafted"] * 2  # after the first answers, which do not count
    assert record["lossless"] is True and (record["mismatches"], record["ties"]) == (0, 0)
    assert record["speedup"] == record["speculative_tok_per_s"] / record["baseline_tok_per_s"]
    assert record["not_measured"] == {} and record["rounds"] == 16


@pytest.mark.parametrize(("gap", "tie"), [(TIE_GAP / 2, True), (TIE_GAP * 2, False), (None, None)])
def test_other_answers_are_ties_or_faults(gap: float | None, tie: bool | None) -> None:
    """At a difference the server without drafts is asked how sure it is; if it does not tell, nothing is excused."""

    def other(prompt: list[int]) -> list[int]:
        tokens = plain_answer(prompt)
        if prompt == PROMPTS[2]:
            tokens[5] += 1
        return tokens

    plain = FakeVllm(accepted=None, gap=gap)
    record = evaluated(FakeVllm(answer=other), plain, sizes=[2]).as_dict()
    assert record["lossless"] is False
    assert (record["mismatches"], record["ties"]) == ((0, 1) if tie else (1, 0))
    (miss,) = record["first_mismatches"]
    assert (miss["prompt"], miss["position"], miss["tie"]) == (2, 5, tie)
    assert miss["top2_gap"] == (None if gap is None else pytest.approx(gap))
    assert [row["mismatches"] for row in record["concurrency"]] == [0 if tie else 1]
    assert record["baseline_other_clients_tokens"] == 0  # asking is not another client


def test_drawn_answers_are_not_compared() -> None:
    """At a temperature speedup is measured and losslessness is not; every prompt has a seed of its own."""
    fake = FakeVllm(answer=lambda prompt: [t + 1 for t in plain_answer(prompt)])
    record = evaluated(fake, FakeVllm(accepted=None), temperature=0.7, seed=5).as_dict()
    assert record["lossless"] is None and record["speedup"] > 0 and set(record["not_measured"]) == {"lossless"}
    assert (record["temperature"], record["seed"]) == (0.7, 5)
    assert [body.get("seed") for body in fake.requests] == [None, 5, 6, 7, 8]


@pytest.mark.parametrize("tells_requests", [False, True])
def test_other_clients_are_noticed(tells_requests: bool) -> None:
    """Tokens that we did not ask for are said, and whether they are in the acceptance."""
    record = evaluated(FakeVllm(others=3, tells_requests=tells_requests)).as_dict()
    assert record["other_clients_tokens"] == 12
    (warning,) = record["warnings"]
    assert "12 tokens" in warning and ("ours alone" if tells_requests else "theirs as well") in warning.replace(
        "our requests alone", "ours alone"
    )
    assert record["acceptance_length"] == (3.0 if tells_requests else 1 + 32 / 28)
    assert record["committed_per_round"] == (2.75 if tells_requests else None)


def test_several_requests_at_a_time() -> None:
    """Every size has so many in flight; where there are more than prompts, these come again."""
    fake = FakeVllm(tells_requests=True, delay_s=0.03)
    seen: list[int] = []
    options = {"sizes": [1, 6], "on_size": lambda load: seen.append(load.batch_size)}
    record = evaluated(fake, FakeVllm(accepted=None), **options).as_dict()
    assert seen == [1, 6] and 2 < fake.most_in_flight <= 6
    assert [(row["batch_size"], row["requests"]) for row in record["concurrency"]] == [(1, 4), (6, 6)]
    for row in record["concurrency"]:
        assert row["acceptance_length"] == 3.0 and row["other_clients_tokens"] == 0
        assert row["speedup"] == row["tok_per_s"] / row["baseline_tok_per_s"]
        assert (row["mismatches"], row["ties"]) == (0, 0)


def test_a_server_that_drafts_nothing_is_refused() -> None:
    """No counters of drafts, or counters that stay: an error before the prompts."""
    with pytest.raises(ConfigError, match="drafts nothing.*--speculative-config"):
        evaluated(FakeVllm(accepted=None))
    idle = FakeVllm()
    idle._count = lambda num_tokens, steps: FakeVllm._count(idle, num_tokens, [])  # type: ignore[method-assign]
    with pytest.raises(ServerError, match="counted no draft in a first answer of 8 tokens"):
        evaluated(idle)
    assert len(idle.requests) == 1


def test_answers_of_one_token_measure_nothing() -> None:
    """Neither by the limit nor by themselves."""
    with pytest.raises(ConfigError, match="--max-new-tokens 1"):
        evaluated(FakeVllm(), max_new_tokens=1)
    with pytest.raises(ServerError, match="answers of one token"):
        evaluated(FakeVllm(answer=lambda prompt: [STOP]))


def test_a_baseline_that_drafts_is_refused() -> None:
    """Also if it is the very same server."""
    with pytest.raises(ConfigError, match="drafts as well"):
        evaluated(FakeVllm(), FakeVllm())


def test_long_prompts_are_refused_before_the_others_run() -> None:
    """By what the server says of its length; an empty set of prompts as well."""
    fake = FakeVllm(max_model_len=14)
    with pytest.raises(ConfigError, match="prompt 1 has 3 tokens, with 12 more 15, .* has room for 14"):
        evaluated(fake)
    assert not fake.requests
    with pytest.raises(ConfigError, match="no prompt"):
        evaluated(fake, prompts=[])


@pytest.mark.parametrize("breaks_at", [3, 7])
def test_a_server_that_dies_midway_ends_it(breaks_at: int) -> None:
    """In the prompts, or in a load of several: one error that names the prompt."""
    with pytest.raises(ServerError, match="stopped answering at prompt"):
        evaluated(FakeVllm(breaks_at=breaks_at), sizes=[4])
