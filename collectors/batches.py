"""From blocks to the batch that a learner gets: [environments, time], everything in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from collectors.frames import FrameLayout, Frames
from collectors.spaces import Key


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


_NUMBERS = ("version", "ids", "envs")


@dataclass
class Part:
    """One worker's block, and what is known of it."""

    frames: Frames
    steps: int
    worker: int
    first_env: int
    trajectories: Trajectories


def assemble(
    parts: Sequence[Part],
    *,
    num_steps: int,
    copy: bool,
    stamps: bool = True,
    into: dict[Key, Tensor] | None = None,
) -> TensorDict:
    """One batch of these blocks, one below the other.

    With `copy` it has memory of its own; without it (one part only), it is a view of the block.
    into: memory to use again; if it is empty, what was allocated is left there.
    Rows beyond what was collected are masked, and so is what was no frame.
    """
    if not copy:
        (part,) = parts
        _complete(part)
        return _as_batch(_views(part), part, num_steps, stamps)
    layout = parts[0].frames.layout
    total = sum(part.frames.layout.num_envs for part in parts)
    out: dict[Key, Tensor] = {} if into is None else into
    row = 0
    for part in parts:
        count = part.frames.layout.num_envs
        views = _views(part)
        if not out:
            out = {
                key: torch.empty((total, num_steps, *view.shape[2:]), dtype=view.dtype)
                for key, view in views.items()
            }
        target = {key: value[row : row + count] for key, value in out.items()}
        _fill(target, views, part, num_steps)
        row += count
    return _finish(dict(out), parts, layout, total, num_steps, stamps)


def _views(part: Part) -> dict[Key, Tensor]:
    """The block's fields as [environments, time], without moving anything."""
    layout, tensors, steps = part.frames.layout, part.frames.tensors, part.steps
    views: dict[Key, Tensor] = {}
    for name, field in layout.fields.items():
        if name not in _NUMBERS:
            views[field.key] = tensors[name][:steps].transpose(0, 1)
    return views


def _numbered(part: Part) -> Tensor:
    """The trajectory of every frame [environments, time]."""
    frames, steps = part.frames, part.steps
    if frames.layout.hosted:
        ids = part.trajectories.adopt(frames.tensors["ids"][:steps].numpy())
    else:
        ids = part.trajectories.number(frames.is_init[:steps])
    return torch.from_numpy(ids.T)


def _environments(part: Part) -> Tensor:
    """The number of each row's environment, over all workers: [environments, 1]."""
    if part.frames.layout.hosted:
        return part.frames.tensors["envs"][:1].T + part.first_env
    count = part.frames.layout.num_envs
    return torch.arange(part.first_env, part.first_env + count)[:, None]


def _ended(part: Part) -> np.ndarray[Any, Any]:
    frames, steps = part.frames, part.steps
    ended: np.ndarray[Any, Any] = frames.terminated[:steps] | frames.truncated[:steps]
    return ended


def _complete(part: Part) -> None:
    """Write into the block's `next` what follows each step, but where an episode ended."""
    frames, steps = part.frames, part.steps
    ended = torch.from_numpy(_ended(part))
    for finals, rows in zip(frames.finals, frames.observations, strict=True):
        mask = ended.reshape(*ended.shape, *[1] * (rows.ndim - 2))
        finals[:steps] = torch.where(mask, finals[:steps], rows[1 : steps + 1])


def _fill(target: dict[Key, Tensor], views: dict[Key, Tensor], part: Part, num_steps: int) -> None:
    """Copy one block's rows into their place in the batch, each environment's frames together."""
    frames, steps = part.frames, part.steps
    layout = frames.layout
    follow = {
        layout.fields[f"next/{i}"].key: rows[1 : steps + 1].transpose(0, 1)
        for i, rows in enumerate(frames.observations)
    }
    ended = torch.from_numpy(_ended(part).T.copy())
    any_ended = bool(ended.any())
    for key, place in target.items():
        source = follow.get(key)
        place[:, :steps] = views[key] if source is None else source
        if source is not None and any_ended:
            place[:, :steps][ended] = views[key][ended]
        if steps < num_steps:
            place[:, steps:] = 0


def _finish(
    out: dict[Key, Tensor],
    parts: Sequence[Part],
    layout: FrameLayout,
    total: int,
    num_steps: int,
    stamps: bool,
) -> TensorDict:
    ids = torch.zeros((total, num_steps), dtype=torch.int64)
    version = torch.zeros((total, num_steps), dtype=torch.int64)
    worker = torch.zeros((total, num_steps), dtype=torch.int64)
    env = torch.zeros((total, num_steps), dtype=torch.int64)
    row = 0
    for part in parts:
        count, steps = part.frames.layout.num_envs, part.steps
        rows = slice(row, row + count)
        ids[rows, :steps] = _numbered(part)
        version[rows, :steps] = torch.from_numpy(part.frames.version[:steps].T)
        worker[rows] = part.worker
        env[rows] = _environments(part)
        row += count
    out[("next", "done")] = out[("next", "terminated")] | out[("next", "truncated")]
    out[("collector", "traj_ids")] = ids
    out[("collector", "worker")] = worker
    out[("collector", "env")] = env
    if stamps:
        out[("policy_version",)] = version
    _compact(out)
    return _tensordict(out, (total, num_steps))


def _as_batch(views: dict[Key, Tensor], part: Part, num_steps: int, stamps: bool) -> TensorDict:
    count, steps = part.frames.layout.num_envs, part.steps
    views = dict(views)
    views[("next", "done")] = views[("next", "terminated")] | views[("next", "truncated")]
    views[("collector", "traj_ids")] = _numbered(part)
    views[("collector", "worker")] = torch.full((1, 1), part.worker).expand(count, steps)
    views[("collector", "env")] = _environments(part).expand(count, steps)
    if stamps:
        views[("policy_version",)] = torch.from_numpy(part.frames.version[:steps].T)
    if steps < num_steps or not part.frames.live[:steps].all():
        views = {key: _padded(view, num_steps) for key, view in views.items()}
        _compact(views)
    return _tensordict(views, (count, num_steps))


def _padded(view: Tensor, num_steps: int) -> Tensor:
    missing = num_steps - view.shape[1]
    return torch.cat([view, view.new_zeros((view.shape[0], missing, *view.shape[2:]))], 1)


def _compact(out: dict[Key, Tensor]) -> None:
    """Bring each environment's frames together, where steps that were none lie between.

    What is no frame is zero.
    """
    mask = out[("collector", "mask")]
    if mask.all():
        return
    gaps = (~mask[:, :-1] & mask[:, 1:]).any(1)
    rows = gaps.nonzero().flatten()
    order = torch.argsort((~mask[rows]).to(torch.int8), dim=1, stable=True)
    for key, value in out.items() if len(rows) else ():
        part = value[rows]
        index = order.reshape(*order.shape, *[1] * (part.ndim - 2)).expand(part.shape)
        out[key][rows] = torch.gather(part, 1, index)
    beyond = ~out[("collector", "mask")]
    for key, value in out.items():
        if key[0] != "collector":
            value[beyond] = 0


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
    return int(batch["collector", "mask"].sum())
