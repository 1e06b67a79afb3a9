"""`env=`: the options of environments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from harness.options.base import Options
from harness.options.errors import ConfigError
from harness.options.typed import Count, Range


@dataclass
class EnvConfig(Options):
    """Any environment that is registered with gymnasium, selected by env.id."""

    group: ClassVar[str] = "env"

    id: str = "CartPole-v1"  # a gymnasium id; module:Name-v0 imports the module first
    num_envs: Annotated[int, Range(1, 1_000_000)] = 8  # that each worker steps with one policy call
    # none (one environment), sync (in turn), async (a process each) or native (the environment's)
    vectorisation: Literal["none", "sync", "async", "native"] = "sync"
    # innermost first, in evaluation too: a registered name, {name: {arguments}}, or module:Class
    wrappers: list[Any] = field(default_factory=list)
    max_episode_steps: Count | None = None  # null: the environment's own limit
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of the environment itself

    def check(self, config: Any) -> None:
        if self.vectorisation == "none" and self.num_envs != 1:
            raise ConfigError(
                f"env.num_envs={self.num_envs} env.vectorisation=none: expected 1; "
                "env.vectorisation=sync steps several"
            )
