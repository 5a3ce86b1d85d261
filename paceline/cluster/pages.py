"""The profile pages of a run's other processes: read and switched by calls, on whatever host they are."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.profiling import page as layout
from paceline.profiling import stages
from paceline.profiling.page import Control, Page, Snapshot

ANSWER_S = 2.0
"""Seconds for the processes to say what they do; who is later is left out of a table."""

GROUP = "watch"
"""Ray's name for the thread of an actor that answers beside its work."""


class Watched:
    """What an actor has for those who watch."""

    _page: Page | None = None

    def open_page(self, run_dir: Path, role: str, times_device: bool) -> None:
        """Make this process's page, in the run folder where this host has that: `top` reads it there."""
        folder = run_dir / "profile" if run_dir.is_dir() else Path(tempfile.mkdtemp(prefix="paceline-"))
        self._page = stages.open_run(folder, times_device=times_device, default_role=role)

    def snapshot(self, ends_interval: bool = True) -> Snapshot | None:
        """The page as it is, at the end of an interval or within one; None without one."""
        if self._page is None:
            return None
        if ends_interval:
            self._page.words[layout.INTERVAL] += 1  # the longest runs are those of an interval
        return self._page.snapshot()

    def count(self, is_on: bool) -> None:
        """Count stages, or leave it; tables are the driver's."""
        if self._page is not None:
            self._page.set_control(Control(0, is_on, 0.0))


class RemotePages:
    """All other processes of a run, by role.

    Args:
        ray: The connected module.
        actors: Those that run at the moment.
        places: Where each role runs.
    """

    def __init__(
        self, ray: Any, actors: Callable[[], dict[str, Any]], places: Callable[[], dict[str, dict[str, Any]]]
    ) -> None:
        self._ray = ray
        self._actors = actors
        self.places = places

    def count(self, is_on: bool) -> None:
        """Have all count, or leave it; nobody waits for it."""
        for actor in self._actors().values():
            with contextlib.suppress(self._ray.exceptions.RayError):
                actor.count.options(concurrency_group=GROUP).remote(is_on)

    def snapshots(self, ends_interval: bool = True) -> dict[str, Snapshot]:
        """Pages by role, of those that answer in time."""
        asked: dict[Any, str] = {}
        for role, actor in self._actors().items():
            with contextlib.suppress(self._ray.exceptions.RayError):
                asked[actor.snapshot.options(concurrency_group=GROUP).remote(ends_interval)] = role
        done = self._ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)[0] if asked else []
        found = {}
        for each in done:
            with contextlib.suppress(self._ray.exceptions.RayError):
                if (snapshot := self._ray.get(each)) is not None:
                    found[asked[each]] = snapshot
        return found
