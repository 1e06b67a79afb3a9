"""Who takes part in the training benchmark, with which algorithm, and with which settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.collect_contestants import OUR_PYTHON, PEER_PYTHON

OURS = "benchmarks.train_ours"
STABLE_BASELINES = "benchmarks.peers.sb3_train"


@dataclass(frozen=True)
class Contestant:
    """A program that trains, and what it is told."""

    module: str
    python: Path
    what: str
    algos: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_peer(self) -> bool:
        return self.python == PEER_PYTHON


CONTESTANTS = {
    "lockstep_single": Contestant(
        OURS,
        OUR_PYTHON,
        "collects and learns in turn, in one process",
        ("ppo", "pong", "sac"),
        {"collector": "single", "num_workers": 1},
    ),
    "lockstep_compiled": Contestant(
        OURS,
        OUR_PYTHON,
        "lockstep_single with algo.compile=true; compiling is part of its time",
        ("ppo", "pong", "sac"),
        {"collector": "single", "num_workers": 1, "compile": True},
    ),
    "lockstep_multi_sync": Contestant(
        OURS,
        OUR_PYTHON,
        "two workers, each with half of the environments, make every batch together",
        ("ppo",),
        {"collector": "multi_sync", "num_workers": 2},
    ),
    "lockstep_multi_async": Contestant(
        OURS,
        OUR_PYTHON,
        "two workers ahead of the learner, each with so many environments",
        ("ppo", "pong"),
        {"collector": "multi_async", "num_workers": 2},
    ),
    "lockstep_one_ahead": Contestant(
        OURS,
        OUR_PYTHON,
        "multi_async with one worker: collects the next batch while the learner trains",
        ("ppo", "pong", "sac"),
        {"collector": "multi_async", "num_workers": 1},
    ),
    "sb3": Contestant(
        STABLE_BASELINES, PEER_PYTHON, "stable-baselines3 with DummyVecEnv", ("ppo", "pong", "sac")
    ),
    "sb3_subproc": Contestant(
        STABLE_BASELINES,
        PEER_PYTHON,
        "stable-baselines3 with SubprocVecEnv: a process for each environment",
        ("ppo", "pong"),
        {"subproc": True},
    ),
    "sb3_16": Contestant(
        STABLE_BASELINES,
        PEER_PYTHON,
        "stable-baselines3, 16 updates after 16 frames, as lockstep",
        ("sac",),
        {"train_freq": 16},
    ),
    "cleanrl": Contestant(
        "benchmarks.peers.cleanrl_train",
        PEER_PYTHON,
        "CleanRL's ppo.py, ppo_atari.py and sac_continuous_action.py",
        ("ppo", "pong", "sac"),
    ),
}
