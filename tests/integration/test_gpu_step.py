"""The fast path of one GPU against the CPU's: the same features, losses and gradients, and no hidden cost."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import Kernels, Loss, Optim
from paceline.kernels.linear_mixed_loss import Mix
from paceline.models.dflash2 import SublayerConv
from paceline.models.target import Target
from paceline.records import FeatureBatch, TokenBatch
from paceline.train.optim import MasterAdamW, is_hidden_matrix
from paceline.train.step import TrainStep
from tests import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTH = 384
WIDE = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LAUNCHED = Kernels(cuda_graphs="off")


def wide_target(family: str, folder: Path, **kwargs: Any) -> Target:
    """A tiny target whose heads are wide enough for the kernels."""
    if not folder.exists():
        tiny.save(tiny.causal_lm(family, **WIDE), folder)
    return Target.load(str(folder), **kwargs)


def rows() -> list[TokenBatch]:
    """Ragged rows: many documents, one long one, holes in what is supervised, padding."""
    return [
        tiny.row([40, 3, 150, 61, 90], LENGTH, seed=1, number=0),
        tiny.row([384], LENGTH, seed=2, number=1, supervised=0.95),
        tiny.row([9, 200, 30], LENGTH, seed=3, number=2, supervised=0.4),
    ]


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative error by norms."""
    found, wanted = found.double().cpu(), wanted.double().cpu()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_packed_features_are_those_of_documents_alone(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Through compiled layers and block masks each document has the features that it has alone on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = tmp_path / family
    packed = wide_target(family, folder, dtype=dtype, device="cuda", row_length=LENGTH)
    alone = wide_target(family, folder)
    assert packed.route == "flex" and "not compiled" not in packed.packing_note, packed.packing_note
    for tokens in rows():
        found, wanted = packed.features(tokens).context_feature, alone.features(tokens).context_feature
        assert not found[tokens.num_tokens :].any()
        for start, end in tokens.spans:
            assert error(found[start:end], wanted[start:end]) < (1e-5 if dtype == torch.float32 else 3e-2)


KINDS = ("dflash", "dflash2", "dspark")


def make_step(target: Target, device: str, kind: str = "dflash", is_calm: bool = False, **more: Any) -> TrainStep:
    """A drafter of three layers, one of them sliding, beside a target.

    Args:
        is_calm: With dflash2, nothing is left that bfloat16's rounding tips over: every token is a candidate (of random
            logits four rows in ten have other best six), and convolutions are near to passing all (random ones may
            cancel what they add). Gradients in bfloat16 are then as near to float32's as those of the other kinds.
    """
    types = ("full_attention", "sliding_attention", "full_attention")
    is_calm = is_calm and kind == "dflash2"
    shape = tiny.shape_of_kind(
        kind, {"selector_top_k": tiny.VOCAB} if is_calm else None, num_hidden_layers=3, layer_types=types,
        sliding_window=37, head_dim=32, block_size=16, target_layer_ids=(0, 2),
    )  # fmt: skip
    drafter = tiny.drafter(shape)
    if is_calm:
        with torch.no_grad():
            for module in drafter.modules():
                if isinstance(module, SublayerConv):
                    module.base_kernel.mul_(0.15)
                    module.base_kernel[:, 0] += 1.0
                    module.kernel_projection.weight.mul_(0.15)
    drafter.to(device)
    dtype = more.get("dtype", torch.float32)
    settings: dict[str, Any] = {
        "num_anchors": 64, "loss": Loss(gamma=5.0), "seed": 5, "total_steps": 100, "dtype": dtype, "kernels": LAUNCHED,
    }  # fmt: skip
    return TrainStep(drafter, target.embed, target.head.to(dtype), Optim(lr=1e-3), **settings | more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu-step") / "target"


def on_device(batch: FeatureBatch, dtype: torch.dtype) -> FeatureBatch:
    last = batch.last_hidden if batch.last_hidden is None else batch.last_hidden.to("cuda", dtype)
    return dataclasses.replace(batch, context_feature=batch.context_feature.to("cuda", dtype), last_hidden=last)


@pytest.mark.parametrize(
    ("kind", "weights", "mix"),
    [
        *((kind, "decay", None) for kind in KINDS),
        ("dflash", "dpace", None),
        ("dflash", "decay", Mix(0.5, 0.4, 0.1)),
        ("dflash2", "dpace", Mix(0.5, 0.4, 0.1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_the_cpus(folder: Path, dtype: torch.dtype, kind: str, weights: Any, mix: Mix | None) -> None:
    """Loss, hits and every gradient of ragged rows equal those of the CPU's reference."""
    torch.backends.cuda.matmul.allow_tf32 = False
    asks = {"layer_ids": (0, 2), "needs_last_hidden": kind == "dspark" or mix is not None}
    here, there = (wide_target("llama", folder, device=d, **asks) for d in ("cpu", "cuda"))
    exact = dtype == torch.float32
    settings: dict[str, Any] = {"is_calm": not exact, "loss": Loss(kind=weights, gamma=5.0), "mix": mix}
    reference = make_step(here, "cpu", kind, **settings)
    step = make_step(there, "cuda", kind, dtype=dtype, batches_per_step=3, **settings)
    assert "FlexAttention" in step.attention_note
    for tokens in rows():
        features = here.features(tokens)
        assert step.accumulate(on_device(features, dtype)) == reference.accumulate(features)
    found, wanted = step.optimizer.gradients(), reference.optimizer.gradients()
    for name, gradient in wanted.items():
        assert error(found[name], gradient) < (1e-4 if exact else 0.15), name
    one, other = step.update(0).read(), reference.update(0).read()
    assert one.loss == pytest.approx(other.loss, rel=1e-5 if exact else 2e-2)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4 if exact else 5e-2)
    assert one.rounds == pytest.approx(other.rounds, rel=1e-12 if exact else 0.2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_no_hidden_cost(folder: Path, graphs: str, kind: str) -> None:
    """A warm step asks the driver for no memory, compiles nothing and does not wait for the device, on ragged rows."""
    from torch._dynamo.utils import counters

    kernels = Kernels(cuda_graphs=graphs)  # type: ignore[arg-type]  # one of its values
    target = wide_target(
        "llama", folder, device="cuda", dtype=torch.bfloat16, layer_ids=(0, 2), row_length=LENGTH, kernels=kernels,
        needs_last_hidden=kind == "dspark",
    )  # fmt: skip
    step = make_step(target, "cuda", kind, dtype=torch.bfloat16, kernels=kernels)
    batches = rows()

    def run(i: int) -> None:
        step.accumulate(target.features(batches[i % 3]))
        results.append(step.update(i))

    results: list[Any] = []
    for i in range(12):
        run(i)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"], counters["stats"]["unique_graphs"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for i in range(12, 18):
            run(i)
        torch.cuda.set_sync_debug_mode("default")
    assert [str(w.message) for w in caught if "called a synchronizing" in str(w.message)] == []
    assert (torch.cuda.memory_stats()["num_device_alloc"], counters["stats"]["unique_graphs"]) == before
    losses = [pending.read().loss for pending in results]
    assert losses[-1] < losses[0] and step._run_batch.is_replaying == (graphs == "on")


@pytest.mark.parametrize(("kind", "batches_per_step"), [("dflash", 1), ("dflash", 2), ("dflash2", 2), ("dspark", 1)])
def test_graphs_and_repetition_change_no_bit(folder: Path, kind: str, batches_per_step: int) -> None:
    """Eight updates give the same losses launched kernel by kernel, launched again, and replayed, where gradients come
    to be summed on the way."""
    runs = []
    for graphs in ("off", "off", "on"):
        kernels = Kernels(cuda_graphs=graphs)  # type: ignore[arg-type]  # one of its values
        target = wide_target(
            "llama", folder, device="cuda", dtype=torch.bfloat16, layer_ids=(0, 2), row_length=LENGTH, kernels=kernels,
            needs_last_hidden=kind == "dspark",
        )  # fmt: skip
        step = make_step(target, "cuda", kind, dtype=torch.bfloat16, kernels=kernels, batches_per_step=batches_per_step)
        losses = []
        for i in range(8):
            for tokens in rows()[:batches_per_step]:
                step.accumulate(target.features(tokens))
            losses.append(step.update(i).read())
        runs.append(losses)
    assert runs[0] == runs[1] == runs[2]


def test_recomputing_changes_no_bit(folder: Path) -> None:
    """Layers that are computed again in the backward pass give the same gradients."""
    target = wide_target("llama", folder, device="cuda", dtype=torch.bfloat16, layer_ids=(0, 2), row_length=LENGTH)
    found = []
    for recompute in (False, True):
        step = make_step(target, "cuda", dtype=torch.bfloat16, recompute=recompute)
        step.accumulate(target.features(rows()[0]))
        found.append({name: gradient.clone() for name, gradient in step.optimizer.gradients().items()})
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_muon_updates_as_on_the_cpu() -> None:
    """Matrices of layers within bfloat16's rounding of the iteration, all else within float32's; nothing waits."""
    masters = {}
    for device in ("cpu", "cuda"):
        drafter = tiny.drafter(tiny.shape_of_kind("dspark")).to(device)
        optimizer = MasterAdamW(drafter, Optim(kind="muon", weight_decay=0.1), torch.float32, sums_gradients=True)
        generator = torch.Generator().manual_seed(0)
        for step in range(3):
            for parameter in drafter.parameters():
                gradient = torch.randn(parameter.shape, generator=generator).to(device)
                (parameter * gradient).sum().backward()
            optimizer.set_rate(1e-2, step)
            optimizer.apply(torch.tensor(2.0, device=device))
        masters[device] = {name: each.cpu() for name, each in optimizer.masters.items()}
    for name, wanted in masters["cpu"].items():
        limit = 2e-3 if is_hidden_matrix(name, wanted) else 1e-5
        assert error(masters["cuda"][name], wanted) < limit, name
