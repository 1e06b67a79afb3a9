"""A lock for a collector that several threads use: first come, first served."""

from __future__ import annotations

import math
import threading
import time
from collections import deque


class FairLock:
    """A re-entrant lock that threads get in the order of their requests.

    With an ordinary lock, a thread that collects all the time would take it again at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[int] = deque()  # of threads; the first has the lock
        self._depth = 0

    def acquire(self, timeout: float = math.inf) -> bool:
        """Whether this thread has the lock in time."""
        me = threading.get_ident()
        deadline = time.monotonic() + timeout
        with self._changed:
            if me not in self._queue:
                self._queue.append(me)
            taken = False
            try:
                while self._queue[0] != me:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        return False
                    self._changed.wait(min(remaining, 3600.0))
                self._depth += 1
                taken = True
                return True
            finally:
                if not taken and not (self._queue[0] == me and self._depth):
                    self._queue.remove(me)  # it gives up, or was interrupted
                    self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._queue.popleft()
                self._changed.notify_all()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()
