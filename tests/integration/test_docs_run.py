"""The commands on the pages run, with a small target in the place of the reader's.

Those of the quick start and the guide run as they are written, by ``scripts/newcomer.py`` (`test_newcomer.py`). Here
are all others: names in capitals stand for what the reader has, and what takes long is made short by the options that
a command has for that. `NEEDS` says what does not run here, and why.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import dump_config
from tests.integration.test_profile_live import PATIENCE_S, SLOW_TRAINING, environment, until
from tests.toy import Toy, train
from tests.unit.models.test_adapter import adapter_of
from tests.unit.test_docs_commands import PAGES, commands

RUN_ELSEWHERE = ("quickstart.md", "train-your-model.md")

NEEDS = {
    "demo": "minutes: test_demo.py",
    "top": "a terminal, until it is left: test_profile_live.py",
    "--serve": "a browser, until it is ended: test_report.py",
    "--server": "a server: test_regenerate.py has a small one",
    "--engine": "a real engine: make test-vllm",
    "--calibrate": "a minute of the machine: test_plan.py",
}
"""Words of commands that are not run here."""

SHORT = {
    "profile attach": ["--seconds", "1", "--native-seconds", "2"],
    "profile trace": ["--seconds", "0.5"],
    "regenerate": ["--max-new-tokens", "8", "--on-cut", "keep"],
    "eval": ["--max-new-tokens", "8"],
    "doctor": ["--quick"],
}
"""What makes a command short."""

MAY_BE = {"profile diff": (0, 1)}
"""Exit codes; 0 alone for others. `profile diff --fail-on` ends with 1 where something has moved."""


def shown() -> Iterator[tuple[Path, int, list[str]]]:
    """Page, line and words of every command that is whole."""
    for page in PAGES:
        if page.name not in RUN_ELSEWHERE:
            for line, words, is_whole in commands(page.read_text(encoding="utf-8")):
                if is_whole:
                    yield page, line, words


def why_not(words: list[str]) -> str | None:
    """What a command needs that is not here."""
    return next((name for name in NEEDS if name in words), None)


SHOWN = list(shown())
ONCE = {tuple(words): None for _, _, words in SHOWN if why_not(words) is None}
RUNS = [pytest.param(list(each), id=" ".join(each)) for each in sorted(ONCE, key=lambda words: words[0] == "stop")]


class Desk:
    """What a reader has: a target, data, runs that have ended and one that goes on, a drafter, reports."""

    def __init__(self, folder: Path, toy: Toy) -> None:
        self.folder, self.toy = folder, toy
        self.process: subprocess.Popen[bytes] | None = None
        self.prompts = folder / "prompts.jsonl"
        lines = [json.loads(line) for line in toy.conversations.read_text(encoding="utf-8").splitlines()[:2]]
        self.prompts.write_text(
            "".join(json.dumps({"messages": each["messages"][:1]}) + "\n" for each in lines), encoding="utf-8"
        )
        self.ended = folder / "ended"
        train(toy.config(self.ended, "run.max_steps=6", "profiling.interval=0.05"))
        self.yaml = folder / "run.yaml"
        self.yaml.write_text(dump_config(toy.config(folder / "begun", "run.max_steps=4")), encoding="utf-8")
        self.drafter = folder / "drafter"
        self.call("export", str(self.ended), "--out", str(self.drafter))
        self.adapter, _ = adapter_of(str(toy.target), folder / "adapter")
        self.features = folder / "features"
        self.call("cache", str(self.yaml), "--out", str(self.features))
        self.reports = [folder / name for name in ("before.json", "after.json")]
        self.num_made = 0

    def live(self) -> Path:
        """The folder of a run that goes on; a new one where the last was stopped."""
        if self.process is None or self.process.poll() is not None:
            run = self.folder / f"live-{self.num_made}"
            self.num_made += 1
            file = run.with_suffix(".yaml")
            config = self.toy.config(run, "data.epochs=100000", "checkpoint.every_steps=1000")
            file.write_text(dump_config(config), encoding="utf-8")
            log = open(run.with_suffix(".log"), "wb")  # noqa: SIM115, the process has it
            self.process = subprocess.Popen(
                [sys.executable, "-c", SLOW_TRAINING, "train", str(file)],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            self.run = run
            metrics = run / "metrics.jsonl"
            until(lambda: metrics.is_file() and metrics.stat().st_size, self.process)
        return self.run

    def report(self, which: int) -> Path:
        """A report of a look at it."""
        if not self.reports[which].is_file():
            self.call("profile", "attach", str(self.live()), "--seconds", "1", "--json", str(self.reports[which]))
        return self.reports[which]

    def new(self, name: str) -> str:
        """A path where nothing is."""
        self.num_made += 1
        return str(self.folder / f"{self.num_made}-{Path(name).name}")

    def call(self, *words: str, codes: tuple[int, ...] = (0,)) -> str:
        """Run a command in this process."""
        done = CliRunner(env={"COLUMNS": "120"}).invoke(app, list(words))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code in codes, (words, done.output)
        return done.output

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def desk(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    found = Desk(tmp_path_factory.mktemp("desk"), toy)
    yield found
    found.close()


def meant(words: list[str], desk: Desk) -> list[str]:
    """The command with the desk's paths in the place of the page's."""
    words = list(words)
    while any(word.startswith("[") for word in words):  # what may be left out is left out
        start = next(i for i, word in enumerate(words) if word.startswith("["))
        end = next(i for i in range(start, len(words)) if words[i].endswith("]"))
        del words[start : end + 1]
    verb = words[0]
    of_option = {
        "--target": str(desk.toy.target), "--tokenizer": str(desk.toy.target), "--draft": str(desk.ended),
        "--prompts": str(desk.prompts), "--data": str(desk.toy.data), "--run": str(desk.ended),
        "--config": str(desk.yaml), "--adapter": desk.adapter, "--verify": str(desk.features),
    }  # fmt: skip
    found, option = list[str](), ""
    for place, word in enumerate(words):
        if option:
            if option in ("--out", "--html", "--json"):
                word = desk.new(word)
            elif option != "--target" or word.isupper():  # a plan's target may be a built-in shape
                word = of_option.get(option, word).split("|")[0]
            option = ""
        elif word.startswith("--"):
            option = word if word in (*of_option, "--out", "--html", "--format") else ""
            if word == "--json" and place + 1 < len(words) and words[place + 1].endswith(".json"):
                option = word
        elif word in ("RUN", "PID|RUN", "runs/my-drafter", "runs/slow"):
            word = str(desk.ended if verb == "export" else desk.live())
        elif word == "12345":
            desk.live()
            assert desk.process is not None
            word = str(desk.process.pid)
        elif word.endswith(".json"):
            word = str(desk.report(0 if word in ("a.json", "before.json") else 1))
        elif verb in ("train", "cache") and word == "run.yaml":
            word = str(desk.yaml)
        elif word == "target.cache=features":
            word = f"target.cache={desk.features}"
        elif verb in ("prepare", "regenerate") and place > 0:
            word = str(desk.toy.conversations)
        elif place > 0 and word in ("DIR", "DRAFTER", "DATA", "data", "drafter", "runs/drafter"):
            word = {"inspect": str(desk.toy.data), "check": str(desk.drafter)}.get(verb, str(desk.ended))
        found.append(word)
    name = " ".join(found[:2]) if verb == "profile" else verb
    return [*found, *SHORT.get(name, [])]


@pytest.mark.parametrize("words", RUNS)
def test_it_runs(words: list[str], desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exit code 0."""
    monkeypatch.chdir(desk.folder)
    name = " ".join(words[:2]) if words[0] == "profile" else words[0]
    desk.call(*meant(words, desk), codes=MAY_BE.get(name, (0,)))
    if name == "stop":
        assert desk.process is not None and desk.process.wait(PATIENCE_S) == 0


def test_what_is_left_out_is_still_shown() -> None:
    """No reason outlives the command that it was for, and most commands run."""
    needed = [why_not(words) for _, _, words in SHOWN]
    assert set(NEEDS) == {name for name in needed if name is not None}
    assert needed.count(None) > 0.8 * len(SHOWN)
