"""Figures by name from a report's parts, and a saved report judged again."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.profiling import observations as observe
from paceline.profiling.evidence import (
    Figure,
    Frame,
    Gil,
    Gpu,
    Holder,
    Host,
    Level,
    Process,
    Queue,
    Report,
    Stack,
    Thread,
)
from paceline.profiling.judgement import figures_of, judged


def figure(value: float, level: str = "1", samples: int | None = 12) -> Figure:
    return Figure(value=value, interval=(max(0.0, value - 0.02), min(1.0, value + 0.02)), level=level, samples=samples)  # type: ignore[arg-type]


def stacks(level: str, *parts: tuple[str, str, int]) -> tuple[Stack, ...]:
    """Category, rule and count of the critical thread's samples."""
    return tuple(
        Stack(level=level, pid=7, tid=7, frames=(Frame(name=rule),), count=count, category=category, rule=rule)  # type: ignore[arg-type]
        for category, rule, count in parts
    )


def stage(count: int = 50, total_ms: float = 500.0, **others: Any) -> dict[str, Any]:
    return {"count": count, "total_ms": total_ms, "avg_ms": total_ms / count, **others}


def report(**changes: Any) -> Report:
    """A colocated run of ours on a GPU whose launches cannot keep up."""
    base: dict[str, Any] = {
        "taken_at": 1.8e9,
        "seconds": 10.0,
        "pid": 7,
        "processes": (Process(pid=7, parent=1, started=5, command="python train", python="3.12", cuda=True),),
        "host": Host(cores=16, cpus=16.0, load=1.6),
        "levels": tuple(Level(id=id, name=id, ok=True, samples=100) for id in ("0", "1", "2", "3", "4", "5")),  # type: ignore[arg-type]
        "threads": (
            Thread(pid=7, tid=7, name="MainThread", role="drafter-0+target-0", is_main=True,
                   cpu=figure(0.78), runqueue=figure(0.0)),
            Thread(pid=7, tid=9, name="pt_autograd_0", comm="pt_autograd_0", cpu=figure(0.2), runqueue=figure(0.3)),
        ),
        "gils": (Gil(pid=7, share=0.3, interval=(0.27, 0.33), samples=1000,
                     holders=(Holder(tid=7, name="MainThread", share=0.28, interval=(0.25, 0.31)),)),),
        "stacks": stacks("4", ("launch", "launch.kernel", 30), ("dispatch", "dispatch.operator", 60),
                         ("autograd", "autograd.wait_queue", 40), ("python", "python.frame", 10)),
        "stages": ({"role": "drafter-0", "pid": 7, "wall_s": 10.0, "interval_s": 10.0,
                    "batches": 50,
                    "stages": {"forward": stage(device_count=8, device_avg_ms=110.0, lag_count=8, lag_avg_ms=0.002,
                                                drained_frac=1.0),
                               "layers": stage(device_count=8, device_avg_ms=9.0)}},),
        "gpus": (Gpu(index=0, name="H200", is_ours=True, utilisation=figure(0.2, "5")),),
        "pipeline": {"kind": "in turn", "line": "in turn: ...", "gain": {"value": 1.6, "low": 1.5, "high": 1.7}},
        "critical": (7,),
    }  # fmt: skip
    return Report.model_validate({"schema": "paceline.attach/1", **base, **changes})


def test_launch_bound_run_is_judged() -> None:
    """From the parts of a report to its verdict, and the same a second time from the saved file."""
    once = judged(report(), ["gil"])
    assert once.conclusion.cause == "launch-overhead"
    assert once.conclusion.line.startswith("in turn: ...; cause in drafter-0+target-0: launch overhead")
    assert once.hypotheses[0].id == "gil" and once.hypotheses[0].outcome == "refuted"
    again = judged(Report.model_validate_json(once.model_dump_json(by_alias=True)))
    assert again == once


def test_backward_runs_in_another_thread() -> None:
    """The caller's wait for autograd's thread is no launching, nor idleness: its thread's CPU time counts."""
    figures = figures_of(report())
    assert figures["critical.backward_wait"].value == pytest.approx(40 / 140)
    assert figures["critical.launching"].value == pytest.approx(90 / 100)
    assert figures["critical.cpu"].value == pytest.approx(0.98)
    assert figures["critical.runqueue"].value == 0.0


def test_the_gil_is_split_by_holder() -> None:
    """What the critical thread holds itself keeps it from nothing."""
    figures = figures_of(report())
    assert figures["critical.gil"].value == pytest.approx(0.28)
    assert figures["gil.held_by_others"].value == pytest.approx(0.02)
    assert figures["critical.native_cpu"].value == pytest.approx(0.98 - 0.28)


