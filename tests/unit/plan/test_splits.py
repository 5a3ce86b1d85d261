"""Splits by hand, what fits and what is best, and the model held to the result files that it was fitted on."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import plan as benchmark
from paceline.config import load_config
from paceline.errors import ConfigError
from paceline.plan import speed, splits
from paceline.plan.cards import CARDS
from paceline.plan.memory import GIB
from paceline.plan.outline import BUILT_IN, Documents, Outline, outline, target_sizes, with_topology
from paceline.plan.speed import CONSTANTS, Times, times
from paceline.plan.splits import best_of, memory_by_role, plan_record, plan_splits, role_memory
from paceline.plan.what_if import Measured, Split, colocated_rate, parse_split, split_rate, what_if

ROOT = Path(__file__).parents[3]
H200 = CARDS["h200"]


def unit(*overrides: str, target: str = "qwen3-8b") -> Outline:
    config = load_config(None, ["target.path=t", "data.path=d", *overrides])
    return outline(config, target_sizes(BUILT_IN[target]), Documents((3072,)))


# ------------------------------------------------------------------ the closed form


def test_the_slower_side_is_the_rate() -> None:
    """min(N / t, M / d), and G / (t + d) in turn."""
    assert split_rate(3, 5, 0.3, 0.5) == pytest.approx(10.0)
    assert split_rate(1, 1, 0.3, 0.5) == pytest.approx(2.0)
    assert split_rate(5, 1, 0.3, 0.5) == pytest.approx(2.0)
    assert colocated_rate(8, 0.3, 0.5) == pytest.approx(10.0)
    assert split_rate(3, 5, 0.3, 0.5) <= colocated_rate(8, 0.3, 0.5) + 1e-12


@pytest.fixture
def half_and_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target takes 0.3 s and a drafter 0.5; nothing else takes any."""
    monkeypatch.setattr(splits, "times", lambda *_: Times({"all": 0.3}, {"all": 0.5}, 0.0))
    monkeypatch.setattr(splits, "update_s", lambda *_: 0.0)
    monkeypatch.setattr(splits, "transport", lambda *_: (0.0, 0.0))


@pytest.mark.usefixtures("half_and_half")
def test_splits_of_eight_by_hand() -> None:
    """With steps that divide evenly, 3+5 is as fast as all in turn, and 5+3 loses two fifths (DESIGN.md, 1)."""
    plan = unit()
    found = {(s.layout, s.targets, s.drafters): s for s in plan_splits(plan, H200, 8, is_even=True)}
    assert len(found) == 8
    rates = {key: split.tok_per_s / plan.slots for key, split in found.items()}
    assert rates["colocated", 8, 8] == pytest.approx(10.0)
    assert rates["split", 3, 5] == pytest.approx(10.0)
    assert rates["split", 5, 3] == pytest.approx(6.0) and found["split", 5, 3].limit == "drafters"
    assert rates["split", 1, 7] == pytest.approx(1 / 0.3) and found["split", 1, 7].limit == "targets"
    assert found["split", 3, 5].batches_per_step == 10 and found["split", 3, 5].idle_frac == 0.0


@pytest.mark.usefixtures("half_and_half")
def test_micro_batches_that_do_not_share_out_leave_drafters_idle() -> None:
    """Of 8 micro-batches a step, 5 drafters need two turns as 4 do, and more than 8 have nothing to do."""
    plan = unit()
    assert plan.batches_per_step == 8
    found = {s.targets: s for s in plan_splits(plan, H200, 8)}
    assert found[3].tok_per_s == pytest.approx(found[4].tok_per_s)
    assert found[3].idle_frac == pytest.approx(0.2) and found[4].idle_frac == 0.0
    many = plan_splits(plan, H200, 16)[0]
    assert many.layout == "colocated" and many.idle_frac == pytest.approx(0.5)
    assert many.tok_per_s == pytest.approx(plan_splits(plan, H200, 8)[0].tok_per_s)
    assert plan_splits(plan, H200, 16, is_even=True)[0].tok_per_s == pytest.approx(2 * many.tok_per_s)


