"""Completion of what Hydra's does not know: commands, and the run directories after them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from hydra.plugins.completion_plugin import CompletionPlugin

from harness import COMMANDS

TAKE_A_DIRECTORY = ("resume=", "hydra.run.dir=")
# The shell splits and expands what it is given, so other names are left to be typed.
SAFE = re.compile(r"[\w./=,+@%:-]+")


def completions(line: str) -> tuple[list[str], bool]:
    """How the line's last word may go on, and whether these are all that is possible."""
    *before, word = re.split(r"\s+", CompletionPlugin.strip_python_or_app_name(line))
    if before and before[0] in COMMANDS:
        return ([] if word.startswith("-") else list(_directories(word))), True
    for option in TAKE_A_DIRECTORY:
        if word.startswith(option):
            return [option + name for name in _directories(word.removeprefix(option))], True
    return [name for name in COMMANDS if not before and name.startswith(word)], False


def _directories(typed: str) -> Iterator[str]:
    """The directories whose paths begin like this."""
    parent, name = os.path.split(typed)
    try:
        folders = sorted(entry.name for entry in os.scandir(Path(parent)) if entry.is_dir())
    except OSError:
        return
    for folder in folders:
        path = f"{os.path.join(parent, folder)}/"
        is_hidden = folder.startswith(".") and not name.startswith(".")
        if folder.startswith(name) and not is_hidden and SAFE.fullmatch(path):
            yield path
