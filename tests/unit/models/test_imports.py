"""What commands import, and what they leave alone though it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.models.imports import HIDDEN, import_models
from tests.toy import Toy

SELDOM = {
    "datasets", "gguf", "matplotlib", "IPython", "networkx", "openai", "pandas", "peft", "prometheus_client", "ray",
    "tensorboard", "torch._inductor.compile_fx", "torch.utils.tensorboard", "wandb",
}  # fmt: skip
"""Packages and modules that a plain run on a CPU has no use for."""

RUN = """
import json, sys
sys.argv = ["paceline", *sys.argv[1:]]
from paceline.cli.main import app
try:
    app()
finally:
    import gc
    print(json.dumps({"modules": sorted(sys.modules), "frozen": gc.get_freeze_count(), "collects": gc.isenabled()}))
"""


def outside(code: str, *arguments: str | Path, packages: Path | None = None) -> str:
    """What a program prints that runs in a process of its own, with the packages of a folder before all others."""
    paths = [str(path) for path in (packages, Path(__file__).parents[3]) if path is not None]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an empty package for each of `HIDDEN`: whoever wants something of it fails."""
    folder = tmp_path_factory.mktemp("packages")
    for name in HIDDEN:
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    return folder


def test_a_run_imports_nothing_seldom_used_and_other_commands_no_torch(
    toy: Toy, packages: Path, tmp_path: Path
) -> None:
    """`train` leaves alone what other models or other settings use; what only looks at a run starts without torch."""
    run = tmp_path / "run"
    settings = [f"run.dir={run}", f"target.path={toy.target}", f"data.path={toy.data}"]
    settings += ["run.device=cpu", "run.max_steps=2", "topology.threads=1", "draft.num_layers=1", "draft.block_size=4"]
    settings += ["pipeline.tokens_per_batch=128", "optim.tokens_per_step=128"]
    (tmp_path / "run.yaml").touch()
    printed = outside(RUN, "train", tmp_path / "run.yaml", *settings, packages=packages)
    found = json.loads(printed.splitlines()[-1])
    loaded = set(found["modules"])
    assert {"torch", "transformers"} <= loaded
    assert not loaded & (SELDOM | set(HIDDEN))
    assert found["collects"] and found["frozen"] > 100_000

    loaded = set()
    for command in (["--help"], ["status", run], ["report", run], ["train", "--help"], ["plan", "--help"]):
        loaded |= set(json.loads(outside(RUN, *command).splitlines()[-1])["modules"])
    assert "paceline.report.run" in loaded
    assert not loaded & {*SELDOM, *HIDDEN, "torch", "transformers", "numpy", "pyarrow", "safetensors", "tokenizers"}


def test_hidden_packages_are_kept_from_transformers_alone(packages: Path) -> None:
    """Transformers does without them from then on; an import by name gets them."""
    code = """
import gc
from paceline.models.imports import HIDDEN, import_models
gc.disable()
import_models()
import importlib, sys, transformers
from transformers.models.llama import modeling_llama
print(gc.isenabled(), transformers.utils.is_scipy_available(), any(name in sys.modules for name in HIDDEN))
for name in HIDDEN:
    importlib.import_module(name)
"""
    assert outside(code, packages=packages).split() == ["False", "False", "False"]


def test_nothing_is_done_once_transformers_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that has imported Transformers, as tests and notebooks have, all stays as it is."""
    import gc

    monkeypatch.setattr(gc, "freeze", lambda: pytest.fail("frozen"))
    monkeypatch.delitem(sys.modules, "scipy", raising=False)
    import_models()
    assert "scipy" not in sys.modules and gc.isenabled()
