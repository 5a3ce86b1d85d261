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
import json
import math
import re
import stat
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from paceline.errors import printable
from paceline.profiling.comparable import (
    FAMILIES,
    LARGEST,
    Factors,
    Family,
    Known,
    Look,
    folded_stacks,
    noise_floor,
    stack_key,
)
from paceline.profiling.evidence import SCHEMA, AttachError, Figure, LevelId, Number, Record, Report
from paceline.profiling.statistics import Z_95, false_discoveries, two_proportions

DIFF_SCHEMA = "paceline.diff/1"
MAX_BYTES = 200 * 1000**2
"""Largest report that is read."""

FALSE_RATE = 0.05
"""Pairs of looks at the same thing that may show a change."""
MIN_RELATIVE, MIN_POINTS = 0.03, 0.005
"""Smallest change worth a word: of the larger of both, and of a share of time."""
RARE = 0.0025
"""Stacks with a smaller share, over both looks, could not move by `MIN_POINTS`; they are not tested."""
MOST_SHOWN, MOST_STACKS_SHOWN, INNER_FRAMES = 40, 10, 4
FINE, FAILED, NOT_COMPARABLE = 0, 1, 2
"""Exit codes of the command."""


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
    factors = Factors(a, b)
    before, after = Look(a, factors), Look(b, factors)
    before.fill(after)
    after.fill(before)
    setting = _differences_of_setting(a, b)
    changes = []
    for key in sorted(before.seen.keys() & after.seen.keys()):
        x, y = before.seen[key], after.seen[key]
        if x.figure.unit != y.figure.unit or x.figure.level != y.figure.level:
            setting.append(Difference(what=f"source of {key}", before=_source(x.figure), after=_source(y.figure)))
        elif not (x.family == "stacks" and x.figure.value + y.figure.value < 2 * RARE):
            changes.append(_change(key, x, y, noise_floor(key, a, b)))
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
    before, after = folded_stacks(a), folded_stacks(b)
    shares = []
    for level in sorted(before.keys() & after.keys()):
        x, y = before[level], after[level]
        total_x, total_y = sum(x.values()), sum(y.values())
        for folded in sorted(x.keys() | y.keys()):
            left, right = x.get(folded, 0) / total_x, y.get(folded, 0) / total_y
            is_moved = stack_key(level, folded) in moved
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


def _change(key: str, before: Known, after: Known, floor: float | None) -> Change:
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


def _hits(seen: Known) -> tuple[float, float]:
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
