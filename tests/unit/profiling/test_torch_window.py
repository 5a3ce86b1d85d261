"""The window records what all threads do, one thing at a time, and never disturbs who is recorded."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli import observe
from paceline.profiling import stages, torch_window
from paceline.profiling.torch_window import MAX_BATCHES, TorchWindow
from tests.toy import Toy, train

WHOLE = '{"traceEvents": [\n  {\n    "ph": "X",\n    "cat": "cpu_op"\n  }\n ]}\n'


class FakeProfiler:
    """Records who called it; writes what it is told to."""

    def __init__(self, text: str = WHOLE, fails: str = "") -> None:
        self.text, self.fails = text, fails
        self.calls: list[tuple[str, int]] = []

    def call(self, name: str) -> None:
        self.calls.append((name, threading.get_ident()))
        if name == self.fails:
            raise RuntimeError(f"no {name} today")

    def start(self) -> FakeProfiler:
        self.call("start")
        return self

    def stop(self) -> None:
        self.call("stop")

    def export_chrome_trace(self, path: str) -> None:
        self.call("export")
        Path(path).write_text(self.text)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeProfiler:
    profiler = FakeProfiler()
    monkeypatch.setattr(torch_window, "_started_profiler", profiler.start)
    return profiler


class Asking:
    """A request in a thread of its own, as the control socket makes it."""

    def __init__(self, window: TorchWindow, batches: int, timeout_s: float = 20.0) -> None:
        self.answer: dict[str, Any] | None = None
        self.error = ""
        self._thread = threading.Thread(target=self._run, args=(window, batches, timeout_s), daemon=True)
        self._thread.start()

    def _run(self, window: TorchWindow, batches: int, timeout_s: float) -> None:
        try:
            self.answer = window.request(batches, timeout_s)
        except RuntimeError as error:
            self.error = str(error)

    def result(self) -> dict[str, Any]:
        self._thread.join(20.0)
        assert self.answer is not None, self.error
        return self.answer

    def failure(self) -> str:
        self._thread.join(20.0)
        assert self.answer is None
        return self.error


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def asked(window: TorchWindow, batches: int, timeout_s: float = 20.0) -> Asking:
    """A request that the window has taken."""
    asking = Asking(window, batches, timeout_s)
    until(lambda: window._request is not None)
    return asking


@contextlib.contextmanager
def working_threads() -> Iterator[dict[str, int]]:
    """Two threads that multiply all the while; their system ids."""
    ends, ids = threading.Event(), dict[str, int]()

    def work(name: str) -> None:
        ids[name] = threading.get_native_id()
        while not ends.wait(0.001):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))

    threads = [threading.Thread(target=work, args=(f"target-{i}",)) for i in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: len(ids) == 2)
    try:
        yield ids
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def operators(file: str) -> Counter[int]:
    """Operators by thread."""
    with gzip.open(file, "rt") as text:
        events = json.load(text)["traceEvents"]
    return Counter(event["tid"] for event in events if event.get("cat") == "cpu_op")


def test_the_trace_of_a_run_has_the_target_threads(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for in the middle of a run, it holds operators of the drafter and of each target, by thread id."""
    windows: list[TorchWindow] = []

    class Kept(TorchWindow):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            windows.append(self)

    monkeypatch.setattr(observe, "TorchWindow", Kept)
    asking: list[Asking] = []
    ids: dict[str, int] = {}

    def at_step(step: int) -> None:
        if step == 3:
            ids.update({recorder.role: recorder.tid for recorder in stages.recorders()})
            asking.append(asked(windows[0], 12))

    quiet = "checkpoint.every_steps=100", "data.validation=0"  # a save would be a thread more
    config = toy.config(tmp_path / "run", "topology.layout=split", "topology.targets=2", *quiet)
    report, _ = train(config, at_step)
    assert report.ending == "finished"
    answer = asking[0].result()
    counts = operators(answer["file"])
    assert ids.keys() == {"drafter-0", "target-0", "target-1"} and set(counts) == set(ids.values())
    assert answer["threads"] == 3 and answer["batches"] == 12
    assert answer["events"] > sum(counts.values()) > 1000
    assert answer["bytes"] == Path(answer["file"]).stat().st_size
    assert Path(answer["file"]).parent == tmp_path / "run" / "profile"


