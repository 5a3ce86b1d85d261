"""A Ray cluster to run in: one that is there, by its address, or one on this host for as long as the run lasts."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.errors import ConfigError, PipelineError

log = logging.getLogger(__name__)

MIN_STORE_BYTES = 256 << 20
"""Object store of a cluster that is started here, at least."""

CONNECT_S = 5.0
"""Seconds for a cluster's address to answer."""

WAIT_LOOK_S = 0.5
SAY_S = 20.0
"""Seconds after which it is said that a process has not started."""

STORE_SLACK = 1.25
"""Room in the store over what may be under way: it keeps an object a moment longer than its last user."""


@dataclass(frozen=True)
class Needs:
    """What a run wants of a cluster.

    Attributes:
        processes: Actors.
        cpus: Of each.
        gpus: Of a target.
        drafters: Of the processes, those that take one GPU, however many a target takes; none where that takes none.
        store_bytes: Features that may be under way at a time.
    """

    processes: int
    cpus: int
    gpus: int
    store_bytes: int
    drafters: int = 0

    @property
    def all_gpus(self) -> int:
        """Of all processes."""
        return (self.processes - self.drafters) * self.gpus + self.drafters * min(1, self.gpus)


@contextlib.contextmanager
def ray_cluster(address: str | None, needs: Needs, own_device: str = "cpu") -> Iterator[Any]:
    """The `ray` module, connected; what was started here ends with the context.

    Args:
        address: ``HOST:PORT`` or ``auto``; None starts a cluster on this host, heard on the loopback device only.
        own_device: Where this process computes; a cluster that is started here leaves that GPU alone.
    Raises: ConfigError if Ray is not installed, cannot be reached, or the cluster is too small.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is None and "ray" in sys.modules and "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ:
        log.warning("ray was imported before: the cluster of this run may listen beyond the loopback device")
    if address is None:  # else it listens on every interface, whatever address it is given; read when it is imported
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # else targets run at 15, behind all others of this host
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "topology.executor=ray needs Ray: install the extra, `pip install 'paceline[ray]'`, or take "
            f"executor=local ({error})"
        ) from error
    if ray.is_initialized():  # the tests', or an embedding program's: it is theirs to end
        check_size(ray, needs)
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if address is None:
        options |= {
            "address": "local",
            "num_cpus": needs.processes * max(1, needs.cpus),
            "num_gpus": needs.all_gpus,
            "include_dashboard": False,
            "object_store_memory": max(MIN_STORE_BYTES, int(STORE_SLACK * needs.store_bytes)),
        }
    else:
        options["address"] = address
    try:
        _check_address(address)
        with _other_gpus(own_device if address is None and needs.gpus else "cpu"), _own_signal_handlers():
            ray.init(**options)
    except (ConnectionError, ValueError, OSError, RuntimeError) as error:
        where = "no local Ray cluster could be started" if address is None else f"no Ray cluster answers at {address}"
        raise ConfigError(f"{where}: {error}") from error
    try:
        check_size(ray, needs)
        with contextlib.redirect_stdout(sys.stderr):  # Ray tells there of processes that died; a report may follow
            yield ray
    finally:
        ray.shutdown()


def tree_of(config: RunConfig) -> dict[str, Any]:
    """A configuration for another process, which may have another working directory."""
    tree = config.model_dump(mode="json")
    tree["run"]["dir"] = str(Path(config.run.dir).absolute())
    if (target := Path(config.target.path)).exists():  # else it is a hub id
        tree["target"]["path"] = str(target.absolute())
    for name in ("adapter", "cache"):
        if (folder := getattr(config.target, name)) is not None:
            tree["target"][name] = str(Path(folder).absolute())
    return tree


def cpus_of(config: RunConfig) -> int:
    """Processors that Ray reserves for a process: its compute threads, or on a GPU the one that launches."""
    return 1 if config.run.device.startswith("cuda") else int(config.topology.threads)


def wait_for(ray: Any, call: Any, role: str, should_stop: Callable[[], object] = lambda: False) -> None:
    """Wait for a process that is starting, and say so where it takes long.

    Raises: PipelineError when a stop is asked for meanwhile.
    """
    started, has_said = time.monotonic(), False
    while not ray.wait([call], timeout=WAIT_LOOK_S)[0]:
        if should_stop():
            raise PipelineError(f"a stop was asked for while {role} was being started", role=role, batch=None)
        if not has_said and time.monotonic() > started + SAY_S:
            free = {name: value for name, value in ray.available_resources().items() if name in ("CPU", "GPU")}
            log.warning("%s is not there after %.0f s; free in the cluster: %s", role, SAY_S, free or "nothing")
            has_said = True


def own_host(address: str | None) -> str:
    """The address by which others of the cluster reach this process."""
    if address is None:
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())


def _check_address(address: str | None) -> None:
    """Ray tries for minutes where nobody listens. Raises: OSError, ValueError."""
    if address is None or address == "auto" or "://" in address:
        return
    host, separator, port = address.rpartition(":")
    if not separator:
        raise ValueError(f"topology.address={address}: HOST:PORT or auto was wanted")
    socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Ray takes SIGTERM for itself and ends the process at once, where a run wants to save first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def _other_gpus(own_device: str) -> Iterator[None]:
    """While entered, processes that are started see all GPUs but this process's."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    if own_device.startswith("cuda"):
        import torch

        here = torch.device(own_device).index or 0
        seen = before.split(",") if before else [str(i) for i in range(torch.cuda.device_count())]
        os.environ[name] = ",".join(gpu for i, gpu in enumerate(seen) if i != here)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def check_size(ray: Any, needs: Needs) -> None:
    """Raises: ConfigError saying what was asked and what is there."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    places = _places([node["Resources"] for node in alive], needs)
    if places < needs.processes:
        there = "; ".join(
            f"{node['NodeManagerHostname']}: {node['Resources'].get('CPU', 0):g} CPU, "
            f"{node['Resources'].get('GPU', 0):g} GPU"
            for node in alive
        )
        asked = f"{needs.processes} processes of {needs.cpus} CPU" + (f" and {needs.gpus} GPU" if needs.gpus else "")
        if needs.gpus > 1 and needs.drafters:
            asked += f" ({needs.drafters} of them of 1 GPU)"
        raise ConfigError(
            f"the cluster is too small: {asked} were asked for (topology.targets, drafters, threads), room is for "
            f"{places} ({there}). Add hosts, or lower one of these"
        )
    store = min(node["Resources"].get("object_store_memory", 0) for node in alive)
    if store < needs.store_bytes:
        raise ConfigError(
            f"Ray's object store has {store / 2**30:.2f} GiB on the smallest host, and features of up to "
            f"{needs.store_bytes / 2**30:.2f} GiB may be under way, which Ray would spill to the disk: lower "
            "pipeline.queue_depth or pipeline.queue_gib, or start Ray with a larger --object-store-memory"
        )


def _places(hosts: list[dict[str, float]], needs: Needs) -> int:
    """Processes that there is room for: targets, each on one host, and then drafters where something is left."""

    def room(resources: dict[str, float], gpus: int) -> int:
        counts = [resources.get("CPU", 0) // needs.cpus] if needs.cpus else []
        counts += [resources.get("GPU", 0) // gpus] if gpus else []
        return int(min(counts)) if counts else needs.processes

    if needs.gpus <= 1:
        return sum(room(host, needs.gpus) for host in hosts)
    targets = min(needs.processes - needs.drafters, sum(room(host, needs.gpus) for host in hosts))
    left = sum(int(host.get("GPU", 0)) for host in hosts) - targets * needs.gpus
    if needs.cpus:
        left = min(left, sum(int(host.get("CPU", 0) // needs.cpus) for host in hosts) - targets)
    return targets + min(needs.drafters, max(0, left))