@pytest.mark.usefixtures("half_and_half")
def test_hours_are_tokens_over_speed() -> None:
    """And GPU-hours are those of all cards, whatever they do."""
    plan = unit()
    split = plan_splits(plan, H200, 4, tokens=3.6e9)[0]
    assert split.hours == pytest.approx(3.6e9 / split.tok_per_s / 3600)
    assert split.gpu_hours == pytest.approx(4 * split.hours)


def test_transport_and_exchange_slow_a_split_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features take their time on both sides, gradients theirs, and hosts share a network."""
    plan = unit()
    now = {s.targets: s.tok_per_s for s in plan_splits(plan, H200, 8, is_even=True)}
    monkeypatch.setattr(splits, "transport", lambda *_: (0.0, 0.0))
    free = {s.targets: s.tok_per_s for s in plan_splits(plan, H200, 8, is_even=True)}
    assert all(free[n] > now[n] for n in range(1, 8)) and free[8] == now[8]
    one, eight = speed.update_s(plan, H200, 1), speed.update_s(plan, H200, 8)
    assert one == pytest.approx(8.34e-3, rel=0.01)  # the update that was measured
    exchanged = 6 * plan.draft.parameters * 7 / 8 / (450e9 * 0.8)
    assert eight == pytest.approx(one / 8 + exchanged)
    assert speed.update_s(plan, H200, 16, hosts=2) > eight
    monkeypatch.setattr(splits, "NETWORK_GB_PER_S", 0.1)
    assert {s.limit for s in plan_splits(plan, H200, 16)[1:]} == {"network"}


def test_features_in_fp8_travel_in_half_the_bytes() -> None:
    """Host, store and network carry fewer; the cards hold an encoded batch more, and those in turn none."""
    plan, small = unit(), unit("pipeline.transport=fp8")
    full, half = plan.slots * 5 * 4096 * 2, plan.slots * 5 * (4096 + 4)
    out_s, in_s = splits.transport(plan, H200)
    fp8_out_s, fp8_in_s = splits.transport(small, H200)
    values = plan.slots * 5 * 4096
    assert fp8_out_s == pytest.approx(out_s * half / full + values * speed.ENCODE_BYTES / H200.bytes_per_s)
    assert fp8_in_s == pytest.approx(in_s * half / full + values * speed.DECODE_BYTES / H200.bytes_per_s)
    assert fp8_out_s + fp8_in_s < out_s + in_s
    before, after = (memory_by_role(with_topology(each, "split", 2, 2)) for each in (plan, small))
    for role in ("target", "drafter"):
        assert after[role]["channel"] - before[role]["channel"] == half
    assert after["host"] == before["host"]
    together = with_topology(plan, "colocated", 1, 4), with_topology(small, "colocated", 1, 4)
    assert memory_by_role(together[0]) == memory_by_role(together[1])
    for split in plan_splits(small, H200, 4):
        overrides = ["pipeline.transport=fp8", *splits.settings_of(small, split, is_even=False)]
        config = load_config(None, ["target.path=t", "data.path=d", *overrides])
        assert config.pipeline.transport == ("fp8" if split.layout == "split" else "target")


# ------------------------------------------------------------------ memory, and what is best


def test_the_best_is_the_fastest_that_fits() -> None:
    """Beside a card that holds either role but not both, the split wins though it is slower."""
    plan = unit()
    found = plan_splits(plan, H200, 8, is_even=True)
    best = best_of(found)
    assert best is not None and best.layout == "colocated"
    assert best.tok_per_s == max(each.tok_per_s for each in found if each.fits)
    small = dataclasses.replace(H200, memory_gib=40.0)
    tight = plan_splits(plan, small, 8, is_even=True)
    best = best_of(tight)
    assert best is not None and best.layout == "split"
    assert best.tok_per_s == max(each.tok_per_s for each in tight if each.fits)
    colocated = tight[0]
    assert not colocated.fits
    assert colocated.missing_gib == pytest.approx(colocated.memory_gib - splits.USABLE * 40.0)
    assert best_of(plan_splits(plan, dataclasses.replace(H200, memory_gib=8.0), 2)) is None


def test_roles_need_what_the_memory_plan_says() -> None:
    """Colocated, a role has all; split, the target has no optimizer and the drafter no trunk."""
    plan = with_topology(unit(), "colocated", 1, 1)
    parts = memory_by_role(plan)["colocated"]
    assert sum(parts.values()) == splits.memory_parts(plan).total_bytes == role_memory(plan)["colocated"]
    split = memory_by_role(with_topology(unit(), "split", 3, 5))
    assert set(split) == {"target", "drafter", "host"}
    assert split["target"]["optimizer"] == 0 and split["drafter"]["optimizer"] == 12 * unit().draft.parameters // 5
    trunk = 2 * unit().target.trunk_parameters(34)
    assert split["target"]["weights"] > trunk > split["drafter"]["weights"] - split["drafter"]["optimizer"]
    slots = unit().slots * 5 * 4096 * 2
    # five wait for each of 5 drafters twice over, and one a target, but never more than the queue may hold
    assert split["host"]["channel"] == min((2 * 5 + 3 + 3) * slots, 4 * GIB + 3 * slots)


def test_a_target_that_is_elsewhere_takes_nothing_here() -> None:
    """Threads ask for features; what a drafter shares of the target is the drafter's."""
    server = "target.server=http://127.0.0.1:1"
    here, elsewhere = (memory_by_role(with_topology(unit(*keys), "split", 1, 1)) for keys in ((), (server,)))
    assert not any(elsewhere["target"].values()) and all(here["target"][name] for name in ("weights", "channel"))
    assert elsewhere["drafter"]["optimizer"] == here["drafter"]["optimizer"]


