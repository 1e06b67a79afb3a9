"""Options are dataclasses: their base, defaults and comments, and how plain data becomes options.

They are annotated as `collectors/options/check_types.py` says, and may hold dataclasses.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

from collectors.options.check_types import Checker, Mismatch, hints
from harness.errors import ConfigError, nearest, show, suggest

T = TypeVar("T")


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
    """The first line of a class's docstring; none of one that dataclasses make."""
    first = (inspect.getdoc(cls) or "").partition("\n")[0]
    return "" if first.startswith(f"{cls.__name__}(") else first


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
    lines, texts = source.splitlines(), {}
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
                texts[statement.target.id] = text
    return texts


# -- plain data becomes options


# Options of earlier versions, by their dotted names: what to do instead.
GONE = {
    "collector.remote.num_collectors": "each worker is a process of its own: set "
    "collector.num_workers",
}
# Values of earlier versions, in the same way.
GONE_VALUES = {
    ("logger", "trackio"): "take wandb or tensorboard",
    ("logger.wandb.artifacts", "code"): "take manifest, which has the commit and its changes",
    ("sync.wire", "delta"): "use float32, which is exact, or bfloat16, half the bytes",
}


class UnknownOption(ConfigError):
    """A key that no dataclass has; `names` are the options beside it."""

    def __init__(self, path: str, key: str, value: Any, names: list[str]):
        self.path, self.key, self.value, self.names = path, key, value, names
        instead = suggest(key, names, prefix=f"{path}." if path else "")
        hint = GONE.get(join(path, key), instead)
        super().__init__(f"{join(path, key)}={show(value)}: there is no such option; {hint}")


class PlainData(Checker):
    """Converts plain data: numbers that are texts, 1e6 for a whole number, dataclasses."""

    words: ClassVar[dict[Any, str]] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        types.NoneType: "null",
        dict: "a mapping",
        list: "a list",
    }

    def fit_key(self, annotation: Any, key: Any, path: str) -> Any:
        return str(key)

    def fit_plain(self, annotation: Any, value: Any, path: str) -> Any:
        if dataclasses.is_dataclass(annotation):
            if not isinstance(value, Mapping) and not dataclasses.is_dataclass(value):
                raise Mismatch
            return convert(annotation, value, path)
        if isinstance(value, str) and annotation is not str:
            value = _from_text(annotation, value)
        if annotation in (None, types.NoneType):
            if value is not None:
                raise Mismatch
            return None
        if annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
            return _finite(value)
        if annotation is int and isinstance(value, float) and value.is_integer():
            value = int(value)  # 1e6 frames
        if annotation is int and type(value) is int and not abs(value) < 1 << 63:
            raise Mismatch  # more than any counter, seed or size can take
        if annotation in (dict, list) and isinstance(value, annotation):
            return value
        if type(value) is not annotation:
            raise Mismatch
        return value

    def describe_plain(self, annotation: Any) -> str:
        if dataclasses.is_dataclass(annotation):
            return f"a mapping of {', '.join(f.name for f in dataclasses.fields(annotation))}"
        return super().describe_plain(annotation)

    def show(self, value: Any) -> str:
        return str(value)


def describe(annotation: Any) -> str:
    """An annotation in a user's words."""
    return PlainData().describe(annotation)


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
        return PlainData().fit(annotation, value, path)
    except Mismatch:
        hint = ""
        if get_origin(annotation) is Literal and isinstance(value, str):
            near = nearest(value, map(str, get_args(annotation)))
            hint = f"; did you mean {near}?" if near else ""
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and (path, one) in GONE_VALUES:
                hint = f"; {GONE_VALUES[path, one]}"
        text = f"{path}={show(value)}: expected {describe(annotation)}{hint}"
        raise ConfigError(text) from None


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
        raise Mismatch from None
    if not math.isfinite(number):
        raise Mismatch
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


def join(path: str, key: str) -> str:
    """The dotted name of `key` below `path`."""
    return f"{path}.{key}" if path else str(key)
