"""Two looks held against each other: what has truly moved, and what would differ between two looks at the same thing.

A change is only called moved when all four hold:

1. The 95 % interval of the difference excludes 0.
2. It stands among everything that was compared: changes are tested in five families (figures, samples by category,
   stages, threads, stacks), each by Benjamini and Hochberg at a fifth of 5 %: looks at the same run rarely show any.
3. It is 3 % of the larger of both at least; a share of time also half a point, as near 0 every change is large.
4. It is more than the figure differs between the two halves of either look, where halves are known.

What is taken to be known of a figure:

- A share of samples: Wilson's interval, from fewer samples than were taken. Those of one process follow each other, so
  they are divided by the largest of 2 (4 where few figures have halves), what halves differ by over what independent
  samples would, and the samples over 20 a second and thread. 10 % against 20 % is found from 800 samples (1,600 if 4).
- Another figure with an interval: that interval.
- A stage's mean: Welch's, with a spread made from p50, p90, p99 and the longest run (about a quarter too wide where it
  is normal), never below the width of a histogram's bucket. A percentile moves in buckets, 6 to 12 % wide: a difference
  of one bucket is none. Means and totals are exact.
- A figure that was read once: a share as 10 independent moments a second, a count as Poisson's, others within 5 %.

Keys, as in ``--fail-on``: ``stage.<role>.<stage>.<measure>`` with `avg_ms`, `p50_ms`, `p90_ms`, `p99_ms`,
`device_avg_ms`, `share`, `per_step_ms`, `per_token_us`; ``observation.<name>``; ``pipeline.get_wait`` (`put_wait`,
`batches_per_s`, `target_per_s`, `drafter_per_s`, `gain`, `waiting`); ``tokens_per_s``; ``steps_per_s``; ``gil.share``
(`cpu_share`, `runqueue_share`, ``holder.<thread>``); ``thread.<role or name>.cpu`` (`runqueue`);
``category.<level>.<category>``; ``stack.<level>.<leaf>.<hash>``; ``allocator.<counter>``; ``gpu.<index>.<measure>``.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError

from paceline.errors import printable
from paceline.profiling.evidence import SCHEMA, AttachError, Figure, LevelId, Number, Record, Report, Stack, Thread
from paceline.profiling.statistics import Z_95, false_discoveries, t_95, two_proportions, wilson

DIFF_SCHEMA = "paceline.diff/1"
MAX_BYTES = 200 * 1000**2
"""Largest report that is read."""

FALSE_RATE = 0.05
"""Pairs of looks at the same thing that may show a change."""
MIN_RELATIVE, MIN_POINTS = 0.03, 0.005
"""Smallest change worth a word: of the larger of both, and of a share of time."""
LEAST_FACTOR, BLIND_FACTOR, MOST_FACTOR = 2.0, 4.0, 25.0
"""What samples are divided by because they follow each other: at least, without halves that say more, and at most."""
ENOUGH_RATIOS = 6
"""Figures with halves, in both looks together, that can say that less than `BLIND_FACTOR` will do."""
INDEPENDENT_PER_S = 20.0
"""Samples a second of one thread that can be independent: steps take tens of milliseconds and more."""
MOMENTS_PER_S = 10.0
"""Independent moments a second that a share which was read is taken to rest on."""
READ_SPREAD = 0.05
"""Half-width, of its value, of a figure that was read once and is neither a share nor a count."""
BUCKETS_A_DOUBLING = 8
"""Of a stage's histogram (`stats.NUM_BUCKETS`)."""
LEAST_RATE = 1e-9
"""Steps or tokens a second above which something is said of each; what is less in a stage's record is 0."""
ROUNDED_MS = 1e-4
"""Last place of times in a stage's record."""
MIN_RUNS = {"p50_ms": 20, "p90_ms": 50, "p99_ms": 500}
"""Runs of a stage from which a percentile is worth comparing."""
RARE = 0.0025
"""Stacks with a smaller share, over both looks, could not move by `MIN_POINTS`; they are not tested."""
LARGEST = 1e60
"""What a report's numbers may be; squares and products of them are finite."""
MOST_SHOWN, MOST_STACKS_SHOWN, INNER_FRAMES = 40, 10, 4
FINE, FAILED, NOT_COMPARABLE = 0, 1, 2
"""Exit codes of the command."""

Family = Literal["figures", "samples", "stages", "threads", "stacks"]
FAMILIES: tuple[Family, ...] = get_args(Family)


class Difference(Record):
    """Something about the setting that is another.

    Attributes:
        refuses: Absolute times cannot be compared across it.
    """

    what: str
    before: str
    after: str
    refuses: bool = False

    def text(self) -> str:
        """``torch: 2.11 -> 2.13``."""
        return f"{self.what}: {self.before or 'not known'} -> {self.after or 'not known'}"


class Judgement(Record):
    """A report's verdict, as far as the other's is another.

    Attributes:
        outcomes: Of hypotheses that both judged, and not alike.
    """

    line: str
    side: str
    cause: str
    outcomes: dict[str, str] = {}

    def text(self) -> str:
        """``producer-bound, launch_overhead``."""
        return ", ".join(word for word in (self.side, self.cause or "cause undecided") if word)


class Change(Record):
    """A figure in both reports.

    Attributes:
        delta: After less before, in the figure's unit; `interval` is its 95 %.
        relative: `delta` over before; None where that was 0.
        noise_floor: The larger difference between the halves of either look; None: not known.
        p_value: That both are the same. `test` says how it was made.
        moved: Whether it is beyond noise, see the module.
        alone: It would be if it were the only figure compared: worth a longer look, no finding.
    """

    key: str
    what: str
    family: Family
    before: Figure
    after: Figure
    delta: Number
    interval: tuple[Number, Number]
    relative: Number | None
    noise_floor: Number | None
    p_value: Number
    test: Literal["two proportions", "intervals", "means", "percentiles"]
    moved: bool = False
    alone: bool = False
    direction: Literal["up", "down", "same"] = "same"

    @property
    def size(self) -> float:
        """Of the larger of both, 0 to 1 where they have one sign; the same in both directions."""
        largest = max(abs(self.before.value), abs(self.after.value))
        return abs(self.delta) / largest if largest else 0.0

    def text(self) -> str:
        """``stage.drafter-0.forward.avg_ms: 12 ms -> 13 ms, +11 % [+9 to +13]``."""
        return f"{self.key}: {_plain(self.before)} -> {_plain(self.after)}, {self.shown()}"

    def shown(self) -> str:
        """The difference: relative, in points for a share, else in its unit."""
        by, unit = 1.0, f" {self.before.unit}".replace("per_s", "a second").replace("ratio", "x")
        if self.before.unit == "frac":
            by, unit = 100.0, " points"
        elif self.before.value > 0:
            by, unit = 100.0 / self.before.value, " %"
        low, high = self.interval
        return f"{_signed(by * self.delta)}{unit} [{_signed(by * low)} to {_signed(by * high)}]"


