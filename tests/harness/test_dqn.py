from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch.nn.functional import huber_loss

import run
from collectors import ReplayBuffer
from collectors.data.prioritised_replay import PrioritisedReplayBuffer
from harness.algorithms.dqn import DQN, DQNConfig
from harness.algorithms.interface import Learner, Setup
from harness.files import read_json
from harness.models.encoders import CNNConfig, LSTMConfig, MLPConfig
from harness.options import ConfigError
from harness.options.base import build
from harness.run.build import make_learner
from tests.harness.config.composed import config_of
from tests.harness.test_run import records

OBSERVATIONS = Box(-1, 1, (3,), np.float32)
ACTIONS = Discrete(4)
MODEL = MLPConfig(hidden_sizes=[16, 16], activation="relu")
ALL = {"n_steps": 3, "prioritised": True, "duelling": True, "epsilon_per_worker": True}


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def learner(seed: int = 0, num_workers: int = 1, total_frames: int = 0, **config: Any) -> DQN:
    setup = Setup(OBSERVATIONS, ACTIONS, MODEL, total_frames, seed=seed, num_workers=num_workers)
    return DQN(DQNConfig(**config), setup)


def samples(num: int = 32, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    observation, following = torch.randn(2, num, 3, generator=generator)
    terminated, truncated = torch.rand(2, num, generator=generator) < 0.3
    return TensorDict(
        {
            "observation": observation,
            "action": torch.randint(4, (num,), generator=generator),
            "policy_version": torch.arange(num),
            "next": {
                "observation": following,
                "reward": torch.randn(num, generator=generator),
                "terminated": terminated,
                "truncated": truncated,
                "done": terminated | truncated,
            },
            "collector": {
                "mask": torch.ones(num, dtype=torch.bool),
                "env": torch.arange(num) // 8,
                "traj_ids": torch.arange(num) // 4,
            },
        },
        batch_size=[num],
    )


def weights_of(dqn: DQN) -> list[torch.Tensor]:
    state = dqn.state_dict()
    return [*state["policy"].values(), *state["target_network"].values()]


def same(first: DQN, second: DQN) -> bool:
    pairs = zip(weights_of(first), weights_of(second), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def part_company(dqn: DQN) -> DQN:
    """Make the target network differ from the network."""
    with torch.no_grad():
        for parameter in dqn.target_network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return dqn


# -- targets


@pytest.mark.parametrize("double", [True, False])
def test_the_first_loss_of_a_worked_example(double):
    dqn = part_company(learner(double=double, gamma=0.9))
    batch = samples(8)
    with torch.no_grad():
        following, losses = batch["next", "observation"], []
        ours, theirs = dqn.network(following), dqn.target_network(following)
        for i in range(8):
            best = (ours if double else theirs)[i].argmax()
            ended = bool(batch["next", "terminated"][i])
            target = batch["next", "reward"][i] + (0 if ended else 0.9 * theirs[i, best])
            value = dqn.network(batch["observation"])[i, batch["action"][i]]
            error = float((value - target).abs())
            losses.append(error**2 / 2 if error < 1 else error - 0.5)
        assert not torch.equal(ours.argmax(1), theirs.argmax(1))
    assert dqn.update(batch)["train/loss"] == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize(("end", "matters"), [("terminated", True), ("truncated", False)])
def test_what_follows_counts_after_truncation_and_not_after_termination(end, matters):
    first, second = learner(), learner()
    batch = samples()
    batch["next", "terminated"].zero_()
    batch["next", "truncated"].zero_()
    ended = batch.clone()
    ended["next", end].fill_(True)
    first.update(batch)
    second.update(ended)
    assert same(first, second) is not matters


def test_what_is_seen_after_a_termination_does_not_matter():
    first, second = learner(), learner()
    batch = samples()
    changed = batch.clone()
    changed["next", "observation"][batch["next", "terminated"]] = math.inf
    first.update(batch)
    second.update(changed)
    assert same(first, second)


def test_returns_of_several_steps_bootstrap_where_they_end():
    dqn = part_company(learner(n_steps=2, gamma=0.5, double=False))
    assert dqn.replay is not None
    batch = samples(4)
    batch["collector", "env"].zero_()
    batch["collector", "traj_ids"].zero_()
    batch["next", "observation"][:3] = batch["observation"][1:]
    for end in ("terminated", "truncated", "done"):
        batch["next", end].zero_()
    batch["next", "terminated"][3] = batch["next", "done"][3] = True
    dqn.replay.extend(batch)
    drawn = dqn.replay.sample(places=torch.arange(4))
    reward = batch["next", "reward"]
    with torch.no_grad():
        best = dqn.target_network(batch["next", "observation"]).amax(1)
        targets = torch.stack(
            [
                reward[0] + reward[1] / 2 + best[1] / 4,
                reward[1] + reward[2] / 2 + best[2] / 4,
                reward[2] + reward[3] / 2,
                reward[3],
            ]
        )
        values = dqn.network(batch["observation"]).gather(1, batch["action"][:, None])[:, 0]
        expected = float(huber_loss(values, targets))
    assert dqn.update(drawn)["train/loss"] == pytest.approx(expected, rel=1e-5)


def test_actions_may_be_counted_from_anywhere():
    first = learner()
    second = DQN(DQNConfig(), Setup(OBSERVATIONS, Discrete(4, start=-2), MODEL))
    batch = samples()
    shifted = batch.clone()
    shifted["action"] -= 2
    first.update(batch)
    second.update(shifted)
    assert same(first, second)
    with set_interaction_type(InteractionType.DETERMINISTIC):
        chosen = first.policy(batch["observation"])
        assert torch.equal(second.policy(batch["observation"]), chosen - 2)


def test_duelling_values_are_the_state_s_and_advantages_without_their_mean():
    network = learner(duelling=True).network
    observation = torch.randn(5, 3)
    features = network.encoder(observation)
    advantages = network.advantages(features)
    found = network(observation)
    assert network.value is not None
    torch.testing.assert_close(found.mean(1, True), network.value(features))
    torch.testing.assert_close(found - found.mean(1, True), advantages - advantages.mean(1, True))


@pytest.mark.parametrize(("interval", "tau"), [(3, 1.0), (1, 0.1), (2, 0.5)])
def test_the_target_network_follows_at_its_interval_and_as_far_as_it_is_told(interval, tau):
    dqn = learner(target_interval=interval, target_tau=tau)
    for number in range(1, 5):
        before = [p.clone() for p in dqn.target_network.parameters()]
        dqn.update(samples(seed=number))
        parts = zip(before, dqn.network.parameters(), dqn.target_network.parameters(), strict=True)
        for old, own, target in parts:
            moved = 0 if number % interval else tau
            torch.testing.assert_close(target, old + moved * (own.detach() - old))


# -- exploration


def frequencies(dqn: DQN, worker: int, count: int = 20_000) -> float:
    """How often a worker takes another action than the best."""
    policy = copy.deepcopy(dqn.policy)
    policy.worker_idx = worker
    observation = torch.randn(1, 3).expand(count, 3)
    with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
        explored = policy(observation)
    with torch.no_grad(), set_interaction_type(InteractionType.DETERMINISTIC):
        best = policy(observation)
    assert (best == best[0]).all()
    assert ACTIONS.contains(int(explored.max()))
    return float((explored != best).float().mean())


def test_each_worker_has_the_epsilon_of_ape_x():
    dqn = learner(num_workers=4, epsilon_per_worker=True, epsilon_base=0.4, epsilon_power=7.0)
    expected = [0.4 ** (1 + 7 * i / 3) for i in range(4)]
    assert dqn.policy.epsilon.tolist() == pytest.approx(expected)
    for worker in range(4):
        rate = frequencies(dqn, worker)
        assert rate == pytest.approx(0.75 * expected[worker], abs=0.012)
    dqn.updates_due(10_000)
    assert dqn.policy.epsilon.tolist() == pytest.approx(expected)
    assert learner(epsilon_per_worker=True).policy.epsilon.tolist() == pytest.approx([0.4])
    two = learner(num_workers=2, epsilon_per_worker=True, epsilon_base=0.4, epsilon_power=7.0)
    assert two.policy.epsilon.tolist() == pytest.approx([0.4, 0.4**8])


def test_one_epsilon_falls_with_the_frames_and_travels_with_the_weights():
    dqn = learner(num_workers=4, epsilon_start=0.9, epsilon_end=0.1, epsilon_frames=100)
    found = []
    for frames in (0, 25, 25, 50, 50):
        dqn.updates_due(frames)
        found.append(float(dqn.policy.epsilon))
    assert found == pytest.approx([0.9, 0.7, 0.5, 0.1, 0.1])
    assert frequencies(dqn, worker=3) == pytest.approx(0.75 * 0.1, abs=0.012)
    assert "epsilon" in dqn.policy.state_dict()
    assert dqn.update(samples())["train/epsilon"] == pytest.approx(0.1)


# -- updates


def test_updates_keep_to_their_rate_of_frames():
    dqn = learner(updates_per_frame=0.5)
    assert [dqn.updates_due(3) for _ in range(3)] == [1, 2, 1]


def test_an_annealed_learning_rate_falls_to_zero_at_the_last_frame():
    options = {"learning_starts": 100, "learning_rate": 0.1}
    dqn = learner(total_frames=1100, anneal_learning_rate=True, **options)
    dqn.updates_due(250)
    dqn.update(samples())
    assert dqn.optimiser.learning_rate == pytest.approx(0.075)
    dqn.updates_due(750)
    before = copy.deepcopy(dqn)
    dqn.update(samples())
    assert same(before, dqn)


def test_importance_weights_make_up_for_the_shares_more_and_more():
    options = {"prioritised": True, "weight_exponent": 0.5, "learning_starts": 100}
    dqn = learner(total_frames=1100, **options)
    share = torch.tensor([4.0, 1.0, 0.25])
    torch.testing.assert_close(dqn._weights(share), torch.tensor([0.25, 0.5, 1.0]))
    dqn.updates_due(500)
    torch.testing.assert_close(dqn._weights(share), share**-0.75 / 0.25**-0.75)
    dqn.updates_due(900)
    torch.testing.assert_close(dqn._weights(share), torch.tensor([0.0625, 0.25, 1.0]))


def test_an_update_gives_frames_the_priority_of_their_errors():
    dqn = learner(prioritised=True, priority_exponent=1.0)
    assert dqn.replay is not None
    dqn.replay.extend(samples(8))
    drawn = dqn.replay.sample(places=torch.arange(8))
    with torch.no_grad():
        values = dqn.network(drawn["observation"]).gather(1, drawn["action"][:, None])[:, 0]
        errors = (values - dqn._target(dqn.part(drawn))).abs()
    dqn.update(drawn)
    shares = dqn.replay.sample(places=torch.arange(8))["replay", "share"]
    torch.testing.assert_close(shares, errors * 8 / errors.sum(), rtol=1e-4, atol=1e-5)


def test_a_buffer_of_its_own_is_made_only_where_it_is_asked_for():
    given = ["algo=dqn", "collector=single", "sync=none"]
    asked = {"algo.n_steps=2": True, "algo.prioritised=true": True, "algo.n_steps=1": False}
    for option, own in asked.items():
        made = make_learner(config_of(*given, option))
        assert made.replay is not None
        assert isinstance(made.replay, PrioritisedReplayBuffer) is own
        assert made.replay.capacity == 100_000


@pytest.mark.parametrize("config", [{}, ALL])
def test_the_same_seed_gives_the_same_bits_and_a_restored_learner_goes_on(config):
    def off_policy(seed: int = 0) -> Learner:
        dqn = learner(seed, 3, 1000, learning_starts=0, buffer_size=100, **config)
        plain = ReplayBuffer(100, seed=seed)
        return Learner(dqn, plain if dqn.replay is None else dqn.replay)

    def learn(one: Learner, *seeds: int) -> list[dict[str, float]]:
        return [one.learn(samples(seed=seed).unsqueeze(0), 0) for seed in seeds]

    def networks(*given: Learner) -> list[DQN]:
        found = [one.algorithm for one in given]
        assert all(isinstance(one, DQN) for one in found)
        return found  # type: ignore[return-value]

    first, second, other, restored = off_policy(), off_policy(), off_policy(1), off_policy(2)
    state = torch.get_rng_state()
    assert learn(first, 0, 1, 2, 3) == learn(second, 0, 1, 2, 3)
    learn(other, 0, 1, 2, 3)
    assert same(*networks(first, second))
    assert not same(*networks(first, other))
    assert torch.equal(torch.get_rng_state(), state)
    restored.load_state_dict(first.state_dict())
    assert learn(first, 4, 5) == learn(restored, 4, 5)
    assert torch.equal(first.versions(samples()), restored.versions(samples()))
    assert same(*networks(first, restored))


def test_it_learns_which_action_is_rewarded():
    dqn = learner(learning_rate=1e-2, gamma=0.0, target_interval=1)
    for number in range(200):
        batch = samples(seed=number)
        batch["next", "reward"] = (batch["action"] == 2).float()
        dqn.update(batch)
    with torch.no_grad(), set_interaction_type(InteractionType.DETERMINISTIC):
        assert (dqn.policy(torch.randn(50, 3)) == 2).all()


@pytest.mark.parametrize("duelling", [True, False])
def test_it_learns_from_images_of_bytes(duelling):
    space = Box(0, 255, (36, 36, 2), np.uint8)
    config = DQNConfig(duelling=duelling)
    dqn = DQN(config, Setup(space, ACTIONS, CNNConfig(hidden_sizes=[8])))
    before, batch = copy.deepcopy(dqn), samples(4)
    images = torch.randint(0, 256, (2, 4, 36, 36, 2), dtype=torch.uint8)
    batch["observation"], batch["next", "observation"] = images
    assert dqn.policy(batch["observation"]).shape == (4,)
    dqn.update(batch)
    assert not same(before, dqn)


# -- what is refused


@pytest.mark.parametrize("space", [Box(-1, 1, (2,)), MultiDiscrete([2, 2])])
def test_a_space_of_other_actions_is_refused(space):
    with pytest.raises(ValueError, match="algo=dqn needs a Discrete action space, but this is"):
        DQN(DQNConfig(), Setup(OBSERVATIONS, space, MODEL))


def test_a_model_with_memory_is_refused():
    with pytest.raises(
        ValueError, match="algo=dqn replays single frames, but model=lstm has memory"
    ):
        DQN(DQNConfig(), Setup(OBSERVATIONS, ACTIONS, LSTMConfig()))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"target_tau": 0.0}, r"algo.target_tau=0.0: expected a number .more than 0, 1 or less"),
        ({"n_steps": 0}, "algo.n_steps=0: "),
        ({"epsilon_end": 1.5}, "algo.epsilon_end=1.5: "),
        ({"priority_exponent": -0.1}, "algo.priority_exponent=-0.1: "),
        ({"epsilon_frames": 0}, "algo.epsilon_frames=0: "),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(change, complaint):
    with pytest.raises(ConfigError, match=complaint):
        build(DQNConfig, change, "algo")


