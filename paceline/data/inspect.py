"""`paceline inspect`: rows of a data set as a person checks them, token by token: what trains, and what controls.

The same tokens go to the terminal (`show_row`) and to a page (`dataset_page`, drawn by the report room).
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.text import Text
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from paceline.data.dataset import INFO_FILE, TOKENIZER_DIR, Dataset, tokenizer_fingerprint
from paceline.errors import DataError
from paceline.report import dataset as report
from paceline.report.dataset import Distribution, Gap, Token

MAX_JOINED = 8
"""Tokens shown as one at most: a character has up to four bytes, and a first token may end within one."""

LENGTH_BINS = (12, 24)
"""Fewest and most bins for lengths."""
LENGTHS_PER_BIN = 5
"""Different lengths in the first bin, where there may be fewer bins than most: ends of bins are rounded."""
SHARE_BINS = 20

MAX_PAGE_ROWS = 500
"""Rows of a page; each needs room for something to see."""
PAGE_TOKENS = 80_000
"""Tokens of all rows of a page together, each row an equal part."""
CONTEXT_ENDS = 120
"""Tokens at either end of a long stretch of context that a page shows: what is left out is between them."""
SUPERVISED_ENDS = 800
"""The same for supervised stretches."""

NUM_PROBES = 2000
"""Rows that are looked at for inputs that a sample leaves out."""

SUPERVISED = "bold green"
CONTROL = "reverse"
BOUNDARY = "underline"
"""On every other token, so that each one's extent is seen, that of white space as well."""

_VISIBLE = {"\n": "\u21b5\n", "\t": "\u2192\t", "\x7f": "\u2421", " ": " ", "\u3000": "\u3000"}
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})


