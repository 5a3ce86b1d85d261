"""Whether a cluster is large enough, and what is said if it is not."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from paceline.cluster.ray_cluster import Needs, _other_gpus, check_size, ray_cluster
from paceline.errors import ConfigError
from tests.unit.cluster.fake_ray import FakeRay


def cluster(*nodes: dict[str, float], alive: bool = True) -> FakeRay:
    ray = FakeRay()
    ray.node_list = [
        {"Alive": alive or not i, "Resources": node, "NodeManagerHostname": f"host{i}"} for i, node in enumerate(nodes)
    ]
    return ray


BIG = {"object_store_memory": 1e9}


def test_places_are_counted_host_by_host() -> None:
    """Two processes of three processors do not fit on two hosts of two."""
    check_size(cluster({"CPU": 4} | BIG, {"CPU": 2} | BIG), Needs(3, 2, 0, 0))
    with pytest.raises(ConfigError, match=r"2 processes of 3 CPU were asked .* room is for 0 \(host0: 2 CPU, 0 GPU; "):
        check_size(cluster({"CPU": 2} | BIG, {"CPU": 2} | BIG), Needs(2, 3, 0, 0))
    with pytest.raises(ConfigError, match=r"3 processes of 1 CPU and 1 GPU .* room is for 2"):
        check_size(cluster({"CPU": 8, "GPU": 2} | BIG), Needs(3, 1, 1, 0))


def test_hosts_that_are_gone_do_not_count() -> None:
    """Ray lists dead nodes too."""
    with pytest.raises(ConfigError, match="room is for 1"):
        check_size(cluster({"CPU": 1} | BIG, {"CPU": 1} | BIG, alive=False), Needs(2, 1, 0, 0))


def test_a_store_that_would_spill_is_refused() -> None:
    """What may be under way has to fit into the smallest host's store."""
    nodes = {"CPU": 4, "object_store_memory": 4e9}, {"CPU": 4, "object_store_memory": 1e9}
    check_size(cluster(*nodes), Needs(2, 1, 0, 10**9))
    with pytest.raises(ConfigError, match=r"has 0\.93 GiB .* up to 1\.86 GiB .* spill"):
        check_size(cluster(*nodes), Needs(2, 1, 0, 2 * 10**9))


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is needed only where it is asked for."""
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "ray":
            raise ImportError("no module")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with (
        pytest.raises(ConfigError, match=r"pip install 'paceline\[ray\]'"),
        ray_cluster(None, Needs(1, 1, 0, 0)),
    ):
        pass


def test_other_processes_do_not_see_this_ones_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are visible here, and only while they are started."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    import os

    with _other_gpus("cuda:1"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,7"
    with _other_gpus("cpu"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,7"
