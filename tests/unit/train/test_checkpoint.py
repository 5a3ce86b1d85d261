"""Checkpoints: complete or invisible, damaged ones named, old ones removed, nothing lost when a save fails."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from paceline.config import Optim
from paceline.errors import CheckpointError
from paceline.models.draft import DFlashDrafter
from paceline.train import checkpoint, tensor_file
from paceline.train.checkpoint import TrainState
from paceline.train.optim import MasterAdamW
from paceline.train.tensor_file import read_tensors, write_tensors
from tests import tiny


def state(step: int) -> TrainState:
    return TrainState(step, 2 * step, 0, 100, 32, None, None, "target", "data")


def fresh(dtype: torch.dtype = torch.float32) -> tuple[DFlashDrafter, MasterAdamW]:
    drafter = DFlashDrafter(tiny.draft_shape())
    return drafter, MasterAdamW(drafter, Optim(), dtype, sums_gradients=False)


def trained(dtype: torch.dtype = torch.float32) -> tuple[DFlashDrafter, MasterAdamW]:
    """A drafter after one update, so that its moments are not 0."""
    torch.manual_seed(0)
    drafter, optimizer = fresh(dtype)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.set_rate(1e-3, 0)
    optimizer.apply(torch.ones(()))
    return drafter, optimizer


def save(folder: Path, step: int, keep_last: int = 9, drafter: DFlashDrafter | None = None) -> Path:
    model, optimizer = trained()
    return checkpoint.save(folder, state(step), drafter or model, optimizer, keep_last=keep_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """Weights, masters, moments, step counters and the state are equal after loading; the file holds the masters."""
    drafter, optimizer = trained(dtype)
    place = checkpoint.save(tmp_path, state(5), drafter, optimizer, keep_last=2)
    other, other_optimizer = fresh(dtype)
    checkpoint.load_training(place, other, other_optimizer, is_started=True)
    assert checkpoint.load_state(place) == state(5)
    for old, new in zip(drafter.parameters(), other.parameters(), strict=True):
        assert torch.equal(old, new) and new.dtype == dtype
    for name, master in optimizer.masters.items():
        assert torch.equal(master, other_optimizer.masters[name])
        assert torch.equal(checkpoint.load_drafter(place).get_parameter(name), master)
    for name, value in optimizer.state(5).items():
        assert torch.equal(value, other_optimizer.state(5)[name])


def test_a_state_of_another_version_is_named(tmp_path: Path) -> None:
    """A moment that is missing is named, with the file."""
    drafter, optimizer = trained()
    del optimizer.masters["norm.weight"]
    place = checkpoint.save(tmp_path, state(5), drafter, optimizer, keep_last=2)
    other, other_optimizer = fresh()
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors .* it has no exp_avg.norm.weight"):
        checkpoint.load_training(place, other, other_optimizer, is_started=True)


def test_only_safetensors_and_json_are_written(tmp_path: Path) -> None:
    """A checkpoint holds no pickle."""
    names = sorted(path.name for path in save(tmp_path, 1).iterdir())
    assert names == ["draft.json", "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut", r"model\.safetensors is damaged: \d+ bytes declared, \d+ found"),
        ("flip", r"model\.safetensors is damaged: its SHA-256"),
        ("unmark", r"no readable manifest\.json"),
        ("lose", r"optimizer\.safetensors cannot be read"),
    ],
)
def test_damaged_checkpoints_are_named_and_passed_over(
    tmp_path: Path, damage: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest complete one is used; a damaged one is passed over with what is wrong with it (case R01)."""
    good, bad = save(tmp_path, 10), save(tmp_path, 15)
    weights = bad / "model.safetensors"
    if damage == "cut":
        os.truncate(weights, weights.stat().st_size // 2)
    elif damage == "flip":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "unmark":
        (bad / "manifest.json").unlink()
    else:
        (bad / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=message):
        checkpoint.verify(bad)
    assert checkpoint.newest(tmp_path) == good
    assert "step-00000015" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"../../etc/passwd": {"bytes": 1, "sha256": "0"}}, r"names '\.\./\.\./etc/passwd', which is no file of the"),
        ({"/etc/passwd": {"bytes": 1, "sha256": "0"}}, "which is no file of the checkpoint"),
        ({"..": {"bytes": 1, "sha256": "0"}}, "which is no file of the checkpoint"),
        ({"a\\b": {"bytes": 1, "sha256": "0"}}, "which is no file of the checkpoint"),
        ({"\ud800": {"bytes": 1, "sha256": "0"}}, "which is no file of the checkpoint"),
        ({"state.json": 5}, "bytes and sha256 of 'state.json' are wanted"),
        ({"state.json": {"bytes": "5", "sha256": "0"}}, "bytes and sha256 of 'state.json' are wanted"),
        ({"state.json": {"bytes": True, "sha256": "0"}}, "bytes and sha256 of 'state.json' are wanted"),
        ({"state.json": {"bytes": 5}}, "bytes and sha256 of 'state.json' are wanted"),
        ({"x" * 300: {"bytes": 5, "sha256": "0"}}, "File name too long"),
        ({"optimizer.safetensors": None}, "bytes and sha256 of 'optimizer.safetensors' are wanted"),
    ],
)
def test_a_manifest_is_not_trusted(tmp_path: Path, change: dict, message: str) -> None:
    """Names that lead elsewhere and entries of a wrong type are damage, told as such."""
    place = save(tmp_path, 1)
    content = json.loads((place / "manifest.json").read_text())
    content["files"] |= change
    (place / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.verify(place)
    assert checkpoint.newest(tmp_path) is None


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "draft.json"])
def test_a_manifest_names_all_files(tmp_path: Path, name: str) -> None:
    """A checkpoint whose manifest leaves out what is needed is damaged, though all it names is there."""
    place = save(tmp_path, 1)
    content = json.loads((place / "manifest.json").read_text())
    del content["files"][name]
    (place / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"does not name {name}"):
        checkpoint.verify(place)


