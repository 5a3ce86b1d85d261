"""One look at a drafter by the package `speculators`, as a program for the interpreter that has it.

    python speculators_program.py FOLDER BLOCKS OUT

BLOCKS is a safetensors file with `input_ids` ``[S]``, `features` ``[S, L*D]`` and `anchors` ``[A]``; for a DFlash2 or
DSpark drafter also `drafts` int64 ``[A, J]``, tokens that its blocks draft. OUT becomes one with the states behind
every layer, ``layer i`` ``[A, K, D]``, and with `drafts` ``[A, J]``: by how much the best score lies above that of the
drafted token, of the largest score; and `confidence` ``[A, J]``, if the drafter has one. Its metadata has the version
and the tensors that the loader misses, does not know, or finds of another shape. Nothing else of this project is
imported. Written for 0.9.0.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

KINDS = ("missing_keys", "unexpected_keys", "mismatched_keys")
CLASSES = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}


@torch.inference_mode()
def main(folder: str, blocks_file: str, out: str) -> None:
    """Load the folder, run the blocks, write what came out."""
    kind = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["speculators_model_type"]
    module, name = importlib.import_module(f"speculators.models.{kind}"), CLASSES[kind]
    config = getattr(module, f"{name}SpeculatorConfig").from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model_class = getattr(module, f"{name}DraftModel")
    _, loading = model_class.from_pretrained(folder, config=config, output_loading_info=True)
    model = model_class.from_pretrained(folder, config=config).eval().float()
    blocks, states = load_file(blocks_file), {}
    length, anchors = len(blocks["input_ids"]), blocks["anchors"]

    def keep(name: str) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            state = (output[0] if isinstance(output, tuple) else output)[0]
            states[name] = state.unflatten(0, (len(anchors), -1)).float().contiguous()

        return hook

    for i, layer in enumerate(model.layers):
        layer.register_forward_hook(keep(f"layer {i}"))
    supervised = torch.zeros(1, length, dtype=torch.int64)
    supervised[0, anchors] = 1
    document_ids = torch.zeros(1, length, dtype=torch.int64)
    hidden, logits, *_ = model._backbone_forward(
        blocks["features"][None], blocks["input_ids"][None], supervised,
        torch.zeros(1, length, config.transformer_layer_config.hidden_size), document_ids, max_anchors=len(anchors),
    )  # fmt: skip
    if "drafts" in blocks:
        drafts = blocks["drafts"]
        previous = torch.cat([blocks["input_ids"][anchors][:, None], drafts[:, :-1]], dim=1)
        hidden, logits = (each[0].unflatten(0, (len(anchors), -1))[:, -drafts.shape[1] :] for each in (hidden, logits))
        states |= scored(model, kind, hidden, logits, previous, drafts)
    found = {each: sorted(map(str, loading[each])) for each in KINDS}
    save_file(states, out, metadata={"version": version("speculators"), "loading": json.dumps(found)})


def scored(
    model: Any, kind: str, hidden: torch.Tensor, logits: torch.Tensor, previous: torch.Tensor, drafts: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What the package makes of drafted tokens ``[A, J]``, given those before them, from its own ``[A, J, ...]``."""
    if kind == "dflash2":
        candidates, scores = model.candidate_selector.select(logits, hidden, previous)
        own = scores.masked_fill(candidates != drafts[..., None], float("-inf")).amax(-1)
        return {"drafts": (scores.amax(-1) - own) / scores.abs().max()}
    embedded = model.markov_head.prev_embeddings(previous)
    scores = logits + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden, prev_emb=embedded)
    found = {"drafts": (scores.amax(-1) - scores.gather(-1, drafts[..., None])[..., 0]) / scores.abs().max()}
    if model.confidence_head is not None:
        with_markov = model.config.confidence_head_with_markov
        features = torch.cat([hidden, embedded], dim=-1) if with_markov else hidden
        found["confidence"] = model.confidence_head(features).sigmoid()
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
