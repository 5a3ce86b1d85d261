"""`paceline train` and `paceline resume`: put target, drafter, data and run folder together, and train."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.metadata
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from paceline import __version__
from paceline.cli.initial import initial_of, load_initial
from paceline.cli.observe import observing
from paceline.cli.progress import TrainProgress, say
from paceline.cli.targets import Targets, open_targets
from paceline.config import (
    Profiling,
    RunConfig,
    changed_keys,
    dump_config,
    flatten,
    is_free_to_change,
    load_config,
    parse_config,
    valid_keys,
)
from paceline.control.run_folder import RunFolder
from paceline.control.signals import StopRequest
from paceline.control.steering import Steering
from paceline.errors import CheckpointError, ConfigError, GroupLost, PipelineError
from paceline.files import explain, sha256
from paceline.models.imports import import_models

if TYPE_CHECKING:
    from paceline.dflash.acceptance import Acceptance
    from paceline.models.draft import DFlashDrafter
    from paceline.models.loading import TargetShape
    from paceline.models.target import Target
    from paceline.plan.resolve import ResolvedRun
    from paceline.train.checkpoint import TrainState
    from paceline.train.evaluations import Evaluations
    from paceline.train.loop import TrainReport
    from paceline.train.saver import Saver
    from paceline.train.step import TrainStep

log = logging.getLogger(__name__)


PROFILE_VARIABLE = "DFLASH_PROFILE_INTERVAL"
ProfileInterval = Annotated[
    str | None,
    typer.Option(
        "--profile-interval", metavar="N", help=f"Say where the time went every N seconds; beats {PROFILE_VARIABLE}."
    ),
]


AllowChange = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-change",
        metavar="KEY",
        help="Go on although this key (data.path, target.path: what is in there) has changed; may be repeated. The "
        "result is then no longer that of a run without interruption.",
    ),
]


def profile_interval_of(config: RunConfig, flag: str | None) -> float:
    """Seconds between tables, 0: none. The flag beats the variable, and the variable beats the run file; neither of the
    two is kept for a later start.

    Raises: ConfigError naming which was bad.
    """
    for name, text in (("--profile-interval", flag), (PROFILE_VARIABLE, os.environ.get(PROFILE_VARIABLE) or None)):
        if text is None:
            continue
        try:
            return Profiling(interval=float(text)).interval
        except ValueError as error:  # pydantic's as well
            raise ConfigError(f"{name}={text!r}: a number of seconds from 0 (off) to 86400 was wanted") from error
    return config.profiling.interval


def train(
    run_file: Annotated[Path, typer.Argument(help="Run file (YAML); its run.dir, if it exists, is resumed.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides: optim.lr=3e-4")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and load no weights.")] = False,
    profile_interval: ProfileInterval = None,
    allow_change: AllowChange = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report (or the plan) as JSON on stdout.")] = False,
) -> None:
    """Train a drafter; on an existing run folder, go on where it stopped."""
    config = load_config(run_file, overrides or [])
    if dry_run:
        interval_s = profile_interval_of(config, profile_interval)
        _print_plan(goes_on(config, allowed_keys(allow_change or [])), interval_s, as_json)
        return
    progress = TrainProgress(quiet=as_json)
    report = start_or_resume(config, progress, profile_interval, allow_change or [], own_process=True)
    _finish(RunFolder(config.run.dir), report, as_json)


def start_or_resume(
    config: RunConfig,
    progress: TrainProgress,
    profile_interval: str | None = None,
    allow_change: Sequence[str] = (),
    own_process: bool = False,
) -> TrainReport:
    """Train as configured, or go on with the run that is in its folder.

    Args:
        profile_interval, allow_change: As given to the command.
        own_process: See `run_training`.
    Raises: PacelineError of any kind; the run folder then holds the last complete step.
    """
    interval_s, allowed = profile_interval_of(config, profile_interval), allowed_keys(allow_change)
    return run_training(goes_on(config, allowed), progress, interval_s, allowed, own_process)


def goes_on(config: RunConfig, allowed: Collection[str] = ()) -> RunConfig:
    """The configuration of the run that is in its folder, with what may change taken from this; without one, this."""
    run = RunFolder(config.run.dir)
    return merge_with_saved(run.read_config(), config, allowed) if run.exists else config


def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides of keys that may change.")] = None,
    profile_interval: ProfileInterval = None,
    allow_change: AllowChange = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
) -> None:
    """Go on with a stopped run, bit for bit."""
    run = RunFolder(run_dir)
    saved = run.read_config()
    if not any(run.checkpoints.glob("step-*")):
        raise CheckpointError(f"{run_dir} has no checkpoint to resume from; `paceline train` starts it")
    if any(override.startswith("run.dir=") for override in overrides or []):
        raise ConfigError("resume takes the run folder as its first argument; to move a run, move the folder")
    wanted = load_config(run.config_file, overrides or [])
    interval_s = profile_interval_of(wanted, profile_interval)
    wanted = wanted.model_copy(update={"run": wanted.run.model_copy(update={"dir": str(run_dir)})})
    allowed = allowed_keys(allow_change or [])
    config = merge_with_saved(saved, wanted, allowed)
    _finish(run, run_training(config, TrainProgress(quiet=as_json), interval_s, allowed, own_process=True), as_json)


def allowed_keys(keys: Sequence[str]) -> frozenset[str]:
    """Keys given to `--allow-change`. Raises: ConfigError naming one that does not exist, with the nearest."""
    known = valid_keys()
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise ConfigError(f"--allow-change {key}: unknown key" + (f"; did you mean {near[0]}?" if near else ""))
    return frozenset(keys)


def merge_with_saved(saved: RunConfig, wanted: RunConfig, allowed: Collection[str] = ()) -> RunConfig:
    """The saved configuration of a run, with what may change, or is `allowed` to, taken from `wanted`.

    Raises: ConfigError naming each other key that differs, with both values.
    """
    changed = [change for change in changed_keys(saved, wanted) if change[0] not in allowed]
    if changed:
        lines = [f"{key}: the run was started with {old!r}, now {new!r}" for key, old, new in changed]
        raise ConfigError(
            f"{wanted.run.dir} holds a run with other settings; choose another run.dir, or set them back (or go on all "
            "the same with --allow-change KEY for each)\n  " + "\n  ".join(lines)
        )
    tree: dict[str, dict[str, Any]] = saved.model_dump(mode="json")
    old = saved.topology
    moves = any(getattr(wanted.topology, name) != getattr(old, name) for name in ("executor", "targets", "drafters"))
    for key, value in flatten(wanted):
        anew = moves and key in FOLLOW_TOPOLOGY  # what was resolved for the old one may not go with the new
        if (is_free_to_change(key) or key in allowed) and (value != "auto" or anew):
            section, name = key.split(".")
            tree[section][name] = value
    return parse_config(tree)


FOLLOW_TOPOLOGY = ("topology.layout", "pipeline.queue_depth")
"""Keys whose `auto` follows from executor and number of roles."""


def resolve_config(config: RunConfig) -> tuple[ResolvedRun, Any]:
    """Resolve a configuration against its target's folder and its data; also gives the target's shape.

    Raises: PacelineError of any kind, also where evaluations beside training could not work.
    """
    from paceline.data.dataset import Dataset
    from paceline.models.loading import load_tokenizer, read_shape
    from paceline.plan.resolve import resolve
    from paceline.train.feature_cache import adopted, check_run

    where = (config.target.path, config.target.revision, config.target.trust_remote_code)
    shape = read_shape(*where)
    config = adopted(config)
    initial = initial_of(config)
    resolved = resolve(config, shape, Dataset.open(config.data.path), load_tokenizer(*where), initial)
    check_run(resolved.config, resolved.dataset.fingerprint)
    if config.eval.every_steps is not None:
        check_evaluation(config)
    return resolved, shape


def run_training(
    config: RunConfig,
    progress: TrainProgress,
    interval_s: float | None = None,
    allowed: Collection[str] = (),
    own_process: bool = False,
) -> TrainReport:
    """Train as configured in its run folder, from where it stands.

    Args:
        interval_s: From `profile_interval_of`; None: what follows from variable and configuration.
        allowed: Keys that may differ from those of the run's checkpoints, from `allowed_keys`.
        own_process: This process does nothing else, so `models.imports.import_models` may change it.
    Raises: PacelineError of any kind; the run folder then holds the last complete step.
    """
    if config.profiling.sigusr1 and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # deadly by default; there is nothing to switch on yet
    with StopRequest(config.run.stop_signal) as stop:  # first of all: importing torch takes seconds, in which Ctrl-C
        interval_s = profile_interval_of(config, None) if interval_s is None else interval_s  # has to count as well
        began, num_restarts, last = time.monotonic(), 0, None
        if own_process:
            import_models()
        while True:
            try:
                return _train(config, progress, stop, interval_s, allowed, began)
            except GroupLost as error:
                place = newest_place(config)
                num_restarts = 1 if place != last else num_restarts + 1  # since it got on
                last = place
                if num_restarts > config.run.max_restarts or stop.reason is not None:
                    raise
                log.warning(
                    "%s; the run goes on from its last checkpoint (%d of run.max_restarts)", error, num_restarts
                )
                RunFolder(config.run.dir).event("restarted", reason=str(error), restart=num_restarts)


def newest_place(config: RunConfig) -> Path | None:
    """The run's newest checkpoint."""
    from paceline.train.checkpoint import newest

    return newest(RunFolder(config.run.dir).checkpoints)


