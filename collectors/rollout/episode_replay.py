"""Replays the episodes under way of a saved collector, so that a resumed one goes on in them.

A gymnasium environment cannot be saved. It can be given again what it was given since its episode
began: the random stream as it was before the reset, the reset, and the actions. The caller compares
the outcome with the observation and the reward that were saved.
"""

from __future__ import annotations

import math
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import RecordVideo

Array = np.ndarray[Any, Any]
LONGEST = 200_000  # steps; an episode that goes on for longer is not replayed


def writes_files(env: Any) -> bool:
    """Whether an environment or a wrapper writes files, which a replay would write again.

    A wrapper of a user's own says so by an attribute `writes_files = True`.
    """
    while not (isinstance(env, RecordVideo) or getattr(env, "writes_files", False)):
        if not isinstance(env, gym.Wrapper):
            return False
        env = env.env
    return True


class EpisodeReplay:
    """Random streams and actions of the environments of one vector, since their episodes began."""

    def __init__(self, members: list[Any]):
        self.members = members
        self.timeout = math.inf  # seconds that a replay may take
        self.actions: list[Array] = []
        self._starts: list[dict[str, Any] | None] = [None] * len(members)
        self._since = [0] * len(members)

    def reset(self, which: Array, seeds: Any) -> None:
        """These members are about to be reset."""
        for i in np.flatnonzero(which):
            if seeds is not None:
                self._starts[i] = {"seed": int(seeds[i])}
            else:
                stream = getattr(self.members[i].unwrapped.np_random, "bit_generator", None)
                self._starts[i] = {"rng": stream.state} if stream is not None else None
            self._since[i] = len(self.actions)

    def trim(self) -> None:
        """Forget actions that no episode under way needs."""
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
            states.append({} if start is None else {**start, "actions": torch.from_numpy(given)})
        return states

    def repeat(self, states: list[dict[str, Any]], action: Any) -> list[tuple[Any, Any]] | None:
        """Bring every member to where these states were taken; their last observations and rewards.

        action: turns a row of actions into what one member is given. None if a member cannot be
        brought there, or not in time.
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
            for row in state["actions"].numpy():
                # Where it takes another course, it may not be stepped past its end.
                if over or time.monotonic() > deadline:
                    return None
                observation, reward, terminated, truncated, _ = member.step(action(row))
                over = terminated or truncated
            reached.append((observation, reward))
        self._adopt(states)
        return reached

    def _adopt(self, states: list[dict[str, Any]]) -> None:
        """Go on recording from these states."""
        given = [state["actions"].numpy() for state in states]
        longest = max(given, key=len)
        merged = np.zeros((len(longest), len(given), *longest.shape[1:]), longest.dtype)
        for i, rows in enumerate(given):
            self._since[i] = len(longest) - len(rows)
            if len(rows):
                merged[self._since[i] :, i] = rows
        self.actions = list(merged)
        self._starts = [{k: v for k, v in one.items() if k != "actions"} for one in states]
