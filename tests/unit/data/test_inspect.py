"""What `inspect` shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from paceline.data.dataset import Dataset
from paceline.data.inspect import Span, load_own_tokenizer, row_record, row_spans, show_row, visible
from paceline.errors import DataError
from tests.unit.data.conftest import TOY_TOKENIZER, RunPrepare, chat, write_lines


@pytest.fixture
def folder(tmp_path: Path, run_prepare: RunPrepare) -> Path:
    """A data set of one row with markup and control characters in it."""
    run_prepare(write_lines(tmp_path / "a.jsonl", chat("[red]\x1b[1m é", "ja\n")))
    return tmp_path / "out"


def test_a_row_as_json_has_ids_mask_and_text(folder: Path) -> None:
    """The record holds the row's number, source, ids, mask as 0 and 1, and its text with control tokens."""
    dataset = Dataset.open(folder)
    ids = [256, *"user\n[red]\x1b[1m é".encode(), 257, 10, 256, *b"assistant\nja\n", 257, 10]
    assert row_record(dataset, load_own_tokenizer(dataset, folder), 0) == {
        "row": 0,
        "source": f"{folder.parent / 'a.jsonl'}:1",
        "input_ids": ids,
        "loss_mask": [0] * (len(ids) - 5) + [1] * 4 + [0],
        "text": "<|im_start|>user\n[red]\x1b[1m é<|im_end|>\n<|im_start|>assistant\nja\n<|im_end|>\n",
    }


def test_spans_separate_supervised_and_control_tokens(folder: Path) -> None:
    """Neighbouring tokens of one kind form a span; control tokens stand alone."""
    dataset = Dataset.open(folder)
    assert row_spans(dataset, load_own_tokenizer(dataset, folder), 0) == [
        Span("<|im_start|>", False, True),
        Span("user\n[red]\x1b[1m é", False, False),
        Span("<|im_end|>", False, True),
        Span("\n", False, False),
        Span("<|im_start|>", False, True),
        Span("assistant\n", False, False),
        Span("ja\n", True, False),
        Span("<|im_end|>", True, True),
        Span("\n", False, False),
    ]


def test_the_terminal_shows_data_as_text(folder: Path) -> None:
    """Markup and escape sequences in the data are printed, not obeyed, and supervised text alone is green."""
    dataset = Dataset.open(folder)
    console = Console(force_terminal=True, color_system="standard", width=200)
    with console.capture() as capture:
        console.print(show_row(dataset, load_own_tokenizer(dataset, folder), 0))
    shown = capture.get()
    assert "[red]\u241b[1m é" in shown
    assert "\x1b[1;32mja\u21b5\x1b[0m" in shown
    assert "\x1b[1;7;32m<|im_end|>\x1b[0m" in shown
    assert shown.count("32m") == 2
    assert "36 tokens, 4 supervised (11%)" in shown


def test_invisible_characters_become_visible() -> None:
    """Control characters are symbols or escapes; text of any script is left alone."""
    assert (
        visible("a\tb\nc\x00\x7f\x85\u202e\u200b\ud800") == "a\u2192\tb\u21b5\nc\u2400\u2421\\x85\\u202e\\u200b\\ud800"
    )
    assert visible("é 漢字 \U0001f600 \u05e9") == "é 漢字 \U0001f600 \u05e9"


def test_another_tokenizer_must_give_the_same_ids(folder: Path, tmp_path: Path) -> None:
    """The original in place of the copy is fine; a missing or different one is refused."""
    dataset = Dataset.open(folder)
    load_own_tokenizer(dataset, folder, str(TOY_TOKENIZER))
    with pytest.raises(DataError, match="cannot be loaded"):
        load_own_tokenizer(dataset, folder, str(tmp_path / "none"))
    changed = load_own_tokenizer(dataset, folder)
    changed.add_tokens(["<new>"])
    changed.save_pretrained(str(tmp_path / "changed"))
    with pytest.raises(DataError, match="is not the one that"):
        load_own_tokenizer(dataset, folder, str(tmp_path / "changed"))
