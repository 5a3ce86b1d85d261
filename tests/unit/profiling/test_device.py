"""Time on the device, on a device that is simulated: a stream that works through what the host has launched."""

from __future__ import annotations

import time
from typing import Any

import pytest

from paceline.profiling import device
from paceline.profiling.device import DeviceClock

MS = 1_000_000


class Stream:
    """Host and device time, in nanoseconds."""

    def __init__(self) -> None:
        self.now, self.free_at = 10**12, 0

    def launch(self, work_ms: float, host_ms: float) -> None:
        """Hand over work; the host takes its own time for that."""
        self.free_at = max(self.free_at, self.now) + int(work_ms * MS)
        self.now += int(host_ms * MS)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """In place of CUDA's."""
    stream = Stream()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.at: int | None = None

        def record(self) -> None:
            self.at = max(stream.free_at, stream.now)

        def query(self) -> bool:
            return self.at is not None and stream.now >= self.at

        def elapsed_time(self, other: Any) -> float:
            return float((other.at - self.at) / MS)

    monkeypatch.setattr(device.torch.cuda, "Event", Event)
    monkeypatch.setattr(device.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(time, "monotonic_ns", lambda: stream.now)
    return stream


def run(
    stream: Stream, batches: int, stages: int, work_ms: float, host_ms: float
) -> list[tuple[int, int | None, bool]]:
    """Device nanoseconds, lag and drained of each stage that was settled."""
    clock, settled = DeviceClock(), []
    for _ in range(batches):
        clock.harvest(lambda stage, device_ns, lag_ns, drained: settled.append((device_ns, lag_ns, drained)))
        clock.next_batch()
        for stage in range(stages):
            pair = clock.begin()
            assert pair is not None
            stream.launch(work_ms, host_ms)
            clock.end(pair, stage)
    stream.now = max(stream.now, stream.free_at) + MS
    clock.harvest(lambda stage, device_ns, lag_ns, drained: settled.append((device_ns, lag_ns, drained)))
    return settled


def test_a_device_that_waits_for_the_host_is_drained(stream: Stream) -> None:
    """Each stage is over on the device as soon as it has been launched."""
    settled = run(stream, batches=4, stages=5, work_ms=0.01, host_ms=1.0)
    known = [each for each in settled if each[1] is not None]
    assert len(settled) == 20 and len(known) >= 12
    assert all(drained for _, _, drained in known)


def test_a_host_that_is_held_up_in_launching_is_seen_to_be_ahead(stream: Stream) -> None:
    """With a full launch queue the host never waits for an event, and is far ahead all the same."""
    stream.launch(60.0, 0.0)  # what was launched before
    settled = run(stream, batches=6, stages=5, work_ms=10.0, host_ms=10.0)
    known = [each for each in settled if each[1] is not None]
    assert len(known) >= 20
    assert not any(drained for _, _, drained in known)
    assert max(lag for _, lag, _ in known if lag is not None) > 20 * MS
    assert all(lag <= 61 * MS for _, lag, _ in known if lag is not None)  # a floor, never more than the truth
    assert {device_ns for device_ns, _, _ in settled} == {10 * MS}
