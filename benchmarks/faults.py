"""Faults planted in the real pipeline: is each named, and does its removal give the gain that was promised?

    python -m benchmarks.faults --out benchmarks/results/faults-h200.json         # on one GPU
    python -m benchmarks.faults --device cpu --cases healthy gil-hog               # does it run?

A case is `paceline train` on a random target with one fault, which a file switches: `paceline profile attach` looks at
it from outside; then the fault is removed in the running process and the speed is measured on both sides of that. What
the look did to the run is measured too: stops by the reports themselves, speed by the run's own counters.

`--programs` looks at small programs that are not ours instead: tiny kernels, a wait after each, large products, memory
taken and given back with and without expandable segments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from paceline import __version__

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "paceline" / "data" / "samples" / "extraction_train.jsonl"
TOKENIZER = ROOT / "tests" / "assets" / "toy_tokenizer"
TEMPLATE = ROOT / "tests" / "assets" / "templates" / "chatml_plain.jinja"

WARM_STEPS = 12
START_S = 150.0


@dataclass(frozen=True)
class Case:
    """A run with a fault.

    Attributes:
        fault: What is planted; empty: nothing.
        causes: Ids of hypotheses of which one must be the verdict's cause; empty: any.
        side: Kind of the verdict on the pipeline that is wanted; empty: any.
        size: ``small`` is bound by launches, ``large`` by the GPU.
        gain_of: The hypothesis whose predicted gain is compared with the measured one.
    """

    name: str
    fault: str = ""
    causes: tuple[str, ...] = ()
    side: str = ""
    size: str = "small"
    layout: str = "colocated"
    gain_of: str = ""
    overrides: tuple[str, ...] = field(default=())


CASES = {
    case.name: case
    for case in (
        Case("healthy", causes=("launch-overhead",)),
        Case("gpu-bound", causes=("gpu-bound",), size="large"),
        Case("item-per-layer", "item", ("explicit-sync",), size="large", gain_of="explicit-sync"),
        Case("empty-cache", "empty-cache", ("allocator-churn",), size="large", gain_of="allocator-churn"),
        Case("gil-hog", "gil-hog", ("gil",), gain_of="gil"),
        # the GPU is the limit all the same: a hog that costs nothing is no cause
        Case("harmless-hog", "gil-hog", ("gpu-bound",), size="large", gain_of="gil"),
        Case("one-core", "one-core", ("cpu-starvation",), gain_of="cpu-starvation"),
        Case("slow-target", "slow-target", ("sleep",), "producer-bound", "large", "split", gain_of="sleep"),
        Case("slow-drafter", "slow-drafter", ("sleep",), "consumer-bound", "large", "split", gain_of="sleep"),
        Case("pageable-copies", "pageable", ("host-copy",), size="large", gain_of="host-copy"),
    )
}


# ----------------------------------------------------------------------------------------- inside of the run
def train_with_fault(config: list[str], fault: str, switch: Path) -> None:
    """Train; while the file `switch` is there, so is the fault."""
    from paceline.cli.main import main

    plant(fault, switch)
    while not switch.with_suffix(".go").exists():
        time.sleep(0.05)
    sys.argv = ["paceline", "train", *config]
    main()


def plant(fault: str, switch: Path) -> None:
    """Patch the pipeline's two sides."""
    from paceline.models.target import Target
    from paceline.train.step import TrainStep

    def around(owner: type, name: str, before: Callable[[Any], None]) -> None:
        inner = getattr(owner, name)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if switch.exists():
                before(self)
            return inner(self, *args, **kwargs)

        setattr(owner, name, wrapped)

    if fault == "item":
        around(Target, "features", lambda target: _hook_layers(target, switch))
    elif fault == "empty-cache":
        around(Target, "features", lambda _: torch.cuda.empty_cache())
        around(TrainStep, "accumulate", lambda _: torch.cuda.empty_cache())
    elif fault == "gil-hog":
        hog = threading.Thread(target=_hog, args=(switch,), name="hog", daemon=True)
        around(TrainStep, "accumulate", lambda _: hog.start() if hog.ident is None else None)
    elif fault == "one-core":
        core, cores = min(os.sched_getaffinity(0)), os.sched_getaffinity(0)
        around(TrainStep, "accumulate", lambda _: _pin({core}))
        threading.Thread(target=_share_core, args=(switch, core, cores), name="pins", daemon=True).start()
    elif fault == "slow-target":
        around(Target, "features", lambda _: time.sleep(0.1))
    elif fault == "slow-drafter":
        around(TrainStep, "accumulate", lambda _: time.sleep(0.1))
    elif fault == "pageable":
        _copy_by_way_of_the_host(Target, switch)


