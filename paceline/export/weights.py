"""The tensors of a drafter's folder: one file, or shards and an index that says which tensor is in which.

Engines part where the two disagree: vLLM and SGLang load every tensor of the files that the index names, Transformers
those that it lists. So the index has to list what is there, each tensor in its own shard, and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import ModelError
from paceline.files import child

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file's header has it.

    Attributes:
        dtype: As safetensors writes it.
    """

    file: Path
    shape: list[int]
    dtype: str


@dataclass(frozen=True)
class Problem:
    """What an index says, and what is there."""

    key: str
    seen: str
    wanted: str


def list_tensors(folder: Path) -> tuple[dict[str, StoredTensor], list[Problem]]:
    """Every tensor that can be read, and what is wrong with the index. Raises: ModelError if a file is damaged."""
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if not index.exists():
        return _headers(single), []
    places, tensors, problems = _weight_map(index), dict[str, StoredTensor](), list[Problem]()
    if single.exists():
        both = "one of them: Transformers reads the file, vLLM the shards"
        problems.append(Problem(INDEX_FILE, f"{WEIGHTS_FILE} as well", both))
    for shard in sorted(set(places.values())):
        try:
            file = child(folder, shard)
        except ValueError as error:
            problems.append(Problem(INDEX_FILE, str(error), "shards of this folder"))
            continue
        if not file.is_file():
            problems.append(Problem(shard, "no such file", f"a shard, as {INDEX_FILE} says"))
            continue
        found, listed = _headers(file), {name for name, place in places.items() if place == shard}
        for name in listed - found.keys():
            problems.append(Problem(name, f"not in {shard}", f"there, as {INDEX_FILE} says"))
        for name in found.keys() - listed:
            problems.append(Problem(name, f"in {shard}", f"not there, as {INDEX_FILE} says"))
        tensors |= {name: found[name] for name in listed & found.keys()}
    return tensors, sorted(problems, key=lambda problem: problem.key)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The weights, from one file or from shards. Raises: ModelError naming what is missing or contradicts."""
    stored, problems = list_tensors(folder)
    if problems:
        raise ModelError(
            f"{folder} holds other weights than its index says:\n  "
            + "\n  ".join(f"{p.key}: {p.seen}; wanted: {p.wanted}" for p in problems)
        )
    tensors: dict[str, Tensor] = {}
    for file in sorted({tensor.file for tensor in stored.values()}):
        try:
            tensors |= safetensors.torch.load_file(file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Shard of every tensor. Raises: ModelError if the file is no index."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(places, dict) or not places or any(not isinstance(place, str) for place in places.values()):
        raise ModelError(f"{index}: weight_map is no table of tensors and the files that hold them")
    return places


def _headers(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
            return {name: StoredTensor(file, list(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
