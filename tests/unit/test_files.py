"""Files and folders appear whole or not at all, whatever happens in the middle."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.files import (
    child,
    default_cache_dir,
    explain,
    is_running,
    remove_leftovers,
    sha256,
    staged_folder,
    without_credentials,
    write_atomically,
)


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


@pytest.mark.parametrize("kind", ["file", "dangling link", "link"])
def test_a_folder_takes_the_place_of_anything(tmp_path: Path, kind: str) -> None:
    """A plain file or a link where the folder is to be is replaced, again and again; a link's target stays."""
    place, other = tmp_path / "place", tmp_path / "other"
    other.mkdir()
    for text in ("one", "two"):
        if kind == "file":
            place.write_text("in the way")
        else:
            place.symlink_to(other if kind == "link" else "nowhere")
        with staged_folder(place) as partial:
            fill(partial, text)
        assert (place / "file").read_text() == text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "place"]
        shutil.rmtree(place)


def test_plain_files_among_leftovers_go_as_well(tmp_path: Path) -> None:
    """What stands where a folder of this process is to be written is no hindrance."""
    (tmp_path / f".place.partial-{os.getpid()}").write_text("")
    (tmp_path / ".place.replaced").write_text("")
    (tmp_path / "place").mkdir()
    with staged_folder(tmp_path / "place") as partial:
        fill(partial, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_files_of_killed_writers_go(tmp_path: Path) -> None:
    """The next write of a file removes what a dead process left beside it, and nothing of living ones or others."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = [tmp_path / f".file.partial-{dead.pid}", tmp_path / f".file.partial-{os.getppid()}"]
    other = tmp_path / f".other.partial-{dead.pid}"
    for path in (*left, other):
        path.write_text("half")
    write_atomically(tmp_path / "file", "new")
    assert not left[0].exists() and left[1].exists() and other.exists()


def test_the_name_of_a_file_is_on_the_disk_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content first, then the rename, then the folder that holds the name: a power cut leaves the old or the new."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition("-")[0])
        fsync(descriptor)

    def note_replace(source: Path, destination: Path) -> None:
        calls.append("rename")
        replace(source, destination)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_atomically(tmp_path / "file", "new")
    assert calls == [".file.partial", "rename", tmp_path.name.partition("-")[0]]


def test_a_file_system_that_cannot_sync_folders_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems refuse to sync a folder; a file that cannot be synced is an error."""
    fsync = os.fsync

    def refusing(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)
    write_atomically(tmp_path / "file", "new")
    with staged_folder(tmp_path / "place") as partial:
        fill(partial, "new")
    assert (tmp_path / "place" / "inner" / "file").read_text() == "new"

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"):
        write_atomically(tmp_path / "file", "newer")


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/passwd", "a/b", "../a", "a\0b", 3, None, ["a"]], ids=repr)
def test_names_from_files_cannot_lead_away(tmp_path: Path, name: object) -> None:
    """Only a plain name makes the path of an entry."""
    with pytest.raises(ValueError, match="is no name of a file in"):
        child(tmp_path, name)
    assert child(tmp_path, "model-00001-of-00002.safetensors").parent == tmp_path


def test_passwords_in_urls_are_masked() -> None:
    """In texts at any depth; what only looks alike stays."""
    tree = {"a": ["x https://u:p/w@h/q, s3://key@b"], "b": ("git+ssh://git@h/r",), "c": 3, "d": "a@b https://h/x"}
    assert without_credentials(tree) == {
        "a": ["x https://***@h/q, s3://***@b"],
        "b": ["git+ssh://***@h/r"],
        "c": 3,
        "d": "a@b https://h/x",
    }


def test_an_error_says_what_helps() -> None:
    """The system's reason, and a remedy for those that have one."""
    assert explain(OSError(errno.EDQUOT, "Disk quota exceeded")) == "Disk quota exceeded; free space within your quota"
    assert explain(OSError(errno.EPERM, "Operation not permitted")) == "Operation not permitted"
    assert explain(OSError("a word")) == "a word"
