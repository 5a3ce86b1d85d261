"""A model on this machine as `regenerate` asks it: one thread decodes for all that wait."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from paceline.data.dialects import Rejection
from paceline.data.regenerate import Answer, AnswerSettings, prompt_ids
from paceline.errors import ModelError
from paceline.eval.generate import BatchGenerator, Request
from paceline.eval.static import obstacle
from paceline.eval.static_batch import StaticBatchGenerator
from paceline.kernels.linear_cross_entropy import Head

log = logging.getLogger(__name__)


def generator_for(model: Any, stop_ids: Collection[int], **options: Any) -> BatchGenerator | StaticBatchGenerator:
    """The fastest generator for a Transformers causal LM on its device; options as `BatchGenerator` takes them."""
    if model.device.type == "cuda":
        found = static_generator(model, stop_ids, **options)
        if isinstance(found, StaticBatchGenerator):
            return found
        log.warning("answering with Transformers' own forward, which is slower: %s", found)
    return BatchGenerator(model, stop_ids, **options)


def static_generator(model: Any, stop_ids: Collection[int], **options: Any) -> StaticBatchGenerator | str:
    """The generator with a forward of our own, or why the model cannot do with it, in one line."""
    head = Head(model.get_output_embeddings().weight.detach())
    if (reason := obstacle(model, head)) is not None:
        return reason
    own = StaticBatchGenerator(model, head, stop_ids, **options)
    try:
        return own.difference(model) or own
    except Exception as error:  # of a compiler, of a card that it does not know: answers can do without
        return f"its kernels do not run here, {type(error).__name__}: {' '.join(str(error).split())[:200]}"


class LocalTarget:
    """A model on this machine as `regenerate` asks it; one thread decodes for all that wait."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        stop_ids: Collection[int],
        settings: AnswerSettings,
        *,
        max_slots: int,
        max_tokens: int | None = None,
    ) -> None:
        """Start the thread. See `BatchGenerator`.

        Args:
            tokenizer: The model's, with the template to use.
        """
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._settings = settings
        self._context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
        self._generator = generator_for(
            model,
            stop_ids,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed,
            max_slots=max_slots,
            max_tokens=max_tokens,
        )
        self._arrived: queue.SimpleQueue[tuple[Request, Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._decode, name="generate", daemon=True)
        self._thread.start()

    @property
    def num_sampled(self) -> int:
        """Tokens so far, of answers under way as well."""
        return self._generator.num_sampled

    @property
    def can_refill(self) -> bool:
        """Whether waiting prompts take the places of finished answers; else batches run one after the other."""
        return self._generator.can_refill

    async def answer(self, key: str, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> Answer:
        """The next turn, as `Answerer` wants it. Raises: Rejection."""
        prompt = prompt_ids(self._tokenizer, messages, tools, self._settings.thinking)
        if not prompt:
            raise Rejection("empty prompt", "the template renders nothing")
        room = self._context - len(prompt)
        if room < 1:
            raise Rejection("prompt longer than the target's context", f"{len(prompt)} tokens, {self._context} at most")
        request = Request(prompt, min(self._settings.max_new_tokens, room), key)
        done: Future[None] = Future()
        self._arrived.put((request, done))
        await asyncio.wrap_future(done)
        ended = request.answer[-1] in self._stop_ids
        # Control tokens that were sampled before the end stay in the text, as they stay in the ids.
        text = self._tokenizer.decode(request.answer[:-1] if ended else request.answer, skip_special_tokens=False)
        message = {"role": "assistant", "content": text}
        answer = Answer(message, "stop" if ended else "length", len(request.answer), prompt, request.answer)
        answer.check_ids(len(self._tokenizer))
        return answer

    def close(self) -> None:
        """End the thread, after the step that it is in; answers under way are lost."""
        self._arrived.put(None)
        self._thread.join()

    def _decode(self) -> None:
        under_way: dict[int, Future[None]] = {}
        try:
            while True:
                while not self._generator.is_busy or not self._arrived.empty():
                    item = self._arrived.get()
                    if item is None:
                        return
                    request, done = item
                    under_way[id(request)] = done
                    self._generator.submit(request)
                for request in self._generator.step():
                    done = under_way.pop(id(request))
                    if done.set_running_or_notify_cancel():
                        done.set_result(None)
        except Exception as error:  # of the model: whoever waits is told
            if isinstance(error, torch.OutOfMemoryError):
                error = ModelError(
                    "the device ran out of memory while answering: choose fewer slots with --concurrency"
                )
            for done in under_way.values():
                if done.set_running_or_notify_cancel():
                    done.set_exception(error)
