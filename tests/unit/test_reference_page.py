"""The reference drafter's part of docs/results.md: all of it from the committed JSON, and nothing else."""

from __future__ import annotations

import copy
import json
import re
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reference import page
from benchmarks.reference.page import HEADING, Page, read, replaced
from paceline.report.page import duration, number

SVG = "{http://www.w3.org/2000/svg}"

VERSIONS = {"paceline": "0.1.7", "torch": "2.11.3"}


def measured(length: float, ties: int, speedup: float) -> dict[str, Any]:
    return {
        "prompts": 41, "generated_tokens": 5831, "acceptance_length": length,
        "acceptance_length_interval": [length - 0.21, length + 0.24], "acceptance_per_position": [0.81, 0.72, 0.63],
        "ngram_acceptance_length": 1.37, "baseline_tok_per_s": 701.4, "speculative_tok_per_s": 701.4 * speedup,
        "speedup": speedup, "ngram_speedup": 1.19, "lossless": not ties, "mismatches": 0, "ties": ties, "loops": 7,
    }  # fmt: skip


def required() -> dict[str, Any]:
    """What `measure` writes on one machine for two sets."""
    lengths = {"mt-bench": 2.46, "gsm8k": 3.58}
    return {
        "measured": {
            "cpu": {
                "command": "python -m benchmarks.reference.measure --limit 41", "device": "2 threads of a CPU",
                "versions": VERSIONS, "sets": {name: measured(length, 0, 1.53) for name, length in lengths.items()},
            },
        },
        "sets": {
            name: {"acceptance_length": length, "ngram_acceptance_length": 1.37, "lossless": True, "num_ties": 0}
            for name, length in lengths.items()
        },
    }  # fmt: skip


def whole() -> dict[str, Any]:
    """With all that can be there."""
    result = required()
    result["measured"]["h200"] = {
        "command": "python -m benchmarks.reference.measure --device cuda", "device": "NVIDIA H200", "tie_gap": 0.3,
        "versions": VERSIONS,
        "sets": {name: measured(length, 3, 2.17) for name, length in (("gsm8k", 3.58), ("mt-bench", 2.46))},
    }  # fmt: skip
    result["sets"]["gsm8k"] |= {"lossless": False, "num_ties": 3}
    result["measured"]["h200"]["sets"]["gsm8k"]["mismatches"] = 2
    shown = {"geomean_acceptance_length": 2.97, "estimate_error": -0.062}
    result |= shown | {
        "command": "make reference EVALUATION='gsm8k.jsonl'",
        "estimate": {"prompts": 59, "estimate": 2.88, "measured": 3.07, "error": -0.062,
                     "rows": "of the run, not trained on", "where": "bfloat16 on cuda"},
        "train": {"tokens": 8123456, "steps": 1234, "seconds": 431.5, "tok_per_s": 18826.1, "kind": "dflash",
                  "num_layers": 5, "block_size": 4, "epochs": 6, "seed": 2},
        "curve": [
            {"step": 7 * i + 1, "loss": 9 - i / 20, "acceptance_length_est": 1 + i / 90}
            | ({"validation_acceptance_length": 1 + i / 80} if i % 20 == 0 else {})
            for i in range(150)
        ],
        "data": {
            "command": "python -m benchmarks.reference.build --max-new-tokens 384", "versions": VERSIONS,
            "device": "NVIDIA H200", "answered_s": 777.0, "rows": 20456, "tokens": 9234567,
            "supervised_tokens": 5345678,
            "prompts": {"own": {"licence": "Apache-2.0"}, "evaluation_sets_left_out": ["gsm8k.jsonl"]},
            "kept": {"own": {"kept": 15321, "loops left out": 823, "kept, cut by the limit": 91,
                             "answer tokens": 4321987}},
        },
        "peer": {
            "name": "speculators", "ours_equal_steps": 2.91, "acceptance_length_equal_steps": 2.74,
            "ours_equal_time": 2.95, "acceptance_length_equal_time": 2.33, "seeds": 3,
            "ratio_equal_steps": [1.02, 1.11], "how": "Student's t over seeds",
        },
        "block_sizes": {"8": {"sets": {"gsm8k": {"acceptance_length": 3.21}}, "geomean_acceptance_length": 2.81}},
        "data_curve": [
            {"share": 1.0, "supervised_tokens": 5345678, "steps": 1234, "geomean_acceptance_length": 2.97},
            {"share": 0.25, "supervised_tokens": 1336419, "steps": 308, "geomean_acceptance_length": 2.43},
        ],
        "limits": {
            "command": "python -m benchmarks.reference.limits --device cuda", "versions": VERSIONS,
            "device": "NVIDIA H200", "rows": 62, "tokens": 9876,
            "target_entropy_nats": {"mean": 0.47, "above_frac": {"0.1": 0.521, "0.5": 0.333}},
            "target_probability_of_token": 0.86, "target_likeliest_frac": 0.991, "can_draft_frac": 0.983,
            "acceptance_length": 2.94, "acceptance_length_all_hit": 3.96,
            "by_entropy": [
                {"from_nats": 0.0, "to_nats": 0.5, "tokens_frac": 0.667, "slots": [612, 601, 590],
                 "accuracy": [0.878, 0.765, 0.654], "first_misses": 321, "first_misses_frac": 0.432},
                {"from_nats": 0.5, "to_nats": None, "tokens_frac": 0.333, "slots": [287, 283, 0],
                 "accuracy": [0.543, 0.321, None], "first_misses": 422, "first_misses_frac": 0.568},
            ],
            "oracle": [{"threshold_nats": 0.5, "tokens_below_frac": 0.667,
                        "acceptance_length_misses_below_repaired": 3.34,
                        "acceptance_length_other_misses_repaired": 3.17}],
        },
        "not_measured": ["Anything on the moon."],
    }  # fmt: skip
    return result


