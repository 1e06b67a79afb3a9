"""The three remote collectors as tests make them: on this machine, with real processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from collectors import DistributedCollector, RayCollector, RPCCollector
from tests.collectors.support import CodePolicy, make_env, num_envs_of, workers_of

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install -e '.[ray]'"
)
COLLECTORS: dict[str, Callable[..., Any]] = {
    "distributed": DistributedCollector,
    "rpc": RPCCollector,
    "ray": RayCollector,
}
EACH = ["distributed", "rpc", pytest.param("ray", marks=needs_ray)]
# Ray takes longest to start. Where it runs the same code as the others, `make slow` tests it.
RAY_IS_SLOW = ["distributed", "rpc", pytest.param("ray", marks=[pytest.mark.slow, needs_ray])]
# For what is the same code over every engine: `make test` takes one, `make slow` the others.
KINDS = [
    "distributed",
    pytest.param("rpc", marks=pytest.mark.slow),
    pytest.param("ray", marks=[pytest.mark.slow, needs_ray]),
]
# Of these, the engines that can replace a host.
REPLACING = [KINDS[0], KINDS[2]]


def make(kind: str, create_env_fn: Any, policy: Any = None, **options: Any) -> Any:
    """A collector of two hosts, unless it is told otherwise."""
    defaults = {"num_collectors": 2, "timeout": 30.0}
    if kind != "ray":
        defaults["launcher"] = "local"
    return COLLECTORS[kind](create_env_fn, policy, **{**defaults, **options})


def build(kind: str, env: str = "sync_same_step", *, sync: bool = True, **options: Any) -> Any:
    """A collector of the coding environments, and how many each host has."""
    n = num_envs_of(env)
    options.setdefault("frames_per_batch", 11 * n * (2 if sync else 1))
    collector = make(
        kind, make_env, CodePolicy(), sync=sync, create_env_kwargs=workers_of(env, 2), **options
    )
    return collector, [n, n]


def host_pids(collector: Any) -> list[int]:
    """The processes of the hosts, which are on this machine."""
    return [handle.pid for handle in collector.pool.handles]
