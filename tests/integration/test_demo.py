"""The demo's journey on the toy target: the same phases, files and figures as on the real one, in seconds."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from paceline.cli import demo as module
from paceline.cli.progress import TrainProgress
from paceline.models import assets
from tests.toy import Toy


@pytest.fixture(autouse=True)
def _small(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy target in place of the real one, and less of everything."""
    monkeypatch.setattr(assets, "demo_target", lambda: toy.target)
    monkeypatch.setattr(module, "NUM_CONVERSATIONS", 16)
    monkeypatch.setattr(module, "NUM_PROMPTS", 4)
    monkeypatch.setattr(module, "MAX_NEW_TOKENS", 12)


def test_the_demo_leaves_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """demo.json has every figure, outputs are identical, and run, export and data are there."""
    module.demo(tmp_path, as_json=True)
    record = json.loads((tmp_path / "demo.json").read_text())
    assert json.loads(capsys.readouterr().out) == record
    wanted = {
        "target",
        "acceptance_length",
        "acceptance_per_position",
        "baseline_tok_per_s",
        "speculative_tok_per_s",
        "speedup",
        "lossless",
        "train_tokens",
        "seconds",
        "peak_memory_gib",
    }
    assert wanted <= record.keys()
    assert record["lossless"] is True and record["prompts"] == 4
    assert record["acceptance_length"] >= 1.0 and len(record["acceptance_per_position"]) == 5
    assert record["seconds"].keys() == {"fetch", "prepare", "train", "evaluate", "export", "total"}
    dataset = json.loads((tmp_path / "data" / "prepare.json").read_text())["dataset"]
    assert dataset["num_rows"] == 16
    assert 0 < record["train_tokens"] <= 5 * dataset["num_tokens"]
    assert (tmp_path / "export" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "checkpoints" / "best").exists()


def test_an_interrupted_demo_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while training ends with 130 and no result; the same command trains the rest and finishes."""

    def interrupt(self: TrainProgress, line: dict, total_steps: int) -> None:
        if line["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TrainProgress, "step", interrupt)
        with pytest.raises(SystemExit) as ending:
            module.demo(tmp_path, as_json=True)
    assert ending.value.code == 130 and not (tmp_path / "demo.json").exists()
    module.demo(tmp_path, as_json=True)
    record = json.loads((tmp_path / "demo.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, record["train_steps"] + 1))
    assert record["train_tokens"] == sum(line["tokens"] for line in lines)
