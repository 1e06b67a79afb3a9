"""A contestant of the collection benchmark in its own process (`host.py`), and what it answers.

{"cmd": "open", "case": {...}, "options": {...}}  -> {"first_batch_s": 0.5}
{"cmd": "turn", "seconds": 1.0}                   -> {"frames": 13824, "seconds": 1.01}
{"cmd": "close"}                                  -> {"closed": true}
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks import host
from benchmarks.collect_case import Case

WARM_UP_SHARE = 0.2  # of a turn: drains what was collected ahead while others had theirs


class Session:
    """One contestant in one case, ready to collect."""

    first_batch_s: float | None = None  # from construction to first batch, if it was timed

    def turn(self, seconds: float) -> tuple[int, float]:
        """Collect for about `seconds`; return the frames and the seconds they took."""
        raise NotImplementedError

    def close(self) -> None:
        """Release everything."""


def take_batches(
    next_batch: Callable[[], int], seconds: float, ahead: int = 1
) -> tuple[int, float]:
    """Take `ahead` batches or more as warm-up, then some for `seconds`; return frames, seconds."""
    begun = time.perf_counter()
    while ahead > 0 or time.perf_counter() - begun < WARM_UP_SHARE * seconds:
        next_batch()
        ahead -= 1
    frames, begun = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < seconds:
        frames += next_batch()
    return frames, elapsed


def serve(open_session: Callable[[Case, dict[str, Any]], Session]) -> None:
    """Open a session, give it turns and close it, as the driver asks."""
    session: Session | None = None

    def answer(request: host.Message) -> host.Message:
        nonlocal session
        if request["cmd"] == "open":
            session = open_session(Case(**request["case"]), request["options"])
            return {"first_batch_s": session.first_batch_s}
        if session is None:
            raise ValueError(f"cannot {request['cmd']!r} now: expected 'open'")
        if request["cmd"] == "turn":
            frames, seconds = session.turn(request["seconds"])
            return {"frames": frames, "seconds": seconds}
        session.close()
        session = None
        return {"closed": True}

    host.serve(answer)
    if session is not None:
        session.close()
