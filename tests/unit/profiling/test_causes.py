"""Hypotheses: each says beforehand what it predicts; what is missing decides nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.profiling.causes import BY_ID, CAUSES, asked_ids, conclude, judge_causes
from paceline.profiling.evidence import AttachError, Figure, Hypothesis


def share(value: float, half: float = 0.03, level: str = "4") -> Figure:
    """A figure with an interval."""
    interval = (max(0.0, value - half), min(1.0, value + half))
    return Figure(value=value, interval=interval, level=level, samples=400)  # type: ignore[arg-type]


def rate(value: float) -> Figure:
    return Figure.read(value, "6", "per_s")


HEALTHY = {
    "process.cuda": share(1.0, 0.0, "1"),
    "critical.cpu": share(0.98, 0.01, "1"),
    "critical.runqueue": share(0.005, 0.003, "1"),
    "gil.share": share(0.15, 0.03, "2"),
    "gil.held_by_others": share(0.02, 0.01, "2"),
    "critical.gil": share(0.13, 0.03, "2"),
    "critical.native_cpu": share(0.85, 0.04, "2"),
    "critical.queue_wait": share(0.0, 0.01),
    "critical.lock": share(0.0, 0.01),
    "critical.blocked": share(0.0, 0.01),
    "critical.gil_wait": share(0.01, 0.01),
    "critical.sync": share(0.7, 0.04),
    "critical.launch_queue_full": share(0.1, 0.02),
    "critical.device_wait": share(0.8, 0.04),
    "critical.launching": share(0.1, 0.03),
    "critical.allocator_churn": share(0.0, 0.008),
    "critical.copy": share(0.0, 0.01),
    "critical.collective": share(0.0, 0.01),
    "critical.compile_gc": share(0.0, 0.01),
    "critical.compute": share(0.02, 0.01),
    "drained": share(0.01, 0.01, "0"),
    "gpu.utilisation": share(0.99, 0.01, "5"),
    "gpu.busy": share(0.99, 0.01, "5"),
    "gpu.limited": share(0.0, 0.0, "5"),
    "gpu.pcie": share(0.02, 0.01, "5"),
    "allocator.device_calls": rate(0.0),
    "allocator.retries": rate(0.0),
    "host.load_per_cpu": Figure.read(0.2, "1", "count"),
    "tool.stop": share(0.0, 0.0),
    "tool.errors": share(0.01, 0.01, "3"),
}
"""A GPU-bound run of ours without a fault."""

LAUNCH_BOUND = {
    "critical.sync": share(0.05, 0.02),
    "critical.launch_queue_full": share(0.0, 0.01),
    "critical.device_wait": share(0.05, 0.02),
    "critical.launching": share(0.7, 0.05),
    "drained": share(0.92, 0.04, "0"),
    "gpu.utilisation": share(0.6, 0.03, "5"),
    "gpu.busy": share(0.6, 0.03, "5"),
}

FAULTS: dict[str, dict[str, Figure]] = {
    "gpu-bound": {},
    "launch-overhead": LAUNCH_BOUND,
    "gil": LAUNCH_BOUND
    | {
        "gil.share": share(0.95, 0.02, "2"),
        "gil.held_by_others": share(0.7, 0.04, "2"),
        "critical.gil": share(0.25, 0.04, "2"),
        "critical.gil_wait": share(0.6, 0.05),
        "critical.launching": share(0.3, 0.04),
        "critical.cpu": share(0.4, 0.03, "1"),
    },
    "explicit-sync": LAUNCH_BOUND | {"critical.sync": share(0.5, 0.04), "critical.launching": share(0.35, 0.04)},
    "allocator-churn": LAUNCH_BOUND
    | {
        "critical.allocator_churn": share(0.4, 0.04),
        "critical.launching": share(0.4, 0.04),
        "allocator.device_calls": rate(120.0),
    },
    "host-copy": {"critical.copy": share(0.4, 0.04), "drained": share(0.6, 0.04, "0")}
    | {"gpu.busy": share(0.7, 0.03, "5"), "gpu.utilisation": share(0.7, 0.03, "5"), "critical.sync": share(0.4, 0.04)},
    "cpu-starvation": LAUNCH_BOUND
    | {
        "critical.runqueue": share(0.5, 0.03, "1"),
        "critical.cpu": share(0.45, 0.03, "1"),
        "host.load_per_cpu": Figure.read(3.0, "1", "count"),
    },
    "compile-gc": LAUNCH_BOUND | {"critical.compile_gc": share(0.6, 0.04), "critical.launching": share(0.1, 0.03)},
    "cpu-compute": {
        "process.cuda": share(0.0, 0.0, "1"),
        "critical.compute": share(0.9, 0.03),
        "drained": share(0.5, 0.5, "0"),
        "critical.device_wait": share(0.0, 0.01),
        "critical.sync": share(0.0, 0.01),
    },
    "lock": {"process.cuda": share(0.0, 0.0, "1"), "critical.lock": share(0.7, 0.04), "critical.cpu": share(0.2)}
    | {"critical.native_cpu": share(0.05), "critical.blocked": share(0.7, 0.04), "critical.device_wait": share(0.0)},
    "input": {"process.cuda": share(0.0, 0.0, "1"), "critical.queue_wait": share(0.7, 0.04), "critical.cpu": share(0.2)}
    | {"critical.native_cpu": share(0.05), "critical.blocked": share(0.7, 0.04), "critical.device_wait": share(0.0)},
    "python": LAUNCH_BOUND
    | {"critical.gil": share(0.8, 0.04, "2"), "gil.share": share(0.82, 0.04, "2"), "critical.launching": share(0.1)},
}


def by_id(found: list[Hypothesis]) -> dict[str, Hypothesis]:
    return {each.id: each for each in found}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_the_verdict(fault: str) -> None:
    """Figures of a known fault lead to it, and to nothing else."""
    found = judge_causes(HEALTHY | FAULTS[fault])
    assert by_id(found)[fault].outcome == "supported"
    assert conclude(found).cause == fault


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ("gpu-bound", "cpu-compute")])
def test_healthy_run_has_no_fault(fault: str) -> None:
    """A run that the GPU holds back is accused of nothing else."""
    assert by_id(judge_causes(HEALTHY))[fault].outcome != "supported"


def test_nothing_seen_decides_nothing() -> None:
    """Without figures every hypothesis is open and the verdict names the next measurement."""
    found = judge_causes({})
    assert {each.outcome for each in found} == {"undecided"}
    verdict = conclude(found)
    assert verdict.cause == "" and "undecided" in verdict.line
    assert verdict.next and verdict.next_s > 0


def test_missing_native_stacks_are_the_next_measurement() -> None:
    """A launch-bound run seen without native stacks stays open, and the report says what would decide it."""
    seen = {name: figure for name, figure in (HEALTHY | LAUNCH_BOUND).items() if figure.level != "4"}
    launch = by_id(judge_causes(seen))["launch-overhead"]
    assert launch.outcome == "undecided"
    assert "--allow-pause" in launch.next and launch.next_s > 0


def test_wide_interval_says_nothing() -> None:
    """A share on both sides of a threshold counts for neither, and asks for a longer look."""
    wide = Figure(value=0.35, interval=(0.05, 0.7), level="2", samples=20)
    found = by_id(judge_causes({"gil.held_by_others": wide}, seconds=10.0))["gil"]
    clue = next(each for each in found.evidence if each.key == "gil.held_by_others")
    assert clue.effect == "neither" and clue.points == 0
    assert found.outcome == "undecided"


def test_suspicion_is_answered_against_the_user() -> None:
    """A user who suspects the GIL of a launch-bound run hears that it is refuted, and by what."""
    found = judge_causes(HEALTHY | LAUNCH_BOUND, asked=asked_ids(["gil"]))
    assert found[0].id == "gil" and found[0].asked
    assert found[0].outcome == "refuted"
    against = {each.key for each in found[0].evidence if each.effect == "refutes"}
    assert "gil.share" in against


def test_starved_thread_is_no_launch_overhead() -> None:
    """A thread without a CPU launches late too: the deeper cause is named, not its effect."""
    found = judge_causes(HEALTHY | FAULTS["cpu-starvation"])
    assert by_id(found)["launch-overhead"].outcome == "supported"
    assert conclude(found).cause == "cpu-starvation"


def test_full_launch_queue_is_no_launch_overhead() -> None:
    """A thread that launches all the time because the queue is full waits for the GPU."""
    full = {"critical.launching": share(0.15), "critical.launch_queue_full": share(0.8), "critical.sync": share(0.01)}
    found = judge_causes(HEALTHY | full)
    assert by_id(found)["launch-overhead"].outcome == "refuted"
    assert conclude(found).cause == "gpu-bound"


def test_gain_ends_where_the_gpu_is_busy() -> None:
    """Removing a CPU-side cause cannot make a GPU faster than it is."""
    figures = HEALTHY | FAULTS["explicit-sync"] | {"gpu.busy": share(0.8, 0.05, "5")}
    found = by_id(judge_causes(figures))["explicit-sync"]
    assert found.gain is not None
    assert found.gain.value == pytest.approx(1.25)
    assert found.gain.low == pytest.approx(1 / 0.85) and found.gain.high == pytest.approx(1 / 0.75)


def test_a_state_has_no_gain() -> None:
    """What a sound program is bound by cannot be removed."""
    assert by_id(judge_causes(HEALTHY | LAUNCH_BOUND))["launch-overhead"].gain is None


def test_gain_of_a_lock_is_the_time_waited_for_it() -> None:
    """On a CPU the thread's share in the cause is what goes with it."""
    found = by_id(judge_causes(HEALTHY | FAULTS["lock"]))["lock"]
    assert found.gain is not None
    assert found.gain.value == pytest.approx(1 / 0.3)
    assert found.gain.low < found.gain.value < found.gain.high


