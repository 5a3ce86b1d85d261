"""`paceline prepare`: conversations to a data set folder that appears whole or not at all.

Chunks of records go through a `RowMaker`, here or in worker processes, and come back in input order; one `_Recorder`
writes rows and rejections and keeps the counts. What is held at any time is a bounded number of chunks.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import platform
import re
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from paceline import __version__
from paceline.data.chat import MIN_SUPERVISED, ChatTokenizer, find_stop_ids, load_tokenizer, template_hash
from paceline.data.dataset import (
    INFO_FILE,
    PLANS_DIR,
    REJECTED_FILE,
    ROWS_FILE,
    TOKENIZER_DIR,
    TOKENS_FILE,
    DatasetInfo,
    DatasetWriter,
    tokenizer_fingerprint,
)
from paceline.data.inputs import Input, Source, open_inputs
from paceline.data.packing import plan_epoch
from paceline.data.reading import Chunk, shown_path
from paceline.data.rows import Outcome, RowMaker
from paceline.errors import ConfigError, DataError
from paceline.files import staged_folder, writer_of

WORKER_BYTES = 32 << 20
"""Input that earns one more worker process by default: starting one costs seconds."""

CHUNKS_PER_WORKER = 3
"""Chunks under way for each worker; more would only hold memory."""

NUM_EXAMPLES = 5
"""Rejected records that a failed run prints."""

MIN_HISTOGRAM_BITS = 5
"""The first bin of the length histogram ends at 2^5 = 32 tokens; each next one ends at the double."""

FILL_TOKENS = 12_288
"""Batch size for which the report tells how well rows pack: the one that training chooses on a GPU."""

FILL_ROWS = 100_000
"""Rows that this is measured on; more would cost seconds and tell the same."""

FILL_BATCHES = 20
"""Fewer batches than this tell nothing about how well rows pack."""

Progress = Callable[[int, int | None], None]
"""Called with bytes done and bytes in all; None while the latter is unknown."""


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
        thinking: Switches the template's reasoning, see `template_options`; None leaves it its default.
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


@dataclass
class InputReport:
    """What became of one input.

    Attributes:
        source: Where its records come from and what they may be used under.
        weight: How often each conversation is used.
        num_lines: Records: lines that are not blank, rows of a table.
        num_rejected: Records of which nothing was kept.
        num_left_out: Records that the weight left out.
        num_rows: Rows made of it.
        num_tokens: Tokens of these rows.
        num_supervised: Supervised ones among them.
        ignored: Files of a folder that were not read: how many, by reason.
    """

    source: dict[str, Any]
    weight: float
    num_lines: int = 0
    num_rejected: int = 0
    num_left_out: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    ignored: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What a run of `prepare` did; `prepare.json` holds it beside the data set's own section.

    Attributes:
        num_lines: Records of all inputs: lines that are not blank, rows of tables.
        num_rejected: Records of which nothing was kept.
        rejected: Those by kind of reason.
        dropped_turns: Turn rows left out of records that were kept, by kind of reason.
        num_left_out: Records that the weights of inputs left out.
        kinds: Kept records by what they held: conversations, texts, token rows.
        num_supervised_lost: Supervised tokens that the length policy cost.
        length_histogram: Rows by length: key k counts lengths in (k / 2, k], the first key from 1.
        fill: Mean share of a batch of `fill_tokens` that holds rows, measured on at most `FILL_ROWS` rows; None where
            they make fewer than `FILL_BATCHES` batches, of which the last alone would decide.
        fill_tokens: Tokens of a batch for which `fill` holds.
        inputs: What became of each input.
    """

    num_lines: int
    num_rejected: int
    rejected: dict[str, int]
    dropped_turns: dict[str, int]
    num_left_out: int
    kinds: dict[str, int]
    num_supervised_lost: int
    length_histogram: dict[int, int]
    fill: float | None
    fill_tokens: int
    inputs: list[InputReport]


