"""A worker in another machine's process, for the trainer: messages are calls through the engine.

The engine's threads queue what the worker sends until the pool receives it.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from typing import Any

import cloudpickle
import torch

from collectors.data.batch import TrajectoryNumbers
from collectors.remote import host
from collectors.remote.host import RemoteSetup, WorkerReport
from collectors.rollout.frame_block import FrameBlock, from_message
from collectors.weights.publisher import Publisher
from collectors.workers.handle import WorkerHandle
from collectors.workers.messages import Event, Failed, Filled
from collectors.workers.worker_spec import WorkerSpec, pickled
from sync.errors import WorkerTimeout
from sync.local.memory import tensor_over
from sync.local.waiting import Doorbell
from sync.remote.engine import Engine, PeerDied

_BEAT_S = 1.0  # how often a worker that sends nothing gives a sign of life
_END_S = 1.0


class Launcher(ABC):
    """Processes of workers, started by the constructor; worker i is the engine's peer i."""

    engine: Engine

    @abstractmethod
    def replace(self, worker: int) -> None:
        """End a worker's process, if it lives, and start another; or raise `CannotReplace`."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """End the processes that were started here; a second call does nothing."""


class RemoteHandle(WorkerHandle):
    """The worker of the engine's peer of the same number."""

    spec: WorkerSpec

    def __init__(
        self,
        index: int,
        spec: WorkerSpec,
        trajectories: TrajectoryNumbers,
        launcher: Launcher,
        publisher: Publisher,
    ):
        super().__init__(index, spec, trajectories, str(spec.policy_device or "cpu"))
        self.pid = 0
        self._launcher, self._publisher = launcher, publisher
        self._bell = Doorbell()
        self._lock = threading.RLock()
        self._events: deque[Event] = deque()
        self._blocks: dict[int, FrameBlock] = {}  # of batches in `_events`, by their serials
        self._token = ""  # of the worker in its process; empty if nothing that arrives matters
        self._report = WorkerReport(0, 0, "starting", -1)
        self._asked: Future[Any] | None = None  # the report that `refresh` asked for
        self._closing: Future[Any] | None = None
        self._sent = 0

    def _call(self, function: Any, *args: Any) -> Future[Any]:
        return self._launcher.engine.call(self.index, function, self._token, *args)

    # -- messages

    def start(self, spec: WorkerSpec) -> None:
        with self._lock:
            self._token = secrets.token_hex(8)
            self._events.clear()
            self._blocks.clear()
            self._asked = self._closing = None
            self._sent = 0
        self.where, self.pid = self._launcher.engine.describe(self.index), 0
        base, schemes = self._publisher.base, self._publisher.schemes
        setup = RemoteSetup(self.index, spec, schemes, base)
        data = pickled(setup.spec) and cloudpickle.dumps(setup)  # the former names what cannot be
        opened = self._call(host.open_worker, data)
        token = self._token
        opened.add_done_callback(lambda done: self._note_opened(token, done))

    def _note_opened(self, token: str, opened: Future[Any]) -> None:
        if token != self._token or self._failed(opened):
            return
        machine, self.pid = opened.result()
        self.where += f", pid {self.pid} on {machine}"
        self._listen()

    def _listen(self) -> None:
        token, call = self._token, self._call(host.events_of, _BEAT_S)
        call.add_done_callback(lambda done: self._note_events(token, done))

    def _note_events(self, token: str, call: Future[Any]) -> None:
        """Queue what came, and ask for more."""
        with self._lock:
            if token != self._token or self._failed(call):
                return
            events, report, has_ended = call.result()
            self._note_report(report)
            for event, layout, arrays in events:
                if isinstance(event, Filled):
                    tensors = [_tensor(array) for array in arrays]
                    self._blocks[event.serial] = from_message(layout, tensors)
                self._events.append(event)
            if has_ended:
                self._events.append(Failed("ended"))
        self._bell.ring()
        if not has_ended:
            self._listen()

    def _failed(self, call: Future[Any]) -> bool:
        """Whether a call has failed, which is queued."""
        error = None if call.cancelled() else call.exception()
        if error is None:
            return call.cancelled()
        if isinstance(error, PeerDied):
            failed = Failed(f"died while {self._report.stage}: {error}", died=True)
        else:
            text = "".join(traceback.format_exception(error)).rstrip()
            failed = Failed(f"could not be called while {self._report.stage}:\n{text}")
        self._events.append(failed)
        self._bell.ring()
        return True

    def order(self, serial: int, versions: Mapping[str, int]) -> None:
        self._send("collect", serial % self.spec.num_blocks, serial, versions)

    def ask(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        self._send("call", number, method, args)

    def _send(self, *message: Any) -> None:
        number, self._sent = self._sent, self._sent + 1
        call, token = self._call(host.send_to, number, cloudpickle.dumps(message)), self._token
        call.add_done_callback(lambda done: token == self._token and self._failed(done))

    def receive(self) -> list[Event]:
        self._bell.silence()
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    def frames(self, filled: Filled) -> FrameBlock:
        return self._blocks.pop(filled.serial)

    def fds(self) -> list[int]:
        return [self._bell.fd]

    # -- watching

    def _note_report(self, report: WorkerReport) -> None:
        if report.collected >= self._report.collected:  # reports may overtake each other
            self._report = report

    def gone(self) -> str | None:
        why = self._launcher.engine.gone(self.index) if self._token else None
        return None if why is None else f": {why}"

    def progress(self) -> Hashable:
        return self._report

    def activity(self) -> str:
        return f"is {self._report.stage}"

    def stuck(self, timeout: float) -> str:
        return (
            f"hangs: it owes a batch and has made no frame for more than timeout={timeout:g} s; "
            f"it {self.activity()}"
        )

    def reported_counts(self) -> dict[str, Any]:
        report = self._report
        return {
            "where": self.where,
            "pid": self.pid or None,
            "collected": report.collected,
            "stage": report.stage,
            "version": report.version,
        }

    def refresh(self) -> None:
        if self.pid and self.gone() is None and (self._asked is None or self._asked.done()):
            token, self._asked = self._token, self._call(host.report_of)
            self._asked.add_done_callback(lambda done: self._note_answer(token, done))

    def _note_answer(self, token: str, call: Future[WorkerReport]) -> None:
        with self._lock:
            if token == self._token and not call.cancelled() and call.exception() is None:
                self._note_report(call.result())
        self._bell.ring()

    def is_fresh(self) -> bool:
        return self._asked is None or self._asked.done()

    def start_generation(self) -> None:
        super().start_generation()
        self._report = WorkerReport(0, 0, "starting", -1)  # its frames are counted now

    # -- ending

    def tell_to_stop(self, timeout: float, close_env: bool) -> None:
        with contextlib.suppress(Exception):
            if self._closing is None and self.pid and self.gone() is None:
                self._closing = self._call(host.close_worker, max(0.2, timeout), close_env)

    def end(self, timeout: float) -> None:
        """Processes are the launcher's to end."""
        if self._closing is not None:
            with contextlib.suppress(Exception):
                self._closing.result(timeout)
        self._token = ""

    def make_way(self) -> None:
        try:
            if not self._was_ended():
                self._launcher.replace(self.index)
        finally:
            self._token = ""

    def _was_ended(self) -> bool:
        """Whether the process lives, and the worker in it has ended."""
        if self.gone() is not None or isinstance(self.failure, WorkerTimeout):
            return False
        with contextlib.suppress(Exception):
            return bool(self._call(host.close_worker, _END_S, True).result(2 * _END_S))
        return False

    def close(self) -> None:
        self._bell.close()


def _tensor(array: Any) -> torch.Tensor:
    return tensor_over(array) if array.size else torch.empty(0, dtype=torch.uint8)
