"""A look at a running process: the levels in order of what they disturb, each of which may fail, and the verdict.

Levels 0, 1, 2, 3, 5 and 6 share one window and stop nothing. Level 4, and 4b, stop the process for moments; they come
afterwards, only when allowed, within a budget that is reckoned beforehand and measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.profiling import observations as observe
from paceline.profiling.classify import by_thread, load_rules, sort
from paceline.profiling.collect.gil import GilLook, look_at_gil
from paceline.profiling.collect.gpu import GpuWatch
from paceline.profiling.collect.process import (
    Identity,
    Rights,
    has_native_torch,
    identify,
    is_same,
    libraries_of,
    process_tree,
    rights,
    tool,
)
from paceline.profiling.collect.stacks import StackLook, first_stop, sample_native, sample_python
from paceline.profiling.collect.stages import StageLook, StageWatch
from paceline.profiling.collect.threads import ThreadLook, ThreadWatch, moment
from paceline.profiling.collect.waiters import look_with_pystack
from paceline.profiling.evidence import (
    LEVEL_NAMES,
    AttachError,
    Figure,
    Frame,
    Gil,
    Level,
    LevelId,
    Process,
    Report,
    Stack,
    Thread,
)
from paceline.profiling.judgement import judged
from paceline.profiling.observations import Key
from paceline.profiling.statistics import wilson
from paceline.profiling.verdict import Verdict, Window, drop_warm_up, judge

MAX_PYTHONS = 4
"""Processes whose interpreters are looked at: the one that was named, and the busiest of its children."""

TOOL_SHARE = 0.04
"""Of a core that dumps of stacks may take from the machine."""

DUMP_S = 0.06
"""A dump of a process with torch; more of them are taken in a longer look."""

COSTS: dict[str, str] = {
    "1": "no CPU time, waits for a CPU and states of threads",
    "2": "no share of the GIL, and nobody to say who holds it",
    "3": "waits for queues and locks cannot be told from work",
    "4": "launches, synchronisation, allocator and dispatch cannot be told apart",
    "4b": "threads that wait for the GIL, and those without Python, are not named",
    "6": "no counters of the device's allocator, no collectives",
}


@dataclass(frozen=True)
class Wish:
    """What the user wants.

    Attributes:
        seconds: Of the window that stops nothing.
        allow_pause: Take native stacks too.
        budget: Share of time for which they may stop the process.
        native_seconds: Longest window of native stacks.
        asked: Ids of hypotheses.
        thread: Number or name of the thread to judge; empty: found by itself.
    """

    seconds: float = 10.0
    allow_pause: bool = False
    budget: float = 0.03
    native_seconds: float = 60.0
    asked: tuple[str, ...] = ()
    thread: str = ""


@dataclass(frozen=True)
class OurRun:
    """What is known of a run of ours from its folder.

    Attributes:
        facts: For `Report.run`.
        pages: Of its processes.
        in_turn: Target and drafter take turns in one thread.
        ask: Asks the process through its control socket: a verb and arguments; raises AttachError.
        recent: Windows of its last steps, for when the look is too short for a verdict.
    """

    facts: dict[str, Any]
    pages: tuple[Path, ...]
    in_turn: bool = False
    batches_per_step: int = 1
    ask: Callable[..., dict[str, Any]] | None = None
    recent: Callable[[], Sequence[Window]] | None = None


@dataclass
class _Seen:
    """What the levels have brought so far."""

    processes: list[Process]
    threads: ThreadLook
    stages: StageLook | None = None
    gils: dict[int, GilLook] = field(default_factory=dict)
    stacks: list[Stack] = field(default_factory=list)
    names: dict[Key, str] = field(default_factory=dict)
    levels: list[Level] = field(default_factory=list)
    gpus: Any = ()
    allocator: dict[str, Figure] = field(default_factory=dict)
    collectives: tuple[dict[str, Any], ...] = ()
    probe: Gil | None = None
    cuda: dict[int, bool | None] = field(default_factory=dict)


def look(
    pid: int,
    wish: Wish,
    *,
    run: OurRun | None = None,
    say: Callable[[str], None] = lambda _text: None,
    cancel: threading.Event | None = None,
) -> Report:
    """Look at a process and its children.

    Args:
        say: Told what is going on, a line at a time.
        cancel: When set, what runs is ended early; nothing of the process is left stopped.
    Raises: AttachError if there is no such process or it cannot even be read.
    """
    cancel = cancel or threading.Event()
    root, taken_at = identify(pid), time.time()
    tree = process_tree(pid)
    pythons = _pythons(tree)
    may = {each.pid: rights(each.pid) for each in pythons}
    py_spy, py_spy_version = tool("py-spy")
    notes = [] if pythons else [f"process {pid} is no Python process: what needs an interpreter is left out"]
    cuda, versions = {each.pid: _uses_cuda(each.pid) for each in pythons}, _versions(pid, py_spy, py_spy_version, tree)
    say(f"looking at {_counted(len(tree), 'process', 'processes')} for {wish.seconds:g} s, without stopping anything")
    seen = _window(tree, pythons, may, py_spy, py_spy_version, wish, run, cancel)
    seen.cuda = cuda | {each: uses for each in cuda if (uses := _uses_cuda(each)) is not None}  # it may have ended
    comms = {(thread.pid, thread.tid): thread.comm for thread in seen.threads.threads}
    rules = load_rules()
    sorted_, stacks = [], []
    for level in ("3", "6"):
        mine = [stack for stack in seen.stacks if stack.level == level]
        if mine:
            found, summary = sort(mine, level, comms, rules)
            stacks += found
            sorted_.append(summary)
    pipeline = _pipeline(seen.stages, run, notes)
    critical = _critical(seen, stacks, pipeline, pid, wish)
    for id, took in _native(critical, pid, may, py_spy, wish, seen, say, cancel):
        if took.stacks:
            found, summary = sort(took.stacks, id, comms, rules)
            stacks += found
            sorted_.append(summary)
            if summary.is_weak:
                _replace(seen.levels, id, reason=f"weak: {summary.unmatched.shown()} of its stacks fit no rule")
    if not is_same(root):
        notes.append(f"process {pid} ended during the look: figures are over the time that it was there")
    report = Report(
        schema=Report.model_fields["schema_"].default,
        taken_at=taken_at,
        seconds=wish.seconds,
        pid=pid,
        versions=versions,
        processes=tuple(_with_roles(tree, seen)),
        run=_facts(run, seen.stages),
        host=seen.threads.host,
        levels=tuple(sorted(seen.levels, key=lambda level: list(LEVEL_NAMES).index(level.id))),
        threads=tuple(_threads(seen, stacks)),
        gil=_gil_of(seen, pid),
        gils=tuple(gil for each in seen.gils if (gil := _with_parts(seen, each)) is not None),
        stacks=tuple(stacks),
        sorted=tuple(sorted_),
        stages=tuple(seen.stages.stages) if seen.stages is not None else (),
        queue=seen.stages.queue if seen.stages is not None and not (run is not None and run.in_turn) else None,
        pipeline=pipeline.record() if pipeline is not None else {},
        allocator=seen.allocator,
        collectives=seen.collectives,
        gpus=tuple(seen.gpus),
        critical=tuple(sorted(tid for _, tid in critical)),
        halves=_halves(seen, critical),
        tokens_per_s=seen.stages.tokens_per_s if seen.stages is not None else None,
        steps_per_s=seen.stages.steps_per_s if seen.stages is not None else None,
        notes=tuple(notes),
    )
    return judged(report, wish.asked)


def _facts(run: OurRun | None, stages: StageLook | None) -> dict[str, Any]:
    if run is None:
        return {}
    if stages is None or stages.last is None:
        return run.facts
    return run.facts | {"steps_done": stages.last.gauges["step"] - stages.last.gauges["first_step"]}


def _window(
    tree: Sequence[Process],
    pythons: Sequence[Process],
    may: Mapping[int, Rights],
    py_spy: str | None,
    py_spy_fix: str,
    wish: Wish,
    run: OurRun | None,
    cancel: threading.Event,
) -> _Seen:
    """Levels 0 to 3, 5 and 6, side by side over one window."""
    identities = [Identity(each.pid, each.started) for each in tree]
    watch, gpus = ThreadWatch(identities, wish.seconds), GpuWatch([each.pid for each in tree])
    stages = StageWatch(run.pages) if run is not None and run.pages else None
    readable = [each.pid for each in pythons if may[each.pid].can_read_memory] if py_spy else []
    count = max(20, round(TOOL_SHARE * wish.seconds / DUMP_S / max(1, len(readable))))
    counters = [_asked(run, "allocator")]  # outside of the window: a process that hangs keeps the answer
    if "error" in counters[0] and run is not None:
        run = dataclasses.replace(run, ask=None)
    with contextlib.ExitStack() as stack:
        if stages is not None:
            stages.start()
            stack.callback(stages.stop)
        gpus.start()
        stack.callback(gpus.stop)
        watch.start()
        stack.callback(watch.stop)
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=2 * MAX_PYTHONS + 2))
        stack.enter_context(_cancelling(cancel))
        gil_looks: dict[int, Future[GilLook]] = {}
        stack_looks: dict[int, Future[StackLook]] = {}
        for pid in readable:
            assert py_spy is not None
            gil_looks[pid] = pool.submit(look_at_gil, pid, wish.seconds, tool=py_spy, cancel=cancel)
            stack_looks[pid] = pool.submit(
                sample_python, pid, wish.seconds, tool=py_spy, moment=moment, count=count, cancel=cancel
            )
        inside = None
        if not readable and run is not None and run.ask is not None:
            inside = pool.submit(_asked, run, "frames", seconds=min(30.0, wish.seconds))
        cancel.wait(wish.seconds)
        seen = _Seen(list(tree), watch.stop())
        seen.gils = {pid: future.result() for pid, future in gil_looks.items()}
        taken = {pid: future.result() for pid, future in stack_looks.items()}
        frames = inside.result() if inside is not None else {}
        seen.stages = stages.stop() if stages is not None else None
        seen.gpus, gpu_level = gpus.stop()
    for pid, took in taken.items():
        seen.stacks += took.stacks
        seen.names |= {(pid, tid): name for tid, name in took.names.items()}
    if frames:
        _take_frames(seen, frames)
    counters.append(_asked(run, "allocator"))
    seen.allocator = _allocator(counters)
    seen.collectives = tuple(_asked(run, "collectives").get("entries", ()))
    why, fix = _no_stacks(pythons, may, py_spy, py_spy_fix)
    seen.levels = [
        seen.stages.level if seen.stages is not None else _no_level("0", "no run of ours"),
        seen.threads.level,
        _merged([each.level for each in seen.gils.values()]) or _no_level("2", why, fix),
        _merged([each.level for each in taken.values()]) or _no_level("3", why, fix),
        gpu_level,
        _inside_level(run, counters, frames),
    ]
    return seen


@contextlib.contextmanager
def _cancelling(cancel: threading.Event) -> Iterator[None]:
    """On the way out by an exception the tools are told to end, before the pool waits for them."""
    try:
        yield
    except BaseException:
        cancel.set()
        raise


def _native(
    critical: set[Key],
    pid: int,
    may: Mapping[int, Rights],
    py_spy: str | None,
    wish: Wish,
    seen: _Seen,
    say: Callable[[str], None],
    cancel: threading.Event,
) -> Iterator[tuple[LevelId, StackLook]]:
    """Levels 4 and 4b, on the process with the critical threads."""
    if not wish.allow_pause:
        seen.levels += [_no_level("4", "not asked for: it stops the process for moments", "--allow-pause")]
        seen.levels += [_no_level("4b", "not asked for: it stops the process for moments", "--allow-pause")]
        return
    where = next(iter(sorted(critical)), (pid, 0))[0]
    if where not in may or not may[where].can_ptrace or py_spy is None:
        reason, fix = (may[where].reason, may[where].fix) if where in may else ("no Python process", "")
        if py_spy is None:
            reason, fix = "py-spy is not installed", "pip install py-spy"
        seen.levels += [_no_level("4", reason, fix), _no_level("4b", reason, fix)]
        return
    identity = next((Identity(each.pid, each.started) for each in seen.processes if each.pid == where), None)
    if identity is None or not is_same(identity):
        seen.levels += [_no_level("4", "the process has ended"), _no_level("4b", "the process has ended")]
        return
    native = has_native_torch(where)
    say(f"native stacks of process {where}: up to {wish.native_seconds:g} s, stopping at most {wish.budget:.0%} of it")
    took = sample_native(
        where,
        wish.seconds,
        tool=py_spy,
        moment_state=lambda pid, tid: moment(pid, tid)[0],
        symbol_bytes=native.size_bytes,
        has_torch=native.has_torch,
        budget=wish.budget,
        max_seconds=wish.native_seconds,
        cancel=cancel,
        names={tid: name for (pid, tid), name in seen.names.items() if pid == where},
    )
    seen.levels.append(took.level)
    seen.names |= {(where, tid): name for tid, name in took.names.items() if (where, tid) not in seen.names}
    yield "4", took
    pystack, fix = tool("pystack")
    if pystack is None:
        seen.levels.append(_no_level("4b", "pystack is not installed", fix))
        return
    whole_s = wish.seconds + took.level.seconds
    left_s = wish.budget * whole_s - (took.level.disturbance.stop_frac or 0.0) * took.level.seconds
    least_s = first_stop(native.size_bytes, native.has_torch)
    if left_s < least_s:
        reason = f"the budget leaves {max(0.0, left_s):.2f} s of stops, and a shot may take {least_s:.1f} s"
        fix = f"--pause-budget {wish.budget + least_s / whole_s:.2f}"
        seen.levels.append(_no_level("4b", reason, fix))
        return
    shots = look_with_pystack(where, tool=pystack, budget=left_s, cancel=cancel)
    stopped_s = (shots.level.disturbance.stop_frac or 0.0) * shots.level.seconds
    disturbance = shots.level.disturbance.model_copy(update={"stop_frac": stopped_s / whole_s})  # of the whole look
    seen.levels.append(shots.level.model_copy(update={"disturbance": disturbance}))
    yield "4b", shots


def _pipeline(stages: StageLook | None, run: OurRun | None, notes: list[str]) -> Verdict | None:
    """The verdict on the sides, by this window's waits; by the last steps' where that is too short."""
    if (
        stages is None
        or run is None
        or stages.last is None
        or not stages.last.gauges["queue_depth"]
        and not run.in_turn
    ):
        return None

    def judged(windows: Sequence[Window]) -> Verdict:
        assert stages is not None and stages.last is not None and run is not None
        return judge(
            windows,
            targets=max(1, stages.last.gauges["targets"]),
            queue_depth=max(1, stages.last.gauges["queue_depth"]),
            batches_per_step=run.batches_per_step,
            in_turn=run.in_turn,
        )

    now = judged(stages.windows)
    if now.kind != "undecided" or run.recent is None:
        return now
    before = drop_warm_up(run.recent())
    if not before:
        return now
    longer = judged(before)
    if longer.kind == "undecided":
        return now
    notes.append(
        f"the look is too short for a verdict on the sides ({now.reason}); it rests on the last {longer.seconds:.0f} s "
        "of the run's steps"
    )
    return longer


def _critical(seen: _Seen, stacks: Sequence[Stack], pipeline: Verdict | None, pid: int, wish: Wish) -> set[Key]:
    """The threads in which the cause is looked for: the slower side's, or of a stranger the one that does the work.

    None where every thread waits.
    """
    threads = {(thread.pid, thread.tid): thread for thread in seen.threads.threads}
    if wish.thread:
        found = {
            key for key in threads if wish.thread in (str(key[1]), seen.names.get(key, ""), threads[key].comm)
            or (seen.stages is not None and wish.thread in seen.stages.names.get(key, ()))
        }  # fmt: skip
        if not found:
            known = sorted({*seen.names.values(), *(thread.comm for thread in threads.values())})
            raise AttachError(f"--thread {wish.thread}: there is no such thread; there are: {', '.join(known)[:500]}")
        return found
    if seen.stages is not None and seen.stages.names:
        side = _slow_side(pipeline)
        # of a process that looks from another pid namespace, or was forked, the page has other numbers
        found = {key for key, (role, _) in seen.stages.names.items() if f"+{side}" in f"+{role}" and key in threads}
        if found:
            return found
    shares = by_thread([stack for stack in stacks if stack.level in ("3", "6")])
    main = (pid, pid)
    if main in threads and not _waits_idly(threads[main], shares.get(main), stacks):
        return {main}
    at_work = [key for key, thread in threads.items() if not observe.is_idle(thread, shares.get(key))]
    if not at_work:
        return set()
    busiest = max(at_work, key=lambda key: _effort(threads[key]))
    # a library's threads without Python work for one that has some
    ours = max((key for key in at_work if key in seen.names), key=lambda key: _effort(threads[key]), default=busiest)
    return {ours if ours in threads and 2 * _effort(threads[ours]) > _effort(threads[busiest]) else busiest}


def _waits_idly(thread: Thread, shares: Mapping[str, Figure] | None, stacks: Sequence[Stack]) -> bool:
    """Whether it waits by choice; one that waits for loaded data does the training."""
    key = (thread.pid, thread.tid)
    if any("data_loading" in stack.tags for stack in stacks if (stack.pid, stack.tid) == key):
        return False
    return observe.is_idle(thread, shares)


def _effort(thread: Thread) -> float:
    return sum(each.value for each in (thread.cpu, thread.runqueue) if each is not None)


def _slow_side(pipeline: Verdict | None) -> str:
    if pipeline is None or pipeline.kind in ("in turn", "consumer-bound", "balanced"):
        return "drafter"
    if pipeline.kind == "producer-bound":
        return "target"
    if pipeline.kind == "contradiction":
        return "drafter"
    return "target" if pipeline.get_wait_frac.value > pipeline.put_wait_frac.value else "drafter"


def _halves(seen: _Seen, critical: set[Key]) -> tuple[dict[str, Figure], ...]:
    """What can be told of both halves of the window: how much figures move within one look."""
    halves: list[dict[str, Figure]] = []
    where = next(iter(sorted(critical)), (0, 0))[0]
    for half in (0, 1):
        figures: dict[str, Figure] = {}
        if len(seen.threads.halves) == 2:
            pairs = [seen.threads.halves[half][key] for key in critical if key in seen.threads.halves[half]]
            if pairs:
                for name, i in (("critical.cpu", 0), ("critical.runqueue", 1)):
                    figures[name] = Figure.read(sum(pair[i] for pair in pairs) / len(pairs), "1")
        if where in seen.gils and len(seen.gils[where].halves) == 2:
            hits, samples = seen.gils[where].halves[half]
            if samples:
                figures["gil.share"] = Figure(
                    value=hits / samples, interval=wilson(hits, samples), level="2", samples=samples
                )
        if seen.stages is not None and len(seen.stages.halves) == 2:
            names = seen.stages.names
            roles = {role for key in critical if key in names for role in names[key][0].split("+")}
            figures |= observe.of_stages(seen.stages.halves[half], roles)
        halves.append(figures)
    return tuple(halves) if any(halves) else ()


def _threads(seen: _Seen, stacks: Sequence[Stack]) -> list[Thread]:
    """Level 1's threads with names, roles, their part of the GIL and what they did; the busiest first."""
    sound = {level.id for level in seen.levels if level.ok and level.in_verdict}
    shares: dict[Key, dict[str, Figure]] = {}
    for id in ("6", "3", "4"):
        if id in sound:
            shares |= by_thread([stack for stack in stacks if stack.level == id])
    found = []
    for thread in seen.threads.threads:
        key = (thread.pid, thread.tid)
        role, name = ("", seen.names.get(key) or thread.comm)
        if seen.stages is not None and key in seen.stages.names:
            role, own = seen.stages.names[key]
            name = own or name
        gil = seen.gils.get(thread.pid)
        held = None
        if gil is not None and gil.gil is not None:
            hits, samples = gil.shares.get(thread.tid, (0, gil.gil.samples))
            held = Figure(
                value=hits / samples if samples else 0.0, interval=wilson(hits, samples), level="2", samples=samples
            )
        found.append(
            thread.model_copy(update={"name": name, "role": role, "gil": held, "categories": shares.get(key, {})})
        )
    return sorted(found, key=lambda thread: (not thread.role, -_effort(thread), thread.pid, thread.tid))


