"""Targets in other processes, with threads in their place: who is asked, and what happens when one dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.cluster.arrays import Arrays, AwayBatch, Encoded, pack, unpack_tokens
from paceline.cluster.target_host import Loaded, Made
from paceline.cluster.targets import RemoteTargets
from paceline.config import RunConfig, load_config
from paceline.errors import GroupLost, ModelError, PipelineError
from paceline.pipeline.channel import ChannelClosed
from paceline.pipeline.coordinator import Coordinator
from paceline.pipeline.local import open_stream
from paceline.records import TokenBatch
from paceline.train.feature_cache import encode
from tests.unit.cluster.fake_ray import Actor, FakeRay


def row(number: int) -> TokenBatch:
    return TokenBatch.pack(number, [(number, torch.arange(4), torch.ones(4, dtype=torch.int64))], 6)


class Host:
    """A target that says the batch's number; the events let a test hold it up or break it."""

    def __init__(self, actor: int, _tree: dict[str, Any], role: str) -> None:
        self.actor, self.role = actor, role

    def load(self) -> Loaded:
        return Loaded(self.actor, "there", paceline.__version__, fingerprint="same", head="head", packed=True)

    def features(self, fields: dict[str, Any]) -> tuple[Made, Arrays]:
        tokens = unpack_tokens(fields)
        arrays = Arrays(pack(torch.full((len(tokens.input_ids), 2), float(tokens.number))), None)
        return Made.of(arrays, busy_s=0.5, idle_s=0.25), arrays

    def document(self, input_ids: Any) -> Any:
        return input_ids


def config(*overrides: str, targets: int = 2, restarts: int = 1) -> RunConfig:
    return load_config(
        None,
        ["target.path=t", "data.path=d", "topology.executor=ray", "topology.threads=1", "run.device=cpu",
         f"topology.targets={targets}", f"run.max_restarts={restarts}", *overrides],
    )  # fmt: skip


