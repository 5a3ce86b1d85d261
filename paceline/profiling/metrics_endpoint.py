"""The page's numbers for Prometheus, in the OpenMetrics format, on the loopback device alone.

Nothing is gathered between scrapes: each takes a snapshot of the page. Counts begin at zero with the process, and those
of stages grow only while profiling is on (`paceline_profiling_on`).
"""

from __future__ import annotations

import contextlib
import http.server
import logging
import os
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any

from paceline.profiling import stages
from paceline.profiling.page import Snapshot
from paceline.profiling.stats import NUM_BUCKETS, ProfileStats, merged

log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
"""Whoever wants the numbers elsewhere forwards the port: they have no password."""

EXTRA = "metrics"
REQUEST_S = 10.0
"""Seconds that a client has for its request."""

_GAUGES = (
    ("step", "paceline_step", "Optimizer steps done."),
    ("total_steps", "paceline_total_steps", "Optimizer steps planned."),
    ("queue", "paceline_queue_batches", "Batches that wait between targets and drafter."),
    ("queue_depth", "paceline_queue_depth_batches", "Batches that may wait there."),
)
_COUNTERS = (
    ("tokens", "paceline_tokens", "Document tokens trained on."),
    ("batches", "paceline_batches", "Micro-batches trained on."),
)
_WAITS = (
    ("put_wait_ns", "paceline_put_wait", "Time that targets were blocked by a full queue, summed over targets."),
    ("get_wait_ns", "paceline_get_wait", "Time that the drafter was blocked by an empty queue."),
)
_LABELS = ("role", "thread", "stage")
_OCTAVE = 8
_FIRST_EDGE_BITS = 11
"""The first octave ends at 2**11 ns."""


@contextlib.contextmanager
def serving_metrics(
    snapshot: Callable[[], Snapshot], port: int | None, show: Callable[[str], None]
) -> Iterator[int | None]:
    """Serve while entered; without the package, the port or a thread, warn once and go on.

    Args:
        port: 0: a free one; None: serve nothing.
        show: Prints the address, once.
    Returns: the port; None where nothing is served.
    """
    server = None
    if port is not None:
        try:
            server = _Server(port, PageCollector(snapshot))
            server.start()
        except ImportError as error:
            log.warning("metrics are not served: %s; pip install 'paceline[%s]'", error, EXTRA)
        except OSError as error:
            log.warning("metrics are not served: port %d of %s: %s", port, ADDRESS, error.strerror or error)
        except RuntimeError as error:
            server = None
            log.warning("metrics are not served: %s", error)
    if server is None:
        yield None
        return
    try:
        show(f"metrics for Prometheus at http://{ADDRESS}:{server.server_port}/metrics")
        yield server.server_port
    finally:
        server.stop()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, collector: Any) -> None:
        from prometheus_client import CollectorRegistry, MetricsHandler

        class Handler(MetricsHandler):
            timeout = REQUEST_S
            registry = CollectorRegistry()

        Handler.registry.register(collector)  # which asks it for nothing yet
        super().__init__((ADDRESS, port), Handler)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # the base class also asks the network for the host's name
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for metrics failed", exc_info=True)  # a client that went away is no news

    def start(self) -> None:
        """Start serving. Raises: RuntimeError, with the port closed, if the system gives no more threads."""
        try:
            self._thread.start()
        except RuntimeError:
            self.server_close()
            raise

    def stop(self) -> None:
        """Serve no more. In a forked child, which has no such thread to wait for: let go of the port."""
        if os.getpid() == self._pid:
            self.shutdown()
            self._thread.join(5.0)
        self.server_close()

    def _run(self) -> None:
        with stages.named_thread("metrics"):
            self.serve_forever(poll_interval=0.1)


class PageCollector:
    """What prometheus_client asks at every scrape.

    Args:
        snapshot: Takes one of the page.
    """

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        """Families of metrics, with the samples of this moment."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        page = self._snapshot()
        for gauge, name, text in _GAUGES:
            yield GaugeMetricFamily(name, text, page.gauges[gauge])
        for gauge, name, text in _COUNTERS:
            yield CounterMetricFamily(name, text, page.gauges[gauge])
        for gauge, name, text in _WAITS:
            yield CounterMetricFamily(name, text, page.gauges[gauge] / 1e9, unit="seconds")
        yield GaugeMetricFamily("paceline_profiling_on", "Whether stages are counted.", int(page.control.is_on))
        yield GaugeMetricFamily(
            "paceline_profiling_sampled_one_in", "One batch in so many is counted.", max(1, page.sample_every)
        )
        yield from _stage_families(page)


def _stage_families(page: Snapshot) -> Iterator[Any]:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    runs = HistogramMetricFamily(
        "paceline_stage",
        "Time of the runs of a stage, the stages inside it included; by octaves.",
        labels=_LABELS,
        unit="seconds",
    )
    own = CounterMetricFamily(
        "paceline_stage_self", "Time in a stage and in none inside it.", labels=_LABELS, unit="seconds"
    )
    errors = CounterMetricFamily("paceline_stage_errors", "Runs of a stage that ended by an exception.", labels=_LABELS)
    inside = GaugeMetricFamily(
        "paceline_in_stage",
        "How long a thread has been in the stage that it is in; grows without end where one hangs.",
        labels=_LABELS,
        unit="seconds",
    )
    for labels, stats in _by_label(page).items():
        runs.add_metric(labels, octaves(stats), stats.total_ns / 1e9)
        own.add_metric(labels, stats.self_ns / 1e9)
        errors.add_metric(labels, stats.errors)
    for labels, since_ns in _open_stages(page).items():
        inside.add_metric(labels, max(0.0, (page.taken_ns - since_ns) / 1e9))
    yield from (runs, own, errors, inside)


def _by_label(page: Snapshot) -> dict[tuple[str, str, str], ProfileStats]:
    """Stages that ran, by role, thread and name; threads of one name in one role are one."""
    found: dict[tuple[str, str, str], list[ProfileStats]] = {}
    for thread in page.threads:
        for name, stats in thread.stages.items():
            if stats.count:
                found.setdefault((thread.role, thread.thread, name), []).append(stats)
    return {labels: merged(parts) for labels, parts in found.items()}


def _open_stages(page: Snapshot) -> dict[tuple[str, str, str], int]:
    """Since when threads are in the stage that they are in; of threads of one name, the longest."""
    found: dict[tuple[str, str, str], int] = {}
    for thread in page.threads:
        if thread.is_live and thread.inner is not None:
            labels = thread.role, thread.thread, thread.inner.stage
            found[labels] = min(found.get(labels, thread.inner.since_ns), thread.inner.since_ns)
    return found


def octaves(stats: ProfileStats) -> list[tuple[str, float]]:
    """Our buckets, eight of them together, as Prometheus wants them: upper edge in seconds, runs up to there."""
    buckets, runs = [], 0
    for first in range(0, NUM_BUCKETS, _OCTAVE):
        runs += sum(stats.histogram[first : first + _OCTAVE])
        edge = 2 ** (first // _OCTAVE + _FIRST_EDGE_BITS) / 1e9
        buckets.append((repr(edge) if first + _OCTAVE < NUM_BUCKETS else "+Inf", float(runs)))
    return buckets
