"""What published templates do, by small ones of our own: the target is fed, and says, what it would at a server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from paceline.data.chat import ChatTokenizer, TokenRow
from paceline.data.dialects import Conversation, Rejection
from paceline.data.templates import template_options
from tests.unit.data.conftest import toy

CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|image_pad|>", "<|bos|>")
START, END, PAD, IMAGE = 256, 257, 258, 265
FOLDER = TemporaryDirectory(prefix="paceline_test_")

WORDS = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=12)
TYPED = st.lists(WORDS | st.sampled_from([*CONTROL, "<think>", "<b>"]), max_size=3).map("".join)
SOME_WORDS = WORDS.filter(str.strip)


@cache
def tokenizer(name: str, stops: tuple[int, ...]) -> PreTrainedTokenizerBase:
    """The toy tokenizer with a template, beside a generation config with these stop ids, the first also its own."""
    loaded = toy(name)
    if stops:
        loaded.eos_token = decode(np.array(stops[:1]))
        folder = Path(FOLDER.name) / "_".join(map(str, stops))
        folder.mkdir(exist_ok=True)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(stops)}))
        loaded.name_or_path = str(folder)
    return loaded


@cache
def chat_tokenizer(name: str, thinking: bool | None = None, stops: tuple[int, ...] = ()) -> ChatTokenizer:
    """Rows under a template of ours."""
    return ChatTokenizer(tokenizer(name, stops), thinking)


def with_template(text: str) -> ChatTokenizer:
    """Rows under a template given as text."""
    loaded = toy()
    loaded.chat_template = text
    return ChatTokenizer(loaded)


def conversation(*messages: tuple[str, str] | dict[str, Any]) -> Conversation:
    """A conversation from roles and contents, or whole messages."""
    return Conversation([m if isinstance(m, dict) else {"role": m[0], "content": m[1]} for m in messages])


def answer(content: str, **keys: Any) -> dict[str, Any]:
    """An assistant message with more keys than its content."""
    return {"role": "assistant", "content": content, **keys}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A tool call."""
    return {"function": {"name": name, "arguments": arguments}}


def stretches(row: TokenRow) -> list[tuple[int, int]]:
    """Start and end of each supervised stretch."""
    edges = np.flatnonzero(np.diff(row.loss_mask.astype(int), prepend=0, append=0))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def said(rows: list[TokenRow]) -> list[list[str]]:
    """What is supervised in each row, decoded."""
    return [[decode(row.input_ids[start:end]) for start, end in stretches(row)] for row in rows]


def decode(ids: np.ndarray) -> str:
    """Text of ids."""
    return str(toy().decode(ids, skip_special_tokens=False))


def rejection(chat: ChatTokenizer, talk: Conversation) -> str:
    """Why a conversation is rejected."""
    with pytest.raises(Rejection) as caught:
        chat.rows(talk)
    return caught.value.reason


def server_ids(name: str, messages: list[dict[str, Any]], thinking: bool | None) -> list[int]:
    """Ids of the prompt as a server feeds it, control tokens that somebody typed being text.

    A character stands for each of these while the template renders; the id of a byte is its value.
    """
    stand_ins = {chr(0xFDD0 + i): control for i, control in enumerate(CONTROL)}
    shown: list[Any] = []
    for message in messages:
        content = message["content"]
        for character, control in stand_ins.items():
            content = content.replace(control, character)
        reasoning = {"thinking": message["reasoning_content"]} if "reasoning_content" in message else {}
        in_text = [
            {"function": {**call["function"], "arguments": compact(call)}} for call in message.get("tool_calls", [])
        ]
        calls = {"tool_calls": in_text} if name == "text_arguments" else {}
        parts = [{"type": "text", "text": content}] if name == "parts" else content
        shown.append({**message, **reasoning, **calls, "content": parts})
    loaded = tokenizer(name, ())
    options: dict[str, Any] = dict(template_options(thinking))
    (text,) = loaded.apply_chat_template([shown], tokenize=False, add_generation_prompt=True, **options)
    pieces = re.split(f"([{''.join(stand_ins)}])", text)
    ids: list[list[int]] = [list(stand_ins[p].encode()) if p in stand_ins else loaded(p)["input_ids"] for p in pieces]  # type: ignore[arg-type, misc]
    return sum(ids, [])


def compact(call: dict[str, Any]) -> str:
    """Arguments of a call as clients of servers write them."""
    return json.dumps(call["function"]["arguments"], ensure_ascii=False, separators=(",", ":"))


