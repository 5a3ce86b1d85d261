"""What is loaded is data and never code: a rule over the syntax trees of the package, and files that would run code."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.data.dataset import Dataset
from paceline.errors import CheckpointError, ConfigError, DataError, ModelError, PacelineError
from paceline.files import sha256
from paceline.models.target import Target
from paceline.profiling import metrics_endpoint
from paceline.train import checkpoint
from tests.toy import Toy, train

ROOT = Path(__file__).parents[2]

UNPICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "pandas"}
YAML = {"safe_load", "safe_dump", "YAMLError"}
SHELL = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"}
CODE = {"eval", "exec", "compile", "__import__", "runpy.run_path", "runpy.run_module", "code.interact"}
UNPACKING = {"extractall", "extract", "unpack_archive"}
UNPICKLING_LOADS = {"torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "cPickle.load"}
EVERYWHERE = {"0.0.0.0", "::", "::0"}

EXCEPTIONS = {
    ("control/socket.py", "bind"): "of an AF_UNIX address with mode 0600; the test below looks at the family",
    ("profiling/metrics_endpoint.py", "server"): "prometheus_client's handler on ADDRESS; the test below looks at it",
    ("report/live.py", "server"): "the page of a run on ADDRESS, loopback; test_report looks at the socket's address",
    ("train/group.py", "bind"): "of the run's own address, loopback for its own cluster; test_group tries another one",
    ("models/assets.py", "import zipfile"): "one named member of a pinned wheel is read, and nothing unpacked",
}
"""What a rule finds and is right as it is, with the reason."""


def findings(source: str) -> Iterator[tuple[str, int]]:
    """Each place that could run or unpack what a file holds, or open a port: what was found, and the line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (
                (f"import {name}", node.lineno) for name in _imported(node) & (UNPICKLING | {"tarfile", "zipfile"})
            )
        elif isinstance(node, ast.Call):
            yield from ((found, node.lineno) for found in _of_call(node))
        elif isinstance(node, ast.Attribute):
            if ast.unparse(node.value) == "yaml" and node.attr not in YAML:
                yield f"yaml.{node.attr}", node.lineno
            if node.attr in ("AF_INET", "AF_INET6"):
                yield node.attr, node.lineno
        elif isinstance(node, ast.ClassDef):
            yield from (("server", node.lineno) for base in node.bases if ast.unparse(base).endswith("Server"))
        elif isinstance(node, ast.Constant) and node.value in EVERYWHERE:
            yield f"address {node.value}", node.lineno
        elif isinstance(node, ast.Dict):
            yield from (
                ("remote code", node.lineno)
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant) and key.value == "trust_remote_code" and _is_true(value)
            )
        elif isinstance(node, ast.arguments):
            both = [*zip(reversed([*node.posonlyargs, *node.args]), reversed(node.defaults), strict=False)]
            both += [(name, value) for name, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value]
            yield from (
                ("remote code", name.lineno)
                for name, value in both
                if name.arg == "trust_remote_code" and _is_true(value)
            )


def _imported(node: ast.Import | ast.ImportFrom) -> set[str]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return {name.partition(".")[0] for name in names}


