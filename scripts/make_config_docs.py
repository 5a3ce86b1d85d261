"""Write ``docs/configuration.md`` from the field docstrings of ``paceline/config.py``.

python scripts/make_config_docs.py
"""

from __future__ import annotations

import ast
from pathlib import Path

from paceline import config
from paceline.config import RunConfig

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"

HEAD = """# Configuration

One YAML file and dotted overrides: `paceline train run.yaml optim.lr=3e-4`. Unknown keys are refused. Everything but
`target.path` and `data.path` has a default; `--dry-run` shows what every `auto` becomes. This page is made from
`paceline/config.py` by `scripts/make_config_docs.py`.
"""


def render() -> str:
    """The page: one table a section, in the order of the tree."""
    tree = ast.parse(Path(config.__file__).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    lines = [HEAD]
    for section, field in RunConfig.model_fields.items():
        model = field.annotation
        lines += [f"## {section}", "", "| key | default | meaning |", "| --- | --- | --- |"]
        docs = _field_docs(classes[model.__name__])
        for key, info in model.model_fields.items():
            default = "required" if info.is_required() else f"`{_yaml(info.default)}`"
            lines.append(f"| `{key}` | {default} | {docs[key]} |")
        lines.append("")
    return "\n".join(lines)


def _field_docs(node: ast.ClassDef) -> dict[str, str]:
    """Docstring below each field, on one line. Raises: KeyError later for a field without one."""
    docs = {}
    for field, after in zip(node.body[:-1], node.body[1:], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[field.target.id] = " ".join(str(after.value.value).split()).replace("|", "\\|")
    return docs


def _yaml(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
