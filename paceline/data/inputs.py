"""Inputs as a command line names them: files, folders, and data sets of a hub; found first, read later.

Which files of a folder are read, their endings say; what is in a file, `data.reading` finds out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.data.dataset import ROWS_FILE
from paceline.data.reading import (
    CHUNK_RECORDS,
    TABLE_ENDINGS,
    TEXT_ENDINGS,
    Chunk,
    Record,
    file_chunks,
    shown_path,
    table_chunk,
    uncompressed_name,
)
from paceline.errors import DataError

log = logging.getLogger(__name__)

HUB_PREFIX = "hf:"

DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""JSON files that data set folders keep beside their rows."""

DIGEST_BYTES = 1 << 20
"""What of each file goes into an input's digest, beside its size: enough to notice that another file took its place."""

DIGEST_THREADS = 8
"""Files that are looked at together: on a network disk each of thousands would wait for the one before it."""

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
    if not text.removeprefix(HUB_PREFIX).strip():
        raise DataError(f"input {text!r} is empty: a file, a folder or {HUB_PREFIX}ORG/NAME was wanted")
    names = [f.name for f in fields(Input) if f.name != "path"]
    options: dict[str, str] = {}
    path = text
    while not os.path.exists(path) and (match := re.fullmatch(r"(.+),(\w+)=([^,]*)", path, re.DOTALL)):
        path, name, value = match.groups()
        if name not in names:
            raise DataError(f"input {shown_path(text)}: unknown option {name}; known: {', '.join(names)}")
        if name in options:
            raise DataError(f"input {shown_path(text)}: {name} is given twice")
        options[name] = shown_path(value)
    weight = options.pop("weight", "1")
    try:
        found = Input(path, weight=float(weight), **options)  # type: ignore[arg-type]  # the others are strings
    except ValueError:
        raise DataError(f"input {shown_path(text)}: weight={weight} is no number") from None
    if not 0 < found.weight <= 100:
        raise DataError(f"input {shown_path(text)}: weight={weight} is not above 0 and at most 100")
    if not found.on_hub and (only := [name for name in ("split", "config", "revision") if name in options]):
        raise DataError(f"input {shown_path(text)}: {only[0]} is for data sets of a hub, written {HUB_PREFIX}ORG/NAME")
    return found


