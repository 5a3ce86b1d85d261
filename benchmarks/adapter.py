"""What the drafter of a base model is worth for a fine-tune of it: as it is, adapted, and from scratch.

    python -m benchmarks.adapter --target DIR --work DIR --out FILE
    python -m benchmarks.adapter --target DIR --work DIR --device cuda --base-prompts 2400 --prompts 2400 \
        --tokens 4096 --layer-ids '"auto"' --block-size 16 --base-steps 6000 --steps 6000 --epochs 100 --limit 48 \
        --out benchmarks/results/adapter-cuda.json

The second command is for a GPU, `--steps` as many as its half hour has; it has not been run.

1. A LoRA is trained with PEFT: records are answered in XML, where the base model writes JSON, as was asked for.
2. The fine-tune answers prompts itself, greedily: that is what a drafter for it learns from. The base's own answers to
   the same kinds of prompts ship with Paceline.
3. One drafter learns the base for long ("published"). One goes on from it on the fine-tune (`draft.init`), one starts
   afresh there; both get the same steps, data and settings. Steps are made equal and not seconds: seconds compare
   nothing on a machine that other programs use as well. Seconds are in the file.
4. Every drafter decodes held-out prompts, and prompts of kinds that no drafter has seen, as `paceline eval` does.

Each stage leaves its result in `--work` and is not repeated there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.recipes import BASE, KEPT, Lines
from benchmarks.spine import RESULTS, SAMPLES, paceline
from paceline import __version__
from paceline.cli.train import run_training
from paceline.config import load_config
from paceline.eval.answers import greedy_answers, read_answers, write_answers
from paceline.eval.decode import CachedTarget
from paceline.eval.evaluate import encode_prompts, evaluate
from paceline.files import staged_folder, write_atomically
from paceline.models.loading import load_text_model, load_tokenizer, read_shape
from paceline.train.checkpoint import load_drafter

Messages = list[dict[str, Any]]
SETS = {"held-out": "extraction_heldout.jsonl", "unseen kinds": "extraction_unseen.jsonl"}


def conversations(name: str) -> list[Messages]:
    """Those of a file that ships with the package, with the base's own answers."""
    text = (SAMPLES / name).read_text(encoding="utf-8")
    return [json.loads(line)["messages"] for line in text.splitlines()]


def as_xml(answer: str) -> str | None:
    """A flat JSON record in XML; None for anything else."""
    try:
        record = json.loads(answer)
    except ValueError:
        return None
    if not isinstance(record, dict) or not record or any(isinstance(each, dict | list) for each in record.values()):
        return None
    fields = "\n".join(f"  <{key}>{value}</{key}>" for key, value in record.items())
    return f"<record>\n{fields}\n</record>"


# ------------------------------------------------------------------------------------------------------ the fine-tune


def examples(tokenizer: Any, number: int) -> list[tuple[list[int], int]]:
    """Token ids of conversations with answers in XML, and where the answer begins."""
    found = []
    for messages in conversations("extraction_train.jsonl"):
        answer = as_xml(messages[-1]["content"])
        if answer is None:
            continue
        prompt = encode_prompts([messages[:-1]], tokenizer)[0]
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        found.append(([*prompt, *ids, tokenizer.eos_token_id], len(prompt)))
        if len(found) == number:
            break
    return found


