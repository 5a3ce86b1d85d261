"""The documentation says what the code does."""

from __future__ import annotations

from scripts.make_config_docs import PAGE, render


def test_the_configuration_page_is_current() -> None:
    """docs/configuration.md is what the field docstrings give; run scripts/make_config_docs.py to renew it."""
    assert PAGE.read_text(encoding="utf-8") == render()
