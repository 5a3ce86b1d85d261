"""A vLLM server that is already running, seen from outside: its counters, and one answer at a time by many tasks.

    VllmClient          connect, answer a prompt of token ids, read the counters
    parse_counters      the text of `/metrics`
    Counts              drafts and what became of them, as vLLM counts

A prompt goes as token ids and the answer comes back as such, so that no text is tokenized twice. Every prompt is read
anew (`cache_salt`): no answer profits from what an earlier one left in the server's prefix cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from paceline.data.server import CONNECT_TIMEOUT_S, NEUTRAL
from paceline.dflash.acceptance import Acceptance
from paceline.errors import ConfigError, ServerError
from paceline.eval.decode import Decoded

if TYPE_CHECKING:
    import httpx2

READ_TIMEOUT_S = 600.0
"""Longest silence of a server within an answer, or before its first token."""

SETTLE_S = 10.0
"""Time for the counters to take in an answer that has arrived."""

PROBE = "Paceline: 3 + 4 = 7, naïve façade, 東京\n"
"""Tokenized here and at the server, which tells most tokenizers apart."""

NO_VLLM = "is it vLLM's OpenAI-compatible server?"

_LINE = re.compile(r"(vllm:\w+?)(?:_total)?(?:\{(.*)\})?\s+([-+\w.]+)(?:\s+\d+)?")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')

_GENERATED = "vllm:generation_tokens"
_DRAFTS = "vllm:spec_decode_num_drafts"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class Counts:
    """Verifications as vLLM counts them: one that a stop or the limit cuts counts in full.

    Attributes:
        drafts: Verifications of drafted tokens.
        draft_tokens: Tokens drafted in them.
        accepted: Of these, accepted ones.
        per_position: Drafts whose first j+1 tokens were accepted.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()

    def __sub__(self, earlier: Counts) -> Counts:
        positions = zip(self.per_position, earlier.per_position, strict=True)
        return Counts(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            tuple(now - before for now, before in positions),
        )

    @property
    def is_sound(self) -> bool:
        """Whether these may be counts: no later position is accepted more often than an earlier one."""
        return self.accepted == sum(self.per_position) and min(self.by_accepted) >= 0

    @property
    def by_accepted(self) -> list[int]:
        """Drafts by accepted tokens, from 0 on."""
        falling = (self.drafts, *self.per_position, 0)
        return [one - after for one, after in pairwise(falling)]

    @property
    def acceptance(self) -> Acceptance:
        """The same as the built-in decoder's counts, each verification in full."""
        reached = [self.drafts, *self.per_position][: len(self.per_position)]
        committed = self.accepted + self.drafts
        return Acceptance(len(self.per_position), self.drafts, committed, reached, list(self.per_position))


@dataclass(frozen=True)
class Counters:
    """What `/metrics` says at one time, summed over the server's engines.

    Attributes:
        generated: Tokens of all answers to anyone.
        counts: Drafts; None if the server was started without speculation.
    """

    generated: int
    counts: Counts | None


@dataclass(frozen=True)
class Served:
    """An answer.

    Attributes:
        decoded: Its tokens and times; what follows the first token is ``verify_s``, as a server does not say what of
            it was drafting.
        counts: Its own verifications, where the server tells them of each request.
    """

    decoded: Decoded
    counts: Counts | None