def prepare(
    inputs: Sequence[Input | Path], out: Path, settings: PrepareSettings, on_progress: Progress | None = None
) -> tuple[DatasetInfo, Report]:
    """Make a data set folder from conversations.

    Args:
        inputs: Read in this order.
        out: Folder to make; an existing data set there is replaced once the new one is complete.
        settings: See `PrepareSettings`.
        on_progress: Called now and then with bytes done and bytes in all.
    Raises: DataError if an input, the tokenizer or the output cannot be used, if no row or too few are usable, or at
        the first bad row under ``on_error="fail"``; `out` is then as it was.
    """
    sources = open_inputs([spec if isinstance(spec, Input) else Input(str(spec)) for spec in inputs])
    sizes = [source.num_bytes for source in sources]
    total_bytes = None if None in sizes else sum(filter(None, sizes))
    out = _check_output(out)
    tokenizer = load_tokenizer(settings.tokenizer, settings.template)
    _check_regenerated(sources, tokenizer, settings.thinking)
    stop_ids = find_stop_ids(tokenizer)
    workers = settings.workers or _default_workers(total_bytes)
    work = ((number, chunk) for number, source in enumerate(sources) for chunk in source.chunks())
    weights = [source.input.weight for source in sources]
    make_rows = _row_maker(tokenizer, settings, stop_ids)  # here in any case: a broken template is an error at once
    if workers == 1:
        results = _run_here(work, weights, make_rows)
    else:
        results = _run_pool(work, weights, settings, stop_ids, workers)
    try:
        with staged_folder(out) as folder:
            with closing(_Recorder(folder, sources, settings)) as recorder, closing(results):
                done = 0
                for task, outcome in results:
                    recorder.add(task, outcome)
                    done += task.num_bytes
                    if on_progress is not None:
                        on_progress(done, total_bytes)
                report = recorder.finish()
            _save_tokenizer(tokenizer, folder / TOKENIZER_DIR)
            info = _describe(recorder.writer, tokenizer, settings)
            _write_info(folder, info, report, settings, stop_ids)
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise DataError(f"data set {out} could not be written: {what}; nothing was published") from error
    return info, report


class _Task(NamedTuple):
    """A chunk that was handed to a worker."""

    source: int
    file: str
    num_bytes: int


