"""Signatures of constructors that take `**options`, from the one list in `options.py`.

    @takes(Arguments)
    def __init__(self, create_env_fn, policy=None, **options): ...

For mypy, editors and `help()`, the constructor has the parameters of the dataclass `Arguments`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from collectors.options.collector_options import Options

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Arguments(Options):
    """The arguments of every collector."""

    create_env_fn: Callable[..., Any] | Sequence[Any]
    policy: Any = None


@dataclass(frozen=True, kw_only=True)
class MultiArguments(Arguments):
    """The arguments of `MultiCollector`."""

    sync: bool


def takes(
    arguments: Callable[P, object],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Give a constructor the signature of this dataclass."""
    return functools.partial(_show, arguments.__init__)


def function_takes(arguments: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function the signature of this dataclass."""
    return functools.partial(_show, arguments)


def _show(like: Callable[..., Any], called: Callable[..., Any]) -> Callable[..., Any]:
    # Only sets `__wrapped__`, which `inspect.signature` follows.
    return functools.update_wrapper(called, like, assigned=(), updated=())
