"""Files, folders and hub data sets to records, whole or with an error that names the file."""

from __future__ import annotations

import gc
import gzip
import json
import os
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.data import reading
from paceline.data.dialects import Rejection
from paceline.data.inputs import Input, open_inputs, parse_input, read_records
from paceline.data.reading import Record
from paceline.errors import DataError
from tests.unit.data.conftest import chat, write_lines

RECORDS = [chat(f"frage {i} äöü", f"a\n{i}" * (i % 50)) for i in range(700)]


def read(*texts: object) -> list[Record]:
    """All records of inputs as they are written on a command line."""
    return list(read_records(open_inputs([parse_input(str(text)) for text in texts])))


def write_json_lines(folder: Path) -> Path:
    return write_lines(folder / "a.jsonl", *RECORDS)


def write_json_lines_without_ending(folder: Path) -> Path:
    return write_lines(folder / "chats", *RECORDS)


def write_json_lines_called_json(folder: Path) -> Path:
    return write_lines(folder / "a.json", *RECORDS)


def write_array(folder: Path) -> Path:
    return write_lines(folder / "a.json", RECORDS)


def write_array_for_people(folder: Path) -> Path:
    return write_lines(folder / "a.json", b"\xef\xbb\xbf" + json.dumps(RECORDS, indent=2, ensure_ascii=False).encode())


def write_objects_for_people(folder: Path) -> Path:
    return write_lines(folder / "a.json", *[json.dumps(record, indent=2) for record in RECORDS])


def write_gzip(folder: Path) -> Path:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(write_json_lines(folder).read_bytes()))
    return folder / "a.jsonl.gz"


def write_gzip_in_parts(folder: Path) -> Path:
    content = write_array_for_people(folder).read_bytes()
    parts = [gzip.compress(content[at : at + 10_000]) for at in range(0, len(content), 10_000)]
    (folder / "a.json.gz").write_bytes(b"".join(parts))
    return folder / "a.json.gz"


def write_zstd(folder: Path) -> Path:
    (folder / "a.jsonl.zst").write_bytes(pa.compress(write_json_lines(folder).read_bytes(), "zstd", asbytes=True))
    return folder / "a.jsonl.zst"


def write_parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(RECORDS), folder / "a.parquet", row_group_size=300)
    return folder / "a.parquet"


def write_saved_data_set(folder: Path) -> Path:
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(RECORDS).save_to_disk(str(folder / "saved"), num_shards=3)
    return folder / "saved"


def write_one_shard(folder: Path) -> Path:
    return write_table(pa.Table.from_pylist(RECORDS), folder / "a.arrow")


def write_table(table: pa.Table, file: Path) -> Path:
    if file.suffix == ".parquet":
        pq.write_table(table, file)
    else:
        with pa.ipc.new_file(str(file), table.schema) as writer:
            writer.write_table(table)
    return file


def write_hub_folder(folder: Path) -> str:
    (folder / "hub").mkdir()
    return f"hf:{write_parquet(folder / 'hub').parent}"


@pytest.mark.parametrize("write", [
    write_json_lines, write_json_lines_without_ending, write_json_lines_called_json, write_array,
    write_array_for_people, write_objects_for_people, write_gzip, write_gzip_in_parts, write_zstd, write_parquet,
    write_saved_data_set, write_hub_folder,
])  # fmt: skip
def test_every_format_gives_the_same_records(write: Callable[[Path], Path | str], tmp_path: Path) -> None:
    """The same conversations come out of every format, in order, with rising numbers."""
    records = read(write(tmp_path))
    assert [record.decode()["messages"] for record in records] == [record["messages"] for record in RECORDS]
    assert all(a.number <= b.number or a.file != b.file for a, b in zip(records, records[1:], strict=False))
    assert records[0].text.startswith(("{", " "))


def test_records_of_a_json_array_carry_the_line_they_begin_on(tmp_path: Path) -> None:
    """Line numbers count every line end of the file, those between and inside of values."""
    file = write_lines(tmp_path / "a.json", b"\n[", b"", b'{"a":', b"1}, {", b'"b": 2}', b"]")
    assert [(r.number, r.decode()) for r in read(file)] == [(4, {"a": 1}), (5, {"b": 2})]


