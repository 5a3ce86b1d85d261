"""The frozen target: any Transformers decoder-only model, cut after its last tapped layer.

A tap is the residual stream after decoder layer i (Transformers' ``hidden_states[i + 1]``), before any norm. Layers
past the last tap, the final norm and the language-model head are not run in training; embedding and head are kept once
for the drafter, which shares them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.kernels.linear_cross_entropy import Head
from paceline.models.loading import (
    TargetShape,
    check_layer_ids,
    default_layer_ids,
    first_line,
    load_causal_lm,
    load_configs,
    shape_of,
)
from paceline.records import FeatureBatch, TokenBatch

log = logging.getLogger(__name__)


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
        feature_dtype: torch.dtype | None = None,
    ) -> None:
        """Take the trunk out of a loaded model; `Target.load` is the usual way.

        Args:
            model: A Transformers causal LM with at least ``max(layer_ids) + 1`` layers; it is cut in place.
            packing: ``auto``, ``packed`` or ``per_document``.
            feature_dtype: Type that taps are delivered in: the drafter's compute type, to which it would cast them
                anyway. None, and always where the last hidden state is delivered too: the target's own.
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
        self.feature_dtype = self.head.weight.dtype if needs_last_hidden or feature_dtype is None else feature_dtype
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
        feature_dtype: torch.dtype | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Target:
        """Load the part of a model folder (or hub id) that training needs. Raises: ModelError, ConfigError."""
        config, generation = load_configs(path, revision, trust_remote_code)
        shape = shape_of(config, generation)
        ids = default_layer_ids(shape.num_layers) if isinstance(layer_ids, str) else tuple(layer_ids)
        check_layer_ids(ids, shape.num_layers)
        kept = shape.num_layers if needs_last_hidden else ids[-1] + 1
        config.num_hidden_layers = kept
        if getattr(config, "layer_types", None):  # a cache or mask is built per entry in some versions
            config.layer_types = config.layer_types[:kept]
        model = load_causal_lm(path, config, dtype, device, revision, trust_remote_code, num_layers=kept)
        return cls(model, shape, ids, packing, needs_last_hidden, feature_dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
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
        joined = joined.to(self.feature_dtype)
        last_hidden = joined[:, self.feature_size :] if self.needs_last_hidden else None
        return FeatureBatch(tokens, joined[:, : self.feature_size], last_hidden)

    @torch.no_grad()
    def document_features(self, input_ids: Tensor) -> Tensor:
        """Context features ``[n, L*D]`` of one document run alone; input ids int64 ``[n]``."""
        return self._run(input_ids)[:, : self.feature_size].to(self.feature_dtype)

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
        joined = torch.zeros(len(tokens.input_ids), width, dtype=self.feature_dtype, device=self.device)
        for (start, end), row in zip(tokens.spans, tokens.rows, strict=True):
            document = cache.get(row) if cache else None
            if document is None:
                document = self._run(tokens.input_ids[start:end]).to(self.feature_dtype)
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
            log.warning("%s refuses explicit masks (%s)", self.shape.model_type, first_line(error))
            return float("inf")
        worst = 0.0
        for (start, end), ids in zip(tokens.spans, documents, strict=True):
            alone = self._run(ids).float()
            worst = max(worst, float((packed[start:end] - alone).norm() / alone.norm()))
        return worst


def _head_of(model: Any, shape: TargetShape) -> Head:
    output = model.get_output_embeddings()
    if getattr(output, "bias", None) is not None:
        raise ModelError(f"{shape.model_type}: a head with a bias is not supported: drafters share a plain matrix")
    return Head(output.weight.detach(), shape.softcap, shape.logit_scale)
