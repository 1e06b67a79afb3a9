"""Bounded waits, and a clock that does not run while this process is suspended.

Ctrl-Z, a batch scheduler or a paused container stops all processes of a run together, and the pause
must not count as silence of a worker. So timeouts are measured with `awake_s`, which leaves out the
time during which this process was stopped. Time during which it only waited for a processor, on an
overloaded machine, does count; Linux reports it separately (`schedstat`).
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterable

from sync.local.process import must_look

LONGEST_S = 1e9  # every wait is bounded, and clocks overflow not far beyond this
SLICE_S = 1.0  # code that measures how long others are silent waits in slices of this length
_FRESH_S = 0.5
_SCHEDSTAT = "/proc/thread-self/schedstat"


class AwakeClock:
    """Seconds like `time.monotonic`, without those during which this process was stopped."""

    def __init__(self) -> None:
        self._stopped_s = self._seen_until = 0.0
        self._queued = _RunQueueDelay()
        self._lock = threading.Lock()  # several threads see the same stop
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return time.monotonic() - self._stopped_s

    def begin(self) -> None:
        """A wait begins."""
        now = time.monotonic()
        if now - self._queued.read_at > _FRESH_S:
            self._queued.seconds, self._queued.read_at = _queued_s(), now

    def end(self, due: float) -> None:
        """The wait, which was to end at `due` by `time.monotonic`, ends now."""
        now = time.monotonic()
        if now - due <= SLICE_S:
            return
        queued_s = max(0.0, _queued_s() - self._queued.seconds)
        with self._lock:
            late_s = now - max(due, self._seen_until) - queued_s
            if late_s > SLICE_S:
                self._stopped_s += late_s
                self._seen_until = max(self._seen_until, now)


class _RunQueueDelay(threading.local):
    """The last result of `_queued_s` in this thread, and its time."""

    seconds = 0.0
    read_at = float("-inf")


def _queued_s() -> float:
    """How long this thread has waited for a processor while ready to run; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(_SCHEDSTAT) as file:
        return int(file.read().split()[1]) * 1e-9
    return 0.0


awake_s = AwakeClock()


def wait_for(fds: Iterable[int], timeout_s: float) -> list[int]:
    """The descriptors that are or become readable within `timeout_s`; a closed one, -1, never is.

    Returns after at most 50 ms if there are processes whose end cannot be polled.
    """
    poll = select.poll()
    for fd in fds:
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    timeout_s = min(timeout_s, 0.05 if must_look() else 3600.0)  # a longer wait calls again
    if timeout_s <= 0:
        return [fd for fd, _ in poll.poll(0)]
    awake_s.begin()
    due = time.monotonic() + timeout_s
    ready = [fd for fd, _ in poll.poll(timeout_s * 1000)]
    awake_s.end(due)
    return ready
