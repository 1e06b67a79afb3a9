"""Nodes as processes of this machine: starting them, watching them, ending them."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

from collectors.remote.node import close_all
from collectors.workers.start_process import (
    PRELOAD,
    context,
    default_start_method,
    end_process,
    exit_now,
    exit_with_parent,
    settle_in,
    sigint_blocked,
)
from sync.local.waiting import Watch

LOADED = (*PRELOAD, "collectors.remote.node")


def node_main(trainer_pid: int, start_method: str, serve: Callable[[], Any]) -> None:
    """Serve a node until the trainer stops it or is gone."""
    settle_in(start_method)
    exit_with_parent(trainer_pid)
    status = 0
    try:
        serve()
    except BaseException:  # noqa: BLE001 - the trainer sees the process end, a person reads why
        traceback.print_exc()
        status = 1
    close_all()
    exit_now(status)


class Processes:
    """The node processes of one trainer, by number."""

    def __init__(self) -> None:
        self._ctx = context(preload=LOADED)
        self._processes: dict[int, tuple[Any, Watch]] = {}

    def start(self, node: int, serve: Callable[[], Any]) -> None:
        """Start a node's process, which calls `serve`."""
        process = self._ctx.Process(
            target=node_main,
            args=(os.getpid(), default_start_method(), serve),
            name=f"lockstep-node-{node}",
            daemon=False,
        )
        with sigint_blocked():
            process.start()
            self._processes[node] = process, Watch(process.pid)

    def await_meeting(self, nodes: Iterable[int], meet: Callable[[threading.Event], None]) -> None:
        """Call `meet`, which waits for these nodes; raise as soon as the process of one ends.

        `meet` then has to give up, which the event tells it: it would meet a replacement instead.
        """
        given_up = threading.Event()
        meeting: Future[None] = Future()

        def run() -> None:
            try:
                meet(given_up)
                meeting.set_result(None)
            except BaseException as error:  # noqa: BLE001 - raised below
                meeting.set_exception(error)

        threading.Thread(target=run, name="lockstep-meet", daemon=True).start()
        awaited = {node: self._processes[node][0] for node in nodes}
        try:
            while not wait([meeting], 0.05).done:
                for node, process in awaited.items():
                    if not process.is_alive() and not meeting.done():
                        raise ConnectionError(
                            f"the process of collector {node} ended (exit code {process.exitcode}) "
                            "before it joined; its output says why"
                        )
        finally:
            given_up.set()
        meeting.result()

    def end(self, node: int, timeout: float = 0.0) -> None:
        """Wait for a process to end, then kill it."""
        if node not in self._processes:
            return
        end_process(*self._processes[node], timeout)
        self._processes.pop(node, None)

    def end_all(self, timeout: float) -> None:
        """The same for all processes together."""
        deadline = time.monotonic() + timeout
        try:
            for node in list(self._processes):
                self.end(node, max(0.0, deadline - time.monotonic()))
        except BaseException:  # an interrupt: kill without waiting
            for node in list(self._processes):
                self.end(node)
            raise
