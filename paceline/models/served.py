"""Hidden states of a target that a vLLM server runs: what is asked, where they lie, and what is checked of them.

The server runs with `extract_hidden_states` and a connector that writes files (docs/served-targets.md). It answers a
completion of one token with the name of a safetensors file, and holds a lock on ``NAME.lock`` until that is written:

    hidden_states           [n, layers, D]   the residual stream behind each captured layer, ascending
    token_ids               int64 [n]        the tokens that they belong to
    hidden_states_scales    float32 [n, 1, 1], where the connector writes fp8

A file is found by the name in its own request's answer, compared with the tokens that were sent, and removed once read.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import ConfigError, ServerError, printable
from paceline.files import explain

DOCS = "docs/served-targets.md"
"""Where the server's command is, for messages."""

ANSWER_TIMEOUT_S = 120.0
"""Longest silence of the server: a document's forward takes seconds, and others may be before it."""

CONNECT_TIMEOUT_S = 10.0

FILE_TIMEOUT_S = 60.0
"""From the answer to the end of the file: the server writes several at a time."""

LOOK_S = 0.001, 0.05
"""Seconds between looks at a file that is being written, at first and at most."""


class CaptureError(ServerError):
    """What a request gave is no capture of its document; another try may give one.

    Attributes:
        reason: ``short``, ``other tokens`` or ``not finite``.
        wanted, delivered: Tokens.
    """

    def __init__(self, message: str, reason: str, wanted: int, delivered: int) -> None:
        super().__init__(message)
        self.reason, self.wanted, self.delivered = reason, wanted, delivered


class ClientClosed(Exception):
    """`close` was called meanwhile."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself.

    Attributes:
        model: Name that requests use.
        root: Where it has the model from.
        max_length: Tokens of a prompt and its answer.
        version: Of the software.
    """

    model: str
    root: str | None
    max_length: int | None
    version: str | None


