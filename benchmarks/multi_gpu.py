"""Several targets and several drafters on the GPUs of one host: speed, waits, exactness, and what happens to it.

    python -m benchmarks.multi_gpu --out DIR                            # all GPUs there are, Qwen3-8B's shape
    python -m benchmarks.multi_gpu --shape qwen3.6-27b --splits 5+3 --out DIR
    python -m benchmarks.multi_gpu --shape tiny --roles 3 --out DIR     # a rehearsal on a CPU, roles share its cores
    python -m benchmarks.multi_gpu --shape qwen3-0.6b --roles 3 --splits 2+1 --out DIR     # on one GPU

A random target of the shape is written as a folder, random conversations become a data set, and each layout is a run of
the product in a process of its own. Every run takes the same micro-batches in the same steps:

    alone        one process, one GPU: what the scaling is measured against
    colocated    a target and a drafter on every GPU, in turn; left out where roles share one GPU
    N+M          N targets beside M drafters, for every split that is asked for; losses have to be those of `alone`
    struck       the main split once more, in which a target is killed and the run is looked at by `profile attach`,
                 stopped and resumed; losses have to be those of the same split left alone

``multi_gpu.json`` has tokens a second, stages by role, waits, the verdict and the transport of each, the efficiency
against `alone`, and what `paceline plan` says of the same splits. It is written anew after every run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import CONFIGS, random_target
from paceline import __version__, api
from paceline.errors import PacelineError
from paceline.files import default_cache_dir
from paceline.train.metrics import read_metrics

TOKENIZER = Path(__file__).parents[1] / "tests" / "assets"
MAIN_SPLITS = {8: "5+3", 4: "3+1", 3: "2+1", 2: "1+1"}
"""By number of GPUs, the split that is struck."""


def write_target(shape: str, folder: Path, device: str) -> None:
    """A random target's folder, with the tests' tokenizer of bytes."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = random_target(CONFIGS[shape](), device, dtype)
    model.save_pretrained(folder)
    for file in (TOKENIZER / "toy_tokenizer").iterdir():
        shutil.copy(file, folder)
    shutil.copy(TOKENIZER / "templates" / "chatml_plain.jinja", folder / "chat_template.jinja")
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


