"""The command line, split into the few flags there are and the overrides of options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Flags:
    """What a run of the command is asked for besides its options."""

    help: bool = False
    help_topic: str | None = None
    multirun: bool = False
    show_config: bool = False


NAMES = {
    "-h": "help",
    "--help": "help",
    "-m": "multirun",
    "--multirun": "multirun",
    "--show-config": "show_config",
}


def split_arguments(arguments: Sequence[str]) -> tuple[Flags, list[str]]:
    """Known flags, and everything else in its order, among it flags that are not known."""
    flags, rest = Flags(), []
    for argument in arguments:
        if argument in NAMES:
            setattr(flags, NAMES[argument], True)
        else:
            rest.append(argument)
    if flags.help and rest:
        flags.help_topic = rest[0]
    return flags, rest
