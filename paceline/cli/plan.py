"""`paceline plan`: what a run needs, how fast it will be, and how to share the GPUs out, before any is paid for."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.config import RunConfig, load_config
from paceline.errors import ConfigError, DataError, printable
from paceline.files import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.plan.what_if import Split
    from paceline.profiling.verdict import Verdict, Window

DOCUMENT_TOKENS = 3072
"""Length of documents where no data is given: the longest that `prepare` makes unless told otherwise."""
TOKENS = 1e9
"""Tokens planned for where neither `--tokens` nor data says how many."""
MOST_ROWS = 12
"""Splits in the terminal's table; JSON and page have all."""


def plan(
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides: optim.tokens_per_step=98304")] = None,
    target: Annotated[
        str | None, typer.Option(metavar="DIR|NAME", help="Model folder, or qwen3-8b, qwen3.6-27b, smollm2-135m, ...")
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="NxCARD", help="8xh200; cards by name.")] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens to train on, all passes counted: 5e9, 400M.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="RUN.yaml", help="Run file with drafter, batch and data.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="Drafter: dflash, dflash2 or dspark.")] = None,
    num_layers: Annotated[int | None, typer.Option(metavar="N", help="Draft layers.")] = None,
    block_size: Annotated[int | None, typer.Option(metavar="K", help="Slots of a block, the anchor included.")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="PREPARE.json", help="A data set's prepare.json, or its folder.")
    ] = None,
    is_even: Annotated[
        bool, typer.Option("--even", help="Let steps grow to a multiple of the drafters, so that none is idle.")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine for less than a minute, and use that.")
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if", metavar="SPLIT", help="targets=6,drafters=2[,layout=split] of --run; may be repeated."
        ),
    ] = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="RUN", help="Run folder with a profile.")] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the plan as JSON; -: stdout.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as a page.")] = None,
) -> None:
    """Memory, speed, hours and the best split of the GPUs, before anything runs."""
    for option, place in (("--json", as_json), ("--html", html)):
        _check_place(option, place)
    if what_if or run is not None:
        if not what_if or run is None:
            raise ConfigError("--what-if targets=6,drafters=2 and --run RUN go together: a split, and who was measured")
        if html is not None:
            raise ConfigError("--html has the plan of --target; --what-if answers in the terminal and with --json")
        record = what_if_record(run, what_if)
        if as_json is not None:
            _put("--json", as_json, json.dumps(record, indent=1))
        if as_json is None or str(as_json) != "-":
            typer.echo(printable("\n".join(_what_if_lines(record))))
        return
    given = {"draft.kind": kind, "draft.num_layers": num_layers, "draft.block_size": block_size}
    settings = [f"{key}={value}" for key, value in given.items() if value is not None]
    record = make_plan(
        target, gpus, tokens, config, [*settings, *(overrides or [])], data, is_even=is_even, is_calibrated=calibrate
    )
    if html is not None:
        from paceline.report.plan import plan_page

        _put("--html", html, plan_page(record))
    if as_json is not None:
        _put("--json", as_json, json.dumps(record, indent=1))
    if as_json is None or str(as_json) != "-":
        from rich.console import Console

        show(Console(highlight=False), record)
    for place in (as_json, html):
        if place is not None and str(place) != "-":
            typer.echo(f"written: {printable(str(place))}", err=True)


