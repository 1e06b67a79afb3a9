"""Shows the dashboard on a terminal while a run goes on, from a thread of its own.

The thread reads what the run has anyway: its frames, its clock and its workers' stages. The run
hands over its records and waits for nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live

from harness.logging.base import Watched
from harness.logging.dashboard import Dashboard

log = logging.getLogger(__name__)

LOOK_S = 0.1
LOOKS_PER_DRAWING = 4
JOIN_S = 2.0


class LiveView:
    """Draws a dashboard a few times a second, between `start` and `stop`."""

    def __init__(self, dashboard: Dashboard, console: Console, run: Watched | None):
        self._dashboard, self._console, self._run = dashboard, console, run
        self._records: deque[tuple[int, Mapping[str, float], float, int]] = deque()
        self._done = threading.Event()
        self._live = Live(dashboard, console=console, auto_refresh=False, vertical_overflow="crop")
        self._size = console.size
        self._thread = threading.Thread(target=self._work, name="lockstep-live", daemon=True)

    def start(self) -> None:
        with contextlib.suppress(OSError, SystemExit):  # rich makes the latter of a closed pipe
            self._live.start()
            self._thread.start()

    def record(
        self, frames: int, metrics: Mapping[str, float], episode_return: float, updates: int
    ) -> None:
        """A record of the run's metrics; returns at once."""
        self._records.append((frames, metrics, episode_return, updates))

    def stop(self) -> None:
        """Draw a last time, and give the terminal back."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        with contextlib.suppress(OSError, SystemExit):
            if not self._thread.is_alive():
                self._take_in()
                self._draw()
            self._live.stop()

    def _work(self) -> None:
        looks = 0
        try:
            while not self._done.wait(LOOK_S):
                self._look()
                self._take_in()
                looks += 1
                if looks % LOOKS_PER_DRAWING == 0:
                    self._draw()
        except (OSError, SystemExit):  # nobody sees it any more
            self._console.quiet = True
        except Exception:
            log.info("the live view failed, the run goes on without it", exc_info=True)

    def _look(self) -> None:
        if (run := self._run) is not None:
            stages = run.collector.worker_stages()
            self._dashboard.sample(time.monotonic(), run.frames, run.clock.total, stages)

    def _take_in(self) -> None:
        while self._records:
            self._dashboard.record(*self._records.popleft())

    def _draw(self) -> None:
        if (size := self._console.size) != self._size:  # lines of the old width were wrapped anew
            self._size = size
            self._console.clear()
        self._live.refresh()
