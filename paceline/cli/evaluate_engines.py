"""`paceline eval --engine vllm`: a drafter in a server that is already running."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

Engine = Literal["builtin", "vllm"]


@dataclass(frozen=True)
class ServerOptions:
    """What `paceline eval` is told about servers.

    Attributes:
        url: Of the server that drafts.
        baseline_url: Of one that serves the same target without drafts.
        model: The target's name there, where it is another one than `--target`.
    """

    url: str | None = None
    baseline_url: str | None = None
    model: str | None = None

    def check(self, engine: Engine, draft: Path | None, fixed: Mapping[str, bool]) -> None:
        """Whether the options of an engine are there, and no others.

        Args:
            fixed: Options that a server has decided when it was started, and whether they were given.
        Raises: ConfigError.
        """
        if engine == "vllm":
            if self.url is None:
                raise ConfigError("--engine vllm needs --url http://HOST:PORT, of a server that is running")
            if given := [name for name, is_given in fixed.items() if is_given]:
                raise ConfigError(
                    f"--engine vllm with {', '.join(given)}: that was decided when the server was started"
                )
            return
        named = {"--url": self.url, "--baseline-url": self.baseline_url, "--model": self.model}
        if given := [name for name, value in named.items() if value is not None]:
            raise ConfigError(f"{', '.join(given)} without --engine vllm: the built-in decoder asks no server")
        if draft is None:
            raise ConfigError(
                "--draft is missing: an exported drafter, a run folder or a checkpoint; only --engine vllm --url URL "
                "goes without one"
            )


def served_record(
    console: Console,
    options: ServerOptions,
    *,
    target: str,
    draft: Path | None,
    messages: Sequence[Sequence[Mapping[str, Any]]],
    thinking: Literal["on", "off"] | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch: int | None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Measure at the server; the record without the names of the prompt files. Raises: ConfigError, ServerError."""
    from paceline.cli.evaluate_show import print_load, print_served_prompt
    from paceline.eval.batch import batch_sizes
    from paceline.eval.engine_server import VllmClient
    from paceline.eval.evaluate import encode_prompts
    from paceline.eval.served import Evaluated, evaluate_served
    from paceline.models.loading import load_tokenizer

    assert options.url is not None
    server = VllmClient(options.url)
    baseline = None if options.baseline_url is None else VllmClient(options.baseline_url, "--baseline-url")
    tokenizer = load_tokenizer(target, revision, trust_remote_code)
    encoded = encode_prompts(messages, tokenizer, None if thinking is None else thinking == "on")

    async def measure() -> Evaluated:
        async with AsyncExitStack() as stack:
            for side in filter(None, (server, baseline)):
                await stack.enter_async_context(side.connected(target, options.model, tokenizer))
            return await evaluate_served(
                server,
                baseline,
                encoded,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                sizes=() if batch is None else batch_sizes(batch),
                on_prompt=lambda drafted, plain, number: print_served_prompt(
                    console, drafted, plain, number, len(encoded), is_greedy=not temperature
                ),
                on_size=lambda load: print_load(console, load.as_dict()),
            )

    found = asyncio.run(measure())
    record = found.as_dict()
    versions = record.pop("versions") | ({"vllm": server.version} if server.version else {})
    urls = {"url": str(server)} | ({"baseline_url": str(baseline)} if baseline is not None else {})
    return {
        "engine": "vllm",
        **urls,
        "target": target,
        "served_model": server.model,
        "draft": f"the drafter at {server}" if draft is None else f"{draft} (as named; {server} does not say)",
        "thinking": thinking or "as the template has it",
        **record,
        "versions": versions,
    }
