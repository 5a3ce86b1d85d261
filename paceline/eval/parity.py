"""Whether what trains is what decodes: taps, states of a block layer by layer, and labels, by our own code.

    check_taps      features of `models.target.Target` against Transformers' `hidden_states[i + 1]` of the whole model
    check_blocks    a packed training row against the decode loop's own drafter, which gets its context bit by bit
    measure         drafted tokens against the target's own answers, also under settings that the folder does not have

The first two compare numbers. The last is a statistic, for what no number shows: labels that were shifted in training,
and settings that nothing recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.dflash.anchors import make_anchors
from paceline.dflash.blocks import block_positions, make_noise_blocks
from paceline.eval.decode import CachedTarget, ContextDrafter, plain_decode
from paceline.kernels.attention import BlockLayout
from paceline.models.draft import DFlashDrafter, DraftShape
from paceline.models.loading import load_text_model
from paceline.models.states import (
    FINAL,
    Blocks,
    States,
    anchors_at,
    compare_taps,
    recorded,
    row_of,
    tap_differences,
    training_states,
)
from paceline.models.target import Target

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest difference over the largest value. The two ways sum in another order: 4e-7 in float32 with tiny models."""

DOCUMENTS = (19, 11)
"""Lengths of the documents of the compared row."""
OFFSETS = ((2, 7, 15), (3, 8))
"""Anchors inside them; the last blocks run past their document's end."""

SHIFTS = (-1, 0, 1)
"""Places by which a drafted token may be off: 1 is a drafter that learnt the token after the right one."""

MIN_Z = 4.0
"""Standard errors by which another setting has to be better, and by a hundredth as well. Blocks of one answer overlap:
the true errors are larger."""


@dataclass(frozen=True)
class LayerParity:
    """A comparison of two ways to compute one thing.

    Attributes:
        name: ``tap i``, ``layer i`` or ``norm``.
        kind: What it is, or what the layer sees.
        difference: The largest one, over the largest value.
        tolerance: What rounding may make of it.
    """

    name: str
    kind: str
    difference: float
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """Whether the two agree; a value that is not finite agrees with nothing."""
        return self.difference <= self.tolerance


@dataclass(frozen=True)
class Measure:
    """How a drafter does under one setting, over the same blocks of the target's own answers.

    Attributes:
        name: The setting.
        score: Drafted tokens right in a row, a block, or for shifts the share of right tokens.
        as_is: The same under the folder's own setting.
        z: Standard errors of the mean difference, over blocks.
    """

    name: str
    score: float
    as_is: float
    z: float

    @property
    def is_better(self) -> bool:
        """Whether this setting fits the drafter better than the folder's own."""
        return self.z > MIN_Z and self.score > 1.01 * self.as_is


@dataclass(frozen=True)
class Measured:
    """All settings that were tried.

    Attributes:
        num_blocks: Blocks that were drafted.
        acceptance_length: Tokens committed per verification on these answers, under the folder's settings: one more
            than the drafted tokens that are right in a row, averaged over every place a block may start.
    """

    num_blocks: int
    acceptance_length: float
    settings: tuple[Measure, ...]


@dataclass(frozen=True)
class _Answer:
    """An answer with its prompt, and the features of both by layer."""

    ids: Tensor
    num_prompt: int
    features: dict[int, Tensor]


def tap_parity(target: Target) -> list[LayerParity]:
    """Taps of a loaded target against the states that Transformers lists in the same forward: cheap."""
    return _tap_rows(tap_differences(target), target.dtype)


def check_taps(
    target: str,
    layer_ids: Sequence[int],
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    num_tokens: int = 24,
) -> list[LayerParity]:
    """Taps of the cut target against the whole model's own list of states, on random tokens. Raises: ModelError."""
    part = Target.load(target, layer_ids=tuple(layer_ids), dtype=dtype, trust_remote_code=trust_remote_code)
    model = load_text_model(target, dtype, trust_remote_code=trust_remote_code)
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, part.shape.vocab_size, (num_tokens,), generator=generator)
    with torch.no_grad():
        states = model(input_ids=input_ids[None], output_hidden_states=True, use_cache=False).hidden_states
    return _tap_rows(compare_taps(part, input_ids, [state[0] for state in states]), dtype)


