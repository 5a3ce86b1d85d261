"""What `inspect` shows, and that it shows all of it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from typer.testing import CliRunner

from paceline.cli.inspect import inspect
from paceline.data.dataset import INFO_FILE, Dataset, DatasetWriter, Rows, tokenizer_fingerprint
from paceline.data.inspect import (
    dataset_page,
    first_rows,
    input_of,
    legend,
    length_distribution,
    load_own_tokenizer,
    row_record,
    row_tokens,
    sample_rows,
    share_distribution,
    show_row,
    shown_stretches,
    supervised_runs,
    visible,
)
from paceline.errors import ConfigError, DataError
from paceline.report.dataset import Token
from tests.unit.data.conftest import TOY_TOKENIZER, toy
from tests.unit.report.reader import HOSTILE, VISIBLE, check

START, END = 256, 257  # control tokens of the toy tokenizer, whose other tokens are bytes
Pieces = Iterable[tuple[str | int, bool]]

NASTY = (
    " leading,  double   and trailing \n\n\ttab é ß 漢字かな \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 "
    "\U0001f1eb\U0001f1f7 שלום مرحبا می\u200cخواهم \u202eabc\u202c \x00\x1b[31m\x7f\x85 \ufffd\ufffd x \u3000 \u00a0.\n"
)


def encode(pieces: Pieces, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Ids and loss mask of texts and single ids, each supervised or not."""
    ids: list[int] = []
    mask: list[bool] = []
    for piece, supervised in pieces:
        new = [piece] if isinstance(piece, int) else tokenizer.encode(piece, add_special_tokens=False)
        ids += new
        mask += [supervised] * len(new)
    return ids, mask


def write(folder: Path, tokenizer: PreTrainedTokenizerBase, *rows: Pieces, files: Any = None) -> Dataset:
    """A data set of these rows with its tokenizer; row i is line i + 1 of ``a.jsonl``, or of ``files[i]``."""
    folder.mkdir(exist_ok=True, parents=True)
    writer = DatasetWriter(folder)
    for i, pieces in enumerate(rows):
        ids, mask = (np.array(column) for column in encode(pieces, tokenizer))
        writer.add(Rows.join([(ids, mask, i + 1, i)]), files[i] if files else "a.jsonl")
    writer.close()
    info = writer.describe(
        vocab_size=len(tokenizer),
        tokenizer="toy",
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        template_hash="0" * 64,
        thinking=None,
        max_length=3072,
        on_long="cut",
    )
    (folder / INFO_FILE).write_text(json.dumps({"dataset": info.model_dump()}), encoding="utf-8")
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    return Dataset.open(folder)


