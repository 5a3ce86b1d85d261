"""Figures by name, made from what the levels saw: what hypotheses are judged by, and two looks compared in.

critical.*     the threads that the verdict is about: on a CPU, waiting for one, in each category of stacks
gil.*          the interpreter's lock of their process
process.*      the process tree; host.* the machine
stage.*        shares of the critical role's time in our own stages; drained, lag_ms the GPU's run-ahead
queue.*        the pipeline's two waits
allocator.*    counters from inside; gpu.* the driver's; collective.* differences between ranks
tool.*         what the look itself did to the process
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paceline.profiling.evidence import (
    CATEGORIES,
    Figure,
    Gil,
    Gpu,
    Host,
    Level,
    LevelId,
    Process,
    Queue,
    Stack,
    Thread,
)
from paceline.profiling.statistics import wilson

MIN_STACKS = 12
"""Samples of the critical threads without which a level's categories are no evidence."""

LIMITS_OF_POWER = ("power", "thermal")
"""Parts of the driver's names for what holds clocks down that say power or heat."""

BLOCKED = {"sleep", "queue_wait", "lock", "io"}
"""Waits for something else than the GPU or the interpreter."""

SEEN_FROM_PYTHON = {"queue_wait", "lock", "sleep", "io", "compile", "collective"}
"""Categories that Python stacks alone can tell; what goes on inside of a native call they cannot."""

INSIDE = {"create_block_mask", "create_block_mask_swa", "layers", "chunked_loss", "recompute"}
"""Stages of ours whose time is in that of another."""

DRY = 0.1
"""Share of the stages' time on the GPU that ran dry, above which it says little of how busy the GPU is."""

Key = tuple[int, int]
"""Process and thread."""


def of_threads(threads: Sequence[Thread], critical: set[Key]) -> dict[str, Figure]:
    """Of the critical threads: their mean; CPU time with that of autograd's thread, which works as its caller waits."""
    figures: dict[str, Figure] = {}
    own = [thread for thread in threads if (thread.pid, thread.tid) in critical]
    processes = {thread.pid for thread in own}
    backward = [t for t in threads if t.pid in processes and t.comm.startswith("pt_autograd_")]
    if cpu := [thread.cpu for thread in own if thread.cpu is not None]:
        figures["critical.cpu"] = _mean(cpu)
        for thread in backward if len(own) == 1 else ():
            if thread.cpu is not None:
                figures["critical.cpu"] = _sum(figures["critical.cpu"], thread.cpu)
    if runqueue := [thread.runqueue for thread in own if thread.runqueue is not None]:
        figures["critical.runqueue"] = _mean(runqueue)
    return figures


def of_stacks(stacks: Iterable[Stack], level: LevelId, critical: set[Key]) -> dict[str, Figure]:
    """Shares of the critical threads' samples in each category, and what is made of them.

    A level that sees Python only says nothing about what native code does.
    """
    ours = [stack for stack in stacks if stack.level == level and (stack.pid, stack.tid) in critical]
    samples = sum(stack.count for stack in ours)
    if samples < MIN_STACKS:
        return {}
    is_native = level in ("4", "4b")

    def share(matches: Callable[[Stack], bool], of: Sequence[Stack] = ours) -> Figure:
        hits, whole = [stack for stack in of if matches(stack)], sum(stack.count for stack in of)
        count = sum(stack.count for stack in hits)
        low, _ = wilson(count, whole)
        unknown = sum(stack.count for stack in of if stack.category == "other" and not matches(stack))
        _, high = wilson(count + unknown, whole)  # what cannot be told apart may all be this
        return Figure(
            value=count / whole,
            interval=(low, high),
            level=level,
            rules=tuple(sorted({stack.rule for stack in hits if stack.rule})),
            samples=whole,
        )

    seen = CATEGORIES if is_native else tuple(each for each in CATEGORIES if each in SEEN_FROM_PYTHON)
    figures = {f"critical.{each}": share(_is_in(each)) for each in seen}
    figures["critical.blocked"] = share(lambda stack: stack.category in BLOCKED)
    if not is_native:
        figures["critical.compile_gc"] = share(lambda stack: stack.category == "compile")
        return figures
    # backward on a GPU runs in a thread of autograd's, which no tool for Python sees: its caller only waits meanwhile,
    # so that how the device is fed is told by the rest of the caller's time
    figures["critical.backward_wait"] = share(_waits_for_autograd)
    own = [stack for stack in ours if not _waits_for_autograd(stack)]
    if sum(stack.count for stack in own) >= MIN_STACKS:
        figures["critical.launching"] = share(_feeds_the_gpu, own)
        figures["critical.device_wait"] = share(lambda stack: stack.category in {"sync", "launch_queue_full"}, own)
    # an asynchronous copy returns at once; one from or to pageable memory does not, whatever it is called
    figures["critical.copy"] = share(lambda s: s.category == "async_copy" or s.rule.startswith("sync.copy"))
    figures["critical.cuda_sync_leaf"] = share(lambda stack: stack.rule.startswith("sync.item"))
    figures["critical.compile_gc"] = share(lambda stack: stack.category in {"compile", "gc"})
    figures["critical.recompute"] = share(lambda stack: "recompute" in stack.tags)
    return figures


