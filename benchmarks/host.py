"""The process that one contestant of a benchmark runs in; imports only the stdlib.

The driver (`remote.py`) starts it as the leader of a process group. One JSON line in, one line out;
the libraries' own output goes to stderr. What goes wrong is `{"error": "..."}`, and what cannot
take part is `{"left_out": "why"}`. The driver bounds every wait and ends the whole group, so
nothing here needs a timeout.

Members of a group are asked to end before they are made to: multiprocessing's resource tracker
ignores the request and so outlives the others by the moment it needs to remove what they left in
/dev/shm.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WATCH_INTERVAL_S = 0.25
GRACE_S = 3.0
POLL_S = 0.02

Message = dict[str, Any]


class LeftOut(Exception):
    """A contestant that cannot take part in a case, and why."""


def serve(answer: Callable[[Message], Message]) -> None:
    """Answer each line of stdin with one line, until the end of the input."""
    end_with_parent()
    reply = claim_stdout()
    for line in sys.stdin:
        try:
            message = answer(json.loads(line))
        except LeftOut as why:
            message = {"left_out": str(why)}
        except Exception as error:  # noqa: BLE001  (every failure goes to the driver)
            first_line = (str(error).splitlines() or [""])[0]
            message = {"error": f"{type(error).__name__}: {first_line}"}
        reply(message)


def claim_stdout() -> Callable[[dict[str, Any]], None]:
    """Point stdout at stderr for everybody else; return a function that writes JSON lines to it."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")

    return reply


def end_with_parent() -> None:
    """End this process and its group soon after the driver, however the driver ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_INTERVAL_S)
        if os.getpgrp() == os.getpid():
            end_group(os.getpid())
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# -- process groups


def living_members(group: int) -> list[int]:
    """The processes of a group that have not ended, but for this one (on Linux; elsewhere none)."""
    return [
        pid
        for pid in map(int, (entry.name for entry in Path("/proc").glob("[0-9]*")))
        if pid != os.getpid() and is_member(pid, group)
    ]


def is_member(pid: int, group: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    state, _parent, its_group = stat.rpartition(")")[2].split()[:3]
    return int(its_group) == group and state not in "ZX"


def wait_for_group(group: int, timeout_s: float = GRACE_S) -> None:
    """Wait until a group has no other member, or the time is up."""
    deadline = time.monotonic() + timeout_s
    while living_members(group) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def end_group(group: int) -> None:
    """Ask every member to end, and kill those that do not; this process too, if it is one."""
    for pid in living_members(group):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    wait_for_group(group)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