def _train(
    config: RunConfig,
    progress: TrainProgress,
    stop: StopRequest,
    interval_s: float,
    allowed: Collection[str],
    began: float,
) -> TrainReport:
    from paceline.eval.validation import Validation
    from paceline.pipeline.channel import ChannelClosed
    from paceline.train.checkpoint import saved_num_anchors
    from paceline.train.loop import TrainLoop, restore
    from paceline.train.trackers import Trackers, check_packages

    run = RunFolder(config.run.dir)
    check_packages(config.tracking)
    with run.lock(), contextlib.ExitStack() as stack:
        progress.phase("loading the target and the data")
        resolved, shape = resolve_config(config)
        compiles = resolved.config.run.device.startswith("cuda") and resolved.config.kernels.compile
        if compiles and resolved.config.target.cache is None and resolved.config.target.server is None:
            progress.phase("compiling the target's layers: some 20 seconds the first time on a machine")
        num_anchors = None if "anchors.per_token" in allowed else saved_num_anchors(run.checkpoints)
        if num_anchors is not None:  # a GPU rounds them, a CPU does not
            resolved = dataclasses.replace(resolved, num_anchors=num_anchors)
        if resolved.config.topology.executor == "ray":
            progress.phase("starting processes on Ray")
        targets = open_targets(resolved, run, lambda: stop.reason, stack)
        target = targets.target
        packing = "packed" if targets.packed else "per_document"
        config = resolved.config.model_copy(
            update={"target": resolved.config.target.model_copy(update={"packing": packing})}
        )
        resolved = dataclasses.replace(resolved, config=config)
        trainer = build_group(resolved, targets, run, stack)
        measures = config.eval.every_steps is not None
        state = restore(
            run, trainer, _fresh_state(resolved, targets.fingerprint), allowed, validation_chooses=not measures
        )
        trackers = stack.enter_context(Trackers(config.tracking, run, state.step, config.model_dump(mode="json")))
        try:
            run.write_config(config)
            run.write_json("run.json", _run_record(resolved, shape, targets, trainer, state.step))
        except OSError as error:
            raise CheckpointError(f"run.dir {run.path} cannot be written to: {explain(error)}") from error
        run.event("resumed" if state.step else "started", step=state.step, **_changes(allowed))
        notes = [resolved.layout_note, targets.packing_note, targets.quantization_note]
        if target.device.type == "cuda":  # on the CPU there is no choice to report
            notes.append(trainer.attention_note)
        if compiles:
            notes.append("the first step compiles the drafter's layers: some 40 seconds the first time on a machine")
        progress.start(config, resolved, state.step, [note for note in notes if note])

        steering = Steering(config)
        evaluations = build_evaluations(run, resolved) if measures else None
        saver = stack.enter_context(contextlib.closing(build_saver(run, trainer, steering, evaluations)))
        if evaluations is not None:  # left before the saver is: what runs is over at once
            stack.enter_context(contextlib.closing(evaluations))

        def should_stop() -> str | None:
            hours = steering.config.run.max_hours
            if stop.reason is None and hours is not None and time.monotonic() > began + 3600 * hours:
                return "max_hours"
            return stop.reason

        validation = Validation(
            target,
            resolved.dataset,
            resolved.validation_rows,
            num_anchors=resolved.num_anchors,
            dtype=trainer.dtype,
            document_features=targets.document_features,
            row_features=targets.row_features,
        )

        def measured(validation: Validation, drafter: DFlashDrafter) -> Acceptance | None:
            try:
                return validation.measure(drafter, should_stop)
            except ChannelClosed:  # a stop was asked for while there was no target to ask
                return None

        loop = TrainLoop(
            run,
            resolved,
            trainer,
            state,
            targets.make_features,
            saver=saver,
            steering=steering,
            validate=(lambda drafter: measured(validation, drafter)) if resolved.validation_rows else None,
            progress=progress,
            should_stop=should_stop,
            source_of=resolved.dataset.source,
            saves_first=bool(allowed) and state.step > 0,
            open_features=targets.open_stream,
            track=trackers.log,
            track_added=trackers.add,
            evaluations=evaluations,
        )
        profiling = config.profiling.model_copy(update={"interval": interval_s})
        with observing(
            run,
            config.model_copy(update={"profiling": profiling}),
            progress.show,
            steering=steering,
            stop=stop,
            ledger=lambda: dataclasses.asdict(loop.ledger()),
            saving=lambda: {
                "problem": saver.problem, "saved_step": saver.saved_step, "writing": saver.is_writing,
                "bytes": saver.num_bytes,
            },
            others=targets.others,
        ) as between:  # fmt: skip
            try:
                report = loop.run(between)
            except Exception as error:
                if isinstance(error, PipelineError) and not isinstance(error, GroupLost):
                    error = explained(error, resolved, shape, targets.roles)
                run.event("failed", step=loop.step, reason=str(error) or type(error).__name__)
                raise error
            finally:
                progress.stop()
        if targets.transport is not None:
            run.event("transport", **targets.transport())
        served = {} if targets.served is None else {"served": targets.served()}
        run.event(report.ending, step=report.step)
        if report.ledger["issued"] or not (run.path / "report.json").exists():  # a finished run keeps its report
            try:
                run.write_json("report.json", dataclasses.asdict(report) | served)
            except OSError as error:  # all that counts is on the disk
                log.warning("report.json could not be written: %s", error)
        return report


