"""The reference drafter's part of ``docs/results.md``, and its charts, from the committed results.

    python -m benchmarks.reference.page

Reads ``benchmarks/results/reference.json`` and, where they are, ``recipes-h200.json`` and ``kinds-h200.json``; writes
what stands under `HEADING` in ``docs/results.md``, and ``docs/results/*.svg``. Everything is made from these files
alone: the same files give the same bytes. What a file does not have is left out, and named among what was not measured.

Beside what `measure`, `limits` and `build` write, ``reference.json`` may have, added by hand:

    data          data.json of `build`
    peer          name, ours_equal_steps, acceptance_length_equal_steps, the same with equal_time; seeds (how many),
                  ratio_equal_steps and ratio_equal_time as [low, high] of ours / peer, how (of the interval), command
    block_sizes   K -> {sets: {name: {acceptance_length}}, geomean_acceptance_length}, of other runs
    kinds         [{kind, parameters, steps, seconds, held_out_acceptance_length, sets, geomean_acceptance_length}]
    data_curve    [{share, supervised_tokens, steps, geomean_acceptance_length}]
    command       what makes all of it
    not_measured  sentences
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reference.drawing import bar_svg, dot_svg, line_svg
from paceline.report.charts import Series
from paceline.report.page import MISSING, duration, number

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
CHARTS = "results"
"""Folder of the charts, beside the page."""

HEADING = "## The reference drafter"
GOAL = 3.5
"""Acceptance length that was wanted, in the geometric mean over the main sets, at blocks of 16."""
ESTIMATE_GOAL = 0.05
MAIN_SETS = ("gsm8k", "humaneval", "mt-bench")
ORDER = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
MACHINES = {"h200": "H200", "cpu": "CPU"}

OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
KINDS = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}

AVERAGED = 60
"""Points of the line that averages single steps."""

Record = Mapping[str, Any]
Lines = list[str]


class Page:
    """The text under the heading, and the charts by file name."""

    def __init__(self, result: Record, recipes: Record | None = None, kinds: Record | None = None) -> None:
        self.result = result
        self.charts: dict[str, str] = {}
        parts = [
            self.head(),
            self.acceptance(),
            self.speed(),
            self.training(),
            self.data(),
            self.kinds(),
            self.peer(),
            self.recipes("Recipes", "recipes-h200.json", recipes),
            self.recipes("Drafter kinds and losses", "kinds-h200.json", kinds),
            self.block_sizes(),
            self.data_curve(),
            self.limits(),
            self.how(recipes, kinds),
        ]
        self.text = "\n\n".join("\n".join(part).strip() for part in parts if part) + "\n"

    def chart(self, name: str, title: str, svg: str) -> Lines:
        """Keep a chart; the lines that show it."""
        self.charts[f"{name}.svg"] = svg
        return [f"![{title}]({CHARTS}/{name}.svg)", ""]

    def head(self) -> Lines:
        train = self.result.get("train", {})
        kind = f"{KINDS[train['kind']]} drafter" if "kind" in train else "drafter"
        shape = f"A {kind} for SmolLM2-135M-Instruct"
        if "num_layers" in train:
            shape += f" of {train['num_layers']} layers"
        lines = [
            HEADING, "",
            f"{shape}, in blocks of {self.block_size()}, trained by `paceline train` on the target's own answers. "
            "Acceptance length is tokens per forward pass of the target, pooled over all rounds of all prompts. This "
            "part is written by `python -m benchmarks.reference.page` from "
            "[`reference.json`](../benchmarks/results/reference.json).",
            "",
        ]  # fmt: skip
        geomean = self.result.get("geomean_acceptance_length")
        if geomean is not None:
            reached = "reached" if geomean >= GOAL else "not reached"
            more = " [What limits it](#what-limits-it)." if geomean < GOAL and "limits" in self.result else ""
            interval = self.geomean_interval(geomean)
            lines.append(
                f"**{number(geomean, 2)} tokens per forward** in the geometric mean over {', '.join(MAIN_SETS)}"
                + (f" (95 %, over prompts: {spread(interval)})" if interval else "")
                + ". "
                f"The goal was {GOAL} at blocks of 16: {reached}.{more}"
            )
        return lines

    def geomean_interval(self, geomean: float) -> tuple[float, float] | None:
        """From the intervals of its sets, whose relative errors add up as independent ones do."""
        errors = []
        for name in MAIN_SETS:
            one = self.first().get(name, ("", {}))[1]
            if "acceptance_length_interval" not in one:
                return None
            low, high = one["acceptance_length_interval"]
            errors.append((high - low) / 2 / one["acceptance_length"])
        error = math.hypot(*errors) / len(errors)
        return geomean * (1 - error), geomean * (1 + error)

    def block_size(self) -> int:
        """K: of the run, or one more than the tokens that a round drafts."""
        train: Record = self.result.get("train", {})
        return train.get("block_size") or 1 + max(len(one["acceptance_per_position"]) for _, _, one in self.measured())

    def measured(self) -> list[tuple[str, str, Record]]:
        """Machine, set and record of each measurement; the sets in their order."""
        return [
            (where, name, part["sets"][name])
            for where, part in self.result["measured"].items()
            for name in sorted(part["sets"], key=place)
        ]

    def first(self) -> dict[str, tuple[str, Record]]:
        """Machine and record of the measurement that a set's acceptance is from."""
        found: dict[str, tuple[str, Record]] = {}
        for where, name, one in sorted(self.measured(), key=lambda each: (place(each[1]), each[0] != "h200")):
            found.setdefault(name, (where, one))
        return found

    def acceptance(self) -> Lines:
        first = self.first()
        rows = []
        for name, own in sorted(self.result["sets"].items(), key=lambda pair: place(pair[0])):
            where, one = first.get(name, ("", {}))
            interval = one.get("acceptance_length_interval")
            others = one.get("mismatches", 0)
            rows.append((
                name, number(one.get("prompts")),
                number(own["acceptance_length"], 2) + (f" ({spread(interval)})" if interval else ""),
                number(own.get("ngram_acceptance_length"), 2),
                "yes" if own.get("lossless") else f"**no**: {number(others)} differ",
                number(own.get("num_ties")), number(one.get("loops")), MACHINES.get(where, where),
            ))  # fmt: skip
        gaps = [
            f"{part['tie_gap']:g} on {MACHINES.get(where, where)}"
            for where, part in self.result["measured"].items() if "tie_gap" in part
        ]  # fmt: skip
        gap = f" (logits closer than {', '.join(gaps)})" if gaps else ""
        return [
            "### Acceptance", "",
            *table(
                ("prompts of", "prompts", "acceptance length (95 %)", "n-gram drafts", "lossless", "ties", "loops",
                 "on"), rows,
            ),
            "",
            "Greedy. Intervals are over prompts, of this one drafter. Lossless: the answers are those of plain "
            f"decoding, but for ties, where rounding decides between the target's two best tokens{gap}. Loops: answers "
            "that repeat themselves until the limit; they are counted, and are in the acceptance.",
            "",
            *self.chart("positions", "Acceptance of each drafted token, by set", line_svg(
                "Drafted tokens that are accepted, if those before them were",
                [
                    Series(name, list(enumerate((100 * share for share in one["acceptance_per_position"]), start=1)))
                    for name, (_, one) in first.items()
                ],
                x_label="drafted token, counted from the anchor", y_label="accepted, %", from_zero=True,
            )),
        ]  # fmt: skip

    def speed(self) -> Lines:
        rows, groups = [], dict[str, dict[str, float]]()
        for where, name, one in sorted(self.measured(), key=lambda each: (place(each[1]), each[0] != "h200")):
            machine = MACHINES.get(where, where)
            rows.append((
                name, machine, number(one["prompts"]), number(one["baseline_tok_per_s"], 1),
                number(one["speculative_tok_per_s"], 1), number(one["speedup"], 2), number(one.get("ngram_speedup"), 2),
            ))  # fmt: skip
            bars = groups.setdefault(name, {})
            bars[f"this drafter, {machine}"] = one["speedup"]
            if one.get("ngram_speedup") is not None:
                bars[f"n-gram drafts, {machine}"] = one["ngram_speedup"]
        return [
            "### Speed", "",
            *table(
                ("prompts of", "on", "prompts", "plain, tok/s", "drafted, tok/s", "speed-up", "n-gram drafts"), rows
            ),
            "",
            "Wall clock, prefill in both, one answer at a time, against greedy decoding with a KV cache by the same "
            "decoder.",
            "",
            *self.chart("speed", "Speed-up over plain decoding", bar_svg(
                "Speed-up over plain decoding", groups, x_label="times plain decoding (dashed)", mark=1.0
            )),
        ]  # fmt: skip

    def training(self) -> Lines:
        train, estimate, points = (self.result.get(key) for key in ("train", "estimate", "curve"))
        if not (train or estimate or points):
            return []
        lines = ["### Training", ""]
        if train:
            epochs = f", {train['epochs']:g} epochs" if "epochs" in train else ""
            epochs += f", {OPTIMIZERS[train['optimizer']]}" if "optimizer" in train else ""
            seed = f", seed {train['seed']}" if "seed" in train else ""
            lines += [
                f"{number(train['steps'])} steps over {number(train['tokens'])} tokens{epochs}{seed}: "
                f"{duration(train['seconds'])} of steps, {number(train['tok_per_s'], 0)} tokens a second.", "",
            ]  # fmt: skip
        if estimate:
            error = self.result["estimate_error"]
            lines += [
                "The acceptance length that training estimates without decoding, on "
                f"{number(estimate['prompts'])} rows {estimate['rows']}, is {number(estimate['estimate'], 2)}; "
                "decoding their prompts gave "
                f"{number(estimate['measured'], 2)} ({estimate['where']}). The estimate is off by "
                f"{number(100 * error, 1)} %. The goal was {100 * ESTIMATE_GOAL:g} % at most: "
                f"{'reached' if abs(error) <= ESTIMATE_GOAL else 'not reached'}.", "",
            ]  # fmt: skip
        if points:
            loss = [(each["step"], each["loss"]) for each in points if "loss" in each]
            guessed = [
                (each["step"], each["acceptance_length_est"]) for each in points if "acceptance_length_est" in each
            ]
            held_out = [
                (each["step"], each["validation_acceptance_length"])
                for each in points if "validation_acceptance_length" in each
            ]  # fmt: skip
            if loss:
                lines += self.chart("training-loss", "Loss by step", line_svg(
                    "Loss", averaged("loss", loss), x_label="step", y_label="loss, as weighted in training",
                ))  # fmt: skip
            series = averaged("training batches", guessed)
            series += [Series("held-out rows", held_out)] if held_out else []
            if series:
                lines += self.chart("training-acceptance", "Acceptance length by step", line_svg(
                    "Acceptance length, teacher-forced", series, x_label="step", y_label="tokens per forward",
                ))  # fmt: skip
        return lines

    def data(self) -> Lines:
        data = self.result.get("data")
        if not data:
            return []
        rows = []
        for name, kept in data["kept"].items():
            about = data["prompts"].get(name, {})
            rows.append((
                name, about.get("licence", MISSING), number(kept.get("kept", 0)),
                number(kept.get("loops left out", 0)), number(kept.get("kept, cut by the limit", 0)),
                number(kept.get("answer tokens", 0)),
            ))  # fmt: skip
        left_out = data["prompts"].get("evaluation_sets_left_out")
        return [
            "### Data", "",
            *table(("prompts", "licence", "answers", "left out: loops", "cut by the limit", "answer tokens"), rows),
            "",
            f"{number(data['rows'])} rows, {number(data['tokens'])} tokens, {number(data['supervised_tokens'])} "
            f"supervised ones. The target answered in {duration(data['answered_s'])} ({data['device']}).",
            *([f"No prompt is one of {', '.join(f'`{name}`' for name in left_out)} (by normalised text)."]
              if left_out else ["Prompts of evaluation sets were not looked for."]),
        ]  # fmt: skip

    def kinds(self) -> Lines:
        kinds = self.result.get("kinds")
        if not kinds:
            return []
        names = sorted({name for one in kinds for name in one["sets"]}, key=place)
        rows = [
            (KINDS.get(one["kind"], one["kind"]), number(one["parameters"]), number(one["steps"]),
             duration(one["seconds"]), number(one["held_out_acceptance_length"], 2),
             *(f"{number(one['sets'][name]['acceptance_length'], 2)}, {number(one['sets'][name]['speedup'], 2)}x"
               if name in one["sets"] else MISSING for name in names),
             number(one["geomean_acceptance_length"], 2))
            for one in kinds
        ]  # fmt: skip
        return [
            "### Drafter kinds", "",
            *table(
                ("kind", "parameters", "steps", "GPU time of steps", "held-out rows",
                 *(f"{name}: acceptance length, speed-up" for name in names), "geometric mean"), rows,
            ),
            "",
            "Same data, seed and settings, about the same GPU time; measured one after the other on the H200, on the "
            f"same prompts. The geometric mean is over {', '.join(MAIN_SETS)}.",
        ]  # fmt: skip

    def peer(self) -> Lines:
        peer = self.result.get("peer")
        if not peer:
            return []
        rows = []
        for key, name in (("equal_steps", "steps"), ("equal_time", "GPU time")):
            ours, theirs = peer.get(f"ours_{key}"), peer.get(f"acceptance_length_{key}")
            if ours is None or theirs is None:
                continue
            interval = peer.get(f"ratio_{key}")
            rows.append((
                name, number(ours, 2), number(theirs, 2), number(ours / theirs, 2),
                spread(interval) if interval else MISSING,
            ))  # fmt: skip
        seeds = f" Seeds: {peer['seeds']}." if "seeds" in peer else ""
        how = f" Interval of the ratio: {peer['how']}." if "how" in peer else ""
        return [
            "### Beside a peer", "",
            *table(("equal", "this trainer", str(peer["name"]), "ratio", "interval of the ratio"), rows),
            "",
            f"Acceptance length, geometric mean over {', '.join(MAIN_SETS)}. Same data, batches, anchors and schedule; "
            f"model and loss are {peer['name']}'s own; both are decoded by the same loop.{seeds}{how}",
        ]  # fmt: skip

    def recipes(self, heading: str, file: str, record: Record | None) -> Lines:
        if not record or not record["results"]:
            return []
        results = record["results"]
        base = {row["seed"]: row["acceptance_length"] for row in results
                if row["name"] == results[0]["name"] and row["equal"] == "steps"}  # fmt: skip
        has_time = any(row["equal"] == "time" for row in results)
        groups: dict[tuple[str, str], list[Record]] = {}
        for row in results:
            groups.setdefault((row["name"], row["equal"]), []).append(row)
        rows, dots = [], []
        for (name, equal), seeds in groups.items():
            lengths = [row["acceptance_length"] for row in seeds]
            more = [row["acceptance_length"] - base[row["seed"]] for row in seeds if row["seed"] in base]
            keys = ", ".join(f"`{key}={json.dumps(value)}`" for key, value in seeds[0].items() if "." in key)
            rows.append((
                name, keys, *([equal] if has_time else []), number(len(seeds)),
                f"{number(statistics.mean(lengths), 2)} ({spread((min(lengths), max(lengths)))})",
                MISSING if more and not any(more) or not more
                else f"{statistics.mean(more):+.2f} ({min(more):+.2f} to {max(more):+.2f})",
                number(statistics.mean(row["ms_per_step"] for row in seeds), 1),
                number(statistics.mean(row["steps"] for row in seeds), 0),
            ))  # fmt: skip
            dots.append((name, f"equal {equal}", statistics.mean(lengths), min(lengths), max(lengths)))
        stem = file.partition("-")[0]
        title = f"{heading}: acceptance length, mean and range of the seeds"
        return [
            f"### {heading}", "",
            *table(
                ("recipe", "keys", *(["equal"] if has_time else []), "seeds", "acceptance length (range of the seeds)",
                 f"against {results[0]['name']}, seed by seed (range)", "ms a step", "steps"), rows,
            ),
            "",
            f"{number(results[0]['prompts'])} prompts of {', '.join(f'`{name}`' for name in record['prompts'])}, "
            f"at most {number(results[0]['max_new_tokens'])} tokens each; {record['device']}; "
            f"[`{file}`](../benchmarks/results/{file}). Ranges are of the seeds; prompts are the same for all.",
            "",
            *self.chart(stem, title, dot_svg(
                title, dots, x_label=f"tokens per forward; dashed: {dots[0][0]}", mark=dots[0][2]
            )),
        ]  # fmt: skip

    def block_sizes(self) -> Lines:
        others = self.result.get("block_sizes")
        if not others:
            return []
        own = {"sets": self.result["sets"], "geomean_acceptance_length": self.result.get("geomean_acceptance_length")}
        runs = {int(size): run for size, run in others.items()} | {self.block_size(): own}
        names = sorted({name for run in runs.values() for name in run["sets"]}, key=place)
        rows = [
            (number(size), *(number(run["sets"].get(name, {}).get("acceptance_length"), 2) for name in names),
             number(run.get("geomean_acceptance_length"), 2))
            for size, run in sorted(runs.items())
        ]  # fmt: skip
        return ["### Block size", "", *table(("tokens in a block, K", *names, "geometric mean"), rows)]

    def data_curve(self) -> Lines:
        points = sorted(self.result.get("data_curve") or [], key=lambda each: each["supervised_tokens"])
        if not points:
            return []
        rows = [
            (number(100 * each["share"], 1), number(each["supervised_tokens"]), number(each.get("steps")),
             number(each["geomean_acceptance_length"], 2))
            for each in points
        ]  # fmt: skip
        return [
            "### How much data", "",
            *table(("share of the data, %", "supervised tokens", "steps", "acceptance length, geometric mean"), rows),
            "",
            *self.chart("data", "Acceptance length by supervised tokens", line_svg(
                "Acceptance length by size of the data",
                [Series("", [
                    (each["supervised_tokens"] / 1e6, each["geomean_acceptance_length"]) for each in points
                ])],
                x_label="supervised tokens, millions", y_label="tokens per forward",
            )),
        ]  # fmt: skip

    def limits(self) -> Lines:
        limits = self.result.get("limits")
        if not limits:
            return []
        entropy, bins = limits["target_entropy_nats"], limits["by_entropy"]
        above = ", ".join(f"{number(100 * share, 1)} % above {edge}" for edge, share in entropy["above_frac"].items())
        rows = [
            (bin_name(one), number(100 * one["tokens_frac"], 1),
             number(percent_of(one["accuracy"][0]), 1), number(percent_of(one["accuracy"][-1]), 1),
             number(one["first_misses"]), number(percent_of(one["first_misses_frac"]), 1))
            for one in bins
        ]  # fmt: skip
        repaired = [
            (f"{each['threshold_nats']:g}", number(100 * each["tokens_below_frac"], 1),
             number(each["acceptance_length_misses_below_repaired"], 2),
             number(each["acceptance_length_other_misses_repaired"], 2))
            for each in limits["oracle"]
        ]  # fmt: skip
        series = [
            Series(bin_name(one) + " nats", [
                (slot, 100 * share) for slot, share in enumerate(one["accuracy"], start=1) if share is not None
            ])
            for one in bins
        ]  # fmt: skip
        return [
            "### What limits it", "",
            f"Answers of {number(limits['rows'])} held-out rows, {number(limits['tokens'])} tokens, teacher-forced. "
            f"The target's entropy at a token, given all before it, is {number(entropy['mean'], 2)} nats on average: "
            f"{above}. Its probability of the token that is there is "
            f"{number(limits['target_probability_of_token'], 2)} on average; "
            f"{number(100 * limits['target_likeliest_frac'], 1)} % of the tokens are its likeliest, and "
            f"{number(100 * limits['can_draft_frac'], 1)} % are ones that the drafter can draft.",
            "",
            *table(
                ("target's entropy, nats", "tokens, %", "right as drafted token 1, %",
                 f"as token {len(bins[0]['accuracy'])}, %", "first misses of rounds", "first misses, %"), rows,
            ),
            "",
            *self.chart("limits", "Drafted tokens that are right, by the target's entropy", line_svg(
                "Drafted tokens that are right, by the target's entropy",
                [one for one in series if one.points],
                x_label="drafted token, counted from the anchor", y_label="right, %", from_zero=True,
            )),
            f"Acceptance length on these rows is {number(limits['acceptance_length'], 2)}; with every token right it "
            f"would be {number(limits['acceptance_length_all_hit'], 2)}. If some misses had been hits, and all else "
            "were as measured, it would be:",
            "",
            *table(
                ("threshold, nats", "tokens below, %", "misses below it are hits", "all other misses are hits"),
                repaired,
            ),
            "",
            "Misses below it are hits: a drafter that never misses where the target is sure, and is no better "
            "elsewhere. This is arithmetic on the measured hits. It bounds no other drafter: a greedy answer is fixed "
            "by its context, so that a better one may hit tokens of high entropy too.",
        ]  # fmt: skip

    def how(self, recipes: Record | None, kinds: Record | None) -> Lines:
        parts: dict[str, Record] = {
            f"acceptance and speed, {MACHINES.get(where, where)}": part
            for where, part in self.result["measured"].items()
        }
        parts |= {name: part for name, part in (
            ("data", self.result.get("data")), ("what limits it", self.result.get("limits")),
            ("recipes", recipes), ("kinds", kinds), ("the peer", self.result.get("peer")),
        ) if part and "command" in part}  # fmt: skip
        items = []
        for name, part in parts.items():
            about = [str(part["device"])] if "device" in part else []
            about += [f"{key} {value}" for key, value in part.get("versions", {}).items()]
            items.append(f"- {name}" + (f" ({', '.join(about)})" if about else "") + f": `{part['command']}`")
        whole = self.result.get("command")
        lines = ["### How it was measured", "", *items, ""]
        lines += [f"All of it: `{whole}`.", ""] if whole else []
        return [*lines, "Not measured:", "", *(f"- {each}" for each in self.not_measured(recipes, kinds))]

    def not_measured(self, recipes: Record | None, kinds: Record | None) -> Lines:
        """Sentences on what the files do not have."""
        measured = self.result["measured"]
        sets = {where: set(part["sets"]) for where, part in measured.items()}
        found = ["Other targets, sampling, and batches of several answers; more than one seed of this drafter."]
        for where, machine in MACHINES.items():
            missing = [name for name in ORDER if name not in sets.get(where, set())]
            if where not in measured:
                found.append(f"Speed on {machine}.")
            elif missing:
                found.append(f"Speed on {machine} for {', '.join(missing)}.")
        unseen = [name for name in ORDER if name not in self.result["sets"]]
        found += [f"Acceptance on {', '.join(unseen)}."] if unseen else []
        for has, what in (
            (self.result.get("estimate"), "How far the estimate of training is off."),
            (self.result.get("peer"), "Another trainer beside this one."),
            (recipes, "Recipes against each other on a GPU."),
            (kinds or self.result.get("kinds"), "Drafter kinds against each other on a GPU."),
            (self.result.get("block_sizes"), "Other block sizes."),
            (self.result.get("data_curve"), "What more or less data gives."),
            (self.result.get("limits"), "What limits the acceptance."),
        ):
            found += [] if has else [what]
        return [*found, *self.result.get("not_measured", [])]


