"""A command for another process is over when that process is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import child


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, child.__file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def test_it_ends_when_its_input_closes() -> None:
    """Also while it imports, which takes longer than this: before it has said what it was asked for."""
    process = start("eval", "--help")
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    assert process.wait(30) == 1 and process.stdout.read() == ""


@pytest.mark.slow  # it imports all of it
def test_it_is_the_command(tmp_path: Path) -> None:
    """It does what `paceline` does with the same arguments, from any folder, whatever lies there."""
    (tmp_path / "typer.py").write_text("raise SystemExit(7)")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = start("--version", cwd=tmp_path, env=environment)
    assert process.stdout is not None
    assert process.stdout.read().startswith("paceline ") and process.wait(30) == 0


def test_it_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs with a low priority, set by itself before anything is loaded."""
    calls: list[object] = []
    monkeypatch.setattr(child, "end_with_stdin", lambda: calls.append("stdin"))
    monkeypatch.setattr(os, "nice", calls.append)
    monkeypatch.setattr(Path, "write_text", lambda path, text, encoding: calls.append((str(path), text)))
    monkeypatch.setattr("paceline.cli.main.main", lambda: calls.append("command"))
    child.main()
    assert calls == ["stdin", 10, ("/proc/self/oom_score_adj", "1000"), "command"]