LENGTHS = {("base", "steps"): [2.5, 2.6], ("muon", "steps"): [2.75, 2.65], ("muon", "time"): [2.45, 2.4]}


def recipes() -> dict[str, Any]:
    rows = [
        {"name": name, "equal": equal, "seed": seed, "steps": 300, "ms_per_step": 51.5, "acceptance_length": length,
         "prompts": 96, "max_new_tokens": 128} | ({"optim.kind": "muon"} if name == "muon" else {})
        for (name, equal), lengths in LENGTHS.items()
        for seed, length in enumerate(lengths)
    ]  # fmt: skip
    command = "python -m benchmarks.recipes --seeds 2"
    return {"command": command, "device": "NVIDIA H200", "versions": VERSIONS, "prompts": ["gsm8k.jsonl"],
            "results": rows}  # fmt: skip


def numbers(tree: Any) -> Iterator[float]:
    """Every number of a record, keys that are numbers among them."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from numbers(value)
            if re.fullmatch(r"[\d.]+", key):
                yield float(key)
    elif isinstance(tree, list):
        for value in tree:
            yield from numbers(value)
    elif isinstance(tree, (int, float)) and not isinstance(tree, bool):
        yield tree


def written(values: Iterator[float]) -> set[str]:
    """How numbers may be written: as they are or in per cent, with up to two digits, or as a time."""
    found = set()
    for value in values:
        for each in (abs(value), 100 * abs(value)):
            found |= {number(each, digits) for digits in (0, 1, 2)} | {f"{each:g}"}
        found |= set(re.findall(r"[\d.]+", duration(value)))
    return found


def shown(text: str) -> list[str]:
    """Numbers of the running text and the tables; names, commands and versions are left out."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|SmolLM2-135M|H200|gsm8k|math500|torch [\d.]+|paceline [\d.]+", " ", text)
    return re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text)


def headings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#")]


