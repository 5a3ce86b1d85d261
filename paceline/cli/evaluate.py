"""`paceline eval` and `paceline export`: what a drafter is worth, and handing it to an engine."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli.evaluate_engines import Engine
from paceline.errors import ConfigError, ModelError
from paceline.files import write_atomically
from paceline.models.imports import import_models

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from paceline.eval.batch import Concurrency
    from paceline.eval.evaluate import Evaluation, PromptResult
    from paceline.export.card import Provenance
    from paceline.models.draft import DFlashDrafter
    from paceline.models.target import Target

log = logging.getLogger(__name__)


def eval(
    target: Annotated[str, typer.Option(metavar="DIR|ID", help="The target: a model folder, GGUF file or hub id.")],
    draft: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Exported drafter, run folder or checkpoint. With --url only a name for the result: the server drafts "
            "with its own.",
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="JSONL with `messages`, `turns`, `prompt` or `question`; may be repeated. By default 24 short prompts "
            "that come with Paceline.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest answer in tokens.")] = 256,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T", min=0.0, help="Draw from the target's distribution at T; 0 takes its likeliest token."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the draws; the same one draws the same answers.")] = 0,
    block_size: Annotated[
        list[int] | None,
        typer.Option(
            metavar="K",
            min=1,
            help="Slots of a block to use; by default all that were trained. Repeated, all are measured in turns.",
        ),
    ] = None,
    sweep_block_sizes: Annotated[
        bool,
        typer.Option("--sweep-block-sizes", help="Measure block sizes from 2 up in turns; say which to serve with."),
    ] = False,
    batch: Annotated[
        int | None,
        typer.Option(metavar="B", min=1, help="Then decode 1, 2, 4, ... B prompts at a time, plainly and with drafts."),
    ] = None,
    draft_sampling: Annotated[
        Literal["greedy", "sampled"],
        typer.Option(
            help="At a temperature above 0. greedy: the drafter proposes its likeliest tokens. sampled: it draws too; "
            "answers then have the target's distribution and are not the plain ones."
        ),
    ] = "greedy",
    verify_threshold: Annotated[
        float,
        typer.Option(
            metavar="X",
            min=0.0,
            max=1.0,
            help="Verify drafted tokens up to the first that the drafter's confidence head gives less; 0: all.",
        ),
    ] = 0.0,
    verify: Annotated[
        Literal["all", "auto"],
        typer.Option(
            help="With --batch. auto: rows verify as many tokens as bring the most a second over all, by confidences "
            "and by what rounds cost here, in place of the threshold."
        ),
    ] = "all",
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
    engine: Annotated[
        Engine, typer.Option(help="builtin decodes here; vllm measures a server that is running, by its counters.")
    ] = "builtin",
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="With --engine vllm: the server that drafts.")
    ] = None,
    baseline_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The same target served without drafts, for speedup and losslessness; asked in turns with the other.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The target's name at the server, if it is another one.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")] = "auto",
    gpus_per_target: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="GPUs that the target's layers are split over: --device and the next."),
    ] = 1,
    adapter: Annotated[
        str | None, typer.Option(metavar="DIR", help="LoRA adapter that is merged into the target, a folder of PEFT's.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Hub revision of the target; by default its default branch.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the target.")
    ] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the result as JSON; `-`: to stdout, and only that."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as one web page.")] = None,
) -> None:
    """Decode prompts plainly, with n-gram drafts and with the drafter: acceptance length, losslessness, speed."""
    from rich.console import Console

    from paceline.cli.evaluate_engines import ServerOptions, served_record
    from paceline.cli.evaluate_show import print_evaluation, print_prompt, print_served

    import_models()
    from paceline.eval.evaluate import read_prompts, sample_prompts

    if json_file not in (None, "-"):
        _check_writable("--json", Path(json_file))
    if html is not None:
        _check_writable("--html", html)
    if block_size and sweep_block_sizes:
        raise ConfigError("--block-size and --sweep-block-sizes: name the sizes, or have them chosen")
    server = ServerOptions(url, baseline_url, model)
    fixed = {
        "--block-size": bool(block_size),
        "--sweep-block-sizes": sweep_block_sizes,
        "--draft-sampling": draft_sampling != "greedy",
        "--verify-threshold": verify_threshold > 0,
        "--verify": verify != "all",
        "--device": device != "auto",
        "--gpus-per-target": gpus_per_target > 1,
        "--adapter": adapter is not None,
    }
    server.check(engine, draft, fixed)
    console = Console(stderr=json_file == "-", soft_wrap=True, highlight=False)
    prompt_files = prompts or [sample_prompts()]
    messages = read_prompts(prompt_files, limit)
    named_files = [str(file) for file in prompt_files] if prompts else ["those that come with Paceline"]
    if engine == "vllm":
        record = served_record(
            console,
            server,
            target=target,
            draft=draft,
            messages=messages,
            thinking=thinking,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            batch=batch,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        record["prompt_files"] = named_files
        print_served(console, record)
        _write_record(console, record, json_file, html)
        return
    assert draft is not None
    record = evaluate_drafter(
        target,
        draft,
        messages,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        block_sizes=None if sweep_block_sizes else block_size or [],
        batch=batch,
        draft_sampling=draft_sampling,
        verify_threshold=verify_threshold,
        verify=verify,
        thinking=None if thinking is None else thinking == "on",
        ngram=ngram,
        device=device,
        gpus_per_target=gpus_per_target,
        adapter=adapter,
        revision=revision,
        trust_remote_code=trust_remote_code,
        on_prompt=lambda result, so_far: print_prompt(console, result, so_far, len(messages)),
        on_size=lambda found: console.print(
            f"{found.batch_size} at a time: plain {found.baseline_tok_per_s:.1f} tok/s, "
            f"drafted {found.tok_per_s:.1f} tok/s"
        ),
    )
    record["prompt_files"] = named_files
    print_evaluation(console, record)
    _write_record(console, record, json_file, html)


def check_parts(device: torch.device, count: int, num_layers: int) -> None:
    """Whether there are GPUs and layers for so many parts of a target. Raises: ConfigError."""
    from paceline.models.split import part_devices

    try:
        part_devices(device, count)
    except ConfigError as error:
        raise ConfigError(str(error).replace("topology.gpus_per_target=", "--gpus-per-target ")) from error
    if count > num_layers:
        raise ConfigError(f"--gpus-per-target {count}: {num_layers} layers of the target run, and a part needs one")


def evaluate_drafter(
    target: str,
    draft: Path,
    messages: Sequence[list[dict[str, Any]]],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    block_sizes: Sequence[int] | None = (),
    batch: int | None = None,
    draft_sampling: Literal["greedy", "sampled"] = "greedy",
    verify_threshold: float = 0.0,
    verify: Literal["all", "auto"] = "all",
    thinking: bool | None = None,
    ngram: bool = True,
    device: str = "auto",
    gpus_per_target: int = 1,
    adapter: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    on_prompt: Callable[[PromptResult, Evaluation], None] = lambda result, so_far: None,
    on_size: Callable[[Concurrency], None] = lambda found: None,
) -> dict[str, Any]:
    """Decode prompts plainly, with n-gram drafts and with a drafter: the record that `paceline eval --json` writes.

    Arguments are the options of that command.

    Args:
        messages: Of each prompt, from `read_prompts`.
        block_sizes: Empty: the trained one; None: from 2 up.
        on_prompt, on_size: Called after each prompt, and after each number of prompts at a time.
    Raises: ModelError, CheckpointError, ConfigError.
    """
    import torch

    from paceline.eval.batch import BatchTarget, batch_sizes, measure_concurrency
    from paceline.eval.calibrate import fewest_nearly_best, swept_blocks
    from paceline.eval.decode import CachedTarget, check_confidence, check_fit
    from paceline.eval.evaluate import encode_prompts, evaluate_blocks
    from paceline.eval.sampling import Sampling
    from paceline.models.loading import load_tokenizer, read_shape
    from paceline.plan.resolve import resolve_device

    if draft_sampling == "sampled" and not temperature:
        raise ConfigError(
            "--draft-sampling sampled at --temperature 0: greedy decoding draws nothing; name a temperature above 0"
        )
    if verify == "auto" and batch is None:
        raise ConfigError("--verify auto decides over several prompts at a time: name them with --batch B")
    if batch is not None and gpus_per_target > 1:
        raise ConfigError(
            f"--batch {batch} with --gpus-per-target {gpus_per_target}: several prompts at a time are decoded with the "
            "target on one device; leave one of the two out"
        )
    drafter = load_any_drafter(draft)
    check_confidence(drafter, verify_threshold > 0 or verify == "auto")
    sizes = list(block_sizes or [drafter.shape.block_size])
    if block_sizes is None:
        sizes = swept_blocks(drafter.shape.block_size, 2 - drafter.label_shift)
    where = resolve_device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    tokenizer = load_tokenizer(target, revision, trust_remote_code)
    encoded = encode_prompts(messages, tokenizer, thinking)
    shape = read_shape(target, revision, trust_remote_code)
    check_fit(drafter, shape, drafter.shape.target_layer_ids)
    check_parts(where, gpus_per_target, shape.num_layers)
    if (largest := max(map(max, encoded), default=0)) >= shape.vocab_size:
        raise ModelError(f"{target}: its tokenizer gives token {largest}, its embedding has {shape.vocab_size} rows")
    cached_target = CachedTarget.load(
        target,
        drafter.shape.target_layer_ids,
        dtype=dtype,
        device=where,
        revision=revision,
        trust_remote_code=trust_remote_code,
        adapter=adapter,
        num_parts=gpus_per_target,
    )
    several = None
    if batch is not None:  # before the work, as it may be refused
        several = BatchTarget.load(
            target,
            drafter.shape.target_layer_ids,
            dtype=dtype,
            device=where,
            revision=revision,
            trust_remote_code=trust_remote_code,
            adapter=adapter,
        )
    drafter = drafter.to(where, dtype)
    sampling = Sampling(temperature, seed, draft_sampling) if temperature else None
    evaluations = evaluate_blocks(
        cached_target,
        drafter,
        encoded,
        sizes,
        max_new_tokens=max_new_tokens,
        stop_ids=cached_target.shape.eos_token_ids,
        ngram=ngram,
        sampling=sampling,
        verify_threshold=verify_threshold,
        on_prompt=on_prompt,
    )
    served = fewest_nearly_best({size: one.tok_per_s for size, one in evaluations.items()})
    evaluation = evaluations[served]
    record = {
        "target": target,
        "adapter": adapter,
        "draft": str(draft),
        "prompt_files": [],
        "thinking": {None: "as the template has it", True: "on", False: "off"}[thinking],
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else str(where),
        "gpus_per_target": gpus_per_target,
        "dtype": str(dtype).removeprefix("torch."),
        "kernel": cached_target.kernel,
        **evaluation.as_dict(),
    }
    if len(evaluations) > 1:
        record |= {"sweep": [_sweep_part(one) for one in evaluations.values()], "serve_block_size": served}
    if several is not None and batch is not None:
        rows = measure_concurrency(
            several,
            drafter,
            cached_target,
            encoded,
            [result.plain for result in evaluation.results],
            block_size=served,
            max_new_tokens=max_new_tokens,
            stop_ids=cached_target.shape.eos_token_ids,
            sizes=batch_sizes(batch),
            sampling=sampling,
            verify_threshold=verify_threshold,
            verify=verify,
            on_size=on_size,
        )
        record |= {"verify": verify, "concurrency": [row.as_dict() for row in rows]}
    return record


def _write_record(console: Console, record: dict[str, Any], json_file: str | None, html: Path | None) -> None:
    """The result as page and as JSON, where these were asked for."""
    if html is not None:
        from paceline.report.evaluation import evaluation_page

        write_atomically(html, evaluation_page(record))
        console.print(f"written to {html}", markup=False)
    if json_file == "-":
        typer.echo(json.dumps(record, indent=1))
    elif json_file is not None:
        write_atomically(Path(json_file), json.dumps(record, indent=1) + "\n")


def _sweep_part(evaluation: Evaluation) -> dict[str, Any]:
    """What a table over block sizes shows of one."""
    keys = (
        "block_size",
        "acceptance_length",
        "acceptance_length_interval",
        "speculative_tok_per_s",
        "speedup",
        "lossless",
    )
    record = evaluation.as_dict()
    return {"num_predicted": evaluation.num_predicted} | {key: record[key] for key in keys}


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
            metavar="DIR|ID",
            help="The target: a model folder or hub id; by default the run's own. speculators names it.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Type of the weights in the file.")
    ] = "bfloat16",
    license_id: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="Licence that the model card names, for example apache-2.0."),
    ] = None,
    auto_map: Annotated[
        bool,
        typer.Option(
            "--auto-map", help="zlab: also write the code by which Transformers loads it with trust_remote_code."
        ),
    ] = False,
    run_target: Annotated[
        bool,
        typer.Option(
            "--run-target/--no-run-target",
            help="With --target: record what it gives at the tapped layers, for `paceline check`; its layers up to the "
            "last tap have to fit into memory.",
        ),
    ] = True,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the target.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Write a trained drafter as a folder that inference engines load."""
    from paceline.cli.provenance import provenance_of

    drafter = load_any_drafter(source)
    folder, commands = export_drafter(
        drafter,
        out,
        layout,
        dtype,
        target,
        trust_remote_code,
        provenance=provenance_of(source, target),
        license_id=license_id,
        auto_map=auto_map,
        run_target=run_target,
    )
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
    *,
    provenance: Provenance | None = None,
    license_id: str | None = None,
    auto_map: bool = False,
    run_target: bool = True,
) -> tuple[Path, list[str]]:
    """Write a drafter as zlab or speculators, with its model card and fingerprint: the folder, and how to go on.

    Args:
        target: As named by the user. Without it the run's own is taken where it can be read, but not run.
        provenance: For the card; None: nothing is known but the target.
        run_target: Load the layers of `target` up to the last tap for the fingerprint; else the first layer is enough.
    Raises: ConfigError if the layout needs a target and there is none, or has no place for `auto_map`; ModelError.
    """
    import torch

    from paceline import __version__
    from paceline.export import speculators, zlab
    from paceline.export.card import Provenance, is_hub_id, model_card
    from paceline.export.fingerprint import fingerprint_text
    from paceline.export.folder import CARD_FILE, FINGERPRINT_FILE, export_place

    if auto_map and layout != "zlab":
        raise ConfigError("--auto-map with --format speculators: its readers bring their own code; use --format zlab")
    export_place(out)  # before the work
    provenance = provenance or Provenance(target=target)
    name = target or provenance.target
    if layout == "speculators" and name is None:
        raise ConfigError(
            "--format speculators needs --target: the folder names its target, and holds the rows of its head that a "
            "drafter over a part of the vocabulary uses"
        )
    adapter = provenance.target_adapter
    if layout == "speculators" and adapter is not None:
        raise ConfigError(
            f"--format speculators of a run with target.adapter={adapter}: the folder names its target, and engines "
            "would serve the base; write the merged model with `paceline merge`, and name it with --target"
        )
    make = {"zlab": zlab, "speculators": speculators}[layout].serving_commands
    card = model_card(
        drafter.shape,
        provenance,
        layout=layout,
        dtype=dtype,
        version=__version__,
        commands=make("DIR", drafter, name if name is not None and is_hub_id(name) and not adapter else "TARGET"),
        license_id=license_id,
        auto_map=auto_map,
    )
    runs = target is not None and run_target
    part = _part_of_target(
        drafter,
        name,
        provenance.target_revision,
        adapter,
        dtype,
        trust_remote_code,
        runs,
        is_needed=target is not None or layout == "speculators",
    )
    weights_dtype = getattr(torch, dtype)
    texts = {CARD_FILE: card, FINGERPRINT_FILE: fingerprint_text(drafter, part if runs else None, weights_dtype)}
    if layout == "zlab":
        folder = zlab.export_zlab(drafter, out, weights_dtype, target=part, auto_map=auto_map, texts=texts)
    else:
        assert name is not None and part is not None
        folder = speculators.export_speculators(drafter, part, name, out, weights_dtype, texts)
    if adapter is not None:
        merging = f"first: paceline merge --target {name} --adapter {adapter} --out MERGED"
        return folder, [merging, *make(folder, drafter, "MERGED")]
    return folder, make(folder, drafter, name or "TARGET")


