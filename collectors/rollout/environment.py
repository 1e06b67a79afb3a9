"""One worker's environments, stepped together into a block of frames.

Row t + 1 of a block holds the observation after step t; where an episode ended, the first one of
the next episode. The true final observation lies in the block's finals.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch

from collectors.rollout.episode_replay import WATCHING, EpisodeReplay
from collectors.rollout.frame_block import FrameBlock
from collectors.rollout.infos import Infos
from collectors.rollout.saved_attributes import restored, saved
from collectors.rollout.spaces import action_leaf, observation_leaves

Array = np.ndarray[Any, Any]
_RETURNED = {
    "step": ("observation", "reward", "terminated", "truncated", "info"),
    "reset": ("observation", "info"),
}


class Restored(NamedTuple):
    """How far a worker goes on from a saved state.

    under_way: whether its episodes do, instead of new ones.
    lost: what else is not as it was, in words.
    """

    under_way: bool
    lost: list[str]

    @property
    def is_exact(self) -> bool:
        return self.under_way and not self.lost


class Environments(ABC):
    """All environments of one worker. It resets those whose episodes end.

    max_frames: truncate trajectories that reach this length.
    halting: an environment makes no frames after the end of its episode, until `reset`. A vector
        still steps all its environments; the results of halted ones are masked.
    """

    can_reset_some = True

    def __init__(self, env: Any, num_envs: int, observation_space: Any, action_space: Any):
        self.env = env
        self.num_envs = num_envs
        self._batch_shape: tuple[int, ...] = (num_envs,)  # of the observations that `env` returns
        self.observation_space, self.action_space = observation_space, action_space
        self.observations = observation_leaves(observation_space)
        self.action = action_leaf(action_space)
        self.max_frames: int | None = None
        self.halting = False
        self.current = [np.zeros((num_envs, *leaf.shape), leaf.dtype) for leaf in self.observations]
        self.fresh = np.ones(num_envs, bool)  # whose current observation starts an episode
        self.lengths = np.zeros(num_envs, np.int64)  # counted if there is a `max_frames`
        self.rewards = np.zeros(num_envs, np.float32)  # of the last step
        self.halted = np.zeros(num_envs, bool)
        self.infos: Infos | None = None
        self.history: EpisodeReplay | None = None  # if the current episodes can be replayed
        self.next_seeds: list[int | None] = [None] * num_envs  # for streams of the next episodes

    @abstractmethod
    def attribute(self, name: str) -> Any:
        """An attribute of the environment; for a vector, a tuple of its members'."""

    @abstractmethod
    def _reset(self, seeds: Sequence[int] | None, which: Array) -> Any:
        """Reset the environments that `which` masks; the observations of all."""

    @abstractmethod
    def _action_for_env(self, action: Array) -> Any:
        """The actions [environments, *shape] in the form that `env.step` takes, copied."""

    @abstractmethod
    def _write_infos(self, frames: FrameBlock, t: int, info: Any, ended: Array) -> None: ...

    def step(self, frames: FrameBlock, t: int) -> int:
        """Step with the actions of row `t`, and write the results; return the number of frames."""
        action = frames.actions[t]
        if self.history is not None:
            self.history.actions.append(action.copy())
        env_action = self._action_for_env(action)
        observation, reward, terminated, truncated, info = self._call("step", env_action)
        self._put(frames.observation_arrays, t + 1, observation)
        self._check_values("terminated", terminated)
        self._check_values("truncated", truncated)
        if self.num_envs > 1:
            self._check_values("reward", reward)
        try:
            frames.reward[t] = reward
        except (TypeError, ValueError):
            raise ValueError(f"{self} returned the reward {reward!r}, not a number") from None
        frames.terminated[t] = terminated
        frames.truncated[t] = truncated
        ended = frames.terminated[t] | frames.truncated[t]
        if self.infos is not None:
            self._write_infos(frames, t, info, ended)
        over = ended
        if self.max_frames is not None:
            self.lengths += 1
            over = ended | (self.lengths >= self.max_frames)
            frames.truncated[t] |= over & ~ended
            self.lengths[over] = 0
        self._start_episodes(frames, t, over, ended, info)
        if self.halting:
            frames.live[t] &= ~self.halted
            self.halted |= over
        return int(np.count_nonzero(frames.live[t]))

    def _start_episodes(
        self, frames: FrameBlock, t: int, over: Array, ended: Array, info: Any
    ) -> None:
        """Keep the final observations of step `t`, and start the next episodes in row `t + 1`.

        `over` includes those that are truncated here, `ended` does not.
        """
        if np.count_nonzero(over):
            self._restart(frames, t, over)

    def _restart(self, frames: FrameBlock, t: int, which: Array) -> None:
        frames.keep_finals(t, which)
        if self.history is not None:
            self._change_streams(self.history, which)
            self.history.reset(which, None)
        self._put(frames.observation_arrays, t + 1, self._reset(None, which))
        frames.is_init[t + 1] |= which

    def _change_streams(self, history: EpisodeReplay, which: Array) -> None:
        """Give members that start an episode the random streams of `next_seeds`."""
        for i in np.flatnonzero(which):
            if (seed := self.next_seeds[i]) is not None:
                history.members[i].unwrapped.np_random = np.random.default_rng(seed)
                self.next_seeds[i] = None

    def reset(self, seeds: Sequence[int] | None = None, which: Array | None = None) -> None:
        """Start new episodes, in all environments or in those that `which` masks."""
        if which is None:
            which = np.ones(self.num_envs, bool)
        elif not self.can_reset_some and not which.all():
            raise ValueError(f"{self} can only be reset as a whole: it has no reset_mask")
        if self.history is not None:
            self._change_streams(self.history, which)
            self.history.reset(which, seeds)
        observations = [np.empty_like(current[None]) for current in self.current]
        self._put(observations, 0, self._reset(seeds, which))
        for current, (new,) in zip(self.current, observations, strict=True):
            current[which] = new[which]  # after a replay, a vector's copy of the others is outdated
        self.fresh[which] = True
        self.lengths[which] = 0
        self.halted[which] = False

    def begin(self, frames: FrameBlock, t: int = 0) -> None:
        """Write the current observations into row `t`."""
        for rows, current in zip(frames.observation_arrays, self.current, strict=True):
            rows[t] = current
        frames.is_init[t] = self.fresh

    def end(self, frames: FrameBlock, num_steps: int) -> None:
        """Make the observations of row `num_steps` the current ones."""
        for current, rows in zip(self.current, frames.observation_arrays, strict=True):
            current[...] = rows[num_steps]
        self.fresh[...] = frames.is_init[num_steps]
        if num_steps:
            self.rewards[...] = frames.reward[num_steps - 1]
        if self.history is not None:
            self.history.trim()

    def cut(
        self, frames: FrameBlock, t: int, seeds: Sequence[int] | None, which: Array | None
    ) -> None:
        """Start new episodes at row `t`. Current ones that have a frame end as truncated."""
        self.end(frames, t)
        self.reset(seeds, which)
        if t > 0:
            under_way = ~(frames.terminated[t - 1] | frames.truncated[t - 1]) & self.fresh
            frames.keep_finals(t - 1, under_way)
            frames.truncated[t - 1] |= under_way
        self.begin(frames, t)

    def state_dict(self) -> dict[str, Any]:
        """Where each environment is in its episode, and how to replay it up to there."""
        env = self._self_saving()
        return {
            "own": None if env is None else saved(env.state_dict()),
            "current": [torch.from_numpy(array.copy()) for array in self.current],
            **{name: torch.from_numpy(getattr(self, name).copy()) for name in _SAVED},
            "members": [] if self.history is None else self.history.state_dict(),
            "next_seeds": list(self.next_seeds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> Restored:
        """Replay the saved episodes; if a replay differs, start new ones.

        An environment that has saved itself goes on without a replay. In a branch, the episodes
        that follow have seeds of their own; where they cannot be set later, new ones start now.
        """
        env = self._self_saving()
        seeds = state.get("next_seeds", self.next_seeds)  # states of earlier versions lack them
        if self.history is None and None not in seeds:
            self.reset(seeds)
            return Restored(False, [])
        self.next_seeds = list(seeds)
        if env is not None and state.get("own") is not None:
            env.load_state_dict(restored(None, state["own"]))
            self._go_on(state)
            return Restored(True, [])
        if self.history is not None and state["members"]:
            reached = self.history.repeat(state["members"], self._action_for_member)
            if reached is not None and self._is_same(reached, state):
                self._go_on(state)
                return Restored(True, self.history.differences(state["members"]))
        self.reset()
        return Restored(False, [])

    def _self_saving(self) -> Any:
        """The environment, if it has `state_dict` and `load_state_dict`; else None.

        Wrappers may have a state of their own: then it is None as well.
        """
        env = self.env
        while isinstance(env, WATCHING):
            env = env.env
        has_both = hasattr(env, "state_dict") and hasattr(env, "load_state_dict")
        return env if has_both and env is self.env.unwrapped else None

    def _go_on(self, state: dict[str, Any]) -> None:
        """Take up the episodes in which the environments are."""
        for current, old in zip(self.current, state["current"], strict=True):
            current[...] = old.numpy()
        for name in _SAVED:
            getattr(self, name)[...] = state[name].numpy()

    def _is_same(self, reached: list[tuple[Any, Any]], state: dict[str, Any]) -> bool:
        """Whether a replay reached the saved observations and rewards: wrappers may alter both."""
        return all(
            (reward is None or np.float32(reward) == state["rewards"][member].numpy())
            and all(
                np.array_equal(np.asarray(leaf.of(observation)), saved[member].numpy())
                for leaf, saved in zip(self.observations, state["current"], strict=True)
            )
            for member, (observation, reward) in enumerate(reached)
        )

    def _action_for_member(self, action: Array) -> Any:
        """One environment's action, in the form that it takes."""
        discrete = isinstance(self.action_space, gym.spaces.Discrete)
        return int(action) if discrete else np.array(action)

    def close(self) -> None:
        self.env.close()

    def __str__(self) -> str:
        unwrapped = getattr(self.env, "unwrapped", self.env)
        name = getattr(getattr(self.env, "spec", None), "id", None) or type(unwrapped).__name__
        return f"{self.num_envs} × {name}" if self.num_envs > 1 else str(name)

    def _put(self, arrays: Sequence[Array], row: int, observation: Any) -> None:
        """Write an observation, checked against its space, into a row of each leaf's array."""
        shape = self._batch_shape
        for leaf, array in zip(self.observations, arrays, strict=True):
            value = np.asarray(leaf.of(observation))
            if value.shape != shape + leaf.shape or value.dtype.kind != leaf.dtype.kind:
                raise ValueError(
                    f"{self} returned the observation {'/'.join(leaf.key)!r} as {value.dtype} "
                    f"{list(value.shape)}; its space declares {leaf.dtype} {[*shape, *leaf.shape]}"
                )
            array[row] = value  # casts float64 to float32, for instance

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call `step` or `reset`, and check the number of values that it returns."""
        returned = getattr(self.env, method)(*args, **kwargs)
        is_tuple = isinstance(returned, tuple | list)
        if is_tuple and len(returned) == len(_RETURNED[method]):
            return returned
        shown = f"{len(returned)} values" if is_tuple else reprlib.repr(returned)
        expected = ", ".join(_RETURNED[method])
        raise TypeError(f"{self}: {method}() returned {shown}; gymnasium expects ({expected})")

    def _check_values(self, name: str, value: Any) -> None:
        """Refuse a reward or an end that is not one number or flag for each environment."""
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{self} returned {name}={value!r}, expected numbers or booleans")
        if array.shape != (self.num_envs,) and array.size * self.num_envs != 1:
            raise ValueError(
                f"{self} returned {name} of shape {list(array.shape)}, "
                f"not one for each of {self.num_envs} environments"
            )


_SAVED = ("fresh", "lengths", "rewards", "halted")


class OneEnv(Environments):
    """A plain `gymnasium.Env`."""

    def __init__(self, env: gym.Env[Any, Any]):
        super().__init__(env, 1, env.observation_space, env.action_space)
        self._batch_shape = ()
        self.history = EpisodeReplay([env])

    def attribute(self, name: str) -> Any:
        return self.env.get_wrapper_attr(name)

    def _reset(self, seeds: Sequence[int] | None, which: Array) -> Any:
        observation, _ = self._call("reset", seed=None if seeds is None else int(seeds[0]))
        return observation

    def _restart(self, frames: FrameBlock, t: int, which: Array) -> None:
        if self.halting:  # not stepped again before `reset`
            frames.keep_finals(t, which)
        else:
            super()._restart(frames, t, which)

    def _action_for_env(self, action: Array) -> Any:
        return self._action_for_member(action[0])

    def _write_infos(self, frames: FrameBlock, t: int, info: Any, ended: Array) -> None:
        assert self.infos is not None
        self.infos.write((array[t] for array in frames.infos), info)
