"""`paceline inspect`: rows of a data set as a person checks them, every supervised and every control token visible."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.text import Text
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from paceline.data.dataset import TOKENIZER_DIR, Dataset, tokenizer_fingerprint
from paceline.errors import DataError

SUPERVISED = "bold green"
LEGEND = Text.assemble(
    ("supervised", SUPERVISED), "  context  ", ("control token", "reverse"), "  control characters as symbols (\u21b5)"
)

_VISIBLE = {"\n": "\u21b5\n", "\t": "\u2192\t", "\x7f": "\u2421"}
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens of one kind.

    Attributes:
        text: What they decode to.
        supervised: Whether the loss counts them.
        control: Whether this is one added token of the tokenizer, such as an end of turn.
    """

    text: str
    supervised: bool
    control: bool


def load_own_tokenizer(dataset: Dataset, folder: Path, other: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer kept in a data set folder, or another one that gives the same ids.

    Raises: DataError if it cannot be loaded or is not the one that the rows were made with.
    """
    name = other or str(folder / TOKENIZER_DIR)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"tokenizer {name} cannot be loaded: pass --tokenizer DIR") from error
    if tokenizer_fingerprint(tokenizer) != dataset.info.tokenizer_fingerprint:
        raise DataError(f"tokenizer {name} is not the one that {folder} was prepared with ({dataset.info.tokenizer})")
    return tokenizer


def row_record(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, row: int) -> dict[str, Any]:
    """A row as plain JSON values: row, source, input_ids, loss_mask (0 and 1), text."""
    ids, mask = dataset.row(row)
    return {
        "row": row,
        "source": dataset.source(row),
        "input_ids": ids.tolist(),
        "loss_mask": mask.int().tolist(),
        "text": _decode(tokenizer, ids.tolist()),
    }


def row_spans(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, row: int) -> list[Span]:
    """A row as runs of tokens of one kind; added tokens stand alone."""
    ids, mask = dataset.row(row)
    added = np.isin(ids.numpy(), list(tokenizer.added_tokens_decoder))
    # A control token's own position keeps it apart from its neighbours.
    kinds = [(bool(s), i if c else -1) for i, (s, c) in enumerate(zip(mask.tolist(), added.tolist(), strict=True))]
    spans = []
    start = 0
    for (supervised, control), run in groupby(kinds):
        end = start + len(list(run))
        spans.append(Span(_decode(tokenizer, ids[start:end].tolist()), supervised, control >= 0))
        start = end
    return spans


def show_row(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, row: int) -> Group:
    """A row for the terminal: a line with its source and counts, then its text in the colours of `LEGEND`."""
    num_tokens, num_supervised = int(dataset.lengths[row]), int(dataset.row(row)[1].sum())
    header = Text.assemble(
        (f"row {row}", "bold"),
        f"  {visible(dataset.source(row))}  {num_tokens} tokens, {num_supervised} supervised "
        f"({num_supervised / num_tokens:.0%})",
    )
    body = Text()
    for span in row_spans(dataset, tokenizer, row):
        styles = [SUPERVISED] * span.supervised + ["reverse"] * span.control
        body.append(visible(span.text), " ".join(styles))
    return Group(header, body, Text())


def visible(text: str) -> str:
    """The text with control characters, invisible and direction-changing ones as symbols or escapes."""
    return "".join(_visible_character(c) for c in text)


def _visible_character(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    if character < " ":
        return chr(0x2400 + ord(character))
    if unicodedata.category(character) in _HIDDEN_CATEGORIES:
        return ascii(character)[1:-1]
    return character


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
