"""What Prometheus scrapes is read back with the format's own parser, and compared with the page."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from paceline.cli.train import run_training
from paceline.profiling import stages
from paceline.profiling.metrics_endpoint import octaves, serving_metrics
from paceline.profiling.page import CONTROL, Control, Page
from paceline.profiling.stats import ProfileStats, bucket_of
from tests.toy import Toy, Watch

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """The process's page, counting."""
    opened = stages.open_run(tmp_path / "profile")
    assert opened is not None
    opened.words[CONTROL] = Control(1, True).word
    yield opened
    stages.close_run(opened, tmp_path / "profile")


def fetch(port: int, accept: str = OPEN_METRICS) -> tuple[str, str]:
    """Content type and text."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def scrape(port: int) -> dict[str, Metric]:
    kind, text = fetch(port)
    assert kind.startswith("application/openmetrics-text") and text.endswith("# EOF\n")
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    """The one sample of this name with these labels."""
    found = [s for f in families.values() for s in f.samples if s.name == sample and labels.items() <= s.labels.items()]
    assert len(found) == 1, (sample, labels, found)
    return found[0].value


def ignore(text: str) -> None:
    """Show nothing."""


def run_in_thread(name: str, role: str, times: int) -> None:
    def work() -> None:
        with stages.as_role(role):
            for _ in range(times):
                with stages.FORWARD, stages.LAYERS:
                    pass

    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


def test_the_numbers_are_the_pages(page: Page) -> None:
    """Gauges, counters and stages of a scrape equal a snapshot, with times in seconds."""
    for number, name in enumerate(("step", "total_steps", "tokens", "batches", "queue", "queue_depth")):
        page.set_gauge(name, 10 + number)
    page.set_gauge("put_wait_ns", 1_500_000_000)
    page.set_gauge("get_wait_ns", 250_000_000)
    run_in_thread("target-0", "target-0", 7)
    run_in_thread("MainThread", "drafter-0", 3)
    with serving_metrics(page.snapshot, 0, ignore) as port:
        assert port is not None
        families, snapshot = scrape(port), page.snapshot()
    for number, name in enumerate(
        ("paceline_step", "paceline_total_steps", "paceline_tokens_total", "paceline_batches_total",
         "paceline_queue_batches", "paceline_queue_depth_batches")
    ):  # fmt: skip
        assert value(families, name) == 10 + number
    assert value(families, "paceline_put_wait_seconds_total") == 1.5
    assert value(families, "paceline_get_wait_seconds_total") == 0.25
    assert value(families, "paceline_profiling_on") == 1
    assert value(families, "paceline_profiling_sampled_one_in") == 1
    seen = 0
    for thread in snapshot.threads:
        for name, stats in thread.stages.items():
            labels = {"role": thread.role, "thread": thread.thread, "stage": name}
            if stats.count:
                seen += 1
                assert value(families, "paceline_stage_seconds_count", **labels) == stats.count
                assert value(families, "paceline_stage_seconds_sum", **labels) == stats.total_ns / 1e9
                assert value(families, "paceline_stage_self_seconds_total", **labels) == stats.self_ns / 1e9
                assert value(families, "paceline_stage_errors_total", **labels) == 0
                assert value(families, "paceline_stage_seconds_bucket", le="+Inf", **labels) == stats.count
    assert seen == 4


def test_every_family_has_its_name_unit_and_help(page: Page) -> None:
    """Names begin with ours and end with their unit; each says what it is."""
    run_in_thread("target-0", "target-0", 1)
    with serving_metrics(page.snapshot, 0, ignore) as port:
        assert port is not None
        families = scrape(port)
    assert len(families) == 14
    for name, family in families.items():
        assert name.startswith("paceline_") and family.documentation.endswith(".")
        assert not family.unit or name.endswith("_" + family.unit)
        assert family.unit == ("seconds" if "seconds" in name else "")
    kinds = {family.type for family in families.values()}
    assert kinds == {"gauge", "counter", "histogram"}


def test_a_failed_run_is_counted(page: Page) -> None:
    """A stage that ended by an exception is an error of that stage."""
    with pytest.raises(KeyError), stages.as_role("drafter-0"), stages.LOG:
        raise KeyError
    with serving_metrics(page.snapshot, 0, ignore) as port:
        assert port is not None
        assert value(scrape(port), "paceline_stage_errors_total", stage="log", role="drafter-0") == 1


def test_a_thread_that_hangs_shows(page: Page) -> None:
    """The stage that a thread is in has its own gauge, which grows from scrape to scrape and goes with the stage."""
    with serving_metrics(page.snapshot, 0, ignore) as port:
        assert port is not None
        with stages.as_role("drafter-0"), stages.GRAD_NORM_ITEM:
            first = value(scrape(port), "paceline_in_stage_seconds", stage="grad_norm_item", role="drafter-0")
            second = value(scrape(port), "paceline_in_stage_seconds", stage="grad_norm_item", role="drafter-0")
        assert 0 < first < second < 60
        assert scrape(port)["paceline_in_stage_seconds"].samples == []


def test_threads_of_one_name_are_one_series(page: Page) -> None:
    """Two living threads that share role and name would be one sample twice, which Prometheus refuses."""
    ready, ends = threading.Barrier(3), threading.Event()

    def work() -> None:
        with stages.as_role("drafter-0"):
            with stages.BACKWARD:
                pass
            with stages.LAYERS:
                ready.wait(10)
                ends.wait(10)

    threads = [threading.Thread(target=work, name="pt_autograd_0") for _ in range(2)]
    for thread in threads:
        thread.start()
    ready.wait(10)
    with serving_metrics(page.snapshot, 0, ignore) as port:
        assert port is not None
        families = scrape(port)
    ends.set()
    for thread in threads:
        thread.join()
    assert len([thread for thread in page.snapshot().threads if thread.thread == "pt_autograd_0"]) == 2
    assert value(families, "paceline_stage_seconds_count", thread="pt_autograd_0", stage="backward") == 2
    assert value(families, "paceline_in_stage_seconds", thread="pt_autograd_0", stage="layers") > 0


def test_a_name_with_odd_characters_survives(page: Page) -> None:
    """Quotes, backslashes and line ends in a thread's name break no line of the format."""
    run_in_thread('a "b" \\ c', "target-0", 1)
    with serving_metrics(page.snapshot, 0, ignore) as port:
        assert port is not None
        assert value(scrape(port), "paceline_stage_seconds_count", thread='a "b" \\ c', stage="layers") == 1


