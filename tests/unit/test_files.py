"""Files and folders appear whole or not at all, whatever happens in the middle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.files import default_cache_dir, is_running, remove_leftovers, sha256, staged_folder, write_atomically


def fill(folder: Path, text: str) -> None:
    (folder / "file").write_text(text)
    (folder / "inner").mkdir()
    (folder / "inner" / "file").write_text(text)


def test_a_folder_takes_its_place_whole(tmp_path: Path) -> None:
    """Nothing is seen before the block ends, then all of it; a second one replaces the first."""
    place = tmp_path / "deep" / "place"
    for text in ("one", "two"):
        with staged_folder(place) as partial:
            fill(partial, text)
            assert not place.exists() or (place / "file").read_text() == "one"
        assert (place / "inner" / "file").read_text() == text
    assert [path.name for path in place.parent.iterdir()] == ["place"]


def test_a_failure_leaves_the_old_folder(tmp_path: Path) -> None:
    """An exception in the block keeps what was there and leaves nothing beside it."""
    place = tmp_path / "place"
    with staged_folder(place) as partial:
        fill(partial, "old")
    with pytest.raises(RuntimeError, match="in the middle"), staged_folder(place) as partial:
        fill(partial, "new")
        raise RuntimeError("in the middle")
    assert (place / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_a_failed_swap_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second of the two renames fails, the first is undone."""
    place = tmp_path / "place"
    with staged_folder(place) as partial:
        fill(partial, "old")
    original = os.rename

    def rename(source: Path, destination: Path) -> None:
        if ".partial-" in str(source):
            raise OSError("no")
        original(source, destination)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="no"), staged_folder(place) as partial:
        fill(partial, "new")
    assert (place / "file").read_text() == "old"


def test_leftovers_of_killed_processes_go(tmp_path: Path) -> None:
    """A swap cut short is undone, partial folders of dead processes go, those of living ones stay."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".place.partial-{dead.pid}").mkdir()
    (tmp_path / f".place.partial-{os.getppid()}").mkdir()
    (tmp_path / ".place.replaced").mkdir()
    (tmp_path / ".place.replaced" / "file").write_text("old")
    remove_leftovers(tmp_path / "place")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".place.partial-{os.getppid()}", "place"]
    assert (tmp_path / "place" / "file").read_text() == "old"


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails keeps the old content and leaves no temporary file."""
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(_descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_hash_and_process(tmp_path: Path) -> None:
    """The hash is SHA-256 of the content, and this process is running."""
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert is_running(os.getpid())


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """PACELINE_CACHE wins over XDG_CACHE_HOME, which wins over ~/.cache."""
    monkeypatch.setenv("PACELINE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert default_cache_dir() == Path("/a")
    monkeypatch.delenv("PACELINE_CACHE")
    assert default_cache_dir() == Path("/b/paceline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "paceline"
