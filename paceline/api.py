"""Every verb as a function: what the command line does, in this process.

    from paceline import api
    api.prepare("answers", "data", tokenizer=MODEL)
    api.train({"target": {"path": MODEL}, "data": {"path": "data"}, "run": {"dir": "runs/drafter"}})
    print(api.evaluate(MODEL, "runs/drafter")["acceptance_length"])
    api.export("runs/drafter", "drafter")

Arguments are the options of the commands, and so are the defaults; errors are those of `paceline.errors`, whose text
says what was seen, what was wanted and what to change. Nothing is printed but by logging. Heavy packages are imported
when a function is called. docs/python.md has examples that run.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from paceline.cli.check import CheckReport
    from paceline.config import RunConfig
    from paceline.data.dataset import DatasetInfo
    from paceline.data.prepare import Report as PrepareReport
    from paceline.profiling.diff import Diff as AttachDiff
    from paceline.profiling.evidence import Report as AttachReport
    from paceline.train.loop import TrainReport

T = TypeVar("T")
PathLike = str | Path
Run = Mapping[str, Any]
"""Sections of a run file: ``{"optim": {"lr": 3e-4}}``."""


def prepare(
    inputs: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    tokenizer: PathLike,
    template: PathLike | None = None,
    max_length: int = 3072,
    on_long: Literal["cut", "drop"] = "cut",
    on_error: Literal["skip", "fail"] = "skip",
    max_rejected: float = 0.05,
    thinking: bool | None = None,
    workers: int | None = None,
) -> tuple[DatasetInfo, PrepareReport]:
    """Turn conversations into a data set, as `paceline prepare` does.

    Args:
        inputs: Files, folders or ``hf:`` names, with ``,weight=W`` and the like as wanted.
        out: Folder to make; an old data set there is replaced.
        max_rejected: Largest share of lines that may be rejected, 0 to 1.
    Returns: what the data set holds, and what became of the lines.
    Raises: DataError, ConfigError.
    """
    from paceline.data.inputs import parse_input
    from paceline.data.prepare import PrepareSettings
    from paceline.data.prepare import prepare as run_prepare

    settings = PrepareSettings(
        tokenizer=str(tokenizer),
        template=None if template is None else Path(template),
        max_length=max_length,
        on_long=on_long,
        on_error=on_error,
        max_rejected=max_rejected,
        thinking=thinking,
        workers=workers,
    )
    given = [inputs] if isinstance(inputs, str | Path) else inputs
    return run_prepare([parse_input(str(each)) for each in given], Path(out), settings)


def regenerate(
    inputs: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    target: PathLike | None = None,
    adapter: PathLike | None = None,
    server: str | None = None,
    tokenizer: PathLike | None = None,
    model: str | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    max_new_tokens: int = 2048,
    on_cut: Literal["drop", "keep"] = "drop",
    thinking: bool | None = None,
    template: PathLike | None = None,
    any_template: bool = False,
    concurrency: int | None = None,
    seed: int = 0,
    limit: int | None = None,
    retries: int = 5,
) -> dict[str, Any]:
    """Let the target answer the conversations itself, as `paceline regenerate` does; a folder begun earlier is gone on
    with. Ctrl-C drops what is under way, if this is the main thread; the same call then goes on.

    Args:
        inputs: As of `prepare`, without weights.
        target: A model run here; or `server`, the URL of one that is served, with its `tokenizer`.
        adapter: Folder of a LoRA adapter that is merged into `target`.
    Returns: the record that ``--json`` prints: ``finished``, and counts of rows, answers and tokens.
    Raises: ConfigError, DataError, ServerError, ModelError.
    """
    from paceline.cli.regenerate import answer_inputs

    given = [inputs] if isinstance(inputs, str | Path) else inputs

    answered = answer_inputs(
        [str(each) for each in given],
        Path(out),
        server=server,
        tokenizer=None if tokenizer is None else str(tokenizer),
        model=model,
        target=None if target is None else str(target),
        adapter=None if adapter is None else str(adapter),
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        on_cut=on_cut,
        thinking=thinking,
        template=None if template is None else Path(template),
        any_template=any_template,
        concurrency=concurrency,
        seed=seed,
        limit=limit,
        retries=retries,
        quiet=True,
    )
    run, ending = _run(answered)
    return {"out": str(out), "finished": ending is None, **run.counts.as_dict()}


def rows(folder: PathLike, wanted: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a data set with their text, as `paceline inspect --json` prints them.

    Args:
        wanted: Numbers of rows; None: all.
    Returns: for each ``row``, ``source``, ``input_ids``, ``loss_mask`` and ``text``.
    Raises: DataError.
    """
    from paceline.data.dataset import Dataset
    from paceline.data.inspect import load_own_tokenizer, row_record
    from paceline.errors import DataError

    dataset = Dataset.open(folder)
    numbers = range(len(dataset)) if wanted is None else wanted
    if wrong := [row for row in numbers if not 0 <= row < len(dataset)]:
        raise DataError(f"row {wrong[0]}: {folder} has rows 0 to {len(dataset) - 1}")
    tokenizer = load_own_tokenizer(dataset, Path(folder))
    return (row_record(dataset, tokenizer, row) for row in numbers)


