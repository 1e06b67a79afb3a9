"""Bounded waits, and a clock that does not run while this process is suspended.

Ctrl-Z, a batch scheduler or a paused container stops all processes of a run together, and the pause
must not count as silence of a worker. Code that waits for others therefore waits in slices of one
second and reads `awake_s` after each. A step of more than two seconds between two reads is a pause,
and counts as one slice.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterable

LONGEST_S = 1e9  # every wait is bounded, and clocks overflow not far beyond this
SLICE_S = 1.0  # code that measures how long others are silent waits in slices of this length


class AwakeClock:
    """Seconds like `time.monotonic`, of which at most `SLICE_S` count for a pause."""

    def __init__(self) -> None:
        self._awake_s, self._read_at = 0.0, time.monotonic()
        self._lock = threading.Lock()  # several threads read it
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            now = time.monotonic()
            step, self._read_at = now - self._read_at, now
            self._awake_s += step if step <= 2 * SLICE_S else SLICE_S
            return self._awake_s


awake_s = AwakeClock()


def wait_for(fds: Iterable[int], timeout_s: float) -> list[int]:
    """The descriptors that are or become readable within `timeout_s`; a closed one, -1, never is.

    It waits for an hour at most: call it again to wait longer.
    """
    poll = select.poll()
    for fd in fds:
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(min(max(0.0, timeout_s), 3600.0) * 1000)]
