"""What `mkdocs` needs to know of this repository, so that pages stay as they read in a checkout and on a forge.

Pages link to each other and to files outside ``docs/`` (the README, results, source) by paths in the repository. Here
README.md and CONTRIBUTING.md become pages, and each other file that a page links to is copied into the site, below
``repository/``. A link to what does not exist is left as it is: mkdocs then warns, and the build fails.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Files of the repository that are pages of the site, with their names there."""

LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)(#[^)\s]*)?(?=\))")
"""The target of an inline Markdown link to a file, and its anchor; links to other hosts are none."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside ``docs/``."""
    from mkdocs.structure.files import File

    for source, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where their files are in the site."""
    from mkdocs.structure.files import File

    def moved(match: re.Match[str]) -> str:
        linked = repository_path(page.file.src_uri, match[1])
        uri = site_uri(linked)
        if uri is None:
            return match[0]
        if files.get_file_from_path(uri) is None and (ROOT / linked).is_file():
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / linked)))
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".") + (match[2] or "")

    return LINK.sub(moved, markdown)


def repository_path(src_uri: str, link: str) -> str:
    """The path in the repository that a page links to; ``src_uri`` is the page's name in the site."""
    sources = {name: source for source, name in PAGES.items()}
    source = sources.get(src_uri, f"docs/{src_uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def site_uri(path: str) -> str | None:
    """The name in the site of a file of the repository; None where it does not exist."""
    if not (ROOT / path).is_file() or path.startswith(os.pardir):
        return None
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path, f"repository/{path}")
