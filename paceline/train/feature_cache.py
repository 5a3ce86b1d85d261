"""Features of a target on disk, a document at a time: made once by `paceline cache`, read in the place of the target.

    DIR/manifest.json              `Manifest`; names the shards that are complete
    DIR/shard-00000.safetensors    features      [T, W]     the documents of some data set rows, end to end
                                   starts        [R + 1]    where each of them begins; T at the end
                                   scales        [T, W / D] fp8 alone: float32, by which the values are multiplied
                                   checksums     [R]        CRC-32 of each document's features, then of its scales
    DIR/cache.lock                 held by the process that writes

W is ``(L + 1)*D`` where the last hidden state is kept behind the taps, else ``L*D``. Documents are those of all rows
of the data set, in its order, so any packing, order and held-out share can be made of them. `train.cache_writer` writes
it.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from paceline.config import RunConfig
from paceline.errors import ConfigError, DataError, ModelError
from paceline.files import child, sha256
from paceline.models.adapter import adapter_fingerprint as fingerprint_of
from paceline.models.kinds import needs_last_hidden
from paceline.models.target import Target
from paceline.plan.memory import KEPT_SIZES, feature_dtype
from paceline.profiling import stages
from paceline.records import FeatureBatch, TokenBatch

FORMAT = 1
MANIFEST = "manifest.json"
LOCK_FILE = "cache.lock"

FP8_MAX = 448.0
"""Largest value of float8_e4m3fn."""

Dtype = Literal["float32", "bfloat16", "fp8"]

STORED: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
"""Types that features are kept in."""

_NAMES = {"float32": "F32", "bfloat16": "BF16", "fp8": "F8_E4M3"}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Shard(_Record):
    """A file of documents that is complete."""

    name: str
    first_row: int
    """Data set row of its first document."""
    num_rows: int
    num_tokens: int
    bytes: int
    sha256: str


class Manifest(_Record):
    """What a cache holds, and what it was made with. All but `paceline` and `shards` decides what the features are."""

    format: int = FORMAT
    """Version of the layout; another one is refused."""
    paceline: str
    """Version that began it."""
    target: str
    """Name of the target as it was given."""
    target_fingerprint: str
    """`Target.fingerprint` of what made the features; checkpoints of runs from this cache have it."""
    head_fingerprint: str
    """That of embedding, first layer and head alone, as `load_head` loads them: what such a run can compare."""
    target_dtype: Literal["float32", "bfloat16"]
    """Type that the target computed in."""
    target_fp8: bool
    """Whether it multiplied in fp8."""
    adapter: str | None
    """`adapter_fingerprint` of `target.adapter`; None: there was none."""
    quantization: str | None
    """How the target's weights were quantised, in one line."""
    packed: bool
    """Whether documents ran through the target in packed rows."""
    row_length: int | None
    """S of those rows; None: each ran alone."""
    data_fingerprint: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    """D."""
    last_hidden: bool
    """Whether the last hidden state stands behind the taps."""
    dtype: Dtype
    """Type that the features are kept in. fp8: float8_e4m3fn, with one scale a token and state."""
    relative_error: tuple[float, ...] | None
    """What rounding to `dtype` does to each state: the norm of the difference by that of the state, over the first
    shard. None: nothing is rounded, or the first shard is not there yet."""
    num_rows: int
    num_tokens: int
    shard_bytes: int
    """Size at which the next shard is begun."""
    shards: tuple[Shard, ...] = ()
    """Those that are complete, in the order of their rows."""

    @property
    def num_states(self) -> int:
        """Taps, and the last hidden state if it is kept."""
        return len(self.layer_ids) + self.last_hidden

    @property
    def is_complete(self) -> bool:
        """Whether the documents of all rows are there."""
        return sum(shard.num_rows for shard in self.shards) == self.num_rows

    def layout(self, num_rows: int, num_tokens: int) -> Layout:
        """Where things lie in a shard of this cache."""
        return layout_of(num_rows, num_tokens, self.num_states, self.hidden_size, self.dtype)


@dataclass(frozen=True)
class Layout:
    """A shard file by its bytes.

    Attributes:
        header: The safetensors header with its length in front.
        starts, features, scales, checksums: Where each tensor begins; `scales` is `checksums` where there are none.
        num_bytes: Of the file.
    """

    header: bytes
    starts: int
    features: int
    scales: int
    checksums: int
    num_bytes: int


