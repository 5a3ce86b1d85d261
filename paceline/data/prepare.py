"""`paceline prepare`: conversation files to a data set folder that appears whole or not at all.

Lines go through `RowMaker` in chunks, here or in worker processes, and come back in input order; one `_Recorder`
writes rows and rejections and keeps the counts. What is held at any time is a bounded number of chunks.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import platform
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from paceline import __version__
from paceline.data.chat import (
    MIN_SUPERVISED,
    ChatTokenizer,
    TokenRow,
    load_tokenizer,
    longest_supervised_run,
    template_hash,
)
from paceline.data.dataset import (
    FORMAT,
    INFO_FILE,
    REJECTED_FILE,
    ROWS_FILE,
    TOKENIZER_DIR,
    DatasetInfo,
    DatasetWriter,
    tokenizer_fingerprint,
)
from paceline.data.readers import Line, Rejection, check_input, parse_line, read_lines
from paceline.errors import ConfigError, DataError
from paceline.files import staged_folder

CHUNK_LINES = 256
CHUNK_BYTES = 1 << 20
"""Lines and bytes after which a chunk is handed on; a longer line is a chunk of its own."""

WORKER_BYTES = 32 << 20
"""Input that earns one more worker process by default: starting one costs seconds."""

CHUNKS_PER_WORKER = 3
"""Chunks under way for each worker; more would only hold memory."""

TEXT_CHARACTERS = 200
"""Characters of a rejected line that are kept."""

NUM_EXAMPLES = 5
"""Rejected rows that a failed run prints."""

MIN_HISTOGRAM_BITS = 5
"""The first bin of the length histogram ends at 2^5 = 32 tokens; each next one ends at the double."""

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True)
class PrepareSettings:
    """What decides how conversations become rows.

    Attributes:
        tokenizer: Folder or hub id.
        template: File of a chat template to use in place of the tokenizer's own.
        max_length: Longest row in tokens.
        on_long: ``cut`` keeps the first `max_length` tokens of a longer row unchanged, ``drop`` rejects it.
        on_error: ``skip`` lists rejected rows, ``fail`` ends the run at the first.
        max_rejected: Share of the lines that may be rejected, 0 to 1.
        thinking: ``enable_thinking`` for the template; None leaves the template its default.
        workers: Processes; None: one per `WORKER_BYTES` of input, up to the number of cores.
    """

    tokenizer: str
    template: Path | None = None
    max_length: int = 3072
    on_long: Literal["cut", "drop"] = "cut"
    on_error: Literal["skip", "fail"] = "skip"
    max_rejected: float = 0.05
    thinking: bool | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.max_length < MIN_SUPERVISED:
            raise ConfigError(f"--max-length {self.max_length} is too small: at least {MIN_SUPERVISED} tokens")
        if not 0 <= self.max_rejected <= 1:
            raise ConfigError(f"--max-rejected {self.max_rejected} is not a share: 0 to 1, or 0% to 100%")
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers} is too few: at least 1")


@dataclass(frozen=True)
class Report:
    """What a run of `prepare` did; `prepare.json` holds it beside the data set's own section.

    Attributes:
        num_lines: Lines that are not blank.
        num_rejected: Lines of which nothing was kept.
        rejected: Those lines by kind of reason.
        dropped_turns: Turn rows left out of lines that were kept, by kind of reason.
        num_supervised_lost: Supervised tokens that the length policy cost.
        length_histogram: Rows by length: key k counts lengths in (k / 2, k], the first key from 1.
    """

    num_lines: int
    num_rejected: int
    rejected: dict[str, int]
    dropped_turns: dict[str, int]
    num_supervised_lost: int
    length_histogram: dict[int, int]


class _Row(NamedTuple):
    input_ids: np.ndarray
    loss_mask: np.ndarray
    conversation: int


@dataclass
class Outcome:
    """What became of one line.

    Attributes:
        rows: Kept rows.
        rejections: Why the line, or the turns of it that are not in `rows`, cannot be used.
        num_supervised_lost: Supervised tokens that the length policy cost.
    """

    rows: list[_Row] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    num_supervised_lost: int = 0


class RowMaker:
    """Lines to rows, under one tokenizer, template and length policy."""

    def __init__(self, chat: ChatTokenizer, max_length: int, on_long: Literal["cut", "drop"]) -> None:
        self._chat = chat
        self._max_length = max_length
        self._on_long = on_long

    def __call__(self, line: Line) -> Outcome:
        """Rows and rejections of a line; never raises for what a line holds."""
        outcome = Outcome()
        try:
            conversation = parse_line(line.raw)
            content_hash = conversation.hash
            candidates = self._chat.rows(conversation)
        except Rejection as rejection:
            outcome.rejections.append(rejection)
            return outcome
        for candidate in candidates:
            try:
                row = self._fit(candidate, outcome)
            except Rejection as rejection:
                outcome.rejections.append(_name_turn(rejection, candidate.turn) if len(candidates) > 1 else rejection)
            else:
                outcome.rows.append(_Row(row.input_ids, row.loss_mask, content_hash))
        return outcome

    def _fit(self, row: TokenRow, outcome: Outcome) -> TokenRow:
        """The row under the length policy, with something to learn in it; counts what the policy cost."""
        _check_supervised(row.loss_mask)
        length = len(row.input_ids)
        if length <= self._max_length:
            return row
        if self._on_long == "drop":
            outcome.num_supervised_lost += int(row.loss_mask.sum())
            raise Rejection("longer than max-length", f"{length} tokens, limit {self._max_length}")
        # Copies: a view would keep the whole row in memory for as long as the cut one.
        ids, mask = row.input_ids[: self._max_length].copy(), row.loss_mask[: self._max_length].copy()
        cut = TokenRow(ids, mask, row.turn)
        try:
            _check_supervised(cut.loss_mask)
        except Rejection as rejection:
            outcome.num_supervised_lost += int(row.loss_mask.sum())
            seen = f"cut from {length} to {self._max_length} tokens: {rejection.detail}"
            raise Rejection("nothing to learn within max-length", seen) from rejection
        outcome.num_supervised_lost += int(row.loss_mask[self._max_length :].sum())
        return cut


def _check_supervised(loss_mask: np.ndarray) -> None:
    """Raises: Rejection unless two supervised tokens follow each other somewhere."""
    if longest_supervised_run(loss_mask) >= MIN_SUPERVISED:
        return
    count = int(loss_mask.sum())
    if count < MIN_SUPERVISED:
        tokens = "token" if count == 1 else "tokens"
        raise Rejection(
            "too few supervised tokens", f"{count} supervised {tokens}, below the minimum of {MIN_SUPERVISED}"
        )
    raise Rejection("too few supervised tokens", f"none of {count} supervised tokens follows another")


def _name_turn(rejection: Rejection, turn: int) -> Rejection:
    return Rejection(rejection.kind, f"row of assistant turn {turn}: {rejection.detail}")


def prepare(
    inputs: Sequence[Path], out: Path, settings: PrepareSettings, on_progress: Progress | None = None
) -> tuple[DatasetInfo, Report]:
    """Make a data set folder from JSONL files of conversations.

    Args:
        inputs: Files, read in this order.
        out: Folder to make; an existing data set there is replaced once the new one is complete.
        settings: See `PrepareSettings`.
        on_progress: Called now and then with bytes done and bytes in all.
    Raises: DataError if an input, the tokenizer or the output cannot be used, if no row or too few are usable, or at
        the first bad row under ``on_error="fail"``; `out` is then as it was.
    """
    total_bytes = sum(check_input(path) for path in inputs)
    out = out.resolve()
    tokenizer = load_tokenizer(settings.tokenizer, settings.template)
    workers = settings.workers or _default_workers(total_bytes)
    chunks = _chunks(chain.from_iterable(read_lines(path) for path in inputs))
    results = _run_here(chunks, tokenizer, settings) if workers == 1 else _run_pool(chunks, settings, workers)
    try:
        _check_output(out)
        with staged_folder(out) as folder:
            with (
                closing(_Recorder(folder, stop_at_first=settings.on_error == "fail")) as recorder,
                closing(results),
            ):
                done = 0
                for chunk, outcomes in results:
                    for line, outcome in zip(chunk, outcomes, strict=True):
                        recorder.add(line, outcome)
                    done += sum(len(line.raw) + 1 for line in chunk)
                    if on_progress is not None:
                        on_progress(min(done, total_bytes), total_bytes)
                report = recorder.finish(settings.max_rejected)
            tokenizer.save_pretrained(str(folder / TOKENIZER_DIR))
            info = _describe(recorder.writer, tokenizer, settings)
            _write_info(folder, info, report, inputs, settings)
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise DataError(f"data set {out} could not be written: {what}; nothing was published") from error
    return info, report


class _Recorder:
    """Writes rows and rejections in input order and keeps the counts."""

    def __init__(self, folder: Path, *, stop_at_first: bool) -> None:
        self.writer = DatasetWriter(folder)
        self._rejected_file = (folder / REJECTED_FILE).open("w", encoding="utf-8")
        self._stop_at_first = stop_at_first
        self._num_lines = 0
        self._num_supervised_lost = 0
        self._rejected: Counter[str] = Counter()
        self._dropped_turns: Counter[str] = Counter()
        self._histogram: Counter[int] = Counter()
        self._examples: list[str] = []

    def add(self, line: Line, outcome: Outcome) -> None:
        """Record one line. Raises: DataError at a rejection if the run stops at the first."""
        self._num_lines += 1
        self._num_supervised_lost += outcome.num_supervised_lost
        source = f"{line.file}:{line.number}"
        for row in outcome.rows:
            self.writer.add(row.input_ids, row.loss_mask, source, row.conversation)
            self._histogram[1 << max((len(row.input_ids) - 1).bit_length(), MIN_HISTOGRAM_BITS)] += 1
        for rejection in outcome.rejections:
            if self._stop_at_first:
                raise DataError(f"{source}: {rejection.reason}; nothing was published (--on-error fail)")
            self._list(line, rejection)
        if outcome.rows:
            self._dropped_turns.update(rejection.kind for rejection in outcome.rejections)
        else:
            self._rejected[outcome.rejections[0].kind] += 1
            if len(self._examples) < NUM_EXAMPLES:
                self._examples.append(f"  {source}: {outcome.rejections[0].reason}")

    def finish(self, max_rejected: float) -> Report:
        """Close the files. Raises: DataError if no row was kept, or a larger share of lines than this was rejected."""
        num_rejected = self._rejected.total()
        if not self.writer.num_rows:
            raise DataError(f"no usable rows remain: all {num_rejected} lines were rejected\n{self._explain()}")
        if num_rejected > max_rejected * self._num_lines:
            raise DataError(
                f"{num_rejected} of {self._num_lines} lines ({num_rejected / self._num_lines:.1%}) were rejected, more "
                f"than --max-rejected {max_rejected * 100:g}%; nothing was published\n{self._explain()}\n"
                "If the rest is what you want, raise the limit, for example --max-rejected 100%."
            )
        self.writer.close()
        return Report(
            num_lines=self._num_lines,
            num_rejected=num_rejected,
            rejected=dict(self._rejected.most_common()),
            dropped_turns=dict(self._dropped_turns.most_common()),
            num_supervised_lost=self._num_supervised_lost,
            length_histogram=dict(sorted(self._histogram.items())),
        )

    def close(self) -> None:
        """Let go of the files, finished or not."""
        self._rejected_file.close()
        self.writer.abort()

    def _list(self, line: Line, rejection: Rejection) -> None:
        text = line.raw[: 4 * TEXT_CHARACTERS].decode("utf-8", errors="replace")[:TEXT_CHARACTERS]
        record = {"file": line.file, "line": line.number, "reason": rejection.reason, "text": text}
        self._rejected_file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def _explain(self) -> str:
        counts = [f"  {count} x {kind}" for kind, count in self._rejected.most_common()]
        return "\n".join(["by reason:", *counts, "the first of them:", *self._examples])


def _chunks(lines: Iterable[Line]) -> Iterator[list[Line]]:
    chunk: list[Line] = []
    size = 0
    for line in lines:
        if chunk and (len(chunk) >= CHUNK_LINES or size + len(line.raw) > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(line)
        size += len(line.raw)
    if chunk:
        yield chunk


def _run_here(
    chunks: Iterable[list[Line]], tokenizer: Any, settings: PrepareSettings
) -> Generator[tuple[list[Line], list[Outcome]]]:
    make_rows = RowMaker(ChatTokenizer(tokenizer, settings.thinking), settings.max_length, settings.on_long)
    for chunk in chunks:
        yield chunk, [make_rows(line) for line in chunk]


def _run_pool(
    chunks: Iterable[list[Line]], settings: PrepareSettings, workers: int
) -> Generator[tuple[list[Line], list[Outcome]]]:
    """The same over worker processes: results in input order, a bounded number of chunks under way.

    Workers are spawned: tokenizers run threads, which a fork would copy in an unknown state.
    """
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(settings,))
    waiting: deque[tuple[list[Line], Future[list[Outcome]]]] = deque()
    source = iter(chunks)
    try:
        while True:
            for chunk in islice(source, workers * CHUNKS_PER_WORKER - len(waiting)):
                waiting.append((chunk, executor.submit(_work, chunk)))
            if not waiting:
                return
            chunk, future = waiting.popleft()
            yield chunk, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process ended without a word, probably for want of memory: use fewer --workers"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


_worker_maker: RowMaker | None = None
"""The row maker of a worker process; tokenizers are too large to travel with every chunk."""


def _start_worker(settings: PrepareSettings) -> None:
    global _worker_maker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker a core already
    tokenizer = load_tokenizer(settings.tokenizer, settings.template)
    _worker_maker = RowMaker(ChatTokenizer(tokenizer, settings.thinking), settings.max_length, settings.on_long)


def _work(chunk: list[Line]) -> list[Outcome]:
    assert _worker_maker is not None
    return [_worker_maker(line) for line in chunk]


def _default_workers(total_bytes: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(total_bytes // WORKER_BYTES, cores))


def _describe(writer: DatasetWriter, tokenizer: Any, settings: PrepareSettings) -> DatasetInfo:
    return DatasetInfo(
        format=FORMAT,
        num_rows=writer.num_rows,
        num_conversations=writer.num_conversations,
        num_tokens=writer.num_tokens,
        num_supervised=writer.num_supervised,
        longest=writer.longest,
        vocab_size=len(tokenizer),
        tokenizer=settings.tokenizer,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        template_hash=template_hash(tokenizer),
        thinking=settings.thinking,
        max_length=settings.max_length,
        on_long=settings.on_long,
        fingerprint=writer.fingerprint,
    )


def _write_info(
    folder: Path, info: DatasetInfo, report: Report, inputs: Sequence[Path], settings: PrepareSettings
) -> None:
    content = {
        "dataset": info.model_dump(),
        "report": asdict(report),
        "settings": {**asdict(settings), "inputs": [str(path) for path in inputs]},
        "versions": {
            "paceline": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("transformers", "tokenizers", "pyarrow", "numpy")},
        },
    }
    text = json.dumps(content, indent=1, ensure_ascii=False, default=str)
    (folder / INFO_FILE).write_text(text + "\n", encoding="utf-8")


def _check_output(out: Path) -> None:
    """Raises: DataError if something other than a data set of ours is where the new one should go."""
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"output {out} exists and is no folder: choose another --out")
    found = {path.name for path in out.iterdir()}
    foreign = found - {ROWS_FILE, INFO_FILE, REJECTED_FILE, TOKENIZER_DIR}
    if found and (foreign or INFO_FILE not in found):
        what = f"holds {sorted(foreign)[0]}" if foreign else f"has no {INFO_FILE}"
        raise DataError(f"output {out} exists and is not only a data set (it {what}): choose another --out")