def test_every_number_comes_from_the_files() -> None:
    """Each figure on the page is one of the files', or made from them as the page says."""
    result = whole()
    made = Page(result, recipes(), recipes())
    base, muon, timed = LENGTHS.values()
    # of recipes: means, and differences seed by seed; of the peer: ratios; the goals, and the interval's 95 %
    derived = [statistics.mean(each) for each in LENGTHS.values()]
    for lengths in (muon, timed):
        more = [a - b for a, b in zip(lengths, base, strict=True)]
        derived += [*more, statistics.mean(more)]
    derived += [2.91 / 2.74, 2.95 / 2.33, 3.5, 16, 0.05, 0.95, len(LENGTHS["base", "steps"])]
    derived += [1, 3]  # the first and the last token that a block predicts
    allowed = written(iter([*numbers(result), *numbers(recipes()), *derived]))
    wrong = [each for each in shown(made.text) if each not in allowed]
    assert not wrong
    assert (
        "12 min 57 s" in made.text and "7 min 12 s" in made.text and "None" not in made.text and "nan" not in made.text
    )


def test_what_the_text_says_of_the_numbers() -> None:
    """Goals that were reached and missed, differences beyond ties, and the order of sets and machines."""
    text = Page(whole(), recipes()).text
    assert "**2.97 tokens per forward**" in text and "not reached. [What limits it](#what-limits-it)." in text
    assert "off by -6.2 %. The goal was 5 % at most: not reached." in text
    assert "| gsm8k | 41 | 3.58 (3.37 to 3.82) | 1.37 | **no**: 2 differ | 3 | 7 | H200 |" in text
    assert text.index("| gsm8k | H200") < text.index("| gsm8k | CPU") < text.index("| mt-bench | H200")
    assert "(logits closer than 0.3 on H200)" in text
    assert '| muon | `optim.kind="muon"` | steps | 2 | 2.70 (2.65 to 2.75) | +0.15 (+0.05 to +0.25) | 51.5 |' in text
    assert "| 0.5 | 66.7 | 3.34 | 3.17 |" in text and "| above 0.5 | 33.3 | 54.3 | – | 422 | 56.8 |" in text
    assert "- Acceptance on math500, humaneval, mbpp.\n" in text and "- Anything on the moon.\n" in text
    assert "- Drafter kinds against each other on a GPU.\n" in text and "Recipes against" not in text
    better = whole() | {"geomean_acceptance_length": 3.5, "estimate_error": 0.05}
    text = Page(better).text
    assert "blocks of 16: reached." in text and "5 % at most: reached." in text


def test_the_mean_has_the_interval_of_its_sets() -> None:
    """Relative errors of 10, 20 and 20 % of independent sets are 10 % of their geometric mean; else there is none."""
    result = required()
    sets = result["measured"]["cpu"]["sets"]
    for name, error in (("gsm8k", 0.1), ("humaneval", 0.2), ("mt-bench", 0.2)):
        sets[name] = measured(3.0, 0, 1.5) | {"acceptance_length_interval": [3 - 3 * error, 3 + 3 * error]}
        result["sets"][name] = {"acceptance_length": 3.0, "lossless": True}
    result["geomean_acceptance_length"] = 3.0
    assert "**3.00 tokens per forward**" in Page(result).text
    assert "(95 %, over prompts: 2.70 to 3.30). The goal was 3.5" in Page(result).text
    del sets["humaneval"]["acceptance_length_interval"]
    assert "over prompts: 2" not in Page(result).text


def test_kinds_stand_beside_each_other() -> None:
    """With the sets that each was measured on, and their names as the field has them."""
    kind = {"kind": "dflash2", "parameters": 1234, "steps": 56, "seconds": 78.0, "held_out_acceptance_length": 3.21,
            "sets": {"gsm8k": measured(4.25, 0, 2.11)}, "geomean_acceptance_length": 4.25}  # fmt: skip
    other = kind | {"kind": "dflash", "sets": {"mbpp": measured(3.5, 0, 1.75)}}
    text = Page(required() | {"kinds": [kind, other], "train": {**whole()["train"], "optimizer": "muon"}}).text
    assert "| DFlash2 | 1,234 | 56 | 1 min 18 s | 3.21 | 4.25, 2.11x | – | 4.25 |" in text
    assert "| DFlash | 1,234 | 56 | 1 min 18 s | 3.21 | – | 3.50, 1.75x | 4.25 |" in text
    assert "6 epochs, Muon, seed 2" in text and "Drafter kinds against each other" not in text