def _hook_layers(target: Any, switch: Path) -> None:
    if getattr(target, "_is_hooked", False):
        return
    target._is_hooked = True

    def wait(_module: Any, _args: Any, output: Any) -> None:
        if switch.exists():
            tensor = output[0] if isinstance(output, tuple) else output
            tensor.abs().max().item()

    for layer in target._trunk.layers:
        layer.register_forward_hook(wait)


def _hog(switch: Path) -> None:
    """Python for six of ten milliseconds."""
    while True:
        end = time.monotonic() + 0.006
        while switch.exists() and time.monotonic() < end:
            sum(range(200))
        time.sleep(0.004)


def _pin(cores: set[int]) -> None:
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(tid), cores)


def _share_core(switch: Path, core: int, cores: set[int]) -> None:
    """A busy neighbour on the core; with the fault removed it goes, and all threads may run anywhere."""
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(neighbour.pid, {core})
    while switch.exists() and os.getppid() > 1:
        time.sleep(0.1)
    neighbour.kill()
    neighbour.wait()
    _pin(cores)


def _copy_by_way_of_the_host(owner: Any, switch: Path) -> None:
    import dataclasses

    inner = owner.features

    def features(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = inner(self, *args, **kwargs)
        if switch.exists():
            there = {
                each.name: value.cpu().to(value.device)
                for each in dataclasses.fields(batch)
                if isinstance(value := getattr(batch, each.name), torch.Tensor)
            }
            batch = dataclasses.replace(batch, **there)
        return batch

    owner.features = features


# ----------------------------------------------------------------------------------------- outside
def make_target(folder: Path, size: str, on_gpu: bool) -> Path:
    """A random target with the toy tokenizer."""
    import transformers

    sizes = {
        "small": dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=9),
        "large": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=6, num_attention_heads=16),
    }[size if on_gpu else "small"]
    if not on_gpu:
        sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4)
    place = folder / f"target-{size}"
    if place.exists():
        return place
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=4096, max_position_embeddings=4096, tie_word_embeddings=True, **sizes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(place)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, place / file.name)
    shutil.copy(TEMPLATE, place / "chat_template.jinja")
    return place


def settings(case: Case, work: Path, target: Path, device: str) -> list[str]:
    """Overrides of the run."""
    on_gpu = device.startswith("cuda")
    tokens = {"small": 2048, "large": 12_288}[case.size] if on_gpu else 512
    return [
        f"run.dir={work / case.name}",
        f"run.device={device}",
        f"target.path={target}",
        f"data.path={work / 'data'}",
        "data.epochs=40",
        "data.validation=0",
        "draft.num_layers=2",
        f"draft.block_size={16 if on_gpu else 4}",
        f"pipeline.tokens_per_batch={tokens}",
        f"optim.tokens_per_step={tokens}",
        f"topology.layout={case.layout}",
        "topology.threads=1",
        "kernels.compile=false",
        "kernels.cuda_graphs='off'",
        "checkpoint.every_steps=1000000",
        *case.overrides,
    ]


