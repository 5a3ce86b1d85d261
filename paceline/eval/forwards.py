"""What a target does with tokens while decoding: the protocol, and the Transformers model as one of its ways.

For plain models there are two more: `eval.lean` in float32 on a CPU, and `eval.static` on a GPU. Shape letters: D
hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from paceline.errors import ModelError

Tokens = Sequence[int] | Tensor
"""Token ids on the host, or int64 ``[n]`` on a GPU, which the host then need not wait for."""


class Forward(Protocol):
    """A causal language model that holds one sequence, and can take back the last tokens of it.

    Attributes:
        taps: Outputs ``[n, D]`` of the tapped layers for the tokens last appended.
    """

    taps: list[Tensor]

    def clear(self) -> None:
        """Start a new sequence."""

    def append(self, tokens: Tokens, last_only: bool = False) -> Tensor:
        """Run tokens behind the sequence; logits ``[n, V]`` after each of them, or ``[1, V]`` after the last."""

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the tokens last appended; at least one stays."""

    def reserve(self, num_positions: int, num_tokens: int) -> None:
        """Get ready for sequences of so many positions and calls of up to so many tokens; forgets the sequence."""


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

    def append(self, tokens: Tokens, last_only: bool = False) -> Tensor:
        """Run tokens behind the sequence; logits ``[n, V]`` after each of them, or ``[1, V]`` after the last."""
        self._cache.before(len(tokens))
        ids = torch.as_tensor(tokens, device=self._model.device)[None]
        options: dict[str, Any] = {self._cache_name: self._cache.cache, "logits_to_keep": int(last_only)}  # 0: all
        return self._model(input_ids=ids, use_cache=True, **options).logits[0]

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the tokens last appended; at least one stays."""
        self._cache.keep(num_tokens)

    def reserve(self, num_positions: int, num_tokens: int) -> None:
        """Nothing: its cache grows by itself."""

    def untap(self) -> None:
        """Leave the model as it was found."""
        for hook in self._hooks:
            hook.remove()

    def _capture(self, place: int) -> Any:
        taps = self.taps  # not self: the model would then refer to its owner in a circle

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:  # a hook that returns something replaces output
            taps[place] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook


class MixerStates:
    """The recurrent states of one sequence (gated delta rule), which cannot be sliced but can go back.

    The states before a block are copied and put back, and the mixers alone are run again on the kept tokens, whose
    inputs were saved. The layers around them need no second run, as what they made of the kept tokens did not depend on
    the later ones.

    Attributes:
        cache: What the mixers read and write; only its recurrent layers are touched here.
        inputs: What each mixer was last given, ``[1, n, D]``.
    """

    def __init__(self, cache: Any, mixers: Mapping[int, Callable[..., Tensor]]) -> None:
        self.cache = cache
        self.inputs: dict[int, Tensor] = {}
        self._mixers = mixers
        self._before: dict[int, list[Tensor]] = {}

    def copy(self) -> None:
        """Remember the states as they are."""
        self._before = {i: [state.clone() for state in self._states(i)] for i in self._mixers}

    def rewind(self, num_tokens: int) -> None:
        """Make the states those of the last copy and the first tokens that were run since."""
        for i, mixer in self._mixers.items():
            for state, before in zip(self._states(i), self._before[i], strict=True):
                state.copy_(before)
            inputs = self.inputs[i][:, :num_tokens]
            with torch.cuda.device_of(inputs):  # kernels go by the current device, and layers may be on several
                mixer(inputs, self.cache)

    def _states(self, layer: int) -> list[Tensor]:
        linear = self.cache.layers[layer]
        return [linear.conv_states[0], linear.recurrent_states[0]]


def rollback_cache(trunk: Any) -> Any:
    """An empty Transformers cache whose layers can go back. Raises: ModelError if one cannot.

    Layers with a sliding window drop keys that a rollback needs again, so they are kept whole and the window is left to
    the model's masks.
    """
    cache = transformers.DynamicCache(config=trunk.config)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[i] = DynamicLayer()
        elif type(layer) not in (DynamicLayer, LinearAttentionLayer):
            raise ModelError(
                f"{trunk.config.model_type}: layer {i} keeps its past in a {type(layer).__name__}, which "
                "cannot be rolled back; speculative decoding needs keys and values or a `linear_attn` mixer"
            )
    return cache


def find_mixers(trunk: Any, cache: Any) -> dict[int, nn.Module]:
    """The mixer of every recurrent layer. Raises: ModelError if a layer has none that is known."""
    mixers = {}
    for i, layer in enumerate(cache.layers):
        if not isinstance(layer, LinearAttentionLayer):
            continue
        mixer = getattr(trunk.layers[i], "linear_attn", None)
        if mixer is None:
            raise ModelError(
                f"{trunk.config.model_type}: layer {i} has a recurrent state but no `linear_attn` mixer, so "
                "rejected tokens cannot be rolled back"
            )
        mixers[i] = mixer
    return mixers


class _RollbackCache:
    """A Transformers cache that can take tokens back, for every kind of layer.

    Keys and values are sliced here: `DynamicCache.crop` changed its meaning over versions. Of recurrent states
    `MixerStates` takes care.
    """

    def __init__(self, trunk: Any) -> None:
        self._trunk = trunk
        self.cache = rollback_cache(trunk)
        self._mixers = find_mixers(trunk, self.cache)
        self._states = MixerStates(self.cache, self._mixers)
        self._base = self._num_appended = 0
        for i, mixer in self._mixers.items():
            mixer.register_forward_pre_hook(self._save_input(i), with_kwargs=True)

    def clear(self) -> None:
        """Start a new sequence."""
        self.cache = self._states.cache = rollback_cache(self._trunk)
        self._base = self._num_appended = 0

    def before(self, num_tokens: int) -> None:
        """Announce a forward over `num_tokens`."""
        self._base += self._num_appended
        self._num_appended = num_tokens
        if self._base and num_tokens > 1:  # the prompt and a single token are never taken back
            self._states.copy()

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` tokens of the last forward; at least one stays."""
        if num_tokens == self._num_appended:
            return
        end = self._base + num_tokens
        self._states.rewind(num_tokens)
        for i, layer in enumerate(self.cache.layers):
            if i not in self._mixers and layer.get_seq_length():  # layers that share another's keys hold none
                layer.keys, layer.values = layer.keys[..., :end, :], layer.values[..., :end, :]
        self._num_appended = num_tokens

    def _save_input(self, layer: int) -> Any:
        inputs = self._states.inputs  # not self: the model would then refer to its owner in a circle

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs[layer] = args[0] if args else kwargs["hidden_states"]

        return hook
