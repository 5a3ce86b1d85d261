"""Runs with a quantised target: they train on the taps of the weights that it stands for, bit for bit, and say so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ModelError
from paceline.models.target import Target
from tests.integration.test_training import assert_same_bits, same_training
from tests.toy import Toy, train
from tests.unit.models.test_dequantize import LAYOUTS, write
from tests.unit.models.test_gguf import Kind, write_gguf

SHORT = ("run.max_steps=6", "checkpoint.every_steps=6", "eval.validate_every=6")


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("fp8, blocks", ()),
        ("integers, 4 bits", ()),
        ("nvfp4 of model optimizer", ()),
        ("awq", ()),
        ("gptq", ("topology.gpus_per_target=2",)),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_run_sees_the_weights_that_a_quantised_target_stands_for(
    toy: Toy, tmp_path: Path, layout: str, more: tuple[str, ...]
) -> None:
    """Losses and weights are those of a run with the dequantised model, whose weights are dense; the run's record names
    the layout and what was made of it. Against the weights before they were quantised taps differ."""
    settings, pack, label = LAYOUTS[layout]
    quantised, wanted = write(toy.target, tmp_path / "quantised", settings, pack)
    dense = tmp_path / "dense"
    shutil.copytree(toy.target, dense)
    save_file(wanted, dense / "model.safetensors", metadata={"format": "pt"})
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, target, settings_of in (("one", quantised, more), ("other", str(dense), ())):
        config = toy.config(tmp_path / name, *SHORT, f"target.path={target}", *settings_of)
        runs[name] = train(config)[1]
    assert same_training(runs["one"]) == same_training(runs["other"]) and len(runs["one"]) == 6
    assert_same_bits(tmp_path / "one", tmp_path / "other")
    notes = [json.loads((tmp_path / name / "run.json").read_text())["quantization"] for name in ("one", "other")]
    assert notes[0].startswith(label) and "dequantised to float32" in notes[0] and notes[1] is None
    ids = torch.arange(1, 20)
    taps = [Target.load(str(path), layer_ids=(1, 2)).document_features(ids) for path in (quantised, dense, toy.target)]
    assert torch.equal(taps[0], taps[1]) and not torch.equal(taps[0], taps[2])
    assert load_file(Path(quantised) / "model.safetensors").keys() != wanted.keys()


def test_a_run_from_a_gguf_file_is_that_of_the_dense_model(toy: Toy, tmp_path: Path) -> None:
    """Losses and weights are those of a run with the folder that the file stands for, whose tokenizer lies beside the
    file; the record says what was dequantised. A file cut short is refused."""
    place, dense = tmp_path / "gguf", tmp_path / "dense"
    place.mkdir()
    shutil.copytree(toy.target, dense)
    tokenizer = json.loads((dense / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = [*tokenizer["model"]["vocab"], *(token["content"] for token in tokenizer["added_tokens"])]
    wanted = write_gguf(str(dense), place / "model.gguf", Kind.Q4_0, tokens=tokens, model="gpt2", pre="other")
    save_file(wanted, dense / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(dense / name, place / name)
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, target in (("one", place / "model.gguf"), ("other", dense)):
        config = toy.config(tmp_path / name, "run.max_steps=2", "checkpoint.every_steps=2", f"target.path={target}")
        runs[name] = train(config)[1]
    assert same_training(runs["one"]) == same_training(runs["other"]) and len(runs["one"]) == 2
    assert_same_bits(tmp_path / "one", tmp_path / "other")
    records = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("one", "other")]
    assert records[0]["quantization"] == "GGUF Q4_0: 37 tensors dequantised to float32"
    assert records[1]["quantization"] is None
    whole = (place / "model.gguf").read_bytes()
    (place / "model.gguf").write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="is cut short"):
        train(toy.config(tmp_path / "third", f"target.path={place / 'model.gguf'}"))