def of_gil(gil: Gil, critical: set[Key]) -> dict[str, Figure]:
    """The lock, the critical threads' part of it, and everybody else's; a probe from inside knows no holders."""

    def figure(share: float) -> Figure:
        return Figure(
            value=share, interval=wilson(share * gil.samples, gil.samples), level=gil.level, samples=gil.samples
        )

    share = Figure(value=gil.share, interval=gil.interval, level=gil.level, samples=gil.samples)
    if gil.level == "6":
        return {"gil.share": share}
    own = math.fsum(holder.share for holder in gil.holders if (gil.pid, holder.tid) in critical)
    return {
        "gil.share": share,
        "gil.held_by_others": figure(min(1.0, max(0.0, gil.share - own))),
        "critical.gil": figure(min(1.0, own)),
    }


def of_host(host: Host, threads: Sequence[Thread], processes: Sequence[Process]) -> dict[str, Figure]:
    """The machine, and how much of it the process tree takes."""
    figures = {}
    if host.cpus > 0:
        figures["host.load_per_cpu"] = Figure.read(host.load / max(host.cores, host.cpus), "1", "count")
        used = math.fsum(thread.cpu.value for thread in threads if thread.cpu is not None)
        figures["process.cpus_used"] = Figure.read(used, "1", "count")
    if host.throttled is not None:
        figures["host.throttled"] = host.throttled
    compilers = {each.pid for each in processes if each.python is None and _is_compiler(each.command)}
    if compilers:
        taken = math.fsum(t.cpu.value for t in threads if t.pid in compilers and t.cpu is not None)
        figures["process.compilers"] = Figure.read(min(1.0, taken), "1")
    return figures


def of_queue(queue: Queue) -> dict[str, Figure]:
    """The two waits."""
    return {"queue.get_wait": queue.get_wait, "queue.put_wait": queue.put_wait}


def of_allocator(counters: Mapping[str, Figure]) -> dict[str, Figure]:
    """Calls to the driver, and allocations tried again, a second."""
    if not counters:
        return {}
    calls = math.fsum(counters[name].value for name in ("num_device_alloc", "num_device_free") if name in counters)
    figures = {"allocator.device_calls": Figure.read(calls, "6", "per_s")}
    if "num_alloc_retries" in counters:
        figures["allocator.retries"] = counters["num_alloc_retries"]
    return figures


def of_gpus(gpus: Sequence[Gpu]) -> dict[str, Figure]:
    """Of the GPUs that the process was seen on; of all where that cannot be told."""
    mine = [gpu for gpu in gpus if gpu.is_ours] or [gpu for gpu in gpus if gpu.is_ours is None]
    figures: dict[str, Figure] = {}
    if not mine:
        return figures
    if busy := [gpu.utilisation for gpu in mine if gpu.utilisation is not None]:
        figures["gpu.utilisation"] = _mean(busy)
    clocks = [
        _scaled(gpu.sm_clock_mhz, 1.0 / gpu.max_sm_clock_mhz)
        for gpu in mine
        if gpu.sm_clock_mhz is not None and gpu.max_sm_clock_mhz
    ]
    if clocks:
        figures["gpu.clock"] = _mean(clocks)
    limited = [
        sum(share for name, share in gpu.limits.items() if any(part in name for part in LIMITS_OF_POWER))
        for gpu in mine
        if gpu.utilisation is not None
    ]
    if limited:
        figures["gpu.limited"] = Figure.read(min(1.0, max(limited)), "5")
    carried = [
        _scaled(each, 1.0 / gpu.pcie_limit_gb_s)
        for gpu in mine
        for each in (gpu.pcie_rx_gb_s, gpu.pcie_tx_gb_s)
        if each is not None and gpu.pcie_limit_gb_s
    ]
    if carried:
        figures["gpu.pcie"] = max(carried, key=lambda figure: figure.value)
    return figures


