"""`paceline eval` and `paceline export`: what a drafter is worth, and handing it to an engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.errors import ConfigError, ModelError
from paceline.files import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.eval.evaluate import Evaluation, PromptResult
    from paceline.models.draft import DFlashDrafter


def eval(
    target: Annotated[str, typer.Option(metavar="DIR|ID", help="The target: a model folder or hub id.")],
    draft: Annotated[Path, typer.Option(metavar="DIR", help="Exported drafter, run folder or checkpoint.")],
    prompts: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="JSONL with `messages`, `turns`, `prompt` or `question`; may be repeated."),
    ],
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest answer in tokens.")] = 256,
    block_size: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="Slots of a block to use; by default all that were trained.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Prompts to use, the first ones.")] = None,
    thinking: Annotated[
        Literal["on", "off"] | None,
        typer.Option(help="Switch the template's reasoning (`enable_thinking`, `thinking`); by default it decides."),
    ] = None,
    ngram: Annotated[
        bool,
        typer.Option(
            "--ngram/--no-ngram", help="Also decode with drafts copied from the text, the same number of tokens."
        ),
    ] = True,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the target.")
    ] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the result as JSON; `-`: to stdout, and only that."),
    ] = None,
) -> None:
    """Decode prompts plainly, with n-gram drafts and with the drafter: acceptance length, losslessness, speed."""
    import torch
    from rich.console import Console

    from paceline.eval.decode import CachedTarget, check_fit
    from paceline.eval.evaluate import encode_prompts, evaluate, read_prompts
    from paceline.models.loading import load_tokenizer, read_shape
    from paceline.plan.resolve import resolve_device

    if json_file not in (None, "-"):
        _check_writable(Path(json_file))
    console = Console(stderr=json_file == "-", soft_wrap=True, highlight=False)
    messages = read_prompts(prompts, limit)
    drafter = load_any_drafter(draft)
    where = resolve_device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    encoded = encode_prompts(messages, tokenizer, None if thinking is None else thinking == "on")
    shape = read_shape(target, trust_remote_code=trust_remote_code)
    check_fit(drafter, shape, drafter.shape.target_layer_ids)
    if (largest := max(map(max, encoded), default=0)) >= shape.vocab_size:
        raise ModelError(f"{target}: its tokenizer gives token {largest}, its embedding has {shape.vocab_size} rows")
    cached_target = CachedTarget.load(
        target, drafter.shape.target_layer_ids, dtype=dtype, device=where, trust_remote_code=trust_remote_code
    )
    evaluation = evaluate(
        cached_target,
        drafter.to(where, dtype),
        encoded,
        max_new_tokens=max_new_tokens,
        stop_ids=cached_target.shape.eos_token_ids,
        block_size=block_size,
        ngram=ngram,
        on_prompt=lambda result, so_far: _print_prompt(console, result, so_far, len(encoded)),
    )
    record = {
        "target": target,
        "draft": str(draft),
        "dtype": str(dtype).removeprefix("torch."),
        "kernel": cached_target.kernel,
        **evaluation.as_dict(),
    }
    print_evaluation(console, record)
    if json_file == "-":
        typer.echo(json.dumps(record, indent=1))
    elif json_file is not None:
        write_atomically(Path(json_file), json.dumps(record, indent=1) + "\n")


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|CHECKPOINT", help="Run folder (its best checkpoint) or checkpoint.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; an earlier export is replaced.")],
    layout: Annotated[
        Literal["zlab", "speculators"],
        typer.Option(
            "--format",
            help="zlab: read by Transformers (z-lab), vLLM and SGLang. speculators: read by vLLM and the package of "
            "that name; the one for drafters over a part of the vocabulary.",
        ),
    ] = "zlab",
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|ID", help="The target: a model folder or hub id. Needed for, and named in, speculators."
        ),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Type of the weights in the file.")
    ] = "bfloat16",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the target.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Write a trained drafter as a folder that inference engines load."""
    drafter = load_any_drafter(source)
    folder, commands = export_drafter(drafter, out, layout, dtype, target, trust_remote_code)
    num_parameters = sum(p.numel() for p in drafter.parameters())
    if as_json:
        typer.echo(json.dumps({"out": str(folder), "parameters": num_parameters, "dtype": dtype, "next": commands}))
        return
    typer.echo(f"{folder}: {num_parameters:,} parameters in {dtype}")
    typer.echo("\n".join(commands))


