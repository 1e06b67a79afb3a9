"""`algo.compile=true`: the results of eager steps, the same bits again, and one graph for sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from harness.algorithms.compiled import compile_steps
from harness.algorithms.dqn import DQN, DQNConfig
from harness.algorithms.impala import IMPALA, IMPALAConfig
from harness.algorithms.interface import Setup
from harness.algorithms.ppo import PPO, PPOConfig
from harness.algorithms.sac import SAC, SACConfig
from harness.models.encoders import MLPConfig
from harness.registry import objectives
from tests.harness.actor_critics import options
from tests.harness.rollouts import noise
from tests.harness.test_every_algorithm import ALGORITHMS, check_repeats, check_replayed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VECTOR = Box(-1, 1, (3,), np.float32)
ACTIONS = {"discrete": Discrete(3), "box": Box(-1, 1, (2,), np.float32)}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def check(actions: str, **config: Any) -> None:
    """Learn from batches of several sizes, eager and compiled; only the first two may compile."""
    space = ACTIONS[actions]
    setup = Setup(VECTOR, space, MLPConfig(hidden_sizes=[8]), total_frames=10_000)
    config = {"minibatch_size": 16, "epochs": 2, "target_kl": 1.0, **config}
    eager, compiled = (PPO(options(**config), setup) for _ in range(2))
    compile_steps(compiled, "mlp")
    collector = noise(VECTOR, space)
    for number, steps in enumerate((21, 35, 21, 50, 43)):
        batch = collector.collect(eager.policy, steps)
        batch["action_log_prob"] += 0.1 * torch.randn_like(batch["action_log_prob"])
        compiled.load_state_dict(eager.state_dict())
        with torch.compiler.set_stance("default" if number < 2 else "fail_on_recompile"):
            metrics = [ppo.update(batch, 0) for ppo in (eager, compiled)]
        assert metrics[1] == pytest.approx(metrics[0], rel=1e-3, abs=1e-4)
        for name in ("policy", "critic"):
            states = [ppo.state_dict()[name] for ppo in (compiled, eager)]
            torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("objective", objectives.names())
def test_a_compiled_step_gives_the_same_results(objective):
    check("discrete", objective=objective)


def test_a_compiled_step_of_numbers_as_actions_gives_the_same_results():
    check("box", normalise_observations=True, vtrace=True)


def check_replay_algorithm(algorithm: type, options: Any, space: Any) -> None:
    """Learn from samples, eager and compiled; only the first two may compile."""
    setup = Setup(VECTOR, space, MLPConfig(hidden_sizes=[8]), total_frames=10_000)
    eager, compiled = (algorithm(options, setup) for _ in range(2))
    compile_steps(compiled, "mlp")
    batch = noise(VECTOR, space).collect(PPO(PPOConfig(), setup).policy, 80)
    for number, part in enumerate(batch.flatten()[:128].split(32)):
        compiled.load_state_dict(eager.state_dict())
        with torch.compiler.set_stance("default" if number < 2 else "fail_on_recompile"):
            metrics = [learner.update(part) for learner in (eager, compiled)]
        assert metrics[1] == pytest.approx(metrics[0], rel=1e-3, abs=1e-4)
    states = [
        {k: v for k, v in learner.state_dict().items() if isinstance(v, dict)}
        for learner in (compiled, eager)
    ]
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [DQNConfig(), DQNConfig(double=False, duelling=True)])
def test_compiled_steps_of_dqn_give_the_same_results(options):
    check_replay_algorithm(DQN, options, ACTIONS["discrete"])


@pytest.mark.parametrize("options", [SACConfig(), SACConfig(normalise_observations=True)])
def test_compiled_steps_of_sac_give_the_same_results(options):
    check_replay_algorithm(SAC, options, ACTIONS["box"])


@pytest.mark.parametrize(
    "options",
    [
        IMPALAConfig(rmsprop_momentum=0.5, epochs=2),
        IMPALAConfig(optimiser="adam", max_lag=2, on_stale="mask", clip_rewards=True),
    ],
)
def test_compiled_steps_of_impala_give_the_same_results(options):
    """Also where frames are left out: there is no graph for each number of them."""
    space = ACTIONS["discrete"]
    setup = Setup(VECTOR, space, MLPConfig(hidden_sizes=[8]), total_frames=10_000)
    eager, compiled = (IMPALA(options, setup) for _ in range(2))
    compile_steps(compiled, "mlp")
    collector = noise(VECTOR, space)
    for number in range(4):
        batch = collector.collect(eager.policy, 21)
        batch["policy_version"][:, : 2 * number] = -1
        compiled.load_state_dict(eager.state_dict())
        with torch.compiler.set_stance("default" if number < 2 else "fail_on_recompile"):
            metrics = [learner.update(batch, 0) for learner in (eager, compiled)]
        assert metrics[1] == pytest.approx(metrics[0], rel=1e-3, abs=1e-4)
    states = [learner.state_dict()["policy"] for learner in (compiled, eager)]
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_compiled_run_has_the_same_bits_twice_and_when_it_is_resumed(algorithm):
    check_repeats(algorithm, ("collector=single", "sync=none", "algo.compile=true"))


@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_a_compiled_run_is_replayed_to_the_bit(algorithm, capsys):
    check_replayed(algorithm, ("collector=multi_async", "algo.compile=true"), capsys)
