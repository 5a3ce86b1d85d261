"""Quantised checkpoints as the plain weights that they stand for, one tensor at a time.

A drafter has to be trained on the taps of the weights that will be served, and most served weights are quantised. The
layouts that are found on the hub are read here, so that no quantisation package is needed: FP8 (scales of a tensor, of
its rows, or of blocks), NVFP4 and MXFP4, GPTQ, AWQ, and the integers of compressed-tensors. Scales are applied in
float32, in which a stored number is exact, and the product is rounded once to the type that is asked for.

Shapes are those of Transformers' linear layers: a weight is ``[out, in]``, a group is a run of inputs.
Sources: compressed-tensors 0.20 (packed integers, NVFP4), NVIDIA Model Optimizer's exported checkpoints (FP8, NVFP4),
AutoAWQ's GEMM layout, AutoGPTQ's and GPTQModel's layouts ("v1" and "v2").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from paceline.errors import ModelError
from paceline.files import child

SUPPORTED = "FP8, compressed-tensors, NVFP4 or MXFP4 (Model Optimizer), GPTQ, or AWQ in the GEMM layout"

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1_PAIRS = torch.stack(torch.meshgrid(torch.cat([_E2M1, -_E2M1]), torch.cat([_E2M1, -_E2M1]), indexing="ij"), -1)
_E2M1_PAIRS = _E2M1_PAIRS.flip(-1).reshape(256, 2)
"""Both numbers of a byte, the one in its low half first: float32 ``[256, 2]``."""

_AWQ_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Where AWQ keeps each of eight columns in an int32: column 1 is the fifth group of bits."""

_DTYPES_OF_NUMBERS = ("F8_E4M3", "F8_E5M2", "U8", "I8", "I32")
_SCALES = ("weight_scale_inv", "weight_scale", "scale")
_FP4_SCALES = ("F8_E4M3", "F8_E8M0", "U8")
_USED_UP = (
    *("weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_zero_point"),
    *("weight_shape", "weight_g_idx", "qzeros", "scales", "g_idx"),
)
_OF_ACTIVATIONS = (
    *("input_scale", "input_scale_ub", "input_global_scale", "input_zero_point"),
    *("activation_scale", "output_scale"),
)
_OF_CACHES = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale")


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint says that it is quantised.

    Attributes:
        method: ``fp8``, ``compressed-tensors``, ``modelopt``, ``gptq`` or ``awq``.
        label: The same for people, with what narrows it down.
        settings: Its own words.
    """

    method: str
    label: str
    settings: Mapping[str, Any]


def quantization_of(config: Mapping[str, Any], exported: Mapping[str, Any] | None = None) -> Quantization | None:
    """What a checkpoint's configuration says; None if its weights are plain, or of a kind that is not read here.

    Args:
        config: Its ``config.json``.
        exported: Its ``hf_quant_config.json``, which Model Optimizer writes.
    Raises: ModelError for a variant of a supported kind that is not.
    """
    settings = settings_of(config)
    method = str(settings.get("quant_method", "")).lower()
    if exported and method in ("", "modelopt", "modelopt_fp4"):
        settings, method = {**exported.get("quantization", exported), **settings}, "modelopt"
    if method in ("fp8", "fbgemm_fp8"):
        block = settings.get("weight_block_size")
        return Quantization("fp8", f"FP8 (blocks of {block[0]} x {block[1]})" if block else "FP8", settings)
    if method in ("compressed-tensors", "compressed_tensors"):
        kind = settings.get("format", "?")
        if str((settings.get("sparsity_config") or {}).get("format", "dense")) != "dense" or str(kind).startswith(
            "sparse"
        ):
            raise ModelError(f"compressed-tensors with sparse weights ({kind}) is not supported; {_instead()}")
        return Quantization("compressed-tensors", f"compressed-tensors {kind}", settings)
    if method in ("modelopt", "modelopt_fp4"):
        return Quantization("modelopt", f"Model Optimizer {settings.get('quant_algo', 'NVFP4')}", settings)
    if method == "gptq":
        bits, kind = settings.get("bits"), settings.get("checkpoint_format", "gptq")
        if bits not in (2, 4, 8) or kind not in ("gptq", "gptq_v2"):
            raise ModelError(f"GPTQ with {bits} bits in the layout {kind} is not supported; {_instead()}")
        return Quantization("gptq", f"GPTQ, {bits} bits", settings)
    if method == "awq":
        bits, kind = settings.get("bits", settings.get("w_bit")), str(settings.get("version", "gemm")).lower()
        if bits != 4 or kind != "gemm":
            raise ModelError(f"AWQ with {bits} bits in the layout {kind} is not supported; {_instead()}")
        return Quantization("awq", "AWQ, 4 bits", settings)
    return None


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A checkpoint's quantisation in its ``config.json``, read here or not; its ``quant_method`` names it."""
    text = config.get("text_config") or {}
    for place in (config, text):
        for key in ("quantization_config", "compression_config"):
            if place.get(key):
                settings = place[key]
                return settings if "quant_method" in settings else {"quant_method": "compressed-tensors", **settings}
    return {}


