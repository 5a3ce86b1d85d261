"""The page of a plan tells what the record says, whole or in parts, and loads nothing."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cli.plan import make_plan
from paceline.report.page import MISSING
from paceline.report.plan import plan_page
from tests.unit.report.reader import HOSTILE, VISIBLE, check


def record(gpus: str = "8xh200", target: str = "qwen3-8b", *overrides: str) -> dict[str, Any]:
    return make_plan(target, gpus, "5e9", None, overrides, None)


@pytest.mark.parametrize("gpus", ["h200", "8xh200", "64xh200", "4xrtx4090"])
def test_a_page_shows_the_plan(gpus: str) -> None:
    """Best split or that none fits, every part of the work, every role, and every assumption with its source."""
    found = record(gpus)
    page = plan_page(found)
    check(page)
    for name in (*found["flops"]["per_token"], *found["memory"], *found["assumptions"]):
        assert f">{name}<" in page
    best = found["best"]
    if best is None:
        assert "No split fits" in page
    else:
        assert f"{best['tok_per_s']:,.0f}" in page
    assert "A calculation" in page


def test_what_is_missing_is_shown_as_missing() -> None:
    """An empty record, and one of other types, make a page all the same."""
    check(plan_page({}))
    check(plan_page({"splits": [1, {}], "best": {"tok_per_s": "fast"}, "flops": [], "memory": {"role": 3}}))
    assert MISSING in plan_page({"best": {"layout": "split"}})


def test_foreign_text_is_escaped() -> None:
    """A target's path is whatever a person called it."""
    page = plan_page(record() | {"target": HOSTILE})
    check(page)
    assert HOSTILE not in page and VISIBLE.split("<")[0] in page
