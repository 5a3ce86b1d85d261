"""`paceline regenerate`: the target's own answers in the place of those that the inputs hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline import __version__
from paceline.cli.data import INPUT_HELP
from paceline.errors import ConfigError, DataError, ServerError

if TYPE_CHECKING:
    from paceline.data.answer_folder import AnswerFolder, Counts
    from paceline.data.inputs import Source
    from paceline.data.regenerate import Answer, Answerer, AnswerSettings, RecordStream

SERVER_CONCURRENCY = 64
"""Requests in flight unless told otherwise."""

WAITING_PER_SLOT = 2
"""Conversations under way for each row of the built-in generator, so that a free one never waits for a prompt."""

BAR_INTERVAL_S = 0.25
PLAIN_INTERVAL_S = 10.0
"""Seconds between two looks at the counts: for a bar on a terminal, for plain lines elsewhere."""


def regenerate(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help=INPUT_HELP)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the answers; one begun earlier is gone on with.")],
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="OpenAI-compatible server of the target: vLLM, SGLang, others.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="DIR|ID", help="Server: the target's tokenizer.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Server: the model there; by default its only one.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="DIR|ID", help="In place of a server: the target, run on this machine.")
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="LoRA adapter that is merged into --target, a folder of PEFT's."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Share of the probability that is sampled from.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Length limit of an answer.")] = 2048,
    on_cut: Annotated[
        Literal["drop", "keep"], typer.Option(help="Answers that the limit cut: leave them out, or keep and mark them.")
    ] = "drop",
    thinking: Annotated[
        Literal["on", "off"] | None,
        typer.Option(help="Switch the template's reasoning (`enable_thinking`, `thinking`); by default it decides."),
    ] = None,
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Chat template to use in place of the tokenizer's own.")
    ] = None,
    any_template: Annotated[
        bool, typer.Option("--any-template", help="Server: accept one that renders prompts otherwise.")
    ] = False,
    concurrency: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Requests in flight (64), or rows decoded together (by the memory)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only the first N rows of the inputs.")] = None,
    retries: Annotated[int, typer.Option(metavar="N", min=0, help="Server: how often a request is sent again.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Let the target answer the prompts itself: a drafter learns from what its target says."""
    answered = answer_inputs(
        inputs,
        out,
        server=server,
        tokenizer=tokenizer,
        model=model,
        target=target,
        adapter=adapter,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        on_cut=on_cut,
        thinking=None if thinking is None else thinking == "on",
        template=template,
        any_template=any_template,
        concurrency=concurrency,
        seed=seed,
        limit=limit,
        retries=retries,
        quiet=as_json,
    )
    run, ending = asyncio.run(answered)
    if as_json:
        print(json.dumps({"out": str(out), "finished": ending is None, **run.counts.as_dict()}))
    elif ending is None:
        print("\n".join(run.summary()))
    if ending is not None:
        print(f"stopped by {ending.name}; {run.how_to_go_on}", file=sys.stderr)
        sys.exit(128 + ending)
    if not run.counts.num_kept:
        raise DataError(f"no row has an answer; {out / 'rejected.jsonl'} says why")