def _gil_of(seen: _Seen, pid: int) -> Gil | None:
    """The lock of the process that was named; where it is no interpreter's, of its busiest child's."""
    if (found := _with_parts(seen, pid)) is not None:
        return found
    others = [gil for each in seen.gils if (gil := _with_parts(seen, each)) is not None]
    return max(others, key=lambda gil: gil.share, default=seen.probe)


def _with_parts(seen: _Seen, pid: int) -> Gil | None:
    """With the holders' names, and the time that they held it without a CPU apart."""
    took = seen.gils.get(pid)
    if took is None or took.gil is None:
        return None
    threads = {thread.tid: thread for thread in seen.threads.threads if thread.pid == pid}
    cpu = runqueue = 0.0
    holders = []
    for holder in took.gil.holders:
        thread = threads.get(holder.tid)
        names = seen.stages.names.get((pid, holder.tid)) if seen.stages is not None else None
        name = (names[1] if names else "") or holder.name or (thread.comm if thread is not None else "")
        holders.append(holder.model_copy(update={"name": name}))
        waits = 0.0
        if thread is not None and thread.cpu is not None and thread.runqueue is not None and _effort(thread) > 0.0:
            waits = thread.runqueue.value / _effort(thread)
        cpu, runqueue = cpu + holder.share * (1 - waits), runqueue + holder.share * waits
    return took.gil.model_copy(update={"holders": tuple(holders), "cpu_share": cpu, "runqueue_share": runqueue})


