"""What surrounds a run: the signal that asks for tables, a run without a page, and what is shown next to JSON."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.observe import observing
from paceline.cli.progress import TrainProgress
from paceline.config import RunConfig, load_config
from paceline.profiling import stages
from paceline.profiling.page import pages_in, read_page


@pytest.fixture(autouse=True)
def _default_disposition() -> Iterator[None]:
    """SIGUSR1 would end this process, as it would a training run's."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page can be made, as in a container without shared memory."""
    monkeypatch.setattr(stages, "open_run", lambda *args, **kwargs: None)


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    return load_config(None, [f"run.dir={tmp_path}", "target.path=t", "data.path=d", *overrides])


def ignore(text: str) -> None:
    """Show nothing."""


def survive_sigusr1() -> None:
    assert signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.usefixtures("no_page")
def test_sigusr1_ends_no_run_that_has_no_page(tmp_path: Path) -> None:
    """It was asked for, so somebody sends it: it does nothing, while the run lasts and while its report is written."""
    with observing(tmp_path, config(tmp_path, "profiling.sigusr1=true"), ignore) as between:
        survive_sigusr1()
        between()
    survive_sigusr1()


def test_sigusr1_while_the_page_is_being_made_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler is there first; a late signal is ignored as well."""
    original = stages.open_run

    def signalled(*args: object, **kwargs: object) -> object:
        survive_sigusr1()
        return original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(stages, "open_run", signalled)
    with observing(tmp_path, config(tmp_path, "profiling.sigusr1=true"), ignore):
        [page] = pages_in(tmp_path / "profile")
        assert not read_page(page).control.is_on
        survive_sigusr1()
        assert read_page(page).control.is_on
    survive_sigusr1()


def test_sigusr1_in_a_forked_child_leaves_the_page_alone(tmp_path: Path) -> None:
    """The page is shared with children: a signal to the whole group switches once."""
    with observing(tmp_path, config(tmp_path, "profiling.sigusr1=true"), ignore):
        [page] = pages_in(tmp_path / "profile")
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0)  # a boundary at which Python runs handlers
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert read_page(page).control.serial == 0 and not read_page(page).control.is_on


@pytest.mark.parametrize("asked", ["true", "false"])
def test_a_handler_of_sigusr1_is_given_back(tmp_path: Path, asked: str) -> None:
    """Whoever had the signal has it afterwards; without being asked for it is not even taken."""
    heard: list[int] = []

    def mine(number: int, _frame: object) -> None:
        heard.append(number)

    signal.signal(signal.SIGUSR1, mine)
    with observing(tmp_path, config(tmp_path, f"profiling.sigusr1={asked}"), ignore):
        assert (signal.getsignal(signal.SIGUSR1) is mine) == (asked == "false")
    assert signal.getsignal(signal.SIGUSR1) is mine and heard == []


def test_off_the_main_thread_no_handler_is_installed(tmp_path: Path) -> None:
    """Python allows none there; the run is observed all the same."""
    seen: list[object] = []

    def work() -> None:
        with observing(tmp_path, config(tmp_path, "profiling.sigusr1=true"), ignore):
            seen.append(signal.getsignal(signal.SIGUSR1))
            seen.append(len(pages_in(tmp_path / "profile")))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == [signal.SIG_DFL, 1] and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.mark.usefixtures("no_page")
def test_without_a_page_it_is_said_what_else_is_missing(tmp_path: Path) -> None:
    """The thread has its name in the operating system all the same."""
    shown: list[str] = []
    with observing(tmp_path, config(tmp_path, "profiling.metrics_port=0"), shown.append):
        name = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text()
    assert name == "drafter-0\n"
    assert shown == ["without a page for the profile there are no control socket, torch window and metrics either"]


def test_what_was_asked_for_is_shown_next_to_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Quiet leaves out phases; tables and addresses go to stderr, and stdout stays JSON's."""
    progress = TrainProgress(quiet=True)
    progress.phase("loading")
    progress.show("a [table]")
    assert capsys.readouterr() == ("", "a [table]\n")


@pytest.mark.parametrize("quiet", [True, False])
def test_a_broken_stderr_takes_nothing_else_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    """Where nobody reads any more, it is silent from then on; the report on stdout still comes."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stderr, open(tmp_path / "out", "w") as stdout:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            patch.setattr(sys, "stdout", stdout)
            progress = TrainProgress(quiet)
            progress.show("a table")
            print("{}", flush=True)
            patch.setattr(sys, "stderr", stdout)  # it would be seen
            progress.show("another")
            progress.phase("a phase")
        os.dup2(stdout.fileno(), writer)  # closing it flushes
    assert (tmp_path / "out").read_text().startswith("{}\n")
    assert "another" not in (tmp_path / "out").read_text() and "phase" not in (tmp_path / "out").read_text()
