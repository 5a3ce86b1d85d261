"""A target that real vLLM runs on this machine's CPU: are its features those of Transformers, and how fast are they?

    python -m benchmarks.served_target --python .venv-vllm/bin/python    # benchmarks/results/served-target-cpu.json

Conversations that ship with the package, and the demo's target. In float32 and in bfloat16 the server's hidden states
are compared as a run compares them at its start; documents are asked for with so many requests at a time, each once
before that counts; three steps are trained from the server and from the target in this process. `make test-vllm` makes
the interpreter. The server uses `benchmarks/cpu_hidden_states.py`, as vLLM's own connector needs a GPU. Speeds mean
little where others use the machine: its load, averaged over a minute, stands beside each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.spine import RESULTS, SAMPLES, paceline
from paceline import __version__
from paceline.cli.train import resolve_config
from paceline.config import load_config
from paceline.eval.engine_vllm import DEFAULTS, ENVIRONMENT
from paceline.models.assets import demo_target
from paceline.models.served import HiddenStatesClient
from paceline.models.target import Target

START_S = 300.0
TIMED_DOCUMENTS = 24
AT_A_TIME = (1, 8)
STEPS = 3


def command(target: str, layers: Sequence[int], files: Path, *, dtype: str, port: int) -> list[str]:
    """What vLLM's interpreter is called with; on a GPU `ExampleHiddenStatesConnector`, without a module, would do."""
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    transfer = {
        "kv_connector": "CpuHiddenStatesConnector",
        "kv_connector_module_path": "cpu_hidden_states",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(files)},
    }
    options = ["--model", target, "--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port)]
    options += ["--dtype", dtype, "--enforce-eager", "--skip-tokenizer-init", "--max-model-len", "auto"]
    options += ["--speculative-config", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer)]
    return ["-m", "vllm.entrypoints.openai.api_server", *options]


@contextmanager
def serving(
    python: Path,
    target: str,
    layers: Sequence[int],
    files: Path,
    log: Path,
    *,
    dtype: str = "float32",
    port: int = 0,
    options: Sequence[str] = (),
) -> Iterator[str]:
    """vLLM on a loopback port, a free one if none is named; its URL once it answers. Raises: RuntimeError."""
    if not port:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= DEFAULTS | ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parent)}
    files.mkdir(mode=0o700, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(python), *command(target, layers, files, dtype=dtype, port=port), *options],
            env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, process, log)
        yield url
    finally:  # its engine is a process of its own in the group
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"vLLM does not serve: {log.read_text(errors='replace')[-3000:]}")


def run_file(work: Path, name: str, target: str, *overrides: str) -> Path:
    """A run of three steps below `work`."""
    config = load_config(
        None,
        [
            f"run.dir={work / name}",
            "run.device=cpu",
            f"run.max_steps={STEPS}",
            f"target.path={target}",
            f"data.path={work / 'data'}",
            "data.validation=0.03",
            "draft.num_layers=2",
            "draft.block_size=8",
            "draft.vocab=observed",
            "optim.tokens_per_step=1024",
            "pipeline.tokens_per_batch=1024",
            "eval.validate_rows=4",
            "topology.targets=2",
            *overrides,
        ],
    )
    path = work / f"{name}.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
    return path


def train(work: Path, name: str, target: str, *overrides: str) -> dict[str, Any]:
    """Losses of the steps, and what the run says of its server."""
    paceline("train", run_file(work, name, target, *overrides), "--json")
    lines = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    record = json.loads((work / name / "run.json").read_text(encoding="utf-8"))
    return {"losses": [line["loss"] for line in lines], "server": record["server"]}


def speeds(url: str, files: Path, documents: Sequence[list[int]], layers: Sequence[int], size: int) -> list[dict]:
    """Documents and tokens a second, with so many requests at a time."""
    client = HiddenStatesClient(url, files, layers=layers, hidden_size=size)
    client.connect()
    num_tokens = sum(map(len, documents))
    found = []
    for width in (AT_A_TIME[-1], *AT_A_TIME):  # the first is not counted
        with ThreadPoolExecutor(width) as pool:
            started = time.perf_counter()
            for _ in pool.map(client.capture, documents):
                pass
            seconds = time.perf_counter() - started
        found.append(
            {
                "requests_at_a_time": width,
                "documents_per_s": round(len(documents) / seconds, 2),
                "tokens_per_s": round(num_tokens / seconds, 1),
                "load_of_machine": round(os.getloadavg()[0], 1),
            }
        )
    return found[1:]


def local_speed(target: str, layer_ids: Sequence[int], documents: Sequence[list[int]]) -> dict[str, float]:
    """The same of the target in this process, one document after the other, on all cores."""
    model = Target.load(target, layer_ids=layer_ids)
    model.document_features(torch.tensor(documents[0]))
    started = time.perf_counter()
    for document in documents:
        model.document_features(torch.tensor(document))
    seconds = time.perf_counter() - started
    return {
        "documents_per_s": round(len(documents) / seconds, 2),
        "tokens_per_s": round(sum(map(len, documents)) / seconds, 1),
        "load_of_machine": round(os.getloadavg()[0], 1),
    }


def measure(work: Path, target: str, python: Path, rows: int) -> dict[str, Any]:
    """Everything of the result file that was measured."""
    lines = (SAMPLES / "extraction_train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:rows]
    (work / "chats.jsonl").write_text("".join(lines), encoding="utf-8")
    paceline("prepare", work / "chats.jsonl", "--tokenizer", target, "--max-length", 512, "--out", work / "data")
    resolved, shape = resolve_config(load_config(run_file(work, "local", target)))
    layer_ids = resolved.draft.target_layer_ids
    layers = [i + 1 for i in layer_ids] + [shape.num_layers]  # and the last hidden state
    documents = [resolved.dataset.row(row)[0].tolist() for row in range(min(TIMED_DOCUMENTS, len(resolved.dataset)))]
    kl = "loss.kl=0.5"
    found: dict[str, Any] = {
        "layers": layers,
        "documents": len(documents),
        "tokens": sum(map(len, documents)),
        "here": local_speed(target, layer_ids, documents),
        "losses_here": train(work, "local", target, kl)["losses"],
    }
    for dtype in ("float32", "bfloat16"):
        files = work / f"files-{dtype}"
        log, plain = work / f"{dtype}.log", ["--no-enable-prefix-caching"]  # documents come more than once
        with serving(python, target, layers, files, log, dtype=dtype, options=plain) as url:
            run = train(work, dtype, target, kl, f"target.server={url}", f"target.server_files={files}")
            found[dtype] = {
                "largest_relative_error_of_a_token": run["server"]["errors"],
                "on_documents_of": run["server"]["lengths"],
                "losses": run["losses"],
                "speeds": speeds(url, files, documents, layers, shape.hidden_size),
            }
            found["vllm"] = run["server"]["version"]
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print, and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.served_target", description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="the interpreter that has vLLM")
    parser.add_argument("--rows", type=int, default=200, help="conversations prepared, the first ones")
    parser.add_argument("--out", type=Path, default=RESULTS / "served-target-cpu.json")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="paceline-served-") as work:
        found = measure(Path(work), str(demo_target()), options.python, options.rows)
    result = {
        "command": f"python -m benchmarks.served_target --python PYTHON_WITH_VLLM --rows {options.rows}",
        "machine": {"machine": platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "paceline": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
            "vllm": f"{found.pop('vllm')} (CPU)",
        },
        "target": "SmolLM2-135M-Instruct",
        **found,
    }
    text = json.dumps(result, indent=1) + "\n"
    options.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return result


if __name__ == "__main__":
    main()
