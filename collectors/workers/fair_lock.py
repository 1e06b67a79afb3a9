"""Whose turn it is at a collector that several threads use."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterator

from collectors.workers import interrupts


class FairLock:
    """A lock whose waiters are served in the order in which they came.

    A thread that is in the queue is not put there again, so one that was interrupted has its place.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # not the condition, which takes it where interrupts come
        self._changed = threading.Condition(self._lock)
        self._queue: deque[int] = deque()  # of threads; the first has the turn
        self._depth = 0

    def __enter__(self) -> None:
        self.try_enter(math.inf)

    def try_enter(self, timeout: float = 0.0) -> bool:
        """Take the turn if it gets free in time, or is this thread's; to be ended by `ending`."""
        me = threading.get_ident()
        deadline = time.monotonic() + timeout
        try:
            with self._lock:
                if me not in self._queue:
                    self._queue.append(me)
                while self._queue[0] != me:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        self._give_up(me)
                        return False
                    with interrupts.let_in():
                        self._changed.wait(min(remaining, 3600.0))
                self._depth += 1
                return True
        except BaseException:  # an interrupt, say: nobody may wait for this thread
            with self._lock:
                self._give_up(me)
            raise

    def _give_up(self, me: int) -> None:
        """Leave the queue, but not a turn that was taken before."""
        if me in self._queue and not (self._queue[0] == me and self._depth):
            self._queue.remove(me)
            self._changed.notify_all()

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """`with` the turn that was taken before."""
        try:
            yield
        finally:
            self.__exit__()

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._queue.popleft()
                self._changed.notify_all()
