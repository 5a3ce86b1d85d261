"""The target behind an OpenAI-compatible server (vLLM, SGLang, others), asked for one answer at a time by many tasks.

The `openai` package sends, waits and tries again; this file says what is asked, finds the token ids in what comes
back, and tells a row that the server refuses from a server that is gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from paceline.data.dialects import Rejection
from paceline.data.regenerate import Answer, AnswerSettings, number_of, prompt_ids
from paceline.data.templates import template_options
from paceline.errors import ConfigError, ServerError

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 1800.0
"""Longest silence of a server: an answer comes in one piece, after all its tokens were made."""

CONNECT_TIMEOUT_S = 10.0

NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling that a server would otherwise take from the model's generation_config.json, unseen."""

NO_API = "is it an OpenAI-compatible server?"

EXCERPT = 12
"""Tokens shown around the first difference of two prompts."""


class ServerTarget:
    """Asks a server for answers.

    Attributes:
        model: Name of the model, known once connected.
        software: What the server says it is, or None.
        num_retries: Requests that were sent again.
        gives_ids: Whether answers come with token ids; None before the first.
        takes_neutral: Whether the server takes `NEUTRAL`; else its own settings hold.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Any,
        settings: AnswerSettings,
        *,
        model: str | None = None,
        retries: int = 5,
        concurrency: int = 64,
        any_template: bool = False,
    ) -> None:
        """Prepare, but send nothing yet.

        Args:
            url: Of the server, with or without ``/v1``.
            tokenizer: The one that will be trained with; its rendering of the first prompt is compared.
            settings: How answers are sampled.
            model: Name of the model at the server; None: the only one there.
            retries: How often a request is sent again.
            concurrency: Requests in flight.
            any_template: Accept a server that renders prompts otherwise.
        Raises: ConfigError if the URL is none.
        """
        self.model = model or ""
        self.software: str | None = None
        self.num_retries = 0
        self.gives_ids: bool | None = None
        self.takes_neutral = True
        self._tokenizer = tokenizer
        self._settings = settings
        self._url = _base_url(url)
        self._retries = retries
        self._concurrency = concurrency
        self._any_template = any_template
        self._has_answered = False
        self._has_compared = False
        self._probing = asyncio.Lock()
        self._http: Any = None
        self._client: Any = None

    @property
    def shown_url(self) -> str:
        """The address without a user or password in it."""
        parts = urlsplit(self._url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    def facts(self) -> dict[str, Any]:
        """What regenerate.json says of the server."""
        return {
            "url": self.shown_url,
            "software": self.software,
            "sampling_defaults": NEUTRAL if self.takes_neutral else "the server's own",
        }

    async def __aenter__(self) -> ServerTarget:
        """Connect and find the model. Raises: ServerError if nobody answers; ConfigError if the model is not there."""
        try:
            import httpx2
            import openai
        except ImportError as error:
            raise ConfigError("--server needs the `openai` package: pip install openai") from error
        self._openai = openai

        async def count(request: httpx2.Request) -> None:
            self.num_retries += request.headers.get("x-stainless-retry-count", "0") != "0"

        limits = httpx2.Limits(max_connections=self._concurrency + 1, max_keepalive_connections=self._concurrency + 1)
        timeout = httpx2.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None)
        self._http = openai.DefaultAsyncHttpx2Client(limits=limits, timeout=timeout, event_hooks={"request": [count]})
        self._client = openai.AsyncOpenAI(
            base_url=self._url,
            api_key=os.environ.get("OPENAI_API_KEY") or "none",
            max_retries=self._retries,
            timeout=timeout,
            http_client=self._http,
        )
        try:
            await self._find_model()
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close the connections."""
        await self._client.close()

    async def _find_model(self) -> None:
        owners: dict[str, Any] = {}
        try:  # at once: a server that is not there yet is a mistake, not an outage
            async for model in self._client.with_options(max_retries=0, timeout=30).models.list():
                owners[model.id] = getattr(model, "owned_by", None)
            names = list(owners)
            if not _are(names, str):
                raise TypeError(f"names of models that are no strings: {names}")
        except self._openai.NotFoundError:
            names = []
        except self._openai.OpenAIError as error:
            raise ServerError(
                f"no answer from {self.shown_url}: {self._what(error)}; is the server up there?"
            ) from error
        except (AttributeError, TypeError, ValueError) as error:  # the client hands on whatever came
            raise ServerError(f"{self.shown_url} sent no list of models: {NO_API}") from error
        if not self.model and len(names) != 1:
            seen = f"has {len(names)} models: {', '.join(names)}" if names else "does not say which models it has"
            raise ConfigError(f"{self.shown_url} {seen}; choose one with --model NAME")
        if self.model and names and self.model not in names:
            raise ConfigError(f"{self.shown_url} has no model {self.model}; it has {', '.join(names)}")
        self.model = self.model or names[0]
        known = [owners.get(self.model), await self._version()]
        self.software = " ".join(str(fact) for fact in known if fact) or None

    async def _version(self) -> str | None:
        """Version by vLLM's or SGLang's own address, beside the API; None elsewhere."""
        for path in ("/version", "/get_server_info"):
            address = urlunsplit(urlsplit(self._url)._replace(path=path))
            try:
                return str((await self._http.get(address, timeout=CONNECT_TIMEOUT_S)).json()["version"])
            except Exception:  # an address that others need not have
                continue
        return None

    async def answer(self, key: str, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> Answer:
        """The next turn, as `Answerer` wants it. Raises: Rejection, ServerError."""
        request: dict[str, Any] = {"messages": list(map(_as_sent, messages))}
        if tools:
            request["tools"] = tools
        if self._settings.temperature > 0:
            request["seed"] = number_of(self._settings.seed, key) % 2**31
        try:
            response = await self._send(request)
        except self._openai.OpenAIError as error:
            await self._blame(key, error)
            raise Rejection("the server refuses it", self._what(error)) from error
        self._has_answered = True
        answer = self._read(response)
        self._check_first(key, messages, tools, answer, response)
        answer.check_ids(len(self._tokenizer))
        return answer

    async def _send(self, request: dict[str, Any]) -> Any:
        """The server's response. Without what only some servers know, if it does not take that.

        A refusal is believed of a request without these fields, or once an answer has come to one with them.
        """
        settings = self._settings
        body = {
            "model": self.model,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_new_tokens,
            **request,
        }
        template = template_options(settings.thinking)
        extra: dict[str, Any] = {"chat_template_kwargs": template} if template else {}
        more = {"return_token_ids": True, **NEUTRAL} if self.takes_neutral else {}
        try:
            return await self._create(**body, extra_body=extra | more)
        except (self._openai.BadRequestError, self._openai.UnprocessableEntityError) as error:
            # Other requests may have been answered since this one was sent.
            if not more or (self.takes_neutral and self._has_answered):
                raise
            response = await self._create(**body, extra_body=extra)
            if self.takes_neutral and not self._has_answered:
                self.takes_neutral = False
                log.warning(
                    "the server does not take %s (%s): ONLY TEXT CAN BE STORED, which `prepare` tokenizes again, and "
                    "the server's own top-k and penalties hold",
                    ", ".join(more),
                    self._what(error),
                )
            return response

    async def _create(self, **body: Any) -> Any:
        """One request. Raises: ServerError if what comes is no answer at all, which the client hands on as it is."""
        try:
            response = await self._client.chat.completions.create(**body)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ServerError(f"{self.shown_url} sent broken JSON ({error}): {NO_API}") from error
        choices = getattr(response, "choices", None)
        first = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(getattr(first, "message", None), self._openai.BaseModel):
            raise self._no_answer(response)
        return response

    def _no_answer(self, what: Any) -> ServerError:
        seen = " ".join(str(what).split())[:200]
        return ServerError(f"{self.shown_url} sent no answer but {seen!r}: {NO_API}")

    async def _blame(self, key: str, error: Exception) -> None:
        """Return if a request that failed for good was at fault. Raises: ServerError if the server was."""
        status = getattr(error, "status_code", None)
        if status in (400, 413, 422, 500):
            if status != 500 and self._has_answered:
                return
            async with self._probing:
                try:
                    await self._send({"messages": [{"role": "user", "content": "Say yes."}]})
                    self._has_answered = True
                    return
                except self._openai.OpenAIError as other:
                    error = other
        hint = ""
        if status == 429:
            hint = "; fewer requests at a time (--concurrency) or more --retries may help"
        elif status in (401, 403):
            hint = "; set OPENAI_API_KEY"
        raise ServerError(f"{self.shown_url} stopped answering, first for {key}: {self._what(error)}{hint}") from error

    def _what(self, error: Exception) -> str:
        """A failure in one line; the server's own words where there are any."""
        cause = error.__cause__ if type(error) is self._openai.APIConnectionError else None
        body = getattr(error, "body", None)
        message = body.get("message") if isinstance(body, dict) else None
        text = str(message or (f"{error} {cause}" if cause else error)).strip() or type(error).__name__
        status = getattr(error, "status_code", None)
        return (f"HTTP {status}: " if status else "") + " ".join(text.split())[:300]

    def _read(self, response: Any) -> Answer:
        """What a response says. Raises: Rejection for an odd ending; ServerError if fields have other types."""
        choice = response.choices[0]
        if choice.finish_reason not in ("stop", "length", "tool_calls"):
            raise Rejection("the server ended the answer", f"finish_reason {choice.finish_reason}")
        said = choice.message
        content = getattr(said, "content", None) or ""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        reasoning = getattr(said, "reasoning_content", None) or getattr(said, "reasoning", None) or ""
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = getattr(said, "tool_calls", None) or []
        if not (isinstance(content, str) and isinstance(reasoning, str) and _are(calls, self._openai.BaseModel)):
            raise self._no_answer(response)
        if calls:
            message["tool_calls"] = [call.model_dump(exclude_none=True) for call in calls]
        # vLLM puts the prompt's ids beside the choices, SGLang into them
        prompt = getattr(response, "prompt_token_ids", None) or getattr(choice, "prompt_token_ids", None)
        answer = getattr(choice, "token_ids", None)
        if not prompt or answer is None:
            prompt = answer = None
        elif not (_are(prompt, int) and _are(answer, int)):
            seen = f"{str(prompt)[:50]} and {str(answer)[:50]}"
            raise ServerError(f"{self.shown_url} sent token ids that are no lists of integers, {seen}: {NO_API}")
        return Answer(
            message,
            "length" if choice.finish_reason == "length" else "stop",
            _usage(response, "completion_tokens") if answer is None else len(answer),
            prompt,
            answer,
        )

    def _check_first(self, key: str, messages: Any, tools: list[Any] | None, answer: Answer, response: Any) -> None:
        """Compare the first prompt with our own rendering of it, and say if there are no ids.

        Prompts with tools are not compared: servers write the descriptions in their own way, and what the target was
        shown is stored as it was.
        Raises: ConfigError if another template or tokenizer is at work there; Rejection if ours refuses the messages.
        """
        if self.gives_ids is None and self.takes_neutral and answer.answer_ids is None:
            log.warning("the server returns no token ids: ONLY TEXT CAN BE STORED, which `prepare` tokenizes again")
        self.gives_ids = answer.answer_ids is not None
        if not (self._has_compared or self._any_template or tools):
            ours = prompt_ids(self._tokenizer, messages, tools, self._settings.thinking)
            if answer.prompt_ids is not None:
                self._compare(key, ours, answer.prompt_ids)
            elif (theirs := _usage(response, "prompt_tokens")) not in (0, len(ours)):
                raise ConfigError(
                    f"{key}: the server counts {theirs} prompt tokens, and the tokenizer and template here give "
                    f"{len(ours)}: name the ones it uses, or accept it with --any-template"
                )
            self._has_compared = True

    def _compare(self, key: str, ours: list[int], theirs: list[int]) -> None:
        if ours == theirs:
            return
        pairs = zip(ours, theirs, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        here, there = (self._tokenizer.decode(ids[max(0, at - EXCERPT // 2) : at + EXCERPT]) for ids in (ours, theirs))
        raise ConfigError(
            f"{key}: the server's prompt is another than the tokenizer and template here give: from token {at} on "
            f"({len(theirs)} and {len(ours)} in all) it has ...{there!r}, here ...{here!r}. Name the server's "
            "tokenizer or --template, give both sides the same --thinking, or accept it with --any-template"
        )


def _are(values: Any, kind: type) -> bool:
    """Whether something is a list of values of one type; True and False are no integers here."""
    return isinstance(values, list) and all(isinstance(x, kind) and not isinstance(x, bool) for x in values)


def _usage(response: Any, name: str) -> int:
    """A count of tokens by the server; 0 where it does not say."""
    count = getattr(getattr(response, "usage", None), name, None)
    return count if isinstance(count, int) else 0


def _as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the API has it: arguments of calls as strings, reasoning under the names that servers read."""
    sent = dict(message)
    if "reasoning_content" in sent:
        sent["reasoning"] = sent["reasoning_content"]
    if "tool_calls" in sent:
        sent["tool_calls"] = [_call_as_sent(call) for call in sent["tool_calls"]]
    return sent


def _call_as_sent(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments", {}))}}


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--server {url} is no address: write http://HOST:PORT or https://HOST/v1")
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") or "/v1", query="", fragment=""))
