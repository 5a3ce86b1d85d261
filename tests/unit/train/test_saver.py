"""The saver: training goes on while a checkpoint is written, and a write that fails loses nothing."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import Optim
from paceline.errors import CheckpointError
from paceline.models.draft import DFlashDrafter
from paceline.profiling import stages
from paceline.profiling.page import Control
from paceline.train import checkpoint, saver
from paceline.train.checkpoint import TrainState
from paceline.train.optim import MasterAdamW
from paceline.train.saver import Saver
from tests import tiny


class Run:
    """A drafter with its optimizer and saver, and what the saver has told."""

    def __init__(self, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32, **shape: Any) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.drafter = DFlashDrafter(tiny.draft_shape(**shape)).to(device)
        self.optimizer = MasterAdamW(self.drafter, Optim(), dtype, sums_gradients=False)
        self.keep: tuple[int, int | None] = (9, None)
        self.saved: list[tuple[int, Path]] = []
        self.failed: list[tuple[int, str]] = []
        self.step = 0
        self.saver = Saver(
            folder,
            self.drafter,
            self.optimizer,
            keep=lambda: self.keep,
            on_saved=lambda step, place: self.saved.append((step, place)),
            on_failed=lambda step, reason: self.failed.append((step, reason)),
        )

    def update(self) -> None:
        for parameter in self.drafter.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.set_rate(1e-1, self.step)
        self.optimizer.apply(torch.ones((), device=self.optimizer.failed.device))
        self.step += 1

    def save(self, **kwargs: Any) -> dict[str, Tensor]:
        """Hand the present step over; copies of all that the checkpoint should hold."""
        now = self.drafter.state_dict() | self.optimizer.masters | self.optimizer.state(self.step)
        copies = {name: tensor.detach().cpu().clone() for name, tensor in now.items()}
        self.saver.save(TrainState(self.step, 2 * self.step, 0, 100, 32, None, None, "target", "data"), **kwargs)
        return copies

    def place(self, step: int) -> Path:
        return checkpoint.place_of(self.folder, step)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "checkpoints")
    yield run
    run.saver.close()
    assert run.saver._thread is None or not run.saver._thread.is_alive()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "FLUSH_RETRY_S", 0.02)


class Gate:
    """Holds the writing thread before it writes, until it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        write = checkpoint.write

        def held(*args: Any) -> Path:
            self.reached.set()
            assert self.opened.wait(20)
            return write(*args)

        monkeypatch.setattr(checkpoint, "write", held)


class Disk:
    """Lets writing fail while it is `full`, and counts the tries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "write", number: int = errno.ENOSPC) -> None:
        self.is_full, self.tries = True, 0
        call = getattr(os, name)

        def attempt(*args: Any, **kwargs: Any) -> Any:
            if self.is_full:
                self.tries += 1
                raise OSError(number, os.strerror(number))
            return call(*args, **kwargs)

        monkeypatch.setattr(os, name, attempt)


def until(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


def assert_holds(place: Path, expected: dict[str, Tensor]) -> None:
    checkpoint.verify(place)
    found = checkpoint.read_tensors(place / "model.safetensors")
    found |= checkpoint.read_tensors(place / "optimizer.safetensors")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Updates made before a byte is written do not show in the checkpoint, which is that of its step."""
    run, gate = Run(tmp_path, dtype=dtype, draft_vocab_size=100), Gate(monkeypatch)
    run.update()
    expected = run.save()
    assert gate.reached.wait(20) and run.saver.is_writing and run.saver.saved_step is None
    for _ in range(3):
        run.update()
    assert not torch.equal(run.optimizer.masters["fc.weight"].cpu(), expected["fc.weight"])
    assert not run.place(1).exists()
    gate.opened.set()
    run.saver.flush()
    assert_holds(run.place(1), expected)
    assert "d2t" in expected
    assert run.saved == [(1, run.place(1))] and (run.saver.saved_step, run.saver.is_writing) == (1, False)
    run.saver.close()


