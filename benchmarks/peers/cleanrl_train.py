"""CleanRL's scripts, as a contestant of the training benchmark.

CleanRL is no package: its algorithms are single files that are run. They are run here as they are,
from a checkout that the user names, with what they import replaced where the peers' environment
does not have it or has moved on since they were written (for gymnasium 0.29):

    tyro.cli            fills in the benchmark's settings instead of reading the command line
    SummaryWriter       notes the episodes' returns and writes nothing
    SyncVectorEnv       ends episodes as 0.29 did: reset in the same step, `final_info` a list
    gymnasium.make      leaves out the checker, as for everybody
    gymnasium.wrappers  have the names of 0.29, too

Counting frames costs a script next to nothing, and not writing event files saves it a little. The
time is from the first reset of its environments to their closing; frames are the steps in between.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import time
import types
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from benchmarks.host import LeftOut
from benchmarks.train_case import SAC, Episodes, Trained, Training, ppo_settings, serve

SCRIPTS = {
    "ppo": "cleanrl/ppo.py",
    "pong": "cleanrl/ppo_atari.py",
    "sac": "cleanrl/sac_continuous_action.py",
}


class Record:
    """What is seen of a script from outside."""

    def __init__(self) -> None:
        self.episodes: list[Episodes] = []
        self.frames = 0
        self.begun: float | None = None
        self.ended: float | None = None

    def trained(self) -> Trained:
        if self.begun is None or self.ended is None:
            raise RuntimeError("the script ended without having made and closed a SyncVectorEnv")
        return Trained(self.frames, self.ended - self.begun, self.episodes)


def settings(training: Training) -> dict[str, Any]:
    """The benchmark's settings by the scripts' names."""
    common = {"seed": training.seed, "total_timesteps": training.frames, "cuda": False}
    if training.algo != "sac":
        ppo = ppo_settings(training.algo)
        return common | {
            "env_id": ppo.env,
            "num_envs": ppo.num_envs,
            "num_steps": ppo.num_steps,
            "num_minibatches": ppo.batch_frames // ppo.minibatch_size,
            "update_epochs": ppo.epochs,
            "learning_rate": ppo.learning_rate,
            "anneal_lr": True,
            "gamma": ppo.gamma,
            "gae_lambda": ppo.gae_lambda,
            "norm_adv": True,
            "clip_coef": ppo.clip,
            "clip_vloss": True,
            "ent_coef": ppo.entropy_weight,
            "vf_coef": ppo.value_weight,
            "max_grad_norm": ppo.max_grad_norm,
        }
    return common | {
        "env_id": SAC.env,
        "num_envs": 1,
        "buffer_size": max(training.frames, SAC.batch_size),
        "batch_size": SAC.batch_size,
        "learning_starts": SAC.learning_starts,
        "policy_lr": SAC.policy_learning_rate,
        "q_lr": SAC.critic_learning_rate,
        "gamma": SAC.gamma,
        "tau": SAC.tau,
        "policy_frequency": SAC.policy_delay,
        "autotune": True,
    }


def recorded_vector(record: Record) -> type[SyncVectorEnv]:
    """gymnasium's vector with the episodes' ends of 0.29, which tells `record` what happens."""

    class RecordedVector(SyncVectorEnv):
        def __init__(self, env_fns: Any, **options: Any):
            super().__init__(env_fns, autoreset_mode=AutoresetMode.SAME_STEP, **options)

        def reset(self, **options: Any) -> Any:
            if record.begun is None:
                record.begun = time.perf_counter()
            return super().reset(**options)

        def step(self, actions: Any) -> Any:
            *moved, infos = super().step(actions)
            record.frames += self.num_envs
            if "final_info" in infos:
                infos["final_observation"] = infos["final_obs"]
                infos["final_info"] = as_list(infos["final_info"], infos["_final_info"])
            return *moved, infos

        def close(self, **options: Any) -> None:
            if record.ended is None:
                record.ended = time.perf_counter()
            super().close(**options)

    return RecordedVector


def as_list(infos: dict[str, Any], ended: np.ndarray) -> list[dict[str, Any] | None]:
    """The episode's figures of each environment whose episode ended, and None of the others."""
    episode = infos["episode"]
    return [
        {"episode": {"r": episode["r"][i], "l": episode["l"][i]}} if ended[i] else None
        for i in range(len(ended))
    ]


def summary_writer(record: Record) -> type:
    """What stands in for TensorBoard's."""

    class Writer:
        def __init__(self, *_: Any, **__: Any):
            pass

        def add_text(self, *_: Any, **__: Any) -> None:
            pass

        def add_scalar(self, name: str, value: Any, step: int) -> None:
            if name == "charts/episodic_return":
                record.episodes.append(Episodes(int(step), float(np.ravel(value)[0])))

        def close(self) -> None:
            pass

    return Writer


def replace_imports(record: Record, given: dict[str, Any]) -> None:
    """Make the script's imports find what this module's docstring lists, until the process ends."""
    tyro = types.ModuleType("tyro")
    tyro.cli = lambda arguments: arguments(**given)  # type: ignore[attr-defined]
    tensorboard = types.ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = summary_writer(record)  # type: ignore[attr-defined]
    sys.modules["tyro"], sys.modules["torch.utils.tensorboard"] = tyro, tensorboard
    gymnasium.vector.SyncVectorEnv = recorded_vector(record)  # type: ignore[misc]
    wrappers: Any = gymnasium.wrappers
    wrappers.GrayScaleObservation = wrappers.GrayscaleObservation
    wrappers.FrameStack = wrappers.FrameStackObservation
    gymnasium.make = functools.partial(gymnasium.make, disable_env_checker=True)


def find_script(algo: str, checkout: str | None) -> Path:
    if checkout is None:
        raise LeftOut("absent: it is no package; name a checkout of it with --cleanrl PATH")
    script = Path(checkout) / SCRIPTS[algo]
    if not script.is_file():
        raise LeftOut(f"absent: --cleanrl {checkout} holds no {SCRIPTS[algo]}")
    return script


def train(training: Training, options: dict[str, Any]) -> Trained:
    script = find_script(training.algo, options["cleanrl"])
    record = Record()
    replace_imports(record, settings(training))
    if training.algo == "pong":
        import ale_py

        gymnasium.register_envs(ale_py)
    sys.path.insert(0, options["cleanrl"])  # for its cleanrl_utils
    os.chdir(training.scratch)
    runpy.run_path(str(script), run_name="__main__")
    return record.trained()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(train)
