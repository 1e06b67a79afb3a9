"""The base of all options: a default for the config, a comment, and a check."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from typing import Any, ClassVar, get_origin

from collectors.annotations import hints


@dataclasses.dataclass
class Options:
    """The options of one part of a run. Derive from the class of its group."""

    group: ClassVar[str] = ""  # where they lie in the config

    def check(self, config: Any) -> None:
        """Raise `ConfigError` if these cannot work with the rest of the run's `Config`."""

    def warnings(self, config: Any) -> list[str]:
        """What a run with this `Config` should say at its start: it works, and may mislead."""
        return []


def linked(interpolation: str) -> dict[str, str]:
    """Metadata of a field whose default in a config is what the interpolation refers to."""
    return {"config": interpolation}


def defaults(cls: type) -> dict[str, Any]:
    """The options of a dataclass as plain data, as they lie in a config; `???` must be set."""
    return {field.name: _default(field) for field in dataclasses.fields(cls)}


def _default(field: dataclasses.Field[Any]) -> Any:
    if "config" in field.metadata:
        return field.metadata["config"]
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = "???" if field.default is dataclasses.MISSING else field.default
    return defaults(type(value)) if dataclasses.is_dataclass(value) else value


def mappings(cls: type) -> list[str]:
    """The names of the options that are mappings with keys of the user's own."""
    return [name for name, annotation in hints(cls).items() if get_origin(annotation) is dict]


def summary(cls: type) -> str:
    """The first line of a class's docstring."""
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def comments(cls: type) -> dict[str, str]:
    """The comment behind each field, or else the comment lines above it, by the field's name.

    A field may have it in its metadata instead: `field(metadata={"help": "..."})`.
    """
    texts: dict[str, str] = {}
    for base in reversed([c for c in cls.__mro__ if dataclasses.is_dataclass(c)]):
        texts |= _comments(base)
    from_metadata = {
        f.name: f.metadata["help"] for f in dataclasses.fields(cls) if "help" in f.metadata
    }
    return texts | from_metadata


def _comments(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # typed at a prompt, say
        return {}
    lines, found = source.splitlines(), {}
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    for statement in body.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert statement.end_lineno is not None
            behind = re.search(r"  # (.*)$", lines[statement.end_lineno - 1])
            above: list[str] = []
            for line in reversed(lines[: statement.lineno - 1]):
                if not line.lstrip().startswith("# "):
                    break
                above.insert(0, line.strip().removeprefix("# "))
            text = behind[1] if behind else " ".join(above)
            if text:
                found[statement.target.id] = text
    return found
