"""Stages: what is counted of them, by thread and role; when nothing is; and what threads, forks and ends do to it."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import Kernels, Loss, Optim
from paceline.kernels import flex
from paceline.models.draft import DraftShape
from paceline.models.target import Target
from paceline.profiling import page as layout
from paceline.profiling import stages
from paceline.profiling.page import Control, Page, ThreadSnapshot, pages_in, read_page
from paceline.profiling.stages import Recorder, Stage, TimedQueue, as_role
from paceline.profiling.stats import ProfileStats
from paceline.train import step as step_module
from paceline.train.step import TrainStep
from tests import tiny
from tests.unit.profiling.conftest import Clock

ROOT = Path(__file__).parents[3]
PATIENCE_S = 30.0


def switch(page: Page, is_on: bool) -> None:
    """As `paceline profile on` and `off` do."""
    page.set_control(Control.of(page.words[layout.CONTROL]).changed(is_on, 0.0))


@pytest.fixture
def on(page: Page) -> Page:
    """The page, switched on."""
    switch(page, True)
    return page


def mine(page: Page, role: str = "other") -> ThreadSnapshot:
    """What stands of this thread in a role."""
    (found,) = (t for t in page.snapshot().threads if t.tid == threading.get_native_id() and t.role == role)
    return found


def seconds(ns: int) -> float:
    return round(ns / 1e9, 6)


def in_threads(number: int, work: Callable[[int], None], name: str = "t{}") -> None:
    """Run `work(i)` in so many threads at once."""
    threads = [threading.Thread(target=work, args=(i,), name=name.format(i)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_total_and_self_time_of_nested_stages(clock: Clock, on: Page) -> None:
    """A stage's total holds the stages inside it, its self time does not, and only outermost time covers the thread."""
    for _ in range(2):
        with stages.FORWARD:
            clock.pass_s(1)
            with stages.LAYERS:
                clock.pass_s(2)
                with stages.CREATE_BLOCK_MASK:
                    clock.pass_s(4)
            clock.pass_s(8)
            with stages.CHUNKED_LOSS:
                clock.pass_s(16)
    found = mine(on)
    times = {name: (seconds(s.total_ns), seconds(s.self_ns)) for name, s in found.stages.items() if s.count}
    assert times == {"forward": (62, 18), "layers": (12, 4), "create_block_mask": (8, 8), "chunked_loss": (32, 32)}
    assert found.top_ns == 62 * 10**9 and found.inner is found.outer is None


def test_the_page_shows_the_innermost_and_the_outermost_stage(clock: Clock, page: Page) -> None:
    """Also while nothing is counted, each thread shows what it is in and since when, and between stages nothing."""
    with stages.BACKWARD:
        began = clock.now
        clock.pass_s(1)
        with stages.RECOMPUTE:
            clock.pass_s(1)
            with stages.LAYERS:
                found = mine(page)
                assert found.inner == layout.Running("layers", clock.now)
            assert mine(page).inner == layout.Running("recompute", began + 10**9)
            assert found.outer == mine(page).outer == layout.Running("backward", began)
    assert mine(page).inner is mine(page).outer is None
    assert all(stats == ProfileStats(max_ns=None, histogram=stats.histogram) for stats in mine(page).stages.values())
    assert not any(sum(stats.histogram) for stats in mine(page).stages.values())
    assert mine(page).top_ns == 2 * 10**9  # not counted, and yet known not to be between stages


def test_counts_are_by_thread_and_role(clock: Clock, on: Page) -> None:
    """One thread in two roles, one inside the other, and another thread in one of them each count for themselves."""
    with as_role("drafter-0"), stages.GET_WAIT, as_role("target-0"):
        stages.next_batch(3)
        with stages.MODEL_FORWARD:
            clock.pass_s(1)
        with as_role("drafter-0"), stages.LOG:
            clock.pass_s(1)
    with as_role("drafter-0"), stages.LOG:
        clock.pass_s(1)

    def work(_i: int) -> None:
        with as_role("target-0"), stages.MODEL_FORWARD:
            clock.pass_s(5)

    in_threads(1, work)
    assert mine(on, "target-0").stages["model_forward"].total_ns == 10**9 and mine(on, "target-0").batch == 3
    assert mine(on, "drafter-0").stages["get_wait"].self_ns == 10**9 and mine(on, "drafter-0").num_batches == 0
    assert mine(on, "drafter-0").stages["log"].count == 2
    assert on.snapshot().total("model_forward").total_ns == 6 * 10**9
    assert [thread.role for thread in on.snapshot().threads[1:]] == ["drafter-0", "target-0", "target-0"]


