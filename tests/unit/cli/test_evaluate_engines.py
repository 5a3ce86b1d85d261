"""`paceline eval --engine vllm`: options, what is printed and written, and errors for users."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import evaluate
from paceline.errors import ConfigError, ServerError
from tests import toy
from tests.fake_vllm import FakeVllm, plain_answer, running_vllm
from tests.unit.report.reader import check

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(evaluate.eval)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """A target that has a tokenizer and nothing else, three prompts, short answers."""
    target = tmp_path / "toy"
    shutil.copytree(toy.ASSETS / "toy_tokenizer", target)
    shutil.copy(toy.ASSETS / "templates" / "chatml_plain.jinja", target / "chat_template.jinja")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"count {n}"}) + "\n" for n in range(4)), encoding="utf-8")
    files = ["--target", str(target), "--prompts", str(prompts), "--limit", "3", "--max-new-tokens", "12"]
    return [*files, "--engine", "vllm"]


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    with running_vllm(FakeVllm()) as server:
        yield server


@pytest.fixture
def plain() -> Iterator[FakeVllm]:
    with running_vllm(FakeVllm(accepted=None)) as server:
        yield server


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments], catch_exceptions=False)


def test_a_server_alone(options: list[str], fake: FakeVllm, tmp_path: Path) -> None:
    """Acceptance is printed and written; speedup and losslessness are said not to have been measured."""
    page = tmp_path / "page.html"
    result = run(*options, "--url", fake.url, "--json", "-", "--html", str(page))
    record = json.loads(result.stdout)
    assert (record["engine"], record["url"], record["served_model"]) == ("vllm", fake.url, "toy")
    assert record["draft"] == f"the drafter at {fake.url}" and record["prompts"] == 3
    assert record["acceptance_length"] == 3.0 and record["versions"]["vllm"] == "1.2"
    assert (record["speedup"], record["lossless"]) == (None, None)
    for shown in ("3.000", "2.750 tokens a verification", "not measured: speedup", "acceptance length = 1 + accepted"):
        assert shown in result.stderr
    assert "1.00x" not in result.stderr
    text = check(page.read_text(encoding="utf-8")).text()
    assert "3.00 tokens a forward" in text and "Not measured: lossless" in text
    assert not any("prompt" in body and not isinstance(body["prompt"][0], int) for body in fake.requests)


def test_two_servers_and_a_load(options: list[str], fake: FakeVllm, plain: FakeVllm, tmp_path: Path) -> None:
    """With a server that does not draft the tables have both, for every number of requests."""
    file = tmp_path / "out.json"
    result = run(*options, "--url", f"{fake.url}/v1", "--baseline-url", plain.url, "--batch", "3", "--json", str(file))
    record = json.loads(file.read_text())
    assert record["lossless"] is True and record["speedup"] > 0 and record["baseline_url"] == plain.url
    assert [row["batch_size"] for row in record["concurrency"]] == [1, 2, 3]
    assert "By concurrency" in result.stdout and "identical" in result.stdout and "3 at a time" in result.stdout


def test_another_answer_is_printed(options: list[str], plain: FakeVllm) -> None:
    """A difference is shown with its place and whether it is rounding."""
    other = FakeVllm(answer=lambda prompt: [t + (i == 4) for i, t in enumerate(plain_answer(prompt))])
    with running_vllm(other):
        result = run(*options, "--url", other.url, "--baseline-url", plain.url)
    assert "ANOTHER ANSWER" in result.stdout and "no: 3 mismatches, 0 numeric ties" in result.stdout
    assert "prompt 0: token 4 differs; the two best logits are 2.00e+00 apart: a fault" in result.stdout


def test_other_clients_are_warned_of(options: list[str], fake: FakeVllm) -> None:
    """Tokens made for others are said below the table."""
    fake.others = 2
    result = run(*options, "--url", fake.url)
    assert "warning: other clients had 6 tokens made meanwhile" in result.stdout
    assert "not known, as others used the server" in result.stdout


def test_a_named_draft_is_only_a_name(options: list[str], fake: FakeVllm) -> None:
    """It need not exist, and the record says that nobody checked it."""
    record = json.loads(run(*options, "--url", fake.url, "--draft", "mine", "--json", "-").stdout)
    assert record["draft"] == f"mine (as named; {fake.url} does not say)"


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--engine", "vllm"], "needs --url"),
        (["--engine", "vllm", "--url", "here"], "--url here is no address"),
        (["--engine", "vllm", "--url", "http://h", "--baseline-url", "x"], "--baseline-url x is no address"),
        (["--engine", "vllm", "--url", "http://h", "--block-size", "3"], "--block-size: that was decided"),
        (["--engine", "vllm", "--url", "http://h", "--sweep-block-sizes"], "--sweep-block-sizes: that was decided"),
        (["--engine", "vllm", "--url", "http://h", "--device", "cpu"], "--device: that was decided"),
        (["--url", "http://h", "--model", "m"], "--url, --model without --engine vllm"),
        (["--engine", "builtin"], "--draft is missing"),
    ],
)
def test_options_that_do_not_belong_together(options: list[str], arguments: list[str], wrong: str) -> None:
    """Each is refused before anything is asked or loaded, and says what to change."""
    with pytest.raises(ConfigError, match=wrong):
        run(*options[: options.index("--engine")], *arguments)


def test_a_server_that_dies_leaves_no_file(options: list[str], fake: FakeVllm, tmp_path: Path) -> None:
    """Half a measurement is not written."""
    fake.breaks_at = 3
    file = tmp_path / "out.json"
    with pytest.raises(ServerError, match="stopped answering at prompt 2"):
        run(*options, "--url", fake.url, "--json", str(file))
    assert not file.exists()
