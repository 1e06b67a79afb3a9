"""Copies of small tensors past torch's dispatch, which takes several times as long as they do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Bytes = memoryview  # which copies a few bytes in half the time that an array of numpy's takes
_FEW = 10_000  # numbers; with more, a library for dot products may wake threads of its own
_KNOWN = (torch.float32, torch.float64)

# That something is not finite is what is asked; `np.errstate` around it would take twice its time.
warnings.filterwarnings("ignore", ".* encountered in dot", RuntimeWarning, module=r"sync\.raw")


def raw(tensors: Sequence[Tensor]) -> list[Bytes] | None:
    """The memory of these tensors; None if one is not in one piece, not the CPU's, or special."""
    if all(_is_plain(tensor) for tensor in tensors):
        flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
        return [memoryview(part.numpy()) for part in flat]  # type: ignore[arg-type]
    return None


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def copy(to: Sequence[Bytes], source: Sequence[Bytes]) -> None:
    """Each into its place, which has the same size."""
    for target, part in zip(to, source, strict=True):
        target[:] = part


def few_floats(stretch: Tensor) -> np.ndarray[Any, Any] | None:
    """The stretch as an array that `squares_are_finite` takes, if it is one."""
    if stretch.numel() <= _FEW and stretch.dtype in _KNOWN:
        return stretch.numpy()
    return None


def squares_are_finite(numbers: np.ndarray[Any, Any]) -> bool:
    """False if one of them is not finite; also if they are so large that their squares are not."""
    return math.isfinite(numbers.dot(numbers))
