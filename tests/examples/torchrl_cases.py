"""What the adapters for TorchRL promise, run by an interpreter that has TorchRL.

`test_torchrl_adapters.py` runs this file, which prints the traceback of each case as JSON.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
)
from torchrl.envs import (
    EnvBase,
    GymEnv,
    GymWrapper,
    InitTracker,
    PendulumEnv,
    SerialEnv,
    TransformedEnv,
)
from torchrl.modules import (
    GRUModule,
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
    set_recurrent_mode,
)
from torchrl.modules.distributions import OneHotCategorical
from torchrl.objectives import ClipPPOLoss, SACLoss
from torchrl.objectives.value import GAE

from collectors import Collector
from examples.from_torchrl.adapters import as_gymnasium, as_torchrl

ENDS = ("terminated", "truncated", "done")


class Countdown(EnvBase):
    """Episodes end at `terminates` steps; or are truncated at `truncates`. It counts all steps."""

    def __init__(self, terminates: int = 3, truncates: int = 100, batch_size: tuple = ()):
        super().__init__(batch_size=batch_size)
        self.terminates, self.truncates = terminates, truncates
        self.observation_spec = Composite(
            observation=Unbounded((*batch_size, 2)),
            pixels=Bounded(0, 255, (*batch_size, 3), dtype=torch.uint8),
            inner=Composite(flag=Binary(1, (*batch_size, 1), dtype=torch.bool), shape=batch_size),
            shape=batch_size,
        )
        self.action_spec = Unbounded((*batch_size, 1))
        self.reward_spec = Unbounded((*batch_size, 1))
        flag = Categorical(2, shape=(*batch_size, 1), dtype=torch.bool)
        self.full_done_spec = Composite({name: flag.clone() for name in ENDS}, shape=batch_size)
        self.count = torch.zeros(*batch_size, 1)
        self.episode = torch.full((*batch_size, 1), -1.0)

    def _observed(self) -> dict[str, torch.Tensor]:
        return {
            "observation": torch.cat([self.episode, self.count], -1),
            "pixels": self.count.expand(*self.batch_size, 3).to(torch.uint8),
            "inner": TensorDict({"flag": self.count > 1}, self.batch_size),
        }

    def _reset(self, tensordict: TensorDict | None, **kwargs) -> TensorDict:
        which = torch.ones_like(self.count, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict.keys():  # noqa: SIM118
            which = tensordict["_reset"].view_as(which)
        self.count = torch.where(which, 0.0, self.count)
        self.episode = self.episode + which
        return TensorDict(self._observed(), self.batch_size)

    def _step(self, tensordict: TensorDict) -> TensorDict:
        self.count = self.count + 1
        terminated, truncated = self.count >= self.terminates, self.count >= self.truncates
        ends = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        reward = 10 * self.count + tensordict["action"]
        return TensorDict({**self._observed(), "reward": reward, **ends}, self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        pass


def policy() -> TensorDictModule:
    """Its action tells what it observed."""
    return TensorDictModule(Last(), ["observation"], ["action"])


class Last(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation[..., -1:] / 8


def ours(make: Callable[[], EnvBase], acting, frames: int, **options) -> TensorDict:
    """The first batch of a Lockstep collector, in TorchRL's layout."""
    adapted = options.pop("postproc", as_torchrl)
    with Collector(
        lambda: as_gymnasium(make()),
        acting,
        frames_per_batch=frames,
        total_frames=frames,
        postproc=adapted,
        **options,
    ) as collector:
        return next(iter(collector))


