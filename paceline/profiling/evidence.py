"""The record of a look at a running process, which is the report's JSON: what every level saw and what follows from it.

A look is taken by ``collect``, its stacks are sorted by `classify`, judged by `causes`, compared by `diff` and shown by
``report``. All of them meet here and nowhere else.

Shares are fractions of wall time, 0 to 1. Every figure says which level it is from and its 95 % interval; one that was
read and not sampled has no width.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from paceline.errors import PacelineError

SCHEMA = "paceline.attach/1"
"""Raised when a field changes its meaning or goes; new fields do not raise it."""

CATEGORIES = (
    "allocator_churn", "sync", "async_copy", "launch", "launch_queue_full", "collective", "compile", "gc", "queue_wait",
    "lock", "gil_wait", "sleep", "io", "compute", "dispatch", "autograd", "python", "other",
)  # fmt: skip
"""What a thread does at a moment. `recompute` and `autograd` are tags as well (`Stack.tags`)."""

WAITING = {"sync", "queue_wait", "lock", "gil_wait", "sleep", "io", "launch_queue_full"}
"""Categories in which a thread gets nothing done by itself."""

LevelId = Literal["0", "1", "2", "3", "4", "4b", "5", "6"]
LEVEL_NAMES: dict[str, str] = {
    "0": "stages (shared page)",
    "1": "threads (/proc)",
    "2": "GIL (py-spy --gil --nonblocking)",
    "3": "Python stacks (py-spy dump --nonblocking)",
    "4": "native stacks (py-spy record --native)",
    "4b": "GIL waiters, threads without Python (pystack)",
    "5": "GPU (NVML)",
    "6": "from inside (control socket)",
}


class AttachError(PacelineError):
    """A process that cannot be looked at, or a report that cannot be read."""


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a figure is not finite")
    return value


Number = Annotated[float, BeforeValidator(_finite)]


class Record(BaseModel):
    """Immutable; unknown fields of a newer version are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Figure(Record):
    """A number with its evidence.

    Attributes:
        interval: 95 %; equal to the value twice where it was read rather than sampled.
        unit: ``frac`` (0 to 1), ``per_s``, ``count``, ``ms``, ``s``, ``bytes``, ``ratio``, ``MHz``, ``W``, ``GB/s``.
        level: Where it is from.
        rules: Ids of the rules behind it.
        samples: How many it rests on; None where it was read.
    """

    value: Number
    interval: tuple[Number, Number]
    unit: str = "frac"
    level: LevelId
    rules: tuple[str, ...] = ()
    samples: int | None = None

    @classmethod
    def read(cls, value: float, level: LevelId, unit: str = "frac") -> Figure:
        """One that was read, without an interval."""
        return cls(value=value, interval=(value, value), unit=unit, level=level)

    @property
    def low(self) -> float:
        return self.interval[0]

    @property
    def high(self) -> float:
        return self.interval[1]

    def shown(self) -> str:
        """``41 % [36-47]``; without the interval where it has no width."""
        scale, unit = (100.0, " %") if self.unit == "frac" else (1.0, "" if self.unit == "count" else f" {self.unit}")
        unit = unit.replace("per_s", "a second").replace("ratio", "x")
        text = f"{_short(scale * self.value)}{unit}"
        if self.low == self.high:
            return text
        return f"{text} [{_short(scale * self.low)}-{_short(scale * self.high)}]"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10 or value == 0 else f"{value:.2g}"


class Disturbance(Record):
    """What a level did to the process that it looked at.

    Attributes:
        predicted_stop_frac, stop_frac: Share of its window in which the process was stopped; None: it stops nothing.
        longest_stop_s: Longest single stop that was seen.
        tool_cpu_s: CPU time that the tools took for it.
    """

    predicted_stop_frac: Number | None = None
    stop_frac: Number | None = None
    longest_stop_s: Number | None = None
    tool_cpu_s: Number = 0.0


class Level(Record):
    """One source of evidence.

    Attributes:
        ok: Whether it has seen anything.
        reason: Why not, or what is wrong with it; empty: nothing.
        fix: The one thing that would help.
        costs: What the report lacks without it.
        in_verdict: Whether it is sound enough to judge by: not over its budget of stops, not mostly unmatched.
        seconds: Length of its window.
        samples, errors: Stacks taken, and those that could not be read.
    """

    id: LevelId
    name: str
    ok: bool
    reason: str = ""
    fix: str = ""
    costs: str = ""
    in_verdict: bool = True
    seconds: Number = 0.0
    samples: int = 0
    errors: int = 0
    disturbance: Disturbance = Disturbance()


