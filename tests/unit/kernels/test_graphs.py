"""When work is replayed from a graph. That a replay is right, test_gpu_step.py shows on a GPU."""

from __future__ import annotations

import pytest

from paceline.kernels.graphs import WARM_UP_CALLS, GraphRunner


class Graph:
    """Stands for a recorded graph."""

    def __init__(self, variant: int, log: list[str]) -> None:
        self.variant, self.log = variant, log

    def replay(self) -> None:
        self.log.append(f"replay {self.variant}")


def runner(mode: str, log: list[str], monkeypatch: pytest.MonkeyPatch) -> GraphRunner:
    made = GraphRunner(lambda v: log.append(f"work {v}"), "test", mode, lambda: log.append("prepare"))

    def record(variant: int) -> bool:
        log.append(f"record {variant}")
        made._graphs[variant] = Graph(variant, log)  # type: ignore[assignment]
        return True

    monkeypatch.setattr(made, "_record", record)
    return made


def test_off_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs work is done as it is, and its inputs may lie anywhere."""
    log: list[str] = []
    run = runner("off", log, monkeypatch)
    for _ in range(6):
        assert not run.needs_fixed_inputs
        run(1)
    assert log == ["work 1"] * 6 and not run.is_replaying


def test_each_variant_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After warming up, buffers are made; each variant is launched once more, so that it builds what it needs, recorded
    at its next call, and replayed from then on."""
    log: list[str] = []
    run = runner("on", log, monkeypatch)
    for _ in range(WARM_UP_CALLS):
        assert run.needs_fixed_inputs and not run.is_replaying
        run(1)
    run(1)
    assert run.is_replaying and log == ["work 1"] * WARM_UP_CALLS + ["prepare", "work 1"]
    log.clear()
    for variant in (1, 2, 1, 2, 2):
        run(variant)
    assert log == ["work 1", "work 2", "record 1", "replay 1", "record 2", "replay 2", "replay 2"]


def test_what_cannot_be_recorded_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that fails is no failure of the run: the work is launched, then and later, and the note says why."""
    log: list[str] = []
    run = runner("on", log, monkeypatch)

    def fail(variant: int) -> bool:
        run._mode, run.is_replaying = "off", False
        return False

    monkeypatch.setattr(run, "_record", fail)
    for _ in range(WARM_UP_CALLS + 4):
        run(0)
    assert log == ["work 0"] * WARM_UP_CALLS + ["prepare"] + ["work 0"] * 4
    assert not run.needs_fixed_inputs


@pytest.mark.parametrize("launch_bound", [True, False])
def test_auto_decides_once(launch_bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured call decides for good; inputs need not stay in place where it says no."""
    log: list[str] = []
    run = runner("auto", log, monkeypatch)

    def measure(variant: int) -> None:
        run._work(variant)
        if launch_bound:
            run._start_replaying()

    monkeypatch.setattr(run, "_measure", measure)
    for _ in range(WARM_UP_CALLS + 3):
        run(0)
    assert run.is_replaying == run.needs_fixed_inputs == launch_bound
    assert ("replay 0" in log) == launch_bound
