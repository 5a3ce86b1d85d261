"""vLLM's own drafter classes load folders and draft a few blocks, as a program for the interpreter that has vLLM.

    python kinds_program.py JOB.json

A job has `target`, `inputs` (safetensors: `ids` ``[S]``, `features` ``[S, L*D]``, `anchors` ``[A]``, `embedding` and
`head` ``[V, D]``), `folders` (name: `path`, `method`, `block_size`) and `out`, the file to write: `NAME.hidden`
``[A, J, D]``, `NAME.ids` ``[A, J]`` and `NAME.confidence` ``[A, J]``; metadata `NAME` holds why it was refused.

On a CPU vLLM refuses these kinds, as it drafts with them by its second model runner, and that by Triton. So Triton is
said to be there, the runner is not started, and the attention kernel is replaced by plain torch; configuration,
loading, layers, convolutions, selector, bias and confidence are vLLM's. Nothing else of this project is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import vllm.config.vllm
from safetensors.torch import load_file, save_file
from vllm import _custom_ops as ops
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

Tensors = dict[str, torch.Tensor]


class PlainAttention(torch.nn.Module):
    """A layer's attention, its cache what was put there last."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.size, self.window, self.causal = attention.attn.head_size, attention.sliding_window, attention.causal
        self.kv_cache = None

    @property
    def impl(self) -> PlainAttention:
        """What vLLM asks to write into the cache."""
        return self

    def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, *_: Any) -> None:
        layer.context = key.clone(), value.clone()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        num_slots = len(query)
        query, key, value = (each.view(num_slots, -1, self.size) for each in (query, key, value))
        key, value = torch.cat([self.context[0], key]), torch.cat([self.context[1], value])
        places = torch.arange(len(key))
        ahead = places[-num_slots:, None] - places
        seen = torch.ones_like(ahead, dtype=torch.bool) if self.window is None else ahead.abs() < self.window
        if self.causal:
            seen = seen & (ahead >= 0)
        heads = (each.transpose(0, 1)[None] for each in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(*heads, seen, enable_gqa=True)
        return attended[0].transpose(0, 1).reshape(num_slots, -1)


def prepared(model: Any) -> Any:
    """The model with plain attention, and the norm of the context's keys of every layer its own (docs/serving.md)."""
    inner = model.model

    def by_layer(keys: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(keys)
        for layer, weight in enumerate(inner._k_norm_weights):
            ops.rms_norm(out[layer], keys[layer], weight, inner._rms_norm_eps)
        return out

    inner._normalize_context_k = by_layer
    for layer in inner.layers:
        layer.self_attn.attn = PlainAttention(layer.self_attn)
    inner._attn_layers = [layer.self_attn.attn for layer in inner.layers]
    return model.eval()


def hidden_of(model: Any, block_size: int, anchor: int, inputs: Tensors) -> torch.Tensor:
    """States ``[K, D]`` of the block after `anchor` tokens."""
    context = model.combine_hidden_states(inputs["features"][:anchor])
    model.precompute_and_store_context_kv(context, torch.arange(anchor), torch.arange(anchor))
    ids = torch.full((block_size,), model.model.mask_token_id)
    ids[0] = inputs["ids"][anchor]
    return model.model.forward(ids, torch.arange(anchor, anchor + block_size), inputs["embedding"][ids])


def drafted(model: Any, method: str, hidden: torch.Tensor, first: torch.Tensor, head: torch.Tensor) -> Tensors:
    """A block's tokens, taken greedily as vLLM's speculators do in Triton; `first` is the anchor's ``[1]``."""
    if method == "dflash":
        hidden = hidden[1:]
        selector = model.model.candidate_selector
        values, ids = (hidden @ head.T).topk(selector.top_k, -1)
        scores = selector.forward(ids[None], values[None], hidden[None], first)[0]  # [J, C, C]
        place, taken = 0, []
        for j, table in enumerate(scores):
            place = int(table[place].argmax())
            taken.append(ids[j, place])
        return {"hidden": hidden, "ids": torch.stack(taken)}
    taken, sure, previous = [], [], first
    for state, logits in zip(hidden, hidden @ head.T, strict=True):
        embedded = model.markov_embed(previous)
        previous = (logits + model.markov_bias(embedded)).argmax(-1)
        taken.append(previous[0])
        if model.model.confidence_head is not None:
            sure.append(model.compute_confidence(state[None], embedded)[0])
    found = {"hidden": hidden, "ids": torch.stack(taken)}
    return found | ({"confidence": torch.stack(sure)} if sure else {})


@torch.inference_mode()
def main(job_file: str) -> None:
    """Load every folder, draft every block, write what came out."""
    vllm.config.vllm.HAS_TRITON = True
    torch.accelerator.empty_cache = lambda: None  # the loader asks for it, and there is no accelerator
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    inputs, out, refused, is_started = load_file(job["inputs"]), dict[str, torch.Tensor](), dict[str, str](), False
    for name, folder in job["folders"].items():
        is_dspark = folder["method"] == "dspark"
        speculation = {
            "method": folder["method"],
            "model": folder["path"],
            "num_speculative_tokens": folder["block_size"] - (not is_dspark),
        }
        arguments = EngineArgs(
            model=job["target"], dtype="float32", enforce_eager=True, max_model_len=128, skip_tokenizer_init=True,
            speculative_config=speculation,
        )  # fmt: skip
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            if not is_started:
                place = f"file://{job['out']}.store"
                init_distributed_environment(1, 0, place, 0, backend="gloo")
                ensure_model_parallel_initialized(1, 1)
                is_started = True
            try:
                draft_config = config.speculative_config.draft_model_config
                model = prepared(get_model(vllm_config=config, model_config=draft_config))
            except ValueError as error:
                refused[name] = str(error)
                continue
            blocks = []
            for anchor in inputs["anchors"].tolist():
                hidden = hidden_of(model, folder["block_size"], anchor, inputs)
                first = inputs["ids"][anchor : anchor + 1]
                blocks.append(drafted(model, folder["method"], hidden, first, inputs["head"]))
        out |= {f"{name}.{key}": torch.stack([block[key] for block in blocks]) for key in blocks[0]}
    save_file(out, job["out"], metadata=refused or None)


if __name__ == "__main__":
    main(sys.argv[1])
