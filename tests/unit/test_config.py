"""The run file: overrides, messages, `auto`, and what a resumed run may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import (
    RunConfig,
    changed_keys,
    default_gamma,
    dump_config,
    flatten,
    is_free_to_change,
    load_config,
    parse_config,
    valid_keys,
)
from paceline.errors import ConfigError, PacelineError

MINIMAL = ["target.path=some/target", "data.path=some/data"]


def config(*overrides: str) -> RunConfig:
    return load_config(None, [*MINIMAL, *overrides])


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(*overrides)
    return str(caught.value)


def test_two_paths_are_enough() -> None:
    """Everything but the target's and the data's path has a default, and the defaults are the documented ones."""
    c = config()
    assert (c.target.path, c.data.path) == ("some/target", "some/data")
    assert (c.draft.num_layers, c.draft.block_size, c.draft.mask_token_id) == (5, 16, "auto")
    assert (c.optim.lr, c.optim.warmup_ratio, c.optim.weight_decay, c.optim.clip) == (6e-4, 0.04, 0.0, 1.0)
    assert (c.data.epochs, c.data.max_length, c.data.validation) == (6, 3072, 0.005)
    assert (round(c.anchors.per_token * 3072), c.anchors.stratify) == (512, False)
    assert (c.run.seed, c.run.deterministic, c.run.max_steps) == (0, False, None)
    assert (c.checkpoint.every_steps, c.checkpoint.keep_last) == (500, 3)


@pytest.mark.parametrize(("path", "missing"), [("target.path=x", "data"), ("data.path=x", "target")])
def test_a_missing_section_is_named(path: str, missing: str) -> None:
    """Without a path the message names what is missing."""
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        load_config(None, [path])
    with pytest.raises(ConfigError, match=r"target\.path is missing"):
        load_config(None, ["data.path=x", "target.dtype=auto"])


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optim.lr=3e-4", "optim.lr", 3e-4),
        ("optim.lr=0.001", "optim.lr", 1e-3),
        ("target.layer_ids=[1, 3, 5]", "target.layer_ids", [1, 3, 5]),
        ("draft.block_size=8", "draft.block_size", 8),
        ("run.deterministic=true", "run.deterministic", True),
        ("run.max_steps=", "run.max_steps", None),
        ("run.max_steps=null", "run.max_steps", None),
        ("loss.gamma=5", "loss.gamma", 5.0),
        ("loss.gamma=5e-1", "loss.gamma", 0.5),
        ("loss.gamma=auto", "loss.gamma", "auto"),
        ("run.dir=runs/a=b", "run.dir", "runs/a=b"),
        ("pipeline.tokens_per_batch=4096", "pipeline.tokens_per_batch", 4096),
        ("optim.betas=[0.8, 0.9]", "optim.betas", [0.8, 0.9]),
    ],
)
def test_overrides(override: str, key: str, value: Any) -> None:
    """`section.key=value` takes its value in YAML and changes that key and no other."""
    got, before = dict(flatten(config(override))), dict(flatten(config()))
    assert got.pop(key) == value and type(value) is type(dict(flatten(config(override)))[key])
    before.pop(key)
    assert got == before


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    """The file comes first, then the overrides in order."""
    file = tmp_path / "run.yaml"
    file.write_text("target: {path: a}\ndata: {path: b, epochs: 2}\noptim:\n  lr: 1e-4\n", encoding="utf-8")
    c = load_config(file, ["optim.lr=2e-4", "optim.lr=3e-4", "data.path=c"])
    assert (c.optim.lr, c.data.path, c.data.epochs, c.target.path) == (3e-4, "c", 2, "a")
    assert load_config(file).optim.lr == 1e-4


@pytest.mark.parametrize("override", ["lr=1", "optim.lr", "optim.lr.x=1", ".lr=1", "optim.=1", "=1", ""])
def test_a_malformed_override_is_shown(override: str) -> None:
    """An override of another form is refused, shown, with an example."""
    assert repr(override) in message(override) and "optim.lr=3e-4" in message(override)


@pytest.mark.parametrize(
    ("override", "seen", "nearest"),
    [
        ("optim.lrr=1", "optim.lrr", "optim.lr"),
        ("draft.blocksize=8", "draft.blocksize", "draft.block_size"),
        ("draft.lr=1", "draft.lr", "optim.lr"),
        ("optimizer.lr=1", "optimizer", "optim"),
        ("target.layers_ids=[1]", "target.layers_ids", "target.layer_ids"),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, seen: str, nearest: str) -> None:
    """A misspelt key or section is refused with the nearest valid one, also where it sits in the wrong section."""
    text = message(override)
    assert text.startswith(f"unknown key {seen}")
    assert f"did you mean {nearest}" in text


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optim.lr=fast", ["optim.lr='fast'"]),
        ("optim.lr=0", ["optim.lr=0", "greater than 0"]),
        ("draft.block_size=1", ["draft.block_size=1", "2"]),
        ("draft.num_layers=0", ["draft.num_layers=0"]),
        ("data.validation=1", ["data.validation=1", "less than 1"]),
        ("loss.gamma=0", ["loss.gamma=0", "0.01 or more"]),
        ("loss.gamma=-2.0", ["loss.gamma=-2.0", "0.01 or more"]),
        ("loss.gamma=.nan", ["loss.gamma=nan", "finite number"]),
        ("loss.kind=hinge", ["loss.kind='hinge'", "decay"]),
        ("topology.layout=wide", ["topology.layout='wide'", "colocated"]),
        ("target.dtype=float64", ["target.dtype='float64'", "bfloat16"]),
        ("target.packing=none", ["target.packing='none'", "per_document"]),
        ("target.layer_ids=all", ["target.layer_ids='all'"]),
        ("anchors.per_token=0", ["anchors.per_token=0"]),
        ("run.seed=-1", ["run.seed=-1"]),
        ("topology.threads=0", ["topology.threads=0", "greater than or equal to 1"]),
        ("optim.tokens_per_step=0", ["optim.tokens_per_step=0", "greater than or equal to 1"]),
        ("pipeline.tokens_per_batch=-1", ["pipeline.tokens_per_batch=-1", "greater than or equal to 1"]),
        ("pipeline.queue_depth=0", ["queue_depth=0", "at least 1"]),
        ("draft.layer_types=sliding", ["sliding_window"]),
        ("draft.layer_types=[full_attention]", ["1 entries", "num_layers=5"]),
    ],
)
def test_a_bad_value_names_key_and_value(override: str, parts: list[str]) -> None:
    """A value that cannot be is refused with its key, what was seen and what was wanted."""
    text = message(override)
    assert all(part in text for part in parts), text


def test_settings_that_contradict_each_other() -> None:
    """A queue that never fills, and layer types of another depth or without their window, are refused."""
    assert "wait for ever" in message("pipeline.queue_depth=2", "pipeline.min_ready=3")
    config("pipeline.queue_depth=3", "pipeline.min_ready=3")
    sliding = "draft.layer_types=[sliding_attention, full_attention]"
    assert "sliding_window" in message("draft.num_layers=2", sliding)
    c = config("draft.num_layers=2", sliding, "draft.sliding_window=64")
    assert c.draft.layer_types == ("sliding_attention", "full_attention")


def test_every_problem_is_told_at_once() -> None:
    """Two wrong keys give two lines."""
    lines = message("optim.lrr=1", "draft.block_size=1").splitlines()
    assert len(lines) == 2 and any("lrr" in line for line in lines) and any("block_size" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("target: [", "not valid YAML"), ("- 1\n- 2\n", "holds a list"), ("optim: 3\n", "optim=3")],
)
def test_a_broken_file(tmp_path: Path, text: str, wanted: str) -> None:
    """A file that is not YAML, or no tree of sections, is refused in words."""
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=wanted):
        load_config(file)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a folder and a file of another encoding are refused by name, as an error of the package."""
    (tmp_path / "latin.yaml").write_bytes(b"target: {path: caf\xe9}\n")
    for path in (tmp_path / "absent.yaml", tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(PacelineError, match=str(path)):
            load_config(path)


def test_an_override_in_the_place_of_the_run_file_is_told_from_one() -> None:
    """What was meant as the first override is no file; the message says what comes first."""
    with pytest.raises(ConfigError, match=r"run file run\.dir=x cannot be read: .*; the run file comes first"):
        load_config("run.dir=x", ["optim.lr=1e-3"])


def test_an_override_into_an_empty_or_broken_section(tmp_path: Path) -> None:
    """An empty section takes overrides; one that holds a plain value is refused."""
    file = tmp_path / "run.yaml"
    file.write_text("target: {path: a}\ndata: {path: b}\noptim:\n", encoding="utf-8")
    assert load_config(file, ["optim.lr=1e-3"]).optim.lr == 1e-3
    file.write_text("target: x\ndata: {path: b}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="section target holds 'x'"):
        load_config(file, ["target.path=a"])


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    """A section whose every key is commented out reads as if it were absent."""
    file = tmp_path / "run.yaml"
    file.write_text("target: {path: a}\ndata: {path: b}\noptim:\n  # lr: 1e-4\n", encoding="utf-8")
    assert load_config(file).optim == config().optim


def test_dump_reads_back_equal(tmp_path: Path) -> None:
    """A dumped tree loads to an equal tree, with every kind of value in it, and dumps to the same text."""
    c = config(
        "target.layer_ids=[1, 3]", "optim.lr=1e-7", "draft.num_layers=2", "run.dir='07'", "data.path=true story",
        "draft.layer_types=[sliding_attention, full_attention]", "draft.sliding_window=9", "loss.gamma=2.5",
    )  # fmt: skip
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(c), encoding="utf-8")
    assert load_config(file) == c and dump_config(load_config(file)) == dump_config(c)
    assert load_config(file).run.dir == "07"
    assert list(dict.fromkeys(k.split(".")[0] for k in valid_keys())) == list(RunConfig.model_fields)
    assert [key for key, _ in flatten(c)] == valid_keys()


def test_the_tree_is_frozen() -> None:
    """A setting cannot be changed in place."""
    with pytest.raises(ValueError, match="frozen"):
        config().optim.lr = 1.0  # type: ignore[misc]


def test_changed_keys_names_what_would_train_otherwise() -> None:
    """A resumed run is told every key that changes the numbers, with both values, and nothing else."""
    saved = config("optim.lr=1e-3", "draft.mask_token_id=267", "target.layer_ids=[0, 2]")
    wanted = config("optim.lr=2e-3", "draft.mask_token_id=268", "target.layer_ids=[1, 2]", "topology.targets=4",
                    "pipeline.queue_depth=9", "anchors.stratify=true", "checkpoint.every_steps=7",
                    "run.dir=elsewhere")  # fmt: skip
    assert changed_keys(saved, wanted) == [
        ("target.layer_ids", [0, 2], [1, 2]),
        ("draft.mask_token_id", 267, 268),
        ("anchors.stratify", False, True),
        ("optim.lr", 1e-3, 2e-3),
    ]
    assert changed_keys(saved, saved) == []


def test_auto_agrees_with_what_it_was_resolved_to() -> None:
    """`auto` in the wanted tree is no change; a number where `auto` was saved is one."""
    resolved = config("draft.mask_token_id=267", "pipeline.tokens_per_batch=2048", "loss.gamma=7.0")
    assert changed_keys(resolved, config()) == []
    assert [key for key, _, _ in changed_keys(config(), resolved)] == [
        "draft.mask_token_id", "loss.gamma", "pipeline.tokens_per_batch",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "free"),
    [
        ("topology.targets", True), ("checkpoint.keep_last", True), ("run.dir", True), ("data.path", True),
        ("run.seed", False), ("run.max_steps", False), ("pipeline.tokens_per_batch", False), ("target.dtype", False),
        ("target.packing", False), ("data.epochs", False), ("optim.tokens_per_step", False), ("run.directory", False),
    ],
)  # fmt: skip
def test_which_keys_are_free(key: str, free: bool) -> None:
    """Only keys that leave the numbers as they are may change, by whole names."""
    assert is_free_to_change(key) is free


@pytest.mark.parametrize(
    ("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (13, 6.0), (9, 4.5), (4, 2.0), (32, 14.0)]
)
def test_t02_default_gamma(block_size: int, gamma: float) -> None:
    """Case T02: 7, 5 and 4 at 16, 10 and 8, linear between and in proportion outside; always above 0."""
    assert default_gamma(block_size) == pytest.approx(gamma)
    assert all(default_gamma(k) < default_gamma(k + 1) for k in range(2, 64)) and default_gamma(2) > 0


def test_parse_config_takes_a_plain_tree() -> None:
    """The same checks run on a tree that came from elsewhere."""
    assert parse_config({"target": {"path": "a"}, "data": {"path": "b"}}) == load_config(
        None, ["target.path=a", "data.path=b"]
    )
    with pytest.raises(ConfigError, match="unknown key run.sed; did you mean run.seed"):
        parse_config({"target": {"path": "a"}, "data": {"path": "b"}, "run": {"sed": 1}})
