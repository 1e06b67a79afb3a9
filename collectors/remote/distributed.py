"""Workers over torch.distributed: processes started here, or the ranks of a launcher."""

from __future__ import annotations

from typing import Any

from collectors.options.signatures import takes
from collectors.remote import process_group
from collectors.remote.base import RemoteCollector
from collectors.remote.process_group import Joining, JoiningArguments
from collectors.remote.remote_handle import Launcher
from sync import DistributedWeightSyncScheme
from sync.remote import gloo


class DistributedCollector(RemoteCollector):
    """Workers in processes that torch.distributed joins to this one.

    `JoiningOptions` say how.
    """

    kind = "DistributedCollector"
    _scheme_class = DistributedWeightSyncScheme
    _serve = staticmethod(gloo.serve)

    @takes(JoiningArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any):
        self._joining = Joining(options)
        super().__init__(create_env_fn, policy, **options)

    def _launch(self) -> Launcher:
        return self._joining.launch(
            gloo.DistributedEngine, self._serve, self.num_workers, self.options
        )


def serve_rank(**options: Any) -> str:
    """Run this rank's worker until the trainer ends or stops it; returns which."""
    return process_group.serve_rank(gloo.serve, **options)
