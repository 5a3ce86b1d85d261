"""A target that a vLLM server runs: features of packed rows from there.

Every document of a row is asked for alone, all at once; each answer is matched by its own request. A document whose
capture stays damaged is left out of its row, never padded or cut to fit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.data.dataset import Dataset
from paceline.errors import ConfigError, ModelError, ServerError
from paceline.models.kinds import needs_last_hidden
from paceline.models.served import DOCS, CaptureError, ClientClosed, HiddenStatesClient, ServerFacts, check_folder
from paceline.models.target import FeatureCache, Target
from paceline.pipeline.channel import ChannelClosed
from paceline.profiling import stages
from paceline.records import FeatureBatch, TokenBatch
from paceline.train.served_check import compare, probe_documents, reference, relative_errors

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

REQUESTS = 32
"""Requests in flight, of all rows together. An engine's forward takes some 8,192 tokens, 16 documents of 500: as many
again are there when it is done. What they hold is bounded by the rows that are leased, one a target thread."""

ASK_AGAIN = 2
"""Times that a damaged capture is asked for again."""

BACK_OFF_S = 5.0
"""Seconds before a server that was gone is asked again, doubled each time; `pipeline.max_retries` says how often."""

LONGEST_BACK_OFF_S = 60.0

LOOK_S = 0.2
"""Seconds between looks at whether a stop was asked for."""

FEW_LEFT_OUT, LEFT_OUT_SHARE = 8, 0.01
"""Documents that may be left out of a start: so many, and this share of those asked for besides."""

SAME_LIMIT = 0.05
"""Relative error up to which two captures of a document are by the same server: each has others in its forward."""


@dataclass(frozen=True)
class LeftOut:
    """A document that is not trained on.

    Attributes:
        batch, row: Micro-batch, and data set row.
        source: Where that comes from, ``FILE:LINE``.
        reason: Of `CaptureError`.
        wanted, delivered: Tokens.
    """

    batch: int
    row: int
    source: str
    reason: str
    wanted: int
    delivered: int


class ServedTarget:
    """Makes features by asking a server, once connected; several threads may ask at once.

    Args:
        config: Resolved.
        target: Embedding, head and final norm.
        read_batch: The row of batch n.
        source_of: Where a data set row comes from.
        event: Writes a line of ``events.jsonl``.
        should_stop: True-like once a stop was asked for.

    Attributes:
        facts: What the server says of itself.
        num_documents, num_asked_again: Captures that came, and requests beyond one for each.
        left_out: Documents that are not trained on, in the order in which that was known.
    """

    def __init__(
        self,
        config: RunConfig,
        target: Target,
        read_batch: Callable[[int], TokenBatch],
        *,
        source_of: Callable[[int], str] = str,
        event: Callable[..., None] = lambda kind, **content: None,
        should_stop: Callable[[], object] = lambda: None,
    ) -> None:
        assert config.target.server is not None and config.target.server_files is not None
        assert not isinstance(config.target.layer_ids, str)  # it is resolved
        folder = Path(config.target.server_files)
        if (note := check_folder(folder)) is not None:
            log.warning("target.server_files: %s", note)
        self._config, self._target = config, target
        self._has_last = needs_last_hidden(config)
        self._dtype = target.head.weight.dtype if self._has_last else getattr(torch, config.draft.dtype)
        self._layer_ids = config.target.layer_ids
        shape = target.shape
        layers = [i + 1 for i in self._layer_ids] + [shape.num_layers] * self._has_last
        self._client = HiddenStatesClient(config.target.server, folder, layers=layers, hidden_size=shape.hidden_size)
        self._width = len(layers) * shape.hidden_size
        self._read_batch, self._source_of = read_batch, source_of
        self._event, self._should_stop = event, should_stop
        self._pool = ThreadPoolExecutor(REQUESTS, thread_name_prefix="request")
        gib = config.pipeline.feature_cache_gib
        self._cache = FeatureCache(int(gib * 2**30)) if gib and target.device.type == "cpu" else None
        self._here = threading.local()
        self._lock = threading.Lock()
        self._known: tuple[list[int], Tensor] | None = None
        self.num_documents = self.num_asked_again = 0
        self.left_out: list[LeftOut] = []
        self.facts = ServerFacts("", None, None, None)

    def connect(self) -> None:
        """See who is there. Raises: ServerError, ConfigError; ChannelClosed when a stop was asked for."""
        self.facts = self._waited(self._client.connect)

    def close(self) -> None:
        """Break off all requests."""
        self._should_stop = lambda: True
        self._client.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def fingerprint(self) -> str:
        """SHA-256 of embedding and head here and of the model's name there: no more of it can be seen from here."""
        seen = ["served", self._target.head_fingerprint(), self.facts.model]
        return hashlib.sha256(json.dumps(seen).encode()).hexdigest()

    def counts(self) -> dict[str, Any]:
        """For ``report.json``."""
        with self._lock:
            return {
                "documents": self.num_documents,
                "asked_again": self.num_asked_again,
                "left_out": [dataclasses.asdict(each) for each in self.left_out],
            }

    def features(self, number: int) -> FeatureBatch:
        """Features of a batch; documents without a capture have no loss mask, and zeros.

        Raises: ServerError, ModelError, ConfigError; ChannelClosed when a stop was asked for.
        """
        with stages.READ_BATCH:
            tokens = self._read_batch(number)
        joined = torch.zeros(len(tokens.input_ids), self._width, dtype=self._dtype)
        loss_mask, spans = tokens.loss_mask, tokens.spans
        for place, made in self._ask([tokens.input_ids[start:end] for start, end in spans], tokens.rows):
            start, end = spans[place]
            if isinstance(made, CaptureError):
                loss_mask = loss_mask.clone() if loss_mask is tokens.loss_mask else loss_mask
                loss_mask[start:end] = False
                self._leave_out(number, tokens.rows[place], made)
                continue
            with stages.PACK_HIDDEN:
                joined[start:end] = made
        self._check_left_out()
        if loss_mask is not tokens.loss_mask:
            tokens = dataclasses.replace(tokens, loss_mask=loss_mask)
        joined = self._on_device(joined)
        size = len(self._layer_ids) * self._target.shape.hidden_size
        return FeatureBatch(tokens, joined[:, :size], joined[:, size:] if self._has_last else None)

    def document_features(self, input_ids: Tensor) -> Tensor:
        """Context features ``[n, L*D]`` of one document.

        Raises: As `features`; a capture that stays damaged is an error here.
        """
        for retry in range(self._config.pipeline.max_retries + 1):
            try:
                joined = self.document(input_ids)
                return self._on_device(joined[:, : len(self._layer_ids) * self._target.shape.hidden_size])
            except ServerError as error:
                if isinstance(error, CaptureError) or retry == self._config.pipeline.max_retries:
                    raise
                log.warning("%s; it is asked again (%d of %d)", error, retry + 1, self._config.pipeline.max_retries)
        raise AssertionError

    def document(self, input_ids: Tensor) -> Tensor:
        """Taps, and the last hidden state if it is wanted, of one document: ``[n, W]`` on the host.

        Raises: As `features`, and CaptureError.
        """
        ((_, made),) = self._ask([input_ids], [None])
        if isinstance(made, CaptureError):
            raise made
        return made

    # ------------------------------------------------------------------ requests

    def _ask(
        self, documents: Sequence[Tensor], rows: Sequence[int | None]
    ) -> Iterator[tuple[int, Tensor | CaptureError]]:
        """Captures of some documents with their places, as they come; one that stays damaged is its error."""
        self._check_stop()
        self._back_off()
        under_way: dict[Future[Tensor | CaptureError], int] = {}
        try:
            for place, (input_ids, row) in enumerate(zip(documents, rows, strict=True)):
                under_way[self._pool.submit(self._capture, input_ids, row)] = place
            while under_way:
                with stages.REMOTE_WAIT:
                    done = wait(under_way, LOOK_S, FIRST_COMPLETED).done
                    while not done:
                        self._check_stop()
                        done = wait(under_way, LOOK_S, FIRST_COMPLETED).done
                for future in done:
                    yield under_way.pop(future), future.result()
            self._here.failures = 0
        except ServerError:
            self._here.failures = getattr(self._here, "failures", 0) + 1
            raise
        except ClientClosed as error:
            raise ChannelClosed from error
        finally:
            for future in under_way:
                future.cancel()

    def _capture(self, input_ids: Tensor, row: int | None) -> Tensor | CaptureError:
        """In a thread of the pool."""
        if self._cache is not None and row is not None and (kept := self._cache.get(row)) is not None:
            return kept
        ids, seen = input_ids.tolist(), None
        for again in range(ASK_AGAIN + 1):
            try:
                states = self._client.capture(ids)
                break
            except CaptureError as error:
                seen = error
                with self._lock:
                    self.num_asked_again += again < ASK_AGAIN
        else:
            assert seen is not None
            return seen
        num_taps = len(self._layer_ids)
        made = states[:, :num_taps].flatten(1).to(self._dtype)
        if self._has_last:
            made = torch.cat([made, self._normed(states[:, num_taps])], dim=1)
        with self._lock:
            self.num_documents += 1
        if self._cache is not None and row is not None:
            self._cache.put(row, made)
        return made

    @torch.no_grad()
    def _normed(self, last: Tensor) -> Tensor:
        """The last hidden state as the head wants it: servers capture the stream before the final norm."""
        norm = self._target.final_norm
        assert norm is not None
        return norm(last.to(self._target.device, self._target.dtype)).to("cpu", self._dtype)

    def _on_device(self, joined: Tensor) -> Tensor:
        """Where the drafter wants them; a copy to a GPU is over before they are handed on."""
        device = self._target.device
        if device.type != "cuda":
            return joined
        with stages.H2D_SYNC:
            copied = joined.to(device)
            torch.cuda.current_stream(device).synchronize()
        return copied

    def _waited(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a call of the client gives, made in the pool: here a stop would not be seen before its end."""
        future = self._pool.submit(call, *args, **kwargs)
        try:
            while not wait([future], LOOK_S).done:
                self._check_stop()
            return future.result()
        except ClientClosed as error:
            raise ChannelClosed from error

    def _check_stop(self) -> None:
        if self._should_stop():
            raise ChannelClosed

    def _back_off(self) -> None:
        """After a failure of this thread's last request: wait, and see whether it is still the same server."""
        failures = getattr(self._here, "failures", 0)
        if not failures:
            return
        until = time.monotonic() + min(BACK_OFF_S * 2 ** (failures - 1), LONGEST_BACK_OFF_S)
        while (left := until - time.monotonic()) > 0:
            self._check_stop()
            time.sleep(min(LOOK_S, left))
        if self._known is None:
            return
        input_ids, before = self._known
        try:
            if self._waited(self._client.connect).model != self.facts.model:
                raise ModelError(f"{self._client.url} serves another model now than {self.facts.model}")
            now = self._waited(self._client.capture, input_ids)
        except ServerError:
            self._here.failures = failures + 1
            raise
        if not (moved := float(relative_errors(now.flatten(1), before.flatten(1)).mean())) <= SAME_LIMIT:
            raise ModelError(
                f"{self._client.url} came back with other hidden states than before, {moved:.2g} off: it has to "
                "be started with the same model, layers and precision"
            )

    # ------------------------------------------------------------------ what is left out

    def _leave_out(self, number: int, row: int, error: CaptureError) -> None:
        found = LeftOut(number, row, self._source_of(row), error.reason, error.wanted, error.delivered)
        with self._lock:
            if any((each.batch, each.row) == (number, row) for each in self.left_out):
                return  # the batch is made again
            self.left_out.append(found)
        log.warning(
            "the document of %s is left out of batch %d: %s (%d wanted, %d delivered)",
            found.source, number, error, error.wanted, error.delivered,
        )  # fmt: skip
        self._event("document left out", **dataclasses.asdict(found))

    def _check_left_out(self) -> None:
        """Raises: ModelError if it is not a few documents that come damaged."""
        with self._lock:
            lost, asked = len(self.left_out), self.num_documents + len(self.left_out)
        if lost > FEW_LEFT_OUT + LEFT_OUT_SHARE * asked:
            last = self.left_out[-1]
            raise ModelError(
                f"{lost} of {asked} documents came damaged from {self._client.url}, the last one {last.reason} "
                f"({last.wanted} tokens wanted, {last.delivered} delivered): look at the server's log, and at {DOCS}"
            )

    # ------------------------------------------------------------------ the start

    def check(self, dataset: Dataset, longest_row: int) -> dict[str, Any]:
        """Compare captures with what the target's folder gives here, as `target.server_check` says; for ``run.json``.

        Raises: ConfigError, ModelError if they are not the same; ServerError; ChannelClosed.
        """
        limit, url = self.facts.max_length, self._client.url
        if limit is not None and longest_row + 1 > limit:
            raise ConfigError(
                f"{url} takes {limit} tokens, and the longest row has {longest_row}, with the token that is asked for "
                f"{longest_row + 1}: serve with --max-model-len {longest_row + 1} or more"
            )
        documents = probe_documents(dataset)
        captures = [self._waited(self._client.capture, input_ids.tolist()) for input_ids in documents]
        self._known = documents[0].tolist(), captures[0]
        which = self._config.target.server_check
        record: dict[str, Any] = {"url": url, **dataclasses.asdict(self.facts), "checked": which}
        if which == "none":
            return record
        layer_ids = self._layer_ids if which == "all" else self._layer_ids[:1]
        has_last = self._has_last and which == "all"
        wanted = reference(self._config, documents, layer_ids, has_last)
        normed = [self._normed(capture[:, -1]) for capture in captures] if has_last else []
        errors = compare(captures, normed, wanted, who=f"{url} ({self.facts.model})", layers=self._client.layers)
        return record | {"lengths": [len(each) for each in documents], "errors": errors}


def note_of(record: dict[str, Any]) -> str:
    """The outcome of `ServedTarget.check` in one line."""
    who = f"features come from {record['model']} at {record['url']}"
    if record["version"]:
        who += f" (vLLM {record['version']})"
    if "errors" not in record:
        return f"{who}; not compared with the folder here, as target.server_check says"
    what = "its first tap is that" if record["checked"] == "first" else "they are those"
    layer, error = max(record["errors"].items(), key=lambda item: item[1])
    return (
        f"{who}; on {len(record['lengths'])} documents {what} of the folder here: the largest relative error of "
        f"a token is {error:.1e}, {layer}"
    )