class HiddenStatesClient:
    """Asks a server for hidden states; any number of threads at once, with a connection each.

    Args:
        url: With or without ``/v1``.
        folder: Where the server's files are, as seen from here; nothing else is read or removed.
        layers: Captured layers, and with them the order of what is delivered, as the server counts: layer i's output is
            i + 1.
        hidden_size: D.

    Attributes:
        url, layers: As given.
    """

    def __init__(self, url: str, folder: Path, *, layers: Sequence[int], hidden_size: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"target.server={url!r} is no URL: one such as http://127.0.0.1:8000 was wanted")
        if "@" in parts.netloc:  # it would be in the run's configuration
            raise ConfigError("target.server has a user or password in it: a key goes by OPENAI_API_KEY")
        self.url = url
        self._parts = parts
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._folder = folder
        self.layers, self._hidden_size = list(layers), hidden_size
        self._model = ""
        self._here = threading.local()
        self._connections: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def connect(self) -> ServerFacts:
        """See who is there. Raises: ServerError if nobody answers; ConfigError if it serves no single model."""
        status, body = self._request("GET", "/v1/models")
        models = body.get("data") if status == 200 else None
        if not isinstance(models, list) or not all(isinstance(each, dict) for each in models):
            raise _refusal(f"{self.url} sent no list of models (HTTP {status}): is it vLLM's?", status)
        # adapters that a server has beside its model name it as their parent
        own = [each for each in models if not each.get("parent")]
        if len(own) != 1 or not isinstance(own[0].get("id"), str):
            raise ConfigError(f"{self.url} serves {len(own)} models; a server with one was wanted")
        self._model = own[0]["id"]
        status, version = self._request("GET", "/version")
        length = own[0].get("max_model_len")
        return ServerFacts(
            self._model,
            own[0].get("root"),
            length if isinstance(length, int) else None,
            str(version["version"]) if status == 200 and "version" in version else None,
        )

    def capture(self, input_ids: Sequence[int]) -> Tensor:
        """Hidden states ``[n, layers, D]`` of a document alone, in the type in which the server gives them.

        Raises: CaptureError if they are not those of this document, whole and finite; ServerError if none came;
            ConfigError if the server is not set up for them; ClientClosed.
        """
        body = {"model": self._model, "prompt": list(input_ids), "max_tokens": 1, "temperature": 0}
        status, answer = self._request("POST", "/v1/completions", body | {"return_token_ids": True})
        if status != 200:
            said = answer.get("error", answer)
            said = said.get("message", said) if isinstance(said, dict) else said
            raise _refusal(
                f"{self.url} refuses a document of {len(input_ids)} tokens: HTTP {status}: {str(said)[:300]}",
                status,
            )
        params = answer.get("kv_transfer_params")
        path = params.get("hidden_states_path") if isinstance(params, dict) else None
        if not isinstance(path, str):
            raise ConfigError(
                f"{self.url} answers without a file of hidden states: it has to be started with "
                f"extract_hidden_states and a connector that writes files, as {DOCS} shows"
            )
        # of the server's word only the name: it may see the folder elsewhere, and other files are no business of ours
        name = path.rpartition("/")[2]
        if not name.endswith(".safetensors") or name.startswith("."):
            raise ServerError(f"{self.url} names a file of hidden states {name[:100]!r}: NAME.safetensors was wanted")
        file = self._folder / name
        try:
            self._wait_for(file, path)
            return self._read(file, input_ids)
        finally:
            for each in (file, _lock_of(file)):
                each.unlink(missing_ok=True)

    def close(self) -> None:
        """Break off what is under way: threads in `capture` get ClientClosed."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        for connection in connections:
            if (sock := connection.sock) is not None:
                try:
                    sock.shutdown(2)  # wakes a thread that reads; closing would not
                except OSError:
                    pass

    # ------------------------------------------------------------------ requests

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Status and JSON object. Raises: ServerError, ClientClosed."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        while True:
            connection, is_new = self._connection()
            try:
                if self._is_closed:
                    raise ClientClosed
                connection.request(method, self._prefix + path, data, headers)
                connection.sock.settimeout(ANSWER_TIMEOUT_S)  # until then it was the time to connect
                response = connection.getresponse()
                content = response.read()
                break
            except (OSError, http.client.HTTPException) as error:
                self._drop(connection)
                if self._is_closed:
                    raise ClientClosed from error
                if is_new or isinstance(error, TimeoutError):
                    reason = explain(error) if isinstance(error, OSError) else str(error)
                    raise ServerError(f"no answer from {self.url}: {reason or type(error).__name__}") from error
                # a kept connection that the server has closed meanwhile
        try:
            answer = json.loads(content)
        except ValueError as error:
            seen = printable(" ".join(content[:100].decode(errors="replace").split()))
            raise _refusal(f"{self.url}{path} sent HTTP {response.status}, {seen[:80]}", response.status) from error
        return response.status, answer if isinstance(answer, dict) else {"error": answer}

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """This thread's connection, and whether it is a new one."""
        connection = getattr(self._here, "connection", None)
        if connection is not None:
            return connection, False
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port, timeout=CONNECT_TIMEOUT_S)
        self._here.connection = connection
        with self._lock:
            self._connections.add(connection)
        return connection, True

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        self._here.connection = None
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    # ------------------------------------------------------------------ files

    def _wait_for(self, file: Path, told: str) -> None:
        """Return when the file is written. Raises: ServerError if it is not; ClientClosed."""
        deadline, pause = time.monotonic() + FILE_TIMEOUT_S, LOOK_S[0]
        while True:
            if self._is_closed:
                raise ClientClosed
            if file.exists() and not os.access(file, os.R_OK):
                raise ConfigError(
                    f"{file} cannot be read: vLLM's files are its user's alone, so run it as the same user"
                )
            state = _lock_state(_lock_of(file))
            if state != "held" and _is_whole(file):
                return
            if state == "free":  # whoever wrote has let go of it
                raise ServerError(f"the server wrote no hidden states to {told}: its log says why (a full disk?)")
            if time.monotonic() > deadline:
                seen = "is not there" if not file.exists() else "is not complete"
                raise ServerError(
                    f"{file.name} {seen} {FILE_TIMEOUT_S:.0f} s after the server named {told}: is {self._folder} "
                    "(target.server_files) the folder that the server writes to?"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, LOOK_S[1])

    def _read(self, file: Path, input_ids: Sequence[int]) -> Tensor:
        with safe_open(file, "pt") as content:
            found = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  # it is no mapping
        states, tokens = found.get("hidden_states"), found.get("token_ids")
        if states is None or tokens is None or states.dim() != 3:
            raise ServerError(
                f"{file.name} holds {sorted(found)}: hidden_states [n, layers, D] and token_ids were wanted"
            )
        if states.shape[1:] != (len(self.layers), self._hidden_size):
            raise ConfigError(
                f"{self.url} gives hidden states of {states.shape[1]} layers, {states.shape[2]} wide; "
                f"{len(self.layers)} layers, {self._hidden_size} wide, were wanted: start it with "
                f'"eagle_aux_hidden_state_layer_ids": {self.layers}'
            )
        wanted, delivered = len(input_ids), len(states)
        if delivered != wanted:
            raise CaptureError(
                f"hidden states of {delivered} tokens came for a document of {wanted}", "short", wanted, delivered
            )
        if tokens.tolist() != list(input_ids):
            raise CaptureError(
                f"the hidden states that came for a document of {wanted} tokens are of other tokens", "other tokens",
                wanted, delivered,
            )  # fmt: skip
        if (scales := found.get("hidden_states_scales")) is not None:
            states = (states.float() * scales).bfloat16()
        if not torch.isfinite(states).all():
            raise CaptureError(
                f"hidden states of a document of {wanted} tokens are not finite", "not finite", wanted, delivered
            )
        return states


def check_folder(folder: Path) -> str | None:
    """A folder that the server's files may be read from and removed; what is to be said of it, if anything.

    Raises: ConfigError if it is not there, or others may write there.
    """
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"target.server_files={folder} cannot be used: {explain(error)}; make it with mkdir -m 700 before the "
            "server starts"
        ) from error
    if not stat.S_ISDIR(mode) or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"target.server_files={folder}: a folder that files are read from and removed was wanted")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"target.server_files={folder}: others may write there (mode {stat.S_IMODE(mode):03o}), and files from "
            "there are trained on; chmod 700"
        )
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        return f"{folder} can be read by others (mode {stat.S_IMODE(mode):03o}): chmod 700 keeps your data to yourself"
    return None


def _refusal(message: str, status: int) -> Exception:
    """One that may pass, or one that does not."""
    if status in (408, 429) or status >= 500:
        return ServerError(message)
    hint = "; set OPENAI_API_KEY" if status in (401, 403) else ""
    return ConfigError(message + hint)


def _lock_of(file: Path) -> Path:
    return file.with_name(file.name + ".lock")


def _lock_state(lock: Path) -> str:
    """``held``, ``free``, or ``none`` where there is no such file."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return "none"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return "free"
    except BlockingIOError:
        return "held"
    finally:
        os.close(descriptor)


def _is_whole(file: Path) -> bool:
    """Whether a file is as long as its own table of contents says."""
    try:
        with safe_open(file, "pt"):
            return True
    except (OSError, SafetensorError, ValueError):
        return False
