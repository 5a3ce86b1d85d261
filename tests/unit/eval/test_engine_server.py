"""A vLLM server from outside: the text of its counters, one answer, and everything that is no such server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paceline.errors import ConfigError, ServerError
from paceline.eval.engine_server import PROBE, Counters, Counts, Served, VllmClient, parse_counters
from tests.fake_vllm import STOP, FakeVllm, plain_answer, running_vllm

PROMPT = [1, 2, 3]


class Tokenizer:
    """One id a character."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def at(
    fake: FakeVllm,
    do: Callable[[VllmClient], Awaitable[Any]] | None = None,
    target: str = "toy",
    model: str | None = None,
    path: str = "",
) -> Any:
    """Connect to a running fake, and do something there."""

    async def run() -> Any:
        async with VllmClient(fake.url + path).connected(target, model, Tokenizer()) as server:
            return await do(server) if do else server

    with running_vllm(fake):
        return asyncio.run(run())


def answer(fake: FakeVllm, max_new_tokens: int = 12, prompt: list[int] = PROMPT) -> Served:
    return at(fake, lambda server: server.answer("prompt 1", prompt, max_new_tokens))


def test_counters_of_all_engines_are_added() -> None:
    """Names with and without `_total` count, of every engine; other metrics and times of creation do not."""
    text = """
# HELP vllm:generation_tokens_total Number of generation tokens processed.
vllm:generation_tokens_total{engine="0",model_name="a {odd, \\"name\\"}"} 30.0
vllm:generation_tokens_total{engine="1",model_name="a"} 1e1
vllm:generation_tokens_created{engine="1",model_name="a"} 1.79e+09
vllm:request_generation_tokens_sum{engine="0"} 99.0
vllm:spec_decode_num_drafts{engine="0"} 8 1796045529504
vllm:spec_decode_num_drafts{engine="1"} 2
vllm:spec_decode_num_draft_tokens{engine="0"} 20
vllm:spec_decode_num_accepted_tokens{engine="0"} 9
vllm:spec_decode_num_accepted_tokens_per_pos{engine="0",position="1"} 2
vllm:spec_decode_num_accepted_tokens_per_pos{position="0",engine="0"} 6
vllm:spec_decode_num_accepted_tokens_per_pos{position="0",engine="1"} 1
"""
    assert parse_counters(text) == Counters(40, Counts(10, 20, 9, (7, 2)))


def test_a_server_without_speculation_has_no_counts() -> None:
    """Without the counters of drafts there are none, which is not the same as none drafted."""
    assert parse_counters("vllm:generation_tokens_total 5.0") == Counters(5, None)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "has no vllm:generation_tokens"),
        ("sglang:generation_tokens_total 5", "has no vllm:generation_tokens"),
        ("<html>vllm:generation_tokens_total 5</html>", "has no vllm:generation_tokens"),
        ("vllm:generation_tokens_total NaN", "has NaN"),
        ("vllm:generation_tokens_total +Inf", "has"),
        ("vllm:generation_tokens_total 1\nvllm:spec_decode_num_drafts_total 1", "not all"),
        ("vllm:generation_tokens_total 1\nvllm:spec_decode_num_accepted_tokens_per_pos 1", "without a position"),
    ],
)
def test_what_are_no_counters_is_said(text: str, wrong: str) -> None:
    """Each kind of text that has no usable counters is an error."""
    with pytest.raises(ValueError, match=wrong.replace("+", r"\+")):
        parse_counters(text)


def test_counts_give_rounds_lengths_and_positions() -> None:
    """Rounds by accepted tokens, the acceptance length and its positions follow from vLLM's four counters."""
    counts = Counts(drafts=10, draft_tokens=30, accepted=9, per_position=(6, 2, 1))
    assert counts.by_accepted == [4, 4, 1, 1] and counts.is_sound
    assert counts.acceptance.length == 1.9
    assert counts.acceptance.per_position == [0.6, 2 / 6, 0.5]
    assert counts - Counts(4, 12, 3, (2, 1, 0)) == Counts(6, 18, 6, (4, 1, 1))
    assert not Counts(10, 30, 9, (2, 6, 1)).is_sound and not Counts(10, 30, 8, (6, 2, 1)).is_sound