def test_a_target_that_fits_no_card_is_said_to_lack_memory() -> None:
    """A 27 B target on 10 GiB: every split is listed, none fits, and what is missing is told."""
    small = dataclasses.replace(CARDS["rtx4090"], memory_gib=10.0)
    found = plan_splits(unit(target="qwen3.6-27b"), small, 4)
    assert len(found) == 4 and not any(each.fits for each in found)
    assert all(each.missing_gib > 20 and each.gpus_per_target == 1 for each in found)


def test_rows_of_64_k_tokens_fit_one_card_if_layers_are_computed_again() -> None:
    """An 8 B target with its drafter on an H200. What is kept then is each layer's input, two streams of it behind the
    first, the context's keys and values, and one layer's inside."""
    rows = Documents((65_536,))

    def planned(*overrides: str) -> Outline:
        config = load_config(None, ["target.path=t", "data.path=d", "data.max_length=65536", *overrides])
        return outline(config, target_sizes(BUILT_IN["qwen3-8b"]), rows)

    plain, again = planned(), planned("draft.recompute=true")
    assert plain.slots == 65_536 and plain.num_anchors == 10_920
    assert not plan_splits(plain, H200, 1)[0].fits and plan_splits(again, H200, 1)[0].fits
    kept, less = (
        memory_by_role(with_topology(each, "colocated", 1, 1))["colocated"]["activations"] for each in (plain, again)
    )
    block_rows, width, layers = 10_920 * 16, 4096, 5
    inside = 4 * width + 3 * 12_288 + 2 * 4096 + 2 * 1024
    saved = (layers - 1) * inside - (2 * layers - 1) * width
    assert kept - less == 2 * block_rows * saved


# ------------------------------------------------------------------ targets over several cards


def test_a_target_that_fits_no_card_is_split_over_as_many_as_it_needs() -> None:
    """235 B parameters on eight H200: four cards hold them, three do not; more are faster, and each split is told."""
    plan = unit(target="qwen3-235b-a22b")
    assert splits.gpus_of_target(plan, H200) == 4
    found = plan_splits(plan, H200, 8)
    assert [(each.targets, each.gpus_per_target, each.drafters) for each in found[1:]] == [
        (1, 4, 4), (1, 5, 3), (1, 6, 2), (1, 7, 1),
    ]  # fmt: skip
    assert not found[0].fits and all(each.fits for each in found[1:])
    three = role_memory(with_topology(plan, "split", 1, 5, 3))["target"]
    assert three > splits.USABLE * H200.memory_gib * GIB
    best = best_of(found)
    assert best is not None and best.gpus_per_target == 6
    config = load_config(None, ["target.path=t", "data.path=d", *splits.settings_of(plan, best, is_even=False)])
    assert (config.topology.gpus_per_target, config.topology.drafters, config.topology.executor) == (6, 2, "ray")
    record = plan_record(plan, H200, 8, target="t", tokens=1e9, distinct_tokens=1e9, sources={})
    assert record["gpus_per_target"] == 4 and record["best"]["gpus_per_target"] == 6
    assert record["memory"]["target"]["weights_gib"] == pytest.approx(max(splits.target_weights(of(plan, 6))) / GIB)


