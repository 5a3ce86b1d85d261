"""Sorts stacks into what their threads were doing, by the ordered rules of ``rules.toml``.

The first rule that fits decides, and most rules look at any frame: an allocator that frees memory ends in a wait for
the device, and the cause is the allocator. A stack that no rule knows is ``other`` and stays visible as unmatched.

A pattern is ``NAME @ FILE``, either part of which may be missing. NAME is ``=exact`` (the last part of a Python
function's qualified name, or a symbol without its version), ``^prefix``, ``/regex/``, or a substring; C++ template
arguments are taken out first, as they name functions that were not called. FILE is a Python file's path from its
package on (``torch/utils/checkpoint.py``), a folder of Python files with a slash at its end, or part of a native
frame's library. Where a stack has bare file names, the last part of the pattern's file is compared, and folders match
nothing. ``<python>`` and ``<native>`` fit every frame of that kind.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.profiling.evidence import CATEGORIES, AttachError, Figure, Frame, LevelId, Sorted, Stack
from paceline.profiling.statistics import wilson

RULES_FILE = Path(__file__).with_name("rules.toml")
UNMATCHED = 0.2
"""A level of which rules know nothing of more than this is weak."""
IDLE = {"sleep", "queue_wait", "lock", "io"}
"""A thread that is never seen in anything else was idle all the time."""
OTHER = "other"

Where = Literal["any", "leaf", "inner", "python"]
_ADDRESS = re.compile(r"0x[0-9a-fA-F?]+$|\?+$|$|\[unknown\]$")
_PLUMBING = re.compile(r"(__)?futex_|__internal|___pthread|.*_common(64)?$|_start$|clone3?$")
"""Of libc, beneath the function that was called."""
_TEMPLATE = re.compile(r"<[^<>]*>")
_VERSION = re.compile(r"@@?(GLIBC|GCC|CXXABI)\w*[\d.]*$")


@dataclass(frozen=True)
class Rule:
    """When a stack belongs to a category; conditions that are not given always hold.

    Attributes:
        about: What it means to see this.
        frames: One of these patterns fits a frame at `where`: ``any``, the ``leaf`` (innermost frame with a name), the
            ``inner`` frame (innermost outside of the C library), the innermost ``python`` frame.
        above: The frame that called the one that fits (of Python frames the next Python frame) fits one of these.
        with_: Some frame fits one of these as well.
        without: No frame fits any of these.
        comms: Name of the thread at the operating system, as regular expressions.
        levels, states, syscalls: Of the stack; one of these.
        has_gil: Answers that are allowed: ``yes``, ``no``, ``unknown``.
        waits_for_gil: Whether the tool itself must have said so.
    """

    id: str
    category: str
    about: str = ""
    frames: tuple[str, ...] = ()
    where: Where = "any"
    above: tuple[str, ...] = ()
    with_: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    comms: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    syscalls: tuple[str, ...] = ()
    has_gil: tuple[str, ...] = ()
    waits_for_gil: bool = False


@dataclass(frozen=True)
class _Seen:
    """A stack as rules see it: of each frame, the set of patterns that fit it, as bits.

    Attributes:
        frames: Outermost first.
        callers: Of each, the bits of the frame that called it; bare addresses call nothing.
        leaf, inner, python: Indices into `frames`; -1: there is none.
        tags: What else the stack says.
    """

    frames: tuple[int, ...]
    callers: tuple[int, ...]
    all: int
    leaf: int
    inner: int
    python: int
    tags: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Rules:
    """Rules in their order, made ready to be matched.

    Attributes:
        tag_patterns: Patterns of the engine, of checkpointing, and of data loading, for tags.
    """

    rules: tuple[Rule, ...]
    tag_patterns: Mapping[str, tuple[str, ...]]
    _bits: dict[str, int] = field(default_factory=dict)
    _tests: list[tuple[int, Callable[[str, str, bool], bool]]] = field(default_factory=list)
    _masks: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    _frames: dict[tuple[str, str, bool], int] = field(default_factory=dict)
    _stacks: dict[tuple[Frame, ...], _Seen] = field(default_factory=dict)
    _comms: dict[tuple[str, ...], re.Pattern[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rule in self.rules:
            self._masks[rule.id] = (
                self._mask(rule.frames),
                self._mask(rule.above),
                self._mask(rule.with_),
                self._mask(rule.without),
            )
            self._comms[rule.comms] = re.compile("|".join(rule.comms))
        for patterns in self.tag_patterns.values():
            self._mask(patterns)

    def match(self, stack: Stack, comm: str = "") -> tuple[Rule | None, tuple[str, ...]]:
        """The first rule that fits, and tags."""
        seen = self._look_at(stack.frames)
        tags = seen.tags
        if "autograd" not in tags and comm.startswith("pt_autograd_"):
            tags = tuple(sorted({*tags, "autograd"}))
        return next((rule for rule in self.rules if self._fits(rule, stack, seen, comm)), None), tags

    def _fits(self, rule: Rule, stack: Stack, seen: _Seen, comm: str) -> bool:
        frames, above, with_, without = self._masks[rule.id]
        if frames and not seen.all & frames:
            return False
        if without & seen.all or (with_ and not with_ & seen.all):
            return False
        if frames and not _fits_at(rule.where, seen, frames, above):
            return False
        return (
            (not rule.waits_for_gil or stack.waits_for_gil)
            and (not rule.levels or stack.level in rule.levels)
            and (not rule.states or stack.state in rule.states)
            and (not rule.syscalls or stack.syscall in rule.syscalls)
            and (not rule.has_gil or {True: "yes", False: "no", None: "unknown"}[stack.has_gil] in rule.has_gil)
            and (not rule.comms or self._comms[rule.comms].search(comm) is not None)
        )

    def _mask(self, patterns: Iterable[str]) -> int:
        mask = 0
        for pattern in patterns:
            if pattern not in self._bits:
                self._bits[pattern] = 1 << len(self._bits)
                self._tests.append((self._bits[pattern], _compile(pattern)))
            mask |= self._bits[pattern]
        return mask

    def _bits_of(self, name: str, file: str, is_native: bool) -> int:
        key = (name, file, is_native)
        bits = self._frames.get(key)
        if bits is None:
            plain = _plain(name) if is_native else name
            bits = self._frames[key] = sum(bit for bit, test in self._tests if test(plain, file, is_native))
        return bits

    def _look_at(self, frames: tuple[Frame, ...]) -> _Seen:
        seen = self._stacks.get(frames)
        if seen is None:
            seen = self._stacks[frames] = self._read(frames)
        return seen

    def _read(self, frames: tuple[Frame, ...]) -> _Seen:
        bits: list[int] = []
        callers: list[int] = []
        leaf = inner = python = -1
        python_caller = caller = 0
        for frame in frames:
            own, at = self._bits_of(frame.name, frame.file, frame.is_native), len(bits)
            bits.append(own)
            if not frame.is_native:
                callers.append(python_caller)
                python, python_caller = at, own
                leaf, inner, caller = at, at, own
                continue
            callers.append(caller)
            is_libc = _is_libc(frame.file)
            if not _ADDRESS.match(frame.name) and not (is_libc and _PLUMBING.match(frame.name)):
                leaf, caller = at, own
            if not is_libc:
                inner = at
        everything = 0
        for own in bits:
            everything |= own
        tags = self._tags(bits, everything)
        return _Seen(tuple(bits), tuple(callers), everything, leaf, inner, python, tags)

    def _tags(self, frames: Sequence[int], everything: int) -> tuple[str, ...]:
        masks = {tag: self._mask(patterns) for tag, patterns in self.tag_patterns.items()}
        tags = {tag for tag in ("autograd", "data_loading") if masks.get(tag, 0) & everything}
        checkpoint, engine = (_last(frames, masks.get(tag, 0)) for tag in ("checkpoint", "autograd"))
        is_backward = engine >= 0 or masks.get("recompute", 0) & everything
        if checkpoint > engine and is_backward:
            tags |= {"recompute", "autograd"}
        return tuple(sorted(tags))


def load_rules(path: str | Path | None = None) -> Rules:
    """Read a file of rules; the package's own by default.

    Raises: AttachError for a rule that cannot be, saying which and why.
    """
    file = Path(path) if path is not None else RULES_FILE
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise AttachError(f"{file} cannot be read as rules: {error}") from error
    rules: dict[str, Rule] = {}
    for values in content.get("rule", []):
        rule = _rule(values, file)
        if rule.id in rules:
            raise AttachError(f"{file}: two rules are named {rule.id!r}; results refer to rules by name")
        rules[rule.id] = rule
    if not rules:
        raise AttachError(f"{file} has no [[rule]]")
    try:
        return Rules(tuple(rules.values()), {tag: tuple(patterns) for tag, patterns in content.get("tags", {}).items()})
    except re.error as error:
        raise AttachError(f"{file}: {error.pattern!r} is no regular expression: {error}") from error


@cache
def default_rules() -> Rules:
    """The package's own, read once."""
    return load_rules()


