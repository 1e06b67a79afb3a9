"""Weights over Ray: a version is put into the object store once, and fetched once by each node.

    trainer: send()                              worker (an actor): receive()
    ---------------                              ----------------------------
    write a free block
    ray.put(block)                               (Ray copies it to each node that needs it)
    actor.deliver(reference)   -- task ------->  deliver() maps the node's copy
                                                 has_news(); copy it into the model
    wait for all  <------------------ result --  APPLIED ends the task
    the block is free, and Ray frees its copies

A version of 384 KiB or less is an argument of each task instead, unless there are many workers.
`remote/channel.py` keeps the next version while one is in flight.
"""

from __future__ import annotations

from sync.registry import register
from sync.remote.scheme import RemoteWeightSyncScheme


@register("ray")
class RayWeightSyncScheme(RemoteWeightSyncScheme):
    """Over Ray actors; the engine is a `sync.remote.ray.RayEngine`."""
