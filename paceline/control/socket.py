"""The control socket: a training process answers a few fixed verbs, a line of JSON each.

    {"verb": "profile_on", "interval": 10}   ->   {"ok": true, ...}   or   {"ok": false, "error": "..."}

A request is data and never code, and only the user whose process it is (and root) gets an answer. One thread reads from
all clients, each with a deadline; a verb runs in a thread of its own. So a client that says nothing, or half a line,
keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

log = logging.getLogger(__name__)

Verb = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes the request, gives what the answer holds; what it raises becomes the error."""

MAX_REQUEST_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 1024 * 1024
REQUEST_S = 5.0
"""Seconds that a client has for its request, and again for taking the answer."""
MAX_CLIENTS = 256
"""Clients that may be without a whole request at a time; the one that has been longest makes room."""
MAX_AT_WORK = 16
"""Verbs that may run at a time."""

_MAX_PATH_BYTES = 100
"""Longest address that is used as it is; the kernel has room for 107 bytes."""


class ControlError(PacelineError):
    """A running process cannot be asked, or it refuses."""


@contextlib.contextmanager
def serving(place: Path, verbs: Mapping[str, Verb]) -> Iterator[None]:
    """Answer at `place` while entered; where that cannot be, one warning."""
    with contextlib.ExitStack() as stack:
        try:
            server = ControlSocket(place, verbs)
            server.start()
            stack.callback(server.stop)
        except OSError as error:
            log.warning("there is no control socket: %s cannot be made: %s", place, error.strerror or error)
        except RuntimeError as error:
            log.warning("there is no control socket: %s cannot be served: %s", place, error)
        yield


