"""Weights in one file and in shards: an index says what is there, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from paceline.errors import ModelError
from paceline.export.weights import INDEX_FILE, WEIGHTS_FILE, list_tensors, read_tensors
from paceline.export.zlab import export_zlab, load_zlab
from tests import tiny


def sharded(folder: Path) -> list[str]:
    """Take an export's weights apart into two shards and an index; the shards' names."""
    tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).unlink()
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    places = {name: shards[name.startswith("layers.1.")] for name in tensors}
    for shard in shards:
        part = {name: tensors[name] for name, place in places.items() if place == shard}
        safetensors.torch.save_file(part, folder / shard)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    return shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = export_zlab(tiny.drafter(), tmp_path / "out", torch.float32)
    sharded(place)
    return place


def test_shards_are_read_as_one_file(folder: Path) -> None:
    """The drafter of a folder in two shards is the one of the whole file."""
    wanted = tiny.drafter().state_dict()
    found = load_zlab(folder).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    stored, problems = list_tensors(folder)
    assert not problems
    assert {tensor.file.name for tensor in stored.values()} == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    assert stored["fc.weight"].shape == [32, 64] and stored["fc.weight"].dtype == "F32"


def moved(name: str, shard: str) -> Callable[[Path, dict[str, Any]], object]:
    return lambda folder, index: index["weight_map"].update({name: shard})


FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder, index: (folder / SECOND).unlink(), f"{SECOND}: no such file"),
        (moved("more.weight", FIRST), f"more.weight: not in {FIRST}"),
        (moved("fc.weight", SECOND), f"fc.weight: in {FIRST}.*\n.*fc.weight: not in {SECOND}"),
        (lambda folder, index: index["weight_map"].pop("norm.weight"), f"norm.weight: in {FIRST}"),
        (moved("fc.weight", f"../{FIRST}"), f"'../{FIRST}' is no name of a file"),
        (moved("fc.weight", f"/{FIRST}"), f"'/{FIRST}' is no name of a file"),
        (lambda folder, index: index.update(weight_map=[]), "weight_map is no table"),
        (lambda folder, index: index.update(weight_map={"fc.weight": 1}), "weight_map is no table"),
        (lambda folder, index: index.pop("weight_map"), "KeyError: 'weight_map'"),
        (lambda folder, index: (folder / FIRST).write_bytes(b"half"), f"{FIRST} cannot be read"),
        (
            lambda folder, index: (folder / WEIGHTS_FILE).write_bytes(b""),
            f"{WEIGHTS_FILE} as well; wanted: one of them",
        ),
    ],
)
def test_an_index_that_does_not_hold_is_refused(
    change: Callable[[Path, dict[str, Any]], object], named: str, folder: Path
) -> None:
    """A missing shard, a tensor that is elsewhere, a path that leads away and a second copy are errors that say it."""
    outside = folder.parent / FIRST
    outside.write_bytes((folder / FIRST).read_bytes())
    index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    change(folder, index)
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match=named):
        read_tensors(folder)


def test_an_index_that_is_no_json_is_refused(folder: Path) -> None:
    """A damaged index is an error that names it."""
    (folder / INDEX_FILE).write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=f"{INDEX_FILE} cannot be read"):
        read_tensors(folder)
