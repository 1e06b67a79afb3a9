"""The observations that followed a batch's frames, in whichever form the batch has them.

With `next_observation="all"` they lie in ("next", "observation"). With "final" a batch holds only
those that no later frame of the same row shows:

    ("next", "finals", "observation")   [finals, ...]: where an episode ended, and each row's last
    ("next", "final")                   [environments, time]: a frame's place among them, or -1

What followed a frame is then its own final, or, at -1, what the next frame in its row observed.
That holds for any rows of a batch, but not for frames that are taken out of them.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor


def next_observations(
    batch: TensorDictBase, frames: Tensor | None = None, key: str | tuple[str, ...] = "observation"
) -> Tensor:
    """What followed each frame [environments, time, ...]; zero where there is no frame.

    frames: a mask [environments, time], for those alone, [frames, ...]. key: of the observation.
    """
    name = (key,) if isinstance(key, str) else key
    finals = batch.get(("next", "finals", *name), None)
    if finals is not None:
        return _followers(batch, batch.get(key), finals, frames)
    following: Tensor = batch.get(("next", *name))
    return following if frames is None else following[frames]


def next_values(batch: TensorDictBase, values: Tensor, final_values: Tensor) -> Tensor:
    """What each frame's next observation is worth [environments, time, ...].

    values: what the observations of all frames are worth. final_values: what the observations in
    batch["next", "finals"] are worth.
    """
    return _followers(batch, values, final_values, None)


def _followers(
    batch: TensorDictBase, shown: Tensor, finals: Tensor, frames: Tensor | None
) -> Tensor:
    """For these frames, or for all in their places: the entry of the next frame, or the final."""
    chosen = batch["collector", "mask"] if frames is None else frames
    rows, steps = chosen.nonzero(as_tuple=True)
    places, after = batch["next", "final"][rows, steps], steps + 1
    is_final = places >= 0
    if bool((~is_final & (after == shown.shape[1])).any()):
        raise ValueError(
            "a row of this batch was cut behind a frame whose next observation lies in the frame "
            "that followed: keep rows whole, or give the mask of the frames that you want"
        )
    found = shown[rows, after.clamp(max=shown.shape[1] - 1)]
    found[is_final] = finals[places[is_final]]
    if frames is not None:
        return found
    whole = torch.zeros_like(shown)
    whole[rows, steps] = found
    return whole