async def answer_inputs(
    inputs: Sequence[str],
    out: Path,
    *,
    server: str | None,
    tokenizer: str | None,
    model: str | None,
    target: str | None,
    adapter: str | None,
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    on_cut: Literal["drop", "keep"],
    thinking: bool | None,
    template: Path | None,
    any_template: bool,
    concurrency: int | None,
    seed: int,
    limit: int | None,
    retries: int,
    quiet: bool,
) -> tuple[Run, signal.Signals | None]:
    """Answer the inputs as the command's options say: the finished call, and the signal that stopped it or None.

    Raises: ConfigError, DataError, ServerError, ModelError.
    """
    from paceline.data.chat import load_tokenizer
    from paceline.data.regenerate import AnswerSettings

    if (server is None) == (target is None):
        raise ConfigError("who answers? Name either --server URL with --tokenizer, or --target DIR|ID")
    if server is not None and tokenizer is None:
        raise ConfigError("--server needs --tokenizer DIR|ID: the server's prompts are compared with its rendering")
    if server is not None and adapter is not None:
        raise ConfigError(
            f"--adapter {adapter} is merged into a --target that runs here; a --server answers as what it runs: start "
            "it with the folder that `paceline merge` writes, or with the adapter under a name of its own for --model"
        )
    if server is None and (tokenizer or model or any_template):
        raise ConfigError("--tokenizer, --model and --any-template are for a --server: a --target brings its own")
    settings = AnswerSettings(temperature, top_p, max_new_tokens, seed, thinking)
    name = tokenizer or target or ""
    chats = load_tokenizer(name, template)
    run = Run(out, name, chats, template, settings, on_cut, _open(inputs), limit, quiet, adapter)
    if server is None:
        return run, await run.ask_model(concurrency)
    return run, await run.ask_server(server, model, concurrency or SERVER_CONCURRENCY, retries, any_template)


def _open(inputs: Sequence[str]) -> list[Source]:
    """Raises: ConfigError for what has no sense here; DataError."""
    from paceline.data.inputs import open_inputs, parse_input

    parsed = [parse_input(text) for text in inputs]
    if weighted := [spec.path for spec in parsed if spec.weight != 1]:
        raise ConfigError(f"input {weighted[0]} has a weight: give it to `paceline prepare`, which repeats rows")
    if len({spec.path if spec.on_hub else os.path.realpath(spec.path) for spec in parsed}) < len(parsed):
        raise ConfigError("an input is named twice: its rows would be answered twice")
    return open_inputs(parsed)


