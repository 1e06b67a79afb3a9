"""Rollout workers and the batches of frames that they collect.

A collector steps gymnasium environments with a policy, in one process or in several workers, and
stamps every frame with the version of the weights that computed its action. Start with `base.py`
(what all collectors share), `rollout/rollout.py` (which makes frames) and `workers/turns.py` (whose
frames come next). `workers/handle.py` draws the messages between a worker and the trainer.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

_SYNC = find_spec("sync")  # a common name: another package's may come first on sys.path
_HERE = Path(__file__).resolve().parents[1]
if _SYNC is None or Path(_SYNC.origin or "").resolve() != _HERE / "sync" / "__init__.py":
    _place = None if _SYNC is None else _SYNC.origin or _SYNC.submodule_search_locations
    raise ImportError(
        f"Lockstep's package sync is in {_HERE}, but `import sync` leads to {_place}: "
        "run it where no other module has this name"
    )

if TYPE_CHECKING:
    from collectors.base import BaseCollector as BaseCollector
    from collectors.data.batch import next_observations as next_observations
    from collectors.data.batch import next_values as next_values
    from collectors.data.replay_buffer import ReplayBuffer as ReplayBuffer
    from collectors.multi import MultiAsyncCollector as MultiAsyncCollector
    from collectors.multi import MultiCollector as MultiCollector
    from collectors.multi import MultiSyncCollector as MultiSyncCollector
    from collectors.remote.process_group import DistributedCollector as DistributedCollector
    from collectors.remote.process_group import RPCCollector as RPCCollector
    from collectors.remote.ray_collector import RayCollector as RayCollector
    from collectors.schedule.recording import RecordedSchedule as RecordedSchedule
    from collectors.simulation.simulated_collector import SimulatedCollector as SimulatedCollector
    from collectors.simulation.simulator import Simulator as Simulator
    from collectors.single import Collector as Collector

_WHERE = {
    "BaseCollector": "base",
    "Collector": "single",
    "DistributedCollector": "remote.process_group",
    "MultiAsyncCollector": "multi",
    "MultiCollector": "multi",
    "MultiSyncCollector": "multi",
    "RPCCollector": "remote.process_group",
    "RayCollector": "remote.ray_collector",
    "RecordedSchedule": "schedule.recording",
    "ReplayBuffer": "data.replay_buffer",
    "SimulatedCollector": "simulation.simulated_collector",
    "Simulator": "simulation.simulator",
    "next_observations": "data.batch",
    "next_values": "data.batch",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    """Import names on first use: options need no torch, and a worker needs little of this."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("sync")  # before anything here that imports tensordict
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
