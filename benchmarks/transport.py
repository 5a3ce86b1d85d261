"""How fast a target's features reach the drafter, by every way that this machine has.

    local           the OrderedChannel: one process, handed over by reference
    process         two processes of one host: shared memory on a CPU, CUDA IPC on a GPU
    ray             an actor's return value, on the caller's node
    ray-two-nodes   the same across two raylets of this machine: a TCP stream over loopback
    staging         GPU to pinned memory and back on a stream of its own
    quantised       one fp8 scale a token: bytes, time and error

A payload is bfloat16. It exists before the clock starts and its first and last numbers are checked when it has come.
Cold payloads go into pages of the object store that nothing has touched yet; warm ones into pages used before. With
several calls in flight, `ms` is the time from one arrival to the next, `latency_ms` that from call to arrival.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline import __version__
from paceline.pipeline.channel import OrderedChannel
from paceline.records import FeatureBatch, TokenBatch

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
MOVED_BYTES = 4 * 2**30  # a case, unless --repeats says otherwise
IN_FLIGHT = (1, 2, 4)
# One micro-batch of Qwen3-8B: 12,288 tokens of 5 layers of 4,096 numbers; its step is timed in step-h200.json.
MICRO_BATCH_MIB, FEATURE_SIZE, STEP_MS = 480, 5 * 4096, 740.0
SPARE_PAYLOADS = 2  # above those in flight: one that the consumer reads, one for what the store has not freed yet
LEAST_STORE_BYTES = 80 * MIB  # Ray takes no less than 75
HIGHEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def measure_local(size: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """From `put` in one thread to `get` in another. The tensor is the same one: nothing is copied, there is no rate."""
    empty = TokenBatch.pack(0, [], 0)
    feature = _payload(size, device)
    channel = OrderedChannel(0, repeats, queue_depth=2, max_bytes=4 * size)
    put_at: list[float] = []
    taken = threading.Semaphore(1)

    def produce() -> None:
        for number in range(repeats):
            taken.acquire()
            batch = FeatureBatch(replace(empty, number=number), feature)
            put_at.append(time.perf_counter())
            channel.put(batch)

    producer = threading.Thread(target=produce, name="target-0")
    producer.start()
    ms = []
    for _ in range(repeats):
        batch = channel.get()
        ms.append(1000 * (time.perf_counter() - put_at[-1]))
        assert batch is not None and batch.context_feature is feature
        taken.release()
    producer.join()
    return {"copies": 0, "warm": {"in flight 1": {"payloads": repeats, "ms": _quantiles(ms)}}}


def measure_process(size: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """A tensor of another process, opened by its handle, then copied into one of our own; see `_answer`."""
    context = torch.multiprocessing.get_context("spawn")
    asked, answered = context.Queue(), context.Queue()
    producer = context.Process(target=_answer, args=(asked, answered, size, str(device)), daemon=True)
    producer.start()
    own = torch.empty(size // 2, dtype=torch.bfloat16, device=device)
    open_ms, copy_ms = [], []
    try:
        for number in range(repeats + 1):  # the first maps the memory and is left out
            asked.put(number)
            theirs, filled_at = answered.get(timeout=120)
            opened_at = time.perf_counter()
            own.copy_(theirs)
            _synchronise(device)
            copied_at = time.perf_counter()
            _check(own, number)
            open_ms.append(1000 * (opened_at - filled_at))
            copy_ms.append(1000 * (copied_at - opened_at))
            del theirs
    finally:
        asked.put(None)
        producer.join(30)
        producer.kill()
    whole = [opened + copied for opened, copied in zip(open_ms, copy_ms, strict=True)]
    return {
        "copies": 1,
        "cold": {"in flight 1": _summary(whole[:1], size)},
        "warm": {"in flight 1": _summary(whole[1:], size)},
        "handle_ms": _quantiles(open_ms[1:]),
        "copy_ms": _quantiles(copy_ms[1:]),
    }


def _answer(asked: Any, answered: Any, size: int, device: str) -> None:
    """The producer of `measure_process`: torch sends the handle of its memory, never the content."""
    payload = _payload(size, torch.device(device))
    if device == "cpu":
        payload.share_memory_()
    while (number := asked.get()) is not None:
        _stamp(payload, number)
        _synchronise(payload.device)
        answered.put((payload, time.perf_counter()))  # Linux has one monotonic clock for all processes


def measure_ray(size: int, repeats: int, num_nodes: int) -> dict[str, Any]:
    """An actor's return value, to a tensor in the caller: a numpy view of bytes, as numpy has no bfloat16."""
    store = max(LEAST_STORE_BYTES, (max(IN_FLIGHT) + SPARE_PAYLOADS) * size)
    with _cluster(num_nodes, store) as nodes:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = NodeAffinitySchedulingStrategy(nodes[-1], soft=False)
        producer = ray.remote(_Producer).options(num_cpus=0, scheduling_strategy=place).remote(size)
        crosses = ray.get(producer.node.remote()) != ray.get_runtime_context().get_node_id()
        cold = _stream(producer, size, max(IN_FLIGHT), in_flight=1, first=0, keep=True)
        warm = {f"in flight {depth}": _stream(producer, size, repeats, depth, first=50 * depth) for depth in IN_FLIGHT}
        result: dict[str, Any] = {
            "object_store_memory": store,
            "nodes": num_nodes,
            "cold": {"in flight 1": cold},
            "warm": warm,
            "copies": {"into the store": 1, "between stores": int(crosses), "out of the store": _copies_out(producer)},
            "copy_out_ms": _copy_out(producer, size, max(3, repeats // 4)),
        }
    if size == MICRO_BATCH_MIB * MIB:
        result["share_of_step"] = {name: case["ms"]["median"] / STEP_MS for name, case in warm.items()}
    return result


class _Producer:
    """The actor: its method returns the array, so the caller owns the reference and keeps it if the actor dies."""

    def __init__(self, size: int) -> None:
        self._payload = _payload(size, torch.device("cpu"))

    def node(self) -> str:
        """Where it runs; answered once the payload exists."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def make(self, number: int) -> np.ndarray:
        """The payload with its number in it, as bytes."""
        _stamp(self._payload, number)
        return self._payload.view(torch.uint8).numpy()


@contextmanager
def _cluster(num_nodes: int, store: int) -> Iterator[list[str]]:
    """A cluster of this machine on loopback alone, apart from any other; yields the ids of its nodes, ours first."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray's one switch to listen on 127.0.0.1 only
    import ray
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        options = {"num_cpus": 1, "object_store_memory": store, "temp_dir": folder}
        cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
        try:
            nodes = [cluster.head_node, *(cluster.add_node(**options) for _ in range(num_nodes - 1))]
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            cluster.wait_for_nodes()
            yield [node.node_id for node in nodes]
        finally:
            ray.shutdown()
            cluster.shutdown()


def _stream(producer: Any, size: int, count: int, in_flight: int, first: int, keep: bool = False) -> dict[str, Any]:
    """Ask for payloads `first` to ``first + count - 1``, `in_flight` at a time, and take them in order.

    Args:
        keep: Hold every payload until the last has come, so that each needs new pages.
    """
    end = first + count
    asked: deque[tuple[Any, float]] = deque()
    kept, ms, latency = [], [], []

    def ask(number: int) -> None:
        asked.append((producer.make.remote(number), time.perf_counter()))

    started = before = time.perf_counter()
    for number in range(first, min(first + in_flight, end)):
        ask(number)
    for number in range(first, end):
        reference, asked_at = asked.popleft()
        feature = _receive(reference)
        now = time.perf_counter()
        _check(feature, number)
        ms.append(1000 * (now - before))
        latency.append(1000 * (now - asked_at))
        before = now
        if keep:
            kept.append((reference, feature))
        del reference, feature  # the store may use its memory again
        if number + in_flight < end:
            ask(number + in_flight)
    seconds = time.perf_counter() - started
    summary = _summary(ms, size)
    return {**summary, "latency_ms": _quantiles(latency), "sustained_gb_per_s": count * size / seconds / 1e9}


def _receive(reference: Any) -> Tensor:
    import ray

    # `torch.from_numpy` takes the same memory, but warns that it is read-only.
    return torch.from_dlpack(ray.get(reference)).view(torch.bfloat16)


def _copies_out(producer: Any) -> int:
    """Copies from the store to the caller's tensor: none if two calls return the same memory.

    Raises: ValueError if the producer can still write to what it returned, so that it was not copied into the store.
    """
    import ray

    reference = producer.make.remote(1)
    first, second = _receive(reference), _receive(reference)
    ray.get(producer.make.remote(2))
    _check(first, 1)
    return int(first.data_ptr() != second.data_ptr())


def _copy_out(producer: Any, size: int, count: int) -> dict[str, float]:
    """Milliseconds to copy a payload that has come into memory of our own, as staging for a GPU does."""
    own = torch.ones(size // 2, dtype=torch.bfloat16)
    ms = []
    for number in range(count):
        feature = _receive(producer.make.remote(number))
        started = time.perf_counter()
        own.copy_(feature)
        ms.append(1000 * (time.perf_counter() - started))
    return _quantiles(ms)


def measure_staging(size: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """GPU to pinned memory and back, on a stream beside the current one, by the device's clock."""
    payload = _payload(size, device)
    back = torch.empty_like(payload)
    pinned = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True)
    stream = torch.cuda.Stream(device)
    out_ms, in_ms = [], []
    for number in range(repeats + 2):  # the first two are warm-up
        _stamp(payload, number)
        stream.wait_stream(torch.cuda.current_stream(device))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        with torch.cuda.stream(stream):
            marks[0].record(stream)
            pinned.copy_(payload, non_blocking=True)
            marks[1].record(stream)
            back.copy_(pinned, non_blocking=True)
            marks[2].record(stream)
        stream.synchronize()
        _check(back, number)
        out_ms.append(marks[0].elapsed_time(marks[1]))
        in_ms.append(marks[1].elapsed_time(marks[2]))
    whole = [there + again for there, again in zip(out_ms, in_ms, strict=True)]
    return {
        "copies": 2,
        "warm": {"in flight 1": _summary(whole[2:], size)},
        "device_to_host": _summary(out_ms[2:], size),
        "host_to_device": _summary(in_ms[2:], size),
    }


def measure_quantised(size: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """Features of one scale a token in fp8: what is saved on the way, what it costs before and after."""
    tokens = max(1, size // (2 * FEATURE_SIZE))
    generator = torch.Generator(device).manual_seed(0)
    feature = torch.empty(tokens, FEATURE_SIZE, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    restored = torch.empty_like(feature)
    values, scales = quantise(feature)
    there = [_timed_ms(lambda: quantise(feature), device) for _ in range(repeats)]
    again = [_timed_ms(lambda: dequantise(values, scales, restored), device) for _ in range(repeats)]
    error = sum(float((a.float() - b.float()).square().sum()) for a, b in _chunks(feature, restored))
    norm = sum(float(a.float().square().sum()) for (a,) in _chunks(feature))
    full = feature.numel() * feature.element_size()
    return {
        "bytes": full,
        "quantised_bytes": values.numel() * values.element_size() + scales.numel() * scales.element_size(),
        "quantise": _summary(there, full),
        "dequantise": _summary(again, full),
        "relative_error": math.sqrt(error / norm),
        "of": f"normal random features of {tokens} tokens",
    }


def quantise(feature: Tensor) -> tuple[Tensor, Tensor]:
    """``[S, N]`` to float8_e4m3fn of the same shape and float32 scales ``[S, 1]``: the largest of a token is 448."""
    values = torch.empty(feature.shape, dtype=torch.float8_e4m3fn, device=feature.device)
    scales = torch.empty(len(feature), 1, dtype=torch.float32, device=feature.device)
    for part, into, scale in _chunks(feature, values, scales):
        wide = part.float()
        scale.copy_(wide.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12) / HIGHEST_FP8)
        into.copy_(wide.div_(scale))
    return values, scales


def dequantise(values: Tensor, scales: Tensor, into: Tensor) -> None:
    """Write what `quantise` made of a feature back into a tensor of its shape."""
    for part, scale, out in _chunks(values, scales, into):
        out.copy_(part.float().mul_(scale))


def _chunks(*tensors: Tensor, tokens: int = 1024) -> Iterator[tuple[Tensor, ...]]:
    """Some tokens at a time: in float32 the whole of a micro-batch would be a gigabyte."""
    for start in range(0, len(tensors[0]), tokens):
        yield tuple(tensor[start : start + tokens] for tensor in tensors)


def _payload(size: int, device: torch.device) -> Tensor:
    return torch.ones(size // 2, dtype=torch.bfloat16, device=device)  # ones: its pages exist


def _stamp(payload: Tensor, number: int) -> None:
    payload[0] = payload[-1] = number % 251  # bfloat16 holds whole numbers up to 256


def _check(feature: Tensor, number: int) -> None:
    """Raises: ValueError if this is not the payload of that number."""
    found = (float(feature[0]), float(feature[-1]))
    if found != (number % 251, number % 251):
        raise ValueError(f"payload {number} begins and ends with {found}, not with {number % 251}")


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed_ms(work: Callable[[], Any], device: torch.device) -> float:
    _synchronise(device)
    started = time.perf_counter()
    work()
    _synchronise(device)
    return 1000 * (time.perf_counter() - started)


def _quantiles(values: list[float]) -> dict[str, float]:
    deciles = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 9
    return {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[8]}


def _summary(ms: list[float], size: int) -> dict[str, Any]:
    """Times and the rates that they mean; the 10 % slowest times are the 10 % lowest rates."""
    times = _quantiles(ms)
    rate = {"median": times["median"], "p10": times["p90"], "p90": times["p10"]}
    return {
        "payloads": len(ms),
        "ms": times,
        "gb_per_s": {name: size / value / 1e6 for name, value in rate.items()},
    }


def _missing(path: str, device: torch.device) -> str | None:
    """Why a path cannot be measured here."""
    if path == "staging" and device.type != "cuda":
        return "needs a GPU: --device cuda"
    if path.startswith("ray") and find_spec("ray") is None:
        return "ray is not installed: pip install paceline[ray]"
    return None


MEASURES: dict[str, Callable[[int, int, torch.device], dict[str, Any]]] = {
    "local": measure_local,
    "process": measure_process,
    "ray": lambda size, repeats, _: measure_ray(size, repeats, num_nodes=1),
    "ray-two-nodes": lambda size, repeats, _: measure_ray(size, repeats, num_nodes=2),
    "staging": measure_staging,
    "quantised": measure_quantised,
}


def measure(paths: list[str], sizes: list[int], device: torch.device, repeats: int | None) -> dict[str, Any]:
    """Every path at every size (MiB), and why those left out were."""
    found: dict[str, dict[str, Any]] = {}
    left_out = {path: reason for path in paths if (reason := _missing(path, device))}
    for path in paths:
        for mib in sizes:
            if path in left_out:
                continue
            size = mib * MIB
            count = repeats or min(40, max(8, round(MOVED_BYTES / size)))
            found.setdefault(path, {})[f"{mib} MiB"] = MEASURES[path](size, count, device)
            print(path, mib, "MiB:", json.dumps(found[path][f"{mib} MiB"]), file=sys.stderr, flush=True)
    return {"paths": found, "left_out": left_out}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print, and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, MICRO_BATCH_MIB], metavar="MIB")
    parser.add_argument("--paths", nargs="+", default=list(MEASURES), choices=list(MEASURES))
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--repeats", type=int, help="payloads a case; by default 4 GiB of them, 8 to 40")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]  # of other work at the start: above the number of cores, times are too long
    result = {
        "command": " ".join(["python -m benchmarks.transport", *(sys.argv[1:] if arguments is None else arguments)]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "gpu": torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else None,
        "load": load,
        "versions": {
            "paceline": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy", "ray") if find_spec(name)},
        },
        "step_ms": STEP_MS,
        **measure(options.paths, options.sizes, options.device, options.repeats),
    }
    print(json.dumps(result, indent=1))
    out = options.out or RESULTS / f"transport-{options.device.type}.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
