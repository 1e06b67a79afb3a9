"""Batches: assembled from blocks of frames, [time, environments], as [environments, time].

With `next_observation="all"`, the next observations of frames are in ("next", "observation"). With
"final", a batch has only those that are not the observation of the next frame in the same row:

    ("next", "finals", "observation")   [finals, ...]: at ends of episodes, and each row's last
    ("next", "final")                   [environments, time]: a frame's index in them, or -1

At -1, the next observation is that of the next frame in the row. So rows must be kept whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, UnbatchedTensor, pad_sequence
from torch import Tensor

from collectors.rollout.frame_block import (
    FINAL,
    TERMINATED,
    TRUNCATED,
    VERSION,
    FrameBlock,
    FrameField,
    FrameLayout,
)
from collectors.rollout.spaces import Key, name_of

DONE: Key = ("next", "done")
TRAJ_IDS: Key = ("collector", "traj_ids")
WORKER: Key = ("collector", "worker")
ENV: Key = ("collector", "env")


class BatchSpan(NamedTuple):
    """When a worker made a batch, by the `time.perf_counter_ns()` of this machine."""

    worker: int
    num_frames: int
    began_ns: int
    ended_ns: int


class TrajectoryNumbers:
    """Numbers trajectories by their starts, uniquely over all workers and their restarts."""

    def __init__(self, worker: int = 0, num_workers: int = 1, count: int = 0):
        self.worker = worker
        self.num_workers = num_workers
        self.count = count
        self._current: np.ndarray[Any, Any] | None = None

    def restart(self) -> None:
        """Start new trajectories in all environments."""
        self._current = None

    def number(self, is_init: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The trajectory of each frame [time, environments]; is_init: whether it is a first one."""
        before = self._current
        if before is None:
            before = np.full(is_init.shape[1], -1, np.int64)
        starts = is_init.copy()
        starts[:1] |= before < 0
        order = np.cumsum(starts).reshape(starts.shape) - 1 + self.count
        ids = np.where(starts, order * self.num_workers + self.worker, -1)
        ids = np.maximum.accumulate(np.vstack([before, ids]), axis=0)
        self.count += int(starts.sum())
        self._current = ids[-1].copy()
        return ids[1:]

    def state_dict(self) -> dict[str, Any]:
        current = None if self._current is None else self._current.tolist()
        return {"count": self.count, "current": current}

    def load_state_dict(self, state: dict[str, Any], *, under_way: bool) -> None:
        """Continue the numbering; `under_way`: also the unfinished trajectories."""
        self.count = int(state["count"])
        current = state["current"] if under_way else None
        self._current = None if current is None else np.array(current, np.int64)


@dataclass
class WorkerBatch:
    """A batch that one worker has finished: the trainer's record of it.

    steps: the rows of the block that are filled. num_frames: without those that are no frames.
    serial: the number of its order. block: the number of the worker's block that it is in.
    version: the newest at its order. newest: when it was finished; None if that is not known.
    made_s: how long it took; 0 if that is not known.
    ended_ns: when it was finished, by the `time.perf_counter_ns()` of this machine.
    """

    frames: FrameBlock
    steps: int
    num_frames: int
    worker: int
    first_env: int
    generation: int
    trajectories: TrajectoryNumbers
    serial: int = 0
    block: int = 0
    version: int = 0
    newest: int | None = None
    made_s: float = 0.0
    ended_ns: int = 0

    @property
    def span(self) -> BatchSpan:
        """When it was made."""
        began_ns = self.ended_ns - round(self.made_s * 1e9)
        return BatchSpan(self.worker, self.num_frames, began_ns, self.ended_ns)

    @property
    def num_envs(self) -> int:
        return self.frames.layout.num_envs

    def ended(self) -> np.ndarray[Any, Any]:
        """Whether an episode ended with each frame [time, environments]."""
        frames, steps = self.frames, self.steps
        ended: np.ndarray[Any, Any] = frames.terminated[:steps] | frames.truncated[:steps]
        return ended

    def environments(self) -> Tensor:
        """The number of each row's environment, over all workers: [environments, 1]."""
        return torch.arange(self.first_env, self.first_env + self.num_envs)[:, None]