def _part_of_target(
    drafter: DFlashDrafter,
    name: str | None,
    revision: str | None,
    adapter: str | None,
    dtype: str,
    trust_remote_code: bool,
    is_run: bool,
    is_needed: bool,
) -> Target | None:
    """Embedding, head and layers of the target: up to the last tap if it is to be run, else the first one.

    Raises: ModelError if it cannot be loaded and is needed; else that is told, and what the folder lacks then.
    """
    import torch

    from paceline.models.target import Target

    if name is None:
        return None
    try:
        return Target.load(
            name,
            layer_ids=drafter.shape.target_layer_ids if is_run else (0,),
            dtype=getattr(torch, dtype),
            revision=revision,
            trust_remote_code=trust_remote_code,
            adapter=adapter,
        )
    except ModelError as error:
        if is_needed:
            raise
        log.warning(
            "the run's target is not here: factors of its embedding and logits, which Gemma has, are not written "
            "(--target names it): %s",
            error,
        )
        return None


def load_any_drafter(path: Path) -> DFlashDrafter:
    """A drafter from an exported folder, a run folder or a checkpoint. Raises: ModelError, CheckpointError."""
    from paceline.export import speculators, zlab
    from paceline.train.checkpoint import load_drafter

    if zlab.is_zlab(path):
        return zlab.load_zlab(path)
    return speculators.load_speculators(path) if speculators.is_speculators(path) else load_drafter(path)


def _check_writable(option: str, path: Path) -> None:
    """Before the work rather than after it. Raises: ConfigError."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written: a file in an existing folder was wanted")