def test_parts_that_are_missing_have_no_heading() -> None:
    """One machine and two sets are enough; all else is named among what was not measured."""
    full, least = Page(whole(), recipes(), recipes()), Page(required())
    assert headings(least.text) == [HEADING, "### Acceptance", "### Speed", "### How it was measured"]
    assert set(least.charts) == {"positions.svg", "speed.svg"}
    assert set(full.charts) - set(least.charts) == {
        "training-loss.svg", "training-acceptance.svg", "recipes.svg", "kinds.svg", "data.svg", "limits.svg"
    }  # fmt: skip
    assert headings(full.text) == [
        HEADING,
        *(f"### {name}" for name in (
            "Acceptance", "Speed", "Training", "Data", "Beside a peer", "Recipes", "Drafter kinds and losses",
            "Block size", "How much data", "What limits it", "How it was measured",
        )),
    ]  # fmt: skip
    assert "- Speed on H200.\n" in least.text and "- Another trainer beside this one.\n" in least.text
    assert "in blocks of 4," in least.text
    for key in set(whole()) - set(required()):
        result = whole()
        del result[key]
        if key in ("estimate", "estimate_error"):  # come together
            result.pop("estimate", None)
            result.pop("estimate_error", None)
        text = Page(result).text
        assert "None" not in text and "\n\n\n" not in text
        for line, after in zip(text.splitlines(), [*text.splitlines()[2:], ""], strict=False):
            assert not (line.startswith("#") and after.startswith("#")), f"without {key}: {line} has nothing under it"


def test_the_charts_of_the_page_are_the_charts() -> None:
    """Every chart that is made is shown, and none that is not made."""
    for made in (Page(whole(), recipes(), recipes()), Page(required())):
        assert sorted(re.findall(r"!\[[^\]]+\]\(results/([^)]+)\)", made.text)) == sorted(made.charts)


def test_charts_are_files_of_their_own() -> None:
    """Well-formed, light and dark, with axes named; nothing is loaded, nothing runs, nothing lies outside."""
    for name, svg in Page(whole(), recipes(), recipes()).charts.items():
        root = ElementTree.fromstring(svg)
        width, height = (float(root.attrib[key]) for key in ("width", "height"))
        assert {each.tag for each in root.iter()} <= {
            SVG + tag for tag in ("svg", "title", "style", "rect", "text", "line", "polyline", "circle", "g")
        }  # fmt: skip
        style = root.findtext(f"{SVG}style") or ""
        assert "prefers-color-scheme: dark" in style and "url(" not in style and style.count("--paper:") == 2
        texts = [each.text for each in root.iter(f"{SVG}text")]
        expected = {
            "training": "step", "positions": "accepted, %", "limits": "right, %", "data": "supervised tokens, millions",
            "speed": "times plain decoding (dashed)", "kinds": "tokens per forward; dashed: base",
            "recipes": "tokens per forward; dashed: base",
        }  # fmt: skip
        assert expected[name.removesuffix(".svg").partition("-")[0]] in texts
        for each in root.iter():
            for key in ("x", "x1", "x2", "cx"):
                assert 0 <= float(each.get(key, 0)) <= width, (name, each.attrib)
            for key in ("y", "y1", "y2", "cy"):
                assert 0 <= float(each.get(key, 0)) <= height, (name, each.attrib)
            if each.tag == f"{SVG}rect":
                assert float(each.get("x", 0)) + float(each.attrib["width"]) <= width
            for point in each.get("points", "").split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= width and 0 <= y <= height


