"""The demo's journey on the toy target: the same phases, files and figures as on the real one, in seconds."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import calibration as calibration_module
from paceline.cli import demo as module
from paceline.cli.progress import TrainProgress
from paceline.errors import ConfigError
from paceline.eval import answers as answers_module
from paceline.eval import calibrate
from paceline.models import assets
from paceline.plan import budget
from tests.toy import Toy

Demo = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def stopping(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy target with so many end tokens that its answers end."""
    target = tmp_path_factory.mktemp("stopping") / "target"
    shutil.copytree(toy.target, target)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((target / name).read_text())
        content["eos_token_id"] = [257, 94, 99]  # what its random weights like to say
        (target / name).write_text(json.dumps(content))
    return target


@pytest.fixture(autouse=True, scope="module")
def _small(stopping: Path) -> Iterator[None]:
    """The toy target in place of the real one, and less of everything."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_small(stopping, monkeypatch)
        yield


def make_small(stopping: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "demo_target", lambda: stopping)
    monkeypatch.setattr(budget, "MIN_CONVERSATIONS", 12)
    monkeypatch.setattr(budget, "EPOCHS", 2)
    monkeypatch.setattr(module, "NUM_CALIBRATED", 4)
    monkeypatch.setattr(module, "MAX_HELDOUT", 6)
    monkeypatch.setattr(module, "MAX_UNSEEN", 5)
    monkeypatch.setattr(module, "MAX_NEW_TOKENS", 24)
    monkeypatch.setattr(module, "OWN_MAX_NEW_TOKENS", 24)
    monkeypatch.setattr(calibrate, "NUM_CONTEXT", 16)


@pytest.fixture
def demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Demo:
    """Runs the demo in a folder of the test; its record, which is also what it prints."""

    def run(**options: Any) -> dict[str, Any]:
        capsys.readouterr()
        module.demo(tmp_path / "demo", **({"minutes": 0.05, "as_json": True} | options))
        record = json.loads((tmp_path / "demo" / "demo.json").read_text())
        assert json.loads(capsys.readouterr().out) == record
        return record

    return run


@pytest.fixture(scope="module")
def finished(_small: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a demo that went through."""
    out = tmp_path_factory.mktemp("finished") / "demo"
    module.demo(out, minutes=0.05, as_json=True)
    return out


def test_the_demo_leaves_what_it_promises(finished: Path) -> None:
    """demo.json has every figure, outputs are identical, and run, report, export and data are there."""
    record, out = json.loads((finished / "demo.json").read_text()), finished
    figures = {
        "acceptance_length",
        "baseline_tok_per_s",
        "ngram_tok_per_s",
        "ngram_acceptance_length",
        "speculative_tok_per_s",
        "speedup",
        "speedup_over_ngram",
        "lossless",
        "not_ended",
        "loops",
        "limits",
    }
    settings = {"target", "train_tokens", "calibration", "seconds", "peak_memory_gib", "machine", "minutes"}
    assert figures | settings <= record.keys() and figures <= record["unseen"].keys()
    for result in (record, record["unseen"]):
        assert result["lossless"] is True and result["acceptance_length"] >= 1.0
        assert result["prompts"] == result["ended_by_stop"] >= 1
    plan = json.loads((out / "plan.json").read_text())["plan"]
    assert record["prompts"] + record["not_ended"] == plan["heldout"] >= 4
    assert record["unseen"]["prompts"] + record["unseen"]["not_ended"] == plan["unseen"] >= 4
    assert record["seconds"].keys() == {"fetch", "calibrate", "prepare", "train", "evaluate", "export", "total"}
    dataset = json.loads((out / "data" / "prepare.json").read_text())["dataset"]
    assert record["train_conversations"] == dataset["num_rows"] >= 12
    assert 0 < record["train_tokens"] <= record["epochs"] * dataset["num_tokens"]
    assert (out / "export" / "model.safetensors").is_file()
    assert (out / "run" / "checkpoints" / "best").exists()
    page = (out / "report.html").read_text()
    assert "n-gram" in page and f"{record['speedup']:.2f}" in page


def test_what_was_calibrated_is_what_was_used(finished: Path) -> None:
    """The run has the threads and the type that were measured, and the block is the one that was expected to pay."""
    record = json.loads((finished / "demo.json").read_text())
    chosen = record["calibration"]
    config = (finished / "run" / "config.yaml").read_text()
    assert f"threads: {chosen['threads']}" in config and f"dtype: {chosen['dtype']}" in config
    assert list(chosen["verify_ms"]) == [str(k) for k in range(1, 17)]
    expected = chosen["expected_speedup_by_block"]
    assert list(expected) == [str(k) for k in range(2, chosen["trained_block_size"] + 1)]
    assert f"block_size: {chosen['trained_block_size']}" in config
    assert expected[str(chosen["block_size"])] == max(expected.values())
    assert record["block_size"] == chosen["block_size"] and record["layout"] == "colocated"


