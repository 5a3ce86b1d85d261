"""The drafters of one run as a torch.distributed group: what an optimizer step needs of it, and how it ends.

Every rank enters the same collectives in the same order. On the CPU they go through gloo and end in an error when a
rank dies or is late. On CUDA they go through NCCL and the host does not wait for them: a thread looks whether they
end in time and breaks the group off if not, and `check` tells that to whoever reads a result.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import GroupLost

LOOK_S = 0.5
"""Pause between two looks at collectives that are under way."""

_abandoned: list[Any] = []
"""Collectives of gloo that were given up: it cannot break them off, and would have us wait for them here."""

NCCL_PATIENCE = 10
"""NCCL's own timeout in units of ours: it ends the process, so it must not be the first."""


def listen(host: str, timeout_s: float) -> dist.TCPStore:
    """Where the ranks of one group meet, on a free port of this process: its `host` and `port` go to the others.

    A group that has ended is followed by one with another store.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)  # the store's own would listen on every interface
    listener.bind(address)
    listener.listen()
    patience = timedelta(seconds=timeout_s)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, None, True, timeout=patience, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class Group:
    """M drafters that update together; by default a group of one, whose collectives do nothing.

    Attributes:
        rank, size: This drafter's number from 0, and M.
    """

    def __init__(self, rank: int = 0, size: int = 1, backend: Any = None, timeout_s: float = 0.0) -> None:
        assert (backend is None) == (size == 1) and 0 <= rank < size
        self.rank, self.size = rank, size
        self._backend = backend
        self._timeout_s = timeout_s
        self._problem: str | None = None
        self._is_closed = threading.Event()
        self._under_way: deque[tuple[torch.cuda.Event, float]] = deque()
        self._watcher: threading.Thread | None = None

    @classmethod
    def open(
        cls, rank: int, size: int, meeting: dist.TCPStore | tuple[str, int], device: torch.device, timeout_s: float
    ) -> Group:
        """Meet the other ranks; returns when all are there.

        Args:
            meeting: What `listen` has given in this process, or its host and port.
            device: Whose tensors the collectives take; on CUDA one device a rank.
            timeout_s: How long to wait for the other ranks, here and in each collective.
        Raises: GroupLost if they do not come.
        """
        if size == 1:
            return cls()
        make = _nccl if device.type == "cuda" else _gloo
        patience = timedelta(seconds=timeout_s)
        try:
            if isinstance(meeting, tuple):
                meeting = dist.TCPStore(*meeting, None, False, timeout=patience, wait_for_workers=False)
            return cls(rank, size, make(rank, size, meeting, device, timeout_s), timeout_s)
        except (RuntimeError, OSError) as error:  # torch's errors of stores and groups are RuntimeErrors
            raise _error(rank, f"could not meet the other drafters: {_first_line(error)}") from error

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a small tensor over the ranks, which each adds up alike: the same bits everywhere."""
        if self.size == 1:
            return values
        whole = torch.empty((self.size, *values.shape), dtype=values.dtype, device=values.device)
        whole[self.rank] = values
        self.all_gather_(whole)
        return whole.sum(0)

    def reduce_scatter_(self, whole: Tensor) -> Tensor:
        """Add up a flat tensor over the ranks; this rank's part of the sum, of `size` equal ones.

        The tensor holds nothing of use afterwards.
        """
        if self.size == 1:
            return whole
        if whole.is_cuda:
            part = torch.empty(whole.numel() // self.size, dtype=whole.dtype, device=whole.device)
            self._do(lambda: self._backend._reduce_scatter_base(part, whole), whole)
            return part
        self._do(lambda: self._backend.allreduce([whole]), whole)  # gloo scatters no sums in every type and version
        return self.part_of(whole)

    def all_gather_(self, whole: Tensor) -> None:
        """Fill a contiguous tensor with the parts of all ranks; this rank's is in its place already."""
        if self.size == 1:
            return
        whole = whole.view(-1).view(torch.uint8)  # bytes: whatever types the backend knows
        part = self.part_of(whole)
        if not whole.is_cuda:
            part = part.clone()
        self._do(lambda: self._backend._allgather_base(whole, part), whole)

    def gather(self, part: Tensor, whole: Tensor | None) -> None:
        """Fill rank 0's flat tensor with the parts of all ranks; the others give None."""
        assert (whole is not None) == (self.rank == 0)
        if self.size == 1:
            assert whole is not None
            whole.copy_(part)
            return
        options = dist.GatherOptions()
        options.rootRank = 0
        outputs = [] if whole is None else [list(whole.chunk(self.size))]
        self._do(lambda: self._backend.gather(outputs, [part], options), part)

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a flat tensor, a view."""
        length = whole.numel() // self.size
        return whole[self.rank * length :][:length]

    def barrier(self, device: torch.device) -> None:
        """Return when every rank is here."""
        if self.size > 1:
            self.sum(torch.zeros(1, device=device)).cpu()
            self.check()

    def check(self) -> None:
        """Raises: GroupLost if the group has been broken off: what its collectives gave since is of no use."""
        if self._problem is not None:
            raise _error(self.rank, self._problem)

    def abort(self, reason: str) -> None:
        """Break the group off, from any thread: a rank is known to be gone. Collectives under way end in an error."""
        if self.size == 1 or self._is_closed.is_set():
            return
        if self._problem is None:
            self._problem = reason
        self._is_closed.set()
        with contextlib.suppress(RuntimeError):  # what cannot be broken off has its timeout
            self._backend.abort()

    def close(self) -> None:
        """End the group, once nothing of it is under way; may be called again, and after `abort`."""
        if self.size == 1 or self._is_closed.is_set():
            return
        self._is_closed.set()
        with contextlib.suppress(RuntimeError):
            self._backend.shutdown()

    def _do(self, collective: Any, tensor: Tensor) -> None:
        """Start a collective, and have the host (on the CPU) or the current stream (on CUDA) wait for it."""
        self.check()
        assert not self._is_closed.is_set(), "the group is closed"
        try:
            self._wait_for(collective(), tensor)
        except RuntimeError as error:
            if self._problem is None:  # else whoever broke it off knows more
                self._problem = f"waited for the other drafters in vain: {_first_line(error)}"
            raise _error(self.rank, self._problem) from error
        if tensor.is_cuda:
            self._watch(tensor.device)

    def _wait_for(self, work: dist.Work, tensor: Tensor) -> None:
        if tensor.is_cuda:
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what it failed with, if it did
                    return
                if self._is_closed.is_set():
                    _abandoned.append((self._backend, work, tensor))
                    raise

    def _watch(self, device: torch.device) -> None:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        self._under_way.append((done, time.monotonic() + self._timeout_s))
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._look, name="group", daemon=True)
            self._watcher.start()

    def _look(self) -> None:
        while not self._is_closed.wait(LOOK_S):
            while self._under_way and self._under_way[0][0].query():
                self._under_way.popleft()
            if self._under_way and time.monotonic() > self._under_way[0][1]:
                self.abort(f"waited for the other drafters in vain: {self._timeout_s:g} s have passed")


def _gloo(rank: int, size: int, store: dist.TCPStore, _device: torch.device, timeout_s: float) -> Any:
    """Listens where the store is reached, whatever the host's name resolves to."""
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [backend.create_device(hostname=_own_address(store.host, store.port))]
    return backend(dist.PrefixStore("drafters", store), rank, size, options)


def _nccl(rank: int, size: int, store: dist.TCPStore, device: torch.device, timeout_s: float) -> Any:
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # abort without ending the process: it can go on
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=NCCL_PATIENCE * timeout_s)
    backend = dist.ProcessGroupNCCL(dist.PrefixStore("drafters", store), rank, size, options)
    backend.eager_connect_single_device(device)
    return backend


def _own_address(host: str, port: int) -> str:
    """The address by which this host is seen from another; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _error(rank: int, what: str) -> GroupLost:
    return GroupLost(
        f"drafter-{rank} {what}; all drafters have to be alive and reachable: the log of the one that is not says why",
        role=f"drafter-{rank}",
        batch=None,
    )
