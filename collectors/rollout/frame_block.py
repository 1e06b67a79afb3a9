"""Preallocated blocks that frames are written to: time first, one row for each step.

A block is one flat piece of memory, which processes can share. Observations have one row more than
the other fields: row t + 1 holds what follows step t, or, after an end, the first observation of
the next episode. The true final observation is then in the next free place of the finals. Unused
places take no memory: nothing writes to them.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectors.rollout.spaces import Key, SpaceLeaf
from sync.model.block import aligned

ALIGNMENT = 64
REWARD: Key = ("next", "reward")
TERMINATED: Key = ("next", "terminated")
TRUNCATED: Key = ("next", "truncated")
IS_INIT: Key = ("is_init",)
MASK: Key = ("collector", "mask")
VERSION: Key = ("policy_version",)
FINAL: Key = ("next", "final")  # which of the finals is a frame's next observation


@dataclass(frozen=True)
class FrameField:
    """One array of a block: [rows, environments, *shape]."""

    key: Key
    rows: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class FrameLayout:
    """The fields of a block of `num_steps` steps of `num_envs` environments."""

    num_envs: int
    num_steps: int
    observations: tuple[FrameField, ...]
    outputs: tuple[FrameField, ...]
    action: FrameField
    infos: tuple[FrameField, ...] = ()

    @classmethod
    def of(
        cls,
        num_envs: int,
        num_steps: int,
        observations: list[SpaceLeaf],
        action: SpaceLeaf,
        outputs: dict[Key, Tensor],
        *,
        infos: Mapping[str, np.ndarray[Any, Any]] | None = None,
    ) -> FrameLayout:
        """The layout for these leaves, and for what the policy puts out beside the action."""

        def field(leaf: SpaceLeaf, rows: int) -> FrameField:
            return FrameField(leaf.key, rows, leaf.shape, torch_dtype(leaf.dtype))

        return cls(
            num_envs,
            num_steps,
            tuple(field(leaf, num_steps + 1) for leaf in observations),
            tuple(
                FrameField(key, num_steps, tuple(value.shape[1:]), value.dtype)
                for key, value in outputs.items()
            ),
            field(action, num_steps),
            infos=tuple(
                FrameField(("next", "info", name), num_steps, value.shape, torch_dtype(value.dtype))
                for name, value in (infos or {}).items()
            ),
        )

    @cached_property
    def fields(self) -> dict[Key, FrameField]:
        """Every field by its key."""
        steps = self.num_steps
        frames = (
            *self.observations,
            *self.finals,
            *self.outputs,
            *self.infos,
            self.action,
            FrameField(REWARD, steps, (), torch.float32),
            FrameField(TERMINATED, steps, (), torch.bool),
            FrameField(TRUNCATED, steps, (), torch.bool),
            FrameField(IS_INIT, steps + 1, (), torch.bool),
            FrameField(MASK, steps, (), torch.bool),
            FrameField(VERSION, steps, (), torch.int64),
            FrameField(FINAL, steps, (), torch.int64),
        )
        return {field.key: field for field in frames}

    @cached_property
    def finals(self) -> tuple[FrameField, ...]:
        """The final observations, in the order of the observations."""
        return tuple(
            FrameField(("next", *field.key), self.num_steps, field.shape, field.dtype)
            for field in self.observations
        )

    def plain(self) -> FrameLayout:
        """The same without what was computed from it, to be sent."""
        return replace(self)

    def shape(self, field: FrameField) -> tuple[int, ...]:
        return (field.rows, self.num_envs, *field.shape)

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes that each field takes in a block."""
        return [
            aligned(math.prod(self.shape(field)) * field.dtype.itemsize, ALIGNMENT)
            for field in self.fields.values()
        ]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