def write_data(folder: Path, target: Path, rows: int, longest: int) -> Path:
    """Random conversations of a sixth of the longest row up to it, prepared."""
    random_ = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz     "
    chats = folder / "chats.jsonl"
    with open(chats, "w", encoding="utf-8") as file:
        for _ in range(rows):
            count = random_.randint(longest // 6, longest) - 48  # the template adds some
            text = "".join(random_.choices(letters, k=max(8, count)))
            pair = [
                {"role": "user", "content": text[: count // 4]},
                {"role": "assistant", "content": text[count // 4 :]},
            ]
            file.write(json.dumps({"messages": pair}) + "\n")
    api.prepare(chats, folder / "data", tokenizer=target, max_length=longest)
    return folder / "data"


class World:
    """Target, data and options; runs are made below a folder."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.is_tiny = options.shape.startswith("tiny")
        self.target = folder / "target"
        write_target(options.shape, self.target, self.device)
        self.tokens = 256 if self.is_tiny else 12_288
        self.steps = options.steps
        # the batches of a step divide by every number of drafters up to `roles`
        self.batches_per_step = max(options.roles, 2)
        longest = 128 if self.is_tiny else 3072
        rows = 2 * self.steps * self.batches_per_step * self.tokens // longest
        self.data = write_data(folder, self.target, rows, longest)

    def tree(self, name: str, steps: int, topology: dict[str, Any]) -> dict[str, Any]:
        """A run file."""
        draft = {"num_layers": 2, "block_size": 4} if self.is_tiny else {}
        return {
            "run": {"dir": str(self.folder / name), "device": self.device, "max_steps": steps},
            "target": {"path": str(self.target)},
            "draft": draft,
            "data": {"path": str(self.data), "epochs": 2, "max_length": 128 if self.is_tiny else 3072,
                     "validation": 0.0},
            "optim": {"tokens_per_step": self.batches_per_step * self.tokens},
            "pipeline": {"tokens_per_batch": self.tokens},
            "topology": {"threads": 1 if self.device == "cpu" else "auto"} | topology,
            "checkpoint": {"every_steps": 10_000},
            "profiling": {"interval": 2.0},
        }  # fmt: skip

    def run(
        self, name: str, topology: dict[str, Any], meanwhile: Callable[[Path, subprocess.Popen[str]], Any] | None = None
    ) -> dict[str, Any]:
        """Train in a process of its own; what came of it, or why nothing did.

        Args:
            meanwhile: Called with the run folder once it trains.
        """
        tree = self.tree(name, self.steps, topology)
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
        run_dir, started = Path(tree["run"]["dir"]), time.perf_counter()
        process = self.start(file)
        extra = None if meanwhile is None else meanwhile(run_dir, process)
        code = wait(process, self.options.patience)
        found = {"topology": topology, "seconds": round(time.perf_counter() - started, 1)}
        if code:
            log = file.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
            return found | {"exit_code": code, "log": log[-1500:].replace(str(self.folder), "DIR")}
        found |= summary(run_dir)
        return found if extra is None else found | extra

    def start(self, file: Path) -> subprocess.Popen[str]:
        """`paceline train` of a run file, its output beside that."""
        with open(file.with_suffix(".log"), "a", encoding="utf-8") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "paceline", "train", str(file)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True,
                env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
            )  # fmt: skip

    def topology(self, split: str) -> dict[str, Any]:
        """Of ``alone``, ``colocated`` or ``N+M``."""
        if split == "alone":
            return {"executor": "local", "layout": "colocated"}
        if split == "colocated":
            return {"executor": "ray", "layout": "colocated", "drafters": self.options.roles}
        targets, drafters = map(int, split.split("+"))
        found = {"executor": "ray", "layout": "split", "targets": targets, "drafters": drafters}
        if 0 < torch.cuda.device_count() < self.options.roles:
            found["gpus_per_target"] = 0  # they share
        return found


def wait(process: subprocess.Popen[str], seconds: float) -> int:
    """The exit code; 124 where it took too long, and was killed."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return 124


def until_step(run_dir: Path, process: subprocess.Popen[str], step: int) -> bool:
    """Wait until the run has written a step; False if its process ended before."""
    metrics = run_dir / "metrics.jsonl"
    while process.poll() is None:
        if metrics.is_file() and len(read_metrics(metrics)) >= step:
            return True
        time.sleep(0.1)
    return False


def summary(run_dir: Path) -> dict[str, Any]:
    """What a run folder says: speed after the first steps, stages by role, waits, verdict, transport, losses."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    steady = lines[min(4, len(lines) // 2) :]
    seconds = sum(line["seconds"] for line in steady)
    report = json.loads((run_dir / "report.json").read_text(encoding="utf-8"))
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "tok_per_s": round(sum(line["tokens"] for line in steady) / seconds, 1),
        "step_ms": round(1e3 * statistics.median(line["seconds"] for line in steady), 1),
        "put_wait_frac": round(sum(line["put_wait_s"] for line in steady) / seconds, 4),
        "get_wait_frac": round(sum(line["get_wait_s"] for line in steady) / seconds, 4),
        "queue": statistics.mean(line["queue"] for line in steady),
        "verdict": report["verdict"],
        "stages_ms_per_batch": stages_of(run_dir),
        "transport": next(
            ({k: v for k, v in each.items() if k not in ("time", "event")} for each in events
             if each["event"] == "transport"), None,
        ),
        "events": [each["event"] for each in events if each["event"] != "transport"],
        "ledger": report["ledger"],
        "losses": [line["loss"] for line in lines],
    }  # fmt: skip


def stages_of(run_dir: Path) -> dict[str, dict[str, float]]:
    """Milliseconds a run of each stage, by role without its number, over all tables."""
    file = run_dir / "profile" / "stages.jsonl"
    sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0]))
    for text in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        line = json.loads(text)
        for stage, stats in line.get("stages", {}).items():
            if stats.get("count"):
                place = sums[str(line.get("role", "")).rpartition("-")[0]][stage]
                place[0] += stats["count"] * stats["avg_ms"]
                place[1] += stats["count"]
    return {
        role: {stage: round(total / count, 3) for stage, (total, count) in stages.items()}
        for role, stages in sums.items()
    }


def difference(losses: list[float], straight: list[float]) -> float:
    """Largest relative difference of two runs' losses, step by step."""
    if len(losses) != len(straight):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(losses, straight, strict=True))


def strike(world: World) -> Callable[[Path, subprocess.Popen[str]], dict[str, Any]]:
    """Kill a target after a third of the steps, look at the run, stop it after two thirds and resume it."""

    def meanwhile(run_dir: Path, process: subprocess.Popen[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if until_step(run_dir, process, world.steps // 3):
            roles = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["roles"]
            os.kill(roles["target-0"]["pid"], signal.SIGKILL)
            found["killed"] = "target-0"
        report = run_dir.with_suffix(".attach.json")
        words = ["profile", "attach", str(run_dir), "--seconds", "3", "--json", str(report)]
        looked = subprocess.run([sys.executable, "-m", "paceline", *words], capture_output=True, text=True)
        if looked.returncode == 0:
            content = json.loads(report.read_text(encoding="utf-8"))
            levels = {
                each["id"]: {
                    "ok": each["ok"],
                    "reason": each["reason"].replace(str(world.folder), "DIR"),
                    "disturbance": each["disturbance"],
                }
                for each in content["levels"]
            }
            found["attach"] = {"conclusion": content["conclusion"], "levels": levels}
        else:
            found["attach"] = {"error": looked.stderr[-300:].replace(str(world.folder), "DIR")}
        before = len(read_metrics(run_dir / "metrics.jsonl"))
        found["steps_after_look"] = world.steps - before  # it went on if there are any
        if until_step(run_dir, process, 2 * world.steps // 3):
            subprocess.run([sys.executable, "-m", "paceline", "stop", str(run_dir)], capture_output=True)
        found["stopped_with"] = wait(process, world.options.patience)
        again = world.start(world.folder / f"{run_dir.name}.json")
        found["resumed_with"] = wait(again, world.options.patience)
        return found

    return meanwhile


def planned(options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of each split by `paceline plan`; empty where it knows nothing of the machine."""
    if not torch.cuda.is_available() or options.shape.startswith("tiny"):
        return {}
    card = "h200" if "H200" in torch.cuda.get_device_name() else torch.cuda.get_device_name()
    try:
        record = api.plan(options.shape, f"{options.roles}x{card}", even=True)
    except PacelineError as error:
        print(f"no plan: {error}", file=sys.stderr)
        return {}
    names = {"colocated": "colocated"}
    return {
        names.get(each["layout"], f"{each['targets']}+{each['drafters']}"): each["tok_per_s"]
        for each in record["splits"]
        if each.get("gpus_per_target", 1) == 1
    }


def main() -> None:
    """Run all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b", choices=sorted(CONFIGS))
    parser.add_argument("--roles", type=int, default=torch.cuda.device_count(), help="GPUs; without any, roles in all")
    parser.add_argument("--splits", nargs="*", help="such as 5+3; every split of the roles by default")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for a run")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.roles < 2:
        parser.error("--roles: at least 2 are wanted; on one GPU or none give a number, and they share it")
    splits = options.splits or [f"{n}+{options.roles - n}" for n in range(1, options.roles)]
    main_split = MAIN_SPLITS.get(options.roles, f"{options.roles - 1}+1")
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "command": f"python -m benchmarks.multi_gpu --shape {options.shape} --roles {options.roles} "
        f"--splits {' '.join(splits)} --steps {options.steps} --out DIR",
        "machine": {
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "cores": os.cpu_count(),
            "load_at_start": round(os.getloadavg()[0], 1),
        },
        "versions": {name: version(name) for name in ("torch", "transformers", "ray")}
        | {"paceline": __version__, "python": platform.python_version()},
        "is_rehearsal": torch.cuda.device_count() < options.roles,
        "warm_cache": any((default_cache_dir() / "kernels").glob("*")),
        "planned_tok_per_s": planned(options),
        "runs": {},
    }
    runs = result["runs"]

    def keep(name: str, found: dict[str, Any]) -> None:
        straight = runs.get("alone", {}).get("losses")
        if straight and "losses" in found:
            found["loss_difference_from_alone"] = difference(found["losses"], straight)
            found["efficiency"] = round(found["tok_per_s"] / runs["alone"]["tok_per_s"] / options.roles, 4)
        if (predicted := result["planned_tok_per_s"].get(name)) and "tok_per_s" in found:
            found["plan_error"] = round(predicted / found["tok_per_s"] - 1, 4)
        runs[name] = found
        shown = {key: value for key, value in found.items() if key not in ("losses", "stages_ms_per_batch", "verdict")}
        print(name, json.dumps(shown), flush=True)
        (options.out / "multi_gpu.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        world = World(options, Path(folder))
        result["set_up_s"] = round(time.perf_counter() - started, 1)
        shares = 0 < torch.cuda.device_count() < options.roles
        for name in ("alone", *([] if shares else ["colocated"]), *splits):
            keep(name, world.run(name, world.topology(name)))
        struck = world.run("struck", world.topology(main_split), strike(world))
        if "losses" in struck and "losses" in runs.get(main_split, {}):
            struck["loss_difference_from_unstruck"] = difference(struck["losses"], runs[main_split]["losses"])
        keep("struck", struck)


if __name__ == "__main__":
    main()
