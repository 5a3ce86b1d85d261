"""Every command, run file and key that the documents show is one that the program has."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from paceline.cli.main import app
from paceline.config import RunConfig, load_config, parse_config, valid_keys
from paceline.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BY_NAME = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())

COMMANDS = typer.main.get_command(app)
FENCE = re.compile(r"^ *```")
COMMAND = re.compile(r"^(?:\$ |.* -- )?((?:\.venv/bin/)?paceline (?!/).*)")
SECTION = re.compile(rf"^({'|'.join(RunConfig.model_fields)}):(?: |$)")
KEY = re.compile(rf"^({'|'.join(RunConfig.model_fields)})\.([a-z_0-9]+)(?:[=:] ?.*)?$")
FILE_ENDINGS = {"json", "yaml", "jsonl", "lock", "py", "md", "html"}
SHELL_ENDS = {"|", ">", ">>", "2>", "&&", "||", ";", "&"}


def blocks(text: str) -> Iterator[list[tuple[int, str]]]:
    """Fenced and indented blocks, as (line number, line without the indentation)."""
    fenced, block = False, list[tuple[int, str]]()
    before = ""
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if FENCE.match(line):
            yield block
            fenced, block = not fenced, []
        elif fenced:
            block.append((number, line))
        elif line.startswith("    ") and (block or not before.strip()):
            block.append((number, line[4:]))
        elif line.strip():
            yield block
            block = []
        before = line
    yield block


def inline_code(text: str) -> Iterator[tuple[int, str]]:
    """Spans of code in running text, which may go on on the next line."""
    prose = re.sub(r"^```.*?^```", lambda fence: "\n" * fence[0].count("\n"), text, flags=re.M | re.S)
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose):
        yield prose[: match.start()].count("\n") + 1, " ".join(match[1].split())


def commands(text: str) -> Iterator[tuple[int, list[str], bool]]:
    """The words of each `paceline ...` command line, and whether it is whole.

    Comments and what follows a pipe are left out. Running text names commands without all that they need, and `...`
    stands for more.
    """
    found: list[tuple[int, str]] = []
    for block in blocks(text):
        begun: tuple[int, str] | None = None
        for number, line in block:
            if begun is not None:
                begun = (begun[0], begun[1] + " " + line.strip())
            elif match := COMMAND.match(line.strip()):
                begun = (number, match[1])
            if begun is not None and begun[1].endswith("\\"):
                begun = (begun[0], begun[1].removesuffix("\\").rstrip())
            elif begun is not None:
                found.append(begun)
                begun = None
    in_blocks = len(found)
    found += [(number, code) for number, code in inline_code(text) if code.startswith("paceline ")]
    for i_found, (number, line) in enumerate(found):
        words = shlex.split(re.split(r"  +[a-z]", line)[0], comments=True)  # behind two blanks: what it does, in words
        end = next((i for i, word in enumerate(words) if word in SHELL_ENDS), len(words))
        yield number, [word for word in words[1:end] if word != "..."], i_found < in_blocks and "..." not in words


def problem(words: list[str], whole: bool) -> str | None:
    """What is wrong with a command; placeholders (capitals, `A|B`, `[--option]`) stand for anything."""
    command: Any = COMMANDS
    words = [word.strip("[]") for word in words]
    while hasattr(command, "commands"):
        options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        while words and words[0] in options:
            words = words[1:]
        if not words:
            return None  # `paceline profile` alone prints its help
        if words[0] not in command.commands:
            return f"no verb {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    options = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}
    arguments, seen = list[str](), set[str]()
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            arguments.append(word)
            continue
        name, _, value = word.partition("=")
        if name == "--help":
            continue
        if name not in options:
            return f"no option {name}"
        option = options[name]
        seen.add(option.name)
        if option.is_flag:
            continue
        value = value or next(rest, "")
        if not value:
            return f"{name} wants a value" if whole else None
        # Typer 0.29 keeps its own description of a type in place of click's.
        choices = getattr(getattr(option, "type_descriptor", None) or option.type, "choices", None)
        if choices and not value.isupper() and not set(value.split("|")) <= {str(choice) for choice in choices}:
            return f"{name} {value}: one of {', '.join(map(str, choices))} was wanted"
    positional = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    if len(arguments) > len(positional) and all(parameter.nargs == 1 for parameter in positional):
        return f"{len(arguments)} arguments, {len(positional)} were wanted"
    missing = [option.opts[0] for option in options.values() if option.required and option.name not in seen]
    missing = [name for name in missing if name.startswith("--")]
    missing += [argument.name for argument in positional if argument.required][len(arguments) :]
    if whole and missing:
        return f"without {missing[0]}"
    for override in (word for word in arguments if "=" in word and KEY.match(word)):
        try:
            load_config(None, ["target.path=T", "data.path=D", override])
        except ConfigError as error:
            return str(error)
    return None


def sections(text: str) -> Iterator[tuple[int, str]]:
    """Pieces of run files: a section of the tree with its indented lines, in blocks and as inline code."""
    for block in blocks(text):
        piece: tuple[int, str] | None = None
        for number, line in [*block, (0, "end")]:
            if piece is not None and line.startswith((" ", "#")):
                piece = (piece[0], f"{piece[1]}\n{line}")
                continue
            if piece is not None:
                yield piece
            piece = (number, line) if SECTION.match(line) else None
    yield from (
        (number, code) for number, code in inline_code(text) if re.match(r"^\w+: \{", code) and SECTION.match(code)
    )


@BY_NAME
def test_commands_exist(page: Path) -> None:
    """Each command of a page names a verb, options, choices and keys that there are."""
    wrong = [
        f"{page.name}:{number}: paceline {' '.join(words)}: {what}"
        for number, words, whole in commands(page.read_text(encoding="utf-8"))
        if (what := problem(words, whole))
    ]
    assert not wrong, "\n".join(wrong)


@BY_NAME
def test_run_files_are_valid(page: Path) -> None:
    """Each piece of a run file on a page is taken by the run file's own model."""
    wrong = []
    for number, piece in sections(page.read_text(encoding="utf-8")):
        try:
            tree = {"target": {"path": "T"}, "data": {"path": "D"}}
            for name, section in yaml.safe_load(piece).items():
                tree[name] = {**tree.get(name, {}), **section}
            parse_config(tree)
        except (ConfigError, yaml.YAMLError, TypeError) as error:
            wrong.append(f"{page.name}:{number}: {piece}: {error}")
    assert not wrong, "\n".join(wrong)