CHAT: Pieces = [
    (START, False),
    ("user\n[red]\x1b[1m é", False),
    (END, False),
    ("\n", False),
    (START, False),
    ("assistant\n", False),
    ("ja\n", True),
    (END, True),
    ("\n", False),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set of one row with markup and control characters in it."""
    write(tmp_path / "out", toy(), CHAT)
    return tmp_path / "out"


def sentence_piece() -> PreTrainedTokenizerBase:
    """Words with their spaces before them, and bytes for what is no word, as in SentencePiece."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁lead", "ing", "é", ",", "x", "ab"]
    letters = {word: i for i, word in enumerate(dict.fromkeys([*words, *"theleadingab "]))}
    backend = Tokenizer(models.BPE(letters, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    return tokenizer


TOKENIZERS = {"bytes": toy, "sentencepiece": sentence_piece}


def test_a_row_as_json_has_ids_mask_and_text(folder: Path) -> None:
    """The record holds the row's number, source, ids, mask as 0 and 1, and its text with control tokens."""
    dataset = Dataset.open(folder)
    ids = [START, *"user\n[red]\x1b[1m é".encode(), END, 10, START, *b"assistant\nja\n", END, 10]
    assert row_record(dataset, load_own_tokenizer(dataset, folder), 0) == {
        "row": 0,
        "source": "a.jsonl:1",
        "input_ids": ids,
        "loss_mask": [0] * (len(ids) - 5) + [1] * 4 + [0],
        "text": "<|im_start|>user\n[red]\x1b[1m é<|im_end|>\n<|im_start|>assistant\nja\n<|im_end|>\n",
    }


# Tokens


def test_every_token_has_its_text_and_kind(folder: Path) -> None:
    """Tokens come in order, control tokens marked; those that make a character together are one."""
    tokens = list(row_tokens(Dataset.open(folder), toy(), 0))
    assert tokens[0] == Token("<|im_start|>", (START,), False, True)
    assert tokens[1] == Token("u", (ord("u"),), False, False)
    assert Token("é", (0xC3, 0xA9), False, False) in tokens
    assert tokens[-5:] == [
        *(Token(c, (ord(c),), True, False) for c in "ja\n"),
        Token("<|im_end|>", (END,), True, True),
        Token("\n", (10,), False, False),
    ]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_are_the_row_and_nothing_else(tmp_path: Path, name: str) -> None:
    """The ids of the tokens are the row's, in order, and their texts are what it decodes to."""
    tokenizer = TOKENIZERS[name]()
    control = tokenizer.all_special_ids[-1]
    pieces: Pieces = [(NASTY, False), (NASTY, True), (control, True), (NASTY, False), (control, False), (NASTY, True)]
    dataset = write(tmp_path / "set", tokenizer, pieces)
    tokens = list(row_tokens(dataset, tokenizer, 0))
    ids, mask = encode(pieces, tokenizer)
    assert [i for token in tokens for i in token.ids] == ids
    assert [token.supervised for token in tokens for _ in token.ids] == mask
    assert "".join(token.text for token in tokens) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert all(token.text for token in tokens)
    assert all(len(token.ids) == 1 for token in tokens if token.control)
    assert sum(token.control for token in tokens) == 2
    assert max(len(token.ids) for token in tokens) <= 8
    assert sum(token.text.count("\ufffd") for token in tokens) == 4 * NASTY.count("\ufffd")


def test_a_character_that_is_cut_is_seen_on_both_sides(tmp_path: Path) -> None:
    """Where the mask or the row ends within a character, its bytes do not vanish; nor do ids without text."""
    dataset = write(tmp_path / "set", toy(), [(0xF0, False), (0x9F, True), (0x98, False)], [(100_000, True)])
    texts = [(token.text, token.supervised) for token in row_tokens(dataset, toy(), 0)]
    assert texts == [("\ufffd", False), ("\ufffd", True), ("\ufffd", False)]
    assert list(row_tokens(dataset, toy(), 1)) == [Token("", (100_000,), True, False)]
    assert "\u27e6\u2205\u27e7" in plain(dataset, 1)


def test_a_cut_character_leaves_the_one_before_alone(tmp_path: Path) -> None:
    """Where bytes of several characters are decoded together, one that is cut does not spoil the others."""
    tokenizer = sentence_piece()
    cut = tokenizer.convert_tokens_to_ids("<0xF0>")
    assert isinstance(cut, int)
    dataset = write(tmp_path / "set", tokenizer, [("ß", True), (cut, True)])
    assert [token.text for token in row_tokens(dataset, tokenizer, 0)][-2:] == ["ß", "\ufffd"]


def test_invisible_characters_become_visible() -> None:
    """Control characters and spaces of odd width are symbols or escapes; text of any script is left alone."""
    assert (
        visible("a\tb\nc\x00\x7f\x85\u202e\u200b\ud800\u00a0\u2009")
        == "a\u2192\tb\u21b5\nc\u2400\u2421\\x85\\u202e\\u200b\\ud800\\xa0\\u2009"
    )
    assert visible("é 漢字\u3000 \U0001f600 \u05e9") == "é 漢字\u3000 \U0001f600 \u05e9"


# In a terminal


def colourful(dataset: Dataset, tokens: bool) -> str:
    """The first row as a terminal gets it."""
    console = Console(force_terminal=True, color_system="standard", width=200)
    with console.capture() as capture:
        console.print(show_row(dataset, toy(), 0, tokens=tokens))
    return capture.get()


def plain(dataset: Dataset, row: int = 0, tokens: bool = False) -> str:
    """A row without colours."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(show_row(dataset, toy(), row, in_colour=False, tokens=tokens))
    return capture.get()


def test_the_terminal_shows_data_as_text(folder: Path) -> None:
    """Markup and escape sequences in the data are printed, not obeyed, and supervised text alone is green."""
    shown = colourful(Dataset.open(folder), tokens=False)
    assert "[red]\u241b[1m é" in re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert "\x1b[1;32mj\x1b[0m\x1b[1;32ma\x1b[0m\x1b[1;32m\u21b5\x1b[0m" in shown
    assert "\x1b[1;7;32m<|im_end|>\x1b[0m" in shown
    assert shown.count("32m") == 4
    assert "36 tokens, 4 supervised (11%)" in shown


def test_every_other_token_is_underlined(folder: Path) -> None:
    """Neighbouring tokens differ, so that the extent of each is seen."""
    shown = colourful(Dataset.open(folder), tokens=True)
    assert "u\x1b[4ms\x1b[0me\x1b[4mr\x1b[0m" in shown
    assert re.search(r"\x1b\[1;(4;)?32mj\x1b\[0m\x1b\[1;(4;)?32ma\x1b\[0m", shown)
    assert "\x1b[4" not in colourful(Dataset.open(folder), tokens=False)


def test_without_colours_there_are_brackets(folder: Path) -> None:
    """Where colours are lost, supervised text and control tokens stand in brackets, and tokens apart if wanted."""
    dataset = Dataset.open(folder)
    shown = plain(dataset)
    assert "\x1b" not in shown
    assert shown.splitlines()[1:] == [
        "\u2039<|im_start|>\u203auser\u21b5",
        "[red]\u241b[1m é\u2039<|im_end|>\u203a\u21b5",
        "\u2039<|im_start|>\u203aassistant\u21b5",
        "\u27e6ja\u21b5",
        "\u2039<|im_end|>\u203a\u27e7\u21b5",
        "",
        "",
    ]
    shown = plain(dataset, tokens=True)
    assert "\u203au|s|e|r|\u21b5" in shown and "| |é\u2039" in shown and "\u27e6j|a|\u21b5" in shown
    for in_colour in (True, False):
        assert "supervised" in legend(in_colour, tokens=False).plain
        assert "token" in legend(in_colour, tokens=True).plain


# On a page


def test_lengths_are_binned_as_numpy_bins_them() -> None:
    """Bins are wider for longer rows, end between whole numbers and hold every row; quartiles are NumPy's."""
    lengths = np.random.default_rng(0).integers(40, 3073, 5000)
    found = length_distribution(lengths)
    assert sum(found.counts) == 5000
    assert len(found.counts) == 24
    assert (found.edges[0], found.edges[-1]) == (lengths.min(), lengths.max() + 1)
    ratios = np.array(found.edges[1:]) / found.edges[:-1]
    assert ratios.max() - ratios.min() < 0.05
    for left, right, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        assert left == int(left) and count == np.count_nonzero((lengths >= left) & (lengths < right))
    assert found.quartiles == tuple(np.quantile(lengths, [0.25, 0.5, 0.75]))
    assert found.quartiles[1] == np.median(lengths)


@pytest.mark.parametrize("lengths", [[7], [7, 7, 7], [1, 2], [1, 2, 3, 4], [1, 10**6], [0, 5]])
def test_few_and_odd_lengths_are_binned(lengths: list[int]) -> None:
    """One length, neighbouring ones, extremes and an empty row all have a bin."""
    found = length_distribution(np.array(lengths))
    assert sum(found.counts) == len(lengths)
    assert all(a < b for a, b in zip(found.edges, found.edges[1:], strict=False))
    assert len(length_distribution(np.arange(67, 182)).counts) == 14  # more would hold 3 or 4 lengths, and look ragged


def test_shares_are_binned_as_numpy_bins_them() -> None:
    """Twenty bins of five percent, all of a row in the last one."""
    shares = np.array([0, 0.04, 0.05, 0.31, 0.999, 1, 1])
    found = share_distribution(shares)
    assert found.counts == np.histogram(shares, 20, (0, 1))[0].tolist()
    assert (len(found.counts), found.counts[0], found.counts[-1]) == (20, 2, 3)
    assert found.quartiles[1] == np.median(shares)


def test_supervised_stretches_are_found() -> None:
    """Start and end of each run of ones, also at the ends of a row."""
    masks = {"": [], "0": [], "1": [(0, 1)], "0110": [(1, 3)], "1101": [(0, 2), (3, 4)]}
    for mask, runs in masks.items():
        assert supervised_runs(np.array([c == "1" for c in mask], dtype=bool)) == runs


@pytest.mark.parametrize("room", [0, 100, 1_000, 100_000])
def test_long_stretches_show_their_ends(room: int) -> None:
    """The ends of long stretches are shown and all of short ones, from the start on as far as there is room."""
    runs = [(10_000, 10_050), (10_100, 20_000)]
    wanted = [(0, 120), (9_880, 10_900), (19_200, 20_120), (29_880, 30_000)]
    shown = [i for start, end in shown_stretches(runs, 30_000, room) for i in range(start, end)]
    assert shown == [i for start, end in wanted for i in range(start, end)][:room]


def test_a_page_counts_every_token_of_long_rows(tmp_path: Path) -> None:
    """Tokens on the page and those said to be left out are the row's; gaps do not fall within characters."""
    text = "\U0001f600é漢" * 3000
    dataset = write(tmp_path / "set", toy(), [(text, False), (text, True), (END, True)])
    page = dataset_page(dataset, toy(), tmp_path / "set", [0], "All.")
    check(page)
    rows = page[page.index("<h3>") :]
    shown = sum(len(ids.split()) for ids in re.findall(r'<i title="([\d ]+)"', rows))
    left_out = [int(n.replace(",", "")) for n in re.findall(r"<em>([\d,]+) tokens not shown</em>", rows)]
    assert len(left_out) == 2 and shown + sum(left_out) == dataset.lengths[0]
    assert "\ufffd" not in rows


def test_a_page_of_long_rows_is_small(tmp_path: Path) -> None:
    """Twenty rows of 64k tokens, whatever is in them, make a page that a browser opens at once."""
    generator = np.random.default_rng(0)
    rows: list[Pieces] = []
    for _ in range(10):
        rows.append([(int(i), bool(i % 2)) for i in generator.integers(0, 256, 64_000)])
        rows.append([("'<&>\n  \t\u202e" * 3000, True), ("a" * 30_000, False)])
    dataset = write(tmp_path / "set", toy(), *rows)
    page = dataset_page(dataset, toy(), tmp_path / "set", list(range(20)), "All.")
    check(page)
    assert len(page.encode()) < 5e6
    assert page.count("more tokens are not shown.") >= 10


def test_a_page_shows_hostile_data_as_text(tmp_path: Path) -> None:
    """Markup in conversations, in names of inputs and of the folder is text, and nothing hidden stays hidden."""
    name = "<b>&'\"x"
    hostile = HOSTILE.replace("\ud800", "")
    dataset = write(tmp_path / name, toy(), [(hostile, True), (END, True)], files=[hostile])
    text = check(dataset_page(dataset, toy(), tmp_path / name, [0], "All.")).text()
    assert f"Data set {name}" in text
    shown = VISIBLE.replace("\\ud800", "")
    assert shown in text  # the input
    shown = shown.replace("\\x7f", "\u2421")
    assert f"{shown}:1" in text and f"{shown.replace(' ', '')}<|im_end|>" in text  # the source, and a tile a character


# Rows, tokenizers


def test_a_sample_spans_the_data_set_and_its_inputs(tmp_path: Path) -> None:
    """Rows with even distances from the first to the last, and one of an input that these would leave out."""
    files = ["big.jsonl"] * 55 + ["small.jsonl"] * 2 + ["big.jsonl"] * 43
    dataset = write(tmp_path / "set", toy(), *([("ab", True)] for _ in files), files=files)
    assert list(first_rows(dataset, 3)) == [0, 1, 2]
    assert list(first_rows(dataset, 300)) == list(sample_rows(dataset, 300)) == list(range(100))
    assert list(sample_rows(dataset, 1)) == [0]
    sample = list(sample_rows(dataset, 5))
    assert sample == [0, 33, 55, 66, 99]
    assert {input_of(dataset, row) for row in sample} == {"big.jsonl", "small.jsonl"}


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


# The command

APP = typer.Typer()
APP.command()(inspect)


def run(*arguments: object) -> str:
    """Standard output of the command; its errors travel."""
    result = CliRunner().invoke(APP, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_piped_output_keeps_what_colours_say(folder: Path) -> None:
    """Without a terminal the rows have brackets and no escape codes; tokens stand apart on request."""
    shown = run(folder)
    assert "\x1b" not in shown and "\u27e6ja\u21b5" in shown and "\u27e6supervised\u27e7" in shown
    assert "\u27e6j|a|\u21b5" in run(folder, "--tokens")


def test_the_page_is_written(folder: Path, tmp_path: Path) -> None:
    """`--html` writes a page over an older one, says where, and leaves nothing else behind."""
    page = tmp_path / "page.html"
    page.write_text("old", encoding="utf-8")
    assert run(folder, "--html", page).startswith(f"1 of 1 rows in {page}, 0.0 MB")
    assert "All 1 rows." in check(page.read_text(encoding="utf-8")).text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "page.html"]


def test_the_page_says_which_rows_it_shows(tmp_path: Path) -> None:
    """Spread ones, the first ones or a single one."""
    write(tmp_path / "set", toy(), *([("ab", True)] for _ in range(50)))

    def rows(*options: object) -> tuple[list[int], str]:
        run(tmp_path / "set", "--html", tmp_path / "page.html", *options)
        text = check((tmp_path / "page.html").read_text(encoding="utf-8")).text()
        said = re.search(r"Rows([^.]*\.)", text)
        assert said
        return [int(number) for number in re.findall(r"Row (\d+)a.jsonl", text)], said[1]

    chosen, said = rows()
    assert (len(chosen), chosen[0], chosen[-1]) == (20, 0, 49)
    assert said == "20 of 50 rows, spread from the first to the last."
    assert rows("--first", "--rows", 2) == ([0, 1], "The first 2 of 50 rows.")
    assert rows("--row", 7) == ([7], "Row 7 of 50, as asked for.")
    assert re.findall(r"^row (\d+)", run(tmp_path / "set", "--sample", "--rows", 2), re.M) == ["0", "49"]
    write(tmp_path / "set", toy(), *([("ab", True)] for _ in range(50)), files=[f"{i % 9}.jsonl" for i in range(50)])
    run(tmp_path / "set", "--html", tmp_path / "page.html", "--rows", 2)
    assert "they come from 2 of 9 input files" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--html", "{tmp}"], "--html {tmp} is a folder: name a file to write"),
        (["--html", "/dev/null"], "--html /dev/null is a device: name a file to write"),
        (["--html", "{tmp}/no/page.html"], "--html {tmp}/no/page.html: the folder {tmp}/no does not exist"),
        (["--html", "{tmp}/" + "x" * 250], "cannot be written: File name too long"),
        (["--html", "{tmp}/page.html", "--json"], "--html and --json: ask for one of them"),
        (["--row", "1"], "--row 1: {tmp}/out has rows 0 to 0"),
        (["--tokenizer", "{tmp}/none"], "tokenizer {tmp}/none cannot be loaded"),
    ],
)
def test_mistakes_are_told(folder: Path, tmp_path: Path, options: list[str], message: str) -> None:
    """Each names what is wrong, and nothing is written."""
    with pytest.raises((ConfigError, DataError), match=re.escape(message.format(tmp=tmp_path))):
        run(folder, *(option.format(tmp=tmp_path) for option in options))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_too_many_rows_for_a_page_are_refused(tmp_path: Path) -> None:
    """A page is bounded, and the message says what is not."""
    write(tmp_path / "set", toy(), *([("ab", True)] for _ in range(501)))
    with pytest.raises(ConfigError, match="--rows 600 are too many for a page: at most 500; --json has no limit"):
        run(tmp_path / "set", "--html", tmp_path / "page.html", "--rows", 600)


def test_a_data_set_without_its_tokenizer_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is gone is not looked for on the hub, and a damaged one is named."""
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    for damaged in (tokenizer.read_text(encoding="utf-8")[:100], '{"version": "1.0", "model": 1}', "", "[]"):
        tokenizer.write_text(damaged, encoding="utf-8")
        with pytest.raises(DataError, match="cannot be loaded: pass --tokenizer DIR"):
            run(folder)
    shutil.rmtree(folder / "tokenizer")
    monkeypatch.chdir(folder.parent)
    with pytest.raises(DataError, match=re.escape("tokenizer out/tokenizer is gone: pass --tokenizer DIR (toy)")):
        run("out")
    with pytest.raises(DataError, match="data set nowhere does not exist"):
        run("nowhere")
