"""Looks at running processes for the tests of their page and their terminal view."""

from __future__ import annotations

import math
from typing import Any

from paceline.profiling import evidence
from paceline.profiling.evidence import Evidence, Figure, Frame, Level, Stack, Thread

PID = 4711
TARGETS, DRAFTER = (4720, 4721), 4722


def share(value: float, half: float = 0.0, level: evidence.LevelId = "1", **more: Any) -> Figure:
    """A share of time."""
    return Figure(value=value, interval=(max(0.0, value - half), min(1.0, value + half)), level=level, **more)


def as_json(report: evidence.Report) -> dict[str, Any]:
    """What the page is made from."""
    return report.model_dump(mode="json", by_alias=True)


def pipeline_report(**changes: Any) -> dict[str, Any]:
    """A run of ours on one H200: the targets are the slower side, by launch overhead; the user asked for the GIL."""
    parts: dict[str, Any] = {
        "taken_at": 1_790_000_000.0,
        "seconds": 8.0,
        "pid": PID,
        "versions": {"paceline": "0.7.0", "py-spy": "0.4.3", "torch": "2.11.0+cu130", "python": "3.11.7"},
        "processes": _processes(),
        "run": {"folder": "runs/drafter", "config_hash": "3f9a1c", "tokens_per_batch": 16384},
        "host": evidence.Host(
            cpu_model="Intel Xeon Platinum 8480+",
            cores=192,
            cpus=16.0,
            load=9.4,
            kernel="Linux 6.8.0",
            throttled=share(0),
        ),
        "levels": _levels(),
        "threads": _threads(),
        "gil": _gil(),
        "gils": (_gil(),),
        "stacks": _stacks(),
        "sorted": _sorted(),
        "stages": _stages(),
        "queue": evidence.Queue(
            depth=20,
            targets=2,
            waiting=4.8,
            get_wait=share(0.16, 0.028, "0"),
            put_wait=share(0.004, 0.003, "0"),
            batches_per_s=8.13,
            history=tuple((i / 10, round(4.8 + 3 * math.sin(i / 7))) for i in range(80)),
        ),
        "pipeline": _pipeline(),
        "allocator": {
            "num_alloc_retries": Figure.read(0, "6", "per_s"),
            "num_device_alloc": Figure.read(0.125, "6", "per_s"),
            "allocated": Figure.read(71.3 * 2**30, "6", "bytes"),
        },
        "gpus": (_gpu(),),
        "critical": TARGETS,
        "observations": {"gil.share": share(0.08, 0.02, "2", samples=799), "launch.share": share(0.71, 0.04, "3")},
        "hypotheses": _hypotheses(),
        "conclusion": _conclusion(),
        "tokens_per_s": Figure(value=133_200, interval=(131_800, 134_600), unit="per_s", level="0"),
        "steps_per_s": Figure(value=1.016, interval=(1.005, 1.027), unit="per_s", level="0"),
        "notes": ("One batch in 8 was timed on the device: event pairs cost 23 us each on this host.",),
    }
    return as_json(evidence.Report(**{**parts, **changes}))


def foreign_report(**changes: Any) -> dict[str, Any]:
    """A plain process of somebody else: no stages, no queue, no side, and nothing decided."""
    threads = [Thread(pid=99, tid=99, name="MainThread", is_main=True, cpu=share(0.62), runqueue=share(0.21))]
    threads += [Thread(pid=99, tid=100 + i, name="worker", cpu=share(0.0), syscall="futex") for i in range(3)]
    parts: dict[str, Any] = {
        "taken_at": 1_790_000_000.0,
        "seconds": 5.0,
        "pid": 99,
        "processes": (evidence.Process(pid=99, parent=1, started=5, command="python serve.py", python="3.12"),),
        "levels": (
            Level(id="1", name=evidence.LEVEL_NAMES["1"], ok=True, seconds=5.0, samples=50),
            Level(
                id="2",
                name=evidence.LEVEL_NAMES["2"],
                ok=False,
                reason="this user may not trace process 99 (ptrace_scope is 1)",
                fix="run it as root, or with --cap-add SYS_PTRACE",
                costs="the GIL's share and who holds it",
            ),
        ),
        "threads": tuple(threads),
        "hypotheses": (
            evidence.Hypothesis(
                id="cpu_starvation",
                title="Too few CPUs",
                outcome="undecided",
                score=0.8,
                evidence=(
                    Evidence(
                        key="runqueue",
                        says="MainThread is ready without a CPU 21 % of the time",
                        wanted="> 0.1",
                        effect="supports",
                        points=0.8,
                        figure=share(0.21),
                    ),
                ),
                next="look again for longer",
                next_s=20,
            ),
        ),
        "conclusion": evidence.Conclusion(
            line="undecided: MainThread is busy 62 % of the time and waits for a CPU 21 %",
            next="the same look with the right to trace",
            next_s=8,
        ),
    }
    return as_json(evidence.Report(**{**parts, **changes}))


