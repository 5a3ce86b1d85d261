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
