"""The control socket: fixed verbs, and nobody who can keep others out or harm the process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.control import socket as control
from paceline.control.socket import MAX_REQUEST_BYTES, ControlError, ControlSocket, ask, serving
from paceline.errors import ConfigError

ROOT = Path(__file__).parents[3]


def fail(_request: dict[str, Any]) -> dict[str, Any]:
    raise ZeroDivisionError("by intent")


def refuse(_request: dict[str, Any]) -> dict[str, Any]:
    raise ConfigError("interval=-1 is below 0")


VERBS: dict[str, control.Verb] = {
    "echo": lambda request: {"heard": request},
    "fail": fail,
    "refuse": refuse,
    "unwritable": lambda request: {"answer": object()},
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    with serving(tmp_path / "control.sock", VERBS):
        yield tmp_path / "control.sock"


def send(place: Path, data: bytes, closes: bool = False) -> bytes:
    """What a client reads that sends just this; with `closes` it says that nothing more will come."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(str(place))
        client.sendall(data)
        if closes:
            client.shutdown(socket.SHUT_WR)
        answer = b""
        while data := client.recv(65_536):
            answer += data
        return answer


def test_a_verb_gets_its_arguments_and_answers(place: Path) -> None:
    """What a verb returns is the answer, whatever characters are in it."""
    assert ask(place, "echo", interval=10, name="\ud83d\x1b[31m\n") == {
        "heard": {"interval": 10, "name": "\ud83d\x1b[31m\n"}
    }


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (b"no json\n", "is no JSON"),
        (b"\xff\xfe\n", "is no JSON"),
        (b"[" * 50_000 + b"\n", "is no JSON"),
        (b"[]\n", "no JSON object"),
        (b"{}\n", "unknown verb None; there are: echo, fail, refuse, unwritable"),
        (b'{"verb": "__class__"}\n', "unknown verb '__class__'"),
        (b'{"verb": ["echo"]}\n', "unknown verb ['echo']"),
        (b'{"verb": "fail"}\n', "ZeroDivisionError: by intent"),
        (b'{"verb": "refuse"}\n', "interval=-1 is below 0"),
        (b'{"verb": "unwritable"}\n', "TypeError"),
        (b'{"verb": "echo", "x": "' + b"x" * MAX_REQUEST_BYTES + b'"}\n', "longer than 65536 bytes"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else "",
)
def test_a_bad_request_is_an_error_and_no_more(place: Path, request_: bytes, message: str) -> None:
    """Whatever is sent, the answer says what is wrong with it, and the next request is answered."""
    answer = json.loads(send(place, request_))
    assert answer["ok"] is False and message in answer["error"]
    assert ask(place, "echo") == {"heard": {}}


def test_half_a_line_is_no_request(place: Path) -> None:
    """A client that stops before the line's end is told so."""
    assert b"no whole line" in send(place, b'{"verb": "echo"', closes=True)
    assert send(place, b"", closes=True).endswith(b"\n")


