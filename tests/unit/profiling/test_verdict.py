"""The verdict on the pipeline, against simulated pipelines whose truth is known.

Every figure here comes from fixed seeds, so that a test that passes once passes always.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from paceline.profiling.verdict import Verdict, Window, drop_warm_up, judge, merge, windows_of
from tests.unit.profiling.simulate import Pipeline, Truth, simulate, throughput, truth

FASTER_TARGETS, FASTER_DRAFTER = "producer-bound", "consumer-bound"
SIDES = {FASTER_TARGETS, FASTER_DRAFTER}

CASES = {
    "one steady target": Pipeline(cv=0.1, depth=2),
    "one target": Pipeline(depth=3),
    "one target, deep": Pipeline(depth=12),
    "one erratic target": Pipeline(cv=1.0, depth=6),
    "two targets": Pipeline(depth=4, targets=2),
    "four steady targets": Pipeline(cv=0.1, depth=6, targets=4),
    "four targets": Pipeline(depth=6, targets=4),
    "four targets, four batches a step": Pipeline(depth=6, targets=4, micro=4),
    "eight targets, two batches a step": Pipeline(depth=10, targets=8, micro=2),
    "four targets, three batches held back": Pipeline(depth=8, targets=4, min_ready=3),
}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def verdict(pipeline: Pipeline, steps: int, seed: int = 0) -> Verdict:
    """Of so many steps after the warm-up."""
    return judged(drop_warm_up(simulate(pipeline, steps + 2, seed)), pipeline)


def judged(windows: list[Window], pipeline: Pipeline) -> Verdict:
    return judge(windows, targets=pipeline.targets, queue_depth=pipeline.depth, batches_per_step=pipeline.micro)


@cache
def verdicts(pipeline: Pipeline, batches: int, seeds: int) -> list[Verdict]:
    return [verdict(pipeline, batches // pipeline.micro, seed) for seed in range(seeds)]


@cache
def long_run(pipeline: Pipeline) -> Truth:
    return truth(pipeline, 12_000 // pipeline.micro)


def enough(case: Pipeline) -> int:
    """Batches that tell a ratio of 0.8 from 1: their number goes with the square of the spread."""
    return 3000 if case.cv == 1.0 else 600


def steady(g: float = 0.0, p: float = 0.0, *, number: int = 40, **others: float) -> list[Window]:
    """Windows of a second and four batches with these shares of waiting, a little scattered."""
    scatter = (0.98, 1.03, 0.99, 1.0)
    return [
        Window(1.0, 4.0, g * scatter[i % 4], p * scatter[i % 3], **others)  # type: ignore[arg-type]
        for i in range(number)
    ]


# The simulation itself.


@pytest.mark.parametrize("ratio", [0.8, 1.0, 1.25])
@pytest.mark.parametrize("depth", [2, 6])
def test_the_simulation_agrees_with_the_closed_form(depth: int, ratio: float) -> None:
    """With exponential times one target and the drafter are a queue whose throughput and waits are known exactly."""
    drafter_waits, target_waits = exponential_waits(depth, ratio)
    windows = simulate(Pipeline(ratio=ratio, depth=depth, is_exponential=True), 30_000, 1)
    seconds = sum(window.seconds for window in windows)
    assert sum(window.get_wait_s for window in windows) / seconds == pytest.approx(drafter_waits, abs=0.012)
    assert sum(window.put_wait_s for window in windows) / seconds == pytest.approx(target_waits, abs=0.012)
    assert len(windows) / seconds == pytest.approx(1.0 - drafter_waits, rel=0.02)


def exponential_waits(depth: int, ratio: float) -> tuple[float, float]:
    """Shares in which none of the ``depth + 2`` places (one on each side of the queue) and all of them are taken."""
    weights = [(1.0 / ratio) ** taken for taken in range(depth + 3)]
    return weights[0] / sum(weights), weights[-1] / sum(weights)


def test_the_simulation_blocks_a_target_that_is_a_window_ahead() -> None:
    """Without spread every moment can be told: a target of half the drafter's time waits for the other half of it."""
    windows = simulate(Pipeline(ratio=0.5, cv=0.0, depth=2), 20, 0)[5:]
    assert {(window.seconds, window.get_wait_s, window.put_wait_s, window.queue) for window in windows} == {
        (1.0, 0.0, 0.5, 2)
    }


