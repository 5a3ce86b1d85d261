"""A LoRA adapter, as PEFT writes it, merged into a loaded target: what is trained for is what is served.

PEFT's own layers do the arithmetic, here on a float32 copy of one weight at a time, so that each changed weight is
rounded once, to its own type. What PEFT 0.21 does by itself: `merge_and_unload()` computes the change in float32 (its
adapters are float32 unless `autocast_adapter_dtype=False`) and adds it in place, which rounds once as well and gives
the same bits. With `safe_merge=True`, or without that cast, the change is rounded to the weight's type and the sum once
more: one bfloat16 weight in a hundred is then its neighbour (SmolLM2-135M, rank 16, all linear layers).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.files import sha256

log = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"
_NAME = "default"
_PREFIX = "base_model.model."

_REFUSED = {
    "target_parameters": "it changes parameters of fused experts",
    "trainable_token_indices": "it replaces rows of the embedding",
    "layer_replication": "it was trained on a model with repeated layers",
    "alora_invocation_tokens": "it acts only behind certain tokens, which no merged weight does",
    "arrow_config": "it mixes adapters by their input",
    "use_qalora": "it adds to pooled inputs",
    "use_bdlora": "its factors are block-diagonal",
    "kasa_config": "it scales singular values",
    "monteclora_config": "its factors are sampled",
    "velora_config": "it is trained on compressed inputs",
    "megatron_config": "its layers are Megatron's",
}
"""Settings of a LoRA that make it something else than a change of plain weights, or that no test here covers."""

_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that take something out of the base weights; adapters as they were trained fit to what is left."""

