"""Two looks held against each other: chance moves nothing, a true change is found, and swapping turns every sign."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.profiling.diff import (
    FAILED,
    FINE,
    NOT_COMPARABLE,
    Change,
    Diff,
    check,
    diff,
    differential_stacks,
    load_report,
)
from paceline.profiling.evidence import (
    AttachError,
    Conclusion,
    Figure,
    Frame,
    Gil,
    Gpu,
    Holder,
    Host,
    Hypothesis,
    Level,
    Queue,
    Report,
    Sorted,
    Stack,
    Thread,
)
from paceline.profiling.statistics import mean_interval, wilson
from paceline.profiling.stats import bucket_of, middle_of

STAGES = {
    "target-0": {"read_batch": 4.0, "h2d_sync": 1.5, "model_forward": 60.0, "put_wait": 20.0},
    "drafter-0": {"get_wait": 2.0, "forward": 25.0, "layers": 18.0, "backward": 45.0, "optimizer": 9.0},
}
"""Mean ms."""
CATEGORIES = {
    "launch": 0.30,
    "sync": 0.25,
    "dispatch": 0.10,
    "python": 0.10,
    "queue_wait": 0.10,
    "lock": 0.08,
    "gc": 0.07,
}


@dataclass(frozen=True)
class Truth:
    """What looks are drawn from.

    Attributes:
        in_a_row: Samples that see the same, one after another.
        slow_run: One in fifty runs of a stage takes this many times as long.
    """

    stages: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: STAGES)
    categories: Mapping[str, float] = field(default_factory=lambda: CATEGORIES)
    samples: int = 400
    runs: int = 200
    in_a_row: int = 1
    slow_run: float = 1.0
    has_halves: bool = True

    def look(self, random: np.random.Generator) -> Report:
        """One look of ten seconds."""
        first, second = self._counts(random), self._counts(random)
        counts = first + second
        halves = tuple(_observed(each, self.samples // 2) for each in (first, second))
        observed = _observed(counts, self.samples)
        for name, truth in (("critical.cpu", 0.6), ("critical.runqueue", 0.02)):
            parts = random.normal(truth, 0.02, 2)
            observed[name] = Figure.read(max(0.0, float(parts.mean())), "1")
            for half, part in zip(halves, parts, strict=True):
                half[name] = Figure.read(max(0.0, float(part)), "1")
        stacks = random.multinomial(self.samples, _zipf(80))
        held = [int(n) for n in random.multinomial(100, [0.3, 0.1, 0.6])]
        steps = _mean(random.normal(10, 0.3, 12), "per_s")
        names = list(self.categories)
        return Report(
            taken_at=0,
            seconds=10,
            pid=1,
            levels=(_level("2", 100), _level("4", self.samples)),
            threads=tuple(
                Thread(pid=1, tid=i, name=name, cpu=Figure.read(float(random.normal(cpu, 0.02)), "1"))
                for i, (name, cpu) in enumerate({"main": 0.1, "worker": 0.5, "drafter": 0.8}.items())
            ),
            gil=Gil(
                pid=1,
                share=(held[0] + held[1]) / 100,
                interval=wilson(held[0] + held[1], 100),
                samples=100,
                holders=tuple(
                    Holder(tid=i, name=f"holder-{i}", share=n / 100, interval=wilson(n, 100))
                    for i, n in enumerate(held[:2])
                ),
            ),
            stacks=tuple(_stack(f"f{i}", int(n)) for i, n in enumerate(stacks) if n),
            sorted=(
                Sorted(
                    level="4",
                    samples=self.samples,
                    categories={name: _share(n, self.samples) for name, n in zip(names, counts, strict=True) if n},
                    unmatched=_share(0, self.samples),
                ),
            ),
            stages=tuple(self._record(role, stages, random) for role, stages in self.stages.items()),
            queue=Queue(
                depth=8,
                targets=1,
                waiting=float(random.normal(4, 0.3)),
                get_wait=_mean(random.normal(0.05, 0.02, 12)),
                put_wait=_mean(random.normal(0.20, 0.03, 12)),
                batches_per_s=float(random.normal(10, 0.1)),
            ),
            pipeline={"kind": "consumer-bound", "target_per_s": 12.5, "drafter_per_s": 10.5, "gain": None},
            allocator={"num_device_alloc": Figure.read(float(random.poisson(30)) / 10, "6", "per_s")},
            gpus=(Gpu(index=0, name="G", power_w=_mean(random.normal(500, 20, 12), "W", "5")),),
            observations=observed,
            halves=halves if self.has_halves else (),
            steps_per_s=steps,
            tokens_per_s=_scaled(steps, 8192),
        )

    def _counts(self, random: np.random.Generator) -> np.ndarray:
        half = self.samples // 2
        return self.in_a_row * random.multinomial(half // self.in_a_row, list(self.categories.values()))

    def _record(self, role: str, stages: Mapping[str, float], random: np.random.Generator) -> dict[str, Any]:
        return {
            "role": role,
            "thread": role,
            "interval_s": 10.0,
            "wall_s": 10.0,
            "batches": self.runs,
            "stages": {name: self._runs(ms, random) for name, ms in stages.items()},
        }

    def _runs(self, ms: float, random: np.random.Generator) -> dict[str, float]:
        times = ms * random.lognormal(0, 0.1, self.runs)
        times[random.random(self.runs) < 0.02] *= self.slow_run
        p50, p90, p99 = (middle_of(bucket_of(int(1e6 * t))) / 1e6 for t in np.quantile(times, (0.5, 0.9, 0.99)))
        total, longest = float(times.sum()), float(times.max())
        return {"count": self.runs, "avg_ms": total / self.runs, "max_ms": longest, "p50_ms": p50, "p90_ms": p90,
                "p99_ms": min(p99, longest), "total_ms": total, "device_count": self.runs // 4,
                "device_avg_ms": float(times[: self.runs // 4].mean())}  # fmt: skip


def _observed(counts: np.ndarray, samples: int) -> dict[str, Figure]:
    return {f"critical.{i}": _share(n, samples) for i, n in enumerate(counts)}


def _share(hits: float, samples: int) -> Figure:
    return Figure(value=hits / samples, interval=wilson(hits, samples), level="4", samples=samples)


def _mean(values: np.ndarray, unit: str = "frac", level: Any = "0") -> Figure:
    mean, low, high = mean_interval([float(value) for value in values])
    return Figure(value=mean, interval=(low, high), unit=unit, level=level)


def _scaled(figure: Figure, by: float) -> Figure:
    return figure.model_copy(update={"value": by * figure.value, "interval": (by * figure.low, by * figure.high)})


def _zipf(n: int) -> list[float]:
    weights = [1 / (i + 1) for i in range(n)]
    return [weight / sum(weights) for weight in weights]


def _level(id: Any, samples: int, **more: Any) -> Level:
    return Level(id=id, name=id, ok=True, seconds=10, samples=samples, **more)


def _stack(leaf: str, count: int, line: int = 1) -> Stack:
    frames = (Frame(name="step", file="loop.py", line=line), Frame(name=leaf, file="x.py", line=line))
    return Stack(level="4", pid=1, tid=count % 3, frames=frames, count=count)


def pairs_that_moved(truth: Truth, seeds: int, after: Truth | None = None) -> list[list[str]]:
    """Keys that moved between two looks, for each seed."""
    found = []
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        found.append([change.key for change in diff(truth.look(random), (after or truth).look(random)).moved])
    return found


@pytest.mark.parametrize(
    "truth",
    [
        Truth(),
        Truth(has_halves=False),
        Truth(slow_run=15),
        Truth(runs=30, samples=100),
        Truth(in_a_row=4),
        Truth(in_a_row=4, has_halves=False),
    ],
    ids=["plain", "no halves", "slow runs", "short look", "samples in a row", "in a row, no halves"],
)
def test_two_looks_at_the_same_thing_rarely_show_a_change(truth: Truth) -> None:
    """Fewer than 5 % of pairs drawn from one truth have any change called moved, whatever its samples are like."""
    found = pairs_that_moved(truth, 100)
    assert sum(bool(keys) for keys in found) < 5, [keys for keys in found if keys]


def _changed() -> tuple[Truth, Truth]:
    truth = Truth(samples=1000, runs=400)
    stages = {role: dict(means) for role, means in STAGES.items()}
    stages["drafter-0"]["backward"] *= 1.10
    return truth, replace(truth, stages=stages, categories={**CATEGORIES, "dispatch": 0.2, "launch": 0.2})


def test_a_slower_stage_and_a_category_that_doubled_are_found() -> None:
    """A stage slower by a tenth and 10 % of 1,000 samples that become 20 % are found in more than nine of ten pairs."""
    found = pairs_that_moved(*_changed()[:1], seeds=100, after=_changed()[1])
    assert sum("stage.drafter-0.backward.avg_ms" in keys for keys in found) > 90
    assert sum("category.4.dispatch" in keys for keys in found) > 90


def test_most_of_what_moved_is_what_was_changed() -> None:
    """Beside the changed stage and the two categories hardly anything is called moved."""
    truth, after = _changed()
    others = [
        key
        for keys in pairs_that_moved(truth, 60, after)
        for key in keys
        if not key.startswith(("stage.drafter-0.backward.", "category.4.", "observation.critical."))
    ]
    assert len(others) < 6, others


# Properties.

floats = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 0.1, 0.5, 1.0, 1e-30])
names = st.sampled_from(["a", "b", "gil.share", "odd <name> [*]", "ü"])


@st.composite
def figures(draw: st.DrawFn) -> Figure:
    """Any figure, also with an interval that does not fit."""
    value, samples = draw(floats), draw(st.none() | st.integers(0, 500))
    low, high = draw(st.sampled_from([(value, value), (value - 1, value + 2), (0.0, 1.0)]))
    unit = draw(st.sampled_from(["frac", "per_s", "count", "ms", "ratio"]))
    return Figure(
        value=value, interval=(low, high), unit=unit, level=draw(st.sampled_from(["0", "4"])), samples=samples
    )


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """A record of stages, with fields missing or odd."""
    measures = ("count", "avg_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms", "total_ms", "device_count", "device_avg_ms")
    stage = st.dictionaries(st.sampled_from(measures), floats | st.none() | st.integers(0, 1000))
    stages = draw(st.dictionaries(names, stage, max_size=3))
    rest = draw(st.dictionaries(st.sampled_from(["interval_s", "wall_s", "batches", "sampled_one_in"]), floats))
    return {"role": draw(st.sampled_from(["drafter-0", "target-0"])), "stages": stages, **rest}


@st.composite
def reports(draw: st.DrawFn) -> Report:
    """A report with something of everything, or of nothing."""
    of_figures = st.dictionaries(names, figures(), max_size=4)
    outcome = st.sampled_from(["supported", "refuted", "undecided"])
    counts = draw(st.dictionaries(names, st.integers(0, 300), max_size=4))
    share = draw(st.floats(0, 1))
    return Report(
        taken_at=0,
        seconds=draw(st.sampled_from([0.0, 1.0, 10.0])),
        pid=1,
        run=draw(st.dictionaries(st.sampled_from(["config_hash", "tokens_per_batch", "roles"]), st.integers(0, 2))),
        host=Host(cpu_model=draw(st.sampled_from(["", "A", "B"]))),
        levels=tuple(_level("4", n, in_verdict=n != 7) for n in draw(st.lists(st.integers(0, 9000), max_size=1))),
        threads=tuple(Thread(pid=1, tid=1, name=name, cpu=figure) for name, figure in draw(of_figures).items()),
        gil=Gil(pid=1, share=share, interval=(0, 1), samples=draw(st.integers(0, 300)), cpu_share=share / 2),
        stacks=tuple(_stack(name, count) for name, count in counts.items()),
        sorted=(
            Sorted(level="4", samples=draw(st.integers(0, 300)), categories=draw(of_figures), unmatched=_share(0, 9)),
        ),
        stages=tuple(draw(st.lists(records(), max_size=2))),
        pipeline=draw(st.dictionaries(st.sampled_from(["gain", "target_per_s", "batches_per_s"]), floats | st.none())),
        observations=draw(of_figures),
        halves=tuple(draw(st.lists(of_figures, max_size=2))),
        hypotheses=tuple(
            Hypothesis(id=name, title="", outcome=each, score=0)
            for name, each in draw(st.dictionaries(names, outcome)).items()
        ),
        conclusion=Conclusion(line="", side=draw(names), cause=draw(names)),
        tokens_per_s=draw(st.none() | figures()),
        steps_per_s=draw(st.none() | figures()),
    )


@settings(max_examples=60, deadline=None)
@given(reports())
def test_a_report_does_not_differ_from_itself(report: Report) -> None:
    """Nothing has moved, nothing is another, and no figure is missing."""
    found = diff(report, report)
    assert not found.moved and found.verdict is None and found.comparable
    assert found.differences_of_setting == () and found.only_before == found.only_after == ()
    assert all(change.delta == 0 and not change.alone and change.direction == "same" for change in found.changes)
    assert check(found, ["any", "verdict"]) == []


def _turned(change: Change) -> Change:
    other = {"up": "down", "down": "up", "same": "same"}[change.direction]
    update = {
        "before": change.after,
        "after": change.before,
        "delta": -change.delta,
        "interval": (-change.interval[1], -change.interval[0]),
        "direction": other,
        "relative": None,
        "what": "",
    }
    return change.model_copy(update=update)


@settings(max_examples=60, deadline=None)
@given(reports(), reports())
def test_swapped_reports_turn_every_sign_and_nothing_else(a: Report, b: Report) -> None:
    """All differences are exact negatives, the same figures have moved, and verdict and setting are swapped."""
    there, back = diff(a, b), diff(b, a)
    expected = [change.model_copy(update={"relative": None, "what": ""}) for change in there.changes]
    assert [_turned(change) for change in back.changes] == expected
    assert there.comparable == back.comparable
    assert (there.only_before, there.only_after) == (back.only_after, back.only_before)
    assert there.verdict == (back.verdict and back.verdict[::-1])
    assert {(each.what, each.before, each.after) for each in there.differences_of_setting} == {
        (each.what, each.after, each.before) for each in back.differences_of_setting
    }
    assert Diff.model_validate_json(there.model_dump_json(by_alias=True)) == there
    assert there.text(anyway=True) and there.text()


def test_swapped_looks_at_a_changed_run_turn_every_sign() -> None:
    """The same holds where much has moved."""
    truth, after = _changed()
    random = np.random.default_rng(1)
    a, b = truth.look(random), after.look(random)
    there, back = diff(a, b), diff(b, a)
    assert there.moved and {c.key: -c.delta for c in there.moved} == {c.key: c.delta for c in back.moved}


# Single rules.


def _report(**more: Any) -> Report:
    return Report(taken_at=0, seconds=10, pid=1, **more)


def _sure(value: float, unit: str = "per_s", half: float = 1e-4) -> Figure:
    return Figure(value=value, interval=(value * (1 - half), value * (1 + half)), unit=unit, level="0")


def _moved(a: Report, b: Report) -> set[str]:
    return {change.key for change in diff(a, b).moved}


@pytest.mark.parametrize(("after", "has_moved"), [(102.0, False), (104.0, True), (97.5, False), (96.0, True)])
def test_a_change_below_three_percent_is_none(after: float, has_moved: bool) -> None:
    """However sure it is, a small change has not moved."""
    assert bool(_moved(_report(tokens_per_s=_sure(100)), _report(tokens_per_s=_sure(after)))) is has_moved


@pytest.mark.parametrize(("after", "has_moved"), [(0.004, False), (0.02, True)])
def test_a_share_near_0_must_move_by_half_a_point(after: float, has_moved: bool) -> None:
    """A share that doubles from next to nothing to next to nothing has not moved."""
    a, b = (_report(observations={"x": _sure(value, "frac")}) for value in (0.001, after))
    assert bool(_moved(a, b)) is has_moved


def test_a_change_within_what_the_halves_differ_by_is_none() -> None:
    """A look that drifts by itself as much as it differs from the other says nothing about the other."""
    halves = ({"x": _sure(90)}, {"x": _sure(110)})
    a = _report(observations={"x": _sure(100)}, halves=halves)
    assert _moved(a, _report(observations={"x": _sure(115)})) == set()
    assert _moved(a, _report(observations={"x": _sure(125)})) == {"observation.x"}
    assert diff(a, _report(observations={"x": _sure(125)})).changes[0].noise_floor == 20


def _with_p50(p50: float) -> Report:
    stage = {"count": 1000, "avg_ms": 10.0, "p50_ms": p50, "p90_ms": p50, "p99_ms": p50, "total_ms": 10_000.0}
    return _report(stages=({"role": "drafter-0", "wall_s": 10.0, "stages": {"forward": stage}},))


def test_a_percentile_that_falls_into_the_next_bucket_has_not_moved() -> None:
    """Percentiles are known to a bucket; two buckets are a change."""
    first, second, third = (middle_of(bucket_of(10_000_000) + i) / 1e6 for i in range(3))
    assert _moved(_with_p50(first), _with_p50(second)) == set()
    assert "stage.drafter-0.forward.p50_ms" in _moved(_with_p50(first), _with_p50(third))


def test_figures_of_one_report_alone_are_named_and_not_compared() -> None:
    """What is missing is no change to 0."""
    found = diff(_report(tokens_per_s=_sure(1)), _report(steps_per_s=_sure(1)))
    assert found.changes == () and (found.only_before, found.only_after) == (("tokens_per_s",), ("steps_per_s",))
    assert "2 are in one report only" in found.text()


def test_a_category_that_was_not_seen_is_none_of_the_samples() -> None:
    """A level that looked and did not see it says 0, and not nothing."""

    def look(**hits: int) -> Report:
        categories = {name: _share(n, 2000) for name, n in hits.items()}
        return _report(sorted=(Sorted(level="4", samples=2000, categories=categories, unmatched=_share(0, 2000)),))

    found = diff(look(sync=2000), look(sync=1000, gc=1000))
    change = next(change for change in found.changes if change.key == "category.4.gc")
    assert change.moved and change.before.value == 0 and change.relative is None and change.test == "two proportions"
    assert check(found, ["category.4.gc>+5%", "category.*.sync<-0.4", "category.4.gc>+0.6"]) == [
        f"category.4.gc>+5%: {change.text()}",
        f"category.*.sync<-0.4: {found.moved[1].text()}",
    ]


def test_another_source_or_unit_is_marked_and_not_compared() -> None:
    """Python stacks and native ones do not see the same."""
    a = _report(observations={"x": Figure.read(0.5, "3")})
    found = diff(a, _report(observations={"x": Figure.read(0.1, "4")}))
    assert found.changes == () and found.comparable
    assert found.differences_of_setting[0].text() == "source of observation.x: level 3, frac -> level 4, frac"


def test_a_disturbed_level_is_not_compared() -> None:
    """Stacks of a level that is too disturbed to judge by move nothing, and the setting says so."""
    a = Truth(samples=1000).look(np.random.default_rng(1))
    b = a.model_copy(update={"levels": (_level("2", 100), _level("4", 1000, in_verdict=False))})
    found = diff(a, b)
    assert not [change for change in found.changes if change.key.startswith(("stack.", "category."))]
    assert "level 4: taken -> taken, but too disturbed to judge by" in found.text()


def test_threads_are_matched_by_role_and_summed() -> None:
    """Numbers of threads are others in every process; helpers of one name count together."""

    def look(tid: int, cpu: float) -> Report:
        helpers = [Thread(pid=1, tid=tid + i, name="pool", cpu=Figure.read(cpu, "1")) for i in range(4)]
        return _report(
            threads=(*helpers, Thread(pid=1, tid=tid + 9, name="x", role="drafter-0", cpu=Figure.read(cpu, "1")))
        )

    found = diff(look(10, 0.1), look(50, 0.9))
    assert [change.key for change in found.changes] == ["thread.drafter-0.cpu", "thread.pool.cpu"]
    assert found.changes[1].after.value == pytest.approx(3.6)
    assert all(change.moved for change in found.changes)


def test_moved_lines_of_code_are_the_same_stack() -> None:
    """A stack's key has no line numbers, so a new version of a file changes nothing."""
    a, b = (_report(stacks=(_stack("f", 60, line), _stack("g", 40, line))) for line in (1, 200))
    assert all(change.delta == 0 for change in diff(a, b).changes) and len(diff(a, b).changes) == 2


