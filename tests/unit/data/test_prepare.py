"""The whole of `prepare`: what is published, when, and what is said."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from paceline.data import prepare as prepare_module
from paceline.data import reading
from paceline.data.dataset import Dataset, DatasetWriter
from paceline.data.prepare import PrepareSettings
from paceline.errors import ConfigError, DataError
from tests.unit.data.conftest import TOY_TOKENIZER, RunPrepare, chat, template, toy, write_lines


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too, with its contents."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def rows_of(folder: Path) -> list[tuple[str, list[int], list[bool]]]:
    """Source, ids and mask of every row."""
    dataset = Dataset.open(folder)
    tensors = [dataset.row(i) for i in range(len(dataset))]
    return [(dataset.source(i), ids.tolist(), mask.tolist()) for i, (ids, mask) in enumerate(tensors)]


def test_prepare_json_describes_the_data_set(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """Counts, fingerprints, settings and versions are those of the run."""
    one = write_lines(tmp_path / "one.jsonl", chat("q", "answer"), "oops", chat("q" * 40, "a", "b", "c"))
    two = write_lines(tmp_path / "two.jsonl", "", chat("q", "answer"))
    info, report = run_prepare(one, two, max_length=62)
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.info == info
    assert [dataset.source(i) for i in range(3)] == [f"{one}:1", f"{one}:3", f"{two}:2"]
    assert (info.num_rows, info.num_conversations, info.longest, info.vocab_size) == (3, 2, 62, 267)
    assert info.num_tokens == dataset.lengths.sum()
    assert info.num_supervised == sum(int(dataset.row(i)[1].sum()) for i in range(3)) == 7 + 2 + 7
    assert report.num_supervised_lost == 2
    assert report.length_histogram == {32: 2, 64: 1}
    content = json.loads((tmp_path / "out" / "prepare.json").read_text())
    assert content["report"]["rejected"] == {"invalid JSON": 1}
    assert [part["source"]["path"] for part in content["report"]["inputs"]] == [str(one), str(two)]
    assert [(part["num_lines"], part["num_rejected"]) for part in content["report"]["inputs"]] == [(3, 1), (1, 0)]
    assert [part["num_rows"] for part in content["report"]["inputs"]] == [2, 1]
    assert sum(part["num_tokens"] for part in content["report"]["inputs"]) == info.num_tokens
    assert report.fill is None
    assert set(content["versions"]) == {"paceline", "python", "transformers", "tokenizers", "pyarrow", "numpy"}


def test_settings_show_in_the_fingerprints(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """The same input gives the same fingerprint from any path; another template has another hash."""
    first, _ = run_prepare(write_lines(tmp_path / "a.jsonl", chat("q", "answer")))
    again, _ = run_prepare(write_lines(tmp_path / "b.jsonl", "", chat("q", "answer")), out="again")
    tagged, _ = run_prepare(tmp_path / "a.jsonl", out="tagged", template_name="chatml_generation")
    assert first == again.model_copy(update={"files": first.files})
    assert tagged.fingerprint == first.fingerprint
    assert tagged.template_hash != first.template_hash
    assert tagged.tokenizer_fingerprint == first.tokenizer_fingerprint


def test_worker_processes_give_the_same_data_set(
    tmp_path: Path, run_prepare: RunPrepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and rejections are in input order whatever the number of workers."""
    monkeypatch.setattr(reading, "CHUNK_RECORDS", 3)
    records = [chat(f"question {i}", "a" * (i % 7)) if i % 5 else f"bad {i}" for i in range(40)]
    file = write_lines(tmp_path / "a.jsonl", *records)
    alone, report = run_prepare(file, out="alone")
    together = run_prepare(file, out="together", workers=2)
    assert together == (alone, report)
    assert rows_of(tmp_path / "together") == rows_of(tmp_path / "alone")
    rejected = [(tmp_path / out / "rejected.jsonl").read_text() for out in ("alone", "together")]
    assert rejected[0] == rejected[1] != ""


