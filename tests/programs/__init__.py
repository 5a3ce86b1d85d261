"""Programs with a known bottleneck, for looks at them from outside; each says when it is at work."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@contextlib.contextmanager
def running(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """One of them at work: its file's name and arguments. It ends with the block."""
    command = [sys.executable, str(FOLDER / arguments[0]), *arguments[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def compiled_driver(folder: Path) -> Path:
    """``libcuda.so.1`` without a device, its internals stripped like the real one's; without a compiler: a skip."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    library = folder / "libcuda.so.1"
    source = FOLDER / "fake_cuda.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-s", "-o", str(library), str(source)], check=True)
    return library
