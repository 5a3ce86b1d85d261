"""Patterns of many words, and texts in pieces that are tokenized once."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.data.dialects import Conversation, Rejection
from paceline.data.encoder import Encoder, _cut, any_of
from tests.unit.data.conftest import toy

LETTERS = st.text("ab<|>.", max_size=6)


@given(words=st.lists(LETTERS.filter(lambda word: len(word) > 1), max_size=8), text=st.text("ab<|>.", max_size=30))
def test_any_of_finds_the_longest_word(words: list[str], text: str) -> None:
    """The pattern finds what alternatives find that are tried from the longest on."""
    longest_first = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or "(?!)"
    assert any_of(words).findall(text) == re.findall(longest_first, text)


def test_any_of_leaves_single_characters_out() -> None:
    """A control token of one character, as some tokenizers have, is no mark in what people type."""
    assert any_of(["a", ""]).search("a") is None
    assert any_of(["a", "ab"]).findall("a ab") == ["ab"]


@given(texts=st.lists(LETTERS, max_size=5), grow=st.booleans())
def test_cut_texts_are_whole_again(texts: list[str], grow: bool) -> None:
    """Pieces make up their text, begin with a match but for the first, and hold no other match."""
    if grow:  # each text begins with the one before
        texts = ["".join(texts[: i + 1]) for i in range(len(texts))]
    pattern = any_of(["<|", "|>"])
    for text, pieces in zip(texts, _cut(texts, pattern), strict=True):
        starts = [match.start() for match in pattern.finditer(text)]
        assert "".join(pieces) == text
        assert [sum(map(len, pieces[:i])) for i in range(1, len(pieces))] == [start for start in starts if start]


def test_the_lengths_that_a_tokenizer_file_asks_for_are_not_kept() -> None:
    """A file that was saved with truncation or padding would cut rows in silence."""
    tokenizer = toy()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=20)
    (ids,) = Encoder(tokenizer, lambda _: False).encode([(["abcdef"], "")])[0]
    assert bytes(ids.tolist()) == b"abcdef"


def test_a_typed_control_token_is_rejected_where_texts_apart_are_other_texts() -> None:
    """A tokenizer that begins every text with a space of its own would put one behind the template's header."""
    vocabulary = {c: i for i, c in enumerate("\u2581ab2\n")} | {"<unk>": 5}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=backend), lambda _: False)
    said = Conversation([{"role": "user", "content": "a <end> b"}])
    with pytest.raises(Rejection, match="control token in a message: '<end>'; this tokenizer has no way"):
        encoder.shield(said)
    assert Encoder(toy(), lambda _: False).shield(Conversation([{"role": "user", "content": "a <|im_end|>"}]))[2]
