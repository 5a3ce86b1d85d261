"""The model card of an exported folder: where the drafter comes from, what was measured, how to serve it.

What is not known is said to be so, and no number stands here that was not measured. Of the machine that wrote it the
card names nothing: folders appear by their last name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import ConfigError
from paceline.export.folder import num_drafted
from paceline.files import without_credentials
from paceline.models.draft import DraftShape

RECIPE_SECTIONS = ("draft", "anchors", "loss", "optim", "data")
PATH_KEYS = (("data", "path"), ("draft", "init"))

UNKNOWN = "unknown"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
LICENSE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}")

KIND_NAMES = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}

ACCEPTANCE_RULE = (
    "tokens committed / target forwards, pooled over every answer of the held-out rows; each block is drafted after "
    "the text of the data set (teacher forcing), which is what decoding gives where the answers are the target's own "
    "greedy ones"
)


@dataclass(frozen=True)
class Provenance:
    """What is known of how a drafter came to be; None, or empty, is unknown.

    Attributes:
        target, target_revision: Hub id or folder of the target, and its revision on the hub.
        target_adapter: Folder of the LoRA adapter that was merged into it.
        target_fingerprint, data_fingerprint: Of the weights and the rows that it was trained with.
        step, total_steps: Updates of the exported checkpoint, and of the run's schedule.
        recipe: Sections of the run's resolved configuration.
        data: Counts of the prepared data set.
        data_license: Licences that the data's source gives, as far as it does.
        acceptance_length: Measured on held-out rows by the run itself, at the exported step.
        validation_rows: Rows that it was measured on, at most.
        evaluation: Record of `paceline eval` that was made of the exported step beside its training.
        versions: Of the programs that trained it.
        commit: Of paceline's source tree.
    """

    target: str | None = None
    target_revision: str | None = None
    target_adapter: str | None = None
    target_fingerprint: str | None = None
    data_fingerprint: str | None = None
    step: int | None = None
    total_steps: int | None = None
    recipe: dict[str, dict[str, Any]] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    data_license: tuple[str, ...] = ()
    acceptance_length: float | None = None
    validation_rows: int | None = None
    evaluation: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None


def model_card(
    shape: DraftShape,
    provenance: Provenance,
    *,
    layout: str,
    dtype: str,
    version: str,
    commands: Sequence[str],
    license_id: str | None = None,
    auto_map: bool = False,
) -> str:
    """The card as Markdown with a YAML head.

    Args:
        layout: `zlab` or `speculators`.
        version: Of paceline, which writes the folder.
        commands: How to go on, with `DIR` for the folder.
        license_id: As given by the user; None: none.
    Raises: ConfigError if the licence is no identifier.
    """
    if license_id is not None and not LICENSE.fullmatch(license_id):
        raise ConfigError(f"--license {license_id!r}: an identifier such as apache-2.0 or mit was wanted")
    name = shown_name(provenance.target)
    if provenance.target_adapter is not None:
        name += f' with the adapter "{shown_name(provenance.target_adapter)}"'
    head: dict[str, Any] = {"library_name": "transformers" if layout == "zlab" else "speculators"}
    if provenance.target is not None and is_hub_id(provenance.target):
        head["base_model"] = provenance.target
    if license_id is not None:
        head["license"] = license_id
    head |= {"pipeline_tag": "text-generation", "tags": ["speculative-decoding", shape.kind, "drafter", "paceline"]}
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n",
        f"# {KIND_NAMES[shape.kind]} drafter for {name}\n",
        _what_it_is(shape, name),
        _measured(provenance),
        _serving(commands, auto_map),
        _provenance(shape, provenance, layout, dtype, version),
        _recipe(provenance),
        _license(license_id, provenance),
        _limits(name),
    ]
    return "\n".join(parts)


def is_hub_id(name: str) -> bool:
    """Whether a target's name is `owner/model`, and no folder here."""
    return HUB_ID.fullmatch(name) is not None and not Path(name).expanduser().exists()


def shown_name(name: str | None) -> str:
    """A hub id as it is, of a folder its last name."""
    if name is None:
        return "an unnamed target"
    return name if is_hub_id(name) else _cell(Path(str(without_credentials(name)).rstrip("/")).name)


def _what_it_is(shape: DraftShape, name: str) -> str:
    own = "" if shape.draft_vocab_size is None else f" It drafts from {shape.draft_vocab_size:,} of its tokens."
    return (
        f"A drafter for speculative decoding with {name}: {shape.num_hidden_layers} layers that propose "
        f"{num_drafted(shape.kind, shape.block_size)} tokens at a time from the hidden states of "
        f"{len(shape.target_layer_ids)} layers of the target, which checks them. It holds neither the target's "
        f"embedding nor its whole head, and is of no use alone.{own}\n"
    )


def _measured(provenance: Provenance) -> str:
    texts = []
    if provenance.evaluation:
        texts.append(_evaluated(provenance.evaluation))
    if provenance.acceptance_length is not None:
        rows = (
            "held-out rows"
            if provenance.validation_rows is None
            else (f"at most {provenance.validation_rows} held-out rows")
        )
        texts.append(
            f"Acceptance length **{provenance.acceptance_length:.3f}**, measured by the training run on {rows} of its "
            f"data set, at step {provenance.step}.\n\nDefinition: {ACCEPTANCE_RULE}. Speed was not measured there."
        )
    if not texts:
        texts.append("No acceptance length of this checkpoint is on record. Measure it with the command below.")
    return "## Measured\n\n" + "\n\n".join(texts) + "\n"


