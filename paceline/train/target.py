"""The frozen target of a run, loaded as its configuration says, and compared with what Transformers makes of it."""

from __future__ import annotations

import logging
import os
import tempfile

import torch

from paceline.config import RunConfig
from paceline.errors import ModelError
from paceline.files import default_cache_dir
from paceline.models.kinds import needs_last_hidden
from paceline.models.states import tap_differences
from paceline.models.target import Target

log = logging.getLogger(__name__)


def set_up(config: RunConfig) -> None:
    """Make PyTorch compute as a resolved configuration says, in this process."""
    torch.set_num_threads(int(config.topology.threads))
    torch.use_deterministic_algorithms(config.run.deterministic)
    if config.run.device.startswith("cuda"):
        if (device := torch.device(config.run.device)).index is not None:
            torch.cuda.set_device(device)  # events and graphs are the current device's
        keep_compiled_kernels()
    if config.run.deterministic:  # cuBLAS is deterministic only with a fixed workspace
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def load_target(config: RunConfig, last_hidden: bool | None = None) -> Target:
    """The frozen target of a resolved configuration, on its device; sets torch up for the run.

    Args:
        last_hidden: Whether it delivers its last hidden state; None: if the run needs it.
    """
    set_up(config)
    assert not isinstance(config.target.layer_ids, str)  # it is resolved
    return Target.load(
        config.target.path,
        layer_ids=config.target.layer_ids,
        dtype=getattr(torch, config.target.dtype),
        device=config.run.device,
        packing=config.target.packing,
        needs_last_hidden=needs_last_hidden(config) if last_hidden is None else last_hidden,
        feature_dtype=getattr(torch, config.draft.dtype),
        revision=config.target.revision,
        trust_remote_code=config.target.trust_remote_code,
        kernels=config.kernels if config.run.device.startswith("cuda") else None,
        row_length=int(config.pipeline.tokens_per_batch),
        fp8=config.target.fp8,
        adapter=config.target.adapter,
        num_parts=max(1, config.topology.gpus_per_target),
    )


def load_head(config: RunConfig) -> Target:
    """Embedding and output head, with one layer behind them, for a process that makes no features; sets torch up."""
    set_up(config)
    return Target.load(
        config.target.path,
        layer_ids=(0,),
        dtype=getattr(torch, config.target.dtype),
        device=config.run.device,
        packing="per_document",
        revision=config.target.revision,
        trust_remote_code=config.target.trust_remote_code,
        adapter=config.target.adapter,
    )


TAP_TOLERANCE = {("float32", "float32"): 1e-4, ("float32", "bfloat16"): 0.01}
"""Largest difference of a tap from the target's own hidden state, of the largest value there, by the types in which the
target computes and taps are delivered; elsewhere 0.1."""


def check_taps(target: Target) -> None:
    """One forward of a few tokens: taps are the hidden states that Transformers lists. Raises: ModelError."""
    computed, delivered = (str(each).removeprefix("torch.") for each in (target.dtype, target.feature_dtype))
    tolerance = TAP_TOLERANCE.get((computed, delivered), 0.1)
    for layer, difference in tap_differences(target).items():
        if not difference <= tolerance:
            raise ModelError(
                f"the tap behind layer {layer} is {difference:.2g} off the target's own hidden_states[{layer + 1}], "
                f"{tolerance:g} is allowed: this target's layers do not put out what a drafter would be trained on"
            )


def keep_compiled_kernels() -> None:
    """Keep what is compiled for a GPU in the user's cache: the default is a folder for temporary files."""
    folder = default_cache_dir() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it will hold code
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        log.warning("compiled kernels are not kept in %s: %s", folder, error.strerror)
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder / "flash4"))
