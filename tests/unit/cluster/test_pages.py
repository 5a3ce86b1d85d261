"""Profile pages of other processes: counted when asked, and in the table with the driver's."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import observe
from paceline.cluster.pages import RemotePages, Watched
from paceline.profiling import page as layout
from paceline.profiling import stages
from paceline.profiling.live import STAGES_FILE, Reporter
from paceline.profiling.page import Snapshot
from tests.unit.cluster.fake_ray import Actor, FakeRay


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched()
    watched.open_page(tmp_path, "target-0", False)
    yield watched
    stages.close_run(watched._page, tmp_path / "profile")


def test_a_process_counts_when_it_is_asked_to(host: Watched, tmp_path: Path) -> None:
    """Its page says what ran since, and each look ends an interval."""
    host.count(True)
    with stages.as_role("target-0"), stages.MODEL_FORWARD:
        pass
    first, second = host.snapshot(), host.snapshot()
    assert first is not None and second is not None
    assert first.total("model_forward").count == 1 and second.interval == first.interval + 1
    assert list((tmp_path / "profile").glob("*.page"))
    host.count(False)
    with stages.as_role("target-0"), stages.MODEL_FORWARD:
        pass
    last = host.snapshot()
    assert last is not None and last.total("model_forward").count == 1
    assert Watched().snapshot() is None


def test_those_that_do_not_answer_are_left_out() -> None:
    """A dead process, and one without a page, are no hindrance."""

    class Host:
        def __init__(self, number: int) -> None:
            self.number = number

        def snapshot(self, ends_interval: bool) -> Any:
            return None if self.number == 2 else f"page {self.number}"

        def count(self, is_on: bool) -> None:
            pass

    ray = FakeRay()
    actors = {f"target-{i}": Actor(lambda i=i: Host(i)) for i in range(3)}
    actors["target-0"].kill()
    pages = RemotePages(ray, lambda: actors, dict)
    pages.count(True)
    assert pages.snapshots() == {"target-1": "page 1"}
    assert RemotePages(ray, dict, dict).snapshots() == {}


def test_a_table_has_the_threads_of_all_processes(host: Watched, tmp_path: Path) -> None:
    """Those that were there at both ends of an interval; they count while this one does."""

    class Others:
        def __init__(self) -> None:
            self.switched: list[bool] = []
            self.pages: dict[str, Snapshot] = {}

        def count(self, is_on: bool) -> None:
            self.switched.append(is_on)

        def snapshots(self, ends_interval: bool = True) -> dict[str, Snapshot]:
            page = host.snapshot(ends_interval)
            assert page is not None
            return {"target-7": page}

        def places(self) -> dict[str, dict[str, Any]]:
            return {role: {"pid": 1, "host": "far", "device": "cpu"} for role in ("target-7", "target-8")}

    others, shown = Others(), list[str]()
    page = host._page
    assert page is not None
    reporter = Reporter(page, tmp_path / "profile", shown.append, 1000.0, others)
    reporter.start()
    with stages.as_role("target-0"), stages.MODEL_FORWARD:
        time.sleep(0.01)
    reporter.stop()
    before = host.snapshot(ends_interval=False)
    with stages.as_role("target-0"), stages.MODEL_FORWARD:
        first, second = observe._elsewhere(others)
    assert first["role"] == "target-7" and first["answers"] and first["host"] == "far"
    assert [(each["role"], each["stage"]) for each in first["threads"]] == [("target-0", "model_forward")]
    assert second["role"] == "target-8" and not second["answers"] and second["threads"] == []
    after = host.snapshot(ends_interval=False)
    assert before is not None and after is not None and after.interval == before.interval  # a viewer moves no figures
    assert others.switched[0] is True
    assert shown[-1].count("model_forward") == 2  # this process's page stands for the other one's too
    lines = (tmp_path / "profile" / STAGES_FILE).read_text().splitlines()
    assert [json.loads(line)["stages"]["model_forward"]["count"] for line in lines if "target-0" in line] == [1, 1]


AHEAD_NS = 3600 * 10**9
"""Of the clock of another host."""


class Far:
    """A process of another host, whose clock is an hour ahead; it has one run of a stage, of the present moment."""

    def __init__(self) -> None:
        self.asked = self.left_ns = self.moment_ns = 0

    def trace(self, left_ns: int) -> None:
        self.left_ns = left_ns

    def events(self) -> dict[str, Any]:
        self.moment_ns = time.monotonic_ns()
        now = self.moment_ns + AHEAD_NS
        threads = [{"role": "target-0", "thread": "t", "tid": 1, "events": [[0, now - 7, now, 0, 3]], "open": []}]
        return {"pid": 1, "until_ns": now, "monotonic_ns": now, "epoch_ns": 5, "stages": ["a"], "threads": threads}

    def clock(self) -> tuple[int, int]:
        self.asked += 1
        return 12, time.monotonic_ns() + AHEAD_NS


def test_clocks_of_other_hosts_are_set_to_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the quickest question; times are then right to half of what that took, and who is gone is left out."""
    monkeypatch.setattr("paceline.cluster.pages.ANSWER_S", 60.0)
    ray, far = FakeRay(), Far()
    actors = {"target-0": Actor(lambda: far), "target-1": Actor(Far)}
    actors["target-1"].kill()
    pages = RemotePages(ray, lambda: actors, lambda: {"target-0": {"pid": 1, "host": "there", "device": "cpu"}})
    pages.trace(10**9)
    (found,) = pages.events()
    assert far.left_ns == 10**9 and far.asked == 8
    assert (found["role"], found["host"]) == ("target-0", "there")
    wrong = found["clock_error_ns"]
    assert wrong > 0 and abs(found["ahead_ns"] - AHEAD_NS) <= wrong
    ((_, begin, end, _, batch),) = found["threads"][0]["events"]
    assert abs(end - far.moment_ns) <= wrong and end - begin == 7 and batch == 3
    assert found["until_ns"] == found["monotonic_ns"] == end


def test_a_process_keeps_its_runs_of_stages_while_it_is_traced(host: Watched) -> None:
    """They come once, by the same clock on the same host, and unasked none do."""
    pages = RemotePages(FakeRay(), lambda: {"target-0": Actor(lambda: host)}, dict)
    with stages.as_role("target-0"), stages.MODEL_FORWARD:
        pass
    assert pages.events() == []
    pages.trace(100 * 10**9)
    assert host._page is not None
    deadline = time.monotonic() + 30
    while not host._page.words[layout.TRACE_UNTIL] and time.monotonic() < deadline:
        time.sleep(0.001)
    began = time.monotonic_ns()
    with stages.as_role("target-0"), stages.MODEL_FORWARD:
        stages.next_batch(6)
    ended = time.monotonic_ns()
    (found,) = pages.events()
    runs = [event for thread in found["threads"] for event in thread["events"]]
    assert [(found["stages"][stage], depth, batch) for stage, _, _, depth, batch in runs] == [("model_forward", 0, 6)]
    assert began <= runs[0][1] <= runs[0][2] <= ended and found["until_ns"] <= time.monotonic_ns()
    assert found["ahead_ns"] == found["clock_error_ns"] == 0
    assert pages.events() == []