def train(
    run: PathLike | Run | RunConfig,
    overrides: Sequence[str] = (),
    *,
    on_step: Callable[[dict[str, Any]], None] = lambda line: None,
    profile_interval: float | None = None,
    allow_change: Sequence[str] = (),
) -> TrainReport:
    """Train a drafter, or go on with the run that is in its folder, as `paceline train` does.

    Ctrl-C and SIGTERM stop it after the step under way, if this is the main thread; the same call then goes on.

    Args:
        run: A run file, its content, or a configuration.
        overrides: ``section.key=value``.
        on_step: Called with each line of ``metrics.jsonl``.
    Raises: PacelineError of any kind; the run folder then holds the last complete step.
    """
    from paceline.cli.progress import TrainProgress
    from paceline.cli.train import start_or_resume

    class Steps(TrainProgress):
        def step(self, line: dict[str, Any], total_steps: int) -> None:
            on_step(line)

    interval = None if profile_interval is None else str(profile_interval)
    return start_or_resume(_config_of(run, overrides), Steps(quiet=True), interval, allow_change)


def cache(
    run: PathLike | Run | RunConfig,
    out: PathLike | None = None,
    overrides: Sequence[str] = (),
    *,
    dtype: Literal["target", "bfloat16", "fp8"] = "target",
    shard_mib: int | None = None,
    on_tokens: Callable[[int], object] = lambda count: None,
) -> dict[str, Any]:
    """Write a target's features to disk, as `paceline cache` does: runs with ``target.cache`` then need no target.

    Ctrl-C and SIGTERM stop it after the row under way, if this is the main thread; the same call then goes on.

    Args:
        run: The run to come: a run file, its content, or a configuration.
        out: Folder of the cache, by default the run's ``target.cache``; one begun earlier is gone on with.
        on_tokens: Told how many tokens have been made since it was last called.
    Returns: the record that ``--json`` prints: ``finished``, and the cache's manifest.
    Raises: ConfigError, DataError, ModelError; complete shards are kept.
    """
    from paceline.cli.cache import cache_features

    size = None if shard_mib is None else shard_mib << 20
    return cache_features(
        _config_of(run, overrides), None if out is None else Path(out), dtype, size, on_tokens=on_tokens
    )


