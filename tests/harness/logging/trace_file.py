"""Reads a trace, also one that has no end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _whole_lines(text: str) -> list[str]:
    """The lines of an unfinished trace, without a part of one."""
    lines = text.splitlines() or ["["]
    try:
        json.loads(lines[-1].strip("[,") or "{}")
    except ValueError:
        lines.pop()
    return lines


def read_trace(file: Path) -> list[dict[str, Any]]:
    text = file.read_text().rstrip()
    if not text.endswith("]"):  # the run was killed, perhaps in the middle of a line
        text = "\n".join(_whole_lines(text)).rstrip(",") + "]"
    return json.loads(text)
