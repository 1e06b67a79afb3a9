"""The next observations of a batch's frames, for both values of `next_observation`.

With "all" they are in ("next", "observation"). With "final" a batch has only those that are not the
observation of the next frame in the same row:

    ("next", "finals", "observation")   [finals, ...]: at ends of episodes, and each row's last
    ("next", "final")                   [environments, time]: a frame's index in them, or -1

At -1, the next observation is that of the next frame in the row. So rows must be kept whole.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor


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
    found = shown[(*rows, after.clamp(max=num_steps - 1))]
    found[is_final] = finals[places[is_final]]
    if frames is not None:
        return found
    whole = torch.zeros_like(shown)
    whole[chosen] = found
    return whole
