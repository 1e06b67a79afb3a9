"""Who takes part in the training benchmark, with which algorithm, and with which settings."""

from __future__ import annotations

from typing import Any

from benchmarks.contest import Contestant

OURS = "benchmarks.train_ours"
STABLE_BASELINES = "benchmarks.peers.sb3_train"


def trainer(
    module: str, what: str, *algos: str, is_peer: bool = False, **options: Any
) -> Contestant:
    """A contestant that trains with these algorithms."""
    return Contestant(module, what, lambda algo: [options] if algo in algos else [], is_peer)


CONTESTANTS = {
    "lockstep_single": trainer(
        OURS,
        "collects and learns in turn, in one process",
        *("ppo", "pong", "sac"),
        collector="single",
        num_workers=1,
    ),
    "lockstep_compiled": trainer(
        OURS,
        "lockstep_single with algo.compile=true; compiling is part of its time",
        *("ppo", "pong", "sac"),
        collector="single",
        num_workers=1,
        compile=True,
    ),
    "lockstep_multi_sync": trainer(
        OURS,
        "two workers, each with half of the environments, make every batch together",
        "ppo",
        collector="multi_sync",
        num_workers=2,
    ),
    "lockstep_multi_async": trainer(
        OURS,
        "two workers ahead of the learner, each with so many environments",
        *("ppo", "pong"),
        collector="multi_async",
        num_workers=2,
    ),
    "lockstep_one_ahead": trainer(
        OURS,
        "multi_async with one worker: collects the next batch while the learner trains",
        *("ppo", "pong", "sac"),
        collector="multi_async",
        num_workers=1,
    ),
    "sb3": trainer(
        STABLE_BASELINES,
        "stable-baselines3 with DummyVecEnv",
        *("ppo", "pong", "sac"),
        is_peer=True,
    ),
    "sb3_subproc": trainer(
        STABLE_BASELINES,
        "stable-baselines3 with SubprocVecEnv: a process for each environment",
        *("ppo", "pong"),
        is_peer=True,
        subproc=True,
    ),
    "sb3_16": trainer(
        STABLE_BASELINES,
        "stable-baselines3, 16 updates after 16 frames, as lockstep",
        "sac",
        is_peer=True,
        train_freq=16,
    ),
    "cleanrl": trainer(
        "benchmarks.peers.cleanrl_train",
        "CleanRL's ppo.py, ppo_atari.py and sac_continuous_action.py",
        *("ppo", "pong", "sac"),
        is_peer=True,
    ),
}
