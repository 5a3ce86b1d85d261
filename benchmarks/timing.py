"""Sustained timing of one training step: warm-up, milliseconds per step, clocks, power, peak memory.

A GPU at its power cap runs 15-18 % faster in a burst than in a run of seconds, and data that is not finite draws less
power; so a step is warmed up before it is timed, the clock and the power are sampled while it runs, and a loss that is
not finite ends the benchmark.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

# Steps the host may run ahead of the device: enough to hide launches, few enough for a time limit to hold.
STEPS_AHEAD = 2


def measure(
    step: Callable[[], Any],
    seconds: float = 6.0,
    warmup: float = 3.0,
    *,
    device: torch.device | str = "cuda",
    compile_calls: int = 2,
    min_steps: int = 5,
) -> dict[str, Any]:
    """Time `step`: `compile_calls` calls apart, then `warmup` seconds uncounted, then `seconds` counted.

    On a GPU a step lasts from the event after the step before to the event after it, so that launches hidden behind
    running kernels cost nothing; the host is kept at most `STEPS_AHEAD` steps ahead by waiting for an event, which does
    not hold up the device. On a CPU the host's clock is read.

    Args:
        step: One whole training step; returns its loss (a scalar tensor, a float) or None. Losses are kept as tensors
            and read after the last step, so a step that reuses one buffer for its loss shows the last value everywhere.
        seconds: Least time counted.
        warmup: Least time after compiling and before counting.
        device: Where the step runs.
        compile_calls: First calls, each synchronised and timed apart; as many as there are shapes to compile.
        min_steps: Fewest steps counted, for steps longer than `seconds`.
    Returns: `ms` per step and their median, p10, p90 and mean; `compile_s` per first call; first and last loss; on a
        GPU also peak memory allocated and reserved since the compile calls, `device_allocs` (times the allocator asked
        the driver for memory while counting), and what nvidia-smi showed while counting.
    Raises: FloatingPointError when a loss is not finite.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    compile_s = []
    for _ in range(compile_calls):
        started = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
        compile_s.append(time.perf_counter() - started)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with NvidiaSmi(device) as sampler:
        warm_ms, _ = _run(step, warmup, device, min_steps=0)
        allocs = _device_allocs(device)
        started = time.perf_counter()
        ms, losses = _run(step, seconds, device, min_steps)
        ended = time.perf_counter()
        allocs = _device_allocs(device) - allocs
    for i, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of step {i} is {loss}: timings on such numbers would mean nothing")
    deciles = statistics.quantiles(ms, n=10, method="inclusive") if len(ms) > 1 else ms * 9
    result = {
        "steps": len(ms),
        "median_ms": statistics.median(ms),
        "p10_ms": deciles[0],
        "p90_ms": deciles[8],
        "mean_ms": statistics.fmean(ms),
        "counted_s": ended - started,
        "warmup_steps": len(warm_ms),
        "compile_s": compile_s,
        "loss": [losses[0], losses[-1]] if losses else None,
    }
    if on_gpu:
        result["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        result["peak_reserved_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
        result["device_allocs"] = allocs
        result.update(sampler.between(started, ended))
    return {**result, "ms": [round(each, 3) for each in ms]}


def _run(
    step: Callable[[], Any], seconds: float, device: torch.device, min_steps: int
) -> tuple[list[float], list[float]]:
    on_gpu = device.type == "cuda"
    marks, losses = [_mark(device)], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(marks) <= min_steps:
        loss = step()
        marks.append(_mark(device))
        if loss is not None:
            losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if on_gpu and len(marks) > STEPS_AHEAD:
            marks[-1 - STEPS_AHEAD].synchronize()
    if on_gpu:
        torch.cuda.synchronize(device)
        ms = [before.elapsed_time(after) for before, after in zip(marks, marks[1:], strict=False)]
    else:
        ms = [1000 * (after - before) for before, after in zip(marks, marks[1:], strict=False)]
    return ms, [float(loss) for loss in losses]


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _device_allocs(device: torch.device) -> int:
    return torch.cuda.memory_stats(device).get("num_device_alloc", 0) if device.type == "cuda" else 0


class NvidiaSmi:
    """SM clock and power of one GPU, sampled by a child process of its own while the `with` block runs.

    Without a GPU, or where nvidia-smi cannot be started, there are no samples.
    """

    def __init__(self, device: torch.device | str, period_ms: int = 200) -> None:
        self.device = torch.device(device)
        self.period_ms = period_ms
        self.samples: list[tuple[float, float, float]] = []  # (perf_counter, MHz, W)
        self._child: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> NvidiaSmi:
        if self.device.type != "cuda":
            return self
        command = [
            "nvidia-smi",
            f"--id=GPU-{torch.cuda.get_device_properties(self.device).uuid}",
            "--query-gpu=clocks.sm,power.draw",
            "--format=csv,noheader,nounits",
            f"--loop-ms={self.period_ms}",
        ]
        try:
            self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return self
        self._thread = threading.Thread(target=self._read, name="nvidia-smi", daemon=True)
        self._thread.start()
        return self

    def _read(self) -> None:
        assert self._child is not None and self._child.stdout is not None
        for line in self._child.stdout:
            now = time.perf_counter()
            try:
                clock, power = map(float, line.split(","))
            except ValueError:  # "[N/A]", or a message
                continue
            self.samples.append((now, clock, power))

    def __exit__(self, *_: object) -> None:
        if self._child is not None and self._thread is not None:
            self._child.terminate()
            self._child.wait()
            self._thread.join()

    def between(self, started: float, ended: float) -> dict[str, Any]:
        """The samples taken from `started` to `ended` (perf_counter), and their medians and extremes."""
        taken = [(at - started, clock, power) for at, clock, power in self.samples if started <= at <= ended]
        result: dict[str, Any] = {"samples": [[round(at, 2), clock, power] for at, clock, power in taken]}
        for name, values in (("clock_mhz", [s[1] for s in taken]), ("power_w", [s[2] for s in taken])):
            if values:
                result[name] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
        return result
