"""Group-relative policy optimisation: PPO without a critic, for episodes that begin alike.

What an episode is worth is its return, compared with those of the other episodes of the batch that
begin with the same observation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from collectors.options.check_types import Count, NonNegative, Positive
from harness.algorithms.ppo import PPO, PPOConfig
from harness.algorithms.returns import Returns, Steps
from harness.errors import ConfigError
from harness.registry import algorithms


@dataclass
class GRPOConfig(PPOConfig):
    """Group-relative policy optimisation: episodes that begin alike are compared, without critic.

    Values, and with them gamma, gae_lambda, vtrace and the options of values, have no part in it.
    """

    critic: ClassVar[bool] = False

    name: str = "grpo"
    learning_rate: Positive = 1e-3  # of Adam
    anneal_learning_rate: bool = False  # linearly, to zero at the last frame
    epochs: Count = 2  # passes over each batch
    minibatch_size: Count = 288  # frames in one gradient step, approximately
    normalise_advantages: bool = False  # to mean 0 and variance 1 in each minibatch
    entropy_weight: NonNegative = 0.0  # weight of the entropy bonus
    value_weight: NonNegative = 0.0  # weight of the value loss
    max_grad_norm: NonNegative = 1.0  # of all gradients together; 0: no limit
    # what a return is compared with: the mean of its group, or of the others in it (RLOO)
    baseline: Literal["group", "leave_one_out"] = "group"
    scale: bool = True  # divide by the standard deviation of the group

    def check(self, config: Any) -> None:
        super().check(config)
        if self.vtrace:
            raise ConfigError(
                "algo.vtrace=true algo=grpo: returns of whole episodes are not corrected; expected "
                "false"
            )
        env, size = config.env, config.env.kwargs.get("group_size", 1)
        if env.id == "lockstep/Tokens-v0" and (size < 2 or env.vectorisation != "native"):
            named, expected = f"env.kwargs.group_size={size}", "2 or more"
            if size >= 2:
                named, expected = f"env.vectorisation={env.vectorisation}", "native"
            raise ConfigError(
                f"{named} algo=grpo: no two episodes would begin alike; expected {expected}"
            )


@algorithms.register("grpo", options=GRPOConfig)
class GRPO(PPO):
    """PPO's update, whose advantages are those of an episode within its group."""

    config: GRPOConfig

    def returns(self, batch: TensorDictBase, steps: Steps, log_ratio: Tensor) -> Returns:
        """GRPO (Shao et al. 2024), or leave-one-out (RLOO, Ahmadian et al. 2024).

        A frame's advantage is the return of its episode less the mean of its group, or less the
        mean of the group's others; with `scale`, over the group's standard deviation. It is zero in
        episodes that lie in the batch only in part, and in groups of one.
        """
        ids = batch["collector", "traj_ids"]
        trajectory = torch.unique(ids, return_inverse=True)[1].flatten()
        count = int(trajectory.max()) + 1
        starts, ends = batch["is_init"] & steps.mask, batch["next", "done"] & steps.mask

        def total(value: Tensor, places: Tensor, size: int) -> Tensor:
            return value.new_zeros(size).index_add(0, places, value)

        begun, ended = (total(x.flatten().float(), trajectory, count) for x in (starts, ends))
        is_whole = (begun > 0) & (ended > 0)
        if not is_whole.any():
            raise ValueError(
                f"algo=grpo learns from whole episodes, and none of the {count} in this batch is: "
                "collector.frames_per_batch should hold the longest for each environment"
            )
        worth = total((steps.reward * steps.mask).flatten(), trajectory, count)
        first = torch.zeros(count, dtype=torch.long, device=ids.device)
        first[trajectory[starts.flatten()]] = starts.flatten().nonzero().squeeze(1)
        prompts = batch["observation"].flatten(0, 1).flatten(1)[first]
        group = torch.unique(prompts, dim=0, return_inverse=True)[1]
        members = total(is_whole.float(), group, count)[group]
        if not (is_whole & (members > 1)).any():
            raise ValueError(
                "algo=grpo compares whole episodes that begin alike, and none of the "
                f"{int(is_whole.sum())} in this batch begins as another one does: nothing can be "
                "learned from it"
            )
        mean = total(worth * is_whole, group, count)[group] / members.clamp(min=1)
        apart = worth - mean
        square = total(apart.square() * is_whole, group, count)[group]
        if self.config.baseline == "leave_one_out":
            apart = apart * members / (members - 1).clamp(min=1)
        if self.config.scale:
            apart = apart / ((square / (members - 1).clamp(min=1)).sqrt() + 1e-4)
        advantage = torch.where(is_whole & (members > 1), apart, 0)[trajectory]
        return Returns(advantage.view_as(steps.reward), steps.value)
