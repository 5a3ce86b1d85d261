"""`paceline doctor`: what this machine has, and the one fix for what is missing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paceline.files import default_cache_dir, write_atomically

State = Literal["ok", "warn", "fix"]
"""warn: something works less well than it could. fix: without it `paceline demo` fails."""

TRIAL_S = 30.0
"""Longest time that trying out one kernel may take; a cold compiler needs most of it."""

TRIALS: dict[str, tuple[str, str]] = {
    "compile": ("layers are compiled", "kernels.compile=false"),
    "flex": ("blocks attend by FlexAttention", "kernels.attention=per_document"),
    "graphs": ("small steps are replayed from CUDA graphs", "kernels.cuda_graphs=off"),
}
"""What is tried out on a GPU: what works then, and what a run can do without it."""

WRITTEN_BYTES = 64 << 20
"""Written to the disk to see how fast it is."""

MIN_PYTHON = (3, 11)
SLOW_DISK_MB_PER_S = 50.0
MIN_OPEN_FILES = 4096
MIN_SHARED_GIB = 0.25


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON on stdout.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Try no kernels out (up to 30 s each, once a machine), write no file.")
    ] = False,
) -> None:
    """Check the machine; exit code 1 if the demo would fail here."""
    checks = run_checks(quick)
    works = all(check["state"] != "fix" for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": works, "checks": checks}, indent=1))
    else:
        for check in checks:
            typer.echo(f"{check['state']:<5}{check['name']:<13} {check['seen']}")
            if check["fix"]:
                typer.echo(f"     {'':<13} -> {check['fix']}")
    if not works:
        raise typer.Exit(1)


def run_checks(quick: bool = False) -> list[dict[str, Any]]:
    """One record a check: name, state, what was seen, and the fix (empty when there is nothing to do)."""
    checks = [_python(), _package("torch", (2, 11), (2, 15)), _package("transformers", (5, 17), (6,))]
    if any(check["state"] == "fix" for check in checks):  # the others would fail for the same reason
        return [*checks, _memory(), _disk()]
    return [*checks, *_devices(), *_kernels(), *([] if quick else _trials()), _ray(), *_profiling(), _memory(),
            _shared_memory(), _open_files(), _disk(), *([] if quick else [_disk_speed()])]  # fmt: skip


def _check(name: str, state: State, seen: str, fix: str = "") -> dict[str, Any]:
    return {"name": name, "state": state, "seen": seen, "fix": fix}


def _python() -> dict[str, Any]:
    is_old = sys.version_info < MIN_PYTHON
    fix = "install Python 3.11 or newer" if is_old else ""
    return _check("python", "fix" if is_old else "ok", platform.python_version(), fix)


def _package(name: str, least: tuple[int, ...], below: tuple[int, ...]) -> dict[str, Any]:
    wanted = f">={'.'.join(map(str, least))},<{'.'.join(map(str, below))}"
    version = _version(name)
    if version is None:
        return _check(name, "fix", "not installed", f"pip install '{name}{wanted}'")
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if least <= number < below:
        return _check(name, "ok", version)
    return _check(name, "fix", version, f"pip install '{name}{wanted}'")


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _devices() -> list[dict[str, Any]]:
    import torch

    checks = [_check("cpu", "ok", f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}")]
    if torch.cuda.is_available():
        driver = _driver()
        for i in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(i)
            seen = f"{device.name}, {device.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}{driver}"
            checks.append(_check(f"cuda:{i}", "ok", seen))
    elif shutil.which("nvidia-smi"):
        fix = "pip install a CUDA build of torch" if torch.version.cuda is None else "look at the driver: nvidia-smi"
        seen = f"a driver, but torch {torch.__version__} sees no GPU; the CPU will be used"
        checks.append(_check("cuda", "warn", seen, fix))
    else:
        checks.append(_check("cuda", "ok", "no GPU; the CPU will be used"))
    return checks


def _driver() -> str:
    """The driver's version, as a part of a line; empty where nobody tells."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return f", driver {version if isinstance(version, str) else version.decode()}"
    except Exception:  # of whatever kind: it is only told
        return ""


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
        version = _version(package)
        lacks = f"without {package} (extra `{extra}`); with it {use}"
        checks.append(_check(name, "ok", lacks if version is None else f"{package} {version}: {use}"))
    return checks


