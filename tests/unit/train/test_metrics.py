"""The metrics file has one whole line of each step that the run has made, also after a crash and on a full disk."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import pytest

from paceline.control import lines as line_files
from paceline.errors import CheckpointError
from paceline.train import metrics
from paceline.train.metrics import MetricsLog, join, lines_until, read_metrics
from tests.toy import Toy, train


def write(path: Path, steps: Sequence[int], tail: bytes = b"") -> None:
    path.write_bytes(b"".join(json.dumps({"step": step, "loss": 0.5}).encode() + b"\n" for step in steps) + tail)


def steps_of(path: Path) -> list[int]:
    """Of every line; fails on one that is not whole."""
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("found", "tail"),
    [
        (range(1, 9), b""),
        (range(1, 6), b""),
        (range(1, 9), b'{"step": 9, "lo'),
        (range(1, 6), b'{"step": 6, "loss": 0.5}'),
        (range(1, 6), b"\0\0\0\0"),
        (range(1, 6), b"\xff\xfe\n"),
        (range(1, 6), b"\0\0\n\0\0"),
    ],
    ids=["later steps", "nothing to cut", "torn", "without its end", "zeros", "no text", "zeros and a line end"],
)
def test_a_resumed_run_goes_on_after_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, found: range, tail: bytes
) -> None:
    """Each step has one line, whatever stood after the checkpoint's step."""
    path = tmp_path / "metrics.jsonl"
    write(path, found, tail)
    log = MetricsLog(path, 5)
    log.write({"step": 6, "loss": 0.25})
    log.close()
    assert steps_of(path) == [1, 2, 3, 4, 5, 6] and not caplog.records


@pytest.mark.parametrize("steps", [[1, 2, 3, 2, 3, 4, 5], [1, 3, 2, 4, 5], [1, 2, 8, 3, 4, 5]], ids=str)
def test_lines_in_disorder_are_put_in_order(tmp_path: Path, steps: list[int]) -> None:
    """A file of a run that went back without cutting has each step once, in order, of the later training."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "at": at}) + "\n" for at, step in enumerate(steps)))
    assert [line["step"] for line in lines_until(path, 4)] == [1, 2, 3, 4]
    MetricsLog(path, 5).close()
    assert read_metrics(path) == [
        {"step": step, "at": max(at for at, other in enumerate(steps) if other == step)} for step in range(1, 6)
    ]


def test_missing_lines_are_said_and_not_invented(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a power cut the checkpoint can be ahead of the file: one warning names the steps."""
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 5, 7], b'{"st\n')
    log = MetricsLog(path, 10)
    log.write({"step": 11})
    log.close()
    assert steps_of(path) == [1, 2, 5, 7, 11]
    [record] = caplog.records
    assert "has no lines of steps 3-4, 6, 8-10: " in record.getMessage()


def test_a_lost_file_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where there is nothing left at all."""
    MetricsLog(tmp_path / "metrics.jsonl", 3).close()
    assert "no lines of steps 1-3" in caplog.text


def test_cutting_back_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk a run can be resumed, as lines are cut off in place."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 9), b'{"torn')
    monkeypatch.setattr(metrics, "write_atomically", full)
    monkeypatch.setattr(os, "write", full)
    log = MetricsLog(path, 5)
    log.write({"step": 6})
    log.close()
    assert steps_of(path) == [1, 2, 3, 4, 5]


def test_where_it_cannot_be_cut_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the file, the system's reason and the remedy; the file is as it was."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "metrics.jsonl"
    write(path, [2, 1])
    before = path.read_bytes()
    monkeypatch.setattr(metrics, "write_atomically", full)
    with pytest.raises(CheckpointError, match=r"metrics.jsonl cannot be cut.*No space left.*; free space on this disk"):
        MetricsLog(path, 2)
    assert path.read_bytes() == before


def test_lines_reach_the_disk_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sync` forces out what was written until then, of the file itself."""
    synced: list[tuple[int, bytes]] = []

    def fdatasync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((os.fstat(descriptor).st_ino, path.read_bytes()))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    log.write({"step": 1})
    log.sync()
    assert synced == [(path.stat().st_ino, b'{"step": 1}\n')]
    log.close()