def batches(rows: list[tuple[list[int], int]], size: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Padded ids and labels ``[B, S]``; -100 where nothing is learnt."""
    draw = random.Random(seed)
    for _ in range(steps):
        chosen = draw.sample(rows, size)
        width = max(len(ids) for ids, _ in chosen)
        ids, labels = torch.zeros(size, width, dtype=torch.long), torch.full((size, width), -100)
        for row, (tokens, start) in enumerate(chosen):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, start : len(tokens)] = torch.tensor(tokens[start:])
        yield ids, labels


def train_adapter(folder: Path, options: argparse.Namespace) -> None:
    """A LoRA of all linear layers, written in PEFT's layout."""
    import peft

    torch.manual_seed(options.seed)
    tokenizer = load_tokenizer(options.target)
    config = peft.LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(load_text_model(options.target, device=options.device), config).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=options.lora_lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lora_lr, total_steps=options.lora_steps)
    losses, started = [], time.perf_counter()
    for ids, labels in batches(
        examples(tokenizer, options.lora_rows), options.lora_batch, options.lora_steps, options.seed
    ):
        # rows are padded on the right, where a causal model's padding reaches no token that counts
        with torch.autocast(options.device, torch.bfloat16):
            loss = model(input_ids=ids.to(options.device), labels=labels.to(options.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(round(float(loss.detach()), 4))
        print(f"adapter: step {len(losses)} of {options.lora_steps}, loss {losses[-1]}", flush=True)
    with staged_folder(folder) as place:
        model.save_pretrained(place)
        facts = {"losses": losses, "seconds": round(time.perf_counter() - started, 1), "rank": options.rank}
        (place / "training.json").write_text(json.dumps(facts), encoding="utf-8")


# ----------------------------------------------------------------------------------------------- what drafters learn


def answer(path: Path, adapter: Path, options: argparse.Namespace) -> dict[str, int]:
    """The fine-tune's own greedy answers to prompts, as conversations."""
    prompts = [messages[:-1] for messages in conversations("extraction_train.jsonl")[: options.prompts]]
    model = load_text_model(options.target, device=options.device, adapter=str(adapter))
    stop_ids = read_shape(options.target).eos_token_ids
    outcome = write_answers(
        model,
        load_tokenizer(options.target),
        prompts,
        path.with_suffix(".answers"),
        max_new_tokens=options.max_new_tokens,
        stop_ids=stop_ids,
        on_batch=lambda done, so_far: print(f"answers: {done} of {len(prompts)}, {dict(so_far)}", flush=True),
    )
    write_atomically(path, "".join(read_answers(path.with_suffix(".answers"))))
    return dict(outcome)


def samples(adapter: Path, options: argparse.Namespace) -> list[dict[str, str]]:
    """What base and fine-tune say to a few held-out prompts."""
    prompts = [messages[:-1] for messages in conversations(SETS["held-out"])[: options.samples]]
    tokenizer, shape = load_tokenizer(options.target), read_shape(options.target)
    found = [{"prompt": prompt[-1]["content"]} for prompt in prompts]
    for name, folder in (("base", None), ("fine-tune", str(adapter))):
        model = load_text_model(options.target, device=options.device, adapter=folder)
        ids = encode_prompts(prompts, tokenizer)
        for row, text in zip(found, greedy_answers(model, ids, 96, shape.eos_token_ids), strict=True):
            row[name] = tokenizer.decode([each for each in text if each not in shape.eos_token_ids])
    return found


# ------------------------------------------------------------------------------------------------ training, decoding


def train(
    folder: Path, data: Path, steps: int, options: argparse.Namespace, adapter: Path | None, init: Path | None
) -> dict[str, Any]:
    """One run of the product; what it took. A run that is there is gone on with."""
    keys = BASE | {
        "run.dir": str(folder), "run.device": options.device, "run.seed": options.seed, "run.max_steps": steps,
        "target.path": options.target, "target.adapter": None if adapter is None else str(adapter),
        "data.path": str(data), "draft.init": None if init is None else str(init),
        "optim.tokens_per_step": options.tokens, "pipeline.tokens_per_batch": options.tokens,
        "optim.lr": options.lr, "target.layer_ids": options.layer_ids,
        "draft.block_size": options.block_size, "data.epochs": options.epochs,
        "pipeline.feature_cache_gib": 2 if options.device == "cpu" else 0,
    }  # fmt: skip
    config = load_config(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    started = time.perf_counter()
    report = run_training(config, Lines())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert report.step == steps, f"{report.step} of {steps} steps: give it more data or epochs"
    return {
        "steps": report.step,
        "seconds": round(time.perf_counter() - started, 1),
        "tokens": sum(line["tokens"] for line in lines),
        "first_loss": round(lines[0]["loss"], 4),
        "last_loss": round(sum(line["loss"] for line in lines[-20:]) / len(lines[-20:]), 4),
    }


def decoded(run: Path, options: argparse.Namespace, adapter: Path | None) -> dict[str, dict[str, Any]]:
    """What a run's drafter does for each set of prompts, on the base or the fine-tune."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    drafter = load_drafter(run).to(device, dtype).requires_grad_(False)
    target = CachedTarget.load(
        options.target,
        drafter.shape.target_layer_ids,
        dtype=dtype,
        device=device,
        adapter=None if adapter is None else str(adapter),
    )
    tokenizer, found = load_tokenizer(options.target), {}
    for name, file in SETS.items():
        prompts = encode_prompts([messages[:-1] for messages in conversations(file)[: options.limit]], tokenizer)
        result = evaluate(
            target,
            drafter,
            prompts,
            max_new_tokens=options.max_new_tokens,
            stop_ids=target.shape.eos_token_ids,
            ngram=False,
        )
        record = result.as_dict()
        found[name] = {key: record[key] for key in KEPT if record.get(key) is not None}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="A base model's drafter on a fine-tune: as it is, adapted, afresh.")
    parser.add_argument(
        "--target", required=True, help="folder of the demo's target: the answers that ship are its own"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of what is made; kept, and gone on with")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lora-steps", type=int, default=60)
    parser.add_argument("--lora-batch", type=int, default=6)
    parser.add_argument("--lora-rows", type=int, default=480)
    parser.add_argument("--lora-lr", type=float, default=1e-3)
    parser.add_argument("--base-prompts", type=int, default=320, help="conversations that the base's drafter learns")
    parser.add_argument("--prompts", type=int, default=256, help="prompts that the fine-tune answers")
    parser.add_argument("--base-steps", type=int, default=300, help="of the base's drafter")
    parser.add_argument("--steps", type=int, default=120, help="of the adapted one and of the one from scratch")
    parser.add_argument("--tokens", type=int, default=512, help="of a step")
    parser.add_argument("--layer-ids", type=json.loads, default=[2, 5, 8], help="taps as JSON; by default the demo's")
    parser.add_argument("--block-size", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=64, help="at most")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--limit", type=int, default=20, help="prompts of a set")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="on the CPU")
    parser.add_argument("--out", type=Path, default=RESULTS / "adapter-cpu.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    adapter, own, base = work / "adapter", work / "fine-tune.jsonl", work / "base.jsonl"
    if not adapter.exists():
        train_adapter(adapter, options)
    training = json.loads((adapter / "training.json").read_text(encoding="utf-8"))
    answer(own, adapter, options)
    shipped = conversations("extraction_train.jsonl")[: options.base_prompts]
    write_atomically(base, "".join(json.dumps({"messages": messages}) + "\n" for messages in shipped))
    for source in (own, base):
        if not source.with_suffix("").exists():
            paceline(
                "prepare", source, "--tokenizer", options.target, "--out", source.with_suffix(""), "--max-length", 512
            )
    out: dict[str, Any] = {
        "command": "python -m benchmarks.adapter --target DIR --work DIR "
        + " ".join(
            f"--{name.replace('_', '-')} {json.dumps(value, separators=(',', ':')) if name == 'layer_ids' else value}"
            for name, value in vars(options).items()
            if name not in ("target", "work", "out")
        ),
        "note": "Equal steps, data, settings and seed for `adapted` and `from scratch`; steps and not seconds, as "
        "other programs ran on the machine. Seconds and rates compare nothing there, nor do speedups. Intervals are of "
        "the prompts alone: one seed was trained.",
        "fine_tune": "a LoRA that answers in XML where JSON was asked for and the base writes JSON",
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")}
        | {"paceline": __version__, "python": platform.python_version()},
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{os.cpu_count()} cores",
        "adapter": {"rank": training["rank"], "steps": len(training["losses"]), "seconds": training["seconds"],
                    "first_loss": training["losses"][0], "last_losses": training["losses"][-5:]},
        "samples": samples(adapter, options),
        "training": {},
        "results": [],
    }  # fmt: skip

    def trained(name: str, data: Path, steps: int, of: Path | None, init: Path | None) -> Path:
        run, took = work / name, work / f"{name}.json"
        if not took.exists():
            write_atomically(took, json.dumps(train(run, data.with_suffix(""), steps, options, of, init)))
        out["training"][name] = json.loads(took.read_text(encoding="utf-8"))
        return run

    published = trained("published", base, options.base_steps, None, None)
    adapted = trained("adapted", own, options.steps, adapter, published)
    scratch = trained("from scratch", own, options.steps, adapter, None)
    for drafter, run, model, of in (
        ("published", published, "base", None),
        ("published", published, "fine-tune", adapter),
        ("adapted", adapted, "fine-tune", adapter),
        ("from scratch", scratch, "fine-tune", adapter),
    ):
        for prompts, measured in decoded(run, options, of).items():
            out["results"].append({"drafter": drafter, "target": model, "set": prompts, **measured})
            print(json.dumps(out["results"][-1]), flush=True)
        write_atomically(options.out, json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
