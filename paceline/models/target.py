"""The frozen target: any Transformers decoder-only model, cut after its last tapped layer.

A tap is the residual stream after decoder layer i (Transformers' ``hidden_states[i + 1]``), before any norm. Layers
past the last tap, the final norm and the language-model head are not run in training; embedding and head are kept once
for the drafter, which shares them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn

from paceline.errors import ConfigError, ModelError
from paceline.kernels.linear_cross_entropy import Head
from paceline.records import FeatureBatch, TokenBatch

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
    return _shape_of(*_load_configs(path, revision, trust_remote_code))


def load_tokenizer(path: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The target's own tokenizer. Raises: ModelError."""
    try:
        return transformers.AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer can be loaded from {path}: {_first_line(error)}") from error


class FeatureCache:
    """Features of whole documents, kept over epochs in host memory up to a number of bytes; then it stops growing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._features: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def get(self, row: int) -> Tensor | None:
        """Features ``[n, L*D]`` of a data set row, if kept."""
        return self._features.get(row)

    def put(self, row: int, feature: Tensor) -> None:
        """Keep the features of a row if they fit."""
        num_bytes = feature.numel() * feature.element_size()
        with self._lock:
            if row not in self._features and self._num_bytes + num_bytes <= self._max_bytes:
                self._features[row] = feature
                self._num_bytes += num_bytes


class Target:
    """The frozen trunk with its taps, and the embedding and head that the drafter shares.

    Several threads may call `features` at once.

    Attributes:
        shape: What the configuration says.
        layer_ids: Tapped layers, ascending.
        embed: The target's embedding module (it scales where the family scales).
        head: The target's output head.
        needs_last_hidden: Whether the last hidden state (after the final norm) is delivered beside the taps; then no
            layer is cut.
        packed: Whether documents of a row run in one forward; False: one by one.
        packing_note: Why, in one line.
    """

    def __init__(
        self,
        model: Any,
        shape: TargetShape,
        layer_ids: tuple[int, ...],
        packing: str = "auto",
        needs_last_hidden: bool = False,
    ) -> None:
        """Take the trunk out of a loaded model; `Target.load` is the usual way.

        Args:
            model: A Transformers causal LM with at least ``max(layer_ids) + 1`` layers; it is cut in place.
            packing: ``auto``, ``packed`` or ``per_document``.
        """
        trunk = model.get_decoder()
        if not hasattr(trunk, "layers") or not hasattr(trunk, "embed_tokens"):
            raise ModelError(
                f"{shape.model_type}: its Transformers class has no `layers` and `embed_tokens`, which taps need"
            )
        self.shape = shape
        self.layer_ids = check_layer_ids(layer_ids, shape.num_layers)
        self.embed = trunk.embed_tokens
        self.head = _head_of(model, shape)
        self._trunk = trunk
        self.needs_last_hidden = needs_last_hidden
        if not needs_last_hidden:
            self._trunk.layers = trunk.layers[: self.layer_ids[-1] + 1]
            self._trunk.norm = nn.Identity()
            self._trunk.config.num_hidden_layers = len(self._trunk.layers)
        self._trunk.requires_grad_(False).eval()
        self._captured = threading.local()
        tapped = [self._trunk.layers[i] for i in self.layer_ids] + ([self._trunk.norm] if needs_last_hidden else [])
        for place, module in enumerate(tapped):
            module.register_forward_hook(self._capture(place))
        self._num_captured = len(tapped)
        self.packed, self.packing_note = self._choose_packing(packing)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        layer_ids: Sequence[int] | str = "auto",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        packing: str = "auto",
        needs_last_hidden: bool = False,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Target:
        """Load the part of a model folder (or hub id) that training needs. Raises: ModelError, ConfigError."""
        config, generation = _load_configs(path, revision, trust_remote_code)
        shape = _shape_of(config, generation)
        ids = default_layer_ids(shape.num_layers) if isinstance(layer_ids, str) else tuple(layer_ids)
        check_layer_ids(ids, shape.num_layers)
        kept = shape.num_layers if needs_last_hidden else ids[-1] + 1
        config.num_hidden_layers = kept
        if getattr(config, "layer_types", None):  # a cache or mask is built per entry in some versions
            config.layer_types = config.layer_types[:kept]
        model = load_causal_lm(path, config, dtype, device, revision, trust_remote_code, num_layers=kept)
        return cls(model, shape, ids, packing, needs_last_hidden)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the features."""
        return next(self._trunk.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the trunk lives."""
        return next(self._trunk.parameters()).device

    @property
    def feature_size(self) -> int:
        """Width ``L*D`` of a context feature."""
        return len(self.layer_ids) * self.shape.hidden_size

    @torch.no_grad()
    def features(self, tokens: TokenBatch, cache: FeatureCache | None = None) -> FeatureBatch:
        """Context features of a packed row; each document's are those of the document alone.

        Args:
            cache: Used when documents run one by one, where a document's features are the same bits in any packing.
        """
        joined = self._run_packed(tokens) if self.packed else self._run_one_by_one(tokens, cache)
        last_hidden = joined[:, self.feature_size :] if self.needs_last_hidden else None
        return FeatureBatch(tokens, joined[:, : self.feature_size], last_hidden)

    @torch.no_grad()
    def document_features(self, input_ids: Tensor) -> Tensor:
        """Context features ``[n, L*D]`` of one document run alone; input ids int64 ``[n]``."""
        return self._run(input_ids)[:, : self.feature_size]

    def fingerprint(self) -> str:
        """SHA-256 of the shape and of a few weights of every tensor: tells another target, not another folder."""
        digest = hashlib.sha256(json.dumps(asdict(self.shape), sort_keys=True).encode())
        for name, parameter in [*self._trunk.named_parameters(), ("head", self.head.weight)]:
            sample = parameter.detach().flatten()[:64].float().cpu().numpy()
            digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.tobytes())
        return digest.hexdigest()

    def _run(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """Taps (and the last hidden state) of one row, joined: ``[S, L*D]`` or ``[S, (L + 1)*D]``."""
        self._captured.states = [None] * self._num_captured
        # use_cache defaults to True, which costs memory and, with position ids alone, merges packed documents again
        self._trunk(input_ids=input_ids[None].to(self.device), use_cache=False, **kwargs)
        joined = torch.cat(self._captured.states, dim=-1)
        self._captured.states = None  # else every thread would hold the taps of its last row beside the joined copy
        return joined

    def _run_one_by_one(self, tokens: TokenBatch, cache: FeatureCache | None) -> Tensor:
        width = self._num_captured * self.shape.hidden_size
        joined = torch.zeros(len(tokens.input_ids), width, dtype=self.dtype, device=self.device)
        for (start, end), row in zip(tokens.spans, tokens.rows, strict=True):
            document = cache.get(row) if cache else None
            if document is None:
                document = self._run(tokens.input_ids[start:end])
                if cache:
                    cache.put(row, document)
            joined[start:end] = document
        return joined

    def _run_packed(self, tokens: TokenBatch) -> Tensor:
        position_ids = tokens.position_ids[None].to(self.device)
        joined = self._run(tokens.input_ids, position_ids=position_ids, attention_mask=self._packed_mask(tokens))
        joined[tokens.num_tokens :] = 0
        return joined

    def _capture(self, place: int) -> Any:
        captured = self._captured  # not self: the target would refer to itself in a circle, and outlive its last use

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:  # a hook that returns something replaces output
            captured.states[place] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    def _packed_mask(self, tokens: TokenBatch) -> Any:
        """Additive ``[1, 1, S, S]`` masks that keep documents apart, in the form that the family takes.

        Explicit masks are the one route that every family honours: many model files build theirs without the position
        ids. Additive rather than boolean, as an eager backend adds whatever it is given. Padding sees itself.
        """
        ids = tokens.document_ids.to(self.device)
        distance = torch.arange(len(ids), device=self.device)
        distance = distance[:, None] - distance[None, :]
        visible = (ids[:, None] == ids[None, :]) & (distance >= 0) & ((ids[:, None] >= 0) | (distance == 0))
        config = self._trunk.config
        window = getattr(config, "sliding_window", None)
        in_window = visible & (distance < window) if window else visible

        def additive(mask: Tensor) -> Tensor:
            zeros = torch.zeros(mask.shape, dtype=self.dtype, device=self.device)
            return zeros.masked_fill(~mask, torch.finfo(self.dtype).min)[None, None]

        if getattr(config, "layer_types", None):
            return {
                "full_attention": additive(visible),
                "sliding_attention": additive(in_window),
                "linear_attention": None,
            }
        return additive(in_window if getattr(config, "use_sliding_window", True) else visible)

    def _choose_packing(self, packing: str) -> tuple[bool, str]:
        if packing != "packed" and self.device.type == "cpu":
            return False, "documents run one by one: on the CPU features are then the same bits in any packing"
        if packing == "per_document":
            return False, "documents run one by one, as target.packing says"
        leak = self._probe_leak()
        limit = 1e-4 if self.dtype == torch.float32 else 3e-2
        if leak <= limit:
            return True, f"documents run packed: a probe differs from documents alone by {leak:.1e} (limit {limit:.0e})"
        note = (
            f"documents run one by one: packed, a probe differs from documents alone by {leak:.1e} (limit "
            f"{limit:.0e}), as {self.shape.model_type} layers carry state from one document into the next"
        )
        log.warning(note)
        return False, note

    @torch.no_grad()
    def _probe_leak(self) -> float:
        """Largest relative error of the taps over three packed documents against each alone.

        By behaviour, not by family name: of the library's model files a quarter build masks without position ids. The
        documents have 37, 3 and 24 tokens: 3 is shorter than the convolution of gated-delta layers.
        """
        generator = torch.Generator().manual_seed(0)
        documents = [torch.randint(0, self.shape.vocab_size, (n,), generator=generator) for n in (37, 3, 24)]
        tokens = TokenBatch.pack(0, [(i, ids, torch.ones_like(ids)) for i, ids in enumerate(documents)], 64)
        try:
            packed = self._run_packed(tokens).float()
        except (TypeError, AttributeError, KeyError, ValueError, RuntimeError) as error:
            log.warning("%s refuses explicit masks (%s)", self.shape.model_type, _first_line(error))
            return float("inf")
        worst = 0.0
        for (start, end), ids in zip(tokens.spans, documents, strict=True):
            alone = self._run(ids).float()
            worst = max(worst, float((packed[start:end] - alone).norm() / alone.norm()))
        return worst


def load_causal_lm(
    path: str,
    config: Any,
    dtype: torch.dtype,
    device: torch.device | str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    num_layers: int | None = None,
) -> Any:
    """Load a causal LM's text part and check that nothing but the expected parts was left out.

    Args:
        num_layers: Layers kept; keys of later layers are expected leftovers. None: all of them.
    Raises: ModelError naming missing or unexpected keys.
    """
    try:
        with quiet_transformers():
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                revision=revision,
                trust_remote_code=trust_remote_code,
                key_mapping=_TEXT_PART,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelError(f"target {path} cannot be loaded: {_first_line(error)}") from error
    model, loading = loaded
    missing = sorted(loading["missing_keys"])
    unexpected = sorted(key for key in loading["unexpected_keys"] if not _is_leftover(key, num_layers))
    if missing or unexpected or loading["mismatched_keys"]:
        raise ModelError(
            f"target {path} does not match its configuration: missing {missing[:3]}, unexpected {unexpected[:3]}, "
            f"other shapes {sorted(map(str, loading['mismatched_keys']))[:3]}"
        )
    return model.to(device).eval()


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


def _load_configs(path: str, revision: str | None, trust_remote_code: bool) -> tuple[Any, Any]:
    folder = Path(path).expanduser()
    if folder.exists() and not (folder / "config.json").is_file():
        raise ModelError(f"target {path} has no config.json: a Transformers model folder or a hub id was wanted")
    if not folder.exists():
        log.info("%s is no folder here: asking the hub for it", path)
    try:
        with quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(
                path, revision=revision, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # Transformers checks a foreign file with whatever it has
        hint = "" if folder.exists() else " (no such folder here, so it was taken as a hub id)"
        raise ModelError(f"target {path} cannot be read{hint}: {_first_line(error)}") from error
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


def _shape_of(config: Any, generation: Any) -> TargetShape:
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


def _head_of(model: Any, shape: TargetShape) -> Head:
    output = model.get_output_embeddings()
    if getattr(output, "bias", None) is not None:
        raise ModelError(f"{shape.model_type}: a head with a bias is not supported: drafters share a plain matrix")
    return Head(output.weight.detach(), shape.softcap, shape.logit_scale)


def _is_leftover(key: str, num_layers: int | None) -> bool:
    if _LEFT_OUT.search(key) or key.endswith("rotary_emb.inv_freq") or "lm_head" in key:
        return True
    layer = re.search(r"(^|\.)layers\.(\d+)\.", key)
    return layer is not None and num_layers is not None and int(layer[2]) >= num_layers


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
