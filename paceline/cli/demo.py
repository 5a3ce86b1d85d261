"""`paceline demo`: the whole journey on a real model in minutes, on a laptop's CPU."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import calibration as calibrating
from paceline.cli.calibration import Calibration
from paceline.cli.demo_decode import Decoding, Messages
from paceline.cli.demo_show import print_calibration, print_result, replay
from paceline.cli.progress import TrainProgress
from paceline.cli.train import merge_with_saved, run_training
from paceline.config import RunConfig, parse_config
from paceline.control.run_folder import RunFolder
from paceline.errors import ConfigError
from paceline.files import locked, write_atomically
from paceline.models.imports import import_models

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.plan.budget import DemoPlan
    from paceline.train.loop import TrainReport

DEMO_TARGET = "SmolLM2-135M-Instruct"
MAX_NEW_TOKENS, OWN_MAX_NEW_TOKENS = 96, 192
"""Longest answer, in tokens: to the prompts that ship all end before it; to others they have this much room."""
MAX_LENGTH = 512
"""Longest conversation trained on, in tokens."""
TOKENS_PER_STEP = 512
"""Small steps: at equal time the number of updates decides (docs/experiments.md)."""
TAPS = (0.07, 0.17, 0.27)
"""Tapped layers as shares of the depth of the demo's own target. On its task the lowest third drafts as well as the
published spread does (docs/experiments.md), and layers above the last tap are not run. Other targets and prompts get
the spread."""
MAX_BLOCK_SIZE = 8
"""Most slots that the drafter is trained with; fewer where verifying that many costs too much."""
NUM_TUNING = 8
"""Prompts, neither trained on nor counted, that say how far a block is accepted."""
NUM_CALIBRATED = 32
"""Conversations that the training rates are measured with."""
MIN_OWN_PROMPTS = 40
MAX_HELDOUT, MAX_UNSEEN = 40, 16
"""Prompts decoded of each set, the first ones, where time allows."""
ANSWERING_SHARE = 0.4
"""Share of the time in which the target answers prompts of one's own."""
CACHE_GIB = 1.6
"""Most host memory for kept features: what stays within 4 GB with the demo's target."""


@dataclass(frozen=True)
class Prompts:
    """What a demo trains on and decodes.

    Attributes:
        train: Prompts to learn from; with the target's answers where those ship with the package.
        tuning: Decoded to choose the block; not counted.
        heldout: Decoded and counted: the templates of training with other values, or the rest of one's own prompts.
        unseen: Decoded and counted: templates and values that training never saw.
    """

    train: list[Messages]
    tuning: list[Messages]
    heldout: list[Messages]
    unseen: list[Messages]


class Phases:
    """Wall time by phase of the demo."""

    def __init__(self, console: Console) -> None:
        self.seconds: dict[str, float] = {}
        self._console = console

    @contextlib.contextmanager
    def phase(self, name: str, title: str) -> Iterator[None]:
        """Name and time a part of the demo."""
        self._console.rule(f"[bold]{len(self.seconds) + 1}  {title}", align="left")
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 2)


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for everything the demo makes.")] = Path("demo"),
    minutes: Annotated[
        float, typer.Option(metavar="M", min=2, max=30, help="For calibration, training and decoding together.")
    ] = 7.75,
    target: Annotated[
        str | None, typer.Option(metavar="DIR|ID", help=f"A small model of your own instead of {DEMO_TARGET}.")
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Prompts of your own, as `paceline eval` reads them; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print demo.json on stdout, and only that.")] = False,
) -> None:
    """Train a drafter on this machine's CPU, and show it decode faster, losslessly."""
    from rich.console import Console

    def busy(holder: str) -> ConfigError:
        return ConfigError(f"{out} belongs to a demo that runs as process {holder}: wait, or choose another --out")

    out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    with locked(out / "demo.lock", busy):
        try:
            record = _demo(out, minutes, target, prompts or [], console, quiet=as_json)
        except KeyboardInterrupt:
            console.print("interrupted; the same command goes on")
            sys.exit(130)
    if as_json:
        typer.echo(json.dumps(record, indent=1))