def test_the_simulation_knows_what_stood_ready() -> None:
    """A queue that must be full before a batch is taken holds all but one while the drafter waits for the last."""
    slow = Pipeline(ratio=2.0, cv=0.0, depth=3, min_ready=3)
    window = simulate(slow, 20, 0)[-1]
    assert window.get_wait_s == window.ready_wait_s == pytest.approx(1.0)
    assert simulate(replace(slow, min_ready=1), 20, 0)[-1].ready_wait_s == 0.0


# Which side.


@by_case
def test_the_slower_side_is_named(case: Pipeline) -> None:
    """At a clear ratio of their times at least 95 % of the seeds name the slower side, and none the other one."""
    kinds: Counter[bool] = Counter()
    for ratio in (0.6, 0.8, 1.25, 1.6):
        slower, faster = (FASTER_TARGETS, FASTER_DRAFTER) if ratio > 1.0 else (FASTER_DRAFTER, FASTER_TARGETS)
        found = [each.kind for each in verdicts(replace(case, ratio=ratio), enough(case), 10)]
        assert faster not in found
        kinds.update(kind == slower for kind in found)
    assert kinds[True] >= 0.95 * kinds.total()


@by_case
@pytest.mark.parametrize("ratio", [0.9, 1.1])
def test_the_faster_side_is_not_blamed(case: Pipeline, ratio: float) -> None:
    """Where a tenth is between them and the record is short, the verdict may stay open but not be the wrong side."""
    faster = FASTER_DRAFTER if ratio > 1.0 else FASTER_TARGETS
    assert faster not in [each.kind for each in verdicts(replace(case, ratio=ratio), 240, 8)]


@pytest.mark.parametrize("seed", range(5))
def test_out_of_order_batches_do_not_clear_slow_targets(seed: int) -> None:
    """Slow targets leave later batches in the queue most of the time that the drafter waits, and stay the limit."""
    pipeline = Pipeline(ratio=1.25, depth=6, targets=4)
    found = verdict(pipeline, 600, seed)
    assert found.ready_frac > 0.5
    assert found.kind == FASTER_TARGETS
    in_time = throughput(replace(pipeline, depth=50), 8_000, seed) / long_run(pipeline).batches_per_s
    assert in_time == pytest.approx(1.0, abs=0.02), "a queue that never holds anything back gives nothing"


# What it would give.


@by_case
@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_the_gain_is_that_of_an_infinitely_fast_side(case: Pipeline, ratio: float) -> None:
    """The predicted gain is within 5 % of the simulated one over the seeds, and each within 8 %."""
    pipeline = replace(case, ratio=ratio)
    known = long_run(pipeline)
    real = known.fast_targets if ratio > 1.0 else known.fast_drafter
    gains = [each.gain for each in verdicts(pipeline, enough(case), 10) if each.kind in SIDES]
    assert gains
    assert sum(gain.value for gain in gains) / len(gains) == pytest.approx(real, rel=0.05)
    for gain in gains:
        assert gain.low <= gain.value <= gain.high
        assert gain.value == pytest.approx(real, rel=0.08)


def test_the_gain_of_a_faster_drafter_is_an_upper_limit_where_targets_wait_for_each_other() -> None:
    """Erratic targets of which one holds up the rest gain less from a fast drafter than predicted, and never more."""
    pipeline = Pipeline(ratio=0.6, cv=1.0, depth=6, targets=4)
    found = verdict(pipeline, 4000)
    assert found.kind == FASTER_DRAFTER
    assert "up to" in found.reason
    assert found.gain is not None
    assert found.gain.low > 1.05 * long_run(pipeline).fast_drafter


@by_case
def test_capacities_are_those_of_each_side_alone(case: Pipeline) -> None:
    """The drafter's capacity is one batch a second, as simulated, and that of the targets is the ratio's inverse."""
    for ratio in (0.8, 1.25):
        found = verdicts(replace(case, ratio=ratio), enough(case), 10)
        assert sum(each.drafter_per_s for each in found) / 10 == pytest.approx(1.0, rel=0.03)
        assert sum(each.target_per_s for each in found) / 10 == pytest.approx(1.0 / ratio, rel=0.05)


