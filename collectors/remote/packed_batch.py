"""A batch as one block of bytes: what a line between machines carries best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from collectors.rollout.spaces import Key

ALIGNMENT = 64
MASK: Key = ("collector", "mask")


@dataclass(frozen=True)
class Entry:
    """One entry of a batch, and where it lies in the block."""

    key: Key
    shape: tuple[int, ...]  # after [environments, time]
    dtype: torch.dtype
    start: int
    nbytes: int


@dataclass(frozen=True)
class PackedBatch:
    """A batch [environments, time] on its way. The block is a tensor, or an array of numpy."""

    batch_size: tuple[int, int]
    entries: tuple[Entry, ...]
    block: Any

    def open(self) -> dict[Key, Tensor]:
        """The entries, as views of the block."""
        block = self.block
        if isinstance(block, np.ndarray):
            block = torch.from_numpy(block if block.flags.writeable else block.copy())
        views: dict[Key, Tensor] = {}
        for entry in self.entries:
            flat = block[entry.start : entry.start + entry.nbytes].view(entry.dtype)
            views[entry.key] = flat.view(*self.batch_size, *entry.shape)
        return views


def pack(batch: TensorDictBase, *, as_array: bool = False) -> PackedBatch:
    """Copy a batch into a block; as_array: of numpy, which Ray moves without copying it again."""
    entries, end = [], 0
    values = [(_key(key), batch.get(key)) for key in batch.keys(True, True)]
    num_envs, num_steps = batch.batch_size
    for key, value in values:
        nbytes = value.numel() * value.element_size()
        entries.append(Entry(key, tuple(value.shape[2:]), value.dtype, end, nbytes))
        end = -(-(end + nbytes) // ALIGNMENT) * ALIGNMENT
    packed = PackedBatch((num_envs, num_steps), tuple(entries), torch.zeros(end, dtype=torch.uint8))
    for (_, value), place in zip(values, packed.open().values(), strict=True):
        place.copy_(value)
    if as_array:
        return PackedBatch(packed.batch_size, packed.entries, packed.block.numpy())
    return packed


def stack(parts: Sequence[dict[Key, Tensor]]) -> TensorDict:
    """These batches one below the other; shorter ones are padded, with zeros that are masked."""
    if len(parts) == 1:
        return nest(parts[0])
    num_envs = sum(part[MASK].shape[0] for part in parts)
    num_steps = max(part[MASK].shape[1] for part in parts)
    out: dict[Key, Tensor] = {}
    for key, first in parts[0].items():
        out[key] = first.new_zeros((num_envs, num_steps, *first.shape[2:]))
        row = 0
        for part in parts:
            rows, steps = part[key].shape[:2]
            out[key][row : row + rows, :steps] = part[key]
            row += rows
    return nest(out)


def nest(entries: dict[Key, Tensor]) -> TensorDict:
    """A batch of these entries."""
    batch = TensorDict({}, batch_size=next(iter(entries.values())).shape[:2])
    for key, value in entries.items():
        batch.set(key, value)
    return batch


def _key(key: Any) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)
