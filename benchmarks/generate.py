"""How fast a plain model answers many prompts: by Transformers' forward, and in slots replayed from CUDA graphs.

    python -m benchmarks.generate --target DIR --out FILE [--device cuda] [--slots 1024] [--requests 2048]

Both generators answer the same prompts, in our own words, after a warm-up of some of them that counts apart: compiling,
recording, and the making of the room. A step is one token of all slots, all at one length; what attention takes of it
is measured by the same calls without the rest of the layers, replayed alike, and what choosing the tokens takes by
itself. `seen_gib` are the keys and values that count for it; on a CPU, where both generators run as they are, the whole
room is read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from benchmarks.reference import prompts
from paceline import __version__
from paceline.data.regenerate import prompt_ids
from paceline.eval.generate import MAX_SLOTS, BatchGenerator, Request, cache_budget, choose
from paceline.eval.static import obstacle
from paceline.eval.static_batch import TURNS, StaticBatchGenerator
from paceline.kernels.graphs import RECORDING_CALLS, GraphRunner
from paceline.kernels.linear_cross_entropy import Head
from paceline.kernels.static_attention import attend_slots
from paceline.models.loading import load_text_model, load_tokenizer, read_shape

SEED = 0
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
"""Positions of every slot at which a step is timed, as far as the room goes."""


def read_requests(tokenizer: Any, count: int, max_new_tokens: int) -> list[Request]:
    """The first prompts in our own words."""
    texts = itertools.islice(prompts.own(count, SEED), count)
    conversations = [[{"role": "user", "content": text}] for text in texts]
    return [
        Request(prompt_ids(tokenizer, messages, None, None), max_new_tokens, str(i))
        for i, messages in enumerate(conversations)
    ]


def answer(generator: Any, requests: list[Request], device: torch.device) -> dict[str, Any]:
    """Answer all; seconds by the host's clock, prompts included. Its last step has read the tokens."""
    for request in requests:
        generator.submit(request)
    tokens, started = generator.num_sampled, time.perf_counter()
    while generator.is_busy:
        generator.step()
    seconds = time.perf_counter() - started
    tokens = generator.num_sampled - tokens
    found = {
        "requests": len(requests), "tokens": tokens, "seconds": seconds, "tok_per_s": tokens / seconds,
        "cut_off_frac": sum(len(each.answer) == each.max_new_tokens for each in requests) / len(requests),
    }  # fmt: skip
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found


def both_times(generator: Any, requests: list[Request], options: argparse.Namespace) -> dict[str, Any]:
    """A warm-up, and all requests; the warm-up has the longest, so that no room is made anew."""
    longest = sorted(requests, key=lambda request: -request.longest)[: options.warmup]
    again = [Request(each.prompt, each.max_new_tokens, each.key) for each in longest]
    if options.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(options.device)
    found = {"warmup": answer(generator, again, options.device)}
    return found | answer(generator, requests, options.device)


