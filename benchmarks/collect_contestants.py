"""Who takes part in the collection benchmark, in which cases, and with which settings."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.collect_case import OUR_MODES, Case
from benchmarks.contest import Contestant, Options

OURS = "benchmarks.collect_ours"
MAX_PROCESSES = 8  # of environments, in settings that want one for each


def only(options: Options) -> Callable[[Case], list[Options]]:
    """One setting, whatever the case, but for the modes which only we have."""
    return lambda case: [] if case.mode in OUR_MODES else [options]


def torchrl_settings(case: Case) -> list[Options]:
    """All that may be fastest in one process; with workers, where a start is dear, what was.

    There, other environments than the first and compiled policies were seen to be slower, and only
    the single collector can do without trajectory ids.
    """
    if case.mode in OUR_MODES:
        return []
    first = "GymEnv" if case.num_envs == 1 else "SyncVectorEnv"
    variations: list[Options] = [{}, {"use_buffers": False}]
    if case.mode == "single":
        variations.append({"track_traj_ids": False, "use_buffers": False})
        variations.append({"compile_policy": True})
    others = torchrl_vectors(case) if case.mode == "single" else []
    return [{"env": first, **each} for each in variations] + others


def torchrl_vectors(case: Case) -> list[Options]:
    """The vectors that torchrl makes of environments itself; with workers, the fastest of them."""
    if case.num_envs == 1 or case.mode in OUR_MODES:
        return []
    few = case.mode == "single" and case.num_envs <= MAX_PROCESSES
    kinds = ["SerialEnv", *(["ParallelEnv", "AsyncVectorEnv"] if few else [])]
    return [{"env": kind} for kind in kinds]


CONTESTANTS = {
    "bare": Contestant("benchmarks.collect_bare", "environment and policy, no collector", only({})),
    "lockstep": Contestant(OURS, "our collectors, default settings", lambda case: [{}]),
    "lockstep_views": Contestant(
        OURS,
        "the same with copy=False: a batch is valid until the next",
        lambda case: [{"copy": False}],
    ),
    "torchrl": Contestant(
        "benchmarks.peers.torchrl_collect",
        "torchrl's collectors, the fastest of the settings tried",
        torchrl_settings,
        is_peer=True,
    ),
    "torchrl_vectors": Contestant(
        "benchmarks.peers.torchrl_collect",
        "the same with a vector of torchrl's own: SerialEnv, ParallelEnv or GymEnv(num_envs=...)",
        torchrl_vectors,
        is_peer=True,
    ),
    "sb3": Contestant(
        "benchmarks.peers.sb3_collect",
        "stable-baselines3's collect_rollouts: DummyVecEnv, or SubprocVecEnv of all environments",
        only({}),
        is_peer=True,
    ),
    "gymnasium": Contestant(
        "benchmarks.peers.gymnasium_collect",
        "the bare loop over an AsyncVectorEnv, a process for each environment",
        only({}),
        is_peer=True,
    ),
}


def label(options: Options) -> str:
    """A setting in a few words."""
    env = [options["env"]] if "env" in options else []
    return ", ".join(env + [f"{key}={value}" for key, value in options.items() if key != "env"])
