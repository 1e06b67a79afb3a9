"""Gymnasium's vectors of environments, one class for each way of starting the next episode.

Those whose members can be reset one by one are reset here (`Members`, `ManualVector`); those of the
SAME_STEP mode have done it already; in those of the NEXT_STEP mode the step after an end is only a
reset, and the frame it would make is marked as not live.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from collectors.rollout.environment import Array, Environments
from collectors.rollout.episode_replay import EpisodeReplay
from collectors.rollout.frame_block import FrameBlock
from collectors.rollout.spaces import Leaf


class Vector(Environments):
    """A `gymnasium.vector.VectorEnv` of any mode."""

    def __init__(self, env: Any):
        super().__init__(env, env.num_envs, env.single_observation_space, env.single_action_space)
        # Others may, as CartPole's own vector does, know one seed for all.
        self._seed_each = isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv)

    def step(self, frames: FrameBlock, t: int, action: Array) -> int:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._put(frames.observation_arrays, t + 1, observation)
        told = {"reward": reward, "terminated": terminated, "truncated": truncated}
        for name, value in told.items():
            if np.shape(value) != (self.num_envs,):
                raise ValueError(
                    f"{self} returned {name} of shape {list(np.shape(value))}, "
                    f"not one for each of {self.num_envs} environments"
                )
        frames.reward[t] = reward
        frames.terminated[t] = terminated
        frames.truncated[t] = truncated
        return self._after(frames, t, observation, frames.terminated[t] | frames.truncated[t], info)

    @abstractmethod
    def _after(self, frames: FrameBlock, t: int, observation: Any, ended: Array, info: Any) -> int:
        """Deal with the ends of episodes; how many environments made a frame."""

    def _over_length(self, frames: FrameBlock, t: int, ended: Array) -> Array | None:
        """Count the step, and give those that have to be cut because they are too long."""
        if self.max_frames is None:
            return None
        self.lengths += 1
        over = (self.lengths >= self.max_frames) & ~ended
        self.lengths[ended | over] = 0
        if not np.count_nonzero(over):
            return None
        frames.truncated[t] |= over
        return over

    def _keep_finals(self, frames: FrameBlock, t: int, ended: Array, observation: Any) -> None:
        for leaf, array in zip(self.observations, frames.final_arrays, strict=True):
            array[t][ended] = leaf.of(observation)[ended]

    def _restart(self, frames: FrameBlock, t: int, which: Array) -> None:
        """Reset these members now; the row after `t` starts their next episodes."""
        if self.history is not None:
            self.history.reset(which, None)
        self._put(frames.observation_arrays, t + 1, self._reset(None, which))

    def _reset(self, seeds: Sequence[int] | None, which: Array) -> Any:
        options = None if which.all() else {"reset_mask": which.copy()}
        seed: Any = None
        if seeds is not None:
            seed = [int(seed) for seed in seeds] if self._seed_each else int(seeds[0])
        observation, _ = self.env.reset(seed=seed, options=options)
        return observation

    def attribute(self, name: str) -> Any:
        if self._seed_each and not hasattr(self.env, name):
            return self.env.get_attr(name)
        return getattr(self.env, name)


class ManualVector(Vector):
    """A vector that leaves resetting to its user, or lets itself be reset member by member."""

    def _after(self, frames: FrameBlock, t: int, observation: Any, ended: Array, info: Any) -> int:
        over = self._over_length(frames, t, ended)
        if over is not None:
            ended = ended | over
        self.started = bool(np.count_nonzero(ended))
        count = self._halt(frames, t, ended) if self.halting else self.num_envs
        if self.started:
            self._keep_finals(frames, t, ended, observation)
            self._restart(frames, t, ended)
            frames.is_init[t + 1] = ended
        return count


# What of gymnasium's SyncVectorEnv is touched from here; without them it is stepped from outside.
_INSIDES = ("envs", "_env_obs", "_terminations", "_truncations", "_autoreset_envs")


class Members(ManualVector):
    """A bare `SyncVectorEnv`, whose members are stepped and reset here, as it does it itself.

    But it would gather and copy everybody's observations, ends and infos at every step, and in its
    SAME_STEP mode hand over a final observation that the reset may have overwritten.
    """

    def __init__(self, env: Any):
        super().__init__(env)
        self.history = EpisodeReplay(env.envs)

    @classmethod
    def can_step(cls, env: Any) -> bool:
        """Whether it is bare, and as it is known here."""
        return type(env) is SyncVectorEnv and all(hasattr(env, name) for name in _INSIDES)

    def step(self, frames: FrameBlock, t: int, action: Array) -> int:
        if self.history is not None:
            self.history.actions.append(action)
        arrays, known = frames.observation_arrays, self.env._env_obs
        terminated, truncated = frames.terminated[t], frames.truncated[t]
        rewards = []
        given = iterate(self.env.action_space, action.copy())
        for i, (member, one) in enumerate(zip(self.env.envs, given, strict=True)):
            known[i], reward, terminated[i], truncated[i], _ = member.step(one)
            rewards.append(reward)
            self._write(arrays, t + 1, i, known[i])
        try:
            frames.reward[t] = rewards
        except (TypeError, ValueError):
            raise ValueError(f"{self} returned the rewards {rewards!r}, not numbers") from None
        return self._after(frames, t, None, terminated | truncated, None)

    def _keep_finals(self, frames: FrameBlock, t: int, ended: Array, observation: Any) -> None:
        for rows, final in zip(frames.observation_arrays, frames.final_arrays, strict=True):
            final[t][ended] = rows[t + 1][ended]

    def _restart(self, frames: FrameBlock, t: int, which: Array) -> None:
        if self.history is not None:
            self.history.reset(which, None)
        env = self.env
        for i in map(int, np.flatnonzero(which)):
            env._env_obs[i], _ = env.envs[i].reset()
            self._write(frames.observation_arrays, t + 1, i, env._env_obs[i])
        for flags in (env._terminations, env._truncations, env._autoreset_envs):
            flags[which] = False

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        repeated = super().load_state_dict(state)
        if repeated:  # the vector does not know what its members were made to do
            self.env._env_obs = [
                _nested(self.env.single_observation_space, self.observations, self.current, member)
                for member in range(self.num_envs)
            ]
        return repeated


class SameStepVector(Vector):
    """A vector that returns the next episode's first observation, and the last one in `info`."""

    def __init__(self, env: Any):
        super().__init__(env)
        # The mode asks no vector to know `reset_mask`; gymnasium's own do.
        self.can_reset_some = self._seed_each

    def _after(self, frames: FrameBlock, t: int, observation: Any, ended: Array, info: Any) -> int:
        over = self._over_length(frames, t, ended)
        self.started = over is not None or bool(np.count_nonzero(ended))
        if not self.started:
            return self._halt(frames, t, ended) if self.halting else self.num_envs
        if over is not None:
            self._keep_finals(frames, t, over, observation)
            self._restart(frames, t, over)
        for member in np.flatnonzero(ended):
            for leaf, array in zip(self.observations, frames.final_arrays, strict=True):
                array[t, member] = self._final(info, leaf, int(member))
        ended = ended if over is None else ended | over
        frames.is_init[t + 1] = ended
        return self._halt(frames, t, ended) if self.halting else self.num_envs

    def _final(self, info: Any, leaf: Leaf, member: int) -> Any:
        for name in ("final_obs", "final_observation"):
            if name in info:
                finals = info[name]
                if isinstance(finals, np.ndarray) and finals.dtype == object:
                    return leaf.of(finals[member])  # each member's own, as its space nests it
                return leaf.of(finals)[member]
        raise ValueError(
            f"{self} says it resets within the same step, but its info has no 'final_obs'"
        )


