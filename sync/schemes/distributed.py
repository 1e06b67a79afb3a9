"""Weights over torch.distributed: one gloo connection between the trainer and each worker.

    trainer: send()                              worker: receive()
    ---------------                              -----------------
    write a free block
    send a frame and the block  -- gloo ------>  read both into new memory
                                                 has_news(); copy it into the model
    wait for all  <------------- gloo -- frame   APPLIED
    the block is free

`remote/gloo_connection.py` defines the frames. `remote/channel.py` keeps the next version while one
is in flight.
"""

from __future__ import annotations

from typing import Any

from sync.model.strategy import WeightStrategy
from sync.registry import register
from sync.remote.scheme import RemoteWeightSyncScheme
from sync.remote.tree import TreeSender


@register("distributed")
class DistributedWeightSyncScheme(RemoteWeightSyncScheme):
    """Over torch.distributed; the engine is a `sync.remote.gloo.DistributedEngine`.

    With more than four workers, nodes pass versions on (`remote/tree.py`).

    backend: "gloo", the only one that can tell one peer's failure from another's.
    """

    sender_channel = TreeSender

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