class _Recorder:
    """Writes rows and rejections in input order and keeps the counts."""

    def __init__(self, folder: Path, sources: Sequence[Source], settings: PrepareSettings) -> None:
        self.writer = DatasetWriter(folder)
        self._rejected_file = (folder / REJECTED_FILE).open("w", encoding="utf-8")
        self._settings = settings
        self._sources = sources
        self._inputs = [InputReport(source.provenance, source.input.weight) for source in sources]
        self._lengths = np.zeros(0, dtype=np.int64)  # rows by their exact length
        self._num_supervised_lost = 0
        self._kinds: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._dropped_turns: Counter[str] = Counter()
        self._examples: list[str] = []

    def add(self, task: _Task, outcome: Outcome) -> None:
        """Record one chunk. Raises: DataError at a rejection if the run stops at the first."""
        if outcome.reasons and self._settings.on_error == "fail":
            raise DataError(f"{outcome.reasons[0]}; nothing was published (--on-error fail)")
        rows, report = outcome.rows, self._inputs[task.source]
        self.writer.add(rows, task.file)
        self._rejected_file.writelines(line + "\n" for line in outcome.listed)
        report.num_lines += outcome.num_records
        report.num_rejected += outcome.rejected.total()
        report.num_left_out += outcome.num_left_out
        report.num_rows += len(rows)
        report.num_tokens += len(rows.input_ids)
        report.num_supervised += int(np.count_nonzero(rows.loss_mask))
        counts = np.bincount(rows.lengths, minlength=len(self._lengths))
        counts[: len(self._lengths)] += self._lengths
        self._lengths = counts
        self._num_supervised_lost += outcome.num_supervised_lost
        self._kinds += outcome.kinds
        self._rejected += outcome.rejected
        self._dropped_turns += outcome.dropped_turns
        self._examples = (self._examples + outcome.reasons)[:NUM_EXAMPLES]

    def finish(self) -> Report:
        """Close the files. Raises: DataError if no row was kept, or too large a share of the records was rejected."""
        num_lines = sum(report.num_lines for report in self._inputs)
        num_used = num_lines - sum(report.num_left_out for report in self._inputs)
        num_rejected = self._rejected.total()
        max_rejected = self._settings.max_rejected
        if not self.writer.num_rows:
            left_out = sum(report.num_left_out for report in self._inputs)
            beside = f", {left_out} left out by weight" if left_out else ""
            why = f"\n{self._explain()}" if num_rejected else ""
            raise DataError(f"no usable rows remain: all {num_rejected} lines were rejected{beside}{why}")
        if num_rejected > max_rejected * num_used:
            raise DataError(
                f"{num_rejected} of {num_used} lines ({num_rejected / num_used:.1%}) were rejected, more "
                f"than --max-rejected {max_rejected * 100:g}%; nothing was published\n{self._explain()}\n"
                "If the rest is what you want, raise the limit, for example --max-rejected 100%."
            )
        self.writer.close()
        self._rejected_file.close()  # what a full disk kept back is an error here
        for report, source in zip(self._inputs, self._sources, strict=True):
            report.ignored = dict(source.ignored)
        fill_tokens = max(FILL_TOKENS, self.writer.longest)
        return Report(
            num_lines=num_lines,
            num_rejected=num_rejected,
            rejected=dict(self._rejected.most_common()),
            dropped_turns=dict(self._dropped_turns.most_common()),
            num_left_out=sum(report.num_left_out for report in self._inputs),
            kinds=dict(self._kinds.most_common()),
            num_supervised_lost=self._num_supervised_lost,
            length_histogram=self._histogram(),
            fill=self._fill(fill_tokens),
            fill_tokens=fill_tokens,
            inputs=self._inputs,
        )

    def close(self) -> None:
        """Let go of the files, finished or not."""
        try:
            self._rejected_file.close()
        finally:
            self.writer.abort()

    def _histogram(self) -> dict[int, int]:
        bins: Counter[int] = Counter()
        for length in np.flatnonzero(self._lengths).tolist():
            bins[1 << max((length - 1).bit_length(), MIN_HISTOGRAM_BITS)] += int(self._lengths[length])
        return dict(sorted(bins.items()))

    def _fill(self, capacity: int) -> float | None:
        """Mean share of a batch that holds rows, over rows of every k-th rank by length where there are many."""
        lengths = np.repeat(np.arange(len(self._lengths)), self._lengths)
        lengths = lengths[:: -(-len(lengths) // FILL_ROWS)]
        num_tokens = int(lengths.sum())
        if num_tokens < FILL_BATCHES * capacity:
            return None
        return num_tokens / (plan_epoch(lengths, capacity, seed=0, epoch=0).num_batches * capacity)

    def _explain(self) -> str:
        counts = [f"  {count} x {kind}" for kind, count in self._rejected.most_common()]
        examples = [f"  {example}" for example in self._examples]
        return "\n".join(["by reason:", *counts, "the first of them:", *examples])


def _row_maker(tokenizer: Any, settings: PrepareSettings, stop_ids: list[int]) -> RowMaker:
    return RowMaker(ChatTokenizer(tokenizer, settings.thinking, stop_ids), settings.max_length, settings.on_long)


def _run_here(
    work: Iterable[tuple[int, Chunk]], weights: Sequence[float], make_rows: RowMaker
) -> Generator[tuple[_Task, Outcome]]:
    for source, chunk in work:
        yield _Task(source, chunk.file, chunk.num_bytes), make_rows(chunk, weights[source])


def _run_pool(
    work: Iterable[tuple[int, Chunk]],
    weights: Sequence[float],
    settings: PrepareSettings,
    stop_ids: list[int],
    workers: int,
) -> Generator[tuple[_Task, Outcome]]:
    """The same over worker processes: results in input order, a bounded number of chunks under way.

    Workers are spawned: tokenizers run threads, which a fork would copy in an unknown state.
    """
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(settings, stop_ids)
    )
    waiting: deque[tuple[_Task, Future[Outcome]]] = deque()
    left = iter(work)
    try:
        while True:
            for source, chunk in islice(left, workers * CHUNKS_PER_WORKER - len(waiting)):
                task = _Task(source, chunk.file, chunk.num_bytes)
                with _signals_wait():
                    waiting.append((task, executor.submit(_work, chunk, weights[source])))
            if not waiting:
                return
            task, future = waiting.popleft()
            yield task, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process ended without a word, probably for want of memory: use fewer --workers"
        ) from error
    except BaseException:  # an error, an interrupt, the end of whoever asked: no chunk may hold that up
        for process in list((executor._processes or {}).values()):
            process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Put off SIGINT and SIGTERM while workers are started, which show a traceback when that breaks off half way.

    The workers inherit SIGINT as blocked: a terminal sends it to them as well, and the parent decides.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)

    def remember(number: int, _frame: Any) -> None:
        came.append(number)

    handlers = {number: signal.signal(number, remember) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])


