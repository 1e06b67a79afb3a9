"""The loop that makes frames: the weights, random numbers and episodes of each step."""

from __future__ import annotations

import os

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from collectors.options.rollout_options import RolloutOptions
from collectors.rollout.frame_block import allocate, map_blocks
from collectors.rollout.make_environment import make_environments
from collectors.rollout.policy import PolicyCaller
from collectors.rollout.rollout import Rollout
from collectors.rollout.seeds import Seeds, untouched_streams
from collectors.rollout.spaces import is_reserved
from collectors.weights.rollout_weights import RolloutWeights
from tests.collectors.support import NUM_ACTIONS, CodeEnv, CodePolicy, make_env


class Waiting(RolloutWeights):
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


class Left(nn.Module):
    """Pushes CartPole to the left."""

    in_keys, out_keys = ("observation",), ("action",)

    def forward(self, observation):
        return torch.zeros(len(observation), dtype=torch.long)


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
    return Rollout(environments, acting, weights or RolloutWeights(), Seeds(0), **options)


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


def loaded_in_a_block(rollout, state, **options):
    results = []

    def poll():
        if rollout.t == 3 and not results:
            results.append(rollout.load_state_dict(state, **options))
        return True

    rollout.poll_control = poll
    collected(rollout, 5)
    return results[0]


@pytest.mark.parametrize(
    ("apply_at", "in_a_block", "options", "goes_on"),
    [
        ("step", False, {}, True),
        ("batch", False, {"has_weights": False}, True),
        ("episode", False, {}, False),  # the weights of the current episode are gone
        ("episode", False, {"has_weights": True}, True),
        ("episode", False, {"has_weights": True, "goes_on": False}, False),
        ("step", False, {"goes_on": False}, False),
        ("step", True, {"has_weights": True}, False),
    ],
)
def test_a_state_is_gone_on_with_where_its_weights_and_its_place_are_there(
    apply_at, in_a_block, options, goes_on
):
    def make():
        options = RolloutOptions(apply_at=apply_at)
        return rollout_of(Left(), make=lambda: gym.make("CartPole-v1"), options=options)

    with untouched_streams():
        first = make()
        assert list(first.counters) == [0] * len(first.counters)
        collected(first, 5)
        state = first.state_dict()
        second = make()
        del state["policy"]  # run directories of earlier versions have none
        if in_a_block:
            restored = loaded_in_a_block(second, state, **options)
        else:
            restored = second.load_state_dict(state, **options)
        assert restored.under_way == goes_on
        assert restored.lost == []
        same = np.array_equal(second.environments.current[0], first.environments.current[0])
        assert same == goes_on


@pytest.mark.parametrize(
    ("key", "is_taken"),
    [
        (("next",), True),
        (("next", "reward"), True),
        (("next", "observation"), True),
        (("next", "count"), False),
        (("next", "deep", "reward"), False),
        (("observation",), True),
        (("observation", "deep"), False),
        (("policy_version",), True),
        (("action", "deep"), True),
        (("action",), False),
        (("value",), False),
    ],
)
def test_outputs_of_a_policy_may_not_have_the_names_of_other_entries(key, is_taken):
    assert is_reserved(key, [("observation",)]) == is_taken


def test_blocks_in_shared_memory_are_the_same_for_all_who_map_them():
    layout = rollout_of(CodePolicy()).plan(5)
    fd = os.memfd_create("lockstep-test")
    try:
        ours, theirs = map_blocks(fd, layout, 3), map_blocks(fd, layout, 3)
    finally:
        os.close(fd)
    for number, (block, other) in enumerate(zip(ours, theirs, strict=True)):
        block.reward[...] = number + 1
        block.version[...] = 10 * number
        assert (other.reward == number + 1).all()
    assert [float(block.reward.sum()) for block in theirs] == [5, 10, 15]
    assert [int(block.version.sum()) for block in theirs] == [0, 50, 100]


def test_a_policy_is_called_on_the_device_that_is_named_or_else_on_its_own():
    def device(policy, name=None):
        named = None if name is None else torch.device(name)
        return PolicyCaller(policy, [], device=named).device

    assert device(nn.Linear(3, 1)) is None  # in CPU memory nothing is moved
    assert device(nn.Linear(3, 1), "meta") == torch.device("meta")
    assert device(nn.Linear(3, 1, device="meta")) == torch.device("meta")
    assert device(nn.Linear(3, 1, device="meta"), "cpu") is None
