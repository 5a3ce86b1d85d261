"""`paceline eval` and `paceline export` from the outside."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from paceline.cli import evaluate
from paceline.cli.train import merge_with_saved
from paceline.config import Optim
from paceline.control.run_folder import RunFolder
from paceline.errors import ConfigError, ModelError
from paceline.export.fingerprint import read_fingerprint
from paceline.export.zlab import export_zlab, load_zlab
from paceline.train.checkpoint import TrainState, find, load_drafter, load_state, save
from paceline.train.metrics import read_metrics
from paceline.train.optim import MasterAdamW
from tests import tiny
from tests.toy import Toy, train

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


def test_a_target_in_parts_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers and acceptance as in one piece, and the record says how it ran; what cannot be is refused."""
    monkeypatch.setattr("paceline.models.loading.load_tokenizer", lambda *args, **kwargs: Tokenizer())
    target = tiny.save(tiny.causal_lm("gemma3"), tmp_path / "target")
    draft = export_zlab(tiny.drafter(), tmp_path / "draft")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"question": "de"}\n', encoding="utf-8")
    options = ["eval", "--target", target, "--draft", str(draft), "--prompts", str(prompts), "--device", "cpu"]
    options += ["--max-new-tokens", "12", "--no-ngram", "--json", "-"]

    def record(*more: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(CliRunner().invoke(app, [*options, *more], catch_exceptions=False).stdout)
        return found

    whole, split = record(), record("--gpus-per-target", "2")
    assert split["lossless"] is True and split["acceptance_length"] == whole["acceptance_length"]
    assert (whole["gpus_per_target"], split["gpus_per_target"]) == (1, 2) and "in 2 parts" in split["kernel"]
    for more, said in (
        (("--gpus-per-target", "6"), "--gpus-per-target 6: 5 layers of the target run"),
        (("--gpus-per-target", "2", "--batch", "2"), "--batch 2 with --gpus-per-target 2"),
        (("--gpus-per-target", "2", "--engine", "vllm", "--url", "http://x"), "vllm with --device, --gpus-per-target"),
    ):
        with pytest.raises(ConfigError, match=said):
            record(*more)


def test_parts_need_as_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the option, and the devices that were wanted."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    evaluate.check_parts(torch.device("cuda", 0), 2, 5)
    with pytest.raises(ConfigError, match="--gpus-per-target 2: the target would take cuda:1 to cuda:2, and 2 GPUs"):
        evaluate.check_parts(torch.device("cuda", 1), 2, 5)


def test_export_takes_a_run_folder(tmp_path: Path) -> None:
    """A run's newest checkpoint becomes a folder, and the commands to serve it are printed with the right counts."""
    drafter = tiny.drafter()
    optimizer = MasterAdamW(drafter, Optim(), torch.float32, sums_gradients=False)
    run = tmp_path / "run"
    run.mkdir()
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
    run.mkdir()
    save(run / "checkpoints", TrainState(1, 1, 0, 1, 32, None, None, "t", "d"), drafter, optimizer, keep_last=1)
    export = ["export", str(run), "--out", str(out), "--format", "speculators"]
    with pytest.raises(ConfigError, match="--format speculators needs --target"):
        CliRunner().invoke(app, export, catch_exceptions=False)
    result = CliRunner().invoke(app, [*export, "--target", target, "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["next"][2].startswith(f"vLLM: vllm serve {target} --speculative-config")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n', encoding="utf-8")
    options = ["--target", target, "--draft", str(out), "--prompts", str(prompts), "--device", "cpu", "--json", "-"]
    result = CliRunner().invoke(app, ["eval", *options, "--max-new-tokens", "6"], catch_exceptions=False)
    assert json.loads(result.stdout)["lossless"] is True
    again = ["export", str(out), "--out", str(tmp_path / "again"), "--format", "speculators", "--target", target]
    CliRunner().invoke(app, again, catch_exceptions=False)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()


@pytest.fixture(scope="module")
def toy_run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, measured at its sixth step."""
    run = tmp_path_factory.mktemp("toy_run") / "run"
    train(toy.config(run, "run.max_steps=6"))
    return run


def exported(*arguments: object) -> tuple[dict[str, Any], str]:
    """What `export --json` prints, and what it tells beside it."""
    result = CliRunner().invoke(app, ["export", *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def test_the_card_of_a_run_has_its_facts(toy: Toy, toy_run: Path, tmp_path: Path) -> None:
    """Fingerprints, counts, recipe, step and measured acceptance are the run's own; no path of the machine is in it."""
    out = tmp_path / "out"
    exported(toy_run, "--out", out, "--license", "apache-2.0")
    card = (out / "README.md").read_text(encoding="utf-8")
    state, data = load_state(find(toy_run)), json.loads((toy_run / "run.json").read_text())["data"]["dataset"]
    measured = [line for line in read_metrics(toy_run / "metrics.jsonl") if line["step"] == 6]
    for text in (
        state.target_fingerprint, state.data_fingerprint, f"{data['num_tokens']:,}", "6 of 6", "license: apache-2.0",
        f"**{measured[0]['validation_acceptance_length']:.3f}**", "num_layers: 2", "lr: 0.003", "block_size: 4",
    ):  # fmt: skip
        assert text in card, text
    for path in (toy.target, toy.data, toy_run, out):
        assert str(path) not in card
    again, _ = exported(out, "--out", tmp_path / "again")
    assert "no configuration" in (tmp_path / "again" / "README.md").read_text(encoding="utf-8")
    for name in ("config.json", "model.safetensors", "fingerprint.json"):  # case X01
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()
    assert again["next"][0] == f"next: paceline check {tmp_path / 'again'} --target TARGET"


def test_an_older_checkpoint_has_its_own_acceptance_or_none(toy: Toy, toy_run: Path, tmp_path: Path) -> None:
    """The number of another step is never told; a checkpoint out of its run has less to tell."""
    place = toy_run / "checkpoints" / "step-00000005"
    exported(place, "--out", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "No acceptance length of this checkpoint" in card and "5 of 6" in card and "lr: 0.003" in card
    shutil.copytree(place, tmp_path / "alone")
    exported(tmp_path / "alone", "--out", tmp_path / "bare")
    card = (tmp_path / "bare" / "README.md").read_text(encoding="utf-8")
    assert "5 of 6" in card and "no configuration" in card and "| target | unknown |" in card


def test_a_run_knows_its_target(toy: Toy, toy_run: Path, tmp_path: Path) -> None:
    """Without --target the run's own is named; with it, it is run as well, and the fingerprint has what it gives."""
    result, _ = exported(toy_run, "--out", tmp_path / "out", "--format", "speculators")
    assert result["next"][0] == f"next: paceline check {tmp_path / 'out'} --target {toy.target}"
    assert read_fingerprint(tmp_path / "out").target is None
    target = ["--target", toy.target]
    exported(toy_run, "--out", tmp_path / "out", "--format", "speculators", *target, "--no-run-target")
    assert read_fingerprint(tmp_path / "out").target is None
    for layout in ("speculators", "zlab"):
        exported(toy_run, "--out", tmp_path / "out", "--format", layout, *target)
        assert read_fingerprint(tmp_path / "out").target is not None


def test_a_target_that_moved_away_is_told(toy_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A zlab export goes on without the run's target and says what it lacks; one that was named has to be there."""
    run = tmp_path / "run"
    shutil.copytree(toy_run, run, symlinks=True)
    text = (run / "config.yaml").read_text(encoding="utf-8")
    gone = re.sub(r"(target:\n  path: ).*", rf"\g<1>{tmp_path}/gone", text)
    (run / "config.yaml").write_text(gone, encoding="utf-8")
    exported(run, "--out", tmp_path / "out")
    assert "factors of its embedding and logits" in caplog.text and (tmp_path / "out" / "config.json").exists()
    for arguments in (["--target", f"{tmp_path}/gone"], ["--format", "speculators"]):
        with pytest.raises(ModelError, match="gone"):
            CliRunner().invoke(
                app, ["export", str(run), "--out", str(tmp_path / "x"), *arguments], catch_exceptions=False
            )
    assert not (tmp_path / "x").exists()


def test_the_mask_token_is_one_number_everywhere(toy: Toy, toy_run: Path, tmp_path: Path) -> None:
    """Configuration, checkpoint and both layouts have the same id, and what was trained may not drift (case T06)."""
    saved = RunFolder(toy_run).read_config()
    exported(toy_run, "--out", tmp_path / "z")
    exported(toy_run, "--out", tmp_path / "s", "--format", "speculators")
    ids = {
        saved.draft.mask_token_id,
        load_drafter(toy_run).shape.mask_token_id,
        json.loads((tmp_path / "z" / "config.json").read_text())["dflash_config"]["mask_token_id"],
        json.loads((tmp_path / "s" / "config.json").read_text())["mask_token_id"],
    }
    assert ids == {267}
    for override, told in {
        "draft.mask_token_id=268": "draft.mask_token_id: the run was started with 267, now 268",
        "target.layer_ids=[1, 3]": "target.layer_ids: the run was started with [1, 2], now [1, 3]",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(told)):
            merge_with_saved(saved, toy.config(toy_run, "run.max_steps=6", override))


def test_code_comes_with_zlab_alone(toy: Toy, toy_run: Path, tmp_path: Path) -> None:
    """--auto-map adds the file and its mention in the card; the other layout's readers bring their own."""
    exported(toy_run, "--out", tmp_path / "out", "--auto-map")
    assert (tmp_path / "out" / "dflash.py").is_file()
    assert "trust_remote_code=True" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    wanted = ["export", str(toy_run), "--out", str(tmp_path / "s"), "--format", "speculators", "--auto-map"]
    with pytest.raises(ConfigError, match="--auto-map with --format speculators"):
        CliRunner().invoke(app, wanted, catch_exceptions=False)