class ControlSocket:
    """The server.

    Args:
        place: The socket's file. One that a dead process has left is replaced.
        verbs: All that may be asked, by name.
    Raises: OSError where it cannot be made, or a living process listens there.
    """

    def __init__(self, place: Path, verbs: Mapping[str, Verb]) -> None:
        self._place, self._verbs = place, verbs
        self._stopping = False
        self._pid = os.getpid()
        self._at_work = threading.BoundedSemaphore(MAX_AT_WORK)
        _remove_if_dead(place)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(self._listener.fileno(), 0o600)  # on Linux the file gets it, without a moment in which others may
            with _address(place) as address:
                self._listener.bind(address)
            self._inode = _inode(place)
            place.chmod(0o600)
            self._listener.listen(MAX_CLIENTS)
        except BaseException:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        """Start answering. Raises: RuntimeError, with nothing left behind, if the system gives no more threads."""
        try:
            self._thread.start()
        except RuntimeError:
            self.stop()
            raise

    def stop(self) -> None:
        """Answer no more and remove the file; verbs that run go on in their threads. In a forked child: let go."""
        if os.getpid() != self._pid:  # the socket itself is shared, and its maker still answers there
            self._listener.close()
            return
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread.ident is not None:
            self._thread.join(2.0)
        self._listener.close()
        with contextlib.suppress(OSError):
            if _inode(self._place) == self._inode:
                self._place.unlink()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            clients: dict[socket.socket, _Client] = {}  # the longest there first
            has_warned = False
            while not self._stopping:
                try:
                    self._serve(selector, clients)
                except OSError as error:  # too many open files, perhaps
                    if self._stopping:
                        break
                    if not has_warned:
                        log.warning("the control socket %s has trouble: %s", self._place, error.strerror or error)
                    has_warned = True
                    time.sleep(1.0)
            for client in clients:
                client.close()

    def _serve(self, selector: selectors.BaseSelector, clients: dict[socket.socket, _Client]) -> None:
        deadline = min((client.deadline for client in clients.values()), default=None)
        ready = selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
        for key, _ in ready:
            if key.fileobj is self._listener:
                if self._stopping:
                    return
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                clients[connection] = _Client()
                selector.register(connection, selectors.EVENT_READ)
        for key, _ in ready:
            connection = key.fileobj  # type: ignore[assignment]  # sockets are all that was registered
            if connection in clients and clients[connection].read_from(connection):
                request = clients.pop(connection).request
                selector.unregister(connection)
                self._begin(connection, request)
        late = [each for each, client in clients.items() if client.deadline <= time.monotonic()]
        for connection in late or list(clients)[: max(0, len(clients) - MAX_CLIENTS)]:
            del clients[connection]
            selector.unregister(connection)
            _answer_at_once(connection, f"no whole request within {REQUEST_S:g} s")

    def _begin(self, connection: socket.socket, request: bytes) -> None:
        if not _is_ours(connection):
            _answer_at_once(connection, "this process belongs to another user")
        elif len(request) > MAX_REQUEST_BYTES:
            _answer_at_once(connection, f"the request is longer than {MAX_REQUEST_BYTES} bytes")
        elif not request.endswith(b"\n"):
            _answer_at_once(connection, "the request is no whole line")
        elif not self._at_work.acquire(blocking=False):
            _answer_at_once(connection, f"{MAX_AT_WORK} requests are being worked on; try again later")
        else:
            thread = threading.Thread(target=self._work, args=(connection, request), name="control", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no more threads
                self._at_work.release()
                _answer_at_once(connection, str(error))

    def _work(self, connection: socket.socket, request: bytes) -> None:
        with connection, contextlib.suppress(OSError):  # the client may be gone
            try:
                answer = self._answer(request)
            finally:
                self._at_work.release()  # before it is sent: who has an answer may ask again
            connection.settimeout(REQUEST_S)
            connection.sendall(answer)

    def _answer(self, line: bytes) -> bytes:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:
            return _error(f"the request is no JSON: {error}")
        if not isinstance(request, dict):
            return _error("the request is no JSON object")
        name = request.pop("verb", None)
        verb = self._verbs.get(name) if isinstance(name, str) else None
        if verb is None:
            return _error(f"unknown verb {name!r:.80}; there are: {', '.join(self._verbs)}")
        try:
            return json.dumps({"ok": True, **verb(request)}).encode() + b"\n"
        except PacelineError as error:
            return _error(str(error))
        except Exception as error:  # the client's to read, not the run's to die of
            return _error(f"{type(error).__name__}: {error}")


class _Client:
    """One that has connected and not asked yet."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + REQUEST_S
        self.request = b""

    def read_from(self, connection: socket.socket) -> bool:
        """Take what has come; whether that is all: a line, too much, or the end."""
        try:
            data = connection.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        line, end, _ = data.partition(b"\n")
        self.request += line + end
        return bool(end) or not data or len(self.request) > MAX_REQUEST_BYTES


def ask(place: Path, verb: str, *, timeout_s: float = 10.0, **arguments: Any) -> dict[str, Any]:
    """Ask the process that listens at `place`; its answer.

    Raises: ControlError if there is none, it does not answer in time, or it refuses.
    """
    request = json.dumps({"verb": verb, **arguments}).encode() + b"\n"
    if len(request) > MAX_REQUEST_BYTES:
        raise ControlError(f"the request takes {len(request)} bytes; {MAX_REQUEST_BYTES} may be sent")
    deadline = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            _connect(connection, place, deadline)
            with contextlib.suppress(BrokenPipeError):  # it may have answered before it had read all
                connection.sendall(request)
            line = _read_line(connection, deadline)
    except TimeoutError:
        raise ControlError(f"the process at {place} did not answer within {timeout_s:g} s") from None
    except ConnectionRefusedError:
        raise ControlError(f"nobody listens at {place}: the process that made it has ended") from None
    except FileNotFoundError:
        raise ControlError(f"there is no {place}: no process trains here, or it could not make its socket") from None
    except OSError as error:
        raise ControlError(f"{place} cannot be asked: {error.strerror or error}") from error
    return _understood(place, line)


def _connect(connection: socket.socket, place: Path, deadline: float) -> None:
    """A process with more clients at its door than may wait there refuses for a moment. Raises: OSError."""
    with _address(place) as address:
        while True:
            try:
                return connection.connect(address)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                time.sleep(0.01)


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) <= MAX_ANSWER_BYTES:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        data = connection.recv(65_536)
        if not data:
            break
        line += data
    return line


def _understood(place: Path, line: bytes) -> dict[str, Any]:
    if not line:
        raise ControlError(f"the process at {place} ended before it answered")
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or "ok" not in answer:
        raise ControlError(f"what listens at {place} is no training process: its answer cannot be read")
    if not answer.pop("ok"):
        raise ControlError(str(answer.get("error", "refused without a reason")))
    return answer


@contextlib.contextmanager
def _address(place: Path) -> Iterator[str]:
    """What to bind or connect to: a long path by way of its open folder, as addresses are short."""
    if len(os.fsencode(place)) <= _MAX_PATH_BYTES:
        yield str(place)
        return
    folder = os.open(place.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{place.name}"
    finally:
        os.close(folder)


def _remove_if_dead(place: Path) -> None:
    """Raises: OSError if somebody listens there; what is no socket is left alone, and binding will fail."""
    try:
        if not stat.S_ISSOCK(place.lstat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, _address(place) as address:
        probe.settimeout(1.0)
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            place.unlink(missing_ok=True)


def _is_ours(connection: socket.socket) -> bool:
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid in (0, os.geteuid())


def _inode(place: Path) -> tuple[int, int]:
    found = place.lstat()
    return found.st_dev, found.st_ino


def _error(text: str) -> bytes:
    return json.dumps({"ok": False, "error": text}).encode() + b"\n"


def _answer_at_once(connection: socket.socket, error: str) -> None:
    with connection, contextlib.suppress(OSError):
        connection.send(_error(error), socket.MSG_DONTWAIT)
