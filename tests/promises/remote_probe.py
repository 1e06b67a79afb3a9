"""The probe of the promise suite in processes that only an engine reaches."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from sync import (
    DistributedWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    TransportBackend,
    WeightSyncScheme,
)
from tests.promises.probe import WAIT_S, Findings, Trial, VersionPolicy, read

SCHEMES: dict[str, type[WeightSyncScheme]] = {
    "distributed": DistributedWeightSyncScheme,
    "rpc": RPCWeightSyncScheme,
    "ray": RayWeightSyncScheme,
}
ENGINES = {"distributed": "DistributedEngine", "rpc": "RPCEngine"}
MODULES = {
    "distributed": "sync.remote.gloo_engine",
    "rpc": "sync.remote.rpc_engine",
    "ray": "sync.remote.ray_engine",
}
START_S = 110.0
RAY_START_S = 240.0  # for actors of a cluster that has just been started, where others run too


class FileFindings(Findings):
    """Findings in a file, which any process of this machine can open."""

    def __init__(self, workers: int, path: Path):
        self.workers, self.path = workers, path
        path.write_bytes(bytes(4096))
        self._map()

    def _map(self) -> None:
        self._array = np.memmap(self.path, dtype=np.int64, mode="r+")
        self._words = memoryview(self._array)

    def __getstate__(self) -> dict[str, Any]:
        return {"workers": self.workers, "path": self.path}


# -- what peers run


def start(target: Callable[..., None], scheme: WeightSyncScheme, worker: int, *args: Any) -> None:
    """Have a thread of this process be a worker."""
    thread = threading.Thread(target=target, args=(scheme, worker, *args), daemon=True)
    thread.start()
    _threads.append(thread)


def take_by_transport(transport: TransportBackend, number: int) -> list[float]:
    """What so many versions that came without a scheme say, the first of them at the rendezvous."""
    policy = VersionPolicy()
    transport.setup_connection_and_weights_on_receiver(worker_idx=0, model=policy)
    found = [policy()]
    for _ in range(1, number):
        assert transport.receive_weights(WAIT_S / 2, model=policy) is not None
        found.append(policy())
    assert all(low == high for low, high in found)
    return [low for low, _ in found]


def raise_what_only_it_knows() -> None:
    """An error of a class that other processes cannot load."""
    name = "lockstep_only_there"
    module: Any = sys.modules.setdefault(name, types.ModuleType(name))
    module.Odd = type("Odd", (Exception,), {"__module__": name})
    raise module.Odd("odd")


def finish() -> bool:
    """Wait until the workers of this process have ended."""
    for thread in _threads:
        thread.join(10.0)
    ended = not any(thread.is_alive() for thread in _threads)
    _threads.clear()
    return ended


_threads: list[threading.Thread] = []


def serve(module: str, peer: int, port: int, options: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    importlib.import_module(module).serve(peer, port=port, **options)


# -- peers


class Peers:
    """An engine and its peers, as processes of this machine, which call `target`."""

    def __init__(self, kind: str, number: int, target: Callable[..., None] = serve, **options: Any):
        self.kind, self._options, self._target = kind, options, target
        self.module, self._number = MODULES[kind], number
        self.open()

    def open(self) -> None:
        """Start the peers and meet them."""
        kind, number, options = self.kind, self._number, self._options
        self.processes: list[Any] = []
        if kind == "ray":
            self._actors = [self._actor() for _ in range(number)]
            module = importlib.import_module(self.module)
            self.engine = module.RayEngine(self._actors)
        else:
            module = importlib.import_module(self.module)
            self.engine = getattr(module, ENGINES[kind])(number, timeout=START_S, **options)
            self.processes = [self._process(peer) for peer in range(number)]
            self.engine.connect()
        found = [self.engine.call(peer, os.getpid) for peer in range(number)]
        patience = RAY_START_S if kind == "ray" else START_S
        self.running = [Running(future.result(patience)) for future in found]

    def _actor(self) -> Any:
        import ray

        return ray.remote(num_cpus=0, max_concurrency=8)(_Actor).remote()

    def _process(self, peer: int) -> Any:
        ctx = multiprocessing.get_context("forkserver")
        ctx.set_forkserver_preload(
            ["torch", "tests.promises.remote_probe", "sync.remote.rpc_engine"]
        )
        args = (self.module, peer, self.engine.port, {"timeout": START_S, **self._options})
        process = ctx.Process(target=self._target, args=args, daemon=True)
        process.start()
        return process

    def replace(self, peer: int) -> None:
        """Start another process in a dead one's place."""
        if self.kind == "ray":
            self._actors[peer] = self._actor()
            self.engine.replace(peer, self._actors[peer])
        else:
            self.processes.append(self._process(peer))
            self.engine.admit(peer)
        pid = self.engine.call(peer, os.getpid).result(START_S)
        self.running[peer] = Running(pid)

    def close(self) -> None:
        self.engine.close()
        if self.kind == "ray":
            import ray

            for actor in self._actors:
                ray.kill(actor)
        for process in self.processes:
            process.join(10.0)
            left = process.is_alive()
            process.kill()
            process.join()
            assert not left, "a peer did not end when the engine was closed"


class Running:
    """A process, as `Trial` wants to see one."""

    def __init__(self, pid: int):
        self.pid = pid

    def is_alive(self) -> bool:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)


class _Actor:
    """What it does is called into it."""


@contextmanager
def trial(
    peers: Peers,
    path: Path,
    *,
    width: int = 64,
    background: bool = False,
    target: Callable[..., None] = read,
    late: int | None = None,
    **options: Any,
) -> Iterator[Trial]:
    """Workers in all the peers, which make policy calls while the body runs.

    late: the worker that the body begins and connects.
    """
    workers = peers.engine.num_peers
    options = {"timeout": WAIT_S / 2, **options}
    scheme = SCHEMES[peers.kind](**options)
    policy, findings = VersionPolicy(width), FileFindings(workers, path / "findings")
    scheme.attach(peers.engine)
    scheme.init_on_sender(model=policy, devices=["cpu"] * workers)
    begin = functools.partial(begin_worker, peers, scheme, findings, width, background, target)
    try:
        for worker in range(workers):
            if worker != late:
                begin(worker)
        for worker in range(workers) if late is not None else (None,):
            if worker is None or worker != late:
                scheme.connect(worker_idx=worker)
        running = Trial(scheme, policy, peers.running, findings)
        running.begin = begin  # type: ignore[attr-defined]
        yield running
    finally:
        findings.stop()
        for process in peers.running:
            with suppress(ProcessLookupError):
                process.kill(signal.SIGCONT)
        alive = [peer for peer in range(workers) if peers.engine.gone(peer) is None]
        for ended in [peers.engine.call(peer, finish) for peer in alive]:
            with suppress(ConnectionError):
                assert ended.result(20.0)
        scheme.shutdown()


def begin_worker(
    peers: Peers,
    scheme: WeightSyncScheme,
    findings: Findings,
    width: int,
    background: bool,
    target: Callable[..., None],
    worker: int,
) -> None:
    """Have the peer be the worker of its number."""
    args = (target, scheme, worker, findings, width, background)
    peers.engine.call(worker, start, *args).result(START_S)
