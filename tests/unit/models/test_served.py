"""The client of a server that gives hidden states, against a fake one over HTTP: nothing wrong gets through."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import ConfigError, ServerError
from paceline.models import served
from paceline.models.served import CaptureError, ClientClosed, HiddenStatesClient, check_folder
from tests.fake_hidden_states import Act, FakeHiddenStates, running

LAYERS, SIZE = [2, 3, 5], 4


def states(ids: list[int]) -> Tensor:
    """Every value says of which token and layer it is."""
    token = torch.tensor(ids, dtype=torch.float32)[:, None, None]
    return token + torch.tensor([0.0, 0.1, 0.2])[None, :, None] + torch.zeros(1, 1, SIZE)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeHiddenStates]:
    with running(FakeHiddenStates(tmp_path, states)) as fake:
        yield fake


def client_of(server: FakeHiddenStates, **changes: Any) -> HiddenStatesClient:
    fields: dict[str, Any] = {"layers": LAYERS, "hidden_size": SIZE} | changes
    client = HiddenStatesClient(server.url, server.folder, **fields)
    client.connect()
    return client


def test_what_a_server_is_and_gives(server: FakeHiddenStates, tmp_path: Path) -> None:
    """Its model is found, a document's states come in the order of the layers, and no file stays behind."""
    server.models = [{"id": "adapter", "parent": "toy"}]  # one beside it, which is not asked for
    client = HiddenStatesClient(server.url + "/v1/", tmp_path, layers=LAYERS, hidden_size=SIZE)
    facts = client.connect()
    assert (facts.model, facts.root, facts.max_length, facts.version) == ("toy", "/models/toy", 512, "0.32.0")
    torch.testing.assert_close(client.capture([7, 8, 9]), states([7, 8, 9]), rtol=0, atol=0)
    assert server.requests == [[7, 8, 9]] and list(tmp_path.iterdir()) == []