def test_nothing_stays_on_after_a_window(tmp_path: Path) -> None:
    """A second window works, no thread is recorded in between, and only the two files are left."""
    window, files = TorchWindow(tmp_path / "profile"), []
    with working_threads() as ids:
        for _ in range(2):
            asking = asked(window, 2)
            for _ in range(3):
                window.poll()
                time.sleep(0.02)
            files.append(asking.result()["file"])
            assert not torch.autograd._profiler_enabled()
    for file in files:
        assert set(ids.values()) <= set(operators(file))
    assert sorted(map(str, (tmp_path / "profile").iterdir())) == sorted(files) and len(set(files)) == 2


def test_it_starts_and_stops_between_batches_on_one_thread(tmp_path: Path, fake: FakeProfiler) -> None:
    """The thread that polls starts and stops, n batches apart; the one that asked writes the file."""
    window = TorchWindow(tmp_path)
    asking = asked(window, 3)
    seen = []
    for _ in range(4):
        window.poll()
        seen.append([name for name, _ in fake.calls if name != "export"])
    assert seen == [["start"], ["start"], ["start"], ["start", "stop"]]
    assert asking.result()["batches"] == 3
    here = threading.get_ident()
    assert [(name, who == here) for name, who in fake.calls] == [("start", True), ("stop", True), ("export", False)]


@pytest.mark.parametrize("batches", [0, -1, MAX_BATCHES + 1])
def test_a_window_out_of_bounds_is_refused(tmp_path: Path, batches: int) -> None:
    """The message has the bounds and what was asked for."""
    with pytest.raises(RuntimeError, match=f"1 to {MAX_BATCHES} batches; {batches} were"):
        TorchWindow(tmp_path).request(batches)


def test_one_window_at_a_time(tmp_path: Path, fake: FakeProfiler) -> None:
    """A second request is refused while the first is recorded, and taken once that is over."""
    window = TorchWindow(tmp_path)
    first = asked(window, 1)
    assert "already" in Asking(window, 1).failure()
    window.poll()
    assert "already" in Asking(window, 1).failure()
    window.poll()
    first.result()
    second = asked(window, 1)
    window.poll()
    window.poll()
    second.result()


@pytest.mark.parametrize("what", ["start", "stop"])
def test_a_failure_is_the_requests_and_not_the_runs(tmp_path: Path, fake: FakeProfiler, what: str) -> None:
    """Polling raises nothing; who asked is told; the next request is served."""
    window = TorchWindow(tmp_path)
    fake.fails = what
    asking = asked(window, 1)
    window.poll()
    window.poll()
    assert f"RuntimeError: no {what} today" in asking.failure()
    fake.fails = ""
    again = asked(window, 1)
    window.poll()
    window.poll()
    again.result()


def test_a_run_that_stands_still_is_not_waited_for(tmp_path: Path, fake: FakeProfiler) -> None:
    """After its time a request is given up: nothing is started for it later, and the next one is taken."""
    window = TorchWindow(tmp_path)
    with pytest.raises(RuntimeError, match="not over after 0.05 s"):
        window.request(1, timeout_s=0.05)
    window.poll()
    assert fake.calls == []
    asked(window, 1)


def test_a_poll_that_comes_too_late_starts_nothing(tmp_path: Path, fake: FakeProfiler) -> None:
    """The drafter has seen the request, and begins to serve it just when it has been given up."""
    window = TorchWindow(tmp_path)
    asking = asked(window, 1, timeout_s=0.5)
    seen = window._request
    assert seen is not None
    asking.failure()
    window._serve(seen)
    assert fake.calls == []


