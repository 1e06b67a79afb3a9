"""Replays the current episodes of a saved collector.

A gymnasium environment cannot be saved. A replay restores the random stream from before the reset,
resets, and repeats the actions. The caller compares the outcome with the saved one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import PassiveEnvChecker, RecordEpisodeStatistics, RecordVideo, vector

from collectors.rollout.saved_attributes import GENERATORS, equal, saved

Array = np.ndarray[Any, Any]
LONGEST = 200_000  # steps of an episode that is replayed
# Wrappers that change nothing.
WATCHING = (PassiveEnvChecker, RecordEpisodeStatistics, vector.RecordEpisodeStatistics)
_SET_BY_A_REPLAY = ("_np_random", "_np_random_seed")
_COMPARED = (bool, int, float, str, np.generic, *GENERATORS)


def attributes_of(env: Any) -> dict[str, Any]:
    """The numbers and generators that an environment and its wrappers keep, as plain data."""
    result = {}
    while env is not None:
        for name, value in vars(env).items() if not isinstance(env, WATCHING) else ():
            if isinstance(value, _COMPARED) and name not in _SET_BY_A_REPLAY:
                result[f"{type(env).__name__}.{name}"] = saved(value)
        env = env.env if isinstance(env, gym.Wrapper) else None
    return result


def writes_files(env: Any) -> bool:
    """Whether a replay would write files again. A user's wrapper may have this attribute."""
    while not (isinstance(env, RecordVideo) or getattr(env, "writes_files", False)):
        if not isinstance(env, gym.Wrapper):
            return False
        env = env.env
    return True


class EpisodeReplay:
    """The start and the actions of the current episode of each environment."""

    def __init__(self, members: list[Any]):
        self.members = members
        self._initial = [attributes_of(member) for member in members]
        self.timeout = math.inf  # of a replay, in seconds
        self.actions: list[Array] = []  # of all members at each step
        self._starts: list[dict[str, Any] | None] = [None] * len(members)
        self._since = [0] * len(members)  # the episode's first entry in `actions`

    def reset(self, which: Array, seeds: Any) -> None:
        """Record that these members are about to be reset."""
        for i in np.flatnonzero(which):
            if seeds is not None:
                self._starts[i] = {"seed": int(seeds[i])}
            else:
                stream = getattr(self.members[i].unwrapped.np_random, "bit_generator", None)
                self._starts[i] = None if stream is None else {"rng": stream.state}
            self._since[i] = len(self.actions)

    def trim(self) -> None:
        """Forget actions of ended episodes, and of those too long to be replayed."""
        first = min(self._since)
        if len(self.actions) - first > LONGEST:
            first = len(self.actions)
            self._starts = [None] * len(self.members)
            self._since = [first] * len(self.members)
        del self.actions[:first]
        self._since = [since - first for since in self._since]

    def state_dict(self) -> list[dict[str, Any]]:
        """Each member's start and actions; empty for one that cannot be replayed."""
        states: list[dict[str, Any]] = []
        for i, start in enumerate(self._starts):
            given = np.array([actions[i] for actions in self.actions[self._since[i] :]])
            entry = {"actions": torch.from_numpy(given), "attributes": self._changed(i)}
            states.append({} if start is None else {**start, **entry})
        return states

    def repeat(
        self, states: list[dict[str, Any]], action_for: Callable[[Array], Any]
    ) -> list[tuple[Any, Any]] | None:
        """Replay every member's saved episode; their last observations and rewards.

        None if a member cannot be replayed, or not in time. action_for: a saved action in the form
        that a member takes.
        """
        if len(states) != len(self.members) or not all(states):
            return None
        deadline = time.monotonic() + self.timeout
        reached = []
        for member, state in zip(self.members, states, strict=True):
            if "rng" in state:
                member.unwrapped.np_random.bit_generator.state = state["rng"]
            observation, _ = member.reset(seed=state.get("seed"))
            over, reward = False, None
            for action in state["actions"].numpy():
                if over or time.monotonic() > deadline:  # over: it takes another course
                    return None
                observation, reward, terminated, truncated, _ = member.step(action_for(action))
                over = terminated or truncated
            reached.append((observation, reward))
        self._resume_recording(states)
        return reached

    def differences(self, states: list[dict[str, Any]]) -> list[str]:
        """Attributes that a replay did not bring back, in words."""
        return [
            f"the environment's attribute {name!r}"
            for i, state in enumerate(states)
            for name, value in attributes_of(self.members[i]).items()
            if name in state.get("attributes", {}) and not equal(value, state["attributes"][name])
        ]

    def _changed(self, i: int) -> dict[str, Any]:
        """The attributes of a member that have changed since it was made."""
        before, now = self._initial[i], attributes_of(self.members[i])
        return {k: v for k, v in now.items() if k not in before or not equal(v, before[k])}

    def _resume_recording(self, states: list[dict[str, Any]]) -> None:
        given = [state["actions"].numpy() for state in states]
        longest = max(given, key=len)
        merged = np.zeros((len(longest), len(given), *longest.shape[1:]), longest.dtype)
        for i, actions in enumerate(given):
            self._since[i] = len(longest) - len(actions)
            if len(actions):
                merged[self._since[i] :, i] = actions
        self.actions = list(merged)
        self._starts = [{k: v for k, v in one.items() if k in ("seed", "rng")} for one in states]