@torch.inference_mode()
def steps(generator: StaticBatchGenerator, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A token of every slot at several lengths, and its attention alone."""
    keys, values, device = generator._keys, generator._values, options.device
    num_layers, num_slots, capacity, num_kv, head_dim = keys.shape
    query = torch.randn(num_slots, generator._layers[0].num_heads, head_dim, device=device).to(keys.dtype)
    lengths = torch.ones(num_slots, dtype=torch.int64, device=device)

    def attend(_: int) -> None:
        for i in range(num_layers):
            attend_slots(query, keys[i], values[i], lengths, generator._scale)

    runner = GraphRunner(attend, "attention alone", "on" if device.type == "cuda" else "off")
    generator._is_taken.fill_(True)
    rows = []
    for length in (length for length in LENGTHS if length <= capacity):

        def turns(length: int = length) -> None:
            generator._turn.zero_()
            generator._positions.fill_(length - TURNS)  # the last turn reads `length`
            for _ in range(TURNS):
                generator._runner()

        lengths.fill_(length)
        token, attention = timed(turns, options, 1, TURNS), timed(runner, options, RECORDING_CALLS, 1)
        seen = 2 * num_layers * num_slots * length * num_kv * head_dim * keys.element_size()
        rows.append({
            "length": length, "slots": num_slots, "capacity": capacity, "token_ms": token, "attention_ms": attention,
            "attention_frac": attention["median"] / token["median"], "seen_gib": seen / 2**30,
            "seen_gb_per_s": seen / attention["median"] / 1e6,
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


@torch.inference_mode()
def choices(num_slots: int, vocab_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of the choice of a token of every slot among random logits."""
    logits = 3 * torch.randn(num_slots, vocab_size, device=options.device)
    uniform = torch.rand(num_slots, dtype=torch.double, device=options.device)
    found = {}
    for name, settings in {"greedy": (0.0, 1.0), "temperature 0.7": (0.7, 1.0), "top-p 0.8 of it": (0.7, 0.8)}.items():

        def chosen(_: int, settings: tuple[float, float] = settings) -> None:
            choose(logits, uniform, *settings)

        runner = GraphRunner(chosen, f"a choice, {name}", "on" if options.device.type == "cuda" else "off")
        found[name] = timed(runner, options, RECORDING_CALLS, 1)
    print(json.dumps(found), flush=True)
    return found


def timed(work: Callable[[], Any], options: argparse.Namespace, first_calls: int, parts: int) -> dict[str, float]:
    """Milliseconds of a part of the work, after calls that do not count."""
    found = timing.measure(work, options.seconds, options.seconds / 4, device=options.device, compile_calls=first_calls)
    return {name: found[f"{name}_ms"] / parts for name in ("median", "p10", "p90")}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both generators over the same requests, then single steps."""
    dtype = torch.bfloat16 if options.device.type == "cuda" else torch.float32
    model = load_text_model(options.target, dtype, options.device).eval()
    head = Head(model.get_output_embeddings().weight.detach())
    stop_ids = read_shape(options.target).eos_token_ids
    requests = read_requests(load_tokenizer(options.target), options.requests, options.max_new_tokens)
    sizes = {"max_slots": options.slots, "max_tokens": cache_budget(model)}
    lengths = sorted(len(each.prompt) for each in requests)
    found: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "prompt_tokens": {"least": lengths[0], "median": lengths[len(lengths) // 2], "most": lengths[-1]},
    }
    answers = {}
    # Transformers first: to join the weights of the layers makes its own ones views of them
    for name in ("transformers", "slots"):
        torch.manual_seed(SEED)
        if name == "transformers":
            generator: Any = BatchGenerator(model, stop_ids, **sizes)
        elif (reason := obstacle(model, head)) is None:
            generator = StaticBatchGenerator(model, head, stop_ids, **sizes)
            found["difference"] = generator.difference(model)
        else:
            found["obstacle"] = reason
            break
        own = [Request(each.prompt, each.max_new_tokens, each.key) for each in requests]
        found[name] = both_times(generator, own, options)
        answers[name] = [each.answer for each in own]
        print(name, json.dumps(found[name]), flush=True)
        if name == "transformers":
            del generator  # its cache
    if len(answers) == 2:
        pairs = list(zip(*answers.values(), strict=True))
        found["same_answers_frac"] = sum(one == other for one, other in pairs) / len(pairs)
        found["speedup"] = found["slots"]["tok_per_s"] / found["transformers"]["tok_per_s"]
        found["steps"] = steps(generator, options)
        found["choice_ms"] = choices(options.slots, len(head.weight), options)
    return found


def versions() -> dict[str, str | None]:
    """Of what decides the speed; None: not installed."""
    found: dict[str, str | None] = {"paceline": __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def main() -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="a model folder")
    parser.add_argument("--device", type=torch.device, default="cuda")
    parser.add_argument("--slots", type=int, default=None, help="answers at once; default: as regenerate takes")
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=64, help="requests that are answered first and count apart")
    parser.add_argument("--seconds", type=float, default=1.0, help="least time of a measurement of steps")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.slots = options.slots or MAX_SLOTS[options.device.type]
    on_gpu = options.device.type == "cuda"
    threads = f"{platform.machine()}, {torch.get_num_threads()} threads"
    result = {
        "command": " ".join(["python -m benchmarks.generate", *sys.argv[1:]]).replace(options.target, "TARGET"),
        "machine": torch.cuda.get_device_name(options.device) if on_gpu else threads,
        "versions": versions(),
        "settings": {k: str(v) for k, v in vars(options).items() if k not in ("target", "out")},
        **measure(options),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
