"""One file to chunks of records: JSON Lines, JSON, Parquet or Arrow, as its first bytes say, JSON also compressed.

Nothing here trusts its input: a broken line is a `Rejection` later on, a file that breaks as a whole a `DataError`.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.data.dialects import Rejection, json_name
from paceline.errors import DataError

MAX_LINE_BYTES = 32 << 20
"""Longest line that is parsed; a longer one is rejected without being held in memory. Rows of `regenerate`, which hold
token ids beside the text, can be long."""

MAX_ELEMENT_CHARACTERS = 64 << 20
"""Longest element of a JSON array that is searched for its end; one above `MAX_LINE_BYTES` is rejected."""

CHUNK_RECORDS = 256
CHUNK_BYTES = 1 << 20
"""Records and bytes after which a chunk is handed on; a longer line is a chunk of its own."""

TEXT_CHARACTERS = 200
"""Characters of a rejected record that are kept."""

TEXT_ENDINGS = (".jsonl", ".ndjson", ".json")
TABLE_ENDINGS = (".parquet", ".arrow")

UNREADABLE = (ValueError, OverflowError, pa.ArrowException)
"""What PyArrow raises for a value that Python cannot hold: a string that is no UTF-8, a time after the year 9999, a
time zone that does not exist."""

TAR_MARK_AT = 257

BLANKS = re.compile(r"[ \t\r\n]*")
DECODER = json.JSONDecoder()
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Record(NamedTuple):
    """One record of an input, as it came."""

    file: str
    number: int
    """Its line, counted from 1, blank ones included; in a table its row; in a JSON array the line it begins on."""
    raw: bytes | dict[str, Any] | Rejection
    """A rejection for a row of a table that Python cannot hold."""

    def decode(self) -> dict[str, Any]:
        """The record as an object. Raises: Rejection if it is none."""
        if isinstance(self.raw, Rejection):
            raise self.raw
        return self.raw if isinstance(self.raw, dict) else decode_record(self.raw)

    @property
    def text(self) -> str:
        """Its first characters, for people; none of a row that Python cannot hold."""
        if isinstance(self.raw, Rejection):
            return ""
        if isinstance(self.raw, bytes):
            return self.raw[: 4 * TEXT_CHARACTERS].decode("utf-8", errors="replace")[:TEXT_CHARACTERS]
        return json.dumps(self.raw, ensure_ascii=False, default=str)[:TEXT_CHARACTERS]


def decode_record(raw: bytes) -> dict[str, Any]:
    """JSON object of one line. Raises: Rejection for a line too long, invalid UTF-8 or JSON, and other JSON values."""
    if len(raw) > MAX_LINE_BYTES:
        raise Rejection("line too long", f"more than {MAX_LINE_BYTES} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Rejection("invalid UTF-8", f"byte {error.start} is 0x{raw[error.start]:02x}") from error
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise Rejection("invalid JSON", f"{error.msg} (character {error.pos})") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of open brackets
        raise Rejection("invalid JSON", "a number or a nesting beyond what can be read") from error
    if not isinstance(record, dict):
        raise Rejection("not a JSON object", f"a JSON {json_name(record)}")
    return record


@dataclass(frozen=True)
class Chunk:
    """Some records of one file, on their way to a worker.

    Attributes:
        file: As it stands in sources and rejections.
        numbers: Of the records.
        lines: Their bytes, where they are text.
        table: Else, a record batch in Arrow's stream format.
        num_bytes: Of the input, for the progress bar.
    """

    file: str
    numbers: list[int]
    lines: list[bytes] | None = None
    table: bytes | None = None
    num_bytes: int = 0

    def records(self) -> Iterator[Record]:
        """The records in order."""
        if self.lines is not None:
            yield from (Record(self.file, number, raw) for number, raw in zip(self.numbers, self.lines, strict=True))
            return
        assert self.table is not None
        with pa.ipc.open_stream(self.table) as stream:
            rows = _rows(stream.read_all())
        yield from (Record(self.file, number, row) for number, row in zip(self.numbers, rows, strict=True))


def _rows(table: pa.Table) -> list[dict[str, Any] | Rejection]:
    """Rows as Python objects; one by one where some row cannot be one, so that it costs no other row."""
    try:
        return [_plain(row) for row in table.to_pylist()]
    except UNREADABLE:
        return [_row(table.slice(number, 1)) for number in range(table.num_rows)]


def _row(table: pa.Table) -> dict[str, Any] | Rejection:
    """The only row of a table."""
    values = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            (values[name],) = column.to_pylist()
        except UNREADABLE as error:
            return Rejection("unreadable row", f"column {name}: {_first_line(error)}")
    return _plain(values)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A table's row without the nulls by which columns fill in what a call or a tool does not have."""
    messages = [key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return {key: _without_nulls(value) if key in messages else value for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def file_chunks(path: Path, *, must_have_rows: bool = True) -> Generator[Chunk]:
    """Chunks of one file. Raises: DataError if it cannot be read, is damaged, or has no row though it must."""
    found = False
    with _named_errors(path):
        with path.open("rb") as file:
            head = file.read(8)
        is_table = head[:4] == b"PAR1" or _is_arrow(path, head)
        with closing(_table_chunks(path, head) if is_table else _text_chunks(path, head)) as chunks:
            for chunk in chunks:
                found = True
                yield chunk
    if not found and must_have_rows:
        raise DataError(f"input {shown_path(path)} is empty: it has no row at all")


def _is_arrow(path: Path, head: bytes) -> bool:
    return head[:6] == b"ARROW1" or path.suffix == ".arrow"


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Says which file an error of the reading libraries is about."""
    try:
        yield
    except (OSError, EOFError, pa.ArrowException, zlib.error, UnicodeDecodeError) as error:  # the last: of a column
        raise DataError(
            f"input {shown_path(path)} cannot be read to its end: {_first_line(error)}; nothing was published"
        ) from error


def _first_line(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error).strip() or type(error).__name__).splitlines()[0]


def shown_path(path: str | Path) -> str:
    """A name as text that UTF-8 can hold, whatever bytes it has: those that are no UTF-8 as ``\\xff``."""
    return os.fsencode(path).decode("utf-8", errors="backslashreplace")


def _table_chunks(path: Path, head: bytes) -> Generator[Chunk]:
    name, size = os.fsencode(path), path.stat().st_size  # as text, PyArrow takes UTF-8 alone
    number = 1
    with pa.OSFile(name) if head[:4] == b"PAR1" else pa.memory_map(name) as source:
        num_rows, batches = _batches(source, head)
        for batch in batches:
            yield table_chunk(shown_path(path), number, batch, round(size * batch.num_rows / max(num_rows, 1)))
            number += batch.num_rows


def _batches(source: pa.NativeFile, head: bytes) -> tuple[int, Iterator[pa.RecordBatch]]:
    """Number of rows of a table, and the rows."""
    if head[:4] == b"PAR1":
        table = pq.ParquetFile(source)
        return table.metadata.num_rows, table.iter_batches(CHUNK_RECORDS)
    whole = (pa.ipc.open_file(source) if head[:6] == b"ARROW1" else pa.ipc.open_stream(source)).read_all()
    return whole.num_rows, iter(whole.to_batches(CHUNK_RECORDS))


def table_chunk(file: str, number: int, batch: pa.RecordBatch, num_bytes: int) -> Chunk:
    """A chunk of a table's rows, the first of which has this number. Raises: DataError for two columns of one name."""
    column, count = Counter(batch.schema.names).most_common(1)[0] if batch.schema.names else ("", 1)
    if count > 1:
        raise DataError(f"input {file} has {count} columns called {column!r}: rename them, a row can hold only one")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:  # writes a slice alone, where a pickle would take its buffers
        stream.write_batch(batch)
    numbers = list(range(number, number + batch.num_rows))
    return Chunk(file, numbers, table=sink.getvalue().to_pybytes(), num_bytes=num_bytes)


def _text_chunks(path: Path, head: bytes) -> Generator[Chunk]:
    with path.open("rb") as raw, _decompressed(raw, head) as file:
        if file.peek(512)[TAR_MARK_AT:].startswith(b"ustar"):
            raise DataError(f"input {shown_path(path)} is a tar archive: unpack it and name the folder")
        read = (
            _lines
            if uncompressed_name(path.name).endswith((".jsonl", ".ndjson")) or not _is_json(file)
            else _json_values
        )
        numbers: list[int] = []
        lines: list[bytes] = []
        size = done = 0
        for number, line in read(file, path):
            if lines and (len(lines) >= CHUNK_RECORDS or size + len(line) > CHUNK_BYTES):
                yield Chunk(shown_path(path), numbers, lines, num_bytes=raw.tell() - done)
                done, size, numbers, lines = raw.tell(), 0, [], []
            numbers.append(number)
            lines.append(line)
            size += len(line)
        if lines:
            yield Chunk(shown_path(path), numbers, lines, num_bytes=raw.tell() - done)


def uncompressed_name(name: str) -> str:
    """A file's name without the ending that says how it is compressed."""
    return name.removesuffix(".gz").removesuffix(".zst")


def _decompressed(raw: IO[bytes], head: bytes) -> io.BufferedReader:
    """The file's contents; both decompressors raise at a file that was cut short."""
    if head[:2] == b"\x1f\x8b":
        return io.BufferedReader(gzip.open(raw))  # type: ignore[arg-type]  # it has what a raw stream needs
    if head[:4] == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw), "zstd"))
    return raw  # type: ignore[return-value]  # opened for reading bytes, with a buffer


