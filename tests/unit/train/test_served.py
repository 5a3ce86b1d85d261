"""Rows of a target that a server runs: matched by request, left out where damaged, broken off at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cli.train import resolve_config
from paceline.errors import ConfigError, ModelError, ServerError
from paceline.models.target import Target
from paceline.pipeline.channel import ChannelClosed
from paceline.pipeline.coordinator import Coordinator
from paceline.pipeline.local import open_stream
from paceline.records import TokenBatch
from paceline.train import served
from paceline.train.served import ServedTarget, note_of
from paceline.train.target import load_head
from tests import tiny
from tests.fake_hidden_states import Act, FakeHiddenStates, running, states_of
from tests.toy import Toy

TAPS = (1, 2)
SIZE = 32


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(scope="module")
def model() -> Any:
    """The toy target, as an engine has it."""
    return tiny.causal_lm("llama")


def state_of(ids: list[int], row: float = 0.0) -> Tensor:
    """Every value says of which token it is."""
    return torch.tensor(ids, dtype=torch.float32)[:, None, None].expand(-1, len(TAPS), SIZE) + row


def row(number: int, *lengths: int, length: int = 160) -> TokenBatch:
    """Documents of these lengths; all tokens differ."""
    documents, start = [], 0
    for i, n in enumerate(lengths):
        ids = torch.arange(start, start + n)
        documents.append((10 * number + i, ids, torch.ones(n, dtype=torch.bool)))
        start += n
    return TokenBatch.pack(number, documents, length)


@contextmanager
def asked(
    toy: Toy, server: FakeHiddenStates, tmp_path: Path, read_batch: Any, *overrides: str, **options: Any
) -> Iterator[ServedTarget]:
    """A `ServedTarget` of the toy target, without its check."""
    config = toy.config(
        tmp_path / "run", f"target.server={server.url}", f"target.server_files={server.folder}", *overrides
    )
    resolved, _ = resolve_config(config)
    target = ServedTarget(resolved.config, load_head(resolved.config), read_batch, **options)
    try:
        target.connect()
        yield target
    finally:
        target.close()


def test_a_row_is_its_documents(toy: Toy, files: Path, tmp_path: Path) -> None:
    """Features of each document lie at its place, padding is zero, whatever comes first; all are asked for at once."""
    tokens = row(0, 40, 3, 24, 60)
    with running(FakeHiddenStates(files, state_of)) as server, asked(toy, server, tmp_path, lambda n: tokens) as target:
        server.act = lambda ids, times: Act(delay_s=0.3 if len(ids) == 40 else 0.05)
        batch = target.features(0)
        assert server.most_in_flight == 4
        assert target.counts() == {"documents": 4, "asked_again": 0, "left_out": []}
    assert batch.tokens is tokens and batch.last_hidden is None
    expected = torch.cat([torch.arange(127.0), torch.zeros(33)])
    assert torch.equal(batch.context_feature, expected[:, None].expand(-1, len(TAPS) * SIZE))
    assert list(files.iterdir()) == []


def test_no_more_requests_than_that_are_in_flight(toy: Toy, files: Path, tmp_path: Path) -> None:
    """A row of many short documents does not flood the server."""
    tokens = row(0, *[3] * 50)
    with running(FakeHiddenStates(files, state_of)) as server, asked(toy, server, tmp_path, lambda n: tokens) as target:
        server.act = lambda ids, times: Act(delay_s=0.05)
        assert torch.equal(target.features(0).context_feature[:150, 0], torch.arange(150.0))
        assert 1 < server.most_in_flight <= served.REQUESTS


def test_a_short_capture_is_dropped_and_counted(toy: Toy, files: Path, tmp_path: Path) -> None:
    """Of four documents that arrive in another order one is 64 tokens short, as after a cached prefix: it is asked for
    again, left out with both lengths, and the other three are trained on as they are."""
    lengths = {"s0": 42, "s1": 70, "s2": 43, "s3": 45}
    arrival = ["s2", "s0", "s3", "s1"]
    names = {n: name for name, n in lengths.items()}
    tokens, events = row(7, *lengths.values(), length=256), []

    def act(ids: list[int], times: int) -> Act:
        name = names[len(ids)]
        return Act(delay_s=0.05 * arrival.index(name), keep=6 if name == "s1" else None)

    with (
        running(FakeHiddenStates(files, state_of)) as server,
        asked(
            toy, server, tmp_path, lambda n: tokens, source_of=lambda r: f"chats.jsonl:{r}",
            event=lambda kind, **content: events.append((kind, content)),
        ) as target,
    ):  # fmt: skip
        server.act = act
        batch = target.features(7)
        assert server.requests.count(list(range(42, 112))) == 1 + served.ASK_AGAIN
        counts = target.counts()
    left_out = {"batch": 7, "row": 71, "source": "chats.jsonl:71", "reason": "short", "wanted": 70, "delivered": 6}
    assert counts == {"documents": 3, "asked_again": served.ASK_AGAIN, "left_out": [left_out]}
    assert events == [("document left out", left_out)]
    assert torch.equal(batch.tokens.loss_mask, tokens.loss_mask & (tokens.document_ids != 1))
    assert tokens.loss_mask[42:112].all()  # the row itself is as it was
    column = batch.context_feature[:, 0]
    assert torch.equal(column[42:112], torch.zeros(70))
    assert torch.equal(column[:42], torch.arange(42.0)) and torch.equal(column[112:200], torch.arange(112.0, 200.0))


def test_a_capture_that_is_whole_the_second_time_is_used(toy: Toy, files: Path, tmp_path: Path) -> None:
    """A fault that passes costs one more request."""
    tokens = row(0, 20, 30)
    with running(FakeHiddenStates(files, state_of)) as server, asked(toy, server, tmp_path, lambda n: tokens) as target:
        server.act = lambda ids, times: Act(tokens=[1] * 20) if len(ids) == 20 and times == 1 else Act()
        batch = target.features(0)
        assert target.counts() == {"documents": 2, "asked_again": 1, "left_out": []}
    assert batch.tokens is tokens


def test_many_damaged_captures_end_the_run(toy: Toy, files: Path, tmp_path: Path) -> None:
    """A few documents may be missed, not whatever share."""
    with (
        running(FakeHiddenStates(files, state_of)) as server,
        asked(toy, server, tmp_path, lambda n: row(n, 20, 30)) as target,
    ):
        server.act = lambda ids, times: Act(change=lambda s: s * float("nan"))
        with pytest.raises(ModelError, match=r"10 of 10 documents came damaged .* not finite .*served-targets\.md"):
            for number in range(10):
                target.features(number)
        assert number == 4 and served.FEW_LEFT_OUT == 8


def test_a_batch_that_is_made_again_is_counted_once(toy: Toy, files: Path, tmp_path: Path) -> None:
    """A document is left out of a batch, not so many times."""
    with (
        running(FakeHiddenStates(files, state_of)) as server,
        asked(toy, server, tmp_path, lambda n: row(n, 20, 30)) as target,
    ):
        server.act = lambda ids, times: Act(keep=1) if len(ids) == 20 else Act()
        for number in (3, 3, 4):
            target.features(number)
        assert [each["batch"] for each in target.counts()["left_out"]] == [3, 4]


def test_every_sample_is_its_own_through_the_channel(toy: Toy, files: Path, tmp_path: Path) -> None:
    """Through a queue of one batch, with files read and removed under it, features of batch i are all i."""
    count, lengths = 40, (5, 17, 64)

    def fill(ids: list[int]) -> Tensor:
        return torch.full((len(ids), len(TAPS), SIZE), float(ids[0]))

    def read(number: int) -> TokenBatch:
        n = lengths[number % 3]
        return TokenBatch.pack(number, [(number, torch.full((n,), number), torch.ones(n, dtype=torch.bool))], n)

    with running(FakeHiddenStates(files, fill)) as server, asked(toy, server, tmp_path, read) as target:
        server.act = lambda ids, times: Act(delay_s=0.001 * (ids[0] % 4), write_s=0.001 * (ids[0] % 3))
        options: dict[str, Any] = {"targets": 3, "threads": 1, "queue_depth": 1, "max_bytes": 1 << 20, "min_ready": 1}
        with open_stream(target.features, Coordinator(0, count), layout="split", **options) as stream:
            seen = 0
            for batch in stream:
                time.sleep(0.003 * (seen % 2))
                assert batch.tokens.number == seen and (batch.context_feature == seen).all()
                assert len(batch.context_feature) == lengths[seen % 3]
                seen += 1
    assert seen == count and list(files.iterdir()) == []


def test_a_stop_is_obeyed_during_a_request(toy: Toy, files: Path, tmp_path: Path) -> None:
    """Neither an answer nor a file is waited for."""
    stop = threading.Event()
    with ExitStack() as stack:
        server = stack.enter_context(running(FakeHiddenStates(files, state_of)))
        target = stack.enter_context(asked(toy, server, tmp_path, lambda n: row(n, 20, 30), should_stop=stop.is_set))
        server.act = lambda ids, times: Act(delay_s=30.0) if len(ids) == 20 else Act(write_s=30.0)
        threading.Timer(0.3, stop.set).start()
        started = time.monotonic()
        with pytest.raises(ChannelClosed):
            target.features(0)
        with pytest.raises(ChannelClosed):
            target.document_features(torch.arange(20))
        target.close()
        assert time.monotonic() - started < 15
        with pytest.raises(ChannelClosed):
            target.features(1)


class Clock:
    """Time that passes only by sleeping."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