def test_an_exception_ends_its_stages_and_is_counted(clock: Clock, on: Page) -> None:
    """It passes through, every stage that it leaves is closed with its time, and the next one is outermost again."""
    with pytest.raises(KeyError), stages.FORWARD:
        with stages.LAYERS:
            clock.pass_s(3)
            raise KeyError
    with stages.FORWARD:
        clock.pass_s(1)
    found = mine(on)
    assert (found.stages["forward"].errors, found.stages["layers"].errors) == (1, 1)
    assert found.stages["forward"].count == 2 and found.top_ns == 4 * 10**9 and found.inner is None


@pytest.mark.parametrize(
    "kind", [queue.Empty, queue.Full, GeneratorExit, torch.utils.checkpoint._StopRecomputationError]
)
def test_an_end_that_is_meant_is_no_failure(on: Page, kind: type[BaseException]) -> None:
    """A wait that is over without an item, and a layer that is computed again as far as it is needed, did not fail."""
    with contextlib.suppress(kind), stages.RECOMPUTE:
        raise kind
    assert (mine(on).stages["recompute"].count, mine(on).stages["recompute"].errors) == (1, 0)


def test_a_stage_that_was_never_left_is_dropped(clock: Clock, on: Page) -> None:
    """An interrupt between entering and working leaves a stage open: it goes with the one around it, uncounted."""
    with stages.BACKWARD:
        clock.pass_s(1)
        stages.RECOMPUTE.__enter__()
        stages.LAYERS.__enter__()
        clock.pass_s(1)
    with stages.FORWARD:
        clock.pass_s(1)
    stages.LOG.__exit__(None, None, None)
    counts = {name: s.count for name, s in mine(on).stages.items() if s.count or s.recompute_count}
    assert counts == {"backward": 1, "forward": 1} and mine(on).top_ns == 3 * 10**9 and mine(on).inner is None


def test_a_thread_that_was_killed_while_it_wrote_does_not_hide_the_next(on: Page) -> None:
    """What stands in a block counts as whole after every run, also if an earlier run was never written to its end, and
    once the thread has ended."""
    for _ in range(3):
        with stages.LOG:
            pass
        assert not mine(on).is_torn
    block = layout._BLOCKS + mine(on).block * layout.BLOCK_WORDS
    on.words[block + layout.SEQUENCE] += 1
    assert mine(on).is_torn
    with stages.LOG:
        pass
    assert not mine(on).is_torn and mine(on).stages["log"].count == 4
    on.words[block + layout.SEQUENCE] += 1
    on.leave(block)
    assert not mine(on).is_torn


def test_what_is_computed_again_is_counted_apart(clock: Clock, on: Page) -> None:
    """A stage inside a recomputation adds to neither its count nor its total; the time stays with the outer ones."""
    with stages.FORWARD, stages.LAYERS:
        clock.pass_s(1)
    with stages.BACKWARD:
        for _ in range(2):
            with stages.RECOMPUTE, stages.LAYERS:
                clock.pass_s(5)
        clock.pass_s(1)
    found = mine(on).stages
    assert (found["layers"].count, found["layers"].total_ns, sum(found["layers"].histogram)) == (1, 10**9, 1)
    assert (found["layers"].recompute_count, found["layers"].recompute_ns) == (2, 10 * 10**9)
    assert (found["recompute"].count, found["recompute"].total_ns, found["recompute"].self_ns) == (2, 10 * 10**9, 0)
    assert (found["backward"].total_ns, found["backward"].self_ns) == (11 * 10**9, 10**9)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny.target("llama", tmp_path_factory.mktemp("stages") / "target", layer_ids=(1, 3))


