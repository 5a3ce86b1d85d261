"""`paceline report`: what it reads, writes, serves and refuses."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import main
from paceline.cli.report import Reading, checkpoints_of, name_of
from paceline.config import RunConfig, dump_config
from paceline.control.run_folder import RunFolder
from paceline.errors import PacelineError
from paceline.report import live
from paceline.report.live import SCRIPT, Board, LiveServer, listen
from paceline.report.page import Html
from paceline.report.run import run_page, run_parts
from tests.unit.report.reader import check


def command(*arguments: object) -> tuple[int, str]:
    """Exit code and what is printed, of the command in this process."""
    result = CliRunner().invoke(main.app, ["report", *(str(argument) for argument in arguments)])
    if isinstance(result.exception, PacelineError):
        return 1, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def write_run(path: Path, *events: tuple[str, int], steps: int = 30, rest: str = '{"step": 99, "tok') -> RunFolder:
    """A run folder as a process leaves it that ended in the middle of a line."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(
        dump_config(RunConfig.model_validate({"target": {"path": "T"}, "data": {"path": "D"}}))
    )
    lines = [{"time": 1.7e9 + i, "event": kind, "step": step} for i, (kind, step) in enumerate(events)]
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = [
        {"step": i + 1, "loss": 2.0, "acceptance_length_est": 1.5, "tokens": 100, "seconds": 0.5, "put_wait_s": 0.1,
         "get_wait_s": 0.0, "ready_wait_s": 0.0, "batches": 1, "queue": 1}
        for i in range(steps)
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics) + rest)
    (path / "run.json").write_text(json.dumps({"host": platform.node(), "pid": 1}))
    return RunFolder(path)


def shown(run: RunFolder) -> str:
    return check(run_page("a", run_parts(Reading(run).view()))).text()


def test_a_page_is_written_into_the_run_or_where_it_is_wanted(tmp_path: Path) -> None:
    """Its place is printed; a finished run is shown as such."""
    run = write_run(tmp_path / "run", ("started", 0), ("finished", 30))
    assert command(run.path) == (0, f"{run.path / 'report.html'}\n")
    page = (run.path / "report.html").read_text(encoding="utf-8")
    text = check(page).text()
    assert "The last process finished at step 30, " in text and "Run run" in text
    assert "200" in text and "2.000" in text
    other = tmp_path / "other.html"
    assert command(run.path, "--html", other)[0] == 0
    assert other.read_text(encoding="utf-8") == page


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "80"], "--port 80 is for --serve"),
        (["--serve", "--html", "x.html"], "--html writes a file, and --serve writes none"),
        (["--html", "."], "is a folder"),
        (["--html", "/nowhere/at/all.html"], "cannot be written"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: list[str], said: str) -> None:
    """With what to do instead, before anything is written."""
    run = write_run(tmp_path / "run")
    code, text = command(run.path, *options)
    assert code == 1 and said in text
    assert not (run.path / "report.html").exists()


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    """A folder without a run, and none."""
    assert "is no run folder" in command(tmp_path)[1]
    assert "is no folder" in command(tmp_path / "none")[1]


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    """And that there is a way without choosing one."""
    run = write_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as other:
        code, text = command(run.path, "--serve", "--port", other.getsockname()[1])
    assert code == 1 and "without --port a free one is taken" in text


def test_any_state_of_a_run_has_a_page(tmp_path: Path) -> None:
    """Without steps, without files, died, of another host, with files that are damaged."""
    assert "Nothing has been trained here yet." in shown(write_run(tmp_path / "a", steps=0, rest=""))
    assert "It was killed, or died without a word." in shown(write_run(tmp_path / "b", ("started", 0)))
    run = write_run(tmp_path / "c", ("started", 0))
    (run.path / "run.json").write_text(
        json.dumps({"host": "far", "roles": {"target-0": {"host": "farther", "pid": 3}}})
    )
    assert "was started on far" in shown(run) and "farther" in shown(run)
    for name in ("metrics.jsonl", "events.jsonl", "run.json", "config.yaml"):
        (run.path / name).write_bytes(b"\xff{]")
    assert "Nothing has been trained here yet." in shown(run)
    (run.path / "events.jsonl").write_text('{"event": "failed", "time": "soon", "step": 1}\n')
    assert "a file of the run is damaged: ValueError" in shown(run)
    for name in ("metrics.jsonl", "events.jsonl", "run.json"):
        (run.path / name).unlink()
    assert "Nothing has been trained here yet." in shown(run)