def python_frames(*names: str, file: str = "target.py") -> tuple[Frame, ...]:
    """Calls from a thread's first one on."""
    begin = [Frame(name=name, file="threading.py", line=1000 + i) for i, name in enumerate(("_bootstrap", "run"))]
    return (*begin, Frame(name="serve", file="target.py", line=88), *(Frame(name=n, file=file, line=7) for n in names))


def native(*names: str) -> tuple[Frame, ...]:
    """Calls of a library."""
    return tuple(Frame(name=name, file="libtorch_cuda.so", is_native=True) for name in names)


def _processes() -> tuple[evidence.Process, ...]:
    return (
        evidence.Process(
            pid=PID, parent=1, started=1, command="python -m paceline train run.yaml --hub-token ***", python="3.11"
        ),
        evidence.Process(pid=4790, parent=PID, started=2, command="python -c resource_tracker", python="3.11"),
        evidence.Process(pid=4791, parent=PID, started=3, command="ptxas --gpu-name sm_90a", python=None, end="exited"),
    )


def _levels() -> tuple[Level, ...]:
    names, no_stop = evidence.LEVEL_NAMES, evidence.Disturbance(stop_frac=0.0, tool_cpu_s=0.11)
    return (
        Level(id="0", name=names["0"], ok=True, seconds=8.0),
        Level(id="1", name=names["1"], ok=True, seconds=8.0, samples=80, disturbance=no_stop),
        Level(id="2", name=names["2"], ok=True, seconds=8.0, samples=799, errors=1, disturbance=no_stop),
        Level(id="3", name=names["3"], ok=True, seconds=8.0, samples=412, disturbance=no_stop),
        Level(
            id="4",
            name=names["4"],
            ok=True,
            in_verdict=False,
            reason="it stopped the process 5.2 % of its window, over the budget of 3 %",
            fix="give it a longer window (--native-seconds 20), in which reading symbols weighs less",
            costs="what the targets do inside of CUDA and torch",
            seconds=5.0,
            samples=240,
            errors=3,
            disturbance=evidence.Disturbance(
                predicted_stop_frac=0.026, stop_frac=0.052, longest_stop_s=0.21, tool_cpu_s=1.9
            ),
        ),
        Level(
            id="5",
            name=names["5"],
            ok=False,
            reason="the library of NVIDIA's driver was not found",
            fix="pip install nvidia-ml-py",
            costs="clocks, power and PCIe of the GPU, so nothing is said on caps and copies",
        ),
    )


def _threads() -> tuple[Thread, ...]:
    busy = {
        "launch": share(0.41, 0.05, "3", rules=("launch.cuda",), samples=206),
        "dispatch": share(0.30, 0.045, "3", rules=("dispatch.ops",), samples=206),
        "python": share(0.17, 0.04, "3", samples=206),
        "gil_wait": share(0.07, 0.025, "3", samples=206),
        "queue_wait": share(0.01, 0.01, "3", samples=206),
    }
    waits = {
        "queue_wait": share(0.16, 0.04, "3"),
        "launch_queue_full": share(0.5, 0.05, "3"),
        "autograd": share(0.3, 0.05, "3"),
    }
    idle = [
        Thread(pid=PID, tid=4800 + i, name="OpenMP", comm="python", cpu=share(0.0), syscall="futex") for i in range(22)
    ]
    return (
        Thread(
            pid=PID,
            tid=PID,
            name="MainThread",
            comm="python",
            is_main=True,
            cpu=share(0.02),
            syscall="futex",
            gil=share(0.004),
        ),
        *(
            Thread(
                pid=PID,
                tid=tid,
                name=f"target-{i}",
                comm=f"target-{i}",
                role=f"target-{i}",
                cpu=share(0.97 - i / 50),
                runqueue=share(0.01 + i / 50),
                states={"R": 0.97, "S": 0.02, "t": 0.01},
                voluntary=31.0,
                involuntary=4.2,
                gil=share(0.03, 0.012, "2"),
                categories=busy,
            )
            for i, tid in enumerate(TARGETS)
        ),
        Thread(
            pid=PID,
            tid=DRAFTER,
            name="drafter-step",
            comm="drafter-step",
            role="drafter-0",
            cpu=share(0.83),
            runqueue=share(0.002),
            gil=share(0.02, 0.01, "2"),
            categories=waits,
        ),
        Thread(pid=PID, tid=4730, name="pt_autograd_0", cpu=share(0.31), runqueue=share(0.004)),
        *idle,
        Thread(pid=4790, tid=4790, name="MainThread", is_main=True, cpu=share(0.0), syscall="read"),
    )


