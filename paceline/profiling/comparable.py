"""What of a look can be held against another, by key, and how surely each figure is known."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from paceline.profiling.evidence import Figure, LevelId, Report, Stack, Thread
from paceline.profiling.statistics import Z_95, t_95, wilson

LEAST_FACTOR, BLIND_FACTOR, MOST_FACTOR = 2.0, 4.0, 25.0
"""What samples are divided by because they follow each other: at least, without halves that say more, and at most."""
ENOUGH_RATIOS = 6
"""Figures with halves, in both looks together, that can say that less than `BLIND_FACTOR` will do."""
INDEPENDENT_PER_S = 20.0
"""Samples a second of one thread that can be independent: steps take tens of milliseconds and more."""
MOMENTS_PER_S = 10.0
"""Independent moments a second that a share which was read is taken to rest on."""
READ_SPREAD = 0.05
"""Half-width, of its value, of a figure that was read once and is neither a share nor a count."""
BUCKETS_A_DOUBLING = 8
"""Of a stage's histogram (`stats.NUM_BUCKETS`)."""
LEAST_RATE = 1e-9
"""Steps or tokens a second above which something is said of each; what is less in a stage's record is 0."""
ROUNDED_MS = 1e-4
"""Last place of times in a stage's record."""
MIN_RUNS = {"p50_ms": 20, "p90_ms": 50, "p99_ms": 500}
"""Runs of a stage from which a percentile is worth comparing."""
LARGEST = 1e60
"""What a report's numbers may be; squares and products of them are finite."""

Family = Literal["figures", "samples", "stages", "threads", "stacks"]
FAMILIES: tuple[Family, ...] = get_args(Family)


@dataclass(frozen=True)
class Known:
    """A figure with what is known of its spread.

    Attributes:
        below, above: Distances of its 95 % bounds.
        samples: Independent ones behind a share; 0 where it is no share of samples.
        slack: By how much it may be off besides, whatever the samples.
    """

    figure: Figure
    what: str
    family: Family
    below: float
    above: float
    samples: float = 0.0
    slack: float = 0.0
    test: Literal["intervals", "means", "percentiles"] = "intervals"


class Factors:
    """What samples of a level are divided by, as they follow each other; the same for both reports.

    Attributes:
        of_runs: The same for runs of stages, which are all counted.
    """

    def __init__(self, a: Report, b: Report) -> None:
        self._reports, self._of_level = (a, b), dict[str, float]()
        ratios = [*_half_ratios(a), *_half_ratios(b)]
        from_halves = math.fsum(ratios) / max(1, len(ratios))
        least = LEAST_FACTOR if len(ratios) >= ENOUGH_RATIOS else BLIND_FACTOR
        self.of_runs = min(MOST_FACTOR, max(LEAST_FACTOR, from_halves))
        self._of_samples = min(MOST_FACTOR, max(least, from_halves))

    def of(self, id: LevelId) -> float:
        """Of a level."""
        if id not in self._of_level:
            self._of_level[id] = self._of(id)
        return self._of_level[id]

    def _of(self, id: LevelId) -> float:
        return max([self._of_samples, *(self._crowding(report, id) for report in self._reports)])

    def _crowding(self, report: Report, id: LevelId) -> float:
        level = report.level(id)
        if level is None or not level.samples or not level.seconds or id in ("0", "1", "5", "6"):
            return 0.0
        threads = {(stack.pid, stack.tid) for stack in report.stacks if stack.level == id} if id != "2" else ()
        return level.samples / (INDEPENDENT_PER_S * level.seconds * max(1, len(threads)))


def _half_ratios(report: Report) -> Iterator[float]:
    """How much shares of samples differ between the halves, squared, over what independent samples would."""
    if len(report.halves) != 2:
        return
    first, second = report.halves
    for key in first.keys() & second.keys():
        x, y, whole = first[key], second[key], report.observations.get(key)
        half = (whole.samples or 0) / 2 if whole is not None else 0.0
        n, m = x.samples or half, y.samples or half
        if x.unit == y.unit == "frac" and n > 0 and m > 0:
            share = (x.value * n + y.value * m) / (n + m)
            variance = share * (1 - share) * (1 / n + 1 / m)
            if variance > 0 and 5 <= share * min(n, m):
                yield (x.value - y.value) ** 2 / variance