def test_cards_that_are_too_few_for_a_target_are_told_from_those_that_are_too_small() -> None:
    """On two cards nothing fits, and the plan still says how many a target takes; a run file that leaves no card to a
    drafter is refused."""
    plan = unit(target="qwen3-235b-a22b")
    found = plan_splits(plan, H200, 2)
    assert not any(each.fits for each in found) and {each.gpus_per_target for each in found} == {1}
    assert plan_record(plan, H200, 2, target="t", tokens=1e9, distinct_tokens=1e9, sources={})["gpus_per_target"] == 4
    with pytest.raises(ConfigError, match="gpus_per_target=8: of 8 GPUs none is left for a drafter"):
        plan_splits(unit("topology.gpus_per_target=8"), H200, 8)


def of(plan: Outline, gpus: int) -> Outline:
    return with_topology(plan, "split", 1, 1, gpus)


def test_what_fits_is_not_split_unless_the_run_file_says_so() -> None:
    """And then it takes that many cards and no more."""
    assert {each.gpus_per_target for each in plan_splits(unit(), H200, 8)} == {1}
    found = plan_splits(unit("topology.gpus_per_target=3"), H200, 8)
    assert [(each.targets, each.gpus_per_target, each.drafters) for each in found[1:]] == [(1, 3, 5), (2, 3, 2)]


@pytest.mark.usefixtures("half_and_half")
def test_the_largest_part_of_a_target_sets_its_pace() -> None:
    """Of 34 layers over three cards, one of them with embedding and head, the slowest part has 14; rows follow one
    another, so its time is the target's."""
    plan = unit("topology.gpus_per_target=3")
    found = next(each for each in plan_splits(plan, H200, 8, is_even=True) if each.layout == "split")
    assert found.tok_per_s / plan.slots == pytest.approx(34 / 14 / 0.3) and found.limit == "targets"


@pytest.mark.parametrize("gpus", [1, 2, 3, 5])
def test_parts_are_cut_as_a_run_cuts_them(gpus: int) -> None:
    """Layers and bytes of each card agree with those of the model, but for its vectors."""
    from transformers import AutoModelForCausalLM

    from benchmarks import shapes
    from paceline.models.split import bytes_of, starts_of

    plan = of(unit(), gpus)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shapes.CONFIGS["qwen3-8b"](), dtype=torch.bfloat16)
    starts = starts_of(model, plan.num_layers, gpus, keeps_norm=False)
    edges = [*starts, plan.num_layers]
    layers = [bytes_of(layer) for layer in model.get_decoder().layers]
    held = [sum(layers[a:b]) for a, b in itertools.pairwise(edges)]
    held[0] += 2 * 2 * 151_936 * 4096
    assert splits.target_weights(plan) == pytest.approx(held, rel=1e-3)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_best_is_told_as_overrides_of_a_run_file(count: int) -> None:
    """They are keys that exist, and set the split; an even step is a multiple of the drafters' micro-batches."""
    plan = unit()
    for split in plan_splits(plan, H200, count, is_even=True):
        overrides = splits.settings_of(plan, split, is_even=True)
        config = load_config(None, ["target.path=t", "data.path=d", *overrides])
        assert config.topology.layout == split.layout and config.topology.drafters == split.drafters
        assert config.topology.targets == (split.targets if split.layout == "split" else 1)
        assert config.topology.executor == ("local" if count == 1 else "ray")
        assert outline(config, plan.target, plan.documents).batches_per_step == split.batches_per_step
        assert split.batches_per_step % split.drafters == 0