def _gil() -> evidence.Gil:
    return evidence.Gil(
        pid=PID,
        share=0.08,
        interval=(0.063, 0.101),
        samples=799,
        errors=1,
        cpu_share=0.077,
        runqueue_share=0.003,
        holders=(
            evidence.Holder(
                tid=TARGETS[0],
                name="target-0",
                share=0.03,
                interval=(0.02, 0.045),
                where=("forward (modeling_qwen3.py:412)", "_call_impl (module.py:1784)"),
            ),
            evidence.Holder(
                tid=DRAFTER, name="drafter-step", share=0.02, interval=(0.012, 0.033), where=("step (adamw.py:90)",)
            ),
        ),
    )


def _stacks() -> tuple[Stack, ...]:
    kernels = (
        "at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::BFloat16>>",
        "cudaLaunchKernel",
    )
    stacks = []
    for i, tid in enumerate(TARGETS):
        forward = python_frames("forward", "_call_impl", "attention", file="modeling_qwen3.py")
        for level, count in (("3", 10), ("4", 6)):
            leaf = native("at::_ops::mm::call", *kernels, "cuLaunchKernel") if level == "4" else ()
            kind = {"level": level, "pid": PID, "tid": tid}
            stacks += [
                Stack(**kind, frames=(*forward, *leaf), count=4 * count + i, category="launch", rule="launch.cuda"),
                Stack(
                    **kind,
                    frames=(*forward, Frame(name="linear", file="functional.py", line=3)),
                    count=3 * count,
                    category="dispatch",
                    rule="dispatch.ops",
                ),
                Stack(
                    **kind,
                    frames=python_frames("forward", "rotary", file="modeling_qwen3.py"),
                    count=2 * count,
                    category="python",
                ),
                Stack(
                    **kind,
                    frames=python_frames("put", "wait", file="channel.py"),
                    count=1,
                    category="queue_wait",
                    rule="queue",
                ),
                Stack(
                    **kind, frames=python_frames("forward", "item"), count=count, category="gil_wait", rule="gil.futex"
                ),
            ]
    step = python_frames("step", "backward", file="drafter.py")
    stacks += [
        Stack(
            level="4", pid=PID, tid=DRAFTER, frames=step, count=60, category="launch_queue_full", rule="launch.yield"
        ),
        Stack(level="4", pid=PID, tid=DRAFTER, frames=python_frames("get", "wait"), count=19, category="queue_wait"),
    ]
    return tuple(stacks)


def _sorted() -> tuple[evidence.Sorted, ...]:
    native_categories = {
        "launch": share(0.42, 0.06, "4", rules=("launch.cuda", "launch.graph")),
        "dispatch": share(0.29, 0.06, "4", rules=("dispatch.ops",)),
        "other": share(0.24, 0.05, "4"),
    }
    python_categories = {
        "launch": share(0.41, 0.05, "3", rules=("launch.cuda",)),
        "dispatch": share(0.30, 0.045, "3", rules=("dispatch.ops",)),
        "launch_queue_full": share(0.12, 0.03, "3", rules=("launch.yield",)),
        "python": share(0.11, 0.03, "3"),
    }
    return (
        evidence.Sorted(level="3", samples=412, categories=python_categories, unmatched=share(0.04, 0.02, "3")),
        evidence.Sorted(
            level="4", samples=240, categories=native_categories, unmatched=share(0.24, 0.05, "4"), is_weak=True
        ),
    )


def _stages() -> tuple[dict[str, Any], ...]:
    def stage(count: int, avg: float, **more: float) -> dict[str, float]:
        figures = {"avg_ms": avg, "max_ms": 2.1 * avg, "p50_ms": 0.97 * avg, "p90_ms": 1.2 * avg, "p99_ms": 1.8 * avg}
        return {"count": count, **figures, "total_ms": count * avg, "self_ms": 0.8 * count * avg, **more}

    return tuple(
        {
            "t": 1_790_000_008.0,
            "interval_s": 8.0,
            "role": role,
            "thread": thread,
            "tid": tid,
            "batches": 33,
            "wall_s": 8.0,
            "other_s": 0.21,
            "stages": stages,
        }
        for role, thread, tid, stages in (
            (
                "target-0",
                "target-0",
                TARGETS[0],
                {
                    "load_batch": stage(33, 1.2),
                    "target_prefill": stage(33, 229.0, device_avg_ms=71.2, lag_avg_ms=0.011, drained_frac=0.92),
                    "put": stage(33, 0.9),
                    "transfer": {"count": 0},
                },
            ),
            (
                "drafter-0",
                "drafter-step",
                DRAFTER,
                {"get": stage(65, 19.7), "forward": stage(65, 41.0, recompute_count=65), "optimizer": stage(8, 11.0)},
            ),
        )
    )


