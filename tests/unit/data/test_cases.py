"""The shared cases D01 to D08 with their exact values, through `prepare`."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from paceline.data.dataset import Dataset
from paceline.errors import DataError
from tests.unit.data.conftest import INPUTS, RunPrepare, toy


def expected(case: str) -> Any:
    """The outcome that a case asks for."""
    return json.loads((INPUTS / case / "expected.json").read_text(encoding="utf-8"))


def described(dataset: Dataset, index: int) -> dict[str, Any]:
    """A row in the terms of the cases."""
    ids, mask = dataset.row(index)
    return {
        "n_tokens": len(ids),
        "n_supervised": int(mask.sum()),
        "mask_rle": [[value, len(list(run))] for value, run in groupby(mask.int().tolist())],
        "supervised_ids": ids[mask].tolist(),
    }


def rows_by_line(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of a data set by the number of their input line."""
    dataset = Dataset.open(folder)
    rows: dict[str, list[dict[str, Any]]] = {}
    for index in range(len(dataset)):
        rows.setdefault(dataset.source(index).rpartition(":")[2], []).append(described(dataset, index))
    return rows


def rejections(folder: Path) -> dict[int, str]:
    """Reasons by line number."""
    records = [json.loads(line) for line in (folder / "rejected.jsonl").read_text(encoding="utf-8").splitlines()]
    return {record["line"]: record["reason"] for record in records}


