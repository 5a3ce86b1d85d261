"""`paceline eval` and `paceline export`: what a drafter is worth, and handing it to an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    import torch
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
        typer.Option(help="`enable_thinking` for the template; by default the template decides."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the target.")
    ] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the result as JSON; `-`: to stdout, and only that."),
    ] = None,
) -> None:
    """Decode prompts plainly and with the drafter: acceptance length, losslessness, speed."""
    import torch
    from rich.console import Console

    from paceline.eval.decode import CachedTarget
    from paceline.eval.evaluate import encode_prompts, evaluate, read_prompts
    from paceline.models.target import load_tokenizer

    console = Console(stderr=json_file == "-", soft_wrap=True, highlight=False)
    messages = read_prompts(prompts, limit)
    drafter = load_any_drafter(draft)
    where = _device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    encoded = encode_prompts(messages, tokenizer, None if thinking is None else thinking == "on")
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
        on_prompt=lambda result, so_far: _print_prompt(console, result, so_far, len(encoded)),
    )
    record = {"target": target, "draft": str(draft), "dtype": str(dtype).removeprefix("torch."), **evaluation.as_dict()}
    print_evaluation(console, record)
    if json_file == "-":
        typer.echo(json.dumps(record, indent=1))
    elif json_file is not None:
        _write(Path(json_file), json.dumps(record, indent=1) + "\n")


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|CHECKPOINT", help="Run folder (its best checkpoint) or checkpoint.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; an earlier export is replaced.")],
    layout: Annotated[
        Literal["zlab"], typer.Option("--format", help="zlab: read by Transformers (z-lab), vLLM and SGLang.")
    ] = "zlab",
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Type of the weights in the file.")
    ] = "bfloat16",
) -> None:
    """Write a trained drafter as a folder that inference engines load."""
    import torch

    from paceline.export.zlab import export_zlab

    del layout  # the only one so far
    drafter = load_any_drafter(source)
    folder = export_zlab(drafter, out, getattr(torch, dtype))
    typer.echo(f"{folder}: {sum(p.numel() for p in drafter.parameters()):,} parameters in {dtype}")
    typer.echo("\n".join(serving_commands(folder, drafter.shape.block_size)))


def serving_commands(folder: Path, block_size: int) -> list[str]:
    """How each engine takes the folder: vLLM counts drafted tokens, SGLang the anchor as well."""
    vllm = json.dumps({"method": "dflash", "model": str(folder), "num_speculative_tokens": block_size - 1})
    return [
        f"next: paceline eval --target TARGET --draft {folder} --prompts FILE",
        f"vLLM: vllm serve TARGET --speculative-config '{vllm}'",
        f"SGLang: python -m sglang.launch_server --model-path TARGET --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {folder} --speculative-num-draft-tokens {block_size}",
    ]


def load_any_drafter(path: Path) -> DFlashDrafter:
    """A drafter from an exported folder, a run folder or a checkpoint. Raises: ModelError, CheckpointError."""
    from paceline.export.zlab import is_zlab, load_zlab
    from paceline.train.checkpoint import load_drafter

    return load_zlab(path) if is_zlab(path) else load_drafter(path)


def print_evaluation(console: Console, record: dict[str, Any]) -> None:
    """The result as a table, with the definition of what it says."""
    from rich.table import Table

    table = Table(title=f"{record['draft']} drafting for {record['target']}", show_header=False)
    positions = " ".join(f"{share:.2f}" for share in record["acceptance_per_position"])
    verdict = "yes" if record["lossless"] else f"no: {record['mismatches']} mismatches, {record['ties']} numeric ties"
    rows = {
        "prompts": f"{record['prompts']}, up to {record['max_new_tokens']} tokens each; "
        f"{record['ended_by_stop']} ended by a stop token",
        "acceptance length": f"{record['acceptance_length']:.3f} with blocks of {record['block_size']}",
        "acceptance by position": positions,
        "plain": f"{record['baseline_tok_per_s']:.1f} tok/s",
        "speculative": f"{record['speculative_tok_per_s']:.1f} tok/s, {record['draft_frac']:.0%} of the time drafting, "
        f"{record['verify_frac']:.0%} verifying",
        "speedup": f"{record['speedup']:.2f}x",
        "identical outputs": verdict,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    console.print(f"acceptance length = {record['acceptance_rule']}", style="dim")
    for miss in record["first_mismatches"]:
        console.print(
            f"prompt {miss['prompt']}: token {miss['position']} differs; the target's two best logits are "
            f"{miss['top2_gap']:.2e} apart: {'rounding' if miss['tie'] else 'a fault'}"
        )


def _print_prompt(console: Console, result: PromptResult, so_far: Evaluation, num_prompts: int) -> None:
    same = "identical" if result.mismatch is None else f"differs at token {result.mismatch}"
    console.print(
        f"{len(so_far.results):>4}/{num_prompts}  {len(result.speculative.tokens):>4} tokens  "
        f"plain {result.plain.seconds:.2f} s  drafted {result.speculative.seconds:.2f} s  "
        f"acceptance length {result.speculative.acceptance.length:.2f}  {same}"
    )


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name} is no device: write auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch sees no GPU here; write cpu, or run `paceline doctor`")
    return device


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error