@given(st.lists(st.integers(0, 2**40), max_size=30))
def test_octaves_hold_every_run_once(durations: list[int]) -> None:
    """The runs up to each edge are those that were shorter, and the last bucket has them all."""
    stats = ProfileStats()
    for ns in durations:
        stats.add(ns)
    buckets = octaves(stats)
    assert len(buckets) == 27 and buckets[-1] == ("+Inf", len(durations))
    for edge, runs in buckets[:-1]:
        assert runs == sum(ns < round(float(edge) * 1e9) for ns in durations)
    assert [float(edge) for edge, _ in buckets] == sorted(float(edge) for edge, _ in buckets)
    assert bucket_of(2**37) == len(stats.histogram) - 1


def test_only_this_machine_is_answered(page: Page) -> None:
    """It listens at 127.0.0.1 and at no other address, not even of the loopback device."""
    with serving_metrics(page.snapshot, 0, ignore) as port:
        assert port is not None
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)


def test_the_address_is_shown_once(page: Page) -> None:
    """Port 0 takes a free port, and the text has it; scrapes say nothing more."""
    shown: list[str] = []
    with serving_metrics(page.snapshot, 0, shown.append) as port:
        assert port is not None and port > 0
        scrape(port)
    assert shown == [f"metrics for Prometheus at http://127.0.0.1:{port}/metrics"]