def export_drafter(
    drafter: DFlashDrafter,
    out: Path,
    layout: str,
    dtype: str,
    target: str | None,
    trust_remote_code: bool = False,
) -> tuple[Path, list[str]]:
    """Write a drafter as zlab or speculators: the folder, and commands to go on with.

    Of the target, embedding, head and first layer are loaded, and for speculators alone.
    Raises: ConfigError if the layout needs a target and there is none, ModelError.
    """
    import torch

    from paceline.export import speculators, zlab

    weights_dtype = getattr(torch, dtype)
    if layout == "zlab":
        folder = zlab.export_zlab(drafter, out, weights_dtype)
        return folder, zlab.serving_commands(folder, drafter)
    if target is None:
        raise ConfigError(
            "--format speculators needs --target: the folder names its target, and holds the rows of its head that a "
            "drafter over a part of the vocabulary uses"
        )
    from paceline.models.target import Target

    start = Target.load(target, layer_ids=(0,), dtype=weights_dtype, trust_remote_code=trust_remote_code)
    folder = speculators.export_speculators(drafter, start, target, out, weights_dtype)
    return folder, speculators.serving_commands(folder, drafter, target)


def load_any_drafter(path: Path) -> DFlashDrafter:
    """A drafter from an exported folder, a run folder or a checkpoint. Raises: ModelError, CheckpointError."""
    from paceline.export import speculators, zlab
    from paceline.train.checkpoint import load_drafter

    if zlab.is_zlab(path):
        return zlab.load_zlab(path)
    return speculators.load_speculators(path) if speculators.is_speculators(path) else load_drafter(path)


def print_evaluation(console: Console, record: dict[str, Any]) -> None:
    """The result as a table, with the definition of what it says."""
    from rich.table import Table

    table = Table(title=f"{record['draft']} drafting for {record['target']}", show_header=False)
    positions = " ".join(f"{share:.2f}" for share in record["acceptance_per_position"])
    verdict = "yes" if record["lossless"] else f"no: {record['mismatches']} mismatches, {record['ties']} numeric ties"
    ngram = {}
    if "ngram_speedup" in record:
        ngram["n-gram drafts"] = (
            f"{record['ngram_tok_per_s']:.1f} tok/s, acceptance length {record['ngram_acceptance_length']:.3f}, "
            f"speedup {record['ngram_speedup']:.2f}x"
        )
    rows = {
        "prompts": f"{record['prompts']}, up to {record['max_new_tokens']} tokens each; "
        f"{record['ended_by_stop']} ended by a stop token, {record['loops']} by the limit in a loop",
        "acceptance length": f"{record['acceptance_length']:.3f} with blocks of {record['block_size']}",
        "acceptance by position": positions,
        "plain": f"{record['baseline_tok_per_s']:.1f} tok/s",
        **ngram,
        "speculative": f"{record['speculative_tok_per_s']:.1f} tok/s, {record['draft_frac']:.0%} of the time drafting, "
        f"{record['verify_frac']:.0%} verifying",
        "speedup": f"{record['speedup']:.2f}x"
        + (f", {record['speedup_over_ngram']:.2f}x over n-gram drafts" if ngram else ""),
        "identical outputs": verdict,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    console.print(f"acceptance length = {record['acceptance_rule']}", style="dim")
    for miss in record["first_mismatches"]:
        console.print(
            f"prompt {miss['prompt']}, {miss['answer']}: token {miss['position']} differs; the two best logits "
            f"are {miss['top2_gap']:.2e} apart: {'rounding' if miss['tie'] else 'a fault'}"
        )


def _print_prompt(console: Console, result: PromptResult, so_far: Evaluation, num_prompts: int) -> None:
    same = ", ".join(f"{miss.answer} differs at token {miss.position}" for miss in result.differences) or "identical"
    copied = f"n-gram drafts {result.ngram.seconds:.2f} s  " if result.ngram else ""
    console.print(
        f"{len(so_far.results):>4}/{num_prompts}  {len(result.speculative.tokens):>4} tokens  "
        f"plain {result.plain.seconds:.2f} s  {copied}drafted {result.speculative.seconds:.2f} s  "
        f"acceptance length {result.speculative.acceptance.length:.2f}  {same}"
    )


def _check_writable(path: Path) -> None:
    """Before the work rather than after it. Raises: ConfigError."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--json {path} cannot be written: a file in an existing folder was wanted")