class StackShare(Record):
    """A stack for a differential flame graph.

    Attributes:
        folded: Frames without lines, outermost first, with ``;`` between them.
        before, after: Shares of the level's samples; `delta` is after less before.
    """

    level: LevelId
    folded: str
    before: Number
    after: Number
    delta: Number
    moved: bool = False


class Diff(Record):
    """Two reports held against each other.

    The command ends with 0 where all is well, 1 where an expectation failed, 2 where the reports cannot be compared.

    Attributes:
        comparable: Whether absolute times mean anything; else all is shown only where the user insists.
        verdict: Before and after, where they are not the same.
        changes: All that was compared, by key.
        only_before, only_after: Keys of figures that one report alone has.
    """

    schema_: str = Field(default=DIFF_SCHEMA, alias="schema")
    comparable: bool = True
    verdict: tuple[Judgement, Judgement] | None = None
    differences_of_setting: tuple[Difference, ...] = ()
    changes: tuple[Change, ...] = ()
    only_before: tuple[str, ...] = ()
    only_after: tuple[str, ...] = ()

    @property
    def moved(self) -> list[Change]:
        """What is beyond noise, the largest first and stacks last."""
        found = [change for change in self.changes if change.moved]
        return sorted(found, key=lambda change: (change.family == "stacks", -change.size, change.p_value, change.key))

    def exit_code(self, failed: Sequence[str] = (), *, anyway: bool = False) -> int:
        """0 fine, 1 an expectation failed (`check`), 2 not comparable and nobody insisted."""
        if not self.comparable and not anyway:
            return NOT_COMPARABLE
        return FAILED if failed else FINE

    def text(self, *, anyway: bool = False) -> str:
        """For a terminal: the verdict, the setting, what moved, and how much did not."""
        lines = [*_verdict_lines(self.verdict), *_setting_lines(self.differences_of_setting)]
        if not self.comparable and not anyway:
            lines.append("not comparable: times of the two cannot be held against each other (--anyway does it)")
        else:
            lines += self._moved_lines()
        return printable("\n".join(lines))

    def _moved_lines(self) -> list[str]:
        moved = self.moved
        figures = [change for change in moved if change.family != "stacks"]
        stacks = [change for change in moved if change.family == "stacks"]
        lines = ["moved:"] if moved else []
        for found, most in ((figures, MOST_SHOWN), (stacks, MOST_STACKS_SHOWN)):
            for change in found[:most]:
                lines += [f"  {change.text()}", *([f"    {_inner(change.what)}"] if found is stacks else [])]
            if len(found) > most:
                lines.append(f"  and {len(found) - most} more {'stacks' if found is stacks else 'figures'}")
        still = len(self.changes) - len(moved)
        line = f"{still} of {len(self.changes)} compared figures did not move beyond noise"
        if alone := sum(change.alone for change in self.changes):
            line += f"; {alone} of them might have: longer looks would tell"
        missing = len(self.only_before) + len(self.only_after)
        return [*lines, line + (f"; {missing} are in one report only" if missing else "")]


