"""Loads modules of a framework alone: every package that they import beside themselves is a stub.

The code that runs is the framework's file, unchanged. A stub answers whatever is asked of it, and
does nothing.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-controllers"


class Missing(Exception):
    """A framework is not installed."""


class _Stub(type):
    """A class that can be called, derived from, subscripted and used as a decorator."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def stub(name: str) -> Any:
    """Something of this name that does nothing."""

    def create(cls: Any, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and not options and isinstance(args[0], types.FunctionType | type):
            return args[0]  # used as a decorator
        return object.__new__(cls)

    def initialise(self: Any, *args: Any, **options: Any) -> None: ...

    def call(self: Any, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 else None

    def attribute(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(name)

    methods = {"__new__": create, "__init__": initialise, "__call__": call}
    return _Stub(name, (), {**methods, "__getattr__": attribute})


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = stub(name)
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def __init__(self, roots: Sequence[str], contents: Mapping[str, Mapping[str, Any]]):
        self._roots, self._contents = frozenset(roots), contents

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._roots:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(self._contents.get(module.__name__, {}))


@contextmanager
def _stubs(roots: Sequence[str], contents: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    def of_roots() -> dict[str, types.ModuleType]:
        return {k: v for k, v in sys.modules.items() if k.partition(".")[0] in roots}

    hidden = of_roots()
    for name in hidden:
        del sys.modules[name]
    finder = _Finder(roots, contents)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in of_roots():
            del sys.modules[name]
        sys.modules.update(hidden)


def load(
    path: Path,
    stubs: Sequence[str],
    contents: Mapping[str, Mapping[str, Any]] | None = None,
    name: str | None = None,
) -> Any:
    """The module in this file, where all packages in `stubs` are stubs.

    contents: of modules among the stubs, by name: what is to be real in them.
    name: of the module, where it imports others relative to itself.
    """
    name = name or f"foreign_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise Missing(f"{path} is not there: run `make controllers`")
    module = importlib.util.module_from_spec(spec)
    with _stubs(stubs, contents or {}):
        sys.modules[name] = module  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        finally:
            sys.modules.pop(name, None)
    return module


def installed(path: str) -> Path:
    """A file of a package in the environment of the frameworks."""
    places = sorted(ENVIRONMENT.glob("lib/python*/site-packages"))
    if not places:
        raise Missing(f"{ENVIRONMENT.name} is not there: run `make controllers`")
    return places[0] / path


def cloned(path: str) -> Path:
    """A file of a repository in the environment of the frameworks."""
    return ENVIRONMENT / "repositories" / path
