"""Level 6: what a process says of itself when asked through its control socket. This side runs inside of it.

Counters and stacks as data; nothing here waits for the device or changes anything. `sample_frames` and the probe of the
interpreter's lock are for machines where nobody may read another process: they see less than py-spy does, as this
thread too has to get the lock before it can look.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

ALLOCATOR_COUNTERS = (
    "num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free", "num_sync_all_streams",
    "reserved_bytes.all.current", "allocated_bytes.all.current", "reserved_bytes.all.peak",
    "inactive_split_bytes.all.current",
)  # fmt: skip

EVERY_S = 0.02
"""Mean of the exponential pauses between two looks at all frames."""

PROBE_S = 0.01
LONG_WAKE_S = 150e-6
"""Waking this much later than a free interpreter does means that somebody held its lock."""

SHARE = 0.02
"""Of a core, and of the interpreter's lock, that sampling may take."""
MAX_STACKS = 2_000
MAX_DEPTH = 60
MAX_CHARACTERS = 400_000

_sampling = threading.Lock()


def allocator_counters() -> dict[str, Any]:
    """Counters of torch's CUDA allocator by device; empty where CUDA is not in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {"devices": {}}
    devices = {}
    for index in range(torch.cuda.device_count()):
        counters = torch.cuda.memory_stats(index)
        if counters.get("reserved_bytes.all.peak", 0):
            devices[str(index)] = {name: int(counters.get(name, 0)) for name in ALLOCATOR_COUNTERS}
    return {"devices": devices, "monotonic_ns": time.monotonic_ns()}


def collectives(at_most: int = 50) -> dict[str, Any]:
    """The last entries of torch's flight recorder, as JSON; empty without a process group."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return {"entries": []}
    recorder = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if recorder is None or torch.distributed.get_backend() != "nccl":
        return {"entries": [], "reason": "only NCCL's collectives are recorded"}
    found = json.loads(recorder())
    keys = ("collective_seq_id", "profiling_name", "state", "time_created_ns", "duration_ms", "input_sizes")
    entries = [{key: entry[key] for key in keys if key in entry} for entry in found.get("entries", [])[-at_most:]]
    return {"entries": entries}


def sample_frames(seconds: float, seed: int | None = None) -> dict[str, Any]:
    """Python stacks of all other threads at random moments, and how often the interpreter's lock was not free.

    Args:
        seconds: Up to 30.
    Raises: RuntimeError while another such request runs.
    Returns: ``stacks``: thread number, frames (outermost first, ``name (file:line)``) and count; ``samples``;
        ``probe``: wakes and late ones, for the share of time in which the lock was held for more than 150 us.
    """
    if not _sampling.acquire(blocking=False):
        raise RuntimeError("stacks are being sampled already: try again after that")
    try:
        return _sampled(min(max(seconds, 0.1), 30.0), random.Random(seed))
    finally:
        _sampling.release()


def _sampled(seconds: float, draw: random.Random) -> dict[str, Any]:
    probe: dict[str, int] = {}
    prober = threading.Thread(target=_probe_lock, args=(seconds, random.Random(draw.random()), probe), daemon=True)
    prober.start()
    counts: Counter[tuple[int, tuple[str, ...]]] = Counter()
    end, samples, spent_s = time.monotonic() + seconds, 0, 0.0
    own = {threading.get_ident(), prober.ident}
    while (now := time.monotonic()) < end:
        time.sleep(min(max(draw.expovariate(1 / EVERY_S), spent_s / SHARE), end - now))
        began = time.thread_time()
        _count_stacks(counts, own)
        spent_s = time.thread_time() - began
        samples += 1
    prober.join(timeout=1.0)
    stacks = [{"tid": tid, "frames": list(frames), "count": count} for (tid, frames), count in counts.most_common()]
    names = {str(thread.native_id): thread.name for thread in threading.enumerate() if thread.native_id}
    return {"stacks": _within_bounds(stacks), "samples": samples, "probe": probe, "names": names, "pid": os.getpid()}


def _count_stacks(counts: Counter[tuple[int, tuple[str, ...]]], own: set[int | None]) -> None:
    """Once over all threads; no frame outlives it, which would keep the tensors in it."""
    numbers = {thread.ident: thread.native_id for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident not in own:
            key = numbers.get(ident) or 0, _names_of(frame)
            if key in counts or len(counts) < MAX_STACKS:
                counts[key] += 1


def _names_of(frame: FrameType | None) -> tuple[str, ...]:
    found: list[str] = []
    while frame is not None and len(found) < MAX_DEPTH:
        code = frame.f_code
        found.append(f"{code.co_qualname} ({os.path.basename(code.co_filename)}:{frame.f_lineno})")
        frame = frame.f_back
    return tuple(reversed(found))


def _probe_lock(seconds: float, draw: random.Random, result: dict[str, int]) -> None:
    """Sleep for random times and count how often waking took long, beyond what this thread waited for a CPU."""
    end = time.monotonic() + seconds
    overs = []
    while time.monotonic() < end:
        pause, ready = draw.expovariate(1 / PROBE_S), _runqueue_ns()
        began = time.monotonic_ns()
        time.sleep(pause)
        overs.append((time.monotonic_ns() - began) / 1e9 - pause - (_runqueue_ns() - ready) / 1e9)
    base = sorted(overs)[len(overs) // 20] if overs else 0.0  # a free interpreter's
    result |= {"wakes": len(overs), "late": sum(over > base + LONG_WAKE_S for over in overs)}


def _runqueue_ns() -> int:
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _within_bounds(stacks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the rarest, where the answer would not go through the socket."""
    size = 0
    for number, stack in enumerate(stacks):
        size += sum(len(frame) + 8 for frame in stack["frames"]) + 40
        if size > MAX_CHARACTERS:
            return stacks[:number]
    return stacks
