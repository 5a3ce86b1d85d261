"""Inputs as a command line names them: files, folders, and data sets of a hub; found first, read later.

Which files of a folder are read, their endings say; what is in a file, `data.reading` finds out.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.data.reading import (
    CHUNK_RECORDS,
    TABLE_ENDINGS,
    TEXT_ENDINGS,
    Chunk,
    Record,
    file_chunks,
    table_chunk,
    uncompressed_name,
)
from paceline.errors import DataError

HUB_PREFIX = "hf:"

DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""JSON files that data set folders keep beside their rows."""

ANSWERS_FILE = "answers.jsonl"
REGENERATE_FILE = "regenerate.json"
"""What `paceline regenerate` leaves in its folder: rows, and what they were made with."""


@dataclass(frozen=True)
class Input:
    """One INPUT of the command line: a place, and after commas what is wanted of it.

    Attributes:
        path: A file, a folder, or ``hf:`` and the id of a data set on a hub.
        weight: How often each of its conversations is used: 0.5 keeps every second one, chosen by its content; 2 takes
            every one twice.
        split: Of a hub's data set; by default ``train``, or the only one.
        config: Name of a hub's data set configuration.
        revision: Branch, tag or commit of a hub's data set.
        license: What the input may be used under, kept in prepare.json.
    """

    path: str
    weight: float = 1.0
    split: str | None = None
    config: str | None = None
    revision: str | None = None
    license: str | None = None

    @property
    def on_hub(self) -> bool:
        """Whether the `datasets` library reads it."""
        return self.path.startswith(HUB_PREFIX)


def parse_input(text: str) -> Input:
    """``PATH[,weight=W][,license=NAME]`` or ``hf:ORG/NAME[,split=S][,config=C][,revision=R]...``.

    Raises: DataError if an option is unknown, given to a file that knows none, or has no sense.
    """
    names = [f.name for f in fields(Input) if f.name != "path"]
    options: dict[str, str] = {}
    path = text
    while not Path(path).exists() and (match := re.fullmatch(r"(.+),(\w+)=([^,]*)", path, re.DOTALL)):
        path, name, value = match.groups()
        if name not in names:
            raise DataError(f"input {text}: unknown option {name}; known: {', '.join(names)}")
        options[name] = value
    weight = options.pop("weight", "1")
    try:
        found = Input(path, weight=float(weight), **options)  # type: ignore[arg-type]  # the others are strings
    except ValueError:
        raise DataError(f"input {text}: weight={weight} is no number") from None
    if not 0 < found.weight <= 100:
        raise DataError(f"input {text}: weight={weight} is not above 0 and at most 100")
    if not found.on_hub and (only := [name for name in ("split", "config", "revision") if name in options]):
        raise DataError(f"input {text}: {only[0]} is for data sets of a hub, written {HUB_PREFIX}ORG/NAME")
    return found


@dataclass
class Source:
    """An input that was found, ready to be read.

    Attributes:
        input: What was asked for.
        num_bytes: Of all its files; None where that is not known.
        provenance: Where its records come from and what they may be used under, for prepare.json.
        ignored: Files of a folder that are not read: how many, by reason.
    """

    input: Input
    num_bytes: int | None
    provenance: dict[str, Any]
    ignored: Counter[str] = field(default_factory=Counter)
    _read: Callable[[], Iterator[Chunk]] = field(default=lambda: iter(()), repr=False)

    def chunks(self) -> Iterator[Chunk]:
        """All records in order. Raises: DataError if a file cannot be read or is damaged."""
        return self._read()


def open_inputs(inputs: Sequence[Input]) -> list[Source]:
    """Look for all inputs before any is read. Raises: DataError if one is missing, unreadable or of no use."""
    return [_open_hub(spec) if spec.on_hub else _open_local(spec) for spec in inputs]


def read_records(sources: Sequence[Source]) -> Iterator[Record]:
    """All records of all sources, in order."""
    for source in sources:
        for chunk in source.chunks():
            yield from chunk.records()