def _fresh_state(resolved: ResolvedRun, target_fingerprint: str) -> TrainState:
    from paceline.train.checkpoint import TrainState

    return TrainState(
        step=0,
        next_batch=0,
        skipped_batches=0,
        total_steps=resolved.total_steps,
        num_anchors=resolved.num_anchors,
        best_acceptance_length=None,
        best_step=None,
        target_fingerprint=target_fingerprint,
        data_fingerprint=resolved.dataset.fingerprint,
    )


def _changes(allowed: Collection[str]) -> dict[str, list[str]]:
    return {"allowed_to_change": sorted(allowed)} if allowed else {}


def explained(
    error: PipelineError,
    resolved: ResolvedRun,
    shape: TargetShape,
    roles: Mapping[str, Mapping[str, Any]] | None = None,
) -> PipelineError:
    """The same failure with where its role ran; where memory ran out, with the plan and what helps most."""
    from paceline.pipeline.local import is_out_of_memory
    from paceline.plan.memory import GIB, memory_plan

    here = {"device": resolved.config.run.device, "pid": os.getpid(), "host": platform.node()}
    place = (roles or {}).get(error.role, here)
    text = f"{error}\n{error.role} ran on {place['device']}, in process {place['pid']} of {place['host']}"
    if is_out_of_memory(error.__cause__):
        plan = memory_plan(resolved, shape)
        parts = ", ".join(f"{name.removesuffix('_bytes')} {value / GIB:.2f}" for name, value in vars(plan).items())
        text += (
            f"\nout of memory: the plan is {plan.total_bytes / GIB:.2f} GiB ({parts}), before what the allocator and "
            "other processes take. What helps: draft.recompute=true (a run may go on with it), and a smaller "
            f"pipeline.tokens_per_batch than {resolved.config.pipeline.tokens_per_batch} (in a new run.dir)"
        )
    told = PipelineError(text, role=error.role, batch=error.batch)
    told.__cause__ = error.__cause__
    return told


