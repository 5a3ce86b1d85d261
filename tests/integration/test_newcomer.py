"""A newcomer's path: the commands of the quick start and of the guide, as they are written, in a fresh clone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.files import default_cache_dir
from paceline.models.assets import FOLDER_NAME, is_complete
from scripts.newcomer import PAGES, ROOT, command_blocks, run_pages


@pytest.mark.slow
def test_the_pages_run_as_they_are_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each command of both pages succeeds, in order, and both end in folders that engines load; the rest is named."""
    if not (ROOT / ".git").exists():
        pytest.skip("the pages begin with a clone, and this is no repository")
    if not is_complete(default_cache_dir() / FOLDER_NAME):
        pytest.skip("the demo's target is not in the cache, and tests fetch nothing: run `make demo` once")
    assert run_pages(tmp_path, list(PAGES), venv=False) == 0
    shown = capfd.readouterr().out
    left_out = [
        f"{page}:{block.line}: left out, needs {block.needs}"
        for page in PAGES
        for block in command_blocks((ROOT / page).read_text(encoding="utf-8"))
        if block.needs
    ]
    assert left_out and all(line in shown for line in left_out)
    clone = tmp_path / "paceline"
    for drafter in ("demo/export", "work/drafter", "work/drafter-speculators"):
        config = json.loads((clone / drafter / "config.json").read_text())
        assert config["architectures"]
    assert shown.count("0 errors") == 3  # `paceline check` of each
