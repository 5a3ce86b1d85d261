"""The client of OpenAI-compatible servers, against one in this process that answers and fails as told."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.data.answer_folder import Counts, open_answers
from paceline.data.dialects import Rejection
from paceline.data.encoder import Encoder
from paceline.data.inputs import Input, open_inputs
from paceline.data.regenerate import Answer, AnswerSettings, RecordStream, regenerate
from paceline.data.server import ServerTarget
from paceline.data.templates import is_reasoning_mark
from paceline.errors import ConfigError, ServerError
from tests.fake_server import END, FakeServer, Reply, running
from tests.unit.data.conftest import toy

QUESTION = [{"role": "user", "content": "hello"}]
PROMPT = toy().apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer(toy())) as found:
        yield found


def client(server: FakeServer, settings: AnswerSettings | None = None, **options: Any) -> ServerTarget:
    return ServerTarget(
        server.url, options.pop("tokenizer", toy()), settings or AnswerSettings(max_new_tokens=50), **options
    )


def ask(server: FakeServer, messages: Any = QUESTION, tools: Any = None, **options: Any) -> tuple[Answer, ServerTarget]:
    """One answer, and the client that got it."""

    async def work() -> tuple[Answer, ServerTarget]:
        async with client(server, **options) as target:
            return await target.answer("f:1 turn 1", messages, tools), target

    return asyncio.run(work())


def write_questions(path: Path, *contents: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": content}) + "\n" for content in contents))
    return path


def answer_file(server: FakeServer, source: Path, out: Path, **options: Any) -> Counts:
    """All rows of a file."""

    async def work() -> Counts:
        async with client(server, **options) as target:
            with open_answers(out, {"engine": "server"}) as folder:
                stream = RecordStream(open_inputs([Input(str(source))]), folder.done)
                concurrency = options.get("concurrency", 8)
                control = Encoder(toy(), is_reasoning_mark).typed_control
                await regenerate(stream, target, folder, on_cut="drop", concurrency=concurrency, typed_control=control)
                return folder.counts

    return asyncio.run(work())


def done_lines(out: Path) -> list[str]:
    names = [out / "answers.jsonl", out / "rejected.jsonl"]
    return [json.loads(line)["source"] for path in names for line in path.read_text().splitlines()]


@pytest.mark.parametrize("place", ["vllm", "sglang"])
def test_ids_are_read_where_servers_put_them(server: FakeServer, place: Any) -> None:
    """Prompt and answer ids as the server has them, end token included; asked for, and without penalties."""
    server.ids_place = place
    answer, target = ask(server)
    assert answer.prompt_ids == PROMPT
    assert answer.answer_ids == [*b"1. hello!", END]
    assert answer.message == {"role": "assistant", "content": "1. hello!"}
    assert (answer.finish, answer.num_tokens, target.model, target.software) == ("stop", 10, "toy", "fake 1.2")
    body = server.requests[0]
    assert body["return_token_ids"] is True and body["repetition_penalty"] == 1.0 and body["top_k"] == -1
    assert (body["temperature"], body["max_tokens"], "seed" in body) == (0.0, 50, False)
    assert "chat_template_kwargs" not in body


def test_sampling_thinking_and_tools_are_passed_on(server: FakeServer) -> None:
    """The seed of a request hangs on row and turn alone."""
    settings = AnswerSettings(temperature=0.7, top_p=0.9, seed=3, thinking=False)
    tools = [{"type": "function", "function": {"name": "f"}}]
    ask(server, tools=tools, settings=settings)
    ask(server, settings=settings)
    first, second = server.requests
    assert first["tools"] == tools and first["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert (first["temperature"], first["top_p"]) == (0.7, 0.9)
    assert first["seed"] == second["seed"]
    ask(server, settings=AnswerSettings(temperature=0.7, seed=4))
    assert server.requests[2]["seed"] != first["seed"]


def test_seeds_fit_into_31_bits(server: FakeServer, tmp_path: Path) -> None:
    """Some servers hold them in a signed integer."""
    source = write_questions(tmp_path / "in.jsonl", *(f"q{i}" for i in range(40)))
    answer_file(server, source, tmp_path / "out", settings=AnswerSettings(temperature=0.7, max_new_tokens=50))
    seeds = [body["seed"] for body in server.requests]
    assert len(set(seeds)) == 40 and all(type(seed) is int and 0 <= seed < 2**31 for seed in seeds)


def test_cut_reasoning_and_tool_calls(server: FakeServer) -> None:
    """What else a message may bring; a null content is an empty one."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    replies = iter(
        [
            Reply(finish="length"),
            Reply(message={"content": None, "reasoning": "why"}),
            Reply(message={"reasoning_content": "why"}),
            Reply(finish="tool_calls", message={"content": None, "tool_calls": [call]}),
        ]
    )
    server.reply = lambda body, times: next(replies)
    assert ask(server)[0].finish == "length"
    assert ask(server)[0].message == {"role": "assistant", "content": "", "reasoning_content": "why"}
    assert ask(server)[0].message["reasoning_content"] == "why"
    answer = ask(server)[0]
    assert answer.finish == "stop" and answer.message == {"role": "assistant", "content": "", "tool_calls": [call]}


