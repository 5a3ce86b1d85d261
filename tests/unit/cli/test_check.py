"""`paceline check`: a good folder passes, and a folder with one thing changed is caught, by the check that should."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from paceline.cli import check
from paceline.cli.check import CheckReport, run_checks
from paceline.dflash.anchors import eligible_positions, make_anchors
from paceline.dflash.blocks import block_labels, block_positions, make_noise_blocks
from paceline.errors import ConfigError, ModelError
from paceline.eval.decode import CachedTarget, plain_decode
from paceline.eval.parity import LayerParity
from paceline.export.fingerprint import write_fingerprint
from paceline.export.speculators import export_speculators
from paceline.export.zlab import export_zlab
from paceline.kernels.attention import BlockLayout
from paceline.models.draft import DFlashDrafter
from paceline.models.target import Target
from tests.toy import build_toy
from tests.unit.eval import learnt

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(check.check)
app.callback()(lambda: None)

Config = dict[str, Any]
Tensors = dict[str, Tensor]


class Good(NamedTuple):
    """A target, and a drafter for it exported in both layouts, with fingerprints."""

    target: str
    zlab: Path
    speculators: Path


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    place = tmp_path_factory.mktemp("good")
    path = str(build_toy(place).target)
    drafter = learnt.train(learnt.new_drafter(path, sliding_window=6), path)
    target = Target.load(path, layer_ids=learnt.LAYER_IDS)
    zlab = export_zlab(drafter, place / "zlab", torch.float32)
    speculators = export_speculators(drafter, target, path, place / "speculators", torch.float32)
    for folder in (zlab, speculators):
        write_fingerprint(folder, drafter, target)
    return Good(path, zlab, speculators)


def tampered(folder: Path, place: Path, change: Callable[[Config, Tensors], object]) -> Path:
    """A copy of a folder in which `change` has had its way."""
    copy = Path(shutil.copytree(folder, place / "tampered"))
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    tensors = safetensors.torch.load_file(copy / "model.safetensors")
    change(config, tensors)
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    safetensors.torch.save_file({name: t.contiguous() for name, t in tensors.items()}, copy / "model.safetensors")
    return copy


def errors_of(report: CheckReport) -> set[tuple[str, str]]:
    return {(finding.found_by, finding.key) for finding in report.findings if finding.severity == "error"}


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_a_good_export_passes(layout: str, good: Good) -> None:
    """An untouched export has no error, and taps and every layer agree between training and decoding."""
    report = run_checks(getattr(good, layout), good.target)
    assert not errors_of(report)
    assert {row.name for row in report.parity} >= {"tap 1", "tap 3", "layer 0", "layer 1", "norm"}
    assert all(row.is_equal for row in report.parity)
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True


def test_a_target_in_parts_is_checked_as_one_in_one_piece(good: Good) -> None:
    """Taps, fingerprint, blocks and labels: the same findings, and differences of rounding at most."""
    prompts = learnt.prompts()[:2]
    whole, split = (run_checks(good.zlab, good.target, gpus_per_target=n, prompts=prompts) for n in (1, 2))
    assert not errors_of(split) and split.findings == whole.findings and split.not_run == whole.not_run
    assert [row.name for row in split.parity] == [row.name for row in whole.parity]
    assert all(row.is_equal for row in split.parity) and split.measured == whole.measured
    with pytest.raises(ConfigError, match="--gpus-per-target 9: 4 layers of the target run"):
        run_checks(good.zlab, good.target, gpus_per_target=9)
    refused = CliRunner().invoke(
        app, ["check", str(good.zlab), "--target", good.target, "--engine", "vllm", "--gpus-per-target", "2"]
    )
    assert isinstance(refused.exception, ConfigError) and "serves the target on one GPU" in str(refused.exception)


def put(key: str, value: object) -> Callable[[Config, Tensors], object]:
    """Set one key; a dot leads into a section."""

    def change(config: Config, _tensors: Tensors) -> None:
        *sections, last = key.split(".")
        for section in sections:
            config = config[section]
        config[last] = value

    return change


def drop(key: str) -> Callable[[Config, Tensors], object]:
    def change(config: Config, _tensors: Tensors) -> None:
        *sections, last = key.split(".")
        for section in sections:
            config = config[section]
        del config[last]

    return change


def turn(name: str) -> Callable[[Config, Tensors], object]:
    return lambda _config, tensors: tensors.update({name: tensors[name].T})


def both(*changes: Callable[[Config, Tensors], object]) -> Callable[[Config, Tensors], object]:
    return lambda config, tensors: [change(config, tensors) for change in changes]


SLIDING = ["sliding_attention"] * 2
OF_TARGET = ("tap 1", "embedding")
"""What only the target's weights tell; for the rest they are not loaded, which is quicker."""
TAPS = "dflash_config.target_layer_ids"
O_PROJ = "layers.0.self_attn.o_proj.weight"

