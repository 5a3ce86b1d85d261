"""The terminal view says the verdict and what it rests on, in a screen's lines, whatever names a process has."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from paceline.profiling import evidence
from paceline.report import flame
from paceline.report.attach_text import (
    CATEGORIES,
    MAX_LINES,
    clean,
    columns_of,
    figure_text,
    render_text,
    short,
    shortened,
    verdict_title,
)
from tests.unit.report.attach_reports import foreign_report, pipeline_report

STEERING = "\x1b[2Jevil\r\n\nVERDICT   fine\u202e\x9b1A\x07"


def flat(text: str) -> str:
    """Without line breaks."""
    return " ".join(text.split())


def with_text(value: Any, text: str) -> Any:
    """The same report with another text in the place of every one."""
    if isinstance(value, dict):
        return {key: with_text(each, text) for key, each in value.items()}
    if isinstance(value, list):
        return [with_text(each, text) for each in value]
    return text if isinstance(value, str) else value


def test_categories_are_those_of_the_record() -> None:
    """Every category has a name, and the ones in which a thread waits are the same as in the record."""
    assert tuple(CATEGORIES) == evidence.CATEGORIES
    assert flame.WAITING == evidence.WAITING


def test_verdict_comes_first_with_what_was_asked() -> None:
    """The sentence, the gain, and the answer to what the user asked stand above everything else."""
    text = render_text(pipeline_report())
    seen = flat(text)
    assert text.index("VERDICT") < text.index("ASKED") < text.index("THREADS") < text.index("CAUSES")
    assert "producer-bound (target side), gain if fixed 1.19x [1.15-1.23]" in seen
    assert "GIL contention: refuted: the GIL is held 8 % [6.3-10] of the time (predicted > 70 %, level 2)" in seen
    assert "2 targets waiting 0.4 % [0.1-0.7] (could make 8.16 a second) > queue 4.8 of 20 > drafter" in seen


def test_threads_gil_and_causes_are_listed() -> None:
    """Threads of roles stand first with their figures, then the GIL with its holders, and one line a cause."""
    text = render_text(pipeline_report())
    rows = [line.split() for line in text.split("\n")]
    target = next(row for row in rows if "target-0" in row and "4720" in row)
    assert target[1:] == "* 4720 97 % 1 % 3 % launch 41 %, dispatch 30 %".split()
    assert "23 idle threads" in text
    assert "held 8 % [6.3-10] of the time: 7.7 % at work" in flat(text)
    assert "by target-0 3 % [2-4.5], drafter-step 2 % [1.2-3.3]; mostly in forward (modeling_qwen3.py:412)" in flat(
        text
    )
    causes = text[text.index("CAUSES") :]
    order = ("launch_overhead", "gil_contention", "gpu_bound", "clock_cap")
    assert [causes.index(name) for name in order] == sorted(causes.index(name) for name in order)


def test_missing_and_disturbed_levels_say_what_helps() -> None:
    """A level that is missing or left out comes with its reason and its one fix, and stops are told."""
    seen = flat(render_text(pipeline_report()))
    assert "level 5, GPU (NVML): missing: the library of NVIDIA's driver was not found" in seen
    assert "what helps: pip install nvidia-ml-py" in seen
    assert "not used in the verdict: it stopped the process 5.2 % of its window" in seen
    assert "level 4 stopped it 5.2 % of its window, 2.6 % predicted, longest stop 210 ms" in seen


def test_foreign_process_has_no_pipeline() -> None:
    """Without a queue there is no line of it, and an undecided verdict says what to measure next."""
    text = render_text(foreign_report())
    assert "\nPIPELINE" not in text and "\nGIL" not in text and "None" not in text
    assert "measure next: the same look with the right to trace (about 8 s)" in flat(text)
    assert verdict_title(foreign_report()) == "Undecided"
    assert "no level stopped the process" in text


@pytest.mark.parametrize("width", [20, 60, 100, 200])
def test_lines_fit_the_terminal(width: int) -> None:
    """No line is wider than the terminal, or than the least that is used, and there are at most a screen's."""
    for report in (pipeline_report(), foreign_report()):
        lines = render_text(report, width).split("\n")
        assert max(map(columns_of, lines)) <= max(60, width)
        assert len(lines) <= MAX_LINES


