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
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config import Kernels
from paceline.errors import ConfigError, ModelError
from paceline.kernels.flash4 import DocumentStarts, why_not_flash4
from paceline.kernels.flash4 import load as load_flash4
from paceline.kernels.flex import MIN_HEAD_DIM
from paceline.kernels.graphs import GraphRunner
from paceline.kernels.linear_cross_entropy import Head
from paceline.models import gated_delta
from paceline.models.fp8 import use_fp8, why_not_fp8
from paceline.models.loading import (
    TargetShape,
    check_layer_ids,
    default_layer_ids,
    first_line,
    load_causal_lm,
    load_configs,
    quantization_note,
    shape_of,
)
from paceline.models.packed import ATTENTION, CompiledLayers, PackedRow, layer_windows
from paceline.models.split import Parts, part_devices, starts_of
from paceline.profiling import stages
from paceline.records import FeatureBatch, TokenBatch

log = logging.getLogger(__name__)

UNASKED = "not asked for"
"""Why a route is not tried that nobody named."""

PROBE_LENGTH = 64
"""Tokens of the three documents that show whether packed documents stay apart."""

BFLOAT16_LIMIT = 0.1
"""Relative error of packed documents up to which a bfloat16 target counts as computing what it computes for each alone.
Rounding gave 0.016 over 27 random layers and 0.043 over 34, the more the larger their weights."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Configuration keys of mixtures of experts: there other tokens change the sizes of an expert's products, and with them
how sums are rounded."""


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

    Several threads may call `features` at once. Of a target in several parts, each on a device of its own, features lie
    on the first device, and are complete when they are handed out: `split.lanes` threads keep all parts busy.

    Attributes:
        shape: What the configuration says.
        layer_ids: Tapped layers, ascending.
        embed: The target's embedding module (it scales where the family scales).
        head: The target's output head.
        final_norm: What a last hidden state from elsewhere has to go through.
        needs_last_hidden: Whether the last hidden state (after the final norm) is delivered beside the taps; then no
            layer is cut.
        route: How documents of a row run. ``flash4`` and ``flex``: in one forward, kept apart by those kernels;
            ``masked``: in one, kept apart by dense masks; ``one_by_one``.
        packing_note: Why, in one line.
        quantization_note: How the weights were quantised, and what was made of that, in one line; None: they were not.
    """

    def __init__(
        self,
        model: Any,
        shape: TargetShape,
        layer_ids: tuple[int, ...],
        packing: str = "auto",
        needs_last_hidden: bool = False,
        feature_dtype: torch.dtype | None = None,
        kernels: Kernels | None = None,
        row_length: int = PROBE_LENGTH,
        fp8: bool = False,
        devices: Sequence[torch.device] = (),
    ) -> None:
        """Take the trunk out of a loaded model; `Target.load` is the usual way.

        Args:
            model: A Transformers causal LM with at least ``max(layer_ids) + 1`` layers; it is cut in place.
            packing: ``auto``, ``packed`` or ``per_document``.
            feature_dtype: Type that taps are delivered in: the drafter's compute type, to which it would cast them
                anyway. None, and always where the last hidden state is delivered too: the target's own.
            kernels: What packed rows run with; None: the defaults.
            row_length: S of the rows to come: the probe that chooses the route then has compiled what they need.
            fp8: Multiply in fp8.
            devices: Of the parts that the layers are split into; up to one: they stay together where they are.
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
        self.final_norm: nn.Module | None = getattr(trunk, "norm", None)
        if not needs_last_hidden:
            self._trunk.layers = trunk.layers[: self.layer_ids[-1] + 1]
            self._trunk.norm = nn.Identity()
            self._trunk.config.num_hidden_layers = len(self._trunk.layers)
        self._trunk.requires_grad_(False).eval()
        self._parts: Parts | None = None
        if len(devices) > 1:
            layers, norm = self._trunk.layers, self._trunk.norm if needs_last_hidden else None
            starts = getattr(model, "part_starts", None)  # of a model that was loaded in parts
            starts = starts or starts_of(model, len(layers), len(devices), needs_last_hidden)
            self._parts = Parts(layers, norm, starts, devices)
            log.info("%d layers run in parts: %s", len(layers), self._parts)
        self._kernels = kernels or Kernels()
        self._row_length = row_length
        self._here = threading.local()
        self._compiled: CompiledLayers | None = None
        self._windows: dict[str, int | None] | None = None
        self._library_attention = self._trunk.config._attn_implementation
        self.quantization_note = quantization_note(model)
        gated_delta.enable(self._trunk)
        self._takes_edges = gated_delta.takes_edges(self._trunk)
        self._split: gated_delta.MixerSplit | None = None
        self._starts = DocumentStarts()
        tapped = [self._trunk.layers[i] for i in self.layer_ids] + ([self._trunk.norm] if needs_last_hidden else [])
        for place, module in enumerate(tapped):
            module.register_forward_hook(self._capture(place))
        self._num_captured = len(tapped)
        self._use_device()
        documents = _probe_documents(shape.vocab_size)
        self._fingerprint: str | None = None
        self._compiles = self.device.type == "cuda" and self._kernels.compile and not fp8
        with self._own_streams():
            self.route, self.packing_note = self._choose_route(packing, documents)
        if fp8:  # after the probe: rounding this coarse would look like a leak
            self._fingerprint = self.fingerprint()  # of the weights that were loaded
            with self._own_streams():
                self.quantization_note = self._use_fp8(documents)
            if self.route in ("flash4", "flex") and self.device.type == "cuda" and self._kernels.compile:
                self._compiled = CompiledLayers(self._trunk.layers)
        self._here.__dict__.pop("lanes", None)  # the probe's: of other layers perhaps, and of a row's size

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
        kernels: Kernels | None = None,
        row_length: int = PROBE_LENGTH,
        fp8: bool = False,
        adapter: str | None = None,
        num_parts: int = 1,
    ) -> Target:
        """Load the part of a model folder (or hub id) that training needs, with a LoRA adapter merged if one is named.

        Args:
            num_parts: Parts that the layers are split into: on `device` and the GPUs that follow it.
        Raises: ModelError, ConfigError.
        """
        config, generation = load_configs(path, revision, trust_remote_code)
        shape = shape_of(config, generation)
        ids = default_layer_ids(shape.num_layers) if isinstance(layer_ids, str) else tuple(layer_ids)
        check_layer_ids(ids, shape.num_layers)
        kept = shape.num_layers if needs_last_hidden else ids[-1] + 1
        config.num_hidden_layers = kept
        if getattr(config, "layer_types", None):  # a cache or mask is built per entry in some versions
            config.layer_types = config.layer_types[:kept]
        devices = part_devices(device, num_parts)
        where = devices, needs_last_hidden
        model = load_causal_lm(path, config, dtype, device, revision, trust_remote_code, kept, adapter, *where)
        if adapter is not None:  # it may have parted the two
            shape = replace(shape, tie_word_embeddings=model.config.tie_word_embeddings)
        return cls(model, shape, ids, packing, needs_last_hidden, feature_dtype, kernels, row_length, fp8, devices)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(self._trunk.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the trunk lives; of several parts the first one, where embedding, head and features are."""
        return next(self._trunk.parameters()).device

    @property
    def packed(self) -> bool:
        """Whether documents of a row run in one forward."""
        return self.route != "one_by_one"

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
        self._use_device()
        with self._own_streams():
            if self.route == "one_by_one":
                joined = self._run_one_by_one(tokens, cache)
            else:
                joined = self._run_packed(tokens, self.feature_dtype)
        if self._parts:
            self._parts.hand_over(joined)
        last_hidden = joined[:, self.feature_size :] if self.needs_last_hidden else None
        return FeatureBatch(tokens, joined[:, : self.feature_size], last_hidden)

    @torch.no_grad()
    def document_features(self, input_ids: Tensor) -> Tensor:
        """Context features ``[n, L*D]`` of one document run alone; input ids int64 ``[n]``."""
        self._use_device()
        with self._own_streams():
            alone = self._run_alone(input_ids, self.feature_dtype)
        if self._parts:
            self._parts.hand_over(alone)
        return alone[:, : self.feature_size]

    def _own_streams(self) -> contextlib.AbstractContextManager[None]:
        """Where rows of a split target are launched; what was launched is done at its end."""
        return self._parts.own_streams() if self._parts else contextlib.nullcontext()

    @property
    def _devices(self) -> tuple[torch.device, ...]:
        """Those of the parts, each once, the first one's first."""
        return tuple(dict.fromkeys(self._parts.devices)) if self._parts else (self.device,)

    def _use_device(self) -> None:
        """Make the target's GPU this thread's current one: events, graphs and some kernels go by that."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def head_fingerprint(self) -> str:
        """SHA-256 of the shape, and as below of embedding and head: what a drafter has beside the features."""
        digest = hashlib.sha256(json.dumps(asdict(self.shape), sort_keys=True).encode())
        for weight in (*self.embed.parameters(), self.head.weight):
            digest.update(_signature(weight))
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """SHA-256 of the shape, of a few weights of every tensor and of the sum of all its bits.

        It tells another target, also one of which an adapter changed a few rows, and not another folder.
        """
        if self._fingerprint is not None:
            return self._fingerprint
        digest = hashlib.sha256(json.dumps(asdict(self.shape), sort_keys=True).encode())
        for name, parameter in [*self._trunk.named_parameters(), ("head", self.head.weight)]:
            digest.update(f"{name}{tuple(parameter.shape)}".encode() + _signature(parameter))
        return digest.hexdigest()

    def _slot(self, length: int, dtype: torch.dtype) -> Tensor:
        """A row's place for taps (and the last hidden state): ``[S, L*D]`` or ``[S, (L + 1)*D]``."""
        width = self._num_captured * self.shape.hidden_size
        return torch.empty(length, width, dtype=dtype, device=self.device)

    def _run(self, slot: Tensor, input_ids: Tensor, given: Sequence[dict[str, Any]] = ({},), **kwargs: Any) -> None:
        """Run one row, int64 ``[1, S]`` on the device; its taps go straight to their places in `slot`.

        Args:
            given: More arguments of the trunk's forward, on each of `_devices`.
        """
        self._here.slot = slot
        with self._parts.row(given) if self._parts else contextlib.nullcontext():
            # use_cache defaults to True, which costs memory and, with position ids alone, merges packed documents again
            self._trunk(input_ids=input_ids, use_cache=False, **given[0], **kwargs)
        self._here.slot = None  # else every thread would hold on to its last row

    def _run_alone(self, input_ids: Tensor, dtype: torch.dtype) -> Tensor:
        slot = self._slot(len(input_ids), dtype)
        tokens = TokenBatch.pack(0, [(0, input_ids, torch.ones_like(input_ids))], len(input_ids))
        # our own attention function takes whatever it is given, while the library's build masks by themselves
        own = self._trunk.config._attn_implementation == ATTENTION
        masks = {"attention_mask": self._dense_masks(tokens)} if own else {}
        # with edges here too, kernels are chosen for one way to run and not for two
        edges = self._edge_kwargs(torch.tensor([0, len(input_ids)]))
        with stages.H2D_SYNC:
            input_ids = input_ids[None].to(self.device)
        with stages.MODEL_FORWARD:
            self._run(slot, input_ids, edges, **masks)
        return slot

    def _run_one_by_one(self, tokens: TokenBatch, cache: FeatureCache | None) -> Tensor:
        joined = self._slot(len(tokens.input_ids), self.feature_dtype)
        for (start, end), row in zip(tokens.spans, tokens.rows, strict=True):
            document = cache.get(row) if cache else None
            if document is None:
                document = self._run_alone(tokens.input_ids[start:end], self.feature_dtype)
                if cache:
                    cache.put(row, document)
            with stages.PACK_HIDDEN:
                joined[start:end] = document
        joined[tokens.num_tokens :] = 0
        return joined

    def _run_packed(self, tokens: TokenBatch, dtype: torch.dtype) -> Tensor:
        length = len(tokens.input_ids)
        edges = gated_delta.row_edges(tokens.document_starts, length)
        with self._split.documents(edges.tolist()) if self._split else contextlib.nullcontext():
            if self.route == "masked":
                joined = self._slot(length, dtype)
                with stages.H2D_SYNC:
                    input_ids = tokens.input_ids[None].to(self.device)
                    position_ids = tokens.position_ids[None].to(self.device)
                    masks, more = self._dense_masks(tokens), self._edge_kwargs(edges)
                with stages.MODEL_FORWARD:
                    self._run(joined, input_ids, more, position_ids=position_ids, attention_mask=masks)
            else:
                joined = self._run_row(tokens, edges, dtype)
        with stages.PACK_HIDDEN:
            joined[tokens.num_tokens :] = 0
        return joined

    def _edge_kwargs(self, edges: Tensor) -> list[dict[str, Tensor]]:
        """What gated-delta layers with kernels of their own want to know of a row, on each of `_devices`; nothing for
        other targets."""
        return [gated_delta.forward_kwargs(edges, each) if self._takes_edges else {} for each in self._devices]

    def _run_row(self, tokens: TokenBatch, edges: Tensor, dtype: torch.dtype) -> Tensor:
        """Taps of a row without waiting for the device; of a small target by a CUDA graph."""
        lanes: dict[Any, _Lane] = self._here.__dict__.setdefault("lanes", {})
        key = len(tokens.input_ids), dtype
        if key not in lanes:
            lanes[key] = self._lane(*key)
        lane = lanes[key]
        with stages.H2D_SYNC:
            for row in lane.rows:
                row.write(tokens)
            lane.kwargs = self._edge_kwargs(edges)
        keeps_slot = lane.launch.needs_fixed_inputs
        if lane.slot is None:
            lane.slot = self._slot(*key)
        slot = lane.slot
        with stages.MODEL_FORWARD:
            lane.launch(lane.rows[0].variant)
        if keeps_slot:
            with stages.PACK_HIDDEN:
                return slot.clone()
        lane.slot = None
        return slot

    def _lane(self, length: int, dtype: torch.dtype) -> _Lane:
        assert self._windows is not None
        starts = self._starts if self.route == "flash4" else None
        rows = [PackedRow(length, self._windows, each, starts) for each in self._devices]
        first, compiled = rows[0], self._compiled or contextlib.nullcontext()

        def masks_of(row: PackedRow) -> Any:
            if "" in row.masks:
                return row.masks[""]
            has_delta = "linear_attention" in self._trunk.config.layer_types
            return row.masks | ({"linear_attention": None} if has_delta else {})

        masks = [masks_of(row) for row in rows]

        def launch(variant: int) -> None:
            given = []
            for row, mask, more in zip(rows, masks, lane.kwargs, strict=True):
                row.update_masks(variant)
                given.append(row.kwargs | more | {"attention_mask": mask})
            with compiled:
                assert lane.slot is not None
                self._run(lane.slot, first.input_ids, given, position_ids=first.position_ids)

        # gated-delta layers get arrays of the row's own sizes; a thread beside the drafter's would record its launches;
        # a graph is of one device
        can_replay = (
            self.device.type == "cuda"
            and self._parts is None
            and not gated_delta.is_hybrid(self._trunk)
            and threading.current_thread() is threading.main_thread()
        )
        launcher = GraphRunner(launch, "target", self._kernels.cuda_graphs if can_replay else "off")
        lane = _Lane(rows, None, launcher)  # `launch` reads it
        return lane

    def _capture(self, place: int) -> Any:
        # not self: the target would refer to itself in a circle, and outlive its last use
        here, width = self._here, self.shape.hidden_size

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:  # a hook that returns something replaces output
            taps = (output[0] if isinstance(output, tuple) else output)[0]
            here.slot[:, place * width : (place + 1) * width].copy_(taps)

        return hook

    def _dense_masks(self, tokens: TokenBatch) -> Any:
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

    def _choose_route(self, packing: str, documents: list[Tensor]) -> tuple[str, str]:
        if packing == "per_document":
            return "one_by_one", "documents run one by one, as target.packing says"
        if (rope := self.shape.rope.get("rope_type")) in ("dynamic", "longrope"):
            return "one_by_one", f"documents run one by one: {rope} frequencies follow from the longest one of a row"
        if packing != "packed" and self.device.type == "cpu":
            return "one_by_one", "documents run one by one: on the CPU features are then the same bits in any packing"
        limit = 1e-4 if self.dtype == torch.float32 else BFLOAT16_LIMIT
        alone = [self._run_alone(ids, self.dtype) for ids in documents]
        if gated_delta.is_hybrid(self._trunk) and not self._takes_edges and self.device.type != "cpu":
            self._split = gated_delta.split_mixers(self._trunk)
        tried = [note] if (note := gated_delta.enable(self._trunk)) else []
        for route in ("flash4", "flex", "masked"):
            why_not = self._prepare(route)
            if why_not is None:
                self.route = route
                error, moved, allowed, why_not = self._probe(documents, alone)
                found = f"a probe differs from documents alone by {error:.1e} (limit {limit:.0e})"
                if why_not is None and error <= limit and moved <= allowed:
                    how = {"flash4": "FlashAttention-4", "flex": "FlexAttention", "masked": "dense masks"}[route]
                    notes = self._compiled.notes if self._compiled else []
                    return route, "; ".join([f"documents run packed with {how}: {found}", *tried, *notes])
                why_not = why_not or f"{found} and moves by {moved:.1e} with the tokens of another document"
            self._undo()
            if why_not != UNASKED:
                tried.append(f"{route}: {why_not}")
        note = (
            f"documents run one by one, as no way to pack them is right for {self.shape.model_type}: {'; '.join(tried)}"
        )
        log.warning(note)
        return "one_by_one", note

    def _prepare(self, route: str) -> str | None:
        """Set the trunk up for a route; why that is impossible, or None."""
        config, on_gpu, wanted = self._trunk.config, self.device.type == "cuda", self._kernels.attention
        if route == "masked":
            return None
        if wanted == "per_document" or (route == "flash4" and wanted != "flash4") or (wanted == "auto" and not on_gpu):
            return UNASKED
        self._windows = layer_windows(config)
        if self._windows is None:
            return f"layer_types {sorted(set(config.layer_types))} are not all known"
        if on_gpu and (head_dim := self.shape.head_dim) < MIN_HEAD_DIM:
            return f"heads of {head_dim} are too narrow"
        if route == "flash4":
            if (why_not := why_not_flash4(self.shape.head_dim, self.device, self.dtype, blocks=False)) is not None:
                return why_not
            load_flash4()
        self._library_attention = config._attn_implementation
        config._attn_implementation = ATTENTION
        if self._compiles and self._compiled is None:
            self._compiled = CompiledLayers(self._trunk.layers)
        return None

    def _undo(self) -> None:
        if self._trunk.config._attn_implementation == ATTENTION:
            self._trunk.config._attn_implementation = self._library_attention
        self._here.__dict__.pop("lanes", None)
        if self._compiled is not None:
            self._compiled.undo()
            self._compiled = None

    def _use_fp8(self, documents: list[Tensor]) -> str:
        """Multiply in fp8 from now on; what that does to the taps, in one line. Raises: ConfigError."""
        if (why_not := why_not_fp8(self.device, self.dtype)) is not None:
            raise ConfigError(f"target.fp8=true: {why_not}")
        before = [self._run_alone(ids, self.dtype).float() for ids in documents]
        num_layers = use_fp8(self._trunk.layers)
        after = [self._run_alone(ids, self.dtype).float() for ids in documents]
        error = float((torch.cat(after) - torch.cat(before)).norm() / torch.cat(before).norm())
        name = str(self.dtype).removeprefix("torch.")
        return f"{num_layers} linear layers multiply in fp8; on a probe taps differ from those in {name} by {error:.1e}"

    def _probe(self, documents: list[Tensor], alone: list[Tensor]) -> tuple[float, float, float, str | None]:
        """Run documents packed; by behaviour, not by family name: a quarter of the library's model files build masks
        without position ids.

        Returns: the largest relative error of a document's taps against itself alone; how far other tokens in the first
            document move those of the others, which a leak does, however small it is beside rounding; how far they may
            move; and what went wrong if anything did.
        """
        length = max(self._row_length, PROBE_LENGTH)
        others = [(documents[0] + 1) % self.shape.vocab_size, *documents[1:]]
        rows = []
        try:
            for packed in (documents, others, documents):  # the first run may still have chosen among kernels
                row = TokenBatch.pack(0, [(i, ids, torch.ones_like(ids)) for i, ids in enumerate(packed)], length)
                rows.append(self._run_packed(row, self.dtype).float())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # kernels raise whatever they like
            log.info("%s cannot run %s: %s", self.shape.model_type, self.route, first_line(error))
            return float("inf"), float("inf"), 0.0, first_line(error)
        errors, moves, repeats = [], [], []
        for (start, end), wanted in zip(row.spans, alone, strict=True):
            size = float(wanted.float().norm())
            first, other, again = (found[start:end] for found in rows)
            errors.append(float((again - wanted.float()).norm()) / size)
            moves.append(float((again - other).norm()) / size)
            repeats.append(float((again - first).norm()) / size)
        has_experts = any(getattr(self._trunk.config, name, None) for name in EXPERTS)
        allowed = max(repeats) + (0.5 * max(errors) if has_experts else 0.0)
        return max(errors), max(moves[1:]), allowed, None


@dataclass
class _Lane:
    """What a thread needs to run packed rows: where they lie, where their taps go, and the launches.

    Attributes:
        rows: The row on each of the target's devices.
        kwargs: What the layers want besides, of the row at hand, on each device.
    """

    rows: list[PackedRow]
    slot: Tensor | None
    launch: GraphRunner
    kwargs: list[dict[str, Any]] = field(default_factory=list)


def _signature(weight: Tensor) -> bytes:
    """A few values, and the sum of all bytes as integers of 8 bytes: any change shows, and every device gives the same.

    The sum takes one pass: 9 ms for 200 MB on one core. Values tell rows in another order.
    """
    flat = weight.detach().contiguous().flatten()
    raw = flat.view(torch.uint8)
    raw = raw.clone() if raw.storage_offset() % 8 else raw
    whole = len(raw) // 8 * 8
    total = int(raw[:whole].view(torch.int64).sum()) + int(raw[whole:].sum())
    return flat[:64].float().cpu().numpy().tobytes() + f"{total}".encode()


def _probe_documents(vocab_size: int) -> list[Tensor]:
    """Documents of 37, 3 and 24 tokens: 3 is shorter than the convolution of gated-delta layers."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab_size, (n,), generator=generator) for n in (37, 3, 24)]


def _head_of(model: Any, shape: TargetShape) -> Head:
    output = model.get_output_embeddings()
    if getattr(output, "bias", None) is not None:
        raise ModelError(f"{shape.model_type}: a head with a bias is not supported: drafters share a plain matrix")
    return Head(output.weight.detach(), shape.softcap, shape.logit_scale)
