"""The schemes, one mechanism per file, and their names.

Configuration files and users of other libraries' names look schemes up here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type)

SCHEMES: dict[str, Any] = {}


def register(*names: str) -> Callable[[Kind], Kind]:
    """Class decorator: register a scheme under these names."""

    def add(kind: Kind) -> Kind:
        for name in names:
            if SCHEMES.get(name, kind) is not kind:
                raise ValueError(f"a scheme called {name!r} is registered already: {SCHEMES[name]}")
            SCHEMES[name] = kind
        return kind

    return add


def scheme_class(name: str) -> Any:
    """The class registered under a name. An unknown name raises an error that lists all names."""
    if name not in SCHEMES:
        near = difflib.get_close_matches(name, SCHEMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no scheme is called {name!r}{hint or '.'} Known: {', '.join(SCHEMES)}")
    return SCHEMES[name]
