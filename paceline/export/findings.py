"""A drafter's folder as it is written, and what was found in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.errors import ModelError
from paceline.export import speculators, zlab
from paceline.export.folder import CONFIG_FILE, LAYOUT_KEYS
from paceline.export.weights import list_tensors

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """Something wrong or doubtful in a folder.

    Attributes:
        key: Configuration key, tensor or stage.
        effect: What it would do, and in which engine.
        found_by: Which check: ``config``, ``tensors``, ``tokenizer``, ``reader``, ``fingerprint``, ``parity``,
            ``prompts`` or ``engine``.
    """

    severity: Severity
    key: str
    seen: str
    wanted: str
    effect: str
    found_by: str = "config"


@dataclass
class DraftFolder:
    """A folder as it is written: nothing is filled in.

    Attributes:
        layer: The section that holds the drafter's layers: the whole configuration, or `transformer_layer_config`.
        tensors: Shape and type (as safetensors writes it) of every tensor.
    """

    path: Path
    layout: str
    config: dict[str, Any]
    layer: dict[str, Any]
    tensors: dict[str, tuple[list[int], str]]
    findings: list[Finding] = field(default_factory=list)

    @property
    def section(self) -> dict[str, Any]:
        """The object by which the layout is known."""
        return self.config[LAYOUT_KEYS[self.layout]]

    @property
    def kind(self) -> str:
        """The drafter kind that it names; of one that is not known, DFlash's keys are looked for."""
        return {zlab.LAYOUT: zlab, speculators.LAYOUT: speculators}[self.layout].kind_of(self.config) or "dflash"

    @property
    def is_zlab(self) -> bool:
        """Whether it has the z-lab layout; else it has the speculators one."""
        return self.layout == zlab.LAYOUT

    def error(self, key: str, seen: object, wanted: object, effect: str, found_by: str = "config") -> None:
        """Add a finding that makes engines part, or refuse."""
        self._add("error", key, seen, wanted, effect, found_by)

    def warn(self, key: str, seen: object, wanted: object, effect: str, found_by: str = "config") -> None:
        """Add a finding that need not be wrong."""
        self._add("warning", key, seen, wanted, effect, found_by)

    def _add(self, severity: Severity, key: str, seen: object, wanted: object, effect: str, found_by: str) -> None:
        finding = Finding(severity, key, _text(seen), _text(wanted), effect, found_by)
        if finding not in self.findings:
            self.findings.append(finding)

    def number(self, section: dict[str, Any], key: str, least: int = 1) -> int | None:
        """A whole number of a section, or None where there is none; what is something else becomes a finding."""
        value = section.get(key)
        if value is None:
            return None
        if type(value) is not int or value < least:
            self.error(key, value, f"a whole number of at least {least}", "nothing could be computed with it")
            return None
        return value


def read_folder(folder: Path) -> DraftFolder:
    """Read configuration and names of tensors. Raises: ModelError if there is no drafter of one layout."""
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    sections = config if isinstance(config, dict) else {}
    layouts = [name for name, key in LAYOUT_KEYS.items() if isinstance(sections.get(key), dict)]
    if len(layouts) != 1:
        keys = " and ".join(f"`{key}`" for key in LAYOUT_KEYS.values())
        raise ModelError(
            f"{path} has {'both' if layouts else 'neither'} of {keys}: a drafter's folder has one, by which its layout "
            "is known"
        )
    layer = config
    if layouts[0] == speculators.LAYOUT:
        layer = config.get("transformer_layer_config")
        if not isinstance(layer, dict):
            raise ModelError(f"{path} has no `transformer_layer_config`, which holds the drafter's layers")
    stored, problems = list_tensors(folder)
    tensors = {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()}
    seen = DraftFolder(folder, layouts[0], config, layer, tensors)
    for problem in problems:
        seen.error(problem.key, problem.seen, problem.wanted, "engines load other weights, or fail", "tensors")
    return seen


def _text(value: object) -> str:
    if value is None:
        return "missing"
    return value if isinstance(value, str) else json.dumps(value, default=str)
