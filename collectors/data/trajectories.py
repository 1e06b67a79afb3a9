"""Batches by whole trajectories: split, padded, or gathered until enough have ended."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from collectors.rollout.spaces import key_of, name_of


def split(batch: TensorDictBase) -> TensorDict:
    """The batch's pieces of trajectories, one a row, padded to the longest: [pieces, time].

    What is padding is False in ("collector", "mask").
    """
    frames, lengths = _one_after_the_other(batch)
    if len(lengths):
        return _placed(frames, lengths)
    nothing: TensorDict = batch[:0]
    return nothing


def pieces(batch: TensorDictBase) -> list[TensorDictBase]:
    """The frames of each trajectory in the batch, row by row, in the order of time."""
    frames, lengths = _one_after_the_other(batch)
    return list(frames.split(lengths.tolist())) if len(lengths) else []


def _one_after_the_other(batch: TensorDictBase) -> tuple[TensorDictBase, Tensor]:
    """All frames in one row, piece by piece, and how many each piece has."""
    mask = batch["collector", "mask"]
    rows, named = mask.nonzero()[:, 0], batch["collector", "traj_ids"][mask]
    _, lengths = torch.unique_consecutive(torch.stack([rows, named]), dim=1, return_counts=True)
    return batch[mask], lengths


def _placed(frames: TensorDictBase, lengths: Tensor) -> TensorDict:
    """Such frames as one batch, a piece in each row, as wide as the longest."""
    row = torch.arange(len(lengths)).repeat_interleave(lengths)
    time = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
    shape = len(lengths), int(lengths.max())
    placed = TensorDict({}, batch_size=shape)
    for key in frames.keys(True, True):
        given: Tensor = frames.get(key)
        values = given.new_zeros((*shape, *given.shape[1:]))
        values[row, time] = given
        placed.set(key, values)
    return placed


def pad(rows: list[TensorDictBase]) -> TensorDict:
    """These rows of frames as one batch, as wide as the longest."""
    if not rows:
        raise ValueError("there is no trajectory in this batch")
    lengths = torch.tensor([row.batch_size[0] for row in rows])
    return _placed(torch.cat(rows), lengths)  # type: ignore[arg-type]


class TrajectoryAssembler:
    """Gathers pieces until trajectories have ended, and gives those out in the order of ends.

    One that its environment left for another, since it was reset, ends there as truncated.
    """

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # the trajectory of each environment
        self._open: dict[int, list[TensorDictBase]] = defaultdict(list)
        self._done: list[TensorDictBase] = []
        self.frames = 0  # that wait here

    def add(self, batch: TensorDictBase) -> None:
        """Take a batch's frames in."""
        for piece in pieces(batch):
            self.frames += piece.batch_size[0]
            number = int(piece["collector", "traj_ids"][0])
            env = int(piece["collector", "env"][0])
            before, self._latest[env] = self._latest.get(env, number), number
            if before != number and before in self._open:
                self._end(before)
                self._done[-1] = _cut(self._done[-1])
            self._open[number].append(piece.clone())  # or it would keep the whole batch
            if bool(piece["next", "done"][-1]):
                self._end(number)

    def _end(self, number: int) -> None:
        parts = self._open.pop(number)
        self._done.append(torch.cat(parts) if len(parts) > 1 else parts[0])  # type: ignore[arg-type]

    def has(self, count: int | None) -> bool:
        """Whether there are so many whole trajectories."""
        return count is not None and len(self._done) >= count

    def take(self, count: int) -> TensorDict | None:
        """So many whole trajectories, padded; None if there are not yet."""
        if not self.has(count):
            return None
        taken, self._done = self._done[:count], self._done[count:]
        self.frames -= sum(trajectory.batch_size[0] for trajectory in taken)
        return pad(taken)

    def state_dict(self) -> dict[str, Any]:
        """What waits here, as tensors by name."""
        return {
            "latest": {str(env): number for env, number in self._latest.items()},
            "open": {
                str(number): by_name(torch.cat(parts))  # type: ignore[arg-type]
                for number, parts in self._open.items()
            },
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


def _cut(trajectory: TensorDictBase) -> TensorDictBase:
    """The same, with its last frame truncated."""
    cut = trajectory.clone()
    cut["next", "truncated"][-1] = cut["next", "done"][-1] = True
    return cut
