"""`algo.compile=true`: the same results, and no compilation for each size of minibatch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import run
from harness.algorithms.interface import Setup
from harness.algorithms.ppo import PPO
from harness.options import MLPConfig, PPOConfig
from harness.registry import objectives
from tests.harness.rollouts import noise
from tests.harness.small import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VECTOR = Box(-1, 1, (3,), np.float32)
ACTIONS = {"discrete": Discrete(3), "box": Box(-1, 1, (2,), np.float32)}


def check(actions: str, **config: Any) -> None:
    """Learn from batches of several sizes, eager and compiled; only the first two may compile."""
    space = ACTIONS[actions]
    setup = Setup(VECTOR, space, MLPConfig(hidden_sizes=[8]), total_frames=10_000)
    config = {"minibatch_size": 16, "epochs": 2, "target_kl": 1.0, **config}
    eager, compiled = (PPO(PPOConfig(**config, compile=c), setup) for c in (False, True))
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
def test_a_compiled_loss_gives_the_same_results(objective):
    check("discrete", objective=objective)


def test_a_compiled_loss_of_numbers_as_actions_gives_the_same_results():
    check("box", normalise_observations=True, vtrace=True)


@pytest.mark.parametrize("collector", ["single", "multi_async"])
def test_a_run_compiles_its_loss(collector, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run.main([*SMALL, "algo.compile=true", f"collector={collector}"]) == 0