@pytest.mark.parametrize("depth", [2, 6])
def test_intervals_hold_the_truth(depth: int) -> None:
    """At least 90 % of the 95 % intervals hold the exact long-run share of waiting, they are of use, and unbiased."""
    held, widths = [], []
    for ratio in (0.8, 1.0, 1.25):
        found = verdicts(Pipeline(ratio=ratio, depth=depth, is_exponential=True), 1000, 30)
        drafter_waits, target_waits = exponential_waits(depth, ratio)
        for shares, known in (
            ([each.get_wait_frac for each in found], drafter_waits),
            ([each.put_wait_frac for each in found], target_waits),
        ):
            held += [share.low <= known <= share.high for share in shares]
            widths += [share.high - share.low for share in shares]
            assert sum(share.value for share in shares) / len(shares) == pytest.approx(known, abs=0.01)
    assert sum(held) >= 0.9 * len(held)
    assert sum(widths) / len(widths) < 0.12


# Neither side.


def test_equal_sides_that_vary_are_variance() -> None:
    """With equal, erratic times and a short queue both wait; what a deep queue gives is predicted, and the depth."""
    pipeline = Pipeline(cv=1.0, depth=2)
    found = verdicts(pipeline, 4000, 5)
    assert [each.kind for each in found] == ["variance"] * 5
    deep = throughput(replace(pipeline, depth=1000), 20_000, 1)
    real = deep / throughput(pipeline, 20_000, 1)
    assert sum(each.gain.value for each in found if each.gain) / 5 == pytest.approx(real, rel=0.05)
    depth = int(found[0].reason.split("about ")[1].split()[0])
    there = throughput(replace(pipeline, depth=depth), 20_000, 1)
    assert 0.95 < there / deep < 0.985, "a thirtieth is left"


@pytest.mark.parametrize("case", [Pipeline(cv=0.1, depth=8), Pipeline(cv=0.1, depth=8, targets=4, micro=2)])
def test_equal_steady_sides_are_balanced(case: Pipeline) -> None:
    """With equal, steady times and a deep queue there is nothing to gain, and nothing is promised."""
    found = verdicts(case, 800, 10)
    assert [each.kind for each in found] == ["balanced"] * 10
    assert all(each.gain is None and each.brief() == "balanced" for each in found)


