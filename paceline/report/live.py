"""A page that is served on the loopback device and kept up to date by server-sent events.

    GET /         the page as it is now
    GET /events   the parts that have changed, as they change

One look at a time is taken, for all readers together, and none while nobody reads. What has changed is rendered once
and sent to all; where nothing has, nothing is sent but a sign of life.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import secrets
import socketserver
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline.report.page import Html, note, policy, tag

ADDRESS = "127.0.0.1"
"""Whoever wants the page elsewhere forwards the port: it has no password."""
HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names that a browser may have asked for; under any other name a foreign page may read what is served."""
EVERY_S = 2.0
"""Seconds between looks."""
ALIVE_S = 10.0
"""Seconds of silence after which a sign of life is sent; a reader that has gone is noticed by it."""
REQUEST_S = 10.0
"""Seconds that a reader has for its request, and to take what is sent."""
MAX_READERS = 48
"""Open event streams; a browser opens no more than six, and none for a tab that is hidden."""

SCRIPT = """\
const status = document.getElementById("live");
let version = status.dataset.version, source = null, at = null;
const say = (text, kind) => { status.textContent = text; status.className = "live " + kind; };
const put = (name, markup) => {
  const place = document.getElementById(name);
  if (!place) { location.reload(); return; }
  const all = (query) => Array.from(place.querySelectorAll(query));
  const open = all("details").map((each) => each.open);
  const left = all(".scroll").map((each) => each.scrollLeft);
  const focused = all("summary, [tabindex]").indexOf(document.activeElement);
  place.innerHTML = markup;
  all("details").forEach((each, i) => { each.open = Boolean(open[i]); });
  all(".scroll").forEach((each, i) => { each.scrollLeft = left[i] || 0; });
  if (focused >= 0) all("summary, [tabindex]")[focused]?.focus({ preventScroll: true });
};
const connect = () => {
  if (source || document.hidden) return;
  source = new EventSource("events?since=" + encodeURIComponent(version));
  source.onopen = () => say(at ? "Live; last change " + at : "Live", "on");
  source.addEventListener("update", (event) => {
    version = event.lastEventId;
    Object.entries(JSON.parse(event.data)).forEach(([name, markup]) => put(name, markup));
    at = new Date().toLocaleTimeString();
    say("Live; last change " + at, "on");
  });
  source.onerror = () => {
    say("Not connected: paceline report does not answer" + (at ? "; last change " + at : ""), "off");
    close();
    setTimeout(connect, 3000);
  };
};
const close = () => { source?.close(); source = null; };
document.addEventListener("visibilitychange", () => (document.hidden ? close() : connect()));
addEventListener("pagehide", close);
addEventListener("pageshow", connect);
connect();
"""

Parts = Mapping[str, Html]