def _pipeline() -> dict[str, Any]:
    reason = "the drafter waits 16 % [13-19] of the time for features; with faster targets 1.19x [1.15-1.23]"
    return {
        "kind": "producer-bound",
        "gain": {"value": 1.19, "low": 1.15, "high": 1.23},
        "get_wait_frac": {"value": 0.16, "low": 0.132, "high": 0.188},
        "put_wait_frac": {"value": 0.004, "low": 0.001, "high": 0.007},
        "ready_frac": 0.0,
        "target_per_s": 8.16,
        "drafter_per_s": 9.68,
        "batches_per_s": 8.13,
        "queue": 4.8,
        "queue_depth": 20,
        "seconds": 8.0,
        "more_s": 0.0,
        "reason": reason,
        "line": f"producer-bound: {reason} (the targets could make 8.16 batches a second, the drafter take 9.68)",
    }


def _gpu() -> evidence.Gpu:
    return evidence.Gpu(
        index=0,
        name="NVIDIA H200",
        driver="580.95",
        is_ours=True,
        utilisation=share(0.71, 0.03, "5"),
        memory_used=88.2 * 2**30,
        memory_total=140.4 * 2**30,
        power_w=Figure(value=412, interval=(405, 419), unit="W", level="5"),
        power_limit_w=700,
        limits={"sw_power_cap": 0.02},
    )


def _hypotheses() -> tuple[evidence.Hypothesis, ...]:
    launch = (
        Evidence(
            key="launch_and_dispatch",
            says="launch and dispatch are 71 % [67-75] of 412 samples of the targets",
            wanted="> 50 %",
            effect="supports",
            points=2.0,
            figure=share(0.71, 0.04, "3", rules=("launch.cuda", "dispatch.ops"), samples=412),
        ),
        Evidence(
            key="drained",
            says="the GPU had run dry before 92 % of the prefills",
            wanted="> 70 %",
            effect="supports",
            points=1.5,
            figure=share(0.92, 0.03, "0"),
        ),
        Evidence(
            key="target_cpu",
            says="targets are on a CPU 96 %",
            wanted="> 85 %",
            effect="supports",
            points=0.5,
            figure=share(0.96),
        ),
        Evidence(
            key="sync",
            says="sync is 0 % of the samples",
            wanted="< 50 %",
            effect="neither",
            points=0.0,
            figure=share(0, 0.01, "3"),
        ),
        Evidence(
            key="sm_clock", says="no level 5, so no clocks", wanted="at its maximum", effect="missing", points=0.0
        ),
    )
    gil = (
        Evidence(
            key="gil.share",
            says="the GIL is held 8 % [6.3-10] of the time",
            wanted="> 70 %",
            effect="refutes",
            points=-2.5,
            figure=share(0.08, 0.02, "2", samples=799),
        ),
        Evidence(
            key="gil.waiters",
            says="the targets wait for it 7 % of the time",
            wanted="> 20 %",
            effect="refutes",
            points=-1.0,
            figure=share(0.07, 0.025, "3"),
        ),
    )
    rest = (
        ("gpu_bound", "The GPU is the limit", "sync is 0 % of the samples", "> 50 %"),
        ("cpu_starvation", "Too few CPUs", "targets are ready without a CPU 2 % of the time", "> 10 %"),
        ("allocator_churn", "Allocator churn", "no retries and one cudaMalloc in 8 s", "rising"),
    )
    refuted = (
        evidence.Hypothesis(
            id=id,
            title=title,
            outcome="refuted",
            score=-1.5,
            evidence=(Evidence(key=id, says=says, wanted=wanted, effect="refutes", points=-1.5),),
        )
        for id, title, says, wanted in rest
    )
    silent = (
        evidence.Hypothesis(id=id, title=title, outcome="undecided", score=0.0, next="level 5 (NVML)", next_s=8)
        for id, title in (("clock_cap", "Clocks are held back"), ("pcie", "Copies between host and GPU"))
    )
    return (
        *refuted,
        *silent,
        evidence.Hypothesis(
            id="gil_contention", title="GIL contention", outcome="refuted", score=-3.5, evidence=gil, asked=True
        ),
        evidence.Hypothesis(
            id="launch_overhead",
            title="Launch overhead",
            outcome="supported",
            score=4.0,
            evidence=launch,
            gain=Figure(value=1.19, interval=(1.15, 1.23), unit="ratio", level="0"),
        ),
    )


def _conclusion() -> evidence.Conclusion:
    return evidence.Conclusion(
        line="producer-bound (target side), gain if fixed 1.19x [1.15-1.23]; cause: launch overhead: launch and "
        "dispatch are 71 % of 412 samples, the GPU had run dry before 92 % of the prefills, GIL 8 % [6.3-10]; queue "
        "0.6 steps of 2.5",
        side="producer-bound",
        cause="launch_overhead",
        gain=Figure(value=1.19, interval=(1.15, 1.23), unit="ratio", level="0"),
    )
