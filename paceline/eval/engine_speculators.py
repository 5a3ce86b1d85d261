"""A drafter in the package `speculators` and in our decoder, compared layer by layer, and by what it drafts."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from paceline.dflash.blocks import make_noise_blocks
from paceline.errors import ConfigError, ServerError, printable
from paceline.eval import speculators_program
from paceline.eval.parity import LayerParity, kind_of
from paceline.kernels.linear_cross_entropy import Head
from paceline.models.draft import DFlashDrafter
from paceline.models.states import FINAL, Blocks, anchors_at, decode_states, row_of
from paceline.models.target import Target

PROGRAM = Path(speculators_program.__file__)
NUM_TOKENS = 24
ANCHORS = [5, 9, 17]
HEADS = {"drafts": "best scores less ours, of the largest", "confidence": "of each drafted token"}
"""What is compared behind the layers, in words."""
TOLERANCE = 1e-4
"""Largest difference over the largest value, in float32."""


@dataclass(frozen=True)
class SpeculatorsCheck:
    """What the package made of a folder.

    Attributes:
        loading: Tensors that its loader misses, does not know, or finds of another shape, by these kinds.
        layers: Its states against those of our decode path, and for a kind that drafts by more than the head's logits
            also ``drafts``: by how much its best scores lie above those of the tokens that we draft, and
            ``confidence``. Empty for sliding layers whose window is shorter than the blocks' context here: its mask
            counts from the anchor for every slot, while engines count from the slot.
    """

    version: str
    loading: dict[str, list[str]]
    layers: list[LayerParity]


def has_speculators(python: Path | None) -> bool:
    """Whether an interpreter has the package; None: this one. Raises: ConfigError if it cannot be asked."""
    place = python or Path(sys.executable)
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('speculators') is None)"
    try:
        return subprocess.run([place, "-c", code], timeout=60, check=False, env=_environment(python)).returncode == 0
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{place} is no Python interpreter that can be asked for speculators: {error}") from error


def check_with_speculators(
    folder: Path, drafter: DFlashDrafter, target: Target, *, python: Path | None = None, timeout_s: float = 300
) -> SpeculatorsCheck:
    """Let the package load a folder and run a few blocks, in float32 on the CPU, and compare with our decode path.

    Args:
        drafter: The folder as this project reads it.
        target: Its embedding and head are used; the package finds the same ones by the name that the folder has.
    Raises: ServerError, with the end of what the package said, if it stops or takes too long.
    """
    shape = drafter.shape
    own = copy.deepcopy(drafter).to("cpu", torch.float32).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(0, shape.vocab_size, (NUM_TOKENS,), generator=generator)
    width = len(shape.target_layer_ids) * shape.hidden_size
    features, anchors = torch.randn(NUM_TOKENS, width, generator=generator), anchors_at(ANCHORS)
    noise_ids = make_noise_blocks(input_ids, anchors, shape.block_size, shape.mask_token_id)
    with torch.no_grad():
        noise = target.embed(noise_ids.to(target.device)).float().cpu()
    ours, given = decode_states(own, Blocks(row_of([input_ids]), anchors, noise, features)), {}
    if drafter.own_modules:
        head = Head(target.head.weight.float().cpu(), target.head.softcap, target.head.scale)
        with torch.no_grad():
            proposal = own.propose(ours[FINAL], head, input_ids[anchors.positions])
        given = {"drafts": proposal.ids}
        ours |= {"drafts": torch.zeros(proposal.ids.shape)}
        if proposal.confidence is not None:
            ours |= {"confidence": proposal.confidence}
    with tempfile.TemporaryDirectory(prefix="paceline-speculators-") as place:
        blocks, out = Path(place) / "blocks.safetensors", Path(place) / "out.safetensors"
        save_file({"input_ids": input_ids, "features": features, "anchors": anchors.positions, **given}, blocks)
        _run(
            [str(python or sys.executable), str(PROGRAM), str(folder.resolve()), str(blocks), str(out)],
            python,
            timeout_s,
        )
        with safe_open(out, framework="pt") as file:
            said, theirs = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    layers = []
    slides = "sliding_attention" in shape.layer_types
    if slides and (shape.sliding_window or 0) < NUM_TOKENS + shape.block_size:
        theirs = {}
    for name, found in sorted(theirs.items()):
        wanted = ours[name]
        seen = found[:, -wanted.shape[1] :]  # our last layer leaves out the slot that predicts nothing
        scale = 1.0 if name in HEADS else float(wanted.abs().max())
        difference = float((seen - wanted).abs().max()) / scale
        what = HEADS.get(name) or kind_of(shape, name)
        layers.append(LayerParity(name, f"speculators: {what}", difference, TOLERANCE))
    return SpeculatorsCheck(said["version"], json.loads(said["loading"]), layers)


def _run(command: list[str], python: Path | None, timeout_s: float) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env=_environment(python)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"speculators could not look at the drafter: {error}") from error
    if done.returncode != 0:
        tail = printable("\n".join(done.stderr.splitlines()[-12:]))
        raise ServerError(f"speculators stopped with status {done.returncode}. The end of what it said:\n{tail}")


def _environment(python: Path | None) -> dict[str, str]:
    """This process's, offline; another interpreter's packages are its own."""
    ours = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    if python is not None:
        for name in ("PYTHONPATH", "PYTHONHOME"):
            ours.pop(name, None)
    return ours
