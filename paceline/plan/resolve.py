"""Every `auto` of the run file becomes a number here, once; what contradicts itself is refused here."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from paceline.config import Draft, RunConfig
from paceline.data.chat import template_hash
from paceline.data.dataset import Dataset, tokenizer_fingerprint
from paceline.data.packing import PackedBatches
from paceline.errors import ConfigError, DataError
from paceline.models.draft import DraftShape
from paceline.models.kinds import drafter_class, loss_mix, needs_last_hidden
from paceline.models.loading import TargetShape, check_layer_ids, default_layer_ids
from paceline.models.split import lanes, part_devices
from paceline.plan.memory import GIB, USABLE, count_parameters, memory_of

TOKENS_PER_STEP = 98_304
"""Packed tokens of an optimizer step: 32 rows of 3,072, the public recipe on one host of eight."""
MIN_STEPS = 500
"""A short run takes smaller steps rather than fewer."""


@dataclass(frozen=True)
class ResolvedRun:
    """A configuration without `auto`, and what follows from it.

    Attributes:
        config: The resolved tree; what the run folder keeps.
        dataset: What `data.path` holds.
        draft: Shape of the drafter.
        draft_token_ids: Tokens that can be drafted, int64 ``[Vd]`` ascending; None: all of the target's.
        batches: The training rows as numbered micro-batches.
        validation_rows: Held-out data set rows, those that are measured.
        num_anchors: A, anchor slots of a micro-batch.
        batches_per_step: G, micro-batches of an optimizer step.
        total_steps: Optimizer steps of the run, over which the learning-rate schedule spans.
        longest_row: Tokens of the longest row of the data set.
        layout_note: Why `topology.layout` auto became what it is, where memory decided it.
    """

    config: RunConfig
    dataset: Dataset
    draft: DraftShape
    draft_token_ids: Tensor | None
    batches: PackedBatches
    validation_rows: list[int]
    num_anchors: int
    batches_per_step: int
    total_steps: int
    longest_row: int
    layout_note: str | None = None

    @property
    def end_batch(self) -> int:
        """Number after the last micro-batch that the run uses."""
        return min(len(self.batches), self.total_steps * self.batches_per_step)


@dataclass(frozen=True)
class Initial:
    """The drafter that a run starts from.

    Attributes:
        place: Where it was read, for messages.
        token_ids: Tokens that it can draft, int64 ``[Vd]`` ascending; None: all of the target's.
    """

    place: str
    shape: DraftShape
    token_ids: Tensor | None


def resolve(
    config: RunConfig, shape: TargetShape, dataset: Dataset, tokenizer: Any, initial: Initial | None = None
) -> ResolvedRun:
    """Resolve a run file against its target and data.

    Args:
        tokenizer: The target's own.
        initial: What `draft.init` holds; its shape becomes the drafter's.
    Raises: ConfigError, DataError.
    """
    _check_data(config, shape, dataset, tokenizer)
    device = resolve_device(config.run.device)
    on_gpu = device.type == "cuda"
    train_rows, validation_rows = dataset.split(config.data.validation)
    if initial is None:
        draft_token_ids = choose_draft_vocab(config.draft, shape, dataset, train_rows)
        draft = _resolve_draft(config, shape, dataset, tokenizer)
        if draft_token_ids is not None:
            draft = dataclasses.replace(draft, draft_vocab_size=len(draft_token_ids))
    else:
        draft, draft_token_ids = initial.shape, initial.token_ids
        config = _adopted(config, initial, shape)
        choose_mask_token(draft.mask_token_id, shape, tokenizer, dataset)
    longest = int(dataset.lengths.max())

    if isinstance(config.pipeline.tokens_per_batch, int):
        tokens_per_batch = config.pipeline.tokens_per_batch
    else:
        tokens_per_batch = max(12_288 if on_gpu else 2_048, math.ceil(longest / 128) * 128)
    if tokens_per_batch < longest:
        raise ConfigError(
            f"pipeline.tokens_per_batch={tokens_per_batch} is shorter than the longest row, {longest} tokens: "
            f"documents stay whole, so use {longest} or more, or prepare the data with a smaller --max-length"
        )
    if draft.block_size > longest:
        raise ConfigError(
            f"draft.block_size={draft.block_size} is larger than every row of {config.data.path}: the longest has "
            f"{longest} tokens"
        )
    batches = PackedBatches(
        dataset, train_rows, tokens_per_batch=tokens_per_batch, epochs=config.data.epochs, seed=config.run.seed
    )
    batches_per_step = _batches_per_step(config, tokens_per_batch, len(batches))
    possible = math.ceil(len(batches) / batches_per_step)
    total_steps = min(possible, config.run.max_steps or possible)

    num_anchors = _num_anchors(config, tokens_per_batch, draft.block_size, on_gpu)
    layout, layout_note = config.topology.layout, None
    if layout == "auto":
        sizes = {"num_anchors": num_anchors, "batches_per_step": batches_per_step, "longest_row": longest}
        layout, layout_note = _choose_layout(config, shape, draft, device, tokens_per_batch, sizes)
    _check_targets(config, shape, layout)
    _check_parts(config, shape, draft, device, layout)
    queue_depth = config.pipeline.queue_depth
    if isinstance(queue_depth, str):
        queue_depth = max(2 * config.topology.drafters + config.topology.targets, config.pipeline.min_ready)
    resolved = config.model_copy(
        update={
            "run": config.run.model_copy(update={"device": str(device)}),
            "target": config.target.model_copy(
                update={
                    "dtype": _resolve_dtype(config.target.dtype, on_gpu),
                    "layer_ids": draft.target_layer_ids,
                    "packing": config.target.packing if on_gpu or config.target.packing == "packed" else "per_document",
                }
            ),
            "draft": config.draft.model_copy(
                update={
                    "dtype": _resolve_dtype(config.draft.dtype, on_gpu),
                    "options": draft.options,
                    "mask_token_id": draft.mask_token_id,
                    "is_causal": draft.is_causal,
                    "num_attention_heads": draft.num_attention_heads,
                    "num_key_value_heads": draft.num_key_value_heads,
                    "head_dim": draft.head_dim,
                    "intermediate_size": draft.intermediate_size,
                }
            ),
            "loss": config.loss.model_copy(update={"gamma": _resolve_gamma(config, draft), **vars(loss_mix(config))}),
            "optim": config.optim.model_copy(update={"tokens_per_step": batches_per_step * tokens_per_batch}),
            "topology": config.topology.model_copy(
                update={"layout": layout, "threads": _resolve_threads(config, layout, on_gpu)}
            ),
            "pipeline": config.pipeline.model_copy(
                update={"tokens_per_batch": tokens_per_batch, "queue_depth": queue_depth}
            ),
        }
    )
    return ResolvedRun(
        config=resolved,
        dataset=dataset,
        draft=draft,
        draft_token_ids=draft_token_ids,
        batches=batches,
        validation_rows=[int(row) for row in validation_rows[: config.eval.validate_rows]],
        num_anchors=num_anchors,
        batches_per_step=batches_per_step,
        total_steps=total_steps,
        longest_row=longest,
        layout_note=layout_note,
    )


def _choose_layout(
    config: RunConfig,
    shape: TargetShape,
    draft: DraftShape,
    device: torch.device,
    tokens_per_batch: int,
    sizes: dict[str, int],
) -> tuple[Literal["colocated", "split"], str | None]:
    """What `topology.layout` auto means, and why where memory decides it.

    Args:
        sizes: What `memory_of` wants to know beside shapes.
    """
    topology, target = config.topology, config.target
    is_ray = topology.executor == "ray"
    if target.cache is not None:  # read beside the drafter; with Ray by each rank for itself
        return ("colocated" if is_ray else "split"), None
    if device.type != "cuda" or topology.targets > 1 or target.server is not None or topology.gpus_per_target > 1:
        return "split", None
    if not is_ray:
        return "colocated", None
    if topology.drafters == 1:  # in turn that would be one process
        return "split", None
    together = config.model_copy(
        update={
            "run": config.run.model_copy(update={"device": str(device)}),
            "target": target.model_copy(update={"dtype": _resolve_dtype(target.dtype, True)}),
            "draft": config.draft.model_copy(update={"dtype": _resolve_dtype(config.draft.dtype, True)}),
            "pipeline": config.pipeline.model_copy(update={"tokens_per_batch": tokens_per_batch, "queue_depth": 1}),
            "topology": topology.model_copy(update={"layout": "colocated"}),
        }
    )
    parameters, last_hidden = count_parameters(draft), needs_last_hidden(config)
    needed = memory_of(together, draft, shape, parameters=parameters, last_hidden=last_hidden, **sizes).total_bytes
    there = torch.cuda.get_device_properties(device).total_memory
    told = f"target and drafter together need {needed / GIB:.1f} GiB of a GPU's {there / GIB:.1f} by the memory plan"
    if needed <= USABLE * there:
        return "colocated", f"every GPU has both in turn: {told}"
    return "split", f"targets run beside drafters: {told}"


def resolve_device(name: str) -> torch.device:
    """The device behind `run.device`. Raises: ConfigError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"run.device={name!r} is no device: auto, cpu, cuda or cuda:N was wanted") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"run.device={name!r}: auto, cpu, cuda or cuda:N was wanted")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"run.device={name!r}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here")
    return device