def test_the_record_has_what_scripts_read() -> None:
    """Keys of the JSON, `best` among `splits`, and figures that JSON can hold."""
    record = plan_record(
        unit("draft.kind=dspark"),
        H200,
        4,
        target="qwen3-8b",
        tokens=1e9,
        distinct_tokens=2e8,
        sources={"tokens": "asked"},
    )
    assert set(record) >= {"splits", "best", "flops", "memory", "offline_cache_bytes", "assumptions"}
    wanted = {"targets", "drafters", "layout", "tok_per_s", "memory_gib", "hours", "gpu_hours"}
    assert all(wanted <= set(split) for split in record["splits"]) and record["best"] in record["splits"]
    assert set(record["flops"]) == {"per_token", "per_anchor_block"}
    assert set(record["memory"]) == {"colocated", "target", "drafter", "host"}
    assert record["offline_cache_bytes"] == 2e8 * 6 * 4096 * 2  # five taps and the last hidden state
    assert all("source" in each for each in record["assumptions"].values())
    json.dumps(record, allow_nan=False)


# ------------------------------------------------------------------ the model and the runs


def test_constants_are_fitted_on_the_result_files() -> None:
    """What stands in the code comes out again, to the digits that are written."""
    fitted = benchmark.fit()
    assert set(fitted) == {*CONSTANTS, "matmul_share", "memory_share"}
    for name, constant in CONSTANTS.items():
        assert constant.value == pytest.approx(fitted[name], rel=2e-3), name
        assert (ROOT / constant.source.split()[0]).is_file()
    assert H200.matmul_share == pytest.approx(fitted["matmul_share"], rel=1e-3)
    assert H200.memory_share == pytest.approx(fitted["memory_share"], rel=1e-3)


def test_the_committed_error_table_is_what_comes_out_now() -> None:
    """The result file is that of this code, and three shapes are within a tenth."""
    committed = json.loads((ROOT / "benchmarks/results/plan-error.json").read_text())
    assert abs(committed.pop("what_if")["largest_error_frac"]) < benchmark.GOAL  # else a simulation would be due
    now = json.loads(json.dumps(benchmark.error_table()))
    rows, wanted = now.pop("runs"), committed.pop("runs")
    assert now == committed
    for row, its in zip(rows, wanted, strict=True):
        assert row["run"] == its["run"] and row["error_frac"] == pytest.approx(its["error_frac"], abs=2e-4)
    assert len(now["shapes_within_goal"]) >= 3
    for row in rows:
        if row["is_prediction"]:
            assert abs(row["error_frac"]["step_ms"]) < benchmark.GOAL, row["run"]


def test_the_documented_tables_are_what_comes_out_now() -> None:
    """docs/plan.md has the lines that `python -m benchmarks.plan --table` prints, and the errors of the result file."""
    page = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    for name in benchmark.TABLES:
        for line in benchmark.table(name, benchmark.COUNTS):
            assert line in page
    for line in benchmark.error_lines(benchmark.error_table()):
        assert line in page


def test_times_follow_the_work() -> None:
    """Half the anchors take about half of the drafter's time; fp8 and other kinds change their own side alone."""
    whole, half = times(unit(), H200), times(unit("anchors.per_token=0.08335"), H200)
    assert half.drafter_s / whole.drafter_s == pytest.approx(0.5, abs=0.03)
    assert half.target_s == whole.target_s
    fast = times(unit("target.fp8=true"), H200)
    assert fast.drafter_s == whole.drafter_s and fast.target_s < 0.7 * whole.target_s
    assert times(unit("draft.kind=dflash2"), H200).drafter_s > whole.drafter_s
    assert times(unit("draft.recompute=true"), H200).drafter_s > 1.15 * whole.drafter_s
    assert times(unit(), CARDS["a100-80g"]).target_s > 3 * whole.target_s


def test_a_small_target_waits_for_launches() -> None:
    """Launched one by one, a 135 M target takes as long as its launches; in a graph it does not."""
    graph, launched = (times(unit(*more, target="smollm2-135m"), H200) for more in ((), ('kernels.cuda_graphs="off"',)))
    kernels = speed.KERNELS_PER_LAYER["target"] * 28
    assert launched.target_s == pytest.approx(kernels * speed.value("launch"))
    assert graph.target_s < launched.target_s / 1.3
    large = times(unit('kernels.cuda_graphs="off"'), H200)
    assert large.target_s == pytest.approx(times(unit(), H200).target_s)


# ------------------------------------------------------------------ from a cache

CACHE = "target.cache=features"