def test_answers_in_any_order_reach_their_documents(server: FakeHiddenStates) -> None:
    """Twelve documents at once, answered and written in the opposite order: each gets its own states."""
    server.act = lambda ids, times: Act(delay_s=0.012 * (12 - ids[0]), write_s=0.002 * ids[0])
    client = client_of(server)
    documents = [[i] * (3 + i % 3) for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        for document, found in zip(documents, pool.map(client.capture, documents), strict=True):
            assert torch.equal(found, states(document))
    assert server.most_in_flight > 4


@pytest.mark.parametrize(
    ("act", "reason", "message"),
    [
        (Act(keep=6), "short", "hidden states of 6 tokens came for a document of 70"),
        (Act(tokens=list(range(1, 71))), "other tokens", "70 tokens are of other tokens"),
        (Act(change=lambda s: s.index_fill(0, torch.tensor([3]), float("nan"))), "not finite", "are not finite"),
        (Act(change=lambda s: s * float("inf")), "not finite", "are not finite"),
    ],
    ids=["short", "other tokens", "nan", "inf"],
)
def test_a_damaged_capture_is_told(server: FakeHiddenStates, act: Act, reason: str, message: str) -> None:
    """A short, foreign or broken file is an error with both lengths, and is removed all the same."""
    server.act = lambda ids, times: act
    with pytest.raises(CaptureError, match=message) as caught:
        client_of(server).capture(list(range(70)))
    assert (caught.value.reason, caught.value.wanted) == (reason, 70)
    assert caught.value.delivered == (6 if reason == "short" else 70)
    assert list(server.folder.iterdir()) == []


@pytest.mark.parametrize("locks", [True, False])
def test_a_file_that_is_not_there_yet_is_waited_for(server: FakeHiddenStates, locks: bool) -> None:
    """Whether the server holds a lock meanwhile or not."""
    server.act = lambda ids, times: Act(write_s=0.15, locks=locks)
    assert torch.equal(client_of(server).capture([5, 6]), states([5, 6]))


def test_a_half_written_file_is_not_read(server: FakeHiddenStates, tmp_path: Path) -> None:
    """Without locks the length that the file itself tells decides."""
    whole = tmp_path / "whole"
    with running(FakeHiddenStates(tmp_path, states)) as other:
        other.act = lambda ids, times: Act(locks=False)
        client = client_of(other)
        client._read = lambda file, ids: whole.write_bytes(file.read_bytes())  # type: ignore[assignment, method-assign]
        client.capture([5, 6])
    content = whole.read_bytes()
    server.act = lambda ids, times: Act(locks=False, writes=False)

    def write_slowly() -> None:
        while not server.requests:
            time.sleep(0.005)
        file = tmp_path / f"cmpl-1-0-{id(server):x}.safetensors"
        for end in (0, 5, 100, len(content) - 1, len(content)):
            file.write_bytes(content[:end])
            time.sleep(0.03)

    writer = threading.Thread(target=write_slowly)
    writer.start()
    try:
        assert torch.equal(client_of(server).capture([5, 6]), states([5, 6]))
    finally:
        writer.join()


def test_a_file_that_never_comes_is_an_error(server: FakeHiddenStates, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where the server has let go of its lock, else after a while, with the folder named."""
    server.act = lambda ids, times: Act(writes=False)
    with pytest.raises(ServerError, match=r"wrote no hidden states to /elsewhere/cmpl-1.*a full disk"):
        client_of(server).capture([1])
    monkeypatch.setattr(served, "FILE_TIMEOUT_S", 0.05)
    server.act = lambda ids, times: Act(writes=False, locks=False)
    with pytest.raises(ServerError, match=r"is not there .*\(target\.server_files\)"):
        client_of(server).capture([1])


def test_a_file_of_another_user_is_told(server: FakeHiddenStates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than waited for."""
    client = client_of(server)
    monkeypatch.setattr(served.os, "access", lambda file, mode: False)
    with pytest.raises(ConfigError, match="cannot be read: .* run it as the same user"):
        client.capture([1])


def test_fp8_is_scaled_back(server: FakeHiddenStates) -> None:
    """What hs-connectors writes in fp8 with a scale a token comes as bfloat16."""
    scales = torch.tensor([2.0, 0.5]).reshape(2, 1, 1)
    server.act = lambda ids, times: Act(
        change=lambda s: (s / scales).to(torch.float8_e4m3fn), tensors={"hidden_states_scales": scales}
    )
    found = client_of(server).capture([16, 32])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), states([16, 32]), rtol=0.07, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [2, 3]}, r"hidden states of 3 layers, 4 wide; 2 layers, 4 wide.*layer_ids\": \[2, 3\]"),
        ({"hidden_size": 8}, r"3 layers, 4 wide; 3 layers, 8 wide, were wanted"),
    ],
)
def test_other_layers_are_no_passing_fault(server: FakeHiddenStates, changes: dict[str, Any], message: str) -> None:
    """A server that was started with other layers is a mistake of the configuration."""
    with pytest.raises(ConfigError, match=message):
        client_of(server, **changes).capture([1, 2])


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (Act(answer={"kv_transfer_params": None}), ConfigError, "without a file of hidden states.*served-targets"),
        (Act(answer={"kv_transfer_params": {"handle": "k"}}), ConfigError, "without a file of hidden states"),
        (
            Act(answer={"kv_transfer_params": {"hidden_states_path": "/etc/passwd"}}),
            ServerError,
            "names a file.*passwd",
        ),
        (Act(answer={"kv_transfer_params": {"hidden_states_path": "/x/.safetensors"}}), ServerError, "names a file"),
        (Act(status=400, error="too long"), ConfigError, "refuses a document of 2 tokens: HTTP 400: too long"),
        (Act(status=401, error="no"), ConfigError, "HTTP 401: no; set OPENAI_API_KEY"),
        (Act(status=500, error="engine died"), ServerError, "HTTP 500: engine died"),
        (Act(raw=b"<html>\x1b[2J"), ConfigError, r"sent HTTP 200, <html>\\x1b\[2J"),
        (Act(drop=True), ServerError, "no answer from http"),
    ],
)
def test_other_answers_are_told(server: FakeHiddenStates, act: Act, kind: type[Exception], message: str) -> None:
    """What may pass is a ServerError, what will not a ConfigError."""
    server.act = lambda ids, times: act
    with pytest.raises(kind, match=message):
        client_of(server).capture([1, 2])


