"""What the exported layouts share: a folder that appears whole or not at all, and checks of what is read from one."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from paceline.errors import ConfigError, ModelError
from paceline.export.weights import WEIGHTS_FILE, read_tensors
from paceline.files import staged_folder
from paceline.models.draft import DFlashDrafter, DraftShape
from paceline.models.engine_limits import VLLM_MARKOV_HEADS, VLLM_METHODS
from paceline.models.kinds import drafter_class
from paceline.models.loading import check_layer_ids
from paceline.models.target import Target

CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
CODE_FILE = "dflash.py"
FINGERPRINT_FILE = "fingerprint.json"
OWN_FILES = {CONFIG_FILE, WEIGHTS_FILE, CARD_FILE, CODE_FILE, FINGERPRINT_FILE}
"""All that an export may write; a folder with anything else is not replaced."""

LAYOUT_KEYS = {"z-lab": "dflash_config", "speculators": "speculators_config"}
"""The key of `config.json` by which a layout is known; both are objects."""

ARCHITECTURES = {
    "z-lab": {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"},
    "speculators": {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"},
}
"""What a layout calls the drafter kinds."""

ANCHOR_KEY = "sample_from_anchor"
"""Whether a block's slot 0 predicts: without it engines take a DSpark folder for either layout of labels."""

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


LAYER_TYPES = ("full_attention", "sliding_attention")


def has_layout(folder: Path | str, layout: str) -> bool:
    """Whether a folder's configuration has the key of a layout."""
    try:
        return LAYOUT_KEYS[layout] in json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def option_names(kind: str) -> tuple[str, ...]:
    """Options that a kind has of its own; every layout has them under their own names."""
    return tuple(drafter_class(kind).check_options({}))


def predicts_from_anchor(kind: str) -> bool:
    """Whether slot 0 of a kind's blocks predicts a token."""
    return drafter_class(kind).label_shift == 1


def num_drafted(kind: str, block_size: int) -> int:
    """Tokens that a block of a kind drafts."""
    return block_size - 1 + drafter_class(kind).label_shift


def vllm_command(folder: Path | str, drafter: DFlashDrafter, target_name: str) -> str:
    """How vLLM takes a folder of either layout, counting drafted tokens; or that it does not."""
    head, method = drafter.shape.options.get("markov_head_type"), VLLM_METHODS[drafter.shape.kind]
    if head is not None and head not in VLLM_MARKOV_HEADS:
        return f"vLLM: has no place for markov_head_type={head}, and refuses the folder"
    config = json.dumps({"method": method, "model": str(folder), "num_speculative_tokens": drafter.num_predicted})
    return f"vLLM: vllm serve {target_name} --speculative-config '{config}'"


def export_place(out_dir: Path | str) -> Path:
    """The folder to write: new or empty, or an earlier export and nothing else. Raises: ModelError."""
    folder = Path(out_dir).expanduser().resolve()
    if not folder.exists():
        return folder
    if not folder.is_dir():
        raise ModelError(f"--out {folder} is a file; a folder was wanted")
    names = {entry.name for entry in folder.iterdir()}
    is_export = any(has_layout(folder, layout) for layout in LAYOUT_KEYS)
    if names and not (is_export and names <= OWN_FILES):
        raise ModelError(f"--out {folder} holds other files than an export; choose a new folder")
    return folder