def test_stages_that_ran_dry_do_not_say_how_busy_the_gpu_is() -> None:
    """Their time on the GPU holds gaps, so that the driver's smaller figure stands; without gaps theirs does."""
    figures = figures_of(report())
    assert figures["gpu.busy"].value == pytest.approx(0.2)
    full = stage(device_count=8, device_avg_ms=11.0, lag_count=8, lag_avg_ms=30.0, drained_frac=0.0)
    stages = {"forward": full, "layers": full}
    records = ({"role": "drafter-0", "wall_s": 1.0, "interval_s": 1.0, "batches": 50, "stages": stages},)
    assert figures_of(report(stages=records))["gpu.busy"].value == pytest.approx(0.55)


def test_stages_of_one_batch_are_one_sample() -> None:
    """They run dry together: seven batches with nothing dry leave room for a third of them."""
    busy = {"device_count": 7, "device_avg_ms": 10.0, "lag_count": 7, "lag_avg_ms": 50.0, "drained_frac": 0.0}
    names = ("h2d_sync", "forward", "backward", "optimizer", "layers")
    records = ({"role": "drafter-0", "wall_s": 1.0, "interval_s": 1.0, "batches": 50,
                "stages": {name: stage(**busy) for name in names}},)  # fmt: skip
    drained = figures_of(report(stages=records))["drained"]
    assert drained.samples == 7 and drained.value == 0.0 and 0.3 < drained.high < 0.4


def test_both_roles_of_a_thread_are_looked_at() -> None:
    """A target that keeps the GPU busy does not hide a drafter behind which it runs dry."""
    busy = stage(device_count=10, device_avg_ms=10.0, lag_count=10, lag_avg_ms=50.0, drained_frac=0.0)
    dry = stage(device_count=10, device_avg_ms=10.0, lag_count=10, lag_avg_ms=0.0, drained_frac=1.0)
    records = tuple(
        {"role": role, "pid": 7, "tid": 7, "wall_s": 10.0, "interval_s": 10.0, "batches": 50, "stages": {name: what}}
        for role, name, what in (("target-0", "model_forward", busy), ("drafter-0", "forward", dry))
    )
    figures = figures_of(report(stages=records))
    assert figures["drained"].value == pytest.approx(0.5)
    assert figures["stage.forward"].value == pytest.approx(0.05)  # of the thread's time, which both share


def test_a_probe_from_inside_knows_no_holders() -> None:
    """How much of the time the lock is held is known, and not that others hold it."""
    gil = Gil(pid=7, share=0.9, interval=(0.85, 0.94), level="6", samples=300)
    found = judged(report(gils=(), gil=gil))
    assert found.observations["gil.share"].value == 0.9
    assert "gil.held_by_others" not in found.observations
    assert next(each for each in found.hypotheses if each.id == "gil").outcome != "supported"


def test_a_thread_that_never_waits_is_no_victim_of_the_lock() -> None:
    """A matrix product beside a thread that holds the interpreter for most of the time."""
    gil = Gil(pid=7, share=0.85, interval=(0.82, 0.88), samples=1000,
              holders=(Holder(tid=8, name="hog", share=0.82, interval=(0.79, 0.85)),))  # fmt: skip
    thread = Thread(pid=7, tid=7, name="matmul", is_main=True, cpu=figure(0.99))
    found = judged(report(threads=(thread,), gils=(gil,), stacks=(), stages=()))
    assert next(each for each in found.hypotheses if each.id == "gil").outcome != "supported"
    assert found.conclusion.cause == "cpu-compute" or found.conclusion.cause == ""


def test_stacks_without_symbols_refute_nothing() -> None:
    """Of a level that is mostly unmatched nothing can be said against a cause."""
    found = judged(report(stacks=stacks("4", ("other", "", 94), ("launch", "launch.kernel", 6))))
    against = {each.key for h in found.hypotheses for each in h.evidence if each.effect == "refutes"}
    native = {key for key in against if key.startswith("critical.") and found.observations[key].level == "4"}
    assert native == set()


def test_python_stacks_say_nothing_about_native_code() -> None:
    """Level 3 alone leaves launches and waits for the GPU unknown, and says what it can see."""
    levels = tuple(Level(id=id, name=id, ok=True) for id in ("1", "3"))  # type: ignore[arg-type]
    seen = stacks("3", ("queue_wait", "queue.thread", 12), ("other", "unknown.asleep", 8))
    figures = figures_of(report(levels=levels, stacks=seen))
    assert "critical.launching" not in figures and "critical.sync" not in figures
    assert figures["critical.queue_wait"].value == pytest.approx(0.6)
    assert figures["critical.queue_wait"].rules == ("queue.thread",)


def test_a_disturbed_level_is_not_judged_by() -> None:
    """Native stacks over their budget stay in the report and out of the verdict."""
    levels = tuple(Level(id=id, name=id, ok=True, in_verdict=id != "4") for id in ("0", "1", "2", "4"))  # type: ignore[arg-type]
    found = judged(report(levels=levels))
    assert "critical.launching" not in found.observations
    assert found.conclusion.cause == "" and "--allow-pause" in found.conclusion.next


def test_copies_that_should_return_at_once() -> None:
    """A thread that is mostly in asynchronous copies copies from pageable memory."""
    seen = stacks("4", ("async_copy", "copy.async", 90), ("dispatch", "dispatch.operator", 10))
    assert judged(report(stacks=seen)).conclusion.cause == "host-copy"


