"""What the schemes over an engine have in common: the engine, and the channel's two halves."""

from __future__ import annotations

from typing import Any, ClassVar

from sync.channel import SenderChannel
from sync.model.layout import Layout
from sync.remote.channel import RemoteSender
from sync.remote.engine import Engine
from sync.remote.inbox import Inbox
from sync.scheme import WeightSyncScheme


class RemoteWeightSyncScheme(WeightSyncScheme):
    """Brings versions to the peers of an engine; `channel.py` draws how.

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
