"""How processes of workers begin and end: they ignore Ctrl-C, and end with the trainer."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from sync.local.waiting import Watch, wait_for

KILL_AFTER_S = 5.0
PRELOAD = ("collectors.workers.worker_loop", "gymnasium.envs.classic_control")


def context(start_method: str | None = None, preload: Sequence[str] = PRELOAD) -> Any:
    """What starts processes: a fork server with the libraries loaded, if there is one."""
    methods = multiprocessing.get_all_start_methods()
    if start_method is None:
        start_method = "forkserver" if "forkserver" in methods else "spawn"
    elif start_method not in methods:
        raise ValueError(f"start_method={start_method!r}: here there are {', '.join(methods)}")
    if start_method == "fork":
        return multiprocessing.get_context(start_method)
    if getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
        raise ValueError(
            f"start_method={start_method!r}: workers import the script, but this script was read "
            "from stdin; save it in a file, or use start_method='fork'"
        )
    ctx = multiprocessing.get_context(start_method)
    resource_tracker.ensure_running()  # its start would unblock what `sigint_blocked` blocks
    if start_method == "forkserver":
        ctx.set_forkserver_preload(list(preload))
    return ctx


def default_start_method() -> str:
    """The start method that this process uses by default. Calling this does not fix it."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


@contextlib.contextmanager
def sigint_blocked() -> Iterator[None]:
    """Let a process that starts now block SIGINT until it has installed its own handling.

    A SIGINT of this process is raised afterwards, because an interrupted start leaves half a
    process.
    """
    came: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    here = callable(handler) and threading.current_thread() is threading.main_thread()
    if here:  # what is blocked is blocked for one thread, and another may receive the signal
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if here:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def end_process(process: Any, watch: Watch, timeout: float) -> None:
    """Wait for a process to end, then kill it, and release it."""
    if not watch.wait(timeout):
        watch.kill()  # `process.kill` fails if the fork server died
        watch.wait(KILL_AFTER_S)
    with contextlib.suppress(ValueError):  # it still runs, or an interrupted call has released it
        process.join(KILL_AFTER_S)
        process.close()


# -- in the fork server


@atexit.register
def _remove_listener() -> None:
    """Remove the fork server's socket, whose folder a killed trainer leaves; see docs/internals.md.

    A trainer knows the process of its server. A server that failed leaves the folder to the next.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_pid is None and server._forkserver_address is not None:
        socket = Path(server._forkserver_address)
        with contextlib.suppress(OSError):
            socket.unlink(missing_ok=True)
            if not hasattr(sys, "last_value"):
                socket.parent.rmdir()


# -- in the process that was started


def settle_in(start_method: str) -> None:
    """Leave signals to the trainer, and start other processes, an environment's say, as it does."""
    ignore_signals()
    multiprocessing.set_start_method(start_method, force=True)  # it has that of its own start


def ignore_signals() -> None:
    """Leave SIGINT and SIGTERM to the trainer: terminals and schedulers send them to every process.

    Processes that an environment starts obey SIGTERM, by which the environment may end them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM}),
        after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGTERM}),
        after_in_child=_obey_sigterm,
    )


def _obey_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def exit_with_parent(pid: int) -> None:
    """End this process as soon as the trainer's is gone."""

    def wait() -> None:
        watch = Watch(pid)
        while not watch.look():
            wait_for(watch.fds(), 3600.0)
        os._exit(1)

    threading.Thread(target=wait, name="lockstep-leave", daemon=True).start()


def exit_now(status: int) -> NoReturn:
    """End this process; the trainer waits, so there is no time for what libraries do at exit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