_PART = re.compile(
    r"^(?P<module>.+)\.(?P<part>lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))"
    rf"(?:\.{_NAME})?(?:\.(?P<leaf>weight|bias))?$"
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Places:
    """How keys of an adapter find their places in the text part of a model.

    Attributes:
        text_part: Patterns of wrappers' names, and what the text model has instead.
        left_out: Keys of parts that a text target does not have.
        num_layers: Layers that are kept.
        num_all_layers: Layers of the whole model.
    """

    text_part: Mapping[str, str]
    left_out: re.Pattern[str]
    num_layers: int
    num_all_layers: int

    def name(self, key: str) -> str:
        """The name in the text model."""
        for pattern, text in self.text_part.items():
            key = re.sub(pattern, text, key)
        return key

    def is_past_cut(self, name: str) -> bool:
        """Whether it belongs to a layer that is not kept."""
        layer = _LAYER.search(name)
        return layer is not None and self.num_layers <= int(layer[1]) < self.num_all_layers


@dataclass
class _Lora:
    """The factors of one weight.

    Attributes:
        trained_name: Of its module in the model that was trained; patterns of ranks go by it.
        tensors: By part and leaf, such as ``lora_A.weight``.
        keys: The file's key of each.
    """

    trained_name: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


def merge_adapter(model: Any, folder: str | Path, places: Places, base: str) -> None:
    """Merge a LoRA adapter into a loaded causal LM, in place, and say so in the log.

    Tied embeddings are parted where the adapter changes one of the two, as it was trained; the model's configuration
    then says so.

    Args:
        model: A Transformers causal LM with plain weights; all or the first of its layers.
        folder: PEFT's, with ``adapter_config.json`` and ``adapter_model.safetensors``.
        base: Where the model is from, to be compared with the name that the adapter has for its own.
    Raises: ModelError naming what is missing, left over, of another shape or kind, or not finite; the model is then of
        no use.
    """
    folder = Path(folder).expanduser()
    settings = read_settings(folder)
    peft = _peft()
    tensors = _read_tensors(folder)
    loras, whole, num_past_cut = _sorted_tensors(folder, tensors, places)
    modules = dict(model.named_modules())
    lost = [key for name, lora in loras.items() if name not in modules for key in lora.keys.values()]
    lost += [key for key, (name, _) in whole.items() if _owner(modules, name) is None]
    if lost:
        raise ModelError(
            f"adapter {folder}: {len(lost)} of its keys have no place in {base}, such as {lost[:3]}; it belongs to "
            f"another model ({settings.get('base_model_name_or_path') or 'it does not say which'})"
        )
    if not loras and not whole and not num_past_cut:
        raise ModelError(f"adapter {folder}: {WEIGHTS_FILE} holds no weight of a text model")
    trained_on = settings.get("base_model_name_or_path")
    if trained_on and str(trained_on).rstrip("/") != str(base).rstrip("/"):
        log.info("adapter %s was trained on %s, and is merged into %s", folder, trained_on, base)
    was_tied = _is_tied(model)
    num_replaced = sum(_replace(folder, modules, key, name, tensor) for key, (name, tensor) in whole.items())
    if loras:
        _merge_loras(peft, model, folder, settings, loras)
    if was_tied and not _is_tied(model):
        if settings.get("ensure_weight_tying"):
            _tie_again(model, changed={*loras, *(name.rpartition(".")[0] for name, _ in whole.values())})
        model.config.tie_word_embeddings = _is_tied(model)
    num_left_out = len(tensors) - len(whole) - sum(len(lora.tensors) for lora in loras.values())
    kinds = [name for name, key in (("rsLoRA", "use_rslora"), ("DoRA", "use_dora")) if settings.get(key)]
    log.info(
        "adapter %s (%s, rank %s): %d weights merged, %d replaced%s",
        folder,
        " with ".join(kinds) or "LoRA",
        settings["r"],
        len(loras),
        num_replaced,
        f"; {num_left_out} of its tensors are for parts that are not loaded" if num_left_out else "",
    )


def read_settings(place: str | Path) -> dict[str, Any]:
    """``adapter_config.json`` of a LoRA that can be merged. Raises: ModelError saying why another one cannot."""
    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise ModelError(f"adapter {folder} is no folder here: one that PEFT wrote was wanted, with {CONFIG_FILE}")
    try:
        settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"adapter {folder} has no {CONFIG_FILE}: a folder that PEFT wrote was wanted") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"adapter {folder}: {CONFIG_FILE} cannot be read: {error}") from error
    kind = settings.get("peft_type") if isinstance(settings, dict) else None
    if kind != "LORA":
        raise ModelError(f"adapter {folder} is of type {kind}: only LORA is merged into weights here")
    for key, reason in _REFUSED.items():
        if settings.get(key):
            raise ModelError(
                f"adapter {folder} has {key}={settings[key]!r}, which cannot be merged here: {reason}. Where PEFT can "
                "merge it (`merge_and_unload`), name the folder with the merged model as target.path"
            )
    init = str(settings.get("init_lora_weights"))
    if init.startswith(_CHANGED_BASE):
        raise ModelError(
            f"adapter {folder} has init_lora_weights={init!r}: it fits base weights that its start has changed. Save "
            "it as a plain LoRA (PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    if bad := [key for key in ("r", "lora_alpha") if not isinstance(settings.get(key), int | float)]:
        raise ModelError(f"adapter {folder}: {CONFIG_FILE} has no number for {bad[0]}")
    return settings


def adapter_fingerprint(place: str | Path) -> str:
    """SHA-256 over the files of an adapter. Raises: ModelError if they are not there."""
    folder = Path(place).expanduser()
    try:
        parts = [sha256(path) for path in (folder / CONFIG_FILE, _weights_file(folder))]
    except OSError as error:
        raise ModelError(f"adapter {folder}: {error.filename} cannot be read: {error.strerror}") from error
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            'adapters are merged by the package `peft`, which is not here: pip install "paceline[adapter]"'
        ) from error
    return peft