def test_only_files_of_the_folder_are_touched(server: FakeHiddenStates, tmp_path: Path) -> None:
    """A path that leads elsewhere is read from the folder by its name, and nothing elsewhere is removed."""
    outside = tmp_path.parent / "outside.safetensors"
    outside.write_bytes(b"mine")
    server.act = lambda ids, times: Act(
        answer={"kv_transfer_params": {"hidden_states_path": f"{tmp_path}/../{outside.name}"}}
    )
    client = client_of(server)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ServerError, match="is not there"):
        patch.setattr(served, "FILE_TIMEOUT_S", 0.02)
        client.capture([1])
    assert outside.read_bytes() == b"mine"


def test_no_single_model_is_refused(server: FakeHiddenStates) -> None:
    """A server of two models, and one that is gone."""
    server.models = [{"id": "other"}]
    with pytest.raises(ConfigError, match="serves 2 models"):
        client_of(server)
    for url, message in (
        ("localhost:8000", r"target\.server='localhost:8000' is no URL"),
        (
            "http://me:secret@localhost:8000",
            r"target\.server has a user or password in it: a key goes by OPENAI_API_KEY",
        ),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            HiddenStatesClient(url, server.folder, layers=LAYERS, hidden_size=SIZE)
        assert "secret" not in str(caught.value)


def test_a_server_that_is_gone_and_back(tmp_path: Path) -> None:
    """A connection that was kept is made anew; while nobody listens that is told."""
    with running(FakeHiddenStates(tmp_path, states)) as server:
        port = int(server.url.rpartition(":")[2])
        client = HiddenStatesClient(f"http://127.0.0.1:{port}", tmp_path, layers=LAYERS, hidden_size=SIZE)
        client.connect()
        client.capture([1])
    with pytest.raises(ServerError, match=rf"no answer from http://127\.0\.0\.1:{port}: ") as caught:
        client.capture([1])
    assert "secret" not in str(caught.value)
    with running(FakeHiddenStates(tmp_path, states), port):
        assert torch.equal(client.capture([1]), states([1]))
    with running(FakeHiddenStates(tmp_path, states), port):  # its connection is stale
        assert torch.equal(client.capture([2]), states([2]))


def test_a_key_is_sent(server: FakeHiddenStates, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment, where servers with --api-key want it."""
    monkeypatch.setenv("OPENAI_API_KEY", "k1")
    client_of(server).capture([1])
    assert server.headers[0]["Authorization"] == "Bearer k1"


@pytest.mark.parametrize("act", [Act(delay_s=20.0), Act(write_s=20.0)], ids=["answer", "file"])
def test_closing_breaks_off_what_is_under_way(server: FakeHiddenStates, act: Act) -> None:
    """A thread that waits for an answer or a file is free at once."""
    server.act = lambda ids, times: act
    client, ended = client_of(server), threading.Event()

    def ask() -> None:
        with pytest.raises(ClientClosed):
            client.capture([1])
        ended.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    while not server.requests:
        time.sleep(0.005)
    time.sleep(0.05)  # until it waits for one or the other
    client.close()
    assert ended.wait(10)
    with pytest.raises(ClientClosed):
        client.capture([1])


def test_whose_folder(tmp_path: Path) -> None:
    """Others must not write there, and that they can read is told."""
    folder = tmp_path / "files"
    with pytest.raises(ConfigError, match=r"target\.server_files=.*No such file.*mkdir -m 700"):
        check_folder(folder)
    folder.mkdir(mode=0o700)
    assert check_folder(folder) is None
    folder.chmod(0o755)
    assert "can be read by others (mode 755)" in str(check_folder(folder))
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match="others may write there"):
        check_folder(folder)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="a folder that files are read from"):
        check_folder(file)
    assert os.path.exists(file)