def test_side_is_told_with_its_cause() -> None:
    """The pipeline's verdict comes first, then the cause inside of it, then what speaks against."""
    gain = Figure(value=1.19, interval=(1.15, 1.23), unit="ratio", level="0")
    verdict = conclude(
        judge_causes(HEALTHY | LAUNCH_BOUND), side="producer-bound", side_line="producer-bound: 1.19x", gain=gain,
        where="target-0",
    )  # fmt: skip
    assert verdict.line.startswith("producer-bound: 1.19x; cause in target-0: launch overhead")
    assert "against: none" in verdict.line
    assert verdict.gain == gain


def test_equal_causes_are_a_tie() -> None:
    """Two causes with the same points and gains leave the verdict open, with both names."""
    both = FAULTS["lock"] | {"critical.queue_wait": share(0.7, 0.04)}
    verdict = conclude(judge_causes(HEALTHY | both))
    assert verdict.cause == ""
    assert "lock" in verdict.line and "input" in verdict.line


def test_a_clearly_larger_cause_is_no_tie() -> None:
    """A thread that waits for a lock two thirds of the time and sleeps the rest is held up by the lock."""
    both = FAULTS["lock"] | {"critical.lock": share(0.65, 0.15), "critical.sleep": share(0.35, 0.14)}
    verdict = conclude(judge_causes(HEALTHY | both))
    assert verdict.cause == "lock"
    assert "also sleep" in verdict.line


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("gil", "gil"),
        ("the GIL is the bottleneck", "gil"),
        ("launch overhead", "launch-overhead"),
        ("allocator", "allocator-churn"),
        ("explicit-sync", "explicit-sync"),
        ("is it the dataloader?", "input"),
        ("drafter", "drafter-bound"),
        ("clock-cap", "clock-cap"),
    ],
)
def test_suspicion_in_words(text: str, id: str) -> None:
    """A hypothesis is found by its id or by a word of a sentence."""
    assert asked_ids([text]) == [id]


