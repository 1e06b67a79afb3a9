"""Prepare batches for actor-critic networks: rows of inputs, and sequences of them."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from harness.algorithms.actor_critic import Actor


def network_rows(policy: Actor, batch: TensorDictBase) -> dict[str, Tensor]:
    """What the networks are given and what was done, in rows [E, T]."""
    mask, traj_ids = batch["collector", "mask"], batch["collector", "traj_ids"]
    starts = batch["is_init"].clone()
    starts[:, 1:] |= traj_ids[:, 1:] != traj_ids[:, :-1]
    if policy.is_recurrent:  # new weights may have started the state anew
        starts |= ~batch["state"].any(-1)
    inputs, action = policy.prepare(batch["observation"]), batch["action"]
    if not mask.all() and mask.any():  # padding may hold anything: make it something possible
        shape = (*mask.shape, *[1] * (inputs.dim() - 2))
        inputs = inputs.masked_fill(~mask.view(shape), 0)
        action = action.clone()
        action[~mask] = action[mask][0]
    rows = {"inputs": inputs, "action": action, "starts": starts}
    if policy.is_recurrent:
        rows["state"] = batch["state"].clone()
    return rows


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