def start(case: Case, work: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start the run; it waits for its turn once everything is imported."""
    target = make_target(work, case.size, options.device.startswith("cuda"))
    if not (work / "data").exists():
        paceline("prepare", SAMPLES, "--tokenizer", target, "--out", work / "data", "--max-length", 512)
    switch, run_file = work / f"{case.name}.fault", work / "run.yaml"
    switch.touch()
    run_file.write_text("{}\n", encoding="utf-8")
    arguments = ["--child", case.fault, str(switch), str(run_file), *settings(case, work, target, options.device)]
    with open(work / f"{case.name}.log", "w", encoding="utf-8") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults", *arguments], stdout=output, stderr=subprocess.STDOUT
        )


def run_case(
    case: Case, work: Path, options: argparse.Namespace, started: subprocess.Popen[bytes] | None = None
) -> dict[str, Any]:
    """Train with the fault, look, remove it, and measure."""
    process = started or start(case, work, options)
    switch, log, run = work / f"{case.name}.fault", work / f"{case.name}.log", work / case.name
    (work / f"{case.name}.go").touch()
    try:
        wait_for_steps(run, process, log)
        undisturbed = rate(run, options.seconds) if options.undisturbed else None
        record, took_s = attach(str(run), work / f"{case.name}.json", options)
        before = rate(run, options.seconds)
        switch.unlink()
        time.sleep(2.0)
        after = rate(run, options.seconds)
    finally:
        process.kill()
        process.wait()
    if options.keep is not None:
        shutil.copy(work / f"{case.name}.json", options.keep / f"faults-{case.name}.json")
    rates = {"before_the_look": undisturbed, "during_the_look": during(record), "fault": before, "removed": after}
    return {**asdict(case), **told(case, record), **gains(case, record, rates), "look_s": took_s, "tok_per_s": rates}


def during(record: dict[str, Any]) -> float | None:
    """Tokens a second as the look itself saw them: what its promise is about."""
    seen = record["tokens_per_s"]
    return seen["value"] if seen else None


def told(case: Case, record: dict[str, Any]) -> dict[str, Any]:
    """The verdict, whether it is the planted one, and what the look did."""
    verdict = record["conclusion"]
    outcomes = {each["id"]: [each["outcome"], each["score"]] for each in record["hypotheses"]}
    supported = [id for id, (outcome, _) in outcomes.items() if outcome == "supported"]
    return {
        "cause": verdict["cause"],
        "kind": verdict["side"],
        "is_right": (not case.causes or verdict["cause"] in case.causes)
        and (not case.side or verdict["side"] == case.side),
        "line": verdict["line"],
        "supported": supported,
        "stops": {
            each["id"]: each["disturbance"]
            for each in record["levels"]
            if each["disturbance"]["stop_frac"] is not None or each["disturbance"]["predicted_stop_frac"] is not None
        },
        "levels": {each["id"]: each["ok"] and each["in_verdict"] for each in record["levels"]},
        "reasons": {each["id"]: each["reason"] for each in record["levels"] if each["reason"]},
        "unmatched": {each["level"]: each["unmatched"]["value"] for each in record["sorted"]},
        "observations": {name: round(figure["value"], 4) for name, figure in record["observations"].items()},
    }


def gains(case: Case, record: dict[str, Any], rates: dict[str, float | None]) -> dict[str, Any]:
    """Promised and measured."""
    promised = next((each["gain"] for each in record["hypotheses"] if each["id"] == case.gain_of), None)
    before, after = rates["during_the_look"] or rates["fault"], rates["removed"]
    measured = after / before if before and after else None
    error = promised["value"] / measured - 1.0 if promised and measured else None
    return {"gain_promised": promised and [promised["value"], *promised["interval"]], "gain_measured": measured,
            "gain_error": error}  # fmt: skip


def judge_again(results: dict[str, Any], reports: Path) -> dict[str, Any]:
    """The same looks by today's rules."""
    from paceline.profiling.classify import load_rules, sort
    from paceline.profiling.evidence import Report
    from paceline.profiling.judgement import judged

    for kind, prefix in (("cases", "faults"), ("programs", "program")):
        for name, found in results[kind].items():
            place = reports / f"{prefix}-{name}.json"
            if not place.exists() or "error" in found:
                continue
            report = Report.model_validate_json(place.read_text(encoding="utf-8"))
            comms = {(thread.pid, thread.tid): thread.comm for thread in report.threads}
            stacks = [s for level in ("3", "4", "4b", "6") for s in sort(report.stacks, level, comms, load_rules())[0]]
            report = judged(report.model_copy(update={"stacks": tuple(stacks)}))
            place.write_text(report.model_dump_json(by_alias=True), encoding="utf-8")
            record = report.model_dump(mode="json", by_alias=True)
            case = CASES[name] if kind == "cases" else Case(name, causes=PROGRAMS[name][1])
            found.update(told(case, record))
            if kind == "cases":
                found["tok_per_s"]["during_the_look"] = during(record)
                found.update(asdict(case) | gains(case, record, found["tok_per_s"]))
    return results


def attach(what: str, out: Path, options: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Look at it as a user does."""
    began = time.monotonic()
    arguments = ["--seconds", options.seconds, "--json", out, "--pause-budget", options.budget, "--native-seconds",
                 options.native_seconds, "--allow-pause"]  # fmt: skip
    paceline("profile", "attach", what, *arguments)
    return json.loads(out.read_text(encoding="utf-8")), time.monotonic() - began


def paceline(*arguments: object) -> str:
    """Run the command; its standard output. Raises: CalledProcessError."""
    command = [sys.executable, "-m", "paceline", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout


def counters(run: Path) -> tuple[float, dict[str, int]] | None:
    """The run's own counters, from its page, and when they were read."""
    from paceline.profiling.page import PageError, pages_in, read_page

    for page in pages_in(run / "profile"):
        with contextlib.suppress(PageError, FileNotFoundError):
            snapshot = read_page(page)
            return snapshot.taken_ns / 1e9, snapshot.gauges
    return None


def wait_for_steps(run: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the run is warm. Raises: RuntimeError if it ends or takes too long."""
    deadline = time.monotonic() + START_S
    while (found := counters(run)) is None or found[1]["step"] < WARM_STEPS:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run did not start: {log.read_text(encoding='utf-8')[-3000:]}")
        time.sleep(0.2)


def rate(run: Path, seconds: float) -> float:
    """Tokens a second, from step to step."""
    moves: list[tuple[float, int]] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = counters(run)
        if found is not None and (not moves or found[1]["tokens"] != moves[-1][1]):
            moves.append((found[0], found[1]["tokens"]))
        time.sleep(0.002)
    if len(moves) < 3:
        return 0.0
    return (moves[-1][1] - moves[1][1]) / (moves[-1][0] - moves[1][0])


# ----------------------------------------------------------------------------------------- programs of others
PROGRAMS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "tiny-kernels": ("tiny", ("launch-overhead",), {}),
    "wait-after-each": ("waits", ("explicit-sync", "gpu-bound"), {}),
    "large-products": ("products", ("gpu-bound",), {}),
    "churn": ("churn", ("allocator-churn",), {}),
    "churn-expandable": ("churn", ("allocator-churn",), {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
}


def work_on(program: str) -> None:
    """A loop with a known bottleneck, until it is killed."""
    x = torch.ones(64, device="cuda")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    middle = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    print("ready", flush=True)
    while True:
        if program == "tiny":
            for _ in range(1000):
                x = x * 1.0
            torch.cuda.synchronize()
        elif program == "waits":
            float((middle @ middle).max())
        elif program == "products":
            for _ in range(20):
                a @ a
            torch.cuda.synchronize()
        else:
            parts = [torch.empty(64 << 20, device="cuda", dtype=torch.uint8) for _ in range(8)]
            del parts
            torch.cuda.empty_cache()
            (x + 1).sum()


def run_program(name: str, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    program, causes, environment = PROGRAMS[name]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.faults", "--program", program],
        stdout=subprocess.PIPE, env={**os.environ, **environment},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(2.0)
        record, took_s = attach(str(process.pid), work / f"{name}.json", options)
    finally:
        process.kill()
        process.wait()
    if options.keep is not None:
        shutil.copy(work / f"{name}.json", options.keep / f"program-{name}.json")
    return {**told(Case(name, causes=causes), record), "look_s": took_s}


def machine(device: str) -> str:
    return (
        torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()}, {os.cpu_count()} cores"
    )


def main() -> None:
    """Run the cases one after another, and write down each as it ends."""
    if sys.argv[1:2] == ["--child"]:
        train_with_fault(sys.argv[4:], sys.argv[2], Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--programs", nargs="*", default=[], choices=list(PROGRAMS))
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--native-seconds", type=float, default=28.0)
    parser.add_argument("--budget", type=float, default=0.03)
    parser.add_argument("--at-once", action="store_true", help="load all runs beforehand: saves time, takes memory")
    parser.add_argument("--undisturbed", action="store_true", help="measure the speed before the look too")
    parser.add_argument("--keep", type=Path, help="folder for the reports")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--judge", type=Path, metavar="FILE", help="judge the looks of this result again (--keep)")
    options = parser.parse_args()
    if options.judge is not None:
        results = judge_again(json.loads(options.judge.read_text(encoding="utf-8")), options.keep)
        (options.out or options.judge).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        return
    if options.program:
        work_on(options.program)
        return
    results = {
        "command": " ".join(["python -m benchmarks.faults", *sys.argv[1:]]),
        "machine": machine(options.device),
        "versions": {"paceline": __version__, "python": platform.python_version(), "torch": torch.__version__,
                     "py-spy": version("py-spy"), "transformers": version("transformers")},
        "cases": {}, "programs": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        started = {name: start(CASES[name], Path(folder), options) for name in options.cases if options.at_once}
        for kind, name in _order(options):
            try:
                if kind == "cases":
                    found = run_case(CASES[name], Path(folder), options, started.get(name))
                else:
                    found = run_program(name, Path(folder), options)
            except Exception as error:  # the others still count
                found = {"error": f"{type(error).__name__}: {error}"[-3000:]}
            results[kind][name] = found
            print(f"{name}: {found.get('is_right')} {found.get('cause')} {found.get('line', found.get('error'))}")
            print(f"    gain {found.get('gain_promised')} measured {found.get('gain_measured')}", flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _order(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    yield from (("cases", name) for name in options.cases)
    yield from (("programs", name) for name in options.programs)


if __name__ == "__main__":
    main()
