"""Intervals: what happened between two snapshots and nothing else, whoever came, went, or was in the middle of it."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.profiling import page as layout
from paceline.profiling import stages
from paceline.profiling.intervals import Interval, ThreadInterval
from paceline.profiling.page import Control, Page, Snapshot
from paceline.profiling.stages import Stage, as_role
from paceline.profiling.stats import ProfileStats
from tests.unit.profiling.conftest import Clock


class Cuts:
    """Intervals of a page that is on, one after another, as the reporter cuts them."""

    def __init__(self, page: Page) -> None:
        self.page = page
        page.set_control(Control(1, True, 10.0))
        self.last = self._take()

    def _take(self) -> Snapshot:
        self.page.words[layout.INTERVAL] += 1
        return self.page.snapshot()

    def next(self) -> Interval:
        before, number = self.last, self.page.words[layout.INTERVAL]
        self.last = self._take()
        return Interval.between(before, self.last, number)


@pytest.fixture
def cuts(clock: Clock, page: Page) -> Cuts:
    """On from the start; every thread is the drafter's unless it says otherwise."""
    stages._default_role = "drafter-0"
    return Cuts(page)


def only(interval: Interval, role: str = "drafter-0") -> ThreadInterval:
    (found,) = (thread for thread in interval.threads if thread.role == role)
    return found


def in_thread(work: Callable[[], Any], name: str) -> None:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join(30)


def shares(interval: Interval) -> dict[str, str]:
    """The table's last column by stage; the stage's own label as it stands there."""
    lines = [line for line in interval.table().splitlines() if line.endswith("%")]
    return {line.split()[0]: line.split()[-2] for line in lines}


def test_averages_are_of_that_interval_alone(clock: Clock, cuts: Cuts) -> None:
    """Count, average, maximum and percentiles of an interval know nothing of the runs before it."""
    with stages.LOG:
        clock.pass_s(100)
    cuts.next()
    for milliseconds in (1, 3):
        with stages.LOG:
            clock.pass_s(milliseconds / 1000)
    stats = only(cuts.next()).stages["log"]
    assert (stats.count, stats.avg_ns, stats.max_ns) == (2, 2e6, 3 * 10**6)
    assert stats.percentile(0.99) == pytest.approx(3e6, rel=1 / 16)
    assert only(cuts.next()).stages["log"].count == 0


def test_a_stage_that_is_open_across_intervals_belongs_to_each(clock: Clock, cuts: Cuts) -> None:
    """A wait of 13 s that spans three intervals takes its part of each, and all of none; it counts where it ends."""
    clock.pass_s(3)
    stages.GET_WAIT.__enter__()
    clock.pass_s(2)
    found = [only(cuts.next())]
    clock.pass_s(10)
    found.append(only(cuts.next()))
    clock.pass_s(1)
    stages.GET_WAIT.__exit__(None, None, None)
    clock.pass_s(4)
    found.append(only(cuts.next()))
    assert [each.seconds_in("get_wait") for each in found] == [2, 10, 1]
    assert [each.covered_s for each in found] == [2, 10, 1] and [each.open_s for each in found] == [2, 12, 0]
    assert [each.wall_s for each in found] == [2, 10, 5]  # the thread came with its first stage
    assert [each.stages["get_wait"].count for each in found] == [0, 0, 1]
    assert found[2].stages["get_wait"].max_ns == 13 * 10**9 and found[2].other_s == 4


def test_an_outer_stage_goes_on_while_inner_ones_change(clock: Clock, cuts: Cuts) -> None:
    """A stage that was the innermost and is now only the outermost has not ended, and keeps all of its time."""
    with stages.VALIDATE:
        clock.pass_s(6)
        cuts.next()
        clock.pass_s(1)
        with stages.MODEL_FORWARD:
            clock.pass_s(3)
            middle = only(cuts.next())
            clock.pass_s(1)
        clock.pass_s(1)
    last = only(cuts.next())
    assert (middle.seconds_in("validate"), middle.seconds_in("model_forward"), middle.covered_s) == (4, 3, 4)
    assert (last.seconds_in("validate"), last.seconds_in("model_forward"), last.covered_s) == (2, 1, 2)


