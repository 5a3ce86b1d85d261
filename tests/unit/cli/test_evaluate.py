"""`paceline eval` and `paceline export` from the outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from paceline.cli import evaluate
from paceline.config import Optim
from paceline.errors import ConfigError
from paceline.export.zlab import export_zlab, load_zlab
from paceline.train.checkpoint import TrainState, load_drafter, save
from paceline.train.optim import MasterAdamW
from tests import tiny

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(evaluate.eval)
app.command()(evaluate.export)


class Tokenizer:
    """One id a character."""

    chat_template = "any"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return messages[-1]["content"]

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


@pytest.mark.parametrize("ngram", [True, False])
def test_eval_writes_one_json_record(ngram: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--json -` prints the record and nothing else to stdout; the table for people goes elsewhere."""
    monkeypatch.setattr("paceline.models.loading.load_tokenizer", lambda *args, **kwargs: Tokenizer())
    target = tiny.save(tiny.causal_lm("llama"), tmp_path / "target")
    draft = export_zlab(tiny.drafter(), tmp_path / "draft")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"question": "de"}\n', encoding="utf-8")
    options = ["--target", target, "--draft", str(draft), "--prompts", str(prompts), "--device", "cpu"]
    result = CliRunner().invoke(
        app, ["eval", *options, "--max-new-tokens", "6", "--json", "-", *([] if ngram else ["--no-ngram"])]
    )
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["target"], record["draft"], record["prompts"]) == (target, str(draft), 2)
    assert record["lossless"] is True
    assert record["block_size"] == 4
    assert record["kernel"]
    assert ("ngram_tok_per_s" in record) == ("n-gram drafts" in result.stderr) == ngram
    assert "acceptance length = tokens committed / target forwards" in result.stderr


def test_export_takes_a_run_folder(tmp_path: Path) -> None:
    """A run's newest checkpoint becomes a folder, and the commands to serve it are printed with the right counts."""
    drafter = tiny.drafter()
    optimizer = MasterAdamW(drafter, Optim(), torch.float32, sums_gradients=False)
    run = tmp_path / "run"
    save(run / "checkpoints", TrainState(1, 1, 0, 1, 32, None, None, "t", "d"), drafter, optimizer, keep_last=1)
    result = CliRunner().invoke(app, ["export", str(run), "--out", str(tmp_path / "out"), "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    for name, weight in load_zlab(tmp_path / "out").state_dict().items():
        assert torch.equal(weight, load_drafter(run).state_dict()[name])
    assert '"num_speculative_tokens": 3' in result.stdout
    assert "--speculative-num-draft-tokens 4" in result.stdout


def test_a_part_of_the_vocabulary_goes_as_speculators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its target named a drafter over some tokens is exported, evaluated from there, and exported again."""
    monkeypatch.setattr("paceline.models.loading.load_tokenizer", lambda *args, **kwargs: Tokenizer())
    target = tiny.save(tiny.causal_lm("llama"), tmp_path / "target")
    drafter = tiny.drafter(tiny.draft_shape(draft_vocab_size=90))
    drafter.set_draft_vocab(torch.arange(0, 270, 3))
    run, out = tmp_path / "run", tmp_path / "out"
    optimizer = MasterAdamW(drafter, Optim(), torch.float32, sums_gradients=False)
    save(run / "checkpoints", TrainState(1, 1, 0, 1, 32, None, None, "t", "d"), drafter, optimizer, keep_last=1)
    export = ["export", str(run), "--out", str(out), "--format", "speculators"]
    with pytest.raises(ConfigError, match="--format speculators needs --target"):
        CliRunner().invoke(app, export, catch_exceptions=False)
    result = CliRunner().invoke(app, [*export, "--target", target, "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["next"][1].startswith(f"vLLM: vllm serve {target} --speculative-config")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n', encoding="utf-8")
    options = ["--target", target, "--draft", str(out), "--prompts", str(prompts), "--device", "cpu", "--json", "-"]
    result = CliRunner().invoke(app, ["eval", *options, "--max-new-tokens", "6"], catch_exceptions=False)
    assert json.loads(result.stdout)["lossless"] is True
    again = ["export", str(out), "--out", str(tmp_path / "again"), "--format", "speculators", "--target", target]
    CliRunner().invoke(app, again, catch_exceptions=False)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()