def test_chunks_are_small_and_tell_the_size_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are bounded in records and bytes, and their bytes add up to what `num_bytes` said."""
    monkeypatch.setattr(reading, "CHUNK_RECORDS", 100)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 5000)
    for file in (write_json_lines(tmp_path), write_parquet(tmp_path)):
        (source,) = open_inputs([Input(str(file))])
        chunks = list(source.chunks())
        assert max(len(chunk.numbers) for chunk in chunks) <= 100
        assert all(sum(map(len, chunk.lines or [])) <= 5000 for chunk in chunks)
        assert sum(chunk.num_bytes for chunk in chunks) == pytest.approx(source.num_bytes, abs=len(chunks))


def test_lines_are_physical_and_split_on_line_feeds_only(tmp_path: Path) -> None:
    """Blank lines count but are not given out; other separators, and a byte order mark further on, are content."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\n  \t\r\ntwo\x0b\x0c\xe2\x80\xa8\rstill two\n\xef\xbb\xbfthree")
    lines = [(line.number, line.raw) for line in read(file)]
    assert lines == [(1, b"one"), (4, b"two\x0b\x0c\xe2\x80\xa8\rstill two"), (5, b"\xef\xbb\xbfthree")]


@pytest.mark.parametrize("excess", [0, 1, 2, 10, 11, 12, 35])
def test_a_line_beyond_the_limit_is_rejected_without_being_held(
    excess: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line over the limit gives its beginning, is rejected for its length, and the next line is read as usual."""
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 10)
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"x" * (10 + excess) + b"\nnext")
    first, second = read(file)
    assert (first.raw, first.number) == (b"x" * min(10 + excess, 11), 1)
    assert (second.raw, second.number) == (b"next", 2)
    with pytest.raises(Rejection) as caught:
        first.decode()
    assert caught.value.kind == ("line too long" if excess else "invalid JSON")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{\xff}", "invalid UTF-8: byte 1 is 0xff"),
        (b"{", "invalid JSON: Expecting property name enclosed in double quotes (character 1)"),
        (b'{"a": "\x01"}', "invalid JSON: Invalid control character at (character 7)"),
        (b'{"a": ' + b"1" * 5000 + b"}", "invalid JSON: a number or a nesting beyond what can be read"),
        (b"[" * 100_000, "invalid JSON: a number or a nesting beyond what can be read"),
        (b"null", "not a JSON object: a JSON null"),
        (b"true", "not a JSON object: a JSON boolean"),
        (b"NaN", "not a JSON object: a JSON number"),
    ],
)
def test_broken_lines_are_rejected_with_what_was_seen(raw: bytes, reason: str) -> None:
    """Each way to break a line has its own reason."""
    with pytest.raises(Rejection) as caught:
        Record("a.jsonl", 1, raw).decode()
    assert caught.value.reason == reason


def test_bad_bytes_in_a_json_array_reject_their_element(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 cost the one element that holds them."""
    file = write_lines(tmp_path / "a.json", b'[{"a": "\xff"}, {"a": "\xc3\xbc"}]')
    first, second = read(file)
    with pytest.raises(Rejection, match="invalid UTF-8"):
        first.decode()
    assert second.decode() == {"a": "ü"}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'[{"a": 1},\n{"a": 2}', "line 2 on: a comma or the end of the array was wanted"),
        (b'[{"a": 1} {"a": 2}]', "line 1 on: a comma or the end of the array was wanted"),
        (b'[{"a": 1},\n\n]', "line 3 on: a value was wanted after the comma"),
        (b'[{"a": 1}] x', "line 1 on: there is more after the end of the array"),
        (b"[", "line 1 on: the array has no end"),
        (b'[{"a": 1},{"a": "\\x"}]', "line 1 on: Invalid"),
        (b"[" * 100_000, "line 1 on: nested too deep"),
        (b'{\n"a": 1}\n{"b":', "line 3 on: Expecting value"),
    ],
)
def test_broken_json_is_an_error_that_names_the_line(content: bytes, what: str, tmp_path: Path) -> None:
    """Behind the place where JSON over several lines breaks nothing can be told apart, so nothing is passed over."""
    file = write_lines(tmp_path / "a.json", content)
    with pytest.raises(DataError, match=f"a.json is broken JSON from {what}"):
        read(file)


