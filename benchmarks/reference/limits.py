"""What limits a drafter: how sure the target is of its own tokens, and where the drafter misses.

    python -m benchmarks.reference.limits --target MODEL --run DIR --data DIR --out FILE [--rows N] [--device auto]

Over the answers of held-out rows, teacher-forced like the estimate of training (`eval.validation`): every block is
drafted, with the context that decoding would have there. A token is sure or not by the entropy of the target's
distribution of it, given all tokens before it. The bins look at every slot that has a token to predict, whatever the
slots before it did; first misses and acceptance lengths are of the rounds that decoding would make.

The oracle asks what the measured hits would give if some misses had been hits: those at tokens below a threshold of
entropy (a drafter that never misses where the target is sure), or those at all others. Nothing is assumed of a drafter;
it is arithmetic on the measured hits. Written under ``limits`` into FILE, which keeps what else it has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.reference.measure import held_out_rows
from paceline import __version__
from paceline.cli.evaluate import load_any_drafter
from paceline.data.dataset import Dataset
from paceline.dflash.acceptance import Acceptance, leading_hits, walk
from paceline.dflash.anchors import eligible_positions, make_anchors
from paceline.dflash.blocks import block_labels, block_positions, make_noise_blocks
from paceline.kernels.attention import BlockLayout
from paceline.kernels.linear_cross_entropy import Head
from paceline.models.draft import DFlashDrafter
from paceline.models.target import Target
from paceline.records import TokenBatch

EDGES = (0.1, 0.5, 1.0, 2.0)
"""Entropies, in nats, between the bins; the first starts at 0 and the last has no end."""

CHUNK = 256
"""Positions whose logits, or blocks whose slots, are computed together."""


@dataclass(frozen=True)
class Looked:
    """What was seen of the answers of one row, or of several put together.

    Attributes:
        entropy: float32 ``[T]`` nats, of the target at each supervised token.
        chosen: float32 ``[T]``; its probability of the token that is there.
        is_best: bool ``[T]``; whether no token is likelier.
        can_draft: bool ``[T]``; whether the drafter knows the token.
        hits, valid: bool ``[A, J]``; slots that are right, and those that count.
        slot_entropy: float32 ``[A, J]``; of the target at each slot's token; anything where a slot does not count.
        anchors: Blocks of each answer, one for every token but its last.
    """

    entropy: Tensor
    chosen: Tensor
    is_best: Tensor
    can_draft: Tensor
    hits: Tensor
    valid: Tensor
    slot_entropy: Tensor
    anchors: list[int]

    @classmethod
    def join(cls, parts: Sequence[Looked]) -> Looked:
        """Several rows as one."""
        names = [field.name for field in dataclasses.fields(cls) if field.name != "anchors"]
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return cls(**joined, anchors=[count for part in parts for count in part.anchors])


def target_view(head: Head, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy in nats, probability of each token, and whether it is the likeliest; ``[n]`` each, on the host.

    Args:
        head: The target's, in float32: bfloat16 would round the logits.
        hidden: ``[n, D]``; last hidden states of the tokens before these.
        tokens: int64 ``[n]`` on the host.
    """
    found = []
    for states, ids in zip(hidden.split(CHUNK), tokens.to(hidden.device).split(CHUNK), strict=True):
        logs = head.logits(states.to(head.weight.dtype)).log_softmax(-1)  # [n, V]
        entropy = torch.special.entr(logs.exp()).sum(-1)
        own = logs.gather(1, ids[:, None])[:, 0]
        found.append((entropy.cpu(), own.exp().cpu(), (own >= logs.max(-1).values).cpu()))
    entropies, probabilities, best = zip(*found, strict=True)
    return torch.cat(entropies), torch.cat(probabilities), torch.cat(best)


