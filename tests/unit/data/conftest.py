"""The toy tokenizer, its templates and small data sets for the tests of the data room."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from paceline.data.chat import ChatTokenizer, load_tokenizer
from paceline.data.dataset import INFO_FILE, Dataset, DatasetInfo, DatasetWriter, Rows
from paceline.data.prepare import PrepareSettings, Report, prepare

ASSETS = Path(__file__).parents[2] / "assets"
TOY_TOKENIZER = ASSETS / "toy_tokenizer"
INPUTS = Path(__file__).parent / "inputs"

MakeDataset = Callable[..., Dataset]
RunPrepare = Callable[..., tuple[DatasetInfo, Report]]


def template(name: str) -> Path:
    """File of a chat template, by its name without ending."""
    return ASSETS / "templates" / f"{name}.jinja"


def toy(template_name: str = "chatml_plain") -> PreTrainedTokenizerBase:
    """The byte-level toy tokenizer with a template."""
    return load_tokenizer(str(TOY_TOKENIZER), template(template_name))


@pytest.fixture(scope="session")
def plain_chat() -> ChatTokenizer:
    """Conversations to rows with the plain ChatML template."""
    return ChatTokenizer(toy())


@pytest.fixture
def run_prepare(tmp_path: Path) -> RunPrepare:
    """`prepare` into ``tmp_path / "out"`` with the toy tokenizer; keywords are settings."""

    def run(*inputs: Path, template_name: str = "chatml_plain", out: str = "out", **settings: Any) -> Any:
        settings = {"max_rejected": 1.0, **settings}
        return prepare(
            list(inputs),
            tmp_path / out,
            PrepareSettings(tokenizer=str(TOY_TOKENIZER), template=template(template_name), **settings),
        )

    return run


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """A data set of random rows with these lengths and, where given, these conversation hashes."""

    def make(lengths: Sequence[int], conversations: Sequence[int] | None = None) -> Dataset:
        folder = tmp_path / "dataset"
        folder.mkdir(exist_ok=True)
        generator = np.random.default_rng(0)
        writer = DatasetWriter(folder)
        for i, length in enumerate(lengths):
            ids, mask = generator.integers(0, 256, length), generator.random(length) < 0.5
            conversation = i if conversations is None else conversations[i]
            writer.add(Rows.join([(ids, mask, i + 1, conversation)]), "file.jsonl")
        writer.close()
        info = writer.describe(
            vocab_size=267,
            tokenizer="toy",
            tokenizer_fingerprint="",
            template_hash="",
            thinking=None,
            max_length=3072,
            on_long="cut",
        )
        (folder / INFO_FILE).write_text(json.dumps({"dataset": info.model_dump()}), encoding="utf-8")
        return Dataset.open(folder)

    return make


def write_lines(path: Path, *records: Any) -> Path:
    """A JSONL file with these records; bytes and strings are written as they are."""
    lines = [r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in records]
    path.write_bytes(b"\n".join(lines))
    return path


def chat(*contents: str) -> dict[str, Any]:
    """A record in which user and assistant speak in turn."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]}
