"""A vLLM server with `extract_hidden_states` for tests, as far as its protocol goes: answers, files and their locks.

What real vLLM 0.32.0 does, seen with ``example_hidden_states_connector``: the lock file is there and held before the
answer is sent, the file is written behind it by another thread, then the lock is let go of. Both stay there.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass
class Act:
    """What the server does with a request.

    Attributes:
        delay_s: Wait before the answer.
        write_s: Wait between the answer and the file.
        keep: Tokens of the document whose states are delivered; None: all.
        tokens: Ids that the file says it is of, in place of the document's.
        change: Applied to the states.
        locks, writes: Whether there is a lock file, and a file.
        status: HTTP status; above 299 with `error`.
        drop: Break the connection.
        answer: Replaces fields of the answer.
        raw: The body of the response as it is.
        tensors: More tensors of the file.
    """

    delay_s: float = 0.0
    write_s: float = 0.0
    keep: int | None = None
    tokens: list[int] | None = None
    change: Callable[[Tensor], Tensor] = lambda states: states
    locks: bool = True
    writes: bool = True
    status: int = 200
    error: str = ""
    drop: bool = False
    answer: dict[str, Any] = field(default_factory=dict)
    raw: bytes | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)


class FakeHiddenStates:
    """State of a running server.

    Args:
        folder: Where it writes.
        states: Hidden states ``[n, layers, D]`` of a document.

    Attributes:
        act: Decides on a request, given its document and how often that has come (from 1).
        model, root, max_model_len: As the list of models has them.
        models: More entries of that list.
        requests: Documents, in order of arrival.
        headers: Of these requests.
        most_in_flight: Of these, at a time.
        url: Its address.
    """

    def __init__(self, folder: Path, states: Callable[[list[int]], Tensor]) -> None:
        self.folder, self.states = folder, states
        self.act: Callable[[list[int], int], Act] = lambda ids, times: Act()
        self.model, self.root, self.max_model_len = "toy", "/models/toy", 512
        self.models: list[dict[str, Any]] = []
        self.requests: list[list[int]] = []
        self.headers: list[dict[str, str]] = []
        self.most_in_flight = 0
        self.url = ""
        self._in_flight = 0
        self._lock = threading.Lock()

    def complete(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any, Callable[[], None]] | None:
        """Status and body of an answer, and what to do once it is sent; None: the connection breaks."""
        ids = body["prompt"]
        with self._lock:
            self.requests.append(ids)
            self.headers.append(headers)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            number, times = len(self.requests), self.requests.count(ids)
        try:
            act = self.act(ids, times)
            time.sleep(act.delay_s)
            if act.drop:
                return None
            if act.status > 299 or act.raw is not None:
                return act.status, act.raw or {"error": {"message": act.error}}, lambda: None
            file = self.folder / f"cmpl-{number}-0-{id(self):x}.safetensors"
            return 200, self._answer(body, file) | act.answer, self._write(file, ids, act)
        finally:
            with self._lock:
                self._in_flight -= 1

    def _answer(self, body: dict[str, Any], file: Path) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": "length",
            "token_ids": [1],
            "prompt_token_ids": body["prompt"],
        }
        params = {"hidden_states_path": f"/elsewhere/{file.name}"}  # the server may see the folder elsewhere
        return {"object": "text_completion", "model": body["model"], "choices": [choice], "kv_transfer_params": params}

    def _write(self, file: Path, ids: list[int], act: Act) -> Callable[[], None]:
        """Take the lock now; the rest later."""
        lock = os.open(f"{file}.lock", os.O_CREAT | os.O_WRONLY, 0o600) if act.locks else None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(act.write_s)
            if act.writes:
                with self._lock:
                    states = self.states(ids)
                tensors = {
                    "hidden_states": act.change(states[: act.keep]).contiguous(),
                    "token_ids": torch.tensor(ids if act.tokens is None else act.tokens),
                }
                save_file(tensors | act.tensors, file)
            if lock is not None:
                os.close(lock)

        return write


@contextmanager
def running(server: FakeHiddenStates, port: int = 0) -> Iterator[FakeHiddenStates]:
    """Serve on a loopback port for as long as the block lasts; at its end connections break."""
    connections: set[Any] = set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            connections.add(self.connection)

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                own = {"id": server.model, "root": server.root, "parent": None, "max_model_len": server.max_model_len}
                self._send(200, {"object": "list", "data": [own, *server.models]})
            elif self.path == "/version":
                self._send(200, {"version": "0.32.0"})
            else:
                self._send(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/completions" and body["max_tokens"] == 1 and body["model"] == server.model
            made = server.complete(body, dict(self.headers))
            if made is None:
                self.close_connection = True
                return
            status, content, after = made
            try:
                self._send(status, content)
            finally:
                after()

        def _send(self, status: int, content: Any) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # clients that went away

    with Server(("127.0.0.1", port), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(2)


def states_of(model: Any, layers: Sequence[int]) -> Callable[[list[int]], Tensor]:
    """What an engine captures of a Transformers model: the stream behind layer i is i + 1, before the final norm."""
    seen: dict[int, Tensor] = {}

    def keep(number: int) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            seen[number] = (output[0] if isinstance(output, tuple) else output).detach()[0]

        return hook

    for number, layer in enumerate(model.get_decoder().layers, start=1):
        layer.register_forward_hook(keep(number))

    @torch.no_grad()
    def states(ids: list[int]) -> Tensor:
        model(input_ids=torch.tensor([ids]), use_cache=False)
        return torch.stack([seen[layer] for layer in layers], dim=1)

    return states