def place(name: str) -> tuple[int, str]:
    """Where a set stands: in the usual order, others behind."""
    return (ORDER.index(name) if name in ORDER else len(ORDER)), name


def spread(interval: Sequence[float]) -> str:
    """An interval in words."""
    return f"{number(interval[0], 2)} to {number(interval[1], 2)}"


def percent_of(fraction: float | None) -> float | None:
    """A fraction in per cent; None stays."""
    return None if fraction is None else 100 * fraction


def bin_name(one: Record) -> str:
    """The entropies of a bin."""
    low, high = one["from_nats"], one["to_nats"]
    return f"above {low:g}" if high is None else f"{low:g} to {high:g}"


def averaged(name: str, points: Sequence[tuple[float, float]]) -> list[Series]:
    """Single steps, pale, and their average over stretches, where there are many."""
    size = -(-len(points) // AVERAGED)
    if size < 2:
        return [Series(name, points)] if points else []
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    means = [tuple(statistics.mean(axis) for axis in zip(*group, strict=True)) for group in groups]
    return [Series("single steps", points, is_faint=True), Series(f"{name}, average of {size} of these", means)]  # type: ignore[arg-type]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def replaced(page: str, part: str) -> str:
    """A page with the part under the heading replaced, up to the next heading of its level, or added at the end."""
    before, found, rest = page.partition(f"{HEADING}\n")
    _, _, after = rest.partition("\n## ")
    before = before if found else before.rstrip() + "\n\n"
    return before + part + (f"\n## {after}" if after else "")


def read() -> Page:
    """The page of the committed results."""

    def record(name: str) -> Any:
        file = RESULTS / name
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    result = record("reference.json")
    if result is None:
        raise SystemExit(
            f"{RESULTS / 'reference.json'} is not there: `make reference` makes it on a machine with a GPU"
        )
    return Page(result, record("recipes-h200.json"), record("kinds-h200.json"))


def main() -> None:
    """Write the page's part and the charts; charts of earlier results go."""
    page = read()
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), page.text), encoding="utf-8")
    folder = PAGE.parent / CHARTS
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for name, svg in page.charts.items():
        (folder / name).write_text(svg, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}, {len(page.charts)} charts")


if __name__ == "__main__":
    main()