def test_what_is_written_is_what_the_synchronous_form_writes(run: Run, tmp_path: Path) -> None:
    """Both ways give the same files, to the byte."""
    run.update()
    run.save()
    run.saver.flush()
    state = checkpoint.load_state(run.place(1))
    other = checkpoint.save(tmp_path / "other", state, run.drafter, run.optimizer, keep_last=1)
    for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER, checkpoint.STATE, checkpoint.SHAPE, checkpoint.MANIFEST):
        assert (run.place(1) / name).read_bytes() == (other / name).read_bytes()
    assert run.saver.num_bytes == sum(
        (other / name).stat().st_size for name in (checkpoint.WEIGHTS, "optimizer.safetensors")
    )


def test_memory_is_taken_once(run: Run) -> None:
    """Later snapshots lie where the first one lay."""
    run.save()
    run.saver.flush()
    assert run.saver._snapshot is not None
    places = {name: copy.data_ptr() for name, copy in run.saver._snapshot._copies.items()}
    for _ in range(2):
        run.update()
        expected = run.save()
        run.saver.flush()
        assert_holds(run.place(run.step), expected)
    assert {name: copy.data_ptr() for name, copy in run.saver._snapshot._copies.items()} == places


def test_the_next_save_waits_for_a_write_under_way(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that is being written is not overwritten: who saves again too soon waits."""
    gate = Gate(monkeypatch)
    first = run.save()
    assert gate.reached.wait(20)
    run.update()
    second: list[dict[str, Tensor]] = []
    thread = threading.Thread(target=lambda: second.append(run.save()))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    gate.opened.set()
    thread.join(20)
    run.saver.flush()
    assert_holds(run.place(0), first)
    assert_holds(run.place(1), second[0])
    assert [step for step, _ in run.saved] == [0, 1]


@pytest.mark.parametrize(
    ("number", "what_to_do"),
    [
        (errno.ENOSPC, "make room on this file system"), (errno.EDQUOT, "quota"),
        (errno.EROFS, "mount the file system writable"), (errno.EIO, "dmesg"), (errno.EFBIG, "ulimit -f"),
        (errno.ENODEV, "see whether"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "replace", "symlink", "mkdir"])
def test_a_write_that_fails_is_tried_again(
    run: Run, call: str, number: int, what_to_do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on, the reason is told, earlier ones stay, and the snapshot is on the disk once that works again."""
    monkeypatch.setattr(saver, "RETRY_S", 0.005)
    earlier = run.save(is_best=True)
    run.saver.flush()
    run.update()
    disk = Disk(monkeypatch, call, number)
    expected = run.save(is_best=True)
    until(lambda: len(run.failed) >= 2)
    run.update()
    step, reason = run.failed[0]
    assert step == 1 and str(run.place(1)) in reason and os.strerror(number) in reason and what_to_do in reason
    assert run.saver.problem is not None and reason in run.saver.problem
    assert_holds(run.place(0), earlier)
    assert {(run.folder / name).resolve() for name in ("latest", "best")} == {run.place(0).resolve()}
    disk.is_full = False
    until(lambda: run.saver.saved_step == 1)
    run.saver.flush()
    assert run.saver.problem is None and [step for step, _ in run.saved] == [0, 1]
    assert_holds(run.place(1), expected)
    assert {(run.folder / name).resolve() for name in ("latest", "best")} == {run.place(1).resolve()}
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "best",
        "latest",
        run.place(0).name,
        run.place(1).name,
    ]


