"""TorchRL's older interfaces: spellings of a scheme's calls, transports and updaters.

New code uses a scheme. An updater decides which weights go to which workers, and how they are
mapped; a scheme moves them. A transport moves the weights of a single worker:
`scheme.create_transport(worker_idx=i)` presents a scheme as one, and `MPTransport` needs no scheme.
"""

from __future__ import annotations

import contextlib
import queue
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from sync.channel_interface import APPLIED, FAILED
from sync.errors import WorkerRaised, WorkerTimeout
from sync.model.binding import Binding, load_extra
from sync.model.block import NEVER, Snapshot, private_snapshot
from sync.model.strategy import Weights, WeightStrategy
from sync.scheme import WeightSyncScheme
from sync.schemes.remote import RayWeightSyncScheme
from sync.schemes.shared_mem import SharedMemWeightSyncScheme
from sync.sender_form import resolve_model

# -- spellings


def _prepare_weights(
    scheme: WeightSyncScheme,
    weights: Any = None,
    model_id: str | None = None,
    strategy: WeightStrategy | None = None,
    context: Any = None,
) -> Any:
    """Weights in the strategy's form: the given ones, else those of `context` or the model."""
    if weights is None and context is not None:
        weights = resolve_model(context, model_id or scheme.model_id or "")
    if weights is None:
        weights = scheme.weights
    return None if weights is None else (strategy or scheme.strategy).extract_weights(weights)


def _create_transport(scheme: WeightSyncScheme, *, worker_idx: int = 0) -> SchemeTransport:
    """This scheme as the transport of one worker."""
    if not scheme.num_workers:
        raise RuntimeError("call create_transport() between init_on_sender() and shutdown()")
    return SchemeTransport(scheme, scheme.check_worker(worker_idx))


_SPELLINGS: dict[str, Callable[..., Any]] = {
    "init_on_worker": lambda scheme, **how: scheme.init_on_receiver(**how),
    "synchronize_weights": lambda scheme, **how: scheme.connect(**how),
    "update_weights": lambda scheme, weights=None, workers=None: scheme.send(weights, workers),
    "prepare_weights": _prepare_weights,
    "create_transport": _create_transport,
    **dict.fromkeys(
        ("create_sender", "create_receiver", "get_sender", "get_receiver"), lambda scheme: scheme
    ),
}
for _name, _spelling in _SPELLINGS.items():
    setattr(WeightSyncScheme, _name, _spelling)

# -- transports


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


# -- updaters


class _Updater:
    """An updater serves at most one collector, and does not keep it alive."""

    _collector: weakref.ref[Any] | None = None

    def register_collector(self, collector: Any) -> None:
        """Set the collector whose workers the updater serves. Call it only once."""
        if self._collector is not None:
            raise RuntimeError(f"{type(self).__name__} already serves a collector")
        self._collector = weakref.ref(collector)

    @property
    def collector(self) -> Any:
        """The collector, or None if there is none or it is gone."""
        return None if self._collector is None else self._collector()


class LocalWeightUpdaterBase(_Updater, ABC):
    """Lives in a worker and pulls weights from a server when asked."""

    @abstractmethod
    def _get_server_weights(self) -> Weights:
        """The server's weights as they are now."""

    @abstractmethod
    def _get_local_weights(self) -> Weights:
        """The weights to be updated."""

    def _maybe_map_weights(self, server_weights: Weights, local_weights: Weights) -> Weights:
        """The server's weights for this worker; unchanged unless overridden."""
        return server_weights

    def _update_local_weights(self, local_weights: Weights, mapped_weights: Weights) -> None:
        WeightStrategy().apply_weights(local_weights, mapped_weights)

    def update_weights(self, weights: Weights | None = None) -> None:
        """Pull, map and apply weights. Given `weights` are not pulled."""
        local_weights = self._get_local_weights()
        server_weights = self._get_server_weights() if weights is None else weights
        mapped_weights = self._maybe_map_weights(server_weights, local_weights)
        self._update_local_weights(local_weights, mapped_weights)

    def __call__(self, weights: Weights | None = None) -> None:
        self.update_weights(weights)


class VanillaLocalWeightUpdater(LocalWeightUpdaterBase):
    """Pulls with `weight_getter()` into `policy_weights`."""

    def __init__(self, weight_getter: Callable[[], Weights], policy_weights: Weights):
        self.weight_getter = weight_getter
        self.policy_weights = policy_weights

    def _get_server_weights(self) -> Weights:
        return self.weight_getter()

    def _get_local_weights(self) -> Weights:
        return self.policy_weights