ZLAB = {
    "taps off by one": (put(TAPS, [0, 2]), "fingerprint", "tap 1"),
    "taps not ascending": (put(TAPS, [3, 1]), "config", TAPS),
    "tap of the last layer": (put(TAPS, [1, 4]), "config", TAPS),
    "unused mask token": (put("dflash_config.mask_token_id", 268), "fingerprint", "embedding"),
    "mask token of texts": (put("dflash_config.mask_token_id", 120), "tokenizer", "dflash_config.mask_token_id"),
    "mask token beyond": (put("dflash_config.mask_token_id", 272), "config", "dflash_config.mask_token_id"),
    "theta": (both(put("rope_theta", 1e6), put("rope_parameters.rope_theta", 1e6)), "fingerprint", "layer 0"),
    "theta in one place": (put("rope_theta", 1e6), "config", "rope_parameters.rope_theta"),
    "missing tensor": (lambda _, tensors: tensors.pop(O_PROJ), "tensors", O_PROJ),
    "extra tensor": (lambda _, tensors: tensors.update(other=torch.zeros(2)), "tensors", "other"),
    "transposed": (turn("fc.weight"), "tensors", "fc.weight"),
    "transposed square": (turn(O_PROJ), "fingerprint", "layer 0"),
    "causal flag": (put("is_causal", True), "fingerprint", "layer 0"),
    "causal flag twice": (put("dflash_config.causal", True), "config", "is_causal"),
    "block_size twice": (put("block_size", 8), "config", "block_size"),
    "block_size": (
        both(put("block_size", 8), put("dflash_config.block_size", 8)), "fingerprint", "settings.block_size",
    ),
    "layer_types": (
        both(put("layer_types", SLIDING), put("use_sliding_window", True)), "fingerprint", "settings.layer_types",
    ),
    "sliding layers switched off": (put("layer_types", SLIDING), "config", "use_sliding_window"),
    "dtype": (put("dtype", "bfloat16"), "tensors", "fc.weight and 24 more"),
    "hidden_act": (put("hidden_act", "gelu"), "config", "hidden_act"),
    "another target": (put("num_target_layers", 6), "config", "num_target_layers"),
    "a norm's epsilon": (put("rms_norm_eps", 1e-5), "fingerprint", "settings.rms_norm_eps"),
}  # fmt: skip

SPECULATORS = {
    "taps counted as z-lab": (put("aux_hidden_state_layer_ids", [1, 3]), "fingerprint", "tap 1"),
    "full layers causal in vLLM": (
        both(drop("transformer_layer_config.is_causal"), put("sliding_window_non_causal", False)),
        "config", "transformer_layer_config.is_causal",
    ),
    "sliding layers, flag flipped": (
        both(
            put("transformer_layer_config.layer_types", SLIDING),
            put("transformer_layer_config.use_sliding_window", True),
            put("sliding_window_non_causal", False),
        ),
        "config", "transformer_layer_config.is_causal",
    ),
    "drafts more than was trained": (
        lambda config, _: config["speculators_config"]["proposal_methods"][0].update(speculative_tokens=5),
        "config", "proposal_methods[0].speculative_tokens",
    ),
    "model_type at the top": (put("model_type", "qwen3"), "config", "model_type"),
    "unused mask token": (put("mask_token_id", 268), "fingerprint", "embedding"),
    "rope type": (put("transformer_layer_config.rope_parameters.rope_type", "longrope"), "config", "rope_type"),
    "missing tensor": (lambda _, tensors: tensors.pop(O_PROJ), "tensors", O_PROJ),
}  # fmt: skip


@pytest.mark.parametrize("name", ZLAB)
def test_one_change_to_a_z_lab_folder_is_caught(name: str, good: Good, tmp_path: Path) -> None:
    """Each tampering is an error of the check that is made for it, and names its key."""
    change, found_by, key = ZLAB[name]
    report = run_checks(tampered(good.zlab, tmp_path, change), good.target, run_target=key in OF_TARGET)
    assert (found_by, key) in errors_of(report)


@pytest.mark.parametrize("name", SPECULATORS)
def test_one_change_to_a_speculators_folder_is_caught(name: str, good: Good, tmp_path: Path) -> None:
    """Each tampering is an error of the check that is made for it, and names its key."""
    change, found_by, key = SPECULATORS[name]
    report = run_checks(tampered(good.speculators, tmp_path, change), good.target, run_target=key in OF_TARGET)
    assert (found_by, key) in errors_of(report)