def choose_mask_token(wanted: int | str, shape: TargetShape, tokenizer: Any, dataset: Dataset) -> int:
    """The mask token: a row of the target's embedding that never occurs in data, and neither pads nor ends a turn.

    ``auto`` takes the first row past the tokenizer, else a special token that nothing uses. The embedding is frozen and
    is not grown.
    Raises: ConfigError with the reason, and a candidate where there is one.
    """
    taken: dict[int | None, str] = {shape.pad_token_id: "the padding token"}
    taken |= {i: "an end-of-turn token" for i in shape.eos_token_ids}
    for name in ("pad", "eos", "bos", "unk"):
        taken.setdefault(getattr(tokenizer, f"{name}_token_id", None), f"the tokenizer's {name} token")
    template = getattr(tokenizer, "chat_template", None) or ""
    past = range(len(tokenizer), shape.vocab_size)
    specials = sorted(
        (
            i
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in str(template)
        ),
        reverse=True,
    )
    candidate = next(
        (i for i in (*past, *specials) if i not in taken and i < shape.vocab_size and not dataset.contains_token(i)),
        None,
    )
    hint = f"; token {candidate} is unused" if candidate is not None else ""
    if wanted == "auto":
        if candidate is None:
            raise ConfigError(
                f"draft.mask_token_id=auto: all {shape.vocab_size} rows of the target's embedding are in use (the "
                f"tokenizer has {len(tokenizer)} tokens and no spare special one); name a token that never occurs in "
                "your data"
            )
        return candidate
    token = int(wanted)
    if not 0 <= token < shape.vocab_size:
        raise ConfigError(
            f"draft.mask_token_id={token} is not in 0..{shape.vocab_size - 1}: the target's vocabulary has "
            f"{shape.vocab_size} rows, and its embedding is frozen and is not grown{hint}"
        )
    if token in taken:
        raise ConfigError(f"draft.mask_token_id={token} is {taken[token]}{hint}")
    if dataset.contains_token(token):
        raise ConfigError(f"draft.mask_token_id={token} occurs in the training data{hint}")
    return token


