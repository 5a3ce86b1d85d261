"""A newcomer's path: run the commands of two pages as they are written there, in order, in a fresh clone.

python scripts/newcomer.py [--venv] [--keep DIR] [PAGE...]

The pages are ``docs/quickstart.md`` and ``docs/train-your-model.md``. Of a page every fenced block of the language
``sh`` runs, in one shell, so that variables last; the shell stops at the first command that fails. Left out, and said
so, are blocks whose first line is ``# needs ...`` (a GPU, a server), and the block that clones and installs: the clone
is made here, of the working tree with its uncommitted changes, and the running interpreter is used. ``--venv`` runs
what that block has behind the cloning too, which installs everything anew.

Exit code: that of the first command that failed, else 0.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/quickstart.md", "docs/train-your-model.md")
NEEDS = "# needs "
_FENCE = re.compile(r"^```(\S*)\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block of commands."""

    line: int
    """Line of the page on which the first command stands, counted from 1."""
    lines: tuple[str, ...]

    @property
    def needs(self) -> str | None:
        """What its first line says that it needs; None if it runs anywhere."""
        first = self.lines[0] if self.lines else ""
        return first.removeprefix(NEEDS) if first.startswith(NEEDS) else None

    @property
    def is_setup(self) -> bool:
        """Whether it clones the project and installs it."""
        return any(line.startswith("git clone ") for line in self.lines)


def command_blocks(page: str) -> Iterator[Block]:
    """The blocks of the language ``sh`` of a page, in its order. Raises: ValueError if one does not end."""
    language: str | None = None
    begun, lines = 0, list[str]()
    for number, line in enumerate(page.splitlines(), start=1):
        fence = _FENCE.match(line)
        if language is None:
            if fence:
                language, begun, lines = fence[1], number + 1, []
        elif line == "```":
            if language == "sh":
                yield Block(begun, tuple(lines))
            language = None
        else:
            lines.append(line)
    if language is not None:
        raise ValueError(f"the block that begins on line {begun - 1} does not end: a line ``` was wanted")


def shell_script(name: str, page: str, with_setup: bool) -> tuple[str, list[str]]:
    """The page's commands, each on the line of the page on which it stands, and what was left out.

    Lines of the page that are no commands are empty, so that the shell's own line numbers are the page's.
    """
    lines = [""] * (len(page.splitlines()) + 1)
    left_out = []
    for block in command_blocks(page):
        if block.needs is not None:
            commands = " ".join(block.lines[1:])
            left_out.append(f"{name}:{block.line}: left out, needs {block.needs}: {commands}")
        elif block.is_setup and not with_setup:
            instead = f"a clone of the working tree and {sys.executable} in its place"
            left_out.append(f"{name}:{block.line}: left out, {' && '.join(block.lines)}: {instead}")
        else:
            kept = ["" if line.startswith(("git clone ", "cd paceline")) else line for line in block.lines]
            lines[block.line - 1 : block.line - 1 + len(kept)] = kept
    # Line 1 of a page is its title: the settings take no line of a command.
    lines[0] = f"set -euo pipefail; PS4='+ {name}:$LINENO: '; set -x"
    return "\n".join(lines) + "\n", left_out


def clone_working_tree(destination: Path) -> None:
    """Clone the repository, with what the working tree has changed and added (ignored files are left out)."""
    _git(ROOT.parent, "clone", "--quiet", str(ROOT), str(destination))
    changed = _git(ROOT, "diff", "-z", "--name-only", "HEAD") + _git(ROOT, "ls-files", "-z", "-o", "--exclude-standard")
    for name in filter(None, changed.split("\0")):
        if (ROOT / name).is_file():
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, destination / name)
        else:
            (destination / name).unlink(missing_ok=True)  # deleted here, or a folder of its own repository


def run_pages(folder: Path, pages: list[str], venv: bool) -> int:
    """Run the pages' commands in ``folder/paceline``. Returns: the exit code of the first that failed, or 0."""
    clone = folder / "paceline"
    clone_working_tree(clone)
    environment = dict(os.environ)
    programs = clone / ".venv" / "bin" if venv else Path(sys.executable).parent
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    if not venv:
        environment["PYTHONPATH"] = str(clone)  # the clone's package, whatever checkout this interpreter was set up for
    for name in pages:
        page = (clone / name).read_text(encoding="utf-8")
        script, left_out = shell_script(name, page, with_setup=venv)
        for line in left_out:
            print(line, flush=True)
        path = folder / f"{Path(name).stem}.sh"
        path.write_text(script, encoding="utf-8")
        code = subprocess.run(["bash", str(path)], cwd=clone, env=environment, stderr=subprocess.STDOUT).returncode
        if code:
            print(f"{name}: the last command shown ended with exit code {code}", flush=True)
            return code
        print(f"{name}: every command that was run ended with exit code 0", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", default=list(PAGES), metavar="PAGE", help="pages to run, in this order")
    parser.add_argument("--venv", action="store_true", help="install into an environment of the clone's own")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new folder to work in, and to leave there")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True)
        return run_pages(options.keep.resolve(), options.pages, options.venv)
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        return run_pages(Path(folder), options.pages, options.venv)


def _git(cwd: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
