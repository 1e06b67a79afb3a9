"""Processes that do a run each: how they end, and what they end with."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

GRACE_S = 20.0  # for a run to write its checkpoint after SIGTERM


def end(processes: Sequence[BaseProcess]) -> None:
    """Send SIGTERM, on which runs write their checkpoints; kill those that do not end in time.

    A second Ctrl-C leaves them no time.
    """
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        with suppress(KeyboardInterrupt):
            process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            deadline = time.monotonic()
            assert process.pid is not None
            with suppress(ProcessLookupError):  # it has no session of its own yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def end_with(caller: int) -> None:
    """Send SIGTERM to this process once the caller's process has ended, even if it was killed."""

    def watch() -> None:
        with suppress(ProcessLookupError):  # it has ended already
            select.select([os.pidfd_open(caller)], [], [])
        while True:  # repeated, as the first may arrive before the run handles signals
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(GRACE_S)

    threading.Thread(target=watch, name="lockstep-caller", daemon=True).start()


def write_to(file: str | Path) -> None:
    """Write what this process prints to a file, line by line."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.close(descriptor)