def test_a_replay_buffer_smaller_than_a_batch_is_refused():
    with pytest.raises(ConfigError, match=r"algo.buffer_size=10: expected 32 or more"):
        config_of("algo=dqn", "algo.buffer_size=10")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["model=lstm"], "algo=dqn model=lstm: DQN replays single frames; use model=mlp or"),
        (["collector.next_observation=final"], "DQN replays frames one by one"),
        (["sync.max_lag=2"], "sync.max_lag=2 algo=dqn: DQN replays old frames on purpose"),
        (
            [
                *("collector=simulated", "algo.epsilon_per_worker=true", "device=cpu"),
                *("collector.devices.policy=cuda", "collector.cudagraph_policy=true"),
            ],
            "all simulated workers share one graph",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(given, complaint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=complaint):
        config_of("algo=dqn", *given)


# -- whole runs

SMALL = (
    *("algo=dqn", "total_frames=480", "collector.frames_per_batch=48", "env.num_envs=2"),
    *("algo.learning_starts=96", "algo.batch_size=16", "algo.buffer_size=300"),
    *("algo.epsilon_frames=200", "model.hidden_sizes=[16]"),
    *("evaluation.num_episodes=1", "logger=jsonl"),
)
EVERYTHING = tuple(f"algo.{name}={str(value).lower()}" for name, value in ALL.items())
PLACES = {
    "single": ("collector=single", "sync=none"),
    "free running": ("collector=multi_async", "collector.free_running=true"),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("options", [(), EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("place", PLACES)
def test_a_short_run(place, options):
    assert run.main([*SMALL, *PLACES[place], *options, "hydra.run.dir=run"]) == 0
    summary = read_json(Path("run/summary.json"))
    assert summary["frames"] == 480
    learned = [record for record in records(Path("run")) if "train/loss" in record]
    assert learned
    assert all(math.isfinite(record["train/loss"]) for record in learned)
    epsilon = learned[-1]["train/epsilon"]
    assert 0 < epsilon < 0.41 if options else epsilon == pytest.approx(0.05)
    assert summary["policy/lag_updates_mean"] > 0