@torch.no_grad()
def look(target: Target, drafter: DFlashDrafter, row: int, ids: Tensor, mask: Tensor) -> Looked | None:
    """One row; None if nothing in it is to be predicted.

    Args:
        target: With its last hidden states.
        drafter: On the target's device.
        ids, mask: int64 and bool ``[n]`` on the host.
    """
    mask = mask.bool().clone()
    mask[0] = False  # nothing predicts a row's first token
    document = torch.zeros_like(ids)
    positions = eligible_positions(mask, document).nonzero().flatten()
    if not len(positions):
        return None
    shape, device, dtype = drafter.shape, target.device, drafter.fc.weight.dtype
    features = target.features(TokenBatch.pack(0, [(row, ids, mask)], len(ids)))
    assert features.last_hidden is not None
    supervised = mask.nonzero().flatten()
    entropy, chosen, is_best = target_view(
        target.head.to(torch.float32), features.last_hidden[(supervised - 1).to(device)], ids[supervised]
    )
    at = torch.zeros(len(ids))
    at[supervised] = entropy
    head = drafter.own_head(target.head.to(dtype))
    context_kv = drafter.context_kv(features.context_feature.to(dtype), torch.arange(len(ids), device=device))
    hits, valid, slots = [], [], []
    for chunk in positions.split(CHUNK):
        anchors = make_anchors(chunk)
        noise_ids = make_noise_blocks(ids, anchors, shape.block_size, shape.mask_token_id)  # [A, K]
        slot_positions = block_positions(anchors, torch.arange(len(ids)), shape.block_size)  # [A, K]
        layout = BlockLayout.of_row(anchors, (0, len(ids)), shape.block_size, len(ids))
        noise = target.embed(noise_ids.to(device)).to(dtype)  # [A, K, D]
        hidden = drafter(noise, slot_positions.to(device), context_kv, layout)  # [A, J, D]
        labels, counts = block_labels(ids, mask, document, anchors, shape.block_size, drafter.label_shift)
        counts = counts.cumprod(1).bool()  # what follows a gap belongs to another answer
        hits.append(drafter.hits(hidden, head, labels, counts, noise_ids[:, 0]))
        valid.append(counts)
        slots.append(at[(chunk[:, None] + torch.arange(1, counts.shape[1] + 1)).clamp(max=len(ids) - 1)])
    edges = torch.diff(mask.int(), prepend=torch.zeros(1).int(), append=torch.zeros(1).int()).nonzero().flatten()
    return Looked(
        entropy, chosen, is_best, drafter.can_draft(ids[supervised]),
        torch.cat(hits), torch.cat(valid), torch.cat(slots),
        (edges[1::2] - edges[::2] - 1).tolist(),
    )  # fmt: skip


def acceptance(hits: Tensor, anchors: Sequence[int]) -> Acceptance:
    """What decoding the answers would accept, bool ``[A, J]`` hits given, those of each answer in order."""
    total = Acceptance(hits.shape[1])
    for leading in leading_hits(hits).split(list(anchors)):
        total += walk(leading.tolist(), hits.shape[1])
    return total


def first_misses(hits: Tensor, valid: Tensor, anchors: Sequence[int]) -> Tensor:
    """Where the rounds of decoding end because of a miss: int64 ``[n, 2]``, block and slot.

    Rounds that end with their answer, or with all slots accepted, have none.
    """
    found, start = [], 0
    for count in anchors:
        block = start
        while block < start + count:
            num_accepted = int(leading_hits(hits[block : block + 1]))
            if num_accepted < hits.shape[1] and valid[block, num_accepted]:
                found.append((block, num_accepted))
            block += num_accepted + 1
        start += count
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2)


def by_entropy(looked: Looked) -> list[dict[str, Any]]:
    """Tokens, hits of each slot, and first misses of rounds, in bins of the target's entropy at the token.

    ``accuracy`` and ``slots`` have J entries; an accuracy of no slot is None. Shares are of all tokens and misses.
    """
    edges = torch.tensor(EDGES)
    bin_of_slot = torch.bucketize(looked.slot_entropy, edges, right=True)
    bin_of_token = torch.bucketize(looked.entropy, edges, right=True)
    missed = first_misses(looked.hits, looked.valid, looked.anchors)
    bin_of_miss = bin_of_slot[missed[:, 0], missed[:, 1]]
    bins = []
    for i, (low, high) in enumerate(zip((0.0, *EDGES), (*EDGES, None), strict=True)):
        inside = (bin_of_slot == i) & looked.valid
        slots, hits = inside.sum(0).tolist(), (inside & looked.hits).sum(0).tolist()
        bins.append({
            "from_nats": low,
            "to_nats": high,
            "tokens_frac": share(bin_of_token == i),
            "slots": slots,
            "accuracy": [round(h / n, 4) if n else None for h, n in zip(hits, slots, strict=True)],
            "first_misses": int((bin_of_miss == i).sum()),
            "first_misses_frac": share(bin_of_miss == i),
        })  # fmt: skip
    return bins


