"""A cache's files: what is written is what a target makes, what is read is checked, what does not fit is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from paceline.cli.train import resolve_config
from paceline.config import RunConfig
from paceline.data.prepare import PrepareSettings, prepare
from paceline.errors import ConfigError, DataError, ModelError, PacelineError
from paceline.plan.memory import kept_bytes, memory_plan
from paceline.plan.resolve import ResolvedRun
from paceline.records import TokenBatch
from paceline.train import cache_writer, feature_cache
from paceline.train.cache_writer import CacheWriter, open_folder, plan_shards
from paceline.train.feature_cache import (
    MANIFEST,
    CachedFeatures,
    Manifest,
    adopted,
    check_run,
    decode,
    encode,
    find_damage,
    layout_of,
    open_cached,
    read_manifest,
)
from paceline.train.target import load_head, load_target
from paceline.train.tensor_file import PieceWriter
from tests import tiny
from tests.toy import Toy

SHARD = 40_000
"""Bytes: the toy's data then takes some ten shards."""

LAST_HIDDEN = ("loss.kl=0.5",)


def resolved_of(toy: Toy, *overrides: str) -> ResolvedRun:
    return resolve_config(toy.config(Path("run"), *overrides))[0]


def make(toy: Toy, out: Path, *overrides: str, dtype: str = "target", **kwargs: Any) -> Manifest:
    """A cache of the toy's features."""
    with open_folder(out) as earlier:
        manifest = CacheWriter(resolved_of(toy, *overrides), out, earlier, dtype, SHARD).run(**kwargs)
    assert manifest is not None
    return manifest


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != feature_cache.LOCK_FILE}


def with_cache(toy: Toy, cache: Path, *overrides: str) -> RunConfig:
    return toy.config(Path("run"), f"target.cache={cache}", *overrides)


def reader(folder: Path, dtype: torch.dtype = torch.float32, with_last_hidden: bool = False) -> CachedFeatures:
    return CachedFeatures(folder, torch.device("cpu"), dtype, with_last_hidden)


def rows_of(run: ResolvedRun, rows: list[int], length: int) -> TokenBatch:
    return TokenBatch.pack(0, [(row, *run.dataset.row(row)) for row in rows], length)


