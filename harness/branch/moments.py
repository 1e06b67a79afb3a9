"""The states of a run at the asked updates, which its branches begin with.

A run keeps a few checkpoints. So it is done again up to the last of these updates, with the same
bits: by its seed, or by its recorded schedule. States are saved on the way:

    <out>/moments/40/<frames>-<hash>.safetensors
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.callbacks import Callback, Pruned, RunView
from harness.config.plan import RunPlan
from harness.errors import ConfigError
from harness.files import one_line, read_json
from harness.reproduce import is_recorded, stored_plan, why_unrecorded
from harness.run.branch_start import branch_of
from harness.run.checkpoints import CheckpointError, Checkpoints, frames_of, read
from harness.run_comparison import is_repeatable
from harness.run_directory import RunDir

MOMENTS = "moments"


class Moments(Callback):
    """Saves the run's state after these updates, and ends the run after the last of them."""

    def __init__(self, folder: Path, updates: Sequence[int]):
        super().__init__()
        self.folder = folder
        self.left = sorted(updates)

    def on_batch_end(self, run: RunView) -> None:
        if run.updates < self.left[0]:
            return
        update = self.left.pop(0)
        self.folder.mkdir(exist_ok=True)
        Checkpoints(self.folder / f"{update}").save(run.frames, run.state_dict())  # type: ignore[attr-defined]
        if not self.left:
            raise Pruned(f"the state after update {update} is saved, and no later one is needed")


def way_to(parent: Path, *, import_env: bool, plugins: Sequence[str]) -> RunPlan | None:
    """The plan that leads to any moment of the parent; None if only its checkpoints do.

    `ConfigError` or `ValueError` if the parent cannot be branched at all.
    """
    plan = stored_plan(parent, Path(), import_env=import_env, plugins=plugins, unfinished=True)
    replay = getattr(plan.config.collector, "replay", None)
    if replay not in (None, str(parent)):
        raise ConfigError(f"{parent} is a replay of {replay}: branch that run instead")
    if read_json(parent / "manifest.json").get("resumed"):
        return None
    exact = is_repeatable(plan.config)
    return plan if exact or (is_recorded(parent) and branch_of(parent) is None) else None


def why_no_way(parent: Path, plan: RunPlan) -> str:
    """Why a run cannot be done again with the same bits."""
    if read_json(parent / "manifest.json").get("resumed"):
        return "it was resumed, and only its last part has a config"
    return why_unrecorded(plan.config) or "its bits depend on timing, and it recorded no schedule"


def check_moments(parent: Path, updates: Sequence[int]) -> None:
    """Raise `ConfigError` for an update that the run did not do, or after which nothing follows."""
    done = read_json(parent / "summary.json").get("updates")
    for update in updates:
        if update < 1:
            raise ConfigError(
                f"--at {update}: expected an update from 1 on; a run with other options from the "
                "start is a run of its own"
            )
        if isinstance(done, int) and update >= done:
            raise ConfigError(
                f"--at {update}: {parent} has {done} updates; expected {done - 1} or less, so "
                "that something follows"
            )


def stored_moments(parent: Path, updates: Sequence[int]) -> dict[int, Path]:
    """The checkpoints of a run that were written after these updates, each in its folder's name.

    `ConfigError` if there is none for one of the updates.
    """
    checkpoints: dict[int, Path] = {}
    for file in Checkpoints(parent / "checkpoints").files():
        try:
            number = read(file, run=RunDir(parent).read_id()).get("updates")
        except CheckpointError:
            continue
        if isinstance(number, int):
            checkpoints[number] = file
    for update in updates:
        if update not in checkpoints:
            there = ", ".join(map(str, sorted(checkpoints))) or "none"
            raise ConfigError(
                f"--at {update}: there is no checkpoint after this update; those of {parent} are "
                f"after {there}"
            )
    return {update: checkpoints[update] for update in updates}


def moments_plan(plan: RunPlan, directory: Path, folder: Path, updates: Sequence[int]) -> RunPlan:
    """The plan of a run in a directory that saves the states after these updates in a folder."""
    options = {**plan.options, "checkpoint": {**plan.options["checkpoint"], "every_frames": None}}
    config = replace(plan.config, checkpoint=replace(plan.config.checkpoint, every_frames=None))
    return replace(
        plan,
        config=config,
        options=options,
        directory=directory,
        replace_done=True,
        watchers=[Moments(folder, updates)],
    )


def saved_moment(moments: Path, update: int) -> Path | None:
    """The folder of a saved state; None if there is none."""
    folder = moments / f"{update}"
    return folder if Checkpoints(folder).files() else None


def frames_at(folder: Path) -> int:
    """The frames of the run at a saved state; 0 without one."""
    return max(map(frames_of, Checkpoints(folder).files()), default=0)


def how_it_ended(directory: Path, output: Path) -> str:
    """What a run that was done here says of its failure, in one line."""
    error = read_json(directory / "status.json").get("error") if directory.is_dir() else None
    if isinstance(error, str):
        return one_line(error)
    lines = output.read_text(errors="replace").splitlines() if output.is_file() else []
    if lines:
        return one_line(lines[-1])
    if shutil.disk_usage(output.parent).free:
        return "it printed nothing"
    return f"it could print nothing: the disk of {output.parent.parent} is full"
