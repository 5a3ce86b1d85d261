"""`paceline doctor`: what this machine has, and the one fix for what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON on stdout.")] = False) -> None:
    """Check the machine; exit code 1 if something that training needs is missing."""
    checks = run_checks()
    if as_json:
        typer.echo(json.dumps({"ok": all(c["ok"] for c in checks), "checks": checks}, indent=1))
    else:
        for check in checks:
            typer.echo(f"{'ok  ' if check['ok'] else 'FAIL'} {check['name']:<13} {check['seen']}")
            if check["fix"]:
                typer.echo(f"     {'':<13} -> {check['fix']}")
    if not all(check["ok"] for check in checks):
        raise typer.Exit(1)


def run_checks() -> list[dict[str, Any]]:
    """One record a check: name, ok, what was seen, and the fix (empty when there is nothing to do)."""
    return [_python(), _package("torch", (2, 11), (2, 15)), _package("transformers", (5, 17), (6,)), *_devices(),
            *_kernels(), *_profiling(), _memory(), _disk()]  # fmt: skip


def _check(name: str, ok: bool, seen: str, fix: str = "") -> dict[str, Any]:
    return {"name": name, "ok": ok, "seen": seen, "fix": fix}


def _python() -> dict[str, Any]:
    ok = sys.version_info >= (3, 11)
    return _check("python", ok, platform.python_version(), "" if ok else "install Python 3.11 or newer")


def _package(name: str, least: tuple[int, ...], below: tuple[int, ...]) -> dict[str, Any]:
    wanted = f">={'.'.join(map(str, least))},<{'.'.join(map(str, below))}"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _check(name, False, "not installed", f"pip install '{name}{wanted}'")
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    ok = least <= number < below
    return _check(name, ok, version, "" if ok else f"pip install '{name}{wanted}'")


def _devices() -> list[dict[str, Any]]:
    import torch

    checks = [_check("cpu", True, f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}")]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            checks.append(_check(f"cuda:{i}", True, f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
    elif shutil.which("nvidia-smi"):
        fix = "pip install a CUDA build of torch" if torch.version.cuda is None else "look at the driver: nvidia-smi"
        checks.append(_check("cuda", False, f"a driver, but torch {torch.__version__} sees no GPU", fix))
    else:
        checks.append(_check("cuda", True, "no GPU; the CPU will be used"))
    return checks


def _kernels() -> list[dict[str, Any]]:
    """Kernels that a GPU can use besides PyTorch's own; none of them is needed."""
    import torch

    if not torch.cuda.is_available():
        return []
    checks = []
    for name, package, use, extra in (
        ("fla", "fla-core", "hybrid targets run packed", "gpu"),
        ("flash4", "flash-attn-4", "kernels.attention=flash4 is possible", "fa4"),
    ):
        try:
            seen = f"{package} {importlib.metadata.version(package)}: {use}"
            checks.append(_check(name, True, seen))
        except importlib.metadata.PackageNotFoundError:
            checks.append(_check(name, True, f"without {package} (extra `{extra}`); with it {use}"))
    return checks


def _profiling() -> list[dict[str, Any]]:
    """What `paceline profile attach` can look at: its programs, and the right to read a process of this user.

    Tried on the one that started this one: with a child of its own even a guarded kernel lets it do all.
    """
    from paceline.profiling.collect.process import rights, tool

    if sys.platform != "linux":
        return [_check("profile attach", True, "Linux only: it reads /proc")]
    checks = []
    for name, use in (("py-spy", "the GIL and Python stacks"), ("pystack", "who waits for the GIL")):
        path, told = tool(name)
        checks.append(_check(name, True, f"{told}: {use}" if path else f"missing: profile attach lacks {use}",
                             "" if path else told))  # fmt: skip
    may = rights(os.getppid())
    if may.can_ptrace:
        return [*checks, _check("ptrace", True, "allowed: profile attach can read and, when told so, pause a process")]
    can = "read, not pause" if may.can_read_memory else "see CPU times only of"
    return [*checks, _check("ptrace", True, f"profile attach can {can} a process: {may.reason}", may.fix)]


def _memory() -> dict[str, Any]:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        available = int(fields["MemAvailable"].split()[0]) / 2**20
    except (OSError, ValueError, KeyError):
        return _check("memory", True, "unknown on this system")
    ok = available >= 4
    return _check("memory", ok, f"{available:.1f} GiB free", "" if ok else "the demo takes 4 GiB: close other programs")


def _disk() -> dict[str, Any]:
    free = shutil.disk_usage(".").free / 2**30
    ok = free >= 2
    return _check("disk", ok, f"{free:.1f} GiB free here", "" if ok else "the demo takes 2 GiB: free some space")