def _instead() -> str:
    return f"take the checkpoint in bfloat16, or one in {SUPPORTED}"


# ------------------------------------------------------------------ a folder as a state dict


class LazyTensor:
    """A tensor that is made when it is indexed, as Transformers does with a tensor of a safetensors file."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make

    def __getitem__(self, index: Any) -> Tensor:
        return self._make()[index]


class _Checkpoint:
    """The tensors of a folder's safetensors files, by name."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for path in _weight_files(folder):
            file = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Any:
        return iter(self._files)

    def slice(self, name: str) -> Any:
        return self._files[name].get_slice(name)

    def dtype(self, name: str) -> str:
        return self.slice(name).get_dtype()

    def shape(self, name: str) -> list[int]:
        return self.slice(name).get_shape()

    def read(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    try:
        files = [child(folder, name) for name in names]
    except ValueError as error:
        raise ModelError(f"{index} is damaged: {error}") from error
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(f"{folder} has no {missing[0]}: quantised weights are read from safetensors files only")
    return files


def open_weights(folder: Path, quantization: Quantization) -> tuple[dict[str, Any], int]:
    """State dict of a quantised folder, whose tensors are read and dequantised when they are indexed.

    Returns: tensors (lazy ones, in float32 where they were quantised) by the names of the plain checkpoint, and how
        many were quantised.
    Raises: ModelError for a quantised tensor of unknown layout, and where there is none.
    """
    checkpoint = _Checkpoint(folder)
    weights: dict[str, Any] = {}
    num_quantized = 0
    for name in checkpoint:
        prefix, _, last = name.rpartition(".")
        if last in (*_OF_ACTIVATIONS, *_OF_CACHES) or _is_used_up(checkpoint, prefix, last):
            continue
        if last in ("qweight", "weight_packed"):
            make: Callable[[], Tensor] | None = _packed(checkpoint, prefix, last, quantization)
            name = f"{prefix}.weight"
        else:
            make = _scaled(checkpoint, name, quantization)
        if make is not None:
            num_quantized += 1
            weights[name] = LazyTensor(make)
        elif checkpoint.dtype(name) in _DTYPES_OF_NUMBERS:
            raise ModelError(f"{name} ({checkpoint.dtype(name)}) has no scales that {quantization.label} explains")
        else:
            weights[name] = checkpoint.slice(name)
    if not num_quantized:
        raise ModelError(f"{folder} is said to be quantised ({quantization.label}), but none of its tensors is")
    return weights, num_quantized


def _is_used_up(checkpoint: _Checkpoint, prefix: str, last: str) -> bool:
    """Whether a tensor only serves to dequantise another."""
    if last in _USED_UP or last == "scale":
        weights = [f"{prefix}.{weight}" for weight in ("weight", "weight_packed", "qweight")]
        return any(name in checkpoint and checkpoint.dtype(name) in _DTYPES_OF_NUMBERS for name in weights)
    stem = last.removesuffix("_scale_inv")
    return stem != last and f"{prefix}.{stem}" in checkpoint  # fused experts: gate_up_proj, gate_up_proj_scale_inv


def _scaled(checkpoint: _Checkpoint, name: str, quantization: Quantization) -> Callable[[], Tensor] | None:
    """How to make a weight that keeps its name; None for a plain one."""
    if checkpoint.dtype(name) not in _DTYPES_OF_NUMBERS:
        return None
    prefix, _, last = name.rpartition(".")
    scales = [f"{prefix}.{scale}" for scale in _SCALES] if last == "weight" else [f"{name}_scale_inv"]
    scale = next((each for each in scales if each in checkpoint), None)
    if scale is None:
        return None
    if checkpoint.dtype(name) == "U8":
        if checkpoint.dtype(scale) not in _FP4_SCALES:  # else these are integers
            return None
        whole = f"{prefix}.weight_scale_2"
        factor = whole if whole in checkpoint else None
        return lambda: fp4(
            checkpoint.read(name), checkpoint.read(scale), factor=checkpoint.read(factor) if factor else None
        )
    zero = f"{prefix}.weight_zero_point" if f"{prefix}.weight_zero_point" in checkpoint else None
    block = _block_of(quantization.settings)
    _check_blocks(name, checkpoint.shape(name), checkpoint.shape(scale), block)
    return lambda: scaled(checkpoint.read(name), checkpoint.read(scale), checkpoint.read(zero) if zero else None, block)


def _packed(checkpoint: _Checkpoint, prefix: str, last: str, quantization: Quantization) -> Callable[[], Tensor]:
    """How to make the weight of a layer whose numbers lie several to a word."""

    def read(part: str) -> Tensor | None:
        name = f"{prefix}.{part}"
        return checkpoint.read(name) if name in checkpoint else None

    def wanted(part: str) -> Tensor:
        found = read(part)
        assert found is not None
        return found

    def need(*parts: str) -> None:
        for part in parts:
            if f"{prefix}.{part}" not in checkpoint:
                raise ModelError(f"{prefix}.{last} has no {part}, which {quantization.label} needs")

    if last == "weight_packed":
        need("weight_scale")
        if checkpoint.dtype(f"{prefix}.weight_packed") == "U8":
            return lambda: fp4(wanted("weight_packed"), wanted("weight_scale"), divisor=read("weight_global_scale"))
        need("weight_shape")
        return lambda: packed_integers(
            wanted("weight_packed"),
            wanted("weight_scale"),
            read("weight_zero_point"),
            read("weight_g_idx"),
            [int(n) for n in wanted("weight_shape")],
        )
    if quantization.method not in ("awq", "gptq"):
        raise ModelError(f"{prefix}.qweight is GPTQ's or AWQ's, but the configuration says {quantization.label}")
    need("qzeros", "scales")
    words, scales = checkpoint.shape(f"{prefix}.qweight"), checkpoint.shape(f"{prefix}.scales")
    if quantization.method == "awq":
        if words[1] * 8 != scales[1]:
            raise ModelError(f"{prefix}.qweight {words} with scales {scales} is not AWQ's GEMM layout; {_instead()}")
        return lambda: awq(wanted("qweight"), wanted("qzeros"), wanted("scales"))
    bits = quantization.settings["bits"]
    if words[1] != scales[1]:
        raise ModelError(f"{prefix}.qweight {words} with scales {scales} is not GPTQ's layout; {_instead()}")
    first_zero = 0 if quantization.settings.get("checkpoint_format") == "gptq_v2" else 1
    return lambda: gptq(wanted("qweight"), wanted("qzeros"), wanted("scales"), read("g_idx"), bits, first_zero)


def _block_of(settings: Mapping[str, Any]) -> list[int] | None:
    """Outputs and inputs of a block that has a scale of its own, where the configuration tells."""
    for group in (settings.get("config_groups") or {}).values():
        if (group.get("weights") or {}).get("block_structure"):
            return list(group["weights"]["block_structure"])
    return settings.get("weight_block_size")


def _check_blocks(name: str, shape: list[int], scale: list[int], block: list[int] | None) -> None:
    if len(scale) < 2 or len(shape) < 2:
        return
    for size, count, length in zip(shape[-2:], scale[-2:], block or (None, None), strict=True):
        if count != 1 and size % count and (length is None or -(-size // length) != count):
            raise ModelError(f"{name} {shape} cannot be cut into blocks for scales {scale}; {_instead()}")


# ------------------------------------------------------------------ the layouts


def scaled(weight: Tensor, scale: Tensor, zero_point: Tensor | None = None, block: list[int] | None = None) -> Tensor:
    """Numbers times their scales: FP8 and int8.

    Args:
        weight: ``[..., out, in]``.
        scale: Of everything (a scalar or ``[1]``), of outputs (``[out]`` or ``[out, 1]``), or of blocks
            ``[..., rows, columns]``; powers of two may be stored as their exponents (uint8).
        zero_point: Like `scale`; taken off before.
        block: Outputs and inputs of a block, the last one cut short where they do not divide the weight; None: they do.
    """
    numbers = weight.float()
    if zero_point is not None:
        numbers = numbers - _spread(zero_point.float(), weight.shape, block)
    return numbers * _spread(_as_factor(scale), weight.shape, block)


def _spread(scale: Tensor, shape: torch.Size, block: list[int] | None) -> Tensor:
    """Scales in a shape that multiplies a weight's."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() == 1:
        return scale[:, None]
    for dim, length in zip((-2, -1), block or (None, None), strict=True):
        count, size = scale.shape[dim], shape[dim]
        if count not in (1, size):
            repeats = size // count if size % count == 0 and length is None else length
            assert repeats is not None
            scale = scale.repeat_interleave(repeats, dim).narrow(dim, 0, size)
    return scale


def _as_factor(scale: Tensor) -> Tensor:
    """A scale as float32; uint8 holds exponents of two, 127 more than they are."""
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def fp4(packed: Tensor, scale: Tensor, factor: Tensor | None = None, divisor: Tensor | None = None) -> Tensor:
    """NVFP4 and MXFP4: two E2M1 numbers a byte, one scale for each run of inputs.

    Args:
        packed: uint8 ``[..., out, in / 2]``; the low half of a byte is the first of its two numbers.
        scale: ``[..., out, in / run]``: E4M3 of runs of 16 (NVFP4), or exponents of two of runs of 32 (MXFP4).
        factor: float32 of the whole matrix (NVFP4): Model Optimizer's ``weight_scale_2``. One each for several.
        divisor: The same the other way round: compressed-tensors' ``weight_global_scale``.
    """
    numbers = _E2M1_PAIRS.index_select(0, packed.flatten().int()).view(*packed.shape[:-1], scale.shape[-1], -1)
    scale = _as_factor(scale)
    if factor is not None:
        scale = scale * _of_matrix(factor, scale)
    if divisor is not None:
        scale = scale / _of_matrix(divisor, scale)
    return (numbers * scale[..., None]).flatten(-2)


def _of_matrix(number: Tensor, scale: Tensor) -> Tensor:
    """One number for all of a matrix, or one for each of several, in a shape that multiplies their scales."""
    return number.float().reshape(()) if number.numel() == 1 else number.float().view(-1, *[1] * (scale.dim() - 1))


def awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """AWQ, 4 bits, GEMM layout: weights ``[out, in]``.

    Args:
        qweight: int32 ``[in, out / 8]``; eight outputs a word, in the order of `_AWQ_PLACES`.
        qzeros: int32 ``[groups, out / 8]``, packed alike.
        scales: float16 ``[groups, out]``.
    """
    numbers, zeros = (_unpack(words, 4, _AWQ_PLACES) for words in (qweight, qzeros))
    group = _runs(len(numbers), len(scales))
    return ((numbers - zeros[group]) * scales.float()[group]).T.contiguous()


def gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, bits: int, first_zero: int = 1
) -> Tensor:
    """GPTQ: weights ``[out, in]``.

    Args:
        qweight: int32 ``[in * bits / 32, out]``; a word holds consecutive inputs, the first in its lowest bits.
        qzeros: int32 ``[groups, out * bits / 32]``; a word holds consecutive outputs.
        scales: float16 ``[groups, out]``.
        g_idx: int32 ``[in]``, each input's group, which `desc_act` shuffles; None: consecutive runs.
        bits: 2, 4 or 8.
        first_zero: Added to the zeros: 1 in the usual layout ("v1"), which stores one less, 0 in "v2". Not brought
            back into the bits' range, as serving engines do not either.
    """
    numbers = _unpack(qweight.T, bits).T  # [in, out]
    zeros = _unpack(qzeros, bits) + first_zero
    group = _runs(len(numbers), len(scales)) if g_idx is None else g_idx.long()
    return ((numbers - zeros[group]) * scales.float()[group]).T.contiguous()


def packed_integers(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, g_idx: Tensor | None, shape: list[int]
) -> Tensor:
    """Compressed-tensors' ``pack-quantized``: weights ``[out, in]``.

    Args:
        packed: int32 ``[out, in * bits / 32]``; numbers around zero, stored with half their range added, the first
            input in the lowest bits.
        scale: ``[out, groups]`` or ``[out, 1]``.
        zero_point: int32 ``[out * bits / 32, groups]``, packed along the outputs; None: 0.
        g_idx: int32 ``[in]``, each input's group; None or negative: consecutive runs.
        shape: ``[out, in]``.
    Raises: ModelError for a number of bits that does not divide a word.
    """
    num_out, num_in = shape
    bits = next((b for b in (2, 4, 8) if -(-num_in * b // 32) == packed.shape[1]), None)
    if bits is None:
        raise ModelError(f"weights of {shape} in {list(packed.shape)} words are not 2, 4 or 8 bits each; {_instead()}")
    middle = 1 << (bits - 1)
    numbers = _unpack(packed, bits)[:, :num_in] - middle
    has_order = g_idx is not None and bool((g_idx >= 0).all())
    group = g_idx.long() if g_idx is not None and has_order else _runs(num_in, scale.shape[1])
    if zero_point is not None:
        numbers = numbers - (_unpack(zero_point.T, bits).T[:num_out] - middle)[:, group]
    return numbers * scale.float()[:, group]


def _runs(num_in: int, num_groups: int) -> Tensor:
    """Group of each input where groups are consecutive runs of one length; int64 ``[in]``."""
    if num_in % num_groups:
        raise ModelError(f"{num_in} inputs cannot be cut into {num_groups} groups of one size; {_instead()}")
    return torch.arange(num_in) // (num_in // num_groups)


def _unpack(words: Tensor, bits: int, places: Tensor | None = None) -> Tensor:
    """Unsigned numbers of int32 words along the last dimension, as float32; `places`: where in a word each one lies."""
    places = torch.arange(32 // bits) if places is None else places
    numbers = (words[..., None] >> (places * bits).int()) & ((1 << bits) - 1)
    return numbers.flatten(-2).float()