def _evaluated(record: dict[str, Any]) -> str:
    """What an evaluation beside training measured, but for its rates: training took its share of the machine."""
    is_own = record.get("prompt_files") == ["those that come with Paceline"]
    whose = "that come with Paceline" if is_own else "of the trainer's own"
    mismatches, threshold = record["mismatches"], record.get("verify_threshold") or 0.0
    cut = f", drafted tokens verified up to the first with a confidence below {threshold:g}" if threshold else ""
    differing = "no answer differed" if mismatches == 0 else f"**{mismatches} answers differed**"
    return (
        f"Acceptance length **{record['acceptance_length']:.3f}** by decoding {_number(record.get('prompts'))} prompts "
        f"{whose} greedily, at most {_number(record.get('max_new_tokens'))} tokens each, with the checkpoint of step "
        f"{record['step']} in {_cell(record.get('dtype', UNKNOWN))}{cut}; {differing} from plain decoding by more than "
        f"rounding.\n\nDefinition: {_cell(record.get('acceptance_rule', UNKNOWN))}. Speed was not measured there."
    )


def _serving(commands: Sequence[str], auto_map: bool) -> str:
    lines = "\n".join(commands)
    text = f"## How to serve it\n\n`DIR` is this folder, `TARGET` the target.\n\n```\n{lines}\n```\n"
    if auto_map:
        text += (
            "\nTransformers loads it, with the code in `dflash.py`, which is to be read before it is trusted:\n\n"
            "```python\n"
            'drafter = transformers.AutoModel.from_pretrained("DIR", trust_remote_code=True)\n'
            "hidden = drafter(noise_embedding, target_hidden)  # [B, K, D]; slot k: the token k places after slot 0\n"
            "```\n"
        )
    return text


def _provenance(shape: DraftShape, provenance: Provenance, layout: str, dtype: str, version: str) -> str:
    steps = UNKNOWN if provenance.step is None else f"{provenance.step:,} of {_number(provenance.total_steps)}"
    rows = {
        "target": UNKNOWN if provenance.target is None else shown_name(provenance.target),
        "target revision": provenance.target_revision or "none named",
        "target adapter": "none" if provenance.target_adapter is None else shown_name(provenance.target_adapter),
        "target fingerprint": provenance.target_fingerprint or UNKNOWN,
        "target layers tapped": f"{', '.join(map(str, shape.target_layer_ids))} of {shape.num_target_layers}, from 0",
        "mask token": str(shape.mask_token_id),
        "kind": ", ".join([shape.kind, *(f"{name} {value}" for name, value in shape.options.items())]),
        "block size": f"{shape.block_size}, the anchor included",
        "data fingerprint": provenance.data_fingerprint or UNKNOWN,
        "data rows": _number(provenance.data.get("num_rows")),
        "data tokens": f"{_number(provenance.data.get('num_tokens'))}, of which supervised "
        f"{_number(provenance.data.get('num_supervised'))}",
        "steps trained": steps,
        "layout and type": f"{layout}, {dtype}",
        "trained with": ", ".join(f"{name} {number}" for name, number in provenance.versions.items()) or UNKNOWN,
        "source commit": provenance.commit or UNKNOWN,
        "exported with": f"paceline {version}",
    }
    lines = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items())
    return f"## Where it comes from\n\n| | |\n| --- | --- |\n{lines}\n"


def _recipe(provenance: Provenance) -> str:
    if not provenance.recipe:
        return "## Recipe\n\nUnknown: the folder that was exported is no run and has no configuration.\n"
    recipe = {name: dict(provenance.recipe[name]) for name in RECIPE_SECTIONS if name in provenance.recipe}
    for section, key in PATH_KEYS:
        if recipe.get(section, {}).get(key) is not None:
            recipe[section][key] = shown_name(recipe[section][key])
    text = yaml.safe_dump(without_credentials(recipe), sort_keys=False)
    return f"## Recipe\n\nThe run's own settings, every `auto` resolved:\n\n```yaml\n{text}```\n"


def _license(license_id: str | None, provenance: Provenance) -> str:
    own = (
        "None was given: whoever passes this folder on has to name one."
        if license_id is None
        else f"`{license_id}`, as given by whoever exported it."
    )
    data = (
        f"The training data's sources say: {', '.join(map(_cell, provenance.data_license))}."
        if provenance.data_license
        else "Licences of the training data are not on record."
    )
    return f"## Licence\n\n{own} {data} The target's own licence is its publisher's.\n"


def _limits(name: str) -> str:
    return (
        "## What it is not\n\n"
        f"- No language model: all that is put out comes from {name}, and with exact verification its distribution is "
        "unchanged.\n"
        "- For no other target: a fine-tune of the same model may be drafted for, with an acceptance that has to be "
        "measured.\n"
        "- Nothing is said of speed, of other engines, or of text unlike the data set: none of it was measured here.\n"
    )


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else UNKNOWN


def _cell(text: str) -> str:
    """One line of a table, whatever a file had in it."""
    return " ".join(str(text).split()).replace("|", "\\|")