def classify(stack: Stack, comm: str = "", rules: Rules | None = None) -> Stack:
    """The stack with its category, the id of the rule that says so, and its tags.

    Args:
        comm: Its thread's name at the operating system.
    """
    rule, tags = (rules or default_rules()).match(stack, comm)
    category, id = (rule.category, rule.id) if rule is not None else (OTHER, "")
    return stack.model_copy(update={"category": category, "rule": id, "tags": tags})


def sort(
    stacks: Iterable[Stack],
    level: LevelId,
    comms: Mapping[tuple[int, int], str] | None = None,
    rules: Rules | None = None,
) -> tuple[list[Stack], Sorted]:
    """Classify a level's stacks and add them up.

    Shares are over threads that were not idle all the time; so is the unmatched one, as a hundred sleeping threads
    would otherwise hide a busy one that nothing is known of. If all were idle, they are over all.

    Args:
        stacks: Those of other levels are left out.
        comms: Names at the operating system, by process and thread.
    """
    names = comms or {}
    done = [classify(stack, names.get((stack.pid, stack.tid), ""), rules) for stack in stacks if stack.level == level]
    idle = _idle_threads(done)
    counted = [stack for stack in done if (stack.pid, stack.tid) not in idle] or done
    categories = _figures(counted, level)
    samples = sum(stack.count for stack in counted)
    unmatched = sum(stack.count for stack in counted if stack.category == OTHER)
    figure = _share(unmatched, samples, level, {stack.rule for stack in counted if stack.category == OTHER})
    return done, Sorted(
        level=level,
        samples=samples,
        categories=categories,
        unmatched=figure,
        is_weak=unmatched > UNMATCHED * samples,
    )