def _weights_file(folder: Path) -> Path:
    """Raises: ModelError if it is not there."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickle = (folder / _PICKLE_FILE).is_file()
        why = (
            f"{_PICKLE_FILE} is a pickle, which runs code when it is read: save it anew with a PEFT of today"
            if pickle
            else "there are no weights"
        )
        raise ModelError(f"adapter {folder} has no {WEIGHTS_FILE}: {why}")
    return path


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """The adapter's tensors by key, on the CPU. Raises: ModelError."""
    path = _weights_file(folder)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"adapter {path} cannot be read: {error}") from error
    if bad := [key for key, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise ModelError(f"adapter {path}: {len(bad)} tensors are not finite, such as {bad[:3]}: its training failed")
    return tensors


def _sorted_tensors(
    folder: Path, tensors: Mapping[str, Tensor], places: Places
) -> tuple[dict[str, _Lora], dict[str, tuple[str, Tensor]], int]:
    """Factors by module; whole tensors (`modules_to_save`) with their names, by key; and how many are past the cut."""
    loras: dict[str, _Lora] = {}
    whole: dict[str, tuple[str, Tensor]] = {}
    num_past_cut = 0
    for key, tensor in tensors.items():
        trained = key.removeprefix(_PREFIX)
        name = places.name(trained).replace(".base_layer.", ".")
        if places.left_out.search(name):
            continue
        if places.is_past_cut(name):
            num_past_cut += 1
            continue
        match = _PART.match(name)
        if match is None:
            whole[key] = name, tensor
            continue
        at_training = _PART.match(trained)
        lora = loras.setdefault(match["module"], _Lora(at_training["module"] if at_training else match["module"]))
        part = f"{match['part']}.{match['leaf'] or 'weight'}"
        if part in lora.tensors:
            raise ModelError(f"adapter {folder}: {lora.keys[part]} and {key} are for the same weight")
        lora.tensors[part], lora.keys[part] = tensor.float(), key
    return loras, whole, num_past_cut


def _owner(modules: Mapping[str, nn.Module], name: str) -> tuple[nn.Module, str] | None:
    """The module that has this parameter, and its name there."""
    place, _, leaf = name.rpartition(".")
    module = modules.get(place)
    return (module, leaf) if module is not None and leaf in module._parameters else None


def _replace(folder: Path, modules: Mapping[str, nn.Module], key: str, name: str, tensor: Tensor) -> bool:
    """Put a whole tensor in the place of a parameter; whether that changed anything."""
    owner = _owner(modules, name)
    assert owner is not None
    module, leaf = owner
    old: Tensor = getattr(module, leaf)
    if old.shape != tensor.shape:
        raise ModelError(f"adapter {folder}: {key} is {list(tensor.shape)}, the target's {name} {list(old.shape)}")
    _check_plain(folder, name, old)
    new = tensor.to(old)
    if torch.equal(new, old):  # PEFT also writes embeddings that it left as they were
        return False
    setattr(module, leaf, nn.Parameter(new, requires_grad=False))  # a new one: what was tied to it stays
    return True


def _check_plain(folder: Path, name: str, weight: object) -> None:
    if not isinstance(weight, Tensor) or weight.dtype not in _PLAIN:
        kind = str(weight.dtype).removeprefix("torch.") if isinstance(weight, Tensor) else "quantised"
        raise ModelError(
            f"adapter {folder}: the target's {name} is {kind}, and a change that small is lost in such a weight. Merge "
            "it into the model in bfloat16 (`paceline merge`), and quantise that"
        )


def _merge_loras(peft: Any, model: Any, folder: Path, settings: Mapping[str, Any], loras: Mapping[str, _Lora]) -> None:
    ranks = {name: _setting(settings, "rank_pattern", "r", lora.trained_name) for name, lora in loras.items()}
    alphas = {
        name: _setting(settings, "alpha_pattern", "lora_alpha", lora.trained_name) for name, lora in loras.items()
    }
    for name in loras:
        _check_plain(folder, f"{name}.weight", getattr(model.get_submodule(name), "weight", None))
    try:
        config = peft.LoraConfig(
            r=settings["r"],
            lora_alpha=settings["lora_alpha"],
            target_modules=list(loras),
            rank_pattern={re.escape(name): rank for name, rank in ranks.items() if rank != settings["r"]},
            alpha_pattern={re.escape(name): alpha for name, alpha in alphas.items() if alpha != settings["lora_alpha"]},
            use_rslora=bool(settings.get("use_rslora")),
            use_dora=bool(settings.get("use_dora")),
            lora_bias=bool(settings.get("lora_bias")),
            init_lora_weights=False,
        )
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of tied weights, which are parted below
            tuner = peft.LoraModel(model, config, _NAME, low_cpu_mem_usage=True)
            for name, lora in loras.items():
                layer = model.get_submodule(name)
                _fill(folder, layer, lora)
                _merge_layer(layer)
            tuner.unload()
    except ModelError:
        raise
    except (ValueError, RuntimeError, TypeError) as error:  # PEFT's own
        raise ModelError(f"adapter {folder} cannot be merged: {str(error).strip() or type(error).__name__}") from error


def _setting(settings: Mapping[str, Any], patterns: str, default: str, module: str) -> Any:
    """A rank or alpha as PEFT reads it: the first pattern that the end of the module's name matches."""
    for pattern, value in (settings.get(patterns) or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise ModelError(f"{patterns} in {CONFIG_FILE}: {pattern!r} is no pattern: {error}") from error
    return settings[default]


def _fill(folder: Path, layer: Any, lora: _Lora) -> None:
    """Put the factors into PEFT's layer, in float32. Raises: ModelError naming keys of another shape or missing."""
    left = dict(lora.tensors)
    for part, holder, attribute in _slots(layer):
        tensor, wanted = left.pop(part, None), getattr(holder, attribute).shape
        if tensor is None:
            raise ModelError(f"adapter {folder}: beside {sorted(lora.keys.values())} there is no {part}")
        if tensor.shape != wanted:
            raise ModelError(
                f"adapter {folder}: {lora.keys[part]} is {list(tensor.shape)}; {list(wanted)} follows from the "
                f"target's weight and the rank in {CONFIG_FILE}"
            )
        setattr(holder, attribute, nn.Parameter(tensor, requires_grad=False))
    if left:
        raise ModelError(f"adapter {folder}: {CONFIG_FILE} has no use for {[lora.keys[part] for part in left][:3]}")


def _slots(layer: Any) -> Iterator[tuple[str, nn.Module, str]]:
    """Where PEFT's layer has its factors: part and leaf, what holds it, and its name there."""
    for part in ("lora_A", "lora_B", "lora_magnitude_vector"):
        if _NAME in getattr(layer, part):
            holder = getattr(layer, part)[_NAME]
            for leaf, _ in holder.named_parameters(recurse=False):
                yield f"{part}.{leaf}", holder, leaf
    for part in ("lora_embedding_A", "lora_embedding_B"):
        if _NAME in getattr(layer, part):
            yield f"{part}.weight", getattr(layer, part), _NAME


def _merge_layer(layer: Any) -> None:
    """Merge in float32, and round once."""
    base = layer.get_base_layer()
    kinds = {name: parameter.dtype for name, parameter in base.named_parameters(recurse=False)}
    for name in kinds:  # new parameters, so that what is tied to the old ones stays as it is
        setattr(base, name, nn.Parameter(getattr(base, name).detach().float(), requires_grad=False))
    layer.merge(safe_merge=True)  # "safe": of a copy, and refused if it is not finite
    for name, kind in kinds.items():
        setattr(base, name, nn.Parameter(getattr(base, name).detach().to(kind), requires_grad=False))


def _is_tied(model: Any) -> bool:
    """Whether embedding and head are one parameter."""
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def _tie_again(model: Any, changed: set[str]) -> None:
    """`ensure_weight_tying`: PEFT kept one parameter, and wrote it under one name or both."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    if names[embedding] in changed:
        head.weight = embedding.weight
    else:
        embedding.weight = head.weight