def make_step(target: Target, shape: DraftShape | None = None, **more: Any) -> TrainStep:
    settings = {"num_anchors": 12, "loss": Loss(gamma=2.0), "seed": 5, "total_steps": 10, "dtype": torch.float32}
    return TrainStep(tiny.drafter(shape), target.embed, target.head, Optim(lr=1e-2), **settings | more)


def test_a_real_recomputation_is_tagged(target: Target, on: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `draft.recompute` each layer runs twice: once in forward, once in backward as recomputation, and attention
    inside it counts once in each; none of it as a failure."""
    original = step_module.attend_per_document

    def attend(*args: Any) -> Any:
        with stages.CREATE_BLOCK_MASK_SWA:
            return original(*args)

    monkeypatch.setattr(step_module, "attend_per_document", attend)
    features = target.features(tiny.row([9, 14], 32, seed=1))
    for is_again in (False, True):
        step = make_step(target, recompute=is_again)
        step.accumulate(features)
        found = mine(on).stages
        layers = 2 * (1 + is_again)
        assert found["create_block_mask_swa"].count == layers
        assert found["recompute"].count == found["create_block_mask_swa"].recompute_count == 2 * is_again
        assert [name for name, stats in found.items() if stats.errors] == []
    assert 0 < found["recompute"].total_ns < found["backward"].total_ns


def test_nothing_stands_inside_compiled_parts(target: Target, on: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that training compiles compiles as a whole with a page open, enters no stage, and computes the same."""
    parts, inside, entered = set(), threading.Event(), list[str]()

    def compiled(function: Callable[..., Any], any_size: bool) -> Callable[..., Any]:
        whole = torch.compile(function, fullgraph=True, dynamic=any_size, backend="eager")

        def watched(*args: Any) -> Any:
            parts.add(function.__name__)
            inside.set()
            try:
                return whole(*args)
            finally:
                inside.clear()

        return watched

    original = Recorder.enter

    def enter(self: Recorder, stage: int) -> None:
        entered.extend([stages._NAMES[stage]] * inside.is_set())
        original(self, stage)

    def sees_all(rows: Any, key: Any, value: Any, block_mask: Any, enable_gqa: bool) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(rows, key, value, enable_gqa=enable_gqa)

    monkeypatch.setattr(Recorder, "enter", enter)
    monkeypatch.setattr("paceline.kernels.compiled._compiled", compiled)
    monkeypatch.setattr(step_module, "_choose_attention", lambda *args: ("flex", "as on a GPU"))
    monkeypatch.setattr(flex, "fused_flex_attention", sees_all)  # which has no gradients on the CPU
    kinds = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 11}
    features, losses = target.features(tiny.row([40, 70], 128, seed=1)), []
    for is_compiled in (True, False):
        kernels = Kernels(cuda_graphs="off", compile=is_compiled)
        step = make_step(target, shape=tiny.draft_shape(**kinds), num_anchors=64, kernels=kernels)
        step.accumulate(features)
        step.update(0)
        losses.append(step.last_loss())
    assert parts >= {"context_kv_at", "attend_flex", "finish"} and entered == []
    assert torch.equal(*losses)
    found = mine(on).stages
    assert [found[name].count for name in ("layers", "create_block_mask", "create_block_mask_swa")] == [2, 2, 2]


def test_a_stage_that_is_open_at_a_switch_is_dropped(clock: Clock, page: Page) -> None:
    """Switched on, off, or off and on again inside a stage, that run is counted in no part, and those inside it are
    where the switch was the same from their beginning to their end."""
    with stages.VALIDATE:
        clock.pass_s(1)
        switch(page, True)
        clock.pass_s(1)
        with stages.MODEL_FORWARD:
            clock.pass_s(1)
    assert {n: s.count for n, s in mine(page).stages.items() if s.count} == {"model_forward": 1}
    assert mine(page).top_ns == 3 * 10**9
    with stages.FORWARD:
        with stages.LAYERS:
            switch(page, False)
        switch(page, True)
    with stages.BACKWARD:
        switch(page, False)
    with stages.LOG:
        pass
    assert {n: s.count for n, s in mine(page).stages.items() if s.count} == {"model_forward": 1}
    assert sum(sum(s.histogram) for s in mine(page).stages.values()) == 1 and mine(page).inner is None


