"""A target's layers in contiguous parts, each on a device of its own; the library's forward runs them unchanged.

Hooks in front of the layers carry what they take to their device, once a part and row. A part runs one row at a time,
so that rows follow one another through the parts as on a belt: with one row more under way than there are parts, none
waits for work.

On GPUs nothing of a row waits for the host before its end. PyTorch copies between two GPUs on the current stream of the
source, between two barriers with the current stream of the destination (``copy_device_to_device`` in its Copy.cu), and
`non_blocking` changes nothing there. So which streams are current decides who waits for whom:

- each device has one stream that its part computes on, for all rows: they run in the order in which they came;
- each thread has a stream of its own on each device, the current one except while it launches the part there. What
  comes from another device arrives on it, so a copy holds up neither side's computing: hidden states and masks on their
  way to a part that is still at the row before, and taps on their way to the features, which lie on the first device.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError


def part_devices(device: torch.device | str, num_parts: int) -> tuple[torch.device, ...]:
    """Devices of the parts: this GPU and those that follow it; on the CPU all are the CPU.

    Raises: ConfigError where there are fewer.
    """
    first = torch.device(device)
    if first.type != "cuda":
        return (first,) * num_parts
    start, there = first.index or 0, torch.cuda.device_count()
    if start + num_parts > there:
        raise ConfigError(
            f"topology.gpus_per_target={num_parts}: the target would take cuda:{start} to "
            f"cuda:{start + num_parts - 1}, and {there} GPUs are to be seen here"
        )
    return tuple(torch.device("cuda", start + i) for i in range(num_parts))


def lanes(num_parts: int) -> int:
    """Rows that a target of so many parts has under way at a time: one for each, and one that arrives or leaves."""
    return max(1, num_parts) + 1


def part_starts(layer_bytes: Sequence[int], num_parts: int, first: int = 0, last: int = 0) -> tuple[int, ...]:
    """First layer of each part, such that the largest part is as small as it can be.

    Args:
        first, last: Bytes that lie with the first and the last part besides: embedding and head, and a final norm.
    Raises: ConfigError for more parts than layers.
    """
    count = len(layer_bytes)
    if not 1 <= num_parts <= count:
        raise ConfigError(f"topology.gpus_per_target={num_parts}: {count} layers of the target run, a part needs one")
    sums = [0, *(first + each for each in itertools.accumulate(layer_bytes))]
    sums[count] += last
    found: list[tuple[int, tuple[int, ...]]] = [(each, (0,)) for each in sums]  # of the first n layers in one part
    for parts in range(2, num_parts + 1):
        before = found
        found = before[:parts]  # fewer layers than parts: never read
        for n in range(parts, count + 1):
            size, cut = min((max(before[cut][0], sums[n] - sums[cut]), cut) for cut in range(parts - 1, n))
            found.append((size, (*before[cut][1], cut)))
    return found[count][1]


def bytes_of(module: nn.Module) -> int:
    """Bytes of a module's weights, of ``meta`` tensors too."""
    return sum(each.numel() * each.element_size() for each in (*module.parameters(), *module.buffers()))


def starts_of(model: Any, num_layers: int, num_parts: int, keeps_norm: bool) -> tuple[int, ...]:
    """`part_starts` of a causal LM, of which the first layers run; the weights may be ``meta`` tensors."""
    trunk = model.get_decoder()
    shared = {id(each): each for each in (trunk.embed_tokens.weight, model.get_output_embeddings().weight)}
    return part_starts(
        [bytes_of(layer) for layer in trunk.layers[:num_layers]],
        num_parts,
        first=sum(each.numel() * each.element_size() for each in shared.values()),
        last=bytes_of(trunk.norm) if keeps_norm else 0,
    )


def device_map(model: Any, starts: Sequence[int], devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """Where Transformers is to load each module of a causal LM, by name; what is no layer lies on the first device,
    the final norm on the last one."""
    names = {id(module): name for name, module in model.named_modules()}
    trunk = model.get_decoder()
    placed = {names[id(layer)]: devices[_part_of(i, starts)] for i, layer in enumerate(trunk.layers)}
    placed[names[id(trunk.norm)]] = devices[-1]
    rest = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers())  # a tied head too
    for name, _ in rest:
        module = name.rpartition(".")[0]
        if not name.startswith(tuple(f"{each}." for each in placed)):
            holds_layers = any(each.startswith(f"{module}.") for each in placed)
            placed[name if holds_layers else module] = devices[0]
    return placed


def place(model: Any, starts: Sequence[int], devices: Sequence[torch.device]) -> None:
    """Move what `device_map` has elsewhere, a layer at a time."""
    trunk = model.get_decoder()
    for i, layer in enumerate(trunk.layers):
        layer.to(devices[_part_of(i, starts)])
    trunk.norm.to(devices[-1])
    rest = [child for child in trunk.children() if child is not trunk.layers and child is not trunk.norm]
    for child in [*rest, *(child for child in model.children() if child is not trunk)]:
        child.to(devices[0])


def bring_along(model: Any, starts: Sequence[int], devices: Sequence[torch.device]) -> None:
    """Have a causal LM that lies as `place` puts it run one row at a time: what a layer takes is brought to its device,
    and hidden states back to the first one for the head.

    Each device computes on its current stream, and a copy between two GPUs holds up both: with one row there is
    nothing else to do meanwhile. `Parts` is for many rows.
    """
    trunk = model.get_decoder()
    places = [(layer, devices[_part_of(i, starts)]) for i, layer in enumerate(trunk.layers)]
    for module, device in [*places, (trunk.norm, devices[-1]), (model.get_output_embeddings(), devices[0])]:
        module.register_forward_pre_hook(_bring_to(device), with_kwargs=True)


