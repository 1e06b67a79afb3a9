"""How versions get from a node to its workers.

    trainer                       node: weight relay                        workers
    -------                       ------------------                        -------
    scheme.send()         --->    receive it into the node's own model
                                  number_next(), send()             --->    apply it between steps
                          <---    acknowledge it                    <---    (with sync=True) applied

A version keeps its number, so that workers on nodes count as local ones do.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from collectors.weights.models import find_model
from collectors.weights.receiver import SchemeReceiver
from sync import SharedMemWeightSyncScheme, WeightSyncScheme
from sync.errors import WorkerDied, WorkerError
from sync.local.waiting import Doorbell


class WeightRelay:
    """Takes versions as they arrive, in a thread, and publishes them to the node's workers.

    policy: receives the weights. incoming: the trainer's schemes, by model. index: of the node.
    devices: of the workers' policies. sync: whether a version is acknowledged when they use it.
    base: the version of the run that the trainer's first one is.
    """

    def __init__(
        self,
        policy: Any,
        incoming: Mapping[str, WeightSyncScheme],
        *,
        index: int,
        devices: Sequence[torch.device | None],
        sync: bool,
        timeout: float,
    ):
        self.base = 0
        self.schemes: dict[str, WeightSyncScheme] = {}
        self._incoming = incoming
        self._receiver: SchemeReceiver | None = None
        self._workers: set[int] = set()  # that versions are published to
        self._lock = threading.RLock()  # one thread at a time receives, or connects a worker
        self._changed = threading.Condition()
        self._arrived: dict[str, int] = {}  # by model, the version that workers use or will use
        self._ended: str | None = None
        self._stop = Doorbell()
        self._thread = threading.Thread(target=self._run, name="lockstep-weights", daemon=True)
        for model_id, scheme in incoming.items():
            model = find_model(policy, model_id)
            scheme.init_on_receiver(model_id=model_id, context=self, model=model, worker_idx=index)
            self.schemes[model_id] = SharedMemWeightSyncScheme(
                scheme.strategy,
                sync=sync,
                timeout=timeout,
                check_finite=False,
                verify=scheme.verify,
            )
            self.schemes[model_id].init_on_sender(
                model_id=model_id, model=model, devices=list(devices)
            )

    def connect(self, worker: int) -> None:
        """Have a worker use the newest version; the first one waits for version 0."""
        with self._lock:
            if self._receiver is None and self._incoming:
                for scheme in self._incoming.values():
                    scheme.connect(background=False)
                self._receiver = SchemeReceiver(self._incoming)
                self._note_arrived()
                self._thread.start()
            for model_id, scheme in self.schemes.items():
                scheme.number_next(self._incoming[model_id].version)
                scheme.connect(worker_idx=worker)
            self._workers.add(worker)

    def disconnect(self, worker: int) -> None:
        """The worker has ended."""
        self._workers.discard(worker)

    def update_policy_weights_(self, weights: Any = None, *, model_id: str) -> None:
        """Publish a version that arrived to the workers. The trainer's schemes call this."""
        workers = sorted(self._workers)
        if not workers:
            return
        try:
            self.schemes[model_id].number_next(self._incoming[model_id].version)
            self.schemes[model_id].send(weights, workers)
        except WorkerError as error:
            if not all(isinstance(one, WorkerDied) for one in error.failures.values()):
                raise  # the trainer learns of a death otherwise, and replaces the worker

    def _run(self) -> None:
        assert self._receiver is not None
        try:
            while self._ended is None:
                self._receiver.wait(60.0, [self._stop.fd])
                with self._lock:
                    if self._ended is None:
                        self._receiver.take()
                self._note_arrived()
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for a version
            self._end(f"{type(error).__name__}: {error}")

    def _note_arrived(self) -> None:
        with self._changed:
            self._arrived = {name: scheme.version for name, scheme in self._incoming.items()}
            self._changed.notify_all()

    def arrived(self, versions: Mapping[str, int], timeout: float) -> dict[str, int]:
        """Wait until these versions, by model, have arrived, or were refused; those that have."""
        with self._changed:
            for model_id, version in versions.items():
                self._changed.wait_for(lambda: self._is_settled(model_id, version), timeout)  # noqa: B023
                if self._arrived[model_id] >= version or self._is_refused(model_id):
                    continue
                if self._ended is not None:
                    raise ConnectionError(f"this node takes no more weights: {self._ended}")
                raise TimeoutError(
                    f"version {version} of {model_id!r} did not come within {timeout:g} s; "
                    f"this node has version {self._arrived[model_id]}"
                )
            return {name: min(version, self._arrived[name]) for name, version in versions.items()}

    def _is_settled(self, model_id: str, version: int) -> bool:
        is_there = self._arrived[model_id] >= version
        return is_there or self._is_refused(model_id) or self._ended is not None

    def _is_refused(self, model_id: str) -> bool:
        return self._receiver is not None and self._receiver.has_refused(model_id)

    def _end(self, why: str) -> None:
        with self._changed:
            self._ended = why
            self._changed.notify_all()

    def close(self) -> None:
        self._end("it is closing")
        self._stop.ring()
        for scheme in (*self.schemes.values(), *self._incoming.values()):
            scheme.shutdown()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
