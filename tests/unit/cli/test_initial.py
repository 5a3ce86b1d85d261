"""`draft.init`: a run that starts from a drafter, in whatever folder it comes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from paceline.cli.evaluate import export_drafter, load_any_drafter
from paceline.cli.initial import initial_of, load_initial
from paceline.cli.train import build_trainer, merge_with_saved, resolve_config
from paceline.config import RunConfig, load_config
from paceline.control.run_folder import RunFolder
from paceline.errors import ConfigError, ModelError, PipelineError
from paceline.train.checkpoint import load_drafter, load_state, newest
from paceline.train.target import load_target
from tests import tiny
from tests.toy import Toy, train

SHAPE_KEYS = (
    "num_layers", "block_size", "mask_token_id", "layer_types", "is_causal", "sliding_window", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "vocab",
)  # fmt: skip
LEARNT = (
    "draft.layer_types=sliding", "draft.sliding_window=20", "draft.block_size=3", "draft.num_attention_heads=2",
    "draft.num_key_value_heads=1", "draft.head_dim=12", "draft.intermediate_size=40", "target.layer_ids=[0, 3]",
)  # fmt: skip

SHORT = ("run.max_steps=10", "checkpoint.every_steps=100", "eval.validate_every=100")


@pytest.fixture(scope="module")
def trained(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose drafter has nothing that is the default's, over a part of the vocabulary."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train(toy.config(run, *LEARNT, "draft.vocab=200", "draft.is_causal=true", *SHORT))
    return run


@pytest.fixture(scope="module")
def folders(toy: Toy, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trained drafters as each kind of folder."""
    place = tmp_path_factory.mktemp("folders")
    speculators, _ = export_drafter(load_drafter(trained), place / "s", "speculators", "float32", str(toy.target))
    train(toy.config(place / "full", *LEARNT, *SHORT))
    zlab, _ = export_drafter(load_drafter(place / "full"), place / "z", "zlab", "float32", None)
    return {"run": trained, "checkpoint": trained / "checkpoints" / "latest", "speculators": speculators, "zlab": zlab}


def config_of(toy: Toy, run: Path, init: Path, *overrides: str) -> RunConfig:
    """A run file that leaves the drafter's shape to `draft.init`."""
    tree = toy.config(run, "run.max_steps=4", "checkpoint.every_steps=2", "eval.validate_every=100")
    sections = {name: keys for name, keys in tree.model_dump(exclude_unset=True).items() if name != "draft"}
    plain = [f"{name}.{key}={value}" for name, keys in sections.items() for key, value in keys.items()]
    return load_config(None, [*plain, f"draft.init={init}", *overrides])


def loss_of(toy: Toy, run: Path, source: Path) -> float:
    """Loss of the first two micro-batches with the weights of a folder put into a fresh trainer by hand."""
    weights = load_any_drafter(source)
    vocab = [] if weights.shape.draft_vocab_size is None else ["draft.vocab=200", "draft.is_causal=true"]
    resolved, _ = resolve_config(toy.config(run, *LEARNT, *vocab, "run.max_steps=4"))
    target = load_target(resolved.config)
    trainer = build_trainer(resolved, target)
    trainer.drafter.load_state_dict(weights.state_dict())
    for number in range(2):
        trainer.accumulate(target.features(resolved.batches.batch(number)))
    return trainer.update(0).read().loss


