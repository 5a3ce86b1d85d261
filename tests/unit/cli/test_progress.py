"""Whatever becomes of the terminal, a run goes on and its exit code is its own."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.progress import LastingStream, TrainProgress, say

ROOT = Path(__file__).parents[3]

RUN = """
import logging, os, pty, sys, time
from types import SimpleNamespace as S
from rich.logging import RichHandler
from paceline.cli.progress import TrainProgress, say, stderr_console

def drive(break_off=lambda: None):
    logging.basicConfig(handlers=[RichHandler(console=stderr_console())])
    progress = TrainProgress()
    config = S(pipeline=S(tokens_per_batch=1), run=S(device="cpu"))
    draft = S(num_hidden_layers=1, block_size=4, target_layer_ids=[1], mask_token_id=3)
    progress.start(config, S(draft=draft, num_anchors=1, total_steps=60), 0, ["a note"])
    for step in range(1, 61):
        if step == 5:
            break_off()
        line = dict(step=step, loss=1.0, acceptance_length_est=1.0, tok_per_s=1.0, queue=1, put_wait_s=0, get_wait_s=0)
        progress.step(line | {"validation_acceptance_length": 1.0}, 60)
        logging.warning("step %d " + "x" * 300, step)
        time.sleep(0.005)
    progress.stop()
    print("\\nplain", file=sys.stdout)
    say("the end")
"""


def python(program: str, **streams: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", RUN + program]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "PYTHONUNBUFFERED": "", "COLUMNS": "200"}
    return subprocess.run(command, env=environment, timeout=60, **streams)  # type: ignore[call-overload]


def test_readers_that_leave_end_nothing() -> None:
    """Both stdout and stderr are pipes that nobody reads any more: exit code 0."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert python("drive()", stdout=writer, stderr=writer).returncode == 0
    finally:
        os.close(writer)


def test_a_full_disk_behind_the_streams_ends_nothing() -> None:
    """Exit code 0, also where stdout's buffer is full of what print left in it; a warning has what stdout lacks."""
    with open("/dev/full", "wb") as full:
        assert python("drive()", stdout=full, stderr=full).returncode == 0
        done = python("drive()", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 0 and b"stdout takes no more; it lacks: the end" in done.stderr


def test_streams_that_were_closed_end_nothing() -> None:
    """As in `paceline train run.yaml >&- 2>&-`."""
    command = f'exec "{sys.executable}" -c "$PROGRAM" >&- 2>&-'
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PROGRAM": RUN.replace("print(", "say(").replace(
        "file=sys.stdout", ""
    ) + "drive()"}  # fmt: skip
    assert subprocess.run(["sh", "-c", command], env=environment, timeout=60).returncode == 0


def test_a_terminal_that_goes_away_ends_nothing() -> None:
    """While a bar is drawn, its window is closed: the run ends as it would have, and stdout has its lines."""
    program = """
main, terminal = pty.openpty()
os.dup2(terminal, 2)
os.close(terminal)
assert os.isatty(2) and TrainProgress()._live
drive(lambda: os.close(main))
"""
    done = python(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert done.returncode == 0 and done.stdout == b"\nplain\nthe end\n"


class Full(io.StringIO):
    """A stream on a disk that is full for a while."""

    number: int | None = errno.ENOSPC

    def flush(self) -> None:
        if self.number is not None:
            raise OSError(self.number, os.strerror(self.number))


def test_it_speaks_again_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk silences progress as long as it is full; a terminal that is gone, for ever."""
    monkeypatch.setattr("atexit.register", lambda *_: None)
    full = Full()
    monkeypatch.setattr(sys, "stderr", full)
    progress = TrainProgress()
    progress.show("one")
    full.number = None
    progress.show("two")
    assert full.getvalue().endswith("two\n")
    full.number = errno.EIO
    progress.show("three")
    full.number = None
    progress.show("four")
    assert full.getvalue().endswith("three\n")


def test_what_stdout_cannot_write_in_its_encoding_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of another script does not end a run in a terminal without it."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    say("runs/\u00e9")
    assert raw.getvalue() == b"runs/\\xe9\n"


def test_there_may_be_no_stream_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python was started without it, nothing is written and nothing raised."""
    monkeypatch.setattr(sys, "stdout", None)
    say("nobody hears it")
    stream = LastingStream("stdout")
    assert not stream.isatty() and stream.encoding == "utf-8"
    with pytest.raises(io.UnsupportedOperation):
        stream.fileno()


def test_what_was_measured_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The step that it is of, and whether it is the best so far."""
    from paceline.train.evaluations import Measured

    progress = TrainProgress()
    progress.measured(Measured(40, 2.345, 0, {}), is_best=True)
    progress.measured(Measured(60, 2.1, 0, {}), is_best=False)
    said = capsys.readouterr().err.splitlines()
    assert said == ["step 40 accepts 2.35 when decoding, the best so far", "step 60 accepts 2.10 when decoding"]
    TrainProgress(quiet=True).measured(Measured(40, 2.345, 0, {}), is_best=True)
    assert capsys.readouterr().err == ""