def check_same_as_torchrl(make: Callable[[], EnvBase], frames: int) -> None:
    """Every entry that both have is the same, in shape, type and value."""
    collector = TorchRLCollector(make, policy(), frames_per_batch=frames, total_frames=frames)
    theirs = next(iter(collector)).clone()
    collector.shutdown()
    found = ours(make, policy(), frames)
    if theirs.ndim == 1:
        theirs = theirs.unsqueeze(0)
    keys = set(theirs.keys(True, True)) - {("collector", "traj_ids")}
    assert keys <= set(found.keys(True, True)), keys - set(found.keys(True, True))
    assert found.batch_size == theirs.batch_size
    assert found.names[-1] == "time"
    for key in keys:
        assert found[key].dtype == theirs[key].dtype, key
        assert found[key].shape == theirs[key].shape, (key, found[key].shape)
        assert torch.equal(found[key], theirs[key]), key


def case_one_environment_gives_the_frames_of_torchrls_collector():
    check_same_as_torchrl(Countdown, 10)


def case_truncation_is_that_of_torchrls_collector():
    check_same_as_torchrl(lambda: Countdown(terminates=100, truncates=4), 10)


def case_a_serial_env_gives_the_frames_of_torchrls_collector():
    check_same_as_torchrl(
        lambda: SerialEnv(2, [Countdown, lambda: Countdown(terminates=100, truncates=4)]), 20
    )


def case_a_batched_environment_gives_the_frames_of_torchrls_collector():
    check_same_as_torchrl(lambda: Countdown(batch_size=(3,)), 30)


def case_the_next_observation_at_an_end_is_the_true_one():
    batch = ours(lambda: SerialEnv(2, Countdown), policy(), 10)
    assert batch["observation"][0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]
    assert batch["next", "observation"][0].tolist() == [[0, 1], [0, 2], [0, 3], [1, 1], [1, 2]]
    assert batch["next", "terminated"][0, :, 0].tolist() == [False, False, True, False, False]
    assert not batch["next", "truncated"].any()
    assert batch["is_init"][0, :, 0].tolist() == [True, False, False, True, False]
    assert batch["next", "reward"][0, :3, 0].tolist() == [10, 20.125, 30.25]


