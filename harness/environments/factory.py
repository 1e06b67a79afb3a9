"""Environments: what `env=` describes, the wrappers it may name, and factories that travel."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_all_start_methods
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import wrappers as single
from gymnasium.spaces import Box
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector

from harness.checks import at_least, nearest, one_of

VECTORISATIONS = ("none", "sync", "async", "native")

# name: (wrapper of an environment, wrapper of a native vector of them or None)
WRAPPERS: dict[str, tuple[Callable[..., gym.Env], Callable[..., VectorEnv] | None]] = {
    "atari": (single.AtariPreprocessing, None),
    "clip_reward": (single.ClipReward, vector.ClipReward),
    "delay_observation": (single.DelayObservation, None),
    "flatten_observation": (single.FlattenObservation, vector.FlattenObservation),
    "frame_stack": (single.FrameStackObservation, None),
    "grayscale": (single.GrayscaleObservation, vector.GrayscaleObservation),
    "repeat_action": (single.RepeatAction, None),
    "rescale_action": (single.RescaleAction, vector.RescaleAction),
    "rescale_observation": (single.RescaleObservation, vector.RescaleObservation),
    "resize": (single.ResizeObservation, vector.ResizeObservation),
    "sticky_action": (single.StickyAction, None),
    "time_aware": (single.TimeAwareObservation, None),
}

# Where gymnasium keeps environments that need more than gymnasium: the module, and our extra.
EXTRAS = {"gymnasium.envs.mujoco": ("mujoco", "mujoco"), "gymnasium.envs.box2d": ("Box2D", "box2d")}


@dataclass
class EnvConfig:
    """One kind of environment, and how many of them a worker steps."""

    id: str = "CartPole-v1"  # a gymnasium id; "module:Name-v0" imports the module first
    num_envs: int = 8  # environments in each worker
    vectorisation: str = "sync"  # none (one environment), sync, async (a process each) or native
    wrappers: list[Any] = field(
        default_factory=list
    )  # innermost first: name, or {name: {arguments}}
    max_episode_steps: int | None = None  # none: the environment's own limit
    kwargs: dict[str, Any] = field(default_factory=dict)  # for the environment itself

    def validate(self) -> None:
        """Raise ValueError, in one line, if no such environment can be made."""
        spec = find(self.id)
        one_of("env.vectorisation", self.vectorisation, VECTORISATIONS)
        at_least("env.num_envs", self.num_envs, 1)
        if self.vectorisation == "none" and self.num_envs != 1:
            raise ValueError(
                f"env.num_envs is {self.num_envs} with env.vectorisation 'none', expected 1; "
                "env.vectorisation=sync steps several"
            )
        if self.max_episode_steps is not None:
            at_least("env.max_episode_steps", self.max_episode_steps, 1)
        native = self.vectorisation == "native"
        if native and spec.vector_entry_point is None:
            raise ValueError(
                f"env.vectorisation is 'native', but {self.id} has no vector form of its own; "
                "use 'sync'"
            )
        for name, _ in named(self.wrappers):
            if native and WRAPPERS[name][1] is None:
                raise ValueError(
                    f"env.wrappers: {name!r} cannot wrap a native vector; "
                    "use env.vectorisation=sync"
                )


def find(env_id: str) -> gym.envs.registration.EnvSpec:
    """The registered environment of this id; ValueError names the nearest, or the missing extra."""
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        spec = gym.spec(name)
    except (gym.error.Error, ImportError) as error:
        known = nearest(env_id, gym.registry)
        raise ValueError(f"env.id is {env_id!r}, which gymnasium does not know{known}") from error
    except (Exception, SystemExit) as error:  # whatever that module does when it is imported
        what = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"env.id is {env_id!r}, and {module} cannot be imported: {what}"
        ) from error
    for place, (needs, extra) in EXTRAS.items():
        needed = str(spec.entry_point).startswith(place)
        if needed and importlib.util.find_spec(needs) is None:
            raise ValueError(
                f"env.id is {env_id!r}, which needs {needs}; "
                f"install it with: pip install -e '.[{extra}]'"
            )
    return spec


def named(wrappers: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each wrapper's name and arguments, from `name` or `{name: {arguments}}`."""
    found = []
    for entry in wrappers:
        pairs = list(entry.items()) if isinstance(entry, Mapping) else [(entry, {})]
        if len(pairs) != 1:
            raise ValueError(
                f"env.wrappers holds {entry!r}, expected a name or {{name: arguments}}"
            )
        name, arguments = pairs[0]
        one_of("env.wrappers", name, WRAPPERS)
        if not isinstance(arguments, Mapping | None):
            raise ValueError(
                f"env.wrappers gives {name!r} the arguments {arguments!r}, expected a mapping"
            )
        found.append((name, dict(arguments or {})))
    return found


