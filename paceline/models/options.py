"""Options that a drafter kind has of its own."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError


def filled_in(kind: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Options with defaults for those that are not there, in the defaults' order.

    Raises: ConfigError for one that the kind does not have, or whose value is of another type than its default.
    """
    for name, value in options.items():
        if name not in defaults:
            near = difflib.get_close_matches(name, defaults, n=1)
            hint = f"; did you mean {near[0]}?" if near else f": it has {', '.join(defaults)}"
            raise ConfigError(f"draft.options.{name}: draft.kind={kind} has no such option{hint}")
        wanted = type(defaults[name])
        if type(value) is not wanted:
            raise ConfigError(
                f"draft.options.{name}={value!r}: a value of type {wanted.__name__} such as {defaults[name]!r} was "
                "wanted"
            )
    return {**defaults, **options}
