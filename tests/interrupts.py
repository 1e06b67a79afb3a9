"""Ctrl-C wherever it can come, one place after the other, and what it must not leave behind."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.conftest import child_processes

ROOT = Path(__file__).resolve().parent.parent
# The interpreter looks for signals when a function begins, when a call ends, and in loops; never
# between taking a lock by `with` and the first instruction under it, nor when it comes back from a
# function in Python that it called without help of C code, as it does for those of these names.
LOOKS = ("RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD")
THROUGH_C = ("__init__", "__call__")
FINALIZER = weakref.finalize.__call__.__code__
END_WAIT_S = 10.0
# What a call has just returned is nobody's yet when it is interrupted: one descriptor, or a pair.
SPARE_FDS = 2


class Interrupt:
    """`with Interrupt(n, "sync"):` SIGINT the nth time that code in this folder could take it.

    None is sent in a destructor or a finalizer, where Python only prints what is raised. What the
    signal raises is caught. Without `n` none is sent, and `passed` says how many places there are.
    """

    def __init__(self, number: int | None = None, *packages: str, signum: int = signal.SIGINT):
        self.passed, self.where = 0, ""
        self._number, self._signum = number, signum
        self._before: dict[int, str] = {}  # each frame's last instruction, by its id
        self._code = tuple(str(ROOT / package) for package in packages)
        self._pid = os.getpid()

    @property
    def fired(self) -> bool:
        return bool(self.where)

    def __enter__(self) -> Interrupt:
        # Python 3.12 sends instructions to a tracer only if some frame asked for them before.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._call)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        sys.settrace(None)
        return kind is KeyboardInterrupt and self.fired

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if id(frame.f_back) in self._before and frame.f_code.co_name not in THROUGH_C:
            self._before[id(frame.f_back)] = "a call in Python"
        if self.fired or not frame.f_code.co_filename.startswith(self._code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._before[id(frame)] = "RESUME"  # which is no instruction to a tracer
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._before.pop(id(frame), None)
        elif event == "exception":
            self._before[id(frame)] = ""  # it looks for none when a call failed
        elif event == "opcode" and not self.fired:
            if self._before.get(id(frame)) in LOOKS:
                self._pass(frame)
            self._before[id(frame)] = opcodes(frame.f_code)[frame.f_lasti]
        return self._instruction

    def _pass(self, frame: FrameType) -> None:
        self.passed += 1
        if self._number is None or self.passed < self._number or self._pid != os.getpid():
            return
        if _is_silenced(frame):
            return
        callers = list(_callers(frame))
        file = Path(frame.f_code.co_filename).relative_to(ROOT)
        self.where = f"{file}:{frame.f_lineno} in {' < '.join(callers[:6])}"
        signal.raise_signal(self._signum)


@functools.cache
def opcodes(code: CodeType) -> dict[int, str]:
    return {each.offset: each.opname for each in dis.get_instructions(code)}


def _is_silenced(frame: FrameType | None) -> bool:
    """Whether this is in a destructor, or in a finalizer that a weak reference calls."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        if frame.f_code is FINALIZER and frame.f_locals["_"] is not None:
            return True
        frame = frame.f_back
    return False


def _callers(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def places(act: Callable[[], object], *packages: str, most: int | None = None) -> list[int]:
    """The numbers of all places at which `act` can be interrupted, or of `most` of them."""
    with Interrupt(None, *packages) as counter:
        act()
    step = 1 if most is None else -(-counter.passed // most)
    return list(range(1, counter.passed + 1, step))


@contextlib.contextmanager
def nothing_left() -> Iterator[Callable[[str], None]]:
    """Gives what fails unless all is as before: processes, threads, descriptors; and all silent."""
    said: list[str] = []
    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = lambda what: said.append(f"{what.object!r}: {what.exc_value!r}")
    threading.excepthook = lambda what: said.append(f"{what.thread}: {what.exc_value!r}")
    gc.collect()
    processes, threads, fds = child_processes(), set(threading.enumerate()), num_fds()

    def check(where: str) -> None:
        deadline = time.monotonic() + END_WAIT_S
        while True:
            gc.collect()
            left = [*(child_processes() - processes), *(set(threading.enumerate()) - threads)]
            more = num_fds() - fds
            if not left and more <= SPARE_FDS:
                break
            assert time.monotonic() < deadline, f"{where}: {left} left, {more} descriptors"
            time.sleep(0.01)
        assert not said, f"{where}: {said}"

    try:
        yield check
    finally:
        sys.unraisablehook, threading.excepthook = hooks


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