class Process(Record):
    """A process of the tree.

    Attributes:
        started: Start time in clock ticks since boot, which with the number never comes again.
        command: Shortened, with what may be a secret masked.
        python: Version such as ``3.11``; None: no Python process.
        role: What it does where it is ours, for example ``drafter-0``; else empty.
        end: Empty; or how it ended during the look (``exited``, ``zombie``).
        cuda: Whether it has the CUDA driver in memory; None: it cannot be told.
    """

    pid: int
    parent: int
    started: int
    command: str
    python: str | None
    role: str = ""
    end: str = ""
    cuda: bool | None = None


class Thread(Record):
    """A thread over the window.

    Attributes:
        name: The run's own name for it, else Python's, else the operating system's (`comm`).
        role: Of our pipeline; else empty.
        cpu, runqueue: Shares of wall time on a CPU, and ready but without one.
        states: Share of readings in each kernel state (R running or ready, S sleeping, D in the kernel, t stopped by a
            tracer, T stopped).
        voluntary, involuntary: Context switches a second.
        syscall: Kernel function or call that it was seen in most often, such as ``futex``.
        gil: Share of wall time in which it held the GIL.
        categories: What it did, by category, of the best level that may be judged by.
        is_main: Whether it is its process's first thread.
        is_new, is_gone: It began, or ended, during the window; figures are over the time that it was there.
    """

    pid: int
    tid: int
    name: str
    comm: str = ""
    role: str = ""
    is_main: bool = False
    cpu: Figure | None = None
    runqueue: Figure | None = None
    states: dict[str, Number] = {}
    voluntary: Number | None = None
    involuntary: Number | None = None
    syscall: str = ""
    gil: Figure | None = None
    categories: dict[str, Figure] = {}
    is_new: bool = False
    is_gone: bool = False


class Holder(Record):
    """A thread that held the GIL.

    Attributes:
        where: Innermost frames of most samples, the most frequent first.
    """

    tid: int
    name: str
    share: Number
    interval: tuple[Number, Number]
    where: tuple[str, ...] = ()


class Gil(Record):
    """How much of wall time somebody held the interpreter's lock.

    Attributes:
        share: Samples with a holder over samples; `interval` is Wilson's, 95 %.
        cpu_share, runqueue_share: Its two parts: the holder at work, and the holder waiting for a CPU while it holds it
            (estimated from the holders' own run-queue waits); None without level 1.
        pid: Process whose lock it is; each interpreter process has one.
    """

    pid: int
    share: Number
    interval: tuple[Number, Number]
    level: LevelId = "2"
    samples: int = 0
    errors: int = 0
    cpu_share: Number | None = None
    runqueue_share: Number | None = None
    holders: tuple[Holder, ...] = ()


class Frame(Record):
    """A call.

    Attributes:
        file: File name without its folders, or the library's of a native frame.
        line: 0: not known, as in most native frames.
    """

    name: str
    file: str = ""
    line: int = 0
    is_native: bool = False

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{self.name} ({place})" if place else self.name


class Stack(Record):
    """What a thread was at, and how often that was seen.

    Attributes:
        frames: Outermost first, the leaf last.
        count: Samples.
        state: Kernel state of the thread at that moment, where it was read; else empty.
        syscall: Kernel call that it was in at that moment, by name; else empty.
        has_gil: Whether it held the GIL; None: not known.
        waits_for_gil: Whether the tool itself said so.
        category, rule, tags: Added by `classify`.
    """

    level: LevelId
    pid: int
    tid: int
    frames: tuple[Frame, ...]
    count: int = 1
    state: str = ""
    syscall: str = ""
    has_gil: bool | None = None
    waits_for_gil: bool = False
    category: str = ""
    rule: str = ""
    tags: tuple[str, ...] = ()


class Sorted(Record):
    """All stacks of a level, by category.

    Attributes:
        categories: Shares of samples over all threads that were not idle all the time.
        unmatched: Share of samples that no rule knows.
        is_weak: More than a fifth is unmatched.
    """

    level: LevelId
    samples: int
    categories: dict[str, Figure]
    unmatched: Figure
    is_weak: bool = False


class Queue(Record):
    """The pipeline's queue over the window.

    Attributes:
        get_wait, put_wait: Shares of time in which the drafter, and the average target, were blocked.
        waiting: Batches in it on average.
        history: Batches in it from moment to moment: seconds since the window's begin, and how many.
    """

    depth: int
    targets: int
    waiting: Number
    get_wait: Figure
    put_wait: Figure
    batches_per_s: Number
    history: tuple[tuple[Number, int], ...] = ()


class Gpu(Record):
    """A GPU over the window; None where the driver does not say.

    Attributes:
        is_ours: Whether the process was seen on it; None: cannot be told (another pid namespace).
        utilisation: Share of time in which any kernel ran, however small.
        limits: Why clocks are held back, by the driver's names, with the share of readings.
    """

    index: int
    name: str
    driver: str = ""
    is_ours: bool | None = None
    utilisation: Figure | None = None
    memory_used: Number | None = None
    memory_total: Number | None = None
    power_w: Figure | None = None
    power_limit_w: Number | None = None
    sm_clock_mhz: Figure | None = None
    max_sm_clock_mhz: Number | None = None
    pcie_rx_gb_s: Figure | None = None
    pcie_tx_gb_s: Figure | None = None
    pcie_limit_gb_s: Number | None = None
    limits: dict[str, Number] = {}


