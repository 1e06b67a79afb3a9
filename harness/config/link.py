"""`sync.link`: the network between learner and workers that a run is to pretend."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from harness.config.errors import ConfigError
from sync import PRESETS, Link


@dataclass
class LinkConfig:
    """What a preset says, and what is said otherwise; nothing of it delays nothing."""

    preset: Literal["lan", "datacenter", "wan"] | None = None
    latency_ms: float | None = None
    jitter_ms: float | None = None
    bandwidth_mbps: float | None = None
    loss: float | None = None
    seed: int = 0


def make_link(config: LinkConfig) -> Link | None:
    """The link, or None where nothing is delayed; `ConfigError` for what no link can be."""
    base = Link() if config.preset is None else PRESETS[config.preset]
    given = {key: value for key, value in asdict(config).items() if value is not None}
    del given["seed"]
    given.pop("preset", None)
    try:
        return Link.of(Link(**{**asdict(base), **given, "seed": config.seed}))
    except ValueError as error:
        raise ConfigError(f"sync.link.{error}") from None
