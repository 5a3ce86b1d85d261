"""The profile pages of a run's other processes: read and switched by calls, on whatever host they are."""

from __future__ import annotations

import contextlib
import tempfile
import time
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

ROUND_TRIPS = 8
"""Questions to a clock of another host; the quickest answer counts."""


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

    def trace(self, left_ns: int) -> None:
        """Keep every run of every stage for so long."""
        if self._page is not None:
            self._page.words[layout.TRACE_UNTIL] = time.monotonic_ns() + left_ns

    def events(self) -> dict[str, Any] | None:
        """What `trace` has kept, once, by this host's clock; None where nothing was asked for."""
        if self._page is None or not (until := self._page.words[layout.TRACE_UNTIL]):
            return None
        self._page.words[layout.TRACE_UNTIL] = 0
        return stages.collect_events(self._page, min(until, time.monotonic_ns()))

    def clock(self) -> tuple[int, int]:
        """Which boot the monotonic clock is of, and what it shows, in nanoseconds."""
        return layout.boot_number(), time.monotonic_ns()


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

    def trace(self, left_ns: int) -> None:
        """Have all keep the runs of their stages for so long; nobody waits for it."""
        for actor in self._actors().values():
            with contextlib.suppress(self._ray.exceptions.RayError):
                actor.trace.options(concurrency_group=GROUP).remote(left_ns)

    def events(self) -> list[dict[str, Any]]:
        """What they kept, by this process's clock; who does not answer in time is left out.

        A clock of another host is set by the quickest of `ROUND_TRIPS` questions: it showed its answer half-way between
        question and answer, give or take that half.
        """
        actors, asked = self._actors(), dict[Any, str]()
        for role, actor in actors.items():
            with contextlib.suppress(self._ray.exceptions.RayError):
                asked[actor.events.options(concurrency_group=GROUP).remote()] = role
        done = self._ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)[0] if asked else []
        places, found = self.places(), list[dict[str, Any]]()
        for each in done:
            role = asked[each]
            with contextlib.suppress(self._ray.exceptions.RayError):
                events, ahead = self._ray.get(each), self._ahead(actors[role])
                if events is not None and ahead is not None:
                    _set_back(events, ahead[0])
                    clock = {"ahead_ns": ahead[0], "clock_error_ns": ahead[1]}
                    found.append(events | {"role": role, "host": places.get(role, {}).get("host", "")} | clock)
        return found

    def _ahead(self, actor: Any) -> tuple[int, int] | None:
        """How far a process's monotonic clock is ahead of this one's, and how wrong that may be, in nanoseconds; None
        if it does not answer. On one host there is one clock."""
        here, best, trip = layout.boot_number(), 0, None
        for _ in range(ROUND_TRIPS):
            sent = time.monotonic_ns()
            call = actor.clock.options(concurrency_group=GROUP).remote()
            if not self._ray.wait([call], timeout=ANSWER_S)[0]:
                return None
            came = time.monotonic_ns()
            boot, there = self._ray.get(call)
            if boot == here != 0:
                return 0, 0
            if trip is None or came - sent < trip:
                best, trip = there - (sent + came) // 2, came - sent
        return best, 0 if trip is None else trip // 2


def _set_back(events: dict[str, Any], ahead_ns: int) -> None:
    """Turn monotonic times of another host into those of this one."""
    for name in ("until_ns", "monotonic_ns"):
        events[name] -= ahead_ns
    for thread in events["threads"]:
        for event in (*thread["events"], *thread["open"]):
            event[1] -= ahead_ns
            event[2] -= ahead_ns
