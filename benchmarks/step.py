"""One training step on one GPU: target, drafter, optimizer, as `paceline train` runs them, on random weights.

    python -m benchmarks.step --out benchmarks/results/step-h200.json       # every case, about 6 minutes
    python -m benchmarks.step --cases qwen3-8b --seconds 6
    python -m benchmarks.step --peers specforge speculators --out ...       # the same beside other trainers
    python -m benchmarks.step --cases tiny --device cpu --seconds 0.1       # does it run at all?

The work unit is DESIGN's: Qwen3-8B's shape, 5 draft layers, K = 16, full vocabulary, 12,288 packed tokens, 2,048
anchors, every token supervised, bf16 with float32 masters, an update each micro-batch. Its floor is the work in matrix
products (attention apart) at the rate at which this card multiplies matrices for seconds on end, measured beside it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import math
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

from paceline.models.imports import import_models  # noqa: E402  # a cold start's clock begins before the imports

import_models()  # as `paceline train` does

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks import shapes, timing  # noqa: E402
from benchmarks.peers import SPECFORGE_DEFAULTS  # noqa: E402
from benchmarks.peers import versions as peer_versions  # noqa: E402
from paceline import __version__  # noqa: E402
from paceline.config import Kernels, Loss, Optim  # noqa: E402
from paceline.models.draft import DraftShape  # noqa: E402
from paceline.models.kinds import drafter_class  # noqa: E402
from paceline.models.loading import default_layer_ids  # noqa: E402
from paceline.models.target import Target  # noqa: E402
from paceline.records import TokenBatch  # noqa: E402
from paceline.train.step import TrainStep  # noqa: E402

IMPORTED_S = time.perf_counter() - STARTED

NUM_BATCHES = 6
"""Rows that are used in turn."""


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        target: Name in `shapes.CONFIGS`.
        tokens: S.
        lengths: How long documents are: ``equal``, ``uniform`` or ``chat``.
        document: Tokens of a document (the longest, where they differ).
        anchors_per_token: Share of positions that start a block.
    """

    name: str
    target: str
    tokens: int
    document: int
    lengths: str = "equal"
    kernels: Kernels = Kernels()
    block_size: int = 16
    num_layers: int = 5
    batches_per_step: int = 1
    fp8: bool = False
    kind: str = "dflash"
    anchors_per_token: float = 1 / 6
    recompute: bool = False

    @property
    def num_anchors(self) -> int:
        """A: by default one for every six tokens, in whole tiles of 128 rows."""
        tile = 128 // math.gcd(self.block_size, 128)
        return max(tile, int(self.tokens * self.anchors_per_token) // tile * tile)


LONG_ROW = 65_536
WORK_UNIT = Case("qwen3-8b", "qwen3-8b", 12_288, 3072)
SMALL = Case("smollm2-135m", "smollm2-135m", 8192, 2048)
EAGER = Kernels(compile=False, cuda_graphs="off")
FLASH4 = Kernels(attention="flash4")
CASES = [
    WORK_UNIT,
    replace(WORK_UNIT, name="qwen3-8b-uniform", lengths="uniform"),
    replace(WORK_UNIT, name="qwen3-8b-chat", lengths="chat"),
    replace(WORK_UNIT, name="qwen3-8b-flash4", kernels=FLASH4),
    replace(WORK_UNIT, name="qwen3-8b-uniform-flash4", lengths="uniform", kernels=FLASH4),
    replace(WORK_UNIT, name="qwen3-8b-chat-flash4", lengths="chat", kernels=FLASH4),
    replace(WORK_UNIT, name="qwen3-8b-fp8", fp8=True),
    replace(WORK_UNIT, name="qwen3-8b-fp8-flash4", fp8=True, kernels=FLASH4),
    replace(WORK_UNIT, name="qwen3-8b-dflash2", kind="dflash2"),
    replace(WORK_UNIT, name="qwen3-8b-dspark", kind="dspark", block_size=15),  # as many drafted tokens
    SMALL,
    replace(SMALL, name="smollm2-135m-dflash2", kind="dflash2"),
    replace(SMALL, name="smollm2-135m-dspark", kind="dspark", block_size=15),
    replace(SMALL, name="smollm2-135m-flash4", kernels=FLASH4),
    replace(SMALL, name="smollm2-135m-launched", kernels=Kernels(cuda_graphs="off")),
    replace(SMALL, name="smollm2-135m-eager", kernels=EAGER),
    Case("qwen3-0.6b", "qwen3-0.6b", 12_288, 3072),
    Case("qwen3-8b-64k", "qwen3-8b", 65_536, 65_536, recompute=True),
    Case("qwen3-8b-64k-few-anchors", "qwen3-8b", 65_536, 65_536, recompute=True, anchors_per_token=0.0416),
    Case("tiny", "tiny", 512, 128, "uniform"),
    Case("tiny-recompute", "tiny", 512, 512, recompute=True, anchors_per_token=0.05),
    Case("tiny-dflash2", "tiny", 512, 128, "uniform", kind="dflash2"),
    Case("tiny-dspark", "tiny", 512, 128, "uniform", kind="dspark", block_size=15),
]


def document_lengths(case: Case, generator: np.random.Generator) -> Iterator[int]:
    """Lengths of documents, without end."""
    while True:
        if case.lengths == "equal":
            yield case.document
        elif case.lengths == "uniform":
            yield int(generator.integers(case.document // 6, case.document + 1))
        else:  # chats: a median of some 450 tokens, and a long tail
            yield int(np.clip(generator.lognormal(np.log(450), 0.9), 32, case.document))


def make_rows(case: Case, vocab_size: int) -> list[TokenBatch]:
    """Packed rows, every token supervised, filled as training's packer fills them: to 98 % and more."""
    generator = np.random.default_rng(0)
    lengths = document_lengths(case, generator)
    rows = []
    for number in range(NUM_BATCHES):
        documents: list[tuple[int, Tensor, Tensor]] = []
        left = case.tokens
        while left >= max(64, case.tokens // 100):
            n = min(left, next(lengths))
            ids = torch.from_numpy(generator.integers(0, vocab_size - 1, n))
            documents.append((len(documents), ids, torch.ones(n, dtype=torch.bool)))
            left -= n
        rows.append(TokenBatch.pack(number, documents, case.tokens))
    return rows


class Bench:
    """Target and drafter of a case, and its step."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        config = shapes.CONFIGS[case.target]()
        self.target_shape = shapes.target_shape(config)
        self.layer_ids = default_layer_ids(self.target_shape.num_layers)
        on_gpu = device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        kind = drafter_class(case.kind)
        num_layers = None if kind.needs_last_hidden else self.layer_ids[-1] + 1
        model = shapes.random_target(config, device, dtype, num_layers=num_layers)
        weights_s = time.perf_counter() - STARTED
        self.target = Target(
            model,
            self.target_shape,
            self.layer_ids,
            needs_last_hidden=kind.needs_last_hidden,
            kernels=case.kernels,
            row_length=case.tokens,
            fp8=case.fp8,
        )
        self.since_start_s = {"imports": IMPORTED_S, "weights": weights_s, "target": time.perf_counter() - STARTED}
        self.draft_shape = replace(
            shapes.draft_shape(self.target_shape, self.layer_ids, num_layers=case.num_layers),
            block_size=case.block_size,
            kind=case.kind,
            options=kind.check_options({}),
        )
        self.trainer = TrainStep(
            shapes.random_drafter(self.draft_shape, device),
            self.target.embed,
            self.target.head,
            Optim(),
            num_anchors=case.num_anchors,
            loss=Loss(gamma=7.0),
            seed=0,
            total_steps=10_000,
            batches_per_step=case.batches_per_step,
            dtype=dtype,
            kernels=case.kernels,
            recompute=case.recompute,
        )
        self.rows = make_rows(case, self.target_shape.vocab_size)
        self.count = 0

    def step(self) -> Tensor:
        """Target, drafter, update; the loss, on the device."""
        for _ in range(self.case.batches_per_step):
            row = self.rows[self.count % len(self.rows)]
            self.count += 1
            self.trainer.accumulate(self.target.features(row))
        self.trainer.update(self.count)
        return self.trainer.last_loss()

    def mean_counts(self) -> dict[str, float]:
        """Tokens, anchor blocks and supervised predictions of a step, averaged over the rows."""
        counts = []
        for row in self.rows:
            sums = self.trainer.accumulate(self.target.features(row))
            counts.append((sums.tokens, sums.blocks, sums.num_rows))
        self.trainer.drop()
        tokens, blocks, predictions = np.mean(counts, axis=0) * self.case.batches_per_step
        return {"tokens": tokens, "blocks": blocks, "predictions": predictions}


def useful_flop(case: Case, draft: DraftShape, counts: dict[str, float]) -> float:
    """Floating-point operations of a step's matrix products, attention apart, as they are done: less than the method's
    own count by what the first and the last draft layer leave out, and by slots that do not reach the head. What
    DFlash2 and DSpark add to it is not counted, so that shares of kinds compare as times do."""
    d, i = draft.hidden_size, draft.intermediate_size
    q, kv = draft.num_attention_heads * draft.head_dim, draft.num_key_value_heads * draft.head_dim
    anchors = case.num_anchors * case.batches_per_step
    slots, lengths = anchors * draft.block_size, [int(counts["tokens"])]
    runs_all = drafter_class(case.kind).needs_last_hidden
    num_layers = draft.num_target_layers if runs_all else draft.target_layer_ids[-1] + 1
    target = shapes.target_work(shapes.CONFIGS[case.target](), num_layers, lengths)["matmul"]
    drafter = shapes.draft_work(draft, lengths, anchors)["matmul"]
    first = 6 * d * (q + 2 * kv) * slots * (1 - 1 / draft.block_size)  # projected once for all mask slots
    last = 6 * (q * d + 3 * d * i) * slots / draft.block_size  # slot 0 leaves after the last attention
    unscored = 4 * d * draft.vocab_size * (slots - anchors - counts["predictions"])
    return target + drafter - first - last - unscored


def matmul_rate(seconds: float = 2.0) -> float:
    """TFLOP/s at which this card multiplies 8192 x 8192 bfloat16 matrices without a pause."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for warm in (True, False):
        calls, started = 0, time.perf_counter()
        begin.record()
        while time.perf_counter() - started < (1.5 if warm else seconds):
            for _ in range(20):
                torch.mm(a, b, out=out)
            calls += 20
            torch.cuda.synchronize()
        end.record()
        torch.cuda.synchronize()
    return 2 * 8192**3 * calls / begin.elapsed_time(end) / 1e9


def stage_times(bench: Bench, steps: int = 5) -> dict[str, float]:
    """Milliseconds of the device in target, micro-batch and update, by events: medians."""
    stages: dict[str, list[tuple[Any, Any]]] = {"target": [], "drafter": [], "update": []}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = work()
        end.record()
        stages[name].append((begin, end))
        return result

    for i in range(steps):
        row = bench.rows[i % len(bench.rows)]
        features = timed("target", lambda row=row: bench.target.features(row))
        timed("drafter", lambda features=features: bench.trainer.accumulate(features))
        timed("update", lambda: bench.trainer.update(bench.count))
    torch.cuda.synchronize()
    return {name: float(np.median([b.elapsed_time(e) for b, e in pairs])) for name, pairs in stages.items()}


KERNELS = {
    "attention": ("flex_attention", "tem_fused", "flash_attn", "flash", "sdpa", "cudnn", "fmha"),
    "matmul": ("gemm", "nvjet", "cutlass", "xmma", "splitK"),
    "loss rows": ("_row_kernel", "cross_entropy", "_fused_kernel", "_statistics", "_gradient"),
    "adamw": ("adamw", "_update_kernel", "_squares_kernel"),
}
"""Parts of kernels' names, by what they do; the first that fits counts."""


def kernel_times(bench: Bench, steps: int = 2) -> dict[str, Any]:
    """Milliseconds of kernels a step by kind, the longest kernels, and the share of time in which no kernel ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            bench.step()
        torch.cuda.synchronize()
    spans, by_kind, by_name = [], {}, {}
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        ms = event.time_range.elapsed_us() / 1e3 / steps
        spans.append((event.time_range.start, event.time_range.end))
        kind = next((k for k, parts in KERNELS.items() if any(p in event.name for p in parts)), "other")
        by_kind[kind] = by_kind.get(kind, 0.0) + ms
        by_name[event.name[:200]] = by_name.get(event.name[:200], 0.0) + ms
    spans.sort()
    busy, reach = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:40]
    return {
        "by_kind_ms": {kind: round(ms, 2) for kind, ms in sorted(by_kind.items(), key=lambda item: -item[1])},
        "longest_ms": {name: round(ms, 2) for name, ms in longest},
        "kernels_per_step": len(spans) / steps,
        "idle_frac": 1.0 - busy / (reach - spans[0][0]),
    }


def hidden_costs(bench: Bench, steps: int = 3) -> dict[str, float]:
    """What a step may not do: ask the driver for memory, compile again, or wait for the device; each a step."""
    from torch._dynamo.utils import counters

    def allocs() -> int:
        return int(torch.cuda.memory_stats().get("num_device_alloc", 0))

    before = allocs(), counters["stats"]["unique_graphs"], sum(counters["recompiles"].values())
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            bench.step()
    torch.cuda.set_sync_debug_mode("default")
    syncs = [str(w.message) for w in caught if "called a synchronizing" in str(w.message)]
    where = sorted({f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)})
    return {
        "device_allocs_per_step": (allocs() - before[0]) / steps,
        "recompiles_per_step": (counters["stats"]["unique_graphs"] - before[1]) / steps,
        "host_syncs_per_step": len(syncs) / steps,
        **({"synced_at": where} if where else {}),
    }


def run_case(
    case: Case, device: torch.device, seconds: float, warmup: float, rate: Callable[[], float] | None, details: bool
) -> dict[str, Any]:
    """Time a case, and say where its time goes."""
    bench = Bench(case, device)
    built_s = time.perf_counter() - STARTED
    first, least = (2, 2) if case.tokens >= LONG_ROW else (4, 5)  # a step of a long row takes ten seconds and more
    measured = timing.measure(bench.step, seconds, warmup, device=device, compile_calls=first, min_steps=least)
    first_s = [round(s, 2) for s in measured.pop("compile_s")]
    counts = bench.mean_counts()
    flop = useful_flop(case, bench.draft_shape, counts)
    step_s = measured["median_ms"] / 1e3
    result: dict[str, Any] = {
        "ms_per_step": measured["median_ms"],
        "tok_per_s": counts["tokens"] / step_s,
        "blocks_per_s": counts["blocks"] / step_s,
        "predictions_per_s": counts["predictions"] / step_s,
        "useful_tflop": flop / 1e12,
        "useful_tflop_per_s": flop / step_s / 1e12,
        "since_start_s": {**bench.since_start_s, "drafter": built_s, "second step": built_s + sum(first_s[:2])},
        "first_steps_s": first_s,
        "route": bench.target.packing_note,
        "fp8": bench.target.quantization_note,
        "attention": bench.trainer.attention_note,
        "graphs": bench.trainer.graphs_note,
        **{key: value for key, value in measured.items() if key not in ("median_ms", "samples")},
    }
    if rate is not None:
        result["share_of_matmul"] = flop / step_s / 1e12 / rate()
    if device.type == "cuda" and details:
        result |= {"stages_ms": stage_times(bench), **hidden_costs(bench), "kernels": kernel_times(bench)}
    return result


def main() -> None:
    """Run the cases, print them, and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES if case.target != "tiny"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--warmup", type=float, default=3.0)
    parser.add_argument("--brief", action="store_true", help="Times alone, without looking into a step.")
    parser.add_argument("--peers", nargs="*", choices=["specforge", "speculators"], default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    if device.index is not None:
        torch.cuda.set_device(device)
    rate = functools.cache(matmul_rate) if on_gpu else None  # when first asked for: no part of a start
    results: dict[str, Any] = {}
    for case in (case for case in CASES if case.name in options.cases):
        try:
            results[case.name] = run_case(case, device, options.seconds, options.warmup, rate, not options.brief)
        except Exception as error:  # one case that fails must not cost the others' results
            results[case.name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
            logging.exception("%s failed", case.name)
        brief = {k: v for k, v in results[case.name].items() if k not in ("ms",)}
        print(case.name, json.dumps(brief, indent=1), flush=True)
        torch._dynamo.reset()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        if options.out:
            write(options.out, results, {}, rate and rate(), on_gpu)
    if options.peers:
        peers = run_peers(options.peers, device, options.seconds, options.warmup)
        print(json.dumps(headline(results, peers), indent=1), flush=True)
        if options.out:
            write(options.out, results, peers, rate and rate(), on_gpu)


def run_peers(names: list[str], device: torch.device, seconds: float, warmup: float) -> dict[str, Any]:
    """Other trainers' steps on the work unit, one after the other, each in a process of its own: one changes the
    compiler's settings, and what one leaves in memory must not fail the next. One that fails leaves its reason."""
    on_gpu = device.type == "cuda"
    shape, dtype = ("qwen3-8b", "bfloat16") if on_gpu else ("tiny", "float32")
    wanted = ["--shape", shape, "--device", str(device), "--dtype", dtype, "--no-target"]
    wanted += ["--seconds", str(seconds), "--warmup", str(warmup)]
    found: dict[str, Any] = {}
    stubs: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for name in names:
            out = Path(folder) / f"{name}.json"
            command = [sys.executable, "-m", "benchmarks.peers", "--peers", name, *wanted, "--out", str(out)]
            ended = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            result = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
            if name in result:
                found[name] = result[name]
                stubs.update(result["stubs"])
            else:  # the other peer, and our own figures, are worth keeping
                logging.error("%s failed\n%s", name, ended.stderr)
                lines = ended.stderr.strip().splitlines()
                found[name] = {"failed": lines[-1] if lines else f"ended with {ended.returncode}"}
    return {"versions": peer_versions(), "stubs": sorted(stubs), **found}


def headline(cases: dict[str, Any], peers: dict[str, Any]) -> dict[str, Any]:
    """What a reader asks first: the faster of the work unit's two attentions, ragged rows, small targets, and how many
    times as long other trainers take for the same work (`ragged_ratio`: for the same useful tokens; `defaults_ratio`:
    with the options that SpecForge starts with, whose step was timed without the target, which is added)."""

    def timed(*names: str) -> dict[str, Any] | None:
        found = [case for name in names if "ms_per_step" in (case := cases.get(name, {}))]
        return min(found, key=lambda case: case["ms_per_step"], default=None)

    unit, ragged = timed("qwen3-8b", "qwen3-8b-flash4"), timed("qwen3-8b-uniform", "qwen3-8b-uniform-flash4")
    chat, fp8 = timed("qwen3-8b-chat", "qwen3-8b-chat-flash4"), timed("qwen3-8b-fp8", "qwen3-8b-fp8-flash4")
    small, eager = timed("smollm2-135m", "smollm2-135m-flash4"), timed("smollm2-135m-eager")
    head: dict[str, Any] = {}
    if unit:
        wanted = ("ms_per_step", "tok_per_s", "share_of_matmul", "peak_gib", "host_syncs_per_step")
        head = {key: unit.get(key) for key in (*wanted, "device_allocs_per_step", "attention")}
    if ragged:
        head["ragged"] = {"tok_per_s": ragged["tok_per_s"], "chat_tok_per_s": chat["tok_per_s"] if chat else None}
    if fp8:
        head["fp8"] = {key: fp8[key] for key in ("ms_per_step", "tok_per_s", "fp8")}
    if small:
        head["small"] = {
            "tok_per_s": small["tok_per_s"],
            "speedup_vs_eager": eager["ms_per_step"] / small["ms_per_step"] if eager else None,
        }
    for name in ("specforge", "speculators"):
        found = peers.get(name, {}).get("with_target")
        if found and unit:
            ratio = found["median_ms"] / unit["ms_per_step"]
            entry = {"ms_per_step": found["median_ms"], "tok_per_s": found["tok_per_s"], "ratio": ratio}
            if (others := peers[name].get("ragged_with_target")) and ragged:
                entry["ragged_ratio"] = ragged["tok_per_s"] / others["tok_per_s"]
            tried = [each for each in peers[name].get("options", []) if each["settings"] == SPECFORGE_DEFAULTS]
            if tried and "median_ms" in tried[0]:
                target_ms = found["median_ms"] - peers[name]["drafter"]["median_ms"]
                entry["defaults_ratio"] = (tried[0]["median_ms"] + target_ms) / unit["ms_per_step"]
            head.setdefault("peers", {})[name] = entry
    return head


def write(out: Path, results: dict[str, Any], peers: dict[str, Any], rate: float | None, on_gpu: bool) -> None:
    """The result file, as far as there are results."""
    summary = {
        **headline(results, peers),
        "command": re.sub(r" --out \S+", "", " ".join(["python -m benchmarks.step", *sys.argv[1:]])),
        "machine": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "matmul_tflop_per_s": rate,
        "versions": {
            "paceline": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "cases": results,
        "peers_in_full": peers,
    }
    out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
