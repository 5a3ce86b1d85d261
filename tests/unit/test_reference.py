"""The reference data: prompts that no evaluation set has, and answers without loops."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from benchmarks.reference import wordings
from benchmarks.reference.build import answer_of, without_loops
from benchmarks.reference.prompts import documented, evaluation_keys, functions, key_of, own, self_asked, write
from tests.toy import build_toy


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
    line = {"source": "prompts/own.jsonl:3", "rows": [{"input_ids": [3], "loss_mask": [1]}, row]}
    (answers / "answers.jsonl").write_text(json.dumps(line) + "\n")
    assert answer_of(line) == answer
    counts = without_loops(answers, tmp_path / "kept", (2,))["own"]
    kept = (tmp_path / "kept" / "answers.jsonl").read_text()
    assert bool(kept) == is_kept and counts.get("loops left out", 0) == (not is_kept)
    if is_kept:
        assert counts["kept, cut by the limit"] == (answer[-1] != 2) and json.loads(kept) == line


LIBRARY = '''
def _hidden(x):
    """Private functions are left out, whatever they say of themselves."""

def short(x):
    """Too short."""

@decorated
def area(width: float, height: float = 1.0) -> float:
    """Return the area of a rectangle. The sides are in metres.

    >>> area(2, 3)
    6
    """
    return width * height

class Shape:
    def turned(self, angle):
        """Bound to an object: without its class it is nobody's function."""

    @staticmethod
    def sides(points):
        """Count the sides of a polygon that is given as points."""
        return len(points)
'''


def test_functions_are_asked_for_by_docstring_and_by_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without their bodies; what does not parse and what tests a library is passed over."""
    for name, text in (("a.py", LIBRARY), ("tests/b.py", LIBRARY.replace("area", "other")), ("c.py", "def {{ x }}:")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [name for _, name, _ in documented(tmp_path)] == ["area", "sides"]
    monkeypatch.setattr("benchmarks.reference.prompts.library_folders", lambda: [tmp_path])
    asked = list(functions(0))
    assert len(asked) == 4 and asked != list(functions(1)) and asked == list(functions(0))
    whole = [text for text in asked if "def area(width: float, height: float=1.0) -> float:" in text]
    assert len(whole) == 1 and ">>> area(2, 3)" in whole[0] and "return width" not in "".join(asked)
    assert sum("Return the area of a rectangle." in text for text in asked) == 2
    assert sum("metres" in text for text in asked) == 1


def test_every_other_question_starts_with_words_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The words are part of the question; a question that does not end is left out."""
    target = build_toy(tmp_path).target
    monkeypatch.setattr(wordings, "OPENINGS", ("count", "list"))
    asked = list(self_asked(str(target), 80, 0, "cpu"))
    started = [text.startswith(("count", "list")) for text in asked]
    assert 0 < sum(started) < len(asked) < 80
