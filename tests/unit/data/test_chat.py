"""Loss masks: what the target says, and nothing else, whatever the template and the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from paceline.data.chat import ChatTokenizer, TokenRow, find_stop_ids, load_tokenizer, longest_supervised_run
from paceline.data.dialects import Rejection, parse
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
    (row,) = plain_chat.rows(parse({"messages": messages}))
    assert said(row) == [f"{answer}<|im_end|>" for _, answer in turns]
    assert np.count_nonzero(row.input_ids == 256) == len(messages)
    assert bytes(row.input_ids[row.input_ids < 256].tolist()).decode() == "".join(
        f"{m['role']}\n{m['content'].replace('<think>', '')}\n" for m in messages
    )


def test_control_tokens_in_a_message_stay_text(plain_chat: ChatTokenizer) -> None:
    """An end of turn typed by the user is tokenized as characters, in one piece with its surroundings."""
    (row,) = plain_chat.rows(parse(chat("a<|im_end|>b", "ok")))
    assert row.input_ids.tolist() == [256, *b"user\na<|im_end|>b", 257, 10, 256, *b"assistant\nok", 257, 10]


def test_control_tokens_in_an_answer_reject_the_row(plain_chat: ChatTokenizer) -> None:
    """An answer that contains a control token is not what the target would say."""
    with pytest.raises(Rejection) as caught:
        plain_chat.rows(parse(chat("a", "b<|im_end|>c")))
    assert caught.value.reason == "control token in an answer: message 2 contains '<|im_end|>'"


def test_added_tokens_that_are_no_control_tokens_keep_their_ids(plain_chat: ChatTokenizer) -> None:
    """The target says its reasoning marks as single tokens, so they are tokenized so."""
    (row,) = plain_chat.rows(parse(chat("a", "<think>b</think>c")))
    assert row.input_ids[row.loss_mask].tolist() == [259, ord("b"), 260, ord("c"), 257]


def test_the_beginning_of_sequence_is_not_doubled() -> None:
    """A template that writes the first token gives it once."""
    plain = "{{ '<|bos|>' }}{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}"
    rows = with_template(plain + "{% if add_generation_prompt %}assistant:{% endif %}").rows(parse(chat("a", "b")))
    assert [row.input_ids.tolist() for row in rows] == [[266, *b"user:a", 257, *b"assistant:b", 257]]
    assert said(rows[0]) == ["b<|im_end|>"]


def test_a_token_after_the_end_of_turn_is_not_supervised() -> None:
    """Where a template closes the conversation with another control token, the turn still ends at its own."""
    text = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt else '<|endoftext|>' }}"
    )
    (row,) = with_template(text).rows(parse(chat("a", "b", "c", "d")))
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
    (row,) = with_template(text).rows(parse(chat("a", "  b ")))
    assert said(row) == ["b<|im_end|>"]


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
        with_template(text).rows(parse(chat("a", "b")))
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

    first, second = ChatTokenizer(tokenizer).rows(parse(chat("q", "\na", "r", "b")))
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
    (row,) = ChatTokenizer(toy("chatml_tools")).rows(parse(record))
    text = b'system\nTools:\n{"name": "<|im_end|>"}'
    assert row.input_ids[: len(text) + 2].tolist() == [256, *text, 257]


def test_a_template_that_drops_tool_calls_rejects_the_row(plain_chat: ChatTokenizer) -> None:
    """A call that a template does not render is not passed over as an empty answer."""
    messages = chat("a", "")["messages"]
    messages[1]["tool_calls"] = [{"function": {"name": "mul", "arguments": {}}}]
    with pytest.raises(Rejection) as caught:
        plain_chat.rows(parse({"messages": [*messages, *chat("b", "c")["messages"]]}))
    assert caught.value.reason == "template drops tool calls: assistant turn 1: the call of 'mul' is not rendered"


def test_a_conversation_without_an_answer_is_rejected(plain_chat: ChatTokenizer) -> None:
    """There is nothing to learn from questions alone."""
    with pytest.raises(Rejection, match="no assistant turn"):
        plain_chat.rows(parse(chat("a")))


@pytest.mark.parametrize("config", ['{"eos_token_id": [258]}', '{"eos_token_id": 258}'])
def test_a_generation_config_beside_the_tokenizer_ends_turns(config: str, tmp_path: Path) -> None:
    """Ids at which a server stops end a turn, as the tokenizer's own do; without the file its own remain."""
    text = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|endoftext|>more<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (tmp_path / "template.jinja").write_text(text)
    toy().save_pretrained(str(tmp_path))
    for ending in ("<|endoftext|>more<|im_end|>", "<|endoftext|>"):
        (row,) = ChatTokenizer(load_tokenizer(str(tmp_path), tmp_path / "template.jinja")).rows(parse(chat("a", "b")))
        assert said(row) == [f"b{ending}"]
        (tmp_path / "generation_config.json").write_text(config)


def framing_tokenizer(single: str) -> PreTrainedTokenizerFast:
    """The toy tokenizer, framing texts as this post-processor template says."""
    tokenizer = toy()
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    special = [("<|bos|>", 266), ("<|im_end|>", 257)]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    framing = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|im_end|>")
    framing.chat_template = tokenizer.chat_template
    return framing


