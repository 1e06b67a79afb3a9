"""What a fork server loads, so that workers have it from their first moment.

tensordict marks a few functions for the compiler when it is imported, and that alone loads all of
the compiler: nearly half of what a worker imports. Here the marks are put off until somebody
compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_MARKS = ("allow_in_graph", "assume_constant_result")
_put_off: list[tuple[str, Callable[..., Any]]] = []


def _later(name: str) -> Callable[..., Any]:
    def mark(function: Any) -> Any:
        _put_off.append((name, function))
        return function

    return mark


def mark_for_compiler() -> None:
    """Make the marks that were put off: something is going to be compiled."""
    while _put_off:
        name, function = _put_off.pop()
        getattr(torch.compiler, name)(function)


def _load() -> None:
    marks = {name: getattr(torch.compiler, name) for name in _MARKS}
    for name in _MARKS:
        setattr(torch.compiler, name, _later(name))
    try:
        import tensordict.nn  # noqa: F401
    finally:
        for name, mark in marks.items():
            setattr(torch.compiler, name, mark)


_load()
