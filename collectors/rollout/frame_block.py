"""Where frames are written: preallocated blocks, time first, one row a step.

A block is one flat piece of memory, so that a worker's can be shared and handed over by number.
Observations have one row more than the rest: row t + 1 is what follows step t, or, where an episode
ended there, what the next one starts with; the true final observation then lies in the finals, in
the place of its step, or, with `only_finals`, in the next free one. Memory of those that stay free
is never touched, and so never taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectors.rollout.spaces import Key, Leaf

ALIGNMENT = 64


@dataclass(frozen=True)
class Field:
    """One array of a block: [rows, environments, *shape]."""

    key: Key
    rows: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class FrameLayout:
    """What a block of `num_steps` steps of `num_envs` environments holds, and where."""

    num_envs: int
    num_steps: int
    observations: tuple[Field, ...]
    outputs: tuple[Field, ...]
    action: Field
    hosted: bool = False  # filled by a collector, which numbers trajectories and environments
    infos: tuple[Field, ...] = ()
    only_finals: bool = False  # batches hold next observations only where no later frame has them

    @classmethod
    def of(
        cls,
        num_envs: int,
        num_steps: int,
        observations: list[Leaf],
        action: Leaf,
        outputs: dict[Key, Tensor],
        *,
        infos: Mapping[str, np.ndarray[Any, Any]] | None = None,
        only_finals: bool = False,
    ) -> FrameLayout:
        """The layout for these leaves, and for what the policy puts out beside the action."""
        return cls(
            num_envs,
            num_steps,
            tuple(
                Field(leaf.key, num_steps + 1, leaf.shape, torch_dtype(leaf.dtype))
                for leaf in observations
            ),
            tuple(
                Field(key, num_steps, tuple(value.shape[1:]), value.dtype)
                for key, value in outputs.items()
            ),
            Field(action.key, num_steps, action.shape, torch_dtype(action.dtype)),
            infos=tuple(
                Field(("next", "info", name), num_steps, value.shape, torch_dtype(value.dtype))
                for name, value in (infos or {}).items()
            ),
            only_finals=only_finals,
        )

    @cached_property
    def fields(self) -> dict[str, Field]:
        """Every field under the name that `FrameBlock` knows it by."""
        steps = self.num_steps
        named = {f"obs/{i}": field for i, field in enumerate(self.observations)}
        for i, field in enumerate(self.observations):
            named[f"next/{i}"] = Field(("next", *field.key), steps, field.shape, field.dtype)
        named |= {f"out/{i}": field for i, field in enumerate(self.outputs)}
        named |= {f"info/{i}": field for i, field in enumerate(self.infos)}
        named["action"] = self.action
        named["reward"] = Field(("next", "reward"), steps, (), torch.float32)
        for name in ("terminated", "truncated"):
            named[name] = Field(("next", name), steps, (), torch.bool)
        named["is_init"] = Field(("is_init",), steps + 1, (), torch.bool)
        named["live"] = Field(("collector", "mask"), steps, (), torch.bool)
        named["version"] = Field(("policy_version",), steps, (), torch.int64)
        if self.only_finals:
            named["place"] = Field(("next", "final"), steps, (), torch.int64)
        if self.hosted:
            named["ids"] = Field(("collector", "traj_ids"), steps, (), torch.int64)
            named["envs"] = Field(("collector", "env"), steps, (), torch.int64)
        return named

    @cached_property
    def places(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Offset and shape of every field."""
        places, offset = {}, 0
        for name, field in self.fields.items():
            shape = (field.rows, self.num_envs, *field.shape)
            places[name] = (offset, shape)
            size = int(np.prod(shape, dtype=np.int64)) * field.dtype.itemsize
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        places[""] = (offset, ())
        return places

    @property
    def nbytes(self) -> int:
        return self.places[""][0]

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}


