"""Writing a feature cache: the rows of a data set through the target, shard by shard; `train.feature_cache` reads it.

A shard counts once it is complete, on the disk, and named in the manifest. What a killed process was writing is made
again; what is in a shard follows from its rows and the manifest alone, so the files are the same bytes then.
"""

from __future__ import annotations

import contextlib
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline import __version__
from paceline.errors import ConfigError, DataError
from paceline.files import explain, locked, remove, staged_file, write_atomically
from paceline.models.kinds import needs_last_hidden
from paceline.models.target import Target
from paceline.plan.memory import feature_dtype
from paceline.plan.resolve import ResolvedRun
from paceline.records import TokenBatch
from paceline.train.feature_cache import (
    LOCK_FILE,
    MANIFEST,
    Dtype,
    Layout,
    Manifest,
    Shard,
    adapter_fingerprint,
    decode,
    encode,
    layout_of,
    read_manifest,
    size_problem,
)
from paceline.train.target import check_taps, load_head, load_target
from paceline.train.tensor_file import PieceWriter, Written

SHARD_BYTES = 1 << 30
"""Size at which the next shard is begun, unless told otherwise."""

Group = list[tuple[int, Tensor, Tensor]]
"""Documents that go through the target together: row, input ids ``[n]``, loss mask ``[n]``."""


class _Stopped(Exception):
    """A stop was asked for: the shard at hand is dropped."""


@dataclass(frozen=True)
class _Made:
    """Documents as they are kept, on the host.

    Attributes:
        lengths: Tokens of each.
        stored: ``[n, W]`` in the type of the cache.
        scales: float32 ``[n, W / D]``, or None.
        squares: float64 ``[2, W / D]``: of the differences that rounding makes, and of the features; None where nobody
            asks.
    """

    lengths: list[int]
    stored: Tensor
    scales: Tensor | None
    squares: Tensor | None


@contextlib.contextmanager
def open_folder(out: Path) -> Iterator[Manifest | None]:
    """The folder of a cache, made if it is not there, locked against a second writer; and what it holds so far.

    Raises: ConfigError if another process writes there; DataError if it holds something else, or is damaged.
    """
    if out.exists() and not out.is_dir():
        raise DataError(f"output {out} exists and is no folder: choose another --out")
    found = sorted(path.name for path in out.iterdir() if not path.name.startswith(".")) if out.exists() else []
    if (foreign := [name for name in found if name != LOCK_FILE]) and MANIFEST not in found:
        raise DataError(f"output {out} holds {foreign[0]} but no {MANIFEST}: choose another --out")

    def busy(holder: str) -> ConfigError:
        return ConfigError(f"{out} is being written by process {holder}: wait for it, or choose another --out")

    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with locked(out / LOCK_FILE, busy):
            for left_over in out.glob(".shard-*"):  # of processes that were killed
                remove(left_over)
            yield read_manifest(out) if (out / MANIFEST).exists() else None
    finally:
        if is_new and [path.name for path in out.iterdir()] == [LOCK_FILE]:  # nothing has begun
            remove(out)


