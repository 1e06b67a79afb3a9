"""Checks values against annotations: options in a program, and options on a command line.

Annotations may be bool, int, float, str, None, Any, Literal, lists, mappings, Callable, classes,
unions of these, and `Annotated` with a `Range` or with words for an error. The command reads
options without torch, so this module imports nothing of this package.
"""

from __future__ import annotations

import math
import types
import typing
from collections import abc
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Range:
    """The numbers that an option may be; NaN and infinity are in no range."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # the lowest is not allowed itself

    def __contains__(self, value: float) -> bool:
        is_within = self.low <= value <= self.high and abs(value) != math.inf
        return is_within and not (self.above and value == self.low)

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
PositiveShare = Annotated[float, Range(0, 1, above=True)]
Milliseconds = Annotated[float, Range(0, 1e9)]
Port = Annotated[int, Range(0, 65535)]
Seconds = Annotated[float, Range(0, 1e9, above=True)]


class Mismatch(Exception):
    """A value that does not fit an annotation. out_of: the range that it is out of."""

    def __init__(self, out_of: Range | None = None):
        super().__init__()
        self.out_of = out_of


class Checker:
    """Checks the values that a program passes."""

    words: ClassVar[dict[Any, str]] = {
        bool: "True or False",
        int: "a whole number",
        float: "a number",
        str: "a string",
        types.NoneType: "None",
        dict: "a dict",
        list: "a list",
    }

    def fit(self, annotation: Any, value: Any, path: str) -> Any:
        """The value as the annotation describes it, or `Mismatch`. path: the option's name."""
        arguments = get_args(annotation)
        match get_origin(annotation):
            case typing.Annotated:
                value = self.fit(arguments[0], value, path)
                for mark in arguments[1:]:
                    if isinstance(mark, Range) and value not in mark:
                        raise Mismatch(mark)
                return value
            case typing.Union | types.UnionType:
                return self._fit_any(arguments, value, path)
            case typing.Literal:
                fits = any(type(value) is type(one) and value == one for one in arguments)
            case abc.Callable:
                fits = callable(value)
            case origin if origin in (list, abc.Sequence):
                if fits := is_list(value):
                    entries = enumerate(value)
                    return [self.fit(arguments[0], one, f"{path}[{i}]") for i, one in entries]
            case origin if origin in (dict, abc.Mapping):
                if fits := isinstance(value, abc.Mapping):
                    return {
                        self.fit_key(arguments[0], key, path): self.fit(
                            arguments[1], one, f"{path}.{key}"
                        )
                        for key, one in value.items()
                    }
            case _:
                return value if annotation is Any else self.fit_plain(annotation, value, path)
        if not fits:
            raise Mismatch
        return value

    def _fit_any(self, alternatives: tuple[Any, ...], value: Any, path: str) -> Any:
        # The exact type first, so that 1 stays whole where a number may be whole or not.
        for annotation in alternatives:
            if isinstance(annotation, type) and type(value) is annotation:
                return self.fit_plain(annotation, value, path)
        out_of = None
        for annotation in alternatives:
            try:
                return self.fit(annotation, value, path)
            except Mismatch as mismatch:
                out_of = out_of or mismatch.out_of
        raise Mismatch(out_of)

    def fit_key(self, annotation: Any, key: Any, path: str) -> Any:
        """The key of a mapping."""
        return self.fit(annotation, key, path)

    def fit_plain(self, annotation: Any, value: Any, path: str) -> Any:
        """The same as `fit` for an annotation that is a class."""
        if annotation is int:
            fits = is_whole(value)
        elif annotation is float:
            fits = isinstance(value, Real) and not isinstance(value, bool)
        else:
            fits = isinstance(value, annotation)
        if not fits:
            raise Mismatch
        return value

    def describe(self, annotation: Any) -> str:
        """An annotation in words."""
        arguments = get_args(annotation)
        match get_origin(annotation):
            case typing.Annotated:
                words = [mark for mark in arguments[1:] if isinstance(mark, str)]
                bounds = ", ".join(str(mark) for mark in arguments[1:] if isinstance(mark, Range))
                return words[0] if words else f"{self.describe(arguments[0])} ({bounds})"
            case typing.Union | types.UnionType:
                return " or ".join(map(self.describe, arguments))
            case typing.Literal:
                return f"one of {', '.join(map(self.show, arguments))}"
            case abc.Callable:
                return "callable"
            case origin if origin in (list, abc.Sequence):
                return f"{self.words[list]}, each {self.describe(arguments[0])}"
            case origin if origin in (dict, abc.Mapping):
                each = "" if arguments[1] is Any else f", each value {self.describe(arguments[1])}"
                return f"{self.words[dict]}{each}"
        return self.describe_plain(annotation)

    def describe_plain(self, annotation: Any) -> str:
        """The same for an annotation that is a class."""
        return self.words.get(annotation) or str(getattr(annotation, "__name__", annotation))

    def show(self, value: Any) -> str:
        """A short value itself, or the name of its type."""
        if isinstance(value, int | float | str | None):
            return repr(value)
        return f"<{type(value).__name__}>"


def hints(cls: type) -> dict[str, Any]:
    """The annotation of each field of a dataclass, with its bounds."""
    annotations = get_type_hints(cls, include_extras=True)
    return {field.name: annotations[field.name] for field in fields(cls)}


def check_fields(options: Any) -> None:
    """Raise for the first field of a dataclass that has another type, or is out of bounds."""
    checker = Checker()
    for name, annotation in hints(type(options)).items():
        value = getattr(options, name)
        try:
            checker.fit(annotation, value, name)
        except Mismatch as mismatch:
            if mismatch.out_of is not None:
                text = f"{name}={value!r}: it must be {mismatch.out_of}"
                raise ValueError(text) from None
            expected = f"{name}={shown(value)}: it must be {checker.describe(annotation)}"
            if any(get_origin(one) is Literal for one in (annotation, *get_args(annotation))):
                raise ValueError(expected) from None
            raise TypeError(expected) from None


def is_whole(value: Any) -> bool:
    """Whether a value is an integer and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_list(value: Any) -> bool:
    """Whether a value is a sequence and no string."""
    return isinstance(value, abc.Sequence) and not isinstance(value, str)


def each(value: Any) -> abc.Sequence[Any]:
    """The entries of a list, or the one value."""
    return value if is_list(value) else [value]


def shown(value: Any) -> str:
    """A short value itself, or the name of its type."""
    return Checker().show(value)