def test_a_window_given_up_half_way_is_stopped(tmp_path: Path, fake: FakeProfiler) -> None:
    """The next batch ends it, whatever it had left, and writes nothing; until then the window is busy."""
    window = TorchWindow(tmp_path)
    asking = asked(window, 40, timeout_s=1.0)
    window.poll()
    assert "given up" in asking.failure()
    assert "already" in Asking(window, 1).failure()
    window.poll()
    assert [name for name, _ in fake.calls] == ["start", "stop"] and not list(tmp_path.iterdir())
    asked(window, 1)


def test_a_window_has_an_end_in_time(tmp_path: Path, fake: FakeProfiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow batches do not fill the memory: it ends after `MAX_S` with what it has."""
    monkeypatch.setattr(torch_window, "MAX_S", 0.0)
    window = TorchWindow(tmp_path)
    asking = asked(window, 40)
    window.poll()
    window.poll()
    assert asking.result()["batches"] == 1


def test_the_end_of_a_run_ends_its_window(tmp_path: Path, fake: FakeProfiler) -> None:
    """What was recorded until then is written before the run goes on to its end; later requests are refused."""
    window = TorchWindow(tmp_path)
    asking = asked(window, 40)
    window.poll()
    window.poll()
    window.close()
    assert len(list(tmp_path.glob("torch-*.json.gz"))) == 1
    assert asking.result()["batches"] == 2
    assert "the run is over" in Asking(window, 1).failure()


def test_a_request_before_the_last_batch_is_told_of_the_end(tmp_path: Path, fake: FakeProfiler) -> None:
    """It has recorded nothing, so it fails at once."""
    window = TorchWindow(tmp_path)
    asking = asked(window, 1)
    window.close()
    assert "the run is over" in asking.failure() and fake.calls == []


def test_a_nearly_full_disk_refuses(tmp_path: Path, fake: FakeProfiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded that could not be written; the message has both numbers."""
    usage = shutil.disk_usage(tmp_path)._replace(free=199_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(RuntimeError, match="199 MB free; a window needs 200 MB"):
        TorchWindow(tmp_path).request(1)
    assert fake.calls == []


def test_a_trace_cut_short_is_no_trace(tmp_path: Path, fake: FakeProfiler) -> None:
    """Torch does not notice a full disk; half a trace is refused, and no file is left."""
    window = TorchWindow(tmp_path)
    fake.text = WHOLE[:40]
    asking = asked(window, 1)
    window.poll()
    window.poll()
    assert "incomplete" in asking.failure() and not list(tmp_path.iterdir())


def test_events_are_counted_across_chunks(tmp_path: Path, fake: FakeProfiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the file falls into chunks, each event and each thread counts once, and the file is the same."""
    fields = ('"ph": "X"', '"cat": "cpu_op"', '"name": "a::%d"', '"pid": 1', '"tid": %d', '"ts": 1')
    event = "\n  {\n    " + ",\n    ".join(fields) + "\n  }"
    fake.text = '{"traceEvents": [' + ",".join(event % (i, i % 7) for i in range(100)) + "\n  ]}\n"
    for size in (1, 17, 1000, 1 << 20):
        monkeypatch.setattr(torch_window, "_CHUNK_BYTES", size)
        window = TorchWindow(tmp_path)
        asking = asked(window, 1)
        window.poll()
        window.poll()
        answer = asking.result()
        assert (answer["events"], answer["threads"]) == (100, 7)
        assert gzip.open(answer["file"], "rt").read() == fake.text


def test_polling_costs_next_to_nothing(tmp_path: Path) -> None:
    """Between micro-batches nobody notices it: well under a microsecond."""
    window, best = TorchWindow(tmp_path), 1.0
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(1000):
            window.poll()
        best = min(best, (time.perf_counter() - started) / 1000)
    assert best < 1e-6