def build_trainer(resolved: ResolvedRun, target: Target) -> TrainStep:
    """A fresh drafter, or that of `draft.init`, beside its target, with its optimizer."""
    from paceline.train.build import Recipe, new_step

    return new_step(Recipe.of(resolved), build_drafter(resolved, target), target)


def build_drafter(resolved: ResolvedRun, target: Target) -> DFlashDrafter:
    """A fresh drafter, or that of `draft.init`."""
    from paceline.train.build import Recipe, new_drafter

    weights = load_initial(resolved.config)
    return new_drafter(Recipe.of(resolved), target, None if weights is None else weights.state_dict())


def build_group(resolved: ResolvedRun, targets: Targets, run: RunFolder, stack: contextlib.ExitStack) -> TrainStep:
    """The training step of this process, or of all drafter ranks; the others go on from the run's newest checkpoint."""
    if targets.ranks is None:
        return build_trainer(resolved, targets.target)
    from paceline.cluster.drafters import GroupStep
    from paceline.train.build import Recipe, new_step
    from paceline.train.checkpoint import newest

    drafter = build_drafter(resolved, targets.target)
    group = targets.ranks.join(targets.host, drafter, newest(run.checkpoints))
    trainer = GroupStep(new_step(Recipe.of(resolved), drafter, targets.target, group), targets.ranks)
    stack.callback(trainer.close)
    targets.ranks.joined()
    return cast("TrainStep", trainer)  # it has the same face


