"""Transports: TorchRL's older interface, which moves the weights of a single worker.

`scheme.create_transport(worker_idx=i)` presents a scheme as the transport of one worker.
`MPTransport` needs no scheme: it works over any pair of queues.
"""

from __future__ import annotations

import contextlib
import queue
import time
import traceback
from typing import Any, Protocol, runtime_checkable

import torch

from sync.channel import APPLIED, FAILED
from sync.errors import WorkerRaised, WorkerTimeout
from sync.model.binding import Binding
from sync.model.layout import Layout
from sync.model.snapshot import NEVER, Snapshot, private_snapshot
from sync.model.strategy import Weights, WeightStrategy


@runtime_checkable
class TransportBackend(Protocol):
    """The methods of every transport."""

    def send_weights(self, weights: Weights) -> None: ...

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Weights | None = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any: ...

    def setup_connection_and_weights_on_sender(self) -> None: ...

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        weights: Weights | None = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any: ...


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

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        weights: Weights | None = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Connect, and take the first version into `model` or `weights`."""
        self.worker_idx = worker_idx
        target = model if model is not None else weights
        self.scheme.strategy = strategy or self.scheme.strategy
        self.scheme.init_on_receiver(model=target, worker_idx=worker_idx)
        self.scheme.connect(background=False)
        return self.scheme.weights

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Weights | None = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Apply the newest version and return it; None if there is none.

        It is applied to the model or weights given when the connection was set up, and also to
        `model` or `weights` if they are different objects.
        """
        received = self.scheme.receive(timeout)
        target = model if model is not None else weights
        if received is not None and target is not None and target is not self.scheme.model:
            (strategy or self.scheme.strategy).apply_weights(target, received)
            return target
        return received


class MPTransport:
    """One worker's weights over queues, without a scheme. Messages carry the bytes themselves.

    weight_queue: any queue with `put` and `get`; a newer version replaces an unread one.
    ack_queue: the queue for the worker's answers; without it, sends do not wait.
    """

    def __init__(self, weight_queue: Any, ack_queue: Any = None, timeout: float = 10.0):
        self.weight_queue = weight_queue
        self.ack_queue = ack_queue
        self.timeout = timeout
        self.worker_idx = 0
        self.strategy = WeightStrategy()
        self.addressed = self.acknowledged = NEVER
        self._binding: Binding | None = None

    # -- the sender's end

    def send_weights(self, weights: Weights) -> None:
        """Send one version to this worker and wait until it is in use."""
        self.send_weights_async(weights)
        self.wait_ack()

    def send_weights_async(self, weights: Weights) -> None:
        """Send one version to this worker and return at once."""
        if self._binding is None or self._binding.target is not weights:
            self._binding = Binding(weights, self.strategy)
        layout = self._binding.layout
        block = private_snapshot(layout)
        self.addressed += 1
        self._binding.pack(block, self.addressed, check_finite=True)
        _newest(self.weight_queue)  # remove an unread version, which the new one replaces
        self.weight_queue.put((layout, block.buffer.numpy().tobytes()))

    def wait_ack(self) -> None:
        """Wait until the worker uses what it was sent last."""
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
        """Take the first version into `model` or `weights`."""
        self.worker_idx = worker_idx
        return self.receive_weights(self.timeout, **into)

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Weights | None = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Apply the newest version to `model` or `weights` and return it; None if there is none."""
        newest = _newest(self.weight_queue, timeout)
        if newest is None:
            return None
        layout, data = newest
        block = Snapshot(layout, torch.frombuffer(bytearray(data), dtype=torch.uint8))
        try:
            target = model if model is not None else weights
            binding = self._bind(layout, target, strategy or self.strategy)
            binding.load(block)
        except Exception:
            self._answer(FAILED, block.version, traceback.format_exc())
            raise
        self._answer(APPLIED, block.version, "")
        return binding.weights()

    def _bind(self, layout: Layout, target: Weights | None, strategy: WeightStrategy) -> Binding:
        own = target is None
        if target is None:
            target = {
                leaf.name: torch.zeros(leaf.shape, dtype=leaf.dtype) for leaf in layout.leaves
            }
        if self._binding is None or self._binding.target is not target:
            self._binding = Binding(target, strategy, layout, any_extra=own)
        return self._binding

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
