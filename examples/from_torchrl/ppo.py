"""TorchRL's PPO on CartPole, with the batches of a Lockstep collector.

PYTHONPATH=. .venv-peers/bin/python examples/from_torchrl/ppo.py [frames]
"""

import sys

import torch
from adapters import as_gymnasium, as_torchrl
from tensordict.nn import TensorDictModule
from torchrl.envs import GymEnv, RewardSum, SerialEnv, TransformedEnv
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from collectors import MultiSyncCollector

WORKERS, ENVS, FRAMES_PER_BATCH = 2, 4, 1024
EPOCHS, MINIBATCH = 10, 128


def make_env():
    return as_gymnasium(TransformedEnv(SerialEnv(ENVS, lambda: GymEnv("CartPole-v1")), RewardSum()))


def make_actor():
    net = MLP(in_features=4, out_features=2, num_cells=[64, 64], activation_class=torch.nn.Tanh)
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def main(total_frames=30_720):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    actor = make_actor()
    critic = ValueOperator(
        MLP(in_features=4, out_features=1, num_cells=[64, 64], activation_class=torch.nn.Tanh),
        in_keys=["observation"],
    )
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)

    with MultiSyncCollector(
        make_env,
        actor,
        num_workers=WORKERS,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=total_frames,
        postproc=as_torchrl,
        seed=0,
    ) as collector:
        frames = 0
        for batch in collector:
            frames += batch.numel()
            returns = batch["next", "episode_reward"][batch["next", "done"]]
            for _ in range(EPOCHS):
                with torch.no_grad():
                    advantage(batch)
                flat = batch.reshape(-1)
                for chosen in torch.randperm(len(flat)).split(MINIBATCH):
                    losses = loss(flat[chosen])
                    total = sum(
                        losses[f"loss_{name}"] for name in ("objective", "critic", "entropy")
                    )
                    optimizer.zero_grad()
                    total.backward()
                    torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                    optimizer.step()
            collector.update_policy_weights_()
            if len(returns):
                print(f"{frames:6d} frames, mean return {returns.mean():6.1f}", flush=True)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("stopped")
