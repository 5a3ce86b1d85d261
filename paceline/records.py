"""What crosses a thread, a process or a host, in the order in which it is made.

    TokenBatch    made by ``data.packing``     taken by a target role
    FeatureBatch  made by ``models.target``    taken by a drafter role
    StepSums      made by ``train.step``       taken by ``train.loop``, summed over micro-batches and ranks
    StepResult    made by ``train.step``       taken by ``train.loop``, one step later where a GPU is still at it

Shape letters: S tokens in a packed row, L tapped layers, D hidden size, A anchors, K block size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

PADDING_DOCUMENT = -1
"""Document id of the padding at the end of a packed row."""


@dataclass(frozen=True)
class TokenBatch:
    """One packed row of whole documents, padded at the end to exactly S tokens.

    Batch ``number`` is a pure function of (data, seed, number), so a lost batch can be made again anywhere.

    Attributes:
        number: Position in the run's order, from 0.
        input_ids: int64 ``[S]``; padding holds 0 and is never read.
        loss_mask: bool ``[S]``; True exactly on what the target itself would generate; False on padding.
        document_ids: int32 ``[S]``; 0, 1, 2, ... in the row, `PADDING_DOCUMENT` on padding.
        position_ids: int64 ``[S]``; restart at 0 in every document.
        document_starts: ``n + 1`` offsets: document d is ``[starts[d], starts[d + 1])``; padding begins
            at the last.
        rows: ``n`` data set row numbers, one a document.
    """

    number: int
    input_ids: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    position_ids: Tensor
    document_starts: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to a document (padding excluded)."""
        return self.document_starts[-1]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and end of every document in the row."""
        return list(zip(self.document_starts[:-1], self.document_starts[1:], strict=True))

    @classmethod
    def pack(
        cls,
        number: int,
        documents: list[tuple[int, Tensor, Tensor]],
        length: int,
    ) -> TokenBatch:
        """Lay documents one after another into a row of `length` tokens.

        Args:
            number: Batch number.
            documents: (data set row, input ids ``[n]``, loss mask ``[n]``) of each document, in row order.
            length: S.
        Raises: ValueError if the documents do not fit.
        """
        starts = [0]
        for _, ids, _ in documents:
            starts.append(starts[-1] + len(ids))
        if starts[-1] > length:
            raise ValueError(f"{len(documents)} documents of {starts[-1]} tokens do not fit into a row of {length}")
        input_ids = torch.zeros(length, dtype=torch.int64)
        loss_mask = torch.zeros(length, dtype=torch.bool)
        document_ids = torch.full((length,), PADDING_DOCUMENT, dtype=torch.int32)
        position_ids = torch.zeros(length, dtype=torch.int64)
        for d, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            _, ids, mask = documents[d]
            input_ids[start:end] = ids
            loss_mask[start:end] = mask
            document_ids[start:end] = d
            position_ids[start:end] = torch.arange(end - start)
        return cls(
            number=number,
            input_ids=input_ids,
            loss_mask=loss_mask,
            document_ids=document_ids,
            position_ids=position_ids,
            document_starts=tuple(starts),
            rows=tuple(row for row, _, _ in documents),
        )


@dataclass(frozen=True)
class FeatureBatch:
    """A packed row together with what the drafter needs from the target.

    Attributes:
        tokens: The row, on the host.
        context_feature: ``[S, L*D]`` in the drafter's compute type: outputs of the tapped layers joined in the order of
            ``target.layer_ids``; zeros on padding.
        last_hidden: ``[S, D]`` after the target's final norm, or None when the drafter class does not need it.
    """

    tokens: TokenBatch
    context_feature: Tensor
    last_hidden: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that the channel holds for this batch."""
        tokens = self.tokens
        tensors = [self.context_feature, tokens.input_ids, tokens.loss_mask, tokens.document_ids, tokens.position_ids]
        tensors += [] if self.last_hidden is None else [self.last_hidden]
        return sum(t.numel() * t.element_size() for t in tensors)


@dataclass
class StepSums:
    """Counts of micro-batches that the host knows; what the device has summed of them is in `StepResult`.

    Attributes:
        num_rows: Slots that reach the output head; 0: there is nothing to learn.
        blocks: Real blocks (anchors kept).
        tokens: Tokens of documents (padding excluded).
        batches: Micro-batches summed.
        put_wait_s, get_wait_s: Seconds blocked at the queue: targets (summed over them) and the drafter.
        ready_wait_s: The part of `get_wait_s` during which the batches of a whole step stood in the queue.
    """

    num_rows: int = 0
    blocks: int = 0
    tokens: int = 0
    batches: int = 0
    put_wait_s: float = 0.0
    get_wait_s: float = 0.0
    ready_wait_s: float = 0.0

    def __iadd__(self, other: StepSums) -> StepSums:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


@dataclass(frozen=True)
class StepResult:
    """What came of an optimizer step, over all its micro-batches and ranks. Sums are divided last: an average of
    averages is biased.

    Attributes:
        loss: Sum of weight * loss over scored slots, divided by the sum of the weights.
        rounds: Target forwards of a decode loop for as many tokens as there were blocks, see
            `acceptance.estimated_rounds`: ``blocks / rounds`` estimates its acceptance length.
        lr: Rate of the update.
        grad_norm: Norm of the gradient before clipping.
        is_finite: Whether the gradients were; if not, this update and all after it have left the weights alone.
        parts: What the drafter's kind tells of its loss beside it, by name: means over slots by their weights.
    """

    loss: float
    rounds: float
    lr: float
    grad_norm: float
    is_finite: bool
    parts: dict[str, float] = field(default_factory=dict)