def test_history_is_sent_as_the_api_has_it(server: FakeServer) -> None:
    """Reasoning under both names that servers read, arguments of calls as strings."""
    history = [
        *QUESTION,
        {"role": "assistant", "content": "a", "reasoning_content": "why"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        *QUESTION,
    ]
    ask(server, messages=history, any_template=True)
    sent = server.requests[0]["messages"]
    assert sent[1]["reasoning"] == sent[1]["reasoning_content"] == "why"
    assert sent[2]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_requests_that_fail_are_sent_again(server: FakeServer, tmp_path: Path) -> None:
    """Rate limits, server errors and broken connections: every row arrives once, and the retries are counted."""
    failures = {"q1": Reply(429), "q3": Reply(500), "q5": Reply(drop=True), "q6": Reply(503)}
    server.reply = lambda body, times: failures.get(body["messages"][-1]["content"], Reply()) if times < 3 else Reply()
    source = write_questions(tmp_path / "in.jsonl", *(f"q{i}" for i in range(8)))
    assert answer_file(server, source, tmp_path / "out", retries=2).num_kept == 8
    assert len(set(done_lines(tmp_path / "out"))) == len(done_lines(tmp_path / "out")) == 8
    assert len(server.requests) == 8 + 2 * 4
    server.reply = lambda body, times: Reply(429, "slow down") if times < 10 else Reply()
    assert ask(server, retries=20)[1].num_retries == 9


def test_many_requests_are_in_flight(server: FakeServer, tmp_path: Path) -> None:
    """As many as asked for, and no more."""
    server.reply = lambda body, times: Reply(delay_s=0.3)
    source = write_questions(tmp_path / "in.jsonl", *(f"q{i}" for i in range(40)))
    answer_file(server, source, tmp_path / "out", concurrency=20)
    assert 10 <= server.most_in_flight <= 20  # on a busy machine the first may be answered before the last is asked


def test_a_row_that_the_server_refuses_is_rejected_alone(server: FakeServer, tmp_path: Path) -> None:
    """HTTP 400, or 500 each time, for one row, also if it is the first: its message is the reason."""
    wrong = {"long": Reply(400, "too long"), "poison": Reply(500, "boom")}
    server.reply = lambda body, times: wrong.get(body["messages"][-1]["content"], Reply())
    source = write_questions(tmp_path / "in.jsonl", "long", "q1", "poison", "q2")
    counts = answer_file(server, source, tmp_path / "out", retries=1, concurrency=1)
    assert (counts.num_kept, dict(counts.rejected)) == (2, {"the server refuses it": 2})
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert reasons == ["the server refuses it: HTTP 400: too long", "the server refuses it: HTTP 500: boom"]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(400, "max_tokens is too large"), "HTTP 400: max_tokens is too large"),
        (Reply(500, "dead"), "HTTP 500: dead"),
        (Reply(429, "busy"), "HTTP 429: busy; fewer requests"),
        (Reply(401, "who are you"), "HTTP 401: who are you; set OPENAI_API_KEY"),
        (Reply(503, "loading"), "HTTP 503: loading"),
    ],
)
def test_a_server_that_refuses_everything_ends_the_run(
    server: FakeServer, tmp_path: Path, reply: Reply, message: str
) -> None:
    """It is not taken for the fault of the rows: none of them is rejected."""
    server.reply = lambda body, times: reply
    with pytest.raises(ServerError, match=message):
        answer_file(server, write_questions(tmp_path / "in.jsonl", "a", "b", "c"), tmp_path / "out", retries=1)
    assert done_lines(tmp_path / "out") == []


@pytest.mark.parametrize("unknown", [set(), {"return_token_ids"}])
def test_a_server_that_fails_after_its_first_answers_rejects_no_row(
    server: FakeServer, tmp_path: Path, unknown: set[str]
) -> None:
    """HTTP 500 to everything is its fault, also to what is sent again without the fields that it does not know."""
    num_answered = 0

    def reply(body: dict[str, Any], times: int) -> Reply:
        nonlocal num_answered
        num_answered += 1
        return Reply() if num_answered == 1 else Reply(500, "out of memory")

    server.reply, server.unknown_fields = reply, unknown
    server.refusal_delay_s = lambda body: 0.0 if "q0" in body["messages"][-1]["content"] else 0.2
    source, out = write_questions(tmp_path / "in.jsonl", *(f"q{i}" for i in range(6))), tmp_path / "out"
    with pytest.raises(ServerError, match="stopped answering, first for .*: HTTP 500: out of memory"):
        answer_file(server, source, out, retries=1, concurrency=3)
    assert len(done_lines(out)) == 1 and (out / "rejected.jsonl").read_text() == ""


