"""Weights over torch.distributed.rpc: each version is the tensor argument of a call.

    trainer: send()                              worker: receive()
    ---------------                              -----------------
    write a free block
    rpc_async(deliver, block)  -- TensorPipe ->  deliver() keeps the tensor and returns a future
                                                 has_news(); copy it into the model
    wait for all  <------------- TensorPipe --   APPLIED ends the future, and so the call
    the block is free

`remote/rpc.py` defines the group of trainer and peers. `remote/channel.py` keeps the next version
while one is in flight.
"""

from __future__ import annotations

from sync.registry import register
from sync.remote.scheme import RemoteWeightSyncScheme


@register("rpc")
class RPCWeightSyncScheme(RemoteWeightSyncScheme):
    """Over torch.distributed.rpc; the engine is a `sync.remote.rpc.RPCEngine`."""
