"""A run folder is one process's at a time, its small files are whole, and hold no passwords."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import signal
from pathlib import Path

import pytest

from paceline.config import RunConfig, load_config
from paceline.control.run_folder import RunFolder
from paceline.errors import CheckpointError

URL = "https://user:s3/cr@t@host.example/model"


def config(*overrides: str) -> RunConfig:
    return load_config(None, ["target.path=a", "data.path=b", *overrides])


def events(folder: RunFolder) -> list[dict[str, object]]:
    return [json.loads(text) for text in (folder.path / "events.jsonl").read_text().splitlines()]


def forked_holder(folder: RunFolder) -> int:
    """Another process that holds the run until it is killed; its id."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            with folder.lock():
                os.write(writer, b"x")
                signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read(1) == b"x"
    return pid


def test_a_held_run_names_its_holder_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    """The message has process and host; the file that a killed process leaves keeps nobody out."""
    folder = RunFolder(tmp_path / "run")
    pid = forked_holder(folder)
    try:
        with pytest.raises(CheckpointError, match=f"is being trained by process {pid} on {platform.node()}: stop it"):
            folder.lock().__enter__()
        folder.write_json("run.json", {"pid": pid, "host": "far-away"})
        with pytest.raises(CheckpointError, match=f"process {pid} on far-away: "):
            folder.lock().__enter__()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert (folder.path / "run.lock").read_text() == str(pid)
    with folder.lock():
        assert (folder.path / "run.lock").read_text() == str(os.getpid())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The error says what is missing and what to do: without a lock two trainers could write there."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(CheckpointError, match=r"cannot be locked: .*; its file system has no locks.* another folder"):
        RunFolder(tmp_path / "run").lock().__enter__()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """A plain file above it is a user's error."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"run.dir .*/file/run cannot be locked: Not a directory"):
        RunFolder(tmp_path / "file" / "run").lock().__enter__()


def test_an_error_while_the_run_is_held_passes(tmp_path: Path) -> None:
    """What goes wrong inside is no failure of the lock."""
    with pytest.raises(OSError, match="mine"), RunFolder(tmp_path).lock():
        raise OSError("mine")


def test_events_wait_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An event that cannot be written ends nothing, and is there with its own time at the end of the run."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = RunFolder(tmp_path)
    with folder.lock():
        folder.event("started", step=0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            folder.event("checkpoint", step=5)
        assert [event["event"] for event in events(folder)] == ["started"]
    assert [(event["event"], event["step"]) for event in events(folder)] == [("started", 0), ("checkpoint", 5)]
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records][:1] == [
        "No space left on device; free space on this disk"
    ]


def test_nothing_that_is_written_has_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """User and password in a URL are masked in every file, nothing of the environment is there, and the configuration
    loads."""
    monkeypatch.setenv("HF_TOKEN", "hf_notToBeWritten")
    folder = RunFolder(tmp_path)
    folder.write_config(config(f"target.path={URL}", f"draft.options={{mirror: ['{URL}']}}"))
    folder.write_json("run.json", {"data": {"path": URL}})
    folder.event("failed", reason=f"cannot read {URL}: gone")
    for path in tmp_path.iterdir():
        text = path.read_text()
        assert "s3" not in text and "cr@t" not in text and "hf_not" not in text and "https://***@host.example/" in text
    saved = folder.read_config()
    assert saved.target.path == "https://***@host.example/model"
    assert saved.draft.options == {"mirror": ["https://***@host.example/model"]}


def test_a_configuration_comes_back_as_it_was(tmp_path: Path) -> None:
    """Paths with an at-sign are no passwords."""
    folder, wanted = RunFolder(tmp_path), config("target.path=org/model@v1", "data.path=/data/a@b:c")
    folder.write_config(wanted)
    assert folder.read_config() == wanted


def test_a_folder_in_which_no_run_came_about_goes(tmp_path: Path) -> None:
    """A bad setting leaves nothing behind; what was there before stays."""
    with RunFolder(tmp_path / "new").lock():
        pass
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with RunFolder(tmp_path / "old").lock():
        pass
    assert (tmp_path / "old" / "run.lock").exists()


def test_saves_are_remembered(tmp_path: Path) -> None:
    """By the events, so that checkpoints that are gone are missed."""
    run = RunFolder(tmp_path)
    run.event("started", step=0)
    assert not run.has_saved()
    run.event("checkpoint", step=5)
    assert run.has_saved()
