"""Safetensors files: written piece by piece and hashed on the way, read back with what is wrong with a damaged one.

The data is read once, straight from the tensors, and while a piece is hashed or written other threads run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from paceline.errors import CheckpointError

CHUNK_BYTES = 4 * 2**20
"""Hashed and written at a time."""

SYNC_BYTES = 256 * 2**20
"""Forced to the disk at a time: a large file does not fill the page cache, and never syncs for long."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Written:
    """A file as a manifest has it.

    Attributes:
        bytes: Its size.
        sha256: Of its content, in hexadecimal.
    """

    bytes: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor], moved: Callable[[int], None]) -> Written:
    """Write a new safetensors file and force it to the disk; tensors on a device come over one by one.

    Args:
        moved: Told the bytes of each piece once it is written.
    Raises: OSError.
    """
    return write_pieces(path, _pieces(tensors), moved)


def write_pieces(path: Path, pieces: Iterable[memoryview | bytes], moved: Callable[[int], None]) -> Written:
    """Write a new file and force it to the disk. Raises: OSError."""
    with contextlib.closing(PieceWriter(path)) as file:
        for piece in pieces:
            file.write(piece)
            moved(len(piece))
        return file.finish()


class PieceWriter:
    """A new file that is written piece by piece, and hashed on the way. Every method raises OSError."""

    def __init__(self, path: Path) -> None:
        self._digest, self._size, self._synced = hashlib.sha256(), 0, 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, piece: memoryview | bytes) -> None:
        """Append a piece; now and then all is forced to the disk."""
        self._digest.update(piece)
        _write_all(self._descriptor, piece)
        self._size += len(piece)
        if self._size - self._synced >= SYNC_BYTES:
            os.fsync(self._descriptor)
            self._synced = self._size

    def finish(self) -> Written:
        """Force the rest to the disk."""
        os.fsync(self._descriptor)
        return Written(self._size, self._digest.hexdigest())

    def close(self) -> None:
        """Let go of the file, whatever state it is in."""
        os.close(self._descriptor)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. Raises: CheckpointError naming the file, and the bytes declared and found."""
    try:
        return safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        found = path.stat().st_size if path.is_file() else 0
        declared = _declared_bytes(path)
        if declared is not None and declared != found:
            raise CheckpointError(f"{path} is damaged: {declared} bytes declared, {found} found") from error
        raise CheckpointError(f"{path} cannot be loaded ({found} bytes found): {error}") from error


def _write_all(descriptor: int, piece: memoryview | bytes) -> None:
    """A disk that fills up takes a part first, and says so at the next write."""
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview | bytes]:
    """The bytes of a safetensors file: the header's length, the header, the data without gaps."""
    in_order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), _DTYPES[item[1].dtype], item[0]))
    header, end = {}, 0
    for name, tensor in in_order:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in in_order:
        host = tensor.detach().to("cpu").contiguous()
        data = host.reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(data), CHUNK_BYTES):
            yield data[begin : begin + CHUNK_BYTES]


def _declared_bytes(path: Path) -> int | None:
    """How long a file should be, as its header says; None if that cannot be read either."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > MAX_HEADER_BYTES:
                return None
            header = json.loads(file.read(length))
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
        return 8 + length + max((int(end) for end in ends), default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