def _demo(
    out: Path, minutes: float, own_target: str | None, own_prompts: list[Path], console: Console, quiet: bool
) -> dict[str, Any]:
    """Every phase; each goes on where an earlier, interrupted demo in the same folder stopped."""
    from paceline.models.assets import demo_target

    phases, started = Phases(console), time.monotonic()
    name = own_target or DEMO_TARGET
    settings = {"minutes": minutes, "target": name, "prompts": [str(path) for path in own_prompts]}
    saved = _saved_plan(out, settings)
    with phases.phase("fetch", f"the target: {name}"):
        import_models()
        target = own_target or str(demo_target())
        prompts = _own_prompts(own_prompts) if own_prompts else _sample_prompts()
        console.print(target, markup=False)
        config = demo_config(target, out, is_own=bool(own_target or own_prompts))
    if own_target or own_prompts:
        with phases.phase("answer", f"the target answers up to {len(prompts.train)} prompts"):
            deadline = started + (60 * ANSWERING_SHARE * minutes if saved is None else 0)  # a plan has enough of them
            lines = _answer(out, target, prompts.train, deadline, console)
    else:
        lines = [_as_line(messages) for messages in prompts.train]
    with phases.phase("calibrate", "what this machine does best"):
        if saved is None:
            saved = _calibrate(out, settings, config, lines, prompts, started)
        calibration, plan = saved
        print_calibration(console, calibration, plan)
    with phases.phase("prepare", "conversations -> tokens and loss mask"):
        _prepare(out, target, lines[: plan.conversations], console)
    run = RunFolder(out / "run")
    with phases.phase("train", "train the drafter: stop with Ctrl-C, go on with the same command"):
        report = _train(run, _planned(config, calibration, plan), quiet)
        if report.ending != "finished":
            console.print(f"stopped at step {report.step} of {report.total_steps}; the same command goes on")
            sys.exit(130)
    title = f"decode {plan.heldout + plan.unseen} prompts plainly, with n-gram drafts, and with the drafter"
    with phases.phase("evaluate", title):
        gc.collect()  # the trainer's weights and features go first
        max_new_tokens = OWN_MAX_NEW_TOKENS if own_target or own_prompts else MAX_NEW_TOKENS
        decoding = Decoding(target, run.path, calibration.verify_ms, max_new_tokens, console)
        block = decoding.choose_block(prompts.tuning)
        sets = {"held-out": prompts.heldout[: plan.heldout], "unseen": prompts.unseen[: plan.unseen]}
        results = {name: decoding.evaluate(name, messages) for name, messages in sets.items() if messages}
        samples = [sample for name, result in results.items() for sample in decoding.samples(name, sets[name], result)]
        records = {name: decoding.record(result) for name, result in results.items()}
        del decoding
    with phases.phase("export", "export, and the report"):
        _export(out, target, run, console)
    record = {
        "target": name,
        **records["held-out"],
        "unseen": records.get("unseen"),
        "calibration": {**calibration.as_dict(), **block, "layout": run.read_config().topology.layout},
        **_training_record(run, report, plan),
        "seconds": {**phases.seconds, "total": round(sum(phases.seconds.values()), 2)},
        "minutes": minutes,
        "threads": calibration.threads,
        "layout": run.read_config().topology.layout,
        "peak_memory_gib": _peak_memory_gib(),
        "machine": _machine(),
    }
    _write_report(out, record, run, samples)
    print_result(console, record)
    if not quiet:
        replay(console, samples)
    console.print(f"written to {out / 'demo.json'}; open {out / 'report.html'} in a browser", markup=False)
    return record


# ---------------------------------------------------------------------------------------------- prompts and answers


def _sample_prompts() -> Prompts:
    """Those that ship with the package."""
    train = _sample_messages("extraction_train.jsonl")
    return Prompts(
        train=train[:-NUM_TUNING],
        tuning=[messages[:-1] for messages in train[-NUM_TUNING:]],
        heldout=[messages[:-1] for messages in _sample_messages("extraction_heldout.jsonl")],
        unseen=[messages[:-1] for messages in _sample_messages("extraction_unseen.jsonl")],
    )


def _sample_messages(name: str) -> list[Messages]:
    """Conversations of a file that ships with the package."""
    text = (files("paceline.data") / "samples" / name).read_text(encoding="utf-8")
    return [json.loads(line)["messages"] for line in text.splitlines()]