@dataclass(frozen=True)
class EnvFactory:
    """Makes what a config describes, in whatever process: an environment, or a vector of them."""

    config: EnvConfig
    render_mode: str | None = None

    def __call__(self) -> gym.Env | VectorEnv:
        config = self.config
        make_one = partial(_make_one, config, self.render_mode)
        match config.vectorisation:
            case "none":
                return make_one()
            case "native":
                return _make_native(config, self.render_mode)
            # Collectors reset, environment by environment: no frame is spent on resetting alone,
            # and what was reset by them they can bring back when a run is resumed.
            case "sync":
                return SyncVectorEnv(
                    [make_one] * config.num_envs, autoreset_mode=AutoresetMode.DISABLED
                )
            case "async":
                if threading.current_thread() is threading.main_thread():
                    make_one = partial(_make_in_child, os.getpid(), config, self.render_mode)
                return AsyncVectorEnv(
                    [make_one] * config.num_envs,
                    # Elsewhere than in forks, its locks have names that outlive a worker.
                    context="fork" if "fork" in get_all_start_methods() else None,
                    autoreset_mode=AutoresetMode.DISABLED,
                )
        raise ValueError(
            f"env.vectorisation is {config.vectorisation!r}, expected {VECTORISATIONS}"
        )

    def __str__(self) -> str:
        return f"env.id={self.config.id}"


_PR_SET_PDEATHSIG = 1  # Linux's sys/prctl.h


def _make_in_child(maker: int, config: EnvConfig, render_mode: str | None) -> gym.Env:
    """An environment that has a process of its own, which must not outlive its maker.

    It ends by itself when its maker is gone, but not if it hangs: then the kernel ends it. That
    happens, too, when only the thread that started it ends, so this is for the main thread.
    """
    if os.getpid() != maker:  # the vector makes one at home, too, to look at
        with suppress(AttributeError, OSError, TypeError):  # another system
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return _make_one(config, render_mode)


def _make_one(config: EnvConfig, render_mode: str | None) -> gym.Env:
    env = gym.make(
        config.id,
        max_episode_steps=config.max_episode_steps,
        disable_env_checker=True,
        **_arguments(config, render_mode),
    )
    env = ClipToBounds(env) if _bounded(env.action_space) else env
    for name, arguments in named(config.wrappers):
        env = WRAPPERS[name][0](env, **arguments)
    return env


def _make_native(config: EnvConfig, render_mode: str | None) -> VectorEnv:
    kwargs = _arguments(config, render_mode)
    if config.max_episode_steps is not None:
        kwargs["max_episode_steps"] = config.max_episode_steps
    envs = gym.make_vec(
        config.id,
        num_envs=config.num_envs,
        vectorization_mode="vector_entry_point",
        **kwargs,
    )
    envs = ClipVectorToBounds(envs) if _bounded(envs.single_action_space) else envs
    for name, arguments in named(config.wrappers):
        wrapper = WRAPPERS[name][1]
        if wrapper is None:
            raise ValueError(f"env.wrappers: {name!r} cannot wrap a native vector")
        envs = wrapper(envs, **arguments)
    return envs


def _arguments(config: EnvConfig, render_mode: str | None) -> dict[str, Any]:
    """For the environment; one that is not rendered need not know of rendering."""
    return (
        dict(config.kwargs)
        if render_mode is None
        else {**config.kwargs, "render_mode": render_mode}
    )


def _bounded(space: gym.Space) -> bool:
    return isinstance(space, Box) and bool(np.isfinite([space.low, space.high]).any())


class ClipToBounds(gym.ActionWrapper):
    """Clips actions to the space that the environment states, and goes on stating it.

    A Gaussian policy reaches past any bounds; its recorded action stays the one it chose.
    """

    def __init__(self, env: gym.Env):
        super().__init__(env)
        assert isinstance(env.action_space, Box)
        self._bounds = env.action_space.low, env.action_space.high

    def action(self, action: Any) -> Any:
        return np.clip(action, *self._bounds)


class ClipVectorToBounds(vector.TransformAction):
    """`ClipToBounds` for a native vector of environments."""

    def __init__(self, env: VectorEnv):
        space = env.single_action_space
        assert isinstance(space, Box)
        super().__init__(env, partial(np.clip, a_min=space.low, a_max=space.high))
