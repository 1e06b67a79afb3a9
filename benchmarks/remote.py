"""The driver's end of a contestant's process: every wait is bounded, and nothing outlives `close`.

Each process leads a session of its own. Ctrl-C in the terminal therefore reaches the driver alone,
which ends them all, together with every worker that a library started in them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.host import end_group, wait_for_group

ROOT = Path(__file__).resolve().parents[1]
EXIT_S = 15.0
# One thread a process, for libraries that read these before they are told.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ContestantFailed(Exception):
    """What went wrong in a contestant's process, in one line."""


class ContestantLeftOut(Exception):
    """Why a contestant does not take part."""


class Remote:
    """A contestant's process; see `host.py`.

    environment: its variables; by default ours, with one thread.
    """

    def __init__(self, python: Path, module: str, environment: Mapping[str, str] | None = None):
        self._unread = b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (`kill` closes it)
        self.process = subprocess.Popen(
            [str(python), "-m", module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
            env={**os.environ, **ONE_THREAD} if environment is None else environment,
        )

    def ask(self, timeout_s: float, **message: Any) -> dict[str, Any]:
        """Send one message and return the answer to it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ContestantFailed(self._last_words()) from None
        answer: dict[str, Any] = json.loads(self._line(message["cmd"], timeout_s))
        if "left_out" in answer:
            raise ContestantLeftOut(answer["left_out"])
        if "error" in answer:
            raise ContestantFailed(answer["error"])
        return answer

    def _line(self, command: str, timeout_s: float) -> bytes:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                self.kill()
                raise ContestantFailed(f"{command!r} took more than {timeout_s:.0f} s")
            some = os.read(self.process.stdout.fileno(), 1 << 16)
            if not some:
                raise ContestantFailed(self._last_words())
            self._unread += some
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """Why a process ended, in the last line that it wrote to stderr."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"its process ended: {lines[-1] if lines else 'without a word'}"

    def close(self) -> None:
        """Let the process end by itself if it can, then end what is left of its group."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            try:
                self.process.stdin.close()
                self.process.wait(EXIT_S)
                wait_for_group(self.process.pid)  # helpers tidy up a moment after it
            except (BrokenPipeError, subprocess.TimeoutExpired):
                pass  # then by force
        self.kill()

    def kill(self) -> None:
        """End the process and all that it started. A second call does nothing."""
        if self._stderr.closed:
            return
        end_group(self.process.pid)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # something was unsent, for nobody
                pipe.close()