def test_an_endless_value_is_an_error_and_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quote that never ends is not searched to the end of a large file."""
    monkeypatch.setattr(reading, "MAX_ELEMENT_CHARACTERS", 10_000)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 1000)
    file = write_lines(tmp_path / "a.json", b'[{"a": "' + b"x" * 100_000)
    with pytest.raises(DataError, match="longer than 10000 characters"):
        read(file)


@pytest.mark.parametrize("write", [write_gzip, write_zstd, write_parquet])
def test_a_file_that_was_cut_short_is_an_error(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Half a compressed file or table is never taken for a whole one."""
    file = write(tmp_path)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(DataError, match=rf"{file.name} cannot be read to its end: .*nothing was published"):
        read(file)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b" \r\n"])
def test_a_file_without_rows_is_an_error(content: bytes, tmp_path: Path) -> None:
    """A file that is empty or blank is named as such."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match="a.jsonl is empty"):
        read(file)


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    """Known endings are read, sub-folders too; others and empty files are counted; hidden ones are no content."""
    (tmp_path / "sub").mkdir()
    write_lines(tmp_path / "sub" / "a.jsonl", {"n": 1})
    write_lines(tmp_path / "b.json", [{"n": 2}])
    write_lines(tmp_path / "c.jsonl", "")
    write_lines(tmp_path / ".hidden.jsonl", {"n": 3})
    write_lines(tmp_path / "dataset_info.json", {"n": 4})
    write_lines(tmp_path / "README.md", "text")
    (source,) = open_inputs([Input(str(tmp_path))])
    records = list(read_records([source]))
    assert [(r.decode()["n"], r.file) for r in records] == [
        (2, str(tmp_path / "b.json")),
        (1, str(tmp_path / "sub" / "a.jsonl")),
    ]
    assert source.ignored == Counter({"unknown ending .md": 1, "empty": 1})


@pytest.mark.parametrize("sub", [".", "sub", "sub/deep"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rows.arrow", "holds a data set that `paceline prepare` made: name what it was made from"),
        ("regenerate.json", "holds answers of `paceline regenerate`: name it as an INPUT of its own"),
    ],
)
def test_a_folder_with_an_output_in_it_is_an_error(sub: str, name: str, message: str, tmp_path: Path) -> None:
    """What Paceline made is not read as if it were conversations, at any depth, nor left out without a word."""
    write_lines(tmp_path / "a.jsonl", {"n": 1})
    (tmp_path / sub).mkdir(parents=True, exist_ok=True)
    write_lines(tmp_path / sub / name, {})
    if (sub, name) == (".", "regenerate.json"):  # that is the INPUT of its own
        write_lines(tmp_path / "answers.jsonl", {"n": 2})
        assert [record.decode() for record in read(tmp_path)] == [{"n": 2}]
        return
    with pytest.raises(DataError, match=re.escape(f"input {tmp_path / sub} {message}")):
        open_inputs([Input(str(tmp_path))])


def test_caches_of_the_datasets_library_are_no_rows_of_a_data_set(tmp_path: Path) -> None:
    """What `map` leaves beside a saved data set is passed over and counted; elsewhere such a file is read."""
    folder = write_saved_data_set(tmp_path)
    (shard, *_) = sorted(folder.glob("*.arrow"))
    shutil.copy(shard, folder / "cache-0123abcd.arrow")
    (source,) = open_inputs([Input(str(folder))])
    assert len(list(read_records([source]))) == len(RECORDS)
    assert source.ignored == Counter({"cache of the datasets library": 1})
    (tmp_path / "other").mkdir()
    shutil.copy(shard, tmp_path / "other" / "cache-0123abcd.arrow")
    assert read(tmp_path / "other")


def test_links_to_folders_are_followed_and_every_folder_is_read_once(tmp_path: Path) -> None:
    """A linked folder belongs to its input; circles and second ways to a folder are counted."""
    for folder in ("elsewhere", "in", "in/a"):
        (tmp_path / folder).mkdir()
        write_lines(tmp_path / folder / "x.jsonl", {"n": folder})
    (tmp_path / "in" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "c").symlink_to(tmp_path / "in" / "a")
    (tmp_path / "in" / "a" / "up").symlink_to("..")
    (source,) = open_inputs([Input(str(tmp_path / "in"))])
    records = list(read_records([source]))
    assert [(record.decode()["n"], record.file) for record in records] == [
        ("in", str(tmp_path / "in" / "x.jsonl")),
        ("in/a", str(tmp_path / "in" / "a" / "x.jsonl")),
        ("elsewhere", str(tmp_path / "in" / "b" / "x.jsonl")),
    ]
    assert source.ignored == Counter({"folder that is read under another name": 2})


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_an_error(ending: str, tmp_path: Path) -> None:
    """A row could hold only one of them, and nobody would know which."""
    table = pa.table([pa.array(["a"]), pa.array(["b"]), pa.array([1])], names=["text", "text", "n"])
    file = write_table(table, tmp_path / f"a.{ending}")
    with pytest.raises(DataError, match=rf"a.{ending} has 2 columns called 'text': rename them"):
        read(file)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("column", "what"),
    [
        (pa.array([b"one", b"\xff", b"three"]).view(pa.string()), "can't decode byte 0xff"),
        (pa.array([1, 253402300800 * 10**6, 3]).cast(pa.timestamp("us")), "out of range"),
        (pa.array([1, 10**8, 3], pa.int32()).cast(pa.date32()), "out of range"),
    ],
)
def test_a_row_that_python_cannot_hold_is_rejected_alone(
    column: pa.Array, what: str, ending: str, tmp_path: Path
) -> None:
    """Rows before and behind it are read, and the column is named."""
    file = write_table(pa.table({"n": [1, 2, 3], "odd": column}), tmp_path / f"a.{ending}")
    first, second, third = read(file)
    assert [(record.decode()["n"], record.number) for record in (first, third)] == [(1, 1), (3, 3)]
    with pytest.raises(Rejection, match=f"^unreadable row: column odd: .*{what}") as caught:
        second.decode()
    assert (caught.value.kind, second.number, second.text) == ("unreadable row", 2, "")


@pytest.mark.parametrize("write", [write_json_lines, write_array, write_parquet, write_one_shard])
def test_names_that_are_no_utf8_are_shown_as_text_that_is(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Such a file is read; records, provenance and counts can be written down as UTF-8, and tell two names apart."""
    file = write(tmp_path)
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xfe"))
    folder.mkdir()
    for byte in (b"\xfc", b"\xff"):
        shutil.copy(file, folder / f"{os.fsdecode(byte)}{file.suffix}")
    (folder / os.fsdecode(b"a.\xff")).touch()
    (source,) = open_inputs([parse_input(f"{folder},license={os.fsdecode(bytes([255]))}")])
    shown = f"{tmp_path}/\\xfe"
    names = {record.file for record in read_records([source])}
    assert names == {rf"{shown}/\xfc{file.suffix}", rf"{shown}/\xff{file.suffix}"}
    assert source.ignored == Counter({r"unknown ending .\xff": 1})
    assert source.provenance["path"] == shown
    json.dumps([source.provenance, source.ignored], ensure_ascii=False).encode()


