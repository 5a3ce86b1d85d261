"""A target's folder, GGUF file or hub id: shape and taps from the configuration alone, its tokenizer, its text part.

Anything that is missing, left over or of another shape than expected is an error that names it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from paceline.errors import ConfigError, ModelError
from paceline.gguf_file import GGUFFile, find_gguf, load_gguf_tokenizer
from paceline.models import gated_delta
from paceline.models.adapter import Places, merge_adapter, read_settings
from paceline.models.dequantize import SUPPORTED, Quantization, open_weights, quantization_of, settings_of
from paceline.models.gguf import open_gguf_weights, read_configs
from paceline.models.split import device_map, place, starts_of

log = logging.getLogger(__name__)

_LEFT_OUT = re.compile(r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector|embed_vision|audio_tower|mtp)\.")
"""Checkpoint keys of parts that a text target does not use: vision, audio, multi-token prediction."""

_TEXT_PART = {r"^language_model\.(model|lm_head)\.": r"\1.", r"^model\.language_model\.": "model."}
"""Where wrapper checkpoints keep the text model; Transformers renames some families' keys by itself, not Gemma 3's."""


@dataclass(frozen=True)
class TargetShape:
    """What the rest of the project needs to know of a target, read from its configuration alone.

    Attributes:
        rope: Rotary settings of its (full-attention) layers: at least ``rope_type`` and ``rope_theta``.
        softcap: Soft cap of the final logits (Gemma 2), or None.
        logit_scale: Factor of the final logits, applied before the soft cap.
        eos_token_ids: Tokens that end a turn, from the generation settings or the configuration.
    """

    model_type: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any]
    softcap: float | None
    logit_scale: float
    tie_word_embeddings: bool
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]


def default_layer_ids(num_layers: int, num_taps: int = 5) -> tuple[int, ...]:
    """The published spread of taps, ``round(1 + i * (L - 4) / (K - 1))``; fewer where rounding would repeat one.

    Source: z-lab's DFlash code; Python's banker's rounding is part of it.
    Raises: ConfigError for a target of one layer, which has none below its last.
    """
    for taps in range(num_taps, 1, -1):
        ids = [round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps)]
        if ids == sorted(set(ids)) and ids[-1] <= num_layers - 2:
            return tuple(ids)
    if num_layers < 2:
        raise ConfigError(f"a target of {num_layers} layer has no layer below its last one to tap")
    return (min(num_layers // 2, num_layers - 2),)


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Taps as every engine reads them: ascending, without repeats, below the last layer.

    Engines collect features while they run the layers, so another order would be served ascending; and the entry after
    the last layer is normed in Transformers but not in engines.
    Raises: ConfigError naming the key and the value.
    """
    ids = tuple(layer_ids)
    seen = f"target.layer_ids={list(ids)}"
    if not ids:
        raise ConfigError(f"{seen} is empty: at least one layer has to be tapped")
    if any(not 0 <= i < num_layers for i in ids):
        raise ConfigError(f"{seen}: the target has {num_layers} layers, counted 0 to {num_layers - 1}")
    if list(ids) != sorted(set(ids)):
        raise ConfigError(f"{seen}: engines capture in ascending order, each layer once; write {sorted(set(ids))}")
    if ids[-1] == num_layers - 1:
        raise ConfigError(
            f"{seen}: layer {num_layers - 1} is the last one, whose output some engines read before and others after "
            f"the final norm; use {num_layers - 2} or lower"
        )
    return ids


def read_shape(path: str, revision: str | None = None, trust_remote_code: bool = False) -> TargetShape:
    """Shape of a target from its configuration; loads no weights. Raises: ModelError."""
    return shape_of(*load_configs(path, revision, trust_remote_code))


