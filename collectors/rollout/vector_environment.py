"""Gymnasium's vectors of environments, one class for each way of starting the next episode.

Those whose members can be reset one by one are reset here (`ManualVector`); those of the SAME_STEP
mode have done it already; in those of the NEXT_STEP mode the step after an end is only a reset, and
the frame it would make is marked as not live.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

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
        if self.history is not None:
            self.history.actions.append(action.copy())  # an environment may write into its own
        observation, reward, terminated, truncated, info = self._of_step(self.env.step(action))
        self._put(frames.observation_arrays, t + 1, observation)
        told = {"reward": reward, "terminated": terminated, "truncated": truncated}
        self._check_numbers(told, (self.num_envs,))
        frames.reward[t] = reward
        frames.terminated[t] = terminated
        frames.truncated[t] = truncated
        ended = frames.terminated[t] | frames.truncated[t]
        if self.infos is not None:
            self.infos.write_all((array[t] for array in frames.infos), info, ended)
        return self._after(frames, t, observation, ended, info)

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
        observation, _ = self._of_reset(self.env.reset(seed=seed, options=options))
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
            frames.keep_finals(t, ended)
            self._restart(frames, t, ended)
            frames.is_init[t + 1] = ended
        return count


class SyncVector(ManualVector):
    """A bare `SyncVectorEnv`, whose members, which are public, can be brought back to a state.

    In its SAME_STEP mode it would reset them before anybody saw their random streams, and hand over
    a final observation that the reset may have overwritten.
    """

    def __init__(self, env: SyncVectorEnv):
        super().__init__(env)
        env.autoreset_mode = AutoresetMode.DISABLED
        self.history = EpisodeReplay(env.envs)

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        if self.history is not None:
            self.env.reset()  # it does not know what its members are made to do now
        return super().load_state_dict(state)


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
            frames.keep_finals(t, over)
            self._restart(frames, t, over)
        places = frames.new_finals(t, ended)
        for place, member in zip(places, np.flatnonzero(ended), strict=True):
            for leaf, array in zip(self.observations, frames.final_arrays, strict=True):
                array[place] = self._final(info, leaf, int(member))
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
        # Without shared memory, the step after an end is a reset also where a reset came between
        # (gymnasium 1.4).
        inner = env.unwrapped
        self._resets_twice = isinstance(inner, AsyncVectorEnv) and not inner.shared_memory

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
        if ended.any():
            frames.keep_finals(self._kept, ended)

    def _reset(self, seeds: Sequence[int] | None, which: Array) -> Any:
        if not self._resets_twice:
            self._ended, self._any_ended = np.zeros(self.num_envs, bool), False
        return super()._reset(seeds, which)


def adapt_vector(env: Any) -> Vector:
    """The class for this vector's mode."""
    if type(env) is SyncVectorEnv:
        return SyncVector(env)
    # A bare AsyncVectorEnv resets any member when asked, in every mode; around it, a wrapper may
    # not know of that, and without shared memory they are reset once more by their next step.
    if type(env) is AsyncVectorEnv and env.shared_memory and _mode(env) is AutoresetMode.NEXT_STEP:
        return ManualVector(env)
    kinds: dict[AutoresetMode, type[NextStepVector | SameStepVector | ManualVector]] = {
        AutoresetMode.NEXT_STEP: NextStepVector,
        AutoresetMode.SAME_STEP: SameStepVector,
        AutoresetMode.DISABLED: ManualVector,
    }
    return kinds[_mode(env)](env)


def _mode(env: Any) -> AutoresetMode:
    """Who starts the next episode, by the vector's attribute or its metadata.

    The attribute counts, as classes may share their metadata (those of ale-py 0.12 do).
    """
    told = getattr(env.unwrapped, "autoreset_mode", env.metadata.get("autoreset_mode"))
    try:
        return AutoresetMode(told)
    except ValueError:
        known = ", ".join(map(str, AutoresetMode))
        raise ValueError(
            f"{type(env.unwrapped).__name__} has metadata['autoreset_mode'] = {told!r}: it must "
            f"say who starts the next episode after an end, by one of {known}; set it in "
            "create_env_fn if the vector's authors did not"
        ) from None