def test_the_limit_on_rejected_lines_counts_lines_that_are_not_blank(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """One bad line of twenty is 5 % and passes; one of nineteen does not, and the message says why and how to go on."""
    good = [chat("q", "answer")] * 18
    file = write_lines(tmp_path / "a.jsonl", *good, "", "", "bad")
    with pytest.raises(DataError) as caught:
        run_prepare(file, max_rejected=0.05)
    message = str(caught.value)
    assert "1 of 19 lines (5.3%) were rejected, more than --max-rejected 5%" in message
    assert "1 x invalid JSON" in message and f"{file}:21: invalid JSON" in message
    assert "--max-rejected 100%" in message
    assert os.listdir(tmp_path) == ["a.jsonl"]
    _, report = run_prepare(write_lines(file, *good, chat("q", "x y"), "bad"), max_rejected=0.05)
    assert report.num_rejected == 1


def test_turns_left_out_of_kept_lines_are_listed(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """Where turns have rows of their own, one that is too long is counted and listed, and the line is kept."""
    file = write_lines(tmp_path / "a.jsonl", chat("q", "<think>why</think>a", "q" * 50, "<think>why</think>b"))
    info, report = run_prepare(file, template_name="chatml_reasoning", max_length=50, on_long="drop")
    assert (info.num_rows, report.num_rejected) == (1, 0)
    assert report.dropped_turns == {"longer than max-length": 1}
    (listed,) = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert listed["line"] == 1
    assert listed["reason"].startswith("longer than max-length: row of assistant turn 2: ")


def test_rejected_text_is_cut_and_readable(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """The first 200 characters of a bad line are kept, bytes that are no UTF-8 replaced."""
    file = write_lines(tmp_path / "a.jsonl", chat("q", "answer"), "é" * 500, b"\xff{")
    run_prepare(file)
    text = (tmp_path / "out" / "rejected.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line)["text"] for line in text.splitlines()] == ["é" * 200, "\ufffd{"]


def test_an_old_data_set_is_replaced(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """A second run leaves only its own rows, and nothing beside the folder."""
    run_prepare(write_lines(tmp_path / "a.jsonl", chat("q", "first")))
    run_prepare(write_lines(tmp_path / "a.jsonl", chat("q", "second answer")))
    ((_, ids, mask),) = rows_of(tmp_path / "out")
    assert toy().decode(np.array(ids)[mask]) == "second answer<|im_end|>"
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "out"]


class Killed(BaseException):
    """Stands for whatever ends a run in the middle."""


@pytest.mark.parametrize(
    ("failure", "expected", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DataError, "the disk is full; nothing was published"),
        (OSError(errno.EIO, "Input/output error"), DataError, "Input/output error; nothing was published"),
        (Killed("now"), Killed, "now"),
    ],
)
@pytest.mark.parametrize("where", ["add", "close"])
def test_a_failure_in_the_middle_leaves_the_old_data_set(
    where: str,
    failure: BaseException,
    expected: type[BaseException],
    message: str,
    tmp_path: Path,
    run_prepare: RunPrepare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk, or anything else, while rows are written: the old output is untouched and no leftovers remain."""
    file = write_lines(tmp_path / "a.jsonl", chat("q", "first"))
    run_prepare(file)
    before = snapshot(tmp_path)

    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(DatasetWriter, where, fail)
    with pytest.raises(expected, match=message):
        run_prepare(file)
    assert snapshot(tmp_path) == before


def test_a_disk_that_fills_up_with_the_tokenizer_is_named(
    tmp_path: Path, run_prepare: RunPrepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizers library has a bare exception for it; the old output is untouched."""
    file = write_lines(tmp_path / "a.jsonl", chat("q", "first"))
    run_prepare(file)
    before = snapshot(tmp_path)

    def fail(*_: Any) -> None:
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(DataError, match="could not be written: the disk is full; nothing was published"):
        run_prepare(file)
    assert snapshot(tmp_path) == before


def test_a_failed_swap_puts_the_old_data_set_back(
    tmp_path: Path, run_prepare: RunPrepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the new folder cannot take its place, the old one returns to it."""
    file = write_lines(tmp_path / "a.jsonl", chat("q", "first"))
    run_prepare(file)
    before = snapshot(tmp_path)
    rename = os.rename

    def fail_for_the_new(source: Path, target: Path) -> None:
        if ".partial-" in str(source):
            raise OSError(errno.EACCES, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_for_the_new)
    with pytest.raises(DataError, match="Permission denied"):
        run_prepare(file)
    assert snapshot(tmp_path) == before


def test_a_killed_run_leaves_the_old_data_set_and_no_processes(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """`kill -9` in the middle: the workers end too, nothing is published, and the next run cleans up."""
    file = write_lines(tmp_path / "a.jsonl", chat("q", "first"))
    run_prepare(file)
    before = snapshot(tmp_path / "out")
    large = tmp_path / "large.jsonl"
    large.write_bytes((json.dumps(chat("q", "answer " * 400)) + "\n").encode() * 20_000)
    arguments = ["--tokenizer", TOY_TOKENIZER, "--template", template("chatml_plain"), "--out", tmp_path / "out"]
    command = [sys.executable, "-m", "paceline", "prepare", large, *arguments, "--workers", "2"]
    with subprocess.Popen([str(part) for part in command], stderr=subprocess.DEVNULL) as process:
        workers: set[int] = set()
        deadline = time.monotonic() + 60
        while len(workers) < 2 and time.monotonic() < deadline:
            workers = {pid for pid in children(process.pid) if b"spawn_main" in command_line(pid)}
            time.sleep(0.02)
        process.kill()
        process.wait()
        while any(b"spawn_main" in command_line(pid) for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert len(workers) == 2 and not any(b"spawn_main" in command_line(pid) for pid in workers)
    assert snapshot(tmp_path / "out") == before
    run_prepare(file)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "large.jsonl", "out"]


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        pytest.param([signal.SIGINT], 130, marks=pytest.mark.slow),
        pytest.param([signal.SIGTERM], 143, marks=pytest.mark.slow),
        ([signal.SIGINT] * 2, 130),
    ],
)
def test_an_interrupted_run_ends_at_once_and_says_what_became_of_it(
    numbers: list[signal.Signals], code: int, tmp_path: Path, run_prepare: RunPrepare
) -> None:
    """Ctrl-C in a terminal goes to the workers as well, once or twice: no hang, no tracebacks, the old output."""
    file = write_lines(tmp_path / "a.jsonl", chat("q", "first"))
    run_prepare(file)
    before = snapshot(tmp_path / "out")
    endless = tmp_path / "endless.jinja"
    endless.write_text(
        template("chatml_plain").read_text() + "{% if messages[0]['content'] == 'q' %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    )
    arguments = ["--tokenizer", TOY_TOKENIZER, "--template", endless, "--out", tmp_path / "out", "--workers", "2"]
    command = [sys.executable, "-m", "paceline", "prepare", file, *arguments]
    with subprocess.Popen(
        [str(part) for part in command], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 60
        while not (workers := [p for p in children(process.pid) if b"spawn_main" in command_line(p)]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for number in numbers:
            os.killpg(process.pid, number)
            time.sleep(0.05)
        _, said = process.communicate(timeout=60)
    while any(b"spawn_main" in command_line(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    # While Python closes down it has no handlers any more: a shell shows both as 130.
    assert process.returncode in ([code] if len(numbers) == 1 else [code, -signal.SIGINT]), said
    assert not any(b"spawn_main" in command_line(pid) for pid in workers)
    assert "Traceback" not in said
    if len(numbers) == 1:
        assert f"{numbers[0].name}: nothing was published" in said
        assert not [name for name in os.listdir(tmp_path) if "partial" in name]
    assert snapshot(tmp_path / "out") == before


def children(pid: int) -> set[int]:
    """Processes that a process started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, parent = int(path.parent.name), path.read_text().rpartition(")")[2].split()[1]
        except OSError:  # gone meanwhile
            continue
        if int(parent) == pid:
            found.add(number)
    return found


def command_line(pid: int) -> bytes:
    """Arguments of a process; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_broken_template_is_an_error_with_its_line(workers: int, tmp_path: Path) -> None:
    """It is no fault of the data, and found before any worker starts."""
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}\n{{ m.content }")
    file = write_lines(tmp_path / "a.jsonl", chat("q", "first"))
    settings = PrepareSettings(tokenizer=str(TOY_TOKENIZER), template=broken, workers=workers)
    with pytest.raises(DataError, match="the chat template is broken in line 2"):
        prepare_module.prepare([file], tmp_path / "out", settings)


def test_outputs_that_cannot_be_replaced_are_refused_before_any_work(
    tmp_path: Path, run_prepare: RunPrepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point, the folder that one is in, and links in a circle."""
    file = write_lines(tmp_path / "a.jsonl", chat("q", "first"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(DataError, match="is the folder that you are in"):
        run_prepare(file, out="here")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(DataError, match="cannot be a folder"):
        run_prepare(file, out="circle")
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(DataError, match="is a mount point"):
        run_prepare(file)


def test_leftovers_of_killed_runs_are_cleared(tmp_path: Path, run_prepare: RunPrepare) -> None:
    """A folder of a dead process goes, one of a live process is respected, and a swap cut short is undone."""
    file = write_lines(tmp_path / "a.jsonl", chat("q", "first"))
    run_prepare(file)
    before = snapshot(tmp_path / "out")
    os.rename(tmp_path / "out", tmp_path / ".out.replaced")  # killed between the two renames
    for pid in ("4194305", str(os.getppid())):  # above the largest pid; alive
        (tmp_path / f".out.partial-{pid}").mkdir()
    with pytest.raises(DataError, match=rf"out is being made by process {os.getppid()}: wait for it"):
        run_prepare(file)
    (tmp_path / f".out.partial-{os.getppid()}").rmdir()
    with pytest.raises(DataError, match="no usable rows"):
        run_prepare(write_lines(tmp_path / "bad.jsonl", "bad"))
    assert snapshot(tmp_path / "out") == before
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "bad.jsonl", "out"]


@pytest.mark.parametrize("name", ["notes.txt", "rows.arrow"])
def test_a_folder_of_something_else_is_never_replaced(name: str, tmp_path: Path, run_prepare: RunPrepare) -> None:
    """An output folder that holds other files, or files of the names without prepare.json, is refused as it is."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    file = write_lines(tmp_path / "a.jsonl", chat("q", "first"))
    before = snapshot(tmp_path)
    with pytest.raises(DataError, match="is not only a data set"):
        run_prepare(file)
    with pytest.raises(DataError, match="is no folder"):
        run_prepare(file, out="a.jsonl")
    assert snapshot(tmp_path) == before
    (tmp_path / "out" / name).unlink()
    run_prepare(file)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"it holds notes\.txt"):
        run_prepare(file)


@pytest.mark.parametrize("settings", [{"max_length": 1}, {"max_rejected": 1.5}, {"max_rejected": -0.1}, {"workers": 0}])
def test_settings_without_sense_are_refused(settings: dict[str, Any]) -> None:
    """Limits outside their range are named."""
    with pytest.raises(ConfigError, match="--" + next(iter(settings)).replace("_", "-")):
        PrepareSettings(tokenizer="toy", **settings)


def test_progress_ends_at_the_size_of_the_inputs(tmp_path: Path) -> None:
    """Bytes done rise to about bytes in all."""
    file = write_lines(tmp_path / "a.jsonl", *[chat("q", "answer")] * 600)
    seen: list[tuple[int, int | None]] = []
    settings = PrepareSettings(tokenizer=str(TOY_TOKENIZER), template=template("chatml_plain"))
    prepare_module.prepare([file], tmp_path / "out", settings, lambda done, total: seen.append((done, total)))
    size = file.stat().st_size
    assert len(seen) == 3 and seen == sorted(seen) and seen[-1] == (size, size)