def choose_draft_vocab(draft: Draft, shape: TargetShape, dataset: Dataset, rows: np.ndarray) -> Tensor | None:
    """The tokens that the drafter can draft, as `draft.vocab` says; the target's end tokens are always among them.

    Args:
        rows: Training rows; what held-out rows alone contain must not be known.
    Returns: int64 ``[Vd]`` ascending; None: all.
    Raises: ConfigError if the kind cannot leave tokens out, or more are wanted than there are.
    """
    if draft.vocab == "full":
        return None
    if not drafter_class(draft.kind).supports_draft_vocab:
        raise ConfigError(f"draft.vocab={draft.vocab}: draft.kind={draft.kind} drafts from the whole vocabulary: full")
    supervised, every = dataset.count_tokens(rows, shape.vocab_size)
    ends = [token for token in shape.eos_token_ids if token < shape.vocab_size]
    if draft.vocab == "observed":
        every[ends] += 1
        return torch.from_numpy(np.flatnonzero(every))
    if not len(ends) < draft.vocab < shape.vocab_size:
        raise ConfigError(
            f"draft.vocab={draft.vocab}: more than the {len(ends)} end tokens and fewer than the target's "
            f"{shape.vocab_size} tokens were wanted; draft.vocab=full drafts from all"
        )
    supervised[ends] = np.iinfo(np.int64).max
    # by count, then by id: tokenizers number frequent tokens first, so what the data lacks is filled up sensibly
    ranked = np.lexsort((np.arange(shape.vocab_size), -every, -supervised))
    return torch.from_numpy(np.sort(ranked[: draft.vocab]))


