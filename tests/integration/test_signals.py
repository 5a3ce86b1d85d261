"""Cases R01 and R03 with processes of their own: signals of all kinds, and a kill in the midst of a save.

A fresh interpreter takes seconds to import torch. What does not have to be started by a shell is a fork of one process
that has imported everything and started no thread.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.config import RunConfig, dump_config
from paceline.errors import CheckpointError
from paceline.train import checkpoint
from tests.toy import Toy, train

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
STOP_S = 30.0
"""Seconds in which a run stops, as promised."""

LONG = ("data.epochs=400", "eval.validate_every=1000", "checkpoint.every_steps=7")
SAVES = ("data.epochs=4", "eval.validate_every=1000", "checkpoint.every_steps=5", "checkpoint.keep_last=100")
LAST = 17

ZYGOTE = """
import json, os, sys
import torch, transformers
from transformers.models.llama import modeling_llama
torch.set_num_threads(1)
from paceline.cli import main
from paceline.eval import validation
from paceline.models import target
from paceline.train import loop, trackers

threads = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
assert set(threads[1:]) <= {"jemalloc_bg_thd"}, threads  # Arrow's, which is prepared for forks
print("ready", flush=True)
for line in sys.stdin:
    wanted = json.loads(line)
    if "wait" in wanted:
        print(os.waitpid(wanted["wait"], 0)[1], flush=True)
        continue
    if not (pid := os.fork()):
        os.setsid()
        log = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(0)
        sys.argv = ["paceline", *wanted["arguments"]]
        exec(wanted["before"])
        main.main()
    print(pid, flush=True)
"""

SLOW_SAVES = """
import re, time
fsync = os.fsync
def slow(descriptor):
    if found := re.search(r"[.]step-0*([0-9]+)", os.readlink(f"/proc/self/fd/{{descriptor}}")):
        time.sleep({pauses}.get(int(found[1]), 0.0))
    fsync(descriptor)
os.fsync = slow
"""
"""Gives the test the time to hit a save in its middle: pauses by step."""


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "500"}


class Zygote:
    """The process that others are forked from."""

    def __init__(self) -> None:
        one_thread = environment() | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", ZYGOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=one_thread, text=True
        )
        assert self._answer() == "ready"

    def start(self, log: Path, *arguments: object, before: str = "") -> int:
        """The id of a process, the leader of a session, that runs the command."""
        return int(self._ask({"log": str(log), "arguments": [str(each) for each in arguments], "before": before}))

    def wait(self, pid: int) -> int:
        """The exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(int(self._ask({"wait": pid})))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)

    def _ask(self, wanted: dict[str, object]) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


def run_file(config: RunConfig, path: Path) -> Path:
    path.write_text(dump_config(config))
    return path


def wait_until(is_so: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.002)