def test_bars_and_dots_stand_where_their_figures_are() -> None:
    """A bar is as long as its figure says, and a dot lies within its range."""
    root = ElementTree.fromstring(Page(whole()).charts["speed.svg"])
    bars = [each for each in root.iter(f"{SVG}rect") if each.get("height") == "14"]
    figures = [float(each.text or "") for each in root.iter(f"{SVG}text") if each.get("dy") and _is_figure(each.text)]
    assert figures == [2.17, 1.19, 1.53, 1.19] * 2
    scale = [float(bar.attrib["width"]) / figure for bar, figure in zip(bars, figures, strict=True)]
    assert max(scale) == pytest.approx(min(scale), rel=1e-3)
    root = ElementTree.fromstring(Page(whole(), recipes()).charts["recipes.svg"])
    dots = [each.attrib for each in root.iter(f"{SVG}circle")]
    ranges = [each.attrib for each in root.iter(f"{SVG}line") if "range" in each.attrib["class"]]
    assert len(dots) == len(ranges) == len(LENGTHS)
    for dot, spread in zip(dots, ranges, strict=True):
        assert float(spread["x1"]) <= float(dot["cx"]) <= float(spread["x2"]) and dot["cy"] == spread["y1"]
    places = [float(dot["cx"]) for dot in dots]
    means = [statistics.mean(each) for each in LENGTHS.values()]
    assert (places[1] - places[0]) / (means[1] - means[0]) == pytest.approx(
        (places[2] - places[0]) / (means[2] - means[0]), rel=1e-2
    )


def _is_figure(text: str | None) -> bool:
    return bool(re.fullmatch(r"\d\.\d\d", text or ""))


def test_the_same_files_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command writes the part and the charts; again, nothing changes; charts of earlier results go."""
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "RESULTS", results)
    monkeypatch.setattr(page, "PAGE", docs / "results.md")
    (docs / "results.md").write_text(f"# Results\n\nText.\n\n{HEADING}\n\nNot trained yet.\n")
    with pytest.raises(SystemExit, match=r"reference\.json is not there"):
        page.main()
    (results / "reference.json").write_text(json.dumps(whole()))
    (results / "recipes-h200.json").write_text(json.dumps(recipes()))
    page.main()
    first = {path.name: path.read_bytes() for path in docs.rglob("*.*")}
    assert len(first) == 1 + 7 and b"Not trained yet" not in first["results.md"]
    page.main()
    assert {path.name: path.read_bytes() for path in docs.rglob("*.*")} == first
    (results / "recipes-h200.json").unlink()
    (results / "reference.json").write_text(json.dumps(required()))
    page.main()
    assert sorted(path.name for path in docs.rglob("*.svg")) == ["positions.svg", "speed.svg"]


def test_only_what_stands_under_the_heading_is_replaced() -> None:
    """Text before it and later sections stay; without the heading the part is added at the end."""
    before, after = "# Results\n\nText.\n\n", "\n## More\n\nText.\n"
    part = f"{HEADING}\n\nNew.\n\n### Part\n\nText.\n"
    once = replaced(f"{before}{HEADING}\n\nOld.\n\n### Old part\n\nOld.\n{after}", part)
    assert once == before + part + after == replaced(once, part)
    assert replaced(f"{before}{HEADING}\n\nOld.\n", part) == before + part == replaced(before, part)


def test_a_reading_does_not_change_what_was_read() -> None:
    """Making the page leaves the results as they are."""
    result, recipe = whole(), recipes()
    before = copy.deepcopy((result, recipe))
    Page(result, recipe)
    assert (result, recipe) == before


def test_the_committed_page_is_what_the_committed_results_give() -> None:
    """docs/results.md and its charts are current; `python -m benchmarks.reference.page` renews them."""
    made = read()
    text = page.PAGE.read_text(encoding="utf-8")
    assert replaced(text, made.text) == text
    folder = page.PAGE.parent / page.CHARTS
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")} == made.charts