@pytest.mark.parametrize("text", ["[]", "5", "{}", '{"format": 1, "files": []}', "[" * 100_000, "\ud83d"])
@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_json_of_another_kind_is_damage(tmp_path: Path, name: str, text: str) -> None:
    """Whatever stands in a checkpoint's JSON files, it is an error that names the checkpoint."""
    place = save(tmp_path, 1)
    (place / name).write_bytes(text.encode(errors="surrogatepass"))
    read = checkpoint.verify if name == "manifest.json" else checkpoint.load_state
    with pytest.raises(CheckpointError, match="step-00000001"):
        read(place)


@pytest.mark.parametrize(
    ("name", "value"), [("step", "5"), ("step", True), ("best_step", 1.5), ("data_fingerprint", 3)]
)
def test_a_state_of_wrong_types_is_damage(tmp_path: Path, name: str, value: object) -> None:
    """A number that is a text, say, is told and not trained with."""
    place = save(tmp_path, 1)
    content = json.loads((place / "state.json").read_text()) | {name: value}
    (place / "state.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"{name} is {value!r}"):
        checkpoint.load_state(place)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_a_pipe_is_no_file(tmp_path: Path, name: str) -> None:
    """What would keep a reader waiting for ever is told as damage."""
    place = save(tmp_path, 1)
    (place / name).unlink()
    os.mkfifo(place / name)
    with pytest.raises(CheckpointError, match="is no file|no readable manifest"):
        checkpoint.verify(place)
    if name == "state.json":
        with pytest.raises(CheckpointError, match="is no file"):
            checkpoint.load_state(place)


def test_files_are_those_of_the_format(tmp_path: Path) -> None:
    """What is written is what the format's own library writes, to the byte, for all shapes and types in use."""
    tensors = {
        "b": torch.randn(3, 5), "a": torch.randn(7), "d2t": torch.arange(9), "scalar": torch.tensor(2.0),
        "empty": torch.zeros(0, 4), "half": torch.randn(3).bfloat16(), "ü": torch.tensor([1, 2], dtype=torch.uint8),
        "turned": torch.randn(4, 6).T,
    }  # fmt: skip
    told: list[int] = []
    written = write_tensors(tmp_path / "ours", tensors, told.append)
    content = (tmp_path / "ours").read_bytes()
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert content == safetensors.torch.save(plain)
    assert written.bytes == len(content) == sum(told)
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    back = safetensors.torch.load_file(tmp_path / "ours")
    assert set(back) == set(tensors) and all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_files_of_several_pieces_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces, syncs in between, and a system that takes only a part at a time do not show in the file."""
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 100)
    monkeypatch.setattr(tensor_file, "SYNC_BYTES", 1000)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: max(1, len(data) // 2)]))
    tensors = {"a": torch.randn(1234), "b": torch.arange(77)}
    written = write_tensors(tmp_path / "ours", tensors, lambda _: None)
    content = (tmp_path / "ours").read_bytes()
    assert content == safetensors.torch.save(tensors) and written.sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (200, "224 bytes declared, 200 found"), (300, "224 bytes declared, 300 found"),
        (40, r"cannot be loaded \(40 bytes found\)"), (0, r"cannot be loaded \(0 bytes found\)"),
    ],
)  # fmt: skip
def test_a_damaged_file_says_what_is_wrong(tmp_path: Path, length: int, message: str) -> None:
    """Loaded directly, a file that was cut or grew is told with its path and sizes (case R01)."""
    path = tmp_path / "weights.safetensors"
    tensors = {"fc.weight": torch.arange(16.0).view(4, 4), "norm.weight": torch.ones(4)}
    write_tensors(path, tensors, lambda _: None)
    assert path.stat().st_size == 224
    assert torch.equal(read_tensors(path)["fc.weight"], tensors["fc.weight"])
    os.truncate(path, length)
    with pytest.raises(CheckpointError, match=f"weights.safetensors .*{message}"):
        read_tensors(path)


def test_no_pickle_is_read(tmp_path: Path) -> None:
    """A pickle under a checkpoint's name is refused without being run."""
    place = save(tmp_path, 1)
    torch.save({"fc.weight": torch.ones(2)}, place / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be loaded"):
        checkpoint.load_weights(place, fresh()[0])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        checkpoint.load_drafter(place)


def test_a_moment_of_another_shape_is_named(tmp_path: Path) -> None:
    """One number is not spread over a whole matrix."""
    place = save(tmp_path, 1)
    moments = safetensors.torch.load_file(place / "optimizer.safetensors") | {"exp_avg.fc.weight": torch.ones(1)}
    safetensors.torch.save_file(moments, place / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"exp_avg.fc.weight has shape \[1\], \[32, 64\] is wanted"):
        checkpoint.load_training(place, *fresh(), is_started=True)


def test_strange_neighbours_do_not_confuse(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An empty folder and a plain file named like checkpoints, and text order against number order, change nothing."""
    for step in (5, 10, 100):
        save(tmp_path, step)
    (tmp_path / "step-00000010").rename(tmp_path / "step-10")
    (tmp_path / "step-00000005").rename(tmp_path / "step-5")
    (tmp_path / "step-00000200").mkdir()
    (tmp_path / "step-00000300").write_text("not a folder")
    (tmp_path / "step-x").mkdir()
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000100"
    assert "step-00000200 is not a complete" in caplog.text and "step-00000300 is not a complete" in caplog.text
    (tmp_path / "step-00000100").rename(tmp_path / "step-100")
    assert checkpoint.newest(tmp_path) == tmp_path / "step-100"
    assert checkpoint.saved_num_anchors(tmp_path) == 32


@pytest.mark.parametrize("kind", ["folder", "file", "link", "full folder", "leftover"])
def test_what_is_in_the_way_does_not_stop_a_save(tmp_path: Path, kind: str) -> None:
    """Whatever is named like the next checkpoint gives way (case R01)."""
    place = tmp_path / "step-00000005"
    if kind == "file":
        place.write_text("not a folder")
    elif kind == "link":
        place.symlink_to("nowhere")
    else:
        place.mkdir()
    if kind == "full folder":
        (place / "notes.txt").write_text("mine")
    if kind == "leftover":
        (tmp_path / ".step-00000005.replaced").write_text("of an earlier one")
    checkpoint.verify(save(tmp_path, 5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000005"]


def test_a_swap_cut_short_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete checkpoint that gives way to another of its step is found by a run that is killed in between."""
    place = save(tmp_path, 5)
    rename = os.rename

    def die_between(source: Path, target: Path) -> None:
        if ".partial" in str(source):
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", die_between)
        save(tmp_path, 5)
    assert not place.exists()
    found = checkpoint.newest(tmp_path)
    assert found is not None and checkpoint.load_state(found) == state(5)
    assert checkpoint.find(tmp_path) == found and checkpoint.saved_num_anchors(tmp_path) == 32
    save(tmp_path, 6)
    checkpoint.verify(place)
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_swap_that_fails_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The complete checkpoint that had begun to give way is back at its place at once."""
    place = save(tmp_path, 5)
    rename = os.rename

    def fail_between(source: Path, target: Path) -> None:
        if ".partial" in str(source):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="No space left"):
        patch.setattr(os, "rename", fail_between)
        save(tmp_path, 5)
    checkpoint.verify(place)
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_folder_that_cannot_be_read_is_no_fresh_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be seen, it is not said that there is nothing."""
    save(tmp_path, 5)

    def refuse(*_args):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CheckpointError, match="cannot be looked into: Permission denied"):
        checkpoint.newest(tmp_path)


def test_old_checkpoints_go_except_those_pointed_to(tmp_path: Path) -> None:
    """`keep_last` newest stay, and whatever `best` points to."""
    checkpoint.point(tmp_path, "best", save(tmp_path, 1))
    for step in (2, 3, 4):
        save(tmp_path, step, keep_last=2)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003", "step-00000004"]
    assert (tmp_path / "latest").resolve() == (tmp_path / "step-00000004").resolve()


def test_what_is_in_use_stays_for_now(tmp_path: Path) -> None:
    """A pinned checkpoint outlives later ones; one that got its link while it was let go of is never without either."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    last = checkpoint.place_of(tmp_path, 3)

    def let_go() -> set[str]:
        checkpoint.point(tmp_path, "best", checkpoint.place_of(tmp_path, 1))
        return set()

    checkpoint.retain(tmp_path, last, 1, None, lambda: {"step-00000001"})
    assert checkpoint.complete_steps(tmp_path) == [1, 3]
    checkpoint.retain(tmp_path, last, 1, None, let_go)
    assert checkpoint.complete_steps(tmp_path) == [1, 3]


def test_links_of_somebody_else_hold_too(tmp_path: Path) -> None:
    """What anybody has linked to in the folder stays."""
    (tmp_path / "golden").symlink_to(save(tmp_path, 1).name)
    for step in (2, 3):
        save(tmp_path, step, keep_last=1)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    """Folders that are no checkpoints, whatever their number, do not push out complete ones."""
    save(tmp_path, 1)
    (save(tmp_path, 2) / "manifest.json").unlink()
    os.truncate(save(tmp_path, 3) / "model.safetensors", 10)
    for step in (8, 9):
        (tmp_path / f"step-0000000{step}").mkdir()
    save(tmp_path, 4, keep_last=2)
    checkpoint.verify(tmp_path / "step-00000001")
    save(tmp_path, 5, keep_last=2)
    left = sorted(p.name for p in tmp_path.glob("step-*"))
    assert left == [f"step-0000000{step}" for step in (4, 5, 8, 9)]


def test_the_one_just_written_stays(tmp_path: Path) -> None:
    """Also where later ones of a run that went on from before them are there."""
    for step in (20, 30, 5):
        written = save(tmp_path, step, keep_last=1)
    (tmp_path / "latest").unlink()
    checkpoint.retain(tmp_path, written, 1, None)
    checkpoint.verify(tmp_path / "step-00000005")


def test_what_cannot_be_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An old checkpoint that stays is no failure of the new one."""
    old = save(tmp_path, 1)

    def refuse(*_args, **_kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        patch.setattr(os, "rmdir", refuse)
        checkpoint.verify(save(tmp_path, 2, keep_last=1))
    assert not old.exists() and "an old checkpoint cannot be removed" in caplog.text
    save(tmp_path, 3, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003"]


def test_milestones_stay(tmp_path: Path) -> None:
    """Steps that are a multiple of `keep_every` are never removed."""
    drafter, optimizer = trained()
    for step in range(1, 8):
        checkpoint.save(tmp_path, state(step), drafter, optimizer, keep_last=1, keep_every=3)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000003", "step-00000006", "step-00000007"]


def operations(folder: Path, failing: int | None, number: int) -> tuple[list[str], Any]:
    """Names of the calls to the system that have been made, and patches that let one of them fail."""
    made: list[str] = []

    def failing_at(name: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            if len(made) - 1 == failing:
                raise OSError(number, os.strerror(number))
            return call(*args, **kwargs)

        return run

    return made, {name: failing_at(name, getattr(os, name)) for name in CHANGING}


CHANGING = ("mkdir", "open", "write", "fsync", "rename", "symlink", "replace")
"""Calls to the system that a save consists of; those that remove may fail without harm."""


def save_with(folder: Path, step: int, failing: int | None, number: int, patch: pytest.MonkeyPatch) -> list[str]:
    made, calls = operations(folder, failing, number)
    for name, call in calls.items():
        patch.setattr(os, name, call)
    save(folder, step)
    return made


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_failed_save_leaves_the_old_ones(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure at any call of a save is an error that says what to do, keeps the earlier one and leaves no rubbish."""
    good = save(tmp_path, 10)
    with monkeypatch.context() as patch:
        made = save_with(tmp_path, 15, None, number, patch)
    assert made.count("fsync") >= 8 and made[-3:] == ["replace", "open", "fsync"] and "rename" in made
    shutil.rmtree(tmp_path / "step-00000015")
    checkpoint.point(tmp_path, "latest", good)
    for failing in range(len(made)):
        with (
            monkeypatch.context() as patch,
            pytest.raises(CheckpointError, match=f"step-00000015 could not be written: {os.strerror(number)}; "),
        ):
            save_with(tmp_path, 15, failing, number, patch)
        checkpoint.verify(good)
        pointed = (tmp_path / "latest").resolve()
        checkpoint.verify(pointed)
        assert pointed == good.resolve() or failing >= len(made) - 2  # which make sure of the link
        later = tmp_path / "step-00000015"
        assert not later.exists() or checkpoint.newest(tmp_path) == later
        shutil.rmtree(later, ignore_errors=True)
        checkpoint.point(tmp_path, "latest", good)
        assert [p.name for p in tmp_path.glob(".*")] == []
    save(tmp_path, 20)
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000020"


def test_a_folder_in_the_place_of_a_link_makes_way(tmp_path: Path) -> None:
    """A copied run may have folders where links should be."""
    save(tmp_path, 1)
    (tmp_path / "latest").unlink()
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "latest")
    save(tmp_path, 2)
    assert (tmp_path / "latest").resolve() == tmp_path / "step-00000002"
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_checkpoints_of_a_lost_timeline_do_not_count(tmp_path: Path) -> None:
    """A run that went back keeps its last ones, and not damaged ones of later steps that only look whole."""
    for step in (1, 2, 8, 9):
        save(tmp_path, step, keep_last=9)
    for step in (8, 9):
        weights = tmp_path / f"step-{step:08d}" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    for step in (3, 4):
        save(tmp_path, step, keep_last=2)
    assert {"step-00000003", "step-00000004"} <= {path.name for path in tmp_path.glob("step-*")}
    assert not (tmp_path / "step-00000002").exists()


def test_a_run_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    """Moved while the run goes on, say: the save fails, and nothing pretends to be the run."""
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "gone" / "checkpoints", 1)
    assert not (tmp_path / "gone").exists()


def test_a_save_over_a_damaged_checkpoint_replaces_it(tmp_path: Path) -> None:
    """A resumed run that reaches the step of a damaged checkpoint again writes it anew."""
    bad = save(tmp_path, 5)
    (bad / "manifest.json").unlink()
    checkpoint.verify(save(tmp_path, 5))


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    """A temporary folder of a dead process goes with the next save; one that another process may write stays."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    alive, reused, gone, foreign = (
        tmp_path / name
        for name in (
            f".step-00000003.partial-{os.getppid()}", f".step-00000002.partial-{os.getppid()}",
            f".step-00000003.partial-{dead.pid}", ".step-notes",
        )
    )  # fmt: skip
    for folder in (alive, reused, gone, foreign):
        folder.mkdir()
    os.utime(reused, (0, 0))
    save(tmp_path, 4)
    assert alive.exists() and foreign.exists() and not gone.exists() and not reused.exists()


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    """Looking for a drafter where there is none names the folder and what was wanted."""
    with pytest.raises(CheckpointError, match="holds no complete checkpoint: a run folder or a step-"):
        checkpoint.load_drafter(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    """A state file of a later format is not guessed at."""
    place = save(tmp_path, 1)
    content = json.loads((place / "state.json").read_text()) | {"format": 99}
    (place / "state.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="has another format than 1"):
        checkpoint.load_state(place)


def test_the_anchors_of_a_run_are_found(tmp_path: Path) -> None:
    """The newest readable state says how many anchors the run has; without one there is nothing to say."""
    assert checkpoint.saved_num_anchors(tmp_path) is None
    save(tmp_path, 1)
    (save(tmp_path, 2) / "state.json").write_text("{")
    assert checkpoint.saved_num_anchors(tmp_path) == 32
