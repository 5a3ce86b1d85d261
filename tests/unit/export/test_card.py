"""The model card: what it says, what it leaves open, and what never gets into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.errors import ConfigError
from paceline.export.card import Provenance, model_card, shown_name
from tests import tiny

FULL = Provenance(
    target="some-org/some-target",
    target_revision="abc",
    target_fingerprint="f" * 64,
    data_fingerprint="d" * 64,
    step=1500,
    total_steps=2000,
    recipe={
        "run": {"dir": "/home/me/run"},
        "draft": {"init": "/home/me/base-drafter", "num_layers": 2},
        "optim": {"lr": 6e-4},
        "data": {"path": "/home/me/chats", "epochs": 6},
    },
    data={"num_rows": 12345, "num_tokens": 6789012, "num_supervised": 345678},
    data_license=("cc-by-4.0", "mit"),
    acceptance_length=3.21987,
    validation_rows=64,
    versions={"torch": "2.13.0"},
    commit="c0ffee",
)


def card_of(provenance: Provenance = FULL, **changes: Any) -> str:
    arguments: dict[str, Any] = {
        "layout": "zlab",
        "dtype": "bfloat16",
        "version": "0.1.0",
        "commands": ["next: paceline check DIR --target TARGET"],
    }
    return model_card(tiny.draft_shape(), provenance, **(arguments | changes))


def head_of(card: str) -> dict[str, Any]:
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


def test_the_head_is_what_the_hub_reads() -> None:
    """Base model, library, licence and tags stand in the YAML head."""
    assert head_of(card_of(license_id="apache-2.0")) == {
        "library_name": "transformers",
        "base_model": "some-org/some-target",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "dflash", "drafter", "paceline"],
    }
    assert head_of(card_of(layout="speculators"))["library_name"] == "speculators"


def test_everything_known_is_told() -> None:
    """Provenance, recipe, the measured acceptance with its definition, and the commands are in the card."""
    card = card_of()
    for text in (
        "some-org/some-target", "| target revision | abc |", "f" * 64, "d" * 64, "12,345", "6,789,012", "345,678",
        "1,500 of 2,000", "lr: 0.0006", "epochs: 6", "cc-by-4.0, mit", "**3.220**", "at most 64 held-out rows",
        "at step 1500", "tokens committed / target forwards", "torch 2.13.0", "c0ffee", "paceline 0.1.0",
        "paceline check DIR --target TARGET", "1, 3 of 5, from 0", "| mask token | 267 |",
    ):  # fmt: skip
        assert text in card, text


def test_what_is_unknown_is_said_to_be() -> None:
    """Of a bare folder no number is made up."""
    card = card_of(Provenance())
    assert "base_model" not in head_of(card) and "license" not in head_of(card)
    assert "No acceptance length of this checkpoint is on record" in card
    assert (
        "| target | unknown |" in card and "| data rows | unknown |" in card and "| steps trained | unknown |" in card
    )
    assert "no configuration" in card and "None was given" in card and "not on record" in card


def test_no_folder_of_the_machine_gets_out(tmp_path: Path) -> None:
    """Folders are shown by their last name, passwords of URLs never, and a folder is no base model."""
    card = card_of()
    assert "/home/me" not in card and "path: chats" in card and "init: base-drafter" in card
    card = card_of(Provenance(target=str(tmp_path / "my-model")))
    assert str(tmp_path) not in card and "# DFlash drafter for my-model" in card and "base_model" not in head_of(card)
    assert "secret" not in card_of(Provenance(recipe={"data": {"source": "https://me:secret@host/x"}}))
    assert shown_name("https://me:secret@host/some-model/") == "some-model"


def test_text_of_others_stays_in_its_cell() -> None:
    """A name with line breaks or bars adds no rows, and a licence is an identifier."""
    card = card_of(Provenance(target="/x/evil\n# Heading | yes", data_license=("a|b\nc",)))
    assert "\n# Heading" not in card and "evil # Heading \\| yes" in card and "a\\|b c" in card
    with pytest.raises(ConfigError, match="--license 'mit\\\\n---'"):
        card_of(license_id="mit\n---")


def test_an_evaluation_beside_training_is_told() -> None:
    """Its acceptance, prompts and rule stand before the number of the held-out rows; a difference is not hidden."""
    record = {
        "acceptance_length": 2.3456,
        "mismatches": 0,
        "prompts": 24,
        "max_new_tokens": 256,
        "step": 40,
        "dtype": "float32",
        "prompt_files": ["those that come with Paceline"],
        "acceptance_rule": "tokens / forwards",
    }
    card = card_of(Provenance(evaluation=record, acceptance_length=3.5, step=40))
    found = card[card.index("## Measured") : card.index("## How to serve it")]
    assert "**2.346** by decoding 24 prompts that come with Paceline greedily, at most 256 tokens each" in found
    assert "no answer differed" in found and "Definition: tokens / forwards." in found
    assert found.index("2.346") < found.index("**3.500**")
    card = card_of(Provenance(evaluation=record | {"mismatches": 2, "prompt_files": ["/home/me/x.jsonl"]}))
    assert "**2 answers differed**" in card and "24 prompts of the trainer's own" in card and "/home/me" not in card
