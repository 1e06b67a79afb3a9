"""Which kinds of environments collectors take: each one tried, and shown as a row of a table.

    .venv/bin/python docs/environment_kinds.py [--only NAME] > table.md

What is not installed is left out. Actions are random. A row says on how many frames, of one process
and of two workers, it was checked that each goes on from the one before; whether rows are full,
whether the same seed gives the same bits, and whether a collector resumes within an episode.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TransformAction

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collectors import Collector, MultiSyncCollector

STEPS, ENOUGH_ENDS, MOST_BATCHES = 100, 3, 30
HEAD = (
    "kind | environment | observations | actions | frames checked | rows full | same bits | resumes"
)
ENDS = {"reward", "terminated", "truncated", "done"}


class Sampled(gym.Env[Any, Any]):
    """Shows samples of a space; episodes have 7 steps."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any]):
        self.observation_space, self.action_space, self.t = observation, action, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.t += 1
        return self._show(), 1.0, self.t == 7, False, {}

    def _show(self) -> Any:
        self.observation_space.seed(int(self.np_random.integers(1 << 30)))
        return self.observation_space.sample()


def single(name: str, package: str = "", **options: Any) -> Callable[[], Any]:
    """A factory of one environment that gymnasium knows, once the package has registered it."""

    def make() -> Any:
        if package:
            getattr(importlib.import_module(package), "register_envs", bool)()
        return gym.make(name, **options)

    return make


def synchronous(make: Callable[[], Any], mode: AutoresetMode) -> Callable[[], Any]:
    return lambda: SyncVectorEnv([make] * 3, autoreset_mode=mode)


def asynchronous(make: Callable[[], Any], mode: AutoresetMode, shared: bool) -> Callable[[], Any]:
    return lambda: AsyncVectorEnv([make] * 3, shared_memory=shared, autoreset_mode=mode)


def pool(name: str) -> Callable[..., Any]:
    def make(seed: int) -> Any:
        envpool = importlib.import_module("envpool")
        return envpool.make(name, env_type="gymnasium", num_envs=3, seed=seed)

    return make


def atari_vector(mode: AutoresetMode) -> Callable[[], Any]:
    def make() -> Any:
        module = importlib.import_module("ale_py.vector_env")
        return module.AtariVectorEnv("breakout", 3, autoreset_mode=mode)

    return make


def flattened(env: Any) -> Any:
    """The environment with actions of one array, as the error about Dict actions says."""
    space = env.action_space
    return TransformAction(
        env, lambda action: spaces.unflatten(space, action), spaces.flatten_space(space)
    )