def test_d01_keeps_good_lines_and_lists_bad_ones(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """Good lines give the exact rows; every bad line is listed with file, physical line, reason and text."""
    case = expected("D01_bad_lines")
    file = INPUTS / "D01_bad_lines" / "input.jsonl"
    _, report = run_prepare(file)
    assert rows_by_line(tmp_path / "out") == {line: [row] for line, row in case["rows"].items()}
    listed = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [record["line"] for record in listed] == case["rejected_lines"]
    lines = file.read_text(encoding="utf-8").splitlines()
    assert all(record["file"] == str(file) and record["text"] == lines[record["line"] - 1] for record in listed)
    assert [record["reason"] for record in listed] == [
        "invalid JSON: Unterminated string starting at (character 42)",
        "not a JSON object: a JSON array",
        "no list of messages: `messages` is a JSON string",
        "missing content: message 2 (assistant)",
        "not a JSON object: a JSON number",
    ]
    assert (report.num_lines, report.num_rejected) == (8, 5)


def test_d01_strict_mode_stops_at_the_first_bad_line(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """With on_error=fail the first bad line is named and nothing is published."""
    with pytest.raises(DataError, match=r"input\.jsonl:2: invalid JSON"):
        run_prepare(INPUTS / "D01_bad_lines" / "input.jsonl", on_error="fail")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["bom_crlf.jsonl", "clean_lf.jsonl"])
def test_d02_line_endings_and_byte_order_mark_are_no_content(
    file: str, tmp_path: Path, run_prepare: RunPrepare
) -> None:
    """Both encodings of the file give the same rows, and escaped line endings inside strings survive."""
    run_prepare(INPUTS / "D02_bom_crlf" / file)
    rows = rows_by_line(tmp_path / "out")
    assert [rows["1"][0], rows["2"][0]] == expected("D02_bom_crlf")["rows"]


def test_d03_all_dialects_give_one_row(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """Six ways to write one conversation give one and the same row, and count as one conversation."""
    info, report = run_prepare(INPUTS / "D03_key_dialects" / "input.jsonl")
    row = expected("D03_key_dialects")["row"]
    ids = row.pop("input_ids")
    assert rows_by_line(tmp_path / "out") == {str(line): [row] for line in range(1, 7)}
    dataset = Dataset.open(tmp_path / "out")
    assert [dataset.row(i)[0].tolist() for i in range(6)] == [ids] * 6
    assert (info.num_conversations, report.num_rejected) == (1, 0)


def test_d04_rows_with_nothing_to_learn_are_dropped(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """Rows without two supervised tokens are rejected with the reason; the others have the exact masks."""
    case = expected("D04_empty_and_unsupervised")
    run_prepare(INPUTS / "D04_empty_and_unsupervised" / "input.jsonl")
    assert rows_by_line(tmp_path / "out") == {str(n): [case["rows"][str(n)]] for n in case["kept_lines"]}
    reasons = rejections(tmp_path / "out")
    assert sorted(reasons) == [1, 2, 3, 4]
    assert all(reasons[int(line)].endswith(reason) for line, reason in case["dropped"].items())


def test_d04_a_file_without_usable_rows_is_an_error(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """No usable row: the counts by reason are given and nothing is published."""
    with pytest.raises(DataError, match=r"(?s)no usable rows remain.*2 x no assistant turn.*1 x empty conversation"):
        run_prepare(INPUTS / "D04_empty_and_unsupervised" / "all_unsupervised.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["chatml_plain", "chatml_generation"])
def test_d05_generation_tags_are_not_needed(name: str, tmp_path: Path, run_prepare: RunPrepare) -> None:
    """The same ids and mask with and without generation tags in the template."""
    run_prepare(INPUTS / "D05_template_without_generation_tags" / "input.jsonl", template_name=name)
    row = expected("D05_template_without_generation_tags")["row"]
    ids = row.pop("input_ids")
    assert rows_by_line(tmp_path / "out") == {"1": [row]}
    assert Dataset.open(tmp_path / "out").row(0)[0].tolist() == ids


@pytest.mark.parametrize("thinking", [None, True])
def test_d06_rewritten_history_gives_a_row_a_turn(
    thinking: bool | None, tmp_path: Path, run_prepare: RunPrepare
) -> None:
    """Where the template removes old reasoning every turn has its own row, in either way to write reasoning."""
    case = expected("D06_reasoning_history")
    run_prepare(INPUTS / "D06_reasoning_history" / "input.jsonl", template_name="chatml_reasoning", thinking=thinking)
    turns = [case["training_row_for_turn_1"], case["training_row_for_turn_2"]]
    assert rows_by_line(tmp_path / "out") == {"1": turns, "2": turns, "3": [case["line_3"]["thinking_on"]]}
    assert Dataset.open(tmp_path / "out").row(1)[0].tolist().count(259) == 1


def test_d06_an_empty_block_that_the_prompt_supplies_is_not_supervised(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """With thinking off the prompt supplies the empty block, and answers with reasoning contradict it."""
    run_prepare(INPUTS / "D06_reasoning_history" / "input.jsonl", template_name="chatml_reasoning", thinking=False)
    assert rows_by_line(tmp_path / "out") == {"3": [expected("D06_reasoning_history")["line_3"]["thinking_off"]]}
    reasons = rejections(tmp_path / "out")
    assert sorted(reasons) == [1, 2]
    assert all(reason.startswith("template changes the prompt: assistant turn 1") for reason in reasons.values())


def test_d07_tool_calls_are_rendered_as_objects(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """Arguments and tools given as objects or JSON strings give one and the same row; tool results are context."""
    case = expected("D07_tool_calls")
    run_prepare(INPUTS / "D07_tool_calls" / "input.jsonl", template_name="chatml_tools")
    row = case["row_1"]
    assert rows_by_line(tmp_path / "out") == {"1": [row], "2": [row], "3": [row], "4": [case["row_4"]]}
    dataset = Dataset.open(tmp_path / "out")
    assert [dataset.row(i)[0].tolist() for i in (1, 2)] == [dataset.row(0)[0].tolist()] * 2
    assert toy().decode(row["supervised_ids"]) == "".join(case["supervised_text_row_1"])
    assert dataset.info.num_conversations == 2


@pytest.mark.parametrize("max_length", [48, 32])
def test_d08_cut_keeps_the_beginning_of_long_rows(max_length: int, tmp_path: Path, run_prepare: RunPrepare) -> None:
    """A cut row is the first tokens of the whole, and is dropped when nothing supervised is left."""
    file = INPUTS / "D08_too_long" / "input.jsonl"
    run_prepare(file, out="whole")
    run_prepare(file, max_length=max_length)
    case = expected("D08_too_long")["policy_truncate_right"][f"max_length={max_length}"]
    rows = rows_by_line(tmp_path / "out")
    assert sorted(rows) == [line for line, row in case.items() if row["kept"]]
    for line, (row,) in rows.items():
        assert {key: row[key] for key in ("n_tokens", "n_supervised", "mask_rle")} == {
            key: case[line][key] for key in ("n_tokens", "n_supervised", "mask_rle")
        }
    whole, cut = Dataset.open(tmp_path / "whole"), Dataset.open(tmp_path / "out")
    assert whole.lengths.tolist() == expected("D08_too_long")["full_lengths"]
    for index, line in enumerate(sorted(rows)):
        ids = whole.row(int(line) - 1)[0]
        assert cut.row(index)[0].tolist() == ids[:max_length].tolist()


def test_d08_drop_rejects_long_rows_and_a_second_run_is_not_served_from_the_first(
    tmp_path: Path, run_prepare: RunPrepare
) -> None:
    """With on_long=drop only rows within the limit of this run are kept."""
    file = INPUTS / "D08_too_long" / "input.jsonl"
    for max_length, kept in [(48, ["1"]), (32, ["1"]), (59, ["1", "3"]), (27, None)]:
        if kept is None:
            with pytest.raises(DataError, match="4 x longer than max-length"):
                run_prepare(file, max_length=max_length, on_long="drop")
        else:
            _, report = run_prepare(file, max_length=max_length, on_long="drop")
            assert sorted(rows_by_line(tmp_path / "out")) == kept
            assert report.rejected == {"longer than max-length": 4 - len(kept)}


def test_d08_the_cost_of_the_length_policy_is_counted(run_prepare: RunPrepare) -> None:
    """Supervised tokens lost to the limit are those of the whole rows less those that were kept."""
    file = INPUTS / "D08_too_long" / "input.jsonl"
    whole, _ = run_prepare(file, out="whole")
    for on_long in ("cut", "drop"):
        info, report = run_prepare(file, max_length=48, on_long=on_long)
        assert report.num_supervised_lost == whole.num_supervised - info.num_supervised