def test_gain_ends_where_the_other_side_is_the_slower_one() -> None:
    """What a thread would save by not sleeping is more than the other side could take."""
    seen = stacks("4", ("sleep", "sleep.native", 90), ("python", "python.frame", 10))
    side = {"kind": "producer-bound", "line": "", "gain": {"value": 2.0, "low": 1.9, "high": 2.1}}
    thread = Thread(pid=7, tid=7, name="target-0", role="target-0", is_main=True, cpu=figure(0.05))
    found = judged(report(threads=(thread,), stacks=seen, pipeline=side, gpus=(), stages=()))
    sleep = next(each for each in found.hypotheses if each.id == "sleep")
    assert sleep.outcome == "supported"
    assert sleep.gain is not None and sleep.gain.value == pytest.approx(2.0)


def test_a_stopped_process_has_no_cause() -> None:
    """What it stood at costs it no time; the verdict says how to let it go on."""
    thread = Thread(pid=7, tid=7, name="MainThread", is_main=True, cpu=figure(0.0), states={"T": 1.0})
    found = judged(report(threads=(thread,)))
    assert found.conclusion.cause == "" and "kill -CONT 7" in found.conclusion.next
    assert {each.outcome for each in found.hypotheses} == {"undecided"}


def test_ranks_that_wait_differently_are_told() -> None:
    """A rank that hardly waits in collectives is what the others wait for; a process without any is no rank."""
    both = [
        Stack(level="4", pid=pid, tid=pid, frames=(Frame(name="x"),), count=count, category=category)  # type: ignore[arg-type]
        for pid, category, count in ((1, "collective", 81), (1, "launch", 19), (2, "launch", 99), (2, "collective", 1))
    ]
    found = observe.of_ranks(both, {1: {(1, 1)}, 2: {(2, 2)}}, "4")
    assert found["collective.spread"].value == pytest.approx(0.8)
    assert found["collective.spread"].low > 0.2
    assert observe.of_ranks(both[:-1], {1: {(1, 1)}, 2: {(2, 2)}}, "4") == {}


def test_counters_of_the_allocator_are_driver_calls() -> None:
    """Memory taken from and given back to the driver, a second."""
    counters = {name: Figure.read(value, "6", "per_s") for name, value in
                (("num_device_alloc", 3.0), ("num_device_free", 2.0), ("num_alloc_retries", 1.0))}  # fmt: skip
    found = observe.of_allocator(counters)
    assert found["allocator.device_calls"].value == 5.0 and found["allocator.retries"].value == 1.0
    assert observe.of_allocator({}) == {}


def test_a_queue_of_ours_gives_both_waits() -> None:
    """Shares of the drafter and of the average target."""
    queue = Queue(
        depth=4, targets=1, waiting=0.5, get_wait=figure(0.2, "0"), put_wait=figure(0.0, "0"), batches_per_s=3
    )
    found = figures_of(report(queue=queue))
    assert found["queue.get_wait"].value == 0.2 and found["queue.put_wait"].value == 0.0


def test_gpus_of_others_do_not_count() -> None:
    """Where the driver says whose a GPU is, only those of the process do."""
    gpus = (Gpu(index=0, name="a", is_ours=False, utilisation=figure(0.9, "5")),
            Gpu(index=1, name="b", is_ours=True, utilisation=figure(0.4, "5"), limits={"sw_power_cap": 0.75},
                sm_clock_mhz=Figure.read(1500.0, "5", "MHz"), max_sm_clock_mhz=2000.0,
                pcie_rx_gb_s=Figure.read(16.0, "5", "GB/s"), pcie_limit_gb_s=64.0))  # fmt: skip
    found = observe.of_gpus(gpus)
    assert found["gpu.utilisation"].value == 0.4
    assert found["gpu.limited"].value == 0.75
    assert found["gpu.clock"].value == 0.75
    assert found["gpu.pcie"].value == 0.25


def test_what_python_stacks_cannot_tell_apart_refutes_nothing() -> None:
    """A convoy at a lock looks like any native call there: a lock is not ruled out, and pausing would tell."""
    levels = tuple(Level(id=id, name=id, ok=True) for id in ("1", "3"))  # type: ignore[arg-type]
    thread = Thread(pid=7, tid=7, name="worker", is_main=True, cpu=figure(0.3))
    found = judged(report(levels=levels, threads=(thread,), stacks=stacks("3", ("other", "unknown.asleep", 200))))
    lock = next(each for each in found.hypotheses if each.id == "lock")
    assert found.observations["critical.lock"].high > 0.9
    assert lock.outcome == "undecided" and "--allow-pause" in lock.next


def test_where_every_thread_waits_nobody_is_accused() -> None:
    """There is no cause, and the user is told how to judge a thread all the same."""
    found = judged(report(critical=()))
    assert found.conclusion.cause == "" and "--thread" in found.conclusion.next