def _tap_rows(differences: dict[int, float], dtype: torch.dtype) -> list[LayerParity]:
    return [
        LayerParity(f"tap {i}", f"hidden_states[{i + 1}]", difference, TOLERANCE[dtype])
        for i, difference in differences.items()
    ]


def check_blocks(drafter: DFlashDrafter, decoder: CachedTarget, target: Target) -> list[LayerParity]:
    """States of a few blocks, layer by layer, as training computes them and as the decode loop does.

    Args:
        decoder: The whole target, tapped at the drafter's layers.
        target: The part that trains, tapped at these layers or more, in the same type.
    Raises: ModelError if drafter and target do not fit together.
    """
    shape, dtype = drafter.shape, decoder.dtype
    drafter = copy.deepcopy(drafter).to(decoder.device, dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, shape.vocab_size, (n,), generator=generator) for n in DOCUMENTS]
    starts = [sum(DOCUMENTS[:d]) for d in range(len(DOCUMENTS))]
    anchors = anchors_at([start + at for start, offsets in zip(starts, OFFSETS, strict=True) for at in offsets])
    row = row_of(documents)
    with torch.no_grad():
        noise_ids = make_noise_blocks(row.input_ids, anchors, shape.block_size, shape.mask_token_id)
        noise = target.embed(noise_ids.to(target.device)).to(dtype)
        taps = _by_layer(target, target.features(row).context_feature)
        features = torch.cat([taps[i] for i in shape.target_layer_ids], dim=-1)
        blocks = Blocks(row, anchors, noise, features.to(dtype))
    trained = training_states(drafter, blocks)
    decoded: list[States] = []
    for document, offsets in zip(documents, OFFSETS, strict=True):
        decoded += [_decoded_block(drafter, decoder, document, at) for at in offsets]
    rows = []
    for name, wanted in trained.items():
        found = torch.cat([states[name] for states in decoded])
        difference = float((found - wanted).abs().max() / wanted.abs().max())
        rows.append(LayerParity(name, kind_of(shape, name), difference, TOLERANCE[dtype]))
    return rows


@torch.inference_mode()
def _decoded_block(drafter: DFlashDrafter, decoder: CachedTarget, document: Tensor, anchor: int) -> States:
    """The block at a place of a document, whose context comes in two pieces, as after a verification."""
    tokens = document.tolist()
    side = ContextDrafter(drafter, decoder, len(tokens), drafter.shape.block_size)
    decoder.prefill(tokens[: anchor - 1])
    side.extend(tokens[: anchor - 1], decoder.features)
    decoder.verify(tokens[anchor - 1 : anchor + 1])
    decoder.keep(1)
    side.extend(tokens[anchor - 1 : anchor], decoder.features)
    with recorded(drafter) as states:
        side.propose(tokens[anchor])
    return states


def kind_of(shape: DraftShape, name: str) -> str:
    """What a layer sees, in words."""
    if name == FINAL:
        return "final norm"
    sees = shape.visibility(int(name.split()[-1]))
    window = "full" if sees.window is None else f"sliding {sees.window}"
    return f"{window}, {'causal' if sees.causal else 'bidirectional'} in the block"