def write_export(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    check: Callable[[Path], None],
    texts: Mapping[str, str],
) -> None:
    """Write the files beside the place, let `check` read them there, and put them in place whole.

    Args:
        texts: Further files of `OWN_FILES`, by name.
    Raises: ModelError; an earlier export is as it was then.
    """
    try:
        with staged_folder(folder) as partial:
            (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            safetensors.torch.save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
            for name, text in texts.items():
                (partial / name).write_text(text, encoding="utf-8")
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


def check_target(shape: DraftShape, target: Target, name: str) -> None:
    """Whether the target is the one that the drafter was trained for. Raises: ModelError naming what differs."""
    pairs = {
        "hidden_size": (shape.hidden_size, target.shape.hidden_size),
        "num_target_layers": (shape.num_target_layers, target.shape.num_layers),
        "vocab_size": (shape.vocab_size, target.shape.vocab_size),
    }
    different = [f"{key} {seen} against {found}" for key, (seen, found) in pairs.items() if seen != found]
    if different:
        raise ModelError(f"the drafter was trained for another target than {name}: {', '.join(different)}")


def embedding_factor(shape: DraftShape, target: Target) -> float:
    """What the target multiplies a row of its embedding by, in the type of its weights; 1.0 for most.

    Raises: ModelError if the embedding is more than rows and one factor.
    """
    mask = torch.tensor([shape.mask_token_id], device=target.head.weight.device)
    row, embedded = target.embed.weight[mask], target.embed(mask)
    factor = getattr(target.embed, "embed_scale", torch.tensor(1.0)).to(row.dtype)
    if not torch.equal(row * factor, embedded):
        raise ModelError(
            f"{target.shape.model_type}: its embedding of a token is not a row times a factor, and engines have "
            "nothing else: a drafter for it cannot be exported"
        )
    return float(factor)


def check_drafter(shape: DraftShape, where: str, taps: str) -> None:
    """What no drafter can be, whatever the layout.

    Args:
        where: What was looked at, and `taps` the name of its tapped layers, for the message.
    Raises: ModelError naming the key, and what was wanted.
    """
    try:
        check_layer_ids(shape.target_layer_ids, shape.num_target_layers)
    except ConfigError as error:
        raise ModelError(f"{where}: {taps}: {error}") from error
    if not 0 <= shape.mask_token_id < shape.vocab_size:
        raise ModelError(
            f"{where}: mask_token_id={shape.mask_token_id} is not in 0..{shape.vocab_size - 1}: the target's embedding "
            f"has {shape.vocab_size} rows"
        )
    if shape.block_size < 2:
        raise ModelError(f"{where}: block_size={shape.block_size}; 2 or more were wanted, the anchor included")
    try:
        drafter_class(shape.kind).check_shape(shape)
    except ConfigError as error:
        raise ModelError(f"{where}: {error}") from error
    if len(shape.layer_types) != shape.num_hidden_layers:
        raise ModelError(
            f"{where}: layer_types has {len(shape.layer_types)} entries for num_hidden_layers={shape.num_hidden_layers}"
        )
    if unknown := sorted(set(shape.layer_types) - set(LAYER_TYPES)):
        raise ModelError(f"{where}: layer_types has {unknown}; {' and '.join(LAYER_TYPES)} were wanted")
    if shape.num_attention_heads % shape.num_key_value_heads or shape.head_dim % 2:
        raise ModelError(
            f"{where}: num_attention_heads={shape.num_attention_heads} has to be a multiple of num_key_value_heads="
            f"{shape.num_key_value_heads}, and head_dim={shape.head_dim} even"
        )


def causality(shape: DraftShape) -> bool | Literal["sliding"]:
    """Attention inside a block in its one form: a flag wherever all layers agree."""
    flags = {shape.visibility(layer).causal for layer in range(shape.num_hidden_layers)}
    return flags.pop() if len(flags) == 1 else "sliding"


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


def wanted(section: dict[str, Any], key: str, path: Path) -> Any:
    """A value that has no default. Raises: ModelError if it is missing or null."""
    if section.get(key) is None:
        raise ModelError(f"{path} has no {key}, and a guess would change what the drafter computes")
    return section[key]


def numbers(section: dict[str, Any], keys: Iterable[str], path: Path) -> dict[str, Any]:
    """Numbers above 0 that have no default: whole, but for the norm's epsilon. Raises: ModelError naming the key."""
    found = {key: wanted(section, key, path) for key in keys}
    for key, value in found.items():
        kinds = (int, float) if key == "rms_norm_eps" else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or value <= 0:
            raise ModelError(
                f"{path}: {key}={value!r}; a {'' if float in kinds else 'whole '}number above 0 was wanted"
            )
    return found


def token_id(section: dict[str, Any], key: str, path: Path) -> int:
    """Raises: ModelError if it is no whole number."""
    value = wanted(section, key, path)
    if type(value) is not int:
        raise ModelError(f"{path}: {key}={value!r}; a whole number was wanted")
    return value


def layer_ids(section: dict[str, Any], key: str, path: Path) -> tuple[int, ...]:
    """Raises: ModelError if it is no list of whole numbers."""
    value = wanted(section, key, path)
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise ModelError(f"{path}: {key}={value!r}; a list of layers was wanted")
    return tuple(value)


def options_of(sections: Sequence[dict[str, Any]], kind: str, path: Path) -> dict[str, Any]:
    """A kind's own options, from the sections that may hold them.

    Raises: ModelError if one is in none of them, two values are there, or it is of another type.
    """
    options: dict[str, Any] = {}
    for name in option_names(kind):
        values = [section[name] for section in sections if section.get(name) is not None]
        if not values:
            raise ModelError(f"{path} has no {name}, and a guess would change what the drafter computes")
        if any(value != values[0] for value in values):
            raise ModelError(f"{path}: {name} is {values[0]!r} in one place and {values[1]!r} in another")
        options[name] = values[0]
    try:
        return drafter_class(kind).check_options(options)
    except ConfigError as error:
        raise ModelError(f"{path}: {error}") from error


def check_anchor(sections: Sequence[dict[str, Any]], kind: str, path: Path) -> None:
    """Whether slot 0 predicts as it does in this kind; of one whose slot 0 does, the file has to say so.

    Raises: ModelError.
    """
    predicts = predicts_from_anchor(kind)
    for section in sections:
        check_fixed(section, {ANCHOR_KEY: predicts}, path)
    if predicts and all(section.get(ANCHOR_KEY) is None for section in sections):
        raise ModelError(
            f"{path} has no {ANCHOR_KEY}: some engines then take slot 0 for the one that predicts the token after the "
            f"anchor, others for a slot that predicts nothing, and the wrong one accepts almost nothing. Write "
            f'"{ANCHOR_KEY}": true at the top level if slot 0 was trained'
        )


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
            f"{folder}: the weights do not match the configuration: missing {missing}, unexpected {unexpected}, "
            f"other shapes {shapes}"
        )