def test_without_a_page_nothing_happens(folder: Path) -> None:
    """Stages, batches and gauges are free to use in a process that has opened none, or has closed it."""
    page = stages.open_run(folder)
    switch(page, True)
    stages.FORWARD.__enter__()
    stages.close_run(page, folder)
    stages.FORWARD.__exit__(None, None, None)
    before = bytes(page.words)
    with stages.FORWARD:
        stages.next_batch(1)
        stages.set_gauge("step", 5)
        stages.synchronised(None)
    assert bytes(page.words) == before and not stages.is_on() and not stages.times_device()
    assert not page.path.exists() and pages_in(folder) == []


def test_a_page_that_is_opened_or_closed_inside_of_stages(folder: Path, clock: Clock) -> None:
    """Stages that began before the page, or ended after another was opened, count in none; those between do."""
    with stages.FORWARD:
        first = stages.open_run(folder)
        switch(first, True)
        with stages.FORWARD:
            clock.pass_s(1)
        with stages.LAYERS:
            stages.close_run(first, folder)
            second = stages.open_run(folder)
            switch(second, True)
            with stages.LAYERS:
                clock.pass_s(1)
    assert {n: s.count for n, s in mine(second).stages.items() if s.count} == {"layers": 1}
    assert mine(first).stages["forward"].count == 1 and second.snapshot().total("forward").count == 0
    stages.close_run(second, folder)


def test_threads_that_outlive_a_run_do_no_harm(folder: Path, clock: Clock) -> None:
    """A thread still in a stage when its page is closed goes on, joins the next run's page, and the two pages, each
    with the counts of its own time, are gone from memory in the end."""
    go, there, is_over = threading.Event(), threading.Event(), threading.Event()

    def work(_i: int) -> None:
        with as_role("target-0"):
            with stages.MODEL_FORWARD:
                there.set()
                go.wait(PATIENCE_S)
            with stages.PACK_HIDDEN:
                pass
        is_over.set()

    pages = []
    for run in range(2):
        page = stages.open_run(folder)
        switch(page, True)
        with as_role("drafter-0"), stages.FORWARD:
            pass
        if run == 0:
            thread = threading.Thread(target=work, args=(0,), name="target-0")
            thread.start()
            assert there.wait(PATIENCE_S)
            stages.close_run(page, folder)
        pages.append(page)
    go.set()
    thread.join(PATIENCE_S)
    assert is_over.is_set()
    counts = [
        {n: page.snapshot().total(n).count for n in ("forward", "model_forward", "pack_hidden")} for page in pages
    ]
    assert counts[0] == {"forward": 1, "model_forward": 1, "pack_hidden": 0}
    assert counts[1] == {"forward": 1, "model_forward": 0, "pack_hidden": 1}
    stages.close_run(pages[1], folder)
    assert list(folder.iterdir()) == [] and not any(page.path.exists() for page in pages)


def test_a_second_run_keeps_nothing_of_the_first(folder: Path) -> None:
    """In a process that trains twice the first page's memory is given back once a thread has joined the second."""
    first = stages.open_run(folder)
    for role in ("drafter-0", "target-0"):
        with as_role(role), stages.FORWARD:
            pass
    stages.close_run(first, folder)
    kept = weakref.ref(first)
    del first
    second = stages.open_run(folder)
    switch(second, True)
    with as_role("drafter-0"), stages.LOG:
        pass
    gc.collect()
    assert kept() is None and [recorder.role for recorder in stages.recorders()] == ["drafter-0"]
    assert mine(second, "drafter-0").stages["log"].count == 1 and second.snapshot().total("forward").count == 0
    stages.close_run(second, folder)