def test_a_long_report_stays_on_a_screen() -> None:
    """Hundreds of busy threads, causes and notes do not make it longer."""
    report = pipeline_report()
    report["threads"] = [{**report["threads"][1], "tid": i, "role": f"target-{i}"} for i in range(300)]
    report["critical"] = list(range(300))
    report["hypotheses"] = [{**each, "id": f"{each['id']}_{i}"} for each in report["hypotheses"] for i in range(9)]
    report["notes"] = ["a note " * 60] * 50
    report["conclusion"]["line"] = "word " * 500
    assert len(render_text(report).split("\n")) <= MAX_LINES


@pytest.mark.parametrize("make", [pipeline_report, foreign_report])
def test_names_cannot_steer_the_terminal(make: Any) -> None:
    """Control characters and line breaks of any text come out as escapes within their own line."""
    text = render_text(with_text(make(), STEERING))
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert not any(line.startswith("VERDICT   fine") for line in text.split("\n"))
    assert "\\x1b[2Jevil" in text


def test_empty_report_is_still_text() -> None:
    """A report in which nothing was seen says so and does not fail."""
    empty = evidence.Report(taken_at=0, seconds=0, pid=1).model_dump(mode="json", by_alias=True)
    assert "Undecided" in render_text(empty)


def test_asked_but_undecided_says_what_would_decide() -> None:
    """The answer to a question that stays open names the missing evidence and the next measurement."""
    report = copy.deepcopy(pipeline_report())
    hypothesis = next(each for each in report["hypotheses"] if each["id"] == "clock_cap")
    missing = {"key": "clock", "says": "no clocks", "wanted": "", "effect": "missing", "points": 0, "figure": None}
    hypothesis |= {"asked": True, "evidence": [missing]}
    seen = flat(render_text(report))
    assert "undecided; missing: no clocks; measure next: level 5 (NVML) (about 8 s)" in seen


@pytest.mark.parametrize(
    ("figure", "shown"),
    [
        ({"value": 0.41, "interval": [0.36, 0.47]}, "41 % [36-47]"),
        ({"value": 1.19, "interval": [1.15, 1.23], "unit": "ratio"}, "1.19x [1.15-1.23]"),
        ({"value": 0.002, "interval": [0.002, 0.002]}, "0.2 %"),
        ({"value": 133_200, "interval": [1, 133_300], "unit": "per_s"}, "133,200 a second [1-133,300]"),
        ({"value": 3 * 2**30, "interval": [0, 0], "unit": "bytes"}, "3 GiB"),
        ({"value": 1e-9, "interval": [0, 1], "unit": "ms"}, "<0.01 ms [0-1]"),
        ({"value": 5, "interval": [], "unit": "count"}, "5"),
        ({"value": None}, "–"),
        (None, "–"),
    ],
)
def test_figures_are_written_with_their_interval(figure: Any, shown: str) -> None:
    """Shares are per cent, ratios have two digits, and what was read has no interval."""
    assert figure_text(figure) == shown


def test_short_numbers() -> None:
    """Two significant digits below ten, whole numbers above, and no exponents."""
    assert [short(value) for value in (0, 0.031, 1.26, 9.96, 12.4, 123456)] == [
        "0",
        "0.031",
        "1.3",
        "10",
        "12",
        "123,456",
    ]


def test_wide_letters_take_two_columns() -> None:
    """Names of East Asian scripts are cut by the columns that they take."""
    assert shortened("漢字漢字", 5) == "漢字…" and columns_of("漢字…") == 5
    assert clean("a\tb\x1bc") == "a b\\x1bc"


def test_stages_of_each_role_are_told() -> None:
    """The largest first, without those inside others; a stranger has none."""
    text = render_text(pipeline_report())
    assert "STAGES    target-0: target_prefill 94 %" in text
    assert "STAGES" not in render_text(foreign_report())
