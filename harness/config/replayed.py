"""`collector.replay=RUN`: sizes, seed and length of the run come from the recording."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.config.stored import read_options
from harness.options.errors import ConfigError
from harness.options.simulated import SimulatedConfig
from harness.options.typed import convert


def follow_recording(options: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set what the recording decides, unless the command line sets it.

    `ConfigError` if the command line asks for another seed, or for more frames than were recorded.
    Contradicting sizes are refused with all other options (harness/options/simulated.py).
    """
    collector = options.get("collector")
    if not isinstance(collector, dict) or not (replay := collector.get("replay")):
        return
    schedule = SimulatedConfig.recording(str(replay))
    header = schedule.header
    if not schedule.num_frames:
        raise ConfigError(f"collector.replay={replay}: the run ended before its first batch")
    typed = {text.partition("=")[0].lstrip("+") for text in overrides}
    recorded = {
        "seed": header.seed,
        "total_frames": _total_frames(replay, schedule.num_frames),
        "collector.num_workers": header.num_workers,
        "collector.frames_per_batch": header.num_steps * header.num_envs,
        "env.num_envs": header.num_envs,
    }
    for name, value in recorded.items():
        group, _, last = name.rpartition(".")
        place = options.get(group) if group else options
        if name not in typed and isinstance(place, dict):
            place[last] = value
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


def _total_frames(replay: str, num_frames: int) -> int:
    """Those of the recorded run, on which a learning rate may depend; or the recorded frames."""
    try:
        total = read_options(Path(replay)).get("total_frames")
    except ConfigError:  # the schedule alone, say
        return num_frames
    return total if type(total) is int else num_frames
