"""`paceline eval` with drafts that are drawn or verified in part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from paceline.config import Optim
from paceline.errors import ConfigError, ModelError
from paceline.train.checkpoint import TrainState, save
from paceline.train.optim import MasterAdamW
from tests import tiny
from tests.unit.cli.test_evaluate import Tokenizer, app


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny target."""
    return tiny.save(tiny.causal_lm("llama"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folders of drafters with and without a confidence head."""
    found = {}
    for kind in ("dflash", "dspark"):
        run = tmp_path_factory.mktemp(kind)
        drafter = tiny.drafter(tiny.shape_of_kind(kind))
        optimizer = MasterAdamW(drafter, Optim(), torch.float32, sums_gradients=False)
        save(run / "checkpoints", TrainState(1, 1, 0, 1, 32, None, None, "t", "d"), drafter, optimizer, keep_last=1)
        found[kind] = run
    return found


def evaluated(
    target: str, draft: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[dict[str, Any], str, str]:
    """The record, what is printed for people, and the page."""
    monkeypatch.setattr("paceline.models.loading.load_tokenizer", lambda *args, **kwargs: Tokenizer())
    prompts, page = folder / "prompts.jsonl", folder / "page.html"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": "de"}\n', encoding="utf-8")
    given = ["--target", target, "--draft", str(draft), "--prompts", str(prompts), "--device", "cpu"]
    arguments = ["eval", *given, "--max-new-tokens", "8", "--json", "-", "--html", str(page), *options]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), result.stderr, page.read_text(encoding="utf-8")


def test_a_threshold_and_its_shares_are_told(
    target: str, drafts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record, the tables and the page say how much was verified and how much of it accepted."""
    options = ["--verify-threshold", "0.4", "--batch", "2", "--verify", "auto"]
    record, told, page = evaluated(target, drafts["dspark"], tmp_path, monkeypatch, *options)
    assert record["lossless"] is True and record["verify_threshold"] == 0.4 and record["verify"] == "auto"
    assert record["verified_per_round"] == pytest.approx(4 * record["verified_frac"])
    assert [row["batch_size"] for row in record["concurrency"]] == [1, 2]
    assert all(row["mismatches"] == 0 and row["verified_per_round"] <= 4 for row in record["concurrency"])
    told = " ".join(told.replace("│", " ").split())  # cells are wrapped
    assert "of a confidence of 0.4 at least" in told and "verified)" in told
    assert "drafted tokens a round" in page and "are left out before the target sees them" in page
    record, told, page = evaluated(target, drafts["dspark"], tmp_path, monkeypatch, "--batch", "2")
    assert record["verify"] == "all" and "verified" not in told.replace("verifying", "")
    assert "left out before" not in page


def test_drawn_drafts_are_lossless_in_distribution(
    target: str, drafts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is called a mismatch, and everywhere it is said what can be promised."""
    options = ["--temperature", "0.8", "--draft-sampling", "sampled", "--batch", "2"]
    for kind in ("dflash", "dspark"):
        record, told, page = evaluated(target, drafts[kind], tmp_path, monkeypatch, *options)
        assert (record["lossless"], record["mismatches"], record["draft_sampling"]) == (None, 0, "sampled")
        assert "lossless in distribution" in record["lossless_rule"]
        assert "lossless in distribution" in told and "lossless in distribution" in page
        assert all(row["mismatches"] == 0 for row in record["concurrency"])
        assert "drafted ones are drawn anew" in page


@pytest.mark.parametrize(
    ("kind", "options", "error", "named"),
    [
        ("dspark", ["--draft-sampling", "sampled"], ConfigError, "--temperature 0: greedy decoding draws nothing"),
        ("dspark", ["--verify", "auto"], ConfigError, "--batch B"),
        ("dflash", ["--verify-threshold", "0.5"], ModelError, "of kind dflash, has none"),
        ("dflash", ["--verify", "auto", "--batch", "2"], ModelError, "of kind dflash, has none"),
        (
            "dflash",
            ["--engine", "vllm", "--url", "http://x", "--verify-threshold", "0.5"],
            ConfigError,
            "--engine vllm with --verify-threshold",
        ),
    ],
)
def test_options_that_cannot_be_kept_are_refused(
    kind: str,
    options: list[str],
    error: type[Exception],
    named: str,
    target: str,
    drafts: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message says which option does not go with what."""
    with pytest.raises(error, match=named):
        evaluated(target, drafts[kind], tmp_path, monkeypatch, *options)