def _trials() -> list[dict[str, Any]]:
    """Whether what a GPU is to run with works here: each in a process of its own, once for a card, driver and torch."""
    import torch

    if not torch.cuda.is_available():
        return []
    key = f"{torch.__version__}, {torch.cuda.get_device_name()}{_driver()}"
    file, known = default_cache_dir() / "doctor.json", dict[str, Any]()
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(file.read_text(encoding="utf-8"))
    found = known.get(key) if isinstance(known, dict) else None
    if not isinstance(found, dict) or set(found) != set(TRIALS):
        found = {name: _tried(name) for name in TRIALS}
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps({key: found}, indent=1) + "\n")
    checks = []
    for name, (use, without) in TRIALS.items():
        problem = found[name]
        if problem:
            fix = f"until it does, set {without}; `rm {file}` has it tried again"
            checks.append(_check(name, "warn", f"does not work here: {problem}", fix))
        else:
            checks.append(_check(name, "ok", f"works: {use}"))
    return checks


def _tried(name: str) -> str:
    """What goes wrong when something is tried out; empty if it works."""
    command = [sys.executable, "-m", "paceline.cli.trials", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"it took more than {TRIAL_S:.0f} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else lines[-1][:200] if lines else f"exit code {done.returncode}"


def _ray() -> dict[str, Any]:
    version = _version("ray")
    if version is None:
        return _check("ray", "ok", "not installed (extra `ray`); topology.executor=ray needs it")
    return _check("ray", "ok", f"{version}: topology.executor=ray is possible")


def _profiling() -> list[dict[str, Any]]:
    """What `paceline profile attach` can look at: its programs, and the right to read a process of this user.

    Tried on the one that started this one: with a child of its own even a guarded kernel lets it do all.
    """
    from paceline.profiling.collect.process import rights, tool

    if sys.platform != "linux":
        return [_check("profile attach", "ok", "Linux only: it reads /proc")]
    checks = []
    for name, use in (("py-spy", "the GIL and Python stacks"), ("pystack", "who waits for the GIL")):
        path, told = tool(name)
        found = ("ok", f"{told}: {use}", "") if path else ("warn", f"missing: profile attach lacks {use}", told)
        checks.append(_check(name, *found))  # type: ignore[arg-type]  # the first is a state
    may = rights(os.getppid())
    if may.can_ptrace:
        return [*checks, _check("ptrace", "ok", "allowed: profile attach can read and, when told so, pause a process")]
    can = "read, not pause" if may.can_read_memory else "see CPU times only of"
    return [*checks, _check("ptrace", "warn", f"profile attach can {can} a process: {may.reason}", may.fix)]


def _memory() -> dict[str, Any]:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        available = int(fields["MemAvailable"].split()[0]) / 2**20
    except (OSError, ValueError, KeyError):
        return _check("memory", "ok", "unknown on this system")
    if available >= 4:
        return _check("memory", "ok", f"{available:.1f} GiB free")
    return _check("memory", "fix", f"{available:.1f} GiB free", "the demo takes 4 GiB: close other programs")


def _shared_memory() -> dict[str, Any]:
    """Where a run keeps what `top` and `status` read, and Ray its features."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return _check("shared memory", "ok", "no /dev/shm; runs keep their pages in the temporary folder")
    free = shutil.disk_usage(place).free / 2**30
    if free >= MIN_SHARED_GIB:
        return _check("shared memory", "ok", f"{free:.1f} GiB free in /dev/shm")
    fix = "in a container: docker run --shm-size=8g; Ray keeps features there"
    return _check("shared memory", "warn", f"{free:.2f} GiB free in /dev/shm", fix)


def _open_files() -> dict[str, Any]:
    if sys.platform == "win32":
        return _check("open files", "ok", "not limited here")
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return _check("open files", "ok", "unlimited" if soft == resource.RLIM_INFINITY else f"up to {soft:,}")
    most = "65536" if hard == resource.RLIM_INFINITY else str(min(hard, 65536))
    return _check("open files", "warn", f"up to {soft:,}; Ray on many hosts opens more", f"ulimit -n {most}")


def _disk() -> dict[str, Any]:
    free = shutil.disk_usage(".").free / 2**30
    if free >= 2:
        return _check("disk", "ok", f"{free:.1f} GiB free here")
    return _check("disk", "fix", f"{free:.1f} GiB free here", "the demo takes 2 GiB: free some space")


def _disk_speed() -> dict[str, Any]:
    """Checkpoints are written and synced here: a float32 drafter of a billion parameters is 12 GB of them."""
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=".") as file:
            started = time.perf_counter()
            for _ in range(WRITTEN_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            rate = WRITTEN_BYTES / 1e6 / (time.perf_counter() - started)
    except OSError as error:
        return _check("disk speed", "fix", f"cannot write here: {error.strerror}", "change to a folder of yours")
    if rate >= SLOW_DISK_MB_PER_S:
        return _check("disk speed", "ok", f"{rate:,.0f} MB/s written and synced")
    seen = f"{rate:,.1f} MB/s written and synced: saving a checkpoint takes long"
    return _check("disk speed", "warn", seen, "put run.dir on a faster disk")