@dataclass
class Run:
    """One call of the command.

    Attributes:
        name: Of the tokenizer, as it was given.
        adapter: Folder of a LoRA adapter that is merged into a model on this machine.
        counts: Of the output folder.
        speed: Rows and tokens a second of this call.
    """

    out: Path
    name: str
    tokenizer: Any
    template: Path | None
    settings: AnswerSettings
    on_cut: Literal["drop", "keep"]
    sources: list[Source]
    limit: int | None
    quiet: bool
    adapter: str | None = None
    counts: Counts = field(init=False)
    speed: str = ""

    async def ask_server(
        self, url: str, model: str | None, concurrency: int, retries: int, any_template: bool
    ) -> signal.Signals | None:
        """Answer by a server; the signal that stopped it, or None."""
        from paceline.data.answer_folder import open_answers
        from paceline.data.server import ServerTarget

        server = ServerTarget(
            url,
            self.tokenizer,
            self.settings,
            model=model,
            retries=retries,
            concurrency=concurrency,
            any_template=any_template,
        )
        async with server:
            with open_answers(self.out, self._description("server", server.model)) as folder:
                folder.describe(server=server.facts())
                try:
                    return await self._answer_all(server, folder, concurrency)
                except ServerError as error:
                    raise ServerError(f"{error}; {self.how_to_go_on}") from error
                finally:
                    folder.describe(server=server.facts())

    async def ask_model(self, max_slots: int | None) -> signal.Signals | None:
        """Answer by a model on this machine; the signal that stopped it, or None."""
        import torch

        from paceline.data.answer_folder import open_answers
        from paceline.eval.generate import MAX_SLOTS, cache_budget
        from paceline.eval.local import LocalTarget
        from paceline.kernels.linear_cross_entropy import Head
        from paceline.kernels.packed_linear import pack_head, pack_layers
        from paceline.models.adapter import adapter_fingerprint, read_settings
        from paceline.models.loading import load_text_model, read_shape
        from paceline.plan.resolve import resolve_device

        device = resolve_device("auto")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        description = self._description("local", self.name) | {"dtype": str(dtype).removeprefix("torch.")}
        if self.adapter is not None:
            read_settings(self.adapter)  # before there is a folder
            description |= {"adapter": self.adapter, "adapter_fingerprint": adapter_fingerprint(self.adapter)}
        max_slots = max_slots or MAX_SLOTS[device.type]
        with open_answers(self.out, description) as folder:
            folder.describe(device=str(device))
            model = load_text_model(self.name, dtype, device, adapter=self.adapter)
            pack_layers(model, pack_head(Head(model.get_output_embeddings().weight)))  # on a CPU: 1.3 x tokens/s
            stop_ids = read_shape(self.name).eos_token_ids
            local = LocalTarget(
                model, self.tokenizer, stop_ids, self.settings, max_slots=max_slots, max_tokens=cache_budget(model)
            )
            if not local.can_refill:
                print("this kind of model cannot be refilled: batches run one after the other", file=sys.stderr)
            try:
                return await self._answer_all(local, folder, WAITING_PER_SLOT * max_slots)
            finally:
                local.close()

    async def _answer_all(self, answerer: Answerer, folder: AnswerFolder, concurrency: int) -> signal.Signals | None:
        from paceline.data.encoder import Encoder
        from paceline.data.regenerate import RecordStream
        from paceline.data.regenerate import regenerate as run_regenerate
        from paceline.data.templates import is_reasoning_mark

        self.counts = folder.counts
        stream = RecordStream(self.sources, folder.done, self.limit)
        progress = Progress(stream, folder, answerer, self.quiet)
        work = asyncio.create_task(
            run_regenerate(
                stream,
                answerer,
                folder,
                on_cut=self.on_cut,
                concurrency=concurrency,
                typed_control=Encoder(self.tokenizer, is_reasoning_mark).typed_control,
                on_answer=progress.count,
            )
        )
        shown = asyncio.create_task(progress.show())
        with stop_on_signals(work) as stopped_by:
            try:
                await work
            except asyncio.CancelledError:
                if not stopped_by:
                    raise
            finally:
                shown.cancel()
                await asyncio.wait([shown])
                self.speed = progress.speed
                folder.describe(finished=work.done() and not work.cancelled() and work.exception() is None)
        return stopped_by[0] if stopped_by else None

    def _description(self, engine: str, model: str) -> dict[str, Any]:
        """What regenerate.json says beside the counts."""
        from paceline.data.chat import template_hash
        from paceline.data.dataset import tokenizer_fingerprint

        return {
            "engine": engine,
            "model": model,
            "tokenizer": self.name,
            "tokenizer_fingerprint": tokenizer_fingerprint(self.tokenizer),
            "template_hash": template_hash(self.tokenizer),
            "sampling": asdict(self.settings),
            "on_cut": self.on_cut,
            "inputs": [source.provenance for source in self.sources],
            "versions": {
                "paceline": __version__,
                "python": platform.python_version(),
                **{name: _version(name) for name in ("torch", "transformers", "tokenizers", "openai")},
            },
        }

    @property
    def how_to_go_on(self) -> str:
        """For a person whose run ended early."""
        return f"{self.counts.num_done:,} rows are done, and the same command goes on with the others"

    def summary(self) -> list[str]:
        """What a person wants to know afterwards, and the next command."""
        counts = self.counts
        lines = [f"{counts.num_kept:,} of {counts.num_done:,} rows answered in {self.out}"]
        ids = "with the token ids as sampled"
        if counts.num_with_ids < counts.num_kept:
            text = counts.num_kept - counts.num_with_ids
            ids = f"{text:,} rows as TEXT ONLY, which `prepare` tokenizes again: not always as the target said it"
        lines.append(f"{counts.num_tokens:,} tokens in {counts.num_answers:,} answers, {self.speed}; {ids}")
        if counts.num_cut:
            lines.append(f"{counts.num_cut:,} rows end in an answer that the length limit cut (--on-cut keep)")
        if counts.left_out:
            lines.append(f"{counts.left_out.total():,} answered rows lack their later turns:")
            lines += [f"  {count:,} x {kind}" for kind, count in counts.left_out.most_common()]
        if counts.rejected:
            lines.append(f"{counts.rejected.total():,} rows rejected, listed in {self.out / 'rejected.jsonl'}:")
            lines += [f"  {count:,} x {kind}" for kind, count in counts.rejected.most_common()]
        command = ["paceline", "prepare", str(self.out), "--tokenizer", self.name]
        if self.template is not None:
            command += ["--template", str(self.template)]
        if self.settings.thinking is not None:  # `prepare` renders prompts as well
            command += ["--thinking", "on" if self.settings.thinking else "off"]
        return [*lines, f"next: {shlex.join([*command, '--out', 'DATA'])}"]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@contextlib.contextmanager
