"""GPUs without a GPU: fake tensors on ``cuda:0``, ``cuda:1``, ... and streams that know what they may rely on.

Every launch is a tick of its stream. A stream's clock says which ticks of others are over before its next launch; waits
and PyTorch's copies between devices join clocks, as CUDA's events do. Three mistakes are found, whatever the timing of
a real run would have hidden: reading what may not be written yet, writing what may still be read, and getting memory
back from the allocator that another stream may still use.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict["FakeStream", int]


def join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


class FakeStream:
    """Stands in for ``torch.cuda.Stream``."""

    def __init__(self, device: torch.device, name: str = "") -> None:
        self.device, self.name = device, name
        self.clock: Clock = {}

    def wait_stream(self, other: FakeStream) -> None:
        join(self.clock, other.clock)

    def synchronize(self) -> None:
        join(GPUS.here.host, self.clock)

    def __repr__(self) -> str:
        return f"{self.name or 'stream'} {id(self) % 10_000} on {self.device}"


class _Here(threading.local):
    """What a thread knows: the streams that are current, and what the host has waited for."""

    def __init__(self) -> None:
        self.current: dict[torch.device, FakeStream] = {}
        self.host: Clock = {}
        self.device = torch.device("cuda:0")


class Block:
    """Memory of a tensor: on whose behalf it was taken, and who used it when."""

    def __init__(self, pool: FakeStream, storage: StorageWeakRef) -> None:
        self.pool, self.storage = pool, storage
        self.written: tuple[FakeStream, int] | None = None
        self.read: Clock = {}
        self.recorded: set[FakeStream] = set()


class FakeGpus(TorchDispatchMode):
    """Follows what is launched; enter it inside a `FakeTensorMode`, in every thread.

    Attributes:
        launches: Stream, tick, name and the stream's clock of each launch, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.here = _Here()
        self.defaults: dict[torch.device, FakeStream] = {}
        self.blocks: dict[int, Block] = {}
        self.launches: list[tuple[FakeStream, int, str, Clock]] = []

    def current(self, device: torch.device | None = None) -> FakeStream:
        device = self.here.device if device is None else torch.device(device)
        default = self.defaults.setdefault(device, FakeStream(device, "default"))
        return self.here.current.get(device, default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        out = func(*args, **kwargs)
        outputs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if func.is_view or not any(each.is_cuda for each in outputs):  # the question for a device, for one
            return out
        changed = [each for each in inputs if func._schema.is_mutable and each is args[0]]
        self._launch(str(func), [each for each in inputs if each.is_cuda], [*outputs, *changed])
        return out

    def copy(self, to: Tensor, tensor: Tensor) -> None:
        """``to.copy_(tensor)``, which builds without CUDA refuse."""
        self._launch("copy_", [tensor], [to])

    def synchronize(self, device: torch.device) -> None:
        for stream in {each[0] for each in self.launches if each[0].device == device}:
            stream.synchronize()

    def _launch(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        where = [each for each in inputs if not any(each is out for out in outputs)] or outputs
        stream, ends = self.current(where[0].device), {self.current(each.device) for each in outputs if each.is_cuda}
        for each in {stream, *ends}:
            join(each.clock, self.here.host)
        for each in ends:  # a copy waits for both sides
            join(stream.clock, each.clock)
        tick = stream.clock[stream] = stream.clock.get(stream, 0) + 1
        self.launches.append((stream, tick, name, dict(stream.clock)))
        for each in outputs:
            if not each.is_cuda:
                continue
            block = self._block(each)
            used = dict(block.read)
            if block.written is not None:
                join(used, {block.written[0]: block.written[1]})
            self._check(used, stream, f"{name} writes what may be in use")
            block.written, block.read = (stream, tick), {}
        for each in inputs:
            block = self._block(each)
            if block.written is not None:
                self._check({block.written[0]: block.written[1]}, stream, f"{name} reads what may not be there")
            block.read[stream] = tick
        for each in ends:
            join(each.clock, stream.clock)

    def _check(self, used: Clock, stream: FakeStream, what: str) -> None:
        late = {other: tick for other, tick in used.items() if stream.clock.get(other, 0) < tick}
        assert not late, f"{what}: {late}, on {stream}"

    def _block(self, tensor: Tensor) -> Block:
        key = StorageWeakRef(tensor.untyped_storage()).cdata
        if key not in self.blocks:
            self.blocks[key] = self._taken(tensor)
        return self.blocks[key]

    def _taken(self, tensor: Tensor) -> Block:
        """New memory: whatever this stream's pool has back may be the same."""
        pool = self.current(tensor.device)
        join(pool.clock, self.here.host)
        for key, block in list(self.blocks.items()):
            if block.pool is not pool or not block.storage.expired():
                continue
            used = dict(block.read)
            if block.written is not None:
                join(used, {block.written[0]: block.written[1]})
            used = {stream: tick for stream, tick in used.items() if stream not in block.recorded}
            self._check(used, pool, "memory comes back that may be in use")
            del self.blocks[key]
        return Block(pool, StorageWeakRef(tensor.untyped_storage()))

    def record(self, tensor: Tensor, stream: FakeStream) -> None:
        self._block(tensor).recorded.add(stream)


GPUS: FakeGpus


@contextlib.contextmanager
def fake_gpus(count: int) -> Iterator[FakeGpus]:
    """That many GPUs, in place of ``torch.cuda``'s streams; a thread enters a `FakeTensorMode` and the `FakeGpus`."""
    global GPUS
    GPUS = gpus = FakeGpus()

    @contextlib.contextmanager
    def stream(wanted: FakeStream) -> Iterator[None]:
        before, device = gpus.current(wanted.device), gpus.here.device
        set_stream(wanted)
        try:
            yield
        finally:
            gpus.here.current[wanted.device], gpus.here.device = before, device

    def set_stream(wanted: FakeStream) -> None:
        gpus.here.current[wanted.device], gpus.here.device = wanted, wanted.device

    def set_device(device: torch.device) -> None:
        gpus.here.device = torch.device(device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", FakeStream)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "set_stream", set_stream)
        patch.setattr(torch.cuda, "set_device", set_device)
        patch.setattr(torch.cuda, "current_stream", gpus.current)
        patch.setattr(torch.cuda, "device_count", lambda: count)
        patch.setattr(torch.cuda, "synchronize", gpus.synchronize)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: gpus.record(tensor, stream))
        yield gpus
