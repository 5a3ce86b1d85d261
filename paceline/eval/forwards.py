"""What a target does with tokens while decoding: the protocol, and the Transformers model as one of its two ways.

`eval.lean` is the other way, for plain float32 models on a CPU. Shape letters: D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from paceline.errors import ModelError


class Forward(Protocol):
    """A causal language model that holds one sequence, and can take back the last tokens of it.

    Attributes:
        taps: Outputs ``[n, D]`` of the tapped layers for the tokens last appended.
    """

    taps: list[Tensor]

    def clear(self) -> None:
        """Start a new sequence."""

    def append(self, tokens: Sequence[int], last_only: bool = False) -> Tensor:
        """Run tokens behind the sequence; logits ``[n, V]`` after each of them, or ``[1, V]`` after the last."""

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the tokens last appended; at least one stays."""


class ModelForward:
    """Transformers' own forward, for every family whose past can be rolled back."""

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        """Tap a loaded causal LM. Raises: ModelError if its past cannot be rolled back."""
        self._model = model
        # `past_key_values` became `cache` in Transformers 5.24
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        trunk = model.get_decoder()
        self._cache = _RollbackCache(trunk)
        self.taps: list[Tensor] = [torch.empty(0)] * len(layer_ids)
        self._hooks = [trunk.layers[i].register_forward_hook(self._capture(k)) for k, i in enumerate(layer_ids)]

    def clear(self) -> None:
        """Start a new sequence."""
        self._cache.clear()

    def append(self, tokens: Sequence[int], last_only: bool = False) -> Tensor:
        """Run tokens behind the sequence; logits ``[n, V]`` after each of them, or ``[1, V]`` after the last."""
        self._cache.before(len(tokens))
        ids = torch.tensor([list(tokens)], device=self._model.device)
        options: dict[str, Any] = {self._cache_name: self._cache.cache, "logits_to_keep": int(last_only)}  # 0: all
        return self._model(input_ids=ids, use_cache=True, **options).logits[0]

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the tokens last appended; at least one stays."""
        self._cache.keep(num_tokens)

    def untap(self) -> None:
        """Leave the model as it was found."""
        for hook in self._hooks:
            hook.remove()

    def _capture(self, place: int) -> Any:
        taps = self.taps  # not self: the model would then refer to its owner in a circle

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:  # a hook that returns something replaces output
            taps[place] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook


class _RollbackCache:
    """A Transformers cache that can take tokens back, for every kind of layer.

    Keys and values are sliced here: `DynamicCache.crop` changed its meaning over versions, and layers with a sliding
    window drop keys that a rollback needs again, so they are kept whole and the window is left to the model's masks.
    Layers with a recurrent state (gated delta rule) cannot be sliced: their state before the block is copied, put
    back, and the mixer alone is run again on the kept tokens, whose inputs were saved. The layers around it need no
    second run, as what they made of the kept tokens did not depend on the later ones.
    """

    def __init__(self, trunk: Any) -> None:
        self._trunk = trunk
        self._mixers: dict[int, nn.Module] = {}
        self._mixer_inputs: dict[int, Tensor] = {}
        self._snapshot: dict[int, list[Tensor]] = {}
        self.cache: Any
        self._base = self._num_appended = 0
        self.clear()
        for i, layer in enumerate(self.cache.layers):
            if isinstance(layer, LinearAttentionLayer):
                self._mixers[i] = self._find_mixer(i)
                self._mixers[i].register_forward_pre_hook(self._save_input(i), with_kwargs=True)

    def clear(self) -> None:
        """Start a new sequence."""
        self.cache = transformers.DynamicCache(config=self._trunk.config)
        for i, layer in enumerate(self.cache.layers):
            if type(layer) is DynamicSlidingWindowLayer:
                self.cache.layers[i] = DynamicLayer()
            elif type(layer) not in (DynamicLayer, LinearAttentionLayer):
                raise ModelError(
                    f"{self._trunk.config.model_type}: layer {i} keeps its past in a {type(layer).__name__}, which "
                    "cannot be rolled back; speculative decoding needs keys and values or a `linear_attn` mixer"
                )
        self._base = self._num_appended = 0

    def before(self, num_tokens: int) -> None:
        """Announce a forward over `num_tokens`."""
        self._base += self._num_appended
        self._num_appended = num_tokens
        if self._base and num_tokens > 1:  # the prompt and a single token are never taken back
            self._snapshot = {i: [state.clone() for state in self._states(i)] for i in self._mixers}

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` tokens of the last forward; at least one stays."""
        if num_tokens == self._num_appended:
            return
        end = self._base + num_tokens
        for i, layer in enumerate(self.cache.layers):
            if i in self._mixers:
                for state, before in zip(self._states(i), self._snapshot[i], strict=True):
                    state.copy_(before)
                self._mixers[i](self._mixer_inputs[i][:, :num_tokens], self.cache)
            elif layer.get_seq_length():  # layers that share another's keys hold none
                layer.keys, layer.values = layer.keys[..., :end, :], layer.values[..., :end, :]
        self._num_appended = num_tokens

    def _states(self, layer: int) -> list[Tensor]:
        linear = self.cache.layers[layer]
        return [linear.conv_states[0], linear.recurrent_states[0]]

    def _find_mixer(self, layer: int) -> nn.Module:
        mixer = getattr(self._trunk.layers[layer], "linear_attn", None)
        if mixer is None:
            raise ModelError(
                f"{self._trunk.config.model_type}: layer {layer} has a recurrent state but no `linear_attn` mixer, so "
                "rejected tokens cannot be rolled back"
            )
        return mixer

    def _save_input(self, layer: int) -> Any:
        inputs = self._mixer_inputs

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs[layer] = args[0] if args else kwargs["hidden_states"]

        return hook