def _of_call(node: ast.Call) -> Iterator[str]:
    name, keywords = ast.unparse(node.func), {each.arg: each.value for each in node.keywords}
    last = name.rpartition(".")[2]
    if name in CODE | SHELL | UNPICKLING_LOADS:
        yield name
    if name in ("np.load", "numpy.load") and "allow_pickle" not in keywords:
        yield "np.load"
    if "allow_pickle" in keywords and not _is_false(keywords["allow_pickle"]):
        yield "allow_pickle"
    if "shell" in keywords and not _is_false(keywords["shell"]):
        yield "shell"
    if "trust_remote_code" in keywords and _is_true(keywords["trust_remote_code"]):
        yield "remote code"
    if last in UNPACKING and "filter" not in keywords and name != "re.extract":
        yield last
    if last == "bind" and isinstance(node.func, ast.Attribute):
        yield "bind"
    if last.endswith("Server") and last != "_Server":
        yield "server"


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_the_package_runs_and_unpacks_nothing_that_it_reads() -> None:
    """No file of the package breaks a rule, but for the exceptions with their reasons, all of which are needed."""
    found, used = [], set()
    for path in sorted((ROOT / "paceline").rglob("*.py")):
        place = str(path.relative_to(ROOT / "paceline"))
        for what, line in findings(path.read_text(encoding="utf-8")):
            if (place, what) in EXCEPTIONS:
                used.add((place, what))
            else:
                found.append(f"paceline/{place}:{line}: {what}")
    assert not found, "\n".join(found)
    assert used == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from joblib import load",
        "import torch\ntorch.load('x', weights_only=True)",
        "np.load('x')",
        "np.load('x', allow_pickle=True)",
        "np.fromfile('x', allow_pickle=flag)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "exec(compile(text, 'x', 'exec'))",
        "subprocess.run(command, shell=True)",
        "os.system(command)",
        "f(trust_remote_code=True)",
        "{'trust_remote_code': True}",
        "def f(*, trust_remote_code=True): ...",
        "def f(a, trust_remote_code=True): ...",
        "socket.socket(socket.AF_INET)",
        "listener.bind(('', 80))",
        "class S(http.server.ThreadingHTTPServer): ...",
        "serve('0.0.0.0')",
        "archive.extractall(folder)",
        "shutil.unpack_archive(file)",
    ],
)
def test_a_broken_rule_is_found(source: str) -> None:
    """Each kind of it, wherever it stands."""
    assert list(findings(source))


@pytest.mark.parametrize(
    "source",
    [
        "re.compile(text)",
        "torch.compile(f)",
        "model.eval()",
        "np.load('x', allow_pickle=False)",
        "yaml.safe_load(text)",
        "f(trust_remote_code=config.target.trust_remote_code)",
        "subprocess.run([a, b])",
        "archive.extractall(folder, filter='data')",
        "def f(a, b=True, trust_remote_code=False): ...",
    ],
)
def test_what_follows_the_rules_passes(source: str) -> None:
    """It is not reported."""
    assert not list(findings(source))


def test_the_two_listeners_stay_on_this_machine() -> None:
    """The control socket is of the file system; metrics are served on loopback alone."""
    tree = ast.parse((ROOT / "paceline" / "control" / "socket.py").read_text(encoding="utf-8"))
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "socket.socket"]
    assert made and {ast.unparse(node.args[0]) for node in made} == {"socket.AF_UNIX"}
    assert metrics_endpoint.ADDRESS == "127.0.0.1"


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        return os.open, (str(self.marker), os.O_CREAT | os.O_WRONLY)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """What must not be there at the end of a test."""
    path = tmp_path / "the-code-was-run"
    yield path
    assert not path.exists()


def bomb(marker: Path) -> bytes:
    data = pickle.dumps(Bomb(marker))
    os.close(pickle.loads(data))
    assert marker.exists()  # it works
    marker.unlink()
    return data