def assemble(
    batches: Sequence[WorkerBatch],
    *,
    stamps: bool = True,
    only_finals: bool = False,
    buffer: dict[Key, Tensor] | None = None,
) -> TensorDict:
    """One batch of those of some workers, a row for each environment.

    Frames come first in each row; the rest is zero, and False in ("collector", "mask").
    stamps: whether frames have a "policy_version". only_finals: `next_observation="final"`.
    buffer: memory for the batch, from `buffer_for`.
    """
    if buffer is None:
        buffer = buffer_for(batches, stamps, only_finals)
    num_steps = buffer[DONE].shape[1]
    row = 0
    finals: list[list[Tensor]] = []
    for part in batches:
        rows = {key: tensor[row : row + part.num_envs] for key, tensor in buffer.items()}
        places = _Places(part, num_steps)
        _fill(rows, part, places, _copied(part.frames.layout, stamps, only_finals))
        if only_finals:
            finals.append(_finals(places, rows[FINAL], sum(len(one[0]) for one in finals)))
        row += part.num_envs
    batch = TensorDict(buffer, batch_size=(row, num_steps))
    if only_finals:
        observations = batches[0].frames.layout.observations
        for field, values in zip(observations, zip(*finals, strict=True), strict=True):
            batch["next"].set(("finals", *field.key), UnbatchedTensor(torch.cat(values)))
    return batch


def buffer_for(
    batches: Sequence[WorkerBatch], stamps: bool = True, only_finals: bool = False
) -> dict[Key, Tensor]:
    """Memory for a batch of such ones."""
    layout = batches[0].frames.layout
    num_steps = max(part.frames.layout.num_steps for part in batches)
    shape = (sum(part.num_envs for part in batches), num_steps)
    buffer = {
        key: torch.empty((*shape, *field.shape), dtype=field.dtype)
        for key, field in _copied(layout, stamps, only_finals).items()
    }
    buffer[DONE] = torch.empty(shape, dtype=torch.bool)
    for key in (TRAJ_IDS, WORKER, ENV, *([FINAL] if only_finals else [])):
        buffer[key] = torch.empty(shape, dtype=torch.int64)
    return buffer


def _copied(layout: FrameLayout, stamps: bool, only_finals: bool) -> dict[Key, FrameField]:
    """The fields that a batch takes from a block."""
    left_out = {FINAL} if stamps else {FINAL, VERSION}
    if only_finals:
        left_out.update(field.key for field in layout.finals)
    return {key: field for key, field in layout.fields.items() if key not in left_out}


def _fill(
    rows: dict[Key, Tensor], part: WorkerBatch, places: _Places, fields: dict[Key, FrameField]
) -> None:
    """Copy one block into its rows of the batch."""
    block = part.frames
    (ended,) = places.ended.nonzero(as_tuple=True)
    following = {field.key: field.key[1:] for field in block.layout.finals}
    for key in fields:
        source = _indexable(block.tensors[key].flatten(0, 1))
        target = _indexable(rows[key].flatten(0, 1))
        if key in following:
            observed = block.tensors[following[key]].flatten(0, 1)[part.num_envs :]
            places.copy(_indexable(observed), target)
            target.index_copy_(0, ended, source[places.finals(ended)])
        else:
            places.copy(source, target)
    torch.logical_or(rows[TERMINATED], rows[TRUNCATED], out=rows[DONE])
    numbers = part.trajectories.number(block.is_init[: part.steps])
    rows[TRAJ_IDS].view(-1).copy_(places.arranged(numbers))
    rows[WORKER].fill_(part.worker)
    rows[ENV].copy_(part.environments())


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _indexable(values: Tensor) -> Tensor:
    """The same memory in a type that torch can index: it cannot index wide unsigned integers."""
    return values.view(_SIGNED.get(values.dtype, values.dtype))


