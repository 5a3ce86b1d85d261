"""One drafter of a group as a process: trains some steps and writes down what came of them.

    python -m tests.drafter_rank '{"rank": 0, ...}'

Rank 0 prints the port at which the others find it. With ``stops_after`` a rank leaves the group after so many steps
without a word; an error of the group is printed, and the process ends with 3.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.config import Kernels, Loss, Optim
from paceline.errors import PipelineError
from paceline.models.target import Target
from paceline.records import FeatureBatch
from paceline.train.group import Group, listen
from paceline.train.optim import BUFFERS
from paceline.train.step import TrainStep
from tests import tiny

NUM_STEPS = 12
BATCHES_PER_STEP = 5


def make_features(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[Target, list[FeatureBatch]]:
    """A tiny target on the device, and micro-batches whose features the CPU has made; one has nothing to learn."""
    here = Target.load(str(folder), layer_ids=(0, 2))
    rows = [
        tiny.row(
            [40, 3 + number % 40, 150, 61, 90], 384, seed=number, number=number, supervised=0.0 if number == 7 else 0.7
        )
        for number in range(BATCHES_PER_STEP * NUM_STEPS)
    ]
    made = [here.features(row) for row in rows]
    moved = [dataclasses.replace(each, context_feature=each.context_feature.to(device, dtype)) for each in made]
    return Target.load(str(folder), layer_ids=(0, 2), device=str(device), dtype=dtype), moved


def make_step(target: Target, group: Group, device: torch.device, dtype: torch.dtype, **more: Any) -> TrainStep:
    shape = tiny.draft_shape(num_hidden_layers=3, head_dim=32, block_size=16, target_layer_ids=(0, 2))
    return TrainStep(
        tiny.drafter(shape).to(device), target.embed, target.head.to(dtype),
        Optim(lr=1e-3, clip=0.5, weight_decay=0.1), num_anchors=64, loss=Loss(gamma=5.0), seed=5,
        total_steps=NUM_STEPS, batches_per_step=BATCHES_PER_STEP, dtype=dtype, group=group, **more,
    )  # fmt: skip


def train(step: TrainStep, features: list[FeatureBatch], last: int = NUM_STEPS) -> list[dict[str, Any]]:
    """Steps with their micro-batches dealt out round robin; each result is read when the next update is launched."""
    pending, results = [], []
    for number in range(last):
        end = BATCHES_PER_STEP * (number + 1)
        for turn in range(end - BATCHES_PER_STEP, end, step.group.size):
            n = turn + step.group.rank
            step.accumulate(features[n] if n < end else None)
        pending.append(step.update(number))
        if len(pending) > step.depth:
            results.append(dataclasses.asdict(pending.pop(0).read()))
    return results + [dataclasses.asdict(each.read()) for each in pending]


def work(
    rank: int, size: int, port: int, folder: str, out: str, device: str, dtype: str, graphs: Any, shards: bool,
    timeout_s: float, stops_after: int | None,
) -> None:  # fmt: skip
    place, kind = torch.device(device), getattr(torch, dtype)
    if place.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(place)
        torch.backends.cuda.matmul.allow_tf32 = False
    store = listen("127.0.0.1", timeout_s) if rank == 0 else None
    if store is not None:
        print(store.port, flush=True)
    target, features = make_features(Path(folder), place, kind)
    group = Group.open(rank, size, ("127.0.0.1", port) if store is None else store, place, timeout_s)
    step = make_step(target, group, place, kind, kernels=Kernels(cuda_graphs=graphs), shards_gradients=shards)
    results = train(step, features, NUM_STEPS if stops_after is None else stops_after)
    if stops_after is not None:
        print("stops", flush=True)
        time.sleep(600)
    copies = {key: torch.empty(step.optimizer.num_elements) for key in BUFFERS}
    step.optimizer.copy_buffers(copies if rank == 0 else None)
    group.barrier(place)
    Path(out).with_suffix(".json").write_text(json.dumps({"results": results, "graphs": step.graphs_note}))
    weights = {name: weight.detach().float().cpu().clone() for name, weight in step.drafter.named_parameters()}
    if rank == 0:
        weights |= {f"master.{name}": each.clone() for name, each in step.optimizer.named(copies["master"]).items()}
    save_file(weights, Path(out).with_suffix(".safetensors"))
    group.close()


if __name__ == "__main__":
    try:
        work(**json.loads(sys.argv[1]))
    except PipelineError as error:
        print(error, flush=True)
        sys.exit(3)