def kinds() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Kind, environment and factory of every row."""
    cartpole, box = single("CartPole-v1"), spaces.Box(-1, 1, (3,), np.float32)
    for name in ("CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Blackjack-v1"):
        yield "plain", name, single(name)
    goals = spaces.Dict(image=spaces.Box(0, 255, (8, 8, 3), np.uint8), goal=box)
    actions = {
        "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
        "MultiBinary": spaces.MultiBinary(3),
        "Dict": spaces.Dict(move=box, fire=spaces.Discrete(2)),
    }
    for name, action in actions.items():
        yield "plain", f"sampled, {name} actions", lambda a=action: Sampled(goals, a)
    yield "plain", "the same, flattened", lambda: flattened(Sampled(goals, actions["Dict"]))
    yield "plain", "sampled, Text", lambda: Sampled(spaces.Text(5), spaces.Discrete(2))
    for mode in AutoresetMode:
        yield f"SyncVectorEnv, {mode.name}", "CartPole-v1", synchronous(cartpole, mode)
    parts = lambda: Sampled(goals, actions["MultiDiscrete"])  # noqa: E731
    yield "SyncVectorEnv", "sampled, Dict", synchronous(parts, AutoresetMode.NEXT_STEP)
    for shared in (True, False):
        title = f"AsyncVectorEnv(shared_memory={shared})"
        for mode in AutoresetMode:
            yield f"{title}, {mode.name}", "CartPole-v1", asynchronous(cartpole, mode, shared)
        yield title, "sampled, Dict", asynchronous(parts, AutoresetMode.NEXT_STEP, shared)
    for how in ("sync", "async", "vector_entry_point"):
        yield (
            f"make_vec, {how}",
            "CartPole-v1",
            lambda how=how: gym.make_vec("CartPole-v1", 3, vectorization_mode=how),
        )
    for name in ("CartPole-v1", "Pendulum-v1", "Pong-v5"):
        yield "envpool", name, pool(name)
    yield "ALE", "ALE/Breakout-v5", single("ALE/Breakout-v5", "ale_py")
    for mode in AutoresetMode:
        yield f"AtariVectorEnv, {mode.name}", "breakout", atari_vector(mode)
    for name in ("Hopper-v5", "HalfCheetah-v5"):
        yield "MuJoCo", name, single(name, "mujoco")
    yield "MinAtar", "MinAtar/Breakout-v1", single("MinAtar/Breakout-v1", "minatar.gym")
    yield "MiniGrid", "MiniGrid-Empty-5x5-v0", single("MiniGrid-Empty-5x5-v0", "minigrid")
    for name in ("cartpole-balance-v0", "reacher-easy-v0"):
        yield "dm_control (shimmy)", f"dm_control/{name}", single(f"dm_control/{name}", "shimmy")


def check(batch: Any) -> tuple[int, int, bool]:
    """Frames, ends of episodes, and whether rows are full; an error if a frame does not follow."""
    mask, done = batch["collector", "mask"], batch["next", "done"]
    starts = batch["is_init"][:, 1:]
    both = mask[:, 1:] & mask[:, :-1]
    assert torch.equal(starts[both], done[:, :-1][both]), "a start does not follow an end"
    for key in batch["next"].keys(True, True):
        if key not in ENDS and key in batch.keys(True, True):
            now, after = batch[key][:, 1:], batch["next"][key][:, :-1]
            going = both & ~starts
            assert torch.equal(now[going], after[going]), f"{key} does not go on"
    return int(mask.sum()), int((done & mask).sum()), bool(mask.all())


def digest(batch: Any) -> str:
    found = hashlib.sha256()
    for key in sorted(batch.keys(True, True), key=str):
        found.update(batch[key].contiguous().numpy().tobytes())
    return found.hexdigest()


def collect(make: Callable[..., Any], num_envs: int) -> tuple[list[str], int, int, bool, Any]:
    """Digests of batches, their frames, ends, whether rows are full; and the state at the end."""
    digests, frames, ends, full = [], 0, 0, True
    with Collector(make, None, frames_per_batch=STEPS * num_envs, seed=1) as collector:
        while ends < ENOUGH_ENDS and len(digests) < MOST_BATCHES:
            batch = collector.next()
            more, ended, is_full = check(batch)
            frames, ends, full = frames + more, ends + ended, full and is_full
            digests.append(digest(batch))
        return digests, frames, ends, full, collector.state_dict()


def try_out(make: Callable[..., Any], num_envs: int) -> str:
    """What a row says of an environment that works."""
    digests, frames, ends, full, state = collect(make, num_envs)
    same = collect(make, num_envs)[0] == digests
    with Collector(make, None, frames_per_batch=STEPS * num_envs, seed=2) as other:
        resumes = other.load_state_dict(state)
    size = STEPS * num_envs * 2
    with MultiSyncCollector(make, None, num_workers=2, frames_per_batch=size, seed=1) as several:
        more, ended, _ = check(several.next())
    said = ("no", "yes")
    shown = f"{frames + more:,}, {ends + ended} ends"
    return f"{shown} | {said[full]} | {said[same]} | {said[resumes]}"


def described(space: spaces.Space[Any]) -> str:
    """A space in a few words."""
    if isinstance(space, spaces.Dict):
        inner = ", ".join(f"{name}: {described(part)}" for name, part in space.spaces.items())
        return f"Dict({inner})"
    if isinstance(space, spaces.Tuple):
        return f"Tuple({', '.join(map(described, space.spaces))})"
    if isinstance(space, spaces.Box):
        return f"Box{list(space.shape)} {space.dtype}"
    sizes = {spaces.Discrete: "n", spaces.MultiDiscrete: "nvec", spaces.MultiBinary: "n"}
    return f"{type(space).__name__}({getattr(space, sizes.get(type(space), ''), '')})"


def row(kind: str, name: str, make: Callable[..., Any]) -> str | None:
    """One row; None if the environment's package is not installed."""
    try:
        env = make(seed=0) if kind == "envpool" else make()
    except (ImportError, gym.error.DependencyNotInstalled, gym.error.NameNotFound):
        return None
    except Exception as error:  # noqa: BLE001 - the row shows it
        return f"| {kind} | {name} | | | not made: {short(error)} | | | |"
    parts = [
        described(getattr(env, f"single_{what}_space", getattr(env, f"{what}_space")))
        for what in ("observation", "action")
    ]
    num_envs = getattr(env, "num_envs", 1)
    env.close()
    try:
        found = try_out(make, num_envs)
    except Exception as error:  # noqa: BLE001 - the row shows it
        found = f"refused: {short(error)} | | |"
    return f"| {kind} | {name} | {' | '.join(parts)} | {found} |"


def short(error: Exception) -> str:
    text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return text.replace("|", "/")[:280]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows with this in their kind or environment")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
    gym.logger.min_level = gym.logger.ERROR
    print(f"| {HEAD} |\n|{'---|' * (HEAD.count('|') + 1)}")
    for kind, name, make in kinds():
        if only in f"{kind} {name}" and (shown := row(kind, name, make)) is not None:
            print(shown, flush=True)


if __name__ == "__main__":
    main()
