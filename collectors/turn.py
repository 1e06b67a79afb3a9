"""Whose turn it is at a collector that several threads use."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator


class Turn:
    """A lock whose waiters are served in the order in which they came."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[object] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            if self._owner == me:
                self._depth += 1
                return
            ticket = object()
            self._queue.append(ticket)
            try:
                while self._queue[0] is not ticket:
                    self._changed.wait()
                self._owner, self._depth = me, 1
            except BaseException:  # an interrupt, say: nobody may wait for this ticket
                self._queue.remove(ticket)
                self._changed.notify_all()
                raise

    def try_enter(self, timeout: float = 0.0) -> bool:
        """Take the turn if it gets free in time, or is this thread's; to be ended by `ending`."""
        me = threading.get_ident()
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._queue and self._owner != me:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._changed.wait(remaining)
            if self._owner == me:
                self._depth += 1
            else:
                self._queue.append(object())
                self._owner, self._depth = me, 1
            return True

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """`with` the turn that was taken before."""
        try:
            yield
        finally:
            self.__exit__()

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
                self._queue.popleft()
                self._changed.notify_all()
