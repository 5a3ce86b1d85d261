"""The reference data: the target answers the prompts itself, answers that loop are left out, the rest becomes rows.

    python -m benchmarks.reference.build --target MODEL --prompts DIR --out DIR [--max-new-tokens 384] [--minutes 5]

`--prompts` is what `benchmarks.reference.prompts` wrote; `--out` gets ``answers/`` (`paceline regenerate`; gone on with
where it was ended), ``kept/`` (without loops), ``data/`` (`paceline prepare`) and ``data.json`` with counts, licences,
versions and the command. A small target falls into loops; a drafter learns those first, and they flatter its
acceptance. Where a GPU is lent for a while, `--minutes` takes what is answered by then.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from paceline import __version__, api
from paceline.eval.evaluate import ends_in_loop
from paceline.models.loading import read_shape


def answer_of(line: dict[str, Any]) -> list[int]:
    """Sampled tokens of the last turn of a line of ``answers.jsonl``."""
    row = line["rows"][-1]
    start = len(row["input_ids"])
    while start and row["loss_mask"][start - 1]:
        start -= 1
    ids: list[int] = row["input_ids"][start:]
    return ids


def without_loops(answers: Path, kept: Path, stop_ids: tuple[int, ...]) -> dict[str, dict[str, int]]:
    """Copy a folder of answers without those that end in a loop; counts, by the file of the prompts."""
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    shutil.copy(answers / "regenerate.json", kept)
    found: dict[str, Counter[str]] = {}
    with open(answers / "answers.jsonl", encoding="utf-8") as source, open(kept / "answers.jsonl", "w") as out:
        for text in source:
            line = json.loads(text)
            counts = found.setdefault(Path(line["source"].rpartition(":")[0]).stem, Counter())
            ids = answer_of(line)
            ended = bool(ids) and ids[-1] in stop_ids
            if ends_in_loop(ids[:-1] if ended else ids):
                counts["loops left out"] += 1
                continue
            counts["kept"] += 1
            counts["kept, cut by the limit"] += not ended
            counts["answer tokens"] += len(ids)
            out.write(text)
    return {name: dict(found[name]) for name in sorted(found)}


def main() -> None:
    """Answer, filter, prepare; write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=384)
    parser.add_argument("--limit", type=int, help="prompts in all, from the first file on")
    parser.add_argument("--minutes", type=float, help="take what is answered by then")
    parser.add_argument("--concurrency", type=int, help="answers decoded together")
    options = parser.parse_args()
    files = sorted(options.prompts.glob("*.jsonl"))
    started = time.perf_counter()
    # Ctrl-C, as a person would: it ends the answers, and only while they are under way
    alarm = threading.Timer(60 * (options.minutes or 0), os.kill, (os.getpid(), signal.SIGINT))
    if options.minutes:
        alarm.start()
    answers = api.regenerate(
        files, options.out / "answers", target=options.target, max_new_tokens=options.max_new_tokens, on_cut="keep",
        limit=options.limit, concurrency=options.concurrency,
    )  # fmt: skip
    alarm.cancel()
    answered_s = time.perf_counter() - started
    if not answers["finished"] and not (options.minutes and answered_s >= 60 * options.minutes):
        raise SystemExit("stopped; the same command goes on")
    print(answers, flush=True)
    stop_ids = read_shape(options.target).eos_token_ids
    kept = without_loops(options.out / "answers", options.out / "kept", stop_ids)
    info, report = api.prepare([options.out / "kept"], options.out / "data", tokenizer=options.target, max_length=1024)
    facts = {
        "command": "python -m benchmarks.reference.build --target MODEL --prompts DIR --out DIR "
        f"--max-new-tokens {options.max_new_tokens}" + (f" --limit {options.limit}" if options.limit else "")
        + (f" --minutes {options.minutes:g}" if options.minutes else "")
        + (f" --concurrency {options.concurrency}" if options.concurrency else ""),
        "versions": {"paceline": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
                     "python": platform.python_version()},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} threads",
        "prompts": json.loads((options.prompts / "prompts.json").read_text(encoding="utf-8")),
        "answered_s": round(answered_s, 1),
        "answers": {key: value for key, value in answers.items() if key != "out"},
        "kept": kept,
        "rows": info.num_rows,
        "tokens": info.num_tokens,
        "supervised_tokens": info.num_supervised,
        "rejected": report.num_rejected,
    }  # fmt: skip
    (options.out / "data.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: facts[key] for key in ("rows", "tokens", "supervised_tokens", "kept")}))


if __name__ == "__main__":
    main()
