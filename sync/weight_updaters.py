"""TorchRL's weight updaters: one decides which weights go to which workers, and maps them.

They use schemes, which move the weights. New code calls a scheme or a collector instead.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from sync.model.block import NEVER
from sync.model.strategy import Weights, WeightStrategy
from sync.scheme import WeightSyncScheme
from sync.schemes.remote import RayWeightSyncScheme
from sync.schemes.shared_mem import SharedMemWeightSyncScheme


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
        self._push(*self.select(weights, worker_ids))

    def select(
        self, weights: Weights | None = None, worker_ids: int | Iterable[int] | None = None
    ) -> tuple[list[int], Weights]:
        """The workers that `update_weights` pushes to with these arguments, and what it pushes."""
        ids = self.all_worker_ids() if worker_ids is None else worker_ids
        chosen = ids if isinstance(ids, Iterable) else [ids]
        mapped = self._maybe_map_weights(self._get_server_weights() if weights is None else weights)
        return [worker for worker in chosen if not self._skip_update(worker)], mapped

    def _push(self, worker_ids: Sequence[int], weights: Weights) -> None:
        for worker in worker_ids:
            self._sync_weights_with_worker(worker, weights)

    def __call__(self, weights: Weights | None = None, worker_ids: Any = None) -> None:
        self.update_weights(weights, worker_ids)


class SchemeUpdater(RemoteWeightUpdaterBase):
    """Pushes through a scheme: one version for all addressed workers."""

    scheme: WeightSyncScheme

    def _sync_weights_with_worker(self, worker_id: int, server_weights: Weights) -> None:
        self._push([worker_id], server_weights)

    def _push(self, worker_ids: Sequence[int], weights: Weights) -> None:
        if worker_ids:
            self.scheme.send(weights, worker_ids=worker_ids)


class MultiProcessedRemoteWeightUpdate(SchemeUpdater):
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
        self._is_placed = devices is not None
        self._place(by_device if devices is None else map(torch.device, devices))

    def serve(self, devices: Iterable[torch.device | None]) -> None:
        """Serve one worker on each of these devices, unless `devices` was given.

        A worker without a device gets the only weights there are, else those of the CPU.
        """
        if not self._is_placed and self.scheme.version == NEVER:
            devices_with_weights = list(self.policy_weights)
            default = (
                devices_with_weights[0] if len(devices_with_weights) == 1 else torch.device("cpu")
            )
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


class RayRemoteWeightUpdater(SchemeUpdater):
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
            from sync.remote.ray_engine import RayEngine

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
