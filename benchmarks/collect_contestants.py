"""Who takes part in the collection benchmark, in which environment, and with which settings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.collect_case import OUR_MODES, Case
from benchmarks.remote import ROOT

OUR_PYTHON = Path(sys.executable)
OURS = "benchmarks.collect_ours"
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
MAX_PROCESSES = 8  # of environments, in settings that want one for each

Options = dict[str, Any]


@dataclass(frozen=True)
class Contestant:
    """A program that collects; `settings` are the ones to choose the fastest of."""

    module: str
    python: Path
    what: str
    settings: Callable[[Case], list[Options]]

    @property
    def is_peer(self) -> bool:
        return self.python == PEER_PYTHON

    def has(self, mode: str) -> bool:
        """Whether it takes part in cases of this mode."""
        return mode not in OUR_MODES or self.module == OURS


def only(options: Options) -> Callable[[Case], list[Options]]:
    """One setting, whatever the case."""
    return lambda case: [options]


def torchrl_settings(case: Case) -> list[Options]:
    """All that may be fastest in one process; with workers, where a start is dear, what was.

    There, other environments than the first and compiled policies were seen to be slower, and only
    the single collector can do without trajectory ids.
    """
    first = "GymEnv" if case.num_envs == 1 else "SyncVectorEnv"
    variations: list[Options] = [{}, {"use_buffers": False}]
    if case.mode == "single":
        variations.append({"track_traj_ids": False, "use_buffers": False})
        variations.append({"compile_policy": True})
    others = torchrl_vectors(case) if case.mode == "single" else []
    return [{"env": first, **each} for each in variations] + others


def torchrl_vectors(case: Case) -> list[Options]:
    """The vectors that torchrl makes of environments itself; with workers, the fastest of them."""
    if case.num_envs == 1:
        return []
    few = case.mode == "single" and case.num_envs <= MAX_PROCESSES
    kinds = ["SerialEnv", *(["ParallelEnv", "AsyncVectorEnv"] if few else [])]
    return [{"env": kind} for kind in kinds]


CONTESTANTS = {
    "bare": Contestant(
        "benchmarks.collect_bare", OUR_PYTHON, "environment and policy, no collector", only({})
    ),
    "lockstep": Contestant(OURS, OUR_PYTHON, "our collectors, default settings", only({})),
    "lockstep_views": Contestant(
        OURS,
        OUR_PYTHON,
        "the same with copy=False: a batch is valid until the next",
        only({"copy": False}),
    ),
    "torchrl": Contestant(
        "benchmarks.peers.torchrl_collect",
        PEER_PYTHON,
        "torchrl's collectors, the fastest of the settings tried",
        torchrl_settings,
    ),
    "torchrl_vectors": Contestant(
        "benchmarks.peers.torchrl_collect",
        PEER_PYTHON,
        "the same with a vector of torchrl's own: SerialEnv, ParallelEnv or GymEnv(num_envs=...)",
        torchrl_vectors,
    ),
    "sb3": Contestant(
        "benchmarks.peers.sb3_collect",
        PEER_PYTHON,
        "stable-baselines3's collect_rollouts: DummyVecEnv, or SubprocVecEnv of all environments",
        only({}),
    ),
    "gymnasium": Contestant(
        "benchmarks.peers.gymnasium_collect",
        PEER_PYTHON,
        "the bare loop over an AsyncVectorEnv, a process for each environment",
        only({}),
    ),
}


def label(options: Options) -> str:
    """A setting in a few words."""
    env = [options["env"]] if "env" in options else []
    return ", ".join(env + [f"{key}={value}" for key, value in options.items() if key != "env"])
