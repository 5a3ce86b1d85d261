"""A plain small training loop of PyTorch on the CPU, in the main thread."""

from __future__ import annotations

import torch
from life import goes_on, say_ready
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(2)
model = nn.Sequential(
    nn.Embedding(1000, 128),
    nn.TransformerEncoderLayer(128, 4, 256, batch_first=True),
    nn.TransformerEncoderLayer(128, 4, 256, batch_first=True),
    nn.Linear(128, 1000),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = 0
while goes_on():
    tokens = torch.randint(0, 1000, (8, 64))
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    last = loss.item()
    step += 1
    if step == 3:
        say_ready()