def test_a_server_that_comes_back_is_asked_again(
    toy: Toy, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    """While it is gone a batch fails, each time later; once it is back it is made, unless it is another server."""
    clock = Clock()
    monkeypatch.setattr(served, "time", clock)
    with ExitStack() as stack:
        with running(FakeHiddenStates(files, states_of(model, [2, 3]))) as server:
            port = int(server.url.rpartition(":")[2])
            target = stack.enter_context(asked(toy, server, tmp_path, lambda n: row(n, 20, 30)))
            check(target, toy, tmp_path)
            expected = target.features(0).context_feature
        waits = []
        for _ in range(6):
            before = clock.now
            with pytest.raises(ServerError, match="no answer from"):
                target.features(1)
            waits.append(round(clock.now - before, 3))
        assert waits == [0.0, 5.0, 10.0, 20.0, 40.0, served.LONGEST_BACK_OFF_S]
        with running(FakeHiddenStates(files, states_of(model, [2, 3])), port):
            assert torch.equal(target.features(0).context_feature, expected)
            before = clock.now
            target.features(1)
            assert clock.now == before
        with pytest.raises(ServerError):
            target.features(1)
        with running(FakeHiddenStates(files, states_of(model, [3, 4])), port):
            with pytest.raises(ModelError, match="came back with other hidden states than before, .* off"):
                target.features(1)
        with pytest.raises(ServerError):
            target.features(1)
        with running(FakeHiddenStates(files, states_of(model, [2, 3])), port) as other:
            other.model = "another"
            with pytest.raises(ModelError, match="serves another model now than toy"):
                target.features(1)


def check(target: ServedTarget, toy: Toy, tmp_path: Path) -> dict[str, Any]:
    resolved, _ = resolve_config(toy.config(tmp_path / "run"))
    return target.check(resolved.dataset, resolved.longest_row)


@pytest.mark.parametrize("overrides", [(), ("loss.kl=0.5",)], ids=["taps", "with the last hidden state"])
def test_a_server_of_this_target_is_recognised(
    toy: Toy, files: Path, tmp_path: Path, model: Any, overrides: tuple[str, ...]
) -> None:
    """Documents of 37, 3 and 24 tokens and a longer one are those of the folder, and the record says how closely."""
    layers = [2, 3, 5] if overrides else [2, 3]
    with (
        running(FakeHiddenStates(files, states_of(model, layers))) as server,
        asked(toy, server, tmp_path, lambda n: row(n, 20), *overrides) as target,
    ):
        record = check(target, toy, tmp_path)
        assert sorted(map(len, server.requests))[0] == 3 and len(server.requests) == 4
        if overrides:  # the last hidden state is the one after the final norm
            local = Target.load(str(toy.target), layer_ids=TAPS, needs_last_hidden=True)
            found, wanted = target.features(0), local.features(row(0, 20))
            torch.testing.assert_close(found.last_hidden, wanted.last_hidden, rtol=0, atol=1e-6)
            assert torch.equal(found.context_feature, wanted.context_feature)
    names = ["layer 1", "layer 2"] + ["last hidden state"] * bool(overrides)
    assert list(record["errors"]) == names and max(record["errors"].values()) < 1e-5
    assert {"model": "toy", "version": "0.32.0", "checked": "all"}.items() <= record.items()
    assert record["lengths"][1:3] == [3, 24]
    assert note_of(record).startswith("features come from toy at http://127.0.0.1:")
    assert "(vLLM 0.32.0); on 4 documents they are those of the folder here: the largest relative" in note_of(record)


@pytest.mark.parametrize(
    ("layers", "seed", "overrides", "kind", "message"),
    [
        ([1, 2], 0, (), ConfigError, r'gives for layer 1 is the output of layer 0 of .*layer_ids": \[2, 3\]'),
        ([3, 4], 0, (), ConfigError, r"gives for layer 1 is the output of layer 2 of "),
        ([2, 4], 0, (), ConfigError, r"gives for layer 2 is the output of layer 3 of "),
        (
            [2, 3],
            1,
            (),
            ModelError,
            r"gives for layer 1 is [0-9.]+ off that layer of .*0\.001 is allowed.*another model",
        ),
        ([2, 3], 1, ("target.server_check=first",), ModelError, r"gives for layer 1 is [0-9.]+ off"),
        ([2, 3, 4], 0, ("loss.l1=1",), ModelError, r"the last hidden state of .* has to be \[2, 3, 5\]"),
    ],
    ids=["one before", "one behind", "second behind", "other weights", "other weights, first", "last"],
)
def test_another_server_is_refused(
    toy: Toy, files: Path, tmp_path: Path, layers: list[int], seed: int, overrides: Any, kind: Any, message: str
) -> None:
    """Layers off by one are named, in either direction and for one tap alone; so is another model."""
    with (
        running(FakeHiddenStates(files, states_of(tiny.causal_lm("llama", seed), layers))) as server,
        asked(toy, server, tmp_path, lambda n: row(n, 20), *overrides) as target,
        pytest.raises(kind, match=message),
    ):
        check(target, toy, tmp_path)


def test_wrong_tokens_and_short_captures_are_seen_at_the_start(toy: Toy, files: Path, tmp_path: Path) -> None:
    """Before anything is trained, and not as another layer."""
    with (
        running(FakeHiddenStates(files, state_of)) as server,
        asked(toy, server, tmp_path, lambda n: row(n, 20)) as target,
    ):
        server.act = lambda ids, times: Act(tokens=[t + 1 for t in ids])
        with pytest.raises(ServerError, match="are of other tokens"):
            check(target, toy, tmp_path)
        server.act = lambda ids, times: Act(keep=2)
        with pytest.raises(ServerError, match="hidden states of 2 tokens came for a document of 37"):
            check(target, toy, tmp_path)


def test_less_can_be_checked(
    toy: Toy, files: Path, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`first` loads the layers up to the first tap, `none` none; prompts are asked for all the same."""
    loaded: list[int] = []
    load = Target.load

    def seen(*args: Any, **kwargs: Any) -> Target:
        target = load(*args, **kwargs)
        loaded.append(len(target._trunk.layers))
        return target

    monkeypatch.setattr(Target, "load", seen)
    with running(FakeHiddenStates(files, states_of(model, [2, 4]))) as server:  # the second one is wrong
        with asked(toy, server, tmp_path, lambda n: row(n, 20), "target.server_check=first") as target:
            record = check(target, toy, tmp_path)
            assert list(record["errors"]) == ["layer 1"] and loaded == [1, 3]
            assert "its first tap is that of the folder here" in note_of(record)
        with asked(toy, server, tmp_path, lambda n: row(n, 20), "target.server_check=none") as target:
            assert "errors" not in (record := check(target, toy, tmp_path)) and loaded == [1, 3, 1]
            assert note_of(record).endswith("not compared with the folder here, as target.server_check says")


def test_a_server_with_too_little_room_is_refused(toy: Toy, files: Path, tmp_path: Path) -> None:
    """The token that is asked for needs a place too."""
    with running(FakeHiddenStates(files, state_of)) as server:
        server.max_model_len = 100
        with asked(toy, server, tmp_path, lambda n: row(n, 20)) as target:
            resolved, _ = resolve_config(toy.config(tmp_path / "run"))
            with pytest.raises(
                ConfigError, match=r"takes 100 tokens, and the longest row has 100.*--max-model-len 101"
            ):
                target.check(resolved.dataset, 100)


def test_the_fingerprint_tells_servers_from_folders(toy: Toy, files: Path, tmp_path: Path) -> None:
    """Another model there is another target, another address is not."""
    with running(FakeHiddenStates(files, state_of)) as server, running(FakeHiddenStates(files, state_of)) as moved:
        with asked(toy, server, tmp_path, row) as one, asked(toy, moved, tmp_path, row) as other:
            assert one.fingerprint() == other.fingerprint() != Target.load(str(toy.target)).fingerprint()
        moved.model = "another"
        with asked(toy, moved, tmp_path, row) as other:
            assert other.fingerprint() != one.fingerprint()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("target.server_files=null",), "target.server without target.server_files"),
        (("target.packing=packed",), "target.packing=packed with target.server"),
        (("topology.layout=colocated",), "topology.layout=colocated with target.server"),
        (("topology.executor=ray",), "topology.executor=ray with target.server"),
    ],
)
def test_what_a_server_cannot_be_told(toy: Toy, tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    """Keys that would have no effect are refused before anybody is asked."""
    served_by = ("target.server=http://127.0.0.1:1", f"target.server_files={tmp_path}")
    with pytest.raises(ConfigError, match=message):
        resolve_config(toy.config(tmp_path / "run", *served_by, *overrides))