def steps_of(run_dir: Path) -> list[int]:
    """Of the whole lines of the metrics file."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line)["step"] for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for_step(run_dir: Path, step: int) -> None:
    wait_until(lambda: step in steps_of(run_dir)[-50:], f"step {step} of {run_dir}")


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def stop_after(last: int) -> Callable[[int], None]:
    def at_step(step: int) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGTERM)

    return at_step


def check_stopped(run_dir: Path, log: Path, ending: str) -> None:
    """The stop was logged, and the step that was under way is finished and saved."""
    assert f"{ending}: saving the last complete step" in log.read_text()
    report = json.loads((run_dir / "report.json").read_text())
    steps = steps_of(run_dir)
    assert report["ending"] == ending and steps == list(range(1, report["step"] + 1))
    newest = checkpoint.newest(run_dir / "checkpoints")
    assert newest == checkpoint.place_of(run_dir / "checkpoints", report["step"])
    assert (run_dir / "checkpoints" / "latest").resolve() == newest.resolve()
    assert not list((run_dir / "checkpoints").glob(".step-*"))


def test_background_runs_stop_when_asked(toy: Toy, tmp_path: Path) -> None:
    """Case R03, parts 1 and 2: started by a shell without job control, once plainly and once under nohup.

    The plain one, whose SIGINT is inherited as ignored, stops at SIGINT. The other goes on at SIGHUP, and stops at
    SIGTERM. Both finish their step, save and exit 0 within 30 s, and leave no process.
    """
    names = ("plain", "nohup")
    files = [run_file(toy.config(tmp_path / name, *LONG), tmp_path / f"{name}.yaml") for name in names]
    train_command = f'"{sys.executable}" -m paceline train'
    script = "\n".join(
        f"(sh -c 'echo $$ > {name}.pid; exec {'nohup ' * (name == 'nohup')}{train_command} {file}' > {name}.log 2>&1;"
        f" echo $? > {name}.code) &"
        for name, file in zip(names, files, strict=True)
    )
    subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, check=True)
    for name in names:
        wait_for_step(tmp_path / name, 3)
    pids = {name: int((tmp_path / f"{name}.pid").read_text()) for name in names}

    def code(name: str) -> str:
        file = tmp_path / f"{name}.code"
        wait_until(lambda: file.is_file() and bool(file.read_text()), f"the end of {name}", STOP_S)
        return file.read_text().strip()

    try:
        os.kill(pids["plain"], signal.SIGINT)
        os.kill(pids["nohup"], signal.SIGHUP)
        assert code("plain") == "0", (tmp_path / "plain.log").read_text()
        check_stopped(tmp_path / "plain", tmp_path / "plain.log", "SIGINT")

        wait_for_step(tmp_path / "nohup", steps_of(tmp_path / "nohup")[-1] + 3)
        os.kill(pids["nohup"], signal.SIGTERM)
        assert code("nohup") == "0", (tmp_path / "nohup.log").read_text()
        check_stopped(tmp_path / "nohup", tmp_path / "nohup.log", "SIGTERM")
        assert all(is_gone(pid) for pid in pids.values())
    finally:
        for pid in pids.values():
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_twice_during_a_save_ends_at_once(toy: Toy, zygote: Zygote, tmp_path: Path) -> None:
    """Case R03, part 3: SIGINT twice, 0.2 s apart, while a checkpoint is being written.

    The process ends at once with a code that is not 0, the checkpoint before is intact, and the run goes on.
    """
    run_dir, config = tmp_path / "run", toy.config(tmp_path / "run", *SAVES)
    pid = zygote.start(
        tmp_path / "log",
        "train",
        run_file(config, tmp_path / "run.yaml"),
        before=SLOW_SAVES.format(pauses={10: PATIENCE_S}),
    )
    wait_until(lambda: bool(list((run_dir / "checkpoints").glob(".step-00000010.*"))), "a save of step 10")
    os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    os.kill(pid, signal.SIGINT)
    begun = time.monotonic()
    assert zygote.wait(pid) == 128 + signal.SIGINT
    assert time.monotonic() - begun < 10
    assert "SIGINT again: ending now, without saving" in (tmp_path / "log").read_text()
    assert checkpoint.newest(run_dir / "checkpoints") == run_dir / "checkpoints" / "step-00000005"
    report, lines = train(config, stop_after(12))
    assert lines[0]["step"] == 6 and report.step == 12
    check_stopped_steps(run_dir, 12)


def check_stopped_steps(run_dir: Path, last: int) -> None:
    assert steps_of(run_dir) == list(range(1, last + 1))
    assert checkpoint.newest(run_dir / "checkpoints") == checkpoint.place_of(run_dir / "checkpoints", last)


def test_a_signal_to_the_whole_group_is_a_stop(toy: Toy, zygote: Zygote, tmp_path: Path) -> None:
    """Case R03, part 4: Ctrl-C at a terminal reaches every process of the run, and the result is that of part 1."""
    config = toy.config(tmp_path / "run", *LONG, "topology.targets=2", "tracking.tensorboard=true")
    pid = zygote.start(tmp_path / "log", "train", run_file(config, tmp_path / "run.yaml"))
    wait_for_step(tmp_path / "run", 3)
    assert os.getpgid(pid) == pid
    os.killpg(pid, signal.SIGINT)
    begun = time.monotonic()
    assert zygote.wait(pid) == 0, (tmp_path / "log").read_text()
    assert time.monotonic() - begun < STOP_S
    check_stopped(tmp_path / "run", tmp_path / "log", "SIGINT")
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_a_full_disk_behind_its_output_is_nothing_to_a_run(toy: Toy, zygote: Zygote, tmp_path: Path) -> None:
    """With both streams on a full disk, warnings included, it trains to the end and exits 0."""
    config = toy.config(tmp_path / "run", "run.max_steps=3")
    pid = zygote.start(Path("/dev/full"), "train", run_file(config, tmp_path / "run.yaml"))
    assert zygote.wait(pid) == 0
    assert json.loads((tmp_path / "run" / "report.json").read_text())["ending"] == "finished"


@pytest.fixture(scope="module")
def straight(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """A run that nothing happens to, with checkpoints of the steps 5, 10, 15 and 17."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    _, lines = train(toy.config(run_dir, *SAVES), stop_after(LAST))
    return run_dir, lines


