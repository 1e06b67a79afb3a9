"""Weights for workers on other machines: one scheme for each engine, and what they share.

    engine = RPCEngine(2, host="10.0.0.1", port=29500)    # or Ray actors, or torch.distributed
    scheme = RPCWeightSyncScheme()
    scheme.attach(engine)                                 # worker i is the engine's peer i
    scheme.init_on_sender(model=policy, devices=["cpu"] * 2)
    engine.connect()
    (hand `scheme` to the peers; there init_on_receiver() and connect())
    scheme.connect()

`transport.py` has the protocol. Workers on the trainer's machine read versions from its memory
(`nearby.py`), unless the scheme is told to bring all of them over the engine.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection
from concurrent.futures import wait
from typing import Any, ClassVar

from sync import interrupts
from sync.layout import Layout
from sync.remote.engine import Engine
from sync.remote.hub import Hub
from sync.remote.near import Neighbours
from sync.remote.nearby import POSSIBLE
from sync.remote.transport import RemoteTransport
from sync.scheme import WeightSyncScheme
from sync.sender import SenderEnd
from sync.shared_mem import SEGFAULT_HINT, announce
from sync.slots import Slots
from sync.strategy import Weights, WeightStrategy
from sync.transport import Transport

_CLOSE_S = 2.0


class RemoteSenderEnd(SenderEnd):
    """Tells the workers that are near by memory, and closes with one wait for the others.

    It counts the blocks that peers handed on.
    """

    def summary(self) -> dict[str, Any]:
        """With which workers are near: they read versions from memory."""
        summary = super().summary()
        for line in self._lines(self.transports.values()):
            summary["workers"][line.worker_idx]["near"] = line.is_near
        return {**summary, "handed_on": sum(hub.handed_on for hub in self._hubs())}

    def _offer(self, transports: Collection[Transport], slot: int, version: int) -> None:
        rows = [row for line in self._lines(transports) if (row := line.row) is not None]
        if not rows:
            super()._offer(transports, slot, version)
            return
        with interrupts.held():
            announce(rows, transports, slot, version)

    def close(self) -> None:
        lines = self._lines(self.transports.values())
        super().close()
        wait([line.closing for line in lines if line.closing is not None], timeout=_CLOSE_S)

    def _hubs(self) -> set[Hub]:
        return {line.hub for line in self._lines(self.transports.values()) if line.hub}

    @staticmethod
    def _lines(transports: Collection[Transport]) -> list[RemoteTransport]:
        return [t for t in transports if isinstance(t, RemoteTransport)]


class RemoteWeightSyncScheme(WeightSyncScheme):
    """Brings snapshots to the peers of an engine, one block a version.

    zero_copy: whether workers point their parameters at the block that arrived (True), copy it
        (False), or point from a quarter of a megabyte on (None). Buffers are always copied.
    share_memory: whether workers on the trainer's machine read versions from the trainer's memory,
        as under `SharedMemWeightSyncScheme`; else all versions go over the engine.
    """

    _sender_end = RemoteSenderEnd
    _transport: ClassVar[type[RemoteTransport]] = RemoteTransport

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        sync: bool = True,
        *,
        zero_copy: bool | None = None,
        share_memory: bool = True,
        **options: Any,
    ):
        super().__init__(strategy, sync=sync, **options)
        self.share_memory = share_memory
        self._point_at_snapshots(zero_copy)

    def _leave_process(self) -> None:
        super()._leave_process()
        self._hub: Hub | None = None
        self._engine: Engine | None = getattr(self, "_engine", None)

    def attach(self, engine: Engine) -> None:
        """Reach the workers through `engine`: worker i is its peer i."""
        self._engine = engine
        if self._hub is not None:
            self._hub.engine = engine

    def _open(self, layout: Layout, num_workers: int) -> tuple[Slots, dict[int, Transport]]:
        # A worker elsewhere can have one version on the way and one waiting; a near one three in
        # its hands; a place that changed from near to far, both. And one more each can be written.
        shares = self.share_memory and POSSIBLE
        slots = Slots(layout, 7 * num_workers, homes=num_workers if shares else 0)
        key = uuid.uuid4().hex
        near = Neighbours(slots, key, num_workers, self.timeout) if shares else None
        self._hub = Hub(slots, key, num_workers, self.timeout, self.connect_timeout, near)
        self._hub.engine = self._engine
        if near is not None:
            near.open()  # what it has is closed with the hub from now on
        transports: dict[int, Transport] = {}
        for worker in range(num_workers):
            line = self._transport(slots, key, worker, timeout=self.timeout)
            line.become_sender(self._hub)
            if self._zero_copy is not False:
                line.segfault_hint = SEGFAULT_HINT
            transports[worker] = line
        return slots, transports

    def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Weights | None = None,
        background: bool = True,
    ) -> None:
        if self._is_sender:
            self._check_engine()
        super().connect(worker_idx=worker_idx, weights=weights, background=background)

    def _check_engine(self) -> None:
        if self._engine is None:
            raise RuntimeError(
                f"{type(self).__name__} has no engine: call attach(engine) before connect()"
            )
        if self._engine.num_peers < self.num_workers:
            raise ValueError(
                f"the scheme has {self.num_workers} workers, but its engine "
                f"{self._engine.num_peers} peers; each worker is the peer of its number"
            )

    def shutdown(self) -> None:
        super().shutdown()
        if self._hub is not None and self._pid == os.getpid():
            self._hub.close()
        self._hub = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_hub": None, "_engine": None}


class RayTransport(RemoteTransport):
    """One Ray actor's line."""

    lends = True  # Ray's store gives what nobody refers to any more to the next

    _hint = (
        "; an actor that is busy takes weights only if it was made with max_concurrency of 2 or "
        "more, or with a concurrency group for them"
    )


class RPCTransport(RemoteTransport):
    """The line of one member of an RPC group."""


class DistributedTransport(RemoteTransport):
    """One rank's line."""


class RayWeightSyncScheme(RemoteWeightSyncScheme):
    """Over Ray: a version is put into the object store once, and fetched once by each node.

    One of 384 KiB or less goes along with the call to each worker, past the store, unless there are
    many workers. In the zero-copy form workers point at the object store's memory, which they see
    read-only: writing to a parameter ends the worker's process.
    """

    _transport = RayTransport


class RPCWeightSyncScheme(RemoteWeightSyncScheme):
    """Over torch.distributed.rpc; `relay.py` has the way of large versions to many workers."""

    _transport = RPCTransport


class DistributedWeightSyncScheme(RemoteWeightSyncScheme):
    """Over torch.distributed; `relay.py` has the way of large versions to many workers.

    backend: "gloo", the one that can tell one peer's failure from another's.
    """

    _transport = DistributedTransport

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        timeout: float = 10.0,
        *,
        strategy: str | WeightStrategy = "tensordict",
        **options: Any,
    ):
        if backend != "gloo":
            raise ValueError(f"backend={backend!r}: expected 'gloo'")
        super().__init__(strategy, sync, timeout=timeout, **options)
