"""Drafters that update together: the same training as one alone, whoever had which micro-batch."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import Loss, Optim
from paceline.errors import PipelineError
from paceline.models.target import Target
from paceline.records import FeatureBatch, StepResult
from paceline.train import checkpoint, saver, sharded
from paceline.train.checkpoint import TrainState
from paceline.train.group import Group
from paceline.train.optim import ALIGNMENT, MasterAdamW
from paceline.train.saver import Saver
from paceline.train.sharded import ShardedAdamW
from paceline.train.step import TrainStep
from tests import ranks, tiny

STEPS = [[0, 1, 2, 3, 4], [5], [6, 7, 8, 9], [10, 11, 12], [13, 14]]
"""Micro-batches of each step: more than ranks, fewer, unevenly many; 2, 5 and 12 have nothing to learn or little."""

OPTIM = Optim(lr=1e-2, clip=0.5, weight_decay=0.1, warmup_ratio=0.2)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, list[FeatureBatch]]:
    """A target, and the features of its micro-batches."""
    target = tiny.target("llama", tmp_path_factory.mktemp("sharded") / "target", layer_ids=(1, 3))
    rows = [tiny.row([9 + n % 4, 14, 3 + n % 5], 32, seed=n, number=n) for n in range(15)]
    for n in (2, 12):
        rows[n] = dataclasses.replace(rows[n], loss_mask=torch.zeros_like(rows[n].loss_mask))
    rows[5].loss_mask[8:] = False
    return target, [target.features(row) for row in rows]


@pytest.fixture(params=[2**26, 2500], ids=["", "pieces"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "PIECE_ELEMENTS", request.param)


def make_step(
    target: Target, group: Group, dtype: torch.dtype = torch.float32, shards: bool = False, kind: str = "dflash"
) -> TrainStep:
    # every token a candidate: which are the best few of random logits is up to the order in which ranks add
    options = {"selector_top_k": tiny.VOCAB} if kind == "dflash2" else None
    return TrainStep(
        tiny.drafter(tiny.shape_of_kind(kind, options)), target.embed, target.head.to(dtype), OPTIM, num_anchors=12,
        loss=Loss(gamma=2.0), seed=5, total_steps=len(STEPS), batches_per_step=5, dtype=dtype, group=group,
        shards_gradients=shards,
    )  # fmt: skip


def train(step: TrainStep, features: list[FeatureBatch], first: int = 0, last: int = len(STEPS)) -> list[StepResult]:
    """Steps with their micro-batches dealt out round robin; this rank's results."""
    results = []
    for number in range(first, last):
        batches = STEPS[number]
        for turn in range(0, len(batches), step.group.size):
            own = turn + step.group.rank
            step.accumulate(features[batches[own]] if own < len(batches) else None)
        results.append(step.update(number).read())
    return results


def weights_of(step: TrainStep) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in step.drafter.state_dict().items()}


def gathered(optimizer: MasterAdamW) -> dict[str, dict[str, Tensor]]:
    """Whole masters and averages, on rank 0; nothing on the others."""
    keys = ("master", "exp_avg", "exp_avg_sq")
    whole = {key: torch.full((optimizer.num_elements,), math.nan) for key in keys}
    is_first = optimizer.group.rank == 0
    optimizer.copy_buffers(whole if is_first else None)
    return {key: optimizer.named(whole[key]) for key in keys} if is_first else {}


