"""tensordict without torch's compiler, until somebody compiles.

tensordict marks a few functions for the compiler when it is imported, and that alone loads all of
the compiler: half of what a process imports here. So the marks are put off until it is loaded.
Imported before tensordict.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"
_MARKS = ("allow_in_graph", "assume_constant_result")


class _Marks(MetaPathFinder):
    """Marks that were put off; they are made when the import of the compiler asks for it here."""

    def __init__(self) -> None:
        self._put_off: list[tuple[str, Callable[..., Any]]] = []

    def later(self, name: str) -> Callable[..., Any]:
        def mark(function: Any) -> Any:
            self._put_off.append((name, function))
            return function

        return mark

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != COMPILER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_mark(module: ModuleType) -> None:  # to ask for the spec loads nothing yet
                load(module)
                self.make(module)

            spec.loader.exec_module = load_and_mark  # type: ignore[method-assign]
        return spec

    def make(self, compiler: ModuleType) -> None:
        while self._put_off:
            name, function = self._put_off.pop()
            getattr(compiler, name)(function)


def _load() -> None:
    marks = _Marks()
    own = {name: getattr(torch.compiler, name) for name in _MARKS}
    for name in _MARKS:
        setattr(torch.compiler, name, marks.later(name))
    try:
        import tensordict.nn  # noqa: F401
    finally:
        for name, mark in own.items():
            setattr(torch.compiler, name, mark)
    if COMPILER in sys.modules:  # something else in there wanted it
        marks.make(sys.modules[COMPILER])
    else:
        sys.meta_path.insert(0, marks)


if COMPILER not in sys.modules:
    _load()
