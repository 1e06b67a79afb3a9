"""Plain data into dataclasses, with every key and every type checked on the way.

Annotations may be bool, int, float, str, None, Literal, list[...], tuple[..., ...], dict[str, ...],
dataclasses, and unions of these.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from harness.config.errors import ConfigError, nearest, suggest

T = TypeVar("T")


class UnknownOption(ConfigError):
    """A key that no dataclass has; `known` are those beside it."""

    def __init__(self, path: str, key: str, value: Any, known: list[str]):
        self.path, self.key, self.value, self.known = path, key, value, known
        super().__init__(self.explain(suggest(key, known, prefix=f"{path}." if path else "")))

    def explain(self, hint: str) -> str:
        return f"{join(self.path, self.key)}={show(self.value)}: there is no such option; {hint}"


class _Mismatch(Exception):
    """A value that does not fit one alternative of an annotation."""


def build(cls: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """An instance of the dataclass from plain data; `path` is where the data lies in the config."""
    hints = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in data:
        if key not in names:
            raise UnknownOption(path, str(key), data[key], names)
    single_first = sorted(data, key=lambda name: isinstance(data[name], Mapping))
    values = {name: convert(hints[name], data[name], join(path, name)) for name in single_first}
    missing = [
        field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name not in data
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        where = join(path, missing[0])
        raise ConfigError(f"{where} is not set: it needs {describe(hints[missing[0]])}")
    return cls(**values)


def convert(annotation: Any, value: Any, path: str) -> Any:
    """`value` as the annotation wants it, or a `ConfigError` that names both."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        if dataclasses.is_dataclass(value):
            return value  # built already, by whoever knew which of several it is
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}={value!r}: expected a group of options")
        return build(annotation, value, path)
    try:
        return _fit(annotation, value, path)
    except _Mismatch:
        hint = ""
        if get_origin(annotation) is Literal and isinstance(value, str):
            near = nearest(value, map(str, get_args(annotation)))
            hint = f"; did you mean {near}?" if near else ""
        text = f"{path}={show(value)}: expected {describe(annotation)}{hint}"
        raise ConfigError(text) from None


def _fit(annotation: Any, value: Any, path: str) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if dataclasses.is_dataclass(annotation):
        return convert(annotation, value, path)
    if origin in (Union, types.UnionType):
        return _fit_any(arguments, value, path)
    if origin is Literal:
        if any(value == a and type(value) is type(a) for a in arguments):
            return value
        raise _Mismatch
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise _Mismatch
        element = arguments[0] if arguments else Any
        return origin(_fit(element, item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _Mismatch
        return {str(k): _fit(arguments[1], v, f"{path}.{k}") for k, v in value.items()}
    return _fit_plain(annotation, value)


def _fit_any(alternatives: tuple[Any, ...], value: Any, path: str) -> Any:
    # The exact type first, so that 1 stays whole where a number may be whole or not.
    for annotation in alternatives:
        if isinstance(annotation, type) and type(value) is annotation:
            return _fit_plain(annotation, value)
    for annotation in alternatives:
        try:
            return _fit(annotation, value, path)
        except _Mismatch:
            continue
    raise _Mismatch


def _fit_plain(annotation: Any, value: Any) -> Any:
    if annotation in (None, type(None)):
        if value is not None:
            raise _Mismatch
        return None
    if annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value)
    if annotation is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e6 frames
    if annotation is int and type(value) is int and not abs(value) < 1 << 63:
        raise _Mismatch  # more than any counter, seed or size can take
    if annotation in (dict, list) and isinstance(value, annotation):
        return value
    if type(value) is not annotation:
        raise _Mismatch
    return value


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        raise _Mismatch from None
    if not math.isfinite(number):
        raise _Mismatch
    return number


def paths(cls: type) -> dict[str, str]:
    """The dotted path of every option below a dataclass, each with its last part."""
    found: dict[str, str] = {}
    for name, annotation in get_type_hints(cls).items():
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            found |= {f"{name}.{path}": leaf for path, leaf in paths(annotation).items()}
        else:
            found[name] = name
    return found


def describe(annotation: Any) -> str:
    """An annotation in a user's words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        type(None): "null",
        dict: "a mapping",
        list: "a list",
    }
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (list, tuple):
        return f"a list, each {describe(arguments[0])}"
    if origin is dict:
        return "a mapping"
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def show(value: Any) -> str:
    """A value as a user would write it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def join(path: str, key: str) -> str:
    """The dotted name of `key` below `path`."""
    return f"{path}.{key}" if path else key