def _check_targets(config: RunConfig, shape: TargetShape, layout: str) -> None:
    targets = config.topology.targets
    if config.target.fp8 and not resolve_device(config.run.device).type == "cuda":
        raise ConfigError("target.fp8=true: only a GPU gains by it, and run.device is the CPU")
    if config.target.server is not None:
        _check_server(config, layout)
    if targets > 1 and layout == "colocated":
        raise ConfigError(
            f"topology.targets={targets} with topology.layout=colocated: in turn there is one target; use layout=split"
        )
    if config.pipeline.transport != "target" and (config.topology.executor == "local" or layout == "colocated"):
        where = "executor=local" if config.topology.executor == "local" else "layout=colocated"
        raise ConfigError(
            f"pipeline.transport={config.pipeline.transport} with topology.{where}: no features travel there, and none "
            "would be rounded; leave the key out (a run that had it goes on with --allow-change pipeline.transport), "
            "or use executor=ray and layout=split"
        )
    if config.topology.executor == "ray":
        _check_ray(config, layout)
        return
    if config.topology.drafters > 1:
        raise ConfigError(f"topology.drafters={config.topology.drafters} with executor=local: use executor=ray")
    if config.topology.address is not None:
        raise ConfigError(
            f"topology.address={config.topology.address} with executor=local: it names a Ray cluster; use executor=ray"
        )
    if targets > 1 and config.target.server is None and shape.rope.get("rope_type") in ("dynamic", "longrope"):
        raise ConfigError(
            f"topology.targets={targets}: Transformers rewrites the {shape.rope['rope_type']} frequencies of "
            f"{shape.model_type} by the length of each forward, so that threads would disturb each other; use targets=1"
        )


def _check_parts(config: RunConfig, shape: TargetShape, draft: DraftShape, device: torch.device, layout: str) -> None:
    """Whether the target can be split over as many GPUs as is asked for."""
    count, topology = config.topology.gpus_per_target, config.topology
    seen = f"topology.gpus_per_target={count}"
    if count <= 1:
        return
    for name in ("server", "cache"):
        if getattr(config.target, name) is not None:
            raise ConfigError(f"{seen} with target.{name}: no target runs here; leave the key out")
    layers = shape.num_layers if needs_last_hidden(config) else draft.target_layer_ids[-1] + 1
    if count > layers:
        raise ConfigError(f"{seen}: {layers} layers of {shape.model_type} run, and a part has at least one")
    if (rope := shape.rope.get("rope_type")) in ("dynamic", "longrope"):
        raise ConfigError(
            f"{seen}: Transformers rewrites the {rope} frequencies of {shape.model_type} by the length of each "
            "forward, and the parts are at different rows at a time; use 1"
        )
    if topology.executor == "ray" and layout == "colocated":
        raise ConfigError(
            f"{seen} with executor=ray and topology.layout=colocated: there each drafter has a target on its own GPU; "
            "use layout=split"
        )
    if topology.executor == "local":
        if topology.targets > 1:
            raise ConfigError(
                f"{seen} with topology.targets={topology.targets} and executor=local: one target, whose parts have "
                f"{lanes(count)} rows under way, is all that a process has; use targets=1, or executor=ray"
            )
        part_devices(device, count)


def _check_server(config: RunConfig, layout: str) -> None:
    """What a target that a server runs cannot be told here."""
    if config.target.server_files is None:
        raise ConfigError(
            "target.server without target.server_files: name the folder that the server writes hidden states to (its "
            "shared_storage_path), as seen from here"
        )
    if config.target.fp8 or config.target.packing == "packed":
        key = "target.fp8=true" if config.target.fp8 else "target.packing=packed"
        raise ConfigError(f"{key} with target.server: the server computes as it was started; leave the key out")
    if config.topology.executor == "ray":
        raise ConfigError("topology.executor=ray with target.server: threads of this process ask it; use local")
    if layout == "colocated":
        raise ConfigError(
            "topology.layout=colocated with target.server: in turn the server would stand still while the drafter "
            "trains; use layout=split"
        )


def _check_ray(config: RunConfig, layout: str) -> None:
    if layout == "colocated" and config.topology.drafters == 1:
        raise ConfigError(
            "topology.layout=colocated with executor=ray and one drafter is one process: use executor=local, more "
            "topology.drafters, or layout=split"
        )
    if layout == "split" and config.target.cache is not None:
        raise ConfigError(
            "topology.layout=split with executor=ray and target.cache: there is no target to give a process to; use "
            "layout=colocated with several drafters, or executor=local"
        )
    if config.topology.gpus_per_target == 0 and config.topology.drafters > 1:
        raise ConfigError("topology.gpus_per_target=0 with several drafters: which one's GPU would they share? Use 1")
    if config.pipeline.feature_cache_gib:
        raise ConfigError(
            f"pipeline.feature_cache_gib={config.pipeline.feature_cache_gib} with executor=ray: features are made "
            "elsewhere and not kept; use 0"
        )


