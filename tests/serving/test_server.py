"""`paceline eval --engine vllm` against real servers: the same acceptance as our own decoder's, prompt by prompt."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from paceline.cli import evaluate
from paceline.dflash.acceptance import Acceptance
from paceline.errors import ServerError
from paceline.eval.decode import CachedTarget, speculative_decode
from paceline.eval.engine_vllm import ENVIRONMENT
from paceline.eval.evaluate import encode_prompts, read_prompts
from paceline.export.zlab import export_zlab
from paceline.models.loading import load_tokenizer
from tests import tiny, toy
from tests.serving.test_vllm import HEAD_DIM, VARIABLE
from tests.unit.eval import learnt

pytestmark = pytest.mark.slow

START_S = 300.0
NUM_DRAFTED = 4

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(evaluate.eval)


@contextmanager
def served(target: Path, draft: Path | None, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`vllm serve` on a free loopback port; its URL once it answers, and its process, which leads a group."""
    assert VARIABLE in os.environ, f"{VARIABLE} has to name an interpreter with vLLM: `make test-vllm` makes one"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    # The `vllm` command does not start where the distribution has another name than that.
    command = [os.environ[VARIABLE], "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    if draft is not None:
        speculation = {"method": "dflash", "model": str(draft), "num_speculative_tokens": NUM_DRAFTED}
        command += ["--speculative-config", json.dumps(speculation)]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, process, log)
        yield url, process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server with its engine, which is a process of its own in the group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"vLLM does not serve: {log.read_text(errors='replace')[-3000:]}")


def evaluated(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*options, "--json", "-"], catch_exceptions=False)
    print(result.stderr)
    return json.loads(result.stdout)


def test_a_server_is_measured_as_our_decoder_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance, losslessness and speeds of a running server by its counters; then it dies, which is said.

    The drafter has one layer: vLLM on a CPU normalises the context's keys of all layers as those of the first.
    """
    target = Path(tiny.save(tiny.causal_lm("llama", head_dim=HEAD_DIM), tmp_path / "target"))
    for file in (toy.ASSETS / "toy_tokenizer").iterdir():
        shutil.copy(file, target / file.name)
    shutil.copy(toy.ASSETS / "templates" / "chatml_plain.jinja", target / "chat_template.jinja")
    prompts = tmp_path / "prompts.jsonl"
    texts = ["count 1", "abc", "seven [red]", "is it?"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    encoded = encode_prompts(read_prompts([prompts]), load_tokenizer(str(target)))
    monkeypatch.setattr(learnt, "prompts", lambda: encoded)
    drafter = learnt.new_drafter(str(target), head_dim=HEAD_DIM, num_hidden_layers=1)
    learnt.train(drafter, str(target), num_steps=150)
    draft = export_zlab(drafter, tmp_path / "draft", torch.float32)
    cached, limit = CachedTarget.load(str(target), learnt.LAYER_IDS), learnt.ANSWER
    ours = Acceptance(NUM_DRAFTED)
    answers = [speculative_decode(cached, drafter, p, limit, cached.shape.eos_token_ids) for p in encoded]
    for answer in answers:
        ours += answer.acceptance
    assert ours.length > 1.5

    options = ["--target", str(target), "--prompts", str(prompts), "--max-new-tokens", str(limit), "--engine", "vllm"]
    page = tmp_path / "page.html"
    with (
        served(target, draft, tmp_path / "log") as (url, process),
        served(target, None, tmp_path / "plain.log") as (plain_url, _),
    ):
        record = evaluated(*options, "--url", url, "--baseline-url", plain_url, "--batch", "2", "--html", str(page))
        assert record["rounds"] == ours.rounds
        assert record["committed_per_round"] == ours.length
        assert record["generated_tokens"] == sum(len(answer.tokens) for answer in answers)
        assert record["acceptance_length"] >= ours.length  # what the limit cuts counts
        assert record["acceptance_length"] == 1 + record["num_accepted_tokens"] / record["rounds"]
        assert record["num_draft_tokens"] == NUM_DRAFTED * record["rounds"]
        assert record["lossless"] is True and record["speedup"] > 0
        assert record["other_clients_tokens"] == 0 and record["warnings"] == []
        assert [(row["batch_size"], row["requests"]) for row in record["concurrency"]] == [(1, 4), (2, 4)]
        assert record["versions"]["vllm"] and "tokens a forward" in page.read_text(encoding="utf-8")

        alone = evaluated(*options, "--url", url)
        assert (alone["speedup"], alone["lossless"]) == (None, None) and "baseline_tok_per_s" not in alone
        assert (alone["rounds"], alone["accepted_counts"]) == (record["rounds"], record["accepted_counts"])

        end(process)
        with pytest.raises(ServerError, match="no answer from"):
            evaluated(*options, "--url", url)
