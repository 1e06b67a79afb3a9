"""Weight synchronisation: moves versioned snapshots of a model from a trainer to its workers.

Start with `scheme.py` (the lifecycle), then `schemes/shared_mem.py` (the scheme most people want)
and `channel_interface.py` (what a scheme of your own implements).
"""

import sync.deferred_dynamo  # noqa: F401 - before anything that imports tensordict
from sync.channel_interface import Answer, ReceiverChannel, SenderChannel
from sync.effects.exact_lag import Lag
from sync.effects.rounding import WIRES
from sync.effects.slow_link import PRESETS, Link
from sync.effects.tearing import Tear
from sync.errors import WeightsDiffer, WorkerDied, WorkerError, WorkerRaised, WorkerTimeout
from sync.model.block import Layout, Snapshot
from sync.model.strategy import WeightStrategy
from sync.scheme import WeightSyncScheme
from sync.schemes import SCHEMES, register
from sync.schemes.hogwild import HogwildWeightSyncScheme
from sync.schemes.multiprocess import MultiProcessWeightSyncScheme
from sync.schemes.none import NoWeightSyncScheme
from sync.schemes.remote import (
    DistributedWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
)
from sync.schemes.shared_mem import SharedMemWeightSyncScheme
from sync.schemes.simulated import SimulatedWeightSyncScheme
from sync.transports import MPTransport, TransportBackend
from sync.weight_updaters import (
    LocalWeightUpdaterBase,
    MultiProcessedRemoteWeightUpdate,
    RayRemoteWeightUpdater,
    RemoteWeightUpdaterBase,
    VanillaLocalWeightUpdater,
)

__all__ = [
    "PRESETS",
    "SCHEMES",
    "WIRES",
    "Answer",
    "DistributedWeightSyncScheme",
    "HogwildWeightSyncScheme",
    "Lag",
    "Layout",
    "Link",
    "LocalWeightUpdaterBase",
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "MultiProcessedRemoteWeightUpdate",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayRemoteWeightUpdater",
    "RayWeightSyncScheme",
    "ReceiverChannel",
    "RemoteWeightUpdaterBase",
    "SenderChannel",
    "SharedMemWeightSyncScheme",
    "SimulatedWeightSyncScheme",
    "Snapshot",
    "Tear",
    "TransportBackend",
    "VanillaLocalWeightUpdater",
    "WeightStrategy",
    "WeightSyncScheme",
    "WeightsDiffer",
    "WorkerDied",
    "WorkerError",
    "WorkerRaised",
    "WorkerTimeout",
    "register",
]