@pytest.mark.parametrize(
    ("case", "remedy"),
    [
        (Pipeline(depth=4, targets=4, min_ready=4), {"min_ready": 1}),
        (Pipeline(cv=1.0, depth=6, targets=4, micro=2), {"depth": 100}),
    ],
    ids=["batches held back", "one slow batch before the others"],
)
def test_a_wait_beside_a_filled_queue_is_a_contradiction(case: Pipeline, remedy: dict[str, int]) -> None:
    """Both sides wait although a step's batches are there: the queue's rules are named, and lifting them helps."""
    found = verdicts(case, 3000, 5)
    assert [each.kind for each in found] == ["contradiction"] * 5
    assert "min_ready" in found[0].reason
    assert found[0].ready_frac > 0.5
    mine = long_run(case).batches_per_s
    helped = throughput(replace(case, **remedy), 15_000 // case.micro, 3) / mine
    assert found[0].gain is not None
    assert 1.1 < helped < found[0].gain.high * 1.02


@pytest.mark.parametrize(
    ("g", "p", "ready", "kind"),
    [
        (0.20, 0.00, 0.00, "producer-bound"),
        (0.20, 0.00, 0.20, "producer-bound"),  # the targets never wait: whatever stood ready, they are the limit
        (0.20, 0.09, 0.00, "producer-bound"),
        (0.00, 0.20, 0.00, "consumer-bound"),
        (0.09, 0.20, 0.00, "consumer-bound"),
        (0.20, 0.15, 0.02, "variance"),
        (0.15, 0.20, 0.02, "variance"),
        (0.04, 0.04, 0.04, "variance"),  # too short a wait to look into
        (0.07, 0.045, 0.06, "contradiction"),
        (0.20, 0.20, 0.10, "contradiction"),
        (0.00, 0.00, 0.00, "balanced"),
        (0.04, 0.00, 0.00, "balanced"),
        (0.00, 0.04, 0.00, "balanced"),
        (0.04, 0.025, 0.03, "balanced"),
    ],
)
def test_every_pair_of_waits_has_a_verdict(g: float, p: float, ready: float, kind: str) -> None:
    """Shares that are known well leave nothing undecided, between the thresholds as well."""
    windows = [replace(window, ready_wait_s=ready) for window in steady(g, p)]
    found = judge(windows, targets=1, queue_depth=4)
    assert found.kind == kind
    assert found.more_s == 0.0
    assert found.line().startswith(f"{kind}: ")


def test_a_share_on_a_threshold_is_decided_once_it_is_known_well() -> None:
    """An interval across 5 % that is narrower than a per cent is no reason to wait for ever."""
    found = judge(steady(0.0501), targets=1, queue_depth=4)
    assert found.get_wait_frac.low < 0.05 < found.get_wait_frac.high
    assert found.kind == "producer-bound"


@pytest.mark.parametrize(("ready", "kind"), [(0.0, "variance"), (0.10, "contradiction")])
def test_without_its_losses_the_pipeline_does_what_the_slower_side_can(ready: float, kind: str) -> None:
    """Neither a deep queue nor lifted rules make one side faster than it is: the smaller wait is the gain."""
    windows = [replace(window, ready_wait_s=ready) for window in steady(0.15, 0.20)]
    found = judge(windows, targets=1, queue_depth=4)
    assert found.kind == kind
    assert found.gain is not None
    assert found.gain.value == pytest.approx(1.0 / 0.85, rel=0.01)
    assert found.gain.value * found.batches_per_s == pytest.approx(min(found.target_per_s, found.drafter_per_s))


# Not yet.


def test_few_windows_are_undecided() -> None:
    """Nine steps tell nothing however clear they look, and the time for the tenth is announced."""
    found = judge(steady(0.3, number=9), targets=1, queue_depth=2)
    assert found.kind == found.brief() == "undecided"
    assert found.gain is None
    assert found.more_s == pytest.approx(1.0)
    assert (found.get_wait_frac.low, found.get_wait_frac.high) == (0.0, 1.0)
    assert judge(steady(0.3, number=10), targets=1, queue_depth=2).kind == "producer-bound"


def test_fewer_batches_than_ten_queues_are_undecided() -> None:
    """What a deep queue holds hides the slower side at first, so its depth counts."""
    found = judge(steady(0.3, number=40), targets=1, queue_depth=20)
    assert found.kind == "undecided"
    assert found.more_s == pytest.approx(10.0, rel=0.01)  # 160 batches of 200, 4 a second, and 40 windows


@pytest.mark.parametrize(
    ("g", "p", "ready", "kind"),
    [
        (0.035, 0.00, 0.00, "balanced"),
        (0.00, 0.035, 0.00, "balanced"),
        (0.07, 0.00, 0.00, "producer-bound"),
        (0.00, 0.07, 0.00, "consumer-bound"),
        (0.30, 0.13, 0.00, "producer-bound"),  # it waits for sure, but perhaps as much for want of places
        (0.13, 0.30, 0.00, "consumer-bound"),
        (0.045, 0.045, 0.00, "variance"),
        (0.20, 0.20, 0.03, "variance"),
        (0.20, 0.20, 0.06, "contradiction"),
    ],
)
def test_what_chance_may_have_made_is_undecided(g: float, p: float, ready: float, kind: str) -> None:
    """Of twenty steps with scattered waits only the likeliest verdict is named; of very many it is the verdict."""

    def scattered(number: int) -> list[Window]:
        chance = random.Random(11)

        def share(mean: float) -> float:
            return mean * chance.expovariate(1.0)

        return [Window(1.0, 4.0, share(g), share(p), share(ready)) for _ in range(number)]

    few = judge(scattered(20), targets=1, queue_depth=4)
    assert few.kind == "undecided"
    assert f"perhaps {kind}" in few.reason
    assert few.more_s > 0.0
    assert judge(scattered(8000), targets=1, queue_depth=4).kind == kind


def test_a_filling_queue_is_not_balanced() -> None:
    """While faster targets still fill a deep queue nobody waits; that is not taken for balance."""
    pipeline = Pipeline(ratio=0.93, cv=0.1, depth=20)
    windows = drop_warm_up(simulate(pipeline, 232, 0))
    filling = judged(windows, pipeline)
    assert filling.put_wait_frac.value < 0.01
    assert filling.kind == "undecided"
    assert "balanced" in filling.reason
    assert judged([replace(window, queue=5.0) for window in windows], pipeline).kind == "balanced"


def test_the_announced_time_is_about_right() -> None:
    """Most of the records that were too short are decided after the time that was asked for, few after a fifth."""
    after: dict[float, list[bool]] = {0.2: [], 1.0: []}
    cases = ((Pipeline(ratio=0.8, depth=2), 30), (Pipeline(ratio=1.25), 40), (Pipeline(ratio=1.12, micro=4), 60))
    for case, steps in cases:
        for seed in range(30):
            windows = drop_warm_up(simulate(case, 12 * steps, seed))
            found = judged(windows[:steps], case)
            for part, decided in after.items():
                longer = math.ceil(steps * (1.0 + part * found.more_s / found.seconds))
                if found.kind == "undecided" and longer <= len(windows):
                    decided.append(judged(windows[:longer], case).kind != "undecided")
    assert len(after[1.0]) >= 25
    assert sum(after[1.0]) > 0.66 * len(after[1.0])
    assert sum(after[0.2]) < 0.5 * len(after[0.2])


@pytest.mark.parametrize("windows", [[], steady(number=40)[:0], [Window(0.0, 0.0, 0.0, 0.0)] * 20])
def test_nothing_is_undecided(windows: list[Window]) -> None:
    """No window, or windows without time, give a verdict that says so."""
    found = judge(windows, targets=2, queue_depth=4)
    assert (found.kind, found.reason) == ("undecided", "no batch was taken after the warm-up")
    json.dumps(found.record(), allow_nan=False)


def test_a_drafter_that_got_nothing_is_undecided() -> None:
    """A wait without any batch is a start that has not come to an end, not a slow side."""
    found = judge([Window(1.0, 0.0, 1.0, 0.0)] * 30, targets=1, queue_depth=4)
    assert found.kind == "undecided"


# Uneven records.


def test_windows_without_batches_count_as_time() -> None:
    """A watcher's windows of a fixed time may hold no batch; the shares are those of the whole time."""
    windows = [replace(window, batches=8.0 * (i % 2)) for i, window in enumerate(steady(0.2))]
    found = judge(windows, targets=1, queue_depth=4)
    assert found.kind == FASTER_TARGETS
    assert found.batches_per_s == pytest.approx(4.0)


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("ratio", [0.8, 1.0, 1.25])
def test_validations_and_saves_do_not_count(ratio: float, is_counted: bool) -> None:
    """Pauses of the drafter change neither the verdict nor much of the shares, whether their time is counted or not."""
    pipeline = Pipeline(ratio=ratio, cv=0.1, depth=6, targets=4, micro=4)
    without = verdict(pipeline, 600)
    found = verdict(replace(pipeline, pause_every=100, pause_s=300.0, is_pause_counted=is_counted), 600)
    assert found.kind == without.kind
    assert found.get_wait_frac.value == pytest.approx(without.get_wait_frac.value, abs=0.02)
    assert found.put_wait_frac.value == pytest.approx(without.put_wait_frac.value, abs=0.02)
    assert found.batches_per_s == pytest.approx(without.batches_per_s, rel=0.02)


def test_waits_are_moved_to_the_windows_they_began_in() -> None:
    """A wait of two seconds that is counted in a window of one belongs to the one before as well."""
    windows = [Window(1.0, 4.0, 0.0, 2.0 * (i % 2)) for i in range(40)]
    assert judge(windows, targets=1, queue_depth=4).put_wait_frac.value == pytest.approx(0.999, abs=0.002)


def test_no_share_is_above_one() -> None:
    """Waits that are longer than all windows, as after a stop of the clock, still give shares and finite figures."""
    found = judge([Window(1.0, 4.0, 2.0, 9.0)] * 30, targets=2, queue_depth=4)
    assert found.get_wait_frac.value == found.put_wait_frac.value == 1.0
    json.dumps(found.record(), allow_nan=False)


def test_the_warm_up_is_dropped() -> None:
    """Compiling and the first batch's wait are gone with the first two steps, and so is what came before any batch."""
    pipeline = Pipeline(ratio=0.8, targets=2, depth=4, first_s=60.0)
    raw = simulate(pipeline, 402, 0)
    kept = drop_warm_up([Window(5.0, 0.0, 5.0, 0.0)] * 3 + raw)
    assert len(kept) == 400
    assert kept == raw[2:]
    assert max(window.seconds for window in raw) > 60.0 > 5.0 > max(window.seconds for window in kept)
    assert judged(kept, pipeline).kind == FASTER_DRAFTER
    assert drop_warm_up(raw[:1]) == drop_warm_up([]) == []
    assert len(drop_warm_up(raw, steps=5)) == 397


@pytest.mark.parametrize("at_most", [50, 64])
def test_merging_keeps_the_sums_and_the_verdict(at_most: int) -> None:
    """Joined one by one or at once, windows stay few and alike, and say the same."""
    pipeline = Pipeline(ratio=1.25, depth=4)
    windows = drop_warm_up(simulate(pipeline, 1000, 0))
    one_by_one: list[Window] = []
    for window in windows:
        one_by_one = merge([*one_by_one, window], at_most)
        assert len(one_by_one) <= at_most
    whole = judged(windows, pipeline)
    for merged in (one_by_one, merge(windows, at_most)):
        assert at_most / 2 <= len(merged) <= at_most
        for name in ("seconds", "batches", "get_wait_s", "put_wait_s", "ready_wait_s"):
            assert sum(getattr(each, name) for each in merged) == pytest.approx(
                sum(getattr(each, name) for each in windows)
            )
        lengths = sorted(each.seconds for each in merged)
        assert lengths[-1] < 6 * lengths[1]  # the newest may be short
        found = judged(merged, pipeline)
        assert found.kind == whole.kind
        assert found.queue == pytest.approx(whole.queue)
        assert found.get_wait_frac.value == pytest.approx(whole.get_wait_frac.value, abs=0.001)
        assert found.get_wait_frac.low == pytest.approx(whole.get_wait_frac.low, abs=0.02)


def test_few_windows_are_not_merged() -> None:
    """Below the limit nothing is joined."""
    windows = steady(0.1, 0.2, number=7)
    assert merge(windows, 7) == windows


def test_lines_of_metrics_become_windows() -> None:
    """Lines that lack a figure, or hold none, are passed over; other keys do not matter."""
    line = {
        "step": 7,
        "loss": 2.0,
        "seconds": 1.5,
        "batches": 4,
        "get_wait_s": 0.25,
        "put_wait_s": 0.5,
        "ready_wait_s": 0.125,
        "queue": 3,
    }
    older = {key: value for key, value in line.items() if key != "seconds"}
    broken = [{**line, "queue": None}, {**line, "get_wait_s": math.nan}, {**line, "batches": "4"}]
    nothing = {**line, "seconds": 0.0}
    assert windows_of([older, line, *broken, nothing, line]) == [Window(1.5, 4.0, 0.25, 0.5, 0.125, 3.0)] * 2


# One thread does both.


@pytest.mark.parametrize(("share", "gain"), [(0.3, 1 / 0.7), (0.5, 2.0), (0.8, 1.25)])
def test_taking_turns_gains_what_the_shorter_side_takes(share: float, gain: float) -> None:
    """Side by side the longer of the two sets the pace; both capacities are those of a side alone."""
    found = judge(steady(share), targets=1, queue_depth=1, in_turn=True)
    assert found.kind == "in turn"
    assert found.gain is not None
    assert found.gain.value == pytest.approx(gain, rel=0.02)
    assert found.gain.low <= found.gain.value <= found.gain.high <= 2.0
    assert found.target_per_s == pytest.approx(4.0 / share, rel=0.02)
    assert found.drafter_per_s == pytest.approx(4.0 / (1.0 - share), rel=0.02)
    assert found.brief().startswith(f"in turn {found.gain.value:.2f}x [")
    assert f"{100 * found.get_wait_frac.value:.0f} %" in found.reason


def test_a_few_turns_give_no_interval() -> None:
    """With three steps the gain may be anything from none to double."""
    gain = judge(steady(0.4, number=3), targets=1, queue_depth=1, in_turn=True).gain
    assert gain is not None
    assert (gain.low, gain.high) == (1.0, 2.0)


# What is said.


def test_the_line_gives_share_interval_and_gain() -> None:
    """The line names the side, how much it waits, how sure that is, and what a remedy gives."""
    found = judge(steady(0.16), targets=1, queue_depth=4)
    assert found.line() == (
        "producer-bound: the drafter waits 16 % [16-16] of the time for features; with faster targets 1.19x [1.19-1.19]"
        " (the targets could make 4 batches a second, the drafter take 4.76)"
    )
    assert found.brief() == "producer-bound 1.19x [1.19-1.19]"
    assert found.record()["line"] == found.line()


def test_the_record_survives_json() -> None:
    """All that a verdict says can be written down and read back."""
    found = verdict(Pipeline(ratio=0.8), 300)
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    assert record["kind"] == FASTER_DRAFTER
    assert found.gain is not None
    assert record["gain"] == {"value": found.gain.value, "low": found.gain.low, "high": found.gain.high}
    assert record["reason"] == found.reason


def test_a_verdict_needs_no_torch() -> None:
    """A watcher that only reads figures starts at once."""
    program = "import paceline.profiling.verdict, sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
