"""Gymnasium environments of any kind, stepped into a block of frames.

One class for each way of starting the next episode: a plain environment and vectors whose members
can be reset one by one are reset here (`OneEnv`, `Members`, `ManualVector`); vectors of the
SAME_STEP mode have done it already; in those of the NEXT_STEP mode the step after an end is only a
reset, and the frame it would make is marked as not live. Whatever the mode, the row after an end
starts the next episode, and the true final observation lies in the block's finals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import iterate

from collectors.frames import Frames
from collectors.history import History
from collectors.spaces import Leaf, action_leaf, observation_leaves

Array = np.ndarray[Any, Any]


class Environments(ABC):
    """All the environments of one worker, stepped together.

    max_frames: cut trajectories that get this long, as truncated.
    halting: leave an environment alone after its episode's end, until `reset`.
    """

    def __init__(self, env: Any, num_envs: int, observation: Any, action: Any):
        self.env = env
        self.num_envs = num_envs
        self.action_space = action
        self.observations = observation_leaves(observation)
        self._plain = len(self.observations) == 1 and not self.observations[0].path
        self.action = action_leaf(action)
        self.max_frames: int | None = None
        self.halting = False
        self.current = [np.zeros((num_envs, *leaf.shape), leaf.dtype) for leaf in self.observations]
        self.fresh = np.ones(num_envs, bool)  # whose current observation starts an episode
        self.started = False  # whether the last step was followed by a start
        self.lengths = np.zeros(num_envs, np.int64)
        self.halted = np.zeros(num_envs, bool)
        self.seeds: list[int] = []
        self.history: History | None = None  # for those whose members are reset here

    # -- what a kind of environment defines

    @abstractmethod
    def step(self, frames: Frames, t: int, action: Array) -> int:
        """Step with `action`, write row `t` and the observations after it; the count of frames."""

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
        self._put(self.current, None, self._reset(seeds, which))
        self.fresh[which] = True
        self.lengths[which] = 0
        self.halted[which] = False

    def begin(self, frames: Frames, t: int = 0) -> None:
        """Make the current observations those of row `t`, which the block goes on from."""
        for rows, now in zip(frames.observation_arrays, self.current, strict=True):
            rows[t] = now
        frames.is_init[t] = self.fresh

    def end(self, frames: Frames, num_steps: int) -> None:
        """Keep what follows step `num_steps - 1` as the current observations."""
        for now, row in zip(self.current, frames.observation_arrays, strict=True):
            now[...] = row[num_steps]
        self.fresh[...] = frames.is_init[num_steps]
        if self.history is not None:
            self.history.trim()

    def cut(
        self, frames: Frames, t: int, seeds: Sequence[int] | None = None, which: Array | None = None
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
            "halted": torch.from_numpy(self.halted.copy()),
            "members": [] if self.history is None else self.history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Bring the environments to where the state was taken; False, and new episodes, if not."""
        if self.history is not None and state["members"]:
            observations = self.history.repeat(state["members"], self._given)
            if observations is not None and self._are_there(observations, state["current"]):
                for now, saved in zip(self.current, state["current"], strict=True):
                    now[...] = saved.numpy()
                self.fresh[...] = state["fresh"].numpy()
                self.halted[...] = state["halted"].numpy()
                self._set_lengths(state["lengths"].numpy())
                return True
        self.reset()
        return False

    def _are_there(self, observations: list[Any], saved: list[torch.Tensor]) -> bool:
        return all(
            np.array_equal(np.asarray(leaf.of(observation)), saved[i][member].numpy())
            for member, observation in enumerate(observations)
            for i, leaf in enumerate(self.observations)
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
        array = np.asarray(value)
        kinds_match = array.dtype == leaf.dtype or (
            not isinstance(value, np.ndarray) and array.dtype.kind == leaf.dtype.kind
        )
        if array.shape != shape or not kinds_match:
            raise ValueError(
                f"{self} returned the observation {'/'.join(leaf.key)!r} as {array.dtype} "
                f"{list(array.shape)}; its space says {leaf.dtype} {list(shape)}"
            )
        return array

    def _halt(self, frames: Frames, t: int, ended: Array) -> int:
        """Mark what halted environments do as no frames; how many frames are left."""
        frames.live[t] = ~self.halted
        count = int(np.count_nonzero(frames.live[t]))
        self.halted |= ended
        return count


_ONE = np.ones(1, bool)


class OneEnv(Environments):
    """A plain `gymnasium.Env`."""

    def __init__(self, env: gym.Env[Any, Any]):
        super().__init__(env, 1, env.observation_space, env.action_space)
        self._discrete = isinstance(env.action_space, gym.spaces.Discrete)
        self._length = 0
        self.history = History([env])

    def step(self, frames: Frames, t: int, action: Array) -> int:
        given = int(action[0]) if self._discrete else action[0].copy()
        self.history.actions.append((given,))  # type: ignore[union-attr, arg-type]
        observation, reward, terminated, truncated, _ = self.env.step(given)
        self._write(frames.observation_arrays, t + 1, 0, observation)
        try:
            frames.reward[t, 0] = reward
        except (TypeError, ValueError):
            raise ValueError(f"{self} returned the reward {reward!r}, not a number") from None
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
        observation, _ = self.env.reset()
        self._write(frames.observation_arrays, t + 1, 0, observation)
        frames.is_init[t + 1, 0] = self.started = True
        return count

    def _put(self, arrays: Sequence[Array], row: int | None, value: Any) -> None:
        assert row is None
        self._write([array[None] for array in arrays], 0, 0, value)

    def _reset(self, seeds: Sequence[int] | None, which: Array) -> Any:
        self._length = 0
        observation, _ = self.env.reset(seed=None if seeds is None else int(seeds[0]))
        return observation

    def attribute(self, name: str) -> Any:
        return self.env.get_wrapper_attr(name)

    def _lengths(self) -> Array:
        return np.array([self._length])

    def _set_lengths(self, lengths: Array) -> None:
        self._length = int(lengths[0])


class Vector(Environments):
    """A `gymnasium.vector.VectorEnv` of any mode."""

    def __init__(self, env: Any):
        super().__init__(env, env.num_envs, env.single_observation_space, env.single_action_space)
        # Others may, as CartPole's own vector does, know one seed for all.
        self._seed_each = isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv)

    def step(self, frames: Frames, t: int, action: Array) -> int:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._put(frames.observation_arrays, t + 1, observation)
        if np.shape(reward) != (self.num_envs,):
            raise ValueError(
                f"{self} returned a reward of shape {list(np.shape(reward))}, "
                f"not one for each of {self.num_envs} environments"
            )
        frames.reward[t] = reward
        frames.terminated[t] = terminated
        frames.truncated[t] = truncated
        return self._after(frames, t, observation, terminated | truncated, info)

    @abstractmethod
    def _after(self, frames: Frames, t: int, observation: Any, ended: Array, info: Any) -> int:
        """Deal with the ends of episodes; how many environments made a frame."""

    def _over_length(self, frames: Frames, t: int, ended: Array) -> Array | None:
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

    def _keep_finals(self, frames: Frames, t: int, ended: Array, observation: Any) -> None:
        for leaf, array in zip(self.observations, frames.final_arrays, strict=True):
            array[t][ended] = leaf.of(observation)[ended]

    def _restart(self, frames: Frames, t: int, which: Array) -> None:
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

    def _after(self, frames: Frames, t: int, observation: Any, ended: Array, info: Any) -> int:
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

    But it would gather and copy everybody's observations, ends and infos at every step.
    """

    def __init__(self, env: Any):
        super().__init__(env)
        self.history = History(env.envs)

    @classmethod
    def can_step(cls, env: Any) -> bool:
        """Whether it is bare, as it is known here, and does not reset within the same step."""
        known = type(env) is SyncVectorEnv and all(hasattr(env, name) for name in _INSIDES)
        return known and _mode(env) is not AutoresetMode.SAME_STEP

    def step(self, frames: Frames, t: int, action: Array) -> int:
        self.history.actions.append(action.copy())  # type: ignore[union-attr]
        arrays, known = frames.observation_arrays, self.env._env_obs
        terminated, truncated = frames.terminated[t], frames.truncated[t]
        rewards = []
        given = iterate(self.env.action_space, action)
        for i, (member, one) in enumerate(zip(self.env.envs, given, strict=True)):
            known[i], reward, terminated[i], truncated[i], _ = member.step(one)
            rewards.append(reward)
            self._write(arrays, t + 1, i, known[i])
        try:
            frames.reward[t] = rewards
        except (TypeError, ValueError):
            raise ValueError(f"{self} returned the rewards {rewards!r}, not numbers") from None
        return self._after(frames, t, None, terminated | truncated, None)

    def _keep_finals(self, frames: Frames, t: int, ended: Array, observation: Any) -> None:
        for rows, final in zip(frames.observation_arrays, frames.final_arrays, strict=True):
            final[t][ended] = rows[t + 1][ended]

    def _restart(self, frames: Frames, t: int, which: Array) -> None:
        self.history.reset(which, None)  # type: ignore[union-attr]
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

    def _after(self, frames: Frames, t: int, observation: Any, ended: Array, info: Any) -> int:
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

    def _after(self, frames: Frames, t: int, observation: Any, ended: Array, info: Any) -> int:
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

    def begin(self, frames: Frames, t: int = 0) -> None:
        super().begin(frames, t)
        self._kept = t

    def end(self, frames: Frames, num_steps: int) -> None:
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


def open_environments(
    factory: Callable[..., Any],
    kwargs: dict[str, Any] | None = None,
    *,
    max_frames: int | None = None,
    halting: bool = False,
) -> Environments:
    """Call the factory, and take what it gives by the way its episodes follow each other."""
    env = factory(**(kwargs or {}))
    environments = _adapt(env)
    if max_frames is not None and not environments.can_reset_some:
        environments.close()
        raise ValueError(
            f"max_frames_per_traj={max_frames}: {environments} can only be reset as a whole, so "
            "that no single trajectory can be cut"
        )
    environments.max_frames = max_frames
    environments.halting = halting
    return environments


def _adapt(env: Any) -> Environments:
    if isinstance(env, VectorEnv):
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
    if isinstance(env, gym.Env):
        return OneEnv(env)
    raise TypeError(
        f"create_env_fn must make a gymnasium.Env or a gymnasium.vector.VectorEnv, "
        f"it made a {type(env).__module__}.{type(env).__qualname__}"
    )


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
    return AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