def _open_local(spec: Input) -> Source:
    path = Path(spec.path)
    provenance: dict[str, Any] = {"path": spec.path, "license": spec.license}
    if not path.is_dir():
        size = _check_readable(path)
        return Source(spec, size, provenance | {"files": 1}, _read=lambda: file_chunks(path))
    if (path / REGENERATE_FILE).is_file():
        answers = path / ANSWERS_FILE
        provenance["regenerated"] = _read_description(path / REGENERATE_FILE)
        return Source(spec, _check_readable(answers), provenance | {"files": 1}, _read=lambda: file_chunks(answers))
    if (path / "rows.arrow").is_file():
        raise DataError(f"input {path} is a data set that `paceline prepare` made: name what it was made from")
    files, ignored = _files_below(path)
    if not files:
        wanted = ", ".join((*TEXT_ENDINGS, *TABLE_ENDINGS))
        raise DataError(
            f"input {path} holds no file that can be read; wanted: {wanted}, the first three also with .gz or .zst"
        )
    size = sum(_check_readable(file) for file in files)
    source = Source(spec, size, provenance | {"files": len(files)}, ignored)

    def read() -> Iterator[Chunk]:
        for file in files:
            chunks = file_chunks(file, must_have_rows=False)
            first = next(chunks, None)
            if first is None:
                source.ignored["empty"] += 1
                continue
            yield first
            yield from chunks

    source._read = read
    return source


def _files_below(folder: Path) -> tuple[list[Path], Counter[str]]:
    """Files of a folder that are read, in the order of their names, and why the others are not."""
    files: list[Path] = []
    ignored: Counter[str] = Counter()

    def fail(error: OSError) -> None:
        raise DataError(f"input {error.filename} cannot be read: {error.strerror}") from error

    for where, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.startswith(".") or name in DESCRIPTIONS:
                continue
            if uncompressed_name(name).endswith(TEXT_ENDINGS) or name.endswith(TABLE_ENDINGS):
                files.append(Path(where, name))
            else:
                ignored[f"unknown ending {Path(name).suffix or name}"] += 1
    return files, ignored


def _check_readable(path: Path) -> int:
    """Size of a file in bytes. Raises: DataError if it is missing or unreadable."""
    try:
        with path.open("rb"):
            return path.stat().st_size
    except FileNotFoundError:
        hint = (
            f"; a data set of a hub is written {HUB_PREFIX}{path}" if len(path.parts) == 2 and not path.suffix else ""
        )
        raise DataError(f"input {path} cannot be read: there is no such file{hint}") from None
    except OSError as error:
        raise DataError(f"input {path} cannot be read: {error.strerror}") from error


def _read_description(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise DataError(f"input {path} is damaged: {error}") from error


def _open_hub(spec: Input) -> Source:
    """A data set read through the `datasets` library, which takes the token of a private one from HF_TOKEN."""
    name = spec.path.removeprefix(HUB_PREFIX)
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"input {spec.path} needs the `datasets` library: pip install datasets") from error
    try:
        found = datasets.load_dataset(name, spec.config, revision=spec.revision, streaming=True)
    except Exception as error:  # a foreign library that meets the network: it may fail in any way
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"input {spec.path} cannot be loaded: {what}") from error
    split = spec.split or ("train" if "train" in found else next(iter(found)) if len(found) == 1 else None)
    if split not in found:
        seen = f"has no split {split}" if split else "has no split train"
        raise DataError(f"input {spec.path} {seen}: choose with ,split= one of {', '.join(map(str, found))}")
    stream = found[split]
    file = f"{spec.path},split={split}"

    def read() -> Iterator[Chunk]:
        number = 1
        try:
            for table in stream.with_format("arrow").iter(CHUNK_RECORDS):
                for batch in table.combine_chunks().to_batches():
                    yield table_chunk(file, number, batch, batch.nbytes)
                    number += batch.num_rows
        except Exception as error:
            what = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"input {spec.path} broke off after {number - 1} rows: {what}; nothing was published"
            ) from error
        if number == 1:
            raise DataError(f"input {spec.path} is empty: it has no row at all")

    provenance = {"path": spec.path, "split": split, "config": spec.config, **_hub_facts(name, spec, stream.info)}
    return Source(spec, None, provenance, _read=read)


def _hub_facts(name: str, spec: Input, info: Any) -> dict[str, Any]:
    """Revision that is read and licence of a hub's data set; what cannot be learnt is None."""
    facts = {"revision": spec.revision, "license": spec.license or info.license or None}
    if Path(name).exists():
        return facts
    try:
        from huggingface_hub import HfApi

        card = HfApi().dataset_info(name, revision=spec.revision)
        facts["revision"] = card.sha or spec.revision
        facts["license"] = facts["license"] or getattr(card.card_data, "license", None)
    except Exception:  # the rows can be read without it
        pass
    return facts