def written(message: dict[str, Any], form: str) -> str:
    """The calls of a message, as templates with `tojson` write them."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return "".join(form % (f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in functions)


PLAIN = st.builds(answer, WORDS)
REASONED = st.builds(answer, WORDS, reasoning_content=SOME_WORDS)
INLINE = st.builds(lambda reason, words: answer(f"<think>\n{reason}\n</think>{words}"), SOME_WORDS, WORDS)
CALL = st.builds(
    lambda name, arguments: {"function": {"name": name, "arguments": arguments}},
    st.sampled_from(["mul", "f"]),
    st.dictionaries(WORDS, WORDS, max_size=2),
)
CALLING = st.builds(answer, WORDS, tool_calls=st.lists(CALL, min_size=1, max_size=2))
CALLING_ONCE = st.builds(answer, WORDS, tool_calls=st.lists(CALL, min_size=1, max_size=1))


class Case(NamedTuple):
    """A template, the answers it is given, and what the target says of each, the role of the next message given."""

    name: str
    answers: st.SearchStrategy[dict[str, Any]]
    says: Callable[[dict[str, Any], str], str]
    thinking: bool | None = None
    stops: tuple[int, ...] = ()
    one_row: bool = False


CASES = {
    "plain": Case("chatml_plain", PLAIN, lambda m, _: f"{m['content']}<|im_end|>", one_row=True),
    "generation tags": Case("chatml_generation", PLAIN, lambda m, _: f"{m['content']}<|im_end|>", one_row=True),
    "contents in parts": Case("parts", PLAIN, lambda m, _: f"{m['content']}<|im_end|>", one_row=True),
    "reasoning removed from history": Case(
        "chatml_reasoning",
        PLAIN | REASONED,
        lambda m, _: f"<think>\n{m.get('reasoning_content', '')}\n</think>\n\n{m['content']}<|im_end|>",
    ),
    "thinking off": Case("chatml_reasoning", PLAIN, lambda m, _: f"{m['content']}<|im_end|>", thinking=False),
    "empty block not in answers": Case("reasoning_skipped", PLAIN, lambda m, _: f"{m['content']}<|im_end|>"),
    "reasoning opened by the prompt": Case(
        "reasoning_skipped",
        REASONED,
        lambda m, _: f"{m['reasoning_content']}\n</think>\n\n{m['content']}<|im_end|>",
        thinking=True,
        one_row=True,
    ),
    "reasoning cut from answers": Case(
        "reasoning_opened", INLINE, lambda m, _: m["content"].removeprefix("<think>\n") + "<|im_end|>"
    ),
    "tool calls": Case(
        "chatml_tools",
        PLAIN | CALLING,
        lambda m, _: (
            m["content"] + written(m, '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>') + "<|im_end|>"
        ),
        one_row=True,
    ),
    "arguments as text": Case(
        "text_arguments",
        PLAIN | CALLING,
        lambda m, _: (
            m["content"]
            + "".join(
                f"<tool_call>{call['function']['name']}\n{compact(call)}\n</tool_call>"
                for call in m.get("tool_calls", [])
            )
            + "<|im_end|>"
        ),
        one_row=True,
    ),
    "the next role ends a turn": Case(
        "role_ends_turn",
        PLAIN | CALLING,
        lambda m, role: (
            m["content"]
            + written(m, "<tool_call>%s%s</tool_call>")
            + ("<|image_pad|>" if role == "tool" else "<|im_start|>")
        ),
        stops=(START, IMAGE),
        one_row=True,
    ),
    "a turn goes on after calls": Case(
        "open_calls",
        PLAIN | CALLING_ONCE,
        lambda m, _: m["content"] + (written(m, "<tool_call>%s%s<|image_pad|>") or "<|im_end|>"),
        stops=(END, IMAGE),
    ),
    "another end for the last turn": Case(
        "channels",
        PLAIN | REASONED,
        lambda m, _: (
            (f" why\n{m['reasoning_content']}<|im_end|><|im_start|>assistant" if "reasoning_content" in m else "")
            + f" final\n{m['content']}<|endoftext|>"
        ),
        stops=(PAD,),
    ),
    "the system prompt moves": Case(
        "system_moves", st.builds(answer, SOME_WORDS), lambda m, _: f"{m['content']}<|endoftext|>", stops=(PAD,)
    ),
}


@st.composite
def talks(draw: st.DrawFn, case: Case) -> Conversation:
    """A conversation of any length: typed control tokens, results after calls, perhaps a question at the end."""
    system = draw(st.none() | TYPED.filter(str.strip))
    messages = [] if system is None else [{"role": "system", "content": system}]
    for reply in draw(st.lists(case.answers, min_size=1, max_size=4)):
        messages += [{"role": "user", "content": draw(TYPED)}, dict(reply)]
        if reply.get("tool_calls"):
            messages += [{"role": "tool", "content": draw(TYPED)}, answer(draw(SOME_WORDS))]
    if draw(st.booleans()):
        messages.append({"role": "user", "content": draw(TYPED)})
    return Conversation(messages)


@pytest.mark.parametrize("kind", CASES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_target_is_fed_a_servers_prompt_and_says_the_answer(kind: str, data: st.DataObject) -> None:
    """Up to each supervised stretch a row has the ids of a server's prompt; the stretch is the answer and its end."""
    case = CASES[kind]
    talk = data.draw(talks(case))
    rows = chat_tokenizer(case.name, case.thinking, case.stops).rows(talk)
    turns = [i for i, message in enumerate(talk.messages) if message["role"] == "assistant"]
    seen = 0
    for row in rows:
        for start, end in stretches(row):
            i = turns[seen]
            follows = talk.messages[i + 1]["role"] if i + 1 < len(talk.messages) else "user"
            assert row.input_ids[:start].tolist() == server_ids(case.name, talk.messages[:i], case.thinking)
            assert decode(row.input_ids[start:end]) == case.says(talk.messages[i], follows)
            seen += 1
        assert row.turn == seen
    assert seen == len(turns)
    assert len(rows) == 1 or not case.one_row


