"""`--profile-interval` and DFLASH_PROFILE_INTERVAL: which beats which, what switches off, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import train
from paceline.cli.train import PROFILE_VARIABLE, profile_interval_of
from paceline.config import RunConfig, dump_config, load_config
from paceline.errors import ConfigError
from tests.toy import Toy

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(train.train)
app.command()(train.resume)


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROFILE_VARIABLE, raising=False)


def config(interval: float = 0.0) -> RunConfig:
    return load_config(None, ["run.dir=r", "target.path=t", "data.path=d", f"profiling.interval={interval}"])


@pytest.mark.parametrize(
    ("flag", "variable", "interval"),
    [
        (None, None, 30.0),
        (None, "20", 20.0),
        ("10", "20", 10.0),
        ("10", None, 10.0),
        ("0", "20", 0.0),
        (None, "0", 0.0),
        ("0", None, 0.0),
        (None, "", 30.0),
        ("0.25", "nonsense", 0.25),
        (" 86400 ", None, 86_400.0),
    ],
)
def test_the_flag_beats_the_variable_and_that_the_run_file(
    flag: str | None, variable: str | None, interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 is off wherever it is said, and an empty variable says nothing."""
    if variable is not None:
        monkeypatch.setenv(PROFILE_VARIABLE, variable)
    assert profile_interval_of(config(30.0), flag) == interval


@pytest.mark.parametrize("bad", ["ten", "-1", "nan", "inf", "86401", "1,5", " ", "5s"])
@pytest.mark.parametrize("is_flag", [True, False])
def test_a_bad_value_names_where_it_came_from(bad: str, is_flag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no number of seconds from 0 to a day is refused with its source, the value, and what was wanted."""
    if not is_flag:
        monkeypatch.setenv(PROFILE_VARIABLE, bad)
    name = "--profile-interval" if is_flag else PROFILE_VARIABLE
    with pytest.raises(ConfigError) as caught:
        profile_interval_of(config(), bad if is_flag else None)
    assert str(caught.value) == f"{name}={bad!r}: a number of seconds from 0 (off) to 86400 was wanted"


def test_a_bad_value_in_the_run_file_names_its_key() -> None:
    """The key of the file has the same limits."""
    with pytest.raises(ConfigError, match="profiling.interval"):
        config(-1.0)


def test_the_command_takes_the_flag_and_the_variable(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`paceline train` resolves them before anything is loaded, shows the result, and ends on a bad one."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text(dump_config(toy.config(tmp_path / "run")))
    monkeypatch.setenv(PROFILE_VARIABLE, "12")

    def interval(*options: str) -> float:
        result = CliRunner().invoke(app, ["train", str(run_file), "--dry-run", "--json", *options])
        assert result.exit_code == 0, result.output
        content = json.loads(result.stdout)
        assert content["config"]["profiling"]["interval"] == 0.0  # what is kept is the run file's
        return content["plan"]["profile_interval_s"]

    assert (interval(), interval("--profile-interval", "3")) == (12.0, 3.0)
    assert interval("--profile-interval", "0") == 0.0
    result = CliRunner().invoke(app, ["train", str(run_file), "--dry-run", "--profile-interval", "x"])
    assert isinstance(result.exception, ConfigError) and "--profile-interval='x'" in str(result.exception)
    monkeypatch.setenv(PROFILE_VARIABLE, "soon")
    result = CliRunner().invoke(app, ["train", str(run_file), "--dry-run"])
    assert isinstance(result.exception, ConfigError) and PROFILE_VARIABLE in str(result.exception)
    assert not (tmp_path / "run").exists()