def test_checkpoints_are_those_that_are_complete(tmp_path: Path) -> None:
    """In order, with their size and the links to them; one that is being written is none."""
    run = write_run(tmp_path / "run")
    for name, size in (("step-00000020", 5), ("step-00000003", 7), (".step-00000030.partial-1", 9), ("step-x", 1)):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "model").write_bytes(b"x" * size)
    (run.checkpoints / "latest").symlink_to("step-00000020")
    found = checkpoints_of(run)
    assert [(each["step"], each["bytes"], each.get("is_latest"), each.get("is_best")) for each in found] == [
        (3, 7, False, None),
        (20, 5, True, None),
    ]


def test_an_evaluation_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is looked at; one that is damaged is none."""
    run = write_run(tmp_path / "run", ("started", 0))
    folder = run.path / "evaluations"
    folder.mkdir()
    (folder / "step-00000020.json").write_text('{"step": 20, "acceptance_length": 2.5, "mismatches": 0, "texts": []}')
    (folder / "step-00000030.json").write_text('{"step": 30, "acc')
    reading = Reading(run)
    assert reading.view().evaluations == [{"step": 20, "acceptance_length": 2.5, "mismatches": 0}]
    monkeypatch.setattr("paceline.cli.report._evaluation", lambda _path: pytest.fail("read again"))
    assert len(reading.view().evaluations) == 1


def test_nothing_is_read_while_nothing_has_changed(tmp_path: Path) -> None:
    """A look at a run that is over is a few stats; a file that changes is a reason to read."""
    run = write_run(tmp_path / "run", ("started", 0), ("finished", 30), rest="")
    reading = Reading(run)
    first = reading.look()
    assert first is not None and reading.look() is None
    with open(run.metrics_file, "a") as file:
        file.write(json.dumps({"step": 31, "loss": 100.0, "tokens": 1, "seconds": 1.0}) + "\n")
    second = reading.look()
    assert second is not None and second["now"] != first["now"] and second["events"] == first["events"]
    assert name_of(run) == "run"


# Served


class Looks:
    """Counts looks; `parts` is what the next one finds."""

    def __init__(self) -> None:
        self.parts: dict[str, str] | Exception | None = {"now": "one", "rest": "same"}
        self.count = 0

    def __call__(self) -> dict[str, Html] | None:
        self.count += 1
        if isinstance(self.parts, Exception):
            raise self.parts
        return None if self.parts is None else {name: Html(text) for name, text in self.parts.items()}


@pytest.fixture
def looks() -> Looks:
    return Looks()


@pytest.fixture
def server(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr(live, "EVERY_S", 0.05)
    monkeypatch.setattr(live, "ALIVE_S", 0.2)
    board = Board(looks, lambda parts, version: f"{version} {sorted(parts.items())}")
    server = listen(board, 0)
    threads = [threading.Thread(target=board.watch), threading.Thread(target=server.serve_forever, args=(0.02,))]
    for thread in threads:
        thread.start()
    yield server
    board.close()
    server.shutdown()
    server.server_close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def ask(server: LiveServer, method: str, path: str, **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    with contextlib.closing(connection):
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers


@contextlib.contextmanager
def stream(server: LiveServer, since: str = "") -> Iterator[Callable[[], tuple[str, dict[str, str]]]]:
    """An open event stream; each call waits for the next update: its id and its parts."""
    reader = socket.create_connection(("127.0.0.1", server.server_port), timeout=20)
    with reader, reader.makefile("r", encoding="utf-8") as lines:
        reader.sendall(f"GET /events?since={since} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

        def update() -> tuple[str, dict[str, str]]:
            while not (line := lines.readline()).startswith("id: "):
                assert line, "the stream has ended"
            return line[4:].strip(), json.loads(lines.readline().removeprefix("data: "))

        yield update


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def test_only_the_loopback_device_is_listened_on(server: LiveServer) -> None:
    """The address is loopback, and so is the one that is told."""
    assert server.socket.getsockname()[0] == "127.0.0.1" and live.ADDRESS == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:9000", "127.0.0.1:80", "[::1]", "[::1]:7"])
def test_loopback_names_are_served(server: LiveServer, host: str) -> None:
    """With any port, as a forwarded one has another."""
    code, text, headers = ask(server, "GET", "/", Host=host)
    assert code == 200 and "one" in text and headers["Cache-Control"] == "no-store"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "frame-ancestors 'none'" in policy and "sha256-" in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost.evil.example:80"},
        {"Host": "localhost@evil.example"},
        {"Host": ""},
        {"Host": "[::1].evil.example"},
        {"Host": "0.0.0.0"},
        {"Host": "localhost", "Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "cors"},
        {"Host": "localhost", "Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "no-cors"},
    ],
)
def test_other_names_and_other_sites_are_refused(server: LiveServer, looks: Looks, headers: dict[str, str]) -> None:
    """A name that a foreign server made point here reads nothing, nor does a page of another site."""
    for path in ("/", "/events"):
        code, text, _ = ask(server, "GET", path, **headers)
        assert code == 403 and "one" not in text
    assert looks.count == 0


def test_without_a_host_nothing_is_served(server: LiveServer) -> None:
    """As HTTP/1.0 allows."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as reader:
        reader.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b" 403 " in reader.makefile("rb").readline()


