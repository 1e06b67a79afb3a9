"""Loads a module of a framework alone: what it imports beside it is replaced by stubs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parents[2] / ".venv-controllers"  # `make controllers`


class Missing(Exception):
    """A framework is not installed, with what to do."""


class _Any(type):
    """Whatever a stub module is asked for: a class that can be called, derived from, decorated."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls


def make(name: str) -> Any:
    def create(cls: Any, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], types.FunctionType):
            return args[0]  # a decorator
        return object.__new__(cls)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 else None

    return _Any(name, (), {"__new__": create, "__call__": call})


class _Stub(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = make(name)
        setattr(self, name, value)
        return value


@contextmanager
def _stubs(names: tuple[str, ...]) -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: _Stub(name) for name in names})
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def load(name: str, path: Path, stubs: tuple[str, ...]) -> Any:
    """The module in this file."""
    if not path.exists():
        raise Missing(f"{path} is not there: make controllers")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _stubs(stubs):
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        finally:
            del sys.modules[name]
    return module


def show(repository: Path | None, commit: str, path: str, place: Path) -> Path:
    """A file of a repository at a commit, written below `place`."""
    if repository is None:
        raise Missing("name a clone with --repository")
    command = ["git", "-C", str(repository), "show", f"{commit}:{path}"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise Missing(f"{repository} has no {path} at {commit}")
    file = place / Path(path).name
    file.write_bytes(done.stdout)
    return file