def test_what_was_open_at_the_switch_takes_nothing_from_later_runs(clock: Clock, page: Page) -> None:
    """A wait that was dropped, because profiling came on inside it, is not subtracted from those that were counted."""
    with as_role("drafter-0"):
        stages.GET_WAIT.__enter__()
        clock.pass_s(50)
        cuts = Cuts(page)
        stages.GET_WAIT.__exit__(None, None, None)
        for _ in range(2):
            with stages.GET_WAIT:
                clock.pass_s(4)
            clock.pass_s(1)
    found = only(cuts.next())
    assert found.seconds_in("get_wait") == found.covered_s == 8 and found.other_s == 2


def test_what_was_open_at_the_switch_is_not_other(clock: Clock, page: Page) -> None:
    """A stage inside which profiling came on is counted in no part, but its time is no time between stages."""
    with as_role("drafter-0"):
        stages.VALIDATE.__enter__()
        clock.pass_s(50)
        cuts = Cuts(page)
        clock.pass_s(4)
        stages.VALIDATE.__exit__(None, None, None)
        clock.pass_s(1)
    found = only(cuts.next())
    assert (found.stages["validate"].count, found.covered_s, found.other_s, found.wall_s) == (0, 4, 1, 5)


def test_a_wait_that_was_dropped_takes_nothing_from_other_stages(clock: Clock, cuts: Cuts) -> None:
    """A run that was open when the interval began, and was dropped as profiling went off and on inside it, leaves the
    time that others were counted for alone."""
    with stages.GET_WAIT:
        clock.pass_s(50)
        cuts.next()
        for is_on in (False, True):
            cuts.page.set_control(Control.of(cuts.page.words[layout.CONTROL]).changed(is_on, 10.0))
    with stages.LOG:
        clock.pass_s(3)
    found = only(cuts.next())
    assert found.seconds_in("log") == found.covered_s == 3 and found.seconds_in("get_wait") == 0


def test_threads_that_come_and_go_are_in_the_interval_of_their_work(clock: Clock, cuts: Cuts) -> None:
    """A thread that began and ended within an interval is in it, with the time that it was there, and in no other."""

    def work() -> None:
        with as_role("target-0"):
            stages.next_batch(0)
            with stages.MODEL_FORWARD:
                clock.pass_s(2)
            clock.pass_s(2)

    clock.pass_s(5)
    in_thread(work, "target-0")
    clock.pass_s(5)
    found = only(cuts.next(), "target-0")
    assert (found.wall_s, found.covered_s, found.num_batches, found.stages["model_forward"].count) == (4, 2, 1, 1)
    clock.pass_s(1)
    assert cuts.next().threads == []


def test_a_thread_that_takes_over_a_block_starts_at_zero(clock: Clock, cuts: Cuts) -> None:
    """Batches and runs of the thread before it are not its own, and no share exceeds the time that there was."""

    def work() -> None:
        with as_role("target-0"):
            for number in range(3):
                stages.next_batch(number)
                with stages.MODEL_FORWARD:
                    clock.pass_s(1)

    in_thread(work, "target-0")
    assert only(cuts.next(), "target-0").num_batches == 3
    for _ in range(3):
        in_thread(work, "target-0")
    found = only(cuts.next(), "target-0")
    assert (found.num_batches, found.stages["model_forward"].count) == (9, 9)
    assert found.seconds_in("model_forward") == found.covered_s == found.wall_s == 9


