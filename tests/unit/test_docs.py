"""The documentation says what the code does, and its links lead somewhere."""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.docs_hooks import LINK, PAGES, ROOT, repository_path, site_uri
from scripts.make_config_docs import PAGE, render
from scripts.newcomer import command_blocks, shell_script

SITE_PAGES = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
BY_URI = pytest.mark.parametrize("uri", [*PAGES.values(), *SITE_PAGES])

NEWCOMER_PAGE = """# Title

```sh
git clone REPOSITORY paceline
cd paceline
make setup
```

```yaml
run: {}
```

```sh
A=1
echo $A
```

```sh
# needs a GPU
train
```
"""


def test_the_configuration_page_is_current() -> None:
    """docs/configuration.md is what the field docstrings give; run scripts/make_config_docs.py to renew it."""
    assert PAGE.read_text(encoding="utf-8") == render()


@BY_URI
def test_links_lead_to_files(uri: str) -> None:
    """Every relative link of a page leads to a file of the repository, which the site has too."""
    sources = {name: source for source, name in PAGES.items()}
    text = (ROOT / sources.get(uri, f"docs/{uri}")).read_text(encoding="utf-8")
    broken = [match[1] for match in LINK.finditer(text) if site_uri(repository_path(uri, match[1])) is None]
    assert not broken


def test_every_page_is_in_the_navigation() -> None:
    """mkdocs.yml lists each page once."""

    def listed(entries: list) -> list[str]:  # type: ignore[type-arg]
        pages = []
        for entry in entries:
            value = next(iter(entry.values()))
            pages += listed(value) if isinstance(value, list) else [value]
        return pages

    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(listed(navigation)) == sorted([*PAGES.values(), *SITE_PAGES])


def test_links_between_pages_and_out_of_them() -> None:
    """A page of the site links to pages as they are named there, and to other files below repository/."""
    assert site_uri(repository_path("index.md", "docs/data.md")) == "data.md"
    assert site_uri(repository_path("data.md", "../README.md")) == "index.md"
    assert site_uri(repository_path("decisions/drafter-kinds.md", "../../Makefile")) == "repository/Makefile"
    assert site_uri(repository_path("index.md", "docs/no-such-page.md")) is None
    assert site_uri(repository_path("index.md", "../outside.md")) is None


def test_the_newcomer_runs_commands_on_the_lines_of_their_page(tmp_path: Path) -> None:
    """Blocks of sh run, where they stand; what needs more and the set-up are left out and named."""
    assert [block.line for block in command_blocks(NEWCOMER_PAGE)] == [4, 14, 19]
    script, left_out = shell_script("page.md", NEWCOMER_PAGE, with_setup=False)
    (tmp_path / "page.sh").write_text(script)
    shown = subprocess.run(["bash", "page.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert shown.stdout == "1\n"
    assert shown.stderr.splitlines() == ["+ page.md:14: A=1", "+ page.md:15: echo 1"]
    assert [line.partition(", ")[0] for line in left_out] == ["page.md:4: left out", "page.md:19: left out"]
    assert "needs a GPU: train" in left_out[1]
    assert "make setup" in shell_script("page.md", NEWCOMER_PAGE, with_setup=True)[0]


def test_a_failing_command_ends_the_page(tmp_path: Path) -> None:
    """The first command that fails ends the script with its exit code."""
    script, _ = shell_script("page.md", "# T\n\n```sh\n(exit 3)\necho not reached\n```\n", with_setup=False)
    (tmp_path / "page.sh").write_text(script)
    shown = subprocess.run(["bash", "page.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert (shown.returncode, shown.stdout) == (3, "")


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """What `make docs` runs succeeds, and no page loads a script, style or image from another host."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    pytest.importorskip("material", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ, NO_MKDOCS_2_WARNING="1")
    )
    assert built.returncode == 0, built.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"?(https?:[^\s\">]+)", page.read_text())
        assert not loaded, f"{posixpath.relpath(str(page), str(tmp_path))} loads {loaded}"
