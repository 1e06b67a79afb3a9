"""Schemes by short name, for configuration files and for users of the peer's names."""

from __future__ import annotations

import difflib
from typing import Any

from sync.direct import NoWeightSyncScheme
from sync.hogwild import HogwildWeightSyncScheme
from sync.multiprocess import MultiProcessWeightSyncScheme
from sync.remote.schemes import (
    DistributedWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
)
from sync.scheme import WeightSyncScheme
from sync.shared_mem import SharedMemWeightSyncScheme

SCHEMES: dict[str, type[WeightSyncScheme]] = {
    "none": NoWeightSyncScheme,
    "direct": NoWeightSyncScheme,
    "shared": SharedMemWeightSyncScheme,
    "thread": SharedMemWeightSyncScheme,
    "process": MultiProcessWeightSyncScheme,
    "multiprocessing": MultiProcessWeightSyncScheme,
    "hogwild": HogwildWeightSyncScheme,
    "distributed": DistributedWeightSyncScheme,
    "rpc": RPCWeightSyncScheme,
    "ray": RayWeightSyncScheme,
}


def make_scheme(name: str, **kwargs: Any) -> WeightSyncScheme:
    """A scheme by its short name; an unknown name is an error that lists the known ones."""
    if name not in SCHEMES:
        near = difflib.get_close_matches(name, SCHEMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no scheme is called {name!r}{hint or '.'} Known: {', '.join(SCHEMES)}")
    return SCHEMES[name](**kwargs)
