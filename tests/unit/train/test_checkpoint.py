"""Checkpoints: complete or invisible, damaged ones named, old ones removed, nothing lost when a save fails."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from paceline.config import Optim
from paceline.errors import CheckpointError
from paceline.models.draft import DFlashDrafter
from paceline.train import checkpoint
from paceline.train.checkpoint import TrainState
from paceline.train.optim import MasterAdamW
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


def test_strange_neighbours_do_not_confuse(tmp_path: Path) -> None:
    """An empty folder and a plain file named like checkpoints, and text order against number order, change nothing."""
    for step in (5, 10, 100):
        save(tmp_path, step)
    (tmp_path / "step-00000200").mkdir()
    (tmp_path / "step-00000300").write_text("not a folder")
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000100"


def test_old_checkpoints_go_except_those_pointed_to(tmp_path: Path) -> None:
    """`keep_last` newest stay, and whatever `best` points to."""
    checkpoint.point(tmp_path, "best", save(tmp_path, 1))
    for step in (2, 3, 4):
        save(tmp_path, step, keep_last=2)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003", "step-00000004"]
    assert (tmp_path / "latest").resolve() == (tmp_path / "step-00000004").resolve()


def test_milestones_stay(tmp_path: Path) -> None:
    """Steps that are a multiple of `keep_every` are never removed."""
    drafter, optimizer = trained()
    for step in range(1, 8):
        checkpoint.save(tmp_path, state(step), drafter, optimizer, keep_last=1, keep_every=3)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000003", "step-00000006", "step-00000007"]


@pytest.mark.parametrize("failing", ["rename", "fsync", "symlink", "replace"])
def test_a_failed_save_leaves_the_old_ones(tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk at any step of a save is an error that keeps the earlier checkpoint usable and leaves no rubbish."""
    good = save(tmp_path, 10)

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(tmp_path, 15)
    assert (tmp_path / "latest").resolve() == good.resolve()
    checkpoint.verify(good)
    save(tmp_path, 20)
    assert [p.name for p in tmp_path.glob(".*")] == []


def test_a_save_over_a_damaged_checkpoint_replaces_it(tmp_path: Path) -> None:
    """A resumed run that reaches the step of a damaged checkpoint again writes it anew."""
    bad = save(tmp_path, 5)
    (bad / "manifest.json").unlink()
    checkpoint.verify(save(tmp_path, 5))


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    """A temporary folder of a dead process goes with the next save."""
    (tmp_path / ".step-00000003.partial-1").mkdir()
    save(tmp_path, 4)
    assert not (tmp_path / ".step-00000003.partial-1").exists()


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
