"""A target with an adapter merged, written as a model folder of its own: what engines serve."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from paceline.errors import ConfigError, ModelError
from paceline.files import staged_folder
from paceline.gguf_file import find_gguf
from paceline.models.loading import first_line, load_causal_lm, load_configs, load_tokenizer, quiet_transformers


def write_merged(
    path: str,
    adapter: str,
    out: Path,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[torch.dtype, bool]:
    """Write a target's text part with a LoRA adapter merged: weights, configuration, tokenizer, generation settings.

    The weights are those that ``target.adapter`` gives in the same type, bit for bit. The folder appears whole or not
    at all.

    Args:
        path: Model folder, GGUF file or hub id.
        out: Must not exist.
        dtype: Of the weights; None: the one that the target's configuration names.
    Returns: the type, and whether parts for other inputs than text were left out.
    Raises: ConfigError if there is something at `out`; ModelError.
    """
    if out.exists():
        raise ConfigError(f"{out} exists: a merged model is written to a new folder")
    config, generation = load_configs(path, revision, trust_remote_code)
    tokenizer = load_tokenizer(path, revision, trust_remote_code)
    whole = config
    if find_gguf(path) is None:
        whole = transformers.AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    kind = dtype or config.dtype or torch.bfloat16
    model = load_causal_lm(path, config, kind, "cpu", revision, trust_remote_code, adapter=adapter)
    model.generation_config = transformers.GenerationConfig()  # Transformers refuses to write some that it reads
    with staged_folder(out) as place, quiet_transformers():
        try:
            model.save_pretrained(place)
            tokenizer.save_pretrained(place)
        except (ValueError, RuntimeError, KeyError) as error:
            raise ModelError(f"target {path} cannot be written: {first_line(error)}") from error
        if generation is not None:
            generation.to_json_file(place / "generation_config.json")
    return kind, whole.get_text_config() is not whole