def test_it_ends_with_the_run(page: Page) -> None:
    """Afterwards nobody listens and no thread is left, and the same port can be taken at once."""
    with serving_metrics(page.snapshot, 0, ignore) as port:
        assert port is not None
        scrape(port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert "metrics" not in {thread.name for thread in threading.enumerate()}
    with serving_metrics(page.snapshot, port, ignore) as again:
        assert again == port


def test_the_plain_format_is_served_too(page: Page) -> None:
    """A client that does not know OpenMetrics gets the older text."""
    run_in_thread("target-0", "target-0", 2)
    with serving_metrics(page.snapshot, 0, ignore) as port:
        assert port is not None
        kind, text = fetch(port, accept="*/*")
    assert kind.startswith("text/plain")
    samples = {sample.name for family in plain_families(text) for sample in family.samples}
    assert {"paceline_step", "paceline_stage_seconds_bucket", "paceline_tokens_total"} <= samples


def test_a_taken_port_is_a_warning(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    """The message has the port; what is entered goes on without metrics, and who has the port keeps it."""
    with serving_metrics(page.snapshot, 0, ignore) as port:
        assert port is not None
        with caplog.at_level(logging.WARNING), serving_metrics(page.snapshot, port, pytest.fail) as second:
            assert second is None
        scrape(port)
    assert [record.getMessage() for record in caplog.records] == [
        f"metrics are not served: port {port} of 127.0.0.1: Address already in use"
    ]


def test_a_missing_package_is_a_warning(
    page: Page, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names the extra to install."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with caplog.at_level(logging.WARNING), serving_metrics(page.snapshot, 0, pytest.fail) as port:
        assert port is None
    [record] = caplog.records
    assert "pip install 'paceline[metrics]'" in record.getMessage()


def test_where_no_thread_is_to_be_had_there_is_one_warning(
    page: Page, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on without metrics, and the port is free again."""

    def refuse_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        with serving_metrics(page.snapshot, number, pytest.fail) as port:
            assert port is None
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", number), timeout=5)
    assert [record.getMessage() for record in caplog.records] == ["metrics are not served: can't start new thread"]


def test_a_forked_child_that_ends_leaves_the_endpoint_alone(page: Page) -> None:
    """It waits for no thread, as it has none, and the process that serves goes on."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(serving_metrics(page.snapshot, 0, ignore))
        assert port is not None
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(20)  # ends it, should it wait
                stack.close()
                os._exit(0)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        scrape(port)


def test_without_a_port_nothing_happens(page: Page) -> None:
    """None is the default: no thread, no socket."""
    before = threading.active_count()
    with serving_metrics(page.snapshot, None, pytest.fail) as port:
        assert port is None and threading.active_count() == before


def test_a_client_that_misbehaves_hurts_nobody(
    page: Page, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Garbage, and a client that leaves at once, print nothing; the next scrape is answered."""
    with serving_metrics(page.snapshot, 0, ignore) as port:
        assert port is not None
        for data in (b"", b"\x00\xff garbage\r\n\r\n", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # leave with a reset
                client.sendall(data)
        scrape(port)
    assert capfd.readouterr().err == "" and not caplog.records


def test_a_run_is_scraped_while_it_trains(toy: Toy, tmp_path: Path) -> None:
    """With `profiling.metrics_port` a training run answers with its own steps, queue and stages."""
    scraped: list[dict[str, Metric]] = []

    class Scraping(Watch):
        port = 0

        def show(self, text: str) -> None:
            if "metrics for Prometheus" in text:
                self.port = int(text.rpartition(":")[2].removesuffix("/metrics"))

        def step(self, line: dict[str, Any], total_steps: int) -> None:
            if line["step"] == 8:
                scraped.append(scrape(self.port))

    config = toy.config(tmp_path / "run", "profiling.metrics_port=0", "profiling.interval=100", "topology.layout=split")
    report = run_training(config, Scraping())
    [families] = scraped
    assert value(families, "paceline_total_steps") == report.total_steps
    assert value(families, "paceline_step") == 8
    assert 0 < value(families, "paceline_tokens_total") < report.tokens
    assert value(families, "paceline_stage_seconds_count", role="drafter-0", stage="optimizer") >= 7
    assert value(families, "paceline_stage_seconds_count", role="target-0", stage="model_forward") >= 7
