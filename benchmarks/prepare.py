"""`paceline prepare` beside the plain way to tokenise a chat file, on synthetic conversations.

    python -m benchmarks.prepare [--rows 100000] [--rounds 2] [--target DIR] [--memory]

Two commands take turns, each in a process of its own, with the same number of worker processes:

    paceline   `paceline prepare`: reading, checking, the loss mask from the outside, hashes, the data set on disk
    datasets   `load_dataset("json")` and `.map(apply_chat_template(return_assistant_tokens_mask=True))`, which needs
               a template with generation tags and checks nothing

Both read one JSONL file and one template; their rows are compared (ids and masks) before anything is timed. `--memory`
runs `paceline prepare` alone on files of 0.5 and 2 GB and gives the peak memory of the parent and the largest worker.
The tokenizer is that of the demo's target, which `paceline demo` has made.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from paceline import __version__

RESULTS = Path(__file__).parent / "results"
FILE_BYTES = {"0.5 GB": 1 << 29, "2 GB": 1 << 31}

TEMPLATE = """{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML with generation tags, without which the library marks nothing."""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure and write the result."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--target", type=Path, help="tokenizer folder; by default the demo's target")
    parser.add_argument("--memory", action="store_true", help="measure peak memory on 0.5 and 2 GB instead")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=sorted(CHILDREN), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(CHILDREN[options.child](options)))
        return {}
    if options.target is None:
        from paceline.files import default_cache_dir
        from paceline.models.assets import FOLDER_NAME

        options.target = default_cache_dir() / FOLDER_NAME
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        options.folder = Path(folder)
        (options.folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
        figures = measure_memory(options) if options.memory else measure_speed(options)
    result = {
        "command": " ".join(["python -m benchmarks.prepare", *arguments]),
        "machine": {"cores": os.cpu_count(), "processor": _processor()},
        "versions": {
            "paceline": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("transformers", "tokenizers", "datasets", "pyarrow")},
        },
        "workers": options.workers,
        **figures,
    }
    path = options.out or RESULTS / ("prepare-memory.json" if options.memory else "prepare.json")
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    return result


def measure_speed(options: argparse.Namespace) -> dict[str, Any]:
    """Rows and tokens a second of both, in turns."""
    size = write_conversations(options.folder / "chats.jsonl", options.rows)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ("paceline", "datasets")}
    for _ in range(options.rounds):
        for name, found in runs.items():
            found.append(_run_child(name, options))
    assert all(run["tokens"] == runs["datasets"][0]["tokens"] for found in runs.values() for run in found)
    assert all(run["supervised"] == runs["datasets"][0]["supervised"] for found in runs.values() for run in found)
    figures = {name: _figures(found, options) for name, found in runs.items()}
    return {
        "rows": options.rows,
        "file_bytes": size,
        "tokens": runs["paceline"][0]["tokens"],
        "supervised": runs["paceline"][0]["supervised"],
        "same_rows": _same_rows(options),
        **figures,
        "ratio": figures["paceline"]["rows_per_s"] / figures["datasets"]["rows_per_s"],
    }


def measure_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of `paceline prepare` on two sizes of file."""
    figures = {}
    for name, size in FILE_BYTES.items():
        written = write_conversations(options.folder / "chats.jsonl", None, size)
        run = _run_child("paceline", options)
        figures[name] = {"file_bytes": written, **run}
    small, large = (figures[name]["parent_mib"] + figures[name]["worker_mib"] for name in FILE_BYTES)
    return {"runs": figures, "growth": large / small}


def write_conversations(path: Path, num_rows: int | None, num_bytes: int = 1 << 62) -> int:
    """Synthetic chats of one to four exchanges and log-normal lengths; returns the size of the file in bytes."""
    generator = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = ["".join(generator.choice(letters, generator.integers(1, 11))) for _ in range(20_000)]
    rank = 1 / np.arange(1, len(words) + 1)
    picks = generator.choice(len(words), 2_000_000, p=rank / rank.sum())
    text = [words[i] for i in picks]
    written = number = at = 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes and (num_rows is None or number < num_rows):
            messages = []
            for _ in range(int(generator.integers(1, 5))):
                for role, median in (("user", 30), ("assistant", 90)):
                    length = int(min(generator.lognormal(np.log(median), 0.8), 1500)) + 1
                    at = at + length if at + 2 * length < len(text) else 0
                    messages.append({"role": role, "content": " ".join(text[at : at + length])})
            written += file.write(json.dumps({"id": number, "messages": messages}) + "\n")
            number += 1
    return written


def run_paceline(options: argparse.Namespace) -> dict[str, Any]:
    """`paceline prepare` as it is; its own time, without the start of the interpreter."""
    from paceline.data.prepare import PrepareSettings, prepare

    start = time.perf_counter()
    settings = PrepareSettings(
        str(options.target), template=options.folder / "template.jinja", max_length=1 << 20, workers=options.workers
    )
    info, _ = prepare([options.folder / "chats.jsonl"], options.folder / "paceline", settings)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": info.num_tokens, "supervised": info.num_supervised, **_peaks()}


def run_datasets(options: argparse.Namespace) -> dict[str, Any]:
    """The library's loader and map, writing its cache file."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    tokenizer.chat_template = TEMPLATE

    def tokenize(batch: dict[str, list[Any]]) -> dict[str, Any]:
        found = tokenizer.apply_chat_template(
            batch["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return {"input_ids": found["input_ids"], "loss_mask": found["assistant_masks"]}

    start = time.perf_counter()
    cache = options.folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    rows = datasets.load_dataset(
        "json", data_files=str(options.folder / "chats.jsonl"), split="train", cache_dir=str(cache)
    )
    rows = rows.map(tokenize, batched=True, num_proc=options.workers, remove_columns=rows.column_names)
    seconds = time.perf_counter() - start
    rows.save_to_disk(str(options.folder / "datasets"))  # for the comparison, not timed
    tokens = sum(len(ids) for batch in rows.iter(1000) for ids in batch["input_ids"])
    supervised = sum(sum(mask) for batch in rows.iter(1000) for mask in batch["loss_mask"])
    return {"seconds": seconds, "tokens": tokens, "supervised": supervised}


CHILDREN = {"paceline": run_paceline, "datasets": run_datasets}


def _run_child(name: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.prepare", "--child", name, "--folder", str(options.folder)]
    command += ["--target", str(options.target), "--workers", str(options.workers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _same_rows(options: argparse.Namespace) -> int:
    """Rows whose ids and masks are the same in both results."""
    import datasets

    from paceline.data.dataset import Dataset

    ours = Dataset.open(options.folder / "paceline")
    theirs = datasets.load_from_disk(str(options.folder / "datasets"))
    same = 0
    for index, row in enumerate(theirs):
        ids, mask = ours.row(index)
        same += ids.tolist() == row["input_ids"] and mask.int().tolist() == row["loss_mask"]
    return same


def _figures(runs: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    rates = [options.rows / run["seconds"] for run in runs]
    tokens = [run["tokens"] / run["seconds"] for run in runs]
    return {
        "seconds": [round(run["seconds"], 2) for run in runs],
        "rows_per_s": statistics.median(rates),
        "rows_per_s_per_core": statistics.median(rates) / options.workers,
        "tokens_per_s_per_core": statistics.median(tokens) / options.workers,
    }


def _peaks() -> dict[str, int]:
    """Peak resident memory of this process and of its largest child."""
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {"parent_mib": own >> 10, "worker_mib": children >> 10}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
