"""`paceline prepare` and `paceline inspect` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import data as commands
from paceline.cli.inspect import inspect
from paceline.errors import ConfigError, DataError
from tests.unit.data.conftest import INPUTS, TOY_TOKENIZER, chat, template, write_lines

APP = typer.Typer()
APP.command()(commands.prepare)
APP.command()(inspect)


def run(*arguments: object) -> str:
    """Standard output of a command; its errors travel."""
    result = CliRunner().invoke(APP, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def prepare(*arguments: object) -> str:
    """`prepare` with the toy tokenizer and the plain template."""
    return run("prepare", *arguments, "--tokenizer", TOY_TOKENIZER, "--template", template("chatml_plain"))


def test_prepare_ends_with_what_a_person_wants_to_know(tmp_path: Path) -> None:
    """The last lines give rows, tokens, losses, rejections by reason and the next command."""
    out = tmp_path / "out"
    file = INPUTS / "D08_too_long" / "input.jsonl"
    assert prepare(file, "--out", out, "--max-length", 48, "--max-rejected", "25%").splitlines() == [
        f"3 rows from 3 of 4 lines in {out}",
        "124 tokens, 33 supervised (26.6%), longest row 48",
        "27 supervised tokens (45.0%) lost to --max-length 48 --on-long cut",
        f"1 lines rejected, listed in {out / 'rejected.jsonl'}:",
        "  1 x nothing to learn within max-length",
        f"next: paceline inspect {out}",
    ]


def test_prepare_and_inspect_speak_json(tmp_path: Path) -> None:
    """`prepare --json` prints one object, `inspect --json` one line a row."""
    file = write_lines(tmp_path / "a.jsonl", *[chat("q", f"answer {i}") for i in range(5)])
    result = json.loads(prepare(file, "--out", tmp_path / "out", "--json"))
    assert (result["dataset"]["num_rows"], result["report"]["num_rejected"]) == (5, 0)
    records = [json.loads(line) for line in run("inspect", tmp_path / "out", "--json").splitlines()]
    assert [(r["row"], r["source"]) for r in records] == [(i, f"{file}:{i + 1}") for i in range(5)]
    assert [len(run("inspect", tmp_path / "out", "--json", "--rows", n).splitlines()) for n in (2, 9)] == [2, 5]
    assert json.loads(run("inspect", tmp_path / "out", "--json", "--row", 3)) == records[3]
    shown = run("inspect", tmp_path / "out")
    assert [f"row {i}  {file}:{i + 1}" in shown for i in range(4)] == [True, True, True, False]
    with pytest.raises(DataError, match="--row 5: .* has rows 0 to 4"):
        run("inspect", tmp_path / "out", "--row", 5)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("100%", 1.0), ("0", 0.0), ("2.5%", 0.025)])
def test_shares_are_written_in_percent_or_plain(text: str, share: float) -> None:
    """`5%` and `0.05` are the same share."""
    assert commands.parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["1", "5"])
def test_a_share_that_may_be_percent_is_refused(text: str) -> None:
    """`1` may mean 1 % or everything."""
    with pytest.raises(ConfigError, match=f"--max-rejected {text} may mean {text}% or {text}00%: write it in percent"):
        commands.parse_share(text)


def test_a_share_that_is_none_is_refused() -> None:
    """Anything else is named with an example."""
    with pytest.raises(ConfigError, match="--max-rejected many is not a share: write 5% or 0.05"):
        commands.parse_share("many")