@pytest.fixture(scope="module")
def trained(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    train(toy.config(run_dir, "run.max_steps=2"))
    return run_dir


def replace(path: Path, data: bytes) -> None:
    """A file that the manifest beside it vouches for."""
    path.write_bytes(data)
    manifest = path.with_name("manifest.json")
    content = json.loads(manifest.read_text())
    if path.name in content["files"]:
        content["files"][path.name] = {"bytes": len(data), "sha256": sha256(path)}
        manifest.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_pickle_in_a_checkpoint_is_refused(toy: Toy, trained: Path, tmp_path: Path, marker: Path, name: str) -> None:
    """Under any of its names, with a manifest that agrees: resuming ends with our error, and no code runs."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir, symlinks=True)
    place = (run_dir / "checkpoints" / "latest").resolve()
    data = bomb(marker)
    place.joinpath(name).write_bytes(data) if name == "manifest.json" else replace(place / name, data)
    with pytest.raises(CheckpointError):
        train(toy.config(run_dir, "run.max_steps=3"))
    if name in ("model.safetensors", "manifest.json"):
        with pytest.raises(CheckpointError):
            checkpoint.load_drafter(run_dir)


@pytest.mark.parametrize("name", ["rows.arrow", "tokens.npy", "prepare.json"])
def test_a_pickle_in_a_data_set_is_refused(toy: Toy, tmp_path: Path, marker: Path, name: str) -> None:
    """Under the name of any of its files, and also inside numpy's own format, which can hold one."""
    folder = tmp_path / "data"
    shutil.copytree(toy.data, folder)
    path = next(folder.glob(name))
    data = [bomb(marker)]
    if name.endswith(".npy"):
        import numpy as np

        packed = io.BytesIO()
        np.save(packed, np.array([Bomb(marker)], dtype=object), allow_pickle=True)
        data.append(packed.getvalue())
    for each in data:
        path.write_bytes(each)
        with pytest.raises(DataError):
            Dataset.open(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json", "tokenizer.json"])
def test_a_pickle_in_a_target_is_refused(toy: Toy, tmp_path: Path, marker: Path, name: str) -> None:
    """Weights come from safetensors files alone; the error is ours."""
    folder = tmp_path / "target"
    shutil.copytree(toy.target, folder)
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(bomb(marker))
    with pytest.raises(PacelineError) as caught:
        if name == "tokenizer.json":
            train(toy.config(tmp_path / "run", f"target.path={folder}"))
        else:
            Target.load(str(folder), layer_ids=(1,))
    assert isinstance(caught.value, ModelError)


def test_weights_in_pickled_form_are_not_read_at_all(toy: Toy, tmp_path: Path) -> None:
    """Harmless ones neither: what would load them would load others."""
    import torch
    from safetensors.torch import load_file

    folder = tmp_path / "target"
    shutil.copytree(toy.target, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        Target.load(str(folder), layer_ids=(1,))


@pytest.mark.parametrize(
    "text",
    [
        "target: !!python/object/apply:os.open ['{marker}', 65]",
        "!!python/object/apply:os.open ['{marker}', 65]",
        "target: {{path: !!python/object/new:os.open ['{marker}', 65]}}",
        "target: !!python/name:os.system",
    ],
)
def test_yaml_that_makes_objects_is_refused(tmp_path: Path, marker: Path, text: str) -> None:
    """In a run file, in an override and in the configuration of a run folder."""
    text = text.format(marker=marker)
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_config(file)
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(None, [f"target.path={text.partition(': ')[2] or text}"])


def test_a_run_folder_without_trust_cannot_bring_code(toy: Toy, tmp_path: Path, marker: Path) -> None:
    """A target whose configuration names code of its own is refused, unless it was asked for."""
    folder = tmp_path / "target"
    shutil.copytree(toy.target, folder)
    content = json.loads((folder / "config.json").read_text())
    content |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(ModelError):
        Target.load(str(folder), layer_ids=(1,))


@pytest.mark.parametrize("name", ["../{outside}", "{outside}", "sub/../../{outside}"])
def test_names_in_an_index_of_weights_cannot_lead_away(toy: Toy, tmp_path: Path, name: str) -> None:
    """A shard that lies outside of the target's folder is refused, in a quantised folder as well."""
    from paceline.models import dequantize

    folder, outside = tmp_path / "target", tmp_path / "outside.safetensors"
    shutil.copytree(toy.target, folder)
    (folder / "sub").mkdir()
    shutil.move(folder / "model.safetensors", outside)
    shard = name.format(outside=outside if name == "{outside}" else outside.name)
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError):
        dequantize._weight_files(folder)


@pytest.mark.parametrize("name", ["../state.json", "/etc/hostname", "..", "a/b"])
def test_names_in_a_manifest_cannot_lead_away(trained: Path, tmp_path: Path, name: str) -> None:
    """A checkpoint's manifest can name files of its own folder alone."""
    place = tmp_path / "step-00000002"
    shutil.copytree((trained / "checkpoints" / "latest").resolve(), place)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["state.json"]
    (place / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        checkpoint.verify(place)


def test_a_run_folder_has_nothing_of_the_environment(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of a whole run holds the value of an environment variable that is a secret, nor where its name is."""
    for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "SOMETHING"):
        monkeypatch.setenv(name, f"secret-of-{name}")
    train(toy.config(tmp_path / "run", "run.max_steps=2", "tracking.tensorboard=true"))
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path for path in files if b"secret-of-" in path.read_bytes()] == []


def test_pages_are_written_by_escaping_blocks_alone() -> None:
    """Outside of `report.page`, whose blocks escape what they show, no text is declared to be markup, or holds any."""
    for path in sorted((ROOT / "paceline" / "report").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Html":
                assert not node.args or path.name == "page.py", f"{path}:{node.lineno}"
            if isinstance(node, ast.JoinedStr) and path.name != "page.py":
                texts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                assert not any(re.search(r"<[a-z/!]", str(text)) for text in texts), f"{path}:{node.lineno}"