def oracle(looked: Looked) -> list[dict[str, float | None]]:
    """Acceptance lengths if the misses at tokens below, or not below, a threshold of entropy had been hits."""
    found = []
    for threshold in EDGES:
        below = looked.slot_entropy < threshold
        found.append({
            "threshold_nats": threshold,
            "tokens_below_frac": share(looked.entropy < threshold),
            "acceptance_length_misses_below_repaired":
                round(acceptance((looked.hits | below) & looked.valid, looked.anchors).length, 4),
            "acceptance_length_other_misses_repaired":
                round(acceptance((looked.hits | ~below) & looked.valid, looked.anchors).length, 4),
        })  # fmt: skip
    return found


def share(which: Tensor) -> float | None:
    """Share of True; None of nothing."""
    return round(float(which.double().mean()), 4) if which.numel() else None


def summary(looked: Looked) -> dict[str, Any]:
    """All of it as numbers; entropies in nats."""
    whole = acceptance(looked.hits, looked.anchors)
    return {
        "answers": len(looked.anchors),
        "tokens": len(looked.entropy),
        "blocks": len(looked.hits),
        "rounds": whole.rounds,
        "block_predicts": looked.hits.shape[1],
        "target_entropy_nats": {
            "mean": round(float(looked.entropy.mean()), 4),
            "above_frac": {str(edge): share(looked.entropy > edge) for edge in EDGES},
        },
        "target_probability_of_token": round(float(looked.chosen.mean()), 4),
        "target_likeliest_frac": share(looked.is_best),
        "can_draft_frac": share(looked.can_draft),
        "acceptance_length": round(whole.length, 4),
        "acceptance_length_all_hit": round(acceptance(looked.valid, looked.anchors).length, 4),
        "by_entropy": by_entropy(looked),
        "oracle": oracle(looked),
    }


def main() -> None:
    """Look at the rows, and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--run", type=Path, required=True, help="run folder, checkpoint, or exported drafter")
    parser.add_argument("--data", type=Path, required=True, help="the data set of the run, or another")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fresh", action="store_true", help="--data was made after the run: all of it is held out")
    parser.add_argument("--rows", type=int, help="held-out rows; by default those that training measures")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = options.device.startswith("cuda")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    dataset = Dataset.open(options.data)
    rows = held_out_rows(dataset, None if options.fresh else options.run, options.rows)
    drafter = load_any_drafter(options.run).to(options.device, dtype).requires_grad_(False)
    target = Target.load(
        options.target, layer_ids=drafter.shape.target_layer_ids, dtype=dtype, device=options.device,
        packing="per_document", needs_last_hidden=True,
    )  # fmt: skip
    parts = [part for row in rows if (part := look(target, drafter, int(row), *dataset.row(int(row)))) is not None]
    if not parts:
        raise SystemExit(f"none of the {len(rows)} held-out rows of {options.data} has two supervised tokens in a row")
    record = {
        "command": "python -m benchmarks.reference.limits --target MODEL --run DIR --data DIR --out FILE"
        + " --fresh" * options.fresh
        + (f" --rows {options.rows}" if options.rows else "")
        + f" --device {options.device}",
        "device": torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads of a CPU",
        "versions": {"paceline": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
                     "python": platform.python_version()},
        "dtype": str(dtype).removeprefix("torch."),
        "rows": len(parts),
        **summary(Looked.join(parts)),
    }  # fmt: skip
    result = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {}
    options.out.write_text(json.dumps(result | {"limits": record}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
