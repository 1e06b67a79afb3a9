"""The base of collectors on other machines, over torch.distributed, RPC or Ray."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import nn

from collectors.base import BaseCollector
from collectors.data.batch import TrajectoryNumbers
from collectors.options.collector_options import (
    ASYNC,
    NEVER_DONE,
    NO_POLICY,
    SYNC,
    check_graphs,
    per_worker,
    share_frames,
    takes,
)
from collectors.options.remote_options import (
    RemoteArguments,
    RemoteOptions,
    kind_of,
    places,
    spread,
    taken,
)
from collectors.remote.remote_handle import Launcher, RemoteHandle
from collectors.weights.model_ids import POLICY, sends_weights
from collectors.weights.publisher import Publisher
from collectors.workers.handle import WorkerHandle
from collectors.workers.worker_spec import worker_specs
from sync import WeightSyncScheme


class RemoteCollector(BaseCollector):
    """Workers elsewhere make batches all together (sync), or those of each collector separately.

    Each worker is a process of its own, the engine's peer of the same number. In
    `collectors/options/`, `remote_options.py` explains `num_collectors`, `sync`, `collector_class`
    and `num_workers_per_collector`, and `collector_options.py` all other options.
    """

    _scheme_class: type[WeightSyncScheme]  # of the engine that reaches the workers
    _apart = "sync=False"
    launcher: Launcher | None = None

    @takes(RemoteArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any):
        self.remote = remote = taken(RemoteOptions, options)
        each = remote.num_workers_per_collector
        self._num_collectors = n = remote.num_collectors or _count(create_env_fn, each)
        self.sync = self.shares_batch = remote.sync
        factories = spread(create_env_fn, n, each, "create_env_fn")
        kwargs = options.pop("create_env_kwargs", None)
        self._env_kwargs = spread(kwargs, n, each, "create_env_kwargs")
        device, name = options.pop("policy_device", None), "policy_device"
        if device is None:
            device, name = options.get("device"), "device"
        elif policy is None and options.get("policy_factory") is None:
            raise ValueError(f"policy_device: {NO_POLICY}")
        self.policy_devices = [one for one in places(device, n, name) for _ in range(each)]
        if options.get("cudagraph_policy"):
            check_graphs(self.policy_devices)
        for name, message in _REFUSED.items():
            if options.get(name) is not None:
                raise ValueError(message.format(kind=self.kind, value=options[name]))
        if not remote.sync and options.get("reset_when_done") is False:
            raise ValueError(NEVER_DONE.format(f"{self.kind} with sync=False"))
        if options.get("copy") is False:
            raise ValueError("copy=False reuses the memory of a batch: it needs local workers")
        super().__init__(factories, policy, num_workers=n * each, **options)

    @property
    def _like(self) -> str:
        return SYNC if self.sync else ASYNC

    @property
    def _group_size(self) -> int:
        if self.sync:
            return self.num_workers
        alone = kind_of(self.remote.collector_class) == ASYNC
        return 1 if alone else self.remote.num_workers_per_collector

    @abstractmethod
    def _launch(self) -> Launcher:
        """Start the workers' processes, or find them."""

    # -- opening

    def _make_publisher(self) -> Publisher:
        options, each = self.options, self.remote.num_workers_per_collector
        self._frames_of = self._share_frames()
        factories = per_worker(options.policy_factory, self._num_collectors, "policy_factory")
        self._factories = [factory for factory in factories for _ in range(each)]
        schemes = self._given_schemes()
        source = self._source()
        if schemes is None and sends_weights(source, schemes):
            schemes = {POLICY: self._scheme_class()}
        self.launcher = self._launch()
        for scheme in (schemes or {}).values():
            scheme.attach(self.launcher.engine)
        return Publisher(
            source,
            schemes or {},
            devices=self.policy_devices,
            timeout=options.timeout,
            updater=options.weight_updater,
        )

    def _share_frames(self) -> list[int]:
        """The frames of each worker in a batch, which is of all of them, or of one collector."""
        total, n = self.options.frames_per_batch, self._num_collectors
        workers, alone = self.remote.num_workers_per_collector, self._group_size == 1
        shares = share_frames(total, n, each=not self.sync)
        return [one for share in shares for one in share_frames(share, workers, each=alone)]

    def _given_schemes(self) -> Any:
        """The schemes that were given, or the updater's; None if there is neither."""
        schemes, name = self.options.weight_sync_schemes, "weight_sync_schemes"
        updater = self.options.weight_updater
        if (scheme := getattr(updater, "scheme", None)) is not None:
            schemes, name = {POLICY: scheme}, f"weight_updater={type(updater).__name__}"
        for model_id, scheme in (schemes or {}).items():
            if not isinstance(scheme, self._scheme_class):
                raise ValueError(
                    f"{name}: {model_id!r} has a {type(scheme).__name__}; "
                    f"{self.kind} takes {self._scheme_class.__name__}"
                )
            if scheme.initialized_on_sender:
                hint = "init_on_sender()" if updater is None else "remote_collectors"
                raise ValueError(
                    f"{name} already has workers, but {self.kind} creates its own: omit {hint}"
                )
        return schemes

    def _make_handles(self) -> list[WorkerHandle]:
        assert self.launcher is not None
        n, policy = self.num_workers, self.policy
        specs = worker_specs(
            self.options,
            self.seeds,
            factories=self.create_env_fn,
            env_kwargs=self._env_kwargs,
            frames=self._frames_of,
            num_blocks=1 if self.sync else self.options.batches_ahead,
            devices=self.policy_devices,
        )
        for spec, factory in zip(specs, self._factories, strict=True):
            spec.policy_factory = factory
            spec.policy = None if factory is not None else _on_cpu(policy)
        return [
            RemoteHandle(i, spec, TrajectoryNumbers(i, n), self.launcher, self.publisher)
            for i, spec in enumerate(specs)
        ]

    # -- ending

    def _close(self, timeout: float, close_env: bool) -> None:
        left = 0.0  # after an interrupt, processes are ended without waiting
        try:
            super()._close(timeout, close_env)
            if self.launcher is not None and hasattr(self, "publisher"):
                self.publisher.shutdown()  # while the engine can still send
            left = timeout
        finally:
            if self.launcher is not None:
                self.launcher.close(left)


_REFUSED = {
    "num_workers": "num_workers={value}: {kind} has num_collectors={value}, or workers in each of "
    "them, num_workers_per_collector={value}",
    "start_method": "start_method={value!r}: {kind} starts no workers here",
    "cat_results": "cat_results={value!r} is not for {kind}, whose batches lie one below the other",
    "preemptive_threshold": "preemptive_threshold={value}: {kind} cannot stop remote batches early",
}


def _count(create_env_fn: Any, num_workers: int) -> int:
    """How many collectors these factories are for: one each, or one for `num_workers` of them."""
    if not isinstance(create_env_fn, Sequence) or not create_env_fn:
        return 1
    nested = any(isinstance(one, Sequence) for one in create_env_fn)
    return len(create_env_fn) if nested else math.ceil(len(create_env_fn) / num_workers)


def _on_cpu(policy: Any) -> Any:
    """The policy, or a copy of it on the CPU: workers may lack the trainer's devices."""
    if isinstance(policy, nn.Module):
        tensors = [*policy.parameters(), *policy.buffers()]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return copy.deepcopy(policy).cpu()
    return policy
