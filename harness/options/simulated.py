"""`collector=simulated`: asynchronous workers in virtual time, or a replay of a schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from harness.files import check_ordinary
from harness.options.cluster import CostsConfig, FailureConfig, NetworkConfig, make_failures
from harness.options.collectors import CollectorConfig, Threads, Workers
from harness.options.errors import ConfigError
from harness.options.typed import Count

SCHEDULE = "schedule.jsonl"  # of a run directory


@dataclass
class SimulatedConfig(CollectorConfig):
    """Asynchronous workers in virtual time, computed by one process. Same seed, same bits."""

    simulates: ClassVar[bool] = True

    name: str = "simulated"
    num_workers: Workers = 8  # virtual workers; each has env.num_envs environments
    frames_per_batch: Count = 512  # frames of one batch, from one worker
    batches_ahead: Count = 2  # that a worker may finish before the learner takes one
    num_threads: Threads = 1  # torch threads of the policy's calls
    costs: CostsConfig = field(default_factory=CostsConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    # workers that die: [{worker:0,at_s:10,back_after_s:5}], in virtual time
    failures: list[FailureConfig] = field(default_factory=list)
    # a run directory whose recorded schedule is replayed, instead of costs, network and failures;
    # it decides the sizes, the seed and, unless given, total_frames
    replay: str | None = None

    @property
    def workers(self) -> int:
        return self.num_workers

    @property
    def asynchronous(self) -> bool:
        return True

    def arguments(self, config: Any) -> dict[str, Any]:
        given = super().arguments(config) | {
            "num_workers": self.num_workers,
            "num_sub_threads": self.num_threads,
        }
        if self.replay is None:
            return given | {"schedule": self.simulator(config)}
        return given | {"schedule": self.recording(self.replay)}

    def simulator(self, config: Any) -> Any:
        """The simulated schedule. `ConfigError` for impossible costs or failures."""
        from collectors.schedule.simulator import Simulator

        link = getattr(config.sync, "link", None)
        return Simulator(
            num_workers=self.num_workers,
            num_steps=self.frames_per_batch // config.env.num_envs,
            seed=config.seed,
            costs=self.costs.make(),
            network=self.network.make(),
            link=None if link is None else link.make(),
            failures=make_failures(self.failures, self.num_workers),
            blocking=config.sync.blocking,
            apply_at=config.sync.apply_at,
            **self.pacing(config, self.batches_ahead),
        )

    @staticmethod
    def recording(directory: str) -> Any:
        """The schedule that a run recorded; `ConfigError` if it cannot be read."""
        from collectors.schedule.recording import RecordedSchedule

        file = Path(directory) / SCHEDULE
        try:
            check_ordinary(file)
            return RecordedSchedule(file)
        except FileNotFoundError:
            raise ConfigError(
                f"collector.replay={directory}: there is no {SCHEDULE}; a run with "
                "collector=multi_async records one, such as those of -m experiment=recorded"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"collector.replay={directory}: {error}") from None

    def check(self, config: Any) -> None:
        super().check(config)
        if isinstance(self.devices.policy, list):
            raise ConfigError(
                "collector.devices.policy is a list, but virtual workers run in one process; name "
                "one device"
            )
        self.costs.make()
        make_failures(self.failures, self.num_workers)
        if self.replay is not None:
            self._check_sizes(self.replay, config)

    def _check_sizes(self, replay: str, config: Any) -> None:
        header = self.recording(replay).header
        wanted = {
            "collector.num_workers": (self.num_workers, header.num_workers),
            "collector.frames_per_batch": (
                self.frames_per_batch,
                header.num_steps * header.num_envs,
            ),
            "env.num_envs": (config.env.num_envs, header.num_envs),
        }
        if any(given != recorded for given, recorded in wanted.values()):
            needed = " ".join(f"{name}={recorded}" for name, (_, recorded) in wanted.items())
            raise ConfigError(
                f"collector.replay={replay}: it was recorded with other sizes; use {needed}"
            )
