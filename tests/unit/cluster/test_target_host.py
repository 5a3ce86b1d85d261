"""What a target's process answers, asked in this one."""

from __future__ import annotations

import threading
from typing import Any

import torch

from paceline.cluster.arrays import Arrays, Encoded, num_bytes, pack, pack_tokens, unpack, unpack_features
from paceline.cluster.ray_cluster import Needs, _places
from paceline.cluster.target_host import Made, TargetHost
from paceline.profiling import stages
from paceline.train.feature_cache import decode, encode
from paceline.train.target import load_target
from tests import tiny
from tests.toy import Toy


def test_a_target_in_parts_answers_several_calls_at_a_time(toy: Toy, tmp_path: Any) -> None:
    """Each with its own row's features, in memory of its own, from threads with the run's compute threads."""
    before = torch.get_num_threads()
    config = toy.config(
        tmp_path / "run", "topology.gpus_per_target=3", "target.layer_ids=[1,3]", "target.dtype=float32",
        "draft.dtype=float32", "target.packing=per_document",
    )  # fmt: skip
    host = TargetHost(config.model_dump(mode="json"), "target-0")
    loaded = host.load()
    assert loaded.problem is None and loaded.device == "cpu" and not loaded.packed
    whole = config.model_copy(update={"topology": config.topology.model_copy(update={"gpus_per_target": 1})})
    target = load_target(whole)
    assert loaded.fingerprint == target.fingerprint()
    rows = [tiny.row([20, 9], 32, seed=seed, number=seed) for seed in range(8)]
    wanted = [target.features(row).context_feature for row in rows]
    got: dict[int, tuple[Made, Arrays]] = {}
    threads_seen: set[int] = set()

    def ask(lane: int) -> None:
        for i in range(lane, len(rows), 4):
            got[i] = host.features(pack_tokens(rows[i]))
        threads_seen.add(torch.get_num_threads())

    threads = [threading.Thread(target=ask, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (made, arrays) in got.items():
        assert torch.equal(unpack(arrays.context_feature), wanted[i]) and arrays.last_hidden is None
        assert made.context_feature == ("float32", (32, 64)) and made.idle_s >= 0.0 < made.busy_s
    assert len(got) == 8 and threads_seen == {1}
    ids = torch.arange(1, 9)
    assert torch.equal(unpack(host.document(pack(ids))), target.document_features(ids))
    assert host._page is not None
    stages.close_run(host._page, host._page.path.parent)
    torch.set_num_threads(before)


def test_features_leave_in_fp8_where_that_is_asked_for(toy: Toy, tmp_path: Any) -> None:
    """Context feature and last hidden state as a cache would keep them; the first batch tells how far they are off."""
    config = toy.config(
        tmp_path / "run", "target.layer_ids=[1,3]", "target.dtype=float32", "draft.dtype=float32", "loss.kl=0.5",
        "pipeline.transport=fp8", "target.packing=per_document",
    )  # fmt: skip
    host = TargetHost(config.model_dump(mode="json"), "target-0")
    assert host.load().problem is None and host._page is not None
    stages.close_run(host._page, host._page.path.parent)
    row = tiny.row([20, 9], 32, seed=1, number=4)
    wanted = load_target(config).features(row)
    made, arrays = host.features(pack_tokens(row))
    for part, feature, states in ((arrays.context_feature, wanted.context_feature, 2),
                                  (arrays.last_hidden, wanted.last_hidden, 1)):  # fmt: skip
        assert isinstance(part, Encoded) and feature is not None
        values, scales = encode(feature, states, "fp8")
        found = unpack_features(part, torch.device("cpu"))
        assert torch.equal(found, decode(values, scales, states, torch.float32, states))
    assert made.context_feature == ("float32", (32, 64)) and made.last_hidden == ("float32", (32, 32))
    assert made.num_bytes == num_bytes(arrays) == 32 * 3 * (32 + 4)
    assert made.error is not None and 0.005 < made.error < 0.05
    assert host.features(pack_tokens(row))[0].error is None
    ids = torch.arange(1, 9)
    assert torch.equal(unpack(host.document(pack(ids))), host._target.document_features(ids))  # validation's: unrounded


def test_room_is_counted_by_hosts_for_targets_over_several_gpus() -> None:
    """A target lies on one host; drafters take one GPU each of what is left, whatever a target takes."""
    hosts = [{"CPU": 16.0, "GPU": 8.0}, {"CPU": 16.0, "GPU": 7.0}]

    def places(targets: int, gpus: int, drafters: int) -> int:
        return _places(hosts, Needs(targets + drafters, 1, gpus, 0, drafters))

    assert places(3, 4, 3) == 6 and places(3, 4, 4) == 6  # 15 - 12 GPUs are left
    assert places(4, 4, 0) == 3 and places(1, 8, 7) == 8 and places(2, 8, 7) == 8
    assert places(9, 1, 5) >= 14 and Needs(7, 1, 4, 0, 3).all_gpus == 19
    assert _places([{"CPU": 2.0, "GPU": 8.0}], Needs(3, 1, 4, 0, 1)) == 2
