"""Why the slower side is slow: hypotheses that each say beforehand what they predict and what would refute them.

Pure functions on figures by name (`observations`). A clue is one prediction: an observation, the threshold above which
it speaks for the hypothesis, and the one beyond which it speaks against it. A figure counts once its whole 95 %
interval is past a threshold; until then it says nothing, and a longer look or another level is named that would decide.

- *supported*: one of the clues marked `must` speaks for it, none marked `veto` against it, and the points are enough.
- *refuted*: a veto speaks against it and no `must` for it, or the points against it are enough.
- *undecided*: everything else, with the next measurement.

A cause may hide behind its own effects: a thread without a CPU also launches late, so that the GPU runs dry.
`Cause.explains` names such effects; of two supported causes the deeper one is the verdict's. And some hypotheses are no
faults but what sound programs are bound by (`Cause.is_state`): they are the verdict where no fault costs anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.profiling.evidence import AttachError, Conclusion, Evidence, Figure, Hypothesis
from paceline.profiling.verdict import UNTOLD

ENOUGH = 2.0
"""Points that support a hypothesis, or refute it."""

TIE = 0.5
"""Two supported causes whose points differ by less, and of which neither explains the other, are a tie."""

NARROW = 0.02
"""An interval of plus or minus this is decided by its middle: a share right on a threshold would never be."""

FELT = 1.03
"""A gain below this is no reason to call something the cause."""

MAX_GAIN = 100.0
"""Of a cause that takes all of the time."""

LONGEST_LOOK_S = 300.0

OFF_CPU = {"gil", "lock", "sleep", "input"}
"""Causes by which a thread is on no CPU."""

Figures = Mapping[str, Figure]


@dataclass(frozen=True)
class Clue:
    """A prediction of a hypothesis.

    Attributes:
        key: The observation.
        says: What it is, to be followed by its value.
        supports, refutes: Comparisons such as ``> 0.5``; empty: it cannot do that.
        points: What it is worth either way.
        must: One of the clues with this has to support the hypothesis.
        veto: If it refutes, the hypothesis is not supported.
    """

    key: str
    says: str
    supports: str = ""
    refutes: str = ""
    points: float = 1.0
    must: bool = False
    veto: bool = False


@dataclass(frozen=True)
class Cause:
    """A hypothesis before anything was seen.

    Attributes:
        words: What a user may call it by, in lower case; whole words are looked for.
        gain: Observations with the share of the critical thread's time that would go with the cause, best first.
        explains: Ids of causes that are its effects where both are supported.
        is_side: It is about a side of the pipeline, which the verdict names by itself.
        is_state: It is no fault: something is the limit in every program.
    """

    id: str
    title: str
    clues: tuple[Clue, ...]
    words: tuple[str, ...]
    gain: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()
    is_side: bool = False
    is_state: bool = False


_ON_GPU = Clue("process.cuda", "the process uses a GPU", refutes="< 0.5", points=2, veto=True)
_UTILISATION = "a kernel ran on the GPU"
_DRAINED = "stages that ended with nothing queued on the GPU"

CAUSES: tuple[Cause, ...] = (
    Cause(
        "launch-overhead",
        "launch overhead: the CPU cannot launch kernels as fast as the GPU runs them",
        (
            Clue("critical.launching", "launches and dispatch", "> 0.5", "< 0.2", 2, must=True, veto=True),
            Clue("drained", _DRAINED, "> 0.7", "< 0.1", 1.5, veto=True),
            Clue("critical.launch_queue_full", "waits for room in the launch queue", "", "> 0.3", 2, veto=True),
            Clue("critical.sync", "waits for the GPU", "", "> 0.5", 1.5, veto=True),
            Clue("critical.cpu", "the thread is on a CPU", "> 0.85", "< 0.5", 0.5),
            Clue("gil.held_by_others", "other threads hold the GIL", "< 0.2", "> 0.5", 0.5),
            Clue("gpu.utilisation", _UTILISATION, "< 0.9", "> 0.97", 0.5),
            _ON_GPU,
        ),
        ("launch", "launches", "launching", "dispatch", "overhead", "cpu-bound"),
        is_state=True,
    ),
    Cause(
        "gil",
        "GIL contention: other threads keep the interpreter from the one that matters",
        (
            Clue("gil.held_by_others", "other threads hold the GIL", "> 0.2", "< 0.1", 1.5, must=True, veto=True),
            Clue("critical.gil_wait", "the thread waits for the GIL", "> 0.08", "< 0.04", 2, must=True, veto=True),
            Clue("gil.share", "somebody holds the GIL", "> 0.7", "< 0.2", 1, veto=True),
            Clue("critical.blocked", "the thread waits for something else", "", "> 0.5", 2, veto=True),
            Clue("critical.cpu", "the thread is on a CPU", "", "> 0.92", 1, veto=True),
            # without native stacks, this tells it from waits for the GPU
            Clue("drained", _DRAINED, "> 0.7", "< 0.1", 0.5),
        ),
        ("gil", "interpreter"),
        gain=("critical.gil_wait", "gil.held_by_others"),
        explains=("launch-overhead", "lock", "python", "explicit-sync"),
    ),
    Cause(
        "gpu-bound",
        "GPU-bound: the GPU always has work, the CPU waits for it",
        (
            Clue("drained", _DRAINED, "< 0.4", "> 0.7", 2, must=True, veto=True),
            Clue("critical.device_wait", "waits for the GPU or its launch queue", "> 0.3", "< 0.05", 1.5, must=True),
            Clue("gpu.utilisation", _UTILISATION, "> 0.9", "< 0.5", 1, veto=True),
            _ON_GPU,
        ),
        ("gpu", "device", "kernels", "compute-bound"),
        explains=("clock-cap",),
        is_state=True,
    ),
    Cause(
        "explicit-sync",
        "explicit synchronisation: the CPU stops to wait for a result, and the GPU runs dry meanwhile",
        (
            Clue("critical.sync", "waits for the GPU", "> 0.15", "< 0.05", 1.5, must=True, veto=True),
            Clue("drained", _DRAINED, "> 0.5", "< 0.1", 1.5, veto=True),
            Clue("gpu.utilisation", _UTILISATION, "< 0.9", "> 0.97", 1),
            Clue("critical.cuda_sync_leaf", "in Python calls that wait, such as item()", "> 0.1", "", 1),
            _ON_GPU,
        ),
        ("sync", "synchronisation", "synchronization", "synchronize", "item"),
        gain=("critical.sync",),
        explains=("launch-overhead",),
    ),
    Cause(
        "allocator-churn",
        "allocator churn: device memory is taken from the driver and given back in steady state",
        (
            Clue("allocator.device_calls", "calls to the driver for memory", "> 0.5", "< 0.05", 1.5, True, True),
            Clue("critical.allocator_churn", "in the allocator's driver calls", "> 0.05", "< 0.01", 2, must=True),
            Clue("allocator.retries", "allocations that had to be tried again", "> 0.02", "", 1),
            _ON_GPU,
        ),
        ("allocator", "churn", "memory", "fragmentation", "malloc", "empty_cache"),
        gain=("critical.allocator_churn",),
        explains=("explicit-sync", "launch-overhead"),
    ),
    Cause(
        "host-copy",
        "copies between host and device: pageable memory, or the bus is full",
        (
            Clue("critical.copy", "in copies between host and device", "> 0.15", "< 0.05", 2, must=True, veto=True),
            Clue("stage.h2d_sync", "the stage h2d_sync", "> 0.1", "", 1.5, must=True),
            Clue("gpu.pcie", "of what the bus can carry", "> 0.7", "", 1.5, must=True),
            _ON_GPU,
        ),
        ("copy", "copies", "pcie", "h2d", "pageable", "transfer", "pinned"),
        gain=("critical.copy", "stage.h2d_sync"),
        explains=("explicit-sync",),
    ),
    Cause(
        "recompute",
        "recomputation of layers in the backward pass",
        (Clue("stage.recompute", "the stage recompute", "> 0.2", "< 0.05", 2, must=True, veto=True),),
        ("recompute", "recomputation", "checkpointing"),
        gain=("stage.recompute",),
    ),
    Cause(
        "block-mask",
        "building the block mask",
        (Clue("stage.create_block_mask", "the stage create_block_mask", "> 0.05", "< 0.02", 2, True, True),),
        ("mask", "block_mask"),
        gain=("stage.create_block_mask",),
    ),
    Cause(
        "loss-head",
        "the loss over the vocabulary takes more than its share",
        (Clue("stage.chunked_loss", "the stage chunked_loss", "> 0.4", "< 0.3", 2, must=True, veto=True),),
        ("loss", "vocabulary", "lm_head"),
        is_state=True,
    ),
    Cause(
        "cpu-starvation",
        "CPU starvation: the thread is ready to run and gets no CPU",
        (
            Clue("critical.runqueue", "ready, without a CPU", "> 0.1", "< 0.02", 2, must=True, veto=True),
            Clue("host.throttled", "periods in which the cgroup was held back", "> 0.05", "", 1.5, must=True),
            Clue("host.load_per_cpu", "runnable threads for each CPU", "> 1.2", "", 0.5),  # of the last minute
        ),
        ("starved", "starvation", "cpu", "cores", "affinity", "throttled", "throttling"),
        gain=("critical.runqueue",),
        explains=("gil", "launch-overhead", "python", "lock", "cpu-compute", "explicit-sync"),
    ),
    Cause(
        "straggler",
        "a rank arrives late at collectives and the others wait for it",
        (
            Clue("collective.spread", "difference in waiting between ranks", "> 0.2", "< 0.05", 2, True, True),
            Clue("critical.collective", "in collectives", "> 0.2", "< 0.05", 1, veto=True),
        ),
        ("straggler", "collective", "collectives", "nccl", "rank"),
        gain=("critical.collective",),
    ),
    Cause(
        "compile-gc",
        "compilation, garbage collection or warm-up rather than steady training",
        (
            Clue("critical.compile_gc", "compiles or collects garbage", "> 0.1", "< 0.03", 2, must=True, veto=True),
            Clue("process.compilers", "CPU time of compilers among its children", "> 0.1", "", 2, must=True),
            Clue("run.warming_up", "the run is in its first steps", "> 0.5", "", 1),
        ),
        ("compile", "compiling", "recompile", "gc", "garbage", "warm-up", "warmup"),
        gain=("critical.compile_gc",),
        explains=("launch-overhead", "python", "gil", "cpu-compute"),
    ),
    Cause(
        "clock-cap",
        "the GPU's clocks are held down by power or temperature",
        (
            Clue("gpu.limited", "readings with a power or thermal limit", "> 0.5", "< 0.05", 1, must=True, veto=True),
            Clue("gpu.clock", "of the highest clock", "< 0.85", "> 0.95", 1, veto=True),
            Clue("drained", _DRAINED, "< 0.1", "> 0.7", 1, veto=True),
            Clue("gpu.utilisation", _UTILISATION, "", "< 0.8", 1, veto=True),
            _ON_GPU,
        ),
        ("clock", "clocks", "thermal", "power", "throttle"),
        explains=(),
    ),
    Cause(
        "profiler",
        "the profiler itself: it stops the process for too long, or its stacks cannot be read",
        (
            Clue("tool.stop", "the process was stopped by what was judged by", "> 0.25", "< 0.15", 2, True, True),
            Clue("tool.errors", "stacks that could not be read", "> 0.2", "", 2, must=True),
        ),
        ("profiler", "observer"),
        gain=("tool.stop",),
    ),
    Cause(
        "cpu-compute",
        "compute on the CPU: native code works without the interpreter",
        (
            Clue("critical.compute", "computes on the CPU", "> 0.5", "< 0.2", 2, must=True, veto=True),
            Clue("critical.native_cpu", "on a CPU without the GIL", "> 0.5", "< 0.2", 2, must=True, veto=True),
            Clue("process.cuda", "the process uses a GPU", "", "> 0.5", 1.5),
        ),
        ("compute", "matmul", "math", "flops"),
        is_state=True,
    ),
    Cause(
        "python",
        "Python work: the thread itself runs the interpreter",
        (
            Clue("critical.gil", "the thread holds the GIL", "> 0.5", "< 0.2", 2, must=True, veto=True),
            Clue("critical.cpu", "the thread is on a CPU", "> 0.5", "< 0.2", 0.5),
        ),
        ("python",),
        is_state=True,
        explains=("launch-overhead",),
    ),
    Cause(
        "lock",
        "a lock: the thread waits for one that others hold",
        (
            Clue("critical.lock", "waits for a lock", "> 0.2", "< 0.05", 2, must=True, veto=True),
            Clue("critical.cpu", "the thread is on a CPU", "< 0.5", "> 0.9", 0.5, veto=True),
        ),
        ("lock", "locks", "convoy", "mutex"),
        gain=("critical.lock",),
    ),
    Cause(
        "sleep",
        "the thread sleeps, or looks again and again whether there is something to do",
        (
            Clue("critical.sleep", "sleeps", "> 0.2", "< 0.05", 2, must=True, veto=True),
            Clue("critical.cpu", "the thread is on a CPU", "< 0.5", "> 0.9", 0.5, veto=True),
        ),
        ("sleep", "sleeps", "polling"),
        gain=("critical.sleep",),
    ),
    Cause(
        "input",
        "starved by its queue: the thread waits for what others should bring",
        (
            Clue("critical.queue_wait", "waits for a queue", "> 0.2", "< 0.05", 2, must=True, veto=True),
            Clue("critical.cpu", "the thread is on a CPU", "< 0.5", "> 0.9", 0.5, veto=True),
        ),
        ("input", "data", "loader", "dataloader", "queue", "loading"),
        gain=("critical.queue_wait",),
    ),
    Cause(
        "target-bound",
        "the target side is the limit: the drafter waits for features",
        (
            Clue("queue.get_wait", "the drafter waits for features", "> 0.05", "< 0.02", 2, must=True, veto=True),
            Clue("queue.put_wait", "the targets wait for room", "< 0.05", "> 0.1", 0.5),
        ),
        ("target", "targets", "producer", "producers", "producer-bound"),
        gain=("queue.get_wait",),
        is_side=True,
    ),
    Cause(
        "drafter-bound",
        "the drafter is the limit: targets wait for room in the queue",
        (
            Clue("queue.put_wait", "the targets wait for room", "> 0.05", "< 0.02", 2, must=True, veto=True),
            Clue("queue.get_wait", "the drafter waits for features", "< 0.05", "> 0.1", 0.5),
        ),
        ("drafter", "consumer", "consumer-bound"),
        gain=("queue.put_wait",),
        is_side=True,
    ),
)

BY_ID = {cause.id: cause for cause in CAUSES}

_PROVIDERS: tuple[tuple[str, str, float], ...] = (
    (r"critical\.(queue_wait|lock|sleep|blocked|compile_gc)", "Python stacks: py-spy and the right to read it", 10),
    (r"critical\.gil_wait", "who waits for the GIL: native stacks, with --allow-pause", 60),
    (r"critical\.(cpu|runqueue)", "the threads in /proc", 10),
    (r"critical\.(gil|native_cpu)|gil\.", "the GIL: py-spy and the right to read the process", 10),
    (r"critical\.", "native stacks, with --allow-pause", 60),
    (r"drained|stage\.", "stages of a run of ours, with profiling on and on a GPU", 10),
    (r"queue\.", "the queue of a run of ours, with targets and drafter side by side", 10),
    (r"allocator\.", "the allocator's counters, which a run of ours tells through its control socket", 10),
    (r"gpu\.", "the GPU's counters: nvidia-ml-py and a driver", 10),
    (r"collective\.", "a look at all ranks of the host", 10),
)


def judge_causes(figures: Figures, *, asked: Sequence[str] = (), seconds: float = 10.0) -> list[Hypothesis]:
    """Every hypothesis with its evidence: those that were asked for first, then by outcome and points.

    Args:
        figures: Observations by name.
        asked: Ids (`asked_ids`).
        seconds: Length of the look, from which a longer one is reckoned.
    """
    judged = [_judged(cause, figures, cause.id in asked, seconds) for cause in CAUSES]
    rank = {"supported": 0, "undecided": 1, "refuted": 2}
    return sorted(judged, key=lambda each: (not each.asked, rank[each.outcome], -each.score))


def asked_ids(texts: Sequence[str]) -> list[str]:
    """The hypotheses that a user means, by id or by words in a sentence.

    Raises: AttachError for a text that means none.
    """
    found: list[str] = []
    for text in texts:
        words = set(re.findall(r"[a-z_0-9-]+", text.lower()))
        words |= {part for word in words for part in word.split("-")}
        exact = [cause.id for cause in CAUSES if cause.id == text.strip().lower()]
        hits = {cause.id: len(words & {*cause.words, *cause.id.split("-")}) for cause in CAUSES}
        best = max(hits.values())
        ids = exact or [id for id, count in hits.items() if count == best and best > 0]
        if not ids:
            raise AttachError(
                f"--hypothesis {text!r}: none of the hypotheses is about that; there are: {', '.join(BY_ID)}"
            )
        found += [id for id in ids if id not in found]
    return found


def conclude(
    hypotheses: Sequence[Hypothesis],
    *,
    side: str = "",
    side_line: str = "",
    gain: Figure | None = None,
    where: str = "",
) -> Conclusion:
    """The verdict: the side as the pipeline's own judge has it, and the leading cause inside of it.

    Args:
        side: Kind of the pipeline's verdict; empty for a process without a pipeline of ours.
        side_line: The same with its evidence.
        where: The thread or role in which the cause was looked for.
    """
    supported = _leaders([each for each in hypotheses if each.outcome == "supported" and not BY_ID[each.id].is_side])
    inside = f" in {where}" if where else ""
    head = f"{side_line}; " if side_line else ""
    if not supported:
        next_, next_s = _next_of(hypotheses)
        return Conclusion(
            line=f"{head}cause{inside}: undecided" + (f"; next: {next_}, about {next_s:.0f} s" if next_ else ""),
            side=side, gain=gain, next=next_, next_s=next_s,
        )  # fmt: skip
    first, others = supported[0], supported[1:]
    tied = [each for each in others if first.score - each.score < TIE and not _is_settled(first, each)]
    if tied:
        names = " or ".join(each.id for each in (first, *tied))
        next_, next_s = _splitting(first, tied[0])
        return Conclusion(
            line=f"{head}cause{inside}: undecided between {names}" + (f"; next: {next_}" if next_ else ""),
            side=side, gain=gain, next=next_, next_s=next_s,
        )  # fmt: skip
    against = tuple(each.says for each in first.evidence if each.effect == "refutes")
    proof = ", ".join(
        each.says for each in sorted(first.evidence, key=lambda e: -e.points) if each.effect == "supports"
    )
    fixed = f"; gain if removed {_gain_text(first.gain)}" if first.gain is not None else ""
    also = f"; also {', '.join(each.id for each in others)}" if others else ""
    return Conclusion(
        line=f"{head}cause{inside}: {first.title} ({proof}){fixed}; against: {', '.join(against) or 'none'}{also}",
        side=side,
        cause=first.id,
        gain=gain if gain is not None else first.gain,
        against=against,
    )


def _judged(cause: Cause, figures: Figures, asked: bool, seconds: float) -> Hypothesis:
    evidence = [_weighed(clue, figures.get(clue.key)) for clue in cause.clues]
    pairs = list(zip(cause.clues, evidence, strict=True))
    score = math.fsum(each.points for each in evidence)
    has_must = any(clue.must and each.effect == "supports" for clue, each in pairs)
    has_veto = any(clue.veto and each.effect == "refutes" for clue, each in pairs)
    if has_must and not has_veto and score >= ENOUGH:
        outcome = "supported"
    elif (has_veto and not has_must) or score <= -ENOUGH:
        outcome = "refuted"
    else:
        outcome = "undecided"
    next_, next_s = _next_for(pairs, seconds) if outcome == "undecided" else ("", 0.0)
    return Hypothesis(
        id=cause.id,
        title=cause.title,
        outcome=outcome,  # type: ignore[arg-type]
        score=round(score, 2),
        evidence=tuple(evidence),
        asked=asked,
        gain=_gain_of(cause, figures) if outcome != "refuted" else None,
        next=next_,
        next_s=next_s,
    )


def _weighed(clue: Clue, figure: Figure | None) -> Evidence:
    wanted = "; ".join(
        f"{text} {sense}" for sense, text in (("is for it", clue.supports), ("against", clue.refutes)) if text
    )
    if figure is None:
        return Evidence(key=clue.key, says=f"{clue.says}: not known", wanted=wanted, effect="missing", points=0.0)
    says = f"{clue.says}: {figure.shown()}"
    if figure.unit == "frac" and figure.low == figure.high and figure.value in (0.0, 1.0):
        says = f"{clue.says}: {'yes' if figure.value else 'no'}" if clue.key.startswith(("process.", "run.")) else says
    for text, effect, sign in ((clue.supports, "supports", 1.0), (clue.refutes, "refutes", -1.0)):
        if text and _is_past(figure, text):
            return Evidence(
                key=clue.key, says=says, wanted=wanted, effect=effect, points=sign * clue.points, figure=figure  # type: ignore[arg-type]
            )  # fmt: skip
    return Evidence(key=clue.key, says=says, wanted=wanted, effect="neither", points=0.0, figure=figure)


def _is_past(figure: Figure, comparison: str) -> bool:
    """Whether all of the interval is past the threshold; a narrow one is taken by its middle."""
    sign, threshold = comparison[0], float(comparison[1:])
    is_narrow = figure.high - figure.low <= 2 * min(NARROW, threshold / 4)
    if sign == ">":
        return (figure.value if is_narrow else figure.low) > threshold
    return (figure.value if is_narrow else figure.high) < threshold


def _next_for(pairs: Sequence[tuple[Clue, Evidence]], seconds: float) -> tuple[str, float]:
    """What would decide it: a level that is missing, or a longer look, for its weightiest open clue."""
    open_ = [
        (clue, each)
        for clue, each in pairs
        if (each.effect == "missing" and (clue.must or clue.veto)) or (each.effect == "neither" and clue.must)
    ]
    for clue, each in sorted(open_, key=lambda pair: (-pair[0].points, pair[1].effect == "neither")):
        if each.figure is None:
            for pattern, what, takes in _PROVIDERS:
                if re.match(pattern, clue.key):
                    return f"{clue.says}: {what}", takes
        else:
            if each.figure.level in ("3", "6"):  # a longer look at Python alone tells no more
                return f"{clue.says}: native stacks, with --allow-pause", 60.0
            longer = _longer(each.figure, clue, seconds)
            if longer <= LONGEST_LOOK_S:
                return f"{clue.says}: a longer look, --seconds {longer:.0f}", longer
    return "", 0.0


def _longer(figure: Figure, clue: Clue, seconds: float) -> float:
    """Seconds until the interval is past the nearest threshold; halving it takes four times as long."""
    distances = [abs(figure.value - float(text[1:])) for text in (clue.supports, clue.refutes) if text]
    half = max((figure.high - figure.low) / 2, 1e-9)
    return seconds * max(2.0, (half / max(min(distances, default=1.0), NARROW)) ** 2)


def _gain_of(cause: Cause, figures: Figures) -> Figure | None:
    """Throughput over today's without the cause's share of the critical thread's time.

    Where a GPU is fed, what it is busy for stays: the gain ends there; and it ends where the other side of the pipeline
    becomes the slower one.
    """
    share = next((figures[key] for key in cause.gain if key in figures), None)
    if share is None or share.value <= 0.0:
        return None
    busy, limit = figures.get("gpu.busy"), figures.get("side.gain")
    on_gpu = busy is not None and figures.get("process.cuda", share).value > 0.5
    if on_gpu and cause.id == "allocator-churn" and "drained" not in figures:
        return None  # the driver's work on memory counts as busy too, and only stages tell the two apart
    # who waits is on no CPU; beside a GPU, handing the GIL over slows launches down too
    is_capped = cause.id in OFF_CPU and not (on_gpu and cause.id == "gil")
    if share.unit == "frac" and is_capped and "critical.cpu" in figures:
        most = max(0.0, 1.0 - figures["critical.cpu"].low)
        ends = (min(share.low, most), min(share.high, most))
        share = share.model_copy(update={"value": min(share.value, most), "interval": ends})

    def gain(part: float, device: float, side: float) -> float:
        floor = max(device, 1.0 / max(1.0, side) if side else 0.0, 1.0 / MAX_GAIN)
        return min(MAX_GAIN, 1.0 / max(1.0 - min(part, 1.0), floor))

    value, low, high = (
        gain(part, getattr(busy, idle) if on_gpu else 0.0, getattr(limit, end) if limit is not None else 0.0)
        for part, idle, end in (
            (share.value, "value", "value"), (share.low, "high", "low"), (share.high, "low", "high"),
        )
    )  # fmt: skip
    return Figure(
        value=value, interval=(low, high), unit="ratio", level=share.level, rules=share.rules, samples=share.samples
    )


def _leaders(supported: list[Hypothesis]) -> list[Hypothesis]:
    """Those that are no effect of another, the strongest first."""
    effects = {
        other.id
        for each in supported
        for other in supported
        if other.id in BY_ID[each.id].explains and each.id not in BY_ID[other.id].explains and _is_enough(each, other)
    }
    roots = [each for each in supported if each.id not in effects] or supported
    return sorted(roots, key=lambda each: (not _costs(each), -each.score, -(each.gain.value if each.gain else 0.0)))


def _costs(hypothesis: Hypothesis) -> bool:
    """Whether it is a fault that takes time; without one, a state is the verdict."""
    is_felt = hypothesis.gain is None or hypothesis.gain.value >= FELT
    return is_felt and not BY_ID[hypothesis.id].is_state


def _is_enough(cause: Hypothesis, effect: Hypothesis) -> bool:
    """Whether a cause is large enough to be all of its effect's reason."""
    if BY_ID[effect.id].is_state:
        return _costs(cause)
    return cause.gain is None or effect.gain is None or cause.gain.high >= effect.gain.low


