"""The verbs as functions: the same results and errors as the command line's, in one process."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import api
from paceline.config import load_config
from paceline.errors import CheckpointError, ConfigError, DataError, ModelError
from tests.toy import Toy

RUN = {
    "draft": {"num_layers": 2, "block_size": 4},
    "optim": {"lr": 3e-3, "tokens_per_step": 256},
    "pipeline": {"tokens_per_batch": 128},
    "topology": {"threads": 1},
    "checkpoint": {"every_steps": 4},
}


def run_of(toy: Toy, folder: Path, data: Path) -> dict[str, Any]:
    return {
        **RUN, "target": {"path": str(toy.target)}, "data": {"path": str(data), "validation": 0.1},
        "run": {"dir": str(folder / "run"), "device": "cpu", "max_steps": 6},
    }  # fmt: skip


def test_from_conversations_to_a_folder_that_engines_load(toy: Toy, tmp_path: Path) -> None:
    """Every verb in the order of a user's day; a run that was stopped goes on."""
    info, report = api.prepare(toy.conversations, tmp_path / "data", tokenizer=toy.target, max_length=128)
    assert info.num_rows == 40 and report.num_rejected == 0
    run, lines = run_of(toy, tmp_path, tmp_path / "data"), list[dict[str, Any]]()
    first = api.train(run, ["run.max_steps=4"], on_step=lines.append, allow_change=["run.max_steps"])
    assert first.step == 4 and [line["step"] for line in lines] == [1, 2, 3, 4]
    done = api.train(run, on_step=lines.append, allow_change=["run.max_steps"])
    assert done.step == 6 and [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert "run.max_steps" not in run["run"] and run["run"]["max_steps"] == 6  # what was given is as it was
    state = api.status(tmp_path / "run")
    assert state["step"] == 6
    (row,) = api.rows(tmp_path / "data", [3])
    assert row["row"] == 3 and len(row["input_ids"]) == len(row["loss_mask"])
    with pytest.raises(DataError, match="rows 0 to 39"):
        api.rows(tmp_path / "data", [40])
    record = api.evaluate(toy.target, tmp_path / "run", limit=2, max_new_tokens=8, device="cpu", ngram=False)
    assert record["lossless"] and record["prompts"] == 2 and record["acceptance_length"] >= 1
    folder = api.export(tmp_path / "run", tmp_path / "drafter", target=toy.target, dtype="float32")
    assert folder == tmp_path / "drafter" and (folder / "model.safetensors").is_file()
    found = api.check(folder, toy.target, device="cpu")
    assert found.num_errors == 0, found.as_dict()
    planned = api.plan(str(toy.target), "2xh200", tokens=1e6, overrides=["draft.num_layers=2"])
    assert planned["best"] in planned["splits"] and planned["flops"]


def test_a_run_file_and_a_configuration_mean_the_same(toy: Toy, tmp_path: Path) -> None:
    """Content, file and parsed configuration train to the same weights; off the main thread too."""
    content = run_of(toy, tmp_path, toy.data)
    file = tmp_path / "run.yaml"
    file.write_text(str(content).replace("'", '"'), encoding="utf-8")  # JSON is YAML
    losses = []
    for number, given in enumerate((content, file, load_config(file))):
        lines: list[dict[str, Any]] = []
        overrides = [f"run.dir={tmp_path / str(number)}", "run.max_steps=2"]

        def work(given: Any = given, overrides: Any = overrides, lines: Any = lines) -> None:
            api.train(given, overrides, on_step=lines.append)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        losses.append([line["loss"] for line in lines])
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 2


def test_answers_in_a_notebook(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an event loop runs already; Ctrl-C ends the work in order."""

    async def cell(**wanted: Any) -> dict[str, Any]:
        return api.regenerate(toy.conversations, tmp_path / "answers", max_new_tokens=4, on_cut="keep", **wanted)

    with asyncio.Runner() as runner:
        first = runner.run(cell(target=toy.target, limit=2))
        whole = runner.run(cell(target=toy.target, limit=4))
    assert first["finished"] and first["num_kept"] == 2
    assert whole["finished"] and whole["num_kept"] == 4
    with pytest.raises(ConfigError, match="who answers"):
        api.regenerate(toy.conversations, tmp_path / "other")

    ended = threading.Event()

    async def endless(self: Any, max_slots: int | None) -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        try:
            await asyncio.sleep(60.0)
        finally:
            ended.set()

    monkeypatch.setattr("paceline.cli.regenerate.Run.ask_model", endless)
    loop = asyncio.new_event_loop()  # as a notebook has it, where Ctrl-C is KeyboardInterrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell(target=toy.target))
    finally:
        loop.close()
    assert ended.is_set()


def test_errors_are_the_package_s_own(toy: Toy, tmp_path: Path) -> None:
    """With what to change, and none of the command line's exits."""
    with pytest.raises(ConfigError, match="did you mean optim.lr"):
        api.train(run_of(toy, tmp_path, toy.data), ["optim.lrr=1"])
    with pytest.raises(CheckpointError, match="a run folder or a step-"):
        api.evaluate(toy.target, tmp_path / "nothing")
    with pytest.raises(ModelError):
        api.check(toy.target, tmp_path / "nothing")
    with pytest.raises(ConfigError, match="temperature"):
        api.evaluate(toy.target, tmp_path / "nothing", draft_sampling="sampled")


def test_a_process_is_looked_at(tmp_path: Path) -> None:
    """By its number, and two looks are compared; from another thread as well, which may hear no signals."""
    process = subprocess.Popen([sys.executable, "-c", "while True: sum(range(1000))"])
    found: list[Any] = []
    try:
        for _ in range(2):
            thread = threading.Thread(target=lambda: found.append(api.attach(process.pid, seconds=1.0)))
            thread.start()
            thread.join()
    finally:
        process.kill()
        process.wait()
    assert len(found) == 2 and found[0].hypotheses
    file = tmp_path / "before.json"
    file.write_text(found[0].model_dump_json(by_alias=True), encoding="utf-8")
    assert api.diff(file, found[1]).text() == api.diff(*found).text()


def test_nothing_heavy_is_imported_for_the_names() -> None:
    """`from paceline import api` is quick: no torch, no transformers."""
    code = "import sys; from paceline import api; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.split() == ["False", "False"]


def test_it_is_typed_and_complete() -> None:
    """Every function has types and says what it does; each verb that makes something has one."""
    functions = {
        name: each for name, each in vars(api).items() if inspect.isfunction(each) and not name.startswith("_")
    }
    verbs = {"prepare", "regenerate", "cache", "train", "evaluate", "export", "check", "plan", "status", "attach"}
    assert set(functions) == verbs | {"rows", "diff"}
    for each in functions.values():
        signature = inspect.signature(each)
        assert signature.return_annotation and all(p.annotation is not p.empty for p in signature.parameters.values())
        assert each.__doc__ and "Raises:" in each.__doc__
    assert (Path(paceline.__file__).parent / "py.typed").is_file()


def test_the_examples_run(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of docs/python.md, in order, with the names that they leave to the reader."""
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"CONVERSATIONS": str(toy.conversations), "TARGET": str(toy.target)}
    for example in examples:
        exec(compile(example, "docs/python.md", "exec"), names)
    assert len(examples) == 4 and names["finished"].step == 4 and len(names["losses"]) == 4