class Setting:
    """Remote targets over fake processes, with their events."""

    def __init__(self, host: type[Host] = Host, **options: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.stop = threading.Event()
        self.ray = FakeRay(host)
        self.targets = RemoteTargets(
            self.ray,
            config(**options),
            row,
            torch.device("cpu"),
            event=lambda kind, **content: self.events.append((kind, content)),
            should_stop=self.stop.is_set,
        )

    def train(self, num_batches: int, at: Any = lambda number: None) -> Coordinator:
        """Take all batches as a drafter does."""
        coordinator = Coordinator(0, num_batches)
        with open_stream(
            self.targets.make, coordinator, layout="split", targets=2, threads=1, queue_depth=3, max_bytes=10**6,
            min_ready=1, max_retries=2, elsewhere=self.targets,
        ) as stream:  # fmt: skip
            for expected, batch in enumerate(stream):
                assert batch.tokens.number == expected
                assert batch.context_feature.tolist() == [[float(expected)] * 2] * 6
                coordinator.trained([expected])
                at(expected)
        return coordinator


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("paceline.cluster.targets.LOOK_S", 0.01)
    monkeypatch.setattr("paceline.pipeline.local.RETRY_S", 0.001)
    yield


def test_batches_come_in_order_from_all_processes() -> None:
    """Every role's process is asked, the ledger is even, and idle times are summed once."""
    setting = Setting()
    assert setting.targets.start("head").packed
    ledger = setting.train(40).ledger()
    assert (ledger.issued, ledger.trained, ledger.retried) == (40, 40, 0)
    assert all("features" in actor.calls for actor in setting.ray.actors)
    assert setting.targets.take_idle() <= 10.0 and setting.targets.take_idle() == 0.0
    assert setting.targets.num_bytes == 40 * 6 * 2 * 4
    assert setting.targets.roles()["target-1"] == {"pid": 1, "host": "there", "device": ""}


def test_a_process_that_dies_is_started_again_and_nothing_is_lost() -> None:
    """Batches that it had are made again, in their order; it is told of, and counted."""
    setting = Setting()
    setting.targets.start("head")

    def kill(number: int) -> None:
        if number == 5:
            setting.ray.actors[1].kill()

    ledger = setting.train(60, kill).ledger()
    assert (ledger.issued, ledger.trained, ledger.in_flight) == (60, 60, 0)
    assert ledger.retried >= 1
    assert [kind for kind, _ in setting.events] == ["target was lost", "target is back"]
    assert setting.events[0][1]["role"] == "target-1" and setting.events[0][1]["restarts"] == 1
    assert len(setting.ray.actors) == 3


def test_one_that_dies_too_often_is_given_up_and_the_others_go_on() -> None:
    """After `run.max_restarts` the run goes on with what is left."""
    setting = Setting()
    setting.targets.start("head")

    def kill(number: int) -> None:
        if number >= 5 and len(setting.ray.actors) < 4:
            next(a for a in reversed(setting.ray.actors) if a is not setting.ray.actors[0]).kill()
            time.sleep(0.05)

    ledger = setting.train(60, kill).ledger()
    assert ledger.trained == 60
    kinds = [kind for kind, _ in setting.events]
    assert kinds.count("target was lost") == 1 and kinds[-1] == "target is given up"
    assert setting.events[-1][1]["left"] == 1


def test_where_none_is_left_the_run_ends_and_says_why() -> None:
    """The error names every role and what became of it."""
    setting = Setting(restarts=0)
    setting.targets.start("head")

    def kill(number: int) -> None:
        if number == 3:
            for actor in setting.ray.actors:
                actor.kill()

    with pytest.raises(PipelineError, match=r"no target is left: target-0: .*target-1: .*max_restarts=0"):
        setting.train(60, kill)


def test_a_stop_ends_the_wait_for_a_process() -> None:
    """While nobody can make the next batch, a stop ends the stream quietly."""

    class NeverBack(Host):
        def load(self) -> Loaded:
            if self.actor >= 2:
                time.sleep(0.5)
            return super().load()

    setting = Setting(NeverBack)
    setting.targets.start("head")
    for actor in setting.ray.actors:
        actor.kill()
    with pytest.raises(PipelineError, match="was lost"):
        setting.targets.make(0, "target-0")
    with pytest.raises(PipelineError, match="was lost"):
        setting.targets.make(0, "target-1")
    setting.stop.set()
    with pytest.raises(ChannelClosed):
        setting.targets.make(0)


def test_what_fails_in_the_target_comes_out_as_it_was() -> None:
    """An error of the target is no death of its process."""

    class Failing(Host):
        def features(self, fields: dict[str, Any]) -> tuple[Made, Arrays]:
            raise ZeroDivisionError("of the target")

    setting = Setting(Failing)
    setting.targets.start("head")
    with pytest.raises(ZeroDivisionError, match="of the target"):
        setting.targets.make(3)
    assert not setting.events


def test_a_process_that_has_lost_its_device_is_started_again() -> None:
    """After a CUDA error every call of the process would fail."""

    class Broken(Host):
        def features(self, fields: dict[str, Any]) -> tuple[Made, Arrays]:
            if self.actor == 0:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
            return super().features(fields)

    setting = Setting(Broken)
    setting.targets.start("head")
    assert setting.train(20).ledger().trained == 20
    assert setting.events[0] == (
        "target was lost",
        {"role": "target-0", "reason": "CUDA error: an illegal memory access was encountered", "restarts": 1},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problem": "ModelError: no weights"}, "target-1 on there: ModelError: no weights"),
        ({"version": "0.0.1"}, "has Paceline 0.0.1"),
        ({"fingerprint": "other"}, "has other weights behind t than there"),
        ({"head": "other"}, "has other weights behind t than this host"),
    ],
)
def test_a_target_that_does_not_go_with_the_others_is_refused(changes: dict[str, Any], message: str) -> None:
    """At the start that ends the run; one that comes back so is given up."""
    import dataclasses

    class Foreign(Host):
        def load(self) -> Loaded:
            loaded = super().load()
            return dataclasses.replace(loaded, **changes) if self.actor == self.foreign else loaded

        foreign = 1

    with pytest.raises(ModelError, match=message):
        Setting(Foreign).targets.start("head")
    Foreign.foreign = 2
    setting = Setting(Foreign)
    setting.targets.start("head")
    setting.ray.actors[1].kill()
    assert setting.train(30).ledger().trained == 30
    assert setting.events[-1][0] == "target is given up"


def test_what_is_for_another_rank_does_not_come_here() -> None:
    """Its batch has shapes and a reference, and passes the same queue."""
    setting = Setting()
    setting.targets._rank_of = lambda number: number % 2
    setting.targets.start("head")
    mine, theirs = setting.targets.make(4), setting.targets.make(5)
    assert mine.context_feature.tolist() == [[4.0, 4.0]] * 6
    assert isinstance(theirs, AwayBatch) and theirs.rank == 1 and theirs.context_feature.device.type == "meta"
    assert theirs.num_bytes == mine.num_bytes and theirs.tokens.number == 5
    assert setting.ray.get(theirs.reference).context_feature.shape == (6, 2)


