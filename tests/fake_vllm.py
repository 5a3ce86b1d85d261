"""A vLLM server for tests: streams token ids, counts drafts as vLLM does, and fails in the ways that servers do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STOP = 7
"""Ends an answer."""


def plain_answer(prompt: list[int]) -> list[int]:
    """What the target says, without end: it depends on the whole prompt."""
    return [10 + (sum(prompt) + 3 * i) % 50 for i in range(1000)]


@dataclass
class FakeVllm:
    """State of a running server.

    Attributes:
        accepted: Drafted tokens that verifications accept, in turns, from the first one of each answer on; None: the
            server was started without speculation.
        k: Tokens drafted in each.
        tells_requests: Whether answers carry counts of their own.
        answer: Tokens, given the prompt; a `STOP` in them ends it.
        gap: Between the two best logits anywhere; None: asked for logprobs, the server refuses.
        longest: Prompts over this are refused.
        breaks_at: Number of the answer, from 1, within which the connection breaks.
        others: Tokens that other clients have made while an answer is made; as many drafts count for them.
        lag: Requests of the counters that still get the old ones after an answer.
        delay_s: Wait before an answer's first token.
        metrics: What `/metrics` sends in place of the counters.
        redirect: Where everything is redirected to.
        tokenize: Ids of a text; None: the server has no tokenizer.
        requests: Bodies of all answers' requests.
        most_in_flight: Of these, at a time.
    """

    accepted: list[int] | None = field(default_factory=lambda: [2, 0, 4])
    k: int = 4
    tells_requests: bool = False
    answer: Callable[[list[int]], list[int]] = plain_answer
    gap: float | None = 2.0
    longest: int = 10_000
    breaks_at: int = 0
    others: int = 0
    lag: int = 0
    delay_s: float = 0.0
    metrics: bytes | None = None
    redirect: str | None = None
    tokenize: Callable[[str], list[int]] | None = None
    model: str = "toy"
    root: str = "/models/toy"
    max_model_len: int | None = 4096
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight = 0
        self._generated = self._drafts = 0
        self._per_position = [0] * self.k
        self._old: list[str] = []

    def counters(self) -> str:
        """As Prometheus has them, in two engines."""
        label = f'engine="0",model_name="{self.model}"'
        lines = [
            "# TYPE vllm:generation_tokens counter",
            f"vllm:generation_tokens_total{{{label}}} {float(self._generated)}",
            f"vllm:generation_tokens_created{{{label}}} 1.79e+09",
            'vllm:generation_tokens_total{engine="1",model_name="other"} 0.0',
        ]
        if self.accepted is not None:
            name = "vllm:spec_decode_num"
            lines += [
                f"{name}_drafts_total{{{label}}} {float(self._drafts)}",
                f"{name}_draft_tokens_total{{{label}}} {float(self._drafts * self.k)}",
                f"{name}_accepted_tokens_total{{{label}}} {float(sum(self._per_position))}",
            ]
            for j, count in enumerate(self._per_position):
                lines.append(f'{name}_accepted_tokens_per_pos_total{{{label},position="{j}"}} {float(count)}')
        return "\n".join(lines) + "\n"

    def read_counters(self) -> str:
        """The counters, old ones first while they lag."""
        with self._lock:
            return self._old.pop(0) if self._old else self.counters()

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        """What a streamed answer sends; None: the connection breaks."""
        with self._lock:
            self.requests.append(body)
            number = len(self.requests)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            yield from self._answer(body, number)
        finally:
            with self._lock:
                self._in_flight -= 1

    def _answer(self, body: dict[str, Any], number: int) -> Iterator[dict[str, Any] | None]:
        wanted = self.answer(body["prompt"])[: body["max_tokens"]]
        if STOP in wanted:
            wanted = wanted[: wanted.index(STOP) + 1]
        finish = "stop" if wanted[-1] == STOP else "length"
        steps: list[int] = []
        sent = 1
        time.sleep(self.delay_s)
        yield self._chunk(wanted[:1], finish if len(wanted) == 1 else None)
        while sent < len(wanted):
            if number == self.breaks_at:
                yield None
                return
            if self.accepted is not None:
                steps.append(self.accepted[len(steps) % len(self.accepted)])
            new = wanted[sent : sent + 1 + (steps[-1] if steps else 0)]
            sent += len(new)
            if sent == len(wanted):  # counted before the last tokens leave
                self._count(len(wanted), steps)
            yield self._chunk(new, finish if sent == len(wanted) else None)
        if len(wanted) == 1:
            self._count(1, [])
        last: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": len(wanted)}}
        if self.tells_requests and self.accepted is not None:
            histogram = [steps.count(n) for n in range(self.k + 1)]
            told = {"acceptance_histogram": histogram, "num_draft_tokens": len(steps) * self.k}
            last["metrics"] = {"speculative_decoding": told | {"per_step_accepted": steps}}
        yield last

    def _count(self, num_tokens: int, steps: list[int]) -> None:
        with self._lock:
            self._old = [self.counters()] * self.lag
            self._generated += num_tokens + self.others
            for num_accepted in [*steps, *[0] * self.others]:
                self._drafts += 1
                for j in range(num_accepted):
                    self._per_position[j] += 1

    @staticmethod
    def _chunk(tokens: list[int], finish: str | None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish}]}

    def gap_answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """What a request for logprobs gets."""
        with self._lock:
            self._generated += 1
        if self.gap is None:
            return 400, {"error": {"message": "no logprobs here"}}
        return 200, {"choices": [{"logprobs": {"top_logprobs": [{"a": -1.0, "b": -1.0 - self.gap}]}}]}


@contextmanager
def running_vllm(server: FakeVllm) -> Iterator[FakeVllm]:
    """Serve on a loopback port for as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else every response waits 40 ms

        def do_GET(self) -> None:
            models = {"data": [{"id": server.model, "root": server.root, "max_model_len": server.max_model_len}]}
            if server.redirect is not None:
                self.send_response(307)
                self.send_header("Location", server.redirect)
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif self.path == "/v1/models":
                self._send(200, models)
            elif self.path == "/version":
                self._send(200, {"version": "1.2"})
            elif self.path == "/metrics":
                self._send(200, server.read_counters().encode() if server.metrics is None else server.metrics)
            else:
                self._send(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize" and server.tokenize is not None:
                self._send(200, {"tokens": server.tokenize(body["prompt"])})
            elif self.path != "/v1/completions":
                self._send(404, {"detail": "Not Found"})
            elif len(body["prompt"]) > server.longest:
                self._send(400, {"error": {"message": f"maximum context length is {server.longest} tokens"}})
            elif body.get("logprobs"):
                self._send(*server.gap_answer(body))
            else:
                self._stream(body)

        def _stream(self, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in server.events(body):
                if event is None:
                    self.close_connection = True
                    return
                self._write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self._write(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")

        def _write(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def _send(self, status: int, content: dict[str, Any] | bytes) -> None:
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
            pass  # clients that were gone

    with Server(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