@pytest.fixture(scope="module")
def plain(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Taps in float32, in several shards."""
    out = tmp_path_factory.mktemp("plain") / "cache"
    make(toy, out)
    return out


@pytest.fixture(scope="module")
def full(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Taps and last hidden state in float32."""
    out = tmp_path_factory.mktemp("full") / "cache"
    make(toy, out, *LAST_HIDDEN)
    return out


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    """A cache to be damaged."""
    return Path(shutil.copytree(plain, tmp_path / "copy"))


@pytest.mark.parametrize("last_hidden", [False, True], ids=["taps", "last hidden"])
def test_what_is_read_is_what_the_target_makes(toy: Toy, plain: Path, full: Path, last_hidden: bool) -> None:
    """Any rows in any order and row length have the same bits as from the target, and zeros behind them."""
    run = resolved_of(toy, *(LAST_HIDDEN if last_hidden else ()))
    target, cached = load_target(run.config), reader(full if last_hidden else plain, with_last_hidden=last_hidden)
    assert cached.manifest.last_hidden == last_hidden and len(cached.manifest.shards) > 3
    for rows in ([0], [7, 3, 39], [38, 20, 21, 0]):
        tokens = rows_of(run, rows, 300)
        wanted, found = target.features(tokens), cached.features(tokens)
        assert found.tokens is tokens
        assert torch.equal(found.context_feature, wanted.context_feature)
        assert not found.context_feature[tokens.num_tokens :].any()
        assert (found.last_hidden is not None) == last_hidden
        if last_hidden:
            assert found.last_hidden is not None and wanted.last_hidden is not None
            assert torch.equal(found.last_hidden, wanted.last_hidden)
        ids, _ = run.dataset.row(rows[0])
        assert torch.equal(cached.row_features(rows[0]), target.document_features(ids))


def test_a_last_hidden_state_that_nobody_wants_is_left_out(toy: Toy, plain: Path, full: Path) -> None:
    """A run on the taps alone takes them from a cache with more."""
    tokens = rows_of(resolved_of(toy), [5, 6], 100)
    more, less = reader(full).features(tokens), reader(plain).features(tokens)
    assert more.last_hidden is None and torch.equal(more.context_feature, less.context_feature)
    assert torch.equal(reader(full).row_features(5), reader(plain).row_features(5))


def test_rows_in_one_forward_are_cut_into_documents(toy: Toy, tmp_path: Path) -> None:
    """With packed rows documents run together, no row of them reaches over a shard, and each is what it is alone."""
    overrides = ("target.packing=packed",)
    manifest = make(toy, tmp_path / "cache", *overrides)
    assert manifest.packed and manifest.row_length == 128
    run = resolved_of(toy, *overrides)
    target, cached = load_target(run.config), reader(tmp_path / "cache")
    assert target.packed
    for row in (0, 17, 39):
        alone = target.document_features(run.dataset.row(row)[0])
        torch.testing.assert_close(cached.row_features(row), alone, rtol=1e-4, atol=1e-4)
    first = manifest.shards[1].first_row  # the first row of the second shard stands at the start of a forward again
    together = [row for row in range(first, first + 20) if run.dataset.lengths[first : row + 1].sum() <= 128]
    wanted = target.features(rows_of(run, together, 128)).context_feature[: run.dataset.lengths[first]]
    assert torch.equal(cached.row_features(first), wanted)


@pytest.mark.parametrize("dtype", ["target", "bfloat16", "fp8"])
def test_files_are_safetensors_of_the_size_that_was_said(toy: Toy, tmp_path: Path, dtype: str) -> None:
    """Others read them by the library; sizes are known before; the plan's formula gives all but headers."""
    out = tmp_path / "cache"
    with open_folder(out) as earlier:
        writer = CacheWriter(resolved_of(toy), out, earlier, dtype, SHARD)
        said = writer.missing_bytes
        manifest = writer.run()
    assert manifest is not None
    paths = sorted(out.glob("*.safetensors"))
    sizes = [path.stat().st_size for path in paths]
    assert said == writer.total_bytes == sum(sizes) == sum(shard.bytes for shard in manifest.shards)
    assert max(sizes) <= SHARD + 500 and len(sizes) > 1
    rows, tokens = manifest.num_rows, manifest.num_tokens
    planned = kept_bytes(tokens, manifest.num_states, manifest.hidden_size, manifest.dtype)
    assert sum(sizes) - planned == sum(
        len(manifest.layout(s.num_rows, s.num_tokens).header) for s in manifest.shards
    ) + (8 * (2 * rows + len(sizes)))
    seen = 0
    for path in paths:
        with safe_open(path, "pt") as file:
            starts = file.get_tensor("starts")
            assert file.get_slice("features").get_shape() == [int(starts[-1]), manifest.num_states * 32]
            assert ("scales" in file.keys()) == (dtype == "fp8")  # noqa: SIM118  # it is no mapping
            seen += int(starts[-1])
    assert seen == tokens


def test_rounding_is_measured_on_the_first_shard(toy: Toy, plain: Path, tmp_path: Path) -> None:
    """The manifest has the relative error of each state; without rounding there is none."""
    assert read_manifest(plain).relative_error is None
    exact = reader(plain)
    for dtype, limits in (("bfloat16", (5e-4, 4e-3)), ("fp8", (5e-3, 4e-2))):
        manifest = make(toy, tmp_path / dtype, dtype=dtype)
        kept = reader(tmp_path / dtype)
        rows = range(manifest.shards[0].num_rows)
        wanted = torch.cat([exact.row_features(row) for row in rows]).double().split(32, dim=1)
        found = torch.cat([kept.row_features(row) for row in rows]).double().split(32, dim=1)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
        assert manifest.relative_error == pytest.approx(errors, rel=1e-6)
        assert all(limits[0] < error < limits[1] for error in errors)


def test_bfloat16_is_delivered_in_the_wanted_type(toy: Toy, plain: Path, tmp_path: Path) -> None:
    """A cache in float32 gives a bfloat16 drafter what the target would; one in bfloat16 gives float32 of it."""
    tokens = rows_of(resolved_of(toy), [1, 2], 90)
    exact = reader(plain).features(tokens).context_feature
    assert torch.equal(reader(plain, torch.bfloat16).features(tokens).context_feature, exact.bfloat16())
    make(toy, tmp_path / "cache", dtype="bfloat16")
    assert torch.equal(reader(tmp_path / "cache").features(tokens).context_feature, exact.bfloat16().float())
    made = make(toy, tmp_path / "own", "draft.dtype=bfloat16")  # `target` is the type that it delivers
    assert made.dtype == "bfloat16" and made.relative_error is None


def test_fp8_keeps_each_state_of_a_token_by_its_own_scale() -> None:
    """Large states leave small ones alone, zeros stay zeros, and what is not finite is not made so."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(6, 3 * 16, generator=generator)
    features[0, 16:32] *= 1e4
    features[1] = 0.0
    features[2, 5] = 3e4  # an outlier in its own state
    features[4, 40] = float("inf")
    stored, scales = encode(features, 3, "fp8")
    assert stored.dtype == torch.float8_e4m3fn and scales is not None and scales.shape == (6, 3)
    found = decode(stored, scales, 3, torch.float32, 3)
    usual = torch.tensor([0, 1, 3, 5])
    torch.testing.assert_close(found[usual], features[usual], rtol=2**-4, atol=1e-2 * 2**-4)
    assert (found[0, :16] - features[0, :16]).abs().max() < 0.15  # beside values of 1e4
    assert not found[1].any() and found[2, 5] == pytest.approx(3e4, rel=1e-6)
    assert not found[4].isfinite().all() and found[4, :32].isfinite().all()
    assert torch.equal(decode(stored, scales, 3, torch.bfloat16, 2), found[:, :32].bfloat16())


def test_shards_hold_whole_rows_up_to_their_size() -> None:
    """Every row is in one shard, in order; a row that is larger than a shard has one of its own."""
    lengths = np.array([10, 1, 1, 200, 5, 5, 5, 90, 1])
    for dtype, limit in (("float32", 3000), ("bfloat16", 3000), ("fp8", 1500)):
        shards = plan_shards(lengths, 2, 8, dtype, limit)
        assert [first for first, _, _ in shards] == np.cumsum([0, *(rows for _, rows, _ in shards[:-1])]).tolist()
        assert sum(rows for _, rows, _ in shards) == len(lengths) and len(shards) > 2
        for (first, rows, tokens), following in zip(shards, [*shards[1:], None], strict=True):
            assert tokens == lengths[first : first + rows].sum()

            def size(rows: int, tokens: int, dtype: Any = dtype) -> int:
                layout = layout_of(rows, tokens, 2, 8, dtype)
                return layout.num_bytes - len(layout.header)

            assert size(rows, tokens) <= limit or rows == 1
            if following is not None:  # one more would not have fitted
                assert size(rows + 1, tokens + int(lengths[first + rows])) > limit


def test_one_row_is_read_without_the_rest(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document costs its own bytes; of its shard the index is read once."""
    counts: list[int] = []
    read = os.preadv

    def counted(file: int, buffers: Any, offset: int) -> int:
        counts.append(read(file, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    cached = reader(plain)
    first = cached.row_features(3)
    own = first.numel() * 4
    shard = cached.manifest.shards[0]
    index = len(cached.manifest.layout(shard.num_rows, shard.num_tokens).header) + 8 * (2 * shard.num_rows + 1)
    assert sum(counts) == own + index < shard.bytes / 2
    counts.clear()
    assert torch.equal(cached.row_features(3), first) and sum(counts) == own


def test_threads_read_at_once(toy: Toy, plain: Path) -> None:
    """Several threads get what one gets."""
    run = resolved_of(toy)
    wanted = [reader(plain).row_features(row) for row in range(40)]
    cached, wrong = reader(plain), list[int]()

    def read(seed: int) -> None:
        for row in np.random.default_rng(seed).permutation(40).tolist():
            tokens = rows_of(run, [row], 128)
            if not torch.equal(cached.features(tokens).context_feature[: tokens.num_tokens], wanted[row]):
                wrong.append(row)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_several_threads_make_the_same_files(toy: Toy, plain: Path, tmp_path: Path) -> None:
    """How many threads run the target leaves no trace."""
    make(toy, tmp_path / "cache", workers=3)
    assert content(tmp_path / "cache") == content(plain)


# ------------------------------------------------------------------------------------------------------ what is damaged


def strike(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_is_found(toy: Toy, copy: Path) -> None:
    """In a document by whoever reads it, in an index by whoever opens the shard, anywhere by comparing all files."""
    manifest = read_manifest(copy)
    shard = manifest.shards[2]
    path, layout = copy / shard.name, manifest.layout(shard.num_rows, shard.num_tokens)
    assert find_damage(copy) == []
    cached = reader(copy)
    strike(path, layout.features + 5)
    with pytest.raises(DataError, match=rf"{shard.name} is damaged: the checksum of row {shard.first_row} "):
        cached.row_features(shard.first_row)
    cached.row_features(shard.first_row + 1)  # its neighbour is well
    assert [problem for problem in find_damage(copy) if f"{shard.name} is damaged: its SHA-256" in problem]
    strike(path, layout.features + 5)
    assert find_damage(copy) == []
    for at in (3, layout.starts + 8 * shard.num_rows):
        strike(path, at)
        with pytest.raises(DataError, match=f"{shard.name} is damaged: its header"):
            reader(copy).row_features(shard.first_row)
        assert len(find_damage(copy)) == 1
        strike(path, at)
    strike(path, layout.starts + 8)  # a row that is longer than in the data
    with pytest.raises(DataError, match="tokens there"):
        reader(copy).features(rows_of(resolved_of(toy), [shard.first_row], 128))


def test_a_shard_that_is_cut_or_gone_is_named_at_the_start(copy: Path) -> None:
    """Its file and the sizes; one that is cut later is an error of the read, and no signal."""
    shard = read_manifest(copy).shards[1]
    path = copy / shard.name
    cached = reader(copy)
    cached.row_features(shard.first_row)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(DataError, match=rf"{shard.name} is damaged: [\d,]+ bytes, [\d,]+ were written"):
        reader(copy)
    assert any(shard.name in problem for problem in find_damage(copy))
    path.write_bytes(whole[:1000])
    with pytest.raises(DataError, match="it ends at byte 1,000"):
        cached.row_features(shard.first_row)
    path.unlink()
    with pytest.raises(DataError, match=f"{shard.name} cannot be read: No such file"):
        reader(copy)


def test_what_is_missing_is_made_again(toy: Toy, plain: Path, copy: Path) -> None:
    """The command that made a cache makes shards again that are cut or gone, and those alone."""
    shards = read_manifest(copy).shards
    (copy / shards[1].name).unlink()
    (copy / shards[3].name).write_bytes(b"cut")
    made: list[int] = []
    make(toy, copy, on_tokens=made.append)
    assert sum(made) == shards[1].num_tokens + shards[3].num_tokens
    assert content(copy) == content(plain)


@pytest.mark.parametrize(
    ("change", "error", "what"),
    [
        (lambda text: text[:50], DataError, "cannot be read"),
        (lambda text: text.replace('"format": 1', '"format": 2'), DataError, "format 2"),
        (lambda text: text.replace('"packed": false', '"packed": "perhaps"'), DataError, "damaged"),
        (lambda text: text.replace("shard-00001", "../shard-00001"), DataError, "is no name of a file"),
        (lambda text: "[1]", DataError, "format None"),
    ],
)
def test_a_damaged_manifest_is_told(
    copy: Path, change: Callable[[str], str], error: type[Exception], what: str
) -> None:
    """What cannot be understood is no cache, and names in it lead nowhere else."""
    path = copy / MANIFEST
    path.write_text(change(path.read_text()))
    with pytest.raises(error, match=what):
        reader(copy)


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.fixture(scope="module")
def other_data(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the toy's conversations."""
    folder = tmp_path_factory.mktemp("other")
    source = folder / "chats.jsonl"
    source.write_text("".join(toy.conversations.read_text().splitlines(keepends=True)[:30]))
    prepare([source], folder / "data", PrepareSettings(tokenizer=str(toy.target), max_length=128))
    return folder / "data"


def test_another_run_is_refused_by_what_differs(toy: Toy, plain: Path, other_data: Path, tmp_path: Path) -> None:
    """Layers, type, data, adapter and the last hidden state are compared before anything is loaded."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    (adapter / "adapter_config.json").write_text("{}")
    for override, what in (
        ("target.layer_ids=[0,2]", r"target.layer_ids: the cache was made with \[.*\], the run has \[0, 2\]"),
        ("target.dtype=bfloat16", "target.dtype: the cache was made with float32, the run has bfloat16"),
        (f"data.path={other_data}", "the data's fingerprint"),
        (f"target.adapter={adapter}", "target.adapter: the cache was made with None, the run has"),
        (LAST_HIDDEN[0], "the last hidden state, which draft.kind and loss ask for"),
        ("draft.kind=dspark", "the last hidden state"),
    ):
        with pytest.raises(ConfigError, match=what):
            resolve_config(with_cache(toy, plain, override))
    with pytest.raises(ConfigError, match=r"is no feature cache: it has no manifest.json; `paceline cache` makes one"):
        resolve_config(with_cache(toy, tmp_path))
    resolved = resolve_config(with_cache(toy, plain))[0].config
    fp8 = resolved.model_copy(update={"target": resolved.target.model_copy(update={"fp8": True})})
    with pytest.raises(ConfigError, match="target.fp8: the cache was made with False, the run has True"):
        check_run(fp8, read_manifest(plain).data_fingerprint)


def test_another_target_is_refused(toy: Toy, plain: Path, tmp_path: Path) -> None:
    """Embedding, first layer and head tell a fine-tune from its base model."""
    open_cached(config := resolve_config(with_cache(toy, plain))[0].config, load_head(config))
    other = Path(shutil.copytree(toy.target, tmp_path / "other"))
    model = tiny.causal_lm("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    tiny.save(model, other)
    config = resolve_config(with_cache(toy, plain, f"target.path={other}"))[0].config
    with pytest.raises(ModelError, match="was made with another target"):
        open_cached(config, load_head(config))


def test_what_is_auto_is_adopted(toy: Toy, tmp_path: Path) -> None:
    """Layers and type of a cache become the run's where it leaves them open."""
    overrides = ("target.layer_ids=[1,3]", "target.dtype=bfloat16", "draft.dtype=float32")
    make(toy, tmp_path / "cache", *overrides)
    config = resolve_config(with_cache(toy, tmp_path / "cache"))[0].config
    assert config.target.layer_ids == (1, 3) and config.target.dtype == "bfloat16"
    plain = toy.config(Path("run"))
    assert adopted(plain) is plain


def test_the_memory_plan_leaves_the_layers_out(toy: Toy, plain: Path) -> None:
    """Of the target there is one layer beside embedding and head."""
    online, cached = resolved_of(toy), resolve_config(with_cache(toy, plain))[0]
    shape = load_head(online.config).shape
    assert memory_plan(online, shape).target_bytes == 3 * memory_plan(cached, shape).target_bytes > 0  # taps 1 and 2


def test_layouts_that_go_with_a_cache(toy: Toy, plain: Path) -> None:
    """Reading goes on beside the drafter; with Ray each rank reads for itself, and there is no target to place."""
    assert resolve_config(with_cache(toy, plain))[0].config.topology.layout == "split"
    ray = ("topology.executor=ray", "topology.drafters=2")
    assert resolve_config(with_cache(toy, plain, *ray))[0].config.topology.layout == "colocated"
    with pytest.raises(ConfigError, match="there is no target to give a process to"):
        resolve_config(with_cache(toy, plain, *ray, "topology.layout=split"))
    with pytest.raises(ConfigError, match="is one process: use executor=local"):
        resolve_config(with_cache(toy, plain, ray[0]))


def test_a_cache_that_is_not_complete_is_refused(toy: Toy, tmp_path: Path) -> None:
    """A run says how much of it is there; a stop keeps whole shards."""
    out, made = tmp_path / "cache", list[int]()
    with open_folder(out) as earlier:
        writer = CacheWriter(resolved_of(toy), out, earlier, "target", SHARD)
        assert writer.run(lambda: sum(made) > 400, made.append) is None
    assert 0 < writer.num_done < len(writer.shards) and not list(out.glob(".shard*"))
    with pytest.raises(ConfigError, match=r"not complete, it has \d+ of 40 rows: the `paceline cache` command"):
        resolve_config(with_cache(toy, out))


def test_a_cache_is_gone_on_with_by_the_same_settings_only(toy: Toy, plain: Path, other_data: Path) -> None:
    """What would make other features is named, and nothing is touched."""
    before = content(plain)
    for overrides, dtype, what in (
        (("target.layer_ids=[0,2]",), "target", r"layer_ids was \(.*\), is now \(0, 2\)"),
        ((), "fp8", "dtype was float32, is now fp8"),
        ((f"data.path={other_data}",), "target", "data_fingerprint was"),
        (LAST_HIDDEN, "target", "last_hidden was False, is now True"),
    ):
        with open_folder(plain) as earlier, pytest.raises(ConfigError, match=what):
            CacheWriter(resolved_of(toy, *overrides), plain, earlier, dtype, SHARD)
    with open_folder(plain) as earlier, pytest.raises(ConfigError, match="shard_bytes was 40000, is now 50000"):
        CacheWriter(resolved_of(toy), plain, earlier, "target", 50_000)
    with open_folder(plain) as earlier:  # not given, it is what it was
        assert len(CacheWriter(resolved_of(toy), plain, earlier, "target").shards) == len(read_manifest(plain).shards)
    assert content(plain) == before


def test_another_target_does_not_go_on_with_a_cache(toy: Toy, copy: Path, tmp_path: Path) -> None:
    """A change behind the same shape is seen once the target is loaded."""
    (copy / read_manifest(copy).shards[0].name).unlink()
    other = Path(shutil.copytree(toy.target, tmp_path / "other"))
    tiny.save(tiny.causal_lm("llama", seed=1), other)
    with pytest.raises(ConfigError, match="target_fingerprint was"):
        make(toy, copy, f"target.path={other}")


def test_a_second_writer_and_a_foreign_folder_are_refused(tmp_path: Path) -> None:
    """One process writes at a time, and into no folder that holds something else; a folder in vain is gone again."""
    with open_folder(tmp_path / "cache") as earlier:
        assert earlier is None
        with (
            pytest.raises(ConfigError, match=f"is being written by process {os.getpid()}"),
            open_folder(tmp_path / "cache"),
        ):
            pass
    assert not (tmp_path / "cache").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(DataError, match=r"holds thesis.txt but no manifest.json"), open_folder(tmp_path / "mine"):
        pass
    with pytest.raises(DataError, match="is no folder"), open_folder(tmp_path / "mine" / "thesis.txt"):
        pass


def test_too_little_disk_is_said_before_anything_is_loaded(
    toy: Toy, plain: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bytes that are needed and free, and what other types would take; what is there counts."""
    free = sum(shard.bytes for shard in read_manifest(plain).shards) - 1
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    with open_folder(tmp_path / "cache") as earlier:
        writer = CacheWriter(resolved_of(toy), tmp_path / "cache", earlier, "target", SHARD)
        with pytest.raises(DataError, match=rf"needs {free + 1:,} bytes .* has {free:,} free: 1 too few; .*fp8: "):
            writer.check_space()
    (copy / read_manifest(copy).shards[0].name).unlink()
    with open_folder(copy) as earlier:
        CacheWriter(resolved_of(toy), copy, earlier, "target", SHARD).check_space()


def test_a_disk_that_fills_up_keeps_what_is_there(
    toy: Toy, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how to go on, no part of a file is left, and the same command makes the same files."""
    room, write = [100_000], PieceWriter.write

    def short(self: PieceWriter, piece: memoryview | bytes) -> None:
        room[0] -= len(piece)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, piece)

    out = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(PieceWriter, "write", short)
        with pytest.raises(DataError, match=r"No space left on device; free space on this disk; 3 of \d+ shards are"):
            make(toy, out)
    assert sorted(path.name for path in out.iterdir()) == [
        feature_cache.LOCK_FILE, MANIFEST, *(f"shard-0000{number}.safetensors" for number in range(3)),
    ]  # fmt: skip
    make(toy, out)
    assert content(out) == content(plain)


def test_an_adapter_without_weights_is_refused(toy: Toy, tmp_path: Path) -> None:
    """Its weights are part of what a cache was made with."""
    config = toy.config(Path("run"), f"target.adapter={tmp_path}")
    with pytest.raises(PacelineError, match=r"has no adapter_model.safetensors: there are no weights"):
        feature_cache.adapter_fingerprint(config)


def test_a_manifest_with_a_value_that_is_not_finite_can_be_read(copy: Path) -> None:
    """A feature that is not finite makes an error that is none; the run that meets it tells."""
    manifest = read_manifest(copy).model_copy(update={"relative_error": (float("nan"), 0.01)})
    (copy / MANIFEST).write_text(manifest.model_dump_json())
    found = read_manifest(copy).relative_error
    assert found is not None and np.isnan(found[0]) and json.loads((copy / MANIFEST).read_text())["format"] == 1
    assert cache_writer.SHARD_BYTES == 1 << 30