def _is_json(file: io.BufferedReader) -> bool:
    """Whether the contents are JSON values over several lines, and not one object a line."""
    start = file.peek(CHUNK_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip()
    if not start.startswith(b"{"):
        return start.startswith(b"[")
    first, newline, _ = start.partition(b"\n")
    try:
        json.loads(first)
    except ValueError:
        return bool(newline) and not first.rstrip().endswith(b"}")  # an object that was laid out for people
    return False


def _lines(file: io.BufferedReader, path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers and bytes of lines that are not blank: with or without byte order mark, ended by LF or CR LF."""
    for number, physical in enumerate(_physical_lines(file), start=1):
        raw = physical.removeprefix(BYTE_ORDER_MARK) if number == 1 else physical
        raw = raw.removesuffix(b"\n").removesuffix(b"\r")
        if raw.strip():
            yield number, raw


def _physical_lines(file: io.BufferedReader) -> Iterator[bytes]:
    """Lines with their endings, split on LF only, as a binary file is; of one that is too long, enough to tell."""
    while physical := file.readline(MAX_LINE_BYTES + 1):
        rest = physical
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        yield physical


def _json_values(file: io.BufferedReader, path: Path) -> Iterator[tuple[int, bytes]]:
    """Line and bytes of each element of a JSON array, or of values that follow each other; holds few at a time.

    Raises: DataError where the JSON breaks: nothing after that place can be told apart.
    """
    text = _JsonText(file, path)
    in_array = text.next_character() == "["
    if in_array:
        text.at += 1
    while True:
        mark = text.next_character()
        if in_array and mark == "]":
            text.at += 1
            if text.next_character():
                raise text.broken("there is more after the end of the array")
            return
        if not mark:
            if in_array:
                raise text.broken("the array has no end")
            return
        line, value = text.take_value()
        yield line, value
        if in_array and text.next_character() == ",":
            text.at += 1
            if text.next_character() == "]":
                raise text.broken("a value was wanted after the comma")
        elif in_array and text.next_character() != "]":
            raise text.broken("a comma or the end of the array was wanted")


class _JsonText:
    """A JSON file that is read value by value; `at` is the place in what is held of it."""

    def __init__(self, file: io.BufferedReader, path: Path) -> None:
        self.at = 0
        self._file = file
        self._path = path
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._held = ""
        self._line = 1
        self._counted = 0  # line ends are counted up to here
        self._ended = False

    def next_character(self) -> str:
        """Move behind blanks; the character there, or nothing at the end of the file."""
        while True:
            match = BLANKS.match(self._held, self.at)
            assert match is not None  # it matches nothing, too
            self.at = match.end()
            if self.at < len(self._held) or self._ended:
                return self._held[self.at : self.at + 1]
            self._read(CHUNK_BYTES)

    def take_value(self) -> tuple[int, bytes]:
        """Line and bytes of the value that begins here; moves behind it. Raises: DataError if it is broken."""
        while True:
            try:
                _, end = DECODER.raw_decode(self._held, self.at)
                if end < len(self._held) or self._ended:
                    break
            except RecursionError:
                raise self.broken("nested too deep") from None
            except ValueError as error:
                if self._ended:
                    raise self.broken(str(error).partition(": line")[0]) from None
            held = len(self._held) - self.at
            if held > MAX_ELEMENT_CHARACTERS:
                raise self.broken(f"a value that is broken, or longer than {MAX_ELEMENT_CHARACTERS} characters")
            self._read(max(CHUNK_BYTES, held))
        line, start, self.at = self._line_here(), self.at, end
        return line, self._held[start:end].encode("utf-8", errors="surrogateescape")

    def broken(self, what: str) -> DataError:
        """The error that the file is no JSON from here on."""
        return DataError(
            f"input {shown_path(self._path)} is broken JSON from line {self._line_here()} on: {what}; "
            "nothing was published. As JSON Lines, one object a line, it would lose its bad rows alone."
        )

    def _line_here(self) -> int:
        self._line += self._held.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line

    def _read(self, num_bytes: int) -> None:
        self._line_here()
        part = self._file.read(num_bytes)
        self._ended = not part
        self._held = self._held[self.at :] + self._decode(part, self._ended)
        self.at = self._counted = 0