@pytest.mark.parametrize("kind", ["run", "checkpoint", "speculators", "zlab"])
def test_training_starts_where_the_drafter_stands(
    kind: str, toy: Toy, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The first step's loss is the trained drafter's on that batch, and the shape is the folder's in every key."""
    config = config_of(toy, tmp_path / "run", folders[kind])
    _, lines = train(config)
    assert lines[0]["loss"] == loss_of(toy, tmp_path / "other", folders[kind])
    _, fresh = train(toy.config(tmp_path / "fresh", *LEARNT, "run.max_steps=1"))
    assert lines[0]["loss"] < 0.95 * fresh[0]["loss"]
    saved = RunFolder(tmp_path / "run").read_config()
    assert (saved.draft.block_size, saved.draft.head_dim, saved.draft.num_layers) == (3, 12, 2)
    assert (saved.draft.vocab, saved.draft.is_causal) == (("full", False) if kind == "zlab" else (200, True))
    assert saved.target.layer_ids == (0, 3)
    assert not [key for key in SHAPE_KEYS if getattr(saved.draft, key) == "auto"]
    assert load_drafter(tmp_path / "run").shape == load_any_drafter(folders[kind]).shape


@pytest.mark.parametrize("kind", ["speculators", "zlab"])
def test_a_resumed_run_needs_no_folder(kind: str, toy: Toy, folders: dict[str, Path], tmp_path: Path) -> None:
    """Interrupted and resumed without the folder, the run ends at the same bits as one that was never interrupted."""
    folder = tmp_path / "base"
    shutil.copytree(folders[kind], folder)
    straight, run = config_of(toy, tmp_path / "straight", folder), config_of(toy, tmp_path / "run", folder)
    train(straight)

    def cut(step: int) -> None:
        if step == 3:
            raise RuntimeError("cut")

    with pytest.raises(PipelineError, match="cut"):
        train(run, cut)
    shutil.rmtree(folder)
    assert load_state(newest(tmp_path / "run" / "checkpoints")).step == 3
    again = merge_with_saved(RunFolder(tmp_path / "run").read_config(), run)
    report, lines = train(again)
    assert (report.step, [line["step"] for line in lines]) == (4, [4])
    one, other = (load_drafter(tmp_path / name).state_dict() for name in ("straight", "run"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_has_saved_nothing_reads_the_folder_again(
    toy: Toy, folders: dict[str, Path], tmp_path: Path
) -> None:
    """A configuration without a checkpoint is no reason to start from random weights."""
    config = config_of(toy, tmp_path / "run", folders["zlab"])
    resolved, _ = resolve_config(config)
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").write_config(resolved.config)
    again = merge_with_saved(RunFolder(tmp_path / "run").read_config(), config)
    weights = load_initial(again)
    assert weights is not None and resolve_config(again)[0].config == resolved.config


@pytest.mark.parametrize(
    ("override", "wanted", "found"),
    [
        ("draft.num_layers=3", "draft.num_layers=3", "2"),
        ("draft.block_size=16", "draft.block_size=16", "3"),
        ("draft.mask_token_id=270", "draft.mask_token_id=270", "267"),
        ("draft.layer_types=full", "draft.layer_types=['full_attention', 'full_attention']", "['sliding_attention'"),
        ("draft.is_causal=false", "draft.is_causal=False", "True"),
        ("draft.sliding_window=21", "draft.sliding_window=21", "20"),
        ("draft.num_attention_heads=4", "draft.num_attention_heads=4", "2"),
        ("draft.num_key_value_heads=2", "draft.num_key_value_heads=2", "1"),
        ("draft.head_dim=8", "draft.head_dim=8", "12"),
        ("draft.intermediate_size=64", "draft.intermediate_size=64", "40"),
        ("draft.vocab=full", "draft.vocab=full", "200"),
        ("draft.vocab=observed", "draft.vocab=observed", "200"),
        ("target.layer_ids=[1, 3]", "target.layer_ids=[1, 3]", "[0, 3]"),
    ],
)
def test_contradictions_are_refused(
    override: str, wanted: str, found: str, toy: Toy, folders: dict[str, Path], tmp_path: Path
) -> None:
    """A key that is set to something else than the folder has is an error that names it, both values and the folder."""
    with pytest.raises(ConfigError) as error:
        resolve_config(config_of(toy, tmp_path / "run", folders["speculators"], override))
    assert f"{wanted}, the drafter has {found}" in str(error.value)
    assert f"draft.init={folders['speculators']}" in str(error.value)
    assert str(error.value).count("\n") == 1


def test_keys_that_agree_may_be_written(toy: Toy, folders: dict[str, Path], tmp_path: Path) -> None:
    """Setting what the folder has, or auto, is no contradiction."""
    same = [*LEARNT, "draft.num_layers=2", "draft.vocab=200", "draft.is_causal=true", "draft.mask_token_id=auto"]
    resolved, _ = resolve_config(config_of(toy, tmp_path / "run", folders["speculators"], *same))
    assert resolved.draft == load_drafter(folders["run"]).shape
    assert torch.equal(resolved.draft_token_ids, load_drafter(folders["run"]).draft_token_ids())


def test_a_drafter_for_another_target_is_refused(toy: Toy, tmp_path: Path) -> None:
    """What does not fit the target is named with both numbers."""
    drafter = tiny.drafter(tiny.draft_shape(num_target_layers=9, vocab_size=300))
    export_drafter(drafter, tmp_path / "base", "zlab", "float32", None)
    with pytest.raises(ConfigError) as error:
        resolve_config(config_of(toy, tmp_path / "run", tmp_path / "base"))
    assert "num_target_layers: the target has 5, the drafter was made for 9" in str(error.value)
    assert "vocab_size: the target has 272, the drafter was made for 300" in str(error.value)


def test_the_mask_token_has_to_be_unused(toy: Toy, tmp_path: Path) -> None:
    """A published mask token that a fine-tune's data or tokenizer uses is refused as any other would be."""
    export_drafter(tiny.drafter(tiny.draft_shape(mask_token_id=257)), tmp_path / "base", "zlab", "float32", None)
    with pytest.raises(ConfigError, match="draft.mask_token_id=257 is an end-of-turn token"):
        resolve_config(config_of(toy, tmp_path / "run", tmp_path / "base"))


def test_what_is_no_drafter_is_told(toy: Toy, tmp_path: Path) -> None:
    """A missing folder, and one of another kind, are errors that name it; without the key nothing is read."""
    with pytest.raises(ConfigError, match="draft.init=.*nowhere is no folder"):
        initial_of(config_of(toy, tmp_path / "run", tmp_path / "nowhere"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"dflash_config": {}, "architectures": ["X"]}', encoding="utf-8")
    with pytest.raises(ModelError, match="architectures"):
        initial_of(config_of(toy, tmp_path / "run", tmp_path / "other"))
    assert initial_of(toy.config(tmp_path / "run")) is None and load_initial(toy.config(tmp_path / "run")) is None


def test_another_folder_may_not_be_given_later(toy: Toy, folders: dict[str, Path], tmp_path: Path) -> None:
    """A run stays with what it started from; the same run file goes on with it."""
    config = config_of(toy, tmp_path / "run", folders["zlab"])
    saved = resolve_config(config)[0].config
    assert merge_with_saved(saved, config).draft == saved.draft
    for other in (config_of(toy, tmp_path / "run", folders["run"]), toy.config(tmp_path / "run")):
        with pytest.raises(ConfigError, match="draft.init: the run was started with"):
            merge_with_saved(saved, other)