def test_threads_of_one_name_are_told_apart(clock: Clock, cuts: Cuts) -> None:
    """Two live threads of the same name and role each have their own line, and none is less than nothing."""
    turn = threading.Barrier(3)

    def work(runs: int) -> None:
        for _ in range(2):
            for _ in range(runs):
                with stages.LOG:
                    pass
            turn.wait(30)
            turn.wait(30)

    threads = [threading.Thread(target=work, args=(runs,), name="same") for runs in (5, 1)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        turn.wait(30)
        interval = cuts.next()
        assert sorted(thread.stages["log"].count for thread in interval.threads) == [1, 5]
        turn.wait(30)
    for thread in threads:
        thread.join(30)


def test_counts_that_move_to_the_ended_threads_do_not_count_twice(clock: Clock, cuts: Cuts) -> None:
    """When blocks run out, the ended threads' line has the runs of this interval, and all lines together have all."""

    def run(name: str) -> None:
        def work() -> None:
            with stages.LOG:
                clock.pass_s(1)

        in_thread(work, name)

    seen = 0
    for first, runs in ((0, 50), (50, 50), (100, 100)):
        for i in range(first, first + runs):
            run(f"once-{i}")
        interval = cuts.next()
        found = [thread.stages["log"] for thread in interval.threads]
        assert sum(stats.count for stats in found) == sum(sum(stats.histogram) for stats in found) == runs
        assert sum(stats.total_ns for stats in found) == runs * 10**9
        seen += sum(stats.count for stats, thread in zip(found, interval.threads, strict=True) if not thread.tid)
        assert all(0 <= thread.seconds_in("log") <= thread.wall_s for thread in interval.threads)
    blocks = layout.MAX_BLOCKS - 1
    assert seen == 100 - blocks and cuts.last.threads[0].stages["log"].count == 200 - blocks


def test_shares_are_of_all_batches_though_one_in_k_is_counted(clock: Clock, cuts: Cuts) -> None:
    """Sampled times are scaled up, a stage that is open is not, and threads without batches are never sampled."""
    cuts.page.words[layout.SAMPLE_EVERY] = 5
    with as_role("target-0"):
        for number in range(20):
            stages.next_batch(number)
            with stages.MODEL_FORWARD:
                clock.pass_s(0.3)
            clock.pass_s(0.2)
        stages.PUT_WAIT.__enter__()
    with as_role("drafter-0"), stages.BACKWARD:
        clock.pass_s(2)
    interval = cuts.next()
    target, drafter = only(interval, "target-0"), only(interval)
    assert interval.sample_every == target.sample_every == 5 and drafter.sample_every == 1
    assert target.stages["model_forward"].count == 4  # as counted; only times are scaled
    assert target.seconds_in("model_forward") == pytest.approx(6) and target.seconds_in("put_wait") == 2
    assert target.covered_s == pytest.approx(8) and target.wall_s == pytest.approx(12)
    assert drafter.seconds_in("backward") == drafter.covered_s == drafter.wall_s == 2
    assert "one batch in 5 counted" in interval.table()
    assert shares(interval) | {"other": "33.3"} == {
        "model_forward": "50.0",
        "put_wait": "16.7",
        "backward": "100.0",
        "other": "33.3",
    }
    assert {record.get("sampled_one_in") for record in interval.records()} == {5}


def test_a_batch_that_was_counted_by_chance_takes_no_more_than_all(clock: Clock, cuts: Cuts) -> None:
    """Scaled up, one long batch among short ones would take more time than there was; no share exceeds 100 %."""
    cuts.page.words[layout.SAMPLE_EVERY] = 4
    counted = next(number for number in range(1, 6) if stages.is_sampled(number, 4))
    for number in range(1, 6):
        stages.next_batch(number)
        with stages.FORWARD:
            clock.pass_s(7 if number == counted else 1)
    found = only(cuts.next())
    assert found.seconds_in("forward") == found.covered_s == found.wall_s and found.other_s == 0


def test_a_run_that_ends_while_the_page_is_read_is_the_longest(clock: Clock, cuts: Cuts) -> None:
    """The reporter calls for a new interval and then reads: what ends in between counts, and its length is known."""
    for milliseconds in (2, 1):
        with stages.LOG:
            clock.pass_s(milliseconds / 1000)
    cuts.page.words[layout.INTERVAL] += 1
    with stages.LOG:
        clock.pass_s(0.009)
    after = cuts.page.snapshot()
    stats = only(Interval.between(cuts.last, after, cuts.page.words[layout.INTERVAL] - 1)).stages["log"]
    assert (stats.count, stats.max_ns) == (3, 9 * 10**6) and stats.percentile(0.99) == pytest.approx(9e6, rel=1 / 16)
    assert only(Interval.between(cuts.last, after)).stages["log"].max_ns is None  # a reader cuts no intervals


def test_steps_are_those_of_this_process(clock: Clock, page: Page) -> None:
    """The first interval of a resumed run begins at the step that it goes on from, though it was begun before that was
    known."""
    cuts = Cuts(page)
    for step in (500, 503):
        stages.set_gauge("first_step", 500)
        stages.set_gauge("step", step)
    interval = cuts.next()
    assert (interval.first_step, interval.last_step) == (500, 503) and ", steps 501 to 503" in interval.table()
    assert "steps" not in cuts.next().table()


TABLE = """\
profile of 5.0 s, steps 5 to 6
    stage                                    count  avg ms  max ms  p99 ms    share
  target-0 ([bold]x?)
    model_forward                                1   12.35   12.35   12.06  100.0 %
    other                                                                     0.0 %
  drafter-0 (MainThread)
      model_forward                              1   250.0   250.0   243.3    5.0 %
    get_wait                                     0                           80.0 %
    forward (1 failed)                           1   100.0   100.0   96.47    2.0 %
      layers (1 failed) (+1 computed again)      1   100.0   100.0   96.47    2.0 %
    backward                                     1   400.0   400.0   385.9    8.0 %
      recompute                                  1   400.0   400.0   385.9    8.0 %
    validate                                     1   250.0   250.0   243.3    5.0 %
    other                                                                     5.0 %
    (in get_wait for 4.0 s)
"""


def test_the_table_reads_as_intended(clock: Clock, cuts: Cuts) -> None:
    """Stages are aligned by thread with what is left over; failures, recomputation, long stages and silent ones are
    said in words, odd names verbatim."""
    stages.set_gauge("step", 4)
    cuts.next()

    def target() -> None:
        with as_role("target-0"), stages.MODEL_FORWARD:
            clock.pass_s(0.012345)

    in_thread(target, "[bold]x\n")
    with as_role("drafter-0"):
        with pytest.raises(KeyError), stages.FORWARD, stages.LAYERS:
            clock.pass_s(0.1)
            raise KeyError
        with stages.BACKWARD, stages.RECOMPUTE, stages.LAYERS:
            clock.pass_s(0.4)
        with stages.VALIDATE, stages.MODEL_FORWARD:
            clock.pass_s(0.25)
        clock.pass_s(0.25)
        stages.GET_WAIT.__enter__()
        clock.pass_s(4.0)
        stages.set_gauge("step", 6)
        text = cuts.next().table()
    never = [line for line in text.splitlines() if line.startswith("    (never: ")]
    assert [line.split()[1] for line in never] == ["read_batch,", "draw_blocks,"]
    assert [line for line in text.splitlines() if line not in never] == TABLE.splitlines()


def test_records_are_lines_of_json(clock: Clock, cuts: Cuts) -> None:
    """A record a thread, with every stage of its role, those that never ran at 0, and times in milliseconds."""
    with stages.FORWARD, stages.CHUNKED_LOSS:
        clock.pass_s(0.002)
    clock.pass_s(0.002)
    (record,) = json.loads(json.dumps(cuts.next().records()))
    assert (record["role"], record["wall_s"], record["other_s"], record["batches"]) == ("drafter-0", 0.004, 0.002, 0)
    assert set(record["stages"]) == set(stages.DRAFTER_STAGES)
    forward = record["stages"]["forward"]
    assert (forward["count"], forward["avg_ms"], forward["max_ms"], forward["total_ms"], forward["self_ms"]) == (
        1, 2.0, 2.0, 2.0, 0.0,
    )  # fmt: skip
    assert all(forward[f"p{p}_ms"] == pytest.approx(2, rel=1 / 16) for p in (50, 90, 99))
    assert record["stages"]["validate"]["count"] == 0 and "errors" not in forward


KINDS = [stages.FORWARD, stages.BACKWARD, stages.GET_WAIT, stages.LOG]
PASS = st.tuples(st.just("pass"), st.integers(1, 3000))
ENTER = st.tuples(st.just("enter"), st.sampled_from(range(len(KINDS))))
LEAVE, CUT = (st.tuples(st.just(word), st.just(0)) for word in ("leave", "cut"))
SWITCH = st.tuples(st.just("switch"), st.integers(0, 1))


def follow(clock: Clock, page: Page, moves: list[tuple[str, int]]) -> Iterator[tuple[ThreadInterval, dict[str, float]]]:
    """Make the moves; each interval with the seconds that were really spent in each stage, and in `any` of them."""
    cuts = Cuts(page)
    inside: list[Stage] = []
    with as_role("drafter-0"):
        with stages.LOG:  # then the thread has a block
            pass
        cuts.next()
        spent = Counter[str]()
        for word, value in [*moves, *[("leave", 0)] * 2, ("cut", 0)]:
            if word == "pass":
                clock.pass_s(value / 1000)
                spent.update(dict.fromkeys([stage.name for stage in inside], value))
                spent.update({"wall": value, "any": value * bool(inside)})
            elif word == "enter" and len(inside) < 2 and KINDS[value] not in inside:
                inside.append(KINDS[value])
                KINDS[value].__enter__()
            elif word == "leave" and inside:
                inside.pop().__exit__(None, None, None)
            elif word == "switch":
                page.set_control(Control.of(page.words[layout.CONTROL]).changed(bool(value), 10.0))
            elif word == "cut":
                found = only(cuts.next())
                if spent["wall"]:
                    yield found, {name: spent[name] / 1000 for name in ("wall", "any", *(k.name for k in KINDS))}
                spent.clear()


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(PASS, ENTER, LEAVE, CUT), max_size=40))
def test_time_is_attributed_as_it_passes(clock: Clock, page: Page, moves: list[tuple[str, int]]) -> None:
    """Whatever a thread enters and leaves, two deep, each interval has exactly the seconds that it spent in each stage
    and in any."""
    for found, spent in follow(clock, page, moves):
        times = {"wall": found.wall_s, "any": found.covered_s}
        assert times | {kind.name: found.seconds_in(kind.name) for kind in KINDS} == pytest.approx(spent)


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(PASS, ENTER, LEAVE, CUT, SWITCH), max_size=40))
def test_switching_loses_runs_and_makes_none_up(clock: Clock, page: Page, moves: list[tuple[str, int]]) -> None:
    """With switches in the middle of stages no interval has more of a stage than was spent in it, and none less than
    nothing."""
    for found, spent in follow(clock, page, moves):
        assert 0 <= found.covered_s <= spent["any"] + 1e-9 and found.other_s >= 0
        for kind in KINDS:
            assert 0 <= found.seconds_in(kind.name) <= spent[kind.name] + 1e-9


def test_an_interval_of_nothing(page: Page) -> None:
    """A page without threads gives an interval without lines, and a table that is only its heading."""
    cuts = Cuts(page)
    interval = cuts.next()
    assert interval.threads == [] and interval.records() == [] and len(interval.table().splitlines()) == 2
    assert page.snapshot().total("forward") == ProfileStats(max_ns=None)


def test_a_stage_is_indented_where_all_its_runs_were_in_others(clock: Clock, cuts: Cuts) -> None:
    """The drafter sends arrays by itself, and in validation runs the target's stages: only the latter are inside."""
    with as_role("drafter-0"):
        with stages.H2D_SYNC:
            clock.pass_s(1)
        with stages.VALIDATE, stages.MODEL_FORWARD:
            clock.pass_s(3)
        with stages.VALIDATE, stages.H2D_SYNC:
            clock.pass_s(1)
    found = only(cuts.next())
    inside = {name for name in ("h2d_sync", "validate", "model_forward") if found.is_inside(name)}
    assert inside == {"model_forward"} and found.covered_s == found.wall_s == 5
