"""What a fork server loads first: it cleans up after itself, whatever became of its trainer."""

from __future__ import annotations

import atexit
import contextlib
import sys
from multiprocessing import forkserver
from pathlib import Path


@atexit.register
def _remove_listener() -> None:
    """A trainer that was killed leaves the socket on which its fork server listened."""
    server = forkserver._forkserver
    address = server._forkserver_address  # type: ignore[attr-defined]
    if server._forkserver_pid is None and str(address).startswith("/"):  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            Path(address).unlink(missing_ok=True)
            if not hasattr(sys, "last_value"):  # else it failed: its trainer will start another
                Path(address).parent.rmdir()
