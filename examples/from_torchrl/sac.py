"""TorchRL's SAC on Pendulum, while a Lockstep worker collects on its own.

PYTHONPATH=. .venv-peers/bin/python examples/from_torchrl/sac.py [frames]
"""

import sys

import torch
from adapters import as_gymnasium, as_torchrl
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import (
    MLP,
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import SACLoss, SoftUpdate

from collectors import MultiAsyncCollector

RANDOM_FRAMES, FRAMES_PER_BATCH, SAMPLE = 1000, 50, 128


def make_env():
    return as_gymnasium(TransformedEnv(GymEnv("Pendulum-v1"), RewardSum()))


def make_actor():
    net = torch.nn.Sequential(
        MLP(in_features=3, out_features=2, num_cells=[128, 128]), NormalParamExtractor()
    )
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
    )


def main(total_frames=6_000):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    actor = make_actor()
    value = ValueOperator(
        MLP(in_features=4, out_features=1, num_cells=[128, 128]),
        in_keys=["observation", "action"],
    )
    loss = SACLoss(actor, value, action_spec=GymEnv("Pendulum-v1").action_spec)
    loss.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss, tau=0.005)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(total_frames), batch_size=SAMPLE)

    with MultiAsyncCollector(
        make_env,
        actor,
        num_workers=1,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=total_frames,
        init_random_frames=RANDOM_FRAMES,
        postproc=as_torchrl,
        seed=0,
    ) as collector:
        frames, returns = 0, []
        for batch in collector:
            frames += batch.numel()
            lag = collector.policy_version - batch["policy_version"].max().item()
            returns += batch["next", "episode_reward"][batch["next", "done"]].tolist()
            buffer.extend(batch.reshape(-1))
            if frames > RANDOM_FRAMES:
                for _ in range(FRAMES_PER_BATCH):
                    losses = loss(buffer.sample())
                    optimizer.zero_grad()
                    (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
                    optimizer.step()
                    target.step()
                collector.update_policy_weights_()
            if frames > RANDOM_FRAMES and frames % 1000 == 0:
                mean = sum(returns[-5:]) / len(returns[-5:])
                print(f"{frames:6d} frames, mean return {mean:7.1f}, lag {lag}", flush=True)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("stopped")
