"""The demo's last part: the trained drafter beside its target, choosing its block and decoding sets of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from paceline.eval.evaluate import Evaluation, PromptResult

Messages = list[dict[str, Any]]


class Decoding:
    """The trained drafter beside its target, decoding sets of prompts."""

    def __init__(
        self, target: str, run_dir: Path, verify_ms: dict[int, float], max_new_tokens: int, console: Console
    ) -> None:
        from paceline.eval.decode import CachedTarget
        from paceline.eval.evaluate import packed_copy
        from paceline.models.loading import load_tokenizer
        from paceline.train.checkpoint import load_drafter

        drafter = load_drafter(run_dir)
        self._tokenizer = load_tokenizer(target)
        self._target = CachedTarget.load(target, drafter.shape.target_layer_ids)
        self._drafter = packed_copy(drafter, self._target)
        self._verify_ms = verify_ms
        self._max_new_tokens = max_new_tokens
        self._console = console
        self._block_size = drafter.shape.block_size

    def choose_block(self, prompts: list[Messages]) -> dict[str, Any]:
        """Decode a few prompts to see how far blocks are accepted, then use as many slots as pay on this machine."""
        from paceline.dflash.acceptance import Acceptance
        from paceline.eval.calibrate import expected_speedups, time_drafting
        from paceline.eval.decode import speculative_decode

        trained = self._block_size
        acceptance, stop_ids = Acceptance(self._drafter.num_predicted), self._target.shape.eos_token_ids
        for prompt in self._encode(prompts):
            answer = speculative_decode(self._target, self._drafter, prompt, self._max_new_tokens, stop_ids)
            acceptance += answer.acceptance
        draft_ms = time_drafting(self._target, self._drafter, trained)
        expected = expected_speedups(acceptance.per_position, self._verify_ms, draft_ms)
        self._block_size = max(expected, key=lambda k: expected[k])
        self._console.print(
            "expected speedup by slots used: " + ", ".join(f"{k}: {speedup:.2f}x" for k, speedup in expected.items()),
            markup=False,
        )
        self._console.print(
            f"blocks of {self._block_size} of the {trained} slots trained: {len(prompts)} other prompts were accepted "
            f"{acceptance.length:.2f} tokens at a time with all of them",
            markup=False,
        )
        return {
            "draft_ms": round(draft_ms, 2),
            "trained_block_size": trained,
            "block_size": self._block_size,
            "expected_speedup_by_block": {str(k): round(speedup, 3) for k, speedup in expected.items()},
        }

    def evaluate(self, name: str, prompts: list[Messages]) -> Evaluation:
        """Decode a set three ways, telling how it goes."""
        from paceline.eval.evaluate import evaluate

        def show(result: PromptResult, so_far: Evaluation) -> None:
            if len(so_far.results) % 8 == 0 or len(so_far.results) == len(prompts):
                self._console.print(
                    f"{name} {len(so_far.results):>3} of {len(prompts)}: acceptance length "
                    f"{so_far.acceptance.length:.2f} (n-grams {so_far.ngram_acceptance.length:.2f}), "
                    f"{so_far.speedup:.2f}x, {'identical' if so_far.is_lossless else 'NOT identical'}",
                    markup=False,
                )

        return evaluate(
            self._target,
            self._drafter,
            self._encode(prompts),
            max_new_tokens=self._max_new_tokens,
            stop_ids=self._target.shape.eos_token_ids,
            block_size=self._block_size,
            on_prompt=show,
        )

    def record(self, evaluation: Evaluation) -> dict[str, Any]:
        """The figures of a set: answers that ended are counted, the others named; and what bounds the drafter."""
        ended = evaluation.ended()
        record = ended.as_dict() | {"not_ended": evaluation.num_not_ended, "loops": evaluation.num_loops}
        record["limits"] = self._limits([result.plain.tokens for result in ended.results])
        if not evaluation.is_lossless:  # a difference counts wherever it is
            record |= {"lossless": False, "mismatches": evaluation.num_mismatches, "ties": evaluation.num_ties}
        return record

    def _limits(self, answers: list[list[int]]) -> dict[str, float]:
        """How far a drafter could come that is right about every token it can draft at all."""
        import torch

        from paceline.dflash.acceptance import Acceptance, walk

        num_predicted = self._block_size - 1 + self._drafter.label_shift
        total, possible, tokens = Acceptance(num_predicted), 0, 0
        for answer in answers:
            can = self._drafter.can_draft(torch.tensor(answer)).tolist()[1:]
            possible, tokens = possible + sum(can), tokens + len(can)
            leading = [next((j for j, ok in enumerate(can[i:]) if not ok), len(can) - i) for i in range(len(can))]
            total += walk([min(hits, num_predicted) for hits in leading], num_predicted)
        return {"draftable_frac": possible / max(1, tokens), "acceptance_length": total.length}

    def samples(self, name: str, prompts: list[Messages], evaluation: Evaluation) -> list[dict[str, Any]]:
        """The typical and the hardest prompt of a set, by acceptance length, and every loop."""
        ranked = sorted(
            (result.speculative.acceptance.length, number)
            for number, result in enumerate(evaluation.results)
            if result.plain.stopped and result.speculative.acceptance.rounds
        )
        chosen = {"typical": ranked[len(ranked) // 2][1], "hardest": ranked[0][1]} if ranked else {}
        loops = {f"loop {i}": i for i, result in enumerate(evaluation.results) if result.is_loop}
        return [
            self._sample(f"{name}, {why}", prompts[number], evaluation.results[number])
            for why, number in (chosen | loops).items()
        ]

    def _sample(self, name: str, messages: Messages, result: PromptResult) -> dict[str, Any]:
        plain, drafted = result.plain, result.speculative
        pieces = _pieces(self._tokenizer, drafted.tokens)
        tokens = zip(pieces, drafted.origins(), strict=True)
        return {
            "set": name,
            "prompt": str(messages[-1]["content"]),
            "tokens": [{"text": text, "origin": origin} for text, origin in tokens],
            "plain_s": round(plain.seconds, 3),
            "ngram_s": round(result.ngram.seconds, 3) if result.ngram else None,
            "speculative_s": round(drafted.seconds, 3),
            "plain_times_s": plain.token_times_s(),
            "speculative_times_s": drafted.token_times_s(),
            "num_target_forwards": drafted.acceptance.rounds + 1,  # the prefill made the first token
            "num_tokens": len(drafted.tokens),
            "is_loop": result.is_loop,
        }

    def _encode(self, prompts: list[Messages]) -> list[list[int]]:
        from paceline.eval.evaluate import encode_prompts

        return encode_prompts(prompts, self._tokenizer)


def _pieces(tokenizer: Any, tokens: list[int]) -> list[str]:
    """The text that each token adds; of a character split over tokens, the last one shows it."""
    pieces, shown = [], ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            pieces.append("")
            continue
        pieces.append(text[len(shown) :])
        shown = text
    return pieces
