"""`paceline inspect`: rows of a data set in the terminal, as JSON lines, or on a page."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import ConfigError, DataError
from paceline.files import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.data.dataset import Dataset

ROWS_SHOWN = 3
"""Rows that are printed for a person unless told otherwise."""

ROWS_ON_PAGE = 20
"""Rows on a page unless told otherwise."""


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Data set folder made by `paceline prepare`.")],
    rows: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Rows to show; 3, 20 with --html, or all with --json.")
    ] = None,
    row: Annotated[int | None, typer.Option(metavar="I", min=0, help="Show this row alone, counted from 0.")] = None,
    sample: Annotated[
        bool | None,
        typer.Option("--sample/--first", help="Rows from all over the data set, as with --html, or its first ones."),
    ] = None,
    tokens: Annotated[
        bool | None,
        typer.Option("--tokens/--no-tokens", help="Mark each token's extent; by default in a terminal, not in a pipe."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with histograms and rows, for a browser.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One line a row: row, source, input_ids, loss_mask, text.")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="Tokenizer to use in place of the copy in the data set.")
    ] = None,
) -> None:
    """Show which tokens train: supervised ones in colour, boundaries, control tokens and characters visible."""
    from paceline.data import inspect as view
    from paceline.data.dataset import Dataset

    if html is not None:
        if as_json:
            raise ConfigError("--html and --json: ask for one of them at a time")
        _check_page_file(html)
    dataset = Dataset.open(folder)
    if row is not None and row >= len(dataset):
        raise DataError(f"--row {row}: {folder} has rows 0 to {len(dataset) - 1}")
    own_tokenizer = view.load_own_tokenizer(dataset, folder, tokenizer)
    is_sample = sample if sample is not None else html is not None
    wanted = rows if rows is not None else len(dataset) if as_json else ROWS_SHOWN if html is None else ROWS_ON_PAGE
    choose = view.sample_rows if is_sample else view.first_rows
    chosen = choose(dataset, wanted) if row is None else [row]
    if as_json:
        for index in chosen:
            print(json.dumps(view.row_record(dataset, own_tokenizer, index)))
    elif html is not None:
        if len(chosen) > view.MAX_PAGE_ROWS:
            raise ConfigError(
                f"--rows {rows} are too many for a page: at most {view.MAX_PAGE_ROWS}; --json has no limit"
            )
        how = _how_chosen(dataset, chosen, row, is_sample)
        size = _write_page(html, view.dataset_page(dataset, own_tokenizer, folder, chosen, how))
        print(f"{len(chosen):,} of {len(dataset):,} rows in {html}, {size / 1e6:.1f} MB: open it in a browser")
    else:
        console = _console()
        in_colour = console.color_system is not None and not console.no_color
        has_tokens = in_colour if tokens is None else tokens
        console.print(view.legend(in_colour, has_tokens))
        for index in chosen:
            console.print(view.show_row(dataset, own_tokenizer, index, in_colour, has_tokens))


def _console() -> Console:
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # text of any script, and a terminal may not know them all
    return Console(highlight=False, soft_wrap=True)


def _check_page_file(path: Path) -> None:
    """Raises: ConfigError if it is plain that no page can be written there; the file is replaced, so no device."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"--html {path} is a {'folder' if path.is_dir() else 'device'}: name a file to write")
    if not path.parent.is_dir():
        raise ConfigError(f"--html {path}: the folder {path.parent} does not exist")


def _write_page(path: Path, page: str) -> int:
    """Write the page and return its size in bytes. Raises: ConfigError if it cannot be written."""
    try:
        write_atomically(path, page)
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error.strerror}") from error
    return len(page.encode())


def _how_chosen(dataset: Dataset, chosen: Sequence[int], row: int | None, is_sample: bool) -> str:
    from paceline.data.inspect import input_of

    if row is not None:
        return f"Row {row:,} of {len(dataset):,}, as asked for."
    if len(chosen) == len(dataset):
        return f"All {len(dataset):,} rows."
    if not is_sample:
        return f"The first {len(chosen):,} of {len(dataset):,} rows."
    told = f"{len(chosen):,} of {len(dataset):,} rows, spread from the first to the last"
    if len(dataset.info.files) > 1:
        num_inputs = len({input_of(dataset, index) for index in chosen})
        told += f"; they come from {num_inputs:,} of {len(dataset.info.files):,} input files"
    return f"{told}."
