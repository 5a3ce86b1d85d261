"""A tiny random target with the toy tokenizer, a small prepared data set, and runs over them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.progress import TrainProgress
from paceline.cli.train import run_training
from paceline.config import RunConfig, load_config
from paceline.data.prepare import PrepareSettings, prepare
from paceline.train.loop import TrainReport
from tests import tiny

ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class Toy:
    """Folders of the toy target, its prepared data and the conversations behind them."""

    target: Path
    data: Path
    conversations: Path

    def config(self, run_dir: Path, *overrides: str) -> RunConfig:
        """A run of some 18 steps that takes about a second."""
        return load_config(
            None,
            [
                f"run.dir={run_dir}",
                "run.device=cpu",
                f"target.path={self.target}",
                f"data.path={self.data}",
                "data.epochs=3",
                "data.validation=0.1",
                "draft.num_layers=2",
                "draft.block_size=4",
                "optim.lr=3e-3",
                "optim.tokens_per_step=256",
                "pipeline.tokens_per_batch=128",
                "topology.threads=1",
                "checkpoint.every_steps=5",
                "eval.validate_every=6",
                *overrides,
            ],
        )


def conversations() -> list[dict[str, Any]]:
    """Sums with their answers: short, regular, different in length."""
    rows = []
    for i in range(40):
        start, count = i % 7, 2 + i % 5
        numbers = " ".join(str(start + j) for j in range(count))
        question = {"role": "user", "content": f"count {count} from {start}" + "!" * (i // 14)}
        rows.append({"messages": [question, {"role": "assistant", "content": numbers}]})
    return rows


def build_toy(folder: Path) -> Toy:
    """Write target, conversations and data set below `folder`."""
    target = folder / "target"
    tiny.save(tiny.causal_lm("llama"), target)
    for file in (ASSETS / "toy_tokenizer").iterdir():
        shutil.copy(file, target / file.name)
    shutil.copy(ASSETS / "templates" / "chatml_plain.jinja", target / "chat_template.jinja")
    source = folder / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in conversations()), encoding="utf-8")
    prepare([source], folder / "data", PrepareSettings(tokenizer=str(target), max_length=128))
    return Toy(target, folder / "data", source)


class Watch(TrainProgress):
    """Collects the metrics lines; `at_step` is called with each step number."""

    def __init__(self, at_step: Any = lambda step: None) -> None:
        super().__init__(quiet=True)
        self.lines: list[dict[str, Any]] = []
        self._at_step = at_step

    def step(self, line: dict[str, Any], total_steps: int) -> None:
        self.lines.append(line)
        self._at_step(line["step"])


def train(config: RunConfig, at_step: Any = lambda step: None) -> tuple[TrainReport, list[dict[str, Any]]]:
    """Train in this process; the report and the lines of this process's steps."""
    watch = Watch(at_step)
    return run_training(config, watch), watch.lines
