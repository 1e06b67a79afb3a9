"""Running statistics that scale observations and rewards.

What a worker scales by is part of the policy's weights: it computes with what the learner had when
it published. The statistics behind that stay with the learner, since counts and variances grow
beyond any weight, and beyond what a wire format holds. Only the learner moves them, with `update`;
a forward never does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from harness.algorithms.returns import discounted

LIMIT = 10.0  # no normalised number is further from zero
EPSILON = 1e-8


class Normaliser(nn.Module):
    """Scales by the mean and spread of all that it was updated with; does nothing before that.

    centre: whether to subtract the mean, too.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...] = (), *, centre: bool = True):
        super().__init__()
        self.centre = centre
        self.count = 0
        self.mean = torch.zeros(shape, dtype=torch.float64)
        self.variance = torch.ones(shape, dtype=torch.float64)
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def forward(self, value: Tensor) -> Tensor:
        if self.centre:
            value = value - self.shift
        return (value * self.scale).clamp(-LIMIT, LIMIT)

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Take values [N, ...] into account."""
        new = len(values)
        if not new:
            return
        variance, mean = torch.stack(torch.var_mean(values.double(), dim=0, correction=0)).cpu()
        total = self.count + new
        apart = mean - self.mean
        squares = self.variance * self.count + variance * new
        squares = squares + apart.square() * self.count * new / total
        self._scale_by(total, self.mean + apart * new / total, squares / total)

    def _scale_by(self, count: int, mean: Tensor, variance: Tensor) -> None:
        self.count, self.mean, self.variance = count, mean, variance
        self.shift.copy_(mean)
        self.scale.copy_((variance + EPSILON).rsqrt())

    def statistics(self) -> dict[str, Any]:
        """What a later process needs to go on from here."""
        return {"count": self.count, "mean": self.mean, "variance": self.variance}

    def load_statistics(self, state: Mapping[str, Any]) -> None:
        self._scale_by(int(state["count"]), state["mean"], state["variance"])


class DiscountedReturns:
    """Each environment's discounted sum of rewards so far, carried from batch to batch."""

    def __init__(self, gamma: float):
        self.gamma = gamma
        # (worker, environment): the trajectory it was in, and the sum at its last frame
        self._sums: dict[tuple[int, int], tuple[int, float]] = {}

    def follow(self, batch: TensorDictBase) -> Tensor:
        """The sum at every frame [E, T] of a batch, which goes on where earlier batches ended."""
        mask, traj = batch["collector", "mask"], batch["collector", "traj_ids"]
        reward = torch.where(mask, batch["next", "reward"], 0).float()
        pairs = zip(*(batch["collector", k][:, 0].tolist() for k in ("worker", "env")), strict=True)
        envs = list(pairs)
        before = [self._sums.get(env, (-1, 0.0)) for env in envs]
        trajectories = torch.tensor([traj_id for traj_id, _ in before], device=reward.device)
        carried = torch.tensor([total for _, total in before], device=reward.device)
        reward[:, 0] += self.gamma * carried * (trajectories == traj[:, 0])
        goes_on = (traj[:, 1:] == traj[:, :-1]) & ~batch["next", "done"][:, :-1]
        keep = torch.zeros_like(reward)
        keep[:, 1:] = self.gamma * goes_on
        sums = discounted(reward.flip(1), keep.flip(1)).flip(1)
        self._remember(envs, batch, sums)
        return sums

    def _remember(self, envs: list[tuple[int, int]], batch: TensorDictBase, sums: Tensor) -> None:
        mask = batch["collector", "mask"]
        places = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask, places, 0).amax(1, keepdim=True)
        columns = (batch["collector", "traj_ids"], sums, batch["next", "done"])
        ends = zip(*(c.gather(1, last).squeeze(1).tolist() for c in columns), strict=True)
        is_seen = mask.any(1).tolist()
        for env, has_frames, (traj_id, total, done) in zip(envs, is_seen, ends, strict=True):
            if has_frames and not done:
                self._sums[env] = (traj_id, total)
            elif has_frames:
                self._sums.pop(env, None)

    def state_dict(self) -> dict[str, Tensor]:
        rows = [(*env, traj_id) for env, (traj_id, _) in self._sums.items()]
        return {
            "rows": torch.tensor(rows, dtype=torch.int64).reshape(-1, 3),
            "sums": torch.tensor([s for _, s in self._sums.values()], dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        rows, sums = state["rows"].tolist(), state["sums"].tolist()
        self._sums = {(w, e): (t, s) for (w, e, t), s in zip(rows, sums, strict=True)}