def _with_roles(tree: Sequence[Process], seen: _Seen) -> list[Process]:
    roles: dict[int, list[str]] = {}
    if seen.stages is not None:
        for (pid, _), (joined, _) in sorted(seen.stages.names.items()):
            for role in joined.split("+"):
                if role.startswith(("target", "drafter")) and role not in roles.setdefault(pid, []):
                    roles[pid].append(role)
    return [
        each.model_copy(
            update={
                "role": ", ".join(roles.get(each.pid, [])),
                "end": seen.threads.ends.get(each.pid, ""),
                "cuda": seen.cuda.get(each.pid),
            }
        )
        for each in tree
    ]


def _pythons(tree: Sequence[Process]) -> list[Process]:
    """Interpreters to look at: the root, then those that take most CPU at the moment."""
    found = [each for each in tree if each.python is not None]
    if len(found) <= MAX_PYTHONS:
        return found
    before = {each.pid: _ticks(each.pid) for each in found}
    time.sleep(0.3)
    taken = {each.pid: _ticks(each.pid) - before[each.pid] for each in found}
    others = sorted((each for each in found[1:] if taken[each.pid] > 0), key=lambda each: -taken[each.pid])
    return [found[0], *others[: MAX_PYTHONS - 1]]


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return 0


def _uses_cuda(pid: int) -> bool | None:
    """Whether the process has the driver's library in memory, which a CUDA build of torch loads when it is used.

    None: it cannot be told, without the right to see or after its end.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return "/libcuda.so" in maps if maps else None


def _asked(run: OurRun | None, verb: str, **arguments: Any) -> dict[str, Any]:
    if run is None or run.ask is None:
        return {}
    try:
        return run.ask(verb, **arguments)
    except AttachError as error:
        return {"error": str(error)}


def _allocator(counters: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    """Changes of the allocator's counters a second, over all devices; sizes as they are at the end."""
    devices = [each.get("devices", {}) for each in counters]
    if len(devices) < 2 or not devices[-1]:
        return {}
    seconds = (counters[-1]["monotonic_ns"] - counters[0].get("monotonic_ns", counters[-1]["monotonic_ns"])) / 1e9
    if seconds <= 0.0:
        return {}
    found: dict[str, Figure] = {}
    for name in next(iter(devices[-1].values())):
        last = sum(each.get(name, 0) for each in devices[-1].values())
        first = sum(each.get(name, 0) for each in devices[0].values())
        is_size = "bytes" in name
        value = float(last) if is_size else max(0, last - first) / seconds
        found[name] = Figure.read(value, "6", "bytes" if is_size else "per_s")
    return found


