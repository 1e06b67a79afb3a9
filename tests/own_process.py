"""Tests that count what a process holds, run where nothing else opens or closes anything."""

from __future__ import annotations

import functools
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def in_own_process(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test in a forked process.

    Threads that earlier tests left in this one (those of Ray or gRPC) open and close descriptors
    whenever they like. They are not in the fork.
    """

    @functools.wraps(test)
    def forked(**arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_report, args=(test, arguments, theirs))
        process.start()
        theirs.close()
        try:
            failure = ours.recv()
        except EOFError:
            failure = "the process ended without a result"
        finally:
            ours.close()
            process.join()
        assert failure is None, f"in a process of its own:\n{failure}"

    return forked


def _report(test: Callable[..., None], arguments: dict[str, Any], parent: Connection) -> None:
    try:
        test(**arguments)
    except BaseException:  # noqa: BLE001 - pytest.fail raises no Exception
        parent.send(traceback.format_exc())
    else:
        parent.send(None)