def load_own_tokenizer(dataset: Dataset, folder: Path, other: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer kept in a data set folder, or another one that gives the same ids.

    Raises: DataError if it cannot be loaded or is not the one that the rows were made with.
    """
    name = other or str(folder / TOKENIZER_DIR)
    if other is None and not (folder / TOKENIZER_DIR).is_dir():  # a missing folder's path reads as a name on the hub
        raise DataError(f"tokenizer {name} is gone: pass --tokenizer DIR ({dataset.info.tokenizer})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception
        raise DataError(f"tokenizer {name} cannot be loaded: pass --tokenizer DIR") from error
    if tokenizer_fingerprint(tokenizer) != dataset.info.tokenizer_fingerprint:
        raise DataError(f"tokenizer {name} is not the one that {folder} was prepared with ({dataset.info.tokenizer})")
    return tokenizer


def first_rows(dataset: Dataset, wanted: int) -> Sequence[int]:
    """Numbers of the first rows, at most `wanted`."""
    return range(min(wanted, len(dataset)))


def sample_rows(dataset: Dataset, wanted: int) -> Sequence[int]:
    """Numbers of at most `wanted` rows with even distances, some of them in favour of inputs that these leave out."""
    if wanted >= len(dataset):
        return range(len(dataset))
    found = {input_of(dataset, row) for row in _spread(len(dataset), wanted)}
    missed: dict[str, int] = {}
    for row in _spread(len(dataset), NUM_PROBES):
        if (file := input_of(dataset, row)) not in found:
            missed.setdefault(file, row)
    extra = list(missed.values())[: wanted // 2]
    return sorted({*_spread(len(dataset), wanted - len(extra)), *extra})


def _spread(num_rows: int, wanted: int) -> list[int]:
    """At most `wanted` row numbers from the first to the last, as far apart as can be."""
    wanted = min(wanted, num_rows)
    return [i * (num_rows - 1) // max(wanted - 1, 1) for i in range(wanted)]


def input_of(dataset: Dataset, row: int) -> str:
    """The input file that a row comes from."""
    return dataset.source(row).rpartition(":")[0]


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


# Tokens


def row_tokens(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, row: int, start: int = 0, end: int | None = None
) -> Iterator[Token]:
    """The tokens of a row, or of a part of it, with the text that each adds.

    Tokens that decode to nothing, or end within a character, are one with the next: up to `MAX_JOINED`, as long as
    these are of the same kind. (So is one that ends with a U+FFFD of the text itself.) Control tokens stand alone. The
    texts of a row together are what it decodes to; where a kind ends within a character, each side has a U+FFFD.
    """
    all_ids, all_masks = dataset.row(row)
    ids, mask = all_ids.numpy()[start:end], all_masks.numpy()[start:end]
    control = np.isin(ids, list(tokenizer.added_tokens_decoder))
    # Where a token's successor is of another kind, or one of the two is a control token.
    is_last = np.ones(len(ids), dtype=bool)
    is_last[:-1] = (mask[1:] != mask[:-1]) | control[1:] | control[:-1]
    plain = ids.tolist()
    before = begin = 0  # first token of the piece before, which decoders look back on, and of the piece
    for i in range(len(plain)):
        known = _decode(tokenizer, plain[before:begin])
        text = _decode(tokenizer, plain[before : i + 1])
        text = text[len(known) :] if text.startswith(known) else _decode(tokenizer, plain[begin : i + 1])
        is_partial = not text or text.endswith("\ufffd")
        if is_partial and not is_last[i] and i + 1 - begin < MAX_JOINED:
            continue
        yield Token(text, tuple(plain[begin : i + 1]), bool(mask[i]), bool(control[i]))
        before, begin = i + 1 if is_partial else begin, i + 1


def supervised_runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Start and end of each stretch of ones in a bool ``[n]``."""
    changes = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [(int(start), int(end)) for start, end in changes.reshape(-1, 2)]


def visible(text: str) -> str:
    """The text with control characters, invisible, direction-changing and odd-width ones as symbols or escapes."""
    return "".join(_visible_character(c) for c in text)


def _visible_character(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    if character < " ":
        return chr(0x2400 + ord(character))
    if unicodedata.category(character) in _HIDDEN_CATEGORIES:
        return ascii(character)[1:-1]
    return character


def _shown(token: Token) -> str:
    return visible(token.text) or "\u2205"


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    try:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    except OverflowError as error:
        raise DataError("the data set is damaged: it holds ids that no tokenizer has; prepare it again") from error


# In a terminal, or where its output goes


def legend(in_colour: bool, tokens: bool) -> Text:
    """What the marks of `show_row` mean."""
    if not in_colour:
        return Text(
            "\u27e6supervised\u27e7  context  \u2039control token\u203a  control characters as symbols (\u21b5)"
            + "  a|to|ken" * tokens
        )
    parts: list[str | tuple[str, str]] = [("supervised", SUPERVISED), "  context  ", ("control token", CONTROL)]
    parts += ["  control characters as symbols (\u21b5)"]
    if tokens:
        parts += ["  ", ("every", BOUNDARY), " other", (" token", BOUNDARY)]
    return Text.assemble(*parts)


def show_row(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, row: int, in_colour: bool = True, tokens: bool = True
) -> Group:
    """A row for a person: a line with its source and counts, then its text with the marks of `legend`.

    Args:
        in_colour: Whether there are colours and styles; brackets otherwise.
        tokens: Whether each token's extent is marked.
    """
    num_tokens, num_supervised = int(dataset.lengths[row]), int(dataset.row(row)[1].sum())
    header = Text.assemble(
        (f"row {row}", "bold"),
        f"  {visible(dataset.source(row))}  {num_tokens} tokens, {num_supervised} supervised "
        f"({num_supervised / num_tokens:.0%})",
    )
    pieces = row_tokens(dataset, tokenizer, row)
    body = _styled(pieces, tokens) if in_colour else Text(_bracketed(pieces, tokens))
    return Group(header, body, Text())


def _styled(tokens: Iterable[Token], boundaries: bool) -> Text:
    body = Text()
    for place, token in enumerate(tokens):
        styles = [SUPERVISED] * token.supervised + [CONTROL] * token.control
        styles += [BOUNDARY] * (boundaries and place % 2 == 0 and not token.control)
        body.append(_shown(token), " ".join(styles))
    return body


def _bracketed(tokens: Iterable[Token], boundaries: bool) -> str:
    parts = []
    was = Token("", (), False, True)
    for token in tokens:
        if token.supervised != was.supervised:
            parts.append("\u27e6" if token.supervised else "\u27e7")
        elif boundaries and not token.control and not was.control:
            parts.append("|")
        parts.append(f"\u2039{_shown(token)}\u203a" if token.control else _shown(token))
        was = token
    return "".join(parts) + "\u27e7" * was.supervised


# On a page


def dataset_page(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, folder: Path, rows: Sequence[int], chosen: str
) -> str:
    """A page about a data set and some of its rows, as one HTML file.

    Args:
        rows: Numbers of at most `MAX_PAGE_ROWS` rows.
        chosen: How they were chosen, a sentence.
    """
    room = PAGE_TOKENS // max(len(rows), 1)
    supervised = dataset.supervised_lengths()
    return report.dataset_page(
        folder.resolve().name,
        _record(folder),
        length_distribution(dataset.lengths),
        share_distribution(supervised / np.maximum(dataset.lengths, 1)),
        [_page_row(dataset, tokenizer, row, int(supervised[row]), room) for row in rows],
        chosen,
    )


def length_distribution(lengths: np.ndarray) -> Distribution:
    """Histogram of row lengths, int ``[rows]``, in bins that grow with length and end between whole numbers."""
    lengths = np.maximum(lengths, 1)
    low, high = int(lengths.min()), int(lengths.max()) + 1
    wanted = math.log(high / low) / math.log1p(LENGTHS_PER_BIN / low)
    num_bins = round(min(max(wanted, LENGTH_BINS[0]), LENGTH_BINS[1]))
    edges = np.unique(np.rint(np.geomspace(low, high, num_bins + 1)).astype(np.int64))
    return _distribution(lengths, edges)


def share_distribution(shares: np.ndarray) -> Distribution:
    """Histogram of shares from 0 to 1, float ``[rows]``."""
    return _distribution(shares, np.linspace(0, 1, SHARE_BINS + 1))


def _distribution(values: np.ndarray, edges: np.ndarray) -> Distribution:
    counts, _ = np.histogram(values, edges)
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return Distribution(edges.tolist(), counts.tolist(), (low, median, high))


def _record(folder: Path) -> dict[str, Any]:
    """All of prepare.json; its section about the data set is known to be good."""
    record = json.loads((folder / INFO_FILE).read_text(encoding="utf-8"))
    return record if isinstance(record, dict) else {}


def _page_row(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, row: int, num_supervised: int, room: int
) -> report.Row:
    runs = supervised_runs(dataset.row(row)[1].numpy())
    num_tokens = int(dataset.lengths[row])
    parts = _parts(dataset, tokenizer, row, shown_stretches(runs, num_tokens, room))
    return report.Row(row, visible(dataset.source(row)), num_tokens, num_supervised, runs, parts)


def _parts(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, row: int, stretches: list[tuple[int, int]]
) -> Iterator[Token | Gap]:
    """Tokens of some stretches of a row, and the gaps before them."""
    place = 0
    for start, end in stretches:
        # Some tokens more on either side: the stretch may begin and end within a character.
        at = max(start - MAX_JOINED, place)
        for token in row_tokens(dataset, tokenizer, row, at, end + MAX_JOINED):
            begin, at = at, at + len(token.ids)
            if begin < start:
                continue
            if begin >= end:
                break
            if begin > place:
                yield Gap(begin - place)
            yield token._replace(text=_shown(token))
            place = at


def shown_stretches(runs: list[tuple[int, int]], num_tokens: int, room: int) -> list[tuple[int, int]]:
    """Parts of a row to show, start and end of each: all of a short one, and the ends of long stretches of one kind.

    Args:
        runs: Its supervised stretches.
        room: Tokens that are shown at most, from the start on.
    """
    stretches: list[tuple[int, int]] = []
    for start, end, ends in _of_one_kind(runs, num_tokens):
        parts = [(start, end)] if end - start <= 2 * ends else [(start, start + ends), (end - ends, end)]
        for begin, stop in parts:
            stop = min(stop, begin + room)
            room -= stop - begin
            if stretches and stretches[-1][1] == begin:
                stretches[-1] = stretches[-1][0], stop
            elif stop > begin:
                stretches.append((begin, stop))
    return stretches


def _of_one_kind(runs: list[tuple[int, int]], num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Start and end of all stretches, and how much of their ends is shown."""
    place = 0
    for start, end in [*runs, (num_tokens, num_tokens)]:
        yield place, start, CONTEXT_ENDS
        yield start, end, SUPERVISED_ENDS
        place = end
