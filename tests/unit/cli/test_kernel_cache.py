"""Where compiled kernels are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.train.target import keep_compiled_kernels

ROOT = Path(__file__).parents[3]
NAMES = ("TORCHINDUCTOR_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED")


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)


def test_kernels_are_kept_in_the_users_cache(tmp_path: Path) -> None:
    """The folder is private, as it holds code, and what the user chose stays."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "elsewhere"
    keep_compiled_kernels()
    folder = tmp_path / "cache" / "kernels"
    assert folder.stat().st_mode & 0o777 == 0o700 and list(folder.iterdir()) == []
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(folder / "flash4")


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Then the compilers' own folders are used, and one line says so."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").write_text("not a folder")
    keep_compiled_kernels()
    assert "compiled kernels are not kept in" in caplog.text
    assert not any(name in os.environ for name in NAMES)


def test_finding_the_cache_needs_no_reader_of_demo_weights() -> None:
    """The folder is found without `gguf`, which only the demo's target needs: a GPU trains where it is missing."""
    code = """if True:
        import sys
        sys.modules["gguf"] = None  # importing it raises ImportError
        from paceline.train.target import keep_compiled_kernels
        keep_compiled_kernels()
        assert "paceline.models.assets" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (Path(os.environ["PACELINE_CACHE"]) / "kernels").is_dir()
