"""Imports tensordict without loading torch's compiler (dynamo), until something is compiled.

When tensordict is imported, it marks a few functions for the compiler. This loads the compiler,
which is slow and large, so the marks are deferred until something else loads it. Import this module
before tensordict. `docs/internals.md` says what it relies on.
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
    """Deferred marks, made when the compiler is imported, which asks this finder for it."""

    def __init__(self) -> None:
        self._deferred: list[tuple[str, Callable[..., Any]]] = []

    def later(self, name: str) -> Callable[..., Any]:
        def mark(function: Any) -> Any:
            self._deferred.append((name, function))
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

            def load_and_mark(module: ModuleType) -> None:  # asking for the spec loads nothing
                load(module)
                self.make(module)

            spec.loader.exec_module = load_and_mark  # type: ignore[method-assign]
        return spec

    def make(self, compiler: ModuleType) -> None:
        while self._deferred:
            name, function = self._deferred.pop()
            getattr(compiler, name)(function)


def _load() -> None:
    marks = _Marks()
    originals = {name: getattr(torch.compiler, name) for name in _MARKS}
    for name in _MARKS:
        setattr(torch.compiler, name, marks.later(name))
    try:
        import tensordict.nn  # noqa: F401
    finally:
        for name, mark in originals.items():
            setattr(torch.compiler, name, mark)
    if COMPILER in sys.modules:  # something else that was imported needed it
        marks.make(sys.modules[COMPILER])
    else:
        sys.meta_path.insert(0, marks)


if COMPILER not in sys.modules:
    _load()
