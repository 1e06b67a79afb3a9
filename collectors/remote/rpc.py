"""Workers over torch.distributed.rpc: processes started here, or the ranks of a launcher."""

from __future__ import annotations

from typing import Any

from collectors.options.signatures import takes
from collectors.remote import process_group
from collectors.remote.base import RemoteCollector
from collectors.remote.process_group import Joining, JoiningArguments
from collectors.remote.remote_handle import Launcher
from sync import RPCWeightSyncScheme
from sync.remote import rpc


class RPCCollector(RemoteCollector):
    """Workers in processes that torch.distributed.rpc joins to this one.

    `JoiningOptions` say how. None of them can be replaced.
    """

    kind = "RPCCollector"
    _scheme_class = RPCWeightSyncScheme
    _serve = staticmethod(rpc.serve)

    @takes(JoiningArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any):
        if options.get("on_worker_failure") == "restart":
            raise ValueError(
                'on_worker_failure="restart": torch\'s RPC cannot replace a process that died; '
                "use DistributedCollector"
            )
        self._joining = Joining(options)
        super().__init__(create_env_fn, policy, **options)

    def _launch(self) -> Launcher:
        return self._joining.launch(rpc.RPCEngine, self._serve, self.num_workers, self.options)


def serve_rank(**options: Any) -> str:
    """Run this rank's worker until the trainer ends or stops it; returns which."""
    return process_group.serve_rank(rpc.serve, **options)
