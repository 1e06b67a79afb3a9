"""Rollout workers and the batches they hand over.

A collector steps gymnasium environments with a policy, in one process or in several workers, and
stamps every frame with the version of the weights that computed its action. Start with `base.py`
(what all collectors do) and `rollout.py` (the loop that makes frames); `worker.py` draws what goes
between a worker and the trainer.
"""

from collectors.base import BaseCollector
from collectors.multi import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from collectors.replay_buffer import ReplayBuffer
from collectors.single import Collector
from collectors.versions import PolicyVersion

__all__ = [
    "BaseCollector",
    "Collector",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "PolicyVersion",
    "ReplayBuffer",
]