class _Places:
    """Which frame of a block [time, environments] goes where in its rows [environments, time]."""

    def __init__(self, part: WorkerBatch, num_steps: int):
        self.part = part
        num_envs = part.num_envs
        self._live = torch.from_numpy(part.frames.live[: part.steps]).T
        counts = self._live.sum(1)
        mask = torch.arange(num_steps) < counts[:, None]
        self.mask = mask.view(-1)
        (self.padding,) = (~self.mask).nonzero(as_tuple=True)
        env, t = self._live.nonzero(as_tuple=True)
        self.source = torch.zeros(num_envs * num_steps, dtype=torch.int64)
        self.source[self.mask] = t * num_envs + env
        self.last = (torch.arange(num_steps) == counts[:, None] - 1).view(-1)
        self.ended = self.arranged(part.ended())

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy a field, both given as [frames, ...]."""
        torch.index_select(source, 0, self.source, out=target)
        target.index_fill_(0, self.padding, 0)

    def arranged(self, values: np.ndarray[Any, Any]) -> Tensor:
        """These values [time, environments] as [places]; zero where there is no frame."""
        by_env = torch.from_numpy(values).T
        arranged = by_env.new_zeros(len(self.mask))
        arranged[self.mask] = by_env[self._live]
        return arranged

    def finals(self, ended: Tensor) -> Tensor:
        """Where the block keeps the final observations of these places, which ended."""
        return self.part.frames.tensors[FINAL].view(-1)[self.source[ended]]


def _finals(places: _Places, numbers: Tensor, first: int) -> list[Tensor]:
    """The next observations that are not the observation of the next frame in their row.

    numbers: receives the number of each frame's among them, counted from `first`, or -1.
    """
    frames, num_envs = places.part.frames, places.part.num_envs
    (chosen,) = (places.ended | places.last).nonzero(as_tuple=True)
    numbers.fill_(-1).view(-1)[chosen] = torch.arange(first, first + len(chosen))
    ended = places.ended[chosen]
    following = []
    for observed, finals in zip(frames.observations, frames.finals, strict=True):
        after = _indexable(observed.flatten(0, 1))[num_envs + places.source[chosen]]
        after[ended] = _indexable(finals.flatten(0, 1))[places.finals(chosen[ended])]
        following.append(after.view(observed.dtype))
    return following


def check_alike(names: Sequence[str], layouts: Sequence[FrameLayout], otherwise: str) -> None:
    """Refuse frames of different shapes or types: one batch cannot hold both."""
    entries = [
        {key: (field.shape, field.dtype) for key, field in layout.fields.items()}
        for layout in layouts
    ]
    first = entries[0]
    for name, other in zip(names, entries, strict=True):
        for key in dict.fromkeys([*first, *other]):
            if first.get(key) != other.get(key):
                raise ValueError(
                    f"{names[0]} and {name} differ in {name_of(key)!r}: one batch cannot hold "
                    f"both ({otherwise} returns them separately)"
                )


def frames_of(batch: TensorDictBase) -> int:
    """How many frames a batch holds, without padding."""
    return int(batch["collector", "mask"].count_nonzero())


def split(batch: TensorDictBase) -> TensorDict:
    """The batch's trajectories, or parts of such, one a row, padded to the longest: [rows, time].

    Padding is zero, and False in ("collector", "mask").
    """
    parts = pieces(batch)
    rows: TensorDict = pad_sequence(parts) if parts else batch[:0]
    return rows


def pieces(batch: TensorDictBase) -> list[TensorDictBase]:
    """The frames of each trajectory in the batch, row by row, in the order of time."""
    mask = batch["collector", "mask"]
    rows, ids = mask.nonzero()[:, 0], batch["collector", "traj_ids"][mask]
    _, lengths = torch.unique_consecutive(torch.stack([rows, ids]), dim=1, return_counts=True)
    return list(batch[mask].split(lengths.tolist())) if len(lengths) else []


# -- reading next observations


def next_observations(
    batch: TensorDictBase, frames: Tensor | None = None, key: str | tuple[str, ...] = "observation"
) -> Tensor:
    """The next observation of each frame [environments, time, ...]; zero for padding.

    The batch may have further dimensions before time. frames: a mask of the wanted frames, of the
    batch's dimensions; then the result is [frames, ...].
    key: of the observation.
    """
    name = (key,) if isinstance(key, str) else key
    finals = batch.get(("next", "finals", *name), None)
    if finals is not None:
        return _followers(batch, batch.get(key), finals, frames)
    following: Tensor = batch.get(("next", *name))
    return following if frames is None else following[frames]


def next_values(batch: TensorDictBase, values: Tensor, final_values: Tensor) -> Tensor:
    """The value of each frame's next observation [environments, time, ...].

    values: of the observations. final_values: of the observations in batch["next", "finals"].
    """
    return _followers(batch, values, final_values, None)


def _followers(
    batch: TensorDictBase, shown: Tensor, finals: Tensor, frames: Tensor | None
) -> Tensor:
    """The entries of the next frames in `shown`, or those in `finals`."""
    chosen = batch["collector", "mask"] if frames is None else frames
    *rows, steps = chosen.nonzero(as_tuple=True)
    places, after = batch["next", "final"][chosen], steps + 1
    is_final, num_steps = places >= 0, chosen.shape[-1]
    if bool((~is_final & (after == num_steps)).any()):
        raise ValueError(
            "a row of this batch was cut behind a frame whose next observation is in the frame "
            "after it: keep rows whole, or give a mask of the wanted frames"
        )
    following = shown[(*rows, after.clamp(max=num_steps - 1))]
    following[is_final] = finals[places[is_final]]
    if frames is not None:
        return following
    whole = torch.zeros_like(shown)
    whole[chosen] = following
    return whole