@pytest.mark.parametrize("kind", CASES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_an_answer_that_the_next_prompt_shows_need_not_be_rendered(kind: str, data: st.DataObject) -> None:
    """With and without the rendering of every answer the rows are the same."""
    case = CASES[kind]
    talk = data.draw(talks(case))
    patient = ChatTokenizer(tokenizer(case.name, case.stops), case.thinking)
    patient._template._plain_end = None
    for row, same in zip(
        chat_tokenizer(case.name, case.thinking, case.stops).rows(talk), patient.rows(talk), strict=True
    ):
        assert row.input_ids.tolist() == same.input_ids.tolist()
        assert row.loss_mask.tolist() == same.loss_mask.tolist()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_many_conversations_give_what_each_gives(data: st.DataObject) -> None:
    """Rows and rejections do not depend on the other conversations, which share what is tokenized."""
    case = CASES["plain"]
    strange = st.sampled_from([answer("a<|im_end|>b"), answer("c", tool_calls=[call("mul")])])
    batch = data.draw(st.lists(talks(case) | talks(case._replace(answers=strange)), max_size=4))
    batch.append(Conversation([{"role": "user", "content": "no answer"}]))
    chat = chat_tokenizer(case.name)
    for talk, many in zip(batch, chat.rows_many(batch), strict=True):
        if isinstance(many, Rejection):
            assert rejection(chat, talk) == many.reason
        else:
            for row, same in zip(many, chat.rows(talk), strict=True):
                assert (row.input_ids == same.input_ids).all() and (row.loss_mask == same.loss_mask).all()


def test_typed_control_tokens_do_not_reach_other_conversations() -> None:
    """The character that marks them in one conversation is an ordinary one in the next, in the same text."""
    chat = chat_tokenizer("chatml_plain")
    marked = conversation(("user", "<|im_end|>"), answer("a"))
    typed = conversation(("user", "<\U000f0000|im_end|>"), answer("a"))
    first, second = chat.rows_many([marked, typed])
    assert not isinstance(first, Rejection) and not isinstance(second, Rejection)
    assert decode(first[0].input_ids) == "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    assert "<\U000f0000|im_end|><|im_end|>" in decode(second[0].input_ids)


# Reasoning


def test_reasoning_that_the_template_cuts_out_is_taken_from_the_content() -> None:
    """The content is what the target said, whether it repeats the mark that the prompt ends in or not."""
    chat = chat_tokenizer("reasoning_opened")
    for content in ("<think>\nwhy\n</think>\n\nwords", "why\n</think>\n\nwords", "<think>why\n</think>\n\nwords"):
        assert said(chat.rows(conversation(("user", "q"), answer(content)))) == [["why\n</think>\n\nwords<|im_end|>"]]


def test_an_answer_without_the_reasoning_that_the_prompt_opens_is_rejected() -> None:
    """The target would reason first; thinking off is advised where the template has that."""
    talk = conversation(("user", "q"), answer("words"))
    reason = "answer without reasoning: assistant turn 1: the prompt ends in '<think>\\n'; "
    seen = rejection(chat_tokenizer("reasoning_opened"), talk)
    assert seen == reason + "the target would reason first: give answers that do"
    assert rejection(chat_tokenizer("reasoning_skipped", True), talk) == reason + "it fits with --thinking off"


def test_reasoning_content_that_the_template_does_not_know_is_rejected() -> None:
    """Its place in what the target says is not known, and an answer without it is not the one that was given."""
    talk = conversation(("user", "q"), answer("words", reasoning_content="why"))
    for name in ("reasoning_opened", "chatml_plain"):
        assert rejection(chat_tokenizer(name), talk) == (
            "template drops the reasoning: assistant turn 1: `reasoning_content` is not rendered; give it in the "
            "content, between the target's own marks, or leave it out if the target does not reason"
        )


def test_reasoning_after_a_prompt_that_skips_it_is_rejected() -> None:
    """The prompt contradicts the answer, and thinking on is advised."""
    talk = conversation(("user", "q"), answer("words", reasoning_content="why"))
    reason = rejection(chat_tokenizer("reasoning_skipped", False), talk)
    assert reason.startswith("template changes the prompt: assistant turn 1: at character ")
    assert reason.endswith("; it fits with --thinking on")
    skips = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' if m['role'] == 'user' else "
        "'<think></think>' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<think></think>{% endif %}"
    )
    talk = conversation(("user", "q"), answer("<think>why</think>words"))
    assert rejection(with_template(skips), talk) == (
        "answer with reasoning: assistant turn 1: the prompt ends in '</think>'; "
        "the target would not reason: give answers that do not"
    )


