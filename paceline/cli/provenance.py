"""What a run folder or checkpoint says of where its drafter comes from, for the model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.control.run_folder import RunFolder
from paceline.errors import CheckpointError

if TYPE_CHECKING:
    from paceline.export.card import Provenance


def provenance_of(source: Path, target: str | None) -> Provenance:
    """Everything on record: of a run all of it, of a checkpoint less, of an exported folder nothing.

    Args:
        source: Run folder, checkpoint or exported folder.
        target: As named by the user; the run's own otherwise.
    Raises: CheckpointError if a record is there and damaged.
    """
    from paceline.export.card import Provenance
    from paceline.export.folder import LAYOUT_KEYS, has_layout
    from paceline.train.checkpoint import find, load_state
    from paceline.train.evaluations import measured_of
    from paceline.train.metrics import read_metrics

    if any(has_layout(source, layout) for layout in LAYOUT_KEYS):
        return Provenance(target=target)
    place = find(source)
    state = load_state(place)
    known: dict[str, Any] = {
        "target": target,
        "target_fingerprint": state.target_fingerprint,
        "data_fingerprint": state.data_fingerprint,
        "step": state.step,
        "total_steps": state.total_steps,
    }
    if state.best_step == state.step:
        known["acceptance_length"] = state.best_acceptance_length
    run = run_of(place)
    if run is not None:
        config, record = run.read_config(), _read(run.path / "run.json")
        data = _section(record, "data")
        for line in read_metrics(run.metrics_file) if run.metrics_file.exists() else []:
            if line["step"] == state.step and "validation_acceptance_length" in line:
                known["acceptance_length"] = line["validation_acceptance_length"]
        inputs = [item.get("source", {}) for item in _section(data, "report").get("inputs", [])]
        known |= {
            "target": target or config.target.path,
            "target_revision": config.target.revision if target in (None, config.target.path) else None,
            "target_adapter": config.target.adapter if target in (None, config.target.path) else None,
            "recipe": config.model_dump(mode="json"),
            "data": _section(data, "dataset"),
            "data_license": tuple(sorted({item["license"] for item in inputs if item.get("license")})),
            "validation_rows": config.eval.validate_rows,
            "evaluation": measured_of(run, state.step) or {},
            "versions": _section(record, "versions"),
            "commit": record.get("commit"),
        }
    return Provenance(**known)


def run_of(checkpoint: Path) -> RunFolder | None:
    """The run that a checkpoint folder lies in, if it still does."""
    run = RunFolder(checkpoint.parent.parent)
    return run if run.exists and run.checkpoints.resolve() == checkpoint.parent.resolve() else None


def _read(path: Path) -> dict[str, Any]:
    """A JSON record of the run; nothing if it was never written. Raises: CheckpointError if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def _section(record: dict[str, Any], name: str) -> dict[str, Any]:
    found = record.get(name)
    return found if isinstance(found, dict) else {}
