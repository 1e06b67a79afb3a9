"""A node elsewhere as one worker of a pool: every message is a call through the engine.

What a call returns is queued by the engine's threads until the pool receives it. A thread, the
pulse, asks every node for its frame counts, so that each side knows that the other is alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from typing import Any

import cloudpickle

from collectors.data.batch import frames_of
from collectors.remote import node as far
from collectors.remote.batches import from_entries
from collectors.remote.launcher import Launcher
from collectors.remote.node import NodeSpec, Reply
from collectors.weights.publisher import Publisher
from collectors.workers.channel import Answer, Batch, Event, Failed, Hello, Met, WorkerChannel
from sync.errors import WorkerError, WorkerRaised
from sync.local.doorbell import Doorbell
from sync.local.waiting import awake_s
from sync.remote.engine import PeerDied

_NOTHING: dict[str, Any] = {
    "collected": 0,
    "delivered": 0,
    "dropped": 0,
    "in_flight": 0,
    "restarts": 0,
    "preempted": 0,
    "version": -1,
    "workers": [],
}
_ENDED = -1  # instead of a generation: nothing that comes matters any more


class NodeChannel(WorkerChannel):
    """One node, which hosts a collector."""

    def __init__(self, index: int, launcher: Launcher, publisher: Publisher):
        self._index = index
        self._launcher = launcher
        self._publisher = publisher
        self._token = secrets.token_hex(4)
        self._bell = Doorbell()
        self._lock = threading.RLock()
        self._events: deque[Event] = deque()
        self._generation = _ENDED
        self._closing: Future[Any] | None = None
        self._beat: Future[Any] | None = None
        self._asked_at = 0.0
        self._refreshing: Future[Any] | None = None
        self._awaited: Future[Any] | None = None
        self._forget()

    def _forget(self) -> None:
        self._events.clear()
        self._early: dict[int, Batch] = {}  # batches that overtook others
        self._due = 1  # the batch that comes next
        self._reported = dict(_NOTHING)
        self._doing = "starting"
        self.name, self.where, self.pid = "", "", 0

    # -- calls

    def start(self, spec: NodeSpec, generation: int) -> None:
        with self._lock:
            self._forget()
            self._generation = generation
            self.name = f"{self._token}-{self._index}-{generation}"
            self.where = self._launcher.engine.describe(self._index)
        spec = dataclasses.replace(
            spec, schemes=self._publisher.schemes, version_base=self._publisher.base
        )
        self._doing = "being made"
        self._call(self._doing, self._note_hello, far.open_node, spec.pickled())

    def _note_hello(self, hello: Mapping[str, Any]) -> None:
        self.pid = hello["pid"]
        self.where += f", pid {self.pid} on {hello['node']}"
        environment = f"{hello['collector']}, {hello['environment']}"
        self._events.append(Hello(hello["num_envs"], environment))

    def meet(self) -> None:
        if not self._publisher.schemes:
            self._note_met(None)
            return
        self._doing = "taking weights"
        self._call(self._doing, self._note_met, far.connect_node)

    def _note_met(self, _: Any) -> None:
        self._doing = "collecting"
        self._events.append(Met())
        self._bell.ring()

    def order(self, serial: int, versions: Mapping[str, int]) -> None:
        def note_batch(value: Any) -> None:
            entries, counts = value
            batch = from_entries(entries)
            self._note_counts(counts)
            self._early[serial] = Batch(serial, frames_of(batch), batch)
            while self._due in self._early:
                self._events.append(self._early.pop(self._due))
                self._due += 1

        self._call("collecting", note_batch, far.next_batch, serial, versions)

    def release(self, batch: Batch) -> None:
        """The batch has memory of its own."""

    def ask(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        def note_answer(value: Any) -> None:
            self._events.append(Answer(number, True, value))

        def note_error(text: str) -> None:
            self._events.append(Answer(number, False, text))

        pickled = cloudpickle.dumps(args)
        self._call(
            f"asked to {method}", note_answer, far.control, method, pickled, refuse=note_error
        )

    def _call(
        self,
        doing: str,
        accept: Callable[[Any], None],
        function: Callable[..., Reply],
        *args: Any,
        refuse: Callable[[str], None] | None = None,
    ) -> Future[Any]:
        """Call a function of the node; `accept` takes its value, `refuse` what it raised."""
        answer: Future[Any]
        try:
            answer = self._launcher.engine.call(self._index, function, self.name, *args)
        except PeerDied as error:
            answer = Future()
            answer.set_exception(error)
        generation = self._generation
        answer.add_done_callback(lambda done: self._note(generation, doing, done, accept, refuse))
        return answer

    def _note(
        self,
        generation: int,
        doing: str,
        answer: Future[Any],
        accept: Callable[[Any], None],
        refuse: Callable[[str], None] | None,
    ) -> None:
        with self._lock:
            if answer.cancelled() or generation != self._generation:
                return
            try:
                self._take(doing, answer, accept, refuse)
            except Exception:  # noqa: BLE001 - an engine's thread would tell nobody
                text = traceback.format_exc().rstrip()
                self._events.append(Failed(f"sent what cannot be read while {doing}:\n{text}"))
        self._bell.ring()

    def _take(
        self,
        doing: str,
        answer: Future[Any],
        accept: Callable[[Any], None],
        refuse: Callable[[str], None] | None,
    ) -> None:
        error = answer.exception()
        if isinstance(error, PeerDied):
            self._events.append(Failed(f"died while {doing}: {error}", died=True))
        elif error is not None:
            notes = "\n".join(getattr(error, "__notes__", []))
            text = f"{type(error).__name__}: {error}\n{notes}".rstrip()
            self._events.append(Failed(f"could not be asked while {doing}: {text}"))
        elif (reply := answer.result()).error is None:
            accept(reply.value)
        else:
            if reply.frame_counts is not None:
                self._note_counts(reply.frame_counts)
            if refuse is not None:
                refuse(f"{reply.error}:\n{reply.value}")
            else:
                self._events.append(Failed(f"raised {reply.error} while {doing}:\n{reply.value}"))

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
        """Called by the pulse: ask for the node's counts, if it has answered the last time."""
        if self._generation == _ENDED or not self.pid:  # nobody has said hello yet
            return
        try:
            if self.gone() is not None:
                self._bell.ring()
            elif self._beat is None or self._beat.done():
                self._asked_at = awake_s()
                self._beat = self._call("watched", self._note_counts, far.beat)
        except Exception:  # noqa: BLE001 - nobody else would hear of it
            text = traceback.format_exc().rstrip()
            self._events.append(Failed(f"cannot be watched:\n{text}"))
            self._bell.ring()

    def _note_counts(self, counts: Mapping[str, Any]) -> None:
        """Take in counts, unless newer ones overtook them."""
        if counts["number"] > self._reported.get("number", 0):
            self._reported = dict(counts)

    def gone(self) -> str | None:
        if self._generation == _ENDED:
            return None
        why = self._launcher.engine.gone(self._index)
        return None if why is None else f": {why}"

    def must_look(self) -> bool:
        return True

    def silent(self, timeout: float) -> str | None:
        asked = self._beat is not None and not self._beat.done()
        if not asked or awake_s() - self._asked_at <= timeout:
            return None
        return (
            f"does not answer: for timeout={timeout:g} s nothing came from it, so it is stopped, "
            "stuck or cut off"
        )

    def progress(self) -> Hashable:
        reported = self._reported
        return reported["collected"], reported["version"], reported["restarts"]

    def is_busy(self) -> bool:
        return False

    def activity(self) -> str:
        return f"is {self._doing}"

    def stuck(self, timeout: float) -> str:
        stages = ", ".join(
            f"worker {one['worker']} is {one['stage']}"
            for one in self._reported["workers"]
            if "stage" in one
        )
        text = f"hangs: it owes a batch and has made no frame for more than timeout={timeout:g} s"
        return f"{text}; {stages}" if stages else text

    def frame_counts(self) -> dict[str, Any]:
        return {**self._reported, "where": self.where}

    def refresh(self) -> None:
        self._awaited = None
        if self._generation == _ENDED or not self.pid:
            return
        if self._refreshing is None or self._refreshing.done():  # else it is not waited for again
            self._refreshing = self._call("watched", self._note_counts, far.beat)
            self._awaited = self._refreshing

    def is_fresh(self) -> bool:
        return self._awaited is None or self._awaited.done()

    # -- ending

    def tell_to_stop(self, timeout: float, close_env: bool) -> None:
        self._closing = None
        with contextlib.suppress(Exception):
            if self.name and self._launcher.engine.gone(self._index) is None:
                limit = max(0.2, timeout)
                self._closing = self._launcher.engine.call(
                    self._index, far.close_node, self.name, limit, close_env
                )

    def end(self, timeout: float) -> None:
        """Wait for the node to close its collector; processes are the launcher's to end."""
        if self._closing is not None:
            with contextlib.suppress(Exception):
                self._closing.result(timeout)
        self._generation = _ENDED

    def make_way(self, failure: WorkerError | None) -> None:
        try:
            if isinstance(failure, WorkerRaised) and self.gone() is None:
                self.tell_to_stop(1.0, True)
                self.end(2.0)
            else:
                self._launcher.replace(self._index)
        finally:
            self._generation = _ENDED

    def close(self) -> None:
        self._bell.close()


class Pulse(threading.Thread):
    """Asks all nodes of a collector how they are, until it is stopped."""

    def __init__(self, channels: Callable[[], list[NodeChannel]], every_s: float):
        super().__init__(name="lockstep-pulse", daemon=True)
        self._channels, self._every_s = channels, every_s
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        while True:
            due = time.monotonic() + self._every_s
            awake_s.begin()
            if self._stopped.wait(self._every_s):
                return
            awake_s.end(due)
            for channel in self._channels():
                channel.beat()

    def stop(self) -> None:
        self._stopped.set()
        if self is not threading.current_thread():
            self.join(2.0)
