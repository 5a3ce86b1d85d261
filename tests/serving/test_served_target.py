"""A target that real vLLM runs: its hidden states are those of Transformers, and a run from it is the local run.

vLLM's own connector copies through pinned memory, so that on a CPU `benchmarks/cpu_hidden_states.py` takes its place.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.served_target import serving
from paceline.errors import ConfigError, ModelError
from paceline.models.served import HiddenStatesClient
from paceline.train.served_check import relative_errors
from tests import tiny
from tests.fake_hidden_states import states_of
from tests.serving.test_vllm import HEAD_DIM, VARIABLE
from tests.toy import Toy, train

pytestmark = pytest.mark.slow

LAYERS = [2, 3, 5]
"""Taps 1 and 2, and the stream before the final norm."""

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 5,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, toy: Toy) -> Path:
    """A tiny random target with heads that vLLM takes, and the toy's tokenizer."""
    folder = tmp_path_factory.mktemp("served") / "target"
    shutil.copytree(toy.target, folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    tiny.save(tiny.causal_lm("qwen3", **SHAPE), folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "hidden_states"


@pytest.fixture(scope="module")
def url(target: Path, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert VARIABLE in os.environ, f"{VARIABLE} has to name an interpreter with vLLM: `make test-vllm` makes one"
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with serving(Path(os.environ[VARIABLE]), str(target), LAYERS, files, log) as found:
        yield found


def test_hidden_states_are_those_of_transformers(url: str, files: Path) -> None:
    """Documents of real lengths, one twice and one that shares a prefix, which the server has in its cache."""
    client = HiddenStatesClient(url, files, layers=LAYERS, hidden_size=SHAPE["hidden_size"])
    facts = client.connect()
    assert (facts.model, facts.max_length) == ("target", 512)
    wanted = states_of(tiny.causal_lm("qwen3", **SHAPE), LAYERS)
    generator = torch.Generator().manual_seed(0)
    long = torch.randint(1, tiny.VOCAB, (300,), generator=generator).tolist()
    for ids in (long[:37], [5, 6, 7], long[100:124], long, long, long[:200] + [9] * 20):
        found = client.capture(ids)
        for place in range(len(LAYERS)):
            assert float(relative_errors(found[:, place], wanted(ids)[:, place]).max()) < 1e-5
    assert list(files.iterdir()) == []


def test_a_run_from_vllm_is_the_local_run(toy: Toy, target: Path, url: str, files: Path, tmp_path: Path) -> None:
    """Three steps with the last hidden state give the same losses within rounding; a run goes on after a stop; other
    layers, or another model, are refused."""
    own = (f"target.path={target}", "run.max_steps=3", "eval.validate_every=3", "loss.kl=0.5")
    where = (f"target.server={url}", f"target.server_files={files}", "topology.targets=2")
    _, wanted = train(toy.config(tmp_path / "local", *own))
    config = toy.config(tmp_path / "run", *own, *where)
    _, lines = train(config, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 2 else None)
    lines += train(config)[1]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in wanted], rel=1e-4)
    errors = json.loads((tmp_path / "run" / "run.json").read_text())["server"]["errors"]
    assert list(errors) == ["layer 1", "layer 2", "last hidden state"] and max(errors.values()) < 1e-5
    assert list(files.iterdir()) == []
    with pytest.raises(ConfigError, match=r"gives for layer 2 is the output of layer 1 of"):
        train(toy.config(tmp_path / "other", *own, *where, "target.layer_ids=[2,3]"))
    other = tmp_path / "another"
    shutil.copytree(target, other)
    tiny.save(tiny.causal_lm("qwen3", seed=1, **SHAPE), other)
    with pytest.raises(ModelError, match="it runs another model"):
        train(toy.config(tmp_path / "another-run", *own, *where, f"target.path={other}"))


def test_a_run_outlives_vllms_death(toy: Toy, target: Path, tmp_path: Path) -> None:
    """vLLM is killed with its engine during a run and started again: the run waits, and its losses are the same."""
    files, python = tmp_path / "files", Path(os.environ[VARIABLE])
    own = (f"target.path={target}", "run.max_steps=6", "eval.validate_every=6", "data.validation=0")
    _, wanted = train(toy.config(tmp_path / "local", *own))
    with ExitStack() as stack:
        url = stack.enter_context(serving(python, str(target), LAYERS[:2], files, tmp_path / "first.log"))
        port = int(url.rpartition(":")[2])

        def at_step(step: int) -> None:
            if step == 1:
                stack.close()
                again = serving(python, str(target), LAYERS[:2], files, tmp_path / "second.log", port=port)
                stack.enter_context(again)

        where = (f"target.server={url}", f"target.server_files={files}", "pipeline.queue_depth=1")
        report, lines = train(toy.config(tmp_path / "run", *own, *where, "pipeline.max_retries=9"), at_step)
    assert report.ending == "finished" and report.ledger["retried"] >= 1
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in wanted], rel=1e-4)