def build_saver(
    run: RunFolder, trainer: TrainStep, steering: Steering, evaluations: Evaluations | None = None
) -> Saver:
    """Writes the run's checkpoints, and tells its events, whoever asked for one, and who evaluates them."""
    from paceline.train.saver import Saver

    def on_saved(step: int, place: Path) -> None:
        run.event("checkpoint", step=step)
        steering.saved(step, place)
        if evaluations is not None:
            evaluations.saved(step)

    def on_failed(step: int, reason: str) -> None:
        run.event("checkpoint failed", step=step, reason=reason)
        steering.save_failed(step, reason)

    def keep() -> tuple[int, int | None]:
        return steering.config.checkpoint.keep_last, steering.config.checkpoint.keep_every

    def pinned() -> set[str]:
        return set() if evaluations is None else evaluations.pinned()

    return Saver(
        run.checkpoints,
        trainer.drafter,
        trainer.optimizer,
        keep=keep,
        on_saved=on_saved,
        on_failed=on_failed,
        pinned=pinned,
        gather=trainer.gather_buffers,
    )


def check_evaluation(config: RunConfig) -> None:
    """See before training what evaluations beside it need. Raises: ConfigError, DataError."""
    from paceline.eval.evaluate import read_prompts
    from paceline.plan.resolve import resolve_device

    try:
        resolve_device(config.eval.device)
    except ConfigError as error:
        raise ConfigError(str(error).replace("run.device", "eval.device")) from error
    if not read_prompts(_prompt_files(config), config.eval.limit):
        raise ConfigError(f"eval.prompts={config.eval.prompts}: there is no prompt in it")


def _prompt_files(config: RunConfig) -> list[Path]:
    from paceline.eval.evaluate import sample_prompts

    named = config.eval.prompts
    return (
        [sample_prompts()] if named is None else [Path(each) for each in ([named] if isinstance(named, str) else named)]
    )


def build_evaluations(run: RunFolder, resolved: ResolvedRun) -> Evaluations:
    """`paceline eval` for each due checkpoint, in a process that ends with this one."""
    from paceline.cli import child
    from paceline.train.evaluations import Evaluations

    config, thinking = resolved.config, resolved.dataset.info.thinking
    assert config.eval.every_steps is not None
    files = _prompt_files(config)

    def command(place: Path, out: Path) -> list[str]:
        options: dict[str, Any] = {
            "--target": config.target.path,
            "--revision": config.target.revision,
            "--adapter": config.target.adapter,
            "--draft": place,
            "--limit": config.eval.limit,
            "--max-new-tokens": config.eval.max_new_tokens,
            "--thinking": None if thinking is None else "on" if thinking else "off",
            "--device": config.eval.device,
            "--json": out,
        }
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        if config.eval.prompts is not None:
            given += [f"--prompts={file}" for file in files]
        trusts = ["--trust-remote-code"] if config.target.trust_remote_code else []
        return [sys.executable, child.__file__, "eval", *given, "--no-ngram", *trusts]

    def settings() -> dict[str, Any]:
        return {
            "prompts": [sha256(file) for file in files],
            "limit": config.eval.limit,
            "max_new_tokens": config.eval.max_new_tokens,
            "thinking": thinking,
            "device": config.eval.device.partition(":")[0],
        }

    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if config.run.device == "cpu":  # the cores are training's
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return Evaluations(
        run, every_steps=config.eval.every_steps, command=command, settings=settings, environment=environment
    )