def make_plan(
    target: str | None,
    gpus: str | None,
    tokens: str | None,
    config_file: Path | None,
    overrides: Sequence[str],
    data: Path | None,
    *,
    is_even: bool = False,
    is_calibrated: bool = False,
) -> dict[str, Any]:
    """The plan as a record for JSON; arguments are the command's. Raises: ConfigError, DataError, ModelError."""
    from paceline.plan.cards import calibrate, parse_gpus
    from paceline.plan.outline import BUILT_IN, outline, read_target
    from paceline.plan.splits import plan_record

    if gpus is None and not is_calibrated:
        raise ConfigError("--gpus 8xh200 was wanted, or --calibrate for this machine")
    if config_file is None and target is None:
        raise ConfigError(f"--target DIR was wanted, or one of {', '.join(BUILT_IN)}; or --config RUN.yaml")
    planned = None if gpus is None else parse_gpus(gpus)
    wanted = None if tokens is None else parse_tokens(tokens)
    defaults = [] if config_file is not None else ["target.path=none", "data.path=none"]
    own = [] if target is None else [f"target.path={json.dumps(target)}"]
    settings = load_config(config_file, [*defaults, *own, *overrides])
    sources: dict[str, str] = {}
    settings, token_bytes = _cached(settings, sources)
    if data is None and config_file is not None and (Path(settings.data.path) / "prepare.json").is_file():
        data = Path(settings.data.path)
    documents, facts = _documents(data, settings, sources)
    name = settings.target.path
    if name not in BUILT_IN and "/" not in name and not Path(name).expanduser().exists():
        raise ConfigError(f"target {name}: a model folder, a hub id or one of {', '.join(BUILT_IN)} was wanted")
    sizes = read_target(name, settings.target.revision, settings.target.trust_remote_code)
    if sizes.note:
        sources["target"] = sizes.note
    if is_calibrated:  # last of what can fail for a reason that a person can mend
        here, card = calibrate()
        count = planned[0] if planned else here
    else:
        assert planned is not None
        count, card = planned
    if settings.target.fp8 and not card.has_fp8:
        raise ConfigError(f"target.fp8=true: {card.name} has no fp8 products; leave it out")
    supervised = 1.0 if facts is None else facts["num_supervised"] / facts["num_tokens"]
    found = outline(
        settings,
        sizes,
        documents,
        on_gpu=not card.is_cpu,
        fill=1.0 if facts is None else facts["fill"],
        predicted_frac=min(1.0, supervised / settings.anchors.per_token),
        longest=None if facts is None else facts["longest"],
        token_bytes=token_bytes,
    )
    distinct = None if facts is None else float(facts["num_tokens"])
    if wanted is None:
        wanted = TOKENS if distinct is None else distinct * settings.data.epochs
        sources["tokens"] = (
            f"{TOKENS:.0e}, as --tokens and --data are left out"
            if distinct is None
            else f"{settings.data.epochs} passes over the data"
        )
    if distinct is None:
        distinct = wanted / settings.data.epochs
        sources["distinct_tokens"] = f"the tokens over data.epochs={settings.data.epochs}"
    sources["predictions"] = "slots behind a supervised anchor are supervised too"
    if settings.target.cache is None:
        sources["split"] = "no split was measured on GPUs: transport is calculated and not hidden behind other work"
    return plan_record(
        found,
        card,
        count,
        target=name,
        tokens=wanted,
        distinct_tokens=distinct,
        sources=sources,
        is_even=is_even,
    )


def parse_tokens(text: str) -> float:
    """``5e9``, ``400M``, ``1.5B`` or ``1,000,000``. Raises: ConfigError."""
    units = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
    plain = text.strip().lower().replace(",", "").replace("_", "")
    factor = units.get(plain[-1:], 1.0)
    try:
        number = float(plain[:-1] if factor > 1.0 else plain) * factor
    except ValueError:
        number = math.nan
    if not 1 <= number < 1e18:
        raise ConfigError(f"--tokens {text}: a number of tokens such as 5e9 or 400M was wanted")
    return number


def _documents(data: Path | None, config: RunConfig, sources: dict[str, str]) -> tuple[Any, dict[str, Any] | None]:
    """Lengths of documents, and what ``prepare.json`` says; None without data. Raises: DataError."""
    from paceline.plan.outline import Documents

    if data is None:
        length = min(DOCUMENT_TOKENS, config.data.max_length)
        if isinstance(config.pipeline.tokens_per_batch, int):
            length = min(length, config.pipeline.tokens_per_batch)
        sources["documents"] = f"all of {length} tokens and supervised throughout, as --data is left out"
        return Documents((length,)), None
    file = data / "prepare.json" if data.is_dir() else data
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        info, report = content["dataset"], content.get("report") or {}
        facts: dict[str, Any] = {
            name: int(info[name]) for name in ("num_rows", "num_tokens", "num_supervised", "longest")
        }
        facts["fill"] = float(report.get("fill") or 1.0)
        if min(facts["num_rows"], facts["num_tokens"], facts["longest"]) < 1:
            raise ValueError("it is empty")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"--data {data}: the prepare.json of a `paceline prepare` was wanted: {error}") from error
    if (file.parent / "rows.arrow").is_file():
        from paceline.data.dataset import Dataset

        sources["documents"] = f"the {facts['num_rows']} rows of the data"
        return Documents(Dataset.open(file.parent).lengths), facts
    mean = facts["num_tokens"] / facts["num_rows"]
    sources["documents"] = f"all of the mean, {mean:.0f} tokens, as the rows are not beside {file.name}"
    return Documents((max(1, round(mean)),)), facts


