"""How processes of workers and hosts begin and end: deaf to Ctrl-C, never without the trainer."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker
from typing import Any, NoReturn

from collectors.workers import interrupts
from sync.local.process import Watch
from sync.local.waiting import wait_for

PRELOAD = (
    "collectors.workers.preload",
    "collectors.workers.process",
    "gymnasium.envs.classic_control",
)


def context(start_method: str | None = None, preload: Sequence[str] = PRELOAD) -> Any:
    """What starts processes: a fork server with the libraries loaded, if there is one."""
    methods = multiprocessing.get_all_start_methods()
    if start_method is None:
        start_method = "forkserver" if "forkserver" in methods else "spawn"
    elif start_method not in methods:
        raise ValueError(f"start_method={start_method!r}: here there are {', '.join(methods)}")
    ctx = multiprocessing.get_context(start_method)
    _forget_stdin()
    if start_method != "fork":
        resource_tracker.ensure_running()  # its start would end what `interrupts_held` holds
    if start_method == "forkserver":
        if forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
            ctx.set_forkserver_preload(list(preload))
        with interrupts_held():  # for its children too, until they are told what that means
            forkserver.ensure_running()  # it loads while the rest is prepared
    return ctx


def _forget_fork_server() -> None:
    """It is the child of the process that this one was forked from, and is to end with that."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:  # type: ignore[attr-defined]
        os.close(server._forkserver_alive_fd)  # type: ignore[attr-defined]
        server.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget_fork_server)


def _forget_stdin() -> None:
    """Let no process look for the script where that came by stdin: there is no file of it."""
    script = sys.modules["__main__"]
    if getattr(script, "__file__", None) == "<stdin>":
        del script.__file__


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Have a process that starts now block SIGINT until it has decided what that means.

    One that comes meanwhile is raised afterwards: a start that it cuts short leaves half a process.
    """
    with interrupts.held():  # what is blocked is so for this thread, and another may get the signal
        old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)


# -- in the process that was started


def ignore_signals() -> None:
    """Leave signals to the trainer, and let environments' own processes have no named locks.

    Terminals and launchers send them to every process, and a run ends with all its workers there.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM}),
        after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGTERM}),
        after_in_child=_heed_sigterm,
    )
    if "fork" in multiprocessing.get_all_start_methods():
        # Semaphores without names: nothing stays in /dev/shm however this process ends.
        multiprocessing.set_start_method("fork", force=True)


def _heed_sigterm() -> None:
    """An environment ends its own processes by it, maybe as soon as they have begun."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def exit_with_parent(pid: int, leave: Callable[[], Any]) -> None:
    """Have `leave` called as soon as the trainer's process is gone."""

    def wait() -> None:
        watch = Watch(pid)
        while not watch.look():
            wait_for(watch.fds(), 3600.0)
        leave()

    threading.Thread(target=wait, name="lockstep-leave", daemon=True).start()


def exit_now(status: int) -> NoReturn:
    """End this process; the trainer waits, so there is no time for what libraries do at exit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
