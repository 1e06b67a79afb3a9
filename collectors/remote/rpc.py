"""Hosts over torch.distributed.rpc: started here, or one a rank by torchrun or a job scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectors.remote import process_group
from collectors.remote.process_group import ProcessGroupCollector
from sync import WeightSyncScheme
from sync.remote.rpc import RPCEngine, serve


class RPCCollector(ProcessGroupCollector):
    """Collectors in processes that torch.distributed.rpc joins to this one."""

    kind = "RPCCollector"

    @property
    def _scheme_class(self) -> type[WeightSyncScheme]:
        from sync import RPCWeightSyncScheme

        return RPCWeightSyncScheme

    @staticmethod
    def _way() -> tuple[Callable[..., Any], Callable[..., Any]]:
        return RPCEngine, serve


def serve_rank(**options: Any) -> str:
    """Be this rank's host until the trainer says stop, or is gone; says which."""
    return process_group.serve_rank(serve, **options)