def test_a_reader_passes_over_what_is_no_line(tmp_path: Path) -> None:
    """A damaged line in the middle does not hide those after it."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n[3]\n{"loss": 2}\n{"step": "x"}\n' + b"[" * 200_000 + b'\n\n{"step": 2}\n')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    assert read_metrics(tmp_path / "none") == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_run_goes_on_while_its_small_files_cannot_be_written(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """From step 4 to step 9 neither metrics nor events can be written: in the end both are complete, in order."""
    monkeypatch.setattr(line_files, "RETRY_S", 0.0)
    write, is_full = os.write, False

    def refusing(descriptor: int, data: bytes) -> int:
        if is_full and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".jsonl"):
            write(descriptor, data[:7])  # torn
            raise OSError(number, os.strerror(number))
        return write(descriptor, data)

    def at_step(step: int) -> None:
        nonlocal is_full
        is_full = 4 <= step < 9

    monkeypatch.setattr(os, "write", refusing)
    report, lines = train(toy.config(tmp_path, "run.max_steps=12"), at_step)
    assert report.ending == "finished" and read_metrics(tmp_path / "metrics.jsonl") == lines
    assert steps_of(tmp_path / "metrics.jsonl") == list(range(1, 13))
    events = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events][0] == "started"
    assert {event["step"] for event in events if event["event"] == "checkpoint"} >= {5, 10, 12}
    warned = [record.getMessage() for record in caplog.records if "metrics.jsonl" in record.getMessage()]
    assert len(warned) == 2 and os.strerror(number) in warned[0] and "written again" in warned[1]


def test_a_line_is_added_to_after_later_ones(tmp_path: Path) -> None:
    """What is found late stands in its step's line; no other line changes, and a reader that follows loses none."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    with open_when_there(log, path) as follower:
        for step in range(2, 6):
            log.write({"step": step, "loss": 0.5}, has_room=step in (2, 4))
        before = path.read_bytes()
        assert log.add(2, {"measured": 1.0 / 3}) and log.add(4, {"measured": 2.5}) and log.add(4, {"measured": 2.25})
        log.write({"step": 6, "loss": 0.5})
        assert follower.read() == path.read_text()
    log.close()
    found = {line["step"]: line.get("measured") for line in read_metrics(path)}
    assert found == {1: None, 2: 1.0 / 3, 3: None, 4: 2.25, 5: None, 6: None}
    assert len(path.read_bytes().splitlines()[1]) == len(before.splitlines()[1])
    MetricsLog(path, 6).close()  # a resumed run takes them as they are
    assert {line["step"]: line.get("measured") for line in read_metrics(path)} == found


def open_when_there(log: MetricsLog, path: Path) -> TextIO:
    log.write({"step": 1, "loss": 0.5})
    return open(path)


def test_what_has_no_place_is_joined_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line without room, one that is not there and a file that cannot be written stay as they are, until `join`."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    log.write({"step": 1, "loss": 0.5})
    log.write({"step": 2, "loss": 0.5}, has_room=True)
    before = path.read_bytes()
    assert not log.add(1, {"measured": 2.0}) and not log.add(3, {"measured": 2.0})
    assert not log.add(2, {"measured": "x" * metrics.ROOM})
    assert path.read_bytes() == before
    path.unlink()
    assert not log.add(2, {"measured": 2.0}) and "step 2 cannot be added to: No such file" in caplog.text
    path.write_bytes(before)
    log.close()
    join(path, {1: {"measured": 2.0}, 9: {"measured": 3.0}})
    assert [line.get("measured") for line in read_metrics(path)] == [2.0, None]


def test_room_is_made_where_something_is_awaited(tmp_path: Path) -> None:
    """A file that an earlier process wrote without room has it then, and one that is right is not written again."""
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    join(path, {1: {"measured": 1.5}}, awaited=[2])
    inode = path.stat().st_ino
    join(path, {1: {"measured": 1.5}}, awaited=[2])
    assert path.stat().st_ino == inode
    log = MetricsLog(path, 3)
    assert log.add(2, {"measured": 2.5}) and not log.add(3, {"measured": 2.5})
    log.close()
    assert [line.get("measured") for line in read_metrics(path)] == [1.5, 2.5, None]


def test_lines_that_wait_for_the_disk_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk takes none, adding to one says that it is not there, and all of them follow later."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    log.write({"step": 1}, has_room=True)
    monkeypatch.setattr(os, "write", refuse)
    log.write({"step": 2}, has_room=True)
    assert log.add(1, {"measured": 1.5}) and not log.add(2, {"measured": 2.5})
    monkeypatch.undo()
    log.sync()
    assert log.add(2, {"measured": 2.5})
    log.close()
    assert [line.get("measured") for line in read_metrics(path)] == [1.5, 2.5]


def refuse(descriptor: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")