def test_pauses_grow(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that stays full is asked less and less often, and the pause is told."""
    monkeypatch.setattr(saver, "RETRY_S", 0.01)
    monkeypatch.setattr(saver, "MAX_RETRY_S", 0.03)
    problems: list[str | None] = []
    run.saver._on_failed = lambda *_: problems.append(run.saver.problem)
    Disk(monkeypatch)
    run.save()
    until(lambda: len(problems) >= 4)
    pauses = [problem.split("again in ")[1].split(" s")[0] for problem in problems[:4] if problem]
    assert pauses == ["0.01", "0.02", "0.03", "0.03"]


def test_a_newer_one_takes_the_place_of_one_that_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not waited for the pause of the older one, which is given up, and that is said."""
    disk = Disk(monkeypatch)
    run.save()
    until(lambda: run.failed and not run.saver.is_writing)
    run.update()
    disk.is_full = False
    expected = run.save()
    run.saver.flush()
    assert_holds(run.place(1), expected)
    assert not run.place(0).exists() and [step for step, _ in run.saved] == [1] and run.saver.problem is None
    assert "the checkpoint of step 0 is given up for that of 1" in caplog.text


def test_flush_tries_at_once_and_gives_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a run nobody waits half a minute: a few tries, and an error that says why."""
    disk = Disk(monkeypatch)
    run.save()
    with pytest.raises(CheckpointError, match="step-00000000 could not be written: No space left on device; make room"):
        run.saver.flush()
    assert disk.tries == len(run.failed) == 1 + saver.FLUSH_TRIES
    disk.is_full = False
    run.saver.flush()
    assert [step for step, _ in run.saved] == [0]


def test_flush_succeeds_where_a_retry_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that passes within the tries of a flush is none."""
    disk = Disk(monkeypatch)
    run.saver._on_failed = lambda *_: setattr(disk, "is_full", disk.tries < 3)
    expected = run.save()
    run.saver.flush()
    assert disk.tries == 3
    assert_holds(run.place(0), expected)


def test_flush_does_not_wait_for_ever(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs ends in an error within the time given."""
    gate = Gate(monkeypatch)
    run.save()
    with pytest.raises(CheckpointError, match=r"step-00000000 is not on the disk after 0\.05 s"):
        run.saver.flush(0.05)
    gate.opened.set()
    run.saver.flush(20)
    assert run.saver.saved_step == 0


def test_flush_without_a_save_has_nothing_to_do(run: Run) -> None:
    """Neither flushing nor closing needs a save before it."""
    run.saver.flush()
    run.saver.close()
    assert not run.folder.exists()


def test_close_lets_a_write_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been handed over is written, what has failed is not waited for, and later saves are refused."""
    expected = run.save()
    run.saver.close()
    assert_holds(run.place(0), expected)
    with pytest.raises(CheckpointError, match="after the end of the run"):
        run.save()
    other = Run(run.folder / "other")
    Disk(monkeypatch)
    other.save()
    until(lambda: other.failed and not other.saver.is_writing)
    other.saver.close()
    assert other.saver._thread is not None and not other.saver._thread.is_alive()


def test_links_retention_and_the_word_come_in_order(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a checkpoint is said to be saved it is pointed to, and old ones are gone, as `keep` says by then."""
    seen: list[tuple[str, list[str]]] = []
    run.saver._on_saved = lambda step, place: seen.append(
        (os.readlink(run.folder / "latest"), sorted(path.name for path in run.folder.glob("step-*")))
    )
    run.save(is_best=True)
    for keep in ((9, None), (1, None), (1, 3)):
        run.saver.flush()
        run.keep = keep
        run.update()
        run.save()
    run.update()
    run.save()
    run.saver.flush()
    names = [run.place(step).name for step in range(5)]
    assert seen == [
        (names[0], names[:1]), (names[1], names[:2]), (names[2], [names[0], names[2]]),
        (names[3], [names[0], names[3]]), (names[4], [names[0], names[3], names[4]]),
    ]  # fmt: skip
    assert os.readlink(run.folder / "best") == names[0]


def test_a_link_that_fails_does_not_write_anew(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the files are on the disk only what is missing is tried again."""
    disk = Disk(monkeypatch, "symlink")
    run.save()
    until(lambda: run.failed and not run.saver.is_writing)
    num_bytes = run.saver.num_bytes
    disk.is_full = False
    run.saver.flush()
    assert run.saver.num_bytes == num_bytes and run.saver.saved_step == 0


def test_listeners_that_fail_do_not_end_the_thread(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """A fault in what is told of a checkpoint is logged, and the next one is written."""

    def fail(*_: object) -> None:
        raise ValueError("oh")

    run.saver._on_saved = run.saver._keep = fail  # type: ignore[assignment]
    for step in range(2):
        run.save()
        run.saver.flush()
        assert run.saver.saved_step == step
        run.update()
    assert "ValueError: oh" in caplog.text


@pytest.mark.parametrize("lacking", ["memory", "all memory", "threads"])
def test_without_memory_it_is_written_at_once(
    run: Run, lacking: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a copy, or a thread, cannot be had, training waits for each checkpoint, after one warning."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    if lacking == "memory":
        monkeypatch.setattr(saver, "_available_bytes", lambda: 1000)
    elif lacking == "all memory":
        monkeypatch.setattr(saver.torch, "empty", refuse)
    else:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    for step in range(2):
        expected = run.save()
        assert run.saver.saved_step == step and not run.saver.is_writing
        assert_holds(run.place(step), expected)
        run.update()
    assert caplog.text.count("training waits for each checkpoint") == 1
    disk = Disk(monkeypatch)
    run.save()
    assert run.failed[0][0] == 2 and "tried again with the next checkpoint" in str(run.saver.problem)
    with pytest.raises(CheckpointError, match="No space left"):
        run.saver.flush()
    disk.is_full = False
    run.update()
    run.save()
    run.saver.flush()
    assert [step for step, _ in run.saved] == [0, 1, 3] and run.saver.problem is None


def test_the_free_memory_of_the_system_is_known() -> None:
    """Between a megabyte and a petabyte."""
    available = saver._available_bytes()
    assert available is not None and 2**20 < available < 2**50


def test_the_profile_tells_copying_from_writing(run: Run, tmp_path: Path) -> None:
    """The copy is the drafter's, the writing the writer's, each under its stage."""
    page = stages.open_run(tmp_path / "profile")
    assert page is not None
    try:
        page.set_control(Control(1, True))
        with stages.as_role("drafter-0"):
            run.save()
        run.saver.flush()
        roles = {thread.role: thread.stages for thread in page.snapshot().threads}
    finally:
        stages.close_run(page, tmp_path / "profile")
    assert roles["drafter-0"]["checkpoint_snapshot"].count == 1
    assert roles["checkpoint"]["checkpoint_write"].count >= 1


def test_an_update_waits_for_a_copy_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of the next update is told to wait, before anything of the update; later ones are not."""
    told: list[object] = []

    class Stream:
        def wait_event(self, event: object) -> None:
            told.append(event)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream())
    run.update()
    assert told == []
    run.optimizer.update_after("copied")  # type: ignore[arg-type]
    run.optimizer.set_rate(1e-3, 1)
    assert told == ["copied"]
    run.update()
    assert told == ["copied"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("replays", [False, True])
def test_on_a_gpu_an_update_waits_for_the_copy(tmp_path: Path, replays: bool) -> None:
    """Weights are copied as they were, though the copy is late and the host has long launched the next updates."""
    run = Run(tmp_path, "cuda", torch.bfloat16, hidden_size=1024, intermediate_size=1024)
    run.optimizer.sum_gradients()
    gradient = torch.randn_like(run.optimizer.masters["fc.weight"]).bfloat16()
    weight = torch.ones((), device="cuda")

    def work() -> None:
        run.optimizer.gradients()["fc.weight"].copy_(gradient)
        run.optimizer.apply(weight)

    def update() -> None:
        run.optimizer.set_rate(1e-1, run.step)
        graph.replay() if graph is not None else work()
        run.step += 1

    graph = None
    for _ in range(2):
        update()
    if replays:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
    run.save()  # memory is taken
    run.saver.flush()
    for _ in range(3):
        update()
        expected = run.save()
        run.saver.flush()
        assert_holds(run.place(run.step), expected)
    for _ in range(2):  # the copies are late
        step, expected = run.step, {name: master.cpu().clone() for name, master in run.optimizer.masters.items()}
        snapshot = run.saver._snapshot
        assert snapshot is not None and snapshot._stream is not None
        with torch.cuda.stream(snapshot._stream):
            torch.cuda._sleep(2_000_000_000)
        run.saver.save(TrainState(step, 2 * step, 0, 100, 32, None, None, "target", "data"))
        for _ in range(5):
            update()
        assert snapshot._copied is not None and not snapshot._copied.query()  # the host has waited for nothing
        run.saver.flush()
        found = checkpoint.read_tensors(run.place(step) / "model.safetensors")
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not torch.equal(run.optimizer.masters["fc.weight"].cpu(), expected["fc.weight"])
    assert all(copy.is_pinned() for copy in snapshot._copies.values())
    run.saver.close()
