"""The run file: one YAML tree, plus dotted overrides, checked before anything is loaded.

Every field has its unit, effect and source here and nowhere else. ``auto`` values are resolved once, by
``plan.resolve``, and the resolved tree is what the run folder keeps. This file knows neither torch nor devices.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.errors import ConfigError

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Factor = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
LayerType = Literal["full_attention", "sliding_attention"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class Run(_Section):
    dir: UserPath = "runs/drafter"
    """Run folder: config, metrics, checkpoints. `train` on an existing one resumes it."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Keys every random choice together with the batch number; nothing else is random."""
    deterministic: bool = False
    """Bit-reproducible kernels and one compute thread a role; slower on a GPU."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps after which the run ends, and which the learning-rate schedule spans; None: until `data.epochs`
    are used up."""
    max_hours: float | None = Field(default=None, gt=0.0)
    """Wall-clock limit of one start, in hours: the run then saves and ends as after a signal. None: no limit."""
    stall_s: float = Field(default=300.0, ge=0.0)
    """Seconds without any movement after which the run says where each thread stands, with stacks in the run folder;
    after twice as long it ends, to be started again. 0: never."""
    stop_signal: Literal["SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGALRM"] | None = None
    """A signal that stops the run as SIGTERM does, for schedulers that announce the end with another one."""
    max_bad_batches: int = Field(default=8, ge=0)
    """Micro-batches of one start that may be left out because their features, loss or gradient is not finite; they are
    listed in ``bad_batches.jsonl``. One more ends the run."""
    max_restarts: int = Field(default=3, ge=0)
    """Times that a process of a role is started again when it dies, with `topology.executor: ray`. After that the run
    goes on with the others, and ends where none is left."""
    device: str = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`."""


class Target(_Section):
    path: UserPath
    """Folder of a Transformers decoder-only model, a GGUF file, or a hub id."""
    revision: str | None = None
    """Hub revision; None: the default branch."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights and features of the target. auto: float32 on the CPU, bfloat16 on a GPU."""
    layer_ids: Auto | tuple[int, ...] = "auto"
    """Tapped decoder layers, counted from 0 (HF `hidden_states[i + 1]`), in the order of the drafter's input.
    auto: the published spread of five, `round(1 + i * (L - 4) / 4)`. Source: z-lab's DFlash code."""
    packing: Literal["auto", "packed", "per_document"] = "auto"
    """How documents of a row run through the target. auto: one by one on the CPU (same bits in any packing); packed on
    a GPU where a probe of the real model shows that documents stay apart, else one by one."""
    adapter: UserPath | None = None
    """LoRA adapter, a folder in PEFT's layout, merged into the weights when they are loaded: what is served has to be
    merged, or run with it. Needs the extra `adapter`. None: the model as it is."""
    server: str | None = None
    """URL of a running vLLM server that makes the features, such as ``http://127.0.0.1:8000``; then only embedding and
    head are loaded here. None: the target runs here."""
    server_files: UserPath | None = None
    """Folder that this server writes hidden states to (its `shared_storage_path`), as seen from here, such as one below
    ``/dev/shm``. Files are removed from it once they are read; only you should be able to write there."""
    server_check: Literal["all", "first", "none"] = "all"
    """What of the server is compared at the start with the model in `target.path`, which is loaded for it. all: every
    tap, and the last hidden state where it is needed. first: the first tap, which needs only the layers up to it, where
    this machine cannot hold more. none: nothing is loaded, and what the server gives is trained on."""
    cache: UserPath | None = None
    """Folder written by `paceline cache`: features are read from it, and only embedding and head are loaded. None: the
    target runs."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    fp8: bool = False
    """Multiply in fp8 on a GPU that can (Hopper, Ada and newer), with bfloat16 weights. Features then carry
    several times bfloat16's rounding error; a run records how much. Natural where serving is in fp8. A step of an 8 B
    target takes 13 % less time on an H200; what that costs in acceptance was not measured."""


class Draft(_Section):
    kind: str = "dflash"
    """Drafter class: `dflash`; `dflash2`, with convolutions along the block and a candidate selector; `dspark`, whose
    slots all predict, with a bias by the token before and a confidence head. A `dspark` block drafts as many tokens as
    it has slots, the others' one fewer."""
    init: UserPath | None = None
    """Drafter to start from: a folder in the z-lab or speculators layout, published or exported, a run or a checkpoint.
    Its weights are where training begins, and its shape is this run's: keys of this section, and `target.layer_ids`,
    are taken from it where they are not set, and an error where they are set otherwise. Read at the first start only.
    None: random weights."""
    options: dict[str, Any] = {}
    """Settings that only this kind has. dflash2: `conv_kernel_size` 2, `conv_group_size` 16, `selector_rank` 256,
    `selector_top_k` 16. dspark: `markov_rank` 256, `markov_head_type` vanilla (or gated, rnn, which no engine serves),
    `enable_confidence_head` and `confidence_head_with_markov` true."""
    num_layers: int = Field(default=5, ge=1)
    """Decoder layers of the drafter. Source: DFlash, section 5."""
    block_size: int = Field(default=16, ge=2)
    """K: slots in a block, the anchor included, so K - 1 tokens are drafted at a time."""
    mask_token_id: Auto | int = "auto"
    """Filler of slots 1..K-1: a row of the target's embedding that never occurs in data. auto: an unused one."""
    layer_types: Literal["full", "sliding"] | tuple[LayerType, ...] = "full"
    """Attention to the context in each layer: `full`, `sliding`, or one entry a layer."""
    is_causal: Auto | bool | Literal["sliding"] = "auto"
    """Attention inside a block. auto: bidirectional. sliding: causal in sliding layers and bidirectional in full ones,
    as some published drafters have it. Written on export, but for sliding, which readers take the key's absence for."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Context window of sliding layers in tokens: visible iff query - key < window."""
    num_attention_heads: Auto | Count = "auto"
    """Query heads. auto: the target's, or heads of 128 where the target's heads are wider."""
    num_key_value_heads: Auto | Count = "auto"
    """Key/value heads; divides `num_attention_heads`. auto: as above."""
    head_dim: Auto | Count = "auto"
    """Size of a head. auto: the target's, at most 128, the width that every engine's kernels accept."""
    intermediate_size: Auto | Count = "auto"
    """Width of the MLP. auto: the target's."""
    vocab: Literal["full", "observed"] | Count = "full"
    """Tokens that the drafter can draft. full: all of the target's. observed: those of the training rows. N: the N most
    frequent there (supervised ones first), filled up with the lowest ids. A short head trains and drafts faster; a
    token outside it is never drafted, which costs acceptance but never changes the output. The z-lab layout needs
    full."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; master weights and moments are float32. auto: float32 on the CPU, bfloat16 on a GPU."""
    feature_noise: Factor = 0.0
    """Size of the noise added to features in training, as a share of each tap's own root mean square at a token; 0:
    none. Drafters that draft from their own hidden states need it against drift; one that always sees the target's, as
    here, has less cause to. Source: EAGLE, arXiv:2401.15077, which adds uniform noise of a fixed size."""
    recompute: bool = False
    """Compute each layer again in the backward pass in place of keeping what it needs: less memory, a third more work.
    """


class Data(_Section):
    path: UserPath
    """Folder written by `paceline prepare`."""
    epochs: int = Field(default=6, ge=1)
    """Passes over the training rows. Source: DFlash, section 5 (six)."""
    max_length: int = Field(default=3072, ge=2)
    """Longest row accepted, in tokens; a data set with longer rows is refused. Source: DFlash, section 5."""
    validation: float = Field(default=0.005, ge=0.0, lt=1.0)
    """Share of conversations held out, chosen by hash, so that rows of one conversation stay on one side. 0: none."""
    template: Literal["target", "prepared"] = "target"
    """Chat template that the data must have been prepared with. target: the target's own; other data is refused, as
    the target would not be asked that way. prepared: the one that `prepare --template` was given; give the same one to
    the server."""


class Anchors(_Section):
    per_token: float = Field(default=0.1667, gt=0.0, le=1.0)
    """Anchor slots per token of a packed row. Source: DFlash, A.1 (512 per 3,072 tokens)."""
    stratify: bool = False
    """Sort the positions of a batch by depth, their place within their document, cut them into as many equal strata as
    there are anchors, and draw one from each, in place of all anchors from all positions. Then every batch covers early
    and late positions in proportion, which chance does not grant where documents are long, as reasoning traces are; no
    position is drawn more or less often than without. Source: none; the paper draws at random."""


class Loss(_Section):
    kind: Literal["decay", "dpace"] = "decay"
    """Weights of the slots. decay: exponential, the same for all blocks. dpace: by the drafter's own probabilities, so
    that a slot weighs what the acceptance of the slots up to it and after it makes it worth. Source: DFlash, A.1;
    D-PACE, arXiv:2605.18810."""
    gamma: Auto | float = "auto"
    """Decay length in positions; without effect with dpace. auto: `default_gamma` of the tokens that a block drafts."""
    ce: Auto | Factor = "auto"
    """Factor of the cross-entropy against the data's tokens. auto: the kind's, 1, of `dspark` 0.1."""
    kl: Auto | Factor = "auto"
    """Factor of the divergence of the drafter's distribution from the target's, KL(target || drafter). Like `l1` it
    needs the target's last hidden state: the target then runs all its layers. auto: the kind's, 0."""
    l1: Auto | Factor = "auto"
    """Factor of the summed distance of the two distributions, which is twice the total variation: what drafts lose in
    acceptance when they are drawn. auto: the kind's, 0, of `dspark` 0.9."""
    selector: Factor = 1.0
    """Factor of the loss of the candidate selector; `dflash2` has one."""
    confidence: Factor = 1.0
    """Factor of the loss of the confidence head; `dspark` has one."""

    @field_validator("gamma")
    @classmethod
    def _positive(cls, value: str | float) -> str | float:
        if not isinstance(value, str) and not value >= 0.01:  # below, the second slot's weight vanishes in float32
            raise ValueError("gamma must be 0.01 or more")
        return value


class Optim(_Section):
    kind: Literal["adamw", "muon"] = "adamw"
    """adamw: as the paper has it. muon: matrices of the drafter's layers by Muon, at the rate that `lr` is for AdamW;
    the rest by AdamW. Of one drafter only. Source: Jordan et al., Muon (2024); arXiv:2502.16982."""
    lr: float = Field(default=6e-4, gt=0.0)
    """Peak learning rate. Source: DFlash, A.1."""
    warmup_ratio: float = Field(default=0.04, ge=0.0, lt=1.0)
    """Share of the steps over which the rate rises linearly. Source: DFlash, A.1."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Rate as a share of `lr` at which the cosine ends, one step after the last."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's averaging constants; the paper gives none."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """AdamW's decoupled decay, on matrices only."""
    clip: float = Field(default=1.0, gt=0.0)
    """Largest global gradient norm. Source: DFlash, A.1."""
    tokens_per_step: Auto | Count = "auto"
    """Packed tokens of an optimizer step; a multiple of `pipeline.tokens_per_batch`.
    auto: 98,304 (32 rows of 3,072), or less so that a run has at least 500 steps."""


class Kernels(_Section):
    attention: Literal["auto", "flex", "flash4", "per_document"] = "auto"
    """Attention of target and drafter on a GPU. flex: FlexAttention over masks that keep documents apart. flash4:
    FlashAttention-4 if it is installed (extra `fa4`), faster on Hopper; gradients are not the same bits twice.
    per_document: PyTorch's own attention, with masks, or a document at a time. auto: flex where it can be used. Without
    effect on the CPU."""
    compile: bool = True
    """Compile layers on a GPU: a minute at the start, once a machine."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Replay steps from CUDA graphs. auto: where launching kernels is found to take longer than running them, as with
    small targets. Without effect on the CPU."""


class Topology(_Section):
    executor: Literal["local", "ray"] = "local"
    """local: one process, roles are threads. ray: targets are processes of a Ray cluster, on this host or on many,
    beside the drafter in this process. Needs the extra `ray`."""
    address: str | None = None
    """Ray cluster to use, ``HOST:PORT`` or `auto` (the one of this host). None: one is started here for the run, heard
    on the loopback device only."""
    layout: Literal["auto", "colocated", "split"] = "auto"
    """colocated: target and drafter in turn; with executor `ray` every process has both. split: targets beside the
    drafters. auto: split on the CPU, with several targets, several GPUs a target, a server or a cache; else
    colocated on a GPU, with `ray` where there are several drafters and the memory plan says that one GPU holds both. A
    cache with `ray` is colocated."""
    targets: int = Field(default=1, ge=1)
    """N: target roles."""
    shard_gradients: bool = False
    """Of several drafters each keeps its part of the float32 gradient sums alone, 4 / M bytes a parameter in place of
    4. They then exchange gradients after every micro-batch, not once a step, and are not replayed from CUDA graphs."""
    gpus_per_target: int = Field(default=1, ge=0)
    """GPUs of a target, of one host: its layers are split over them. With executor local they are `run.device` and
    those that follow it. 0, with executor ray: it shares the drafter's."""
    drafters: int = Field(default=1, ge=1)
    """M: drafter roles; one on the local executor. They share the micro-batches of a step, best equally."""
    threads: Auto | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Compute threads of each role on the CPU. auto: 1, or every core when target and drafter take turns there."""


class Pipeline(_Section):
    tokens_per_batch: Auto | Count = "auto"
    """S: tokens of a packed row. auto: 12,288 on a GPU, 2,048 on the CPU, or the longest row if that is longer."""
    queue_depth: Auto | int = "auto"
    """Batches that may wait between targets and drafter. auto: 2 per drafter + 1 per target."""
    queue_gib: float = Field(default=4.0, gt=0.0)
    """Bytes that may wait there, in GiB; the batch that the drafter needs next always passes."""
    min_ready: int = Field(default=1, ge=1)
    """Batches that must be ready before the drafter takes one; at most `queue_depth`."""
    max_retries: int = Field(default=2, ge=0)
    """Times that a batch is made again when the target fails on it, before the run ends. Order and result stay."""
    feature_cache_gib: float = Field(default=0.0, ge=0.0)
    """Host memory for features kept over epochs, in GiB. CPU only: there a document's features are the same bits in
    any packing. 0: off."""
    transport: Literal["target", "fp8"] = "target"
    """How features travel between processes (executor `ray`, layout split). target: as the target makes them. fp8:
    float8_e4m3fn with a scale a token and state, half the bytes of bfloat16; they are rounded on the way, by 2 to 3 %
    of their size, so the losses are others. Validation has the features unrounded."""


class Checkpoint(_Section):
    every_steps: int = Field(default=500, ge=1)
    """Steps between saves; the last step is always saved."""
    keep_last: int = Field(default=3, ge=1)
    """Newest checkpoints kept; those that `latest` and `best` point to always stay."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints whose step is a multiple of it stay as well; None: none."""


class Eval(_Section):
    validate_every: int = Field(default=500, ge=1)
    """Steps between measurements of the acceptance length on the held-out rows."""
    validate_rows: int = Field(default=64, ge=1)
    """Held-out rows used for it, the first by hash order."""
    every_steps: int | None = Field(default=None, ge=1)
    """Steps between evaluations beside training: the checkpoint is saved, and a process of its own decodes prompts with
    it, as `paceline eval` does, while training goes on; the last step always. `best` is then chosen by the acceptance
    length measured so, no longer by that on the held-out rows. None: none."""
    prompts: UserPath | tuple[UserPath, ...] | None = None
    """JSONL file, or list of files, with the prompts of these evaluations, as `paceline eval --prompts` reads them.
    None: the 24 short ones that come with Paceline; requests like those to be served say more."""
    limit: int | None = Field(default=None, ge=1)
    """Prompts used, the first ones. None: all. Few prompts choose `best` by chance."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer of such an evaluation, in tokens."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Where that process decodes: `cpu`, `cuda` or `cuda:N`. It loads the target once more: on the CPU in float32, on
    a GPU in bfloat16, beside whatever else is there."""


class Profiling(_Section):
    interval: float = Field(default=0.0, ge=0.0, le=86_400.0)
    """Seconds between tables of where the time went, printed and added to ``profile/stages.jsonl``; 0: none, until
    `paceline profile on RUN`. The variable DFLASH_PROFILE_INTERVAL beats it, and `--profile-interval` beats both."""
    sigusr1: bool = False
    """Switch profiling on and off by SIGUSR1 as well. Schedulers use that signal too, so it is not heard unasked."""
    metrics_port: int | None = Field(default=None, ge=0, le=65_535)
    """Serve counters in the OpenMetrics format at this port of the loopback device; 0: a free one; None: not at all.
    Needs the extra `metrics`."""


class Tracking(_Section):
    tensorboard: bool = False
    """Write the scalars of ``metrics.jsonl`` for TensorBoard, to ``tensorboard/`` in the run folder. Needs the extra
    `tensorboard`."""
    wandb: str | None = None
    """Weights & Biases project to log the same scalars to; None: none. Needs the extra `wandb`; WANDB_MODE=offline is
    honoured."""


class RunConfig(_Section):
    run: Run = Run()
    target: Target
    draft: Draft = Draft()
    data: Data
    anchors: Anchors = Anchors()
    loss: Loss = Loss()
    optim: Optim = Optim()
    kernels: Kernels = Kernels()
    topology: Topology = Topology()
    pipeline: Pipeline = Pipeline()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    profiling: Profiling = Profiling()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        depth = self.pipeline.queue_depth
        if depth != "auto" and depth < 1:
            raise ValueError(f"pipeline.queue_depth={depth} must be at least 1")
        if depth != "auto" and self.pipeline.min_ready > depth:
            raise ValueError(
                f"pipeline.min_ready={self.pipeline.min_ready} is above pipeline.queue_depth={depth}: "
                "the drafter would wait for ever"
            )
        if self.profiling.sigusr1 and self.run.stop_signal == "SIGUSR1":
            raise ValueError("run.stop_signal=SIGUSR1 with profiling.sigusr1=true: one signal cannot mean both")
        sources = [f"target.{name}" for name in ("server", "cache") if getattr(self.target, name) is not None]
        if len(sources) == 2:
            raise ValueError(f"{' and '.join(sources)} are both set: features come from one place")
        if self.optim.kind == "muon" and self.topology.drafters > 1:
            raise ValueError(
                f"optim.kind=muon with topology.drafters={self.topology.drafters}: several drafters each hold parts of "
                "matrices, which Muon needs whole; use adamw"
            )
        if self.run.deterministic and self.kernels.attention == "flash4":
            raise ValueError(
                "run.deterministic=true with kernels.attention=flash4: FlashAttention-4 adds gradients up in no fixed "
                "order; use flex"
            )
        types = self.draft.layer_types
        if not isinstance(types, str) and len(types) != self.draft.num_layers:
            raise ValueError(f"draft.layer_types has {len(types)} entries for draft.num_layers={self.draft.num_layers}")
        if (types == "sliding" or "sliding_attention" in types) and self.draft.sliding_window is None:
            raise ValueError("draft.layer_types has sliding layers: set draft.sliding_window")
        return self


FREE_TO_CHANGE = (
    "run.dir",
    "run.device",
    "run.max_hours",
    "run.stall_s",
    "run.stop_signal",
    "run.max_bad_batches",
    "run.max_restarts",
    "draft.recompute",
    "kernels",
    "topology",
    "pipeline.queue_depth",
    "pipeline.queue_gib",
    "pipeline.min_ready",
    "pipeline.max_retries",
    "pipeline.feature_cache_gib",
    "checkpoint",
    "eval",
    "profiling",
    "tracking",
    "target.path",
    "target.server",
    "target.server_files",
    "target.server_check",
    "target.cache",
    "data.path",
)
"""Keys that a resumed run may change. They leave order, batches and schedule alone; `run.device`, `kernels` and
`topology.threads` change how sums are rounded. The contents behind `target.path` and `data.path` are compared by
fingerprint instead."""

FREE_LIVE = (
    "run.max_hours",
    "run.stall_s",
    "checkpoint.every_steps",
    "checkpoint.keep_last",
    "checkpoint.keep_every",
    "profiling.interval",
)
"""Keys that `paceline set` may change while a run goes on: none has to do with what it computes."""


def default_gamma(block_size: int) -> float:
    """Decay length for a block size: 4, 5, 7 at K = 8, 10, 16, linear between, in proportion outside.

    Source: DFlash, A.1, gives the three values.
    """
    points = [(0, 0.0), (8, 4.0), (10, 5.0), (16, 7.0)]
    for (k0, g0), (k1, g1) in zip(points[:-1], points[1:], strict=True):
        if block_size <= k1:
            return g0 + (g1 - g0) * (block_size - k0) / (k1 - k0)
    return 7.0 * block_size / 16


def load_config(path: Path | str | None, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run file and apply dotted overrides.

    Args:
        path: YAML file, or None for overrides alone.
        overrides: ``section.key=value`` with the value in YAML, for example ``optim.lr=3e-4``.
    Raises: ConfigError naming the key, what was seen and the nearest valid key.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            more = "; the run file comes first, overrides behind it" if "=" in str(path) else ""
            raise ConfigError(f"run file {path} cannot be read: {error.strerror}{more}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"run file {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
        try:
            loaded = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"run file {path} is not valid YAML: {error}") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"run file {path} holds a {type(loaded).__name__}; sections such as target: were wanted")
        tree = loaded or {}
    return config_of(tree, overrides)


def config_of(tree: Mapping[str, Any], overrides: Iterable[str] = ()) -> RunConfig:
    """A configuration from the content of a run file, sections by name, which is not changed.

    Raises: ConfigError as `load_config`.
    """
    sections = {name: dict(section) if isinstance(section, Mapping) else section for name, section in tree.items()}
    sections = {name: {} if section is None else section for name, section in sections.items()}
    for override in overrides:
        _apply_override(sections, override)
    return parse_config(sections)


def parse_config(tree: dict[str, Any]) -> RunConfig:
    """Validate a plain tree. Raises: ConfigError with one line a problem."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from error


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or len(parts) != 2 or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form section.key=value, for example optim.lr=3e-4")
    try:
        value = yaml.safe_load(text) if text.strip() else None
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error
    section = tree.setdefault(parts[0], {})
    if section is None:
        section = tree[parts[0]] = {}
    if not isinstance(section, dict):
        raise ConfigError(f"section {parts[0]} holds {section!r}; keys such as {key} were wanted")
    section[parts[1]] = value


def valid_keys() -> list[str]:
    """Every dotted key of the tree, in its order."""
    return [
        f"{name}.{key}"
        for name, section in RunConfig.model_fields.items()
        for key in section.annotation.model_fields  # type: ignore[union-attr]  # every field is a section
    ]


def _explain(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location[:2])
    if problem["type"] == "extra_forbidden":
        known = valid_keys() if len(location) > 1 else list(RunConfig.model_fields)
        leaf = location[-1]
        near = [name for name in valid_keys() if name.split(".")[-1] == leaf][:1]  # in the wrong section
        near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.65)
        return f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else "")
    if problem["type"] == "missing":
        return f"{key} is missing: it has no default"
    message: str = problem["msg"].removeprefix("Value error, ")
    if not location:
        return message
    return f"{key}={problem['input']!r}: {message}"


def flatten(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values, in the order of the tree, as plain JSON values."""
    for section, keys in config.model_dump(mode="json").items():
        for key, value in keys.items():
            yield f"{section}.{key}", value


def is_free_to_change(key: str) -> bool:
    """Whether a resumed run may have another value of this dotted key."""
    return any(key == free or key.startswith(free + ".") for free in FREE_TO_CHANGE)


def changed_keys(saved: RunConfig, wanted: RunConfig) -> list[tuple[str, Any, Any]]:
    """Keys in which `wanted` asks for other training than `saved` (a resolved config), with both values.

    ``auto`` in `wanted` agrees with whatever it was resolved to, and so does what was left to `draft.init`.
    """
    new = dict(flatten(wanted))
    left_open = set() if wanted.draft.init is None else Draft.model_fields.keys() - wanted.draft.model_fields_set
    return [
        (key, old, new[key])
        for key, old in flatten(saved)
        if not is_free_to_change(key) and new[key] not in (old, "auto") and key.removeprefix("draft.") not in left_open
    ]


def dump_config(config: RunConfig) -> str:
    """The tree as YAML, in its own order, that `load_config` reads back to an equal tree."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return text