@dataclass
class Source:
    """An input that was found, ready to be read.

    Attributes:
        input: What was asked for.
        num_bytes: Of all its files; None where that is not known.
        provenance: Where its records come from and what they may be used under, for prepare.json. That of files has
            their `bytes` and a `digest`, by which a changed input is noticed.
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
    is_folder = os.path.isdir(path)
    regenerated = is_folder and os.path.isfile(path / REGENERATE_FILE)
    ignored: Counter[str] = Counter()
    if regenerated:
        files = [path / ANSWERS_FILE]
    elif is_folder:
        files, ignored = _files_below(path)
    else:
        files = [path]
    size, digest = _size_and_digest(path, files)
    provenance: dict[str, Any] = {"path": shown_path(spec.path), "license": spec.license, "files": len(files)}
    provenance |= {"bytes": size, "digest": digest}
    if regenerated:
        provenance["regenerated"] = _read_description(path / REGENERATE_FILE)
    source = Source(spec, size, provenance, ignored)
    if is_folder and not regenerated:
        source._read = lambda: _read_folder(source, files)
    else:
        source._read = lambda: file_chunks(files[0])
    return source


def _read_folder(source: Source, files: Sequence[Path]) -> Iterator[Chunk]:
    """Chunks of all files; those without rows are counted as ignored."""
    for file in files:
        empty = True
        with closing(file_chunks(file, must_have_rows=False)) as chunks:
            for chunk in chunks:
                empty = False
                yield chunk
        if empty:
            source.ignored["empty"] += 1


def _files_below(folder: Path) -> tuple[list[Path], Counter[str]]:
    """Files of a folder that are read, in the order of their names, and why the others are not.

    Links to folders are followed; a folder that is met twice, in a circle too, is read where it is met first.
    Raises: DataError if nothing is left, a folder cannot be listed, or one is an output of Paceline.
    """
    files: list[Path] = []
    ignored: Counter[str] = Counter()
    seen = {os.path.realpath(folder)}

    def fail(error: OSError) -> None:
        raise DataError(f"input {shown_path(error.filename)} cannot be read: {error.strerror}") from error

    def is_new(path: str) -> bool:
        if (real := os.path.realpath(path)) in seen:
            ignored["folder that is read under another name"] += 1
            return False
        seen.add(real)
        return True

    for where, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        _check_no_output(where, names)
        folders[:] = [
            name for name in sorted(folders) if not name.startswith(".") and is_new(os.path.join(where, name))
        ]
        for name in sorted(names):
            if name.startswith(".") or name in DESCRIPTIONS:
                continue
            if "state.json" in names and name.startswith("cache-") and name.endswith(".arrow"):
                ignored["cache of the datasets library"] += 1
            elif uncompressed_name(name).endswith(TEXT_ENDINGS) or name.endswith(TABLE_ENDINGS):
                files.append(Path(where, name))
            else:
                ignored[f"unknown ending {shown_path(Path(name).suffix or name)}"] += 1
    if not files:
        wanted = ", ".join((*TEXT_ENDINGS, *TABLE_ENDINGS))
        raise DataError(
            f"input {shown_path(folder)} holds no file that can be read; wanted: {wanted}, "
            "the first three also with .gz or .zst"
        )
    return files, ignored


def _check_no_output(where: str, names: Sequence[str]) -> None:
    """Raises: DataError if a folder is not one of inputs: its rows would be read as if they were conversations."""
    if ROWS_FILE in names:
        raise DataError(
            f"input {shown_path(where)} holds a data set that `paceline prepare` made: name what it was made from"
        )
    if REGENERATE_FILE in names:
        raise DataError(
            f"input {shown_path(where)} holds answers of `paceline regenerate`: name it as an INPUT of its own"
        )


def _size_and_digest(path: Path, files: Sequence[Path]) -> tuple[int, str]:
    """Bytes of all files of an input, and what tells whether they are the same files later on.

    The digest is a SHA-256 over each file's name relative to the input, size, and SHA-256 of its first `DIGEST_BYTES`:
    a change behind these that keeps the size goes unnoticed. Only its first 64 bits are kept.

    Raises: DataError if a file is missing, unreadable or no regular file.
    """
    digest, size = hashlib.sha256(), 0
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        for file, (num_bytes, content) in zip(files, pool.map(_look_at, files), strict=True):
            name = os.fsencode(file.relative_to(path))
            digest.update(b"%d %b %d " % (len(name), name, num_bytes) + content)
            size += num_bytes
    return size, digest.hexdigest()[:16]


def _look_at(path: Path) -> tuple[int, bytes]:
    """Size of a file and hash of its beginning. Raises: DataError if it is missing, unreadable or no regular file."""
    shown = shown_path(path)
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # opening a pipe would wait, and what was read of it would be gone
            raise DataError(f"input {shown} is no regular file: write it to a file first")
        with path.open("rb") as file:
            return facts.st_size, hashlib.sha256(file.read(DIGEST_BYTES)).digest()
    except FileNotFoundError:
        hint = (
            f"; a data set of a hub is written {HUB_PREFIX}{shown}" if len(path.parts) == 2 and not path.suffix else ""
        )
        raise DataError(f"input {shown} cannot be read: there is no such file{hint}") from None
    except OSError as error:
        raise DataError(f"input {shown} cannot be read: {error.strerror}") from error


def _read_description(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"input {shown_path(path)} is damaged: {error}") from error


def _open_hub(spec: Input) -> Source:
    """A data set read through the `datasets` library, which takes the token of a private one from HF_TOKEN."""
    name, shown = spec.path.removeprefix(HUB_PREFIX), shown_path(spec.path)
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"input {shown} needs the `datasets` library: pip install datasets") from error
    try:
        found = datasets.load_dataset(name, spec.config, revision=spec.revision, streaming=True)
    except Exception as error:  # a foreign library that meets the network: it may fail in any way
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"input {shown} cannot be loaded: {what}") from error
    split = spec.split or ("train" if "train" in found else next(iter(found)) if len(found) == 1 else None)
    if split not in found:
        seen = f"has no split {split}" if split else "has no split train"
        raise DataError(f"input {shown} {seen}: choose with ,split= one of {', '.join(map(str, found))}")
    stream = found[split]
    file = f"{shown},split={split}"

    def read() -> Iterator[Chunk]:
        number = 1
        try:
            for table in stream.with_format("arrow").iter(CHUNK_RECORDS):
                for batch in table.combine_chunks().to_batches():
                    yield table_chunk(file, number, batch, batch.nbytes)
                    number += batch.num_rows
        except DataError:
            raise
        except Exception as error:
            what = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"input {shown} broke off after {number - 1} rows: {what}; nothing was published"
            ) from error
        if number == 1:
            raise DataError(f"input {shown} is empty: it has no row at all")

    provenance = {"path": shown, "split": split, "config": spec.config, **_hub_facts(name, spec, stream.info)}
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
    except Exception as error:  # the rows can be read without it
        what = str(error).strip().partition("\n")[0] or type(error).__name__
        log.warning("revision and licence of %s%s are not known: %s", HUB_PREFIX, name, what)
    return facts
