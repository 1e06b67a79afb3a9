"""Batches by whole trajectories: split, padded, or gathered until enough have ended."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, pad_sequence
from torch import Tensor

from collectors.rollout.spaces import key_of, name_of


def split(batch: TensorDictBase) -> TensorDict:
    """The batch's trajectories, or parts of such, one a row, padded to the longest: [rows, time].

    Padding is zero, and False in ("collector", "mask").
    """
    found = pieces(batch)
    split: TensorDict = pad_sequence(found) if found else batch[:0]
    return split


def pieces(batch: TensorDictBase) -> list[TensorDictBase]:
    """The frames of each trajectory in the batch, row by row, in the order of time."""
    mask = batch["collector", "mask"]
    rows, ids = mask.nonzero()[:, 0], batch["collector", "traj_ids"][mask]
    _, lengths = torch.unique_consecutive(torch.stack([rows, ids]), dim=1, return_counts=True)
    return list(batch[mask].split(lengths.tolist())) if len(lengths) else []


class TrajectoryAssembler:
    """Joins pieces of trajectories, and hands out whole ones in the order of their ends.

    A trajectory that a reset cut short ends as truncated.
    """

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # trajectory of each environment
        self._open: dict[int, list[TensorDictBase]] = defaultdict(list)
        self._done: list[TensorDictBase] = []
        self.frames = 0  # not handed out yet

    def add(self, batch: TensorDictBase) -> None:
        """Add a batch's frames."""
        for piece in pieces(batch):
            self.frames += piece.batch_size[0]
            number = int(piece["collector", "traj_ids"][0])
            env = int(piece["collector", "env"][0])
            before, self._latest[env] = self._latest.get(env, number), number
            if before != number and before in self._open:
                self._end(before, truncated=True)
            self._open[number].append(piece.clone())  # a view would keep the whole batch in memory
            if bool(piece["next", "done"][-1]):
                self._end(number)

    def _end(self, number: int, truncated: bool = False) -> None:
        trajectory = TensorDict.cat(self._open.pop(number))
        if truncated:
            trajectory["next", "truncated"][-1] = trajectory["next", "done"][-1] = True
        self._done.append(trajectory)

    def has(self, count: int | None) -> bool:
        """Whether there are so many whole trajectories."""
        return count is not None and len(self._done) >= count

    def take(self, count: int) -> TensorDict | None:
        """So many whole trajectories, padded; None if there are fewer."""
        if not self.has(count):
            return None
        taken, self._done = self._done[:count], self._done[count:]
        self.frames -= sum(trajectory.batch_size[0] for trajectory in taken)
        padded: TensorDict = pad_sequence(taken)
        return padded

    def state_dict(self) -> dict[str, Any]:
        """The frames that were not handed out, as tensors by name."""
        return {
            "latest": {str(env): number for env, number in self._latest.items()},
            "open": {str(n): by_name(TensorDict.cat(parts)) for n, parts in self._open.items()},
            "done": [by_name(trajectory) for trajectory in self._done],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._latest = {int(env): int(number) for env, number in state["latest"].items()}
        self._open = defaultdict(list)
        for number, fields in state["open"].items():
            self._open[int(number)] = [by_key(fields)]
        self._done = [by_key(fields) for fields in state["done"]]
        waiting = [*self._done, *(piece for (piece,) in self._open.values())]
        self.frames = sum(trajectory.batch_size[0] for trajectory in waiting)


def by_name(frames: TensorDictBase) -> dict[str, Tensor]:
    """A copy of the frames' tensors, by name."""
    return {name_of(key): frames.get(key).clone() for key in frames.keys(True, True)}


def by_key(tensors: dict[str, Tensor]) -> TensorDict:
    """The frames of which `by_name` gave the tensors."""
    length = len(next(iter(tensors.values())))
    return TensorDict({key_of(name): tensor for name, tensor in tensors.items()}, [length])
