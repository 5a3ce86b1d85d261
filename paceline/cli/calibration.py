"""What the demo measures before it decides anything: threads, types, the cost of a verification, training rates."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.train import build_trainer, resolve_config
from paceline.config import RunConfig

if TYPE_CHECKING:
    from paceline.models.draft import DFlashDrafter
    from paceline.models.target import Target
    from paceline.plan.budget import Rates
    from paceline.plan.resolve import ResolvedRun
    from paceline.train.step import TrainStep

NUM_STEPS = 3
"""Training steps timed, after one that is not."""
NGRAM_VERIFIED, DRAFT_VERIFIED = 4, 6
"""Tokens of a usual round, for the estimate of how long decoding takes."""


@dataclass(frozen=True)
class Calibration:
    """What was measured and chosen; a part of ``demo.json``, and kept for a demo that is gone on with.

    Attributes:
        cores: Cores that the process may use.
        threads, threads_tried: Compute threads, and milliseconds of the same decoding with each number.
        dtype, dtypes_tried: Compute type of the drafter in training, and milliseconds of a step in each.
        kernel: What computes the target's forward in decoding, and why.
        prefill_ms: A prompt of 96 tokens.
        verify_ms: A target forward over 1 to 16 tokens, by number of tokens.
        draft_ms: Drafting a block.
        trained_block_size: Slots to train with, by the cost of verifying them.
        target_tok_per_s: Tokens made into features a second.
        step_s, tokens_per_step: An optimizer step.
        tokens_per_conversation, answer_tokens: Means over the conversations it was measured with.
        feature_bytes: Memory for the features of a token.
    """

    cores: int
    threads: int
    threads_tried: dict[int, float]
    dtype: str
    dtypes_tried: dict[str, float]
    kernel: str
    prefill_ms: float
    verify_ms: dict[int, float]
    draft_ms: float
    trained_block_size: int
    target_tok_per_s: float
    step_s: float
    tokens_per_step: float
    tokens_per_conversation: float
    answer_tokens: float
    feature_bytes: int

    def rates(self) -> Rates:
        """What the budget is made from."""
        from paceline.plan.budget import Rates

        return Rates(
            target_tok_per_s=self.target_tok_per_s,
            step_s=self.step_s,
            tokens_per_step=self.tokens_per_step,
            prefill_s=self.prefill_ms / 1e3,
            token_s=self.verify_ms[1] / 1e3,
            ngram_s=self.verify_ms[NGRAM_VERIFIED] / 1e3,
            draft_s=(self.verify_ms[DRAFT_VERIFIED] + self.draft_ms) / 1e3,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, rounded to what was measured."""
        rounded: dict[str, Any] = {
            key: round(value, 4) if isinstance(value, float) else value for key, value in vars(self).items()
        }
        for key in ("threads_tried", "dtypes_tried", "verify_ms"):
            rounded[key] = {str(name): round(value, 2) for name, value in rounded[key].items()}
        return rounded

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Calibration:
        """From what `as_dict` wrote."""
        numbered = {
            key: {int(name): value for name, value in content[key].items()} for key in ("threads_tried", "verify_ms")
        }
        return cls(**content | numbered)


def calibrate(config: RunConfig, lines: Sequence[str]) -> Calibration:
    """Measure this machine, in some ten seconds on two cores, with the run that is about to be made.

    Args:
        config: The run, but for data, threads, type and block size; its block size is the largest considered.
        lines: Some of its conversations, as JSONL.
    """
    from paceline.data.prepare import PrepareSettings, prepare

    with tempfile.TemporaryDirectory(prefix="paceline-calibration-") as folder:
        chats, data = Path(folder) / "chats.jsonl", Path(folder) / "data"
        chats.write_text("".join(lines), encoding="utf-8")
        prepare([chats], data, PrepareSettings(tokenizer=config.target.path, max_length=config.data.max_length))
        update = {"data": config.data.model_copy(update={"path": str(data), "epochs": 1, "validation": 0.0})}
        config = config.model_copy(update=update)
        decoding = _decoding(resolve_config(config)[0])
        draft = config.draft.model_copy(update={"block_size": decoding["trained_block_size"]})
        resolved, _ = resolve_config(config.model_copy(update={"draft": draft}))
        return Calibration(**decoding, **_training(resolved))


