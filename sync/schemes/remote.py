"""The schemes that reach other machines: over torch.distributed, its RPC, or Ray.

    trainer: send()                              worker: receive()
    ---------------                              -----------------
    write a free block
    one call for each worker:  -- engine ----->  deliver() keeps the block and returns a future
      deliver(block)                             has_news(); copy it into the model
    wait for all  <-------------- engine ------  APPLIED ends the future, and so the call
    the block is free

| scheme | how a block travels |
|---|---|
| `distributed` | over a gloo connection with each worker |
| `rpc` | as the tensor argument of a call |
| `ray` | once into the object store, and once from there to each node; up to 96 KiB in the call |

`remote/remote_sender.py` keeps the next version while one is in flight, and `remote/inbox.py` is
the worker's half. The engines are beside them: `gloo_engine.py`, `rpc_engine.py`, `ray_engine.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sync.channel_interface import SenderChannel
from sync.model.block import Layout
from sync.model.strategy import WeightStrategy
from sync.remote.engine import Engine
from sync.remote.inbox import Inbox
from sync.remote.remote_sender import RemoteSender
from sync.scheme import WeightSyncScheme
from sync.schemes import register


class RemoteWeightSyncScheme(WeightSyncScheme):
    """Brings versions to the peers of an engine.

    engine = RPCEngine(2, host="10.0.0.1", port=29500)    # or Ray actors, or torch.distributed
    scheme = RPCWeightSyncScheme()
    scheme.attach(engine)                                 # worker i is the engine's peer i
    scheme.init_on_sender(model=policy, devices=["cpu"] * 2)
    engine.connect()
    (hand `scheme` to the peers; there init_on_receiver() and connect())
    scheme.connect()
    """

    sender_channel: ClassVar[type[RemoteSender]] = RemoteSender
    receiver_channel = Inbox

    _engine: Engine | None = None

    def attach(self, engine: Engine) -> None:
        """Reach the workers through `engine`: worker i is its peer i."""
        if self.initialized_on_sender:
            raise RuntimeError("call attach(engine) before init_on_sender()")
        self._engine = engine

    def _make_sender(self, layout: Layout, num_workers: int) -> SenderChannel:
        if self._engine is None:
            raise RuntimeError(
                f"{type(self).__name__} has no engine: call attach(engine) before init_on_sender()"
            )
        return self.sender_channel(layout, num_workers, self._engine)

    def _check_ready(self) -> None:
        assert self._engine is not None
        if self._engine.num_peers < self.num_workers:
            raise ValueError(
                f"the scheme has {self.num_workers} workers, but its engine "
                f"{self._engine.num_peers} peers; each worker is the peer of its number"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_engine": None}


@register("distributed")
class DistributedWeightSyncScheme(RemoteWeightSyncScheme):
    """Over torch.distributed; the engine is a `sync.remote.gloo_engine.DistributedEngine`.

    backend: "gloo", the only one that can tell one peer's failure from another's.
    """

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        timeout: float | None = None,
        *,
        strategy: str | WeightStrategy = "tensordict",
        **options: Any,
    ):
        if backend != "gloo":
            raise ValueError(f"backend={backend!r}: expected 'gloo'")
        super().__init__(strategy, sync, timeout=timeout, **options)


@register("rpc")
class RPCWeightSyncScheme(RemoteWeightSyncScheme):
    """Over torch.distributed.rpc; the engine is a `sync.remote.rpc_engine.RPCEngine`."""


@register("ray")
class RayWeightSyncScheme(RemoteWeightSyncScheme):
    """Over Ray actors; the engine is a `sync.remote.ray_engine.RayEngine`."""
