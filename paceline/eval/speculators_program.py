"""One look at a drafter by the package `speculators`, as a program for the interpreter that has it.

    python speculators_program.py FOLDER BLOCKS OUT

BLOCKS is a safetensors file with `input_ids` ``[S]``, `features` ``[S, L*D]`` and `anchors` ``[A]``. OUT becomes one
with the states behind every layer, ``layer i`` ``[A, K, D]``; its metadata has the version and the tensors that the
loader misses, does not know, or finds of another shape. Nothing else of this project is imported. Written for 0.9.0.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import torch
from safetensors.torch import load_file, save_file

KINDS = ("missing_keys", "unexpected_keys", "mismatched_keys")


@torch.inference_mode()
def main(folder: str, blocks_file: str, out: str) -> None:
    """Load the folder, run the blocks, write what came out."""
    from speculators.models import dflash  # type: ignore[import-not-found]

    config = dflash.DFlashSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    _, loading = dflash.DFlashDraftModel.from_pretrained(folder, config=config, output_loading_info=True)
    model = dflash.DFlashDraftModel.from_pretrained(folder, config=config).eval().float()
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
    model._backbone_forward(
        blocks["features"][None], blocks["input_ids"][None], supervised,
        torch.zeros(1, length, config.transformer_layer_config.hidden_size), document_ids, max_anchors=len(anchors),
    )  # fmt: skip
    found = {kind: sorted(map(str, loading[kind])) for kind in KINDS}
    save_file(states, out, metadata={"version": version("speculators"), "loading": json.dumps(found)})


if __name__ == "__main__":
    main(*sys.argv[1:])