class Host(Record):
    """The machine during the look.

    Attributes:
        cpus: That the process may use: by affinity and by its cgroup's quota.
        load: Runnable threads on average over the last minute.
        throttled: Share of the cgroup's periods in which it was held back; None: no quota.
    """

    cpu_model: str = ""
    cores: int = 0
    cpus: Number = 0.0
    load: Number = 0.0
    throttled: Figure | None = None
    kernel: str = ""


class Evidence(Record):
    """One thing that speaks for or against a hypothesis.

    Attributes:
        says: In words, with the figure.
        key: Name of the observation.
        wanted: What was compared, such as ``> 0.5``.
        effect: ``supports``, ``refutes``, ``neither`` (between the thresholds, or its interval spans one), ``missing``.
        points: What it adds to the score; below 0 against.
    """

    key: str
    says: str
    wanted: str
    effect: Literal["supports", "refutes", "neither", "missing"]
    points: Number
    figure: Figure | None = None


class Hypothesis(Record):
    """A cause, and how the evidence stands on it.

    Attributes:
        outcome: ``supported``, ``refuted``, ``undecided``.
        asked: Whether the user asked for it.
        gain: Throughput over today's if it were removed; None where nothing is known or it does not cost.
        next: For an undecided one, the measurement that would decide it, and about how many seconds that takes.
    """

    id: str
    title: str
    outcome: Literal["supported", "refuted", "undecided"]
    score: Number
    evidence: tuple[Evidence, ...] = ()
    asked: bool = False
    gain: Figure | None = None
    next: str = ""
    next_s: Number = 0.0


class Conclusion(Record):
    """The verdict in one place.

    Attributes:
        line: In one sentence or two, with the numbers.
        side: ``producer-bound`` and so on, or empty where there is no pipeline of ours.
        cause: Id of the leading supported hypothesis; empty: undecided.
        gain: Throughput over today's if the slower side were infinitely fast.
        against: What speaks against the cause.
        next, next_s: What to measure next where it is undecided.
    """

    line: str
    side: str = ""
    cause: str = ""
    gain: Figure | None = None
    against: tuple[str, ...] = ()
    next: str = ""
    next_s: Number = 0.0


class Report(Record):
    """A look at a process.

    Attributes:
        taken_at: Begin, seconds since 1970. `seconds`: length of the window of levels 0 to 3 and 5.
        versions: Of what looks (``paceline``, ``py-spy``, ...) and of what is looked at (``torch``, ...), where known.
        run: For a run of ours: folder's name, configuration's hash, roles, steps, tokens a batch; else empty.
        stages: Records of `Interval.records`, one a thread (level 0).
        pipeline: Record of `verdict.Verdict`; empty where there is no pipeline of ours.
        allocator: Counters of the device allocator over the window, a second, from inside (level 6).
        critical: Thread numbers that the cause was looked for in.
        observations: All that hypotheses were judged by, by name.
        halves: For each half of the window the same observations: how much they move within one look.
        tokens_per_s, steps_per_s: Of a run of ours over the window.
    """

    schema_: str = Field(default=SCHEMA, alias="schema")
    taken_at: Number
    seconds: Number
    pid: int
    versions: dict[str, str] = {}
    processes: tuple[Process, ...] = ()
    run: dict[str, Any] = {}
    host: Host = Host()
    levels: tuple[Level, ...] = ()
    threads: tuple[Thread, ...] = ()
    gil: Gil | None = None
    gils: tuple[Gil, ...] = ()
    stacks: tuple[Stack, ...] = ()
    sorted: tuple[Sorted, ...] = ()
    stages: tuple[dict[str, Any], ...] = ()
    queue: Queue | None = None
    pipeline: dict[str, Any] = {}
    allocator: dict[str, Figure] = {}
    collectives: tuple[dict[str, Any], ...] = ()
    gpus: tuple[Gpu, ...] = ()
    critical: tuple[int, ...] = ()
    observations: dict[str, Figure] = {}
    halves: tuple[dict[str, Figure], ...] = ()
    hypotheses: tuple[Hypothesis, ...] = ()
    conclusion: Conclusion = Conclusion(line="")
    tokens_per_s: Figure | None = None
    steps_per_s: Figure | None = None
    notes: tuple[str, ...] = ()

    def level(self, id: LevelId) -> Level | None:
        """The level of that name, if it was tried."""
        return next((level for level in self.levels if level.id == id), None)