def assert_near(found: Sequence[StepResult], wanted: Sequence[StepResult], rel: float) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=rel) and one.is_finite
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=10 * rel)
        assert one.rounds == pytest.approx(other.rounds, rel=1e-12) and one.lr == other.lr


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("shards", [False, True], ids=["", "shards_gradients"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_train_as_one_drafter_does(batches: tuple[Target, list[FeatureBatch]], size: int, shards: bool) -> None:
    """Losses, norms, weights and averages are those of one drafter with all micro-batches but for float32's rounding;
    all ranks have the same bits."""
    target, features = batches
    alone = make_step(target, Group())
    wanted = train(alone, features)
    assert all(result.grad_norm > OPTIM.clip for result in wanted)

    def work(group: Group) -> tuple[list[StepResult], dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        step = make_step(target, group, shards=shards)
        return train(step, features), weights_of(step), gathered(step.optimizer)

    found = ranks.run(size, work)
    assert_near(found[0][0], wanted, rel=1e-5)
    for results, weights, _ in found:
        assert results == found[0][0]
        for name, weight in alone.drafter.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=2e-6)
            assert torch.equal(weights[name], found[0][1][name])
    for key, named in gathered(alone.optimizer).items():
        for name, value in named.items():
            torch.testing.assert_close(found[0][2][key][name], value, rtol=1e-5, atol=1e-6)
            assert key != "master" or torch.equal(found[0][2][key][name], found[0][1][name])


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_ranks_of_other_kinds_train_as_one(kind: str, tmp_path: Path) -> None:
    """Losses and weights of two ranks are those of one drafter, terms of the kind's own included."""
    target = tiny.target("llama", tmp_path / "target", layer_ids=(1, 3), needs_last_hidden=True)
    features = [target.features(tiny.row([9 + n % 4, 14, 3 + n % 5], 32, seed=n, number=n)) for n in range(15)]
    alone = make_step(target, Group(), kind=kind)
    wanted = train(alone, features)

    def work(group: Group) -> tuple[list[StepResult], dict[str, Tensor]]:
        step = make_step(target, group, shards=True, kind=kind)
        return train(step, features), weights_of(step)

    for results, weights in ranks.run(2, work):
        assert_near(results, wanted, rel=1e-5)
        for name, weight in alone.drafter.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-4)  # of steps of 1e-2


@pytest.mark.parametrize("shards", [False, True], ids=["", "shards_gradients"])
def test_in_bfloat16_copies_are_rounded_masters(batches: tuple[Target, list[FeatureBatch]], shards: bool) -> None:
    """Float32 masters stay near those of one drafter, and each rank computes with the same rounded copies of them."""
    target, features = batches
    alone = make_step(target, Group(), torch.bfloat16)
    wanted = train(alone, features)

    def work(group: Group) -> tuple[list[StepResult], dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        step = make_step(target, group, torch.bfloat16, shards)
        return train(step, features), weights_of(step), gathered(step.optimizer)

    found = ranks.run(2, work)
    for results, weights, _ in found:
        assert results[0].loss == pytest.approx(wanted[0].loss, rel=1e-5)
        assert [r.loss for r in results] == pytest.approx([r.loss for r in wanted], rel=1e-3)
        for name, master in found[0][2]["master"].items():
            assert torch.equal(weights[name], master.bfloat16())
            torch.testing.assert_close(master, alone.optimizer.masters[name], rtol=0, atol=5e-4)  # of steps of 1e-2


def test_a_rank_holds_its_part_and_no_more(batches: tuple[Target, list[FeatureBatch]]) -> None:
    """Masters, averages and sums of all ranks are a third each; the parts of every tensor make up the whole, once."""
    target, features = batches

    def work(group: Group) -> tuple[TrainStep, dict[str, Tensor]]:
        step = make_step(target, group, shards=True)
        step.accumulate(features[group.rank])
        assert not step.optimizer.gradients() and step.optimizer._flat_sums is None
        return step, {name: own.clone() for name, own in step.optimizer.masters.items()}

    found = ranks.run(3, work)
    whole = dict(tiny.drafter().named_parameters())
    for step, _ in found:
        optimizer = step.optimizer
        assert isinstance(optimizer, ShardedAdamW)
        held = [*optimizer._flat.values(), optimizer._sums]
        assert {flat.numel() for flat in held} == {optimizer.num_elements // 3}
        assert optimizer.num_elements < sum(p.numel() for p in whole.values()) + (len(whole) + 6) * ALIGNMENT
    for name, parameter in whole.items():
        assert torch.equal(torch.cat([own[name] for _, own in found]), parameter.flatten())


def assert_same_from(place: Path, target: Target, features: list[FeatureBatch], size: int, first: int) -> list[Any]:
    """What `size` ranks make of the rest of the steps, from a checkpoint."""

    def work(group: Group) -> tuple[list[StepResult], dict[str, Tensor]]:
        step = make_step(target, group)
        checkpoint.load_training(place, step.drafter, step.optimizer, is_started=True)
        return train(step, features, first), weights_of(step)

    return ranks.run(size, work)


def saver_of(step: TrainStep, folder: Path, gather: Any, failed: list[str]) -> Saver:
    return Saver(
        folder,
        step.drafter,
        step.optimizer,
        keep=lambda: (9, None),
        on_saved=lambda *_: None,
        on_failed=lambda _, reason: failed.append(reason),
        gather=gather,
    )


def save_in_group(target: Target, features: list[FeatureBatch], folder: Path, last: int) -> tuple[Path, list[str]]:
    """Two ranks train and rank 0 saves, as a driver has them do; the checkpoint, and what went wrong."""
    failed: list[str] = []
    is_asked = threading.Event()

    def work(group: Group) -> None:
        step = make_step(target, group)
        train(step, features, 0, last)
        if group.rank != 0:
            assert is_asked.wait(20.0)
            step.optimizer.copy_buffers(None)
        else:
            writer = saver_of(step, folder, is_asked.set, failed)
            writer.save(TrainState(last, 0, 0, len(STEPS), 12, None, None, "target", "data"))
            writer.close()
        train(step, features, last)

    ranks.run(2, work)
    return checkpoint.place_of(folder, last), failed


@pytest.mark.usefixtures("_pieces")
def test_another_number_of_ranks_goes_on(batches: tuple[Target, list[FeatureBatch]], tmp_path: Path) -> None:
    """A checkpoint of two ranks is one of any: one and three ranks go on to the same losses and weights as one drafter
    that was never stopped."""
    target, features = batches
    alone = make_step(target, Group())
    wanted = train(alone, features)
    place, failed = save_in_group(target, features, tmp_path / "checkpoints", last=2)
    checkpoint.verify(place)
    assert not failed
    for size in (1, 2, 3):
        for results, weights in assert_same_from(place, target, features, size, first=2):
            assert_near(results, wanted[2:], rel=1e-5)
            for name, weight in alone.drafter.state_dict().items():
                torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=2e-6)


def test_without_memory_for_a_snapshot_ranks_are_let_through(
    batches: tuple[Target, list[FeatureBatch]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rank 0 cannot hold the whole state the save fails with a reason, and training goes on on all ranks."""
    monkeypatch.setattr(saver, "_available_bytes", lambda: 1000)
    place, failed = save_in_group(*batches, tmp_path / "checkpoints", last=1)
    assert not place.exists() and len(failed) == 1 and "0.00 GiB are free" in failed[0]


def test_memory_that_comes_late_is_used(
    batches: tuple[Target, list[FeatureBatch]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory for a snapshot is there only at the second look, the checkpoint is written at once."""
    looks = iter([1000])
    monkeypatch.setattr(saver, "_available_bytes", lambda: next(looks, None))
    place, failed = save_in_group(*batches, tmp_path / "checkpoints", last=1)
    checkpoint.verify(place)
    assert not failed


def test_a_checkpoint_of_another_shape_is_refused(batches: tuple[Target, list[FeatureBatch]]) -> None:
    """Every rank says which tensor does not fit, or is missing, also one that holds nothing of it."""

    def work(group: Group) -> None:
        optimizer = make_step(batches[0], group).optimizer
        weights = {name: weight.clone() for name, weight in tiny.drafter().state_dict().items()}
        state = {f"{key}.{name}": weights[name] for name in weights for key in ("exp_avg", "exp_avg_sq")}
        optimizer.load({name: 2 * weight for name, weight in weights.items()}, state)
        for name, copy in optimizer._parameters.items():
            assert torch.equal(copy, 2 * weights[name])
        with pytest.raises(KeyError, match="exp_avg_sq.norm.weight"):
            optimizer.load(weights, {name: value for name, value in state.items() if name != "exp_avg_sq.norm.weight"})
        with pytest.raises(ValueError, match=r"exp_avg.norm.weight has shape \[7\], \[32\] is wanted"):
            optimizer.load(weights, state | {"exp_avg.norm.weight": torch.ones(7)})

    ranks.run(3, work)


@pytest.mark.parametrize("what", ["gradient", "loss"])
@pytest.mark.parametrize("shards", [False, True], ids=["", "shards_gradients"])
def test_what_is_not_finite_on_one_rank_stops_all(
    batches: tuple[Target, list[FeatureBatch]], shards: bool, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update is left out on every rank, and so are later ones until `drop`; then training goes on as if it had
    never been."""
    target, features = batches
    before = train(make_step(target, Group()), features, 0, 2)

    def work(group: Group) -> list[StepResult]:
        step = make_step(target, group, shards=shards)
        good = train(step, features, 0, 1)
        weights = weights_of(step)
        handle = None
        if group.rank == 1 and what == "gradient":
            handle = step.drafter.fc.weight.register_hook(lambda grad: grad * math.inf)
        step.accumulate(features[3])
        if handle is not None:
            handle.remove()
        if group.rank == 1 and what == "loss":
            step._sums[0] = math.nan
        bad = [step.update(1).read(), *train(step, features, 1, 2)]
        assert not any(result.is_finite for result in bad)
        for name, weight in weights.items():
            assert torch.equal(step.drafter.state_dict()[name], weight)
        step.accumulate(features[4])
        step.drop()
        return good + train(step, features, 1, 2)

    for results in ranks.run(2, work):
        assert_near(results, before, rel=1e-5)


@pytest.mark.parametrize("shards", [False, True], ids=["", "shards_gradients"])
def test_one_rank_alone_finds_out_what_is_not_finite(batches: tuple[Target, list[FeatureBatch]], shards: bool) -> None:
    """The look at one micro-batch needs no other rank, and leaves nothing behind."""
    target, features = batches

    def work(group: Group) -> list[StepResult]:
        step = make_step(target, group, shards=shards)
        if group.rank == 0:
            bad = dataclasses.replace(features[0], context_feature=features[0].context_feature * math.inf)
            assert step.not_finite(features[0]) is None and step.not_finite(bad) == "features"
            handle = step.drafter.fc.weight.register_hook(lambda grad: grad * math.inf)
            assert step.not_finite(features[1]) == "gradient"
            handle.remove()
        return train(step, features)

    assert_near(ranks.run(2, work)[0], train(make_step(target, Group()), features), rel=1e-5)


def test_a_result_of_a_group_that_is_broken_off_is_not_given(batches: tuple[Target, list[FeatureBatch]]) -> None:
    """What an update under way has left behind is of no use: reading it says why."""

    def work(group: Group) -> None:
        step = make_step(batches[0], group)
        step.accumulate(batches[1][group.rank])
        result = step.update(0)
        group.barrier(ranks.CPU)
        group.abort("lost drafter-7")
        with pytest.raises(PipelineError, match=f"drafter-{group.rank} lost drafter-7"):
            result.read()

    ranks.run(2, work)


@pytest.mark.parametrize("shards", [False, True], ids=["", "shards_gradients"])
def test_a_rank_that_goes_ends_the_others_step(batches: tuple[Target, list[FeatureBatch]], shards: bool) -> None:
    """Where one rank does not update any more the others get an error that names them, when the time is over."""
    target, features = batches
    is_over = threading.Event()

    def work(group: Group) -> None:
        step = make_step(target, group, shards=shards)
        train(step, features, 0, 1)
        if group.rank == 1:
            is_over.wait(20.0)
            return
        try:
            with pytest.raises(PipelineError, match="drafter-0 waited for the other drafters in vain"):
                train(step, features, 1, 2)
            with pytest.raises(PipelineError, match="in vain"):
                step.optimizer.copy_buffers({})
        finally:
            is_over.set()

    ranks.run(2, work, timeout_s=1.0)
