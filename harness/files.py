"""Files: written completely or not at all, and read within bounds.

What is written goes beside its place, is synced, then renamed into it. What is read may come from
anywhere: only ordinary files of a bounded size are opened, links are not followed (they may lead
out of the directory), and nothing in a file is resolved or executed.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import yaml

MOST_BYTES = 1 << 26  # of a JSON file: a manifest may hold a long diff
MOST_BYTES_YAML = 1 << 18
DEEPEST = 64  # levels of nesting
LONGEST_LINE = 1000  # characters of a message


def write_atomic(file: Path, content: bytes | str) -> None:
    """Replace `file` by `content`; a reader, or a crash, sees the old or the new, never a part."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    data = content.encode() if isinstance(content, str) else content
    beside.unlink(missing_ok=True)
    try:
        with open(beside, "xb") as stream:  # x: through no link that somebody laid there
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(file)
    except OSError as error:
        error.filename = str(file)  # a full disk names none
        del error.filename2  # which would be said, were it None
        raise
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make what was renamed within a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(file: Path, value: Any) -> None:
    """`value` as JSON that a person can read, atomically."""
    write_atomic(file, json.dumps(plain(value), indent=2) + "\n")


def overwrite_json(file: Path, value: dict[str, Any], *, most_bytes: int) -> None:
    """Write into a file that is there, whose room is enough; the longest text is cut to fit."""
    while len(data := json.dumps(plain(value), indent=2).encode() + b"\n") > most_bytes:
        longest = max(value, key=lambda name: len(str(value[name])))
        value = {**value, longest: str(value[longest])[-(len(str(value[longest])) // 2) :]}
    with open(os.open(file, os.O_WRONLY | os.O_NOFOLLOW), "wb") as stream:
        stream.write(data)
        stream.truncate()
        stream.flush()
        os.fsync(stream.fileno())


def read_text(file: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of an ordinary file; what else is there is an `OSError` or `ValueError`."""
    check_ordinary(file, most_bytes)
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size  # read() takes as much memory as it may read
        return stream.read(min(size, most_bytes)).decode(errors="replace")


def check_ordinary(file: Path, most_bytes: int | None = None) -> None:
    """Raise unless it is a file, no link, and not larger than that."""
    status = file.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise ValueError(f"{file} is a link, expected a file: links are not followed")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{file} is no file")
    if most_bytes is not None and status.st_size > most_bytes:
        raise ValueError(f"{file} has {status.st_size} bytes, expected {most_bytes} or less")


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds; empty if there is no such file."""
    try:
        value = parse_json(read_text(file))
    except FileNotFoundError:
        return {}
    except DamagedError as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds {type(value).__name__}, expected an object")
    return value


class DamagedError(ValueError):
    """A text is not what it should be."""


def parse_json(text: str) -> Any:
    """A JSON value, not nested too deeply."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedError("not JSON") from None
    return _not_too_deep(value)


def parse_yaml(text: str) -> Any:
    """A value of plain YAML: text, numbers, lists, mappings; no references and no other tags."""
    try:
        _check_plain(text)
        value = yaml.load(text, Loader=_PlainLoader)
    except DamagedError:
        raise
    except yaml.YAMLError:
        raise DamagedError("not plain YAML") from None
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"{type(error).__name__} in it") from None
    return _not_too_deep(value)


def to_yaml(value: Any) -> str:
    """Plain YAML, which `parse_yaml` reads as the same value."""
    return yaml.dump(value, Dumper=_PlainDumper, sort_keys=False)


TAG = "tag:yaml.org,2002:"
KINDS = tuple(f"{TAG}{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map"))
# YAML 1.1 takes 1e-3 for text; people, and what composes the config, take it for a number.
FLOAT = re.compile(r"[-+]?\d[\d_]*[eE][-+]?\d+$")


class _PlainLoader(yaml.CSafeLoader):
    """YAML of `KINDS` alone."""

    yaml_constructors: ClassVar[Any] = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag in KINDS
    }
    yaml_implicit_resolvers: ClassVar[Any] = {
        first: [(tag, pattern) for tag, pattern in pairs if tag in KINDS]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > 400:  # longer than any float, and slow to write as decimals
            raise yaml.YAMLError("a number of more than 400 digits")
        return super().construct_yaml_int(node)


class _PlainDumper(yaml.SafeDumper):
    """What `_PlainLoader` reads."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_PlainLoader.add_constructor(f"{TAG}int", _PlainLoader.construct_yaml_int)
_PlainLoader.add_implicit_resolver(f"{TAG}float", FLOAT, list("-+0123456789"))
_PlainDumper.add_implicit_resolver(f"{TAG}float", FLOAT, list("-+0123456789"))


def _check_plain(text: str) -> None:
    """Refuse references, by which a few lines stand for more than memory holds, and depth."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("references are not read")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise DamagedError(f"nested in more than {DEEPEST} levels")


def one_line(text: object, longest: float = LONGEST_LINE) -> str:
    """A text for a message: on one line, not endless, and nothing in it that moves a cursor."""
    line = "".join(c if c.isprintable() else " " if c.isspace() else "�" for c in str(text))
    line = " ".join(line.split())
    return line if len(line) <= longest else f"{line[: int(longest) - 1]}…"


def _not_too_deep(value: Any) -> Any:
    layer = [value]
    for _ in range(DEEPEST):
        layer = [
            item
            for holder in layer
            if isinstance(holder, dict | list)
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
        if not layer:
            return value
    raise DamagedError(f"nested in more than {DEEPEST} levels")


def flatten(value: Any, *, lists: bool, above: str = "") -> Iterator[tuple[str, Any]]:
    """What nested mappings, and with `lists` also lists, hold, by dotted names."""
    if isinstance(value, dict) and value:
        items = list(value.items())
    elif isinstance(value, list | tuple) and value and lists:
        items = list(enumerate(value))
    else:
        yield above, value
        return
    for key, item in items:
        yield from flatten(item, lists=lists, above=f"{above}.{key}" if above else str(key))


def is_alive(pid: Any) -> bool:
    """Whether `pid`, as a file gave it, is the number of a process on this machine."""
    if type(pid) is not int or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def plain(value: Any) -> Any:
    """`value` with what JSON does not know (NaN, infinities, paths, numpy numbers) made to fit."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