def test_another_target_of_the_same_shape_is_caught(good: Good, tmp_path: Path) -> None:
    """A target with other weights gives other features than were recorded."""
    other = Path(shutil.copytree(good.target, tmp_path / "target"))
    weights = safetensors.torch.load_file(other / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 1.5
    safetensors.torch.save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert ("fingerprint", "tap 1") in errors_of(run_checks(good.zlab, str(other)))


def test_shifted_labels_are_measured(good: Good, tmp_path: Path) -> None:
    """A drafter that learnt the token after the right one passes every comparison; its answers give it away."""
    drafter = _train_shifted(learnt.new_drafter(good.target), good.target, shift=1)
    folder = export_zlab(drafter, tmp_path / "draft", torch.float32)
    write_fingerprint(folder, drafter, Target.load(good.target, layer_ids=learnt.LAYER_IDS))
    report = run_checks(folder, good.target, prompts=learnt.prompts())
    assert errors_of(report) == {("prompts", "labels +1")}


def _train_shifted(drafter: DFlashDrafter, target_folder: str, shift: int) -> DFlashDrafter:
    """As `learnt.train`, but slot k learns the token at anchor + k + shift."""
    shape, layer_ids = drafter.shape, learnt.LAYER_IDS
    decoder, target = CachedTarget.load(target_folder, layer_ids), Target.load(target_folder, layer_ids=layer_ids)
    documents = []
    for prompt in learnt.prompts():
        ids = torch.tensor([*prompt, *plain_decode(decoder, prompt, learnt.ANSWER, ()).tokens])
        documents.append((ids, torch.arange(len(ids)) >= len(prompt), target.document_features(ids)))
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for step in range(80):
        ids, mask, feature = documents[step % len(documents)]
        document, order = torch.zeros_like(ids), torch.arange(len(ids))
        anchors = make_anchors(eligible_positions(mask, document).nonzero().flatten())
        labels, valid = block_labels(ids, mask, document, anchors, shape.block_size, shift)
        labels, valid = labels[:, shift:], valid[:, shift:]
        hidden = drafter(
            target.embed(make_noise_blocks(ids, anchors, shape.block_size, shape.mask_token_id)),
            block_positions(anchors, order, shape.block_size),
            drafter.context_kv(feature, order),
            BlockLayout.of_row(anchors, (0, len(ids)), shape.block_size, len(ids)),
        )
        loss = torch.nn.functional.cross_entropy(target.head.logits(hidden[valid]), labels[valid])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.requires_grad_(False)


def test_a_folder_without_a_fingerprint_is_measured(good: Good, tmp_path: Path) -> None:
    """Others' folders get a warning, and with prompts the acceptance instead."""
    folder = Path(shutil.copytree(good.zlab, tmp_path / "published"))
    (folder / "fingerprint.json").unlink()
    report = run_checks(folder, good.target, prompts=learnt.prompts())
    warnings = {(finding.found_by, finding.key) for finding in report.findings if finding.severity == "warning"}
    assert ("fingerprint", "fingerprint.json") in warnings
    assert report.measured is not None
    assert report.measured.acceptance_length > 1.2
    assert not errors_of(report)


def test_a_fingerprint_without_the_target_says_what_it_lacks(good: Good, tmp_path: Path) -> None:
    """Recorded without a target, taps cannot be compared: a warning, and the rest is compared."""
    folder = tampered(good.zlab, tmp_path, put("is_causal", True))
    recorded = json.loads((folder / "fingerprint.json").read_text(encoding="utf-8"))
    (folder / "fingerprint.json").write_text(json.dumps(recorded | {"target": None}), encoding="utf-8")
    report = run_checks(folder, good.target)
    assert ("fingerprint", "layer 0") in errors_of(report)
    assert any(finding.seen == "the drafter's part alone" for finding in report.findings)


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 9}', '{"version": 1}'])
def test_a_damaged_fingerprint_is_an_error(content: str, good: Good, tmp_path: Path) -> None:
    """A fingerprint that cannot be read is found, and the checks that need none run."""
    folder = Path(shutil.copytree(good.zlab, tmp_path / "damaged"))
    (folder / "fingerprint.json").write_text(content, encoding="utf-8")
    report = run_checks(folder, good.target)
    assert errors_of(report) == {("fingerprint", "fingerprint.json")}
    assert report.parity