@pytest.mark.parametrize("name", [b"none\xff", b"empty\xff", b"broken\xff.json", b"torn\xff.parquet", b"folder\xff"])
def test_messages_about_names_that_are_no_utf8_are_utf8(name: bytes, tmp_path: Path) -> None:
    """A message can be written to any file or terminal."""
    write_lines(tmp_path / os.fsdecode(b"broken\xff.json"), b"[{")
    write_lines(tmp_path / os.fsdecode(b"torn\xff.parquet"), b"PAR1PAR1")
    (tmp_path / os.fsdecode(b"empty\xff")).touch()
    (tmp_path / os.fsdecode(b"folder\xff")).mkdir()
    with pytest.raises(DataError, match=r"\\xff") as caught:
        read(f"{tmp_path}/{os.fsdecode(name)}")
    str(caught.value).encode()
    with pytest.raises(DataError, match=r"\\xff.*unknown option") as caught:
        parse_input(f"{os.fsdecode(name)},foo=1")
    str(caught.value).encode()


@pytest.mark.parametrize("in_folder", [False, True])
def test_a_pipe_is_refused_before_anything_is_read(in_folder: bool, tmp_path: Path) -> None:
    """Opening a pipe waits for its writer, and what was read of it once could not be read again."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="pipe.jsonl is no regular file: write it to a file first"):
        open_inputs([Input(str(tmp_path if in_folder else tmp_path / "pipe.jsonl"))])
    with pytest.raises(DataError, match="/dev/null is no regular file"):
        open_inputs([Input("/dev/null")])


def test_rows_of_many_megabytes_are_read(tmp_path: Path) -> None:
    """An answer of `regenerate` may hold a long conversation and its token ids."""
    file = write_lines(tmp_path / "a.jsonl", {"text": "x" * (30 << 20)})
    (record,) = read(file)
    assert len(record.decode()["text"]) == 30 << 20


def test_a_digest_tells_whether_an_input_is_what_it_was(tmp_path: Path) -> None:
    """It hangs on the names below the input, sizes and beginnings of its files, and not on where the input lies."""

    def facts(path: Path) -> tuple[int, str]:
        (source,) = open_inputs([Input(str(path))])
        return source.provenance["bytes"], source.provenance["digest"]

    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    write_lines(folder / "a.jsonl", {"n": 1})
    write_lines(folder / "sub" / "b.jsonl", {"n": 22})
    first = facts(folder)
    assert first == (sum(file.stat().st_size for file in folder.rglob("*.jsonl")), first[1])
    assert re.fullmatch("[0-9a-f]{16}", first[1])
    assert facts(shutil.copytree(folder, tmp_path / "copy")) == first
    write_lines(folder / "a.jsonl", {"n": 2})
    second = facts(folder)
    assert second[0] == first[0] and second[1] != first[1]
    (folder / "sub" / "b.jsonl").rename(folder / "sub" / "c.jsonl")
    assert facts(folder)[1] != second[1]
    alone = facts(folder / "a.jsonl")
    with (folder / "a.jsonl").open("ab") as file:
        file.write(b" " * (2 << 20))
    longer = facts(folder / "a.jsonl")
    os.truncate(folder / "a.jsonl", longer[0] - 1)
    assert len({alone, longer, facts(folder / "a.jsonl")}) == 3


def test_a_folder_of_answers_has_a_digest_of_them(tmp_path: Path) -> None:
    """Other answers under the same description are another input."""
    write_lines(tmp_path / "regenerate.json", {"engine": "stub"})
    digests = set()
    for n in (1, 2):
        file = write_lines(tmp_path / "answers.jsonl", {"n": n})
        (source,) = open_inputs([Input(str(tmp_path))])
        assert source.provenance["regenerated"] == {"engine": "stub"}
        assert (source.provenance["bytes"], source.provenance["files"]) == (file.stat().st_size, 1)
        digests.add(source.provenance["digest"])
    assert len(digests) == 2


@pytest.mark.parametrize("how", ["whole", "left early", "torn"])
@pytest.mark.parametrize(
    "write", [write_json_lines, write_array, write_gzip, write_zstd, write_parquet, write_one_shard]
)
def test_no_file_is_left_open(write: Callable[[Path], Path], how: str, tmp_path: Path) -> None:
    """Whether a file was read to its end, left before, or broke, it is closed, while the error is still held too."""
    folder = tmp_path / "in"
    folder.mkdir()
    file = write(tmp_path)
    file = file.rename(folder / file.name)
    if how == "torn":
        os.truncate(file, file.stat().st_size // 2)
    before = os.listdir("/proc/self/fd")
    (source,) = open_inputs([Input(str(folder))])
    gc.disable()
    try:
        chunks = source.chunks()
        held: Any = next(chunks, None) if how == "left early" else None
        if how == "left early":
            chunks.close()  # type: ignore[attr-defined]  # it is a generator
        else:
            try:
                held = list(chunks)
            except DataError as error:
                held = error
        assert os.listdir("/proc/self/fd") == before
        assert held
    finally:
        gc.enable()


def test_inputs_that_are_missing_or_of_no_use_are_named_before_any_is_read(tmp_path: Path) -> None:
    """A missing file, an empty folder, a finished data set: each with what to do."""
    for text, message in [
        (tmp_path / "none.jsonl", "none.jsonl cannot be read: there is no such file"),
        ("org/name", "there is no such file; a data set of a hub is written hf:org/name"),
        (tmp_path, "holds no file that can be read; wanted: .jsonl"),
    ]:
        with pytest.raises(DataError, match=message):
            open_inputs([parse_input(str(text))])
    (tmp_path / "rows.arrow").touch()
    with pytest.raises(DataError, match="name what it was made from"):
        open_inputs([Input(str(tmp_path))])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    """A folder without rights is not taken for an empty one."""
    (tmp_path / "closed").mkdir(mode=0)
    write_lines(tmp_path / "a.jsonl", {"n": 1})
    with pytest.raises(DataError, match="closed cannot be read: Permission denied"):
        open_inputs([Input(str(tmp_path))])


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while a folder is walked travels, whoever runs this."""

    def refuse(path: Any = ".") -> Iterator[Any]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        open_inputs([Input(str(tmp_path))])