def _bring_to(device: torch.device) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if device.type == "cuda":  # some kernels go by it
            torch.cuda.set_device(device)
        return tuple(_at(each, device) for each in args), {name: _at(each, device) for name, each in kwargs.items()}

    return hook


def _at(value: Any, device: torch.device) -> Any:
    """A layer's argument on a device. Dictionaries stay, as layers may write into them."""
    if isinstance(value, tuple | list):
        return type(value)(_at(each, device) for each in value)
    return value.to(device) if isinstance(value, Tensor) else value


def _part_of(layer: int, starts: Sequence[int]) -> int:
    return max(part for part, start in enumerate(starts) if start <= layer)


def _pairs(first: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """What stands in the same places of two trees of dictionaries, plain values left out."""
    if isinstance(first, Mapping):
        for name, value in first.items():
            yield from _pairs(value, other[name])
    elif first is not other and first is not None and not isinstance(first, int):
        yield first, other


class Parts:
    """The layers of a trunk on the devices of their parts, and the way of a row through them.

    Args:
        layers: Those that run, in place.
        norm: The final norm where it is kept; it follows the last part.
        starts: First layer of each part.
        devices: Of the parts; equal ones share their streams.
    """

    def __init__(
        self, layers: nn.ModuleList, norm: nn.Module | None, starts: Sequence[int], devices: Sequence[torch.device]
    ) -> None:
        assert len(starts) == len(devices)
        self.starts, self.devices, self._num_layers = tuple(starts), tuple(devices), len(layers)
        self._here = threading.local()
        self._locks = [threading.Lock() for _ in devices]
        on_gpu = [each for each in dict.fromkeys(devices) if each.type == "cuda"]
        self._compute = {device: torch.cuda.Stream(device) for device in on_gpu}
        for device in on_gpu:
            torch.cuda.synchronize(device)  # weights came on other streams
        for i, layer in enumerate(layers):
            part = _part_of(i, starts)
            layer.register_forward_pre_hook(self._before(part), with_kwargs=True)
        if norm is not None:
            norm.register_forward_pre_hook(self._before(len(devices) - 1), with_kwargs=True)

    def __str__(self) -> str:
        ends = [*self.starts[1:], self._num_layers]
        parts = zip(self.starts, ends, self.devices, strict=True)
        return ", ".join(f"{start} to {end - 1} on {device}" for start, end, device in parts)

    @contextlib.contextmanager
    def own_streams(self) -> Iterator[None]:
        """Inside, what this thread launches is on streams of its own; at the end all of it is done.

        The wait at the end is the host's, and holds up this thread alone.
        """
        if not self._compute:
            yield
            return
        if not hasattr(self._here, "streams"):
            self._here.streams = {device: torch.cuda.Stream(device) for device in self._compute}
        own = self._here.streams
        with contextlib.ExitStack() as stack:
            for device in reversed(own):  # the first one's last, so that it is the current device
                stack.enter_context(torch.cuda.stream(own[device]))
            yield
            own[self.devices[0]].synchronize()

    @contextlib.contextmanager
    def row(self, given: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """A forward of the trunk, inside `own_streams`.

        Args:
            given: Of the arguments those that are there on every device, in the order of the devices; layers get their
                own device's in place of the first one's. Block masks, for one, cannot be copied.
        """
        here = self._here
        here.copies = {}
        for device, own in zip(dict.fromkeys(self.devices), given, strict=True):
            for first, value in _pairs(given[0], own):
                here.copies[(id(first), device)] = (first, value)
        here.part = None
        self._enter(0)
        try:
            yield
        finally:
            self._leave()
            here.copies = None
            if self._compute:
                torch.cuda.set_device(self.devices[0])

    def hand_over(self, features: Tensor) -> None:
        """Features made on this thread's stream will be used on the current one."""
        if features.is_cuda:
            features.record_stream(torch.cuda.current_stream(features.device))

    def _before(self, part: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            device = self.devices[part]
            args = tuple(self._at(each, device) for each in args)
            kwargs = {name: self._at(value, device) for name, value in kwargs.items()}
            if getattr(self._here, "part", None) not in (None, part):  # what it brings has been sent by now
                self._leave()
                self._enter(part)
            return args, kwargs

        return hook

    def _at(self, value: Any, device: torch.device) -> Any:
        """A layer's argument on a device. Dictionaries stay, as layers may write into them."""
        if isinstance(value, tuple | list):
            return type(value)(self._at(each, device) for each in value)
        copies = getattr(self._here, "copies", None)
        if copies and (found := copies.get((id(value), device))) is not None:
            return found[1]
        if not isinstance(value, Tensor) or value.device == device:
            return value
        if value.is_cuda:  # the copy may run on another stream than that which has the memory
            value.record_stream(torch.cuda.current_stream(value.device))
        moved = value.to(device, non_blocking=True)
        if copies is not None:
            copies[(id(value), device)] = (value, moved)  # kept with its copy: an id is that of what lives
        return moved

    def _enter(self, part: int) -> None:
        """Wait for the part to be free, and launch on its stream from now on."""
        self._locks[part].acquire()
        self._here.part = part
        if (compute := self._compute.get(self.devices[part])) is not None:
            compute.wait_stream(torch.cuda.current_stream(compute.device))
            torch.cuda.set_stream(compute)  # the device becomes the current one too

    def _leave(self) -> None:
        part, self._here.part = self._here.part, None
        if part is None:  # what was under way has failed between two parts
            return
        if (compute := self._compute.get(self.devices[part])) is not None:
            own = self._here.streams[self.devices[part]]
            own.wait_stream(compute)
            torch.cuda.set_stream(own)
        self._locks[part].release()
