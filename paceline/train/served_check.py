"""Whether a server runs the target of the run's folder: its hidden states beside those of a forward here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.data.dataset import Dataset
from paceline.errors import ConfigError, ModelError
from paceline.models.loading import read_shape
from paceline.records import TokenBatch
from paceline.train.target import load_target

PROBE_LENGTHS = (37, 3, 24)
"""Tokens of the short documents that are compared, as those of `models.target`; one of some hundreds joins them."""

LONG_PROBE = 300

EXACT_LIMIT, LIMIT = 1e-3, 0.1
"""Relative error of a tap up to which a server counts as running the target here: where both compute in float32, and
elsewhere. It is the mean over a document's tokens."""


@dataclass(frozen=True)
class Reference:
    """What the target's folder gives here.

    Attributes:
        layer_ids: Taps that are compared.
        states: Of each document, float32 ``[n, D]`` behind each layer that was run.
        last: Of each document, float32 ``[n, D]`` after the final norm; empty if it was not run.
        dtype: Type of the weights.
        path: The folder.
    """

    layer_ids: tuple[int, ...]
    states: list[dict[int, Tensor]]
    last: list[Tensor]
    dtype: torch.dtype
    path: str


def probe_documents(dataset: Dataset) -> list[Tensor]:
    """Beginnings of three rows, and a row of some hundreds of tokens."""
    lengths = dataset.lengths
    longest = np.argsort(-lengths, kind="stable")
    short = [dataset.row(int(longest[i % len(longest)]))[0][:n] for i, n in enumerate(PROBE_LENGTHS)]
    return [*short, dataset.row(int(np.abs(lengths - LONG_PROBE).argmin()))[0]]


def reference(config: RunConfig, documents: Sequence[Tensor], layer_ids: Sequence[int], has_last: bool) -> Reference:
    """Load the target up to one layer past these taps, run the documents, and let go of it.

    Args:
        has_last: Run all layers, for the last hidden state.
    Raises: ModelError.
    """
    shape = read_shape(config.target.path, config.target.revision, config.target.trust_remote_code)
    # a server that counts otherwise has the layer before or the one behind; the last layer has no tap in Paceline
    every = tuple(range(min(layer_ids[-1] + 2, shape.num_layers - 1)))
    target = config.target.model_copy(update={"layer_ids": every, "packing": "per_document"})
    draft = config.draft.model_copy(update={"dtype": "float32"})
    here = load_target(config.model_copy(update={"target": target, "draft": draft}), last_hidden=has_last)
    states, last = [], []
    for input_ids in documents:
        batch = here.features(TokenBatch.pack(0, [(0, input_ids, torch.ones_like(input_ids))], len(input_ids)))
        taps = batch.context_feature.float().cpu().split(shape.hidden_size, dim=1)
        states.append(dict(zip(every, taps, strict=True)))
        if batch.last_hidden is not None:
            last.append(batch.last_hidden.float().cpu())
    dtype = here.dtype
    del here, batch
    if config.run.device.startswith("cuda"):
        torch.cuda.empty_cache()
    return Reference(tuple(layer_ids), states, last, dtype, config.target.path)


def compare(
    captures: Sequence[Tensor], normed: Sequence[Tensor], wanted: Reference, *, who: str, layers: Sequence[int]
) -> dict[str, float]:
    """Largest relative error of a token behind each tap, and of the last hidden state, by name.

    Args:
        captures: Of each document ``[n, layers, D]``, taps first.
        normed: The last hidden states, normed here; empty where they are not compared.
        who, layers: The server and the layers that it has to capture, as it counts, for messages.
    Raises: ConfigError if it captures other layers; ModelError if it runs another model.
    """
    is_exact = captures[0].dtype == wanted.dtype == torch.float32
    limit = EXACT_LIMIT if is_exact else LIMIT
    found = {}
    for place, layer in enumerate(wanted.layer_ids):
        taps = [capture[:, place] for capture in captures]
        apart = {other: _mean(taps, [states[other] for states in wanted.states]) for other in wanted.states[0]}
        nearest = min(apart, key=lambda other: apart[other])
        if nearest != layer and apart[nearest] <= limit:
            raise ConfigError(
                f"what {who} gives for layer {layer} is the output of layer {nearest} of {wanted.path} (relative "
                f"error {apart[nearest]:.2g}; from layer {layer}'s {apart[layer]:.2g}). To the server the embedding is "
                f'0: start it with "eagle_aux_hidden_state_layer_ids": {list(layers)}'
            )
        if not apart[layer] <= limit:
            raise ModelError(
                f"what {who} gives for layer {layer} is {apart[layer]:.2g} off that layer of {wanted.path}, {limit:g} "
                f"is allowed, and no layer is nearer than {apart[nearest]:.2g}: it runs another model, or in another "
                "precision; target.server_check=none trains on whatever it gives"
            )
        found[f"layer {layer}"] = _largest(taps, [states[layer] for states in wanted.states])
    if normed:
        if not (seen := _mean(normed, wanted.last)) <= limit:
            raise ModelError(
                f"the last hidden state of {who}, normed here, is {seen:.2g} off that of {wanted.path}, {limit:g} is "
                f'allowed; "eagle_aux_hidden_state_layer_ids" has to be {list(layers)}'
            )
        found["last hidden state"] = _largest(normed, wanted.last)
    return found


def relative_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Of each token ``[n]``: the norm of the difference over that of what is wanted.

    Token by token, as the first ones of many models are hundreds of times larger than all others, and would hide them.
    """
    wanted = wanted.float()
    return (found.float() - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-12)


def _mean(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Of the document that is farthest off."""
    return max(float(relative_errors(one, other).mean()) for one, other in zip(found, wanted, strict=True))


def _largest(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    return max(float(relative_errors(one, other).max()) for one, other in zip(found, wanted, strict=True))