def test_a_null_that_columns_fill_in_is_no_argument_of_a_call(tmp_path: Path) -> None:
    """In a table two calls with other arguments share their columns; each keeps its own alone."""
    messages = [
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": {"b": {"c": "x"}}}}]}],
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": m} for m in messages]), tmp_path / "a.parquet")
    assert [record.decode()["messages"] for record in read(tmp_path / "a.parquet")] == messages


def test_options_stand_behind_commas(tmp_path: Path) -> None:
    """Options are read from the end; a file of that very name wins."""
    file = write_lines(tmp_path / "a.jsonl", {})
    assert parse_input(f"{file},weight=0.5,license=mit") == Input(str(file), weight=0.5, license="mit")
    assert parse_input("hf:org/name,split=s,config=c,revision=r") == Input(
        "hf:org/name", split="s", config="c", revision="r"
    )
    odd = write_lines(tmp_path / "b,weight=2", {})
    assert parse_input(str(odd)) == Input(str(odd))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,foo=1", "unknown option foo; known: weight, split"),
        ("a,weight=x", "weight=x is no number"),
        ("a,weight=0", "weight=0 is not above 0"),
        ("a,weight=nan", "weight=nan is not above 0"),
        ("a,split=x", "split is for data sets of a hub"),
    ],
)
def test_options_without_sense_are_refused(text: str, message: str) -> None:
    """An unknown option is no part of a file name."""
    with pytest.raises(DataError, match=message):
        parse_input(text)