def _is_settled(first: Hypothesis, other: Hypothesis) -> bool:
    """Whether the first one's gain is clearly the larger, so that points need not decide."""
    if _costs(first) != _costs(other):
        return True
    if first.gain is None or other.gain is None:
        return False
    # neither in the other's interval: intervals that overlap at their ends may still be apart
    return first.gain.low > other.gain.value and first.gain.value > other.gain.high


def _splitting(first: Hypothesis, second: Hypothesis) -> tuple[str, float]:
    """The missing clue of either that would tell them apart."""
    for each in (first, second):
        for clue, seen in zip(BY_ID[each.id].clues, each.evidence, strict=True):
            if seen.effect == "missing":
                for pattern, what, takes in _PROVIDERS:
                    if re.match(pattern, clue.key):
                        return f"{clue.says}: {what}", takes
    return "", 0.0


def _next_of(hypotheses: Sequence[Hypothesis]) -> tuple[str, float]:
    """The next measurement of the likeliest open hypothesis."""
    open_ = [each for each in hypotheses if each.outcome == "undecided" and each.next and not BY_ID[each.id].is_side]
    best = max(open_, key=lambda each: (each.asked, each.score, -each.next_s), default=None)
    return (best.next, best.next_s) if best is not None else ("", 0.0)


def _gain_text(gain: Figure) -> str:
    if gain.value > UNTOLD:
        return f"at least {gain.low:.1f}x"
    return f"{gain.value:.2f}x [{gain.low:.2f}-{gain.high:.2f}]"
