"""A registry holds parts of one kind by name, each with its options and the class that it makes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeVar

from harness.options.base import summary
from harness.options.errors import ConfigError, suggest

Made = TypeVar("Made", bound=Callable[..., Any])


@dataclass(frozen=True)
class Part:
    """One thing that a config can name."""

    name: str
    target: Any  # a class or function, or "module:attribute", which is imported when it is used
    options: type | None = None
    vector: Any = None  # wrappers: what wraps a native vector of environments

    def load(self) -> Any:
        """The class or function."""
        return load(self.target)

    @property
    def summary(self) -> str:
        """What it is, in a line."""
        return summary(self.options or self.load())


@dataclass
class Registry:
    """Parts of one kind by name."""

    kind: str  # in messages: "algorithm"
    group: str  # where its name is given: "algo"
    base: type | None = None  # the class that the parts' options derive from
    several: bool = False  # whether a config may choose several, each with options below its name
    _parts: dict[str, Part] = field(default_factory=dict)

    def register(
        self, name: str, *, options: type | None = None, vector: Any = None
    ) -> Callable[[Made], Made]:
        """Class or function decorator: make it known under a name."""

        def add(target: Made) -> Made:
            self.add(name, target, options, vector=vector)
            return target

        return add

    def add(
        self, name: str, target: Any, options: type | None = None, *, vector: Any = None
    ) -> None:
        """Make `target` known under a name: a class or function, or "module:attribute"."""
        if options is not None and not (isinstance(options, type) and is_dataclass(options)):
            raise TypeError(f"{self.kind} {name!r}: options is {options!r}, expected a dataclass")
        if self.base is not None and not (options and issubclass(options, self.base)):
            raise TypeError(
                f"{self.kind} {name!r}: its options must derive from {self.base.__name__}, "
                f"got {options!r}"
            )
        known = self._parts.get(name)
        if known is not None and path(known.target) != path(target):
            raise ValueError(f"{self.kind} {name!r} is registered already: {path(known.target)}")
        self._parts[name] = Part(name, target, options, vector)

    def get(self, name: Any) -> Part:
        """The part of this name; an unknown one is a `ConfigError` that names the nearest."""
        if not isinstance(name, str) or name not in self._parts:
            hint = suggest(str(name), self._parts)
            raise ConfigError(f"{self.group}={name}: there is no such {self.kind}; {hint}")
        return self._parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts.values())

    def prefix(self, name: str) -> str:
        """What the dotted names of a part's options begin with."""
        return f"{self.group}.{name}." if self.several else f"{self.group}."

    def names(self) -> list[str]:
        """All names."""
        return list(self._parts)


def load(target: Any) -> Any:
    """What "module:attribute" names; anything else is itself."""
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def path(target: Any) -> str:
    """A target as "module:attribute"."""
    return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"


def choice(value: Any, place: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of something that a config gives as `name` or `{name: {arguments}}`."""
    pairs = list(value.items()) if isinstance(value, dict) else [(value, {})]
    if len(pairs) != 1 or not isinstance(pairs[0][0], str):
        raise ConfigError(f"{place} holds {value!r}, expected a name or {{name: arguments}}")
    name, arguments = pairs[0]
    if not isinstance(arguments, dict | None):
        raise ConfigError(f"{place} gives {name!r} the arguments {arguments!r}, expected a mapping")
    return name, dict(arguments or {})