def test_clients_that_say_nothing_keep_nobody_waiting(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds may be connected, silent or with half a line: others are answered, and they are sent away in the end."""
    monkeypatch.setattr(control, "REQUEST_S", 0.5)
    clients = [socket.socket(socket.AF_UNIX) for _ in range(control.MAX_CLIENTS + 20)]
    try:
        for i, client in enumerate(clients):
            client.connect(str(place))
            client.settimeout(20)
            client.sendall(b'{"verb"' * (i % 2))
        assert ask(place, "echo", x=1) == {"heard": {"x": 1}}
        for client in clients:
            assert b"no whole request within 0.5 s" in client.recv(1000)
            with contextlib.suppress(ConnectionResetError):  # what it had sent may not have been read
                assert client.recv(1000) == b""
    finally:
        for client in clients:
            client.close()
    assert ask(place, "echo") == {"heard": {}}


def test_a_verb_that_takes_long_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Others are answered meanwhile, up to a number at work, and it still gets its answer."""
    release, begun = threading.Event(), threading.Semaphore(0)

    def wait(_request: dict[str, Any]) -> dict[str, Any]:
        begun.release()
        release.wait(30)
        return {"waited": True}

    place, answers = tmp_path / "control.sock", []
    with serving(place, {"wait": wait, **VERBS}):
        threads = [
            threading.Thread(target=lambda: answers.append(ask(place, "wait", timeout_s=30)))
            for _ in range(control.MAX_AT_WORK)
        ]
        for thread in threads[1:]:
            thread.start()
        for _ in threads[1:]:
            assert begun.acquire(timeout=30)
        assert ask(place, "echo") == {"heard": {}}
        threads[0].start()
        assert begun.acquire(timeout=30)
        with pytest.raises(ControlError, match="16 requests are being worked on"):
            ask(place, "echo")
        with pytest.raises(ControlError, match="16 requests"):
            ask(place, "echo")
        release.set()
        for thread in threads:
            thread.join(30)
        assert answers == [{"waited": True}] * control.MAX_AT_WORK
        assert ask(place, "echo") == {"heard": {}}


def test_a_client_that_leaves_early_harms_nothing(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that asks and goes, or connects and goes, is forgotten."""
    for data in (b"", b'{"verb"', b'{"verb": "echo"}\n', b"x" * 200_000):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(place))
            client.setblocking(False)
            client.send(data)
    assert ask(place, "echo") == {"heard": {}}
    assert not caplog.records


def test_only_its_user_may_ask(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the user's alone, and a client of another user is refused even if it can connect."""
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    monkeypatch.setattr(control, "_is_ours", lambda connection: False)
    with pytest.raises(ControlError, match="belongs to another user"):
        ask(place, "echo")


def test_the_clients_user_is_the_kernels_word() -> None:
    """This process is this user's, and would not be another's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert control._is_ours(ours)


def test_the_file_goes_with_the_server(tmp_path: Path) -> None:
    """After it nothing is left, and asking says that nobody trains."""
    place = tmp_path / "control.sock"
    with serving(place, VERBS):
        assert place.exists()
    assert not place.exists()
    with pytest.raises(ControlError, match="no process trains here"):
        ask(place, "echo")


def test_a_file_that_took_its_place_is_left_alone(tmp_path: Path) -> None:
    """On leaving, the server removes its own file only."""
    place = tmp_path / "control.sock"
    with serving(place, VERBS):
        place.rename(tmp_path / "away")
        place.write_text("somebody else's")
    assert place.read_text() == "somebody else's"


@pytest.mark.parametrize("depth", [0, 4], ids=["short path", "path longer than an address"])
def test_the_socket_of_a_dead_process_is_replaced(tmp_path: Path, depth: int) -> None:
    """A killed process leaves its file; asking says so, and the next process takes the place."""
    place = tmp_path.joinpath(*["deep" * 10] * depth) / "control.sock"
    place.parent.mkdir(parents=True, exist_ok=True)
    program = (
        "import os, sys; from pathlib import Path; from paceline.control.socket import ControlSocket\n"
        "ControlSocket(Path(sys.argv[1]), {}).start(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(place)], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL and place.is_socket()
    with pytest.raises(ControlError, match="the process that made it has ended"):
        ask(place, "echo")
    with serving(place, VERBS):
        assert ask(place, "echo", here=True) == {"heard": {"here": True}}
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert not place.exists()


def test_the_socket_of_a_living_process_is_not_replaced(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A second server warns once and does without; the first goes on, and keeps its file."""
    with serving(place, {}):
        assert ask(place, "echo") == {"heard": {}}
    assert ask(place, "echo") == {"heard": {}}
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["there is no control socket"]


def test_where_none_can_be_made_there_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that is missing, or a file in the way, is no failure of the run; the file stays."""
    (tmp_path / "file").write_text("kept")
    for place in (tmp_path / "missing" / "control.sock", tmp_path / "file"):
        caplog.clear()
        with serving(place, VERBS):
            pass
        assert len(caplog.records) == 1 and str(place) in caplog.text
    assert (tmp_path / "file").read_text() == "kept"


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    """A process that hangs, leaves, or is none of ours is an error with the place in it."""
    place = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        server.listen()
        with pytest.raises(ControlError, match=r"did not answer within 0\.1 s"):
            ask(place, "echo", timeout_s=0.1)
        for answer, message in ((b"", "ended before it answered"), (b"HTTP/1.1 400\n", "no training process")):
            thread = threading.Thread(target=_answer_next, args=(server, answer))
            thread.start()
            with pytest.raises(ControlError, match=message):
                ask(place, "another", timeout_s=20)
            thread.join(20)


def _answer_next(server: socket.socket, answer: bytes) -> None:
    while True:
        client, _ = server.accept()
        with client:
            client.settimeout(20)
            if b"another" in client.recv(1000):
                client.sendall(answer)
                return


def test_a_request_that_is_too_long_is_not_sent(place: Path) -> None:
    """The client says so itself."""
    with pytest.raises(ControlError, match="65536 may be sent"):
        ask(place, "echo", x="x" * MAX_REQUEST_BYTES)


def test_a_server_that_was_never_started_leaves_nothing(tmp_path: Path) -> None:
    """Making one and stopping it is enough."""
    server = ControlSocket(tmp_path / "control.sock", VERBS)
    server.stop()
    assert os.listdir(tmp_path) == []


def test_where_no_thread_is_to_be_had_there_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on without a socket, whose file is gone and whose listener is closed."""
    made: list[ControlSocket] = []

    class Kept(ControlSocket):
        def start(self) -> None:
            made.append(self)
            super().start()

    def refuse_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(control, "ControlSocket", Kept)
    monkeypatch.setattr(threading.Thread, "start", refuse_thread)
    place = tmp_path / "control.sock"
    with serving(place, VERBS):
        assert not place.exists() and made[0]._listener.fileno() == -1
    [record] = caplog.records
    assert record.getMessage() == f"there is no control socket: {place} cannot be served: can't start new thread"


def test_a_forked_child_that_ends_leaves_the_socket_alone(tmp_path: Path) -> None:
    """It leaves at once, and who made the socket still answers there."""
    place = tmp_path / "control.sock"
    with contextlib.ExitStack() as stack:
        stack.enter_context(serving(place, VERBS))
        child = os.fork()
        if child == 0:
            try:
                begun = time.monotonic()
                stack.close()
                os._exit(time.monotonic() - begun > 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ask(place, "echo", x=1) == {"heard": {"x": 1}}
    assert not place.exists()