_worker_maker: RowMaker | None = None
"""The row maker of a worker process; tokenizers are too large to travel with every chunk."""


def _start_worker(settings: PrepareSettings, stop_ids: list[int]) -> None:
    global _worker_maker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker a core already
    _worker_maker = _row_maker(load_tokenizer(settings.tokenizer, settings.template), settings, stop_ids)


def _end_with_parent() -> None:
    """A parent that was killed cannot tell its workers, which would wait for the next chunk for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(chunk: Chunk, weight: float) -> Outcome:
    assert _worker_maker is not None
    return _worker_maker(chunk, weight)


def _default_workers(total_bytes: int | None) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if total_bytes is None else max(1, min(total_bytes // WORKER_BYTES, cores))


def _check_regenerated(sources: Sequence[Source], tokenizer: Any, thinking: bool | None) -> None:
    """Raises: DataError if answers were made with another tokenizer, whose ids mean other text, or asked otherwise."""
    ours = {
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "template_hash": template_hash(tokenizer),
        "thinking": thinking,
    }
    for source in sources:
        made_with = source.provenance.get("regenerated", {})
        made_with = {"thinking": made_with.get("sampling", {}).get("thinking"), **made_with}
        for name, here in ours.items() if "tokenizer_fingerprint" in made_with else ():
            there = made_with.get(name)
            if there != here:
                raise DataError(
                    f"input {source.input.path} was regenerated with another {name} ({_short(there)}, here "
                    f"{_short(here)}): give prepare the same --tokenizer, --template and --thinking"
                )


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Keep a copy. Raises: OSError, also where the library has a bare exception for a disk that is full."""
    try:
        tokenizer.save_pretrained(str(folder))
    except OSError:
        raise
    except Exception as error:
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, str(error)) from error


def _describe(writer: DatasetWriter, tokenizer: Any, settings: PrepareSettings) -> DatasetInfo:
    return writer.describe(
        vocab_size=len(tokenizer),
        tokenizer=settings.tokenizer,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        template_hash=template_hash(tokenizer),
        thinking=settings.thinking,
        max_length=settings.max_length,
        on_long=settings.on_long,
    )


def _write_info(
    folder: Path, info: DatasetInfo, report: Report, settings: PrepareSettings, stop_ids: list[int]
) -> None:
    content = {
        "dataset": info.model_dump(),
        "report": asdict(report),
        "settings": {**asdict(settings), "stop_ids": stop_ids},
        "versions": {
            "paceline": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("transformers", "tokenizers", "pyarrow", "numpy")},
        },
    }
    text = json.dumps(content, indent=1, ensure_ascii=False, default=str)
    (folder / INFO_FILE).write_text(text + "\n", encoding="utf-8")


def _check_output(out: Path) -> Path:
    """The folder to make, with links resolved.

    Raises: DataError if it cannot be one, if something other than a data set of ours is there, or if another process
        is making it.
    """
    try:
        out = out.resolve()
        str(out).encode()
    except (OSError, RuntimeError, UnicodeEncodeError) as error:  # links in a circle, a name that is no text
        raise DataError(f"output {shown_path(out)} cannot be a folder: choose another --out") from error
    if out == Path.cwd() or out in Path.cwd().parents:
        raise DataError(f"output {out} is the folder that you are in: choose another --out")
    if os.path.ismount(out):
        raise DataError(f"output {out} is a mount point, which cannot be replaced: choose a folder in it as --out")
    if other := writer_of(out):
        raise DataError(f"output {out} is being made by process {other}: wait for it, or choose another --out")
    if not out.exists():
        return out
    if not out.is_dir():
        raise DataError(f"output {out} exists and is no folder: choose another --out")
    found = {path.name for path in out.iterdir()}
    foreign = found - {ROWS_FILE, INFO_FILE, REJECTED_FILE, TOKENS_FILE, TOKENIZER_DIR, PLANS_DIR}
    if found and (foreign or INFO_FILE not in found):
        what = f"holds {sorted(foreign)[0]}" if foreign else f"has no {INFO_FILE}"
        raise DataError(f"output {out} exists and is not only a data set (it {what}): choose another --out")
    return out
