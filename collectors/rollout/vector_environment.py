"""Gymnasium's vectors of environments, one class for each way of starting the next episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from collectors.rollout.environment import Array, Environments, Restored
from collectors.rollout.episode_replay import EpisodeReplay
from collectors.rollout.frame_block import FrameBlock
from collectors.rollout.spaces import SpaceLeaf


class Vector(Environments):
    """A vector that leaves resetting to its user, or can be reset member by member."""

    def __init__(self, env: Any):
        super().__init__(env, env.num_envs, env.single_observation_space, env.single_action_space)
        # Others may take one seed for all members, as CartPole's own vector does.
        self._seeds_each = isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv)

    def attribute(self, name: str) -> Any:
        if self._seeds_each and not hasattr(self.env, name):
            return self.env.get_attr(name)
        return getattr(self.env, name)

    def _reset(self, seeds: Sequence[int] | None, which: Array) -> Any:
        options = None if which.all() else {"reset_mask": which.copy()}
        seed: Any = None
        if seeds is not None:
            seed = [int(seed) for seed in seeds] if self._seeds_each else int(seeds[0])
        observation, _ = self._call("reset", seed=seed, options=options)
        return observation

    def _action_for_env(self, action: Array) -> Any:
        return action.copy()

    def _write_infos(self, frames: FrameBlock, t: int, info: Any, ended: Array) -> None:
        assert self.infos is not None
        self.infos.write_all((array[t] for array in frames.infos), info, ended)


class SyncVector(Vector):
    """A bare `SyncVectorEnv`, whose members are public and can be replayed.

    Its own resets are off: in SAME_STEP mode they would come before the members' random streams are
    recorded, and might overwrite the final observation.
    """

    def __init__(self, env: SyncVectorEnv):
        super().__init__(env)
        env.autoreset_mode = AutoresetMode.DISABLED
        self.history = EpisodeReplay(env.envs)

    def load_state_dict(self, state: dict[str, Any]) -> Restored:
        if self.history is not None:
            self.env.reset()  # the vector does not see that its members are replayed
        return super().load_state_dict(state)


class SameStepVector(Vector):
    """A vector whose step resets members that end; `info` has their final observations."""

    def __init__(self, env: Any):
        super().__init__(env)
        # This mode does not ask a vector to support `reset_mask`; gymnasium's own do.
        self.can_reset_some = self._seeds_each

    def _start_episodes(
        self, frames: FrameBlock, t: int, over: Array, ended: Array, info: Any
    ) -> None:
        if (overlong := over & ~ended).any():
            self._restart(frames, t, overlong)
        frames.is_init[t + 1] |= ended
        places = frames.new_finals(t, ended)
        for place, member in zip(places, np.flatnonzero(ended), strict=True):
            for leaf, finals in zip(self.observations, frames.final_arrays, strict=True):
                finals[place] = self._final(info, leaf, int(member))

    def _final(self, info: Any, leaf: SpaceLeaf, member: int) -> Any:
        for name in ("final_obs", "final_observation"):
            if name in info:
                finals = info[name]
                if isinstance(finals, np.ndarray) and finals.dtype == object:
                    return leaf.of(finals[member])  # one observation for each member
                return leaf.of(finals)[member]
        raise ValueError(f"{self} has autoreset mode SAME_STEP, but its info has no 'final_obs'")


class NextStepVector(Vector):
    """A vector whose step after an end only resets: that step is no frame."""

    can_reset_some = False

    def __init__(self, env: Any):
        super().__init__(env)
        self._ended = np.zeros(self.num_envs, bool)
        # Without shared memory, the step after an end resets even if a reset came between
        # (gymnasium 1.4).
        inner = env.unwrapped
        self._resets_twice = isinstance(inner, AsyncVectorEnv) and not inner.shared_memory

    def _start_episodes(
        self, frames: FrameBlock, t: int, over: Array, ended: Array, info: Any
    ) -> None:
        frames.is_init[t + 1] = self._ended
        frames.live[t] = ~self._ended
        frames.keep_finals(t, ended)
        self._ended = ended

    def _reset(self, seeds: Sequence[int] | None, which: Array) -> Any:
        if not self._resets_twice:
            self._ended = np.zeros(self.num_envs, bool)
        return super()._reset(seeds, which)


def adapt_vector(env: Any) -> Vector:
    """The class for this vector's mode."""
    mode = _mode(env)
    if type(env) is SyncVectorEnv:
        return SyncVector(env)
    # A bare AsyncVectorEnv resets any member when asked, in every mode. A wrapper around it may
    # not support that, and without shared memory the next step resets again.
    if mode is AutoresetMode.DISABLED or (
        mode is AutoresetMode.NEXT_STEP and type(env) is AsyncVectorEnv and env.shared_memory
    ):
        return Vector(env)
    return NextStepVector(env) if mode is AutoresetMode.NEXT_STEP else SameStepVector(env)


def _mode(env: Any) -> AutoresetMode:
    """The vector's autoreset mode, by its attribute or its metadata.

    The attribute comes first: classes may share their metadata (those of ale-py 0.12 do).
    """
    mode = getattr(env.unwrapped, "autoreset_mode", env.metadata.get("autoreset_mode"))
    try:
        return AutoresetMode(mode)
    except ValueError:
        modes = ", ".join(map(str, AutoresetMode))
        raise ValueError(
            f"{type(env.unwrapped).__name__} has metadata['autoreset_mode'] = {mode!r}, expected "
            f"one of {modes}; set it in create_env_fn"
        ) from None
