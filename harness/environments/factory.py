"""Environments from a config, created by factories that are sent to the workers."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_all_start_methods
from typing import Any, NamedTuple, TypeGuard

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TransformAction, TransformReward, vector

from harness.environments.wrappers import (
    OwnEpisode,
    OwnEpisodesOfVector,
    ReportOwnEpisode,
    as_number,
)
from harness.errors import ConfigError, require, suggest
from harness.options.base import build
from harness.options.run import EnvConfig
from harness.registry import choice, import_named, load, load_plugins, wrappers

# Where gymnasium keeps environments that need more than gymnasium: the module, and our extra.
EXTRAS = {"gymnasium.envs.mujoco": ("mujoco", "mujoco"), "gymnasium.envs.box2d": ("Box2D", "box2d")}


class Package(NamedTuple):
    """A package with environments of its own, known by what their ids begin with."""

    module: str  # importing it registers them
    needs: tuple[str, ...]  # what has to be installed
    extra: str  # of ours, which installs that


PACKAGES = {
    "ALE/": Package("ale_py", ("ale_py",), "atari"),
    "MinAtar/": Package("minatar.gym", ("minatar",), "minatar"),
    "MiniGrid-": Package("minigrid", ("minigrid",), "minigrid"),
    "BabyAI-": Package("minigrid", ("minigrid",), "minigrid"),
    "dm_control/": Package("shimmy", ("shimmy", "dm_control"), "dm-control"),
    "lockstep/": Package("harness.environments.tokens", (), ""),
}
# Wrappers that need more than gymnasium.
WRAPPERS_NEED = {
    "atari": ("cv2", "atari"),
    "resize": ("cv2", "atari"),
    "one_hot_grid": ("minigrid", "minigrid"),
}
# Vectors that are not made of single environments, and how errors name them.
WHOLE = {"native": "a native vector", "envpool": "a vector of EnvPool"}
# Registered wrappers that leave rewards, steps and the ends of episodes as they are.
KEEP_RETURNS = {
    "delay_observation",
    "flatten_observation",
    "frame_stack",
    "grayscale",
    "one_hot_grid",
    "rescale_action",
    "rescale_observation",
    "resize",
    "sticky_action",
    "time_aware",
}


def check_environment(config: EnvConfig) -> None:
    """Raise `ConfigError` if no such environment can be made."""
    spec = find(config.id)
    if config.vectorisation == "envpool":
        _check_pool(config)
    whole = WHOLE.get(config.vectorisation)
    if config.vectorisation == "native" and spec.vector_entry_point is None:
        raise ConfigError(
            f"env.id={config.id} env.vectorisation=native: it has no vector form of its own; "
            "use env.vectorisation=sync"
        )
    for wrapper in chosen_wrappers(config):
        if whole and wrapper.vector is None:
            raise ConfigError(
                f"env.wrappers: {wrapper.name!r} cannot wrap {whole}; use env.vectorisation=sync"
            )
        if wrapper.name in WRAPPERS_NEED:
            require(f"env.wrappers: {wrapper.name!r}", *WRAPPERS_NEED[wrapper.name])
    skipped = config.kwargs.get("frameskip", 1)
    if _wrapper_skips(config) and skipped != 1:
        raise ConfigError(
            f"env.kwargs.frameskip={skipped}: the wrapper atari skips frames, too; take "
            "env.kwargs.frameskip=1, or env.wrappers=[{atari: {frame_skip: 1}}]"
        )


def _check_pool(config: EnvConfig) -> None:
    require("env.vectorisation=envpool", "envpool", "envpool")
    options, ids = f"env.id={config.id} env.vectorisation=envpool", _envpool().list_all_envs()
    if config.id not in ids:
        raise ConfigError(f"{options}: EnvPool does not have it; use env.vectorisation=sync")
    if config.kwargs:
        raise ConfigError(
            f"{options} with env.kwargs: EnvPool's environments take other arguments than "
            "gymnasium's, which evaluations play; use env.vectorisation=sync"
        )


def check_like_pool(config: EnvConfig, env: gym.Env) -> None:
    """Raise `ConfigError` if EnvPool's environment has other spaces than gymnasium's."""
    spec = _envpool().make_spec(config.id)
    pairs = {
        "observations": (spec.gymnasium_observation_space, env.unwrapped.observation_space),
        "actions": (spec.gymnasium_action_space, env.unwrapped.action_space),
    }
    for what, (pool, one) in pairs.items():
        if kind_of(pool) != kind_of(one):
            raise ConfigError(
                f"env.id={config.id} env.vectorisation=envpool: EnvPool's {what} are {pool}, but "
                f"{one} in gymnasium, which evaluations play; use env.vectorisation=sync"
            )


def kind_of(space: gym.Space) -> tuple[type, Any, int]:
    """What two spaces must share: their class, their shape, and how many choices they have."""
    return type(space), space.shape, getattr(space, "n", 0)


def _envpool() -> Any:
    return importlib.import_module("envpool")


def alters_returns(config: EnvConfig) -> bool:
    """Whether wrappers may alter rewards, steps or ends, so that the own returns are told."""
    return any(wrapper.name not in KEEP_RETURNS for wrapper in chosen_wrappers(config))


def find(env_id: str) -> gym.envs.registration.EnvSpec:
    """The registered environment of this id; a `ConfigError` names the nearest, or the extra."""
    module, _, name = env_id.rpartition(":")
    if (package := _package_of(name)) is not None:
        for needed in package.needs:
            require(f"env.id={env_id}", needed, package.extra)
    try:
        import_package_of(name)
        if module:
            _import_env(env_id, module)
        spec = gym.spec(name)
    except (gym.error.Error, ImportError) as error:
        hint = suggest(env_id, gym.registry)
        raise ConfigError(f"env.id={env_id}: gymnasium does not know it; {hint}") from error
    for place, (needs, extra) in EXTRAS.items():
        if str(spec.entry_point).startswith(place):
            require(f"env.id={env_id}", needs, extra)
    return spec


def _import_env(env_id: str, module: str) -> None:
    """Import the module that registers this environment."""
    try:
        import_named(module)
    except (Exception, SystemExit) as error:  # whatever it does when it is imported
        what = f"{module} cannot be imported: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name in (module, module.split(".")[0]):
            what = f"there is no module {module}, neither installed nor in the current directory"
        raise ConfigError(f"env.id={env_id}: {what}") from error


def import_package_of(name: str) -> None:
    """Import the package that registers this environment, if it is one of `PACKAGES`."""
    if (package := _package_of(name)) is None:
        return
    module = importlib.import_module(package.module)
    if name not in gym.registry and hasattr(module, "register_envs"):  # MinAtar
        module.register_envs()


def _package_of(name: str) -> Package | None:
    return next((one for prefix, one in PACKAGES.items() if name.startswith(prefix)), None)


@dataclass(frozen=True)
class ChosenWrapper:
    """A wrapper with its arguments."""

    name: str
    wrap: Callable[..., Any]
    vector: Callable[..., Any] | None
    arguments: dict[str, Any]


def chosen_wrappers(config: EnvConfig) -> list[ChosenWrapper]:
    """The wrappers of a config, innermost first."""
    return [_chosen(*choice(entry, "env.wrappers")) for entry in config.wrappers]


def _chosen(name: str, arguments: dict[str, Any]) -> ChosenWrapper:
    if ":" not in name:
        part = wrappers.get(name)
        if part.options is not None:
            arguments = {"options": build(part.options, arguments, f"env.wrappers.{name}")}
        vector = part.vector and load(part.vector)
        return ChosenWrapper(name, part.load(), vector, arguments)
    try:
        import_named(name.partition(":")[0])
        return ChosenWrapper(name, load(name), None, arguments)
    except (Exception, SystemExit) as error:  # whatever its module does when it is imported
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"env.wrappers: {name!r} cannot be imported: {what}") from error


def single(config: EnvConfig) -> EnvConfig:
    """The same environment, one and not a vector."""
    return replace(config, vectorisation="none", num_envs=1)


@dataclass(frozen=True)
class EnvFactory:
    """Makes what a config describes, in whatever process: an environment, or a vector of them."""

    config: EnvConfig
    render_mode: str | None = None
    plugins: tuple[str, ...] = ()  # modules to import first: they may register what is named

    def __call__(self, seed: int | None = None) -> gym.Env | VectorEnv:
        """seed: for EnvPool, which takes none at a reset."""
        load_plugins(self.plugins)
        config = self.config
        make_member = partial(_make_member, config, self.render_mode)
        match config.vectorisation:
            case "none":
                return _make_one(config, self.render_mode)
            case "native":
                return _wrapped(config, _make_native(config, self.render_mode))
            case "envpool":
                return _wrapped(config, _make_pool(config, seed or 0))
            # Collectors reset, environment by environment: no frame is spent on resetting alone,
            # and what was reset by them they can bring back when a run is resumed.
            case "sync":
                return SyncVectorEnv(
                    [make_member] * config.num_envs, autoreset_mode=AutoresetMode.DISABLED
                )
            case "async":
                if threading.current_thread() is threading.main_thread():
                    make_member = partial(_make_in_child, os.getpid(), make_member)
                return AsyncVectorEnv(
                    [make_member] * config.num_envs,
                    # Elsewhere than in forks, its locks have names that outlive a worker.
                    context="fork" if "fork" in get_all_start_methods() else None,
                    autoreset_mode=AutoresetMode.DISABLED,
                )
        raise ValueError(f"env.vectorisation is {config.vectorisation!r}")

    def __str__(self) -> str:
        return f"env.id={self.config.id}"


_PR_SET_PDEATHSIG = 1  # Linux's sys/prctl.h


def _make_in_child(maker: int, make_member: Callable[[], gym.Env]) -> gym.Env:
    """An environment that has a process of its own, which must not outlive its maker.

    It ends by itself when its maker is gone, but not if it hangs: then the kernel ends it. That
    happens, too, when only the thread that started it ends, so this is for the main thread.
    """
    if os.getpid() != maker:  # the vector makes one at home, too, to look at
        with suppress(AttributeError, OSError, TypeError):  # another system
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return make_member()


def _make_member(config: EnvConfig, render_mode: str | None) -> gym.Env:
    """An environment of a vector, whose rewards gymnasium takes only as numbers."""
    return TransformReward(_make_one(config, render_mode), as_number)


def _make_one(config: EnvConfig, render_mode: str | None) -> gym.Env:
    import_package_of(config.id.rpartition(":")[2])
    env = gym.make(
        config.id,
        max_episode_steps=config.max_episode_steps,
        disable_env_checker=True,
        **_arguments(config, render_mode),
    )
    if _bounded(space := env.action_space):
        env = TransformAction(env, _clip_to(space), space)
    counter = OwnEpisode(env) if alters_returns(config) else None
    env = counter or env
    for wrapper in chosen_wrappers(config):
        env = wrapper.wrap(env, **wrapper.arguments)
    return env if counter is None else ReportOwnEpisode(env, counter)


def _make_native(config: EnvConfig, render_mode: str | None) -> VectorEnv:
    import_package_of(config.id.rpartition(":")[2])
    kwargs = _arguments(config, render_mode)
    if config.max_episode_steps is not None:
        kwargs["max_episode_steps"] = config.max_episode_steps
    return gym.make_vec(
        config.id,
        num_envs=config.num_envs,
        vectorization_mode="vector_entry_point",
        **kwargs,
    )


def _make_pool(config: EnvConfig, seed: int) -> VectorEnv:
    limit = config.max_episode_steps
    return _envpool().make(
        config.id,
        env_type="gymnasium",
        num_envs=config.num_envs,
        num_threads=1,  # more workers use more cores
        seed=seed % 2**31,
        **({} if limit is None else {"max_episode_steps": limit}),
    )


def _wrapped(config: EnvConfig, envs: VectorEnv) -> VectorEnv:
    if _bounded(space := envs.single_action_space):
        envs = vector.TransformAction(envs, _clip_to(space))
    envs = OwnEpisodesOfVector(envs) if alters_returns(config) else envs
    for wrapper in chosen_wrappers(config):
        if wrapper.vector is None:
            whole = WHOLE[config.vectorisation]
            raise ConfigError(f"env.wrappers: {wrapper.name!r} cannot wrap {whole}")
        envs = wrapper.vector(envs, **wrapper.arguments)
    return envs


def _arguments(config: EnvConfig, render_mode: str | None) -> dict[str, Any]:
    """For the environment; one that is not rendered need not know of rendering."""
    arguments = dict(config.kwargs)
    if _wrapper_skips(config):
        arguments.setdefault("frameskip", 1)
    return arguments if render_mode is None else {**arguments, "render_mode": render_mode}


def _wrapper_skips(config: EnvConfig) -> bool:
    """Whether the wrapper atari skips frames of a game that would skip some itself."""
    for wrapper in chosen_wrappers(config):
        if wrapper.name == "atari" and wrapper.arguments.get("frame_skip", 4) > 1:
            return "frameskip" in find(config.id).kwargs
    return False


def _bounded(space: gym.Space) -> TypeGuard[Box]:
    return isinstance(space, Box) and bool(np.isfinite([space.low, space.high]).any())


def _clip_to(space: Box) -> Callable[..., Any]:
    """A function that clips actions to the bounds of a space.

    A Gaussian policy reaches past any bounds; its recorded action stays the one it chose.
    """
    return partial(np.clip, a_min=space.low, a_max=space.high)