def _decoding(resolved: ResolvedRun) -> dict[str, Any]:
    """Threads first: everything after them is timed with the number chosen, which stays set."""
    import torch

    from paceline.eval import calibrate as measure
    from paceline.eval.decode import CachedTarget

    target = CachedTarget.load(resolved.config.target.path, resolved.draft.target_layer_ids)
    cores = measure.usable_cores()
    tried = measure.time_threads(measure.decoding_work(target), measure.thread_candidates(cores))
    threads = measure.choose_threads(tried)
    torch.set_num_threads(threads)
    verify_ms = measure.time_verification(target)
    draft_ms = measure.time_drafting(target, _random_drafter(resolved), resolved.draft.block_size)
    return {
        "cores": cores,
        "threads": threads,
        "threads_tried": tried,
        "kernel": target.kernel,
        "prefill_ms": measure.time_prefill(target),
        "verify_ms": verify_ms,
        "draft_ms": draft_ms,
        "trained_block_size": measure.choose_trained_block(verify_ms, draft_ms),
    }


def _random_drafter(resolved: ResolvedRun) -> DFlashDrafter:
    from paceline.models.kinds import drafter_class

    drafter = drafter_class(resolved.draft.kind)(resolved.draft)
    drafter.set_draft_vocab(resolved.draft_token_ids)
    return drafter.requires_grad_(False)


def _training(resolved: ResolvedRun) -> dict[str, Any]:
    """Features of some batches, and steps on them in either type; the threads are those that were chosen."""
    import torch

    from paceline.train.target import load_target

    threads = {"threads": torch.get_num_threads()}
    config = resolved.config.model_copy(update={"topology": resolved.config.topology.model_copy(update=threads)})
    resolved = dataclasses.replace(resolved, config=config)
    target, info = load_target(config), resolved.dataset.info
    batches = [resolved.batches.batch(i) for i in range(min(2, resolved.end_batch))]
    features, feature_s = [], []
    for tokens in batches:
        started = time.perf_counter()
        features.append(target.features(tokens))
        feature_s.append(time.perf_counter() - started)
    steps = {}
    for dtype in ("float32", "bfloat16"):
        trainer = _trainer(resolved, target, dtype)
        steps[dtype] = statistics.median([_step_seconds(trainer, features[-1]) for _ in range(NUM_STEPS + 1)][1:])
        del trainer
    gc.collect()
    dtype = min(steps, key=lambda name: steps[name])
    return {
        "dtype": dtype,
        "dtypes_tried": {name: 1e3 * seconds for name, seconds in steps.items()},
        "target_tok_per_s": batches[-1].num_tokens / feature_s[-1],
        "step_s": steps[dtype],
        "tokens_per_step": statistics.fmean(tokens.num_tokens for tokens in batches),
        "tokens_per_conversation": info.num_tokens / info.num_rows,
        "answer_tokens": info.num_supervised / info.num_rows,
        "feature_bytes": target.feature_size * (2 if dtype == "bfloat16" else 4),
    }


def _trainer(resolved: ResolvedRun, target: Target, dtype: str) -> TrainStep:
    draft = resolved.config.draft.model_copy(update={"dtype": dtype})
    config = resolved.config.model_copy(update={"draft": draft})
    return build_trainer(dataclasses.replace(resolved, config=config), target)


def _step_seconds(trainer: TrainStep, features: Any) -> float:
    started = time.perf_counter()
    trainer.accumulate(features)
    trainer.update(0).read()
    return time.perf_counter() - started
