"""Slow, obviously right oracles of `paceline.dflash` and of block attention: plain loops over plain Python numbers.

Rows are lists: `ids`, `mask` (booleans), `docs` (document ids, negative on padding). Anchors are lists of positions
with None for an empty slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.records import TokenBatch

Row = tuple[list[int], list[bool], list[int]]


def lists(tokens: TokenBatch) -> Row:
    """(ids, loss mask, document ids) of a packed row as plain lists."""
    return tokens.input_ids.tolist(), tokens.loss_mask.tolist(), tokens.document_ids.tolist()


def eligible_positions(mask: list[bool], docs: list[int]) -> list[int]:
    """Supervised positions whose next position is supervised too and in the same real document."""
    found = []
    for p in range(len(mask)):
        if docs[p] < 0 or not mask[p]:
            continue
        if p + 1 < len(mask) and docs[p + 1] == docs[p] and mask[p + 1]:
            found.append(p)
    return found


def is_allowed_sample(positions: list[int], keep: list[bool], mask: list[bool], docs: list[int], num: int) -> bool:
    """Whether slots are a possible draw: as many as there are, distinct, ascending, eligible, empty ones last and 0."""
    eligible = eligible_positions(mask, docs)
    kept = min(num, len(eligible))
    if len(positions) != num or keep != [True] * kept + [False] * (num - kept):
        return False
    drawn = positions[:kept]
    return drawn == sorted(set(drawn)) and set(drawn) <= set(eligible) and positions[kept:] == [0] * (num - kept)


def document_start(position: int, docs: list[int]) -> int:
    """First position of the document that `position` is in."""
    while position > 0 and docs[position - 1] == docs[position]:
        position -= 1
    return position


def is_one_of_each_stratum(positions: list[int], mask: list[bool], docs: list[int], num: int) -> bool:
    """Whether the i-th shallowest anchor lies in the i-th of `num` equal parts of the eligible positions by depth.

    A position that a border runs through belongs to both parts.
    """
    eligible = eligible_positions(mask, docs)
    by_depth = sorted(eligible, key=lambda p: (p - document_start(p, docs), p))
    ranks = sorted(by_depth.index(p) for p in positions)
    size = len(eligible) / num
    return all(i * size - 1 + 1e-9 < rank < (i + 1) * size - 1e-9 for i, rank in enumerate(ranks))


def noise_blocks(ids: list[int], anchors: list[int | None], block_size: int, mask_token_id: int) -> list[list[int]]:
    """The anchor's token and then mask tokens; an empty slot is all mask."""
    blocks = []
    for anchor in anchors:
        first = mask_token_id if anchor is None else ids[anchor]
        blocks.append([first] + [mask_token_id for _ in range(block_size - 1)])
    return blocks


def block_positions(anchors: list[int | None], docs: list[int], block_size: int) -> list[list[int] | None]:
    """Positions of the slots counted from the document's start; None for an empty slot."""
    found: list[list[int] | None] = []
    for anchor in anchors:
        if anchor is None:
            found.append(None)
        else:
            found.append([anchor - document_start(anchor, docs) + k for k in range(block_size)])
    return found


def block_labels(
    row: Row, anchors: list[int | None], block_size: int, label_shift: int = 0
) -> tuple[list[list[int]], list[list[bool]]]:
    """Token that each predicting slot has to give, and whether it counts."""
    ids, mask, docs = row
    labels, valid = [], []
    for anchor in anchors:
        label_row, valid_row = [], []
        for k in range(block_size):
            if k == 0 and label_shift == 0:
                continue  # slot 0 is the anchor and predicts nothing
            label, counts = 0, False
            if anchor is not None:
                position = anchor + k + label_shift
                if position < len(ids) and docs[position] == docs[anchor] and mask[position]:
                    label, counts = ids[position], True
            label_row.append(label)
            valid_row.append(counts)
        labels.append(label_row)
        valid.append(valid_row)
    return labels, valid


def decay_weights(num_predicted: int, gamma: float) -> list[float]:
    """exp(-(k - 1) / gamma) for the k-th token after the anchor."""
    return [math.exp(-(k - 1) / gamma) for k in range(1, num_predicted + 1)]


def sees_context(anchor: int | None, slot: int, key: int, docs: list[int], window: int | None) -> bool:
    """Whether a block's slot sees the context feature at row position `key`."""
    if anchor is None or docs[key] != docs[anchor] or key >= anchor:
        return False
    return window is None or (anchor + slot) - key < window


def sees_slot(slot: int, other: int, causal: bool, window: int | None) -> bool:
    """Whether a slot sees another slot of its own block."""
    if causal and other > slot:
        return False
    return window is None or abs(slot - other) < window