def test_an_answer_is_its_tokens() -> None:
    """A prompt goes as ids, the answer comes as ids, with its times; sampling is not the server's own."""
    fake = FakeVllm()
    decoded = answer(fake).decoded
    assert decoded.tokens == plain_answer(PROMPT)[:12] and not decoded.stopped
    assert 0 < decoded.prefill_s <= decoded.seconds and decoded.num_prompt == 3
    (body,) = fake.requests
    assert body["prompt"] == PROMPT and body["model"] == "toy"
    assert (body["temperature"], body["repetition_penalty"], body["top_k"]) == (0.0, 1.0, -1)


def test_every_prompt_is_read_anew() -> None:
    """No two requests share the prefix cache."""
    fake = FakeVllm()

    async def twice(server: VllmClient) -> None:
        for _ in range(2):
            await server.answer("prompt 1", PROMPT, 3)

    at(fake, twice)
    assert len({body["cache_salt"] for body in fake.requests}) == 2


def test_a_stop_token_ends_an_answer() -> None:
    """An answer that ends by itself says so, its stop token included."""
    decoded = answer(FakeVllm(answer=lambda prompt: [11, 12, STOP, 13])).decoded
    assert decoded.tokens == [11, 12, STOP] and decoded.stopped


def test_a_requests_own_counts_are_read() -> None:
    """Where the server tells them, an answer has its verifications, and they are the counters' difference."""
    fake = FakeVllm(tells_requests=True)  # 1, then 3 + 1 + 5 + 3 tokens, the last ones cut to 2
    served = answer(fake)
    assert served.decoded.num_accepted_tokens == [2, 0, 4, 2]
    assert served.counts == Counts(4, 16, 8, (3, 3, 1, 1)) == parse_counters(fake.counters()).counts
    assert answer(FakeVllm()).counts is None


def test_counters_that_lag_are_waited_for() -> None:
    """An answer may arrive before it is counted."""

    async def measure(server: VllmClient) -> Counters:
        before = await server.counters()
        await server.answer("prompt 1", PROMPT, 12)
        return await server.settled(before, 12)

    assert at(FakeVllm(lag=4), measure).generated == 12


