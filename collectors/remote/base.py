"""The base of collectors on other machines, over torch.distributed, RPC or Ray."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from collectors.base import BaseCollector
from collectors.data.batch import Filled, Trajectories
from collectors.options import (
    ASYNC,
    NEVER_DONE,
    NO_POLICY,
    SINGLE,
    SYNC,
    check_graphs,
    per_worker,
    share_frames,
)
from collectors.remote.batches import stack
from collectors.remote.launcher import Launcher
from collectors.remote.node import NodeSpec
from collectors.remote.node_handle import NodeHandle, Pulse
from collectors.remote.options import (
    RemoteArguments,
    RemoteOptions,
    kind_of,
    places,
    share,
    taken,
)
from collectors.signatures import takes
from collectors.weights.models import POLICY, sends_weights
from collectors.weights.publisher import Publisher
from collectors.workers.handle import WorkerHandle
from collectors.workers.supervised_pool import check_alike
from collectors.workers.worker_spec import PASSED_ON
from sync import WeightSyncScheme


class RemoteCollector(BaseCollector):
    """Nodes, each with a local collector, make batches together (sync) or separately.

    `worker_ids`, `stats()["workers"]`, errors and a frame's ("collector", "worker") all count
    nodes; environments are counted over all of them. `num_collectors`, `num_workers_per_collector`,
    `sync` and `collector_class` are explained in `remote/options.py`, all other
    options in `collectors/options.py`.
    """

    _scheme_class: type[WeightSyncScheme]  # of the engine that reaches the nodes
    launcher: Launcher | None = None

    @takes(RemoteArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any):
        self.remote = remote = taken(RemoteOptions, options)
        per_node = remote.num_workers_per_collector
        n = remote.num_collectors or _count_nodes(create_env_fn, per_node)
        self.sync = self.shares_batch = remote.sync
        factories = share(create_env_fn, n, per_node, "create_env_fn")
        kwargs = options.pop("create_env_kwargs", None)
        self._env_kwargs = share(kwargs, n, per_node, "create_env_kwargs")
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
        several = kind_of(remote.hosted()) != SINGLE
        if options.get("record_schedule") is not None and several:
            raise ValueError(
                f"record_schedule with num_workers_per_collector={per_node}: the schedule of "
                "several workers on one node is not recorded; use one worker per node"
            )
        if options.get("copy") is False:
            raise ValueError("copy=False reuses the memory of a batch: it needs local workers")
        super().__init__(factories, policy, num_workers=n, **options)

    @property
    def _like(self) -> str:
        return SYNC if self.sync else ASYNC

    @abstractmethod
    def _launch(self, num_nodes: int) -> Launcher:
        """Start the nodes' processes, or find them."""

    # -- opening

    def _make_publisher(self) -> Publisher:
        options, n = self.options, self.num_workers
        self._frames_of = share_frames(options.frames_per_batch, n, each=not self.sync)
        if self.remote.collector_class is None:
            for frames in self._frames_of:
                share_frames(frames, self.remote.num_workers_per_collector, each=False)
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
        self._pulse = Pulse(self._nodes, min(1.0, self.options.timeout / 8))
        self._sent_policy = _on_cpu(self.policy)
        return [self._handle(self._spec(index)) for index in range(self.num_workers)]

    def _nodes(self) -> list[NodeHandle]:
        return [handle for handle in self.pool.handles if isinstance(handle, NodeHandle)]

    def _handle(self, spec: NodeSpec) -> WorkerHandle:
        assert self.launcher is not None
        numbering = Trajectories(spec.index, self.num_workers)
        return NodeHandle(spec, numbering, self.launcher, self.publisher)

    def _spec(self, index: int) -> NodeSpec:
        """What a node is told."""
        assert self.launcher is not None
        options, n = self.options, self.num_workers
        factory = self._factories[index]
        names = (*PASSED_ON, "start_timeout", "on_worker_failure", "max_restarts")
        shared = {name: getattr(options, name) for name in names}
        return NodeSpec(
            index=index,
            create_env_fn=per_worker(self.create_env_fn, n, "create_env_fn")[index],
            create_env_kwargs=per_worker(self._env_kwargs, n, "create_env_kwargs")[index],
            policy=None if factory is not None else self._sent_policy,
            policy_factory=factory,
            collector_class=self.remote.hosted(),
            num_workers=self.remote.num_workers_per_collector,
            frames=self._frames_of[index],
            seeds=self.seeds.of_worker(index * self.remote.num_workers_per_collector),
            policy_device=self.policy_devices[index],
            num_threads=options.num_sub_threads,
            as_arrays=self.launcher.as_arrays,
            options={**shared, "random_frames": math.ceil(options.init_random_frames / n)},
        )

    # -- batches

    def _assemble(self, taken: Sequence[Filled]) -> TensorDict:
        parts = [self._numbered(self.pool.handles[filled.worker], filled) for filled in taken]
        entries = [
            {key: (value.shape[2:], value.dtype) for key, value in part.items(True, True)}
            for part in parts
        ]
        check_alike([self.pool.handles[filled.worker] for filled in taken], entries, "sync=False")
        return stack(parts)

    def _numbered(self, handle: WorkerHandle, filled: Filled) -> TensorDict:
        """What a node handed over, with the numbers that hold over all nodes."""
        batch: TensorDict = filled.content.frames
        ids = torch.from_numpy(handle.trajectories.adopt(batch["collector", "traj_ids"].numpy()))
        batch["collector", "traj_ids"] = ids.masked_fill(~batch["collector", "mask"], 0)
        batch["collector", "worker"].fill_(handle.index)
        batch["collector", "env"].add_(handle.first_env)
        if not self.options.track_policy_version:
            del batch["policy_version"]
        return batch

    # -- control

    def _attributes(self, name: str) -> list[Any]:
        return [one for each in super()._attributes(name) for one in each]

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
