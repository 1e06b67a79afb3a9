"""Ctrl-C and SIGTERM: a run ends at the next point where its state is whole.

A signal raises `Interrupted` where the program is. Within `whole()`, the first signal is
remembered instead, for `check()` to raise at the next good point; if none comes for `GRACE_S`, or a
second signal does, it raises at once. Where it begins as `WRITTEN`, signals only wait. Within
`anywhere()`, inside of one of these, all is as without. Within `unchanged()` the state is whole
whenever a signal raises. After `over()`, outside of these, nothing is left to end: signals wait.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 15.0
FREE, HELD, WRITTEN = range(3)


class Interrupted(BaseException):
    """A signal asked the run to end. No `except Exception` may hold it up."""

    def __init__(self, signum: int, *, whole: bool):
        super().__init__(signal.Signals(signum).name)
        self.exit_status = 128 + signum
        self.whole = whole  # whether the run's state is worth a checkpoint


class Interruption:
    """Listens to the signals for as long as it is entered. Only in a process's main thread.

    mode: how it begins; with `WRITTEN`, signals wait from the start, however many come.
    """

    def __init__(self, mode: int = FREE) -> None:
        self.pending: int | None = None  # the signal that came, also if too late to end anything
        self._mode = mode
        self._unchanged = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for signum in (*SIGNALS, signal.SIGALRM):
            self._before[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in reversed(self._before.items()):  # Ctrl-C last: it would raise here
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def whole(self) -> AbstractContextManager[None]:
        """Hold the first signal back until `check()`."""
        return self._in(HELD)

    @contextmanager
    def anywhere(self) -> Iterator[None]:
        """Let signals, and one that was held back, raise where the program is."""
        with self._in(FREE):
            if self.pending is not None:
                self._raise(self.pending)
            yield

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Nothing of the run's state changes meanwhile."""
        self._unchanged = True
        try:
            yield
        finally:
            self._unchanged = False

    def over(self) -> None:
        """From here on signals wait: the end is being written down."""
        self._mode = WRITTEN
        signal.setitimer(signal.ITIMER_REAL, 0)

    @contextmanager
    def _in(self, mode: int) -> Iterator[None]:
        before, self._mode = self._mode, mode
        try:
            yield
        finally:
            self._mode = before

    def check(self) -> None:
        """The state is whole here: end, if a signal asked for it."""
        if self.pending is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Interrupted(self.pending, whole=True)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._mode == WRITTEN:
            if signum in SIGNALS:
                self.pending = self.pending or signum
            return
        if self._mode == HELD and self.pending is None and signum in SIGNALS:
            self.pending = signum
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
            return
        if signum == signal.SIGALRM:
            if self.pending is None:
                return
            signum = self.pending
        self._raise(signum)

    def _raise(self, signum: int) -> None:
        self.pending = signum  # where it is swallowed (in a destructor, say), `check()` has it
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise Interrupted(signum, whole=self._unchanged)