class FrameBlock:
    """One block, as tensors and, for some fields, as arrays over the same memory."""

    def __init__(self, layout: FrameLayout, tensors: dict[Key, Tensor]):
        self.layout = layout
        self.tensors = tensors
        self._num_finals = 0
        self.observations = self._of(layout.observations)
        self.finals = self._of(layout.finals)
        self.outputs = self._of(layout.outputs)
        self.infos = [tensor.numpy() for tensor in self._of(layout.infos)]
        self.action = self.tensors[layout.action.key]
        self.actions = self.action.numpy()
        self.reward, self.terminated, self.truncated, self.is_init, self.live, self.version = (
            self.tensors[key].numpy()
            for key in (REWARD, TERMINATED, TRUNCATED, IS_INIT, MASK, VERSION)
        )

    def _of(self, fields: Sequence[FrameField]) -> list[Tensor]:
        return [self.tensors[field.key] for field in fields]

    def stamps(self, steps: int) -> Tensor:
        """The versions of so many steps [environments, steps]."""
        return self.tensors[VERSION][:steps].T

    @cached_property
    def observation_rows(self) -> list[tuple[Tensor, ...]]:
        """The policy's input at each step. They share one version counter, which shows writes."""
        return list(zip(*(o.data.unbind(0) for o in self.observations), strict=True))

    @cached_property
    def output_rows(self) -> list[dict[Key, Tensor]]:
        """Where the policy's outputs of each step go."""
        fields = [*self.layout.outputs, self.layout.action]
        tensors = [*self.outputs, self.action]
        rows = zip(*(tensor.data.unbind(0) for tensor in tensors), strict=True)
        return [{f.key: row for f, row in zip(fields, one, strict=True)} for one in rows]

    @cached_property
    def observation_arrays(self) -> list[np.ndarray[Any, Any]]:
        return [tensor.numpy() for tensor in self.observations]

    @cached_property
    def place(self) -> np.ndarray[Any, Any]:
        """Where the final observation of each end is among the finals."""
        return self.tensors[FINAL].numpy()

    @cached_property
    def final_arrays(self) -> list[np.ndarray[Any, Any]]:
        """The final observations as [places, *shape]; see `final_places`."""
        return [tensor.flatten(0, 1).numpy() for tensor in self.finals]

    def final_places(self, ended: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Where the final observations of these ends [steps, environments] are."""
        places: np.ndarray[Any, Any] = self.place[: len(ended)][ended]
        return places

    def new_finals(self, t: int, ended: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Places for the final observations of the environments that end at step `t`."""
        count = int(np.count_nonzero(ended))
        places = np.arange(self._num_finals, self._num_finals + count)
        self._num_finals += count
        self.place[t, ended] = places
        return places

    def keep_finals(self, t: int, ended: np.ndarray[Any, Any]) -> None:
        """Copy the final observations of step `t`, before the next episodes overwrite them."""
        places = self.new_finals(t, ended)
        for finals, observed in zip(self.final_arrays, self.observation_arrays, strict=True):
            finals[places] = observed[t + 1][ended]

    def begin(self) -> None:
        """Prepare the block for use again."""
        self._num_finals = 0
        self.is_init.fill(False)
        self.live.fill(True)


def block_in(layout: FrameLayout, buffer: Tensor) -> FrameBlock:
    """The block in this memory."""
    tensors = {}
    pieces = buffer[: layout.nbytes].split(layout.sizes)
    for (key, field), piece in zip(layout.fields.items(), pieces, strict=True):
        shape = layout.shape(field)
        tensors[key] = piece.view(field.dtype)[: math.prod(shape)].view(shape)
    return FrameBlock(layout, tensors)


def allocate(layout: FrameLayout) -> FrameBlock:
    """A block in this process's own memory."""
    return block_in(layout, torch.from_numpy(np.zeros(layout.nbytes, np.uint8)))


def map_blocks(fd: int, layout: FrameLayout, count: int) -> list[FrameBlock]:
    """Blocks in shared memory, of which each process that uses them has a descriptor."""
    nbytes = aligned(layout.nbytes, mmap.PAGESIZE)
    if os.fstat(fd).st_size == 0:  # the first to map them makes the memory
        os.ftruncate(fd, nbytes * count)
    whole = torch.frombuffer(mmap.mmap(fd, nbytes * count), dtype=torch.uint8)
    return [block_in(layout, whole[i * nbytes : (i + 1) * nbytes]) for i in range(count)]


def to_message(block: FrameBlock, steps: int) -> list[Tensor]:
    """Copies of the rows of the block's fields that so many steps use, as flat bytes."""
    return [
        block.tensors[key][:rows].clone().flatten().view(torch.uint8)
        for key, rows in _used_rows(block, steps).items()
    ]


def from_message(layout: FrameLayout, pieces: Sequence[Tensor]) -> FrameBlock:
    """The block of which `to_message` took these, with the rows that are in use."""
    tensors = {}
    for (key, field), piece in zip(layout.fields.items(), pieces, strict=True):
        row = math.prod((layout.num_envs, *field.shape)) * field.dtype.itemsize
        rows = piece.numel() // row if row else field.rows
        tensors[key] = piece.view(field.dtype).view(rows, layout.num_envs, *field.shape)
    return FrameBlock(layout, tensors)


def _used_rows(block: FrameBlock, steps: int) -> dict[Key, int]:
    layout = block.layout
    places = block.final_places(block.terminated[:steps] | block.truncated[:steps])
    final_rows = -(-(int(places.max(initial=-1)) + 1) // layout.num_envs)
    rows = {key: steps + field.rows - layout.num_steps for key, field in layout.fields.items()}
    return rows | {field.key: final_rows for field in layout.finals}


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The same type in torch."""
    try:
        return torch.from_numpy(np.zeros(0, dtype)).dtype
    except TypeError:
        raise TypeError(f"observations and actions of type {dtype} do not fit in tensors") from None
