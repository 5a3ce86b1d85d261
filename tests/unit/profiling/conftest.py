"""A page of this process, and a clock that stands until it is moved."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.profiling import stages
from paceline.profiling.page import SHARED_MEMORY, Page


class Clock:
    """Monotonic nanoseconds."""

    def __init__(self) -> None:
        self.now = 10**15

    def __call__(self) -> int:
        return self.now

    def pass_s(self, seconds: float) -> None:
        """Let time go by."""
        self.now += round(1e9 * seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What stages, pages and reporters take for the time; ask for it before `page`."""
    clock = Clock()
    monkeypatch.setattr(stages, "_clock", clock)
    monkeypatch.setattr(time, "monotonic_ns", clock)
    return clock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's profile folder."""
    return tmp_path / "profile"


@pytest.fixture
def page(folder: Path) -> Iterator[Page]:
    """An open page, switched off; nothing of it is left in memory afterwards."""
    page = stages.open_run(folder)
    assert page is not None
    yield page
    stages.close_run(page, folder)
    assert list(SHARED_MEMORY.glob(f"paceline-*-{os.getpid()}-*")) == []
