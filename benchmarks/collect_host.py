"""The process that one contestant of the collection benchmark runs in.

`benchmarks/collect.py` starts one for each contestant and gives them turns. One JSON line in, one
line out; the libraries' own output goes to stderr.

    {"cmd": "open", "case": {...}, "options": {...}}  -> {"first_batch_s": 0.5}
    {"cmd": "turn", "seconds": 1.0}                   -> {"frames": 13824, "seconds": 1.01}
    {"cmd": "close"}                                  -> {"closed": true}
    {"cmd": "exit"} or end of input                   -> the program ends

What goes wrong is `{"error": "..."}`, and what cannot take part is `{"left_out": "why"}`. The
driver bounds every wait and ends the whole process group, so nothing here needs a timeout.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.collect_case import Case
from benchmarks.collect_group import end_group

WARM_UP_SHARE = 0.2  # of a turn: drains what was collected ahead while others had theirs
WATCH_INTERVAL_S = 0.25


class LeftOut(Exception):
    """A contestant that cannot take part in a case, and why."""


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
    """Answer each line of stdin with one line, until `exit` or the end of the input."""
    end_with_parent()
    reply = claim_stdout()
    session: Session | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["cmd"] == "exit":
            break
        try:
            if request["cmd"] == "open":
                session = open_session(Case(**request["case"]), request["options"])
                answer = {"first_batch_s": session.first_batch_s}
            elif session is None:
                raise ValueError(f"cannot {request['cmd']!r} now: expected 'open' or 'exit'")
            elif request["cmd"] == "turn":
                frames, seconds = session.turn(request["seconds"])
                answer = {"frames": frames, "seconds": seconds}
            else:
                session.close()
                session, answer = None, {"closed": True}
        except LeftOut as why:
            answer = {"left_out": str(why)}
        except Exception as error:  # noqa: BLE001  (every failure goes to the driver)
            first_line = (str(error).splitlines() or [""])[0]
            answer = {"error": f"{type(error).__name__}: {first_line}"}
        reply(answer)
    if session is not None:
        session.close()


def claim_stdout() -> Callable[[dict[str, Any]], None]:
    """Point stdout at stderr for everybody else; return a function that writes JSON lines to it."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")

    return reply


def end_with_parent() -> None:
    """End this process and its group soon after the driver, however the driver ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_INTERVAL_S)
        if os.getpgrp() == os.getpid():
            end_group(os.getpid())
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