def test_a_link_from_another_site_opens_the_page(server: LiveServer) -> None:
    """That is a navigation: the other site does not see what is shown."""
    headers = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert ask(server, "GET", "/", Host="localhost", **headers)[0] == 200


@pytest.mark.parametrize("path", ["/metrics.jsonl", "/../config.yaml", "/events/", "/%2e%2e/", "/index.html"])
def test_nothing_else_is_there(server: LiveServer, path: str) -> None:
    """No file, no listing."""
    assert ask(server, "GET", path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_only_reading_is_answered(server: LiveServer, method: str) -> None:
    """There is nothing to change."""
    assert ask(server, method, "/")[0] == 501


def test_head_has_no_body(server: LiveServer) -> None:
    """But the length that it would have; of the stream, the kind."""
    code, text, headers = ask(server, "HEAD", "/")
    assert (code, text) == (200, "") and int(headers["Content-Length"]) > 0
    assert ask(server, "HEAD", "/events")[2]["Content-Type"].startswith("text/event-stream")


def test_only_what_has_changed_is_sent(server: LiveServer, looks: Looks) -> None:
    """To a new reader all that came since its page, then part by part; nothing while nothing changes."""
    page = ask(server, "GET", "/")[1]
    version = page.split()[0]
    with stream(server, version) as update:
        looks.parts = {"now": "two", "rest": "same"}
        later, parts = update()
        assert parts == {"now": "two"} and later != version
        before = looks.count
        looks.parts = None
        until(lambda: looks.count > before + 3)
        looks.parts = {"now": "two", "rest": "new"}
        assert update()[1] == {"rest": "new"}
    with stream(server, version) as update:
        assert update()[1] == {"now": "two", "rest": "new"}
    with stream(server, "of-another-process-7") as update:
        assert update()[1] == {"now": "two", "rest": "new", "trouble": ""}


def test_many_readers_are_one_look(server: LiveServer, looks: Looks) -> None:
    """Looks go by the clock and not by the number of tabs, and end with the last of them."""
    with contextlib.ExitStack() as stack:
        updates = [stack.enter_context(stream(server)) for _ in range(12)]
        for update in updates:
            update()
        before, began = looks.count, time.monotonic()
        time.sleep(0.5)
        assert looks.count - before <= (time.monotonic() - began) / 0.045 + 2
    until(lambda: server.board._num_readers == 0)
    time.sleep(0.1)
    before = looks.count
    time.sleep(0.3)
    assert looks.count == before


def test_there_is_an_end_to_readers(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is told so; when another has gone there is room again."""
    monkeypatch.setattr(live, "MAX_READERS", 2)
    with stream(server) as one, stream(server) as two:
        one(), two()
        assert ask(server, "GET", "/events")[0] == 503
        assert ask(server, "GET", "/")[0] == 200
    until(lambda: server.board._num_readers == 0)
    with stream(server) as update:
        assert update()[1]


def test_a_look_that_fails_is_shown_and_tried_again(server: LiveServer, looks: Looks) -> None:
    """What was known stays; what went wrong is told until it is over."""
    with stream(server, ask(server, "GET", "/")[1].split()[0]) as update:
        looks.parts = OSError("the disk is <gone>")
        name, markup = update()[1].popitem()
        assert name == "trouble" and "OSError: the disk is &lt;gone&gt;" in markup
        looks.parts = None
        assert update()[1] == {"trouble": ""}
    assert "one" in ask(server, "GET", "/")[1]


def test_readers_that_misbehave_are_let_go(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sends nothing, one that sends nonsense, one that goes in the middle."""
    monkeypatch.setattr(live._Handler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as silent:
        assert silent.recv(10) == b""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as loud:
        loud.sendall(b"\x16\x03\x01" + os.urandom(2000) + b"\r\n\r\n")
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as gone:
            gone.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert ask(server, "GET", "/")[0] == 200
    until(lambda: server.board._num_readers == 0)


def test_the_script_says_nothing_that_ends_it() -> None:
    """It stands in the page as it is."""
    assert "</" not in SCRIPT and "<!--" not in SCRIPT


def test_serving_writes_nothing_into_the_run(tmp_path: Path) -> None:
    """No file is made or changed by looks."""
    run = write_run(tmp_path / "run", ("started", 0), ("finished", 30))
    os.utime(run.path, (1, 1))

    def files() -> list[Any]:
        return [
            (path, path.stat().st_mtime_ns, path.stat().st_size) for path in [run.path, *sorted(run.path.rglob("*"))]
        ]

    before = files()
    reading = Reading(run)
    for _ in range(3):
        reading.look()
    assert files() == before
