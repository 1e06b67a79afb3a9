"""What a person reads of an error: what was raised, and where in their own code.

A worker's error carries the worker's traceback in its text, and several workers often fail alike.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

from harness.errors import ROOT
from sync.errors import WorkerError

MOST_FRAMES = 3
_PACKAGES = ("collectors", "harness", "hydra_plugins", "sync", "run.py")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_ENTRY = re.compile(r'^  File "(?P<file>[^"]+)", line .*(?:\n    .*)*', re.MULTILINE)
_BEGIN = "Traceback (most recent call last):"


def describe(error: BaseException) -> list[str]:
    """Lines for the terminal; the whole traceback is in the run's directory."""
    headline = f"{type(error).__name__}: {error}"
    if not isinstance(error, WorkerError):
        return [headline, *own_frames("".join(traceback.format_exception(error)))]
    failures = list(error.failures.values())
    text = str(failures[0])
    frames = own_frames(text)
    if not frames:
        return [headline]
    lines = [
        text.partition(_BEGIN)[0].rstrip().rstrip(":"),
        *frames,
        text.rstrip().splitlines()[-1],
    ]
    if len(failures) > 1:
        others = ", ".join(str(failure.worker_idx) for failure in failures[1:])
        lines.append(f"failed, too: worker {others}")
    return lines


def own_frames(text: str) -> list[str]:
    """The last frames of a traceback that are not of Lockstep, of Python or of a library."""
    entries = [match for match in _ENTRY.finditer(text) if _is_own(match["file"])]
    return [line for match in entries[-MOST_FRAMES:] for line in match[0].splitlines()]


def _is_own(file: str) -> bool:
    if file.startswith("<") or any(file.startswith(f"{place}/") for place in _LIBRARIES):
        return False
    path = Path(file)
    return not any(path.is_relative_to(ROOT / name) for name in _PACKAGES)