def _cached(config: RunConfig, sources: dict[str, str]) -> tuple[RunConfig, int | None]:
    """The run file with what `target.cache` fixes, and bytes of a token there; None: there is no cache, or not yet.

    Raises: ConfigError, DataError.
    """
    if config.target.cache is None:
        return config, None
    place = Path(config.target.cache)
    if not place.exists():
        sources["cache"] = f"{place} is not there yet: features as the target would deliver them"
        return config, None
    from paceline.plan.memory import kept_bytes
    from paceline.train.feature_cache import adopted, read_manifest

    made = read_manifest(place)
    sources["cache"] = f"{place} has features in {made.dtype}; that it is of this run is not compared"
    return adopted(config), kept_bytes(1, made.num_states, made.hidden_size, made.dtype)


# ------------------------------------------------------------------ what if


def what_if_record(run_dir: Path, texts: Sequence[str]) -> dict[str, Any]:
    """What a run was measured to do, and what other splits would. Raises: ConfigError, CheckpointError."""
    from paceline.cli.run_state import open_run
    from paceline.plan.what_if import Measured, Split, parse_split, what_if

    folder = open_run(run_dir)
    config = folder.read_config()
    topology = config.topology
    split = Split("colocated" if topology.layout == "colocated" else "split", topology.targets, topology.drafters)
    wanted = [parse_split(text, split) for text in texts]
    has_parts = topology.gpus_per_target > 1
    if has_parts and any(each.layout == "colocated" for each in (split, *wanted)):
        raise ConfigError(
            f"{run_dir} has topology.gpus_per_target={topology.gpus_per_target}: in turn one part of a target works at "
            "a time, side by side all do, on rows that follow one another; what was measured of the one says nothing "
            "of the other"
        )
    is_cached = config.target.cache is not None
    if is_cached and any(each.layout == "split" and each.drafters > 1 for each in wanted):
        raise ConfigError(
            f"{run_dir} reads features from {config.target.cache}: there are no targets to share GPUs with; of several "
            "drafters each reads its own: --what-if layout=colocated,drafters=N"
        )
    verdict = measured_verdict(run_dir, config)
    measured = Measured.of(split, verdict.batches_per_s, verdict.target_per_s, verdict.drafter_per_s)
    moved = 0.0 if is_cached else _transport_s(run_dir, config)
    answers = [what_if(measured, each, moved) for each in wanted]
    now = what_if(measured, split)
    # parts that have fewer rows than they could take are slower than they could be, and do not wait as one
    is_least = has_parts and verdict.kind != "producer-bound"
    return {
        "run": str(run_dir),
        "cache": config.target.cache,
        "measured": {
            **_split_record(split),
            "batches_per_s": measured.batches_per_s,
            "target_s": measured.target_s,
            "drafter_s": measured.drafter_s,
            "closed_form_batches_per_s": now.batches_per_s,
            "seconds": verdict.seconds,
            "gpus_per_target": topology.gpus_per_target,
        },
        "verdict": {"kind": verdict.kind, "line": verdict.line()},
        "transport_s": moved if split.layout == "colocated" else None,
        "what_if": [
            {
                **_split_record(answer.split),
                "batches_per_s": answer.batches_per_s,
                "gain": answer.gain,
                "limit": answer.limit,
                "at_most_batches_per_s": answer.split.drafters / measured.drafter_s
                if is_least and answer.limit == "targets"
                else None,
            }
            for answer in answers
        ],
    }