def test_without_the_target_nothing_of_it_is_loaded(good: Good) -> None:
    """`--no-run-target` leaves the drafter's part of the fingerprint, and says what was not run."""
    report = run_checks(good.zlab, good.target, run_target=False)
    assert not report.parity
    assert any("--no-run-target" in line for line in report.not_run)
    with pytest.raises(ConfigError, match="no-run-target"):
        CliRunner().invoke(
            app,
            ["check", str(good.zlab), "--target", good.target, "--no-run-target", "--engine", "vllm"],
            catch_exceptions=False,
        )


def test_the_command_prints_and_exits(good: Good, tmp_path: Path) -> None:
    """Exit code 0 and a parity table for a good folder; 1, the finding and the same as JSON for a bad one."""
    result = CliRunner().invoke(app, ["check", str(good.zlab), "--target", good.target])
    assert result.exit_code == 0, result.output
    assert "layer 1" in result.stdout
    assert "0 errors" in result.stdout
    bad = tampered(good.zlab, tmp_path, put("is_causal", True))
    result = CliRunner().invoke(app, ["check", str(bad), "--target", good.target, "--json", "-"])
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert record["errors"] == 2
    assert {finding["key"] for finding in record["findings"][:2]} == {"settings.is_causal", "layer 0"}
    assert "error   settings.is_causal: true" in result.stderr


def test_an_engine_that_cannot_read_the_layout(good: Good) -> None:
    """SGLang reads the z-lab layout alone."""
    assert ("config", "layout") in errors_of(run_checks(good.speculators, good.target, "sglang", run_target=False))


def test_vllm_is_asked_and_compared(good: Good, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps against ours: a difference is an error that names the place; without vLLM this was not run."""
    asked: dict[str, Any] = {}
    result = SimpleNamespace(
        version="0", tokens_equal=True, steps_equal=False, difference="prompt 0, verification 3: 1 (ours) against 2"
    )

    def served(draft: Path, target: Path, prompts: list[list[int]], **options: Any) -> Any:
        asked.update(draft=draft, prompts=prompts, **options)
        return result

    monkeypatch.setattr("paceline.eval.engine_vllm.check_with_vllm", served)
    report = run_checks(good.zlab, good.target, "vllm", engine_python=Path("/some/python"))
    assert asked["draft"] == good.zlab
    assert asked["python"] == Path("/some/python")
    assert all(0 <= token < 272 for prompt in asked["prompts"] for token in prompt)
    (error,) = [finding for finding in report.findings if finding.severity == "error"]
    assert "verification 3" in error.seen

    def refused(*args: Any, **options: Any) -> None:
        raise ModelError("heads of 8")

    monkeypatch.setattr("paceline.eval.engine_vllm.check_with_vllm", refused)
    report = run_checks(good.zlab, good.target, "vllm", engine_python=Path("/some/python"))
    assert ("engine", "vllm") in errors_of(report)

    def missing(*args: Any) -> None:
        raise ConfigError("no vLLM here")

    monkeypatch.setattr("paceline.eval.engine_vllm.find_vllm", missing)
    assert "served by vLLM: no vLLM here" in run_checks(good.zlab, good.target, "vllm").not_run


def test_speculators_is_asked_and_compared(good: Good, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that the package misses and a layer that differs are errors; without the package this was not run."""
    row = LayerParity("layer 1", "speculators: full", 0.5, 1e-4)
    loading = {"missing_keys": ["fc.weight"], "unexpected_keys": []}
    result = SimpleNamespace(version="0", loading=loading, layers=[row])
    monkeypatch.setattr("paceline.eval.engine_speculators.has_speculators", lambda python: True)
    monkeypatch.setattr("paceline.eval.engine_speculators.check_with_speculators", lambda *args, **options: result)
    report = run_checks(good.speculators, good.target, "speculators")
    assert errors_of(report) == {("engine", "fc.weight"), ("engine", "layer 1")}
    assert row in report.parity
    monkeypatch.setattr("paceline.eval.engine_speculators.has_speculators", lambda python: False)
    report = run_checks(good.speculators, good.target, "speculators")
    assert any("not installed" in line for line in report.not_run)
    with pytest.raises(ConfigError, match="no package"):
        run_checks(good.speculators, good.target, "speculators", engine_python=Path("/some/python"))


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "neither of"), ('{"dflash_config": {}, "speculators_config": {}}', "both of"), ("{", "cannot be read")],
)
def test_what_is_no_drafter_is_said_so(content: str, message: str, good: Good, tmp_path: Path) -> None:
    """A folder without a layout ends the command with a message."""
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        run_checks(tmp_path, good.target)