def noise_floor(key: str, a: Report, b: Report) -> float | None:
    """The larger difference between halves of the observation of that name."""
    name = key.removeprefix("observation.")
    floors = [
        abs(report.halves[0][name].value - report.halves[1][name].value)
        for report in (a, b)
        if len(report.halves) == 2 and name in report.halves[0] and name in report.halves[1]
    ]
    return max(floors, default=None)


@dataclass
class _Group:
    """Shares of the same samples: what was not seen in them is 0 of them."""

    family: Family
    figure: Figure
    samples: float


@dataclass
class Look:
    """All figures of a report by key; `groups` by the keys' beginning."""

    report: Report
    factors: Factors
    seen: dict[str, Known] = field(default_factory=dict)
    groups: dict[str, _Group] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._add_rates()
        self._add_observations()
        self._add_pipeline()
        self._add_gil()
        self._add_threads()
        self._add_stages()
        self._add_stacks()
        self._add_devices()

    def fill(self, other: Look) -> None:
        """Add a 0 for what only the other saw, where this one looked for it as well."""
        for key, seen in list(other.seen.items()):
            group = next((group for begin, group in self.groups.items() if key.startswith(begin)), None)
            if key not in self.seen and group is not None:
                low, high = wilson(0, group.samples)
                self.seen[key] = Known(group.figure, seen.what, group.family, -low, high, group.samples)

    def _seconds(self, id: LevelId) -> float:
        level = self.report.level(id)
        return level.seconds if level is not None and level.seconds else self.report.seconds

    def _add(self, key: str, what: str, figure: Figure | None, family: Family = "figures") -> None:
        if figure is None:
            return
        below, above, samples = _spread(figure, self._seconds(figure.level), self.factors.of(figure.level))
        self.seen[key] = Known(figure, what, family, below, above, samples)

    def _add_rates(self) -> None:
        self._add_loop_rate("tokens_per_s", "tokens a second", self.report.tokens_per_s)
        self._add_loop_rate("steps_per_s", "steps a second", self.report.steps_per_s)

    def _add_loop_rate(self, key: str, what: str, figure: Figure | None) -> None:
        """What a loop does over and over is more regular than what comes by chance; the window cuts one off."""
        if figure is None:
            return
        if figure.low != figure.high:
            self._add(key, what, figure)
            return
        half = abs(figure.value) * self._step_error()
        self.seen[key] = Known(figure, what, "figures", half, half)

    def _step_error(self) -> float:
        """Relative half-width of anything a step."""
        steps = self.report.steps_per_s
        if steps is None or steps.value <= LEAST_RATE:
            return 2 * READ_SPREAD
        half = (steps.high - steps.low) / 2
        return half / steps.value if half > 0 else max(READ_SPREAD, 1 / (steps.value * max(self.report.seconds, 1e-9)))

    def _add_observations(self) -> None:
        for name, figure in self.report.observations.items():
            if not name.startswith("tool."):  # of the look itself, and not of what was looked at
                self._add(f"observation.{_part(name)}", name, figure)

    def _add_pipeline(self) -> None:
        record, queue = self.report.pipeline, self.report.queue
        waits: dict[str, Figure | None] = {name: _estimate(record.get(f"{name}_frac")) for name in _WAITS}
        rate = _number(record.get("batches_per_s"))
        if queue is not None:
            waits |= {"get_wait": queue.get_wait, "put_wait": queue.put_wait}
            rate = queue.batches_per_s
            self._add("pipeline.waiting", "batches in the queue", Figure.read(queue.waiting, "0", "count"))
        for name, what in _WAITS.items():
            self._add(f"pipeline.{name}", what, waits[name])
        self._add(
            "pipeline.gain", "gain if the slower side were infinitely fast", _estimate(record.get("gain"), "ratio")
        )
        if rate is None:
            return
        self._add_loop_rate("pipeline.batches_per_s", "batches a second", Figure.read(rate, "0", "per_s"))
        for side, wait in (("target", waits["put_wait"]), ("drafter", waits["get_wait"])):
            value = _number(record.get(f"{side}_per_s"))
            if value is None or wait is None:
                continue
            relative = math.hypot(self._step_error(), (wait.high - wait.low) / 2 / max(1e-3, 1 - wait.value))
            half = abs(value) * relative
            figure = Figure(value=value, interval=(value - half, value + half), unit="per_s", level="0")
            what = f"batches a second that the {side} side could do"
            self.seen[f"pipeline.{side}_per_s"] = Known(figure, what, "figures", half, half)

    def _add_gil(self) -> None:
        gil = self.report.gil
        if gil is None or not _is_sound(self.report, gil.level):
            return
        shares: dict[str, tuple[str, float | None, Family]] = {
            "gil.share": ("GIL held", gil.share, "samples"),
            "gil.cpu_share": ("GIL held by a thread on a CPU", gil.cpu_share, "figures"),
            "gil.runqueue_share": ("GIL held by a thread that waits for a CPU", gil.runqueue_share, "figures"),
        }
        held: dict[str, list[float]] = {}
        for holder in gil.holders:
            held.setdefault(_part(holder.name), []).append(holder.share)
        for name, parts in held.items():
            shares[f"gil.holder.{name}"] = (f"GIL held by {name}", min(1.0, math.fsum(parts)), "threads")
        for key, (what, share, family) in shares.items():
            if share is not None:
                self._add(key, what, _share(share, gil.samples, gil.level), family)
        if gil.samples:
            effective = gil.samples / self.factors.of(gil.level)
            self.groups["gil.holder."] = _Group("threads", _share(0.0, gil.samples, gil.level), effective)

    def _add_threads(self) -> None:
        """Threads of one name together, as there may be many: their sum."""
        together: dict[str, list[Thread]] = {}
        for thread in self.report.threads:
            together.setdefault(_part(thread.role or thread.name or thread.comm), []).append(thread)
        for name, threads in together.items():
            for measure, what in (("cpu", "on a CPU"), ("runqueue", "ready but without a CPU")):
                figures = [figure for thread in threads if (figure := getattr(thread, measure)) is not None]
                if figures:
                    key, many = f"thread.{name}.{measure}", f", {len(threads)} together" if len(threads) > 1 else ""
                    self._add_sum(key, f"{name} {what}{many}", figures)

    def _add_sum(self, key: str, what: str, figures: Sequence[Figure]) -> None:
        value = math.fsum(figure.value for figure in figures)
        first = figures[0]
        spreads = [_spread(f, self._seconds(f.level), self.factors.of(f.level)) for f in figures]
        below, above = (math.sqrt(math.fsum(spread[i] ** 2 for spread in spreads)) for i in (0, 1))
        figure = Figure(value=value, interval=(value - below, value + above), unit=first.unit, level=first.level)
        self.seen[key] = Known(figure, what, "threads", below, above)

    def _add_stages(self) -> None:
        for role, records in _by_role(self.report.stages).items():
            for name in sorted({name for record in records for name in _stages(record)}):
                self._add_stage(role, name, records)

    def _add_stage(self, role: str, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        runs = _Runs.of(name, records)
        if runs is None:
            return
        begin, what = f"stage.{_part(role)}.{_part(name)}", f"{name} of {role}"
        error = runs.mean_error(self.factors.of_runs)

        def add(measure: str, said: str, value: float, relative: float, unit: str) -> None:
            half = min(abs(value) * relative, LARGEST)
            figure = Figure(
                value=value, interval=(value - half, value + half), unit=unit, level="0", samples=runs.count
            )
            self.seen[f"{begin}.{measure}"] = Known(figure, f"{what}, {said}", "stages", half, half, test="means")

        add("avg_ms", "mean", runs.mean, error, "ms")
        if runs.device_mean is not None:
            add("device_avg_ms", "mean on the device", runs.device_mean, error * runs.device_loss, "ms")
        often = math.hypot(error, runs.count_error(self.factors.of_runs))
        if runs.wall_s > 0:
            add("share", "share of time", runs.busy_s / runs.wall_s, often, "frac")
        if runs.interval_s > 0:
            a_second, steps, tokens = runs.busy_s / runs.interval_s, self.report.steps_per_s, self.report.tokens_per_s
            if steps is not None and steps.value > LEAST_RATE:
                add("per_step_ms", "a step", 1e3 * a_second / steps.value, math.hypot(often, self._step_error()), "ms")
            if tokens is not None and tokens.value > LEAST_RATE:
                error_of_tokens = self._step_error() if tokens.low == tokens.high else _relative_half(tokens)
                add("per_token_us", "a token", 1e6 * a_second / tokens.value, math.hypot(often, error_of_tokens), "us")
        for measure, value, half in runs.percentiles(self.factors.of_runs):
            slack = _bucket_ms(value)
            figure = Figure(value=value, interval=(value - half - slack, value + half + slack), unit="ms", level="0")
            said = measure.replace("_ms", "")
            self.seen[f"{begin}.{measure}"] = Known(
                figure, f"{what}, {said}", "stages", half, half, slack=slack, test="percentiles"
            )

    def _add_stacks(self) -> None:
        for each in self.report.sorted:
            if each.samples and _is_sound(self.report, each.level):
                begin = f"category.{each.level}."
                for name, figure in each.categories.items():
                    what = f"{name} of the samples of level {each.level}"
                    self._add(f"{begin}{_part(name)}", what, _share(figure.value, each.samples, each.level), "samples")
                zero, effective = _share(0.0, each.samples, each.level), each.samples / self.factors.of(each.level)
                self.groups[begin] = _Group("samples", zero, effective)
        for level, counts in folded_stacks(self.report).items():
            if _is_sound(self.report, level):
                total, begin = sum(counts.values()), f"stack.{level}."
                for folded, count in counts.items():
                    self._add(stack_key(level, folded), folded, _share(count / total, total, level), "stacks")
                effective = total / self.factors.of(level)
                self.groups[begin] = _Group("stacks", _share(0.0, total, level), effective)

    def _add_devices(self) -> None:
        for name, figure in self.report.allocator.items():
            self._add(f"allocator.{_part(name)}", f"allocator: {name}", figure, "threads")
        self._add("host.throttled", "held back by the cgroup's quota", self.report.host.throttled, "threads")
        for gpu in self.report.gpus:
            begin = f"gpu.{gpu.index}."
            for measure in ("utilisation", "power_w", "sm_clock_mhz", "pcie_rx_gb_s", "pcie_tx_gb_s"):
                self._add(begin + measure, f"GPU {gpu.index}: {measure}", getattr(gpu, measure), "threads")
            if gpu.memory_used is not None:
                self._add(begin + "memory_used", "memory used", Figure.read(gpu.memory_used, "5", "bytes"), "threads")
            for name, share in gpu.limits.items():
                what = f"GPU {gpu.index} held back by {name}"
                self._add(f"{begin}limit.{_part(name)}", what, Figure.read(share, "5"), "threads")


_WAITS = {"get_wait": "share of time that the drafter waits", "put_wait": "share of time that a target waits"}


def _spread(figure: Figure, seconds: float, factor: float) -> tuple[float, float, float]:
    """Distances of the 95 % bounds, and the independent samples behind a share of samples (else 0)."""
    value, below, above = figure.value, max(0.0, figure.value - figure.low), max(0.0, figure.high - figure.value)
    if figure.unit == "frac" and figure.samples and 0 <= value <= 1:
        low, high = wilson(value * figure.samples, figure.samples)
        if below + above <= 1.1 * (high - low):  # else it is known to be wider, as from sub-windows
            samples = figure.samples / factor
            low, high = wilson(value * samples, samples)
            return max(0.0, value - low), max(0.0, high - value), samples
    if below or above:
        return below, above, 0.0
    if figure.unit == "frac":
        full, moments = max(1.0, abs(value)), max(1.0, MOMENTS_PER_S * seconds)
        low, high = wilson(abs(value) / full * moments, moments)
        return max(0.0, abs(value) - full * low), max(0.0, full * high - abs(value)), 0.0
    if figure.unit in ("per_s", "count"):
        times = max(seconds, 1e-3) if figure.unit == "per_s" else 1.0
        half = Z_95 * math.sqrt(factor * (abs(value) * times + 1)) / times
        return half, half, 0.0
    return READ_SPREAD * abs(value), READ_SPREAD * abs(value), 0.0


def _share(share: float, samples: int, level: LevelId) -> Figure:
    share = min(max(share, 0.0), 1.0)
    return Figure(value=share, interval=wilson(share * samples, samples), level=level, samples=samples)


def _relative_half(figure: Figure) -> float:
    return (figure.high - figure.low) / 2 / figure.value


def _estimate(value: Any, unit: str = "frac") -> Figure | None:
    """Of a record of `verdict.Estimate`."""
    if not isinstance(value, Mapping):
        return None
    middle, low, high = (_number(value.get(name)) for name in ("value", "low", "high"))
    if middle is None or low is None or high is None:
        return None
    return Figure(value=middle, interval=(low, high), unit=unit, level="0")


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= LARGEST else None  # NaN is not


def _is_sound(report: Report, id: LevelId) -> bool:
    level = report.level(id)
    return level is None or level.in_verdict


def _part(name: str) -> str:
    """A name as a part of a key, which a shell and `check` can read."""
    return re.sub(r"[^\w.+:/-]+", "_", name)[:80] or "_"


def folded_stacks(report: Report) -> dict[LevelId, dict[str, int]]:
    """Samples by stack without lines, as a new version of a file moves them, by level."""
    levels: dict[LevelId, dict[str, int]] = {}
    for stack in report.stacks:
        if stack.count > 0:
            counts, folded = levels.setdefault(stack.level, {}), _fold(stack)
            counts[folded] = counts.get(folded, 0) + stack.count
    return levels


def _fold(stack: Stack) -> str:
    return ";".join(f"{frame.name} ({frame.file})" if frame.file else frame.name for frame in stack.frames)


def stack_key(level: LevelId, folded: str) -> str:
    leaf = folded.rsplit(";", 1)[-1].rsplit(" (", 1)[0]
    digest = hashlib.sha256(folded.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"stack.{level}.{_part(leaf).replace('.', '_')}.{digest}"


# Stages.


@dataclass(frozen=True)
class _Runs:
    """Runs of a stage in a role's records.

    Attributes:
        spread: Standard deviation of a run, of the mean.
        points: p50, p90, p99 and the longest, in ms; of several threads their mean by runs.
        busy_s: Time in it, with the batches that were left out.
        device_loss: By how much fewer runs were measured on the device: root of the ratio.
    """

    count: int
    mean: float
    spread: float
    points: tuple[float, float, float, float]
    busy_s: float
    wall_s: float
    interval_s: float
    batches: float
    device_mean: float | None
    device_loss: float

    @classmethod
    def of(cls, name: str, records: Sequence[Mapping[str, Any]]) -> _Runs | None:
        """None without runs."""
        count, total_ms, busy_s, device_count, device_ms = 0.0, 0.0, 0.0, 0.0, 0.0
        points = [0.0] * 4
        for record in records:
            stage, every = _stages(record).get(name, {}), max(1.0, _field(record, "sampled_one_in"))
            runs = _field(stage, "count")
            total = _field(stage, "total_ms") or runs * _field(stage, "avg_ms")
            count, total_ms, busy_s = count + runs, total_ms + total, busy_s + total / 1e3 * every
            device_count += _field(stage, "device_count")
            device_ms += _field(stage, "device_count") * _field(stage, "device_avg_ms")
            for i, measure in enumerate(("p50_ms", "p90_ms", "p99_ms", "max_ms")):
                points[i] += runs * _field(stage, measure)
        if count < 1 or not 0 < total_ms < LARGEST:
            return None
        mean, (p50, p90, p99, longest) = total_ms / count, (point / count for point in points)
        return cls(
            count=int(count),
            mean=mean,
            spread=_deviation(mean, p50, p90, p99, longest) / mean,
            points=(p50, p90, p99, longest),
            busy_s=busy_s,
            wall_s=math.fsum(_field(record, "wall_s") for record in records),
            interval_s=max(_field(record, "interval_s") for record in records),
            batches=math.fsum(_field(record, "batches") for record in records),
            device_mean=device_ms / device_count if device_count and device_ms > 0 else None,
            device_loss=math.sqrt(max(1.0, count / device_count)) if device_count else 1.0,
        )

    def mean_error(self, factor: float) -> float:
        """Relative half-width of the mean's 95 % interval."""
        if self.count < 2:
            return 3.0
        return t_95(self.count - 1) * self.spread * math.sqrt(factor / self.count)

    def count_error(self, factor: float) -> float:
        """The same of how often it ran: once more or less where it runs in every batch, else by chance."""
        if self.batches and abs(self.count / self.batches - round(self.count / self.batches)) * self.batches <= 2:
            return 1 / self.count
        return Z_95 * math.sqrt(factor / self.count)

    def percentiles(self, factor: float) -> Iterator[tuple[str, float, float]]:
        """Measure, value and half-width in ms, from how dense runs are on either side."""
        p50, p90, p99, longest = self.points
        bucket = _bucket_ms(p90)  # percentiles of one bucket may be as far apart as it is wide
        sides = {
            "p50_ms": (p50, 0.50, (bucket + max(p90 - p50, 0.0)) / 0.4),
            "p90_ms": (p90, 0.90, max((bucket + p90 - p50) / 0.4, (bucket + p99 - p90) / 0.09, 0.0)),
            "p99_ms": (p99, 0.99, max((bucket + p99 - p90) / 0.09, (longest - p99) / 0.01, 0.0)),
        }
        for measure, (value, share, sparse) in sides.items():
            if value > 0 and self.count >= MIN_RUNS[measure]:
                yield measure, value, Z_95 * math.sqrt(factor * share * (1 - share) / self.count) * sparse


def _deviation(mean: float, p50: float, p90: float, p99: float, longest: float) -> float:
    """Standard deviation from percentiles, never below a bucket's.

    Each part of the runs is put at its end that is farther out; the lower half is taken to reach as far down as p90 is
    above p50.
    """
    least = mean / BUCKETS_A_DOUBLING / math.sqrt(12)
    if p50 <= 0:
        return max(mean, least)
    points = ((0.3, max(0.0, 2 * p50 - p90)), (0.3, p50), (0.3, p90), (0.09, p99), (0.01, max(p99, longest)))
    return max(least, math.sqrt(math.fsum(weight * (point - mean) ** 2 for weight, point in points)))


def _bucket_ms(value_ms: float) -> float:
    """Width of the histogram's bucket that a percentile stands in the middle of, and what records are rounded by."""
    if value_ms <= 0:
        return 0.0
    return float(2.0 ** math.floor(math.log2(1e6 * value_ms)) / BUCKETS_A_DOUBLING / 1e6) + ROUNDED_MS


def _by_role(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    roles: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        roles.setdefault(str(record.get("role") or record.get("thread") or "other"), []).append(record)
    return roles


def _stages(record: Mapping[str, Any]) -> Mapping[str, Any]:
    stages = record.get("stages")
    return stages if isinstance(stages, Mapping) else {}


def _field(record: Any, name: str) -> float:
    """A figure of a record, 0 where it has none."""
    value = _number(record.get(name)) if isinstance(record, Mapping) else None
    return value if value is not None and LEAST_RATE <= value <= 1 / LEAST_RATE**2 else 0.0
