"""How options are declared, and their checks against the declarations.

batches_ahead: int = option(2, at_least(1), OnlyFor((ASYNC,), "a batch is started when ..."))
"""

from __future__ import annotations

import math
import types
import typing
from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

from sync.local.waiting import LONGEST_S

Mark = TypeVar("Mark")

# Descriptions of options for which the type is not clear enough.
_BETTER_WORDS = {
    "info_keys": "names of entries of info, or a dict of them with a value for missing ones"
}


@dataclass(frozen=True)
class Bound:
    """The numbers that an option may be; of a list, each entry."""

    words: str
    low: float
    high: float = math.inf
    above: bool = False  # the lowest is not allowed itself

    def holds(self, value: Any) -> bool:
        """Whether each number is within the bound."""
        numbers: list[Any] = [one for one in each(value) if isinstance(one, Real)]
        return all(
            self.low <= one <= self.high and not (self.above and one == self.low) for one in numbers
        )


def at_least(minimum: int) -> Bound:
    """The whole numbers from this one on."""
    return Bound(f"it must be at least {minimum}", minimum)


SECONDS = Bound(f"seconds, above 0 and up to {LONGEST_S:g}", 0, LONGEST_S, above=True)
SHARE = Bound("a share, above 0 and up to 1", 0, 1, above=True)


@dataclass(frozen=True)
class OnlyFor:
    """The kinds of collectors that have an option, and why others have not."""

    kinds: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class NeedsPolicy:
    """The option is about a policy."""


def option(default: Any, *marks: Bound | OnlyFor | NeedsPolicy) -> Any:
    """A field of a dataclass of options, with its bounds and what it is for."""
    return field(default=default, metadata={"marks": marks})


def marked(options: Any, mark: type[Mark]) -> Iterator[tuple[str, Mark]]:
    """The names of options that have a mark of this type, and the mark."""
    for one in fields(options):
        for found in one.metadata.get("marks", ()):
            if isinstance(found, mark):
                yield one.name, found


def check_fields(options: Any) -> None:
    """Raise for the first field of a dataclass whose value has another type or is out of bounds."""
    check_types(options)
    for name, bound in marked(options, Bound):
        value = getattr(options, name)
        if not bound.holds(value):
            raise ValueError(f"{name}={value!r}: {bound.words}")


def check_types(options: Any) -> None:
    """Raise for the first field of a dataclass whose value does not fit its type."""
    for name, hint in get_type_hints(type(options)).items():
        value = getattr(options, name)
        if fits(value, hint):
            continue
        if any(get_origin(one) is Literal for one in (hint, *get_args(hint))):
            raise ValueError(f"{name}={shown(value)}: it is {describe(hint)}")
        raise TypeError(
            f"{name}={shown(value)}: it must be {_BETTER_WORDS.get(name) or describe(hint)}"
        )


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type that an annotation names."""
    args = get_args(hint)
    match get_origin(hint):
        case typing.Union | types.UnionType:
            return any(fits(value, one) for one in args)
        case typing.Literal:
            return any(type(value) is type(one) and value == one for one in args)
        case abc.Callable:
            return callable(value)
        case abc.Sequence:
            return is_list(value) and all(fits(one, args[0]) for one in value)
        case abc.Mapping:
            return isinstance(value, abc.Mapping) and all(
                fits(key, args[0]) and fits(one, args[1]) for key, one in value.items()
            )
    if hint is int:
        return is_whole(value)
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    return hint is Any or isinstance(value, hint)


def describe(hint: Any) -> str:
    """An annotation in words."""
    args = get_args(hint)
    match get_origin(hint):
        case typing.Union | types.UnionType:
            return " or ".join(map(describe, args))
        case typing.Literal:
            return f"one of {', '.join(map(repr, args))}"
        case abc.Callable:
            return "callable"
        case abc.Sequence:
            return f"a list, each {describe(args[0])}"
        case abc.Mapping:
            return "a dict" if args[1] is Any else f"a dict, each value a {describe(args[1])}"
    return _WORDS.get(hint) or str(hint.__name__)


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    types.NoneType: "None",
}


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
    if isinstance(value, int | float | str | None):
        return repr(value)
    return f"<{type(value).__name__}>"


def as_device(value: Any, name: str) -> torch.device | None:
    """The device that an option names, whether this machine has it or not."""
    try:
        return None if value is None else torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"{name}={value!r}: no device of torch, as 'cpu' or 'cuda:0' are"
        ) from None


def check_device(value: Any, name: str) -> None:
    """Refuse a device that this machine does not have."""
    device, count = as_device(value, name), torch.cuda.device_count()
    if device is not None and device.type == "cuda" and (device.index or 0) >= count:
        here = f"there are {count} CUDA devices here" if count else "there is no CUDA device here"
        raise ValueError(f"{name}={value!r}: {here}")
