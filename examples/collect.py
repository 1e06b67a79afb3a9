"""Two workers collect CartPole on their own, and every frame knows its weights.

python examples/collect.py
"""

import gymnasium as gym
import torch
from torch import nn

from collectors import MultiAsyncCollector
from sync import SharedMemWeightSyncScheme


class Policy(nn.Module):
    in_keys = ("observation",)
    out_keys = ("action", "action_log_prob")

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation):
        choice = torch.distributions.Categorical(logits=self.net(observation))
        action = choice.sample()
        return action, choice.log_prob(action)


def make_env():
    return gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")


def main():
    policy = Policy()
    with MultiAsyncCollector(
        make_env,
        policy,
        num_workers=2,
        frames_per_batch=400,
        total_frames=4000,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme(sync=False)},
    ) as collector:
        for batch in collector:
            with torch.no_grad():  # where a learner would learn
                policy.net[0].bias.add_(0.01)
            collector.update_policy_weights_()
            lag = collector.policy_version - batch["policy_version"]
            returns = batch["next", "reward"].sum(1)
            print(f"{tuple(batch.shape)} lag {int(lag.min())}..{int(lag.max())}, rewards {returns}")
        counts = collector.stats()
        print({k: counts[k] for k in ("collected", "delivered", "dropped", "in_flight")})


if __name__ == "__main__":
    main()