def _own_prompts(paths: list[Path]) -> Prompts:
    """The last fifth, 40 at most, is held out; the few before it choose the block. Raises: ConfigError, DataError."""
    from paceline.eval.evaluate import read_prompts

    prompts = read_prompts(paths)
    if len(prompts) < MIN_OWN_PROMPTS:
        raise ConfigError(
            f"--prompts: {len(prompts)} prompts; {MIN_OWN_PROMPTS} or more were wanted, as a fifth of them is held out "
            "and the drafter learns from the answers to the others"
        )
    heldout = min(MAX_HELDOUT, len(prompts) // 5)
    tuning = min(NUM_TUNING, heldout)
    last = len(prompts) - heldout
    return Prompts(prompts[: last - tuning], prompts[last - tuning : last], prompts[last:], [])


def _answer(out: Path, target: str, prompts: list[Messages], deadline: float, console: Console) -> list[str]:
    """Conversations with the target's own answers, as many as the time allows. Raises: ConfigError if too few end."""
    from paceline.eval.answers import read_answers, write_answers
    from paceline.models.loading import load_text_model, load_tokenizer, read_shape

    path = out / "answers.jsonl"
    # those that ship were answered by another target
    prompts = [prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt for prompt in prompts]
    if time.monotonic() < deadline and (not path.exists() or len(read_answers(path)) < len(prompts)):
        outcome = write_answers(
            load_text_model(target),
            load_tokenizer(target),
            prompts,
            path,
            max_new_tokens=OWN_MAX_NEW_TOKENS,
            stop_ids=read_shape(target).eos_token_ids,
            should_stop=lambda: time.monotonic() > deadline,
            on_batch=lambda done, so_far: console.print(f"{done} of {len(prompts)} prompts: {dict(so_far)}"),
        )
        console.print(f"answers: {dict(outcome)}", markup=False)
        gc.collect()
    lines = read_answers(path)
    if len(lines) < MIN_OWN_PROMPTS // 2:
        raise ConfigError(
            f"{len(lines)} of the answers in {path} end within {OWN_MAX_NEW_TOKENS} tokens; "
            f"{MIN_OWN_PROMPTS // 2} or more were wanted: allow more --minutes, or give prompts with shorter answers"
        )
    return lines


def _as_line(messages: Messages) -> str:
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


# -------------------------------------------------------------------------------------------------- plan and training


def _saved_plan(out: Path, settings: dict[str, Any]) -> tuple[Calibration, DemoPlan] | None:
    """What an earlier start in this folder decided. Raises: ConfigError if it was asked for something else."""
    from paceline.plan.budget import DemoPlan

    path = out / "plan.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        earlier = content["settings"]
        saved = Calibration.from_dict(content["calibration"]), DemoPlan(**content["plan"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): choose another --out") from error
    if different := [key for key in settings if settings[key] != earlier.get(key)]:
        values = ", ".join(f"{key}: {earlier.get(key)}, now {settings[key]}" for key in different)
        raise ConfigError(f"{out} holds a demo with other settings ({values}): choose another --out")
    return saved


def _calibrate(
    out: Path, settings: dict[str, Any], config: RunConfig, lines: list[str], prompts: Prompts, started: float
) -> tuple[Calibration, DemoPlan]:
    """Measure, and decide once how much is trained and decoded."""
    from paceline.plan.budget import plan_demo

    calibration = calibrating.calibrate(config, lines[:NUM_CALIBRATED])
    gc.collect()
    plan = plan_demo(
        60 * settings["minutes"] - (time.monotonic() - started),
        calibration.rates(),
        available=len(lines),
        tokens_per_conversation=calibration.tokens_per_conversation,
        answer_tokens=calibration.answer_tokens,
        max_cached=int(CACHE_GIB * 2**30 / (calibration.feature_bytes * calibration.tokens_per_conversation)),
        heldout=min(MAX_HELDOUT, len(prompts.heldout)),
        unseen=min(MAX_UNSEEN, len(prompts.unseen)),
    )
    content = {"settings": settings, "calibration": calibration.as_dict(), "plan": asdict(plan)}
    write_atomically(out / "plan.json", json.dumps(content, indent=1) + "\n")
    return calibration, plan


def demo_config(target: str, out: Path, is_own: bool = False) -> RunConfig:
    """The demo's run: two narrow draft layers and a short head, what a CPU trains fastest to a useful speedup.

    Type, threads, slots and epochs are not decided yet.
    """
    from paceline.models.loading import read_shape

    shape = read_shape(target)
    taps = sorted({min(round(share * shape.num_layers), shape.num_layers - 2) for share in TAPS})
    return parse_config(
        {
            "run": {"dir": str(out / "run"), "device": "cpu"},
            "target": {"path": target, "layer_ids": "auto" if is_own else taps},
            "draft": {
                "num_layers": 2,
                "intermediate_size": max(1, shape.intermediate_size // 2),
                "block_size": MAX_BLOCK_SIZE,
                "vocab": "observed",
            },
            "data": {"path": str(out / "data"), "max_length": MAX_LENGTH, "validation": 0.03},
            "anchors": {"per_token": 0.125},
            "optim": {"lr": 2e-3, "warmup_ratio": 0.1, "tokens_per_step": TOKENS_PER_STEP},
            # in turn, with all threads: side by side the target would idle once every feature is kept
            "topology": {"layout": "colocated", "threads": 1},
            "pipeline": {"tokens_per_batch": TOKENS_PER_STEP, "feature_cache_gib": CACHE_GIB},
            "checkpoint": {"every_steps": 200},
            "eval": {"validate_every": 100, "validate_rows": 16},
        }
    )


def _planned(config: RunConfig, calibration: Calibration, plan: DemoPlan) -> RunConfig:
    """The run with what was measured and planned."""
    tree = config.model_dump(mode="json")
    tree["draft"] |= {"dtype": calibration.dtype, "block_size": calibration.trained_block_size}
    tree["data"]["epochs"] = plan.epochs
    tree["topology"]["threads"] = calibration.threads
    return parse_config(tree)


def _prepare(out: Path, target: str, lines: list[str], console: Console) -> None:
    from paceline.data.dataset import read_info
    from paceline.data.prepare import PrepareSettings, prepare

    data, chats = out / "data", out / "conversations.jsonl"
    if not (data / "prepare.json").is_file():
        chats.write_text("".join(lines), encoding="utf-8")
        prepare([chats], data, PrepareSettings(tokenizer=target, max_length=MAX_LENGTH))
    info = read_info(data)
    console.print(
        f"{info.num_rows} conversations, {info.num_tokens:,} tokens, {info.num_supervised:,} of them the target's "
        f"own words; look at them with `paceline inspect {data}`",
        markup=False,
    )


def _train(run: RunFolder, config: RunConfig, quiet: bool) -> TrainReport:
    if run.exists:
        config = merge_with_saved(run.read_config(), config)
    return run_training(config, TrainProgress(quiet=quiet))


# -------------------------------------------------------------------------------------------------------------- results


def _export(out: Path, target: str, run: RunFolder, console: Console) -> None:
    from paceline.cli.evaluate import export_drafter
    from paceline.cli.provenance import provenance_of
    from paceline.train.checkpoint import load_drafter

    drafter = load_drafter(run.path)
    layout = "zlab" if drafter.shape.draft_vocab_size is None else "speculators"
    known = provenance_of(run.path, target)
    _, commands = export_drafter(
        drafter, out / "export", layout, "bfloat16", target, provenance=known, run_target=False
    )
    console.print("\n".join(commands), markup=False)


def _training_record(run: RunFolder, report: TrainReport, plan: DemoPlan) -> dict[str, Any]:
    from paceline.train.metrics import read_metrics

    return {
        "train_conversations": plan.conversations,
        "epochs": plan.epochs,
        "train_steps": report.step,
        "train_tokens": sum(line["tokens"] for line in read_metrics(run.metrics_file)),
    }


def _write_report(out: Path, record: dict[str, Any], run: RunFolder, samples: list[dict[str, Any]]) -> None:
    from paceline.report.demo import demo_page
    from paceline.train.metrics import read_metrics

    write_atomically(out / "demo.json", json.dumps(record, indent=1) + "\n")
    write_atomically(out / "report.html", demo_page(record, list(read_metrics(run.metrics_file)), samples))


def _peak_memory_gib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 2)


def _machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "os": f"{platform.system()} {platform.release()}",
    }