def case_the_longest_trajectory_of_a_collector_truncates_one_member_only():
    make = lambda: SerialEnv(2, [Countdown, lambda: Countdown(terminates=100)])  # noqa: E731
    batch = ours(make, policy(), 12, max_frames_per_traj=4)
    assert batch["next", "terminated"][..., 0].int().tolist() == [[0, 0, 1, 0, 0, 1], [0] * 6]
    assert batch["next", "truncated"][..., 0].int().tolist() == [[0] * 6, [0, 0, 0, 1, 0, 0]]
    assert batch["observation"][1, :, 0].tolist() == [0, 0, 0, 0, 1, 1]
    assert batch["observation"][0, :, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["next", "observation"][1, 3].tolist() == [0, 4]


def case_next_observations_at_ends_only_become_full():
    options = {"frames": 16, "max_frames_per_traj": 5}
    whole = ours(lambda: SerialEnv(2, Countdown), policy(), **options)
    final = ours(lambda: SerialEnv(2, Countdown), policy(), next_observation="final", **options)
    assert set(final.keys(True, True)) == set(whole.keys(True, True))
    assert all(torch.equal(final[key], whole[key]) for key in whole.keys(True, True))


def case_a_row_ends_as_truncated_before_its_padding():
    make = lambda: SerialEnv(2, [Countdown, lambda: Countdown(terminates=100)])  # noqa: E731
    kept = []
    postproc = lambda batch: kept.append(batch) or as_torchrl(batch)  # noqa: E731
    batch = ours(make, policy(), 12, split_trajs=True, max_frames_per_traj=4, postproc=postproc)
    mask, done = batch["collector", "mask"], batch["next", "done"][..., 0]
    lengths = mask.sum(1).tolist()
    assert sorted(lengths) == [2, 3, 3, 4]
    for row, length in enumerate(lengths):
        assert bool(done[row, length - 1])
    cut = lengths.index(2)
    assert batch["next", "truncated"][cut, 1]
    assert not batch["next", "terminated"][cut].any()
    (before,) = kept  # the collector's own batch stays as it is
    assert not before["next", "done"][cut].any()
    critic = TensorDictModule(nn.Linear(2, 1), ["observation"], ["state_value"])
    estimate = GAE(gamma=0.9, lmbda=0.8, value_network=critic)
    padded, alone = estimate(batch.clone()), estimate(batch[cut : cut + 1, :2].clone())
    assert torch.allclose(padded["advantage"][cut, :2], alone["advantage"][0])


def case_sampled_frames_can_be_converted():
    batch = ours(lambda: SerialEnv(2, Countdown), policy(), 10, postproc=None)
    frames = as_torchrl(batch.reshape(-1)[[1, 3, 5]])
    assert frames["next", "reward"].shape == (3, 1)
    assert batch["next", "reward"].shape == (2, 5)


def case_random_one_hot_actions_are_one_hot():
    batch = ours(
        lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")), one_hot(), 40, init_random_frames=40
    )
    action = batch["action"]
    assert action.shape == (2, 20, 2)
    assert action.dtype == torch.int64
    assert (action.sum(-1) == 1).all()
    assert set(action[..., 0].unique().tolist()) == {0, 1}
    assert (batch["policy_version"] == -1).all()


def one_hot() -> ProbabilisticActor:
    scores = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
    return ProbabilisticActor(
        scores, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True
    )


def case_every_kind_of_action_is_drawn_as_its_spec_says():
    specs = {
        "one-hot": OneHot(3),
        "several one-hot": MultiOneHot([2, 3]),
        "categorical": Categorical(4),
        "several categorical": Categorical(4, shape=(2,)),
        "categorical of several sizes": MultiCategorical([2, 3]),
        "binary": Binary(3),
        "bounded": Bounded(-2, 2, (2,)),
        "unbounded": Unbounded((2,)),
    }
    for vector in (False, True):
        for name, spec in specs.items():
            env = Countdown(batch_size=(2,) if vector else ())
            env.action_spec = spec.expand(2, *spec.shape) if vector else spec
            space = as_gymnasium(env).action_space
            for _ in range(20):
                action = torch.as_tensor(space.sample()).to(env.action_spec.dtype)
                assert env.action_spec.is_in(action), (name, vector, action)


def case_gymnasiums_vectors_within_torchrl_are_taken():
    def make():
        members = [lambda: gym.make("CartPole-v1")] * 2
        return GymWrapper(SyncVectorEnv(members, autoreset_mode=AutoresetMode.DISABLED))

    batch = ours(make, one_hot(), 100)
    assert batch.shape == (2, 50)
    ends = batch["next", "done"][..., 0]
    assert ends.any()
    rows, steps = ends[:, :-1].nonzero(as_tuple=True)
    assert batch["is_init"][rows, steps + 1].all()
    final = batch["next", "observation"][rows, steps]
    assert ((final[:, 0].abs() > 2.4) | (final[:, 2].abs() > 0.209)).all()


def case_an_environment_without_state_of_its_own_is_taken():
    acting = TensorDictModule(lambda th: torch.zeros_like(th).unsqueeze(-1), ["th"], ["action"])
    batch = ours(PendulumEnv, acting, 10)
    assert torch.equal(batch["next", "th"][:, :-1], batch["th"][:, 1:])
    assert (batch["th"][:, 1:] != batch["th"][:, :-1]).all()


def case_the_same_seed_gives_the_same_batch():
    make = lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1"))  # noqa: E731
    first, second, other = (ours(make, one_hot_of(7), 40, seed=s) for s in (1, 1, 2))
    assert torch.equal(first["next", "observation"], second["next", "observation"])
    assert not torch.equal(first["observation"], other["observation"])
    assert not torch.equal(first["observation"][0], first["observation"][1])


def one_hot_of(seed: int) -> ProbabilisticActor:
    torch.manual_seed(seed)
    return one_hot()


def case_a_recurrent_policy_carries_its_state():
    cell = GRUModule(input_size=2, hidden_size=4, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(4, 1), ["features"], ["action"])
    acting = TensorDictSequential(cell, head)
    for members in (1, 2):

        def make(members=members):
            env = TransformedEnv(SerialEnv(members, Countdown), InitTracker())
            return env.append_transform(cell.make_tensordict_primer())

        batch = ours(make, acting, 8 * members)
        state, after = batch["recurrent_state"], batch["next", "recurrent_state"]
        starts = batch["is_init"][..., 0]
        assert starts[0].tolist() == [True, False, False] * 2 + [True, False]
        assert not state[starts].any()
        going_on = ~starts[:, 1:]
        assert torch.equal(state[:, 1:][going_on], after[:, :-1][going_on])
        with set_recurrent_mode(True), torch.no_grad():
            again = acting(batch.exclude("features", "action").clone())
        assert torch.allclose(again["features"], batch["features"], atol=1e-6)


def case_batches_train_clip_ppo():
    actor = one_hot()
    critic = TensorDictModule(nn.Linear(4, 1), ["observation"], ["state_value"])
    batch = ours(lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")), actor, 64)
    GAE(gamma=0.99, lmbda=0.95, value_network=critic)(batch)
    losses = ClipPPOLoss(actor, critic)(batch.reshape(-1))
    assert abs(float(losses["kl_approx"])) < 1e-5  # the same policy: its log-probabilities are
    (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
    assert all(parameter.grad is not None for parameter in critic.parameters())


def case_batches_train_sac():
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
    )

    class Value(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1)

        def forward(self, observation, action):
            return self.net(torch.cat([observation, action], -1))

    value = TensorDictModule(Value(), ["observation", "action"], ["state_action_value"])
    batch = ours(lambda: GymEnv("Pendulum-v1"), actor, 64)
    losses = SACLoss(actor, value, action_spec=GymEnv("Pendulum-v1").action_spec)(batch.reshape(-1))
    (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()


def raised(make: Callable[[], object]) -> str:
    try:
        make()
    except (TypeError, ValueError) as error:
        return str(error)
    raise AssertionError("nothing was raised")


def case_what_cannot_be_taken_is_named():
    assert "an EnvBase of TorchRL" in raised(lambda: as_gymnasium(gym.make("CartPole-v1")))
    assert "batch size is [2, 3]" in raised(lambda: as_gymnasium(Countdown(batch_size=(2, 3))))
    agents = Countdown()
    agents.full_action_spec = Composite(a=Unbounded((1,)), b=Unbounded((1,)))
    assert "2 actions" in raised(lambda: as_gymnasium(agents))
    team = Countdown()
    team.reward_spec = Unbounded((3,))
    assert "reward is [3]" in raised(lambda: as_gymnasium(team))
    text = Countdown()
    text.observation_spec = Composite(text=NonTensor(()))
    assert "'text'" in raised(lambda: as_gymnasium(text))


def case_a_resumed_collector_replays_an_episode_that_has_a_seed_or_starts_a_new_one():
    for frames, exact in ((2, True), (5, False)):
        options = {"frames_per_batch": frames, "total_frames": 2 * frames, "seed": 3}
        make = lambda: as_gymnasium(Countdown())  # noqa: E731
        with Collector(make, policy(), **options) as collector:
            collector.next()
            state = collector.state_dict()
        with Collector(make, policy(), **options) as collector:
            assert collector.load_state_dict(state) is exact
            assert collector.next()["observation"][0, 0, 1].item() == (2 if exact else 0)


def case_closing_twice_closes_once():
    env = GymEnv("CartPole-v1")
    adapted = as_gymnasium(env)
    adapted.reset()
    adapted.close()
    adapted.close()
    assert env.is_closed


def main() -> None:
    np.seterr(all="raise")
    torch.set_num_threads(1)
    found = {}
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            try:
                case()
            except Exception:  # noqa: BLE001 - the test shows it
                found[name] = traceback.format_exc()
            else:
                found[name] = ""
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