@pytest.mark.parametrize("lead", ["<think></think>", "</think>"])
def test_an_empty_block_before_an_answer_with_reasoning_is_left_out(lead: str) -> None:
    """A template that does not see the reasoning in a content puts an empty block before it."""
    text = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' if m['role'] == 'user' else "
        f"'assistant:{lead}' + m['content'] + '<|im_end|>' }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    talk = conversation(("user", "q"), answer("<think>why</think>words"))
    assert said(with_template(text).rows(talk)) == [["<think>why</think>words<|im_end|>"]]


def test_marks_of_another_family_are_words() -> None:
    """Reasoning between marks that the template does not know is not looked for."""
    talk = conversation(("user", "q"), answer("[THINK]why[/THINK]words"))
    assert said(chat_tokenizer("chatml_plain").rows(talk)) == [["[THINK]why[/THINK]words<|im_end|>"]]
    assert rejection(chat_tokenizer("reasoning_opened"), talk).startswith(("answer without", "template changes"))


# Ends of turns


def test_the_next_role_ends_the_last_turn_too() -> None:
    """Where no message follows, the turn ends as it would before a question, or after calls before a result."""
    chat = chat_tokenizer("role_ends_turn", stops=(START, IMAGE))
    assert said(chat.rows(conversation(("user", "q"), answer("words")))) == [["words<|im_start|>"]]
    calling = answer("", tool_calls=[call("mul", a=1)])
    talk = conversation(("user", "q"), calling)
    assert said(chat.rows(talk)) == [['<tool_call>mul{"a": 1}</tool_call><|image_pad|>']]


def test_a_role_that_does_not_stop_generation_ends_nothing() -> None:
    """Without a generation config nobody knows that the next role's token ends a turn."""
    rows = chat_tokenizer("role_ends_turn").rows(conversation(("user", "q"), answer("words"), ("user", "r")))
    assert said(rows) == [["words"]]


def test_generation_stops_at_the_first_stop_token() -> None:
    """What a template puts after it, as a second message in the same turn, is not said."""
    text = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>assistant:more<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert said(with_template(text).rows(conversation(("user", "q"), answer("words")))) == [["words<|im_end|>"]]


def test_a_token_that_closes_the_conversation_is_not_said() -> None:
    """The end of a turn is what follows it in history too, even if no generation config names it."""
    text = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|image_pad|>\n' }}{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt else '<|im_end|>' }}"
    )
    rows = with_template(text).rows(conversation(("user", "q"), answer("a"), ("user", "r"), answer("b")))
    assert said(rows) == [["a<|image_pad|>", "b<|image_pad|>"]]