def test_refusals_that_come_late_are_no_fault_of_their_rows(server: FakeServer, tmp_path: Path) -> None:
    """Six requests are refused for the fields in them, five after the first was answered without: all are answered."""
    server.unknown_fields = {"return_token_ids"}
    server.refusal_delay_s = lambda body: 0.1 * int(body["messages"][-1]["content"][1:])
    server.reply = lambda body, times: Reply(400, "bad row") if body["messages"][-1]["content"] == "q7" else Reply()
    source = write_questions(tmp_path / "in.jsonl", *(f"q{i}" for i in range(8)))
    counts = answer_file(server, source, tmp_path / "out", concurrency=6)
    assert (counts.num_kept, dict(counts.rejected)) == (7, {"the server refuses it": 1})
    assert "HTTP 400: bad row" in (tmp_path / "out" / "rejected.jsonl").read_text()


def chat_answer(choice: dict[str, Any], **more: Any) -> bytes:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}, **choice}
    return json.dumps({"id": "x", "object": "chat.completion", "choices": [choice], **more}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"<html>hello\nworld</html>",
        b"[]",
        b"null",
        b'{"choices',
        b"\xff\xfe",
        b"{}",
        b'{"choices": "abc"}',
        b'{"choices": {"a": 1}}',
        b'{"choices": []}',
        b'{"choices": [1]}',
        b'{"choices": [{}]}',
        b'{"choices": [{"message": "abc", "finish_reason": "stop"}]}',
        chat_answer({"message": {"content": [1]}}),
        chat_answer({"message": {"content": "a", "reasoning": {"b": 1}}}),
        chat_answer({"message": {"content": "a", "tool_calls": "abc"}}),
        chat_answer({"message": {"content": "a", "tool_calls": ["abc"]}}),
        chat_answer({"token_ids": ["5"]}, prompt_token_ids=[1]),
        chat_answer({"token_ids": [5]}, prompt_token_ids=[1.5]),
        chat_answer({"token_ids": 5}, prompt_token_ids=[1]),
        chat_answer({"token_ids": [True]}, prompt_token_ids=[1]),
        chat_answer({"token_ids": [5]}, prompt_token_ids="abc"),
    ],
)
def test_what_is_no_answer_ends_the_run_in_one_line(server: FakeServer, body: bytes) -> None:
    """Whatever comes in place of an answer."""
    server.reply = lambda request, times: Reply(raw=body)
    with pytest.raises(ServerError, match="is it an OpenAI-compatible server") as caught:
        ask(server)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("usage", ["abc", {"prompt_tokens": "5", "completion_tokens": None}, None])
def test_odd_counts_are_taken_for_none(server: FakeServer, usage: Any) -> None:
    """An answer counts without the server's counts."""
    server.reply = lambda request, times: Reply(raw=chat_answer({}, usage=usage))
    answer, _ = ask(server)
    assert (answer.message["content"], answer.num_tokens) == ("a", 0)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>\n</html>",
        b"[]",
        b"null",
        b'{"data',
        b'{"data": "abc"}',
        b'{"data": [1]}',
        b'{"data": [{"id": 5}]}',
        b'{"data": [{"id": ["a"]}]}',
    ],
)
def test_what_is_no_list_of_models_is_said_in_one_line(server: FakeServer, body: bytes) -> None:
    """Before anything is asked."""
    server.models_body = body
    with pytest.raises(ServerError, match="sent no list of models: is it an OpenAI-compatible server") as caught:
        ask(server)
    assert "\n" not in str(caught.value) and not server.requests


def test_a_server_that_dies_loses_and_repeats_no_row(tmp_path: Path) -> None:
    """The run ends with what is done; against a new server, at another address, it goes on with the others."""
    source, out = write_questions(tmp_path / "in.jsonl", *(f"question {i}." for i in range(30))), tmp_path / "out"
    with running(FakeServer(toy())) as first:
        first.reply = lambda body, times: Reply(drop=len(first.requests) > 12)
        with pytest.raises(ServerError, match="stopped answering, first for .*in.jsonl:"):
            answer_file(first, source, out, retries=1)
    done = done_lines(out)
    assert 5 <= len(done) <= 12
    with running(FakeServer(toy())) as second:
        assert answer_file(second, source, out).num_kept == 30
        assert len(second.requests) == 30 - len(done)
    assert len(done_lines(out)) == len(set(done_lines(out))) == 30


