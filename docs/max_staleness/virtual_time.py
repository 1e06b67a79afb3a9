"""An asyncio event loop whose clock is virtual and whose order of callbacks is drawn by a seed."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

SHUFFLE_S = 1e-9  # within which callbacks that are ready change places


class _Clock(selectors.SelectSelector):
    """Waiting moves the clock on, and there are no files."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("all tasks wait, and nothing will wake them")
        self.now += max(timeout, 0.0)
        return []


class VirtualTime(asyncio.SelectorEventLoop):
    """`asyncio.sleep` takes no time; the same seed gives the same order of all tasks."""

    def __init__(self, seed: int):
        self._random, self._clock = random.Random(seed), _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        delay = self._random.random() * SHUFFLE_S
        return self.call_at(self.time() + delay, callback, *args, context=context)


def run(main: Coroutine[Any, Any, None], seed: int) -> None:
    """Run to the end, in virtual time."""
    loop = VirtualTime(seed)
    try:
        loop.run_until_complete(main)
        for task in asyncio.all_tasks(loop):
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    finally:
        loop.close()
