"""Lines are whole, in order and each there once, whatever the disk does in between."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.control import lines
from paceline.control.lines import LineLog

REAL_WRITE = os.write


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "RETRY_S", 0.0)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(os, "write", disk.write)
    yield disk


class Disk:
    """Takes so many bytes and no more, while `room` is a number."""

    def __init__(self) -> None:
        self.room: int | None = None
        self.number = errno.ENOSPC

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room is None:
            return REAL_WRITE(descriptor, data)
        if not self.room:
            raise OSError(self.number, os.strerror(self.number))
        taken = REAL_WRITE(descriptor, data[: self.room])
        self.room -= taken
        return taken


def read(path: Path) -> list[int]:
    """What a reader finds, who fails on a torn line in the middle; one at the end is passed over."""
    *whole, last = path.read_bytes().split(b"\n")
    del last
    return [json.loads(text)["n"] for text in whole]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("stays_open", [True, False])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG])
def test_lines_wait_while_the_disk_takes_none(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture, number: int, stays_open: bool
) -> None:
    """None is lost and none is torn; one warning says that it began, and one that it is over."""
    log, disk.number = LineLog(tmp_path / "log", stays_open), number
    log.write({"n": 0})
    disk.room = 4
    for n in range(1, 6):
        log.write({"n": n})
        assert (tmp_path / "log").read_bytes() == b'{"n": 0}\n'
    disk.room = None
    log.write({"n": 6})
    assert read(tmp_path / "log") == list(range(7))
    begin, end = messages(caplog)
    assert os.strerror(number) in begin and "lines wait in memory" in begin
    assert end.endswith("is written again, with 6 lines that waited")
    log.close()
    assert len(messages(caplog)) == 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.none(), st.integers(0, 60)), min_size=1, max_size=30),
    st.booleans(),
    st.binary(max_size=12),
    st.booleans(),
)
def test_any_order_of_failures_keeps_every_line(
    tmp_path_factory: pytest.TempPathFactory,
    disk: Disk,
    rooms: list[int | None],
    stays_open: bool,
    torn: bytes,
    can_cut: bool,
) -> None:
    """Whatever each write finds room for, and also where a torn line cannot be cut off at once."""
    path, disk.room = tmp_path_factory.mktemp("any") / "log", None
    path.write_bytes(torn.replace(b"\n", b""))  # of a process that died
    log, ftruncate = LineLog(path, stays_open), os.ftruncate
    for n, room in enumerate(rooms):
        disk.room = room
        with pytest.MonkeyPatch.context() as patch:
            if not can_cut and path.stat().st_size and room is not None and n % 2:
                patch.setattr(os, "ftruncate", refusing)
            log.write({"n": n})
        assert os.ftruncate is ftruncate
        found = path.read_bytes()
        whole = found[: found.rfind(b"\n") + 1]
        assert [json.loads(text)["n"] for text in whole.splitlines()] == list(range(whole.count(b"\n")))
    disk.room = None
    log.close()
    assert read(path) == list(range(len(rooms))) and path.read_bytes().endswith(b"}\n")


def refusing(descriptor: int, size: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path: Path) -> None:
    """The kernel's own refusal, in the middle of a line."""
    log = LineLog(tmp_path / "log")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, hard))
    try:
        for n in range(3):
            log.write({"n": n})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "log").read_bytes() == b'{"n": 0}\n'
    log.close()
    assert read(tmp_path / "log") == [0, 1, 2]


def test_what_waits_is_bounded(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest go first, and are counted."""
    monkeypatch.setattr(lines, "MAX_WAITING", 3)
    log, disk.room = LineLog(tmp_path / "log"), 0
    for n in range(8):
        log.write({"n": n})
    disk.room = None
    log.sync()
    assert read(tmp_path / "log") == [5, 6, 7]
    assert messages(caplog)[1].endswith("with 3 lines that waited; 5 older ones were dropped")


def test_lines_that_are_lost_at_the_end_are_counted(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is full to the end costs the lines, and an error says how many."""
    log, disk.room = LineLog(tmp_path / "log"), 0
    for n in range(4):
        log.write({"n": n})
    log.close()
    assert messages(caplog)[-1].endswith("log lacks the last 4 lines: the disk took none")


def test_a_disk_with_errors_is_not_asked_at_every_line(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt can take long: there is a pause between them, but the end does not wait for it."""
    monkeypatch.setattr(lines, "RETRY_S", 3600.0)
    log, disk.room = LineLog(tmp_path / "log"), 0
    log.write({"n": 0})
    disk.room = None
    log.write({"n": 1})
    assert not (tmp_path / "log").stat().st_size
    log.close()
    assert read(tmp_path / "log") == [0, 1]


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: None], ids=["a folder", "no folder above"])
def test_a_place_that_cannot_be_opened_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    """Lines wait as well where the file cannot be made, until it can."""
    path = tmp_path / "above" / "log"
    if make is Path.mkdir:
        path.mkdir(parents=True)
    log = LineLog(path)
    log.write({"n": 0})
    assert len(messages(caplog)) == 1
    if make is Path.mkdir:
        path.rmdir()
    else:
        path.parent.mkdir()
    log.write({"n": 1})
    assert read(path) == [0, 1]


def test_what_cannot_be_forced_to_the_disk_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing fdatasync raises nothing, and leaves no descriptor behind."""

    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    log = LineLog(tmp_path / "log", stays_open=True)
    log.sync()
    log.write({"n": 0})
    before = len(os.listdir("/proc/self/fd"))
    log.sync()
    log.sync()
    assert len(os.listdir("/proc/self/fd")) == before
    [text] = messages(caplog)
    assert "not known to be on the disk: Input/output error" in text


def test_writing_does_not_wait_for_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a slow disk forces lines out, the next are taken."""
    begun, released = threading.Event(), threading.Event()

    def slow(_descriptor: int) -> None:
        begun.set()
        assert released.wait(30)

    monkeypatch.setattr(os, "fdatasync", slow)
    log = LineLog(tmp_path / "log", stays_open=True)
    log.write({"n": 0})
    thread = threading.Thread(target=log.sync)
    thread.start()
    assert begun.wait(30)
    log.write({"n": 1})
    assert read(tmp_path / "log") == [0, 1] and thread.is_alive()
    released.set()
    thread.join()
    log.close()


def test_threads_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    """Many threads write at a time; every line is whole and there once."""
    log = LineLog(tmp_path / "log")

    def write(thread: int) -> None:
        for n in range(50):
            log.write({"n": 50 * thread + n})

    threads = [threading.Thread(target=write, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read(tmp_path / "log")) == list(range(300))


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start is looked for as far back as it takes."""
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 8)
    (tmp_path / "log").write_bytes(b'{"n": 0}\n' + b"x" * 100)
    LineLog(tmp_path / "log").write({"n": 1})
    assert read(tmp_path / "log") == [0, 1]


def test_all_is_well_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without trouble nothing is logged."""
    with caplog.at_level(logging.DEBUG):
        log = LineLog(tmp_path / "log", stays_open=True)
        for n in range(3):
            log.write({"n": n})
            log.sync()
        log.close()
    assert read(tmp_path / "log") == [0, 1, 2] and not caplog.records


def test_room_is_left_within_the_line(tmp_path: Path) -> None:
    """Blanks stand before the line's end, where a reader of JSON passes over them."""
    lines = LineLog(tmp_path / "lines.jsonl")
    lines.write({"step": 1}, room=5)
    lines.write({"step": 2})
    assert (tmp_path / "lines.jsonl").read_bytes() == b'{"step": 1}     \n{"step": 2}\n'