def stop_on_signals(work: asyncio.Task[Any]) -> Iterator[list[signal.Signals]]:
    """SIGINT and SIGTERM cancel a task, and stand in the list; a second one ends the process at once.

    Ending at once is safe: every line that is written is whole, or is cut off at the next start. Off the main thread
    nothing is heard.
    """
    loop = asyncio.get_running_loop()
    seen: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def handle(number: signal.Signals) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        with contextlib.suppress(OSError):  # nobody may read any more
            print(f"\n{number.name}: requests under way are dropped; once more ends at once", file=sys.stderr)
        work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)
    try:
        yield seen
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


class Progress:
    """What a person sees of a run: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, stream: RecordStream, folder: AnswerFolder, answerer: Answerer, quiet: bool) -> None:
        self._stream, self._folder, self._answerer = stream, folder, answerer
        self._quiet = quiet
        self._started = time.monotonic()
        self._num_tokens = 0

    def count(self, answer: Answer) -> None:
        """An answer has come."""
        self._num_tokens += answer.num_tokens

    async def show(self) -> None:
        """Draw until cancelled."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True, highlight=False)
        if self._folder.num_resumed and not self._quiet:
            self._say(f"going on: {self._folder.num_resumed:,} rows are done")
        if self._quiet or not console.is_terminal:
            while True:
                await asyncio.sleep(PLAIN_INTERVAL_S)
                if not self._quiet:
                    total = self._stream.estimated_total
                    self._say(f"{self._folder.counts.num_done:,}/{total if total else '?'} rows  {self.line}")
        columns = [BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}")]
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task("")
            while True:
                done, total = self._folder.counts.num_done, self._stream.estimated_total
                bar.update(task, completed=done, total=total, description=self.line)
                await asyncio.sleep(BAR_INTERVAL_S)

    @property
    def speed(self) -> str:
        """Rows and tokens a second since the start of this call."""
        seconds = max(time.monotonic() - self._started, 1e-6)
        num_tokens = getattr(self._answerer, "num_sampled", self._num_tokens)
        return f"{self._new_rows / seconds:.2f} rows/s, {num_tokens / seconds:,.0f} tok/s"

    @property
    def line(self) -> str:
        """Speed, time left, and what went wrong so far."""
        counts, total = self._folder.counts, self._stream.estimated_total
        parts = [self.speed]
        if total and self._new_rows:
            seconds = (time.monotonic() - self._started) / self._new_rows * max(total - counts.num_done, 0)
            parts.append(f"ETA {time.strftime('%H:%M:%S', time.gmtime(seconds))}" if seconds < 86400 else "ETA > 1 day")
        if retries := getattr(self._answerer, "num_retries", 0):
            parts.append(f"{retries:,} retries")
        if counts.rejected:
            parts.append(f"{counts.rejected.total():,} rejected")
        if counts.left_out:
            parts.append(f"{counts.left_out.total():,} without later turns")
        return "  ".join(parts)

    @property
    def _new_rows(self) -> int:
        return self._folder.counts.num_done - self._folder.num_resumed

    def _say(self, text: str) -> None:
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:  # nobody reads any more; the run matters more
            self._quiet = True
