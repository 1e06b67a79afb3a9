"""A remote node as one worker of a pool: every message is a call through the engine.

The engine's threads queue the results of calls until the pool receives them. A thread, the pulse,
asks every node for its frame counts, so that each side knows that the other is alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from collectors.data.batch import Filled, Trajectories, frames_of
from collectors.remote import node as far
from collectors.remote.batches import from_entries
from collectors.remote.launcher import Launcher
from collectors.remote.node import NodeSpec, Reply
from collectors.weights.publisher import Publisher
from collectors.workers.handle import FRAME_COUNTS, Answer, Event, Failed, Hello, Met, WorkerHandle
from sync.errors import WorkerRaised
from sync.local.waiting import Doorbell
from sync.remote.engine import PeerDied

_NO_COUNTS: dict[str, Any] = {
    **dict.fromkeys((*FRAME_COUNTS, "number"), 0),
    "version": -1,
    "workers": [],
}
_ENDED = -1  # as a generation: nothing that arrives matters


class NodeBatch(NamedTuple):
    """What a node handed over, and the versions of all its steps, if it has one worker."""

    frames: TensorDict
    stamps: np.ndarray[Any, Any] | None


class NodeHandle(WorkerHandle):
    """One node, which hosts a collector."""

    name = "collector"
    spec: NodeSpec

    def __init__(
        self, spec: NodeSpec, trajectories: Trajectories, launcher: Launcher, publisher: Publisher
    ):
        super().__init__(spec.index, spec, trajectories, str(spec.policy_device or "cpu"))
        self._launcher = launcher
        self._publisher = publisher
        self._token = secrets.token_hex(4)
        self._bell = Doorbell()
        self._lock = threading.RLock()
        self._events: deque[Event] = deque()
        self._closing: Future[Any] | None = None
        self._begin(_ENDED)

    def _begin(self, generation: int) -> None:
        self._answering = generation
        self._events.clear()
        self._early: dict[int, Filled] = {}  # batches that arrived before an older one
        self._next_number = 1
        self._counts = _NO_COUNTS
        self._beat: Future[Any] | None = None  # the last call for counts
        self._awaited: Future[Any] | None = None  # the one that `refresh` waits for
        self._doing = "starting"
        self.node_name, self.where, self.pid = "", "", 0

    # -- calls

    def start(self, spec: NodeSpec) -> None:
        with self._lock:
            self._begin(self.generation)
            self.node_name = f"{self._token}-{self.index}-{self.generation}"
            self.where = self._launcher.engine.describe(self.index)
        spec = dataclasses.replace(
            spec, schemes=self._publisher.schemes, version_base=self._publisher.base
        )
        self._doing = "being made"
        self._call(self._doing, self._note_hello, far.open_node, spec.pickled())

    def _note_hello(self, hello: Mapping[str, Any]) -> None:
        self.pid = hello["pid"]
        self.where += f", pid {self.pid} on {hello['machine']}"
        self._events.append(Hello(hello["num_envs"], hello["environment"]))

    def meet(self) -> None:
        self._doing = "taking weights"
        self._call(self._doing, self._note_met, far.call_node, "connect")

    def _note_met(self, _: Any) -> None:
        self._doing = "collecting"
        self._events.append(Met())

    def order(self, serial: int, versions: Mapping[str, int]) -> None:
        def note_batch(value: Any) -> None:
            number, entries, stamps, counts = value
            batch = from_entries(entries)
            self._note_counts(counts)
            self._early[number] = Filled(
                number, 0, batch.shape[1], frames_of(batch), content=NodeBatch(batch, stamps)
            )
            while self._next_number in self._early:
                self._events.append(self._early.pop(self._next_number))
                self._next_number += 1

        self._call("collecting", note_batch, far.call_node, "next_batch", versions)

    def stamps_of_finished(self, filled: Filled) -> Tensor:
        return torch.from_numpy(filled.content.stamps)

    def ask(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        self._call(
            f"asked to {method}",
            lambda value: self._events.append(Answer(number, True, value)),
            far.call_node,
            *("control", method, cloudpickle.dumps(args)),
            on_error=lambda text: self._events.append(Answer(number, False, text)),
        )

    def _call(
        self,
        doing: str,
        accept: Callable[[Any], None],
        function: Callable[..., Reply],
        *args: Any,
        on_error: Callable[[str], None] | None = None,
    ) -> Future[Any]:
        """Call a function of the node; `accept` takes its value, `on_error` the error's text."""
        generation = self._answering

        def note(answer: Future[Any]) -> None:
            with self._lock:
                if not answer.cancelled() and generation == self._answering:
                    take(answer)
            self._bell.ring()

        def take(answer: Future[Any]) -> None:
            error = answer.exception()
            if isinstance(error, PeerDied):
                self._events.append(Failed(f"died while {doing}: {error}", died=True))
                return
            if error is not None:
                text = "".join(traceback.format_exception(error)).rstrip()
                self._events.append(Failed(f"could not be called while {doing}:\n{text}"))
                return
            reply: Reply = answer.result()
            if reply.error is None:
                accept(reply.value)
                return
            self._note_counts(reply.frame_counts or _NO_COUNTS)
            if on_error is not None:
                on_error(f"{reply.error}:\n{reply.value}")
            else:
                self._events.append(Failed(f"raised {reply.error} while {doing}:\n{reply.value}"))

        answer = self._launcher.engine.call(self.index, function, self.node_name, *args)
        answer.add_done_callback(note)
        return answer

    def receive(self) -> list[Event]:
        self._bell.silence()
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    def fds(self) -> list[int]:
        return [self._bell.fd]

    # -- watching

    def beat(self) -> None:
        """Ask for the node's counts, if it has said hello and answered the last call."""
        if self._answering == _ENDED or not self.pid:
            return
        try:
            if self.gone() is not None:
                self._bell.ring()
            elif self._beat is None or self._beat.done():
                self._beat = self._call("watched", self._note_counts, far.call_node, "frame_counts")
        except Exception:  # noqa: BLE001 - an engine may raise anything, and the pulse must go on
            text = traceback.format_exc().rstrip()
            self._events.append(Failed(f"cannot be watched:\n{text}"))
            self._bell.ring()

    def _note_counts(self, counts: dict[str, Any]) -> None:
        if counts["number"] > self._counts["number"]:  # else newer ones arrived before
            self._counts = counts

    def gone(self) -> str | None:
        if self._answering == _ENDED:
            return None
        why = self._launcher.engine.gone(self.index)
        return None if why is None else f": {why}"

    def progress(self) -> Hashable:
        return tuple(self._counts[name] for name in ("collected", "version", "restarts"))

    def activity(self) -> str:
        return f"is {self._doing}"

    def stuck(self, timeout: float) -> str:
        stages = ", ".join(
            f"worker {one['worker']} is {one['stage']}"
            for one in self._counts["workers"]
            if "stage" in one
        )
        text = f"hangs: it owes a batch and has made no frame for more than timeout={timeout:g} s"
        return f"{text}; {stages}" if stages else text

    def reported_counts(self) -> dict[str, Any]:
        return {**self._counts, "where": self.where}

    def refresh(self) -> None:
        # A call that has no answer yet is not waited for: the node may hang.
        waits = self._beat is None or self._beat.done()
        self.beat()
        self._awaited = self._beat if waits else None

    def is_fresh(self) -> bool:
        return self._awaited is None or self._awaited.done()

    # -- ending

    def tell_to_stop(self, timeout: float, close_env: bool) -> None:
        self._closing = None
        with contextlib.suppress(Exception):
            engine, limit = self._launcher.engine, max(0.2, timeout)
            if self.node_name and engine.gone(self.index) is None:
                self._closing = engine.call(
                    self.index, far.call_node, self.node_name, "close", limit, close_env
                )

    def end(self, timeout: float) -> None:
        """Wait for the node to close its collector; processes are the launcher's to end."""
        if self._closing is not None:
            with contextlib.suppress(Exception):
                self._closing.result(timeout)
        self._answering = _ENDED

    def make_way(self) -> None:
        try:
            if isinstance(self.failure, WorkerRaised) and self.gone() is None:
                self.tell_to_stop(1.0, True)
                self.end(2.0)
            else:
                self._launcher.replace(self.index)
        finally:
            self._answering = _ENDED

    def close(self) -> None:
        self._bell.close()


class Pulse(threading.Thread):
    """Calls `beat` of all nodes of a collector every `every_s` seconds, until it is stopped."""

    def __init__(self, handles: Callable[[], list[NodeHandle]], every_s: float):
        super().__init__(name="lockstep-pulse", daemon=True)
        self._handles, self._every_s = handles, every_s
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        while True:
            if self._stopped.wait(self._every_s):
                return
            for handle in self._handles():
                handle.beat()

    def stop(self) -> None:
        self._stopped.set()
        if self is not threading.current_thread():
            self.join(2.0)
