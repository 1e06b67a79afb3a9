"""What a replay takes from its recording, and what it therefore refuses.

The schedule says which frames of which worker had which version. So a replay has the options that
made the schedule as the recorded run had them, and its learner must publish each version before the
schedule has a worker act with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from collectors.schedule.recording import PlannedBatch, RecordedSchedule
from harness.config.stored import read_options
from harness.errors import ConfigError, show
from harness.files import flatten
from harness.options.base import convert
from harness.options.run import Config
from harness.options.simulated import SimulatedConfig
from lockstep_check.ages import is_within

# What has done its work when the schedule is recorded.
KEPT = (
    "sync.apply_at",
    "sync.interval",
    "sync.blocking",
    "sync.lag",
    "sync.lag_seed",
    "sync.link",
    "collector.batches_ahead",
)
# Which frames the learner leaves out is its own decision, as long as the versions come out.
LIMITS = ("sync.max_lag", "sync.on_stale", "algo.max_lag", "algo.on_stale")


def follow_recording(options: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set what the recording decides, unless the command line sets it.

    `ConfigError` if the command line asks for another seed, or for more frames than were recorded.
    Other contradictions are refused with all other options: `check_replay`, and for sizes
    harness/options/simulated.py.
    """
    collector = options.get("collector")
    if not isinstance(collector, dict) or not (replay := collector.get("replay")):
        return
    schedule = SimulatedConfig.recording(str(replay))
    header = schedule.header
    if not schedule.num_frames:
        raise ConfigError(f"collector.replay={replay}: the run ended before its first batch")
    stored = _stored(replay)
    total_frames = stored.get("total_frames")  # on which a learning rate may depend
    recorded = {
        "seed": header.seed,
        "total_frames": total_frames if type(total_frames) is int else schedule.num_frames,
        "collector.num_workers": header.num_workers,
        "collector.frames_per_batch": header.frames_per_batch,
        "env.num_envs": header.num_envs,
    }
    typed = [text.partition("=")[0].lstrip("+") for text in overrides]
    names = KEPT if any(name in typed for name in LIMITS) else (*KEPT, *LIMITS)
    recorded |= {name: value for name in names if (value := _get(stored, name)) is not _ABSENT}
    for name, value in recorded.items():
        if not any(one == name or one.startswith(f"{name}.") for one in typed):
            _set(options, name, value)
    seed, total = (convert(int, options[name], name) for name in ("seed", "total_frames"))
    if seed != header.seed:
        raise ConfigError(
            f"seed={seed}: {replay} was recorded with seed={header.seed}, which its replay keeps; "
            f"lockstep reproduce {replay} --set seed={seed} follows its schedule with "
            "another one"
        )
    if "total_frames" in typed and total > schedule.num_frames:
        raise ConfigError(
            f"total_frames={total}: {replay} has recorded "
            f"{schedule.num_frames} frames; expected {schedule.num_frames} or less"
        )


def check_replay(config: Config) -> None:
    """`ConfigError` for options that a replay would ignore, or with which it would fail."""
    collector = config.collector
    if not isinstance(collector, SimulatedConfig) or collector.replay is None:
        return
    for name in ("costs", "network", "failures"):
        value, default = getattr(collector, name), getattr(SimulatedConfig(), name)
        for option, typed, usual in _differences(f"collector.{name}", value, default):
            raise ConfigError(
                f"{option}: a replay takes its times from the recording, and would ignore "
                f"{show(typed)}; leave it at {show(usual)}"
            )
    _check_kept(config, collector.replay)
    _check_versions(config, SimulatedConfig.recording(collector.replay), collector.replay)


def _check_kept(config: Config, replay: str) -> None:
    stored = _stored(replay)
    for name in KEPT:
        before = _get(stored, name)
        if before is _ABSENT:
            continue
        for option, typed, recorded in _differences(name, _get(config, name), before):
            raise ConfigError(
                f"{option}={show(typed)}: {replay} was recorded with {option}={show(recorded)}, "
                "which its replay keeps; leave it out"
            )
    if config.sync.on_stale == "wait" and _get(stored, "sync.on_stale") != "wait":
        raise ConfigError(
            "sync.on_stale=wait: the workers of a replay wait where they waited in the recorded "
            "run; use sync.on_stale=drop or mask"
        )


def _check_versions(config: Config, schedule: RecordedSchedule, replay: str) -> None:
    """Refuse a learner that would not publish a version in time."""
    size = schedule.num_steps * schedule.header.num_envs  # of one worker's frames in a batch
    updates = _Updates(config)
    group: list[PlannedBatch] = []
    for number, batch in enumerate(schedule.batches, 1):
        newest = updates.count // config.sync.interval
        version = max(version for _, version in batch.versions)
        if version > newest:
            raise ConfigError(
                f"collector.replay={replay}: batch {number} of {replay} acts with version "
                f"{version}, and this run would have published {newest}: it leaves out batches "
                "that the recorded run learned from"
            )
        if not batch.lost:
            group.append(batch)
        if len(group) == schedule.group_size:
            updates.add(group, size * len(group), newest)
            group = []
        if updates.frames >= config.total_frames:
            return


class _Updates:
    """Counts the updates of a run: the batches that its learner learns from."""

    def __init__(self, config: Config):
        self._algo: Any = config.algo
        self.count = self.frames = 0
        self._owed = 0.0

    def add(self, group: Sequence[PlannedBatch], frames: int, newest: int) -> None:
        self.frames += frames
        learns = (
            self._learns_from_replay(frames) if self._algo.replays else self._takes(group, newest)
        )
        self.count += learns

    def _takes(self, group: Sequence[PlannedBatch], newest: int) -> bool:
        max_lag = getattr(self._algo, "max_lag", None)
        versions = [version for batch in group for _, version in batch.versions]
        return max_lag is None or is_within(max(versions), newest, max_lag)

    def _learns_from_replay(self, frames: int) -> bool:
        if self.frames < max(self._algo.learning_starts, self._algo.batch_size):
            return False
        self._owed += frames * self._algo.updates_per_frame
        steps = int(self._owed)
        self._owed -= steps
        return steps > 0


# -- options by dotted names

_ABSENT = object()


def _stored(replay: str) -> dict[str, Any]:
    """The recorded run's options; none if there is only the schedule."""
    try:
        return read_options(Path(replay))
    except ConfigError:
        return {}


def _get(options: Any, name: str) -> Any:
    for key in name.split("."):
        if isinstance(options, Mapping):
            options = options.get(key, _ABSENT)
        else:
            options = getattr(options, key, _ABSENT)
    return options


def _set(options: dict[str, Any], name: str, value: Any) -> None:
    """Set an option that there is."""
    group, _, last = name.rpartition(".")
    place = options.get(group) if group else options
    if isinstance(place, dict) and (not group or last in place):
        place[last] = value


def _differences(name: str, value: Any, other: Any) -> list[tuple[str, Any, Any]]:
    """The options of this name or below it that both have, with different values."""
    ones, others = (dict(flatten(_plain(one), lists=False, above=name)) for one in (value, other))
    if ones.keys().isdisjoint(others):
        return [(name, value, other)]
    return [
        (key, ones[key], others[key]) for key in ones if ones[key] != others.get(key, ones[key])
    ]


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
