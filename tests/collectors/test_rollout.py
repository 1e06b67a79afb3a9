"""The loop that makes frames: the weights, random numbers and episodes of each step."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from collectors.rollout.frame_block import allocate
from collectors.rollout.loop import Rollout
from collectors.rollout.make_environment import make_environments
from collectors.rollout.policy import PolicyCaller
from collectors.rollout.seeds import Seeds, untouched_streams
from collectors.weights.receiver import WeightReceiver
from tests.collectors.support import NUM_ACTIONS, CodeEnv, CodePolicy, make_env


class Waiting(WeightReceiver):
    """Version 1 has come by the first step."""

    def __init__(self, policy: nn.Module):
        self.policy = policy

    def has_news(self) -> bool:
        return self.version == 0

    def take(self) -> None:
        with torch.no_grad():
            self.policy.number.fill_(1)
        self.version = 1


class Drawing(CodePolicy):
    """Draws its actions, and puts out what it drew."""

    out_keys = ("action", "drawn", "weights")

    def forward(self, observation, *_):
        drawn = torch.rand(len(observation))
        weights = self.number.expand(len(drawn)).clone()
        return (drawn * NUM_ACTIONS).long(), drawn, weights


class Remembering(Drawing):
    """The same, with a state."""

    in_keys = ("observation", "count")
    out_keys = (*Drawing.out_keys, ("next", "count"))

    def forward(self, observation, count):
        count = torch.zeros(len(observation)) if count is None else count
        return *super().forward(observation), count + 1


def rollout_of(policy, kind="one", weights=None, make=None, **options):
    environments = make_environments(make or (lambda: make_env(kind)))
    acting = PolicyCaller(policy, environments.observations)
    return Rollout(environments, acting, weights or WeightReceiver(), Seeds(0), **options)


def collected(rollout, steps=6):
    """One block, and the policy's outputs in it by key."""
    frames = allocate(rollout.plan(steps))
    rollout.collect(frames)
    keys = [field.key for field in frames.layout.outputs]
    return frames, dict(zip(keys, frames.outputs, strict=True))


def test_no_frame_with_newer_weights_has_the_outputs_that_showed_the_policys_shapes():
    policy = CodePolicy()
    with untouched_streams():
        frames, outputs = collected(rollout_of(policy, weights=Waiting(policy)), 4)
    assert frames.version.tolist() == [[1]] * 4
    assert outputs["weights",].tolist() == [[1.0]] * 4


def test_a_policys_first_call_for_its_shapes_uses_up_no_random_numbers():
    def drawn(policy, **options):
        return collected(rollout_of(policy, **options))[1]["drawn",]

    policy = Drawing()
    with untouched_streams():
        expected = drawn(policy)
        assert torch.equal(drawn(policy, weights=Waiting(policy)), expected)
        assert torch.equal(drawn(policy, random_frames=2)[2:], expected[:-2])
        assert torch.equal(drawn(Remembering()), expected)
    assert len(expected.unique()) == len(expected)


def test_a_restart_after_the_policys_first_call_discards_the_outputs_of_that_call():
    with untouched_streams():
        rollout = rollout_of(CodePolicy())
        rollout.plan(6)
        rollout.restart()
        frames, outputs = collected(rollout)
    assert torch.equal(outputs["seen",], frames.observations[0][:-1])


class DrawsAtReset(CodeEnv):
    """Keeps what it drew from torch's global stream at its last reset."""

    def reset(self, **options):
        self.drawn = float(torch.rand(()))
        return super().reset(**options)


def test_a_restart_after_the_policys_first_call_gives_its_random_numbers_back():
    def drawn(plan_first):
        rollout = rollout_of(Drawing(), make=DrawsAtReset)
        collected(rollout)
        if plan_first:
            rollout.plan(4)  # of another length, so it calls the policy
        rollout.restart()
        outputs = collected(rollout, 4)[1]
        return [rollout.attribute("drawn"), *outputs["drawn",].flatten().tolist()]

    with untouched_streams():
        assert drawn(plan_first=True) == drawn(plan_first=False)


def test_a_restart_of_one_environment_in_the_middle_of_a_block_leaves_the_others_alone():
    def block(interrupted):
        def poll():
            if rollout.t == 2 and interrupted:
                rollout.restart(np.array([False, True, False]))
            return True

        rollout = rollout_of(CodePolicy(), "sync_disabled", poll_control=poll)
        return collected(rollout)[0]

    with untouched_streams():
        whole, cut = block(False), block(True)
    others = [0, 2]
    for name in ("truncated", "terminated", "is_init", "reward"):
        assert np.array_equal(getattr(cut, name)[:, others], getattr(whole, name)[:, others])
    assert torch.equal(cut.observations[0][:, others], whole.observations[0][:, others])
    assert not whole.truncated[1, 1]
    assert cut.truncated[1, 1]
    assert cut.is_init[2, 1]
