"""Where a branch begins: the saved state of another run, with new random streams.

A branch is a run that goes on from the state of its parent after some update. Its directory has a
copy of this state, and its manifest says which moment of which run it is. The seed of a branch
follows from the parent's seed, the update and the number of the repeat. It does not depend on the
options that the branch changes, so branches of one repeat form a pair.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.utils import seeding
from torch import Tensor

from collectors.options.collector_options import ASYNC, SIMULATED
from collectors.rollout.seeds import Seeds, Streams, next_seed, untouched_streams
from harness.files import check_ordinary, read_json, sync_folder
from harness.options.run import Config
from harness.run.checkpoints import CheckpointError, Checkpoints

START = "start"  # of a branch's directory
KINDS = {"simulated": SIMULATED, "multi_async": ASYNC}
# What a collector knows of the schedule before the branch.
_OF_A_SCHEDULE = ("schedule", "versions", "delivered", "dropped", "empty")


@dataclass(frozen=True)
class Branch:
    """A saved state to begin from, and where it comes from, as the manifest has it."""

    start: Path
    origin: dict[str, Any]

    def load(self, config: Config) -> tuple[int, dict[str, Any]]:
        """The frames so far, and the state with the random streams of `config.seed`."""
        frames, state = Checkpoints(self.start).load()
        try:
            return frames, with_new_streams(state, config)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{self.start} holds no state of a run: {error!r}") from error


def branch_of(directory: Path) -> Branch | None:
    """What a run began with, if it is a branch of another one."""
    origin = read_json(directory / "manifest.json").get("branch")
    return Branch(directory / START, origin) if isinstance(origin, dict) else None


def seed_of(seed: int, update: int, repeat: int) -> int:
    """The seed of a branch: the same for all changes of options."""
    return int(np.random.SeedSequence([seed, update, repeat]).generate_state(1)[0]) >> 1


def copy_start(start: Path, directory: Path) -> None:
    """Give a branch's directory the state that it begins from."""
    folder = directory / START
    folder.mkdir()
    share_file(Checkpoints(start).files()[-1], folder)


def share_file(file: Path, folder: Path) -> None:
    """Put a checkpoint into another folder.

    The file is never changed, so a link to it is as good as a copy, and takes no room.
    """
    check_ordinary(file)
    try:
        os.link(file, folder / file.name, follow_symlinks=False)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, folder / file.name)
    sync_folder(folder)


def with_new_streams(state: dict[str, Any], config: Config) -> dict[str, Any]:
    """A saved state whose random streams are those of `config.seed`, and whose schedule begins.

    Episodes that have begun go on; the next ones have new seeds. Batches that asynchronous workers
    had begun are dropped: their workers start with the newest weights, or with the oldest ones that
    an exact lag needs.
    """
    seeds = Seeds(config.seed)
    with untouched_streams():
        torch.manual_seed(seeds.seed)
        seeds.seed_streams()
        streams = Streams().state_dict()
        collector = _collector(state["collector"], config)
    return {
        **state,
        "learner": _learner(state["learner"], next_seed(seeds.seed), config.device),
        "collector": collector,
        "streams": streams,
    }


def _collector(state: dict[str, Any], config: Config) -> dict[str, Any]:
    state = {key: value for key, value in state.items() if key not in _OF_A_SCHEDULE}
    workers = [_worker(one, i, config.seed) for i, one in enumerate(state["workers"])]
    kind = KINDS.get(config.collector.name, state["kind"])
    return {**state, "kind": kind, "seed": config.seed, "workers": workers}


def _worker(state: dict[str, Any], index: int, seed: int) -> dict[str, Any]:
    if "seeds" not in state:  # it has not begun
        return state
    seeds = replace(Seeds(seed).of_worker(index), static=bool(state["seeds"]["static"]))
    seeds.seed_streams()
    environments = dict(state["environments"])
    if environments:
        environments["next_seeds"] = seeds.environments(len(environments["lengths"]))
    return {
        **state,
        "seeds": asdict(seeds),
        "actions": seeding.np_random(seeds.actions())[0].bit_generator.state,
        "streams": Streams().state_dict(),
        "environments": environments,
        "generation": 0,
        "version": -1,  # none yet
    }


def _learner(state: dict[str, Any], seed: int, device: str) -> dict[str, Any]:
    state = {**state, "algorithm": _reseeded(state["algorithm"], seed, device)}
    if "replay" in state:
        state["replay"] = _reseeded(state["replay"], seed, device)
    return state


def _reseeded(state: dict[str, Any], seed: int, device: str) -> dict[str, Any]:
    """The state with another one of its generator, if there is a generator in it."""
    before = state.get("generator")
    if not isinstance(before, Tensor):
        return state
    new = torch.Generator().manual_seed(seed).get_state()
    if new.shape != before.shape:
        new = torch.Generator(device).manual_seed(seed).get_state()
    return {**state, "generator": new}
