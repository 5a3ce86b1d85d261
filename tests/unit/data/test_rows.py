"""Mixtures, texts, token rows and regenerated answers: what is not a plain conversation on its way to rows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from paceline.data.chat import template_hash
from paceline.data.dataset import Dataset, tokenizer_fingerprint
from paceline.data.inputs import ANSWERS_FILE, REGENERATE_FILE, Input
from paceline.data.prepare import PrepareSettings, prepare
from paceline.data.rows import copies_of
from paceline.errors import DataError
from tests.unit.data.conftest import TOY_TOKENIZER, RunPrepare, chat, template, toy, write_lines

SETTINGS = PrepareSettings(str(TOY_TOKENIZER), template=template("chatml_plain"), max_rejected=1.0)


def lines_of(folder: Path) -> list[str]:
    """Sources of all rows, without the folder."""
    dataset = Dataset.open(folder)
    return [Path(dataset.source(i)).name for i in range(len(dataset))]


def reasons_of(folder: Path) -> list[str]:
    """Reasons of rejected records."""
    return [json.loads(line)["reason"] for line in (folder / "rejected.jsonl").read_text().splitlines()]


def test_a_weight_is_how_often_a_conversation_is_used(tmp_path: Path) -> None:
    """2.25: every conversation twice, and a quarter of them once more; the same ones on every run."""
    hashes = np.random.default_rng(0).integers(0, 2**64, 4000, dtype=np.uint64).tolist()
    copies = Counter(copies_of(value, 2.25) for value in hashes)
    assert set(copies) == {2, 3} and copies[3] == pytest.approx(1000, abs=110)
    assert Counter(copies_of(value, 1.0) for value in hashes) == {1: 4000}


def test_what_a_weight_keeps_does_not_depend_on_what_is_held_out() -> None:
    """Half of the conversations with the lowest hashes, which validation takes, are kept as well as of the others."""
    kept = [copies_of(value << 44, 0.5) for value in range(4000)]
    assert sum(kept[:400]) == pytest.approx(200, abs=50)


def test_a_mixture_says_what_came_of_each_input(tmp_path: Path) -> None:
    """Rows stand in the order of inputs, left-out lines are counted apart from rejected ones, nothing else is lost."""
    one = write_lines(tmp_path / "one.jsonl", *[chat(f"q{i}", "answer") for i in range(40)], "bad")
    two = write_lines(tmp_path / "two.jsonl", *[chat(f"r{i}", "answer") for i in range(3)])
    info, report = prepare(
        [Input(str(one), weight=0.5), Input(str(two), weight=2, license="mit")], tmp_path / "out", SETTINGS
    )
    half, double = report.inputs
    assert (half.num_lines, half.num_rejected, half.num_rows) == (41, 1, 40 - half.num_left_out)
    assert 10 < half.num_rows < 30
    assert (double.num_lines, double.num_left_out, double.num_rows) == (3, 0, 6)
    assert lines_of(tmp_path / "out")[-6:] == [
        "two.jsonl:1",
        "two.jsonl:1",
        "two.jsonl:2",
        "two.jsonl:2",
        "two.jsonl:3",
        "two.jsonl:3",
    ]
    assert double.source["license"] == "mit"
    assert (report.num_lines, report.num_left_out, report.num_rejected) == (44, half.num_left_out, 1)
    assert info.num_conversations == half.num_rows + 3
    assert half.num_tokens + double.num_tokens == info.num_tokens
    assert half.num_supervised + double.num_supervised == info.num_supervised
    prepare([Input(str(one), weight=0.5), Input(str(two), weight=2)], tmp_path / "again", SETTINGS)
    assert Dataset.open(tmp_path / "again").fingerprint == info.fingerprint


def test_a_weight_that_leaves_nothing_is_an_error(tmp_path: Path) -> None:
    """The message tells rejected lines from those that were left out."""
    file = write_lines(tmp_path / "a.jsonl", chat("q", "answer"))
    with pytest.raises(DataError, match="no usable rows remain: all 0 lines were rejected, 1 left out by weight"):
        prepare([Input(str(file), weight=1e-9)], tmp_path / "out", SETTINGS)


def test_the_length_policy_counts_every_copy(tmp_path: Path) -> None:
    """A row that is used twice loses its tail twice."""
    file = write_lines(tmp_path / "a.jsonl", chat("q", "x" * 100))
    once = prepare([Input(str(file))], tmp_path / "one", PrepareSettings(**{**vars(SETTINGS), "max_length": 60}))
    twice = prepare(
        [Input(str(file), weight=2)], tmp_path / "two", PrepareSettings(**{**vars(SETTINGS), "max_length": 60})
    )
    assert twice[1].num_supervised_lost == 2 * once[1].num_supervised_lost > 0


def test_texts_train_on_all_but_their_first_token(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """A text is the target's own from its second token on; control tokens in it say that it is none."""
    file = write_lines(tmp_path / "a.jsonl", {"text": "once upon"}, {"text": "<|im_start|>user\nhi<|im_end|>"})
    _, report = run_prepare(file)
    ids, mask = Dataset.open(tmp_path / "out").row(0)
    assert ids.tolist() == list(b"once upon")
    assert mask.tolist() == [False] + [True] * 8
    assert report.kinds == {"texts": 1}
    assert reasons_of(tmp_path / "out")[0].startswith("control token in a text: ")