def _check_data(config: RunConfig, shape: TargetShape, dataset: Dataset, tokenizer: Any) -> None:
    longest = int(dataset.lengths.max())
    if longest > config.data.max_length:
        raise DataError(
            f"{config.data.path} has a row of {longest} tokens, above data.max_length={config.data.max_length}: "
            "raise it, or prepare the data again with that --max-length"
        )
    if longest > shape.max_position_embeddings:
        raise DataError(
            f"{config.data.path} has a row of {longest} tokens, and {config.target.path} has "
            f"{shape.max_position_embeddings} positions: prepare the data with a smaller --max-length"
        )
    found = tokenizer_fingerprint(tokenizer)
    if found != dataset.info.tokenizer_fingerprint:
        raise DataError(
            f"{config.data.path} was prepared with another tokenizer than that of {config.target.path} "
            f"(tokenizer_fingerprint {dataset.info.tokenizer_fingerprint[:12]}, now {found[:12]}): prepare it again "
            "with --tokenizer of the target"
        )
    template = template_hash(tokenizer)
    own = config.data.template == "target" and tokenizer.chat_template  # a base model has none to differ from
    if own and template != dataset.info.template_hash:
        raise DataError(
            f"{config.data.path} was prepared with another chat template than that of {config.target.path} "
            f"(template_hash {dataset.info.template_hash[:12]}, now {template[:12]}): prepare it again with the "
            "target's own, or set data.template=prepared if the server will be given the other one"
        )
    if (largest := dataset.largest_token()) >= shape.vocab_size:
        raise DataError(
            f"{config.data.path} holds token {largest}, and the embedding of {config.target.path} has "
            f"{shape.vocab_size} rows: its tokenizer and its weights do not fit together, or the data set is damaged"
        )


def _resolve_draft(config: RunConfig, shape: TargetShape, dataset: Dataset, tokenizer: Any) -> DraftShape:
    draft = config.draft
    layer_ids = config.target.layer_ids
    if isinstance(layer_ids, str):
        layer_ids = default_layer_ids(shape.num_layers)
    heads, kv_heads, head_dim = _head_geometry(config, shape)
    types = draft.layer_types
    if isinstance(types, str):
        types = (f"{types}_attention",) * draft.num_layers  # type: ignore[assignment]  # full or sliding
    rope = {key: value for key, value in shape.rope.items() if key not in ("partial_rotary_factor",)}
    rope = {key: value for key, value in rope.items() if not key.startswith("mrope")}  # text positions are plain ones
    kind = drafter_class(draft.kind)
    resolved = DraftShape(
        kind=draft.kind,
        options=kind.check_options(draft.options),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size if draft.intermediate_size == "auto" else draft.intermediate_size,
        num_hidden_layers=draft.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=shape.vocab_size,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        rope=rope,
        block_size=draft.block_size,
        mask_token_id=choose_mask_token(draft.mask_token_id, shape, tokenizer, dataset),
        target_layer_ids=check_layer_ids(layer_ids, shape.num_layers),
        num_target_layers=shape.num_layers,
        layer_types=tuple(types),
        is_causal=False if draft.is_causal == "auto" else draft.is_causal,
        sliding_window=draft.sliding_window if "sliding_attention" in types else None,
    )
    kind.check_shape(resolved)
    return resolved