def test_fields_that_a_server_does_not_know_are_left_out_loudly(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only text can be stored then; it is said once."""
    server.unknown_fields = {"return_token_ids"}
    with caplog.at_level(logging.WARNING):
        counts = answer_file(server, write_questions(tmp_path / "in.jsonl", "a", "b", "c"), tmp_path / "out")
    assert (counts.num_kept, counts.num_with_ids) == (3, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ONLY TEXT CAN BE STORED" in caplog.text and "unknown field return_token_ids" in caplog.text
    assert "rows" not in (tmp_path / "out" / "answers.jsonl").read_text()


def test_thinking_is_not_dropped_in_silence(server: FakeServer) -> None:
    """A server that does not take the template's options would answer in its own mode: that ends the run."""
    server.unknown_fields = {"return_token_ids", "chat_template_kwargs"}
    with pytest.raises(ServerError, match="unknown field"):
        ask(server, settings=AnswerSettings(thinking=True))


def test_a_server_without_ids_is_said_once(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """Some take the field and do nothing; then at least the number of prompt tokens is compared."""
    server.ids_place = "nowhere"
    with caplog.at_level(logging.WARNING):
        answer, target = ask(server)
    assert answer.answer_ids is None and answer.num_tokens == 10 and target.gives_ids is False
    assert caplog.text.count("ONLY TEXT CAN BE STORED") == 1
    server.tokenizer = toy("chatml_reasoning")
    server.tokenizer.chat_template = "x" + server.tokenizer.chat_template
    with pytest.raises(
        ConfigError, match="the server counts 25 prompt tokens, and the tokenizer and template here give 24"
    ):
        ask(server)


def test_another_template_is_refused_unless_accepted(server: FakeServer) -> None:
    """The first difference is shown, decoded; ids are stored as the server has them if that is accepted."""
    server.tokenizer = toy()
    server.tokenizer.chat_template = server.tokenizer.chat_template.replace("assistant", "robot")
    with pytest.raises(ConfigError) as caught:
        ask(server)
    message = str(caught.value)
    assert "from token 14 on (20 and 24 in all)" in message and "robot" in message and "assistant" in message
    answer, _ = ask(server, any_template=True)
    assert answer.prompt_ids is not None and server.tokenizer.decode(answer.prompt_ids).endswith("robot\n")


def test_prompts_with_tools_are_stored_as_served(server: FakeServer) -> None:
    """Servers write tool descriptions in their own way; that is no other template."""
    server.tokenizer = toy("chatml_tools")
    answer, _ = ask(server, tools=[{"type": "function", "function": {"name": "f"}}])
    assert answer.prompt_ids is not None and len(answer.prompt_ids) > len(PROMPT)


def test_ids_outside_the_tokenizer_and_odd_endings_reject_the_row(server: FakeServer) -> None:
    """A padded logit that was sampled; a server that gave up on the answer."""
    server.reply = lambda body, times: Reply(ids=[5, 300, END])
    with pytest.raises(Rejection, match="a token that the tokenizer lacks: id 300; it has 0 to 266"):
        ask(server)
    server.reply = lambda body, times: Reply(finish="content_filter")
    with pytest.raises(Rejection, match="the server ended the answer: finish_reason content_filter"):
        ask(server)


def test_which_model_is_asked(server: FakeServer) -> None:
    """The only one; among several the one that is named; a name that is not there is an error that lists them."""
    server.models = ["a", "b"]
    with pytest.raises(ConfigError, match="has 2 models: a, b; choose one with --model"):
        ask(server)
    assert ask(server, model="b")[1].model == "b" and server.requests[-1]["model"] == "b"
    with pytest.raises(ConfigError, match="has no model c; it has a, b"):
        ask(server, model="c")


def test_nobody_there_is_said_at_once() -> None:
    """No retries before the first success; an address that is none is an error as well."""
    target = ServerTarget("http://127.0.0.1:9", toy(), AnswerSettings(), retries=50)
    with pytest.raises(ServerError, match="no answer from http://127.0.0.1:9/v1: Connection error"):
        asyncio.run(target.__aenter__())
    assert target.num_retries == 0
    with pytest.raises(ConfigError, match="--server localhost:8000 is no address"):
        ServerTarget("localhost:8000", toy(), AnswerSettings())


def test_the_key_is_sent_and_kept_secret(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """From OPENAI_API_KEY; neither it nor a password of the address stands in what is stored."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    _, target = ask(server)
    assert server.headers[0]["authorization"] == "Bearer sk-secret"
    assert "secret" not in json.dumps(target.facts())
    assert ServerTarget("https://me:pass@host/v1/", toy(), AnswerSettings()).facts()["url"] == "https://host/v1"
