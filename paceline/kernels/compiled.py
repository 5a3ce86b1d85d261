"""Compiled parts: functions and methods whose code layers share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def run_compiled(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, or a module's method, compiled for the shapes of its arguments; alike layers share the code."""
    return _run(function, args, False)


def run_compiled_any_size(function: Callable[..., Any], *args: Any) -> Any:
    """The same for any number of rows: compiled once, and once more for a single one. Only a module's parameters keep
    their sizes in the code, so functions that take weights as arguments are not for it."""
    return _run(function, args, True)


RECOMPILE_LIMIT = 64
"""Kinds of arguments for which a function may be compiled in one process; PyTorch's 8 are few where models come and
go."""


def _run(function: Callable[..., Any], args: tuple[Any, ...], any_size: bool) -> Any:
    owner = getattr(function, "__self__", None)
    if owner is None:
        return _compiled(function, any_size)(*args)
    return _compiled(function.__func__, any_size)(owner, *args)  # type: ignore[attr-defined]  # a method


@functools.cache
def _compiled(function: Callable[..., Any], any_size: bool) -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    return torch.compile(function, fullgraph=True, dynamic=any_size)
