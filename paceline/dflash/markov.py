"""DSpark's bias: what a drafted token's logits owe to the token before it, of low rank.

    vanilla   bias_k = W2 e_k
    gated     bias_k = W2 (sigmoid(Wg [h_k; e_k] + b) * e_k)
    rnn       [g, c, o] = Wj [s_(k-1); e_k; h_k] + b;  s_k = sigmoid(g) s_(k-1) + (1 - sigmoid(g)) tanh(c)
              bias_k = W2 tanh(o)

with e_k = W1[token before], h_k the slot's hidden state and s_(-1) = 0. What is here gives the factor of W2.
Shape letters: R blocks, J predicted tokens, D hidden, E rank.
Source: DSpark, arXiv:2607.05147; deepseek-ai/DeepSpec.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gated(hidden: Tensor, embedded: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Factor ``[..., E]`` from hidden states ``[..., D]`` and embedded tokens ``[..., E]``; `weight` ``[E, D + E]``."""
    return torch.sigmoid(F.linear(torch.cat([hidden, embedded], dim=-1), weight, bias)) * embedded


def recurrent(state: Tensor, hidden: Tensor, embedded: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """One slot's factor and the state behind it, both ``[..., E]``; `weight` ``[3E, 2E + D]``."""
    joint = F.linear(torch.cat([state, embedded, hidden], dim=-1), weight, bias)
    gate, candidate, out = joint.chunk(3, dim=-1)
    gate = torch.sigmoid(gate)
    return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)
