"""Batches of nodes: as they travel, and as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, pad
from torch import Tensor


def to_entries(batch: TensorDictBase, *, as_arrays: bool) -> dict[Any, Any]:
    """The batch's tensors by key; with `as_arrays` as NumPy arrays, which Ray does not copy."""
    entries = dict(batch.items(True, True))
    return {key: _as_array(value) for key, value in entries.items()} if as_arrays else entries


def from_entries(entries: Mapping[Any, Any]) -> TensorDict:
    """The batch of these entries, in memory that can be written."""
    tensors = {key: _as_tensor(value) for key, value in entries.items()}
    batch = TensorDict({}, batch_size=next(iter(tensors.values())).shape[:2])
    for key, value in tensors.items():
        batch.set(key, value)
    return batch


def stack(batches: Sequence[TensorDict]) -> TensorDict:
    """One batch with the rows of all; shorter ones are padded with zeros, which are masked."""
    if len(batches) == 1:
        return batches[0]
    steps = max(batch.shape[1] for batch in batches)
    padded = [pad(batch, [0, 0, 0, steps - batch.shape[1]]) for batch in batches]
    stacked: TensorDict = torch.cat(padded, 0)  # type: ignore[arg-type, assignment]
    return stacked


def _as_array(tensor: Any) -> Any:
    # NumPy has no bfloat16: it travels as a tensor.
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, np.ndarray):  # arrays in Ray's object store are read-only
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    return value
