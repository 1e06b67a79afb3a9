"""What a fork server loads, so that workers have it from their first moment.

tensordict marks a few functions for the compiler when it is imported, and that alone loads all of
the compiler: nearly half of what a worker imports. Here the marks are put off until somebody
compiles.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
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


@atexit.register
def _remove_listener() -> None:
    """A trainer that was killed leaves the socket on which its fork server listened."""
    server = forkserver._forkserver
    address = server._forkserver_address  # type: ignore[attr-defined]
    if server._forkserver_pid is None and str(address).startswith("/"):  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            Path(address).unlink(missing_ok=True)
            Path(address).parent.rmdir()


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
