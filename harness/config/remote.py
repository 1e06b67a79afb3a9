"""Collectors on other machines: which options they have, and which cannot work."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from harness.config.errors import ConfigError, ImpossiblePair
from harness.config.hosts import JoiningConfig, RayConfig
from harness.config.schema import CollectorConfig, SyncConfig
from harness.config.typed import build

REMOTE: dict[str, type[JoiningConfig] | type[RayConfig]] = {
    "distributed": JoiningConfig,
    "rpc": JoiningConfig,
    "ray": RayConfig,
}


def build_remote(collector: Any) -> Any:
    """The collector's options with `remote` built as its name says."""
    if not isinstance(collector, Mapping) or str(collector.get("name")) not in REMOTE:
        return collector
    given = collector.get("remote")
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"collector.remote={given}: expected a group of options")
    kind = REMOTE[collector["name"]]
    return {**collector, "remote": build(kind, given or {}, "collector.remote")}


def is_asynchronous(collector: CollectorConfig) -> bool:
    """Whether workers collect at their own pace, and batches are one worker's."""
    if collector.remote is not None:
        return collector.remote.asynchronous
    return collector.name == "multi_async"


def num_hosts(collector: CollectorConfig) -> int:
    """How many hosts the workers are spread over; 0 where they are this machine's."""
    remote = collector.remote
    if remote is None:
        return 0
    if remote.num_collectors is not None:
        return remote.num_collectors
    if isinstance(remote, JoiningConfig) and remote.launcher != "local" and ranks():
        return max(1, (ranks() or 0) - 1)
    return collector.num_workers


def ranks() -> int | None:
    """How many processes a launcher started, if one did."""
    found = os.environ.get("WORLD_SIZE", "")
    return int(found) if "RANK" in os.environ and found.isdigit() else None


def hosts_started(otherwise: int) -> int:
    """One host for each rank besides the trainer's, or as many as are said."""
    return max(1, (ranks() or otherwise + 1) - 1)


def check_remote(collector: CollectorConfig, sync: SyncConfig) -> None:
    """Raise `ConfigError` for what cannot work between machines."""
    remote = collector.remote
    if remote is None:
        if sync.name in REMOTE:
            raise ImpossiblePair(
                f"sync={sync.name} collector={collector.name}: its workers are on this machine; "
                f"take sync=shared_mem, or collector={sync.name}"
            )
        return
    kind = f"collector={collector.name}"
    if collector.name not in REMOTE:
        raise ConfigError(
            f"collector.remote is for collector={', '.join(REMOTE)}; with {kind} all is here"
        )
    if sync.name != collector.name:
        raise ImpossiblePair(
            f"sync={sync.name} {kind}: weights for its hosts travel as they do; "
            f"take sync={collector.name}"
        )
    if collector.name == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(f"{kind} needs ray; install it with: pip install -e '.[ray]'")
    _check_hosts(collector)
    if isinstance(remote, JoiningConfig):
        _check_joining(collector, remote)
    for name in ("num_cpus", "num_gpus"):
        if getattr(remote, name, 0) < 0:
            raise ConfigError(
                f"collector.remote.{name}={getattr(remote, name)}: expected 0 or more"
            )
    if not remote.start_timeout_s > 0:
        raise ConfigError(
            f"collector.remote.start_timeout_s={remote.start_timeout_s}: expected more than 0 "
            "seconds"
        )


def _check_hosts(collector: CollectorConfig) -> None:
    hosts, workers = num_hosts(collector), collector.num_workers
    if hosts < 1:
        raise ConfigError(f"collector.remote.num_collectors={hosts}: expected 1 or more")
    if workers % hosts:
        near = -(-workers // hosts) * hosts
        raise ConfigError(
            f"collector.num_workers={workers} cannot be spread evenly over "
            f"collector.remote.num_collectors={hosts}; the nearest that can is {near}"
        )


def _check_joining(collector: CollectorConfig, remote: JoiningConfig) -> None:
    if not 0 <= remote.port <= 65535:
        raise ConfigError(f"collector.remote.port={remote.port}: expected 0 to 65535")
    started = ranks()
    if remote.launcher == "env" and started is None:
        raise ConfigError(
            "collector.remote.launcher=env: RANK and WORLD_SIZE are not set; start it with "
            "torchrun, or take launcher=local"
        )
    if started is not None and remote.launcher != "local":
        if started < 2:
            raise ConfigError(
                "WORLD_SIZE=1: rank 0 trains and the others collect; start two processes or more"
            )
        if num_hosts(collector) != started - 1:
            raise ConfigError(
                f"WORLD_SIZE={started}, so there are {started - 1} hosts, and not "
                f"{num_hosts(collector)}: take collector.remote.num_collectors={started - 1}"
            )