@BY_NAME
def test_keys_exist(page: Path) -> None:
    """Each `section.key` in running text is a key of the run file."""
    wrong = []
    for number, code in inline_code(page.read_text(encoding="utf-8")):
        match = KEY.match(code)
        if match and match[2] not in FILE_ENDINGS and f"{match[1]}.{match[2]}" not in valid_keys():
            wrong.append(f"{page.name}:{number}: {code}")
    assert not wrong, "\n".join(wrong)


@BY_NAME
def test_files_and_verbs_exist(page: Path) -> None:
    """Each file of the repository, benchmark, make verb and extra that a page names is there."""
    text = page.read_text(encoding="utf-8")
    files = re.findall(r"(?<![\w/.-])((?:paceline|tests|scripts|benchmarks|docs)/[\w/-]+\.\w+)", text)
    modules = re.findall(r"python -m (benchmarks(?:\.\w+)+)", text)
    files += [f"{name.replace('.', '/')}.py" for name in modules]
    wrong = [name for name in files if not (ROOT / name).is_file()]
    named = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    wrong += [name for name in re.findall(r"`(test_\w+\.py)`", text) if name not in named]
    verbs = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    wrong += [
        f"make {verb}" for verb in re.findall(r"(?:`|^    )make ([a-z-]+)", text, flags=re.M) if verb not in verbs
    ]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wrong += [name for each in re.findall(r"'\.\[([\w,]+)\]'", text) for name in each.split(",") if name not in extras]
    assert not wrong, f"{page.name} names what does not exist: {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("    paceline train run.yaml optim.lr=3e-4 --dry-run   # a comment", None),
        ("    paceline stop RUN [--now]      from another terminal", None),
        ("    paceline export RUN --format zlab|speculators \\\n        --out DIR", None),
        ("    ray job submit --entrypoint-num-gpus 1 -- paceline train run.yaml", None),
        ("Say `paceline train\nrun.yaml --dry-run`.", None),
        ("    paceline trian run.yaml", "no verb 'trian'"),
        ("```sh\npaceline train run.yaml --dryrun\n```", "no option --dryrun"),
        ("    paceline export RUN --format zlib --out DIR", "--format zlib: one of"),
        ("    paceline export RUN \\\n        --outt DIR", "no option --outt"),
        ("    paceline export RUN", "without --out"),
        ("    paceline export ...", None),
        ("    paceline export --out DIR", "without "),
        ("    paceline status RUN more", "2 arguments, 1 were wanted"),
        ("    paceline train run.yaml optim.rate=1", "optim.rate"),
        ("    paceline train run.yaml draft.block_size=many", "draft.block_size"),
        ("Say `paceline profile of RUN`.", "no verb 'of'"),
    ],
)
def test_a_wrong_command_is_found(line: str, what: str | None) -> None:
    """What the test of pages looks for is found in every form that pages use."""
    (found,) = [problem(words, whole) for _, words, whole in commands("Text.\n\n" + line + "\n\nMore text.\n")]
    assert found is None if what is None else what in (found or "")