def test_a_hub_data_set_has_splits(tmp_path: Path) -> None:
    """`train` is taken by default, or the only split; others are named; an unknown one lists them."""
    for split in ("train", "test"):
        write_lines(tmp_path / f"{split}.jsonl", {"text": split})
    assert [record.decode() for record in read(f"hf:{tmp_path}")] == [{"text": "train"}]
    (record,) = read(f"hf:{tmp_path},split=test")
    assert (record.decode(), record.file, record.number) == ({"text": "test"}, f"hf:{tmp_path},split=test", 1)
    with pytest.raises(DataError, match="has no split dev: choose with ,split= one of train, test"):
        read(f"hf:{tmp_path},split=dev")


def test_a_hub_that_fails_is_an_error_with_the_librarys_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the library raises becomes one line."""

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match="input hf:org/name cannot be loaded: no route$"):
        open_inputs([parse_input("hf:org/name")])


def test_what_the_hub_says_of_a_data_set_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Commit and licence of the card stand in the provenance; a hub that says nothing is no obstacle, and no secret."""
    import huggingface_hub

    class Api:
        def dataset_info(self, name: str, revision: str | None) -> Any:
            assert (name, revision) == ("org/name", "main")
            return SimpleNamespace(sha="abc123", card_data=SimpleNamespace(license="apache-2.0"))

    local = datasets.load_dataset(str(write_lines(tmp_path / "train.jsonl", {"text": "x"}).parent), streaming=True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: local)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    (source,) = open_inputs([parse_input("hf:org/name,revision=main")])
    assert source.provenance["revision"] == "abc123"
    assert source.provenance["license"] == "apache-2.0"
    monkeypatch.setattr(Api, "dataset_info", lambda *_, **__: 1 / 0)
    (source,) = open_inputs([parse_input("hf:org/name,revision=main,license=mit")])
    assert (source.provenance["revision"], source.provenance["license"]) == ("main", "mit")
    assert "revision and licence of hf:org/name are not known: division by zero" in caplog.text


def test_a_tar_archive_is_no_file_of_lines(tmp_path: Path) -> None:
    """Its header would hide the first conversation."""
    file = write_lines(tmp_path / "a.jsonl", chat("q", "a"))
    for name, mode in (("a.tar", "w"), ("a.tar.gz", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as archive:  # type: ignore[call-overload]  # the mode is a variable
            archive.add(file, "a.jsonl")
        with pytest.raises(DataError, match=f"{name} is a tar archive: unpack it"):
            read(tmp_path / name)


def test_an_empty_argument_is_not_this_folder() -> None:
    """An unset variable of a shell reads nothing; an option that is given twice is not guessed."""
    for text in ("", "hf:"):
        with pytest.raises(DataError, match="is empty: a file, a folder or hf:ORG/NAME"):
            parse_input(text)
    with pytest.raises(DataError, match="weight is given twice"):
        parse_input("a,weight=1,weight=2")
