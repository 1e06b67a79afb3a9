"""Ctrl-C and SIGTERM: a run ends at the next point where its state is whole.

While `whole()` is not entered, a signal raises `Interrupted` where the program is. Within it, the
first signal is remembered, for `check()` to raise at the next good point; if none comes for
`GRACE_S`, or a second signal does, it raises at once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 15.0


class Interrupted(BaseException):
    """A signal asked the run to end. No `except Exception` may hold it up."""

    def __init__(self, signum: int, *, whole: bool):
        super().__init__(signal.Signals(signum).name)
        self.exit_status = 128 + signum
        self.whole = whole  # whether the run's state is worth a checkpoint


class Interruption:
    """Listens to the signals for as long as it is entered. Only in a process's main thread."""

    def __init__(self) -> None:
        self._pending: int | None = None
        self._held = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for signum in (*SIGNALS, signal.SIGALRM):
            self._before[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold the first signal back until `check()`."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def check(self) -> None:
        """The state is whole here: end, if a signal asked for it."""
        if self._pending is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Interrupted(self._pending, whole=True)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._held and self._pending is None and signum in SIGNALS:
            self._pending = signum
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
            return
        if signum == signal.SIGALRM:
            if self._pending is None:
                return
            signum = self._pending
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise Interrupted(signum, whole=False)
