"""Cut batches into sequences for recurrent policies."""

from __future__ import annotations

import torch
from torch import Tensor


def sequences(rows: dict[str, Tensor], usable: Tensor, length: int) -> dict[str, Tensor]:
    """Cut rows [E, T] into sequences [S, length], each with the state that it begins with.

    Those without a usable frame are left out; "mask" says which frames of the others to learn from.
    """
    num_frames = usable.shape[1]
    padding = -num_frames % length
    cut = {}
    for key, value in {**rows, "mask": usable}.items():
        padded = torch.cat([value, value[:, -1:].expand(-1, padding, *value.shape[2:])], dim=1)
        cut[key] = padded.unflatten(1, (-1, length)).flatten(0, 1)
    if padding:
        cut["mask"].unflatten(0, (len(usable), -1))[:, -1, -padding:] = False
    cut["state"] = cut["state"][:, 0]
    chosen = cut["mask"].any(1)
    return {key: value[chosen] for key, value in cut.items()}
