"""What the exported layouts share: a folder that appears whole or not at all, and checks of what is read from one."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from paceline.errors import ModelError
from paceline.files import staged_folder
from paceline.models.draft import DraftShape

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

ARCHITECTURE = "DFlashDraftModel"

LAYOUT_KEYS = {"z-lab": "dflash_config", "speculators": "speculators_config"}
"""The key of `config.json` by which a layout is known; both are objects."""

LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
"""Fields of `DraftShape` that stand in every layout under their own name."""


def has_layout(folder: Path | str, layout: str) -> bool:
    """Whether a folder's configuration has the key of a layout."""
    try:
        return LAYOUT_KEYS[layout] in json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def export_place(out_dir: Path | str) -> Path:
    """The folder to write: new or empty, or an earlier export and nothing else. Raises: ModelError."""
    folder = Path(out_dir).expanduser().resolve()
    if not folder.exists():
        return folder
    if not folder.is_dir():
        raise ModelError(f"--out {folder} is a file; a folder was wanted")
    names = {entry.name for entry in folder.iterdir()}
    is_export = any(has_layout(folder, layout) for layout in LAYOUT_KEYS)
    if names and not (is_export and names <= {CONFIG_FILE, WEIGHTS_FILE}):
        raise ModelError(f"--out {folder} holds other files than an export; choose a new folder")
    return folder


def write_export(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], check: Callable[[Path], None]
) -> None:
    """Write both files beside the place, let `check` read them there, and put them in place whole.

    Raises: ModelError; an earlier export is as it was then.
    """
    try:
        with staged_folder(folder) as partial:
            (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            safetensors.torch.save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
            check(partial)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"export to {folder} could not be written: {error}") from error


def check_written(folder: Path, read: DraftShape, wrote: DraftShape, tensors: dict[str, Tensor]) -> None:
    """Compare what a stranger reads with what was meant. Raises: ModelError."""
    if read != wrote:
        raise ModelError(f"export: the configuration reads back as {read}, written was {wrote}")
    found = read_tensors(folder)
    if damaged := [name for name, tensor in tensors.items() if not torch.equal(found[name], tensor)]:
        raise ModelError(f"export: tensors read back otherwise than written: {damaged}; is a weight not finite?")


def read_config(folder: Path, layout: str) -> dict[str, Any]:
    """The configuration of a drafter in a layout. Raises: ModelError."""
    path, key = folder / CONFIG_FILE, LAYOUT_KEYS[layout]
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get(key), dict):
        raise ModelError(f"{path} has no `{key}`: a drafter in the {layout} layout was wanted")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The weights. Raises: ModelError."""
    try:
        return safetensors.torch.load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / WEIGHTS_FILE} cannot be read: {error}") from error


def wanted(section: dict[str, Any], key: str, path: Path) -> Any:
    """A value that has no default. Raises: ModelError if it is missing or null."""
    if section.get(key) is None:
        raise ModelError(f"{path} has no {key}, and a guess would change what the drafter computes")
    return section[key]


def check_fixed(section: dict[str, Any], fixed: dict[str, Any], path: Path) -> None:
    """Values that can only be these. Raises: ModelError if the file says otherwise; null says nothing."""
    for key, value in fixed.items():
        if section.get(key) not in (None, value):
            raise ModelError(f"{path}: {key}={section[key]!r} is not supported; {value!r} was wanted")


def rope_of(section: dict[str, Any], path: Path) -> dict[str, Any]:
    """Rotary settings in the newer form, from either schema."""
    rope = dict(section.get("rope_parameters") or section.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if "rope_theta" not in rope:
        rope["rope_theta"] = wanted(section, "rope_theta", path)
    return rope


def check_tensors(
    found: dict[str, Tensor], wanted: dict[str, Tensor], folder: Path, optional: Container[str] = ()
) -> None:
    """Names and shapes against those that the configuration means. Raises: ModelError naming every difference."""
    missing = sorted(name for name in wanted.keys() - found.keys() if name not in optional)
    unexpected = sorted(found.keys() - wanted.keys())
    shapes = [
        f"{key} {list(found[key].shape)} for {list(wanted[key].shape)}"
        for key in sorted(wanted.keys() & found.keys())
        if found[key].shape != wanted[key].shape
    ]
    if missing or unexpected or shapes:
        raise ModelError(
            f"{folder / WEIGHTS_FILE} does not match its configuration: missing {missing}, unexpected {unexpected}, "
            f"other shapes {shapes}"
        )
