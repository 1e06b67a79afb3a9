"""Ctrl-C, held back while something is half done.

What a batch is made of must be taken from workers, counted and handed out together: an interrupt
that comes meanwhile is raised afterwards, or where there is something to wait for.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class _Later:
    """What SIGINT does while it is held back."""

    def __init__(self, own: Callable[[int, FrameType | None], Any]):
        self.own = own  # what it does otherwise
        self.came = False
        self.let_in = False  # a flag: to exchange handlers takes system calls

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.let_in:
            self.own(number, frame)
        else:
            self.came = True

    @contextlib.contextmanager
    def letting_in(self, let_in: bool) -> Iterator[None]:
        before, self.let_in = self.let_in, let_in
        try:
            self.catch_up()
            yield
        finally:
            self.let_in = before
            self.catch_up()

    def catch_up(self) -> None:
        if self.let_in and self.came:
            self.came = False
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """An interrupt waits until the end."""
    own = signal.getsignal(signal.SIGINT)
    if not callable(own) or not _hears():  # it is ignored, as in workers, or ends the process
        yield
        return
    if isinstance(own, _Later):
        with own.letting_in(False):
            yield
        return
    later = _Later(own)
    try:
        signal.signal(signal.SIGINT, later)
        yield
    finally:
        signal.signal(signal.SIGINT, own)
        if later.came:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def let_in() -> Iterator[None]:
    """Within `held()`: an interrupt, also one that came before, is raised where it is."""
    later = signal.getsignal(signal.SIGINT)
    if not isinstance(later, _Later) or not _hears():
        yield
        return
    with later.letting_in(True):
        yield


def _hears() -> bool:
    """Whether interrupts are raised in this thread."""
    return threading.current_thread() is threading.main_thread()
