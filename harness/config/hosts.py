"""The options of collectors on other machines, as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class HostsConfig:
    """How many hosts there are, and how they take part in a batch."""

    num_collectors: int | None = None
    asynchronous: bool = False
    start_timeout_s: float = 120.0


@dataclass
class JoiningConfig(HostsConfig):
    """Hosts that join the trainer: who starts them, and where they find it."""

    launcher: Literal["local", "env"] | None = None
    host: str = "127.0.0.1"
    port: int = 0
    address: str | None = None


@dataclass
class RayConfig(HostsConfig):
    """Which Ray cluster, and what each host takes of it."""

    address: str | None = None
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)
