"""Nodes over torch.distributed.rpc: started here, or one per rank by torchrun or a scheduler."""

from __future__ import annotations

from typing import Any

from collectors.remote import process_group
from collectors.remote.process_group import ProcessGroupCollector
from sync import RPCWeightSyncScheme
from sync.remote import rpc


class RPCCollector(ProcessGroupCollector):
    """Collectors in processes that torch.distributed.rpc joins to this one."""

    kind = "RPCCollector"
    _scheme_class = RPCWeightSyncScheme
    _make_engine = rpc.RPCEngine
    _serve = staticmethod(rpc.serve)


def serve_rank(**options: Any) -> str:
    """Run this rank's node until the trainer ends or stops it; returns which."""
    return process_group.serve_rank(rpc.serve, **options)