def load_tokenizer(path: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The target's own tokenizer. Raises: ModelError."""
    if (gguf := find_gguf(path)) is not None:
        return load_gguf_tokenizer(gguf)
    try:
        return transformers.AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer can be loaded from {path}: {first_line(error)}") from error


def load_text_model(
    path: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    adapter: str | None = None,
) -> Any:
    """The whole text part of a model folder or hub id, with a LoRA adapter merged if named. Raises: ModelError."""
    config, _ = load_configs(path, revision, trust_remote_code)
    return load_causal_lm(path, config, dtype, device, revision, trust_remote_code, adapter=adapter)


def load_causal_lm(
    path: str,
    config: Any,
    dtype: torch.dtype,
    device: torch.device | str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    num_layers: int | None = None,
    adapter: str | None = None,
    devices: Sequence[torch.device] = (),
    keeps_norm: bool = False,
) -> Any:
    """Load a causal LM's text part and check that nothing but the expected parts was left out.

    Quantised weights run as they are where Transformers has kernels for them here, and are dequantised otherwise; a
    line of the log and `quantization_note` say which.

    Args:
        num_layers: Layers kept; keys of later layers are expected leftovers. None: all of them.
        adapter: Folder of a LoRA adapter, merged on the CPU in any case: the same bits wherever the model then runs.
        devices: More than one: the layers are split over them, see `models.split`; the model's ``part_starts`` says
            where. Weights go straight there, where accelerate is installed and nothing is left to be done to them on
            the CPU; else by way of the host's memory, which has to hold them all.
        keeps_norm: The final norm runs too, with the last part.
    Raises: ModelError naming missing or unexpected keys, or a quantisation or adapter that cannot be loaded here.
    """
    if adapter is not None:
        read_settings(adapter)  # before the weights, which take long
    starts: tuple[int, ...] = ()
    device_of: Mapping[str, torch.device] | None = None
    if len(devices) > 1:
        skeleton = _without_weights(config, trust_remote_code)
        starts = starts_of(skeleton, config.num_hidden_layers, len(devices), keeps_norm)
        if adapter is None and importlib.util.find_spec("accelerate") is not None:
            device_of = device_map(skeleton, starts, devices)
    (model, loading), note = _load(path, config, dtype, device, revision, trust_remote_code, device_of)
    missing = sorted(loading["missing_keys"])
    unexpected = sorted(key for key in loading["unexpected_keys"] if not _is_leftover(key, num_layers))
    if missing or unexpected or loading["mismatched_keys"]:
        raise ModelError(
            f"target {path} does not match its configuration: missing {missing[:3]}, unexpected {unexpected[:3]}, "
            f"other shapes {sorted(map(str, loading['mismatched_keys']))[:3]}"
        )
    if adapter is not None:
        num_all = load_configs(path, revision, trust_remote_code)[0].num_hidden_layers
        places = Places(_TEXT_PART, _LEFT_OUT, num_all if num_layers is None else num_layers, num_all)
        merge_adapter(model, adapter, places, path)
    if starts:
        place(model, starts, devices)
        model.part_starts = starts
    elif model.device.type != torch.device(device).type:  # quantised ones may refuse to be moved even to where they are
        model = model.to(device)
    model.eval()
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # SDPA leaves the soft cap of scores out (Transformers 5.17)
    gated_delta.enable(model.get_decoder())
    model.quantization_note = note
    if note:
        log.info("target %s: %s", path, note)
    return model


def quantization_note(model: Any) -> str | None:
    """How a model's weights were quantised, and what `load_causal_lm` did with them; None for plain weights."""
    return getattr(model, "quantization_note", None)


def _load(
    path: str,
    config: Any,
    dtype: torch.dtype,
    device: torch.device | str,
    revision: str | None,
    trust_remote_code: bool,
    device_of: Mapping[str, torch.device] | None = None,
) -> tuple[Any, str | None]:
    """Model and loading information, and the note on its quantisation.

    Args:
        device_of: Where weights that are not made anew go, by name; None: the CPU, or `device` if it has to be.
    """
    common: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "key_mapping": _TEXT_PART,
        "ignore_mismatched_sizes": True,  # reported by the caller, by name
        "output_loading_info": True,
    }
    hub = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "use_safetensors": True,  # else it would also unpickle pytorch_model.bin
    }
    settings: Mapping[str, Any] = {}
    try:
        with quiet_transformers():
            if (gguf := find_gguf(path)) is not None:
                return _load_gguf(GGUFFile(gguf), common)
            written, _ = transformers.PretrainedConfig.get_config_dict(path, revision=revision)
            settings = settings_of(written)
            quantization = quantization_of(written, _exported_quantization(path, revision))
            if quantization is not None:
                return _load_quantized(path, quantization, common, hub, torch.device(device), device_of)
            if not settings:
                kwargs = common | hub | ({} if device_of is None else {"device_map": dict(device_of)})
                loaded = transformers.AutoModelForCausalLM.from_pretrained(path, **kwargs)
                return _without_hooks(loaded), None
            loaded = _load_as_it_is(path, settings, common | hub, torch.device(device), device_of)
            return loaded, f"{settings['quant_method']}, as Transformers runs it"
    except ImportError as error:
        raise ModelError(
            f"target {path} is quantised by {settings.get('quant_method')}, and what loads that is not installed: "
            f"{first_line(error)}. Install it, or take the checkpoint in bfloat16, or one in {SUPPORTED}"
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelError(f"target {path} cannot be loaded: {first_line(error)}") from error


def _load_quantized(
    path: str,
    quantization: Quantization,
    common: dict[str, Any],
    hub: dict[str, Any],
    device: torch.device,
    device_of: Mapping[str, torch.device] | None,
) -> tuple[Any, str]:
    """A checkpoint whose layout is known: FP8 as it is where that works, everything else dequantised.

    Four-bit weights with 16-bit activations compute the same as their dequantised selves, which are faster in training,
    where rows are long. NVFP4 and FP8 engines round activations too: only FP8's can be run here.
    """
    reason = ""
    if quantization.method == "fp8":
        why_not = _why_not_fp8(device)
        if why_not is None:
            try:
                loaded = _load_as_it_is(path, quantization.settings, common | hub, device, device_of)
                _try_fp8(loaded[0])
                return loaded, f"{quantization.label} weights run as they are"
            except Exception as error:  # kernels are fetched and built at their first use; anything may be wrong
                why_not, loaded = first_line(error), None
        reason = f" (FP8 cannot run here: {why_not})"
    if hasattr(common["config"], "quantization_config"):
        del common["config"].quantization_config
    weights, num_quantized = open_weights(_folder_of(path, hub["revision"]), quantization)
    dtype = str(common["dtype"]).removeprefix("torch.")
    note = f"{quantization.label}: {num_quantized} tensors dequantised to {dtype}{reason}"
    return _from_weights(weights, common), note


def _load_gguf(file: GGUFFile, common: dict[str, Any]) -> tuple[Any, str]:
    """A GGUF file, dequantised."""
    weights, kinds, num_quantized = open_gguf_weights(file)
    dtype = str(common["dtype"]).removeprefix("torch.")
    what = f"{num_quantized} tensors dequantised to {dtype}" if num_quantized else f"not quantised, as {dtype}"
    return _from_weights(weights, common), f"GGUF {kinds}: {what}"


def _from_weights(weights: dict[str, Any], common: dict[str, Any]) -> Any:
    """Model and loading information of a state dict."""
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(common["config"])]
    return model_class.from_pretrained(None, state_dict=weights, **common)