def by_thread(stacks: Iterable[Stack]) -> dict[tuple[int, int], dict[str, Figure]]:
    """What each thread did, by process and thread: shares of its own samples, of classified stacks of one level."""
    threads: dict[tuple[int, int], list[Stack]] = defaultdict(list)
    for stack in stacks:
        threads[stack.pid, stack.tid].append(stack)
    if len({stack.level for own in threads.values() for stack in own}) > 1:
        raise ValueError("stacks of several levels cannot be added up")
    return {thread: _figures(own, own[0].level) for thread, own in threads.items()}


def _figures(stacks: Sequence[Stack], level: LevelId) -> dict[str, Figure]:
    samples = sum(stack.count for stack in stacks)
    counts: Counter[str] = Counter()
    rules: dict[str, set[str]] = defaultdict(set)
    for stack in stacks:
        category = stack.category or OTHER
        counts[category] += stack.count
        rules[category].add(stack.rule)
    return {
        category: _share(counts[category], samples, level, rules[category])
        for category in sorted(counts, key=CATEGORIES.index)
        if counts[category]
    }


def _share(count: int, samples: int, level: LevelId, rules: Iterable[str]) -> Figure:
    return Figure(
        value=count / samples if samples else 0.0,
        interval=wilson(count, samples),
        level=level,
        rules=tuple(sorted(filter(None, rules))),
        samples=samples,
    )


def _idle_threads(stacks: Iterable[Stack]) -> set[tuple[int, int]]:
    """Threads that only waited, or that slept at one place and in one kernel call all the time, whatever for."""
    threads: dict[tuple[int, int], list[Stack]] = defaultdict(list)
    for stack in stacks:
        threads[stack.pid, stack.tid].append(stack)
    return {thread for thread, own in threads.items() if _is_idle(own)}


