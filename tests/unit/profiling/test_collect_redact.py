"""Commands without their secrets."""

from __future__ import annotations

import string
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.profiling.collect import redact
from paceline.profiling.collect.redact import redacted

HEX = "0123456789abcdef" * 3


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["python", "train.py", "--lr", "1e-4"], "python train.py --lr 1e-4"),
        (["/opt/env/bin/python3", "/home/me/code/proj/train.py"], ".../bin/python3 .../proj/train.py"),
        (["t", "--config=/a/b/c/d.yaml", "a/b.py", "~/x/y/z"], "t --config=.../c/d.yaml a/b.py .../y/z"),
        (["t", "--pw", "x", "--pat", "y", "https://h/b?sig=z"], "t --pw *** --pat *** https://h/b?sig=***"),
        (["t", "--api-key", "x", "y"], "t --api-key *** y"),
        (["t", "--api-key=x=y z"], "t --api-key=***"),
        (["t", "-password", "x"], "t -password ***"),
        (["t", "--use-auth", "--api-key", "x"], "t --use-auth *** ***"),
        (["t", "--auth", "-c", "code", "x"], "t --auth *** ... x"),
        (["t", "--tokens", "a", "b", "--lr", "1"], "t --tokens *** *** --lr 1"),
        (["env", "API_KEY=x", "AWS_SECRET_ACCESS_KEY=y", "python"], "env API_KEY=*** AWS_SECRET_ACCESS_KEY=*** python"),
        (["t", "wandb.api_key=x", "+a.dsn=y"], "t wandb.api_key=*** +a.dsn=***"),
        (["curl", "-H", "Authorization: Bearer x"], "curl -H Authorization:***"),
        (["curl", "--header=Authorization: Token x y"], "curl --header=Authorization:***"),
        (["curl", "-H", "X-Api-Key: x"], "curl -H X-Api-Key:***"),
        (["curl", "-u", "me:x", "-b", "cookie=y"], "curl -u *** -b cookie=***"),
        (["t", "https://me:x@host/a/b/c?token=y&n=1"], "t https://***@host/a/b/c?token=***&n=1"),
        (["t", "postgresql://me:x/y@host:1/db"], "t postgresql://***@host:1/db"),
        (["t", '{"api_key": "x y", "lr": 3}'], 't "{"api_key": *** "lr": 3}"'),
        (["ssh", "h", "cd /a; A_TOKEN=x t --password y"], 'ssh h "cd /a; A_TOKEN=*** t --password ***"'),
        (["python", "-c", "key = 'x'", "a"], "python -c ... a"),
        (["bash", "-lc", "t --token x"], "bash -lc ..."),
        (["python", "-cimport x"], "python -c..."),
        (["ray::Actor.step --token x"], "ray::Actor.step --token ***"),
        (["ray::a Authorization: Basic x Bearer y"], "ray::a Authorization:*** *** *** Bearer ***"),
        (["t", "--config", "basic", "--lr", "1"], "t --config basic --lr 1"),
        (["t", "hf_abcdefghij", "sk-proj-abcdefgh", "ghp_abcdefghij"], "t *** *** ***"),
        (["t", "AKIAABCDEFGHIJKLMNOP", "eyJhbGciOiJIUzI1.eyJzdWIi.abc"], "t *** ***"),
        (["wandb", "login", HEX[:40]], "wandb login ***"),
        (["t", f"/a/hub/snapshots/{HEX[:40]}/config.json"], "t .../***/config.json"),
        (["t", "Zm9vYmFyQmF6MTIzNDU2Nzg5MFFxV3d5/K+x=="], "t ***=="),
        (["t", "--max-new-tokens", "128", "num_key_value_heads=8"], "t --max-new-tokens 128 num_key_value_heads=8"),
        (["t", "--tokenizer", "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8-Dynamic"],) * 2,
        (["t", "--tokens-per-step=65536"], "t --tokens-per-step=65536"),
        (["t", ""], 't ""'),
        (["t\x1b[31m", "a\nb"], "t\\x1b[31m " + '"a b"'),
        ([], ""),
    ],
)
def test_redaction(argv: list[str], shown: str | list[str]) -> None:
    """Secrets are masked, code is left out, folders are cut to two parts, and the rest can be read."""
    assert redacted(argv) == (shown if isinstance(shown, str) else " ".join(shown))


def test_a_long_command_is_cut() -> None:
    """However long a command is, what is shown is not, and it takes no time."""
    for word in ("a=" * 9999, "/" * 9999, "w" * 9999, "://a:" * 9999, '{"' * 9999, "a " * 9999, "a/" * 9999):
        begin = time.thread_time()
        assert len(redacted(["t", *[word] * 500])) <= redact.COMMAND_CHARACTERS
        assert time.thread_time() - begin < 10


secret_names = st.tuples(
    st.text(string.ascii_letters + "-_.", max_size=6),
    st.sampled_from(
        ["api-key", "API_KEY", "token", "Secret", "password", "passwd", "credential", "AUTH", "cookie", "dsn"]
    ),
    st.text(string.ascii_letters + "_-", max_size=6),
).map("".join)
# Letters that no mask, name or program of the test has.
secrets = st.text("\u00e4\u00f6\u00fc =:/\"'-&?@,;{}[]\n\\\x1b123", min_size=1, max_size=40).map(
    lambda text: f"\u00df{text}\u00df"
)


@given(
    name=secret_names, secret=secrets, before=st.lists(st.sampled_from(["run", "--lr", "1", "-x", "--use-auth", "-m"]))
)
@example(name="api-key", secret="--token", before=["--use-auth"])
@example(name="s", secret="\u00df", before=[])
def test_a_secret_is_never_shown(name: str, secret: str, before: list[str]) -> None:
    """Whatever the value of an option or assignment with a secret's name, nothing of it is shown."""
    if not redact._names_secret(name):
        return
    for argv in (
        [f"--{name}={secret}"],
        [f"--{name}", secret],
        [f"{name}={secret}"],
        ["-H", f"{name}: {secret}"],
        [f"--header={name}: {secret}"],
        [f"--{name}", secret, "after"],
    ):
        assert "\u00df" not in redacted(["tool", *before, *argv]), argv


@given(st.lists(st.text(max_size=60), max_size=8))
def test_redaction_takes_anything(argv: list[str]) -> None:
    """Any arguments give one printable line of limited length."""
    shown = redacted(argv)
    assert len(shown) <= redact.COMMAND_CHARACTERS
    assert shown.isprintable()