def _split_record(split: Split) -> dict[str, Any]:
    return {"layout": split.layout, "targets": split.targets, "drafters": split.drafters}


def measured_verdict(run_dir: Path, config: RunConfig) -> Verdict:
    """The verdict on the windows of ``profile/stages.jsonl``. Raises: ConfigError where there are none.

    Of targets over several GPUs it is the run's own, from ``metrics.jsonl``: several threads drive such a target, and
    the profile does not have when it was without any.
    """
    if config.topology.gpus_per_target > 1:
        return _own_verdict(run_dir, config)
    from paceline.profiling.live import STAGES_FILE
    from paceline.profiling.verdict import drop_warm_up, judge

    file = run_dir / "profile" / STAGES_FILE
    hint = f"switch profiling on for a while: paceline profile on {run_dir}, or train with --profile-interval 10"
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        windows = stage_windows(lines)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); {hint}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    windows = drop_warm_up(windows, 1) if len(windows) > 3 else windows
    depth, a_step, a_batch = config.pipeline.queue_depth, config.optim.tokens_per_step, config.pipeline.tokens_per_batch
    found = judge(
        windows,
        targets=config.topology.targets,
        queue_depth=depth if isinstance(depth, int) else 1,
        batches_per_step=a_step // a_batch if isinstance(a_step, int) and isinstance(a_batch, int) else 1,
        in_turn=config.topology.layout == "colocated",
    )
    if found.batches_per_s <= 0.0:
        raise ConfigError(f"{file} tells of no batch; {hint}")
    return found


def _own_verdict(run_dir: Path, config: RunConfig) -> Verdict:
    """What the last process of a run says of it. Raises: ConfigError where there are too few steps."""
    from paceline.cli.run_state import recent_metrics, verdict_of
    from paceline.control.run_folder import RunFolder

    run = RunFolder(run_dir)
    found = verdict_of(recent_metrics(run), config)
    if found is None or found.batches_per_s <= 0.0:
        raise ConfigError(f"{run.metrics_file} has no step behind the first ones of the last start: let the run go on")
    return found


def stage_windows(lines: Sequence[dict[str, Any]]) -> list[Window]:
    """Windows for a verdict, one an interval of ``stages.jsonl``; validation and saves are left out of their time.

    Of several drafters the waits are averaged, as those of targets are in a verdict.
    """
    from paceline.profiling.verdict import Window

    intervals: dict[float, list[dict[str, Any]]] = {}
    for line in lines:
        intervals.setdefault(float(line.get("t", 0.0)), []).append(line)
    windows = []
    for _, threads in sorted(intervals.items()):
        drafters = [each for each in threads if each["role"].startswith("drafter") and each["batches"] > 0]
        if not drafters:
            continue
        busy = sum(each["wall_s"] - _seconds(each, "validate", "checkpoint_snapshot") for each in drafters)
        get_s = sum(_seconds(each, "get_wait") for each in drafters)
        put_s = sum(_seconds(each, "put_wait") for each in threads if each["role"].startswith("target"))
        batches = sum(each["batches"] for each in drafters)
        windows.append(Window(max(busy / len(drafters), 1e-9), batches, get_s / len(drafters), put_s))
    return windows


def _seconds(line: dict[str, Any], *stages: str) -> float:
    """Time of a thread in stages, batches that were not counted estimated."""
    found = [float(line["stages"][stage]["total_ms"]) for stage in stages if stage in line["stages"]]
    return sum(found) / 1e3 * int(line.get("sampled_one_in", 1))