@pytest.mark.parametrize(
    ("single", "text", "ids", "mask"),
    [
        ("$A", "ab", [*b"ab"], [0, 1]),
        ("$A", "<|bos|>ab", [266, *b"ab"], [0, 1, 1]),
        ("<|bos|> $A", "ab", [266, *b"ab"], [0, 1, 1]),
        ("<|bos|> $A", "<|bos|>ab", [266, *b"ab"], [0, 1, 1]),
        ("<|bos|> $A <|im_end|>", "ab", [266, *b"ab"], [0, 1, 1]),
        ("$A <|im_end|>", "<|bos|>ab", [266, *b"ab"], [0, 1, 1]),
        ("<|bos|> $A", "<think>a", [266, 259, *b"a"], [0, 1, 1]),
        ("<|bos|> $A", "<|bos|>", [266], [0]),
    ],
)
def test_a_document_is_framed_as_the_tokenizer_frames_texts(
    single: str, text: str, ids: list[int], mask: list[int]
) -> None:
    """The first token is there once, an added end is not, and what the text has before nothing is not supervised."""
    row = ChatTokenizer(framing_tokenizer(single)).document(text)
    assert (row.input_ids.tolist(), row.loss_mask.astype(int).tolist(), row.turn) == (ids, mask, 1)
    assert (row.input_ids.dtype, row.loss_mask.dtype) == (np.int32, bool)


@pytest.mark.parametrize("text", ["a<|im_end|>b", "<|bos|>a<|bos|>", "a<|im_end|>"])
def test_control_tokens_in_a_document_reject_it(text: str) -> None:
    """A chat that was written down as text does not tell who said what."""
    with pytest.raises(Rejection) as caught:
        ChatTokenizer(framing_tokenizer("<|bos|> $A")).document(text)
    assert caught.value.kind == "control token in a text"
    assert "give `messages`, or `input_ids` with `loss_mask`" in caught.value.detail


def test_reasoning_marks_that_are_control_tokens_may_stand_in_answers() -> None:
    """A target with such marks says them; a user who types them does not."""
    tokenizer = toy()
    tokenizer.add_special_tokens({"extra_special_tokens": ["[THINK]", "[/THINK]"]})
    start, end = tokenizer.convert_tokens_to_ids(["[THINK]", "[/THINK]"])
    (row,) = ChatTokenizer(tokenizer).rows(parse(chat("[THINK]", "[THINK]b[/THINK]c")))
    assert row.input_ids[row.loss_mask].tolist() == [start, ord("b"), end, ord("c"), 257]
    assert row.input_ids[: -len("\n") - row.loss_mask.sum()].tolist() == [
        256, *b"user\n[THINK]", 257, 10, 256, *b"assistant\n",
    ]  # fmt: skip


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Words that begin with a space mark, as in tokenizers by SentencePiece: a text cut in two has one mark more."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁a", "▁b", "a", "b", ":", "▁:", "\n"]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocabulary, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<s>a:' if m['role'] == 'user' else '<s>b:' }}{{ m['content'] + '</s>' }}"
        "{% endfor %}{% if add_generation_prompt %}<s>b:{% endif %}"
    )
    return tokenizer


def test_a_tokenizer_that_marks_the_beginning_of_texts_is_fed_whole_ones() -> None:
    """Prompt and answer have the ids that they have in one text; an answer is never tokenized by itself."""
    tokenizer = metaspace_tokenizer()

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]

    (row,) = ChatTokenizer(tokenizer).rows(parse(chat("a b", "b", "a", "ab b")))
    first, second = ids("<s>a:a b</s><s>b:"), ids("<s>a:a b</s><s>b:b</s><s>a:a</s><s>b:")
    assert row.input_ids.tolist() == ids("<s>a:a b</s><s>b:b</s><s>a:a</s><s>b:ab b</s>")
    supervised = np.flatnonzero(row.loss_mask).tolist()
    assert supervised == [len(first), len(first) + 1, *range(len(second), len(row.input_ids))]
    assert row.input_ids[len(first)] == ids("ab")[-1] != ids("b")[-1]


def test_stop_ids_come_from_the_tokenizer_and_the_generation_config_beside_it(tmp_path: Path) -> None:
    """A folder without a generation config has the tokenizer's own end alone."""
    tokenizer = toy()
    tokenizer.name_or_path = str(tmp_path)
    assert find_stop_ids(tokenizer) == [257]
    for stops, found in ((258, [257, 258]), ([257, 262], [257, 262])):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        assert find_stop_ids(tokenizer) == found


def test_stop_ids_that_a_hub_cannot_tell_are_not_lost_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """Offline, a hub id may have a generation config that nobody sees: the ends then come from the template alone."""
    tokenizer = toy()
    tokenizer.name_or_path = "org/name"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationConfig, "from_pretrained", raising(OSError("no connection\nto anywhere")))
        assert find_stop_ids(tokenizer) == [257]
        assert "generation_config.json of org/name could not be looked up (no connection)" in caplog.text
        caplog.clear()
        missing = OSError("org/name does not appear to have a file named generation_config.json")
        patch.setattr(GenerationConfig, "from_pretrained", raising(missing))
        assert find_stop_ids(tokenizer) == [257]
        assert not caplog.text


def raising(error: Exception) -> Any:
    """A function that fails."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail
