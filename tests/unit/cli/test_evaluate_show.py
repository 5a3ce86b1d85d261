"""`paceline eval` with its own prompts, at a temperature, over block sizes and batches; and what it prints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli import evaluate
from paceline.cli.evaluate_show import print_evaluation, serving_line
from paceline.errors import ConfigError, ModelError
from paceline.eval.evaluate import read_prompts, sample_prompts
from paceline.export.zlab import export_zlab
from tests import tiny
from tests.unit.report.reader import check

ASSETS = Path(__file__).parents[2] / "assets"

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(evaluate.eval)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name a tiny target with the toy tokenizer, and a drafter for it."""
    folder = tmp_path_factory.mktemp("eval")
    target = tiny.save(tiny.causal_lm("llama"), folder / "target")
    for file in (ASSETS / "toy_tokenizer").iterdir():
        shutil.copy(file, Path(target) / file.name)
    shutil.copy(ASSETS / "templates" / "chatml_plain.jinja", Path(target) / "chat_template.jinja")
    draft = export_zlab(tiny.drafter(), folder / "draft")
    return ["--target", target, "--draft", str(draft), "--device", "cpu"]


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"count {n} [red]"}) + "\n" for n in range(3)), encoding="utf-8")
    return ["--prompts", str(file)]


def run(*options: str) -> Any:
    return CliRunner().invoke(app, [*options], catch_exceptions=False)


def test_everything_at_once(folders: list[str], prompts: list[str], tmp_path: Path) -> None:
    """Block sizes, batches, draws, JSON and page come from one call, which says the length to serve with."""
    page = tmp_path / "page.html"
    result = run(
        *folders, *prompts, "--max-new-tokens", "8", "--temperature", "0.7", "--seed", "3", "--sweep-block-sizes",
        "--batch", "3", "--json", "-", "--html", str(page),
    )  # fmt: skip
    record = json.loads(result.stdout)
    assert (record["temperature"], record["seed"], record["lossless"]) == (0.7, 3, True)
    assert [row["block_size"] for row in record["sweep"]] == [2, 3, 4]
    assert [row["num_predicted"] for row in record["sweep"]] == [1, 2, 3]
    served = record["serve_block_size"]
    fastest = max(row["speculative_tok_per_s"] for row in record["sweep"])
    nearly = [row["block_size"] for row in record["sweep"] if row["speculative_tok_per_s"] >= 0.97 * fastest]
    assert served == record["block_size"] == min(nearly)
    assert [row["batch_size"] for row in record["concurrency"]] == [1, 2, 3]
    assert not any(row["mismatches"] for row in record["concurrency"])
    assert f"num_speculative_tokens={served - 1} for vLLM" in result.stderr
    assert f"--speculative-num-draft-tokens {served} for SGLang" in result.stderr
    assert "By concurrency" in result.stderr and "first token" in result.stderr
    assert sum(record["accepted_counts"]) == record["rounds"] == sum(b["rounds"] for b in record["by_context"])
    text = check(page.read_text(encoding="utf-8")).text()
    assert "By concurrency" in text and "drawn at temperature 0.70, seed 3" in text


def test_own_prompts_need_no_file(folders: list[str]) -> None:
    """Left without prompts, `eval` takes those that come with Paceline, and says so."""
    result = run(*folders, "--limit", "2", "--max-new-tokens", "2", "--no-ngram", "--json", "-")
    record = json.loads(result.stdout)
    assert record["prompts"] == 2 and record["prompt_files"] == ["those that come with Paceline"]
    assert "sweep" not in record and "concurrency" not in record
    assert record["acceptance_length_interval"] is None and "no interval from so few prompts" in result.stderr


def test_the_sample_prompts_are_short_and_all_different() -> None:
    """24 prompts in the formats that `eval` reads, each under a thousand characters."""
    texts = [messages[-1]["content"] for messages in read_prompts([sample_prompts()])]
    assert len(set(texts)) == 24
    assert all(20 < len(text) < 1000 for text in texts)
    kinds = [set(json.loads(line)) for line in sample_prompts().read_text(encoding="utf-8").splitlines()]
    assert {"kind", "prompt"} in kinds and {"kind", "turns"} in kinds and {"kind", "messages"} in kinds


def test_named_block_sizes_are_measured(folders: list[str], prompts: list[str]) -> None:
    """`--block-size` twice measures both, once uses it, and a size that was not trained is an error."""
    few = [*folders, *prompts, "--max-new-tokens", "4", "--no-ngram", "--json", "-"]
    record = json.loads(run(*few, "--block-size", "4", "--block-size", "2").stdout)
    assert [row["block_size"] for row in record["sweep"]] == [2, 4]
    record = json.loads(run(*few, "--block-size", "3").stdout)
    assert record["block_size"] == 3 and "sweep" not in record
    with pytest.raises(ModelError, match="blocks of 4 slots"):
        run(*few, "--block-size", "5")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--block-size", "2", "--sweep-block-sizes"], "--sweep-block-sizes: name the sizes"),
        (["--html", "/nowhere/at/all.html"], "--html /nowhere/at/all.html cannot be written"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json cannot be written"),
    ],
)
def test_mistakes_are_told_before_the_work(
    options: list[str], named: str, folders: list[str], prompts: list[str]
) -> None:
    """Options that contradict each other, and files that cannot be written, are errors at once."""
    with pytest.raises(ConfigError, match=named):
        run(*folders, *prompts, *options)


def test_names_are_no_markup(folders: list[str], prompts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets in a path are shown as they are."""
    record = json.loads(run(*folders, *prompts, "--max-new-tokens", "4", "--json", "-").stdout)
    print_evaluation(Console(width=200), {**record, "draft": "a[/b]c[red]d"})
    assert "a[/b]c[red]d" in capsys.readouterr().out


def test_engines_count_differently() -> None:
    """vLLM counts drafted tokens, SGLang the anchor as well."""
    sweep = [{"block_size": 4, "num_predicted": 3}, {"block_size": 6, "num_predicted": 5}]
    assert serving_line({"sweep": sweep, "serve_block_size": 6}).startswith(
        "serve with blocks of 6: num_speculative_tokens=5 for vLLM, --speculative-num-draft-tokens 6 for SGLang"
    )
