"""Signals that stop a run: heard at any time, once gracefully, and by the process alone that they were sent to."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.control import signals
from paceline.control.signals import StopRequest

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WATCHED = (*STOPPING, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is said, and handlers are as they were."""
    monkeypatch.setattr(signals, "_say", lambda text: None)
    before = {number: signal.getsignal(number) for number in WATCHED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    assert signal.set_wakeup_fd(-1) == -1
    assert not signals._entered


def until(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def in_child(work: Callable[[], None]) -> int:
    """How a forked process ends that does this; 99 if by an exception."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_asks_for_a_stop(number: signal.Signals) -> None:
    """The reason is its name; afterwards the signal is whose it was."""
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop and stop.reason is None
        send(number)
        assert until(lambda: stop) and stop.reason == number.name
    assert signal.getsignal(number) == before


def test_a_signal_is_heard_while_the_main_thread_is_in_a_long_call() -> None:
    """A call that lets other threads run, and does not come back for a signal, does not delay the stop."""
    heard_during_call: list[bool] = []
    is_over = threading.Event()

    def interrupt(stop: StopRequest) -> None:
        time.sleep(0.05)
        send(signal.SIGTERM)
        until(lambda: stop.reason or is_over.is_set())
        heard_during_call.append(not is_over.is_set())

    with StopRequest() as stop:
        thread = threading.Thread(target=interrupt, args=(stop,))
        thread.start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)
        is_over.set()
        thread.join()
    assert heard_during_call == [True]


@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGINT"), ("SIGINT", "SIGTERM"), ("SIGTERM", "SIGINT")])
def test_the_second_signal_ends_at_once(first: str, second: str) -> None:
    """The exit code is 128 and its number, even while the main thread is in a long call."""

    def work() -> None:
        with StopRequest() as stop:
            send(signal.Signals[first])
            until(lambda: stop)
            threading.Timer(0.05, send, [signal.Signals[second]]).start()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000_000)

    assert in_child(work) == 128 + signal.Signals[second]


@pytest.mark.parametrize("others", [("SIGHUP", "SIGHUP"), ("SIGUSR2", "SIGUSR2", "SIGHUP")])
def test_signals_that_only_ask_may_come_twice(others: tuple[str, ...]) -> None:
    """A terminal that closes sends SIGHUP twice, and SIGTERM follows a scheduler's announcement: both are graceful."""

    def work() -> None:
        with StopRequest("SIGUSR2") as stop:
            for name in others:
                send(signal.Signals[name])
            assert until(lambda: stop) and stop.reason == others[0]
            send(signal.SIGTERM)
            assert until(lambda: stop._has_insisted)
            send(signal.SIGHUP)
        assert stop._has_insisted  # heard before it was left

    assert in_child(work) == 0


def test_signals_that_were_ignored() -> None:
    """In the background SIGINT is inherited as ignored, and heard all the same; under nohup SIGHUP stays ignored."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    with StopRequest() as stop:
        send(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        send(signal.SIGINT)
        assert until(lambda: stop) and stop.reason == "SIGINT"
    assert all(signal.getsignal(number) is signal.SIG_IGN for number in STOPPING)


def test_the_extra_signal_stops_and_does_no_harm_later() -> None:
    """By default it would end the process, so it is ignored when the run is over; unasked for it is left alone."""
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    with StopRequest():
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    with StopRequest("SIGUSR2") as stop:
        send(signal.SIGUSR2)
        assert until(lambda: stop) and stop.reason == "SIGUSR2"
    send(signal.SIGUSR2)


def test_a_request_from_a_thread_stops_as_well() -> None:
    """Who asks first gives the reason; a signal after it is a first one, and ends nothing at once."""
    with StopRequest() as stop:
        thread = threading.Thread(target=stop.request, args=("stop",))
        thread.start()
        thread.join()
        stop.request("later")
        send(signal.SIGTERM)
    assert stop.reason == "stop" and stop._has_insisted


def test_off_the_main_thread_no_handler_is_installed() -> None:
    """Python allows none there; it can still be asked."""
    before = [signal.getsignal(number) for number in WATCHED]
    seen: list[object] = []

    def work() -> None:
        with StopRequest("SIGUSR2") as stop:
            seen.append([signal.getsignal(number) for number in WATCHED])
            stop.request("stop")
            seen.append(stop.reason)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == [before, "stop"]


def test_the_signal_of_a_forked_child_is_not_the_parents() -> None:
    """It writes to the same socket until it has let go of it: who wrote is what counts."""

    def work() -> None:
        with StopRequest() as stop:
            assert stop._ear is not None
            copy = os.dup(stop._ear._writer.fileno())  # what the interpreter of an early child does, it does itself
            assert in_child(lambda: os._exit(0 if os.write(copy, bytes([signal.SIGINT])) == 1 else 98)) == 0
            os.close(copy)
            send(signal.SIGTERM)  # heard after what the child wrote
            assert until(lambda: stop) and stop.reason == "SIGTERM"

    assert in_child(work) == 0


def test_a_forked_child_is_not_stopped_by_the_terminal() -> None:
    """SIGINT goes to the whole group and is the parent's matter; SIGTERM ends a child as it did before."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def interrupted() -> None:
        send(signal.SIGINT)
        time.sleep(0)

    with StopRequest() as stop:
        assert in_child(interrupted) == 0
        assert in_child(lambda: send(signal.SIGTERM)) == -signal.SIGTERM
        assert not stop
        send(signal.SIGINT)
        assert until(lambda: stop) and stop.reason == "SIGINT"


def test_a_child_that_leaves_the_block_leaves_the_parent_listening() -> None:
    """The socket and the thread are the parent's."""
    stop = StopRequest()
    with stop:
        assert in_child(lambda: stop.__exit__(None, None, None)) == 0
        send(signal.SIGTERM)
        assert until(lambda: stop)


def test_who_listened_before_goes_on_listening() -> None:
    """Numbers are passed on to the descriptor that was there, which is there again afterwards."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    try:
        with StopRequest() as stop:
            send(signal.SIGTERM)
            assert until(lambda: stop)
        assert os.read(reader, 10) == bytes([signal.SIGTERM])
    finally:
        assert signal.set_wakeup_fd(-1) == writer
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("closes", [True, False])
def test_who_takes_the_descriptor_away_does_not_make_it_deaf(closes: bool) -> None:
    """The handlers hear then, and the descriptor is left to whoever has it; one that was closed is taken back."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with StopRequest() as stop:
        signal.set_wakeup_fd(-1 if closes else writer)
        send(signal.SIGTERM)
        assert until(lambda: stop) and stop.reason == "SIGTERM"
        ours = stop._ear._writer.fileno()  # type: ignore[union-attr]  # it is the main thread
        now = signal.set_wakeup_fd(-1)
        assert now == (ours if closes else writer)
        signal.set_wakeup_fd(now)
    assert signal.set_wakeup_fd(-1) == (-1 if closes else writer)
    os.close(reader)
    os.close(writer)


def test_without_a_thread_the_handlers_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no more threads, signals stop the run between two calls."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        stop = StopRequest().__enter__()
    try:
        send(signal.SIGTERM)
        assert until(lambda: stop) and stop.reason == "SIGTERM"
    finally:
        stop.__exit__(None, None, None)


def test_a_full_stderr_keeps_nobody_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pager that does not read on, behind a pipe that is full, delays neither stop nor end."""
    monkeypatch.undo()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)

    def work() -> None:
        os.dup2(writer, 2)
        with StopRequest() as stop:
            send(signal.SIGTERM)
            until(lambda: stop)
            send(signal.SIGTERM)
            time.sleep(20)

    try:
        assert in_child(work) == 128 + signal.SIGTERM
    finally:
        os.close(reader)
        os.close(writer)