def test_counters_that_fall_are_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters that fell, or that never move, belong to something else."""
    monkeypatch.setattr("paceline.eval.engine_server.SETTLE_S", 0.0)
    with pytest.raises(ServerError, match="restarted"):
        at(FakeVllm(), lambda server: server.settled(Counters(5, Counts()), 1))
    with pytest.raises(ServerError, match="sent 3 tokens and counted 0"):
        at(FakeVllm(), lambda server: server.settled(Counters(0, Counts()), 3))


@pytest.mark.parametrize("target", ["toy", "/models/toy", "some/where/toy/", "org/toy"])
def test_the_target_is_known_by_either_name(target: str) -> None:
    """What is served is recognised by its name or by the last part of its path."""
    server = at(FakeVllm(model="x" if "/" in target else "toy"), target=target, path="/v1/")
    assert server.model in ("x", "toy") and server.version == "1.2" and server.max_length == 4096


def test_another_model_is_refused() -> None:
    """A server of another model is not measured, unless it is said to be the target by another name."""
    with pytest.raises(ConfigError, match=r"serves toy, --target is qwen.*--model NAME"):
        at(FakeVllm(), target="qwen")
    assert at(FakeVllm(), target="qwen", model="toy").model == "toy"
    with pytest.raises(ConfigError, match="has no model qwen; it has toy"):
        at(FakeVllm(), target="toy", model="qwen")


def test_another_tokenizer_is_refused() -> None:
    """Equal names prove nothing: a text has to become the same ids there."""
    with pytest.raises(ConfigError, match="tokenizes otherwise"):
        at(FakeVllm(tokenize=lambda text: [ord(c) + 1 for c in text]))
    assert at(FakeVllm(tokenize=lambda text: [ord(c) for c in text])).model == "toy"
    assert any(ord(c) > 127 for c in PROBE)


@pytest.mark.parametrize(
    ("fake", "wrong"),
    [
        (FakeVllm(metrics=b"<html>hello</html>"), "has no vllm:generation_tokens.*--disable-log-stats"),
        (FakeVllm(redirect="http://127.0.0.1:9/v1/models"), "HTTP 307.*redirects are not followed"),
    ],
)
def test_what_is_not_vllm_is_said(fake: FakeVllm, wrong: str) -> None:
    """A page in place of counters, or a redirect, ends it before anything is sent."""
    with pytest.raises(ServerError, match=wrong):
        at(fake)
    assert not fake.requests


def test_a_wrong_path_and_nobody_there_are_said() -> None:
    """A URL that is another thing's, and one where nobody listens."""
    with pytest.raises(ServerError, match="HTTP 404"):
        at(FakeVllm(), path="/elsewhere")
    gone = FakeVllm()
    with running_vllm(gone):
        pass

    async def connect() -> None:
        async with VllmClient(gone.url.replace("//", "//me:secret@")).connected("toy", None, Tokenizer()):
            pass

    with pytest.raises(ServerError, match="no answer from http://127.*is the server up") as error:
        asyncio.run(connect())
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://host:99999", "http://[::1"])
def test_what_is_no_address_is_said(url: str) -> None:
    """A URL without scheme, host or possible port is refused by the option's name."""
    with pytest.raises(ConfigError, match="--baseline-url .*is no address"):
        VllmClient(url, "--baseline-url")


def test_a_refused_prompt_is_named() -> None:
    """HTTP 400 for a long prompt: which one, in the server's words, and what helps."""
    with pytest.raises(
        ServerError, match=r"refuses prompt 1 \(3 tokens\): HTTP 400: maximum context length is 2.*--max"
    ):
        answer(FakeVllm(longest=2))


def test_a_server_that_dies_is_said() -> None:
    """A connection that breaks within an answer."""
    with pytest.raises(ServerError, match=r"stopped answering at prompt 1 .*still up"):
        answer(FakeVllm(breaks_at=1))


@pytest.mark.parametrize(
    ("event", "wrong"),
    [
        ({"error": {"message": "engine died"}}, "stopped within prompt 1.*engine died"),
        ({"hello": 1}, "sent no answer to prompt 1"),
        ([1], "sent no answer"),
        ({"choices": [{"token_ids": ["1"], "finish_reason": "stop"}]}, "sent no answer"),
        ({"choices": [{"text": "hi", "finish_reason": "stop"}]}, "sends no token ids"),
        ({"choices": [{"token_ids": [1], "finish_reason": "abort"}]}, "did not finish"),
        ({"choices": [{"token_ids": [1]}]}, "did not finish"),
        ({"choices": [{"token_ids": [1] * 99, "finish_reason": "length"}]}, "more than the 12 tokens"),
    ],
)
def test_a_broken_answer_is_said(event: Any, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error within the stream, other fields, no ids, no ending: each by name."""
    monkeypatch.setattr(FakeVllm, "events", lambda self, body: iter([event]))
    with pytest.raises(ServerError, match=wrong):
        answer(FakeVllm())


def test_the_gap_of_the_best_two_is_asked_for() -> None:
    """Logits' gap by logprobs; None where the server gives none."""
    assert at(FakeVllm(gap=0.25), lambda server: server.top2_gap(PROMPT)) == pytest.approx(0.25)
    assert at(FakeVllm(gap=None), lambda server: server.top2_gap(PROMPT)) is None
