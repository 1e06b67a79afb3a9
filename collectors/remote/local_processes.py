"""Workers as processes of this machine: starting them, watching them, ending them."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

from collectors.remote.host import close_all
from collectors.workers.process_lifetime import (
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

LOADED = (*PRELOAD, "collectors.remote.host")


def peer_main(trainer_pid: int, start_method: str, serve: Callable[[], Any]) -> None:
    """Be a peer until the trainer stops it or is gone."""
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


class PeerProcesses:
    """The peers' processes of one trainer, by number."""

    def __init__(self) -> None:
        self._ctx = context(preload=LOADED)
        self._processes: dict[int, tuple[Any, Watch]] = {}

    def start(self, worker: int, serve: Callable[[], Any]) -> None:
        """Start a worker's process, which calls `serve`."""
        process = self._ctx.Process(
            target=peer_main,
            args=(os.getpid(), default_start_method(), serve),
            name=f"lockstep-peer-{worker}",
            daemon=False,
        )
        with sigint_blocked():
            process.start()
            self._processes[worker] = process, Watch(process.pid)

    def await_meeting(
        self, workers: Iterable[int], meet: Callable[[threading.Event], None]
    ) -> None:
        """Call `meet`, which waits for these workers; raise as soon as the process of one ends.

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
        awaited = {worker: self._processes[worker][0] for worker in workers}
        try:
            while not wait([meeting], 0.05).done:
                for worker, process in awaited.items():
                    if not process.is_alive() and not meeting.done():
                        raise ConnectionError(
                            f"the process of worker {worker} ended (exit code {process.exitcode}) "
                            "before it joined; its output says why"
                        )
        finally:
            given_up.set()
        meeting.result()

    def end(self, worker: int, timeout: float = 0.0) -> None:
        """Wait for a process to end, then kill it."""
        if worker not in self._processes:
            return
        end_process(*self._processes[worker], timeout)
        self._processes.pop(worker, None)

    def end_all(self, timeout: float) -> None:
        """The same for all processes together."""
        deadline = time.monotonic() + timeout
        try:
            for worker in list(self._processes):
                self.end(worker, max(0.0, deadline - time.monotonic()))
        except BaseException:  # an interrupt: kill without waiting
            for worker in list(self._processes):
                self.end(worker)
            raise
