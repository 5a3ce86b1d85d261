"""A target with an adapter, from training to the folder that is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline import api
from paceline.cli.evaluate import evaluate_drafter
from paceline.cli.main import app
from paceline.cli.train import build_evaluations, resolve_config
from paceline.control.run_folder import RunFolder
from paceline.errors import CheckpointError, ConfigError
from paceline.eval.answers import greedy_answers
from paceline.eval.evaluate import encode_prompts
from paceline.models.loading import load_text_model, load_tokenizer, read_shape
from tests.toy import Toy, train
from tests.unit.models.test_adapter import adapter_of

PROMPTS = [f"count {3 + i} from {i}" for i in range(4)]


@pytest.fixture(scope="module")
def adapters(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two adapters of the toy target."""
    root = tmp_path_factory.mktemp("adapters")
    one, other = (adapter_of(str(toy.target), root / name, seed)[0] for seed, name in enumerate(("style", "other")))
    return one, other


@pytest.fixture(scope="module")
def trained(toy: Toy, adapters: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Two steps for the target with the first adapter; never changed."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    _, lines = train(toy.config(run_dir, "run.max_steps=2", f"target.adapter={adapters[0]}"))
    return run_dir, lines


def prompts_in(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


def test_a_run_learns_from_the_merged_target(
    toy: Toy, adapters: tuple[str, str], trained: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    """Losses are those of a run on the merged folder, and not those of the base; the run's record names the adapter."""
    run_dir, lines = trained
    merged = tmp_path / "merged"
    arguments = ["merge", "--target", str(toy.target), "--adapter", adapters[0], "--out", str(merged)]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0 and f"serve it: vllm serve {merged}" in told.stdout
    _, on_merged = train(toy.config(tmp_path / "run", "run.max_steps=2", f"target.path={merged}"))
    _, on_base = train(toy.config(tmp_path / "base", "run.max_steps=2"))
    losses = [[line["loss"] for line in each] for each in (lines, on_merged, on_base)]
    assert losses[0] == losses[1] and losses[0][1] != losses[2][1]
    assert json.loads((run_dir / "run.json").read_text())["adapter"] == adapters[0]


def answers_in(folder: Path) -> dict[str, list]:
    lines = map(json.loads, (folder / "answers.jsonl").read_text().splitlines())
    return {line["source"]: line["rows"] for line in lines}


def test_answers_are_those_of_the_merged_target(toy: Toy, adapters: tuple[str, str], tmp_path: Path) -> None:
    """The ids that the merged folder's model says, and not the base's; the folder is gone on with by this adapter
    alone, wherever it lies."""
    merged, out = tmp_path / "merged", tmp_path / "answers"
    arguments = ["merge", "--target", str(toy.target), "--adapter", adapters[0], "--out", str(merged)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    settings = {"max_new_tokens": 6, "on_cut": "keep"}

    def answer(folder: Path, limit: int | None = None, target: Path = toy.target, adapter: str | None = None) -> dict:
        return api.regenerate(toy.conversations, folder, target=target, adapter=adapter, limit=limit, **settings)

    answer(out, 4, adapter=adapters[0])
    described = json.loads((out / "regenerate.json").read_text())
    assert described["adapter"] == adapters[0] and len(described["adapter_fingerprint"]) == 64
    moved = shutil.copytree(adapters[0], tmp_path / "moved")
    assert answer(out, 8, adapter=str(moved))["finished"]
    answer(tmp_path / "whole", 8, target=merged)
    answer(tmp_path / "base", 8)
    found, wanted, base = (answers_in(each) for each in (out, tmp_path / "whole", tmp_path / "base"))
    assert found == wanted and found != base and len(found) > 4
    shutil.copytree(adapters[1], moved, dirs_exist_ok=True)
    for other in (str(moved), None):
        with pytest.raises(ConfigError, match=r"begun with other settings \(adapter_fingerprint was"):
            answer(out, adapter=other)
    with pytest.raises(ConfigError, match="adapter_fingerprint was None"):
        answer(tmp_path / "base", adapter=adapters[0])


def test_a_run_goes_on_with_its_own_adapter_only(
    toy: Toy, adapters: tuple[str, str], trained: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    """Another folder is refused by its key, other contents of the same folder by the target's fingerprint."""
    run_dir = shutil.copytree(trained[0], tmp_path / "run", symlinks=True)
    mine = shutil.copytree(adapters[0], tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"target\.adapter: the run was started with .*style.* now .*other"):
        api.train(toy.config(run_dir, "run.max_steps=2", f"target.adapter={adapters[1]}"))
    moved = toy.config(run_dir, "run.max_steps=2", f"target.adapter={mine}")
    assert api.train(moved, allow_change=["target.adapter"]).step == 2
    shutil.copytree(adapters[1], mine, dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match=r"other contents of target\.path or target\.adapter: target_fingerprint"):
        api.train(moved)


def test_decoding_with_the_adapter_is_lossless(
    toy: Toy, adapters: tuple[str, str], trained: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    """Answers are the merged target's own, one at a time and several; the record names the adapter."""
    prompts, answers = [[{"role": "user", "content": prompt}] for prompt in PROMPTS], list[list[int]]()
    found = evaluate_drafter(
        str(toy.target),
        trained[0],
        prompts,
        max_new_tokens=12,
        ngram=False,
        batch=2,
        adapter=adapters[0],
        on_prompt=lambda result, so_far: answers.append(list(result.plain.tokens)),
    )
    assert found["lossless"] and found["mismatches"] == 0 and found["adapter"] == adapters[0]
    assert [row["mismatches"] for row in found["concurrency"]] == [0, 0]
    ids = encode_prompts(prompts, load_tokenizer(str(toy.target)))
    stop_ids = read_shape(str(toy.target)).eos_token_ids
    merged, base = (
        greedy_answers(load_text_model(str(toy.target), adapter=adapter), ids, 12, stop_ids)
        for adapter in (adapters[0], None)
    )
    assert answers == merged != base
    same = api.evaluate(
        toy.target, trained[0], prompts_in(tmp_path), max_new_tokens=4, ngram=False, adapter=adapters[0]
    )
    assert same["adapter"] == adapters[0]
    arguments = [
        "eval",
        f"--target={toy.target}",
        "--engine=vllm",
        "--url=http://127.0.0.1:1",
        f"--adapter={adapters[0]}",
    ]
    refused = CliRunner().invoke(app, arguments)
    assert isinstance(refused.exception, ConfigError) and "--adapter: that was decided" in str(refused.exception)


def test_an_export_is_of_the_merged_target(
    toy: Toy, adapters: tuple[str, str], trained: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    """The card names the adapter, and the fingerprint is of the merged target: `check` agrees with it, not without."""
    told = CliRunner().invoke(app, ["export", str(trained[0]), f"--target={toy.target}", f"--out={tmp_path / 'out'}"])
    assert f"--adapter {adapters[0]} --out MERGED" in told.stdout and "vllm serve MERGED" in told.stdout
    folder = tmp_path / "out"
    card = (folder / "README.md").read_text()
    assert 'drafter for target with the adapter "style"' in card and "| target adapter | style |" in card
    assert str(Path(adapters[0]).parent) not in card
    assert api.check(folder, toy.target, adapter=adapters[0]).num_errors == 0
    findings = api.check(folder, toy.target).findings
    assert any(each.severity == "error" and each.found_by == "fingerprint" for each in findings)
    with pytest.raises(ConfigError, match="engines would serve the base"):
        api.export(trained[0], tmp_path / "other", layout="speculators", target=toy.target)
    arguments = ["check", str(folder), f"--target={toy.target}", f"--adapter={adapters[0]}", "--engine=vllm"]
    refused = CliRunner().invoke(app, arguments)
    assert isinstance(refused.exception, ConfigError) and "`paceline merge`" in str(refused.exception)


def test_evaluations_beside_training_get_the_adapter(
    toy: Toy, adapters: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child is told what the run is told."""
    made: dict[str, object] = {}
    monkeypatch.setattr("paceline.train.evaluations.Evaluations", lambda run, **options: made.update(options))
    config = toy.config(tmp_path, f"target.adapter={adapters[0]}", "eval.every_steps=5", "eval.device=cpu")
    resolved, _ = resolve_config(config)
    build_evaluations(RunFolder(tmp_path), resolved)
    assert f"--adapter={adapters[0]}" in made["command"](Path("place"), Path("out"))  # type: ignore[operator]
