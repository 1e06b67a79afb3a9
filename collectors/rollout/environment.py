"""One worker's environments, stepped into a block of frames: here a single one, vectors beside it.

However the next episode is started, the row after an end starts it, and the true final observation
lies in the block's finals.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from collectors.rollout.episode_replay import EpisodeReplay
from collectors.rollout.frame_block import FrameBlock
from collectors.rollout.spaces import Leaf, action_leaf, observation_leaves

Array = np.ndarray[Any, Any]


class Environments(ABC):
    """All the environments of one worker, stepped together.

    max_frames: cut trajectories that get this long, as truncated.
    halting: leave an environment alone after its episode's end, until `reset`.
    """

    def __init__(self, env: Any, num_envs: int, observation: Any, action: Any):
        self.env = env
        self.num_envs = num_envs
        self.observation_space, self.action_space = observation, action
        self.observations = observation_leaves(observation)
        self._plain = len(self.observations) == 1 and not self.observations[0].path
        self.action = action_leaf(action)
        self.max_frames: int | None = None
        self.halting = False
        self.current = [np.zeros((num_envs, *leaf.shape), leaf.dtype) for leaf in self.observations]
        self.fresh = np.ones(num_envs, bool)  # whose current observation starts an episode
        self.started = False  # whether the last step was followed by a start
        self.lengths = np.zeros(num_envs, np.int64)
        self.rewards = np.zeros(num_envs, np.float32)  # of the last step
        self.halted = np.zeros(num_envs, bool)
        self.seeds: list[int] = []
        self.history: EpisodeReplay | None = None  # for those whose members are reset here

    # -- what a kind of environment defines

    @abstractmethod
    def step(self, frames: FrameBlock, t: int, action: Array) -> int:
        """Step with `action`, write row `t` and the observations after it; the count of frames.

        The array is this object's to keep.
        """

    @abstractmethod
    def _reset(self, seeds: Sequence[int] | None, which: Array) -> Any:
        """Reset the environments that `which` masks and return everybody's observations."""

    @abstractmethod
    def attribute(self, name: str) -> Any:
        """An attribute of the environment; of a vector's members, a tuple of theirs."""

    can_reset_some = True

    # -- what all share

    def reset(self, seeds: Sequence[int] | None = None, which: Array | None = None) -> None:
        """Start new episodes, in all environments or in those that `which` masks."""
        if which is None:
            which = np.ones(self.num_envs, bool)
        elif not self.can_reset_some and not which.all():
            raise ValueError(f"{self} can only be reset as a whole: it has no reset_mask")
        if seeds is not None:
            self.seeds = [int(seed) for seed in seeds]
        if self.history is not None:
            self.history.reset(which, seeds)
        before = [now.copy() for now in self.current]
        self._put(self.current, None, self._reset(seeds, which))
        for now, was in zip(self.current, before, strict=True):
            now[~which] = was[~which]  # a vector that was brought back may not know the others'
        self.fresh[which] = True
        self.lengths[which] = 0
        self.halted[which] = False

    def begin(self, frames: FrameBlock, t: int = 0) -> None:
        """Make the current observations those of row `t`, which the block goes on from."""
        for rows, now in zip(frames.observation_arrays, self.current, strict=True):
            rows[t] = now
        frames.is_init[t] = self.fresh

    def end(self, frames: FrameBlock, num_steps: int) -> None:
        """Keep what follows step `num_steps - 1` as the current observations."""
        for now, row in zip(self.current, frames.observation_arrays, strict=True):
            now[...] = row[num_steps]
        self.fresh[...] = frames.is_init[num_steps]
        if num_steps:
            self.rewards[...] = frames.reward[num_steps - 1]
        if self.history is not None:
            self.history.trim()

    def cut(
        self,
        frames: FrameBlock,
        t: int,
        seeds: Sequence[int] | None = None,
        which: Array | None = None,
    ) -> None:
        """Start anew at row `t`; what was under way there ends as truncated, if it has a frame."""
        self.end(frames, t)
        before = [now.copy() for now in self.current]
        self.reset(seeds, which)
        if t > 0:
            under_way = ~(frames.terminated[t - 1] | frames.truncated[t - 1]) & self.fresh
            for rows, was in zip(frames.final_arrays, before, strict=True):
                rows[t - 1][under_way] = was[under_way]
            frames.truncated[t - 1] |= under_way
        self.begin(frames, t)

    def state_dict(self) -> dict[str, Any]:
        """Where each environment is in its episode, as far as it can be brought there again."""
        return {
            "current": [torch.from_numpy(array.copy()) for array in self.current],
            "fresh": torch.from_numpy(self.fresh.copy()),
            "lengths": torch.from_numpy(self._lengths().copy()),
            "rewards": torch.from_numpy(self.rewards.copy()),
            "halted": torch.from_numpy(self.halted.copy()),
            "members": [] if self.history is None else self.history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Bring the environments to where the state was taken; False, and new episodes, if not."""
        if self.history is not None and state["members"]:
            reached = self.history.repeat(state["members"], self._given)
            if reached is not None and self._are_there(reached, state):
                for now, saved in zip(self.current, state["current"], strict=True):
                    now[...] = saved.numpy()
                self.fresh[...] = state["fresh"].numpy()
                self.halted[...] = state["halted"].numpy()
                self.rewards[...] = state["rewards"].numpy()
                self._set_lengths(state["lengths"].numpy())
                return True
        self.reset()
        return False

    def _are_there(self, reached: list[tuple[Any, Any]], state: dict[str, Any]) -> bool:
        """Whether these are the observations and last rewards of then: wrappers may change both."""
        return all(
            (reward is None or np.float32(reward) == state["rewards"][member].numpy())
            and all(
                np.array_equal(np.asarray(leaf.of(observation)), now[member].numpy())
                for leaf, now in zip(self.observations, state["current"], strict=True)
            )
            for member, (observation, reward) in enumerate(reached)
        )

    def _given(self, action: Array) -> Any:
        """One environment's action, in the form that it wants."""
        discrete = isinstance(self.action_space, gym.spaces.Discrete)
        return int(action) if discrete else np.array(action)

    def _lengths(self) -> Array:
        return self.lengths

    def _set_lengths(self, lengths: Array) -> None:
        self.lengths[...] = lengths

    def close(self) -> None:
        self.env.close()

    def __str__(self) -> str:
        unwrapped = getattr(self.env, "unwrapped", self.env)
        name = getattr(getattr(self.env, "spec", None), "id", None) or type(unwrapped).__name__
        return f"{self.num_envs} × {name}" if self.num_envs > 1 else str(name)

    def _put(self, arrays: Sequence[Array], row: int | None, value: Any) -> None:
        """Write everybody's observation where it belongs, if it is what it should be."""
        for leaf, array in zip(self.observations, arrays, strict=True):
            part = leaf.of(value) if leaf.path else value
            target = array if row is None else array[row]
            if (
                type(part) is not np.ndarray
                or part.shape != target.shape
                or part.dtype != leaf.dtype
            ):
                part = self._checked(leaf, part, target.shape)
            target[...] = part

    def _write(self, arrays: Sequence[Array], row: int, member: int, observation: Any) -> None:
        """Write one environment's observation, if it is what it should be."""
        if self._plain:
            leaf = self.observations[0]
            if (
                type(observation) is not np.ndarray
                or observation.shape != leaf.shape
                or observation.dtype != leaf.dtype
            ):
                observation = self._checked(leaf, observation, leaf.shape)
            arrays[0][row, member] = observation
            return
        for leaf, array in zip(self.observations, arrays, strict=True):
            array[row, member] = self._checked(leaf, leaf.of(observation), leaf.shape)

    def _checked(self, leaf: Leaf, value: Any, shape: tuple[int, ...]) -> Array:
        """The observation, if it is of its space's shape and kind: float64 is cast to float32."""
        array = np.asarray(value)
        if array.shape != shape or array.dtype.kind != leaf.dtype.kind:
            raise ValueError(
                f"{self} returned the observation {'/'.join(leaf.key)!r} as {array.dtype} "
                f"{list(array.shape)}; its space says {leaf.dtype} {list(shape)}"
            )
        return array

    def _of_step(self, returned: Any) -> Any:
        return self._in_form("step", returned, "observation, reward, terminated, truncated, info")

    def _of_reset(self, returned: Any) -> Any:
        return self._in_form("reset", returned, "observation, info")

    def _in_form(self, method: str, returned: Any, form: str) -> Any:
        """What a method returned, if it has as many parts as gymnasium says."""
        if isinstance(returned, tuple | list):
            if len(returned) == form.count(",") + 1:
                return returned
            kinds = ", ".join(type(value).__name__ for value in returned)
            shown = f"{len(returned)} values ({kinds})"
        else:
            shown = reprlib.repr(returned)
        raise TypeError(f"{self}: {method}() returned {shown}; gymnasium's form is ({form})")

    def _check_numbers(self, told: dict[str, Any], shape: tuple[int, ...]) -> None:
        """Refuse rewards and ends that are not numbers or flags, one for each environment."""
        for name, value in told.items():
            array = np.asarray(value)
            if array.dtype.kind not in "biuf":
                raise ValueError(
                    f"{self} returned {name}={value!r}; numbers, or True and False, are expected"
                )
            if array.shape != shape and array.size * self.num_envs != 1:
                raise ValueError(
                    f"{self} returned {name} of shape {list(array.shape)}, "
                    f"not one for each of {self.num_envs} environments"
                )

    def _halt(self, frames: FrameBlock, t: int, ended: Array) -> int:
        """Mark what halted environments do as no frames; how many frames are left."""
        frames.live[t] = ~self.halted
        count = int(np.count_nonzero(frames.live[t]))
        self.halted |= ended
        return count


_ONE = np.ones(1, bool)
_BOOLS = {bool, np.bool_}


class OneEnv(Environments):
    """A plain `gymnasium.Env`."""

    def __init__(self, env: gym.Env[Any, Any]):
        super().__init__(env, 1, env.observation_space, env.action_space)
        self._discrete = isinstance(env.action_space, gym.spaces.Discrete)
        self._length = 0
        self.history = EpisodeReplay([env])

    def step(self, frames: FrameBlock, t: int, action: Array) -> int:
        self.history.actions.append(action)  # type: ignore[union-attr]
        given = int(action[0]) if self._discrete else action[0].copy()
        observation, reward, terminated, truncated, _ = self._of_step(self.env.step(given))
        self._write(frames.observation_arrays, t + 1, 0, observation)
        try:
            frames.reward[t, 0] = reward
        except (TypeError, ValueError):
            raise ValueError(f"{self} returned the reward {reward!r}, not a number") from None
        if type(terminated) not in _BOOLS or type(truncated) not in _BOOLS:
            self._check_numbers({"terminated": terminated, "truncated": truncated}, (1,))
        self._length += 1
        if self._length == self.max_frames and not terminated:
            truncated = True
        frames.terminated[t, 0] = terminated
        frames.truncated[t, 0] = truncated
        self.started = False
        if not (terminated or truncated):
            return 1 if not self.halting else self._halt(frames, t, self.halted)
        count = 1 if not self.halting else self._halt(frames, t, np.ones(1, bool))
        self._write(frames.final_arrays, t, 0, observation)
        self._length = 0
        self.history.reset(_ONE, None)  # type: ignore[union-attr]
        observation, _ = self._of_reset(self.env.reset())
        self._write(frames.observation_arrays, t + 1, 0, observation)
        frames.is_init[t + 1, 0] = self.started = True
        return count

    def _put(self, arrays: Sequence[Array], row: int | None, value: Any) -> None:
        assert row is None
        self._write([array[None] for array in arrays], 0, 0, value)

    def _reset(self, seeds: Sequence[int] | None, which: Array) -> Any:
        self._length = 0
        seed = None if seeds is None else int(seeds[0])
        observation, _ = self._of_reset(self.env.reset(seed=seed))
        return observation

    def attribute(self, name: str) -> Any:
        return self.env.get_wrapper_attr(name)

    def _lengths(self) -> Array:
        return np.array([self._length])

    def _set_lengths(self, lengths: Array) -> None:
        self._length = int(lengths[0])
