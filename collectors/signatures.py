"""Constructors whose options an editor, mypy and `help()` see, from the one list in `options.py`.

    @takes(Arguments)
    def __init__(self, create_env_fn, policy=None, **options): ...

mypy and editors then check a call as if it called `Arguments`, a dataclass that has every option as
a field. `help()` shows its parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from collectors.options import Options

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Arguments(Options):
    """What every collector takes."""

    create_env_fn: Callable[..., Any] | Sequence[Any]
    policy: Any = None


@dataclass(frozen=True, kw_only=True)
class MultiArguments(Arguments):
    """What `MultiCollector` takes."""

    sync: bool


def takes(
    arguments: Callable[P, object],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Show a constructor as one that takes what this dataclass does."""
    return functools.partial(_show, arguments.__init__)


def function_takes(arguments: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """The same for a function."""
    return functools.partial(_show, arguments)


def _show(like: Callable[..., Any], called: Callable[..., Any]) -> Callable[..., Any]:
    # `inspect.signature` follows `__wrapped__`; nothing else of the function is changed.
    return functools.update_wrapper(called, like, assigned=(), updated=())
