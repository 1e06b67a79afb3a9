"""Errors in a config: one line each, with the nearest correct alternative."""

from __future__ import annotations

import difflib
import importlib.util
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.files import one_line

ROOT = Path(__file__).resolve().parents[1]  # a checkout, or where packages are installed


class ConfigError(ValueError):
    """A mistake in the config or on the command line; its text is one line."""

    def __init__(self, text: str):
        super().__init__(one_line(text))


class ImpossiblePair(ConfigError):
    """Two options that do not work together, each valid on its own: a scheme and a collector."""


def require(who: str, module: str, extra: str) -> None:
    """Raise `ConfigError` if the module that `who` needs is missing; our `extra` installs it."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{who} needs {module}; install it with: {install_command(extra)}")


def install_command(extra: str) -> str:
    """The command that installs one of Lockstep's extras, here: in a checkout, or beside it."""
    if not (ROOT / "pyproject.toml").is_file():
        return installing(f"'lockstep-rl[{extra}]'")
    checkout = "." if Path.cwd() == ROOT else ROOT
    return installing(f"-e {shlex.quote(f'{checkout}[{extra}]')}")


def installing(what: str) -> str:
    """The command that installs packages for this interpreter: by its own pip, or by uv."""
    python, pip = shlex.quote(sys.executable), shutil.which("pip")
    if pip is not None and Path(pip).parent == Path(sys.executable).parent:
        return f"pip install {what}"
    if importlib.util.find_spec("pip") is not None:
        return f"{python} -m pip install {what}"
    if shutil.which("uv") is not None:
        return f"uv pip install {what} --python {python}"
    return f"pip install {what}"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name that looks most like `name`, if any does."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    by_initials = {"".join(word[:1] for word in low.split("_")): low for low in by_lower}
    if len(name) > 1 and name.lower() in by_initials:  # lr: learning_rate
        return by_lower[by_initials[name.lower()]]
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[matches[0]] if matches else None


def suggest(name: str, names: Iterable[str], *, prefix: str = "") -> str:
    """The end of a message about an unknown name: what was probably meant, or what there is."""
    names = list(names)
    if (near := nearest(name, names)) is not None:
        return f"did you mean {prefix}{near}?"
    if len(names) > 30:
        return "no known name is near it"
    return f"known: {', '.join(sorted(names))}" if names else "nothing is known there"


def show(value: Any) -> str:
    """A value as a user would write it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