def test_a_stack_that_moved_is_shown_with_its_last_frames() -> None:
    """The leaf stands first, as its key alone says little."""
    a, b = (_report(stacks=(_stack("f", 1000 - n), _stack("g", n))) for n in (100, 600))
    lines = diff(a, b).text().splitlines()
    assert lines[2].startswith("  stack.4.g.") and lines[3] == "    g (x.py) < step (loop.py)"


@pytest.mark.parametrize(
    ("samples", "seconds", "has_moved"), [(400, 0, False), (1600, 0, True), (1600, 10, True), (1600, 1, False)]
)
def test_samples_that_follow_each_other_closely_count_for_less(samples: int, seconds: float, has_moved: bool) -> None:
    """A thousand samples of one second of a thread are no thousand looks; 20 a second are, at most, over four."""

    def look(share: float) -> Report:
        hits = {"sync": share, "python": 1 - share}
        categories = {name: _share(part * samples, samples) for name, part in hits.items()}
        levels = (Level(id="4", name="4", ok=True, seconds=seconds, samples=samples),)
        stacks = tuple(Stack(level="4", pid=1, tid=tid, frames=(), count=samples // 20) for tid in range(20))
        each = Sorted(level="4", samples=samples, categories=categories, unmatched=_share(0, samples))
        return _report(levels=levels, sorted=(each,), stacks=stacks if seconds == 10 else stacks[:1])

    assert ("category.4.sync" in _moved(look(0.1), look(0.2))) is (has_moved)


def test_halves_that_differ_by_more_than_chance_widen_every_interval() -> None:
    """A run whose halves differ as a twentieth of the samples would is judged by a twentieth of them."""

    def look(share: float, drift: float) -> Report:
        observed = {f"x{i}": _share(share * 2000, 2000) for i in range(6)}
        halves = tuple({key: Figure.read(share + by, "4") for key in observed} for by in (drift, -drift))
        return _report(observations=observed | {"y": _share(1000 * share, 2000)}, halves=halves)

    assert "observation.y" in _moved(look(0.4, 0.005), look(0.6, 0.005))
    assert "observation.y" not in _moved(look(0.4, 0.06), look(0.6, 0.06))


def test_stacks_for_a_flame_graph_are_shares_that_add_up() -> None:
    """Every stack of either is there, also the rare ones, and says whether it moved."""
    a = _report(stacks=(_stack("f", 999), _stack("rare", 1)))
    b = _report(stacks=(_stack("f", 500), _stack("new", 500)))
    shares = {each.folded.rsplit(";")[-1]: each for each in differential_stacks(a, b)}
    assert set(shares) == {"f (x.py)", "rare (x.py)", "new (x.py)"}
    assert math.isclose(sum(each.before for each in shares.values()), 1)
    assert math.isclose(sum(each.after for each in shares.values()), 1)
    assert [shares[f"{name} (x.py)"].moved for name in ("f", "rare", "new")] == [True, False, True]


# The setting and the verdict.


@pytest.mark.parametrize(
    ("before", "after", "refuses"),
    [
        ({"host": Host(cpu_model="A")}, {"host": Host(cpu_model="B")}, True),
        ({"host": Host(cores=2)}, {"host": Host(cores=4)}, True),
        ({"gpus": (Gpu(index=0, name="H100"),)}, {"gpus": (Gpu(index=0, name="H200"),)}, True),
        ({"run": {"tokens_per_batch": 8192}}, {"run": {"tokens_per_batch": 4096}}, True),
        ({"run": {"max_length": 3072}}, {"run": {"max_length": 1024}}, True),
        ({"run": {"device": "cuda"}}, {"run": {"device": "cpu"}}, True),
        ({"run": {"config_hash": "a"}}, {"run": {"config_hash": "b"}}, False),
        ({"run": {"roles": ["drafter-0"]}}, {"run": {"roles": ["drafter-0", "target-0"]}}, False),
        ({"versions": {"torch": "2.11"}}, {"versions": {"torch": "2.13"}}, False),
        ({"gpus": (Gpu(index=0, name="G", driver="1"),)}, {"gpus": (Gpu(index=0, name="G", driver="2"),)}, False),
        ({"levels": (_level("4", 100),)}, {"levels": (_level("4", 900),)}, False),
        ({"levels": (_level("4", 100),)}, {}, False),
    ],
)
def test_another_setting_is_marked_or_refused(before: dict[str, Any], after: dict[str, Any], refuses: bool) -> None:
    """Other hardware or other batches make times incomparable; other versions, configurations and levels are said."""
    found = diff(_report(**before), _report(**after))
    (difference,) = found.differences_of_setting
    assert difference.refuses is refuses and found.comparable is not refuses
    assert difference.text() in found.text()
    assert found.exit_code() == (NOT_COMPARABLE if refuses else FINE)
    assert found.exit_code(["x"], anyway=True) == FAILED and found.exit_code(anyway=True) == FINE
    assert ("not comparable" in found.text()) is refuses and "not comparable" not in found.text(anyway=True)


def test_what_one_report_does_not_know_is_no_difference() -> None:
    """A look that could not read the hardware does not refuse to be compared."""
    a = _report(host=Host(cpu_model="A", cores=4), gpus=(Gpu(index=0, name="G"),), run={"tokens_per_batch": 1})
    assert diff(a, _report()).comparable


def _judged(side: str, cause: str, **outcomes: Any) -> Report:
    hypotheses = tuple(Hypothesis(id=id, title=id, outcome=each, score=0) for id, each in outcomes.items())
    return _report(conclusion=Conclusion(line=f"{side}!", side=side, cause=cause), hypotheses=hypotheses)


def test_a_changed_verdict_comes_first_with_what_it_was() -> None:
    """The text begins with the verdict, before the setting and all figures."""
    a = _judged("producer-bound", "launch", launch="supported", gil="refuted", gc="refuted")
    b = _judged("consumer-bound", "gil", launch="refuted", gil="supported", gc="refuted")
    a = a.model_copy(update={"versions": {"torch": "1"}, "tokens_per_s": _sure(100)})
    found = diff(a, b.model_copy(update={"versions": {"torch": "2"}, "tokens_per_s": _sure(50)}))
    assert found.text().splitlines() == [
        "verdict: producer-bound, launch -> consumer-bound, gil; gil refuted -> supported; launch supported -> refuted",
        "  before: producer-bound!",
        "  after: consumer-bound!",
        "another setting:",
        "  version of torch: 1 -> 2",
        "moved:",
        "  tokens_per_s: 100 a second -> 50 a second, -50 % [-50 to -50]",
        "0 of 1 compared figures did not move beyond noise",
    ]
    assert len(check(found, ["verdict"])) == 1 and len(check(found, ["any"])) == 2


def test_a_hypothesis_that_is_only_less_sure_is_shown_and_fails_nothing() -> None:
    """Undecided is no other answer, so an expectation on the verdict stands; supported instead of refuted is."""
    a = _judged("balanced", "gil", gil="supported", gc="refuted")
    found = diff(a, _judged("balanced", "gil", gil="supported", gc="undecided"))
    assert found.verdict is not None and "gc refuted -> undecided" in found.text()
    assert check(found, ["verdict", "any"]) == []
    assert check(diff(a, _judged("balanced", "gil", gil="supported", gc="supported")), ["verdict"])


# Expectations.


@pytest.mark.parametrize(
    ("expression", "fails"),
    [
        ("tokens_per_s<-3%", True),
        ("tokens_per_s < -3 %", True),
        ("tokens_per_s<-30%", False),
        ("tokens_per_s>+3%", False),
        ("tokens_per_s<-19.5", True),
        ("tokens_per_s<-20.5", False),
        ("tokens_per_*<-3%", True),
        ("steps_per_s<-0%", False),
        ("stage.drafter-0.forward.avg_ms>+5%", True),
        ("drafter.forward.avg>+5%", True),
        ("drafter-0.*.avg_ms>+5%", True),
        ("*.forward.avg>+0.5", True),
        ("drafter.forward.avg>+60%", False),
        ("any", True),
        ("verdict", False),
    ],
)
def test_an_expectation_fails_beyond_noise_and_its_amount_alone(expression: str, fails: bool) -> None:
    """`steps_per_s` has changed as well, but not by more than noise."""

    def look(tokens: float, steps: float, ms: float) -> Report:
        stage = {"count": 1000, "avg_ms": ms, "p50_ms": ms, "p90_ms": ms, "p99_ms": ms, "total_ms": ms * 1000}
        records = ({"role": "drafter-0", "thread": "d", "stages": {"forward": stage}},)
        return _report(tokens_per_s=_sure(tokens), steps_per_s=_sure(steps, half=0.5), stages=records)

    failed = check(diff(look(100, 10, 4), look(80, 9, 6)), [expression])
    assert bool(failed) is fails
    assert all(each.startswith(f"{expression}: ") and " -> " in each for each in failed)


@pytest.mark.parametrize(
    "expression", ["", "tokens_per_s", "tokens_per_s>5%", "tokens_per_s>=+5%", "x>+5%%", "a b>+1", ">+1"]
)
def test_an_expectation_that_cannot_be_read_is_refused(expression: str) -> None:
    """An amount needs its sign, and the message has an example."""
    with pytest.raises(AttachError, match="no expectation; wanted is a key"):
        check(diff(_report(), _report()), [expression])


def test_an_unknown_key_names_those_near_it() -> None:
    """A slip of the pen is shown its likely meaning; a key of one report alone is said to be that."""
    a = _report(tokens_per_s=_sure(1), steps_per_s=_sure(1), observations={"old": _sure(1)})
    found = diff(a, _report(tokens_per_s=_sure(1), steps_per_s=_sure(1)))
    with pytest.raises(AttachError, match=r"'token_per_s' is no compared figure.*near it are tokens_per_s"):
        check(found, ["token_per_s<-3%"])
    with pytest.raises(AttachError, match=r"only one of them has observation\.old"):
        check(found, ["old<-3%"])


# Files.


def test_a_written_report_is_read_as_it_was(tmp_path: Path) -> None:
    """What was dumped comes back, field for field."""
    report = Truth().look(np.random.default_rng(0))
    path = tmp_path / "a.json"
    path.write_text(report.model_dump_json(by_alias=True))
    assert load_report(path) == report


def _fields(**more: Any) -> str:
    return json.dumps({"schema": "paceline.attach/1", "taken_at": 0, "seconds": 1, "pid": 1, **more})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("\x00\xff", "no JSON"),
        ("[" * 100_000, "no JSON"),
        (_fields(stages=[{"x": math.nan}]), "no JSON"),
        (_fields(pipeline={"x": 10**400}), "no JSON"),
        (_fields(seconds=1)[:-1] + ', "notes": [1e999]}', "no JSON"),
        (_fields(notes=["\ud800"]), "no JSON"),
        ("[]", "names no schema"),
        ("{}", "names no schema"),
        ('{"schema": "paceline.attach/2"}', "schema 'paceline.attach/2'"),
        ('{"schema": {"a": 1}}', "'paceline.attach/1' is wanted"),
        (_fields(pid="x", seconds=None), "pid: .*seconds: |seconds: .*pid: "),
        (_fields(levels=[{"id": "9"}]), r"levels\.0"),
    ],
)
def test_what_is_no_report_is_refused_with_the_reason(tmp_path: Path, content: str, says: str) -> None:
    """Every file that is not a report of this schema is an AttachError that names it."""
    path = tmp_path / "a.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(AttachError, match=says) as error:
        load_report(path)
    assert str(path) in str(error.value) and "wanted" in str(error.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """Nothing, a folder, and a page in HTML."""
    with pytest.raises(AttachError, match="No such file"):
        load_report(tmp_path / "none.json")
    with pytest.raises(AttachError, match="is no file"):
        load_report(tmp_path)
    (tmp_path / "a.html").write_text("<html>")
    with pytest.raises(AttachError, match="beside a page in HTML"):
        load_report(tmp_path / "a.html")


def test_a_report_that_is_too_big_is_not_read(tmp_path: Path) -> None:
    """Its size is enough to refuse it."""
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(200 * 1000**2 + 1)
    with pytest.raises(AttachError, match="has 200 MB"):
        load_report(path)
