"""Records to conversations: many ways to write one exchange, and a reason for everything that is none."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from paceline.data.dialects import Conversation, Document, Rejection, TokenRows, parse
from tests.unit.data.conftest import chat

PLAIN = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def turns(names: tuple[str, str], keys: tuple[str, str]) -> list[dict[str, str]]:
    """The exchange with other names for roles and keys."""
    return [{keys[0]: name, keys[1]: message["content"]} for name, message in zip(names, PLAIN, strict=True)]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": PLAIN},
        {"messages": None, "conversations": turns(("human", "gpt"), ("from", "value"))},
        {"conversations": turns(("user", "model"), ("role", "content"))},
        {"conversation": turns(("user", "chatgpt"), ("from", "value"))},
        {"messages": PLAIN, "prompt": "another", "prompt_id": "x"},
        {"messages": PLAIN, "conversations": PLAIN},
        {"prompt": "2+2?", "response": "4"},
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": PLAIN[:1], "completion": PLAIN[1:]},
        {"instruction": "2+2?", "input": "", "output": "4"},
        {"question": "2+2?", "answer": "4", "text": "2+2? 4"},
        {"system": "", "prompt": "2+2?", "response": "4", "response_model": None},
        {"messages": PLAIN, "image": {"bytes": None, "path": None}, "videos": []},
    ],
)
def test_dialects_of_one_exchange_give_one_conversation(record: dict[str, Any]) -> None:
    """Same messages, same hash."""
    assert parse(record) == Conversation(PLAIN)
    assert parse(record).hash == Conversation(PLAIN).hash


def test_a_system_prompt_beside_the_messages_comes_first() -> None:
    """Once, also where the messages repeat it."""
    system = {"role": "system", "content": "be brief"}
    wanted = Conversation([system, *PLAIN])
    assert parse({"system": "be brief", "messages": PLAIN}) == wanted
    assert parse({"system_prompt": "be brief", "messages": [system, *PLAIN]}) == wanted
    with pytest.raises(Rejection, match="two system prompts: `system` and message 1 differ"):
        parse({"system": "be long", "messages": [system, *PLAIN]})


def test_an_instruction_is_followed_by_its_input() -> None:
    """Input follows the instruction after a blank line."""
    assert parse({"instruction": "add", "input": "2, 2", "output": "4"}) == Conversation(
        [{"role": "user", "content": "add\n\n2, 2"}, {"role": "assistant", "content": "4"}]
    )


def test_a_prompt_without_an_answer_is_a_conversation_that_waits_for_one() -> None:
    """`regenerate` will answer it; `prepare` has nothing to learn from it."""
    assert parse({"prompt": "2+2?"}) == Conversation(PLAIN[:1])


def test_calls_and_their_results_in_the_older_dialect() -> None:
    """`function_call` and `observation` turns become a tool call and a tool message."""
    call = {"name": "add", "arguments": {"a": 2}}
    wanted = [{"function": call}]
    for message in (
        {"from": "function_call", "value": json.dumps(call)},
        {"role": "assistant", "content": None, "function_call": {**call, "arguments": '{"a": 2}'}},
    ):
        found = parse({"conversations": [PLAIN[0], message, {"from": "observation", "value": "4"}, PLAIN[1]]})
        assert isinstance(found, Conversation)
        assert found.messages[1]["tool_calls"] == wanted
        assert (found.messages[1]["role"], found.messages[1]["content"]) == ("assistant", "")
        assert found.messages[2] == {"role": "tool", "content": "4"}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_stands_under_one_name(key: str) -> None:
    """Whatever key a file uses, templates find it as `reasoning_content`."""
    found = parse({"messages": [PLAIN[0], {**PLAIN[1], key: "add them"}]})
    assert isinstance(found, Conversation)
    assert found.messages[1]["reasoning_content"] == "add them"


def test_an_empty_key_does_not_hide_another_one() -> None:
    """Columns that a file has for some rows only are empty in the others."""
    message = {
        "role": "assistant",
        "from": "gpt",
        "content": "",
        "value": "4",
        "reasoning_content": "",
        "thinking": "why",
    }
    call = {"role": "assistant", "content": None, "tool_calls": [], "function_call": {"name": "f", "arguments": {}}}
    found = parse({"messages": [PLAIN[0], message, PLAIN[0], call], "functions": [{"name": "f"}]})
    assert isinstance(found, Conversation)
    assert (found.messages[1]["content"], found.messages[1]["reasoning_content"]) == ("4", "why")
    assert found.messages[3]["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]
    assert found.tools == [{"type": "function", "function": {"name": "f"}}]


def test_text_parts_are_joined_and_null_keys_dropped() -> None:
    """Content in text parts equals the same content in one string, and a null key equals an absent one."""
    content = [{"type": "text", "text": "he"}, "ll", {"type": "input_text", "text": "o"}]
    found = parse({"messages": [{"role": "user", "content": content, "tool_calls": None}, PLAIN[1]]})
    assert found == parse(chat("hello", "4"))


def test_texts_and_token_rows_are_themselves() -> None:
    """A text is a document; ids come with their mask, in either convention, one row or several."""
    assert parse({"text": "once"}) == Document("once")
    for record in (
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, True], "text": "x"},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1]},
        {"messages": PLAIN, "rows": [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}]},
    ):
        found = parse(record)
        assert isinstance(found, TokenRows)
        ((ids, mask),) = found.rows
        assert (ids.tolist(), mask.tolist()) == ([5, 6, 7], [False, True, True])
    rows = [{"input_ids": [1, 2], "loss_mask": [0, 1]}, {"input_ids": [3], "loss_mask": [1]}]
    found = parse({"rows": rows})
    assert isinstance(found, TokenRows) and len(found.rows) == 2
    assert found.hash != parse({"rows": rows[:1]}).hash


def user_says(content: Any) -> dict[str, Any]:
    """A record whose user message has this content."""
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, "no conversation: keys seen: none"),
        ({"id": 1, "messages": None}, "no conversation: `messages` is null; keys seen: id, messages"),
        ({"chosen": PLAIN, "rejected": PLAIN}, "no conversation: keys seen: chosen, rejected"),
        ({"messages": []}, "empty conversation"),
        ({"messages": "hi"}, "no list of messages: `messages` is a JSON string"),
        ({"messages": ["hi"]}, "message is not an object: message 1 is a JSON string"),
        ({"messages": [{"value": "user"}]}, "message without role: message 1; keys seen: content"),
        ({"messages": PLAIN, "conversations": PLAIN[:1]}, "two conversations: `messages` and `conversations` differ"),
        ({"prompt": "a", "response": "b", "completion": "c"}, "two answers: `response` and `completion`"),
        ({"prompt": 4, "response": "b"}, "no list of messages: `prompt` is a JSON number"),
        ({"instruction": [], "input": "x"}, "content is not text: `instruction` or `input` is no string"),
        (user_says(None), "missing content: message 1 (user)"),
        (user_says(4), "content is not text: message 1 holds a JSON number"),
        (user_says([{"type": "image", "url": "x"}]), "content is not text: message 1 has a part of type 'image'"),
        (user_says([{"type": "input_audio"}]), "content is not text: message 1 has a part of type 'input_audio'"),
        (user_says([{"type": "text"}]), "content is not text: message 1 has a part without text"),
        (user_says([{"text": "q", "image": "x.png"}]), "content is not text: message 1 has a part of type 'image'"),
        (
            user_says([{"type": "text", "text": "q", "image_url": "x"}]),
            "content is not text: message 1 has a part of type 'image_url'",
        ),
        ({**user_says("q"), "image_path": "a.png"}, "content is not text: the row has `image_path`"),
        ({"instruction": "a", "prompt": "b", "response": "c"}, "two questions: `prompt` and `instruction`"),
        (
            {"input_ids": [1, 0], "loss_mask": [1, 0], "attention_mask": [1, 0]},
            "bad token row: `attention_mask` says that it is padded: give rows without padding",
        ),
        ({**user_says("<image>"), "image": "a.png"}, "content is not text: the row has `image`"),
        ({"messages": [{**PLAIN[0], "images": ["a.png"]}]}, "content is not text: message 1 has `images`"),
        ({"messages": [{**PLAIN[1], "thinking": {}}]}, "content is not text: message 1: `thinking` is a JSON object"),
        ({"text": 4}, "content is not text: `text` is a JSON number"),
        ({"text": " \n"}, "empty text"),
        ({"input_ids": [1]}, "bad token row: `input_ids` needs `loss_mask`; keys seen: input_ids"),
        ({"input_ids": [], "loss_mask": []}, "empty conversation: `input_ids` is empty"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "bad token row: 2 ids and a mask of 1"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "bad token row: `loss_mask` holds other values than 0 and 1"),
        ({"input_ids": [1, 2], "labels": [1, 3]}, "bad token row: `labels` holds other values than the ids and -100"),
        ({"input_ids": [1.5], "loss_mask": [1]}, "bad token row: `input_ids` is no list of integers"),
        ({"input_ids": [[1]], "loss_mask": [1]}, "bad token row: `input_ids` is no list of integers"),
        ({"input_ids": [1, [2]], "loss_mask": [1, 1]}, "bad token row: `input_ids` is no list of integers"),
        ({"input_ids": [10**30], "loss_mask": [1]}, "bad token row: `input_ids` is no list of integers"),
        ({"input_ids": "12", "loss_mask": [1, 1]}, "bad token row: `input_ids` is no list of integers"),
        ({"rows": [4]}, "bad token row: `rows` is no list of objects with `input_ids` and `loss_mask`"),
        (
            {"system": "a", "system_prompt": "b", "messages": PLAIN},
            "two system prompts: `system` and `system_prompt` differ",
        ),
        (
            {"messages": [{**PLAIN[1], "reasoning": "a", "thinking": "b"}]},
            "two readings of a message: message 1: `reasoning` and `thinking` differ",
        ),
        (
            {"messages": [{**PLAIN[0], "value": "3+3?"}]},
            "two readings of a message: message 1: `content` and `value` differ",
        ),
        (
            {"messages": [{**PLAIN[0], "from": "gpt"}]},
            "two readings of a message: message 1: `role` and `from` differ",
        ),
        (
            {"messages": [{**PLAIN[1], "tool_calls": [{"name": "f"}], "function_call": {"name": "g"}}]},
            "two readings of a message: message 1: calls stand in two places",
        ),
        ({**chat("a", "b"), "tools": "{"}, "bad tools: `tools` is a string that is not JSON"),
        ({**chat("a", "b"), "tools": {"a": 1}}, "bad tools: `tools` is a JSON object; a list was wanted"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "bad tool calls: message 1: the arguments are a string that is not JSON",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": {}}]},
            "bad tool calls: message 1: `tool_calls` is not a list of objects",
        ),
        (
            {"messages": [{"from": "function_call", "value": "add(2)"}]},
            "bad tool calls: message 1: a function_call that is not JSON",
        ),
    ],
)
def test_records_that_are_no_conversation_are_rejected_with_what_was_seen(record: dict[str, Any], reason: str) -> None:
    """Each way in which a record cannot be used has its own reason."""
    with pytest.raises(Rejection) as caught:
        parse(record)
    assert caught.value.reason == reason


def test_an_unknown_role_names_those_that_are_known() -> None:
    """A role of another dialect is not guessed."""
    with pytest.raises(Rejection, match="unknown role: message 1 has 'critic'; known: assistant, chatgpt, developer"):
        parse({"messages": [{"role": "critic", "content": "x"}]})


def test_the_hash_depends_on_content_alone() -> None:
    """Rows that differ in other columns or in key order share a hash; other content has another."""
    one = parse({"id": 1, **chat("a", "b")})
    two = parse({"messages": [{"content": "a", "role": "user"}, {"content": "b", "role": "assistant"}]})
    assert one.hash == two.hash != parse(chat("a", "c")).hash


def test_a_lone_surrogate_is_rejected() -> None:
    """A string that UTF-8 cannot hold rejects the row."""
    for record in (chat("q", "a\ud800"), {"text": "a\ud800"}):
        with pytest.raises(Rejection, match="invalid Unicode: lone surrogate"):
            _ = parse(record).hash


def test_a_reason_is_short_printable_and_survives_a_process_border() -> None:
    """Details from untrusted data lose control characters and length, and pickle to an equal rejection."""
    rejection = Rejection("kind", "\x1b[31m" + "x" * 1000)
    assert rejection.reason == "kind: \\x1b[31m" + "x" * 292
    copy = pickle.loads(pickle.dumps(rejection))
    assert (copy.kind, copy.detail, copy.reason) == (rejection.kind, rejection.detail, rejection.reason)
