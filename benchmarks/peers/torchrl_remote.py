"""torchrl's blocking `send` over Ray, RPC or torch.distributed; `torchrl_common` has the protocol.

Run from the repository root, in the peers' environment (`make peers`):

    .venv-peers/bin/python -m benchmarks.peers.torchrl_remote

Workers hold one model each and do nothing but receive, as torchrl's collectors would have them do:
in a background thread (distributed), or when they are told to by a call (rpc, ray).
"""

import multiprocessing
import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc
from torchrl.weight_update import (
    DistributedWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    WeightSyncScheme,
)

from benchmarks.models import build_model, corner_values
from benchmarks.peers.torchrl_common import end_with_parent, serve

TIMEOUT_S = 60.0


class Context:
    """What torchrl's schemes ask of a collector."""

    def __init__(self, model: nn.Module, num_workers: int, worker_idx: int | None = None):
        self.policy = model
        self.num_workers = num_workers
        self.worker_idx = worker_idx

    def get_model(self, model_id: str) -> nn.Module:
        return self.policy


class Receiver:
    """A worker: a model, and torchrl's receiving end for it."""

    def __init__(self, model: str, num_workers: int, worker_idx: int, scheme: WeightSyncScheme):
        torch.set_num_threads(1)
        self.context = Context(build_model(model), num_workers, worker_idx)
        self.scheme = scheme
        scheme.init_on_receiver(model_id="policy", context=self.context, worker_idx=worker_idx)

    def connect(self) -> None:
        self.scheme.connect(worker_idx=self.context.worker_idx)

    def _receive_weights_scheme(self, model_version: int | None = None) -> None:
        self.scheme.receive()

    def corners(self) -> list[float]:
        return corner_values(self.context.policy)


receiver: Receiver | None = None


def open_receiver(*args: Any) -> Receiver:
    global receiver
    receiver = Receiver(*args)
    return receiver


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join_groups(rank: int, world: int, ports: list[int], *, with_rpc: bool) -> None:
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
    limit = timedelta(seconds=TIMEOUT_S)
    if with_rpc:
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=limit)
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{ports[1]}", rpc_timeout=TIMEOUT_S
        )
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world, rpc_backend_options=options)


def work_distributed(scheme: Any, model: str, rank: int, world: int, ports: list[int]) -> None:
    torch.set_num_threads(1)
    join_groups(rank, world, ports, with_rpc=False)
    open_receiver(model, world - 1, rank, scheme).connect()
    end_with_parent()
    while True:
        time.sleep(60.0)


def work_rpc(model: str, rank: int, world: int, ports: list[int]) -> None:
    torch.set_num_threads(1)
    join_groups(rank, world, ports, with_rpc=True)
    end_with_parent()
    while True:
        time.sleep(60.0)


def open_distributed(model: nn.Module, name: str, workers: int) -> tuple[WeightSyncScheme, Any]:
    ports = [free_port()]
    scheme = DistributedWeightSyncScheme(timeout=TIMEOUT_S)
    context = Context(model, workers)
    scheme.init_on_sender(model_id="policy", context=context, num_workers=workers)
    spawn = multiprocessing.get_context("spawn")
    for rank in range(1, workers + 1):
        args = (scheme, name, rank, workers + 1, ports)
        spawn.Process(target=work_distributed, args=args, daemon=True).start()
    join_groups(0, workers + 1, ports, with_rpc=False)
    scheme.connect()
    return scheme, context


def open_rpc(model: nn.Module, name: str, workers: int) -> tuple[WeightSyncScheme, Any]:
    ports = [free_port(), free_port()]
    spawn = multiprocessing.get_context("spawn")
    for rank in range(1, workers + 1):
        args = (name, rank, workers + 1, ports)
        spawn.Process(target=work_rpc, args=args, daemon=True).start()
    join_groups(0, workers + 1, ports, with_rpc=True)
    context = Context(model, workers)
    context.collector_class = Receiver
    context.collector_infos = [rpc.get_worker_info(f"rank{r}") for r in range(1, workers + 1)]
    context.collector_rrefs = [
        rpc.remote(info, open_receiver, args=(name, workers, worker, RPCWeightSyncScheme()))
        for worker, info in enumerate(context.collector_infos)
    ]
    for rref in context.collector_rrefs:
        rref.rpc_sync().corners()
    scheme = RPCWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", context=context, num_workers=workers)
    connected = [rref.rpc_async().connect() for rref in context.collector_rrefs]
    scheme.connect()
    for future in connected:
        future.wait()
    return scheme, context


def open_ray(model: nn.Module, name: str, workers: int) -> tuple[WeightSyncScheme, Any]:
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    context = Context(model, workers)
    sender = RayWeightSyncScheme()
    remote = ray.remote(num_cpus=0, max_concurrency=4)(Receiver)
    actors = []
    for worker in range(workers):
        twin = RayWeightSyncScheme()
        twin._rendezvous_id = sender._rendezvous_id  # as a pickled copy of the scheme has it
        actors.append(remote.remote(name, workers, worker, twin))
    ray.get([actor.corners.remote() for actor in actors])
    context.remote_collectors = actors
    sender.init_on_sender(model_id="policy", context=context)
    connected = [actor.connect.remote() for actor in actors]
    sender.connect()
    ray.get(connected)
    return sender, context


OPEN = {"distributed": open_distributed, "rpc": open_rpc, "ray": open_ray}


class Session:
    """One open model, and what the workers hold where they can be asked."""

    def __init__(self, *, scheme: str, model: str, workers: int):
        self.kind, self.model = scheme, build_model(model)
        self.scheme, self.context = OPEN[scheme](self.model, model, workers)
        self.send = self.scheme.send

    def _corners(self) -> list[list[float]]:
        if self.kind == "rpc":
            return [rref.rpc_sync().corners() for rref in self.context.collector_rrefs]
        if self.kind == "ray":
            import ray

            return ray.get([actor.corners.remote() for actor in self.context.remote_collectors])
        return []  # torchrl's acknowledgement has to do

    def is_verified(self) -> bool:
        mine = corner_values(self.model)
        return all(held == mine for held in self._corners())


if __name__ == "__main__":
    serve(Session)
