"""How long a large data set takes to open and to plan: the part of a start that grows with the number of rows.

    python -m benchmarks.packing            # 10 million rows; writes benchmarks/results/packing.json

Opening is measured on a data set of rows of 8 tokens, written for it into a temporary folder (76 bytes a row) and so in
the page cache. Planning reads lengths alone, so these are drawn: log-normal, cut at the longest. "first start" plans
every epoch and keeps the plans, "next start" finds them. Each measurement has a process of its own; `peak_mib` is its
largest resident memory above that of the moment before, mapped pages of files included. Runs on Linux.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from paceline import __version__
from paceline.data.dataset import FORMAT, INFO_FILE, Dataset, DatasetInfo, DatasetWriter, Rows
from paceline.data.packing import PackedBatches, plan_epoch

RESULTS = Path(__file__).parent / "results"
ROW_TOKENS = 8
EPOCHS = 3
MIXES = {
    "chat, S = 12,288": {"median": 600, "sigma": 0.9, "longest": 3072, "capacity": 12_288},
    "chat, S = 3,072": {"median": 600, "sigma": 0.9, "longest": 3072, "capacity": 3072},
    "traces, S = 65,536": {"median": 8000, "sigma": 0.8, "longest": 65_536, "capacity": 65_536},
}


def write_rows(folder: Path, count: int) -> None:
    """A data set of `count` rows of `ROW_TOKENS` tokens."""
    generator = np.random.default_rng(0)
    writer = DatasetWriter(folder)
    for start in range(0, count, 50_000):
        here = min(50_000, count - start)
        rows = Rows(
            input_ids=generator.integers(0, 1000, ROW_TOKENS * here, dtype=np.int32),
            loss_mask=np.ones(ROW_TOKENS * here, dtype=np.uint8),
            lengths=np.full(here, ROW_TOKENS),
            lines=np.arange(start + 1, start + here + 1),
            conversations=generator.integers(0, 2**64, here, dtype=np.uint64),
        )
        writer.add(rows, "synthetic.jsonl")
    writer.close()
    counted = ("num_rows", "num_conversations", "num_tokens", "num_supervised", "longest", "fingerprint", "files")
    info = DatasetInfo(
        format=FORMAT,
        **{name: getattr(writer, name) for name in counted},
        vocab_size=1000,
        tokenizer="none",
        tokenizer_fingerprint="",
        template_hash="",
        thinking=None,
        max_length=3072,
        on_long="cut",
    )
    (folder / INFO_FILE).write_text(json.dumps({"dataset": info.model_dump()}), encoding="utf-8")


def draw_lengths(count: int, median: int, sigma: float, longest: int) -> np.ndarray:
    """Log-normal lengths between 10 tokens and the longest, int64 ``[count]``."""
    lengths = np.random.default_rng(0).lognormal(np.log(median), sigma, count)
    return np.clip(lengths, 10, longest).astype(np.int64)


def measure_open(folder: Path) -> dict[str, Any]:
    """Open, then read one row and one source."""
    idle = _reset_peak_mib()
    dataset, open_s = _timed(lambda: Dataset.open(folder))
    _, row_s = _timed(lambda: (dataset.row(len(dataset) // 2), dataset.source(len(dataset) // 2)))
    return {"open_s": open_s, "first_row_s": row_s, "peak_mib": _peak_mib() - idle}


def measure_plans(mix: dict[str, Any], count: int) -> dict[str, Any]:
    """Plan `EPOCHS` epochs, nothing kept."""
    lengths = draw_lengths(count, mix["median"], mix["sigma"], mix["longest"])
    idle, seconds, fill = _reset_peak_mib(), [], []
    for epoch in range(EPOCHS):
        plan, plan_s = _timed(partial(plan_epoch, lengths, mix["capacity"], seed=0, epoch=epoch))
        seconds.append(plan_s)
        fill.append(float(lengths.sum() / (plan.num_batches * mix["capacity"])))
    spread = {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
    return {**mix, "mean": float(lengths.mean()), "plan_s": spread, "fill": min(fill), "peak_mib": _peak_mib() - idle}


def measure_start(mix: dict[str, Any], count: int, folder: Path) -> dict[str, Any]:
    """What a run does with its training rows when it starts: count the batches of all epochs, and take one."""
    lengths = draw_lengths(count, mix["median"], mix["sigma"], mix["longest"])
    dataset: Any = SimpleNamespace(lengths=lengths, folder=folder)
    idle = _reset_peak_mib()
    batches, start_s = _timed(
        lambda: len(PackedBatches(dataset, np.arange(count), tokens_per_batch=mix["capacity"], epochs=EPOCHS, seed=0))
    )
    return {"start_s": start_s, "batches": batches, "peak_mib": _peak_mib() - idle}


def measure(count: int) -> dict[str, Any]:
    """All of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, count)
        chat = MIXES["chat, S = 12,288"]
        return {
            "rows": count,
            "opening": _apart(measure_open, folder),
            "planning": {label: _apart(measure_plans, mix, count) for label, mix in MIXES.items()},
            "epochs": EPOCHS,
            "first start": _apart(measure_start, chat, count, folder),
            "next start": _apart(measure_start, chat, count, folder),
            "plan_file_mib": max((p.stat().st_size for p in folder.glob("plans/*")), default=0) / 2**20,
        }


def _apart(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def _reset_peak_mib() -> float:
    """Let `_peak_mib` count from now on, and what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _peak_mib()


def _peak_mib() -> float:
    """Largest resident memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print, and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "packing.json")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]  # of other work at the start: above the number of cores, times are too long
    result = {
        "command": " ".join(["python -m benchmarks.packing", *(sys.argv[1:] if arguments is None else arguments)]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": load,
        "versions": {
            "paceline": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "pyarrow")},
        },
        **measure(options.rows),
    }
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
