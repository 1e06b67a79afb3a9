"""The base of collectors on other machines, over torch.distributed, RPC or Ray."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import nn

from collectors.base import BaseCollector
from collectors.data.batch import Trajectories
from collectors.options import (
    ASYNC,
    NEVER_DONE,
    NO_POLICY,
    SYNC,
    check_graphs,
    per_worker,
    share_frames,
)
from collectors.remote.launcher import Launcher
from collectors.remote.node import NodeSpec
from collectors.remote.node_handle import NodeConnection, NodeHandle, Pulse
from collectors.remote.options import (
    RemoteArguments,
    RemoteOptions,
    kind_of,
    places,
    spread,
    taken,
)
from collectors.signatures import takes
from collectors.weights.models import POLICY, sends_weights
from collectors.weights.publisher import Publisher
from collectors.workers.handle import WorkerHandle
from collectors.workers.worker_spec import worker_specs
from sync import WeightSyncScheme


class RemoteCollector(BaseCollector):
    """Workers on nodes make batches all together (sync), or those of each node separately.

    `worker_ids` counts nodes, because a node gets weights once for all of its workers. Everything
    else counts workers. `num_collectors`, `num_workers_per_collector`, `sync` and
    `collector_class` are explained in `remote/options.py`, all other options in
    `collectors/options.py`.
    """

    _scheme_class: type[WeightSyncScheme]  # of the engine that reaches the nodes
    _apart = "sync=False"
    launcher: Launcher | None = None

    @takes(RemoteArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any):
        self.remote = remote = taken(RemoteOptions, options)
        per_node = remote.num_workers_per_collector
        self.num_nodes = n = remote.num_collectors or _count_nodes(create_env_fn, per_node)
        self.sync = self.shares_batch = remote.sync
        factories = spread(create_env_fn, n, per_node, "create_env_fn")
        kwargs = options.pop("create_env_kwargs", None)
        self._env_kwargs = spread(kwargs, n, per_node, "create_env_kwargs")
        device, name = options.pop("policy_device", None), "policy_device"
        if device is None:
            device, name = options.get("device"), "device"
        elif policy is None and options.get("policy_factory") is None:
            raise ValueError(f"policy_device: {NO_POLICY}")
        self.policy_devices = places(device, n, name)
        if options.get("cudagraph_policy"):
            check_graphs(self.policy_devices)
        for name, message in _REFUSED.items():
            if options.get(name) is not None:
                raise ValueError(message.format(kind=self.kind, value=options[name]))
        if not remote.sync and options.get("reset_when_done") is False:
            raise ValueError(NEVER_DONE.format(f"{self.kind} with sync=False"))
        if options.get("copy") is False:
            raise ValueError("copy=False reuses the memory of a batch: it needs local workers")
        super().__init__(factories, policy, num_workers=n * per_node, **options)

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
    def _launch(self, num_nodes: int) -> Launcher:
        """Start the nodes' processes, or find them."""

    # -- opening

    def _make_publisher(self) -> Publisher:
        options, n = self.options, self.num_nodes
        self._frames_of = self._share_frames()
        self._factories = per_worker(options.policy_factory, n, "policy_factory")
        schemes = self._given_schemes()
        source = self._source()
        if schemes is None and sends_weights(source, schemes):
            schemes = {POLICY: self._scheme_class()}
        self.launcher = self._launch(n)
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
        """The frames of each worker in a batch, from those of all nodes, or of each (async)."""
        per_node = self.remote.num_workers_per_collector
        frames_of: list[int] = []
        for frames in share_frames(
            self.options.frames_per_batch, self.num_nodes, each=not self.sync
        ):
            frames_of += share_frames(frames, per_node, each=self._group_size == 1)
        return frames_of

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
        per_node, sent = self.remote.num_workers_per_collector, _on_cpu(self.policy)
        self.nodes = [self._node(index, sent) for index in range(self.num_nodes)]
        self._pulse = Pulse(self.nodes, min(1.0, self.options.timeout / 8))
        specs = worker_specs(
            self.options,
            self.seeds,
            factories=self.create_env_fn,
            env_kwargs=self._env_kwargs,
            frames=self._frames_of,
            num_blocks=1 if self.sync else self.options.batches_ahead,
            devices=[device for device in self.policy_devices for _ in range(per_node)],
        )
        n = self.num_workers
        return [
            NodeHandle(index, spec, Trajectories(index, n), self.nodes[index // per_node])
            for index, spec in enumerate(specs)
        ]

    def _node(self, index: int, policy: Any) -> NodeConnection:
        assert self.launcher is not None
        options, per_node = self.options, self.remote.num_workers_per_collector
        factory = self._factories[index]
        spec = NodeSpec(
            index=index,
            num_workers=per_node,
            policy=None if factory is not None else policy,
            policy_factory=factory,
            schemes={},
            devices=[self.policy_devices[index]] * per_node,
            # Workers that apply weights only between batches are not waited for.
            sync=options.apply_at == "step",
            timeout=options.timeout,
            resume_timeout=options.resume_timeout,
            as_arrays=self.launcher.as_arrays,
        )
        return NodeConnection(spec, self.launcher, self.publisher)

    # -- ending

    def _close(self, timeout: float, close_env: bool) -> None:
        left = 0.0  # after an interrupt, processes are ended without waiting
        try:
            super()._close(timeout, close_env)
            if hasattr(self, "_pulse"):
                self._pulse.stop()
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


def _count_nodes(create_env_fn: Any, num_workers: int) -> int:
    """How many nodes these factories are for: one each, or one for `num_workers` of them."""
    if not isinstance(create_env_fn, Sequence) or not create_env_fn:
        return 1
    nested = any(isinstance(one, Sequence) for one in create_env_fn)
    return len(create_env_fn) if nested else math.ceil(len(create_env_fn) / num_workers)


def _on_cpu(policy: Any) -> Any:
    """The policy, or a copy of it on the CPU: a node may lack the trainer's devices."""
    if isinstance(policy, nn.Module):
        tensors = [*policy.parameters(), *policy.buffers()]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return copy.deepcopy(policy).cpu()
    return policy