def layout_of(num_rows: int, num_tokens: int, num_states: int, hidden_size: int, dtype: Dtype) -> Layout:
    """The file of so many documents of so many tokens in all."""
    width = num_states * hidden_size
    tensors: list[tuple[str, str, list[int], int]] = [
        ("starts", "I64", [num_rows + 1], 8),
        ("features", _NAMES[dtype], [num_tokens, width], KEPT_SIZES[dtype]),
        *([("scales", "F32", [num_tokens, num_states], 4)] if dtype == "fp8" else []),
        ("checksums", "I64", [num_rows], 8),
    ]
    header, places, end = {}, {}, 0
    for name, kind, shape, size in tensors:
        begin, end = end, end + size * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        places[name] = begin
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    at = {name: data + begin for name, begin in places.items()}
    return Layout(
        header=len(text).to_bytes(8, "little") + text,
        starts=at["starts"],
        features=at["features"],
        scales=at.get("scales", at["checksums"]),
        checksums=at["checksums"],
        num_bytes=data + end,
    )


def read_manifest(folder: Path) -> Manifest:
    """Raises: ConfigError if there is none; DataError if it is damaged or of another version."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is no feature cache: it has no {MANIFEST}; `paceline cache` makes one") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise DataError(f"{path} has format {found}; this version reads {FORMAT}: make the cache again")
    try:
        manifest = Manifest.model_validate(content)
        for shard in manifest.shards:
            child(folder, shard.name)
    except ValueError as error:  # pydantic's as well
        raise DataError(f"{path} is damaged: {error}") from error
    return manifest


def adapter_fingerprint(config: RunConfig) -> str | None:
    """That of `target.adapter`; None without one. Raises: ModelError if its files are not there."""
    return None if config.target.adapter is None else fingerprint_of(config.target.adapter)


def adopted(config: RunConfig) -> RunConfig:
    """The configuration with what `target.cache` fixes in the place of `auto`; as it is without one.

    Raises: ConfigError, DataError.
    """
    if config.target.cache is None:
        return config
    manifest = read_manifest(Path(config.target.cache))
    values = {"layer_ids": manifest.layer_ids, "dtype": manifest.target_dtype}
    update = {name: value for name, value in values.items() if getattr(config.target, name) == "auto"}
    return config.model_copy(update={"target": config.target.model_copy(update=update)})


def check_run(config: RunConfig, data_fingerprint: str) -> None:
    """Whether `target.cache`, if it is set, holds the features that a resolved run would have; weights are not read.

    Raises: ConfigError naming what differs; DataError if the cache is damaged.
    """
    if config.target.cache is None:
        return
    place = Path(config.target.cache)
    manifest = read_manifest(place)
    again = "make another with `paceline cache` and this run file"
    pairs = [
        ("target.layer_ids", list(manifest.layer_ids), list(config.target.layer_ids)),
        ("target.dtype", manifest.target_dtype, config.target.dtype),
        ("target.fp8", manifest.target_fp8, config.target.fp8),
        ("target.adapter", *(_short(each) for each in (manifest.adapter, adapter_fingerprint(config)))),
        ("the data's fingerprint", *(_short(each) for each in (manifest.data_fingerprint, data_fingerprint))),
    ]
    different = [f"{name}: the cache was made with {cached}, the run has {here}" for name, cached, here in pairs
                 if cached != here]  # fmt: skip
    if needs_last_hidden(config) and not manifest.last_hidden:
        different.append("the last hidden state, which draft.kind and loss ask for: the cache has the taps alone")
    if different:
        raise ConfigError(f"target.cache={place} is not of this run; {again}\n  " + "\n  ".join(different))
    check_shards(place, manifest)


def check_shards(folder: Path, manifest: Manifest) -> None:
    """Whether all shards are there, as long as they have to be. Raises: ConfigError, DataError naming one."""
    if not manifest.is_complete:
        done = sum(shard.num_rows for shard in manifest.shards)
        raise ConfigError(
            f"the cache {folder} is not complete, it has {done:,} of {manifest.num_rows:,} rows: the `paceline cache` "
            "command that began it goes on"
        )
    for shard in manifest.shards:
        if (problem := size_problem(folder, shard)) is not None:
            raise DataError(f"{problem}; the `paceline cache` command that made it makes that shard again")


def size_problem(folder: Path, shard: Shard) -> str | None:
    """What is wrong with a shard's file as far as its size tells."""
    path = child(folder, shard.name)
    try:
        found = path.stat().st_size
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None if found == shard.bytes else f"{path} is damaged: {found:,} bytes, {shard.bytes:,} were written"