def _transport_s(run_dir: Path, config: RunConfig) -> float:
    """Seconds of a micro-batch's features into a host's store, for a run in turn; 0 where its sizes are not known."""
    from paceline.plan.speed import STORE_GB_PER_S

    try:
        draft = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["draft"]
        states, width = len(draft["target_layer_ids"]), int(draft["hidden_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
    size, slots = 4 if config.target.dtype == "float32" else 2, config.pipeline.tokens_per_batch
    return slots * states * width * size / 1e9 / STORE_GB_PER_S if isinstance(slots, int) else 0.0


def _what_if_lines(record: dict[str, Any]) -> list[str]:
    measured, is_cached = record["measured"], record["cache"] is not None
    target = "reading, a thread," if is_cached else "a target"
    if (parts := measured["gpus_per_target"]) > 1:
        target += f" of {parts} GPUs"
    lines = [
        f"measured: {_name(measured, is_cached)}, {measured['batches_per_s']:.3g} micro-batches a second over "
        f"{measured['seconds']:.0f} s; {target} needs {measured['target_s']:.3g} s for one, a drafter "
        f"{measured['drafter_s']:.3g} s (the closed form gives {measured['closed_form_batches_per_s']:.3g} a second)",
        record["verdict"]["line"],
    ]
    if is_cached:
        lines.append(
            f"no target runs: what is said of targets is said of threads that read {record['cache']}, as if the disk "
            "gave each as much as now"
        )
    if record["transport_s"]:
        lines.append(f"side by side, features take {1e3 * record['transport_s']:.0f} ms more on each side: calculated")
    for answer in record["what_if"]:
        limit = {"in turn": "in turn", "targets": "the targets limit", "drafters": "the drafters limit"}
        if is_cached:
            limit["targets"] = "reading limits"
        most, told = answer["at_most_batches_per_s"], f"{answer['batches_per_s']:.3g} micro-batches a second"
        if most is not None:
            limit["targets"] = f"at most {most:.3g}, as the drafters allow"
        lines.append(
            f"{_name(answer, is_cached)}: {'at least ' * (most is not None)}{told}, {answer['gain']:.2f}x; "
            f"{limit[answer['limit']]}"
        )
    if any(answer["at_most_batches_per_s"] is not None for answer in record["what_if"]):
        lines.append(
            "at least: what a target over several GPUs could do is known from runs whose drafter waits for it "
            "(producer-bound); in others its parts may have fewer rows than they could take"
        )
    return lines


def _name(split: dict[str, Any], is_cached: bool) -> str:
    if split["layout"] == "colocated":
        return f"{split['drafters']} in turn"
    return f"{split['targets']} {'reading threads' if is_cached else 'targets'} + {split['drafters']} drafters"


# ------------------------------------------------------------------ the terminal


def show(console: Console, record: dict[str, Any]) -> None:
    """The plan as tables."""
    draft, row = record["drafter"], record["micro_batch"]
    console.print(
        f"{record['target']} on {record['gpus']} x {record['card']}: {draft['kind']} drafter of {draft['num_layers']} "
        f"layers and {draft['parameters'] / 1e6:,.0f} M parameters, blocks of {draft['block_size']}; "
        f"{row['anchors']:,} anchors in micro-batches of {row['slots']:,} tokens",
        markup=False,
    )
    best = record["best"]
    if (each := record["gpus_per_target"]) > 1:
        console.print(
            f"a target takes {each} GPUs or more, over which its layers are split: topology.gpus_per_target, here the "
            "number behind the x",
            markup=False,
        )
    if best is None:
        console.print("no split fits: see what is missing", style="yellow")
    ranked = sorted(record["splits"], key=lambda each: -each["tok_per_s"])
    shown = [each for each in ranked if each["layout"] == "colocated"]
    shown += [each for each in ranked if each["layout"] == "split"][: MOST_ROWS - 1]
    rows = [_split_row(each, best) for each in sorted(shown, key=lambda each: -each["tok_per_s"])]
    left = len(record["splits"]) - len(rows)
    head = ("split", "tok/s", "of the best", "hours", "GPU-hours", "GiB", "limit")
    title = f"Splits, to {record['tokens']:,.0f} tokens: a calculation" + (
        f"; {left} slower ones left out" * (left > 0)
    )
    _table(console, title, head, rows)
    if any(each["idle_frac"] > 0.005 for each in shown):
        console.print(
            f"idle: a step's {row['batches_per_step']} micro-batches do not share out evenly over the drafters; --even "
            "lets steps grow, as a larger optim.tokens_per_step would",
            style="dim",
        )
    works, blocks = record["flops"]["per_token"], record["flops"]["per_anchor_block"]
    rows = [
        (
            name,
            _gigaflop(work["forward"]),
            _gigaflop(work["backward"]),
            _gigaflop(sum(blocks[name].values())) if name in blocks else "",
        )
        for name, work in works.items()
    ]
    total = sum(sum(work.values()) for work in works.values())
    rows.append(("all", _gigaflop(total), "", _gigaflop(sum(sum(work.values()) for work in blocks.values()))))
    _table(console, "GFLOP", ("part", "a token, forward", "backward", "an anchor block"), rows)
    if (read := record["reading"]) is not None:
        console.print(_reading(read), markup=False)
    kinds = ("weights", "optimizer", "activations", "channel", "total")
    rows = [(role, *(f"{parts[f'{kind}_gib']:.1f}" for kind in kinds)) for role, parts in record["memory"].items()]
    _table(console, "Memory, GiB", ("role", "weights", "optimizer", "activations", "features", "all"), rows)
    if best is not None:
        console.print(f"the best, as overrides of a run file: {' '.join(record['run_file'])}", markup=False)
    cache, takes = record["offline_cache_bytes"], "would take" if read is None else "takes"
    console.print(f"an offline cache of the features {takes} {_bytes(cache)} of disk", markup=False)
    guesses = [name for name, each in record["assumptions"].items() if "guess" in str(each["source"])]
    console.print(f"assumed, not measured: {', '.join(guesses)} (--json has values and sources)", style="dim")


def _reading(read: dict[str, Any]) -> str:
    """What a run from a cache asks of the disk."""
    rate, host = _bytes(1e9 * read["gb_per_s"]), _bytes(1e9 * read["gb_per_s_per_host"])
    each = "" if rate == host else f", {host} on each host"
    text = (
        f"no target runs: features are read from {read['cache']}, {read['bytes_per_token']:,} bytes a token. At this "
        f"speed that is {rate} a second{each}; a slower disk or network is the limit"
    )
    if not read["is_ahead"]:
        text += ". Each drafter reads its own in turn with its work, and the time of that comes on top"
    return text


def _split_row(split: dict[str, Any], best: dict[str, Any] | None) -> tuple[str, ...]:
    each = f"x{split['gpus_per_target']}" if split["gpus_per_target"] > 1 else ""
    name = "in turn" if split["layout"] == "colocated" else f"{split['targets']}{each}+{split['drafters']}"
    name = name if split["targets"] else f"{split['drafters']} drafters"
    share = f"{split['tok_per_s'] / best['tok_per_s']:.0%}" if best else ""
    limit = split["limit"] if split["fits"] else f"does not fit: {split['missing_gib']:.1f} GiB too little"
    if split["fits"] and split["idle_frac"] > 0.005:
        limit += f"; idle {split['idle_frac']:.0%}"
    return (
        name,
        f"{split['tok_per_s']:,.0f}",
        share,
        f"{split['hours']:,.1f}",
        f"{split['gpu_hours']:,.1f}",
        f"{split['memory_gib']:.1f}",
        limit,
    )


def _table(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 or name == "limit" else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def _gigaflop(flop: float) -> str:
    return f"{flop / 1e9:,.3g}" if flop < 1e10 else f"{flop / 1e9:,.1f}"


def _bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} bytes"


# ------------------------------------------------------------------ files


def _check_place(option: str, place: Path | None) -> None:
    """Raises: ConfigError if a file cannot be written there."""
    if place is None or (str(place) == "-" and option == "--json"):
        return
    if place.is_dir():
        raise ConfigError(f"{option} {place} is a folder; a file is wanted")
    if not place.absolute().parent.is_dir():
        raise ConfigError(f"{option} {place}: there is no folder {place.absolute().parent}")


def _put(option: str, place: Path, text: str) -> None:
    if str(place) == "-":
        typer.echo(text)
        return
    try:
        write_atomically(place, text)
    except OSError as error:
        raise ConfigError(f"{option} {place} cannot be written: {error.strerror or error}") from error