class CacheWriter:
    """Makes the shards that a cache is missing.

    Args:
        resolved: The run whose features they are.
        out: From `open_folder`, as `earlier` is.
        dtype: Type to keep them in; ``target``: as the target delivers them.
        shard_bytes: Size at which the next shard is begun; None: as `earlier` has it, else `SHARD_BYTES`.

    Attributes:
        out: The folder.
        dtype: That type.
        layer_ids, has_last_hidden: What is kept of the target.
        num_states, hidden_size: A token has ``num_states * hidden_size`` values.
        num_rows, num_tokens: Of the data set.
        shards: First row, rows and tokens of each shard.
        total_bytes: Of all shards.
    """

    def __init__(
        self, resolved: ResolvedRun, out: Path, earlier: Manifest | None, dtype: str, shard_bytes: int | None = None
    ) -> None:
        """Raises: ConfigError if `earlier` was begun with other settings."""
        config = resolved.config
        self._config, self._dataset, self.out = config, resolved.dataset, out
        self.layer_ids, self.has_last_hidden = resolved.draft.target_layer_ids, needs_last_hidden(config)
        self._delivered = feature_dtype(config, self.has_last_hidden)
        self.dtype: Dtype = self._delivered if dtype == "target" else dtype  # type: ignore[assignment]  # resolved
        self.num_states = len(self.layer_ids) + self.has_last_hidden
        self.hidden_size = resolved.draft.hidden_size
        self.num_rows, self.num_tokens = len(resolved.dataset), int(resolved.dataset.lengths.sum())
        if shard_bytes is None:
            shard_bytes = SHARD_BYTES if earlier is None else earlier.shard_bytes
        self._earlier = earlier
        self._settings: dict[str, Any] = {
            "target_dtype": config.target.dtype,
            "target_fp8": config.target.fp8,
            "adapter": adapter_fingerprint(config),
            "data_fingerprint": resolved.dataset.fingerprint,
            "layer_ids": self.layer_ids,
            "hidden_size": self.hidden_size,
            "last_hidden": self.has_last_hidden,
            "dtype": self.dtype,
            "num_rows": self.num_rows,
            "num_tokens": self.num_tokens,
            "shard_bytes": shard_bytes,
        }
        self._check(self._settings)
        self.shards = plan_shards(resolved.dataset.lengths, self.num_states, self.hidden_size, self.dtype, shard_bytes)
        self.total_bytes = self.bytes_in(self.dtype)
        self._done = {} if earlier is None else {shard.name: shard for shard in earlier.shards}
        for shard in list(self._done.values()):  # what is missing or cut is made again
            if size_problem(out, shard) is not None:
                del self._done[shard.name]
        self._num_threads = torch.get_num_threads()  # before `load_target` sets those of a run

    @property
    def missing_bytes(self) -> int:
        """Of the shards that are not there."""
        return self.total_bytes - sum(shard.bytes for shard in self._done.values())

    @property
    def num_done(self) -> int:
        """Shards that are there."""
        return len(self._done)

    @property
    def missing_tokens(self) -> int:
        """Of the shards that are not there."""
        return self.num_tokens - sum(shard.num_tokens for shard in self._done.values())

    def bytes_in(self, dtype: Dtype) -> int:
        """What all shards would take in another type."""
        layouts = (layout_of(rows, tokens, self.num_states, self.hidden_size, dtype) for _, rows, tokens in self.shards)
        return sum(layout.num_bytes for layout in layouts)

    def check_space(self) -> None:
        """Raises: DataError if the disk cannot hold what is missing."""
        free = shutil.disk_usage(self.out).free
        if self.missing_bytes > free:
            held = f" beside the {self.num_done} shards that are there" if self.num_done else ""
            raise DataError(
                f"the cache needs {self.missing_bytes:,} bytes of disk{held}, and {self.out} has {free:,} free: "
                f"{self.missing_bytes - free:,} too few; free space, choose another --out, or a smaller --dtype "
                f"(bfloat16: {self.bytes_in('bfloat16'):,}, fp8: {self.bytes_in('fp8'):,})"
            )

    def run(
        self,
        should_stop: Callable[[], object] = lambda: False,
        on_tokens: Callable[[int], object] = lambda count: None,
        workers: int | None = None,
    ) -> Manifest | None:
        """Load the target and make what is missing; the complete manifest, or None if a stop was asked for.

        Args:
            on_tokens: Told how many tokens have been made since it was last called.
            workers: Threads that run the target, on the CPU; None: as many as keep its cores busy.
        Raises: ModelError, ConfigError; DataError if the disk is full, with all complete shards kept.
        """
        if self._earlier is not None and self.num_done == len(self.shards):
            return self._earlier
        target, manifest = self._load()
        if workers is None:
            workers = self._num_threads // int(self._config.topology.threads)
        if target.device.type != "cpu":  # CUDA graphs are replayed by the main thread alone
            workers = 0
        elif target.shape.rope.get("rope_type") in ("dynamic", "longrope"):  # threads would disturb each other
            workers = 1
        try:
            self._publish(manifest)
            for number, shard in enumerate(self.shards):
                name = f"shard-{number:05d}.safetensors"
                if name not in self._done:
                    manifest = self._write_shard(name, shard, manifest, target, should_stop, on_tokens, workers)
        except _Stopped:
            return None
        except OSError as error:
            raise DataError(
                f"cache {self.out} could not be written: {explain(error)}; {self.num_done} of {len(self.shards)} "
                "shards are complete and kept, and the same command goes on with the others"
            ) from error
        return manifest

    def _load(self) -> tuple[Target, Manifest]:
        config = self._config
        head_fingerprint = load_head(config).fingerprint()
        target = load_target(config)
        check_taps(target)
        made_with = {
            **self._settings,
            "target_fingerprint": target.fingerprint(),
            "head_fingerprint": head_fingerprint,
            "packed": target.packed,
            "row_length": int(config.pipeline.tokens_per_batch) if target.packed else None,
        }
        self._check(made_with)
        if self._earlier is not None:
            return target, self._earlier.model_copy(update={"shards": self._complete()})
        return target, Manifest(
            paceline=__version__,
            target=config.target.path,
            quantization=target.quantization_note,
            relative_error=None,
            **made_with,
        )

    def _check(self, made_with: dict[str, Any]) -> None:
        """Raises: ConfigError naming what was otherwise when the cache was begun."""
        if self._earlier is None:
            return
        before = self._earlier.model_dump()
        different = [
            f"{name} was {before[name]}, is now {value}" for name, value in made_with.items() if before[name] != value
        ]
        if different:
            raise ConfigError(
                f"{self.out} was begun with other settings: use those, or choose another --out\n  "
                + "\n  ".join(different)
            )

    def _complete(self) -> tuple[Shard, ...]:
        return tuple(sorted(self._done.values(), key=lambda shard: shard.first_row))

    def _publish(self, manifest: Manifest) -> None:
        write_atomically(self.out / MANIFEST, manifest.model_dump_json(indent=1) + "\n")

    def _layout(self, shard: tuple[int, int, int]) -> Layout:
        return layout_of(shard[1], shard[2], self.num_states, self.hidden_size, self.dtype)

    def _write_shard(
        self,
        name: str,
        shard: tuple[int, int, int],
        manifest: Manifest,
        target: Target,
        should_stop: Callable[[], object],
        on_tokens: Callable[[int], object],
        workers: int,
    ) -> Manifest:
        """The manifest with this shard, which is on the disk then. Raises: _Stopped, OSError."""
        first_row, num_rows, num_tokens = shard
        measures = first_row == 0 and self.dtype != self._delivered
        squares = torch.zeros(2, self.num_states, dtype=torch.float64)
        groups = self._groups(first_row, num_rows, manifest.row_length)
        lengths = self._dataset.lengths[first_row : first_row + num_rows]
        threads = int(self._config.topology.threads)

        def make(group: Group) -> _Made:
            return self._make(target, group, manifest.row_length, measures)

        with (
            staged_file(self.out / name) as partial,
            contextlib.closing(_ShardFile(partial)) as file,
            ThreadPoolExecutor(1) as writer,
            ThreadPoolExecutor(max(1, workers), initializer=torch.set_num_threads, initargs=(threads,)) as makers,
        ):
            writing = writer.submit(file.begin, self._layout(shard), lengths)
            for made in _in_order(makers, make, groups, workers) if workers else map(make, groups):
                if should_stop():
                    makers.shutdown(wait=False, cancel_futures=True)
                    raise _Stopped
                writing.result()
                writing = writer.submit(file.add, made)
                if made.squares is not None:
                    squares += made.squares
                on_tokens(sum(made.lengths))
            writing.result()
            written = file.finish()
        assert written.bytes == self._layout(shard).num_bytes, "the layout is not that of the file"
        self._done[name] = Shard(
            name=name,
            first_row=first_row,
            num_rows=num_rows,
            num_tokens=num_tokens,
            bytes=written.bytes,
            sha256=written.sha256,
        )
        update: dict[str, Any] = {"shards": self._complete()}
        if measures:
            update["relative_error"] = tuple((squares[0] / squares[1]).sqrt().tolist())
        manifest = manifest.model_copy(update=update)
        self._publish(manifest)
        return manifest

    def _groups(self, first_row: int, num_rows: int, row_length: int | None) -> Iterator[Group]:
        """Rows one by one, or as many in a row as it holds; groups do not reach over a shard's end."""
        group: Group = []
        room = 0
        for row in range(first_row, first_row + num_rows):
            ids, mask = self._dataset.row(row)
            if group and len(ids) > room:
                yield group
                group = []
            if not group:
                room = row_length or len(ids)
            group.append((row, ids, mask))
            room -= len(ids)
        yield group

    def _make(self, target: Target, group: Group, row_length: int | None, measures: bool) -> _Made:
        lengths = [len(ids) for _, ids, _ in group]
        features = target.features(TokenBatch.pack(0, group, row_length or sum(lengths)))
        parts = [features.context_feature] + ([] if features.last_hidden is None else [features.last_hidden])
        joined = torch.cat(parts, dim=1)[: sum(lengths)]
        stored, scales = encode(joined, self.num_states, self.dtype)
        squares = None
        if measures:
            kept = decode(stored, scales, self.num_states, torch.float32, self.num_states)
            pairs = zip(*(each.split(self.hidden_size, dim=1) for each in (kept, joined)), strict=True)
            sums = [[_square_sum(x - y.float()), _square_sum(y.float())] for x, y in pairs]
            squares = torch.tensor(sums, dtype=torch.float64).T
        return _Made(lengths, stored.cpu(), None if scales is None else scales.cpu(), squares)


