"""Transports, as TorchRL's users know them: they move the weights of a single worker.

`scheme.create_transport(worker_idx=i)` presents a scheme as one; `MPTransport` needs no scheme.
"""

from __future__ import annotations

import contextlib
import queue
import time
import traceback
from typing import Any, Protocol, runtime_checkable

import torch

from sync.channel_interface import APPLIED, FAILED
from sync.errors import WorkerRaised, WorkerTimeout
from sync.model.binding import Binding, load_extra
from sync.model.block import NEVER, Snapshot, private_snapshot
from sync.model.strategy import Weights, WeightStrategy


@runtime_checkable
class TransportBackend(Protocol):
    """The methods of every transport.

    into: the `model` or the `weights` to receive into; returned if there are neither. `strategy`
        may say how.
    """

    def send_weights(self, weights: Weights) -> None: ...

    def receive_weights(self, timeout: float | None = None, **into: Any) -> Any: ...

    def setup_connection_and_weights_on_sender(self) -> None: ...

    def setup_connection_and_weights_on_receiver(self, *, worker_idx: int, **into: Any) -> Any: ...


def _target(
    weights: Weights | None = None, model: Any = None, strategy: WeightStrategy | None = None
) -> tuple[Weights | None, WeightStrategy | None]:
    """What the keyword arguments of a transport say: what to receive into, and how."""
    return model if model is not None else weights, strategy


class SchemeTransport:
    """Presents a scheme as the transport of one of its workers."""

    def __init__(self, scheme: Any, worker_idx: int):
        self.scheme = scheme
        self.worker_idx = worker_idx

    def send_weights(self, weights: Weights) -> None:
        """Send one version to this worker and wait until it is in use."""
        self.send_weights_async(weights)
        self.wait_ack()

    def send_weights_async(self, weights: Weights) -> None:
        """Send one version to this worker and return at once."""
        self.scheme.send_async(weights, worker_ids=[self.worker_idx])

    def wait_ack(self) -> None:
        """Wait until the worker uses what it was sent last."""
        self.scheme.wait_async(worker_ids=[self.worker_idx])

    def setup_connection_and_weights_on_sender(self) -> None:
        """Connect to the worker and send it the current weights."""
        self.scheme.connect(worker_idx=self.worker_idx)

    def setup_connection_and_weights_on_receiver(self, *, worker_idx: int, **into: Any) -> Any:
        """Connect, and take the first version into `model` or `weights`."""
        target, strategy = _target(**into)
        self.worker_idx = worker_idx
        self.scheme.strategy = strategy or self.scheme.strategy
        self.scheme.init_on_receiver(model=target, worker_idx=worker_idx)
        self.scheme.connect(background=False)
        return self.scheme.weights

    def receive_weights(self, timeout: float | None = None, **into: Any) -> Any:
        """Apply the newest version and return it; None if there is none.

        It is applied to the model or weights given when the connection was set up, and also to
        `model` or `weights` if they are different objects.
        """
        target, strategy = _target(**into)
        received = self.scheme.receive(timeout)
        if received is None or target is None or target is self.scheme.model:
            return received
        (strategy or self.scheme.strategy).apply_weights(target, received)
        return target


class MPTransport(SchemeTransport):
    """One worker's weights over queues, without a scheme. Messages carry the bytes themselves.

    weight_queue: any queue with `put` and `get`; a newer version replaces an unread one.
    ack_queue: the queue for the worker's answers; without it, sends do not wait.
    """

    def __init__(self, weight_queue: Any, ack_queue: Any = None, timeout: float = 10.0):
        super().__init__(None, worker_idx=0)
        self.weight_queue, self.ack_queue = weight_queue, ack_queue
        self.timeout = timeout
        self.addressed = self.acknowledged = NEVER
        self._binding: Binding | None = None

    # -- the sender's end

    def send_weights_async(self, weights: Weights) -> None:
        if self._binding is None or self._binding.target is not weights:
            self._binding = Binding(weights, WeightStrategy())
        self._binding.check(check_finite=True)
        block = private_snapshot(self._binding.layout)
        self.addressed += 1
        self._binding.pack(block, self.addressed)
        _newest(self.weight_queue)  # remove an unread version, which the new one replaces
        self.weight_queue.put((block.layout, block.buffer.numpy().tobytes()))

    def wait_ack(self) -> None:
        deadline = time.monotonic() + self.timeout
        who = f"worker {self.worker_idx}"
        while self.ack_queue is not None and self.acknowledged < self.addressed:
            try:
                kind, version, text = self.ack_queue.get(timeout=deadline - time.monotonic())
            except (queue.Empty, ValueError):
                raise WorkerTimeout(
                    self.worker_idx,
                    f"{who} did not acknowledge version {self.addressed} within {self.timeout:g} s",
                ) from None
            if kind == FAILED and version == self.addressed:
                text = f"{who} raised while applying weights:\n{text.rstrip()}"
                raise WorkerRaised(self.worker_idx, text)
            self.acknowledged = version

    def setup_connection_and_weights_on_sender(self) -> None:
        """There is nothing to set up: the queue is the connection."""

    # -- the receiver's end

    def setup_connection_and_weights_on_receiver(self, *, worker_idx: int, **into: Any) -> Any:
        self.worker_idx = worker_idx
        return self.receive_weights(self.timeout, **into)

    def receive_weights(self, timeout: float | None = None, **into: Any) -> Any:
        """Apply the newest version to `model` or `weights` and return it; None if there is none."""
        target, strategy = _target(**into)
        newest = _newest(self.weight_queue, timeout)
        if newest is None:
            return None
        layout, data = newest
        block = Snapshot(layout, torch.frombuffer(bytearray(data), dtype=torch.uint8))
        strategy = strategy or WeightStrategy()
        if target is None:
            names = [leaf.name for leaf in layout.leaves]
            target = dict(zip(names, block.views, strict=True)) | load_extra(block.extra)
        try:
            binding = Binding(target, strategy, layout)
            binding.load(block)
        except Exception:
            self._answer(FAILED, block.version, traceback.format_exc())
            raise
        self._answer(APPLIED, block.version, "")
        return binding.weights()

    def _answer(self, kind: str, version: int, text: str) -> None:
        if self.ack_queue is not None:
            self.ack_queue.put((kind, version, text))


def _newest(messages: Any, timeout: float | None = None) -> Any:
    """The newest item of a queue; older ones are dropped. None if there is none in time."""
    newest = None
    with contextlib.suppress(queue.Empty):
        newest = messages.get(timeout=timeout) if timeout else messages.get_nowait()
        while True:
            newest = messages.get_nowait()
    return newest