class RemoteWeightUpdaterBase(_Updater, ABC):
    """Lives in the trainer and pushes weights to workers."""

    @abstractmethod
    def _sync_weights_with_worker(self, worker_id: int, server_weights: Weights) -> None:
        """Send these weights to one worker."""

    @abstractmethod
    def _get_server_weights(self) -> Weights:
        """The weights to push when none are given."""

    @abstractmethod
    def all_worker_ids(self) -> Sequence[int]:
        """The workers that `update_weights()` addresses by default."""

    def _maybe_map_weights(self, server_weights: Weights) -> Weights:
        """The weights for the workers; unchanged unless overridden."""
        return server_weights

    def _skip_update(self, worker_id: int) -> bool:
        """Whether this worker is left out this time; never unless overridden."""
        return False

    def update_weights(
        self, weights: Weights | None = None, worker_ids: int | Iterable[int] | None = None
    ) -> None:
        """Push `weights`, or the server's, to `worker_ids`, or to all."""
        ids = self.all_worker_ids() if worker_ids is None else worker_ids
        chosen = ids if isinstance(ids, Iterable) else [ids]
        mapped = self._maybe_map_weights(self._get_server_weights() if weights is None else weights)
        self._push([worker for worker in chosen if not self._skip_update(worker)], mapped)

    def _push(self, worker_ids: Sequence[int], weights: Weights) -> None:
        for worker in worker_ids:
            self._sync_weights_with_worker(worker, weights)

    def __call__(self, weights: Weights | None = None, worker_ids: Any = None) -> None:
        self.update_weights(weights, worker_ids)


class _SchemeUpdater(RemoteWeightUpdaterBase):
    """Pushes through a scheme: one version for all addressed workers."""

    scheme: WeightSyncScheme

    def _sync_weights_with_worker(self, worker_id: int, server_weights: Weights) -> None:
        self._push([worker_id], server_weights)

    def _push(self, worker_ids: Sequence[int], weights: Weights) -> None:
        if worker_ids:
            self.scheme.send(weights, worker_ids=worker_ids)


class MultiProcessedRemoteWeightUpdate(_SchemeUpdater):
    """Pushes to the workers of this machine through a `SharedMemWeightSyncScheme`.

    get_server_weights: returns the weights to push when none are given.
    policy_weights: the initial weights of workers on each device.
    devices: the device of each worker. By default those of the collector that has this as its
        `weight_updater`; without a collector, one worker per device.

    Pass `scheme` to the workers, which call its `init_on_receiver` and `connect`.
    """

    def __init__(
        self,
        get_server_weights: Callable[[], Weights] | None,
        policy_weights: Mapping[Any, Weights],
        *,
        devices: Sequence[Any] | None = None,
    ):
        by_device = {torch.device(device): weights for device, weights in policy_weights.items()}
        self.get_server_weights = get_server_weights
        self.policy_weights = by_device
        self.scheme = SharedMemWeightSyncScheme(per_worker_weights=True)
        self._told = devices is not None
        self._place(by_device if devices is None else map(torch.device, devices))

    def serve(self, devices: Iterable[torch.device | None]) -> None:
        """Serve one worker on each of these devices, unless `devices` was given.

        A worker without a device gets the only weights there are, else those of the CPU.
        """
        if not self._told and self.scheme.version == NEVER:
            known = list(self.policy_weights)
            default = known[0] if len(known) == 1 else torch.device("cpu")
            self._place(default if device is None else device for device in devices)

    def _place(self, devices: Iterable[torch.device]) -> None:
        placed = list(devices)
        if missing := sorted({str(one) for one in placed if one not in self.policy_weights}):
            raise ValueError(f"policy_weights has no entry for {', '.join(missing)}")
        weights = [self.policy_weights[device] for device in placed]
        self.scheme.init_on_sender(params_map=dict(enumerate(weights)))

    def all_worker_ids(self) -> Sequence[int]:
        return range(self.scheme.num_workers)

    def _get_server_weights(self) -> Weights:
        if self.get_server_weights is None:
            raise ValueError("update_weights() without weights needs get_server_weights")
        return self.get_server_weights()


class RayRemoteWeightUpdater(_SchemeUpdater):
    """Pushes to Ray actors through a `RayWeightSyncScheme`.

    policy_weights: the weights to push when none are given, and those that workers start from.
    remote_collectors: the actors' handles; worker i is the i-th. None: the actors of the
        `RayCollector` that has this as its `weight_updater`; they start with its policy.
    max_interval: how many updates in a row skip a worker: with 3, every fourth call updates it.

    Pass `scheme` to the actors, which call its `init_on_receiver` and `connect`.
    """

    def __init__(
        self,
        policy_weights: Weights,
        remote_collectors: Sequence[Any] | None = None,
        max_interval: int = 0,
    ):
        if max_interval < 0:
            raise ValueError(f"max_interval={max_interval}: expected 0 (always) or more")
        self.policy_weights = policy_weights
        self.max_interval = max_interval
        self._left_out: dict[int, int] = {}
        self.scheme = scheme = RayWeightSyncScheme()
        if remote_collectors is not None:
            from sync.remote.ray import RayEngine

            devices = ["cpu"] * len(remote_collectors)
            scheme.attach(RayEngine(remote_collectors))
            scheme.init_on_sender(weights=policy_weights, devices=devices)

    def all_worker_ids(self) -> Sequence[int]:
        if not self.scheme.initialized_on_sender:
            raise RuntimeError(
                "RayRemoteWeightUpdater has no workers: pass it remote_collectors, or pass it to a "
                "RayCollector as weight_updater"
            )
        if self.collector is not None:  # it may have places without an actor
            return [handle.index for handle in self.collector.pool.handles]
        return range(self.scheme.num_workers)

    def _get_server_weights(self) -> Weights:
        return self.policy_weights

    def _skip_update(self, worker_id: int) -> bool:
        """Whether this worker is skipped this time."""
        left_out = self._left_out.get(worker_id, self.max_interval)
        skip = left_out < self.max_interval
        self._left_out[worker_id] = left_out + 1 if skip else 0
        return skip