def plan_shards(
    lengths: np.ndarray, num_states: int, hidden_size: int, dtype: Dtype, shard_bytes: int
) -> list[tuple[int, int, int]]:
    """First row, number of rows and of tokens of each shard: rows in order, as many as fit, at least one.

    Args:
        lengths: Tokens of each row, int64.
        shard_bytes: That a shard holds, its header apart.
    """
    empty, row, token = (
        _data_bytes(layout_of(r, t, num_states, hidden_size, dtype)) for r, t in ((0, 0), (1, 0), (0, 1))
    )
    ends = np.concatenate([[0], np.cumsum(lengths * (token - empty) + (row - empty))])
    tokens = np.concatenate([[0], np.cumsum(lengths)])
    shards, first = [], 0
    while first < len(lengths):
        fitting = int(np.searchsorted(ends, ends[first] + shard_bytes - empty, side="right")) - 1
        end = max(fitting, first + 1)
        shards.append((first, end - first, int(tokens[end] - tokens[first])))
        first = end
    return shards


def _data_bytes(layout: Layout) -> int:
    return layout.num_bytes - len(layout.header)


def _in_order(
    pool: ThreadPoolExecutor, make: Callable[[Group], _Made], groups: Iterable[Group], ahead: int
) -> Iterator[_Made]:
    """What several threads make, in the order of the groups, and no more than `ahead` of it in advance."""
    pending: deque[Future[_Made]] = deque()
    for group in groups:
        pending.append(pool.submit(make, group))
        if len(pending) > ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


class _ShardFile:
    """A shard that is being written. Methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self._file = PieceWriter(path)
        self._scales: list[Tensor] = []
        self._checksums: list[int] = []

    def begin(self, layout: Layout, lengths: np.ndarray) -> None:
        """Write what stands in front of the features; int64 `lengths` in tokens of the documents to come."""
        self._file.write(layout.header)
        self._file.write(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64).tobytes())

    def add(self, made: _Made) -> None:
        """Append documents."""
        for position, stored in enumerate(made.stored.split(made.lengths)):
            checksum = zlib.crc32(_bytes_of(stored))
            if made.scales is not None:
                scales = made.scales.split(made.lengths)[position]
                checksum = zlib.crc32(_bytes_of(scales), checksum)
                self._scales.append(scales)
            self._checksums.append(checksum)
        self._file.write(_bytes_of(made.stored))

    def finish(self) -> Written:
        """Write what stands behind the features, and force all to the disk."""
        for scales in self._scales:
            self._file.write(_bytes_of(scales))
        self._file.write(np.array(self._checksums, dtype=np.int64).tobytes())
        return self._file.finish()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _square_sum(tensor: Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data
