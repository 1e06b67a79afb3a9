"""Nodes over torch.distributed: started here, or one per rank by torchrun or a job scheduler."""

from __future__ import annotations

from typing import Any

from collectors.remote import process_group
from collectors.remote.process_group import ProcessGroupCollector
from sync import DistributedWeightSyncScheme
from sync.remote import gloo


class DistributedCollector(ProcessGroupCollector):
    """Collectors in processes that torch.distributed joins to this one."""

    kind = "DistributedCollector"
    _scheme_class = DistributedWeightSyncScheme
    _make_engine = gloo.DistributedEngine
    _serve = staticmethod(gloo.serve)


def serve_rank(**options: Any) -> str:
    """Run this rank's node until the trainer ends or stops it; returns which."""
    return process_group.serve_rank(gloo.serve, **options)
