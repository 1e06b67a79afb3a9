"""Workers on nodes, for the trainer: every message is a call through the engine.

The engine's threads queue the results of calls until the pool receives them. A thread, the pulse,
asks every node for a report, so that each side knows that the other is alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from collectors.data.batch import Filled, Trajectories
from collectors.remote import node as far
from collectors.remote.launcher import Launcher
from collectors.remote.node import NodeSpec, Reply
from collectors.rollout.frame_block import from_message
from collectors.weights.publisher import Publisher
from collectors.workers.handle import Event, Failed, WorkerHandle
from collectors.workers.worker_spec import WorkerSpec, pickled
from sync.errors import WorkerTimeout
from sync.local.memory import tensor_over
from sync.local.waiting import Doorbell
from sync.remote.engine import PeerDied

_NO_REPORT = {"collected": 0, "pid": None, "stage": "starting", "version": -1}
_ENDED = -1  # as a generation: nothing that arrives matters
_ASK_AGAIN_S = 0.5  # a report that takes longer is not waited for
_END_S = 1.0


class NodeConnection:
    """One node, which its workers' handles share.

    generation: how often its process was replaced.
    is_connected: whether its receivers are connected with the trainer's schemes.
    """

    def __init__(self, spec: NodeSpec, launcher: Launcher, publisher: Publisher):
        self.index, self.spec = spec.index, spec
        self.generation = 0
        self.is_connected = False
        self.where, self.pid = "", 0
        self.handles: list[NodeHandle] = []
        self.publisher = publisher
        self._launcher = launcher
        self._token = secrets.token_hex(4)
        self._lock = threading.RLock()
        self._opened: Future[Reply] | None = None
        self._report: Future[Any] | None = None  # the last call for one
        self._asked_s = 0.0
        self._closing: Future[Any] | None = None

    @property
    def name(self) -> str:
        """In its process."""
        return f"{self._token}-{self.index}-{self.generation}"

    def open(self) -> Future[Reply]:
        """Make the node in its process, if that was not done."""
        with self._lock:
            if self._opened is None:
                self.where, self.pid = self._launcher.engine.describe(self.index), 0
                spec = dataclasses.replace(self.spec, schemes=self.publisher.schemes)
                self._opened = self._launcher.engine.call(
                    self.index, far.open_node, self.name, pickled(spec)
                )
                self._opened.add_done_callback(self._note_hello)
            return self._opened

    def _note_hello(self, answer: Future[Reply]) -> None:
        if answer.exception() is None and (reply := answer.result()).error is None:
            self.pid = reply.value["pid"]
            self.where += f", pid {self.pid} on {reply.value['machine']}"

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the node."""
        return self._launcher.engine.call(self.index, far.call_node, self.name, method, *args)

    def gone(self) -> str | None:
        """Why it cannot be called any more."""
        return self._launcher.engine.gone(self.index)

    def replace(self, generation: int) -> None:
        """Start another process, unless that was done since this generation."""
        with self._lock:
            if generation == self.generation:
                self._launcher.replace(self.index)
                self.generation += 1
                self.is_connected, self._opened, self._report = False, None, None

    # -- watching

    def beat(self) -> None:
        """Ask for a report, unless the last one is owed."""
        if not self.pid:
            return
        try:
            if self.gone() is not None:
                self._ring()
            elif self._report is None or self._report.done():
                self._report, self._asked_s = self.call("report"), time.monotonic()
                self._report.add_done_callback(self._note_report)
        except Exception:  # noqa: BLE001 - an engine may raise anything, and the pulse must go on
            text = traceback.format_exc().rstrip()
            for handle in self.handles:
                handle.fail(f"cannot be watched:\n{text}")

    def fresh_report(self) -> Future[Any] | None:
        """One that was asked for just now. None if an older one is owed: the node may hang."""
        self.beat()
        is_late = time.monotonic() - self._asked_s > _ASK_AGAIN_S
        return None if is_late else self._report

    def _note_report(self, answer: Future[Reply]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            reports = answer.result().value if answer.result().error is None else {}
            for handle in self.handles:
                if handle.index in reports:
                    handle.note_report(reports[handle.index])
        self._ring()

    def _ring(self) -> None:
        for handle in self.handles:
            handle.ring()

    # -- ending

    def tell_to_close(self, timeout: float, close_env: bool) -> None:
        """Ask it to end all workers, once."""
        with self._lock, contextlib.suppress(Exception):
            if self._closing is None and self._opened is not None and self.gone() is None:
                self._closing = self.call("close", max(0.2, timeout), close_env)

    def await_close(self, timeout: float) -> None:
        """Wait so long for that; processes are the launcher's to end."""
        if self._closing is not None:
            with contextlib.suppress(Exception):
                self._closing.result(timeout)


class NodeHandle(WorkerHandle):
    """One worker of a node."""

    spec: WorkerSpec

    def __init__(
        self, index: int, spec: WorkerSpec, trajectories: Trajectories, node: NodeConnection
    ):
        super().__init__(index, spec, trajectories, str(spec.policy_device or "cpu"))
        self.name = "collector" if node.spec.num_workers == 1 else "worker"
        self.receiver = node.index
        self.node = node
        node.handles.append(self)
        self._bell = Doorbell()
        self._lock = threading.RLock()
        self._events: deque[Event] = deque()
        self._begin(_ENDED)

    def _begin(self, generation: int) -> None:
        self._answering = generation
        self._node_generation = self.node.generation
        self._events.clear()
        self._early: dict[int, Filled] = {}  # batches that arrived before an older one
        self._next_serial = 1
        self._report: dict[str, Any] = _NO_REPORT
        self._awaited: Future[Any] | None = None  # the report that `refresh` waits for

    @property
    def where(self) -> str:  # type: ignore[override]
        return self.node.where

    @property
    def pid(self) -> int:
        """The node's process."""
        return self.node.pid

    # -- messages

    def start(self, spec: WorkerSpec) -> None:
        with self._lock:
            self._begin(self.generation)
        data, generation, base = pickled(spec), self.generation, self.node.publisher.base

        def start(opened: Future[Reply]) -> None:
            if opened.exception() is None and opened.result().error is None:
                self._call("being made", "start", data, generation, base)
            else:
                self._note("being made", generation, opened)

        self.node.open().add_done_callback(start)

    def meet(self) -> None:
        self._call("taking weights", "meet")

    def is_connected(self) -> bool:
        return self.node.is_connected

    def note_connected(self) -> None:
        self.node.is_connected = True

    def order(self, serial: int, versions: Mapping[str, int]) -> None:
        self._call("collecting", "collect", serial, versions)

    def ask(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        self._call(f"asked to {method}", "ask", number, method, cloudpickle.dumps(args))

    def _call(self, doing: str, method: str, *args: Any) -> None:
        """Call a method for this worker; its value is the event that the worker sent."""
        generation = self._answering
        answer = self.node.call(method, self.index, *args)
        answer.add_done_callback(lambda done: self._note(doing, generation, done))

    def _note(self, doing: str, generation: int, answer: Future[Reply]) -> None:
        """Queue what came of a call."""
        with self._lock:
            if not answer.cancelled() and generation == self._answering:
                self._take(doing, answer)
        self._bell.ring()

    def _take(self, doing: str, answer: Future[Reply]) -> None:
        error = answer.exception()
        if isinstance(error, PeerDied):
            self._events.append(Failed(f"died while {doing}: {error}", died=True))
            return
        if error is not None:
            text = "".join(traceback.format_exception(error)).rstrip()
            self._events.append(Failed(f"could not be called while {doing}:\n{text}"))
            return
        reply = answer.result()
        if reply.report is not None:
            self.note_report(reply.report)
        if reply.error is not None:
            self._events.append(Failed(f"raised {reply.error} while {doing}:\n{reply.value}"))
        elif isinstance(reply.value, Filled):
            self._take_batch(reply.value)
        else:
            self._events.append(reply.value)

    def _take_batch(self, filled: Filled) -> None:
        """Queue a batch, and those after it that came before it."""
        layout, pieces = filled.content
        filled.content = from_message(layout, [_as_tensor(piece) for piece in pieces])
        self._early[filled.serial] = filled
        while self._next_serial in self._early:
            self._events.append(self._early.pop(self._next_serial))
            self._next_serial += 1

    def receive(self) -> list[Event]:
        self._bell.silence()
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    def fds(self) -> list[int]:
        return [self._bell.fd]

    def ring(self) -> None:
        """Have the pool look at this worker."""
        self._bell.ring()

    def fail(self, text: str) -> None:
        """Queue a failure."""
        with self._lock:
            if self._answering != _ENDED:
                self._events.append(Failed(text))
        self._bell.ring()

    # -- watching

    def note_report(self, report: Mapping[str, Any]) -> None:
        """What the node says of this worker. Reports may overtake each other."""
        with self._lock:
            if report["generation"] != self._answering:
                return
            collected = max(self._report["collected"], report["collected"])
            self._report = {**report, "collected": collected}
            if report["failure"] is not None:
                self._events.append(report["failure"])

    def gone(self) -> str | None:
        if self._answering == _ENDED:
            return None
        if self._node_generation != self.node.generation:
            return ": its node was replaced"
        why = self.node.gone()
        return None if why is None else f": {why}"

    def progress(self) -> Hashable:
        return tuple(self._report[name] for name in ("collected", "version", "stage"))

    def activity(self) -> str:
        return f"is {self._report['stage']}"

    def stuck(self, timeout: float) -> str:
        return (
            f"hangs: it owes a batch and has made no frame for more than timeout={timeout:g} s; "
            f"it {self.activity()}"
        )

    def reported_counts(self) -> dict[str, Any]:
        names = ("collected", "pid", "stage", "version")
        return {"where": self.where, **{name: self._report[name] for name in names}}

    def refresh(self) -> None:
        self._awaited = self.node.fresh_report()

    def is_fresh(self) -> bool:
        return self._awaited is None or self._awaited.done()

    # -- ending

    def tell_to_stop(self, timeout: float, close_env: bool) -> None:
        self.node.tell_to_close(timeout, close_env)

    def end(self, timeout: float) -> None:
        self.node.await_close(timeout)
        self._answering = _ENDED

    def make_way(self) -> None:
        try:
            if not self._was_ended():
                self.node.replace(self._node_generation)
        finally:
            self._answering = _ENDED

    def _was_ended(self) -> bool:
        """Whether the node lives, and has ended the worker alone."""
        is_thread = self.node.spec.num_workers == 1
        if self.gone() is not None or (is_thread and isinstance(self.failure, WorkerTimeout)):
            return False
        with contextlib.suppress(Exception):
            reply: Reply = self.node.call("end", self.index, _END_S, True).result(2 * _END_S)
            return reply.error is None and reply.value is True
        return False

    def close(self) -> None:
        self._bell.close()


def _as_tensor(piece: Any) -> Tensor:
    if isinstance(piece, np.ndarray):  # arrays in Ray's object store are read-only
        return tensor_over(piece) if piece.size else torch.empty(0, dtype=torch.uint8)
    tensor: Tensor = piece
    return tensor


class Pulse(threading.Thread):
    """Calls `beat` of all nodes of a collector every `every_s` seconds, until it is stopped."""

    def __init__(self, nodes: Sequence[NodeConnection], every_s: float):
        super().__init__(name="lockstep-pulse", daemon=True)
        self._nodes, self._every_s = nodes, every_s
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        while True:
            if self._stopped.wait(self._every_s):
                return
            for node in self._nodes:
                node.beat()

    def stop(self) -> None:
        self._stopped.set()
        if self is not threading.current_thread():
            self.join(2.0)