def _adopted(config: RunConfig, initial: Initial, shape: TargetShape) -> RunConfig:
    """The configuration with the shape of the drafter that the run starts from.

    Raises: ConfigError naming each key that was set otherwise, and what of the drafter is not of this target.
    """
    found = initial.shape
    values: dict[str, Any] = {
        "kind": found.kind,
        "options": found.options,
        "num_layers": found.num_hidden_layers,
        "block_size": found.block_size,
        "mask_token_id": found.mask_token_id,
        "layer_types": found.layer_types,
        "is_causal": found.is_causal,
        "sliding_window": found.sliding_window,
        "num_attention_heads": found.num_attention_heads,
        "num_key_value_heads": found.num_key_value_heads,
        "head_dim": found.head_dim,
        "intermediate_size": found.intermediate_size,
        "vocab": "full" if found.draft_vocab_size is None else found.draft_vocab_size,
    }
    wanted = {key: getattr(config.draft, key) for key in config.draft.model_fields_set & values.keys()}
    if "options" in wanted:  # those that are left out are the drafter's
        wanted["options"] = found.options | wanted["options"]
    if wanted.get("layer_types") in ("full", "sliding"):
        wanted["layer_types"] = (f"{wanted['layer_types']}_attention",) * found.num_hidden_layers
    different = [
        f"draft.{key}={_plain(wanted[key])}, the drafter has {_plain(value)}"
        for key, value in values.items()
        if wanted.get(key, "auto") not in ("auto", value)
    ]
    if config.target.layer_ids not in ("auto", found.target_layer_ids):
        different.append(
            f"target.layer_ids={_plain(config.target.layer_ids)}, the drafter has {_plain(found.target_layer_ids)}"
        )
    target = {
        "hidden_size": (shape.hidden_size, found.hidden_size),
        "num_target_layers": (shape.num_layers, found.num_target_layers),
        "vocab_size": (shape.vocab_size, found.vocab_size),
    }
    different += [
        f"{key}: the target has {here}, the drafter was made for {there}"
        for key, (here, there) in target.items()
        if here != there
    ]
    if different:
        raise ConfigError(
            f"draft.init={initial.place} is another drafter than is asked for; leave these keys out, or start from "
            "another folder\n  " + "\n  ".join(different)
        )
    return config.model_copy(update={"draft": config.draft.model_copy(update=values)})


def _plain(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _head_geometry(config: RunConfig, shape: TargetShape) -> tuple[int, int, int]:
    """Heads of the drafter: the target's own shape, or heads of 128 where the target's are wider."""
    draft = config.draft
    if shape.head_dim <= 128:
        automatic = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    else:
        heads = max(1, shape.hidden_size // 128)
        automatic = (heads, math.gcd(heads, 8), 128)
    heads, kv_heads, head_dim = (
        auto if chosen == "auto" else chosen
        for auto, chosen in zip(
            automatic, (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim), strict=True
        )
    )
    if min(heads, kv_heads, head_dim) < 1 or heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"draft.num_attention_heads={heads} has to be a multiple of draft.num_key_value_heads={kv_heads}, and "
            f"draft.head_dim={head_dim} even"
        )
    return heads, kv_heads, head_dim


def _batches_per_step(config: RunConfig, tokens_per_batch: int, num_batches: int) -> int:
    tokens = config.optim.tokens_per_step
    if isinstance(tokens, str):  # whatever the number of drafters: the same file trains the same
        return max(1, min(TOKENS_PER_STEP // tokens_per_batch, num_batches // MIN_STEPS))
    if tokens < 1 or tokens % tokens_per_batch:
        below = tokens // tokens_per_batch * tokens_per_batch
        near = f"{below} or {below + tokens_per_batch}" if below > 0 else str(tokens_per_batch)
        raise ConfigError(
            f"optim.tokens_per_step={tokens} is no multiple of pipeline.tokens_per_batch={tokens_per_batch}; the "
            f"nearest that fit are {near}"
        )
    return tokens // tokens_per_batch


def _num_anchors(config: RunConfig, tokens_per_batch: int, block_size: int, on_gpu: bool) -> int:
    num_anchors = max(1, int(tokens_per_batch * config.anchors.per_token))
    if on_gpu:  # block-sparse kernels work in tiles of 128 rows
        tile = 128 // math.gcd(block_size, 128)
        num_anchors = max(tile, num_anchors // tile * tile)
    return num_anchors


def _resolve_threads(config: RunConfig, layout: str, on_gpu: bool) -> int:
    if config.run.deterministic:
        return 1
    if config.topology.threads != "auto":
        return config.topology.threads
    # Beside a GPU they have little to do but wait for each other, and keep the cores from other runs: two on one host
    # took 8 times as long for a step as one.
    return torch.get_num_threads() if layout == "colocated" and not on_gpu else 1


def _resolve_gamma(config: RunConfig, draft: DraftShape) -> float:
    gamma = config.loss.gamma
    return drafter_class(draft.kind).default_gamma(draft.block_size) if isinstance(gamma, str) else gamma


def _resolve_dtype(name: str, on_gpu: bool) -> str:
    return ("bfloat16" if on_gpu else "float32") if name == "auto" else name
