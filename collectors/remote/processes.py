"""Hosts as processes of this machine: starting them, watching them, ending them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import forkserver, resource_tracker
from typing import Any

from collectors.crew import interrupts_held
from collectors.multi import PRELOAD
from collectors.remote.host import close_all, leave
from sync.memory import Watch, wait_for

KILL_AFTER_S = 5.0
LOADED = [*PRELOAD, "collectors.remote.host", "collectors.multi", "collectors.single"]


def host_main(trainer_pid: int, serve: Callable[[], Any]) -> None:
    """Be a host's process until the trainer lets it go, or is gone."""
    be_a_host()
    threading.Thread(target=_leave_with, args=(trainer_pid,), daemon=True).start()
    status = 0
    try:
        serve()
    except BaseException:  # noqa: BLE001 - the trainer sees the process end; why, a person may read
        traceback.print_exc()
        status = 1
    close_all()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)  # the trainer waits: no time for what libraries do at exit


def be_a_host() -> None:
    """Leave signals to the trainer, and let environments' own processes have no named locks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides what Ctrl-C means
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if "fork" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("fork", force=True)


def _leave_with(pid: int) -> None:
    watch = Watch(pid)
    while not watch.look():
        wait_for(watch.fds(), 3600.0)
    leave()


class Processes:
    """The host processes of one trainer, by number."""

    def __init__(self) -> None:
        methods = multiprocessing.get_all_start_methods()
        method = "forkserver" if "forkserver" in methods else "spawn"
        self._ctx: Any = multiprocessing.get_context(method)
        self._processes: dict[int, Any] = {}
        resource_tracker.ensure_running()  # its start would end what `interrupts_held` holds
        if method == "forkserver":
            if forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
                self._ctx.set_forkserver_preload(LOADED)
            with interrupts_held():
                forkserver.ensure_running()

    def start(self, host: int, serve: Callable[[], Any]) -> None:
        """Start a host's process, which calls `serve`."""
        name = f"lockstep-host-{host}"
        process = self._ctx.Process(
            target=host_main, args=(os.getpid(), serve), name=name, daemon=False
        )
        with interrupts_held():
            process.start()
        self._processes[host] = process

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
        awaited = {host: self._processes[host] for host in hosts}
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
        process = self._processes.pop(host, None)
        if process is None:
            return
        if timeout > 0:
            process.join(timeout)
        if process.is_alive():
            process.kill()
        process.join(KILL_AFTER_S)
        with contextlib.suppress(ValueError):
            process.close()

    def end_all(self, timeout: float) -> None:
        """The same for all of them together."""
        deadline = time.monotonic() + timeout
        for host in list(self._processes):
            self.end(host, max(0.0, deadline - time.monotonic()))