def _load_as_it_is(
    path: str,
    settings: Mapping[str, Any],
    kwargs: dict[str, Any],
    device: torch.device,
    device_of: Mapping[str, torch.device] | None,
) -> Any:
    """A quantised checkpoint by Transformers' own means; its text part gets the settings that its wrapper has."""
    kwargs["config"].quantization_config = dict(settings)
    if device.type != "cpu":
        kwargs = kwargs | {"device_map": {"": device} if device_of is None else dict(device_of)}
    return _without_hooks(transformers.AutoModelForCausalLM.from_pretrained(path, **kwargs))


def _without_weights(config: Any, trust_remote_code: bool) -> Any:
    """The model of a configuration, for its sizes and names."""
    with torch.device("meta"), quiet_transformers():
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def _without_hooks(loaded: Any) -> Any:
    """Take off what accelerate puts around the modules of a model on several devices: it would copy every argument at
    every layer anew."""
    for module in loaded[0].modules():
        if hasattr(module, "_hf_hook"):
            from accelerate.hooks import remove_hook_from_module  # type: ignore[import-untyped]

            remove_hook_from_module(module)
            vars(module).pop("forward", None)  # the class's own, which it leaves on the instance
    return loaded


def _why_not_fp8(device: torch.device) -> str | None:
    """What FP8 matrix products lack on this device; None if they may be tried."""
    if device.type != "cuda":
        return "no GPU"
    missing = [name for name in ("kernels", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        return f"`pip install {' '.join(missing)}` is missing"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "the GPU is older than Ada and Hopper"
    return None


def _try_fp8(model: Any) -> None:
    """Run one layer with FP8 weights. Raises: whatever its kernels raise."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dtype == torch.float8_e4m3fn and weight.dim() == 2:
            with torch.no_grad():
                module(torch.zeros(16, weight.shape[1], dtype=model.dtype, device=weight.device))
            return


def _exported_quantization(path: str, revision: str | None) -> dict[str, Any] | None:
    """What Model Optimizer writes beside a configuration, if it is there."""
    file = transformers.utils.cached_file(
        path,
        "hf_quant_config.json",
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return json.loads(Path(file).read_text(encoding="utf-8")) if file else None


def _folder_of(path: str, revision: str | None) -> Path:
    """The folder behind a path or hub id, its weights fetched."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.safetensors.index.json"]
    return Path(snapshot_download(path, revision=revision, allow_patterns=wanted))


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without Transformers' own progress bars and load report: the expected leftovers would read like a fault."""
    verbosity = transformers.utils.logging.get_verbosity()
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
        if bars:
            transformers.utils.logging.enable_progress_bar()


def load_configs(path: str, revision: str | None, trust_remote_code: bool) -> tuple[Any, Any]:
    """The configuration of the text part, and the generation settings or None. Raises: ModelError."""
    if (gguf := find_gguf(path)) is not None:
        return read_configs(GGUFFile(gguf))
    folder = Path(path).expanduser()
    if folder.exists() and not (folder / "config.json").is_file():
        raise ModelError(
            f"target {path} has no config.json: a Transformers model folder, a GGUF file or a hub id was wanted"
        )
    if not folder.exists():
        log.info("%s is no folder here: asking the hub for it", path)
    try:
        with quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(
                path, revision=revision, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # Transformers checks a foreign file with whatever it has
        hint = "" if folder.exists() else " (no such folder here, so it was taken as a hub id)"
        raise ModelError(f"target {path} cannot be read{hint}: {first_line(error)}") from error
    _warn_if_theta_is_a_default(path, revision, config.get_text_config())
    if config.is_encoder_decoder:
        raise ModelError(f"target {path} is an encoder-decoder ({config.model_type}); a decoder-only model was wanted")
    try:
        with quiet_transformers():
            generation = transformers.GenerationConfig.from_pretrained(path, revision=revision or "main")
    except OSError:  # many folders have none
        generation = None
    return config.get_text_config(), generation


def _warn_if_theta_is_a_default(path: str, revision: str | None, config: Any) -> None:
    """Transformers fills in a family's rope_theta in silence, and it becomes the drafter's as well."""
    written, _ = transformers.PretrainedConfig.get_config_dict(path, revision=revision)
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("full_attention", rope).get("rope_theta")
    text = {key: value for key, value in written.items() if not key.startswith(("vision", "audio"))}
    if theta is not None and "rope_theta" not in json.dumps(text, default=str):
        log.warning(
            "target %s has no rope_theta in its config.json; target and drafter use Transformers' default for %s, %g",
            path,
            config.model_type,
            theta,
        )


def shape_of(config: Any, generation: Any) -> TargetShape:
    """What two configurations of Transformers say. Raises: ModelError naming a key that is missing."""

    def wanted(*names: str) -> Any:
        for name in names:
            if getattr(config, name, None) is not None:
                return getattr(config, name)
        raise ModelError(f"the target's configuration ({config.model_type}) has no {names[0]}")

    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma 3 and later: one set a layer type
    if "rope_theta" not in rope:
        raise ModelError(
            f"the target's configuration ({config.model_type}) has no rope_theta: targets without rotary positions are "
            "not supported, and for others it is not guessed; add rope_parameters.rope_theta to its config.json"
        )
    num_heads = wanted("num_attention_heads")
    eos = generation.eos_token_id if generation is not None and generation.eos_token_id is not None else None
    eos = eos if eos is not None else getattr(config, "eos_token_id", None)
    scaling = getattr(config, "logits_scaling", None)  # Granite divides by it, Cohere multiplies by logit_scale
    return TargetShape(
        model_type=config.model_type,
        architecture=(config.architectures or ["?"])[0],
        hidden_size=wanted("hidden_size"),
        intermediate_size=wanted("intermediate_size", "moe_intermediate_size"),
        num_layers=wanted("num_hidden_layers"),
        vocab_size=wanted("vocab_size"),
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        max_position_embeddings=wanted("max_position_embeddings"),
        rope=dict(rope),
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=1.0 / scaling if scaling else float(getattr(config, "logit_scale", None) or 1.0),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        pad_token_id=getattr(config, "pad_token_id", None),
        eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else (() if eos is None else (eos,)),
    )


def _is_leftover(key: str, num_layers: int | None) -> bool:
    if _LEFT_OUT.search(key) or key.endswith("rotary_emb.inv_freq") or "lm_head" in key:
        return True
    layer = re.search(r"(^|\.)layers\.(\d+)\.", key)
    return layer is not None and num_layers is not None and int(layer[2]) >= num_layers


def first_line(error: BaseException) -> str:
    """First line of a foreign message, or the kind of the error where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
