"""The one-way rule between rooms, checked on the syntax tree of every file.

    api -> cli -> cluster -> train, export, eval, plan -> pipeline, models, data, control
        -> kernels, dflash, gguf_file
        -> records, config, errors, files, report, profiling.stages (page, stats, device)

A room may import what stands further right, and itself; rooms on one level do not know each other. Besides:

    dflash              may be imported by kernels, which make the method's block mask fast
    errors              may be imported by the whole lowest level
    plan                may be imported by train, which runs what it resolved
    __main__            is the command line
    profiling.verdict   may be imported by train and cli
    other profiling     may be imported by cli and api; all of it sees only itself and the lowest level
    ``__version__``     may be imported by anyone

    transformers        only in models, export, eval, data, gguf_file
    ray                 only in cluster

Imports inside functions and under TYPE_CHECKING count like any other.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

EMITTING = {"profiling.stages", "profiling.page", "profiling.stats", "profiling.device"}

LEVELS = [
    {"api"},
    {"cli"},
    {"cluster"},
    {"train", "export", "eval", "plan"},
    {"pipeline", "models", "data", "control"},
    {"kernels", "dflash", "gguf_file"},
    {"records", "config", "errors", "files", "report", *EMITTING},
]
LEVEL_OF = {room: depth for depth, rooms in enumerate(LEVELS) for room in rooms}
ALLOWED_BESIDE_LEVELS = {
    ("kernels", "dflash"),
    ("train", "plan"),
    ("train", "profiling.verdict"),
    ("cli", "profiling.verdict"),
    ("cli", "profiling"),
    ("api", "profiling"),
}
EXTERNAL_ROOMS = {"transformers": {"models", "export", "eval", "data", "gguf_file"}, "ray": {"cluster"}}


def room_of(module: str) -> str:
    """``paceline.train.loop`` -> ``train``; profiling's own rooms keep two words; the package itself is ``""``."""
    parts = ["cli" if part == "__main__" else part for part in module.split(".")[1:]]
    if ".".join(parts[:2]) in EMITTING | {"profiling.verdict"}:
        return ".".join(parts[:2])
    return parts[0] if parts else ""


def imported_modules(source: str, module: str, is_package: bool = False) -> set[str]:
    """Every module that `source` imports, relative ones resolved; ``from paceline import x`` is ``paceline.x``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            if base in ("paceline", "paceline.profiling"):
                found |= {f"{base}.{alias.name}" for alias in node.names}
            else:
                found.add(base)
    return found


def may_import(room: str, other: str) -> bool:
    """Whether a file of `room` may import a file of `other` (both rooms of this package)."""
    if other in ("", "__version__", room) or (room, other) in ALLOWED_BESIDE_LEVELS:
        return True
    if room in ("profiling", "profiling.verdict"):
        return other.startswith("profiling") or LEVEL_OF.get(other) == len(LEVELS) - 1
    if room not in LEVEL_OF or other not in LEVEL_OF:
        return False
    if LEVEL_OF[room] == LEVEL_OF[other] == len(LEVELS) - 1:
        return other == "errors" or {room, other} <= EMITTING
    return LEVEL_OF[room] < LEVEL_OF[other]


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """One line per import of `source` that breaks the rule."""
    room, found = room_of(module), []
    for name in sorted(imported_modules(source, module, is_package)):
        top = name.split(".")[0]
        if top == "paceline":
            allowed = may_import(room, room_of(name))
        else:
            allowed = room in EXTERNAL_ROOMS.get(top, {room})
        if not allowed:
            found.append(f"{module} imports {name}")
    return found


def test_imports_point_one_way() -> None:
    """No file of the package imports against the rule at the top of this file."""
    found = []
    for path in sorted((ROOT / "paceline").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found += violations(path.read_text(encoding="utf-8"), module, is_package)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paceline.dflash.mask", "import paceline.config as c\nfrom paceline.kernels import attention"),
        ("paceline.dflash.mask", "from ..kernels import attention"),
        ("paceline.records", "from paceline import config"),
        ("paceline.models.target", "def f():\n    from paceline.pipeline.channel import Channel"),
        ("paceline.pipeline.roles", "if TYPE_CHECKING:\n    from paceline.train.step import Step"),
        ("paceline.train.loop", "from paceline.eval import speed"),
        ("paceline.train.loop", "from paceline.profiling.report import page"),
        ("paceline.train.loop", "from paceline.profiling import classify"),
        ("paceline.pipeline.local", "from paceline.profiling.verdict import judge"),
        ("paceline.profiling.stages", "from paceline.profiling.report import page"),
        ("paceline.profiling.diff", "from paceline.models import target"),
        ("paceline.train.step", "import transformers.models.qwen3"),
        ("paceline.pipeline.local", "import ray"),
        ("paceline.cluster.actors", "from paceline.cli.main import main"),
        ("paceline.train.loop", "from paceline.unheard_of import x"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    """An import against the direction is reported, wherever in the file and however it is written."""
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paceline.cli.main", "from paceline import __version__, train\nfrom paceline.profiling.report import page"),
        ("paceline.cli.live", "from paceline.profiling import verdict, stages, collect"),
        ("paceline.train.loop", "from paceline.profiling.verdict import judge\nfrom paceline.profiling import stages"),
        ("paceline.train.loop", "from .step import step\nfrom ..dflash.loss import block_loss"),
        ("paceline.models.target", "import transformers\nfrom paceline.records import TokenBatch"),
        ("paceline.config", "from paceline.errors import ConfigError"),
        (
            "paceline.profiling.report",
            "from paceline.profiling.page import Page\nfrom paceline.errors import DataError",
        ),
        ("paceline.cluster.actors", "import ray\nfrom paceline.pipeline.roles import Role"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    """An import along the direction is not reported."""
    assert violations(source, module) == []


def test_relative_imports_of_a_package_file_start_at_the_package() -> None:
    """In an ``__init__`` file one dot is the package itself."""
    assert imported_modules("from .mask import x", "paceline.dflash", is_package=True) == {"paceline.dflash.mask"}
    assert imported_modules("from .mask import x", "paceline.dflash.blocks") == {"paceline.dflash.mask"}