@contextlib.contextmanager
def busy_switching() -> Iterator[None]:
    """Threads give way to each other as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_many_threads_at_once_count_what_a_replay_counts(on: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 threads that nest stages at random, on clocks of their own, leave exactly the statistics that plain code
    makes of the same runs, each of them and all together."""
    here = threading.local()
    monkeypatch.setattr(stages, "_clock", lambda: here.now)
    replays: dict[str, dict[str, ProfileStats]] = {}
    kinds = [stages.FORWARD, stages.LAYERS, stages.BACKWARD, stages.CHUNKED_LOSS, stages.LOG]
    start = threading.Barrier(64)

    def work(i: int) -> None:
        chance, replay = random.Random(i), defaultdict[str, ProfileStats](ProfileStats)
        here.now = 1 + i

        def run(depth: int) -> int:
            stage, inside, began = chance.choice(kinds), 0, here.now
            with stage:
                here.now += chance.randrange(1 << chance.randrange(42))  # up to an hour
                for _ in range(chance.randrange(3) if depth < 3 else 0):
                    inside += run(depth + 1)
            took = here.now - began
            replay[stage.name].add(took, took - inside)
            return took

        start.wait(PATIENCE_S)
        with as_role(f"target-{i % 4}"):
            for _ in range(12):
                run(0)
        replays[f"w{i}"] = dict(replay)

    with busy_switching():
        in_threads(64, work, "w{}")
    found = on.snapshot()
    assert len(replays) == 64 and found.num_lost == 0
    for thread in found.threads[1:]:
        replay = replays[thread.thread]
        assert {name for name, stats in thread.stages.items() if stats.count} == replay.keys() and not thread.is_torn
        for name, stats in replay.items():
            longest = max(thread.longest[name].values())
            found_stats = replace(thread.stages[name].since(ProfileStats()), outermost=0)
            assert found_stats == stats.since(ProfileStats()) and longest == stats.max_ns
    for kind in kinds:
        together = sum((r.get(kind.name, ProfileStats()) for r in replays.values()), ProfileStats())
        assert replace(found.total(kind.name), outermost=0) == together.since(ProfileStats())


def test_more_threads_than_the_page_has_blocks_for(on: Page) -> None:
    """Those that find no block work on uncounted, and the page says how many they were."""
    barrier, done = threading.Barrier(100), []

    def work(i: int) -> None:
        barrier.wait(PATIENCE_S)
        for _ in range(3):
            with stages.FORWARD:
                stages.next_batch(i)
        barrier.wait(PATIENCE_S)  # all of them are there at once
        done.append(i)

    in_threads(100, work)
    found = on.snapshot()
    assert len(done) == 100 and found.num_lost == 100 - (layout.MAX_BLOCKS - 1)
    assert found.total("forward").count == 3 * (layout.MAX_BLOCKS - 1)


def test_a_thread_takes_over_the_block_of_one_of_its_names(on: Page) -> None:
    """Threads of the same name and role one after another need one block, and its counts and batches go on."""
    for i in range(100):

        def work(_i: int, number: int = i) -> None:
            with as_role("target-0"), stages.MODEL_FORWARD:
                stages.next_batch(number)

        in_threads(1, work, "worker")
    (found,) = on.snapshot().threads[1:]
    assert (found.stages["model_forward"].count, found.num_batches, found.batch) == (100, 100, 99)
    assert not found.is_live and found.left_ns >= found.joined_ns


def test_threads_that_have_ended_are_neither_lost_nor_kept(on: Page) -> None:
    """200 threads of different names share the blocks, their runs stay in the sum, and nothing of them in memory."""

    def work(_i: int) -> None:
        with stages.FORWARD:
            pass

    for i in range(200):
        in_threads(1, work, f"once-{i}")
    with stages.LOG:
        found = on.snapshot()
    assert found.total("forward").count == 200 and found.num_lost == 0
    assert found.threads[0].stages["forward"].count == 200 - (layout.MAX_BLOCKS - 2)  # the rest stand in their blocks
    gc.collect()
    assert len([recorder for recorder in stages.recorders() if recorder.page is on]) == 1


def test_a_thread_that_dies_inside_a_stage_leaves_none_open(on: Page) -> None:
    """An exception that ends a thread counts as the stage's failure, and the thread shows no stage any more."""

    def work(_i: int) -> None:
        with contextlib.suppress(SystemExit), as_role("target-0"):
            stages.PUT_WAIT.__enter__()
            with stages.MODEL_FORWARD:
                raise SystemExit

    in_threads(1, work)
    found = on.snapshot().threads[-1]
    assert (found.stages["model_forward"].errors, found.stages["put_wait"].count) == (1, 0)
    assert found.inner is found.outer is None and not found.is_live