def test_an_interrupted_demo_goes_on(demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while training ends with 130 and no result; the same command trains the rest with the same plan."""

    def interrupt(self: TrainProgress, line: dict, total_steps: int) -> None:
        if line["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TrainProgress, "step", interrupt)
        with pytest.raises(SystemExit) as ending:
            demo()
    assert ending.value.code == 130 and not (tmp_path / "demo" / "demo.json").exists()
    plan = (tmp_path / "demo" / "plan.json").read_text()
    monkeypatch.setattr(calibration_module, "calibrate", None)  # it is not measured again
    record = demo()
    lines = [json.loads(line) for line in (tmp_path / "demo" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, record["train_steps"] + 1))
    assert record["train_tokens"] == sum(line["tokens"] for line in lines)
    assert (tmp_path / "demo" / "plan.json").read_text() == plan


def test_an_interruption_at_any_other_moment_costs_nothing(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a phase that has no step to finish, three times: the same command starts there again."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    for phase in ("_calibrate", "_prepare", "_export"):
        with monkeypatch.context() as patch:
            patch.setattr(module, phase, interrupt)
            with pytest.raises(SystemExit) as ending:
                demo()
        assert ending.value.code == 130
    assert demo()["lossless"] is True


def test_another_demo_in_the_same_folder_is_refused(demo: Demo, finished: Path, tmp_path: Path) -> None:
    """Other settings would mix two demos; a second process would disturb the first."""
    shutil.copytree(finished, tmp_path / "demo", symlinks=True)
    with pytest.raises(ConfigError, match=r"other settings \(minutes: 0.05, now 0.1\): choose another --out"):
        demo(minutes=0.1)
    with module.locked(tmp_path / "demo" / "demo.lock", ConfigError):
        with pytest.raises(ConfigError, match=f"runs as process {os.getpid()}: wait, or choose another --out"):
            demo()


def test_a_damaged_plan_is_named(demo: Demo, finished: Path, tmp_path: Path) -> None:
    """A plan that cannot be read is no reason to train another way in the same folder."""
    shutil.copytree(finished, tmp_path / "demo", symlinks=True)
    (tmp_path / "demo" / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"plan\.json cannot be read"):
        demo()


def own_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"count {i} from {i % 7}"}) + "\n" for i in range(count)))
    return path


def test_own_target_and_prompts(demo: Demo, stopping: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target answers first, a fifth of the prompts is held out, and there is no unseen set."""

    def answer(model: Any, batch: list[list[int]], limit: int, stop_ids: set[int]) -> list[list[int]]:
        """What a target that has learnt something says; random weights make no text that tokenises back."""
        return [[*b"5 6 7", 257] if len(prompt) % 5 else [*b"5 6"] for prompt in batch]

    monkeypatch.setattr(answers_module, "greedy_answers", answer)
    prompts = own_prompts(tmp_path / "prompts.jsonl", 60)
    record = demo(target=str(stopping), prompts=[prompts], minutes=0.2)
    assert record["target"] == str(stopping) and record["unseen"] is None and record["lossless"] is True
    assert 4 <= record["prompts"] + record["not_ended"] <= 6 and "answer" in record["seconds"]
    answers = [json.loads(line) for line in (tmp_path / "demo" / "answers.jsonl").read_text().splitlines()]
    kept = [line["messages"] for line in answers if "messages" in line]
    assert 20 <= len(kept) <= 48 and kept[0][0]["content"] == "count 0 from 0" and kept[0][1]["role"] == "assistant"
    heldout = {f"count {i} from {i % 7}" for i in range(54, 60)}
    assert not heldout & {messages[0]["content"] for messages in kept}


def test_own_prompts_have_to_be_enough(demo: Demo, tmp_path: Path) -> None:
    """Too few prompts, and answers that do not end, are refused with what to change."""
    with pytest.raises(ConfigError, match=r"--prompts: 12 prompts; 40 or more were wanted"):
        demo(prompts=[own_prompts(tmp_path / "few.jsonl", 12)])


def test_answers_that_do_not_end_are_refused(
    demo: Demo, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that never ends its answers has nothing to train on that would be served."""
    with pytest.raises(ConfigError, match=r"0 of the answers in .*answers\.jsonl end within 24 tokens"):
        demo(target=str(toy.target), prompts=[own_prompts(tmp_path / "p.jsonl", 50)], minutes=0.2)