def test_from_a_cache_a_card_has_drafter_head_one_layer_and_what_waits() -> None:
    """Of the target's 34 layers one is there and none runs; the queue is on the drafter's card, and nothing is kept in
    the host's memory."""
    kept = "pipeline.feature_cache_gib=8"
    cached, online = unit(CACHE, kept), unit(kept)
    here = splits.memory_parts(with_topology(cached, "split", 1, 1))
    there = splits.memory_parts(with_topology(online, "split", 1, 1))
    assert here.target_bytes == 2 * online.target.trunk_parameters(1) == there.target_bytes // 34
    assert (here.cache_bytes, there.cache_bytes) == (0, 8 * GIB)
    for name in ("shared_bytes", "drafter_bytes", "activation_bytes", "queue_bytes"):
        assert getattr(here, name) == getattr(there, name)
    roles = memory_by_role(with_topology(cached, "split", 1, 1))
    assert set(roles) == {"drafter"} and sum(roles["drafter"].values()) == here.total_bytes
    assert roles["drafter"]["channel"] == 4 * 12_288 * 5 * 4096 * 2  # three wait, one is being read
    assert memory_by_role(with_topology(cached, "colocated", 1, 8))["drafter"]["channel"] == 12_288 * 5 * 4096 * 2


def test_a_mixtures_layer_that_is_loaded_has_all_its_experts() -> None:
    """A target with experts: one layer of it, as it is."""
    plan = unit(CACHE, target="qwen3-30b-a3b")
    assert splits.memory_parts(plan).target_bytes == 2 * plan.target.trunk_parameters(1) > 1e9


def test_from_a_cache_the_drafters_set_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """No target's time is in it, and no split with targets; the way to the card is, and a smaller type's is shorter."""
    monkeypatch.setattr(splits, "update_s", lambda *_: 0.0)
    plan, online = unit(CACHE), unit()
    (one,), (eight,) = (plan_splits(plan, H200, count, is_even=True) for count in (1, 8))
    copied_s = 12_288 * 5 * 4096 * 2 / 64e9
    drafter_s = times(online, H200).drafter_s
    assert one.tok_per_s == pytest.approx(12_288 / (drafter_s + copied_s))
    assert eight.tok_per_s == pytest.approx(8 * one.tok_per_s)
    assert one.tok_per_s > 1.5 * plan_splits(online, H200, 1)[0].tok_per_s
    assert {(each.targets, each.limit, each.gpus_per_target) for each in (one, eight)} == {(0, "drafters", 1)}
    narrow = dataclasses.replace(plan, token_bytes=20_500)
    assert times(narrow, H200).drafter_s - drafter_s == pytest.approx(12_288 * 20_500 / 64e9)
    big = unit(CACHE, target="qwen3-235b-a22b")  # does not fit one card, and does not have to
    assert plan_splits(big, H200, 1)[0].fits and not plan_splits(unit(target="qwen3-235b-a22b"), H200, 8)[0].fits
    with pytest.raises(ConfigError, match="gpus_per_target=2 with target.cache: no target runs"):
        plan_splits(unit(CACHE, "topology.gpus_per_target=2"), H200, 8)


@pytest.mark.parametrize(("count", "wanted"), [(1, ("split", "local", 1)), (8, ("colocated", "ray", 8))])
def test_a_run_from_a_cache_is_told_as_overrides(count: int, wanted: tuple[str, str, int]) -> None:
    """One drafter reads ahead in this process, with as many threads as the run file says; several on Ray each read
    their own, as `resolve` allows, whatever the run file has."""
    other = ["topology.executor=ray", "topology.targets=3", "topology.drafters=2"]
    for own in ([], other):
        plan = unit(CACHE, *own)
        (found,) = plan_splits(plan, H200, count)
        told = splits.settings_of(plan, found, is_even=False)
        topology = load_config(None, ["target.path=t", "data.path=d", CACHE, *own, *told]).topology
        assert (topology.layout, topology.executor, topology.drafters) == wanted
        assert topology.targets == (3 if own and count == 1 else 1)


