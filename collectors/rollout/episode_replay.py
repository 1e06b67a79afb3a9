"""What every environment was given since its episode began, so that it can be brought there again.

A gymnasium environment cannot be saved, but it can be repeated: its random stream as it was before
the reset, the reset, the same actions. Whether the repetition came out the same is checked by
whoever asks for it, against the observation and reward that were saved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
LONGEST = 200_000  # steps; an environment that goes on for longer is not repeated


class EpisodeReplay:
    """Starts and actions of the members of one vector."""

    def __init__(self, members: list[Any]):
        self.members = members
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
        """Each member's start and actions; empty for one that cannot be repeated."""
        states: list[dict[str, Any]] = []
        for i, start in enumerate(self._starts):
            if start is None:
                states.append({})
                continue
            given = [
                torch.from_numpy(np.asarray(a[i]).copy()) for a in self.actions[self._since[i] :]
            ]
            actions = torch.stack(given) if given else torch.zeros(0)
            states.append({**start, "actions": actions})
        return states

    def repeat(self, states: list[dict[str, Any]], action: Any) -> list[tuple[Any, Any]] | None:
        """Bring every member to where these states were taken; their last observations and rewards.

        action: turns a row of actions into what one member is given. None if any cannot be.
        """
        if len(states) != len(self.members) or not all(states):
            return None
        reached = []
        longest = max(len(state["actions"]) for state in states)
        self.actions = []
        padding = None
        for i, state in enumerate(states):
            member = self.members[i]
            if "seed" in state:
                observation, _ = member.reset(seed=int(state["seed"]))
                self._starts[i] = {"seed": int(state["seed"])}
            else:
                member.unwrapped.np_random.bit_generator.state = state["rng"]
                observation, _ = member.reset()
                self._starts[i] = {"rng": state["rng"]}
            self._since[i] = longest - len(state["actions"])
            over, reward = False, None
            for row in state["actions"].numpy():
                if over:  # it takes another course, and may not be stepped past its end
                    return None
                observation, reward, terminated, truncated, _ = member.step(action(row))
                over = terminated or truncated
            reached.append((observation, reward))
        shape = next((s["actions"].shape[1:] for s in states if len(s["actions"])), None)
        dtype = next((s["actions"].numpy().dtype for s in states if len(s["actions"])), None)
        for t in range(longest if shape is not None else 0):
            padding = np.zeros((len(states), *shape), dtype)  # type: ignore[misc]
            for i, state in enumerate(states):
                if t >= self._since[i]:
                    padding[i] = state["actions"][t - self._since[i]].numpy()
            self.actions.append(padding)
        return reached
