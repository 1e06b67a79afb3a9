"""From blocks to the batch that a learner gets: [environments, time], everything in its place."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, UnbatchedTensor
from torch import Tensor

from collectors.rollout.frame_block import FrameBlock, FrameLayout
from collectors.rollout.spaces import Key

TERMINATED: Key = ("next", "terminated")
TRUNCATED: Key = ("next", "truncated")
DONE: Key = ("next", "done")
TRAJ_IDS: Key = ("collector", "traj_ids")
WORKER: Key = ("collector", "worker")
ENV: Key = ("collector", "env")
VERSION: Key = ("policy_version",)
FINAL: Key = ("next", "final")


class Trajectories:
    """Numbers trajectories: unique over all workers and their restarts, in the order of starts."""

    def __init__(self, worker: int = 0, num_workers: int = 1, count: int = 0):
        self.worker = worker
        self.num_workers = num_workers
        self.count = count
        self._current: np.ndarray[Any, Any] | None = None

    def restart(self) -> None:
        """The worker's environments are new ones."""
        self._current = None

    def number(self, is_init: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The trajectory of every frame [time, environments], from which of them are first ones."""
        starts = is_init.copy()
        if self._current is None:
            self._current = np.full(is_init.shape[1], -1, np.int64)
        if len(starts):
            starts[0] |= self._current < 0
        order = np.cumsum(starts.reshape(-1)).reshape(starts.shape) - 1 + self.count
        ids = np.where(starts, order * self.num_workers + self.worker, -1)
        ids = np.maximum.accumulate(np.maximum(ids, np.where(starts, -1, self._current)), axis=0)
        self.count += int(starts.sum())
        if len(ids):
            self._current = ids[-1].copy()
        return ids

    def adopt(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Numbers that are unique within this life of the worker, made unique over all."""
        if self._current is None:
            self._current = np.array([self.count])
        own = ids + int(self._current[0])
        self.count = max(self.count, int(own.max(initial=-1)) + 1)
        return own * self.num_workers + self.worker

    def state_dict(self) -> dict[str, Any]:
        current = None if self._current is None else self._current.tolist()
        return {"count": self.count, "current": current}

    def load_state_dict(self, state: dict[str, Any], *, under_way: bool) -> None:
        """Go on numbering; `under_way` says whether the trajectories then under way go on too."""
        self.count = int(state["count"])
        goes_on = under_way and state["current"] is not None
        self._current = np.array(state["current"], np.int64) if goes_on else None


_NUMBERS = ("version", "ids", "envs", "place")  # what is not handed out as it lies in the block


@dataclass
class Part:
    """One worker's block, and what is known of it."""

    frames: FrameBlock
    steps: int
    worker: int
    first_env: int
    trajectories: Trajectories

    @property
    def num_envs(self) -> int:
        return self.frames.layout.num_envs

    def is_full(self, num_steps: int) -> bool:
        """Whether every place up to `num_steps` holds a frame."""
        live = self.frames.live[: self.steps]
        return self.steps == num_steps and np.count_nonzero(live) == live.size

    def ended(self) -> np.ndarray[Any, Any]:
        frames, steps = self.frames, self.steps
        ended: np.ndarray[Any, Any] = frames.terminated[:steps] | frames.truncated[:steps]
        return ended

    def numbered(self) -> np.ndarray[Any, Any]:
        """The trajectory of every frame [time, environments]."""
        if self.frames.layout.hosted:
            return self.trajectories.adopt(self.frames.tensors["ids"][: self.steps].numpy())
        return self.trajectories.number(self.frames.is_init[: self.steps])

    def environments(self) -> np.ndarray[Any, Any]:
        """The number of each row's environment, over all workers: [environments, 1]."""
        if self.frames.layout.hosted:
            return self.frames.tensors["envs"][:1].T.numpy() + self.first_env
        return np.arange(self.first_env, self.first_env + self.num_envs)[:, None]


class BatchBuffer:
    """Memory of a batch: every field as a tensor, and as the bytes of each place, row by row."""

    def __init__(self, layout: FrameLayout, num_envs: int, num_steps: int, stamps: bool):
        self.shape = (num_envs, num_steps)
        self.tensors: dict[Key, Tensor] = {}
        self.bytes: dict[Key, np.ndarray[Any, Any]] = {}
        for key, shape, dtype in _fields(layout, stamps):
            field = self.tensors[key] = torch.empty((num_envs, num_steps, *shape), dtype=dtype)
            if field.numel():
                self.bytes[key] = field.view(num_envs, -1).view(torch.uint8).numpy()

    def rows(self, first: int, count: int) -> dict[Key, np.ndarray[Any, Any]]:
        """The places of some environments, of every field that takes any memory."""
        places = count * self.shape[1]
        return {
            key: part[first : first + count].reshape(places, -1) for key, part in self.bytes.items()
        }


def assemble(
    parts: Sequence[Part],
    *,
    num_steps: int,
    copy: bool,
    stamps: bool = True,
    buffer: BatchBuffer | None = None,
) -> TensorDict:
    """One batch of these blocks, one below the other.

    With `copy` it has memory of its own; without it (one part only), it is a view of the block, if
    every place of that is a frame. buffer: memory to use again.
    Frames come first in each row; what is none is masked, and zero.
    """
    if not copy and parts[0].is_full(num_steps):
        (part,) = parts
        return _as_views(part, num_steps, stamps)
    if buffer is None:
        buffer = buffer_for(parts, num_steps, stamps)
    row = 0
    finals: list[list[Tensor]] = []
    for part in parts:
        places = _Places(part, num_steps)
        _fill(buffer.rows(row, part.num_envs), part, places)
        if FINAL in buffer.tensors:
            numbers = buffer.tensors[FINAL][row : row + part.num_envs]
            finals.append(_finals(part, places, numbers, sum(len(one[0]) for one in finals)))
        row += part.num_envs
    return _with_finals(_tensordict(buffer.tensors, buffer.shape), parts, finals)


def buffer_for(parts: Sequence[Part], num_steps: int, stamps: bool) -> BatchBuffer:
    """Memory for a batch of such blocks."""
    total = sum(part.num_envs for part in parts)
    return BatchBuffer(parts[0].frames.layout, total, num_steps, stamps)


def _fields(
    layout: FrameLayout, stamps: bool
) -> Iterator[tuple[Key, tuple[int, ...], torch.dtype]]:
    """Everything that a batch holds."""
    for name, field in layout.fields.items():
        if name not in _NUMBERS and not (layout.only_finals and name.startswith("next/")):
            yield field.key, field.shape, field.dtype
    if layout.only_finals:
        yield FINAL, (), torch.int64
    yield DONE, (), torch.bool
    for key in (TRAJ_IDS, WORKER, ENV, *([VERSION] if stamps else [])):
        yield key, (), torch.int64


def _fill(target: dict[Key, np.ndarray[Any, Any]], part: Part, places: _Places) -> None:
    """Copy one block into its rows of the batch."""
    frames, layout, num_envs = part.frames, part.frames.layout, part.num_envs
    for name, field in layout.fields.items():
        if name not in _NUMBERS and not name.startswith("next/") and field.key in target:
            places.copy(frames.bytes[name], target[field.key])
    ended = np.flatnonzero(places.pick(part.ended()))
    for i, field in enumerate(layout.observations):
        follows = target.get(("next", *field.key))
        if follows is None:  # it takes no memory, or is left out
            continue
        if layout.hosted:  # complete: what lies in the row after a frame may be padding
            places.copy(frames.bytes[f"next/{i}"], follows)
            continue
        places.copy(frames.bytes[f"obs/{i}"][num_envs:], follows)
        if len(ended):
            follows[ended] = frames.bytes[f"next/{i}"][places.source[ended]]
    np.bitwise_or(target[TERMINATED], target[TRUNCATED], out=target[DONE])
    places.copy(part.numbered().reshape(-1, 1).view(np.uint8), target[TRAJ_IDS])
    target[WORKER].view(np.int64)[...] = part.worker
    target[ENV].view(np.int64).reshape(num_envs, -1)[...] = part.environments()
    if VERSION in target:
        places.copy(frames.bytes["version"], target[VERSION])


def _finals(part: Part, places: _Places, numbers: Tensor, first: int) -> list[Tensor]:
    """What followed the frames whose next observation no later frame of their row shows.

    numbers: told for each frame where that lies among the finals, counted from `first`, or -1.
    """
    frames, num_envs = part.frames, part.num_envs
    ended = places.pick(part.ended())
    chosen = np.flatnonzero(ended | places.last(num_envs))
    ended, source = ended[chosen], places.source[chosen]
    numbers.fill_(-1).view(-1)[torch.from_numpy(chosen)] = torch.arange(first, first + len(chosen))
    kept = frames.tensors["place"].view(-1).numpy()[source[ended]]
    found = []
    for observed, finals in zip(frames.observed, frames.final_arrays, strict=True):
        after = observed[num_envs + source]
        after[ended] = finals[kept]
        found.append(torch.from_numpy(after))
    return found


def _with_finals(
    batch: TensorDict, parts: Sequence[Part], finals: Sequence[Sequence[Tensor]]
) -> TensorDict:
    """The batch with these beside it, whatever their number: they have no place in its shape."""
    if finals:
        fields = parts[0].frames.layout.observations
        for field, values in zip(fields, zip(*finals, strict=True), strict=True):
            batch["next"].set(("finals", *field.key), UnbatchedTensor(torch.cat(values)))
    return batch


class _Places:
    """Where each place of a batch comes from: time is first there, environments are first here."""

    def __init__(self, part: Part, num_steps: int):
        num_envs = part.num_envs
        self.plain = False
        self.padding: np.ndarray[Any, Any] | None = None
        if part.is_full(num_steps):
            self.plain = num_envs == 1
            self.source = _transposed(num_steps, num_envs)
            return
        live = part.frames.live[: part.steps]
        counts = np.count_nonzero(live, axis=0)
        taken = (np.arange(num_steps) < counts[:, None]).reshape(-1)
        self.source = np.zeros(num_envs * num_steps, np.intp)
        self.source[taken] = _transposed(part.steps, num_envs)[live.T.reshape(-1)]
        self.padding = np.flatnonzero(~taken)

    def copy(self, block: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
        """Copy a field, both given as the bytes of each frame; what is no frame is zero."""
        if not len(block):
            target[...] = 0
        elif self.plain:
            target[...] = block[: len(target)]
        else:
            block.take(self.source, 0, target, "clip")
            if self.padding is not None:
                target[self.padding] = 0

    def last(self, num_envs: int) -> np.ndarray[Any, Any]:
        """Which places hold the last frame of their row."""
        frames = np.ones((num_envs, len(self.source) // num_envs + 1), bool)
        frames[:, -1] = False
        if self.padding is not None:
            frames[:, :-1].flat[self.padding] = False
        return (frames[:, :-1] & ~frames[:, 1:]).reshape(-1)

    def pick(self, flags: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """These flags [time, environments] in the places of the batch; False where no frame is."""
        if not flags.size:
            return np.zeros(len(self.source), bool)
        picked = flags.reshape(-1)[self.source]
        if self.padding is not None:
            picked[self.padding] = False
        return picked


@functools.lru_cache(maxsize=16)
def _transposed(num_steps: int, num_envs: int) -> np.ndarray[Any, Any]:
    places = np.arange(num_steps * num_envs, dtype=np.intp)
    return np.ascontiguousarray(places.reshape(num_steps, num_envs).T).reshape(-1)


def _as_views(part: Part, num_steps: int, stamps: bool) -> TensorDict:
    """The block itself as [environments, time]; `next` is completed in it."""
    frames, layout = part.frames, part.frames.layout
    ended = torch.from_numpy(part.ended())
    complete = layout.hosted or layout.only_finals
    completed = [] if complete else zip(frames.finals, frames.observations, strict=True)
    for finals, rows in completed:
        mask = ended.reshape(*ended.shape, *[1] * (rows.ndim - 2))
        torch.where(mask, finals, rows[1 : num_steps + 1], out=finals)
    shape = (part.num_envs, num_steps)
    known = {key for key, *_ in _fields(layout, stamps)}
    views = {
        field.key: frames.tensors[name][:num_steps].transpose(0, 1)
        for name, field in layout.fields.items()
        if name not in _NUMBERS and field.key in known
    }
    kept = []
    if layout.only_finals:
        views[FINAL] = torch.empty(shape, dtype=torch.int64)
        kept.append(_finals(part, _Places(part, num_steps), views[FINAL], 0))
    views[DONE] = ended.T
    views[TRAJ_IDS] = torch.from_numpy(part.numbered().T)
    views[WORKER] = torch.full((1, 1), part.worker).expand(shape)
    views[ENV] = torch.from_numpy(part.environments()).expand(shape)
    if stamps:
        views[VERSION] = frames.tensors["version"].transpose(0, 1)
    return _with_finals(_tensordict(views, shape), [part], kept)


def _tensordict(fields: dict[Key, Tensor], batch_size: tuple[int, int]) -> TensorDict:
    """Nested as the keys say; made without checking what is known to fit."""
    tree: dict[str, Any] = {}
    for key, value in fields.items():
        place = tree
        for name in key[:-1]:
            place = place.setdefault(name, {})
        place[key[-1]] = value
    return _nest(tree, batch_size)


def _nest(tree: dict[str, Any], batch_size: tuple[int, int]) -> TensorDict:
    source: dict[Any, Any] = {
        name: _nest(value, batch_size) if isinstance(value, dict) else value
        for name, value in tree.items()
    }
    return TensorDict._new_unsafe(source, batch_size=torch.Size(batch_size))


def frames_of(batch: TensorDictBase) -> int:
    """How many frames a batch holds: what is masked is none."""
    return int(batch["collector", "mask"].count_nonzero())
