"""`paceline demo`: the whole journey on a real model in minutes, on a laptop's CPU."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.evaluate import print_evaluation
from paceline.cli.progress import TrainProgress
from paceline.cli.train import merge_with_saved, run_training
from paceline.config import RunConfig, parse_config
from paceline.control.run_folder import RunFolder
from paceline.files import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.eval.evaluate import Evaluation, PromptResult

NUM_CONVERSATIONS = 480
"""Conversations trained on, the first ones of those that ship: what two cores turn into features in two minutes."""
NUM_PROMPTS = 40
"""Held-out prompts that are decoded; always the same ones."""
MAX_NEW_TOKENS = 96
"""Longest answer decoded; most end before it."""


class Phases:
    """Wall time by phase of the demo."""

    def __init__(self, console: Console) -> None:
        self.seconds: dict[str, float] = {}
        self._console = console

    @contextlib.contextmanager
    def phase(self, name: str, title: str) -> Iterator[None]:
        """Name and time a part of the demo."""
        self._console.rule(f"[bold]{title}", align="left")
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 2)


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for everything the demo makes.")] = Path("demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print demo.json on stdout, and only that.")] = False,
) -> None:
    """Train a drafter for SmolLM2-135M-Instruct on this machine's CPU, and show it decode faster, losslessly."""
    from rich.console import Console

    from paceline.data.dataset import read_info
    from paceline.data.prepare import PrepareSettings, prepare
    from paceline.export.zlab import export_zlab, serving_commands
    from paceline.models.assets import demo_target
    from paceline.train.checkpoint import load_drafter
    from paceline.train.metrics import read_metrics

    out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=as_json, highlight=False)
    phases = Phases(console)
    with phases.phase("fetch", "1  the target: SmolLM2-135M-Instruct"):
        target = demo_target()
        console.print(str(target), markup=False)

    data, run_dir, export_dir = out / "data", out / "run", out / "export"
    with phases.phase("prepare", "2  conversations -> tokens and loss mask"):
        chats = out / "conversations.jsonl"
        if not (data / "prepare.json").is_file():
            chats.write_text("".join(_sample_lines("extraction_train.jsonl")[:NUM_CONVERSATIONS]), encoding="utf-8")
            prepare([chats], data, PrepareSettings(tokenizer=str(target), max_length=512))
        info = read_info(data)
        console.print(
            f"{info.num_rows} conversations, {info.num_tokens:,} tokens, {info.num_supervised:,} of them the target's "
            f"own words; look at them with `paceline inspect {data}`",
            markup=False,
            soft_wrap=True,
        )

    with phases.phase("train", "3  train the drafter: stop with Ctrl-C, go on with the same command"):
        config = demo_config(str(target), str(data), str(run_dir))
        run = RunFolder(run_dir)
        if run.exists:
            config = merge_with_saved(run.read_config(), config)
        report = run_training(config, TrainProgress(quiet=as_json))
        if report.ending != "finished":
            console.print(f"stopped at step {report.step} of {report.total_steps}; the same command goes on")
            sys.exit(130)

    with phases.phase("evaluate", f"4  decode {NUM_PROMPTS} held-out prompts, plainly and drafted, in turn"):
        evaluation, num_threads = _evaluate(str(target), run_dir, console)

    with phases.phase("export", "5  export for inference engines"):
        drafter = load_drafter(run_dir)
        export_zlab(drafter, export_dir)
        console.print("\n".join(serving_commands(export_dir, drafter)), markup=False, soft_wrap=True)

    record = {
        "target": "SmolLM2-135M-Instruct",
        **evaluation.as_dict(),
        "train_tokens": sum(line["tokens"] for line in read_metrics(run.metrics_file)),
        "train_steps": report.step,
        "seconds": {**phases.seconds, "total": round(sum(phases.seconds.values()), 2)},
        "threads": num_threads,
        "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "layout": run.read_config().topology.layout,
    }
    write_atomically(out / "demo.json", json.dumps(record, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(record, indent=1))
    else:
        print_evaluation(console, {"draft": str(run_dir), **record})
        console.print(f"written to {out / 'demo.json'}", markup=False)


def demo_config(target: str, data: str, run_dir: str) -> RunConfig:
    """The demo's run file: one draft layer and blocks of 6, what a CPU trains fastest to a useful speedup."""
    import torch

    return parse_config(
        {
            "run": {"dir": run_dir, "device": "cpu"},
            "target": {"path": target},
            "draft": {"num_layers": 1, "block_size": 6, "dtype": "bfloat16" if _multiplies_bfloat16() else "float32"},
            "data": {"path": data, "epochs": 5, "max_length": 512, "validation": 0.03},
            "anchors": {"per_token": 0.25},
            "optim": {"lr": 1.5e-3, "tokens_per_step": 1024},
            "topology": {"threads": torch.get_num_threads()},
            "pipeline": {"tokens_per_batch": 1024, "feature_cache_gib": 1.5},
            "checkpoint": {"every_steps": 50},
            "eval": {"validate_every": 50, "validate_rows": 8},
        }
    )


def _multiplies_bfloat16() -> bool:
    """Whether the processor has bfloat16 products; without them the type is slower than float32."""
    import torch

    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private: other versions may lack them
    return any(getattr(torch.cpu, name, bool)() for name in checks)


def _sample_lines(name: str) -> list[str]:
    """Lines of a file that ships with the package."""
    return (files("paceline.data") / "samples" / name).read_text(encoding="utf-8").splitlines(keepends=True)


def _evaluate(target: str, run_dir: Path, console: Console) -> tuple[Evaluation, int]:
    import torch

    from paceline.eval.decode import CachedTarget
    from paceline.eval.evaluate import encode_prompts, evaluate, prompt_messages
    from paceline.models.loading import load_tokenizer
    from paceline.train.checkpoint import load_drafter

    drafter = load_drafter(run_dir)
    tokenizer = load_tokenizer(target)
    heldout = [json.loads(line) for line in _sample_lines("extraction_heldout.jsonl")[:NUM_PROMPTS]]
    prompts = encode_prompts([prompt_messages(record) for record in heldout], tokenizer)
    cached_target = CachedTarget.load(target, drafter.shape.target_layer_ids)

    def show(result: PromptResult, so_far: Evaluation) -> None:
        if len(so_far.results) == 1:
            console.print(heldout[0]["messages"][0]["content"], style="dim", markup=False, soft_wrap=True)
            console.print(tokenizer.decode(result.speculative.tokens), markup=False, soft_wrap=True)
        if len(so_far.results) % 10 == 0:
            console.print(
                f"{len(so_far.results):>3} prompts: acceptance length {so_far.acceptance.length:.2f}, "
                f"{so_far.speedup:.2f}x, {'identical' if so_far.is_lossless else 'NOT identical'}"
            )

    evaluation = evaluate(
        cached_target,
        drafter,
        prompts,
        max_new_tokens=MAX_NEW_TOKENS,
        stop_ids=cached_target.shape.eos_token_ids,
        on_prompt=show,
    )
    return evaluation, torch.get_num_threads()
