"""Ending a contestant together with all that it started; imports only the stdlib.

A contestant leads a process group. Its members are asked to end before they are made to:
multiprocessing's resource tracker ignores the request and so outlives the others by the moment it
needs to remove what they left in /dev/shm.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

GRACE_S = 3.0
POLL_S = 0.02


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
