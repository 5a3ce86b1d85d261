"""Plans kept on disk."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from paceline.data import plan_cache
from paceline.data.plan_cache import PlanCache

LENGTHS = np.arange(1, 60)
ROWS = np.random.default_rng(0).permutation(59).astype(np.int32)
STARTS = np.array([0, 20, 31, 59])


def cache(folder: Path, **changes: object) -> PlanCache:
    """A cache for the plan above, or one with another key."""
    return PlanCache(folder, **{"lengths": LENGTHS, "capacity": 512, "seed": 3, **changes})  # type: ignore[arg-type]


def only(folder: Path) -> Path:
    """The one file in a folder."""
    (path,) = folder.iterdir()
    return path


def test_a_plan_comes_back(tmp_path: Path) -> None:
    """Rows and starts survive as int32, from the map; a plan that was never kept is None."""
    place = tmp_path / "plans"
    assert cache(place).load(2) is None and not place.exists()
    cache(place).store(2, ROWS, STARTS)
    kept = cache(place).load(2)
    assert kept is not None
    rows, starts = kept
    assert (rows.tolist(), starts.tolist()) == (ROWS.tolist(), STARTS.tolist())
    assert (rows.dtype, starts.dtype) == (np.int32, np.int32)
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 1


def test_a_plan_is_found_by_its_whole_key_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other lengths, S, seed, epoch or version have no plan here; neither has a file under another's name."""
    cache(tmp_path).store(2, ROWS, STARTS)
    assert cache(tmp_path).load(1) is None
    for other in ({"lengths": LENGTHS + 1}, {"lengths": LENGTHS[::-1]}, {"capacity": 513}, {"seed": 4}):
        assert cache(tmp_path, **other).load(2) is None
    path = only(tmp_path)
    path.rename(path.with_name(path.name.replace("-2.", "-1.")))
    assert cache(tmp_path).load(1) is None
    cache(tmp_path).store(2, ROWS, STARTS)
    monkeypatch.setattr(plan_cache, "PLAN_VERSION", 0)
    assert cache(tmp_path).load(2) is None


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    """A file of which a byte was changed or added, or any part is missing, holds no plan."""
    cache(tmp_path).store(0, ROWS, STARTS)
    path = only(tmp_path)
    whole = path.read_bytes()
    damaged = [whole + b"\0", whole + b"\0" * 4, b"\0" * 32]
    for at in range(len(whole)):
        damaged += [whole[:at], whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :]]
    for content in damaged:
        path.write_bytes(content)
        assert cache(tmp_path).load(0) is None
    path.write_bytes(whole)
    assert cache(tmp_path).load(0) is not None


def test_old_plans_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest plans stay; older ones go, and what a killed process left half written, but nothing else."""
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 3)
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".gone-0.plan.partial-1").touch()
    os.utime(tmp_path / ".gone-0.plan.partial-1", (0, 0))
    plans = cache(tmp_path)
    for epoch in range(5):
        plans.store(epoch, ROWS, STARTS)
        for path in tmp_path.glob(f"*-{epoch}.plan"):
            os.utime(path, (epoch + 1, epoch + 1))
    assert [plans.load(epoch) is not None for epoch in range(5)] == [False, False, True, True, True]
    assert sorted(path.name[-7:] for path in tmp_path.iterdir()) == ["-2.plan", "-3.plan", "-4.plan", "tes.txt"]


def _write_and_read(folder: Path) -> int:
    """Store one plan again and again; how often it could not be read back."""
    plans = cache(folder)
    missing = 0
    for _ in range(100):
        plans.store(0, ROWS, STARTS)
        missing += plans.load(0) is None
    return missing


def test_processes_may_write_the_same_plan(tmp_path: Path) -> None:
    """Two processes that write one plan at a time always find a whole one, and leave one file."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_write_and_read, [tmp_path] * 2, chunksize=1) == [0, 0]
    assert cache(tmp_path).load(0) is not None
    only(tmp_path)