def test_the_record_says_what_has_to_be_read() -> None:
    """Bytes a second at the planned speed, in all and on each of two hosts; no work and no time of a target."""
    plan = dataclasses.replace(unit(CACHE), token_bytes=20_500)
    record = plan_record(plan, H200, 16, target="t", tokens=1e9, distinct_tokens=2e8, sources={}, is_even=True)
    read, best = record["reading"], record["best"]
    assert read["gb_per_s"] == pytest.approx(best["tok_per_s"] * 20_500 / 1e9)
    assert read["gb_per_s_per_host"] == pytest.approx(read["gb_per_s"] / 2)
    assert (read["cache"], read["bytes_per_token"], read["is_ahead"]) == ("features", 20_500, False)
    assert record["offline_cache_bytes"] == 2e8 * 20_500
    assert not record["times_ms"]["target"] and not record["times_ms"]["transport"]
    assert not any(name.startswith("target") for name in record["flops"]["per_token"])
    assert set(record["memory"]) == {"drafter"}
    json.dumps(record, allow_nan=False)
    online = plan_record(unit(), H200, 16, target="t", tokens=1e9, distinct_tokens=2e8, sources={})
    assert online["reading"] is None and online["times_ms"]["target"]


# ------------------------------------------------------------------ what if


MEASURED = Measured(Split("split", 2, 1), batches_per_s=5.0, target_s=0.4, drafter_s=0.1)


@pytest.mark.parametrize(
    ("split", "rate", "limit"),
    [
        (Split("split", 2, 1), 5.0, "targets"),
        (Split("split", 3, 1), 7.5, "targets"),
        (Split("split", 6, 1), 10.0, "drafters"),
        (Split("split", 6, 2), 15.0, "targets"),
        (Split("split", 9, 2), 20.0, "drafters"),
        (Split("colocated", 1, 1), 2.0, "in turn"),
        (Split("colocated", 1, 4), 8.0, "in turn"),
    ],
)
def test_other_splits_by_hand(split: Split, rate: float, limit: str) -> None:
    """From a target's and a drafter's time alone."""
    answer = what_if(MEASURED, split)
    assert answer.batches_per_s == pytest.approx(rate)
    assert (answer.gain, answer.limit) == (pytest.approx(rate / 5.0), limit)


def test_from_in_turn_to_split_features_have_to_travel() -> None:
    """A run in turn had no transport; a split run's is in its times."""
    measured = Measured.of(Split("colocated", 1, 2), 4.0, target_per_s=10.0, drafter_per_s=20 / 3)
    assert (measured.target_s, measured.drafter_s) == (pytest.approx(0.2), pytest.approx(0.3))
    assert what_if(measured, Split("split", 2, 3), 0.1).batches_per_s == pytest.approx(2 / 0.3)
    assert what_if(MEASURED, Split("split", 3, 1), 0.1).batches_per_s == pytest.approx(7.5)
    assert what_if(measured, Split("colocated", 1, 4), 0.1).batches_per_s == pytest.approx(8.0)


def test_a_split_is_read_from_its_text() -> None:
    """What is left out is the run's; targets named without a layout mean a split."""
    run, turn = Split("split", 3, 2), Split("colocated", 1, 2)
    assert parse_split("targets=6,drafters=2", run) == Split("split", 6, 2)
    assert parse_split("targets=6", run) == Split("split", 6, 2)
    assert parse_split(" drafters = 4 ", run) == Split("split", 3, 4)
    assert parse_split("drafters=4", turn) == Split("colocated", 1, 4)
    assert parse_split("layout=colocated,drafters=8", run) == Split("colocated", 1, 8)
    assert parse_split("targets=2,drafters=2", turn) == Split("split", 2, 2)


@pytest.mark.parametrize(
    "text",
    ["", "6+2", "targets=0", "targets=x", "drafters=-1", "layout=ring", "targets=1,targets=2", "gpus=8", "targets=6 2"]
    + ["layout=colocated,targets=3,drafters=2"],
)
def test_what_is_no_split_is_refused(text: str) -> None:
    """The message says what was seen and wanted."""
    with pytest.raises(ConfigError, match="--what-if .*targets=N,drafters=M"):
        parse_split(text, Split("split", 3, 2))


def test_no_figure_is_infinite() -> None:
    """Even for the smallest and the largest of what there is."""
    for target in BUILT_IN:
        for card in CARDS.values():
            found: Any = plan_splits(unit(target=target), card, 3)
            assert all(math.isfinite(each.tok_per_s) and each.tok_per_s > 0 for each in found)