def find_damage(folder: Path, on_shard: Callable[[Shard], object] = lambda shard: None) -> list[str]:
    """Read all shards, and compare them with the manifest's SHA-256; a line for each that differs.

    Raises: ConfigError, DataError if there is no readable manifest.
    """
    problems = []
    for shard in read_manifest(folder).shards:
        on_shard(shard)
        problem = size_problem(folder, shard)
        path = child(folder, shard.name)
        try:
            if problem is None and sha256(path) != shard.sha256:
                problem = f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}"
        except OSError as error:
            problem = f"{path} cannot be read: {error.strerror}"
        problems += [] if problem is None else [problem]
    return problems


def encode(features: Tensor, num_states: int, dtype: Dtype) -> tuple[Tensor, Tensor | None]:
    """Features ``[n, W]`` in the type that they are kept in, and float32 scales ``[n, W / D]`` where it has them."""
    if dtype != "fp8":
        return features.to(STORED[dtype]), None
    size = features.shape[1] // num_states
    stored = torch.empty(features.shape, dtype=STORED["fp8"], device=features.device)
    scales = torch.empty(len(features), num_states, dtype=torch.float32, device=features.device)
    for state in range(num_states):  # one at a time: float32 of all is twice the row
        part = slice(state * size, (state + 1) * size)
        values = features[:, part].float()
        scale = values.abs().amax(-1) / FP8_MAX
        scale.masked_fill_(scale == 0, 1.0)
        stored[:, part] = values / scale[:, None]
        scales[:, state] = scale
    return stored, scales


def decode(stored: Tensor, scales: Tensor | None, num_states: int, dtype: torch.dtype, wanted: int) -> Tensor:
    """The first `wanted` states of kept features ``[n, W]`` in another type, ``[n, wanted * D]``."""
    size = stored.shape[1] // num_states
    if scales is None:
        return stored[:, : wanted * size].to(dtype).contiguous()
    out = torch.empty(len(stored), wanted * size, dtype=dtype, device=stored.device)
    for state in range(wanted):  # one at a time: float32 of all is twice the row
        part = slice(state * size, (state + 1) * size)
        out[:, part] = stored[:, part].float() * scales[:, state : state + 1]
    return out


