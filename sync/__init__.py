"""Weight synchronisation: versioned snapshots of a model, brought from a trainer to its workers.

Start with `scheme.py` (the lifecycle), then `shared_mem.py` (the scheme most people want) and
`board.py` (its protocol).
"""

import sync.lean  # noqa: F401 - before anything that imports tensordict
from sync.backends import SCHEMES
from sync.direct import NoWeightSyncScheme
from sync.errors import WorkerDied, WorkerError, WorkerRaised, WorkerTimeout
from sync.hogwild import HogwildWeightSyncScheme
from sync.layout import Layout
from sync.link import PRESETS, Link
from sync.multiprocess import MPTransport, MultiProcessWeightSyncScheme
from sync.remote.schemes import (
    DistributedTransport,
    DistributedWeightSyncScheme,
    RayTransport,
    RayWeightSyncScheme,
    RPCTransport,
    RPCWeightSyncScheme,
)
from sync.scheme import WeightSyncScheme
from sync.shared_mem import SharedMemTransport, SharedMemWeightSyncScheme
from sync.snapshot import Snapshot
from sync.strategy import WeightStrategy
from sync.transport import Transport, TransportBackend
from sync.updaters import (
    LocalWeightUpdaterBase,
    MultiProcessedRemoteWeightUpdate,
    RayRemoteWeightUpdater,
    RemoteWeightUpdaterBase,
    VanillaLocalWeightUpdater,
)
from sync.wire import WIRES

__all__ = [
    "PRESETS",
    "SCHEMES",
    "WIRES",
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "HogwildWeightSyncScheme",
    "Layout",
    "Link",
    "LocalWeightUpdaterBase",
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "MultiProcessedRemoteWeightUpdate",
    "NoWeightSyncScheme",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RayRemoteWeightUpdater",
    "RayTransport",
    "RayWeightSyncScheme",
    "RemoteWeightUpdaterBase",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "Snapshot",
    "Transport",
    "TransportBackend",
    "VanillaLocalWeightUpdater",
    "WeightStrategy",
    "WeightSyncScheme",
    "WorkerDied",
    "WorkerError",
    "WorkerRaised",
    "WorkerTimeout",
]