def evaluate(
    target: PathLike,
    draft: PathLike,
    prompts: PathLike | Sequence[PathLike] | None = None,
    *,
    limit: int | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    block_sizes: Sequence[int] | None = (),
    batch: int | None = None,
    draft_sampling: Literal["greedy", "sampled"] = "greedy",
    verify_threshold: float = 0.0,
    verify: Literal["all", "auto"] = "all",
    thinking: bool | None = None,
    ngram: bool = True,
    device: str = "auto",
    gpus_per_target: int = 1,
    adapter: PathLike | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Decode prompts plainly, with n-gram drafts and with a drafter, as `paceline eval` does.

    Args:
        draft: Exported drafter, run folder or checkpoint.
        prompts: JSONL files; None: the short ones that come with Paceline.
        block_sizes: Slots of a block to measure; empty: those trained; None: from 2 up.
        gpus_per_target: GPUs that the target's layers are split over: `device` and those that follow it.
        adapter: Folder of a LoRA adapter that is merged into the target.
    Returns: the record that ``--json`` writes: ``acceptance_length``, ``speedup``, ``lossless`` and more.
    Raises: ModelError, DataError, CheckpointError, ConfigError.
    """
    from paceline.cli.evaluate import evaluate_drafter
    from paceline.eval.evaluate import read_prompts, sample_prompts

    named = [] if prompts is None else [prompts] if isinstance(prompts, str | Path) else list(prompts)
    files = [Path(each) for each in named] or [sample_prompts()]
    record = evaluate_drafter(
        str(target),
        Path(draft),
        read_prompts(files, limit),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        block_sizes=block_sizes,
        batch=batch,
        draft_sampling=draft_sampling,
        verify_threshold=verify_threshold,
        verify=verify,
        thinking=thinking,
        ngram=ngram,
        device=device,
        gpus_per_target=gpus_per_target,
        adapter=None if adapter is None else str(adapter),
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    record["prompt_files"] = [str(file) for file in files] if named else ["those that come with Paceline"]
    return record


def export(
    source: PathLike,
    out: PathLike,
    *,
    layout: Literal["zlab", "speculators"] = "zlab",
    target: PathLike | None = None,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    license_id: str | None = None,
    auto_map: bool = False,
    run_target: bool = True,
    trust_remote_code: bool = False,
) -> Path:
    """Write a trained drafter as a folder that inference engines load, as `paceline export` does.

    Args:
        source: Run folder (its best checkpoint) or checkpoint.
    Returns: the folder.
    Raises: ModelError, CheckpointError, ConfigError.
    """
    from paceline.cli.evaluate import export_drafter, load_any_drafter
    from paceline.cli.provenance import provenance_of

    name = None if target is None else str(target)
    folder, _ = export_drafter(
        load_any_drafter(Path(source)),
        Path(out),
        layout,
        dtype,
        name,
        trust_remote_code,
        provenance=provenance_of(Path(source), name),
        license_id=license_id,
        auto_map=auto_map,
        run_target=run_target,
    )
    return folder


def check(
    folder: PathLike,
    target: PathLike,
    *,
    engine: Literal["zlab", "speculators", "vllm", "sglang"] | None = None,
    run_target: bool = True,
    device: str = "auto",
    gpus_per_target: int = 1,
    adapter: PathLike | None = None,
    trust_remote_code: bool = False,
) -> CheckReport:
    """Whether engines read an exported or published drafter as it was trained, as `paceline check` does.

    Returns: what was found; ``num_errors`` is 0 if nothing is wrong.
    Raises: ModelError, ConfigError.
    """
    from paceline.cli.check import run_checks
    from paceline.plan.resolve import resolve_device

    return run_checks(
        Path(folder),
        str(target),
        engine,
        run_target=run_target,
        device=resolve_device(device),
        gpus_per_target=gpus_per_target,
        adapter=None if adapter is None else str(adapter),
        trust_remote_code=trust_remote_code,
    )


def plan(
    target: str | None = None,
    gpus: str | None = None,
    *,
    tokens: float | None = None,
    run_file: PathLike | None = None,
    overrides: Sequence[str] = (),
    data: PathLike | None = None,
    even: bool = False,
    calibrate: bool = False,
) -> dict[str, Any]:
    """Memory, speed, hours and the best split of the GPUs before anything runs, as `paceline plan` says them.

    Args:
        target: A model folder, a hub id, or a built-in shape such as ``qwen3-8b``.
        gpus: ``8xh200``.
    Returns: the record that ``--json`` writes: ``best``, ``splits``, ``memory``, ``flops`` and more.
    Raises: ConfigError, DataError, ModelError.
    """
    from paceline.cli.plan import make_plan

    return make_plan(
        target,
        gpus,
        None if tokens is None else f"{tokens:f}",
        None if run_file is None else Path(run_file),
        list(overrides),
        None if data is None else Path(data),
        is_even=even,
        is_calibrated=calibrate,
    )


def status(run: PathLike) -> dict[str, Any]:
    """What a run is doing, live or ended, as `paceline status --json` prints it; the run is not disturbed.

    Raises: CheckpointError if there is no run.
    """
    from paceline.cli.run_state import open_run
    from paceline.cli.watch import state_of

    return state_of(open_run(Path(run)))


def attach(
    what: int | PathLike,
    *,
    seconds: float = 10.0,
    allow_pause: bool = False,
    pause_budget: float = 0.03,
    native_seconds: float = 60.0,
    hypotheses: Sequence[str] = (),
    thread: str = "",
) -> AttachReport:
    """Say what a running Python process is doing and why it is no faster, as `paceline profile attach` does.

    Args:
        what: A process number or a run folder.
    Raises: AttachError, CheckpointError.
    """
    from paceline.cli.attach import look_at
    from paceline.profiling.causes import asked_ids
    from paceline.profiling.look import Wish

    wish = Wish(
        seconds=seconds,
        allow_pause=allow_pause,
        budget=pause_budget,
        native_seconds=native_seconds,
        asked=tuple(asked_ids(list(hypotheses))),
        thread=thread,
    )
    return look_at(str(what), wish)


def diff(before: PathLike | AttachReport, after: PathLike | AttachReport) -> AttachDiff:
    """What moved between two looks beyond noise, as `paceline profile diff` says it.

    Args:
        before, after: From `attach`, or files that ``--json`` wrote.
    Returns: the comparison; ``text()`` is what the command prints.
    Raises: AttachError.
    """
    from paceline.profiling.diff import diff as compare
    from paceline.profiling.diff import load_report

    a, b = (load_report(Path(each)) if isinstance(each, str | Path) else each for each in (before, after))
    return compare(a, b)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; in a notebook, whose thread has an event loop already, in another thread."""
    import asyncio
    from concurrent.futures import Future, ThreadPoolExecutor

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def named() -> T:
        started.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(asyncio.run, named())
        try:
            return done.result()
        except KeyboardInterrupt:  # it ends in order, and leaving the pool waits for that
            loop, task = started.result()
            if task is not None:
                loop.call_soon_threadsafe(task.cancel)
            raise


def _config_of(run: PathLike | Run | RunConfig, overrides: Sequence[str]) -> RunConfig:
    from paceline.config import RunConfig, config_of, load_config

    if isinstance(run, str | Path):
        return load_config(run, overrides)
    return config_of(run.model_dump(mode="json") if isinstance(run, RunConfig) else run, overrides)