def test_the_interpreter_ends_quietly_with_threads_in_stages(folder: Path) -> None:
    """Daemon threads that are killed inside stages at exit say nothing, and what they left is told to be dead."""
    code = """if True:
        import sys, threading, time
        from pathlib import Path
        from paceline.profiling import page as layout, stages
        page = stages.open_run(Path(sys.argv[1]))
        page.words[layout.CONTROL] = layout.Control(1, True).word
        def work():
            with stages.FORWARD:
                while True:
                    with stages.LAYERS:
                        pass
        threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        held = stages.recorders()  # until the modules are gone
        stages.BACKWARD.__enter__()
        time.sleep(0.05)
    """
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = pages_in(folder)
    found = read_page(path)
    assert not found.is_running and found.total("layers").count > 0
    stages.close_run(stages.open_run(folder), folder)  # removes it
    assert pages_in(folder) == [] and not path.is_symlink()


def test_a_forked_child_leaves_the_page_alone(on: Page, folder: Path) -> None:
    """Stages, gauges and ends of threads in the child change nothing of the parent's page, which goes on; the child may
    open one of its own, even if a lock was held when it was made."""
    with as_role("drafter-0"), stages.FORWARD:
        before = bytes(on.words)
        stages._recorders_lock.acquire()  # as another thread might have it
        child = os.fork()
        if child == 0:
            failed = 1
            try:
                signal.alarm(int(PATIENCE_S))
                stages.LAYERS.__enter__()
                stages.set_gauge("step", 9)
                stages.next_batch(4)
                gc.collect()
                stages.close_run(on, folder)
                is_same = bytes(on.words) == before and not stages.is_on() and on.path.exists() and pages_in(folder)
                own = stages.open_run(folder)
                switch(own, True)
                with stages.LAYERS:
                    pass
                stages.close_run(own, folder)
                failed = not is_same or own.path.exists() or own.snapshot().total("layers").count != 1
            finally:
                os._exit(failed)
        stages._recorders_lock.release()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert bytes(on.words) == before
    assert mine(on, "drafter-0").stages["forward"].count == 1 and mine(on, "drafter-0").is_live


