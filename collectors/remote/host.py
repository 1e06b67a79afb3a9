"""A host: a process that runs one worker for a trainer, which calls it through an engine.

    trainer (remote_handle.py)              host                          worker (a thread)
    --------------------------              ----                          -----------------
    open_worker(token, setup)         ->    start it                ->    policy, environments
                                      <-    machine and process
    send_to(token, number, message)   ->    in their order          ->    worker_loop.py
    events_of(token, seconds)         ->    wait for some           <-    Hello, Met, Filled, ...
                                      <-    those, and a report
    (schemes)                        <->                           <->    an inbox in this process
    close_worker(token, ...)          ->    stop it                 ->

One call of `events_of` is always on its way, so that each side knows that the other is alive. The
engine ends the process when the trainer is gone.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle

from collectors.rollout.frame_block import FrameBlock, map_blocks, to_message
from collectors.rollout.shared_counters import MESSAGES, SharedCounters
from collectors.workers.messages import Blocks, Event, Failed, Filled
from collectors.workers.pipe import Pipe, PipeClosed
from collectors.workers.process_lifetime import default_start_method
from collectors.workers.worker_loop import WorkerSetup, serve
from collectors.workers.worker_spec import WorkerSpec
from sync import WeightSyncScheme
from sync.local.memory import SharedFd, anonymous_file
from sync.local.waiting import wait_for

_SEND_S = 60.0


@dataclass
class RemoteSetup:
    """What a host is told of its worker."""

    index: int
    spec: WorkerSpec
    schemes: Mapping[str, WeightSyncScheme]
    version_base: int


class WorkerReport(NamedTuple):
    """What a worker has done and does."""

    collected: int
    steps: int
    stage: str
    version: int


class SentEvent(NamedTuple):
    """An event of the worker; with a finished batch, the layout and the arrays of its frames."""

    event: Event
    layout: Any = None
    arrays: Any = ()


class HostedWorker:
    """The worker of this process."""

    def __init__(self, setup: RemoteSetup):
        self._pipe, far = Pipe.pair()
        self._counters = SharedCounters()
        self._memory = SharedFd(anonymous_file())
        self._num_blocks = setup.spec.num_blocks
        self._blocks: list[FrameBlock] = []
        self._lock = threading.Lock()
        self._listening = threading.Lock()
        self._early: dict[int, tuple[Any, ...]] = {}  # messages that came before an older one
        self._next = 0
        inner = WorkerSetup(
            worker_idx=setup.index,
            trainer_pid=0,
            pipe=far,
            counters=self._counters,
            spec=setup.spec.pack(),
            blocks=self._memory,
            schemes=setup.schemes,
            start_method=default_start_method(),
            version_base=setup.version_base,
        )
        name = f"lockstep-worker-{setup.index}"
        self._thread = threading.Thread(target=self._run, args=(inner,), name=name, daemon=True)
        self._thread.start()

    def _run(self, setup: WorkerSetup) -> None:
        try:
            serve(setup)
        finally:
            setup.pipe.close()
            setup.spec.close()

    def send(self, number: int, message: tuple[Any, ...]) -> None:
        """Pass a message on, after those with lower numbers: calls may overtake each other."""
        with self._lock:
            self._early[number] = message
            while self._next in self._early:
                self._send(self._early.pop(self._next))
                self._next += 1

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._pipe.send(message, timeout=_SEND_S)
        except PipeClosed:  # it has ended, and its last event says how
            return
        self._counters.values[MESSAGES] += 1

    def events(self, seconds: float) -> tuple[list[SentEvent], WorkerReport, bool]:
        """What the worker has sent, as soon as there is something; and whether it has ended."""
        with self._listening:
            if not self._pipe.ended:
                wait_for([self._pipe.fd], seconds)
            messages = (self._outgoing(message) for message in self._pipe.receive())
            events = [sent for sent in messages if sent is not None]
            return events, self.report(), self._pipe.ended

    def _outgoing(self, message: Event | Blocks) -> SentEvent | None:
        if isinstance(message, Blocks):
            self._blocks = map_blocks(self._memory.fd, message.layout, self._num_blocks)
            return None
        if isinstance(message, Filled):
            block = self._blocks[message.block]
            arrays = [tensor.numpy() for tensor in to_message(block, message.steps)]
            return SentEvent(message._replace(ended_ns=0), block.layout.plain(), arrays)
        return SentEvent(message)

    def report(self) -> WorkerReport:
        values = self._counters.values
        return WorkerReport(values[0], values[1], self._counters.stage, values[3])

    def close(self, timeout: float, close_env: bool) -> bool:
        """Stop it; whether it has ended in time."""
        with self._lock:
            self._send(("stop", close_env))
        self._thread.join(timeout)
        return not self._thread.is_alive()


_WORKERS: dict[str, HostedWorker] = {}  # of this process; those that failed may still end


def open_worker(token: str, setup: bytes) -> tuple[str, int]:
    """Start a worker; the machine and the process in which it runs."""
    _WORKERS[token] = HostedWorker(cloudpickle.loads(setup))
    return platform.node(), os.getpid()


def send_to(token: str, number: int, message: bytes) -> None:
    """Send a worker its message of this number."""
    _WORKERS[token].send(number, cloudpickle.loads(message))


def events_of(token: str, seconds: float) -> tuple[list[SentEvent], WorkerReport, bool]:
    """What a worker has sent since the last call, waiting for something."""
    worker = _WORKERS.get(token)
    if worker is None:
        return [SentEvent(Failed("was ended"))], WorkerReport(0, 0, "starting", -1), True
    return worker.events(seconds)


def report_of(token: str) -> WorkerReport:
    """What a worker has done by now."""
    return _WORKERS[token].report()


def close_worker(token: str, timeout: float, close_env: bool) -> bool:
    """Stop a worker; whether it has ended in time."""
    worker = _WORKERS.pop(token, None)
    return worker is None or worker.close(timeout, close_env)


def close_all() -> None:
    """Stop all workers of this process."""
    for token in list(_WORKERS):
        close_worker(token, 1.0, True)