def test_unknown_suspicion_names_the_known_ones() -> None:
    """A word that no hypothesis is about is an error with the list."""
    with pytest.raises(AttachError, match="launch-overhead"):
        asked_ids(["moonlight"])


def test_every_cause_is_well_formed() -> None:
    """Each can be supported and refuted at all, its effects exist, and thresholds leave room between them."""
    assert len(BY_ID) == len(CAUSES)
    for cause in CAUSES:
        assert any(clue.must and clue.supports for clue in cause.clues), cause.id
        assert any(clue.veto and clue.refutes for clue in cause.clues), cause.id
        assert set(cause.explains) <= set(BY_ID), cause.id
        for clue in cause.clues:
            if clue.supports and clue.refutes:
                assert clue.supports[0] != clue.refutes[0], clue
                above, below = sorted((clue.supports, clue.refutes), reverse=True)
                assert float(above[1:]) > float(below[1:]), clue


@given(
    st.dictionaries(
        st.sampled_from(sorted(HEALTHY)), st.tuples(st.floats(0, 1), st.floats(0, 0.5)), max_size=len(HEALTHY)
    )
)
def test_any_figures_are_judged(values: dict[str, tuple[float, float]]) -> None:
    """Whatever was seen there is a verdict, its numbers finite, and it is the same the second time."""
    figures = {name: share(value, half) for name, (value, half) in values.items()}
    found = judge_causes(figures)
    assert {each.id for each in found} == set(BY_ID)
    verdict = conclude(found)
    assert verdict == conclude(judge_causes(figures))
    assert verdict.line
    if verdict.cause:
        assert by_id(found)[verdict.cause].outcome == "supported"


@given(st.sampled_from(sorted(FAULTS)), st.data())
def test_less_evidence_never_turns_a_verdict_round(fault: str, data: st.DataObject) -> None:
    """Figures taken away may leave a hypothesis open; it is refuted only by figures that speak against it."""
    figures = HEALTHY | FAULTS[fault]
    keep = data.draw(st.sets(st.sampled_from(sorted(figures))))
    found = by_id(judge_causes({name: figures[name] for name in keep}))[fault]
    if found.outcome == "refuted":
        assert any(each.effect == "refutes" for each in found.evidence)