def test_a_template_that_wants_tools_is_studied_with_some() -> None:
    """What ends a turn is known though the template refuses conversations without tools."""
    text = (
        "{% if not tools %}{{ raise_exception('tools') }}{% endif %}"
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    talk = conversation(("user", "q"), answer("a"))
    chat = with_template(text)
    assert said(chat.rows(Conversation(talk.messages, [{"name": "f"}]))) == [["a<|im_end|>"]]
    assert rejection(chat, talk) == "template refuses the conversation: tools"


# Prompts and refusals


def test_a_system_prompt_that_the_answers_rendering_lacks_stays_in_the_prompt() -> None:
    """The server shows it with the last question; the row of each turn has it there."""
    chat = chat_tokenizer("system_moves", stops=(PAD,))
    rows = chat.rows(conversation(("system", "s"), ("user", "q"), answer("a"), ("user", "r"), answer("b")))
    assert [decode(row.input_ids) for row in rows] == [
        "<|im_start|>s\n\nq<|im_end|>a<|endoftext|>",
        "<|im_start|>q<|im_end|>a<|endoftext|><|im_start|>s\n\nr<|im_end|>b<|endoftext|>",
    ]
    calling = answer("words beside it", tool_calls=[call("mul")])
    assert said(chat.rows(conversation(("system", "s"), ("user", "q"), calling))) == [["mul<|endoftext|>"]]
    assert rejection(chat, conversation(("user", "q"), ("user", "r"), answer("a"))) == (
        "template refuses the conversation: roles must alternate"
    )


def test_history_that_an_answer_changes_is_as_the_prompt_has_it() -> None:
    """Reasoning before a call is shown until the final answer; the answer begins after the header that fits best."""
    text = (
        "{% set ns = namespace(final=-1) %}{% for m in messages %}"
        "{% if m['role'] == 'assistant' and not m['tool_calls'] %}{% set ns.final = loop.index0 %}{% endif %}"
        "{% endfor %}"
        "{% for m in messages %}"
        "{% if m['thinking'] and loop.index0 >= ns.final %}{{ '<|im_start|>assistant:' + m['thinking'] }}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + ':' + m['content'] }}"
        "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{% endfor %}"
        "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    talk = conversation(
        ("user", "q"),
        answer("", tool_calls=[call("mul")], reasoning_content="first"),
        ("tool", "1"),
        answer("a", reasoning_content="second"),
    )
    (row,) = with_template(text).rows(talk)
    assert decode(row.input_ids) == (
        "<|im_start|>user:q<|im_end|><|im_start|>assistant:first<|im_start|>assistant:mul<|im_end|>"
        "<|im_start|>tool:1<|im_end|><|im_start|>assistant:second<|im_start|>assistant:a<|im_end|>"
    )
    assert said([row]) == [
        [":first<|im_start|>assistant:mul<|im_end|>", ":second<|im_start|>assistant:a<|im_end|>"],
    ]


def test_words_that_are_no_header_reject_an_answer_that_lacks_them() -> None:
    """A prompt that begins the answer with words is not continued by a stored answer."""
    text = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:Step by step.{% endif %}"
    )
    assert rejection(with_template(text), conversation(("user", "q"), answer("a"))) == (
        "template changes the prompt: assistant turn 1: at character 26 the generation prompt goes on with "
        "'Step by step.', the rendering with the answer with 'a<|im_end|>'; "
        "another --template FILE may show answers after its generation prompt"
    )


def test_the_first_refusal_is_told() -> None:
    """Where text arguments do not help, the reason is that of the arguments as they were."""
    text = "{{ messages[1]['tool_calls'][0]['function']['arguments'] + 'x' }}{{ 1 // 0 }}"
    reason = rejection(with_template(text), conversation(("user", "q"), answer("", tool_calls=[call("f")])))
    assert reason.startswith("template refuses the conversation: ") and "zero" not in reason


def test_calls_in_other_forms_are_no_error() -> None:
    """A call without a function object is rejected as not rendered."""
    talk = conversation(("user", "q"), answer("", tool_calls=[{"function": "mul"}]))
    assert rejection(chat_tokenizer("chatml_plain"), talk).startswith("template drops tool calls")


@pytest.mark.parametrize("thinking", [None, True, False])
def test_both_names_of_the_thinking_mode_are_passed(thinking: bool | None) -> None:
    """Templates that read either name are switched."""
    text = (
        "{{ enable_thinking if enable_thinking is defined else '-' }}{{ thinking if thinking is defined else '-' }}"
        "{% for m in messages %}{{ m['role'] + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    loaded = toy()
    loaded.chat_template = text
    (row,) = ChatTokenizer(loaded, thinking).rows(conversation(("user", "q"), answer("a")))
    word = "-" if thinking is None else str(thinking)
    assert decode(row.input_ids) == f"{word}{word}userq<|im_end|>assistanta<|im_end|>"


def test_a_conversation_of_thousands_of_turns_is_rejected_before_it_is_rendered() -> None:
    """Every turn renders all before it: time and memory would grow with the square of the turns."""
    turns = [("user", "question"), answer("words")] * 4000
    assert rejection(chat_tokenizer("chatml_plain"), conversation(*turns)).startswith("too many turns: 4000 of ")