def _take_frames(seen: _Seen, answer: Mapping[str, Any]) -> None:
    """Stacks and the lock's share as the process itself saw them."""
    pid = int(answer.get("pid", 0))
    for each in answer.get("stacks", ()):
        frames = tuple(_frame(text) for text in each["frames"])
        seen.stacks.append(Stack(level="6", pid=pid, tid=int(each["tid"]), frames=frames, count=int(each["count"])))
    seen.names |= {(pid, int(tid)): str(name) for tid, name in answer.get("names", {}).items()}
    probe = answer.get("probe", {})
    if probe.get("wakes"):
        wakes, late = int(probe["wakes"]), int(probe["late"])
        seen.probe = Gil(pid=pid, share=late / wakes, interval=wilson(late, wakes), level="6", samples=wakes)


def _frame(text: str) -> Frame:
    name, _, place = text.removesuffix(")").rpartition(" (")
    file, _, line = place.rpartition(":")
    return Frame(name=name, file=file, line=int(line) if line.isdecimal() else 0)


def _no_stacks(pythons: Sequence[Process], may: Mapping[int, Rights], py_spy: str | None, fix: str) -> tuple[str, str]:
    if not pythons:
        return "no Python process", ""
    if py_spy is None:
        return "py-spy is not installed", fix
    denied = next((may[each.pid] for each in pythons if not may[each.pid].can_read_memory), None)
    return (denied.reason, denied.fix) if denied is not None else ("nothing was seen", "")