def measure(
    drafter: DFlashDrafter, decoder: CachedTarget, target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Measured:
    """Draft at every place of the target's own answers: as the folder says, and as it might have been meant.

    Tried are taps one layer up and down, the other causal flag, and labels one place off. One of these that does better
    may be what the drafter was trained with; that none does proves little, as a tap off by one costs few per cent.

    Args:
        decoder: The whole target.
        target: The part that trains, tapped at the drafter's layers and, to try them, their neighbours.
    """
    drafter = copy.deepcopy(drafter).to(target.device, target.dtype).requires_grad_(False)
    answers = [_answer(decoder, target, prompt, max_new_tokens) for prompt in prompts]
    as_is = _hits(drafter, target, answers, drafter.shape)
    leading = _leading(as_is[0])
    if not len(leading):
        return Measured(0, 0.0, ())
    settings = []
    for name, shape in _other_settings(drafter.shape, target.layer_ids).items():
        settings.append(_measured(name, _leading(_hits(drafter, target, answers, shape)[0]), leading))
    shares = {shift: hits.float().mean(1) for shift, hits in as_is.items()}
    for shift in SHIFTS:
        if shift:
            settings.append(_measured(f"labels {shift:+d}", shares[shift], shares[0]))
    return Measured(len(leading), 1 + float(leading.mean()), tuple(settings))


def _answer(decoder: CachedTarget, target: Target, prompt: Sequence[int], max_new_tokens: int) -> _Answer:
    answer = plain_decode(decoder, prompt, max_new_tokens, decoder.shape.eos_token_ids)
    ids = torch.tensor([*prompt, *answer.tokens])
    return _Answer(ids, len(prompt), _by_layer(target, target.document_features(ids)))


def _by_layer(target: Target, features: Tensor) -> dict[int, Tensor]:
    return dict(zip(target.layer_ids, features.split(target.shape.hidden_size, dim=-1), strict=True))


def _other_settings(shape: DraftShape, tapped: Sequence[int]) -> dict[str, DraftShape]:
    """Shapes that differ from the folder's in one setting, by its name."""
    others = {}
    for step in (-1, 1):
        ids = tuple(i + step for i in shape.target_layer_ids)
        if set(ids) <= set(tapped):
            others[f"taps {step:+d}: {list(ids)}"] = replace(shape, target_layer_ids=ids)
    others[f"is_causal={not shape.is_causal}"] = replace(shape, is_causal=not shape.is_causal)
    return others


@torch.no_grad()
def _hits(drafter: DFlashDrafter, target: Target, answers: Sequence[_Answer], shape: DraftShape) -> dict[int, Tensor]:
    """Whether each drafted token is the answer's, or the one `shift` places on; bool ``[blocks, J]``.

    Only blocks whose tokens all lie inside the answer, with every shift, so that no shift has an easier set.
    """
    other = type(drafter)(shape)
    other.load_state_dict(drafter.state_dict())
    other = other.to(target.device, target.dtype).requires_grad_(False)
    head, found = other.own_head(target.head), {shift: [torch.zeros(0, other.num_predicted).bool()] for shift in SHIFTS}
    reach = other.num_predicted + max(SHIFTS)
    for answer in answers:
        if len(answer.ids) - reach <= answer.num_prompt:
            continue
        positions = torch.arange(answer.num_prompt, len(answer.ids) - reach)
        anchors, order = make_anchors(positions), torch.arange(len(answer.ids))
        noise_ids = make_noise_blocks(answer.ids, anchors, shape.block_size, shape.mask_token_id)
        features = torch.cat([answer.features[i] for i in shape.target_layer_ids], dim=-1).to(target.dtype)
        hidden = other(
            target.embed(noise_ids.to(target.device)).to(target.dtype),
            block_positions(anchors, order, shape.block_size).to(target.device),
            other.context_kv(features, order.to(target.device)),
            BlockLayout.of_row(anchors, (0, len(answer.ids)), shape.block_size, len(answer.ids)),
        )
        for shift in SHIFTS:
            labels = answer.ids[positions[:, None] + 1 + shift + torch.arange(other.num_predicted)]
            before, every = answer.ids[positions + shift], torch.ones_like(labels, dtype=torch.bool)
            found[shift].append(other.hits(hidden, head, labels, every, before))
    return {shift: torch.cat(hits) for shift, hits in found.items()}


def _leading(hits: Tensor) -> Tensor:
    """Right tokens in a row from the first, float ``[blocks]``."""
    return hits.int().cumprod(1).sum(1).float()


def _measured(name: str, scores: Tensor, as_is: Tensor) -> Measure:
    gain = scores - as_is
    error = float(gain.std()) / max(len(gain), 1) ** 0.5
    z = float(gain.mean()) / error if error > 0 else 0.0
    return Measure(name, float(scores.mean()), float(as_is.mean()), z)
