"""What must occur in a batch of stories: recovery paths and races that the product is written for.

A batch in which one of them never occurs fails: it would have tested something else. Each entry is
a line of the product, by its text, and a condition on the variables there if one is needed.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Occurrence:
    """What occurs, and the line of the product by which that shows."""

    what: str
    file: str
    text: str
    when: Callable[[dict[str, Any]], bool] = lambda variables: True

    def line(self) -> int:
        lines = (ROOT / self.file).read_text().splitlines()
        exact = [i for i, line in enumerate(lines, 1) if self.text == line.strip()]
        numbers = exact or [i for i, line in enumerate(lines, 1) if self.text in line]
        if len(numbers) != 1:
            raise ValueError(
                f"{self.what}: {self.text!r} is in {len(numbers)} lines of {self.file}"
            )
        return numbers[0]


POOL = "collectors/workers/pool.py"
HANDLE = "collectors/workers/process_handle.py"
LOOP = "collectors/workers/worker_loop.py"
START = "collectors/workers/process_lifetime.py"
PIPE = "collectors/workers/pipe.py"
TURNS = "collectors/workers/turns.py"
BOARD = "sync/schemes/shared_mem.py"
MESSAGES = "sync/schemes/multiprocess.py"
CONNECTIONS = "sync/local/worker_connections.py"

OCCURRENCES = [
    # failures of workers
    Occurrence("a worker is replaced", POOL, "handle.make_way()"),
    Occurrence("a worker that owes a batch hangs", POOL, "{handle.stuck(limit)}"),
    Occurrence("a worker dies", POOL, 'WorkerDied(handle.index, f"{handle} died{how}")'),
    Occurrence("a worker raises", POOL, 'f"{handle} {event.text}")'),
    Occurrence("a replacement fails, too", POOL, "handle.failure = handle.failure or error",
               lambda v: "handle" in v and v["handle"].restarts > 0),
    Occurrence("a worker hangs in a blocking send", POOL, "or error.failures[handle.index]"),
    Occurrence("a worker is replaced while it is asked", POOL, "was replaced before it answered"),
    Occurrence("a worker that hangs is killed", START, "watch.kill()"),
    Occurrence("workers leave after their trainer", START, "os._exit(1)"),
    Occurrence("a worker finds its pipe closed", LOOP, 'PipeClosed("the trainer closed'),
    # batches
    Occurrence("a paced worker waits", TURNS, "if wait > self._max_lag:",
               lambda v: v["wait"] > v["self"]._max_lag),
    Occurrence("a worker hands over a part", TURNS, "pool.cut(worker)"),
    Occurrence("a group is passed over", TURNS, "if version == under_way[0]:"),
    Occurrence("two batches of a worker are finished", POOL, "handle.finished.append(batch)",
               lambda v: len(v["handle"].finished) > 0),
    Occurrence("a worker rests in the middle of a batch", LOOP, "self._rested_s += time",
               lambda v: v["self"]._order is not None),
    Occurrence("a message waits for room", PIPE, "_wait_until_writable(self._socket, 0.05)"),
    Occurrence("a message arrives in parts", PIPE, "if end > len(self._buffer):",
               lambda v: v["end"] > len(v["self"]._buffer)),
    # weights
    Occurrence("`latest` changes while it is pinned", BOARD, "return word, retries",
               lambda v: v["retries"] > 0),
    Occurrence("a sleeping worker is woken", BOARD, "self._workers[worker].send(WAKE)"),
    Occurrence("a block is kept while the next one is taken", BOARD, "self._pin = 1 - self._pin"),
    Occurrence("a version waits for the one on its way", MESSAGES,
               "if worker in self._on_the_way or worker not in self._waiting:",
               lambda v: v["worker"] in v["self"]._waiting),
    Occurrence("a version that waits is replaced", MESSAGES, "self._waiting[worker] = block",
               lambda v: v["worker"] in v["self"]._waiting),
    Occurrence("a successor gets the last version again", "sync/sender.py",
               "again = self.pipeline.write("),
    Occurrence("a worker refuses a version", "sync/receiver.py", "self.reported_error = error"),
    Occurrence("a service thread sends what waits", "sync/sender.py", "self._sender.serve_once()"),
    Occurrence("a policy call is taken back", "collectors/rollout/rollout.py",
               "self._first[1].resume()"),
    Occurrence("a batch waits for its version", "collectors/weights/rollout_weights.py",
               "before = scheme.version"),
    # connections
    Occurrence("a worker leaves its scheme", CONNECTIONS,
               "answers.append(Answer(worker, LEFT) if connection.has_left else lost)",
               lambda v: v["connection"].has_left),
    Occurrence("a worker's connection ends before its process", CONNECTIONS,
               "self._dying[worker] = now_ns()"),
    Occurrence("a worker finds that the sender is gone", CONNECTIONS,
               'self._gone = self._gone or "the sender is gone"'),
    Occurrence("a connection cannot be accepted", "sync/local/unix_connection.py",
               "self._refuse_one(str(error.strerror).lower())"),
    # machine
    Occurrence("a pause counts as one slice", "sync/local/waiting.py",
               "_awake_s += step if step <= 2 * SLICE_S else SLICE_S",
               lambda v: v["step"] > 2.0),
    Occurrence("a process cannot be watched", HANDLE, "process.kill()"),
]  # fmt: skip


class Sometimes:
    """Counts in how many stories each occurred."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lines: dict[tuple[str, int], list[Occurrence]] = {}
        self._files: dict[str, list[int]] = {}
        for one in OCCURRENCES:
            place = str(ROOT / one.file), one.line()
            self._lines.setdefault(place, []).append(one)
            self._files.setdefault(place[0], []).append(place[1])
        self._codes: dict[CodeType, bool] = {}
        self._seen: set[str] = set()

    @property
    def missing(self) -> list[str]:
        return [one.what for one in OCCURRENCES if not self.counts[one.what]]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A story is told inside."""
        self._seen = set()
        threading.settrace(self._on_call)
        try:
            yield
        finally:
            threading.settrace(None)  # type: ignore[arg-type]
            self.counts.update(self._seen)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        wanted = self._codes.get(code)
        if wanted is None:
            lines = self._files.get(code.co_filename, ())
            own = {line for *_, line in code.co_lines() if line is not None}
            wanted = self._codes[code] = not own.isdisjoint(lines)
        return self._on_line if wanted else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            for one in self._lines.get((frame.f_code.co_filename, frame.f_lineno), ()):
                if one.what not in self._seen and one.when(frame.f_locals):
                    self._seen.add(one.what)
        return self._on_line
