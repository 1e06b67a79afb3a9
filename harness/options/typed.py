"""Converts plain data into dataclasses, and checks every key, type and bound.

Annotations may be bool, int, float, str, None, Literal, list[...], dict[str, ...], dataclasses,
unions of these, and `Annotated[..., Range(...)]`.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from harness.options.errors import ConfigError, nearest, suggest

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that an option may be; NaN is in no range."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # the lowest is not allowed itself

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        low = f"more than {self.low:.10g}" if self.above else f"{self.low:.10g} or more"
        if self.high == math.inf:
            return low
        if self.low == -math.inf:
            return f"{self.high:.10g} or less"
        return (
            f"{low}, {self.high:.10g} or less"
            if self.above
            else f"{self.low:.10g} to {self.high:.10g}"
        )


Count = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Seconds = Annotated[float, Range(0, 1e9, above=True)]


class UnknownOption(ConfigError):
    """A key that no dataclass has; `known` are the options beside it."""

    def __init__(self, path: str, key: str, value: Any, known: list[str]):
        self.path, self.key, self.value, self.known = path, key, value, known
        hint = suggest(key, known, prefix=f"{path}." if path else "")
        super().__init__(f"{join(path, key)}={show(value)}: there is no such option; {hint}")


class _Mismatch(Exception):
    """A value that does not fit one alternative of an annotation."""


def hints(cls: type) -> dict[str, Any]:
    """The annotation of each field, with its bounds."""
    annotations = get_type_hints(cls, include_extras=True)
    return {field.name: annotations[field.name] for field in dataclasses.fields(cls)}


def build(cls: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """An instance of the dataclass from plain data; `path` is where the data lies in the config."""
    annotations = hints(cls)
    for key in data:
        if key not in annotations:
            raise UnknownOption(path, str(key), data[key], list(annotations))
    single_first = sorted(data, key=lambda name: isinstance(data[name], Mapping))
    values = {key: convert(annotations[key], data[key], join(path, key)) for key in single_first}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        optional = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if field.name not in data and not optional:
            wanted = describe(annotations[field.name])
            raise ConfigError(f"{join(path, field.name)} is not set: it needs {wanted}")
    return cls(**values)


def convert(annotation: Any, value: Any, path: str) -> Any:
    """`value` as the annotation wants it, or a `ConfigError` that names both."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        if dataclasses.is_dataclass(value):
            return value  # built before, as the option's registered class
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
        if not isinstance(value, Mapping) and not dataclasses.is_dataclass(value):
            raise _Mismatch
        return convert(annotation, value, path)
    if origin is Annotated:
        value = _fit(arguments[0], value, path)
        if any(isinstance(mark, Range) and value not in mark for mark in arguments[1:]):
            raise _Mismatch
        return value
    if origin in (Union, types.UnionType):
        return _fit_any(arguments, value, path)
    if origin is Literal:
        if any(value == a and type(value) is type(a) for a in arguments):
            return value
        raise _Mismatch
    if origin is list:
        if not isinstance(value, list | tuple):
            raise _Mismatch
        return [_fit(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value)]
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
    if isinstance(value, str) and annotation is not str:
        value = _from_text(annotation, value)
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


def _from_text(annotation: Any, text: str) -> Any:
    """The number, truth value or null that a text stands for: `${oc.env:X}` is always text."""
    words = {"true": True, "false": False} if annotation is bool else {"null": None}
    if annotation in (bool, None, type(None)):
        return words.get(text.lower(), text)
    for kind in (int, float) if annotation in (int, float) else ():
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        raise _Mismatch from None
    if not math.isfinite(number):
        raise _Mismatch
    return number


def in_types(value: Any, converted: Any) -> Any:
    """Plain data, with the texts that stand for numbers as what they were converted to."""
    if isinstance(value, Mapping):
        members = converted if isinstance(converted, Mapping) else vars(converted)
        return {key: in_types(item, members.get(key, item)) for key, item in value.items()}
    if isinstance(value, list) and isinstance(converted, list):
        return [in_types(item, one) for item, one in zip(value, converted, strict=True)]
    if isinstance(value, str) and isinstance(converted, bool | int | float | None):
        return converted
    return value


def paths(cls: type) -> Iterator[str]:
    """The dotted path of every option below a dataclass."""
    for name, annotation in hints(cls).items():
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            yield from (f"{name}.{path}" for path in paths(annotation))
        else:
            yield name


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
    if origin is Annotated:
        bounds = ", ".join(str(mark) for mark in arguments[1:] if isinstance(mark, Range))
        return f"{describe(arguments[0])} ({bounds})"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is list:
        return f"a list, each {describe(arguments[0])}"
    if origin is dict:
        return "a mapping"
    if dataclasses.is_dataclass(annotation):
        return f"a mapping of {', '.join(f.name for f in dataclasses.fields(annotation))}"
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
    return f"{path}.{key}" if path else str(key)