class FrameBlock:
    """One block, as tensors and (where numpy knows the type) as arrays over the same memory."""

    def __init__(self, layout: FrameLayout, buffer: Tensor):
        self.layout = layout
        self.buffer = buffer
        self.num_steps = 0  # how many of the rows are filled
        self._num_finals = 0
        tensors = {}
        for name, field in layout.fields.items():
            offset, shape = layout.places[name]
            size = int(np.prod(shape, dtype=np.int64)) * field.dtype.itemsize
            tensors[name] = buffer[offset : offset + size].view(field.dtype).view(shape)
        self.tensors: dict[str, Tensor] = tensors
        count = len(layout.observations)
        self.observations = [tensors[f"obs/{i}"] for i in range(count)]
        self.finals = [tensors[f"next/{i}"] for i in range(count)]
        self.outputs = [tensors[f"out/{i}"] for i in range(len(layout.outputs))]
        self.infos = [tensors[f"info/{i}"].numpy() for i in range(len(layout.infos))]
        self.action = tensors["action"]
        self.reward = tensors["reward"].numpy()
        self.terminated = tensors["terminated"].numpy()
        self.truncated = tensors["truncated"].numpy()
        self.is_init = tensors["is_init"].numpy()
        self.live = tensors["live"].numpy()
        self.version = tensors["version"].numpy()

    @cached_property
    def observation_rows(self) -> list[tuple[Tensor, ...]]:
        """What the policy is given at each step, made once; whoever writes into it is found out."""
        return list(zip(*(o.data.unbind(0) for o in self.observations), strict=True))

    @cached_property
    def observation_arrays(self) -> list[np.ndarray[Any, Any]]:
        return [tensor.numpy() for tensor in self.observations]

    @cached_property
    def observed(self) -> list[np.ndarray[Any, Any]]:
        """The observations as [rows * environments, *shape]."""
        return [tensor.flatten(0, 1).numpy() for tensor in self.observations]

    @cached_property
    def final_arrays(self) -> list[np.ndarray[Any, Any]]:
        """The final observations [places, *shape]; `final_places` says whose is where."""
        return [tensor.flatten(0, 1).numpy() for tensor in self.finals]

    def final_places(self, ended: np.ndarray[Any, Any], t: int = 0) -> np.ndarray[Any, Any]:
        """Where those that `ended` masks, [environments] or [steps from `t` on], have finals."""
        where = t * self.layout.num_envs + np.flatnonzero(ended)
        if not self.layout.only_finals:
            return where
        places: np.ndarray[Any, Any] = self.tensors["place"].view(-1).numpy()[where]
        return places

    def new_finals(self, t: int, ended: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Places for the finals of those that end at step `t`, or in the steps from it on."""
        if self.layout.only_finals:
            where = t * self.layout.num_envs + np.flatnonzero(ended)
            before, self._num_finals = self._num_finals, self._num_finals + len(where)
            self.tensors["place"].view(-1).numpy()[where] = np.arange(before, self._num_finals)
        return self.final_places(ended, t)

    def keep_finals(self, t: int, ended: np.ndarray[Any, Any]) -> None:
        """Keep what the row after each of these ends holds now, before the next episode's start."""
        places = self.new_finals(t, ended)
        after = (t + 1) * self.layout.num_envs + np.flatnonzero(ended)
        for finals, observed in zip(self.final_arrays, self.observed, strict=True):
            finals[places] = observed[after]

    def begin(self) -> None:
        """Forget what an earlier use wrote where this one may not write."""
        self.num_steps = self._num_finals = 0
        self.is_init.fill(False)
        self.live.fill(True)


def allocate(layout: FrameLayout) -> FrameBlock:
    """A block in this process's own memory."""
    return FrameBlock(layout, torch.from_numpy(np.zeros(layout.nbytes, np.uint8)))


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The same type in torch."""
    try:
        return torch.from_numpy(np.zeros(0, dtype)).dtype
    except TypeError:
        raise TypeError(f"observations and actions of type {dtype} do not fit in tensors") from None