def dense_mask(
    anchors: list[int | None], docs: list[int], block_size: int, causal: bool, window: int | None
) -> list[list[bool]]:
    """Rows are (block, slot), columns the context positions and then (block, slot)."""
    rows = []
    for b, anchor in enumerate(anchors):
        for slot in range(block_size):
            columns = [sees_context(anchor, slot, key, docs, window) for key in range(len(docs))]
            for other_block in range(len(anchors)):
                for other in range(block_size):
                    columns.append(other_block == b and sees_slot(slot, other, causal, window))
            rows.append(columns)
    return rows


def leading_hits(hits: list[list[bool]]) -> list[int]:
    """Hits before the first miss of each block."""
    counts = []
    for block in hits:
        count = 0
        for hit in block:
            if not hit:
                break
            count += 1
        counts.append(count)
    return counts


def decode(
    answer: list[int], draft: Callable[[int], list[int]]
) -> tuple[list[int], list[tuple[int, int]], dict[int, list[int]]]:
    """The verification loop token by token, for a target that says `answer` greedily.

    Args:
        answer: Its tokens; the first comes from the prefill.
        draft: Drafted tokens of the block anchored at an answer position.
    Returns: the tokens written; (drafts accepted, tokens committed) of every target forward; and for every draft slot
        that was looked at: 1 where it was accepted, 0 where not.
    """
    written, rounds, looked = [answer[0]], [], {}  # type: ignore[var-annotated]
    while len(written) < len(answer):
        drafted = draft(len(written) - 1)
        accepted, before = 0, len(written)
        for slot, token in enumerate(drafted):
            if len(written) == len(answer):
                break  # the answer is over: nothing is left to compare with
            right = token == answer[len(written)]
            looked.setdefault(slot, []).append(int(right))
            if not right:
                break
            written.append(token)
            accepted += 1
        if len(written) < len(answer):
            written.append(answer[len(written)])  # the target's own token
        rounds.append((accepted, len(written) - before))
    return written, rounds, looked


def softmax(scores: list[float]) -> list[float]:
    """Softmax of a list; all zeros where every score is -inf."""
    top = max(scores)
    if top == -math.inf:
        return [0.0] * len(scores)
    exps = [math.exp(s - top) for s in scores]
    return [e / math.fsum(exps) for e in exps]


def attention(
    query: list[list[list[float]]],
    key: list[list[list[float]]],
    value: list[list[list[float]]],
    mask: list[list[bool]],
) -> list[list[list[float]]]:
    """Softmax attention: query [Q][N][H], key and value [T][M][H], mask [Q][T]; head n reads key head n // (N / M)."""
    num_heads, num_kv, size = len(query[0]), len(key[0]), len(query[0][0])
    out = []
    for q, visible in zip(query, mask, strict=True):
        heads = []
        for n in range(num_heads):
            m = n // (num_heads // num_kv)
            scores = [
                sum(q[n][h] * key[t][m][h] for h in range(size)) / math.sqrt(size) if visible[t] else -math.inf
                for t in range(len(key))
            ]
            weights = softmax(scores)
            heads.append([math.fsum(w * v[m][h] for w, v in zip(weights, value, strict=True)) for h in range(size)])
        out.append(heads)
    return out


def weighted_loss(
    hidden: list[list[float]],
    weight: list[list[float]],
    labels: list[int],
    weights: list[float],
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[float, list[bool]]:
    """Sum of weight * negative log-likelihood, and whether no logit is above the label's."""
    total, hits = 0.0, []
    for x, label, w in zip(hidden, labels, weights, strict=True):
        logits = [sum(a * b for a, b in zip(x, row, strict=True)) * scale for row in weight]
        if softcap is not None:
            logits = [softcap * math.tanh(z / softcap) for z in logits]
        total += -w * math.log(softmax(logits)[label])
        hits.append(logits[label] >= max(logits))
    return total, hits


def dpace_weights(nll: list[list[float]], counts: list[list[bool]], floor: float) -> list[list[float]]:
    """D-PACE weight of every slot of every block; a slot that does not count weighs nothing and is passed over."""
    weights = []
    for losses, counting in zip(nll, counts, strict=True):
        row = []
        for j in range(len(losses)):
            total = 0.0
            for m in range(j, len(losses)):
                if counting[m]:
                    total += math.prod((1 - floor) * math.exp(-losses[i]) + floor for i in range(m + 1) if counting[i])
            row.append(total if counting[j] else 0.0)
        weights.append(row)
    return weights