@pytest.fixture(scope="module")
def before_15(toy: Toy, straight: tuple, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run as it is before its save of step 15: checkpoints of the steps 5 and 10."""
    run_dir = tmp_path_factory.mktemp("before") / "run"
    shutil.copytree(straight[0], run_dir, symlinks=True)
    keep_until(run_dir, 10)
    return run_dir


def keep_until(run_dir: Path, step: int) -> None:
    """Take the newer checkpoints away."""
    for place in (run_dir / "checkpoints").glob("step-*"):
        if int(place.name.removeprefix("step-")) > step:
            shutil.rmtree(place)
    (run_dir / "checkpoints" / "best").unlink(missing_ok=True)
    checkpoint.point(run_dir / "checkpoints", "latest", checkpoint.place_of(run_dir / "checkpoints", step))


def check_kill_during_save(
    toy: Toy, zygote: Zygote, straight: tuple[Path, list[dict]], base: Path, folder: Path, delay_s: float
) -> None:
    run_dir = folder / "run"
    shutil.copytree(base, run_dir, symlinks=True)
    config, checkpoints = toy.config(run_dir, *SAVES), run_dir / "checkpoints"
    pid = zygote.start(
        folder / "log",
        "train",
        run_file(config, folder / "run.yaml"),
        before=SLOW_SAVES.format(pauses={15: 0.1, 20: PATIENCE_S}),
    )
    wait_until(lambda: bool(list(checkpoints.glob(".step-00000015.*"))), "a save of step 15")
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    assert zygote.wait(pid) == -signal.SIGKILL

    newest = checkpoint.newest(checkpoints)
    assert newest is not None and newest.name in ("step-00000010", "step-00000015")
    for place in checkpoints.glob("step-*"):
        checkpoint.verify(place)  # also one of step 15, if there is one
    at = int(newest.name.removeprefix("step-"))
    report, lines = train(config, stop_after(LAST))
    assert report.step == LAST and [line["step"] for line in lines] == list(range(at + 1, LAST + 1))
    assert [line["loss"] for line in lines] == [line["loss"] for line in straight[1][at:]]
    check_stopped_steps(run_dir, LAST)
    assert not list(checkpoints.glob(".step-*"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (checkpoints / "latest" / name).read_bytes() == (straight[0] / "checkpoints/latest" / name).read_bytes()


@pytest.mark.parametrize("number", [2])
def test_a_kill_during_a_save_loses_no_checkpoint(
    toy: Toy, zygote: Zygote, straight: tuple, before_15: Path, tmp_path: Path, number: int
) -> None:
    """Case R01: killed while the folder of a save exists, a run goes on from the newest whole checkpoint, with the bits
    of one that nothing happened to; what the save left is gone then."""
    check_kill_during_save(toy, zygote, straight, before_15, tmp_path, 0.1 * number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_kills_during_a_save_lose_no_checkpoint(
    toy: Toy, zygote: Zygote, straight: tuple, before_15: Path, tmp_path: Path, number: int
) -> None:
    """Case R01, as often as it says, at twenty moments of the save."""
    check_kill_during_save(toy, zygote, straight, before_15, tmp_path, 0.025 * number)


def cut_the_largest_file(checkpoints: Path) -> None:
    largest = max((checkpoints / "step-00000017").iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def remove_the_manifest(checkpoints: Path) -> None:
    (checkpoints / "step-00000017" / checkpoint.MANIFEST).unlink()


def make_an_empty_folder(checkpoints: Path) -> None:
    (checkpoints / "step-00000020").mkdir()


def make_a_plain_file(checkpoints: Path) -> None:
    (checkpoints / "step-00000020").write_text("")


def rename_steps(checkpoints: Path) -> None:
    for old, new in (("step-00000005", "step-5"), ("step-00000010", "step-10"), ("step-00000015", "step-100")):
        (checkpoints / old).rename(checkpoints / new)
    shutil.rmtree(checkpoints / "step-00000017")


@pytest.mark.parametrize(
    ("damage", "picked", "said"),
    [
        (cut_the_largest_file, 15, r"step-00000017/\w+.safetensors is damaged: \d+ bytes declared, \d+ found"),
        (remove_the_manifest, 15, r"step-00000017 is not a complete checkpoint: no readable manifest.json"),
        (make_an_empty_folder, 17, r"step-00000020 is not a complete checkpoint"),
        (make_a_plain_file, 17, r"step-00000020 is not a complete checkpoint"),
        (rename_steps, 15, None),
    ],
)
def test_damages_are_passed_over_and_named(
    toy: Toy,
    straight: tuple[Path, list[dict]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    picked: int,
    said: str | None,
) -> None:
    """Case R01, each damage in turn: the newest complete checkpoint by number is taken, what was passed over is logged
    with the reason, and what stands in the next one's way is none to the next save."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight[0], run_dir, symlinks=True)
    damage(run_dir / "checkpoints")
    with caplog.at_level(logging.WARNING):
        report, lines = train(toy.config(run_dir, *SAVES), stop_after(20))
    assert report.step == 20 and lines[0]["step"] == picked + 1
    assert [line["loss"] for line in lines[: LAST - picked]] == [line["loss"] for line in straight[1][picked:]]
    texts = [record.getMessage() for record in caplog.records if "passing over" in record.getMessage()]
    assert len(texts) == (said is not None), texts
    if said is not None:
        assert re.search(said, texts[0])
    checkpoint.verify(run_dir / "checkpoints" / "step-00000020")
    assert steps_of(run_dir) == list(range(1, 21))


@pytest.mark.parametrize("verb", ["train", "resume"])
def test_nothing_complete_is_no_fresh_start(
    toy: Toy,
    straight: tuple[Path, list[dict]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    verb: str,
) -> None:
    """Case R01: where no checkpoint is complete the command says so, exits 1 and leaves the folder as it was."""
    from paceline.cli.main import run as command_line

    run_dir = tmp_path / "run"
    shutil.copytree(straight[0], run_dir, symlinks=True)
    for manifest in run_dir.glob(f"checkpoints/step-*/{checkpoint.MANIFEST}"):
        manifest.unlink()
    before = steps_of(run_dir)
    what = run_dir if verb == "resume" else run_file(toy.config(run_dir, *SAVES), tmp_path / "run.yaml")
    monkeypatch.setattr(sys, "argv", ["paceline", verb, str(what)])
    with pytest.raises(SystemExit) as ending:
        command_line()
    assert ending.value.code == 1
    err = capfd.readouterr().err
    assert "complete" in err and str(run_dir / "checkpoints") in err and "Traceback" not in err
    assert steps_of(run_dir) == before


def test_a_run_that_never_saved_is_not_resumed(toy: Toy, tmp_path: Path) -> None:
    """`paceline resume` on a run without any checkpoint is a clear error as well."""
    from paceline.cli.train import resume

    config = toy.config(tmp_path / "run", *SAVES)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    run_file(config, tmp_path / "run" / "config.yaml")
    with pytest.raises(CheckpointError, match="has no checkpoint to resume from"):
        resume(tmp_path / "run")
