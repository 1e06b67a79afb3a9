"""What a long command is doing, on one line of the terminal."""

from __future__ import annotations

import shutil
import sys


def show_progress(text: str) -> None:
    """Replace the line by `text`; without a terminal nothing is written."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns - 1
        shown = "".join(c if c.isprintable() else "�" for c in text)[:columns]
        print(f"\r{shown:<{columns}}", end="", file=sys.stderr, flush=True)
