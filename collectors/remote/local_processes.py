"""Hosts as processes of this machine: starting them, watching them, ending them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from collectors.remote.node import close_all
from collectors.workers.startup import (
    PRELOAD,
    context,
    default_start_method,
    exit_now,
    exit_with_parent,
    settle_in,
    sigint_blocked,
)
from sync.local.process import Watch

KILL_AFTER_S = 5.0
LOADED = (*PRELOAD, "collectors.remote.node", "collectors.multi", "collectors.single")


def node_main(trainer_pid: int, start_method: str, serve: Callable[[], Any]) -> None:
    """Be a host's process until the trainer lets it go, or is gone."""
    settle_in(start_method)
    exit_with_parent(trainer_pid, lambda: os._exit(1))
    status = 0
    try:
        serve()
    except BaseException:  # noqa: BLE001 - the trainer sees the process end; why, a person may read
        traceback.print_exc()
        status = 1
    close_all()
    exit_now(status)


class Processes:
    """The host processes of one trainer, by number."""

    def __init__(self) -> None:
        self._ctx = context(preload=LOADED)
        self._processes: dict[int, tuple[Any, Watch]] = {}

    def start(self, host: int, serve: Callable[[], Any]) -> None:
        """Start a host's process, which calls `serve`."""
        name = f"lockstep-host-{host}"
        process = self._ctx.Process(
            target=node_main,
            args=(os.getpid(), default_start_method(), serve),
            name=name,
            daemon=False,
        )
        with sigint_blocked():
            process.start()
            self._processes[host] = process, Watch(process.pid)

    def await_meeting(self, hosts: Iterable[int], meet: Callable[[threading.Event], None]) -> None:
        """Do `meet`, which waits for these hosts; raise as soon as one of them ends instead.

        `meet` is then told by an event to give up: it would meet whoever comes in their place.
        """
        raised: list[BaseException] = []
        given_up = threading.Event()

        def run() -> None:
            try:
                meet(given_up)
            except BaseException as error:  # noqa: BLE001 - raised below
                raised.append(error)

        thread = threading.Thread(target=run, name="lockstep-meet", daemon=True)
        thread.start()
        awaited = {host: self._processes[host][0] for host in hosts}
        try:
            while thread.is_alive():
                thread.join(0.05)
                for host, process in awaited.items():
                    if not process.is_alive() and thread.is_alive():
                        raise ConnectionError(
                            f"the process of collector {host} ended (exit code "
                            f"{process.exitcode}) before it could be met; what it wrote says why"
                        )
        finally:
            given_up.set()
        if raised:
            raise raised[0]

    def end(self, host: int, timeout: float = 0.0) -> None:
        """Wait for a process to end, then make it."""
        if host not in self._processes:
            return
        process, watch = self._processes[host]
        if not watch.wait(timeout):
            watch.kill()  # `process` knows of nobody any more if the fork server died
            watch.wait(KILL_AFTER_S)
        process.join(KILL_AFTER_S)
        self._processes.pop(host, None)
        with contextlib.suppress(ValueError):
            process.close()

    def end_all(self, timeout: float) -> None:
        """The same for all of them together."""
        deadline = time.monotonic() + timeout
        try:
            for host in list(self._processes):
                self.end(host, max(0.0, deadline - time.monotonic()))
        except BaseException:  # an interrupt: nobody is waited for any more
            for host in list(self._processes):
                self.end(host)
            raise
