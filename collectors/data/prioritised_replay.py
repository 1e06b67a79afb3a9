"""A replay buffer whose samples are n-step transitions, drawn by priority or uniformly.

Proportional prioritisation is that of Schaul et al., "Prioritized Experience Replay", ICLR 2016.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from collectors.data.batch import DONE, ENV, TRAJ_IDS
from collectors.data.replay_buffer import ReplayBuffer

Array = np.ndarray[Any, Any]
NONE = -1  # where a frame has no known successor


class SumTree:
    """Numbers >= 0 in places, from which a place is drawn in proportion to its number.

    A binary tree in one array: node i holds the sum of the nodes 2i and 2i + 1, node 1 holds the
    sum of all, and the last `size` nodes are the places. Every sum is made from its two terms, so
    that equal numbers give equal trees, and errors do not grow with the number of changes.
    """

    def __init__(self, capacity: int):
        self.depth = max(1, (capacity - 1).bit_length())
        self.size = 1 << self.depth
        self.capacity = capacity
        self._nodes = np.zeros(2 * self.size)

    @property
    def total(self) -> float:
        return float(self._nodes[1])

    @property
    def values(self) -> Array:
        """The numbers, by place. Change them by `set`."""
        return self._nodes[self.size : self.size + self.capacity]

    def set(self, places: Array, values: Array) -> None:
        """Change the numbers in some places. If a place is named twice, its last value counts."""
        nodes = places + self.size
        self._nodes[nodes] = values
        for _ in range(self.depth):
            nodes = nodes >> 1
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, sums: Array) -> Array:
        """The places at which the running sum of the numbers exceeds these sums in [0, total)."""
        nodes, left = np.ones(len(sums), np.int64), sums
        for _ in range(self.depth):
            nodes = 2 * nodes
            below = self._nodes[nodes]
            # Where rounding leads beyond the last number above zero, that number is taken.
            right = (left >= below) & (self._nodes[nodes + 1] > 0)
            left = left - np.where(right, below, 0)
            nodes += right
        found: Array = nodes - self.size
        return found


class PrioritisedReplayBuffer(ReplayBuffer):
    """The last `capacity` frames; a sample holds each frame with up to `num_steps` that follow it.

    num_steps: with n, ("next", "reward") of a sample is the sum of the n rewards from its frame on,
        discounted by `gamma`, and all else in "next" is from the last of these n frames. Where an
        episode ends earlier, or no more of it has come yet, fewer frames count.
    exponent: a frame is drawn with probability p ** exponent / sum, where p is its priority;
        None: uniformly. A new frame has the highest priority that was ever given, so that it is
        soon seen. Samples are stratified: one from each n-th part of the sum.

    Samples have three more entries:

        ("replay", "discount")   what the value of the last frame's next observation is worth
        ("replay", "share")      the frame's probability of being drawn, times the frames there are
        ("replay", "serial")     the number of the frame, for `prioritise`

    Frames are those of a collector: its batches in their order. Their trajectories may go on over
    any number of batches, and those of other environments may come in between.
    """

    def __init__(
        self,
        capacity: int,
        *,
        num_steps: int = 1,
        gamma: float = 1.0,
        exponent: float | None = None,
        **options: Any,
    ):
        super().__init__(capacity, **options)
        self.num_steps = num_steps
        self.gamma = gamma
        self.exponent = exponent
        self._next = torch.full((self.capacity,), NONE)  # the place of each frame's successor
        self._last: dict[int, int] = {}  # the serial of the last frame of each environment
        self._tree = None if exponent is None else SumTree(self.capacity)
        self._highest = 1.0  # priority

    def extend(self, frames: TensorDictBase) -> Tensor:
        with self._changed:
            places = super().extend(frames)
            if len(places):
                self._link(places)
            if self._tree is not None:
                self._tree.set(places.numpy(), self._weights(np.full(len(places), self._highest)))
        return places

    def prioritise(self, serials: Tensor, priorities: Tensor) -> None:
        """Set the priorities of frames that were sampled, as far as they are still here."""
        if self._tree is None:
            return
        with self._changed:
            kept = serials >= self.written - self.capacity
            given = priorities[kept].double().numpy()
            self._tree.set((serials[kept] % self.capacity).numpy(), self._weights(given))
            self._highest = max(self._highest, float(given.max(initial=0.0)))

    def _weights(self, priorities: Array) -> Array:
        """What the chances of such frames are in proportion to."""
        assert self.exponent is not None
        weights: Array = priorities**self.exponent
        return weights

    def _link(self, places: Tensor) -> None:
        """Note which of the frames there follows which."""
        envs, ids = (self._storage.get(key)[places].cpu() for key in (ENV, TRAJ_IDS))
        self._next[places] = NONE
        same_row = envs[1:] == envs[:-1]
        follows = same_row & (ids[1:] == ids[:-1])
        self._next[places[:-1][follows]] = places[1:][follows]
        first_serial = self.written - len(places)
        starts = [0, *(torch.nonzero(~same_row).flatten() + 1).tolist()]
        for start, end in zip(starts, [*starts[1:], len(places)], strict=True):
            env = int(envs[start])
            before = self._last.get(env)
            if before is not None and before >= self.written - self.capacity:
                self._join(before % self.capacity, int(places[start]))
            self._last[env] = first_serial + end - 1

    def _join(self, before: int, after: int) -> None:
        """Link the last frame that an environment gave with its next one, if nothing is missing.

        What a worker made may be lost on the way, for instance when a run is resumed. So the later
        frame must start from the observation that the earlier one led to.
        """
        earlier, later = self._storage[before], self._storage[after]
        if earlier.get(DONE) or not torch.equal(earlier.get(TRAJ_IDS), later.get(TRAJ_IDS)):
            return
        following, keys = earlier.get("next"), later.keys(True, True)
        shown = [key for key in following.keys(True, True) if key in keys]
        if all(torch.equal(following.get(key), later.get(key)) for key in shown):
            self._next[before] = after

    def _draw(self, count: int) -> Tensor:
        if self._tree is None:
            return super()._draw(count)
        drawn = torch.rand(count, generator=self._generator, dtype=torch.float64).numpy()
        sums = (np.arange(count) + drawn) / max(1, count) * self._tree.total
        return torch.from_numpy(self._tree.find(sums))

    def _samples(self, places: Tensor) -> TensorDict:
        samples = super()._samples(places)
        last, discount = places, torch.full((len(places),), self.gamma)
        if self.num_steps > 1:
            rewards, done = self._storage["next", "reward"], self._storage.get(DONE)
            total = rewards[places].cpu()
            goes_on = torch.ones(len(places), dtype=torch.bool)
            for _ in range(1, self.num_steps):
                following = self._next[last]
                goes_on = goes_on & (following != NONE) & ~done[last].cpu()
                last = torch.where(goes_on, following, last)
                total = total + torch.where(goes_on, discount * rewards[last].cpu(), 0)
                discount = torch.where(goes_on, discount * self.gamma, discount)
            samples["next"] = self._at(last)["next"]
            samples["next", "reward"] = total.to(rewards.device)
        newest = self.written - 1
        samples["replay"] = TensorDict(
            {
                "discount": discount,
                "share": self._shares(places),
                "serial": newest - (newest - places) % self.capacity,
            },
            batch_size=[len(places)],
        )
        return samples

    def _shares(self, places: Tensor) -> Tensor:
        """How much likelier than on average these frames are drawn."""
        if self._tree is None:
            return torch.ones(len(places))
        weights = torch.from_numpy(self._tree.values[places.numpy()])
        return (weights * (len(self) / self._tree.total)).float()

    def state_dict(self) -> dict[str, Any]:
        """As of every replay buffer; with priorities, and which frame follows which."""
        with self._changed:
            state = super().state_dict() | {
                "next": self._next[: len(self)].clone(),
                "last": [list(pair) for pair in self._last.items()],
                "highest": self._highest,
            }
            if self._tree is not None:
                state["weights"] = torch.from_numpy(self._tree.values[: len(self)].copy())
            return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over another buffer's frames, priorities and position in the ring."""
        with self._changed:
            super().load_state_dict(state)
            self._next.fill_(NONE)[: len(self)] = state["next"]
            self._last = {int(env): int(serial) for env, serial in state["last"]}
            self._highest = float(state["highest"])
            if self._tree is not None:
                self._tree = SumTree(self.capacity)
                self._tree.set(np.arange(len(self)), state["weights"].numpy())