class CachedFeatures:
    """Features that a target would make, read from a complete cache; any number of threads may ask.

    A document's checksum is compared the first time that it is read.

    Args:
        device: Where the features are wanted.
        dtype: Type that the target would deliver them in.
        with_last_hidden: Whether the last hidden state is wanted as well.

    Attributes:
        manifest: Of the cache.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, with_last_hidden: bool) -> None:
        """Raises: ConfigError, DataError if the cache is not complete, or not what its manifest says."""
        self.manifest = read_manifest(folder)
        check_shards(folder, self.manifest)
        self._folder, self._device, self._dtype = folder, device, dtype
        self._num_taps = len(self.manifest.layer_ids)
        self._num_wanted = self._num_taps + with_last_hidden
        self._first_rows = [shard.first_row for shard in self.manifest.shards]
        self._indices: dict[int, _Index] = {}
        self._is_checked = np.zeros(self.manifest.num_rows, dtype=bool)
        self._lock = threading.Lock()

    def features(self, tokens: TokenBatch) -> FeatureBatch:
        """As `Target.features` of a packed row. Raises: DataError if what is read is damaged; OSError."""
        joined = self._joined(list(zip(tokens.rows, tokens.spans, strict=True)), len(tokens.input_ids))
        size = self._num_taps * self.manifest.hidden_size
        return FeatureBatch(tokens, joined[:, :size], joined[:, size:] if joined.shape[1] > size else None)

    def row_features(self, row: int) -> Tensor:
        """Context features ``[n, L*D]`` of the document of a data set row. Raises: As `features`."""
        index, at = self._find(row)
        length = int(index.starts[at + 1] - index.starts[at])
        return self._joined([(row, (0, length))], length)[:, : self._num_taps * self.manifest.hidden_size]

    def _joined(self, documents: list[tuple[int, tuple[int, int]]], length: int) -> Tensor:
        """Documents at their places in a row of `length` tokens, zeros elsewhere, on the device."""
        manifest, on_gpu = self.manifest, self._device.type == "cuda"
        width = manifest.num_states * manifest.hidden_size
        if on_gpu:  # pinned memory is made by a thread's current device
            torch.cuda.set_device(self._device)
        stored = torch.empty(length, width, dtype=STORED[manifest.dtype], pin_memory=on_gpu)
        scales = torch.ones(length, manifest.num_states, pin_memory=on_gpu) if manifest.dtype == "fp8" else None
        end = 0
        for row, (start, end) in documents:
            self._read_document(row, stored[start:end], None if scales is None else scales[start:end])
        stored[end:].view(torch.uint8).zero_()
        if on_gpu:
            with stages.H2D_SYNC:  # over before it is handed on
                stored = stored.to(self._device, non_blocking=True)
                scales = None if scales is None else scales.to(self._device, non_blocking=True)
                torch.cuda.current_stream(self._device).synchronize()
        with stages.PACK_HIDDEN:
            return decode(stored, scales, manifest.num_states, self._dtype, self._num_wanted)

    def _read_document(self, row: int, stored: Tensor, scales: Tensor | None) -> None:
        """Fill in one document, ``[n, W]``, and its scales. Raises: DataError, OSError."""
        index, at = self._find(row)
        start, end = int(index.starts[at]), int(index.starts[at + 1])
        if end - start != len(stored):
            raise DataError(
                f"{index.path} is damaged: row {row} has {end - start} tokens there, {len(stored)} in the data"
            )
        parts = [(index.layout.features, stored)] + ([] if scales is None else [(index.layout.scales, scales)])
        checksum = 0
        with _opened(index.path) as file:
            for begin, part in parts:
                view = part.view(torch.uint8).numpy().reshape(-1).data
                _read_exactly(file, view, begin + start * part.shape[1] * part.element_size(), index.path)
                if not self._is_checked[row]:
                    checksum = zlib.crc32(view, checksum)
        if not self._is_checked[row] and checksum != index.checksums[at]:
            raise DataError(
                f"{index.path} is damaged: the checksum of row {row} is not the one that was written; remove that "
                "file, and the `paceline cache` command that made it makes it again"
            )
        self._is_checked[row] = True

    def _find(self, row: int) -> tuple[_Index, int]:
        """Index of the shard that has a row, and its place there."""
        number = bisect.bisect_right(self._first_rows, row) - 1
        with self._lock:
            if number not in self._indices:
                self._indices[number] = self._read_index(self.manifest.shards[number])
            return self._indices[number], row - self._first_rows[number]

    def _read_index(self, shard: Shard) -> _Index:
        path = child(self._folder, shard.name)
        layout = self.manifest.layout(shard.num_rows, shard.num_tokens)
        header = bytearray(len(layout.header))
        starts, checksums = np.empty(shard.num_rows + 1, np.int64), np.empty(shard.num_rows, np.int64)
        with _opened(path) as file:
            _read_exactly(file, memoryview(header), 0, path)
            _read_exactly(file, starts.view(np.uint8).data, layout.starts, path)
            _read_exactly(file, checksums.view(np.uint8).data, layout.checksums, path)
        if header != layout.header or starts[0] != 0 or starts[-1] != shard.num_tokens or (np.diff(starts) < 0).any():
            raise DataError(f"{path} is damaged: its header is not that of {shard.num_rows} rows")
        return _Index(path, layout, starts, checksums)


@dataclass(frozen=True)
class _Index:
    """Of a shard: where each document begins, int64 ``[R + 1]`` tokens, and its checksum, int64 ``[R]``."""

    path: Path
    layout: Layout
    starts: np.ndarray
    checksums: np.ndarray


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file to read from; a descriptor for each would be too many."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_exactly(file: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view`. No memory map: a file that has become shorter, or a bad disk, is then an error and not a signal.

    Raises: OSError; DataError at the file's end.
    """
    while view:
        if not (count := os.preadv(file, [view], offset)):
            raise DataError(f"{path} is damaged: it ends at byte {offset:,}")
        view, offset = view[count:], offset + count


def open_cached(config: RunConfig, head: Target) -> CachedFeatures:
    """The features of a resolved run with `target.cache`.

    Args:
        head: From `load_head`.
    Raises: ConfigError, DataError; ModelError if the cache was made with another target.
    """
    assert config.target.cache is not None
    folder, with_last_hidden = Path(config.target.cache), needs_last_hidden(config)
    dtype = getattr(torch, feature_dtype(config, with_last_hidden))
    cached = CachedFeatures(folder, head.device, dtype, with_last_hidden)
    made, here = cached.manifest.head_fingerprint, head.fingerprint()
    if made != here:
        raise ModelError(
            f"target.cache={folder} was made with another target ({cached.manifest.target}) than that of "
            f"{config.target.path}: embedding, first layer and head have the fingerprint {made[:12]} there, "
            f"{here[:12]} here"
        )
    return cached


def _short(fingerprint: str | None) -> str | None:
    return None if fingerprint is None else fingerprint[:12]