class VllmClient:
    """A server by its URL.

    Attributes:
        model: Name of the model there, known once connected.
        version: Of vLLM, or None where the server does not say.
        max_length: Positions that the server has room for, or None.
    """

    def __init__(self, url: str, option: str = "--url") -> None:
        """Prepare, but send nothing yet. Raises: ConfigError if the URL is none."""
        try:
            parts = urlsplit(url)
            well_formed = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            well_formed = False
        if not well_formed:
            raise ConfigError(f"{option} {url} is no address: write http://HOST:PORT")
        path = parts.path.rstrip("/").removesuffix("/v1")
        self._url = urlunsplit(parts._replace(path=path, query="", fragment=""))
        self._shown = urlunsplit(
            parts._replace(netloc=parts.netloc.rpartition("@")[2], path=path, query="", fragment="")
        )
        self.option = option
        self.model = ""
        self.version: str | None = None
        self.max_length: int | None = None
        self._http: httpx2.AsyncClient

    def __str__(self) -> str:
        """The address without a user or password in it."""
        return self._shown

    @asynccontextmanager
    async def connected(self, target: str, model: str | None, tokenizer: Any) -> AsyncIterator[VllmClient]:
        """Connect, and check that this is vLLM with the target.

        Args:
            target: As named by the user.
            model: Its name at the server, if that is another one.
            tokenizer: The target's.
        Raises: ServerError if nobody answers, or not vLLM; ConfigError if it serves another model.
        """
        try:
            import httpx2
        except ImportError as error:
            raise ConfigError(f"{self.option} needs the `openai` package: pip install openai") from error
        key = os.environ.get("OPENAI_API_KEY")
        async with httpx2.AsyncClient(
            timeout=httpx2.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx2.Limits(max_connections=None),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            follow_redirects=False,
        ) as self._http:
            await self._find_model(target, model)
            await self.counters()
            await self._ask_version()
            await self._compare_tokenizer(tokenizer)
            yield self

    async def _find_model(self, target: str, model: str | None) -> None:
        listed = await self._json("GET", "/v1/models")
        models = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(models, list) or not all(
            isinstance(one, dict) and isinstance(one.get("id"), str) for one in models
        ):
            raise ServerError(f"{self} sent no list of models: is it vLLM's OpenAI-compatible server?")
        named = {one["id"]: one for one in models}
        if model is not None and model not in named:
            raise ConfigError(f"{self} has no model {model}; it has {', '.join(named) or 'none'}")
        found = [name for name, one in named.items() if _is_same(target, name) or _is_same(target, one.get("root"))]
        if model is None and not found:
            raise ConfigError(
                f"{self} serves {', '.join(named) or 'no model'}, --target is {target}: name the target that is "
                "served; if it is that one under another name, say so with --model NAME"
            )
        self.model = model or found[0]
        length = named[self.model].get("max_model_len")
        self.max_length = length if isinstance(length, int) else None

    async def _ask_version(self) -> None:
        try:
            version = (await self._json("GET", "/version")).get("version")
        except (ServerError, AttributeError):
            return
        self.version = str(version)[:40] if version else None

    async def _compare_tokenizer(self, tokenizer: Any) -> None:
        """A server that cannot tokenize is believed. Raises: ConfigError."""
        try:
            content = {"model": self.model, "prompt": PROBE, "add_special_tokens": False}
            theirs = (await self._json("POST", "/tokenize", content)).get("tokens")
        except (ServerError, AttributeError):
            return
        ours = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        if isinstance(theirs, list) and theirs != ours:
            raise ConfigError(
                f"{self} tokenizes otherwise than --target: {PROBE.strip()!r} is {theirs[:12]}... there and "
                f"{ours[:12]}... here; name the target that is served"
            )

    async def counters(self) -> Counters:
        """What `/metrics` says now. Raises: ServerError if it has none of vLLM's counters."""
        text = (await self._get("/metrics")).text
        try:
            return parse_counters(text)
        except ValueError as error:
            raise ServerError(
                f"{self}/metrics {error}: a vLLM server was wanted, started without --disable-log-stats"
            ) from error

    async def settled(self, since: Counters, num_generated: int) -> Counters:
        """The counters once they have taken in so many tokens. Raises: ServerError if they do not, or fell."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            now = await self.counters()
            if now.generated < since.generated or (now.counts is None) != (since.counts is None):
                raise ServerError(f"the counters of {self} fell: it was restarted meanwhile; evaluate again")
            if now.generated - since.generated >= num_generated:
                return now
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self} sent {num_generated} tokens and counted {now.generated - since.generated}: do /metrics "
                    "and /v1 belong to the same server?"
                )
            await asyncio.sleep(0.02)

    async def answer(
        self, name: str, prompt: Sequence[int], max_new_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> Served:
        """Decode one prompt.

        Args:
            name: What errors call it.
        Raises: ServerError if the server refuses the prompt, goes away, or sends what is no answer.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            **NEUTRAL,
            "stream": True,
            "stream_options": {"include_usage": True},  # the event that also has the counts of the request
            "return_token_ids": True,
            "cache_salt": uuid.uuid4().hex,
        }
        if temperature > 0:
            body["seed"] = seed % 2**31
        reading = _Reading()
        async for event in self._events(f"{name} ({len(prompt)} tokens)", body):
            try:
                reading.add(event)
            except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
                raise ServerError(f"{self} sent no answer to {name} but {str(event)[:200]!r}: is it vLLM?") from error
            if len(reading.tokens) > max_new_tokens:
                raise ServerError(f"{self} sent more than the {max_new_tokens} tokens that {name} asked for")
        if reading.finish not in ("stop", "length"):
            raise ServerError(f"{self} did not finish {name}: finish_reason {reading.finish}")
        if not reading.tokens:
            raise ServerError(f"{self} sends no token ids with its answers: vLLM from 0.10.2 on is wanted")
        return reading.served(len(prompt))

    async def top2_gap(self, prompt: Sequence[int]) -> float | None:
        """How far the likeliest next token's logit lies above the second one's; None if the server does not tell."""
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0.0, "logprobs": 2}
        try:
            answer = await self._json("POST", "/v1/completions", body)
            best, second = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)[:2]
            return float(best) - float(second)
        except (ServerError, AttributeError, KeyError, IndexError, TypeError, ValueError):
            return None

    async def _events(self, name: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        """The objects of a streamed answer. Raises: ServerError."""
        import httpx2

        try:
            async with self._http.stream("POST", f"{self._url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._refused(name, response)
                async for line in response.aiter_lines():
                    said = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or said == "[DONE]":
                        continue
                    event = json.loads(said)
                    if isinstance(event, dict) and "error" in event:
                        raise ServerError(f"{self} stopped within {name}: {_message(event)}")
                    yield event
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise ServerError(
                f"{self} stopped answering at {name}: {_what(error)}; is the server still up? Nothing was written"
            ) from error
        except ValueError as error:
            raise ServerError(f"{self} sent broken JSON within {name}: {error}") from error

    def _refused(self, name: str, response: httpx2.Response) -> ServerError:
        status, hint = response.status_code, ""
        if status in (400, 413, 422):
            hint = "; leave out long prompts, lower --max-new-tokens, or serve with a larger --max-model-len"
        return ServerError(f"{self} refuses {name}: {_answer_of(response)}{hint}")

    async def _get(self, path: str) -> httpx2.Response:
        return await self._send("GET", path)

    async def _json(self, method: str, path: str, content: dict[str, Any] | None = None) -> Any:
        response = await self._send(method, path, content)
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(f"{self}{path} sent no JSON: {NO_VLLM}") from error

    async def _send(self, method: str, path: str, content: dict[str, Any] | None = None) -> httpx2.Response:
        import httpx2

        try:
            response = await self._http.request(method, self._url + path, json=content, timeout=60)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ServerError(f"no answer from {self}{path}: {_what(error)}; is the server up there?") from error
        if response.status_code == 200:
            return response
        status, hint = response.status_code, NO_VLLM
        if status in (401, 403):
            hint = "set OPENAI_API_KEY"
        elif 300 <= status < 400:
            hint = f"redirects are not followed: give {self.option} the server's own address"
        raise ServerError(f"{self}{path}: {_answer_of(response)}; {hint}")


class _Reading:
    """An answer while it comes in."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.counts: Counts | None = None
        self.steps: list[int] = []
        self.started = time.perf_counter()
        self.first_s: float | None = None
        self.seconds = 0.0

    def add(self, event: dict[str, Any]) -> None:
        """One event. Raises: errors of all kinds if it has another form than vLLM's."""
        for choice in event["choices"]:  # none in the last event
            new = choice.get("token_ids") or []
            if not all(type(token) is int for token in new):
                raise TypeError("token ids that are no integers")
            if new:
                self.seconds = time.perf_counter() - self.started
                self.first_s = self.seconds if self.first_s is None else self.first_s
                self.tokens += new
            self.finish = choice.get("finish_reason") or self.finish
        told = (event.get("metrics") or {}).get("speculative_decoding")
        if told:
            self.counts = _counts_of_request(told)
            self.steps = [int(n) for n in told.get("per_step_accepted") or []]

    def served(self, num_prompt: int) -> Served:
        """The whole answer."""
        acceptance = self.counts.acceptance if self.counts else Acceptance(0)
        decoded = Decoded(
            self.tokens,
            acceptance,
            self.steps,
            stopped=self.finish == "stop",
            prefill_s=self.first_s or 0.0,
            verify_s=self.seconds - (self.first_s or 0.0),
            num_prompt=num_prompt,
        )
        return Served(decoded, self.counts)


def parse_counters(text: str) -> Counters:
    """The counters of vLLM in a Prometheus exposition, with names as in the text or with ``_total``.

    Raises: ValueError if there are none, or they are no counts.
    """
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None or match[1] not in (_GENERATED, _DRAFTS, _DRAFT_TOKENS, _ACCEPTED, _PER_POSITION):
            continue
        try:
            value = int(float(match[3]))
        except (ValueError, OverflowError) as error:
            raise ValueError(f"has {match[3][:40]} for {match[1]}") from error
        if match[1] == _PER_POSITION:
            place = _POSITION.search(match[2] or "")
            if place is None:
                raise ValueError(f"has {_PER_POSITION} without a position")
            positions[int(place[1])] = positions.get(int(place[1]), 0) + value
        else:
            sums[match[1]] = sums.get(match[1], 0) + value
    if _GENERATED not in sums:
        raise ValueError(f"has no {_GENERATED}")
    if _DRAFTS not in sums:
        return Counters(sums[_GENERATED], None)
    if sorted(positions) != list(range(len(positions))) or not {_DRAFT_TOKENS, _ACCEPTED} <= set(sums):
        raise ValueError("has some of the counters of speculation and not all")
    per_position = tuple(positions[j] for j in range(len(positions)))
    return Counters(sums[_GENERATED], Counts(sums[_DRAFTS], sums[_DRAFT_TOKENS], sums[_ACCEPTED], per_position))


def _counts_of_request(told: dict[str, Any]) -> Counts:
    """What a server started with ``--per-request-spec-decode-metrics`` adds to an answer."""
    histogram = [int(n) for n in told["acceptance_histogram"]]
    falling = tuple(sum(histogram[j:]) for j in range(1, len(histogram)))
    return Counts(sum(histogram), int(told["num_draft_tokens"]), sum(falling), falling)


def _is_same(target: str, name: Any) -> bool:
    """Whether a server's name of a model may mean this target: equal, or the last part of both paths."""
    if not isinstance(name, str) or not name:
        return False
    place = Path(target).expanduser()
    last = place.resolve().name if place.exists() else place.name
    return name == target or Path(name).name in (last, place.name)


def _answer_of(response: httpx2.Response) -> str:
    """Status and the server's own words."""
    try:
        said = _message(response.json())
    except ValueError:
        said = ""
    return f"HTTP {response.status_code}" + (f": {said}" if said else "")


def _message(content: Any) -> str:
    error = content.get("error", content) if isinstance(content, dict) else None
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return " ".join(str(message or "").split())[:300]


def _what(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