def test_token_rows_pass_as_they_are(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """Ids and mask are kept; an id that the tokenizer does not know rejects the row."""
    rows = [{"input_ids": [257, 5, 6, 266], "loss_mask": [1, 0, 1, 1]}]
    rows += [{"input_ids": [5, bad], "loss_mask": [1, 1]} for bad in (267, -1)]
    _, report = run_prepare(write_lines(tmp_path / "a.jsonl", *rows))
    ids, mask = Dataset.open(tmp_path / "out").row(0)
    assert (ids.tolist(), mask.int().tolist()) == (rows[0]["input_ids"], [0, 0, 1, 1])  # nothing precedes the first
    assert reasons_of(tmp_path / "out") == [
        "bad token row: id 267 is outside the tokenizer's 0 to 266",
        "bad token row: id -1 is outside the tokenizer's 0 to 266",
    ]


def test_rows_longer_than_the_limit_obey_it_however_they_came(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """Token rows and texts are cut like conversations."""
    row = {"input_ids": list(range(100)), "loss_mask": [1] * 100}
    run_prepare(write_lines(tmp_path / "a.jsonl", row, {"text": "x" * 100}), max_length=40)
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.lengths.tolist() == [40, 40]
    assert dataset.row(0)[0].tolist() == list(range(40))


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """A folder as `paceline regenerate` leaves it: one conversation, of which a template made two rows."""
    folder = tmp_path / "answers"
    folder.mkdir()
    rows = [{"input_ids": [65, 66, 67], "loss_mask": [0, 1, 1]}, {"input_ids": [65, 68, 69], "loss_mask": [0, 1, 1]}]
    write_lines(folder / ANSWERS_FILE, {"source": "a.jsonl:7", **chat("q", "a"), "rows": rows})
    write_lines(folder / "rejected.jsonl", {"file": "a.jsonl", "line": 8, "reason": "x", "text": "y"})
    description = {
        "tokenizer_fingerprint": tokenizer_fingerprint(toy()),
        "template_hash": template_hash(toy()),
        "sampling": {"thinking": None},
        "inputs": [{"path": "a.jsonl", "license": "cc-by-4.0"}],
    }
    write_lines(folder / REGENERATE_FILE, description)
    return folder


def test_regenerated_answers_bring_their_ids_and_their_origin(
    answers: Path, tmp_path: Path, run_prepare: RunPrepare
) -> None:
    """Rows are the ids that were sampled; licence and source of the prompts stand in prepare.json."""
    _, report = run_prepare(answers)
    dataset = Dataset.open(tmp_path / "out")
    assert [dataset.row(i)[0].tolist() for i in range(2)] == [[65, 66, 67], [65, 68, 69]]
    assert (dataset.info.num_conversations, report.num_lines, report.kinds) == (1, 1, {"token rows": 1})
    (part,) = json.loads((tmp_path / "out" / "prepare.json").read_text())["report"]["inputs"]
    assert part["source"]["regenerated"]["inputs"] == [{"path": "a.jsonl", "license": "cc-by-4.0"}]


def test_answers_that_were_made_otherwise_are_refused(answers: Path, run_prepare: RunPrepare) -> None:
    """Ids of another tokenizer would be another text; another template or thinking mode asks the target otherwise."""
    made = json.loads((answers / REGENERATE_FILE).read_text())
    write_lines(answers / REGENERATE_FILE, {**made, "tokenizer_fingerprint": "0" * 64})
    with pytest.raises(DataError, match=r"regenerated with another tokenizer_fingerprint \(000000000000, here "):
        run_prepare(answers)
    write_lines(answers / REGENERATE_FILE, made)
    with pytest.raises(DataError, match="regenerated with another template_hash"):
        run_prepare(answers, template_name="chatml_generation")
    with pytest.raises(
        DataError, match=r"regenerated with another thinking \(None, here False\): give prepare the same"
    ):
        run_prepare(answers, thinking=False)
    run_prepare(answers)
    write_lines(answers / REGENERATE_FILE, "no json")
    with pytest.raises(DataError, match="regenerate.json is damaged"):
        run_prepare(answers)


def test_a_long_line_and_odd_characters_cost_their_own_row(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """A line of 50 MB, a lone surrogate, raw and escaped control characters: each a reason, or text as it is."""
    long = b'{"text": "' + b"x" * (50 << 20) + b'"}'
    surrogate, control = r'{"text": "a\ud800"}', r'{"text": "bell\u0007 escape\u001b[31m null\u0000"}'
    raw = b'{"text": "bell\x07"}'
    run_prepare(write_lines(tmp_path / "a.jsonl", long, surrogate, control, raw))
    dataset = Dataset.open(tmp_path / "out")
    assert lines_of(tmp_path / "out") == ["a.jsonl:3"]
    assert bytes(dataset.row(0)[0].tolist()) == b"bell\x07 escape\x1b[31m null\x00"
    assert [reason.partition(":")[0] for reason in reasons_of(tmp_path / "out")] == [
        "line too long",
        "invalid Unicode",
        "invalid JSON",
    ]