def _is_idle(own: Sequence[Stack]) -> bool:
    if all(stack.category in IDLE for stack in own):
        return True
    return all(stack.state == "S" for stack in own) and len({(stack.frames, stack.syscall) for stack in own}) == 1


def _fits_at(where: Where, seen: _Seen, frames: int, above: int) -> bool:
    if where == "any":
        if not above:
            return True
        return any(
            own & frames and caller & above for own, caller in zip(seen.frames, seen.callers, strict=True)
        )  # fmt: skip
    at = {"leaf": seen.leaf, "inner": seen.inner, "python": seen.python}[where]
    return at >= 0 and bool(seen.frames[at] & frames) and (not above or bool(seen.callers[at] & above))


def _last(frames: Sequence[int], mask: int) -> int:
    return next((i for i in range(len(frames) - 1, -1, -1) if frames[i] & mask), -1)


def _is_libc(file: str) -> bool:
    name = file.rsplit("/", 1)[-1]
    return name.startswith(("libc.so", "libc-", "libpthread", "ld-", "[vdso]", "?", "libm.so")) or not name


@cache
def _plain(name: str) -> str:
    """Without template arguments and the symbol's version."""
    name = _VERSION.sub("", name)
    while (shorter := _TEMPLATE.sub("", name)) != name:
        name = shorter
    return name


def _compile(pattern: str) -> Callable[[str, str, bool], bool]:
    if pattern in ("<python>", "<native>"):
        wanted = pattern == "<native>"
        return lambda name, file, is_native: is_native == wanted
    name_part, _, file_part = (part.strip() for part in f" {pattern}".partition(" @ "))
    fits_name, fits_file = _name_test(name_part), _file_test(file_part)
    if not file_part:
        return lambda name, file, is_native: fits_name(name)
    wants_native = not file_part.endswith(("/", ".py"))
    return lambda name, file, is_native: is_native == wants_native and fits_name(name) and fits_file(file)


def _name_test(part: str) -> Callable[[str], bool]:
    if part in ("", "*"):
        return lambda name: True
    if part.startswith("="):
        wanted = part[1:]
        return lambda name: name == wanted or name.split("(", 1)[0].rsplit(".", 1)[-1] == wanted
    if part.startswith("^"):
        return lambda name, start=part[1:]: name.startswith(start)  # type: ignore[misc]
    if len(part) > 1 and part.startswith("/") and part.endswith("/"):
        found = re.compile(part[1:-1]).search
        return lambda name: found(name) is not None
    return lambda name: part in name


def _file_test(part: str) -> Callable[[str], bool]:
    if part.endswith("/"):
        return lambda file: f"/{part}" in f"/{file}"
    if part.endswith(".py"):
        bare = part.rsplit("/", 1)[-1]
        return lambda file: file == part or file.endswith(f"/{part}") or file == bare
    return lambda file: part in file


def _rule(values: Mapping[str, Any], file: Path) -> Rule:
    name = values.get("id", "without an id")
    known = {own.name.rstrip("_") for own in fields(Rule)}
    if unknown := set(values) - known:
        raise AttachError(f"{file}: rule {name} has {sorted(unknown)}, known are {sorted(known)}")
    if not isinstance(values.get("id"), str) or values.get("category") not in CATEGORIES:
        category = values.get("category")
        raise AttachError(f"{file}: rule {name} has category {category!r}, wanted an id and one of {list(CATEGORIES)}")
    if values.get("where", "any") not in get_args(Where):
        raise AttachError(f"{file}: rule {name} looks at {values['where']!r}, wanted one of {list(get_args(Where))}")
    if set(values) <= {"id", "category", "about"}:
        raise AttachError(f"{file}: rule {name} has no condition and would take every stack")
    return Rule(**{("with_" if key == "with" else key): _frozen(value) for key, value in values.items()})


def _frozen(value: Any) -> Any:
    return tuple(str(item) for item in value) if isinstance(value, list) else value
