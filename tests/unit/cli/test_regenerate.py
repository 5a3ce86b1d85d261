"""`paceline regenerate` as a person runs it: by a server and by a model here, stopped, killed and gone on with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.regenerate import regenerate
from paceline.errors import ConfigError, DataError, ModelError
from tests.fake_server import FakeServer, Reply, running
from tests.toy import Toy
from tests.unit.data.conftest import TOY_TOKENIZER, template, toy

ROOT = Path(__file__).parents[3]
APP = typer.Typer()
APP.command()(regenerate)
TOKENIZER = ("--tokenizer", str(TOY_TOKENIZER), "--template", str(template("chatml_plain")))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer(toy())) as found:
        yield found


def run(*arguments: object) -> str:
    """Standard output of the command in this process; its errors travel."""
    result = CliRunner().invoke(APP, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def start(*arguments: object) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "paceline", "regenerate", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def questions(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"question {i}."}) + "\n" for i in range(count)))
    return path


def done(out: Path) -> list[str]:
    """Places of the rows in an output folder; a line under way is left out."""
    names = [path for path in (out / "answers.jsonl", out / "rejected.jsonl") if path.exists()]
    found = [line for path in names for line in path.read_text().splitlines(keepends=True)]
    return [json.loads(line)["source"] for line in found if line.endswith("\n")]


def test_a_run_ends_with_what_a_person_wants_to_know(server: FakeServer, tmp_path: Path) -> None:
    """Rows, tokens, whether ids are exact, what is missing and why, the next command; regenerate.json has it all."""
    server.reply = lambda body, times: Reply(finish="length" if "3" in body["messages"][-1]["content"] else "stop")
    source, out = questions(tmp_path / "in.jsonl", 5), tmp_path / "out"
    shown = run(source, "--server", server.url, *TOKENIZER, "--out", out, "--seed", 7).splitlines()
    assert shown[0] == f"4 of 5 rows answered in {out}"
    assert shown[1].startswith("64 tokens in 4 answers, ") and shown[1].endswith("with the token ids as sampled")
    assert shown[2:] == [
        f"1 rows rejected, listed in {out / 'rejected.jsonl'}:",
        "  1 x answer longer than max-new-tokens",
        f"next: paceline prepare {out} --tokenizer {TOY_TOKENIZER} --template {template('chatml_plain')} --out DATA",
    ]
    described = json.loads((out / "regenerate.json").read_text())
    assert described["engine"] == "server" and described["model"] == "toy" and described["finished"] is True
    assert described["server"]["url"] == server.url + "/v1" and described["server"]["software"] == "fake 1.2"
    assert described["sampling"] == {
        "temperature": 0.0,
        "top_p": 1.0,
        "max_new_tokens": 2048,
        "seed": 7,
        "thinking": None,
    }
    (described_input,) = described["inputs"]
    assert described_input.items() >= {"path": str(source), "license": None, "files": 1}.items()
    assert described["counts"]["rejected"] == {"answer longer than max-new-tokens": 1}
    assert described["tokenizer_fingerprint"] and described["template_hash"]
    with pytest.raises(ConfigError, match="sampling.seed was 7, is now 8"):
        run(source, "--server", server.url, *TOKENIZER, "--out", out, "--seed", 8)


def test_json_and_limit(server: FakeServer, tmp_path: Path) -> None:
    """One object on standard output; a later run without the limit goes on."""
    source, out = questions(tmp_path / "in.jsonl", 5), tmp_path / "out"
    options = (source, "--server", server.url, *TOKENIZER, "--out", out, "--json")
    first = json.loads(run(*options, "--limit", 2))
    assert (first["num_kept"], first["finished"], first["out"]) == (2, True, str(out))
    assert json.loads(run(*options))["num_kept"] == 5 and len(server.requests) == 5


def test_text_without_ids_is_told_apart(server: FakeServer, tmp_path: Path) -> None:
    """The summary says that such rows are tokenised again."""
    server.ids_place = "nowhere"
    shown = run(questions(tmp_path / "in.jsonl", 2), "--server", server.url, *TOKENIZER, "--out", tmp_path / "out")
    assert "2 rows as TEXT ONLY, which `prepare` tokenizes again" in shown


def test_a_model_on_this_machine_answers(toy: Toy, tmp_path: Path) -> None:
    """The same answers to a file that lies elsewhere; the random toy target never ends, so cut answers are kept.

    Its vocabulary is larger than its tokenizer: some answers fall to that.
    """
    out = tmp_path / "out"
    options = ("--target", toy.target, "--max-new-tokens", 12, "--on-cut", "keep", "--temperature", 0.7)
    counts = json.loads(run(toy.conversations, *options, "--out", out, "--json", "--limit", 20))
    rejected = counts["rejected"].get("a token that the tokenizer lacks", 0)
    assert counts["num_kept"] + rejected == 20 and counts["num_kept"] > 0
    assert counts["num_with_ids"] == counts["num_kept"]
    described = json.loads((out / "regenerate.json").read_text())
    assert (described["engine"], described["dtype"], described["device"]) == ("local", "float32", "cpu")
    again = tmp_path / "again"
    elsewhere = Path(shutil.copy(toy.conversations, tmp_path))
    run(elsewhere, *options, "--out", again, "--limit", 20, "--concurrency", 3)
    lines = [[json.loads(line) for line in open(folder / "answers.jsonl")] for folder in (out, again)]
    rows = [{Path(line["source"]).name: line["rows"] for line in each} for each in lines]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "who answers"),
        (("--server", "http://x", "--target", "t", "--tokenizer", "t"), "who answers"),
        (("--server", "http://x"), "--server needs --tokenizer"),
        (("--target", "t", "--model", "m"), "--model and --any-template are for a --server"),
        (("--server", "http://x", *TOKENIZER, "--adapter", "a"), "a is merged into a --target that runs here"),
        (("--target", *TOKENIZER[1:], "--adapter", "no/adapter"), "adapter no/adapter is no folder here"),
        (("--target", str(TOY_TOKENIZER), "--template", "no.jinja"), "no.jinja cannot be read"),
    ],
)
def test_senseless_calls_are_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    """With what was wanted instead, before there is a folder."""
    with pytest.raises((ConfigError, DataError, ModelError), match=message):
        run(questions(tmp_path / "in.jsonl", 1), "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_weights_and_repeated_inputs_are_refused(tmp_path: Path) -> None:
    """Repeating rows is for `prepare`."""
    source = questions(tmp_path / "in.jsonl", 1)
    options = ("--out", tmp_path / "out", "--server", "http://x", *TOKENIZER)
    with pytest.raises(ConfigError, match="has a weight"):
        run(f"{source},weight=2", *options)
    (tmp_path / "link.jsonl").symlink_to(source)
    for again in (source, f"{tmp_path}/./in.jsonl", tmp_path / "link.jsonl"):
        with pytest.raises(ConfigError, match="named twice"):
            run(source, again, *options)


def test_a_folder_and_a_file_in_it_are_answered_once(server: FakeServer, tmp_path: Path) -> None:
    """However many requests are in flight."""
    (tmp_path / "in").mkdir()
    source = questions(tmp_path / "in" / "in.jsonl", 6)
    for concurrency in (1, 20):
        options = ("--server", server.url, *TOKENIZER, "--out", tmp_path / f"out{concurrency}", "--json")
        shown = json.loads(run(tmp_path / "in", source, *options, "--concurrency", concurrency))
        assert shown["num_kept"] == 6


def test_an_input_that_was_replaced_is_refused(server: FakeServer, tmp_path: Path) -> None:
    """Its rows are known by their places: other content there would pass for answered."""
    source, out = questions(tmp_path / "in.jsonl", 3), tmp_path / "out"
    options = (source, "--server", server.url, *TOKENIZER, "--out", out)
    run(*options)
    for content in (source.read_text().replace("question 1", "QUESTION 1"), source.read_text() * 2):
        source.write_text(content)
        with pytest.raises(
            ConfigError, match=r"other inputs, or these have changed since \(inputs.0.(bytes|digest) was"
        ):
            run(*options)


@pytest.mark.parametrize(("thinking", "words"), [("on", " --thinking on "), ("off", " --thinking off "), (None, "")])
def test_the_next_command_keeps_the_thinking_mode(
    server: FakeServer, tmp_path: Path, thinking: str | None, words: str
) -> None:
    """`prepare` has to render prompts as they were."""
    options = ("--server", server.url, *TOKENIZER, "--out", tmp_path / "out")
    switch = () if thinking is None else ("--thinking", thinking)
    shown = run(questions(tmp_path / "in.jsonl", 1), *options, *switch).splitlines()[-1]
    assert shown.startswith("next: paceline prepare ") and words in shown and shown.endswith(" --out DATA")
    assert ("--thinking" in shown) == (thinking is not None)


@pytest.mark.slow
def test_a_server_that_fails_for_good_ends_the_command(server: FakeServer, tmp_path: Path) -> None:
    """Exit code 1 and one line; no row is rejected, and the next call goes on."""
    server.reply = lambda body, times: Reply() if len(server.requests) <= 3 else Reply(500, "out of memory")
    source, out = questions(tmp_path / "in.jsonl", 8), tmp_path / "out"
    options = (source, "--server", server.url, *TOKENIZER, "--out", out, "--concurrency", 2, "--retries", 1)
    failed = start(*options)
    _, shown = failed.communicate(timeout=60)
    assert failed.returncode == 1 and "Traceback" not in shown
    assert "stopped answering" in shown and "HTTP 500: out of memory" in shown and "goes on with the others" in shown
    assert 1 <= len(done(out)) <= 3 and (out / "rejected.jsonl").read_text() == ""
    server.reply = lambda body, times: Reply()
    assert json.loads(run(*options, "--json"))["num_kept"] == 8


def test_typed_control_tokens_are_rejected_by_a_model_here_as_well(toy: Toy, tmp_path: Path) -> None:
    """Whoever answers."""
    source = tmp_path / "in.jsonl"
    rows = [{"prompt": "hi<|im_end|>"}, {"prompt": "hi"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--target", toy.target, "--max-new-tokens", 4, "--on-cut", "keep", "--out", tmp_path / "out", "--json")
    shown = json.loads(run(source, *options))
    assert (shown["num_kept"], shown["rejected"]) == (1, {"control token in a message": 1})


def test_nothing_answered_is_an_error(server: FakeServer, tmp_path: Path) -> None:
    """A chain of commands stops there."""
    server.reply = lambda body, times: Reply(finish="length")
    with pytest.raises(DataError, match="no row has an answer; .*rejected.jsonl says why"):
        run(questions(tmp_path / "in.jsonl", 2), "--server", server.url, *TOKENIZER, "--out", tmp_path / "out")


@pytest.mark.slow
def test_killed_and_stopped_runs_go_on(server: FakeServer, tmp_path: Path) -> None:
    """kill -9 loses what was in flight; SIGTERM ends in a moment and says how to go on; nothing is lost or repeated."""
    server.reply = lambda body, times: Reply(delay_s=0.15)
    source, out = questions(tmp_path / "in.jsonl", 60), tmp_path / "out"
    options = (source, "--server", server.url, *TOKENIZER, "--out", out, "--concurrency", 4)
    killed = start(*options)
    while len(done(out)) < 8:
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.02)
    killed.kill()
    killed.communicate()
    before = done(out)
    assert json.loads((out / "regenerate.json").read_text())["finished"] is False

    stopped = start(*options)
    while len(done(out)) < len(before) + 8:
        assert stopped.poll() is None, stopped.communicate()
        time.sleep(0.02)
    stopped.send_signal(signal.SIGTERM)
    _, shown = stopped.communicate(timeout=10)
    assert stopped.returncode == 128 + signal.SIGTERM
    between = done(out)
    assert f"going on: {len(before)} rows are done" in shown
    assert f"stopped by SIGTERM; {len(between)} rows are done, and the same command goes on with the others" in shown
    assert between[: len(before)] == before and len(set(between)) == len(between) < 60

    server.reply = lambda body, times: Reply()
    run(*options)
    assert sorted(done(out)) == sorted(f"{source}:{i + 1}" for i in range(60))
    assert len(server.requests) <= 60 + 2 * 4  # what was in flight twice, and nothing else