def test_without_room_profiling_is_off_with_one_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the page cannot be made there is none, one line says why, and stages do nothing."""

    def refuse(*_args: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "symlink", refuse)
    assert stages.open_run(folder) is None
    stages.close_run(None, folder)
    with stages.FORWARD:
        pass
    (record,) = caplog.records
    assert record.getMessage().startswith("profiling is off: ") and "Read-only file system" in record.getMessage()
    monkeypatch.undo()
    (folder.parent / "file").write_text("")
    assert stages.open_run(folder.parent / "file") is None and len(caplog.records) == 2


def test_measuring_the_cost_leaves_no_trace(page: Page) -> None:
    """A fresh page is off, knows what a stage costs on and off, and has nothing of the measurement in it."""
    found = page.snapshot()
    assert 0 < found.cost_off_ns and 0 < found.cost_on_ns and found.control == Control() and found.num_lost == 0
    assert [thread.thread for thread in found.threads] == ["ended threads"]
    assert not any(page.words[layout._BLOCKS + layout.BLOCK_WORDS :])


def test_a_queue_counts_only_the_time_that_it_blocks(on: Page, clock: Clock) -> None:
    """Puts and gets that need not wait are no stage; one that must is one, with the time until the other side came."""
    timed: TimedQueue = TimedQueue(queue.Queue(1))
    timed.put("a")
    assert timed.get() == "a"
    assert on.snapshot().total("put_wait").count == on.snapshot().total("get_wait").count == 0

    def after_waiting(stage: Stage, act: Callable[[], Any]) -> threading.Thread:
        """Act once another thread is seen to wait, five seconds later by the clock."""

        def work() -> None:
            deadline = time.perf_counter() + PATIENCE_S
            while not any(t.inner and t.inner.stage == stage.name for t in on.snapshot().threads):
                assert time.perf_counter() < deadline
            clock.pass_s(5)
            act()

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    other = after_waiting(stages.GET_WAIT, lambda: timed.put("b"))
    assert timed.get(timeout=PATIENCE_S) == "b"
    other.join()
    timed.put("c")
    other = after_waiting(stages.PUT_WAIT, timed.get)
    timed.put("d", timeout=PATIENCE_S)
    other.join()
    assert timed.get() == "d"
    with pytest.raises(queue.Empty):
        timed.get(timeout=0.001)
    timed.put("e")
    with pytest.raises(queue.Full):
        timed.put("f", timeout=0.001)
    found = mine(on).stages
    assert (found["get_wait"].count, found["get_wait"].total_ns, found["get_wait"].errors) == (2, 5 * 10**9, 0)
    assert (found["put_wait"].count, found["put_wait"].total_ns, found["put_wait"].errors) == (2, 5 * 10**9, 0)


def test_only_every_kth_batch_is_counted(on: Page) -> None:
    """With sampling on, all stages of one batch in k count and none of the others; the page still shows every batch."""
    on.words[layout.SAMPLE_EVERY] = 4
    for number in range(41):
        stages.next_batch(number)
        with stages.FORWARD, stages.LAYERS:
            assert mine(on).batch == number
    found = mine(on)
    wanted = sum(stages.is_sampled(number, 4) for number in range(1, 42))
    assert 10 <= wanted <= 11
    assert (found.stages["forward"].count, found.stages["layers"].count, found.num_batches) == (wanted, wanted, 41)


@pytest.mark.parametrize("every", [2, 3, 4, 8, 16, 37])
def test_sampled_batches_are_spread_over_the_places_of_a_step(every: int) -> None:
    """One in k, whatever k has in common with the micro-batches of a step: each place in a step gets its share."""
    assert sum(stages.is_sampled(n, every) for n in range(4800)) == pytest.approx(4800 / every, rel=0.02)
    for batches_per_step in (2, 4, 8, 16):
        places = [sum(stages.is_sampled(n, every) for n in range(p, 4800, batches_per_step)) for p in range(2)]
        assert all(count == pytest.approx(4800 / batches_per_step / every, rel=0.4) for count in places)


def test_a_decorated_function_is_a_stage(clock: Clock, on: Page) -> None:
    """Every call is a run, under the function's own name and with its result."""

    @stages.OPTIMIZER
    def apply(x: int) -> int:
        """Adds."""
        clock.pass_s(2)
        return x + 1

    assert apply(3) == 4 and apply.__name__ == "apply" and apply.__doc__ == "Adds."
    assert mine(on).stages["optimizer"].total_ns == 2 * 10**9


def test_names_of_stages_are_taken_once() -> None:
    """A second stage of one name would write into the same rows of every table, and is refused."""
    with pytest.raises(ValueError, match="there is a stage forward already"):
        Stage("forward")
    assert stages._NAMES[stages.LOG.number] == "log" and len(stages._NAMES) <= layout.MAX_STAGES
    every = {*stages.TARGET_STAGES, *stages.DRAFTER_STAGES, *stages.WRITER_STAGES, *stages.LANE_STAGES}
    assert every == set(stages._NAMES)


def test_the_system_shows_threads_by_name(page: Page) -> None:
    """`top -H` shows 15 bytes of the name while it is given, and what stood there before afterwards."""

    def comm() -> str:
        return Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()

    before = comm()
    with stages.named_thread("target-0"):
        with stages.named_thread("a name of more-than 15 bytes"):
            assert comm() == "a name of more-"
        assert comm() == "target-0"
    assert comm() == before
    with pytest.raises(KeyError), stages.named_thread("x"):
        raise KeyError
    assert comm() == before


class FakeEvent:
    """A CUDA event on a device that works off its stream one piece after another; times in nanoseconds."""

    done_at = 0
    clock: Clock

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at: int | None = None

    def record(self) -> None:
        self.at = max(FakeEvent.done_at, FakeEvent.clock.now)

    def query(self) -> bool:
        return self.at is not None and self.at <= FakeEvent.clock.now

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query() and other.query(), "an event that has not come must not be asked"
        return (other.at - self.at) / 1e6


