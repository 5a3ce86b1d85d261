"""`paceline merge`: the model that is served where a target has an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def merge(
    target: Annotated[str, typer.Option(metavar="DIR|ID", help="The base model: a model folder or hub id.")],
    adapter: Annotated[str, typer.Option(metavar="DIR", help="LoRA adapter, a folder of PEFT's.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; it must not exist.")],
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(help="Type of the weights; by default the one that the model's configuration names."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Hub revision of the base model; by default its default branch.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
) -> None:
    """Write a model with a LoRA adapter merged into it, for engines to serve."""
    import torch

    from paceline.models.merged import write_merged

    kind, is_part = write_merged(
        target,
        adapter,
        out.expanduser(),
        None if dtype is None else getattr(torch, dtype),
        revision,
        trust_remote_code,
    )
    typer.echo(f"{out}: {target} with {adapter}, in {str(kind).removeprefix('torch.')}")
    if is_part:
        typer.echo("it is the text part alone: images and sound are left out")
    typer.echo(f"serve it: vllm serve {out}")
    typer.echo(f"train for it: target.path={out}, or target.path={target} target.adapter={adapter}")
