"""The loop that makes frames, with weights that come at a chosen moment."""

from __future__ import annotations

import torch

from collectors.rollout.frame_block import allocate
from collectors.rollout.loop import Rollout
from collectors.rollout.make_environment import make_environments
from collectors.rollout.policy import PolicyCaller
from collectors.rollout.seeds import Seeds
from collectors.weights.receiver import WeightReceiver
from tests.collectors.support import CodeEnv, CodePolicy


class Waiting(WeightReceiver):
    """Version 1 has come by the first step."""

    def __init__(self, policy: CodePolicy):
        self.policy = policy

    def has_news(self) -> bool:
        return self.version == 0

    def take(self) -> None:
        with torch.no_grad():
            self.policy.number.fill_(1)
        self.version = 1


def test_no_frame_with_newer_weights_has_what_the_policy_said_for_its_shapes():
    policy, environments = CodePolicy(), make_environments(CodeEnv)
    acting = PolicyCaller(policy, environments.observations)
    rollout = Rollout(environments, acting, Waiting(policy), Seeds(0))
    frames = allocate(rollout.plan(4))
    rollout.collect(frames)
    (weights,) = (out for out in frames.outputs if out.shape[2:] == ())
    assert frames.version.tolist() == [[1]] * 4
    assert weights.tolist() == [[1.0]] * 4
