"""`collector=simulated`: asynchronous workers in virtual time, or a recorded schedule again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.files import check_ordinary
from harness.options.collectors import CollectorConfig, Threads, Workers
from harness.options.errors import ConfigError
from harness.options.typed import Count

SCHEDULE = "schedule.jsonl"  # of a run directory


@dataclass
class SimulatedConfig(CollectorConfig):
    """Asynchronous workers on a simulated clock, or as in a recorded run. Same seed, same bits."""

    name: str = "simulated"
    num_workers: Workers = 2  # virtual workers
    frames_per_batch: Count = 512  # frames of one batch, from one worker
    num_threads: Threads = 1  # torch threads of the policy's calls
    replay: str | None = None  # a run directory whose recorded schedule is followed

    @property
    def workers(self) -> int:
        return self.num_workers

    @property
    def asynchronous(self) -> bool:
        return True

    @property
    def simulates(self) -> bool:
        return True

    def arguments(self, config: Any) -> dict[str, Any]:
        schedule = self.recording()
        return super().arguments(config) | {
            "num_workers": self.num_workers,
            "num_sub_threads": self.num_threads,
            "schedule": schedule,
            "on_nodes": schedule.header.on_nodes,
        }

    def recording(self) -> Any:
        """The schedule that is followed; `ConfigError` if it cannot be read."""
        from collectors.schedule.recording import RecordedSchedule

        assert self.replay is not None
        file = Path(self.replay) / SCHEDULE
        try:
            check_ordinary(file)
            return RecordedSchedule(file)
        except FileNotFoundError:
            raise ConfigError(
                f"collector.replay={self.replay}: it holds no {SCHEDULE}; asynchronous runs, such "
                "as those of collector=multi_async, have one"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"collector.replay={self.replay}: {error}") from None

    def check(self, config: Any) -> None:
        super().check(config)
        if self.replay is None:
            raise ConfigError("collector.replay is not set")
        header = self.recording().header
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
                f"collector.replay={self.replay}: it was recorded with other sizes; say {needed}"
            )