def test_features_that_come_in_fp8_are_decoded_here() -> None:
    """The drafter sees the target's type; what travels and waits elsewhere is counted as encoded."""

    class Rounding(Host):
        def features(self, fields: dict[str, Any]) -> tuple[Made, Arrays]:
            tokens = unpack_tokens(fields)
            feature = torch.full((len(tokens.input_ids), 2), float(tokens.number), dtype=torch.bfloat16)
            values, scales = encode(feature, 1, "fp8")
            assert scales is not None
            arrays = Arrays(Encoded(pack(values), pack(scales), "bfloat16"), None)
            return Made.of(arrays, busy_s=0.5, idle_s=0.25, error=0.03 if tokens.number == 4 else None), arrays

    setting = Setting(Rounding)
    setting.targets._rank_of = lambda number: number % 2
    setting.targets.start("head")
    mine, theirs = setting.targets.make(4), setting.targets.make(5)
    assert mine.context_feature.dtype == theirs.context_feature.dtype == torch.bfloat16
    assert mine.context_feature.tolist() == [[4.0, 4.0]] * 6
    assert setting.targets.num_bytes == 6 * (2 + 4) and setting.targets.transport()["relative_error"] == 0.03
    assert mine.num_bytes - theirs.num_bytes == 6 * (4 - 6)


def test_documents_are_asked_of_any_process() -> None:
    """Validation's rows go the same way."""
    setting = Setting()
    setting.targets.start("head")
    assert setting.targets.document_features(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_closing_ends_the_processes_and_the_calls() -> None:
    """A thread that waits for one is told that it is over, and nothing is started again."""

    class Slow(Host):
        def features(self, fields: dict[str, Any]) -> tuple[Made, Arrays]:
            time.sleep(0.3)
            return super().features(fields)

    setting = Setting(Slow)
    setting.targets.start("head")
    ended = list[type]()

    def ask() -> None:
        try:
            setting.targets.make(0, "target-0")
        except BaseException as error:
            ended.append(type(error))

    lane = threading.Thread(target=ask)
    lane.start()
    time.sleep(0.1)
    setting.targets.close()
    lane.join(5.0)
    assert ended == [ChannelClosed] and not setting.events and len(setting.ray.actors) == 2
    assert all(actor._dead.is_set() for actor in setting.ray.actors)
    with pytest.raises(ChannelClosed):
        setting.targets.make(1)


def test_of_processes_that_died_idle_no_batch_is_to_blame() -> None:
    """However many are gone, a batch is made by the one that is left."""
    setting = Setting(targets=5, restarts=0)
    setting.targets.start("head")
    for actor in setting.ray.actors[:4]:
        actor.kill()
    with pytest.raises(PipelineError, match="target-0 was lost"):
        setting.targets.make(3, "target-0")
    assert setting.targets.make(3, "target-0").tokens.number == 3  # it asked three dead ones on the way
    assert [content["left"] for kind, content in setting.events if kind == "target is given up"] == [4, 3, 2, 1]


def test_a_batch_that_kills_every_process_ends_the_run() -> None:
    """Its number is in the error, and not every restart of every process was spent on it."""

    class Killed(Host):
        def features(self, fields: dict[str, Any]) -> tuple[Made, Arrays]:
            if unpack_tokens(fields).number == 4:
                setting.ray.actors[self.actor].kill()
            return super().features(fields)

    setting = Setting(Killed, restarts=50)
    setting.targets.start("head")
    with pytest.raises(PipelineError) as caught:
        setting.train(30)
    assert caught.value.batch == 4 and len(setting.ray.actors) < 20


def test_a_document_is_asked_for_again() -> None:
    """A target that dies over a row of validation costs nothing."""
    setting = Setting()
    setting.targets.start("head")
    setting.ray.actors[0].kill()
    assert setting.targets.document_features(torch.arange(3)).tolist() == [0, 1, 2]
    assert setting.events[0][0] == "target was lost"


def test_actors_get_what_was_configured() -> None:
    """Threads as processors, a GPU where there are GPUs, and no restarts by Ray, which nobody would count."""
    setting = Setting()
    setting.targets.start("head")
    assert setting.ray.options[0]["num_cpus"] == 1 and setting.ray.options[0]["num_gpus"] == 0
    assert setting.ray.options[0]["max_restarts"] == 0
    assert isinstance(setting.ray.actors[0], Actor) and Path("t").name == "t"


@pytest.mark.parametrize(("drafters", "kind"), [(1, PipelineError), (2, GroupLost)])
def test_a_process_that_dies_while_it_loads_ends_the_start(drafters: int, kind: type[Exception]) -> None:
    """Of a group it is the group's loss: that may have started again before Ray knew that a host is gone."""
    started: list[Host] = []

    class Slow(Host):
        def load(self) -> Loaded:
            started.append(self)
            setting.ray.actors[self.actor].kill()
            return super().load()

    setting = Setting(Slow)
    setting.targets._config = config(f"topology.drafters={drafters}")
    with pytest.raises(PipelineError, match="target-0 could not be started") as caught:
        setting.targets.start("head")
    assert type(caught.value) is kind and started