class NextStepVector(Vector):
    """A vector whose step after an end is only a reset: no frame, whatever the action was."""

    can_reset_some = False

    def __init__(self, env: Any):
        super().__init__(env)
        self._ended = np.zeros(self.num_envs, bool)
        self._any_ended = False
        self._kept = 0  # the rows before it have their final observations in place

    def _after(self, frames: FrameBlock, t: int, observation: Any, ended: Array, info: Any) -> int:
        count = self.num_envs
        self.started = self._any_ended
        if self._any_ended:
            frames.is_init[t + 1] = self._ended
            frames.live[t] = ~self._ended
            count -= int(np.count_nonzero(self._ended))
        self._any_ended = bool(np.count_nonzero(ended))
        self._ended = ended
        if self.halting:
            live = frames.live[t] & ~self.halted
            self.halted |= ended
            frames.live[t] = live
            count = int(np.count_nonzero(live))
        return count

    def begin(self, frames: FrameBlock, t: int = 0) -> None:
        super().begin(frames, t)
        self._kept = t

    def end(self, frames: FrameBlock, num_steps: int) -> None:
        """Here what follows an end is the final observation itself: all are kept at once."""
        super().end(frames, num_steps)
        rows = slice(self._kept, num_steps)
        ended = frames.terminated[rows] | frames.truncated[rows]
        pairs = zip(frames.final_arrays, frames.observation_arrays, strict=True)
        for finals, observations in pairs if ended.any() else ():
            finals[rows][ended] = observations[self._kept + 1 : num_steps + 1][ended]

    def _reset(self, seeds: Sequence[int] | None, which: Array) -> Any:
        self._ended, self._any_ended = np.zeros(self.num_envs, bool), False
        return super()._reset(seeds, which)


def adapt_vector(env: Any) -> Vector:
    """The class for this vector's mode."""
    if Members.can_step(env):
        return Members(env)
    # Bare vectors of gymnasium's own reset any member when asked, in every mode; around them,
    # a wrapper may not know of it.
    if type(env) in (SyncVectorEnv, AsyncVectorEnv) and _mode(env) is AutoresetMode.NEXT_STEP:
        return ManualVector(env)
    kinds: dict[AutoresetMode, type[NextStepVector | SameStepVector | ManualVector]] = {
        AutoresetMode.NEXT_STEP: NextStepVector,
        AutoresetMode.SAME_STEP: SameStepVector,
        AutoresetMode.DISABLED: ManualVector,
    }
    return kinds[_mode(env)](env)


def _nested(space: Any, leaves: list[Leaf], arrays: list[Array], member: int) -> Any:
    """One member's observation, put together again as its space has it."""
    if len(leaves) == 1 and not leaves[0].path:
        return arrays[0][member].copy()

    def build(part: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(part, gym.spaces.Dict):
            return {name: build(one, (*path, name)) for name, one in part.spaces.items()}
        if isinstance(part, gym.spaces.Tuple):
            return tuple(build(one, (*path, i)) for i, one in enumerate(part.spaces))
        index = next(i for i, leaf in enumerate(leaves) if leaf.path == path)
        return arrays[index][member].copy()

    return build(space, ())


def _mode(env: Any) -> AutoresetMode:
    told = env.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(told)
    except ValueError:
        known = ", ".join(map(str, AutoresetMode))
        raise ValueError(
            f"{type(env.unwrapped).__name__} has metadata['autoreset_mode'] = {told!r}: it must "
            f"say who starts the next episode after an end, by one of {known}"
        ) from None
