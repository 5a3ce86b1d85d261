"""An OpenAI-compatible server for tests: answers at once, deterministically, and fails in the ways that servers do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

END = 257
"""The toy tokenizer's <|im_end|>."""


@dataclass
class Reply:
    """What the server sends instead of a plain answer.

    Attributes:
        status: HTTP status; above 299 with `error` as its message.
        text: Of the answer; None: the default one.
        finish: Why it ended; `length` leaves out the end token.
        message: More fields of the message, such as reasoning and tool calls.
        ids: Token ids in place of the text's.
        delay_s: Wait before sending.
        drop: Close the connection without a word.
        raw: The body of the response as it is.
    """

    status: int = 200
    error: str = ""
    text: str | None = None
    finish: str = "stop"
    message: dict[str, Any] = field(default_factory=dict)
    ids: list[int] | None = None
    delay_s: float = 0.0
    drop: bool = False
    raw: bytes | None = None


def default_text(messages: list[dict[str, Any]]) -> str:
    """The answer to some messages: how many there are, and what the last one says."""
    return f"{len(messages)}. {messages[-1]['content'][:30]}!"


class FakeServer:
    """State of a running server.

    Attributes:
        url: Its address.
        requests: Bodies of all chat requests, in order of arrival.
        headers: Of the same.
        most_in_flight: Requests that were being answered at a time.
        ids_place: Where token ids are put: as vLLM or SGLang do, or nowhere.
        unknown_fields: Names that are answered with HTTP 400.
        refusal_delay_s: Wait before that, given the request's body.
        models_body: What is sent in place of the list of models.
        reply: Decides on a request, given its body and how often the same messages have come (from 1).
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.models = ["toy"]
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_in_flight = 0
        self.ids_place: Literal["vllm", "sglang", "nowhere"] = "vllm"
        self.unknown_fields: set[str] = set()
        self.refusal_delay_s: Callable[[dict[str, Any]], float] = lambda body: 0.0
        self.models_body: bytes | None = None
        self.reply: Callable[[dict[str, Any], int], Reply] = lambda body, times: Reply()
        self.url = ""
        self._in_flight = 0
        self._times: dict[str, int] = {}
        self._lock = threading.Lock()

    def asked(self, text: str) -> int:
        """How many requests held this text in their last message."""
        return sum(text in body["messages"][-1]["content"] for body in self.requests)

    def chat(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, dict[str, Any] | bytes] | None:
        """Status and body of the response to a request; None: the connection breaks."""
        key = json.dumps(body["messages"])
        with self._lock:
            self.requests.append(body)
            self.headers.append(headers)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            self._times[key] = times = self._times.get(key, 0) + 1
        try:
            if wrong := self.unknown_fields & set(body):
                time.sleep(self.refusal_delay_s(body))
                return 400, {"error": {"message": f"unknown field {min(wrong)}"}}
            reply = self.reply(body, times)
            time.sleep(reply.delay_s)
            if reply.drop:
                return None
            if reply.raw is not None:
                return reply.status, reply.raw
            if reply.status > 299:
                return reply.status, {"error": {"message": reply.error}}
            return 200, self._completion(body, reply)
        finally:
            with self._lock:
                self._in_flight -= 1

    def _completion(self, body: dict[str, Any], reply: Reply) -> dict[str, Any]:
        messages = [{k: v for k, v in m.items() if k != "reasoning"} for m in body["messages"]]
        options = body.get("chat_template_kwargs", {})
        prompt = self.tokenizer.apply_chat_template(
            messages, tools=body.get("tools"), add_generation_prompt=True, return_dict=True, **options
        )["input_ids"]
        text = default_text(messages) if reply.text is None else reply.text
        ids = reply.ids or self.tokenizer(text)["input_ids"] + [END] * (reply.finish != "length")
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": reply.finish,
            "message": {"role": "assistant", "content": text, **reply.message},
        }
        response: dict[str, Any] = {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "total_tokens": len(prompt) + len(ids),
            },
        }
        if body.get("return_token_ids") and self.ids_place != "nowhere":
            choice["token_ids"] = ids
            (response if self.ids_place == "vllm" else choice)["prompt_token_ids"] = prompt
        return response


@contextmanager
def running(server: FakeServer, port: int = 0) -> Iterator[FakeServer]:
    """Serve on a loopback port for as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                models = [{"id": name, "object": "model", "created": 1, "owned_by": "fake"} for name in server.models]
                self._send(200, server.models_body or {"object": "list", "data": models})
            elif self.path == "/version":
                self._send(200, {"version": "1.2"})
            else:
                self._send(404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            response = server.chat(body, dict(self.headers))
            if response is None:
                self.close_connection = True
                self.connection.close()
            else:
                self._send(*response)

        def _send(self, status: int, content: dict[str, Any] | bytes) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if data.startswith(b"<") else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("retry-after-ms", "5")  # the client obeys, which keeps tests short
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # clients that were killed

    with Server(("127.0.0.1", port), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