def _finish(run: RunFolder, report: TrainReport, as_json: bool) -> None:
    if as_json:
        say(json.dumps(dataclasses.asdict(report)))
        return
    say(f"{report.ending} at step {report.step} of {report.total_steps}; checkpoints in {run.checkpoints}")
    say(report.verdict["line"])
    say(
        "batches: {issued} issued = {trained} trained + {in_flight} in flight + {skipped} left out; "
        "{retried} made again".format(**report.ledger)
    )
    if report.ending == "finished" and report.step < report.total_steps:
        say(
            f"{report.total_steps - report.step} steps of the plan were not made: of {report.skipped_batches} batches "
            "nothing was to be learnt, or they were not finite"
        )
    if report.ending == "finished":
        say(f"next: paceline export {run.path} --format zlab --out {run.path / 'export'}")
    else:
        say(f"go on with: paceline resume {run.path}")


def _print_plan(config: RunConfig, interval_s: float, as_json: bool) -> None:
    from paceline.models.kinds import needs_last_hidden
    from paceline.plan.memory import GIB, batch_bytes
    from paceline.plan.outline import read_target
    from paceline.plan.splits import memory_by_role, memory_parts, of_run

    resolved, _ = resolve_config(config)
    config = resolved.config
    target = read_target(config.target.path, config.target.revision, config.target.trust_remote_code)
    outline = of_run(resolved, target, last_hidden=needs_last_hidden(config))
    travels = config.topology.executor == "ray" and config.topology.layout == "split"
    plan, by_role = memory_parts(outline), memory_by_role(outline)
    facts = {
        "device": config.run.device,
        "layout": config.topology.layout,
        "layout_note": resolved.layout_note,
        "cache": config.target.cache,
        "targets": config.topology.targets,
        "gpus_per_target": config.topology.gpus_per_target,
        "drafters": config.topology.drafters,
        "transport": config.pipeline.transport if travels else None,
        "transport_bytes_per_batch": batch_bytes(resolved) if travels else 0,
        "batches": len(resolved.batches),
        "batches_per_step": resolved.batches_per_step,
        "steps": resolved.total_steps,
        "anchors_per_batch": resolved.num_anchors,
        "validation_rows": len(resolved.validation_rows),
        "fill_frac": round(resolved.batches.fill, 4),
        "profile_interval_s": interval_s,
    }
    memory = {name.replace("_bytes", "_gib"): round(value / GIB, 3) for name, value in vars(plan).items()}
    memory["total_gib"] = round(plan.total_bytes / GIB, 3)
    roles = {
        role: {f"{kind}_gib": round(value / GIB, 3) for kind, value in parts.items()} for role, parts in by_role.items()
    }
    if as_json:
        tree = config.model_dump(mode="json")
        typer.echo(json.dumps({"config": tree, "plan": facts, "memory": memory, "roles": roles}, indent=1))
        return
    typer.echo(dump_config(config))
    told = {role: ", ".join(f"{kind} {value}" for kind, value in parts.items()) for role, parts in roles.items()}
    for title, values in (("plan", facts), ("memory", memory), ("memory by role", told)):
        typer.echo(f"{title}:")
        for name, value in values.items():
            typer.echo(f"  {name}: {value}")


def _run_record(
    resolved: ResolvedRun, shape: TargetShape, targets: Targets, trainer: TrainStep, step: int
) -> dict[str, Any]:
    from paceline.plan.memory import GIB, memory_plan

    config, planned = resolved.config, vars(memory_plan(resolved, shape))
    here = {"pid": os.getpid(), "host": platform.node(), "device": config.run.device}
    roles = [f"target-{i}" for i in range(config.topology.targets)]
    roles += [f"drafter-{i}" for i in range(config.topology.drafters)]
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "started": time.time(),
        "resumed_from_step": step,
        "roles": {role: targets.roles.get(role, here) for role in roles},
        "packing": targets.packing_note,
        "quantization": targets.quantization_note,
        "server": targets.server,
        "adapter": config.target.adapter,
        "attention": trainer.attention_note,
        "data": _data_record(config.data.path),
        "draft": dataclasses.asdict(resolved.draft),
        "memory_gib": {name.removesuffix("_bytes"): round(value / GIB, 3) for name, value in planned.items()},
        "versions": {
            "paceline": __version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        },
        "commit": _commit(),
    }


def _data_record(path: str) -> dict[str, Any]:
    """What `prepare` kept and rejected, by reason."""
    content = json.loads((Path(path) / "prepare.json").read_text(encoding="utf-8"))
    return {"path": path, "dataset": content["dataset"], "report": content["report"]}


def _commit() -> str | None:
    """Commit of the source tree, None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