def of_stages(records: Sequence[Mapping], roles: set[str]) -> dict[str, Figure]:  # type: ignore[type-arg]
    """Shares of the roles' wall time in each of their stages, and whether the GPU ran dry behind them.

    Where stages are timed on the GPU, shares are of its time, as wall time there is that of launching. Stages inside
    others have their share of the whole too. A run at either end of the window may be missed: an interval is as wide.
    Stages of one batch run dry together, so that there are as many samples as batches.
    """
    mine = [record for record in records if str(record.get("role", "")) in roles]
    walls: dict[tuple[Any, Any], float] = {}
    totals, device, runs = dict[str, float](), dict[str, float](), dict[str, int]()
    lag = drained = weights = 0.0
    batches = lagged = 0
    for record in mine:
        thread = (record.get("pid"), record.get("tid"))
        walls[thread] = max(walls.get(thread, 0.0), 1e3 * float(record.get("wall_s", 0.0)))
        every = int(record.get("sampled_one_in", 1))
        batches += int(record.get("batches", 0))
        for name, stage in record.get("stages", {}).items():
            name = "create_block_mask" if name == "create_block_mask_swa" else name
            totals[name] = totals.get(name, 0.0) + float(stage.get("total_ms", 0.0)) * every
            runs[name] = runs.get(name, 0) + int(stage.get("count", 0))
            if stage.get("device_count"):
                device[name] = device.get(name, 0.0) + float(stage["device_avg_ms"]) * float(stage["count"]) * every
            if "lag_avg_ms" in stage and name not in INSIDE:
                count = int(stage.get("lag_count", stage["device_count"]))
                lag += float(stage["lag_avg_ms"]) * count
                drained += float(stage.get("drained_frac", 0.0)) * count
                weights += count
                lagged = max(lagged, count)
    wall_ms = math.fsum(walls.values())
    figures: dict[str, Figure] = {}
    if wall_ms > 0.0 and batches >= 2:
        for name, total in totals.items():
            share = min(1.0, device.get(name, total) / wall_ms)
            half = share / max(1, runs[name])
            interval = (max(0.0, share - half), min(1.0, share + half))
            figures[f"stage.{name}"] = Figure(value=share, interval=interval, level="0", samples=runs[name])
    if lagged:
        share = drained / weights
        interval = wilson(share * lagged, lagged)
        figures["drained"] = Figure(value=share, interval=interval, level="0", samples=lagged)
        figures["lag_ms"] = Figure.read(lag / weights, "0", "ms")
    return figures


def of_device(records: Sequence[Mapping], figures: Mapping[str, Figure]) -> dict[str, Figure]:  # type: ignore[type-arg]
    """How busy the GPU is, by the time that our stages take on it where it never ran dry in them.

    The driver's own utilisation is coarse, and counts memory that is taken and given back. Where stages ran dry, their
    time on the GPU holds gaps, and the driver's figure stands unless theirs is the smaller one.
    """
    busy_s = dry_s = seconds = 0.0
    timed = 0
    for record in records:
        seconds = max(seconds, float(record.get("interval_s", 0.0)))
        every = int(record.get("sampled_one_in", 1))
        for name, stage in record.get("stages", {}).items():
            if stage.get("device_count") and name not in INSIDE:
                part = float(stage["device_avg_ms"]) * float(stage["count"]) * every / 1e3
                busy_s += part
                timed = max(timed, int(stage["device_count"]))
                dry_s += part * float(stage.get("drained_frac", 0.0))
    utilisation = figures.get("gpu.utilisation")
    if busy_s <= 0.0 or seconds <= 0.0:
        return {"gpu.busy": utilisation} if utilisation is not None else {}
    share = busy_s / seconds
    low, high = (min(1.0, share * (1 + sign / timed)) for sign in (-1, 1))  # a batch more or less of those timed
    busy = Figure(value=min(1.0, share), interval=(low, high), level="0", samples=timed)
    if dry_s <= DRY * busy_s:
        return {"gpu.busy": busy}
    return {"gpu.busy": min((busy, utilisation), key=lambda each: each.value)} if utilisation is not None else {}