@pytest.fixture
def device(clock: Clock, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """A page that times every batch on a device that does not exist."""
    FakeEvent.clock, FakeEvent.done_at = clock, clock.now
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(stages, "DEVICE_EVERY", 1)
    page = stages.open_run(folder, times_device=True)
    switch(page, True)
    yield page
    stages.close_run(page, folder)


def launch(clock: Clock, host_s: float, device_s: float) -> None:
    """Launching takes the host so long, and what is launched takes the device so long, behind what is under way."""
    FakeEvent.done_at = max(FakeEvent.done_at, clock.now) + round(1e9 * device_s)
    clock.pass_s(host_s)


def test_time_on_the_device_goes_to_the_role_that_launched(clock: Clock, device: Page) -> None:
    """Two roles that take turns in one thread each get the device's time of their own stages, in their own block."""
    for number in range(3):
        with as_role("target-0"):
            stages.next_batch(number)
            with stages.MODEL_FORWARD:
                launch(clock, 0.001, 0.5)
        with as_role("drafter-0"):
            stages.next_batch(number)
            with stages.FORWARD:
                launch(clock, 0.001, 0.25)
        clock.pass_s(2)
    for role in ("target-0", "drafter-0"):
        with as_role(role):
            stages.next_batch(3)
    target, drafter = mine(device, "target-0").stages, mine(device, "drafter-0").stages
    assert (target["model_forward"].device_count, target["forward"].device_count) == (3, 0)
    assert (drafter["model_forward"].device_count, drafter["forward"].device_count) == (0, 3)
    assert target["model_forward"].total_ns == 3 * 10**6  # the host's share of it
    assert drafter["forward"].device_ns >= 3 * 250 * 10**6 - 10


@pytest.mark.parametrize(("host_s", "device_s"), [(0.010, 0.004), (0.001, 0.100)])
def test_the_lag_tells_who_waits_for_whom(clock: Clock, device: Page, host_s: float, device_s: float) -> None:
    """Where launching takes longer the device is found without work, and otherwise the lag is how far it is behind."""
    for number in range(5):
        stages.next_batch(number)
        anchor = FakeEvent(enable_timing=True)
        anchor.record()
        clock.now = max(clock.now, anchor.at)
        stages.synchronised(anchor)
        for _ in range(4):
            with stages.FORWARD:
                launch(clock, host_s, device_s)
        clock.now = max(clock.now, FakeEvent.done_at)
    stages.next_batch(5)
    stats = mine(device).stages["forward"]
    assert stats.device_count == stats.lag_count == 20
    if host_s > device_s:
        assert stats.drained == 20 and stats.lag_ns == 0
    else:
        behind = [(i + 1) * (device_s - host_s) for i in range(4)]
        assert stats.drained == 0 and stats.lag_ns == pytest.approx(5e9 * sum(behind), abs=100)


def test_a_clock_that_is_not_set_yet_is_not_read(clock: Clock, device: Page) -> None:
    """Work that no stage knows of may keep the device busy where it seemed idle: then the lag stays unknown, and nobody
    waits for it."""
    stages.next_batch(0)
    with stages.FORWARD:
        launch(clock, 0.002, 0.001)
    launch(clock, 0.001, 1000.0)
    with stages.LAYERS:
        launch(clock, 0.001, 0.001)
    stages.next_batch(1)
    stats = mine(device).stages["forward"]
    assert (stats.device_count, stats.device_ns, stats.lag_count) == (1, 2 * 10**6, 0)
    assert mine(device).stages["layers"].device_count == 0


def test_what_is_being_recorded_for_a_graph_is_not_timed(
    clock: Clock, device: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No event is touched during a capture; and no more pairs are kept than there is room for, however long the
    device takes."""
    stages.next_batch(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with stages.FORWARD:
        launch(clock, 0.001, 1.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(100):
        with stages.LAYERS:
            launch(clock, 0.001, 1.0)
    stages.next_batch(1)
    assert mine(device).stages["layers"].device_count == 0  # none has come yet, and nobody waited
    clock.pass_s(1000)
    stages.next_batch(2)
    assert mine(device).stages["layers"].device_count == 64 and mine(device).stages["forward"].device_count == 0
