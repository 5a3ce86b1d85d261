"""The reference data: prompts that no evaluation set has, and answers without loops."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from benchmarks.reference import wordings
from benchmarks.reference.build import answer_of, without_loops
from benchmarks.reference.prompts import evaluation_keys, key_of, own, write


def test_prompts_of_evaluation_sets_and_repeats_are_left_out(tmp_path: Path) -> None:
    """Compared by letters and digits alone: the question of a turn without the line on how to answer it as well."""
    question = "Janet's ducks lay 16 eggs a day; how many are that in 30 days?"
    evaluation = tmp_path / "set.jsonl"
    evaluation.write_text(json.dumps({"turns": [f"{question}\nReason step by step.", "And in 31?"]}) + "\n")
    prompts = [
        "janets ducks lay 16 eggs a day -- how many are that in 30 days",
        "Fine?",
        "Fine!",
        "",
        "x" * 2000,
        "Other",
    ]
    counts = write(tmp_path, "own", prompts, None, evaluation_keys([evaluation]))
    lines = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    assert [line["messages"][0]["content"] for line in lines] == ["Fine?", "Other"]
    assert counts == {"known: of an evaluation set, or twice": 2, "too long or too short": 2, "kept": 2}
    assert write(tmp_path, "own", prompts, 1, set())["kept"] == 1


def test_wordings_are_the_same_for_a_seed_and_many() -> None:
    """Every template can be filled in; a seed decides all; few of thousands are alike."""
    assert list(own(50, 3)) == list(own(50, 3)) != list(own(50, 4))
    texts = list(own(2000, 0))
    assert len({key_of(text) for text in texts}) > len(texts) / 3
    assert not any("{" in text and "}" in text and "boxed{" not in text for text in texts)
    sums = list(itertools.islice(wordings.sums(random.Random(0)), 2000))
    assert 0.4 < sum(wordings.STEPS in text for text in sums) / len(sums) < 0.6


@pytest.mark.parametrize(
    ("answer", "is_kept"),
    [([5, 6, 7, 8, 2], True), ([5, 6] * 9, False), ([9, *[5, 6, 7] * 3, 2], False), ([*[5, 6] * 9, 7], True)],
)
def test_answers_that_loop_are_left_out(answer: list[int], is_kept: bool, tmp_path: Path) -> None:
    """Whether they ran into the limit or ended all the same; the prompt of a row is not looked at."""
    answers = tmp_path / "answers"
    answers.mkdir()
    (answers / "regenerate.json").write_text("{}")
    row = {"input_ids": [1, 1, 1, 1, *answer], "loss_mask": [0, 0, 0, 0, *[1] * len(answer)]}
    line = {"rows": [{"input_ids": [3], "loss_mask": [1]}, row]}
    (answers / "answers.jsonl").write_text(json.dumps(line) + "\n")
    assert answer_of(line) == answer
    counts = without_loops(answers, tmp_path / "kept", (2,))
    kept = (tmp_path / "kept" / "answers.jsonl").read_text()
    assert bool(kept) == is_kept and counts.get("loops left out", 0) == (not is_kept)
    if is_kept:
        assert counts["kept, cut by the limit"] == (answer[-1] != 2) and json.loads(kept) == line
