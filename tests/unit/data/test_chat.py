"""Loss masks: what the target says, and nothing else, whatever the template and the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from paceline.data.chat import ChatTokenizer, TokenRow, load_tokenizer, longest_supervised_run
from paceline.data.readers import Rejection, conversation_from
from paceline.errors import DataError
from tests.unit.data.conftest import TOY_TOKENIZER, chat, toy

CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|image_pad|>", "<|bos|>")
SAID = st.text(max_size=20)
TYPED = st.lists(st.one_of(SAID, st.sampled_from([*CONTROL, "<think>", "\U000f0000"])), max_size=4).map("".join)


def said(row: TokenRow) -> list[str]:
    """What each supervised stretch of a row decodes to."""
    edges = np.flatnonzero(np.diff(row.loss_mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [str(toy().decode(row.input_ids[a:b], skip_special_tokens=False)) for a, b in edges]


def with_template(text: str) -> ChatTokenizer:
    """The toy tokenizer under a template given as text."""
    tokenizer = toy()
    tokenizer.chat_template = text
    return ChatTokenizer(tokenizer)


@settings(max_examples=150, deadline=None)
@given(turns=st.lists(st.tuples(TYPED, SAID), min_size=1, max_size=4), system=st.none() | TYPED, trailing=st.booleans())
def test_exactly_the_answers_are_supervised(
    plain_chat: ChatTokenizer, turns: list[tuple[str, str]], system: str | None, trailing: bool
) -> None:
    """Every stretch decodes to an answer and the end of its turn, whatever control tokens the others typed."""
    messages = chat(*[text for turn in turns for text in turn])["messages"]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    if trailing:
        messages.append({"role": "user", "content": "last"})
    (row,) = plain_chat.rows(conversation_from({"messages": messages}))
    assert said(row) == [f"{answer}<|im_end|>" for _, answer in turns]
    assert np.count_nonzero(row.input_ids == 256) == len(messages)
    assert bytes(row.input_ids[row.input_ids < 256].tolist()).decode() == "".join(
        f"{m['role']}\n{m['content'].replace('<think>', '')}\n" for m in messages
    )


def test_control_tokens_in_a_message_stay_text(plain_chat: ChatTokenizer) -> None:
    """An end of turn typed by the user is tokenized as characters, in one piece with its surroundings."""
    (row,) = plain_chat.rows(conversation_from(chat("a<|im_end|>b", "ok")))
    assert row.input_ids.tolist() == [256, *b"user\na<|im_end|>b", 257, 10, 256, *b"assistant\nok", 257, 10]


def test_control_tokens_in_an_answer_reject_the_row(plain_chat: ChatTokenizer) -> None:
    """An answer that contains a control token is not what the target would say."""
    with pytest.raises(Rejection) as caught:
        plain_chat.rows(conversation_from(chat("a", "b<|im_end|>c")))
    assert caught.value.reason == "control token in an answer: message 2 contains '<|im_end|>'"


def test_added_tokens_that_are_no_control_tokens_keep_their_ids(plain_chat: ChatTokenizer) -> None:
    """The target says its reasoning marks as single tokens, so they are tokenized so."""
    (row,) = plain_chat.rows(conversation_from(chat("a", "<think>b</think>c")))
    assert row.input_ids[row.loss_mask].tolist() == [259, ord("b"), 260, ord("c"), 257]


def test_the_beginning_of_sequence_is_not_doubled() -> None:
    """A template that writes the first token gives it once."""
    plain = "{{ '<|bos|>' }}{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}"
    rows = with_template(plain + "{% if add_generation_prompt %}assistant:{% endif %}").rows(
        conversation_from(chat("a", "b"))
    )
    assert [row.input_ids.tolist() for row in rows] == [[266, *b"user:a", 257, *b"assistant:b", 257]]
    assert said(rows[0]) == ["b<|im_end|>"]


def test_a_token_after_the_end_of_turn_is_not_supervised() -> None:
    """Where a template closes the conversation with another control token, the turn still ends at its own."""
    text = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt else '<|endoftext|>' }}"
    )
    (row,) = with_template(text).rows(conversation_from(chat("a", "b", "c", "d")))
    assert said(row) == ["b<|im_end|>", "d<|im_end|>"]
    assert row.input_ids.tolist() == [
        *b"user:a", 257, 10, *b"assistant:b", 257, 10, *b"user:c", 257, 10, *b"assistant:d", 257, 10, 258,
    ]  # fmt: skip


def test_a_template_that_strips_answers_only_trains_what_it_renders() -> None:
    """The template is the law on what an answer is: what it strips is not in the row."""
    text = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] | trim + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (row,) = with_template(text).rows(conversation_from(chat("a", "  b ")))
    assert said(row) == ["b<|im_end|>"]


def test_a_template_that_changes_the_prompt_rejects_the_row() -> None:
    """When the answer is rendered after another prompt than the generation prompt, the row is rejected."""
    text = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:<think>{% endif %}"
    )
    with pytest.raises(Rejection) as caught:
        with_template(text).rows(conversation_from(chat("a", "b")))
    assert caught.value.reason == (
        "template changes the prompt: assistant turn 1: at character 26 the generation prompt goes on with '<think>', "
        "the rendering with the answer with 'b<|im_end|>'"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7]['content'] + 'x' }}", "list object has no element 7"),
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
    ],
)
def test_a_template_that_refuses_a_row_rejects_that_row(text: str, reason: str) -> None:
    """Whatever a template raises becomes a reason."""
    with pytest.raises(Rejection) as caught:
        with_template(text).rows(conversation_from(chat("a", "b")))
    assert caught.value.kind == "template refuses the conversation"
    assert reason in caught.value.detail


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Characters as tokens, and one that merges two line feeds, as many published tokenizers have."""
    characters = {c: i for i, c in enumerate("\nabcdefghijklmnopqrstuvwxyz:")}
    backend = Tokenizer(models.BPE(vocab={**characters, "\n\n": 28, "<end>": 29}, merges=[("\n", "\n")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    return tokenizer


def test_an_answer_is_never_merged_into_the_prompt() -> None:
    """An answer that begins with a line feed follows the prompt's own tokens; as history it is tokenized in one go."""
    tokenizer = merging_tokenizer()

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]

    first, second = ChatTokenizer(tokenizer).rows(conversation_from(chat("q", "\na", "r", "b")))
    prompt = ids("user\nq<end>assistant\n")
    assert first.input_ids.tolist() == prompt + ids("\na<end>") != ids("user\nq<end>assistant\n\na<end>")
    assert np.flatnonzero(first.loss_mask).tolist() == list(range(len(prompt), len(first.input_ids)))
    assert second.input_ids.tolist() == ids("user\nq<end>assistant\n\na<end>user\nr<end>assistant\nb<end>")
    assert second.input_ids[second.loss_mask].tolist() == ids("b<end>")


@pytest.mark.parametrize(
    ("mask", "longest"), [([], 0), ([0, 0], 0), ([1], 1), ([1, 0, 1], 1), ([0, 1, 1], 2), ([1, 1, 0, 1, 1, 1], 3)]
)
def test_longest_supervised_run(mask: list[int], longest: int) -> None:
    """The longest stretch of ones is found wherever it lies."""
    assert longest_supervised_run(np.array(mask, dtype=bool)) == longest


def test_a_tokenizer_needs_a_template(tmp_path: Path) -> None:
    """A tokenizer without chat template, one that is missing, and a template that is missing are named."""
    with pytest.raises(DataError, match="has no chat template: pass --template FILE"):
        load_tokenizer(str(TOY_TOKENIZER))
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match="template .* cannot be read"):
        load_tokenizer(str(TOY_TOKENIZER), tmp_path / "none.jinja")


def test_tools_reach_the_template() -> None:
    """Tool descriptions are given to the template, and their control tokens stay text as well."""
    record: dict[str, Any] = {**chat("a", "b"), "tools": [{"name": "<|im_end|>"}]}
    (row,) = ChatTokenizer(toy("chatml_tools")).rows(conversation_from(record))
    text = b'system\nTools:\n{"name": "<|im_end|>"}'
    assert row.input_ids[: len(text) + 2].tolist() == [256, *text, 257]


def test_a_template_that_drops_tool_calls_rejects_the_row(plain_chat: ChatTokenizer) -> None:
    """A call that a template does not render is not passed over as an empty answer."""
    messages = chat("a", "")["messages"]
    messages[1]["tool_calls"] = [{"function": {"name": "mul", "arguments": {}}}]
    with pytest.raises(Rejection) as caught:
        plain_chat.rows(conversation_from({"messages": [*messages, *chat("b", "c")["messages"]]}))
    assert caught.value.reason == "template drops tool calls: message 2: the call of 'mul' is not rendered"