def _no_level(id: LevelId, reason: str, fix: str = "") -> Level:
    return Level(id=id, name=LEVEL_NAMES[id], ok=False, reason=reason, fix=fix, costs=COSTS.get(id, ""))


def _inside_level(run: OurRun | None, counters: Sequence[dict[str, Any]], frames: Mapping[str, Any]) -> Level:
    if run is None:
        return _no_level("6", "no run of ours")
    error = next((str(each["error"]) for each in (*counters, frames) if "error" in each), "")
    if error:
        return _no_level("6", error)
    has_cuda = any(each.get("devices") for each in counters)
    reason = "" if has_cuda else "no CUDA allocator is in use"
    return Level(
        id="6",
        name=LEVEL_NAMES["6"],
        ok=has_cuda or bool(frames),
        reason=reason,
        costs="" if has_cuda else "no counters of a device's allocator",
        samples=int(frames.get("samples", 0)),
    )


def _merged(levels: Sequence[Level]) -> Level | None:
    """One level of several processes."""
    if not levels:
        return None
    good = [level for level in levels if level.ok] or list(levels)
    return good[0].model_copy(
        update={
            "reason": "; ".join(dict.fromkeys(level.reason for level in levels if level.reason)),
            "samples": sum(level.samples for level in levels),
            "errors": sum(level.errors for level in levels),
            "disturbance": good[0].disturbance.model_copy(
                update={"tool_cpu_s": sum(level.disturbance.tool_cpu_s for level in levels)}
            ),
        }
    )


def _replace(levels: list[Level], id: str, **update: Any) -> None:
    for i, level in enumerate(levels):
        if level.id == id:
            levels[i] = level.model_copy(update=update)


def _versions(pid: int, py_spy: str | None, py_spy_version: str, tree: Sequence[Process]) -> dict[str, str]:
    root = next((each for each in tree if each.pid == pid), None)
    found = {"paceline": __version__, "kernel": platform.release()}
    if py_spy:
        found["py-spy"] = py_spy_version
    if root is not None and root.python:
        found["python"] = root.python
    return found | libraries_of(pid)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