def load_report(path: Path) -> Report:
    """A report of ``paceline profile attach``, checked field by field.

    Raises: AttachError if it is missing, too big, no JSON, of another schema, or has wrong fields.
    """
    name, wanted = printable(str(path)), "a JSON report of paceline profile attach is wanted"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise AttachError(f"{name} is no file; {wanted}")
        if status.st_size > MAX_BYTES:
            raise AttachError(
                f"{name} has {status.st_size / 1e6:.0f} MB; {wanted}, of {MAX_BYTES / 1e6:.0f} MB at most"
            )
        content = _content(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no JSON"
        hint = "; the report beside a page in HTML is the file in JSON" if path.suffix in (".html", ".htm") else ""
        raise AttachError(f"{name} cannot be read ({why}); {wanted}{hint}") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        seen = f"has the schema {printable(repr(schema)[:60])}" if schema is not None else "names no schema"
        raise AttachError(f"{name} {seen}; {SCHEMA!r} is wanted: write it with this version of paceline profile attach")
    try:
        return Report.model_validate(content)
    except (ValidationError, RecursionError) as error:
        raise AttachError(f"{name} has fields that are wrong: {printable(_what_is_wrong(error))}; {wanted}") from error


def _content(data: bytes) -> Any:
    """Raises: ValueError; RecursionError."""
    content = json.loads(data.decode("utf-8"), parse_constant=_parsed, parse_float=_parsed, parse_int=_parsed_int)
    if re.search(rb"\\u[dD][89a-fA-F]", data):  # half a character, which could not be written again
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    return content


def _parsed(text: str) -> float:
    """A number that can be reckoned with. Raises: ValueError for NaN and what is beyond reason."""
    if not abs(value := float(text)) <= LARGEST:
        raise ValueError(f"{text} is no figure")
    return value if abs(value) >= 1 / LARGEST else 0.0


def _parsed_int(text: str) -> int:
    _parsed(text)
    return int(text)


def _what_is_wrong(error: ValidationError | RecursionError) -> str:
    if not isinstance(error, ValidationError):
        return "they stand too deep inside each other"
    wrong = error.errors(include_url=False, include_input=False)
    shown = [f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}"[:120] for each in wrong[:3]]
    return "; ".join(shown) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")


def diff(a: Report, b: Report) -> Diff:
    """What is another in `b`, the later one, than in `a`; swapped reports give the same with all signs turned."""
    factors = _Factors(a, b)
    before, after = _Look(a, factors), _Look(b, factors)
    before.fill(after)
    after.fill(before)
    setting = _differences_of_setting(a, b)
    changes = []
    for key in sorted(before.seen.keys() & after.seen.keys()):
        x, y = before.seen[key], after.seen[key]
        if x.figure.unit != y.figure.unit or x.figure.level != y.figure.level:
            setting.append(Difference(what=f"source of {key}", before=_source(x.figure), after=_source(y.figure)))
        elif not (x.family == "stacks" and x.figure.value + y.figure.value < 2 * RARE):
            changes.append(_change(key, x, y, _noise_floor(key, a, b)))
    return Diff(
        comparable=not any(difference.refuses for difference in setting),
        verdict=_verdict(a, b),
        differences_of_setting=tuple(setting),
        changes=tuple(_judged(changes)),
        only_before=tuple(sorted(before.seen.keys() - after.seen.keys())),
        only_after=tuple(sorted(after.seen.keys() - before.seen.keys())),
    )


def differential_stacks(a: Report, b: Report) -> list[StackShare]:
    """All stacks of the levels that both have, the rare ones too, for a differential flame graph."""
    moved = {change.key for change in diff(a, b).moved if change.family == "stacks"}
    before, after = _folded(a), _folded(b)
    shares = []
    for level in sorted(before.keys() & after.keys()):
        x, y = before[level], after[level]
        total_x, total_y = sum(x.values()), sum(y.values())
        for folded in sorted(x.keys() | y.keys()):
            left, right = x.get(folded, 0) / total_x, y.get(folded, 0) / total_y
            is_moved = _stack_key(level, folded) in moved
            shares.append(
                StackShare(level=level, folded=folded, before=left, after=right, delta=right - left, moved=is_moved)
            )
    return shares


# Expectations.

_EXPRESSION = re.compile(r"\s*([^<>\s]+)\s*([<>])\s*([+-]\d+(?:\.\d+)?)\s*(%?)\s*")


def check(diff: Diff, expressions: Sequence[str]) -> list[str]:
    """Which expectations failed, with the numbers.

    ``KEY>+5%``, ``KEY>+0.05``, ``KEY<-3%`` fail when a figure of that key has moved beyond noise and by more than the
    amount: relative with ``%``, else in the figure's unit (shares from 0 to 1). In a key ``*`` stands for anything;
    ``stage.`` and ``observation.`` in front, a role's number and the unit at the end may be left out:
    ``drafter.forward.p50>+5%``. ``any`` fails when anything moved, the verdict included. ``verdict`` fails when side or
    cause are others, or a hypothesis went from supported to refuted or back; one that was or became undecided is shown
    and fails nothing.

    Raises: AttachError if an expression cannot be read, or no compared figure has its key.
    """
    failed = []
    for expression in expressions:
        found = _check_one(diff, expression)
        failed += [f"{expression.strip()}: {each}" for each in found]
    return failed


def _check_one(diff: Diff, expression: str) -> list[str]:
    if (word := expression.strip()) in ("any", "verdict"):
        verdict = [_verdict_line(*diff.verdict)] if diff.verdict and _is_other(*diff.verdict) else []
        return verdict + ([change.text() for change in diff.moved] if word == "any" else [])
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        raise AttachError(
            f"{printable(repr(expression))} is no expectation; wanted is a key, > or <, and an amount with "
            f"its sign, such as 'tokens_per_s<-3%', or 'verdict' or 'any'{_near(diff, expression)}"
        )
    pattern, sign, amount, percent = match.groups()
    changes = [change for change in diff.changes if any(fnmatchcase(name, pattern) for name in _names(change.key))]
    if not changes:
        raise AttachError(f"{printable(repr(pattern))} is no compared figure of these reports{_near(diff, pattern)}")
    limit = float(amount)
    return [change.text() for change in changes if change.moved and _exceeds(change, sign, limit, bool(percent))]


def _exceeds(change: Change, sign: str, limit: float, is_relative: bool) -> bool:
    value: float = change.delta
    if is_relative:
        relative = change.relative if change.relative is not None else math.copysign(math.inf, change.delta)
        value = 100 * relative
    return value > limit if sign == ">" else value < limit


def _names(key: str) -> set[str]:
    """The key, and what may be written for it."""
    names = {key}
    if key.startswith(("stage.", "observation.")):
        names.add(key.split(".", 1)[1])
    names |= {re.sub(r"_(ms|us)$", "", name) for name in names}
    return names | {re.sub(r"(^|\.)(drafter|target)-\d+\.", r"\1\2.", name) for name in names}


def _near(diff: Diff, wanted: str) -> str:
    """Keys like it, to follow a message."""
    keys = [change.key for change in diff.changes if change.family != "stacks"]
    pattern = re.split(r"[<>]", wanted)[0].strip()
    alone = [key for key in (*diff.only_before, *diff.only_after) if any(fnmatchcase(n, pattern) for n in _names(key))]
    if alone:
        return f"; only one of them has {printable(', '.join(alone[:5]))}"
    by_name = {name: key for key in reversed(keys) for name in _names(key)}
    close = difflib.get_close_matches(pattern, list(by_name), n=12, cutoff=0.4)
    near = list(dict.fromkeys(by_name[name] for name in close))[:5] or keys[:5]
    return f"; near it are {printable(', '.join(near))}" if near else "; nothing was compared"


# The verdict and the setting.


def _verdict(a: Report, b: Report) -> tuple[Judgement, Judgement] | None:
    outcomes_a, outcomes_b = ({each.id: each.outcome for each in report.hypotheses} for report in (a, b))
    others = [id for id in sorted(outcomes_a.keys() & outcomes_b.keys()) if outcomes_a[id] != outcomes_b[id]]
    x, y = a.conclusion, b.conclusion
    if not others and (x.side, x.cause) == (y.side, y.cause):
        return None
    return (
        Judgement(line=x.line, side=x.side, cause=x.cause, outcomes={id: outcomes_a[id] for id in others}),
        Judgement(line=y.line, side=y.side, cause=y.cause, outcomes={id: outcomes_b[id] for id in others}),
    )


def _is_other(before: Judgement, after: Judgement) -> bool:
    """Whether the verdict is another, and not only less or more sure."""
    if (before.side, before.cause) != (after.side, after.cause):
        return True
    return any({before.outcomes[id], after.outcomes[id]} == {"supported", "refuted"} for id in before.outcomes)


def _verdict_line(before: Judgement, after: Judgement) -> str:
    outcomes = [f"{id} {before.outcomes[id]} -> {after.outcomes[id]}" for id in before.outcomes]
    if before.text() != after.text():
        outcomes.insert(0, f"{before.text()} -> {after.text()}")
    return "; ".join(outcomes)


def _verdict_lines(verdict: tuple[Judgement, Judgement] | None) -> list[str]:
    if verdict is None:
        return ["verdict: the same"]
    lines = [f"verdict: {_verdict_line(*verdict)}"]
    return lines + [
        f"  {when}: {each.line}" for when, each in zip(("before", "after"), verdict, strict=True) if each.line
    ]


def _setting_lines(differences: Sequence[Difference]) -> list[str]:
    refuses = [f"  {each.text()} (times cannot be compared)" for each in differences if each.refuses]
    marks = [f"  {each.text()}" for each in differences if not each.refuses]
    return ["another setting:", *refuses, *marks] if differences else []


def _differences_of_setting(a: Report, b: Report) -> list[Difference]:
    found = []

    def compare(what: str, before: Any, after: Any, *, refuses: bool = False) -> None:
        if before != after and before not in (None, "", 0, ()) and after not in (None, "", 0, ()):
            found.append(Difference(what=what, before=_words(before), after=_words(after), refuses=refuses))

    compare("CPU", a.host.cpu_model, b.host.cpu_model, refuses=True)
    compare("cores", a.host.cores, b.host.cores, refuses=True)
    compare("GPUs", *(tuple(sorted(gpu.name for gpu in report.gpus)) for report in (a, b)), refuses=True)
    compare("device", a.run.get("device"), b.run.get("device"), refuses=True)
    compare("tokens a batch", a.run.get("tokens_per_batch"), b.run.get("tokens_per_batch"), refuses=True)
    compare("token length", a.run.get("max_length"), b.run.get("max_length"), refuses=True)
    compare("CPUs it may use", a.host.cpus, b.host.cpus)
    compare("GPU driver", *(tuple(sorted({gpu.driver for gpu in report.gpus} - {""})) for report in (a, b)))
    compare("kernel", a.host.kernel, b.host.kernel)
    for name in sorted(a.versions.keys() | b.versions.keys()):
        if a.versions.get(name) != b.versions.get(name):
            before, after = a.versions.get(name, ""), b.versions.get(name, "")
            found.append(Difference(what=f"version of {name}", before=before, after=after))
    for what, name in (("configuration", "config_hash"), ("roles", "roles"), ("tokens a step", "tokens_per_step")):
        compare(what, a.run.get(name), b.run.get(name))
    compare("processes", len(a.processes), len(b.processes))
    if max(a.seconds, b.seconds) > 1.25 * min(a.seconds, b.seconds):
        compare("length of the look", f"{a.seconds:.3g} s", f"{b.seconds:.3g} s")
    return found + _differences_of_sampling(a, b)


def _differences_of_sampling(a: Report, b: Report) -> list[Difference]:
    found = []
    names = {level.id: level.name for report in (b, a) for level in report.levels}
    for id in sorted(names):
        before, after = _sampling(a, id), _sampling(b, id)
        x, y = a.level(id), b.level(id)
        if before == after and x is not None and y is not None and before == "taken" and x.seconds and y.seconds:
            rates = sorted((x.samples / x.seconds, y.samples / y.seconds))
            if rates[1] > 1.5 * rates[0]:
                before, after = (f"{each.samples / each.seconds:.3g} samples a second" for each in (x, y))
        if before != after:
            found.append(Difference(what=f"level {id}", before=before, after=after))
    return found


def _sampling(report: Report, id: LevelId) -> str:
    level = report.level(id)
    if level is None or not level.ok:
        return "not taken"
    return "taken" if level.in_verdict else "taken, but too disturbed to judge by"


def _words(value: Any) -> str:
    if isinstance(value, str):
        return value[:200]
    if isinstance(value, tuple):
        return ", ".join(str(each) for each in value)[:200]
    return json.dumps(value, default=str, sort_keys=True)[:200]


def _source(figure: Figure) -> str:
    return f"level {figure.level}, {figure.unit}"


# What each report says, by key, and how sure that is.


@dataclass(frozen=True)
class _Seen:
    """A figure with what is known of its spread.

    Attributes:
        below, above: Distances of its 95 % bounds.
        samples: Independent ones behind a share; 0 where it is no share of samples.
        slack: By how much it may be off besides, whatever the samples.
    """

    figure: Figure
    what: str
    family: Family
    below: float
    above: float
    samples: float = 0.0
    slack: float = 0.0
    test: Literal["intervals", "means", "percentiles"] = "intervals"


class _Factors:
    """What samples of a level are divided by, as they follow each other; the same for both reports.

    Attributes:
        of_runs: The same for runs of stages, which are all counted.
    """

    def __init__(self, a: Report, b: Report) -> None:
        self._reports, self._of_level = (a, b), dict[str, float]()
        ratios = [*_half_ratios(a), *_half_ratios(b)]
        from_halves = math.fsum(ratios) / max(1, len(ratios))
        least = LEAST_FACTOR if len(ratios) >= ENOUGH_RATIOS else BLIND_FACTOR
        self.of_runs = min(MOST_FACTOR, max(LEAST_FACTOR, from_halves))
        self._of_samples = min(MOST_FACTOR, max(least, from_halves))

    def of(self, id: LevelId) -> float:
        """Of a level."""
        if id not in self._of_level:
            self._of_level[id] = self._of(id)
        return self._of_level[id]

    def _of(self, id: LevelId) -> float:
        return max([self._of_samples, *(self._crowding(report, id) for report in self._reports)])

    def _crowding(self, report: Report, id: LevelId) -> float:
        level = report.level(id)
        if level is None or not level.samples or not level.seconds or id in ("0", "1", "5", "6"):
            return 0.0
        threads = {(stack.pid, stack.tid) for stack in report.stacks if stack.level == id} if id != "2" else ()
        return level.samples / (INDEPENDENT_PER_S * level.seconds * max(1, len(threads)))


def _half_ratios(report: Report) -> Iterator[float]:
    """How much shares of samples differ between the halves, squared, over what independent samples would."""
    if len(report.halves) != 2:
        return
    first, second = report.halves
    for key in first.keys() & second.keys():
        x, y, whole = first[key], second[key], report.observations.get(key)
        half = (whole.samples or 0) / 2 if whole is not None else 0.0
        n, m = x.samples or half, y.samples or half
        if x.unit == y.unit == "frac" and n > 0 and m > 0:
            share = (x.value * n + y.value * m) / (n + m)
            variance = share * (1 - share) * (1 / n + 1 / m)
            if variance > 0 and 5 <= share * min(n, m):
                yield (x.value - y.value) ** 2 / variance


def _noise_floor(key: str, a: Report, b: Report) -> float | None:
    """The larger difference between halves of the observation of that name."""
    name = key.removeprefix("observation.")
    floors = [
        abs(report.halves[0][name].value - report.halves[1][name].value)
        for report in (a, b)
        if len(report.halves) == 2 and name in report.halves[0] and name in report.halves[1]
    ]
    return max(floors, default=None)


@dataclass
class _Group:
    """Shares of the same samples: what was not seen in them is 0 of them."""

    family: Family
    figure: Figure
    samples: float


@dataclass
class _Look:
    """All figures of a report by key; `groups` by the keys' beginning."""

    report: Report
    factors: _Factors
    seen: dict[str, _Seen] = field(default_factory=dict)
    groups: dict[str, _Group] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._add_rates()
        self._add_observations()
        self._add_pipeline()
        self._add_gil()
        self._add_threads()
        self._add_stages()
        self._add_stacks()
        self._add_devices()

    def fill(self, other: _Look) -> None:
        """Add a 0 for what only the other saw, where this one looked for it as well."""
        for key, seen in list(other.seen.items()):
            group = next((group for begin, group in self.groups.items() if key.startswith(begin)), None)
            if key not in self.seen and group is not None:
                low, high = wilson(0, group.samples)
                self.seen[key] = _Seen(group.figure, seen.what, group.family, -low, high, group.samples)

    def _seconds(self, id: LevelId) -> float:
        level = self.report.level(id)
        return level.seconds if level is not None and level.seconds else self.report.seconds

    def _add(self, key: str, what: str, figure: Figure | None, family: Family = "figures") -> None:
        if figure is None:
            return
        below, above, samples = _spread(figure, self._seconds(figure.level), self.factors.of(figure.level))
        self.seen[key] = _Seen(figure, what, family, below, above, samples)

    def _add_rates(self) -> None:
        self._add_loop_rate("tokens_per_s", "tokens a second", self.report.tokens_per_s)
        self._add_loop_rate("steps_per_s", "steps a second", self.report.steps_per_s)

    def _add_loop_rate(self, key: str, what: str, figure: Figure | None) -> None:
        """What a loop does over and over is more regular than what comes by chance; the window cuts one off."""
        if figure is None:
            return
        if figure.low != figure.high:
            self._add(key, what, figure)
            return
        half = abs(figure.value) * self._step_error()
        self.seen[key] = _Seen(figure, what, "figures", half, half)

    def _step_error(self) -> float:
        """Relative half-width of anything a step."""
        steps = self.report.steps_per_s
        if steps is None or steps.value <= LEAST_RATE:
            return 2 * READ_SPREAD
        half = (steps.high - steps.low) / 2
        return half / steps.value if half > 0 else max(READ_SPREAD, 1 / (steps.value * max(self.report.seconds, 1e-9)))

    def _add_observations(self) -> None:
        for name, figure in self.report.observations.items():
            if not name.startswith("tool."):  # of the look itself, and not of what was looked at
                self._add(f"observation.{_part(name)}", name, figure)

    def _add_pipeline(self) -> None:
        record, queue = self.report.pipeline, self.report.queue
        waits: dict[str, Figure | None] = {name: _estimate(record.get(f"{name}_frac")) for name in _WAITS}
        rate = _number(record.get("batches_per_s"))
        if queue is not None:
            waits |= {"get_wait": queue.get_wait, "put_wait": queue.put_wait}
            rate = queue.batches_per_s
            self._add("pipeline.waiting", "batches in the queue", Figure.read(queue.waiting, "0", "count"))
        for name, what in _WAITS.items():
            self._add(f"pipeline.{name}", what, waits[name])
        self._add(
            "pipeline.gain", "gain if the slower side were infinitely fast", _estimate(record.get("gain"), "ratio")
        )
        if rate is None:
            return
        self._add_loop_rate("pipeline.batches_per_s", "batches a second", Figure.read(rate, "0", "per_s"))
        for side, wait in (("target", waits["put_wait"]), ("drafter", waits["get_wait"])):
            value = _number(record.get(f"{side}_per_s"))
            if value is None or wait is None:
                continue
            relative = math.hypot(self._step_error(), (wait.high - wait.low) / 2 / max(1e-3, 1 - wait.value))
            half = abs(value) * relative
            figure = Figure(value=value, interval=(value - half, value + half), unit="per_s", level="0")
            what = f"batches a second that the {side} side could do"
            self.seen[f"pipeline.{side}_per_s"] = _Seen(figure, what, "figures", half, half)

    def _add_gil(self) -> None:
        gil = self.report.gil
        if gil is None or not _is_sound(self.report, gil.level):
            return
        shares: dict[str, tuple[str, float | None, Family]] = {
            "gil.share": ("GIL held", gil.share, "samples"),
            "gil.cpu_share": ("GIL held by a thread on a CPU", gil.cpu_share, "figures"),
            "gil.runqueue_share": ("GIL held by a thread that waits for a CPU", gil.runqueue_share, "figures"),
        }
        held: dict[str, list[float]] = {}
        for holder in gil.holders:
            held.setdefault(_part(holder.name), []).append(holder.share)
        for name, parts in held.items():
            shares[f"gil.holder.{name}"] = (f"GIL held by {name}", min(1.0, math.fsum(parts)), "threads")
        for key, (what, share, family) in shares.items():
            if share is not None:
                self._add(key, what, _share(share, gil.samples, gil.level), family)
        if gil.samples:
            effective = gil.samples / self.factors.of(gil.level)
            self.groups["gil.holder."] = _Group("threads", _share(0.0, gil.samples, gil.level), effective)

    def _add_threads(self) -> None:
        """Threads of one name together, as there may be many: their sum."""
        together: dict[str, list[Thread]] = {}
        for thread in self.report.threads:
            together.setdefault(_part(thread.role or thread.name or thread.comm), []).append(thread)
        for name, threads in together.items():
            for measure, what in (("cpu", "on a CPU"), ("runqueue", "ready but without a CPU")):
                figures = [figure for thread in threads if (figure := getattr(thread, measure)) is not None]
                if figures:
                    key, many = f"thread.{name}.{measure}", f", {len(threads)} together" if len(threads) > 1 else ""
                    self._add_sum(key, f"{name} {what}{many}", figures)

    def _add_sum(self, key: str, what: str, figures: Sequence[Figure]) -> None:
        value = math.fsum(figure.value for figure in figures)
        first = figures[0]
        spreads = [_spread(f, self._seconds(f.level), self.factors.of(f.level)) for f in figures]
        below, above = (math.sqrt(math.fsum(spread[i] ** 2 for spread in spreads)) for i in (0, 1))
        figure = Figure(value=value, interval=(value - below, value + above), unit=first.unit, level=first.level)
        self.seen[key] = _Seen(figure, what, "threads", below, above)

    def _add_stages(self) -> None:
        for role, records in _by_role(self.report.stages).items():
            for name in sorted({name for record in records for name in _stages(record)}):
                self._add_stage(role, name, records)

    def _add_stage(self, role: str, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        runs = _Runs.of(name, records)
        if runs is None:
            return
        begin, what = f"stage.{_part(role)}.{_part(name)}", f"{name} of {role}"
        error = runs.mean_error(self.factors.of_runs)

        def add(measure: str, said: str, value: float, relative: float, unit: str) -> None:
            half = min(abs(value) * relative, LARGEST)
            figure = Figure(
                value=value, interval=(value - half, value + half), unit=unit, level="0", samples=runs.count
            )
            self.seen[f"{begin}.{measure}"] = _Seen(figure, f"{what}, {said}", "stages", half, half, test="means")

        add("avg_ms", "mean", runs.mean, error, "ms")
        if runs.device_mean is not None:
            add("device_avg_ms", "mean on the device", runs.device_mean, error * runs.device_loss, "ms")
        often = math.hypot(error, runs.count_error(self.factors.of_runs))
        if runs.wall_s > 0:
            add("share", "share of time", runs.busy_s / runs.wall_s, often, "frac")
        if runs.interval_s > 0:
            a_second, steps, tokens = runs.busy_s / runs.interval_s, self.report.steps_per_s, self.report.tokens_per_s
            if steps is not None and steps.value > LEAST_RATE:
                add("per_step_ms", "a step", 1e3 * a_second / steps.value, math.hypot(often, self._step_error()), "ms")
            if tokens is not None and tokens.value > LEAST_RATE:
                error_of_tokens = self._step_error() if tokens.low == tokens.high else _relative_half(tokens)
                add("per_token_us", "a token", 1e6 * a_second / tokens.value, math.hypot(often, error_of_tokens), "us")
        for measure, value, half in runs.percentiles(self.factors.of_runs):
            slack = _bucket_ms(value)
            figure = Figure(value=value, interval=(value - half - slack, value + half + slack), unit="ms", level="0")
            said = measure.replace("_ms", "")
            self.seen[f"{begin}.{measure}"] = _Seen(
                figure, f"{what}, {said}", "stages", half, half, slack=slack, test="percentiles"
            )

    def _add_stacks(self) -> None:
        for each in self.report.sorted:
            if each.samples and _is_sound(self.report, each.level):
                begin = f"category.{each.level}."
                for name, figure in each.categories.items():
                    what = f"{name} of the samples of level {each.level}"
                    self._add(f"{begin}{_part(name)}", what, _share(figure.value, each.samples, each.level), "samples")
                zero, effective = _share(0.0, each.samples, each.level), each.samples / self.factors.of(each.level)
                self.groups[begin] = _Group("samples", zero, effective)
        for level, counts in _folded(self.report).items():
            if _is_sound(self.report, level):
                total, begin = sum(counts.values()), f"stack.{level}."
                for folded, count in counts.items():
                    self._add(_stack_key(level, folded), folded, _share(count / total, total, level), "stacks")
                effective = total / self.factors.of(level)
                self.groups[begin] = _Group("stacks", _share(0.0, total, level), effective)

    def _add_devices(self) -> None:
        for name, figure in self.report.allocator.items():
            self._add(f"allocator.{_part(name)}", f"allocator: {name}", figure, "threads")
        self._add("host.throttled", "held back by the cgroup's quota", self.report.host.throttled, "threads")
        for gpu in self.report.gpus:
            begin = f"gpu.{gpu.index}."
            for measure in ("utilisation", "power_w", "sm_clock_mhz", "pcie_rx_gb_s", "pcie_tx_gb_s"):
                self._add(begin + measure, f"GPU {gpu.index}: {measure}", getattr(gpu, measure), "threads")
            if gpu.memory_used is not None:
                self._add(begin + "memory_used", "memory used", Figure.read(gpu.memory_used, "5", "bytes"), "threads")
            for name, share in gpu.limits.items():
                what = f"GPU {gpu.index} held back by {name}"
                self._add(f"{begin}limit.{_part(name)}", what, Figure.read(share, "5"), "threads")


_WAITS = {"get_wait": "share of time that the drafter waits", "put_wait": "share of time that a target waits"}


def _spread(figure: Figure, seconds: float, factor: float) -> tuple[float, float, float]:
    """Distances of the 95 % bounds, and the independent samples behind a share of samples (else 0)."""
    value, below, above = figure.value, max(0.0, figure.value - figure.low), max(0.0, figure.high - figure.value)
    if figure.unit == "frac" and figure.samples and 0 <= value <= 1:
        low, high = wilson(value * figure.samples, figure.samples)
        if below + above <= 1.1 * (high - low):  # else it is known to be wider, as from sub-windows
            samples = figure.samples / factor
            low, high = wilson(value * samples, samples)
            return max(0.0, value - low), max(0.0, high - value), samples
    if below or above:
        return below, above, 0.0
    if figure.unit == "frac":
        full, moments = max(1.0, abs(value)), max(1.0, MOMENTS_PER_S * seconds)
        low, high = wilson(abs(value) / full * moments, moments)
        return max(0.0, abs(value) - full * low), max(0.0, full * high - abs(value)), 0.0
    if figure.unit in ("per_s", "count"):
        times = max(seconds, 1e-3) if figure.unit == "per_s" else 1.0
        half = Z_95 * math.sqrt(factor * (abs(value) * times + 1)) / times
        return half, half, 0.0
    return READ_SPREAD * abs(value), READ_SPREAD * abs(value), 0.0


def _share(share: float, samples: int, level: LevelId) -> Figure:
    share = min(max(share, 0.0), 1.0)
    return Figure(value=share, interval=wilson(share * samples, samples), level=level, samples=samples)


def _relative_half(figure: Figure) -> float:
    return (figure.high - figure.low) / 2 / figure.value


def _estimate(value: Any, unit: str = "frac") -> Figure | None:
    """Of a record of `verdict.Estimate`."""
    if not isinstance(value, Mapping):
        return None
    middle, low, high = (_number(value.get(name)) for name in ("value", "low", "high"))
    if middle is None or low is None or high is None:
        return None
    return Figure(value=middle, interval=(low, high), unit=unit, level="0")


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= LARGEST else None  # NaN is not


def _is_sound(report: Report, id: LevelId) -> bool:
    level = report.level(id)
    return level is None or level.in_verdict


def _part(name: str) -> str:
    """A name as a part of a key, which a shell and `check` can read."""
    return re.sub(r"[^\w.+:/-]+", "_", name)[:80] or "_"


def _folded(report: Report) -> dict[LevelId, dict[str, int]]:
    """Samples by stack without lines, as a new version of a file moves them, by level."""
    levels: dict[LevelId, dict[str, int]] = {}
    for stack in report.stacks:
        if stack.count > 0:
            counts, folded = levels.setdefault(stack.level, {}), _fold(stack)
            counts[folded] = counts.get(folded, 0) + stack.count
    return levels


def _fold(stack: Stack) -> str:
    return ";".join(f"{frame.name} ({frame.file})" if frame.file else frame.name for frame in stack.frames)


def _stack_key(level: LevelId, folded: str) -> str:
    leaf = folded.rsplit(";", 1)[-1].rsplit(" (", 1)[0]
    digest = hashlib.sha256(folded.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"stack.{level}.{_part(leaf).replace('.', '_')}.{digest}"


# Stages.


@dataclass(frozen=True)
class _Runs:
    """Runs of a stage in a role's records.

    Attributes:
        spread: Standard deviation of a run, of the mean.
        points: p50, p90, p99 and the longest, in ms; of several threads their mean by runs.
        busy_s: Time in it, with the batches that were left out.
        device_loss: By how much fewer runs were measured on the device: root of the ratio.
    """

    count: int
    mean: float
    spread: float
    points: tuple[float, float, float, float]
    busy_s: float
    wall_s: float
    interval_s: float
    batches: float
    device_mean: float | None
    device_loss: float

    @classmethod
    def of(cls, name: str, records: Sequence[Mapping[str, Any]]) -> _Runs | None:
        """None without runs."""
        count, total_ms, busy_s, device_count, device_ms = 0.0, 0.0, 0.0, 0.0, 0.0
        points = [0.0] * 4
        for record in records:
            stage, every = _stages(record).get(name, {}), max(1.0, _field(record, "sampled_one_in"))
            runs = _field(stage, "count")
            total = _field(stage, "total_ms") or runs * _field(stage, "avg_ms")
            count, total_ms, busy_s = count + runs, total_ms + total, busy_s + total / 1e3 * every
            device_count += _field(stage, "device_count")
            device_ms += _field(stage, "device_count") * _field(stage, "device_avg_ms")
            for i, measure in enumerate(("p50_ms", "p90_ms", "p99_ms", "max_ms")):
                points[i] += runs * _field(stage, measure)
        if count < 1 or not 0 < total_ms < LARGEST:
            return None
        mean, (p50, p90, p99, longest) = total_ms / count, (point / count for point in points)
        return cls(
            count=int(count),
            mean=mean,
            spread=_deviation(mean, p50, p90, p99, longest) / mean,
            points=(p50, p90, p99, longest),
            busy_s=busy_s,
            wall_s=math.fsum(_field(record, "wall_s") for record in records),
            interval_s=max(_field(record, "interval_s") for record in records),
            batches=math.fsum(_field(record, "batches") for record in records),
            device_mean=device_ms / device_count if device_count and device_ms > 0 else None,
            device_loss=math.sqrt(max(1.0, count / device_count)) if device_count else 1.0,
        )

    def mean_error(self, factor: float) -> float:
        """Relative half-width of the mean's 95 % interval."""
        if self.count < 2:
            return 3.0
        return t_95(self.count - 1) * self.spread * math.sqrt(factor / self.count)

    def count_error(self, factor: float) -> float:
        """The same of how often it ran: once more or less where it runs in every batch, else by chance."""
        if self.batches and abs(self.count / self.batches - round(self.count / self.batches)) * self.batches <= 2:
            return 1 / self.count
        return Z_95 * math.sqrt(factor / self.count)

    def percentiles(self, factor: float) -> Iterator[tuple[str, float, float]]:
        """Measure, value and half-width in ms, from how dense runs are on either side."""
        p50, p90, p99, longest = self.points
        bucket = _bucket_ms(p90)  # percentiles of one bucket may be as far apart as it is wide
        sides = {
            "p50_ms": (p50, 0.50, (bucket + max(p90 - p50, 0.0)) / 0.4),
            "p90_ms": (p90, 0.90, max((bucket + p90 - p50) / 0.4, (bucket + p99 - p90) / 0.09, 0.0)),
            "p99_ms": (p99, 0.99, max((bucket + p99 - p90) / 0.09, (longest - p99) / 0.01, 0.0)),
        }
        for measure, (value, share, sparse) in sides.items():
            if value > 0 and self.count >= MIN_RUNS[measure]:
                yield measure, value, Z_95 * math.sqrt(factor * share * (1 - share) / self.count) * sparse


def _deviation(mean: float, p50: float, p90: float, p99: float, longest: float) -> float:
    """Standard deviation from percentiles, never below a bucket's.

    Each part of the runs is put at its end that is farther out; the lower half is taken to reach as far down as p90 is
    above p50.
    """
    least = mean / BUCKETS_A_DOUBLING / math.sqrt(12)
    if p50 <= 0:
        return max(mean, least)
    points = ((0.3, max(0.0, 2 * p50 - p90)), (0.3, p50), (0.3, p90), (0.09, p99), (0.01, max(p99, longest)))
    return max(least, math.sqrt(math.fsum(weight * (point - mean) ** 2 for weight, point in points)))


def _bucket_ms(value_ms: float) -> float:
    """Width of the histogram's bucket that a percentile stands in the middle of, and what records are rounded by."""
    if value_ms <= 0:
        return 0.0
    return float(2.0 ** math.floor(math.log2(1e6 * value_ms)) / BUCKETS_A_DOUBLING / 1e6) + ROUNDED_MS


def _by_role(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    roles: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        roles.setdefault(str(record.get("role") or record.get("thread") or "other"), []).append(record)
    return roles


def _stages(record: Mapping[str, Any]) -> Mapping[str, Any]:
    stages = record.get("stages")
    return stages if isinstance(stages, Mapping) else {}


def _field(record: Any, name: str) -> float:
    """A figure of a record, 0 where it has none."""
    value = _number(record.get(name)) if isinstance(record, Mapping) else None
    return value if value is not None and LEAST_RATE <= value <= 1 / LEAST_RATE**2 else 0.0


# Changes.


def _change(key: str, before: _Seen, after: _Seen, floor: float | None) -> Change:
    delta = _bounded(after.figure.value - before.figure.value)
    slack = max(before.slack, after.slack)
    downwards, upwards = _root(after.below, before.above), _root(after.above, before.below)
    low, high = _bounded(delta - downwards - slack), _bounded(delta + upwards + slack)
    test: Literal["two proportions", "intervals", "means", "percentiles"] = before.test
    if before.samples and after.samples:
        test, p_value = "two proportions", two_proportions(*_hits(before), *_hits(after))
    else:
        p_value = _p_value(abs(delta) - slack, downwards if delta > 0 else upwards)
    return Change(
        key=key,
        what=before.what if before.what == after.what else f"{before.what}; {after.what}",
        family=before.family,
        before=before.figure,
        after=after.figure,
        delta=delta,
        interval=(low, high),
        relative=_relative(delta, before.figure.value),
        noise_floor=floor,
        p_value=p_value,
        test=test,
        direction="up" if delta > 0 else "down" if delta < 0 else "same",
    )


def _judged(changes: Sequence[Change]) -> list[Change]:
    """With what moved: by family, as thousands of stacks would hide a figure's change else."""
    families: dict[Family, list[int]] = {family: [] for family in FAMILIES}
    for i, change in enumerate(changes):
        families[change.family].append(i)
    judged = list(changes)
    for members in families.values():
        p_values = [changes[i].p_value for i in members]
        stands = false_discoveries(p_values, FALSE_RATE / len(families))
        for i, is_sure in zip(members, stands, strict=True):
            if _is_worth_a_word(changes[i]):
                judged[i] = changes[i].model_copy(update={"moved": is_sure, "alone": not is_sure})
    return judged


def _is_worth_a_word(change: Change) -> bool:
    """Beyond noise by itself, and large enough."""
    low, high = change.interval
    size = abs(change.delta)
    least = MIN_POINTS if change.before.unit == "frac" else 0.0
    excludes_0 = low > 0 or high < 0
    return excludes_0 and change.size >= MIN_RELATIVE and size >= least and size > (change.noise_floor or 0.0)


def _hits(seen: _Seen) -> tuple[float, float]:
    return seen.figure.value * seen.samples, seen.samples


def _p_value(excess: float, half: float) -> float:
    """Two-sided and normal, from a difference and the half-width of its 95 % interval."""
    if excess <= 0:
        return 1.0
    return math.erfc(Z_95 * excess / half / math.sqrt(2)) if half > 0 else 0.0


def _root(x: float, y: float) -> float:
    """Root of both squares; the same whichever is first, to the last bit."""
    return math.sqrt(x * x + y * y)


def _relative(delta: float, before: float) -> float | None:
    if before == 0:
        return None
    relative = delta / abs(before)
    return relative if abs(relative) <= LARGEST else None


def _bounded(value: float) -> float:
    return min(max(value, -LARGEST), LARGEST)


def _inner(folded: str) -> str:
    """The last frames of a stack, the leaf first."""
    frames = folded.split(";")
    return " < ".join(frames[: -INNER_FRAMES - 1 : -1]) + (" < ..." if len(frames) > INNER_FRAMES else "")


def _plain(figure: Figure) -> str:
    """The figure without its interval."""
    if figure.unit not in ("frac", "count") and (figure.value == 0 or abs(figure.value) >= 0.01):
        unit = figure.unit.replace("per_s", "a second").replace("ratio", "x")
        return f"{figure.value:,.4g} {unit}" if abs(figure.value) < 1e4 else f"{figure.value:,.0f} {unit}"
    return figure.model_copy(update={"interval": (figure.value, figure.value)}).shown()


def _signed(value: float) -> str:
    return f"{value:+.0f}" if abs(value) >= 10 else f"{value:+.2g}"