def of_ranks(stacks: Iterable[Stack], main_threads: Mapping[int, set[Key]], level: LevelId) -> dict[str, Figure]:
    """How differently processes wait in collectives: one that never does is what the others wait for."""
    shares, least = [], math.inf
    found = list(stacks)
    seen = {stack.pid for stack in found if stack.level == level and stack.category == "collective"}
    for pid, keys in main_threads.items():
        if pid not in seen:  # no rank: a worker that loads data, or compiles
            continue
        mine = [stack for stack in found if stack.level == level and (stack.pid, stack.tid) in keys]
        samples = sum(stack.count for stack in mine)
        if samples >= MIN_STACKS:
            shares.append(sum(stack.count for stack in mine if stack.category == "collective") / samples)
            least = min(least, samples)
    if len(shares) < 2:
        return {}
    spread = max(shares) - min(shares)
    half = 1.96 * math.sqrt(sum(share * (1 - share) for share in (max(shares), min(shares))) / least)
    interval = (max(0.0, spread - half), min(1.0, spread + half))
    return {"collective.spread": Figure(value=spread, interval=interval, level=level, samples=int(least))}


def of_levels(levels: Sequence[Level]) -> dict[str, Figure]:
    """What the look did: the longest share of stops among levels that are judged by, and stacks lost."""
    stops = [
        level.disturbance.stop_frac
        for level in levels
        if level.id == "4" and level.in_verdict and level.ok and level.disturbance.stop_frac is not None
    ]
    figures = {"tool.stop": Figure.read(max(stops, default=0.0), "4")}
    samples = sum(level.samples + level.errors for level in levels if level.ok and level.id in ("2", "3", "4"))
    errors = sum(level.errors for level in levels if level.ok and level.id in ("2", "3", "4"))
    if samples:
        figures["tool.errors"] = Figure(
            value=errors / samples, interval=wilson(errors, samples), level="3", samples=samples
        )
    return figures


def with_derived(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """With what follows from several levels: work of native code, on a CPU without the GIL."""
    found = dict(figures)
    cpu, gil = found.get("critical.cpu"), found.get("critical.gil")
    if cpu is not None and gil is not None:
        low, high = cpu.low - gil.high, cpu.high - gil.low
        found["critical.native_cpu"] = Figure(
            value=min(1.0, max(0.0, cpu.value - gil.value)),
            interval=(min(1.0, max(0.0, low)), min(1.0, max(0.0, high))),
            level="2",
        )
    return found


def is_idle(thread: Thread, shares: Mapping[str, Figure] | None = None) -> bool:
    """Whether the thread neither works nor is held up: nearly always in a wait by choice, or hardly ever on a CPU."""
    if thread.cpu is not None and thread.cpu.value + (thread.runqueue.value if thread.runqueue else 0.0) >= 0.1:
        return False
    if shares and math.fsum(shares[each].value for each in BLOCKED & set(shares)) > 0.9:
        return True
    return thread.cpu is None or thread.cpu.value < 0.02


def _waits_for_autograd(stack: Stack) -> bool:
    return stack.rule.startswith("autograd.wait")


def _feeds_the_gpu(stack: Stack) -> bool:
    """Launches and what goes before them."""
    return stack.category in {"launch", "dispatch", "autograd"}


def _is_in(category: str) -> Callable[[Stack], bool]:
    return lambda stack: stack.category == category


def _mean(figures: Sequence[Figure]) -> Figure:
    n = len(figures)
    return figures[0].model_copy(
        update={
            "value": math.fsum(each.value for each in figures) / n,
            "interval": (math.fsum(each.low for each in figures) / n, math.fsum(each.high for each in figures) / n),
        }
    )


def _sum(a: Figure, b: Figure) -> Figure:
    ends = (min(1.0, a.low + b.low), min(1.0, a.high + b.high))
    return a.model_copy(update={"value": min(1.0, a.value + b.value), "interval": ends})


def _scaled(figure: Figure, factor: float) -> Figure:
    return figure.model_copy(
        update={
            "value": figure.value * factor,
            "interval": (figure.low * factor, figure.high * factor),
            "unit": "frac",
        }
    )


def _is_compiler(command: str) -> bool:
    name = command.split(" ", 1)[0].rsplit("/", 1)[-1]
    return name in {"ptxas", "cc1", "cc1plus", "nvcc", "cicc", "gcc", "g++", "clang", "ninja", "ld", "as"}