class Board:
    """The parts of a page, and who waits for news of them.

    Args:
        look: The parts as they are now; None if nothing has changed since it was asked last. Only one call at a time.
        draw: The whole page from its parts and their version.
    """

    def __init__(self, look: Callable[[], Parts | None], draw: Callable[[Parts, str], str]) -> None:
        self._look, self._draw = look, draw
        self._token = secrets.token_hex(4)  # a reader of an earlier process's page gets all of this one's
        self._number = 0
        self._parts: dict[str, tuple[int, Html]] = {}
        self._page: tuple[int, bytes] = (-1, b"")
        self._looking, self._changed = threading.Lock(), threading.Condition()
        self._looked_at: float | None = None
        self._num_readers = 0
        self.is_closed = False

    def page(self) -> bytes:
        """The page, no older than `EVERY_S`; drawn once for all who ask."""
        self.refresh()
        with self._changed:
            if self._page[0] != self._number:
                parts = {name: markup for name, (_, markup) in self._parts.items()}
                self._page = self._number, self._draw(parts, self._version()).encode()
            return self._page[1]

    def refresh(self) -> None:
        """Look, unless somebody just has."""
        with self._looking:
            now = time.monotonic()
            if self._looked_at is not None and now - self._looked_at < 0.9 * EVERY_S:
                return
            try:
                found = self._look()
            except Exception as error:  # whatever it is, a page that says so is worth more than none
                told = f"{type(error).__name__}: {error}"
                found = {"trouble": note(tag("strong", "This page is not up to date."), " ", told, is_warning=True)}
            self._looked_at = time.monotonic()
        self._take(found or {})

    def _take(self, found: Parts) -> None:
        with self._changed:
            if "trouble" not in found:
                found = {"trouble": Html(), **found}
            changed = {name: each for name, each in found.items() if self._parts.get(name, (0, None))[1] != each}
            if changed:
                self._number += 1
                self._parts |= {name: (self._number, markup) for name, markup in changed.items()}
                self._changed.notify_all()

    def _version(self) -> str:
        return f"{self._token}-{self._number}"

    def news(self, since: str, timeout_s: float) -> tuple[str, dict[str, Html]]:
        """Parts that have changed since a version, waited for so long; and the version that they are of."""
        token, _, number = since.rpartition("-")
        known = int(number) if token == self._token and number.isascii() and number.isdecimal() else 0
        with self._changed:
            self._changed.wait_for(lambda: self._number > known or self.is_closed, timeout_s)
            return self._version(), {name: each for name, (at, each) in self._parts.items() if at > known}

    @contextlib.contextmanager
    def reading(self) -> Iterator[bool]:
        """While entered, somebody reads, and looks are taken; whether there was room for one more."""
        with self._changed:
            has_room = self._num_readers < MAX_READERS
            self._num_readers += has_room
            self._changed.notify_all()
        try:
            yield has_room
        finally:
            with self._changed:
                self._num_readers -= has_room

    def watch(self) -> None:
        """Look every `EVERY_S` while there are readers, until closed; in a thread of its own."""
        while not self.is_closed:
            with self._changed:
                self._changed.wait_for(lambda: self._num_readers or self.is_closed)
            if not self.is_closed:
                self.refresh()
                time.sleep(EVERY_S)

    def close(self) -> None:
        """End `watch` and whoever waits."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()


class LiveServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Serves a board on the loopback device; see `listen`."""

    daemon_threads = True  # Ctrl-C does not wait for readers
    request_queue_size = MAX_READERS

    def __init__(self, board: Board, port: int) -> None:
        self.board, self.policy = board, f"{policy(SCRIPT)}; frame-ancestors 'none'"
        super().__init__((ADDRESS, port), _Handler)

    def server_bind(self) -> None:
        """Bind without a look-up of the address's name, which takes seconds where no name server answers."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def listen(board: Board, port: int) -> LiveServer:
    """A server that waits for readers; port 0: a free one. Raises: OSError if the port is taken."""
    return LiveServer(board, port)


def serve(server: LiveServer) -> None:
    """Serve until KeyboardInterrupt, which is passed on."""
    threading.Thread(target=server.board.watch, name="report", daemon=True).start()
    try:
        server.serve_forever()
    finally:
        server.board.close()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LiveServer
    timeout = REQUEST_S
    server_version, sys_version = "paceline", ""

    def do_GET(self) -> None:
        place = urllib.parse.urlsplit(self.path)
        if not self._is_welcome():
            self._say(403, "Only pages of this machine's loopback device are served here.")
        elif place.path == "/":
            self._send(200, "text/html; charset=utf-8", self.server.board.page())
        elif place.path == "/events":
            self._stream(urllib.parse.parse_qs(place.query).get("since", [""])[-1])
        else:
            self._say(404, "There is nothing here but / and /events.")

    do_HEAD = do_GET

    def _is_welcome(self) -> bool:
        """Whether the request is for a loopback name, and by no page of another site but to show this one."""
        hosts = self.headers.get_all("Host") or []
        name = hosts[0].rpartition(":")[0] or hosts[0] if len(hosts) == 1 else ""
        if hosts and hosts[0] in HOSTS:  # [::1] without a port
            name = hosts[0]
        site, mode = self.headers.get("Sec-Fetch-Site", "none"), self.headers.get("Sec-Fetch-Mode")
        return len(hosts) == 1 and name in HOSTS and (site in ("none", "same-origin") or mode == "navigate")

    def _stream(self, since: str) -> None:
        board, since = self.server.board, self.headers.get("Last-Event-ID") or since
        with board.reading() as has_room:
            if not has_room:
                self._say(503, f"{MAX_READERS} readers are there already.")
                return
            self._head(200, "text/event-stream; charset=utf-8", None)
            self._write(b": hello\n\n")
            while self.command == "GET" and not board.is_closed:
                since, parts = board.news(since, ALIVE_S)
                data = f"event: update\nid: {since}\ndata: {json.dumps(parts)}\n\n" if parts else ": nothing new\n\n"
                self._write(data.encode())

    def _say(self, code: int, text: str) -> None:
        self._send(code, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self._head(code, kind, len(body))
        if self.command != "HEAD":
            self._write(body)

    def _head(self, code: int, kind: str, length: int | None) -> None:
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Cache-Control": "no-store",
            "Content-Security-Policy": self.server.policy,
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            **({} if length is None else {"Content-Length": str(length)}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not told."""
